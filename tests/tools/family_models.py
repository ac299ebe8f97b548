"""Random models of each family and architecture."""

import functools
from typing import Any

import numpy as np

from specdec.families.nemotron_h import make_layers
from specdec.loaders import load_checkpoint
from specdec.mixer_config import Mamba2Config, ShortConvConfig
from specdec.model import get_architecture
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.model_config import (
    ExpertsConfig,
    LatentAttentionConfig,
    Llama3RopeScaling,
    ModelConfig,
    PerLayerInputsConfig,
    YarnRopeScaling,
)
from specdec.quant import FP32
from tests.tools.configs import GPT2, make_config, override_full_layers
from tests.tools.hf_folders import FIXTURES

LLAMA_3 = Llama3RopeScaling(8.0, 1.0, 4.0, 40)  # so few positions that all three kinds of pairs occur


LONGROPE = {
    "rope_dim": 8,
    "rope_divisors": (1.0, 1.2, 1.4, 1.6),
    "long_freq_factors": (1.0, 3.0, 5.0, 7.0),
    "longrope_threshold": 20,
}


YARN = {"rope_theta": 100.0, "rope_scaling": YarnRopeScaling(4.0, 19, 2.0), "query_scale": 0.7, "query_span": 19}


ALL = {"wo_bias": True, "qkv_bias": True, "mlp_bias": True, "qk_norm": True}


GEMMA = {"norm_placement": "around", "activation": "gelu", "qk_norm": True, "rope_theta": 100.0, "embedding_scale": 6.3}


GEMMA_LAYERS = override_full_layers((2,), 4, rope_theta=1e6, rope_divisors=(8.0,) * 12)


