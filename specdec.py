"""Speculative decoding of llama2.c models on CPU threads: the command, and what `import specdec` offers as a library.

python specdec.py -m stories42M.bin -d stories15M.bin -i "Once upon a time"
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from .checkpoint import CheckpointError
    from .decoder import Generation, SpeculativeDecoder
    from .decoding import Sampling, Statistics, Step
    from .kernels import Transformer
    from .tokenizer import Tokenizer, TokenizerError

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Generation",
    "Sampling",
    "SpeculativeDecoder",
    "Statistics",
    "Step",
    "Tokenizer",
    "TokenizerError",
    "Transformer",
]
# Loaded when first asked for: an interrupt in the first second meets no half-imported library, and the library no command line.
_ROOMS = {
    "checkpoint": ("CheckpointError",),
    "decoder": ("Generation", "SpeculativeDecoder"),
    "decoding": ("Sampling", "Statistics", "Step"),
    "kernels": ("Transformer",),
    "tokenizer": ("Tokenizer", "TokenizerError"),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f".{room}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def main() -> None:
    """The command line. Signals come first, since loading takes a second."""
    from .interrupts import signals

    signals.install()
    from . import command

    command.main()
