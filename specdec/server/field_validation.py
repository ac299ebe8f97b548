"""Validation of request bodies and their fields; unsupported features are rejected by name. Knows no models and no server."""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from specdec.argument_checks import JSONDict, JSONObject, check_choice, check_int, check_string, shorten
from specdec.server.json_values import parse_finite_float

MAX_BODY_DEPTH, MAX_BODY_CONTAINERS = 64, 50_000  # nested lists and objects of a body, and all of them
ANTHROPIC_PREFIX, OLLAMA_PREFIX = "/v1/messages", "/api/"  # of the paths of their APIs
MESSAGE_LIST = "a list of objects with role and content"  # what messages must be
INVALID, UNSUPPORTED, UNKNOWN, TOO_LONG = "invalid_value", "unsupported_parameter", "unknown_parameter", "context_length_exceeded"
# error types of OpenAI's and Anthropic's APIs by status, and the one for other server errors
OPENAI_ERROR_TYPES = {429: "rate_limit_error"}, "server_error"
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}, "api_error"  # fmt: skip
JSON_STRING_PATTERN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # also an unterminated one, in linear time
Value = TypeVar("Value")
Default = TypeVar("Default")
STORES_NOTHING = "is not supported, since the server stores nothing; send the whole conversation"
SKIP = "skip"
MAX_LOGGED = 100  # different things that were left out
# What happens to parts of a request that have no effect here, by kind and name. The names are fields of an interface, or types of
# tools, items and content parts; "*" stands for all others, which are rejected if it is missing.
# - a class: a field is accepted without effect if its value has this type (`object`: any type)
# - a tuple: a field is accepted if it has one of these values, which change nothing
# - SKIP: left out, which the log says once; also a field with any value
# - a message: rejected with this message
EXTRAS: Mapping[str, JSONObject] = {
    "chat field": {
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity"), str),
        "service_tier": str, "metadata": dict, "cache_prompt": (True, False), "modalities": (["text"],), "suffix": ("",),
        **dict.fromkeys(("min_tokens", "mirostat", "n_probs"), (0,)),
        **dict.fromkeys(("typical_p", "length_penalty", "best_of"), (1,)),
        **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
        **dict.fromkeys(("store", "echo", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
        **dict.fromkeys(("stop_token_ids", "bad_words"), ([],)),
        **dict.fromkeys(("functions", "function_call", "audio", "web_search_options"), ()),
    },
    "message key": {**dict.fromkeys(("refusal", "audio", "images", "prefix", "partial"), ("", [], False)), "*": SKIP},
    "stream option": {"include_obfuscation": (False,)},
    "messages field": dict.fromkeys(("metadata", "context_management", "diagnostics"), dict),
    "responses field": {
        **dict.fromkeys(("stream_options", "client_metadata", "include", "max_tool_calls"), object),
        "store": bool, "background": (False,), "truncation": ("disabled", "auto"), "top_logprobs": (0,),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), STORES_NOTHING),
    },
    "infill field": {  # limits of time and hints, and llama.cpp's own samplers
        **dict.fromkeys(("t_max_prompt_ms", "t_max_predict_ms", "n_indent", "n_keep", "n_cache_reuse", "id_slot"), int),
        **dict.fromkeys(("cache_prompt", "timings_per_token"), bool), "samplers": object, "return_tokens": (False,),
        "n_probs": (0,), "mirostat": (0,), "ignore_eos": (False,), "typical_p": (1,),
    },
    "rerank field": {
        "user": str, "priority": int, "rank_fields": (["text"],), "return_embeddings": (False,), "use_activation": (True,),
    },
    "embeddings field": dict.fromkeys(("user", "input_type", "truncate"), str),
    "ollama field": {
        **dict.fromkeys(("keep_alive", "truncate", "shift"), object), "logprobs": (False,), "top_logprobs": (0,),
        **dict.fromkeys(("context", "images"), ([],)), "template": ("",),
    },
    "ollama option": {
        **dict.fromkeys(("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"), object),
        **dict.fromkeys(("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"), object),
        **dict.fromkeys(("typical_p", "tfs_z"), (1,)), "mirostat": (0,), "repeat_last_n": (64, -1),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta", "penalize_newline"), object),
    },
    "messages tool": {"*": SKIP},  # Anthropic's own, such as web_search_20250305, bash_20250124 and memory_20250818
    "responses tool": {"*": SKIP},  # those that a server runs itself, and kinds of calls that no template supports
    "responses item": {"item_reference": f"{STORES_NOTHING} (with store: false)", "*": SKIP},
    "assistant block": dict.fromkeys(  # of tools that Anthropic's servers run
        (
            *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
            *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
            *("mcp_tool_use", "mcp_tool_result", "container_upload"),
        ),
        SKIP,
    ),
    "tool output part": dict.fromkeys(("image", "image_url", "input_image", "document", "input_file"), SKIP),
}  # fmt: skip
logger = logging.getLogger("specdec.server")
_logged = set[str]()


