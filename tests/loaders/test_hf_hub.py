"""Downloads from a fake hub on the loopback, and the names that are resolved to files."""

import errno
import hashlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.head_config import HeadConfig
from specdec.loaders import CheckpointError, hf_hub, load_checkpoint, model_paths, resumable_download
from specdec.model import get_architecture
from specdec.model_config import ModelConfig
from specdec.tokenizer import TokenizerError
from tests.fakes.hub import COMMIT, FakeHub
from tests.tools.checkpoint_files import ROOT, SHARED
from tests.tools.head_files import write_folder
from tests.tools.hf_folders import get_error
from tests.tools.waiting import wait_until

pytest.importorskip("huggingface_hub", reason="the extra [hub] is not installed")

MB = 1 << 20
WEIGHTS = random.Random(1).randbytes(5 * MB)
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "model.safetensors": WEIGHTS,
}
OTHERS = {
    ".gitattributes": b"*",
    "README.md": b"# read me",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "original/consolidated.00.pth": b"again",
    "original/model.safetensors": b"again",
    "onnx/model.onnx": b"again",
}
SHARDED = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode(),
    "model-1.safetensors": b"first",
    "model-2.safetensors": b"second",
    "model-3.safetensors": b"nobody's",
}
TRY_AGAIN = "check the network and try again (a partial download is kept)"
GATED = "{name} is gated: accept its licence at {url}/{name}, then run 'hf auth login' or set HF_TOKEN"
CHECK_NETWORK = "check the network and HF_ENDPOINT"
NOT_FOUND = (
    "{name} is not a local path, and {url}/{name} does not exist or is not accessible: check the name; "
    "if it is private or gated, run 'hf auth login' or set HF_TOKEN"
)
FETCH_SCRIPT = "import sys; from specdec.loaders.hf_hub import fetch; print(fetch(sys.argv[1]))"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a hub with org/model and org/sharded; the cache is empty."""
    for name in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ):
        monkeypatch.delenv(name, raising=False)
    repositories = {"org/model": MODEL | OTHERS, "org/sharded": dict(SHARDED)}
    with FakeHub(repositories).serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture
def stories(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve the published files with the right hashes in karpathy/tinyllamas; tokenizer.bin is on another server."""
    file_contents = {
        path: f"these are {name}".encode() for name, (path, _) in hf_hub.PUBLISHED_FILES.items() if "://" not in path
    }
    tokenizer = b"these are tokenizer.bin"
    with FakeHub({"karpathy/llama2.c": {"tokenizer.bin": tokenizer}}).serve() as elsewhere:
        for name, (path, _) in hf_hub.PUBLISHED_FILES.items():
            monkeypatch.setitem(
                hf_hub.PUBLISHED_FILES, name, (path, hashlib.sha256(file_contents.get(path, tokenizer)).hexdigest())
            )
        url = f"{elsewhere.url}/karpathy/llama2.c/resolve/master/tokenizer.bin"
        monkeypatch.setitem(hf_hub.PUBLISHED_FILES, "tokenizer.bin", (url, hf_hub.PUBLISHED_FILES["tokenizer.bin"][1]))
        server.repositories["karpathy/tinyllamas"] = file_contents
        server.others["llama2.c"] = elsewhere
        yield server


@pytest.fixture(autouse=True)
def no_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library write each 64 kB to the disk, instead of each 10 MB."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_partial_file(tmp_path: Path, data: bytes) -> None:
    """Write what an interrupted download of the weights of org/model leaves."""
    path = tmp_path / "home/hub/models--org--model/blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def list_partial_files(tmp_path: Path) -> list[str]:
    """Return the partial files in the cache."""
    return [path.name for path in (tmp_path / "home" / "hub").glob("models--*/**/*.incomplete")]


# Repositories


def test_fetch_downloads_only_the_files_that_a_model_needs(server: FakeHub, tmp_path: Path) -> None:
    folder = hf_hub.fetch("org/model")
    assert read_files(folder) == MODEL
    assert sorted(server.list_fetched_files()) == sorted(MODEL)
    assert {method for method, _ in server.requests} == {"GET"}
    assert folder == tmp_path / "home" / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert model_paths.resolve_path("org/model") == folder


