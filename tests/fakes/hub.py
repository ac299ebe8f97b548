"""A hub on the loopback, with the answers of huggingface.co that a fetch asks for, and its troubles."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories and what is in them, and the troubles that a test sets.

    Attributes:
        refusal: Status and X-Error-Code of every answer.
        token: Whoever does not send it gets 401.
        cuts: How many bodies are cut off after `cut_at` bytes.
        shorter: Bytes of a body that are listed and never come.
        knows_sizes: Whether it lists files with their sizes.
        ignores_ranges: Whether it sends every file from its beginning.
        redirect: The address of another server that has the files.
        sizes, sums, etags: What it says of a file instead of the truth.
        commit: The newest revision.
        gate: Bodies wait at `cut_at` bytes until it is set.
        requests, ranges, authorizations: What was asked for, in order; the last by path.
        others: Other servers of the test.
    """

    repositories: dict[str, dict[str, bytes]]
    refusal: tuple[int, str] | None = None
    token: str = ""
    cuts: int = 0
    cut_at: int = 0
    shorter: int = 0
    knows_sizes: bool = True
    ignores_ranges: bool = False
    redirect: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    commit: str = COMMIT
    gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path
    ranges: list[str] = field(default_factory=list)
    authorizations: dict[str, str] = field(default_factory=dict)  # by path
    others: dict[str, "Hub"] = field(default_factory=dict)

    def fetched(self) -> list[str]:
        """The files whose bytes were asked for, in order."""
        return [path.split("/", 5)[5] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        hub = self
        hub.gate.set()

        class Handler(_Handler):
            the_hub = hub

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
    the_hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        hub, path = self.the_hub, self.path.split("?")[0]
        hub.requests.append((self.command, path))
        hub.ranges += filter(None, [self.headers.get("Range")])
        hub.authorizations[path] = self.headers.get("Authorization", "")
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = about or file
        repository = hub.repositories.get(found[1]) if found else None
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.refuse(401, "GatedRepo")
        elif hub.refusal:
            self.refuse(*hub.refusal)
        elif repository is None:
            self.refuse(404, "RepoNotFound")
        elif about:
            siblings = self.siblings(repository) if hub.knows_sizes and "blobs=" in self.path else names_of(repository)
            self.send(json.dumps({"id": about[1], "sha": hub.commit, "siblings": siblings}).encode(), with_body)
        elif file and hub.redirect:
            self.refuse(302, "", hub.redirect + path)
        elif file and file[3] in repository:
            self.send_file(file[3], repository[file[3]], with_body)
        else:
            self.refuse(404, "EntryNotFound")

    def siblings(self, repository: dict[str, bytes]) -> list[dict[str, object]]:
        entries = names_of(repository)
        for entry, (name, data) in zip(entries, repository.items(), strict=True):
            sha256 = self.the_hub.sums.get(name, hashlib.sha256(data).hexdigest())
            large = {"lfs": {"sha256": sha256, "size": len(data), "pointerSize": 130}}
            entry |= {"size": self.the_hub.sizes.get(name, len(data)), "blobId": "0" * 40} | (
                large if name.endswith((".safetensors", ".bin", ".gguf")) else {}
            )
        return entries

    def refuse(self, status: int, code: str, location: str = "") -> None:
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
        hub = self.the_hub
        etag = hub.etags.get(name, hashlib.sha256(data).hexdigest())
        asked = None if hub.ignores_ranges else re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        if with_body:
            data = data[: len(data) - hub.shorter]
        if start and start >= len(data):
            self.refuse(416, "")
            return
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        first, rest = data[start : start + hub.cut_at], data[start + hub.cut_at :]
        self.wfile.write(first)
        if rest:
            hub.gate.wait(30)
        if hub.cuts and rest:
            hub.cuts -= 1
            self.close_connection = True
            return
        self.wfile.write(rest)

    def log_message(self, *_: object) -> None:
        pass


def names_of(repository: dict[str, bytes]) -> list[dict[str, object]]:
    return [{"rfilename": name} for name in repository]
