"""Arrays where tiles can read them, memory that is there once it is used, and whether numbers are numbers."""

import math
import mmap
import os
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.runtime.cpu_topology import known
from specdec.runtime.program import Floats1, Halves1, Operation, Pass, on_all_threads, operation
from specdec.runtime.simd import LANES, Float32, add, ceil_div, fma, load, load_bf16, load_fp16, reduce_add, round_up, splat
from specdec.runtime.threads import available_threads
from specdec.runtime.work_stealing import share

SMALL_PAGE_WORDS, LARGE_PAGE_WORDS = 4096 // 4, (1 << 21) // 4  # the least that systems have, and what most call huge
GIVES_BACK = sys.platform.startswith("linux") and hasattr(mmap, "MADV_DONTNEED")  # elsewhere it means something else
PAGE_WORDS = 4096 // 8  # of 8 bytes
TOUCHED_AHEAD = 1 << 23  # words, so that each thread has large pages of its own


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy that begins at a cache line where it does not: one that was pickled, say."""
    if array.ctypes.data % 64 == 0 or array.dtype != np.float32:
        return array
    copy = zeros(*array.shape)
    copy[...] = array
    return copy


def zeros(*shape: int) -> Float32:
    """A float32 array of zeros that begins at a cache line, as a tile's loads need."""
    n_bytes = math.prod(shape) * 4
    buffer = np.zeros(n_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + n_bytes].view(np.float32).reshape(shape)


@operation
def touch_words(run: Pass, thread: int, words: Floats1, lead: int) -> None:
    """A zero into each small page of words (n,), which are zeros; the large page before them has `lead` words."""
    end = words.size + lead
    first, last = share(ceil_div(end, LARGE_PAGE_WORDS), run.part, run.n_parts)
    for at in range(first * LARGE_PAGE_WORDS, min(last * LARGE_PAGE_WORDS, end), SMALL_PAGE_WORDS):
        words[max(at - lead, 0)] = 0.0


def touch(words: Float32) -> None:
    """Make words (n,) of zeros resident, each large page by one thread: two that meet in one would both have it cleared."""
    lead = words.ctypes.data // words.itemsize % LARGE_PAGE_WORDS
    on_all_threads(touch_words(words, lead))


class Block:
    """Room for arrays of so many floats in all, side by side: the system gives one large block larger pages than many small ones.

    more: floats that may be taken beyond these, and are not resident before. Measured, 15M int8, one token: the pass takes 1.06
    times as long with an allocation for each matrix.
    """

    def __init__(self, n: int, more: int = 0) -> None:
        self._floats, self._n, self._used, self._touched = zeros(n + more), n, 0, 0

    @property
    def share_taken(self) -> float:
        return self._used / max(self._n, self._used, 1)

    def take(self, *shape: int) -> Float32:
        """The next array, of zeros; it begins at a cache line if those before it fill theirs."""
        start, self._used = self._used, self._used + math.prod(shape)
        if self._used > self._touched:
            ahead = TOUCHED_AHEAD if known().nodes == 1 else 0  # else each array by itself, as threads will share it
            end = max(min(self._used + ahead, self._n), self._used)
            touch(self._floats[self._touched : end])
            self._touched = end
        return self._floats[start : self._used].reshape(shape)

    def give_back(self, start: int) -> None:
        """What was taken since so many floats were used, which is zeros again."""
        self._floats[start : self._used] = 0.0
        self._used = start

    @property
    def used(self) -> int:
        """Floats that are taken."""
        return self._used


def lazy_zeros(dtype: type, *shape: int) -> npt.NDArray[Any]:
    """As `zeros`, of which only what is written becomes resident: numpy would ask for pages of 2 MB. Raises MemoryError."""
    # else a forked process would write here too
    private: dict[str, Any] = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        buffer = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize, **private)
    except OSError as error:
        raise MemoryError(error.strerror) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel that has no huge pages
            buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(buffer, dtype).reshape(shape)


