"""Blocks that layers are made of: two per layer, one that mixes positions and one that does not.

Shapes: T tokens of this pass, D dim.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, KVFormat, add_bias, add_norm, layer_norm, rms_norm, scale_columns
from specdec.layers.buffers import Allocator, Buffers, BufferSizes, KVState, LayerBuffers, pad
from specdec.layers.weights import FusedNames, Shapes, Weights
from specdec.model_config import ModelConfig, require_type
from specdec.quant.packed_matrix import Matrix, count_panels
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import PANEL_ROWS, Float32

# Number of last lengths of a sequence for which the buffers of a mixer hold its state: a sequence can be truncated by one token
# less, and runs again beyond that. The pass at position 0 takes no state.
N_REWINDABLE_STATES = MAX_BATCH_TOKENS + 1
BASE, TIP = 0, 1  # indexes of a delta net's states: see `recurrent_ops`
NO_VECTOR: Float32 = np.zeros(0, np.float32)
LAYER_SCALE = "layer_scale"


class Block(ABC):
    """Half of a layer, such as attention or an MLP, over a model's weights and buffers; it adds a function of x to x.

    Args:
        config: Config of the layer.
        weights: The model's weights.
        b: The model's buffers.
        i: Index of the layer.

    Attributes:
        fused: Tensors that are packed as one, or under another name.
        norm_name: Name of the norm before the block; that of the norm behind it ends in "_out".
        w: The model's weights.
        b: The model's buffers.
        layer: The layer's part of the buffers.
        new: Makes arrays of passes, the same for all blocks of the class.
    """

    fused: ClassVar[FusedNames] = {}
    norm_name: ClassVar[str]

    def __init__(self, config: ModelConfig, weights: Weights, b: Buffers, i: int) -> None:
        """Bind the block to weights and buffers."""
        self.config, self.w, self.b, self.i = config, weights, b, i
        self.layer, self.new = b.layers[i], b.new.share(type(self))

    @classmethod
    @abstractmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes of the block's tensors in one layer, including its norms, by name."""

    @classmethod
    def allocate(cls, config: ModelConfig, sizes: BufferSizes, new: Allocator, layer: LayerBuffers) -> None:
        """Make what the block keeps of a sequence between passes."""
        return  # nothing, unless it mixes positions

    @abstractmethod
    def ops(self) -> Program:
        """Return the block's program."""

    # What blocks consist of

    @property
    def kv(self) -> KVState:
        """The KV cache that the layer reads."""
        return require_type(self.layer.kv, KVState)

    def matrix(self, name: str) -> Matrix:
        """Return the layer's packed matrix of this name."""
        return self.w.matrices[f"{self.i}.{name}"]

    def vector(self, name: str) -> Float32:
        """Return the layer's padded vector of this name."""
        return self.w.vectors[f"{self.i}.{name}"]

    def find_vector(self, name: str) -> Float32:
        """Return the layer's padded vector of this name, or an empty array if there is none."""
        return self.w.vectors.get(f"{self.i}.{name}", NO_VECTOR)

    def matmul(self, name: str, out: Float32, x: Float32, unit: int = 1) -> list[Op]:
        """Return the ops of out = W x for a matrix that may have several shards."""
        shards = zip(self.w.shards[f"{self.i}.{name}"], self.b.scratches, strict=False)
        return [shard.matmul(out, x, scratch, unit=unit) for shard, scratch in shards]

    def make_rows(self, matrix: str) -> Float32:
        """Return an array (T, rows) of passes for the output of the layer's matrix of this name."""
        return self.new.rows(self.matrix(matrix).n_total_rows)

    def make_scratch(self, matrix: str) -> Float32:
        """Return scratch for another matmul of a phase that has one already, since the chunks of a thread share scratch."""
        return self.new.rows(self.matrix(matrix).scratch_words, self.b.sizes.n_threads)

    def norm(self) -> Op:
        """Return the op that norms x with the weights of the norm before the block."""
        return norm(self.config, self.w, self.b, f"{self.i}.{self.norm_name}")

    def prepare_input(self) -> tuple[Float32, list[Op]]:
        """Return the buffer with the block's input, x or x normed, and the ops that compute this input."""
        return (self.b.x, []) if self.config.norm_placement == "behind" else (self.b.normed, [self.norm()])

    def add_residual(self, matrix: str, source: Float32, bias: str = "", factor: float = 1.0) -> Program:
        """Return the program of x += matrix source + bias, a block's last step.

        With a norm behind the block, the sum is normed before it is added, and x is multiplied by factor afterwards; without one,
        factor is ignored. No bias is added if there is none of the name `bias`.
        """
        b = self.b
        is_normed = self.config.norm_placement != "before"
        out = self.new.rows(b.x.shape[2], 1) if is_normed else b.x
        matmul = self.matrix(matrix).matmul(out[0], source, b.scratch, accumulate=not is_normed)
        phases = [[matmul, *self.make_bias_ops(out[0], bias)]]
        if is_normed:
            weight = self.vector(f"{self.norm_name}_out")
            eps = self.config.norm_eps if self.config.post_norm_eps is None else self.config.post_norm_eps
            phases.append([add_norm(b.x[0], out, weight, self.config.dim, eps, factor, True)])
        return phases

    def add_normed_residual(self, matrix: str, source: Float32, name: str, dim: int) -> Program:
        """Return the program of x += matrix rmsnorm(source), with the norm weights `name`; source (1, T, dim padded)."""
        b = self.b
        normed = self.new.rows(source.shape[2], b.sizes.n_threads)
        norm_op = rms_norm(normed, source, self.vector(name), dim, self.config.norm_eps, 0, 0)
        return [[norm_op, self.matrix(matrix).matmul(b.x[0], normed, b.scratch, accumulate=True)]]

    def get_layer_scale(self, is_last: bool = True) -> float:
        """Return the factor that multiplies x after the block: 1 unless this is the layer's last block."""
        return float(self.vector(LAYER_SCALE)[0]) if self.config.layer_scale and is_last else 1.0

    def make_bias_ops(self, out: Float32, name: str, unit: int = 1) -> list[Op]:
        """Return a list with the op that adds the bias `name` to a matmul's output; empty if there is no such bias.

        unit: The matmul's number of panels per step; see `Matrix.matmul`.
        """
        bias = self.find_vector(name)
        return [add_bias(out, bias, unit, False)] if bias.size else []


