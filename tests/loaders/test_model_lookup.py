"""Names become files: folders of the hub's cache, names as other programs and browsers have them, files of ours."""

from pathlib import Path

import pytest

from specdec.loaders import CheckpointError, model_lookup
from specdec.loaders.model_lookup import find, is_model_name, telling_how_to_restore


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def refused(name: str) -> str:
    with pytest.raises(CheckpointError) as told:
        find(name)
    assert "\n" not in str(told.value)
    return str(told.value)


def repository(*commits: str, main: str = "") -> Path:
    """A folder as the hub's cache has it, with a snapshot for each commit."""
    folder = Path("models--org--name")
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(main)
    return folder


def test_a_folder_of_the_hubs_cache_stands_for_its_snapshot() -> None:
    folder = repository("abc", "def", main="def\n")
    assert find(folder) == find(str(folder.absolute())).relative_to(Path.cwd()) == folder / "snapshots" / "def"
    assert model_lookup.here(str(folder)) == folder / "snapshots" / "def" and is_model_name(str(folder))


def test_the_only_snapshot_needs_no_reference() -> None:
    folder = repository("abc", main="gone")
    assert find(folder) == folder / "snapshots" / "abc"


def test_snapshots_of_which_none_is_the_newest_are_listed() -> None:
    folder = repository("abc", "def")
    assert refused(str(folder)).endswith(
        f"with 2 snapshots; name one of them: {folder / 'snapshots' / 'abc'}, {folder / 'snapshots' / 'def'}"
    )


def test_a_cache_without_a_snapshot_is_to_be_downloaded_again() -> None:
    (Path("models--org--name") / "snapshots").mkdir(parents=True)
    assert refused("models--org--name").endswith("with 0 snapshots; download the model again")


def test_a_model_beside_a_folder_of_snapshots_is_itself() -> None:
    folder = repository("abc", main="abc")
    (folder / "config.json").write_text("{}")
    assert find(folder) == folder


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("https://huggingface.co/org/name", "name the model as org/name"),
        ("https://huggingface.co/org/name/tree/main", "name the model as org/name"),
        ("https://www.huggingface.co/org/name/resolve/main/x.gguf?download=true", "name the model as org/name"),
        ("hf.co/org/name:Q8_0", "name the model as org/name:Q8_0"),
        ("huggingface.co/org/name", "name the model as org/name"),
        ("hf://org/name", "name the model as org/name"),
        ("https://example.com/model.gguf", "download the file, and name that"),
    ],
)
def test_an_address_is_told_with_the_name_of_its_model(name: str, way: str) -> None:
    assert f"{name} is an address; {way}" in refused(name)


@pytest.mark.parametrize(
    ("name", "of_ollama", "search"),
    [
        ("llama3", False, "llama3"), ("gemma3:270m", True, "gemma3"), ("llama3.2:latest", True, "llama3.2"),
        ("SmolLM2-135M-Instruct", False, "SmolLM2-135M-Instruct"),
    ],
)  # fmt: skip
def test_a_bare_name_is_told_with_how_models_on_the_hub_are_named(name: str, of_ollama: bool, search: str) -> None:
    line = refused(name)
    assert line.startswith(f"there is no {name} here or in models or ") and "is named org/name, or org/name:Q4_K_M" in line
    assert ("is a name of ollama's, which are not supported" in line) is of_ollama
    assert line.endswith(f"; https://huggingface.co/models?search={search} lists some")


@pytest.mark.parametrize("name", ["nowhere.gguf", "nowhere.llamafile", "some/where/else", "org/name@main"])
def test_a_path_that_is_not_there_is_told_without_a_search(name: str) -> None:
    assert "is named org/name" in refused(name) and "search" not in refused(name)


@pytest.mark.parametrize("name", ["stories42M.bin", "stories15M"])
def test_a_stories_model_that_cannot_be_fetched_is_told_with_its_place_and_the_pair_that_comes_along(name: str) -> None:
    line = refused(name)
    assert f"; put {name.removesuffix('.bin')}.bin here or in models/, from https://huggingface.co/" in line
    assert line.endswith("use the small pair that comes along, stories6M.bin and stories650K.bin")
    assert find("stories6M.bin").exists() and find("stories650K.bin").exists()


def test_a_tokenizer_that_cannot_be_fetched_is_told_without_the_pair() -> None:
    assert "; put tokenizer.bin here or in models/, from https://raw" in refused("tokenizer.bin")
    assert "pair" not in refused("tokenizer.bin")


def test_a_home_folder_that_no_shell_has_expanded_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in --model=~/model.gguf."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert find("~/model.gguf") == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("cause", "is_told"),
    [
        (None, True), (FileNotFoundError("gone"), True), (MemoryError(), False), (OSError(12, "Cannot allocate memory"), False),
        (PermissionError("no"), False),
    ],
)  # fmt: skip
def test_how_to_restore_a_file_is_told_where_that_helps(cause: Exception | None, is_told: bool) -> None:
    with pytest.raises(CheckpointError) as told, telling_how_to_restore():
        try:
            if cause:
                raise cause
        except Exception:
            raise CheckpointError(f"{model_lookup.DEFAULT_TARGET} cannot be loaded") from None
        raise CheckpointError(f"{model_lookup.DEFAULT_TARGET} cannot be loaded")
    assert ("git checkout models" in str(told.value)) is is_told
