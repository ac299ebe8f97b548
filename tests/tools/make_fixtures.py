"""Make the model folders of tests/fixtures and their expected outputs with transformers: `python tests/tools/make_fixtures.py`.

Do not run it with -m: transformers would take our kernels.py for a package. It needs torch, transformers and safetensors; no test
needs them. Each folder is a tiny model with random weights as `save_pretrained` writes it. Its expected.npz has:

- `tokens` (60,), and transformers' fp32 `logits` (60, V) for them
- `continuation`: the greedy output after the first five tokens
- `names` and `sums`: the CRC-32 of each tensor's bytes as the safetensors library reads them
- `mtp_logits` if the model has an MTP head, see `compute_expected_mtp`
"""

import copy
import importlib.metadata
import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitNetConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GenerationConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SmolVLMConfig,
    StableLmConfig,
    logging,
)
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm4_moe_lite
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

FIXTURES = Path(__file__).parents[1] / "fixtures"
N_TOKENS, N_PROMPT, N_CONTINUATION = 60, 5, 24
N_MTP, N_GUESSED = 24, 3  # tokens of the sequence that an MTP head continues, and draft tokens
MIN_LEAD = 1e-2  # logits by which each greedy token leads, so that rounding does not change the output

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # in a head of 16 the second of eight frequencies is interpolated
}  # fmt: skip


GRANITE = {"embedding_multiplier": 1.5, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0}

GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}

GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


def make_longrope(n_pairs, original=64, **others):
    """Return LongRoPE settings: the tests' 60 tokens use the short factors, and the long ones differ."""
    short, long = ([round(1 + step * i, 2) for i in range(n_pairs)] for step in (0.15, 2.5))
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **others}
    return {"original_max_position_embeddings": original, "rope_scaling": scaling, "pad_token_id": 0}


def make_yarn(factor=4.0, original=16, beta=0.1, **others):
    """Return YaRN settings: the tests' 60 tokens exceed the original length, and heads from 16 on have interpolated pairs."""
    numbers = {"factor": factor, "original_max_position_embeddings": original, "llama_4_scaling_beta": beta}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **numbers, **others}, "pad_token_id": 0}


VISION = {
    "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 16, "patch_size": 8, "head_dim": 8,
}  # fmt: skip


PHIMOE_SCALE = (7 / 6) ** 0.5  # sqrt(1 + log(128 / 64) / log(64)), as llama.cpp's converter computes it
QWEN_VISION = {
    "depth": 1, "hidden_size": 8, "embed_dim": 8, "mlp_ratio": 1, "intermediate_size": 8, "num_heads": 1, "patch_size": 2,
    "temporal_patch_size": 2, "fullatt_block_indexes": [0], "num_position_embeddings": 4, "deepstack_visual_indexes": [],
}  # fmt: skip


def make_qwen_vision(dim, *names):
    """Return the vision part of a Qwen-VL of this width, as small as possible; names: further keys of its class."""
    keys = ("depth", "hidden_size", "num_heads", "patch_size", *names)
    return {key: QWEN_VISION[key] for key in keys} | {"out_hidden_size": dim}


def make_sizes(vocab, dim, hidden, layers, heads, kv_heads, positions=128, **others):
    return {
        "vocab_size": vocab, "hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": positions,
        "bos_token_id": 1, "eos_token_id": 2, **others,
    }  # fmt: skip


def make_gemma_sizes(*numbers, head_dim, **others):
    """Return sizes of a Gemma 3; scores are scaled by head_dim unless `others` has query_pre_attn_scalar."""
    return make_sizes(*numbers, head_dim=head_dim, pad_token_id=0, **{"query_pre_attn_scalar": head_dim, **others})


def make_gemma4_sizes(*numbers, layers, **others):
    """Return sizes of a Gemma 4; in `layers`, w is a layer with a sliding window and a one with full attention."""
    layer_types = ["full_attention" if layer == "a" else "sliding_attention" for layer in layers]
    rope = copy.deepcopy(GEMMA4_ROPE)
    return make_sizes(
        *numbers, layer_types=layer_types, pad_token_id=0, vocab_size_per_layer_input=numbers[0], rope_parameters=rope, **others
    )


def make_delta_net(layers, key_heads, value_heads, key_dim, value_dim, **others):
    return {
        "layer_types": ["full_attention" if layer == "a" else "linear_attention" for layer in layers],
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim, **others,
    }  # fmt: skip


def make_mamba(layers, n_heads, n_groups, d_state, **others):
    """Return settings of a hybrid with Mamba-2 layers; in `layers`, m is one and a is a layer with attention."""
    return {
        "layer_types": ["full_attention" if layer == "a" else "linear_attention" for layer in layers],
        "mamba_n_heads": n_heads, "mamba_n_groups": n_groups, "mamba_d_state": d_state, **others,
    }  # fmt: skip


def make_multipliers(*, embedding, lm_head, key, attention, ssm):
    """Return the multipliers of a Falcon-H1; attention and ssm are those of the input and of the output."""
    multipliers = {"embedding": embedding, "lm_head": lm_head, "key": key}
    for name, values in (("attention", attention), ("ssm", ssm)):
        multipliers |= dict(zip((f"{name}_in", f"{name}_out"), values, strict=True))
    return {f"{name}_multiplier": value for name, value in multipliers.items()}


def make_nemotron_h(layers, vocab, dim, hidden, heads, kv_heads, *, n_heads, head_dim, n_groups, d_state, **others):
    """Return sizes of a Nemotron-H; layers has a letter for each layer: m, Mamba-2, e, experts, -, an MLP, *, attention."""
    sizes = make_sizes(vocab, dim, hidden, len(layers), heads, kv_heads, head_dim=10, pad_token_id=0, **others)
    types = {"m": "linear_attention", "e": "moe", "-": "mlp", "*": "full_attention"}
    return sizes | {
        "layers_block_type": [types[layer] for layer in layers], "mamba_num_heads": n_heads, "mamba_head_dim": head_dim,
        "n_groups": n_groups, "ssm_state_size": d_state,
    }  # fmt: skip


