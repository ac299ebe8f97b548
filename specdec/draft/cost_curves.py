"""Costs of target passes by their number of tokens, of drafts, and of reading experts, without any models."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS

MIN_SECONDS = 1e-9
TYPICAL_REPEAT_PROBABILITY = 0.35  # about that of the experts that Cohere (2026) counted


@dataclass(frozen=True)
class ExpertCosts:
    """A model of the extra time of passes over several tokens in a mixture of experts.

    A pass reads every expert that any of its tokens chooses: u times the k experts of one token. Suppose that each choice falls
    with probability r on an expert that is read anyway, and else on any of all E. Then n tokens together choose
    u(n) = E / k - (E / k - 1) (1 - (1 - r) k / E)^(n - 1) times k experts; r = 0 is the case of independent tokens
    (MoESD, arXiv:2505.19645). The passes of a sequence show r.

    Attributes:
        n_experts: E, experts of a layer.
        experts_per_token: k, experts that one token chooses.
        seconds: Time that reading the experts of one token takes in a pass; 0 for a model without experts.
    """

    n_experts: int = 1
    experts_per_token: int = 1
    seconds: float = 0.0

    def get_extra_seconds(self, n_tokens: int, repeat_probability: float) -> float:
        """Return the seconds that a pass over n_tokens tokens takes longer than one over a single token, if r is as given."""
        max_ratio = self.n_experts / self.experts_per_token
        return self.seconds * (max_ratio - 1.0) * (1.0 - (1.0 - (1.0 - repeat_probability) / max_ratio) ** (n_tokens - 1))

    def get_read_cost(self, n_read: float) -> float:
        """Return the seconds that a pass takes longer than one over a single token if a layer reads n_read experts on average."""
        return max(n_read / self.experts_per_token - 1.0, 0.0) * self.seconds

    def solve_repeat_probability(self, n_tokens: int, n_read: float) -> float:
        """Return the r, 0 to 1, at which n_tokens tokens are expected to read n_read experts."""
        unread = max(self.n_experts - n_read, 0.0) / max(self.n_experts - self.experts_per_token, MIN_SECONDS)
        new: float = (1.0 - unread ** (1 / (n_tokens - 1))) * self.n_experts / self.experts_per_token
        return min(max(1.0 - new, 0.0), 1.0)


NO_EXPERTS = ExpertCosts()


class CostCurve:
    """The costs, in seconds, of a target's passes over each number of tokens and of drafting tokens for it.

    Args:
        pass_seconds: The minimum measured seconds of passes by number of tokens, without the extra seconds of a mixture of
            experts. Noise only ever adds time, so a pass over fewer tokens is taken to cost no more than one over more.
        draft_token: Seconds of drafting one token; 0 if proposing costs nothing.
        experts: Extra costs of a mixture of experts.
    """

    def __init__(self, pass_seconds: Mapping[int, float], draft_token: float = 0.0, experts: ExpertCosts = NO_EXPERTS) -> None:
        """Interpolate the measured times, and make them rise with the number of tokens."""
        measured = sorted(pass_seconds)
        curve = np.interp(np.arange(MAX_BATCH_TOKENS + 1), measured, [max(pass_seconds[n], MIN_SECONDS) for n in measured])
        beyond = np.arange(measured[-1] + 1, MAX_BATCH_TOKENS + 1)
        curve[beyond] *= beyond / measured[-1]  # compute-bound
        self.pass_seconds: list[float] = np.minimum.accumulate(curve[::-1])[::-1].tolist()
        self.draft_token, self.experts = draft_token, experts

    def merge(self, other: "CostCurve") -> "CostCurve":
        """Return a new curve with the minimum of two curves' costs, element by element; expert costs are those of `self`."""
        passes = {n: min(self.pass_seconds[n], other.pass_seconds[n]) for n in range(1, MAX_BATCH_TOKENS + 1)}
        return CostCurve(passes, min(self.draft_token, other.draft_token), self.experts)

    def pass_cost(self, n: int, repeat_probability: float = TYPICAL_REPEAT_PROBABILITY) -> float:
        """Return the seconds of a pass over n tokens, those of its experts included."""
        extra = self.experts.get_extra_seconds(n, repeat_probability) if self.experts.seconds else 0.0
        return self.pass_seconds[n] + extra