def test_an_adapter_is_fetched_next_to_a_model_and_rejected_alone(server: FakeHub) -> None:
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"few"}
    server.repositories |= {"org/both": MODEL | adapter, "org/adapter": adapter}
    assert read_files(hf_hub.fetch("org/both")) == MODEL | {"adapter_config.json": b"{}"}
    assert "has no 'config.json', which the model needs" in get_error(lambda: hf_hub.fetch("org/adapter"))


def test_a_draft_head_is_fetched_without_a_tokenizer(server: FakeHub, tmp_path: Path) -> None:
    config = ModelConfig(8, 8, 1, 1, 1, 9, 16, False, "eagle3", head=HeadConfig(8, (1, 2, 3), 9, False, True))
    tensors = {name: np.ones(shape, np.float32) for name, shape in get_architecture(config).shapes(config).items()}
    folder = write_folder(tmp_path / "written", config, tensors)
    server.repositories["org/head"] = {file.name: file.read_bytes() for file in folder.iterdir()} | {"README.md": b"a head"}
    assert load_checkpoint(hf_hub.fetch("org/head")).config.head == config.head
    assert sorted(server.list_fetched_files()) == ["config.json", "model.safetensors"]


def test_only_shards_in_the_index_are_fetched(server: FakeHub) -> None:
    assert read_files(hf_hub.fetch("org/sharded")) == {
        name: data for name, data in SHARDED.items() if name != "model-3.safetensors"
    }


GGUFS = {
    "model-BF16.gguf": b"16 bits",
    "model-F16.gguf": b"also 16",
    "model-Q8_0.gguf": b"8 bits",
    "model-q4_k_m.gguf": b"4 bits",
    "mmproj-Q4_K_M.gguf": b"an eye",
    "mtp-model-Q4_K_M.gguf": b"a head",
    "big/model-Q6_K-00001-of-00002.gguf": b"one",
    "big/model-Q6_K-00002-of-00002.gguf": b"two",
    "README.md": b"# read me",
}


@pytest.mark.parametrize(
    ("quant", "name"),
    [
        ("", "model-q4_k_m"),
        (":Q4_K_M", "model-q4_k_m"),
        (":q8_0", "model-Q8_0"),
        (":F16", "model-F16"),
        (":BF16", "model-BF16"),
        (":mtp", "mtp-model-Q4_K_M"),
    ],
)
def test_a_quant_selects_the_only_gguf_file_that_is_fetched(server: FakeHub, quant: str, name: str) -> None:
    server.repositories["org/gguf"] = GGUFS
    path = hf_hub.fetch(f"org/gguf{quant}")
    assert path.read_bytes() == GGUFS[f"{name}.gguf"]
    assert server.list_fetched_files() == [f"{name}.gguf"]
    n = len(server.requests)
    assert hf_hub.fetch(f"org/gguf{quant}") == model_paths.resolve_path(f"org/gguf{quant}") == path
    assert len(server.requests) == n


def test_all_shards_of_a_gguf_are_fetched(server: FakeHub) -> None:
    server.repositories["org/gguf"] = dict(GGUFS)
    path = hf_hub.fetch("org/gguf:Q6_K")
    assert path.name == "model-Q6_K-00001-of-00002.gguf"
    assert [each.read_bytes() for each in sorted(path.parent.iterdir())] == [b"one", b"two"]
    path.with_name("model-Q6_K-00002-of-00002.gguf").unlink()
    assert hf_hub.fetch("org/gguf:Q6_K") == path and path.with_name("model-Q6_K-00002-of-00002.gguf").exists()
    del server.repositories["org/gguf"]["big/model-Q6_K-00002-of-00002.gguf"]
    path.with_name("model-Q6_K-00002-of-00002.gguf").unlink()
    assert "has no 'big/model-Q6_K-00002-of-00002.gguf', which the model needs" in get_error(
        lambda: hf_hub.fetch("org/gguf:Q6_K")
    )


