"""How many tokens to draft before each forward pass of the target, for one sequence or a batch.

A round that drafts n tokens yields 1 + S_1 + ... + S_n tokens on average, where S_k is the probability that the first k are all
accepted. It costs c(n + 1) + d(n): a pass of the target over n + 1 tokens, and the draft (Leviathan et al. 2023,
arXiv:2211.17192, section 3.3). So another token is drafted while S is worth more than its seconds at the current speed. c and d
are measured when the models are loaded (`CostCurve`), and S is learnt from the drafter's confidence (`Acceptance`). Only ratios
of costs matter, and other programs hardly change them. A `CostCorrection` mends a curve that was measured wrongly.

Played on 20 pairs and machines, this reaches 0.998 of the speed of the best fixed length of each (docs/experiments/
draft-length.md); the included pair is 2.30 times as fast as its target at temperature 0, at most 2.36 times with a fixed length.

The module uses numbers only, no models.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from specdec.draft.acceptance import Acceptance, get_bucket
from specdec.kernels import MAX_BATCH_TOKENS

MAX_GAMMA = MAX_BATCH_TOKENS - 1
MIN_SECONDS = 1e-9
TREE_TOKENS, MAX_TREE_COST = 8, 1.35  # proposals are chains where a pass over 8 tokens costs more than 1.35 of a plain one
FIRST_WAIT, MAX_WAIT = 16, 64  # steps without a draft before another trial
CATCH_UP_RATIO = 0.1  # time that a draft takes to read a missed token of the sequence, relative to drafting a token
TRIAL_SHARE = 0.02  # of all time for trials; too little for a draft that needs longer to read the tokens it has missed

N_COMPARED = 4  # pairs of neighbouring steps, one with a draft and one without, from which costs are corrected
MAX_ERROR, MAX_SPREAD = 1.25, 1.4  # ratio of measured times to the curve's that is not corrected; and among measured times
N_FIRST, PLAIN_INTERVAL = 3, 250  # drafted rounds before a step without a draft: each of the first ones, later this number
DECAY = 0.98  # factor by which each round reduces the weight of earlier ones in the speed
MAX_FIRST_TRIAL_COST = 3.0  # extra cost of a trial that is made at once, in steps without a draft


class CostCurve:
    """The costs, in seconds, of a target's passes over each number of tokens and of drafting tokens for it.

    Args:
        pass_seconds: The minimum measured seconds of passes by number of tokens. Noise only ever adds time, so a pass over fewer
            tokens is taken to cost no more than one over more.
        draft_token: Seconds of drafting one token; 0 if proposing costs nothing.
    """

    def __init__(self, pass_seconds: Mapping[int, float], draft_token: float = 0.0) -> None:
        """Interpolate the measured times, and make them rise with the number of tokens."""
        measured = sorted(pass_seconds)
        curve = np.interp(np.arange(MAX_BATCH_TOKENS + 1), measured, [max(pass_seconds[n], MIN_SECONDS) for n in measured])
        beyond = np.arange(measured[-1] + 1, MAX_BATCH_TOKENS + 1)
        curve[beyond] *= beyond / measured[-1]  # compute-bound
        self.pass_seconds: list[float] = np.minimum.accumulate(curve[::-1])[::-1].tolist()
        self.draft_token = draft_token

    def merge(self, other: "CostCurve") -> "CostCurve":
        """Return a new curve with the minimum of two curves' costs, element by element."""
        passes = {n: min(self.pass_seconds[n], other.pass_seconds[n]) for n in range(1, MAX_BATCH_TOKENS + 1)}
        return CostCurve(passes, min(self.draft_token, other.draft_token))


