"""Resolution of the named models: loads a target, its draft, the second-level draft, and the tokenizer that they share."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from subprocess import Popen
from typing import Literal, TypeVar, cast

from specdec.argument_checks import CheckpointWarning, JSONObject, check_ints, check_string, is_list, shorten
from specdec.draft.acceptance import LOOKUP_ACCEPTANCE, MARGIN_ACCEPTANCE, Acceptance
from specdec.draft.cost_calibration import measure
from specdec.draft.draft_length import CostCurve, CostModel, DraftLengthPolicy
from specdec.draft.lookup import LookupDrafter, warm_up_lookup
from specdec.draft.model_drafters import ModelDrafter
from specdec.draft.precompile_models import compile_passes
from specdec.draft.settings import AUTO, QuantizeOptions, SpeculativeSettings, parse_quantize
from specdec.layers.weights import Weights
from specdec.loaders import Checkpoint, CheckpointError, check_compatibility, load_builtin_head
from specdec.loaders.model_loader import TARGET_MEMORY_SHARE, Loader, get_memory_headroom, open_checkpoint
from specdec.model.kv_cache import MIN_TRIMMED_ROWS, KVCache
from specdec.model.model import Model
from specdec.model_config import ASSISTANT, ModelConfig
from specdec.protocols import Drafter
from specdec.quant import WeightFormat
from specdec.quant.packed_matrix import convert
from specdec.runtime.garbage_collection import pause_garbage_collection
from specdec.sampling import Sampler, Sampling
from specdec.text.tokenizer_lookup import (
    SharedVocabulary,
    assume_shared_vocabulary,
    count_known_ids,
    resolve_shared_vocabulary,
    resolve_tokenizer,
)
from specdec.tokenizer import AnyTokenizer
from specdec.verification import Verifier

SELF = "self"  # draft keyword: a copy of the target in fewer bits
MTP = "mtp"  # draft keyword: the head in the target's own file or next to it
HEAD = "head"  # name in `ModelBundle.models` of a draft that is a head
LOOKUP: Literal["lookup"] = "lookup"  # draft keyword: what followed earlier, and what the target found likely
DraftSpec = str | os.PathLike[str] | Model
ModelT = TypeVar("ModelT", bound=Model)


@dataclass(frozen=True)
class DraftSource:
    """A source of draft tokens for a target: a draft model, lookup or nothing, with the vocabulary that both share.

    Attributes:
        model_or_lookup: A model, "lookup", or None for no draft.
        vocabulary: The token ids that the target and the draft can generate.
        load_seconds: How long loading the model took.
    """

    model_or_lookup: Model | Literal["lookup"] | None
    vocabulary: SharedVocabulary
    load_seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether there is no draft."""
        return self.model_or_lookup is None

    @property
    def model(self) -> Model | None:
        """The draft model, which may be a head; None if the source is lookup or nothing."""
        return self.model_or_lookup if isinstance(self.model_or_lookup, Model) else None

    @property
    def reads_target(self) -> bool:
        """Whether the source is a head, which drafts from its target's hidden states."""
        return self.model is not None and bool(self.model.target_layers)

    @property
    def prior_acceptance(self) -> Sequence[float]:
        """The assumed acceptance probability of draft tokens in each confidence bucket, before any observation."""
        return MARGIN_ACCEPTANCE if self.model else LOOKUP_ACCEPTANCE

    def new_cache(self, target_cache: KVCache) -> KVCache | None:
        """Return an empty KV cache of the model for the sequence of a target's cache; None without a model."""
        return self.model.new_draft_cache(target_cache) if self.model else None

    def make_drafter(
        self,
        cache: KVCache | None,
        sampler: Sampler,
        noise: Callable[[int], int],
        eos_tokens: Collection[int],
        can_trim: bool = False,
    ) -> ModelDrafter | LookupDrafter | None:
        """Return a new drafter for one sequence from this source, or None for no draft.

        Args:
            cache: The cache that `new_cache` returned for the sequence.
            sampler: See `ModelDrafter`; not used by lookup.
            noise: See `ModelDrafter`; not used by lookup.
            eos_tokens: End-of-sequence tokens; a proposal ends with the first one.
            can_trim: See `ModelDrafter`; not used by lookup.
        """
        if cache:
            return ModelDrafter(cache, sampler, noise, eos_tokens, can_trim)
        return None if self.is_empty else LookupDrafter(eos_tokens)


