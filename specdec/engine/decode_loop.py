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
    """

    tokens: list[int]
    seconds: float
    text: str = ""


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
        """The text that this step adds to the output, the concatenation of `pieces`, in whole characters."""
        return "".join(self.pieces)


Event = Prompt | Proposal | Step


@dataclass
class Statistics:
    """Totals over the events of one sequence (tokens, passes, seconds), with the rates that follow from them as properties.

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
        """Update the totals with a `Prompt` or a `Step`; other events are ignored."""
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
    def seconds_per_token(self) -> float:
        """The decoding time per generated token in seconds, without the first prefill; 0 if no token was generated."""
        return self.decode_seconds / self.n_generated if self.n_generated else 0.0

    @property
    def speed_up(self) -> float | None:
        """The decoding speed relative to the target alone, estimated from the steps without a draft; None if unknown.

        It is None if these plain steps are too few, if nothing was drafted, or if other programs took too much of the time.
        Medians filter out stalls. A plain step after drafted ones finds part of the weights evicted from the caches and takes
        about a tenth longer than in a run of plain steps, so the time at the lower third is used.
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
        """The number of generated tokens per target pass, without the prefill; 0 if there was no pass."""
        return self.n_generated / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The number of generated tokens per second of decoding, without the first prefill; 0 if nothing was decoded."""
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0


