"""Mamba-2 blocks (Dao and Gu 2024, arXiv:2405.21060): one replaces attention, the other runs next to it (Falcon-H1)."""

from typing import ClassVar

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, scale_columns
from specdec.layers.activations import group_norm
from specdec.layers.attention import Attention
from specdec.layers.block import Block, norm_shapes
from specdec.layers.buffers import Allocator, BufferSizes, LayerBuffers, RecurrentState, ScanState, pad
from specdec.layers.recurrent_ops import KEY_RING_SLOTS, RING_SLOTS, convolve, make_ring, mamba2, store_columns
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.mixer_config import Mamba2Config
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import PANEL_ROWS, Float32


class Mamba2(Block):
    """Mamba-2: x += scale out norm(mamba2(conv(in rmsnorm(x))))."""

    norm_name = Attention.norm_name
    fused: ClassVar[FusedNames] = {
        "in": FusedTensors(("mamba_xbc", "mamba_z", "mamba_dt")),
        "conv": FusedTensors(("conv",), is_table=True),
        "rates": FusedTensors(("rate", "dt", "skip")),
        "mamba_norm": FusedTensors(("mamba_norm",), is_table=True),
    }

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by name.

        mamba_xbc, mamba_z, mamba_dt: projections. conv (kernel_size, channels), conv_bias (channels). rate: factor of the decay's
        logarithm, negative. dt: bias of dt. skip: factor of x in the output. mamba_norm: a row of norm weights for each group.
        """
        m, dim = require_type(config.mixer, Mamba2Config), config.dim
        tensors: Shapes = {
            "mamba_xbc": (m.conv_dim, dim), "mamba_z": (m.inner_dim, dim), "mamba_dt": (m.n_heads, dim),
            "mamba_out": (dim, m.inner_dim), "conv": (m.kernel_size, m.conv_dim), "rate": (m.n_heads,), "dt": (m.n_heads,),
            "skip": (m.n_heads,),
        }  # fmt: skip
        if m.has_norm:
            tensors["mamba_norm"] = (m.n_groups, m.inner_dim // m.n_groups)
        return norm_shapes(config, cls.norm_name) | tensors | ({"conv_bias": (m.conv_dim,)} if m.conv_bias else {})

    @classmethod
    def allocate(cls, config: ModelConfig, sizes: BufferSizes, new: Allocator, layer: LayerBuffers) -> None:
        """Make the ring of the convolution's inputs, and the state that `Mamba2Args` describes."""
        m = require_type(config.mixer, Mamba2Config)
        width = pad(m.head_dim)
        scan = ScanState(
            new.sequence(2, m.n_heads * (width // PANEL_ROWS), m.state_dim, PANEL_ROWS),
            new.sequence(m.n_heads, 2, dtype=np.int64),
            new.sequence(1, KEY_RING_SLOTS, m.n_groups * m.state_dim),
            new.sequence(m.n_heads, RING_SLOTS, width),
            new.sequence(m.n_heads, RING_SLOTS),
        )
        layer.recurrent = RecurrentState(make_ring(new, m.kernel_size, pad(m.conv_dim)), scan)

    def ops(self) -> Program:
        """Return the block's program."""
        m, new = require_type(self.config.mixer, Mamba2Config), self.new
        (source, before), (inputs, state) = self.prepare_input(), self.recurrent
        assert state
        projected, output = self.make_rows("in"), new.rows(pad(m.inner_dim), 1)
        scratch = new.scratch(self.b.sizes.n_threads, MAX_BATCH_TOKENS, pad(m.head_dim))
        scale_ops = [scale_columns(projected, make_projection_factors(m), 1)] if m.scales else []
        convolution = convolve(projected, 1, 0, inputs, self.vector("conv"), self.find_vector("conv_bias"))
        scale = 1.0 if m.has_norm else m.output_scale
        scan = mamba2(output, projected, *state, scratch, self.vector("rates"), m.head_dim, scale)
        norm_ops = list[Op]()
        if m.has_norm:
            weight = self.vector("mamba_norm") * np.float32(m.output_scale)
            mixed, output = output, new.rows(pad(m.inner_dim), self.b.sizes.n_threads)
            norm_ops.append(group_norm(output, mixed, weight, m.inner_dim, self.config.norm_eps))
        phase, *others = self.add_residual("mamba_out", output)
        store_keys = store_columns(projected, 1, m.inner_dim, state.keys[0])
        return [
            [*before, *self.matmul("in", projected, source), *scale_ops, convolution, store_keys],
            [scan._replace(bytes_per_token=state.states.nbytes)],
            [*norm_ops, *phase],
            *others,
        ]


class ParallelMamba2(Mamba2):
    """Attention and Mamba-2 side by side: x += wo attention(rmsnorm(x)) + out mamba2(rmsnorm(x)); both read x unchanged."""

    fused: ClassVar[FusedNames] = {**Attention.fused, **Mamba2.fused}

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes of the tensors of attention and Mamba-2, by name."""
        return Attention.shapes(config) | super().shapes(config)

    @classmethod
    def allocate(cls, config: ModelConfig, sizes: BufferSizes, new: Allocator, layer: LayerBuffers) -> None:
        """Make the KV cache of attention and the state of Mamba-2."""
        Attention.allocate(config, sizes, new, layer)
        super().allocate(config, sizes, new, layer)

    def ops(self) -> Program:
        """Return the block's program."""
        *phases, last = super().ops()
        return [*phases, *Attention(self.config, self.w, self.b, self.i).ops(), last]


def make_projection_factors(m: Mamba2Config) -> Float32:
    """Return the factor of each column of the projections' output; `m.scales` must not be empty.

    The columns are those of x, B and C, then those of z and those of dt, each of these three parts padded to whole panels.
    """
    z, x, b, c, dt = m.scales
    n = m.n_groups * m.state_dim
    parts = (np.repeat((x, b, c), (m.inner_dim, n, n)), np.full(m.inner_dim, z), np.full(m.n_heads, dt))
    padded = [np.pad(part, (0, -part.size % PANEL_ROWS), constant_values=1) for part in parts]
    return np.concatenate(padded).astype(np.float32)
