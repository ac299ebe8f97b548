"""Read config.json and generation_config.json of a Hugging Face folder: the family, the config, and the BOS and EOS tokens.

A key that changes the arithmetic is either supported or rejected by name; other keys are ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.families import HF_FAMILIES, HFFamily
from specdec.families.config_values import (
    QUANTIZATION_KEYS,
    CheckpointError,
    ConfigValues,
    check_neutral_values,
    format_json_value,
)
from specdec.families.hf_common import NEUTRAL_VALUES, TEXT_CONFIG_KEY
from specdec.loaders.json_file import read_json_object, read_optional_json_object
from specdec.model_config import ModelConfig

CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
MERGE_HINT = "merge it with merge_and_unload of peft, and save it with save_pretrained"  # for an adapter
EOS_NAME = "eos"
MULTIMODAL_TYPES = {name: is_tied for family in HF_FAMILIES.values() for name, is_tied in family.multimodal_types.items()}
TOP_LEVEL_KEYS = ("tie_word_embeddings", *QUANTIZATION_KEYS, "bos_token_id", "eos_token_id")  # override those in text_config


def read_config(folder: Path) -> tuple[HFFamily, ModelConfig, dict[int, str], int | None]:
    """Read the model's config, family and special token ids from config.json and generation_config.json of a folder.

    Returns:
        The family, the model's config, a dict with the EOS token ids as keys and names as values, and the BOS token id or None.

    Raises:
        CheckpointError: A file is missing or damaged, or the family or a setting is not supported.
    """
    path = folder / CONFIG
    given = _select_text_config(path, read_json_object(path))
    name = given.get("model_type")
    if not isinstance(name, str) or name not in HF_FAMILIES:
        problem = "has no model_type" if name is None else f"has the model_type {format_json_value(name)}, which is not supported"
        names = sorted({each.removesuffix("_text") for each in (*HF_FAMILIES, *MULTIMODAL_TYPES)})
        raise CheckpointError(f"{path} {problem}; supported: {', '.join(names)}")
    family = HF_FAMILIES[name]
    given = given | {name: given[alias] for alias, name in family.key_aliases.items() if alias in given}
    values = ConfigValues(path, given, family.defaults)
    check_neutral_values(values, {key: neutral for key, neutral in NEUTRAL_VALUES.items() if key not in family.supported_keys})
    config = family.parse_config(values)
    if problem := config.find_error():
        raise CheckpointError(f"{path} is not a valid model config: {problem}")
    return family, config, *_read_special_ids(folder, given, values, config.vocab_size)


def _select_text_config(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json that describe the language model.

    For a multimodal model these are the keys in text_config, overridden by TOP_LEVEL_KEYS; otherwise all keys.

    Args:
        path: The config.json, for errors.
        given: All its keys.

    Raises:
        CheckpointError: A multimodal model has no text_config.
    """
    name = given.get("model_type")
    if not isinstance(name, str) or name not in MULTIMODAL_TYPES:
        return given
    text_config = given.get(TEXT_CONFIG_KEY)
    if not isinstance(text_config, dict):
        raise CheckpointError(
            f"{path}: {TEXT_CONFIG_KEY} is {format_json_value(text_config)}; expected an object, the config of the text model"
        )
    top_level = {key: given[key] for key in TOP_LEVEL_KEYS if given.get(key) is not None}
    return text_config | {"tie_word_embeddings": MULTIMODAL_TYPES[name]} | top_level


# Special tokens


def _read_special_ids(
    folder: Path, given: Mapping[str, Any], values: ConfigValues, vocab_size: int
) -> tuple[dict[int, str], int | None]:
    """Return a dict with the EOS token ids as keys and names as values, and the BOS token id or None.

    The ids are from config.json and generation_config.json; if neither has a key, from the family's defaults.

    Ids beyond the vocabulary are dropped, because they never occur: transformers writes 50256 into a config of 100 tokens.
    """
    path = folder / GENERATION_CONFIG
    sources = [ConfigValues(folder / CONFIG, given), ConfigValues(path, read_optional_json_object(path))]

    def collect_ids(key: str) -> list[int]:
        given_in = [source for source in sources if key in source] or [values]
        return [i for source in given_in for i in _get_ids(source, key) if i < vocab_size]

    return dict.fromkeys(collect_ids("eos_token_id"), EOS_NAME), next(iter(collect_ids("bos_token_id")), None)


def _get_ids(values: ConfigValues, key: str) -> list[int]:
    value = values[key]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise values.make_error(key, "a token id, a list of them, or null")
    return ids
