"""Speculative decoding of one sequence: propose, verify, commit.

A drafter proposes n tokens. One pass of the target over the sequence's last token and the proposal gives the target's logits at
all n + 1 positions, for little more than the time of one token. The target then accepts the first draft tokens, as many as agree
with it, and adds one token of its own (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318):

    draft = state.propose()
    logits = cache.forward(state.tokens + draft.tokens, n_logits=len(draft.tokens) + 1)
    step = state.commit(state.verify(logits), seconds)

A proposal may be a token tree (SpecInfer, arXiv:2305.09781); the pass is then `KVCache.forward_tree`, and the accepted tokens
follow one path from its root. How tokens are accepted is up to the `Verifier`: coupled (Daliri et al. 2024, arXiv:2408.07978),
rejection sampling (Leviathan et al.), or block verification (Sun et al. 2024, arXiv:2403.10444). With any of them the output has
the distribution of the target alone; with the coupled verifier it is the target's own output, bit for bit.

The scheduler (engine/scheduler.py) calls the same methods for every sequence of a batch, with one pass for all of them.

Shapes: n draft tokens, V vocabulary.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from specdec.events import Proposal, Step, StopReason, TokenLogprob
from specdec.protocols import Constraint, Drafter, LengthPolicy
from specdec.runtime.simd import Float32
from specdec.verification import Draft, Verifier

if TYPE_CHECKING:
    from specdec.text.logit_processors import LogitsProcessor

CONSTRAINT_STOP_REASON: StopReason = "eos"  # for a complete constraint if the model has no end-of-sequence tokens
MAX_FORCED_TOKENS = 31  # in a proposal that a constraint forces: half a pass


class Verified(NamedTuple):
    """The result of verifying a draft.

    Attributes:
        tokens: The next tokens of the sequence: accepted draft tokens, then one of the target, or those up to the end.
        n_accepted: How many of them are accepted draft tokens.
        logprobs: The log probabilities of each token; None if not requested.
    """

    tokens: list[int]
    n_accepted: int
    logprobs: list[TokenLogprob] | None = None


@dataclass
class DecodingState:
    """The state of speculative decoding of one sequence: its tokens, and what proposes and verifies the next ones.

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
        top_logprobs: Number of most probable tokens to report with each token; None for no log probabilities.
        n_ids: Number of token ids that the target can generate.
        step_costs: The cost of a step, as in `Step.cost`, by its number of draft tokens; empty if it is not known.
        processor: Adjusts the target's logits by the tokens so far; None if the sampling settings adjust none.
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
    top_logprobs: int | None = None
    n_ids: int | None = None
    step_costs: Sequence[float] = ()
    processor: "LogitsProcessor | None" = None
    draft: Draft = field(default_factory=lambda: Draft([]), init=False)
    stop_reason: StopReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Compute the maximum length of the sequence and start its constraint."""
        # The last token is never run, so a sequence may have one token more than the target has positions.
        self._max_length = min(len(self.tokens) + self.max_tokens, self.n_positions + 1)
        self._constraint_state = self.constraint.begin(self.tokens) if self.constraint else None
        if self.processor:
            self.processor.update(self.tokens)
        self._is_forced, self._draft_seconds = False, 0.0  # whether the constraint made the last proposal; time of making it

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, by a stop reason or at its maximum length."""
        return self.stop_reason is not None or len(self.tokens) >= self._max_length

    @property
    def proposal(self) -> Proposal:
        """The `Proposal` event that reports the current draft before the target verifies it."""
        draft = self.draft
        return Proposal(draft.path([]), None if draft.parents is None else (draft.tokens, draft.parents))

    def propose(self, can_draft: bool = True) -> Draft:
        """Choose, store and return the draft, possibly empty, that the next target pass runs after the sequence's last token.

        Tokens that the constraint forces are the draft; otherwise the drafter is called if the policy wants a draft.

        Args:
            can_draft: Whether the drafter is ready.
        """
        begin, n, max_length, constraint = time.perf_counter(), len(self.tokens), self._max_length - 1, self._constraint_state
        if n <= self.longrope_threshold:  # a proposal beyond the threshold would need a second pass over the whole sequence
            max_length = min(max_length, self.longrope_threshold)
        token_budget = max_length - n
        forced = constraint.get_forced_tokens(min(token_budget, MAX_FORCED_TOKENS)) if constraint else []
        self._is_forced = bool(forced)
        if forced:
            self.draft = Draft(forced)
        else:
            is_drafted = can_draft and self.drafter and self.policy.start(token_budget)
            draft = self.drafter.propose(self.tokens, self.policy) if self.drafter and is_drafted else Draft([])
            if constraint and draft.tokens and draft.parents is None:
                # A coupled verifier's output is the same with any proposal, so the token that the constraint refuses is left
                # out. For others it stays: where a proposal ends must not depend on a token that was drawn and left out.
                n_kept = constraint.count_allowed(draft.tokens) + (not self.verifier.is_coupled)
                draft = replace(draft, tokens=draft.tokens[:n_kept], q=draft.q[:n_kept] if draft.q else None)
            self.draft = draft
        self._draft_seconds = time.perf_counter() - begin
        return self.draft

    def verify(self, logits: Float32) -> Verified:
        """Accept or reject the current draft, and return the sequence's next tokens, without adding them to the sequence.

        The drafter observes the logits if the policy wanted a draft. The method may be called again, with the logits of another
        pass, for the same draft.

        Args:
            logits: (n + 1, V) for n draft tokens; a constraint masks them in place.

        Raises:
            ValueError: If no token can be drawn from the logits.
        """
        draft, constraint = self.draft, self._constraint_state
        unmasked = logits.copy() if self.top_logprobs is not None and (constraint or self.processor) else logits
        # Draft tokens after the end do not belong to the sequence, nor does the target's token there.
        if draft.tokens and draft.parents is None and (end := self._find_end(draft.tokens)) is not None:
            draft, logits = replace(draft, tokens=draft.tokens[:end]), logits[:end]
        if constraint:
            constraint.mask_logits(logits, draft)
        if self.processor:
            self.processor.apply_to_draft(logits, draft)
        tokens, n_accepted = self.verifier.verify(logits, draft, len(self.tokens))
        if draft.parents is not None and (end := self._find_end(tokens[:n_accepted])) is not None:
            tokens, n_accepted = tokens[:end], end
        if tokens[-1] < 0:
            raise (constraint and constraint.error) or ValueError(
                "the target's logits are not finite: its weights are damaged or too large to compute with, or its keys and "
                "values too large for f16 (kv='f32' holds them)"
            )
        if self.drafter:
            nodes = range(n_accepted) if draft.parents is None else draft.find_nodes(tokens[:n_accepted])
            self.drafter.observe(logits, [0, *(node + 1 for node in nodes)][: len(logits)], len(self.tokens))
        if self.top_logprobs is None:
            return Verified(tokens, n_accepted)
        from specdec.logprobs import compute_logprobs

        return Verified(tokens, n_accepted, compute_logprobs(unmasked, self.draft, tokens, self.top_logprobs, self.n_ids))

    def _find_end(self, tokens: list[int]) -> int | None:
        """Return how many of the given next tokens belong to the sequence if it ends among them, EOS included, else None."""
        eos = next((i for i, token in enumerate(tokens) if token in self.eos_tokens), None)
        end = self._constraint_state.find_end(tokens[:eos]) if self._constraint_state else None
        return end if end is not None or eos is None else eos + 1

    def commit(self, verified: Verified, seconds: float, experts: tuple[float, int] = (0.0, 0)) -> Step:
        """Append verified tokens to the sequence, update its stop reason, constraint and policy, and return the `Step` event.

        An end-of-sequence token is not appended; its name becomes the stop reason.

        Args:
            verified: The result of `verify`.
            seconds: Time of the pass and of `verify`.
            experts: See `Step`.
        """
        draft, path, (new, n_accepted, logprobs) = self.draft, self.draft.path(verified.tokens), verified
        if new[-1] in self.eos_tokens:
            self.stop_reason = self.eos_tokens[new[-1]]
            new = new[:-1]
        self.tokens += new
        if self.processor:
            self.processor.update(self.tokens)
        if self._constraint_state:
            self._constraint_state.commit(new)
            if self._constraint_state.is_complete:  # the first name, since which token was drawn depends on the proposal
                self.stop_reason = next(iter(self.eos_tokens.values()), CONSTRAINT_STOP_REASON)
        if self.stop_reason is None and len(self.tokens) == self._max_length:
            self.stop_reason = "seq_len" if self._max_length > self.n_positions else "max_tokens"
        n_nodes, draft_seconds = len(draft.tokens), self._draft_seconds
        if not self._is_forced:
            nodes = None if draft.parents is None else draft.find_verified_nodes(verified.tokens[:n_accepted])
            self.policy.update(n_nodes, n_accepted, seconds, draft_seconds, nodes)
        return Step(
            new, path, n_accepted, seconds + draft_seconds, draft_seconds, self.stop_reason, n_nodes,
            logprobs=logprobs and logprobs[: len(new)], experts=experts, draft_source=draft.find_source(new),
            cost=self.step_costs[n_nodes] if self.step_costs else 0.0, coverage=draft.coverage,
        )  # fmt: skip