def give_back(runs: npt.NDArray[Any], first: int, last: int) -> None:
    """Let the system have the memory of elements first to last of each row of a view (N, n) of `lazy_zeros`, in whole pages that
    hold nothing behind them, nor of another row: they are zeros from there on. What is before them nobody needs any more either.
    """
    buffer: Any = runs
    while isinstance(buffer, np.ndarray):
        buffer = buffer.base
    buffer = buffer.obj if isinstance(buffer, memoryview) else buffer
    if not GIVES_BACK or not isinstance(buffer, mmap.mmap):
        return
    start = runs.ctypes.data - np.frombuffer(buffer, np.uint8).ctypes.data
    for begin in range(start, start + runs.nbytes, runs.strides[0]):
        at, end = (begin + n * runs.itemsize for n in (first, last))
        at, end = max(round_up(begin, mmap.PAGESIZE), at // mmap.PAGESIZE * mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
        if at < end:
            with suppress(OSError):  # memory that is locked
                buffer.madvise(mmap.MADV_DONTNEED, at, end - at)


def copy_written(to: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """to = source, arrays of whole words of 8 bytes; what is zeros in both is not written: pages of `lazy_zeros` that nobody has
    written, or that were given back, take no memory of the copy's either.
    """
    if not (to.flags.c_contiguous and source.flags.c_contiguous):
        for a, b in zip(to, source, strict=True):
            copy_written(a, b)
        return
    a, b = (array.reshape(-1).view(np.uint64) for array in (to, source))
    n = a.size // PAGE_WORDS * PAGE_WORDS
    pages, others = (words[:n].reshape(-1, PAGE_WORDS) for words in (a, b))
    are_empty = others[:, 0] == 0
    are_empty[are_empty] = ~others[are_empty].any(axis=1)
    a[n:] = b[n:]
    if not are_empty.any():
        pages[...] = others
        return
    pages[~are_empty] = others[~are_empty]
    empty = np.flatnonzero(are_empty)
    pages[empty[pages[empty].any(axis=1)]] = 0


def physical_memory_bytes() -> float:
    """The machine's memory; infinite where the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


def _reading(name: str, load_floats: Any, **others: Any) -> Operation:
    """The operation of that name: sums[thread] += the sum of 0 x over this part of an array (n,), which that loads LANES of.

    It is NaN if and only if one is NaN or infinite. n is at least LANES: the last vector ends where they end.
    """

    def read(run: Pass, thread: int, sums: Floats1, array: Floats1) -> None:
        first, last = share(ceil_div(array.size, LANES), run.part, run.n_parts)
        a, b = splat(0.0), splat(0.0)
        for place in range(first, last, 2):
            at = min(place * LANES, array.size - LANES)
            behind = min(at + LANES, array.size - LANES)
            a, b = fma(load_floats(array, at), splat(0.0), a), fma(load_floats(array, behind), splat(0.0), b)
        sums[thread] += reduce_add(add(a, b))

    return Operation(read, **others).named(name)


read_floats = _reading("read_floats", load)
read_fp16, read_bf16 = (_reading(f"read_{name}", of, array=Halves1) for name, of in (("fp16", load_fp16), ("bf16", load_bf16)))


def flat(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Its numbers (n,), zeros behind them if they fill no vector; of two bytes as their bits: compiled functions know no fp16."""
    numbers = np.ascontiguousarray(array).reshape(-1)
    numbers = numbers.view(np.uint16) if numbers.itemsize == 2 else numbers
    return numbers if numbers.size >= LANES else np.pad(numbers, (0, LANES - numbers.size))


def all_finite(array: npt.NDArray[Any], n_threads: int | None = None) -> bool:
    """Whether no element of an array is NaN or infinite, at the speed of memory; uint16 stands for bits of bf16."""
    sums = zeros(n_threads or available_threads())
    read = {"float32": read_floats, "float16": read_fp16}.get(array.dtype.name, read_bf16)
    on_all_threads(read(sums, flat(array)), sums.size)
    return not np.isnan(sums).any()
