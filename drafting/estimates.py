"""What passes and drafts take, and how often proposals stand: first guesses, kept up with what steps tell. Knows no models."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..kernels import MAX_TOKENS

MAX_GAMMA = MAX_TOKENS - 1
BUCKETS = 12  # of confidence: below 1/8, 1/4, 1/2, 1, 2, ...
# Acceptance before anything was seen: of all, and by the buckets of a model's margins, as two pairs of models had it; a hopeless
# draft loses two passes by it, not ten. Of odds it is what they say.
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 2.0
MARGIN_RATES = (0.45, 0.45, 0.5, 0.6, 0.75, 0.9, *[0.95] * 6)
ODDS_RATES = tuple(1 / (1 + 2 ** (3.5 - bucket)) for bucket in range(BUCKETS))
MEMORY = 0.98  # what an observation weighs after the next one
AHEAD = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # how many tokens more are considered at once, since c has steps
KNOWN_WEIGHT = 10.0  # of what other processes have seen, in observations
MOVED = 0.1  # by so much, costs are other costs
CATCH_UP = 0.1  # of a draft token's time, that a token takes in a prompt's way, before one was seen
FEW_MISSED = 8  # such tokens
FAR, DRIFT = 1.5, 1.1  # times as much is far off; and so much that it has to be looked at
SHARE_OF_NEW = 0.1  # of a level is what was seen last
CURVE_SHARE = 0.02  # of what a pass took beside what was expected, in what is known of passes over so many tokens
REPEATS_SHARE = 0.2  # of how much experts repeat is what the last pass showed
LEAST = 1e-9  # that a clock tells, and times as much as expected
SURE_CREDIT = 6.0  # behind which there is no doubt that drafting pays
FIRST_CREDIT = 3.0  # tokens of the target alone that drafting may lose before it has gained any


class Level:
    """A running mean of what is measured in noise. What is far off moves it little, several in a row that agree move it there.

    Noise makes a pass slow, hardly ever quick: of slow ones it takes three, of quick ones two.
    """

    def __init__(self, value: float) -> None:
        self.value = value
        self.n = 0  # how many were seen
        self.is_doubted = False  # whether the last one was far off
        self._last = self._before = value

    def saw(self, new: float, share: float = SHARE_OF_NEW) -> None:
        new = max(new, LEAST)
        old, last, before = self.value, self._last, self._before
        most, least = FAR * old, old / FAR
        self.n, self._last, self._before, self.is_doubted = self.n + 1, new, last, not least <= new <= most
        if min(new, last, before) > most and max(new, last, before) < FAR * min(new, last, before):
            self.value, self.is_doubted = min(new, last, before), False
        elif new < least and last < least:
            self.value, self.is_doubted = max(new, last), False
        else:
            self.value = old + max(share, 1 / (self.n + 1)) * (min(max(new, least), most) - old)


class Experts:
    """What a mixture of experts adds to passes over several tokens: those that the tokens behind the first choose, too.

    Such a pass reads u times the k experts of one token, which layers count. If each expert that a token chooses is with the
    chance `repeats` one of those that the pass reads already, and else any of all E, n tokens choose together u(n) =
    E / k - (E / k - 1) (1 - (1 - repeats) k / E)^(n - 1) times as many as one; with repeats = 0 that is what independent tokens
    choose (MoESD, arXiv:2505.19645). How much they repeat is what this text's passes show. seconds: that u = 1 takes; read:
    tells how many experts a layer read in the last pass.
    """

    def __init__(self, n: int, n_chosen: int, seconds: float, repeats: float, read: Callable[[], float]) -> None:
        self.seconds, self.repeats = seconds, repeats
        self._n, self._n_chosen, self._read = n, n_chosen, read
        self.more = [0.0] * (MAX_TOKENS + 1)  # seconds that passes over so many tokens are expected to take more than if u = 1
        self._tell()

    @property
    def beside(self) -> "Experts":
        """The same, to be kept up by other passes."""
        return Experts(self._n, self._n_chosen, self.seconds, self.repeats, self._read)

    @property
    def of_last(self) -> float:
        """Seconds that the last pass took more than if u = 1."""
        return self.more_of(self._read())

    def more_of(self, n_read: float) -> float:
        """The same of a pass whose layers read so many experts."""
        return max(n_read / self._n_chosen - 1.0, 0.0) * self.seconds

    def saw(self, n: int, ratio: float, share: float) -> None:
        """The last pass was over n tokens and took so many times what was expected, by u; share: of that what experts took."""
        if n < 2 or not self.seconds:
            return
        self.seconds *= min(max(ratio, 0.5), 2.0) ** (CURVE_SHARE * share)
        self.repeats += REPEATS_SHARE * (self.repeats_of(n, self._read()) - self.repeats)
        self._tell()

    def repeats_of(self, n: int, n_read: float) -> float:
        """What tokens repeat of which n > 1 choose so many experts."""
        left = max(self._n - n_read, 0.0) / max(self._n - self._n_chosen, LEAST)
        new: float = (1.0 - left ** (1 / (n - 1))) * self._n / self._n_chosen
        return min(max(1.0 - new, 0.0), 1.0)

    def _tell(self) -> None:
        most = self._n / self._n_chosen
        left, ratio = most - 1.0, 1.0 - (1.0 - self.repeats) / most
        for n in range(1, MAX_TOKENS + 1):
            self.more[n] = self.seconds * (most - 1.0 - left)
            left *= ratio


NO_EXPERTS = Experts(1, 1, 0.0, 0.0, lambda: 1.0)  # one, which every token chooses: nothing is more


class Costs:
    """Seconds of a target's pass over T tokens, measured at some T, and of a draft: of its start and of each token.

    passes: of a mixture of experts such as read no more of them than one token does; experts: what is more.

    What was measured at the start is a first guess: all are kept up with what steps take. A pass over one token has a level of
    its own, those over more share one. The machine's speed changes for all at once, so that either moves the other until that
    is seen itself; then it is known whether it was the machine or the curve.

    credit: tokens of the target alone that drafting may still lose, see `AutoLength`. is_new: whether no step without a draft
    was seen yet, of this process or of another; is_asked: whether one is wanted.
    """

    def __init__(self, passes: Mapping[int, float], draft: float, start: float = 0.0, experts: Experts = NO_EXPERTS) -> None:
        measured = sorted(passes)
        curve = np.interp(np.arange(MAX_TOKENS + 1), measured, [passes[n] for n in measured])
        beyond = np.arange(measured[-1] + 1, MAX_TOKENS + 1)
        curve[beyond] *= beyond / measured[-1]  # arithmetic alone
        self._curve: list[float] = curve.tolist()  # Python's numbers: a step of a small model has no microsecond to lose
        self.experts = experts
        self._token, self._scale = Level(self._curve[1]), Level(1.0)
        self._scale_then = 1.0  # when a pass over one token was last seen
        self._n_plain, self._n_more = MAX_TOKENS, 0  # such passes since the last one over more, and the other way round
        self._one = self._curve[1]
        self._before = 1.0, self._one  # the scale and a pass over one token, when one over more was seen
        self.is_asked, self._is_behind_draft = False, draft > 0.0
        self.start, self.draft = start, draft
        self.catch_up = CATCH_UP
        self._draft_ratio = 1.0  # of the last draft's seconds to those that were expected
        self._first_draft = 0.0  # a draft of one token as it was measured, in tokens of the target alone
        self._sums = [0.0] * 5  # of the last drafts: how many, their n, n^2, seconds, n seconds
        self._needed: Needed | None = None
        self._needed_of: list[float] = []
        self.credit, self.is_new = FIRST_CREDIT, True
        self.begin_text()

    def begin_text(self) -> None:
        """Count anew what the target alone would have taken; and half believe what has become dear, beside the target's token."""
        measured = self._one / self._curve[1]
        if self._scale.value > measured:
            self._scale.value = self._scale_then = (self._scale.value * measured) ** 0.5
            self._before = self._scale.value, self._one
        if self._sums[0] and self.start + self.draft > (first := self._first_draft * self._one):
            self._scale_draft((first / (self.start + self.draft)) ** 0.5)
        self._n_alone, self._alone = 0, 0.0
        self._took = self._believed = 0.0  # seconds of steps, with and without those beyond belief

    @property
    def plain_seconds(self) -> float:
        """What a token of the last text would have taken the target alone, by what was known with each step.

        Stalls, which steps of any kind have, included.
        """
        return self._alone / self._n_alone * (self._took / self._believed) if self._n_alone else self.of(1)

    def brought(self, n_tokens: int, n_drafted: int, seconds: float, n_missed: int = 0) -> float:
        """A step's tokens and seconds; those of it that are believed to be no stall."""
        believed = max(min(seconds, 2 * (self.of_last(n_drafted + 1) + self.of_draft(n_drafted, n_missed))), LEAST)
        self._n_alone += n_tokens
        self._alone += n_tokens * self._one
        self._took += seconds
        self._believed += believed
        return believed

    def of(self, n: int) -> float:
        """Seconds of a pass over n tokens."""
        return (self._curve[n] + self.experts.more[n]) * self._scale.value if n > 1 else self._one

    def of_last(self, n: int) -> float:
        """The same of the last pass, which was over so many: with the experts that it has read."""
        return (self._curve[n] + self.experts.of_last) * self._scale.value if n > 1 else self._one

    def of_draft(self, n: int, n_missed: int = 0) -> float:
        """Seconds of a draft of n tokens that has not run so many tokens of the text yet."""
        return self.start + (n + n_missed * self.catch_up) * self.draft if n else 0.0

    @property
    def passes(self) -> list[float]:
        """Seconds of passes over 0 to MAX_TOKENS tokens; more tokens never take less, whatever the noise has it."""
        seconds = [self.of(n) for n in range(MAX_TOKENS + 1)]
        most, least = itertools.accumulate(seconds, max), [*itertools.accumulate(reversed(seconds), min)]
        return [(high + low) / 2 for high, low in zip(most, reversed(least), strict=True)]

    @property
    def curve(self) -> list[float]:
        """Seconds of passes over 0 to MAX_TOKENS tokens, without what experts add."""
        return [self._one if n < 2 else seconds * self._scale.value for n, seconds in enumerate(self._curve)]

    @property
    def is_doubtful(self) -> bool:
        """Whether it takes such a step to know what a token of the target alone costs, as far as that decides anything."""
        drift = DRIFT if self.credit < SURE_CREDIT else FAR
        return self.is_asked or self._token.is_doubted or not 1 / drift < self._scale.value / self._scale_then < drift

    def needed_survivals(self, rate: float) -> "Needed":
        """Of proposals whose each token stands at `rate`; anew where that or the costs' ratios have moved."""
        token = self.of(1)
        now = [rate, (self.start + 2 * self.draft) / token, self.of(4) / token, self.of(8) / token]
        if not self._needed or any(abs(new - old) > MOVED * old for new, old in zip(now, self._needed_of, strict=True)):
            self._needed, self._needed_of = Needed(self, rate), now
        return self._needed

    def saw(self, n_drafted: int, pass_seconds: float, draft_seconds: float, n_missed: int = 0) -> None:
        """A step's seconds; n_missed: tokens of the text that the draft ran first."""
        token, scale = self._token, self._scale
        if not n_drafted and self._is_behind_draft:  # which has put the target's weights out of the cache
            self._is_behind_draft = False
            return
        if not n_drafted:
            self.is_asked = self.is_new = False
            if abs(pass_seconds - self._one) < abs(pass_seconds - token.value):  # it was the machine that moved, not the curve
                token.value = self._one
            token.saw(pass_seconds, min(SHARE_OF_NEW * (1 + self._n_more / 2), 0.5))
            self._n_plain, self._n_more = min(self._n_plain + 1, MAX_TOKENS), 0
            self._one = token.value
            # Passes over more are taken to move with it, the more the longer they were not seen; none is less.
            (before, one), share = self._before, self._n_plain / MAX_TOKENS
            scale.value = self._scale_then = max(before * (self._one / one) ** share, self._one / self._curve[2])
            return
        n = n_drafted + 1
        expected = self.of_last(n)
        ratio, share = pass_seconds / expected, self._curve[n] * scale.value / expected
        scale.saw(pass_seconds / (expected / scale.value))
        self._one = token.value * scale.value / self._scale_then
        self._curve[n] *= min(max(ratio, 0.5), 2.0) ** (CURVE_SHARE * share)
        self.experts.saw(n, ratio, 1.0 - share)
        self._n_plain, self._n_more, self._is_behind_draft = 0, self._n_more + 1, self.draft > 0.0
        self._before = scale.value, self._one
        if self.draft:  # what slows a pass down for once has mostly slowed its draft down
            self._saw_draft(n_drafted, n_missed, draft_seconds / min(max(ratio, 1.0), 2 * FAR))

    def _scale_draft(self, by: float) -> None:
        self.start, self.draft = by * self.start, by * self.draft
        self._sums[3:] = [by * seconds for seconds in self._sums[3:]]

    def _saw_draft(self, n: int, n_missed: int, seconds: float) -> None:
        """A line through the last drafts, start + n draft: the first token finds the draft's weights out of the cache."""
        if 0 < n_missed < FEW_MISSED:  # what they take is lost in what drafts differ by
            return
        if n_missed:
            catch_up = (seconds - self.of_draft(n)) / (n_missed * self.draft)
            self.catch_up += 0.5 * (min(max(catch_up, 0.0), 1.0) - self.catch_up)
            return
        expected = self.of_draft(n)
        last, self._draft_ratio = self._draft_ratio, max(seconds / expected, LEAST)
        moved = min(max(_agreed(last, self._draft_ratio), 0.1), 10.0)
        if not self._sums[0]:
            self._first_draft = (self.start + self.draft) / self._one
        self._draft_ratio /= moved
        self._scale_draft(moved)
        seconds = min(max(seconds, 0.5 * expected * moved), 2 * expected * moved)
        self._sums = [MEMORY * each + new for each, new in zip(self._sums, (1.0, n, n * n, seconds, n * seconds), strict=True)]
        one, n1, n2, s, ns = self._sums
        spread = one * n2 - n1 * n1
        if spread > 0.1 * one * one:  # else all are of one length, and what is dear about them cannot be told
            self.draft = min(max((one * ns - n1 * s) / spread, 0.05 * s / n1), s / n1)
        self.start = max(0.0, (s - self.draft * n1) / one)
        if not self.start:
            self.draft = s / n1


