"""Parsing of config.json: keys are supported or rejected by name, and missing keys have the family's defaults."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.families import load_definition, load_definitions
from specdec.families.family import GGUFFamily, HFFamily, HFHead
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.model_config import ModelConfig, YarnRopeScaling
from tests.tools.checkpoint_files import limit_memory
from tests.tools.configs import make_gemma3_layers, override_full_layers, replace_config
from tests.tools.hf_folders import (
    CONFIGS,
    DELETED,
    INDEX,
    assert_rejected,
    copy_fixture,
    edit_config,
    edit_tensors,
    wrap_multimodal,
)


def copy_model(folder: Path, name: str = "llama", /, **changes: Any) -> Path:
    """Copy a fixture to a new folder within this one and change values of its config.json."""
    return copy_fixture(folder / str(len([*folder.iterdir()])), name, **changes)


def load_config(folder: Path, name: str = "llama", /, **changes: Any) -> ModelConfig:
    return load_checkpoint(copy_model(folder, name, **changes)).config


def test_rope_keys_of_older_transformers_give_the_same_config(tmp_path: Path) -> None:
    scaling = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
    old = {"rope_parameters": DELETED, "rope_theta": 500000, "rope_scaling": scaling}
    assert load_config(tmp_path, "llama3", **old) == CONFIGS["llama3"]
    new = scaling | {"rope_type": "llama3"}
    assert load_config(tmp_path, "llama3", **old | {"rope_scaling": new}) == CONFIGS["llama3"]
    none = {"rope_parameters": DELETED, "rope_theta": DELETED, "rope_scaling": None}
    plain = replace_config(CONFIGS["llama3"], rope_theta=10000.0, rope_scaling=None)
    assert load_config(tmp_path, "llama3", **none) == plain


def test_missing_keys_have_the_defaults_of_the_family(tmp_path: Path) -> None:
    """Follow transformers 5.23: Qwen2 has no window by default, GPT-2 ties the embedding, Llama does not, and eps differ."""
    missing = dict.fromkeys(("rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "head_dim", "hidden_act"), DELETED)
    assert load_config(tmp_path, "llama", **missing) == CONFIGS["llama"]
    windows = dict.fromkeys(("use_sliding_window", "sliding_window", "layer_types", "max_window_layers"), DELETED)
    assert load_config(tmp_path, "qwen2_window", **windows).attention.window == 0
    assert load_config(tmp_path, "mistral", sliding_window=DELETED).attention.window == 4096
    assert load_config(tmp_path, "mistral", sliding_window=None).attention.window == 0
    assert load_config(tmp_path, "gpt2", tie_word_embeddings=DELETED, layer_norm_epsilon=DELETED) == CONFIGS["gpt2"]


@pytest.mark.parametrize(
    ("name", "key"), [("lfm2", "norm_eps"), ("nemotron_h", "layer_norm_epsilon"), ("gpt2", "layer_norm_epsilon")]
)
def test_a_family_with_a_norm_eps_of_another_name_ignores_that_of_llama(tmp_path: Path, name: str, key: str) -> None:
    """Follow transformers 5.23, in which these families do not read rms_norm_eps."""
    assert load_config(tmp_path, name, **{key: DELETED, "rms_norm_eps": 0.25}).norm_eps == 1e-5
    assert load_config(tmp_path, name, **{key: 0.5, "rms_norm_eps": 0.25}).norm_eps == 0.5


def test_olmo_3_scales_rope_in_full_attention_layers_in_configs_of_any_transformers(tmp_path: Path) -> None:
    """Follow transformers 4.57: no list of layer types, one scaling for all; without scaling and windows it is an OLMo 2."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.1}
    old = {"rope_parameters": DELETED, "rope_theta": 500000, "rope_scaling": yarn, "layer_types": DELETED}
    assert load_config(tmp_path, "olmo3", **old) == replace_config(CONFIGS["olmo3"], rope_theta=5e5)
    missing = load_config(tmp_path, "olmo3", rope_parameters=DELETED, sliding_window=DELETED)
    assert missing == replace_config(CONFIGS["olmo3"], rope_theta=5e5, window=4096, layers=override_full_layers((3,), 4))
    full = load_config(tmp_path, "olmo3", rope_parameters=DELETED, layer_types=["full_attention"] * 4)
    assert {full.layer_config(i) for i in range(4)} == {replace_config(CONFIGS["olmo3"], rope_theta=5e5, window=0, layers=())}


def test_linear_rope_scaling_and_dynamic_scaling_within_the_context_are_supported(tmp_path: Path) -> None:
    linear = load_config(tmp_path, "llama", rope_scaling={"type": "linear", "factor": 2.0})
    assert linear == replace_config(CONFIGS["llama"], rope_divisors=(2.0,) * 5)
    dynamic = load_config(tmp_path, "llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic == replace_config(CONFIGS["llama"], max_positions=128)


def test_yarn_extends_the_context_and_other_scalings_do_not(tmp_path: Path) -> None:
    """Qwen3's recipe leaves max_position_embeddings at 40,960; files with other scalings have the extended context there."""
    llama3 = {"low_freq_factor": 1, "high_freq_factor": 4}
    for scaling, n_positions, context in (
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768}, 40960, 40960),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32768}, 40960, 40960),
        ({"rope_type": "linear", "factor": 4.0}, 16384, 16384),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192} | llama3, 131072, 131072),
    ):
        changes = {"rope_scaling": scaling, "max_position_embeddings": n_positions}
        assert load_config(tmp_path, "llama", **changes).seq_len == context, scaling


