"""Find models on the Hugging Face hub, download them into its cache, and list what the cache holds.

The hub is asked through huggingface_hub, and the files lie in its cache, in its layout, for other programs too. The cache is read
without the library, which may be missing and takes a quarter of a second to load. Whatever a server names is checked before it
becomes a part of a path.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specdec.families.config_values import CheckpointError
from specdec.loaders import optional_dependencies
from specdec.loaders.download import Download, RemoteFile
from specdec.loaders.gguf_shards import parts_of
from specdec.loaders.hf_config import ADAPTER_CONFIG, MERGE
from specdec.loaders.json_file import read_object, replace_text
from specdec.loaders.safetensors import INDEX, PICKLE, WEIGHTS

GGUF, CONFIG = ".gguf", "config.json"
DEFAULT_BITS = ("Q4_K_M", "Q8_0", "")  # the GGUF file that is taken if none is named, as llama.cpp's -hf does; "": any
SMALL_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "1_Pooling/config.json",
    ADAPTER_CONFIG,
)  # fmt: skip
TINYLLAMAS = "karpathy/tinyllamas"
LLAMA2C_TOKENIZER = "https://raw.githubusercontent.com/karpathy/llama2.c/master/tokenizer.bin"
FILES = {  # the path in TINYLLAMAS or the address, and the sha256
    "stories260K.bin": ("stories260K/stories260K.bin", "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696"),
    "stories15M.bin": ("stories15M.bin", "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"),
    "stories42M.bin": ("stories42M.bin", "9f65a1000e17d0bc167dd6332e0ce5119a0222a3d920cead5bce413bfab2ee7b"),
    "stories110M.bin": ("stories110M.bin", "515267168726a1ed1317a64a408492e6af3b67c1f71c5bd98c01d9d721803a24"),
    "tok512.bin": ("stories260K/tok512.bin", "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312"),
    "tokenizer.bin": (LLAMA2C_TOKENIZER, "50a52ef822ee9e83de5ce9d0be0a025a773d019437f58b5ff9dcafb063ece361"),
}
MAX_NAME_BYTES = 255
NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*(:[\w.-]+)?", re.ASCII)
_FILE_ENDINGS = (".bin", ".json", ".gguf", ".safetensors", ".pt", ".model")
_BITS = re.compile(r"(?<![A-Za-z0-9])((?:I?Q\d|BF16|F16|F32)\w*)[.-]", re.IGNORECASE)  # in a GGUF file's name
_NO_MODEL = re.compile(r"mmproj|imatrix|(^|/)mtp-|-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE | re.ASCII)
_COMMIT, _SHA256 = re.compile(r"[0-9a-f]{1,64}"), re.compile(r"[0-9a-f]{64}")
_PASSWORD = re.compile(r"(?<=://)[^/\s]*@")  # in an address, with the user's name


def is_repository(name: str) -> bool:
    """Return whether a name has the form org/name or org/name:bits, and is not a file's."""
    return bool(_NAME.fullmatch(name)) and not name.endswith(_FILE_ENDINGS)


def may_be_a_model(name: str) -> bool:
    """Return whether a file's name is that of a model in one file, or of the first part of a split one."""
    return not _NO_MODEL.search(name)


def purpose_of_fetching(name: str) -> str:
    """Return what the library is needed for."""
    return f"to fetch {name}, which is no path here"


def fetch(name: str) -> Path:
    """Return the folder or GGUF file of a repository, downloaded if the cache does not hold it.

    A folder has weights in safetensors, a config and a tokenizer. A repository without safetensors gives one of its GGUF files.

    Args:
        name: org/name, or org/name:bits for the GGUF file with those bits in its name, such as Q4_K_M.

    Raises:
        CheckpointError: It is not in the cache and cannot be downloaded.
    """
    if path := cached(name):
        return path
    repository, _, bits = name.partition(":")
    with _errors_explained(name, repository):
        return _Repository(repository).fetch_model(bits)


def fetch_file(name: str) -> Path:
    """Return one of FILES, downloaded and checked against its sum if the cache does not hold it. Raises CheckpointError."""
    if path := cached_file(name):
        return path
    path_or_url, sha256 = FILES[name]
    with _errors_explained(name, TINYLLAMAS):
        if "://" not in path_or_url:
            return _Repository(TINYLLAMAS).fetch_files([path_or_url], sha256) / path_or_url
        storage = _storage(TINYLLAMAS)
        file = RemoteFile(path_or_url, {}, storage / "llama2.c" / name, storage / "blobs" / sha256, None, sha256)
        Download(name, [file], _cache()).run()
        return file.place


