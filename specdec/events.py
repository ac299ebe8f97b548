"""Events of a generation, in the order in which they happen, and statistics over them."""

from dataclasses import dataclass, field
from statistics import median

StopReason = str  # the name of an end-of-sequence token, "stop" (a stop string), "max_tokens", "seq_len" or "interrupted"
# For `Statistics.speed_up`: plain steps at which measured times count as much as calibrated costs, and how many neighbours on
# each side enter a running median.
HALF_WEIGHT_STEPS, MEDIAN_RADIUS = 4, 4
MIN_SECONDS = 1e-9


@dataclass(frozen=True)
class PrefillProgress:
    """An event that reports the progress of a prefill of the prompt, or of the whole sequence if it is prefilled again.

    Attributes:
        tokens: The tokens to prefill.
        fraction: The fraction of the work that is done.
        text: The text of the prompt.
    """

    tokens: list[int]
    fraction: float
    text: str = ""


@dataclass(frozen=True)
class Prompt:
    """An event that reports that the prompt has been prefilled, with its tokens and the time; only `PrefillProgress` precedes it.

    Attributes:
        tokens: The prompt's tokens, BOS first.
        seconds: Time of the prefill.
        text: The text of the prompt, "" for a chat.
        n_cached: How many of the tokens were found in a KV cache.
    """

    tokens: list[int]
    seconds: float
    text: str = ""
    n_cached: int = 0


