"""Download files into the cache of huggingface_hub: resumed after an interrupt, verified, and once for several processes.

The bytes come through `http_get` of huggingface_hub, and its locks are used. `hf_hub_download` is not: since 1.18 it starts from
zero after an interrupt, and it joins the server's ETag to a path, so a hostile mirror could write outside the cache.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.argument_checks import CheckpointError

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


def download(name: str, files: Sequence[RemoteFile], cache: Path) -> None:
    """Download the files of a model that are missing, one after the other, verify them and link them into their snapshot folder.

    Reports the progress, and waits while another process downloads the same file.

    Args:
        name: Name of the model, for messages.
        files: The files.
        cache: Folder of the hub's cache.

    Raises:
        CheckpointError: The disk has too little space, or a file is not the expected one.
        OSError: A file cannot be written. Connections that stay broken raise this or an error of the library.
    """
    from huggingface_hub.utils import WeakFileLock, tqdm

    _check_disk_space(name, files, cache)
    is_hidden = True if progress_callbacks or not files else None  # None: if stderr is no terminal
    with tqdm(total=sum(file.size or 0 for file in files), desc=name, unit="B", unit_scale=True, disable=is_hidden) as bar:
        progress = _Progress(name, bar)
        for file in files:
            lock = cache / ".locks" / file.blob.parents[1].name / f"{file.blob.name}.lock"
            for folder in (lock.parent, file.blob.parent, file.link.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):
                if not file.blob.exists():
                    _download_file(file, progress)
                _link(file.blob, file.link)


class _Progress:
    """The progress of a download, which `http_get` updates as if it were its own bar of the current file."""

    def __init__(self, name: str, bar: Any) -> None:
        self._name, self._bar, self._n = name, bar, 0

    def update(self, n: int) -> None:
        """Report n more bytes to the progress bar and to the last progress callback."""
        self._n += n
        self._bar.update(n)
        for report in progress_callbacks[-1:]:
            report(self._name, self._n, self._bar.total)


def _check_disk_space(name: str, files: Sequence[RemoteFile], cache: Path) -> None:
    """Raise CheckpointError if the disk of the cache has less space than the files still need; unknown sizes count as 0."""
    on_disk = sum(path.stat().st_size for file in files for path in (file.blob, file.partial) if path.exists())
    missing = sum(file.size or 0 for file in files) - on_disk
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if missing > free:
        sizes = f"{missing / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free"
        raise CheckpointError(f"not enough disk space for {name} in {cache}: {sizes}; set HF_HOME to another folder")


def _download_file(file: RemoteFile, progress: _Progress) -> None:
    """Download the rest of a file, verify its sha256, and move it to its blob path.

    Raises:
        CheckpointError: The file has another sha256 than expected; the partial file is then removed.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.sha import sha_fileobj

    logging.get_logger("huggingface_hub.file_download").setLevel(logging.ERROR)  # it warns of each retry
    with file.partial.open("a+b") as out:
        n = out.tell()
        if file.size is None or n > file.size:  # the bytes here may belong to another version
            n = out.truncate(0)
        progress.update(n)
        headers = {**file.headers, "Accept-Encoding": "identity"}
        sizes = {"resume_size": n, "expected_size": file.size}
        http_get(file.url, out, headers=headers, **sizes, displayed_filename=file.link.name, _tqdm_bar=progress)
        out.seek(0)
        digest = sha_fileobj(out).hex() if file.sha256 else ""
    if digest != file.sha256:
        file.partial.unlink()
        reason = f"{file.link.name} has sha256 {digest}, expected {file.sha256}; the download was removed"
        raise CheckpointError(f"{reason}; try again")
    os.replace(file.partial, file.blob)


def _link(blob: Path, link: Path) -> None:
    """Make a downloaded blob available at a path in a snapshot folder, unless that path exists already.

    The path becomes a symbolic link, or the blob is moved there if the disk does not support links, as huggingface_hub does.
    """
    if not link.exists():
        link.unlink(missing_ok=True)  # a link to a blob that is gone
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except (OSError, NotImplementedError):
            os.replace(blob, link)
