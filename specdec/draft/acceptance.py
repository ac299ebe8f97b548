"""Acceptance probabilities of draft tokens by their confidence, learnt from verified drafts."""

from collections.abc import Sequence

N_BUCKETS = 12  # of confidence: below 1/8, 1/4, 1/2, 1, 2, ...
# Prior acceptance by bucket: for the margins of a model, as measured on two pairs; for odds p / (1 - p), the p of each bucket.
MARGIN_ACCEPTANCE = (0.45, 0.45, 0.5, 0.6, 0.75, 0.9, *[0.95] * 6)
LOOKUP_ACCEPTANCE = tuple(1 / (1 + 2 ** (3.5 - bucket)) for bucket in range(N_BUCKETS))
MEAN_ACCEPTANCE, PRIOR_WEIGHT = 0.8, 2.0  # the mean acceptance of an unknown draft, and how many observations a prior counts for
SEQUENCE_WEIGHT = 4.0  # observations that the acceptance of earlier sequences counts for
MAX_ACCEPTANCE = 0.99
DECAY = 0.98  # factor by which each new observation reduces the weight of earlier ones


class Acceptance:
    """A running estimate of the probability that a draft token is accepted, by bucket of the drafter's confidence in the token.

    Older observations weigh less. A bucket with few observations is estimated from its prior and the overall acceptance rate.

    Args:
        prior: Acceptance rate of each confidence bucket before any observation.
        mean: Acceptance rate over all tokens before any observation.
        weight: How many observations the prior counts for.
        pool: Another estimate that gets every observation too.
    """

    def __init__(
        self,
        prior: Sequence[float] = MARGIN_ACCEPTANCE,
        mean: float = MEAN_ACCEPTANCE,
        weight: float = PRIOR_WEIGHT,
        pool: "Acceptance | None" = None,
    ) -> None:
        """Start from the prior, without observations."""
        self._prior, self._weight, self._pool = [*prior, mean], weight, pool
        # of each bucket, and of all tokens; the last number is how many the prior expects to be accepted
        self._seen, self._accepted, self._expected = [0.0] * (N_BUCKETS + 1), [0.0] * (N_BUCKETS + 1), 0.0

    @property
    def probabilities(self) -> list[float]:
        """The estimated acceptance probability of a draft token in each confidence bucket, a list of N_BUCKETS numbers."""
        return [self.estimate(bucket) for bucket in range(N_BUCKETS)]

    @property
    def mean(self) -> float:
        """The estimated acceptance rate over all draft tokens, whatever their confidence."""
        return (self._accepted[-1] + self._weight * self._prior[-1]) / (self._seen[-1] + self._weight)

    def estimate(self, bucket: int) -> float:
        """Return the estimated acceptance probability of a draft token in a confidence bucket."""
        scale = (self._accepted[-1] + 1.0) / (self._expected + 1.0)  # by which the prior was wrong so far
        prior = self._weight * scale * self._prior[bucket]
        return min((self._accepted[bucket] + prior) / (self._seen[bucket] + self._weight), MAX_ACCEPTANCE)

    def for_sequence(self) -> "Acceptance":
        """Return a new estimate for one sequence, which starts with the values of this one and also updates this one."""
        return Acceptance(self.probabilities, self.mean, SEQUENCE_WEIGHT, self)

    def update(self, buckets: Sequence[int], n_accepted: int) -> None:
        """Update the estimate, and its pool, with the result of a verified draft.

        Args:
            buckets: The buckets of its verified tokens.
            n_accepted: How many of these were accepted, from the first on.
        """
        for i, bucket in enumerate(buckets):
            for each in (bucket, N_BUCKETS):
                self._seen[each] = DECAY * self._seen[each] + 1.0
                self._accepted[each] = DECAY * self._accepted[each] + (i < n_accepted)
            self._expected = DECAY * self._expected + self._prior[bucket]
        if self._pool:
            self._pool.update(buckets, n_accepted)


def get_bucket(confidence: float) -> int:
    """Return the index of the bucket, 0 to N_BUCKETS - 1, for a drafter's confidence >= 0, by its power of two."""
    return min(int(8.0 * min(confidence, 1e6)).bit_length(), N_BUCKETS - 1)
