"""Who writes a text: a target, what drafts for it and what drafts for that, and the tokenizer that they share."""

import itertools
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from subprocess import Popen
from typing import Any, Literal, TypeVar, cast

from specdec.config import ASSISTANT, Config
from specdec.draft.acceptance import MARGIN_RATES, ODDS_RATES
from specdec.draft.model import HeadDrafter, ModelDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.precompile import compile_passes
from specdec.draft.self_copy import Kinds, copy_of, kinds_to_make
from specdec.draft.settings import AUTO
from specdec.draft.vocab_map import Translated
from specdec.engine.decoding import Job
from specdec.engine.prefix_cache import PromptCache
from specdec.heads.head import Head
from specdec.heads.shared_kv_head import Assistant
from specdec.layers.base import Weights
from specdec.loaders import Checkpoint, CheckpointError
from specdec.loaders.builtin_heads import own_head
from specdec.loaders.head_compatibility import check_fit
from specdec.loaders.loader import TARGET_SHARE, Loader, check_memory, opened, room_beside
from specdec.model.transformer import Transformer
from specdec.quant.matrix import converted
from specdec.sampling import Sampler, Sampling
from specdec.text.detokenizer import Wording
from specdec.text.structured_output import check_shape
from specdec.text.tokenizer_lookup import tokenizer_of, vocabulary_with
from specdec.text.vocabulary import Vocabulary, known_ids, presumed_vocabulary
from specdec.tokenizer import AnyTokenizer
from specdec.validation import ids, is_list, known, short, strings, text, whole

SELF = "self"  # as a draft: a copy of the target in fewer bits
MTP = "mtp"  # as a draft: the head in the target's own file, or beside it
HEAD = "head"  # what a draft that is one is called among models
NGRAM: Literal["ngram"] = "ngram"  # as a draft: what followed in the text before
Draftable = str | os.PathLike[str] | Transformer
Model = TypeVar("Model", bound=Transformer)


@dataclass(frozen=True)
class Origin:
    """Where proposals come from: a model, n-grams, or None, nowhere; vocabulary: the ids that the target and it may say."""

    source: Transformer | Literal["ngram"] | None
    vocabulary: Vocabulary

    @property
    def model(self) -> Transformer | None:
        return self.source if isinstance(self.source, Transformer) else None

    @property
    def head(self) -> Head | None:
        return self.source if isinstance(self.source, Head) else None

    @property
    def rates(self) -> Sequence[float]:
        """How often its proposals stand, by their confidence, before any was seen."""
        return MARGIN_RATES if self.model else ODDS_RATES

    def drafter(
        self, sampler: Sampler, noise: Callable[[int], int], end_marks: Container[int]
    ) -> ModelDrafter | NgramDrafter | None:
        """What proposes a text's tokens."""
        if self.head:
            return HeadDrafter(self.head, sampler, noise, end_marks)
        if self.model:
            return ModelDrafter(self.model, sampler, noise, end_marks)
        return NgramDrafter(end_marks) if self.source else None

    def seat(self, target: Transformer) -> "Origin":
        """The same with a cache of its own, for another text on a seat of its target."""
        if self.head:
            return replace(self, source=self.head.of(target))
        return replace(self, source=self.model.with_positions(self.model.n_positions)) if self.model else self


