"""Compiled functions, and the files that keep their machine code from one process to the next.

numba's own cache watches the one file a function is defined in, and takes its files on trust. Here one stamp stands for all
files in which something compiled is written, so a function is compiled again when another that it calls has changed; and a file
that is empty, cut off, flipped or unreadable is as good as none: a cache is not data. Where nothing can be written, every
process compiles.
"""

import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core import caching
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from .linking import link_late

HOME = Path(__file__).resolve().parents[1]
# Whatever compiled functions are written in, or take constants from.
SOURCES = (
    *(f"machine/{name}.py" for name in ("cache", "elementary", "linking", "memory", "programs", "threads", "tiles", "vectors")),
    *(f"weights/{name}.py" for name in ("blocks", "fp32", "groups", "half", "int4", "int8", "matrix")),
    "kernels.py",
    "sampling.py",
)
STAMP = hashlib.sha256(b"\0".join((HOME / name).read_bytes() for name in SOURCES)).hexdigest()[:16]
CHECKSUM_BYTES = 32

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set; specdec's kernels exist compiled only, so unset it")


link_late()
on_compiling: list[Callable[[str], object]] = []  # the last one is told the name of each function that is about to be compiled


class MachineCode(caching.NullCache):
    """What one function was compiled to: a file for each signature and CPU, of a checksum and numba's own pickle.

    The checksum is of the file's name too: a function's code under another's name is as good as none.
    """

    def __init__(self, named: Callable[..., Any]) -> None:
        source = Path(named.__code__.co_filename).resolve()
        if source not in {HOME / name for name in SOURCES}:
            raise RuntimeError(f"{source} compiles {named.__qualname__} for the cache and is not one of {', '.join(SOURCES)}")
        self._name = ".".join((*source.relative_to(HOME).with_suffix("").parts, named.__qualname__))

    @property
    def cache_path(self) -> str:
        return folder()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """What was compiled for that signature, or None."""
        found = self._load(signature, target_context) if folder() else None
        if not found and on_compiling:
            on_compiling[-1](self._name)
        return found

    def _load(self, signature: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # all that machine code calls; `refresh` would load all that numba can compile: 0.15 s
        try:
            path = self._path(signature, target_context.codegen())
            data = Path(path).read_bytes()
            content = data[CHECKSUM_BYTES:]
            if _checksum(path, content) != data[:CHECKSUM_BYTES]:
                return None
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception:  # whatever is wrong with a file, compiling mends it
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled, if there is room."""
        if not folder() or compiled.library.has_dynamic_globals:  # addresses of this process
            return
        content = dumps(compiled._reduce())
        with suppress(OSError):
            path = self._path(signature, compiled.codegen)
            _write(path, _checksum(path, content) + content)

    def flush(self) -> None:
        """Nothing is kept in memory."""

    def _path(self, signature: Any, codegen: Any) -> str:
        what = repr((str(signature), codegen.magic_tuple(), sys.version_info[:2], numba.__version__))
        return os.path.join(folder(), f"{self._name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.{STAMP}.code")


_folder: list[str] = []


def folder() -> str:
    """Where machine code is kept: NUMBA_CACHE_DIR, else __pycache__ here, else the user's cache; empty if none can be written."""
    if not _folder:
        places = (caching.UserProvidedCacheLocator, caching.InTreeCacheLocator, caching.UserWideCacheLocator)
        locators = (place.from_function(folder, str(HOME / "kernels.py")) for place in places)
        _folder.append(next((locator.get_cache_path() for locator in locators if locator), ""))
    return _folder[0]


def _checksum(path: str, content: bytes) -> bytes:
    return hashlib.sha256(os.path.basename(path).encode() + content).digest()


def _write(path: str, data: bytes) -> None:
    """A whole file or none; those of an older stamp go."""
    place = os.path.dirname(path)
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
    for entry in os.scandir(place):
        if entry.name.endswith(".code") and not entry.name.endswith(f".{STAMP}.code"):
            with suppress(OSError):
                os.unlink(entry.path)


def _cached(dispatcher: Any) -> Any:
    dispatcher._cache = MachineCode(dispatcher.py_func)
    return dispatcher


def compiled(function: Callable[..., Any]) -> Any:
    """A function in machine code, which lets other Python threads run."""
    return _cached(njit(nogil=True, error_model="numpy")(function))


def inner(function: Callable[..., Any]) -> Any:
    """A function that only such functions call: it is part of their machine code, and has none of its own to be kept."""
    return njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def parallel(function: Callable[..., Any]) -> Any:
    """The same, whose `prange` runs on several threads."""
    return _cached(njit(parallel=True, nogil=True)(function))


def callback(signature: Any, function: Callable[..., Any], source: Callable[..., Any] | None = None) -> int:
    """The address of a function in machine code that is called from machine code; compiled when asked for.

    source: the function that it stands for, where it is made by another one and is to be kept; a made one is not kept else.
    """
    code: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nogil": True, "error_model": "numpy"})
    if source or function.__closure__ is None:
        code._cache = MachineCode(source or function)
    code.compile()
    _keep.append(code)
    return int(code.address)


_keep: list[Any] = []  # an address is good as long as its code is
inlined = njit(inline="always", error_model="numpy")
