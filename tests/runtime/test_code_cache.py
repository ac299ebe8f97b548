"""Machine code that outlives the process: one stamp over all that is compiled, and no file that is taken on trust."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
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
KEPT = "code"  # the folder in the package
# Sources are edited faster than a clock of seconds tells, by which Python takes what it has compiled for what they are.
ANEW = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
ASK = "from p.high import high; print(high(1), sum(high.stats.cache_hits.values()))"


# Each line that it reads is a program, which it runs in a process that has loaded numba already; it tells when that ends.
LOADED = """
import json, os, sys
import numba, numpy
from numba.core import caching, ccallback
from numba.core.runtime import _nrt_python
from numba.np import numpy_support
for line in sys.stdin:
    place, code, environment, told = json.loads(line)
    if not (process := os.fork()):
        for descriptor in (1, 2):
            os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.chdir(place)
        os.environ |= environment
        del sys.path[0]
        sys.path.insert(0, "")
        exec(code, {"__name__": "__main__"})
        break
    os.waitpid(process, 0)
    print("done", flush=True)
"""


_loaded: "list[subprocess.Popen[str]]" = []


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    environment = ANEW | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # who has threads had better not fork
    command = [sys.executable, "-W", "error", "-c", LOADED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        _loaded.append(process)
        yield
        _loaded.pop()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package p of two compiled files, which keeps its machine code as ours does, and has."""
    folder = tmp_path_factory.mktemp("compiled") / "p"
    (folder / "runtime").mkdir(parents=True)
    sources = {
        f"runtime/{name}.py": (ROOT / "specdec" / "runtime" / f"{name}.py").read_text(encoding="utf-8").replace("specdec.", "p.")
        for name in ("code_cache", "compile_locks", "linking")
    }
    source = sources["runtime/code_cache.py"]
    start, end = source.index("SOURCES = "), source.index("STAMP = ")
    ours = source[:start] + 'SOURCES = ("runtime/code_cache.py", "low.py", "high.py")\n' + source[end:]
    files = {**sources, "runtime/code_cache.py": ours, "low.py": LOW.format(k=3), "high.py": HIGH}
    for name in ("__init__.py", "runtime/__init__.py", "kernels.py", *files):
        (folder / name).write_text(files.get(name, ""), encoding="utf-8")
    assert ask(folder) == "40 0"
    return folder


@pytest.fixture
def package(compiled: Path, tmp_path: Path) -> Path:
    """A copy of it: its machine code lies where it lies, and moves along."""
    return Path(shutil.copytree(compiled, tmp_path / "p"))


def throw_away(package: Path) -> None:
    shutil.rmtree(package / KEPT)


def ask(package: Path, code: str = ASK, **environment: str) -> str:
    """What a program prints in a process of its own, or the last line of what is wrong."""
    if not hasattr(os, "fork"):
        return ask_anew(package, code, **environment)
    (process,), told = _loaded, package.parent / "told"
    assert process.stdin and process.stdout
    told.write_text("")
    environment = {"NUMBA_CACHE_DIR": str(package / KEPT)} | environment
    print(json.dumps([str(package.parent), code, environment, str(told)]), file=process.stdin, flush=True)
    assert process.stdout.readline() == "done\n"
    lines = told.read_text().strip().splitlines()
    return lines[-1] if lines else ""


def ask_anew(package: Path, code: str = ASK, **environment: str) -> str:
    """The same of a process that begins with nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=package.parent, capture_output=True, text=True, check=False,
        env=ANEW | {"NUMBA_CACHE_DIR": str(package / KEPT)} | environment,
    )  # fmt: skip
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def code_of(package: Path) -> list[Path]:
    return sorted((package / KEPT).rglob("*.code"))


def test_an_edited_callee_in_another_file_is_compiled_again(package: Path) -> None:
    """numba's own cache goes on answering 40."""
    assert ask(package) == "40 1"
    assert len(code_of(package)) == 2
    (package / "low.py").write_text(LOW.format(k=4))
    assert [ask(package), ask(package)] == ["50 0", "50 1"]
    assert len(code_of(package)) == 4


def test_code_of_other_sources_goes_when_it_was_not_used_for_a_month(package: Path) -> None:
    """Environments of several versions share a folder; what is not ours stays."""
    (old,) = {path.parent for path in code_of(package)}
    not_ours = old.parent / "not-ours"
    not_ours.mkdir()
    for days, k, n in ((29, 4, 4), (31, 5, 4)):
        for folder in (old, not_ours):
            os.utime(folder, (time.time() - days * 86400,) * 2)
        (package / "low.py").write_text(LOW.format(k=k))
        assert ask(package) == f"{10 * (k + 1)} 0"
        assert len(code_of(package)) == n
    assert not_ours.exists()


