"""hub.py and download.py against a hub on the loopback, and the names that files.py makes files of."""

import errno
import hashlib
import importlib.util
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.config import Config, HeadConfig
from specdec.loaders import CheckpointError, download, hub, load_checkpoint, model_lookup
from specdec.model.registry import architecture_of
from specdec.tokenizer import TokenizerError
from tests.fakes.hub import COMMIT, Hub
from tests.tools.checkpoint_files import ROOT, SHARED
from tests.tools.head_files import write_folder

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
AGAIN = "try again, what has come is kept"
GATED = "{name} is gated: accept its licence at {url}/{name}, then run 'hf auth login' or set HF_TOKEN"
CHECK = "check the network and HF_ENDPOINT"
NOTHING = (
    "{name} is no path here, and there is nothing at {url}/{name} that you may read: check the name; "
    "if it is private or gated, run 'hf auth login' or set HF_TOKEN"
)
FETCH = "import sys; from specdec.loaders.hub import fetch; print(fetch(sys.argv[1]))"
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason='needs the package huggingface_hub: pip install ".[test]"'
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with org/model, org/sharded and the stories; nothing is in the cache."""
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
    with Hub(repositories).serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture
def stories(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, with files of the right sums in karpathy/tinyllamas; tokenizer.bin is elsewhere."""
    contents = {path: f"these are {name}".encode() for name, (path, _) in hub.FILES.items() if "://" not in path}
    tokenizer = b"these are tokenizer.bin"
    with Hub({"karpathy/llama2.c": {"tokenizer.bin": tokenizer}}).serving() as elsewhere:
        for name, (path, _) in hub.FILES.items():
            monkeypatch.setitem(hub.FILES, name, (path, hashlib.sha256(contents.get(path, tokenizer)).hexdigest()))
        address = f"{elsewhere.url}/karpathy/llama2.c/resolve/master/tokenizer.bin"
        monkeypatch.setitem(hub.FILES, "tokenizer.bin", (address, hub.FILES["tokenizer.bin"][1]))
        server.repositories["karpathy/tinyllamas"] = contents
        server.others["llama2.c"] = elsewhere
        yield server


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRY_SECONDS", 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def left_over(tmp_path: Path) -> list[str]:
    """The parts of files in the cache."""
    return [path.name for path in (tmp_path / "home" / "hub").glob("models--*/**/*.incomplete")]


def refused(call: Callable[[], object], error: type[Exception] = CheckpointError) -> str:
    """The one line."""
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600  # two processes that load the library: half a minute on a busy machine
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Repositories


@needs_library
def test_a_name_becomes_a_folder_of_what_a_model_needs_and_nothing_else(server: Hub, tmp_path: Path) -> None:
    folder = hub.fetch("org/model")
    assert contents(folder) == MODEL
    assert sorted(server.fetched()) == sorted(MODEL)
    assert {method for method, _ in server.requests} == {"GET"}
    assert folder == tmp_path / "home" / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert model_lookup.find("org/model") == folder


@needs_library
def test_an_adapter_is_told_of_whether_it_lies_next_to_a_model_or_alone(server: Hub) -> None:
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"few"}
    server.repositories |= {"org/both": MODEL | adapter, "org/adapter": adapter}
    assert contents(hub.fetch("org/both")) == MODEL | {"adapter_config.json": b"{}"}
    assert "it is an adapter: merge it with" in refused(lambda: hub.fetch("org/adapter"))


@needs_library
def test_a_head_comes_without_a_tokenizer(server: Hub, tmp_path: Path) -> None:
    config = Config(8, 8, 1, 1, 1, 9, 16, False, "eagle3", head=HeadConfig(8, (1, 2, 3), 9, False, True))
    tensors = {name: np.ones(shape, np.float32) for name, shape in architecture_of(config).shapes(config).items()}
    folder = write_folder(tmp_path / "written", config, tensors)
    server.repositories["org/head"] = {file.name: file.read_bytes() for file in folder.iterdir()} | {"README.md": b"a head"}
    assert load_checkpoint(hub.fetch("org/head")).config.head == config.head
    assert sorted(server.fetched()) == ["config.json", "model.safetensors"]


