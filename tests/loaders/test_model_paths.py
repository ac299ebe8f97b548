"""Resolution of model names: folders of the hub's cache, URLs and names of other programs, and bundled files."""

from pathlib import Path

import pytest

from specdec.loaders import CheckpointError, model_paths
from specdec.loaders.model_paths import add_restore_hint, is_model_name, resolve_path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def get_error(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_path(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_snapshots_are_listed_if_no_ref_names_the_latest() -> None:
    folder = make_repository("abc", "def")
    assert get_error(str(folder)).endswith(
        f"with 2 snapshots; name one of them: {folder / 'snapshots' / 'abc'}, {folder / 'snapshots' / 'def'}"
    )


def test_a_cache_folder_without_a_snapshot_advises_to_download_again() -> None:
    (Path("models--org--name") / "snapshots").mkdir(parents=True)
    assert get_error("models--org--name").endswith("with 0 snapshots; download the model again")


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
    assert f"{name} is a URL; {advice}" in get_error(name)


@pytest.mark.parametrize(
    ("name", "is_ollama", "search"),
    [
        ("llama3", False, "llama3"), ("gemma3:270m", True, "gemma3"), ("llama3.2:latest", True, "llama3.2"),
        ("SmolLM2-135M-Instruct", False, "SmolLM2-135M-Instruct"),
    ],
)  # fmt: skip
def test_the_error_about_a_bare_name_explains_names_on_the_hub(name: str, is_ollama: bool, search: str) -> None:
    line = get_error(name)
    assert (
        line.startswith(f"{name!r} not found here, in models or in ")
        and "name a model on the Hugging Face hub as org/name, or" in line
    )
    assert ("it looks like an ollama name, which is not supported" in line) is is_ollama
    assert line.endswith(f"; find one at https://huggingface.co/models?search={search}")


@pytest.mark.parametrize("name", ["nowhere.gguf", "nowhere.llamafile", "some/where/else", "org/name@main"])
def test_the_error_about_a_missing_path_suggests_no_search(name: str) -> None:
    assert "hub as org/name" in get_error(name) and "search" not in get_error(name)


@pytest.mark.parametrize("name", ["stories42M.bin", "stories15M"])
def test_the_error_about_a_stories_model_names_its_source_and_the_bundled_pair(name: str) -> None:
    line = get_error(name)
    source = "from https://huggingface.co/karpathy/tinyllamas and tokenizer.bin from https://raw.githubusercontent.com/"
    assert f"; put {name.removesuffix('.bin')}.bin {source}" in line and "/tokenizer.bin here or in models/, or use" in line
    assert line.endswith("use the pair that is bundled with specdec: target='stories6M.bin' draft='stories650K.bin'")
    assert resolve_path("stories6M.bin").exists() and resolve_path("stories650K.bin").exists()


def test_the_error_about_a_published_tokenizer_does_not_mention_the_pair() -> None:
    assert "; put tokenizer.bin from https://raw" in get_error("tokenizer.bin")
    assert "pair" not in get_error("tokenizer.bin")


def test_a_tilde_that_no_shell_expanded_is_resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shells do not expand --model=~/model.gguf."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert resolve_path("~/model.gguf") == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("cause", "has_hint"),
    [
        (None, True), (FileNotFoundError("gone"), True), (MemoryError(), False), (OSError(12, "Cannot allocate memory"), False),
        (PermissionError("no"), False),
    ],
)  # fmt: skip
def test_the_restore_hint_is_added_only_where_it_helps(cause: Exception | None, has_hint: bool) -> None:
    with pytest.raises(CheckpointError) as caught, add_restore_hint():
        try:
            if cause:
                raise cause
        except Exception:
            raise CheckpointError(f"{model_paths.DEFAULT_TARGET} cannot be loaded") from None
        raise CheckpointError(f"{model_paths.DEFAULT_TARGET} cannot be loaded")
    assert ("git checkout models" in str(caught.value)) is has_hint
