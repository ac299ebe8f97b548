"""Costs of passes by their number of tokens, of drafts, and of a mixture's experts. The module knows no models."""

from collections.abc import Callable, Mapping

import numpy as np

from specdec.kernels import MAX_TOKENS

MAX_LOOKAHEAD = 32  # tokens; a rate that only a longer draft reached could not be had
MIN_SECONDS = 1e-9
CATCH_UP = 0.1  # of a drafted token's time, that a draft takes to read a token of the sequence that it has missed


class ExpertCosts:
    """Extra time of passes over several tokens in a mixture of experts.

    A pass reads every expert that any of its tokens chooses: u times the k experts of one token. If each choice falls with
    probability `repeats` on an expert that is read anyway, and else on any of all E, n tokens choose together
    u(n) = E / k - (E / k - 1) (1 - (1 - repeats) k / E)^(n - 1) times k experts; with repeats = 0 that is what independent
    tokens choose (MoESD, arXiv:2505.19645). The passes of a sequence show how much it repeats.

    Args:
        n_experts: E, experts of a layer.
        n_chosen: k, experts that one token chooses.
        seconds: Time that reading the experts of one token takes in a pass.
        repeats: The probability above.
        n_read: Returns the mean number of experts that a layer read in the last pass.
    """

    def __init__(self, n_experts: int, n_chosen: int, seconds: float, repeats: float, n_read: Callable[[], float]) -> None:
        self.seconds, self.repeats = seconds, repeats
        self._n_experts, self._n_chosen, self.n_read = n_experts, n_chosen, n_read
        self.extra = [0.0] * (MAX_TOKENS + 1)  # seconds by the number of tokens
        self._fill()

    def copy(self) -> "ExpertCosts":
        """Return the same costs, to be updated by other passes."""
        return ExpertCosts(self._n_experts, self._n_chosen, self.seconds, self.repeats, self.n_read)

    def extra_of(self, n_read: float) -> float:
        """Return the extra seconds of a pass whose layers read so many experts."""
        return max(n_read / self._n_chosen - 1.0, 0.0) * self.seconds

    def update(self, n_tokens: int, n_read: float) -> None:
        """Learn from a pass over n_tokens, whose layers read so many experts, how much tokens repeat them."""
        if n_tokens > 1 and self.seconds:
            self.repeats += 0.2 * (self.repeats_of(n_tokens, n_read) - self.repeats)
            self._fill()

    def repeats_of(self, n_tokens: int, n_read: float) -> float:
        """Solve u(n_tokens) k = n_read for `repeats`."""
        left = max(self._n_experts - n_read, 0.0) / max(self._n_experts - self._n_chosen, MIN_SECONDS)
        new: float = (1.0 - left ** (1 / (n_tokens - 1))) * self._n_experts / self._n_chosen
        return min(max(1.0 - new, 0.0), 1.0)

    def _fill(self) -> None:
        most = self._n_experts / self._n_chosen
        left, ratio = most - 1.0, 1.0 - (1.0 - self.repeats) / most
        for n in range(1, MAX_TOKENS + 1):
            self.extra[n] = self.seconds * (most - 1.0 - left)
            left *= ratio


NO_EXPERTS = ExpertCosts(1, 1, 0.0, 0.0, lambda: 1.0)


class CostCurve:
    """Seconds of the target's passes over n tokens, and of drafting.

    Args:
        passes: Least seconds measured of passes over some numbers of tokens; of a mixture of experts without `experts.extra`.
            Noise only ever adds time, so a pass over fewer tokens is taken to cost no more than one over more.
        draft_token: Seconds of one drafted token; 0 if proposing costs nothing.
        draft_start: Seconds that the first drafted token of a round takes longer.
        experts: Extra costs of a mixture of experts.
        eviction: Seconds that a pass over one token takes longer behind a draft; passes over more are measured there.
    """

    def __init__(
        self,
        passes: Mapping[int, float],
        draft_token: float = 0.0,
        draft_start: float = 0.0,
        experts: ExpertCosts = NO_EXPERTS,
        eviction: float = 0.0,
    ) -> None:
        measured = sorted(passes)
        curve = np.interp(np.arange(MAX_TOKENS + 1), measured, [max(passes[n], MIN_SECONDS) for n in measured])
        beyond = np.arange(measured[-1] + 1, MAX_TOKENS + 1)
        curve[beyond] *= beyond / measured[-1]  # compute-bound
        self.passes: list[float] = np.minimum.accumulate(curve[::-1])[::-1].tolist()
        self.draft_token, self.draft_start, self.experts, self.eviction = draft_token, draft_start, experts, eviction

    def merge(self, other: "CostCurve") -> "CostCurve":
        """Return the lesser of both costs, element by element."""
        passes = {n: min(self.passes[n], other.passes[n]) for n in range(1, MAX_TOKENS + 1)}
        token, start = min(self.draft_token, other.draft_token), min(self.draft_start, other.draft_start)
        return CostCurve(passes, token, start, self.experts, min(self.eviction, other.eviction))

    def scaled(self, pass_ratio: float, draft_ratio: float) -> "CostCurve":
        """Return a curve whose passes over several tokens, and whose drafts, take so many times as long."""
        passes = {1: self.passes[1]} | {n: pass_ratio * self.passes[n] for n in range(2, MAX_TOKENS + 1)}
        draft = draft_ratio * self.draft_token, draft_ratio * self.draft_start
        return CostCurve(passes, *draft, self.experts, self.eviction)

    def draft_cost(self, n: int, n_missed: int = 0) -> float:
        """Return the seconds of drafting n tokens after reading n_missed tokens of the sequence."""
        return self.draft_start + (n + CATCH_UP * n_missed) * self.draft_token if n else 0.0

    def pays(self, rate: float) -> bool:
        """Return whether any draft whose every token is accepted at that rate is faster than none."""
        gain, power, plain = 1.0, 1.0, self.passes[1]
        for n in range(1, MAX_LOOKAHEAD + 1):
            power *= rate
            gain += power
            if gain * plain > self.passes[n + 1] + self.experts.extra[n + 1] + self.draft_cost(n):
                return True
        return False