class CostCorrection:
    """Factors of the costs of drafted passes and of drafts, where measured times show that the cost curve is wrong.

    With a cost measured wrong by 3, the worst of 288 played cases has 0.925 of the plain speed; without correction it has 0.78.

    The factors are relative to passes without a draft. They come from pairs of neighbouring steps, one with and one without,
    since other programs change the speed of the machine. So now and then a step has no draft, and sooner if costs seem wrong.

    Attributes:
        pass_factor: Factor of the costs of passes with drafts; 1.0 unless it is beyond MAX_ERROR.
        draft_factor: The same factor of the costs of drafts.
        is_next_plain: Whether the next step is to have no draft.
        needs_trial: Whether more pairs are needed to find the factors.
    """

    def __init__(self) -> None:
        """Start without measured times."""
        self.pass_factor = self.draft_factor = 1.0
        self.is_next_plain, self.needs_trial = False, True
        self._pairs = deque[tuple[float, float]](maxlen=N_COMPARED)  # relative times of a drafted pass, and of its drafts
        self._last_step: tuple[bool, float, float] | None = None
        self._n_rounds = 0

    def record(self, is_drafted: bool, pass_ratio: float, draft_ratio: float) -> None:
        """Add a step's measured times, relative to those of the curve, and set the attributes.

        Args:
            is_drafted: Whether the step had a draft.
            pass_ratio: The time of the pass.
            draft_ratio: The time of the drafts; 0 for none.
        """
        n = self._n_rounds = self._n_rounds + is_drafted
        if self._last_step and self._last_step[0] != is_drafted:
            (_, plain, _), (_, drafted, drafting) = sorted([self._last_step, (is_drafted, pass_ratio, draft_ratio)])
            self._pairs.append((drafted / plain, drafting / plain or 1.0))
            self._last_step = None  # each step is in one pair
            factors = [find_factor(ratios) for ratios in zip(*self._pairs, strict=True)]
            is_known = len(self._pairs) == N_COMPARED
            if is_known:
                self.pass_factor, self.draft_factor = factors
            self.needs_trial = not is_known and factors != [1.0, 1.0]
        else:
            self._last_step = is_drafted, pass_ratio, draft_ratio
        self.is_next_plain = is_drafted and (n <= N_FIRST or n % PLAIN_INTERVAL == 0 or self.needs_trial)


def find_factor(ratios: Sequence[float]) -> float:
    """Return the median of ratios of times; 1.0 within MAX_ERROR, and if they scatter as other programs interrupt the steps."""
    factor = median(ratios)
    is_error = not 1.0 / MAX_ERROR < factor < MAX_ERROR
    return factor if is_error and max(ratios) <= MAX_SPREAD * min(ratios) else 1.0


