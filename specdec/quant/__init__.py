"""Kinds of weights, a room each: how they lie in memory, and what multiplies them."""

from collections.abc import Sequence

import numpy as np

from specdec.quant.bf16_packed import PACKED_BF16, is_whole
from specdec.quant.fp32 import FP32
from specdec.quant.gguf_blocks import kind_of_types
from specdec.quant.half import BF16, FP16
from specdec.quant.int4 import INT4
from specdec.quant.int8 import INT8
from specdec.quant.matrix import Kind, Tensor


def kind_for(tensors: Sequence[Tensor], kind: Kind | None = None) -> Kind:
    """What the weights of tensors become: what they are where they share scales already, else that kind, or None: what they are.

    Tensors of several types become what holds them all: fp32, or of block types a wider one. PACKED_BF16 is for those of bf16;
    others stay what they are.
    """
    types = {getattr(tensor, "type", "") for tensor in tensors}
    if types != {""}:
        return kind_of_types(types) or FP32
    if any(getattr(tensor, "group", 0) for tensor in tensors):
        return INT8
    dtypes = {np.dtype(getattr(tensor, "dtype", np.float32)) for tensor in tensors}
    kinds = {np.dtype(np.float16): FP16, np.dtype(np.uint16): BF16}
    own = kinds.get(dtypes.pop(), FP32) if len(dtypes) == 1 else FP32
    if kind is PACKED_BF16:
        return kind if own is BF16 and is_whole(tensors[0].shape[1]) else own
    return kind or own


__all__ = ["BF16", "FP16", "FP32", "INT4", "INT8", "PACKED_BF16", "Kind", "kind_for"]
