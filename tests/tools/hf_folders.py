"""Hugging Face folders for the tests: the fixtures of make_fixtures.py, and changed copies of them."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specdec.families.nemotron_h import make_layers
from specdec.loaders import Checkpoint, CheckpointError, load_checkpoint
from specdec.mixer_config import DeltaNetConfig, Mamba2Config, ShortConvConfig
from specdec.model_config import ExpertsConfig, LatentAttentionConfig, Llama3RopeScaling, PerLayerInputsConfig, YarnRopeScaling
from tests.tools.configs import make_config

FIXTURES = Path(__file__).parents[1] / "fixtures"
MXFP4_FIXTURE = "gpt_oss_mxfp4"  # a matmul of its blocks differs from one of the floats that transformers makes of them
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz") if path.parent.name != MXFP4_FIXTURE)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "I64": np.int64}
DELETED = sys.intern("<gone>")  # value, compared by identity, that deletes a key
GRANITE: dict[str, float] = {"embedding_scale": 1.5, "attention_scale": 0.3, "residual_scale": 0.7, "logit_divisor": 2}
SIGMOID: dict[str, Any] = {"dense_layers": (0,), "is_sigmoid": True, "has_selection_bias": True, "sum_eps": 1e-20}
LAGUNA = SIGMOID | {"sum_eps": 0.0}
MUSE: dict[str, Any] = {"norm_placement": "around", "embedding_norm": True, "qk_norm": "plain", "attention_gate": True}
NO_ROPE = {"has_rope": False}
PHI3_FACTORS = tuple(float(np.float32(factor)) for factor in (1, 1.15, 1.3, 1.45, 1.6, 1.75))
PHI3_LONG = {"long_freq_factors": (1.0, 3.5, 6.0, 8.5, 11.0, 13.5), "longrope_threshold": 64}
PHI3_SCALE = float(np.sqrt(np.float32(7) / np.float32(6)))  # sqrt(1 + log(128 / 64) / log(64))


Layers = tuple[dict[str, Any], ...]  # as `make_config` takes them


def override_layers(overrides: dict[str, Any], layers: Collection[int], n_layers: int) -> Layers:
    """Return overrides for the given layers of n_layers."""
    return tuple(overrides if i in layers else {} for i in range(n_layers)) if layers else ()


def override_full_layers(layers: Collection[int], n_layers: int, **more: Any) -> Layers:
    """Return overrides for full-attention layers."""
    return override_layers({"window": 0, **more}, layers, n_layers)


def make_gemma3_fields(
    dim: int, full: Collection[int], n_layers: int, theta: float = 1e4, divisors: tuple[float, ...] = ()
) -> dict[str, Any]:
    """Return the fields of a Gemma 3; theta: RoPE base of windowed layers, divisors: frequency factors of the others."""
    scale = float(np.sqrt(np.float32(dim)))
    return {
        "norm_placement": "around", "activation": "gelu", "norm_eps": 1e-6, "rope_theta": theta, "qk_norm": True,
        "embedding_scale": scale,
        "layers": make_gemma3_layers(full, n_layers, divisors),
    }  # fmt: skip


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


def make_gemma3_layers(full: Collection[int], n_layers: int, divisors: tuple[float, ...] = ()) -> Layers:
    """Return the layers of a Gemma 3 with some full-attention layers."""
    return override_full_layers(full, n_layers, rope_theta=1e6, rope_divisors=divisors)


def make_muse_layers(windows: Collection[int], rotated: Collection[int]) -> Layers:
    """Return the layers of a Muse Glimmer, given their windows and which of them have RoPE."""
    return tuple({"window": window, "has_rope": i in rotated} for i, window in enumerate(windows))


def make_laguna_layers(heads: Collection[int], window: int = 0) -> Layers:
    """Return the layers of a Laguna, given their numbers of query heads; all but each fourth may have a window."""
    sliding = {"window": window, "rope_theta": 50, "rope_dim": 0, "rope_scaling": None} if window else {"window": 0}
    return tuple({"n_heads": n, **({"window": 0} if i % 4 == 0 else sliding)} for i, n in enumerate(heads))


CONFIGS = {
    "llama": make_config(20, 37, 2, 2, 2, 65, 128, False, norm_eps=1e-6),
    "llama_tied": make_config(32, 48, 2, 4, 2, 72, 128, True, norm_eps=1e-6),
    "llama_biases": make_config(24, 40, 2, 3, 1, 64, 128, False, norm_eps=1e-6, qkv_bias=True, wo_bias=True, mlp_bias=True),
    "llama3": make_config(
        32, 48, 2, 4, 2, 70, 128, True, norm_eps=1e-6, rope_theta=5e5, head_dim=16, rope_scaling=Llama3RopeScaling(8, 1, 4, 64)
    ),
    "mistral": make_config(32, 40, 3, 4, 2, 64, 128, False, norm_eps=1e-6, window=12),
    "qwen2": make_config(32, 48, 2, 4, 2, 80, 128, True, norm_eps=1e-6, qkv_bias=True),
    "qwen2_window": make_config(24, 30, 2, 2, 1, 64, 128, False, norm_eps=1e-6, qkv_bias=True, window=17),
    "qwen3": make_config(32, 48, 2, 4, 2, 66, 128, False, norm_eps=1e-6, head_dim=12, qk_norm=True),
    "gpt2": make_config(18, 72, 2, 3, 3, 71, 64, True, "gpt2"),
    "gpt2_base": make_config(32, 50, 2, 4, 4, 64, 96, True, "gpt2"),
    "granite": make_config(24, 45, 3, 4, 2, 68, 128, True, norm_eps=1e-6, **GRANITE),
    "granite_biases": make_config(
        20,
        30,
        2,
        2,
        1,
        70,
        128,
        False,
        norm_eps=1e-6,
        qkv_bias=True,
        wo_bias=True,
        mlp_bias=True,
        attention_scale=1,
        logit_divisor=0.5,
    ),
    "granite_hybrid": make_config(32, 36, 2, 4, 2, 64, 128, False, norm_eps=1e-6, **GRANITE),
    "smollm3": make_config(
        24, 40, 5, 3, 1, 72, 128, True, norm_eps=1e-6, rope_theta=2e6, layers=override_layers(NO_ROPE, (3,), 5)
    ),
    "smollm3_layers": make_config(
        36,
        30,
        2,
        2,
        2,
        65,
        128,
        False,
        norm_eps=1e-6,
        rope_theta=2e6,
        qkv_bias=True,
        wo_bias=True,
        layers=override_layers(NO_ROPE, (0,), 2),
    ),
    "phi3": make_config(32, 44, 2, 2, 1, 68, 128, rope_dim=12, rope_divisors=PHI3_FACTORS, rope_scale=PHI3_SCALE, **PHI3_LONG),
    "phi3_plain": make_config(20, 30, 2, 2, 2, 65, 128, False, window=9),
    "phi3_factor": make_config(
        40,
        37,
        2,
        4,
        2,
        70,
        128,
        False,
        rope_dim=4,
        rope_divisors=PHI3_FACTORS[:2],
        rope_scale=float(np.float32(1.3)),
        long_freq_factors=(1.0, 3.5),
        longrope_threshold=64,
    ),
    "ministral3": make_config(
        28,
        44,
        2,
        4,
        2,
        70,
        128,
        False,
        rope_theta=100,
        head_dim=16,
        rope_scaling=YarnRopeScaling(4, 16, beta_fast=2),
        query_scale=float(np.float32(0.1)),
        query_span=16,
    ),
    "ministral3_vision": make_config(
        24,
        37,
        2,
        3,
        1,
        66,
        160,
        True,
        rope_theta=100,
        head_dim=20,
        rope_scaling=YarnRopeScaling(8, 20, 4, 0.5, truncate=False),
        rope_scale=float(np.float32(1 + 0.1 * math.log(8))),
        query_scale=float(np.float32(0.4)),
        query_span=20,
    ),
    "ministral3_scale": make_config(
        20,
        30,
        2,
        2,
        2,
        64,
        128,
        False,
        rope_theta=100,
        head_dim=12,
        rope_scaling=YarnRopeScaling(2, 7),
        rope_scale=float(np.float32(1.2)),
        query_scale=1.5,
        query_span=7,
    ),
    "phi3_long": make_config(
        24,
        40,
        2,
        2,
        1,
        66,
        128,
        False,
        rope_dim=6,
        rope_divisors=PHI3_FACTORS[:3],
        rope_scale=float(np.float32(math.sqrt(1 + math.log(128 / 17) / math.log(17)))),
        long_freq_factors=(1.0, 3.5, 6.0),
        longrope_threshold=17,
    ),
    "gemma3": make_config(18, 21, 7, 3, 1, 70, 128, head_dim=6, window=9, **make_gemma3_fields(18, (5,), 7)),
    "gemma3_scaled": make_config(
        20,
        26,
        4,
        2,
        1,
        65,
        128,
        False,
        head_dim=14,
        window=17,
        attention_scale=float(np.float32(11**-0.5)),
        **make_gemma3_fields(20, (0, 3), 4, 500.0, (8.0,) * 7),
    ),
    "gemma3_half": make_config(22, 30, 5, 2, 2, 77, 128, head_dim=8, window=5, **make_gemma3_fields(22, (2,), 5)),
    "lfm2": make_config(32, 48, 4, 4, 2, 68, 128, True, rope_theta=1e6, qk_norm=True, conv=((0, 1, 3), ShortConvConfig())),
    "lfm2_biases": make_config(
        20, 37, 3, 2, 1, 65, 128, False, rope_theta=1e6, qk_norm=True, conv=((1,), ShortConvConfig(4, True))
    ),
    "lfm2_odd": make_config(
        36, 55, 3, 3, 3, 70, 128, False, norm_eps=1e-6, rope_theta=1e4, qk_norm=True, conv=((0, 2), ShortConvConfig(2))
    ),
}
CONFIGS |= {
    "qwen35": make_config(
        32, 48, 4, 2, 1, 70, 128, True, norm_eps=1e-6, head_dim=16, rope_dim=4, qk_norm=True, attention_gate=True,
        delta=((0, 1, 2), DeltaNetConfig(2, 4, 8, 16)),
    ),
    "qwen35_odd": make_config(
        36, 40, 3, 3, 1, 65, 128, False, norm_eps=1e-6, rope_theta=1e5, head_dim=20, rope_dim=10, qk_norm=True,
        attention_gate=True, delta=((1,), DeltaNetConfig(3, 3, 7, 5, 3)),
    ),
    "qwen35_images": make_config(
        64, 40, 2, 2, 2, 72, 128, True, norm_eps=1e-6, rope_theta=1e7, head_dim=32, rope_dim=8, qk_norm=True,
        attention_gate=True, delta=((0,), DeltaNetConfig(1, 2, 32, 40)),
    ),
    "qwen2_layers": make_config(
        24, 30, 3, 2, 1, 66, 128, False, norm_eps=1e-6, qkv_bias=True, window=9, rope_divisors=(4.0,) * 6,
        layers=override_full_layers((0,), 3),
    ),
    "qwen3_moe": make_config(
        32, 40, 3, 4, 2, 70, 128, False, norm_eps=1e-6, head_dim=12, qk_norm=True,
        experts=ExpertsConfig(6, 2, 20, True, (1,)),
    ),
    "mixtral": make_config(24, 36, 2, 3, 1, 66, 128, False, norm_eps=1e-5, rope_theta=1e6, experts=ExpertsConfig(5, 3, 36)),
    "olmo2": make_config(40, 36, 3, 5, 1, 69, 128, False, norm_placement="behind", qk_norm="whole"),
    "olmoe": make_config(36, 20, 2, 3, 1, 67, 128, False, qk_norm="whole", experts=ExpertsConfig(7, 3, 20, False)),
    "granitemoe": make_config(32, 24, 2, 4, 2, 70, 128, False, norm_eps=1e-6, experts=ExpertsConfig(4, 4, 24), **GRANITE),
    "granitemoe_shared": make_config(
        40, 20, 2, 5, 1, 65, 128, False, norm_eps=1e-6, experts=ExpertsConfig(5, 2, 20, shared_hidden_dim=33), **GRANITE
    ),
    "lfm2_moe": make_config(
        32, 44, 4, 4, 2, 68, 128, True, rope_theta=1e6, qk_norm=True, conv=((0, 1, 3), ShortConvConfig()),
        experts=ExpertsConfig(6, 3, 20, True, (0,), True, True),
    ),
    "qwen35_moe": make_config(
        32, 48, 4, 2, 1, 70, 128, False, norm_eps=1e-6, head_dim=16, rope_dim=4, qk_norm=True, attention_gate=True,
        delta=((0, 1, 2), DeltaNetConfig(2, 2, 16, 16)), experts=ExpertsConfig(6, 2, 12, shared_hidden_dim=28, shared_gate=True),
    ),
    "gpt_oss": make_config(
        32, 32, 3, 4, 2, 70, 128, False, rope_theta=100, head_dim=12, rope_scaling=YarnRopeScaling(8, 16, 4, 1, truncate=False),
        rope_scale=float(np.float32(1 + 0.1 * math.log(8))), window=11, layers=override_full_layers((1,), 3), qkv_bias=True,
        wo_bias=True, sinks=True, experts=ExpertsConfig(6, 3, 32, swiglu_limit=7.0, swiglu_alpha=1.702),
    ),
    "gemma4": make_config(
        20, 21, 6, 2, 1, 70, 128, head_dim=6, per_layer_inputs=PerLayerInputsConfig(7, 70), logit_softcap=3.0,
        **make_gemma4_fields(20, "wawwaa", 3, 16, 9, 2, 42)
    ),
    "gemma4_images": make_config(
        32, 24, 5, 4, 2, 66, 128, head_dim=8, per_layer_inputs=PerLayerInputsConfig(32, 66), logit_softcap=30.0,
        **make_gemma4_fields(32, "wwawa", 2, 12, 5, 1)
    ),
    "gemma4_dense": make_config(
        24, 30, 4, 4, 2, 75, 128, False, head_dim=8,
        **make_gemma4_fields(24, "wwwa", 0, 16, 11, 2, n_kv_heads=1, values_are_keys=True)
    ),
    "gemma4_moe": make_config(
        28, 26, 4, 4, 2, 68, 128, head_dim=8, logit_softcap=20.0, experts=ExpertsConfig(6, 3, 12, has_parallel_mlp=True),
        **make_gemma4_fields(28, "wwwa", 0, 12, 8, 1, values_are_keys=True),
    ),
    "seed_oss": make_config(36, 44, 2, 3, 1, 67, 128, False, norm_eps=1e-6, head_dim=10, qkv_bias=True),
    "qwen3_next": make_config(
        32, 48, 4, 2, 1, 70, 128, False, norm_eps=1e-6, head_dim=16, rope_dim=4, qk_norm=True, attention_gate=True,
        delta=((0, 1, 2), DeltaNetConfig(2, 4, 16, 16)), experts=ExpertsConfig(6, 2, 12, shared_hidden_dim=28, shared_gate=True),
    ),
    "qwen3_next_odd": make_config(
        36, 40, 4, 3, 1, 65, 128, False, norm_eps=1e-6, rope_theta=1e5, head_dim=20, rope_dim=10, qk_norm=True,
        attention_gate=True, delta=((0, 2, 3), DeltaNetConfig(2, 6, 7, 5, 3)),
        experts=ExpertsConfig(5, 3, 20, False, (0, 1, 2), shared_hidden_dim=9, shared_gate=True),
    ),
    "olmo3": make_config(
        40, 36, 4, 5, 1, 71, 128, False, norm_placement="behind", qk_norm="whole", rope_theta=100, window=9,
        layers=override_full_layers((3,), 4, rope_scaling=YarnRopeScaling(4, 16, 2, 0.1),
        rope_scale=float(np.float32(1 + 0.1 * math.log(4)))),
    ),
    "glm4": make_config(
        36, 40, 2, 3, 1, 68, 128, False, norm_placement="around", norm_eps=1.5625e-7, head_dim=12, rope_dim=6, qkv_bias=True
    ),
    "gemma2": make_config(
        20, 26, 4, 2, 1, 70, 128, head_dim=14, norm_eps=1e-6, norm_placement="around", activation="gelu", window=9,
        embedding_scale=float(np.sqrt(np.float32(20))), softcap=1.5, logit_softcap=4.0, layers=override_full_layers((1, 3), 4),
    ),
    "qwen2_vl": make_config(24, 36, 2, 3, 1, 69, 128, False, rope_theta=100, qkv_bias=True),
    "qwen2_5_vl": make_config(
        40, 30, 3, 4, 2, 71, 128, rope_theta=1e3, qkv_bias=True, window=11, layers=override_full_layers((0, 1), 3)
    ),
    "qwen3_vl": make_config(32, 28, 2, 4, 2, 66, 128, False, norm_eps=1e-6, rope_theta=100, head_dim=12, qk_norm=True),
    "qwen3_vl_moe": make_config(
        36, 44, 2, 3, 1, 68, 128, False, norm_eps=1e-6, rope_theta=1e3, head_dim=8, qk_norm=True, experts=ExpertsConfig(6, 3, 20),
    ),
    "smolvlm": make_config(36, 42, 2, 3, 1, 75, 128, False, norm_eps=1e-6, rope_theta=100),
    "granite_h": make_config(
        32, 20, 4, 4, 2, 70, 128, True, norm_eps=1e-6, **GRANITE, **NO_ROPE,
        experts=ExpertsConfig(5, 2, 20, shared_hidden_dim=24), mamba=((0, 1, 3), Mamba2Config(4, 16, 1, 16)),
    ),
    "granite_h_odd": make_config(
        36, 41, 3, 3, 1, 65, 128, False, norm_eps=1e-6, attention_scale=1.0,
        mamba=((0, 2), Mamba2Config(8, 9, 2, 7, 3, False)),
    ),
    "qwen2_moe": make_config(
        28, 40, 2, 7, 1, 72, 128, False, norm_eps=1e-6, qkv_bias=True,
        experts=ExpertsConfig(5, 2, 12, False, shared_hidden_dim=20, shared_gate=True),
    ),
    "exaone4": make_config(
        30, 34, 4, 3, 1, 67, 128, False, rope_theta=5e5, rope_scaling=Llama3RopeScaling(8, 1, 4, 64), norm_placement="behind",
        qk_norm=True, window=10, layers=override_full_layers((3,), 4, has_rope=False),
    ),
    "ernie4_5": make_config(30, 38, 2, 3, 1, 73, 128, True, rope_theta=5e5, head_dim=12),
    "hunyuan_v1_dense": make_config(
        28, 33, 2, 4, 2, 74, 32768, False, rope_theta=float(np.float32(1e4 * 1000 ** (10 / 8))), head_dim=10, qk_norm="rotated"
    ),
    "deepseek_v2": make_config(
        40, 44, 3, 5, 1, 69, 640, False, norm_eps=1e-6, head_dim=22, rope_dim=10, rope_theta=100,
        rope_scaling=YarnRopeScaling(40, 16, 2, 0.5),
        attention_scale=float(np.float32((1 + 0.0707 * math.log(40)) ** 2 / 22**0.5)),
        latent=LatentAttentionConfig(28, 12, 10, 14), experts=ExpertsConfig(7, 3, 20, False, (0,), shared_hidden_dim=40),
    ),
    "deepseek_v2_groups": make_config(
        36, 30, 2, 3, 1, 66, 128, False, norm_eps=1e-6, head_dim=22, rope_dim=12, latent=LatentAttentionConfig(40, 10, 12, 7, 22),
        experts=ExpertsConfig(9, 3, 20, False, (), routed_scaling_factor=2.5, shared_hidden_dim=20, n_groups=3, n_groups_used=2),
    ),
    "deepseek_v3": make_config(
        36, 40, 3, 4, 1, 71, 128, False, norm_eps=1e-6, head_dim=24, rope_dim=8, rope_theta=100,
        rope_scaling=YarnRopeScaling(8, 16, 2, 0.5), attention_scale=float(np.float32((1 + 0.1 * math.log(8)) ** 2 / 24**0.5)),
        latent=LatentAttentionConfig(33, 16, 8, 20, 30),
        experts=ExpertsConfig(12, 3, 16, **SIGMOID, routed_scaling_factor=2.5, shared_hidden_dim=16, n_groups=4, n_groups_used=2),
    ),
    "moonlight": make_config(
        32, 36, 2, 4, 1, 67, 128, False, norm_eps=1e-6, head_dim=20, rope_dim=6, latent=LatentAttentionConfig(32, 14, 6, 10),
        experts=ExpertsConfig(6, 2, 12, **SIGMOID, routed_scaling_factor=2.5, shared_hidden_dim=24),
    ),
    "glm4_moe_lite": make_config(
        40, 48, 3, 5, 1, 70, 128, False, norm_eps=1e-5, head_dim=28, rope_dim=8, latent=LatentAttentionConfig(36, 20, 8, 24, 28),
        experts=ExpertsConfig(8, 2, 20, **SIGMOID, routed_scaling_factor=1.8, shared_hidden_dim=20),
    ),
    "bailing_moe_v2": make_config(
        36, 44, 3, 6, 2, 68, 128, False, norm_eps=1e-6, head_dim=12, rope_dim=6, qk_norm=True,
        experts=ExpertsConfig(12, 3, 16, **SIGMOID, routed_scaling_factor=2.5, shared_hidden_dim=16, n_groups=4, n_groups_used=2),
    ),
    "nemotron_h": make_config(
        32, 24, 5, 4, 2, 70, 128, False, activation="relu2", head_dim=10, **NO_ROPE,
        layers=make_layers(("linear_attention", "moe", "linear_attention", "full_attention", "moe"), Mamba2Config(4, 16, 2, 16)),
        experts=ExpertsConfig(6, 2, 20, True, (0, 2, 3), True, True, 0.0, 0.0, 2.5, 28, sum_eps=1e-20),
    ),
    "nemotron_h_dense": make_config(
        27, 41, 5, 3, 1, 65, 128, False, activation="relu2", head_dim=10, **NO_ROPE,
        layers=make_layers(
            ("linear_attention", "mlp", "full_attention", "mlp", "linear_attention"), Mamba2Config(2, 7, 1, 9, 3, False)
        ),
    ),
    "stablelm": make_config(40, 38, 2, 5, 1, 70, 128, False, rope_dim=2, qkv_bias=True, layer_norm=True),
    "ernie4_5_moe": make_config(
        36, 48, 3, 3, 1, 71, 128, True, rope_theta=5e5,
        experts=ExpertsConfig(6, 2, 24, dense_layers=(0,), has_selection_bias=True, shared_hidden_dim=48),
    ),
    "phimoe": make_config(
        36, 20, 2, 3, 1, 73, 128, False, qkv_bias=True, wo_bias=True, layer_norm=True, classifier_bias=True,
        rope_divisors=PHI3_FACTORS, rope_scale=PHI3_SCALE, **PHI3_LONG,
        experts=ExpertsConfig(5, 2, 20, sparsemixer_threshold=0.02),
    ),
    "nemotron": make_config(
        36, 45, 2, 3, 1, 69, 128, False, rope_dim=6, qkv_bias=True, wo_bias=True, layer_norm=True, activation="relu2"
    ),
    "minicpm": make_config(
        32, 39, 4, 2, 1, 68, 128, False, norm_eps=1e-6, embedding_scale=3.0, residual_scale=float(np.float32(0.7)),
        logit_divisor=2.0,
    ),
    "falcon_h1": make_config(
        32, 40, 2, 4, 2, 70, 128, False, head_dim=12, projection_scales=(2.0, 1.0, 1.0), mlp_scales=(0.5, 2.0),
        embedding_scale=2.0, logit_divisor=4.0,
        mamba=((0, 1), Mamba2Config(4, 12, 2, 16, 4, True, False, True, (1.0, 0.25, 2.0, 0.125, 0.5), 2.0)),
    ),
    "falcon_h1_odd": make_config(
        27, 41, 2, 3, 1, 65, 128, False, head_dim=10, projection_scales=(0.9, 0.9 * 0.6, 0.9 * 1.2), mlp_scales=(1.1, 0.7),
        embedding_scale=1.3, logit_divisor=1 / 0.7,
        mamba=((0, 1), Mamba2Config(4, 7, 2, 9, 3, False, True, True, tuple(1.4 * x for x in (0.7, 1.3, 0.9, 1.2, 0.6)), 0.8)),
    ),
    "apertus": make_config(
        36, 45, 3, 3, 1, 66, 128, False, rope_theta=5e5, head_dim=10, rope_scaling=Llama3RopeScaling(8, 1, 4, 64), qkv_bias=True,
        wo_bias=True, qk_norm=True, activation="xielu",
    ),
    "laguna": make_config(
        36, 44, 5, 4, 2, 70, 128, False, norm_eps=1e-6, head_dim=12, qk_norm=True, attention_gate="head_softplus",
        experts=ExpertsConfig(5, 2, 12, **LAGUNA, routed_scaling_factor=2.5, shared_hidden_dim=20), rope_theta=100, rope_dim=6,
        rope_scaling=YarnRopeScaling(8, 16, 4), layers=make_laguna_layers((4, 6, 6, 6, 4), 9),
    ),
    "laguna_elements": make_config(
        28, 40, 3, 3, 1, 66, 128, False, norm_eps=1e-6, head_dim=10, rope_dim=4, rope_theta=100, qk_norm=True,
        qkv_bias=True, wo_bias=True, attention_gate="softplus", layers=make_laguna_layers((3, 3, 3)),
        experts=ExpertsConfig(5, 3, 16, **LAGUNA | {"dense_layers": (0, 1)}, routed_scaling_factor=1.5, shared_hidden_dim=16),
    ),
    "muse_glimmer": make_config(
        36, 44, 5, 3, 1, 68, 128, False, **MUSE, post_norm_eps=1e-8, head_dim=12, plain_query_scale=2.5, logit_divisor=2.0,
        logit_softcap=3.0, rope_theta=100, layers=make_muse_layers((0, 9, 9, 9, 0), (1, 2, 3)),
    ),
    "muse_glimmer_layers": make_config(
        28, 38, 4, 4, 2, 71, 128, True, **MUSE, post_norm_eps=1e-3, head_dim=10, plain_query_scale=3.87, logit_softcap=20.0,
        logit_divisor=1 / float(np.float32(0.19611613513818404)), rope_theta=100, qkv_bias=True, wo_bias=True,
        layers=make_muse_layers((0, 7, 7, 0), (0, 2)),
    ),
    "bitnet": make_config(
        36, 44, 2, 3, 1, 68, 128, True, norm_eps=1e-5, rope_theta=5e5, activation="gated_relu2", sub_norms=True
    ),
}  # fmt: skip


class Expected(NamedTuple):
    """Results of transformers for a fixture.

    Attributes:
        tokens: (60,).
        logits: (60, V).
        continuation: Greedy continuation of the first five tokens.
        sums: CRC-32 of each tensor's bytes.
    """

    tokens: list[int]
    logits: Any
    continuation: list[int]
    sums: dict[str, int]


def load_expected(name: str) -> Expected:
    with np.load(FIXTURES / name / "expected.npz") as file:
        sums = dict(zip(file["names"].tolist(), file["sums"].tolist(), strict=True))
        return Expected(file["tokens"].tolist(), file["logits"], file["continuation"].tolist(), sums)


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file and the data behind it."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def join_safetensors(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    """Return a safetensors file with this header, an object or any bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def safetensors_bytes(tensors: Mapping[str, tuple[str, Any]]) -> bytes:
    """Return a safetensors file with arrays and their dtypes in the header."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at := at + array.nbytes]}
    return join_safetensors(header, b"".join(array.tobytes() for _, array in tensors.values()))


def read_folder_tensors(folder: Path) -> dict[str, tuple[str, Any]]:
    """Return all tensors of a valid folder: names of dtypes and arrays, with the bits of bf16."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, data = split_safetensors(path.read_bytes())
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                array = np.frombuffer(data[first:last], DTYPES.get(entry["dtype"], np.uint8))
                is_known = math.prod(entry["shape"]) == array.size
                result[name] = entry["dtype"], array.reshape(entry["shape"]) if is_known else array
    return result


