"""Packing: pieces of bounded size, whose bits do not hang on them, into memory that each thread makes resident by itself."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from specdec.loaders.checkpoint import BYTE, FP16, FP32, FileTensor, ModelFile
from specdec.loaders.gguf_blocks import BLOCKS, BlockTensor
from specdec.quant import BF16, INT4, INT8, kind_for, matrix
from specdec.quant import FP32 as FP32_KIND
from specdec.quant.gguf_blocks import KINDS
from specdec.quant.matrix import Kind, converted, pack
from specdec.runtime.memory import LARGE_PAGE_WORDS, SMALL_PAGE_WORDS, Block, touch_words
from specdec.runtime.program import on_all_threads
from specdec.runtime.tile import STRIP_ROWS
from tests.quant.test_grouped import Given
from tests.tools.random_models import THREADS


@pytest.mark.parametrize("lead", [0, 16, SMALL_PAGE_WORDS + 16, LARGE_PAGE_WORDS - 1])
@pytest.mark.parametrize("n", [1, SMALL_PAGE_WORDS, 2 * LARGE_PAGE_WORDS + 48])
def test_every_page_is_touched_once_and_nothing_behind_them(lead: int, n: int) -> None:
    """The first word lies `lead` words behind the beginning of a large page."""
    expected = [0, *(at - lead for at in range(0, n + lead, SMALL_PAGE_WORDS) if at > lead)]
    for n_threads in THREADS:
        words = np.ones(n + 16, np.float32)
        on_all_threads(touch_words(words[:n], lead), n_threads)
        assert np.flatnonzero(words == 0).tolist() == expected


def test_a_block_gives_zeros_side_by_side() -> None:
    """Whatever was written to those before, as far as the pages that were touched go and beyond."""
    sizes = (16, 3 * SMALL_PAGE_WORDS, STRIP_ROWS, LARGE_PAGE_WORDS)
    block = Block(sum(sizes))
    arrays = []
    for size in sizes:
        array = block.take(size // 16, 16)
        assert not array.any()
        array[:] = size
        arrays.append(array)
    assert [int(array.min()) for array in arrays] == [int(array.max()) for array in arrays] == [*sizes]
    assert block.share_taken == 1


@pytest.mark.parametrize("n", [16, 576, 2048, 2049, 8192, 28672, 1 << 20])
@pytest.mark.parametrize("threads", [1, 6, 64])
def test_pieces_are_small_and_end_between_heads(monkeypatch: pytest.MonkeyPatch, n: int, threads: int) -> None:
    monkeypatch.setattr(matrix, "available_threads", lambda: threads)
    size = 1000
    pieces = [*matrix.blocks(size, n)]
    assert [strip for piece in pieces for strip in range(piece.start, piece.stop)] == [*range(size)]
    longest = max(piece.stop - piece.start for piece in pieces)
    assert all(piece.start % matrix.HEAD_STRIPS == 0 for piece in pieces)
    assert min(threads, 64) <= longest <= matrix.BLOCK_STRIPS
    assert longest * STRIP_ROWS * n <= max(matrix.BLOCK_WEIGHTS, (threads + matrix.HEAD_STRIPS - 1) * STRIP_ROWS * n)


@pytest.mark.parametrize("kind", [FP32_KIND, BF16, INT8, INT4, *KINDS.values()], ids=lambda kind: kind.name)
def test_bits_do_not_hang_on_the_size_of_pieces(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    rows, n = 600, 512
    if kind.of_blocks:
        tensors = [Given(kind.name, rows, n, seed) for seed in range(2)]
    else:
        noise = np.random.default_rng(0).standard_normal((2, rows, n)).astype(np.float32)
        tensors = [*((noise.view(np.uint32) >> 16).astype(np.uint16) if kind is BF16 else noise)]
    for turns in (1, 2):
        whole = pack(tensors, kind, turns)
        with monkeypatch.context() as patch:
            patch.setattr(matrix, "BLOCK_WEIGHTS", 1)
            assert len([*matrix.blocks(19, n)]) == 3
            np.testing.assert_array_equal(pack(tensors, kind, turns).strips.view(np.uint32), whole.strips.view(np.uint32))
            as_int8 = converted(whole, INT8)
        np.testing.assert_array_equal(as_int8.strips.view(np.uint32), converted(whole, INT8).strips.view(np.uint32))


@pytest.mark.parametrize("type_", ["F32", "F16", "Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K"])
def test_packing_holds_a_piece_beside_the_matrix(tmp_path: Path, type_: str) -> None:
    """What is read, and what becomes of it before it is packed, is a quarter of both here."""
    rows, n = 8192, 512
    path = tmp_path / "weights"
    if type_ in KINDS:
        stored = np.zeros((rows, n // BLOCKS[type_].n_weights * BLOCKS[type_].n_bytes), np.uint8)
    else:
        stored = np.ones((rows, n), {"F32": FP32, "F16": FP16}[type_])
    path.write_bytes(stored.tobytes())
    tensor = FileTensor(ModelFile(path), "w", stored.shape, 0, dtype=BYTE if type_ in KINDS else stored.dtype)
    given = BlockTensor(tensor, type_, "w") if type_ in KINDS else tensor
    kind = kind_for([given])
    pack([given], kind)  # compiles
    tracemalloc.start()
    try:
        size = pack([given], kind).strips.nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - size < 3 * max(stored.nbytes, size) * matrix.BLOCK_STRIPS * STRIP_ROWS // rows
