"""`specdec models`: aliases, downloads and removal."""

import re
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from specdec.cli import serve
from specdec.cli.serve import ServeRequest
from specdec.draft import installed_models
from specdec.draft.installed_models import find_neighbour_draft
from specdec.draft.model_bundle import check_draft_keyword
from specdec.draft.self_copy import make_self_draft
from specdec.draft.settings import parse_quantize
from specdec.loaders import model_paths, model_removal, packed_weights
from specdec.loaders.model_aliases import set_alias
from specdec.loaders.model_loader import Loader, load_model, open_checkpoint
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.server.model_manager import ModelSource
from specdec.ui import progress
from tests.conftest import Pair
from tests.fakes.hub import FakeHub, make_snapshot
from tests.fakes.terminal import PROMPT
from tests.tools.block_tensors import block_model
from tests.tools.command_runs import Run, from_json, run  # noqa: F401  (a fixture)
from tests.tools.gguf_files import CONFIGS, RawTensor, gguf_bytes, make_model_keys, make_model_tensors, random_blocks
from tests.tools.hf_folders import FIXTURES


@pytest.fixture
def alias_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "specdec" / "names"


def test_packed_weights_are_listed_and_removed(
    run: Run, pair: Pair, tmp_path: Path, alias_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "get_default_folder", lambda: tmp_path / "packed")
    monkeypatch.setattr(packed_weights, "MIN_AGE_S", -1.0)
    (tmp_path / "models").mkdir(exist_ok=True)
    for name in ("one.bin", "two.bin"):
        shutil.copy(pair.target, tmp_path / "models" / name)
    options = ["-d", "none", "-z", str(pair.tokenizer), "-t", "0", "-i", PROMPT, "-n", "20"]
    wanted = run("-m", "models/one.bin", *options, "--weight-cache", "off")[1]
    assert not (tmp_path / "packed").exists()
    for model, option in (("one", "--weight-cache"), ("one", "--packed"), ("two", "--packed")):  # --packed is the old name
        assert run("-m", f"models/{model}.bin", *options, option, "on")[:2] == (0, wanted)
    assert "packed weights (" in run("models")[1] and "one.bin, two.bin; specdec models clean removes them" in run("models")[1]
    assert [Path(each["model"]).name for each in from_json(run("models", "--json"))["packed"]] == ["one.bin", "two.bin"]
    assert run("models", "rm", "-y", "one.bin")[0] == 0
    assert [Path(each["model"]).name for each in from_json(run("models", "--json"))["packed"]] == ["two.bin"]
    assert run("-m", "models/two.bin", *options, "--quantize", "target", "--weight-cache", "on")[0] == 0
    assert run("models", "clean", "two.bin")[0] == 2
    assert run("models", "clean")[1].startswith("removed the packed weights of 1 model (")
    assert "packed" not in run("models")[1] and not [*(tmp_path / "packed").iterdir()]


def test_alias_works_wherever_a_model_is_named(run: Run, pair: Pair, tmp_path: Path, alias_file: Path) -> None:
    there = str(pair.target)
    assert run("models", "name", "big", there)[0] == 0
    assert run("models", "name", "little", str(pair.draft))[0] == 0
    alias_file.write_text(f"# mine\n\n{alias_file.read_text()}")
    wanted = run("-m", there, "-d", str(pair.draft), "-z", str(pair.tokenizer), "-t", "0", "-i", PROMPT, "-n", "30")
    assert run("-m", "big", "-d", "little", "-z", str(pair.tokenizer), "-t", "0", "-i", PROMPT, "-n", "30")[:2] == wanted[:2]
    assert run("big", PROMPT, "-d", "none", "-z", str(pair.tokenizer), "-t", "0", "-n", "30")[:2] == wanted[:2]
    assert "big is an alias of" in run("models")[1]
    assert from_json(run("models", "--json"))["names"] == {"big": there, "little": str(pair.draft)}
    assert run("models", "name", "big", "org/other")[0] == 0 and run("models", "rm", "little")[0] == 0
    assert from_json(run("models", "--json"))["names"] == {"big": "org/other"}
    assert alias_file.read_text().startswith("# mine\n")
    assert "did you mean 'big'" in run("-m", "bigg", "-i", "x")[2]
    for wrong in (["a/b", "x"], ["a", "x", "y"], ["a"], [], ["a b", "x"]):
        code, out, err = run("models", "name", *wrong)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1
    for damaged in (b"big\n", b"\xff\xfe x\n"):
        alias_file.write_bytes(damaged)
        code, _, err = run("-m", "other", "-i", "x")
        assert code == 2 and str(alias_file) in err and len(err.splitlines()) == 1
        assert run("-m", there, "-d", "none", "-z", str(pair.tokenizer), "-i", PROMPT, "-n", "20")[0] == 0, "which needs none"


