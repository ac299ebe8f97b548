"""How long proposals get where several texts share a pass: what pays for all of them together. Knows no models.

A pass over T tokens takes c(T) seconds, whosever they are, and all texts wait for it. With R the tokens a second that all of them
get, one more proposed token is worth its while if the chance that it stands exceeds R (c(T + 1) - c(T)), and what drafting it
takes: with each text that comes R and T rise, and proposals shrink. Of experts a pass reads those that all its texts choose.
"""

from bisect import bisect_right

from ..kernels import MAX_TOKENS
from .estimates import FIRST_CREDIT, LEAST, MEMORY, Acceptance, Costs, Level
from .planning import MOST_CREDIT, RISK, TRIAL_SHARE, Chain

AHEAD = (1, 2, 3, 4, 6, 8)  # how many tokens more are considered at once, since c has steps
FIRST_WAIT, MOST_WAIT = 4, 64  # a text's rounds without a proposal until one of one token is tried; then twice as many
CURVE_SHARE = 0.05  # of what a pass took, in what is known of passes over so many tokens
FIRST_LOOK, MOST_LOOK = 8, 256  # passes with proposals, behind which one is made without, to see its cost; then twice as many
PLAIN_SHARE = 0.3  # of a level of such passes is what was seen last
FOLLOWED = 8  # such passes in a row, by which it is known how the machine has moved


