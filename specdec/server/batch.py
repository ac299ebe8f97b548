"""Batch jobs: lines in OpenAI's batch format become lines of results, the same ones on any machine.

A result depends on its line alone, so a job can be stopped, continued and divided among machines. It has no time and no numbers
that depend on caches and drafts, and a request without a seed gets one from its line.
"""

import codecs
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.argument_checks import JSONDict, JSONObject, check_string, shorten, wrap_read_errors
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.reranker import run_to_end
from specdec.engine.sequence import Sequence
from specdec.events import Event, PrefillProgress, Step
from specdec.loaders.model_file import write_text_atomically
from specdec.server.auxiliary_tasks import AuxiliaryRequest
from specdec.server.embeddings import parse_embedding_request
from specdec.server.field_validation import APIError, check_object, parse_body, wrap_errors
from specdec.server.generation_fields import ServedModel, wrap_encoding_errors
from specdec.server.json_values import encode_json
from specdec.server.openai_chat import CompletionFormatter, parse_chat_request, parse_completion_request
from specdec.server.rerank import parse_rerank_request
from specdec.server.response_formatter import ChoiceDelta
from specdec.text import chat_template, structured_output

GENERATION_PARSERS = {"/v1/chat/completions": parse_chat_request, "/v1/completions": parse_completion_request}
AUXILIARY_PARSERS: dict[str, Callable[[JSONObject, ServedModel], AuxiliaryRequest]] = {
    "/v1/embeddings": parse_embedding_request,
    "/v1/rerank": parse_rerank_request,
}
URLS = (*GENERATION_PARSERS, *AUXILIARY_PARSERS)
DROPPED_FIELDS = ("stream", "stream_options", "specdec")  # of bodies: a result is always whole and has no statistics
SHARD_PATTERN = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
MAX_IDLE_SLOTS = 64  # KV caches that are kept for prompts with a common prefix


class BatchLine(NamedTuple):
    """A line of a batch job.

    Attributes:
        number: Number of the line, from 1.
        custom_id: The user's name of the request; None if the line has none.
        url: Path of the API.
        body: Body of the request.
        error: Why the line is not a request; None if it is one.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: Mapping[str, object] = {}
    error: APIError | None = None

    @property
    def id(self) -> str:
        """The id of its result, by which a job that continues knows what is done."""
        return f"batch_req_{self.number:08d}"

    @property
    def random_id(self) -> str:
        """A string of 24 hexadecimal digits that only depends on the line's number and `custom_id`."""
        return hashlib.sha256(f"{self.number} {self.custom_id}".encode()).hexdigest()[:24]

    @property
    def prefix_key(self) -> tuple[str, str]:
        """A key that sorts requests with a long common prefix next to each other."""
        parts = [self.body.get(name) for name in ("tools", "messages", "prompt", "input")]
        return self.url, json.dumps(parts, ensure_ascii=False)


def parse_line(number: int, data: bytes) -> BatchLine:
    """Parse a line of a batch job; a line that is not a request gets an error."""
    custom_id = None
    try:
        line = parse_body(data)
        custom_id = line.get("custom_id")
        with wrap_errors("custom_id"):
            custom_id = check_string("custom_id", custom_id)
        if line.get("method", "POST") != "POST":
            raise APIError(f"method is {shorten(line['method'], repr)}; expected POST", "method")
        if (url := line.get("url")) not in URLS:
            raise APIError(f"url is {shorten(url, repr)}; expected one of {', '.join(URLS)}", "url")
        with wrap_errors("body"):
            body = dict(check_object("body", line.get("body")))
    except APIError as error:
        return BatchLine(number, custom_id if isinstance(custom_id, str) else None, error=error)
    return BatchLine(number, custom_id, url, {name: body[name] for name in body if name not in DROPPED_FIELDS})


def parse_lines(data: bytes) -> list[BatchLine]:
    """Parse the lines of a batch job; empty ones are skipped, and a repeated `custom_id` is an error."""
    requests, numbers = list[BatchLine](), dict[str, int]()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        request = parse_line(number, line)
        if request.custom_id is not None and (first := numbers.setdefault(request.custom_id, number)) != number:
            error = APIError(f"custom_id is the same as in line {first}; expected one of its own", "custom_id")
            request = BatchLine(number, request.custom_id, error=error)
        requests.append(request)
    return requests


def read_lines(path: Path) -> list[BatchLine]:
    """Return the lines of the batch job in a file; raise ValueError if it cannot be read."""
    with wrap_read_errors(path, ValueError):
        return parse_lines(path.read_bytes().removeprefix(codecs.BOM_UTF8))