def make_gemma4_fields(
    dim: int, kinds: str, n_shared: int, head_dim: int, window: int, n_turned: int, hidden_dim: int | None = None, **own: Any
) -> dict[str, Any]:
    """Return the fields of a Gemma 4.

    kinds has a letter for each layer: w, windowed, or a, full attention. head_dim, n_turned (rotated pairs) and own are those of
    full-attention layers. hidden_dim is that of layers that read keys and values of others.
    """
    divisors = (1.0,) * n_turned + (float(np.float32(1e30)),) * (head_dim // 2 - n_turned)
    full_layer = {"head_dim": head_dim, "window": 0, "rope_theta": 1e4, "rope_divisors": divisors, **own}
    layers = [full_layer if layer_kind == "a" else {} for layer_kind in kinds]
    first_shared = len(kinds) - n_shared
    for i in range(first_shared, len(kinds)):
        layers[i] = layers[i] | {"kv_layer": kinds.rindex(kinds[i], 0, first_shared), "hidden_dim": hidden_dim}
    return {
        "norm_placement": "around", "activation": "gelu", "norm_eps": 1e-6, "rope_theta": 100.0, "qk_norm": True,
        "value_norm": True, "embedding_scale": float(np.sqrt(np.float32(dim))), "attention_scale": 1.0, "layer_scale": True,
        "window": window, "layers": tuple(layers),
    }  # fmt: skip


# dim, hidden, layers, heads, kv heads, vocab, seq_len
FAMILIES = {
    "llama 3": make_config(40, 50, 2, 4, 2, 105, 400, head_dim=12, rope_theta=5e5, rope_scaling=LLAMA_3, norm_eps=1e-6),
    "llama with biases": make_config(36, 33, 2, 3, 1, 105, 400, wo_bias=True, qkv_bias=True, mlp_bias=True),
    "mistral": make_config(64, 96, 2, 4, 2, 105, 400, shared_classifier=False, head_dim=8, window=19),
    "qwen2": make_config(96, 64, 2, 6, 2, 105, 400, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    "qwen3": make_config(64, 96, 2, 2, 1, 105, 400, head_dim=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
    "qwen3, heads across strips": make_config(64, 40, 2, 4, 2, 105, 400, head_dim=80, qk_norm=True),
    "qwen3, heads of 12": make_config(40, 50, 2, 5, 5, 105, 400, head_dim=12, qk_norm=True),
    "everything": make_config(40, 50, 2, 6, 3, 105, 400, False, head_dim=24, window=30, rope_scaling=LLAMA_3, **ALL),
    "gemma": make_config(40, 50, 4, 4, 2, 105, 400, head_dim=24, window=13, layers=GEMMA_LAYERS, **GEMMA),
    "gemma 2": make_config(
        40, 50, 3, 4, 2, 105, 400, head_dim=24, window=13, softcap=0.7, logit_softcap=2.0, layers=override_full_layers((1,), 3),
        **GEMMA | {"qk_norm": False},
    ),
    "phi 3": make_config(40, 50, 2, 4, 2, 105, 400, head_dim=12, rope_scale=1.2, **LONGROPE),
    "ministral 3": make_config(40, 50, 2, 4, 2, 105, 400, head_dim=20, rope_scale=1.1, **YARN),
    "lfm2": make_config(64, 96, 3, 4, 2, 105, 400, qk_norm=True, conv=((0, 2), ShortConvConfig())),
    "lfm2, odd": make_config(
        40, 50, 3, 5, 1, 105, 400, False, norm_eps=1e-6, head_dim=12, qk_norm=True, conv=((1,), ShortConvConfig(4, True))
    ),
    "mamba 2": make_config(64, 96, 3, 4, 2, 105, 400, mamba=((0, 2), Mamba2Config(8, 32, 2, 16))),
    "mamba 2, odd": make_config(
        40, 50, 4, 5, 1, 105, 400, False, norm_eps=1e-6, head_dim=12, mamba=((0, 1, 3), Mamba2Config(6, 35, 3, 7, 3, False))
    ),
    "mamba 2 next to attention": make_config(
        40, 50, 2, 5, 1, 105, 400, False, head_dim=12, projection_scales=(1.3, 0.8, 1.2), mlp_scales=(0.7, 1.4),
        mamba=((0, 1), Mamba2Config(6, 20, 2, 9, 4, True, False, True, (0.8, 1.2, 0.9, 1.1, 0.7), 1.3)),
    ),
    "mamba 2 with a norm next to attention": make_config(
        64, 96, 2, 4, 2, 105, 400, qk_norm=True, mlp_bias=True, mlp_scales=(1.2, 0.9),
        mamba=((0, 1), Mamba2Config(4, 16, 1, 32, 4, True, True, True, (), 0.8)),
    ),
    "one block a layer": make_config(
        40, 50, 5, 5, 1, 105, 400, False, head_dim=12, activation="relu2", has_rope=False,
        layers=make_layers(("linear_attention", "moe", "full_attention", "mlp", "moe"), Mamba2Config(3, 35, 1, 20)),
        experts=ExpertsConfig(5, 2, 30, True, (0, 2, 3), True, True, shared_hidden_dim=35, sum_eps=0.5),
    ),
    "olmo2": make_config(40, 50, 2, 4, 2, 105, 400, False, norm_placement="behind", qk_norm="whole"),
    "all norms of the whole": make_config(40, 50, 2, 5, 1, 105, 400, head_dim=12, norm_placement="around", qk_norm="whole",
    qkv_bias=True),
    "experts of softmaxes with a bias": make_config(
        40, 50, 2, 4, 2, 105, 400, experts=ExpertsConfig(6, 3, 20, True, has_selection_bias=True, shared_hidden_dim=9)
    ),
    "experts of a sparse mixer": make_config(
        40, 50, 2, 4, 2, 105, 400, experts=ExpertsConfig(7, 2, 20, sparsemixer_threshold=0.6)
    ),
    "layer norms": make_config(
        40, 50, 2, 4, 2, 105, 400, False, head_dim=12, rope_dim=4, qkv_bias=True, layer_norm=True, classifier_bias=True
    ),
    "layer norms, no gate": make_config(
        36, 33, 2, 3, 1, 105, 400, False, layer_norm=True, activation="relu2", mlp_bias=True, qkv_bias=True, wo_bias=True
    ),
    "sub-norms": make_config(40, 50, 2, 4, 2, 105, 400, activation="gated_relu2", sub_norms=True),
    "xielu": make_config(36, 33, 3, 3, 1, 105, 400, False, activation="xielu", qk_norm=True),
    "xielu with biases": make_config(
        40, 50, 2, 4, 2, 105, 400, activation="xielu", mlp_bias=True, norm_placement="around", wo_bias=True
    ),
    "layer norms, experts": make_config(
        36, 33, 2, 3, 1, 105, 400, layer_norm=True, experts=ExpertsConfig(5, 2, 20, dense_layers=(0,))
    ),
    "hunyuan": make_config(40, 50, 2, 4, 2, 105, 400, False, head_dim=12, qk_norm="rotated"),
    "exaone 4": make_config(
        40, 50, 3, 4, 2, 105, 400, False, norm_placement="behind", qk_norm=True, window=13,
        layers=override_full_layers((2,), 3, has_rope=False),
    ),
    "experts": make_config(40, 50, 3, 4, 2, 105, 400, False, experts=ExpertsConfig(5, 2, 30, False, (1,))),
    "experts, one shared": make_config(48, 1, 2, 4, 4, 105, 400, qk_norm="whole",
    experts=ExpertsConfig(8, 3, 20, shared_hidden_dim=35)),
    "gpt-oss": make_config(
        40, 50, 3, 6, 2, 105, 400, False, head_dim=12, window=17, layers=override_full_layers((1,), 3), qkv_bias=True,
        wo_bias=True,
        sinks=True, experts=ExpertsConfig(5, 3, 20, swiglu_limit=0.9, swiglu_alpha=1.702),
    ),
    "gemma 4": make_config(
        40, 50, 6, 4, 2, 105, 400, False, head_dim=12, per_layer_inputs=PerLayerInputsConfig(9, 110), logit_softcap=2.0,
        **make_gemma4_fields(40, "wawwaw", 3, 20, 13, 3, 70) | {"attention_scale": 0.2},  # others change the output by a last bit
    ),
    "gemma 4, experts": make_config(
        40, 50, 3, 4, 2, 105, 400, False, head_dim=12, per_layer_inputs=PerLayerInputsConfig(20, 105),
        experts=ExpertsConfig(5, 2, 30, has_parallel_mlp=True),
        **make_gemma4_fields(40, "waw", 1, 24, 13, 4, 70) | {"attention_scale": 0.2},
    ),
    "gemma 4, values that are keys": make_config(
        36, 50, 3, 6, 3, 105, 400, head_dim=8, **make_gemma4_fields(36, "waa", 1, 20, 19, 2, n_kv_heads=1, values_are_keys=True)
    ),
    "experts of sigmoids": make_config(
        40, 50, 3, 5, 1, 105, 400, False, head_dim=12, conv=((1,), ShortConvConfig(4, True)),
        experts=ExpertsConfig(4, 2, 24, True, (0,), True, True, 1.5, 17, True),
    ),
    "experts of sigmoids, as they are": make_config(40, 1, 1, 5, 1, 105, 400, experts=ExpertsConfig(3, 3, 33, False, (), True)),
    "latent attention": make_config(
        48, 50, 3, 5, 1, 105, 400, False, head_dim=38, rope_dim=14, attention_scale=0.2,
        latent=LatentAttentionConfig(40, 24, 14, 21, 44),
        experts=ExpertsConfig(
            12, 3, 20, True, (0,), True, True, 1.8, shared_hidden_dim=25, n_groups=4, n_groups_used=2, sum_eps=1e-20
        ),
    ),
    "latent attention of whole panels": make_config(
        40, 50, 2, 9, 1, 105, 400, False, head_dim=24, rope_dim=8, rope_theta=100.0, rope_scaling=YarnRopeScaling(4.0, 19, 2.0),
        latent=LatentAttentionConfig(64, 16, 8, 32),
        experts=ExpertsConfig(6, 2, 20, False, (), n_groups=3, n_groups_used=1, routed_scaling_factor=1.5),
    ),
    "gpt2": make_config(48, 96, 2, 4, 4, 105, 400, **GPT2),
    "gpt2, odd": make_config(40, 50, 2, 5, 5, 64, 400, False, norm_eps=1e-6, **GPT2),
}  # fmt: skip


def random_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = get_architecture(config).shapes(config)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 5 for name, shape in shapes.items()}
    tensors |= {name: -np.abs(tensors[name]) for name in shapes if name.endswith("rate")}
    norms = [name for name in shapes if name.startswith(("rms", "ln")) or name.endswith("norm")]
    return tensors | {name: tensors[name] + 1 for name in norms if not name.endswith("bias")}


def make_model(config: ModelConfig, n_threads: int = 1, weight_format=FP32, n_positions: int | None = None) -> Model:
    weights = get_architecture(config).plan_weights(config, random_tensors(config), weight_format).pack()
    return Model(config, weights, n_threads, n_positions)


def make_cache(config: ModelConfig, n_threads: int = 1, weight_format=FP32) -> KVCache:
    return make_model(config, n_threads, weight_format).new_cache()


@functools.cache
def load_fixture_weights(name, weight_format=None):
    checkpoint = load_checkpoint(FIXTURES / name)
    return checkpoint.config, get_architecture(checkpoint.config).plan_weights(
        checkpoint.config, checkpoint.tensors, weight_format
    ).pack()


def load_fixture_model(name, n_threads=1, weight_format=None, kv="auto") -> Model:
    """Return the model of a fixture with memory for 3000 positions, if it has as many."""
    return Model(*load_fixture_weights(name, weight_format), n_threads, 3000, kv=kv)


LATENT = ["latent attention", "latent attention of whole panels"]


POISON = 7  # token with values that are not finite somewhere inside
