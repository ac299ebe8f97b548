"""Select the tokenizer of a model, and find the token ids that a draft shares with a target."""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from specdec.argument_checks import check_path
from specdec.loaders import Checkpoint, read_vocabulary
from specdec.loaders.model_file import TOKENIZER_FILE, identify_file
from specdec.loaders.model_paths import find_tokenizer
from specdec.text.shared_vocabulary import SharedVocabulary, assume_shared_vocabulary, compare_vocabularies
from specdec.tokenizer import AnyTokenizer, Tokenizer, TokenizerError

EXPECTED_TOKENIZER = "expected a tokenizer.json, a folder that holds one, a GGUF file, or a tokenizer.bin of llama2.c"


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


def load_gguf_tokenizer(path: Path, keys: Mapping[str, Any], eos_tokens: Mapping[int, str] | None = None) -> AnyTokenizer:
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


def resolve_shared_vocabulary(
    tokenizer: AnyTokenizer, n_target_rows: int, keys: Mapping[str, Any], name: str, draft: Checkpoint
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
