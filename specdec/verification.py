"""Verifiers, which accept or reject draft tokens and sample the target's next token. The module needs logits only, no models.

`coupled` (the default): the target's token at a position is a function of its logits, the seed and the position. It is computed
with the same noise that the draft used (Daliri et al. 2024, arXiv:2408.07978). A draft token is accepted if it is that token.
The output is the target's own of the same seed, whatever was proposed.

`rejection`: a draft token is accepted with probability min(1, p / q), else the position is sampled from the residual (Leviathan
et al. 2023, arXiv:2211.17192). The noise is independent, since shared noise would bias the result. The distribution is the
target's, but the output is not that of a plain run.

`block`: accepts the longest prefix of the draft that can be accepted as a whole (Sun et al. 2024, arXiv:2403.10444). The
distribution is that of `rejection`, and on average never fewer tokens are accepted.

Shapes: n draft tokens, V vocabulary, p and q probabilities of target and draft.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from specdec.runtime.simd import Float32
from specdec.sampling import (
    ACCEPT_NOISE,
    DRAFT_NOISE,
    TARGET_NOISE,
    Sampler,
    Sampling,
    accept_or_reject,
    accept_or_resample,
    compute_block_acceptance,
    draw_bernoulli,
    draw_residual,
    get_round_streams,
)

VerifyMode = Literal["coupled", "rejection", "block"]


@dataclass(frozen=True)
class Draft:
    """A proposal of draft tokens to the target, as a chain or a tree, with the distributions from which the tokens were drawn.

    The place where a proposal ends may depend on its tokens and their q, but not on a token that was drawn and left out.

    Attributes:
        tokens: The draft tokens.
        q: The draft's distribution for each token, (1, V padded); None if the tokens were not drawn. Siblings are drawn from one
            q, in their order, without replacement.
        parents: The index of each token's parent, which comes earlier, or -1 for the sequence's last token; None for a chain.
        sources: Where each token was looked up (`lookup.SOURCES`); empty for other drafts.
        coverage: See `TrimmedClassifier.coverage`; None if the draft has no candidates.
    """

    tokens: list[int]
    q: list[Float32] | None = None
    parents: list[int] | None = None
    sources: Sequence[str] = ()
    coverage: float | None = None

    def children(self, node: int) -> list[int]:
        """Return the indices of the draft tokens proposed after token `node` (-1: the sequence's last), first choice first."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def find_nodes(self, tokens: list[int]) -> list[int]:
        """Return the indices of the draft tokens that equal `tokens` in order, up to the first token that is not proposed."""
        nodes, node = list[int](), -1
        for token in tokens:
            node = next((child for child in self.children(node) if self.tokens[child] == token), -1)
            if node < 0:
                break
            nodes.append(node)
        return nodes

    def find_verified_nodes(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return the indices of a tree's accepted nodes, and those of its rejected ones, whose parent is accepted or the root.

        Nodes below a rejected one are in neither list, since they were not verified.

        Args:
            tokens: The accepted tokens.
        """
        nodes = self.find_nodes(tokens)
        accepted = {-1, *nodes}
        return nodes, [i for i, parent in enumerate(self.parents or ()) if parent in accepted and i not in accepted]

    def find_source(self, tokens: list[int]) -> str:
        """Return where the first draft token of `path(tokens)` was looked up, or an empty string if it was not."""
        nodes = self.find_nodes(tokens[:1]) or self.children(-1) if self.sources else []
        return self.sources[nodes[0]] if nodes else ""

    def path(self, tokens: list[int]) -> list[int]:
        """Return the draft tokens on one path: along `tokens` as far as the tree has them, then first choices; all of a chain."""
        if self.parents is None:
            return self.tokens
        path, node = list[int](), -1
        while children := self.children(node):
            at = len(path)
            node = next((c for c in children if at < len(tokens) and self.tokens[c] == tokens[at]), children[0])
            path.append(self.tokens[node])
        return path


class Verifier(Protocol):
    """The interface of verifiers, which decide how many draft tokens are accepted and sample the target's token after them.

    Attributes:
        is_coupled: Whether the output is the same with any proposal, given the seed.
    """

    is_coupled: bool

    def get_draft_stream(self, position: int) -> int:
        """Return the number of the random number stream with which to draw the draft tokens of a proposal at `position`."""

    def verify(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        """Accept or reject the tokens of a draft, and return the tokens that continue the sequence.

        Args:
            logits: (n + 1, V) for n draft tokens, or (n, V) if nothing may follow the last one.
            draft: The draft.
            position: The position of the draft's first token in the sequence.

        Returns:
            The sequence's tokens from `position` on, and how many of them are accepted draft tokens, which come first. One token
            of the target follows if there are logits for it; the token is -1 if none can be drawn from these logits.
        """


class SequentialVerifier:
    """A base class of verifiers that sample a target token per position and accept draft tokens up to the first that differs."""

    is_coupled = False

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        """Create the sampler and its buffer of probabilities."""
        self._sampler = Sampler(vocab_size, sampling)
        self._probs = self._sampler.new_probs()

    def verify(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        """Return the sequence's next tokens and how many of them are accepted draft tokens; see `Verifier.verify`."""
        tokens: list[int] = []
        node = -1
        while node + 1 < len(logits):
            children = draft.children(node)
            token = self._sample_token(logits[node + 1], draft, children, position + len(tokens))
            tokens.append(token)
            accepted = next((child for child in children if draft.tokens[child] == token), None)
            if accepted is None:
                return tokens, len(tokens) - 1
            node = accepted
        return tokens, len(tokens)

    def _sample_token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        """Sample and return the target's token at one position; subclasses implement this.

        Args:
            logits: The target's logits at the position, (V,).
            draft: The draft.
            children: The indices of the draft tokens that are proposed for the position; empty after the draft.
            position: The position in the sequence.
        """
        raise NotImplementedError


class CoupledVerifier(SequentialVerifier):
    """A verifier that accepts a draft token if it equals the token that the target samples at that position without a draft."""

    is_coupled = True

    @staticmethod
    def get_draft_stream(position: int) -> int:
        """Return the number of the target's own random number stream, so that draft and target sample with the same noise."""
        return TARGET_NOISE

    def _sample_token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)


def get_draft_probs(draft: Draft, i: int, one_hot: Float32) -> Float32:
    """Return the distribution (1, V padded) of draft token i; if it was not drawn, fill the buffer `one_hot` and return that."""
    if draft.q is not None:
        return draft.q[i]
    one_hot[0] = 0
    one_hot[0, draft.tokens[i]] = 1
    return one_hot


class RejectionVerifier(SequentialVerifier):
    """A verifier that accepts a draft token with probability min(1, p / q), else samples a token of the residual max(0, p - q).

    After a draft that is accepted as a whole, the target's token is sampled from p. The outcome of a round depends only on the
    noise of the positions that it fills. The noise of later positions is still unused, so the next round may use it.
    """

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        """Create the sampler and the buffers of probabilities."""
        super().__init__(vocab_size, sampling)
        self._one_hot, self._residual = (self._sampler.new_probs() for _ in range(2))

    @staticmethod
    def get_draft_stream(position: int) -> int:
        """Return the number of the random number stream of drafts, which is independent of the target's stream."""
        return DRAFT_NOISE

    def _sample_token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        if not children:
            return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)
        self._sampler.compute_probabilities(self._probs, logits)
        seed, n, q = self._sampler.sampling.seed, self._sampler.vocab_size, get_draft_probs(draft, children[0], self._one_hot)
        tokens = [draft.tokens[child] for child in children]
        if len(tokens) > 1:
            self._residual[:] = q
            q = self._residual
        for token, sibling in itertools.pairwise(tokens):
            if accept_or_reject(self._probs, q, n, token, sibling, seed, ACCEPT_NOISE, position):
                return token
        streams = ACCEPT_NOISE, TARGET_NOISE
        return int(accept_or_resample(self._probs, q, n, tokens[-1], seed, streams, position, self._sampler.top_two))


