"""Speculative decoding on CPU threads: a small model guesses, a large one checks, and the text is the large one's own.

    from specdec import SpeculativeDecoder
    print(SpeculativeDecoder("stories6M.bin", "stories650K.bin").generate("Once upon a time").text)

The library is the classes below, `SpeculativeDecoder` first, and no others; the modules that help() lists before them are its
inside and change with any version. As a command: specdec "Once upon a time", in a checkout python specdec.py "Once upon a time".
"""

import gc
import os
import re
import shlex
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

_HERE = os.path.dirname(os.path.abspath(__file__))

if __name__ == "__main__":  # the script is the package's command: the file is loaded again, under its own name
    sys.path.insert(0, _HERE)
    import specdec

    sys.path.remove(_HERE)  # nobody else is to find our `kernels` or `tokenizer`
    specdec.main()

# In a checkout this module is the package `specdec` too, so that its siblings are specdec.kernels and so on wherever they lie.
__package__ = __name__
__path__ = [_HERE]
if __spec__:
    __spec__.submodule_search_locations = __path__

if TYPE_CHECKING:
    from .decoder import SpeculativeDecoder
    from .decoding import Prompt, Proposal, Statistics, Step
    from .readers import CheckpointError
    from .sampling import Sampling
    from .text.templates import TemplateError
    from .text.wording import Generation
    from .tokenizer import Tokenizer, TokenizerError
    from .transformer import Transformer

__version__ = "0.1.0"
__arithmetic__ = 2  # revision: another one where a seed's text is another, on every machine (tests/golden.py)
__all__ = [
    "CheckpointError",
    "Generation",
    "Prompt",
    "Proposal",
    "Sampling",
    "SpeculativeDecoder",
    "Statistics",
    "Step",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
    "Transformer",
]
# Loaded when first asked for: an interrupt in the first second meets no half-imported library, and the library no command line.
_ROOMS = {
    "decoder": ("SpeculativeDecoder",),
    "decoding": ("Prompt", "Proposal", "Statistics", "Step"),
    "readers": ("CheckpointError",),
    "sampling": ("Sampling",),
    "text.templates": ("TemplateError",),
    "text.wording": ("Generation",),
    "tokenizer": ("Tokenizer", "TokenizerError"),
    "transformer": ("Transformer",),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f".{room}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


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
        _refuse(f"needs Python 3.10 or newer; this is {sys.version.split()[0]}")
    if sys.argv[1:] in (["--version"], ["version"]):
        tell_version()
        sys.exit(0)
    gc.disable()  # what is loaded stays: looking through it again and again takes a fifth of that second
    from .screens.interrupts import signals

    signals.install()
    for name, (fits, right) in _SETTINGS.items():
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(fits, value):
            _refuse(f"{name} is {value!r} in the environment; it must be {right}, or not set")
    warnings.filterwarnings("error", "Environment variable 'NUMBA_", RuntimeWarning)
    warnings.filterwarnings("ignore", "Could not obtain multiprocessing lock")  # there is no /dev/shm; nothing here forks
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here uses numpy's threads, each of which takes 30 MB
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are encoded one by one; a fork would print a warning
    try:
        from .commands import main as command
    except ModuleNotFoundError as error:
        _refuse(_how_to_install((error.name or str(error)).split(".")[0]))
    except RuntimeWarning as unread:
        _refuse(str(unread).split(".\n")[0] + "; set another, or none")
    except Exception as error:
        _refuse(f"cannot load what it runs on: {_first_cause(error)}{_memory_limit()}")
    gc.freeze()
    gc.enable()
    command.main()


def tell_version() -> None:
    """Print the version, and what a seed's text depends on. Loads nothing that is not Python's own."""
    try:
        print(f"specdec {__version__}, arithmetic {__arithmetic__}", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the interpreter's last flush goes
        if isinstance(error, BrokenPipeError):
            sys.exit(141)  # what a shell reports for SIGPIPE
        _refuse(f"cannot write the output: {error.strerror}")


def _how_to_install(missing: str) -> str:
    """Return which packages are missing, at least that one, and the command that installs them."""
    gone = [name for name in _PACKAGES if name == missing or find_spec(name) is None] or [missing]
    if missing in sys.stdlib_module_names:
        return f"this Python was built without its own module {missing}; use another Python"
    is_checkout = os.path.exists(os.path.join(_HERE, "pyproject.toml"))
    what = [f"{_HERE}[hub]"] if is_checkout else gone
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


def _refuse(message: str) -> NoReturn:
    if sys.stderr:
        print(f"specdec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
