"""Exact speculative decoding on CPU threads: a small model drafts tokens, a large one verifies several of them in one pass.

    from specdec import SpeculativeDecoder
    print(SpeculativeDecoder("stories6M.bin", "stories650K.bin").generate("Once upon a time").text)

The public API is the classes below, `SpeculativeDecoder` first. Everything else in the package may change with any version.
As a command: specdec "Once upon a time", in a checkout python specdec.py "Once upon a time".
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.events import Prompt, Proposal, Statistics, Step
    from specdec.loaders import CheckpointError
    from specdec.model.model import Model
    from specdec.sampling import Sampling
    from specdec.speculative_decoder import SpeculativeDecoder
    from specdec.text.chat_template import TemplateError
    from specdec.text.detokenizer import Generation
    from specdec.tokenizer import Tokenizer, TokenizerError

__version__ = "0.1.0"
__arithmetic__ = 2  # revision of the arithmetic; raise it whenever the output of a seed changes (tests/tools/golden.py)
__all__ = [
    "CheckpointError",
    "Generation",
    "Model",
    "Prompt",
    "Proposal",
    "Sampling",
    "SpeculativeDecoder",
    "Statistics",
    "Step",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
]
# Imported on first use, so that the command line can install its signal handlers before it loads the library.
_MODULES = {
    "CheckpointError": "specdec.loaders",
    "Generation": "specdec.text.detokenizer",
    "Model": "specdec.model.model",
    "Prompt": "specdec.events",
    "Proposal": "specdec.events",
    "Sampling": "specdec.sampling",
    "SpeculativeDecoder": "specdec.speculative_decoder",
    "Statistics": "specdec.events",
    "Step": "specdec.events",
    "TemplateError": "specdec.text.chat_template",
    "Tokenizer": "specdec.tokenizer",
    "TokenizerError": "specdec.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
