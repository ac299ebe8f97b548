"""The machine code cache: one hash of all compiled sources, and no cache file that is used unchecked."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tools.checkpoint_files import ROOT

LOW = """
from .runtime.code_cache import compiled
K = {k}
@compiled
def low(x):
    return x + K
"""
HIGH = """
from .runtime.code_cache import compiled
from .low import low
@compiled
def high(x):
    return 10 * low(x)
"""
CACHE_NAME = "code"  # cache folder in the package
# Python compares sources and .pyc files by a clock of seconds; these tests edit sources faster.
CLEAN_ENV = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
CALL_HIGH = "from p.high import high; print(high(1), sum(high.stats.cache_hits.values()))"


# Runs each line that it reads as a program in a forked process, which has loaded numba already, and prints "done" at its end.
FORK_SERVER = """
import json, os, sys
import numba, numpy
from numba.core import caching, ccallback
from numba.core.runtime import _nrt_python
from numba.np import numpy_support
for line in sys.stdin:
    folder, code, environment, output = json.loads(line)
    if not (process := os.fork()):
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.chdir(folder)
        os.environ |= environment
        del sys.path[0]
        sys.path.insert(0, "")
        exec(code, {"__name__": "__main__"})
        break
    os.waitpid(process, 0)
    print("done", flush=True)
"""


_fork_servers: "list[subprocess.Popen[str]]" = []


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    environment = CLEAN_ENV | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a process with threads should not fork
    command = [sys.executable, "-W", "error", "-c", FORK_SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        _fork_servers.append(process)
        yield
        _fork_servers.pop()


@pytest.fixture(scope="module")
def compiled_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a package p of two compiled files that uses a copy of the cache, filled already."""
    folder = tmp_path_factory.mktemp("compiled") / "p"
    (folder / "runtime").mkdir(parents=True)
    sources = {
        f"runtime/{name}.py": (ROOT / "specdec" / "runtime" / f"{name}.py").read_text(encoding="utf-8").replace("specdec.", "p.")
        for name in ("arm_features", "code_cache", "disk_store", "garbage_collection", "numba_compat", "plain_numba")
    }
    source = sources["runtime/code_cache.py"]
    start, end = source.index("SOURCES = "), source.index("SOURCE_HASH = ")
    replaced = source[:start] + 'SOURCES = ("runtime/code_cache.py", "low.py", "high.py")\n' + source[end:]
    files = {**sources, "runtime/code_cache.py": replaced, "low.py": LOW.format(k=3), "high.py": HIGH}
    for name in ("__init__.py", "runtime/__init__.py", "kernels.py", *files):
        (folder / name).write_text(files.get(name, ""), encoding="utf-8")
    assert run_program(folder) == "40 0"
    return folder


@pytest.fixture
def package(compiled_package: Path, tmp_path: Path) -> Path:
    """Copy the package together with its machine code."""
    return Path(shutil.copytree(compiled_package, tmp_path / "p"))


def clear_cache(package: Path) -> None:
    shutil.rmtree(package / CACHE_NAME)


def run_program(package: Path, code: str = CALL_HIGH, **environment: str) -> str:
    """Return the output of a program in its own process, or the last line of its error."""
    if not hasattr(os, "fork"):
        return run_fresh_program(package, code, **environment)
    (process,), output = _fork_servers, package.parent / "output"
    assert process.stdin and process.stdout
    output.write_text("")
    environment = {"NUMBA_CACHE_DIR": str(package / CACHE_NAME)} | environment
    print(json.dumps([str(package.parent), code, environment, str(output)]), file=process.stdin, flush=True)
    assert process.stdout.readline() == "done\n"
    lines = output.read_text().strip().splitlines()
    return lines[-1] if lines else ""