def test_the_window_of_qwen_applies_only_to_its_sliding_window_layers(tmp_path: Path) -> None:
    full, sliding = ["full_attention"] * 2, ["sliding_attention"] * 2
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, 17),
        ({"use_sliding_window": False, "layer_types": full}, 0),
        ({"layer_types": full, "max_window_layers": 2}, 0),
        ({"layer_types": DELETED, "max_window_layers": 2}, 0),
        ({"layer_types": DELETED, "max_window_layers": 28}, 0),
        ({"layer_types": DELETED, "max_window_layers": 0}, 17),
        ({"layer_types": DELETED, "max_window_layers": 1}, 17),
        ({"layer_types": [full[0], sliding[0]]}, 17),
        ({"layer_types": [full[0], sliding[0]], "use_sliding_window": False}, None),
        ({"layer_types": sliding, "use_sliding_window": False}, None),
        ({"layer_types": sliding[:1]}, None),
        ({"layer_types": 5}, None),
    ]
    for changes, window in cases:
        folder = copy_model(tmp_path, "qwen2_window", **changes)
        if window is None:
            assert_rejected(folder, "layer")
        else:
            config = load_checkpoint(folder).config
            is_mixed = changes.get("max_window_layers") == 1 or changes.get("layer_types") == [full[0], sliding[0]]
            assert config == replace_config(config, window=window, layers=override_full_layers([0][:is_mixed], 2)), changes


def test_longrope_has_short_and_long_factors_for_a_part_of_each_head(tmp_path: Path) -> None:
    """Long factors apply after the original length, unless they equal the short ones."""
    long = {"rope_type": "longrope", "short_factor": [1, 1.15, 1.3, 1.45, 1.6, 1.75], "long_factor": [2] * 6}
    expected = replace_config(CONFIGS["phi3"], long_freq_factors=(2.0,) * 6)
    alike = {"long_freq_factors": (), "longrope_threshold": 0}
    for changes, config in (
        ({}, CONFIGS["phi3"]),
        ({"partial_rotary_factor": DELETED, "rope_parameters": long | {"partial_rotary_factor": 0.75}}, expected),
        ({"rope_parameters": DELETED, "rope_scaling": long | {"type": "su"} | {"rope_type": "su"}}, expected),
        ({"max_position_embeddings": 50}, replace_config(CONFIGS["phi3"], seq_len=50, rope_scale=1.0, max_positions=64, **alike)),
        ({"rope_parameters": long | {"long_factor": long["short_factor"]}}, replace_config(expected, **alike)),
        ({"rope_parameters": long | {"attention_factor": 1.25}}, replace_config(expected, rope_scale=1.25)),
        ({"rope_parameters": None}, replace_config(expected, rope_divisors=(), rope_scale=1.0, **alike)),
    ):
        assert load_config(tmp_path, "phi3", **changes) == config, changes
    for changes, word in (
        ({"partial_rotary_factor": 0.7}, "even number of a head's 16 rows"),
        ({"rope_parameters": long | {"short_factor": [1] * 5}}, "6 positive numbers"),
        ({"rope_parameters": long | {"long_factor": [0] * 6}}, "6 positive numbers"),
        ({"rope_parameters": long | {"rope_type": "dynamic"}}, "rope_type"),
        ({"original_max_position_embeddings": 1}, "2 or more"),
        ({"attention_bias": True}, "attention_bias"),
    ):
        assert_rejected(copy_model(tmp_path, "phi3", **changes), word)


