"""The outputs of a request, from generated events to the parts of a response that all interfaces format. Knows no server."""

import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

import specdec
from specdec.argument_checks import JSONDict, JSONObject
from specdec.engine.request import GenerationRequest
from specdec.events import Event, Statistics, Step, TokenLogprob
from specdec.server.field_validation import APIError
from specdec.server.generation_fields import ResponseOptions, ServedModel
from specdec.server.json_values import LINE_SEPARATORS, parse_json
from specdec.server.tool_parsers.base import Delta
from specdec.server.tool_parsers.output_parser import OutputParser
from specdec.text.reasoning import SPECIAL_TOKEN_MARK

# stop reasons that mean a truncated output
TRUNCATING_STOP_REASONS = ("max_tokens", "seq_len", "interrupted")
# identifies everything that responses depend on apart from the model
FINGERPRINT = f"specdec-{specdec.__version__}-{specdec.__arithmetic__}"
SSE_DONE = b"data: [DONE]\n\n"


@dataclass
class ChoiceDelta:
    """The new output of one choice in a step.

    Attributes:
        deltas: Reasoning, text and tool calls, in their order.
        logprobs: Log-probabilities of the new tokens.
        finish_reason: None while the choice continues.
        details: Which part of the text was drafted, if the request asks for it.
    """

    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    details: JSONDict | None = None

    def __bool__(self) -> bool:
        """Return whether there is anything to send."""
        return bool(self.deltas or self.logprobs or self.finish_reason or self.details)

    def get_text(self, kind: str) -> str:
        """Return the new text of one kind, which is text or reasoning."""
        return "".join([each.text for each in self.deltas if each.kind == kind])

    def add(self, other: "ChoiceDelta") -> None:
        """Append the next delta of the same choice to this one, whose finish reason and details it replaces."""
        for each in other.deltas:
            self.append(each)
        self.logprobs += other.logprobs
        self.finish_reason, self.details = other.finish_reason, other.details

    def append(self, delta: Delta) -> None:
        """Append a piece of output; a piece that continues the last one is merged with it."""
        if self.deltas and delta.continues(self.deltas[-1]):
            self.deltas[-1] = replace(self.deltas[-1], text=self.deltas[-1].text + delta.text)
        else:
            self.deltas.append(delta)


class Choice:
    """One of the outputs of a response, which turns the events of its generation into deltas."""

    def __init__(self, request: GenerationRequest, options: ResponseOptions) -> None:
        """Create the choice's parser of thoughts and tool calls, without output so far."""
        self._options, marks, splitter = options, request.reasoning_marks, None
        tool_parser = options.tool_parser(options.tools, request.visible_tokens) if options.tool_parser else None
        if marks and not (tool_parser and tool_parser.is_always_parsed):
            splitter = marks.make_splitter(tool_parser.open_mark if tool_parser else "")
        self._parser = OutputParser(splitter, tool_parser)
        self.statistics, self.n_calls = Statistics(), 0
        self._arguments = list[str]()  # of the last call that was returned
        self.stop_string: str | None = None  # the one that ended the output

    def process_event(self, event: Event) -> ChoiceDelta:
        """Return the new output of a generation event, with its tool calls and reasoning parsed; count it in the statistics.

        The delta is empty for events other than a `Step`. Further tool calls are dropped if the request allows only one.
        """
        self.statistics.add(event)
        if not isinstance(event, Step):
            return ChoiceDelta()
        self.stop_string = event.stop_string
        delta = ChoiceDelta(logprobs=list(event.logprobs or ()))
        for piece in self._parse(event):
            self.n_calls += piece.name is not None
            if piece.kind == "tool_call" and self._options.is_single_call and self.n_calls > 1:
                continue
            delta.append(piece)
            if piece.kind == "tool_call":
                if piece.name is not None:
                    self._arguments.clear()
                self._arguments.append(piece.text)
        if event.stop_reason:
            is_truncated = event.stop_reason in TRUNCATING_STOP_REASONS
            delta.finish_reason = "length" if is_truncated else "tool_calls" if self._has_complete_call else "stop"
        if self._options.shared.has_details:
            delta.details = format_draft_details(event)
            if event.stop_reason:
                delta.details |= format_statistics(self.statistics)
        return delta

    @property
    def n_reasoning_tokens(self) -> int:
        """Number of tokens of the thought, without those of its marks."""
        return self._parser.n_reasoning_tokens

    def _parse(self, step: Step) -> list[Delta]:
        deltas = list[Delta]()
        for i, text in enumerate(step.pieces):
            deltas += self._parser.push(text, i < len(step.tokens))
        return deltas + (self._parser.end() if step.stop_reason else [])

    @property
    def _has_complete_call(self) -> bool:
        """Whether there is a tool call, and the arguments of the last one are complete JSON.

        An end-of-sequence token or a stop string may cut the arguments off.
        """
        try:
            arguments = parse_json("".join(self._arguments) or ("" if self.stop_string else "{}"))
            return self.n_calls > 0 and isinstance(arguments, dict)
        except ValueError:
            return False


