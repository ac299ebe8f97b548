"""EAGLE-3's heads (Li et al. 2025, arXiv:2503.01840), in a folder of their own or a GGUF file.

In folders there are EAGLE's dialect, which SpecForge and AngelSlim write too, that of `speculators`, and the tensors of either
behind `model.`. Keys, names and what a silent file means are EAGLE's and those of speculators 0.9.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.config import Config, HeadConfig
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import llama, qwen
from specdec.families.config_values import CheckpointError, Values, check_neutral, shown
from specdec.families.family import HeadInFolder, InFolder, InGguf, Keys, Tensors
from specdec.families.head_compatibility import are_layers
from specdec.families.hf_common import HEAD
from specdec.families.tensor_specs import Place, named

IDS, EMBEDDING = "d2t", "embed_tokens.weight"  # of rows' ids, absolute in GGUF files alone
TARGET_LAYERS = ("target_layers", "extract_layers")  # of the target, by the key of today's converter and of the first
GGUF_PLACES = gguf.OUTER_PLACES | {
    "fc": Place("fc.weight"),
    "fc_norm": Place("enc.output_norm.weight", alone=True),
    "rms_emb": Place("blk.0.attn_norm.weight"),
    "rms_hidden": Place("blk.0.attn_norm_2.weight"),
    **{name: Place(gguf.PAIRS_PLACES[name].name.format(0)) for name in ("wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")},
    "rms_final": Place("output_norm.weight"),
}


SPECULATORS, LAYER, EAGLE = "speculators_model_type", "transformer_layer_config", "eagle_config"
ROWS, LAYER_IDS, TARGET_DIM = "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "target_hidden_size"
# a head's layer is one of these; where a file is silent, EAGLE's and that of speculators
OF_LAYER = {
    each.model_type: each
    for each in (*llama.FAMILY, *qwen.FAMILY)
    if isinstance(each, InFolder) and each.model_type in ("llama", "qwen3")
}
LAYERS = ("midlayer", "layers.0")  # a head's only one, in EAGLE's dialect and in that of speculators
PREFIX = re.compile(r"model\.")
HARMLESS = re.compile(r"t2d|((midlayer|layers\.0)\.self_attn\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
NORMS = {"": {}, "each": {"fc_norm": Place("fc_norm.{}.weight")}, "whole": {"fc_norm": Place("input_norm.weight", alone=True)}}
OUTER_PLACES = named("%s.weight", fc="fc", rms_final="norm", wcls="lm_head", tok_emb="embed_tokens")
LAYER_PLACES = {
    "rms_emb": Place("layers.{}.input_layernorm.weight"),
    "rms_hidden": Place("layers.{}.hidden_norm.weight"),
    **{name: place for name, place in hf.PLACES.items() if "{}" in place.name and name != "rms_att"},
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
    "quantization": (None,),
}


def is_one(given: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head."""
    names = given.get("architectures")
    is_said = any(given.get(key) is not None for key in (SPECULATORS, EAGLE, ROWS))
    return is_said or (isinstance(names, list) and "eagle3" in str(names).lower())


def places(config: Config, tensors: Tensors) -> dict[str, Place]:
    """Of its tensors, in the dialect that the folder has."""
    assert config.head
    layer = LAYERS[not any(name.startswith(LAYERS[0]) for name in tensors)]
    own = {name: place._replace(name=place.name.replace("layers.{}", layer)) for name, place in LAYER_PLACES.items()}
    return OUTER_PLACES | NORMS[config.head.fc_norm] | own


def ids(config: Config, tensors: Tensors) -> str:
    """The tensor that tells by how much the id of each row is more than the row's number; "" of rows of all ids."""
    return IDS if IDS in tensors else ""


def config(path: Path, given: Mapping[str, Any], tensors: Tensors) -> Config:
    """The numbers of a head's config.json; what is not in the folder is the target's."""
    said = Values(path, given)
    eagle, own_layer_keys = said.object(EAGLE), said.object(LAYER) if SPECULATORS in given else given
    own = Values(path, {**given, **eagle}, {ROWS: 32000} if SPECULATORS in given else {})
    if SPECULATORS in given:
        own.must_be(SPECULATORS, "eagle3")
    layer = _layer(path, own_layer_keys, [*OF_LAYER][SPECULATORS in given])
    check_neutral(own, NEUTRAL)
    flags = {key: own.flag(key, False) for key in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise own.refusal("fc_norm", "false beside norm_before_fc, which norms the same numbers")
    own_layer = OF_LAYER[layer["model_type"]].config(layer)
    head = HeadConfig(
        target_dim=own.whole(TARGET_DIM, own_layer.dim),
        layers=_layers(path, given, eagle),
        n_rows=own.whole(ROWS, own_layer.vocab_size),
        own_embedding=EMBEDDING in tensors,
        own_classifier=HEAD in tensors,
        norm_before_residual=flags["norm_before_residual"],
        fc_norm="whole" if flags["norm_before_fc"] else "each" if flags["fc_norm"] else "",
        norm_output=flags["norm_output"],
        made_for=_made_for(given),
    )
    if own_layer.shared_classifier and head.own_embedding and not head.own_classifier:
        raise layer.refusal("tie_word_embeddings", "false: a head without a classifier takes the target's")
    attention = replace(own_layer.attention, qkv_bias=own_layer.attention.qkv_bias or flags["qkv_bias"])
    return replace(own_layer, architecture="eagle3", shared_classifier=False, attention=attention, head=head)


def _layer(path: Path, given: Mapping[str, Any], silent: str) -> Values:
    """The keys of a head's layer, which is one of `OF_LAYER`; silent: which, where they tell none."""
    family = given.get("model_type", silent)
    if not isinstance(family, str) or family not in OF_LAYER:
        raise CheckpointError(f"{path}: the head's layer is that of {shown(family)}; there are {', '.join(OF_LAYER)}")
    layer = Values(path, given, dict(OF_LAYER[family].defaults) | {"model_type": family, "num_hidden_layers": 1})
    check_neutral(layer, hf.NEUTRAL)
    layer.must_be("num_hidden_layers", 1)
    return layer


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


def gguf_config(k: Keys) -> Config:
    """The numbers that the keys say; a classifier or an embedding that is not there is the target's, and nothing adds a bias."""
    k.must_be("block_count", 1)
    layers = next((key for key in TARGET_LAYERS if key in k), TARGET_LAYERS[0])
    if not are_layers(k[layers]):
        raise k.refusal(layers, "layers of the target, each once")
    sized = next((name for name in (IDS, gguf.HEAD) if name in k.tensors), "")
    head = HeadConfig(
        target_dim=k.whole("target_hidden_size"),
        layers=tuple(k[layers]),
        n_rows=k.tensors.shape(sized)[0] if sized else k.common["vocab_size"],
        own_embedding=gguf.EMBEDDING in k.tensors,
        own_classifier=gguf.HEAD in k.tensors,
        norm_before_residual=k.flag("norm_before_residual", False),
        fc_norm="whole" if k.flag("norm_before_fc", False) else "",
    )
    return Config(**gguf.numbers(k, has_biases=False), architecture="eagle3", head=head)


FAMILY = (
    InGguf("eagle3", gguf_config, GGUF_PLACES, is_head=True, ids=IDS),
    HeadInFolder(is_one, config, places, ids, are_offsets=True, prefix=PREFIX, harmless=HARMLESS),
)
