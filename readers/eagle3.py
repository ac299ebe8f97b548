"""The folder of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) to a `Checkpoint`.

There are EAGLE's dialect, which SpecForge and AngelSlim write too, that of `speculators`, and the tensors of either behind
`model.`. Keys, names and what a silent file means are EAGLE's and those of speculators 0.9. Whatever changes the arithmetic is
either done or refused by name; other keys are not looked at.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import Config, HeadConfig
from ..families import FOLDERS, folders
from ..families.eagle3 import OF_LAYER, are_layers
from ..families.folders import HEAD
from ..families.places import Place
from ..families.values import CheckpointError, Values, shown
from .config_json import CONFIG, check_neutral
from .heads import check_rows, checked_ids
from .huggingface import Folder
from .json_text import read_object
from .model_file import Checkpoint, telling_os_errors
from .places import tensors_of
from .safetensors import INDEX, PICKLE, WEIGHTS

SPECULATORS, LAYER, EAGLE = "speculators_model_type", "transformer_layer_config", "eagle_config"
ROWS, LAYER_IDS, TARGET_DIM = "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "target_hidden_size"
IDS, EMBEDDING = "d2t", "embed_tokens.weight"
LAYERS = ("midlayer", "layers.0")  # a head's only one, in EAGLE's dialect and in that of speculators
PREFIX = re.compile(r"model\.")
HARMLESS = re.compile(r"t2d|((midlayer|layers\.0)\.self_attn\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
NORMS = {"": {}, "each": {"fc_norm": Place("fc_norm.{}.weight")}, "whole": {"fc_norm": Place("input_norm.weight", alone=True)}}
OUTER_PLACES = {
    "fc": Place("fc.weight"),
    "rms_final": Place("norm.weight"),
    "wcls": Place(HEAD),
    "tok_emb": Place(EMBEDDING),
}
LAYER_PLACES = {
    "rms_emb": Place("layers.{}.input_layernorm.weight"),
    "rms_hidden": Place("layers.{}.hidden_norm.weight"),
    **{name: place for name, place in folders.PLACES.items() if "{}" in place.name and name != "rms_att"},
}
# what is done where a file says it
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qkv_bias")
# what other arithmetic than ours is asked for by, and the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "parallel_draft_step": (1, None),
    "quantization_config": (None,),
}


def is_head(folder: Path) -> bool:
    """Whether a folder's config.json is that of a head. Raises CheckpointError for one that is damaged."""
    with telling_os_errors(folder):
        if not (folder / CONFIG).exists():
            return False
    given = read_object(folder / CONFIG)
    names = given.get("architectures")
    is_said = any(given.get(key) is not None for key in (SPECULATORS, EAGLE, ROWS))
    return is_said or (isinstance(names, list) and "eagle3" in str(names).lower())


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a head's folder, after checking all that its headers can tell.

    Raises CheckpointError for anything but a complete and consistent head; numbers are checked when they are read.
    """
    with telling_os_errors(path):
        if (path / PICKLE).exists() and not any((path / name).exists() for name in (WEIGHTS, INDEX)):
            raise CheckpointError(
                f"{path} holds its weights in {PICKLE} alone, which may run code when it is read; write them to {WEIGHTS}: "
                f"save_file(torch.load('{PICKLE}', weights_only=True), '{WEIGHTS}'), with save_file of safetensors.torch"
            )
    folder = Folder(path, PREFIX, HARMLESS)
    config, head = _config(path / CONFIG, folder)
    ids = None
    if IDS in folder:
        offsets = folder.integers(IDS, head.n_rows)
        ids = checked_ids(offsets + np.arange(len(offsets)), config.vocab_size, folder.told(IDS))
    layer = LAYERS[not any(name.startswith(LAYERS[0]) for name in folder)]
    places = {name: place._replace(name=place.name.replace("layers.{}", layer)) for name, place in LAYER_PLACES.items()}
    tensors = tensors_of(config, OUTER_PLACES | NORMS[head.fc_norm] | places, folder)
    folder.check_all_used()
    return Checkpoint(path, config, tensors, target_ids=ids)


def _config(path: Path, folder: Folder) -> tuple[Config, HeadConfig]:
    """The numbers of a head's config.json; what is not in the folder is the target's."""
    given = read_object(path)
    eagle = _object(path, given, EAGLE)
    own = Values(path, given | eagle, {ROWS: 32000} if SPECULATORS in given else {})
    if SPECULATORS in given:
        own.must_be(SPECULATORS, "eagle3")
    layer = _layer(path, _object(path, given, LAYER) if SPECULATORS in given else given, OF_LAYER[SPECULATORS in given])
    check_neutral(own, NEUTRAL)
    flags = {key: own[key] is not None and own.flag(key) for key in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise own.refusal("fc_norm", "false beside norm_before_fc, which norms the same numbers")
    config = FOLDERS[layer["model_type"]].config(layer)
    head = HeadConfig(
        target_dim=config.dim if own[TARGET_DIM] is None else own.whole(TARGET_DIM),
        layers=_layers(path, given, eagle),
        n_rows=config.vocab_size if own[ROWS] is None else own.whole(ROWS),
        own_embedding=EMBEDDING in folder,
        own_classifier=HEAD in folder,
        norm_before_residual=flags["norm_before_residual"],
        fc_norm="whole" if flags["norm_before_fc"] else "each" if flags["fc_norm"] else "",
        norm_output=flags["norm_output"],
        made_for=_made_for(given),
    )
    if config.shared_classifier and head.own_embedding and not head.own_classifier:
        raise layer.refusal("tie_word_embeddings", "false: a head without a classifier takes the target's")
    attention = replace(config.attention, qkv_bias=config.attention.qkv_bias or flags["qkv_bias"])
    config = replace(config, architecture="eagle3", shared_classifier=False, attention=attention, head=head)
    if flaw := config.flaw():
        raise CheckpointError(f"{path} describes no head: {flaw}")
    check_rows(head, config.vocab_size, IDS in folder, f"{path}")
    return config, head


def _layer(path: Path, given: Mapping[str, Any], silent: str) -> Values:
    """The keys of a head's layer, which is one of `OF_LAYER`; silent: which, where they tell none."""
    family = given.get("model_type", silent)
    if family not in OF_LAYER:
        raise CheckpointError(f"{path}: the head's layer is that of {shown(family)}; there are {', '.join(OF_LAYER)}")
    layer = Values(path, given, dict(FOLDERS[family].defaults) | {"model_type": family, "num_hidden_layers": 1})
    check_neutral(layer, folders.NEUTRAL)
    layer.must_be("num_hidden_layers", 1)
    return layer