def run_fresh_program(package: Path, code: str = CALL_HIGH, **environment: str) -> str:
    """Return the same for a process that has not loaded anything."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=package.parent, capture_output=True, text=True, check=False,
        env=CLEAN_ENV | {"NUMBA_CACHE_DIR": str(package / CACHE_NAME)} | environment,
    )  # fmt: skip
    return process.stdout.strip() or process.stderr.strip().splitlines()[-1]


def list_code_files(package: Path) -> list[Path]:
    return sorted((package / CACHE_NAME).rglob("*.code"))


def test_edited_callee_in_another_file_is_compiled_again(package: Path) -> None:
    """The cache of numba itself would still return 40."""
    assert run_program(package) == "40 1"
    assert len(list_code_files(package)) == 1
    (package / "low.py").write_text(LOW.format(k=4))
    assert [run_program(package), run_program(package)] == ["50 0", "50 1"]
    assert len(list_code_files(package)) == 2


def test_code_of_other_sources_is_deleted_after_a_month_without_use(package: Path) -> None:
    """Environments of several versions share a folder; foreign folders are not touched."""
    (old,) = {path.parent for path in list_code_files(package)}
    foreign = old.parent / "foreign"
    foreign.mkdir()
    for days, k, n in ((29, 4, 2), (31, 5, 2)):
        for folder in (old, foreign):
            os.utime(folder, (time.time() - days * 86400,) * 2)
        (package / "low.py").write_text(LOW.format(k=k))
        assert run_program(package) == f"{10 * (k + 1)} 0"
        assert len(list_code_files(package)) == n
    assert foreign.exists()


def test_other_environment_finds_the_code(package: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(package, tmp_path / "elsewhere" / "p"))
    clear_cache(other)
    assert run_program(other, NUMBA_CACHE_DIR=str(package / CACHE_NAME)) == "40 1"


def test_two_processes_compile_nothing_twice(package: Path) -> None:
    """Both start without a cache: the second waits for the first."""
    clear_cache(package)
    ready, go = package / "ready", package / "go"
    code = (
        "import os, time; from p.high import high\n"
        f"open({str(ready)!r} + str(os.getpid()), 'w').close()\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.001)\n"
        "print(high(1), sum(high.stats.cache_hits.values()))"
    )
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(run_fresh_program, package, code) for _ in range(2)]
        while len(list(package.glob("ready*"))) < 2:
            time.sleep(0.01)
        go.touch()
        assert sorted(answer.result() for answer in answers) == ["40 0", "40 1"]


CALL_BOTH = "from p.high import high; from p.low import low; print(high(1), low(2), sum(low.stats.cache_hits.values()))"


def test_callee_is_part_of_its_caller_and_has_a_file_once_python_calls_it(package: Path) -> None:
    """Otherwise a process that needs the caller would compile the callee to machine code of its own."""
    assert [path.name.split("-")[0] for path in list_code_files(package)] == ["high.high"]
    assert [run_program(package, CALL_BOTH) for _ in range(2)] == ["40 5 0", "40 5 1"]
    assert [path.name.split("-")[0] for path in list_code_files(package)] == ["high.high", "low.low"]


def test_garbage_collector_goes_on_after_a_function_is_compiled(package: Path) -> None:
    clear_cache(package)
    code = "import gc; {}; from p.high import high; high(1); print(gc.isenabled())"
    assert [run_program(package, code.format(f"gc.{name}()")) for name in ("enable", "disable")] == ["True", "False"]


COUNT_COMPILED = """
from .runtime.code_cache import compiled, jitable
calls = []
@jitable
def low(x, y):
    return x + y
@compiled
def high(x):
    return low(x, 0) + low(x, 1) + low(1, x)
