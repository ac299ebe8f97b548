"""Download files into the cache of huggingface_hub: resumed after an interrupt, verified, and once for several processes.

The download functions of huggingface_hub are not used. Since 1.18 they start from zero after an interrupt. They also join the
server's ETag to a path, which lets a hostile mirror write outside the cache (seen in 0.30 and 2.4). The sessions, locks and
errors of huggingface_hub are used.
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
MAX_TRIES, RETRY_DELAY_S = 3, 1.0  # tries in a row without a new byte
LOCK_POLL_S = 1.0  # interval of progress reports while another process downloads

# The last of these is called with the name, the bytes downloaded so far and the total (0: unknown).
# If there is none, the library's own progress bar appears.
progress_callbacks: list[Callable[[str, int, int], object]] = []


class RemoteFile(NamedTuple):
    """A file to download from a server, and the places for it in the hub's cache.

    Attributes:
        url: Address of the file.
        headers: Headers of the request.
        link: Path in a snapshot folder that becomes a link to `blob`.
        blob: Path for the bytes.
        size: Size in bytes; None if the server does not give it.
        sha256: Expected hash in hexadecimal digits; "" if the server does not give it.
    """

    url: str
    headers: Mapping[str, str]
    link: Path
    blob: Path
    size: int | None
    sha256: str

    @property
    def partial(self) -> Path:
        """Path of the partial file, which holds the bytes received so far until the download is complete."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def n_downloaded(self) -> int:
        """Number of bytes of the file that are on disk already, complete or partial."""
        return next((path.stat().st_size for path in (self.blob, self.partial) if path.exists()), 0)


class Download:
    """A download of the files of one model into the hub's cache, which resumes an earlier one that was interrupted."""

    def __init__(self, name: str, files: Sequence[RemoteFile], cache: Path) -> None:
        self._name, self._files, self._cache = name, files, cache
        self._total, self._n_finished = sum(file.size or 0 for file in files), 0

    def run(self) -> None:
        """Download the files that are missing, one after the other, verify them and link them into their snapshot folder.

        Reports the progress, and waits while another process downloads the same file.

        Raises:
            CheckpointError: The disk has too little space, or a file is not the expected one.
            OSError: A file cannot be written. Connections that stay broken raise this or an error of the library.
        """
        from huggingface_hub.utils import tqdm

        self._check_disk_space()
        is_hidden = True if progress_callbacks or not self._files else None  # None: if stderr is no terminal
        with tqdm(total=self._total, desc=self._name, unit="B", unit_scale=True, disable=is_hidden) as self._bar:
            for file in self._files:
                file.blob.parent.mkdir(parents=True, exist_ok=True)
                with self._lock(file):
                    if not file.blob.exists():
                        self._download_file(file)
                    _link(file.blob, file.link)
                self._n_finished += file.size or 0

    def _check_disk_space(self) -> None:
        missing = sum(max(0, (file.size or 0) - file.n_downloaded) for file in self._files)
        free = shutil.disk_usage(next(path for path in (self._cache, *self._cache.parents) if path.exists())).free
        if missing > free:
            sizes = f"{missing / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free"
            raise CheckpointError(
                f"not enough disk space for {self._name} in {self._cache}: {sizes}; set HF_HOME to another folder"
            )

    @contextmanager
    def _lock(self, file: RemoteFile) -> Iterator[None]:
        """Run a block while holding huggingface_hub's lock of a file; wait and report progress while another process holds it."""
        from huggingface_hub.utils import WeakFileLock

        path = self._cache / ".locks" / file.blob.parents[1].name / f"{file.blob.name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(WeakFileLock(path, timeout=LOCK_POLL_S))
                    break
                except TimeoutError:
                    self._report(file.n_downloaded)
            yield

    def _download_file(self, file: RemoteFile) -> None:
        """Download the rest of a file with retries after broken connections, verify its sha256, and move it to its blob path.

        Raises:
            CheckpointError: The file has another size or sha256 than expected; the partial file is then emptied or removed.
        """
        from huggingface_hub.errors import HfHubHTTPError

        n_tries, digest = MAX_TRIES, ""
        while not digest:
            n_before = file.n_downloaded
            try:
                digest = self._receive_rest(file)
            except Exception as error:
                n_tries = MAX_TRIES if file.n_downloaded > n_before else n_tries - 1
                if not n_tries or isinstance(error, (CheckpointError, HfHubHTTPError)) or getattr(error, "errno", None):
                    raise
                time.sleep(RETRY_DELAY_S)
        if file.sha256 and digest != file.sha256:
            file.partial.unlink()
            reason = f"{file.link.name} has sha256 {digest}, expected {file.sha256}; the download was removed"
            raise CheckpointError(f"{reason}; try again")
        os.replace(file.partial, file.blob)

    def _receive_rest(self, file: RemoteFile) -> str:
        """Request the missing bytes of a file, append them to its partial file, and return the sha256 of the whole file.

        Starts again from zero if the size is unknown or the server sends the whole file. Reports the progress.

        Raises:
            CheckpointError: The server sends more bytes than announced.
            ConnectionError: The response ends too early.
        """
        digest = hashlib.sha256()
        with file.partial.open("a+b") as out:
            n = out.tell()
            if file.size is None or n > file.size:  # the bytes here may belong to another version
                n = out.truncate(0)
            out.seek(0)
            while block := out.read(1 << 20):
                digest.update(block)
            self._report(n)
            if n == file.size:
                return digest.hexdigest()
            with _open_response(file, n) as (headers, chunks):
                if n and not headers.get("Content-Range", "").startswith(f"bytes {n}-"):  # the server sends the whole file
                    n, digest = out.truncate(0), hashlib.sha256()
                for chunk in chunks:
                    n += len(chunk)
                    if file.size is not None and n > file.size:
                        out.truncate(0)
                        raise CheckpointError(f"{file.link.name} is longer than the announced {file.size} bytes")
                    out.write(chunk)
                    digest.update(chunk)
                    self._report(n)
        if file.size is not None and n < file.size:
            raise ConnectionError(f"{file.link.name} ended after {n} of {file.size} bytes")
        return digest.hexdigest()

    def _report(self, n: int) -> None:
        """Report that n bytes of the current file are on disk, to the progress bar and to the last progress callback."""
        n += self._n_finished
        self._bar.update(n - self._bar.n)
        for report in progress_callbacks[-1:]:
            report(self._name, n, self._total)


@contextmanager
def _open_response(file: RemoteFile, start: int) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
    """Request a file from byte `start` on, and provide the response's headers and chunks of bytes to a `with` block.

    A redirect to another server drops the access token. Raises an error of huggingface_hub for an error status.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status

    headers = {**file.headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    session, options = get_session(), {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    is_httpx = callable(session.stream)  # since 1.0 of the library; before, it is a session of requests
    with session.stream("GET", file.url, **options) if is_httpx else session.get(file.url, stream=True, **options) as response:
        hf_raise_for_status(response)
        yield response.headers, response.iter_bytes(CHUNK_BYTES) if is_httpx else response.iter_content(CHUNK_BYTES)


def _link(blob: Path, link: Path) -> None:
    """Make a downloaded blob available at a path in a snapshot folder, unless that path exists already.

    The path becomes a symbolic link, or the blob is moved there if the disk does not support links, as huggingface_hub does.
    """
    if not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # a link to a blob that is gone
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except (OSError, NotImplementedError):
            os.replace(blob, link)