def select_shard(lines: Iterable[BatchLine], shard: str) -> list[BatchLine]:
    """Return the lines of one of the parts into which a job is divided among machines.

    Args:
        lines: The lines of the job.
        shard: "I/N" for every N-th line from line I on.

    Raises:
        ValueError: The shard is not valid.
    """
    match = SHARD_PATTERN.fullmatch(shard)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(f"shard is {shard!r}; expected I/N with I from 1 to N, such as 1/4")
    first, n_shards = int(match[1]), int(match[2])
    return [line for line in lines if (line.number - first) % n_shards == 0]


def read_done(path: Path, lines: Iterable[BatchLine]) -> set[str]:
    """Return the ids of the results that an earlier run has written to a file; empty if there is no file.

    Removes a last line that was cut off, and errors of the machine (status 500 and up), whose requests are tried again.

    Args:
        path: The file of results.
        lines: The lines of the job.

    Raises:
        ValueError: The file cannot be read, or a line is no result of the job.
    """
    if not path.exists():
        return set()
    with wrap_read_errors(path, ValueError):
        data = path.read_bytes()
    kept, done = list[bytes](), set[str]()
    custom_ids = {line.id: line.custom_id for line in lines}
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), 1):
        try:
            result = json.loads(line)
            is_known = custom_ids[result["id"]] == result["custom_id"]
            is_done = result["response"]["status_code"] < 500
        except (ValueError, KeyError, TypeError):
            is_known = False
        if not is_known:
            raise ValueError(f"line {number} of {path} is no result of these requests; name another file for the results")
        if is_done:
            kept.append(line)
            done.add(result["id"])
    if (text := b"".join(kept)) != data:
        write_text_atomically(path, text.decode())
    return done


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file; raise ValueError if the file cannot be written."""
    try:
        with path.open("ab") as file:
            file.write(line)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def find_required_packages(lines: Iterable[BatchLine]) -> dict[str, str]:
    """Return the packages that requests need, each with its purpose."""
    packages = dict[str, str]()
    for line in lines:
        if "messages" in line.body:
            packages |= chat_template.REQUIRED_PACKAGES
        if line.body.get("response_format"):
            packages |= structured_output.REQUIRED_PACKAGES
    return packages


class BatchFormatter(CompletionFormatter):
    """A formatter of whole responses that are the same whenever and wherever they are generated."""

    def __post_init__(self) -> None:
        """Set a time of creation that is always the same."""
        super().__post_init__()
        self.created = 0

    @property
    def usage(self) -> JSONDict:
        """Token counts, without those that depend on caches and drafts."""
        usage = {name: n for name, n in super().usage.items() if isinstance(n, int)}
        return usage | {"completion_tokens_details": {"reasoning_tokens": self.n_reasoning_tokens}}


@dataclass
class BatchJob:
    """A request whose outputs are being generated.

    Attributes:
        request: The request.
        response: Formats the result.
        sequences: One per output.
        deltas: The outputs so far.
    """

    request: BatchLine
    response: BatchFormatter
    sequences: list[Sequence]
    deltas: list[ChoiceDelta]


class BatchRunner:
    """Generates the results of batch requests, many at a time.

    Args:
        model: The model with its name and its chat template.
        max_running: Sequences per pass; 0 for as many as raise the throughput.
        cache_bytes: Memory limit of all KV caches together, in bytes.

    Attributes:
        metrics: Counters of what was generated.
        n_errors: Number of requests that failed.
    """

    def __init__(self, model: ServedModel, max_running: int = 0, cache_bytes: float = math.inf) -> None:
        """Warm up the model's decoder."""
        self._model = model
        decoder = model.decoder
        decoder.warm_up()
        prefix_cache = PrefixCache(decoder.bundle, MAX_IDLE_SLOTS, decoder.prompt_cache, cache_bytes)
        self._scheduler = decoder.make_scheduler(prefix_cache, max_running)
        self.metrics, self.n_errors = self._scheduler.metrics, 0
        self._jobs = dict[Sequence, BatchJob]()

    def run(self, requests: Iterable[BatchLine]) -> Iterator[bytes | None]:
        """Yield a line for each request once its result or error is known, and None after each pass of the model.

        Requests with a common prefix run together. If the iterator is closed, requests without a result are dropped.
        """
        pending = iter(sorted(requests, key=lambda request: request.prefix_key))
        try:
            while True:
                while len(self._jobs) <= self._scheduler.max_running and (request := next(pending, None)):
                    if line := self._start(request):
                        yield line
                if not self._jobs:
                    return
                yield from self._step()
                yield None
        finally:
            for sequence in self._jobs:
                self._scheduler.cancel(sequence)
            self._jobs.clear()

    def format_summary(self, n_done: int, seconds: float, draft_label: str) -> str:
        """Return one line with the numbers of results and tokens, the speed, and the acceptance rate of draft tokens.

        Args:
            n_done: Number of results.
            seconds: Time of the run.
            draft_label: Description of the draft, such as "by little".
        """
        n, n_drafted, n_accepted = self.metrics.generated_tokens, self.metrics.drafted_tokens, self.metrics.accepted_tokens
        text = f"{n_done} results, {self.n_errors} of them errors; {n:,} tokens in {seconds:.1f} s ({n / seconds:.0f} tok/s)"
        if not n_drafted:
            return text
        drafts = f"{n_accepted / n_drafted:.0%} of {n_drafted:,} tokens guessed {draft_label} accepted"
        return f"{text}; {drafts}, {n / max(n - n_accepted, 1):.1f} tokens per pass of a sequence instead of 1"

    def _start(self, request: BatchLine) -> bytes | None:
        """Start a request; return its line if it is an error, or one for embeddings or reranking, which runs at once."""
        try:
            if request.error:
                raise request.error
            if parse := AUXILIARY_PARSERS.get(request.url):
                parsed = parse(request.body, self._model)
                results = [run_to_end(task(self._model.decoder.target)) for task in parsed.tasks]
                return format_result(request, json.loads(parsed.format_response(results, self._model.name)))
            self._add_sequences(request)
        except Exception as error:
            return self._fail(request, error)
        return None

    def _add_sequences(self, request: BatchLine) -> None:
        """Parse a request for completions and add its sequences to the scheduler.

        Raises:
            APIError: The request is invalid.
        """
        body = request.body
        if body.get("seed") in (None, -1):
            body = {**body, "seed": int(request.random_id[:8], 16)}
        generation_requests, options = GENERATION_PARSERS[request.url](body, self._model)
        if options.grammar:
            with wrap_encoding_errors(self._model, options.grammar.request_field):
                generation_requests = options.constrain(generation_requests, options.grammar.get_constraint())
        sequences = [Sequence(each, self._model.decoder.tokenizer) for each in generation_requests]
        response = BatchFormatter(body, generation_requests, options, self._model, request.random_id, 0)
        job = BatchJob(request, response, sequences, [ChoiceDelta() for _ in sequences])
        for sequence in sequences:
            self._jobs[sequence] = job
            self._scheduler.add(sequence)

    def _step(self) -> Iterator[bytes]:
        """Run a step of the scheduler and yield the lines of the requests that have ended."""
        try:
            for sequence, event in self._scheduler.step():
                if line := self._process_event(sequence, event):
                    yield line
        except Exception as error:
            for sequence in self._scheduler.fail_all(error):
                if line := self._process_event(sequence, error):
                    yield line
        for sequence in [each for each in self._jobs if each.has_ended]:  # without a step, since no token was allowed
            if line := self._process_event(sequence, Step([], [], 0, 0.0, 0.0, "max_tokens")):
                yield line

    def _process_event(self, sequence: Sequence, event: Event | PrefillProgress | Exception) -> bytes | None:
        """Add an event to the output of its sequence; return the line of its request if that has ended."""
        if not (job := self._jobs.get(sequence)) or isinstance(event, PrefillProgress):
            return None
        if isinstance(event, Exception):
            self._end(job)
            return self._fail(job.request, job.response.options.explain(event))
        index = job.sequences.index(sequence)
        delta = job.response.choices[index].process_event(event)
        job.deltas[index].add(delta)
        if delta.finish_reason:
            del self._jobs[sequence]
        if not all(each.finish_reason for each in job.deltas):
            return None
        return format_result(job.request, job.response.format_response(job.deltas))

    def _fail(self, line: BatchLine, error: Exception) -> bytes:
        """Count a request that failed, and return its line: the error is also under `error`, by which such lines can be found."""
        self.n_errors += 1
        if not isinstance(error, APIError):
            error = APIError(f"{type(error).__name__}: {error}", None, "server_error", 500)
        return format_result(line, error.format_body(), error.status, {"code": error.code, "message": str(error)})

    def _end(self, job: BatchJob) -> None:
        """Forget a request, and cancel what is left of it."""
        for sequence in job.sequences:
            self._scheduler.cancel(sequence)
            self._jobs.pop(sequence, None)


def format_result(request: BatchLine, body: JSONObject, status: int = 200, error: object = None) -> bytes:
    """Return the line of a result in OpenAI's batch format."""
    response = {"status_code": status, "request_id": request.random_id, "body": body}
    line = encode_json({"id": request.id, "custom_id": request.custom_id, "response": response, "error": error})
    return line + b"\n"
