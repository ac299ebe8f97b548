"""The loop, verification and statistics: a generator of events. Knows no files, no formats and no terminals.

One step: the drafter proposes n tokens, one forward of the target runs the last token and the proposals, and the target's own
token at each position decides how many of them stand. What follows the last one that stands is the target's as well. A proposal
may be a tree: the target's tokens lead from its root along a path of it as far as there is a child that is the next one.

`coupled` (the default): the target's token at a position is a function of its logits, the seed and the position, computed with
the very noise that the draft used (Daliri et al. 2024, arXiv:2408.07978); a proposal stands if it is that token. The text is
the target's own of the same seed, whatever was proposed.

`rejection`: a proposal stands with probability min(1, p / q), else its place is drawn from the residual (Leviathan et al. 2023,
arXiv:2211.17192); independent noise, since shared noise would bias it. The distribution is the target's, the text is not that
of a plain run.

`block`: the longest prefix of the proposal that may stand as a whole (Sun et al. 2024, arXiv:2403.10444): the distribution of
`rejection`, and never fewer accepted on the average.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from .machine.vectors import Float32
from .sampling import (
    ACCEPT_NOISE,
    DRAFT_NOISE,
    TARGET_NOISE,
    Sampler,
    Sampling,
    happens,
    keep_or_redraw,
    keep_or_refuse,
    redraw,
    round_noise,
    weigh_prefix,
)

VerifyMode = Literal["coupled", "rejection", "block"]
StopReason = str  # a name of an end mark, "stop" (a stop string), "max_tokens", "seq_len" or "interrupted"
SHAPE_ENDS: StopReason = "eos"  # of a text whose shape is complete, where the model has no end marks
MOST_FORCED = 31  # tokens of a proposal that a shape makes: half a pass


@dataclass(frozen=True)
class Prefill:
    """Before the text begins, and where all of it is run anew: its tokens, and the share of the work on them that is done."""

    tokens: list[int]
    share: float


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
    """

    tokens: list[int]
    tree: tuple[list[int], list[int]] | None = None


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
    stop_reason of the last step; n_nodes: how many tokens were proposed in all, the branches that were not taken too; text:
    what can be read of the tokens now, whole characters: those of all steps, in order, are the text. logprobs: of each token,
    where they are asked for. experts: of a mixture, how many a layer read in the pass, and reads for one token alone.
    """

    tokens: list[int]
    draft_tokens: list[int]
    n_accepted: int
    seconds: float
    draft_seconds: float
    stop_reason: StopReason | None = None
    n_nodes: int = 0
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    experts: tuple[float, int] = (0.0, 0)


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
    plain_seconds: float = 0.0  # that a token takes the target alone, measured in this run; 0: it was not
    experts_read: float = 0.0  # by a layer of a mixture, in all passes
    experts_alone: int = 0  # that it reads for one token; 0: it is none
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_reason: StopReason | None = "max_tokens"  # of a text of no steps

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
        """Over the target alone, whose time for a token was measured in this run; None where it was not, or nothing written.

        No pass takes less than one over one token does: what seems to exceed the tokens of a pass is noise.
        """
        return min(self.tokens_per_second * self.plain_seconds, self.tokens_per_pass) or None

    @property
    def tokens_per_pass(self) -> float:
        return self.n_generated / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Draft:
    """Proposed tokens; where a proposal ends may depend on its tokens and their q, on none that was drawn and left out.

    q: what each was drawn from, (1, V padded) a token; None where they were not drawn. parents: of each an earlier one's index,
    or -1; None where each follows the one before. Siblings were drawn from one q in their order, without replacement.
    """

    tokens: list[int]
    q: list[Float32] | None = None
    parents: list[int] | None = None

    def children(self, node: int) -> list[int]:
        """What is proposed behind a token, or, of -1, behind the text: indexes, the first choice first."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, tokens: list[int]) -> list[int]:
        """The proposed tokens from the text on that begin with those, as far as they are proposed; then first choices."""
        if self.parents is None:
            return self.tokens
        path, node = list[int](), -1
        while children := self.children(node):
            at = len(path)
            node = next((c for c in children if at < len(tokens) and self.tokens[c] == tokens[at]), children[0])
            path.append(self.tokens[node])
        return path


