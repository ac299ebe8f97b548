"""Short convolution block, which replaces attention (LFM2: Liquid AI 2025, arXiv:2511.23404)."""

from typing import ClassVar

from specdec.layers.attention import Attention
from specdec.layers.block import Block, norm_shapes
from specdec.layers.buffers import Allocator, BufferSizes, LayerBuffers, pad
from specdec.layers.recurrent_ops import gated_convolution, make_ring
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.mixer_config import ShortConvConfig
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.op_program import Program

PROJECTIONS = ("conv_b", "conv_c", "conv_x")  # matmuls; the convolution's input is the first times the third


class ShortConv(Block):
    """Short convolution: x += out (c * conv(b * y)), where b, c, y = in rmsnorm(x)."""

    norm_name = Attention.norm_name
    fused: ClassVar[FusedNames] = {
        "in": FusedTensors(PROJECTIONS, interleaved=True),
        "wo": FusedTensors(("conv_out",)),
        "conv": FusedTensors(("conv",), is_table=True),
        "bin": FusedTensors(tuple(f"{name}_bias" for name in PROJECTIONS), interleaved=True),
        "bo": FusedTensors(("conv_out_bias",)),
    }

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by name: matmuls, convolution weights, a norm and any biases."""
        conv, dim = require_type(config.mixer, ShortConvConfig), config.dim
        tensors: Shapes = {"conv": (conv.kernel_size, dim)}
        tensors |= dict.fromkeys((*PROJECTIONS, "conv_out"), (dim, dim))
        biases = {f"{name}_bias": (dim,) for name in tensors} if conv.bias else {}
        return norm_shapes(config, cls.norm_name) | tensors | biases

    @classmethod
    def allocate(cls, config: ModelConfig, sizes: BufferSizes, new: Allocator, layer: LayerBuffers) -> None:
        """Make the ring of the convolution's inputs."""
        kernel_size = require_type(config.mixer, ShortConvConfig).kernel_size
        layer.ring = make_ring(new, kernel_size, pad(config.dim))

    def ops(self) -> Program:
        """Return the block's program."""
        source, before = self.prepare_input()
        projected, gated = self.make_rows("in"), self.new.rows(pad(self.config.dim), 1)
        phase = [
            *before,
            self.matrix("in").matmul(projected, source, self.b.scratch, unit=len(PROJECTIONS)),
            *self.make_bias_ops(projected, "bin", len(PROJECTIONS)),
            gated_convolution(gated, projected, self.layer.ring, self.vector("conv"), self.find_vector("conv_bias")),
        ]
        return [phase, *self.add_residual("wo", gated, "bo")]
