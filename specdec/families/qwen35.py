"""Qwen3.5 (Qwen Team 2026): a gated delta net in most layers, in the others attention that is gated; a head that predicts more
tokens (MTP) comes along in the same files. Qwen3.5 and 3.6 with experts, of which one is every token's, are the same otherwise.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from specdec.config import Config, DeltaConfig, LayerConfig, of_some
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.hf_common import LINEAR
from specdec.families.tensor_specs import ONE_MORE, RATE, TAPS, TURNED_TAPS, Place, changed, named

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None, "partial_rotary_factor": 0.25,
    "layer_types": None, "full_attention_interval": 4, "attn_output_gate": True, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip
NORMS = ("q_norm", "k_norm", "rms_att", "rms_ffn", "rms_final")
PLACES = changed(hf.PLACES, NORMS, made=ONE_MORE) | {
    "wq": Place("layers.{}.self_attn.q_proj.weight", halves=True, turn=(0, 2)),
    "wg": Place("layers.{}.self_attn.q_proj.weight", turn=(1, 2)),
    **named(
        "layers.{}.linear_attn.%s.weight", delta_qkv="in_proj_qkv", delta_z="in_proj_z", delta_b="in_proj_b",
        delta_a="in_proj_a", delta_out="out_proj", delta_norm="norm",
    ),
    "conv": Place("layers.{}.linear_attn.conv1d.weight", made=TAPS),
    "rate": Place("layers.{}.linear_attn.A_log", made=RATE),
    "dt": Place("layers.{}.linear_attn.dt_bias"),
}  # fmt: skip
GGUF_PLACES = gguf.PLACES | {
    "wq": Place("blk.{}.attn_q.weight", halves=True, turn=(0, 2)),
    "wg": Place("blk.{}.attn_q.weight", turn=(1, 2)),
    **named(
        gguf.OF_LAYERS, rms_ffn="post_attention_norm", delta_qkv="attn_qkv", delta_z="attn_gate", delta_b="ssm_beta",
        delta_a="ssm_alpha", delta_out="ssm_out", delta_norm="ssm_norm",
    ),
    "conv": Place("blk.{}.ssm_conv1d.weight", made=TURNED_TAPS),
    "rate": Place("blk.{}.ssm_a"),
    "dt": Place("blk.{}.ssm_dt.bias"),
}  # fmt: skip
HARMLESS = re.compile(r"(visual|mtp)\..*")
LAYER = ("rms_att", "wq", "wk", "wv", "wg", "wo", "q_norm", "k_norm", "rms_ffn", "w1", "w2", "w3")  # of the head


def mtp_places(places: dict[str, Place], layer: Collection[str]) -> dict[str, Place]:
    """Of the head in a folder: its one layer, by names of a model's, and its own."""
    own = named("%s.weight", fc="fc", rms_emb="pre_fc_norm_embedding", rms_hidden="pre_fc_norm_hidden", rms_final="norm")
    own = {name: places[name] for name in layer} | changed(own, ("rms_emb", "rms_hidden", "rms_final"), made=ONE_MORE)
    return {name: place._replace(name=f"mtp.{place.name}") for name, place in own.items()}


def nextn_places(places: dict[str, Place], layer: Collection[str]) -> dict[str, Place]:
    """Of the head in a GGUF file."""
    own = named("blk.{}.nextn.%s.weight", fc="eh_proj", rms_emb="enorm", rms_hidden="hnorm", rms_final="shared_head_norm")
    return {name: places[name] for name in layer} | own


def config(values: Values) -> Config:
    """The numbers that a config.json says. Sections of pairs that turn by other positions in images turn by one in a text."""
    values.must_be("attn_output_gate", True)
    rope = hf.rope_values(values)
    rope.must_be("rope_type", "default")
    turned = hf.partial_rope(rope, values, values, rope)
    hf.no_window(values)
    hf.no_biases(values)
    n_layers = values.whole("num_hidden_layers", most=hf.MOST_LAYERS)
    full = hf.full_layers(values, n_layers, "full_attention_interval", LINEAR)
    layers = [i for i in range(n_layers) if i not in full]
    delta = DeltaConfig(
        n_key_heads=values.whole("linear_num_key_heads"),
        n_value_heads=values.whole("linear_num_value_heads"),
        key_dim=values.whole("linear_key_head_dim"),
        value_dim=values.whole("linear_value_head_dim"),
        n_taps=values.whole("linear_conv_kernel_dim"),
    )
    attention = hf.attention(values, turned, qk_norm=True, gate=True)
    return Config(**hf.numbers(values), attention=attention, layers=of_some(LayerConfig(mixer=delta), layers, n_layers))


