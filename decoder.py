"""`SpeculativeDecoder`: a target, what drafts for it, and their tokenizer. Knows no terminals."""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from .checks import file_name, ids, is_list, one_of, short, strings, text, whole
from .decoding import (
    VERIFIERS,
    Drafter,
    Event,
    Generation,
    Plan,
    Prefill,
    Prompt,
    Step,
    VerifyMode,
    behind_prefill,
    decode,
    judge_proposals,
)
from .drafting.copies import copy_of, kinds_to_make
from .drafting.costs import choose_threads, costs_of, run_trees, tree_costs_of
from .drafting.drafters import ModelDrafter, TreeDrafter
from .drafting.ngrams import NgramDrafter
from .drafting.planning import MARGIN_RATES, MAX_GAMMA, ODDS_RATES, Acceptance, AutoLength, Costs, FixedLength
from .drafting.stages import Account, Guesser, StagedDrafter
from .drafting.tree_planning import STATIC_RATES, AutoTree, StaticTree, TreeCosts, new_acceptances
from .machine.ahead import end
from .machine.memory import physical_memory_bytes
from .machine.threads import available_threads, give_lock
from .readers import Checkpoint, load_checkpoint
from .readers.files import find
from .readers.loading import Progress, loaded, opened, tell_nobody
from .sampling import Sampler, Sampling
from .text.finding import tokenizer_of
from .text.templates import ChatTemplate, Message, TemplateError, template_of
from .text.tokenizer_gguf import gguf_tokenizer
from .text.tokenizer_json import TOKENIZER_FILE, JsonTokenizer
from .text.vocabulary import LEAST_KNOWN, MOST_PADDING, Vocabulary, common_vocabulary, known_ids
from .text.wording import worded
from .tokenizer import AnyTokenizer
from .transformer import KV, Transformer, compile_passes, read
from .weights import Kind

DEFAULT_SAMPLING = Sampling()
SELF = "self"  # as a draft: a copy of the target in fewer bits
NGRAM: Literal["ngram"] = "ngram"  # as a draft: what followed in the text before
Draftable = str | os.PathLike[str] | Transformer
AUTO: Literal["auto"] = "auto"
FIXED_GAMMA = 4  # where the clock must not decide
Gamma = int | Literal["auto"]
TreeMode = Literal["auto", "on", "off"]
NGRAM_SECONDS = 3e-4  # what a target's token has to take for n-grams to be looked for: that costs up to 5 us of Python
TREE_SECONDS = 2e-3  # what it has to take for trees to be tried: growing one costs up to 100 us of Python
TARGET_SHARE = 0.75  # of the memory beside its weights, that the target's text may take; what drafts gets along with the rest
TRIAL_TOKENS = 4  # of the choice of threads


