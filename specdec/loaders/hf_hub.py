"""Find models on the Hugging Face hub, download them into its cache, and list what the cache holds.

The hub is accessed through huggingface_hub, and the files are stored in its cache, in its layout, so that other programs share
them. The cache is read without the library, which may be missing and takes a quarter of a second to load. Every name from a
server is checked before it becomes a part of a path.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.argument_checks import CheckpointError
from specdec.loaders import optional_dependencies
from specdec.loaders.model_file import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    WEIGHTS,
    list_shard_names,
    read_json_object,
    write_text_atomically,
)

if TYPE_CHECKING:
    from specdec.loaders.resumable_download import RemoteFile

GGUF_SUFFIX = ".gguf"
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0", "")  # preferred GGUF files if no quant is given, like llama.cpp's -hf; "": any
AUXILIARY_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", ADAPTER_CONFIG,
)  # fmt: skip
TINYLLAMAS = "karpathy/tinyllamas"
LLAMA2C_TOKENIZER = "https://raw.githubusercontent.com/karpathy/llama2.c/master/tokenizer.bin"
PUBLISHED_FILES = {  # the path in TINYLLAMAS or the URL, and the sha256
    "stories260K.bin": ("stories260K/stories260K.bin", "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696"),
    "stories15M.bin": ("stories15M.bin", "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"),
    "stories42M.bin": ("stories42M.bin", "9f65a1000e17d0bc167dd6332e0ce5119a0222a3d920cead5bce413bfab2ee7b"),
    "stories110M.bin": ("stories110M.bin", "515267168726a1ed1317a64a408492e6af3b67c1f71c5bd98c01d9d721803a24"),
    "tok512.bin": ("stories260K/tok512.bin", "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312"),
    "tokenizer.bin": (LLAMA2C_TOKENIZER, "50a52ef822ee9e83de5ce9d0be0a025a773d019437f58b5ff9dcafb063ece361"),
}
MAX_NAME_BYTES = 255
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # the first that is set counts
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_REPOSITORY_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*(:[\w.-]+)?", re.ASCII)
_FILE_ENDINGS = (".bin", ".json", ".gguf", ".safetensors", ".pt", ".model")
_QUANT_NAME = re.compile(r"(?<![A-Za-z0-9])((?:I?Q\d|BF16|F16|F32)\w*)[.-]", re.IGNORECASE)  # in a GGUF file's name
_NON_MODEL_NAME = re.compile(r"mmproj|imatrix|-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE | re.ASCII)
_HEAD_QUANT, _HEAD_NAME = "mtp", re.compile(r"(^|/)mtp-[^/]*$", re.IGNORECASE)  # of a GGUF file with an MTP head alone
_COMMIT, _SHA256 = re.compile(r"[0-9a-f]{1,64}"), re.compile(r"[0-9a-f]{64}")
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


def is_repository_name(name: str) -> bool:
    """Return whether a model name has the form of a hub repository, org/name or org/name:quant, and is not a file name."""
    return bool(_REPOSITORY_NAME.fullmatch(name)) and not name.endswith(_FILE_ENDINGS)


def is_model_file_name(name: str) -> bool:
    """Return whether a model file's name may be that of a model, of its first shard or of a draft head.

    Later shards, image encoders (mmproj) and importance matrices are no models of their own.
    """
    return not _NON_MODEL_NAME.search(name)


def format_fetch_purpose(name: str) -> str:
    """Return the purpose for which a model name needs huggingface_hub, for the error if the library is missing."""
    return f"to download {name}, which is not a local path"


def fetch(name: str) -> Path:
    """Return the local folder or GGUF file of a hub repository; download it if it is not in the hub's cache.

    A folder has safetensors weights, a config and a tokenizer. A repository without safetensors gives one of its GGUF files.

    Args:
        name: org/name, or org/name:quant for the GGUF file with that quant in its name, such as Q4_K_M.

    Raises:
        CheckpointError: The model is not in the cache and cannot be downloaded.
    """
    if path := find_cached(name):
        return path
    repository, _, quant = name.partition(":")
    with _explain_errors(name, repository):
        return _Repository(repository).fetch_model(quant)


def fetch_file(name: str) -> Path:
    """Return the local path of one of PUBLISHED_FILES; download it and check its sha256 if it is not in the hub's cache.

    Raises:
        CheckpointError: The file is not in the cache and cannot be downloaded.
    """
    if path := find_cached_file(name):
        return path
    from specdec.loaders.resumable_download import RemoteFile, download

    path_or_url, sha256 = PUBLISHED_FILES[name]
    with _explain_errors(name, TINYLLAMAS):
        if "://" not in path_or_url:
            return _Repository(TINYLLAMAS).fetch_files([path_or_url], sha256) / path_or_url
        repository_dir = _get_repository_dir(TINYLLAMAS)
        file = RemoteFile(path_or_url, {}, repository_dir / "llama2.c" / name, repository_dir / "blobs" / sha256, None, sha256)
        download(name, [file], _get_cache_dir())
        return file.link


def find_cached(name: str) -> Path | None:
    """Return a repository's model in the hub's cache, without the network; None if the cache has no complete one.

    It is the folder if that is complete and no quant is given, else a GGUF file of the quant, or of the first of DEFAULT_QUANTS.

    Args:
        name: org/name or org/name:quant, as in `fetch`.
    """
    name, _, quant = name.partition(":")
    if not (folder := find_snapshot(_get_repository_dir(name))) or (not quant and _is_complete(folder)):
        return folder
    files = choose_gguf(_list_ggufs(folder), quant)
    return folder / files[0] if files and all((folder / file).exists() for file in files) else None


def find_cached_file(name: str) -> Path | None:
    """Return the path of one of PUBLISHED_FILES in the hub's cache, without the network; None if it is not there."""
    repository_dir = _get_repository_dir(TINYLLAMAS)
    candidates = [repository_dir / "llama2.c" / name, *repository_dir.glob(f"snapshots/*/{PUBLISHED_FILES[name][0]}")]
    return next((path for path in candidates if path.is_file()), None)


