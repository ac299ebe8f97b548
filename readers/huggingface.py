"""A Hugging Face folder to a `Checkpoint`: which file holds which tensor, under which name, in which order of rows.

The names are those that transformers 5.23 saves (`models/*/modeling_*.py`), those of a base model without its prefix too.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ..machine.vectors import Int64
from .config_json import CONFIG, GENERATION_CONFIG, read_config
from .json_text import read_object, shown
from .model_file import Checkpoint, CheckpointError, FileTensor, advised, telling_os_errors
from .places import (
    CONV_IN,
    CONV_IN_BIASES,
    EXPERTS_GATED,
    GATED,
    ONE_MORE,
    QKV,
    QKV_BIASES,
    RATE,
    TAPS,
    Place,
    are_equal,
    tensors_of,
)
from .safetensors import INDEX, WEIGHTS, SafetensorsFile

HEAD = "lm_head.weight"
LONGEST_NAME = 255  # of a file, in letters


class Names(NamedTuple):
    """A family's tensors: what names but the head's begin with, their places, and which others there may be that nobody needs."""

    prefix: re.Pattern[str]
    places: Mapping[str, Place]
    harmless: re.Pattern[str]


LLAMA_NAMES = Names(
    re.compile(r"(model\.language_model|language_model\.model|language_model|model)\."),  # the first three of text beside images
    {
        "tok_emb": Place("embed_tokens.weight"),
        "rms_att": Place("layers.{}.input_layernorm.weight"),
        "wq": Place("layers.{}.self_attn.q_proj.weight", halves=True),
        "wk": Place("layers.{}.self_attn.k_proj.weight", halves=True),
        "wv": Place("layers.{}.self_attn.v_proj.weight"),
        "wo": Place("layers.{}.self_attn.o_proj.weight"),
        "bq": Place("layers.{}.self_attn.q_proj.bias", halves=True),
        "bk": Place("layers.{}.self_attn.k_proj.bias", halves=True),
        "bv": Place("layers.{}.self_attn.v_proj.bias"),
        "bo": Place("layers.{}.self_attn.o_proj.bias"),
        "q_norm": Place("layers.{}.self_attn.q_norm.weight", halves=True),
        "k_norm": Place("layers.{}.self_attn.k_norm.weight", halves=True),
        "rms_ffn": Place("layers.{}.post_attention_layernorm.weight"),
        "w1": Place("layers.{}.mlp.gate_proj.weight"),
        "w2": Place("layers.{}.mlp.down_proj.weight"),
        "w3": Place("layers.{}.mlp.up_proj.weight"),
        "b1": Place("layers.{}.mlp.gate_proj.bias"),
        "b2": Place("layers.{}.mlp.down_proj.bias"),
        "b3": Place("layers.{}.mlp.up_proj.bias"),
        "rms_final": Place("norm.weight"),
        "wcls": Place(HEAD),
    },
    re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(vision_tower|multi_modal_projector)\..*"),
)
SHARED_MLP = {  # of Granite 4, whose other experts a dense model has not
    **dict.fromkeys(GATED, Place("layers.{}.shared_mlp.input_linear.weight", among=GATED)),
    "w2": Place("layers.{}.shared_mlp.output_linear.weight"),
}
FUSED = {  # of Phi-3
    **{name: Place("layers.{}.self_attn.qkv_proj.weight", halves=name != "wv", among=QKV) for name in QKV},
    **dict.fromkeys(GATED, Place("layers.{}.mlp.gate_up_proj.weight", among=GATED)),
}
EXPERTS_IN_ONE = {  # as transformers 5 has them in memory
    **dict.fromkeys(EXPERTS_GATED, Place("layers.{}.mlp.experts.gate_up_proj", among=EXPERTS_GATED, each=True)),
    "experts_w2": Place("layers.{}.mlp.experts.down_proj", each=True),
}
MIXTURE_NAMES = LLAMA_NAMES._replace(
    places={
        **LLAMA_NAMES.places,
        "router": Place("layers.{}.mlp.gate.weight"),
        "experts_w1": Place("layers.{}.mlp.experts.{}.gate_proj.weight", each=True),
        "experts_w2": Place("layers.{}.mlp.experts.{}.down_proj.weight", each=True),
        "experts_w3": Place("layers.{}.mlp.experts.{}.up_proj.weight", each=True),
    }
)
MIXTRAL = {
    "router": Place("layers.{}.block_sparse_moe.gate.weight"),
    **{f"experts_w{n}": Place(f"layers.{{}}.block_sparse_moe.experts.{{}}.w{n}.weight", each=True) for n in (1, 2, 3)},
}
GPT2_NAMES = Names(
    re.compile(r"transformer\."),
    {
        "tok_emb": Place("wte.weight"),
        "pos_emb": Place("wpe.weight"),
        "ln_att": Place("h.{}.ln_1.weight"),
        "ln_att_bias": Place("h.{}.ln_1.bias"),
        **dict.fromkeys(QKV, Place("h.{}.attn.c_attn.weight", conv=True, among=QKV)),
        **dict.fromkeys(QKV_BIASES, Place("h.{}.attn.c_attn.bias", among=QKV_BIASES)),
        "wo": Place("h.{}.attn.c_proj.weight", conv=True),
        "bo": Place("h.{}.attn.c_proj.bias"),
        "ln_ffn": Place("h.{}.ln_2.weight"),
        "ln_ffn_bias": Place("h.{}.ln_2.bias"),
        "w1": Place("h.{}.mlp.c_fc.weight", conv=True),
        "b1": Place("h.{}.mlp.c_fc.bias"),
        "w2": Place("h.{}.mlp.c_proj.weight", conv=True),
        "b2": Place("h.{}.mlp.c_proj.bias"),
        "ln_final": Place("ln_f.weight"),
        "ln_final_bias": Place("ln_f.bias"),
        "wcls": Place(HEAD),
    },
    re.compile(r"h\.\d+\.attn\.(masked_)?bias"),  # the causal mask
)
GEMMA_NAMES = LLAMA_NAMES._replace(
    places={
        **LLAMA_NAMES.places,
        "rms_att": Place("layers.{}.input_layernorm.weight", made=ONE_MORE),
        "rms_att_out": Place("layers.{}.post_attention_layernorm.weight", made=ONE_MORE),
        "rms_ffn": Place("layers.{}.pre_feedforward_layernorm.weight", made=ONE_MORE),
        "rms_ffn_out": Place("layers.{}.post_feedforward_layernorm.weight", made=ONE_MORE),
        "q_norm": Place("layers.{}.self_attn.q_norm.weight", halves=True, made=ONE_MORE),
        "k_norm": Place("layers.{}.self_attn.k_norm.weight", halves=True, made=ONE_MORE),
        "rms_final": Place("norm.weight", made=ONE_MORE),
    }
)
LFM2_NAMES = LLAMA_NAMES._replace(
    places={
        "tok_emb": Place("embed_tokens.weight"),
        "rms_att": Place("layers.{}.operator_norm.weight"),
        "wq": Place("layers.{}.self_attn.q_proj.weight", halves=True),
        "wk": Place("layers.{}.self_attn.k_proj.weight", halves=True),
        "wv": Place("layers.{}.self_attn.v_proj.weight"),
        "wo": Place("layers.{}.self_attn.out_proj.weight"),
        "q_norm": Place("layers.{}.self_attn.q_layernorm.weight", halves=True),
        "k_norm": Place("layers.{}.self_attn.k_layernorm.weight", halves=True),
        **dict.fromkeys(CONV_IN, Place("layers.{}.conv.in_proj.weight", among=CONV_IN)),
        **dict.fromkeys(CONV_IN_BIASES, Place("layers.{}.conv.in_proj.bias", among=CONV_IN_BIASES)),
        "conv": Place("layers.{}.conv.conv.weight", made=TAPS),
        "conv_bias": Place("layers.{}.conv.conv.bias"),
        "conv_out": Place("layers.{}.conv.out_proj.weight"),
        "conv_out_bias": Place("layers.{}.conv.out_proj.bias"),
        "rms_ffn": Place("layers.{}.ffn_norm.weight"),
        "w1": Place("layers.{}.feed_forward.w1.weight"),
        "w2": Place("layers.{}.feed_forward.w2.weight"),
        "w3": Place("layers.{}.feed_forward.w3.weight"),
        "rms_final": Place("embedding_norm.weight"),
        "wcls": Place(HEAD),
    }
)
ATTENTION_OF_QWEN35 = {  # and its norms, which others of it have too
    "wq": Place("layers.{}.self_attn.q_proj.weight", halves=True, turn=(0, 2)),
    "wg": Place("layers.{}.self_attn.q_proj.weight", turn=(1, 2)),
    "q_norm": Place("layers.{}.self_attn.q_norm.weight", halves=True, made=ONE_MORE),
    "k_norm": Place("layers.{}.self_attn.k_norm.weight", halves=True, made=ONE_MORE),
    "rms_att": Place("layers.{}.input_layernorm.weight", made=ONE_MORE),
    "rms_ffn": Place("layers.{}.post_attention_layernorm.weight", made=ONE_MORE),
    "rms_final": Place("norm.weight", made=ONE_MORE),
}
QWEN35_NAMES = LLAMA_NAMES._replace(
    places={
        **LLAMA_NAMES.places,
        **ATTENTION_OF_QWEN35,
        "delta_qkv": Place("layers.{}.linear_attn.in_proj_qkv.weight"),
        "delta_z": Place("layers.{}.linear_attn.in_proj_z.weight"),
        "delta_b": Place("layers.{}.linear_attn.in_proj_b.weight"),
        "delta_a": Place("layers.{}.linear_attn.in_proj_a.weight"),
        "delta_out": Place("layers.{}.linear_attn.out_proj.weight"),
        "conv": Place("layers.{}.linear_attn.conv1d.weight", made=TAPS),
        "rate": Place("layers.{}.linear_attn.A_log", made=RATE),
        "dt": Place("layers.{}.linear_attn.dt_bias"),
        "delta_norm": Place("layers.{}.linear_attn.norm.weight"),
    },
    harmless=re.compile(r"(visual|mtp)\..*"),
)
NAMES = {
    "llama": LLAMA_NAMES,
    "gpt2": GPT2_NAMES,
    "gemma": GEMMA_NAMES,
    "lfm2": LFM2_NAMES,
    "qwen35": QWEN35_NAMES,
    "mixture": MIXTURE_NAMES,
}


class Folder:
    """The tensors of a folder's safetensors files, by name without the family's prefixes."""

    def __init__(self, path: Path, names: Names) -> None:
        self.path = path
        files, listed = _open_files(path)
        self._sources: dict[str, tuple[SafetensorsFile, str]] = {}
        self._used: set[str] = set()
        for file in files:
            for full in file.entries:
                name = full[prefix.end() :] if (prefix := names.prefix.match(full)) else full
                if names.harmless.fullmatch(name):
                    continue
                if listed is not None and listed.get(full) is not file:
                    raise CheckpointError(f"{file.path} holds {shown(full)}, which {INDEX} does not say")
                if name in self._sources:
                    raise CheckpointError(f"{file.path} holds {shown(full)} a second time, by another name")
                self._sources[name] = file, full

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def leave_out(self, name: str) -> None:
        """That tensor is not needed."""
        self._used.add(name)

    def told(self, name: str) -> str:
        """Its file and its name there, for people."""
        file, full = self._sources[name]
        return f"{file.path}: {shown(full)}"

    def tensor(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        """Raises CheckpointError for one that is missing or of another shape or dtype."""
        file, full = self._source(name, shape)
        return file.tensor(full)

    def integers(self, name: str, n: int) -> Int64:
        """As `tensor`, of n whole numbers, which are read."""
        file, full = self._source(name, (n,))
        return file.integers(full)

    def check_all_used(self) -> None:
        """Raises CheckpointError for a tensor that nobody asked for."""
        for name in self._sources:
            if name not in self._used:
                raise CheckpointError(f"{self.told(name)} has no place in the model that {CONFIG} describes")

    def _source(self, name: str, shape: tuple[int, ...]) -> tuple[SafetensorsFile, str]:
        if name not in self._sources:
            raise CheckpointError(f"{self.path} holds no tensor {name}, which its {CONFIG} needs")
        self._used.add(name)
        file, full = self._sources[name]
        found = file.entries[full].shape
        if found != shape:
            raise CheckpointError(f"{self.told(name)} has the shape {found}; {CONFIG} says {shape}")
        return file, full


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of config.json and safetensors files, after checking all that their headers can tell.

    Raises CheckpointError for anything but a complete and consistent model; numbers are checked when they are read.
    """
    with telling_os_errors(path):
        if not (path / CONFIG).exists():
            raise CheckpointError(f"{path} is a directory without {CONFIG}; {_hint(path)}")
    config, end_marks, bos, family = read_config(path)
    names = NAMES[config.architecture]
    folder = Folder(path, names)
    places = dict(names.places)
    for other in (SHARED_MLP, FUSED):
        if other["w1"].name.format(0) in folder:
            places |= other
    for other in (EXPERTS_IN_ONE, MIXTRAL):
        if any(other["experts_w2"].name.format(i, 0) in folder for i in range(config.n_layers)):
            places |= other
    if config.shared_classifier and HEAD in folder:
        if places["tok_emb"].name not in folder:
            places["tok_emb"] = Place(HEAD)
        elif are_equal(*(folder.tensor(places[name].name, (config.vocab_size, config.dim)) for name in ("tok_emb", "wcls"))):
            folder.leave_out(HEAD)
        else:  # transformers, too, believes the weights
            config = replace(config, shared_classifier=False)
    if not config.shared_classifier and HEAD not in folder:
        raise CheckpointError(f"{path} holds no {HEAD}, and its {CONFIG} ties none to the embedding; expected a language model")
    tensors = tensors_of(config, places, folder)
    folder.check_all_used()
    values = read_object(told) if (told := path / GENERATION_CONFIG).exists() else {}
    sampling = advised(values, {name: name for name in ("temperature", "top_p", "top_k")})
    return Checkpoint(path, config, tensors, end_marks, bos, family=family, sampling=sampling)


def _open_files(path: Path) -> tuple[list[SafetensorsFile], dict[str, SafetensorsFile] | None]:
    """The folder's safetensors files, and which of them holds each tensor where an index says it."""
    with telling_os_errors(path):
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
    with telling_os_errors(shard):
        if not shard.exists():
            raise CheckpointError(f"{told}, which is missing; fetch the folder again, whole")
    return shard


def _hint(path: Path) -> str:
    """What a folder that is no model here holds instead, and what to do about it."""
    entries = sorted(path.iterdir())
    names = [entry.name for entry in entries]
    broken = [entry.name for entry in entries if entry.is_symlink() and not entry.exists()]
    if broken:  # the hub's cache copied without its blobs
        return f"its {broken[0]} is a link to what is not there; copy the folder with cp -rL, whole"
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"name one of its GGUF files: {path / ggufs[0]}"
    if any(name.startswith("pytorch_model") for name in names):
        return "only safetensors are read; convert it with from_pretrained and save_pretrained of transformers"
    if "adapter_config.json" in names:
        return "an adapter alone is no model; merge it with merge_and_unload of peft, and save it with save_pretrained"
    return f"expected a Hugging Face folder: {CONFIG} and {WEIGHTS}, or shards with {INDEX}"
