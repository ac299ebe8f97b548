"""Families of models, a file each: what their files say, and where their tensors lie. A new one is a file, and a line here."""

from . import (
    eagle3,
    gemma3,
    gemma4,
    gemma4_assistant,
    gpt2,
    gpt_oss,
    granite,
    lfm2,
    llama,
    ministral3,
    mistral,
    olmo2,
    olmoe,
    phi3,
    qwen,
    qwen35,
    smollm3,
)
from .family import Family, HeadInFolder, InFolder, InGguf, Keys

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen.FAMILY,
    granite.FAMILY,
    smollm3.FAMILY,
    phi3.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gemma4_assistant.FAMILY,
    ministral3.FAMILY,
    lfm2.FAMILY,
    qwen35.FAMILY,
    olmo2.FAMILY,
    olmoe.FAMILY,
    gpt_oss.FAMILY,
    gpt2.FAMILY,
    eagle3.FAMILY,
)
FOLDERS = {each.model_type: each for family in FAMILIES for each in family.folders}
HEADS = [each for family in FAMILIES for each in family.heads]
GGUFS = {each.architecture: each for family in FAMILIES for each in family.ggufs}

__all__ = ["FAMILIES", "FOLDERS", "GGUFS", "HEADS", "Family", "HeadInFolder", "InFolder", "InGguf", "Keys"]
