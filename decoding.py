"""Speculative decoding: sampling, drafters, verification, and the loop, a generator of `Step`. Knows no terminals, no files.

One step: the drafter proposes n tokens, one forward of the target runs the last token and the proposals, and the target's own
token at each position decides how many of them stand. What follows the last one that stands is the target's as well.

`coupled` (the default): the target's token at a position is a function of its logits, the seed and the position, computed with
the very noise that the draft used (Daliri et al. 2024, arXiv:2408.07978); a proposal stands if it is that token. The text is
the target's own of the same seed, whatever was proposed.

`rejection`: a proposal stands with probability min(1, p / q), else its place is drawn from the residual (Leviathan et al. 2023,
arXiv:2211.17192); independent noise, since shared noise would bias it. The distribution is the target's, the text is not that
of a plain run.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from . import kernels
from .checks import real, whole
from .kernels import Float32, Transformer
from .tokenizer import BOS, EOS

Verify = Literal["coupled", "rejection"]
StopReason = Literal["bos", "eos", "max_tokens", "seq_len", "interrupted"]
END_MARKS = (BOS, EOS)
MAX_GAMMA = kernels.MAX_TOKENS - 1
TARGET_NOISE, DRAFT_NOISE, ACCEPT_NOISE = range(3)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: temperature, then softmax, then top_k, then the smallest set whose mass exceeds top_p.

    temperature 0 is greedy; top_k 0 and top_p 0 or 1 are off; seed is 0 to 2^63 - 1.
    Raises ValueError for a value out of range, TypeError for what is no number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {
            "temperature": real("temperature", self.temperature, math.inf, "0 (greedy) or a positive number"),
            "top_k": whole("top_k", self.top_k, 0),
            "top_p": real("top_p", self.top_p, 1, "a number from 0 to 1 (0 and 1: off)"),
            "seed": whole("seed", self.seed, 0, 2**63 - 1),
        }
        for name, number in numbers.items():  # Python's own: the kernels are compiled for those
            object.__setattr__(self, name, number)


@dataclass(frozen=True)
class Step:
    """One pass of the target over the last token and the draft, or the prefill, which comes first and has no tokens.

    tokens: what the text grew by, an end mark not counted; draft_tokens: what was proposed, of which the first n_accepted
    stood; seconds of the whole step; draft_seconds of it; stop_reason of the last step.
    """

    tokens: list[int]
    draft_tokens: list[int]
    n_accepted: int
    seconds: float
    draft_seconds: float
    is_prefill: bool = False
    stop_reason: StopReason | None = None


@dataclass
class Statistics:
    """Sums over the steps of one text.

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
    stop_reason: StopReason | None = None

    def add(self, step: Step) -> None:
        self.stop_reason = step.stop_reason
        if step.is_prefill:
            self.prefill_seconds += step.seconds
            return
        self.n_generated += len(step.tokens)
        self.n_drafted += len(step.draft_tokens)
        self.n_accepted += step.n_accepted
        self.target_passes += 1
        self.accepted_histogram += [0] * (step.n_accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[step.n_accepted] += 1
        self.decode_seconds += step.seconds

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


class Sampler:
    """Draws tokens from logits; the noise is a function of (seed, stream, position, token), so nothing is consumed."""

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self.vocab_size, self.sampling = vocab_size, sampling
        self._keys = np.empty(vocab_size, np.uint64)
        self._top_k = min(sampling.top_k, vocab_size)  # a compiled function takes no larger integer

    def new_probs(self) -> Float32:
        """Room for one row of probabilities, (1, V padded)."""
        return kernels.zeros(1, kernels.round_up(self.vocab_size, kernels.LANES))

    def draw(self, probs: Float32, logits: Float32, stream: int, position: int) -> int:
        """The token of that noise, -1 where the logits (V,) are not finite; fills probs (1, V padded) from them."""
        s = self.sampling
        return int(kernels.draw(probs, logits, s.temperature, self._top_k, s.top_p, s.seed, stream, position, self._keys))

    def probabilities(self, probs: Float32, logits: Float32) -> None:
        """Fill probs (1, V padded) from logits (V,)."""
        s = self.sampling
        kernels.probabilities(probs, logits, s.temperature, self._top_k, s.top_p, self._keys)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and the q that each was drawn from, (1, V padded) a token."""

    tokens: list[int]
    probs: list[Float32]


class Drafter(Protocol):
    """Whatever proposes tokens. A proposal may be shorter than asked for, and empty."""

    def propose(self, tokens: list[int], n: int) -> Draft:
        """Up to n tokens that may follow tokens; none for n = 0, which only gets ready."""


class ModelDrafter:
    """A smaller model that decodes n tokens one by one. Beyond its own seq_len it sees a sliding window."""

    def __init__(self, model: Transformer, sampling: Sampling, stream: int) -> None:
        self._model, self._stream = model, stream
        self._sampler = Sampler(model.config.vocab_size, sampling)
        self._probs: list[Float32] = []

    def propose(self, tokens: list[int], n: int) -> Draft:
        text = [*tokens]
        while len(self._probs) < n:
            self._probs.append(self._sampler.new_probs())
        with self._model.lock:
            if n == 0:
                self._model.forward(text[:-1], n_logits=0)
            for i in range(n):
                logits = self._model.forward(text)
                token = self._sampler.draw(self._probs[i], logits[0], self._stream, len(text))
                if token < 0:
                    break
                text.append(token)
                if token in END_MARKS:
                    break
        return Draft(text[len(tokens) :], self._probs[: len(text) - len(tokens)])


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
    """The proposal with probability min(1, p / q), else a draw from the residual; past the proposals, a draw from p."""

    draft_noise = DRAFT_NOISE

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs = self._sampler.new_probs()

    def token(self, logits: Float32, draft: Draft, i: int, position: int) -> int:
        if i == len(draft.tokens):
            return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)
        self._sampler.probabilities(self._probs, logits)
        seed, n = self._sampler.sampling.seed, self._sampler.vocab_size
        proposal, q = draft.tokens[i], draft.probs[i]
        return int(kernels.keep_or_redraw(self._probs, q, n, proposal, seed, ACCEPT_NOISE, TARGET_NOISE, position))


VERIFIERS: dict[str, Callable[[int, Sampling], Verifier]] = {"coupled": CoupledVerifier, "rejection": RejectionVerifier}


def verify(logits: Float32, draft: Draft, verifier: Verifier, position: int) -> tuple[list[int], int]:
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
        stands = i < len(draft.tokens) and tokens[i] == draft.tokens[i]
        n_accepted += stands
        if not stands or tokens[i] in END_MARKS:
            break
    return tokens, n_accepted


def decode(
    target: Transformer,
    drafter: Drafter | None,
    verifier: Verifier,
    prompt: list[int],
    max_tokens: int,
    gamma: int,
    on_draft: Callable[[list[int]], None] | None = None,
) -> Iterator[Step]:
    """Continue the prompt by up to max_tokens tokens; the first step is the prefill.

    gamma: proposals a step; on_draft is told of each proposal before the target sees it. A step runs what the target's cache does
    not hold: the last token and the proposals. Raises ValueError where the target's logits are not finite.
    """
    begin = time.perf_counter()
    tokens = list(prompt)
    # The last token is never run, so a text may have one token more than the target has positions.
    limit = min(len(prompt) + max_tokens, target.n_positions + 1)
    stop: StopReason | None = "max_tokens" if max_tokens <= 0 else None
    target.forward(tokens[:-1], n_logits=0)
    if drafter:
        drafter.propose(tokens, 0)
    yield Step([], [], 0, time.perf_counter() - begin, 0.0, is_prefill=True, stop_reason=stop)
    while stop is None:
        begin = time.perf_counter()
        draft = drafter.propose(tokens, min(gamma, limit - len(tokens) - 1)) if drafter else Draft([], [])
        drafted = time.perf_counter()
        if on_draft:
            on_draft(draft.tokens)
        resumed = time.perf_counter()
        with target.lock:
            logits = target.forward(tokens + draft.tokens, n_logits=len(draft.tokens) + 1)
            new, n_accepted = verify(logits, draft, verifier, len(tokens))
        if new[-1] in END_MARKS:
            stop = "bos" if new.pop() == BOS else "eos"
        tokens += new
        if stop is None and len(tokens) == limit:
            stop = "seq_len" if limit > target.n_positions else "max_tokens"
        seconds = time.perf_counter() - resumed + drafted - begin
        yield Step(new, draft.tokens, n_accepted, seconds, drafted - begin, stop_reason=stop)