class CostModel:
    """The costs of a batch's target passes and drafts. All sequences of a batch wait for the same pass.

    `begin_pass` and `end_pass` frame each pass.

    Args:
        curve: Costs as measured when the models were loaded.
        earlier: The cost model of an earlier batch of the same models, whose correction is continued.
    """

    def __init__(self, curve: CostCurve, earlier: "CostModel | None" = None) -> None:
        """Start with the costs of the curve."""
        self.curve = curve
        self.correction: CostCorrection = earlier.correction if earlier else CostCorrection()
        self._tokens_gained = self._cost_spent = 1.0  # of the last rounds: tokens per sequence, and cost in steps without a draft
        self.begin_pass()

    @property
    def plain_cost(self) -> float:
        """The seconds of a target pass over one token of each sequence of the batch, without drafts."""
        return self.pass_cost(self.n_sequences)

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of the whole batch in the last rounds, at least those of steps without a draft."""
        speed_up = max(self._tokens_gained / self._cost_spent, 1.0)
        return speed_up * self.n_sequences / self.plain_cost

    def pass_cost(self, n_tokens: int) -> float:
        """Return the expected seconds of a target pass over n_tokens tokens of the whole batch."""
        factor = self.correction.pass_factor if n_tokens > self.n_sequences else 1.0
        return self.curve.pass_seconds[min(n_tokens, MAX_BATCH_TOKENS)] * factor

    def begin_batch(self) -> None:
        """Forget a correction, when the first sequence of a batch starts: another program may have made drafts expensive.

        A right correction is found again within 8 steps. A wrong one would end the drafts of a costly model for good: played
        sequences reach 1.00 of the plain speed with it, 1.16 without it.
        """
        if (self.correction.pass_factor, self.correction.draft_factor) != (1.0, 1.0):
            self.correction = CostCorrection()

    def begin_pass(self, n_sequences: int = 1, max_tokens: int = MAX_BATCH_TOKENS) -> None:
        """Reset the counts for a new pass over n_sequences sequences and up to max_tokens tokens, including drafts."""
        self.n_sequences, self.n_tokens, self.max_tokens = max(n_sequences, 1), n_sequences, max_tokens
        self._draft_seconds = self._draft_cost = 0.0  # measured and expected

    def add_draft(self, n: float, seconds: float) -> None:
        """Record the seconds that a draft model took to draft n tokens of a sequence for this pass."""
        self._draft_seconds += seconds
        self._draft_cost += n * self.curve.draft_token

    def end_pass(self, n_tokens: int, n_generated: int, seconds: float) -> None:
        """Record the measurements of a finished pass.

        Args:
            n_tokens: Tokens that the pass ran, drafts included.
            n_generated: Tokens that the pass added to the sequences.
            seconds: Time of the pass.
        """
        is_drafted = n_tokens > self.n_sequences
        cost = self.curve.pass_seconds[n_tokens]
        if is_drafted or not self.correction.is_next_plain:
            correction = self.correction
            corrected = cost * correction.pass_factor + self._draft_cost * correction.draft_factor if is_drafted else cost
            self._tokens_gained = DECAY * self._tokens_gained + n_generated / self.n_sequences
            self._cost_spent = DECAY * self._cost_spent + corrected / self.plain_cost
        draft_ratio = self._draft_seconds / self._draft_cost if self._draft_cost else 0.0
        self.correction.record(is_drafted, max(seconds, MIN_SECONDS) / cost, draft_ratio)


class DraftLengthPolicy:
    """A draft length policy for one sequence that drafts as many tokens as are expected to be profitable, or none.

    Args:
        costs: Costs of the batch that the sequence is in.
        acceptance: The acceptance probabilities of draft tokens; learns from each round.
        is_free: Whether proposing costs nothing, as with lookup.
    """

    def __init__(self, costs: CostModel, acceptance: Acceptance, is_free: bool) -> None:
        """Start without rounds of its own, and with an acceptance for a new text."""
        acceptance.begin_sequence()
        self.costs, self.acceptance, self.max_tokens = costs, acceptance, 0
        self._is_free = is_free
        self._buckets = list[int]()
        self._survival, self._is_trial = 1.0, False
        self._n_missed, self._wait = 0, FIRST_WAIT  # steps since the last draft, and how many to wait for a trial

    @property
    def can_branch(self) -> bool:
        """Whether proposals may be trees: further tokens are cheap, and one sequence has the pass, without prefill chunks."""
        costs = self.costs
        is_single = costs.n_sequences == 1 and costs.max_tokens == MAX_BATCH_TOKENS
        return is_single and costs.pass_cost(TREE_TOKENS) <= MAX_TREE_COST * costs.plain_cost

    def start(self, token_budget: int) -> bool:
        """Begin a round in which up to `token_budget` tokens fit: set `max_tokens`, and return whether to draft."""
        costs = self.costs
        self._buckets = []
        self._survival, self._is_trial = 1.0, False
        is_plain = costs.correction.is_next_plain
        self.max_tokens = 0 if is_plain else min(token_budget, costs.max_tokens - costs.n_tokens)
        if self.max_tokens < 1:
            return False
        self._draft_cost = 0.0 if self._is_free else costs.curve.draft_token * costs.correction.draft_factor
        self._rate = costs.tokens_per_second / self.acceptance.mean
        if self._is_free or self._is_profitable(0):
            return True
        self.max_tokens = 1
        catch_up = CATCH_UP_RATIO * self._n_missed * self._draft_cost
        self._is_trial = self._is_trial_due(self._get_token_cost(0) + catch_up)
        return self._is_trial

    def should_continue(self, confidence: float) -> bool:
        """Record the confidence of the token that was just drafted, and return whether to draft another token in this round.

        Args:
            confidence: A number >= 0 that rises with the acceptance probability: a margin in nats, or p / (1 - p).
        """
        bucket = get_bucket(confidence)
        self._buckets.append(bucket)
        self._survival *= self.acceptance.rates[bucket]
        n = len(self._buckets)
        return n < self.max_tokens and self._is_profitable(n)

    def choose(self, confidences: Sequence[float], parents: Sequence[int] | None = None) -> int:
        """Return how many of the tokens with the given confidences, the first ones, to propose: the number with the best profit.

        For a drafter that has found them at no cost. If none is profitable, this is 1 for a trial that is due, else 0.

        Args:
            confidences: The confidence of each token.
            parents: For a token tree, the index of each token's parent, an earlier token, or -1.
        """
        costs, rates = self.costs, self.acceptance.rates
        speed, base = costs.tokens_per_second, costs.pass_cost(costs.n_tokens)
        self._buckets = [get_bucket(confidence) for confidence in confidences[: self.max_tokens]]
        best = gain = 0.0
        n_best, survivals = 0, [1.0]  # of no token, then of each
        for n, bucket in enumerate(self._buckets, 1):
            survivals.append(survivals[parents[n - 1] + 1 if parents else -1] * rates[bucket])
            gain += survivals[-1]
            profit = gain - speed * (costs.pass_cost(costs.n_tokens + n) - base)
            if profit > best:
                best, n_best = profit, n
        if self._buckets and not n_best:
            self._is_trial = self._is_trial_due(costs.pass_cost(costs.n_tokens + 1) - base)
            n_best = int(self._is_trial)
        del self._buckets[n_best:]
        return n_best

    def update(
        self,
        n_drafted: int,
        n_accepted: int,
        pass_seconds: float,
        draft_seconds: float,
        verified_nodes: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """Learn from a finished round: record its accepted tokens and its times in seconds; see `LengthPolicy.update`."""
        if not n_drafted:
            self._n_missed += 1
            return
        if verified_nodes:
            accepted, rejected = ([self._buckets[node] for node in nodes] for nodes in verified_nodes)
            self.acceptance.update(accepted, n_accepted)
            self.acceptance.update(rejected, 0)
        else:
            self.acceptance.update(self._buckets[: min(n_drafted, n_accepted + 1)], n_accepted)
        if self._is_trial:
            self._wait = FIRST_WAIT if n_accepted else min(2 * self._wait, MAX_WAIT)
        if not self._is_free:
            self.costs.add_draft(n_drafted + CATCH_UP_RATIO * self._n_missed, draft_seconds)
        self._n_missed = 0

    def _is_trial_due(self, seconds: float) -> bool:
        """Return whether to try a draft that does not seem profitable and costs these extra seconds."""
        costs = self.costs
        if costs.correction.needs_trial and seconds <= MAX_FIRST_TRIAL_COST * costs.plain_cost:
            return self._n_missed > 0
        return self._n_missed >= self._wait * max(1.0, seconds / (TRIAL_SHARE * FIRST_WAIT * costs.plain_cost))

    def _get_token_cost(self, n: int) -> float:
        """Return the expected seconds of drafting and verifying another token of this sequence in this pass, after n."""
        n_tokens = self.costs.n_tokens + n
        return self.costs.pass_cost(n_tokens + 1) - self.costs.pass_cost(n_tokens) + self._draft_cost

    def _is_profitable(self, n: int) -> bool:
        """Return whether drafting more than n tokens is profitable, if the n are accepted with the probability `_survival`."""
        return self.costs.n_tokens + n < MAX_BATCH_TOKENS and self._survival > self._rate * self._get_token_cost(n)


class FixedLength:
    """A draft length policy that drafts `gamma` tokens in each round, or as many as fit."""

    can_branch = False

    def __init__(self, gamma: int) -> None:
        """Set the draft length of all rounds to `gamma` tokens."""
        self._gamma, self.max_tokens, self._n_left = gamma, 0, 0

    def start(self, token_budget: int) -> bool:
        """Begin a round in which up to `token_budget` tokens fit; return whether to draft."""
        self.max_tokens = self._n_left = min(self._gamma, token_budget)
        return self._n_left > 0

    def should_continue(self, confidence: float) -> bool:
        """Count a drafted token, and return whether to draft another one in this round; its confidence is ignored."""
        self._n_left -= 1
        return self._n_left > 0

    def choose(self, confidences: Sequence[float], parents: Sequence[int] | None = None) -> int:
        """Return the number of given confidences: all tokens that the drafter has found are proposed."""
        return len(confidences)

    def update(self, *_: object, **__: object) -> None:
        """Do nothing: the draft length does not depend on earlier rounds."""
