"""What two tokenizers mean by their ids, the same or others, and which ids a model may say. Knows nothing of models."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specdec.text.hf_tokenizer import JsonTokenizer, load_tokenizer
from specdec.tokenizer import AnyTokenizer

MOST_PADDING = 1024  # rows without a token; the most that is published are 905, Phi-2's
LEAST_KNOWN = 0.5  # share of the rows that have a token, of models that are small
LEAST_SHARED = 0.1  # of the target's tokens, that a draft of another vocabulary has to know; heads have a fifth of them, or more
NOT_SHARED = -1  # in the place of an id


@dataclass(frozen=True)
class Vocabulary:
    """n_target: the target says ids below it; n_common: the draft proposes ids below it, which mean the same to both.

    target_ids: of each of a draft's tokens the id that the target has for it, or NOT_SHARED, where its own ids are others; the
    draft is then asked by the target's ids. Else empty.
    """

    n_target: int
    n_common: int
    target_ids: tuple[int, ...] = field(default=(), repr=False)


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
    """Compares two tokenizers by what their tokens say, over the ids that both know, where names of special tokens may differ;
    where ids differ, finds the tokens that both have.

    draft: its tokenizer, or the file or folder of one, which is not loaded where it is a copy of the target's. Raises ValueError
    for two that share too few tokens or for a tokenizer that is not its model's, TokenizerError for a file that is none.
    """
    if isinstance(draft, Path):
        is_copy = isinstance(target, JsonTokenizer) and target.is_of(draft)
        draft = target if is_copy else load_tokenizer(draft)
    if draft is target:
        n_target = known_ids(target, target_rows)
        return Vocabulary(n_target, min(n_target, known_ids(target, draft_rows, "the draft")))
    n_target, n_draft = known_ids(target, target_rows), known_ids(draft, draft_rows, "the draft")
    n = min(n_target, n_draft)
    if next(_that_differ(target, draft, n), None) is None:
        return Vocabulary(n_target, n)
    target_ids = _translated(target, n_target, draft, n_draft)
    if (n_shared := sum(token != NOT_SHARED for token in target_ids)) < LEAST_SHARED * n_target:
        raise ValueError(
            f"the draft's tokenizer {draft.path} has {n_shared} of the {n_target} tokens of the target's, {target.path}; a draft "
            f"needs {LEAST_SHARED:.0%} of them; name one of the target's family"
        )
    return Vocabulary(n_target, n_target, target_ids)


def presumed_vocabulary(target: AnyTokenizer, target_rows: int, name: str, draft_rows: int) -> Vocabulary:
    """With a draft that has no tokenizer of its own, by its size. Raises ValueError for one that cannot share the target's."""
    n = target.vocab_size
    is_padded = isinstance(target, JsonTokenizer) and n <= draft_rows <= min(n + MOST_PADDING, n / LEAST_KNOWN)
    if draft_rows != target_rows and not is_padded:
        raise ValueError(
            f"{name} has a vocabulary of {draft_rows} tokens, the target one of {target_rows}; "
            "they must agree where a draft has no tokenizer of its own"
        )
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


def _translated(target: AnyTokenizer, n_target: int, draft: AnyTokenizer, n_draft: int) -> tuple[int, ...]:
    """Of each of a draft's tokens the target's that says the same bytes, or is a mark of the same name; no id twice.

    Of several that say the same the last ones belong together: SentencePiece's bytes come before its characters.
    """
    ids: dict[bytes | str, list[int]] = {}
    for token, meaning in enumerate(_meanings(target, n_target)):
        ids.setdefault(meaning, []).append(token)
    ids.pop(b"", None)
    meanings = reversed(_meanings(draft, n_draft))
    return tuple([ids[meaning].pop() if ids.get(meaning) else NOT_SHARED for meaning in meanings][::-1])


def _meanings(tokenizer: AnyTokenizer, n: int) -> list[bytes | str]:
    """What each token says, or its name if it is a mark; of neither nothing."""
    if isinstance(tokenizer, JsonTokenizer):
        names = {token: tokenizer.name(token) for token in range(n)}
    else:
        names = {token: name for name, token in getattr(tokenizer, "specials", {}).items()}
    said = [tokenizer.says(token) for token in range(n)]
    return [names.get(token) or b"" if each is None else each for token, each in enumerate(said)]
