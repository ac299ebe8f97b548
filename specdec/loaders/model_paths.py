"""Resolve a model's name to a file or folder: a path, a name in models/, an alias, the bundled pair, or a model on the hub.

The contents of the files are read elsewhere.
"""

import difflib
import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from specdec.argument_checks import CheckpointError
from specdec.loaders import hf_hub, is_head_folder, optional_dependencies, read_vocabulary
from specdec.loaders.model_aliases import read_aliases
from specdec.loaders.model_file import is_text
from specdec.tokenizer import TokenizerError

_PACKAGE = Path(__file__).resolve().parents[1]
# Bundled models: inside an installed package, next to it in a checkout.
BUNDLED_MODELS_DIR = _PACKAGE / "models" if (_PACKAGE / "models").is_dir() else _PACKAGE.parent / "models"
DEFAULT_TARGET, DEFAULT_DRAFT = BUNDLED_MODELS_DIR / "stories6M.bin", BUNDLED_MODELS_DIR / "stories650K.bin"
DEFAULT_TOKENIZER = BUNDLED_MODELS_DIR / "tok1024.bin"
NAMING_HINT = "name a model on the Hugging Face hub as org/name, or org/name:Q4_K_M for a GGUF file of it"
SEARCH_URL = "https://huggingface.co/models?search="
# URL of a repository on the hub, or of a file in one: org/name, and the quant
HUB_ADDRESS = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/([\w.-]+/[\w.-]+)(:[\w.-]+)?(?:/.*)?", re.ASCII
)
BARE_NAME = re.compile(r"([\w.-]+)(?::[\w.-]+)?", re.ASCII)  # with the tag of ollama
PUBLISHED_TOKENIZERS = {512: "tok512.bin", 32000: "tokenizer.bin"}  # by vocabulary size
MODEL_SUFFIXES = (".bin", ".gguf", ".safetensors", ".pt", ".pth", ".onnx", ".llamafile")  # supported or not
OPTIONAL_SUFFIXES = (".bin", ".gguf")  # may be left out of a name
MAX_NAME_BYTES = 255
MIN_NAME_SIMILARITY = 0.75  # difflib ratio from which a name is taken for a typo


def resolve_path(name: str | os.PathLike[str], candidates: Sequence[str] = ()) -> Path:
    """Return the local file or folder of a model that is given by a path or a name; download the model if necessary.

    A name is one in models/, an alias, a repository on the hub, or a published stories model.

    Args:
        name: A path or a name. The folder of a repository in the hub's cache stands for its snapshot.
        candidates: Words that a misspelt name might stand for.

    Raises:
        CheckpointError: Nothing is found. The error suggests a similar name, or explains how models are named.
    """
    if not os.fspath(name):
        raise CheckpointError("the model name is empty; expected a path, or a name in models/")
    path, name = Path(name), os.fspath(name)
    if found := _find_local_path(path):
        return found
    if (model := read_aliases().get(name)) and model != name:
        return resolve_path(model, candidates)
    if published := _find_published(name):
        return hf_hub.fetch_file(published)
    if (address := HUB_ADDRESS.fullmatch(name)) or "://" in name:
        advice = f"name the model as {address[1]}{address[2] or ''}" if address else "download the file and give its path"
        raise CheckpointError(f"{name} is a URL; {advice}")
    hint = _suggest_similar(path, candidates)
    if hf_hub.is_repository_name(name):
        try:
            return hf_hub.fetch(name)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{hint}") from None
    if path.is_absolute():
        raise CheckpointError(f"cannot read {path}: {os.strerror(errno.ENOENT)}{hint}")
    folders = " or in ".join(map(str, get_model_folders()))
    raise CheckpointError(f"{name!r} not found here, in {folders}{hint or f'; {_make_naming_hint(name)}'}")


def _make_naming_hint(name: str) -> str:
    """Return advice on how to name a model, as a part of the error about a name that was not found."""
    if name.endswith(MODEL_SUFFIXES) or not (bare := BARE_NAME.fullmatch(name)):
        return NAMING_HINT
    return f"{NAMING_HINT}; find one at {SEARCH_URL}{bare[1]}"


