"""Draft heads: EAGLE-3, multi-token prediction, and assistants on the KV cache of their target.

Importing this package makes the architectures of heads known to `get_architecture`.
"""

from typing import TYPE_CHECKING

from specdec.model import ARCHITECTURES
from specdec.model_config import ASSISTANT, ModelConfig

if TYPE_CHECKING:
    from specdec.model.llama import Llama


def _make_eagle3(config: ModelConfig) -> "Llama":
    from specdec.heads.eagle3 import EAGLE3

    return EAGLE3


def _make_mtp(config: ModelConfig) -> "Llama":
    from specdec.heads.mtp import MTP

    return MTP


def _make_assistant(config: ModelConfig) -> "Llama":
    from specdec.heads.gemma4_assistant import GEMMA4_ASSISTANT

    return GEMMA4_ASSISTANT


ARCHITECTURES |= {"eagle3": _make_eagle3, "mtp": _make_mtp, ASSISTANT: _make_assistant}
