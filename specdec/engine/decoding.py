"""The loop and its events. Knows no files, no formats and no terminals.

One step: the drafter proposes n tokens, one forward of the target runs the last token and the proposals, and the target's own
token at each position decides how many of them stand. What follows the last one that stands is the target's as well. A proposal
may be a tree: the target's tokens lead from its root along a path of it as far as there is a child that is the next one.
"""

import inspect
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol, TypeVar

from specdec.runtime.simd import Float32
from specdec.sampling import Drawn, Sampling
from specdec.verification import CoupledVerifier, Draft, Verifier

Stop = str | GenericSequence[str]
Method = TypeVar("Method", bound=Callable[..., Any])
StopReason = str  # a name of an end mark, "stop" (a stop string), "max_tokens", "seq_len" or "interrupted"
SHAPE_ENDS: StopReason = "eos"  # of a text whose shape is complete, where the model has no end marks
# To measure a speed-up: the fewest steps without a draft; steps to each side whose median stands for one; how much more than
# such medians all steps may take
LEAST_PLAIN, NEIGHBOURS, MOST_STALLED = 8, 4, 1.3
MOST_FORCED = 31  # tokens of a proposal that a shape makes: half a pass


@dataclass(frozen=True)
class Prefill:
    """Before the text begins, and where all of it is run anew: its tokens, and the share of the work on them that is done.

    text: the prompt's.
    """

    tokens: list[int]
    share: float
    text: str = ""


@dataclass(frozen=True)
class Prompt:
    """The text has begun: the prompt's tokens, BOS first, have been run, in so many seconds. text: theirs; of a chat ""."""

    tokens: list[int]
    seconds: float
    text: str = ""


