"""OpenAI's chat and completion requests, parsed and validated; unsupported features are rejected by name. Knows no server."""

import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdec.argument_checks import check_choice, check_float, check_string, check_strings, shorten
from specdec.engine.request import GenerationRequest
from specdec.sampling import Sampling
from specdec.server.field_validation import (
    INVALID,
    TOO_LONG,
    UNSUPPORTED,
    APIError,
    Fields,
    check_bool,
    check_false,
    check_list,
    check_object,
    iter_objects,
    join_text_parts,
    make_range_check,
    parse_body,
)
from specdec.server.tool_parsers.formats import ToolFormat, find_tool_format
from specdec.server.tool_parsers.grammar import make_tool_grammar
from specdec.server.tool_parsers.json_calls import ToolParser
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.text.chat_template import ChatTemplate, ChatTokenizer, Options, PromptTooLongError, TemplateError
from specdec.text.grammar_worker import WorkerLostError
from specdec.text.structured_output import ANY_OBJECT_SCHEMA, Grammar, is_installed, make_schema_grammar, serialize_schema
from specdec.tokenizer import RenderedSegment, TokenizerError

MAX_CHOICES = 16  # per request
MAX_STOPS, MAX_STOP_CHARS = 16, 1000
MAX_TOOLS = 512
MAX_TOP_LOGPROBS = 20  # per token
DEFAULT_COMPLETION_TOKENS = 16  # max_tokens of a completion, as in OpenAI's API
TOOL_NAME_PATTERN = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
N_SEEDS = 2**63
# fields with the same name and meaning in all APIs
COMMON_FIELDS = (
    "model", "temperature", "top_p", "top_k", "stream", "seed", "min_p", "repetition_penalty", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "chat_template_kwargs", "service_tier", "specdec",
)  # fmt: skip
# fields of `Sampling` by request field: the same names, and llama.cpp's
SAMPLING_FIELDS = {
    **{name: name for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
}
# accepted strings without effect
IGNORED_FIELDS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "verbosity")
RESPONSE_ONLY_FIELDS = {"refusal", "audio", "function_call", "annotations"}  # fields of responses that clients send back
THINKING_OPTION = "enable_thinking"  # the option of most templates that can switch thinking on and off
PATH_PATTERN = r"(?<![\w./\\-]){}(?:[/\\][^\s:;,'\"]*)?(?![\w-]|\.\w)"  # a path, or one of a file in it
OPTION_PATTERN = re.compile(r"[a-zA-Z_][\w-]{0,63}", re.ASCII)  # name of a template option, or its string value
RESERVED_OPTIONS = {"messages", "tools", "xml_tools", "documents", "add_generation_prompt"}  # set by the server


