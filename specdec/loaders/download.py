"""Download files into the cache of huggingface_hub: resumed after an interrupt, checked, and once for several processes.

The library's own downloads are not used: since 1.18 they start from zero after an interrupt, and they join the server's ETag to a
path, which lets a hostile mirror write outside the cache (seen in 0.30 and 2.4). Its sessions, locks and errors are.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from specdec.families.config_values import CheckpointError

CHUNK_BYTES = 1 << 16
MAX_TRIES, RETRY_SECONDS = 3, 1.0  # tries in a row that bring no byte
LOCK_SECONDS = 1.0  # between two looks at how far another process is

# The last of these is called with the name being downloaded, the bytes of it that are here, and its bytes in all (0: unknown).
# If there is none, the library's own progress bar appears.
on_progress: list[Callable[[str, int, int], object]] = []


class RemoteFile(NamedTuple):
    """A file on a server, and where it goes: its bytes into `blob`, to which `place` becomes a link.

    size and sha256 are None and "" if the server does not say.
    """

    url: str
    headers: Mapping[str, str]
    place: Path
    blob: Path
    size: int | None
    sha256: str

    @property
    def partial(self) -> Path:
        """The bytes that have come, until it is all of them."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def n_here(self) -> int:
        """Bytes that need not be downloaded."""
        return next((path.stat().st_size for path in (self.blob, self.partial) if path.exists()), 0)


class Download:
    """Files of one name on their way into the cache. An interrupt leaves what has come, and the next download goes on with it."""

    def __init__(self, name: str, files: Sequence[RemoteFile], cache: Path) -> None:
        self._name, self._files, self._cache = name, files, cache
        self._total, self._n_before = sum(file.size or 0 for file in files), 0

    def run(self) -> None:
        """Download the files, one after the other. Raises CheckpointError, OSError, or an error of the library's."""
        from huggingface_hub.utils import tqdm

        self._check_room()
        is_hidden = True if on_progress or not self._files else None  # None: if stderr is no terminal
        with tqdm(total=self._total, desc=self._name, unit="B", unit_scale=True, disable=is_hidden) as self._bar:
            for file in self._files:
                file.blob.parent.mkdir(parents=True, exist_ok=True)
                with self._locked(file):
                    if not file.blob.exists():
                        self._complete(file)
                    _link(file.blob, file.place)
                self._n_before += file.size or 0

    def _check_room(self) -> None:
        missing = sum(max(0, (file.size or 0) - file.n_here) for file in self._files)
        free = shutil.disk_usage(next(path for path in (self._cache, *self._cache.parents) if path.exists())).free
        if missing > free:
            sizes = f"{missing / 1e9:.2f} GB are to come, and {free / 1e9:.2f} GB are free"
            raise CheckpointError(f"no room for {self._name} in {self._cache}: {sizes}; HF_HOME names another place")

    @contextmanager
    def _locked(self, file: RemoteFile) -> Iterator[None]:
        """Hold the library's lock of a file; report how far another process is that holds it."""
        from huggingface_hub.utils import WeakFileLock

        path = self._cache / ".locks" / file.blob.parents[1].name / f"{file.blob.name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(WeakFileLock(path, timeout=LOCK_SECONDS))
                    break
                except TimeoutError:
                    self._report(file.n_here)
            yield

    def _complete(self, file: RemoteFile) -> None:
        """Download the rest of a file, with new tries after a broken connection, and check it."""
        from huggingface_hub.errors import HfHubHTTPError

        n_tries, digest = MAX_TRIES, ""
        while not digest:
            n_here = file.n_here
            try:
                digest = self._receive(file)
            except Exception as error:
                n_tries = MAX_TRIES if file.n_here > n_here else n_tries - 1
                if not n_tries or isinstance(error, (CheckpointError, HfHubHTTPError)) or getattr(error, "errno", None):
                    raise
                time.sleep(RETRY_SECONDS)
        if file.sha256 and digest != file.sha256:
            file.partial.unlink()
            reason = f"{file.place.name} came with sha256 {digest}, not {file.sha256}, and has been removed"
            raise CheckpointError(f"{reason}; try again")
        os.replace(file.partial, file.blob)

    def _receive(self, file: RemoteFile) -> str:
        """Append the bytes that are missing to the partial file, and return the sha256 of all of them."""
        digest = hashlib.sha256()
        with file.partial.open("a+b") as out:
            n = out.tell()
            if file.size is None or n > file.size:  # what is here may be of another file
                n = out.truncate(0)
            out.seek(0)
            while block := out.read(1 << 20):
                digest.update(block)
            self._report(n)
            if n == file.size:
                return digest.hexdigest()
            with _response(file, n) as (headers, chunks):
                if n and not headers.get("Content-Range", "").startswith(f"bytes {n}-"):  # the file from its beginning
                    n, digest = out.truncate(0), hashlib.sha256()
                for chunk in chunks:
                    n += len(chunk)
                    if file.size is not None and n > file.size:
                        out.truncate(0)
                        raise CheckpointError(f"{file.place.name} is longer than the {file.size} bytes that were announced")
                    out.write(chunk)
                    digest.update(chunk)
                    self._report(n)
        if file.size is not None and n < file.size:
            raise ConnectionError(f"{file.place.name} ended after {n} of {file.size} bytes")
        return digest.hexdigest()

    def _report(self, n: int) -> None:
        """Report that n bytes of the present file are here."""
        n += self._n_before
        self._bar.update(n - self._bar.n)
        for report in on_progress[-1:]:
            report(self._name, n, self._total)


@contextmanager
def _response(file: RemoteFile, start: int) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
    """Request a file from a byte on: the response's headers and chunks. A redirect to another server drops the token."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status

    headers = {**file.headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    session, options = get_session(), {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    is_httpx = callable(session.stream)  # since 1.0 of the library; before, it is a session of requests
    with session.stream("GET", file.url, **options) if is_httpx else session.get(file.url, stream=True, **options) as response:
        hf_raise_for_status(response)
        yield response.headers, response.iter_bytes(CHUNK_BYTES) if is_httpx else response.iter_content(CHUNK_BYTES)


def _link(blob: Path, place: Path) -> None:
    """Give a blob its name in a snapshot: by a link, or by moving it if the disk has none, as the library does."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # a link to a blob that is gone
        try:
            place.symlink_to(os.path.relpath(blob, place.parent))
        except (OSError, NotImplementedError):
            os.replace(blob, place)
