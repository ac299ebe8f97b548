"""A GGUF file to keys and tensors that are read when they are asked for, and every check of its header.

Layout (ggml's docs/gguf.md), little-endian: "GGUF", u32 version, u64 tensors, u64 keys; the keys, each a string (u64 length and
bytes), a u32 type and a value, an array being its u32 type, u64 length and values; for each tensor its name, u32 dimensions, a
u64 for each, the innermost first, u32 type and u64 offset; the bytes of all tensors, from the next multiple of the alignment on,
at multiples of it. Versions 2 and 3 differ in nothing that is read here.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.families.config_values import CheckpointError, shown
from specdec.loaders.checkpoint import BYTE, FLOATS, FP32, FileTensor, ModelFile
from specdec.loaders.format_sniffing import DOWNLOAD_AGAIN, what_is
from specdec.loaders.gguf_blocks import BLOCKS, BlockTensor
from specdec.loaders.json_file import MAX_BYTES
from specdec.runtime.simd import Int64

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT, MOST_ALIGNMENT = 32, 1 << 20
MOST_DIMENSIONS = 4
MOST_ITEMS = 1 << 22  # of an array: the longest that is known are 400,000 merges
LONGEST_NAME = 1 << 16
WINDOW = 1 << 20  # bytes of a header that are read at first
STRING, ARRAY, BOOL, FLOAT32 = 8, 9, 7, 6
NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"), 5: np.dtype("<i4"),
    FLOAT32: FP32, BOOL: np.dtype("u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
INTEGERS = "I64"
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
SIZES = {  # weights and bytes of a block, of what is read
    **{kind: (1, dtype.itemsize) for kind, dtype in FLOATS.items()},
    INTEGERS: (1, 8),
    **{kind: (block.n_weights, block.n_bytes) for kind, block in BLOCKS.items()},
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Entry(NamedTuple):
    """A tensor of a file: its type's name, its shape, the outermost dimension first, and its bytes in the file."""

    type: str
    shape: tuple[int, ...]
    first: int
    n_bytes: int


