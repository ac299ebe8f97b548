"""Read a safetensors file: check its header, and read tensors when they are indexed.

Layout (https://github.com/huggingface/safetensors): the header's length, u64 little-endian; the header, a JSON object of at most
100 MB that begins with `{`; the bytes of all tensors, row-major, little-endian, without holes or overlaps, to the file's end.
"""

import math
from pathlib import Path
from typing import Any

from specdec.argument_checks import CheckpointError, JSONDict, format_json_value
from specdec.loaders.checkpoint import TensorEntry, TensorFile
from specdec.loaders.model_file import DOWNLOAD_AGAIN_HINT, MAX_JSON_BYTES, identify_file, parse_json_object

LENGTH_BYTES = 8
MAX_DIMENSIONS = 64
METADATA_KEY = "__metadata__"
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class SafetensorsFile(TensorFile):
    """A safetensors file with the parsed entries of its header; tensors are read when they are indexed.

    Raises CheckpointError if the file is not safetensors, is truncated, or has a damaged header.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and read its header; raise CheckpointError if it is not valid."""
        super().__init__(path)
        self.entries = self._read_header()

    def _read_header(self) -> dict[str, TensorEntry]:
        """Read and check the header, and return its entries by tensor name; raise CheckpointError if it is not valid."""
        size = self._file.size
        if size < LENGTH_BYTES:
            problem = "is empty" if size == 0 else f"is truncated: {size} bytes cannot hold a header"
            raise CheckpointError(f"{self.path} {problem}; expected a safetensors file")
        n_bytes = int.from_bytes(self._file.read(0, LENGTH_BYTES).tobytes(), "little")
        if n_bytes > MAX_JSON_BYTES:
            unknown = f"is not a safetensors file: its header has {n_bytes} bytes; expected at most {MAX_JSON_BYTES}"
            raise CheckpointError(f"{self.path} {identify_file(self.path, 'expected a safetensors file') or unknown}")
        start = LENGTH_BYTES + n_bytes
        if start > size:
            raise CheckpointError(
                f"{self.path} is truncated: {size} bytes, its header alone has {n_bytes}; {DOWNLOAD_AGAIN_HINT}"
            )
        data = self._file.read(LENGTH_BYTES, n_bytes).tobytes()
        if data[:1] != b"{":
            raise CheckpointError(f"{self.path} is not a safetensors file: its header does not begin with an opening brace")
        header = parse_json_object(self.path, data, "the header")
        metadata = header.pop(METADATA_KEY, None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise CheckpointError(f"{self.path}: {METADATA_KEY} is {format_json_value(metadata)}; expected an object of strings")
        entries = {name: self._parse_entry(name, value, start) for name, value in header.items()}
        self._check_spans(entries, start)
        return entries

    def _parse_entry(self, name: str, value: object, start: int) -> TensorEntry:
        """Return a checked entry from its JSON value; raise CheckpointError if it is not valid. start: byte after the header."""
        keys: JSONDict = value if isinstance(value, dict) else {}
        dtype, shape, offsets = (keys.get(key, 0) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(dtype, str) and _is_int_list(shape) and _is_int_list(offsets) and len(offsets) == 2):
            raise self._file.make_error(name, f"is {format_json_value(value)}; expected dtype, shape and two data_offsets")
        first, last = offsets
        size = math.prod(shape) * DTYPE_BITS[dtype] if dtype in DTYPE_BITS else None
        if size is not None and size != 8 * (last - first):
            raise self._file.make_error(name, f"of {dtype} {format_json_value(shape)} lies in {last - first} bytes")
        return TensorEntry(dtype, tuple(shape) or (1,), start + first, last - first)  # a scalar counts as a vector of one number

    def _check_spans(self, entries: dict[str, TensorEntry], start: int) -> None:
        """Raise CheckpointError unless every byte of the file after the header belongs to exactly one tensor."""
        at = start
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.n_bytes < 0:
                raise self._file.make_error(name, f"ends before it begins, at {entry.start - start} of the data")
            if entry.start != at:
                problem = "overlaps the one before it" if entry.start < at else "leaves a hole before it"
                raise self._file.make_error(name, f"{problem}, at {entry.start - start} of the data")
            at += entry.n_bytes
        if at != self._file.size:
            problem = "truncated" if self._file.size < at else "too long"
            raise CheckpointError(
                f"{self.path} is {problem}: {self._file.size} bytes, its header describes {at}; {DOWNLOAD_AGAIN_HINT}"
            )


def _is_int_list(numbers: Any) -> bool:
    """Return whether a value from a header is a list of at most MAX_DIMENSIONS integers from 0 to 2^63 - 1."""
    is_short = isinstance(numbers, list) and len(numbers) <= MAX_DIMENSIONS
    return is_short and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
