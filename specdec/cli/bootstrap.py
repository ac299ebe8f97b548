"""The entry point of the command: prepares the environment, then loads and runs the command line."""

import gc
import os
import shlex
import sys
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from specdec.cli.output_errors import exit_with_error, print_version

CHECKOUT = Path(__file__).resolve().parents[2]
_REQUIRED_PACKAGES = ("numba", "numpy", "rich", "typer")
_MAX_THREADS = 1024  # numba starts NUMBA_NUM_THREADS threads at once; with 10,000 the machine stands still


def main() -> None:
    """Prepare the environment, then load and run the command line; if that cannot be loaded, print why and exit with code 2.

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
    with suppress(ValueError):  # numba reports it
        if not 1 <= (n_threads := int(os.environ.get("NUMBA_NUM_THREADS", "1"))) <= _MAX_THREADS:
            exit_with_error(f"the environment variable NUMBA_NUM_THREADS is {n_threads}; set 1 to {_MAX_THREADS}, or unset it")
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
        cause: BaseException = error  # packages wrap it in advice of many lines
        while cause.__context__:
            cause = cause.__context__
        reason = str(cause).rstrip(".") or "not enough memory"
        # Without memory, loading a library fails with "failed to map segment" or "Cannot allocate memory".
        if isinstance(cause, MemoryError) or "memory" in reason or "map segment" in reason:
            reason += "; specdec needs 600 MB of memory, also under a limit (ulimit -v)"
        exit_with_error(f"cannot load the packages that specdec needs: {reason}")
    gc.freeze()
    gc.enable()
    command.main()


def _format_install_hint(missing: str) -> str:
    """Return an error message with the missing packages, at least the given one, and the command that installs them."""
    packages = [name for name in _REQUIRED_PACKAGES if name == missing or find_spec(name) is None] or [missing]
    targets = [f"{CHECKOUT}[hub]"] if (CHECKOUT / "pyproject.toml").exists() else packages
    command = shlex.join([os.path.basename(sys.executable) or "python3", "-m", "pip", "install", *targets])
    return f"package{'s' * (len(packages) > 1)} not found: {', '.join(packages)}; install with: {command}"