class BlockVerifier:
    """A verifier that accepts the longest draft prefix for which a random draw succeeds, then samples the residual after it.

    (Sun et al. 2024, Algorithm 2.) A prefix is accepted because all longer ones are rejected, so the outcome of a round depends
    on the noise of positions that it does not fill. The next round must not use that noise again. So draft tokens and acceptance
    draws take streams of their round. No other round of a sequence shares these streams, since each round starts at another
    position. The target's token may take TARGET_NOISE, which is used at one position only, the one that the token fills.
    """

    is_coupled = False

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        """Create the sampler and the buffers of probabilities."""
        self._sampler = Sampler(vocab_size, sampling)
        self._probs, self._accepted_probs, self._one_hot, self._zero_probs = (self._sampler.new_probs() for _ in range(4))

    @staticmethod
    def get_draft_stream(position: int) -> int:
        """Return the number of a random number stream that only drafts of the round that starts at `position` use."""
        return get_round_streams(position)[0]

    def verify(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        """Return the sequence's next tokens and how many are accepted draft tokens, for a chain only; see `Verifier.verify`."""
        seed, vocab_size, n = self._sampler.sampling.seed, self._sampler.vocab_size, len(draft.tokens)
        accept_stream = get_round_streams(position)[1]
        n_accepted, kept_weight, weight = 0, 1.0, 1.0
        for i in range(n + 1):
            if i < len(logits):
                self._sampler.compute_probabilities(self._probs, logits[i])
            acceptance, next_weight = weight, 0.0  # for the whole block
            if i < n:
                q = get_draft_probs(draft, i, self._one_hot)
                acceptance, next_weight = compute_block_acceptance(self._probs, q, vocab_size, draft.tokens[i], weight)
            if draw_bernoulli(acceptance, seed, accept_stream, i) or i == 0:
                n_accepted, kept_weight = i, weight
                self._probs, self._accepted_probs = self._accepted_probs, self._probs
            weight = next_weight
            if weight == 0.0:  # no longer prefix can be accepted
                break
        tokens = draft.tokens[:n_accepted]
        if n_accepted < len(logits):
            if n_accepted == n:  # the residual is p itself
                q, kept_weight = self._zero_probs, 1.0
            else:
                q = get_draft_probs(draft, n_accepted, self._one_hot)
            noise = seed, TARGET_NOISE, position + n_accepted
            tokens.append(int(draw_residual(self._accepted_probs, q, vocab_size, kept_weight, *noise, self._sampler.top_two)))
        return tokens, n_accepted


VERIFIERS: dict[str, Callable[[int, Sampling], Verifier]] = {
    "coupled": CoupledVerifier,
    "rejection": RejectionVerifier,
    "block": BlockVerifier,
}
