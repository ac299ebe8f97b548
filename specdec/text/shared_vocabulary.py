"""Compare two vocabularies: which ids mean the same, and which ids a model can generate. Independent of models."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from specdec.tokenizer import AnyTokenizer

MAX_PADDING_ROWS = 1024  # rows without a token; the published maximum is 905 (Phi-2)
MIN_KNOWN_FRACTION = 0.5  # of the rows that must have a token; matters for small models
# Of the target's tokens, for a draft of another vocabulary. Draft heads have a fifth of them or more.
MIN_SHARED_FRACTION = 0.1
NOT_SHARED = -1  # in `target_ids`, for a draft token without a target id


@runtime_checkable
class NamedTokens(Protocol):
    """The protocol of tokenizers with a name for each token, of which only `HFTokenizer` is one."""

    def id_to_token(self, token: int) -> str | None:
        """Return the name of a token id, also of a special token, or None for an unknown id."""

    def is_same_file(self, path: Path) -> bool:
        """Return whether a tokenizer.json, or that in a folder, has the same bytes as this tokenizer's own file."""

    def has_same_decoder(self, other: Any) -> bool:
        """Return whether both tokenizers decode equally, so that tokens of the same name have the same bytes."""


@dataclass(frozen=True)
class SharedVocabulary:
    """The token ids that a target and a draft model can generate, and a map between them if their ids differ.

    Attributes:
        n_target: The target generates ids below this.
        n_common: The draft proposes ids below this, which mean the same to both.
        target_ids: For each draft token the target's id or NOT_SHARED, if the ids differ. The draft is then addressed with target
            ids. Empty if the ids are the same.
    """

    n_target: int
    n_common: int
    target_ids: tuple[int, ...] = field(default=(), repr=False)


def count_known_ids(tokenizer: AnyTokenizer, n_rows: int, model: str = "the target") -> int:
    """Return how many of the model's ids are tokens; ids from this number on are padding and must never be generated.

    Args:
        tokenizer: The tokenizer.
        n_rows: The size of the model's vocabulary: the rows of its classifier.
        model: A description of the model, for errors.

    Raises:
        ValueError: The tokenizer's size shows that the tokenizer belongs to another model.
    """
    n = tokenizer.vocab_size
    matches = n == n_rows or isinstance(tokenizer, NamedTokens)
    if n > n_rows:  # special tokens that a model was not trained on do no harm
        matches = matches and n - n_rows <= MAX_PADDING_ROWS and max(tokenizer.encode("")) < n_rows
        matches = matches and all(tokenizer.token_to_bytes(token) is None for token in range(n_rows, n))
    if not matches or n_rows - n > MAX_PADDING_ROWS or n <= MIN_KNOWN_FRACTION * n_rows:
        raise ValueError(
            f"{tokenizer.path} has {n} tokens, {model} has {n_rows}; pass {model}'s own tokenizer with tokenizer=..."
        )
    return min(n, n_rows)


def compare_vocabularies(target: AnyTokenizer, target_rows: int, draft: AnyTokenizer | Path, draft_rows: int) -> SharedVocabulary:
    """Compare a target's and a draft's tokenizer by the bytes of their tokens and return which ids both can generate.

    Ids are mapped if they differ. Only ids that both tokenizers know are compared; names of special tokens may differ.

    Args:
        target: The target's tokenizer.
        target_rows: The size of the target's vocabulary.
        draft: The draft's tokenizer, or its file or folder, which is not loaded if it is a copy of the target's.
        draft_rows: The size of the draft's vocabulary.

    Raises:
        ValueError: The tokenizers share too few tokens, or a tokenizer belongs to another model.
        TokenizerError: The draft's file is not a tokenizer.
    """
    if isinstance(draft, Path):
        is_copy = isinstance(target, NamedTokens) and target.is_same_file(draft)
        draft = target if is_copy else import_module("specdec.text.hf_tokenizer").HFTokenizer(draft)
    if draft is target:
        n_target = count_known_ids(target, target_rows)
        return SharedVocabulary(n_target, min(n_target, count_known_ids(target, draft_rows, "the draft")))
    n_target, n_draft = count_known_ids(target, target_rows), count_known_ids(draft, draft_rows, "the draft")
    n = min(n_target, n_draft)
    if next(_find_differing_ids(target, draft, n), None) is None:
        return SharedVocabulary(n_target, n)
    target_ids = _map_draft_ids(target, n_target, draft, n_draft)
    if (n_shared := sum(token != NOT_SHARED for token in target_ids)) < MIN_SHARED_FRACTION * n_target:
        raise ValueError(
            f"the draft's tokenizer {draft.path} has {n_shared} of the {n_target} tokens of the target's, {target.path}; a draft "
            f"needs {MIN_SHARED_FRACTION:.0%} of them; use one of the target's model family"
        )
    return SharedVocabulary(n_target, n_target, target_ids)