@dataclass(frozen=True)
class ServedModel:
    """A served model, with what is needed to parse the requests for it.

    Attributes:
        name: The name that clients use.
        decoder: The target and its draft models.
        template: The chat template; None for a model that cannot chat.
        default_sampling: Sampling settings for the fields that a request leaves out.
    """

    name: str
    decoder: SpeculativeDecoder
    template: ChatTemplate | None
    default_sampling: Sampling = Sampling()  # noqa: RUF009 (immutable)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed and validated generation request.

    Attributes:
        generation_requests: One per output.
        is_chat: Whether the request is a chat and not a completion.
        is_stream: Whether the response is streamed.
        include_usage: Whether a stream ends with the numbers of tokens.
        has_details: Whether each chunk reports which tokens were drafted.
        is_single_call: Whether at most one tool call is returned.
        make_tool_parser: Makes a parser for the tool calls of an output; None if they are not parsed.
        grammar: The grammar of all outputs, which is built later.
        make_formatter: Makes the formatter of the response from the request, the model and a fingerprint; None for OpenAI's.
    """

    generation_requests: list[GenerationRequest]
    is_chat: bool
    is_stream: bool = False
    include_usage: bool = False
    has_details: bool = False
    is_single_call: bool = False
    make_tool_parser: Callable[[], ToolParser] | None = None
    grammar: Grammar | None = None
    make_formatter: Callable[["ParsedRequest", ServedModel, str], Any] | None = None


def _parse_logit_bias(name: str, biases: Any, n_ids: int) -> dict[int, float]:
    """Convert the field `logit_bias` into a dict of biases by token id, which is a string of digits in JSON.

    Raises:
        ValueError: A key is not a token id below n_ids.
        TypeError: The value is not an object.
    """
    for key in check_object(name, biases):
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < n_ids):
            raise ValueError(f"{name} has the key {shorten(key, repr)}; expected token ids, from 0 to {n_ids - 1}")
    return {int(key): bias for key, bias in biases.items()}


def parse_chat_request(body: Mapping[str, Any], model: ServedModel) -> ParsedRequest:
    """Parse a body of OpenAI's /v1/chat/completions into a ParsedRequest, with the chat rendered as a prompt of tokens.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    fields.take("model", check_string, "")
    if not model.template:
        raise APIError("this model has no chat template; use /v1/completions", "messages", "unsupported_model")
    tool_format = find_tool_format(model.template.source)
    tools = fields.take("tools", _parse_tools, list[dict[str, Any]]())
    strict = {tool["function"]["name"] for tool in tools if tool.pop("strict")}
    choice, callable_tools = fields.take(
        "tool_choice", lambda name, value: _parse_tool_choice(name, value, tools), ("auto", tools)
    )
    is_single_call = not fields.take("parallel_tool_calls", check_bool, True)
    if tools and not model.template.supports_tools:
        raise APIError("the model's chat template does not support tools", "tools", UNSUPPORTED)
    if body.get("messages") is None:
        raise APIError("messages are missing; expected a list of objects with role and content", "messages", "missing_parameter")
    messages = fields.take("messages", _parse_messages, list[dict[str, Any]]())
    has_logprobs = fields.take("logprobs", check_bool, False)
    n_top_logprobs = fields.take("top_logprobs", make_range_check(0, MAX_TOP_LOGPROBS), 0)
    if n_top_logprobs and not has_logprobs:
        raise APIError("top_logprobs needs logprobs to be true", "top_logprobs")
    response_schema = fields.take("response_format", _parse_response_format, None)
    offered_tools = tools if choice != "none" else []
    with wrap_encoding_errors(model, "tools" if offered_tools else "response_format"):
        if offered_tools:
            functions = [tool["function"] | {"strict": tool["function"]["name"] in strict} for tool in callable_tools]
            required_by = "tool_choice" if choice == "required" else "tools" if strict else ""
            if not required_by and response_schema is not None:
                required_by = "response_format"
            grammar = _choose_tool_grammar(model, tool_format, functions, required_by, is_single_call, response_schema)
        else:
            grammar = None if response_schema is None else make_schema_grammar(model.decoder.tokenizer, response_schema)
    max_completion_tokens = fields.take("max_completion_tokens", make_range_check(1), None)
    max_tokens = fields.take("max_tokens", make_range_check(1), None)
    options = _parse_template_options(fields, model.template)
    active_format = tool_format if tool_format and (offered_tools or tool_format.is_always_parsed) else None
    visible_tokens = active_format.get_visible_tokens(getattr(model.decoder.tokenizer, "specials", {})) if active_format else {}
    make_request = _parse_common_fields(
        fields, model, "messages", max_completion_tokens or max_tokens, n_top_logprobs if has_logprobs else None, visible_tokens
    )
    with wrap_encoding_errors(model, "messages"):
        prompt = model.decoder.encode_chat(messages, offered_tools or None, options)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in offered_tools}
    make_tool_parser = partial(active_format.make_parser, schemas, visible_tokens) if active_format else None
    return replace(
        make_request([prompt]), is_chat=True, is_single_call=is_single_call, make_tool_parser=make_tool_parser, grammar=grammar
    )


def _choose_tool_grammar(
    model: ServedModel,
    tool_format: ToolFormat | None,
    functions: list[dict[str, Any]],
    required_by: str,
    is_single_call: bool,
    response_schema: Mapping[str, Any] | None,
) -> Grammar | None:
    """Return a grammar that makes the tool calls valid; None if their format is unknown or llguidance is not installed.

    `required_by` is the request field that needs the grammar in any case, or "".

    Raises:
        APIError: A field needs the grammar, but the format is unknown.
    """
    if tool_format and (required_by or is_installed()):
        return make_tool_grammar(
            model.decoder.tokenizer, tool_format, functions, required_by == "tool_choice", is_single_call, response_schema
        )
    if required_by:
        raise APIError("the tool-call format of the model's chat template is not supported", required_by, UNSUPPORTED)
    return None


