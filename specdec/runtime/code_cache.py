"""The cache of compiled functions: files that keep their machine code from one process to the next.

numba's own cache watches only the file that defines a function, and trusts its cache files. Here one source hash covers all files
with compiled code, so a function is compiled again if another that it calls has changed. An empty, truncated, corrupted or
unreadable cache file counts as missing: a cache is not data. All environments of a user share one folder. Processes that need the
same function at the same time wait for the first of them. If no folder is writable, every process compiles.
"""

import functools
import gc
import hashlib
import os
import pickle
import re
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
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
from numba.core.typing import templates
from numba.misc.appdirs import user_cache_dir
from numba.np.numpy_support import from_dtype, map_layout

from specdec.runtime.late_linking import KernelCompiler, enable_late_linking

PACKAGE_DIR = Path(__file__).resolve().parents[1]
# Every file with compiled functions or constants that they use: whole folders, so that a new file needs no entry.
_SOURCE_FOLDERS = ("heads", "layers", "model", "quant", "runtime")
_SOURCE_FILES = ("model_config.py", "kernels.py", "sampling.py", "draft/lookup_tables.py")
SOURCES = (
    *sorted(f"{folder}/{path.name}" for folder in _SOURCE_FOLDERS for path in (PACKAGE_DIR / folder).glob("*.py")),
    *_SOURCE_FILES,
)
SOURCE_HASH = hashlib.sha256(b"\0".join((PACKAGE_DIR / name).read_bytes() for name in SOURCES)).hexdigest()[:16]
_SOURCE_PATHS = {str(PACKAGE_DIR / name) for name in SOURCES}
SOURCE_HASH_PATTERN = re.compile("[0-9a-f]{16}")
CHECKSUM_BYTES = 32
NRT_PREFIX = "NRT_"  # of names in numba's runtime
LOCK_TIMEOUT_S = 60.0  # for a process that was stopped, or has an error that this one will report
POLL_INTERVAL_S = 0.01
MAX_UNUSED_DAYS = 30  # after which code of another source hash is deleted

try:
    import fcntl

    def _lock_byte(file: int, offset: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)

    def _unlock_byte(file: int, offset: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)