@dataclass(frozen=True)
class SequenceCaches:
    """The KV caches of all models of a bundle for one sequence; None for a model that the bundle does not have."""

    target: KVCache
    draft: KVCache | None
    stage: KVCache | None

    @property
    def drafts(self) -> list[KVCache]:
        """The caches of the draft and the stage, as far as there are any."""
        return [cache for cache in (self.draft, self.stage) if cache]

    @property
    def all(self) -> list[KVCache]:
        """The caches that there are, the target's first."""
        return [self.target, *self.drafts]


@dataclass(frozen=True)
class DraftResolver:
    """A loader of drafts for one target, which turns the name of a draft, or a loaded model, into a `DraftSource`.

    Attributes:
        target: The target.
        tokenizer: The target's tokenizer.
        gguf_metadata: The metadata of the GGUF file from which the tokenizer was made; empty if it was made from another file.
        quantize_options: The weight formats to which float models are quantized.
        loader: Loads models.
        checkpoint: The target's file, if the target was named.
    """

    target: Model
    tokenizer: AnyTokenizer
    gguf_metadata: JSONObject
    quantize_options: QuantizeOptions
    loader: Loader
    checkpoint: Checkpoint | None = None

    def resolve(self, parameter: str, draft: DraftSpec | DraftSource | None) -> DraftSource:
        """Load a draft if it is named, check that it fits the target, and return it as a `DraftSource`.

        The model in the result is a copy with fewer positions, which shares the weights, if memory is short. Warns with
        CheckpointWarning if a weight format was requested for a draft that is not loaded here.

        Args:
            parameter: "draft" or "stage", for error messages.
            draft: The name of the draft, or the draft itself.

        Raises:
            CheckpointError: If a file cannot be used, or is a head for another target.
            ValueError: If the draft does not fit the target.
        """
        begin = time.perf_counter()
        source = self._resolve(parameter, draft)
        if parameter == "draft" and self.quantize_options.draft and (not source.model or isinstance(draft, Model | DraftSource)):
            reason = "it is a loaded model, which keeps its weights" if source.model else "it has no weights"
            line = f"{self.quantize_options.draft.name} weights were requested for the draft, but {reason}"
            warnings.warn(line, CheckpointWarning, stacklevel=2)
        return replace(source, load_seconds=time.perf_counter() - begin)

    def _resolve(self, parameter: str, draft: DraftSpec | DraftSource | None) -> DraftSource:
        if isinstance(draft, DraftSource):  # from a pickled decoder, with its vocabulary
            model = None if draft.reads_target else draft.model
            return replace(draft, model_or_lookup=self._fit_to_memory(model, model.weights.n_bytes)) if model else draft
        n_target = count_known_ids(self.tokenizer, self.target.config.vocab_size)
        same_vocabulary = SharedVocabulary(n_target, n_target)
        if draft is None:
            return DraftSource(None, same_vocabulary)
        if is_draft_keyword(draft, LOOKUP):
            return DraftSource(LOOKUP, same_vocabulary)
        if is_draft_keyword(draft, AUTO, MTP):
            head = self._find_builtin_head(is_requested=draft == MTP)
            return DraftSource(self._load_head(head) if head else LOOKUP, same_vocabulary)
        if is_draft_keyword(draft, SELF):
            from specdec.draft.self_copy import make_self_draft

            copy = make_self_draft(self.target, self.quantize_options.draft, self.tokenizer.encode, self.loader)
            return DraftSource(self._fit_to_memory(copy, copy.weights.n_bytes), same_vocabulary)
        rows, name = self.target.config.vocab_size, f"the {parameter}"
        if isinstance(draft, Model) and not draft.can_draft_for(self.target):
            raise ValueError(f"{name} is a head of another target; a head drafts only from the passes of its own target")
        if isinstance(draft, Model) and draft.target_layers:
            return DraftSource(draft, same_vocabulary)
        if isinstance(draft, Model):
            vocabulary = assume_shared_vocabulary(self.tokenizer, rows, name, draft.config.vocab_size)
            return DraftSource(self._fit_to_memory(draft, draft.weights.n_bytes), vocabulary)
        source = open_checkpoint(parameter, draft)
        if source.config.head:
            return DraftSource(self._load_head(source), same_vocabulary)
        vocabulary = resolve_shared_vocabulary(self.tokenizer, rows, self.gguf_metadata, name, source)
        weight_format = self.quantize_options.choose_draft_format(source)
        model = self.loader.load(source, weight_format, self.target.n_positions)
        warn_of_no_effect(parameter, self.quantize_options.draft, source, model.weights)
        model = self._fit_to_memory(model, model.weights.n_bytes)
        if vocabulary.target_ids:
            from specdec.draft.vocab_map import VocabMappedModel

            model = VocabMappedModel(model, vocabulary.target_ids, rows)
        return DraftSource(model, vocabulary)

    def _find_builtin_head(self, is_requested: bool) -> Checkpoint | None:
        """Return the draft head in the target's file or next to it, or None if there is none.

        Raises:
            ValueError: If the head is requested and missing.
        """
        if not is_requested:
            with suppress(CheckpointError):
                return load_builtin_head(self.checkpoint) if self.checkpoint else None
            return None
        if not self.checkpoint:
            raise ValueError(f'the draft "{MTP}" is a head in the target\'s file; name the target by its file')
        return load_requested_head(self.checkpoint)

    def _load_head(self, source: Checkpoint) -> Model:
        """Load and return the draft head in a checkpoint, with as many positions as fit into memory.

        Warns with CheckpointWarning if the head's file does not name the target's layers that it reads.

        Raises:
            CheckpointError: If the head is for another target.
        """
        check_compatibility(source, self.target.config)
        self._warn_about_layers(source)
        config, weight_format = source.config, self.quantize_options.choose_draft_format(source)
        weights = self.loader.pack(source, weight_format)
        if config.architecture == MTP and weight_format:
            config, weights = self._quantize_classifier(config, weights, weight_format)
        warn_of_no_effect("draft", self.quantize_options.draft, source, weights)
        from specdec.heads.shared_kv_head import get_head_class

        loader, n_positions = self.loader, min(self.target.n_positions, config.max_positions or self.target.n_positions)
        head_class = get_head_class(config)
        head = head_class(config, weights, self.target, source.target_ids, loader.n_threads, n_positions, loader.kv)
        return self._fit_to_memory(head, weights.n_bytes)  # without the weights that it borrows from the target

    def _warn_about_layers(self, source: Checkpoint) -> None:
        """Name the target's layers that an EAGLE-3 head reads in a CheckpointWarning, unless its file names them."""
        head = source.config.head
        if head and not head.target_layers and source.config.architecture != ASSISTANT:
            layers = ", ".join(map(str, head.get_target_layers(self.target.config.n_layers)))
            line = f"{source.path} does not name the target's layers whose inputs it reads; the usual ones are used: {layers}"
            warnings.warn(line, CheckpointWarning, stacklevel=2)

    def _quantize_classifier(
        self, config: ModelConfig, weights: Weights, weight_format: WeightFormat
    ) -> tuple[ModelConfig, Weights]:
        """Return a head's configuration and weights, with a quantized copy of the target's classifier if that is float.

        The copy has the draft's weight format. The head's layer is small compared with the classifier, which takes most time.
        """
        classifier = self.target.weights.matrices["classifier"]
        if not config.head or classifier.group_size:  # float matrices have no groups
            return config, weights
        copy = convert(classifier, weight_format.embedding_format or weight_format)
        own_config = replace(config, head=replace(config.head, own_classifier=True))
        return own_config, Weights(weights.shards | {"classifier": (copy,)}, weights.vectors)

    def _fit_to_memory(self, model: ModelT, n_bytes: int) -> ModelT:
        """Return a draft model with as many positions as fit into memory next to the target, at most the target's number.

        This is the model itself if it has all of the target's positions and they fit, otherwise a copy with the same weights.
        In a longer sequence, a draft model sees a window of the last tokens, and a draft head stops drafting.

        Args:
            model: The draft model or draft head.
            n_bytes: Size of its weights in bytes.
        """
        max_positions = self.target.n_positions
        n = model.find_max_positions((1 - TARGET_MEMORY_SHARE) * get_memory_headroom(self.target) - n_bytes, max_positions)
        if model.n_positions < n or n < max_positions:
            return cast(ModelT, model.with_capacity(n))
        return model