def parse_completion_request(body: Mapping[str, Any], model: ServedModel) -> ParsedRequest:
    """Parse a body of OpenAI's /v1/completions into a ParsedRequest, with its prompts as tokens.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    fields.take("model", check_string, "")
    prompts = fields.take("prompt", _parse_prompts, list[str | list[int]]([""]))
    n_top_logprobs = fields.take("logprobs", make_range_check(0, MAX_TOP_LOGPROBS), None)
    response_schema = fields.take("response_format", _parse_response_format, None)
    with wrap_encoding_errors(model, "response_format"):
        grammar = None if response_schema is None else make_schema_grammar(model.decoder.tokenizer, response_schema)
    make_request = _parse_common_fields(
        fields, model, "prompt", fields.take("max_tokens", make_range_check(1), DEFAULT_COMPLETION_TOKENS), n_top_logprobs
    )
    for prompt in prompts:
        limit, unit = (_get_max_chars(model), "characters") if isinstance(prompt, str) else (model.decoder.n_positions, "tokens")
        if len(prompt) > limit:
            raise APIError(f"prompt has {len(prompt)} {unit}; the context holds at most {limit}", "prompt", TOO_LONG)
    with wrap_encoding_errors(model, "prompt"):
        encode = model.decoder.tokenizer.encode
        encoded = [encode(prompt) if isinstance(prompt, str) else model.decoder.encode(prompt) for prompt in prompts]
    return replace(make_request(encoded), grammar=grammar)


def _parse_common_fields(
    fields: Fields,
    model: ServedModel,
    prompt_field: str,
    max_tokens: int | None,
    n_top_logprobs: int | None,
    visible_tokens: Mapping[int, str] | None = None,
) -> Callable[[list[list[int]]], ParsedRequest]:
    """Parse the remaining fields, which all requests share; return a function that makes the request from its prompts.

    Raises APIError for invalid and unknown fields.

    Args:
        fields: The fields of the body.
        model: The served model.
        prompt_field: Name of the field with the prompts, for errors.
        max_tokens: Maximum number of tokens of an output; None for as many as the context holds.
        n_top_logprobs: Number of most probable tokens to report per position; None for no log-probabilities.
        visible_tokens: Special tokens that the output shows, with their text.
    """
    sampling = _parse_sampling(fields, model.default_sampling, model.decoder.n_ids)
    stop_strings = fields.take("stop", _parse_stops, list[str]())
    n = fields.take("n", make_range_check(1, MAX_CHOICES), 1)
    is_stream = fields.take("stream", check_bool, False)
    options = Fields(fields.take("stream_options", check_object, {}))
    include_usage = options.take("include_usage", check_bool, False)
    options.take("include_obfuscation", check_false, False)
    options.reject_remaining()
    prediction = fields.take("prediction", _parse_prediction, "")
    has_details = fields.take("specdec", check_bool, False)
    fields.take("metadata", check_object, dict[str, Any]())
    for field in IGNORED_FIELDS:
        fields.take(field, check_string, "")
    fields.reject_remaining()

    def make_request(prompts: list[list[int]]) -> ParsedRequest:
        """Make the request from its prompts, token ids; raise APIError if it has too many outputs or a prompt is too long."""
        tokenizer, n_positions, prediction_tokens = model.decoder.tokenizer, model.decoder.n_positions, list[int]()
        if n * len(prompts) > MAX_CHOICES:
            raise APIError(f"the request needs {n * len(prompts)} outputs; at most {MAX_CHOICES} are allowed", "n")
        if (longest := max(map(len, prompts))) > n_positions:
            verb = "has" if prompt_field == "prompt" else "have"
            raise APIError(f"{prompt_field} {verb} {longest} tokens; the context holds {n_positions}", prompt_field, TOO_LONG)
        if prediction and isinstance(tokenizer, ChatTokenizer):
            with wrap_encoding_errors(model, "prediction"):
                segment = RenderedSegment(prediction[: _get_max_chars(model)], True)
                prediction_tokens = tokenizer.encode_rendered([segment])[:n_positions]
        samplings = [replace(sampling, seed=(sampling.seed + i) % N_SEEDS) for i in range(n)]
        base_request = GenerationRequest(
            [],
            0,
            sampling,
            stop_strings,
            n_top_logprobs,
            prediction_tokens,
            visible_tokens=visible_tokens or {},
            include_draft_text=has_details,
        )
        requests = [
            replace(
                base_request,
                prompt=prompt,
                max_tokens=min(max_tokens or n_positions, n_positions + 1 - len(prompt)),
                sampling=field,
            )
            for prompt in prompts
            for field in samplings
        ]
        return ParsedRequest(requests, False, is_stream, include_usage, has_details)

    return make_request


def _parse_sampling(fields: Fields, defaults: Sampling, n_ids: int) -> Sampling:
    """Return the sampling settings of a request; the model's defaults replace missing fields."""
    top_p = fields.take("top_p", lambda name, value: check_float(name, value, 1, "a number from 0 to 1"), defaults.top_p or 1.0)
    top_k = fields.take("top_k", make_range_check(0), defaults.top_k)
    temperature = fields.take(
        "temperature", lambda name, value: check_float(name, value, math.inf, "0 or more"), defaults.temperature
    )
    seed = fields.take("seed", make_range_check(-N_SEEDS, N_SEEDS - 1), secrets.randbits(31))
    # in OpenAI's API a top_p of 0 means the most probable token; in `Sampling` it means all tokens
    sampling = replace(defaults, temperature=temperature, top_k=top_k if top_p else 1, top_p=top_p, seed=seed % N_SEEDS)
    for name in SAMPLING_FIELDS:
        sampling = fields.take(name, partial(_replace_sampling_field, sampling, n_ids), sampling)
    return sampling


