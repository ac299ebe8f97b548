"""Checksums: every change of an array changes its checksum."""

import numpy as np
import pytest

from specdec.runtime.memory import CHECKSUM_BYTES, checksum


def random_bytes(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, n, np.uint8)


@pytest.mark.parametrize("n", [0, 1, 7, 63, 64, 65, 1000, 4096])
def test_every_byte_its_index_and_the_length_change_the_checksum(n: int) -> None:
    array, sums = random_bytes(n), set[bytes]()
    sums.add(checksum([array]))
    for index in range(n):
        changed = array.copy()
        changed[index] ^= 1 << index % 8
        sums.add(checksum([changed]))
    sums |= {checksum([np.append(array, np.uint8(0))]), checksum([array, array[:0]])}
    assert len(sums) == n + 3 and {*map(len, sums)} == {CHECKSUM_BYTES}
    assert checksum([array.copy()]) == checksum([array]) in sums


def test_words_that_are_swapped_or_flipped_together_do_not_cancel_out() -> None:
    """The upper bits of words are the signs of floats; a plain sum of words does not detect that two of them change."""
    words, rng = random_bytes(1 << 14).view(np.uint64), np.random.default_rng(1)
    sums, n = {checksum([words])}, 0
    for count in (2, 2, 3, 4, 8) * 40:
        changed, indexes = words.copy(), rng.choice(words.size // 8, count, replace=False)
        bit = np.uint64(1) << np.uint64(rng.integers(64))
        for at in (8 * indexes, rng.permutation(words.size)[:count]):  # in one lane, and anywhere
            changed[at] ^= bit
            sums.add(checksum([changed]))
            changed[at] = np.roll(changed[at], 1)
            sums.add(checksum([changed]))
            n += 2
    assert len(sums) == n + 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint16])
def test_checksum_of_any_dtype_and_order_is_that_of_its_bytes(dtype: type) -> None:
    array = random_bytes(960).view(dtype).reshape(4, -1)
    assert checksum([array]) == checksum([np.frombuffer(array.tobytes(), np.uint8)])
    assert checksum([array[:, ::2]]) == checksum([array[:, ::2].copy()]) != checksum([array[:, 1::2]])
