"""OpenAI's chats and completions: validated requests, where unsupported features are rejected by name, and responses."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specdec.argument_checks import JSONDict, JSONObject, check_choice, check_string, shorten
from specdec.engine.request import GenerationRequest
from specdec.server.field_validation import (
    MESSAGE_LIST,
    TOO_LONG,
    APIError,
    Fields,
    check_bool,
    check_list,
    check_object,
    iter_objects,
    join_text_parts,
    log_once,
    parse_body,
    parse_texts,
)
from specdec.server.generation_fields import MAX_CHOICES, GenerationFields, ResponseOptions, ServedModel, wrap_encoding_errors
from specdec.server.infill import encode_prompt, end_infills
from specdec.server.reasoning_fields import ReasoningFields
from specdec.server.response_formatter import FINGERPRINT, SSE_DONE, ChoiceDelta, ResponseFormatter, format_sse_event
from specdec.server.tool_parsers import find_tool_parser
from specdec.server.tool_parsers.base import Delta, ToolParser
from specdec.server.tool_parsers.generic import GenericParser, describe_tools
from specdec.text.chat_template import ChatTemplate, Options, PromptTooLongError, TemplateError
from specdec.text.reasoning import make_thinking_options
from specdec.text.structured_output import ANY_OBJECT_SCHEMA, Grammar, is_installed, make_schema_grammar, serialize_schema

MAX_TOOLS = 512
MAX_TOP_LOGPROBS = 20  # per token
DEFAULT_COMPLETION_TOKENS = 16  # max_tokens of a completion, as in OpenAI's API
TOOL_NAME_PATTERN = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
THINKING_OPTION = "enable_thinking"
EFFORT_OPTIONS = ("reasoning_effort", "reasoning_strength")  # the second of Muse Glimmer
OPTION_PATTERN = re.compile(r"[a-zA-Z_][\w-]{0,63}", re.ASCII)  # name of a template option, or a reasoning effort
MAX_OPTION_CHARS = 64 << 10  # of all template options as JSON
RESERVED_OPTIONS = {"messages", "tools", "xml_tools", "add_generation_prompt"}  # set by the server
MIN_LOGPROB = -9999.0  # replaces -infinity, which JSON does not have; OpenAI's number
ParsedRequest = tuple[list[GenerationRequest], ResponseOptions]  # one request per output


def parse_chat_request(body: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse a body of OpenAI's /v1/chat/completions into requests to the engine, and render the chat as a prompt of tokens.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    fields.take_string("model")
    if not model.template:
        raise APIError("this model has no chat template; use /v1/completions", "messages", "unsupported_model")
    tools = fields.take("tools", _parse_tools, list[JSONDict]())
    strict_names = {tool["function"]["name"] for tool in tools if tool.pop("strict")}
    choice, callable_tools = fields.take("tool_choice", partial(_parse_tool_choice, tools=tools), ("auto", tools))
    is_single_call = not fields.take_bool("parallel_tool_calls", True)
    template = model.template.for_tools if tools and choice != "none" else model.template
    tool_parser = _choose_tool_parser(template) if tools else find_tool_parser(template.source)
    messages = fields.take_required("messages", _parse_messages, MESSAGE_LIST)
    has_logprobs = fields.take_bool("logprobs")
    n_top_logprobs = fields.take_int("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if n_top_logprobs and not has_logprobs:
        raise APIError("top_logprobs needs logprobs to be true", "top_logprobs")
    response_schema = fields.take("response_format", _parse_response_format, None)
    offered_tools = tools if choice != "none" else []
    functions = [tool["function"] | {"strict": tool["function"]["name"] in strict_names} for tool in callable_tools]
    with wrap_encoding_errors(model, "tools" if offered_tools else "response_format"):
        if offered_tools and tool_parser:
            grammar = _make_tool_grammar(model, tool_parser, functions, choice == "required", is_single_call, response_schema)
        else:
            grammar = None if response_schema is None else make_schema_grammar(model.decoder.tokenizer, response_schema)
    max_completion_tokens = fields.take_limit("max_completion_tokens")
    max_tokens = fields.take_limit("max_tokens")
    reasoning = ReasoningFields(fields, model, template)
    template_options = _parse_template_options(fields, template, reasoning.is_enabled)
    shared = GenerationFields(fields, model)
    with wrap_encoding_errors(model, "messages"):
        prompt = _encode_messages(model, template, messages, offered_tools, template_options)
    if tool_parser and not (offered_tools or tool_parser.is_always_parsed):
        tool_parser = None
    visible_tokens = tool_parser.get_visible_tokens(model.decoder.tokenizer.specials) if tool_parser else {}
    requests = shared.make_requests(
        "messages", [prompt], max_completion_tokens or max_tokens, n_top_logprobs if has_logprobs else None, visible_tokens
    )
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in offered_tools}
    options = ResponseOptions(shared, True, is_single_call, tool_parser, schemas, grammar)
    return reasoning.apply(requests, options, response_schema is not None or choice == "required")


def _choose_tool_parser(template: ChatTemplate) -> type[ToolParser]:
    """Return the parser of a model's tool calls: the generic one if its template takes no tools, or their format is unknown."""
    return (find_tool_parser(template.source) if template.supports_tools else None) or GenericParser