def make_partial_rope(theta, share, **others):
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share, **others}


MUSE_VISION = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "patch_size": 2,
    "pos_emb_height": 2, "pos_emb_width": 2,
}  # fmt: skip
LAGUNA_ROPE = {
    "full_attention": make_partial_rope(100.0, 0.5, rope_type="yarn", factor=8.0, original_max_position_embeddings=16,
    beta_fast=4.0, attention_factor=1.0),
    "sliding_attention": make_partial_rope(50.0, 1.0),
}  # fmt: skip


def make_laguna_sizes(*numbers, layers, dense, experts, used, hidden, shared, **others):
    """Return sizes of a Laguna; in `layers`, w is a layer with a sliding window and a one with full attention."""
    return make_sizes(
        *numbers, layer_types=["full_attention" if layer == "a" else "sliding_attention" for layer in layers],
        mlp_layer_types=["dense"] * dense + ["sparse"] * (len(layers) - dense), num_experts=experts, num_experts_per_tok=used,
        moe_intermediate_size=hidden, shared_expert_intermediate_size=shared, pad_token_id=0, **others,
    )  # fmt: skip


def make_latent_sizes(*numbers, kv, q, nope, rope, value, **others):
    """Return sizes of a model with latent attention."""
    return make_sizes(
        *numbers, kv_lora_rank=kv, q_lora_rank=q, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value, pad_token_id=0,
        **others,
    )  # fmt: skip


def make_expert_sizes(experts, used, hidden, shared, dense, **others):
    """Return sizes of the experts of a DeepSeek; the first `dense` layers have none."""
    return {
        "n_routed_experts": experts, "num_experts_per_tok": used, "moe_intermediate_size": hidden, "n_shared_experts": shared,
        "first_k_dense_replace": dense, **others,
    }  # fmt: skip


def make_latent_yarn(factor, mscale, **others):
    numbers = {"factor": factor, "original_max_position_embeddings": 16, "mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_type": "yarn", "rope_theta": 100.0, "beta_fast": 2.0, "beta_slow": 0.5, **numbers, **others}