"""
CALL_COUNTED = """
from numba.core.dispatcher import _FunctionCompiler as compiler
names, compile_core = [], compiler._compile_core
compiler._compile_core = lambda self, *args: [names.append(self.py_func.__name__), compile_core(self, *args)][1]
from p.high import high
print(high(1), *names)
"""


def test_function_is_compiled_once_whatever_literals_its_callers_pass(package: Path) -> None:
    """Alone, numba compiles it once more for each combination of literals."""
    (package / "high.py").write_text(COUNT_COMPILED, encoding="utf-8")
    assert run_program(package, CALL_COUNTED) == "5 high low"


def test_function_that_allocates_does_not_compile(package: Path) -> None:
    """Kernels allocate nothing, so numba counts no references, and cached code needs nothing of numba's own runtime."""
    (package / "high.py").write_text(
        HIGH.replace("10 * low(x)", "np.full(2, x)").replace("from .low", "import numpy as np; from .low")
    )
    clear_cache(package)
    assert run_program(package) == "During: Pass nopython_type_inference"
    assert not list_code_files(package)


PARALLEL = """
import numpy as np
from numba import prange
from .runtime.code_cache import parallel
@parallel
def high(n):
    total = 0
    for i in prange(n):
        total += i
    return total
"""
CALL_PARALLEL = """
import sys
sys.modules.pop("numpy.ma", None)  # numpy 1 loads it itself
from numba.core.runtime import rtsys
from p.high import high
print(high(5), sum(high.stats.cache_hits.values()), rtsys._init, "numpy.ma" in sys.modules)
"""


def test_cached_parallel_code_runs_without_numbas_compiled_runtime(package: Path) -> None:
    (package / "high.py").write_text(PARALLEL, encoding="utf-8")
    assert run_program(package, CALL_PARALLEL).startswith("10 0 True")
    assert run_program(package, CALL_PARALLEL) == "10 1 False False"


def test_code_with_unregistered_runtime_symbols_is_not_cached(package: Path) -> None:
    """LLVM would end a process that loads it."""
    (package / "high.py").write_text(PARALLEL, encoding="utf-8")
    clear_cache(package)
    program = "import p.runtime.numba_compat as compat; compat._get_runtime_symbols = dict\n" + CALL_PARALLEL
    assert [run_program(package, program)[:4] for _ in range(2)] == ["10 0"] * 2
    assert list_code_files(package) == []


OTHERS = """
import sys
if "specdec" in sys.argv: import p.runtime.code_cache
import other
print(other.f(1), sum(other.f.stats.cache_hits.values()))
"""


@pytest.mark.parametrize("first", ["specdec", "numba"])
def test_numbas_own_cache_is_shared_with_processes_without_specdec(package: Path, first: str) -> None:
    """A process with specdec and one without read each other's files."""
    (package.parent / "other.py").write_text("import numba\n@numba.njit(cache=True)\ndef f(x): return x + 1\n")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(package / CACHE_NAME)}
    processes = [
        subprocess.run(
            [sys.executable, "-c", OTHERS, importing], cwd=package.parent, env=environment, capture_output=True, text=True
        )
        for importing in (first, "numba" if first == "specdec" else "specdec")
    ]
    assert [done.stdout for done in processes] == ["2 0\n", "2 1\n"], [done.stderr[-500:] for done in processes]


def test_compile_lock_ends_with_its_process(package: Path) -> None:
    clear_cache(package)
    acquire = (
        "import os; from p.runtime.code_cache import compile_locks; print(compile_locks.acquire('a function'), flush=True); "
    )
    assert run_program(package, acquire + "os._exit(0)") == "False"
    assert run_program(package, acquire) == "False"


def test_touched_file_is_not_compiled_again(package: Path) -> None:
    os.utime(package / "low.py", (1, 1))
    assert run_program(package) == "40 1"


def test_compiled_file_outside_the_source_hash_is_rejected_by_name(package: Path) -> None:
    shutil.copy(package / "low.py", package / "other.py")
    assert "other.py compiles low" in run_program(package, "import p.other")


DAMAGE = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "garbage": lambda data: os.urandom(len(data)),
    "flipped bit in the machine code": lambda data: data[:-300] + bytes([data[-300] ^ 1]) + data[-299:],
    "flipped bit in the pickle": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "too long": lambda data: data + b"x",
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_ignored(package: Path, name: str) -> None:
    for path in list_code_files(package):
        path.write_bytes(DAMAGE[name](path.read_bytes()))
    assert [run_program(package), run_program(package)] == ["40 0", "40 1"]