def _make_tool_grammar(
    model: ServedModel,
    tool_parser: type[ToolParser],
    functions: list[JSONDict],
    is_required: bool,
    is_single_call: bool,
    response_schema: JSONObject | None,
) -> Grammar | None:
    """Return a grammar that makes the tool calls valid; None if no field needs it and llguidance is not installed."""
    is_needed = is_required or response_schema is not None or any(function["strict"] for function in functions)
    if not (is_needed or is_installed()):
        return None
    return tool_parser.make_grammar(model.decoder.tokenizer, functions, is_required, is_single_call, response_schema)


def _encode_messages(
    model: ServedModel, template: ChatTemplate, messages: list[JSONDict], tools: list[JSONDict], options: Options
) -> list[int]:
    """Return the token ids of a chat; if the template rejects the messages, simplify them and try again.

    Leading system messages are joined. If the template cannot describe the tools, the system message does.

    Raises:
        PromptTooLongError: The prompt is longer than the context.
        TemplateError: The template rejects all forms of the messages; the error is the one for the first form.
    """
    messages = _join_system_messages(messages)
    if _choose_tool_parser(template) is GenericParser:
        if tools:
            problem = "has an unknown format of tool calls" if template.supports_tools else "takes no tools"
            log_once(f"the chat template of {model.name} {problem}; the system message describes the tools")
        messages, tools = describe_tools(messages, tools), []
    candidates, errors = [messages], list[TemplateError]()
    for n_kept in (1, 0):  # the first message may be the system's, except in templates without this role
        if (simple := _simplify_messages(messages, n_kept)) not in candidates:
            candidates.append(simple)
    for candidate in candidates:
        try:
            return model.decoder.encode_chat(candidate, tools or None, options)
        except PromptTooLongError:
            raise
        except TemplateError as error:
            errors.append(error)
    raise errors[0]


def _join_system_messages(messages: list[JSONDict]) -> list[JSONDict]:
    """Return the messages with the leading system messages joined into one, since many templates support only one."""
    n = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    system = "\n\n".join(each["content"] for each in messages[:n] if each["content"])
    return [{"role": "system", "content": system}, *messages[n:]] if n > 1 else messages


def _simplify_messages(messages: list[JSONDict], n_kept: int) -> list[JSONDict]:
    """Return the messages in a form that more templates accept.

    System messages after the first `n_kept` messages become the user's, adjacent messages of the user are joined, and arguments
    of tool calls that are no JSON object are wrapped in one.
    """
    simple = messages[:n_kept]
    for message in messages[n_kept:]:
        if message["role"] == "system":
            message = {"role": "user", "content": message["content"]}
        if simple and message["role"] == simple[-1]["role"] == "user":
            simple[-1] = {"role": "user", "content": f"{simple[-1]['content']}\n\n{message['content']}"}
        else:
            simple.append(message)
    for i, message in enumerate(simple):
        if "tool_calls" in message:
            simple[i] = message | {"tool_calls": [*map(_simplify_call, message["tool_calls"])]}
    return simple