def make_gpt2_sizes(vocab, positions, dim, layers, heads):
    return {
        "vocab_size": vocab, "n_positions": positions, "n_embd": dim, "n_layer": layers, "n_head": heads, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip


# name: config, dtype, other arguments of `save`
MODELS = {
    "llama": (LlamaConfig(**make_sizes(65, 20, 37, 2, 2, 2)), torch.float32, {}),
    "llama_tied": (LlamaConfig(**make_sizes(72, 32, 48, 2, 4, 2, tie_word_embeddings=True)), torch.bfloat16, {}),
    "llama_biases": (LlamaConfig(**make_sizes(64, 24, 40, 2, 3, 1, attention_bias=True, mlp_bias=True)), torch.float16, {}),
    "llama3": (
        LlamaConfig(**make_sizes(70, 32, 48, 2, 4, 2, head_dim=16, rope_parameters=LLAMA3, tie_word_embeddings=True)),
        torch.bfloat16,
        {"shards": "10KB", "ends": [2, 5, 9]},
    ),
    "mistral": (MistralConfig(**make_sizes(64, 32, 40, 3, 4, 2, sliding_window=12)), torch.bfloat16, {"shards": "12KB"}),
    "qwen2": (Qwen2Config(**make_sizes(80, 32, 48, 2, 4, 2, tie_word_embeddings=True)), torch.bfloat16, {}),
    "qwen2_window": (
        Qwen2Config(**make_sizes(64, 24, 30, 2, 2, 1, use_sliding_window=True, sliding_window=17, max_window_layers=0)),
        torch.bfloat16,
        {},
    ),
    "qwen2_layers": (
        Qwen2Config(
            **make_sizes(66, 24, 30, 3, 2, 1, use_sliding_window=True, sliding_window=9, max_window_layers=1),
            rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        ),
        torch.bfloat16,
        {},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig(
            **make_sizes(70, 32, 40, 3, 4, 2, head_dim=12, num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=20),
            mlp_only_layers=[1],
            norm_topk_prob=True,
        ),
        torch.bfloat16,
        {},
    ),
    "mixtral": (MixtralConfig(**make_sizes(66, 24, 36, 2, 3, 1, num_local_experts=5, num_experts_per_tok=3)), torch.float32, {}),
    "qwen3": (Qwen3Config(**make_sizes(66, 32, 48, 2, 4, 2, head_dim=12)), torch.bfloat16, {}),
    "granite": (GraniteConfig(**make_sizes(68, 24, 45, 3, 4, 2, tie_word_embeddings=True, **GRANITE)), torch.bfloat16, {}),
    "granite_biases": (
        GraniteConfig(**make_sizes(70, 20, 30, 2, 2, 1, attention_bias=True, mlp_bias=True, logits_scaling=0.5)),
        torch.float16,
        {},
    ),
    "granite_hybrid": (
        GraniteMoeHybridConfig(
            **make_sizes(
                64,
                32,
                40,
                2,
                4,
                2,
                num_local_experts=0,
                shared_intermediate_size=36,
                position_embedding_type="rope",
                layer_types=["full_attention"] * 2,
                mamba_n_heads=8,
                **GRANITE,
            )
        ),
        torch.bfloat16,
        {},
    ),
    "granite_h": (
        GraniteMoeHybridConfig(
            **make_sizes(70, 32, 20, 4, 4, 2, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=24),
            **make_mamba("mmam", 4, 1, 16),
            **GRANITE,
            tie_word_embeddings=True,
        ),
        torch.bfloat16,
        {},
    ),
    "granite_h_odd": (
        GraniteMoeHybridConfig(
            **make_sizes(65, 36, 40, 3, 3, 1, num_local_experts=0, shared_intermediate_size=41, position_embedding_type="rope"),
            **make_mamba("mam", 8, 2, 7, mamba_d_conv=3, mamba_conv_bias=False),
        ),
        torch.float32,
        {},
    ),
    "nemotron_h": (
        NemotronHConfig(
            **make_nemotron_h("mem*e", 70, 32, 24, 4, 2, n_heads=4, head_dim=16, n_groups=2, d_state=16),
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            routed_scaling_factor=2.5,
            moe_shared_expert_intermediate_size=28,
        ),
        torch.bfloat16,
        {},
    ),
    "nemotron_h_dense": (
        NemotronHConfig(
            **make_nemotron_h("m-*-m", 65, 27, 41, 3, 1, n_heads=2, head_dim=7, n_groups=1, d_state=9, conv_kernel=3),
            use_conv_bias=False,
        ),
        torch.bfloat16,
        {},
    ),
    "falcon_h1": (  # multipliers that bf16 represents, since GGUF files have them in their weights
        FalconH1Config(
            **make_sizes(70, 32, 40, 2, 4, 2, head_dim=12, mamba_d_ssm=48, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=16),
            **make_multipliers(embedding=2.0, lm_head=0.25, key=0.5, attention=(2.0, 0.5), ssm=(0.5, 2.0)),
            mlp_multipliers=[0.5, 2.0],
            ssm_multipliers=[2.0, 0.5, 4.0, 0.25, 1.0],
        ),
        torch.bfloat16,
        {},
    ),
    "falcon_h1_odd": (
        FalconH1Config(
            **make_sizes(65, 27, 41, 2, 3, 1, head_dim=10, mamba_d_ssm=28, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=9),
            **make_multipliers(embedding=1.3, lm_head=0.7, key=0.6, attention=(0.9, 1.2), ssm=(1.4, 0.8)),
            mlp_multipliers=[1.1, 0.7],
            ssm_multipliers=[0.7, 1.3, 0.9, 1.2, 0.6],
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_d_conv=3,
            mamba_conv_bias=False,
        ),
        torch.float32,
        {},
    ),
    "smollm3": (SmolLM3Config(**make_sizes(72, 24, 40, 5, 3, 1, pad_token_id=0)), torch.bfloat16, {}),
    "smollm3_layers": (
        SmolLM3Config(
            **make_sizes(
                65, 36, 30, 2, 2, 2, pad_token_id=0, no_rope_layers=[0, 1], tie_word_embeddings=False, attention_bias=True
            )
        ),
        torch.float32,
        {},
    ),
    "phi3": (
        Phi3Config(**make_sizes(68, 32, 44, 2, 2, 1, tie_word_embeddings=True, partial_rotary_factor=0.75, **make_longrope(6))),
        torch.bfloat16,
        {},
    ),
    "phi3_plain": (Phi3Config(**make_sizes(65, 20, 30, 2, 2, 2, pad_token_id=0, sliding_window=9)), torch.float32, {}),
    "phi3_factor": (
        Phi3Config(**make_sizes(70, 40, 37, 2, 4, 2, partial_rotary_factor=0.4, **make_longrope(2, attention_factor=1.3))),
        torch.float16,
        {},
    ),
    "gemma3": (Gemma3TextConfig(**make_gemma_sizes(70, 18, 21, 7, 3, 1, head_dim=6, sliding_window=9)), torch.bfloat16, {}),
    "gemma3_scaled": (
        Gemma3TextConfig(
            **make_gemma_sizes(65, 20, 26, 4, 2, 1, head_dim=14, sliding_window=17, query_pre_attn_scalar=11),
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters=GEMMA3_ROPE,
            tie_word_embeddings=False,
        ),
        torch.float32,
        {},
    ),
    "gemma3_half": (
        Gemma3TextConfig(**make_gemma_sizes(77, 22, 30, 5, 2, 2, head_dim=8, sliding_window=5), sliding_window_pattern=3),
        torch.float16,
        {},
    ),
    "ministral3": (
        Ministral3Config(
            **make_sizes(70, 28, 44, 2, 4, 2, head_dim=16, **make_yarn(beta_fast=2.0, mscale=1.0, mscale_all_dim=1.0))
        ),
        torch.bfloat16,
        {},
    ),
    "ministral3_vision": (  # a text model nested in the config of an image model
        Mistral3Config(
            text_config=Ministral3Config(
                **make_sizes(66, 24, 37, 2, 3, 1, head_dim=20, tie_word_embeddings=True),
                **make_yarn(8.0, 20, 0.4, beta_fast=4.0, beta_slow=0.5, truncate=False),
            ).to_dict(),
            vision_config=VISION,
        ),
        torch.float16,
        {},
    ),
    "ministral3_scale": (
        Ministral3Config(**make_sizes(64, 20, 30, 2, 2, 2, head_dim=12, **make_yarn(2.0, 7, 1.5, attention_factor=1.2))),
        torch.float32,
        {},
    ),
    "phi3_long": (  # the long factors apply from within the tests' tokens, and from within their continuation
        Phi3Config(**make_sizes(66, 24, 40, 2, 2, 1, partial_rotary_factor=0.5, **make_longrope(3, original=17))),
        torch.bfloat16,
        {},
    ),
    "olmo2": (Olmo2Config(**make_sizes(69, 40, 36, 3, 5, 1)), torch.bfloat16, {}),
    "olmo3": (
        Olmo3Config(
            **make_sizes(71, 40, 36, 4, 5, 1, sliding_window=9),
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 100.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 2.0,
                    "beta_slow": 0.1,
                },
            },
        ),
        torch.bfloat16,
        {},
    ),
    "glm4": (Glm4Config(**make_sizes(68, 36, 40, 2, 3, 1, head_dim=12, pad_token_id=0)), torch.bfloat16, {}),
    "seed_oss": (SeedOssConfig(**make_sizes(67, 36, 44, 2, 3, 1, head_dim=10, pad_token_id=0)), torch.bfloat16, {}),
    "olmoe": (
        OlmoeConfig(**make_sizes(67, 36, 20, 2, 3, 1, num_experts=7, num_experts_per_tok=3)),
        torch.bfloat16,
        {},
    ),
    "granitemoe": (
        GraniteMoeConfig(**make_sizes(70, 32, 24, 2, 4, 2, num_local_experts=4, num_experts_per_tok=4, **GRANITE)),
        torch.bfloat16,
        {},
    ),
    "granitemoe_shared": (
        GraniteMoeSharedConfig(
            **make_sizes(65, 40, 20, 2, 5, 1, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=33, **GRANITE)
        ),
        torch.bfloat16,
        {},
    ),
    "lfm2_moe": (
        Lfm2MoeConfig(
            **make_sizes(68, 32, 44, 4, 4, 2, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, num_dense_layers=1),
            layer_types=["conv", "conv", "full_attention", "conv"],
        ),
        torch.bfloat16,
        {},
    ),
    "qwen35_moe": (
        Qwen3_5MoeTextConfig(
            **make_sizes(70, 32, 48, 4, 2, 1, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12),
            **make_delta_net("ddda", 2, 2, 16, 16),
            shared_expert_intermediate_size=28,
        ),
        torch.bfloat16,
        {},
    ),
    "qwen3_next": (
        Qwen3NextConfig(
            **make_sizes(70, 32, 48, 4, 2, 1, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12),
            **make_delta_net("ddda", 2, 4, 16, 16),
            shared_expert_intermediate_size=28,
        ),
        torch.bfloat16,
        {},
    ),
    "qwen3_next_odd": (
        Qwen3NextConfig(
            **make_sizes(65, 36, 40, 4, 3, 1, head_dim=20, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=20),
            **make_delta_net("dadd", 2, 6, 7, 5, linear_conv_kernel_dim=3),
            rope_parameters=make_partial_rope(1e5, 0.5),
            shared_expert_intermediate_size=9,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            norm_topk_prob=False,
        ),
        torch.float16,
        {},
    ),
    "gpt_oss": (
        GptOssConfig(
            **make_sizes(70, 32, 32, 3, 4, 2, head_dim=12, num_local_experts=6, num_experts_per_tok=3, sliding_window=11),
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        ),
        torch.bfloat16,
        {},
    ),
    "gpt_oss_mxfp4": (
        GptOssConfig(
            **make_sizes(70, 64, 32, 3, 4, 2, head_dim=12, num_local_experts=6, num_experts_per_tok=3, sliding_window=11),
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
        torch.bfloat16,
        {"microscaled": True},
    ),
    "lfm2": (
        Lfm2Config(
            **make_sizes(68, 32, 60, 4, 4, 2, block_multiple_of=16, layer_types=["conv", "conv", "full_attention", "conv"])
        ),
        torch.bfloat16,
        {},
    ),
    "lfm2_biases": (
        Lfm2Config(
            **make_sizes(65, 20, 37, 3, 2, 1, tie_word_embeddings=False, block_auto_adjust_ff_dim=False, full_attn_idxs=[0, 2]),
            conv_bias=True,
            conv_L_cache=4,
        ),
        torch.float16,
        {},
    ),
    "lfm2_odd": (
        Lfm2Config(
            **make_sizes(70, 36, 62, 3, 3, 3, tie_word_embeddings=False, block_multiple_of=5, block_ffn_dim_multiplier=1.3),
            full_attn_idxs=[1],
            conv_L_cache=2,
            norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        torch.float32,
        {},
    ),
    "gemma4": (  # as E2B
        Gemma4TextConfig(
            **make_gemma4_sizes(70, 20, 21, 6, 2, 1, layers="wawwaa", head_dim=6, global_head_dim=16, sliding_window=9),
            hidden_size_per_layer_input=7,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            final_logit_softcapping=3.0,
        ),
        torch.bfloat16,
        {},
    ),
    "gemma4_images": (  # as E4B, in an image model
        Gemma4Config(
            text_config=Gemma4TextConfig(
                **make_gemma4_sizes(66, 32, 24, 5, 4, 2, layers="wwawa", head_dim=8, global_head_dim=12, sliding_window=5),
                hidden_size_per_layer_input=32,
                num_kv_shared_layers=2,
                final_logit_softcapping=30.0,
                tie_word_embeddings=True,
            ),
            vision_config=dict.fromkeys(("hidden_size", "intermediate_size"), 8)
            | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2}
            | {"position_embedding_size": 4},
        ),
        torch.bfloat16,
        {},
    ),
    "gemma4_dense": (  # as 31B
        Gemma4TextConfig(
            **make_gemma4_sizes(75, 24, 30, 4, 4, 2, layers="wwwa", head_dim=8, global_head_dim=16, sliding_window=11),
            hidden_size_per_layer_input=0,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            tie_word_embeddings=False,
        ),
        torch.float16,
        {},
    ),
    "gemma4_moe": (  # as 26B-A4B
        Gemma4TextConfig(
            **make_gemma4_sizes(68, 28, 26, 4, 4, 2, layers="wwwa", head_dim=8, global_head_dim=12, sliding_window=8),
            hidden_size_per_layer_input=0,
            attention_k_eq_v=True,
            num_global_key_value_heads=2,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=3,
            moe_intermediate_size=12,
            final_logit_softcapping=20.0,
        ),
        torch.bfloat16,
        {},
    ),
    "gemma2": (
        Gemma2Config(
            **make_gemma_sizes(70, 20, 26, 4, 2, 1, head_dim=14, sliding_window=9),
            attn_logit_softcapping=1.5,
            final_logit_softcapping=4.0,
        ),
        torch.bfloat16,
        {},
    ),
    "qwen2_vl": (
        Qwen2VLConfig(
            text_config={
                **make_sizes(69, 24, 36, 2, 3, 1),
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
            },
            vision_config=make_qwen_vision(24, "embed_dim", "mlp_ratio") | {"hidden_size": 24},
        ),
        torch.bfloat16,
        {},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig(
            text_config={
                **make_sizes(71, 40, 30, 3, 4, 2, use_sliding_window=True, sliding_window=11, max_window_layers=2),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [1, 2, 2]},
            },
            vision_config=make_qwen_vision(40, "intermediate_size", "fullatt_block_indexes"),
            tie_word_embeddings=True,
        ),
        torch.bfloat16,
        {},
    ),
    "qwen3_vl": (
        Qwen3VLConfig(
            text_config={
                **make_sizes(66, 32, 28, 2, 4, 2, head_dim=12),
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 100.0,
                    "mrope_section": [2, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            vision_config=make_qwen_vision(32, "intermediate_size", "num_position_embeddings", "deepstack_visual_indexes"),
        ),
        torch.bfloat16,
        {},
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig(
            text_config={
                **make_sizes(68, 36, 44, 2, 3, 1, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20),
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e3,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
            },
            vision_config=make_qwen_vision(36, "intermediate_size", "num_position_embeddings", "deepstack_visual_indexes"),
        ),
        torch.bfloat16,
        {"as_transposed": True},
    ),
    "smolvlm": (
        SmolVLMConfig(
            text_config={
                "model_type": "llama",
                "architectures": ["VLlama3ForCausalLM"],
                **make_sizes(75, 36, 42, 2, 3, 1, rope_theta=100.0),
            },
            vision_config=dict.fromkeys(("hidden_size", "intermediate_size"), 8)
            | {"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 4},
        ),
        torch.bfloat16,
        {},
    ),
    "qwen2_moe": (
        Qwen2MoeConfig(
            **make_sizes(72, 28, 40, 2, 7, 1, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12),
            shared_expert_intermediate_size=20,
        ),
        torch.bfloat16,
        {},
    ),
    "exaone4": (
        Exaone4Config(**make_sizes(67, 30, 34, 4, 3, 1, sliding_window=10, rope_parameters=LLAMA3)),
        torch.bfloat16,
        {},
    ),
    "ernie4_5": (Ernie4_5Config(**make_sizes(73, 30, 38, 2, 3, 1, head_dim=12, pad_token_id=0)), torch.bfloat16, {}),
    "hunyuan_v1_dense": (
        HunYuanDenseV1Config(
            **make_sizes(74, 28, 33, 2, 4, 2, positions=32768, head_dim=10, pad_token_id=0, eod_token_id=2),
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        ),
        torch.bfloat16,
        {},
    ),
    "deepseek_v2": (  # as V2-Lite
        DeepseekV2Config(
            **make_latent_sizes(69, 40, 44, 3, 5, 5, kv=28, q=None, nope=12, rope=10, value=14),
            **make_expert_sizes(7, 3, 20, 2, 1),
            rope_parameters=make_latent_yarn(40.0, 0.707),
        ),
        torch.bfloat16,
        {},
    ),
    "deepseek_v2_groups": (
        DeepseekV2Config(
            **make_latent_sizes(66, 36, 30, 2, 3, 3, kv=40, q=22, nope=10, rope=12, value=7),
            **make_expert_sizes(9, 3, 20, 1, 0, topk_method="group_limited_greedy", n_group=3, topk_group=2),
            routed_scaling_factor=2.5,
        ),
        torch.float16,
        {},
    ),
    "deepseek_v3": (
        DeepseekV3Config(
            **make_latent_sizes(71, 36, 40, 3, 4, 4, kv=33, q=30, nope=16, rope=8, value=20),
            **make_expert_sizes(12, 3, 16, 1, 1, n_group=4, topk_group=2, scoring_func="sigmoid"),
            rope_parameters=make_latent_yarn(8.0, 1.0),
        ),
        torch.bfloat16,
        {},
    ),
    "moonlight": (
        DeepseekV3Config(
            **make_latent_sizes(67, 32, 36, 2, 4, 4, kv=32, q=None, nope=14, rope=6, value=10),
            **make_expert_sizes(6, 2, 12, 2, 1, n_group=1, topk_group=1, scoring_func="sigmoid"),
        ),
        torch.bfloat16,
        {},
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig(
            **make_latent_sizes(70, 40, 48, 3, 5, 5, kv=36, q=28, nope=20, rope=8, value=24),
            **make_expert_sizes(8, 2, 20, 1, 1),
        ),
        torch.bfloat16,
        {},
    ),
    "bailing_moe_v2": (  # as Ling-mini 2, which computes as a GLM-4.5 with norms of queries and keys
        Glm4MoeConfig(
            **make_sizes(68, 36, 44, 3, 6, 2, head_dim=12, partial_rotary_factor=0.5, pad_token_id=0, use_qk_norm=True),
            **make_expert_sizes(12, 3, 16, 1, 1, n_group=4, topk_group=2),
            routed_scaling_factor=2.5,
            rms_norm_eps=1e-6,
        ),
        torch.bfloat16,
        {"as_ling": True},
    ),
    "muse_glimmer": (
        MuseGlimmerConfig(
            text_config={
                **make_sizes(68, 36, 44, 5, 3, 1, head_dim=12, sliding_window=9, rope_theta=100.0, qk_scale_factor=2.5),
                "output_multiplier": 0.5,
                "final_logit_softcapping": 3.0,
            },
            vision_config=MUSE_VISION,
            out_hidden_size=8,
            projector_hidden_size=8,
        ),
        torch.bfloat16,
        {},
    ),
    "muse_glimmer_layers": (
        MuseGlimmerConfig(
            text_config={
                **make_sizes(71, 28, 38, 4, 4, 2, head_dim=10, sliding_window=7, attention_bias=True, tie_word_embeddings=True),
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "layer_rope_theta": [100.0, 0, 100.0, 0],
                "post_norm_eps": 1e-3,
                "rope_theta": 100.0,
            },
            vision_config=MUSE_VISION,
            out_hidden_size=8,
            projector_hidden_size=8,
            tie_word_embeddings=True,
        ),
        torch.float16,
        {},
    ),
    "laguna": (  # as XS
        LagunaConfig(
            **make_laguna_sizes(
                70,
                36,
                44,
                5,
                4,
                2,
                layers="awwwa",
                dense=1,
                experts=5,
                used=2,
                hidden=12,
                shared=20,
                head_dim=12,
                sliding_window=9,
            ),
            num_attention_heads_per_layer=[4, 6, 6, 6, 4],
            moe_routed_scaling_factor=2.5,
            rope_parameters=LAGUNA_ROPE,
        ),
        torch.bfloat16,
        {},
    ),
    "laguna_elements": (  # as M
        LagunaConfig(
            **make_laguna_sizes(66, 28, 40, 3, 3, 1, layers="aaa", dense=2, experts=5, used=3, hidden=16, shared=16, head_dim=10),
            gating="per-element",
            attention_bias=True,
            moe_routed_scaling_factor=1.5,
            rope_parameters={"full_attention": make_partial_rope(100.0, 0.4)},
        ),
        torch.float16,
        {},
    ),
    "stablelm": (StableLmConfig(**make_sizes(70, 40, 38, 2, 5, 1, use_qkv_bias=True)), torch.bfloat16, {}),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig(
            **make_sizes(71, 36, 48, 3, 3, 1, pad_token_id=0, moe_k=2, moe_num_experts=6, moe_intermediate_size=24),
            moe_num_shared_experts=2,
        ),
        torch.bfloat16,
        {},
    ),
    "phimoe": (
        PhimoeConfig(
            **make_sizes(73, 36, 20, 2, 3, 1, num_local_experts=5, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True),
            router_jitter_noise=0.01,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.15, 1.3, 1.45, 1.6, 1.75],
                "long_factor": [1.0, 3.5, 6.0, 8.5, 11.0, 13.5],
                "short_mscale": PHIMOE_SCALE,
                "long_mscale": PHIMOE_SCALE,
                "original_max_position_embeddings": 64,
            },
        ),
        torch.bfloat16,
        {},
    ),
    "bitnet": (BitNetConfig(**make_sizes(68, 36, 44, 2, 3, 1, tie_word_embeddings=True)), torch.bfloat16, {}),
    "apertus": (
        ApertusConfig(**make_sizes(66, 36, 45, 3, 3, 1, head_dim=10, attention_bias=True, rope_parameters=LLAMA3)),
        torch.bfloat16,
        {},
    ),
    "nemotron": (NemotronConfig(**make_sizes(69, 36, 45, 2, 3, 1, attention_bias=True)), torch.bfloat16, {}),
    "minicpm": (
        GraniteConfig(
            **make_sizes(68, 32, 39, 4, 2, 1),
            **GRANITE | {"embedding_multiplier": 3.0, "attention_multiplier": 0.25},
        ),
        torch.bfloat16,
        {"as_minicpm": True},
    ),
    "gpt2": (GPT2Config(**make_gpt2_sizes(71, 64, 18, 2, 3)), torch.float32, {}),
    "gpt2_base": (
        GPT2Config(**make_gpt2_sizes(64, 96, 32, 2, 4), n_inner=50, activation_function="gelu_pytorch_tanh"),
        torch.float16,
        {"as_base": True},
    ),
    "qwen35": (
        Qwen3_5TextConfig(
            **make_sizes(70, 32, 48, 4, 2, 1, head_dim=16, tie_word_embeddings=True), **make_delta_net("ddda", 2, 4, 8, 16)
        ),
        torch.bfloat16,
        {},
    ),
    "qwen35_odd": (
        Qwen3_5TextConfig(
            **make_sizes(65, 36, 40, 3, 3, 1, head_dim=20, rope_parameters=make_partial_rope(1e5, 0.5)),
            **make_delta_net("ada", 3, 3, 7, 5, linear_conv_kernel_dim=3),
        ),
        torch.float16,
        {},
    ),
    "qwen35_images": (
        Qwen3_5Config(
            text_config={
                **make_sizes(72, 64, 40, 2, 2, 2, head_dim=32, tie_word_embeddings=True),
                **make_delta_net("da", 1, 2, 32, 40),
                "rope_parameters": make_partial_rope(1e7, 0.25, mrope_interleaved=True, mrope_section=[2, 1, 1]),
            },
            vision_config=dict.fromkeys(("hidden_size", "intermediate_size"), 8)
            | {"depth": 1, "num_heads": 1, "out_hidden_size": 64, "num_position_embeddings": 4, "patch_size": 2},
            tie_word_embeddings=True,
        ),
        torch.bfloat16,
        {},
    ),
}