def list_cached_models() -> Iterator[tuple[str, Path]]:
    """Yield a name and the local path of each model in the hub's cache, without incomplete safetensors folders.

    The name is one for `fetch` or `fetch_file`, or the path if a GGUF file has no quant in its name.
    """
    for repository_dir in sorted(_get_cache_dir().glob("models--*--*")):
        name = repository_dir.name.removeprefix("models--").replace("--", "/", 1)
        folder = find_snapshot(repository_dir)
        if folder and name == TINYLLAMAS:
            paths = ((file, folder / path) for file, (path, _) in PUBLISHED_FILES.items() if file.startswith("stories"))
            yield from ((file, path) for file, path in paths if path.is_file())
        elif folder and _is_complete(folder):
            yield name, folder
        elif folder:
            for file in filter(is_model_file_name, _list_ggufs(folder)):
                match = _QUANT_NAME.search(Path(file).name)
                quant = _HEAD_QUANT if _HEAD_NAME.search(file) else match and match[1]
                yield (f"{name}:{quant}" if quant else str(folder / file)), folder / file


def choose_gguf(files: Iterable[str], quant: str) -> list[str]:
    """Choose a GGUF model among the file names of a repository, and return the names of all its shards; [] if none matches.

    Args:
        files: File names in the repository.
        quant: Part of the file name to look for, such as Q4_K_M, or "mtp" for a file that holds an MTP head alone; "": the first
            of DEFAULT_QUANTS that a file has.
    """
    named = [file for file in sorted(files) if file.endswith(GGUF_SUFFIX) and is_model_file_name(file)]
    firsts = [file for file in named if bool(_HEAD_NAME.search(file)) == (quant == _HEAD_QUANT)]
    for candidate in [quant] if quant else DEFAULT_QUANTS:
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(candidate)}[.-]" if candidate else "", re.IGNORECASE)
        if found := next(filter(pattern.search, firsts), None):
            return list_shard_names(found)
    return []