def copy_fixture(folder: Path, name: str = "llama", /, **changes: Any) -> Path:
    """Copy a fixture to a new folder and change values of its config.json."""
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("expected.npz"))
    return edit_config(folder, **changes)


def edit_config(folder: Path, file: str = "config.json", /, **changes: Any) -> Path:
    """Change values of a folder's config; `DELETED` removes a key. Return the folder."""
    path = folder / file
    values = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not DELETED}))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, tuple[str, Any]]], Any]) -> Path:
    """Change the tensors of a folder and write them to one file. Return the folder."""
    tensors = read_folder_tensors(folder)
    change(tensors)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors))
    return folder


def wrap_multimodal(folder: Path, prefix: str, head: str = "lm_head.weight", /, **others: Any) -> Path:
    """Turn a model into the language model of a multimodal one: nested config, prefixed tensors. Return the folder."""
    values = json.loads((folder / "config.json").read_text())
    values["text_config"] = values | {"architectures": None}
    values |= {"model_type": "mistral3", "vision_config": {"model_type": "pixtral", "hidden_size": 8}}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in (values | others).items() if value is not DELETED})
    )

    def rename(tensors: dict[str, tuple[str, Any]]) -> None:
        images = ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight")
        own = {head if name == "lm_head.weight" else name.replace("model.", prefix, 1): each for name, each in tensors.items()}
        tensors.clear()
        tensors |= own | {name: ("F32", np.ones((3, 2), np.float32)) for name in images}

    return edit_tensors(folder, rename)


def read_all_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all tensors, those of layers stacked."""
    tensors = checkpoint.tensors
    return {name: np.stack([t[:] for t in ts]) if isinstance(ts, list) else ts[:] for name, ts in tensors.items()}


def assert_rejected(folder: Path, *words: str) -> str:
    """Return the error message, after checking that it is one line and names the folder and the words."""
    with pytest.raises(CheckpointError) as caught:
        read_all_tensors(load_checkpoint(folder))
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    assert len(message.partition("; supported: ")[0]) < 400 + len(str(folder))
    for word in words:
        assert word in message.replace(str(folder), ""), message
    message.encode()
    return message
