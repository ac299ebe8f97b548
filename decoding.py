"""The loop, verification and statistics: a generator of events. Knows no files, no formats and no terminals.

One step: the drafter proposes n tokens, one forward of the target runs the last token and the proposals, and the target's own
token at each position decides how many of them stand. What follows the last one that stands is the target's as well.

`coupled` (the default): the target's token at a position is a function of its logits, the seed and the position, computed with
the very noise that the draft used (Daliri et al. 2024, arXiv:2408.07978); a proposal stands if it is that token. The text is
the target's own of the same seed, whatever was proposed.

`rejection`: a proposal stands with probability min(1, p / q), else its place is drawn from the residual (Leviathan et al. 2023,
arXiv:2211.17192); independent noise, since shared noise would bias it. The distribution is the target's, the text is not that
of a plain run.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .drafters import Draft, Drafter
from .kernels import MAX_TOKENS
from .machine.vectors import Float32
from .sampling import ACCEPT_NOISE, DRAFT_NOISE, TARGET_NOISE, Sampler, Sampling, keep_or_redraw

VerifyMode = Literal["coupled", "rejection"]
StopReason = str  # a name of an end mark, "max_tokens", "seq_len" or "interrupted"
MAX_GAMMA = MAX_TOKENS - 1


@dataclass(frozen=True)
class Prompt:
    """The text has begun: the prompt's tokens, BOS first, have been run, in so many seconds."""

    tokens: list[int]
    seconds: float


@dataclass(frozen=True)
class Proposal:
    """Tokens that the target is about to judge."""

    tokens: list[int]


@dataclass(frozen=True)
class Step:
    """A pass of the target over the last token and the proposal has been judged.

    tokens: what the text grew by, an end mark not counted; draft_tokens: what was proposed, of which the first n_accepted
    stood; seconds of the whole step; draft_seconds of it; stop_reason of the last step.
    """

    tokens: list[int]
    draft_tokens: list[int]
    n_accepted: int
    seconds: float
    draft_seconds: float
    stop_reason: StopReason | None = None


Event = Prompt | Proposal | Step


@dataclass
class Statistics:
    """Sums over the events of one text.

    n_prompt: tokens of the prompt, BOS included; n_generated, n_drafted, n_accepted: tokens; target_passes: the prefill's not
    counted; prefill_seconds and decode_seconds: without loading and compiling.
    """

    n_prompt: int
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    target_passes: int = 0
    accepted_histogram: list[int] = field(default_factory=list)  # passes by how many proposals they accepted
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_reason: StopReason | None = "max_tokens"  # of a text of no steps

    def add(self, event: Event) -> None:
        if isinstance(event, Prompt):
            self.prefill_seconds += event.seconds
        if isinstance(event, Step):
            self._add_step(event)

    def _add_step(self, step: Step) -> None:
        self.n_generated += len(step.tokens)
        self.n_drafted += len(step.draft_tokens)
        self.n_accepted += step.n_accepted
        self.target_passes += 1
        self.accepted_histogram += [0] * (step.n_accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[step.n_accepted] += 1
        self.decode_seconds += step.seconds
        self.stop_reason = step.stop_reason

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0 where nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.n_generated / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0


class Verifier(Protocol):
    """Whatever says the target's token; draft_noise is the noise stream that its drafts are drawn with."""

    draft_noise: int

    def token(self, logits: Float32, draft: Draft, i: int, position: int) -> int:
        """The token at a position from the target's logits (V,), where proposal i of the draft is to be judged; or -1."""


class CoupledVerifier:
    """The target's own token, whatever was proposed."""

    draft_noise = TARGET_NOISE

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs = self._sampler.new_probs()

    def token(self, logits: Float32, draft: Draft, i: int, position: int) -> int:
        return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)


