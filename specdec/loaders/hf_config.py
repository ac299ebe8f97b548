"""config.json and generation_config.json of a Hugging Face folder: its family, its numbers, the ids that begin and end a text.

Whatever changes the arithmetic is either done or refused by name; other keys are not looked at.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.config import Config
from specdec.families import FOLDERS, InFolder
from specdec.families.config_values import QUANTIZED, CheckpointError, Values, check_neutral, shown
from specdec.families.hf_common import NEUTRAL, TEXT
from specdec.loaders.json_file import object_if_there, read_object

CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
MERGE = "merge it with merge_and_unload of peft, and save it with save_pretrained"  # an adapter
END = "eos"
BESIDE = {name: is_tied for family in FOLDERS.values() for name, is_tied in family.beside.items()}
OF_ALL = ("tie_word_embeddings", *QUANTIZED, "bos_token_id", "eos_token_id")  # are said beside it, and go before


def read_config(folder: Path) -> tuple[InFolder, Config, dict[int, str], int | None]:
    """The family, the model's numbers, the names of the ids that end a text, and the id that begins one, if any.

    Raises CheckpointError for a file that is none or damaged, for a family that is not there and for arithmetic that is not done.
    """
    path = folder / CONFIG
    given = _of_text(path, read_object(path))
    name = given.get("model_type")
    if not isinstance(name, str) or name not in FOLDERS:
        flaw = "names no model_type" if name is None else f"has the model_type {shown(name)}, which is not supported"
        names = sorted({each.removesuffix("_text") for each in (*FOLDERS, *BESIDE)})
        raise CheckpointError(f"{path} {flaw}; supported: {', '.join(names)}")
    family = FOLDERS[name]
    given = given | {ours: given[key] for key, ours in family.aliases.items() if key in given}
    values = Values(path, given, family.defaults)
    check_neutral(values, {key: neutral for key, neutral in NEUTRAL.items() if key not in family.does})
    config = family.config(values)
    if flaw := config.flaw():
        raise CheckpointError(f"{path} describes no model: {flaw}")
    return family, config, *_read_marks(folder, given, values, config.vocab_size)


def _of_text(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What is said of the model that writes: all, or what lies in text_config, and beside it of it."""
    name = given.get("model_type")
    if not isinstance(name, str) or name not in BESIDE:
        return given
    of_text = given.get(TEXT)
    if not isinstance(of_text, dict):
        raise CheckpointError(f"{path}: {TEXT} is {shown(of_text)}; expected an object, the config of the text's model")
    of_all = {key: given[key] for key in OF_ALL if given.get(key) is not None}
    return of_text | {"tie_word_embeddings": BESIDE[name]} | of_all


# Marks


def _read_marks(folder: Path, given: Mapping[str, Any], values: Values, vocab_size: int) -> tuple[dict[int, str], int | None]:
    """The ids that end a text, of both files, and the one that begins one; the family's where neither tells.

    Ids beyond the vocabulary never come: transformers writes 50256 into a config of 100 tokens.
    """
    path = folder / GENERATION_CONFIG
    sources = [Values(folder / CONFIG, given), Values(path, object_if_there(path))]

    def ids(key: str) -> list[int]:
        telling = [source for source in sources if key in source] or [values]
        return [i for source in telling for i in _ids(source, key) if i < vocab_size]

    return dict.fromkeys(ids("eos_token_id"), END), next(iter(ids("bos_token_id")), None)


def _ids(values: Values, key: str) -> list[int]:
    value = values[key]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise values.refusal(key, "an id, several in a list, or null")
    return ids
