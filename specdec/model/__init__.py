"""Models: the forward pass with its KV cache, and the architectures by name."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from specdec.model_config import ModelConfig

if TYPE_CHECKING:
    from specdec.model.llama import Llama


def _make_llama(config: ModelConfig) -> "Llama":
    from specdec.model.llama import LLAMA

    return LLAMA


# By name; each imports its module when a config names it. The architectures of draft heads are added when `heads` is imported.
ARCHITECTURES: dict[str, "Callable[[ModelConfig], Llama]"] = {"llama": _make_llama}


def get_architecture(config: ModelConfig) -> "Llama":
    """Return the architecture that config.architecture names; raise ValueError if the name is unknown."""
    if config.architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {config.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[config.architecture](config)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of weights of a model."""
    return sum(math.prod(shape) for shape in get_architecture(config).shapes(config).values())
