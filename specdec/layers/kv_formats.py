"""The kinds of KV cache: in float32, in fp16, and in bytes with a scale for each head of each position."""

import numpy as np

from specdec.kernels import (  # fmt: skip
    KVCache,
    attention_f16,
    attention_f32,
    own_rows,
    store_keys_f16,
    store_keys_f32,
    store_values_f16,
    store_values_f32,
)
from specdec.runtime.code_cache import inlined
from specdec.runtime.program import Bytes4, Floats2, Pass, operation
from specdec.runtime.tile import STRIP_ROWS

LARGEST = 127.0  # of a byte's codes, of either sign


@inlined
def scale_of(x, t, first, n):
    """Of n numbers of a row, what a code of 1 stands for, and what makes codes of them; NaN and 0 where one is not finite."""
    largest = np.float32(0.0)
    for i in range(first, first + n):
        largest = max(largest, abs(x[t, i]))
        if not abs(x[t, i]) < np.float32(np.inf):
            return np.float32(np.nan), np.float32(0.0)
    if largest < np.float32(1e-30):
        return np.float32(0.0), np.float32(0.0)
    return largest / np.float32(LARGEST), np.float32(LARGEST) / largest


@inlined
def code_of(x, factor):
    """The nearest code, ties away from 0."""
    if factor == np.float32(0.0):
        return np.int8(0)
    v = x * factor
    return np.int8(v + np.float32(0.5)) if v >= np.float32(0.0) else np.int8(v - np.float32(0.5))


@operation
def store_keys_q8(run: Pass, thread: int, keys: Bytes4, scales: Floats2, x: Floats2, unit: int, base: int) -> None:
    """Put the heads that begin at row `base` of x at pos.. of keys (G, S / R, K, R): this part's, which are whole heads."""
    head_dim = keys.shape[2]
    first, last = own_rows(run, x.shape[1], unit, base, keys.shape[0] * head_dim)
    for row in range(first, last, head_dim):
        head = row // head_dim
        for t in range(run.n_tokens):
            scale, factor = scale_of(x, t, base + row, head_dim)
            scales[head, run.pos + t] = scale
            block, lane = divmod(run.pos + t, STRIP_ROWS)
            for k in range(head_dim):
                keys[head, block, k, lane] = code_of(x[t, base + row + k], factor)


@operation
def store_values_q8(
    run: Pass, thread: int, values: Bytes4, scales: Floats2, x: Floats2, unit: int, base: int, head_dim: int
) -> None:
    """Put the heads that begin at row `base` of x at pos.. of values (G, K / R, S, R): this part's, which are whole heads."""
    first, last = own_rows(run, x.shape[1], unit, base, values.shape[0] * head_dim)
    for row in range(first, last, head_dim):
        head = row // head_dim
        for t in range(run.n_tokens):
            scale, factor = scale_of(x, t, base + row, head_dim)
            scales[head, run.pos + t] = scale
            for k in range(head_dim):
                strip, lane = divmod(k, STRIP_ROWS)
                values[head, strip, run.pos + t, lane] = code_of(x[t, base + row + k], factor)


attention_q8 = attention_f32.over("attention_q8", __name__, keys=Bytes4, values=Bytes4)
KV_CACHES = {
    "f32": KVCache(np.float32, store_keys_f32, store_values_f32, attention_f32),
    "f16": KVCache(np.uint16, store_keys_f16, store_values_f16, attention_f16),
    "q8": KVCache(np.int8, store_keys_q8, store_values_q8, attention_q8, True),
}