class GgufFile:
    """An open file, its keys and the entries of its tensors. Raises CheckpointError for a header that is no whole file's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = ModelFile(path)
        self.keys: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self._read_header(_Header(self._file))

    def tensor(self, name: str) -> FileTensor | BlockTensor:
        """A tensor of the file's; blocks of rows, those of several matrices one below the other."""
        entry = self.entries[name]
        if entry.type in FLOATS:
            return FileTensor(self._file, name, entry.shape, entry.first, dtype=FLOATS[entry.type])
        if len(entry.shape) < 2 or entry.type not in BLOCKS:
            what = "a vector of" if len(entry.shape) == 1 else "of"
            raise CheckpointError(f"{self.path}: {shown(name)} is {what} type {entry.type}; expected {', '.join(FLOATS)}")
        return BlockTensor(self.stored(name), entry.type, f"{self.path} is damaged: {shown(name)}")

    def integers(self, name: str) -> Int64:
        """The whole numbers of a tensor, in a row. Raises CheckpointError for what are not I64."""
        entry = self.entries[name]
        if entry.type != INTEGERS:
            raise CheckpointError(f"{self.path}: {shown(name)} is of type {entry.type}; expected {INTEGERS}")
        return self._file.read(entry.first, entry.n_bytes).view("<i8").astype(np.int64)

    def stored(self, name: str) -> FileTensor:
        """The bytes (rows, bytes) of a tensor, whatever they mean."""
        entry = self.entries[name]
        rows = math.prod(entry.shape[:-1])
        return FileTensor(self._file, name, (rows, entry.n_bytes // rows), entry.first, dtype=BYTE)

    def _read_header(self, header: "_Header") -> None:
        if header.take(min(4, self._file.size)) != MAGIC:
            empty = "" if self._file.size else "is empty; expected a GGUF file"
            flaw = empty or what_is(self.path, "expected a GGUF file") or "is not a GGUF file: it does not begin with GGUF"
            raise CheckpointError(f"{self.path} {flaw}")
        version = header.u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            told = f"big-endian, version {swapped}" if swapped in VERSIONS else f"of version {version}"
            raise CheckpointError(f"{self.path} is a GGUF file {told}; expected version {' or '.join(map(str, VERSIONS))}")
        n_tensors, n_keys = header.u64(), header.u64()
        header.expect(n_tensors, 25, "tensors")
        header.expect(n_keys, 14, "keys")
        for _ in range(n_keys):
            key = header.name("key")
            if key in self.keys:
                raise CheckpointError(f"{self.path} holds the key {shown(key)} twice")
            self.keys[key] = header.value(key, header.u32())
        for _ in range(n_tensors):
            name = header.name("tensor")
            if name in self.entries:
                raise CheckpointError(f"{self.path} holds the tensor {shown(name)} twice")
            self.entries[name] = self._entry(name, header)
        self._place(header.at)

    def _entry(self, name: str, header: "_Header") -> Entry:
        """What is told of a tensor; its place is an offset yet."""
        n_dimensions = header.u32()
        if not 1 <= n_dimensions <= MOST_DIMENSIONS:
            raise CheckpointError(f"{self.path}: {shown(name)} has {n_dimensions} dimensions; expected 1 to {MOST_DIMENSIONS}")
        shape = tuple(header.u64() for _ in range(n_dimensions))[::-1]
        if not all(shape):
            raise CheckpointError(f"{self.path}: {shown(name)} has the shape {shape}, which holds nothing")
        number, offset = header.u32(), header.u64()
        kind = TYPES.get(number, f"number {number}")
        if kind not in SIZES:
            known = ", ".join([*FLOATS, *BLOCKS])
            raise CheckpointError(f"{self.path}: tensor {shown(name)} is of type {kind}; specdec reads {known}")
        n_weights, n_bytes = SIZES[kind]
        if shape[-1] % n_weights:
            raise CheckpointError(f"{self.path}: {shown(name)} has rows of {shape[-1]} weights; {kind} has blocks of {n_weights}")
        return Entry(kind, shape, offset, math.prod(shape) // n_weights * n_bytes)

    def _place(self, end: int) -> None:
        """Offsets become places in the file, which are aligned, in it, and nobody else's."""
        alignment = self.keys.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: {ALIGNMENT} is {shown(alignment)}; expected a power of two")
        start = at = -(-end // alignment) * alignment
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1][2:]):
            first = start + entry.first
            if entry.first % alignment:
                raise CheckpointError(f"{self.path}: {shown(name)} begins at {entry.first}, which is no multiple of {alignment}")
            if first < at:
                raise CheckpointError(f"{self.path}: {shown(name)} overlaps the tensor before it, at {entry.first} of the data")
            at = first + entry.n_bytes
            if at > self._file.size:
                raise CheckpointError(
                    f"{self.path} is truncated: {self._file.size} bytes, and {shown(name)} ends at {at}; {DOWNLOAD_AGAIN}"
                )
            self.entries[name] = entry._replace(first=first)


class _Header:
    """What comes next in a file's header. Raises CheckpointError where it ends, and for what would take all memory."""

    def __init__(self, file: ModelFile) -> None:
        self._file, self.at = file, 0
        self._data = b""

    def expect(self, n: int, least_bytes: int, what: str) -> None:
        """That many things can come yet."""
        if n * least_bytes > self._file.size - self.at:
            raise CheckpointError(f"{self._file.path} is damaged: it declares {n} {what} in {self._file.size} bytes")

    def take(self, n_bytes: int) -> bytes:
        self._reach(self.at + n_bytes)
        self.at += n_bytes
        return self._data[self.at - n_bytes : self.at]

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def string(self) -> str:
        """Bytes that are no UTF-8 are escaped."""
        return self.take(self.u64()).decode("utf-8", "surrogateescape")

    def name(self, what: str) -> str:
        """That of a key or a tensor."""
        n = self.u64()
        if not 1 <= n <= LONGEST_NAME:
            raise CheckpointError(f"{self._file.path} is damaged: a {what} has a name of {n} bytes")
        return self.take(n).decode("utf-8", "surrogateescape")

    def value(self, key: str, kind: int) -> Any:
        """A number, a truth value, a string, or a list of some."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, n = self.u32(), self.u64()
            if n > MOST_ITEMS:
                raise CheckpointError(f"{self._file.path}: {shown(key)} is an array of {n}; at most {MOST_ITEMS} may be")
            return self._strings(n) if inner == STRING else self._numbers(key, inner, n)
        return self._numbers(key, kind, 1)[0]

    def _numbers(self, key: str, kind: int, n: int) -> list[Any]:
        if kind not in NUMBERS:
            raise CheckpointError(f"{self._file.path}: {shown(key)} is of type {kind}; expected 0 to 12, no arrays in arrays")
        numbers = np.frombuffer(self.take(n * NUMBERS[kind].itemsize), NUMBERS[kind])
        if kind == BOOL:
            if numbers.max(initial=0) > 1:
                raise CheckpointError(f"{self._file.path}: {shown(key)} is {numbers.max()}; expected a truth value, 0 or 1")
            return [bool(number) for number in numbers]
        if kind == FLOAT32 and n == 1:  # the number that was meant: 1e-5, not 9.999999747378752e-06
            return [float(str(numbers[0]))]
        result: list[Any] = numbers.tolist()
        return result

    def _strings(self, n: int) -> list[str]:
        """As `string`, n times and in a third of the time."""
        self.expect(n, 8, "strings")
        result: list[str] = []
        data, at = self._data, self.at
        for _ in range(n):
            end = at + 8
            if end <= len(data):
                end += _U64.unpack_from(data, at)[0]
            if end > len(data):
                self.at = at
                result.append(self.string())
                data, at = self._data, self.at
            else:
                result.append(data[at + 8 : end].decode("utf-8", "surrogateescape"))
                at = end
        self.at = at
        return result

    def _reach(self, end: int) -> None:
        """The header is read up to there."""
        if end > self._file.size:
            raise CheckpointError(
                f"{self._file.path} is truncated: {self._file.size} bytes, its header goes on; {DOWNLOAD_AGAIN}"
            )
        if end > MAX_BYTES:
            raise CheckpointError(f"{self._file.path} is no GGUF file: its header has more than {MAX_BYTES} bytes")
        if end > len(self._data):
            self._data = self._file.read(0, min(max(end, 2 * len(self._data), WINDOW), self._file.size)).tobytes()