def get_auto_class(config):
    """Return the class that makes models of a config; image models have another."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def random_model(config, dtype, seed):
    """Return a random model: norms near one, biases and matrices large enough for selective attention and distinct logits."""
    torch.manual_seed(seed)
    return randomize(get_auto_class(config).from_config(config, dtype=torch.float32)).to(dtype).eval()


def randomize(model):
    """Replace the weights by those that `random_model` describes, and return the model."""
    config = model.config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_norm, is_gemma = "norm" in name or "ln_" in name or name.endswith("scale"), "gemma" in config.model_type
            if parameter.dim() > 1:
                n_inputs = parameter.shape[0 if "c_" in name else 1]
                spread = 0.12 if is_gemma else 0.7  # small embeddings, or a tied model repeats its last token
                parameter.copy_(noise * (spread if "wpe" in name or "embed" in name or "wte" in name else 1.6 / n_inputs**0.5))
            else:
                adds_one = config.model_type.startswith(("gemma2", "gemma3")) or config.model_type == "nemotron"
                one = 0 if adds_one else 1  # transformers adds 1 itself
                parameter.copy_(one + 0.2 * noise if is_norm and name.endswith(("weight", "scale")) else 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if name.endswith("act_fn.beta"):
                buffer.copy_(0.5 + 0.2 * torch.randn_like(buffer))
            if name.endswith("act_fn.eps"):
                buffer.copy_(-0.2 * torch.rand_like(buffer))  # published models have -1e-6, which changes no fixture
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    return model


class Mtp(torch.nn.Module):
    """The MTP head of a model, which transformers leaves out: built from its layer and norms, the rest as in vLLM."""

    def __init__(self, config):
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers, config.layer_types, config._attn_implementation = 1, ["full_attention"], "eager"
        n, norm, rotary = config.hidden_size, qwen3_5.Qwen3_5RMSNorm, qwen3_5.Qwen3_5TextRotaryEmbedding
        layer = qwen3_5_moe.Qwen3_5MoeDecoderLayer if hasattr(config, "num_experts") else qwen3_5.Qwen3_5DecoderLayer
        if config.model_type == "glm4_moe_lite":
            norm, rotary = glm4_moe_lite.Glm4MoeLiteRMSNorm, glm4_moe_lite.Glm4MoeLiteRotaryEmbedding
            layer, config.mlp_layer_types = glm4_moe_lite.Glm4MoeLiteDecoderLayer, ["sparse"]
        if config.model_type == "qwen3_next":
            norm, rotary = qwen3_next.Qwen3NextRMSNorm, qwen3_next.Qwen3NextRotaryEmbedding
            layer = qwen3_next.Qwen3NextDecoderLayer
        self.fc = torch.nn.Linear(2 * n, n, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(n, config.rms_norm_eps) for _ in range(3))
        self.layers = torch.nn.ModuleList([layer(config, 0)])
        self.rotary = [rotary(config)]  # in a list: its buffers are not part of the state dict

    def forward(self, embedded, states):
        """Return normed outputs (N, D) for pairs of an embedding and a state: the target's after its last norm, or an output."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], -1))[None]
        n = x.shape[1]
        angles = self.rotary[0](x, torch.arange(n)[None])
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask)[0])


