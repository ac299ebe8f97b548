"""Model families, one file each: how to read their configs and how their tensors are stored. Add a file for a new family.

Only the file of the family that a model names is imported.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from specdec.argument_checks import JSONObject
from specdec.model_config import ASSISTANT, UNIFIED_ASSISTANT

# Names of families by their file, unless they equal its name: by model_type in config.json or by architecture in GGUF files
NAMES = {
    "bailing_moe": ("bailing_moe_v2", "bailingmoe2"), "deepseek": ("deepseek_v2", "deepseek_v3", "deepseek2", "glm4_moe_lite"),
    "ernie4_5": ("ernie4_5_moe", "ernie4_5-moe"), "gemma": ("gemma2", "gemma3", "gemma3_text"),
    "gemma4": ("gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    "granite": ("granitemoe", "granitemoeshared", "granitemoehybrid", "granitehybrid"), "hunyuan_v1_dense": ("hunyuan-dense",),
    "lfm2": ("lfm2_moe", "lfm2moe"), "llama": ("smolvlm", "idefics3"), "mistral": ("ministral3", "mistral3", "mixtral"),
    "muse_glimmer": ("muse_glimmer_text",), "nemotron_h": ("nemotron_h_moe",), "olmo2": ("olmo3", "olmoe"), "phi3": ("phimoe",),
    "qwen": (
        "qwen2", "qwen2_moe", "qwen2moe", "qwen3", "qwen3_moe", "qwen3moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
        "qwen2_5_vl_text", "qwen2vl", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3vl", "qwen3vlmoe",
    ),
    "qwen35": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen35moe", "qwen3_next", "qwen3next"),
}  # fmt: skip
ASSISTANT_TYPES = (ASSISTANT, UNIFIED_ASSISTANT)
DFLASH = "a DFlash draft head, which is not supported; use -d lookup"  # a head that drafts a block of tokens at once
EAGLE3_KEYS = ("speculators_model_type", "eagle_config", "draft_vocab_size")
Definition = TypeVar("Definition")  # HFFamily, HFHead or GGUFFamily of `family`


def load_definitions(kind: type[Definition], name: object = None) -> list[Definition]:
    """Return the definitions of one kind in the file that a name in a model's file belongs to; those of all files for None."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name is not None:
        files = [file for file in files if file == str(name).replace("-", "_") or name in NAMES.get(file, ())]
    modules = (import_module(f"{__name__}.{file}") for file in files)
    return [each for module in modules for each in getattr(module, "FAMILY", ()) if isinstance(each, kind)]


def load_definition(kind: type[Definition], name: object) -> Definition | None:
    """Return the definition of one kind with a name from a model's file; None if it is not supported."""
    found: list[Any] = load_definitions(kind, name)
    return next((each for each in found if each.name == name), None)


def detect_head(config: JSONObject) -> str:
    """Return the name of the draft head that a parsed config.json describes; "" if it describes none."""
    architectures = config.get("architectures")
    if any(config.get(key) is not None for key in EAGLE3_KEYS) or (
        isinstance(architectures, list) and "eagle3" in str(architectures).lower()
    ):
        return "eagle3"
    return ASSISTANT if config.get("model_type") in ASSISTANT_TYPES else ""
