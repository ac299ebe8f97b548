"""Settings of layers that replace attention or run next to it, with their validation."""

from dataclasses import dataclass

from specdec.argument_checks import MAX_SCALE, MIN_SCALE, ErrorMessages, check_positive, check_range, check_scales

MAX_CONV_KERNEL_SIZE = 16


@dataclass(frozen=True)
class ShortConvConfig:
    """Settings of short convolutions, which replace attention in some layers (LFM2: Liquid AI 2025, arXiv:2511.23404).

    Attributes:
        kernel_size: Number of tokens that a token sees, including itself as the last.
        bias: Add a bias in the convolution and in the matmuls around it.
    """

    kernel_size: int = 3
    bias: bool = False

    def find_errors(self) -> ErrorMessages:
        """Yield an error message for each invalid field of this config."""
        yield from check_range(self, 1, MAX_CONV_KERNEL_SIZE, "kernel_size")


@dataclass(frozen=True)
class DeltaNetConfig:
    """Settings of gated delta nets, which replace attention in some layers (Yang et al. 2025, arXiv:2412.06464).

    Attributes:
        n_key_heads: Number of query heads, and also of key heads.
        key_head_dim: Number of rows of each query head and each key head.
        kernel_size: Kernel size of the convolution.
        tiled_heads: Value head h uses key head h % n_key_heads; else consecutive value heads share one.
    """

    n_key_heads: int
    n_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int = 4
    tiled_heads: bool = False

    @property
    def total_value_dim(self) -> int:
        """Number of rows of all value heads together."""
        return self.n_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution: the rows of all queries, keys and values."""
        return 2 * self.n_key_heads * self.key_head_dim + self.total_value_dim

    def find_errors(self) -> ErrorMessages:
        """Yield an error message for each invalid field of this config."""
        yield from check_positive(self, "n_key_heads", "n_value_heads", "key_head_dim", "value_head_dim")
        yield from check_range(self, 1, MAX_CONV_KERNEL_SIZE, "kernel_size")
        if self.n_value_heads % self.n_key_heads:
            yield f"n_value_heads {self.n_value_heads} is not divisible by n_key_heads {self.n_key_heads}"


@dataclass(frozen=True)
class Mamba2Config:
    """Settings of Mamba-2 layers, which replace attention in some layers (Dao and Gu 2024, arXiv:2405.21060).

    Attributes:
        n_groups: Number of groups of heads; the heads of a group share B and C, and a norm.
        state_dim: Number of columns of a head's state.
        conv_bias: Add a bias in the convolution.
        has_norm: Apply an RMSNorm to each group of the output.
        is_parallel: Run next to attention, with the same input, and add both outputs.
        scales: Factors of z, x, B, C and dt behind their projections. Empty: none.
        output_scale: Factor of the output.
    """

    n_heads: int
    head_dim: int
    n_groups: int
    state_dim: int
    kernel_size: int = 4
    conv_bias: bool = True
    has_norm: bool = True
    is_parallel: bool = False
    scales: tuple[float, ...] = ()
    output_scale: float = 1.0

    @property
    def inner_dim(self) -> int:
        """Number of rows of all heads together."""
        return self.n_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution: the rows of x, B and C."""
        return self.inner_dim + 2 * self.n_groups * self.state_dim

    def find_errors(self) -> ErrorMessages:
        """Yield an error message for each invalid field of this config."""
        yield from check_positive(self, "n_heads", "head_dim", "n_groups", "state_dim")
        yield from check_range(self, 1, MAX_CONV_KERNEL_SIZE, "kernel_size")
        if self.n_heads % self.n_groups:
            yield f"n_heads {self.n_heads} is not divisible by n_groups {self.n_groups}"
        yield from check_scales("scales", self.scales, 5)
        yield from check_range(self, MIN_SCALE, MAX_SCALE, "output_scale")


MixerConfig = ShortConvConfig | DeltaNetConfig | Mamba2Config