def find_required_packages(names: Sequence[str], tokenizer: str = "") -> dict[str, str]:
    """Return a dict from each optional package that models need to its purpose, without downloading anything.

    The packages are huggingface_hub, installed or not, if a model has to be downloaded, and tokenizers, unless it is installed,
    for most tokenizers.

    Args:
        names: Names of models, the target first.
        tokenizer: The target's tokenizer, if one was given.

    Raises:
        CheckpointError: A GGUF file cannot be read.
    """
    needed = dict[str, str]()
    for name in filter(None, [*names, tokenizer]):
        model = _read_valid_aliases().get(name, name)
        if not find_local(name) and (_find_published(model) or hf_hub.is_repository_name(model)):
            needed.setdefault(optional_dependencies.HUB, hf_hub.format_fetch_purpose(name))
    if not optional_dependencies.is_installed(optional_dependencies.TOKENIZERS):  # checked first: the loop reads files
        for name in filter(_has_json_tokenizer, filter(None, [tokenizer or names[0], *names[1:]])):
            needed.setdefault(optional_dependencies.TOKENIZERS, f"to read the tokenizer of {name}")
    return needed


def list_model_paths(folder: Path) -> list[Path]:
    """List the paths in a folder that look like models, sorted: files with the name of a model, and folders with a config.json.

    Raises:
        OSError: The folder cannot be read.
    """

    def is_model(path: Path) -> bool:
        is_tokenizer = path.name.startswith("tok") and path.suffix == ".bin"
        is_file = path.suffix in OPTIONAL_SUFFIXES and hf_hub.is_model_file_name(path.name) and not is_tokenizer
        return is_file or (path / "config.json").is_file()

    return sorted(filter(is_model, folder.iterdir()))


def is_model_name(word: str) -> bool:
    """Return whether a command-line word names a model and is not a prompt.

    It does if it names an existing model file or folder, or if it has the form of a name that only a model can have.
    """
    if not _is_possible_name(word):
        return False
    if found := _find_local_path(Path(word)):
        return found.is_file() or (found / "config.json").exists()
    is_name = (
        word in hf_hub.PUBLISHED_FILES
        or word in _read_valid_aliases()
        or word.endswith(MODEL_SUFFIXES)
        or hf_hub.is_repository_name(word)
    )
    return is_name and not any(map(str.isspace, word))


def is_text_file(word: str) -> bool:
    """Return whether a command-line word names an existing text file (here or in models/) that is not a model."""
    found = _find_local_path(Path(word)) if _is_possible_name(word) and not word.endswith(MODEL_SUFFIXES) else None
    return bool(found and found.is_file() and is_text(found))


def _is_possible_name(word: str) -> bool:
    return word != "" and len(word.encode(errors="replace")) <= MAX_NAME_BYTES


def find_tokenizer(given: str | os.PathLike[str] | None, target: Path | None, vocab_size: int) -> Path:
    """Return the path of the tokenizer for a target; download a published tokenizer if necessary.

    It is the given one, else the target if that is a folder, else tok<vocab_size>.bin or tokenizer.bin next to the target, in
    models/ or on the hub.

    Args:
        given: Path or name of a tokenizer; None: look for one.
        target: The target's file or folder, if known.
        vocab_size: The target's vocabulary size.

    Raises:
        CheckpointError: The given tokenizer does not exist.
        TokenizerError: No tokenizer was given, and none is found.
    """
    if given is not None:
        return resolve_path(given)
    if target and target.is_dir():
        return target
    folders = [*([target.parent] if target else []), *get_model_folders()]
    names = [f"tok{vocab_size}.bin", "tokenizer.bin"]
    found = _find_first_existing([folder / name for folder in folders for name in names])
    if not found:
        where = ", ".join(str(folder) for folder in folders)
        problem = f"no {' or '.join(names)} in any of {where}"
        if vocab_size not in PUBLISHED_TOKENIZERS:
            raise TokenizerError(f"{problem}; name it with tokenizer=...")
        try:
            return hf_hub.fetch_file(PUBLISHED_TOKENIZERS[vocab_size])
        except CheckpointError as error:
            raise TokenizerError(f"{problem}, so name it with tokenizer=...; {error}") from None
    return found


def get_default_pair() -> tuple[Path, Path]:
    """Return the paths of the bundled target and draft.

    Raises:
        CheckpointError: One of them, or the bundled tokenizer, is missing.
    """
    missing = [str(path) for path in (DEFAULT_TARGET, DEFAULT_DRAFT, DEFAULT_TOKENIZER) if not path.exists()]
    if missing:
        problem = f"no model is given, and the default pair lacks {' and '.join(missing)}"
        raise CheckpointError(f"{problem}; restore it with 'git checkout models' or by installing again")
    return DEFAULT_TARGET, DEFAULT_DRAFT


def get_model_folders() -> tuple[Path, Path]:
    """Return the folders that model names are looked up in: models/ in the current folder, then that of the bundled models."""
    return Path("models"), BUNDLED_MODELS_DIR


