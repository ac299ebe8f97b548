"""What families say alike in a GGUF file's keys, and the names of Llama's tensors there. Knows no family.

Keys, names and what a silent file means are llama.cpp's (gguf-py's constants.py, src/llama-model.cpp).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from specdec.config import LEAST_SCALE, AttentionConfig, ExpertsConfig, RopeConfig, YarnScaling
from specdec.families.config_values import WIDEST
from specdec.families.family import Keys
from specdec.families.hf_common import MAX_THETA
from specdec.families.tensor_specs import EXPERTS_GATED, OF_EXPERTS, TURNED, Place, changed, named, together
from specdec.layers.rope import yarn_scale

EMBEDDING, HEAD, ROPE_DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
MLP_DIM, EXPERT_DIM = "feed_forward_length", "expert_feed_forward_length"
BY_LAYER = ("attention.head_count", "attention.head_count_kv", MLP_DIM, EXPERT_DIM)  # one, or a list of one a layer
WINDOW, EXPERTS, QUERY_SCALE = "attention.sliding_window", "expert_count", "attention.temperature_scale"
GATING, SOFTMAX, SIGMOID = "expert_gating_func", 1, 2
ATTENTION_FACTOR, NEXTN = "rope.scaling.attn_factor", "nextn_predict_layers"
# what other arithmetic than ours is asked for by, behind the architecture's name, and the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    key: neutral
    for neutral, keys in (
        ((0, None), f"{EXPERTS} {WINDOW} {QUERY_SCALE} {NEXTN} attn_logit_softcapping final_logit_softcapping attention.scale"),
        ((0, None), "attention.clamp_kqv attention.max_alibi_bias rope.scaling.alpha"),
        ((1, 0, None), f"{ATTENTION_FACTOR} logit_scale residual_scale embedding_scale"),
        ((1, None), "rope.scaling.yarn_ext_factor"),
        ((0, 1, None), "expert_group_count"),
        ((False, None), "use_parallel_residual norm_output"),
        ((True, None), "attention.causal"),
        (("silu", None), "hidden_activation"),
        ((SOFTMAX, 0, None), GATING),
    )
    for key in keys.split()
}
OF_LAYERS, BIASES = "blk.{}.%s.weight", "blk.{}.%s.bias"
OUTER_PLACES = {"tok_emb": Place(EMBEDDING), "wcls": Place(HEAD)}
PAIRS_PLACES = (  # of families whose q and k llama.cpp's converter stores in adjacent pairs
    OUTER_PLACES
    | {"rms_final": Place("output_norm.weight")}
    | named(
        OF_LAYERS, rms_att="attn_norm", wq="attn_q", wk="attn_k", wv="attn_v", wo="attn_output", q_norm="attn_q_norm",
        k_norm="attn_k_norm", rms_ffn="ffn_norm", w1="ffn_gate", w2="ffn_down", w3="ffn_up",
    )
    | named(
        BIASES, bq="attn_q", bk="attn_k", bv="attn_v", bo="attn_output", b1="ffn_gate", b2="ffn_down", b3="ffn_up"
    )
)  # fmt: skip
PLACES = changed(PAIRS_PLACES, TURNED, halves=True)
NORMS_BEHIND = named(OF_LAYERS, rms_att_out="post_attention_norm", rms_ffn_out="post_ffw_norm")
EXPERTS_PLACES = named(BIASES, router_bias="exp_probs_b") | changed(
    named(
        OF_LAYERS, router="ffn_gate_inp", experts_w1="ffn_gate_exps", experts_w2="ffn_down_exps", experts_w3="ffn_up_exps",
        shared_w1="ffn_gate_shexp", shared_w2="ffn_down_shexp", shared_w3="ffn_up_shexp", shared_gate="ffn_gate_inp_shexp",
    ),
    OF_EXPERTS, each=True,
)  # fmt: skip
EXPERTS_IN_ONE = together(EXPERTS_GATED, OF_LAYERS % "ffn_gate_up_exps", each=True)
YARN_SCALE, CLOSE = "rope.scaling.yarn_attn_factor", 1e-3  # which llama.cpp computes anew; what rounding moves
BETAS = "beta_fast", "beta_slow"


def numbers(
    k: Keys, is_partial: bool = False, n_kv_heads: int | None = None, has_biases: bool = True, **own: Any
) -> dict[str, Any]:
    """The numbers of a family that is like Llama. Raises CheckpointError.

    is_partial: whether RoPE may turn a part of a head; n_kv_heads: where it is told otherwise than in one number; has_biases:
    whether those that lie in a file are added; own: what else attention does.
    """
    n_heads = k.common["n_heads"]
    head_dim = k.whole("attention.key_length", k.common["dim"] // n_heads, WIDEST)
    for name in ("attention.value_length", "rope.dimension_count")[: 1 if is_partial else 2]:
        if k.whole(name, head_dim) != head_dim:
            raise k.refusal(name, f"{head_dim}, a head's length")
    n_turned = k.whole("rope.dimension_count", head_dim, WIDEST)
    return {
        **k.common,
        "n_kv_heads": n_kv_heads or k.whole("attention.head_count_kv", n_heads),
        "norm_eps": k.real("attention.layer_norm_rms_epsilon", 0, 1),
        "head_dim": head_dim,
        "attention": AttentionConfig(
            _rope(k, n_turned, head_dim),
            qkv_bias=has_biases and "blk.0.attn_q.bias" in k.tensors,
            wo_bias=has_biases and "blk.0.attn_output.bias" in k.tensors,
            **own,
        ),
        "mlp_bias": has_biases and "blk.0.ffn_gate.bias" in k.tensors,
        "experts": experts(k) if k[EXPERTS] not in (0, None) else None,
    }


def _rope(k: Keys, n_turned: int, head_dim: int) -> RopeConfig:
    """What scales its angles: of each pair, one number for all, or yarn; and its queries."""
    kind, older, factor = "rope.scaling.type", "rope.scale_linear", "rope.scaling.factor"
    k.must_be(kind, "linear", "yarn", "none", None)
    said = factor if factor in k else older
    common = (k.real(said, 0, 1e6, 0.0) if k[kind] != "none" else 0.0) or 1.0  # 0 stands for none, too
    divisors: tuple[float, ...] = ()
    if ROPE_DIVISORS in k.tensors:  # as Llama 3.1 has them
        divisors = tuple(float(x) for x in k.tensors.tensor(ROPE_DIVISORS, (n_turned // 2,))[:])
    theta = k.real("rope.freq_base", 1, MAX_THETA, 10000.0)
    found = RopeConfig(theta, 0 if n_turned == head_dim else n_turned, divisors=divisors)
    span = k.whole("rope.scaling.original_context_length", k.common["seq_len"])
    if QUERY_SCALE in k:
        found = replace(found, query_scale=float(np.float32(k.real(QUERY_SCALE, 0, 1e6))), query_span=span)
    if k[kind] != "yarn":
        if YARN_SCALE in k:
            k.must_be(YARN_SCALE, 1)
        scaled = tuple(common * each for each in divisors or (1.0,) * (n_turned // 2))
        return found if common == 1 else replace(found, divisors=scaled)
    betas: dict[str, Any] = {name: k.real(each, 1e-6, 1e6) for name in BETAS if (each := f"rope.scaling.yarn_{name}") in k}
    share = k.real("rope.scaling.yarn_log_multiplier", 0, 1e6, 0.0)
    if common < 1:
        raise k.refusal(said, "a number from 1 on")
    rope_scale = yarn_scale(common) / (yarn_scale(common, share) if share else 1.0)
    if YARN_SCALE in k and k[YARN_SCALE] != 1 and abs(k.real(YARN_SCALE, 0, 1e6) - rope_scale) > CLOSE:
        raise k.refusal(YARN_SCALE, f"{rope_scale:.4g}, which follows from the factor, or 1")
    return replace(found, scaling=YarnScaling(common, span, **betas), scale=float(np.float32(rope_scale)))


def full_layers(k: Keys, every: int = 0) -> set[int]:
    """Those that have no window, as a list of all says; every: without a list each so many-th, or as many as the key says."""
    key, n_layers = f"{WINDOW}_pattern", k.common["n_layers"]
    if every and not isinstance(k[key], list):
        every = k.whole(key, every)
        return {*range(every - 1, n_layers, every)}
    flags = k.of_layers(key, n_layers, (True, False), "true or false")
    return {i for i, flag in enumerate(flags) if not flag}


def experts(k: Keys, **more: Any) -> ExpertsConfig:
    """Layers without experts are told by their tensors; what the chosen ones count is divided by their sum, as in llama.cpp."""
    router, n_layers = EXPERTS_PLACES["router"].name, k.common["n_layers"]
    return ExpertsConfig(
        n=k.whole(EXPERTS),
        n_chosen=k.whole("expert_used_count"),
        hidden_dim=k.whole(EXPERT_DIM, k.common["hidden_dim"]),
        dense_layers=tuple(i for i in range(n_layers) if router.format(i) not in k.tensors),
        scale=k.real("expert_weights_scale", 0, 1 / LEAST_SCALE, 1.0) or 1.0,  # 0 stands for none, too
        shared_dim=k.count("expert_shared_feed_forward_length"),
        **more,
    )