def test_file_of_another_function_is_ignored(package: Path) -> None:
    run_program(package, CALL_BOTH)
    high, low = list_code_files(package)
    high.write_bytes(low.read_bytes())
    assert [run_program(package), run_program(package)] == ["40 0", "40 1"]


@pytest.mark.parametrize(
    ("make", "later"), [(Path.mkdir, "40 0"), (lambda path: path.symlink_to(path), "40 1")], ids=["folder", "link to itself"]
)
def test_what_is_no_file_is_ignored(package: Path, make: Callable[[Path], None], later: str) -> None:
    """A link is replaced by a file."""
    for path in list_code_files(package):
        path.unlink()
        make(path)
    assert [run_program(package), run_program(package)] == ["40 0", later]


def test_full_disk_does_not_stop_the_program(package: Path) -> None:
    """A file may grow to 100 bytes; then the system reports that it is too large."""
    clear_cache(package)
    limit = "import resource, signal, sys; sys.dont_write_bytecode = True; "  # Python would leave a truncated file
    limit += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
    count_errors = "; from p.runtime.code_cache import write_errors; print(len(write_errors))"
    assert run_program(package, limit + CALL_HIGH + count_errors) == "1"
    assert not [path for path in list_code_files(package) if "high" in path.name]
    assert [run_program(package), run_program(package)] == ["40 0", "40 1"]


def test_everything_compiles_without_a_writable_folder(package: Path) -> None:
    clear_cache(package)
    no_folder = "from p.runtime import code_cache; code_cache._cache_dir.append(''); "
    assert [run_program(package, no_folder + CALL_HIGH), run_program(package, no_folder + CALL_HIGH)] == ["40 0", "40 0"]
    assert not list_code_files(package)


def test_plain_numba_gives_the_same_results_and_keeps_nothing(package: Path) -> None:
    """For a numba that is newer than the tested ones. The variable has the same effect."""
    clear_cache(package)
    newer = "import numba; numba.__version__ = '0.999.0'; "
    assert [run_program(package, CALL_HIGH, SPECDEC_PLAIN_NUMBA="1"), run_program(package, newer + CALL_HIGH)] == ["40 0"] * 2
    inside = "import sys; " + CALL_HIGH + "; print('p.runtime.numba_compat' in sys.modules)"
    assert [run_program(package, newer + inside), run_program(package, inside)] == ["False", "True"]
    assert list_code_files(package)  # of the last program


@pytest.mark.skipif(sys.platform != "linux", reason="checks the cache folder of Linux")
def test_code_is_in_the_users_cache_or_next_to_the_sources(package: Path, tmp_path: Path) -> None:
    clear_cache(package)
    cache, no_folder = tmp_path / "cache", tmp_path / "file"
    no_folder.touch()
    home = tmp_path / ".cache" / "specdec"  # for a relative path
    for i, (xdg_cache_home, found) in enumerate(
        ((cache, cache / "specdec"), (no_folder, package / "__pycache__"), ("", home), ("here", home))
    ):
        environment = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(xdg_cache_home), "HOME": str(tmp_path)}
        assert [run_program(package, **environment) for _ in range(2)] == ["40 0" if i < 3 else "40 1", "40 1"]
        assert len(list(found.rglob("*.code"))) == 1
    assert not list_code_files(package)


def test_disabled_jit_is_reported(package: Path) -> None:
    assert "NUMBA_DISABLE_JIT" in run_fresh_program(package, NUMBA_DISABLE_JIT="1")


LIST_COMPILED = """
from specdec import SpeculativeDecoder
from specdec.loaders.model_paths import get_default_pair
from specdec.runtime import code_cache as cache
compiled = []
save = cache.MachineCodeCache.save_overload
cache.MachineCodeCache.save_overload = lambda cache, *args: [compiled.append(cache._name), save(cache, *args)]
SpeculativeDecoder(*get_default_pair()).generate("Once", 30)
print(compiled)
"""


