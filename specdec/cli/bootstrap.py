"""The entry point of the command: checks the environment, then loads and runs the command line."""

import gc
import os
import re
import shlex
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from specdec.cli.version import exit_with_error, print_version

CHECKOUT = Path(__file__).resolve().parents[2]
_REQUIRED_PACKAGES = ("numba", "numpy", "rich", "typer")
# numba's environment variables: pattern and description. numba prints a traceback for a wrong value, or ignores it.
_NUMBA_SETTINGS = {
    "NUMBA_DISABLE_JIT": (r"\s*[-+]?0+\s*", "0, since nothing runs uncompiled"),
    "NUMBA_NUM_THREADS": (r"\s*\+?0*[1-9]\d{0,3}\s*", "a number of threads, from 1 to 9999"),
    "NUMBA_THREADING_LAYER": (
        "default|safe|forksafe|threadsafe|omp|tbb|workqueue", "default, safe, forksafe, threadsafe, omp, tbb or workqueue"
    ),
}  # fmt: skip


def main() -> None:
    """Check the environment, then load and run the command line; if that cannot be loaded, print why and exit with code 2.

    Signal handlers are installed first, since loading takes a second.
    """
    if sys.version_info < (3, 10):  # noqa: UP036  (a checkout runs without pip, which would refuse)
        exit_with_error(f"Python must be 3.10 or newer, got {sys.version.split()[0]}")
    if sys.argv[1:] in (["--version"], ["version"]):
        print_version()
        sys.exit(0)
    gc.disable()  # loaded modules stay; collecting while they load takes a fifth of that second
    from specdec.ui.signals import signals

    signals.install()
    for name, (pattern, expected) in _NUMBA_SETTINGS.items():
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(pattern, value):
            exit_with_error(f"the environment variable {name} is {value!r}; it must be {expected}, or not set")
    warnings.filterwarnings("error", "Environment variable 'NUMBA_", RuntimeWarning)
    warnings.filterwarnings("ignore", "Could not obtain multiprocessing lock")  # no /dev/shm; we never fork
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads are unused, and each takes 30 MB
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # inputs are encoded one by one; a fork would print a warning
    try:
        from specdec.cli import app as command
    except ModuleNotFoundError as error:
        exit_with_error(_format_install_hint((error.name or str(error)).split(".")[0]))
    except RuntimeWarning as rejected:
        exit_with_error(str(rejected).split(".\n")[0] + "; set a valid value, or unset it")
    except Exception as error:
        exit_with_error(f"cannot load the packages that specdec needs: {_find_root_cause(error)}{_format_memory_limit()}")
    gc.freeze()
    gc.enable()
    command.main()


def _format_install_hint(missing: str) -> str:
    """Return an error message with the missing packages, at least the given one, and the command that installs them."""
    packages = [name for name in _REQUIRED_PACKAGES if name == missing or find_spec(name) is None] or [missing]
    if missing in sys.stdlib_module_names:
        return f"this Python was built without its standard module {missing}; use another Python"
    is_checkout = (CHECKOUT / "pyproject.toml").exists()
    targets = [f"{CHECKOUT}[hub]"] if is_checkout else packages
    command = shlex.join([os.path.basename(sys.executable) or "python3", "-m", "pip", "install", *targets])
    return f"package{'s' * (len(packages) > 1)} not found: {', '.join(packages)}; install with: {command}"


def _find_root_cause(error: BaseException) -> str:
    """Return the message of the first exception in an exception's chain, since packages wrap it in advice of many lines."""
    while error.__context__:
        error = error.__context__
    return str(error).rstrip(".") or "not enough memory"


def _format_memory_limit() -> str:
    """Return a note on the process's memory limit (ulimit -v) for an error message; "" if there is no limit."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # Windows
        return ""
    limit = getrlimit(RLIMIT_AS)[0]
    return (
        ""
        if limit == RLIM_INFINITY
        else f"; memory is limited to {limit // 10**6} MB (ulimit -v), and specdec needs about 600 MB"
    )
