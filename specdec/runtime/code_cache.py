"""The cache of compiled functions: files that keep their machine code from one process to the next.

numba's own cache watches only the file that defines a function, and trusts its cache files. Here one source hash covers all files
with compiled code, so a function is compiled again if another that it calls has changed. An empty, truncated, corrupted or
unreadable cache file counts as missing: a cache is not data. All environments of a user share one folder. Processes that need the
same function at the same time wait for the first of them. If no folder is writable, every process compiles. A first run of the
included pair takes 7 CPU seconds, a later one 0.54.
"""

import functools
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
from numba.core.base import BaseContext
from numba.core.compiler import CompileResult
from numba.core.typing import Signature

from specdec.runtime.disk_store import DiskStore, ProcessLocks

NEWEST_NUMBA = (0, 68)  # tested; pyproject.toml has the same ceiling
# With a newer numba, or if the variable SPECDEC_PLAIN_NUMBA is set, functions are compiled without touching numba's inside.
IS_PLAIN = bool(os.environ.get("SPECDEC_PLAIN_NUMBA")) or tuple(map(int, numba.__version__.split(".")[:2])) > NEWEST_NUMBA
if hasattr(os, "uname") and os.uname().machine in ("aarch64", "arm64"):
    from specdec.runtime.arm_features import set_numba_features

    set_numba_features()
CompiledFunction = Any  # a dispatcher or an intrinsic, which compiled functions call; numba's versions type them differently
if TYPE_CHECKING or not IS_PLAIN:
    from specdec.runtime import numba_compat
else:
    from specdec.runtime import plain_numba as numba_compat

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
SOURCE_HASH_GLOB = "[0-9a-f]" * 16
CODE_SUFFIX, CALIBRATION_SUFFIX = ".code", ".known"
MAX_UNUSED_DAYS = 30  # after which code of another source hash is deleted

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, but specdec's kernels only run compiled; unset it")

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


class MachineCodeCache:
    """The machine code of one function in the disk cache, a file per signature and CPU, with the methods that numba calls."""

    def __init__(self, function: Callable[..., object], name: str = "") -> None:
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
        """Path of the cache folder, or "" if none is writable; numba's statistics show it."""
        return get_cache_dir()

    def load_overload(self, signature: Signature, target_context: BaseContext) -> CompileResult | None:
        """Return the function's machine code for a numba signature from the cache, or None if the caller must compile it.

        If another process is compiling the code, waits for that process. With None, this process holds the function's compile
        lock until it calls `save_overload`, and has reported the start to `compile_reporters`.

        Raises:
            BlockingIOError: Another process is compiling the code, and `compile_locks` do not wait.
        """
        found = self._load(signature, target_context)
        if found:
            return found
        self.report_start()
        if get_store():
            name = self._get_file_name(signature)
            if compile_locks.acquire(name):  # another process was compiling it
                found = self._load(signature, target_context)
            if found:
                compile_locks.release(name)
                self.report_end()
        return found

    def is_stored(self, signature: Signature) -> bool:
        """Return whether the cache has a file with the function's machine code for a numba signature."""
        return is_kept() and os.path.exists(os.path.join(get_cache_dir(), self._get_file_name(signature)))

    def _load(self, signature: Signature, target_context: BaseContext) -> CompileResult | None:
        store = get_store()
        try:
            content = store and store.read(self._get_file_name(signature))
            return numba_compat.deserialize(content, target_context) if content else None
        except Exception:  # compiling repairs any kind of bad file
            return None

    def save_overload(self, signature: Signature, compiled: CompileResult) -> None:
        """Save newly compiled code for a signature in the cache, and release the lock that `load_overload` acquired.

        Skips code that cannot be cached or written. Reports to `compile_reporters` that the function is compiled.
        """
        if store := get_store():
            name, content = self._get_file_name(signature), numba_compat.serialize(compiled)
            try:
                if content:
                    store.write(name, content)
                    _delete_unused_folders()
            except OSError as error:
                write_errors.append(error)
            compile_locks.release(name)
        self.report_end()

    def report_start(self) -> None:
        """Report to `compile_reporters` that this function is being compiled."""
        global _n_started
        _n_started += 1
        _in_progress.append(self._name)
        _report_compiling(self._name)

    def report_end(self) -> None:
        """Report to `compile_reporters` that this function is compiled, with the name of the one still being compiled, or ""."""
        if self._name in _in_progress:
            del _in_progress[_in_progress.index(self._name) :]
        _report_compiling(_in_progress[-1] if _in_progress else "")

    def flush(self) -> None:
        """Do nothing: no state is kept in memory."""

    def _get_file_name(self, signature: Signature) -> str:
        key = repr((str(signature), describe_target()))
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{CODE_SUFFIX}"


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
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "specdec", "Cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specdec"
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return Path(folder if os.path.isabs(folder) else os.path.expanduser("~/.cache"), "specdec")


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


