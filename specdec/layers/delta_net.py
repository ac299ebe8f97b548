"""Gated delta net block, which replaces attention (Yang et al. 2025, arXiv:2412.06464; Qwen3.5: Qwen Team 2026)."""

from typing import ClassVar

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.attention import Attention
from specdec.layers.block import NO_VECTOR, Block, norm_shapes
from specdec.layers.buffers import Allocator, BufferSizes, LayerBuffers, ScanState, pad
from specdec.layers.recurrent_ops import RING_SLOTS, convolve, delta_net, make_ring, make_scan_state
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.mixer_config import DeltaNetConfig
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.op_program import Program
from specdec.runtime.simd import PANEL_ROWS, round_up


class DeltaNet(Block):
    """Gated delta net: x += out delta_net(conv(in rmsnorm(x)))."""

    norm_name = Attention.norm_name
    fused: ClassVar[FusedNames] = {
        "in": FusedTensors(("delta_qkv", "delta_z", "delta_b", "delta_a")),
        "wo": FusedTensors(("delta_out",)),
        "conv": FusedTensors(("conv",), is_table=True),
        "rates": FusedTensors(("rate", "dt")),
    }

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by name.

        delta_qkv, delta_z, delta_b, delta_a: projections. conv (kernel_size, channels). rate: factor of the decay's logarithm,
        negative. dt: bias of a. delta_norm: weights of the norm of heads.
        """
        d, dim = require_type(config.mixer, DeltaNetConfig), config.dim
        return norm_shapes(config, cls.norm_name) | {
            "delta_qkv": (d.conv_dim, dim), "delta_z": (d.total_value_dim, dim), "delta_b": (d.n_value_heads, dim),
            "delta_a": (d.n_value_heads, dim), "delta_out": (dim, d.total_value_dim), "conv": (d.kernel_size, d.conv_dim),
            "rate": (d.n_value_heads,), "dt": (d.n_value_heads,), "delta_norm": (d.value_head_dim,),
        }  # fmt: skip

    @classmethod
    def allocate(cls, config: ModelConfig, sizes: BufferSizes, new: Allocator, layer: LayerBuffers) -> None:
        """Make the ring of the convolution's inputs, and the state that `DeltaNetArgs` describes."""
        d = require_type(config.mixer, DeltaNetConfig)
        n_heads, n_keys = d.n_value_heads, round_up(d.key_head_dim, 4)
        layer.ring = make_ring(new, d.kernel_size, pad(d.conv_dim))
        layer.scan = make_scan_state(new, n_heads, d.value_head_dim, n_keys, (n_heads, RING_SLOTS, n_keys))

    def ops(self) -> Program:
        """Return the block's program."""
        d, new, n_threads = require_type(self.config.mixer, DeltaNetConfig), self.new, self.b.sizes.n_threads
        (source, before), scan = self.prepare_input(), require_type(self.layer.scan, ScanState)
        projected, values = self.make_rows("in"), new.rows(pad(d.total_value_dim), 1)
        n_keys = scan.keys.shape[2]
        scratch = new.scratch(n_threads, MAX_BATCH_TOKENS, 2 * n_keys + pad(d.value_head_dim))
        draft_state = new.scratch(n_threads, n_keys, PANEL_ROWS)
        arrays = values, projected, *scan, scratch, draft_state, self.vector("rates"), self.vector("delta_norm")
        op = delta_net(*arrays, self.config.norm_eps, d.value_head_dim, d.key_head_dim, d.n_key_heads, d.tiled_heads)
        convolution = convolve(projected, self.layer.ring, self.vector("conv"), NO_VECTOR)
        return [
            [*before, *self.matmul("in", projected, source), convolution],
            [op._replace(bytes_per_token=scan.states.nbytes)],
            *self.add_residual("wo", values),
        ]
