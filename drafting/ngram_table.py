"""Tables of n-grams: what mostly followed two tokens, or one, in text that was counted; in memory and in a file.

A file is little-endian: the magic, the version as uint32, the size V of the vocabulary as uint32, the number n of contexts as
uint64; then n keys int64 in rising order, n tokens uint32, n shares uint8. The key of tokens a, b is (a + 1) V + b, of b alone b.
A share is how often the token followed, in 255ths: k / (m + 1) for one that came k times in m.
"""

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..readers import CheckpointError
from ..readers.model_file import telling_os_errors

MAGIC, VERSION = b"n-grams\0", 1
HEADER = struct.Struct("<8sIIQ")
KEY, TOKEN, SHARE = np.dtype("<i8"), np.dtype("<u4"), np.dtype("<u1")
MOST_TOKENS = 1 << 20  # of a vocabulary: three of its ids fit an int64
ENTRY_BYTES = KEY.itemsize + TOKEN.itemsize + SHARE.itemsize
LEAST_COUNT = 2  # of a context of two tokens: one that came once tells nothing that pays for its room
Ints = npt.NDArray[Any]


class NgramTable:
    """What mostly follows two tokens, or one, with its share. vocab_size: ids are below it; the columns are those of a file."""

    def __init__(self, vocab_size: int, keys: Ints, tokens: Ints, shares: Ints) -> None:
        self.vocab_size, self.keys, self.tokens, self.shares = vocab_size, keys, tokens, shares
        self._find = keys.searchsorted

    def __repr__(self) -> str:
        return f"<NgramTable of {self.keys.size} contexts, {self.vocab_size} tokens>"

    def after(self, before: int, last: int) -> tuple[int, float]:
        """The token that mostly followed those two, else the last alone, and its share below 1; -1 and 0 where none is known."""
        for key in ((before + 1) * self.vocab_size + last, last):
            place = self._find(np.int64(key))
            if place < self.keys.size and self.keys[place] == key:
                return int(self.tokens[place]), int(self.shares[place]) / 255
        return -1, 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return NgramTable, (self.vocab_size, self.keys, self.tokens, self.shares)


def count(texts: Iterable[list[int]], vocab_size: int) -> NgramTable:
    """The table of texts, each of ids below vocab_size; n-grams do not cross from one to the next.

    Raises ValueError for a vocabulary of more than MOST_TOKENS, an id that is not of it, and texts that have no two tokens.
    """
    if vocab_size > MOST_TOKENS:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; n-grams are counted of at most {MOST_TOKENS}")
    codes = [np.zeros(0, np.int64)]  # a context's key and what followed it, in one number
    for text in texts:
        tokens = np.array(text, np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"a text of token {tokens.max()}; the vocabulary has {vocab_size}")
        codes.append(tokens[:-1] * vocab_size + tokens[1:])
        codes.append(((tokens[:-2] + 1) * vocab_size + tokens[1:-1]) * vocab_size + tokens[2:])
    found, counts = np.unique(np.concatenate(codes), return_counts=True)
    keys = found // vocab_size
    contexts, first = np.unique(keys, return_index=True)
    if not contexts.size:
        raise ValueError("nothing to count: no text has two tokens")
    totals = np.add.reduceat(counts, first)
    order = np.lexsort((found, -counts, keys))[first]  # of each context the commonest, of equals that of the lower id
    shares = 255 * counts[order] / (totals + 1)
    kept = (contexts < vocab_size) | (totals >= LEAST_COUNT)
    tokens = (found[order] % vocab_size).astype(TOKEN)
    return NgramTable(vocab_size, contexts[kept], tokens[kept], np.maximum(shares, 1).astype(SHARE)[kept])


def is_table(path: Path) -> bool:
    """Whether a file begins as a table does. Raises CheckpointError for one that cannot be read."""
    with telling_os_errors(path):
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC


def load_table(path: Path) -> NgramTable:
    """The table in a file. Raises CheckpointError."""
    with telling_os_errors(path):
        data = path.read_bytes()
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise CheckpointError(f"{path} is no table of n-grams, which `specdec ngrams` makes")
    _, version, vocab_size, n = HEADER.unpack_from(data)
    if version != VERSION:
        raise CheckpointError(f"{path} is a table of n-grams of version {version}; this program reads version {VERSION}")
    if not 0 < vocab_size <= MOST_TOKENS:
        raise CheckpointError(f"{path} has a vocabulary of {vocab_size} tokens; expected 1 to {MOST_TOKENS}")
    if len(data) != HEADER.size + n * ENTRY_BYTES:
        expected = HEADER.size + n * ENTRY_BYTES
        raise CheckpointError(f"{path} has {len(data)} bytes, and its header says {n} contexts in {expected}; is it whole?")
    at_tokens = HEADER.size + n * KEY.itemsize
    keys = np.frombuffer(data, KEY, n, HEADER.size).astype(np.int64)
    tokens = np.frombuffer(data, TOKEN, n, at_tokens)
    shares = np.frombuffer(data, SHARE, n, at_tokens + n * TOKEN.itemsize)
    if n and not (keys[0] >= 0 and keys[-1] < (vocab_size + 1) * vocab_size and (keys[1:] > keys[:-1]).all()):
        raise CheckpointError(f"{path} is damaged: its contexts are not in order, or none of {vocab_size} tokens")
    if n and int(tokens.max()) >= vocab_size:
        raise CheckpointError(f"{path} is damaged: token {tokens.max()} of a vocabulary of {vocab_size}")
    if n and not 0 < int(shares.min()) <= int(shares.max()) < 255:
        raise CheckpointError(f"{path} is damaged: a share of none or of all")
    return NgramTable(vocab_size, keys, tokens, shares)


def check_place(path: Path) -> None:
    """Before a long run: whether a table can be put there, where nothing but a table may lie already. Raises ValueError."""
    try:
        if path.exists() and not is_table(path):
            raise ValueError(f"{path} is no table of n-grams, and is left as it is; name another file with -o")
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


def save_table(table: NgramTable, path: Path) -> None:
    """Write it beside its place and put it there when it is whole. Raises ValueError where it cannot be written."""
    partial = _partial(path)
    columns = (table.keys.astype(KEY), table.tokens.astype(TOKEN), table.shares.astype(SHARE))
    try:
        partial.write_bytes(
            HEADER.pack(MAGIC, VERSION, table.vocab_size, table.keys.size) + b"".join(column.tobytes() for column in columns)
        )
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.part")