# The first process that needs a function compiles it, and the others wait.
compile_locks = ProcessLocks(lambda: os.path.join(get_cache_dir(), "claims"))


def get_store() -> DiskStore | None:
    """Return the store in the folder for machine code, which has calibrations too; None if no folder is writable."""
    folder = get_cache_dir()
    return DiskStore(Path(folder), CODE_SUFFIX, CALIBRATION_SUFFIX, is_private=False) if folder else None


@functools.cache
def _delete_unused_folders() -> None:
    """Delete folders of other source hashes that no process has used for MAX_UNUSED_DAYS."""
    for folder in Path(get_cache_dir()).parent.glob(SOURCE_HASH_GLOB):
        if folder.stat().st_mtime < time.time() - MAX_UNUSED_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _scan_cache() -> tuple[set[str], bool]:
    """Return the names of all functions cached at the time of the first call, and whether another source hash has a folder."""
    folders = Path(get_cache_dir()).parent.glob(SOURCE_HASH_GLOB) if get_cache_dir() else ()
    return list_cached_names(), len([*folders]) > 1


def list_cached_names() -> set[str]:
    """Return the names of all functions that are cached now, for any CPU."""
    files = Path(get_cache_dir()).glob(f"*{CODE_SUFFIX}") if get_cache_dir() else ()
    return {path.name.split("-")[0] for path in files}


def get_compile_reason(name: str) -> str:
    """Return a phrase for users that explains why the function `name` is compiled now, for example "a first run"."""
    cached_names, is_changed = _scan_cache()
    package, _, module = name.rpartition(".")[0].partition(".")
    if not is_kept():
        reason = f"numba {numba.__version__} is used without a cache" if IS_PLAIN else "no cache folder is writable"
        return f"as in every run: {reason}"
    if not cached_names:
        return "the first run of this version" if is_changed else "a first run"
    if package == "quant" and module and not any(other.startswith(f"{package}.{module}.") for other in cached_names):
        return "a new weight format"
    return "for the first time"


def is_kept() -> bool:
    """Return whether compiled code is kept for later processes."""
    return not IS_PLAIN and bool(get_cache_dir())


inlined, jitable, make_dispatcher = numba_compat.inlined, numba_compat.jitable, numba_compat.make_dispatcher
describe_target = numba_compat.describe_target


def compiled(function: Callable[..., object]) -> CompiledFunction:
    """Return a dispatcher that compiles a function to cached machine code when it is first called; the code releases the GIL."""
    return numba_compat.make_cached_dispatcher(function, MachineCodeCache(function))


def parallel(function: Callable[..., object]) -> CompiledFunction:
    """Return a dispatcher that compiles a function like `compiled`, and runs its `prange` loops on several threads."""
    return numba_compat.make_cached_dispatcher(function, MachineCodeCache(function), is_parallel=True)


def compile_callback(signature: Signature, function: Callable[..., object], cache: MachineCodeCache | None = None) -> int:
    """Compile a Python function that machine code calls, or load it from the cache, and return the address of its machine code.

    Args:
        signature: numba signature.
        function: Function to compile.
        cache: Cache of its machine code, for a function that another one created; without it, a closure is not cached.
    """
    if cache is None and function.__closure__ is None:
        cache = MachineCodeCache(function)
    if not (IS_PLAIN and cache):
        return numba_compat.compile_callback(signature, function, cache)
    cache.report_start()
    address = numba_compat.compile_callback(signature, function, cache)
    cache.report_end()
    return address
