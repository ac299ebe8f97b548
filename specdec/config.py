"""The numbers that every architecture is described by. Knows no file."""

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

MOST_TAPS = 16  # of a convolution
LEAST_SCALE = 1e-6  # and its inverse the most: squares of scales, too, are numbers in float32
ASSISTANT, OF_TARGET = "gemma4_assistant", -1  # a head of layers whose keys and values are its target's, and their kv_layer
HEADS = ("eagle3", "mtp", ASSISTANT)  # architectures that draft from a target's hidden states
N_HIDDEN = 3  # of a target's hidden states make a feature where a head's file does not tell which: low, middle and high
Flaws = Iterator[str]  # what keeps numbers from being what they describe, in words; the first one is told
Numbers = TypeVar("Numbers")


def not_positive(numbers: object, *names: str) -> Flaws:
    """Those of a record's numbers that are not above 0."""
    for name in names:
        if not 0 < getattr(numbers, name) < math.inf:
            yield f"{name} is {getattr(numbers, name)}; expected a positive number"


def not_within(numbers: object, *names: str, least: float = LEAST_SCALE) -> Flaws:
    """Those of a record's numbers that are no scales."""
    for name in names:
        if not least <= getattr(numbers, name) <= 1 / LEAST_SCALE:
            yield f"{name} is {getattr(numbers, name)}; expected {least:g} to {1 / LEAST_SCALE:g}"


def of_part(name: str, flaws: Flaws) -> Flaws:
    """The same of a record in another one."""
    of_name = f"{name}'" if name.endswith("s") else f"{name}'s"
    return (f"{of_name} {flaw}" for flaw in flaws)


