"""A name becomes a file or folder: a path, a name in models/, the pair that comes along, or what is on the hub.

Knows nothing of what is in a file.
"""

import difflib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specdec.families.config_values import CheckpointError
from specdec.families.pre_tokenizers import BYTES, CHARACTERS, KINDS
from specdec.loaders import hub, is_head, optional_dependencies
from specdec.loaders.format_sniffing import is_text
from specdec.loaders.gguf import read_vocabulary
from specdec.loaders.model_aliases import short_names
from specdec.tokenizer import TokenizerError
from specdec.validation import reading

_PACKAGE = Path(__file__).resolve().parents[1]
# The models that come along: inside an installed package, next to it in a checkout.
MODELS = _PACKAGE / "models" if (_PACKAGE / "models").is_dir() else _PACKAGE.parent / "models"
DEFAULT_TARGET, DEFAULT_DRAFT = MODELS / "stories6M.bin", MODELS / "stories650K.bin"
DEFAULT_TOKENIZER = MODELS / "tok1024.bin"
HUB, LLAMA2C = "https://huggingface.co/karpathy/tinyllamas", "https://github.com/karpathy/llama2.c"
NAMES = "a model on the Hugging Face hub is named org/name, or org/name:Q4_K_M for a GGUF file of it"
SEARCH = "https://huggingface.co/models?search="
PAIR = "use the small pair that comes along, stories6M.bin and stories650K.bin"
# of a repository on the hub, or of a file in one: org/name, and the bits that are named
ADDRESS = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/([\w.-]+/[\w.-]+)(:[\w.-]+)?(?:/.*)?", re.ASCII
)
BARE_NAME = re.compile(r"([\w.-]+)(:[\w.-]+)?", re.ASCII)  # the second part is a tag, as ollama has them
PUBLISHED_TOKENIZERS = {512: "tok512.bin", 32000: "tokenizer.bin"}  # by size
ENDINGS = (".bin", ".gguf", ".safetensors", ".pt", ".pth", ".onnx", ".llamafile")  # of files of models, ours and others
LEFT_OUT = (".bin", ".gguf")  # of them, those that a name may be without
LONGEST_NAME = 255  # bytes
LIKE_A_NAME = 0.75  # of the letters: rather a slip than another name
RESTORE = "restore it with 'git checkout models' or by installing again"


def find(name: str | os.PathLike[str], source: str = "", words: Sequence[str] = ()) -> Path:
    """Return the file or folder of a path, of a name in models/, of a short name, or of the hub: a repository or a stories model.

    Args:
        name: A path or a name. A folder of a repository in the hub's cache stands for its snapshot.
        source: Where to get the file, for the error; by default how models are named.
        words: Words that might have been meant by a misspelt name.

    Raises:
        CheckpointError: There is none. The error says what is most like it, or the source.
    """
    if not os.fspath(name):
        raise CheckpointError("a name of no letters is no file; expected a path, or a name in models/")
    path, name = Path(name), os.fspath(name)
    if found := _at(path):
        return found
    if (meant := short_names().get(name)) and meant != name:
        return find(meant, source, words)
    if published := _published(name):
        try:
            return hub.fetch_file(published)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_without_fetching(published)}") from None
    if (address := ADDRESS.fullmatch(name)) or "://" in name:
        way = f"name the model as {address[1]}{address[2] or ''}" if address else f"download the file, and name that; {NAMES}"
        raise CheckpointError(f"{name} is an address; {way}")
    hint = _did_you_mean(path, words)
    if hub.is_repository(name):
        try:
            return hub.fetch(name)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{hint}") from None
    if path.is_absolute():
        raise CheckpointError(f"cannot read {path}: {os.strerror(errno.ENOENT)}{hint}")
    places = " or ".join(map(str, model_folders()))
    raise CheckpointError(f"there is no {path} here or in {places}{hint or f'; {source or _way_to(name)}'}")