class RejectionVerifier:
    """The proposal with probability min(1, p / q), else a draw from the residual; past the proposals, a draw from p.

    A proposal that was not drawn came with certainty: q is 1.
    """

    draft_noise = DRAFT_NOISE

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs, self._certain = self._sampler.new_probs(), self._sampler.new_probs()

    def token(self, logits: Float32, draft: Draft, i: int, position: int) -> int:
        if i == len(draft.tokens):
            return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)
        self._sampler.probabilities(self._probs, logits)
        seed, n, proposal = self._sampler.sampling.seed, self._sampler.vocab_size, draft.tokens[i]
        if draft.q is None:
            self._certain[0] = 0
            self._certain[0, proposal] = 1
        q = self._certain if draft.q is None else draft.q[i]
        return int(keep_or_redraw(self._probs, q, n, proposal, seed, ACCEPT_NOISE, TARGET_NOISE, position))


VERIFIERS: dict[str, Callable[[int, Sampling], Verifier]] = {"coupled": CoupledVerifier, "rejection": RejectionVerifier}


class Target(Protocol):
    """What the loop asks of a model: logits at the last tokens of a text, under a lock as long as they are read."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def n_positions(self) -> int: ...
    @property
    def n_passes(self) -> int: ...
    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32: ...


def judge(
    logits: Float32, draft: Draft, verifier: Verifier, position: int, end_marks: Mapping[int, str]
) -> tuple[list[int], int]:
    """The target's tokens from `position` on, up to and with an end mark or the first that is not the proposal; how many stood.

    logits: (len(draft.tokens) + 1, V). Raises ValueError for logits that no token can be drawn from.
    """
    tokens: list[int] = []
    n_accepted = 0
    for i, row in enumerate(logits):
        token = verifier.token(row, draft, i, position + i)
        if token < 0:
            raise ValueError("the target's logits are not finite: its weights are damaged, or too large to compute with")
        tokens.append(token)
        stands = i < len(draft.tokens) and token == draft.tokens[i]
        n_accepted += stands
        if not stands or token in end_marks:
            break
    return tokens, n_accepted


def decode(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier,
    prompt: list[int],
    max_tokens: int,
    gamma: int,
    end_marks: Mapping[int, str],
) -> Iterator[Event]:
    """Continue the prompt by up to max_tokens tokens: the prompt, then a proposal, where there is a drafter, and a step in turns.

    gamma: proposals a step; end_marks: tokens that end a text, with their names. A step runs what the target's cache does not
    hold: the last token and the proposal. Raises ValueError where the target's logits are not finite.
    """
    begin = time.perf_counter()
    tokens = list(prompt)
    # The last token is never run, so a text may have one token more than the target has positions.
    limit = min(len(prompt) + max_tokens, target.n_positions + 1)
    stop: StopReason | None = None
    target.forward(tokens[:-1], n_logits=0)
    if drafter:
        drafter.propose(tokens, 0)
    yield Prompt(prompt, time.perf_counter() - begin)
    while len(tokens) < limit and stop is None:
        begin = time.perf_counter()
        draft = drafter.propose(tokens, min(gamma, limit - len(tokens) - 1)) if drafter else Draft([])
        draft_seconds = time.perf_counter() - begin
        if drafter:
            yield Proposal(draft.tokens)
        begin = time.perf_counter()
        with target.lock:
            passes = -1
            while passes != target.n_passes:  # at once, unless a signal handler ran a pass over these logits
                logits = target.forward(tokens + draft.tokens, n_logits=len(draft.tokens) + 1)
                passes = target.n_passes
                new, n_accepted = judge(logits, draft, verifier, len(tokens), end_marks)
        if new[-1] in end_marks:
            stop = end_marks[new.pop()]
        tokens += new
        if stop is None and len(tokens) == limit:
            stop = "seq_len" if limit > target.n_positions else "max_tokens"
        yield Step(new, draft.tokens, n_accepted, time.perf_counter() - begin + draft_seconds, draft_seconds, stop)