def _read_valid_aliases() -> dict[str, str]:
    """Return the model of each alias in the user's alias file; {} if the file cannot be read or is not valid."""
    with suppress(CheckpointError):
        return read_aliases()
    return {}


def _find_published(name: str) -> str:
    """Return the file name in `hf_hub.PUBLISHED_FILES` that equals a name, given with or without .bin; "" if there is none."""
    return next((file for file in (name, f"{name}.bin") if file in hf_hub.PUBLISHED_FILES), "")


def find_local(name: str) -> Path | None:
    """Return the local path of a model or tokenizer, as `resolve_path` does, but without the network; None if it is not here."""
    if found := _find_local_path(Path(name)):
        return found
    if model := _read_valid_aliases().get(name):
        return _find_local_path(Path(model)) or (hf_hub.find_cached(model) if hf_hub.is_repository_name(model) else None)
    if published := _find_published(name):
        return hf_hub.find_cached_file(published)
    return hf_hub.find_cached(name) if hf_hub.is_repository_name(name) else None


def _has_json_tokenizer(name: str) -> bool:
    """Return whether the tokenizer of a model or tokenizer name needs, or may need, the package `tokenizers` to be read.

    JSON files, GGUF files with a BPE vocabulary and folders need it, except the folder of a draft head. Repositories that are not
    downloaded yet may need it.
    """
    path = find_local(name)
    if not path:
        return hf_hub.is_repository_name(name)
    if path.is_dir():
        return not is_head_folder(path)
    if path.suffix == ".json":
        return True
    from specdec.families.pre_tokenizers import BYTE_BPE, CHAR_BPE, TOKENIZER_MODELS

    return TOKENIZER_MODELS.get(str(read_vocabulary(path).get("model"))) in (BYTE_BPE, CHAR_BPE)


def _suggest_similar(path: Path, candidates: Sequence[str]) -> str:
    """Return "; did you mean ...?" with the known model name most similar to one that was not found; "" if none is similar.

    Args:
        path: The name that was not found.
        candidates: Other words that it might stand for, in addition to models here or in the cache, published ones and aliases.
    """
    folders = [path.parent] if len(path.parts) > 1 else [Path(), *get_model_folders()]
    cached = [name if ":" in path.name else name.partition(":")[0] for name, _ in hf_hub.list_cached_models()]
    known = [*candidates, *_read_valid_aliases(), *(hf_hub.PUBLISHED_FILES if len(path.parts) == 1 else cached)]
    for folder in folders:
        with suppress(OSError):
            known += [str(path.parent / model.name) for model in list_model_paths(folder)]

    def normalize(name: str) -> str:
        name = name.lower()
        return next((name.removesuffix(ending) for ending in OPTIONAL_SUFFIXES if name.endswith(ending)), name)

    names = {normalize(name): name for name in reversed(known)}
    close = difflib.get_close_matches(normalize(str(path)), names, 1, MIN_NAME_SIMILARITY)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def _find_local_path(path: Path) -> Path | None:
    """Return the existing file or folder of a path, or of a name in models/; None if there is none.

    A repository's folder in the hub's cache becomes the snapshot folder of the last download, or the only one.

    Raises:
        CheckpointError: The path cannot be accessed, or the repository has no snapshot that is the latest or the only one.
    """
    found = _find_first_existing(_list_candidate_paths(path))
    if not found or not (found / "snapshots").is_dir() or (found / "config.json").exists():
        return found
    if snapshot := hf_hub.find_snapshot(found):
        return snapshot
    snapshots = [each for each in found.glob("snapshots/*") if each.is_dir()]
    if len(snapshots) != 1:
        raise CheckpointError(f"{found} is a folder of the hub's cache without a latest snapshot; name one of those in it")
    return snapshots[0]


def _list_candidate_paths(path: Path) -> list[Path]:
    """List the paths to try for a path or a model name, in order: here and in the models folders, as it is and with a suffix."""
    path = Path(os.path.expanduser(path))  # shells do not expand --model=~/x.gguf
    names = [path, *(path.with_name(path.name + ending) for ending in OPTIONAL_SUFFIXES if path.name and not path.suffix)]
    return [folder / name for folder in (Path(), *get_model_folders()) for name in names]


def _find_first_existing(paths: list[Path]) -> Path | None:
    """Return the first of the given paths that exists, or None.

    Raises:
        CheckpointError: A path cannot be accessed.
    """
    for path in paths:
        try:
            path.stat()  # since Python 3.14, `exists` hides errors such as a lack of permission
            return path
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        except OSError as error:
            raise CheckpointError(f"cannot access {path}: {error.strerror}") from None
    return None