def _way_to(name: str) -> str:
    """Return how a model is named that was named in vain."""
    if name.endswith(ENDINGS) or not (bare := BARE_NAME.fullmatch(name)):
        return NAMES
    of_ollama = f"{name} is a name of ollama's, which are not supported: " if bare[2] else ""
    return f"{of_ollama}{NAMES}; {SEARCH}{bare[1]} lists some"


def needs(names: Sequence[str], tokenizer: str = "") -> dict[str, str]:
    """What models of those names, the target first, take of the packages that may be missing, and what for; fetches nothing.

    tokenizer: the target's, where one was named. Raises CheckpointError for a GGUF file that cannot be read.
    """
    needed = dict[str, str]()
    for name in filter(None, [*names, tokenizer]):
        meant = _short_names().get(name, name)
        if not here(name) and (_published(meant) or hub.is_repository(meant)):
            way = f" ({_without_fetching(published)})" if (published := _published(meant)) else ""
            needed.setdefault(optional_dependencies.HUB, hub.purpose_of_fetching(name) + way)
    if not optional_dependencies.has(optional_dependencies.TOKENIZERS):  # or it costs a look into files
        for name in filter(_has_json_tokenizer, filter(None, [tokenizer or names[0], *names[1:]])):
            needed.setdefault(optional_dependencies.TOKENIZERS, f"to read the tokenizer of {name}")
    return needed


def models_in(folder: Path) -> list[Path]:
    """What looks like a model in a folder, by name: files of one, and folders with a config. Raises OSError."""

    def is_one(path: Path) -> bool:
        is_tokenizer = path.name.startswith("tok") and path.suffix == ".bin"
        is_file = path.suffix in LEFT_OUT and hub.may_be_a_model(path.name) and not is_tokenizer
        return is_file or (path / "config.json").is_file()

    return sorted(filter(is_one, folder.iterdir()))


def is_model_name(word: str) -> bool:
    """Whether a word says a model rather than a text: a file or a model's folder that is there, or what could only be a name."""
    if not _may_be_a_name(word):
        return False
    if found := _at(Path(word)):
        return found.is_file() or (found / "config.json").exists()
    is_name = word in hub.FILES or word in _short_names() or word.endswith(ENDINGS) or hub.is_repository(word)
    return is_name and not any(map(str.isspace, word))


def is_text_file(word: str) -> bool:
    """Return whether a word names a text that is there, and not by the name of a model."""
    found = _at(Path(word)) if _may_be_a_name(word) and not word.endswith(ENDINGS) else None
    return bool(found and found.is_file() and is_text(found))


def _may_be_a_name(word: str) -> bool:
    return word != "" and len(word.encode(errors="replace")) <= LONGEST_NAME


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
            raise TokenizerError(f"{lacking}; name it with tokenizer=...")
        try:
            return hub.fetch_file(PUBLISHED_TOKENIZERS[vocab_size])
        except CheckpointError as error:
            raise TokenizerError(f"{lacking}, so name it with tokenizer=...; {error}") from None
    return found


def default_pair() -> tuple[Path, Path]:
    """The paths of the embedded target and draft. Raises CheckpointError if they are missing."""
    missing = [str(path) for path in _defaults() if not path.exists()]
    if missing:
        raise CheckpointError(
            f"no model is named, and the default pair lacks {' and '.join(missing)}; {RESTORE}, "
            f"or get stories15M.bin from {HUB} and tokenizer.bin from {LLAMA2C}, and name it with target='stories15M.bin'"
        )
    return DEFAULT_TARGET, DEFAULT_DRAFT


@contextmanager
def telling_how_to_restore() -> Iterator[None]:
    """Say how to get a file of ours again where loading it fails, but not where memory is short or it may not be read."""
    try:
        yield
    except (CheckpointError, TokenizerError) as error:
        cause = error.__context__
        is_of_file = not isinstance(cause, MemoryError | OSError) or isinstance(cause, FileNotFoundError)
        ours = is_of_file and any(str(path) in str(error) for path in _defaults())
        raise type(error)(f"{error}; {RESTORE}" if ours else str(error)) from None


