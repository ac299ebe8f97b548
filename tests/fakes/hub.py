"""A fake of huggingface.co on the loopback, with the responses that a download needs and simulated faults."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_snapshot(hub: Path, commit: str = "abc") -> Path:
    """Create an empty snapshot of org/name in a cache, as its latest, and return its folder."""
    folder = hub / "models--org--name"
    for name in (f"snapshots/{commit}", "refs"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit


@dataclass
class FakeHub:
    """Repositories with their files, and the faults that a test sets.

    Attributes:
        error_response: Status and X-Error-Code of every response.
        token: Requests without it get 401.
        n_cut_bodies: How many bodies are cut off after `cut_at` bytes.
        n_missing_bytes: Announced bytes of a body that are never sent.
        lists_sizes: Whether it lists files with their sizes.
        ignores_ranges: Whether it sends every file from its beginning.
        redirect: The URL of another server that has the files.
        sizes, checksums, etags: False values that it reports for a file.
        commit: The latest revision.
        gate: Bodies wait at `cut_at` bytes until it is set.
        requests, ranges, authorizations: What was requested, in order; the last by path.
        others: Other servers of the test.
    """

    repositories: dict[str, dict[str, bytes]]
    error_response: tuple[int, str] | None = None
    token: str = ""
    n_cut_bodies: int = 0
    cut_at: int = 0
    n_missing_bytes: int = 0
    lists_sizes: bool = True
    ignores_ranges: bool = False
    redirect: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    commit: str = COMMIT
    gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path
    ranges: list[str] = field(default_factory=list)
    authorizations: dict[str, str] = field(default_factory=dict)  # by path
    others: dict[str, "FakeHub"] = field(default_factory=dict)

    def list_fetched_files(self) -> list[str]:
        """Return the files that were downloaded, in order of their requests."""
        return [path.split("/", 5)[5] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    @contextmanager
    def serve(self) -> Iterator["FakeHub"]:
        """Serve in a thread until the context ends."""
        fake = self
        fake.gate.set()

        class Handler(_Handler):
            hub = fake

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, with_body: bool) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        hub.requests.append((self.command, path))
        hub.ranges += filter(None, [self.headers.get("Range")])
        hub.authorizations[path] = self.headers.get("Authorization", "")
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = info or file
        repository = hub.repositories.get(found[1]) if found else None
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.send_refusal(401, "GatedRepo")
        elif hub.error_response:
            self.send_refusal(*hub.error_response)
        elif repository is None:
            self.send_refusal(404, "RepoNotFound")
        elif info:
            siblings = (
                self.list_siblings(repository) if hub.lists_sizes and "blobs=" in self.path else list_file_names(repository)
            )
            self.send(json.dumps({"id": info[1], "sha": hub.commit, "siblings": siblings}).encode(), with_body)
        elif file and hub.redirect:
            self.send_refusal(302, "", hub.redirect + path)
        elif file and file[3] in repository:
            self.send_file(file[3], repository[file[3]], with_body)
        else:
            self.send_refusal(404, "EntryNotFound")

    def list_siblings(self, repository: dict[str, bytes]) -> list[dict[str, object]]:
        entries = list_file_names(repository)
        for entry, (name, data) in zip(entries, repository.items(), strict=True):
            sha256 = self.hub.checksums.get(name, hashlib.sha256(data).hexdigest())
            large = {"lfs": {"sha256": sha256, "size": len(data), "pointerSize": 130}}
            entry |= {"size": self.hub.sizes.get(name, len(data)), "blobId": "0" * 40} | (
                large if name.endswith((".safetensors", ".bin", ".gguf")) else {}
            )
        return entries

    def send_refusal(self, status: int, code: str, location: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, data: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def send_file(self, name: str, data: bytes, with_body: bool) -> None:
        hub = self.hub
        etag = hub.etags.get(name, hashlib.sha256(data).hexdigest())
        requested = None if hub.ignores_ranges else re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(requested[1]) if requested else 0
        if with_body:
            data = data[: len(data) - hub.n_missing_bytes]
        if start and start >= len(data):
            self.send_refusal(416, "")
            return
        self.send_response(206 if requested else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Content-Length", str(len(data) - start))
        if requested:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        first, rest = data[start : start + hub.cut_at], data[start + hub.cut_at :]
        self.wfile.write(first)
        if rest:
            hub.gate.wait(30)
        if hub.n_cut_bodies and rest:
            hub.n_cut_bodies -= 1
            self.close_connection = True
            return
        self.wfile.write(rest)

    def log_message(self, *_: object) -> None:
        pass


def list_file_names(repository: dict[str, bytes]) -> list[dict[str, object]]:
    return [{"rfilename": name} for name in repository]
