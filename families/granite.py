"""Granite 3 and 4, which scale embeddings, residuals, scores and logits, with experts and without; of hybrids those whose layers
are all attention.
"""

from typing import Any

from ..architectures import Config
from ..architectures.config import LEAST_SCALE
from . import folders, ggufs
from .family import Family, InFolder, InGguf, Keys
from .places import EXPERTS_GATED, GATED, SHARED_GATED, Place
from .values import Values

SCALES = {
    "embedding_scale": "embedding_multiplier", "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier", "logit_divisor": "logits_scaling",
}  # fmt: skip
GGUF_SCALES = {
    "embedding_scale": "embedding_scale", "attention_scale": "attention.scale", "residual_scale": "residual_scale",
    "logit_divisor": "logit_scale",
}  # fmt: skip
DEFAULTS = folders.DEFAULTS | dict.fromkeys(SCALES.values(), 1.0)
HYBRID_DEFAULTS = DEFAULTS | {
    "num_local_experts": 8, "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0}
ATTENTION = (folders.FULL, "attention")  # as transformers 5 and 4 name it
SHARED_MLP = {  # of a hybrid, whose other experts a dense model has not
    **dict.fromkeys(GATED, Place("layers.{}.shared_mlp.input_linear.weight", among=GATED)),
    "w2": Place("layers.{}.shared_mlp.output_linear.weight"),
}


EXPERTS = {
    "router": Place("layers.{}.block_sparse_moe.router.layer.weight"),
    **dict.fromkeys(EXPERTS_GATED, Place("layers.{}.block_sparse_moe.input_linear.weight", among=EXPERTS_GATED, each=True)),
    "experts_w2": Place("layers.{}.block_sparse_moe.output_linear.weight", each=True),
    **dict.fromkeys(SHARED_GATED, Place("layers.{}.shared_mlp.input_linear.weight", among=SHARED_GATED)),
    "shared_w2": Place("layers.{}.shared_mlp.output_linear.weight"),
}


def scales(values: Values) -> dict[str, Any]:
    """What embeddings, scores, residuals and logits are scaled by."""
    return {name: values.real(key, LEAST_SCALE, 1 / LEAST_SCALE) for name, key in SCALES.items()}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    window = folders.no_window(values, "granite") | folders.only_full(values)
    return Config(
        **folders.numbers(values), **folders.rope(values), **window, **scales(values),
        **folders.biases(values),
    )  # fmt: skip


def moe_config(values: Values) -> Config:
    """The same with experts, and one that all tokens go through where its width is not 0."""
    shared = values.whole("shared_intermediate_size") if values["shared_intermediate_size"] != 0 else 0
    experts = folders.experts(values, "intermediate_size", "num_local_experts", shared_dim=shared)
    more = folders.no_window(values, "granitemoe") | folders.attention_biases(values) | scales(values)
    return Config(**folders.numbers(values), **folders.rope(values), **more, experts=experts)


def hybrid_config(values: Values) -> Config:
    """The same of a hybrid. Raises CheckpointError for layers of Mamba, and for experts."""
    n_layers = values.whole("num_hidden_layers", folders.MOST_LAYERS)
    values.must_be("num_local_experts", 0)
    values.of_layers("layer_types", n_layers, ATTENTION, "attention, as others are not done here,")
    values.must_be("position_embedding_type", "rope", "nope", None)
    is_turned = values["position_embedding_type"] == "rope"
    sizes = folders.numbers(values) | {"hidden_dim": values.whole("shared_intermediate_size")}
    more = folders.no_window(values, "granitemoehybrid") | folders.attention_biases(values) | scales(values)
    return Config(**sizes, **folders.rope(values), **more, is_turned=is_turned)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say; 0 stands for no scale, too."""
    more: dict[str, Any] = {
        ours: k.real(key, LEAST_SCALE, 1 / LEAST_SCALE) for ours, key in GGUF_SCALES.items() if k[key] not in (None, 0)
    }
    is_turned = k.flag("rope.scaling.finetuned", True)
    return Config(**ggufs.numbers(k), **more, is_turned=is_turned)


FAMILY = Family(
    (
        InFolder("granite", DEFAULTS, config, folders.PLACES, does=(*SCALES.values(),)),
        *(
            InFolder(name, MOE_DEFAULTS, moe_config, folders.PLACES | EXPERTS, does=(*SCALES.values(), "num_local_experts"))
            for name in ("granitemoe", "granitemoeshared")
        ),
        InFolder(
            "granitemoehybrid", HYBRID_DEFAULTS, hybrid_config, folders.PLACES, instead=(SHARED_MLP,),
            does=(*SCALES.values(), "num_local_experts"),
        ),
    ),
    (
        InGguf("granite", gguf_config, ggufs.PAIRS_PLACES, does=(*GGUF_SCALES.values(),)),
        InGguf(
            "granitemoe", gguf_config, ggufs.PAIRS_PLACES | ggufs.EXPERTS_PLACES, does=(*GGUF_SCALES.values(), ggufs.EXPERTS)
        ),
    ),
)  # fmt: skip