@dataclass(frozen=True)
class ModelBundle:
    """The models of a decoder and their tokenizer.

    Attributes:
        target: The target.
        draft: The source of draft tokens for the target.
        stage: The second-level source, which drafts for the draft model.
        tokenizer: The tokenizer of all models.
        checkpoint: The target's file, without its tensors, if the target was named.
        can_choose_threads: Whether the autotuner may choose the number of threads.
        compile_processes: Processes that compile the code of forward passes.
    """

    target: Model
    draft: DraftSource
    stage: DraftSource
    tokenizer: AnyTokenizer
    checkpoint: Checkpoint | None = None
    can_choose_threads: bool = False
    compile_processes: Sequence[Popen[bytes]] = ()

    @property
    def models(self) -> dict[str, Model]:
        """The loaded models by name ("target", "draft" or "head", "stage"), the target first; lookup has no model."""
        draft = HEAD if self.draft.reads_target else "draft"
        named = {"target": self.target, draft: self.draft.model, "stage": self.stage.model}
        return {name: model for name, model in named.items() if model}

    @property
    def uses_lookup(self) -> bool:
        """Whether the draft is looked up, without a model."""
        return self.draft.model_or_lookup == LOOKUP

    @property
    def tree_incompatibility(self) -> str:
        """The reason, as an error message, why proposals cannot be token trees; an empty string if they can."""
        if not self.stage.is_empty:
            return 'a draft with a stage proposes chains; leave out the stage, or tree "on"'
        if HEAD in self.models:
            return 'a head proposes chains; leave out tree "on"'
        chain_only = next((name for name, model in self.models.items() if not model.can_run_trees), None)
        reason = f'trees are not supported by the {chain_only}: its recurrent state holds one sequence; leave out tree "on"'
        return reason if chain_only else ""

    def _drafts_trees(self, settings: SpeculativeSettings, is_alone: bool = True) -> bool:
        """Return whether the draft model proposes token trees for a sequence with these settings."""
        is_requested = settings.tree == "on" and (is_alone or settings.verify != "coupled")
        return is_requested and self.draft.model is not None and not self.tree_incompatibility

    def can_lookup_branch(self, settings: SpeculativeSettings) -> bool:
        """Return whether looked-up proposals of a sequence with these settings may be token trees, where these are profitable."""
        return self.uses_lookup and settings.tree != "off" and settings.is_adaptive and not self.tree_incompatibility

    def can_branch(self, settings: SpeculativeSettings) -> bool:
        """Return whether proposals of a sequence with these settings may be token trees."""
        return self._drafts_trees(settings) or self.can_lookup_branch(settings)

    def make_drafter(
        self,
        caches: SequenceCaches,
        sampling: Sampling,
        verifier: Verifier,
        settings: SpeculativeSettings,
        is_alone: bool,
        calibration: tuple[CostCurve, Acceptance] | None,
    ) -> Drafter | None:
        """Return a tree, staged or plain drafter for one sequence, or None without a draft.

        Args:
            caches: The KV caches for the sequence.
            sampling: The sampling parameters of the target.
            verifier: The verifier of the proposals.
            settings: The settings of speculative decoding.
            is_alone: Whether the sequence's batch is only this sequence.
            calibration: The result of `measure_draft`, if that was called.
        """
        vocabulary, eos_tokens, noise = self.draft.vocabulary, self.tokenizer.eos_tokens, verifier.get_draft_stream
        sampler = Sampler(vocabulary.n_target, sampling, vocabulary.n_common)
        if self._drafts_trees(settings, is_alone) and caches.draft:
            from specdec.draft.tree import TreeDrafter

            return TreeDrafter(caches.draft, sampler, noise, eos_tokens, verifier.is_coupled)
        stage_sampler = Sampler(vocabulary.n_target, sampling, self.stage.vocabulary.n_common)
        second_level = self.stage.make_drafter(caches.stage, stage_sampler, noise, eos_tokens)
        if calibration and second_level:
            from specdec.draft.staged import StagedDrafter

            costs, acceptance = CostModel(calibration[0]), calibration[1]
            policy = DraftLengthPolicy(costs, acceptance, is_free=self.stage.model is None)
            return StagedDrafter(caches.drafts, second_level, costs, policy, sampler, noise, eos_tokens)
        # with other verifiers the output depends on the draft, so matches in the sequence alone are looked up
        return self.draft.make_drafter(caches.draft, sampler, noise, eos_tokens, verifier.is_coupled)

    def measure_draft(self) -> tuple[CostCurve, Acceptance] | None:
        """Measure and return the costs of a draft with a second level, and the acceptance of that; None for other drafts."""
        if self.stage.is_empty or not (caches := self.new_caches()).draft:
            return None
        return measure(caches.draft, caches.stage, self.draft.vocabulary), Acceptance(self.stage.prior_acceptance)

    def list_warm_ups(self, settings: SpeculativeSettings) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the tasks, with their names, that compile or load the code of drafters, next to that of forward passes."""
        if LOOKUP in (self.draft.model_or_lookup, self.stage.model_or_lookup):
            yield "lookup", warm_up_lookup
        if self.can_branch(settings):
            from specdec.draft.tree import warm_up_trees

            yield "trees", lambda: warm_up_trees(self.new_caches().all, self.draft.vocabulary)

    def new_caches(self) -> SequenceCaches:
        """Return empty KV caches for a new sequence."""
        target = self.target.new_cache(self.draft.model.target_layers if self.draft.model else ())
        return SequenceCaches(target, self.draft.new_cache(target), self.stage.new_cache(target))

    def get_sequence_bytes(self, n_tokens: int) -> int:
        """Return the memory in bytes that the KV caches of all models take for one more sequence of n_tokens tokens."""
        from specdec.model.trimmed_classifier import count_panel_bytes

        draft = self.draft.model
        n_hidden_layers = len(draft.target_layers) if draft else 0
        n_bytes = sum(
            model.get_sequence_bytes(min(n_tokens, model.n_positions), True, n_hidden_layers if model is self.target else 0)
            for model in self.models.values()
        )
        if draft and draft.weights.matrices["classifier"].n_rows >= MIN_TRIMMED_ROWS:
            n_bytes += count_panel_bytes(draft)
        return n_bytes

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, given as a string or as token ids, which are checked.

        Raises:
            ValueError: If the prompt has no ids, an id that the target does not have, or more tokens than the context holds.
            TypeError: If the prompt is neither a string nor integers.
        """
        if isinstance(prompt, str) or not is_list(prompt):
            tokens = self.tokenizer.encode(check_string("prompt", prompt))
        else:
            tokens, max_id = check_ints("the prompt's ids", prompt), self.n_ids - 1
            if not tokens or not 0 <= min(tokens) <= max(tokens) <= max_id:
                raise ValueError(f"prompt is {shorten(tokens)}; expected a string, or token ids from 0 to {max_id}")
        if len(tokens) > self.target.n_positions:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the target's context holds {self.target.n_positions}")
        return tokens

    @property
    def n_ids(self) -> int:
        """The number of token ids that the target can generate: 0 to n_ids - 1."""
        return self.draft.vocabulary.n_target

    @property
    def recompute_lengths(self) -> set[int]:
        """The lengths beyond which a sequence is prefilled again, since a model with LongRoPE switches its factors there."""
        return {model.config.rope.longrope_threshold for model in self.models.values()} - {0}

    @property
    def weights(self) -> str:
        """The weight formats of all models as text, such as "target fp32, draft int8", with the numbers in `shared`."""
        shared = {name: f" ({n:,} of {self.n_ids:,} tokens)" for name, n in self.shared.items()}
        return ", ".join(f"{name} {model.weights.format_names}{shared.get(name, '')}" for name, model in self.models.items())

    @property
    def draft_summary(self) -> str:
        """The formats, memory and load time of the draft model, such as "int4, 355 MB, loaded in 0.4 s"; "" without one."""
        if not (draft := self.draft.model):
            return ""
        borrowed = {id(matrix) for matrix in self.target.weights.matrices.values()}  # by a head
        own = {name: shards for name, shards in draft.weights.shards.items() if id(shards[0]) not in borrowed}
        megabytes = Weights(own, draft.weights.vectors).n_bytes / 10**6
        return f"{draft.weights.format_names}, {megabytes:,.1f} MB, loaded in {self.draft.load_seconds:.1f} s"

    @property
    def shared(self) -> dict[str, int]:
        """The number of tokens shared with the target, by "draft", "head" or "stage", for each model that lacks some of them."""
        shared = {name: model.n_shared_tokens for name, model in self.models.items()}
        return {name: n for name, n in shared.items() if n is not None and n < self.n_ids}

    @property
    def notes(self) -> list[str]:
        """Notes on what limits the drafts: another vocabulary, or no fewer bytes than the model that they draft for."""
        notes = list[str]()
        for name, n in self.shared.items():
            if name != HEAD:  # heads share few tokens by design
                known = f"{n:,} of the target's {self.n_ids:,} tokens"
                notes.append(f"the {name} has another vocabulary, with {known}, and proposes only those")
        for (larger, larger_model), (smaller, smaller_model) in itertools.pairwise(self.models.items()):
            smaller_mb, larger_mb = (each.weights.n_bytes / 10**6 for each in (smaller_model, larger_model))
            if smaller_mb >= larger_mb and not smaller_model.config.experts:  # a token reads only a few experts
                sizes = f"({smaller_mb:,.1f} and {larger_mb:,.1f} MB of weights)"
                advice = "so it saves no time; name the large model with target=..."
                notes.append(f"the {smaller} is not smaller than the {larger} {sizes}, {advice}")
        return notes


