"""Acceptance probabilities of draft tokens by their confidence, learnt from verified drafts.

With a prior of 0.6 instead of 0.8, a draft of stories3M was never tried: 0.95 of the speed of plain decoding instead of 1.38.
"""

from collections.abc import Sequence

N_BUCKETS = 12  # of confidence: below 1/8, 1/4, 1/2, 1, 2, ...
# Prior acceptance by bucket: for the margins of a model, as measured on two pairs; for odds p / (1 - p), the p of each bucket.
MARGIN_ACCEPTANCE = (0.45, 0.45, 0.5, 0.6, 0.75, 0.9, *[0.95] * 6)
LOOKUP_ACCEPTANCE = tuple(1 / (1 + 2 ** (3.5 - bucket)) for bucket in range(N_BUCKETS))
MEAN_ACCEPTANCE, PRIOR_WEIGHT = 0.8, 2.0  # the mean acceptance of an unknown draft; observations that a prior counts for
SEQUENCE_WEIGHT = 8.0  # observations that the mean counts for when a sequence begins
MAX_WEIGHT = 50.0  # observations that an estimate counts for at most, so that it follows the sequence
MAX_ACCEPTANCE = 0.99


class Acceptance:
    """A running estimate of the probability that a draft token is accepted, by bucket of the drafter's confidence in the token.

    Args:
        prior: Acceptance rate of each confidence bucket before any observation.
        mean: Acceptance rate over all tokens before any observation.

    Attributes:
        rates: The estimates, one for each bucket, and as the last one that over all tokens.
    """

    def __init__(self, prior: Sequence[float] = MARGIN_ACCEPTANCE, mean: float = MEAN_ACCEPTANCE) -> None:
        """Start from the prior, without observations."""
        self.rates = [*prior, mean]
        self._weights = [PRIOR_WEIGHT] * len(self.rates)  # observations that each estimate counts for

    @property
    def mean(self) -> float:
        """The estimated acceptance rate over all draft tokens, whatever their confidence."""
        return self.rates[-1]

    def begin_sequence(self) -> None:
        """Move a low mean halfway back to that of an unknown draft, and let it follow the new text: code is easier than prose.

        Without this, one text that a costly draft does not suit ends the drafts of all later ones: with Qwen2.5-Coder 1.5B, AVX2
        and temperature 0.8, eight prompts took 1.2 times as long.
        """
        if self.mean < MEAN_ACCEPTANCE:
            self.rates[-1] = (self.mean + MEAN_ACCEPTANCE) / 2
            self._weights[-1] = min(self._weights[-1], SEQUENCE_WEIGHT)

    def update(self, buckets: Sequence[int], n_accepted: int) -> None:
        """Update the estimates with the result of a verified draft.

        Args:
            buckets: The buckets of its verified tokens.
            n_accepted: How many of these were accepted, from the first on.
        """
        rates, weights = self.rates, self._weights
        for i, bucket in enumerate(buckets):
            for each in (bucket, N_BUCKETS):
                weights[each] = min(weights[each] + 1.0, MAX_WEIGHT)
                rates[each] = min(rates[each] + ((i < n_accepted) - rates[each]) / weights[each], MAX_ACCEPTANCE)


def get_bucket(confidence: float) -> int:
    """Return the index of the bucket, 0 to N_BUCKETS - 1, for a drafter's confidence >= 0, by its power of two."""
    return min(int(8.0 * min(confidence, 1e6)).bit_length(), N_BUCKETS - 1)
