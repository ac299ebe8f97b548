"""Reading of llama2.c checkpoints: reading returns what was written, and damaged files are rejected in one line."""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.model_loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from tests.tools.checkpoint_files import (
    CORRUPTIONS,
    SHARED,
    checkpoint_bytes,
    int8_checkpoint_bytes,
    limit_memory,
    make_valid_bytes,
    quantized_tensors,
    random_tensors,
    read_tensors,
    write_checkpoint,
)
from tests.tools.hf_folders import assert_rejected

SHARED_GQA = ModelConfig(48, 40, 2, 4, 2, 105, 16)
UNSHARED_GQA = ModelConfig(48, 40, 2, 4, 2, 105, 16, shared_classifier=False)
SHARED_INT8 = ModelConfig(10, 20, 2, 1, 1, 105, 16)
MHA = ModelConfig(32, 24, 1, 4, 4, 7, 5)
MQA = ModelConfig(32, 24, 3, 4, 1, 7, 5, shared_classifier=False)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("config", [SHARED_GQA, UNSHARED_GQA, MHA, MQA], ids=["shared", "unshared", "mha", "mqa"])
def test_loading_returns_what_was_written(tmp_path: Path, config: ModelConfig, version: int) -> None:
    tensors = random_tensors(config, seed=version)
    checkpoint = load_checkpoint(write_checkpoint(tmp_path / "model.bin", config, tensors, version))
    assert checkpoint.config == config
    assert checkpoint.path == tmp_path / "model.bin"
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in read_tensors(checkpoint).items():
        np.testing.assert_array_equal(tensor, tensors[name], strict=True)


@pytest.mark.parametrize("group", [1, 2, 5, 10, 50])
@pytest.mark.parametrize("config", [SHARED_INT8, replace(SHARED_INT8, shared_classifier=False)], ids=["shared", "unshared"])
def test_loading_version_2_returns_what_was_written(tmp_path: Path, config: ModelConfig, group: int) -> None:
    """A group of 50 crosses the rows of every matrix; 1050 bytes of embedding leave scales unaligned."""
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
        read = read_tensors(checkpoint)[name]
        for a, b in zip(*((x if isinstance(x, list) else [x]) for x in (read, tensor)), strict=True):
            np.testing.assert_array_equal(a.values.reshape(b.values.shape), b.values, strict=True)
            one_each = np.repeat(b.scales, b.group)
            np.testing.assert_array_equal(np.repeat(a.scales, a.values.shape[2]), one_each, strict=True)


@pytest.mark.parametrize("name", ["tok_emb", "wq", "w2", "wcls"])
def test_a_non_finite_scale_is_rejected_in_every_matrix(tmp_path: Path, name: str) -> None:
    written = quantized_tensors(UNSHARED_GQA, random_tensors(UNSHARED_GQA, 4), 8)
    (written[name][-1] if isinstance(written[name], list) else written[name]).scales[7] = np.inf
    path = tmp_path / "model.bin"
    path.write_bytes(int8_checkpoint_bytes(UNSHARED_GQA, written, 8))
    assert re.search(rf"\b{name}\b.*infinite", assert_rejected(path))


def test_layers_and_rows_can_be_read_alone(tmp_path: Path) -> None:
    tensors = random_tensors(SHARED_GQA, 0)
    read = load_checkpoint(write_checkpoint(tmp_path / "model.bin", SHARED_GQA, tensors)).tensors
    np.testing.assert_array_equal(read["w1"][1][5:9], tensors["w1"][1, 5:9])
    np.testing.assert_array_equal(read["tok_emb"][100:], tensors["tok_emb"][100:])
    assert read["w1"][1].shape == (40, 48)


@pytest.mark.parametrize("change", ["truncate", "rewrite"])
def test_a_file_that_changes_while_it_is_read_is_reported(tmp_path: Path, change: str) -> None:
    """Like `curl -o` on a model that is being loaded; a mapped file would end the process with SIGBUS."""
    path = write_checkpoint(tmp_path / "model.bin", SHARED_GQA, random_tensors(SHARED_GQA, 0))
    checkpoint = load_checkpoint(path)
    checkpoint.tensors["wq"][0][:]
    if change == "truncate":
        os.truncate(path, 1000)
    else:
        path.write_bytes(checkpoint_bytes(SHARED_GQA, random_tensors(SHARED_GQA, 1)))
        os.utime(path, (0, 0))  # with a coarse clock, both writes may have the same time
    with pytest.raises(CheckpointError, match=re.escape(f"{path} changed while")):
        read_tensors(checkpoint)