def test_without_a_quant_the_cache_is_preferred_then_safetensors_then_q8_0(server: FakeHub) -> None:
    server.repositories["org/both"] = MODEL | GGUFS
    assert hf_hub.fetch("org/both").is_dir()
    assert hf_hub.fetch("org/both:Q4_K_M").is_file()
    assert hf_hub.fetch("org/both").is_dir()
    without = {name: data for name, data in GGUFS.items() if "q4" not in name}
    server.repositories["org/gguf"] = without
    assert hf_hub.fetch("org/gguf").name == "model-Q8_0.gguf"
    server.repositories["org/few"] = {"model.IQ4_XS.gguf": b"few"}
    assert hf_hub.fetch("org/few").name == "model.IQ4_XS.gguf"
    server.repositories["org/cached"] = MODEL | GGUFS
    path = hf_hub.fetch("org/cached:Q6_K")
    server.requests.clear()
    assert hf_hub.fetch("org/cached") == path and server.requests == []


def test_the_error_about_a_missing_quant_lists_the_available_files(server: FakeHub) -> None:
    names = [f"model-Q{n}_0.gguf" for n in range(1, 9)]
    server.repositories["org/gguf"] = dict.fromkeys(names, b"weights")
    assert f"no GGUF file of Q5_K; available: {', '.join(names)}" in get_error(lambda: hf_hub.fetch("org/gguf:Q5_K"))
    assert "no GGUF file of Q5_K; available: none" in get_error(lambda: hf_hub.fetch("org/model:Q5_K"))


def test_a_mirror_without_sizes_is_supported(server: FakeHub) -> None:
    server.lists_sizes = False
    assert read_files(hf_hub.fetch("org/model")) == MODEL