class APIError(Exception):
    """An exception that is sent to the client as an HTTP error response.

    Args:
        message: The text of the error.
        param: The request parameter that is wrong, if any.
        code: OpenAI's error code.
        status: The HTTP status.
        headers: Additional headers of the response.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = INVALID,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Set the message, and the fields and headers of the response."""
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers or {}

    @property
    def note(self) -> str:
        """The error code and the name of the wrong parameter, for the log."""
        return f"{self.code or ''} {self.param or ''}".strip()

    def format_body(self, path: str = "") -> JSONDict:
        """Return the JSON body of the error response, as a dict, in the format of the API that the request path belongs to.

        Paths of ollama's API get only the message, and those of Anthropic's API its error types. All others get OpenAI's format.
        """
        if path.startswith(OLLAMA_PREFIX):
            return {"error": str(self)}
        is_anthropic = path.startswith(ANTHROPIC_PREFIX)
        types, server_error_type = ANTHROPIC_ERROR_TYPES if is_anthropic else OPENAI_ERROR_TYPES
        error_type = types.get(self.status, "invalid_request_error" if self.status < 500 else server_error_type)
        error = {"message": str(self), "type": error_type, "param": self.param, "code": self.code}
        details = {"details": {"error_code": self.code}} if is_anthropic else {}
        return {"error": {**error, **details}, "type": "error"}


def parse_body(data: bytes) -> JSONDict:
    """Parse the bytes of a JSON body into a dict.

    Raises:
        APIError: The body is not a JSON object, has too many or too deeply nested lists and objects, or has lone surrogates.
    """
    if data.count(b"[") + data.count(b"{") > MAX_BODY_CONTAINERS:
        without_strings = JSON_STRING_PATTERN.sub(b"", data)
        if without_strings.count(b"[") + without_strings.count(b"{") > MAX_BODY_CONTAINERS:
            raise APIError(f"the body has more than {MAX_BODY_CONTAINERS} lists and objects", None)
    try:
        value = json.loads(data.decode(), parse_float=parse_finite_float, parse_constant=_reject_constant)
    except RecursionError:
        raise APIError(f"the body is nested too deeply; at most {MAX_BODY_DEPTH} levels are allowed", None) from None
    except ValueError as error:
        raise APIError(f"the body is not valid JSON: {shorten(error)}; expected an object", None) from None
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, list) else shorten(json.dumps(value))
        raise APIError(f"the body is {found}; expected an object", None)
    level, depth = list[object]([value]), 0
    while level:
        depth += 1
        if depth > MAX_BODY_DEPTH:
            raise APIError(f"the body is nested too deeply; at most {MAX_BODY_DEPTH} levels are allowed", None)
        level = [each for container in level for each in _iter_containers(container)]
    return value


def _iter_containers(value: Any) -> Iterator[Any]:
    """Yield the lists and objects directly inside a list or an object; raises APIError for a string with lone surrogates."""
    for each in [*value, *value.values()] if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield each
        elif isinstance(each, str) and not each.isascii():
            with wrap_errors(None):
                check_string("a string of the body", each)


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


@contextmanager
def wrap_errors(param: str | None) -> Iterator[None]:
    """Turn each TypeError, ValueError or APIError inside the context into an APIError that names the given parameter."""
    try:
        yield
    except APIError as error:
        error.param = param
        raise
    except (TypeError, ValueError) as error:
        raise APIError(str(error), param) from None


