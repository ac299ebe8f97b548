"""BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764; 2025, arXiv:2504.12285): Llama with ternary weights and two more norms a layer.

The published folder has four weights in a byte, and a scale for each matrix.
"""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 128256, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30, "num_attention_heads": 20,
    "num_key_value_heads": 5, "hidden_act": "relu2", "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001,
    "rope_theta": 500000.0,
}  # fmt: skip
HF_TENSORS = (
    hf.TENSORS
    | specs.make(hf.LAYER_WEIGHT, att_sub_norm="self_attn.attn_sub_norm", ffn_sub_norm="mlp.ffn_sub_norm")
    | {
        name: hf.TENSORS[name]._replace(scales_name=f"{hf.TENSORS[name].name}_scale")
        for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
    }
)
GGUF_TENSORS = gguf.TENSORS | specs.make(gguf.LAYER_WEIGHT, att_sub_norm="attn_sub_norm", ffn_sub_norm="ffn_sub_norm")
PACKED_FORMAT = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a BitNet model from the keys of config.json."""
    quantization = values["quantization_config"]
    if quantization is not None:
        is_packed = isinstance(quantization, dict) and all(quantization.get(key) == PACKED_FORMAT[key] for key in PACKED_FORMAT)
        if not is_packed or quantization.get("use_rms_norm"):
            phrase = ", ".join(f"{key} {value}" for key, value in PACKED_FORMAT.items())
            raise values.make_error("quantization_config", f"null, or an object with {phrase}")
    hf.reject_biases(values)
    fields = hf.parse_base_fields(values, choices=("relu2",))
    return ModelConfig(**fields, attention=hf.parse_attention(values), activation="gated_relu2", sub_norms=True)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a BitNet model from a GGUF file's metadata.

    Files do not name the activation. It is that of BitNet b1.58 2B-4T, as in transformers; llama.cpp applies SiLU.
    """
    fields = gguf.parse_base_fields(metadata, has_biases=False)
    return ModelConfig(**fields, activation="gated_relu2", sub_norms=True)


FAMILY = (
    HFFamily("bitnet", DEFAULTS, parse_config, HF_TENSORS, supported_keys=("quantization_config",)),
    GGUFFamily("bitnet", parse_gguf_config, GGUF_TENSORS),
)