@pytest.mark.parametrize("name", ["org/model", "org/sharded", "org/gguf:Q8_0"])
def test_a_cached_model_needs_no_network(server: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    server.repositories["org/gguf"] = GGUFS
    path = hf_hub.fetch(name)
    server.requests.clear()
    assert hf_hub.fetch(name) == path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hf_hub.fetch(name) == hf_hub.fetch(name.partition(":")[0]) == path
    assert "HF_HUB_OFFLINE" in get_error(lambda: hf_hub.fetch("org/gguf:F16"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hf_hub.fetch(name) == path
    assert server.requests == []


def test_a_model_cached_by_another_program_needs_no_network(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    where = {"cache_dir": str(Path(os.environ["HF_HOME"]) / "hub"), "endpoint": server.url}
    for file in ("config.json", "model.safetensors"):
        huggingface_hub.hf_hub_download("org/model", file, **where)
    server.requests.clear()
    assert set(read_files(hf_hub.fetch("org/model"))) == {"config.json", "model.safetensors"}
    assert server.requests == []


def test_another_program_can_use_and_remove_a_fetched_model(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hf_hub.fetch("org/model")
    cache = Path(os.environ["HF_HOME"]) / "hub"
    where = {"cache_dir": str(cache), "endpoint": server.url}
    server.requests.clear()
    for file, data in MODEL.items():
        assert Path(huggingface_hub.hf_hub_download("org/model", file, **where)).read_bytes() == data
    assert server.list_fetched_files() == []
    found = huggingface_hub.scan_cache_dir(cache)
    assert [(repo.repo_id, repo.nb_files) for repo in found.repos] == [("org/model", len(MODEL))] and not found.warnings
    found.delete_revisions(COMMIT).execute()
    assert [*hf_hub.list_cached_models()] == [] and not (cache / "models--org--model").exists()


def test_a_new_revision_fetches_only_requested_files(server: FakeHub) -> None:
    server.repositories["org/gguf"] = GGUFS
    old = hf_hub.fetch("org/gguf:Q8_0")
    server.commit = COMMIT[::-1]
    assert hf_hub.fetch("org/gguf:F16").parent != old.parent
    assert hf_hub.fetch("org/gguf:Q8_0").read_bytes() == GGUFS["model-Q8_0.gguf"]
    assert server.list_fetched_files() == ["model-Q8_0.gguf", "model-F16.gguf"]


def test_a_missing_network_is_reported_in_one_line(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    line = get_error(lambda: hf_hub.fetch("org/model"))
    assert line == f"cannot download org/model from http://127.0.0.1:9/org/model: {os.strerror(errno.ECONNREFUSED)}; {TRY_AGAIN}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    where = f"found in {tmp_path / 'elsewhere'}, and HF_HUB_OFFLINE forbids downloads"
    assert get_error(lambda: hf_hub.fetch("org/model")) == f"no complete copy of org/model {where}"
    assert get_error(lambda: hf_hub.fetch("org/model:Q8_0")) == f"no complete copy of org/model:Q8_0 {where}"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "yes")
    assert get_error(lambda: hf_hub.fetch("org/model")).endswith("and TRANSFORMERS_OFFLINE forbids downloads")


def test_a_hub_that_never_answers_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Like behind a firewall: the connection is open, and nothing arrives."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        assert "timed out" in get_error(lambda: hf_hub.fetch("org/model"))


@pytest.mark.usefixtures("small_chunks")
def test_a_hanging_server_is_reported_and_the_next_download_resumes(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.gate.clear()
    server.cut_at = 2 * MB

    def stop_cutting(name: str, n: int, total: int) -> None:
        if n == 2 * MB:
            server.cut_at = 0

    monkeypatch.setattr(resumable_download, "progress_callbacks", [stop_cutting])
    line = get_error(lambda: hf_hub.fetch("org/model"))
    assert line == f"cannot download org/model from {server.url}/org/model: timed out; {TRY_AGAIN}"
    server.gate.set()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 60)
    assert read_files(hf_hub.fetch("org/model")) == MODEL
    assert server.ranges[-1] == f"bytes={2 * MB}-"


def test_a_retry_prints_nothing(server: FakeHub) -> None:
    server.repositories["org/model"] = MODEL
    server.n_cut_bodies, server.cut_at = 1, 2 * MB
    result = subprocess.run(
        [sys.executable, "-c", FETCH_SCRIPT, "org/model"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("name", "refusal", "words"),
    [
        ("org/nobody", None, NOT_FOUND),
        ("org/model", (401, "GatedRepo"), GATED),
        ("org/model", (403, "GatedRepo"), GATED),
        ("org/model", (401, ""), NOT_FOUND),
        ("org/model", (404, ""), NOT_FOUND),
        ("org/model", (503, ""), "cannot download {name}: {url}/{name} returned status 503; try again later"),
        ("org/model", (204, ""), "cannot download {name}: {url}/{name} is not a Hugging Face hub; " + CHECK_NETWORK),
        (
            "org/mo--del", None,
            "cannot download {name} from {url}/{name}: Cannot have -- or .. in repo_id: '{name}'; " + TRY_AGAIN,
        ),
    ],
)  # fmt: skip
def test_an_error_response_is_reported_in_one_line_with_advice(
    server: FakeHub, name: str, refusal: tuple[int, str] | None, words: str
) -> None:
    server.error_response = refusal
    assert get_error(lambda: model_paths.resolve_path(name)) == words.format(url=server.url, name=name)


def test_a_token_gives_access_and_is_sent_only_to_the_hub(
    stories: FakeHub, server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_secret"
    assert "HF_TOKEN" in get_error(lambda: hf_hub.fetch("org/model"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert read_files(hf_hub.fetch("org/model")) == MODEL
    hf_hub.fetch_file("tokenizer.bin")
    assert [*server.others["llama2.c"].authorizations.values()] == [""]
    with FakeHub({"org/sharded": SHARDED}).serve() as storage:
        server.redirect = storage.url
        hf_hub.fetch("org/sharded")
    assert len(storage.list_fetched_files()) == len(SHARDED) - 1 and {*storage.authorizations.values()} == {""}


@pytest.mark.usefixtures("small_chunks")
def test_a_broken_connection_is_resumed(server: FakeHub, tmp_path: Path) -> None:
    server.repositories["org/model"] = MODEL
    server.n_cut_bodies, server.cut_at = 3, 2 * MB + 5
    assert read_files(hf_hub.fetch("org/model")) == MODEL
    assert [int(each.removeprefix("bytes=").rstrip("-")) // MB for each in server.ranges] == [2, 4]
    assert list_partial_files(tmp_path) == []


def test_a_connection_that_brings_no_byte_is_given_up(server: FakeHub) -> None:
    server.n_cut_bodies = 100
    assert get_error(lambda: hf_hub.fetch("org/model")).endswith(TRY_AGAIN)
    assert server.list_fetched_files() == ["config.json"] * 6


def test_a_server_without_ranges_sends_the_file_again(server: FakeHub) -> None:
    server.ignores_ranges = True
    server.n_cut_bodies, server.cut_at = 1, 2 * MB
    assert read_files(hf_hub.fetch("org/model")) == MODEL
    assert server.list_fetched_files().count("model.safetensors") == 2


def test_a_download_resumes_after_its_process_was_killed(server: FakeHub, tmp_path: Path) -> None:
    weights = random.Random(1).randbytes(25 * MB)
    server.repositories["org/model"] = MODEL | {"model.safetensors": weights}
    server.gate.clear()
    server.cut_at = 22 * MB
    process = subprocess.Popen([sys.executable, "-c", FETCH_SCRIPT, "org/model"], cwd=ROOT)
    blobs = tmp_path / "home" / "hub" / "models--org--model" / "blobs"

    def is_half_downloaded() -> bool:
        with suppress(FileNotFoundError):  # the library's own parts of small files come and go
            return any(path.stat().st_size >= 20 * MB for path in blobs.glob("*.incomplete"))
        return False

    wait_until(is_half_downloaded)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.gate.set()
    assert [*hf_hub.list_cached_models()] == []
    assert read_files(hf_hub.fetch("org/model"))["model.safetensors"] == weights
    assert server.ranges == [f"bytes={20 * MB}-"]


def test_a_small_file_shorter_than_listed_is_rejected(server: FakeHub) -> None:
    server.n_missing_bytes = 1000
    server.repositories["org/model"] = {"config.json": b" " * 2000, "model.safetensors": WEIGHTS}
    assert get_error(lambda: hf_hub.fetch("org/model")).startswith("cannot download org/model")
    server.n_missing_bytes = 0
    assert read_files(hf_hub.fetch("org/model"))["config.json"] == b" " * 2000


@pytest.mark.parametrize("n_bytes", [len(WEIGHTS), len(WEIGHTS) + 1000, len(WEIGHTS) - 1000])
def test_a_partial_file_of_other_content_is_replaced(server: FakeHub, tmp_path: Path, n_bytes: int) -> None:
    write_partial_file(tmp_path, bytes(n_bytes))
    if n_bytes <= len(WEIGHTS):
        assert "the download was removed; try again" in get_error(lambda: hf_hub.fetch("org/model"))
    assert read_files(hf_hub.fetch("org/model")) == MODEL


def test_a_file_longer_than_listed_is_rejected_and_replaced(server: FakeHub) -> None:
    server.sizes["model.safetensors"] = MB
    for _ in range(2):
        line = get_error(lambda: hf_hub.fetch("org/model"))
        assert f"Consistency check failed: file should be of size {MB} but has size {len(WEIGHTS)}" in line
    server.sizes.clear()
    assert read_files(hf_hub.fetch("org/model")) == MODEL


@pytest.mark.usefixtures("small_chunks")
def test_progress_is_reported_in_bytes(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    monkeypatch.setattr(resumable_download, "progress_callbacks", [lambda *figures: reports.append(figures)])
    write_partial_file(tmp_path, WEIGHTS[: 2 * MB])
    hf_hub.fetch("org/model")
    weights = [n for name, n, total in reports if total == len(WEIGHTS)]
    assert weights[0] == 2 * MB and weights[-1] == len(WEIGHTS) and weights == sorted(weights) and len(weights) > 40
    small = [n for _, n, total in reports if total != len(WEIGHTS)]
    assert small[-1] == sum(map(len, MODEL.values())) - len(WEIGHTS) and {name for name, *_ in reports} == {"org/model"}


def test_a_file_with_a_wrong_hash_is_rejected_and_removed(server: FakeHub, tmp_path: Path) -> None:
    server.checksums["model.safetensors"] = "1" * 64
    line = get_error(lambda: hf_hub.fetch("org/model"))
    right = hashlib.sha256(WEIGHTS).hexdigest()
    assert line == f"model.safetensors has sha256 {right}, expected {'1' * 64}; the download was removed; try again"
    assert list_partial_files(tmp_path) == []
    assert not (tmp_path / "home/hub/models--org--model/blobs" / right).exists()


def test_a_full_disk_is_reported_before_writing(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as small:
        small.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4 * MB))
        line = get_error(lambda: hf_hub.fetch("org/model"))
        assert line.startswith(
            f"not enough disk space for org/model in {tmp_path / 'home' / 'hub'}: 0.01 GB needed, 0.00 GB free; "
        )
        assert "model.safetensors" not in server.list_fetched_files()
        write_partial_file(tmp_path, WEIGHTS[: 2 * MB])
        assert read_files(hf_hub.fetch("org/sharded")) and read_files(hf_hub.fetch("org/model")) == MODEL
        assert server.ranges == [f"bytes={2 * MB}-"]


def test_a_disk_that_becomes_full_keeps_the_partial_download(server: FakeHub, tmp_path: Path) -> None:
    limit = 2 * MB
    done = subprocess.run(
        [sys.executable, "-c", FETCH_SCRIPT, "org/model"],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        f"CheckpointError: cannot write {tmp_path / 'home' / 'hub'}: File too large; "
        "set HF_HOME to another folder and try again (a partial download is kept)" in done.stderr
    )
    assert read_files(hf_hub.fetch("org/model")) == MODEL
    assert server.ranges == [f"bytes={limit}-"]


def test_a_cache_that_is_not_writable_is_reported(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert "set HF_HOME to another folder" in get_error(lambda: hf_hub.fetch("org/model"))


def test_two_concurrent_processes_fetch_the_weights_once(server: FakeHub) -> None:
    server.repositories["org/model"] = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    server.gate.clear()
    server.cut_at = 100
    processes = [
        subprocess.Popen([sys.executable, "-c", FETCH_SCRIPT, "org/model"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    wait_until(lambda: [path.rsplit("/")[-1] for _, path in server.requests].count("main") == 2)
    time.sleep(0.1)
    server.gate.set()
    folders = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1 and read_files(Path(folders.pop()))["model.safetensors"] == WEIGHTS
    assert server.list_fetched_files().count("model.safetensors") == 1


@pytest.mark.parametrize(
    ("repository", "words"),
    [
        ({"model.safetensors": b""}, "org/model on the hub has no 'config.json', which the model needs"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "org/model on the hub has no 'model.safetensors', which the model"),
        ({**SHARDED, "model.safetensors.index.json": b'{"weight_map": {"a": "../../../x"}}'}, "has no '../../../x'"),
    ],
)
def test_a_repository_without_a_model_is_rejected(server: FakeHub, repository: dict[str, bytes], words: str) -> None:
    server.repositories["org/model"] = repository
    assert words in get_error(lambda: hf_hub.fetch("org/model"))


@pytest.mark.parametrize("index", [b"[]", b"{", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_left_to_the_loader(server: FakeHub, index: bytes) -> None:
    server.repositories["org/model"] = SHARDED | {"model.safetensors.index.json": index, "1": b""}
    folder = hf_hub.fetch("org/model")
    server.requests.clear()
    assert hf_hub.fetch("org/model") == folder and server.requests == []


# Names from the server

OUTSIDE = "../../../../outside"


def list_outside_files(tmp_path: Path) -> list[str]:
    """Return the files outside of the two folders that a download may write to."""
    homes = (tmp_path / "home/hub/.locks", *(tmp_path / "home/hub").glob("models--*"))
    paths = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    return [str(path) for path in paths if not any(path.is_relative_to(home) for home in homes)]


@pytest.mark.parametrize("name", [OUTSIDE, "{folder}/outside", "..", "", "a/b", "a\\b", "a" * 300, "é"])
def test_an_etag_or_a_hash_cannot_escape_the_cache(server: FakeHub, tmp_path: Path, name: str) -> None:
    for file in MODEL:
        server.etags[file] = server.checksums[file] = name.format(folder=tmp_path)
    assert read_files(hf_hub.fetch("org/model")) == MODEL
    assert list_outside_files(tmp_path) == []


@pytest.mark.parametrize("nonsense", [5, [], {"a": 1}])
def test_a_nonsense_file_list_is_rejected(server: FakeHub, nonsense: Any) -> None:
    server.checksums["model.safetensors"] = nonsense
    assert get_error(lambda: hf_hub.fetch("org/model")).endswith(f"is not a Hugging Face hub; {CHECK_NETWORK}")


@pytest.mark.parametrize("commit", [OUTSIDE, "main", "..", "", "0123\n"])
def test_a_commit_cannot_escape_the_cache(stories: FakeHub, tmp_path: Path, commit: str) -> None:
    stories.commit = commit
    assert "has the commit " in get_error(lambda: hf_hub.fetch("org/model"))
    assert "has the commit " in get_error(lambda: hf_hub.fetch_file("stories15M.bin"))
    assert list_outside_files(tmp_path) == []
    refs = tmp_path / "home/hub/models--org--model/refs/main"
    refs.parent.mkdir(parents=True)
    refs.write_text(f"../../../../{tmp_path.name}")
    assert hf_hub.find_cached("org/model") is None


@pytest.mark.parametrize(
    "name", [f"{OUTSIDE}-", "/outside-", "a/../../outside-", "a\\b-", "c:b-", "a\x1b]0;evil\x07-", "a\u202eb-"]
)
def test_a_file_name_cannot_escape_the_repository_or_reach_the_terminal(server: FakeHub, tmp_path: Path, name: str) -> None:
    server.repositories["org/gguf"] = {f"{name}Q4_K_M.gguf": b"4 bits", "model-Q8_0.gguf": b"8 bits"}
    assert "available: model-Q8_0.gguf" in get_error(lambda: hf_hub.fetch("org/gguf:Q4_K_M"))
    assert hf_hub.fetch("org/gguf").read_bytes() == b"8 bits"
    index = json.dumps({"weight_map": {"a": f"{name}.safetensors"}}).encode()
    server.repositories["org/model"] = {**SHARDED, "model.safetensors.index.json": index, f"{name}.safetensors": b"shard"}
    assert "which the model needs" in get_error(lambda: hf_hub.fetch("org/model"))
    assert list_outside_files(tmp_path) == []


@pytest.mark.parametrize("missing", [["symlink"], ["symlink", "link"]])
def test_a_disk_without_links_is_supported(server: FakeHub, monkeypatch: pytest.MonkeyPatch, missing: list[str]) -> None:
    server.repositories["org/model"] = {**MODEL, "chat_template.jinja": b""}

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in missing:
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)  # Python 3.10 does not call `os.symlink`
    folder = hf_hub.fetch("org/model")
    assert read_files(folder) == server.repositories["org/model"]
    assert not any(path.is_symlink() for path in folder.iterdir())


# The hub's URL


def test_an_empty_url_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("", " ", "https://huggingface.co/"):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        with pytest.raises(CheckpointError, match=r"^from https://huggingface.co/org/model$"), monkeypatch.context() as patch:
            patch.setattr(hf_hub, "_Repository", lambda _: 1 / 0)
            patch.setattr(hf_hub, "_format_error", lambda error, name, page: f"from {page}")
            hf_hub.fetch("org/model")


@pytest.mark.parametrize("url", ["huggingface.co", "ftp://huggingface.co", "http://", "http://[::1", "https://me:secret@"])
def test_an_invalid_url_is_shown(server: FakeHub, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    line = get_error(lambda: hf_hub.fetch("org/model"))
    assert line.startswith(f"cannot download org/model from {url.rstrip('/').replace('me:secret@', '')}/org/model: ")


@pytest.mark.parametrize("fault", ["none there", "refused", "no hub", "commit", "cut off"])
def test_a_password_in_the_url_is_never_shown(server: FakeHub, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url.replace("://", "://me:p@ss:secret@"))
    if fault == "none there":
        server.repositories.clear()
    elif fault == "refused":
        server.error_response = (500, "")
    elif fault == "no hub":
        monkeypatch.setenv("HF_ENDPOINT", "http://me:secret@127.0.0.1:9")
    elif fault == "commit":
        server.commit = OUTSIDE
    else:
        server.n_missing_bytes = 3
    line = get_error(lambda: hf_hub.fetch("org/model"))
    assert "secret" not in line and "me:" not in line
    assert "://127.0.0.1:" in line


@pytest.mark.parametrize(
    ("name", "is_repository"),
    [
        ("org/model", True),
        ("HuggingFaceTB/SmolLM2-1.7B", True),
        ("a/b/c", False),
        ("./model", False),
        ("../model", False),
        ("/model", False),
        ("~/model", False),
        ("model", False),
        ("models/other.bin", False),
        ("org/model\n", False),
        ("örg/model", False),
        ("", False),
    ],
)
def test_a_repository_name_has_the_form_organization_slash_name(name: str, is_repository: bool) -> None:
    assert hf_hub.is_repository_name(name) == is_repository


def test_an_existing_path_takes_precedence_over_a_repository(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").mkdir()
    assert model_paths.resolve_path("org/model") == Path("org/model")
    assert server.requests == []


def test_a_missing_library_is_reported_in_one_line(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    purpose = "huggingface_hub, to download org/model, which is not a local path"
    assert (
        get_error(lambda: model_paths.resolve_path("org/model"))
        == f"package not found: {purpose}; install with: pip install huggingface_hub"
    )
    line = get_error(lambda: model_paths.resolve_path("stories42M.bin"))
    assert line.startswith("package not found: huggingface_hub") and line.endswith("; install with: pip install huggingface_hub")
    assert server.requests == []


# The stories


def test_published_files_are_fetched_once(stories: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hf_hub.PUBLISHED_FILES:
        assert model_paths.resolve_path(name).read_bytes() == f"these are {name}".encode()
    stories.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in hf_hub.PUBLISHED_FILES:
        assert model_paths.resolve_path(name).read_bytes() == f"these are {name}".encode()
    assert stories.requests == []


def test_a_local_stories_model_is_not_fetched(stories: FakeHub) -> None:
    Path("stories15M.bin").write_bytes(b"mine")
    assert model_paths.resolve_path("stories15M.bin") == Path("stories15M.bin")
    Path("models").mkdir()
    Path("models/stories42M.bin").write_bytes(b"mine")
    assert model_paths.resolve_path("stories42M.bin") == Path("models/stories42M.bin")
    assert stories.requests == []


def test_a_published_file_with_a_wrong_hash_is_rejected_and_removed(stories: FakeHub, tmp_path: Path) -> None:
    wrong = {"stories15M.bin": b"forged", "tokenizer.bin": b"forged too"}
    stories.repositories = {"karpathy/tinyllamas": {"stories15M.bin": wrong["stories15M.bin"]}}
    stories.others["llama2.c"].repositories = {"karpathy/llama2.c": wrong}
    for name, data in wrong.items():
        right = hf_hub.PUBLISHED_FILES[name][1]
        line = f"{name} has sha256 {hashlib.sha256(data).hexdigest()}, expected {right}; the download was removed; try again"
        assert get_error(lambda name=name: model_paths.resolve_path(name)) == line
    assert list_partial_files(tmp_path) == []
    assert not list((tmp_path / "home").rglob("stories15M.bin")) and not list((tmp_path / "home").rglob("tokenizer.bin"))


def test_the_published_tokenizer_is_fetched_unless_one_is_next_to_the_model(stories: FakeHub, tmp_path: Path) -> None:
    for size, name in ((32000, "tokenizer.bin"), (512, "tok512.bin")):
        assert model_paths.find_tokenizer(None, tmp_path / "model.bin", size).read_bytes() == f"these are {name}".encode()
    assert model_paths.find_tokenizer(None, None, 32000).read_bytes() == b"these are tokenizer.bin"
    (tmp_path / "tokenizer.bin").write_bytes(b"mine")
    for model, found in (("model.bin", "tokenizer.bin"), ("", "")):  # a folder has its own
        assert model_paths.find_tokenizer(None, tmp_path / model, 32000) == tmp_path / found


def test_the_error_about_a_missing_tokenizer_names_the_tokenizer_option(
    stories: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = get_error(lambda: model_paths.find_tokenizer(None, None, 300), TokenizerError)
    assert line.startswith("no tok300.bin or tokenizer.bin in any of ") and line.endswith("; name it with tokenizer=...")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = get_error(lambda: model_paths.find_tokenizer(None, None, 32000), TokenizerError)
    assert line.startswith("no tok32000.bin or tokenizer.bin in any of models, ") and "so name it with tokenizer=...; " in line


@pytest.mark.skipif(not SHARED.exists(), reason="needs the sums of ../shared")
def test_hashes_match_the_manifest() -> None:
    manifest = json.loads((SHARED / "golden" / "assets_manifest.json").read_text("utf-8"))
    sums = {
        path.removeprefix(hf_hub.LLAMA2C_TOKENIZER.removesuffix("tokenizer.bin")): sha256
        for path, sha256 in hf_hub.PUBLISHED_FILES.values()
    }
    assert sums == {path: info["sha256"] for path, info in manifest.items() if isinstance(info, dict)}
