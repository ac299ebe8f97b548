"""A name becomes a file or folder: a path, a name in models/, the pair that comes along, or what is on the hub.

Knows nothing of what is in a file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import hub
from .readers import CheckpointError
from .tokenizer import TokenizerError

MODELS = Path(__file__).resolve().parent / "models"
DEFAULT_TARGET, DEFAULT_DRAFT = MODELS / "stories6M.bin", MODELS / "stories650K.bin"
DEFAULT_TOKENIZER = MODELS / "tok1024.bin"
HUB, LLAMA2C = "https://huggingface.co/karpathy/tinyllamas", "https://github.com/karpathy/llama2.c"
MODELS_SOURCE = f"the stories models are at {HUB}; one on the hub is named as there, org/name"
PUBLISHED_TOKENIZERS = {512: "tok512.bin", 32000: "tokenizer.bin"}  # by size
ENDINGS = (".bin", ".gguf", ".safetensors", ".pt", ".pth", ".onnx")  # of files of models, ours and others
LONGEST_NAME = 255  # bytes
RESTORE = "restore it with 'git checkout models' or by installing again"


def find(name: str | os.PathLike[str], source: str = MODELS_SOURCE) -> Path:
    """The file or folder of that path, else of that name in models/, else on the hub: a repository, or one of `hub.FILES`.

    Raises CheckpointError, which tells the source.
    """
    if not os.fspath(name):
        raise CheckpointError("a name of no letters is no file; expected a path, or a name in models/")
    path = Path(name)
    found = _first(_places(path))
    published = next((file for file in (os.fspath(name), f"{os.fspath(name)}.bin") if file in hub.FILES), "")
    if not found and published:
        return hub.fetch_file(published)
    if not found and hub.is_repository(os.fspath(name)):
        return hub.fetch(os.fspath(name))
    if not found and not path.is_absolute():
        raise CheckpointError(f"{path} is neither here nor in {' or '.join(map(str, model_folders()))}; {source}")
    return found or path


def is_model_name(word: str) -> bool:
    """Whether a word says a model rather than a text: a file or a model's folder that is there, or what could only be a name."""
    if not word or len(word.encode(errors="replace")) > LONGEST_NAME:
        return False
    if found := _first(_places(Path(word))):
        return found.is_file() or (found / "config.json").exists()
    is_name = word in hub.FILES or word.endswith(ENDINGS) or hub.is_repository(word)
    return is_name and not any(map(str.isspace, word))


def find_tokenizer(given: str | os.PathLike[str] | None, target: Path | None, vocab_size: int) -> Path:
    """What was given, else a target that is a folder, else tok<vocab>.bin or tokenizer.bin beside it, in models/, on the hub."""
    if given is not None:
        return find(given, f"llama2.c's tokenizer.bin is at {LLAMA2C}")
    if target and target.is_dir():
        return target
    folders = [*([target.parent] if target else []), *model_folders()]
    names = [f"tok{vocab_size}.bin", "tokenizer.bin"]
    found = _first([folder / name for folder in folders for name in names])
    if not found:
        where = ", ".join(str(folder) for folder in folders)
        lacking = f"no {' or '.join(names)} in any of {where}"
        if vocab_size not in PUBLISHED_TOKENIZERS:
            raise TokenizerError(f"{lacking}; name the tokenizer with -z")
        try:
            return hub.fetch_file(PUBLISHED_TOKENIZERS[vocab_size])
        except CheckpointError as error:
            raise TokenizerError(f"{lacking}, so name the tokenizer with -z; {error}") from None
    return found


def default_pair() -> tuple[Path, Path]:
    """The target and the draft that come along. Raises CheckpointError where they are gone."""
    missing = [str(path) for path in _defaults() if not path.exists()]
    if missing:
        raise CheckpointError(
            f"no -m, and the default pair lacks {' and '.join(missing)}; {RESTORE}, "
            f"or get stories15M.bin from {HUB} and tokenizer.bin from {LLAMA2C}, and name the model: -m stories15M.bin"
        )
    return DEFAULT_TARGET, DEFAULT_DRAFT


@contextmanager
def telling_how_to_restore() -> Iterator[None]:
    """Around loading: a file of ours that is damaged is told with the way to get it again."""
    try:
        yield
    except (CheckpointError, TokenizerError) as error:
        ours = any(str(path) in str(error) for path in _defaults())
        raise type(error)(f"{error}; {RESTORE}" if ours else str(error)) from None


def _defaults() -> tuple[Path, Path, Path]:
    return DEFAULT_TARGET, DEFAULT_DRAFT, DEFAULT_TOKENIZER


def model_folders() -> tuple[Path, Path]:
    """Where names are looked for: models/ here, then the one beside this file."""
    return Path("models"), MODELS


def _places(path: Path) -> list[Path]:
    """Where a path or a name may lie, its ending left out or not."""
    names = [path, *(path.with_name(path.name + ending) for ending in (".bin", ".gguf") if path.name and not path.suffix)]
    return [folder / name for folder in (Path(), *model_folders()) for name in names]


def _first(paths: list[Path]) -> Path | None:
    """The first that exists. Raises CheckpointError for one that cannot be looked for."""
    for path in paths:
        try:
            path.stat()  # `exists` tells nothing of what kept it from looking, since Python 3.14
            return path
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        except OSError as error:
            raise CheckpointError(f"cannot look for {path}: {error.strerror}") from None
    return None
