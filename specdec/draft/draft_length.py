"""How many tokens to draft before each forward pass of the target, for one sequence or a batch.

A round that drafts n tokens yields 1 + S_1 + ... + S_n tokens on average, where S_k is the probability that the first k are all
accepted. It costs c(n + 1) + d(n): a pass of the target over n + 1 tokens, and the draft (Leviathan et al. 2023,
arXiv:2211.17192, section 3.3). So another token is drafted while S is worth more than its seconds at the current speed. c and d
are measured when the models are loaded (`CostCurve`), and S is learnt from the drafter's confidence (`Acceptance`). Only ratios
of costs matter, and other programs hardly change them. An `Insurance` stops drafting while measured rounds lose to steps without
a draft.

The module uses numbers only, no models.
"""

from collections import deque
from collections.abc import Sequence
from statistics import mean, median

from specdec.draft.acceptance import DECAY, Acceptance, get_bucket
from specdec.draft.cost_curves import CostCurve
from specdec.kernels import MAX_BATCH_TOKENS

MAX_GAMMA = MAX_BATCH_TOKENS - 1
LOOKAHEAD_TOKENS = (1, 2, 4, 8, 16, 32)  # how many more tokens are considered together, since c(n) has steps
TREE_TOKENS, MAX_TREE_COST = 8, 1.35  # proposals are chains where a pass over 8 tokens costs more than 1.35 of a plain one
MAX_PENDING_ROUNDS, MAX_PENDING_S = 16, 0.01  # rounds to process together, since code between two passes runs with cold caches
FIRST_WAIT, MAX_WAIT = 16, 64  # steps without a draft before another trial
TRIAL_SHARE = 0.02  # of all time for trials

N_COMPARED = 8  # drafted rounds, and steps without a draft, whose times are compared
SLOW_RATIO = 1.25  # of a round's time to the expected one, beyond which every SLOW_INTERVAL-th step has no draft
SLOW_INTERVAL = 8
FREE_LOSS, LOSS_SHARE = 1.0, 0.005  # what other steps without a draft may lose, in such steps: at once, and of each round
FIRST_STOP, MAX_STOP = 64, 512  # steps without a draft after rounds that lost


class Insurance:
    """A watch on the times of drafted rounds, which stops drafting where they are longer than the cost curve says and so lose.

    Now and then a step has no draft, more often if rounds take longer than expected, to show whether such steps do so too. Rounds
    are slower if their mean, median and minimum are: each alone may be changed by the time slices of other programs.

    Attributes:
        is_next_plain: Whether the next step is to have no draft.
    """

    def __init__(self) -> None:
        """Start without measured times."""
        self.is_next_plain = False
        self._drafted, self._plain = deque[float](maxlen=2 * N_COMPARED), deque[float](maxlen=N_COMPARED)
        self._n_rounds, self._steps_left, self._stop_steps = 0, 0, FIRST_STOP
        self._loss_left = FREE_LOSS

    def record(self, is_drafted: bool, ratio: float, speed_up: float) -> None:
        """Add a step's measured time, and set `is_next_plain`.

        Args:
            is_drafted: Whether the step had a draft.
            ratio: The measured time, relative to the expected one.
            speed_up: The expected speed of drafted rounds, relative to steps without a draft.
        """
        (self._drafted if is_drafted else self._plain).append(ratio)
        if self._steps_left or not is_drafted:
            self._steps_left = max(self._steps_left - 1, 0)
            self.is_next_plain = self._steps_left > 0
            return
        self._n_rounds += 1
        self._loss_left += LOSS_SHARE
        price = 1.0 - 1.0 / speed_up
        self.is_next_plain = self._loss_left > price
        if self._n_rounds % SLOW_INTERVAL == 0 and len(self._drafted) >= N_COMPARED:
            slowdown = min(typical(self._drafted) / typical(self._plain or [1.0]) for typical in (mean, median, min))
            self.is_next_plain |= slowdown > SLOW_RATIO
            if len(self._plain) == N_COMPARED and slowdown > max(speed_up, SLOW_RATIO):
                self._drafted.clear()
                self._steps_left, self._stop_steps = self._stop_steps, min(2 * self._stop_steps, MAX_STOP)
        if self.is_next_plain:
            self._loss_left = max(self._loss_left - price, 0.0)


