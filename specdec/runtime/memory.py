"""Memory: aligned arrays, pages that become resident on demand, fast checks for NaN and infinity, and checksums."""

import hashlib
import math
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from specdec.runtime.code_cache import compiled
from specdec.runtime.op_program import Floats1, ForwardContext, Halves1, kernel, run_on_all_threads
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.simd import LANES, LINE_WORDS, Array, Float32, ceil_div, fma, load, load_bf16, reduce_add, round_up, splat
from specdec.runtime.work_stealing import get_chunk_range

SMALL_PAGE_WORDS, LARGE_PAGE_WORDS = 4096 // 4, (1 << 21) // 4  # the smallest page of any system, and the usual huge page
CAN_RELEASE_PAGES = sys.platform.startswith("linux") and hasattr(mmap, "MADV_DONTNEED")  # it differs on other systems
PAGE_WORDS = 4096 // 8  # words of 8 bytes
CHECKSUM_BYTES, CHECKSUM_LANES = 16, 8  # lanes: independent chains of multiplications
ROTATE_BITS = np.uint64(29)
GOLDEN_RATIO_64 = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, which is odd
TOUCH_AHEAD_WORDS = 1 << 23  # enough that each thread touches huge pages of its own
SHARED_MAPPING_BYTES = 4 << 20  # so much stays in use until the last of the arrays is dropped


def align_to_cache_line(array: Array) -> Array:
    """Return a float32 array that starts at a cache line: the array itself, or a copy if it is not aligned.

    Unpickled arrays may not be aligned. Arrays of other dtypes are returned as they are.
    """
    if array.ctypes.data % 64 == 0 or array.dtype != np.float32:
        return array
    copy = zeros(*array.shape)
    copy[...] = array
    return copy


def zeros(*shape: int) -> Float32:
    """Return a float32 array of zeros that starts at a cache line, as a tile's loads need."""
    n_bytes = math.prod(shape) * 4
    buffer = np.zeros(n_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + n_bytes].view(np.float32).reshape(shape)


@kernel
def touch_words(run: ForwardContext, thread: int, words: Floats1, lead: int) -> None:
    """Write a zero into each small page of words (n,), which are all zeros, so that the pages become resident.

    lead: Words of the first large page that precede `words`.
    """
    end = words.size + lead
    first, last = get_chunk_range(ceil_div(end, LARGE_PAGE_WORDS), run.chunk, run.n_chunks)
    for at in range(first * LARGE_PAGE_WORDS, min(last * LARGE_PAGE_WORDS, end), SMALL_PAGE_WORDS):
        words[max(at - lead, 0)] = 0.0


def touch_pages(words: Float32) -> None:
    """Make the pages of a float32 array (n,) of zeros resident, on all threads.

    Each large page is touched by one thread: two threads in one page would both have it cleared. So files of 0.75 to 1.26 GB load
    1.2 to 2.2 times as fast.
    """
    lead = words.ctypes.data // words.itemsize % LARGE_PAGE_WORDS
    run_on_all_threads(touch_words(words, lead))


class Arena:
    """A contiguous block of memory from which float32 arrays are allocated one after another.

    The system backs one large block with larger pages than many small ones. Measured with 15M int8, one token: a pass takes 1.06
    times as long if each matrix has its own allocation.

    Attributes:
        n_used: Number of floats of the block that are in use.
    """

    def __init__(self, n: int, headroom: int = 0) -> None:
        """Reserve memory for n floats, and for `headroom` more floats, which become resident only when they are used."""
        self._floats, self._n, self.n_used, self._touched = zeros(n + headroom), n, 0, 0

    @property
    def used_fraction(self) -> float:
        """Fraction of the n reserved floats that is in use, from 0 to 1."""
        return self.n_used / max(self._n, self.n_used, 1)

    def allocate(self, *shape: int) -> Float32:
        """Return the next part of the block as an array of zeros of this shape, which starts at a cache line.

        Its pages are made resident.
        """
        start = round_up(self.n_used, LINE_WORDS)
        self.n_used = start + math.prod(shape)
        if self.n_used > self._touched:
            end = max(min(self.n_used + TOUCH_AHEAD_WORDS, self._n), self.n_used)
            touch_pages(self._floats[self._touched : end])
            self._touched = end
        return self._floats[start : self.n_used].reshape(shape)

    def release_from(self, start: int) -> None:
        """Take back the arrays that were allocated since `n_used` was `start`, and fill their memory with zeros."""
        self._floats[start : self.n_used] = 0.0
        self.n_used = start