@dataclass(frozen=True)
class Proposal:
    """Tokens that the target is about to judge; of a tree its first choices.

    tree: all of its tokens, and of each the index of the one before it, or -1; None where the tokens are all, a chain.
    pieces: the text of each, for who has asked for it.
    """

    tokens: list[int]
    tree: tuple[list[int], list[int]] | None = None
    pieces: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TokenLogprob:
    """The log of a token's probability, before temperature; top: the likeliest tokens, with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Step:
    """A pass of the target over the last token and the proposal has been judged.

    tokens: what the text grew by, an end mark not counted; draft_tokens: what was proposed, of which the first n_accepted
    stood; of a tree the path that stood, and on from there by first choices; seconds of the whole step; draft_seconds of it;
    stop_reason of the last step, and the stop_string that ended it; n_nodes: how many tokens were proposed in all, the branches
    that were not taken too. pieces: what can be read now, by token, and at the end of what waited for more; text: all of them,
    whole characters: those of all steps, in order, are the text. wrong: the text of each proposal that did not stand, for who has
    asked for it. logprobs: of each token, where they are asked for. experts: of a mixture, how many a layer read in the pass, and
    reads for one token alone.
    """

    tokens: list[int]
    draft_tokens: list[int]
    n_accepted: int
    seconds: float
    draft_seconds: float
    stop_reason: StopReason | None = None
    n_nodes: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    experts: tuple[float, int] = (0.0, 0)
    wrong: list[str] = field(default_factory=list)
    stop_string: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Event = Prompt | Proposal | Step


@dataclass
class Statistics:
    """Sums over the events of one text.

    n_prompt: tokens of the prompt, BOS included; n_generated, n_drafted, n_accepted: tokens; target_passes: the prefill's not
    counted; prefill_seconds and decode_seconds: without loading and compiling.
    """

    n_prompt: int = 0
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_nodes: int = 0  # tokens that were proposed in all, the branches of trees that no path took too
    target_passes: int = 0
    accepted_histogram: list[int] = field(default_factory=list)  # passes by how many proposals they accepted
    drafted_histogram: list[int] = field(default_factory=list)  # passes by how many they had to judge
    experts_read: float = 0.0  # by a layer of a mixture, in all passes
    experts_alone: int = 0  # that it reads for one token; 0: it is none
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_reason: StopReason | None = "max_tokens"  # of a text of no steps
    _plain: list[tuple[float, float]] = field(
        default_factory=list, repr=False
    )  # steps without a draft: seconds of pass, of the rest
    _drafted: list[tuple[int, float]] = field(default_factory=list, repr=False)  # the others: tokens proposed, seconds

    def add(self, event: Event | Prefill) -> None:
        if isinstance(event, Prompt):
            self.n_prompt = len(event.tokens)
            self.prefill_seconds += event.seconds
        if isinstance(event, Step):
            self._add_step(event)

    def _add_step(self, step: Step) -> None:
        self.n_generated += len(step.tokens)
        self.n_drafted += len(step.draft_tokens)
        self.n_accepted += step.n_accepted
        self.n_nodes += step.n_nodes
        self.target_passes += 1
        self.experts_read, self.experts_alone = self.experts_read + step.experts[0], step.experts[1]
        for histogram, n in ((self.accepted_histogram, step.n_accepted), (self.drafted_histogram, len(step.draft_tokens))):
            histogram += [0] * (n + 1 - len(histogram))
            histogram[n] += 1
        self.decode_seconds += step.seconds
        if step.n_nodes:
            self._drafted.append((step.n_nodes, step.seconds))
        else:
            self._plain.append((step.seconds - step.draft_seconds, step.draft_seconds))
        self.stop_reason = step.stop_reason

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0 where nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / drafted of the first proposals of all passes, of the second ones, ..."""
        drafted = [sum(self.drafted_histogram[i:]) for i in range(1, len(self.drafted_histogram))]
        return [sum(self.accepted_histogram[i:]) / n for i, n in enumerate(drafted, 1)]

    @property
    def experts_per_token(self) -> float:
        """How many a layer read for each token that was written; 0 of a model without experts."""
        return self.experts_read / self.n_generated if self.n_generated else 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.decode_seconds / self.n_generated if self.n_generated else 0.0

    @property
    def speed_up(self) -> float | None:
        """Speed over the target alone, measured by the steps of this text that had no draft; None if they say too little.

        Medians keep stalls out; where other programs cost too much of the time, nothing can be said. A plain step after drafted
        ones finds part of the weights evicted from the caches and takes about a tenth longer than in a run of plain steps, so
        the lower third of them counts.
        """
        passes = sorted(seconds for seconds, _ in self._plain)
        drafted = [seconds for _, seconds in sorted(self._drafted, key=lambda step: step[0])]  # neighbours are about as long
        n = len(passes)
        if n < LEAST_PLAIN or not drafted:
            return None
        typical = [median(drafted[max(i - NEIGHBOURS, 0) : i + NEIGHBOURS + 1]) for i in range(len(drafted))]
        if sum(passes) > MOST_STALLED * n * median(passes) or sum(drafted) > MOST_STALLED * sum(typical):
            return None
        alone = passes[n // 3]
        taken = sum(typical) + n * (alone + median(rest for _, rest in self._plain))
        return min(self.n_generated * alone / taken, self.tokens_per_pass)

    @property
    def tokens_per_pass(self) -> float:
        return self.n_generated / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0


class LengthPolicy(Protocol):
    """Decides how many tokens to draft in each round.

    max_tokens: the most that the round that has begun may draft.
    """

    max_tokens: int

    def start(self, room: int) -> bool:
        """Begin a round in which up to `room` tokens fit; return whether to draft."""

    def should_continue(self, confidence: float) -> bool:
        """Take in a drafted token; return whether to draft another. confidence: >= 0, rises with the chance to be accepted."""

    def choose(self, confidences: list[float]) -> int:
        """Return how many of the tokens of such confidences to propose, for a drafter that has them at no cost."""

    def update(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        """Learn from a round whose pass and draft took so many seconds."""


class Drafter(Protocol):
    """A proposal may be shorter than planned, and empty."""

    def get_ready(self, tokens: list[int]) -> None:
        """Take in a prompt."""

    def propose(self, tokens: list[int], policy: LengthPolicy) -> Draft:
        """Return tokens that may follow, as many as the policy, whose round has begun, asks for."""


class Shape(Protocol):
    """What a text may say, whatever its target would: its tokens are drawn from logits that a `Walk` has masked."""

    def begin(self, prompt: list[int]) -> "Walk":
        """Of a text behind that prompt."""


class Walk(Protocol):
    """Where a text stands in its shape. Raises ValueError where no token can follow that the shape allows.

    trouble: why `mask` has left nothing of a row, if it did of one that the text may never come to.
    """

    @property
    def trouble(self) -> Exception | None: ...
    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but an end mark."""

    def forced(self, most: int) -> list[int]:
        """Tokens, up to so many, that follow whatever the logits are, since each is all that may; no end marks."""

    def n_allowed(self, tokens: list[int]) -> int:
        """How many of the tokens may follow, one behind the other."""

    def find_end(self, tokens: list[int]) -> int | None:
        """Return how many of the tokens complete the shape, or None if they do not; none is an end mark."""

    def mask(self, logits: Float32, draft: Draft) -> None:
        """Make -inf of what may not follow, in each row (V,) of those that `Verifier.judge` gets.

        Rows that are not finite stay so, to be told of; so do those behind a token that may not follow, where nobody looks.
        """

    def takes(self, tokens: list[int]) -> None:
        """The text has grown by those."""


@dataclass(frozen=True)
class Job:
    """One text that is wanted.

    prompt: ids, BOS first; stops: strings that it ends before; shape: what it may say. top_logprobs: None for no log
    probabilities; else of how many of the likeliest tokens beside the text's own, before temperature. prediction: tokens that are
    expected, proposed as long as they stand. shown: special tokens that stand in the text, by the names that they have there.
    tells_guesses: whether events have the words of what was guessed.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stops: GenericSequence[str] = ()
    top_logprobs: int | None = None
    prediction: GenericSequence[int] = ()
    shape: Shape | None = None
    shown: Mapping[int, str] = field(default_factory=dict)
    tells_guesses: bool = False


class More(Drawn, total=False):
    """What else a text may be asked for in so many words; all but these two stand in the place of the sampling's."""

    stop: Stop
    shape: Shape | None


def with_more(method: Method) -> Method:
    """A method whose keywords are those of `More`, each of which `help` shows."""
    signature = inspect.signature(method)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    kinds = {name: More.__annotations__[name] for name in ("stop", "shape", *Drawn.__annotations__)}
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=() if name == "stop" else None, annotation=kind)
        for name, kind in kinds.items()
    ]
    vars(method)["__signature__"] = signature.replace(parameters=[*named, *more])
    return method


