"""The decoding loop of one sequence, its events and its statistics, without any files, formats or terminal output.

One step: the drafter proposes n tokens, one forward pass of the target runs the last token and the proposal, and the target's own
token at each position decides how many draft tokens are accepted. The token after the last accepted one is the target's as well.
A proposal may be a tree: the target's tokens follow a path from its root for as long as one of the children is the next token.

Shapes: n draft tokens, V vocabulary.
"""

import inspect
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol, TypeVar

from specdec.runtime.simd import Float32
from specdec.sampling import Sampling, SamplingOverrides
from specdec.verification import CoupledVerifier, Draft, Verifier

Stop = str | GenericSequence[str]
Method = TypeVar("Method", bound=Callable[..., Any])
StopReason = str  # the name of an end-of-sequence token, "stop" (a stop string), "max_tokens", "seq_len" or "interrupted"
CONSTRAINT_STOP_REASON: StopReason = "eos"  # for a complete constraint if the model has no end-of-sequence tokens
# For `Statistics.speed_up`: the minimum number of plain steps; how many neighbours on each side enter a running median; the
# maximum ratio of the total time to the sum of such medians
MIN_PLAIN_STEPS, MEDIAN_RADIUS, MAX_STALL_RATIO = 8, 4, 1.3
MAX_FORCED_TOKENS = 31  # in a proposal that a constraint forces: half a pass


@dataclass(frozen=True)
class PrefillProgress:
    """Progress of a prefill: of the prompt, or of the whole sequence if it is computed again.

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
    """The event at the start of a sequence: its prompt has been prefilled.

    Attributes:
        tokens: The prompt's tokens, BOS first.
        seconds: Time of the prefill.
        text: The text of the prompt, "" for a chat.
    """

    tokens: list[int]
    seconds: float
    text: str = ""


@dataclass(frozen=True)
class Proposal:
    """Draft tokens that the target is about to verify.

    Attributes:
        tokens: The draft tokens; for a tree its first choices.
        tree: All tokens of a tree, and the index of each one's parent, or -1; None for a chain.
        pieces: The text of each token, if it was requested.
    """

    tokens: list[int]
    tree: tuple[list[int], list[int]] | None = None
    pieces: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of a token, before temperature; `top` has the most likely tokens with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Step:
    """The result of a target pass over the last token and the proposal, once it is verified.

    Attributes:
        tokens: The new tokens of the sequence, without an end-of-sequence token.
        draft_tokens: The proposed tokens, the accepted ones first; for a tree the accepted path, continued by first choices.
        n_accepted: How many of them are accepted.
        seconds: Time of the whole step.
        draft_seconds: The part of it that the draft took.
        stop_reason: Why the sequence ended, in its last step.
        n_nodes: Number of proposed tokens, with all branches of a tree.
        pieces: The text by token that is complete now; at the end also the rest. Concatenated over all steps it is the output.
        logprobs: For each token, if they were requested.
        experts: For a mixture of experts, how many a layer read in this pass, and how many it reads for one token.
        wrong: The text of each rejected draft token, if it was requested.
        stop_string: The stop string that ended the sequence.
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

    @property
    def text(self) -> str:
        """The text of the step, in whole characters."""
        return "".join(self.pieces)


Event = Prompt | Proposal | Step