def _object(path: Path, given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One in another; {} where there is none."""
    value = {} if given.get(key) is None else given[key]
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key} is {shown(value)}; expected an object")
    return value


def _layers(path: Path, given: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...]:
    """Before which layers of the target the states are taken: of eagle_config those behind its ids, whose outputs are meant."""
    before, behind = (_ids(Values(path, each, {}), more) for each, more in ((given, 0), (eagle, 1)))
    if before and behind and before != behind:
        told = f"{list(before)} at the top and {[i - 1 for i in behind]} in {EAGLE}"
        raise CheckpointError(f"{path}: {LAYER_IDS} is {told}, which mean different layers; expected one of them")
    return before or behind


def _ids(values: Values, more: int) -> tuple[int, ...]:
    ids = values[LAYER_IDS]
    if ids is None or ids == []:
        return ()
    if not isinstance(ids, list) or not are_layers(ids):
        raise values.refusal(LAYER_IDS, "layers of the target, each once")
    return tuple(i + more for i in ids)


def _made_for(given: Any) -> str:
    """The architecture of the model that the head was trained on; "" where the file does not say."""
    for key in ("speculators_config", "verifier", "architectures"):
        given = given.get(key) if isinstance(given, dict) else None
    return given[0] if isinstance(given, list) and given and isinstance(given[0], str) else ""
