"""Arrays of passes and of sequences: which are shared, and where they lie."""

import mmap

import numpy as np
import pytest

from specdec.layers.attention import Attention
from specdec.layers.buffers import Allocator, SharedBuffers
from specdec.layers.mlp import MLP


def test_blocks_of_a_class_share_arrays_in_the_order_of_their_calls() -> None:
    shared = SharedBuffers()
    first, second = (Allocator(shared).share(Attention) for _ in range(2))
    arrays = [first.rows(32), first.rows(32), first.scratch(2, 32)]
    assert len({*map(id, arrays)}) == 3
    assert [id(second.rows(32)), id(second.rows(32)), id(second.scratch(2, 32))] == [*map(id, arrays)]


@pytest.mark.parametrize(
    ("user", "width", "dtype"), [(MLP, 32, np.float32), (Attention, 64, np.float32), (Attention, 32, np.int64)]
)
def test_other_blocks_sizes_and_dtypes_get_other_arrays(user: type, width: int, dtype: type) -> None:
    new = Allocator()
    assert new.share(user).scratch(64, width, dtype=dtype) is not new.share(Attention).rows(32)


def test_arrays_of_a_sequence_are_zeros_that_share_no_page() -> None:
    new = Allocator()
    arrays = [
        new.sequence(*shape, dtype=dtype) for shape, dtype in (((3, 5), np.float32), ((7,), np.int64), ((2 << 20,), np.float32))
    ]
    arrays.append(new.sequence(1))
    assert not any(array.any() for array in arrays)
    for i, array in enumerate(arrays):
        array[:] = i + 1
        assert array.ctypes.data % mmap.PAGESIZE == 0
    assert all((array == i + 1).all() for i, array in enumerate(arrays))


def test_a_plan_has_the_shapes_without_memory() -> None:
    assert Allocator(is_plan=True).sequence(1 << 40, 8, dtype=np.int64).nbytes == 8 << 43
