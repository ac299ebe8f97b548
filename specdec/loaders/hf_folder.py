"""A Hugging Face folder to a `Checkpoint`: which file holds which tensor, under which name, in which order of rows.

The names are those that transformers 5.23 saves (`models/*/modeling_*.py`), those of a base model without its prefix too.
"""

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from specdec.config import Config
from specdec.families.config_values import CheckpointError, shown
from specdec.families.family import chosen
from specdec.families.hf_common import HEAD
from specdec.families.tensor_specs import Place
from specdec.loaders.checkpoint import ADVISED, Checkpoint, advised
from specdec.loaders.hf_config import CONFIG, GENERATION_CONFIG, MERGE, read_config
from specdec.loaders.json_file import object_if_there, read_object
from specdec.loaders.safetensors import INDEX, WEIGHTS, SafetensorsFile
from specdec.loaders.tensor_assembly import are_equal, tensors_of
from specdec.loaders.tensor_index import NamedTensors
from specdec.validation import reading

LONGEST_NAME = 255  # of a file, in letters

POOLING = "1_Pooling/config.json"
ORIGINAL = "use the original model with safetensors, or a GGUF file of it"
HINTS = (  # what else a folder may hold: a regex of a name, and what to do; the first that fits counts
    (r".+\.(incomplete|part|crdownload|aria2)", "the download of {name} is not finished; continue it"),
    (r"(?!mmproj).+\.gguf", "name one of its GGUF files: {path}"),
    (r"models--.+--.+", "it is a cache of the hub; name a model by its repository: {repository}"),
    (
        r"consolidated.*\.safetensors",
        f"{{name}} is in Mistral's own format, which is not supported; download {CONFIG}, model*.safetensors and tokenizer.json "
        "from the same repository, or name the model as org/name",
    ),
    (
        r"consolidated.*\.pth",
        "{name} is in Meta's own format, which is not supported; use the model's Hugging Face folder, named as org/name",
    ),
    (
        r"pytorch_model.*|.+\.(pth|pt|ckpt)",
        "{name} is a PyTorch file, which is not supported; convert it with from_pretrained and save_pretrained of transformers",
    ),
    (r"adapter_config\.json", f"an adapter alone is no model; {MERGE}"),
    (r"onnx|.+\.onnx", f"an ONNX model is not supported; {ORIGINAL}"),
    (r"openvino_model\..+", f"an OpenVINO model is not supported; {ORIGINAL}"),
    (r"tf_model.*\.h5|flax_model.*\.msgpack", f"{{name}} has weights of TensorFlow or Flax, which are not supported; {ORIGINAL}"),
    (r"(weights|model).*\.npz", f"{{name}} has weights of MLX, which are not supported; {ORIGINAL}"),
    (r"model_index\.json", "it is a pipeline of diffusers, which makes pictures; expected a language model"),
    (r"model-\d{5}-of-\d{5}\.safetensors", f"{{name}} is a shard; download {INDEX} and all shards to the same folder"),
)
POOLINGS = {"last": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}