def test_another_environment_finds_the_code(package: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(package, tmp_path / "elsewhere" / "p"))
    throw_away(other)
    assert ask(other, NUMBA_CACHE_DIR=str(package / KEPT)) == "40 1"


def test_two_processes_compile_nothing_twice(package: Path) -> None:
    """Both begin with nothing: whoever comes second waits for the first."""
    throw_away(package)
    ready, go = package / "ready", package / "go"
    code = (
        "import os, time; from p.high import high\n"
        f"open({str(ready)!r} + str(os.getpid()), 'w').close()\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.001)\n"
        "print(high(1), sum(high.stats.cache_hits.values()))"
    )
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask_anew, package, code) for _ in range(2)]
        while len(list(package.glob("ready*"))) < 2:
            time.sleep(0.01)
        go.touch()
        assert sorted(answer.result() for answer in answers) == ["40 0", "40 1"]


READ = """
import llvmlite.binding as llvm
read, parse = [], llvm.parse_bitcode
llvm.parse_bitcode = lambda *what: [read.append(1), parse(*what)][1]
from p.high import high
print(high(1), len(read))
"""


def test_what_callers_link_is_read_where_there_is_one(package: Path) -> None:
    """numba reads it with whatever is kept, which takes longer than the rest."""
    assert ask(package, READ) == "40 0"
    (high,) = (path for path in code_of(package) if path.name.startswith("high"))
    high.unlink()
    assert ask(package, READ) == "40 1"


ARRAYS = """
import numpy as np
from .runtime.code_cache import compiled
@compiled
def high(x):
    return np.full(2, x.sum())
"""
ASK_ARRAYS = """
import sys
sys.modules.pop("numpy.ma", None)  # which numpy 1 loads itself
import numpy as np
from numba.core.runtime import rtsys
from p.high import high
print(high(np.ones(3)), sum(high.stats.cache_hits.values()), rtsys._init, "numpy.ma" in sys.modules)
"""


def test_kept_code_makes_arrays_where_nothing_has_compiled_the_runtime(package: Path) -> None:
    (package / "high.py").write_text(ARRAYS, encoding="utf-8")
    assert ask(package, ASK_ARRAYS).startswith("[3. 3.] 0 True")
    assert ask(package, ASK_ARRAYS) == "[3. 3.] 1 False False"


def test_code_that_asks_for_more_of_numbas_runtime_than_is_lent_is_not_kept(package: Path) -> None:
    """LLVM would end the process that loads it."""
    (package / "high.py").write_text(ARRAYS, encoding="utf-8")
    throw_away(package)
    nothing = "import p.runtime.code_cache as cache; cache._lent = dict\n" + ASK_ARRAYS
    assert [ask(package, nothing)[:5] for _ in range(2)] == ["[3. 3"] * 2
    assert code_of(package) == []


OTHERS = """
import sys
if "ours" in sys.argv: import p.runtime.code_cache
import other
print(other.f(1), sum(other.f.stats.cache_hits.values()))
"""


@pytest.mark.parametrize("first", ["ours", "alone"])
def test_what_others_keep_by_numbas_own_cache_is_numbas(package: Path, first: str) -> None:
    """A process with the product in it and one without read what the other has written."""
    (package.parent / "other.py").write_text("import numba\n@numba.njit(cache=True)\ndef f(x): return x + 1\n")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(package / KEPT)}
    said = [
        subprocess.run([sys.executable, "-c", OTHERS, who], cwd=package.parent, env=environment, capture_output=True, text=True)
        for who in (first, "alone" if first == "ours" else "ours")
    ]
    assert [done.stdout for done in said] == ["2 0\n", "2 1\n"], [done.stderr[-500:] for done in said]


def test_a_claim_ends_with_its_process(package: Path) -> None:
    throw_away(package)
    take = "import os; from p.runtime.code_cache import claims; print(claims.take('a function'), flush=True); "
    assert ask(package, take + "os._exit(0)") == "False"
    assert ask(package, take) == "False"


def test_a_file_that_was_only_touched_is_not_compiled_again(package: Path) -> None:
    os.utime(package / "low.py", (1, 1))
    assert ask(package) == "40 1"


def test_a_compiled_file_that_the_stamp_does_not_know_is_refused_by_name(package: Path) -> None:
    shutil.copy(package / "low.py", package / "other.py")
    assert "other.py compiles low" in ask(package, "import p.other")


DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "garbage": lambda data: os.urandom(len(data)),
    "one bit of the machine code": lambda data: data[:-300] + bytes([data[-300] ^ 1]) + data[-299:],
    "one bit of the pickle": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "a longer one": lambda data: data + b"x",
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_as_good_as_none(package: Path, name: str) -> None:
    for path in code_of(package):
        path.write_bytes(DAMAGE[name](path.read_bytes()))
    assert [ask(package), ask(package)] == ["40 0", "40 1"]


