"""Names on the Hugging Face hub become folders and files here. Knows nothing of what is in them, but for a list of shards.

They lie in the cache of the huggingface_hub library, in its documented layout, where other programs find them too; a name that
is whole there is used without asking the network. A file is fetched into one beside its place, `<etag>.incomplete`, which an
interrupt leaves and the next try goes on with: the library itself begins anew (as of 2.4), and takes a server's words for paths
as they come. Here whatever a server names goes through `hub_words` before it becomes a part of a path.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from . import CheckpointError, extras, replace_text
from .config_json import ADAPTER_CONFIG, MERGE
from .hub_words import COMMIT, ETAG, SHA256, are_of_one_server, endpoint, may_be_a_file, named, without_password
from .parts import parts_of
from .safetensors import INDEX, PICKLE, WEIGHTS

GGUF = ".gguf"
DEFAULT_BITS = ("Q4_K_M", "Q8_0")  # of GGUF files the first that there is, as llama.cpp's -hf has it; else the first file
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "1_Pooling/config.json", ADAPTER_CONFIG,
)  # fmt: skip
PATIENCE = 10  # seconds that a hub may take to say what it has: the library would wait forever
TRIES = 2  # without a byte that came, of several by the library each
NO_ROOM = (errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else []))
RANGE_NOT_SATISFIABLE = 416
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*(:[\w.-]+)?", re.ASCII)
_BITS = re.compile(r"(?<![A-Za-z0-9])((?:I?Q\d|BF16|F16|F32)\w*)[.-]", re.IGNORECASE)  # as a GGUF file's name says them
_NO_MODEL = re.compile(r"mmproj|imatrix|(^|/)mtp-", re.IGNORECASE)  # what lies beside models in GGUF
_FILE_ENDINGS = (".bin", ".json", ".gguf", ".safetensors", ".pt", ".model")


@dataclass(frozen=True)
class Published:
    """A file of karpathy/tinyllamas, or one of llama2.c that belongs to them: where it lies and what its sha256 is."""

    path: str
    sha256: str
    elsewhere: str = ""  # its address, where the repository has none


TINYLLAMAS = "karpathy/tinyllamas"
LLAMA2C_TOKENIZER = "https://raw.githubusercontent.com/karpathy/llama2.c/master/tokenizer.bin"
FILES = {
    "stories260K.bin": Published(
        "stories260K/stories260K.bin", "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696"
    ),
    "stories15M.bin": Published("stories15M.bin", "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"),
    "stories42M.bin": Published("stories42M.bin", "9f65a1000e17d0bc167dd6332e0ce5119a0222a3d920cead5bce413bfab2ee7b"),
    "stories110M.bin": Published("stories110M.bin", "515267168726a1ed1317a64a408492e6af3b67c1f71c5bd98c01d9d721803a24"),
    "tok512.bin": Published("stories260K/tok512.bin", "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312"),
    "tokenizer.bin": Published(
        "tokenizer.bin", "50a52ef822ee9e83de5ce9d0be0a025a773d019437f58b5ff9dcafb063ece361", LLAMA2C_TOKENIZER
    ),
}


def is_repository(name: str) -> bool:
    """Whether a name has the form org/name or org/name:bits, and is none of a file."""
    return bool(_NAME.fullmatch(name)) and not name.endswith(_FILE_ENDINGS)


def fetch(name: str) -> Path:
    """The folder of a repository: its safetensors weights, config and tokenizer; else one of its GGUF files.

    name: org/name, or org/name:bits for the GGUF file whose name says those bits, Q4_K_M for one. What is whole in the cache is
    taken from there; what is not is fetched, with a progress bar where stderr is a terminal. Raises CheckpointError.
    """
    if path := cached(name):
        return path
    repository, _, bits = name.partition(":")
    folder = _cached_folder(repository)
    lacks = ([f"a GGUF file of {bits}"] if bits else _lacks(folder)) if folder else []
    try:
        with _fetching(repository, repository, lacks, {extras.TOKENIZERS: "to read its tokenizer"}) as fetch:
            return fetch.model(bits)
    except CheckpointError:
        if path := cached(name, will_do=True):
            return path
        raise


def cached(name: str, will_do: bool = False) -> Path | None:
    """What `fetch` takes from the cache without asking the network.

    will_do: where nobody can be asked, what another program has brought of the small files is enough, and any GGUF file.
    """
    name, _, bits = name.partition(":")
    folder = _cached_folder(name)
    if not folder:
        return None
    known = folder, _no_exist(folder)  # what is there, and what is known not to be in the repository
    if not bits and not _lacks(folder) and (will_do or all(any((at / file).exists() for at in known) for file in SMALL_FILES)):
        return folder
    is_to_be = bits or ("" if will_do else DEFAULT_BITS[0])
    return _cached_gguf(folder, is_to_be) if bits or _has_no_others(folder) else None


def fetch_file(name: str) -> Path:
    """One of FILES, checked by its sum. Raises CheckpointError."""
    if path := cached_file(name):
        return path
    with _fetching(name, TINYLLAMAS, [], {}) as fetch:
        return fetch.file(FILES[name])


def cached_file(name: str) -> Path | None:
    """What `fetch_file` takes from the cache."""
    storage = _storage(TINYLLAMAS)
    places = [storage / "llama2.c" / name, *storage.glob(f"snapshots/*/{FILES[name].path}")]
    return next((path for path in places if path.is_file()), None)


def cached_models() -> Iterator[tuple[str, Path]]:
    """What is whole in the cache: names that `fetch` or `fetch_file` takes, and the folders or files that they become."""
    for storage in sorted(_cache().glob("models--*--*")):
        name = storage.name.removeprefix("models--").replace("--", "/", 1)
        folder = _cached_folder(name)
        if folder and name == TINYLLAMAS:
            paths = ((file, folder / published.path) for file, published in FILES.items() if file.startswith("stories"))
            yield from ((file, path) for file, path in paths if path.is_file())
        elif folder and not _lacks(folder):
            yield name, folder
        elif folder:
            for path in sorted(folder.rglob(f"*{GGUF}")):
                bits = _BITS.search(path.name)
                if may_be_a_model(path.name):
                    yield (f"{name}:{bits[1]}" if bits else str(path)), path


def purpose_of_fetching(name: str) -> str:
    """What the library is needed for."""
    return f"to fetch {name}, which is no path here"


def may_be_a_model(name: str) -> bool:
    """Whether a file's name is that of a model in one file, or of the first part of one."""
    return not _NO_MODEL.search(name) and parts_of(name)[0] == name


