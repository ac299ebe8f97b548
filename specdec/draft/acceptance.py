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
MAX_EARLIER_ACCEPTED = 8.0  # accepted tokens of earlier sequences that count for a new one


class Acceptance:
    """A running estimate of the probability that a draft token is accepted, by bucket of the drafter's confidence in the token.

    Older observations weigh less. A bucket with few observations is estimated from its prior and the overall acceptance rate.

    Args:
        prior: Acceptance rate of each confidence bucket before any observation.
        mean: Acceptance rate over all tokens before any observation.
        n_accepted: Tokens accepted in earlier sequences, which the property `n_accepted` includes.
        weight: How many observations the prior counts for.
        pool: Another estimate that gets every observation too.
    """

    def __init__(
        self,
        prior: Sequence[float] = MARGIN_ACCEPTANCE,
        mean: float = MEAN_ACCEPTANCE,
        n_accepted: float = 0.0,
        weight: float = PRIOR_WEIGHT,
        pool: "Acceptance | None" = None,
    ) -> None:
        """Start from the prior, without observations."""
        self._prior, self._weight, self._pool = [*prior], weight, pool
        self._accepted, self._seen = [0.0] * N_BUCKETS, [0.0] * N_BUCKETS
        self._all_accepted = self._all_expected = self._all_seen = 0.0
        self._mean_prior, self._mean_weight, self._n_earlier_accepted = mean, weight, n_accepted
        self._probabilities: list[float] | None = [*prior]

    @property
    def probabilities(self) -> list[float]:
        """The estimated acceptance probability of a draft token in each confidence bucket, a list of N_BUCKETS numbers."""
        if self._probabilities is None:
            weight = self._weight
            scale = weight * (self._all_accepted + 1.0) / (self._all_expected + 1.0)
            self._probabilities = [
                min((accepted + scale * prior) / (seen + weight), MAX_ACCEPTANCE)
                for accepted, seen, prior in zip(self._accepted, self._seen, self._prior, strict=True)
            ]
        return self._probabilities

    @property
    def mean(self) -> float:
        """The estimated acceptance rate over all draft tokens, whatever their confidence."""
        return (self._all_accepted + self._mean_weight * self._mean_prior) / (self._all_seen + self._mean_weight)

    @property
    def n_accepted(self) -> float:
        """The number of accepted draft tokens, with older ones counting less, in this sequence and earlier ones."""
        return self._all_accepted + self._n_earlier_accepted

    def for_sequence(self) -> "Acceptance":
        """Return a new estimate for one sequence, which starts with the values of this one and also updates this one."""
        return Acceptance(self.probabilities, self.mean, min(self.n_accepted, MAX_EARLIER_ACCEPTED), SEQUENCE_WEIGHT, self)

    def update(self, rounds: Sequence[tuple[Sequence[int], int]]) -> None:
        """Update the estimate, and its pool, with the results of verified drafts.

        Args:
            rounds: For each draft, the buckets of its verified tokens, and how many of these were accepted, from the first on.
        """
        seen, accepted = [0] * N_BUCKETS, [0] * N_BUCKETS
        for buckets, n_accepted in rounds:
            for i, bucket in enumerate(buckets):
                seen[bucket] += 1
                accepted[bucket] += i < n_accepted
        self._count(seen, accepted)
        if self._pool:
            self._pool._count(seen, accepted)

    def _count(self, seen: list[int], accepted: list[int]) -> None:
        """Add the numbers of verified and of accepted tokens of each bucket, after reducing the weight of earlier ones."""
        for bucket, n in enumerate(seen):
            if n:
                decay = DECAY**n
                self._seen[bucket] = decay * self._seen[bucket] + n
                self._accepted[bucket] = decay * self._accepted[bucket] + accepted[bucket]
        decay = DECAY ** sum(seen)
        self._all_seen = decay * self._all_seen + sum(seen)
        self._all_accepted = decay * self._all_accepted + sum(accepted)
        expected = sum(n * prior for n, prior in zip(seen, self._prior, strict=True))
        self._all_expected = decay * self._all_expected + expected
        self._mean_weight *= decay
        self._probabilities = None


def get_bucket(confidence: float) -> int:
    """Return the index of the bucket, 0 to N_BUCKETS - 1, for a drafter's confidence >= 0, by its power of two."""
    return min(int(8.0 * min(confidence, 1e6)).bit_length(), N_BUCKETS - 1)