@dataclass(frozen=True)
class Finder:
    """What drafts for a target, by what was named.

    keys: of the GGUF file that the target's tokenizer was made of; source: the target's file, of one that was named.
    """

    target: Transformer
    tokenizer: AnyTokenizer
    keys: Mapping[str, Any]
    kinds: Kinds
    loader: Loader
    source: Checkpoint | None = None

    def origin(self, parameter: str, draft: Draftable | Origin | None) -> Origin:
        """parameter: "draft" or "stage", in errors. Raises what `SpeculativeDecoder` does."""
        if isinstance(draft, Origin):  # a pickled decoder's, which knows what its ids mean
            model = None if draft.head else draft.model
            return replace(draft, source=self._with_room(model, model.weights.n_bytes)) if model else draft
        n_target = known_ids(self.tokenizer, self.target.config.vocab_size)
        own = Vocabulary(n_target, n_target)
        if draft is None:
            return Origin(None, own)
        if is_word(draft, NGRAM):
            return Origin(NGRAM, own)
        if is_word(draft, AUTO, MTP):
            head = self._own_head(is_asked=draft == MTP)
            return Origin(self._head(head) if head else NGRAM, own)
        if is_word(draft, SELF):
            asked = self.kinds.draft if self.kinds.is_asked else None
            copy = copy_of(self.target, asked, self.tokenizer.encode, self.loader)
            return Origin(self._with_room(copy, copy.weights.n_bytes), own)
        rows, name = self.target.config.vocab_size, f"the {parameter}"
        if isinstance(draft, Head):
            if draft.target is not self.target:
                raise ValueError(f"{name} is a head of another target, from whose passes alone it drafts")
            return Origin(draft, own)
        if isinstance(draft, Transformer):
            vocabulary = presumed_vocabulary(self.tokenizer, rows, name, draft.config.vocab_size)
            return Origin(self._with_room(draft, draft.weights.n_bytes), vocabulary)
        source = opened(parameter, draft)
        if source.config.head:
            return Origin(self._head(source), own)
        vocabulary = vocabulary_with(self.tokenizer, rows, self.keys, name, source)
        model = self.loader.load(source, self.kinds.draft, self.target.n_positions)
        model = self._with_room(model, model.weights.n_bytes)
        return Origin(Translated(model, vocabulary.target_ids, rows) if vocabulary.target_ids else model, vocabulary)

    def _own_head(self, is_asked: bool) -> Checkpoint | None:
        """The head in the target's file or beside it. Raises ValueError and CheckpointError where it is asked for in vain."""
        if not is_asked:
            with suppress(CheckpointError):
                return own_head(self.source) if self.source else None
            return None
        if not self.source:
            raise ValueError(f'the draft "{MTP}" is a head in the target\'s file; name the target by its file')
        if not (head := own_head(self.source)):
            expected = "expected one among its own tensors, or an assistant in its folder or beside it"
            raise ValueError(f"{self.source.path} brings no head along ({MTP}); {expected}")
        return head

    def _head(self, source: Checkpoint) -> Head:
        """The head in a checkpoint, on the target. Raises CheckpointError for one of another target."""
        check_fit(source, self.target.config)
        config, weights = source.config, self.loader.pack(source, self.kinds.draft)
        if config.architecture == MTP:
            config, weights = self._with_a_copy_of_the_classifier(config, weights)
        loader, n_positions = self.loader, self.target.n_positions
        kind = Assistant if config.architecture == ASSISTANT else Head
        head = kind(config, weights, self.target, source.target_ids, loader.n_threads, n_positions, loader.kv)
        return self._with_room(head, weights.n_bytes)  # without those that it borrows

    def _with_a_copy_of_the_classifier(self, config: Config, weights: Weights) -> tuple[Config, Weights]:
        """A head whose own layer is small beside the target's classifier: that in the draft's bits, where they are fewer."""
        of_target, kind = self.target.weights.matrices["classifier"], self.kinds.draft
        if not kind or not config.head or of_target.group:  # which floats have none of
            return config, weights
        copy = converted(of_target, kind.of_tables or kind)
        own = replace(config, head=replace(config.head, own_classifier=True))
        return own, Weights(weights.matrices | {"classifier": copy}, weights.vectors)

    def _with_room(self, model: Model, n_bytes: int) -> Model:
        """A model that sees as much of a text as the memory holds beside the target's; of what is beyond that a window.

        n_bytes: that its weights take. A head has no window: it drafts as long as it sees all of a text.
        """
        most = self.target.n_positions
        n = model.positions_within((1 - TARGET_SHARE) * room_beside(self.target) - n_bytes, most)
        if model.n_positions < n or n < most:
            return cast(Model, model.with_positions(n))
        return model