class Folder(NamedTensors[SafetensorsFile]):
    """The tensors of a folder's safetensors files, by name without what prefix finds at its beginning, but for harmless ones."""

    needed, said, described = f"its {CONFIG} needs", f"{CONFIG} says", f"{CONFIG} describes"

    def __init__(self, path: Path, prefix: re.Pattern[str], harmless: re.Pattern[str]) -> None:
        super().__init__(path)
        files, listed = _open_files(path)
        for file in files:
            for full in file.entries:
                name = full[found.end() :] if (found := prefix.match(full)) else full
                if harmless.fullmatch(name):
                    continue
                if listed is not None and listed.get(full) is not file:
                    raise CheckpointError(f"{file.path} holds {shown(full)}, which {INDEX} does not say")
                if name in self:
                    raise CheckpointError(f"{file.path} holds {shown(full)} a second time, by another name")
                self._sources[name] = file, full


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of config.json and safetensors files, after checking all that their headers can tell.

    Raises CheckpointError for anything but a complete and consistent model; numbers are checked when they are read.
    """
    with reading(path, CheckpointError):
        if not (path / CONFIG).exists():
            raise CheckpointError(f"{path} is a directory without {CONFIG}; {_hint(path)}")
    family, config, end_marks, bos = read_config(path)
    folder = Folder(path, family.prefix, family.harmless)
    places = chosen(family.places, family.instead, folder, config.n_layers)
    if config.shared_classifier and not is_tied(folder, places, config):  # transformers, too, believes the weights
        config = replace(config, shared_classifier=False)
    if not config.shared_classifier and HEAD not in folder:
        raise CheckpointError(f"{path} holds no {HEAD}, and its {CONFIG} ties none to the embedding; expected a language model")
    tensors = tensors_of(config, places, folder)
    folder.leave_out(family.unused(config))
    folder.check_all_used()
    sampling = advised(object_if_there(path / GENERATION_CONFIG), {name: name for name in ADVISED})
    return Checkpoint(
        path, config, tensors, end_marks, bos, family=family.model_type.removesuffix("_text"), sampling=sampling, mtp=family.mtp,
        pooling=_pooling(path),
    )  # fmt: skip


def is_tied(folder: Folder, places: dict[str, Place], config: Config) -> bool:
    """Whether the classifier is the embedding, whichever of them lies there; places: of which the embedding's is that one's."""
    if HEAD not in folder:
        return True
    if places["tok_emb"].name not in folder:
        places["tok_emb"] = Place(HEAD)
        return True
    table = (config.vocab_size, config.dim)
    if is_one := are_equal(*(folder.tensor(name, table) for name in (places["tok_emb"].name, HEAD))):
        folder.leave_out([HEAD])
    return is_one


def _pooling(path: Path) -> str:
    """As sentence-transformers writes it beside a model that embeds texts."""
    values = object_if_there(path / POOLING)
    return next((ours for ours, key in POOLINGS.items() if values.get(key) is True), "")


def _open_files(path: Path) -> tuple[list[SafetensorsFile], dict[str, SafetensorsFile] | None]:
    """The folder's safetensors files, and which of them holds each tensor where an index says it."""
    with reading(path, CheckpointError):
        if (path / WEIGHTS).exists():
            return [SafetensorsFile(path / WEIGHTS)], None
        if not (path / INDEX).exists():
            raise CheckpointError(f"{path} holds neither {WEIGHTS} nor {INDEX}; {_hint(path)}")
    index = path / INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; expected an object of tensors and their files")
    files: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name not in files:
            shard = _shard(index, name)
            files[name] = SafetensorsFile(shard)
        if tensor not in files[name].entries:
            raise CheckpointError(f"{files[name].path} holds no {shown(tensor)}, which {INDEX} says it does")
    return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}


def _shard(index: Path, name: Any) -> Path:
    """The file of an index's folder that has that name; a link may lead out of it, as in the hub's cache, a name may not."""
    told = f"{index} names the file {shown(name)}"
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise CheckpointError(f"{told}; expected one beside it")
    if any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name))):
        raise CheckpointError(f"{told}, outside of its folder; expected one beside it")
    shard = index.parent / name
    with reading(shard, CheckpointError):
        if not shard.exists():
            raise CheckpointError(f"{told}, which is missing; fetch the folder again, whole")
    return shard


def _hint(path: Path) -> str:
    """Return what to do about a folder that holds no model, by what it holds instead."""
    entries = sorted(path.iterdir())
    broken = [entry.name for entry in entries if entry.is_symlink() and not entry.exists()]
    if broken:  # the hub's cache copied without its blobs
        return f"its {broken[0]} is a link to what is not there; copy the folder with cp -rL, whole"
    for pattern, advice in HINTS:
        if entry := next((entry for entry in entries if re.fullmatch(pattern, entry.name)), None):
            repository = entry.name.removeprefix("models--").replace("--", "/", 1)
            return advice.format(path=entry, name=entry.name, repository=repository)
    if models := [str(entry) for entry in entries if (entry / CONFIG).is_file()]:
        return f"name one of the models in it: {', '.join(models[:3])}"
    weights = [entry.name for entry in entries if entry.suffix == ".safetensors"]
    if weights and not (path / CONFIG).exists():
        return f"download {CONFIG} and tokenizer.json to it, from where {weights[0]} comes from"
    if len(weights) == 1:
        return f"rename its {weights[0]} to {WEIGHTS}"
    return f"expected a Hugging Face folder: {CONFIG} and {WEIGHTS}, or shards with {INDEX}"