def _replace_sampling_field(sampling: Sampling, n_ids: int, name: str, value: Any) -> Sampling:
    """Return the sampling settings with one of them set to the value of a request field; `Sampling` checks the value."""
    changes: dict[str, Any] = {SAMPLING_FIELDS[name]: _parse_logit_bias(name, value, n_ids) if name == "logit_bias" else value}
    return replace(sampling, **changes)


def _get_max_chars(model: ServedModel) -> int:
    """Return the most characters that a text in the model's context can have, however it is tokenized."""
    tokenizer = model.decoder.tokenizer
    return model.decoder.n_positions * (tokenizer.max_token_length if isinstance(tokenizer, ChatTokenizer) else 1)


def _parse_template_options(fields: Fields, template: ChatTemplate) -> Options:
    """Return the options for the chat template from the fields `chat_template_kwargs` and `reasoning_effort`.

    A reasoning effort is an option of some templates; for others it switches thinking on or off.
    """
    options = fields.take("chat_template_kwargs", _check_template_options, dict[str, bool | int | str]())
    effort = fields.take("reasoning_effort", _check_word, "")
    if effort and template.has_reference_to("reasoning_effort"):
        return {"reasoning_effort": effort, **options}
    return {THINKING_OPTION: effort != "none", **options} if effort else options


def _check_template_options(name: str, value: Any) -> dict[str, bool | int | str]:
    for key, each in check_object(name, value).items():
        if not OPTION_PATTERN.fullmatch(key) or key in RESERVED_OPTIONS:
            raise ValueError(
                f"{name} has the key {shorten(key, repr)}, which is not a template option; expected for example {THINKING_OPTION}"
            )
        if not isinstance(each, bool | int):
            _check_word(f"{key} of {name}", each)
    return dict(value)


def _check_word(name: str, value: Any) -> str:
    """Return the value of a field if it is a word that cannot be the name of a special token; raises ValueError otherwise."""
    if not isinstance(value, str) or not OPTION_PATTERN.fullmatch(value):
        raise ValueError(f"{name} is {shorten(value, repr)}; expected a word of letters, digits, _ and -")
    return value


@contextmanager
def wrap_encoding_errors(model: ServedModel, param: str) -> Iterator[None]:
    """Turn errors of chat templates, tokenization and grammars inside the context into APIErrors for a request field.

    The paths of local files are removed from the messages.
    """
    try:
        yield
    except WorkerLostError as error:
        raise APIError(str(error), None, "overloaded", 503) from None
    except (TemplateError, TokenizerError, ValueError, TypeError, RecursionError) as error:
        message, path = str(error), model.decoder.tokenizer.path
        locations = {model.template.location if model.template else "", str(path), str(path.parent)}
        for location in sorted(locations - {""}, key=len, reverse=True):
            message = message.removeprefix(f"{location}: ")
            if len(Path(location).parts) > 1:  # a bare name may be any word, and reveals nothing
                message = re.sub(PATH_PATTERN.format(re.escape(location)), "the model's file", message)
        raise APIError(message, param, TOO_LONG if isinstance(error, PromptTooLongError) else INVALID) from None


def _parse_prompts(name: str, value: Any) -> list[str | list[int]]:
    """Return the prompts of a field that is a string, token ids, or a list of either: each as a string or token ids."""
    if isinstance(value, str):
        return [check_string(name, value)]
    if all(type(each) is int for each in check_list(name, value)):
        return [value]
    if len(value) > MAX_CHOICES:
        raise ValueError(f"{name} has {len(value)} items; at most {MAX_CHOICES} are allowed")
    return [each if isinstance(each, list) else check_string(name, each) for each in value]