def format_statistics(statistics: Statistics) -> JSONDict:
    """Return the statistics of an output as a JSON object.

    The seconds are those of shared passes, so they do not measure the target alone.
    """
    return {
        "tokens": statistics.n_generated,
        "passes": statistics.target_passes,
        "drafted": statistics.n_drafted,
        "accepted": statistics.n_accepted,
        "seconds": round(statistics.decode_seconds, 4),
    }


def format_draft_details(step: Step) -> JSONDict:
    """Return a JSON object that shows which text of a step was drafted.

    `runs` is the text split by its source ("guessed" for accepted draft tokens, "own" for the target's); `wrong` is the
    rejected draft text.
    """
    runs = ("guessed", step.pieces[: step.n_accepted]), ("own", step.pieces[step.n_accepted :])
    merged = [[source, text] for source, pieces in runs if (text := "".join(pieces).replace(SPECIAL_TOKEN_MARK, ""))]
    return {"runs": merged, "wrong": "".join(step.wrong).replace(SPECIAL_TOKEN_MARK, "")}


@dataclass
class ResponseFormatter:
    """Base class of formatters that turn the outputs of a request into the response of an API.

    Subclasses for other APIs than OpenAI's are in files of their own.

    Attributes:
        media_type: Content type of a stream.
        body: The body of the request.
        requests: The requests to the engine, one per output.
        options: What the response contains.
        model: The model that answers.
        random_id: Random part of the response's id.
        n_loading: Number of calls of `format_loading` for its stream.
        choices: The outputs. Formats for a single output use the first one.
    """

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    body: JSONObject
    requests: Sequence[GenerationRequest]
    options: ResponseOptions
    model: ServedModel
    random_id: str
    n_loading: int

    def __post_init__(self) -> None:
        """Set the time of creation, and add an empty choice for each request."""
        self.created = int(time.time())
        self.choices = [Choice(request, self.options) for request in self.requests]

    @property
    def n_prompt(self) -> int:
        """Number of tokens of all prompts; a prompt that several outputs share counts once."""
        return sum({id(request.prompt): len(request.prompt) for request in self.requests}.values())

    @property
    def n_cached(self) -> int:
        """Number of tokens of all prompts that were found in a KV cache, for a prompt of several outputs by the first of them."""
        cached = dict[int, int]()  # by the id of the prompt
        for request, choice in zip(self.requests, self.choices, strict=True):
            n_cached = choice.statistics.n_cached
            cached[id(request.prompt)] = min(cached.get(id(request.prompt), n_cached), n_cached)
        return sum(cached.values())

    @property
    def n_generated(self) -> int:
        """Number of tokens generated for all outputs."""
        return sum(choice.statistics.n_generated for choice in self.choices)

    @property
    def n_reasoning_tokens(self) -> int:
        """Number of tokens of the thoughts in all outputs."""
        return sum(choice.n_reasoning_tokens for choice in self.choices)

    def _make_id(self, *position: int) -> str:
        """Return the id of a part of the response: nine letters and digits, which Mistral's templates expect of a call's id."""
        return hashlib.sha256(f"{self.random_id} {position}".encode()).hexdigest()[:9]

    def format_start(self) -> bytes:
        """Return the first server-sent events of a stream; empty by default."""
        return b""

    def format_delta(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the server-sent events for a delta of the choice with the given index."""
        raise NotImplementedError

    @classmethod
    def format_loading(cls, text: str, random_id: str, n_sent: int) -> bytes:
        """Return what keeps a stream alive before its response starts: a comment, or events where clients wait for them.

        Args:
            text: What the server is doing, for the comment.
            random_id: Random id of the response.
            n_sent: How often this was called before for the stream.
        """
        return _format_comment(text)

    def format_heartbeat(self) -> bytes:
        """Return what keeps a stream without output alive: a comment, or an event where clients wait for one."""
        return _format_comment("waiting")

    @classmethod
    def format_rejection(cls, error: APIError, random_id: str, n_loading: int) -> bytes:
        """Return the server-sent events that reject a request for a stream; empty to answer with a plain error response.

        Args:
            error: The reason.
            random_id: Random id of the response.
            n_loading: Number of calls of `format_loading` for the stream.
        """
        return b""

    def format_end(self) -> bytes:
        """Return the last server-sent events of a stream."""
        raise NotImplementedError

    def format_error(self, error: APIError) -> bytes:
        """Return the server-sent events that end a stream after an error."""
        return format_sse_event(error.format_body()) + SSE_DONE

    def format_response(self, deltas: Sequence[ChoiceDelta]) -> JSONDict:
        """Return the complete response as a JSON object, from the merged deltas of each choice."""
        raise NotImplementedError


def _format_comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


def format_sse_event(value: JSONObject, name: str = "") -> bytes:
    """Return a server-sent event in UTF-8 with a JSON object as its data, and with a name if there is one.

    A lone surrogate, which JSON escapes can produce, is escaped again. So are line separators, at which clients may split.
    """
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(LINE_SEPARATORS)
    event = f"data: {data}\n\n"
    return (f"event: {name}\n{event}" if name else event).encode(errors="backslashreplace")


@dataclass
class OutputPart:
    """A part of a response: reasoning, text or a tool call.

    Attributes:
        kind: Kind of its deltas: reasoning, text or tool_call.
        index: Position among the parts.
        id: Random id.
        name: Name of the called tool.
        text: The text or arguments so far.
    """

    kind: str
    index: int
    id: str
    name: str = ""
    text: str = ""

    def parse_arguments(self) -> object:
        """Return the arguments of a tool call as a JSON value, or None if they were cut off."""
        with suppress(ValueError):
            return parse_json(self.text or "{}")
        return None


@dataclass
class PartsFormatter(ResponseFormatter):
    """Base class of formatters for a response with a single output, which consists of parts in a row."""

    _parts: list[OutputPart] = field(default_factory=list, init=False)
    _finish_reason: str = field(default="stop", init=False)

    def format_delta(self, index: int, delta: ChoiceDelta) -> bytes:
        """Add a delta to the parts of the output, and return the server-sent events for it."""
        return b"".join([self._format_part(*each) for each in self._update_parts(delta)])

    def format_response(self, deltas: Sequence[ChoiceDelta]) -> JSONDict:
        """Add the deltas to the parts of the output, and return the complete response as a JSON object."""
        for delta in deltas:
            deque(self._update_parts(delta), 0)  # no events are needed
        return self._make_response()

    def _update_parts(self, delta: ChoiceDelta) -> Iterator[tuple[str, OutputPart, str]]:
        """Add a delta to the parts of the output, and yield each change as arguments of `_format_part`."""
        for piece in delta.deltas:
            if not self._parts or self._parts[-1].kind != piece.kind or piece.name is not None:
                yield from (("end", part, "") for part in self._parts[-1:])
                self._parts.append(OutputPart(piece.kind, len(self._parts), self._make_id(len(self._parts)), piece.name or ""))
                yield "start", self._parts[-1], ""
            self._parts[-1].text += piece.text
            if piece.text:
                yield "delta", self._parts[-1], piece.text
        self._finish_reason = delta.finish_reason or self._finish_reason

    def _format_part(self, change: str, part: OutputPart, text: str) -> bytes:
        """Return the server-sent events for a change of a part: its "start", a "delta" with new text, or its "end"."""
        raise NotImplementedError

    def _make_response(self) -> JSONDict:
        """Return the complete response as a JSON object, from all parts of the output."""
        raise NotImplementedError

    def _end_last_part(self) -> bytes:
        """Return the server-sent events that end the last part; empty if there are no parts."""
        return b"".join([self._format_part("end", part, "") for part in self._parts[-1:]])


def make_random_id() -> str:
    """Return a random id of 24 characters for a response."""
    return secrets.token_hex(12)