def test_models_are_removed_after_confirmation(
    run: Run, pair: Pair, tmp_path: Path, alias_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_removal, "BUNDLED_MODELS_DIR", model_paths.BUNDLED_MODELS_DIR)
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.setattr(model_paths, "BUNDLED_MODELS_DIR", installed)
    (tmp_path / "models" / "target.bin").write_bytes(pair.target.read_bytes())
    snapshot = make_snapshot(tmp_path / "hub")
    (blobs := snapshot.parents[1] / "blobs").mkdir()
    (lacking := snapshot.parents[1] / ".no_exist" / "abc").mkdir(parents=True)
    for file in ("model.safetensors", "model.safetensors.index.json"):
        (lacking / file).touch()
    name = next(iter(CONFIGS))
    for bits in ("Q8_0", "Q4_0"):
        (blobs / bits).write_bytes(gguf_bytes(make_model_keys(name), make_model_tensors(name)))
        (snapshot / f"tiny-{bits}.gguf").symlink_to(blobs / bits)
    monkeypatch.setattr(typer, "confirm", lambda *_, **more: False)
    code, out, _ = run("models", "rm", "org/name:Q4_0")
    assert (code, out) == (1, "") and (blobs / "Q4_0").exists()
    assert run("models", "rm", "-y", "org/name")[0] == 2 and len([*blobs.iterdir()]) == 2, "of two, none is named"
    size = (blobs / "Q4_0").stat().st_size
    questions = []
    monkeypatch.setattr(typer, "confirm", lambda words, **more: questions.append(words) or True)
    assert run("models", "rm", "org/name:Q4_0")[0] == 0
    assert "org/name:Q4_0" in questions[0] and f"{size // 1000} kB" in questions[0].replace("  ", " ")
    assert not (blobs / "Q4_0").exists() and (blobs / "Q8_0").exists()
    assert [row["name"] for row in from_json(run("models", "--json"))["models"]] == ["target.bin", "org/name:Q8_0"]
    assert run("models", "rm", "-y", "org/name:Q8_0")[0] == 0 and not snapshot.parents[1].exists()
    monkeypatch.setattr(model_removal, "BUNDLED_MODELS_DIR", tmp_path / "models")
    for wrong in ("target.bin", "nobody", "../x"):
        code, out, err = run("models", "rm", "-y", wrong)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1
    monkeypatch.setattr(model_removal, "BUNDLED_MODELS_DIR", installed)
    assert run("models", "rm", "-y", "target")[0] == 0 and not (tmp_path / "models" / "target.bin").exists()
    for wrong in (["rm"], ["pull"], ["a", "b"]):
        code, out, err = run("models", *wrong)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1


