"""The entry point of the command: checks the environment, then loads and runs the command line."""

import gc
import os
import re
import shlex
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from specdec.cli.version import print_version, refuse

CHECKOUT = Path(__file__).resolve().parents[2]
_PACKAGES = ("numba", "numpy", "rich", "typer")  # that nothing runs without
# numba's own settings, and what they may be: of a wrong one it tells with a traceback, or goes on without
_SETTINGS = {
    "NUMBA_DISABLE_JIT": (r"\s*[-+]?0+\s*", "0, for nothing here runs uncompiled"),
    "NUMBA_NUM_THREADS": (r"\s*\+?0*[1-9]\d{0,3}\s*", "a number of threads, from 1 to 9999"),
    "NUMBA_THREADING_LAYER": (
        "default|safe|forksafe|threadsafe|omp|tbb|workqueue", "default, safe, forksafe, threadsafe, omp, tbb or workqueue"
    ),
}  # fmt: skip


def main() -> None:
    """The command line. Signals come first, since loading takes a second. If it cannot be loaded, one line says why."""
    if sys.version_info < (3, 10):  # noqa: UP036  (a checkout runs without pip, which would refuse)
        refuse(f"needs Python 3.10 or newer; this is {sys.version.split()[0]}")
    if sys.argv[1:] in (["--version"], ["version"]):
        print_version()
        sys.exit(0)
    gc.disable()  # what is loaded stays: looking through it again and again takes a fifth of that second
    from specdec.ui.signals import signals

    signals.install()
    for name, (fits, right) in _SETTINGS.items():
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(fits, value):
            refuse(f"{name} is {value!r} in the environment; it must be {right}, or not set")
    warnings.filterwarnings("error", "Environment variable 'NUMBA_", RuntimeWarning)
    warnings.filterwarnings("ignore", "Could not obtain multiprocessing lock")  # there is no /dev/shm; nothing here forks
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here uses numpy's threads, each of which takes 30 MB
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are encoded one by one; a fork would print a warning
    try:
        from specdec.cli import main as command
    except ModuleNotFoundError as error:
        refuse(_how_to_install((error.name or str(error)).split(".")[0]))
    except RuntimeWarning as unread:
        refuse(str(unread).split(".\n")[0] + "; set another, or none")
    except Exception as error:
        refuse(f"cannot load what it runs on: {_first_cause(error)}{_memory_limit()}")
    gc.freeze()
    gc.enable()
    command.main()


def _how_to_install(missing: str) -> str:
    """Return which packages are missing, at least that one, and the command that installs them."""
    gone = [name for name in _PACKAGES if name == missing or find_spec(name) is None] or [missing]
    if missing in sys.stdlib_module_names:
        return f"this Python was built without its own module {missing}; use another Python"
    is_checkout = (CHECKOUT / "pyproject.toml").exists()
    what = [f"{CHECKOUT}[hub]"] if is_checkout else gone
    command = shlex.join([os.path.basename(sys.executable) or "python3", "-m", "pip", "install", *what])
    return f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} missing; install with: {command}"


def _first_cause(error: BaseException) -> str:
    """What the packages wrap in advice of many lines."""
    while error.__context__:
        error = error.__context__
    return str(error).rstrip(".") or "not enough memory"


def _memory_limit() -> str:
    """A word on the limit of the address space, where there is one."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # Windows
        return ""
    limit = getrlimit(RLIMIT_AS)[0]
    return "" if limit == RLIM_INFINITY else f"; memory is limited to {limit // 10**6} MB (ulimit -v), and it needs about 600"