def test_another_functions_file_is_as_good_as_none(package: Path) -> None:
    high, low = code_of(package)
    high.write_bytes(low.read_bytes())
    assert [ask(package), ask(package)] == ["40 0", "40 1"]


def test_a_folder_in_the_place_of_a_file_is_no_reason_to_stop(package: Path) -> None:
    for path in code_of(package):
        path.unlink()
        path.mkdir()
    assert [ask(package), ask(package)] == ["40 0", "40 0"]


def test_a_disk_that_is_full_is_no_reason_to_stop(package: Path) -> None:
    """A file may grow to 100 bytes, and then the system says that it is too large."""
    throw_away(package)
    full = "import resource, signal, sys; sys.dont_write_bytecode = True; "  # Python would leave a file cut off
    full += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
    assert ask(package, full + ASK) == "40 0"
    assert not [path for path in code_of(package) if "high" in path.name]
    assert [ask(package), ask(package)] == ["40 0", "40 1"]


def test_where_no_folder_can_be_written_everything_still_compiles(package: Path) -> None:
    throw_away(package)
    nowhere = "from p.runtime import code_cache; code_cache._folder.append(''); "
    assert [ask(package, nowhere + ASK), ask(package, nowhere + ASK)] == ["40 0", "40 0"]
    assert not code_of(package)


@pytest.mark.skipif(sys.platform != "linux", reason="says where the cache is on Linux")
def test_code_lies_in_the_users_cache_or_where_that_cannot_be_written_beside_the_sources(package: Path, tmp_path: Path) -> None:
    throw_away(package)
    cache, no_folder = tmp_path / "cache", tmp_path / "file"
    no_folder.touch()
    for place, found in ((cache, cache / "specdec"), (no_folder, package / "__pycache__")):
        assert [ask(package, NUMBA_CACHE_DIR="", XDG_CACHE_HOME=str(place)) for _ in range(2)] == ["40 0", "40 1"]
        assert len(list(found.rglob("*.code"))) == 2
    assert not code_of(package)


@pytest.mark.skipif(sys.platform != "linux", reason="says where the cache is on Linux")
@pytest.mark.parametrize("place", ["", "here"])
def test_a_users_cache_that_is_no_whole_path_is_none(package: Path, tmp_path: Path, place: str) -> None:
    throw_away(package)
    environment = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": place, "HOME": str(tmp_path)}
    assert [ask(package, **environment) for _ in range(2)] == ["40 0", "40 1"]
    assert len(list((tmp_path / ".cache" / "specdec").rglob("*.code"))) == 2


def test_what_is_not_to_be_compiled_is_told(package: Path) -> None:
    assert "NUMBA_DISABLE_JIT" in ask_anew(package, NUMBA_DISABLE_JIT="1")


COMPILED = """
from specdec import SpeculativeDecoder
from specdec.loaders.model_lookup import default_pair
from specdec.runtime import code_cache as cache
compiled = []
save = cache.MachineCode.save_overload
cache.MachineCode.save_overload = lambda code, *what: [compiled.append(code._name), save(code, *what)]
SpeculativeDecoder(*default_pair()).generate("Once", 30)
print(compiled)
"""


def test_a_second_process_compiles_nothing() -> None:
    """The first compiles what is missing; what cannot be kept, numba does not tell."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# An interrupt in the middle of compiling: when numba comes by that function, with what is told, for the first time

REGISTERS = "numba.core.typing.context:BaseContext.insert_attributes"  # those of arrays, of a list that numba takes once
LOADS = "numba.core.codegen:CPUCodeLibrary._object_getbuffer_hook"  # called by LLVM, which swallows what it raises
INTERRUPTED = """
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


def interrupt(package: Path, where: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, where], cwd=package.parent, capture_output=True, text=True, check=False,
        env=ANEW | {"NUMBA_CACHE_DIR": str(package / KEPT)},
    )  # fmt: skip
    return done.stdout + done.stderr[-1000:]


def test_an_interrupt_leaves_nothing_half_compiled(package: Path) -> None:
    """numba would know no `size` of an array any more."""
    low = "import numpy as np\n" + LOW.format(k=3).replace("+ K", "+ np.empty(K).size")
    (package / "low.py").write_text(low, encoding="utf-8")
    assert interrupt(package, REGISTERS) == "interrupted 40 40.0\n"


def test_an_interrupt_while_machine_code_is_loaded_reaches_the_caller(package: Path) -> None:
    assert interrupt(package, LOADS) == "interrupted 40 40.0\n"


def test_an_error_of_the_compiler_reaches_the_caller(package: Path) -> None:
    code = "from p.high import high\ntry: high('x')\nexcept Exception as error: print(type(error).__name__)"
    assert ask(package, code) == "TypingError"