@dataclass(frozen=True)
class Team:
    """source: the target's file, without its tensors, of one that was named; may_choose: whether the number of threads is free.

    compiling: processes that compile what passes will run. prompts: where what the target has read is kept, if it is.
    """

    target: Transformer
    draft: Origin
    stage: Origin
    tokenizer: AnyTokenizer
    source: Checkpoint | None = None
    may_choose: bool = False
    compiling: Sequence[Popen[bytes]] = ()
    prompts: PromptCache | None = None

    @property
    def models(self) -> dict[str, Transformer]:
        """By their names, the target first."""
        draft = HEAD if self.draft.head else "draft"
        named = {"target": self.target, draft: self.draft.model, "stage": self.stage.model}
        return {name: model for name, model in named.items() if model}

    @property
    def no_trees(self) -> str:
        """What keeps proposals from being trees; empty where nothing does."""
        if self.stage.source:
            return 'a draft with a stage proposes chains; leave out the stage, or tree "on"'
        if HEAD in self.models:
            return 'a head proposes chains; leave out tree "on"'
        of_chains = next((name for name, model in self.models.items() if not model.runs_trees), None)
        return f'the {of_chains} runs no trees: its state is that of one text; leave out tree "on"' if of_chains else ""

    def seat(self) -> "Team":
        """The same models with caches of their own, for another text, whose target may share passes with this one's."""
        target = self.target.seat()
        return replace(self, target=target, draft=self.draft.seat(target), stage=self.stage.seat(target))

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """As `SpeculativeDecoder.encode` says."""
        if isinstance(prompt, str) or not is_list(prompt):
            tokens = self.tokenizer.encode(text("prompt", prompt))
        else:
            tokens, most = ids("the prompt's ids", prompt), self.n_ids - 1
            if not tokens or not 0 <= min(tokens) <= max(tokens) <= most:
                raise ValueError(f"prompt is {short(tokens)}; expected a string, or token ids from 0 to {most}")
        if len(tokens) > self.target.n_positions:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the target's seq_len is {self.target.n_positions}")
        return tokens

    def checked(self, job: Job) -> Job:
        """That text, if it can be written. Raises what `SpeculativeDecoder.stream` raises."""
        prompt, stops, max_tokens = self.encode(job.prompt), strings("stop", job.stops), whole("max_tokens", job.max_tokens, 0)
        check_memory(self.target, len(prompt) + max_tokens - 1)  # the last one is never run
        if not isinstance(sampling := job.sampling, Sampling):
            raise TypeError(f"sampling is {short(sampling, repr)}; expected Sampling(temperature=..., seed=...)")
        if sampling.biases and (wrong := sampling.biases[-1][0]) >= self.n_ids:
            raise ValueError(f"logit_bias holds the id {wrong}; expected ids from 0 to {self.n_ids - 1}")
        check_shape(job.shape, self.tokenizer)
        prediction = self.encode(job.prediction) if job.prediction else []
        return replace(job, prompt=prompt, max_tokens=max_tokens, stops=stops, prediction=prediction)

    def wording(self, job: Job) -> Wording:
        """What gives the events of a text their words."""
        return Wording(self.tokenizer, job.stops, job.shown, job.tells_guesses)

    @property
    def n_ids(self) -> int:
        """How many ids the target may say."""
        return self.draft.vocabulary.n_target

    @property
    def turns(self) -> set[int]:
        """Behind how many tokens a text is read anew, by a model that turns long ones otherwise."""
        return {model.config.rope.n_short for model in self.models.values()} - {0}

    def read(self, tokens: list[int]) -> Iterator[float]:
        """Let each model that can hold a text `read` it; tells the share of that work, by bytes, that is done, 0 at first."""
        if self.prompts and len(tokens) <= self.target.n_positions:
            self.prompts.restore(self.target, tokens)
        models = [model for model in self.models.values() if len(tokens) <= model.n_positions]
        jobs = [(model, known(tokens, model.config.vocab_size), model.weights.n_bytes) for model in models]
        work = [model.unread(part) * n_bytes for model, part, n_bytes in jobs]
        total, later = sum(work), sum(work)
        if total:
            yield 0.0
        for (model, part, n_bytes), share in zip(jobs, work, strict=True):
            later -= share
            for left in model.read(part):
                if self.prompts and model is self.target:
                    self.prompts.keep(model, part, not left)
                yield 1 - (later + left * n_bytes) / total

    @property
    def weights(self) -> str:
        """As `SpeculativeDecoder.weights` says."""
        shared = {name: f" ({n:,} of {self.n_ids:,} tokens)" for name, n in self.shared.items()}
        return ", ".join(f"{name} {model.weights.kind}{shared.get(name, '')}" for name, model in self.models.items())

    @property
    def shared(self) -> dict[str, int]:
        """Of models that have a part of the target's vocabulary, or another one, by their names: how many of its tokens."""
        shared = {name: model.by_target.n_shared for name, model in self.models.items() if isinstance(model, Translated | Head)}
        return {name: n for name, n in shared.items() if n < self.n_ids}


