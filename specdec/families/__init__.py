"""Model families, one file each: how to read their configs and how their tensors are stored. Add a file for a new family.

Only the file of the family that a model names is imported.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from specdec.argument_checks import JSONObject
from specdec.model_config import ASSISTANT, UNIFIED_ASSISTANT

# Files of the families that are not named like their file, by model_type in config.json or by architecture in GGUF files
FILES = {
    "bailing_moe_v2": "bailing_moe", "bailingmoe2": "bailing_moe",
    "deepseek_v2": "deepseek", "deepseek_v3": "deepseek", "deepseek2": "deepseek", "glm4_moe_lite": "deepseek",
    "ernie4_5_moe": "ernie4_5", "ernie4_5-moe": "ernie4_5",
    "gemma2": "gemma", "gemma3": "gemma", "gemma3_text": "gemma", "gemma4_text": "gemma4", "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4", "granitemoe": "granite", "granitemoeshared": "granite", "granitemoehybrid": "granite",
    "granitehybrid": "granite", "hunyuan-dense": "hunyuan_v1_dense", "lfm2_moe": "lfm2", "lfm2moe": "lfm2",
    "ministral3": "mistral", "mistral3": "mistral", "mixtral": "mistral", "muse_glimmer_text": "muse_glimmer",
    "nemotron_h_moe": "nemotron_h", "olmo3": "olmo2", "olmoe": "olmo2", "phimoe": "phi3",
    "qwen2": "qwen", "qwen2_moe": "qwen", "qwen2moe": "qwen", "qwen3": "qwen", "qwen3_moe": "qwen", "qwen3moe": "qwen",
    "qwen2_vl": "qwen", "qwen2_vl_text": "qwen", "qwen2_5_vl": "qwen", "qwen2_5_vl_text": "qwen", "qwen2vl": "qwen",
    "qwen3_vl": "qwen", "qwen3_vl_text": "qwen", "qwen3_vl_moe": "qwen", "qwen3_vl_moe_text": "qwen", "qwen3vl": "qwen",
    "qwen3vlmoe": "qwen", "qwen3_5": "qwen35", "qwen3_5_text": "qwen35", "qwen3_5_moe": "qwen35", "qwen3_5_moe_text": "qwen35",
    "qwen35moe": "qwen35", "qwen3_next": "qwen35", "qwen3next": "qwen35", "smolvlm": "llama", "idefics3": "llama",
}  # fmt: skip
ASSISTANT_TYPES = (ASSISTANT, UNIFIED_ASSISTANT)
DFLASH = "a DFlash draft head, which is not supported; use -d lookup"  # a head that drafts a block of tokens at once
EAGLE3_KEYS = ("speculators_model_type", "eagle_config", "draft_vocab_size")
Definition = TypeVar("Definition")  # HFFamily, HFHead or GGUFFamily of `family`


def load_definitions(kind: type[Definition], name: object = None) -> list[Definition]:
    """Return the definitions of one kind in the file that a name in a model's file belongs to; those of all files for None."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name is not None:
        files = [file for file in files if file == FILES.get(str(name), str(name).replace("-", "_"))]
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
