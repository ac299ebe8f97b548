"""OpenAI's newer interface: a body of /v1/responses becomes a request of a chat, and its answer that interface's events. Knows no
server."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.server.openai_outputs import InParts, Part, event
from specdec.server.openai_requests import COMMON, Asked, Model, chat_asked
from specdec.server.tool_parsers.incremental import Call, Thought
from specdec.server.validation import (
    NOT_DONE,
    NOTHING,
    Fields,
    Refused,
    a_list,
    an_object,
    between,
    false,
    objects,
    words,
    yes_or_no,
)
from specdec.validation import one_of, short, text

# of a chat's
MORE = ("parallel_tool_calls", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata")
OF_NO_EFFECT = ("stream_options", "client_metadata", "include", "max_tool_calls")  # which are taken
KEPT = ("previous_response_id", "conversation", "prompt")  # what a server would have to remember
# tools of which the model is not told: what a server does by itself, and ways to call that no template here knows
UNTOLD = ("web_search", "web_search_preview", "image_generation", "code_interpreter", "file_search", "local_shell", "namespace",
          "custom")  # fmt: skip
SHOWN = ("metadata", "tools", "tool_choice", "text", "max_output_tokens", "reasoning")  # of a request, that a response repeats
LOGPROBS = "message.output_text.logprobs"
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def response_asked(body: Mapping[str, Any], model: Model) -> Asked:
    """A body of /v1/responses. Raises Refused."""
    fields = Fields(body)
    for name in KEPT:
        if name in body and body[name] is not None:
            raise Refused(f"{name} is not done here, where nothing is remembered; send the whole conversation", name, NOT_DONE)
    if isinstance(included := body.get("include"), list) and LOGPROBS in included:
        raise Refused(f"{LOGPROBS} is not done here; /v1/chat/completions has logprobs", "include", NOT_DONE)
    chat: dict[str, Any] = {name: fields.take(name, lambda _, value: value, None) for name in (*COMMON, *MORE)}
    messages = fields.take("input", _messages, list[dict[str, Any]]())
    if instructions := fields.take("instructions", text, ""):
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = _with_one_system(messages) or None
    chat["tools"] = fields.take("tools", _tools, list[dict[str, Any]]()) or None
    chat["tool_choice"] = fields.take("tool_choice", _tool_choice, None)
    chat["max_tokens"] = fields.take("max_output_tokens", between(1), None)
    chat |= fields.take("text", _form, NOTHING)
    chat |= fields.take("reasoning", _effort, NOTHING)
    fields.take("store", yes_or_no, False)
    fields.take("background", false, False)
    fields.take("truncation", lambda name, value: one_of(name, value, ["disabled", "auto"]), "disabled")
    for name in OF_NO_EFFECT:
        fields.take(name, lambda _, value: value, None)
    fields.end({"top_logprobs": (0,)})
    shown = {name: body[name] for name in SHOWN if body.get(name) is not None} | {"instructions": instructions or None}
    return replace(chat_asked(chat, model), form=partial(Told, shown=shown))


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What stands before all else in one message, since many templates take one."""
    n = next((i for i, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    said = "\n\n".join(each["content"] for each in messages[:n])
    return [*([{"role": "system", "content": said}] if said else []), *messages[n:]]


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    """As a chat has them: thoughts, words and calls that follow each other are one answer."""
    if isinstance(value, str):
        return [{"role": "user", "content": text(name, value)}]
    messages = list[dict[str, Any]]()
    for told, each in objects(name, a_list(name, value)):
        kind = each.get("type") or "message"
        match kind:
            case "message":
                role = one_of(f"role of {told}", each.get("role"), ["user", "assistant", "system", "developer"])
                said = words(f"content of {told}", each.get("content"), TEXTS)
                if role == "assistant":
                    message = _answer(messages)
                    message["content"] += said
                else:
                    messages.append({"role": role, "content": said})
            case "function_call":
                function = {"name": each.get("name"), "arguments": each.get("arguments")}
                _answer(messages).setdefault("tool_calls", []).append({"id": each.get("call_id"), "function": function})
            case "function_call_output":
                said = words(f"output of {told}", each.get("output"), TEXTS)
                messages.append({"role": "tool", "tool_call_id": each.get("call_id"), "content": said})
            case "reasoning":
                thought = words(f"content of {told}", each.get("content") or each.get("summary") or "", TEXTS)
                if thought:
                    answer = _answer(messages)
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
            case _:
                raise Refused(f"{told} is of the type {short(kind, repr)}, which is not done here", name, NOT_DONE)
    return messages


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that goes on, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Functions; others that may stand there the model is not told of."""
    tools = list[dict[str, Any]]()
    for told, tool in objects(name, value):
        kind = tool.get("type")
        if kind in UNTOLD:
            continue
        if kind != "function":
            raise Refused(f"{told} is of the type {short(kind, repr)}; expected function", name, NOT_DONE)
        function = {key: tool.get(key) for key in ("name", "description", "parameters", "strict")}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(name: str, value: Any) -> Any:
    if isinstance(value, dict) and "name" in value:
        return {"type": value.get("type"), "function": {"name": value["name"]}}
    return value


def _form(name: str, value: Any) -> dict[str, Any]:
    """The shape of an answer."""
    fields = Fields(an_object(name, value))
    fields.take("verbosity", text, "")
    form = fields.take("format", an_object, NOTHING)
    fields.end({})
    if form.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
    return {"response_format": form} if form else {}


def _effort(name: str, value: Any) -> dict[str, Any]:
    fields = Fields(an_object(name, value))
    for each in ("summary", "generate_summary"):
        fields.take(each, text, "")
    effort = fields.take("effort", text, "")
    fields.end({})
    return {"reasoning_effort": effort} if effort else {}


class Told(InParts):
    """That interface's events, and its whole. shown: what a response repeats of the request."""

    def __init__(self, asked: Asked, model: Model, fingerprint: str, shown: Mapping[str, Any]) -> None:
        super().__init__(asked, model, fingerprint)
        self._shown, self._n, self._id = shown, 0, f"resp_{secrets.token_hex(12)}"

    def begins(self) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def ends(self) -> bytes:
        stops, response = self._stops(), self._told()
        return stops + self._event(f"response.{response['status']}", response=response)

    def fails(self, error: Refused) -> bytes:
        told = {"error": {"code": error.code or "server_error", "message": str(error)}}
        return self._event("response.failed", response=self._response("failed", self._items()) | told)

    def _told(self) -> dict[str, Any]:
        return self._response("incomplete" if self._finish == "length" else "completed", self._items())

    def _part(self, what: str, part: Part, grown: str) -> bytes:
        at = {"item_id": _id_of(part), "output_index": part.index}
        inside = at | {"content_index": 0}
        is_call, kind = part.kind is Call, "output_text" if part.kind is str else "reasoning_text"
        told = "response.function_call_arguments" if is_call else f"response.{kind}"
        more: dict[str, Any] = {"logprobs": []} if part.kind is str else {}
        if what == "begins":
            begun = self._event("response.output_item.added", output_index=part.index, item=_item(part, "in_progress"))
            return begun if is_call else begun + self._event("response.content_part.added", **inside, part=_content(part, ""))
        if what == "grows":
            return self._event(f"{told}.delta", **(at if is_call else inside), delta=grown, **more)
        if is_call:
            done = self._event(f"{told}.done", **at, name=part.name, arguments=part.text)
        else:
            done = self._event(f"{told}.done", **inside, text=part.text, **more)
            done += self._event("response.content_part.done", **inside, part=_content(part, part.text))
        return done + self._event("response.output_item.done", output_index=part.index, item=self._item(part))

    def _items(self) -> list[dict[str, Any]]:
        return [self._item(part) for part in self._parts]

    def _item(self, part: Part) -> dict[str, Any]:
        """One that has ended, or that the length has cut."""
        return _item(part, "incomplete" if self._finish == "length" and part is self._parts[-1] else "completed")

    def _event(self, kind: str, **more: Any) -> bytes:
        self._n += 1
        return event({"type": kind, "sequence_number": self._n - 1, **more}, kind)

    def _response(self, status: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sampling = self.asked.jobs[0].sampling
        usage = {
            "input_tokens": self.n_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.n_text,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.n_prompt + self.n_text,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model.name,
            "output": [*items],
            "parallel_tool_calls": not self.asked.one_call,
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
            **self._shown,
        }


def _id_of(part: Part) -> str:
    return f"{'fc' if part.kind is Call else 'rs' if part.kind is Thought else 'msg'}_{part.id}"


def _content(part: Part, said: str) -> dict[str, Any]:
    if part.kind is str:
        return {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": said}


def _item(part: Part, status: str) -> dict[str, Any]:
    """A part as an item of a response."""
    if part.kind is Call:
        named = {"call_id": part.id, "name": part.name, "arguments": part.text}
        return {"id": _id_of(part), "type": "function_call", "status": status, **named}
    content = [_content(part, part.text)] if part.text else []
    if part.kind is str:
        return {"id": _id_of(part), "type": "message", "status": status, "role": "assistant", "content": content}
    return {"id": _id_of(part), "type": "reasoning", "status": status, "summary": [], "content": content}