class LengthPolicy(Protocol):
    """The interface of draft length policies, which decide how many tokens a drafter proposes in each round of one sequence.

    Attributes:
        max_tokens: The maximum number of draft tokens of the current round.
    """

    max_tokens: int

    def start(self, token_budget: int) -> bool:
        """Begin a round in which up to `token_budget` tokens fit; return whether to draft."""

    def should_continue(self, confidence: float) -> bool:
        """Record the confidence of the token that was just drafted, and return whether to draft another token in this round.

        Args:
            confidence: A number >= 0 that rises with the acceptance probability of the token.
        """

    def choose(self, confidences: list[float]) -> int:
        """Return how many of the tokens that a drafter found at no cost to propose, 0 for none.

        Args:
            confidences: The confidence of each token that could be proposed, in order; see `should_continue`.
        """

    def update(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        """Learn from a finished round, to choose the draft length of later rounds.

        Args:
            n_drafted: Number of draft tokens that were proposed.
            n_accepted: Number of these draft tokens that were accepted.
            pass_seconds: Time of the target pass and its verification.
            draft_seconds: Time that drafting took.
        """


class Drafter(Protocol):
    """The interface of drafters, which propose draft tokens for one sequence."""

    def prepare(self, tokens: list[int]) -> None:
        """Prefill the drafter with the tokens of a sequence; called after each prefill of the target."""

    def propose(self, tokens: list[int], policy: LengthPolicy) -> Draft:
        """Return draft tokens that may follow the sequence, possibly none.

        Args:
            tokens: The tokens of the sequence so far.
            policy: Decides the number of draft tokens; its round has begun.
        """


class Constraint(Protocol):
    """The interface of constraints, such as a JSON schema, which restrict the tokens that a sequence may generate."""

    def begin(self, prompt: list[int]) -> "ConstraintState":
        """Return the state of this constraint at the start of the output of a new sequence with the given prompt."""


class ConstraintState(Protocol):
    """The progress of one sequence through its constraint, which decides the tokens that are allowed next.

    All methods raise ValueError if the constraint allows no next token.
    """

    @property
    def error(self) -> Exception | None:
        """The stored error if `mask_logits` left no token in a row of logits, which the sequence may never reach; else None."""

    @property
    def is_complete(self) -> bool:
        """Whether the output satisfies the constraint and only an end-of-sequence token may follow."""

    def get_forced_tokens(self, max_n: int) -> list[int]:
        """Return the next tokens, at most max_n, for which the constraint leaves no choice, without end-of-sequence tokens."""

    def count_allowed(self, tokens: list[int]) -> int:
        """Return how many of the given tokens, from the first on, the constraint allows after the current output."""

    def find_end(self, tokens: list[int]) -> int | None:
        """Return the number of given next tokens, without EOS, after which the constraint is complete, or None if it is not."""

    def mask_logits(self, logits: Float32, draft: Draft) -> None:
        """Set the logits of tokens that the constraint forbids to -inf, in place, for each position of a draft.

        Rows that are not finite stay, so that `Sequence.verify` reports them. Rows after a forbidden draft token stay too, since
        they are not read.

        Args:
            logits: The rows for `Verifier.verify`, (n + 1, V) for n draft tokens, or (n, V).
            draft: The draft.
        """

    def commit(self, tokens: list[int]) -> None:
        """Advance the state by tokens that were added to the sequence."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion: the prompt, the limits of the output, the sampling parameters and what to report.

    Attributes:
        prompt: Token ids, BOS first.
        max_tokens: The maximum number of tokens after the prompt.
        sampling: The sampling parameters.
        stop_strings: Strings before which the output ends.
        top_logprobs: None for no log probabilities, else the number of most likely tokens that are reported in addition to the
            sampled one, before temperature.
        prediction: Tokens that are expected in the output; they are proposed for as long as they are accepted.
        constraint: The constraint of the output; None for none.
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
    """The keyword arguments of generation methods: `stop` strings, `shape` (a constraint), and sampling parameters."""

    stop: Stop
    shape: Constraint | None


def with_kwargs_signature(method: Method) -> Method:
    """Make `help` list the keys of `GenerationKwargs` for a method with `**kwargs`: set its signature and return the method."""
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
    """The interface of a language model, which computes logits at the last tokens of a sequence."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The lock to hold during a forward pass and while its logits are read."""

    @property
    def n_positions(self) -> int:
        """The maximum number of tokens that a sequence in the KV cache may have."""

    @property
    def longrope_threshold(self) -> int:
        """The maximum sequence length for which a model uses its short RoPE factors; 0 if it has only one set of factors."""

    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32:
        """Run a sequence's tokens that the KV cache does not hold; return logits (n_logits, V) at the sequence's last tokens.

        The logits are valid while the lock is held.
        """


class Target(Model, Protocol):
    """The interface of a target model in the decoding loop."""

    @property
    def n_passes(self) -> int:
        """The number of forward passes that the model has run so far."""

    @property
    def experts_read(self) -> tuple[float, int]:
        """The mean number of experts that a layer read in the last pass, and the number that it reads for one token."""

    def forward_tree(self, tokens: list[int], nodes: list[int], parents: list[int]) -> Float32:
        """Run a tree of n draft tokens after a sequence in one pass; return logits (n + 1, V) at the last token and each node.

        Args:
            tokens: All tokens of the sequence.
            nodes: The tokens of the tree's n nodes.
            parents: The index of each node's parent; -1 for the sequence's last token, at which the result's first row is.
        """


@dataclass
class Sequence:
    """A sequence being generated, in steps: `propose` before each pass of the target, `verify` and `commit` after the pass.

    The caller runs the pass in between: `decode` for one sequence, the scheduler for several that take turns or share one.

    Attributes:
        tokens: The tokens of the prompt, then the generated ones.
        max_tokens: The maximum number of generated tokens.
        n_positions: The target's number of positions.
        drafter: Proposes draft tokens; None for steps without a draft.
        verifier: Accepts or rejects the draft tokens.
        policy: Decides the length of proposals.
        eos_tokens: The names of the tokens that end the sequence, by token.
        constraint: The constraint of the output, by default none.
        longrope_threshold: Up to this number of tokens the target uses its short RoPE factors; 0 if it has one set only.
        compute_logprobs: Returns the log probabilities of new tokens from logits that are not masked yet; None if not requested.
        draft: The last proposal.
        stop_reason: Why the sequence ended; None while it is being generated.
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
        """The `Proposal` event that reports the current draft before the target verifies it."""
        draft = self.draft
        return Proposal(draft.path([]), None if draft.parents is None else (draft.tokens, draft.parents))

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, by a stop reason or at its maximum length."""
        return self.stop_reason is not None or len(self.tokens) >= self._limit

    def propose(self) -> Draft:
        """Choose, store and return the draft, possibly empty, that the next target pass runs after the sequence's last token.

        Tokens that the constraint forces are the draft; otherwise the drafter is called if the policy wants a draft.
        """
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
        """Return a draft that ends at the first token that the constraint refuses; trees are returned unchanged.

        With coupled verification the refused token is left out, since the output is the same with any proposal. Otherwise it is
        kept, since where a proposal ends may not depend on a token that was drawn and left out.
        """
        if not self._constraint_state or not draft.tokens or draft.parents is not None:
            return draft
        n = self._constraint_state.count_allowed(draft.tokens) + (not isinstance(self.verifier, CoupledVerifier))
        return Draft(draft.tokens[:n], draft.q[:n] if draft.q else None)

    def verify(self, logits: Float32) -> tuple[list[int], int]:
        """Return the sequence's next tokens, by verifying the current draft, and how many of them are accepted draft tokens.

        The last token returned is the target's own after the accepted ones, or ends the sequence. Only the logits and the stored
        log probabilities change, so the method may be called again if another pass has overwritten the logits.

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
        """Return how many of the given next tokens belong to the sequence if it ends among them, EOS included, else None."""
        eos = next((i for i, token in enumerate(tokens) if token in self.eos_tokens), None)
        end = self._constraint_state.find_end(tokens[:eos]) if self._constraint_state else None
        return end if end is not None or eos is None else eos + 1

    def commit(self, new: list[int], n_accepted: int, seconds: float) -> Step:
        """Append verified tokens to the sequence, update its stop reason, constraint and policy, and return the `Step` event.

        Args:
            new: The tokens that `verify` returned; an end-of-sequence token is removed from the list.
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
    """Run a target pass over a sequence's last token and draft, and return the result of `Sequence.verify`.

    The result is the next tokens and how many of them are accepted draft tokens. The target's lock is held meanwhile.

    Raises:
        ValueError: If no token can be drawn from the logits.
    """
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
    """The interface of prefillers, which fill KV caches with all tokens of a sequence except the last."""

    @property
    def recompute_lengths(self) -> Collection[int]:
        """The lengths, in tokens, beyond which a growing sequence must be prefilled again from its start."""

    def prefill(self, tokens: list[int]) -> Iterator[float]:
        """Run all tokens of a sequence except the last; yield the fraction of the work that is done, from 0 to 1."""


@dataclass(frozen=True)
class SinglePassPrefiller:
    """A prefiller that runs all tokens except the last in one pass of the target alone and reports no progress."""

    target: Target

    @property
    def recompute_lengths(self) -> Collection[int]:
        """The lengths beyond which a sequence is prefilled again: the target's LongRoPE threshold, if it has one."""
        return {self.target.longrope_threshold} - {0}

    def prefill(self, tokens: list[int]) -> Iterator[float]:
        """Run all tokens of a sequence except the last on the target; yield nothing."""
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
    """Yield the events of a new sequence that continues a prompt by up to max_tokens tokens.

    See `Sequence` for the arguments and `stream_events` for the events.
    """
    sequence = Sequence(
        [*prompt], max_tokens, target.n_positions, drafter, verifier, policy, eos_tokens, constraint, target.longrope_threshold
    )
    return stream_events(target, sequence, SinglePassPrefiller(target))


def stream_events(target: Target, sequence: Sequence, prefiller: Prefiller) -> Iterator[Event | PrefillProgress]:
    """Prefill and decode a sequence to its end; yield a `Prompt`, then `Step`s, each after its `Proposal` if it has one.

    A `PrefillProgress` reports each fraction that the prefiller yields. A step runs the tokens that the target's KV cache does
    not hold: the last one and the proposal.

    Args:
        target: The target.
        sequence: The sequence, which grows while the events are read.
        prefiller: Fills the KV caches, at the start and again beyond its `recompute_lengths`.

    Raises:
        ValueError: If the target's logits are not finite.
    """

    def prefill() -> Generator[PrefillProgress, None, float]:
        """Prefill the sequence without its last token, and prepare the drafter; yield progress, return the seconds it took."""
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