def known_as(numbers: object, kind: type[Numbers]) -> Numbers:
    """A part of a config that is there: whoever asks for it has been chosen by it, or `Config.flaw` has asked before."""
    assert isinstance(numbers, kind)
    return numbers


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's "llama3": angles slower than low_freq_factor turns in original_seq_len positions are divided by factor, those
    faster than high_freq_factor are not, and between them it fades.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int

    def flaws(self) -> Flaws:
        yield from not_positive(self, "factor", "low_freq_factor", "original_seq_len")
        if self.factor < 1:
            yield f"factor is {self.factor}; expected 1 or more"
        if not self.low_freq_factor < self.high_freq_factor < math.inf:
            yield f"high_freq_factor is {self.high_freq_factor}; expected more than low_freq_factor, {self.low_freq_factor}"


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): angles of pairs that turn beta_fast times in original_seq_len positions, or more
    often, are not divided, those of pairs that turn beta_slow times, or less often, by factor, and between them it fades.

    in_whole_pairs: whether it fades from a whole pair to a whole pair, which lie beyond the two.
    """

    factor: float
    original_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    in_whole_pairs: bool = True

    def flaws(self) -> Flaws:
        yield from not_positive(self, "factor", "original_seq_len", "beta_fast", "beta_slow")
        if self.factor < 1:
            yield f"factor is {self.factor}; expected 1 or more"
        if self.beta_fast < self.beta_slow:
            yield f"beta_fast is {self.beta_fast}; expected beta_slow, {self.beta_slow}, or more"


@dataclass(frozen=True)
class ConvConfig:
    """Short convolutions (LFM2: Liquid AI 2025, arXiv:2511.23404), which stand in the place of attention in some layers.

    n_taps: how many tokens, its own the last, one sees; bias: whether it and the products around it add one.
    """

    n_taps: int = 3
    bias: bool = False

    def flaws(self) -> Flaws:
        if not 0 < self.n_taps <= MOST_TAPS:
            yield f"n_taps is {self.n_taps}; expected 1 to {MOST_TAPS}"


@dataclass(frozen=True)
class DeltaConfig:
    """A gated delta net (Yang et al. 2025, arXiv:2412.06464), which stands in the place of attention in some layers.

    n_taps: of its convolution; n_key_heads of key_dim rows for queries and as many for keys, n_value_heads of
    value_dim rows, of which in a row, or in_turns, as many share a head of keys.
    """

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    n_taps: int = 4
    in_turns: bool = False

    @property
    def n_values(self) -> int:
        return self.n_value_heads * self.value_dim

    @property
    def n_mixed(self) -> int:
        """What the convolution goes over: queries, keys and values."""
        return 2 * self.n_key_heads * self.key_dim + self.n_values

    def flaws(self) -> Flaws:
        yield from not_positive(self, "n_key_heads", "n_value_heads", "key_dim", "value_dim", "n_taps")
        if self.n_value_heads % self.n_key_heads:
            yield f"n_value_heads {self.n_value_heads} is not divisible by n_key_heads {self.n_key_heads}"
        if self.n_taps > MOST_TAPS:
            yield f"n_taps is {self.n_taps}; expected at most {MOST_TAPS}"


@dataclass(frozen=True)
class HeadConfig:
    """What a head that drafts needs beside a model's numbers (EAGLE-3: Li et al. 2025, arXiv:2503.01840).

    target_dim: width of the target's hidden states; layers: before which of the target's layers they are taken, n_layers for
    behind the last; none where the file does not tell (`layers_of`). n_rows: of its classifier. own_embedding, own_classifier:
    whether it has them, else they are the target's. norm_before_residual: whether the residual stream takes the feature normed.
    fc_norm: what is normed before fc: nothing, "each" of the states, or the "whole" row. norm_output: whether outputs are normed
    before they are fed back.
    """

    target_dim: int
    layers: tuple[int, ...]
    n_rows: int
    own_embedding: bool
    own_classifier: bool
    norm_before_residual: bool = False
    fc_norm: Literal["", "each", "whole"] = ""
    norm_output: bool = False
    made_for: str = ""

    @property
    def n_states(self) -> int:
        """How many of the target's hidden states make a feature."""
        return len(self.layers) or N_HIDDEN

    def layers_of(self, n_layers: int) -> tuple[int, ...]:
        """Before which layers of a target of so many the hidden states are taken."""
        return self.layers or (2, n_layers // 2, n_layers - 3)

    def flaws(self, dim: int, vocab_size: int) -> Flaws:
        """Of a head of that width for that vocabulary."""
        yield from not_positive(self, "target_dim")
        if not 0 < self.n_rows <= vocab_size:
            yield f"n_rows is {self.n_rows}; expected 1 to vocab_size, {vocab_size}"
        if dim != self.target_dim and not (self.own_embedding and self.own_classifier):
            yield f"dim is {dim}; a head that takes the target's embedding or classifier has target_dim, {self.target_dim}"
        if self.n_rows != vocab_size and not self.own_classifier:
            yield f"n_rows is {self.n_rows}; the target's classifier has {vocab_size}"


@dataclass(frozen=True)
class ExpertsConfig:
    """Of layers whose MLP is a mixture of experts.

    n: how many there are, n_chosen: that a token goes through, hidden_dim: rows of each one's first matrix; is_normed: whether
    what the chosen ones count is divided by their sum; dense_layers: those that have an MLP instead; is_sigmoid: whether scores
    count by their sigmoid, else by their softmax; is_biased: whether something is added to what chooses; limit, alpha: of
    `clamped_swiglu`, which products with biases go through then, and the router has one, too (0: are not, and have none); scale:
    of what the chosen ones count; shared_dim: rows of the first matrix of one that all tokens go through, 0: there is none;
    shared_gate: whether that one is gated by a product; is_beside: whether an MLP stands beside, each with norms of its own, of
    weights that an expert's own factor multiplies.
    """

    n: int
    n_chosen: int
    hidden_dim: int
    is_normed: bool = True
    dense_layers: tuple[int, ...] = ()
    is_sigmoid: bool = False
    is_biased: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    scale: float = 1.0
    shared_dim: int = 0
    shared_gate: bool = False
    is_beside: bool = False

    def flaws(self, n_layers: int) -> Flaws:
        if self.n < 1 or self.hidden_dim < 1:
            yield f"n and hidden_dim are {self.n} and {self.hidden_dim}; expected positive numbers"
        if not 1 <= self.n_chosen <= self.n:
            yield f"n_chosen is {self.n_chosen}; expected 1 to {self.n}"
        if not all(0 <= layer < n_layers for layer in self.dense_layers) or len({*self.dense_layers}) == n_layers:
            yield f"dense_layers are {self.dense_layers}; expected some of {n_layers} layers"
        yield from not_within(self, "scale")
        if self.shared_dim < 0 or (self.shared_gate and not self.shared_dim):
            yield f"shared_dim is {self.shared_dim}; expected a number of rows, or 0 and no shared_gate"
        if not 0 <= self.limit <= 1 / LEAST_SCALE or not 0 <= self.alpha <= 1 / LEAST_SCALE:
            yield f"limit and alpha are {self.limit} and {self.alpha}; expected 0 to {1 / LEAST_SCALE:g}"
        if self.is_beside and (self.limit or self.is_sigmoid or self.shared_dim or self.dense_layers or not self.is_normed):
            yield "is_beside an MLP; expected a softmax of the chosen ones in all layers, and no shared one"
        if self.is_biased and not self.is_sigmoid:
            yield "is_biased, of a softmax; expected of sigmoids"


@dataclass(frozen=True)
class InputsConfig:
    """What each layer takes of a token beside the residual stream (Gemma 4): dim numbers, of a table of n_rows tokens and of the
    embedding.
    """

    dim: int
    n_rows: int

    def flaws(self, vocab_size: int) -> Flaws:
        yield from not_positive(self, "dim")
        if self.n_rows < vocab_size:
            yield f"n_rows is {self.n_rows}; expected a row for each of {vocab_size} tokens"


@dataclass(frozen=True)
class RopeConfig:
    """How heads are turned (Su et al. 2021, arXiv:2104.09864).

    theta: the base of the angles; dim: how many rows of a head, its first, are turned (0: all); divisors: of each pair's angle,
    none for 1; scale: what turned rows are multiplied by; long_divisors, n_short: a text of more than n_short tokens has those
    divisors, from its first token on (0: none has); query_scale, query_span: a query at position p is multiplied by 1 +
    query_scale log(1 + p // query_span) (Llama 4; 0: is not).
    """

    theta: float = 10000.0
    dim: int = 0
    scaling: RopeScaling | YarnScaling | None = None
    divisors: tuple[float, ...] = ()
    scale: float = 1.0
    long_divisors: tuple[float, ...] = ()
    n_short: int = 0
    query_scale: float = 0.0
    query_span: int = 0

    def flaws(self, head_dim: int) -> Flaws:
        """Of what turns heads of that length."""
        if not 1 <= self.theta < math.inf:  # no pair turns by more than a radian a position
            yield f"theta is {self.theta}; expected 1 or more"
        if self.scaling:
            yield from of_part("scaling", self.scaling.flaws())
        if isinstance(self.scaling, YarnScaling) and self.theta == 1:
            yield "theta is 1.0; expected more: all pairs turn alike, and yarn cannot tell fast ones"
        if self.dim % 2 or not 0 <= self.dim <= head_dim:
            yield f"dim is {self.dim}; expected an even number of a head's {head_dim} rows"
        n_pairs = (self.dim or head_dim) // 2
        for name, of_pairs in (("divisors", self.divisors), ("long_divisors", self.long_divisors)):
            if of_pairs and len(of_pairs) != n_pairs:
                yield f"{name} are {len(of_pairs)}; expected one for each of {n_pairs} pairs"
            if not all(0 < divisor < math.inf for divisor in of_pairs):
                yield f"{name} are not all positive numbers"
        if self.n_short < 0 or (self.n_short > 0) != bool(self.long_divisors) or (self.n_short and self.query_scale):
            yield f"n_short is {self.n_short}; expected a number of tokens beside long_divisors, else 0, and no query_scale"
        yield from not_within(self, "scale")
        if not 0 <= self.query_scale <= 1 / LEAST_SCALE or (self.query_scale and self.query_span < 1):
            yield f"query_scale is {self.query_scale} by {self.query_span} positions; expected 0, or a number by 1 or more"


@dataclass(frozen=True)
class AttentionConfig:
    """What attention does beside Llama's.

    window: how many positions, its own the last, a token sees (0: all); is_turned: whether RoPE turns queries and keys;
    qkv_bias, wo_bias: which products add a bias; qk_norm: whether queries and keys go through an RMSNorm for each head, or the
    "whole" of a token's; value_norm: whether values are normed, head by head, by no weights; scale: of scores (0 stands for
    1 / sqrt(head_dim)); gate: whether what it mixes is gated; sinks: whether each head has a score that is no position's;
    values_are_keys: whether values are what keys are before they are normed and turned; kv_layer: an earlier layer, whose keys
    and values a layer takes instead of its own, or OF_TARGET.
    """

    rope: RopeConfig = RopeConfig()
    window: int = 0
    is_turned: bool = True
    qkv_bias: bool = False
    wo_bias: bool = False
    qk_norm: bool | Literal["whole"] = False
    value_norm: bool = False
    scale: float = 0.0
    gate: bool = False
    sinks: bool = False
    values_are_keys: bool = False
    kv_layer: int | None = None

    def flaws(self) -> Flaws:
        """But for its RoPE's."""
        if self.window < 0:
            yield f"window is {self.window}; expected a number of positions, or 0 for all"
        yield from not_within(self, "scale", least=0)


@dataclass(frozen=True)
class LayerConfig:
    """What a layer has of its own; None: what the config says of all.

    n_kv_heads, head_dim, hidden_dim, attention: as of `Config`; mixer: what stands in the place of attention.
    """

    n_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | None = None
    attention: AttentionConfig | None = None
    mixer: ConvConfig | DeltaConfig | None = None


def of_some(own: LayerConfig, layers: Collection[int], n_layers: int) -> tuple[LayerConfig, ...]:
    """`Config.layers` where some of n_layers have that of their own."""
    return tuple(own if i in layers else LayerConfig() for i in range(n_layers)) if layers else ()


@dataclass(frozen=True)
class Config:
    """A model's sizes, and what its architecture leaves open.

    The first seven are a llama2.c header's; shared_classifier: whether the classifier is the embedding; architecture: a name in
    `ARCHITECTURES`; norm_eps: what keeps a norm from dividing by 0; head_dim: 0 stands for dim / n_heads; attention: how layers
    mix positions; layers: what each layer has of its own, nothing where all are alike (`of_layer`); mixer: of such a layer alone,
    what stands in the place of attention; mlp_bias: whether MLPs add biases; activation: what gates them; experts: of layers
    whose MLP is a mixture; norms: where they stand, of what a block takes, of what it makes, or of both; embedding_scale: what
    embeddings are multiplied by, residual_scale: what layers add to the residual stream; layer_scale: whether a layer ends by a
    factor of that; logit_divisor: what divides logits, logit_cap: what tanh keeps them below, in the end (0: does not); inputs:
    what layers take of a token beside the stream; head: what else a head that drafts needs, of whose target vocab_size counts the
    tokens.
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
    head_dim: int = 0
    attention: AttentionConfig = AttentionConfig()
    layers: tuple[LayerConfig, ...] = ()
    mixer: ConvConfig | DeltaConfig | None = None
    mlp_bias: bool = False
    activation: Literal["silu", "gelu"] = "silu"
    experts: ExpertsConfig | None = None
    norms: Literal["before", "behind", "around"] = "before"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    layer_scale: bool = False
    logit_divisor: float = 1.0
    logit_cap: float = 0.0
    inputs: InputsConfig | None = None
    head: HeadConfig | None = None

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.n_heads > 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)

    def flaw(self) -> str:
        """What keeps these numbers from being a model; empty where nothing does."""
        return next(self._flaws(), "")

    def _flaws(self) -> Flaws:
        yield from not_positive(self, "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
        if self.head_dim == self.dim // self.n_heads and self.dim % self.n_heads:
            yield f"dim {self.dim} is not divisible by n_heads {self.n_heads}"
        if self.n_heads % self.n_kv_heads:
            yield f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
        yield from not_positive(self, "head_dim")
        if self.head_dim % 2 and self.architecture != "gpt2":
            yield f"head_dim {self.head_dim} is odd; RoPE turns pairs"
        if not 0 <= self.norm_eps < math.inf:
            yield f"norm_eps is {self.norm_eps}; expected 0 or more"
        yield from of_part("rope", self.rope.flaws(self.head_dim))
        yield from of_part("attention", self.attention.flaws())
        yield from not_within(self, "embedding_scale", "residual_scale", "logit_divisor")
        yield from self._flaws_of_layers()
        if (self.architecture in HEADS) != (self.head is not None):
            yield f"the architecture is {self.architecture} and head is {self.head}; expected both of a head, or neither"
        if self.experts:
            yield from of_part("experts", self.experts.flaws(self.n_layers))
        yield from self._flaws_around_layers()
        if self.head:
            yield from of_part("head", self.head.flaws(self.dim, self.vocab_size))
        if self.vocab_size < 3:
            yield f"vocab_size is {self.vocab_size}; BOS and EOS are the ids 1 and 2"

    def _flaws_around_layers(self) -> Flaws:
        """Of norms and of what layers take beside the residual stream, and of logits."""
        if self.inputs:
            yield from of_part("inputs", self.inputs.flaws(self.vocab_size))
        if not (self.logit_cap == 0 or LEAST_SCALE <= self.logit_cap <= 1 / LEAST_SCALE):
            yield f"logit_cap is {self.logit_cap}; expected {LEAST_SCALE:g} to {1 / LEAST_SCALE:g}, or 0"
        if (self.inputs or self.layer_scale) and (self.norms != "around" or self.architecture not in ("llama", ASSISTANT)):
            yield f"norms stand {self.norms} blocks; expected around them where layers have inputs or a factor"
        if self.experts and self.experts.is_beside != (self.norms == "around"):
            yield f"norms stand {self.norms} blocks; expected around them where experts are beside an MLP, and nowhere else"
        if self.norms != "before" and self.residual_scale != 1:
            yield f"norms stand {self.norms} blocks; expected before them where residual_scale is not 1"

    def _flaws_of_layers(self) -> Flaws:
        """Of what layers have of their own."""
        if len(self.layers) not in (0, self.n_layers):
            yield f"there are {len(self.layers)} layers; expected one of each of {self.n_layers}, or none"
        ropes = {self.rope, *(own.attention.rope for own in self.layers if own.attention)}
        differ = len(ropes) > 1 or any(own.head_dim for own in self.layers)
        if differ and any(rope.n_short or rope.query_scale for rope in ropes):
            yield "layers turn heads by angles of their own; expected no n_short and no query_scale beside them"
        mixers = {own.mixer for own in self.layers if own.mixer}
        if len(mixers) > 1:
            yield f"layers have {len(mixers)} kinds of mixers; expected one beside attention"
        if self.mixer or (mixers and all(own.mixer for own in self.layers)):
            yield "all layers have mixers; expected attention in some"
        for mixer in mixers:
            yield from of_part("mixer", mixer.flaws())
        sound = set[LayerConfig]()
        for i, own in enumerate(self.layers):
            layer = self.of_layer(i)
            if own not in sound:
                yield from of_part(f"layer {i}", replace(layer, mixer=None)._flaws())
            sound.add(own)
            j = layer.attention.kv_layer
            if self.architecture == ASSISTANT and j != OF_TARGET:
                yield f"layer {i}'s kv_layer is {j}; expected {OF_TARGET}, one of its target's"
            if self.architecture == ASSISTANT or j is None:
                continue
            alike = replace(layer, hidden_dim=self.hidden_dim, attention=replace(layer.attention, kv_layer=None))
            if not 0 <= j < i or alike != replace(self.of_layer(j), hidden_dim=self.hidden_dim):
                yield f"layer {i}'s kv_layer is {j}; expected an earlier one that is like it, with keys and values of its own"

    def of_layer(self, i: int) -> "Config":
        """The same where all layers are as that one is."""
        return self._of_layers[i] if self.layers else self

    @functools.cached_property
    def _of_layers(self) -> "tuple[Config, ...]":
        """Of each layer, one for all that are alike."""
        given = {own: {name: value for name, value in vars(own).items() if value is not None} for own in {*self.layers}}
        found = {own: replace(self, layers=(), **numbers) for own, numbers in given.items()}
        return tuple(found[own] for own in self.layers)

    def mixing(self, kind: type) -> list[int]:
        """Layers that have such a mixer."""
        return [i for i, own in enumerate(self.layers) if isinstance(own.mixer, kind)]

    @property
    def rope(self) -> RopeConfig:
        return self.attention.rope

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def has_cache(self) -> bool:
        """Whether a layer of attention has keys and values of its own."""
        return self.attention.kv_layer is None

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def n_turned(self) -> int:
        """How many rows of a head RoPE turns."""
        return self.rope.dim or self.head_dim

    def is_long(self, n_tokens: int) -> bool:
        """Whether a text of so many tokens has long_divisors."""
        return 0 < self.rope.n_short < n_tokens

    @property
    def score_scale(self) -> float:
        """What a query's products with keys are multiplied by, a float32."""
        return float(self.attention.scale or np.float32(1) / np.sqrt(np.float32(self.head_dim)))

    @property
    def n_seen(self) -> int:
        """How many positions, its own the last, a token sees at most: of a text beyond seq_len, those of a sliding window."""
        return min(self.attention.window or self.seq_len, self.seq_len)
