"""Architectures, a room each: a family's tensors, matrices, and the program of its pass."""

from specdec.config import (
    ASSISTANT,
    AttentionConfig,
    Config,
    ConvConfig,
    DeltaConfig,
    ExpertsConfig,
    HeadConfig,
    InputsConfig,
    LayerConfig,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from specdec.heads.eagle3 import EAGLE3
from specdec.heads.gemma4_assistant import GEMMA4_ASSISTANT
from specdec.heads.mtp import MTP
from specdec.layers.base import Architecture, Buffers, Room, Weights
from specdec.model.gpt2 import GPT2
from specdec.model.llama import LLAMA, WITH_STATES

ARCHITECTURES = {"llama": LLAMA, "gpt2": GPT2, "eagle3": EAGLE3, "mtp": MTP, ASSISTANT: GEMMA4_ASSISTANT}


def architecture_of(config: Config) -> Architecture:
    """The room of a config's family. Raises ValueError for one that there is not."""
    if config.architecture not in ARCHITECTURES:
        raise ValueError(f"the architecture {config.architecture!r} is not known; known are {', '.join(ARCHITECTURES)}")
    own = ARCHITECTURES[config.architecture]
    return WITH_STATES if own is LLAMA and any(layer.mixer for layer in config.layers) else own


__all__ = [
    "ARCHITECTURES", "ASSISTANT", "Architecture", "AttentionConfig", "Buffers", "Config", "ConvConfig", "DeltaConfig",
    "ExpertsConfig", "HeadConfig", "InputsConfig", "LayerConfig", "Room", "RopeConfig", "RopeScaling", "Weights", "YarnScaling",
    "architecture_of",
]  # fmt: skip
