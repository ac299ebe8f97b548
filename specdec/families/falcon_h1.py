"""Falcon-H1 (TII 2025, arXiv:2507.22448): Mamba-2 next to attention in every layer, with a multiplier for each projection.

The multipliers become factors of the projections' outputs, since most of them are linear. GGUF files have them in the weights.
"""

from collections.abc import Sequence
from typing import Any

from specdec.argument_checks import MIN_SCALE
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_SIZE, ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.recurrent_common import GGUF_MAMBA_TENSORS, make_mamba_specs, parse_gguf_mamba, parse_hf_mamba
from specdec.mixer_config import Mamba2Config
from specdec.model_config import LayerConfig, ModelConfig

MULTIPLIER_KEYS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
    "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
DEFAULTS = hf.DEFAULTS | dict.fromkeys(MULTIPLIER_KEYS, 1.0) | {
    "vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_norm_before_gate": True, "mamba_rms_norm": False, "projectors_bias": False,
}  # fmt: skip
HF_TENSORS = (
    hf.TENSORS
    | specs.make("%s.weight", rms_final="final_layernorm")
    | specs.make(
        hf.LAYER_WEIGHT, rms_ffn="pre_ff_layernorm", w1="feed_forward.gate_proj", w2="feed_forward.down_proj",
        w3="feed_forward.up_proj",
    )
    | make_mamba_specs("layers.{}.mamba.%s")
)  # fmt: skip
NORM = GGUF_MAMBA_TENSORS["mamba_norm"].name
# The name of rms_ffn has no suffix, in llama.cpp, too.
GGUF_TENSORS = gguf.TENSORS | GGUF_MAMBA_TENSORS | specs.make("blk.{}.%s", rms_ffn="ffn_norm")


def get_factors(values: ConfigValues, key: str, n: int) -> Sequence[float]:
    """Return the value of a key as a list of n factors, each 1 if the key is missing. Raises CheckpointError."""
    given = [1.0] * n if values[key] is None else values[key]
    is_list = isinstance(given, list) and all(type(each) in (int, float) for each in given)
    if not is_list or len(given) != n or not all(MIN_SCALE <= abs(each) <= 1 / MIN_SCALE for each in given):
        raise values.make_error(key, f"a list of {n} numbers from {MIN_SCALE:g} to {1 / MIN_SCALE:g}")
    return given


def parse_mamba(values: ConfigValues, scale: float, output_scale: float) -> Mamba2Config:
    """Return the `Mamba2Config` of a Falcon-H1 model from the keys of config.json.

    Args:
        values: The keys of config.json.
        scale: Factor of the layers' input.
        output_scale: Factor of the layers' output.

    Raises:
        CheckpointError: A value is not valid.
    """
    values.require("projectors_bias", False)
    if has_norm := values.get_bool("mamba_rms_norm"):
        values.require("mamba_norm_before_gate", False)
    inner_dim = values.get_int("mamba_d_ssm", min(values.get_int("mamba_expand") * values.get_int("hidden_size"), MAX_SIZE))
    scales = tuple(scale * each for each in get_factors(values, "ssm_multipliers", 5))
    return parse_hf_mamba(
        values, inner_dim, "mamba_d_ssm", has_norm=has_norm, is_parallel=True, scales=scales, output_scale=output_scale
    )


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Falcon-H1 model from the keys of config.json."""
    hf.reject_biases(values)
    scales = {key: values.get_scale(key) for key in MULTIPLIER_KEYS}
    before, behind = scales["attention_in_multiplier"], scales["attention_out_multiplier"]
    attention = hf.parse_attention(values, projection_scales=(before, before * scales["key_multiplier"], before * behind))
    mamba = parse_mamba(values, scales["ssm_in_multiplier"], scales["ssm_out_multiplier"])
    fields: dict[str, Any] = hf.parse_base_fields(values)
    return ModelConfig(
        **fields,
        attention=attention,
        mlp_scales=tuple(get_factors(values, "mlp_multipliers", 2)),
        layers=(LayerConfig(mixer=mamba),) * fields["n_layers"],
        embedding_scale=scales["embedding_multiplier"],
        logit_divisor=1 / scales["lm_head_multiplier"],
    )


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Falcon-H1 model from a GGUF file's metadata."""
    mamba = parse_gguf_mamba(metadata, 0, has_norm=NORM.format(0) in metadata.tensors, is_parallel=True)
    layers = (LayerConfig(mixer=mamba),) * metadata.common_fields["n_layers"]
    return ModelConfig(**gguf.parse_base_fields(metadata), layers=layers)


FAMILY = (
    HFFamily("falcon_h1", DEFAULTS, parse_config, HF_TENSORS, supported_keys=("embedding_multiplier",)),
    GGUFFamily("falcon-h1", parse_gguf_config, GGUF_TENSORS),
)