def test_piped_pull_logs_progress(run: Run, alias_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra [hub] is not installed")
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", -1.0)
    monkeypatch.setattr(progress, "UPDATE_INTERVAL_S", -1.0)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeHub({"org/name": {"tiny-Q8_0.gguf": bytes(1_000_000)}}).serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        code, out, err = run("models", "pull", "org/name")
    assert code == 0 and re.fullmatch(r"org/name is in .*tiny-Q8_0\.gguf \(1\.0 MB\)\n", out)
    assert re.search(r"^specdec: downloading org/name: *100% of 1 MB, 0 s left$", err, re.MULTILINE)


def test_blob_shared_with_other_repository_is_kept(tmp_path: Path) -> None:
    """Since version 2.0 of the hub library, blobs are links into a store of the cache."""
    shared = tmp_path / "blobs" / "ab" / "abc"
    shared.parent.mkdir(parents=True)
    shared.write_bytes(b"weights")
    storage = tmp_path / "models--org--name"
    for folder in (storage / "blobs", storage / "snapshots" / "1"):
        folder.mkdir(parents=True)
    for name in ("one", "two"):
        (storage / "blobs" / name).symlink_to("../../blobs/ab/abc")
        (storage / "snapshots" / "1" / f"{name}.gguf").symlink_to(f"../../blobs/{name}")
    paths = model_removal.list_model_files(storage / "snapshots" / "1" / "one.gguf")
    assert model_removal.compute_total_bytes(paths) == len(b"weights")
    model_removal.delete_files(paths)
    assert {path.name for path in storage.rglob("*") if not path.is_dir()} == {"two", "two.gguf"} and shared.exists()


def test_name_without_extension_is_accepted(run: Run, pair: Pair, alias_file: Path) -> None:
    (alias_file.parents[2] / "models" / "target.bin").write_bytes(pair.target.read_bytes())
    assert [row["name"] for row in from_json(run("models", "target", "--json"))["models"]] == ["models/target.bin"]
    assert "expected a folder, a model, or the action pull" in run("models", "targte")[2]


def test_an_alias_names_a_model_that_exists(run: Run, pair: Pair, alias_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("models", "name", "ghost", "/no/such.gguf")[:2] == (2, "") and not alias_file.exists()
    monkeypatch.chdir(pair.target.parent)
    assert run("models", "name", "here", pair.target.name)[0] == 0 and run("models", "name", "later", "org/name")[0] == 0
    assert alias_file.read_text().splitlines() == [f"here {pair.target}", "later org/name"]
    out = run("models")[1]
    assert "later is an alias of org/name, which is not on this machine" in out and f"here is an alias of {pair.target}\n" in out


def test_models_that_can_chat_come_first_for_the_server(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    shutil.copy(pair.target, folder / "a.bin")
    shutil.copytree(FIXTURES / "llama", folder / "b")
    (folder / "b" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert [*installed_models.get_model_sizes(folder)] == ["b", "a.bin"]


def test_server_rereads_header_only_after_file_change(
    pair: Pair, tmp_path: Path, alias_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read, load = tmp_path / "models", list[Path](), installed_models.load_checkpoint
    folder.mkdir()
    shutil.copy(pair.target, folder / "one.bin")
    shutil.copytree(FIXTURES / "llama", folder / "two")
    (folder / "two" / "gone.gguf").symlink_to(tmp_path / "nowhere")
    (folder / "no_model.bin").write_bytes(b"x")

    def count_load(path: Path) -> Any:
        read.append(path)
        return load(path)

    monkeypatch.setattr(installed_models, "load_checkpoint", count_load)
    sizes = installed_models.get_model_sizes()
    assert {"one.bin", "two"} <= sizes.keys() and "no_model.bin" not in sizes
    assert sizes["one.bin"] == pair.target.stat().st_size
    assert {entry.name: entry.n_bytes for entry in installed_models.list_entries() if entry.config and not entry.is_head} == sizes
    read.clear()
    assert installed_models.get_model_sizes() == sizes and not read
    shutil.copy(pair.draft, folder / "one.bin")
    (folder / "two" / "config.json").unlink()
    shutil.copy(pair.draft, folder / "no_model.bin")
    changed = installed_models.get_model_sizes()
    assert {path.name for path in read} == {"one.bin", "no_model.bin"}
    assert (changed["one.bin"], changed["no_model.bin"]) == (pair.draft.stat().st_size,) * 2 and "two" not in changed


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "IQ4_NL"])
def test_self_draft_is_listed_and_made_only_where_supported(run: Run, tmp_path: Path, kind: str) -> None:
    path, rng = tmp_path / "model.gguf", np.random.default_rng(1)
    keys, tensors = block_model("llama", rng)
    floats = {"F32": np.float32, "F16": np.float16}
    for name, tensor in tensors.items():
        if isinstance(tensor, RawTensor):
            made = rng.standard_normal(tensor.shape).astype(floats[kind]) if kind in floats else None
            tensors[name] = random_blocks(rng, kind, *tensor.shape) if made is None else made
    path.write_bytes(gguf_bytes(keys, tensors))
    target, is_made = load_model(path), False
    with suppress(ValueError):
        is_made = bool(make_self_draft(target, None, lambda _: [], Loader()))
    assert is_made or kind not in (*floats, "Q8_0")
    (row,) = from_json(run("models", path, "--json"))["models"]
    assert (row["self"], row["drafts"]) == (is_made, [])
    checkpoint, options = open_checkpoint("target", path), parse_quantize("draft")
    with nullcontext() if is_made else pytest.raises(ValueError, match=r"a quantized copy \(self\) is not a faster draft"):
        check_draft_keyword("self", checkpoint, options)  # before weights are read
    with pytest.raises(ValueError, match=r"has no built-in head \(mtp\)"):
        check_draft_keyword("mtp", checkpoint, options)
    assert run("models", path)[1].split()[-2:] == (["self,", "lookup"] if is_made else [str(row["vocabulary"]), "lookup"])


def test_server_offers_aliases_of_files_anywhere_and_the_models_of_a_folder(
    pair: Pair, tmp_path: Path, alias_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(pair.target, folder / "one.bin")
    (folder / "no_model.bin").write_bytes(b"x")
    set_alias("short", str(folder / "one.bin"))
    set_alias("gone", str(folder / "two.bin"))
    installed = ModelSource("", pytest.fail, True).list_models()
    assert installed["short"] == pair.target.stat().st_size and "gone" not in installed
    assert ModelSource(str(folder), pytest.fail, True).list_models() == {"one.bin": pair.target.stat().st_size}
    served = list[tuple[Any, str]]()
    monkeypatch.setattr(serve, "load_decoder", lambda request, paths, _: paths)
    monkeypatch.setattr(serve, "make_served_model", lambda request, paths, name: served.append((paths[0], name)))
    serve.load_served_model(ServeRequest(models=str(folder)), "one.bin", lambda _: None)
    serve.load_served_model(ServeRequest(), "short", lambda _: None)
    assert served == [(folder / "one.bin", "one.bin"), (folder / "one.bin", "short")]


@pytest.mark.parametrize("arguments", [["-m", "a.bin", "--models", "."], ["--models", "nowhere"]])
def test_a_folder_of_models_must_exist_and_excludes_a_single_model(run: Run, arguments: list[str]) -> None:
    code, _, err = run("serve", *arguments)
    assert code and "--models" in err


def test_a_draft_next_to_a_model_is_found_by_name_else_by_size(tmp_path: Path) -> None:
    target = Path(shutil.copy(DEFAULT_TARGET, tmp_path / "story.bin"))
    assert find_neighbour_draft(target) is None
    small = Path(shutil.copy(DEFAULT_DRAFT, tmp_path / "little.bin"))
    assert find_neighbour_draft(target) == small
    assert find_neighbour_draft(small) is None
    named = Path(shutil.copy(DEFAULT_DRAFT, tmp_path / "story-draft.bin"))
    assert find_neighbour_draft(target) == named
    named.write_bytes(b"damaged")
    assert find_neighbour_draft(target) == small
