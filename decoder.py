"""`SpeculativeDecoder`: a target, what drafts for it, and their tokenizer. Knows no terminals."""

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from .architectures import Weights, architecture_of
from .checks import file_name, one_of, short, text, whole
from .decoding import VERIFIERS, Event, Statistics, Step, VerifyMode, decode
from .drafters import Drafter, ModelDrafter, TreeDrafter
from .files import find, find_tokenizer
from .heads import NarrowHead, Thrift, may_narrow
from .machine.memory import physical_memory_bytes
from .machine.threads import available_threads, give_lock
from .machine.tiles import TILE_TOKENS
from .ngram_table import NgramTable, is_table, load_table
from .ngrams import NgramDrafter
from .planning import MARGIN_RATES, MAX_GAMMA, ODDS_RATES, Acceptance, AutoLength, Costs, FixedLength, Plan
from .readers import Checkpoint, CheckpointError, load_checkpoint, read_vocabulary
from .sampling import TARGET_NOISE, Sampler, Sampling
from .stages import Account, Guesser, StagedDrafter
from .tokenizer import AnyTokenizer
from .tokenizer_gguf import gguf_tokenizer
from .tokenizer_json import TOKENIZER_FILE, JsonTokenizer, load_tokenizer
from .transformer import KV, Transformer
from .tree_planning import STATIC_RATES, WIDEST, AutoTree, StaticTree, TreeCosts, new_acceptances
from .vocabulary import LEAST_KNOWN, MOST_PADDING, Vocabulary, common_vocabulary, known_ids
from .weights import INT4, INT8, Kind

DEFAULT_SAMPLING = Sampling()
SELF = "self"  # as a draft: a copy of the target in fewer bits
NGRAM: Literal["ngram"] = "ngram"  # as a draft: what followed in the text before
Ngrams = Literal["ngram"] | NgramTable  # of the text alone, or of a table too
Draftable = str | os.PathLike[str] | Transformer | NgramTable
Progress = Callable[[str, float], None]  # is told the name of a model and the share of it that is loaded
AUTO: Literal["auto"] = "auto"
FIXED_GAMMA = 4  # where the clock must not decide
Gamma = int | Literal["auto"]
TreeMode = Literal["auto", "on", "off"]
NGRAM_SECONDS = 3e-4  # what a target's token has to take for n-grams to be looked for: that costs up to 5 us of Python
QUANTIZED = {"int8": INT8, "int4": INT4, "none": None}
# A copy of the target is int8 where that has so few bytes that it stays in a cache, where int4 is hardly faster and accepted
# less; beyond, memory is the limit. It has to be that much smaller than the target.
CACHED_BYTES, WORTH_A_COPY = 32 << 20, 0.75
# Passes over so many tokens are timed in turns, for about so long: of a slow target over the first two, and twice unless once
# takes SLOW seconds. Where a second tile begins, a pass costs a step more.
COSTS_TOKENS, COSTS_SECONDS, SLOW = (TILE_TOKENS, 1, TILE_TOKENS + 1, 2, 4, 2 * TILE_TOKENS, 32), 0.03, 0.1
TREE_SECONDS = 2e-3  # what it has to take for trees to be tried: growing one costs up to 100 us of Python
TREE_WIDTHS = 2, 4, WIDEST  # of levels of trees, timed likewise
LEAST_SAVING = 0.95  # of a draft token's time, that a narrow head has to come below
TRIAL_SECONDS, TRIAL_TOKENS, TRIAL_MARGIN = 0.05, 4, 1.25  # of the choice of threads; all of them unless so much slower


def tell_nobody(name: str, share: float) -> None:
    """Of a `Progress` that nobody watches."""


class Generation(NamedTuple):
    """What `SpeculativeDecoder.generate` returns: the text, prompt included, and the figures."""

    text: str
    statistics: Statistics