def _simplify_call(call: JSONDict) -> JSONDict:
    function = call["function"]
    is_broken = isinstance(function["arguments"], str)
    return call | {"function": function | {"arguments": {"arguments": function["arguments"]}}} if is_broken else call


def parse_completion_request(body: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse a body of OpenAI's /v1/completions into requests to the engine, with its prompts as tokens.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    fields.take_string("model")
    prompts = fields.take("prompt", partial(parse_texts, maximum=MAX_CHOICES), list[str | list[int]]([""]))
    n_top_logprobs = fields.take_int("logprobs", None, 0, MAX_TOP_LOGPROBS)
    response_schema = fields.take("response_format", _parse_response_format, None)
    with wrap_encoding_errors(model, "response_format"):
        grammar = None if response_schema is None else make_schema_grammar(model.decoder.tokenizer, response_schema)
    max_tokens = fields.take_limit("max_tokens", DEFAULT_COMPLETION_TOKENS)
    suffix = fields.take_string("suffix")
    shared = GenerationFields(fields, model)
    for prompt in (*prompts, suffix):
        limit, unit = (model.max_chars, "characters") if isinstance(prompt, str) else (model.decoder.n_positions, "tokens")
        if len(prompt) > limit:
            raise APIError(f"prompt has {len(prompt)} {unit}; the context holds at most {limit}", "prompt", TOO_LONG)
    with wrap_encoding_errors(model, "prompt"):
        encoded = [_encode_prompt(model, prompt, suffix) for prompt in prompts]
    requests = shared.make_requests("prompt", encoded, max_tokens, n_top_logprobs)
    if suffix:
        requests = end_infills(requests, model.decoder.tokenizer)
    return requests, ResponseOptions(shared, grammar=grammar)


def _encode_prompt(model: ServedModel, prompt: str | list[int], suffix: str) -> list[int]:
    if isinstance(prompt, str):
        return encode_prompt(model.decoder.tokenizer, prompt, suffix)
    if suffix:
        raise APIError("suffix needs a prompt that is a text", "suffix")
    return prompt


def _parse_template_options(fields: Fields, template: ChatTemplate, is_thinking: bool | None) -> Options:
    """Return the options for the chat template from the fields `chat_template_kwargs` and `reasoning_effort`.

    A template that takes one of `EFFORT_OPTIONS` gets the effort. It also switches thinking off if it is "none" and otherwise on,
    unless the template takes the effort alone. Values in `chat_template_kwargs` have priority, then `is_thinking`.

    Raises:
        APIError: A field is invalid.
    """
    options = fields.take("chat_template_kwargs", _check_template_options, JSONDict())
    effort = fields.take("reasoning_effort", _check_word, "")
    efforts = {name: effort for name in EFFORT_OPTIONS if effort and template.takes_variable(name)}
    if is_thinking is not None:
        options = {THINKING_OPTION: is_thinking, **options}
    if effort and (not efforts or template.takes_variable(THINKING_OPTION)):
        options = {THINKING_OPTION: effort != "none", **options}
    options = {**efforts, **options}
    if THINKING_OPTION in options:
        options = make_thinking_options(template, options[THINKING_OPTION]) | options
    return options


def _check_template_options(name: str, value: Any) -> JSONDict:
    """Return a copy of template options, whose values may have any JSON type.

    Raises:
        TypeError: The value is not an object.
        ValueError: A name is reserved or not a word, or the options have too much text.
    """
    for key in check_object(name, value):
        if not OPTION_PATTERN.fullmatch(key) or key in RESERVED_OPTIONS:
            raise ValueError(
                f"{name} has the key {shorten(key, repr)}, which is not a template option; expected for example {THINKING_OPTION}"
            )
    if len(text := json.dumps(value, ensure_ascii=False)) > MAX_OPTION_CHARS:
        raise ValueError(f"{name} has {len(text)} characters; at most {MAX_OPTION_CHARS} are allowed")
    return dict(value)


def _check_word(name: str, value: object) -> str:
    """Return the value of a field if it is a word that cannot be the name of a special token; raises ValueError otherwise."""
    if not isinstance(value, str) or not OPTION_PATTERN.fullmatch(value):
        raise ValueError(f"{name} is {shorten(value, repr)}; expected a word of letters, digits, _ and -")
    return value


def _parse_tool_choice(name: str, value: Any, tools: list[JSONDict]) -> tuple[str, list[JSONDict]]:
    """Return the kind of choice ("auto", "none" or "required"), and its tools: the one that the field names, else all.

    Raises:
        ValueError: The field is invalid, or requires a call without such a tool; TypeError likewise.
    """
    if isinstance(value, dict):
        check_choice(f"type of {name}", value.get("type"), ["function"])
        function_name = check_object(f"function of {name}", value.get("function")).get("name")
        if not (matching := [tool for tool in tools if tool["function"]["name"] == function_name]):
            raise ValueError(f"{name} names {shorten(function_name, repr)}, which is not one of the tools")
        return "required", matching[:1]
    choice = check_choice(name, value, ["auto", "none", "required"])
    if choice == "required" and not tools:
        raise ValueError(f"{name} is required, but there are no tools")
    return choice, tools


def _parse_tools(name: str, value: object) -> list[JSONDict]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a list of at most {MAX_TOOLS}")
    return [_parse_tool(f"{name}[{i}]", each) for i, each in enumerate(value)]


def _parse_tool(name: str, value: Any) -> JSONDict:
    """Return a validated tool in the form that chat templates expect, and with the key `strict`."""
    check_choice(f"type of {name}", check_object(name, value).get("type"), ["function"])
    function = check_object(f"function of {name}", value.get("function"))
    if not TOOL_NAME_PATTERN.fullmatch(check_string(f"name of {name}", function.get("name"))):
        raise ValueError(f"name of {name} is {shorten(function['name'], repr)}; expected 1 to 128 letters, digits, _, . and -")
    check_string(f"description of {name}", function.get("description") or "")
    check_object(f"parameters of {name}", function.get("parameters") or {})
    is_strict = check_bool(f"strict of {name}", function.get("strict") or False)
    known_keys = ("name", "description", "parameters")
    known = {key: function[key] for key in known_keys if function.get(key) is not None}
    return {"type": "function", "function": known, "strict": is_strict}


def _parse_messages(name: str, value: object) -> list[JSONDict]:
    parser = MessageParser()
    return [parser.parse(label, each) for label, each in iter_objects(name, check_list(name, value))]


class MessageParser:
    """A parser of the messages of one conversation, which connects the results of tools with their calls.

    Calls without an id get one. Results without an id belong to the calls of the last message with calls, in their order.
    """

    def __init__(self) -> None:
        """Start before the first message."""
        self._tool_names = dict[str, str]()  # of all calls so far, by id
        self._unanswered = list[str]()  # ids of the last calls that have no result yet

    def parse(self, name: str, value: JSONDict) -> JSONDict:
        """Return a validated chat message in the form that chat templates expect.

        Raises:
            APIError: A field is not supported; ValueError and TypeError if it is not valid.
        """
        fields = Fields(value)
        roles = ["system", "developer", "user", "assistant", "tool", "function"]
        role = check_choice(f"role of {name}", fields.pop("role"), roles)
        if role in ("developer", "function"):  # older and newer names
            role = "system" if role == "developer" else "tool"
        content = fields.pop("content")
        if role in ("assistant", "tool") and content is None:
            content = ""
        text = join_text_parts(f"content of {name}", content, kind="tool output part" if role == "tool" else "")
        message: JSONDict = {"role": role, "content": text}
        thoughts = [fields.pop("reasoning_content"), fields.pop("reasoning")]
        calls, function_call = fields.pop("tool_calls"), fields.pop("function_call")
        call_id, tool_name = fields.pop("tool_call_id"), fields.pop("name")
        fields.reject_remaining("message key", name)
        if role == "assistant":
            if reasoning := thoughts[0] or thoughts[1]:
                message["reasoning_content"] = check_string(f"reasoning_content of {name}", reasoning)
            if calls := calls or ([{"function": function_call}] if function_call else None):
                labeled = enumerate(check_list("tool_calls", calls))
                message["tool_calls"] = [self._parse_call(f"{name}.tool_calls[{i}]", each) for i, each in labeled]
                self._unanswered = [call["id"] for call in message["tool_calls"]]
        if role == "tool":
            call_id = check_string(f"tool_call_id of {name}", call_id or next(iter(self._unanswered), ""))
            self._unanswered = [each for each in self._unanswered if each != call_id]
            tool_name = self._tool_names.get(call_id) or check_string(f"name of {name}", tool_name or "")
            message |= {"tool_call_id": call_id, "name": tool_name}
        return message

    def _parse_call(self, name: str, value: Any) -> JSONDict:
        """Return a validated tool call of a message with its arguments as a dict, as chat templates expect it.

        Arguments that are not a JSON object, such as those of a call that was cut off, stay a string.
        """
        check_choice(f"type of {name}", check_object(name, value).get("type") or "function", ["function"])
        function = check_object(f"function of {name}", value.get("function"))
        arguments: Any = function.get("arguments") or {}
        if not isinstance(arguments, dict):
            check_string(f"arguments of {name}", arguments)
            with suppress(APIError):
                arguments = parse_body(arguments.encode())
        # nine letters and digits, the only form that Mistral's templates accept
        call_id = check_string(f"id of {name}", value.get("id") or f"call{len(self._tool_names):05d}")
        self._tool_names[call_id] = check_string(f"name of {name}", function.get("name"))
        return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parse_response_format(name: str, value: Any) -> JSONObject | None:
    """Return the JSON schema that a `response_format` requires of the output; None for text.

    Raises:
        ValueError: The schema or the type is invalid.
        TypeError: An object is missing.
    """
    format_type = check_choice(f"type of {name}", check_object(name, value).get("type"), ["text", "json_object", "json_schema"])
    if format_type == "text":
        return None
    schema = value.get("schema")  # where the other interfaces and llama.cpp take it
    if format_type == "json_object":
        schema = schema or ANY_OBJECT_SCHEMA
    elif value.get("json_schema") is not None:
        schema = check_object(f"json_schema of {name}", value["json_schema"]).get("schema")
    checked = check_object(f"schema of {name}", schema)
    serialize_schema(checked)
    return checked


@dataclass
class CompletionFormatter(ResponseFormatter):
    """A formatter of responses in the format of OpenAI's chat and completion APIs, as chunks or as a whole."""

    _n_calls: Counter[int] = field(default_factory=Counter, init=False)  # by choice
    _offsets: Counter[int] = field(default_factory=Counter, init=False)  # of the text, by choice

    def format_start(self) -> bytes:
        """Return a chunk with the assistant's role for each choice of a chat; empty for a completion."""
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        indices = range(len(self.choices) * self.options.is_chat)
        return b"".join(format_sse_event(self._make_chunk([{"index": i, **first}], None)) for i in indices)

    def format_delta(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the chunk, as a server-sent event, for a delta of the choice with the given index."""
        return format_sse_event(self._make_chunk([self._format_choice(index, delta, False)], delta.details))

    def format_end(self) -> bytes:
        """Return the last chunk with the token counts, if the request asks for them, and the end mark of the stream."""
        return (format_sse_event(self._make_chunk([], None, self.usage)) if self.options.shared.include_usage else b"") + SSE_DONE

    def format_response(self, deltas: Sequence[ChoiceDelta]) -> JSONDict:
        """Return the complete response as a JSON object, from the merged deltas of each choice."""
        choices = [self._format_choice(index, delta, True) for index, delta in enumerate(deltas)]
        details = next((delta.details for delta in deltas if delta.details), None)
        return self._make_chunk(choices, details, self.usage, "")

    def _format_choice(self, index: int, delta: ChoiceDelta, is_complete: bool) -> JSONDict:
        """Return a choice as a JSON object, from a part of its output for a chunk or from all of it (`is_complete`).

        The names of fields are those that most clients know.
        """
        finish = {"logprobs": self._format_logprobs(index, delta), "finish_reason": delta.finish_reason}
        if not self.options.is_chat:
            return {"index": index, "text": delta.get_text("text"), **finish}
        message: JSONDict = {"role": "assistant", "content": "", "refusal": None} if is_complete else {}
        reasoning = delta.get_text("reasoning")  # which clients know by either name
        texts = {"reasoning_content": reasoning, "reasoning": reasoning, "content": delta.get_text("text")}
        message |= {name: text for name, text in texts.items() if text}
        if calls := [self._format_call(index, piece, is_complete) for piece in delta.deltas if piece.kind == "tool_call"]:
            message |= ({"content": texts["content"] or None} if is_complete else {}) | {"tool_calls": calls}
        return {"index": index, "message" if is_complete else "delta": message, **finish}

    def _format_call(self, index: int, call: Delta, is_complete: bool) -> JSONDict:
        self._n_calls[index] += call.name is not None
        position = {} if is_complete else {"index": self._n_calls[index] - 1}
        if call.name is None:
            return position | {"function": {"arguments": call.text}}
        call_id = self._make_id(index, self._n_calls[index])
        return position | {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}

    @property
    def usage(self) -> JSONDict:
        """Token counts of the prompts and of all choices, as OpenAI's `usage` object."""
        parts = [choice.statistics for choice in self.choices]
        accepted, drafted = sum(part.n_accepted for part in parts), sum(part.n_drafted for part in parts)
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
                "reasoning_tokens": self.n_reasoning_tokens,
            },
        }

    def _make_chunk(
        self, choices: list[JSONDict], details: JSONDict | None, usage: object = None, object_suffix: str = ".chunk"
    ) -> JSONDict:
        """Return a JSON object with the given choices: a chunk, or the complete response if `object_suffix` is empty."""
        chunk = {
            "id": f"{'chatcmpl' if self.options.is_chat else 'cmpl'}-{self.random_id}",
            "object": f"chat.completion{object_suffix}" if self.options.is_chat else "text_completion",
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }
        chunk |= {"usage": usage} if usage or self.options.shared.include_usage else {}
        return chunk | ({"specdec": details} if details else {})

    def _format_logprobs(self, index: int, delta: ChoiceDelta) -> JSONDict | None:
        """Return the log-probabilities of a delta in the format of chats or of completions; None if it has none.

        For a completion, also advances the text offset of the choice.
        """
        if not delta.logprobs:
            return None
        if self.options.is_chat:
            tokens = [self._format_logprob(entry.token, entry.logprob) for entry in delta.logprobs]
            tops = [[self._format_logprob(*top) for top in entry.top] for entry in delta.logprobs]
            content = [token | {"top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]
            return {"content": content, "refusal": None}
        texts = [self._get_token_text(entry.token)[0] for entry in delta.logprobs]
        *offsets, end = itertools.accumulate(map(len, texts), initial=self._offsets[index])
        self._offsets[index] = end
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in delta.logprobs],
            "top_logprobs": [
                {self._get_token_text(token)[0]: max(logprob, MIN_LOGPROB) for token, logprob in entry.top}
                for entry in delta.logprobs
            ],
            "text_offset": offsets,
        }

    def _format_logprob(self, token: int, logprob: float) -> JSONDict:
        text, token_bytes = self._get_token_text(token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": token_bytes}

    def _get_token_text(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and its bytes; for a token without text, its name in the vocabulary and None."""
        tokenizer = self.model.decoder.tokenizer
        token_bytes = tokenizer.token_to_bytes(token)
        if token_bytes is not None:
            return token_bytes.decode(errors="replace"), list(token_bytes)
        return next((name for name, special_id in tokenizer.specials.items() if special_id == token), f"<{token}>"), None
