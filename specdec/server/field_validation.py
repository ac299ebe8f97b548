"""Validation of request bodies and their fields; unsupported features are rejected by name. Knows no models and no server."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from specdec.argument_checks import check_choice, check_int, check_string, shorten
from specdec.server.json_values import parse_finite_float

MAX_BODY_DEPTH, MAX_BODY_CONTAINERS = 64, 50_000  # nested lists and objects of a body, and all of them
ANTHROPIC_PREFIX = "/v1/messages"  # of the paths of Anthropic's API
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
# unsupported parameters, with the values that change nothing
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_tokens", "mirostat", "n_probs"), (0,)),
    **dict.fromkeys(("typical_p", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("store", "echo", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    "cache_prompt": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
    **dict.fromkeys(("functions", "function_call", "audio", "web_search_options"), ()),
}


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
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers or {}

    @property
    def note(self) -> str:
        """The error code and the name of the wrong parameter, for the log."""
        return f"{self.code or ''} {self.param or ''}".strip()

    def format_body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body of the error response, as a dict.

        The error type is one of OpenAI's or Anthropic's API, depending on the request path.
        """
        types, server_error_type = ANTHROPIC_ERROR_TYPES if path.startswith(ANTHROPIC_PREFIX) else OPENAI_ERROR_TYPES
        error_type = types.get(self.status, "invalid_request_error" if self.status < 500 else server_error_type)
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}, "type": "error"}


def parse_body(data: bytes) -> dict[str, Any]:
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
        raise APIError(f"the body is a {type(value).__name__}; expected an object", None)
    level, depth = list[Any]([value]), 0
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


def _reject_constant(name: str) -> Any:
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
    """The fields of a request body, which are validated and removed one by one; null counts as missing."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, check: Callable[[str, Any], Value], default: Default) -> Value | Default:
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

    def take_bool(self, name: str, default: bool = False) -> bool:
        """Remove a field from the body and return its value, true or false, or the default if it is missing."""
        return self.take(name, check_bool, default)

    def take_false(self, name: str) -> None:
        """Remove a field from the body; raises APIError if it is true, which is not supported."""
        if self.take_bool(name):
            raise APIError(f"{name} is not supported; expected false", name, UNSUPPORTED)

    def take_string(self, name: str) -> str:
        """Remove a field from the body and return its value, a string, or "" if it is missing."""
        return self.take(name, check_string, "")

    def take_choice(self, name: str, choices: Collection[str], default: str) -> str:
        """Remove a field from the body and return its value, one of the given strings, or the default if it is missing."""
        return self.take(name, partial(check_choice, choices=choices), default)

    def take_object(self, name: str) -> dict[str, Any]:
        """Remove a field from the body and return its value, a JSON object, which is empty if the field is missing."""
        return self.take(name, check_object, {})

    def take_int(self, name: str, default: Default, minimum: int, maximum: int | None = None) -> int | Default:
        """Remove a field from the body and return its value, an integer in the given range, or the default if it is missing."""
        return self.take(name, partial(check_int, minimum=minimum, maximum=maximum), default)

    def pop(self, name: str) -> Any:
        """Remove a field from the body and return its value as it is, or None if it is missing or null."""
        return self._body.pop(name, None)

    def reject_remaining(self, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES) -> None:
        """Raise APIError if one of the fields left is unknown, or has a value that would have an effect.

        Args:
            neutral: The unsupported fields, each with its values that change nothing and are accepted.
        """
        for name, value in self._body.items():
            if name not in neutral:
                raise APIError(f"unknown parameter {shorten(name)}", shorten(name), UNKNOWN)
            if not any((value == each and type(value) is not bool) or value is each for each in neutral[name]):
                accepted = " or ".join(map(json.dumps, neutral[name]))
                hint = f"; expected {accepted}, or leave it out" if accepted else "; leave it out"
                raise APIError(f"{name} is not supported{hint}", name, UNSUPPORTED)


def check_bool(name: str, value: Any) -> bool:
    """Return the value of the field `name` if it is true or false; raises TypeError for another value."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected true or false")
    return value


def check_object(name: str, value: Any) -> dict[str, Any]:
    """Return the value of the field `name` if it is a JSON object, a dict; raises TypeError for another value."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected an object")
    return value


def check_list(name: str, value: Any) -> list[Any]:
    """Return the value of the field `name` if it is a list that is not empty; raises TypeError for another value."""
    if not isinstance(value, list) or not value:
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a list of one or more")
    return value


def iter_objects(name: str, values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of the list `values`, each after its label for error messages, such as `messages[0]`.

    Raises:
        TypeError: The value is not a list, or an item is not an object.
    """
    if not isinstance(values, list):
        raise TypeError(f"{name} is {shorten(values, repr)}; expected a list")
    for i, value in enumerate(values):
        yield f"{name}[{i}]", check_object(f"{name}[{i}]", value)


def join_text_parts(name: str, value: Any, part_types: Collection[str] = ("text",), separator: str = "") -> str:
    """Return the content of a message as one string: the string that it is, or the joined texts of its content parts.

    Args:
        name: Name of the field, for errors.
        value: A string or a list of content parts, which are objects with type and text.
        part_types: The allowed types of parts.
        separator: String between the texts of parts.

    Raises:
        TypeError: The value is neither.
        APIError: A part has another type than `part_types`.
    """
    if not isinstance(value, list):
        return check_string(name, value)
    texts = list[str]()
    for label, part in iter_objects(name, value):
        if (part_type := part.get("type")) not in part_types:
            raise APIError(
                f"{label} has the type {shorten(part_type, repr)}, which is not supported; expected text", name, UNSUPPORTED
            )
        texts.append(check_string(f"text of {label}", part.get("text")))
    return separator.join(texts)
