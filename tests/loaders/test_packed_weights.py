"""The cache of packed weights: what it maps equals what is packed anew, and a file that changed in any way is not used."""

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import quant
from specdec.layers.weights import Weights
from specdec.loaders import CheckpointWarning, load_checkpoint, model_loader, packed_weights
from specdec.loaders.model_loader import Loader
from specdec.loaders.packed_weights import PackedWeightsCache, open_packed_weights
from specdec.runtime import disk_store
from specdec.runtime.disk_store import NewFile
from tests.tools.gguf_files import CONVERTED
from tests.tools.hf_folders import FIXTURES

MODELS = sorted(path.parent for path in FIXTURES.glob("*/config.json")) + [
    FIXTURES / "gguf" / f"{name}.gguf" for name in CONVERTED
]


@pytest.fixture
def cache(tmp_path: Path) -> PackedWeightsCache:
    return PackedWeightsCache(tmp_path / "packed")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model that a test may change."""
    return shutil.copytree(FIXTURES / "llama", tmp_path / "model")


@pytest.fixture(autouse=True)
def keep_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "MIN_AGE_S", -1.0)


@contextmanager
def ignore_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        yield


def load(path: Path, cache: PackedWeightsCache | None, weight_format: Any = None, pack: Any = "none") -> Weights:
    loader = Loader(pack_mode=pack, packed=cache.folder if cache else "off")
    with ignore_warnings():
        return loader.pack(load_checkpoint(path), weight_format)


def get_warnings(path: Path, cache: PackedWeightsCache) -> list[str]:
    """Load a model, check its weights, and return the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        weights = Loader(pack_mode="none", packed=cache.folder).pack(load_checkpoint(path), None)
    assert_equal(weights, load(path, None))
    return [str(each.message) for each in found]


def is_mapped(weights: Weights) -> bool:
    return not next(iter(weights.matrices.values())).panels.flags.writeable


def assert_equal(a: Weights, b: Weights) -> None:
    assert [*a.matrices] == [*b.matrices] and [*a.vectors] == [*b.vectors] and bool(a.table) == bool(b.table)
    for one, other in zip(a.matrices.values(), b.matrices.values(), strict=True):
        assert replace(one, panels=other.panels) == other
        np.testing.assert_array_equal(one.panels.view(np.uint32), other.panels.view(np.uint32))
    for name, vector in a.vectors.items():
        np.testing.assert_array_equal(vector, b.vectors[name])


def get_files(cache: PackedWeightsCache) -> tuple[Path, Path]:
    """Return the only weights file of a cache and its description."""
    (weights,) = cache.folder.glob("*.weights")
    return weights, weights.with_suffix(".json")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_mapped_weights_equal_packed_ones(path: Path, cache: PackedWeightsCache) -> None:
    for weight_format in (None, quant.INT8):
        wanted = load(path, None, weight_format)
        assert not is_mapped(load(path, cache, weight_format))
        mapped = load(path, cache, weight_format)
        assert is_mapped(mapped)
        assert_equal(mapped, wanted)
        assert all(matrix.panels.ctypes.data % 64 == 0 for matrix in mapped.matrices.values())
        counts = [len({id(each.panels) for each in weights.matrices.values()}) for weights in (mapped, wanted)]
        assert counts[0] == counts[1], "a tied classifier is mapped once"


def test_formats_that_pack_a_model_alike_share_a_file(cache: PackedWeightsCache) -> None:
    """A format that needs bf16 weights changes nothing in a file that has none."""
    for weight_format in (None, quant.PACKED_BF16):
        load(FIXTURES / "llama", cache, weight_format)
    assert len(cache.list_models()) == 1


