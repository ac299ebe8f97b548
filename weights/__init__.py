"""Kinds of weights, a room each: how they lie in memory, and what multiplies them."""

from .fp32 import FP32
from .int8 import INT8
from .matrix import Kind, Tensor


def kind_for(tensor: Tensor, kind: Kind) -> Kind:
    """What a tensor's weights become: int8 where they share scales already, else that kind."""
    return INT8 if getattr(tensor, "group", 0) else kind


__all__ = ["FP32", "INT8", "Kind", "kind_for"]
