"""Granite 3 and 4, which scale embeddings, residuals, scores and logits, with experts and without; of hybrids those whose layers
are all attention.
"""

from typing import Any

from specdec.config import LEAST_SCALE, Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.tensor_specs import EXPERTS_GATED, GATED, SHARED_GATED, Place, together

SCALES = {
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier", "logit_divisor": "logits_scaling",
}  # fmt: skip
OF_SCORES, GGUF_OF_SCORES = "attention_multiplier", "attention.scale"
GGUF_SCALES = {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "logit_divisor": "logit_scale"}
DOES, GGUF_DOES = (*SCALES.values(), OF_SCORES), (*GGUF_SCALES.values(), GGUF_OF_SCORES)
DEFAULTS = hf.DEFAULTS | dict.fromkeys(DOES, 1.0)
HYBRID_DEFAULTS = DEFAULTS | {
    "num_local_experts": 8, "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0}
ATTENTION = (hf.FULL, "attention")  # as transformers 5 and 4 name it
SHARED_IN, SHARED_OUT = (hf.OF_LAYERS % f"shared_mlp.{name}_linear" for name in ("input", "output"))
SHARED_MLP = together(GATED, SHARED_IN) | {"w2": Place(SHARED_OUT)}  # of a hybrid, whose other experts a dense model has not
EXPERTS = {
    "router": Place("layers.{}.block_sparse_moe.router.layer.weight"),
    **together(EXPERTS_GATED, "layers.{}.block_sparse_moe.input_linear.weight", each=True),
    "experts_w2": Place("layers.{}.block_sparse_moe.output_linear.weight", each=True),
    **together(SHARED_GATED, SHARED_IN),
    "shared_w2": Place(SHARED_OUT),
}


def scaled(values: Values, **own: Any) -> dict[str, Any]:
    """Llama's numbers, and what scales embeddings, residuals, logits and scores; own: what else attention does."""
    scales = {name: values.real(key, LEAST_SCALE, 1 / LEAST_SCALE) for name, key in SCALES.items()}
    attention = hf.attention(values, scale=values.real(OF_SCORES, LEAST_SCALE, 1 / LEAST_SCALE), **own)
    return hf.numbers(values) | scales | {"attention": attention}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    hf.no_window(values)
    hf.all_are(hf.FULL, values)
    return Config(**scaled(values), mlp_bias=values.flag("mlp_bias"))


def moe_config(values: Values) -> Config:
    """The same with experts, and one that all tokens go through where its width is not 0."""
    shared = values.whole("shared_intermediate_size") if values["shared_intermediate_size"] != 0 else 0
    experts = hf.experts(values, "intermediate_size", "num_local_experts", shared_dim=shared)
    hf.no_window(values)
    values.must_be("mlp_bias", False)
    return Config(**scaled(values), experts=experts)


def hybrid_config(values: Values) -> Config:
    """The same of a hybrid. Raises CheckpointError for layers of Mamba, and for experts."""
    n_layers = values.whole("num_hidden_layers", most=hf.MOST_LAYERS)
    values.must_be("num_local_experts", 0)
    values.of_layers("layer_types", n_layers, ATTENTION, "attention (others are not supported)")
    values.must_be("position_embedding_type", "rope", "nope", None)
    hf.no_window(values)
    values.must_be("mlp_bias", False)
    is_turned = values["position_embedding_type"] == "rope"
    return Config(**scaled(values, is_turned=is_turned) | {"hidden_dim": values.whole("shared_intermediate_size")})


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say; 0 stands for no scale, too."""

    def scale(key: str, otherwise: float) -> float:
        return k.real(key, LEAST_SCALE, 1 / LEAST_SCALE) if k[key] not in (None, 0) else otherwise

    is_turned = k.flag("rope.scaling.finetuned", True)
    scales = {ours: scale(key, 1.0) for ours, key in GGUF_SCALES.items()}
    return Config(**gguf.numbers(k, scale=scale(GGUF_OF_SCORES, 0.0), is_turned=is_turned) | scales)


MOE_PLACES, MOE_DOES = hf.PLACES | EXPERTS, (*DOES, "num_local_experts")
FAMILY = (
    InFolder("granite", DEFAULTS, config, hf.PLACES, does=DOES),
    InFolder("granitemoe", MOE_DEFAULTS, moe_config, MOE_PLACES, does=MOE_DOES),
    InFolder("granitemoeshared", MOE_DEFAULTS, moe_config, MOE_PLACES, does=MOE_DOES),
    InFolder("granitemoehybrid", HYBRID_DEFAULTS, hybrid_config, hf.PLACES, instead=(SHARED_MLP,), does=MOE_DOES),
    InGguf("granite", gguf_config, gguf.PAIRS_PLACES, does=GGUF_DOES),
    InGguf("granitemoe", gguf_config, gguf.PAIRS_PLACES | gguf.EXPERTS_PLACES, does=(*GGUF_DOES, gguf.EXPERTS)),
)
