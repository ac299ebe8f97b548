"""Which tokenizer is a model's: one that is named, its own, or the one beside it; and which ids a draft shares with it."""

import os
from collections.abc import Mapping
from typing import Any

from specdec.loaders import Checkpoint, read_vocabulary
from specdec.loaders.model_lookup import find_tokenizer
from specdec.text.gguf_tokenizer import gguf_marks, gguf_tokenizer
from specdec.text.hf_tokenizer import TOKENIZER_FILE, load_tokenizer
from specdec.text.vocabulary import Vocabulary, common_vocabulary, presumed_vocabulary
from specdec.tokenizer import AnyTokenizer
from specdec.validation import file_name


def tokenizer_of(given: str | os.PathLike[str] | AnyTokenizer | None, target: Checkpoint | None, rows: int) -> AnyTokenizer:
    """The tokenizer that was given, else the target's own or the one that lies where a llama2.c file's is looked for.

    Whichever it is, what ends the target's texts ends them: a model has learnt its end marks, and a tokenizer may lack them.
    """
    if isinstance(given, AnyTokenizer):
        return given
    if given is None and target and target.vocabulary:
        return gguf_tokenizer(target.path, target.vocabulary)
    bos, marks = (target.bos, target.end_marks) if target else (None, {})
    if target and target.vocabulary:  # of a GGUF file, whose keys name them
        bos, marks = gguf_marks(target.path, target.vocabulary, rows)
    path = find_tokenizer(None if given is None else file_name("tokenizer", given), target.path if target else None, rows)
    keys = {} if path.is_dir() or not path.exists() else read_vocabulary(path)
    return gguf_tokenizer(path, keys, marks) if keys else load_tokenizer(path, bos, marks)


def vocabulary_with(tokenizer: AnyTokenizer, rows: int, keys: Mapping[str, Any], name: str, draft: Checkpoint) -> Vocabulary:
    """The ids that a target, of that tokenizer and so many rows, and a draft may say; name: the draft's, in errors.

    keys: of the GGUF file that the tokenizer was made of: the same ones need no look. Raises ValueError where they share none,
    TokenizerError for a draft's tokenizer that is none.
    """
    n_rows = draft.config.vocab_size
    if draft.vocabulary:
        own = tokenizer if draft.vocabulary == keys else gguf_tokenizer(draft.path, draft.vocabulary)
        return common_vocabulary(tokenizer, rows, own, n_rows)
    if (draft.path / TOKENIZER_FILE).exists():
        return common_vocabulary(tokenizer, rows, draft.path, n_rows)
    return presumed_vocabulary(tokenizer, rows, f"{name} {draft.path}", n_rows)