class Model(Protocol):
    """What is asked of a model: logits at the last tokens of a text, under a lock as long as they are read."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def n_positions(self) -> int: ...
    @property
    def n_short(self) -> int: ...
    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32: ...


class Target(Model, Protocol):
    """What the loop asks of a model."""

    @property
    def n_passes(self) -> int: ...
    @property
    def experts_read(self) -> tuple[float, int]: ...
    def forward_tree(self, tokens: list[int], nodes: list[int], parents: list[int]) -> Float32: ...


@dataclass
class Text:
    """A text that grows by steps, each in two halves: what it wants run, and what becomes of it once the logits are there.

    Between the halves stands a pass, whoever runs it: `decode` does for one text; others may let texts take turns or share one.
    tokens: the prompt's, then the text's; n_positions: the target's; policy: how long proposals get; end_marks: tokens that end a
    text, with their names; shape: what it may say, by default anything; n_short: of how many tokens a text is short at most,
    where the target turns long ones otherwise; logprobs_of: tells those of new
    tokens, where they are asked for, by what `judge` gets before a shape masks it. draft: the last proposal;
    stop_reason: None until the text has ended.
    """

    tokens: list[int]
    max_tokens: int
    n_positions: int
    drafter: Drafter | None
    verifier: Verifier
    policy: LengthPolicy
    end_marks: Mapping[int, str]
    shape: Shape | None = None
    n_short: int = 0
    logprobs_of: Callable[[Float32, Draft, list[int]], list[TokenLogprob]] | None = None

    def __post_init__(self) -> None:
        # The last token is never run, so a text may have one token more than the target has positions.
        self._limit = min(len(self.tokens) + self.max_tokens, self.n_positions + 1)
        self.stop_reason: StopReason | None = None
        self.draft, self._draft_seconds = Draft([]), 0.0
        self._walk = self.shape.begin(self.tokens) if self.shape else None
        self._is_forced = False  # whether the shape proposed, and not the drafter
        self._logprobs: list[TokenLogprob] | None = None

    @property
    def proposal(self) -> Proposal:
        """What tells of the draft before it is judged."""
        draft = self.draft
        return Proposal(draft.path([]), None if draft.parents is None else (draft.tokens, draft.parents))

    @property
    def has_ended(self) -> bool:
        return self.stop_reason is not None or len(self.tokens) >= self._limit

    def wants(self) -> Draft:
        """The first half: what the pass is to run behind the text's last token (`run`); the tokens may be none."""
        begin, n, most = time.perf_counter(), len(self.tokens), self._limit - 1
        room = (
            min(most, self.n_short) if n <= self.n_short else most
        ) - n  # a pass over short and long texts would be two over all
        forced = self._walk.forced(min(room, MOST_FORCED)) if self._walk else []
        self._is_forced = bool(forced)
        if forced:
            self.draft = Draft(forced)
        else:
            is_drafted = self.drafter and self.policy.start(room)
            draft = self.drafter.propose(self.tokens, self.policy) if self.drafter and is_drafted else Draft([])
            self.draft = self._within_shape(draft) if self._walk else draft
        self._draft_seconds = time.perf_counter() - begin
        return self.draft

    def _within_shape(self, draft: Draft) -> Draft:
        """A chain up to the first token that the shape refuses: without it where the text is the same whatever is proposed, else
        with it, since where a proposal ends may not depend on a token that was drawn and left out."""
        if not self._walk or not draft.tokens or draft.parents is not None:
            return draft
        n = self._walk.n_allowed(draft.tokens) + (not isinstance(self.verifier, CoupledVerifier))
        return Draft(draft.tokens[:n], draft.q[:n] if draft.q else None)

    def judge(self, logits: Float32) -> tuple[list[int], int]:
        """What the text goes on with, up to the first that is not the proposal or that ends the text; how many of it stood.

        logits: (n + 1, V) for n proposals, which a shape masks. Changes nothing else: it may be asked again where another pass
        has overwritten them.
        Raises ValueError for logits that no token can be drawn from.
        """
        draft = self.draft
        unmasked = logits.copy() if self.logprobs_of and self._walk else logits
        # Neither a proposal behind the text's end is a part of it, nor the target's token there.
        if draft.parents is None and (end := self._find_end(draft.tokens)) is not None:
            draft, logits = replace(draft, tokens=draft.tokens[:end]), logits[:end]
        if self._walk:
            self._walk.mask(logits, draft)
        tokens, n_accepted = self.verifier.judge(logits, draft, len(self.tokens))
        if draft.parents is not None and (end := self._find_end(tokens[:n_accepted])) is not None:
            tokens, n_accepted = tokens[:end], end
        if tokens[-1] < 0:
            raise (self._walk and self._walk.trouble) or ValueError(
                "the target's logits are not finite: its weights are damaged or too large to compute with, or its keys and "
                "values too large for f16 (kv='f32' holds them)"
            )
        if self.logprobs_of:
            self._logprobs = self.logprobs_of(unmasked, self.draft, tokens)
        return tokens, n_accepted

    def _find_end(self, tokens: list[int]) -> int | None:
        """Return how many of the tokens belong to the text, if an end mark or a complete shape ends it among them."""
        mark = next((i for i, token in enumerate(tokens) if token in self.end_marks), None)
        end = self._walk.find_end(tokens[:mark]) if self._walk else None
        return end if end is not None or mark is None else mark + 1

    def takes(self, new: list[int], n_accepted: int, seconds: float) -> Step:
        """The second half: the text grows by what was judged; seconds: of the pass and the judging."""
        draft, walked = self.draft, self.draft.path(new)
        if new[-1] in self.end_marks:
            self.stop_reason = self.end_marks[new.pop()]
        self.tokens += new
        if self._walk:
            self._walk.takes(new)
            if self._walk.is_over:  # whichever mark was drawn, if one was: it would depend on what was proposed
                self.stop_reason = next(iter(self.end_marks.values()), SHAPE_ENDS)
        if self.stop_reason is None and len(self.tokens) == self._limit:
            self.stop_reason = "seq_len" if self._limit > self.n_positions else "max_tokens"
        n_nodes, draft_seconds = len(draft.tokens), self._draft_seconds
        if not self._is_forced:
            self.policy.update(n_nodes, n_accepted, seconds, draft_seconds)
        step = Step(new, walked, n_accepted, seconds + draft_seconds, draft_seconds, self.stop_reason, n_nodes)
        return replace(step, logprobs=self._logprobs[: len(new)]) if self._logprobs is not None else step


