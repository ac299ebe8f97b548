"""Log probabilities of generated tokens, for clients that request them. They decide no token."""

import numpy as np

from specdec.events import TokenLogprob
from specdec.runtime.simd import Float32
from specdec.verification import Draft


def compute_logprobs(logits: Float32, draft: Draft, new: list[int], n_top: int, n_ids: int | None = None) -> list[TokenLogprob]:
    """Return, for each new token, its log probability and those of the most probable tokens at its position.

    They are those of the logits as given, before temperature and filters.

    Args:
        logits: Logits (n + 1, V) at the sequence's last token and at each of the n draft tokens.
        draft: The draft that was verified.
        new: The tokens to rate.
        n_top: Number of most probable tokens per position.
        n_ids: Number of ids that have tokens, from 0; None for all of V.
    """
    results, node = list[TokenLogprob](), -1
    for token in new:
        logprobs = logits[node + 1, :n_ids].astype(np.float64)
        logprobs -= logprobs.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        top = np.argpartition(-logprobs, n_top)[:n_top] if n_top < len(logprobs) else np.arange(len(logprobs))
        top = top[np.lexsort((top, -logprobs[top]))]
        results.append(
            TokenLogprob(token, float(logprobs[token]), [(int(candidate), float(logprobs[candidate])) for candidate in top])
        )
        node = next((child for child in draft.children(node) if draft.tokens[child] == token), -1)
    return results