def cached(name: str) -> Path | None:
    """Return what `fetch` takes from the cache: the folder if it is complete, else the GGUF file, else None.

    Without bits it is the first of DEFAULT_BITS among the GGUF files in the cache.
    """
    name, _, bits = name.partition(":")
    if not (folder := _snapshot(name)) or (not bits and _is_complete(folder)):
        return folder
    files = choose_gguf(_ggufs_in(folder), bits)
    return folder / files[0] if files and all((folder / file).exists() for file in files) else None


def cached_file(name: str) -> Path | None:
    """Return what `fetch_file` takes from the cache."""
    storage = _storage(TINYLLAMAS)
    places = [storage / "llama2.c" / name, *storage.glob(f"snapshots/*/{FILES[name][0]}")]
    return next((path for path in places if path.is_file()), None)


def cached_models() -> Iterator[tuple[str, Path]]:
    """Yield the models that are complete in the cache: names for `fetch` or `fetch_file`, and where they are."""
    for storage in sorted(_cache().glob("models--*--*")):
        name = storage.name.removeprefix("models--").replace("--", "/", 1)
        folder = _snapshot(name)
        if folder and name == TINYLLAMAS:
            paths = ((file, folder / path) for file, (path, _) in FILES.items() if file.startswith("stories"))
            yield from ((file, path) for file, path in paths if path.is_file())
        elif folder and _is_complete(folder):
            yield name, folder
        elif folder:
            for file in filter(may_be_a_model, _ggufs_in(folder)):
                bits = _BITS.search(Path(file).name)
                yield (f"{name}:{bits[1]}" if bits else str(folder / file)), folder / file


def choose_gguf(files: Iterable[str], bits: str) -> list[str]:
    """Return the GGUF file with those bits in its name, in all its parts; without bits, the first of DEFAULT_BITS."""
    firsts = [file for file in sorted(files) if file.endswith(GGUF) and may_be_a_model(file)]
    for wanted in [bits] if bits else DEFAULT_BITS:
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}[.-]" if wanted else "", re.IGNORECASE)
        if found := next(filter(pattern.search, firsts), None):
            return parts_of(found)
    return []


# Downloading


