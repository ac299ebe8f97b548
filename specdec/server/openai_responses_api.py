"""OpenAI's Responses API, translated to and from chat requests. Knows no server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specdec.argument_checks import JSONDict, JSONObject, check_choice, check_string, shorten
from specdec.server.field_validation import (
    TOO_LONG,
    UNSUPPORTED,
    APIError,
    Fields,
    check_list,
    check_object,
    iter_objects,
    join_text_parts,
    skip_extra,
)
from specdec.server.generation_fields import COMMON_FIELDS, ServedModel
from specdec.server.openai_chat import ParsedRequest, parse_chat_request
from specdec.server.response_formatter import OutputPart, PartsFormatter, format_sse_event

# fields that mean the same in a chat request
CHAT_FIELDS = ("parallel_tool_calls", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata")
# fields of a request that the response repeats
ECHOED_FIELDS = ("metadata", "tools", "tool_choice", "text", "max_output_tokens", "reasoning")
LOGPROBS_INCLUDE = "message.output_text.logprobs"
ENCRYPTED_INCLUDE = "reasoning.encrypted_content"
ENCRYPTED_PREFIX = "specdec:"  # of a thought that clients keep as `encrypted_content` without reading it; nothing is encrypted
TEXT_PART_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def parse_response_request(body: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse a body of OpenAI's /v1/responses into requests to the engine.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    if isinstance(include := body.get("include"), list) and LOGPROBS_INCLUDE in include:
        raise APIError(f"{LOGPROBS_INCLUDE} is not supported; use logprobs of /v1/chat/completions", "include", UNSUPPORTED)
    chat = {name: fields.pop(name) for name in (*COMMON_FIELDS, *CHAT_FIELDS)}
    messages = fields.take("input", _parse_input, list[JSONDict]())
    if instructions := fields.take_string("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = messages or None
    chat["tools"] = fields.take("tools", _parse_tools, list[JSONDict]()) or None
    chat["tool_choice"] = fields.take("tool_choice", _parse_tool_choice, None)
    chat["max_tokens"] = fields.take_limit("max_output_tokens")
    chat |= fields.take("text", _parse_text_format, JSONDict())
    chat |= fields.take("reasoning", _parse_reasoning, JSONDict())
    fields.reject_remaining("responses field")
    return parse_chat_request(chat, model)


def _parse_input(name: str, value: object) -> list[JSONDict]:
    """Convert the field `input` into chat messages; reasoning, text and calls in a row become one assistant message."""
    if isinstance(value, str):
        return [{"role": "user", "content": check_string(name, value)}]
    messages = list[JSONDict]()
    for label, each in iter_objects(name, check_list(name, value)):
        item_type = each.get("type") or "message"
        match item_type:
            case "message":
                role = check_choice(f"role of {label}", each.get("role"), ["user", "assistant", "system", "developer"])
                text = join_text_parts(f"content of {label}", each.get("content"), TEXT_PART_TYPES)
                if role == "assistant":
                    _get_assistant_message(messages)["content"] += text
                elif text or role == "user":
                    messages.append({"role": role, "content": text})
            case "function_call":
                function = {"name": _join_tool_name(each), "arguments": each.get("arguments")}
                call = {"id": each.get("call_id"), "function": function}
                _get_assistant_message(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                text = join_text_parts(f"output of {label}", each.get("output"), TEXT_PART_TYPES, kind="tool output part")
                messages.append({"role": "tool", "tool_call_id": each.get("call_id"), "content": text})
            case "reasoning":
                if reasoning := _parse_reasoning_item(label, each):
                    message = _get_assistant_message(messages)
                    message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            case _:
                skip_extra("responses item", label, item_type)
    return messages


def _parse_reasoning_item(name: str, item: JSONObject) -> str:
    """Return the thought of a reasoning item; encrypted content of other servers is ignored."""
    if content := item.get("content") or item.get("summary"):
        return join_text_parts(f"content of {name}", content, TEXT_PART_TYPES)
    encrypted = check_string(f"encrypted_content of {name}", item.get("encrypted_content") or "")
    return encrypted.removeprefix(ENCRYPTED_PREFIX) if encrypted.startswith(ENCRYPTED_PREFIX) else ""


def _get_assistant_message(messages: list[JSONDict]) -> JSONDict:
    """Return the last message if it is the assistant's; otherwise append an empty assistant message and return that."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _parse_tools(name: str, value: object) -> list[JSONDict]:
    """Convert the field `tools` into the tools of a chat request; leaves out those of other types."""
    tools, namespaces = list[JSONDict](), dict[str, str]()  # by name
    for label, tool in _iter_tools(name, value):
        if tool.get("type") != "function":
            skip_extra("responses tool", label, tool.get("type"))
            continue
        function = {key: tool.get(key) for key in ("description", "parameters", "strict")} | {"name": _join_tool_name(tool)}
        joined_name, namespace = str(function["name"]), tool.get("namespace", "")
        if namespaces.setdefault(joined_name, namespace) != namespace:
            raise ValueError(f"{label} and a tool of another namespace are both named {shorten(joined_name, repr)}")
        tools.append({"type": "function", "function": function})
    return tools