class Fields:
    """The fields of a request body, which are validated and removed one by one; null counts as missing.

    All methods named `take_*` raise APIError for an invalid value, as `take` does.
    """

    def __init__(self, body: JSONObject) -> None:
        """Copy the fields that are not null."""
        self._body = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, check: Callable[[str, object], Value], default: Default) -> Value | Default:
        """Remove a field from the body and return its checked value, or the default if it is missing or null.

        Args:
            name: Name of the field.
            check: Takes the name and the value, and returns the value to use or raises ValueError or TypeError.
            default: Result for a missing field.

        Raises:
            APIError: The value is invalid.
        """
        if (value := self.pop(name)) is None:
            return default
        with wrap_errors(name):
            return check(name, value)

    def take_required(self, name: str, check: Callable[[str, object], Value], expected: str) -> Value:
        """Remove a field from the body and return its checked value; if it is missing, the error says what is expected."""
        if name not in self._body:
            raise APIError(f"{name} is missing; expected {expected}", name, "missing_parameter")
        with wrap_errors(name):
            return check(name, self.pop(name))

    def take_bool(self, name: str, default: bool = False) -> bool:
        """Remove a field from the body and return its value, true or false, or the default if it is missing."""
        return self.take(name, check_bool, default)

    def take_string(self, name: str) -> str:
        """Remove a field from the body and return its value, a string, or "" if it is missing."""
        return self.take(name, check_string, "")

    def take_choice(self, name: str, choices: Collection[str], default: str) -> str:
        """Remove a field from the body and return its value, one of the given strings, or the default if it is missing."""
        return self.take(name, partial(check_choice, choices=choices), default)

    def take_object(self, name: str) -> JSONDict:
        """Remove a field from the body and return its value, a JSON object, which is empty if the field is missing."""
        return self.take(name, check_object, {})

    def take_int(self, name: str, default: Default, minimum: int, maximum: int | None = None) -> int | Default:
        """Remove a field from the body and return its value, an integer in the given range, or the default if it is missing."""
        return self.take(name, partial(check_integer, minimum=minimum, maximum=maximum), default)

    def take_limit(self, name: str, default: int | None = None) -> int | None:
        """Remove a field from the body and return its value, an integer of at least 1, or the default if it is missing.

        A value of -1 means no limit, for which None is returned.
        """
        return self.take(name, _check_limit, default)

    def pop(self, name: str) -> object:
        """Remove a field from the body and return its value as it is, or None if it is missing or null."""
        return self._body.pop(name, None)

    def reject_remaining(self, kind: str = "", label: str = "") -> None:
        """Raise APIError if a field is left, unless the table `EXTRAS` accepts its value as one without effect.

        Args:
            kind: The kind of the fields in that table; "" to accept none.
            label: Name of the object that has the fields, for errors; "" for the body.
        """
        known = EXTRAS.get(kind, {})
        for name, value in self._body.items():
            rule = known.get(name, known.get("*"))
            if rule == SKIP:
                log_once(f"left out: {kind} {shorten(name)}")
                continue
            with wrap_errors(shorten(name)):
                _check_extra_field(f"{name} of {label}" if label else name, value, rule)


def _check_limit(name: str, value: object) -> int | None:
    return None if value == -1 else check_integer(name, value, 1)


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return an integer field as `check_int` does, also for a whole float such as 2.0, which some JSON writers make of 2."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_int(name, value, minimum, maximum)


def _check_extra_field(name: str, value: Any, rule: Any) -> None:
    """Raise APIError or TypeError unless a field has a value that its rule in `EXTRAS` accepts; None rejects an unknown field."""
    match rule:
        case None:
            raise APIError(f"unknown parameter {shorten(name)}", None, UNKNOWN)
        case str():
            raise APIError(f"{name} {rule}", None, UNSUPPORTED)
        case tuple():
            if not any((value == each and type(value) is not bool) or value is each for each in rule):
                accepted = " or ".join(map(json.dumps, rule))
                hint = f"; expected {accepted}, or leave it out" if accepted else "; leave it out"
                raise APIError(f"{name} is not supported{hint}", None, UNSUPPORTED)
        case _ if rule is not object:
            {str: check_string, dict: check_object, bool: check_bool, int: check_number}[rule](name, value)