def test_second_process_compiles_nothing() -> None:
    """The first compiles what is missing; numba does not report code that it cannot cache."""
    for _ in range(2):
        process = subprocess.run([sys.executable, "-c", LIST_COMPILED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


COMPILE_WITH_EQUAL_NUMBERS = """
import itertools
import numpy as np
from numba.core.bytecode import FunctionIdentity
from specdec.quant.gguf_repacking import WEIGHT_FORMATS
from specdec.quant.packed_matrix import pack_matrix
from tests.tools.block_tensors import ROWS, N, RandomBlockTensor, run_matmul
for name in ("Q4_0", "Q8_0", "Q4_1"):
    FunctionIdentity._unique_ids = itertools.count(1000)
    tensor = RandomBlockTensor(name, ROWS, N)
    x = np.random.default_rng(0).standard_normal((3, N)).astype(np.float32)
    expected = x @ tensor[0:ROWS].T
    out = run_matmul(pack_matrix([tensor], WEIGHT_FORMATS[name]), x, 3)[:, :ROWS]
    print(bool(np.abs(out - expected).max() < 0.02 * np.abs(expected).max()))
"""


def test_kernels_of_equal_symbol_names_do_not_call_each_others_functions(tmp_path: Path) -> None:
    """Symbols are numbered anew in each process, so code from the cache may have the names of code that is compiled later."""
    run = [sys.executable, "-c", COMPILE_WITH_EQUAL_NUMBERS]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in ("compiled", "loaded"):
        process = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert process.stdout == "True\n" * 3


# An interrupt in the middle of compiling: the first time that numba calls one of these functions

REGISTER_HOOK = "numba.core.typing.context:BaseContext.insert_attributes"  # for arrays: numba registers these only once
LOAD_HOOK = "numba.core.codegen:CPUCodeLibrary._object_getbuffer_hook"  # called by LLVM, which swallows its exceptions
INTERRUPT_PROGRAM = """
import importlib, signal, sys
from numba import types
module, path = sys.argv[1].split(":")
owner, name = path.split(".")
owner = getattr(importlib.import_module(module), owner)
original, interrupts = getattr(owner, name), []

def interrupted(*args):
    if not interrupts and (len(args) == 1 or args[1].key is types.Array):
        interrupts.append(1)
        signal.raise_signal(signal.SIGINT)
    return original(*args)

setattr(owner, name, interrupted)
from p.high import high
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores it
try:
    high(1)
except KeyboardInterrupt:
    print("interrupted", end=" ")
print(high(1), high(1.0))
"""


def interrupt(package: Path, hook: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPT_PROGRAM, hook], cwd=package.parent, capture_output=True, text=True, check=False,
        env=CLEAN_ENV | {"NUMBA_CACHE_DIR": str(package / CACHE_NAME)},
    )  # fmt: skip
    return process.stdout + process.stderr[-1000:]


def test_interrupt_leaves_nothing_half_compiled(package: Path) -> None:
    """Otherwise numba would not know the `size` of an array any more."""
    low = "import numpy as np\nA = np.empty(3)\n" + LOW.format(k=3).replace("+ K", "+ A.size")
    (package / "low.py").write_text(low, encoding="utf-8")
    assert interrupt(package, REGISTER_HOOK) == "interrupted 40 40.0\n"


def test_interrupt_while_loading_machine_code_reaches_the_caller(package: Path) -> None:
    assert interrupt(package, LOAD_HOOK) == "interrupted 40 40.0\n"


def test_compiler_error_reaches_the_caller(package: Path) -> None:
    code = "from p.high import high\ntry: high('x')\nexcept Exception as error: print(type(error).__name__)"
    assert run_program(package, code) == "TypingError"