def test_both_layouts_of_gemma_3_keys_give_the_same_config(tmp_path: Path) -> None:
    """One is that of transformers 5, the other that of older files on the hub."""
    missing = dict.fromkeys(("rope_parameters", "layer_types"), DELETED)
    linear = {"rope_type": "linear", "factor": 8.0}
    for name, changes, others in (
        ("gemma3", missing, {}),
        ("gemma3", missing | {"sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000}, {}),
        ("gemma3", missing | {"sliding_window_pattern": 2}, {"layers": make_gemma3_layers((1, 3, 5), 7)}),
        ("gemma3", missing | {"sliding_window_pattern": 1}, {"layers": make_gemma3_layers(range(7), 7), "window": 0}),
        (
            "gemma3",
            missing | {"rope_scaling": {"type": "linear", "factor": 2}},
            {"layers": make_gemma3_layers((5,), 7, (2.0,) * 3)},
        ),
        ("gemma3", {"rope_parameters": {"full_attention": None}}, {}),
        ("gemma3", {"query_pre_attn_scalar": DELETED}, {"attention_scale": 0.0625}),
        ("gemma3_scaled", {"rope_parameters": DELETED, "rope_scaling": linear, "rope_local_base_freq": 500}, {}),
    ):
        assert load_config(tmp_path, name, **changes) == replace_config(CONFIGS[name], **others), changes


def test_the_language_model_of_gemma_4_12b_is_a_gemma_4_with_other_defaults(tmp_path: Path) -> None:
    """Its folder says gemma4_unified and has tensors for images and sound without towers."""
    missing = dict.fromkeys(("sliding_window", "max_position_embeddings", "hidden_size_per_layer_input"), DELETED)
    folder = copy_fixture(tmp_path / "model", "gemma4_dense", model_type="gemma4_unified_text", **missing)
    expected = replace_config(CONFIGS["gemma4_dense"], seq_len=262144, window=1024)
    assert load_checkpoint(folder).config == expected
    wrap_multimodal(folder, "model.language_model.", model_type="gemma4_unified")
    unneeded = ("vision_embedder.patch_dense.bias", "embed_vision.embedding_projection.weight", "embed_audio.pos_norm.weight")
    edit_tensors(folder, lambda tensors: tensors.update({f"model.{name}": ("F32", np.ones(3, np.float32)) for name in unneeded}))
    assert load_checkpoint(folder).config == expected


def test_attention_layers_and_rotary_dim_of_qwen35(tmp_path: Path) -> None:
    """The defaults are each fourth layer and a quarter of a head; RoPE's own share overrides the top-level one."""
    expected = CONFIGS["qwen35"]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    for changes, config in (
        ({"layer_types": DELETED}, expected),
        ({"rope_parameters": DELETED}, expected),
        (
            {"rope_parameters": rope | {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 1},
            replace_config(expected, rope_dim=8),
        ),
        ({"rope_parameters": rope, "partial_rotary_factor": 0.75}, replace_config(expected, rope_dim=12)),
        ({"rope_parameters": rope, "partial_rotary_factor": 1.0}, replace_config(expected, rope_dim=0)),
    ):
        assert load_config(tmp_path, "qwen35", **changes) == config, changes
    assert_rejected(
        copy_fixture(tmp_path / "interval", "qwen35", layer_types=DELETED, full_attention_interval=2), "layers.1.self_attn"
    )


def test_eos_tokens_come_from_both_files(tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, list[int]]] = [
        (2, DELETED, [2]), ([3, 4], 2, [3, 4, 2]), (DELETED, [7], [7]), (DELETED, DELETED, [2]), (None, DELETED, []),
        (None, 5, [5]),
        ([], [], []), (64, DELETED, [64]), (65, 128001, []),  # beyond the vocabulary: they never come
    ]  # fmt: skip
    for config, generation, expected in cases:
        folder = edit_config(
            copy_model(tmp_path, "llama", eos_token_id=config), "generation_config.json", eos_token_id=generation
        )
        assert list(load_checkpoint(folder).eos_tokens) == expected
    (folder / "generation_config.json").unlink()
    assert load_checkpoint(edit_config(folder, eos_token_id=9, bos_token_id=None)).eos_tokens == {9: "eos"}
    assert load_checkpoint(folder).bos_token_id is None


def test_top_level_keys_override_text_config(tmp_path: Path) -> None:
    """Mistral3 of transformers ties the embedding unless the top level says otherwise."""
    folder = copy_fixture(tmp_path / "model", "llama_tied", tie_word_embeddings=False, eos_token_id=7)
    (folder / "generation_config.json").unlink()
    checkpoint = load_checkpoint(wrap_multimodal(folder, "model.", tie_word_embeddings=DELETED, eos_token_id=9))
    assert checkpoint.config == CONFIGS["llama_tied"]
    assert list(checkpoint.eos_tokens) == [9]
    assert list(load_checkpoint(edit_config(folder, eos_token_id=None)).eos_tokens) == [7]
    assert_rejected(edit_config(folder, tie_word_embeddings=False), "lm_head")
    assert_rejected(edit_config(folder, quantization_config={"quant_method": "fp8"}), '"fp8"')
    for text, word in ((None, "text_config"), ([], "text_config"), ({}, "model_type")):
        assert_rejected(edit_config(copy_model(tmp_path), model_type="mistral3", text_config=text), word)


YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1,
    "beta_fast": 2.0,
}  # fmt: skip


def test_all_yarn_keys_of_transformers_are_supported(tmp_path: Path) -> None:
    """The attention factor equals that of transformers; missing RoPE keys have Ministral 3's defaults."""
    expected, scale = CONFIGS["ministral3"], float(np.float32(1 + 0.1 * math.log(4)))
    for changes, config in (
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, expected),
        (YARN | {"mscale": 1.0}, replace_config(expected, rope_scale=scale)),
        (YARN | {"mscale": 0, "mscale_all_dim": 1.0}, replace_config(expected, rope_scale=scale)),
        (
            YARN | {"mscale": 2.0, "mscale_all_dim": 1.0},
            replace_config(expected, rope_scale=float(np.float32((1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4))))),
        ),
        (YARN | {"attention_factor": 1}, expected),
        (YARN | {"rope_type": None, "type": "yarn"}, None),
        (
            YARN | {"factor": None, "attention_factor": 1, "original_max_position_embeddings": 32},
            replace_config(expected, query_span=32, rope_scaling=YarnRopeScaling(4, 32, 2)),
        ),
        (
            YARN | {"attention_factor": 1, "beta_slow": 0, "truncate": False},
            replace_config(expected, rope_scaling=YarnRopeScaling(4, 16, 2, truncate=False)),
        ),
        (
            None,
            replace_config(
                expected, seq_len=1 << 18, rope_theta=1e6, rope_scaling=YarnRopeScaling(16, 1 << 14), query_span=1 << 14
            ),
        ),
    ):
        folder = copy_model(tmp_path, "ministral3", rope_parameters=changes)
        if config is None:
            assert_rejected(folder, "rope_type")
        else:
            assert load_checkpoint(folder).config == config, changes
    plain = load_config(tmp_path, "llama", rope_parameters=YARN | {"rope_theta": 1e4})
    assert plain == replace_config(CONFIGS["llama"], rope_scaling=YarnRopeScaling(4, 16, 2), rope_scale=scale)


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
GEMMA4_SLIDING_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
# Values that are rejected by the name of their key
REJECTED_VALUES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": ["llama"], "hidden_act": "gelu", "rope_scaling": "llama3",
        "rope_parameters": {"full_attention": {"rope_type": "default"}}, "partial_rotary_factor": 0.25, "attention_bias": "yes",
        "mlp_bias": 1, "sliding_window": 16, "tie_word_embeddings": 0, "quantization_config": [], "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "num_experts": 8, "num_local_experts": 8, "attention_multiplier": 0.5,
        "is_causal": False, "rope_interleaved": True, "head_dim": 5, "rms_norm_eps": float("inf"),
    },
    "gpt2": {
        "activation_function": "gelu", "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True,
        "add_cross_attention": True, "n_inner": 0, "layer_norm_epsilon": "1e-5",
    },
    "ministral3": {"attention_bias": True},
    "qwen35": {
        "attn_output_gate": False, "attention_bias": True, "layer_types": ["linear_attention", "sliding_attention"] * 2,
        "linear_value_head_dim": 0, "num_experts": 8,
    },
    "qwen35_images": {"text_config": None},
    "mistral": {
        "attention_bias": True, "sliding_window": 0, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3": {"mlp_bias": True},
    "gemma3_scaled": {"head_dim": 2**31 - 2},
    "seed_oss": {"sliding_window": 16, "attention_out_bias": None, "layer_types": ["sliding_attention"] * 2},
    "olmoe": {"clip_qkv": 8.0, "norm_topk_prob": 1, "num_experts": 0},
    "granitemoe_shared": {"shared_intermediate_size": "33"},
    "granite_h": {
        "layer_types": ["mamba", "conv", "mamba", "attention"], "mamba_proj_bias": True, "mamba_d_head": 8, "mamba_d_state": 0,
        "shared_intermediate_size": 0, "num_local_experts": None,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "mamba", "conv", "moe"], "mamba_hidden_act": "gelu", "use_bias": True,
        "mlp_bias": True, "n_group": 2, "moe_latent_size": 16, "mamba_dt_limit": [0.0, 1.0], "layer_norm_epsilon": None,
    },
    "falcon_h1": {
        "ssm_multipliers": [1.0, 0.0, 1.0, 1.0, 1.0], "key_multiplier": None, "lm_head_multiplier": 0,
        "attention_in_multiplier": "1", "projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True,
        "mamba_d_head": 13,
    },
    "lfm2_moe": {"num_dense_layers": -1, "routed_scaling_factor": 0},
    "qwen35_moe": {"shared_expert_intermediate_size": None},
    "glm4": {"mlp_bias": True, "hidden_act": "gelu"},
    "olmo3": {
        "original_max_position_embeddings": 32, "sliding_window": None, "layer_types": ["chunked_attention"] * 4,
        "mlp_bias": True,
    },
    "qwen3_next": {
        "decoder_sparse_step": 0, "mlp_only_layers": [4], "norm_topk_prob": None, "num_experts": 0, "attention_bias": True,
    },
    "gpt_oss": {"swiglu_limit": 0, "swiglu_alpha": None, "quantization_config": "mxfp4"},
    "olmo2": {"hidden_act": "gelu"},
    "qwen2_vl": {"text_config": None},
    "qwen2_moe": {
        "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "norm_topk_prob": None,
        "shared_expert_intermediate_size": 0,
    },
    "exaone4": {"sliding_window": 0, "attention_bias": True},
    "hunyuan_v1_dense": {"use_qk_norm": False, "mlp_bias": True},
    "deepseek_v2": {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 2, "n_shared_experts": 0,
        "num_experts_per_tok": None, "attention_bias": True, "mlp_bias": True, "kv_lora_rank": 0, "num_key_value_heads": 1,
    },
    "deepseek_v2_groups": {"n_group": None},
    "deepseek_v3": {
        "topk_method": "greedy", "scoring_func": "softmax", "rope_interleave": False, "norm_topk_prob": None,
        "routed_scaling_factor": 0,
    },
    "glm4_moe_lite": {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 2, "n_routed_experts": 0},
    "bailing_moe_v2": {
        "use_qk_norm": False, "use_bias": True, "use_qkv_bias": True, "score_function": "softmax", "norm_topk_prob": False,
        "moe_router_enable_expert_bias": False,
    },
    "laguna": {
        "num_attention_heads_per_layer": [4, 6], "mlp_layer_types": ["dense", "none"], "moe_apply_router_weight_on_input": True,
        "moe_router_logit_softcapping": 30.0, "sliding_window": 0,
    },
    "ernie4_5_moe": {"moe_layer_start_index": -1, "moe_layer_end_index": None, "moe_layer_interval": 0},
    "phimoe": {"num_experts_per_tok": 3, "router_jitter_noise": 0},
    "nemotron": {"hidden_act": "silu"},
    "bitnet": {"attention_bias": True, "quantization_config": 3},
    "apertus": {"mlp_bias": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 3},
    "minicpm": {"scale_emb": 0, "scale_depth": None, "dim_model_base": "256", "num_experts": 8},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "gemma2": {
        "use_bidirectional_attention": True, "attn_logit_softcapping": 0, "final_logit_softcapping": "30",
        "query_pre_attn_scalar": None, "layer_types": ["sliding_attention"] * 3,
    },
    "gemma3": {
        "hidden_activation": "gelu", "attention_bias": True, "use_bidirectional_attention": True, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "sliding_window": None, "query_pre_attn_scalar": 0,
        "layer_types": ["full_attention"] * 6, "rope_parameters": {"rope_theta": 1e4}, "rope_scaling": [8.0],
    },
}  # fmt: skip
BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    *((name, {key: value}, key) for name, values in REJECTED_VALUES.items() for key, value in values.items()),
    ("llama", {"model_type": "gemma"}, 'has the model_type "gemma", which is not supported; supported: '),
    ("llama", {"model_type": "bloom"}, '"bloom", which is not supported; supported: '),
    ("llama", {"model_type": DELETED}, "has no model_type; supported: "),
    ("llama", {"hidden_act": None}, "hidden_act"),
    ("gpt2", {"n_head": 4}, "n_heads 4"),
    ("llama", {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0}}, '"ntk"'),
    ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "llama_4_scaling_beta is null"),
    ("ministral3", {"rope_parameters": YARN | {"factor": 0.5}}, "factor is 0.5"),
    ("ministral3", {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 999}}, "factor is null"),
    ("ministral3", {"rope_parameters": YARN | {"rope_theta": 1}}, "rope's theta"),
    ("ministral3", {"rope_parameters": YARN | {"beta_fast": 0.5}}, "beta_slow, 1, or more"),
    ("ministral3", {"rope_parameters": YARN | {"truncate": 1}}, "truncate"),
    ("ministral3", {"rope_parameters": YARN | {"mscale": -1}}, "mscale"),
    ("ministral3", {"rope_parameters": YARN | {"attention_factor": 0}}, "attention_factor"),
    ("ministral3", {"rope_parameters": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "original_max_position_embeddings": 64}, "dynamic"),
    ("llama", {"rope_scaling": {"rope_type": ["llama3"]}}, "rope_type"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta"),
    ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq"),
    ("qwen35", {"partial_rotary_factor": 0.3, "rope_parameters": DELETED, "head_dim": 10}, "partial_rotary_factor"),
    ("qwen35", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
    ("qwen35", {"layer_types": ["full_attention"] * 4}, "layers"),
    ("qwen35", {"layer_types": ["linear_attention"] * 4}, "layers"),
    ("qwen35", {"layer_types": DELETED, "full_attention_interval": 0}, "full_attention_interval"),
    ("qwen35", {"linear_num_key_heads": 3}, "n_value_heads 4"),
    ("qwen35", {"linear_conv_kernel_dim": 17}, "kernel_size"),
    ("mistral", {"sliding_window": "12"}, "sliding_window"),
    *(
        (
            "llama",
            {"quantization_config": {"quant_method": method}},
            f'quantized by "{method}", which is not supported; use the original model in BF16 or a GGUF file of it',
        )
        for method in ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4")
    ),
    ("llama", {"quantization": {"group_size": 64, "bits": 4}}, "quantized by MLX, which is not supported"),
    ("llama", {"quantization_config": {"group_size": 64, "bits": 4}}, "quantized by MLX, which is not supported"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantized by an unknown method"),
    ("llama", {"quantization": 4}, "quantization is 4; expected null"),
    ("llama", {"model_type": "gpt_neox"}, 'has the model_type "gpt_neox", which is not supported; supported: '),
    ("llama", {"head_dim": -10}, "head_dim"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps"),
    *(("llama", {"hidden_size": bad}, "hidden_size") for bad in (0, -20, 20.0, "20", None, True, [20], 10**30, 2**31)),
    ("llama", {"num_hidden_layers": 3}, "layers.2."),
    ("llama", {"num_hidden_layers": 1}, "layers.1"),
    *((name, {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers") for name in ("llama", "qwen2", "smollm3", "gemma3")),
    ("gemma3", {"num_hidden_layers": 2**31 - 1, "layer_types": None}, "num_hidden_layers"),
    (
        "seed_oss",
        {"head_dim": 2**31 - 2, "rope_parameters": LINEAR},
        "head_dim is 2147483646; expected an integer from 1 to 1048576",
    ),
    ("llama", {"head_dim": DELETED, "hidden_size": 2**31 - 2, "rope_parameters": LINEAR}, "hidden_size"),
    ("gemma4", {"per_layer_config": None, "global_head_dim": 2**31 - 2}, "global_head_dim"),
    *(
        ("gemma4", {"rope_parameters": GEMMA4_SLIDING_ROPE | {"full_attention": full_rope}}, word)
        for full_rope, word in (
            ({"partial_rotary_factor": 0.25, "rope_theta": 1e6}, 'rope_type is "default"'),
            ({"rope_type": "proportional"}, "rope_theta is null"),
        )
    ),
    ("olmoe", {"num_experts_per_tok": 8}, "n_experts_used is 8"),
    ("mixtral", {"num_experts": 7}, "num_experts is 7"),
    ("bailing_moe_v2", {"n_routed_experts": 7}, "n_routed_experts is 7"),
    ("granitemoe", {"num_local_experts": 2**31 - 1}, "has the shape"),
    ("granitemoe_shared", {"shared_intermediate_size": 0}, "not part of"),
    ("granite_h", {"layer_types": None}, "layer_types is null; expected attention or mamba for each of 4 layers"),
    ("granite_h", {"layer_types": ["mamba"] * 4}, "all layers have mixers"),
    ("granite_h", {"mamba_n_heads": 3}, "mamba_n_heads is 3; expected a divisor of mamba_expand x hidden_size, 64"),
    ("granite_h", {"mamba_n_groups": 3}, "n_heads 4 is not divisible by n_groups 3"),
    ("granite_h", {"mamba_n_groups": 2}, "has the shape"),
    ("granite_h", {"mamba_d_conv": 17}, "kernel_size is 17"),
    ("granite_h", {"mamba_expand": 2**31 - 1}, "mamba_n_heads"),
    ("granite_h", {"mamba_conv_bias": False}, "conv1d.bias"),
    ("granite_h", {"time_step_limit": [0.001, 0.1]}, "time_step_limit is [0.001, 0.1]; expected [0, Infinity]"),
    (
        "nemotron_h",
        {"layers_block_type": None},
        "hybrid_override_pattern is null; expected a layer for each of the letters M * - E",
    ),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MEM*X"}, "hybrid_override_pattern"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MEM*E" * 20}, "layers.5."),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "mamba", "moe"]}, "all layers have mixers"),
    ("nemotron_h", {"layers_block_type": ["moe", "moe", "mamba", "attention", "moe"]}, "layers.0."),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers is [1.0]; expected a list of 2 numbers from 1e-06 to 1e+06"),
    ("falcon_h1", {"ssm_multipliers": [1e6] * 5, "ssm_in_multiplier": 1e6}, "mixer's scales are"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is true; expected false"),
    ("falcon_h1", {"mamba_d_ssm": 46}, "mamba_n_heads is 4; expected a divisor of mamba_d_ssm, 46"),
    ("falcon_h1", {"mamba_n_groups": 3}, "n_heads 4 is not divisible by n_groups 3"),
    ("falcon_h1", {"mamba_d_state": 15}, "has the shape"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, 'mlp_hidden_act is "silu"; expected "relu2"'),
    ("nemotron_h", {"mamba_num_heads": 5}, "n_heads 5 is not divisible by n_groups 2"),
    ("nemotron_h", {"n_routed_experts": 7}, "has the shape (6, 32)"),
    ("lfm2_moe", {"num_dense_layers": 4}, "dense_layers are (0, 1, 2, 3)"),
    ("lfm2_moe", {"num_dense_layers": True}, "num_dense_layers"),
    ("lfm2_moe", {"use_expert_bias": False}, "expert_bias"),
    ("qwen35_moe", {"moe_intermediate_size": 13}, "has the shape"),
    *(
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}} | {kind: part}}, word)
        for kind, part, word in (
            ("full_attention", {"rope_type": "longrope", "rope_theta": 1e4}, "rope_type"),
            ("sliding_attention", {"rope_type": "longrope", "rope_theta": 1e4}, "rope_type"),
            ("full_attention", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False}, "truncate"),
            ("rope_theta", 1e4, "an object of full_attention and sliding_attention"),
        )
    ),
    ("glm4", {"partial_rotary_factor": 0.1, "rope_parameters": DELETED}, "partial_rotary_factor"),
    ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.3}}, "partial_rotary_factor is 0.3;"),
    ("glm4", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ("glm4", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1]}}, "mrope_section"),
    ("glm4", {"attention_bias": False}, "not part of"),
    ("glm4", {"sliding_window": 16}, "null in a glm4 model"),
    ("olmo3", {"rope_theta": 1e4}, "rope_theta is 10000.0; expected 500000.0"),
    ("olmo3", {"attention_bias": True}, "self_attn.q_proj.bias"),
    ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}, "dense_layers"),
    ("qwen3_next", {"mlp_only_layers": [1]}, "layers.1.mlp.gate_proj"),
    ("qwen3_next", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ("qwen3_next", {"linear_num_key_heads": 4}, "in_proj_qkvz"),
    ("qwen3_next", {"linear_num_value_heads": 2}, "in_proj_qkvz"),
    ("qwen3_next", {"sliding_window": 16}, "null in a qwen3_next model"),
    ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "expected null, or an object with the quant_method mxfp4"),
    ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, '"mxfp4"'),
    ("gpt_oss", {"attention_bias": False}, "not part of"),
    *(
        (name, {"num_hidden_layers": 2**31 - 1, "layer_types": ["full_attention"]}, "num_hidden_layers")
        for name in ("llama", "mistral", "phi3", "granite", "qwen3_moe", "lfm2_moe", "olmo2", "olmoe", "granitemoe", "gpt_oss")
    ),
    ("qwen3_vl", {"text_config": {"model_type": "qwen3_vl_text", "hidden_act": "gelu"}}, "hidden_act"),
    ("qwen3_vl_moe", {"text_config": {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": False}}, "norm_topk_prob"),
    ("smolvlm", {"text_config": {"model_type": "phi4mm"}}, '"phi4mm", which is not supported'),
    ("qwen2_moe", {"qkv_bias": False}, "not part of"),
    ("exaone4", {"sliding_window": None}, "layer_types"),
    ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("ernie4_5", {"use_bias": True}, "self_attn.q_proj.bias"),
    ("ernie4_5", {"use_bias": None}, "use_bias is null"),
    ("ernie4_5", {"sliding_window": 16}, "null in a ernie4_5 model"),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 0.5}}, "alpha is 0.5"),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "xdrope", "rope_theta": 1e4, "alpha": 2}}, '"xdrope"'),
    ("deepseek_v2", {"first_k_dense_replace": 3}, "layers.1.mlp.gate_proj"),
    ("deepseek_v2", {"q_lora_rank": 8}, "q_a_proj"),
    ("deepseek_v2", {"kv_lora_rank": 2**31 - 2}, "kv_lora_rank"),
    ("deepseek_v2", {"qk_rope_head_dim": 9}, "rope's dim is 9"),
    ("deepseek_v2", {"qk_nope_head_dim": 14}, "q_proj"),
    ("deepseek_v2", {"v_head_dim": 15}, "o_proj"),
    ("deepseek_v2", {"rope_parameters": LINEAR}, "rope_type"),
    ("deepseek_v2", {"sliding_window": 16}, "null in a deepseek_v2 model"),
    ("deepseek_v2_groups", {"n_group": 2}, "n_groups is 2"),
    ("deepseek_v2_groups", {"topk_group": 4}, "n_groups_used is 4"),
    ("deepseek_v3", {"n_group": 12, "topk_group": 12}, "groups of two experts"),
    ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 4}, "n_groups_used is 1"),
    ("moonlight", {"q_lora_rank": 12}, "q_a_proj"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
    ("glm4_moe_lite", {"num_hidden_layers": 2, "mlp_layer_types": None}, "not part of"),
    ("bailing_moe_v2", {"n_group": 5}, "n_groups is 5"),
    ("bailing_moe_v2", {"num_experts": 16}, "mlp.gate.weight"),
    ("bailing_moe_v2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ("bailing_moe_v2", {"num_shared_experts": 2}, "shared_experts"),
    *(
        ("muse_glimmer", {"text_config": {"model_type": "muse_glimmer_text", "num_hidden_layers": 5} | changes}, word)
        for changes, word in (
            ({"layer_rope_theta": [0, 1e4, 50.0, 1e4, 0]}, "layer_rope_theta"),
            ({"layer_rope_theta": [0, 1e4]}, "layer_rope_theta"),
            (
                {"layer_rope_theta": [0, 1e4], "rope_parameters": {"rope_type": "default", "rope_theta": 10**400}},
                "rope_theta is 1000",
            ),
            ({"layer_types": ["full_attention"] * 4}, "layer_types"),
            ({"output_multiplier": 0}, "output_multiplier"),
            ({"qk_scale_factor": None}, "qk_scale_factor"),
            ({"post_norm_eps": -1e-8}, "post_norm_eps"),
            ({"final_logit_softcapping": 0}, "final_logit_softcapping"),
            ({"sliding_window": None}, "sliding_window"),
            ({"hidden_activation": "gelu"}, "hidden_activation"),
            ({"rms_norm_eps": None}, "rms_norm_eps"),
        )
    ),
    ("qwen3", {"architectures": ["DFlashDraftModel"]}, "a DFlash draft head"),
    ("qwen3", {"model_type": "muse_glimmer_assistant"}, "a DFlash draft head"),
    ("laguna", {"gating": False}, "gating is false; expected true"),
    ("laguna", {"gating": "per-element"}, "g_proj"),
    ("laguna", {"num_attention_heads_per_layer": [4, 6, 6, 0, 4]}, "num_attention_heads_per_layer"),
    ("laguna", {"num_attention_heads_per_layer": [4, 6, 6, 5, 4]}, "n_heads 5"),
    ("laguna", {"mlp_layer_types": ["dense"] * 5}, "dense_layers"),
    ("laguna", {"attention_bias": True}, "self_attn.k_proj.bias"),
    ("laguna", {"rope_parameters": {"rope_theta": 100.0}}, "full_attention"),
    ("laguna", {"rope_parameters": {"full_attention": {"rope_theta": 100.0}}}, "rope_theta is null"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is true"),
    ("ernie4_5_moe", {"attention_bias": True, "use_bias": DELETED}, "attention_bias is true"),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min is 0.5; expected a number from 0 to 1e-12"),
    ("ernie4_5_moe", {"moe_layer_start_index": 3}, "moe_layer_start_index"),
    ("ernie4_5_moe", {"moe_layer_end_index": 1}, "layers.2.mlp.gate_proj"),
    ("ernie4_5_moe", {"moe_layer_interval": 7}, "dense_layers"),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}, "not part of"),
    ("ernie4_5_moe", {"moe_k": 7}, "n_experts_used is 7"),
    ("phimoe", {"lm_head_bias": False}, "not part of"),
    ("phimoe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, '"yarn"'),
    *(
        ("phimoe", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2} | more}, word)
        for more, word in (
            ({}, "long_mscale is null"),
            ({"long_mscale": 1.3}, "long_mscale is 1.3; expected 1.2, the short_mscale"),
            ({"long_mscale": 1.2, "short_factor": [1.0] * 5}, "6 positive numbers"),
        )
    ),
    ("nemotron", {"norm_eps": None}, "norm_eps is null"),
    ("nemotron", {"mlp_bias": True}, "mlp.up_proj.bias"),
    ("nemotron", {"attention_bias": False}, "not part of"),
    ("nemotron", {"rope_scaling": {"type": "linear", "factor": 2.0}}, '"linear"'),
    ("bitnet", {"hidden_act": "silu"}, 'hidden_act is "silu"; expected "relu2"'),
    ("bitnet", {"quantization_config": {"quant_method": "bitnet", "linear_class": "bitlinear"}}, "autobitlinear"),
    ("apertus", {"hidden_act": "silu"}, 'hidden_act is "silu"; expected "xielu"'),
    ("apertus", {"attention_bias": False}, "not part of"),
    ("apertus", {"num_hidden_layers": 2}, "layers.2."),
    ("minicpm", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}, '"longrope"'),
    ("stablelm", {"layer_norm_eps": None}, "layer_norm_eps is null"),
    ("stablelm", {"use_qkv_bias": False}, "not part of"),
    ("stablelm", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, '"yarn"'),
    ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "layer_types"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma3", {"rope_parameters": {"full_attention": [8.0]}}, "rope_parameters"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}}}, "rope_type"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}}, "rope_type"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_theta": 0.5}}}, "rope_theta"),
    ("gemma3", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ("gemma3", {"head_dim": 5}, "head_dim 5"),
    ("llama", {"vocab_size": 64}, "embed_tokens.weight"),
    ("llama", {"vocab_size": 2**31 - 1}, "embed_tokens.weight"),
    ("llama", {"intermediate_size": 36}, "mlp.gate_proj.weight"),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "n_heads 4"),
    ("llama", {"num_key_value_heads": 1}, "self_attn.k_proj.weight"),
    ("llama_biases", {"attention_bias": False}, "bias"),
    ("llama", {"attention_bias": True}, "self_attn.q_proj.bias"),
    ("llama_tied", {"tie_word_embeddings": False}, "lm_head.weight"),
    *(("llama", {"eos_token_id": bad}, "eos_token_id") for bad in (-1, "2", True, 2.0, {}, [2, -1], [2, None], [[2]])),
    *(("llama", {"bos_token_id": bad}, "bos_token_id") for bad in (-1, "1", False, 1.5)),
]


