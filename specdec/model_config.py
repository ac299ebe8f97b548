"""Model configuration: sizes and options of every architecture, with their validation."""

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from specdec.argument_checks import MAX_SCALE, MIN_SCALE, ErrorMessages, check_positive, check_range, check_scales, prefix_errors
from specdec.head_config import AssistantConfig, HeadConfig
from specdec.mixer_config import MixerConfig
from specdec.runtime.simd import PANEL_ROWS, round_up

# A draft head that reads its target's KV cache, and the kv_layer of its layers
ASSISTANT, TARGET_KV_LAYER = "gemma4_assistant", -1
UNIFIED_ASSISTANT = "gemma4_unified_assistant"  # the same head with other defaults, for Gemma 4 12B
HEAD_ARCHITECTURES = ("eagle3", "mtp", ASSISTANT)  # architectures that draft from a target's hidden states
ConfigPart = TypeVar("ConfigPart")


def require_type(part: object, expected_type: type[ConfigPart]) -> ConfigPart:
    """Return a part of a config unchanged, typed as expected_type, after asserting that it is an instance.

    The type always fits: the caller was chosen by the type, or `ModelConfig.find_error` has checked it.
    """
    assert isinstance(part, expected_type)
    return part


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Settings of Llama 3.1's RoPE scaling ("llama3"), which extends the context beyond original_seq_len.

    Let n be the number of full rotations of a pair of rows in original_seq_len positions. The angle of a pair is divided by
    factor if n is below low_freq_factor, and stays as it is if n is above high_freq_factor. In between, the two are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int

    def find_errors(self) -> ErrorMessages:
        """Yield an error message for each invalid field of this config."""
        yield from check_range(self, 1, math.inf, "factor")
        yield from check_positive(self, "low_freq_factor", "original_seq_len")
        if not self.low_freq_factor < self.high_freq_factor < math.inf:
            yield f"high_freq_factor is {self.high_freq_factor}; expected more than low_freq_factor, {self.low_freq_factor}"


