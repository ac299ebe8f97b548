"""Packing of weights: in chunks of bounded size, with results independent of them, into memory that each thread touches."""

from pathlib import Path

import numpy as np
import pytest

from specdec.loaders.checkpoint import BYTE, FP16, FP32, FileTensor, ModelFile
from specdec.loaders.gguf_blocks import BlockTensor
from specdec.quant import BF16, INT4, INT8, choose_weight_format, packed_matrix
from specdec.quant import FP32 as FP32_KIND
from specdec.quant.gguf_repacking import BLOCK_TYPES, WEIGHT_FORMATS, GGUFFormat
from specdec.quant.packed_matrix import WeightFormat, convert, pack_matrix
from specdec.runtime.memory import LARGE_PAGE_WORDS, SMALL_PAGE_WORDS, Arena, touch_words
from specdec.runtime.op_program import run_on_all_threads
from specdec.runtime.simd import LINE_BYTES, LINE_WORDS, PANEL_ROWS
from tests.tools.block_tensors import RandomBlockTensor
from tests.tools.checkpoint_files import limit_memory
from tests.tools.half_precision import to_half
from tests.tools.random_models import THREAD_COUNTS


@pytest.mark.parametrize("lead", [0, 16, SMALL_PAGE_WORDS + 16, LARGE_PAGE_WORDS - 1])
@pytest.mark.parametrize("n", [1, SMALL_PAGE_WORDS, 2 * LARGE_PAGE_WORDS + 48])
def test_every_page_is_touched_once_and_nothing_after_them(lead: int, n: int) -> None:
    """The first word is `lead` words after the beginning of a large page."""
    expected = [0, *(at - lead for at in range(0, n + lead, SMALL_PAGE_WORDS) if at > lead)]
    for n_threads in THREAD_COUNTS:
        words = np.ones(n + 16, np.float32)
        run_on_all_threads(touch_words(words[:n], lead), n_threads)
        assert np.flatnonzero(words == 0).tolist() == expected


def test_an_arena_allocates_adjacent_zeros() -> None:
    """Also where something was written before, in the pages that were touched and beyond."""
    sizes = (16, 3 * SMALL_PAGE_WORDS, PANEL_ROWS, LARGE_PAGE_WORDS)
    block = Arena(sum(sizes))
    arrays = []
    for size in sizes:
        array = block.allocate(size // 16, 16)
        assert not array.any()
        array[:] = size
        arrays.append(array)
    assert [int(array.min()) for array in arrays] == [int(array.max()) for array in arrays] == [*sizes]
    assert block.used_fraction == 1


def test_every_array_of_an_arena_starts_at_a_cache_line() -> None:
    """A panel of MXFP4 with an odd number of blocks ends in the middle of one."""
    block = Arena(LINE_WORDS + 8)
    assert [block.allocate(8).ctypes.data % LINE_BYTES for _ in range(2)] == [0, 0]
    assert block.used_fraction == 1


def test_packing_reports_its_progress_within_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of all experts of a layer, or an embedding, may take seconds."""
    monkeypatch.setattr(packed_matrix, "MAX_BLOCK_PANELS", 8)
    tensors, shares = [RandomBlockTensor("Q4_0", rows, 64) for rows in (20 * PANEL_ROWS, 3)], list[float]()
    pack_matrix(tensors, WEIGHT_FORMATS["Q4_0"], progress=shares.append)
    assert shares == [8 / 21, 16 / 21, 20 / 21, 1]


@pytest.mark.parametrize("n", [16, 576, 2048, 2049, 8192, 28672, 1 << 20])
@pytest.mark.parametrize("threads", [1, 6, 64])
def test_chunks_are_small_and_end_between_heads(monkeypatch: pytest.MonkeyPatch, n: int, threads: int) -> None:
    monkeypatch.setattr(packed_matrix, "get_available_threads", lambda: threads)
    size = 1000
    chunks = [*packed_matrix.iter_panel_blocks(size, n)]
    assert [panel for chunk in chunks for panel in range(chunk.start, chunk.stop)] == [*range(size)]
    longest = max(chunk.stop - chunk.start for chunk in chunks)
    assert all(chunk.start % packed_matrix.HEAD_PANELS == 0 for chunk in chunks)
    assert min(threads, 64) <= longest <= packed_matrix.MAX_BLOCK_PANELS
    assert longest * PANEL_ROWS * n <= max(
        packed_matrix.MAX_BLOCK_WEIGHTS, (threads + packed_matrix.HEAD_PANELS - 1) * PANEL_ROWS * n
    )


@pytest.mark.parametrize(
    "weight_format", [FP32_KIND, BF16, INT8, INT4, *WEIGHT_FORMATS.values()], ids=lambda weight_format: weight_format.name
)
def test_packed_bits_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch, weight_format: WeightFormat) -> None:
    rows, n = 600, 512
    if isinstance(weight_format, GGUFFormat):
        tensors = [RandomBlockTensor(weight_format.name, rows, n, seed) for seed in range(2)]
    else:
        noise = np.random.default_rng(0).standard_normal((2, rows, n)).astype(np.float32)
        tensors = [*to_half(noise, weight_format.name)]
    for n_interleaved in (1, 2):
        whole = pack_matrix(tensors, weight_format, n_interleaved)
        with monkeypatch.context() as patch:
            patch.setattr(packed_matrix, "MAX_BLOCK_WEIGHTS", 1)
            assert len([*packed_matrix.iter_panel_blocks(19, n)]) == 3
            np.testing.assert_array_equal(
                pack_matrix(tensors, weight_format, n_interleaved).panels.view(np.uint32), whole.panels.view(np.uint32)
            )
            as_int8 = convert(whole, INT8)
        np.testing.assert_array_equal(as_int8.panels.view(np.uint32), convert(whole, INT8).panels.view(np.uint32))


@pytest.mark.parametrize("type_", ["F32", "F16", "Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K"])
def test_packing_needs_memory_for_one_chunk_besides_the_matrix(tmp_path: Path, type_: str) -> None:
    """The chunk that is read and converted before packing is a quarter of the matrix here."""
    rows, n = 8192, 512
    path = tmp_path / "weights"
    if type_ in WEIGHT_FORMATS:
        stored = np.zeros((rows, n // BLOCK_TYPES[type_].layout.block_columns * BLOCK_TYPES[type_].n_bytes), np.uint8)
    else:
        stored = np.ones((rows, n), {"F32": FP32, "F16": FP16}[type_])
    path.write_bytes(stored.tobytes())
    tensor = FileTensor(ModelFile(path), "w", stored.shape, 0, dtype=BYTE if type_ in WEIGHT_FORMATS else stored.dtype)
    given = BlockTensor(tensor, type_, "w") if type_ in WEIGHT_FORMATS else tensor
    weight_format = choose_weight_format([given])
    size = pack_matrix([given], weight_format).panels.nbytes  # compiles
    with limit_memory(size + 3 * max(stored.nbytes, size) * packed_matrix.MAX_BLOCK_PANELS * PANEL_ROWS // rows):
        pack_matrix([given], weight_format)