@pause_garbage_collection()
def load_bundle(
    target: str | os.PathLike[str] | Model,
    draft: DraftSpec | None,
    stage: DraftSpec | None,
    tokenizer: str | os.PathLike[str] | AnyTokenizer | None,
    quantize: str,
    loader: Loader,
) -> ModelBundle:
    """Load a target, its draft, the second-level draft and the tokenizer, and return them as a `ModelBundle`.

    Processes that compile the code of forward passes are started and go on in the background. The arguments are those of
    `SpeculativeDecoder`. Errors in the tokenizer are raised before weights are read.

    Raises:
        CheckpointError: If a model file cannot be used.
        TokenizerError: If a tokenizer file cannot be used.
        ValueError: If values or models do not fit together.
    """
    _check_models(target, draft, stage)
    has_loaded_models = any(isinstance(model, Model) for model in (target, draft, stage))
    quantize_options = parse_quantize(quantize)
    checkpoint: Checkpoint | None = None
    gguf_metadata: JSONObject = {}
    compile_processes = list[Popen[bytes]]()
    if isinstance(target, Model):
        loaded_tokenizer = resolve_tokenizer(tokenizer, None, target.config.vocab_size)
    else:
        checkpoint = open_checkpoint("target", target)
        loaded_tokenizer = resolve_tokenizer(tokenizer, checkpoint, checkpoint.config.vocab_size)
        count_known_ids(loaded_tokenizer, checkpoint.config.vocab_size)
        gguf_metadata = checkpoint.vocabulary if tokenizer is None else {}
        check_draft_keyword(draft, checkpoint, quantize_options)
        is_named = draft is not None and not is_draft_keyword(draft, LOOKUP, AUTO, MTP)
        # most drafts have the architecture of their target, so their code is compiled too
        likely = [loader.choose_weight_format(checkpoint, quantize_options.target)]
        likely += [quantize_options.choose_draft_format(checkpoint)] * is_named
        compile_processes = compile_passes(checkpoint.config, checkpoint.tensors, likely, loader.kv)
        target = loader.load(checkpoint, quantize_options.target)
        warn_of_no_effect("target", quantize_options.target, checkpoint, target.weights)
        checkpoint = replace(checkpoint, tensors={})
    loader = replace(loader, kv=target.kv if loader.kv == "auto" else loader.kv)  # drafts use the target's KV cache format
    resolver = DraftResolver(target, loaded_tokenizer, gguf_metadata, quantize_options, loader, checkpoint)
    draft_source = resolver.resolve("draft", draft)
    if stage is not None and draft_source.reads_target:
        raise ValueError("a stage is not supported for a head, which drafts from its target's passes; leave out the stage")
    can_choose_threads = not has_loaded_models and loader.n_threads is None
    return ModelBundle(
        target,
        draft_source,
        resolver.resolve("stage", stage),
        loaded_tokenizer,
        checkpoint,
        can_choose_threads,
        compile_processes,
    )