@dataclass(frozen=True)
class Proposal:
    """An event with the draft tokens that the target is about to verify.

    Attributes:
        tokens: The draft tokens; for a tree, the path of first choices from its root.
        tree: For a tree, all its tokens and the index of each one's parent (-1: the sequence's last token); None for a chain.
        pieces: The text of each token, if it was requested.
    """

    tokens: list[int]
    tree: tuple[list[int], list[int]] | None = None
    pieces: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of a generated token and of the most likely tokens at its position, before temperature is applied.

    Attributes:
        token: The generated token.
        logprob: The natural logarithm of its probability.
        top: The most likely tokens at this position, each with its log probability.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Step:
    """An event with the result of one decoding step: the tokens that a pass of the target added.

    Attributes:
        tokens: The new tokens of the sequence, without an end-of-sequence token.
        draft_tokens: The proposed tokens, the accepted ones first; for a tree the accepted path, continued by first choices.
        n_accepted: How many of the draft tokens are accepted.
        seconds: Time of the whole step.
        draft_seconds: The part of `seconds` that the draft took.
        stop_reason: Why the sequence ended, if this is its last step; else None.
        n_nodes: Number of proposed tokens, with all branches of a tree.
        pieces: The text by token that is complete now; at the end also the rest. Concatenated over all steps it is the output.
        logprobs: The log probabilities of each of `tokens`; None if not requested.
        experts: For a mixture of experts, how many a layer read in this pass, and how many it reads for one token.
        wrong: The text of each rejected draft token, if it was requested.
        stop_string: The stop string that ended the sequence.
        draft_source: Where the first draft token was looked up: "this text", "earlier text" or "runner-up"; "" for other drafts.
        cost: The calibrated time of such a step, relative to one without a draft; 0 if it is not known.
        coverage: The share of the sequence's last tokens that were candidates of a draft that has candidates, else None.
    """

    tokens: list[int]
    draft_tokens: list[int]
    n_accepted: int
    seconds: float
    draft_seconds: float
    stop_reason: StopReason | None = None
    n_nodes: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    experts: tuple[float, int] = (0.0, 0)
    wrong: list[str] = field(default_factory=list)
    stop_string: str | None = None
    draft_source: str = ""
    cost: float = 0.0
    coverage: float | None = None

    @property
    def text(self) -> str:
        """The text that this step adds to the output, the concatenation of `pieces`, in whole characters."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class ThoughtStep(Step):
    """A step with a part of a thought; its `pieces` have only the text of the answer.

    Attributes:
        thought_pieces: The text by token that belongs to the thought.
        n_thought_tokens: Number of tokens of the thought so far, without its marks.
        thought_seconds: Time of the thought so far.
        is_thought_end: Whether the thought ends in this step.
    """

    thought_pieces: list[str] = field(default_factory=list)
    n_thought_tokens: int = 0
    thought_seconds: float = 0.0
    is_thought_end: bool = False


Event = Prompt | Proposal | Step


@dataclass
class Statistics:
    """Totals over the events of one sequence (tokens, passes, seconds), with the rates that follow from them as properties.

    Attributes:
        n_prompt: Tokens of the prompt, with BOS.
        n_cached: Tokens of the prompt that were found in a KV cache.
        n_generated: Generated tokens.
        n_drafted: Draft tokens; for trees those of one path.
        n_accepted: Accepted draft tokens.
        target_passes: Passes of the target, without those of the prefill.
        prefill_seconds: Time of the prefill, without loading and compiling.
        decode_seconds: Time of all steps, without loading and compiling.
        accepted_by_source: Accepted draft tokens by the `draft_source` of their steps; empty unless they were looked up.
        coverage: The `coverage` of the last step that had one.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_nodes: int = 0  # proposed tokens, with all branches of trees
    target_passes: int = 0
    accepted_histogram: list[int] = field(default_factory=list)  # passes by number of accepted tokens
    drafted_histogram: list[int] = field(default_factory=list)  # passes by number of draft tokens
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    experts_read: float = 0.0  # by a layer of a mixture of experts, in all passes
    experts_alone: int = 0  # that such a layer reads for one token; 0 without experts
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    coverage: float | None = None
    stop_reason: StopReason | None = "max_tokens"  # the default is for a sequence without steps
    # seconds of plain steps, which have no draft: of the pass, and of the rest
    _plain_steps: list[tuple[float, float]] = field(default_factory=list, repr=False)
    _drafted_steps: list[tuple[float, float]] = field(default_factory=list, repr=False)  # the others: cost, seconds

    def add(self, event: Event | PrefillProgress) -> None:
        """Update the totals with a `Prompt` or a `Step`; other events are ignored."""
        if isinstance(event, Prompt):
            self.n_prompt = len(event.tokens)
            self.n_cached = event.n_cached
            self.prefill_seconds += event.seconds
        if isinstance(event, Step):
            self._add_step(event)

    def _add_step(self, step: Step) -> None:
        self.n_generated += len(step.tokens)
        self.n_drafted += len(step.draft_tokens)
        self.n_accepted += step.n_accepted
        self.n_nodes += step.n_nodes
        self.target_passes += 1
        self.experts_read, self.experts_alone = self.experts_read + step.experts[0], step.experts[1]
        for histogram, n in ((self.accepted_histogram, step.n_accepted), (self.drafted_histogram, len(step.draft_tokens))):
            histogram += [0] * (n + 1 - len(histogram))
            histogram[n] += 1
        self.decode_seconds += step.seconds
        self.coverage = self.coverage if step.coverage is None else step.coverage
        if source := step.draft_source:
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + step.n_accepted
        if step.n_nodes:
            self._drafted_steps.append((step.cost, step.seconds))
        else:
            self._plain_steps.append((step.seconds - step.draft_seconds, step.draft_seconds))
        self.stop_reason = step.stop_reason

    @property
    def acceptance_rate(self) -> float:
        """The fraction of all draft tokens that was accepted, from 0 to 1; 0 if nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """The fraction of draft tokens that was accepted at the first, second, ... position of a proposal, over all passes."""
        drafted = [sum(self.drafted_histogram[i:]) for i in range(1, len(self.drafted_histogram))]
        return [sum(self.accepted_histogram[i:]) / n for i, n in enumerate(drafted, 1)]

    @property
    def experts_per_token(self) -> float:
        """The number of experts that a mixture-of-experts layer read per generated token; 0 for a model without experts."""
        return self.experts_read / self.n_generated if self.n_generated else 0.0

    @property
    def speed_up(self) -> float | None:
        """The decoding speed relative to the target alone, estimated from the costs of steps; None if nothing was drafted.

        Measured plain steps, those without a draft, correct the calibrated costs: the more of them, the more. It is also None if
        costs are not calibrated.
        """
        drafted_cost = sum(cost for cost, _ in self._drafted_steps)
        if not drafted_cost:
            return None
        plain_cost = float(len(self._plain_steps))
        if self._plain_steps:
            plain_seconds = max(median(seconds for seconds, _ in self._plain_steps), MIN_SECONDS)
            correction = self._typical_drafted_seconds / (drafted_cost * plain_seconds)
            drafted_cost *= correction ** (plain_cost / (plain_cost + HALF_WEIGHT_STEPS))
            plain_cost *= 1.0 + median(seconds for _, seconds in self._plain_steps) / plain_seconds
        return min(self.n_generated / (drafted_cost + plain_cost), self.tokens_per_pass)

    @property
    def _typical_drafted_seconds(self) -> float:
        """The time of all steps with a draft; running medians filter out stalls."""
        seconds = [elapsed for _, elapsed in sorted(self._drafted_steps, key=lambda step: step[0])]  # by cost
        return sum(median(seconds[max(i - MEDIAN_RADIUS, 0) : i + MEDIAN_RADIUS + 1]) for i in range(len(seconds)))

    @property
    def tokens_per_pass(self) -> float:
        """The number of generated tokens per target pass, without the prefill; 0 if there was no pass."""
        return self.n_generated / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The number of generated tokens per second of decoding, without the first prefill; 0 if nothing was decoded."""
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0
