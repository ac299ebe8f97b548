"""How many tokens to draft before each forward pass of the target, for one sequence or a batch.

A round that drafts n tokens yields 1 + S_1 + ... + S_n tokens on average, where S_k is the probability that the first k are all
accepted. It costs c(n + 1) + d(n): a pass of the target over n + 1 tokens, and the draft (Leviathan et al. 2023,
arXiv:2211.17192, section 3.3). A longer draft is profitable while its expected tokens are worth more than its seconds at the
speed that is possible without it. Three things are known about that:

- `CostCurve`: c and d, from interleaved passes when the models are loaded (cost_calibration.py). Only ratios matter.
- `Acceptance`: how often tokens of a given confidence were accepted, in this sequence and in earlier ones (acceptance.py).
- Plain steps: now and then a step has no draft. Its time, compared with that of the drafted rounds around it, shows whether these
  really cost what the curve says while other programs run. Measured times have no other influence.

The module uses numbers only, no models.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from specdec.draft.acceptance import DECAY, Acceptance, get_bucket
from specdec.draft.cost_curves import MAX_LOOKAHEAD_TOKENS, MIN_SECONDS, CostCurve
from specdec.kernels import MAX_BATCH_TOKENS

MAX_GAMMA = MAX_BATCH_TOKENS - 1
LOOKAHEAD_TOKENS = (1, 2, 4, 8, 16, MAX_LOOKAHEAD_TOKENS)  # how many more tokens are considered together, since c(n) has steps
TREE_TOKENS, MAX_TREE_COST = 8, 1.35  # proposals are chains where a pass over 8 tokens costs more than 1.35 of a plain one
MAX_PENDING_PASSES, MAX_PENDING_S = 16, 0.01  # passes to process together, and the time after which they are processed anyway
MIN_LOG_CHANGE = 0.1  # of the logarithm of a ratio, from which on it is published

# All of the following in plain steps, that is passes of the target without a draft.
FREE_SEARCH_SHARE = 0.015  # of a step that looks for a proposal, whatever this has gained so far
MAX_ROUND_COST = 8.0  # the longest drafted round
PLAIN_SHARE, LATER_PLAIN_SHARE = 0.04, 0.01  # of drafted rounds' time for plain steps: until there are MIN_COMPARISONS, and later
TRIAL_SHARE = 0.01  # share of plain steps' time for drafts that do not seem profitable
INITIAL_BUDGET, MAX_BUDGET = 1.5, 12.0
MAX_TRIAL_COST = 2.5  # the price of a trial at the start
N_FREE_TRIALS = 2  # that need no budget, at the start
MIN_COMPARISONS = 8
MIN_COMPARED_ROUNDS = 3  # drafted rounds before a comparison with steps that have no draft because none was found
MAX_PLAIN_STEPS = 8  # that are compared with them
MIN_ACCEPTED = 2.0  # accepted tokens from which on the acceptance of a draft is known
MAX_COMPARISONS = 5  # that are remembered
MAX_ERROR_RATIO = 1.25  # of measured cost to the curve; beyond, the curve is changed
MAX_MISSED_TOKENS = 8  # tokens of the sequence that a draft has missed, beyond which its time is not used
SUDDEN_CHANGE_RATIO = 1.5  # a change of step times by this factor calls for a comparison at once


class PassRecord(NamedTuple):
    """One pass of the target over a batch, with its size, its measured times and the drafts before it.

    `n_generated` is the number of tokens that the pass added to its sequences.
    """

    n_sequences: int
    n_tokens: int
    n_generated: int
    seconds: float
    n_experts_read: float  # experts that a layer read
    drafts: list[tuple[int, int, float]]  # of models: tokens, tokens of the sequence that the draft had missed, seconds
    is_trial: bool  # whether a draft was one that did not seem profitable
    gap_seconds: float  # from the end of the last pass, with drafts; 0 if not measured


class CostModel:
    """An estimate of the current costs of a batch's target passes and drafts, which also schedules steps without a draft.

    Steps without a draft (plain steps) show what a draft gains. All sequences of a batch wait for the same pass. `begin_pass` and
    `end_pass` frame each pass. Several passes are processed together, since code that runs between two passes runs with cold
    caches.

    Args:
        curve: Costs as measured when the models were loaded.
        earlier: The cost model of an earlier batch of the same models; its comparisons and budget are continued.
    """

    def __init__(self, curve: CostCurve, earlier: "CostModel | None" = None) -> None:
        """Start with the costs of the curve, or with the ratios of an earlier model."""
        self.curve, self.experts = curve, curve.experts.copy()
        self.pass_ratio = self.draft_ratio = 1.0  # drafted rounds' cost over the curve's, relative to plain steps
        self.version = 0  # changes when the two ratios or the speed-up have moved
        self._published_ratios = 1.0, 1.0, 1.0  # their values then
        self.n_sequences = self.n_tokens = 1  # of this pass: sequences, and tokens so far, one of each sequence among them
        self.is_plain = False  # whether no sequence is to draft in this pass
        self.n_comparisons = 0  # comparisons made
        self.overhead = 0.0  # seconds of other work between two passes
        self.speed_up = 1.0  # tokens of the last rounds, over those of plain steps in the same time; at least 1
        self._max_tokens = MAX_BATCH_TOKENS
        self._drafts, self._is_trial = list[tuple[int, int, float]](), False  # of this pass: tokens, missed tokens, seconds
        self._pending_passes = list[PassRecord]()  # passes that are not processed yet
        self._update_interval, self._pending_seconds = 1, 0.0  # how many of them to wait for, and their time
        self._comparisons = deque[tuple[float, float]](maxlen=MAX_COMPARISONS)
        self._drafted_ratios = list[tuple[float, float]]()  # ratios of drafted rounds since the last comparison: pass, draft
        self._plain_ratios = deque[float](maxlen=MAX_PLAIN_STEPS)  # ratios of the last plain steps since the last comparison
        self._has_trial = False  # whether a drafted round since the last comparison was a trial
        self._drafted_level, self._plain_level = 0.0, 0.0  # ratios at the last comparison
        self._budget, self._spacing, self._n_trials = INITIAL_BUDGET, 1, 0
        self._round_cost, self._rounds_until_plain = 1.0, -1  # of a drafted round, in plain steps; until the next plain step
        self._tokens_gained = self._cost_spent = 1.0  # tokens of the last rounds and their cost, both per sequence
        if earlier:
            self.pass_ratio, self.draft_ratio, self.speed_up = earlier.pass_ratio, earlier.draft_ratio, earlier.speed_up
            self._tokens_gained, self._cost_spent, self.overhead = earlier.speed_up, 1.0, earlier.overhead
            self._comparisons.extend(earlier._comparisons)
            self._budget, self._n_trials = min(earlier._budget, INITIAL_BUDGET), earlier._n_trials
            self._drafted_level, self._plain_level = earlier._drafted_level, earlier._plain_level

    @property
    def plain_cost(self) -> float:
        """The seconds of a target pass over one token of each sequence of the batch, without drafts."""
        return self.curve.pass_seconds[self.n_sequences] + self.experts.extra_seconds[self.n_sequences]

    @property
    def tokens_per_second(self) -> float:
        """The expected number of tokens per second of the whole batch."""
        return self.speed_up * self.n_sequences / (self.plain_cost + self.overhead)

    @property
    def token_budget(self) -> int:
        """The number of tokens that may still be drafted for this pass."""
        return self._max_tokens - self.n_tokens

    @property
    def can_branch(self) -> bool:
        """Whether proposals may be trees: further tokens are cheap, and one sequence has the pass, without prefill chunks."""
        is_single = self.n_sequences == 1 and self._max_tokens == MAX_BATCH_TOKENS
        return is_single and self.pass_cost(TREE_TOKENS) <= MAX_TREE_COST * self.plain_cost

    def pass_cost(self, n_tokens: int) -> float:
        """Return the expected seconds of a target pass over n_tokens tokens of the whole batch."""
        n = min(n_tokens, MAX_BATCH_TOKENS)
        cost = self.curve.pass_seconds[n] + self.experts.extra_seconds[n]
        return max(cost * self.pass_ratio, self.plain_cost) if n > self.n_sequences else cost

    def draft_cost(self, n: int, n_missed: int = 0) -> float:
        """Return the expected seconds of drafting n tokens with a model that first reads n_missed tokens of the sequence."""
        return self.curve.draft_cost(n, n_missed) * self.draft_ratio

    def begin_pass(self, n_sequences: int = 1, max_tokens: int = MAX_BATCH_TOKENS) -> None:
        """Reset the counts for a new pass over n_sequences sequences and up to max_tokens tokens, including drafts."""
        self.n_sequences, self.n_tokens, self._max_tokens = max(n_sequences, 1), n_sequences, max_tokens
        self._drafts, self._is_trial = [], False

    def add_tokens(self, n: int) -> None:
        """Add n tokens that a sequence has drafted to the number of tokens of this pass."""
        self.n_tokens += n

    def add_draft(self, n: int, n_missed: int, seconds: float) -> None:
        """Record the seconds that a draft model took to read n_missed tokens of a sequence and draft n tokens for this pass."""
        self._drafts.append((n, n_missed, seconds))

    def end_pass(
        self, n_tokens: int, n_generated: int, seconds: float, gap_seconds: float = 0.0, n_experts_read: float = 0.0
    ) -> None:
        """Record the measurements of a finished pass, and update the cost estimates from all recorded passes when it is time.

        Args:
            n_tokens: Tokens that the pass ran, drafts included.
            n_generated: Tokens that the pass added to the sequences.
            seconds: Time of the pass.
            gap_seconds: Time from the end of the last pass, if that came right before.
            n_experts_read: Experts that a layer read in the pass.
        """
        self._pending_passes.append(
            PassRecord(
                self.n_sequences, n_tokens, n_generated, seconds, n_experts_read, self._drafts, self._is_trial, gap_seconds
            )
        )
        self._pending_seconds += seconds
        self._rounds_until_plain -= 1
        if len(self._pending_passes) >= self._update_interval or self._pending_seconds > MAX_PENDING_S or self.is_plain:
            self._learn()
        elif self._rounds_until_plain == 0 and n_tokens > self.n_sequences:
            self.is_plain = True

    def _learn(self) -> None:
        """Update the cost estimates from the pending passes, and set `is_plain`: whether the next pass runs without drafts."""
        for each in self._pending_passes:
            if each.n_tokens > each.n_sequences:
                self._record_drafted(each)
            else:
                self._record_plain(each)
        self._pending_passes.clear()
        self._update_interval, self._pending_seconds = min(2 * self._update_interval, MAX_PENDING_PASSES), 0.0
        self.speed_up = max(self._tokens_gained / self._cost_spent, 1.0)
        now = self.pass_ratio, self.draft_ratio, self.speed_up
        if max(abs(math.log(a / b)) for a, b in zip(now, self._published_ratios, strict=True)) > MIN_LOG_CHANGE:
            self.version, self._published_ratios = self.version + 1, now
        self._rounds_until_plain = self._compute_rounds_to_wait()
        has_changed = self._has_changed([max(ratios) for ratios in self._drafted_ratios[-3:]], self._drafted_level)
        self.is_plain = bool(self._drafted_ratios) and (self._rounds_until_plain == 0 or has_changed)

    def _compute_rounds_to_wait(self) -> int:
        """Return the number of rounds with a draft until the budget allows a step without one."""
        missing, a_round = self._plain_price - self._budget, self._plain_share * self._round_cost
        return max(self._spacing - len(self._drafted_ratios), math.ceil(missing / a_round) if missing > 0 else 0, 0)

    @property
    def _plain_share(self) -> float:
        """The fraction of the time of drafted rounds that may be spent on steps without a draft."""
        return PLAIN_SHARE if self.n_comparisons < MIN_COMPARISONS else LATER_PLAIN_SHARE

    def _record_drafted(self, record: PassRecord) -> None:
        """Add a pass with drafts to the ratios of measured to expected cost, to the speed-up and to the budget."""
        plain = self.curve.pass_seconds[record.n_sequences] + self.experts.extra_seconds[record.n_sequences]
        expected = self.curve.pass_seconds[record.n_tokens] + self.experts.compute_extra_seconds(record.n_experts_read)
        pass_ratio = draft_ratio = record.seconds / expected
        expected_draft = draft_seconds = 0.0
        most_missed = 0
        for n, n_missed, seconds in record.drafts:
            expected_draft += self.curve.draft_cost(n, n_missed)
            draft_seconds += seconds
            most_missed = max(most_missed, n_missed)
        if expected_draft and most_missed <= MAX_MISSED_TOKENS:
            draft_ratio = draft_seconds / expected_draft
        self._drafted_ratios.append((pass_ratio, draft_ratio))
        self._has_trial |= record.is_trial
        cost = max(expected * self.pass_ratio, plain) + expected_draft * self.draft_ratio + self.overhead
        cost /= plain + self.overhead
        self._tokens_gained = DECAY * self._tokens_gained + record.n_generated / record.n_sequences
        self._cost_spent = DECAY * self._cost_spent + cost
        self._round_cost += 0.1 * (cost - self._round_cost)
        self._budget = min(self._budget + (0.0 if record.is_trial else self._plain_share * cost), MAX_BUDGET)
        self.experts.update(record.n_tokens, record.n_experts_read)

    def _record_plain(self, record: PassRecord) -> None:
        """Add a pass without drafts to the budget and the overhead, and compare it to the drafted rounds before it, if any."""
        if self.is_plain:
            self._budget -= self._plain_price
            self._spacing += 1
        else:
            self._tokens_gained, self._cost_spent = DECAY * self._tokens_gained + 1.0, DECAY * self._cost_spent + 1.0
        self._budget = min(self._budget + TRIAL_SHARE, MAX_BUDGET)
        plain = self.curve.pass_seconds[record.n_sequences] + self.experts.extra_seconds[record.n_sequences]
        ratio = max(record.seconds / (plain + self.curve.eviction * bool(self._drafted_ratios)), MIN_SECONDS)
        self._plain_ratios.append(ratio)
        if record.gap_seconds:
            self._update_overhead(record.gap_seconds / ratio)
        is_due = self.is_plain or self._has_trial or len(self._drafted_ratios) >= MIN_COMPARED_ROUNDS
        if self._drafted_ratios and is_due:
            self._compare()

    def _update_overhead(self, seconds: float) -> None:
        """Move the estimated time between two passes a step towards a measurement, which may contain unrelated work."""
        self.overhead += 0.1 * (min(max(seconds, 0.0), 2 * self.overhead + self.curve.pass_seconds[1]) - self.overhead)

    def _compare(self) -> None:
        """Update pass_ratio and draft_ratio by comparing the drafted rounds and the plain steps since the last comparison.

        Other programs only ever add time, so the lower quartiles are compared if there are enough of both, and else the medians.
        """
        n = min(len(self._drafted_ratios), len(self._plain_ratios))
        compute_typical = _compute_lower_quartile if n >= MIN_COMPARED_ROUNDS else median
        passes, drafts = (compute_typical(ratios) for ratios in zip(*self._drafted_ratios, strict=True))
        plain = compute_typical(self._plain_ratios)
        self._comparisons.append((passes / plain, drafts / plain))
        before = self.pass_ratio, self.draft_ratio
        self.pass_ratio, self.draft_ratio = (_compute_cautious_median(ratios) for ratios in zip(*self._comparisons, strict=True))
        if max(abs(math.log(a / b)) for a, b in zip(before, (self.pass_ratio, self.draft_ratio), strict=True)) > math.log(
            MAX_ERROR_RATIO
        ):
            self._update_interval = 1  # react to the next passes at once
        self._drafted_level, self._plain_level = max(passes, drafts), plain
        self._drafted_ratios.clear()
        self._plain_ratios.clear()
        self._has_trial = False
        self.n_comparisons += 1

    @property
    def _plain_price(self) -> float:
        """The cost of a step without a draft: the time it loses compared with drafting, in units of one such step."""
        return 1.0 - 1.0 / self.speed_up

    @staticmethod
    def _has_changed(ratios: Sequence[float], level: float) -> bool:
        """Return whether the last three steps are all slower, or all faster, than at the last comparison by SUDDEN_CHANGE_RATIO.

        Args:
            ratios: Times of steps relative to the curve's, the latest last.
            level: This ratio at the last comparison; 0 if there was none.
        """
        last = [*ratios][-3:]
        return (
            level > 0.0
            and len(last) == 3
            and (min(last) > SUDDEN_CHANGE_RATIO * level or max(last) < level / SUDDEN_CHANGE_RATIO)
        )

    def get_corrected_curve(self) -> CostCurve:
        """Return the cost curve as measured, or scaled by the current ratios if MIN_COMPARISONS have shown that it is wrong."""
        is_off = any(abs(math.log(ratio)) > math.log(MAX_ERROR_RATIO) for ratio in (self.pass_ratio, self.draft_ratio))
        return (
            self.curve.scale(self.pass_ratio, self.draft_ratio)
            if is_off and self.n_comparisons >= MIN_COMPARISONS
            else self.curve
        )

    def try_draft(self, seconds: float, share: float = TRIAL_SHARE) -> bool:
        """Return whether to try a draft that does not seem profitable; if so, charge its cost to the budget and mark the pass.

        Args:
            seconds: The extra cost of the draft.
            share: The share of all time that such drafts may take.
        """
        price = seconds / self.plain_cost * TRIAL_SHARE / share
        is_free = price <= MAX_TRIAL_COST and (
            self._n_trials < N_FREE_TRIALS or self._has_changed(self._plain_ratios, self._plain_level)
        )
        if self._is_trial or (not is_free and price > self._budget - INITIAL_BUDGET):
            return False
        self._budget -= price * (self._n_trials >= N_FREE_TRIALS)
        self._n_trials += 1
        self._is_trial = True
        self._plain_ratios.clear()
        return True


def _compute_lower_quartile(ratios: Sequence[float]) -> float:
    """Return the ratio that a quarter of the given ones do not exceed; of fewer than four, the smallest."""
    return sorted(ratios)[len(ratios) // 4]


def _compute_cautious_median(ratios: Sequence[float]) -> float:
    """Return the median of the ratios and an added 1.0; of two middle values the one nearer to 1, so one ratio has no effect."""
    ordered = sorted([1.0, *ratios])
    middle = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(middle, key=lambda ratio: abs(math.log(max(ratio, MIN_SECONDS))))


class DraftLengthPolicy:
    """A draft length policy for one sequence that drafts as many tokens as are expected to be profitable, or none.

    Args:
        costs: Costs of the batch that the sequence is in.
        acceptance: The acceptance probabilities of the sequence's draft tokens; learns from each round.
        is_free: Whether proposing costs nothing, as with lookup.
    """

    def __init__(self, costs: CostModel, acceptance: Acceptance, is_free: bool) -> None:
        """Start without rounds of its own."""
        self.costs, self.acceptance = costs, acceptance
        self.max_tokens, self.can_branch = 0, False  # of this round's draft
        self._is_free = is_free
        self._buckets = list[int]()
        self._survival, self._is_trial = 1.0, False
        self._probabilities, self._thresholds = acceptance.probabilities, dict[tuple[int, int], float]()
        self._n_sequences = 1  # of the batch for which thresholds are known
        # rounds that are not processed yet: buckets of verified tokens, number of accepted ones
        self._pending_rounds = list[tuple[list[int], int]]()
        self._version, self._n_missed, self._trial_share = -1, 0, TRIAL_SHARE
        self._update_interval, self._pending_seconds = 1, 0.0
        self._max_draft_tokens = 0  # rises with the number of accepted tokens
        # For proposals that are looked up: whether this round does so, seconds that it takes, and tokens that it gains
        self._is_searching, self._search_seconds, self._search_gain = False, 0.0, 1.0

    def start(self, token_budget: int) -> bool:
        """Begin a round in which up to `token_budget` tokens fit: set `max_tokens` and `can_branch`; return whether to draft."""
        costs = self.costs
        is_due = len(self._pending_rounds) >= self._update_interval or self._pending_seconds > MAX_PENDING_S
        if is_due or self._version != costs.version or self._n_sequences != costs.n_sequences:
            self._learn()
        self._buckets = []
        self._survival, self._is_trial, self._is_searching = 1.0, False, False
        self.max_tokens = token_budget = min(token_budget, costs.token_budget, self._max_draft_tokens)
        self.can_branch = costs.can_branch
        if costs.is_plain or token_budget < 1:
            self.max_tokens = 0
            return False
        if self._is_free:
            is_profitable = self._search_seconds * costs.tokens_per_second <= max(self._search_gain, FREE_SEARCH_SHARE)
            self._is_searching = is_profitable or costs.try_draft(self._search_seconds)
            return self._is_searching
        if self._get_threshold(0) <= 1.0:
            return True
        self.max_tokens = 1
        catch_up = costs.draft_cost(1, self._n_missed) - costs.draft_cost(1)
        self._is_trial = costs.try_draft(self._get_cost(1) - self._get_cost(0) + catch_up, self._trial_share)
        return self._is_trial

    def should_continue(self, confidence: float) -> bool:
        """Record the confidence of the token that was just drafted, and return whether to draft another token in this round.

        Args:
            confidence: A number >= 0 that rises with the acceptance probability: a margin in nats, or p / (1 - p).
        """
        bucket = get_bucket(confidence)
        self._buckets.append(bucket)
        self._survival *= self._probabilities[bucket]
        n = len(self._buckets)
        return n < self.max_tokens and (self._survival > self._get_threshold(n) or self._is_trial)

    def choose(self, confidences: Sequence[float], parents: Sequence[int] | None = None) -> int:
        """Return how many of the tokens with the given confidences, the first ones, to propose: the number with the best profit.

        For a drafter that has found them at no cost. If none is profitable, this is 1 for a trial that the budget allows, else 0.

        Args:
            confidences: The confidence of each token.
            parents: For a token tree, the index of each token's parent, an earlier token, or -1.
        """
        costs, probabilities = self.costs, self._probabilities
        rate, base = costs.tokens_per_second, costs.pass_cost(costs.n_tokens)
        self._buckets = [get_bucket(confidence) for confidence in confidences[: self.max_tokens]]
        best = gain = 0.0
        n_best, survivals = 0, [1.0]  # of no token, then of each
        for n, bucket in enumerate(self._buckets, 1):
            survivals.append(survivals[parents[n - 1] + 1 if parents else -1] * probabilities[bucket])
            gain += survivals[-1]
            profit = gain - rate * (costs.pass_cost(costs.n_tokens + n) - base)
            if profit > best:
                best, n_best = profit, n
        if self._buckets and not n_best:
            n_best = int(costs.try_draft(costs.pass_cost(costs.n_tokens + 1) - base, self._trial_share))
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
        costs = self.costs
        self._pending_seconds += pass_seconds
        if self._is_searching:
            before = self._search_seconds or draft_seconds
            self._search_seconds = before + 0.1 * (min(draft_seconds, 2 * before) - before)  # longer only if the core was lost
            gain = n_accepted - costs.tokens_per_second * (costs.pass_cost(costs.n_sequences + n_drafted) - costs.plain_cost)
            self._search_gain += 0.1 * (gain - self._search_gain)
        if n_drafted:
            if verified_nodes:
                accepted, rejected = ([self._buckets[node] for node in nodes] for nodes in verified_nodes)
                self._pending_rounds += [(accepted, n_accepted), (rejected, 0)]
            else:
                self._pending_rounds.append((self._buckets[: min(n_drafted, n_accepted + 1)], n_accepted))
            if not self._is_free:
                costs.add_draft(n_drafted, self._n_missed, draft_seconds)
        self._n_missed = 0 if n_drafted else self._n_missed + 1

    def _get_cost(self, n: int) -> float:
        """Return the expected seconds of this pass if this sequence adds n draft tokens to it, with the time to draft them."""
        costs = self.costs
        return costs.pass_cost(costs.n_tokens + n) + (0.0 if self._is_free else costs.draft_cost(n))

    def _learn(self) -> None:
        """Update the acceptance probabilities from the pending rounds, and recompute the maximum draft length."""
        if self._pending_rounds:
            self.acceptance.update(self._pending_rounds)
            self._pending_rounds.clear()
        self._update_interval, self._pending_seconds = min(2 * self._update_interval, MAX_PENDING_PASSES), 0.0
        self._probabilities, self._version, self._n_sequences = (
            self.acceptance.probabilities,
            self.costs.version,
            self.costs.n_sequences,
        )
        # if only comparisons speak against drafting, other programs may have disturbed them
        is_useful = self.acceptance.n_accepted >= MIN_ACCEPTED and self.costs.curve.is_profitable(self.acceptance.mean)
        self._trial_share = PLAIN_SHARE if is_useful else TRIAL_SHARE
        self._thresholds.clear()
        # until some tokens are accepted, a round may cost little
        limit = self._get_cost(0) + min(1.0 + self.acceptance.n_accepted, MAX_ROUND_COST) * self.costs.plain_cost
        low, high = 1, max(self.costs.token_budget, 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._get_cost(middle) <= limit else (low, middle - 1)
        self._max_draft_tokens = low

    def _get_threshold(self, n: int) -> float:
        """Return the minimum probability that n drafted tokens are all accepted at which drafting another one is profitable."""
        key = self.costs.n_tokens, n
        if key not in self._thresholds:
            self._thresholds[key] = self._compute_threshold(n)
        return self._thresholds[key]

    def _compute_threshold(self, n: int) -> float:
        rate, base, least = self.acceptance.mean, self._get_cost(n), math.inf
        gain, power, n_counted = 0.0, 1.0, 0
        for more in LOOKAHEAD_TOKENS:
            if self.costs.n_tokens + n + more > MAX_BATCH_TOKENS:
                break
            while n_counted < more:
                n_counted, power = n_counted + 1, power * rate
                gain += power
            least = min(least, (self._get_cost(n + more) - base) / gain)
        return self.costs.tokens_per_second * least


class FixedLength:
    """A draft length policy that drafts `gamma` tokens in each round, or as many as fit."""

    def __init__(self, gamma: int) -> None:
        """Set the draft length of all rounds to `gamma` tokens."""
        self._gamma = gamma
        self.max_tokens, self.can_branch = 0, False
        self._n_left = 0

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

    def update(
        self,
        n_drafted: int,
        n_accepted: int,
        pass_seconds: float,
        draft_seconds: float,
        verified_nodes: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """Do nothing: the draft length does not depend on earlier rounds."""
