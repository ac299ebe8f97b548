"""Interfaces of the parts of a decoding step: drafters, draft length policies and constraints. Independent of models."""

from typing import Protocol

from specdec.runtime.simd import Float32
from specdec.verification import Draft


class LengthPolicy(Protocol):
    """The interface of draft length policies, which decide how many tokens a drafter proposes in each round of one sequence.

    Attributes:
        max_tokens: The maximum number of draft tokens of the current round.
    """

    max_tokens: int

    @property
    def can_branch(self) -> bool:
        """Whether a proposal of the current round may be a token tree."""

    def start(self, token_budget: int) -> bool:
        """Begin a round in which up to `token_budget` tokens fit: set `max_tokens`, and return whether to draft."""

    def should_continue(self, confidence: float) -> bool:
        """Record the confidence of the token that was just drafted, and return whether to draft another token in this round.

        Args:
            confidence: A number >= 0 that rises with the acceptance probability of the token.
        """

    def choose(self, confidences: list[float], parents: list[int] | None = None) -> int:
        """Return how many of the tokens that a drafter found at no cost to propose, 0 for none.

        Args:
            confidences: The confidence of each token that could be proposed, in order; see `should_continue`.
            parents: For a token tree, the index of each token's parent; see `Draft`.
        """

    def update(
        self,
        n_drafted: int,
        n_accepted: int,
        pass_seconds: float,
        draft_seconds: float,
        verified_nodes: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """Learn from a finished round, to choose the draft length of later rounds.

        Args:
            n_drafted: Number of draft tokens that were proposed.
            n_accepted: Number of these draft tokens that were accepted.
            pass_seconds: Time of the target pass and its verification.
            draft_seconds: Time that drafting took.
            verified_nodes: For a token tree, see `Draft.find_verified_nodes`.
        """


class Drafter(Protocol):
    """The interface of drafters, which propose draft tokens for one sequence.

    Attributes:
        has_variable_length: Whether a policy may end a proposal early; if not, its length is the same in each round.
    """

    has_variable_length: bool

    def prepare(self, tokens: list[int]) -> None:
        """Prefill the drafter with the tokens of a sequence; called after each prefill of the target."""

    def propose(self, tokens: list[int], policy: LengthPolicy) -> Draft:
        """Return draft tokens that may follow the sequence, possibly none.

        Args:
            tokens: The tokens of the sequence so far.
            policy: Decides the number of draft tokens; its round has begun.
        """

    def observe(self, logits: Float32, rows: list[int], n_tokens: int) -> None:
        """Learn from the logits of a pass, whose draft is verified; a second call for the same pass replaces the first.

        Args:
            logits: (n + 1, V) for n draft tokens, or (n, V).
            rows: The rows at the sequence's last token, and at the accepted draft tokens after it.
            n_tokens: Number of tokens of the sequence before the pass.
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

        Rows that are not finite stay, so that `verify` reports them. Rows after a forbidden draft token stay too, since
        they are not read.

        Args:
            logits: The rows for `Verifier.verify`, (n + 1, V) for n draft tokens, or (n, V).
            draft: The draft.
        """

    def commit(self, tokens: list[int]) -> None:
        """Advance the state by tokens that were added to the sequence."""