# Downloading


class _Repository:
    """A repository on the hub, with its latest commit and the sizes and hashes of its files, which it requests when created."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi, constants

        timeout = constants.HF_HUB_ETAG_TIMEOUT  # without one the library waits forever
        info = HfApi(endpoint=_get_endpoint()).model_info(name, revision="main", files_metadata=True, timeout=timeout)
        if not _COMMIT.fullmatch(info.sha or ""):
            raise CheckpointError(
                f"{_get_endpoint()} has the commit {str(info.sha)[:40]!r} of {name}; expected hexadecimal digits"
            )
        self._name, self._commit, self._repository_dir = name, str(info.sha), _get_repository_dir(name)
        self._snapshot_dir = self._repository_dir / "snapshots" / self._commit
        self._files = {file.rfilename: file for file in info.siblings or [] if _is_safe_name(file.rfilename)}

    def fetch_model(self, quant: str) -> Path:
        """Download the repository's model if necessary, and return its local path.

        It is the safetensors folder, or a GGUF file if a quant is given or the repository has no safetensors.

        Args:
            quant: Quant in the name of the GGUF file, such as Q4_K_M; "" for none.

        Raises:
            CheckpointError: The repository has no such GGUF file, or no supported weights.
        """
        found, has_safetensors = choose_gguf(self._files, quant), not {WEIGHTS, INDEX}.isdisjoint(self._files)
        if quant and not found:
            names = ", ".join(sorted(Path(file).name for file in self._files if file.endswith(GGUF_SUFFIX))) or "none"
            raise CheckpointError(f"{self._name} on the hub has no GGUF file of {quant}; available: {names}")
        if found and (quant or not has_safetensors):
            return self.fetch_files(found) / found[0]
        index = [INDEX] if INDEX in self._files and WEIGHTS not in self._files else []
        self.fetch_files([CONFIG, *(file for file in AUXILIARY_FILES if file in self._files), *index])
        return self.fetch_files(_list_shards(self._snapshot_dir / INDEX) if index else [WEIGHTS])

    def fetch_files(self, names: Sequence[str], sha256: str = "") -> Path:
        """Download the named files that are missing, and return the snapshot folder that holds them.

        Also writes the commit to refs/main of the cache, so that later look-ups find this snapshot.

        Args:
            names: File names in the repository.
            sha256: Expected hash of the files; "": the one that the hub reports.

        Raises:
            CheckpointError: The repository lacks a file, or the download is not valid.
        """
        from specdec.loaders.resumable_download import download

        if unavailable := [file for file in names if file not in self._files]:
            raise CheckpointError(f"{self._name} on the hub has no {unavailable[0]!r}, which the model needs")
        missing = [file for file in names if not (self._snapshot_dir / file).exists()]
        download(self._name, [self._remote_file(file, sha256) for file in missing], _get_cache_dir())
        (self._repository_dir / "refs").mkdir(parents=True, exist_ok=True)
        write_text_atomically(self._repository_dir / "refs" / "main", self._commit)
        return self._snapshot_dir

    def _remote_file(self, name: str, sha256: str) -> "RemoteFile":
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        from specdec.loaders.resumable_download import RemoteFile

        file, url = self._files[name], hf_hub_url(self._name, name, revision=self._commit, endpoint=_get_endpoint())
        sha256 = sha256 or (file.lfs.sha256 if file.lfs and _SHA256.fullmatch(file.lfs.sha256) else "")
        blob = self._repository_dir / "blobs" / (sha256 or hashlib.sha256(f"{self._commit}/{name}".encode()).hexdigest())
        return RemoteFile(url, build_hf_headers(), self._snapshot_dir / name, blob, file.size, sha256)


@contextmanager
def _explain_errors(name: str, repository: str) -> Iterator[None]:
    """Run a block that downloads a model; turn any exception into a one-line CheckpointError that says what to do.

    Raises the error before the block runs if huggingface_hub is missing or an environment variable forbids downloads.

    Args:
        name: The model name that the user gave.
        repository: Its repository on the hub, org/name.
    """
    try:
        if missing := optional_dependencies.format_missing_packages({optional_dependencies.HUB: format_fetch_purpose(name)}):
            raise CheckpointError(missing)
        if _get_offline_variable():
            raise CheckpointError(
                f"no complete copy of {name} found in {_get_cache_dir()}, and {_get_offline_variable()} forbids downloads"
            )
        yield
    except Exception as error:
        reason = (
            str(error) if isinstance(error, CheckpointError) else _format_error(error, name, f"{_get_endpoint()}/{repository}")
        )
        raise CheckpointError(_URL_CREDENTIALS.sub("", reason)) from None


def _format_error(error: BaseException, name: str, page: str) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return f"{name} is gated: accept its licence at {page}, then run 'hf auth login' or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        reason = f"{name} is not a local path, and {page} does not exist or is not accessible: check the name"
        return f"{reason}; if it is private or gated, run 'hf auth login' or set HF_TOKEN"
    if status:
        return f"cannot download {name}: {page} returned status {status}; try again later"
    if isinstance(error, (TypeError, AttributeError, LookupError, json.JSONDecodeError)):
        return f"cannot download {name}: {page} is not a Hugging Face hub; check the network and HF_ENDPOINT"
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_FULL_ERRNOS):
        target = f"{error.filename or _get_cache_dir()}: {error.strerror}"
        return f"cannot write {target}; set HF_HOME to another folder and try again (a partial download is kept)"
    cause: BaseException | None = error
    while cause:
        error = cause if isinstance(cause, OSError) else error  # the message of the system is the clearest
        cause = cause.__cause__ or cause.__context__
    line = re.sub(r"^\[\w+ -?\d+\] ", "", str(error).strip()).partition("\n")[0].rstrip(".") or type(error).__name__
    return f"cannot download {name} from {page}: {line}; check the network and try again (a partial download is kept)"


# The cache


def _get_cache_dir() -> Path:
    """Return the folder of the hub's cache, from the same environment variables and defaults as in huggingface_hub."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(given))).absolute()