def _iter_tools(name: str, value: object) -> Iterator[tuple[str, JSONDict]]:
    """Yield each tool after its label; the tools of a namespace, such as those of an MCP server, with the key `namespace`."""
    for label, tool in iter_objects(name, value):
        if tool.get("type") != "namespace":
            yield label, {key: each for key, each in tool.items() if key != "namespace"}
            continue
        namespace = check_string(f"name of {label}", tool.get("name"))
        for inner_label, inner in iter_objects(f"{label}.tools", tool.get("tools")):
            yield inner_label, {**inner, "namespace": namespace}


def _join_tool_name(value: JSONObject) -> object:
    """Return the name of a tool or of a call as the template gets it: with its namespace, if it has one, in front."""
    namespace, name = value.get("namespace"), value.get("name")
    if not (namespace and isinstance(namespace, str) and isinstance(name, str)):
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _parse_tool_choice(name: str, value: object) -> object:
    if isinstance(value, dict) and "name" in value:
        return {"type": value.get("type"), "function": {"name": _join_tool_name(value)}}
    return value


def _parse_text_format(name: str, value: object) -> JSONDict:
    """Convert the field `text` into a dict with the chat field `response_format`, or an empty one without a format.

    Its `verbosity` has no effect; any other key is an error.
    """
    fields = Fields(check_object(name, value))
    fields.take_string("verbosity")
    response_format = fields.take_object("format")
    fields.reject_remaining()
    return {"response_format": response_format} if response_format else {}


def _parse_reasoning(name: str, value: object) -> JSONDict:
    fields = Fields(check_object(name, value))
    for each in ("summary", "generate_summary"):
        fields.take_string(each)
    effort = fields.take_string("effort")
    fields.reject_remaining()
    return {"reasoning_effort": effort} if effort else {}