class CostModel:
    """The costs of a batch's target passes and drafts. All sequences of a batch wait for the same pass.

    `begin_pass` and `end_pass` frame each pass.

    Args:
        curve: Costs as measured when the models were loaded.
        earlier: The cost model of an earlier batch of the same models, whose insurance is continued.
    """

    def __init__(self, curve: CostCurve, earlier: "CostModel | None" = None) -> None:
        """Start with the costs of the curve."""
        self.curve, self.experts = curve, curve.experts.copy()
        self.n_sequences = self.n_tokens = 1  # of this pass: sequences, and tokens so far, one of each sequence among them
        self.overhead: float = earlier.overhead if earlier else 0.0  # least seconds of other work between two passes
        self._max_tokens = MAX_BATCH_TOKENS
        self._insurance: Insurance = earlier._insurance if earlier else Insurance()
        self._draft_seconds = self._draft_cost = 0.0  # of this pass: measured and expected
        self._tokens_gained: float = earlier._tokens_gained if earlier else 1.0  # tokens of the last rounds, per sequence
        self._cost_spent: float = earlier._cost_spent if earlier else 1.0  # their expected cost in steps without a draft

    @property
    def is_plain(self) -> bool:
        """Whether no sequence is to draft in this pass."""
        return self._insurance.is_next_plain

    @property
    def plain_cost(self) -> float:
        """The seconds of a target pass over one token of each sequence of the batch, without drafts."""
        return self.pass_cost(self.n_sequences)

    @property
    def speed_up(self) -> float:
        """The tokens of the last rounds, relative to those of steps without a draft in the same time; at least 1."""
        return max(self._tokens_gained / self._cost_spent, 1.0)

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
        return self.curve.pass_seconds[n] + self.experts.extra_seconds[n]

    def begin_pass(self, n_sequences: int = 1, max_tokens: int = MAX_BATCH_TOKENS) -> None:
        """Reset the counts for a new pass over n_sequences sequences and up to max_tokens tokens, including drafts."""
        self.n_sequences, self.n_tokens, self._max_tokens = max(n_sequences, 1), n_sequences, max_tokens
        self._draft_seconds = self._draft_cost = 0.0

    def add_tokens(self, n: int) -> None:
        """Add n tokens that a sequence has drafted to the number of tokens of this pass."""
        self.n_tokens += n

    def add_draft(self, n: int, n_missed: int, seconds: float) -> None:
        """Record the seconds that a draft model took to read n_missed tokens of a sequence and draft n tokens for this pass."""
        self._draft_seconds += seconds
        self._draft_cost += self.curve.draft_cost(n, n_missed)

    def end_pass(
        self, n_tokens: int, n_generated: int, seconds: float, gap_seconds: float = 0.0, n_experts_read: float = 0.0
    ) -> None:
        """Record the measurements of a finished pass.

        Args:
            n_tokens: Tokens that the pass ran, drafts included.
            n_generated: Tokens that the pass added to the sequences.
            seconds: Time of the pass.
            gap_seconds: Time from the end of the last pass, with the drafts, if that came right before.
            n_experts_read: Experts that a layer read in the pass.
        """
        is_drafted = n_tokens > self.n_sequences
        if is_drafted:
            cost = self.curve.pass_seconds[n_tokens] + self.experts.compute_extra_seconds(n_experts_read) + self._draft_cost
            self.experts.update(n_tokens, n_experts_read)
        else:
            cost = self.plain_cost
        if (other := gap_seconds - self._draft_seconds) > 0:
            self.overhead = min(self.overhead or other, other)
        if is_drafted or not self.is_plain:
            relative_cost = (cost + self.overhead) / (self.plain_cost + self.overhead)
            self._tokens_gained = DECAY * self._tokens_gained + n_generated / self.n_sequences
            self._cost_spent = DECAY * self._cost_spent + relative_cost
        self._insurance.record(is_drafted, (seconds + self._draft_seconds) / cost, self.speed_up)


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
        self._probabilities, self._mean = acceptance.probabilities, acceptance.mean
        self._token_prices = dict[tuple[int, int], float]()
        # rounds that are not processed yet: buckets of verified tokens, number of accepted ones
        self._pending_rounds = list[tuple[list[int], int]]()
        self._update_interval, self._pending_seconds = 1, 0.0
        self._n_missed, self._wait = 0, FIRST_WAIT  # steps since the last draft, and how many to wait for a trial

    def start(self, token_budget: int) -> bool:
        """Begin a round in which up to `token_budget` tokens fit: set `max_tokens` and `can_branch`; return whether to draft."""
        costs = self.costs
        if len(self._pending_rounds) >= self._update_interval or self._pending_seconds > MAX_PENDING_S:
            self._learn()
        self._buckets = []
        self._survival, self._is_trial = 1.0, False
        self.max_tokens, self.can_branch = min(token_budget, costs.token_budget), costs.can_branch
        if costs.is_plain or self.max_tokens < 1:
            self.max_tokens = 0
            return False
        if self._is_free or self._is_profitable(0):
            return True
        self.max_tokens = 1
        catch_up = costs.curve.draft_cost(1, self._n_missed) - costs.curve.draft_cost(1)
        self._is_trial = self._is_trial_due(self._get_cost(1) - self._get_cost(0) + catch_up)
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
        return n < self.max_tokens and self._is_profitable(n)

    def choose(self, confidences: Sequence[float], parents: Sequence[int] | None = None) -> int:
        """Return how many of the tokens with the given confidences, the first ones, to propose: the number with the best profit.

        For a drafter that has found them at no cost. If none is profitable, this is 1 for a trial that is due, else 0.

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
        self._pending_seconds += pass_seconds
        if not n_drafted:
            self._n_missed += 1
            return
        if verified_nodes:
            accepted, rejected = ([self._buckets[node] for node in nodes] for nodes in verified_nodes)
            self._pending_rounds += [(accepted, n_accepted), (rejected, 0)]
        else:
            self._pending_rounds.append((self._buckets[: min(n_drafted, n_accepted + 1)], n_accepted))
        if self._is_trial:
            self._wait = 0 if n_accepted else min(max(2 * self._wait, FIRST_WAIT), MAX_WAIT)
        if not self._is_free:
            self.costs.add_draft(n_drafted, self._n_missed, draft_seconds)
        self._n_missed = 0

    def _learn(self) -> None:
        """Update the acceptance probabilities from the pending rounds."""
        for buckets, n_accepted in self._pending_rounds:
            self.acceptance.update(buckets, n_accepted)
        self._pending_rounds.clear()
        self._update_interval, self._pending_seconds = min(2 * self._update_interval, MAX_PENDING_ROUNDS), 0.0
        self._probabilities, self._mean = self.acceptance.probabilities, self.acceptance.mean
        self._token_prices.clear()

    def _is_trial_due(self, seconds: float) -> bool:
        """Return whether to try a draft that does not seem profitable and costs these extra seconds."""
        return self._n_missed >= self._wait * max(1.0, seconds / (TRIAL_SHARE * FIRST_WAIT * self.costs.plain_cost))

    def _get_cost(self, n: int) -> float:
        """Return the expected seconds of this pass if this sequence adds n draft tokens to it, with the time to draft them."""
        costs = self.costs
        return costs.pass_cost(costs.n_tokens + n) + (0.0 if self._is_free else costs.curve.draft_cost(n))

    def _is_profitable(self, n: int) -> bool:
        """Return whether drafting more than n tokens is profitable, if the n are accepted with the probability `_survival`."""
        key = self.costs.n_tokens, n
        if key not in self._token_prices:
            self._token_prices[key] = self._compute_token_price(n)
        return self._survival > self.costs.tokens_per_second * self._token_prices[key]

    def _compute_token_price(self, n: int) -> float:
        """Return the least seconds per accepted token of drafting more than n tokens, if the n are accepted."""
        base, least = self._get_cost(n), float("inf")
        gain, power, n_counted = 0.0, 1.0, 0
        for more in LOOKAHEAD_TOKENS:
            if self.costs.n_tokens + n + more > MAX_BATCH_TOKENS:
                break
            while n_counted < more:
                n_counted, power = n_counted + 1, power * self._mean
                gain += power
            least = min(least, (self._get_cost(n + more) - base) / gain)
        return least


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

    def update(self, *_: object, **__: object) -> None:
        """Do nothing: the draft length does not depend on earlier rounds."""
