"""A safetensors file to tensors that are read when they are asked for, and every check of its header.

Layout (https://github.com/huggingface/safetensors): the header's length, u64 little-endian; the header, a JSON object of at most
100 MB that begins with `{`; the bytes of all tensors, row-major, little-endian, without holes or overlaps, to the file's end.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.families.config_values import CheckpointError, shown
from specdec.loaders.checkpoint import BYTE, FLOATS, FileTensor, ModelFile
from specdec.loaders.format_sniffing import DOWNLOAD_AGAIN, what_is
from specdec.loaders.json_file import MAX_BYTES, parse_object
from specdec.runtime.simd import Int64

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # files of a folder: all its weights, and what names shards
PICKLE = "pytorch_model.bin"  # what older folders have in their place
LENGTH_BYTES = 8
MAX_DIMENSIONS = 64
METADATA = "__metadata__"
INTEGERS, OCTETS = {"I64": np.dtype("<i8")}, {"U8": BYTE}  # the second are no numbers by themselves
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class Entry(NamedTuple):
    """A tensor of a file: what it holds, and from which byte of the file on, to before which."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class SafetensorsFile:
    """An open file and the entries of its header. Raises CheckpointError for a header that is not that of a whole file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = ModelFile(path)
        self.entries = self._read_header()

    def tensor(self, name: str, dtypes: Mapping[str, np.dtype[Any]] = FLOATS) -> FileTensor:
        """Raises CheckpointError for another type than one of those."""
        entry = self.entries[name]
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{self.path}: {shown(name)} is {shown(entry.dtype)}; expected {', '.join(dtypes)}")
        return FileTensor(self._file, name, entry.shape, entry.first, dtype=dtypes[entry.dtype])

    def integers(self, name: str) -> Int64:
        """The whole numbers of a tensor, in a row. Raises CheckpointError for what are not I64."""
        numbers = self.tensor(name, INTEGERS)
        return self._file.read(numbers.start, math.prod(numbers.shape) * 8).view("<i8").astype(np.int64)

    def _read_header(self) -> dict[str, Entry]:
        size = self._file.size
        if size < LENGTH_BYTES:
            what = "is empty" if size == 0 else f"is truncated: {size} bytes cannot hold a header"
            raise CheckpointError(f"{self.path} {what}; expected a safetensors file")
        n_bytes = int.from_bytes(self._file.read(0, LENGTH_BYTES).tobytes(), "little")
        if n_bytes > MAX_BYTES and (flaw := what_is(self.path, "expected a safetensors file")):
            raise CheckpointError(f"{self.path} {flaw}")
        if n_bytes > MAX_BYTES:
            raise CheckpointError(f"{self.path} is no safetensors file: a header of {n_bytes} bytes; at most {MAX_BYTES} may be")
        start = LENGTH_BYTES + n_bytes
        if start > size:
            raise CheckpointError(f"{self.path} is truncated: {size} bytes, its header alone has {n_bytes}; {DOWNLOAD_AGAIN}")
        data = self._file.read(LENGTH_BYTES, n_bytes).tobytes()
        if data[:1] != b"{":
            raise CheckpointError(f"{self.path} is no safetensors file: its header does not begin with an opening brace")
        header = parse_object(self.path, data, "the header")
        metadata = header.pop(METADATA, None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise CheckpointError(f"{self.path}: {METADATA} is {shown(metadata)}; expected an object of strings")
        entries = {name: self._entry(name, value, start) for name, value in header.items()}
        self._check_spans(entries, start)
        return entries

    def _entry(self, name: str, value: Any, start: int) -> Entry:
        keys: dict[str, Any] = value if isinstance(value, dict) else {}
        dtype, shape, offsets = (keys.get(key, 0) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(dtype, str) and _are_whole(shape) and _are_whole(offsets) and len(offsets) == 2):
            raise CheckpointError(f"{self.path}: {shown(name)} is {shown(value)}; expected dtype, shape and two data_offsets")
        first, last = offsets
        size = math.prod(shape) * BITS[dtype] if dtype in BITS else None
        if size is not None and size != 8 * (last - first):
            raise CheckpointError(f"{self.path}: {shown(name)} of {dtype} {shown(shape)} lies in {last - first} bytes")
        return Entry(dtype, tuple(shape), start + first, start + last)

    def _check_spans(self, entries: dict[str, Entry], start: int) -> None:
        """Every byte behind the header belongs to one tensor."""
        at = start
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.first != at or entry.last < at:
                what = "overlaps the one before it" if entry.first < at else "leaves a hole before it"
                what = what if entry.first <= entry.last else "ends before it begins"
                raise CheckpointError(f"{self.path}: {shown(name)} {what}, at {entry.first - start} of the data")
            at = entry.last
        if at != self._file.size:
            what = "truncated" if self._file.size < at else "too long"
            told = f"{self.path} is {what}: {self._file.size} bytes, its header describes {at}; {DOWNLOAD_AGAIN}"
            raise CheckpointError(told)


def _are_whole(numbers: Any) -> bool:
    """Whether it is a short list of whole numbers that an offset can be."""
    is_short = isinstance(numbers, list) and len(numbers) <= MAX_DIMENSIONS
    return is_short and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