class SpeculativeDecoder:
    """A target, a draft that proposes for it, and their tokenizer.

    target, draft: Hugging Face folders, GGUF files, names on the hub ("org/name", "org/name:Q4_K_M"), paths of llama2.c files
    (also looked for in models/) or loaded `Transformer`s; without a draft, plain decoding; the draft "self" is an int8 or
    int4 copy of the target, "ngram" what followed in the text before, a table of n-grams (`specdec ngrams`) or its path that
    and what the table counted. stage: what drafts for a draft model, which judges it before the target sees anything:
    "ngram", a table or a smaller model; it changes the speed alone. tokenizer: a path or a tokenizer; found in the target's
    folder or file, beside it or in models/ where not given. gamma: draft tokens a step, 1 to 63, or "auto": as many as pay.
    verify: "coupled" (the text is the plain run's of the same seed), "rejection" (Leviathan et al. 2023) or "block" (Sun et
    al. 2024), which have the plain run's distribution. tree: token trees, several candidates for a place: "on", "off" or
    "auto", where they pay, with gamma "auto" and coupled verification; a draft that is no model, or has a stage, proposes
    chains. n_threads: by default all cores, or fewer where a trial shows that they are faster; it changes no text. quantize:
    what models that are named, not loaded, become where their weights are floats: "target", "draft" (and its stage) or "both"
    become int8, "none" does; as "draft=int4" or "target=int8,draft=int4" what is said; a draft's changes no text, a target's
    does. kv: what models that are named keep keys and values in, as `Transformer` says; the target's changes the text. progress:
    is told the name of a model and the share of it that is loaded.

    Raises CheckpointError or TokenizerError for files that cannot be used, ValueError for values or models that do not fit.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Transformer,
        draft: Draftable | None = None,
        tokenizer: str | os.PathLike[str] | AnyTokenizer | None = None,
        *,
        stage: Draftable | None = None,
        gamma: Gamma = AUTO,
        verify: VerifyMode = "coupled",
        tree: TreeMode = AUTO,
        n_threads: int | None = None,
        quantize: str = "draft",
        kv: KV = AUTO,
        progress: Progress = tell_nobody,
    ) -> None:
        kinds = kinds_to_make(quantize)
        self._kv: KV = one_of("kv", kv, get_args(KV))
        self._tree: TreeMode = AUTO
        self.gamma, self.verify = gamma, verify
        self.tree = tree
        if n_threads is not None:
            whole("n_threads", n_threads, 1, available_threads())
        source = None if isinstance(target, Transformer) else _opened("target", target)
        rows = (target if isinstance(target, Transformer) else cast(Checkpoint, source)).config.vocab_size
        self.tokenizer = _tokenizer(tokenizer, source, rows)
        self._keys = source.vocabulary if source and tokenizer is None else {}  # that the tokenizer was made of
        known_ids(self.tokenizer, rows)  # a tokenizer that does not fit is told before the weights are read
        self.target = (
            target
            if isinstance(target, Transformer)
            else _loaded(cast(Checkpoint, source), kinds["target"], n_threads, None, progress, self._kv)
        )
        is_asked = "draft=" in quantize or "both=" in quantize
        self.ngrams, self.draft, self.vocabulary = self._drafting("draft", draft, n_threads, kinds["draft"], is_asked, progress)
        if stage is not None and not self.draft:
            raise ValueError("a stage drafts for a draft that is a model, and there is none; name one with -d")
        if isinstance(stage, str) and stage == SELF:
            raise ValueError('the stage "self" would be a copy of the target, which is no smaller than the draft')
        self.stage_ngrams, self.stage, self._stage_vocabulary = self._drafting(
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
        self.costs: Costs | None = None  # measured when warm
        self._account: Account | None = None  # of the stage
        self.tree_costs: TreeCosts | None = None
        self._head: NarrowHead | None = None  # of the draft, where it is faster than the whole
        self._loss = 0.0  # see `Thrift`
        self.acceptance = Acceptance(ODDS_RATES if self.ngrams else MARGIN_RATES)
        self.acceptances = new_acceptances(self.acceptance)
        self._is_warm = False
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
    ) -> tuple[Ngrams | None, Transformer | None, Vocabulary]:
        """N-grams or a model, whichever was given, and the ids that the target and it may say."""
        n_target = known_ids(self.tokenizer, self.target.config.vocab_size)
        vocabulary = Vocabulary(n_target, n_target)
        if draft is None or (isinstance(draft, str) and draft == NGRAM):
            return NGRAM if draft else None, None, vocabulary
        if not isinstance(draft, Transformer | NgramTable) and file_name(parameter, draft) != SELF:
            draft = find(draft)
            draft = load_table(draft) if is_table(draft) else draft
        if isinstance(draft, NgramTable):
            if draft.vocab_size != n_target:
                raise ValueError(
                    f"the table of n-grams is of a vocabulary of {draft.vocab_size} tokens, the target's has {n_target}; "
                    "make one of this target with `specdec ngrams`"
                )
            return draft, None, vocabulary
        model, vocabulary = self._draft(f"the {parameter}", draft, n_threads, kind, is_asked, progress)
        if model.n_positions < self.target.n_positions:
            model = Transformer(model.config, model.weights, model.n_threads, self.target.n_positions, model.kv)
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
            copy = self.target.weights.converted(_kind_of_copy(self.target.weights, kind if is_asked else None))
            n_target = known_ids(self.tokenizer, rows)
            model = Transformer(self.target.config, copy, n_threads, self.target.n_positions, self._kv)
            return model, Vocabulary(n_target, n_target)
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
        return _loaded(source, kind, n_threads, self.target.n_positions, progress, self._kv), vocabulary

    def _alike(self, name: str, rows: int) -> Vocabulary:
        """Of a draft without a tokenizer of its own. Raises ValueError for one that cannot share the target's."""
        n, target_rows = self.tokenizer.vocab_size, self.target.config.vocab_size
        is_padded = isinstance(self.tokenizer, JsonTokenizer) and n <= rows <= min(n + MOST_PADDING, n / LEAST_KNOWN)
        if rows != target_rows and not is_padded:
            raise ValueError(f"{name} has a vocabulary of {rows} tokens, the target one of {target_rows}; they must agree")
        return Vocabulary(min(n, target_rows), min(n, rows))

    def __reduce__(self) -> tuple[Any, ...]:
        stage = self.stage_ngrams or self.stage
        return _rebuilt, (self.target, self.ngrams or self.draft, self.tokenizer, self.gamma, self.verify, self.tree, stage)

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
        """Whether proposals are trees; "auto": where they pay, with gamma "auto" and coupled verification."""
        return self._tree

    @tree.setter
    def tree(self, tree: TreeMode) -> None:
        _check_trees(one_of("tree", tree, get_args(TreeMode)), self.verify)
        self._tree = tree

    def encode(self, prompt: str) -> list[int]:
        """The prompt's tokens, behind BOS where the model has one.

        Raises ValueError for a prompt that the target's seq_len cannot hold or UTF-8 cannot say.
        """
        tokens = self.tokenizer.encode(text("prompt", prompt))
        if len(tokens) > self.target.n_positions:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the target's seq_len is {self.target.n_positions}")
        return tokens

    def stream(self, prompt: str = "", max_tokens: int = 256, sampling: Sampling = DEFAULT_SAMPLING) -> Iterator[Event]:
        """Events as they come: the `Prompt`, then `Step`s, each behind its `Proposal` where there is one.

        Ends at an end mark, after max_tokens beyond the prompt, or at the target's seq_len. Several streams may take turns on one
        model, in one thread or several, and each says what it would say alone; but a model's cache holds one text, so that a
        turn begins with running the other text's tokens anew. Raises ValueError and TypeError for values that are none,
        ValueError for a prompt longer than the target's seq_len, a text that the memory cannot hold and a target whose logits
        are not finite.
        """
        tokens = self.encode(prompt)
        max_tokens = whole("max_tokens", max_tokens, 0)
        self._check_memory(len(tokens) + max_tokens - 1)  # the last one is never run
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling is {short(sampling, repr)}; expected Sampling(temperature=..., seed=...)")
        if not self._is_warm:
            self.warm_up()
        verifier = VERIFIERS[self.verify](self.vocabulary.n_target, sampling)
        marks = self.tokenizer.end_marks
        plan = self._plan()
        is_slow = not isinstance(plan, AutoLength) or plan.costs.of(1) > NGRAM_SECONDS
        drafter: Drafter | None = _ngram_drafter(self.ngrams, marks) if self.ngrams and is_slow else None
        if self.draft:
            drafter = self._model_drafter(self.draft, sampling, verifier.draft_noise, plan)
        return decode(self.target, drafter, verifier, tokens, max_tokens, plan, marks)

    def _model_drafter(self, draft: Transformer, sampling: Sampling, noise: Callable[[int], int], plan: Plan) -> Drafter:
        """What drafts with a model, and with its stage where it has one."""
        marks, n_target = self.tokenizer.end_marks, self.vocabulary.n_target
        sampler = Sampler(n_target, sampling, self.vocabulary.n_common)
        if isinstance(plan, AutoTree | StaticTree):
            return TreeDrafter(draft, sampler, noise, marks, plan, self._thrift())
        if not self._account:
            return ModelDrafter(draft, sampler, noise, marks, self._thrift())
        guesser: Guesser
        if self.stage:
            guesser = ModelDrafter(self.stage, Sampler(n_target, sampling, self._stage_vocabulary.n_common), noise, marks)
        else:
            guesser = _ngram_drafter(self.stage_ngrams, marks)
        return StagedDrafter(self._models[1:], guesser, self._account, sampler, noise, marks)

    def _thrift(self) -> Thrift | None:
        """Of the draft's narrow head, where it has one and the text does not hang on q."""
        return Thrift(self.draft, self._head, self._loss) if self.draft and self._head and self.verify == "coupled" else None

    def _plan(self) -> Plan:
        """How long proposals get. A text of `rejection` or `block` hangs on that, so that there it must not hang on the clock."""
        is_auto = self.gamma == AUTO and self.verify == "coupled" and self.costs
        gamma = FIXED_GAMMA if self.gamma == AUTO else self.gamma
        if self.draft and self.tree != "off" and not self.has_stage:
            marks = self.tokenizer.end_marks
            if is_auto and self.costs and (self.tree == "on" or self.costs.of(1) > TREE_SECONDS):
                self.tree_costs = self.tree_costs or self._measured_tree_costs(self.draft)
                return AutoTree(self.costs, self.tree_costs, self.acceptances, marks, is_forced=self.tree == "on")
            if self.tree == "on":
                rates = [acceptance.rate for acceptance in self.acceptances] if self.verify == "coupled" else STATIC_RATES
                return StaticTree(gamma, self.costs, self.acceptances, marks, rates)
        if is_auto and self.costs:
            return AutoLength(self.costs, self.acceptance)
        return FixedLength(gamma, self.costs)

    @property
    def has_stage(self) -> bool:
        """Whether something drafts for the draft."""
        return bool(self.stage or self.stage_ngrams)

    @property
    def plain_seconds(self) -> float:
        """What a token takes the target alone, as measured at the start and kept up since; 0 where nothing drafts."""
        return self.costs.of(1) if self.costs else 0.0

    @property
    def n_positions(self) -> int:
        """How long a text may get: the target's context, or as much of it as the machine's memory holds beside the weights."""
        n = self.target.n_positions
        room = physical_memory_bytes() - sum(model.weights.n_bytes for model in self._models)
        while n > 1 and self._text_bytes(n) > room:
            n -= max(1, n // 64)
        return n

    def _text_bytes(self, n_positions: int) -> int:
        return sum(model.text_bytes(n_positions) for model in self._models)

    def _check_memory(self, n_tokens: int) -> None:
        n = min(n_tokens, self.target.n_positions)
        if n > (most := self.n_positions):
            raise ValueError(
                f"a text of {n} tokens needs {self._text_bytes(n) / 2**30:.1f} GiB beside the weights; this machine's memory has "
                f"room for {most} tokens (-n, max_tokens)"
            )

    def generate(
        self,
        prompt: str = "",
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.9,
        seed: int = 0,
    ) -> Generation:
        """The whole text, prompt included, and its statistics; parameters and errors are those of `Sampling` and `stream`.

        Threads that call it on one decoder wait for each other.
        """
        tokens = self.encode(prompt)
        statistics = Statistics(n_prompt=len(tokens))
        with self._turn:
            for event in self.stream(prompt, max_tokens, Sampling(temperature, top_k, top_p, seed)):
                statistics.add(event)
                tokens += event.tokens if isinstance(event, Step) else []
        statistics.plain_seconds = self.plain_seconds
        return Generation(self.tokenizer.decode(tokens), statistics)

    @property
    def weights(self) -> str:
        """What the weights are, in words: "target fp32, draft int8"."""
        return ", ".join(f"{name} {model.weights.kind}" for name, model in self._named.items())

    def warm_up(self) -> None:
        """Compile, or load from numba's cache, whatever a text needs; the first text does it where nobody has.

        Then choose the number of threads, unless it was given: the barriers of a pass cost a small model or a busy machine more
        than another thread gains, and a text is the same with any number.
        """
        with self._turn:
            if not self._is_warm:
                self._is_warm = True
                self._seconds(2)
                if self.ngrams:  # which propose nothing at the start of a text
                    self._judge_a_proposal()
                if self._most_threads > 1:
                    self._choose_threads()
                if self.draft or self.ngrams:
                    self.costs = self._measured_costs()
                if self.draft and self.has_stage:
                    costs = self._costs_of(self.draft, self.stage)
                    self._account = Account(costs, Acceptance(MARGIN_RATES if self.stage else ODDS_RATES))
                if self.draft and self.costs and not self.has_stage and may_narrow(self.draft.weights):
                    self._measure_head(self.draft, self.costs)
                self._plan()  # which measures what trees cost, where there may be some

    def _measured_costs(self) -> Costs:
        return self._costs_of(self.target, self.draft)

    def _costs_of(self, target: Transformer, draft: Transformer | None) -> Costs:
        """What passes over some tokens take, and a token of the draft, with their draws: the least of several, in turns."""
        sampler = Sampler(self.vocabulary.n_target, DEFAULT_SAMPLING, self.vocabulary.n_common)
        probs = sampler.new_probs()

        def seconds(model: Transformer, n: int) -> float:
            begin = time.perf_counter()
            with model.lock:
                for logits in model.forward([0] * n, n):
                    sampler.draw(probs, logits, TARGET_NOISE, n)
            return time.perf_counter() - begin

        jobs = [(target, n) for n in COSTS_TOKENS if n <= target.n_positions]
        # as in a step, a draft comes behind a pass of few tokens, which has put it out of the cache; its second finds it there
        jobs[2:2] = [(draft, 1), (draft, 1)] if draft else []
        least = [math.inf] * len(jobs)
        begin = time.perf_counter()
        for cycle in itertools.count(1):
            for i, (model, n) in enumerate(jobs):
                if i < 4 or time.perf_counter() < begin + COSTS_SECONDS:
                    least[i] = min(least[i], seconds(model, n))
            if time.perf_counter() > begin + (COSTS_SECONDS if cycle > 1 else SLOW):
                break
        first, token = (least.pop(2), least.pop(2)) if draft else (0.0, 0.0)
        n_tokens = [n for model, n in jobs if model is target]
        passes = {n: taken for n, taken in zip(n_tokens, least, strict=True) if taken < math.inf}
        return Costs(passes, token, max(0.0, first - token))

    def _measure_head(self, draft: Transformer, costs: Costs) -> None:
        """Use a narrow head of the draft where it is clearly faster than the whole one, with draws: the least of several."""
        sampler = Sampler(self.vocabulary.n_target, DEFAULT_SAMPLING, self.vocabulary.n_common)
        probs, head = sampler.new_probs(), NarrowHead(draft.weights)

        def seconds(is_narrow: bool) -> float:
            begin = time.perf_counter()
            with draft.lock:
                logits = draft.forward_narrowly([0], head) if is_narrow else draft.forward([0])
                sampler.draw(probs, logits[0], TARGET_NOISE, 1)
            return time.perf_counter() - begin

        seconds(True)  # which makes its program
        deadline = time.perf_counter() + COSTS_SECONDS
        whole = narrow = math.inf
        while narrow == math.inf or time.perf_counter() < deadline:
            whole, narrow = min(whole, seconds(False)), min(narrow, seconds(True))
        if narrow < LEAST_SAVING * whole:
            self._head, self._loss = head, (costs.of(1) + whole) / (whole - narrow)
            costs.draft *= narrow / whole

    def _measured_tree_costs(self, draft: Transformer) -> TreeCosts:
        """What the draft's passes over siblings take beside those over a chain, with their draws: the least of several."""
        for model in self._models:  # compiles what a text may need
            if model.n_positions > 1:
                model.forward_tree([0], [0, 0], [-1, -1])
                model.keep([1])
        sampler = Sampler(self.vocabulary.n_target, DEFAULT_SAMPLING, self.vocabulary.n_common)
        probs = sampler.new_probs()

        def seconds(n: int, is_tree: bool) -> float:
            begin = time.perf_counter()
            with draft.lock:
                logits = draft.forward_tree([0], [0] * n, [-1] * n, n) if is_tree else draft.forward([0] * (n + 1), n)
                for row in logits:
                    sampler.draw_few(probs, row, TARGET_NOISE, n)
            return time.perf_counter() - begin

        jobs = [(1, False), (WIDEST, False), *((n, True) for n in TREE_WIDTHS)]
        if draft.n_positions <= WIDEST:
            return TreeCosts.measured({}, 0.0)
        least = dict.fromkeys(jobs, math.inf)
        seconds(1, True)  # which compiles what a draw needs
        deadline = time.perf_counter() + COSTS_SECONDS
        while math.inf in least.values() or time.perf_counter() < deadline:
            for job in jobs:
                least[job] = min(least[job], seconds(*job))
        token, branching = least[1, False], least[WIDEST, True] - least[WIDEST, False]
        return TreeCosts.measured({n: least[n, True] / token for n in TREE_WIDTHS}, min(branching, token))  # more is noise

    def _judge_a_proposal(self) -> None:
        """Compile what judges one that no model drew."""
        verifier = VERIFIERS[self.verify](self.target.config.vocab_size, DEFAULT_SAMPLING)
        repeated = [0] * min(3, self.target.n_positions)
        for _ in decode(self.target, NgramDrafter(()), verifier, repeated, 2, FixedLength(1), {}):
            pass

    def _seconds(self, max_tokens: int) -> float:
        """What that many tokens take."""
        return sum(event.seconds for event in self.stream("", max_tokens) if isinstance(event, Step))

    def _choose_threads(self) -> None:
        """All threads, or 1, 2, 4, ... if clearly faster; each is tried in turn until the trial has taken TRIAL_SECONDS."""
        most = self._most_threads
        seconds = {min(2**i, most): 0.0 for i in range(most.bit_length() + 1)}
        while sum(seconds.values()) < TRIAL_SECONDS:
            for n in seconds:
                self._use_threads(n)
                seconds[n] += self._seconds(TRIAL_TOKENS)
        best = min(seconds, key=seconds.__getitem__)
        self._use_threads(best if TRIAL_MARGIN * seconds[best] < seconds[most] else most)

    def _use_threads(self, n: int) -> None:
        for model in self._models:
            model.n_threads = n


def _check_trees(tree: TreeMode, verify: VerifyMode) -> None:
    if tree == "on" and verify == "block":
        raise ValueError("tree is 'on', and verify is 'block', which judges chains alone; leave one of them out")


def _rebuilt(
    target: Transformer,
    draft: Draftable | None,
    tokenizer: AnyTokenizer,
    gamma: Gamma,
    verify: VerifyMode,
    tree: TreeMode,
    stage: Draftable | None,
) -> SpeculativeDecoder:
    """A decoder from its pickled parts."""
    return SpeculativeDecoder(target, draft, tokenizer, stage=stage, gamma=gamma, verify=verify, tree=tree)


def _ngram_drafter(ngrams: Ngrams | None, end_marks: Container[int]) -> NgramDrafter:
    return NgramDrafter(end_marks, ngrams if isinstance(ngrams, NgramTable) else None)


def kinds_to_make(quantize: str) -> dict[str, Kind | None]:
    """What the weights of target and draft become where they are floats; None: what they are. Raises ValueError."""
    kinds: dict[str, Kind | None] = {"target": None, "draft": None}
    models = {"target": ("target",), "draft": ("draft",), "both": ("target", "draft")}
    if not isinstance(quantize, str) or quantize != "none":
        for part in quantize.split(",") if isinstance(quantize, str) else [""]:
            model, _, name = part.partition("=")
            if model not in models or (name or "int8") not in QUANTIZED or part.endswith("="):
                raise ValueError(
                    f"quantize is {short(quantize, repr)}; expected none, or draft, target or both, alone or as in "
                    "draft=int4,target=int8"
                )
            kinds |= dict.fromkeys(models[model], QUANTIZED[name or "int8"])
    return kinds


def _kind_of_copy(weights: Weights, asked: Kind | None) -> Kind:
    """What a copy of a target that drafts for it is made of. Raises ValueError where that is hardly less than the target."""
    kinds = [asked] if asked else [INT8, INT4]
    if weights.n_bytes_as(INT8) > CACHED_BYTES:
        kinds.reverse()
    for kind in kinds:
        if weights.n_bytes_as(kind) <= WORTH_A_COPY * weights.n_bytes:
            return kind
    raise ValueError(
        f"the target is {weights.kind} already, from its file or by --quantize, so an {kinds[0].name} copy of it is no faster "
        "draft; leave it as it is or name another draft"
    )


def load_model(
    path: str | os.PathLike[str], int8: bool = False, n_threads: int | None = None, n_positions: int | None = None
) -> Transformer:
    """The model of a path or a name; int8: whether its weights become int8 where they are floats. Raises CheckpointError."""
    return _loaded(_opened("path", path), INT8 if int8 else None, n_threads, n_positions, tell_nobody)


def _opened(parameter: str, name: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint of that path or name."""
    return load_checkpoint(find(file_name(parameter, name)))


def _loaded(
    checkpoint: Checkpoint, kind: Kind | None, n_threads: int | None, n_positions: int | None, progress: Progress, kv: KV = AUTO
) -> Transformer:
    """The model in a checkpoint."""
    name = checkpoint.path.name
    try:
        weights = architecture_of(checkpoint.config).pack(
            checkpoint.config, checkpoint.tensors, kind, lambda share: progress(name, share)
        )
    except MemoryError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit: {error or 'there is no memory for its weights'}") from None
    return Transformer(checkpoint.config, weights, n_threads, n_positions, kv)


def _tokenizer(given: str | os.PathLike[str] | AnyTokenizer | None, target: Checkpoint | None, rows: int) -> AnyTokenizer:
    """The tokenizer that was given, else the target's own or the one that lies where a llama2.c file's is looked for."""
    if isinstance(given, AnyTokenizer):
        return given
    if given is None and target and target.vocabulary:
        return gguf_tokenizer(target.path, target.vocabulary)
    bos, marks = (target.bos, target.end_marks) if target else (None, {})
    path = find_tokenizer(None if given is None else file_name("tokenizer", given), target.path if target else None, rows)
    keys = {} if path.is_dir() or not path.exists() else read_vocabulary(path)
    return gguf_tokenizer(path, keys) if keys else load_tokenizer(path, bos, marks)