class Plan(Protocol):
    """Whoever decides how long proposals get: asked before each and after each of its tokens, told what became of it.

    most: how many tokens the proposal that has begun may get.
    """

    most: int

    def begins(self, most: int) -> bool:
        """Whether to draft for the next step; a proposal may have up to `most` tokens."""

    def goes_on(self, confidence: float) -> bool:
        """Whether another token is wanted behind one of that confidence, which is >= 0 and rises with the odds that it stands."""

    def takes(self, confidences: list[float]) -> int:
        """How many of tokens of such confidences to propose, of a drafter that has them at no cost; in the place of `goes_on`."""

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        """How the step went."""


class Drafter(Protocol):
    """A proposal may be shorter than planned, and empty."""

    def get_ready(self, tokens: list[int]) -> None:
        """Take in a prompt."""

    def propose(self, tokens: list[int], plan: Plan) -> Draft:
        """Tokens that may follow tokens, as long as the plan, which has begun, goes on."""


class Verifier(Protocol):
    """Whatever decides which proposals stand, and what the target says behind them."""

    def draft_noise(self, position: int) -> int:
        """The noise stream that a proposal from `position` on is to be drawn with."""

    def judge(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        """The text's tokens from `position` on, and how many of them are proposals that stand; those come first.

        logits: (n + 1, V) for n proposals; (n, V) where nothing may follow the last one. Behind the proposals that stand comes
        one token of the target's, if there are logits for it: -1 where none can be drawn from them.
        """


def judge_in_turn(
    token_at: Callable[[Float32, Draft, list[int], int], int], logits: Float32, draft: Draft, position: int
) -> tuple[list[int], int]:
    """`Verifier.judge` by the target's token at one position after the other; none is looked at behind the first mismatch.

    token_at: is told which proposals there are for the position.
    """
    tokens, node = list[int](), -1
    while node + 1 < len(logits):
        children = draft.children(node)
        token = token_at(logits[node + 1], draft, children, position + len(tokens))
        tokens.append(token)
        stands = next((child for child in children if draft.tokens[child] == token), None)
        if stands is None:
            return tokens, len(tokens) - 1
        node = stands
    return tokens, len(tokens)


class CoupledVerifier:
    """The target's own token, whatever was proposed."""

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs = self._sampler.new_probs()

    @staticmethod
    def draft_noise(position: int) -> int:
        return TARGET_NOISE

    def judge(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        return judge_in_turn(self._token, logits, draft, position)

    def _token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)


def q_of(draft: Draft, i: int, certain: Float32) -> Float32:
    """What proposal i was drawn from, (1, V padded); one that was not drawn came with certainty, and `certain` is filled."""
    if draft.q is not None:
        return draft.q[i]
    certain[0] = 0
    certain[0, draft.tokens[i]] = 1
    return certain


class RejectionVerifier:
    """The proposal with probability min(1, p / q), else a draw from the residual; past the proposals, a draw from p.

    A round's outcome depends on the noise of the positions that it fills, and on none behind them: those, which the next round
    uses again, are still as good as new.
    """

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs, self._certain, self._left = (self._sampler.new_probs() for _ in range(3))

    @staticmethod
    def draft_noise(position: int) -> int:
        return DRAFT_NOISE

    def judge(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        return judge_in_turn(self._token, logits, draft, position)

    def _token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        if not children:
            return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)
        self._sampler.probabilities(self._probs, logits)
        seed, n, q = self._sampler.sampling.seed, self._sampler.vocab_size, q_of(draft, children[0], self._certain)
        tokens = [draft.tokens[child] for child in children]
        if len(tokens) > 1:
            self._left[:] = q
            q = self._left
        for token, sibling in itertools.pairwise(tokens):
            if keep_or_refuse(self._probs, q, n, token, sibling, seed, ACCEPT_NOISE, position):
                return token
        return int(keep_or_redraw(self._probs, q, n, tokens[-1], seed, ACCEPT_NOISE, TARGET_NOISE, position))


class BlockVerifier:
    """The longest prefix whose own lot falls on standing (Sun et al. 2024, Algorithm 2); behind it, a draw from its residual.

    A prefix is kept because all longer ones fell, so a round's outcome depends on the noise of positions that it does not fill,
    and those of a next round at the same positions must not be that noise: proposals and lots take streams of their round,
    which no other round of a text shares, as each begins at another position. What a round draws for the target may take
    TARGET_NOISE: it is used at that one position, which is filled with it.
    """

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs, self._kept, self._certain, self._nothing = (self._sampler.new_probs() for _ in range(4))

    @staticmethod
    def draft_noise(position: int) -> int:
        return round_noise(position)[0]

    def judge(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        seed, vocab_size, n = self._sampler.sampling.seed, self._sampler.vocab_size, len(draft.tokens)
        lots = round_noise(position)[1]
        n_accepted, kept_weight, weight = 0, 1.0, 1.0
        for i in range(n + 1):
            if i < len(logits):
                self._sampler.probabilities(self._probs, logits[i])
            odds, next_weight = weight, 0.0  # of the whole block
            if i < n:
                q = q_of(draft, i, self._certain)
                odds, next_weight = weigh_prefix(self._probs, q, vocab_size, draft.tokens[i], weight)
            if happens(odds, seed, lots, i) or i == 0:
                n_accepted, kept_weight = i, weight
                self._probs, self._kept = self._kept, self._probs
            weight = next_weight
            if weight == 0.0:  # nor can anything longer stand
                break
        tokens = draft.tokens[:n_accepted]
        if n_accepted < len(logits):
            if n_accepted == n:  # what is left of p is all of it
                q, kept_weight = self._nothing, 1.0
            else:
                q = q_of(draft, n_accepted, self._certain)
            tokens.append(int(redraw(self._kept, q, vocab_size, kept_weight, seed, TARGET_NOISE, position + n_accepted)))
        return tokens, n_accepted


VERIFIERS: dict[str, Callable[[int, Sampling], Verifier]] = {
    "coupled": CoupledVerifier,
    "rejection": RejectionVerifier,
    "block": BlockVerifier,
}


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

    def mask(self, logits: Float32, draft: Draft) -> None:
        """Make -inf of what may not follow, in each row (V,) of those that `Verifier.judge` gets.

        Rows that are not finite stay so, to be told of; so do those behind a token that may not follow, where nobody looks.
        """

    def takes(self, tokens: list[int]) -> None:
        """The text has grown by those."""


class Target(Protocol):
    """What the loop asks of a model: logits at the last tokens of a text, under a lock as long as they are read."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def n_positions(self) -> int: ...
    @property
    def n_short(self) -> int: ...
    @property
    def n_passes(self) -> int: ...
    @property
    def experts_read(self) -> tuple[float, int]: ...
    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32: ...
    def forward_tree(self, tokens: list[int], nodes: list[int], parents: list[int]) -> Float32: ...


@dataclass
class Text:
    """A text that grows by steps, each in two halves: what it wants run, and what becomes of it once the logits are there.

    Between the halves stands a pass, whoever runs it: `decode` does for one text; others may let texts take turns or share one.
    tokens: the prompt's, then the text's; n_positions: the target's; plan: how long proposals get; end_marks: tokens that end a
    text, with their names; shape: what it may say, by default anything; n_short: of how many tokens a text is short at most,
    where the target turns long ones otherwise. draft: the last proposal; stop_reason: None until the text has ended.
    """

    tokens: list[int]
    max_tokens: int
    n_positions: int
    drafter: Drafter | None
    verifier: Verifier
    plan: Plan
    end_marks: Mapping[int, str]
    shape: Shape | None = None
    n_short: int = 0

    def __post_init__(self) -> None:
        # The last token is never run, so a text may have one token more than the target has positions.
        self._limit = min(len(self.tokens) + self.max_tokens, self.n_positions + 1)
        self.stop_reason: StopReason | None = None
        self.draft, self._draft_seconds = Draft([]), 0.0
        self._walk = self.shape.begin(self.tokens) if self.shape else None
        self._is_forced = False  # whether the shape proposed, and not the drafter

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
            is_drafted = self.drafter and self.plan.begins(room)
            draft = self.drafter.propose(self.tokens, self.plan) if self.drafter and is_drafted else Draft([])
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
        """What the text goes on with, up to and with an end mark or the first that is not the proposal; how many of it stood.

        logits: (n + 1, V) for n proposals, which a shape masks. Changes nothing else: it may be asked again where another pass
        has overwritten them.
        Raises ValueError for logits that no token can be drawn from.
        """
        draft, end_marks = self.draft, self.end_marks
        # what is proposed behind an end mark is no part of the text, nor is the target's token behind one that stands
        end = next((i for i, token in enumerate(draft.tokens, 1) if token in end_marks), None) if draft.parents is None else None
        if end:
            draft, logits = replace(draft, tokens=draft.tokens[:end]), logits[:end]
        if self._walk:
            self._walk.mask(logits, draft)
        tokens, n_accepted = self.verifier.judge(logits, draft, len(self.tokens))
        if draft.parents is not None:  # where an end mark has no children
            end = next((i for i, token in enumerate(tokens, 1) if token in end_marks), len(tokens))
            tokens, n_accepted = tokens[:end], min(n_accepted, end)
        if tokens[-1] < 0:
            raise (self._walk and self._walk.trouble) or ValueError(
                "the target's logits are not finite: its weights are damaged or too large to compute with, or its keys and "
                "values too large for f16 (kv='f32' holds them)"
            )
        return tokens, n_accepted

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
            self.plan.saw(n_nodes, n_accepted, seconds, draft_seconds)
        return Step(new, walked, n_accepted, seconds + draft_seconds, draft_seconds, self.stop_reason, n_nodes)


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


def decode(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier,
    prompt: list[int],
    max_tokens: int,
    plan: Plan,
    end_marks: Mapping[int, str],
    shape: Shape | None = None,
) -> Iterator[Event]:
    """Continue the prompt by up to max_tokens tokens: the prompt, then steps, each behind its proposal where there is one.

    All else as `Text` says. A step runs what the target's cache does not hold: the last token and the proposal. Raises ValueError
    where the target's logits are not finite.
    """

    def read() -> float:
        """Run all but the last token of the text, where that is not done; the seconds that it took."""
        begin = time.perf_counter()
        target.forward(text.tokens[:-1], n_logits=0)
        if drafter:
            drafter.get_ready(text.tokens)
        return time.perf_counter() - begin

    text = Text([*prompt], max_tokens, target.n_positions, drafter, verifier, plan, end_marks, shape, target.n_short)
    yield Prompt(prompt, read())
    n, reading = len(prompt), 0.0
    while not text.has_ended:
        if n <= target.n_short < len(text.tokens):  # anew, as that of a long one: no measure of what a step takes
            reading = read()
        n, draft = len(text.tokens), text.wants()
        if draft.tokens:
            yield Proposal(draft.path([]), None if draft.parents is None else (draft.tokens, draft.parents))
        begin = time.perf_counter()
        new, n_accepted = run(target, text)
        step = text.takes(new, n_accepted, time.perf_counter() - begin)
        experts = target.experts_read
        yield replace(step, seconds=step.seconds + reading, experts=experts) if reading or experts[1] else step
        reading = 0.0