def assume_shared_vocabulary(target: AnyTokenizer, target_rows: int, name: str, draft_rows: int) -> SharedVocabulary:
    """Return the vocabulary that a target shares with a draft without a tokenizer, by assuming that equal ids mean the same.

    Args:
        target: The target's tokenizer.
        target_rows: The size of the target's vocabulary.
        name: A description of the draft, for errors.
        draft_rows: The size of the draft's vocabulary.

    Raises:
        ValueError: The sizes of the vocabularies show that they differ.
    """
    n = target.vocab_size
    is_padded = isinstance(target, NamedTokens) and n <= draft_rows <= min(n + MAX_PADDING_ROWS, n / MIN_KNOWN_FRACTION)
    if draft_rows != target_rows and not is_padded:
        raise ValueError(
            f"{name} has a vocabulary of {draft_rows} tokens, the target one of {target_rows}; "
            "these must be equal if the draft has no tokenizer of its own"
        )
    return SharedVocabulary(min(n, target_rows), min(n, draft_rows))


def _find_differing_ids(a: AnyTokenizer, b: AnyTokenizer, n: int) -> Iterator[int]:
    """Yield each id below n that is a token in both tokenizers but stands for different bytes."""
    ids: Iterable[int] = range(n)
    if isinstance(a, NamedTokens) and isinstance(b, NamedTokens) and a.has_same_decoder(b):
        names = zip(map(a.id_to_token, ids), map(b.id_to_token, ids), strict=True)
        ids = [
            token
            for token, (name_a, name_b) in zip(ids, names, strict=True)
            if name_a != name_b and name_a is not None and name_b is not None
        ]
    for token in ids:
        if a.token_to_bytes(token) != b.token_to_bytes(token):
            yield token


def _map_draft_ids(target: AnyTokenizer, n_target: int, draft: AnyTokenizer, n_draft: int) -> tuple[int, ...]:
    """Return, for each draft id, the target id with the same bytes or special name, or NOT_SHARED; no target id is used twice.

    Of several tokens with the same bytes the last ones are paired: SentencePiece's bytes come before its characters.
    """
    ids: dict[bytes | str, list[int]] = {}
    for token, meaning in enumerate(_get_meanings(target, n_target)):
        ids.setdefault(meaning, []).append(token)
    ids.pop(b"", None)
    meanings = reversed(_get_meanings(draft, n_draft))
    return tuple([ids[meaning].pop() if ids.get(meaning) else NOT_SHARED for meaning in meanings][::-1])


def _get_meanings(tokenizer: AnyTokenizer, n: int) -> list[bytes | str]:
    """Return, for each id below n, the token's bytes, the name of a special token, or b"" for an unknown id."""
    if isinstance(tokenizer, NamedTokens):
        names = {token: tokenizer.id_to_token(token) for token in range(n)}
    else:
        names = {token: name for name, token in getattr(tokenizer, "specials", {}).items()}
    token_bytes = [tokenizer.token_to_bytes(token) for token in range(n)]
    return [names.get(token) or b"" if data is None else data for token, data in enumerate(token_bytes)]
