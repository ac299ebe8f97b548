"""Models: the forward pass with its KV cache, and the architectures by name, each imported when a config names it."""

import math
from pkgutil import resolve_name
from typing import cast

from specdec.layers.architecture import Architecture
from specdec.model_config import ASSISTANT, ModelConfig

ARCHITECTURES = {
    "llama": "specdec.model.llama:LLAMA",
    "gpt2": "specdec.model.gpt2:GPT2",
    "eagle3": "specdec.heads.eagle3:EAGLE3",
    "mtp": "specdec.heads.mtp:MTP",
    ASSISTANT: "specdec.heads.gemma4_assistant:GEMMA4_ASSISTANT",
}
LLAMA_RECURRENT = "specdec.model.llama:LLAMA_RECURRENT"


def get_architecture(config: ModelConfig) -> Architecture:
    """Return the `Architecture` that config.architecture names; raise ValueError if the name is unknown.

    A "llama" with mixers gets the variant with a recurrent state.
    """
    name = config.architecture
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    is_recurrent = name == "llama" and any(layer.mixer for layer in config.layers)
    return cast(Architecture, resolve_name(LLAMA_RECURRENT if is_recurrent else ARCHITECTURES[name]))


def count_parameters(config: ModelConfig) -> int:
    """Return the number of weights of a model."""
    return sum(math.prod(shape) for shape in get_architecture(config).shapes(config).values())