except ImportError:  # Windows
    msvcrt = import_module("msvcrt")

    def _lock_byte(file: int, offset: int) -> None:
        os.lseek(file, offset, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

    def _unlock_byte(file: int, offset: int) -> None:
        os.lseek(file, offset, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)


if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, but specdec's kernels only run compiled; unset it")


enable_late_linking()
# Callbacks (name, number, total) for each function that is compiled, the number-th of about `total`, with the name "" when none
# is. Only the last callback is called.
compile_reporters: list[Callable[[str, int, int], object]] = []
write_errors: list[OSError] = []  # of code that could not be kept
_in_progress: list[str] = []  # a stack: functions that a function calls are compiled in the middle of it
_n_started = 0
_expected_names = set[str]()  # of functions that were missing and will be needed


def _report_compiling(name: str) -> None:
    for report in compile_reporters[-1:]:  # the caller of an earlier one may have been interrupted
        stored, known_before = list_cached_names(), _scan_cache()[0]
        new = stored - known_before
        n = max(_n_started, len(new) + bool(name))  # other processes compile, too
        report(name, n, max(n, len(new | _expected_names)))


def expect_functions(names: Iterable[str]) -> None:
    """Announce functions that this process will need, for the total that `compile_reporters` receive."""
    _expected_names.update(set(names) - _scan_cache()[0])


# Compile locks: the first process that needs a function compiles it, and the others wait. A lock is on one byte of a file, at an
# offset that is a hash of the function's name. It ends with its process, however that ends.


class AlreadyCompilingError(Exception):
    """Raised if another process holds the compile lock of a function and `CompileLocks.is_blocking` is False."""


class CompileLocks:
    """Locks between processes, one per function name, so that only one process compiles a function.

    Attributes:
        is_blocking: Whether `acquire` waits while another process holds a lock; else it raises `AlreadyCompilingError`.
    """

    def __init__(self, path: Callable[[], str]) -> None:
        """Create the locks; `path` returns the path of the lock file and is called on first use."""
        self._path = path
        self._file = -1
        self.is_blocking = True

    def acquire(self, name: str) -> bool:
        """Lock the name of a function for this process, and return whether another process held that lock meanwhile.

        Waits up to LOCK_TIMEOUT_S for the other process, then continues without the lock. Returns False at once, without a lock,
        if the file cannot be opened or the file system has no locks.

        Raises:
            AlreadyCompilingError: Another process holds the lock, and `is_blocking` is False.
        """
        try:
            if self._file < 0:
                self._file = os.open(self._path(), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return False
        deadline, was_taken = time.monotonic() + LOCK_TIMEOUT_S, False
        while not _try_lock(self._file, _get_lock_offset(name)):
            if not self.is_blocking:
                raise AlreadyCompilingError(name)
            was_taken = True
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        return was_taken

    def release(self, name: str) -> None:
        """Release the lock that `acquire` took for the name of a function, if any."""
        if self._file >= 0:
            with suppress(OSError):
                _unlock_byte(self._file, _get_lock_offset(name))


def _get_lock_offset(name: str) -> int:
    return zlib.crc32(os.path.basename(name).encode()) >> 1


def _try_lock(file: int, offset: int) -> bool:
    """Lock one byte of an open file without waiting, and return whether it worked; True also if the file system has no locks."""
    try:
        _lock_byte(file, offset)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


class MachineCodeCache(caching.NullCache):
    """The machine code of one function in the disk cache: a file per signature and CPU, with a checksum and numba's own pickle.

    The checksum covers the file's name, too: a function's code under another function's name counts as missing.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        """Create the cache of a function.

        Args:
            function: A Python function from one of SOURCES.
            name: Name of its files; needed if another function created it. By default its module and qualified name.

        Raises:
            RuntimeError: The function is defined in a file that is not one of SOURCES.
        """
        source = os.path.realpath(function.__code__.co_filename)
        if source not in _SOURCE_PATHS:
            raise RuntimeError(f"{source} compiles {function.__qualname__} for the cache and is not one of {', '.join(SOURCES)}")
        self._name = name or f"{function.__module__.partition('.')[2]}.{function.__qualname__}"

    @property
    def cache_path(self) -> str:
        """Path of the cache folder, or "" if none is writable."""
        return get_cache_dir()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the function's machine code for a numba signature from the cache, or None if the caller must compile it.

        If another process is compiling the code, waits for that process. With None, this process holds the function's compile
        lock until it calls `save_overload`, and has reported the start to `compile_reporters`.

        Raises:
            AlreadyCompilingError: Another process is compiling the code, and `compile_locks` do not wait.
        """
        found = self._load(signature, target_context) if get_cache_dir() else None
        if found:
            return found
        global _n_started
        _n_started += 1
        _in_progress.append(self._name)
        _report_compiling(self._name)
        if get_cache_dir():
            path = self._path(signature, target_context.codegen())
            if compile_locks.acquire(path):  # another process was compiling it
                found = self._load(signature, target_context)
            if found:
                compile_locks.release(path)
                self._report_compiled()
        return found

    def is_stored(self, signature: Any) -> bool:
        """Return whether the cache has a file with the function's machine code for a numba signature."""
        return bool(get_cache_dir()) and os.path.exists(self._path(signature, cpu_target.target_context.codegen()))

    def _load(self, signature: Any, target_context: Any) -> Any:
        _register_runtime_symbols()
        try:
            path = self._path(signature, target_context.codegen())
            content = read_cached(path)
            return CompileResult._rebuild(target_context, *pickle.loads(content)) if content else None
        except Exception:  # compiling repairs any kind of bad file
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Save newly compiled code for a signature in the cache, and release the lock that `load_overload` acquired.

        Skips code that cannot be cached or written. Reports to `compile_reporters` that the function is compiled.
        """
        if get_cache_dir():
            path = self._path(signature, compiled.codegen)
            library = compiled.library  # dynamic globals are addresses of this process, so they are not cached
            if not library.has_dynamic_globals and library.find_undefined(NRT_PREFIX) <= _get_runtime_symbols().keys():
                content = dumps((library.serialize(), *compiled._reduce()[1:]))
                try:
                    write_cached(path, content)
                except OSError as error:
                    write_errors.append(error)
            compile_locks.release(path)
        self._report_compiled()

    def _report_compiled(self) -> None:
        """Report to `compile_reporters` that this function is compiled, with the name of the one still being compiled, or ""."""
        if self._name in _in_progress:
            del _in_progress[_in_progress.index(self._name) :]
        _report_compiling(_in_progress[-1] if _in_progress else "")

    def flush(self) -> None:
        """Do nothing: no state is kept in memory."""

    def _path(self, signature: Any, codegen: Any) -> str:
        key = repr((str(signature), codegen.magic_tuple(), sys.version_info[:2], numba.__version__, llvmlite.__version__))
        return os.path.join(get_cache_dir(), f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.code")


def _get_runtime_symbols() -> dict[str, int]:
    """Return the addresses, by name, of the C helpers in numba's runtime that cached machine code may call."""
    return {name if name.startswith("_") else NRT_PREFIX + name: address for name, address in _nrt_python.c_helpers.items()}


@functools.cache
def _register_runtime_symbols() -> None:
    """Register the C helpers of numba's runtime with LLVM, so that cached machine code can call them.

    It replaces `rtsys.initialize`, which compiles the rest in 0.02 s, and `refresh`, which loads all of numba in 0.15 s.
    """
    for name, address in _get_runtime_symbols().items():
        llvmlite.binding.add_symbol(name, address)


_cache_dir: list[str] = []


def get_cache_dir() -> str:
    """Return the path of the folder for machine code of this source hash, created if needed, or "" if no folder is writable.

    It is in NUMBA_CACHE_DIR if set, else in the user's cache, else in the package's __pycache__.
    """
    if not _cache_dir:
        folders = (path / SOURCE_HASH for path in list_cache_candidates())
        _cache_dir.append(next((str(path) for path in folders if _can_write(path)), ""))
        _scan_cache()  # before any file is added
    return _cache_dir[0]


def list_cache_candidates() -> list[Path]:
    """Return the folders that may hold the cache; it is in the first that is writable."""
    numba_dir = os.environ.get("NUMBA_CACHE_DIR")
    return [Path(numba_dir, "specdec")] if numba_dir else [_get_user_cache_dir(), PACKAGE_DIR / "__pycache__"]


def _get_user_cache_dir() -> Path:
    """Return the path of specdec's folder in the user's cache.

    A relative or empty XDG_CACHE_HOME is ignored: a cache in the working directory could hold anyone's code.
    """
    path = user_cache_dir("specdec", False)
    return Path(path if os.path.isabs(path) else os.path.expanduser("~/.cache/specdec"))


def _can_write(path: Path) -> bool:
    """Create a folder if it does not exist, mark it as used now, and return whether files can be created in it."""
    test_file = path / os.urandom(8).hex()
    try:
        path.mkdir(parents=True, exist_ok=True)
        test_file.touch()
        test_file.unlink()
        os.utime(path)
    except OSError:
        return False
    return True


compile_locks = CompileLocks(lambda: os.path.join(get_cache_dir(), "claims"))


@functools.cache
def _scan_cache() -> tuple[set[str], bool]:
    """Return the names of all functions cached at the time of the first call, and whether another source hash has a folder."""
    names, n_hashes = list_cached_names(), 0
    with suppress(OSError):
        folders = os.scandir(os.path.dirname(get_cache_dir())) if get_cache_dir() else ()
        n_hashes = sum(1 for entry in folders if SOURCE_HASH_PATTERN.fullmatch(entry.name))
    return names, n_hashes > 1


def list_cached_names() -> set[str]:
    """Return the names of all functions that are cached now, for any CPU."""
    if not get_cache_dir():
        return set()
    with suppress(OSError):
        return {entry.name.split("-")[0] for entry in os.scandir(get_cache_dir()) if entry.name.endswith(".code")}
    return set()


def get_compile_reason(name: str) -> str:
    """Return a phrase for users that explains why the function `name` is compiled now, for example "a first run"."""
    cached_names, is_changed = _scan_cache()
    package, _, module = name.rpartition(".")[0].partition(".")
    if not get_cache_dir():
        return "as in every run: no cache folder is writable"
    if not cached_names:
        return "the first run of this version" if is_changed else "a first run"
    if package == "quant" and module and not any(other.startswith(f"{package}.{module}.") for other in cached_names):
        return "a new weight format"
    return "for the first time"


def _compute_checksum(path: str, content: bytes) -> bytes:
    return hashlib.sha256(os.path.basename(path).encode() + content).digest()


def read_cached(path: str) -> bytes:
    """Return the bytes that `write_cached` wrote to a path, or b"" if the file is damaged.

    Raises:
        OSError: The file cannot be read.
    """
    data = Path(path).read_bytes()
    content = data[CHECKSUM_BYTES:]
    return content if _compute_checksum(path, content) == data[:CHECKSUM_BYTES] else b""


def write_cached(path: str, content: bytes) -> None:
    """Write bytes and their checksum to a path atomically, and delete folders of source hashes unused for MAX_UNUSED_DAYS.

    Raises:
        OSError: The file cannot be written.
    """
    folder, data = os.path.dirname(path), _compute_checksum(path, content) + content
    os.makedirs(folder, exist_ok=True)
    temporary = f"{path}.{os.urandom(8).hex()}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    for entry in os.scandir(os.path.dirname(folder)):
        if SOURCE_HASH_PATTERN.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - MAX_UNUSED_DAYS * 86400:
            shutil.rmtree(entry.path, ignore_errors=True)


def shield_from_signals(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of a function that runs the function to its end even if a signal handler raises an exception.

    An exception of a handler, like Ctrl-C, reaches the caller at once, and the work runs to its end. Handlers run in the main
    thread, so there another thread does the work while the main thread waits. If a handler interrupted it, numba would never find
    again what it had started to register, and LLVM's callbacks and numba's cleanup would swallow the exception.
    """

    def run_shielded(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or global_compiler_lock.is_locked():
            return work(*args)
        results, errors = list[Any](), list[BaseException]()

        def run() -> None:
            is_collecting = gc.isenabled()
            gc.disable()  # it would take a tenth of the time, and finds little
            try:
                results.append(work(*args))
            except BaseException as error:
                errors.append(error)
            finally:
                if is_collecting:
                    gc.enable()

        thread = threading.Thread(target=run, name="specdec-compiling")
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return results[0]

    return run_shielded


_live_code: list[Any] = []  # callbacks, since their addresses may be used, and dispatchers, which numba refers to weakly
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
_njit = functools.partial(njit, pipeline_class=KernelCompiler, **_OPTIONS)


def _enable_cache(dispatcher: Any) -> Any:
    callee = make_dispatcher(dispatcher.py_func)  # compiled callers include its code, instead of waiting for a cached one
    dispatcher.get_call_template, dispatcher.get_overload = callee.get_call_template, callee.get_overload
    type_of = dispatcher.typeof_pyval
    dispatcher._cache = MachineCodeCache(dispatcher.py_func)
    dispatcher.compile = shield_from_signals(dispatcher.compile)
    # Skip what numba does before it looks for code, which takes 0.03 s: it searches all installed packages for extensions, and
    # imports numpy.ma for arrays.
    dispatcher._compilation_chain_init_hook = tuple
    dispatcher.typeof_pyval = lambda value: _get_array_type(value) if type(value) is np.ndarray else type_of(value)
    return dispatcher


def _get_array_type(value: npt.NDArray[Any]) -> Any:
    return _make_array_type(value.dtype, value.ndim, map_layout(value), not value.flags.writeable)


@functools.cache
def _make_array_type(dtype: Any, n_dimensions: int, layout: str, is_readonly: bool) -> Any:
    return types.Array(from_dtype(dtype), n_dimensions, layout, readonly=is_readonly)


def compiled(function: Callable[..., Any]) -> Any:
    """Return a dispatcher that compiles a function to cached machine code when it is first called; the code releases the GIL."""
    return _enable_cache(_njit(nogil=True)(function))


def jitable(function: Callable[..., Any]) -> Any:
    """Return a function unchanged, after making it callable from compiled functions.

    Compiled callers include its code, so it has no cache file. Called from Python, it runs as Python code.
    """
    dispatcher = make_dispatcher(function)
    _live_code.append(dispatcher)
    templates.builtin_registry.register_global(function, types.Dispatcher(dispatcher))
    return function


def make_dispatcher(function: Callable[..., Any]) -> Any:
    """Return a dispatcher that compiles a function for compiled callers only, without a cache file.

    It compiles once for all arguments of the same types; numba itself compiles again for each literal argument.
    """
    dispatcher = _njit(no_cpython_wrapper=True)(function)
    get_template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: get_template(
        [types.unliteral(arg) for arg in args], {name: types.unliteral(arg) for name, arg in kws.items()}
    )
    return dispatcher


def parallel(function: Callable[..., Any]) -> Any:
    """Return a dispatcher that compiles a function like `compiled`, and runs its `prange` loops on several threads."""
    return _enable_cache(njit(parallel=True, nogil=True)(function))


def compile_callback(signature: Any, function: Callable[..., Any], cache: MachineCodeCache | None = None) -> int:
    """Compile a Python function that machine code calls, or load it from the cache, and return the address of its machine code.

    Args:
        signature: numba signature.
        function: Function to compile.
        cache: Cache of its machine code, for a function that another one created; without it, a closure is not cached.
    """
    code: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nogil": True, **_OPTIONS}, KernelCompiler)
    if cache or function.__closure__ is None:
        code._cache = cache or MachineCodeCache(function)
    shield_from_signals(code.compile)()
    _live_code.append(code)
    return int(code.address)


inlined = _njit(inline="always")
