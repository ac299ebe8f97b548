"""gpt-oss (OpenAI 2025, arXiv:2508.10925): experts with biases and a clamped gate, sinks, windows in every other layer, YaRN."""

from dataclasses import replace

from specdec.config import LEAST_SCALE, AttentionConfig, Config, YarnScaling
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.tensor_specs import EVEN, ODD, OF_EXPERTS, Place, named

ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "layer_types": None, "rope_theta": 150000.0,
}  # fmt: skip
GGUF_LIMIT, GGUF_ALPHA = 7.0, 1.702  # of which a file does not tell
EXPERT = "layers.{}.mlp.experts."
PLACES = hf.PLACES | {
    "sinks": Place("layers.{}.self_attn.sinks"),
    "router": Place("layers.{}.mlp.router.weight"),
    "router_b": Place("layers.{}.mlp.router.bias"),
    "experts_w1": Place(EXPERT + "gate_up_proj", conv=True, each=True, step=(0, 2)),
    "experts_w2": Place(EXPERT + "down_proj", conv=True, each=True),
    "experts_w3": Place(EXPERT + "gate_up_proj", conv=True, each=True, step=(1, 2)),
    "experts_b1": Place(EXPERT + "gate_up_proj_bias", made=EVEN),
    "experts_b2": Place(EXPERT + "down_proj_bias"),
    "experts_b3": Place(EXPERT + "gate_up_proj_bias", made=ODD),
}
BLOCKS = {  # as published, not as transformers saves what it has in memory
    name: place._replace(name=f"{place.name}_blocks", conv=False, scales=f"{place.name}_scales")
    for name, place in PLACES.items()
    if name in OF_EXPERTS
}
GGUF_PLACES = gguf.PLACES | gguf.EXPERTS_PLACES | {
    **named(gguf.OF_LAYERS, rms_ffn="post_attention_norm", sinks="attn_sinks"),
    **named(
        gguf.BIASES, router_b="ffn_gate_inp", experts_b1="ffn_gate_exps", experts_b2="ffn_down_exps", experts_b3="ffn_up_exps"
    ),
}  # fmt: skip


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    quantization = values["quantization_config"]
    if quantization is not None and (not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4"):
        raise values.refusal("quantization_config", "none, or one whose quant_method is mxfp4")
    n_layers = values.whole("num_hidden_layers", most=hf.MOST_LAYERS)
    full = hf.full_layers(values, n_layers, 2)
    experts = hf.experts(
        values, "intermediate_size", "num_local_experts",
        limit=values.real("swiglu_limit", LEAST_SCALE, 1 / LEAST_SCALE), alpha=values.real("swiglu_alpha", 0, 1 / LEAST_SCALE),
    )  # fmt: skip
    window = values.whole("sliding_window") if len(full) < n_layers else 0
    values.must_be("mlp_bias", False)
    attention = hf.attention(values, hf.rope(values, hf.rope_values(values, ROPE)), sinks=True, window=window)
    layers = hf.unwindowed(attention, full, n_layers)
    return Config(**hf.numbers(values), attention=attention, layers=layers, experts=experts)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say. YaRN fades from pair to pair, as in folders: llama.cpp rounds to whole ones."""
    sizes, n_layers = gguf.numbers(k, sinks=True, window=k.whole(gguf.WINDOW)), k.common["n_layers"]
    attention: AttentionConfig = sizes["attention"]
    if isinstance(yarn := attention.rope.scaling, YarnScaling):
        attention = replace(attention, rope=replace(attention.rope, scaling=replace(yarn, in_whole_pairs=False)))
    sizes |= {"experts": gguf.experts(k, limit=GGUF_LIMIT, alpha=GGUF_ALPHA), "attention": attention}
    return Config(**sizes, layers=hf.unwindowed(attention, range(1, n_layers, 2), n_layers))


FAMILY = (
    InFolder("gpt_oss", DEFAULTS, config, PLACES, (BLOCKS,), does=("num_local_experts", "quantization_config")),
    InGguf("gpt-oss", gguf_config, GGUF_PLACES, does=(gguf.EXPERTS, gguf.WINDOW, gguf.GATING)),
)