def rename_as_last_layer(tensors, n_layers):
    """Return the tensors of an MTP head as published GLMs name them: a layer after the last, with a tensor for each expert."""
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("layers.0.")
        if "experts." in name and tensor.dim() == 3:
            parts = {"down_proj": tensor}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True))
            for part, experts in parts.items():
                renamed |= {f"mlp.experts.{i}.{part}.weight": expert.contiguous() for i, expert in enumerate(experts)}
        else:
            module, _, kind = name.rpartition(".")
            renamed[f"{names.get(module, module)}.{kind}"] = tensor
    return {f"model.layers.{n_layers}.{name}": tensor for name, tensor in renamed.items()}


def read_mtp(folder, config):
    """Return the tensors of the MTP head of a folder, with the names of the module `Mtp`."""
    tensors = load_file(folder / "model.safetensors")
    if config.model_type != "glm4_moe_lite":
        return {name.removeprefix("mtp."): tensor.float() for name, tensor in tensors.items() if name.startswith("mtp.")}
    own = {}
    for name, expected in Mtp(config).state_dict().items():
        if expected.dim() < 3:
            (stored,) = rename_as_last_layer({name: expected}, config.num_hidden_layers)
            own[name] = tensors[stored].float()
            continue
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        at = f"model.layers.{config.num_hidden_layers}.mlp.experts"
        experts = [torch.cat([tensors[f"{at}.{i}.{part}.weight"] for part in parts]) for i in range(len(expected))]
        own[name] = torch.stack(experts).float()
    return own