def _check_models(target: str | os.PathLike[str] | Model, draft: DraftSpec | None, stage: DraftSpec | None) -> None:
    """Raise ValueError if a target, a draft and a stage cannot be used together, whatever is in their files."""
    if stage is not None and (draft is None or is_draft_keyword(draft, LOOKUP, AUTO)):
        raise ValueError("a stage needs a draft that is a model, and there is none; name one with draft=...")
    if is_draft_keyword(stage, SELF):
        raise ValueError('the stage "self" is not supported: a copy of the target is not smaller than the draft')
    if is_draft_keyword(stage, AUTO, MTP):
        raise ValueError(f"the stage {stage!r} is not supported: a head drafts only for its target")
    given = {"target": target, "draft": draft, "stage": stage}
    loaded = {name: model for name, model in given.items() if isinstance(model, Model)}
    if isinstance(target, Model) and target.target_layers:
        raise ValueError("the target is a head, which can only draft for another model")
    for (one, model), (other, another) in itertools.combinations(loaded.items(), 2):
        if model is another:
            raise ValueError(f"{one} and {other} are the same object; each needs its own KV cache")


def check_draft_keyword(draft: DraftSpec | None, target: Checkpoint, quantize_options: QuantizeOptions) -> None:
    """Check that a target has a head if the draft is "mtp", and is no smaller than its copy if it is "self"; reads no weights.

    Raises:
        ValueError: If it is not so.
    """
    if is_draft_keyword(draft, MTP):
        load_requested_head(target)
    if is_draft_keyword(draft, SELF) and not quantize_options.target:
        from specdec.draft.self_copy import can_self_draft

        if not can_self_draft(target.config, target.tensors, quantize_options.draft):
            raise ValueError(
                f"{target.path} has few bits already, so a quantized copy ({SELF}) is not a faster draft; name another draft"
            )


def load_requested_head(target: Checkpoint) -> Checkpoint:
    """Return the draft head in a target's file or next to it.

    Raises:
        ValueError: If there is none.
    """
    if not (head := load_builtin_head(target)):
        expected = "expected one among its own tensors, an mtp-*.gguf next to it, or an assistant in or next to its folder"
        raise ValueError(f"{target.path} has no built-in head ({MTP}); {expected}")
    return head


def warn_of_no_effect(parameter: str, weight_format: WeightFormat | None, checkpoint: Checkpoint, weights: Weights) -> None:
    """Warn with CheckpointWarning if a weight format was requested for a model, but all of its matrices kept their own."""
    names = weights.format_names
    if weight_format and weight_format.name not in names:
        warnings.warn(
            f"{checkpoint.path} stays {names}: {weight_format.name} would not make this {parameter} much smaller",
            CheckpointWarning,
            stacklevel=2,
        )


def is_draft_keyword(draft: object, *keywords: str) -> bool:
    """Return whether a draft is given as one of the keywords, such as "auto"; models, arrays and paths are not."""
    return isinstance(draft, str) and draft in keywords  # an array would compare with a string element by element