@needs_library
def test_of_shards_those_are_fetched_that_the_index_names(server: Hub) -> None:
    assert contents(hub.fetch("org/sharded")) == {name: data for name, data in SHARDED.items() if name != "model-3.safetensors"}


GGUFS = {
    "model-BF16.gguf": b"16 bits",
    "model-F16.gguf": b"also 16",
    "model-Q8_0.gguf": b"8 bits",
    "model-q4_k_m.gguf": b"4 bits",
    "mmproj-Q4_K_M.gguf": b"an eye",
    "big/model-Q6_K-00001-of-00002.gguf": b"one",
    "big/model-Q6_K-00002-of-00002.gguf": b"two",
    "README.md": b"# read me",
}


@needs_library
@pytest.mark.parametrize(
    ("bits", "name"),
    [("", "model-q4_k_m"), (":Q4_K_M", "model-q4_k_m"), (":q8_0", "model-Q8_0"), (":F16", "model-F16"), (":BF16", "model-BF16")],
)
def test_bits_choose_a_gguf_file_and_no_other_is_fetched(server: Hub, bits: str, name: str) -> None:
    server.repositories["org/gguf"] = GGUFS
    path = hub.fetch(f"org/gguf{bits}")
    assert path.read_bytes() == GGUFS[f"{name}.gguf"]
    assert server.fetched() == [f"{name}.gguf"]
    n = len(server.requests)
    assert hub.fetch(f"org/gguf{bits}") == model_lookup.find(f"org/gguf{bits}") == path
    assert len(server.requests) == n


@needs_library
def test_a_split_gguf_comes_whole(server: Hub) -> None:
    server.repositories["org/gguf"] = dict(GGUFS)
    path = hub.fetch("org/gguf:Q6_K")
    assert path.name == "model-Q6_K-00001-of-00002.gguf"
    assert [each.read_bytes() for each in sorted(path.parent.iterdir())] == [b"one", b"two"]
    path.with_name("model-Q6_K-00002-of-00002.gguf").unlink()
    assert hub.fetch("org/gguf:Q6_K") == path and path.with_name("model-Q6_K-00002-of-00002.gguf").exists()
    del server.repositories["org/gguf"]["big/model-Q6_K-00002-of-00002.gguf"]
    path.with_name("model-Q6_K-00002-of-00002.gguf").unlink()
    assert "has no 'big/model-Q6_K-00002-of-00002.gguf', which the model needs" in refused(lambda: hub.fetch("org/gguf:Q6_K"))


@needs_library
def test_without_bits_safetensors_go_before_gguf_and_8_bits_before_any(server: Hub) -> None:
    server.repositories["org/both"] = MODEL | GGUFS
    assert hub.fetch("org/both").is_dir()
    assert hub.fetch("org/both:Q4_K_M").is_file()
    assert hub.fetch("org/both").is_dir()
    without = {name: data for name, data in GGUFS.items() if "q4" not in name}
    server.repositories["org/gguf"] = without
    assert hub.fetch("org/gguf").name == "model-Q8_0.gguf"
    server.repositories["org/few"] = {"model.IQ4_XS.gguf": b"few"}
    assert hub.fetch("org/few").name == "model.IQ4_XS.gguf"


@needs_library
def test_without_bits_the_cache_goes_before_the_hub(server: Hub) -> None:
    server.repositories["org/both"] = MODEL | GGUFS
    path = hub.fetch("org/both:Q6_K")
    server.requests.clear()
    assert hub.fetch("org/both") == path and server.requests == []


@needs_library
def test_bits_that_are_not_there_are_told_with_those_that_are(server: Hub) -> None:
    server.repositories["org/gguf"] = {"model-Q8_0.gguf": b"8 bits"}
    assert "no GGUF file of Q5_K; there is model-Q8_0.gguf" in refused(lambda: hub.fetch("org/gguf:Q5_K"))
    assert "no GGUF file of Q5_K; there is none at all" in refused(lambda: hub.fetch("org/model:Q5_K"))


