"""bf16 and fp16 weights: panels (P, n, R) of 16-bit values that the tile widens; results equal fp32's bit for bit."""

from functools import partial

import numpy as np

from specdec.quant.fp32 import FP32Format, get_float_activations, make_weight_getter, pack_rows
from specdec.quant.matmul import Tile, make_float_tile, make_kernels
from specdec.quant.packed_matrix import Floats
from specdec.runtime.simd import BF16_STORAGE, FP16_STORAGE, PANEL_ROWS, Float32, StorageDtype, make_load

ROW_DTYPES = {"bf16": np.uint16, "fp16": np.float16}


def view_bits(name: str, rows: Floats) -> Floats:
    """Return the bits of 16-bit rows as uint16.

    Raises:
        ValueError: The rows have another dtype than the format `name`, "bf16" or "fp16".
    """
    if rows.dtype != ROW_DTYPES[name]:
        raise ValueError(f"{rows.dtype} cannot be converted to {name} without loss")
    return rows.view(np.uint16)


class HalfFormat(FP32Format):
    """Panels of 16-bit floats, bf16 or fp16 by its name; its kernels widen them."""

    def get_panel_shape(self, n: int, group_size: int) -> tuple[int, int]:
        """Return the shape of a panel, two weights per word."""
        return n, PANEL_ROWS // 2

    def pack(self, panels: Float32, first: int, stride: int, rows: Floats, group_size: int) -> None:
        """Pack rows; see `WeightFormat.pack`.

        Raises:
            ValueError: The rows have another dtype than the format.
        """
        pack_rows(panels.view(np.uint16), first, stride, view_bits(self.name, rows))


def _make_weight_format(name: str, storage: StorageDtype) -> HalfFormat:
    tile, get_weight = Tile(partial(make_float_tile, storage)), make_weight_getter(make_load(storage))
    return HalfFormat(name=name, **make_kernels(__name__, f"{name}_", tile, get_float_activations, get_weight))


BF16, FP16 = _make_weight_format("bf16", BF16_STORAGE), _make_weight_format("fp16", FP16_STORAGE)
