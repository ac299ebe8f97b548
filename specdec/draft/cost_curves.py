"""Costs of target passes by their number of tokens, of drafts, and of reading experts, without any models."""

from collections.abc import Mapping

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS

MIN_SECONDS = 1e-9
TYPICAL_REPEAT_PROBABILITY = 0.35
CATCH_UP_RATIO = 0.1  # time that a draft takes to read a missed token of the sequence, relative to drafting a token


class ExpertCosts:
    """A model of the extra time of passes over several tokens in a mixture of experts, which learns from the passes.

    A pass reads every expert that any of its tokens chooses: u times the k experts of one token. Suppose that each choice falls
    with probability r = `repeat_probability` on an expert that is read anyway, and else on any of all E. Then n tokens together
    choose u(n) = E / k - (E / k - 1) (1 - (1 - r) k / E)^(n - 1) times k experts; r = 0 is the case of independent tokens
    (MoESD, arXiv:2505.19645). The passes of a sequence show how much it repeats.

    Args:
        n_experts: E, experts of a layer.
        experts_per_token: k, experts that one token chooses.
        seconds: Time that reading the experts of one token takes in a pass.
        repeat_probability: r, the probability above; by default about that of the experts that Cohere (2026) counted.

    Attributes:
        extra_seconds: By number of tokens, the seconds that a pass takes longer than one over a single token.
    """

    def __init__(
        self, n_experts: int, experts_per_token: int, seconds: float, repeat_probability: float = TYPICAL_REPEAT_PROBABILITY
    ) -> None:
        """Compute the extra seconds of all numbers of tokens from the arguments."""
        self.seconds, self.repeat_probability = seconds, repeat_probability
        self._n_experts, self._experts_per_token = n_experts, experts_per_token
        self.extra_seconds = [0.0] * (MAX_BATCH_TOKENS + 1)  # seconds by the number of tokens
        self._update_table()

    def copy(self) -> "ExpertCosts":
        """Return a copy of these costs, so that updates of one do not change the other."""
        return ExpertCosts(self._n_experts, self._experts_per_token, self.seconds, self.repeat_probability)

    def compute_extra_seconds(self, n_read: float) -> float:
        """Return the seconds that a pass takes longer than one over a single token if a layer reads n_read experts on average."""
        return max(n_read / self._experts_per_token - 1.0, 0.0) * self.seconds

    def update(self, n_tokens: int, n_read: float) -> None:
        """Move the repeat probability a step towards the one that a pass shows, and recompute the extra seconds.

        Does nothing after a pass over one token, or if reading experts costs nothing.

        Args:
            n_tokens: Number of tokens of the pass.
            n_read: Number of experts that a layer read in it, on average.
        """
        if n_tokens > 1 and self.seconds:
            self.repeat_probability += 0.2 * (self.solve_repeat_probability(n_tokens, n_read) - self.repeat_probability)
            self._update_table()

    def solve_repeat_probability(self, n_tokens: int, n_read: float) -> float:
        """Return the repeat probability, 0 to 1, at which n_tokens tokens are expected to read n_read experts."""
        unread = max(self._n_experts - n_read, 0.0) / max(self._n_experts - self._experts_per_token, MIN_SECONDS)
        new: float = (1.0 - unread ** (1 / (n_tokens - 1))) * self._n_experts / self._experts_per_token
        return min(max(1.0 - new, 0.0), 1.0)

    def _update_table(self) -> None:
        max_ratio = self._n_experts / self._experts_per_token
        remaining, ratio = max_ratio - 1.0, 1.0 - (1.0 - self.repeat_probability) / max_ratio
        for n in range(1, MAX_BATCH_TOKENS + 1):
            self.extra_seconds[n] = self.seconds * (max_ratio - 1.0 - remaining)
            remaining *= ratio


NO_EXPERTS = ExpertCosts(1, 1, 0.0)


class CostCurve:
    """The costs, in seconds, of a target's passes over each number of tokens and of drafting tokens for it.

    Args:
        pass_seconds: The minimum measured seconds of passes by number of tokens, without `experts.extra_seconds` for a mixture
            of experts. Noise only ever adds time, so a pass over fewer tokens is taken to cost no more than one over more.
        draft_token: Seconds of drafting one token; 0 if proposing costs nothing.
        draft_start: Seconds that the first drafted token of a round takes longer.
        experts: Extra costs of a mixture of experts.
        n_measurements: Number of measurements whose minimum the costs are.
    """

    def __init__(
        self,
        pass_seconds: Mapping[int, float],
        draft_token: float = 0.0,
        draft_start: float = 0.0,
        experts: ExpertCosts = NO_EXPERTS,
        n_measurements: int = 1,
    ) -> None:
        """Interpolate the measured times, and make them rise with the number of tokens."""
        measured = sorted(pass_seconds)
        curve = np.interp(np.arange(MAX_BATCH_TOKENS + 1), measured, [max(pass_seconds[n], MIN_SECONDS) for n in measured])
        beyond = np.arange(measured[-1] + 1, MAX_BATCH_TOKENS + 1)
        curve[beyond] *= beyond / measured[-1]  # compute-bound
        self.pass_seconds: list[float] = np.minimum.accumulate(curve[::-1])[::-1].tolist()
        self.draft_token, self.draft_start, self.experts = draft_token, draft_start, experts
        self.n_measurements = n_measurements

    def merge(self, other: "CostCurve") -> "CostCurve":
        """Return a new curve with the minimum of two curves' costs, element by element; expert costs are those of `self`."""
        passes = {n: min(self.pass_seconds[n], other.pass_seconds[n]) for n in range(1, MAX_BATCH_TOKENS + 1)}
        token, start = min(self.draft_token, other.draft_token), min(self.draft_start, other.draft_start)
        return CostCurve(passes, token, start, self.experts, self.n_measurements + other.n_measurements)

    def draft_cost(self, n: int, n_missed: int = 0) -> float:
        """Return the seconds of drafting n tokens, 0 for none, after reading n_missed tokens of the sequence."""
        return self.draft_start + (n + CATCH_UP_RATIO * n_missed) * self.draft_token if n else 0.0
