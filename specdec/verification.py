"""Which proposals stand, and what the target says behind them. Knows no models and no texts.

`coupled` (the default): the target's token at a position is a function of its logits, the seed and the position, computed with
the very noise that the draft used (Daliri et al. 2024, arXiv:2408.07978); a proposal stands if it is that token. The text is
the target's own of the same seed, whatever was proposed.

`rejection`: a proposal stands with probability min(1, p / q), else its place is drawn from the residual (Leviathan et al. 2023,
arXiv:2211.17192); independent noise, since shared noise would bias it. The distribution is the target's, the text is not that
of a plain run.

`block`: the longest prefix of the proposal that may stand as a whole (Sun et al. 2024, arXiv:2403.10444): the distribution of
`rejection`, and never fewer accepted on the average.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from specdec.runtime.simd import Float32
from specdec.sampling import (
    ACCEPT_NOISE,
    DRAFT_NOISE,
    TARGET_NOISE,
    Sampler,
    Sampling,
    happens,
    keep_or_redraw,
    keep_or_refuse,
    redraw,
    round_noise,
    weigh_prefix,
)

VerifyMode = Literal["coupled", "rejection", "block"]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens; where a proposal ends may depend on its tokens and their q, on none that was drawn and left out.

    q: what each was drawn from, (1, V padded) a token; None where they were not drawn. parents: of each an earlier one's index,
    or -1; None where each follows the one before. Siblings were drawn from one q in their order, without replacement.
    """

    tokens: list[int]
    q: list[Float32] | None = None
    parents: list[int] | None = None

    def children(self, node: int) -> list[int]:
        """What is proposed behind a token, or, of -1, behind the text: indexes, the first choice first."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, tokens: list[int]) -> list[int]:
        """The proposed tokens from the text on that begin with those, as far as they are proposed; then first choices."""
        if self.parents is None:
            return self.tokens
        path, node = list[int](), -1
        while children := self.children(node):
            at = len(path)
            node = next((c for c in children if at < len(tokens) and self.tokens[c] == tokens[at]), children[0])
            path.append(self.tokens[node])
        return path


class Verifier(Protocol):
    """Whatever decides which proposals stand, and what the target says behind them."""

    def draft_noise(self, position: int) -> int:
        """The noise stream that a proposal from `position` on is to be drawn with."""

    def judge(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        """The text's tokens from `position` on, and how many of them are proposals that stand; those come first.

        logits: (n + 1, V) for n proposals; (n, V) where nothing may follow the last one. Behind the proposals that stand comes
        one token of the target's, if there are logits for it: -1 where none can be drawn from them.
        """


class InTurn:
    """Judges by the target's token at one position after the other; none is looked at behind the first mismatch."""

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs = self._sampler.new_probs()

    def judge(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        tokens, node = list[int](), -1
        while node + 1 < len(logits):
            children = draft.children(node)
            token = self._token(logits[node + 1], draft, children, position + len(tokens))
            tokens.append(token)
            stands = next((child for child in children if draft.tokens[child] == token), None)
            if stands is None:
                return tokens, len(tokens) - 1
            node = stands
        return tokens, len(tokens)

    def _token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        """The target's, by which proposals there are for the position."""
        raise NotImplementedError


class CoupledVerifier(InTurn):
    """The target's own token, whatever was proposed."""

    @staticmethod
    def draft_noise(position: int) -> int:
        return TARGET_NOISE

    def _token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)


def q_of(draft: Draft, i: int, certain: Float32) -> Float32:
    """What proposal i was drawn from, (1, V padded); one that was not drawn came with certainty, and `certain` is filled."""
    if draft.q is not None:
        return draft.q[i]
    certain[0] = 0
    certain[0, draft.tokens[i]] = 1
    return certain


class RejectionVerifier(InTurn):
    """The proposal with probability min(1, p / q), else a draw from the residual; past the proposals, a draw from p.

    A round's outcome depends on the noise of the positions that it fills, and on none behind them: those, which the next round
    uses again, are still as good as new.
    """

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        super().__init__(vocab_size, sampling)
        self._certain, self._left = (self._sampler.new_probs() for _ in range(2))

    @staticmethod
    def draft_noise(position: int) -> int:
        return DRAFT_NOISE

    def _token(self, logits: Float32, draft: Draft, children: list[int], position: int) -> int:
        if not children:
            return self._sampler.draw(self._probs, logits, TARGET_NOISE, position)
        self._sampler.probabilities(self._probs, logits)
        seed, n, q = self._sampler.sampling.seed, self._sampler.vocab_size, q_of(draft, children[0], self._certain)
        tokens = [draft.tokens[child] for child in children]
        if len(tokens) > 1:
            self._left[:] = q
            q = self._left
        for token, sibling in itertools.pairwise(tokens):
            if keep_or_refuse(self._probs, q, n, token, sibling, seed, ACCEPT_NOISE, position):
                return token
        return int(keep_or_redraw(self._probs, q, n, tokens[-1], seed, ACCEPT_NOISE, TARGET_NOISE, position))


class BlockVerifier:
    """The longest prefix whose own lot falls on standing (Sun et al. 2024, Algorithm 2); behind it, a draw from its residual.

    A prefix is kept because all longer ones fell, so a round's outcome depends on the noise of positions that it does not fill,
    and those of a next round at the same positions must not be that noise: proposals and lots take streams of their round,
    which no other round of a text shares, as each begins at another position. What a round draws for the target may take
    TARGET_NOISE: it is used at that one position, which is filled with it.
    """

    def __init__(self, vocab_size: int, sampling: Sampling) -> None:
        self._sampler = Sampler(vocab_size, sampling)
        self._probs, self._kept, self._certain, self._nothing = (self._sampler.new_probs() for _ in range(4))

    @staticmethod
    def draft_noise(position: int) -> int:
        return round_noise(position)[0]

    def judge(self, logits: Float32, draft: Draft, position: int) -> tuple[list[int], int]:
        seed, vocab_size, n = self._sampler.sampling.seed, self._sampler.vocab_size, len(draft.tokens)
        lots = round_noise(position)[1]
        n_accepted, kept_weight, weight = 0, 1.0, 1.0
        for i in range(n + 1):
            if i < len(logits):
                self._sampler.probabilities(self._probs, logits[i])
            odds, next_weight = weight, 0.0  # of the whole block
            if i < n:
                q = q_of(draft, i, self._certain)
                odds, next_weight = weigh_prefix(self._probs, q, vocab_size, draft.tokens[i], weight)
            if happens(odds, seed, lots, i) or i == 0:
                n_accepted, kept_weight = i, weight
                self._probs, self._kept = self._kept, self._probs
            weight = next_weight
            if weight == 0.0:  # nor can anything longer stand
                break
        tokens = draft.tokens[:n_accepted]
        if n_accepted < len(logits):
            if n_accepted == n:  # what is left of p is all of it
                q, kept_weight = self._nothing, 1.0
            else:
                q = q_of(draft, n_accepted, self._certain)
            tokens.append(int(redraw(self._kept, q, vocab_size, kept_weight, seed, TARGET_NOISE, position + n_accepted)))
        return tokens, n_accepted


VERIFIERS: dict[str, Callable[[int, Sampling], Verifier]] = {
    "coupled": CoupledVerifier,
    "rejection": RejectionVerifier,
    "block": BlockVerifier,
}
