"""Compiled functions, and the files that keep their machine code from one process to the next.

numba's own cache watches the one file a function is defined in, and takes its files on trust. Here one stamp stands for all
files in which something compiled is written, so a function is compiled again when another that it calls has changed; and a file
that is empty, cut off, flipped or unreadable is as good as none: a cache is not data. All environments of a user share one
folder. Processes that need the same function at the same time leave it to the first of them. Where nothing can be written,
every process compiles.
"""

import functools
import hashlib
import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core import caching
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python
from numba.core.serialize import dumps
from numba.extending import register_jitable
from numba.misc.appdirs import user_cache_dir
from numba.np.numpy_support import from_dtype, map_layout

from specdec.runtime.compile_locks import Claims
from specdec.runtime.linking import link_late

HOME = Path(__file__).resolve().parents[1]
# Every file that holds compiled functions, or constants that they take: whole folders, so that a new file needs no entry.
_FOLDERS = ("heads", "layers", "model", "quant", "runtime")
_FILES_BESIDE = ("config.py", "kernels.py", "sampling.py")
SOURCES = (*sorted(f"{folder}/{path.name}" for folder in _FOLDERS for path in (HOME / folder).glob("*.py")), *_FILES_BESIDE)
STAMP = hashlib.sha256(b"\0".join((HOME / name).read_bytes() for name in SOURCES)).hexdigest()[:16]
_FILES = {str(HOME / name) for name in SOURCES}
STAMPED = re.compile("[0-9a-f]{16}")
CHECKSUM_BYTES = 32
RUNTIME = "NRT_"  # what names of numba's runtime begin with
UNUSED_DAYS = 30  # after which the code of another stamp goes

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set; specdec's kernels exist compiled only, so unset it")


link_late()
# The last one is told of each function that is compiled its name, and how many were begun; and "" when none is any longer.
on_compiling: list[Callable[[str, int], object]] = []
_underway: list[str] = []  # a function calls others, which are compiled in the middle of it
_n_begun = 0


def _tell(name: str) -> None:
    for tell in on_compiling[-1:]:  # a caller that was interrupted may no longer listen
        tell(name, _n_begun)


class MachineCode(caching.NullCache):
    """What one function was compiled to: a file for each signature and CPU, of a checksum and numba's own pickle.

    The checksum is of the file's name too: a function's code under another's name is as good as none. name: the function's own,
    unless it is another function's that made it.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        source = os.path.realpath(function.__code__.co_filename)
        if source not in _FILES:
            raise RuntimeError(f"{source} compiles {function.__qualname__} for the cache and is not one of {', '.join(SOURCES)}")
        self._name = name or f"{function.__module__.partition('.')[2]}.{function.__qualname__}"

    @property
    def cache_path(self) -> str:
        return folder()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """What was compiled for that signature, or None; then it is this process's to compile and nobody else's."""
        found = self._load(signature, target_context) if folder() else None
        if found:
            return found
        global _n_begun
        _n_begun += 1
        _underway.append(self._name)
        _tell(self._name)
        if folder():
            path = self._path(signature, target_context.codegen())
            if claims.take(path):  # somebody was at it
                found = self._load(signature, target_context)
            if found:
                claims.give(path)
                self._is_compiled()
        return found

    def is_kept(self, signature: Any) -> bool:
        """Whether there is a file for that signature."""
        return bool(folder()) and os.path.exists(self._path(signature, cpu_target.target_context.codegen()))

    def _load(self, signature: Any, target_context: Any) -> Any:
        _lend_runtime()
        try:
            path = self._path(signature, target_context.codegen())
            content = kept(path)
            return CompileResult._rebuild(target_context, *pickle.loads(content)) if content else None
        except Exception:  # whatever is wrong with a file, compiling mends it
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled, if there is room."""
        if folder():
            path = self._path(signature, compiled.codegen)
            library = compiled.library  # dynamic globals: addresses of this process
            if not library.has_dynamic_globals and library.asks_for(RUNTIME) <= _lent().keys():
                content = dumps((library.to_keep(), *compiled._reduce()[1:]))
                with suppress(OSError):
                    keep(path, content)
            claims.give(path)
        self._is_compiled()

    def _is_compiled(self) -> None:
        """Nobody waits for it any longer."""
        if self._name in _underway:
            del _underway[_underway.index(self._name) :]
        _tell(_underway[-1] if _underway else "")

    def flush(self) -> None:
        """Nothing is kept in memory."""

    def _path(self, signature: Any, codegen: Any) -> str:
        what = repr((str(signature), codegen.magic_tuple(), sys.version_info[:2], numba.__version__, llvmlite.__version__))
        return os.path.join(folder(), f"{self._name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.code")


def _lent() -> dict[str, int]:
    """What machine code that was kept finds of numba's runtime, by name: the helpers in C; the rest is part of the code."""
    return {name if name.startswith("_") else RUNTIME + name: address for name, address in _nrt_python.c_helpers.items()}


@functools.cache
def _lend_runtime() -> None:
    """In the place of `rtsys.initialize`, which compiles the rest: 0.02 s; and of `refresh`, which loads all of numba: 0.15 s."""
    for name, address in _lent().items():
        llvmlite.binding.add_symbol(name, address)


_folder: list[str] = []