class LazyMemory:
    """Memory for arrays of zeros in which only written pages become resident; numpy would request pages of 2 MB.

    Small arrays share a mapping, where each begins at a page: a mapping for each took half of the time of a new sequence.
    """

    def __init__(self) -> None:
        """Begin with an empty mapping."""
        self._mapping, self._n_used = mmap.mmap(-1, 1), 1

    def zeros(self, shape: Sequence[int], dtype: type = np.float32) -> Array:
        """Return an array of zeros.

        Raises:
            MemoryError: The system refuses the memory.
        """
        n, start = math.prod(shape), round_up(self._n_used, mmap.PAGESIZE)
        n_bytes = n * np.dtype(dtype).itemsize
        if start + n_bytes > len(self._mapping):
            # Private, because a forked process would write to shared memory.
            private: dict[str, int] = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
            try:
                self._mapping, start = mmap.mmap(-1, max(n_bytes, SHARED_MAPPING_BYTES), **private), 0
            except OSError as error:
                raise MemoryError(error.strerror) from None
            with suppress(OSError, AttributeError):  # a system without huge pages
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self._n_used = start + n_bytes
        return np.frombuffer(self._mapping, dtype, n, start).reshape(shape)


def release_pages(rows: Array, first: int, last: int) -> None:
    """Give the memory of elements `first` to `last` (exclusive) of each row back to the system; they read as zeros afterwards.

    Releases only whole pages that hold nothing after these elements and nothing of another row. Elements before `first` must not
    be needed any more either. Does nothing if the system cannot release pages or `rows` is no view of `LazyMemory`.

    Args:
        rows: A view (N, n) of `LazyMemory`.
        first: First element of each row.
        last: End of the elements of each row.
    """
    buffer: object = rows
    while isinstance(buffer, np.ndarray):
        buffer = buffer.base
    buffer = buffer.obj if isinstance(buffer, memoryview) else buffer
    if not CAN_RELEASE_PAGES or not isinstance(buffer, mmap.mmap):
        return
    start = rows.ctypes.data - np.frombuffer(buffer, np.uint8).ctypes.data
    for row_start in range(start, start + rows.nbytes, rows.strides[0]):
        page_start = (row_start + first * rows.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        page_start = max(page_start, round_up(row_start, mmap.PAGESIZE))
        page_end = (row_start + last * rows.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        if page_start < page_end:
            with suppress(OSError):  # locked memory
                buffer.madvise(mmap.MADV_DONTNEED, page_start, page_end - page_start)


def copy_nonzero_pages(to: Array, source: Array) -> None:
    """Copy an array to another without writing pages that are zeros in both.

    So pages of `LazyMemory` that were never written, or were released, take no memory in the copy either.

    Args:
        to: Array to write, of whole 8-byte words.
        source: Array to read, of the same shape.
    """
    if not (to.flags.c_contiguous and source.flags.c_contiguous):
        for a, b in zip(to, source, strict=True):
            copy_nonzero_pages(a, b)
        return
    a, b = (array.reshape(-1).view(np.uint64) for array in (to, source))
    n = a.size // PAGE_WORDS * PAGE_WORDS
    pages, source_pages = (words[:n].reshape(-1, PAGE_WORDS) for words in (a, b))
    are_empty = source_pages[:, 0] == 0
    are_empty[are_empty] = ~source_pages[are_empty].any(axis=1)
    a[n:] = b[n:]
    if not are_empty.any():
        pages[...] = source_pages
        return
    pages[~are_empty] = source_pages[~are_empty]
    empty = np.flatnonzero(are_empty)
    pages[empty[pages[empty].any(axis=1)]] = 0


def get_physical_memory_bytes() -> float:
    """Return the size of the machine's memory in bytes, or infinity if the system does not report it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


@kernel
def scan_fp32(run: ForwardContext, thread: int, sums: Floats1, array: Floats1, are_bf16: int) -> None:
    """sums[thread] += the sum of 0 x over this chunk of an array (n,): NaN if and only if an element is NaN or infinite.

    n is at least LANES: the last vector ends at the last element. are_bf16: 1 if the elements are bf16 bits, else 0.
    """
    first, last = get_chunk_range(ceil_div(array.size, LANES), run.chunk, run.n_chunks)
    total = splat(0.0)
    for i in range(first, last):
        at = min(i * LANES, array.size - LANES)
        total = fma(load_bf16(array, at) if are_bf16 else load(array, at), 0.0, total)
    sums[thread] += reduce_add(total)


scan_halves = scan_fp32.specialize("scan_halves", array=Halves1)  # fp16, or bf16 if are_bf16 is 1


def flatten(array: Array) -> Array:
    """Return an array's elements as a flat array (n,), padded with zeros to at least LANES elements.

    16-bit types become uint16, their bits, since compiled functions have no fp16.
    """
    numbers = np.ascontiguousarray(array).reshape(-1)
    numbers = numbers.view(np.uint16) if numbers.itemsize == 2 else numbers
    return numbers if numbers.size >= LANES else np.pad(numbers, (0, LANES - numbers.size))


def all_finite(array: Array, n_threads: int | None = None) -> bool:
    """Return whether every element of an array is finite, neither NaN nor infinity; uint16 holds bf16 bits.

    One thread checks 16 million floats in 2.9 ms and as many fp16 numbers in 1.5 ms; numpy takes 4.6 and 26 ms.
    """
    sums = zeros(n_threads or get_available_threads())
    scan = scan_fp32 if array.dtype == np.float32 else scan_halves
    run_on_all_threads(scan(sums, flatten(array), array.dtype == np.uint16), sums.size)
    return not np.isnan(sums).any()


# Checksums: they detect damage and mix-ups, but do not protect against malice. 64 MB take 5.5 ms; SHA-256 takes 37 ms.


@compiled
def mix_words(lanes, words):
    """lanes[i % 8] = rotate(lanes[i % 8] ^ words[i]) GOLDEN_RATIO_64 for each of words (n,), n a multiple of 8; all uint64.

    A step is a bijection of the lane and of the word, so changing one word always changes its lane.
    """
    for first in range(0, words.size, CHECKSUM_LANES):
        for i in range(CHECKSUM_LANES):
            mixed = lanes[i] ^ words[first + i]
            lanes[i] = (mixed << ROTATE_BITS | mixed >> (np.uint64(64) - ROTATE_BITS)) * GOLDEN_RATIO_64


def checksum(arrays: Iterable[object]) -> bytes:
    """Return CHECKSUM_BYTES bytes, a checksum that depends on every byte of the arrays, its position and the arrays' lengths."""
    digest, line = hashlib.blake2b(digest_size=CHECKSUM_BYTES), 8 * CHECKSUM_LANES
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        end = len(data) // line * line
        lanes = np.arange(1, CHECKSUM_LANES + 1, dtype=np.uint64) * GOLDEN_RATIO_64
        mix_words(lanes, data[:end].view(np.uint64))
        digest.update(lanes.tobytes() + data[end:].tobytes() + len(data).to_bytes(8, "little"))
    return digest.digest()