class SpeculativeDecoder:
    """A target, a draft that proposes for it, and their tokenizer.

    target: a Hugging Face folder, a GGUF file, a name on the hub ("org/name", "org/name:Q4_K_M"), the path of a llama2.c file,
        also looked for in models/, or a loaded `Transformer`.
    draft: the same; "ngram", the default: what followed in the text before; "self": an int8 or int4 copy of the target; None:
        the target decodes alone.
    tokenizer: a path or a tokenizer; found in the target's folder or file, beside it or in models/ where not given.
    stage: what drafts for a draft model, which judges it before the target sees anything: "ngram" or a smaller model;
        it changes the speed alone.
    gamma: draft tokens a step, 1 to 63, or "auto": as many as pay.
    verify: "coupled" (the text is the plain run's of the same seed), "rejection" (Leviathan et al. 2023) or "block" (Sun et al.
        2024), which have the plain run's distribution.
    tree: token trees, several candidates for a place: "off", "on" or, with gamma "auto" and coupled verification, "auto", where
        they pay; a draft that is no model, or has a stage, proposes chains.
    n_threads: by default all cores, or fewer where a trial shows that they are faster; it changes no text.
    quantize: what models that are named, not loaded, become where their weights are floats: "target", "draft" (and its stage)
        or "both" become int8, "none" does; as "draft=int4" or "target=int8,draft=int4" what is said; a draft's changes no text,
        a target's does.
    template: the file of a chat template, or "llama2", which llama2.c exports of Llama 2 chat need; by default the model's own.
    kv: what models that are named keep keys and values in, as `Transformer` says, drafts by default in what their target does;
        the target's changes the text.
    progress: is told the name of a model and the share of it that is loaded.

    >>> decoder = SpeculativeDecoder("stories6M.bin", "stories650K.bin")
    >>> decoder.generate("Once upon a time", 20, temperature=0).continuation
    ', there was a little girl named Lily. She loved to play with her toys and eat yummy'
    >>> for event in decoder.stream("Once upon a time", 12, Sampling(temperature=0.8, seed=7)):
    ...     if not isinstance(event, Proposal):
    ...         print(event.text, end="")
    Once upon a time, there was a little girl named Lily. She loved to

    Threads may share a decoder: `generate` waits its turn, streams may take turns. A decoder can be pickled, and so sent to
    processes that were spawned; one that was forked after a model has run on several threads has lost them, and says so.

    Raises CheckpointError or TokenizerError for files that cannot be used, ValueError for values or models that do not fit.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Transformer,
        draft: Draftable | None = NGRAM,
        tokenizer: str | os.PathLike[str] | AnyTokenizer | None = None,
        *,
        stage: Draftable | None = None,
        gamma: Gamma = AUTO,
        verify: VerifyMode = "coupled",
        tree: TreeMode = "off",
        n_threads: int | None = None,
        quantize: str = "draft",
        template: str | os.PathLike[str] | None = None,
        kv: KV = AUTO,
        progress: Progress = tell_nobody,
    ) -> None:
        kinds = kinds_to_make(quantize)
        one_of("kv", kv, get_args(KV))
        self._tree: TreeMode = "off"
        self.gamma, self.verify = gamma, verify
        self.tree = tree
        if n_threads is not None:
            whole("n_threads", n_threads, 1, available_threads())
        source = None if isinstance(target, Transformer) else opened("target", target)
        rows = (target if isinstance(target, Transformer) else cast(Checkpoint, source)).config.vocab_size
        self.tokenizer = tokenizer_of(tokenizer, source, rows)
        self._template_of = functools.partial(template_of, source and replace(source, tensors={}), self.tokenizer.path, template)
        self._template: ChatTemplate | None = None
        self._keys = source.vocabulary if source and tokenizer is None else {}  # that the tokenizer was made of
        known_ids(self.tokenizer, rows)  # a tokenizer that does not fit is told before the weights are read
        likely = [kinds["target"]]
        if draft is not None and not _is_ngram(draft):  # a draft is mostly like its target
            likely.append(kinds["draft"])
        self._compiling = compile_passes(source.config, source.tensors, likely, kv) if source else []
        self.target = (
            target
            if isinstance(target, Transformer)
            else loaded(cast(Checkpoint, source), kinds["target"], n_threads, None, progress, kv)
        )
        self._kv = self.target.kv if kv == AUTO else kv  # of drafts
        is_asked = "draft=" in quantize or "both=" in quantize
        self._ngrams, self.draft, self._vocabulary = self._drafting("draft", draft, n_threads, kinds["draft"], is_asked, progress)
        if stage is not None and not self.draft:
            raise ValueError("a stage drafts for a draft that is a model, and there is none; name one with -d")
        if isinstance(stage, str) and stage == SELF:
            raise ValueError('the stage "self" would be a copy of the target, which is no smaller than the draft')
        self._stage_ngrams, self.stage, self._stage_vocabulary = self._drafting(
            "stage", stage, n_threads, kinds["draft"], is_asked, progress
        )
        if self.has_stage and self.tree == "on":
            raise ValueError('a draft with a stage proposes chains; leave out the stage, or tree "on"')
        models = {"target": self.target, "draft": self.draft, "stage": self.stage}
        self._named = {name: model for name, model in models.items() if model}
        for (one, model), (other, another) in itertools.combinations(self._named.items(), 2):
            if model is another:
                raise ValueError(f"{one} and {other} are one object; they need a KV cache each")
        self._models = [*self._named.values()]
        self._costs: Costs | None = None  # measured when warm
        self._account: Account | None = None  # of the stage
        self._tree_costs: TreeCosts | None = None
        self._acceptance = Acceptance(ODDS_RATES if self._ngrams else MARGIN_RATES)
        self._acceptances = new_acceptances(self._acceptance)
        self._done = set[str]()  # of what `warm_up` does
        self._turn: threading._RLock
        give_lock(self, "_turn")
        is_free = n_threads is None and not any(isinstance(model, Transformer) for model in (target, draft, stage))
        self._most_threads = self.target.n_threads if is_free else 1  # to choose from

    def _drafting(
        self,
        parameter: str,
        draft: Draftable | None,
        n_threads: int | None,
        kind: Kind | None,
        is_asked: bool,
        progress: Progress,
    ) -> tuple[Literal["ngram"] | None, Transformer | None, Vocabulary]:
        """N-grams or a model, whichever was given, and the ids that the target and it may say."""
        n_target = known_ids(self.tokenizer, self.target.config.vocab_size)
        vocabulary = Vocabulary(n_target, n_target)
        if draft is None or _is_ngram(draft):
            return NGRAM if draft else None, None, vocabulary
        if not isinstance(draft, Transformer) and file_name(parameter, draft) != SELF:
            draft = find(draft)
        model, vocabulary = self._draft(f"the {parameter}", draft, n_threads, kind, is_asked, progress)
        most = self.target.n_positions
        n = model.positions_within((1 - TARGET_SHARE) * self._room - model.weights.n_bytes, most)
        if model.n_positions < n or n < most:  # beyond them it sees a window
            model = Transformer(model.config, model.weights, model.n_threads, n, model.kv)
        return None, model, vocabulary

    def _draft(
        self,
        name: str,
        draft: str | os.PathLike[str] | Transformer,
        n_threads: int | None,
        kind: Kind | None,
        is_asked: bool,
        progress: Progress,
    ) -> tuple[Transformer, Vocabulary]:
        """A model that drafts, and the ids that the target and it may say."""
        rows = self.target.config.vocab_size
        if draft == SELF:
            n_target = known_ids(self.tokenizer, rows)
            copy = copy_of(self.target, kind if is_asked else None, self.tokenizer.encode, n_threads, self._kv, progress)
            return copy, Vocabulary(n_target, n_target)
        if isinstance(draft, Transformer):
            return draft, self._alike(name, draft.config.vocab_size)
        source = load_checkpoint(Path(draft))
        draft_rows = source.config.vocab_size
        if source.vocabulary:
            is_same = source.vocabulary == self._keys
            own = self.tokenizer if is_same else gguf_tokenizer(source.path, source.vocabulary)
            vocabulary = common_vocabulary(self.tokenizer, rows, own, draft_rows)
        elif (source.path / TOKENIZER_FILE).exists():
            vocabulary = common_vocabulary(self.tokenizer, rows, source.path, draft_rows)
        else:
            vocabulary = self._alike(f"{name} {draft}", draft_rows)
        return loaded(source, kind, n_threads, self.target.n_positions, progress, self._kv), vocabulary

    def _alike(self, name: str, rows: int) -> Vocabulary:
        """Of a draft without a tokenizer of its own. Raises ValueError for one that cannot share the target's."""
        n, target_rows = self.tokenizer.vocab_size, self.target.config.vocab_size
        is_padded = isinstance(self.tokenizer, JsonTokenizer) and n <= rows <= min(n + MOST_PADDING, n / LEAST_KNOWN)
        if rows != target_rows and not is_padded:
            raise ValueError(f"{name} has a vocabulary of {rows} tokens, the target one of {target_rows}; they must agree")
        return Vocabulary(min(n, target_rows), min(n, rows))

    def __repr__(self) -> str:
        named = {"target": self.target, "draft": self.draft or self._ngrams, "stage": self.stage or self._stage_ngrams}
        parts = [f"{name}={drafter!r}" for name, drafter in named.items() if drafter]
        return f"SpeculativeDecoder({', '.join(parts)}, gamma={self.gamma!r}, verify={self.verify!r}, tree={self.tree!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        with suppress(TemplateError):  # what has none is a decoder nevertheless
            self._template = self.chat_template
        stage = self._stage_ngrams or self.stage
        settings = {"gamma": self.gamma, "verify": self.verify, "tree": self.tree, "stage": stage}
        return _rebuilt, (self.target, self._ngrams or self.draft, self.tokenizer, settings, self._template)

    @property
    def gamma(self) -> Gamma:
        """Draft tokens a step; "auto": as many as pay, and none where none do."""
        return self._gamma

    @gamma.setter
    def gamma(self, gamma: Gamma) -> None:
        self._gamma: Gamma = AUTO if isinstance(gamma, str) and gamma == AUTO else whole("gamma", gamma, 1, MAX_GAMMA)

    @property
    def verify(self) -> VerifyMode:
        """What decides whether a proposal stands."""
        return self._verify

    @verify.setter
    def verify(self, verify: VerifyMode) -> None:
        _check_trees(self.tree, one_of("verify", verify, cast(Collection[VerifyMode], VERIFIERS)))
        self._verify = verify

    @property
    def tree(self) -> TreeMode:
        """Whether proposals are trees; "auto": where they pay, with gamma "auto" and coupled verification, else chains."""
        return self._tree

    @tree.setter
    def tree(self, tree: TreeMode) -> None:
        _check_trees(one_of("tree", tree, get_args(TreeMode)), self.verify)
        self._tree = tree

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The prompt's tokens, behind BOS where the model has one; ids are taken as they are.

        Raises ValueError for a prompt that the target's seq_len cannot hold or UTF-8 cannot say, and for ids that are none of
        the target's; TypeError for what is neither.
        """
        if isinstance(prompt, str) or not is_list(prompt):
            tokens = self.tokenizer.encode(text("prompt", prompt))
        else:
            tokens = ids("prompt", prompt)
            most = self._vocabulary.n_target - 1
            if not tokens or not 0 <= min(tokens) <= max(tokens) <= most:
                raise ValueError(f"prompt is {short(tokens)}; expected a string, or token ids from 0 to {most}")
        if len(tokens) > self.target.n_positions:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the target's seq_len is {self.target.n_positions}")
        return tokens

    def stream(
        self,
        prompt: str | Sequence[int] = "",
        max_tokens: int = 256,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: str | Sequence[str] = (),
    ) -> Iterator[Event]:
        """Events as they come: the `Prompt`, then `Step`s, each behind its `Proposal` where there is one.

        Ends at an end mark, before a stop string, after max_tokens beyond the prompt, or at the target's seq_len. The text is
        `"".join(event.text for event in stream if not isinstance(event, Proposal))`, of whole characters at any time; a stop
        string is looked for in what was generated, wherever steps and tokens divide it. prompt: a text, or ids (see `encode`).

        Several streams may take turns on one model, in one thread or several, and each says what it would say alone; but a
        model's cache holds one text, so that a turn begins with running the other text's tokens anew. Raises ValueError and
        TypeError for values that are none, ValueError for a prompt longer than the target's seq_len, a text that the memory
        cannot hold and a target whose logits are not finite.
        """
        return self._continued(self.encode(prompt), max_tokens, sampling, strings("stop", stop))

    @property
    def chat_template(self) -> ChatTemplate:
        """The one that was named, or the model's own. Raises TemplateError where there is none."""
        self._template = self._template or self._template_of()
        return self._template

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation's tokens as the model's template has them, up to where the answer begins.

        messages: objects of "role" ("system", "user", "assistant") and "content"; an answer's "tokens", where it has some, are
        taken as they are. Raises TemplateError for a model without a template and for messages that it refuses.
        """
        return self.chat_template.encode(self.tokenizer, messages, self.n_positions)

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: str | Sequence[str] = (),
    ) -> Iterator[Event]:
        """The answer to a conversation as it comes: `stream` of `encode_chat`, but that its `Prompt` has no text.

        What the caches hold of the conversation is not run again.
        """
        events = self.stream(self.encode_chat(messages), max_tokens, sampling, stop=stop)
        return (replace(event, text="") if isinstance(event, Prompt) else event for event in events)

    def answer(
        self,
        messages: Sequence[Message],
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: str | Sequence[str] = (),
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Generation:
        """The whole answer to a conversation, which is the generation's text; all else as `generate` and `encode_chat` say."""
        sampling = _with_fields(sampling, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        with self._turn:
            return self._generation(self.chat(messages, max_tokens, sampling, stop=stop))

    def read(self, tokens: list[int]) -> Iterator[float]:
        """Run a prompt's tokens into the caches, some at a time; tells the share of that work that is done, 0 at first.

        A stream of that prompt then begins at once; whoever stops here has lost nothing but the time. Nothing is told where the
        caches hold it already.
        """
        return read(self._models, tokens)

    def read_and_stream(
        self, prompt: list[int], max_tokens: int, sampling: Sampling = DEFAULT_SAMPLING, *, stop: str | Sequence[str] = ()
    ) -> Iterator[Event | Prefill]:
        """`stream` of a prompt's tokens, behind a `Prefill` for each share of `read`."""
        return behind_prefill(prompt, self.read(prompt), self.stream(prompt, max_tokens, sampling, stop=stop))

    def _continued(self, tokens: list[int], max_tokens: int, sampling: Sampling, stops: list[str]) -> Iterator[Event]:
        max_tokens = whole("max_tokens", max_tokens, 0)
        self._check_memory(len(tokens) + max_tokens - 1)  # the last one is never run
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling is {short(sampling, repr)}; expected Sampling(temperature=..., seed=...)")
        if self._undone():
            self.warm_up()
        return worded(self._events(tokens, max_tokens, sampling), self.tokenizer, stops)

    def _events(self, tokens: list[int], max_tokens: int, sampling: Sampling) -> Iterator[Event]:
        """A text's, of whatever is warm."""
        verifier = VERIFIERS[self.verify](self._vocabulary.n_target, sampling)
        marks = self.tokenizer.end_marks
        plan = self._plan()
        is_slow = not isinstance(plan, AutoLength) or plan.costs.of(1) > NGRAM_SECONDS
        drafter: Drafter | None = NgramDrafter(marks) if self._ngrams and is_slow else None
        if self.draft:
            drafter = self._model_drafter(self.draft, sampling, verifier.draft_noise, plan)
        return decode(self.target, drafter, verifier, tokens, max_tokens, plan, marks)

    def _model_drafter(self, draft: Transformer, sampling: Sampling, noise: Callable[[int], int], plan: Plan) -> Drafter:
        """What drafts with a model, and with its stage where it has one."""
        marks, n_target = self.tokenizer.end_marks, self._vocabulary.n_target
        sampler = Sampler(n_target, sampling, self._vocabulary.n_common)
        if isinstance(plan, AutoTree | StaticTree):
            return TreeDrafter(draft, sampler, noise, marks, plan)
        if not self._account:
            return ModelDrafter(draft, sampler, noise, marks)
        guesser: Guesser
        if self.stage:
            guesser = ModelDrafter(self.stage, Sampler(n_target, sampling, self._stage_vocabulary.n_common), noise, marks)
        else:
            guesser = NgramDrafter(marks)
        return StagedDrafter(self._models[1:], guesser, self._account, sampler, noise, marks)

    def _plan(self) -> Plan:
        """How long proposals get. A text of `rejection` or `block` hangs on that, so that there it must not hang on the clock."""
        is_auto = self.gamma == AUTO and self.verify == "coupled" and self._costs
        gamma = FIXED_GAMMA if self.gamma == AUTO else self.gamma
        if self._may_branch:
            marks = self.tokenizer.end_marks
            if is_auto and self._costs and self._tree_costs and (self.tree == "on" or self._costs.of(1) > TREE_SECONDS):
                return AutoTree(self._costs, self._tree_costs, self._acceptances, marks, is_forced=self.tree == "on")
            if self.tree == "on":
                rates = [acceptance.rate for acceptance in self._acceptances] if self.verify == "coupled" else STATIC_RATES
                return StaticTree(gamma, self._costs, self._acceptances, marks, rates)
        if is_auto and self._costs:
            return AutoLength(self._costs, self._acceptance)
        return FixedLength(gamma, self._costs)

    @property
    def has_draft(self) -> bool:
        """Whether something drafts for the target: a model, which is `draft`, or n-grams."""
        return bool(self.draft or self._ngrams)

    @property
    def _may_branch(self) -> bool:
        """Whether proposals may be trees."""
        may = self.tree == "on" or (self.tree == AUTO and self.gamma == AUTO and self.verify == "coupled")
        return may and self.draft is not None and not self.has_stage

    @property
    def has_stage(self) -> bool:
        """Whether something drafts for the draft: a model, which is `stage`, or n-grams."""
        return bool(self.stage or self._stage_ngrams)

    @property
    def plain_seconds(self) -> float:
        """What a token of the last text would have taken the target alone, as measured while it ran; 0 where nothing drafts."""
        return self._costs.plain_seconds if self._costs else 0.0

    @property
    def n_ids(self) -> int:
        """How many ids the target may say; rows of its vocabulary behind them have no token."""
        return self._vocabulary.n_target

    @property
    def n_positions(self) -> int:
        """How long a text may get: the target's context, or as much of it as its share of the machine's memory holds.

        It does not depend on what drafts: a conversation would lose other turns, and a text would end elsewhere.
        """
        return self.target.positions_within(TARGET_SHARE * self._room, self.target.n_positions)

    @property
    def _room(self) -> float:
        """Bytes of memory beside the target's weights."""
        return physical_memory_bytes() - self.target.weights.n_bytes

    def _check_memory(self, n_tokens: int) -> None:
        n = min(n_tokens, self.target.n_positions)
        if n > (most := self.n_positions):
            raise ValueError(
                f"a text of {n} tokens needs {self.target.text_bytes(n) / 2**30:.1f} GiB beside the weights; this machine's "
                f"memory has room for {most} tokens (-n, max_tokens)"
            )

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        max_tokens: int = 256,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: str | Sequence[str] = (),
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Generation:
        """The whole text, its tokens and its statistics; parameters and errors are those of `stream`.

        temperature, top_k, top_p, seed: in the place of the sampling's, where they are not None. Threads that call it on one
        decoder wait for each other.
        """
        sampling = _with_fields(sampling, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        with self._turn:
            return self._generation(self.stream(prompt, max_tokens, sampling, stop=stop))

    def _generation(self, events: Iterator[Event]) -> Generation:
        generation = Generation.of(events)
        generation.statistics.plain_seconds = self.plain_seconds
        return generation

    @property
    def weights(self) -> str:
        """What the weights are, in words: "target fp32, draft int8"."""
        return ", ".join(f"{name} {model.weights.kind}" for name, model in self._named.items())

    def warm_up(self) -> None:
        """Compile, or load from numba's cache, whatever a text needs, and measure what it takes; a text does what nobody has done
        before it begins, what is left where that was interrupted, and what another `verify`, `gamma` or `tree` asks for.

        Also choose the number of threads, unless it was given: the barriers of a pass cost a small model or a busy machine more
        than another thread gains, and a text is the same with any number.
        """
        with self._turn:
            while undone := self._undone():
                name, do = next(iter(undone.items()))
                do()
                self._done.add(name)
            end(self._compiling)

    def _undone(self) -> dict[str, Callable[[], object]]:
        """What is to be done before a text of these settings begins, in order; one thread and several run other code."""
        verifier, n_ids = VERIFIERS[self.verify], self._vocabulary.n_target
        to_do: dict[str, Callable[[], object]] = {
            f"passes {[model.n_threads > 1 for model in self._models]}": lambda: self._seconds(2)
        }
        if self.draft or self._ngrams:
            to_do[self.verify] = lambda: judge_proposals(verifier, n_ids)
        if self._may_branch:
            to_do["trees"] = lambda: run_trees(self._models, self._vocabulary)
            to_do[f"{self.verify} of trees"] = lambda: judge_proposals(verifier, n_ids, [-1, -1])
        to_do["measures"] = self._measure
        if self._may_branch and self.gamma == AUTO:
            to_do["measures of trees"] = self._measure_trees
        return {name: do for name, do in to_do.items() if name not in self._done}

    def _measure(self) -> None:
        if self._most_threads > 1:
            choose_threads(self._models, self._most_threads, lambda: self._seconds(TRIAL_TOKENS))
        costs = self._measured_costs() if self.draft or self._ngrams else None
        if self.draft and self.has_stage:
            own = costs_of(self.draft, self.stage, self._vocabulary)
            self._account = Account(own, Acceptance(MARGIN_RATES if self.stage else ODDS_RATES))
        self._costs = costs

    def _measure_trees(self) -> None:
        if self.draft:
            self._tree_costs = tree_costs_of(self.draft, self._vocabulary)

    def _measured_costs(self) -> Costs:
        return costs_of(self.target, self.draft, self._vocabulary)

    def _seconds(self, max_tokens: int) -> float:
        """What that many tokens take."""
        events = self._events(self.encode(""), max_tokens, DEFAULT_SAMPLING)
        return sum(event.seconds for event in events if isinstance(event, Step))


def _check_trees(tree: TreeMode, verify: VerifyMode) -> None:
    if tree == "on" and verify == "block":
        raise ValueError("tree is 'on', and verify is 'block', which judges chains alone; leave one of them out")


def _with_fields(sampling: Sampling, **fields: Any) -> Sampling:
    """That sampling, but for the fields that are given."""
    given = {name: value for name, value in fields.items() if value is not None}
    return replace(sampling, **given) if given and isinstance(sampling, Sampling) else sampling


def _rebuilt(
    target: Transformer,
    draft: Draftable | None,
    tokenizer: AnyTokenizer,
    settings: dict[str, Any],
    template: ChatTemplate | None,
) -> SpeculativeDecoder:
    """A decoder from its pickled parts."""
    decoder = SpeculativeDecoder(target, draft, tokenizer, **settings)
    decoder._template = template
    return decoder


def _is_ngram(draft: object) -> bool:
    return isinstance(draft, str) and draft == NGRAM  # an array compares with a string by elements
