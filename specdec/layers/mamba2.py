"""Mamba-2 blocks (Dao and Gu 2024, arXiv:2405.21060): one replaces attention, the other runs next to it (Falcon-H1)."""

from typing import ClassVar

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.activations import group_norm
from specdec.layers.attention import Attention
from specdec.layers.block import Block, make_scale_ops, norm_shapes
from specdec.layers.buffers import Allocator, BufferSizes, LayerBuffers, ScanState, pad
from specdec.layers.recurrent_ops import KEY_RING_SLOTS, convolve, make_ring, make_scan_state, mamba2, store_columns
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.mixer_config import Mamba2Config
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.op_program import Op, Program


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
        layer.ring = make_ring(new, m.kernel_size, pad(m.conv_dim))
        key_ring = 1, KEY_RING_SLOTS, m.n_groups * m.state_dim
        layer.scan = make_scan_state(new, m.n_heads, m.head_dim, m.state_dim, key_ring)

    def ops(self) -> Program:
        """Return the block's program."""
        m, new = require_type(self.config.mixer, Mamba2Config), self.new
        (source, before), state = self.prepare_input(), require_type(self.layer.scan, ScanState)
        projected, output = self.make_rows("in"), new.rows(pad(m.inner_dim), 1)
        scratch = new.scratch(self.b.sizes.n_threads, MAX_BATCH_TOKENS, pad(m.head_dim))
        # Columns are those of x, B and C together, then those of z and dt; the factors begin with that of z.
        scales, n_key_columns = (*m.scales[1:4], *m.scales[:1], *m.scales[4:]), m.n_groups * m.state_dim
        n_last_columns = pad(m.conv_dim) - m.inner_dim - n_key_columns
        sizes = m.inner_dim, n_key_columns, n_last_columns, pad(m.inner_dim), pad(m.n_heads)
        convolution = convolve(projected, self.layer.ring, self.vector("conv"), self.find_vector("conv_bias"))
        scale = 1.0 if m.has_norm else m.output_scale
        scan = mamba2(output, projected, *state, scratch, self.vector("rates"), m.head_dim, scale)
        norm_ops = list[Op]()
        if m.has_norm:
            weight = self.vector("mamba_norm") * np.float32(m.output_scale)
            mixed, output = output, new.rows(pad(m.inner_dim), self.b.sizes.n_threads)
            norm_ops.append(group_norm(output, mixed, weight, m.inner_dim, self.config.norm_eps))
        phase, *others = self.add_residual("mamba_out", output)
        store_keys = store_columns(projected, m.inner_dim, state.keys[0])
        matmul = [*before, *self.matmul("in", projected, source), *make_scale_ops(projected, scales, sizes)]
        return [
            [*matmul, convolution, store_keys],
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