@dataclass
class ResponsesFormatter(PartsFormatter):
    """A formatter of responses in the format of OpenAI's Responses API, as server-sent events or as one object."""

    _n_events: int = field(default=0, init=False)

    def format_start(self) -> bytes:
        """Return the server-sent events that start a response, without output yet."""
        self._n_events, response = _count_loading_events(self.n_loading), self._make_response_object("in_progress", [])
        names = ("in_progress",) if self.n_loading else ("created", "in_progress")
        return b"".join(self._format_event(f"response.{name}", response=response) for name in names)

    @classmethod
    def format_loading(cls, text: str, random_id: str, n_sent: int) -> bytes:
        """Return a comment with the given text and server-sent events, which keep a stream alive while its model is loaded."""
        names = ("in_progress",) if n_sent else ("created", "in_progress")
        events = [(f"response.{name}", _make_early_response(random_id)) for name in names]
        return super().format_loading(text, random_id, n_sent) + _number_events(events, _count_loading_events(n_sent))

    def format_heartbeat(self) -> bytes:
        """Return the server-sent event that keeps a stream without output alive."""
        return self._format_event("response.in_progress", response=self._make_response_object("in_progress", []))

    @classmethod
    def format_rejection(cls, error: APIError, random_id: str, n_loading: int) -> bytes:
        """Return the events of a failed response if the prompt is too long or the stream has begun; otherwise empty.

        Agents look for the code of a prompt that is too long in these events. Other errors get a plain error response.
        """
        if error.code != TOO_LONG and not n_loading:
            return b""
        response = _make_early_response(random_id)
        failed = response | {"status": "failed", "error": {"code": error.code, "message": str(error)}}
        events = [*([] if n_loading else [("response.created", response)]), ("response.failed", failed)]
        return _number_events(events, _count_loading_events(n_loading))

    def format_end(self) -> bytes:
        """Return the server-sent events that end the last output item and the response."""
        part_end, response = self._end_last_part(), self._make_response()
        return part_end + self._format_event(f"response.{response['status']}", response=response)

    def format_error(self, error: APIError) -> bytes:
        """Return the server-sent event that ends a stream after an error, with the output so far."""
        response = self._make_response_object("failed", self._format_items())
        response["error"] = {"code": error.code or "server_error", "message": str(error)}
        return self._format_event("response.failed", response=response)

    def _make_response(self) -> JSONDict:
        return self._make_response_object("incomplete" if self._finish_reason == "length" else "completed", self._format_items())

    def _format_part(self, change: str, part: OutputPart, text: str) -> bytes:
        is_call, is_text = part.kind == "tool_call", part.kind == "text"
        name = "function_call_arguments" if is_call else "output_text" if is_text else "reasoning_text"
        position = {"item_id": _format_id(part), "output_index": part.index} | ({} if is_call else {"content_index": 0})
        logprobs: JSONDict = {"logprobs": []} if is_text else {}
        if change == "delta":
            return self._format_event(f"response.{name}.delta", **position, delta=text, **logprobs)
        if change == "start":
            item = self._make_item(part, "in_progress")
            event = self._format_event("response.output_item.added", output_index=part.index, item=item)
            content = _format_content(part, "")
            return event if is_call else event + self._format_event("response.content_part.added", **position, part=content)
        result = {**self._split_tool_name(part), "arguments": part.text} if is_call else {"text": part.text, **logprobs}
        event = self._format_event(f"response.{name}.done", **position, **result)
        if not is_call:
            event += self._format_event("response.content_part.done", **position, part=_format_content(part, part.text))
        return event + self._format_event("response.output_item.done", output_index=part.index, item=self._format_item(part))

    def _format_items(self) -> list[JSONDict]:
        return [self._format_item(part) for part in self._parts]

    def _format_item(self, part: OutputPart) -> JSONDict:
        """Return a part as an output item, incomplete if it was cut off by the maximum length and completed otherwise."""
        is_incomplete = self._finish_reason == "length" and part is self._parts[-1]
        return self._make_item(part, "incomplete" if is_incomplete else "completed")

    def _make_item(self, part: OutputPart, status: str) -> JSONDict:
        """Return a part of the output as an output item of the Responses API, with the given status."""
        header = {"id": _format_id(part), "status": status}
        if part.kind == "tool_call":
            call = {"call_id": part.id, **self._split_tool_name(part), "arguments": part.text}
            return {**header, "type": "function_call", **call}
        content = [_format_content(part, part.text)] if part.text else []
        if part.kind == "text":
            return {**header, "type": "message", "role": "assistant", "content": content}
        include = self.body.get("include")
        is_encrypted = isinstance(include, list) and ENCRYPTED_INCLUDE in include and part.text
        encrypted = {"encrypted_content": f"{ENCRYPTED_PREFIX}{part.text}"} if is_encrypted else {}
        return {**header, "type": "reasoning", "summary": [], "content": content, **encrypted}

    def _split_tool_name(self, part: OutputPart) -> dict[str, str]:
        """Return the name of a called tool as the request has it: with a namespace, if the tool has one."""
        for _, tool in _iter_tools("tools", self.body.get("tools") or []):
            if "namespace" in tool and _join_tool_name(tool) == part.name:
                return {"name": tool["name"], "namespace": tool["namespace"]}
        return {"name": part.name}

    def _format_event(self, event_type: str, **fields: object) -> bytes:
        self._n_events += 1
        return format_sse_event({"type": event_type, "sequence_number": self._n_events - 1, **fields}, event_type)

    def _make_response_object(self, status: str, items: Sequence[JSONObject]) -> JSONDict:
        sampling = self.requests[0].sampling
        usage = {
            "input_tokens": self.n_prompt,
            "input_tokens_details": {"cached_tokens": self.n_cached, "cache_write_tokens": 0},
            "output_tokens": self.n_generated,
            "output_tokens_details": {"reasoning_tokens": self.n_reasoning_tokens},
            "total_tokens": self.n_prompt + self.n_generated,
        }
        return {
            "id": f"resp_{self.random_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model.name,
            "output": [*items],
            "parallel_tool_calls": not self.options.is_single_call,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "metadata": {},
            "tools": [],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": usage if status != "in_progress" else None,
            **{name: self.body[name] for name in ECHOED_FIELDS if self.body.get(name) is not None},
            "instructions": self.body.get("instructions") or None,
        }


def _make_early_response(random_id: str) -> JSONDict:
    """Return the response object for events before the request is parsed, with little more than its id."""
    return {"id": f"resp_{random_id}", "object": "response", "status": "in_progress", "error": None, "output": []}


def _number_events(events: Sequence[tuple[str, JSONObject]], first: int) -> bytes:
    """Return server-sent events from pairs of a type and a response, numbered from the given number."""
    numbered = [({"type": name, "sequence_number": first + i, "response": each}, name) for i, (name, each) in enumerate(events)]
    return b"".join([format_sse_event(*each) for each in numbered])


def _count_loading_events(n_loading: int) -> int:
    """Return the number of events of `n_loading` calls of `format_loading`; the first call returns two events."""
    return n_loading + (n_loading > 0)


def _format_id(part: OutputPart) -> str:
    return f"{'fc' if part.kind == 'tool_call' else 'rs' if part.kind == 'reasoning' else 'msg'}_{part.id}"


def _format_content(part: OutputPart, content: str) -> JSONDict:
    if part.kind == "text":
        return {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": content}