class _Repository:
    """A repository on the hub: its newest commit, and its files with their sizes and sums."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi, constants

        timeout = constants.HF_HUB_ETAG_TIMEOUT  # without one the library waits forever
        info = HfApi(endpoint=_endpoint()).model_info(name, revision="main", files_metadata=True, timeout=timeout)
        if not _COMMIT.fullmatch(info.sha or ""):
            raise CheckpointError(f"{_endpoint()} has the commit {str(info.sha)[:40]!r} of {name}; expected hexadecimal digits")
        self._name, self._commit, self._storage = name, str(info.sha), _storage(name)
        self._folder = self._storage / "snapshots" / self._commit
        self._files = {file.rfilename: file for file in info.siblings or [] if _is_safe(file.rfilename)}

    def fetch_model(self, bits: str) -> Path:
        """Return the folder of safetensors, or a GGUF file if bits are named or there is no other model."""
        found, has_safetensors = choose_gguf(self._files, bits), not {WEIGHTS, INDEX}.isdisjoint(self._files)
        if bits and not found:
            names = ", ".join(sorted(Path(file).name for file in self._files if file.endswith(GGUF))[:4]) or "none at all"
            raise CheckpointError(f"{self._name} on the hub has no GGUF file of {bits}; there is {names}")
        if found and (bits or not has_safetensors):
            return self.fetch_files(found) / found[0]
        if not has_safetensors and not {PICKLE, ADAPTER_CONFIG}.isdisjoint(self._files):
            hint = f"its {PICKLE} may run code when it is read: write it to {WEIGHTS} with safetensors.torch"
            hint = hint if PICKLE in self._files else f"it is an adapter: {MERGE}"
            raise CheckpointError(f"{self._name} on the hub has no {WEIGHTS}; {hint}")
        index = [INDEX] if INDEX in self._files and WEIGHTS not in self._files else []
        self.fetch_files([CONFIG, *(file for file in SMALL_FILES if file in self._files), *index])
        return self.fetch_files(_shards(self._folder / INDEX) if index else [WEIGHTS])

    def fetch_files(self, names: Sequence[str], sha256: str = "") -> Path:
        """Return the snapshot's folder with those files, which from now on is the repository's in the cache."""
        if lacking := [file for file in names if file not in self._files]:
            raise CheckpointError(f"{self._name} on the hub has no {lacking[0]!r}, which the model needs")
        missing = [file for file in names if not (self._folder / file).exists()]
        Download(self._name, [self._remote_file(file, sha256) for file in missing], _cache()).run()
        (self._storage / "refs").mkdir(parents=True, exist_ok=True)
        replace_text(self._storage / "refs" / "main", self._commit)
        return self._folder

    def _remote_file(self, name: str, sha256: str) -> RemoteFile:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        file, url = self._files[name], hf_hub_url(self._name, name, revision=self._commit, endpoint=_endpoint())
        sha256 = sha256 or (file.lfs.sha256 if file.lfs and _SHA256.fullmatch(file.lfs.sha256) else "")
        blob = self._storage / "blobs" / (sha256 or hashlib.sha256(f"{self._commit}/{name}".encode()).hexdigest())
        return RemoteFile(url, build_hf_headers(), self._folder / name, blob, file.size, sha256)


@contextmanager
def _errors_explained(name: str, repository: str) -> Iterator[None]:
    """Turn whatever keeps a name from being downloaded into a CheckpointError of one line with what to do."""
    try:
        if lacking := optional_dependencies.missing({optional_dependencies.HUB: purpose_of_fetching(name)}):
            raise CheckpointError(lacking)
        if _is_offline():
            raise CheckpointError(f"{name} is not whole in {_cache()}, and HF_HUB_OFFLINE keeps it from being downloaded")
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointError) else _explain(error, name, f"{_endpoint()}/{repository}")
        raise CheckpointError(_PASSWORD.sub("", reason)) from None


def _explain(error: BaseException, name: str, page: str) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return f"{name} is gated: accept its licence at {page}, then run 'hf auth login' or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        reason = f"{name} is no path here, and there is nothing at {page} that you may read: check the name"
        return f"{reason}; if it is private or gated, run 'hf auth login' or set HF_TOKEN"
    if status:
        return f"cannot fetch {name}: {page} answers with status {status}; try again later"
    if isinstance(error, (TypeError, AttributeError, LookupError, json.JSONDecodeError)):
        return f"cannot fetch {name}: what answers at {page} is no Hugging Face hub; check the network and HF_ENDPOINT"
    if isinstance(error, OSError) and (error.filename or error.errno in NO_ROOM):
        place = f"{error.filename or _cache()}: {error.strerror}"
        return f"cannot write {place}; what has come is kept, and HF_HOME names another place"
    cause: BaseException | None = error
    while cause:
        error = cause if isinstance(cause, OSError) else error  # the system's own words are the clearest
        cause = cause.__cause__ or cause.__context__
    line = re.sub(r"^\[\w+ -?\d+\] ", "", str(error).strip()).partition("\n")[0].rstrip(".") or type(error).__name__
    return f"cannot fetch {name} from {page}: {line}; try again, what has come is kept"


# The cache


def _cache() -> Path:
    """Return the cache's folder, by the rule of huggingface_hub."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(given))).absolute()


def _is_offline() -> bool:
    setting = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return setting.upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def _storage(name: str) -> Path:
    """Return the cache's folder of a repository, with blobs, refs and snapshots."""
    return _cache() / f"models--{name.replace('/', '--')}"


def _snapshot(name: str) -> Path | None:
    """Return the folder of the commit that was downloaded last."""
    with suppress(OSError, ValueError):
        commit = (_storage(name) / "refs" / "main").read_text().strip()
        folder = _storage(name) / "snapshots" / commit
        return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None
    return None


def _is_complete(folder: Path) -> bool:
    """Return whether a snapshot has a config and all weights in safetensors."""
    is_split = (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
    return all((folder / file).exists() for file in (CONFIG, *(_shards(folder / INDEX) if is_split else [WEIGHTS])))


def _shards(index: Path) -> list[str]:
    """Return the files that an index names; of a damaged one, on which the reader reports, none."""
    with suppress(CheckpointError, KeyError, AttributeError):
        return sorted({str(file) for file in read_object(index)["weight_map"].values()})
    return []


def _ggufs_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}"))


def _is_safe(name: str) -> bool:
    """Return whether a file's name stays inside its repository on every system, and is printable."""
    is_plain = name.isprintable() and not set(name) & set("\\:")
    return is_plain and all(part.strip(". ") and len(part.encode()) <= MAX_NAME_BYTES for part in name.split("/"))
