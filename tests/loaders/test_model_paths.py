"""Resolution of model names: folders of the hub's cache, URLs and names of other programs, and bundled files."""

from pathlib import Path

import pytest

from specdec.loaders import model_paths
from specdec.loaders.model_paths import is_model_name, resolve_path
from tests.tools.hf_folders import get_error


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def make_repository(*commits: str, main: str = "") -> Path:
    """Create a folder like those of the hub's cache, with a snapshot for each commit."""
    folder = Path("models--org--name")
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(main)
    return folder


def test_a_folder_of_the_hub_cache_resolves_to_its_snapshot() -> None:
    folder = make_repository("abc", "def", main="def\n")
    assert resolve_path(folder) == resolve_path(str(folder.absolute())).relative_to(Path.cwd()) == folder / "snapshots" / "def"
    assert model_paths.find_local(str(folder)) == folder / "snapshots" / "def" and is_model_name(str(folder))


def test_the_only_snapshot_needs_no_ref() -> None:
    folder = make_repository("abc", main="gone")
    assert resolve_path(folder) == folder / "snapshots" / "abc"


def test_a_cache_folder_without_its_latest_snapshot_advises_to_name_one() -> None:
    folder = make_repository("abc", "def")
    assert get_error(lambda: resolve_path(folder)).endswith("without a latest snapshot; name one of those in it")


def test_a_config_next_to_snapshots_makes_the_folder_the_model() -> None:
    folder = make_repository("abc", main="abc")
    (folder / "config.json").write_text("{}")
    assert resolve_path(folder) == folder


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("https://huggingface.co/org/name", "name the model as org/name"),
        ("https://huggingface.co/org/name/tree/main", "name the model as org/name"),
        ("https://www.huggingface.co/org/name/resolve/main/x.gguf?download=true", "name the model as org/name"),
        ("hf.co/org/name:Q8_0", "name the model as org/name:Q8_0"),
        ("huggingface.co/org/name", "name the model as org/name"),
        ("hf://org/name", "name the model as org/name"),
        ("https://example.com/model.gguf", "download the file and give its path"),
    ],
)
def test_the_error_about_a_url_names_its_model(name: str, advice: str) -> None:
    assert f"{name} is a URL; {advice}" in get_error(lambda: resolve_path(name))


@pytest.mark.parametrize("name", ["llama3", "gemma3:270m", "llama3.2:latest", "SmolLM2-135M-Instruct"])
def test_the_error_about_a_bare_name_explains_names_on_the_hub(name: str) -> None:
    line = get_error(lambda: resolve_path(name))
    assert line.startswith(f"{name!r} not found here, in models or in ")
    assert "name a model on the Hugging Face hub as org/name, or" in line
    assert line.endswith(f"; find one at https://huggingface.co/models?search={name.partition(':')[0]}")


@pytest.mark.parametrize("name", ["nowhere.gguf", "nowhere.llamafile", "some/where/else", "org/name@main"])
def test_the_error_about_a_missing_path_suggests_no_search(name: str) -> None:
    line = get_error(lambda: resolve_path(name))
    assert "hub as org/name" in line and "search" not in line


def test_a_tilde_that_no_shell_expanded_is_resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shells do not expand --model=~/model.gguf."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert resolve_path("~/model.gguf") == tmp_path / "model.gguf"
