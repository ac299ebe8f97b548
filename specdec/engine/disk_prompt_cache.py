"""A prompt cache on disk: the KV cache contents of prompts, found again by their tokens, in this process or another one.

8,000 tokens of SmolLM2 are restored in 0.19 to 0.23 s; reading them takes 17 s.

A block file holds the keys and values of BLOCK_TOKENS tokens. Its name is a digest of all tokens up to its last one and of what
keys and values depend on: weights, KV cache format, and the revision of the arithmetic. So prompts with a common beginning share
files, and another process writes the same ones. Next to the file of a prompt's last block, a tail file holds the remaining
tokens, and for recurrent families the recurrent state after them. A memory file holds what the sequences of one cache salt leave
for looked-up drafts: tokens, and the likeliest ones after them.

The digest covers all weights and samples none, since keys and values of another model would change the output. A table of several
GB that stays in its file is not read for it. A pass reads only the rows of its tokens, so these enter the digest with the token.

The files are those of a `DiskStore`. Only their owner can read them, since they hold conversations. If they exceed the maximum
size, the least recently used ones are deleted, and of a prompt the last ones first: without its beginning the rest is of no use.
"""

import atexit
import errno
import hashlib
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.argument_checks import count_common_prefix
from specdec.draft.lookup_tables import LookupMemory
from specdec.layers.buffers import Buffers
from specdec.layers.weights import Weights
from specdec.model.kv_cache import KVCache
from specdec.model.state_snapshots import Snapshot, Snapshots, take_snapshot
from specdec.runtime.disk_store import DiskStore
from specdec.runtime.memory import checksum
from specdec.runtime.simd import Array

BLOCK_TOKENS = 128
BLOCK_SUFFIX, TAIL_SUFFIX, MEMORY_SUFFIX = ".prompt", ".tail", ".lookup"
MAX_QUEUED_WRITES = 64  # files that wait to be written; further ones are left for the next save
MTIME_STEP_NS = 1000  # between the modification times of a prompt's blocks, the first one's the latest
FLUSH_TIMEOUT_S = 10.0
MEMORY_INTERVAL_S = 10.0  # between two writes of a memory of looked-up drafts; the last one is at exit
MIN_FILES_OF_A_MEMORY = 8  # a folder that has no room for as many files of its size gets none


class ModelFingerprint(NamedTuple):
    """A digest of everything except tokens that a model's keys and values depend on, with the per-token keys computed so far.

    Attributes:
        weights: The model's weights, to notice that another object has taken their `id`.
        digest: The SHA-256 digest.
        token_keys: The results of `PromptCache._get_token_keys` so far, by token id.
    """

    weights: weakref.ref[Weights]
    digest: bytes
    token_keys: dict[int, int]