def skip_extra(kind: str, label: str, value: object) -> None:
    """Log once that a part of a request is left out; raise APIError if the table `EXTRAS` rejects it.

    Args:
        kind: The kind of the part in that table.
        label: The part's name in the request, such as `tools[0]`.
        value: The part's type in the request.
    """
    rules = EXTRAS[kind]
    rule = rules.get(value, rules.get("*")) if isinstance(value, str) else None
    if rule != SKIP:
        expected = f", which {rule or 'is not supported'}"
        raise APIError(f"{label} has the type {shorten(value, repr)}{expected}", None, UNSUPPORTED)
    log_once(f"left out: {kind} of the type {shorten(value)}")


def log_once(message: str) -> None:
    """Log a warning if it was not logged before, up to `MAX_LOGGED` different ones."""
    if message not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(message)
        logger.warning(message)


def check_bool(name: str, value: object) -> bool:
    """Return the value of the field `name` if it is true or false; raises TypeError for another value."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected true or false")
    return value


def check_number(name: str, value: object) -> float:
    """Return the value of the field `name` if it is a number; raises TypeError for another value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a number")
    return value


def check_object(name: str, value: object) -> JSONDict:
    """Return the value of the field `name` if it is a JSON object, a dict; raises TypeError for another value."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected an object")
    return value


def check_list(name: str, value: object) -> list[object]:
    """Return the value of the field `name` if it is a list that is not empty; raises TypeError for another value."""
    if not isinstance(value, list) or not value:
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a list of one or more")
    return value


def iter_objects(name: str, values: object) -> Iterator[tuple[str, JSONDict]]:
    """Yield the objects of the list `values`, each after its label for error messages, such as `messages[0]`.

    Raises:
        TypeError: The value is not a list, or an item is not an object.
    """
    if not isinstance(values, list):
        raise TypeError(f"{name} is {shorten(values, repr)}; expected a list")
    for i, value in enumerate(values):
        yield f"{name}[{i}]", check_object(f"{name}[{i}]", value)


def parse_texts(name: str, value: Any, maximum: int) -> list[str | list[int]]:
    """Return the texts of a field that is a string, token ids, or a list of either: each as a string or token ids."""
    if isinstance(value, str):
        return [check_string(name, value)]
    if all(type(each) is int for each in check_list(name, value)):
        return [value]
    if len(value) > maximum:
        raise ValueError(f"{name} has {len(value)} items; at most {maximum} are allowed")
    if [] in value:
        raise ValueError(f"{name} has an item without tokens; expected one or more")
    return [each if isinstance(each, list) else check_string(f"{name}[{i}]", each) for i, each in enumerate(value)]


def join_text_parts(
    name: str, value: object, part_types: Collection[str] = ("text",), separator: str = "", kind: str = ""
) -> str:
    """Return the content of a message as one string: the string that it is, or the joined texts of its content parts.

    Args:
        name: Name of the field, for errors.
        value: A string or a list of content parts, which are objects with type and text.
        part_types: The allowed types of parts.
        separator: String between the texts of parts.
        kind: The kind of other parts in `EXTRAS`; a note replaces those that the table skips. "" rejects all other parts.

    Raises:
        TypeError: The value is neither, or a part is not an object or its text not a string.
        APIError: A part has another type than `part_types`, and is not skipped.
    """
    if not isinstance(value, list):
        return check_string(name, value)
    texts = list[str]()
    for label, part in iter_objects(name, value):
        if (part_type := part.get("type")) in part_types:
            texts.append(check_string(f"text of {label}", part.get("text")))
        elif kind and isinstance(part_type, str) and part_type in EXTRAS[kind]:
            skip_extra(kind, label, part_type)
            texts.append(f"[{part_type} left out]")
        else:
            raise APIError(
                f"{label} has the type {shorten(part_type, repr)}, which is not supported; expected text", name, UNSUPPORTED
            )
    return separator.join(texts)