@dataclass
class Statistics:
    """Totals over the events of one sequence.

    Attributes:
        n_prompt: Tokens of the prompt, with BOS.
        n_generated: Generated tokens.
        n_drafted: Draft tokens; for trees those of one path.
        n_accepted: Accepted draft tokens.
        target_passes: Passes of the target, without those of the prefill.
        prefill_seconds: Time of the prefill, without loading and compiling.
        decode_seconds: Time of all steps, without loading and compiling.
    """

    n_prompt: int = 0
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_nodes: int = 0  # proposed tokens, with all branches of trees
    target_passes: int = 0
    accepted_histogram: list[int] = field(default_factory=list)  # passes by number of accepted tokens
    drafted_histogram: list[int] = field(default_factory=list)  # passes by number of draft tokens
    experts_read: float = 0.0  # by a layer of a mixture of experts, in all passes
    experts_alone: int = 0  # that such a layer reads for one token; 0 without experts
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_reason: StopReason | None = "max_tokens"  # the default is for a sequence without steps
    # seconds of plain steps, which have no draft: of the pass, and of the rest
    _plain_steps: list[tuple[float, float]] = field(default_factory=list, repr=False)
    _drafted_steps: list[tuple[int, float]] = field(default_factory=list, repr=False)  # the others: tokens proposed, seconds

    def add(self, event: Event | PrefillProgress) -> None:
        """Add an event to the totals."""
        if isinstance(event, Prompt):
            self.n_prompt = len(event.tokens)
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
        if step.n_nodes:
            self._drafted_steps.append((step.n_nodes, step.seconds))
        else:
            self._plain_steps.append((step.seconds - step.draft_seconds, step.draft_seconds))
        self.stop_reason = step.stop_reason

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, 0 if nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / drafted tokens at each position of a proposal, over all passes."""
        drafted = [sum(self.drafted_histogram[i:]) for i in range(1, len(self.drafted_histogram))]
        return [sum(self.accepted_histogram[i:]) / n for i, n in enumerate(drafted, 1)]

    @property
    def experts_per_token(self) -> float:
        """Experts that a layer read per generated token; 0 for a model without experts."""
        return self.experts_read / self.n_generated if self.n_generated else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Decoding time per generated token, 0 if there is none."""
        return self.decode_seconds / self.n_generated if self.n_generated else 0.0

    @property
    def speed_up(self) -> float | None:
        """Speed relative to the target alone, measured by the plain steps of this sequence; None if they are too few.

        Medians filter out stalls. If other programs took too much of the time, the result is None too. A plain step after drafted
        ones finds part of the weights evicted from the caches and takes about a tenth longer than in a run of plain steps, so the
        time at the lower third is used.
        """
        passes = sorted(seconds for seconds, _ in self._plain_steps)
        # by number of tokens, so that neighbours take about as long
        drafted = [seconds for _, seconds in sorted(self._drafted_steps, key=lambda step: step[0])]
        n = len(passes)
        if n < MIN_PLAIN_STEPS or not drafted:
            return None
        typical = [median(drafted[max(i - MEDIAN_RADIUS, 0) : i + MEDIAN_RADIUS + 1]) for i in range(len(drafted))]
        if sum(passes) > MAX_STALL_RATIO * n * median(passes) or sum(drafted) > MAX_STALL_RATIO * sum(typical):
            return None
        plain = passes[n // 3]
        total = sum(typical) + n * (plain + median(other for _, other in self._plain_steps))
        return min(self.n_generated * plain / total, self.tokens_per_pass)

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens per pass of the target, 0 if there is none."""
        return self.n_generated / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, 0 if there is none."""
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0


class LengthPolicy(Protocol):
    """Decides how many tokens to draft in each round.

    Attributes:
        max_tokens: The maximum number of draft tokens of the current round.
    """

    max_tokens: int

    def start(self, token_budget: int) -> bool:
        """Begin a round in which up to `token_budget` tokens fit; return whether to draft."""

    def should_continue(self, confidence: float) -> bool:
        """Take in a drafted token; return whether to draft another.

        Args:
            confidence: A number >= 0 that rises with the acceptance probability.
        """

    def choose(self, confidences: list[float]) -> int:
        """Return how many tokens with these confidences to propose, for a drafter that has them at no cost."""

    def update(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        """Learn from a finished round and the time of its pass and its draft."""


class Drafter(Protocol):
    """Proposes draft tokens for one sequence."""

    def prepare(self, tokens: list[int]) -> None:
        """Take in a prompt."""

    def propose(self, tokens: list[int], policy: LengthPolicy) -> Draft:
        """Return tokens that may follow, up to the number that the policy requests for its current round, maybe none."""


class Constraint(Protocol):
    """Restricts the output of a sequence: its tokens are drawn from logits that a `ConstraintState` masks."""

    def begin(self, prompt: list[int]) -> "ConstraintState":
        """Return the state of a sequence that starts with this prompt."""


class ConstraintState(Protocol):
    """The state of one sequence in its constraint. Methods raise ValueError if the constraint allows no next token."""

    @property
    def error(self) -> Exception | None:
        """Why `mask_logits` left no token in a row that the sequence may never reach, if that happened."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-sequence token may follow."""

    def get_forced_tokens(self, max_n: int) -> list[int]:
        """Return up to max_n next tokens that are the only allowed ones, without end-of-sequence tokens."""

    def count_allowed(self, tokens: list[int]) -> int:
        """Return how many of the tokens may follow, one after the other."""

    def find_end(self, tokens: list[int]) -> int | None:
        """Return how many of the tokens complete the constraint, or None; none is an end-of-sequence token."""

    def mask_logits(self, logits: Float32, draft: Draft) -> None:
        """Set the logits of tokens that may not follow to -inf, in each row (V,) for `Verifier.verify`.

        Rows that are not finite stay, to be reported. Rows after a token that may not follow stay too, since they are not read.
        """

    def commit(self, tokens: list[int]) -> None:
        """Advance the state by new tokens of the sequence."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion.

    Attributes:
        prompt: Token ids, BOS first.
        max_tokens: The maximum number of tokens after the prompt.
        sampling: The sampling parameters.
        stop_strings: Strings before which the output ends.
        top_logprobs: None for no log probabilities, else for how many of the most likely tokens in addition to the sampled one,
            before temperature.
        prediction: Tokens that are expected, and proposed for as long as they are accepted.
        constraint: The constraint of the output.
        visible_tokens: Special tokens that appear in the output, with their names there.
        include_draft_text: Whether events contain the text of draft tokens.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_strings: GenericSequence[str] = ()
    top_logprobs: int | None = None
    prediction: GenericSequence[int] = ()
    constraint: Constraint | None = None
    visible_tokens: Mapping[int, str] = field(default_factory=dict)
    include_draft_text: bool = False


class GenerationKwargs(SamplingOverrides, total=False):
    """Keyword arguments of generation methods; all except these two replace fields of the sampling parameters."""

    stop: Stop
    shape: Constraint | None


def with_kwargs_signature(method: Method) -> Method:
    """Give a method with `**kwargs` a signature that lists the keys of `GenerationKwargs`, so that `help` shows them."""
    signature = inspect.signature(method)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    annotations = {name: GenerationKwargs.__annotations__[name] for name in ("stop", "shape", *SamplingOverrides.__annotations__)}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=() if name == "stop" else None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    vars(method)["__signature__"] = signature.replace(parameters=[*named, *added])
    return method


class Model(Protocol):
    """The interface of a model: logits at the last tokens of a sequence, valid while its lock is held."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The model's lock."""

    @property
    def n_positions(self) -> int:
        """The maximum number of positions."""

    @property
    def longrope_threshold(self) -> int:
        """The maximum length for the short RoPE factors; 0 if there is one set only."""

    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32:
        """Return logits (n_logits, V) at the last tokens."""


class Target(Model, Protocol):
    """The interface of a target model in the decoding loop."""

    @property
    def n_passes(self) -> int:
        """The number of passes so far."""

    @property
    def experts_read(self) -> tuple[float, int]:
        """Experts that a layer read in the last pass, and reads for one token; see `Step.experts`."""

    def forward_tree(self, tokens: list[int], nodes: list[int], parents: list[int]) -> Float32:
        """Return logits (n + 1, V) at the last token and at each of n nodes."""


@dataclass
class Sequence:
    """A sequence being generated, in steps of two halves: `propose` before a pass of the target, `verify` and `commit` after it.

    The caller runs the pass in between: `decode` for one sequence, the scheduler for several that take turns or share one.

    Attributes:
        tokens: The tokens of the prompt, then the generated ones.
        max_tokens: The maximum number of generated tokens.
        n_positions: The target's number of positions.
        drafter: Proposes draft tokens; None for plain steps.
        verifier: Accepts or rejects them.
        policy: Decides the length of proposals.
        eos_tokens: Tokens that end the sequence, with their names.
        constraint: The constraint of the output, by default none.
        longrope_threshold: Up to this number of tokens the target uses its short RoPE factors; 0 if it has one set only.
        compute_logprobs: Returns the log probabilities of new tokens from logits that are not masked yet; None if not requested.
        draft: The last proposal.
        stop_reason: Why the sequence ended, None before.
    """

    tokens: list[int]
    max_tokens: int
    n_positions: int
    drafter: Drafter | None
    verifier: Verifier
    policy: LengthPolicy
    eos_tokens: Mapping[int, str]
    constraint: Constraint | None = None
    longrope_threshold: int = 0
    compute_logprobs: Callable[[Float32, Draft, list[int]], list[TokenLogprob]] | None = None

    def __post_init__(self) -> None:
        # The last token is never run, so a sequence may have one token more than the target has positions.
        self._limit = min(len(self.tokens) + self.max_tokens, self.n_positions + 1)
        self.stop_reason: StopReason | None = None
        self.draft, self._draft_seconds = Draft([]), 0.0
        self._constraint_state = self.constraint.begin(self.tokens) if self.constraint else None
        self._is_forced = False  # whether the constraint made the last proposal, not the drafter
        self._logprobs: list[TokenLogprob] | None = None

    @property
    def proposal(self) -> Proposal:
        """The event that reports the draft before it is verified."""
        draft = self.draft
        return Proposal(draft.path([]), None if draft.parents is None else (draft.tokens, draft.parents))

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.stop_reason is not None or len(self.tokens) >= self._limit

    def propose(self) -> Draft:
        """Return the draft, maybe empty, for the next pass to run after the last token (`run_and_verify`)."""
        begin, n, max_length = time.perf_counter(), len(self.tokens), self._limit - 1
        if n <= self.longrope_threshold:  # a proposal beyond the threshold would need a second pass over the whole sequence
            max_length = min(max_length, self.longrope_threshold)
        token_budget = max_length - n
        forced = self._constraint_state.get_forced_tokens(min(token_budget, MAX_FORCED_TOKENS)) if self._constraint_state else []
        self._is_forced = bool(forced)
        if forced:
            self.draft = Draft(forced)
        else:
            is_drafted = self.drafter and self.policy.start(token_budget)
            draft = self.drafter.propose(self.tokens, self.policy) if self.drafter and is_drafted else Draft([])
            self.draft = self._trim_to_constraint(draft) if self._constraint_state else draft
        self._draft_seconds = time.perf_counter() - begin
        return self.draft

    def _trim_to_constraint(self, draft: Draft) -> Draft:
        """Cut a chain at the first token that the constraint refuses.

        With coupled verification the refused token is left out, since the output is the same with any proposal. Otherwise it is
        kept, since where a proposal ends may not depend on a token that was drawn and left out.
        """
        if not self._constraint_state or not draft.tokens or draft.parents is not None:
            return draft
        n = self._constraint_state.count_allowed(draft.tokens) + (not isinstance(self.verifier, CoupledVerifier))
        return Draft(draft.tokens[:n], draft.q[:n] if draft.q else None)

    def verify(self, logits: Float32) -> tuple[list[int], int]:
        """Return the next tokens and how many of them are accepted; the last is the first outside the draft or ends the sequence.

        The method changes only the logits. It may be called again if another pass has overwritten them.

        Args:
            logits: (n + 1, V) for n draft tokens; a constraint masks them in place.

        Raises:
            ValueError: If no token can be drawn from the logits.
        """
        draft = self.draft
        unmasked = logits.copy() if self.compute_logprobs and self._constraint_state else logits
        # Draft tokens after the end do not belong to the sequence, nor does the target's token there.
        if draft.parents is None and (end := self._find_end(draft.tokens)) is not None:
            draft, logits = replace(draft, tokens=draft.tokens[:end]), logits[:end]
        if self._constraint_state:
            self._constraint_state.mask_logits(logits, draft)
        tokens, n_accepted = self.verifier.verify(logits, draft, len(self.tokens))
        if draft.parents is not None and (end := self._find_end(tokens[:n_accepted])) is not None:
            tokens, n_accepted = tokens[:end], end
        if tokens[-1] < 0:
            raise (self._constraint_state and self._constraint_state.error) or ValueError(
                "the target's logits are not finite: its weights are damaged or too large to compute with, or its keys and "
                "values too large for f16 (kv='f32' holds them)"
            )
        if self.compute_logprobs:
            self._logprobs = self.compute_logprobs(unmasked, self.draft, tokens)
        return tokens, n_accepted

    def _find_end(self, tokens: list[int]) -> int | None:
        """Return how many of the tokens belong to the sequence if it ends among them, else None."""
        eos = next((i for i, token in enumerate(tokens) if token in self.eos_tokens), None)
        end = self._constraint_state.find_end(tokens[:eos]) if self._constraint_state else None
        return end if end is not None or eos is None else eos + 1

    def commit(self, new: list[int], n_accepted: int, seconds: float) -> Step:
        """Append verified tokens and return the step.

        Args:
            new: The tokens that `verify` returned.
            n_accepted: How many of them are accepted draft tokens.
            seconds: Time of the pass and of `verify`.
        """
        draft, path = self.draft, self.draft.path(new)
        if new[-1] in self.eos_tokens:
            self.stop_reason = self.eos_tokens[new.pop()]
        self.tokens += new
        if self._constraint_state:
            self._constraint_state.commit(new)
            if self._constraint_state.is_complete:  # the first name, since which token was drawn depends on the proposal
                self.stop_reason = next(iter(self.eos_tokens.values()), CONSTRAINT_STOP_REASON)
        if self.stop_reason is None and len(self.tokens) == self._limit:
            self.stop_reason = "seq_len" if self._limit > self.n_positions else "max_tokens"
        n_nodes, draft_seconds = len(draft.tokens), self._draft_seconds
        if not self._is_forced:
            self.policy.update(n_nodes, n_accepted, seconds, draft_seconds)
        step = Step(new, path, n_accepted, seconds + draft_seconds, draft_seconds, self.stop_reason, n_nodes)
        return replace(step, logprobs=self._logprobs[: len(new)]) if self._logprobs is not None else step


def run_and_verify(target: Target, sequence: Sequence) -> tuple[list[int], int]:
    """Run a pass over the sequence's last token and draft, with logits at each, and return the result of `Sequence.verify`."""
    draft = sequence.draft
    with target.lock:
        while True:
            passes = target.n_passes
            if draft.parents is None:
                logits = target.forward(sequence.tokens + draft.tokens, n_logits=len(draft.tokens) + 1)
            else:
                logits = target.forward_tree(sequence.tokens, draft.tokens, draft.parents)
            result = sequence.verify(logits)
            if target.n_passes <= passes + 1:  # else a pass in a signal handler has overwritten these logits
                return result


class Prefiller(Protocol):
    """Runs all tokens of a sequence except the last."""

    @property
    def recompute_lengths(self) -> Collection[int]:
        """Lengths beyond which a sequence is prefilled again."""

    def prefill(self, tokens: list[int]) -> Iterator[float]:
        """Run the tokens; yield the fraction of the work that is done."""


@dataclass(frozen=True)
class SinglePassPrefiller:
    """A prefiller that runs the target alone and reports no progress."""

    target: Target

    @property
    def recompute_lengths(self) -> Collection[int]:
        """The target's LongRoPE threshold, if it has one."""
        return {self.target.longrope_threshold} - {0}

    def prefill(self, tokens: list[int]) -> Iterator[float]:
        """Run the tokens; yield nothing."""
        self.target.forward(tokens[:-1], n_logits=0)
        yield from ()


def decode(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier,
    prompt: list[int],
    max_tokens: int,
    policy: LengthPolicy,
    eos_tokens: Mapping[int, str],
    constraint: Constraint | None = None,
) -> Iterator[Event | PrefillProgress]:
    """Yield the events of a new sequence that continues the prompt by up to max_tokens tokens; see `Sequence`."""
    sequence = Sequence(
        [*prompt], max_tokens, target.n_positions, drafter, verifier, policy, eos_tokens, constraint, target.longrope_threshold
    )
    return stream_events(target, sequence, SinglePassPrefiller(target))


def stream_events(target: Target, sequence: Sequence, prefiller: Prefiller) -> Iterator[Event | PrefillProgress]:
    """Yield the events of a sequence: the prompt, then steps, each after its proposal if it has one.

    A `PrefillProgress` reports each fraction of `prefill`. A step runs the tokens that the target's KV cache does not hold: the
    last one and the proposal.

    Raises:
        ValueError: If the target's logits are not finite.
    """

    def prefill() -> Generator[PrefillProgress, None, float]:
        """Prefill all uncached tokens but the last, and prepare the drafter; yield the progress, return the time in seconds."""
        begin, tokens = time.perf_counter(), [*sequence.tokens]
        for fraction in prefiller.prefill(tokens):
            yield PrefillProgress(tokens, fraction)
        if sequence.drafter:
            sequence.drafter.prepare(tokens)
        return time.perf_counter() - begin

    n, prompt = len(sequence.tokens), [*sequence.tokens]
    yield Prompt(prompt, (yield from prefill()))
    while not sequence.is_finished:
        seconds = 0.0
        # after a recompute length the whole sequence is prefilled again; that time is no measure of a step
        if any(n <= length < len(sequence.tokens) for length in prefiller.recompute_lengths):
            seconds = yield from prefill()
        n = len(sequence.tokens)
        if sequence.propose().tokens:
            yield sequence.proposal
        begin = time.perf_counter()
        new, n_accepted = run_and_verify(target, sequence)
        step = sequence.commit(new, n_accepted, time.perf_counter() - begin)
        experts = target.experts_read
        yield replace(step, seconds=step.seconds + seconds, experts=experts) if seconds or experts[1] else step
