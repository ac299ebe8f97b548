"""What prompts have made of a model's cache, in a folder: found again by their tokens, in this process or another one.

A file holds the keys and values of BLOCK tokens, by a digest of all tokens up to its last and of what they depend on: weights,
what keys and values are kept in, and the arithmetic's revision. So prompts that begin alike share files, and what another
process writes beside is the same. A file beside that of a prompt's last block holds its tail: fewer tokens, and the running state
behind them, of a family that has one.

All weights enter the digest and none are sampled: another model's keys and values would give another text. A table of several GB
that stays in its file is not read for it. A pass reads the rows of its tokens alone, so these enter the digest with the token.

A file is written beside and moved, and readable by its owner alone: it holds what people said. One that is damaged, or is
another's, counts as none. Of what takes more than there is to be, the files go that nobody has used for longest, of a prompt
those of its end first: without its beginning the rest is of no use.
"""

import atexit
import errno
import hashlib
import math
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.layers.base import Buffers, Room, Weights
from specdec.layers.kv_formats import KV_CACHES
from specdec.model.registry import architecture_of
from specdec.model.state_snapshots import Snapshot, Snapshots, snapshot_of
from specdec.model.transformer import Transformer
from specdec.runtime.checksum import CHECKSUM_BYTES, checksum
from specdec.validation import n_common

BLOCK = 128  # tokens
MAGIC = b"specdec prompt 1"
ENDING, TAIL = ".prompt", ".tail"
OWN_NAME = re.compile(rf"[0-9a-f]{{40}}({ENDING}|{TAIL})(\.\d+\.\d+)?")  # with the last part while it is written
MOST_WAITING = 64  # files that wait to be written; more are for the next time
APART_NS = 1000  # between times of use of a prompt's blocks, the first one's the latest
AHEAD_NS = 3600 * 10**9  # that another machine's clock may be; a file of a later time is of a clock that was set back
FLUSH_SECONDS = 10.0


class Stamp(NamedTuple):
    """What the keys and values of a model depend on beside what a pass takes in of its tokens.

    weights: the model's, as long as somebody has them; inputs: by their ids, those of `PromptCache._inputs` that are known.
    """

    weights: weakref.ref[Weights]
    digest: bytes
    inputs: dict[int, int]