def team_of(
    target: str | os.PathLike[str] | Transformer,
    draft: Draftable | None,
    stage: Draftable | None,
    tokenizer: str | os.PathLike[str] | AnyTokenizer | None,
    quantize: str,
    loader: Loader,
) -> Team:
    """The team of what was named, as `SpeculativeDecoder` says; whatever its tokenizer tells is told before weights are read."""
    if stage is not None and (draft is None or is_word(draft, NGRAM, AUTO)):
        raise ValueError("a stage drafts for a draft that is a model, and there is none; name one with draft=...")
    if is_word(stage, SELF):
        raise ValueError('the stage "self" would be a copy of the target, which is no smaller than the draft')
    if is_word(stage, AUTO, MTP):
        raise ValueError(f"the stage {stage!r} would be a head, which drafts for its target alone")
    given = {"target": target, "draft": draft, "stage": stage}
    loaded = {name: model for name, model in given.items() if isinstance(model, Transformer)}
    if isinstance(target, Head):
        raise ValueError("the target is a head, which drafts for another model and writes no text")
    for (one, model), (other, another) in itertools.combinations(loaded.items(), 2):
        if model is another:
            raise ValueError(f"{one} and {other} are one object; they need a KV cache each")
    kinds = kinds_to_make(quantize)
    source: Checkpoint | None = None
    keys: Mapping[str, Any] = {}
    compiling = list[Popen[bytes]]()
    if isinstance(target, Transformer):
        shared = tokenizer_of(tokenizer, None, target.config.vocab_size)
    else:
        source = opened("target", target)
        shared = tokenizer_of(tokenizer, source, source.config.vocab_size)
        known_ids(shared, source.config.vocab_size)
        keys = source.vocabulary if tokenizer is None else {}
        is_named = draft is not None and not is_word(draft, NGRAM, AUTO, MTP)
        likely = loader.likely_kinds(source, kinds.target) + [kinds.draft] * is_named  # a draft is mostly like its target
        compiling = compile_passes(source.config, source.tensors, likely, loader.kv)
        target, source = loader.load(source, kinds.target), replace(source, tensors={})
    loader = replace(loader, kv=target.kv if loader.kv == "auto" else loader.kv)  # of drafts
    finder = Finder(target, shared, keys, kinds, loader, source)
    drafting = finder.origin("draft", draft)
    if stage is not None and drafting.head:
        raise ValueError("a head drafts from its target's passes, and nothing can draft for it; leave out the stage")
    may_choose = not loaded and loader.n_threads is None
    return Team(target, drafting, finder.origin("stage", stage), shared, source, may_choose, compiling)


def is_word(draft: object, *words: str) -> bool:
    """Whether what is named as a draft is one of those words."""
    return isinstance(draft, str) and draft in words  # an array compares with a string by elements
