"""checkpoint.py: what is read is what was written, and whatever is not a whole, finite model is refused by name."""

import os
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.config import Config
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from tests.tools.checkpoint_files import (
    DAMAGES,
    SHARED,
    checkpoint_bytes,
    int8_checkpoint_bytes,
    quantized_tensors,
    random_tensors,
    sound_bytes,
    tensors_of,
    write_checkpoint,
)

SHARED_GQA = Config(48, 40, 2, 4, 2, 105, 16)
UNSHARED_GQA = Config(48, 40, 2, 4, 2, 105, 16, shared_classifier=False)
SHARED_INT8 = Config(10, 20, 2, 1, 1, 105, 16)
MHA = Config(32, 24, 1, 4, 4, 7, 5)
MQA = Config(32, 24, 3, 4, 1, 7, 5, shared_classifier=False)


def message_of(path: Path) -> str:
    """The refusal's text, which is a line and names the file."""
    with pytest.raises(CheckpointError) as caught:
        tensors_of(load_checkpoint(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("config", [SHARED_GQA, UNSHARED_GQA, MHA, MQA], ids=["shared", "unshared", "mha", "mqa"])
def test_what_is_loaded_is_what_was_written(tmp_path: Path, config: Config, version: int) -> None:
    tensors = random_tensors(config, seed=version)
    checkpoint = load_checkpoint(write_checkpoint(tmp_path / "model.bin", config, tensors, version))
    assert checkpoint.config == config
    assert checkpoint.path == tmp_path / "model.bin"
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors_of(checkpoint).items():
        np.testing.assert_array_equal(tensor, tensors[name], strict=True)


def test_both_versions_of_a_model_are_one_model(tmp_path: Path) -> None:
    tensors = random_tensors(UNSHARED_GQA, seed=3)
    old, new = (load_checkpoint(write_checkpoint(tmp_path / f"{v}.bin", UNSHARED_GQA, tensors, v)) for v in (0, 1))
    assert old.config == new.config
    for name in tensors:
        np.testing.assert_array_equal(old.tensors[name][:], new.tensors[name][:])


@pytest.mark.parametrize("group", [1, 2, 5, 10, 50])
@pytest.mark.parametrize("config", [SHARED_INT8, replace(SHARED_INT8, shared_classifier=False)], ids=["shared", "unshared"])
def test_what_is_loaded_of_version_2_is_what_was_written(tmp_path: Path, config: Config, group: int) -> None:
    """50 crosses the rows of every matrix; 1050 bytes of embedding leave scales that are not aligned."""
    written = quantized_tensors(config, random_tensors(config, 4), group)
    path = tmp_path / "model.bin"
    path.write_bytes(int8_checkpoint_bytes(config, written, group))
    checkpoint = load_checkpoint(path)
    assert checkpoint.config == config
    assert set(checkpoint.tensors) == set(written)
    for name, tensor in written.items():
        if isinstance(tensor, np.ndarray):
            np.testing.assert_array_equal(checkpoint.tensors[name][:], tensor, strict=True)
            continue
        read = tensors_of(checkpoint)[name]
        for a, b in zip(*((x if isinstance(x, list) else [x]) for x in (read, tensor)), strict=True):
            np.testing.assert_array_equal(a.values.reshape(b.values.shape), b.values, strict=True)
            one_each = np.repeat(b.scales, b.group)
            np.testing.assert_array_equal(np.repeat(a.scales, a.values.shape[2]), one_each, strict=True)


@pytest.mark.parametrize("name", ["tok_emb", "wq", "w2", "wcls"])
def test_one_scale_that_is_not_finite_is_found_in_any_matrix(tmp_path: Path, name: str) -> None:
    written = quantized_tensors(UNSHARED_GQA, random_tensors(UNSHARED_GQA, 4), 8)
    (written[name][-1] if isinstance(written[name], list) else written[name]).scales[7] = np.inf
    path = tmp_path / "model.bin"
    path.write_bytes(int8_checkpoint_bytes(UNSHARED_GQA, written, 8))
    assert re.search(rf"\b{name}\b.*scales", message_of(path))


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model.bin", MHA, random_tensors(MHA, 0))
    assert load_checkpoint(str(path)).config == MHA


def test_layers_and_rows_are_read_where_they_lie(tmp_path: Path) -> None:
    tensors = random_tensors(SHARED_GQA, 0)
    read = load_checkpoint(write_checkpoint(tmp_path / "model.bin", SHARED_GQA, tensors)).tensors
    np.testing.assert_array_equal(read["w1"][1][5:9], tensors["w1"][1, 5:9])
    np.testing.assert_array_equal(read["tok_emb"][100:], tensors["tok_emb"][100:])
    assert read["w1"][1].shape == (40, 48)


@pytest.mark.parametrize("change", ["truncate", "rewrite"])
def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path, change: str) -> None:
    """What `curl -o` does to a model that is being loaded; a mapped file would end the process by SIGBUS."""
    path = write_checkpoint(tmp_path / "model.bin", SHARED_GQA, random_tensors(SHARED_GQA, 0))
    checkpoint = load_checkpoint(path)
    checkpoint.tensors["wq"][0][:]
    if change == "truncate":
        os.truncate(path, 1000)
    else:
        path.write_bytes(checkpoint_bytes(SHARED_GQA, random_tensors(SHARED_GQA, 1)))
        os.utime(path, (0, 0))  # a clock of coarse ticks may give both writings one time
    with pytest.raises(CheckpointError, match=re.escape(f"{path} has changed")):
        tensors_of(checkpoint)


def test_loading_copies_no_weights(tmp_path: Path) -> None:
    config = Config(256, 512, 2, 4, 4, 1000, 16)
    path = write_checkpoint(tmp_path / "model.bin", config, random_tensors(config, 0))
    tracemalloc.start()
    try:
        load_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    version, damage = DAMAGES[name]
    path = tmp_path / "damaged.bin"
    path.write_bytes(damage.spoil(sound_bytes(UNSHARED_GQA, version)))
    assert damage.word in message_of(path).replace(str(path), "")


@pytest.mark.parametrize("config", [SHARED_GQA, UNSHARED_GQA], ids=["shared", "unshared"])
@pytest.mark.parametrize("version", [0, 1])
def test_a_model_with_a_byte_more_or_less_is_refused(tmp_path: Path, config: Config, version: int) -> None:
    whole = checkpoint_bytes(config, random_tensors(config, 0), version)
    path = tmp_path / "model.bin"
    for wrong, word in ((whole[:-1], "truncated"), (whole[:-4], "truncated"), (whole + b"\0", "too long")):
        path.write_bytes(wrong)
        message = message_of(path)
        assert word in message
        assert str(len(wrong)) in message
        assert str(len(whole)) in message


def test_a_classifier_that_is_missing_or_in_excess_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(UNSHARED_GQA, 0)
    shared, unshared = (checkpoint_bytes(config, tensors, 1) for config in (SHARED_GQA, UNSHARED_GQA))
    path = tmp_path / "model.bin"
    path.write_bytes(shared[:36] + b"\0" + shared[37:])
    assert "truncated" in message_of(path)
    path.write_bytes(unshared[:36] + b"\1" + unshared[37:])
    assert "too long" in message_of(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", LLAMA.shapes(UNSHARED_GQA))
def test_one_weight_that_is_not_finite_is_found_in_any_tensor(tmp_path: Path, name: str, version: int, value: float) -> None:
    tensors = random_tensors(UNSHARED_GQA, 0)
    middle = tuple(n // 2 for n in tensors[name].shape)
    tensors[name][middle] = value
    path = write_checkpoint(tmp_path / "model.bin", UNSHARED_GQA, tensors, version)
    assert re.search(rf"\b{name}\b", message_of(path))


def test_the_rope_tables_of_version_0_are_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(MHA, 0)
    data = bytearray(checkpoint_bytes(MHA, tensors, 0))
    n_bytes = 4 * MHA.seq_len * MHA.dim // MHA.n_heads
    data[-n_bytes:] = np.full(n_bytes // 4, np.nan, np.float32).tobytes()
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    np.testing.assert_array_equal(load_checkpoint(path).tensors["rms_final"][:], tensors["rms_final"])


def test_huge_numbers_in_a_header_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    for name, (version, damage) in DAMAGES.items():
        if "huge" not in name:
            continue
        path.write_bytes(damage.spoil(sound_bytes(UNSHARED_GQA, version)))
        tracemalloc.start()
        try:
            message_of(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, name
        finally:
            tracemalloc.stop()


def test_weights_beyond_the_machines_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(256, 256, 1, 8, 8, 64, 64)
    path = write_checkpoint(tmp_path / "model.bin", config, random_tensors(config, 0))
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": path.stat().st_size * 3 // 4 // 4096}
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name] if name in sizes else real(name))
    with pytest.raises(CheckpointError, match="GiB") as told:
        load_model(path)
    assert str(path) in str(told.value)


def test_a_seq_len_costs_nothing_before_it_is_used(tmp_path: Path) -> None:
    """30,000,000 positions of a small model would be 8.8 GB of rotations alone."""
    config = Config(64, 64, 1, 2, 2, 64, 30_000_000)
    tensors = random_tensors(config, 0)
    Transformer(config, LLAMA.pack(config, tensors), 1).forward([1])  # compiled
    path = write_checkpoint(tmp_path / "model.bin", config, tensors, 1)
    tracemalloc.start()
    try:
        checkpoint = load_checkpoint(path)
        model = Transformer(checkpoint.config, LLAMA.pack(checkpoint.config, checkpoint.tensors), 1)
        model.forward([1, 2, 3])
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert "No such file" in message_of(tmp_path / "nowhere.bin")


def test_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    assert "directory" in message_of(tmp_path)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    assert "name too long" in message_of(tmp_path / ("a" * 300))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused_by_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model.bin", MHA, random_tensors(MHA, 0))
    path.chmod(0)
    assert "ermission" in message_of(path)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real weights of ../shared")
def test_real_checkpoints_have_their_known_shapes() -> None:
    small = load_checkpoint(SHARED / "models" / "stories260K.bin").config
    assert small == Config(64, 172, 5, 8, 4, 512, 512)
    assert load_checkpoint(SHARED / "models" / "stories3M.bin").config == Config(192, 512, 6, 6, 6, 512, 512)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real weights of ../shared")
def test_a_tokenizer_is_not_taken_for_a_checkpoint() -> None:
    message_of(SHARED / "models" / "tok512.bin")
    message_of(SHARED / "models" / "tokenizer.bin")