def run(target: Target, text: Text) -> tuple[list[int], int]:
    """A pass over what a text wants, with logits at its last token and at each that is proposed, and what `Text.judge` says."""
    draft = text.draft
    with target.lock:
        while True:
            passes = target.n_passes
            if draft.parents is None:
                logits = target.forward(text.tokens + draft.tokens, n_logits=len(draft.tokens) + 1)
            else:
                logits = target.forward_tree(text.tokens, draft.tokens, draft.parents)
            judged = text.judge(logits)
            if target.n_passes <= passes + 1:  # else a signal handler ran a pass over these logits
                return judged


class Reader(Protocol):
    """Whoever reads a text's tokens, all but the last. turns: behind how many a text is read anew."""

    @property
    def turns(self) -> Collection[int]: ...
    def read(self, tokens: list[int]) -> Iterator[float]:
        """Tells the share of the work that is done."""


@dataclass(frozen=True)
class AtOnce:
    """A target that reads without telling."""

    target: Target

    @property
    def turns(self) -> Collection[int]:
        return {self.target.n_short} - {0}

    def read(self, tokens: list[int]) -> Iterator[float]:
        self.target.forward(tokens[:-1], n_logits=0)
        yield from ()


def decode(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier,
    prompt: list[int],
    max_tokens: int,
    policy: LengthPolicy,
    end_marks: Mapping[int, str],
    shape: Shape | None = None,
) -> Iterator[Event | Prefill]:
    """Continue the prompt by up to max_tokens tokens, as `Text` and `write` say."""
    text = Text([*prompt], max_tokens, target.n_positions, drafter, verifier, policy, end_marks, shape, target.n_short)
    return write(target, text, AtOnce(target))