class Sharing:
    """What passes that texts share cost, and what is in the one that is being made up; see `SharedLength`.

    What is expected is believed as far as passes bear it out: what they wrote beyond the tokens that as many texts had written
    in their time without a proposal is a credit, by text, and where that is used up no text proposes, until passes without have
    earned some anew (as `AutoLength` does for one text). Passes without proposals have a level of their own, those over more
    tokens share one; the machine changes for both at once, so that either moves the other until that is seen itself.

    n_texts: that go on in the pass; n_tokens: that it has so far, one of each text among them; most: that it may have; is_plain:
    whether no text is to propose.
    """

    def __init__(self, costs: Costs, acceptance: Acceptance) -> None:
        self.acceptance, self._curve, self._experts = acceptance, costs.curve, costs.experts.beside
        self._level, self._plain, self._draft = Level(1.0), Level(1.0), Level(1.0)
        self._start, self._token = costs.start, costs.draft  # seconds of a draft
        self._drafting = 0.0  # seconds of this pass's drafts
        self._gain = 1.0  # of the last passes: tokens, as many times as the target alone had written in their time
        self._credit, self._n_passes, self._look = FIRST_CREDIT, 0, FIRST_LOOK
        self._n_plain = 0  # passes without proposals, since the last one with some
        self.n_texts = self.n_tokens = 1
        self.most, self.is_plain = MAX_TOKENS, False

    def begin_pass(self, n_texts: int, most: int) -> None:
        self.n_texts = self.n_tokens = n_texts
        if is_look := self._n_passes >= self._look:
            self._n_passes, self._look = 0, min(2 * self._look, MOST_LOOK)
        self.is_plain = is_look or self._plain.is_doubted or self._credit <= 0.0
        left, token = (1.0 + RISK * self._credit) * self.of(n_texts), self._token * self._draft.value
        n_paid = bisect_right(range(n_texts + 1, most + 1), left, key=lambda n: self.of(n) + (n - n_texts) * token)
        self.most = min(most, n_texts + max(n_paid, 1))  # one tells whether costs are as they seem

    def of(self, n: int) -> float:
        """Seconds of a pass over n tokens, of which none is proposed where there are no more than texts."""
        n = min(n, MAX_TOKENS)
        return (self._curve[n] + self._experts.more[n]) * (self._level if n > self.n_texts else self._plain).value

    def of_draft(self, n: int) -> float:
        """Seconds that a model takes to draft n tokens."""
        return (self._start + n * self._token) * self._draft.value if n else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, of all texts of this pass."""
        return max(self._gain, 1.0) * self.n_texts / max(self.of(self.n_texts), LEAST)

    def saw(self, n_tokens: int, seconds: float) -> None:
        """A pass over so many tokens, of texts and of prompts."""
        believed = max(self._curve[n_tokens] + self._experts.of_last, LEAST)
        if n_tokens <= self.n_texts:
            before, self._n_plain = self._plain.value, self._n_plain + 1
            self._plain.saw(seconds / believed, PLAIN_SHARE)
            self._level.value *= (self._plain.value / before) ** min(self._n_plain / FOLLOWED, 1.0)
            return
        before, share = self._level.value, self._curve[n_tokens] / believed
        self._level.saw(seconds / believed)
        self._plain.value *= self._level.value / before
        ratio, self._n_plain = seconds / max(believed * self._level.value, LEAST), 0
        self._curve[n_tokens] *= min(max(ratio, 0.5), 2.0) ** (CURVE_SHARE * share)
        self._experts.saw(n_tokens, ratio, 1.0 - share)

    def brought(self, n_tokens: int, n_written: int, seconds: float) -> None:
        """The pass that was made up had so many tokens of texts that go on, and they wrote so many; seconds: of it alone."""
        n_texts, drafting, self._drafting = self.n_texts, self._drafting, 0.0
        if n_tokens <= n_texts:
            self._credit += TRIAL_SHARE if self._credit < FIRST_CREDIT else 0.0
            return
        alone = max(self.of(n_texts), LEAST) / n_texts
        seconds = min(seconds, 2 * self.of(n_tokens)) + min(drafting, 2 * self.of(n_tokens))  # what is beyond is a stall
        self._n_passes += 1
        self._credit = min(self._credit + (n_written - seconds / alone) / n_texts, MOST_CREDIT)
        self._gain = MEMORY * self._gain + (1 - MEMORY) * n_written * alone / max(seconds, LEAST)

    def drafted(self, n: int, seconds: float) -> None:
        self._drafting += seconds
        if n and self._token:
            self._draft.saw(seconds / max(self._start + n * self._token, LEAST))


class SharedLength(Chain):
    """A text's plan: as many tokens as pay in the pass that it shares. is_free: whether drafting them costs nothing.

    acceptance: by default that of all texts of the pass.
    """

    def __init__(self, sharing: Sharing, is_free: bool, acceptance: Acceptance | None = None) -> None:
        super().__init__(acceptance or sharing.acceptance)
        self._sharing, self._is_free = sharing, is_free
        self._waited, self._wait = 0, FIRST_WAIT

    def begins(self, most: int) -> bool:
        sharing = self._sharing
        self.most = min(most, sharing.most - sharing.n_tokens)
        self._begin()
        if self.most < 1 or sharing.is_plain:
            return False
        self._waited += 1
        if self._is_free or self._pays(0):
            return True
        self._is_trial = self._may_try()
        return self._is_trial

    def _may_try(self) -> bool:
        """Whether it is time for a token that does not seem to pay."""
        if is_time := self._waited > self._wait:
            self._wait = min(2 * self._wait, MOST_WAIT)
        return is_time

    def _pays(self, n: int) -> bool:
        """Whether a model is to draft more tokens behind n."""
        sharing, rate = self._sharing, self.acceptance.rate
        at, own = sharing.n_tokens + n, sharing.of_draft(n)
        for more in AHEAD:
            if n + more > self.most:
                break
            gain = self._survival * sum(rate**i for i in range(1, more + 1))
            if gain > sharing.rate * (sharing.of(at + more) - sharing.of(at) + sharing.of_draft(n + more) - own):
                return True
        return False

    def goes_on(self, confidence: float) -> bool:
        n = self._grow(confidence)
        return n < self.most and not self._is_trial and self._pays(n)

    def takes(self, confidences: list[float]) -> int:
        of, at = self._sharing.of, self._sharing.n_tokens
        return self._take(confidences, self._sharing.rate, lambda n: of(at + n) - of(at), self._may_try)

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        if not n_drafted:
            return
        self._waited = 0
        if not self._is_trial and n_drafted > 1:
            self._wait = FIRST_WAIT
        self._judged(n_drafted, n_accepted)
        if not self._is_free:
            self._sharing.drafted(n_drafted, draft_seconds)