def test_a_second_start_reads_no_weights(cache: PackedWeightsCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, checkpoint = load(model, cache), load_checkpoint(model)

    def fail(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("specdec.loaders.model_file.ModelFile.read_strided", fail)
    assert_equal(Loader(packed=cache.folder, pack_mode="none").pack(checkpoint, None), wanted)


def test_a_kept_model_is_reported_once(cache: PackedWeightsCache, model: Path) -> None:
    (line,) = get_warnings(model, cache)
    assert not get_warnings(model, cache)
    assert "kept the packed weights" in line and "--weight-cache off" in line


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_model_is_packed_again(name: str, cache: PackedWeightsCache, model: Path) -> None:
    load(model, cache)
    content = (model / name).read_bytes()
    stat = (model / name).stat()
    (model / name).write_bytes(content)
    os.utime(model / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and modification time
    assert not is_mapped(load(model, cache))


def test_other_formats_have_files_of_their_own(cache: PackedWeightsCache, model: Path) -> None:
    for weight_format in (None, quant.INT8, quant.INT4):
        assert not is_mapped(load(model, cache, weight_format))
    for weight_format in (None, quant.INT8, quant.INT4):
        assert_equal(load(model, cache, weight_format), load(model, None, weight_format))
    assert len(cache.list_models()) == 3


def damage(path: Path, rng: np.random.Generator) -> None:
    """Change a file in one of the ways in which files get damaged."""
    data = bytearray(path.read_bytes())
    at = int(rng.integers(len(data)))
    match rng.integers(5):
        case 0:
            data[at] ^= 1 << int(rng.integers(8))
        case 1:
            del data[at:]
        case 2:
            data[at:at] = bytes(int(rng.integers(1, 100)))
        case 3:
            data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        case 4:
            data += data[:at]
    path.write_bytes(data)


@pytest.mark.parametrize("n_damages", [40, pytest.param(2000, marks=pytest.mark.campaign)])
def test_a_damaged_file_is_not_used(cache: PackedWeightsCache, model: Path, n_damages: int) -> None:
    wanted = load(model, None)
    load(model, cache)
    files = get_files(cache)
    contents = [path.read_bytes() for path in files]
    for seed in range(n_damages):
        rng = np.random.default_rng(seed)
        for path, content in zip(files, contents, strict=True):
            path.write_bytes(content)
        path, content = [*zip(files, contents, strict=True)][seed % 2]
        damage(path, rng)
        weights = load(model, cache)
        assert_equal(weights, wanted)


def test_a_copied_folder_and_a_changed_byte_are_not_used(cache: PackedWeightsCache, model: Path, tmp_path: Path) -> None:
    wanted = load(model, cache)
    shutil.copytree(cache.folder, tmp_path / "copy")
    weights, _ = get_files(cache)
    stat = weights.stat()
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for each in (cache, PackedWeightsCache(tmp_path / "copy")):
        again = load(model, each)
        assert not is_mapped(again)
        assert_equal(again, wanted)


@pytest.mark.parametrize("is_unnamed", [False, True])
def test_a_full_disk_is_reported_and_nothing_is_kept(
    is_unnamed: bool, cache: PackedWeightsCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_writes = 0

    def write(self: NewFile, data: bytes | memoryview) -> None:
        nonlocal n_writes
        n_writes += 1
        if n_writes > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(NewFile, "write", write)
    monkeypatch.setattr(disk_store, "UNNAMED_FILE", disk_store.UNNAMED_FILE if is_unnamed else 0)
    assert get_warnings(model, cache) == [f"cannot keep the packed weights in {cache.folder}: No space left on device"]
    assert not [*cache.folder.iterdir()]


def test_a_folder_that_cannot_be_created_is_reported(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = PackedWeightsCache(tmp_path / "file" / "packed")
    (line,) = get_warnings(model, cache)
    assert line.startswith(f"cannot keep the packed weights in {cache.folder}: ")


def test_an_interrupted_load_leaves_nothing(cache: PackedWeightsCache, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.layers.weights._pack_vector", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(model, cache)
    assert not [*cache.folder.iterdir()]


def test_a_model_that_changes_while_it_is_packed_is_not_kept(cache: PackedWeightsCache, model: Path) -> None:
    with cache.open_writer(load_checkpoint(model), None) as writer:
        writer.add(np.zeros(16, np.float32))
        os.utime(model / "model.safetensors")
    assert not [*cache.folder.iterdir()]


def test_a_model_that_was_changed_just_now_is_not_kept(
    cache: PackedWeightsCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "MIN_AGE_S", 1e6)
    load(model, cache)
    assert not cache.folder.exists()


def test_the_least_recently_used_files_are_deleted_first(
    cache: PackedWeightsCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = [quant.INT8, quant.INT4]
    for seconds, weight_format in enumerate(formats):
        load(model, cache, weight_format)
        for path in cache.folder.iterdir():
            if path.stat().st_mtime > 2000:
                os.utime(path, (1000 + seconds, 1000 + seconds))
    (cache.folder / "yolo.weights").write_bytes(bytes(100))
    load(model, cache, quant.INT8)  # which is now the last one used
    used = sum(each.n_bytes for each in cache.list_models())
    checkpoint = load_checkpoint(model)
    needed = (
        packed_weights.get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors).estimate_bytes()
    )
    usage = shutil.disk_usage(cache.folder)._replace(free=int((used + needed - 1) / packed_weights.MAX_FREE_SHARE) - used)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    load(model, cache)
    kept = [is_mapped(load(model, cache, weight_format)) for weight_format in (quant.INT8, None)]
    assert kept == [True, True] and (cache.folder / "yolo.weights").exists()
    assert len(cache.list_models()) == 2


def test_weights_that_take_more_than_half_of_the_free_space_are_not_kept(
    cache: PackedWeightsCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (line,) = get_warnings(model, cache)
    assert "half of the free space" in line
    assert not [*cache.folder.iterdir()]


WRITE_FOREVER = """
import sys, time
from pathlib import Path
from specdec.loaders import load_checkpoint, packed_weights
from specdec.loaders.packed_weights import PackedWeightsCache
packed_weights.MIN_AGE_S = -1.0
checkpoint = load_checkpoint(Path(sys.argv[1]))
with PackedWeightsCache(Path(sys.argv[2])).open_writer(checkpoint, None) as writer:
    assert writer.file
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not disk_store.UNNAMED_FILE, reason="this system has no files without a name")
def test_a_killed_writer_leaves_nothing(cache: PackedWeightsCache, model: Path) -> None:
    arguments = [sys.executable, "-c", WRITE_FOREVER, model, cache.folder]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as writer:
        assert writer.stdout and writer.stdout.readline() == "writing\n"
        writer.kill()
        assert writer.wait() != 0
    assert not [*cache.folder.iterdir()]


def test_files_with_the_key_of_another_model_are_not_used(cache: PackedWeightsCache, model: Path, tmp_path: Path) -> None:
    """The names of two models' files are exchanged."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-64:] = bytes(64)
    (other / "model.safetensors").write_bytes(data)
    load(model, cache)
    mine = get_files(cache)
    load(other, cache)
    others = [next(path for path in cache.folder.glob(f"*{file.suffix}") if path not in mine) for file in mine]
    for one, another in zip(mine, others, strict=True):
        one.rename(tmp_path / "third")
        another.rename(one)
        (tmp_path / "third").rename(another)
    for path in (model, other):
        assert_equal(load(path, cache), load(path, None))


def test_two_writers_make_one_file(cache: PackedWeightsCache, model: Path) -> None:
    checkpoint = load_checkpoint(model)
    architecture = packed_weights.get_architecture(checkpoint.config)
    with (
        ignore_warnings(),
        cache.open_writer(checkpoint, None) as one,
        cache.open_writer(checkpoint, None) as other,
    ):
        for writer in (one, other):
            architecture.plan_weights(checkpoint.config, checkpoint.tensors, None).pack(keep=writer.add)
    weights = load(model, cache)
    assert is_mapped(weights) and len([*cache.folder.iterdir()]) == 2
    assert_equal(weights, load(model, None))


def test_the_option_names_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "get_default_folder", lambda: tmp_path)
    folders = {option: cache and cache.folder for option in ("off", "auto", "on") for cache in [open_packed_weights(option)]}
    assert folders == {"off": None, "auto": tmp_path, "on": tmp_path}
    found = open_packed_weights(tmp_path / "mine")
    assert found and found.folder == tmp_path / "mine"
    monkeypatch.setattr(packed_weights, "get_default_folder", lambda: None)
    assert open_packed_weights("on") is None
    with pytest.raises(TypeError, match="packed is 3"):
        Loader(packed=3)  # type: ignore[arg-type]


def test_only_large_models_are_kept_by_default(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "get_default_folder", lambda: tmp_path / "packed")
    Loader().pack(load_checkpoint(model), None)
    assert not (tmp_path / "packed").exists()
    monkeypatch.setattr(model_loader, "MIN_KEPT_BYTES", 1000)
    with pytest.warns(CheckpointWarning, match="kept the packed weights"):
        Loader().pack(load_checkpoint(model), None)
    assert is_mapped(Loader().pack(load_checkpoint(model), None))