class Needed(dict[int, float]):
    """What the chance that the first k proposals stand has to exceed for more of them to pay, for k = 0 to MAX_GAMMA.

    It is asked between two passes, which a small model's take hardly longer than: what is not asked is not computed.
    """

    def __init__(self, costs: Costs, rate: float) -> None:
        super().__init__({MAX_GAMMA: math.inf})
        self._seconds = [taken + k * costs.draft + (costs.start if k else 0.0) for k, taken in enumerate(costs.passes[1:])]
        self._gains = [*itertools.accumulate(itertools.repeat(rate, MAX_GAMMA), lambda gain, each: (1.0 + gain) * each)]
        farthest = AHEAD[-1]  # what is farther is never considered at once: a rate that it alone has cannot be had
        self._best = max((1.0 + gain) / taken for gain, taken in zip([0.0, *self._gains[:farthest]], self._seconds, strict=False))

    def __missing__(self, k: int) -> float:
        seconds, gains = self._seconds, self._gains
        then = [min(k + more, MAX_GAMMA) for more in AHEAD]
        self[k] = found = self._best * max(min([(seconds[n] - seconds[k]) / gains[n - k - 1] for n in then]), 0.0)
        return found


class Acceptance:
    """How often proposals stood, by their confidence, the latest weighing most. prior: by bucket, before any was seen.

    stood, seen: of each confidence and of all, how many did, and how many there were.
    """

    def __init__(self, prior: Sequence[float] = MARGIN_RATES) -> None:
        self.rates = [*prior]
        self.stood = [PRIOR_WEIGHT * rate for rate in (*prior, PRIOR_RATE)]  # the last one counts all
        self.seen = [PRIOR_WEIGHT] * (BUCKETS + 1)

    @property
    def rate(self) -> float:
        """Of all confidences."""
        return self.stood[-1] / self.seen[-1]

    def begin_with(self, stood: Sequence[float], seen: Sequence[float]) -> None:
        """What another one has counted, as far as this text's own count soon more."""
        weights = [min(1.0, KNOWN_WEIGHT / each) for each in seen]
        self.stood = [weight * each for weight, each in zip(weights, stood, strict=True)]
        self.seen = [weight * each for weight, each in zip(weights, seen, strict=True)]
        self.rates = [each / of for each, of in zip(self.stood[:BUCKETS], self.seen, strict=False)]

    def saw(self, bucket: int, stood: bool) -> None:
        """A proposal that the target judged."""
        for i in (bucket, BUCKETS):
            self.stood[i] = MEMORY * self.stood[i] + stood
            self.seen[i] = MEMORY * self.seen[i] + 1.0
        self.rates[bucket] = self.stood[bucket] / self.seen[bucket]


def _agreed(last: float, new: float) -> float:
    """What two ratios in a row are off by at least, 1 where they are not, or not by as much: stalls differ."""
    if FAR < last < FAR * new and FAR < new < FAR * last:
        return min(last, new)
    return max(last, new) if last < 1 / FAR and new < 1 / FAR else 1.0


def bucket_of(confidence: float) -> int:
    """The bucket of a confidence >= 0, by its power of two."""
    return min(int(8.0 * min(confidence, 1e6)).bit_length(), BUCKETS - 1)
