"""Weight formats, one module each: how the weights lie in memory and the kernels that multiply them."""

from collections.abc import Sequence

import numpy as np

from specdec.quant.bf16_12bit import PACKED_BF16, can_pack
from specdec.quant.fp16_bf16 import BF16, FP16
from specdec.quant.fp32 import FP32
from specdec.quant.gguf_repacking import find_common_format
from specdec.quant.int4 import INT4
from specdec.quant.int8 import INT8
from specdec.quant.packed_matrix import Tensor, WeightFormat


def choose_weight_format(tensors: Sequence[Tensor], weight_format: WeightFormat | None = None) -> WeightFormat:
    """Return the weight format for tensors that become one matrix, given the format that the user wants (None: keep the file's).

    Tensors whose weights share scales keep their format; others get `weight_format`, or keep theirs if it is None. Tensors of
    several types get a format that holds them all: fp32, or a wider block type. PACKED_BF16 applies to bf16 tensors only; others
    keep their format.
    """
    types = {getattr(tensor, "type", "") for tensor in tensors}
    if types != {""}:
        return find_common_format(types) or FP32
    if any(getattr(tensor, "group", 0) for tensor in tensors):
        return INT8
    dtypes = {np.dtype(getattr(tensor, "dtype", np.float32)) for tensor in tensors}
    formats = {np.dtype(np.float16): FP16, np.dtype(np.uint16): BF16}
    stored_format = formats.get(dtypes.pop(), FP32) if len(dtypes) == 1 else FP32
    if weight_format is PACKED_BF16:
        return weight_format if stored_format is BF16 and can_pack(tensors[0].shape[1]) else stored_format
    return weight_format or stored_format


__all__ = ["BF16", "FP16", "FP32", "INT4", "INT8", "PACKED_BF16", "WeightFormat", "choose_weight_format"]