@pytest.mark.parametrize(
    ("name", "changes", "word"), BAD_CONFIGS, ids=lambda value: None if isinstance(value, str) else str(value)[:60]
)
def test_an_unsupported_config_is_rejected_by_key(tmp_path: Path, name: str, changes: dict[str, Any], word: str) -> None:
    assert_rejected(copy_fixture(tmp_path / "model", name, **changes), word)


def test_the_error_about_an_unknown_family_lists_all_families(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(copy_fixture(tmp_path / "model", "llama", model_type="bloom"))
    names = str(caught.value).partition("supported: ")[2].split(", ")
    assert set(names) >= {each.name.removesuffix("_text") for each in load_definitions(HFFamily)} and names == sorted(names)


def test_keys_that_change_nothing_are_ignored(tmp_path: Path) -> None:
    ignored = {
        "_name_or_path": "x", "architectures": None, "pretraining_tp": 4, "torch_dtype": "float64", "initializer_range": 7,
        "use_cache": False, "partial_rotary_factor": 1.0, "quantization_config": None, "pruned_heads": {}, "num_experts": 0,
        "attn_logit_softcapping": None, "rope_interleaved": False, "sliding_window": 4096, "pad_token_id": -1,
        "max_window_layers": 1, "tomorrow": {"key": [1]}, "reorder_and_upcast_attn": True, "is_causal": True,
    }  # fmt: skip
    assert load_config(tmp_path, "llama", **ignored) == CONFIGS["llama"]


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "a list": (b"[1]", "is [1]; expected an object"),
    "null": (b"null", "null"),
    "empty": (b"", "not valid JSON"),
    "half": (b'{"model_type": "lla', "not valid JSON"),
    "two": (b"{}{}", "not valid JSON"),
    "no UTF-8": (b'{"a": "\xff"}', "UTF-8"),
    "nested": (b'{"a":' * 100_000, "nested"),
    "lists without end": (b"[" * 200_000, "nested"),
    "a number of 5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "a key twice": (b'{"model_type": "llama", "model_type": "gpt2"}', "twice"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("damage", BAD_JSON)
def test_a_file_that_is_not_a_json_object_is_rejected(tmp_path: Path, file: str, damage: str) -> None:
    folder = copy_fixture(tmp_path / "model", "mistral")
    (folder / file).write_bytes(BAD_JSON[damage][0])
    assert_rejected(folder, file, BAD_JSON[damage][1])


def test_a_huge_config_is_rejected_without_reading_it(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(2**40)
    with limit_memory(1 << 20):
        assert_rejected(folder, "config.json", str(2**40))


def test_each_family_is_found_by_name_in_its_own_file() -> None:
    for kind in (HFFamily, GGUFFamily, HFHead):
        for each in load_definitions(kind):
            assert load_definition(kind, each.name) is each
    for family in load_definitions(HFFamily):
        assert all(family in load_definitions(HFFamily, name) for name in family.multimodal_types)
    assert load_definition(HFFamily, "config_values") is load_definition(HFFamily, "../loaders/llama2c") is None
