"""Open a Hugging Face folder as a `Checkpoint`: read its config, and find the file, name and row order of each tensor.

A key of config.json that changes the arithmetic is either supported or rejected by name; other keys are ignored. The names of
tensors are those that transformers 5.23 saves (`models/*/modeling_*.py`), and those of a base model without its prefix.
"""

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from specdec.argument_checks import CheckpointError, JSONDict, JSONObject, format_json_value, wrap_read_errors
from specdec.families import DFLASH, load_definition, load_definitions
from specdec.families.config_values import QUANTIZATION_KEYS, ConfigValues
from specdec.families.family import HFFamily
from specdec.families.hf_common import LM_HEAD, TEXT_CONFIG_KEY, check_unsupported_keys
from specdec.families.tensor_specs import TensorSpec, select_tensor_specs
from specdec.loaders.checkpoint import SAMPLING_RANGES, Checkpoint, parse_default_sampling
from specdec.loaders.model_file import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    MERGE_HINT,
    ORIGINAL_HINT,
    WEIGHTS,
    read_json_object,
    read_optional_json_object,
)
from specdec.loaders.rerankers import find_rerank_template, read_rerank_head
from specdec.loaders.safetensors import SafetensorsFile
from specdec.loaders.tensor_assembly import TensorIndex, assemble_tensors, is_equal
from specdec.model_config import ModelConfig

MAX_NAME_LENGTH = 255  # of a file, in characters

POOLING_CONFIG = "1_Pooling/config.json"
RERANK_HEAD = "score.weight"  # of a Qwen3ForSequenceClassification
FOLDER_HINTS = (  # regex of a file's name, and what to do; the first match counts
    (r".+\.(incomplete|part|crdownload|aria2)", "the download of {name} is not finished; continue it"),
    (r"(?!mmproj).+\.gguf", "name one of its GGUF files: {path}"),
    (r"models--.+--.+", "it is a cache of the hub; name a model by its repository: {repository}"),
    (r"pytorch_model.*\.bin", "{name} is a PyTorch file; convert it with from_pretrained and save_pretrained of transformers"),
    (r"adapter_config\.json", f"an adapter alone is not a model; {MERGE_HINT}"),
    (
        r"consolidated.*|onnx|.+\.(pth|pt|ckpt|onnx|h5|msgpack|npz)|openvino_model\..+|model_index\.json",
        f"{{name}} belongs to a format that is not supported; {ORIGINAL_HINT}",
    ),
    (r"model-\d{5}-of-\d{5}\.safetensors", f"{{name}} is a shard; download {INDEX} and all shards to the same folder"),
)
EOS_NAME = "eos"
MTP_LAYER_NAME = re.compile(r"layers\.\d{1,9}\.eh_proj\.weight")  # in the layer of an MTP head
TOP_LEVEL_KEYS = ("tie_word_embeddings", *QUANTIZATION_KEYS, "bos_token_id", "eos_token_id")  # override those in text_config
POOLING_KEYS = {"last": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}