def add_mtp(folder, model, dtype, seed):
    """Add a random MTP head to the tensors of a saved model."""
    torch.manual_seed(seed)
    config = model.config.get_text_config()
    tensors, own, is_glm = load_file(folder / "model.safetensors"), {}, config.model_type == "glm4_moe_lite"
    for name, tensor in Mtp(config).state_dict().items():
        noise = torch.randn_like(tensor)
        noise *= 0.2 if tensor.dim() == 1 else 1.6 / tensor.shape[1] ** 0.5
        own[name] = (noise + (is_glm and "norm" in name)).to(torch.float32 if name.endswith("correction_bias") else dtype)
    tensors |= (
        rename_as_last_layer(own, config.num_hidden_layers) if is_glm else {f"mtp.{name}": each for name, each in own.items()}
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values.get("text_config", values)["num_nextn_predict_layers" if is_glm else "mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def compute_expected_mtp(folder, tokens):
    """Return logits (N_GUESSED + 1, N - 1, V): at [g, i] of pair i + g, where the pairs after i use the head's own output."""
    auto_class = get_auto_class(AutoConfig.from_pretrained(folder))
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head = Mtp(model.config.get_text_config())
    head.load_state_dict(read_mtp(folder, model.config.get_text_config()))
    with torch.no_grad():
        text_model = getattr(model.model, "language_model", model.model)
        states, embedded = text_model(tokens[None]).last_hidden_state[0], text_model.embed_tokens(tokens)
        logits = torch.zeros(N_GUESSED + 1, len(tokens) - 1, model.config.get_text_config().vocab_size)
        for i in range(len(tokens) - 1):
            inputs = states[: i + 1]
            for g in range(min(N_GUESSED + 1, len(tokens) - 1 - i)):
                outputs = head(embedded[1 : i + g + 2], inputs)
                logits[g, i] = model.lm_head(outputs[-1])
                inputs = torch.cat([inputs, outputs[-1:]])
    return logits.numpy()


def quantize_mxfp4(folder):
    """Replace the experts' matrices by random MXFP4 blocks, with the names and the order of the published gpt-oss."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        n_experts, n_inputs, n_outputs = tensors.pop(name).shape
        shape = (n_experts, n_outputs, n_inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 124, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def transpose_experts(folder):
    """Store the matrices of experts as (inputs, outputs), as the published Qwen3-VL does."""
    tensors = load_file(folder / "model.safetensors")
    experts = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | experts, folder / "model.safetensors", {"format": "pt"})


def rename_as_ling(folder):
    """Give tensors and config of a saved GLM-4.5 the names of a published Ling 2.0, for which transformers has no class."""
    names = {
        "embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias",
    }  # fmt: skip
    stored, tensors = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        for part in [part for part in names if part in name]:
            name = name.replace(part, names[part])
        if "self_attn.q_proj" in name:
            joined = torch.cat([stored[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
            tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = joined
        elif "self_attn" not in name:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    values = {renamed.get(key, key): value for key, value in values.items()}
    own = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "score_function": "sigmoid"}
    own |= {"use_bias": False, "use_qkv_bias": False, "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(values | own, indent=2) + "\n")


def rename_as_minicpm(folder):
    """Turn a Granite with the default score scale into a MiniCPM, which transformers knows only as remote code."""
    values = json.loads((folder / "config.json").read_text())
    del values["attention_multiplier"]
    values["scale_emb"] = values.pop("embedding_multiplier")
    values["scale_depth"] = values.pop("residual_multiplier") * values["num_hidden_layers"] ** 0.5
    values["dim_model_base"] = values["hidden_size"] / values.pop("logits_scaling")
    values |= {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def save(model, folder, shards="1GB", ends=None, as_base=False, microscaled=False, as_transposed=False):
    model.generation_config = GenerationConfig.from_model_config(model.config)
    if ends:
        model.generation_config.eos_token_id = ends
    model.save_pretrained(folder, max_shard_size=shards)
    if microscaled:
        quantize_mxfp4(folder)
    if as_transposed:
        transpose_experts(folder)
    if as_base:  # as openai-community/gpt2: no prefix, and the buffers of older versions
        path = folder / "model.safetensors"
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
        n = model.config.n_positions
        for i in range(model.config.n_layer):
            tensors[f"h.{i}.attn.bias"] = torch.ones(n, n, dtype=torch.uint8).tril()[None, None, :8, :8].contiguous()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(tensors, path, {"format": "pt"})


def compute_expected(folder, seed):
    """Return transformers' fp32 tokens, logits and greedy continuation of a folder, and the smallest lead of a greedy token."""
    config = AutoConfig.from_pretrained(folder)
    model = get_auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(3, config.get_text_config().vocab_size, N_TOKENS))
    with torch.no_grad():
        # each prefix by itself: LongRoPE rotates long sequences differently from their first token on
        logits = torch.stack([model(tokens[None, : i + 1], use_cache=False).logits[0, -1] for i in range(N_TOKENS)])
        sequence = tokens[:N_PROMPT].tolist()
        leads = []
        for _ in range(N_CONTINUATION):
            best = model(torch.tensor([sequence]), use_cache=False).logits[0, -1].topk(2)
            leads.append(float(best.values[0] - best.values[1]))
            sequence.append(int(best.indices[0]))
        model.generation_config = GenerationConfig(max_new_tokens=N_CONTINUATION, do_sample=False)
        generated = model.generate(tokens[None, :N_PROMPT], attention_mask=torch.ones(1, N_PROMPT))[0].tolist()
    assert generated == sequence, "generate and passes over the whole sequence disagree"
    return tokens.numpy(), logits.numpy(), np.array(sequence[N_PROMPT:]), min(leads)


def compute_checksums(folder):
    """Return the CRC-32 of each tensor's bytes by name."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: zlib.crc32(tensor.flatten().view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}


def make(name, folder):
    config, dtype, others = MODELS[name]
    others = dict(others)
    is_minicpm = others.pop("as_minicpm", False)
    layer_types, as_ling = getattr(config.get_text_config(), "layer_types", None) or (), others.pop("as_ling", False)
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        model, has_mtp = (
            random_model(config, dtype, seed),
            "linear_attention" in layer_types and name.startswith("qwen3") and not name.endswith("_odd"),
        )
        save(model, folder, **others)
        if has_mtp:
            add_mtp(folder, model, dtype, seed)
        tokens, logits, continuation, lead = compute_expected(folder, seed)
        if lead > MIN_LEAD and len(set(continuation.tolist())) > 8:
            if as_ling:
                rename_as_ling(folder)
            sums = compute_checksums(folder)
            arrays = {"names": np.array(list(sums)), "sums": np.array(list(sums.values()))}
            if has_mtp:
                arrays["mtp_logits"] = compute_expected_mtp(folder, torch.from_numpy(tokens[:N_MTP]))
            if is_minicpm:
                rename_as_minicpm(folder)
            np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits, continuation=continuation, **arrays)
            return seed, lead
    raise SystemExit(f"{name}: no seed gives a greedy output without near ties")


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        seed, lead = make(name, FIXTURES / name)
        n_bytes = sum(path.stat().st_size for path in (FIXTURES / name).iterdir())
        print(f"{name}: seed {seed}, lead {lead:.3f}, {n_bytes} bytes")
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", "safetensors", "numpy")}
    (FIXTURES / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