@dataclass(frozen=True)
class YarnRopeScaling:
    """Settings of YaRN's RoPE scaling (Peng et al. 2023, arXiv:2309.00071), which extends the context beyond original_seq_len.

    Let n be the number of full rotations of a pair of rows in original_seq_len positions. The angle of a pair stays as it is if
    n is beta_fast or more, and is divided by factor if n is beta_slow or less. In between, the two are interpolated.

    Attributes:
        truncate: Round the two limits of the interpolation outward to whole pairs.
    """

    factor: float
    original_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def find_errors(self) -> ErrorMessages:
        """Yield an error message for each invalid field of this config."""
        yield from check_range(self, 1, math.inf, "factor")
        yield from check_positive(self, "original_seq_len", "beta_fast", "beta_slow")
        if self.beta_fast < self.beta_slow:
            yield f"beta_fast is {self.beta_fast}; expected beta_slow, {self.beta_slow}, or more"


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Settings of multi-head latent attention, or MLA (DeepSeek-V2: DeepSeek-AI 2024, arXiv:2405.04434).

    Keys and values of all heads are made from one latent vector per token. The cache holds this vector and the part of the keys
    that RoPE rotates, which all heads share.

    Attributes:
        kv_rank: Number of rows of the latent vector.
        nope_dim: Number of rows of a query or key head that RoPE does not rotate.
        rope_dim: Number of rows that it rotates, which follow them.
        value_dim: Number of rows of a value head.
        q_rank: Number of rows of the latent vector that queries are made from. 0: they are made from the layer's input.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int = 0

    @property
    def head_dim(self) -> int:
        """Number of rows of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_width(self) -> int:
        """Number of columns of the latent vector in the KV cache, padded to whole panels."""
        return int(round_up(self.kv_rank, PANEL_ROWS))

    @property
    def cache_width(self) -> int:
        """Number of columns of a position in the KV cache: the latent vector and the rotated rows, each padded to panels."""
        return self.latent_width + int(round_up(self.rope_dim, PANEL_ROWS))

    def find_errors(self, config: "ModelConfig") -> ErrorMessages:
        """Yield an error message for each field that is invalid in the attention of a config."""
        yield from check_positive(self, "kv_rank", "nope_dim", "rope_dim", "value_dim")
        yield from check_range(self, 0, math.inf, "q_rank")
        if (config.head_dim, config.rotary_dim, config.n_kv_heads) != (self.head_dim, self.rope_dim, 1):
            sizes = f"{config.head_dim}, {config.rotary_dim} and {config.n_kv_heads}"
            yield f"head_dim, rope dim and n_kv_heads are {sizes}; expected {self.head_dim}, {self.rope_dim} and 1"
        a = config.attention
        if a.qkv_bias or a.wo_bias or a.qk_norm or a.value_norm or a.gate or a.sinks or a.values_are_keys or not a.has_rope:
            yield "other options of attention are set; expected RoPE, and none of them"
        if a.kv_layer is not None or a.rope.query_scale or a.rope.longrope_threshold:
            yield "kv_layer, query_scale or longrope_threshold is set; expected none of them"


@dataclass(frozen=True)
class ExpertsConfig:
    """Settings of mixture-of-experts MLPs, in which a router chooses some experts for each token.

    Attributes:
        n_experts_used: Number of experts per token.
        hidden_dim: Number of rows of the first matrix of each expert.
        norm_topk_prob: Divide the weights of the chosen experts by their sum.
        dense_layers: Indexes of the layers that have a plain MLP instead.
        is_sigmoid: Score experts by sigmoid; else by softmax.
        sparsemixer_threshold: Weigh each chosen expert by a softmax over the experts that are not chosen before it and not worse
            than it by more than this share (SparseMixer: Liu et al. 2024, arXiv:2409.12136). 0: no such weights.
        has_selection_bias: Add a bias to the scores that choose experts, but not to their weights.
        swiglu_limit: Limit of `clamped_swiglu`; experts and router then have biases. 0: use no clamp and no biases.
        swiglu_alpha: Alpha of `clamped_swiglu`.
        routed_scaling_factor: Factor of the weights of the chosen experts.
        shared_hidden_dim: Number of rows of the first matrix of the shared expert, which all tokens use. 0: there is none.
        shared_gate: Multiply the shared expert by the sigmoid of a matmul of its input.
        n_groups: Number of groups of as many consecutive experts. A token uses experts of n_groups_used groups: those with the
            largest sum of the two largest scores (is_sigmoid), or with the largest score. 1: no groups.
        n_groups_used: Number of groups that a token uses.
        sum_eps: Number added to the sum of sigmoids that weights are divided by.
        has_parallel_mlp: Run an MLP parallel to the experts. Both have norms of their own; each expert's weight has a factor.
    """

    n_experts: int
    n_experts_used: int
    hidden_dim: int
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()
    is_sigmoid: bool = False
    has_selection_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    routed_scaling_factor: float = 1.0
    shared_hidden_dim: int = 0
    shared_gate: bool = False
    has_parallel_mlp: bool = False
    n_groups: int = 1
    n_groups_used: int = 1
    sum_eps: float = 1e-6
    sparsemixer_threshold: float = 0.0

    def find_errors(self, n_layers: int) -> ErrorMessages:
        """Yield an error message for each field that is invalid in a model with n_layers layers."""
        if self.n_experts < 1 or self.hidden_dim < 1:
            yield f"n_experts and hidden_dim are {self.n_experts} and {self.hidden_dim}; expected positive numbers"
        yield from check_range(self, 1, self.n_experts, "n_experts_used")
        if not all(0 <= layer < n_layers for layer in self.dense_layers) or len({*self.dense_layers}) == n_layers:
            yield f"dense_layers are {self.dense_layers}; expected some, but not all, of {n_layers} layers"
        yield from check_range(self, MIN_SCALE, MAX_SCALE, "routed_scaling_factor")
        yield from check_range(self, 0, MAX_SCALE, "swiglu_limit", "swiglu_alpha")
        yield from check_range(self, 0, 1, "sum_eps")
        if self.shared_hidden_dim < 0 or (self.shared_gate and not self.shared_hidden_dim):
            yield f"shared_hidden_dim is {self.shared_hidden_dim}; expected a number of rows, or 0 and no shared_gate"
        if self.has_parallel_mlp and (
            self.swiglu_limit or self.is_sigmoid or self.shared_hidden_dim or self.dense_layers or not self.norm_topk_prob
        ):
            yield "has_parallel_mlp is true; expected a softmax of the chosen experts in all layers, and no shared expert"
        if self.has_selection_bias and not (self.is_sigmoid or self.norm_topk_prob):
            yield "has_selection_bias is true; expected is_sigmoid or norm_topk_prob to be true, too"
        if not 0 <= self.sparsemixer_threshold <= 1 or (
            self.sparsemixer_threshold and (self.is_sigmoid or self.has_selection_bias or self.n_groups > 1)
        ):
            yield f"sparsemixer_threshold is {self.sparsemixer_threshold}; expected 0, or up to 1 and plain scores"
        yield from self._find_group_errors()

    def _find_group_errors(self) -> ErrorMessages:
        """Yield the error messages of groups of experts."""
        if self.n_groups < 1 or self.n_experts % self.n_groups:
            yield f"n_groups is {self.n_groups}; expected a divisor of n_experts, {self.n_experts}"
        elif not 1 <= self.n_groups_used <= self.n_groups:
            yield f"n_groups_used is {self.n_groups_used}; expected 1 to n_groups, {self.n_groups}"
        elif self.n_groups > 1:
            group = self.n_experts // self.n_groups
            if group * self.n_groups_used < self.n_experts_used:
                yield f"n_groups_used is {self.n_groups_used}; expected enough groups for {self.n_experts_used} experts"
            if self.is_sigmoid and group < 2:
                yield f"n_groups is {self.n_groups}; expected groups of two experts or more"
            if self.norm_topk_prob and not self.is_sigmoid:
                yield f"n_groups is {self.n_groups}; expected norm_topk_prob to be false, or is_sigmoid to be true"


@dataclass(frozen=True)
class PerLayerInputsConfig:
    """Settings of per-layer inputs: dim numbers per token that each layer reads next to the residual stream (Gemma 4).

    The numbers come from a table with vocab_size rows and from the embedding.
    """

    dim: int
    vocab_size: int

    def find_errors(self, vocab_size: int) -> ErrorMessages:
        """Yield an error message for each field that is invalid in a model with vocab_size tokens."""
        yield from check_positive(self, "dim")
        if self.vocab_size < vocab_size:
            yield f"vocab_size is {self.vocab_size}; expected a row for each of {vocab_size} tokens"


@dataclass(frozen=True)
class RopeConfig:
    """Settings of rotary position embedding (RoPE: Su et al. 2021, arXiv:2104.09864).

    Attributes:
        theta: Base of the angles.
        dim: Number of rows of a head that are rotated, counted from its first. 0: all.
        freq_factors: Divisor of the angle of each pair of rows. Empty: angles are not divided.
        attention_factor: Factor of the rotated rows.
        long_freq_factors: freq_factors of sequences longer than longrope_threshold, from their first token on (LongRoPE).
        longrope_threshold: Length in tokens. 0: no LongRoPE.
        max_positions: Length in tokens beyond which the model has other angles, which are not supported. 0: no limit.
        query_scale: Multiply a query at position p by 1 + query_scale log(1 + p // query_span) (Llama 4). 0: no factor.
        query_span: See query_scale.
    """

    theta: float = 10000.0
    dim: int = 0
    scaling: Llama3RopeScaling | YarnRopeScaling | None = None
    freq_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    long_freq_factors: tuple[float, ...] = ()
    longrope_threshold: int = 0
    max_positions: int = 0
    query_scale: float = 0.0
    query_span: int = 0

    def find_errors(self, head_dim: int) -> ErrorMessages:
        """Yield an error message for each field that is invalid with attention heads of head_dim rows."""
        yield from check_range(self, 1, math.inf, "theta")  # no pair rotates by more than a radian per position
        if self.scaling:
            yield from prefix_errors("scaling", self.scaling.find_errors())
        if isinstance(self.scaling, YarnRopeScaling) and self.theta == 1:
            yield "theta is 1.0; expected more: YaRN needs pairs that rotate at different speeds"
        if self.dim % 2 or not 0 <= self.dim <= head_dim:
            yield f"dim is {self.dim}; expected an even number of a head's {head_dim} rows"
        n_pairs = (self.dim or head_dim) // 2
        for name, factors in (("freq_factors", self.freq_factors), ("long_freq_factors", self.long_freq_factors)):
            if factors and len(factors) != n_pairs:
                yield f"{name} are {len(factors)}; expected one for each of {n_pairs} pairs"
            if not all(0 < divisor < math.inf for divisor in factors):
                yield f"{name} are not all positive numbers"
        if (
            self.longrope_threshold < 0
            or (self.longrope_threshold > 0) != bool(self.long_freq_factors)
            or (self.longrope_threshold and self.query_scale)
        ):
            yield (
                f"longrope_threshold is {self.longrope_threshold}; expected a number of tokens if there are "
                f"long_freq_factors, else 0; query_scale is not supported with it"
            )
        yield from check_range(self, MIN_SCALE, MAX_SCALE, "attention_factor")
        if not 0 <= self.query_scale <= MAX_SCALE or (self.query_scale and self.query_span < 1):
            span = f"query_span is {self.query_span}"
            yield f"query_scale is {self.query_scale} and {span}; expected 0, or a scale and a span of 1 or more"


@dataclass(frozen=True)
class AttentionConfig:
    """Options of a layer's attention; the defaults are Llama's.

    Attributes:
        window: Number of positions that a token sees, including its own as the last. 0: all.
        has_rope: Rotate queries and keys by RoPE.
        qkv_bias: Add a bias to queries, keys and values.
        wo_bias: Add a bias to the output projection.
        qk_norm: Apply an RMSNorm to each head of queries and keys, or to each "rotated" head, after RoPE, or to the "whole" row
            of a token; with "plain", it has no weights.
        plain_query_scale: Factor of queries behind a "plain" norm.
        value_norm: Apply an RMSNorm without weights to each head of values.
        scale: Factor of attention scores. 0: 1 / sqrt(head_dim).
        softcap: Bound of attention scores: scores become softcap tanh(score / softcap), before the softmax. 0: no bound.
        gate: Multiply the attention output by the sigmoid of one more matmul, or by its "softplus"; this matmul
            has one row for each head if it is "head_softplus".
        sinks: Give each head's softmax one more score, a weight that belongs to no position.
        values_are_keys: Values are the keys before norm and RoPE.
        projection_scales: Factors of queries, keys and values behind their projections. Empty: none.
        kv_layer: Earlier layer to read keys and values from, or TARGET_KV_LAYER. None: the layer has its own.
        latent: Keys and values of all heads are made from a latent vector of each token (MLA).
    """

    rope: RopeConfig = RopeConfig()
    window: int = 0
    has_rope: bool = True
    qkv_bias: bool = False
    wo_bias: bool = False
    qk_norm: bool | Literal["rotated", "whole", "plain"] = False
    plain_query_scale: float = 1.0
    value_norm: bool = False
    scale: float = 0.0
    softcap: float = 0.0
    gate: bool | Literal["softplus", "head_softplus"] = False
    sinks: bool = False
    values_are_keys: bool = False
    projection_scales: tuple[float, ...] = ()
    kv_layer: int | None = None
    latent: LatentAttentionConfig | None = None

    def find_errors(self) -> ErrorMessages:
        """Yield an error message for each invalid field of this config, except those of RoPE and latent attention."""
        yield from check_range(self, 0, math.inf, "window")
        yield from check_range(self, 0, MAX_SCALE, "scale")
        yield from check_range(self, MIN_SCALE, MAX_SCALE, "plain_query_scale")
        yield from check_scales("projection_scales", self.projection_scales, 3)
        if not (self.softcap == 0 or MIN_SCALE <= self.softcap <= MAX_SCALE):
            yield f"softcap is {self.softcap}; expected {MIN_SCALE:g} to {MAX_SCALE:g}, or 0"


@dataclass(frozen=True)
class LayerConfig:
    """Settings of one layer that override those of its `ModelConfig`; None: the layer does not override this one.

    Attributes:
        mixer: Short convolution, delta net or Mamba-2 that replaces attention in this layer.

    The other attributes are those of `ModelConfig`.
    """

    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | None = None
    attention: AttentionConfig | None = None
    mixer: MixerConfig | None = None
    blocks: Literal["both", "first", "second"] | None = None


def make_layer_configs(layer_config: LayerConfig, layers: Collection[int], n_layers: int) -> tuple[LayerConfig, ...]:
    """Return a value for `ModelConfig.layers` that gives layer_config to the listed ones of n_layers layers.

    The tuple has one entry per layer; it is empty if no layer is listed.
    """
    return tuple(layer_config if i in layers else LayerConfig() for i in range(n_layers)) if layers else ()


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes and the options of its architecture.

    The first seven attributes are those of a llama2.c header.

    Attributes:
        shared_classifier: The classifier is the embedding.
        architecture: A name in `ARCHITECTURES`.
        norm_eps: Term in the denominator of a norm that avoids a division by 0.
        post_norm_eps: That of norms behind blocks. None: norm_eps.
        head_dim: Number of rows of an attention head. 0: dim / n_heads.
        attention: Options of attention.
        layers: Settings of each layer that differ (see `layer_config`). Empty: all layers are alike.
        mixer: Replacement of attention; set only in the config that `layer_config` returns.
        mlp_bias: MLPs have biases.
        blocks: Which of its two blocks a layer has: "first" is attention or what replaces it, "second" the MLP or experts.
        mlp_scales: Factors of the two matmuls of an MLP that the activation multiplies; of its own input first. Empty: none.
        activation: Activation of the gate; "relu2" and "gated_relu2" are the square of a ReLU. With "relu2" and "ungated_gelu",
            MLPs and experts have no gate; with "xielu", MLPs have none, and experts are not supported.
        experts: Mixture of experts in the place of MLPs.
        norm_placement: Norm a block's input ("before", pre-norm), its output ("behind", post-norm), or both ("around").
        sub_norms: Norm the inputs of the attention's output projection and of the MLP's down projection.
        embedding_scale: Factor of embeddings.
        embedding_norm: Apply an RMSNorm without weights to embeddings.
        learned_positions: Add a row for each position to embeddings; seq_len is then the maximum length of a sequence.
        residual_scale: Factor of what layers add to the residual stream.
        layer_scale: Each layer multiplies the residual stream by a factor of its own at its end.
        classifier_bias: Add a bias to logits.
        layer_norm: Norms of the residual stream are LayerNorms with biases; else RMSNorms.
        logit_divisor: Divisor of logits.
        logit_softcap: Bound of logits: logits become softcap tanh(logits / softcap), as the last step. 0: no bound.
        per_layer_inputs: Inputs of layers next to the residual stream.
        head: Settings of a draft head; vocab_size is then the target's.
    """

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    shared_classifier: bool = True
    architecture: str = "llama"
    norm_eps: float = 1e-5
    post_norm_eps: float | None = None
    head_dim: int = 0
    attention: AttentionConfig = AttentionConfig()
    layers: tuple[LayerConfig, ...] = ()
    mixer: MixerConfig | None = None
    blocks: Literal["both", "first", "second"] = "both"
    mlp_bias: bool = False
    mlp_scales: tuple[float, ...] = ()
    activation: Literal["silu", "gelu", "ungated_gelu", "relu2", "gated_relu2", "xielu"] = "silu"
    experts: ExpertsConfig | None = None
    norm_placement: Literal["before", "behind", "around"] = "before"
    sub_norms: bool = False
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    learned_positions: bool = False
    residual_scale: float = 1.0
    layer_scale: bool = False
    classifier_bias: bool = False
    layer_norm: bool = False
    logit_divisor: float = 1.0
    logit_softcap: float = 0.0
    per_layer_inputs: PerLayerInputsConfig | None = None
    head: HeadConfig | None = None

    def __post_init__(self) -> None:
        """Compute `head_dim` from the other sizes if it is 0."""
        if self.head_dim == 0 and self.n_heads > 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)

    def find_error(self) -> str:
        """Return the first error message of this config and its nested configs, or an empty string if it is valid."""
        return next(self._find_errors(), "")

    def _find_errors(self) -> ErrorMessages:
        yield from check_positive(self, "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
        if self.head_dim == self.dim // self.n_heads and self.dim % self.n_heads and not self.attention.latent:
            yield f"dim {self.dim} is not divisible by n_heads {self.n_heads}"
        if self.n_heads % self.n_kv_heads:
            yield f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
        yield from check_positive(self, "head_dim")
        if self.head_dim % 2 and self.attention.has_rope and not self.attention.latent:
            yield f"head_dim {self.head_dim} is odd; RoPE rotates pairs"
        for name, eps in (("norm_eps", self.norm_eps), ("post_norm_eps", self.post_norm_eps or 0.0)):
            if not 0 <= eps < math.inf:
                yield f"{name} is {eps}; expected 0 or more"
        yield from prefix_errors("rope", self.rope.find_errors(self.head_dim))
        yield from prefix_errors("attention", self.attention.find_errors())
        if self.attention.latent:
            yield from prefix_errors("latent attention", self.attention.latent.find_errors(self))
        yield from check_range(self, MIN_SCALE, MAX_SCALE, "embedding_scale", "residual_scale", "logit_divisor")
        yield from check_scales("mlp_scales", self.mlp_scales, 2)
        if self.mlp_scales and self.activation in ("relu2", "ungated_gelu", "xielu"):
            yield f"mlp_scales are {self.mlp_scales}; expected none with {self.activation}, which has no gate"
        yield from self._find_layer_errors()
        if (self.architecture in HEAD_ARCHITECTURES) != (self.head is not None):
            yield f"architecture is {self.architecture} and head is {self.head}; expected head for draft heads only"
        if self.experts:
            yield from prefix_errors("experts", self.experts.find_errors(self.n_layers))
            if self.activation == "xielu":
                yield "activation is xielu; expected MLPs without experts"
        yield from self._find_norm_and_input_errors()
        if self.head:
            yield from prefix_errors("head", self.head.find_errors(self.dim, self.vocab_size))
        if self.vocab_size < 3:
            yield f"vocab_size is {self.vocab_size}; BOS and EOS are the ids 1 and 2"

    def _find_norm_and_input_errors(self) -> ErrorMessages:
        """Yield the error messages of norms, per-layer inputs and the logit softcap."""
        if self.per_layer_inputs:
            yield from prefix_errors("per_layer_inputs", self.per_layer_inputs.find_errors(self.vocab_size))
        if not (self.logit_softcap == 0 or MIN_SCALE <= self.logit_softcap <= MAX_SCALE):
            yield f"logit_softcap is {self.logit_softcap}; expected {MIN_SCALE:g} to {MAX_SCALE:g}, or 0"
        if (self.per_layer_inputs or self.layer_scale) and (
            self.norm_placement != "around" or self.architecture not in ("llama", ASSISTANT)
        ):
            yield f"norm_placement is {self.norm_placement}; expected around with per_layer_inputs or layer_scale"
        if self.experts and self.experts.has_parallel_mlp != (self.norm_placement == "around"):
            expected = "around if experts run in parallel to an MLP, else before or behind"
            yield f"norm_placement is {self.norm_placement}; expected {expected}"
        if (self.layer_norm or self.classifier_bias) and (
            self.norm_placement != "before" or self.residual_scale != 1 or self.logit_divisor != 1
        ):
            yield "layer_norm or classifier_bias is true; expected norm_placement before and no scales"
        if self.sub_norms and (self.norm_placement != "before" or self.experts or self.layers):
            yield "sub_norms is true; expected norm_placement before, equal layers and no experts"
        if self.norm_placement != "before" and self.residual_scale != 1:
            yield f"norm_placement is {self.norm_placement}; expected before if residual_scale is not 1"

    def _find_layer_errors(self) -> ErrorMessages:
        """Yield the error messages of the settings that layers override."""
        if len(self.layers) not in (0, self.n_layers):
            yield f"layers has {len(self.layers)} entries; expected one for each of {self.n_layers} layers, or none"
        ropes = self.list_ropes()
        has_several_ropes = len(ropes) > 1 or any(overrides.head_dim for overrides in self.layers)
        if any(layer.attention and layer.attention.latent != self.attention.latent for layer in self.layers):
            yield "layers have different latent attention; expected the same in all"
        if has_several_ropes and any(rope.longrope_threshold or rope.query_scale for rope in ropes):
            yield "layers have different RoPE settings; expected no longrope_threshold and no query_scale"
        mixers = {overrides.mixer for overrides in self.layers if overrides.mixer}
        if len(mixers) > 1:
            yield f"layers have {len(mixers)} kinds of mixers; expected one, next to attention"
        if self.mixer or (self.layers and not any(self.layer_config(i).has_attention for i in range(len(self.layers)))):
            yield "all layers have mixers; expected attention in some"
        for mixer in mixers:
            yield from prefix_errors("mixer", mixer.find_errors())
        checked = set[LayerConfig]()
        for i, overrides in enumerate(self.layers):
            layer = self.layer_config(i)
            if overrides not in checked:
                yield from prefix_errors(f"layer {i}", replace(layer, mixer=None)._find_errors())
            checked.add(overrides)
            source = layer.attention.kv_layer
            if self.architecture == ASSISTANT and source != TARGET_KV_LAYER:
                yield f"layer {i}'s kv_layer is {source}; expected {TARGET_KV_LAYER}, a layer of its target"
            if self.architecture == ASSISTANT or source is None:
                continue
            expected = replace(layer, hidden_dim=self.hidden_dim, attention=replace(layer.attention, kv_layer=None))
            if not 0 <= source < i or expected != replace(self.layer_config(source), hidden_dim=self.hidden_dim):
                yield f"layer {i}'s kv_layer is {source}; expected an earlier layer like it that has its own keys and values"

    def layer_config(self, i: int) -> "ModelConfig":
        """Return a config with the overrides of layer i applied: that of a model in which every layer is like layer i."""
        return self._layer_configs[i] if self.layers else self

    @functools.cached_property
    def _layer_configs(self) -> "tuple[ModelConfig, ...]":
        """The result of `layer_config` for each layer; layers that are alike share one object."""
        changes = {
            overrides: {name: value for name, value in vars(overrides).items() if value is not None}
            for overrides in {*self.layers}
        }
        configs = {overrides: replace(self, layers=(), **fields) for overrides, fields in changes.items()}
        return tuple(configs[overrides] for overrides in self.layers)

    @property
    def rope(self) -> RopeConfig:
        """RoPE settings of this config's attention."""
        return self.attention.rope

    @property
    def q_dim(self) -> int:
        """Number of rows of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def output_dim(self) -> int:
        """Number of rows of the outputs of all heads together."""
        return self.n_heads * (self.attention.latent.value_dim if self.attention.latent else self.head_dim)

    @property
    def rope_table_dim(self) -> int:
        """Number of rows that RoPE's tables describe: a head, or the rows of it that RoPE rotates in latent attention."""
        return self.attention.latent.rope_dim if self.attention.latent else self.head_dim

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention, alone or next to a mixer; only of a config that `layer_config` returns."""
        is_replaced = self.mixer is not None and not getattr(self.mixer, "is_parallel", False)
        return self.blocks != "second" and not is_replaced

    @property
    def has_own_kv(self) -> bool:
        """Whether attention computes keys and values of its own, not reading those of another layer."""
        return self.attention.kv_layer is None

    @property
    def kv_dim(self) -> int:
        """Number of rows of all key heads together, and of all value heads."""
        return self.n_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of rows of a head that RoPE rotates."""
        return self.rope.dim or self.head_dim

    def list_ropes(self) -> set[RopeConfig]:
        """Return the RoPE settings of all layers."""
        return {self.rope, *(overrides.attention.rope for overrides in self.layers if overrides.attention)}

    def extend_to_yarn_context(self) -> "ModelConfig":
        """Return this config with a seq_len of YaRN's factor times its original context if that is more."""
        scalings = [rope.scaling for rope in self.list_ropes() if isinstance(rope.scaling, YarnRopeScaling)]
        extended = [int(scaling.factor * scaling.original_seq_len) for scaling in scalings]
        return replace(self, seq_len=max(self.seq_len, *extended)) if extended else self

    @property
    def max_positions(self) -> int:
        """Smallest max_positions of the layers' RoPE, in tokens. 0: no limit."""
        return min({rope.max_positions for rope in self.list_ropes()} - {0}, default=0)

    def has_long_rope(self, n_tokens: int) -> bool:
        """Return whether a sequence of n_tokens tokens is so long that RoPE uses long_freq_factors (LongRoPE)."""
        return 0 < self.rope.longrope_threshold < n_tokens

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys before the softmax, rounded to float32."""
        return float(self.attention.scale or np.float32(1) / np.sqrt(np.float32(self.head_dim)))

    @property
    def attention_window(self) -> int:
        """Maximum number of positions that a token sees, including its own as the last.

        In a sequence longer than seq_len, a token sees a sliding window of seq_len positions at most.
        """
        return min(self.attention.window or self.seq_len, self.seq_len)


def get_assistant_config(config: ModelConfig) -> AssistantConfig:
    """Return the `AssistantConfig` in an assistant's configuration, which `ModelConfig.find_error` has checked."""
    return require_type(config.head, AssistantConfig)


def find_kv_source_layers(config: ModelConfig, target: ModelConfig) -> list[int]:
    """Return for each layer of the assistant the index of the target's layer from which it reads keys and values.

    It is the target's last layer of the same attention type that has its own KV cache.

    Raises:
        ValueError: If the target has no such layer, or the number or size of its KV heads differs.
    """
    last = {bool(target.layer_config(i).attention.window): i for i in range(target.n_layers) if target.layer_config(i).has_own_kv}
    found = []
    for layer in map(config.layer_config, range(config.n_layers)):
        name = "sliding-window attention" if layer.attention.window else "full attention"
        source = last.get(bool(layer.attention.window))
        if source is None:
            raise ValueError(f"it reads the keys and values of a layer with {name}; the target has none")
        expected, actual = (f"{each.n_kv_heads} x {each.head_dim}" for each in (layer, target.layer_config(source)))
        if expected != actual:
            raise ValueError(f"it reads keys of {expected} numbers in layers with {name}; the target's are {actual}")
        found.append(source)
    return found