class PromptCache:
    """A folder of prompts, of n_bytes at most. revision: of the arithmetic; tell: is told, once, of what is damaged or cannot be
    written.

    Raises ValueError for a folder that cannot be had.
    """

    def __init__(self, folder: str | os.PathLike[str], n_bytes: int, revision: int, tell: Callable[[str], object]) -> None:
        self.folder, self._n_bytes, self._revision = Path(folder), n_bytes, revision
        self._tell, self._told = tell, set[str]()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            raise ValueError(f"cannot keep prompts in {folder}: {why}") from None
        self._stamps = dict[tuple[Any, ...], Stamp]()
        self._queue = queue.Queue[Callable[[], None]](MOST_WAITING)
        self._written = 0
        self._thread = threading.Thread(target=self._write_all, name="prompts", daemon=True)
        self._thread.start()
        atexit.register(self.flush)

    def restore(self, model: Transformer, tokens: list[int], owner: str = "") -> int:
        """Let the model hold as much of a prompt as there is here, if that is a block or more beyond what it holds; how much.

        owner: whose prompts alone these are.
        """
        n_held, inputs = len(tokens) - 1 - model.unread(tokens), self._inputs(model, tokens)
        blocks = [*takewhile(os.path.exists, self._paths(model, inputs, len(tokens) - 1, owner))]
        if len(blocks) * BLOCK < n_held + BLOCK:
            return 0
        model.hold(tokens, lambda buffers, n_kept: self._fill(model, buffers, inputs, blocks, n_kept))
        _are_used(blocks)
        return model.n_held if model.n_held > n_held else 0

    def keep(self, model: Transformer, tokens: list[int], is_read: bool = True, owner: str = "") -> None:
        """Write what the model holds of a text and the folder lacks, on a thread of its own, which has some time for it: what is
        too much now is for the next time. is_read: whether there is no more of it to read, so that its tail is worth a file.
        """
        n, inputs = model.look(lambda _, held, more: n_common(held, tokens, len(tokens))), self._inputs(model, tokens)
        paths = [*self._paths(model, inputs, n, owner)]
        for path, arrays in model.look(lambda *text: self._lacking(model, tokens[:n], inputs, paths, is_read, *text)):
            self._queue.put(partial(self._write, path, arrays))
        if is_read:
            self._queue.put(partial(_are_used, paths))

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until all is written that waits, so many seconds at most."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def _lacking(
        self, model: Transformer, tokens: list[int], inputs: list[int], paths: Sequence[Path], is_read: bool, buffers: Buffers,
        held: list[int], snapshots: Snapshots,
    ) -> list[tuple[Path, list[Any]]]:  # fmt: skip
        """Files to write of tokens that are held, copied: blocks, then tails behind some of them, where a text may go on."""
        n, room = n_common(held, tokens, len(tokens)), MOST_WAITING - 1 - self._queue.qsize()
        block_bytes = sum(math.prod(shape) * part.itemsize for shape, part in _parts(model, buffers, 0))
        paths = paths[: min(n, 7 * self._n_bytes // 8 // block_bytes * BLOCK) // BLOCK]  # one that is too long loses its end
        blocks = [i for i, path in enumerate(paths) if not os.path.exists(path)]
        if blocks and blocks[0] * BLOCK < model.whole_from:  # one that nobody can write any more, and what is behind it
            paths, blocks, is_read = paths[: blocks[0]], [], False
        blocks = blocks[: max(room, 0)]
        lacking = [(paths[i], self._arrays(model, buffers, inputs, i, BLOCK)) for i in blocks]
        for end, snapshot in self._ends(model, paths, n, snapshots) if is_read else ():
            if len(lacking) < room:
                i = end // BLOCK
                arrays = self._arrays(model, buffers, inputs, i, end - i * BLOCK)
                lacking.append((paths[i - 1].with_suffix(TAIL), [np.array([end], np.int64), *arrays, *_state_arrays(snapshot)]))
        return lacking

    @staticmethod
    def _ends(model: Transformer, paths: Sequence[Path], n: int, snapshots: Snapshots) -> Iterator[tuple[int, Snapshot | None]]:
        """Where tails of a text of n tokens end, with the states there: the last one anew, it may be another text's."""
        if not model.has_state:
            if len(paths) == n // BLOCK > 0 and len(paths) * BLOCK >= model.whole_from:
                yield n, None
            return
        last = snapshots.best(n)
        for each in snapshots:
            behind = each.n // BLOCK if each.n <= n else 0
            if 0 < behind <= len(paths) and (each.n == last or not os.path.exists(paths[behind - 1].with_suffix(TAIL))):
                yield each.n, each

    @staticmethod
    def _arrays(model: Transformer, buffers: Buffers, inputs: list[int], i: int, n: int) -> list[Any]:
        """What is written of n tokens of block i, behind which there are zeros."""
        arrays = [np.zeros(BLOCK, np.uint64)]
        arrays[0][:n] = inputs[i * BLOCK : i * BLOCK + n]
        for shape, part in _parts(model, buffers, i):
            array = np.zeros(shape, part.dtype)
            array[tuple(map(slice, part.shape))] = part
            arrays.append(array)
        return arrays

    def _paths(self, model: Transformer, inputs: list[int], n: int, owner: str) -> Iterator[Path]:
        """The file of each block of a text's first n tokens."""
        digest = self._stamp(model).digest + owner.encode() + bytes([model.config.is_long(len(inputs))])
        for first in range(0, n // BLOCK * BLOCK, BLOCK):
            block = np.array(inputs[first : first + BLOCK], np.uint64)
            digest = hashlib.sha256(digest + block.tobytes()).digest()
            yield self.folder / f"{digest.hex()[:40]}{ENDING}"

    def _stamp(self, model: Transformer) -> Stamp:
        """What keys and values depend on beside tokens and the rows of their tables."""
        key = id(model.weights), model.kv, model.hidden_layers
        if key not in self._stamps or self._stamps[key].weights() is not model.weights:
            digest = hashlib.sha256(f"{self._revision} {model.kv} {model.hidden_layers} {model.config!r}".encode())
            for name, m in model.weights.matrices.items():
                digest.update(f"{name} {m.kind.name} {m.n} {m.group} {m.first} {m.total} {m.strips.shape}".encode())
                digest.update(checksum([m.strips]))
            for name, vector in model.weights.vectors.items():
                digest.update(f"{name} {vector.shape}".encode() + checksum([vector]))
            self._stamps[key] = Stamp(weakref.ref(model.weights), digest.digest(), {})
        return self._stamps[key]

    def _inputs(self, model: Transformer, tokens: list[int]) -> list[int]:
        """Return what a pass takes in of each token: its id, or, where it has rows in tables, a number that stands for both.

        Raises CheckpointError where a table's file is not what it was.
        """
        if not model.weights.tables:
            return tokens
        known = self._stamp(model).inputs
        for token in {*tokens} - known.keys():
            rows = [np.array([token], np.int64), *(table.rows([token]) for table in model.weights.tables.values())]
            known[token] = int.from_bytes(checksum(rows)[:8], "little")
        return [known[token] for token in tokens]

    def _fill(
        self, model: Transformer, buffers: Buffers, inputs: list[int], blocks: Sequence[Path], n_kept: int
    ) -> tuple[int, Snapshots]:
        """Blocks behind n_kept tokens into buffers as far as they are sound, and the tail that reaches farthest; how many tokens
        there are then, and the state.
        """
        first, snapshots = n_kept // BLOCK, Snapshots()
        n = first * BLOCK
        for i, path in enumerate(blocks[first:], first):
            arrays = self._arrays_like(model, buffers)
            if not self._read(path, arrays) or arrays[0].tolist() != inputs[i * BLOCK : (i + 1) * BLOCK]:
                break
            _put(model, buffers, i, arrays)
            n += BLOCK
        for i in range(n // BLOCK, max(first, 1) - 1, -1):
            tail, arrays = blocks[i - 1].with_suffix(TAIL), self._arrays_like(model, buffers)
            end, snapshot = np.zeros(1, np.int64), snapshot_of(buffers, 0) if model.has_state else None
            if os.path.exists(tail) and self._read(tail, [end, *arrays, *_state_arrays(snapshot)]):
                at, more = i * BLOCK, int(end[0]) - i * BLOCK
                there = n_common(arrays[0].tolist(), inputs[at:], min(max(more, 0), BLOCK, len(inputs) - 1 - at))
                if at + there > n_kept and (not snapshot or there == more):
                    _put(model, buffers, i, arrays)
                    if snapshot:
                        snapshots.add(snapshot._replace(n=at + there))
                    return at + there, snapshots
            if not model.has_state:
                break
        return (0 if model.has_state else n), snapshots

    @staticmethod
    def _arrays_like(model: Transformer, buffers: Buffers) -> list[Any]:
        return [np.zeros(BLOCK, np.uint64), *(np.empty(shape, part.dtype) for shape, part in _parts(model, buffers, 0))]

    def _read(self, path: Path, arrays: Sequence[Any]) -> bool:
        """Whether a file holds arrays like those, which are filled then."""
        with suppress(OSError):
            with path.open("rb", buffering=0) as file:
                head = file.read(len(MAGIC) + CHECKSUM_BYTES)
                n = sum(file.readinto(array.data.cast("B")) for array in arrays)
                is_whole = n == sum(array.nbytes for array in arrays) and not file.read(1)
            if is_whole and head == MAGIC + checksum(arrays):
                return True
            path.unlink()
        self._tell_once("damaged", f"{path.name} in {self.folder} is damaged or no prompt's: it counts as none")
        return False

    def _write_all(self) -> None:
        """On a thread of its own, as long as there is something to write. It outlives whatever fails."""
        while True:
            work = self._queue.get()
            try:
                work()
            except Exception as error:
                words = error.strerror if isinstance(error, OSError) else repr(error)
                self._tell_once("written", f"cannot keep prompts in {self.folder}: {words}")
            finally:
                del work  # and the arrays that it holds
                self._queue.task_done()

    def _write(self, path: Path, arrays: Sequence[Any]) -> None:
        beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(MAGIC + checksum(arrays))
                for array in arrays:
                    file.write(np.ascontiguousarray(array).data)
            beside.replace(path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
        self._written += sum(array.nbytes for array in arrays)
        if self._written > self._n_bytes // 16 or path.suffix == TAIL:
            self._written = 0
            self._make_room()

    def _make_room(self) -> None:
        """What has not been used for longest goes, until the rest takes no more than may be."""
        files, latest = list[tuple[int, int, str]](), time.time_ns() + AHEAD_NS
        for entry in os.scandir(self.folder):
            if OWN_NAME.fullmatch(entry.name):
                with suppress(OSError):
                    used = entry.stat().st_mtime_ns
                    files.append((used if used <= latest else 0, entry.stat().st_size, entry.path))
        left = sum(size for _, size, _ in files) - self._n_bytes
        for _, size, path in sorted(files):
            if left <= 0:
                return
            with suppress(OSError):
                os.unlink(path)
                left -= size

    def _tell_once(self, what: str, line: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._tell(line)


def _are_used(paths: Sequence[Path]) -> None:
    """A prompt's blocks, and the tails behind them, the first one last."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        for each in (path, path.with_suffix(TAIL)):
            with suppress(OSError):
                os.utime(each, ns=(now - i * APART_NS, now - i * APART_NS))


def _places(model: Transformer) -> list[tuple[str, int, int]]:
    """Of buffers that are a text's own and grow with it: their names, along which axis, and positions a place."""
    architecture, places = architecture_of(model.config), []
    one, two = (
        architecture.all_buffers(model.config, model.weights, Room(KV_CACHES[model.kv], n, 1, len(model.hidden_layers)))
        for n in (BLOCK, 2 * BLOCK)
    )
    for name, buffer in sorted(one.items()):
        axes = [i for i, (short, long) in enumerate(zip(buffer.shape, two[name].shape, strict=True)) if short != long]
        if buffer.is_own and axes:
            places.append((name, axes[0], BLOCK // buffer.shape[axes[0]]))
    return places


def _parts(model: Transformer, buffers: Buffers, i: int) -> Iterator[tuple[tuple[int, ...], Any]]:
    """What such buffers hold of block i, as far as they have room, and the shape of a whole one."""
    for name, axis, per in _places(model):
        array = getattr(buffers, name)
        part = array[(*[slice(None)] * axis, slice(i * BLOCK // per, (i + 1) * BLOCK // per))]
        yield (*array.shape[:axis], BLOCK // per, *array.shape[axis + 1 :]), part


def _put(model: Transformer, buffers: Buffers, i: int, arrays: Sequence[Any]) -> None:
    """A block's arrays, the tokens first, where they belong."""
    for (_, part), array in zip(_parts(model, buffers, i), arrays[1:], strict=False):
        part[...] = array[tuple(map(slice, part.shape))]


def _state_arrays(snapshot: Snapshot | None) -> list[Any]:
    return [] if not snapshot else [snapshot.inputs, *([] if snapshot.states is None else [snapshot.states])]
