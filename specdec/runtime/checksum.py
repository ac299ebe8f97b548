"""Checksums of arrays at memory speed: they detect damage and mix-ups, but do not protect against malice."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from specdec.runtime.code_cache import compiled

CHECKSUM_BYTES = 16
N_LANES = 8  # independent chains of multiplications
ROTATE_BITS = np.uint64(29)
GOLDEN_RATIO_64 = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, which is odd


@compiled
def mix_words(lanes, words):
    """lanes[i % 8] = rotate(lanes[i % 8] ^ words[i]) GOLDEN_RATIO_64 for each of words (n,), n a multiple of 8; all uint64.

    A step is a bijection of the lane and of the word, so changing one word always changes its lane.
    """
    for first in range(0, words.size, N_LANES):
        for i in range(N_LANES):
            mixed = lanes[i] ^ words[first + i]
            lanes[i] = (mixed << ROTATE_BITS | mixed >> (np.uint64(64) - ROTATE_BITS)) * GOLDEN_RATIO_64


def checksum(arrays: Iterable[Any]) -> bytes:
    """Return CHECKSUM_BYTES bytes, a checksum that depends on every byte of the arrays, its position and the arrays' lengths."""
    digest, line = hashlib.blake2b(digest_size=CHECKSUM_BYTES), 8 * N_LANES
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        end = len(data) // line * line
        lanes = np.arange(1, N_LANES + 1, dtype=np.uint64) * GOLDEN_RATIO_64
        mix_words(lanes, data[:end].view(np.uint64))
        digest.update(lanes.tobytes() + data[end:].tobytes() + len(data).to_bytes(8, "little"))
    return digest.digest()