class HFFolder(TensorIndex[SafetensorsFile]):
    """An index of the tensors in a folder's safetensors files, by name.

    The names lack the prefix that the `prefix` regex matches. Names that match `ignored_names` are left out.

    Raises CheckpointError if the files are missing or damaged, if two tensors have one name, or if shards do not match the index.
    """

    need_phrase, shape_phrase, model_phrase = f"its {CONFIG} needs", f"{CONFIG} says", f"{CONFIG} describes"

    def __init__(self, path: Path, prefix: re.Pattern[str], ignored_names: re.Pattern[str]) -> None:
        """Open the folder's files and index their tensors; raise CheckpointError if the files disagree."""
        super().__init__(path)
        files, listed = _open_files(path)
        for file in files:
            for full in file.entries:
                name = full[found.end() :] if (found := prefix.match(full)) else full
                if ignored_names.fullmatch(name):
                    continue
                if listed is not None and listed.get(full) is not file:
                    raise CheckpointError(f"{file.path} holds {format_json_value(full)}, which {INDEX} does not list")
                if name in self:
                    raise CheckpointError(f"{file.path} holds {format_json_value(full)} twice, under two names")
                self._sources[name] = file, full


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder of config.json and safetensors files as a `Checkpoint`, after checking all headers.

    Raises:
        CheckpointError: The model is not complete and consistent. Weights are checked when they are read.
    """
    with wrap_read_errors(path, CheckpointError):
        if not (path / CONFIG).exists():
            raise CheckpointError(f"{path} is a directory without {CONFIG}; {_make_hint(path)}")
    family, config, eos_tokens, bos_token_id = read_config(path)
    folder = HFFolder(path, family.prefix, family.ignored_names)
    specs = select_tensor_specs(family.tensor_specs, family.alternatives, folder, config.n_layers)
    rerank_template = find_rerank_template(path, family.name, read_json_object(path / CONFIG))
    rerank_head = read_rerank_head(folder, RERANK_HEAD, config.dim) if rerank_template else None
    if rerank_head is not None and LM_HEAD not in folder:  # it has no other classifier
        config = replace(config, shared_classifier=True)
    # The weights decide, not the config, as in transformers.
    if config.shared_classifier and not has_tied_embedding(folder, specs, config):
        config = replace(config, shared_classifier=False)
    if not config.shared_classifier and LM_HEAD not in folder:
        raise CheckpointError(
            f"{path} has no {LM_HEAD}, and its {CONFIG} does not tie it to the embedding; expected a language model"
        )
    tensors = assemble_tensors(config, specs, folder)
    folder.ignore(family.list_unused(config))
    if family.has_mtp_layers:
        folder.ignore(find_mtp_tensors(folder, config))
    folder.check_all_used()
    sampling = parse_default_sampling(
        read_optional_json_object(path / GENERATION_CONFIG), {name: name for name in SAMPLING_RANGES}
    )
    return Checkpoint(
        path, config, tensors, eos_tokens, bos_token_id, family=family.name.removesuffix("_text"),
        default_sampling=sampling, mtp_specs=family.mtp_specs,
        pooling=_read_pooling(path), rerank_template=rerank_template, rerank_head=rerank_head,
    )  # fmt: skip


def find_mtp_tensors(folder: HFFolder, config: ModelConfig) -> list[str]:
    """Return the names of the tensors of MTP heads that are stored as layers after those of the model."""
    layers = {name.split(".")[1] for name in folder if MTP_LAYER_NAME.fullmatch(name)}
    first = {layer for layer in layers if int(layer) >= config.n_layers}
    return [name for name in folder if name.startswith("layers.") and name.split(".")[1] in first]


def has_tied_embedding(folder: HFFolder, specs: dict[str, TensorSpec], config: ModelConfig) -> bool:
    """Return whether the classifier (lm_head) of a model equals its token embedding, or is not stored.

    Either of them, or both, may be in the folder. Changes the embedding's entry in `specs` if only the classifier's tensor is
    there. Reads and compares both tensors if both are there, and marks them as used.
    """
    if LM_HEAD not in folder:
        return True
    if specs["tok_emb"].name not in folder:
        specs["tok_emb"] = TensorSpec(LM_HEAD)
        return True
    table = (config.vocab_size, config.dim)
    if is_tied := is_equal(*(folder.get_tensor(name, table) for name in (specs["tok_emb"].name, LM_HEAD))):
        folder.ignore([LM_HEAD])
    return is_tied


def _read_pooling(path: Path) -> str:
    """Return how a folder's embedding model pools hidden states, "last", "cls" or "mean"; "" if no pooling config says so.

    The pooling config is that of sentence-transformers.
    """
    values = read_optional_json_object(path / POOLING_CONFIG)
    return next((mode for mode, key in POOLING_KEYS.items() if values.get(key) is True), "")


def _open_files(path: Path) -> tuple[list[SafetensorsFile], dict[str, SafetensorsFile] | None]:
    """Open a folder's safetensors files; return them, and a dict from tensor name to file if there is an index, else None.

    Raises:
        CheckpointError: A file is missing or damaged, or lacks a tensor that the index lists.
    """
    with wrap_read_errors(path, CheckpointError):
        if (path / WEIGHTS).exists():
            return [SafetensorsFile(path / WEIGHTS)], None
        if not (path / INDEX).exists():
            raise CheckpointError(f"{path} holds neither {WEIGHTS} nor {INDEX}; {_make_hint(path)}")
    index = path / INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; expected an object of tensors and their files")
    files: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name not in files:
            shard = _resolve_shard(index, name)
            files[name] = SafetensorsFile(shard)
        if tensor not in files[name].entries:
            raise CheckpointError(f"{files[name].path} does not contain {format_json_value(tensor)}, but {INDEX} says so")
    return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}


def _resolve_shard(index: Path, name: object) -> Path:
    """Return the path of a shard from its file name in an index, after checking that the name is safe and the file exists.

    A link may lead out of the folder, as in the hub's cache, but a name may not.

    Raises:
        CheckpointError: The name is not that of an existing file in the index's folder.
    """
    problem = f"{index} names the file {format_json_value(name)}"
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError(f"{problem}; expected a file next to it")
    if any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name))):
        raise CheckpointError(f"{problem}, outside of its folder; expected a file next to it")
    shard = index.parent / name
    with wrap_read_errors(shard, CheckpointError):
        if not shard.exists():
            raise CheckpointError(f"{problem}, which is missing; download the whole folder again")
    return shard


def _make_hint(path: Path) -> str:
    """Return advice, for an error, on a folder that holds no complete model, depending on the files in it."""
    entries = sorted(path.iterdir())
    broken = [entry.name for entry in entries if entry.is_symlink() and not entry.exists()]
    if broken:  # the hub's cache copied without its blobs
        return f"its {broken[0]} is a broken link; copy the whole folder with cp -rL"
    for pattern, hint in FOLDER_HINTS:
        if entry := next((entry for entry in entries if re.fullmatch(pattern, entry.name)), None):
            repository = entry.name.removeprefix("models--").replace("--", "/", 1)
            return hint.format(path=entry, name=entry.name, repository=repository)
    return f"expected a Hugging Face folder: {CONFIG} and {WEIGHTS}, or shards with {INDEX}"


# config.json and generation_config.json


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
    if name == "muse_glimmer_assistant" or "dflash" in str(given.get("architectures")).lower():
        raise CheckpointError(f"{path} describes {DFLASH}")
    family = load_definition(HFFamily, name)
    if not family:
        problem = "has no model_type" if name is None else f"has the model_type {format_json_value(name)}, which is not supported"
        names = {each.removesuffix("_text") for one in load_definitions(HFFamily) for each in (one.name, *one.multimodal_types)}
        raise CheckpointError(f"{path} {problem}; supported: {', '.join(sorted(names))}")
    aliases = {name: alias for alias, name in family.key_aliases.items() if alias in given}
    given = given | {name: given[alias] for name, alias in aliases.items()}
    values = ConfigValues(path, given, family.defaults, aliases=aliases)
    check_unsupported_keys(values, family)
    config = family.parse_config(values).extend_to_yarn_context()
    if problem := config.find_error():
        raise CheckpointError(f"{path} is not a valid model config: {problem}")
    return family, config, *_read_special_ids(folder, given, values, config.vocab_size)


def _select_text_config(path: Path, given: JSONDict) -> JSONDict:
    """Return the keys of a config.json that describe the language model.

    For a multimodal model these are the keys in text_config, overridden by TOP_LEVEL_KEYS; otherwise all keys. The published
    files of some multimodal models have no text_config.

    Args:
        path: The config.json, for errors.
        given: All its keys.

    Raises:
        CheckpointError: A multimodal model has no text_config.
    """
    name: Any = given.get("model_type")
    families = load_definitions(HFFamily, name)
    tied = next((family.multimodal_types[name] for family in families if name in family.multimodal_types), None)
    has_flat_config = TEXT_CONFIG_KEY not in given and any(family.name == name for family in families)
    if tied is None or has_flat_config:
        return given
    text_config = given.get(TEXT_CONFIG_KEY)
    if not isinstance(text_config, dict):
        raise CheckpointError(
            f"{path}: {TEXT_CONFIG_KEY} is {format_json_value(text_config)}; expected an object, the config of the text model"
        )
    top_level = {key: given[key] for key in TOP_LEVEL_KEYS if given.get(key) is not None}
    return text_config | {"tie_word_embeddings": tied} | top_level


def _read_special_ids(
    folder: Path, given: JSONObject, values: ConfigValues, vocab_size: int
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
    """Return the token ids under a key, given as one id, a list or null; raise CheckpointError for anything else."""
    value = values[key]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise values.make_error(key, "a token id, a list of them, or null")
    return ids