@needs_library
def test_a_gguf_file_in_the_cache_needs_no_network(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories["org/gguf"] = GGUFS
    path = hub.fetch("org/gguf:Q8_0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.fetch("org/gguf:Q8_0") == path == hub.fetch("org/gguf")
    assert "HF_HUB_OFFLINE" in refused(lambda: hub.fetch("org/gguf:F16"))


@needs_library
def test_a_mirror_without_sizes_will_do(server: Hub) -> None:
    server.knows_sizes = False
    assert contents(hub.fetch("org/model")) == MODEL


@needs_library
@pytest.mark.parametrize("name", ["org/model", "org/sharded"])
def test_a_name_that_was_fetched_once_asks_the_network_no_more(server: Hub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = hub.fetch(name)
    server.requests.clear()
    assert hub.fetch(name) == folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.fetch(name) == folder
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hub.fetch(name) == folder
    assert server.requests == []


@needs_library
def test_what_another_program_has_fetched_needs_no_network(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    where = {"cache_dir": str(Path(os.environ["HF_HOME"]) / "hub"), "endpoint": server.url}
    for file in ("config.json", "model.safetensors"):
        huggingface_hub.hf_hub_download("org/model", file, **where)
    server.requests.clear()
    assert set(contents(hub.fetch("org/model"))) == {"config.json", "model.safetensors"}
    assert server.requests == []


@needs_library
def test_another_program_finds_what_was_fetched_and_removes_it(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hub.fetch("org/model")
    cache = Path(os.environ["HF_HOME"]) / "hub"
    where = {"cache_dir": str(cache), "endpoint": server.url}
    server.requests.clear()
    for file, data in MODEL.items():
        assert Path(huggingface_hub.hf_hub_download("org/model", file, **where)).read_bytes() == data
    assert server.fetched() == []
    found = huggingface_hub.scan_cache_dir(cache)
    assert [(repo.repo_id, repo.nb_files) for repo in found.repos] == [("org/model", len(MODEL))] and not found.warnings
    found.delete_revisions(COMMIT).execute()
    assert [*hub.cached_models()] == [] and not (cache / "models--org--model").exists()


@needs_library
def test_of_a_new_revision_only_what_has_changed_is_fetched(server: Hub) -> None:
    server.repositories["org/gguf"] = GGUFS
    old = hub.fetch("org/gguf:Q8_0")
    server.commit = COMMIT[::-1]
    assert hub.fetch("org/gguf:F16").parent != old.parent
    assert hub.fetch("org/gguf:Q8_0").read_bytes() == GGUFS["model-Q8_0.gguf"]
    assert server.fetched() == ["model-Q8_0.gguf", "model-F16.gguf"]


@needs_library
def test_without_the_network_one_line_says_what_is_wrong(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    line = refused(lambda: hub.fetch("org/model"))
    assert line == f"cannot fetch org/model from http://127.0.0.1:9/org/model: {os.strerror(errno.ECONNREFUSED)}; {AGAIN}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    where = f"is not whole in {tmp_path / 'elsewhere'}, and HF_HUB_OFFLINE keeps it from being downloaded"
    assert refused(lambda: hub.fetch("org/model")) == f"org/model {where}"
    assert refused(lambda: hub.fetch("org/model:Q8_0")) == f"org/model:Q8_0 {where}"


@needs_library
def test_a_hub_that_never_answers_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As behind a firewall: the connection stands, and nothing comes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        assert "timed out" in refused(lambda: hub.fetch("org/model"))


@needs_library
@pytest.mark.usefixtures("no_patience")
def test_a_server_that_hangs_in_the_middle_of_a_file_is_reported_and_the_next_download_goes_on(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.gate.clear()
    server.cut_at = 2 * MB

    def hangs(name: str, n: int, total: int) -> None:
        if n == 2 * MB:
            server.cut_at = 0

    monkeypatch.setattr(download, "on_progress", [hangs])
    line = refused(lambda: hub.fetch("org/model"))
    assert line == f"cannot fetch org/model from {server.url}/org/model: timed out; {AGAIN}"
    server.gate.set()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 60)
    assert contents(hub.fetch("org/model")) == MODEL
    assert server.ranges[-1] == f"bytes={2 * MB}-"


@needs_library
def test_nothing_is_printed_about_another_try(server: Hub) -> None:
    server.repositories["org/model"] = MODEL
    server.cuts, server.cut_at = 1, 2 * MB
    result = subprocess.run([sys.executable, "-c", FETCH, "org/model"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == ""


@needs_library
@pytest.mark.parametrize(
    ("name", "refusal", "words"),
    [
        ("org/nobody", None, NOTHING),
        ("org/model", (401, "GatedRepo"), GATED),
        ("org/model", (403, "GatedRepo"), GATED),
        ("org/model", (401, ""), NOTHING),
        ("org/model", (404, ""), NOTHING),
        ("org/model", (503, ""), "cannot fetch {name}: {url}/{name} answers with status 503; try again later"),
        ("org/model", (204, ""), "cannot fetch {name}: what answers at {url}/{name} is no Hugging Face hub; " + CHECK),
        ("org/mo--del", None, "cannot fetch {name} from {url}/{name}: Cannot have -- or .. in repo_id: '{name}'; " + AGAIN),
    ],
)  # fmt: skip
def test_a_refusal_is_reported_in_one_line_with_what_to_do(
    server: Hub, name: str, refusal: tuple[int, str] | None, words: str
) -> None:
    server.refusal = refusal
    assert refused(lambda: model_lookup.find(name)) == words.format(url=server.url, name=name)


@needs_library
def test_a_token_opens_what_is_gated_and_goes_to_the_hub_alone(
    stories: Hub, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_secret"
    assert "HF_TOKEN" in refused(lambda: hub.fetch("org/model"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert contents(hub.fetch("org/model")) == MODEL
    hub.fetch_file("tokenizer.bin")
    assert [*server.others["llama2.c"].authorizations.values()] == [""]
    with Hub({"org/sharded": SHARDED}).serving() as storage:
        server.redirect = storage.url
        hub.fetch("org/sharded")
    assert len(storage.fetched()) == len(SHARDED) - 1 and {*storage.authorizations.values()} == {""}


@needs_library
@pytest.mark.usefixtures("no_patience")
def test_a_broken_connection_is_taken_up_where_it_broke(server: Hub, tmp_path: Path) -> None:
    server.repositories["org/model"] = MODEL
    server.cuts, server.cut_at = 3, 2 * MB + 5
    assert contents(hub.fetch("org/model")) == MODEL
    assert [int(each.removeprefix("bytes=").rstrip("-")) // MB for each in server.ranges] == [2, 4]
    assert left_over(tmp_path) == []


@needs_library
@pytest.mark.usefixtures("no_patience")
def test_a_connection_that_breaks_before_any_byte_is_given_up(server: Hub) -> None:
    server.cuts = 100
    assert refused(lambda: hub.fetch("org/model")).endswith(AGAIN)
    assert server.fetched() == ["config.json"] * download.MAX_TRIES


@needs_library
@pytest.mark.usefixtures("no_patience")
def test_a_server_that_knows_no_ranges_sends_the_file_again(server: Hub) -> None:
    server.ignores_ranges = True
    server.cuts, server.cut_at = 1, 2 * MB
    assert contents(hub.fetch("org/model")) == MODEL
    assert server.fetched().count("model.safetensors") == 2


@needs_library
def test_a_process_that_was_killed_leaves_what_the_next_one_goes_on_with(server: Hub, tmp_path: Path) -> None:
    server.gate.clear()
    server.cut_at = 3 * MB
    process = subprocess.Popen([sys.executable, "-c", FETCH, "org/model"], cwd=ROOT)
    parts = tmp_path / "home" / "hub" / "models--org--model" / "blobs"

    def is_half_there() -> bool:
        with suppress(FileNotFoundError):  # the library's own parts of small files come and go
            return any(path.stat().st_size >= 2 * MB for path in parts.glob("*.incomplete"))
        return False

    wait_for(is_half_there)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.gate.set()
    assert [*hub.cached_models()] == []
    assert contents(hub.fetch("org/model")) == MODEL
    assert len(server.ranges) == 1 and int(server.ranges[0].removeprefix("bytes=").rstrip("-")) >= 2 * MB


@needs_library
@pytest.mark.usefixtures("no_patience")
def test_a_small_file_shorter_than_listed_is_refused(server: Hub) -> None:
    server.shorter = 1000
    server.repositories["org/model"] = {"config.json": b" " * 2000, "model.safetensors": WEIGHTS}
    assert refused(lambda: hub.fetch("org/model")).startswith("cannot fetch org/model")
    server.shorter = 0
    assert contents(hub.fetch("org/model"))["config.json"] == b" " * 2000


@needs_library
@pytest.mark.parametrize("n_bytes", [len(WEIGHTS), len(WEIGHTS) + 1000, len(WEIGHTS) - 1000])
def test_a_part_of_something_else_does_no_harm(server: Hub, tmp_path: Path, n_bytes: int) -> None:
    part = tmp_path / "home/hub/models--org--model/blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(n_bytes))
    if n_bytes <= len(WEIGHTS):
        assert "has been removed; try again" in refused(lambda: hub.fetch("org/model"))
    assert contents(hub.fetch("org/model")) == MODEL


@needs_library
def test_a_file_longer_than_listed_is_refused_and_removed(server: Hub, tmp_path: Path) -> None:
    server.sizes["model.safetensors"] = MB
    for _ in range(2):
        line = refused(lambda: hub.fetch("org/model"))
        assert line == f"model.safetensors is longer than the {MB} bytes that were announced"
    assert all(path.stat().st_size == 0 for path in (tmp_path / "home").rglob("*.incomplete"))
    server.sizes.clear()
    assert contents(hub.fetch("org/model")) == MODEL


@needs_library
def test_progress_is_reported_by_bytes(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(download, "on_progress", [lambda *figures: told.append(figures)])
    part = tmp_path / "home/hub/models--org--model/blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS[: 2 * MB])
    hub.fetch("org/model")
    weights = [n for name, n, total in told if total == len(WEIGHTS)]
    assert weights[0] == 2 * MB and weights[-1] == len(WEIGHTS) and weights == sorted(weights) and len(weights) > 40
    small = [n for _, n, total in told if total != len(WEIGHTS)]
    assert small[-1] == sum(map(len, MODEL.values())) - len(WEIGHTS) and {name for name, *_ in told} == {"org/model"}


@needs_library
def test_who_waits_for_another_process_hears_how_far_it_is(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blob = tmp_path / "home/hub/models--org--model/blobs" / hashlib.sha256(WEIGHTS).hexdigest()
    n_looks = 0

    @contextmanager
    def lock_of_another_process(path: Path, timeout: float) -> Iterator[None]:
        nonlocal n_looks
        if path.stem == blob.name:
            n_looks += 1
            if n_looks < 4:
                blob.with_name(f"{blob.name}.incomplete").write_bytes(WEIGHTS[: n_looks * 1000])
                raise TimeoutError
            blob.write_bytes(WEIGHTS)
        yield

    told: list[int] = []
    monkeypatch.setattr("huggingface_hub.utils.WeakFileLock", lock_of_another_process)
    monkeypatch.setattr(download, "on_progress", [lambda _, n, total: told.append(n) if total == len(WEIGHTS) else None])
    hub.fetch("org/model")
    assert told == [1000, 2000, 3000]
    assert "model.safetensors" not in server.fetched()


@needs_library
def test_bytes_of_another_sum_are_refused_and_removed(server: Hub, tmp_path: Path) -> None:
    server.sums["model.safetensors"] = "1" * 64
    line = refused(lambda: hub.fetch("org/model"))
    right = hashlib.sha256(WEIGHTS).hexdigest()
    assert line == f"model.safetensors came with sha256 {right}, not {'1' * 64}, and has been removed; try again"
    assert left_over(tmp_path) == []
    assert not (tmp_path / "home/hub/models--org--model/blobs" / right).exists()


@needs_library
def test_a_full_disk_is_told_before_it_is_written_to(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as small:
        small.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4 * MB))
        line = refused(lambda: hub.fetch("org/model"))
        assert line.startswith(
            f"no room for org/model in {tmp_path / 'home' / 'hub'}: 0.01 GB are to come, and 0.00 GB are free; "
        )
        assert "model.safetensors" not in server.fetched()
        part = tmp_path / "home/hub/models--org--model/blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"
        part.write_bytes(WEIGHTS[: 2 * MB])
        assert contents(hub.fetch("org/sharded")) and contents(hub.fetch("org/model")) == MODEL
        assert server.ranges == [f"bytes={2 * MB}-"]


@needs_library
def test_a_disk_that_becomes_full_keeps_what_has_come(server: Hub, tmp_path: Path) -> None:
    limit = 2 * MB
    done = subprocess.run(
        [sys.executable, "-c", FETCH, "org/model"],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        f"CheckpointError: cannot write {tmp_path / 'home' / 'hub'}: File too large; what has come is kept, and HF_HOME names"
        in done.stderr
    )
    assert contents(hub.fetch("org/model")) == MODEL
    assert server.ranges == [f"bytes={limit}-"]


@needs_library
def test_a_cache_that_cannot_be_written_to_is_told(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert "HF_HOME names another place" in refused(lambda: hub.fetch("org/model"))


@needs_library
def test_two_processes_that_fetch_at_once_fetch_the_weights_once(server: Hub) -> None:
    server.repositories["org/model"] = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    server.gate.clear()
    server.cut_at = 100
    processes = [
        subprocess.Popen([sys.executable, "-c", FETCH, "org/model"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    wait_for(lambda: [path.rsplit("/")[-1] for _, path in server.requests].count("main") == 2)
    time.sleep(0.1)
    server.gate.set()
    folders = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1 and contents(Path(folders.pop()))["model.safetensors"] == WEIGHTS
    assert server.fetched().count("model.safetensors") == 1


@needs_library
@pytest.mark.parametrize(
    ("repository", "words"),
    [
        ({"model.safetensors": b""}, "org/model on the hub has no 'config.json', which the model needs"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "org/model on the hub has no model.safetensors; "),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "; its pytorch_model.bin may run code when it is read"),
        ({**SHARDED, "model.safetensors.index.json": b'{"weight_map": {"a": "../../../x"}}'}, "has no '../../../x'"),
    ],
)
def test_a_repository_that_is_no_model_is_refused(server: Hub, repository: dict[str, bytes], words: str) -> None:
    server.repositories["org/model"] = repository
    assert words in refused(lambda: hub.fetch("org/model"))


@needs_library
@pytest.mark.parametrize("index", [b"[]", b"{", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_left_to_the_reader(server: Hub, index: bytes) -> None:
    server.repositories["org/model"] = SHARDED | {"model.safetensors.index.json": index, "1": b""}
    folder = hub.fetch("org/model")
    server.requests.clear()
    assert hub.fetch("org/model") == folder and server.requests == []


# What a server names

OUTSIDE = "../../../../outside"


def outside(tmp_path: Path) -> list[str]:
    """What lies outside the two folders that a fetch may write in."""
    homes = (tmp_path / "home/hub/.locks", *(tmp_path / "home/hub").glob("models--*"))
    paths = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    return [str(path) for path in paths if not any(path.is_relative_to(home) for home in homes)]


@needs_library
@pytest.mark.parametrize("name", [OUTSIDE, "{folder}/outside", "..", "", "a/b", "a\\b", "a" * 300, "é"])
def test_an_etag_or_a_sum_does_not_lead_out_of_the_cache(server: Hub, tmp_path: Path, name: str) -> None:
    for file in MODEL:
        server.etags[file] = server.sums[file] = name.format(folder=tmp_path)
    assert contents(hub.fetch("org/model")) == MODEL
    assert outside(tmp_path) == []


@needs_library
@pytest.mark.parametrize("nonsense", [5, [], {"a": 1}])
def test_a_list_of_nonsense_is_refused(server: Hub, nonsense: Any) -> None:
    server.sums["model.safetensors"] = nonsense
    assert refused(lambda: hub.fetch("org/model")).endswith(f"is no Hugging Face hub; {CHECK}")


@needs_library
@pytest.mark.parametrize("commit", [OUTSIDE, "main", "..", "", "0123\n"])
def test_a_commit_does_not_lead_out_of_the_cache(stories: Hub, tmp_path: Path, commit: str) -> None:
    stories.commit = commit
    assert "has the commit " in refused(lambda: hub.fetch("org/model"))
    assert "has the commit " in refused(lambda: hub.fetch_file("stories15M.bin"))
    assert outside(tmp_path) == []
    refs = tmp_path / "home/hub/models--org--model/refs/main"
    refs.parent.mkdir(parents=True)
    refs.write_text(f"../../../../{tmp_path.name}")
    assert hub.cached("org/model") is None


@needs_library
@pytest.mark.parametrize(
    "name", [f"{OUTSIDE}-", "/outside-", "a/../../outside-", "a\\b-", "c:b-", "a\x1b]0;evil\x07-", "a\u202eb-"]
)
def test_a_files_name_does_not_lead_out_of_the_repository_nor_to_the_terminal(server: Hub, tmp_path: Path, name: str) -> None:
    server.repositories["org/gguf"] = {f"{name}Q4_K_M.gguf": b"4 bits", "model-Q8_0.gguf": b"8 bits"}
    assert "there is model-Q8_0.gguf" in refused(lambda: hub.fetch("org/gguf:Q4_K_M"))
    assert hub.fetch("org/gguf").read_bytes() == b"8 bits"
    index = json.dumps({"weight_map": {"a": f"{name}.safetensors"}}).encode()
    server.repositories["org/model"] = {**SHARDED, "model.safetensors.index.json": index, f"{name}.safetensors": b"shard"}
    assert "which the model needs" in refused(lambda: hub.fetch("org/model"))
    assert outside(tmp_path) == []


@needs_library
@pytest.mark.parametrize("missing", [["symlink"], ["symlink", "link"]])
def test_a_disk_without_links_holds_models_too(server: Hub, monkeypatch: pytest.MonkeyPatch, missing: list[str]) -> None:
    server.repositories["org/model"] = {**MODEL, "chat_template.jinja": b""}

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in missing:
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)  # which Python 3.10 does not ask `os` for
    folder = hub.fetch("org/model")
    assert contents(folder) == server.repositories["org/model"]
    assert not any(path.is_symlink() for path in folder.iterdir())


# Its address


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("", " ", "https://huggingface.co/"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        with pytest.raises(CheckpointError, match=r"^from https://huggingface.co/org/model$"), monkeypatch.context() as patch:
            patch.setattr(hub, "_Repository", lambda _: 1 / 0)
            patch.setattr(hub, "_explain", lambda error, name, page: f"from {page}")
            hub.fetch("org/model")


@needs_library
@pytest.mark.parametrize("address", ["huggingface.co", "ftp://huggingface.co", "http://", "http://[::1", "https://me:secret@"])
def test_an_address_that_is_none_is_shown(server: Hub, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    line = refused(lambda: hub.fetch("org/model"))
    assert line.startswith(f"cannot fetch org/model from {address.rstrip('/').replace('me:secret@', '')}/org/model: ")


@needs_library
@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("trouble", ["none there", "refused", "no hub", "commit", "cut off"])
def test_a_password_in_the_address_is_told_to_nobody(server: Hub, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url.replace("://", "://me:p@ss:secret@"))
    if trouble == "none there":
        server.repositories.clear()
    elif trouble == "refused":
        server.refusal = (500, "")
    elif trouble == "no hub":
        monkeypatch.setenv("HF_ENDPOINT", "http://me:secret@127.0.0.1:9")
    elif trouble == "commit":
        server.commit = OUTSIDE
    else:
        server.shorter = 3
    line = refused(lambda: hub.fetch("org/model"))
    assert "secret" not in line and "me:" not in line
    assert "://127.0.0.1:" in line


@pytest.mark.parametrize(
    ("name", "is_one"),
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
def test_a_repository_is_an_organization_and_a_name(name: str, is_one: bool) -> None:
    assert hub.is_repository(name) == is_one


def test_a_path_that_is_there_is_no_repository(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").mkdir()
    assert model_lookup.find("org/model") == Path("org/model")
    assert server.requests == []


def test_without_the_library_one_line_says_so(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fetching = "huggingface_hub, to fetch org/model, which is no path here"
    assert refused(lambda: model_lookup.find("org/model")) == f"a package is missing: {fetching}; pip install huggingface_hub"
    line = refused(lambda: model_lookup.find("stories42M.bin"))
    assert (
        line.startswith("a package is missing: huggingface_hub")
        and "; pip install huggingface_hub; put stories42M.bin here" in line
    )
    assert server.requests == []


# The stories


@needs_library
def test_the_stories_are_fetched_where_they_are_nowhere_and_then_are_there(stories: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.FILES:
        assert model_lookup.find(name).read_bytes() == f"these are {name}".encode()
    stories.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in hub.FILES:
        assert model_lookup.find(name).read_bytes() == f"these are {name}".encode()
    assert stories.requests == []


@needs_library
def test_a_story_that_is_here_is_not_fetched(stories: Hub) -> None:
    Path("stories15M.bin").write_bytes(b"mine")
    assert model_lookup.find("stories15M.bin") == Path("stories15M.bin")
    Path("models").mkdir()
    Path("models/stories42M.bin").write_bytes(b"mine")
    assert model_lookup.find("stories42M.bin") == Path("models/stories42M.bin")
    assert stories.requests == []


@needs_library
def test_a_story_of_another_sum_is_refused_and_removed(stories: Hub, tmp_path: Path) -> None:
    wrong = {"stories15M.bin": b"forged", "tokenizer.bin": b"forged too"}
    stories.repositories = {"karpathy/tinyllamas": {"stories15M.bin": wrong["stories15M.bin"]}}
    stories.others["llama2.c"].repositories = {"karpathy/llama2.c": wrong}
    for name, data in wrong.items():
        right = hub.FILES[name][1]
        line = f"{name} came with sha256 {hashlib.sha256(data).hexdigest()}, not {right}, and has been removed; try again"
        assert refused(lambda name=name: model_lookup.find(name)).startswith(f"{line}; put {name} here or in models/, from ")
    assert left_over(tmp_path) == []
    assert not list((tmp_path / "home").rglob("stories15M.bin")) and not list((tmp_path / "home").rglob("tokenizer.bin"))


@needs_library
def test_the_tokenizer_of_the_stories_is_fetched_where_none_lies_beside_the_model(stories: Hub, tmp_path: Path) -> None:
    for size, name in ((32000, "tokenizer.bin"), (512, "tok512.bin")):
        assert model_lookup.find_tokenizer(None, tmp_path / "model.bin", size).read_bytes() == f"these are {name}".encode()
    assert model_lookup.find_tokenizer(None, None, 32000).read_bytes() == b"these are tokenizer.bin"
    (tmp_path / "tokenizer.bin").write_bytes(b"mine")
    assert model_lookup.find_tokenizer(None, tmp_path / "model.bin", 32000) == tmp_path / "tokenizer.bin"
    line = refused(lambda: model_lookup.find_tokenizer(None, None, 300), TokenizerError)
    assert line.startswith("no tok300.bin or tokenizer.bin in any of ") and line.endswith("; name it with tokenizer=...")


def test_a_tokenizer_that_cannot_be_fetched_may_be_named(stories: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refused(lambda: model_lookup.find_tokenizer(None, None, 32000), TokenizerError)
    assert line.startswith("no tok32000.bin or tokenizer.bin in any of models, ") and "so name it with tokenizer=...; " in line


def test_a_folder_brings_its_tokenizer_along(tmp_path: Path) -> None:
    assert model_lookup.find_tokenizer(None, tmp_path, 32000) == tmp_path


@pytest.mark.skipif(not SHARED.exists(), reason="needs the sums of ../shared")
def test_the_sums_are_those_of_the_manifest() -> None:
    manifest = json.loads((SHARED / "golden" / "assets_manifest.json").read_text("utf-8"))
    sums = {path.removeprefix(hub.LLAMA2C_TOKENIZER.removesuffix("tokenizer.bin")): sha256 for path, sha256 in hub.FILES.values()}
    assert sums == {path: about["sha256"] for path, about in manifest.items() if isinstance(about, dict)}