def _parse_stops(name: str, value: Any) -> list[str]:
    stops = check_strings(name, value)
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"{name} has more than {MAX_STOPS} strings, or one of more than {MAX_STOP_CHARS} characters")
    return stops


def _parse_prediction(name: str, value: Any) -> str:
    check_choice(f"type of {name}", check_object(name, value).get("type"), ["content"])
    return join_text_parts(f"content of {name}", value.get("content"))


def _parse_tool_choice(name: str, value: Any, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the kind of choice ("auto", "none" or "required"), and the list of tools that may be called."""
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


def _parse_tools(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a list of at most {MAX_TOOLS}")
    return [_parse_tool(f"{name}[{i}]", each) for i, each in enumerate(value)]


def _parse_tool(name: str, value: Any) -> dict[str, Any]:
    """Return a validated tool in the form that chat templates expect, and with the key `strict`."""
    check_choice(f"type of {name}", check_object(name, value).get("type"), ["function"])
    function = check_object(f"function of {name}", value.get("function"))
    if not TOOL_NAME_PATTERN.fullmatch(check_string(f"name of {name}", function.get("name"))):
        raise ValueError(f"name of {name} is {shorten(function['name'], repr)}; expected 1 to 64 letters, digits, _, . and -")
    check_string(f"description of {name}", function.get("description") or "")
    check_object(f"parameters of {name}", function.get("parameters") or {})
    is_strict = check_bool(f"strict of {name}", function.get("strict") or False)
    known_keys = ("name", "description", "parameters")
    known = {key: function[key] for key in known_keys if function.get(key) is not None}
    return {"type": "function", "function": known, "strict": is_strict}


def _parse_messages(name: str, value: Any) -> list[dict[str, Any]]:
    tool_names = dict[str, str]()
    return [_parse_message(label, each, tool_names) for label, each in iter_objects(name, check_list(name, value))]


def _parse_message(name: str, value: dict[str, Any], tool_names: dict[str, str]) -> dict[str, Any]:
    """Return a validated chat message in the form that chat templates expect.

    `tool_names` has the names of the tools called so far, by the ids of the calls; the calls of this message are added.
    """
    known_keys = {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning",
        "reasoning_content",
        *RESPONSE_ONLY_FIELDS,
    }
    for key, each in value.items():
        if each and (key not in known_keys or key in RESPONSE_ONLY_FIELDS):
            raise APIError(f"{shorten(key)} of {name} is not supported; leave it out", "messages", UNSUPPORTED)
    role = check_choice(f"role of {name}", value.get("role"), ["system", "developer", "user", "assistant", "tool"])
    content, calls = value.get("content"), value.get("tool_calls")
    if role == "assistant" and content is None:
        content = ""
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": join_text_parts(f"content of {name}", content),
    }
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    if reasoning and role == "assistant":
        message["reasoning_content"] = check_string(f"reasoning_content of {name}", reasoning)
    if calls and role == "assistant":
        message["tool_calls"] = [
            _parse_call(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(check_list("tool_calls", calls))
        ]
        tool_names.update({call["id"]: call["function"]["name"] for call in message["tool_calls"]})
    if role == "tool":
        message["tool_call_id"] = check_string(f"tool_call_id of {name}", value.get("tool_call_id"))
        message["name"] = tool_names.get(message["tool_call_id"], "")
    return message


def _parse_call(name: str, value: Any) -> dict[str, Any]:
    """Return a validated tool call of a message with its arguments as a dict, not a string, as chat templates expect it."""
    check_choice(f"type of {name}", check_object(name, value).get("type", "function"), ["function"])
    function = check_object(f"function of {name}", value.get("function"))
    arguments: Any = check_string(f"arguments of {name}", function.get("arguments"))
    try:
        arguments = parse_body(arguments.encode()) if arguments else {}
    except APIError as error:
        raise ValueError(f"arguments of {name}: {error}") from None
    called_function = {"name": check_string(f"name of {name}", function.get("name")), "arguments": arguments}
    return {"id": check_string(f"id of {name}", value.get("id")), "type": "function", "function": called_function}


def _parse_response_format(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema that a `response_format` requires of the output; None for text.

    Raises:
        ValueError: The schema or the type is invalid.
        TypeError: An object is missing.
    """
    format_type = check_choice(f"type of {name}", check_object(name, value).get("type"), ["text", "json_object", "json_schema"])
    if format_type == "text":
        return None
    if format_type == "json_object":
        return ANY_OBJECT_SCHEMA
    schema = check_object(f"json_schema of {name}", value.get("json_schema")).get("schema")
    serialize_schema(check_object(f"schema of {name}", schema))
    return schema
