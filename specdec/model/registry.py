"""Registry of all model architectures by name, and re-exports of their configs."""

from specdec.heads.eagle3 import EAGLE3
from specdec.heads.gemma4_assistant import GEMMA4_ASSISTANT
from specdec.heads.mtp import MTP
from specdec.layers.architecture import Architecture, Buffers, BufferSizes, Weights
from specdec.model.gpt2 import GPT2
from specdec.model.llama import LLAMA, LLAMA_RECURRENT
from specdec.model_config import (
    ASSISTANT,
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    HeadConfig,
    LayerConfig,
    Llama3RopeScaling,
    ModelConfig,
    PerLayerInputsConfig,
    RopeConfig,
    ShortConvConfig,
    YarnRopeScaling,
)

ARCHITECTURES = {"llama": LLAMA, "gpt2": GPT2, "eagle3": EAGLE3, "mtp": MTP, ASSISTANT: GEMMA4_ASSISTANT}


def get_architecture(config: ModelConfig) -> Architecture:
    """Return the `Architecture` that config.architecture names; raise ValueError if the name is unknown.

    A "llama" with mixers gets the variant with a recurrent state.
    """
    if config.architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {config.architecture!r} is not supported; expected one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[config.architecture]
    return LLAMA_RECURRENT if architecture is LLAMA and any(layer.mixer for layer in config.layers) else architecture


__all__ = [
    "ARCHITECTURES",
    "ASSISTANT",
    "Architecture",
    "AttentionConfig",
    "BufferSizes",
    "Buffers",
    "DeltaNetConfig",
    "ExpertsConfig",
    "HeadConfig",
    "LayerConfig",
    "Llama3RopeScaling",
    "ModelConfig",
    "PerLayerInputsConfig",
    "RopeConfig",
    "ShortConvConfig",
    "Weights",
    "YarnRopeScaling",
    "get_architecture",
]  # fmt: skip