def _defaults() -> tuple[Path, Path, Path]:
    return DEFAULT_TARGET, DEFAULT_DRAFT, DEFAULT_TOKENIZER


def model_folders() -> tuple[Path, Path]:
    """Where names are looked for: models/ here, then the one beside this file."""
    return Path("models"), MODELS


def _short_names() -> dict[str, str]:
    """Those that can be read."""
    with suppress(CheckpointError):
        return short_names()
    return {}


def _without_fetching(published: str) -> str:
    """Return what to do where one of `hub.FILES` cannot be fetched."""
    pair, (place, _) = f", or {PAIR}" if published.startswith("stories") else "", hub.FILES[published]
    return f"put {published} here or in models/, from {place if '://' in place else HUB}{pair}"


def _published(name: str) -> str:
    """Which of `hub.FILES` has that name, its ending left out or not; "" for none."""
    return next((file for file in (name, f"{name}.bin") if file in hub.FILES), "")


def here(name: str) -> Path | None:
    """What `find` finds without the network."""
    if found := _at(Path(name)):
        return found
    if meant := _short_names().get(name):
        return _at(Path(meant)) or (hub.cached(meant) if hub.is_repository(meant) else None)
    if published := _published(name):
        return hub.cached_file(published)
    return hub.cached(name) if hub.is_repository(name) else None


def _has_json_tokenizer(name: str) -> bool:
    """Whether it has a tokenizer for the package `tokenizers`, or may have one if it is not downloaded yet."""
    path = here(name)
    if not path:
        return hub.is_repository(name)
    if path.is_dir():
        return not is_head(path)
    return path.suffix == ".json" or KINDS.get(str(read_vocabulary(path).get("model"))) in (BYTES, CHARACTERS)


def _did_you_mean(path: Path, words: Sequence[str]) -> str:
    """A hint at what is most like a name that nobody has: a model beside it, one that is known, or a word; "" for none."""
    folders = [path.parent] if len(path.parts) > 1 else [Path(), *model_folders()]
    fetched = [name if ":" in path.name else name.partition(":")[0] for name, _ in hub.cached_models()]
    known = [*words, *_short_names(), *(hub.FILES if len(path.parts) == 1 else fetched)]
    for folder in folders:
        with suppress(OSError):
            known += [str(path.parent / model.name) for model in models_in(folder)]

    def bare(name: str) -> str:
        name = name.lower()
        return next((name.removesuffix(ending) for ending in LEFT_OUT if name.endswith(ending)), name)

    names = {bare(name): name for name in reversed(known)}
    close = difflib.get_close_matches(bare(str(path)), names, 1, LIKE_A_NAME)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def _at(path: Path) -> Path | None:
    """Return what lies at a path or under a name in models/; of a repository in the hub's cache, its snapshot."""
    found = _first(_places(path))
    is_repository = found and (found / "snapshots").is_dir() and not (found / "config.json").exists()
    return _snapshot(found) if found and is_repository else found


def _snapshot(repository: Path) -> Path:
    """Return the snapshot that is a repository's newest, or its only one. Raises CheckpointError where neither can be told."""
    with reading(repository, CheckpointError):
        snapshots = sorted(each for each in (repository / "snapshots").iterdir() if each.is_dir())
    newest = ""
    with suppress(OSError, ValueError):
        newest = (repository / "refs" / "main").read_text().strip()
    found = [each for each in snapshots if each.name == newest] or snapshots
    if len(found) != 1:
        way = f"name one of them: {', '.join(map(str, found[:3]))}" if found else "download the model again"
        raise CheckpointError(f"{repository} is a folder of the hub's cache with {len(found)} snapshots; {way}")
    return found[0]


def _places(path: Path) -> list[Path]:
    """Where a path or a name may lie, its ending left out or not."""
    path = Path(os.path.expanduser(path))  # --model=~/x.gguf, which no shell expands
    names = [path, *(path.with_name(path.name + ending) for ending in LEFT_OUT if path.name and not path.suffix)]
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
