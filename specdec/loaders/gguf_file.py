"""Read a GGUF file: check its header, parse its metadata, and read tensors when they are indexed.

Layout (ggml's docs/gguf.md), little-endian: "GGUF", u32 version, u64 number of tensors, u64 number of keys. Then the keys, each a
string (u64 length and bytes), a u32 type and a value; an array is its u32 type, u64 length and values. Then for each tensor its
name, u32 number of dimensions, a u64 for each (innermost first), u32 type and u64 offset. Then the bytes of all tensors, from the
next multiple of the alignment on, at multiples of it. Versions 2 and 3 do not differ in anything that is read here.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.argument_checks import CheckpointError, JSONDict, format_json_value
from specdec.loaders.checkpoint import BYTE, FLOATS, FP32, INTEGERS, Dtype, FileTensor, TensorEntry, TensorFile
from specdec.loaders.gguf_blocks import BlockTensor
from specdec.loaders.model_file import DOWNLOAD_AGAIN_HINT, GGUF_MAGIC, MAX_JSON_BYTES, ModelFile, identify_file
from specdec.quant.gguf_repacking import BLOCK_TYPES

VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
MAX_DIMENSIONS = 4
MAX_ARRAY_ITEMS = 1 << 22  # the longest known arrays are 400,000 merges
MAX_NAME_BYTES = 1 << 16
HEADER_CHUNK_BYTES = 1 << 20  # first read of a header
STRINGS_CHUNK_BYTES, STRINGS_BETWEEN_CHUNKS = 1 << 18, 64  # strings are read in chunks at once, and in between one by one
STRING, ARRAY, BOOL, FLOAT32 = 8, 9, 7, 6
NUMBER_DTYPES: dict[int, Dtype] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"), 5: np.dtype("<i4"),
    FLOAT32: FP32, BOOL: np.dtype("u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
BLOCK_SIZES = {  # weights and bytes of a block, for each supported type
    **{name: (1, dtype.itemsize) for name, dtype in (FLOATS | INTEGERS).items()},
    **{name: (block.layout.block_columns, block.n_bytes) for name, block in BLOCK_TYPES.items()},
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFFile(TensorFile):
    """A GGUF file with its parsed metadata and tensor entries; tensors are read when they are indexed.

    Raises CheckpointError if the file is not GGUF, is truncated, or has a damaged header.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and read its header; raise CheckpointError if it is not valid."""
        super().__init__(path)
        self.metadata: JSONDict = {}
        self._read_header(_HeaderReader(self._file))

    def get_tensor(self, name: str, types: Mapping[str, Dtype] = FLOATS) -> Any:
        """Return the tensor with a name for reading later; the matrices of a quantized tensor are stacked along the rows.

        Raises:
            CheckpointError: The type is none of `types` and has no supported blocks, or the tensor is a quantized vector.
        """
        entry = self.entries[name]
        if entry.type not in BLOCK_TYPES or len(entry.shape) == 1:
            return super().get_tensor(name, types)
        return BlockTensor(self.get_raw_tensor(name), entry.type, f"{self.path} is damaged: {format_json_value(name)}")

    def get_raw_tensor(self, name: str) -> FileTensor:
        """Return the tensor with a name, of any type, as raw bytes (rows, bytes per row), for reading later."""
        entry = self.entries[name]
        rows = math.prod(entry.shape[:-1])
        return FileTensor(self._file, name, (rows, entry.n_bytes // rows), entry.start, BYTE)

    def _read_header(self, header: "_HeaderReader") -> None:
        """Fill `metadata` and `entries` from the header; raise CheckpointError if it is not that of a supported GGUF file."""
        if header.read_bytes(min(4, self._file.size)) != GGUF_MAGIC:
            problem = identify_file(self.path, "expected a GGUF file")
            unknown = f"is not a GGUF file: it does not begin with GGUF; {DOWNLOAD_AGAIN_HINT}"
            raise CheckpointError(f"{self.path} {problem or unknown}")
        version = header.read_u32()
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is a GGUF file of version {version}; expected {' or '.join(map(str, VERSIONS))}")
        n_tensors, n_keys = header.read_u64(), header.read_u64()
        header.check_count(n_tensors, 25, "tensors")
        header.check_count(n_keys, 14, "keys")
        for _ in range(n_keys):
            key = header.read_name("key")
            if key in self.metadata:
                raise self._file.make_error(key, "is given twice")
            self.metadata[key] = header.read_value(key, header.read_u32())
        for _ in range(n_tensors):
            name = header.read_name("tensor")
            if name in self.entries:
                raise self._file.make_error(name, "is given twice")
            self.entries[name] = self._read_entry(name, header)
        self._resolve_offsets(header.position)

    def _read_entry(self, name: str, header: "_HeaderReader") -> TensorEntry:
        """Read the next tensor's entry from the header and check it; its offset is still relative to the data section.

        Raises:
            CheckpointError: The shape or the type is not valid or not supported.
        """
        n_dimensions = header.read_u32()
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise self._file.make_error(name, f"has {n_dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(header.read_u64() for _ in range(n_dimensions))[::-1]
        if not all(shape):
            raise self._file.make_error(name, f"has the shape {shape}; expected no dimension of 0")
        number, offset = header.read_u32(), header.read_u64()
        type_name = TENSOR_TYPES.get(number, f"number {number}")
        if type_name not in BLOCK_SIZES:
            known = ", ".join([*FLOATS, *BLOCK_TYPES])
            advice = f"download or convert the model again as Q4_K_M or Q4_0; supported: {known}"
            raise self._file.make_error(name, f"is of type {type_name}, which is not supported; {advice}")
        n_weights, n_bytes = BLOCK_SIZES[type_name]
        if shape[-1] % n_weights:
            raise self._file.make_error(name, f"has rows of {shape[-1]} weights; {type_name} needs a multiple of {n_weights}")
        return TensorEntry(type_name, shape, offset, math.prod(shape) // n_weights * n_bytes)

    def _resolve_offsets(self, end: int) -> None:
        """Make the offsets of all tensor entries absolute, after checking that tensors are aligned, in the file and apart.

        Args:
            end: The first byte after the header.

        Raises:
            CheckpointError: A check fails.
        """
        alignment = self.metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._file.make_error(ALIGNMENT_KEY, f"is {format_json_value(alignment)}; expected a power of two")
        start = end_of_last = -(-end // alignment) * alignment
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1][2:]):
            first = start + entry.start
            if entry.start % alignment:
                raise self._file.make_error(name, f"begins at {entry.start}, which is not a multiple of {alignment}")
            if first < end_of_last:
                raise self._file.make_error(name, f"overlaps the tensor before it, at {entry.start} of the data")
            end_of_last = first + entry.n_bytes
            if end_of_last > self._file.size:
                problem = f"ends at {end_of_last}, but the file has {self._file.size} bytes: it is truncated"
                raise self._file.make_error(name, f"{problem}; {DOWNLOAD_AGAIN_HINT}")
            self.entries[name] = entry._replace(start=first)


class _HeaderReader:
    """A cursor that parses the header of a GGUF file, value after value.

    Its methods raise CheckpointError at the file's end, and for lengths that would exhaust the memory.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file, self.position = file, 0
        self._data = b""

    def check_count(self, n: int, min_bytes: int, item_name: str) -> None:
        """Raise CheckpointError if the rest of the file is too short for n items of min_bytes each."""
        if n * min_bytes > self._file.size - self.position:
            raise CheckpointError(f"{self._file.path} is damaged: it declares {n} {item_name} in {self._file.size} bytes")

    def read_bytes(self, n_bytes: int) -> bytes:
        """Read the next n_bytes of the header, move the cursor behind them, and return them."""
        self._load_until(self.position + n_bytes)
        self.position += n_bytes
        return self._data[self.position - n_bytes : self.position]

    def read_u32(self) -> int:
        """Read the next 4 bytes of the header as an unsigned integer."""
        return int(_U32.unpack(self.read_bytes(4))[0])

    def read_u64(self) -> int:
        """Read the next 8 bytes of the header as an unsigned integer."""
        return int(_U64.unpack(self.read_bytes(8))[0])

    def read_string(self) -> str:
        """Read the next string of the header, a u64 length and bytes; bytes that are not UTF-8 become surrogate escapes."""
        return self.read_bytes(self.read_u64()).decode("utf-8", "surrogateescape")

    def read_name(self, owner: str) -> str:
        """Read the next string of the header as the name of a key or a tensor.

        Args:
            owner: "key" or "tensor", for errors.

        Raises:
            CheckpointError: The name is empty or too long.
        """
        n = self.read_u64()
        if not 1 <= n <= MAX_NAME_BYTES:
            raise CheckpointError(f"{self._file.path} is damaged: a {owner} has a name of {n} bytes")
        return self.read_bytes(n).decode("utf-8", "surrogateescape")

    def read_value(self, key: str, type_id: int) -> object:
        """Read the next metadata value of the header: a number, a boolean, a string, or a list of one of the three types.

        Args:
            key: The value's key, for errors.
            type_id: Number of the value's type in GGUF.

        Raises:
            CheckpointError: The type is unknown, or an array is nested or too long.
        """
        if type_id == STRING:
            return self.read_string()
        if type_id == ARRAY:
            inner, n = self.read_u32(), self.read_u64()
            if n > MAX_ARRAY_ITEMS:
                raise self._file.make_error(key, f"is an array of {n}; expected at most {MAX_ARRAY_ITEMS}")
            return self._read_strings(n) if inner == STRING else self._read_numbers(key, inner, n)
        return self._read_numbers(key, type_id, 1)[0]

    def _read_numbers(self, key: str, type_id: int, n: int) -> list[object]:
        """Read the next n numbers or booleans of a GGUF type; raise CheckpointError for another type or a damaged boolean."""
        if type_id not in NUMBER_DTYPES:
            raise self._file.make_error(key, f"is of type {type_id}; expected 0 to 12, no nested arrays")
        numbers = np.frombuffer(self.read_bytes(n * NUMBER_DTYPES[type_id].itemsize), NUMBER_DTYPES[type_id])
        if type_id == BOOL:
            if numbers.max(initial=0) > 1:
                raise self._file.make_error(key, f"is {numbers.max()}; expected a boolean, 0 or 1")
            return [bool(number) for number in numbers]
        if type_id == FLOAT32 and n == 1:  # the shortest decimal: 1e-5, not 9.999999747378752e-06
            return [float(str(numbers[0]))]
        result: list[object] = numbers.tolist()
        return result

    def _read_strings(self, n: int) -> list[str]:
        """Read the next n strings of the header like n calls of `read_string`, in a fifth of the time."""
        self.check_count(n, 8, "strings")
        result: list[str] = []
        while len(result) < n:
            result += self._take_short_strings(n - len(result))
            for _ in range(min(n - len(result), STRINGS_BETWEEN_CHUNKS)):
                result.append(self.read_string())
        return result

    def _take_short_strings(self, n: int) -> list[str]:
        """Read the next strings in the buffer, at most n, up to one that is empty, has 256 bytes or more, or holds a zero byte.

        The length of any other string is a byte before seven zeros. So numpy finds all lengths at once, and the strings are
        decoded as one text, in which a zero in the place of its length begins each of them.
        """
        data = np.frombuffer(self._data, np.uint8, offset=self.position)[:STRINGS_CHUNK_BYTES].copy()
        nonzero = np.flatnonzero(data)
        starts = nonzero[:-1][np.diff(nonzero) == 8][:n]
        ends = starts + 8 + data[starts]
        expected_starts = np.append(0, ends[:-1])[: starts.size]
        is_valid = (ends <= data.size) & (starts == expected_starts)
        n_strings = starts.size if is_valid.all() else int(is_valid.argmin())
        end = int(ends[n_strings - 1]) if n_strings else 0
        is_nonzero = data[:end] != 0
        if np.count_nonzero(is_nonzero) != end - 7 * n_strings:  # a string holds a zero byte
            return []
        data[starts] = 0
        self.position += end
        text = bytes(data[:end][is_nonzero]).decode("utf-8", "surrogateescape")
        return text.split("\0")[1:]

    def _load_until(self, end: int) -> None:
        """Read the file into the buffer until the buffer holds its first `end` bytes or more.

        Raises:
            CheckpointError: The file is shorter, or the header is too long.
        """
        if end > self._file.size:
            raise CheckpointError(
                f"{self._file.path} is truncated: {self._file.size} bytes, its header is longer; {DOWNLOAD_AGAIN_HINT}"
            )
        if end > MAX_JSON_BYTES:
            raise CheckpointError(f"{self._file.path} is not a GGUF file: its header has more than {MAX_JSON_BYTES} bytes")
        if end > len(self._data):
            self._data = self._file.read(0, min(max(end, 2 * len(self._data), HEADER_CHUNK_BYTES), self._file.size)).tobytes()