class PromptCache:
    """A folder that stores the KV cache contents of prefilled prompts, and loads them again in this process or a later one.

    A background thread writes the files; at exit the process waits for it for up to FLUSH_TIMEOUT_S.

    Args:
        folder: The folder, which is created if it does not exist.
        max_bytes: The maximum size of all files together, in bytes; beyond it the least recently used ones are deleted.
        revision: The revision of the arithmetic; files of another revision are not found.
        report: Called once with a line about a damaged file, and once about one that cannot be written.

    Raises:
        ValueError: If the folder cannot be created or used.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, revision: int, report: Callable[[str], object]) -> None:
        """Create the folder if it does not exist, and check that it can be read and written."""
        self.folder, self._max_bytes, self._revision = Path(folder), max_bytes, revision
        self._store = DiskStore(self.folder, BLOCK_SUFFIX, TAIL_SUFFIX, MEMORY_SUFFIX, checksum=_checksum_buffers)
        self._report, self._reported = report, set[str]()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
            raise ValueError(f"cannot keep prompts in {folder}: {why}") from None
        self._fingerprints = dict[tuple[object, ...], ModelFingerprint]()
        self._queue = queue.Queue[Callable[[], None]](MAX_QUEUED_WRITES)
        self._bytes_since_eviction = 0
        self._unsaved_memories, self._memory_times = dict[Path, LookupMemory](), dict[Path, float]()
        self._thread = threading.Thread(target=self._run_writer, name="prompts", daemon=True)
        self._thread.start()
        atexit.register(self.flush)

    def restore(self, cache: KVCache, tokens: list[int], cache_salt: str = "") -> int:
        """Load the longest cached prefix of a prompt into the model's KV cache, if that adds at least one block.

        The loaded files are marked as used now.

        Args:
            cache: The KV cache.
            tokens: The prompt.
            cache_salt: Prompts are shared only among requests with the same salt.

        Returns:
            The number of tokens that the KV cache holds after loading; 0 if it holds no more of the prompt than before.

        Raises:
            CheckpointError: If the file of a table of the model has changed.
        """
        n_held, token_keys = len(tokens) - 1 - cache.count_prefill_tokens(tokens), self._get_token_keys(cache, tokens)
        blocks = [*takewhile(os.path.exists, self.get_block_paths(cache, token_keys, len(tokens) - 1, cache_salt))]
        if len(blocks) * BLOCK_TOKENS < n_held + BLOCK_TOKENS:
            return 0
        cache.import_kv(tokens, lambda buffers, n_kept: self._load_blocks(cache, buffers, token_keys, blocks, n_kept))
        _touch(blocks)
        return cache.n_tokens if cache.n_tokens > n_held else 0

    def save(self, cache: KVCache, tokens: list[int], is_prefilled: bool = True, cache_salt: str = "") -> None:
        """Queue the parts of a sequence's KV cache that the folder lacks, for a background thread to write to files.

        Files for which the queue has no room are left for the next call. A complete prefill also marks the files as used now.
        Nothing is queued if the keys are rotated with the RoPE factors for another length than that of the sequence.

        Args:
            cache: The KV cache.
            tokens: The sequence.
            is_prefilled: Whether the prefill is complete, so that the tail is worth a file.
            cache_salt: Prompts are shared only among requests with the same salt.

        Raises:
            CheckpointError: If the file of a table of the model has changed.
        """
        if cache.has_long_rope != cache.model.config.has_long_rope(len(tokens)):
            return  # the keys are rotated with the factors of another length
        n, token_keys = (
            cache.export_kv(lambda _, held, more: count_common_prefix(held, tokens, len(tokens))),
            self._get_token_keys(cache, tokens),
        )
        paths = [*self.get_block_paths(cache, token_keys, n, cache_salt)]
        for path, arrays in cache.export_kv(
            lambda *args: self._collect_missing(cache, tokens[:n], token_keys, paths, is_prefilled, *args)
        ):
            self._queue.put(partial(self._write_file, path, arrays))
        if is_prefilled:
            self._queue.put(partial(_touch, paths))

    def restore_memory(self, cache: KVCache, memory: LookupMemory, n_ids: int, cache_salt: str = "") -> bool:
        """Fill a memory of looked-up drafts from the file of its cache salt; return False if there is no valid file.

        Args:
            cache: A KV cache of the target.
            memory: The memory to fill.
            n_ids: Number of token ids.
            cache_salt: Memories are shared only among requests with the same salt.
        """
        path, arrays = self._get_memory_path(cache, cache_salt), memory.copy_arrays()
        if not os.path.exists(path) or not self._read_file(path, arrays):
            return False
        _touch([path])
        return memory.restore(arrays, n_ids)

    def save_memory(self, cache: KVCache, memory: LookupMemory, cache_salt: str = "") -> None:
        """Queue a memory of looked-up drafts for the background thread, or keep it for `flush` if it was written recently.

        Args:
            cache: A KV cache of the target.
            memory: The memory.
            cache_salt: See `restore_memory`.
        """
        path, now = self._get_memory_path(cache, cache_salt), time.monotonic()
        self._unsaved_memories[path] = memory
        if now >= self._memory_times.get(path, -math.inf) + MEMORY_INTERVAL_S:
            self._memory_times[path] = now
            self._queue_memory(path)

    def _queue_memory(self, path: Path) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait(partial(self._write_memory, path))

    def _write_memory(self, path: Path) -> None:
        if memory := self._unsaved_memories.pop(path, None):
            arrays = memory.copy_arrays()  # written as they are now, whatever other threads add
            if sum(array.nbytes for array in arrays) * MIN_FILES_OF_A_MEMORY <= self._max_bytes:
                self._write_file(path, arrays)

    def _get_memory_path(self, cache: KVCache, cache_salt: str) -> Path:
        digest = hashlib.sha256(self._get_fingerprint(cache).digest + cache_salt.encode() + MEMORY_SUFFIX.encode())
        return self.folder / f"{digest.hexdigest()[:40]}{MEMORY_SUFFIX}"

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Queue the memories that are not written yet, then wait until all files are written, at most timeout_s seconds."""
        for path in [*self._unsaved_memories]:
            self._queue_memory(path)
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s)

    def _collect_missing(
        self, cache: KVCache, tokens: list[int], token_keys: list[int], paths: Sequence[Path], is_prefilled: bool,
        buffers: Buffers,
        held: list[int], snapshots: Snapshots,
    ) -> list[tuple[Path, list[Array]]]:  # fmt: skip
        """Return path and copied contents of each missing file of a sequence, as many as the queue holds: blocks, then tails.

        Args:
            cache: The KV cache.
            tokens: The sequence.
            token_keys: The result of `_get_token_keys` for the sequence.
            paths: The block files of the sequence.
            is_prefilled: Whether to include tails, from which another sequence may continue.
            buffers: The model's buffers.
            held: The tokens in the KV cache.
            snapshots: The recurrent states that the model has kept.
        """
        n, capacity = count_common_prefix(held, tokens, len(tokens)), MAX_QUEUED_WRITES - 1 - self._queue.qsize()
        block_bytes = sum(math.prod(shape) * array.itemsize for shape, array in _slice_block(buffers, 0))
        # a prompt that exceeds the folder loses its end
        paths = paths[: min(n, 7 * self._max_bytes // 8 // block_bytes * BLOCK_TOKENS) // BLOCK_TOKENS]
        blocks = [i for i, path in enumerate(paths) if not os.path.exists(path)]
        if blocks and blocks[0] * BLOCK_TOKENS < cache.full_kv_start:
            # the model no longer holds all of this block, so neither it nor later ones can be used
            paths, blocks, is_prefilled = paths[: blocks[0]], [], False
        blocks = blocks[: max(capacity, 0)]
        missing = [(paths[i], self._copy_block(buffers, token_keys, i, BLOCK_TOKENS)) for i in blocks]
        for end, snapshot in self._find_tails(cache, paths, n, snapshots) if is_prefilled else ():
            if len(missing) < capacity:
                i = end // BLOCK_TOKENS
                arrays = self._copy_block(buffers, token_keys, i, end - i * BLOCK_TOKENS)
                missing.append(
                    (paths[i - 1].with_suffix(TAIL_SUFFIX), [np.array([end], np.int64), *arrays, *_get_state_arrays(snapshot)])
                )
        return missing

    @staticmethod
    def _find_tails(cache: KVCache, paths: Sequence[Path], n: int, snapshots: Snapshots) -> Iterator[tuple[int, Snapshot | None]]:
        """Yield, for each tail file to write, the number of tokens up to the tail's end and the recurrent state there, if any.

        The last tail is yielded even if its file exists, since that file may belong to another sequence.

        Args:
            cache: The KV cache.
            paths: The block files of the sequence.
            n: The number of tokens of the sequence that the model holds.
            snapshots: The recurrent states that the model has kept.
        """
        if not cache.model.has_recurrent_state:
            if len(paths) == n // BLOCK_TOKENS > 0 and len(paths) * BLOCK_TOKENS >= cache.full_kv_start:
                yield n, None
            return
        last = snapshots.find_longest(n)
        for each in snapshots:
            n_blocks = each.n_tokens // BLOCK_TOKENS if each.n_tokens <= n else 0
            if 0 < n_blocks <= len(paths) and (
                each.n_tokens == last or not os.path.exists(paths[n_blocks - 1].with_suffix(TAIL_SUFFIX))
            ):
                yield each.n_tokens, each

    @staticmethod
    def _copy_block(buffers: Buffers, token_keys: list[int], i: int, n: int) -> list[Array]:
        """Return copies of the arrays of block i, token keys first, then keys and values; zeros follow its first n tokens."""
        arrays: list[Array] = [np.zeros(BLOCK_TOKENS, np.uint64)]
        arrays[0][:n] = token_keys[i * BLOCK_TOKENS : i * BLOCK_TOKENS + n]
        for shape, source in _slice_block(buffers, i):
            array = np.zeros(shape, source.dtype)
            array[tuple(map(slice, source.shape))] = source
            arrays.append(array)
        return arrays

    def get_block_paths(self, cache: KVCache, token_keys: list[int], n: int, cache_salt: str) -> Iterator[Path]:
        """Yield the path of the file of each complete block in a sequence's first n tokens, whether it exists or not."""
        digest = (
            self._get_fingerprint(cache).digest + cache_salt.encode() + bytes([cache.model.config.has_long_rope(len(token_keys))])
        )
        for first in range(0, n // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            block = np.array(token_keys[first : first + BLOCK_TOKENS], np.uint64)
            digest = hashlib.sha256(digest + block.tobytes()).digest()
            yield self.folder / f"{digest.hex()[:40]}{BLOCK_SUFFIX}"

    def _get_fingerprint(self, cache: KVCache) -> ModelFingerprint:
        """Return the fingerprint, computed once, of all that a model's keys and values depend on except tokens and table rows."""
        key = id(cache.model.weights), cache.model.kv, cache.hidden_layers
        if key not in self._fingerprints or self._fingerprints[key].weights() is not cache.model.weights:
            digest = hashlib.sha256(f"2 {self._revision} {cache.model.kv} {cache.hidden_layers} {cache.model.config!r}".encode())
            for name, m in cache.model.weights.iter_matrices():
                digest.update(
                    f"{name} {m.weight_format.name} {m.n} {m.group_size} {m.first_panel} {m.n_total_panels} "
                    f"{m.panels.shape}".encode()
                )
                digest.update(checksum([m.panels]))
            for name, vector in cache.model.weights.vectors.items():
                digest.update(f"{name} {vector.shape}".encode() + checksum([vector]))
            self._fingerprints[key] = ModelFingerprint(weakref.ref(cache.model.weights), digest.digest(), {})
        return self._fingerprints[key]

    def _get_token_keys(self, cache: KVCache, tokens: list[int]) -> list[int]:
        """Return one number per token that identifies its input: its id, or a hash of id and table rows if the model has tables.

        Raises:
            CheckpointError: If the file of a table has changed.
        """
        if not (table := cache.model.weights.table):
            return tokens
        known = self._get_fingerprint(cache).token_keys
        for token in {*tokens} - known.keys():
            rows = [np.array([token], np.int64), table.read_rows([token])]
            known[token] = int.from_bytes(checksum(rows)[:8], "little")
        return [known[token] for token in tokens]

    def _load_blocks(
        self, cache: KVCache, buffers: Buffers, token_keys: list[int], blocks: Sequence[Path], n_kept: int
    ) -> tuple[int, Snapshots]:
        """Load the valid blocks after n_kept tokens, and the tail that reaches farthest, from their files into the buffers.

        Args:
            cache: The KV cache.
            buffers: The buffers to fill.
            token_keys: The result of `_get_token_keys` for the sequence.
            blocks: The block files of the sequence that exist.
            n_kept: The number of tokens that the KV cache holds already.

        Returns:
            The number of tokens that the buffers hold after loading (0 if a recurrent state is needed and missing), and the
            snapshot of the recurrent state there, if the model has one.
        """
        first, snapshots = n_kept // BLOCK_TOKENS, Snapshots()
        n = first * BLOCK_TOKENS
        for i, path in enumerate(blocks[first:], first):
            arrays = self._make_block_arrays(buffers)
            if not self._read_file(path, arrays) or arrays[0].tolist() != token_keys[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]:
                break
            _store_block(buffers, i, arrays)
            n += BLOCK_TOKENS
        for i in range(n // BLOCK_TOKENS, max(first, 1) - 1, -1):
            tail, arrays = blocks[i - 1].with_suffix(TAIL_SUFFIX), self._make_block_arrays(buffers)
            end, snapshot = np.zeros(1, np.int64), take_snapshot(buffers, 0) if cache.model.has_recurrent_state else None
            if os.path.exists(tail) and self._read_file(tail, [end, *arrays, *_get_state_arrays(snapshot)]):
                start, tail_length = i * BLOCK_TOKENS, int(end[0]) - i * BLOCK_TOKENS
                n_common = count_common_prefix(
                    arrays[0].tolist(), token_keys[start:], min(max(tail_length, 0), BLOCK_TOKENS, len(token_keys) - 1 - start)
                )
                if start + n_common > n_kept and (not snapshot or n_common == tail_length):
                    _store_block(buffers, i, arrays)
                    if snapshot:
                        snapshots.add(snapshot._replace(n_tokens=start + n_common))
                    return start + n_common, snapshots
            if not cache.model.has_recurrent_state:
                break
        return (0 if cache.model.has_recurrent_state else n), snapshots

    @staticmethod
    def _make_block_arrays(buffers: Buffers) -> list[Array]:
        return [np.zeros(BLOCK_TOKENS, np.uint64), *(np.empty(shape, source.dtype) for shape, source in _slice_block(buffers, 0))]

    def _read_file(self, path: Path, arrays: Sequence[Array]) -> bool:
        """Fill the arrays from a file and return whether its contents are valid; report the file if they are not."""
        content = self._store.read(path.name)
        if content is None or len(content) != sum(array.nbytes for array in arrays):
            self._report_once("damaged", f"{path.name} in {self.folder} is damaged or not a prompt cache file; it is ignored")
            return False
        start = 0
        for array in arrays:
            array[...] = np.frombuffer(content, array.dtype, array.size, start).reshape(array.shape)
            start += array.nbytes
        return True

    def _run_writer(self) -> None:
        """Run queued write jobs forever, as the background thread; the first error is reported, and none ends the thread."""
        while True:
            work = self._queue.get()
            with self.report_failures():
                work()
            del work  # and the arrays that it holds
            self._queue.task_done()

    def _write_file(self, path: Path, arrays: Sequence[Array]) -> None:
        content = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        self._store.write(path.name, content)
        self._bytes_since_eviction += len(content)
        if self._bytes_since_eviction > self._max_bytes // 16 or path.suffix == TAIL_SUFFIX:
            self._bytes_since_eviction = 0
            self._store.evict(self._max_bytes)

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """Report an error inside the context instead of raising it; only the first such error of the cache is reported."""
        try:
            yield
        except Exception as error:  # no output may fail because something cannot be kept
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            self._report_once("written", f"cannot keep prompts in {self.folder}: {reason}")

    def _report_once(self, what: str, line: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._report(line)


def _checksum_buffers(parts: Iterable[bytes | memoryview]) -> bytes:
    return checksum(np.frombuffer(part, np.uint8) for part in parts)


def _touch(paths: Sequence[Path]) -> None:
    """Set the modification times of a prompt's block and tail files to now, with the first block's as the latest."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        for each in (path, path.with_suffix(TAIL_SUFFIX)):
            with suppress(OSError):
                os.utime(each, ns=(now - i * MTIME_STEP_NS, now - i * MTIME_STEP_NS))


def _slice_block(buffers: Buffers, i: int) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yield, for each array that grows, the shape of a whole block and a view of block i, which may be shorter at the end."""
    for each in buffers.growing:
        shape = [*each.array.shape]
        shape[each.positions_axis or 0] = BLOCK_TOKENS // each.positions_per_index
        yield tuple(shape), each.select(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)


def _store_block(buffers: Buffers, i: int, arrays: Sequence[Array]) -> None:
    """Copy the arrays of block i into the model's buffers; the first array holds token keys and is skipped."""
    for (_, block), array in zip(_slice_block(buffers, i), arrays[1:], strict=False):
        block[...] = array[tuple(map(slice, block.shape))]


def _get_state_arrays(snapshot: Snapshot | None) -> list[Array]:
    return snapshot.arrays if snapshot else []
