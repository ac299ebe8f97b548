"""Compilation of the code that passes of models will run, in other processes, while their weights are loaded.

A first run of the included pair takes 15.7 s instead of 23.8, since the functions that take longest come first.
"""

from collections.abc import Sequence
from subprocess import Popen

from specdec.layers.buffers import Allocator, BufferSizes
from specdec.layers.kv_formats import KV_FORMATS
from specdec.layers.weights import Tensors
from specdec.model import get_architecture
from specdec.model.model import KVFormatName, get_kv_format
from specdec.model_config import ModelConfig
from specdec.quant import WeightFormat
from specdec.runtime.compile_ahead import compile_ahead
from specdec.runtime.op_program import Kernel
from specdec.runtime.simd import PANEL_ROWS


def compile_passes(
    config: ModelConfig, tensors: Tensors, weight_formats: Sequence[WeightFormat | None], kv: KVFormatName
) -> list[Popen[bytes]]:
    """Start and return processes that compile the code of forward passes and of sampling while this process loads weights.

    Args:
        config: The configuration of the models.
        tensors: The tensors of the models, by name.
        weight_formats: The weight format of each model, the target's first; see `WeightPlan`.
        kv: The KV cache format.

    Returns:
        The processes, which run in the background.
    """
    architecture = get_architecture(config)
    outlines = [architecture.plan_weights(config, tensors, weight_format).make_placeholders() for weight_format in weight_formats]
    kv = get_kv_format(outlines[0], kv)
    sizes = BufferSizes(KV_FORMATS[kv], PANEL_ROWS, 1)
    operations: dict[Kernel, None] = {}
    for outline in outlines:
        buffers = architecture.make_buffers(config, outline, sizes, Allocator(is_plan=True))
        program = architecture.program(config, outline, buffers)
        operations |= dict.fromkeys(op.kernel for phase in program for op in phase)
    return compile_ahead([*operations], [KV_FORMATS[kv].attention.name, "sampling.compile_draw"])
