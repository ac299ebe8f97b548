"""Whether two tokenizers mean the same by their ids, and which ids a model may say. Knows nothing of models."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..tokenizer import AnyTokenizer
from .tokenizer_json import JsonTokenizer, load_tokenizer

MOST_PADDING = 1024  # rows without a token; the most that is published are 905, Phi-2's
LEAST_KNOWN = 0.5  # share of the rows that have a token, of models that are small


@dataclass(frozen=True)
class Vocabulary:
    """n_target: the target says ids below it; n_common: the draft proposes ids below it, which mean the same to both."""

    n_target: int
    n_common: int


def known_ids(tokenizer: AnyTokenizer, rows: int, model: str = "the target") -> int:
    """How many of a model's rows are tokens; the others pad the vocabulary and are never to be said.

    Raises ValueError for a tokenizer of another model, as its size tells.
    """
    n = tokenizer.vocab_size
    is_of_model = n == rows or isinstance(tokenizer, JsonTokenizer)
    if n > rows:  # special tokens that a model was never taught do no harm
        is_of_model = is_of_model and n - rows <= MOST_PADDING and max(tokenizer.encode("")) < rows
        is_of_model = is_of_model and all(tokenizer.says(token) is None for token in range(rows, n))
    if not is_of_model or rows - n > MOST_PADDING or n <= LEAST_KNOWN * rows:
        raise ValueError(f"{tokenizer.path} holds {n} tokens, {model} has {rows}; name {model}'s own with tokenizer=...")
    return min(n, rows)


def common_vocabulary(target: AnyTokenizer, target_rows: int, draft: AnyTokenizer | Path, draft_rows: int) -> Vocabulary:
    """Compares two tokenizers by what their tokens say, over the ids that both know, where names of special tokens may differ.

    draft: its tokenizer, or the file or folder of one, which is not loaded where it is a copy of the target's. Raises ValueError
    with the first token that differs or for a tokenizer that is not its model's, TokenizerError for a file that is none.
    """
    if isinstance(draft, Path):
        is_copy = isinstance(target, JsonTokenizer) and target.is_of(draft)
        draft = target if is_copy else load_tokenizer(draft)
    if draft is target:
        n_target = known_ids(target, target_rows)
        return Vocabulary(n_target, min(n_target, known_ids(target, draft_rows, "the draft")))
    n_target, n_draft = known_ids(target, target_rows), known_ids(draft, draft_rows, "the draft")
    n = min(n_target, n_draft)
    for token in _that_differ(target, draft, n):
        raise ValueError(
            f"the draft's tokenizer is another one than the target's: token {token} is {_shown(draft, token)} in {draft.path} "
            f"and {_shown(target, token)} in {target.path}; name a draft of the target's family"
        )
    return Vocabulary(n_target, n)


def presumed_vocabulary(target: AnyTokenizer, target_rows: int, name: str, draft_rows: int) -> Vocabulary:
    """With a draft that has no tokenizer of its own, by its size. Raises ValueError for one that cannot share the target's."""
    n = target.vocab_size
    is_padded = isinstance(target, JsonTokenizer) and n <= draft_rows <= min(n + MOST_PADDING, n / LEAST_KNOWN)
    if draft_rows != target_rows and not is_padded:
        raise ValueError(f"{name} has a vocabulary of {draft_rows} tokens, the target one of {target_rows}; they must agree")
    return Vocabulary(min(n, target_rows), min(n, draft_rows))


def _that_differ(one: AnyTokenizer, other: AnyTokenizer, n: int) -> Iterator[int]:
    """The ids below n that mean something to both, and not the same."""
    ids: Iterable[int] = range(n)
    if isinstance(one, JsonTokenizer) and isinstance(other, JsonTokenizer) and one.is_spelled_like(other):
        names = zip(map(one.name, ids), map(other.name, ids), strict=True)
        ids = [token for token, (a, b) in zip(ids, names, strict=True) if a != b and a is not None and b is not None]
    for token in ids:
        if one.says(token) != other.says(token):
            yield token


def _shown(tokenizer: AnyTokenizer, token: int) -> str:
    said = tokenizer.says(token)
    return "a mark" if said is None else repr(said.decode(errors="backslashreplace"))
