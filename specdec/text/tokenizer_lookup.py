"""Select the tokenizer of a model, and find the token ids that a draft shares with a target."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from specdec.argument_checks import JSONObject, check_path
from specdec.loaders import Checkpoint, read_vocabulary
from specdec.loaders.model_file import TOKENIZER_FILE, identify_file
from specdec.loaders.model_paths import find_tokenizer
from specdec.tokenizer import AnyTokenizer, Tokenizer, TokenizerError

EXPECTED_TOKENIZER = "expected a tokenizer.json, a folder that holds one, a GGUF file, or a tokenizer.bin of llama2.c"
MAX_PADDING_ROWS = 1024  # rows without a token; the published maximum is 905 (Phi-2)
MIN_KNOWN_FRACTION = 0.5  # of the rows that must have a token; matters for small models
# Of the target's tokens, for a draft of another vocabulary. Draft heads have a fifth of them or more.
MIN_SHARED_FRACTION = 0.1
NOT_SHARED = -1  # in `target_ids`, for a draft token without a target id


def load_tokenizer(path: Path, bos: int | None = None, eos_tokens: Mapping[int, str] | None = None) -> AnyTokenizer:
    """Load a tokenizer from a Hugging Face folder or .json file (see `hf_tokenizer.HFTokenizer`), else from a llama2.c file.

    Args:
        path: The file or folder.
        bos: The BOS id; see `HFTokenizer`.
        eos_tokens: The end-of-sequence tokens with names; for a llama2.c file in addition to the file's own.

    Raises:
        TokenizerError: The file is not a tokenizer. The message names the kind of the file if it is known.
    """
    if path.is_dir() or path.suffix == ".json":
        return cast(AnyTokenizer, import_module("specdec.text.hf_tokenizer").HFTokenizer(path, bos, eos_tokens))
    try:
        return Tokenizer(path, eos_tokens=eos_tokens or {})
    except TokenizerError:
        if problem := identify_file(path, EXPECTED_TOKENIZER) if path.is_file() else "":
            raise TokenizerError(f"{path} {problem}") from None
        raise


def load_gguf_tokenizer(path: Path, keys: JSONObject, eos_tokens: Mapping[int, str] | None = None) -> AnyTokenizer:
    """Build the tokenizer of a GGUF file from the file's metadata; see `gguf_tokenizer.load_gguf_tokenizer`."""
    module = import_module("specdec.text.gguf_tokenizer")
    return cast(AnyTokenizer, module.load_gguf_tokenizer(path, keys, eos_tokens or {}))


def resolve_tokenizer(
    given: str | os.PathLike[str] | AnyTokenizer | None, target: Checkpoint | None, n_rows: int
) -> AnyTokenizer:
    """Return the tokenizer for a target model: the given one, else the target's own, else the default one of a llama2.c model.

    The target's end-of-sequence tokens are added to a tokenizer that is loaded from a file: the model was trained on them, and
    the file may lack them.

    Args:
        given: A tokenizer object, which is returned unchanged, or the path of a tokenizer, or None.
        target: The target's checkpoint, if it has files.
        n_rows: The size of the target's vocabulary.

    Raises:
        TokenizerError: The file is not a tokenizer.
    """
    if isinstance(given, AnyTokenizer):
        return given
    if given is None and target and target.vocabulary:
        return load_gguf_tokenizer(target.path, target.vocabulary)
    bos, eos_tokens = (target.bos_token_id, target.eos_tokens) if target else (None, {})
    if target and target.vocabulary:  # the keys of a GGUF file name them
        reader = import_module("specdec.text.gguf_tokenizer")
        bos, eos_tokens = reader.read_gguf_bos_and_eos(target.path, target.vocabulary, n_rows)
    path = find_tokenizer(None if given is None else check_path("tokenizer", given), target.path if target else None, n_rows)
    keys = {} if path.is_dir() or not path.exists() else read_vocabulary(path)
    return load_gguf_tokenizer(path, keys, eos_tokens) if keys else load_tokenizer(path, bos, eos_tokens)


# Vocabularies: which ids mean the same in two models, and which ids a model can generate


@runtime_checkable
class NamedTokens(Protocol):
    """The protocol of tokenizers that have a name for each token, such as `HFTokenizer`."""

    def id_to_token(self, token: int) -> str | None:
        """Return the name of a token id, also of a special token, or None for an unknown id."""

    def is_same_file(self, path: Path) -> bool:
        """Return whether a tokenizer.json, or that in a folder, has the same bytes as this tokenizer's own file."""

    def has_same_decoder(self, other: object) -> bool:
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
        draft = target if is_copy else load_tokenizer(draft)
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
        names = {token: name for name, token in tokenizer.specials.items()}
    token_bytes = [tokenizer.token_to_bytes(token) for token in range(n)]
    return [names.get(token) or b"" if data is None else data for token, data in enumerate(token_bytes)]


def resolve_shared_vocabulary(
    tokenizer: AnyTokenizer, n_target_rows: int, keys: JSONObject, name: str, draft: Checkpoint
) -> SharedVocabulary:
    """Return the token ids that a target and a draft can both generate.

    Args:
        tokenizer: The target's tokenizer.
        n_target_rows: The size of the target's vocabulary.
        keys: The keys of the GGUF file that `tokenizer` was made from; a draft with equal keys needs no comparison.
        name: The kind of draft, for errors.
        draft: The draft's checkpoint.

    Raises:
        ValueError: The target and the draft share too few tokens.
        TokenizerError: The draft's tokenizer is not valid.
    """
    n_rows = draft.config.vocab_size
    if draft.vocabulary:
        draft_tokenizer = tokenizer if draft.vocabulary == keys else load_gguf_tokenizer(draft.path, draft.vocabulary)
        return compare_vocabularies(tokenizer, n_target_rows, draft_tokenizer, n_rows)
    if (draft.path / TOKENIZER_FILE).exists():
        return compare_vocabularies(tokenizer, n_target_rows, draft.path, n_rows)
    return assume_shared_vocabulary(tokenizer, n_target_rows, f"{name} {draft.path}", n_rows)
