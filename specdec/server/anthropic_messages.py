"""Anthropic's interface: a body of /v1/messages becomes a request of a chat, its answer Anthropic's events. Knows no server."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.server.openai_outputs import InParts, Part, event
from specdec.server.openai_requests import COMMON, Asked, Model, chat_asked
from specdec.server.tool_parsers.incremental import Call, Thought, value_of
from specdec.server.validation import (
    ANTHROPICS,
    NOT_DONE,
    NOTHING,
    Fields,
    Refused,
    a_list,
    an_object,
    between,
    objects,
    words,
    yes_or_no,
)
from specdec.validation import one_of, short, text

OF_NO_EFFECT = ("metadata", "context_management", "diagnostics")  # objects that are taken
WAYS_TO_CHOOSE = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PARTS: Mapping[type, tuple[dict[str, Any], str, str]] = {
    str: ({"type": "text", "text": ""}, "text_delta", "text"),
    Thought: ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    Call: ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json"),
}


def messages_asked(body: Mapping[str, Any], model: Model) -> Asked:
    """A body of /v1/messages. Raises Refused."""
    fields = Fields(body)
    if not (most := fields.take("max_tokens", between(1), 0)):
        raise Refused("max_tokens is missing; expected how many tokens the answer may have", "max_tokens", "missing_parameter")
    asked = _asked(fields, model, most)
    if body["messages"][-1]["role"] == "assistant":
        raise Refused("the last message is an answer, and none is gone on with here; expected the user's", "messages", NOT_DONE)
    return asked


def tokens_counted(body: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """A body of /v1/messages/count_tokens: the tokens of its prompt. Raises Refused."""
    fields = Fields(body)
    fields.take("max_tokens", between(1), 1)
    return {"input_tokens": len(_asked(fields, model, 1).jobs[0].prompt)}


def _asked(fields: Fields, model: Model, max_tokens: int) -> Asked:
    chat: dict[str, Any] = {name: fields.take(name, lambda _, value: value, None) for name in COMMON}
    system = fields.take("system", _paragraphs, "")
    messages = fields.take("messages", _messages, list[dict[str, Any]]())
    if system:
        messages.insert(0, {"role": "system", "content": system})
    tools = fields.take("tools", _tools, list[dict[str, Any]]())
    chat |= {"messages": messages or None, "max_tokens": max_tokens, "tools": tools or None}
    chat |= fields.take("tool_choice", _tool_choice, NOTHING)
    chat["stop"] = fields.take("stop_sequences", lambda _, value: value or None, None)
    thinks = fields.take("thinking", _thinks, None)
    if thinks is not None and isinstance(given := chat["chat_template_kwargs"] or {}, dict):
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, **given}
    chat |= fields.take("output_config", _output, NOTHING)
    for name in OF_NO_EFFECT:
        fields.take(name, an_object, NOTHING)
    fields.end({})
    return replace(chat_asked(chat, model), form=Message)


def _paragraphs(name: str, value: Any) -> str:
    return words(name, value, between="\n\n")


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    """As a chat has them: what tools have told is a message of its own."""
    messages = list[dict[str, Any]]()
    for told, each in objects(name, a_list(name, value)):
        content = each.get("content")
        role = one_of(f"role of {told}", each.get("role"), ["user", "assistant", "system"])
        if isinstance(content, list) and role != "system":
            messages += _answered(told, content) if role == "assistant" else _said(told, content)
        else:
            messages.append({"role": role, "content": _paragraphs(f"content of {told}", content)})
    return messages


def _said(name: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """What a user said, and before it what tools told."""
    results, others = list[dict[str, Any]](), list[Any]()
    for told, block in objects(f"content of {name}", a_list(f"content of {name}", blocks)):
        if block.get("type") == "tool_result":
            content = _paragraphs(f"content of {told}", block.get("content") or "")
            failed = "Error: " * yes_or_no(f"is_error of {told}", block.get("is_error") or False)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": failed + content})
        else:
            others.append(block)
    return [*results, *([{"role": "user", "content": _paragraphs(f"content of {name}", others)}] if others else [])]


def _answered(name: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """What the model answered: text, thoughts and calls."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    said, calls, thought = list[Any](), list[Any](), ""
    for told, block in objects(f"content of {name}", blocks):
        match block.get("type"):
            case "thinking":
                thought += text(f"thinking of {told}", block.get("thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(an_object(f"input of {told}", block.get("input")), ensure_ascii=False)
                calls.append({"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}})
            case _:
                said.append(block)
    message["content"] = _paragraphs(f"content of {name}", said)
    return [message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {})]


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    tools = list[dict[str, Any]]()
    for told, tool in objects(name, value):
        if (kind := tool.get("type") or "custom") != "custom":
            raise Refused(f"{told} is of the type {short(kind, repr)}, which is not done here; expected custom", name, NOT_DONE)
        function = {key: tool.get(key) for key in ("name", "description", "strict")} | {"parameters": tool.get("input_schema")}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(name: str, value: Any) -> dict[str, Any]:
    kind = one_of(f"type of {name}", an_object(name, value).get("type"), ["tool", *WAYS_TO_CHOOSE])
    one = yes_or_no(f"disable_parallel_tool_use of {name}", value.get("disable_parallel_tool_use") or False)
    named = {"type": "function", "function": {"name": value.get("name")}}
    return {"tool_choice": named if kind == "tool" else WAYS_TO_CHOOSE[str(kind)], "parallel_tool_calls": not one}


def _thinks(name: str, value: Any) -> bool:
    """Whether the model is to think, where its template asks; how long is its own affair."""
    return one_of(f"type of {name}", an_object(name, value).get("type"), ["enabled", "adaptive", "disabled"]) != "disabled"


def _output(name: str, value: Any) -> dict[str, Any]:
    """An effort, and a shape."""
    fields, chat = Fields(an_object(name, value)), dict[str, Any]()
    if effort := fields.take("effort", text, ""):
        chat["reasoning_effort"] = effort
    if form := fields.take("format", an_object, NOTHING):
        one_of(f"type of format of {name}", form.get("type"), ["json_schema"])
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    fields.end({})
    return chat


class Message(InParts):
    """Anthropic's events, and its whole."""

    def __init__(self, asked: Asked, model: Model, fingerprint: str) -> None:
        super().__init__(asked, model, fingerprint)
        self._id = f"msg_{secrets.token_hex(12)}"

    def begins(self) -> bytes:
        return _event({"type": "message_start", "message": self._message([], None)})

    def _part(self, what: str, part: Part, grown: str) -> bytes:
        block, kind, key = PARTS[part.kind]
        if what == "begins":
            return _event({"type": "content_block_start", "index": part.index, "content_block": block | _named(part)})
        if what == "grows":
            return _event({"type": "content_block_delta", "index": part.index, "delta": {"type": kind, key: grown}})
        return _event({"type": "content_block_stop", "index": part.index})

    def ends(self) -> bytes:
        ended = {"type": "message_delta", "delta": self._ended(), "usage": {"output_tokens": self.n_text}}
        return self._stops() + _event(ended) + _event({"type": "message_stop"})

    def fails(self, error: Refused) -> bytes:
        return _event(error.body(ANTHROPICS))

    def _told(self) -> dict[str, Any]:
        return self._message([self._block(part) for part in self._parts], self._ended())

    def _block(self, part: Part) -> dict[str, Any]:
        block, _, key = PARTS[part.kind]
        if part.kind is not Call:
            return block | {key: part.text}
        try:
            arguments = value_of(part.text or "{}")
        except ValueError:  # cut by the length: what there is of it is text
            return {"type": "text", "text": f"{part.name} {part.text}"}
        return block | _named(part) | {"input": arguments}

    def _ended(self) -> dict[str, Any]:
        string = self.choices[0].stop_string
        return {"stop_reason": "stop_sequence" if string is not None else REASONS[self._finish], "stop_sequence": string}

    def _message(self, content: Sequence[Mapping[str, Any]], ended: Mapping[str, Any] | None) -> dict[str, Any]:
        usage = {
            "input_tokens": self.n_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": self.n_text,
        }
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model.name}
        return {**head, "content": [*content], **(ended or {"stop_reason": None, "stop_sequence": None}), "usage": usage}


def _named(part: Part) -> dict[str, Any]:
    return {"id": f"toolu_{part.id}", "name": part.name} if part.kind is Call else {}


def _event(value: Mapping[str, Any]) -> bytes:
    return event(value, value["type"])
