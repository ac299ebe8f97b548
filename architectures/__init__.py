"""Architectures, a room each: a family's tensors, matrices, and the program of its pass."""

from .config import Config, ConvConfig, DeltaConfig, ExpertsConfig, HeadConfig, RopeScaling, YarnScaling
from .eagle3 import EAGLE3
from .gemma import GEMMA
from .gpt2 import GPT2
from .lfm2 import LFM2
from .llama import LLAMA
from .mixture import MIXTURE
from .mtp import MTP
from .plan import Architecture, Buffers, Room, Weights
from .qwen35 import QWEN35

ARCHITECTURES = {
    "llama": LLAMA, "gpt2": GPT2, "gemma": GEMMA, "lfm2": LFM2, "qwen35": QWEN35, "mixture": MIXTURE,
    "eagle3": EAGLE3, "mtp": MTP,
}  # fmt: skip


def architecture_of(config: Config) -> Architecture:
    """The room of a config's family. Raises ValueError for one that there is not."""
    if config.architecture not in ARCHITECTURES:
        raise ValueError(f"the architecture {config.architecture!r} is not known; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[config.architecture]


__all__ = [
    "ARCHITECTURES", "Architecture", "Buffers", "Config", "ConvConfig", "DeltaConfig", "ExpertsConfig", "HeadConfig",
    "Room", "RopeScaling", "Weights", "YarnScaling", "architecture_of",
]  # fmt: skip
