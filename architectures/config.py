"""The numbers that every architecture is described by. Knows no file."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's "llama3": angles slower than low_freq_factor turns in original_seq_len positions are divided by factor, those
    faster than high_freq_factor are not, and between them it fades.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int

    def flaw(self) -> str:
        """What keeps these numbers from scaling; empty where nothing does."""
        for name in ("factor", "low_freq_factor", "original_seq_len"):
            if not 0 < getattr(self, name) < math.inf:
                return f"{name} is {getattr(self, name)}; expected a positive number"
        if not self.low_freq_factor < self.high_freq_factor < math.inf:
            return f"high_freq_factor is {self.high_freq_factor}; expected more than low_freq_factor, {self.low_freq_factor}"
        return ""


@dataclass(frozen=True)
class Config:
    """A model's sizes, and what its architecture leaves open.

    The first seven are a llama2.c header's; shared_classifier: whether the classifier is the embedding; architecture: a name in
    `ARCHITECTURES`; norm_eps: what keeps a norm from dividing by 0; rope_theta: the base of RoPE's angles; head_dim: 0 stands for
    dim / n_heads; rope_divisors: of the angle of each pair, none for 1; window: how many positions, its own the last, a token
    sees (0: all); qkv_bias, wo_bias, mlp_bias: which products add a bias; qk_norm: whether queries and keys go through an RMSNorm for
    each head.
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
    rope_theta: float = 10000.0
    head_dim: int = 0
    rope_scaling: RopeScaling | None = None
    rope_divisors: tuple[float, ...] = ()
    window: int = 0
    qkv_bias: bool = False
    wo_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.n_heads > 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)

    def flaw(self) -> str:
        """What keeps these numbers from being a model; empty where nothing does."""
        for name in ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len"):
            if getattr(self, name) <= 0:
                return f"{name} is {getattr(self, name)}; expected a positive number"
        if self.head_dim == self.dim // self.n_heads and self.dim % self.n_heads:
            return f"dim {self.dim} is not divisible by n_heads {self.n_heads}"
        if self.n_heads % self.n_kv_heads:
            return f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
        if self.head_dim <= 0:
            return f"head_dim is {self.head_dim}; expected a positive number"
        if self.head_dim % 2 and self.architecture == "llama":
            return f"head_dim {self.head_dim} (dim / n_heads) is odd; RoPE turns pairs"
        if not 0 <= self.norm_eps < math.inf:
            return f"norm_eps is {self.norm_eps}; expected 0 or more"
        if not 0 < self.rope_theta < math.inf:
            return f"rope_theta is {self.rope_theta}; expected a positive number"
        if self.window < 0:
            return f"window is {self.window}; expected a number of positions, or 0 for all"
        if self.rope_scaling and (flaw := self.rope_scaling.flaw()):
            return f"rope_scaling's {flaw}"
        if self.rope_divisors and len(self.rope_divisors) != self.head_dim // 2:
            return f"there are {len(self.rope_divisors)} rope_divisors; expected one for each of {self.head_dim // 2} pairs"
        if not all(0 < divisor < math.inf for divisor in self.rope_divisors):
            return "a rope_divisor is not a positive number"
        if self.vocab_size < 3:
            return f"vocab_size is {self.vocab_size}; BOS and EOS are the ids 1 and 2"
        return ""

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def n_seen(self) -> int:
        """How many positions, its own the last, a token sees at most: of a text beyond seq_len, those of a sliding window."""
        return min(self.window or self.seq_len, self.seq_len)
