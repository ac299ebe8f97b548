"""How often drafted tokens are accepted, learnt from their confidence."""

from collections.abc import Sequence

N_BUCKETS = 12  # of confidence: below 1/8, 1/4, 1/2, 1, 2, ...
# Acceptance by bucket before anything is known: of a model's margins, as measured on two pairs; of odds, what they say.
MARGIN_RATES = (0.45, 0.45, 0.5, 0.6, 0.75, 0.9, *[0.95] * 6)
ODDS_RATES = tuple(1 / (1 + 2 ** (3.5 - bucket)) for bucket in range(N_BUCKETS))
MEAN_RATE, PRIOR_WEIGHT = 0.8, 2.0  # the mean acceptance of an unknown draft, and how many observations a prior counts for
SEQUENCE_WEIGHT = 4.0  # observations that the acceptance of earlier sequences counts for
MAX_RATE = 0.99
DECAY = 0.98  # weight of an observation after the next one
MAX_EARLIER = 8.0  # accepted tokens of earlier sequences that count


class Acceptance:
    """How often drafted tokens were accepted, by their confidence.

    Observations weigh less the older they are. A bucket that was hardly seen is estimated from its prior and from how the draft
    does over all.

    Args:
        prior: Acceptance rate of each bucket before any observation.
        mean: Acceptance rate over all tokens before any observation.
        n_accepted: Tokens that earlier sequences accepted, for `n_accepted`.
        weight: Observations that the prior counts for.
        pool: Takes in every observation too.
    """

    def __init__(
        self,
        prior: Sequence[float] = MARGIN_RATES,
        mean: float = MEAN_RATE,
        n_accepted: float = 0.0,
        weight: float = PRIOR_WEIGHT,
        pool: "Acceptance | None" = None,
    ) -> None:
        self._prior, self._weight, self._pool = [*prior], weight, pool
        self._accepted, self._seen = [0.0] * N_BUCKETS, [0.0] * N_BUCKETS
        self._all_accepted = self._all_expected = self._all_seen = 0.0
        self._mean_prior, self._mean_weight, self._n_earlier = mean, weight, n_accepted
        self._rates: list[float] | None = [*prior]

    @property
    def rates(self) -> list[float]:
        """Acceptance rate of each bucket."""
        if self._rates is None:
            weight = self._weight
            scale = weight * (self._all_accepted + 1.0) / (self._all_expected + 1.0)
            self._rates = [
                min((accepted + scale * prior) / (seen + weight), MAX_RATE)
                for accepted, seen, prior in zip(self._accepted, self._seen, self._prior, strict=True)
            ]
        return self._rates

    @property
    def mean(self) -> float:
        """Acceptance rate over all tokens."""
        return (self._all_accepted + self._mean_weight * self._mean_prior) / (self._all_seen + self._mean_weight)

    @property
    def n_accepted(self) -> float:
        """Tokens accepted lately, in this sequence and earlier ones."""
        return self._all_accepted + self._n_earlier

    def of_sequence(self) -> "Acceptance":
        """Return the acceptance of a new sequence, which starts with what this one knows and adds to it."""
        return Acceptance(self.rates, self.mean, min(self.n_accepted, MAX_EARLIER), SEQUENCE_WEIGHT, self)

    def update(self, rounds: Sequence[tuple[Sequence[int], int]]) -> None:
        """Count the tokens of verified drafts.

        Args:
            rounds: Of each draft the buckets of its judged tokens, and how many of these, the first ones, were accepted.
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
        self._rates = None


def bucket_of(confidence: float) -> int:
    """Return the bucket of a confidence >= 0, by its power of two."""
    return min(int(8.0 * min(confidence, 1e6)).bit_length(), N_BUCKETS - 1)