class _Fetch:
    """What a repository's files are brought with."""

    def __init__(self, name: str, more: dict[str, str]) -> None:
        """more: packages that whoever reads it takes."""
        if lacking := extras.missing({extras.HUB: purpose_of_fetching(name), **more}):
            raise CheckpointError(lacking)
        import huggingface_hub
        import huggingface_hub.file_download  # which sets its own level of logging as it is loaded

        self.name, self._hub = name, huggingface_hub
        self._endpoint = endpoint()
        self._sums: dict[str, str] = {}

    def model(self, bits: str) -> Path:
        """The folder of safetensors, or a GGUF file: of those bits, or where there is no other model."""
        sizes = self._list()
        has_others = any(file in sizes for file in (WEIGHTS, INDEX))
        return self._gguf(bits, sizes) if bits or (gguf_of(sizes, "") and not has_others) else self._folder(sizes)

    def _gguf(self, bits: str, sizes: dict[str, int | None]) -> Path:
        found = gguf_of(sizes, bits)
        if not found:
            there = ", ".join(sorted(Path(file).name for file in sizes if file.endswith(GGUF))[:4]) or "none at all"
            raise CheckpointError(f"{self.name} on the hub has no GGUF file of {bits}; there is {there}")
        if missing := [file for file in found if file not in sizes]:
            raise CheckpointError(f"{self.name} on the hub has {found[0]!r} and lacks {missing[0]!r}")
        path = self._weights(found, sizes)[0]
        for file in (WEIGHTS, INDEX):
            if file not in sizes:
                _touch(_storage(self.name) / ".no_exist" / self._revision / file)
        return path

    def _weights(self, files: list[str], sizes: dict[str, int | None]) -> list[Path]:
        """The places of large files."""
        _check_room(self.name, sum(self._to_come(file, sizes[file] or 0) for file in files))
        paths = [self._file(file, self._revision) for file in files]
        self._is_newest(self._revision)
        return paths

    def _folder(self, sizes: dict[str, int | None]) -> Path:
        wanted = [file for file in SMALL_FILES if file in sizes]
        for needed in (SMALL_FILES[0], WEIGHTS if INDEX not in sizes else INDEX):
            if needed not in sizes:
                lacking = f"{self.name} on the hub has no {needed}, so it is no model in safetensors' format"
                if needed == WEIGHTS and PICKLE in sizes:
                    lacking += f"; its {PICKLE} may run code when it is read: write it to {WEIGHTS} with safetensors.torch"
                elif ADAPTER_CONFIG in sizes:
                    lacking += f"; it is an adapter: {MERGE}"
                raise CheckpointError(lacking)
        with self._without_bars():
            paths = [self._file(file, self._revision) for file in wanted]
            weights = [WEIGHTS] if WEIGHTS in sizes else _shards(self._file(INDEX, self._revision))
        if missing := [file for file in weights if file not in sizes]:
            raise CheckpointError(f"{self.name} on the hub names {missing[0]!r} in its {INDEX}, and has no such file")
        folder = paths[0].parent
        for file in SMALL_FILES:
            if file not in sizes:
                _touch(_no_exist(folder) / file)
        self._weights(weights, sizes)
        return folder

    def file(self, file: Published) -> Path:
        self._sums[file.path] = file.sha256
        try:
            path = self._file(file.path)
        except Exception as error:
            if not file.elsewhere or _status(error) != 404:
                raise
        else:
            self._is_newest(path.relative_to(_storage(self.name)).parts[1])
            return path
        path = _storage(self.name) / "llama2.c" / file.path
        with self._locked(file.sha256):
            if not path.exists():
                self._download(file.elsewhere, path, file.path, None, {})
        return path

    def _list(self) -> dict[str, int | None]:
        """The files of the newest revision with their sizes, which a mirror may not tell."""
        api = self._hub.HfApi(endpoint=self._endpoint)
        info = api.model_info(self.name, revision="main", files_metadata=True, timeout=PATIENCE)
        self._revision = named("commit", info.sha, COMMIT, self.name)
        files = [file for file in info.siblings or [] if may_be_a_file(file.rfilename)]
        self._sums = {file.rfilename: named("sha256", file.lfs.sha256, SHA256, self.name) for file in files if file.lfs}
        return {file.rfilename: file.size for file in files}

    def _is_newest(self, commit: str) -> None:
        """Whoever asks the cache for the repository finds that snapshot."""
        main = _storage(self.name) / "refs" / "main"
        main.parent.mkdir(parents=True, exist_ok=True)
        replace_text(main, commit)

    def _to_come(self, file: str, size: int) -> int:
        """Bytes of a file that are not here yet. On the hub, the ETag of a large file is its sha256."""
        blob = _storage(self.name) / "blobs" / self._sums.get(file, "none")
        return max(0, size - _size(blob) - _size(_partial(blob)))

    @contextmanager
    def _without_bars(self) -> Iterator[None]:
        """Within, small files are fetched."""
        bars = self._hub.utils
        was_on = not bars.are_progress_bars_disabled()
        if was_on:
            bars.disable_progress_bars()
        try:
            yield
        finally:
            if was_on:
                bars.enable_progress_bars()

    def _file(self, file: str, commit: str = "") -> Path:
        """The path of a file, of the newest commit unless one is named; downloaded if missing. An interrupt loses little."""
        from huggingface_hub.file_download import get_hf_file_metadata
        from huggingface_hub.utils import build_hf_headers

        snapshots = _storage(self.name) / "snapshots"
        if commit and (snapshots / commit / file).exists():
            return snapshots / commit / file
        url = self._hub.hf_hub_url(self.name, file, revision=commit or "main", endpoint=self._endpoint)
        about = get_hf_file_metadata(url)
        etag = named("ETag", about.etag, ETAG, url)
        place = snapshots / (commit or named("commit", about.commit_hash, COMMIT, url)) / file
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # of bytes in another form a part is none of the file
        if not are_of_one_server(url, about.location):  # a signed address, which is not to see the token
            headers = {key: value for key, value in headers.items() if key.lower() != "authorization"}
        blob = _storage(self.name) / "blobs" / etag
        with self._locked(etag):
            if not blob.exists():
                self._download(about.location, blob, file, about.size, headers)
            _link(blob, place)
        return place

    def _download(self, url: str, path: Path, file: str, size: int | None, headers: dict[str, str]) -> None:
        """All bytes of an address, from where the last try ended. Raises CheckpointError for others than announced."""
        from huggingface_hub.file_download import http_get

        partial, name = _partial(path), Path(file).name
        _touch(partial)
        if size is not None:
            _check_room(self.name, size - _size(partial))
        is_first, left = True, TRIES
        while left and (size is None or _size(partial) != size):
            before = _size(partial)
            try:
                with partial.open("ab") as out:
                    http_get(url, out, resume_size=before, headers=headers, expected_size=size, displayed_filename=name)
                break
            except Exception as error:
                now = _size(partial)
                if is_first and before and _status(error) == RANGE_NOT_SATISFIABLE:
                    partial.unlink()  # of another time, and longer than what there is now
                elif size is not None and now > size:
                    partial.unlink()
                    raise CheckpointError(f"{file} of {self.name} is longer than the {size} bytes that were announced") from None
                elif _is_final(error) or not now:
                    raise
                left = TRIES if now > before else left - 1
            is_first = False
        if size is not None and _size(partial) != size:
            raise CheckpointError(
                f"{file} of {self.name} ended after {_size(partial)} of {size} bytes; what has come is kept, try again"
            )
        self._check(partial, file)
        os.replace(partial, path)

    def _check(self, partial: Path, file: str) -> None:
        digest, expected = hashlib.sha256(), self._sums.get(file)
        if not expected:
            return
        with partial.open("rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != expected:
            partial.unlink()
            raise CheckpointError(
                f"{Path(file).name} came with sha256 {digest.hexdigest()}, not {expected}, and has been removed; try again"
            )

    @contextmanager
    def _locked(self, etag: str) -> Iterator[None]:
        """Of two processes that fetch one file, the second waits for the first. The lock is the library's own."""
        from huggingface_hub.utils import WeakFileLock

        path = _cache() / ".locks" / _storage(self.name).name / f"{etag}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(path):
            yield


@contextmanager
def _fetching(name: str, repository: str, lacks: list[str], more: dict[str, str]) -> Iterator[_Fetch]:
    """What brings a repository's files. Turns whatever keeps a name from being downloaded into a CheckpointError.

    lacks: of what is in the cache already.
    """
    page = f"{endpoint()}/{repository}"
    gap = f"in {_cache()} it lacks {lacks[0]}" if lacks else f"it is not in {_cache()}"
    try:
        if _is_offline():
            raise CheckpointError(f"{name} is no path here, {gap}, and HF_HUB_OFFLINE keeps it from being fetched")
        fetch = _Fetch(repository, more)
        with _as_wanted():
            yield fetch
    except CheckpointError as error:
        reason = str(error)
    except ImportError as error:
        how = extras.install([extras.HUB])
        reason = f"{name} is no path here; fetching it from {page} needs the package huggingface_hub: {error}; {how}"
    except Exception as error:
        reason = _reason(error, name, page, gap)
    else:
        return
    raise CheckpointError(without_password(reason)) from None


@contextmanager
def _as_wanted() -> Iterator[None]:
    """Within, the library, which is loaded by then, does not tell of each try again, and writes what has come by the MB, and not
    by ten, which a broken connection would lose."""
    from huggingface_hub import constants

    logger = logging.getLogger("huggingface_hub")
    level, size = logger.level, constants.DOWNLOAD_CHUNK_SIZE
    logger.setLevel(logging.ERROR)
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    try:
        yield
    finally:
        logger.setLevel(level)
        constants.DOWNLOAD_CHUNK_SIZE = size


def _reason(error: Exception, name: str, page: str, gap: str) -> str:
    from huggingface_hub import errors

    status = _status(error)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return f"{name} is gated: accept its conditions at {page}, and set HF_TOKEN to a token of yours that may read it"
    if status == 401:
        return (
            f"{page} may not be read: there is none, or it is private or gated; where it is gated, accept its conditions there, "
            "and set HF_TOKEN to a token of yours that may read it"
        )
    if status == 404:
        return f"{name} is no path here, and nothing is at {page}; what is private needs HF_TOKEN"
    if status:
        return f"cannot fetch {name}: {page} answers with status {status}, and {gap}; try again later"
    if isinstance(error, errors.HFValidationError):
        return f"{name} is no name of a repository: {_line(error)}"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"no room for {name} in {_cache()}: {error.strerror}; what has come is kept, and HF_HOME names another place"
    if isinstance(error, OSError) and error.errno and error.filename:
        return f"cannot write {error.filename}: {error.strerror}; HF_HOME names another place"
    while isinstance(error.__cause__, Exception):  # what the library wraps in advice
        error = error.__cause__
    return f"cannot fetch {name} from {page}: {_line(error) or type(error).__name__}, and {gap}"


def _status(error: Exception) -> int:
    """Of an answer over HTTP, else 0."""
    while isinstance(error.__cause__, Exception) and getattr(error, "response", None) is None:
        error = error.__cause__
    return getattr(getattr(error, "response", None), "status_code", None) or 0


def _is_final(error: Exception) -> bool:
    """Whether the same would come of another try: an answer of the hub's, or trouble with the disk."""
    return _status(error) not in (0, RANGE_NOT_SATISFIABLE) or bool(getattr(error, "errno", None))


def _line(error: Exception) -> str:
    """Its first line, without the system's number."""
    return next((re.sub(r"^\[\w+ -?\d+\] ", "", line.strip()) for line in str(error).splitlines() if line.strip()), "")


# The cache


def _cache() -> Path:
    """The hub's, where huggingface_hub has it, which needs half a second to say so."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(given))).absolute()


def _is_offline() -> bool:
    setting = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return setting.upper() in ("1", "ON", "YES", "TRUE")


def _storage(name: str) -> Path:
    """What the cache keeps of a repository: blobs/, refs/ and snapshots/."""
    return _cache() / f"models--{name.replace('/', '--')}"


def _cached_folder(name: str) -> Path | None:
    """The snapshot that was downloaded last."""
    try:
        commit = (_storage(name) / "refs" / "main").read_text().strip()
        folder = _storage(name) / "snapshots" / commit
        return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None
    except (OSError, ValueError):
        return None


def _lacks(folder: Path) -> list[str]:
    """What a snapshot lacks of a model."""
    shards = [WEIGHTS]
    if (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        shards = []
        with suppress(CheckpointError):  # which the reader will tell of
            shards = _shards(folder / INDEX)
    return [file for file in (SMALL_FILES[0], *shards) if not (folder / file).exists()]


def gguf_of(files: Iterable[str], bits: str) -> list[str]:
    """The GGUF file whose name says those bits, all its parts; without bits, of the first of DEFAULT_BITS or any. Empty: none."""
    firsts = [file for file in sorted(files) if file.endswith(GGUF) and may_be_a_model(file)]
    for wanted in [bits] if bits else [*DEFAULT_BITS, ""]:
        said = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        if found := next((file for file in firsts if not wanted or said.search(file)), None):
            return parts_of(found)
    return []


def _cached_gguf(folder: Path, bits: str) -> Path | None:
    """The GGUF file of those bits in a snapshot that has all its parts."""
    found = gguf_of([path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")], bits)
    return folder / found[0] if found and all((folder / file).exists() for file in found) else None


def _has_no_others(folder: Path) -> bool:
    """Whether GGUF files are known to be a repository's only weights."""
    return all((_no_exist(folder) / file).exists() for file in (WEIGHTS, INDEX))


def _no_exist(folder: Path) -> Path:
    """The cache's own list of what a snapshot has not: empty files."""
    return folder.parents[1] / ".no_exist" / folder.name


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        return sorted({str(file) for file in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{index} is no index of safetensors' shards") from None


def _check_room(name: str, n_bytes: int) -> None:
    """Raises CheckpointError where the disk of the cache is too small for that."""
    place = next(path for path in (_cache(), *_cache().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if n_bytes > free:
        raise CheckpointError(
            f"no room for {name} in {_cache()}: {n_bytes / 1e9:.2f} GB are to come, and {free / 1e9:.2f} GB are free; "
            "HF_HOME names another place"
        )


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".incomplete")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _link(blob: Path, place: Path) -> None:
    """Give bytes of the cache a name: a link, or where the disk has none a second name or a copy."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)  # a link to what is gone
    new = place.with_name(f".{os.getpid()}")
    new.unlink(missing_ok=True)
    try:
        new.symlink_to(os.path.relpath(blob, new.parent))
    except (OSError, NotImplementedError):
        try:
            os.link(blob, new)
        except (OSError, NotImplementedError):
            shutil.copyfile(blob, new)
    os.replace(new, place)
