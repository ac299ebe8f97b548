"""How long proposals get where several texts share a pass: what pays for all of them together. Knows no models.

A pass over T tokens takes c(T) seconds, whosever they are, and all texts wait for it. With R the tokens a second that all of them
get, one more proposed token is worth its while if the chance that it stands exceeds R (c(T + 1) - c(T)), and what drafting it
takes: with each text that comes R and T rise, and proposals shrink.
"""

from ..kernels import MAX_TOKENS
from .estimates import LEAST, MEMORY, Acceptance, Costs, Level, bucket_of

AHEAD = (1, 2, 3, 4, 6, 8)  # how many tokens more are considered at once, since c has steps
LOOK = 32  # a text's rounds without a proposal until one of one token is tried
CURVE_SHARE = 0.05  # of what a pass took, in what is known of passes over so many tokens


class Sharing:
    """What passes that texts share cost, and what is in the one that is being made up; see `SharedLength`.

    n_texts: that go on in it; n_tokens: that it has so far, one of each text among them; most: that it may have.
    """

    def __init__(self, costs: Costs, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self._curve: list[float] = costs.passes.tolist()
        self._level, self._draft = Level(1.0), Level(1.0)
        self._start, self._token = costs.start, costs.draft  # seconds of a draft
        self._gain = 1.0  # of the last passes: tokens, as many times as the target alone had written in their time
        self.n_texts = self.n_tokens = 1
        self.most = MAX_TOKENS

    def begin_pass(self, n_texts: int, most: int) -> None:
        self.n_texts, self.n_tokens, self.most = n_texts, n_texts, most

    def of(self, n: int) -> float:
        """Seconds of a pass over n tokens."""
        return self._curve[min(n, MAX_TOKENS)] * self._level.value

    def of_draft(self, n: int) -> float:
        """Seconds that a model takes to draft n tokens."""
        return (self._start + n * self._token) * self._draft.value if n else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, of all texts of this pass."""
        return max(self._gain, 1.0) * self.n_texts / max(self.of(self.n_texts), LEAST)

    def saw(self, n_tokens: int, seconds: float) -> None:
        """A pass over so many tokens."""
        believed = self._curve[n_tokens]
        self._level.saw(seconds / max(believed, LEAST))
        ratio = min(max(seconds / max(self.of(n_tokens), LEAST), 0.5), 2.0)
        self._curve[n_tokens] *= ratio**CURVE_SHARE

    def brought(self, n_tokens: int, n_written: int) -> None:
        """The pass that was made up had so many tokens of texts that go on, and they wrote so many."""
        alone = self.n_texts / max(self.of(self.n_texts), LEAST)
        gain = n_written / max(self.of(n_tokens), LEAST) / alone
        self._gain = MEMORY * self._gain + (1 - MEMORY) * gain

    def drafted(self, n: int, seconds: float) -> None:
        if n and self._token:
            self._draft.saw(seconds / max(self._start + n * self._token, LEAST))


class SharedLength:
    """A text's plan: as many tokens as pay in the pass that it shares. is_free: whether drafting them costs nothing.

    acceptance: by default that of all texts of the pass.
    """

    def __init__(self, sharing: Sharing, is_free: bool, acceptance: Acceptance | None = None) -> None:
        self._sharing, self._is_free, self._acceptance = sharing, is_free, acceptance or sharing.acceptance
        self.most = self._waited = 0
        self._survival, self._is_trial = 1.0, False
        self._buckets: list[int] = []

    def begins(self, most: int) -> bool:
        sharing = self._sharing
        self.most = min(most, sharing.most - sharing.n_tokens)
        self._buckets, self._survival, self._is_trial = [], 1.0, False
        self._waited += 1
        if self.most < 1:
            return False
        if self._is_free or self._pays(0):
            return True
        self._is_trial = self._waited > LOOK
        return self._is_trial

    def _pays(self, n: int) -> bool:
        """Whether a model is to draft more tokens behind n."""
        sharing, rate = self._sharing, self._acceptance.rate
        at, own = sharing.n_tokens + n, sharing.of_draft(n)
        for more in AHEAD:
            if n + more > self.most:
                break
            gain = self._survival * sum(rate**i for i in range(1, more + 1))
            if gain > sharing.rate * (sharing.of(at + more) - sharing.of(at) + sharing.of_draft(n + more) - own):
                return True
        return False

    def goes_on(self, confidence: float) -> bool:
        bucket = bucket_of(confidence)
        self._buckets.append(bucket)
        self._survival *= self._acceptance.rates[bucket]
        n = len(self._buckets)
        return n < self.most and not self._is_trial and self._pays(n)

    def takes(self, confidences: list[float]) -> int:
        sharing = self._sharing
        buckets = [bucket_of(confidence) for confidence in confidences[: self.most]]
        best, n_best, survival, gain, rate, at = 0.0, 0, 1.0, 0.0, sharing.rate, sharing.n_tokens
        for n, bucket in enumerate(buckets, 1):
            survival *= self._acceptance.rates[bucket]
            gain += survival
            worth = gain - rate * (sharing.of(at + n) - sharing.of(at))
            if worth > best:
                best, n_best = worth, n
        if buckets and not n_best and self._waited > LOOK:
            n_best = 1
        self._buckets = buckets[:n_best]
        return n_best

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        if not n_drafted:
            return
        self._waited = 0
        for i, bucket in enumerate(self._buckets[: min(n_drafted, n_accepted + 1)]):
            self._acceptance.saw(bucket, i < n_accepted)
        if not self._is_free:
            self._sharing.drafted(n_drafted, draft_seconds)
