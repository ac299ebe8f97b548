"""Weight formats, one module each: how the weights lie in memory and the kernels that multiply them.

The module of a format is imported when the format is first used.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from specdec.quant.packed_matrix import Tensor, WeightFormat

if TYPE_CHECKING:
    from specdec.quant.bf16_12bit import PACKED_BF16
    from specdec.quant.fp16_bf16 import BF16, FP16
    from specdec.quant.fp32 import FP32
    from specdec.quant.int3 import INT3
    from specdec.quant.int4 import DRAFT_INT4, INT4
    from specdec.quant.int8 import INT8

MAX_REQUANTIZED_SHARE = 0.95  # bytes of a matrix in another format, relative to its GGUF block type, to convert it

_MODULES = {
    "BF16": "fp16_bf16", "FP16": "fp16_bf16", "DRAFT_INT4": "int4", "FP32": "fp32", "INT3": "int3", "INT4": "int4",
    "INT8": "int8", "PACKED_BF16": "bf16_12bit",
}  # fmt: skip


def __getattr__(name: str) -> WeightFormat:
    if name in _MODULES:
        found: WeightFormat = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def choose_weight_format(tensors: Sequence[Tensor], weight_format: WeightFormat | None = None) -> WeightFormat:
    """Return the weight format for tensors that become one matrix, given the format that the user wants (None: keep the file's).

    Float tensors get `weight_format`, or keep theirs if it is None. Tensors that are quantized get it if it takes at most
    MAX_REQUANTIZED_SHARE of their bytes. Tensors of several types get a format that holds them all: fp32, or a wider block type.
    A format with a fallback, such as PACKED_BF16, applies to tensors that are stored in that fallback; others keep their format.
    """
    types = {getattr(tensor, "type", "") for tensor in tensors}
    has_groups = any(getattr(tensor, "group", 0) for tensor in tensors)
    if has_groups or types != {""}:
        blocks = None if has_groups else import_module("specdec.quant.gguf_repacking").find_common_format(types)
        found: WeightFormat = blocks or __getattr__("INT8" if has_groups else "FP32")
        n = tensors[0].shape[1]
        is_smaller = weight_format and weight_format.get_panel_words(n) <= MAX_REQUANTIZED_SHARE * found.get_panel_words(n)
        return weight_format if weight_format and is_smaller and not weight_format.fallback else found
    dtypes = {np.dtype(getattr(tensor, "dtype", np.float32)) for tensor in tensors}
    names = {np.dtype(np.float16): "FP16", np.dtype(np.uint16): "BF16"}
    stored_format = __getattr__(names.get(dtypes.pop(), "FP32") if len(dtypes) == 1 else "FP32")
    if weight_format and weight_format.fallback:
        fits = stored_format is weight_format.fallback and tensors[0].shape[1] % weight_format.column_multiple == 0
        return weight_format if fits else stored_format
    return weight_format or stored_format


__all__ = ["BF16", "DRAFT_INT4", "FP16", "FP32", "INT3", "INT4", "INT8", "PACKED_BF16", "WeightFormat", "choose_weight_format"]