def moe_config(values: Values, **more: Any) -> Config:
    """The same with experts; more: of what these do."""
    shared = values.whole("shared_expert_intermediate_size")
    more |= {"shared_dim": shared, "shared_gate": True}
    return replace(config(values), experts=hf.experts(values, "moe_intermediate_size", **more))


def gguf_config(k: Keys, in_turns: bool = True) -> Config:
    """The numbers that a GGUF file's keys say; in_turns: how heads of values lie that share one of keys."""
    n_layers, recurrent = k.common["n_layers"], "attention.recurrent_layers"
    interval = k.whole("full_attention_interval", 4)
    are, n = k[recurrent], n_layers + k.count(gguf.NEXTN)
    if are is None:
        are = [(i + 1) % interval != 0 for i in range(n_layers)]
    elif not isinstance(are, list) or len(are) not in (n_layers, n) or not all(type(each) is bool for each in are):
        raise k.refusal(recurrent, f"true or false for each of {n} layers")
    n_values, n_value_heads, n_key_heads = (k.whole(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "group_count"))
    if n_values % n_value_heads:
        raise k.refusal("ssm.inner_size", f"a multiple of {n_value_heads}, the heads")
    delta = DeltaConfig(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=k.whole("ssm.state_size"),
        value_dim=n_values // n_value_heads,
        n_taps=k.whole("ssm.conv_kernel"),
        in_turns=in_turns and n_key_heads != n_value_heads,
    )
    layers = of_some(LayerConfig(mixer=delta), [i for i in range(n_layers) if are[i]], n_layers)
    return Config(**gguf.numbers(k, is_partial=True, qk_norm=True, gate=True), layers=layers)


def moe_gguf_config(k: Keys, in_turns: bool = True) -> Config:
    """The same with experts."""
    return replace(gguf_config(k, in_turns), experts=gguf.experts(k, shared_gate=True))


MOE_PLACES, MOE_GGUF_PLACES = PLACES | hf.EXPERTS | hf.SHARED, GGUF_PLACES | gguf.EXPERTS_PLACES
MTP_EXPERTS_IN_ONE = {name: place._replace(name="mtp." + place.name) for name, place in hf.EXPERTS_IN_ONE.items()}
MOE_LAYER = (*[name for name in LAYER if name not in ("w1", "w2", "w3")], *hf.EXPERTS, *hf.SHARED)
FAMILY = (
    InFolder(
        "qwen3_5_text", DEFAULTS, config, PLACES, mtp=(mtp_places(PLACES, LAYER),), harmless=HARMLESS,
        does=("partial_rotary_factor",), beside={"qwen3_5": False},
    ),
    InFolder(
        "qwen3_5_moe_text", MOE_DEFAULTS, moe_config, MOE_PLACES, (hf.EXPERTS_IN_ONE,), harmless=HARMLESS,
        mtp=(mtp_places(MOE_PLACES, MOE_LAYER), MTP_EXPERTS_IN_ONE),
        does=("partial_rotary_factor", "num_experts"), beside={"qwen3_5_moe": False},
    ),
    InGguf("qwen35", gguf_config, GGUF_PLACES, mtp=(nextn_places(GGUF_PLACES, LAYER),), does=(gguf.NEXTN,)),
    InGguf(
        "qwen35moe", moe_gguf_config, MOE_GGUF_PLACES, (gguf.EXPERTS_IN_ONE,),
        mtp=(nextn_places(MOE_GGUF_PLACES, MOE_LAYER), gguf.EXPERTS_IN_ONE), does=(gguf.NEXTN, gguf.EXPERTS),
    ),
)  # fmt: skip
