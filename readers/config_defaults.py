"""What a config.json of each family that is read says where it is silent, as transformers 5.23 has it (`configuration_*.py`)."""

from typing import Any

LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": None, "rope_theta": 10000.0,
}  # fmt: skip
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
QWEN2_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "bos_token_id": None, "eos_token_id": None, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}  # fmt: skip
GRANITE_DEFAULTS = LLAMA_DEFAULTS | {
    "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
}  # fmt: skip
SMOLLM3_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
    "use_sliding_window": False, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "rope_theta": 2e6,
}  # fmt: skip
PHI3_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "use_bidirectional_attention": False,
}  # fmt: skip
MINISTRAL3_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
}  # fmt: skip
MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LFM2_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_key_value_heads": 8,
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6, "conv_bias": False,
    "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None, "layer_types": None,
}  # fmt: skip
GPT2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
QWEN35_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None, "partial_rotary_factor": 0.25,
    "layer_types": None, "full_attention_interval": 4, "attn_output_gate": True, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
QWEN3_MOE_DEFAULTS = QWEN2_DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4, "sliding_window": None,
    "max_window_layers": 0, "num_experts": None, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": False, "mlp_only_layers": None, "decoder_sparse_step": 1,
}  # fmt: skip
MIXTRAL_DEFAULTS = MISTRAL_DEFAULTS | {
    "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DEFAULTS = {
    "llama": LLAMA_DEFAULTS,
    "mistral": MISTRAL_DEFAULTS,
    "qwen2": QWEN2_DEFAULTS,
    "qwen3": QWEN2_DEFAULTS | {"head_dim": 128},
    "qwen3_moe": QWEN3_MOE_DEFAULTS,
    "mixtral": MIXTRAL_DEFAULTS,
    "granite": GRANITE_DEFAULTS,
    "granitemoehybrid": GRANITE_DEFAULTS
    | {"num_local_experts": 8, "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None},
    "smollm3": SMOLLM3_DEFAULTS,
    "phi3": PHI3_DEFAULTS,
    "gemma3_text": GEMMA3_DEFAULTS,
    "ministral3": MINISTRAL3_DEFAULTS,
    "lfm2": LFM2_DEFAULTS,
    "qwen3_5_text": QWEN35_DEFAULTS,
    "gpt2": GPT2_DEFAULTS,
}
