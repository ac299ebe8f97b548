"""Anthropic's Messages API, translated to and from chat requests. Knows no server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specdec.argument_checks import JSONDict, JSONObject, check_choice, check_string
from specdec.server.field_validation import (
    ANTHROPIC_PREFIX,
    MESSAGE_LIST,
    TOO_LONG,
    UNSUPPORTED,
    APIError,
    Fields,
    check_bool,
    check_integer,
    check_list,
    check_object,
    iter_objects,
    join_text_parts,
    skip_extra,
)
from specdec.server.generation_fields import COMMON_FIELDS, ServedModel
from specdec.server.openai_chat import ParsedRequest, parse_chat_request
from specdec.server.response_formatter import OutputPart, PartsFormatter, format_sse_event

# Claude Code puts this line before its system prompt. It is not meant for the model, and its text changes with each session or
# request, so that nothing after it could be reused from the KV cache of an earlier one.
BILLING_HEADER_PATTERN = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
HEARTBEATS_PER_DELTA = 24  # 120 s
CONTENT_BLOCKS: Mapping[str, tuple[JSONDict, str, str]] = {
    "text": ({"type": "text", "text": ""}, "text_delta", "text"),
    "reasoning": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_call": ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json"),
}


def parse_messages_request(body: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse a body of Anthropic's /v1/messages into requests to the engine.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    max_tokens = fields.take_required("max_tokens", partial(check_integer, minimum=1), "the maximum number of tokens to generate")
    parsed = _parse_chat(_make_chat(fields, max_tokens), model)
    if body["messages"][-1]["role"] == "assistant":
        message = "continuing an assistant message is not supported; the last message must be the user's"
        raise APIError(message, "messages", UNSUPPORTED)
    return parsed


def count_tokens(body: JSONObject, model: ServedModel) -> JSONDict:
    """Return the response to a body of /v1/messages/count_tokens: the number of tokens of its prompt.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    fields.take_int("max_tokens", 1, 1)
    (request,), _ = _parse_chat(_make_chat(fields, 1), model)
    return {"input_tokens": len(request.prompt)}