def folder() -> str:
    """Where machine code is kept: in NUMBA_CACHE_DIR, else in the user's cache, else in __pycache__ here; empty if none can be
    written to."""
    if not _folder:
        given = os.environ.get("NUMBA_CACHE_DIR")
        places = [Path(given, "specdec")] if given else [_of_user(), HOME / "__pycache__"]
        _folder.append(next((str(place / STAMP) for place in places if _can_write(place / STAMP)), ""))
        _kept()  # before anything is added
    return _folder[0]


def _of_user() -> Path:
    """The user's cache. A relative or empty XDG_CACHE_HOME counts as none: anybody's code may lie where a person is."""
    place = user_cache_dir("specdec", False)
    return Path(place if os.path.isabs(place) else os.path.expanduser("~/.cache/specdec"))


def _can_write(place: Path) -> bool:
    """Whether files can be made there; the folder is in use from now on."""
    unfinished = place / os.urandom(8).hex()
    try:
        place.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        unfinished.unlink()
        os.utime(place)
    except OSError:
        return False
    return True


claims = Claims(lambda: os.path.join(folder(), "claims"))


@functools.cache
def _kept() -> tuple[set[str], bool]:
    """The names of the functions whose code was there at the first look, and whether there was a folder of another stamp."""
    if not folder():
        return set(), False
    try:
        files = [entry.name for entry in os.scandir(folder()) if entry.name.endswith(".code")]
        stamps = [entry.name for entry in os.scandir(os.path.dirname(folder())) if STAMPED.fullmatch(entry.name)]
    except OSError:
        return set(), False
    return {name.split("-")[0] for name in files}, len(stamps) > 1


def why(name: str) -> str:
    """Why a function is compiled now, in a few words."""
    kept, is_changed = _kept()
    room, _, kind = name.rpartition(".")[0].partition(".")
    if not folder():
        return "as in every run: there is no folder for machine code"
    if not kept:
        return "the first run of this version" if is_changed else "a first run"
    if room == "quant" and kind and not any(other.startswith(f"{room}.{kind}.") for other in kept):
        return "a new kind of weights"
    return "for the first time"


def _checksum(path: str, content: bytes) -> bytes:
    return hashlib.sha256(os.path.basename(path).encode() + content).digest()


def kept(path: str) -> bytes:
    """What `keep` put there; nothing where it is damaged. Raises OSError."""
    data = Path(path).read_bytes()
    content = data[CHECKSUM_BYTES:]
    return content if _checksum(path, content) == data[:CHECKSUM_BYTES] else b""


def keep(path: str, content: bytes) -> None:
    """A whole file or none; what has other stamps and was long not used goes."""
    place, data = os.path.dirname(path), _checksum(path, content) + content
    os.makedirs(place, exist_ok=True)
    unfinished = f"{path}.{os.urandom(8).hex()}"
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    for entry in os.scandir(os.path.dirname(place)):
        if STAMPED.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
            shutil.rmtree(entry.path, ignore_errors=True)


def undisturbed(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, which no signal's handler stops halfway: what a handler raises reaches the caller at once, as Ctrl-C does,
    and the work goes on to its end.

    Handlers run in the main thread, so there the work is done by another thread, and waited for. In the middle of it numba would
    never again find what it had begun to register, and LLVM's callbacks and what numba tidies up would swallow the exception.
    """

    def waited_for(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or global_compiler_lock.is_locked():
            return work(*args)
        results, errors = list[Any](), list[BaseException]()

        def run() -> None:
            try:
                results.append(work(*args))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="specdec-compiling")
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return results[0]

    return waited_for


def _cached(dispatcher: Any) -> Any:
    type_of = dispatcher.typeof_pyval
    dispatcher._cache = MachineCode(dispatcher.py_func)
    dispatcher.compile = undisturbed(dispatcher.compile)
    # What numba does before it asks for code, and takes 0.03 s: a look through all installed packages for what extends it, and
    # for arrays numpy.ma.
    dispatcher._compilation_chain_init_hook = tuple
    dispatcher.typeof_pyval = lambda value: _array_of(value) if type(value) is np.ndarray else type_of(value)
    return dispatcher


def _array_of(value: npt.NDArray[Any]) -> Any:
    return _array(value.dtype, value.ndim, map_layout(value), not value.flags.writeable)


@functools.cache
def _array(dtype: Any, n_dimensions: int, layout: str, is_readonly: bool) -> Any:
    return types.Array(from_dtype(dtype), n_dimensions, layout, readonly=is_readonly)


def compiled(function: Callable[..., Any]) -> Any:
    """A function in machine code, which lets other Python threads run."""
    return _cached(njit(nogil=True, error_model="numpy")(function))


def inner(function: Callable[..., Any]) -> Any:
    """A function for those in machine code: it is part of theirs, and has none of its own to be kept. Python runs it as it is."""
    return register_jitable(error_model="numpy")(function)


def parallel(function: Callable[..., Any]) -> Any:
    """The same, whose `prange` runs on several threads."""
    return _cached(njit(parallel=True, nogil=True)(function))


def callback(signature: Any, function: Callable[..., Any], place: MachineCode | None = None) -> int:
    """The address of a function in machine code that is called from machine code; compiled when asked for.

    place: where it is kept, if it is made by another one; such a one is not kept else.
    """
    code: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nogil": True, "error_model": "numpy"})
    if place or function.__closure__ is None:
        code._cache = place or MachineCode(function)
    undisturbed(code.compile)()
    _keep.append(code)
    return int(code.address)


_keep: list[Any] = []  # an address is good as long as its code is
inlined = njit(inline="always", error_model="numpy")
