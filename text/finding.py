"""Which tokenizer is a model's: one that is named, its own, or the one beside it."""

import os

from ..checks import file_name
from ..readers import Checkpoint, read_vocabulary
from ..readers.files import find_tokenizer
from ..tokenizer import AnyTokenizer
from .tokenizer_gguf import gguf_tokenizer
from .tokenizer_json import load_tokenizer


def tokenizer_of(given: str | os.PathLike[str] | AnyTokenizer | None, target: Checkpoint | None, rows: int) -> AnyTokenizer:
    """The tokenizer that was given, else the target's own or the one that lies where a llama2.c file's is looked for."""
    if isinstance(given, AnyTokenizer):
        return given
    if given is None and target and target.vocabulary:
        return gguf_tokenizer(target.path, target.vocabulary)
    bos, marks = (target.bos, target.end_marks) if target else (None, {})
    path = find_tokenizer(None if given is None else file_name("tokenizer", given), target.path if target else None, rows)
    keys = {} if path.is_dir() or not path.exists() else read_vocabulary(path)
    return gguf_tokenizer(path, keys) if keys else load_tokenizer(path, bos, marks)