def _parse_chat(chat: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse the body of a chat request; an error for a prompt that is too long gets Anthropic's words, which agents look for.

    If the prompt is too long to be tokenized, the error names the smallest number of tokens that its characters can have.

    Raises:
        APIError: The body is invalid, or the prompt is too long.
    """
    try:
        return parse_chat_request(chat, model)
    except APIError as error:
        if error.code != TOO_LONG:
            raise
        maximum = model.decoder.n_positions
        found = re.search(r"(\d+) (tokens|characters)", str(error))
        n = int(found[1]) if found and found[2] == "tokens" else int(found[1]) * maximum // model.max_chars if found else 0
        n = max(n, maximum + 1)
        raise APIError(f"prompt is too long: {n} tokens > {maximum} maximum", error.param, TOO_LONG) from None


def _make_chat(fields: Fields, max_tokens: int) -> JSONDict:
    """Convert the fields of a request into the body of a chat request, without Claude Code's billing header.

    Raises:
        APIError: A field is invalid or unknown, or there are no messages.
    """
    chat = {name: fields.pop(name) for name in COMMON_FIELDS}
    system = BILLING_HEADER_PATTERN.sub("", fields.take("system", _join_paragraphs, ""))
    messages = fields.take_required("messages", _parse_messages, MESSAGE_LIST)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    tools = fields.take("tools", _parse_tools, list[JSONDict]())
    chat |= {"messages": messages, "max_tokens": max_tokens, "tools": tools or None}
    chat |= fields.take("tool_choice", _parse_tool_choice, JSONDict())
    chat["stop"] = fields.pop("stop_sequences") or None
    chat["thinking"] = fields.pop("thinking")
    chat |= fields.take("output_config", _parse_output_config, JSONDict())
    fields.take("thread", _check_thread, None)
    fields.reject_remaining("messages field")
    return chat


def _join_paragraphs(name: str, value: object, kind: str = "") -> str:
    return join_text_parts(name, value, separator="\n\n", kind=kind)


def _parse_messages(name: str, value: object) -> list[JSONDict]:
    """Convert Anthropic's messages into those of a chat request; each tool result becomes a message of its own."""
    messages = list[JSONDict]()
    for label, each in iter_objects(name, check_list(name, value)):
        content = each.get("content")
        role = check_choice(f"role of {label}", each.get("role"), ["user", "assistant", "system"])
        if isinstance(content, list) and role != "system":
            messages += _parse_assistant_blocks(label, content) if role == "assistant" else _parse_user_blocks(label, content)
        else:
            messages.append({"role": role, "content": _join_paragraphs(f"content of {label}", content)})
    return messages


def _parse_user_blocks(name: str, blocks: Sequence[object]) -> list[JSONDict]:
    """Convert a user's content blocks into chat messages: one for each tool result, then one with the text, if any."""
    results, others = list[JSONDict](), list[object]()
    for label, block in iter_objects(f"content of {name}", check_list(f"content of {name}", blocks)):
        if block.get("type") == "tool_result":
            content = _join_paragraphs(f"content of {label}", block.get("content") or "", "tool output part")
            prefix = "Error: " * check_bool(f"is_error of {label}", block.get("is_error") or False)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": prefix + content})
        else:
            others.append(block)
    return [*results, *([{"role": "user", "content": _join_paragraphs(f"content of {name}", others)}] if others else [])]


def _parse_assistant_blocks(name: str, blocks: Sequence[object]) -> list[JSONDict]:
    """Return a list of one chat message, made from an assistant's content blocks: text, reasoning and tool calls.

    Redacted thinking is dropped. A note in the text replaces the blocks of tools that Anthropic's servers run.
    """
    message: JSONDict = {"role": "assistant", "content": ""}
    text_blocks, tool_calls, reasoning = list[object](), list[object](), ""
    for label, block in iter_objects(f"content of {name}", blocks):
        match block.get("type"):
            case "thinking":
                reasoning += check_string(f"thinking of {label}", block.get("thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = check_object(f"input of {label}", block.get("input"))
                tool_calls.append({"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}})
            case _:
                text_blocks.append(block)
    message["content"] = _join_paragraphs(f"content of {name}", text_blocks, "assistant block")
    others = {"tool_calls": tool_calls, "reasoning_content": reasoning}
    return [message | {key: value for key, value in others.items() if value}]


def _parse_tools(name: str, value: object) -> list[JSONDict]:
    tools = list[JSONDict]()
    for label, tool in iter_objects(name, value):
        if (tool_type := tool.get("type") or "custom") != "custom":
            skip_extra("messages tool", label, tool_type)
            continue
        function = {key: tool.get(key) for key in ("name", "description", "strict")} | {"parameters": tool.get("input_schema")}
        tools.append({"type": "function", "function": function})
    if value and not tools:
        raise APIError("none of the tools has the type custom, and the server runs no tools itself", name, UNSUPPORTED)
    return tools


def _parse_tool_choice(name: str, value: Any) -> JSONDict:
    choice_type = check_choice(f"type of {name}", check_object(name, value).get("type"), ["tool", *TOOL_CHOICES])
    is_single_call = check_bool(f"disable_parallel_tool_use of {name}", value.get("disable_parallel_tool_use") or False)
    function = {"type": "function", "function": {"name": value.get("name")}}
    choice = function if choice_type == "tool" else TOOL_CHOICES[str(choice_type)]
    return {"tool_choice": choice, "parallel_tool_calls": not is_single_call}


def _parse_output_config(name: str, value: object) -> JSONDict:
    """Convert the field `output_config` into a dict of chat fields: the reasoning effort and the response format."""
    fields, chat = Fields(check_object(name, value)), JSONDict()
    if effort := fields.take_string("effort"):
        chat["reasoning_effort"] = effort
    if response_format := fields.take_object("format"):
        check_choice(f"type of format of {name}", response_format.get("type"), ["json_schema"])
        chat["response_format"] = response_format
    fields.reject_remaining()
    return chat


def _check_thread(name: str, value: object) -> None:
    """Raise APIError if the field `thread` asks to continue a conversation, since the server stores none.

    After this error, a client sends the whole conversation instead of only the new messages. The type "create" is accepted.
    """
    if check_choice(f"type of {name}", check_object(name, value).get("type"), ["create", "continue"]) == "continue":
        message = f"{name} was not found, since the server stores nothing; send the whole conversation"
        raise APIError(message, name, "thread_not_found", 404)


@dataclass
class MessagesFormatter(PartsFormatter):
    """A formatter of responses in the format of Anthropic's Messages API, as server-sent events or as one message."""

    _n_heartbeats: int = field(default=0, init=False)

    def format_start(self) -> bytes:
        """Return the server-sent event that starts a message, without content yet."""
        return _format_event({"type": "message_start", "message": self._make_message([], None)})

    def _format_part(self, change: str, part: OutputPart, text: str) -> bytes:
        block, delta_type, key = CONTENT_BLOCKS[part.kind]
        if change == "start":
            block = block | _format_tool_use(part)  # a copy
            return _format_event({"type": "content_block_start", "index": part.index, "content_block": block})
        if change == "delta":
            return _format_event({"type": "content_block_delta", "index": part.index, "delta": {"type": delta_type, key: text}})
        stop = _format_event({"type": "content_block_stop", "index": part.index})
        if part.kind != "reasoning":
            return stop
        signature = {"type": "signature_delta", "signature": ""}
        return _format_event({"type": "content_block_delta", "index": part.index, "delta": signature}) + stop

    def format_end(self) -> bytes:
        """Return the server-sent events that end the last block and the message, with the stop reason and the token counts."""
        message_delta = {"type": "message_delta", "delta": self._format_stop(), "usage": self._format_usage()}
        return self._end_last_part() + _format_event(message_delta) + _format_event({"type": "message_stop"})

    @classmethod
    def format_loading(cls, text: str, random_id: str, n_sent: int) -> bytes:
        """Return a comment with the given text and a ping event, which keep a stream alive before its message starts."""
        return super().format_loading(text, random_id, n_sent) + _format_event({"type": "ping"})

    def format_heartbeat(self) -> bytes:
        """Return what keeps a stream without output alive: a ping, and sometimes a `message_delta` that changes nothing.

        Each `HEARTBEATS_PER_DELTA`-th call adds the delta. Anthropic's libraries drop pings, and Claude Code gives up after 300 s
        without another event.
        """
        self._n_heartbeats += 1
        ping = _format_event({"type": "ping"})
        if self._n_heartbeats % HEARTBEATS_PER_DELTA:
            return ping
        delta, usage = {"stop_reason": None, "stop_sequence": None}, {"output_tokens": self.n_generated}
        return ping + _format_event({"type": "message_delta", "delta": delta, "usage": usage})

    def format_error(self, error: APIError) -> bytes:
        """Return the server-sent event that reports an error within a stream."""
        return _format_event(error.format_body(ANTHROPIC_PREFIX))

    def _make_response(self) -> JSONDict:
        return self._make_message([self._format_block(part) for part in self._parts], self._format_stop())

    def _format_block(self, part: OutputPart) -> JSONDict:
        block, _, key = CONTENT_BLOCKS[part.kind]
        if part.kind != "tool_call":
            return block | {key: part.text}
        if (arguments := part.parse_arguments()) is None:  # cut off by max_tokens: return it as text
            return {"type": "text", "text": f"{part.name} {part.text}"}
        return block | _format_tool_use(part) | {"input": arguments}

    def _format_stop(self) -> JSONDict:
        string = self.choices[0].stop_string
        reason = "stop_sequence" if string is not None else STOP_REASONS[self._finish_reason]
        return {"stop_reason": reason, "stop_sequence": string}

    def _make_message(self, content: Sequence[JSONObject], stop: JSONObject | None) -> JSONDict:
        header = {"id": f"msg_{self.random_id}", "type": "message", "role": "assistant", "model": self.model.name}
        stop = stop or {"stop_reason": None, "stop_sequence": None}
        return {**header, "content": [*content], **stop, "usage": self._format_usage()}

    def _format_usage(self) -> JSONDict:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": self.n_cached}
        return {"input_tokens": self.n_prompt - self.n_cached, **cached, "output_tokens": self.n_generated}


def _format_tool_use(part: OutputPart) -> JSONDict:
    return {"id": f"toolu_{part.id}", "name": part.name} if part.kind == "tool_call" else {}


def _format_event(value: JSONObject) -> bytes:
    return format_sse_event(value, value["type"])