def write(target: Target, text: Text, reader: Reader) -> Iterator[Event | Prefill]:
    """A text's events: the prompt, then steps, each behind its proposal where there is one; a `Prefill` for each share of `read`.

    A step runs what the target's cache does not hold: the last token and the proposal. Raises ValueError where the target's
    logits are not finite.
    """

    def reading() -> Generator[Prefill, None, float]:
        """Run all but the last token of the text, where that is not done; the seconds that it took."""
        begin, tokens = time.perf_counter(), [*text.tokens]
        for share in reader.read(tokens):
            yield Prefill(tokens, share)
        if text.drafter:
            text.drafter.get_ready(tokens)
        return time.perf_counter() - begin

    n, prompt = len(text.tokens), [*text.tokens]
    yield Prompt(prompt, (yield from reading()))
    while not text.has_ended:
        seconds = 0.0
        if any(n <= turn < len(text.tokens) for turn in reader.turns):  # anew, as a long one: no measure of what a step takes
            seconds = yield from reading()
        n = len(text.tokens)
        if text.wants().tokens:
            yield text.proposal
        begin = time.perf_counter()
        new, n_accepted = run(target, text)
        step = text.takes(new, n_accepted, time.perf_counter() - begin)
        experts = target.experts_read
        yield replace(step, seconds=step.seconds + seconds, experts=experts) if seconds or experts[1] else step