def _get_offline_variable() -> str:
    """Return the name of the environment variable that forbids downloads; "" if none does."""
    name = next((name for name in OFFLINE_VARIABLES if os.environ.get(name)), "")
    return name if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") else ""


def _get_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def _get_repository_dir(name: str) -> Path:
    """Return the folder of a repository (org/name) in the hub's cache, for its blobs, refs and snapshots; it may not exist."""
    return _get_cache_dir() / f"models--{name.replace('/', '--')}"


def find_snapshot(repository_dir: Path) -> Path | None:
    """Return the snapshot of the last downloaded commit in a repository's folder in the hub's cache; None if there is none."""
    with suppress(OSError, ValueError):
        commit = (repository_dir / "refs" / "main").read_text().strip()
        folder = repository_dir / "snapshots" / commit
        return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None
    return None


def _is_complete(folder: Path) -> bool:
    """Return whether a snapshot folder has a config.json and all safetensors weights, in one file or in shards."""
    is_split = (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
    return all((folder / file).exists() for file in (CONFIG, *(_list_shards(folder / INDEX) if is_split else [WEIGHTS])))


def _list_shards(index: Path) -> list[str]:
    """Return the names of the shards in a safetensors index file, sorted; [] if the index is damaged (reported on loading)."""
    with suppress(CheckpointError, KeyError, AttributeError):
        return sorted({str(file) for file in read_json_object(index)["weight_map"].values()})
    return []


def _list_ggufs(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF_SUFFIX}"))


def _is_safe_name(name: str) -> bool:
    """Return whether a file name from the hub is printable and stays inside its repository's folder on every system."""
    is_plain = name.isprintable() and not set(name) & set("\\:")
    return is_plain and all(part.strip(". ") and len(part.encode()) <= MAX_NAME_BYTES for part in name.split("/"))