def test_loading_reads_no_weights(tmp_path: Path) -> None:
    config = ModelConfig(256, 512, 2, 4, 4, 1000, 16)
    path = write_checkpoint(tmp_path / "model.bin", config, random_tensors(config, 0))
    with limit_memory(path.stat().st_size / 10):
        load_checkpoint(path)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_damaged_file_is_rejected(tmp_path: Path, name: str) -> None:
    version, damage = CORRUPTIONS[name]
    path, whole = tmp_path / "damaged.bin", make_valid_bytes(UNSHARED_GQA, version)
    damaged = damage.corrupt(whole)
    path.write_bytes(damaged)
    with limit_memory(1 << 20):
        message = assert_rejected(path, damage.expected_word)
    if name.endswith((" short", " long")):
        assert str(len(damaged)) in message and str(len(whole)) in message


def test_a_missing_or_extra_classifier_is_rejected(tmp_path: Path) -> None:
    tensors = random_tensors(UNSHARED_GQA, 0)
    shared, unshared = (checkpoint_bytes(config, tensors, 1) for config in (SHARED_GQA, UNSHARED_GQA))
    path = tmp_path / "model.bin"
    for damaged in (shared[:36] + b"\0" + shared[37:], shared[:-1], checkpoint_bytes(SHARED_GQA, tensors, 0)[:-1]):
        path.write_bytes(damaged)
        assert "truncated" in assert_rejected(path)
    path.write_bytes(unshared[:36] + b"\1" + unshared[37:])
    assert "too long" in assert_rejected(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", LLAMA.shapes(UNSHARED_GQA))
def test_a_non_finite_weight_is_rejected_in_every_tensor(tmp_path: Path, name: str, version: int, value: float) -> None:
    tensors = random_tensors(UNSHARED_GQA, 0)
    middle = tuple(n // 2 for n in tensors[name].shape)
    tensors[name][middle] = value
    path = write_checkpoint(tmp_path / "model.bin", UNSHARED_GQA, tensors, version)
    assert re.search(rf"\b{name}\b", assert_rejected(path))


def test_the_rope_tables_of_version_0_are_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(MHA, 0)
    data = bytearray(checkpoint_bytes(MHA, tensors, 0))
    n_bytes = 4 * MHA.seq_len * MHA.dim // MHA.n_heads
    data[-n_bytes:] = np.full(n_bytes // 4, np.nan, np.float32).tobytes()
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    np.testing.assert_array_equal(load_checkpoint(path).tensors["rms_final"][:], tensors["rms_final"])


def test_weights_larger_than_memory_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(256, 256, 1, 8, 8, 64, 64)
    path = write_checkpoint(tmp_path / "model.bin", config, random_tensors(config, 0))
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": path.stat().st_size * 3 // 4 // 4096}
    real_sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name] if name in sizes else real_sysconf(name))
    with pytest.raises(CheckpointError, match="GiB") as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def test_a_large_seq_len_costs_nothing_until_it_is_used(tmp_path: Path) -> None:
    """RoPE tables for 30,000,000 positions of a small model would take 8.8 GB."""
    config = ModelConfig(64, 64, 1, 2, 2, 64, 30_000_000)
    tensors = random_tensors(config, 0)
    Model(config, LLAMA.plan_weights(config, tensors).pack(), 1).new_cache().forward([1])  # compiled
    path = write_checkpoint(tmp_path / "model.bin", config, tensors, 1)
    with limit_memory(10e6):
        checkpoint = load_checkpoint(path)
        model = Model(checkpoint.config, LLAMA.plan_weights(checkpoint.config, checkpoint.tensors).pack(), 1)
        model.new_cache().forward([1, 2, 3])


@pytest.mark.parametrize("data", [bytes(range(80, 240)) * 9, b"Es war einmal ein K\xf6nig. " * 20, b"\xff\0\0\x80" * 99])
def test_another_binary_file_is_not_described_as_a_damaged_checkpoint(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    assert assert_rejected(path).startswith(f"{path} is not a model file; expected a GGUF file, a folder")


@pytest.mark.parametrize(("name", "word"), [("nowhere.bin", "No such file"), ("", "directory"), ("a" * 300, "name too long")])
def test_a_path_that_is_no_file_is_reported(tmp_path: Path, name: str, word: str) -> None:
    assert word in assert_rejected(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_reported(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model.bin", MHA, random_tensors(MHA, 0))
    path.chmod(0)
    assert "ermission" in assert_rejected(path)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real weights of ../shared")
def test_real_checkpoints_have_the_known_shapes() -> None:
    small = load_checkpoint(SHARED / "models" / "stories260K.bin").config
    assert small == ModelConfig(64, 172, 5, 8, 4, 512, 512)
    assert load_checkpoint(SHARED / "models" / "stories3M.bin").config == ModelConfig(192, 512, 6, 6, 6, 512, 512)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real weights of ../shared")
def test_a_tokenizer_is_not_loaded_as_a_checkpoint() -> None:
    assert_rejected(SHARED / "models" / "tok512.bin")
    assert_rejected(SHARED / "models" / "tokenizer.bin")