def make_scale_ops(out: Float32, scales: Sequence[float], sizes: Sequence[int], unit: int = 1) -> list[Op]:
    """Return a list with the op that multiplies the parts of a matmul's output by a factor each; empty if there are no factors.

    Args:
        out: Output of the matmul (T, rows).
        scales: Factor of each part, or none.
        sizes: Number of rows of each part, with those that pad it to whole panels.
        unit: The matmul's number of panels per step; see `Matrix.matmul`.
    """
    return [scale_columns(out, np.repeat(scales, sizes).astype(np.float32), unit)] if scales else []


def get_panels_per_unit(head_dim: int, rows: Sequence[int]) -> int:
    """Return how many panels of a matmul a thread takes at a time, so that no head is split; all if sizes do not fit.

    rows: Number of rows of each part of the output, whose heads have head_dim rows.
    """
    unit = head_dim // math.gcd(head_dim, PANEL_ROWS)
    panels = [count_panels(n) for n in rows]
    return unit if all(n % unit == 0 for n in panels) else sum(panels)


def norm_shapes(config: ModelConfig, name: str) -> Shapes:
    """Return the shapes of the norms before and behind a block, by name; the norm behind the block has the suffix "_out"."""
    names = {"before": [name], "behind": [f"{name}_out"], "around": [name, f"{name}_out"]}[config.norm_placement]
    if config.layer_norm:
        names.append(f"{name}_bias")
    return dict.fromkeys(names, (config.dim,))


def norm(config: ModelConfig, weights: Weights, b: Buffers, name: str, logits_only: bool = False) -> Op:
    """Return the op of normed = rmsnorm(x), or layernorm(x) if the config has LayerNorms, with the norm weights of this name.

    x is a family's residual stream divided by residual_scale, so that layers add their output without a factor. So eps is
    divided by the square of residual_scale. With logits_only, the op runs for the tokens with requested logits only, and the
    weights are divided by logit_divisor.
    """
    weight = weights.vectors[name]
    if logits_only and config.logit_divisor != 1:
        weight = weight / np.float32(config.logit_divisor)
    eps = config.norm_eps / (config.residual_scale * config.residual_scale)
    if config.layer_norm:
        return layer_norm(b.normed, b.x, weight, weights.vectors[f"{name}_bias"], config.dim, eps, logits_only)
    return rms_norm(b.normed, b.x, weight, config.dim, eps, logits_only, 0)


def kv_bytes_per_position(config: ModelConfig, kv: KVFormat) -> int:
    """Return the bytes that the keys, values and scales of one position take in one attention layer's KV cache."""
    item_bytes = np.dtype(kv.dtype).itemsize
    if latent := config.attention.latent:
        return int(latent.cache_width * item_bytes + 4 * kv.is_scaled)
    return int(config.n_kv_heads * ((config.head_dim + pad(config.head_dim)) * item_bytes + 8 * kv.is_scaled))
