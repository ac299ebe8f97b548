"""Bodies of requests and their fields, checked; whatever is not done is refused by name. Knows no models and no server."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from specdec.server.tool_parsers.incremental import finite
from specdec.validation import short, text, whole

MOST_NESTED, MOST_VALUES = 64, 50_000  # lists and objects of a body: within each other, and in all
NOTHING: dict[str, Any] = {}
ANTHROPICS = "/v1/messages"  # what the paths of Anthropic's interface begin with
INVALID, NOT_DONE, UNKNOWN, TOO_LONG = "invalid_value", "unsupported_parameter", "unknown_parameter", "context_length_exceeded"
# types of errors by status, of OpenAI's and Anthropic's interfaces; of others that depends on whether it is the server's fault
KINDS = {429: "rate_limit_error"}, "server_error"
ANTHROPICS_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}, "api_error"  # fmt: skip
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # of JSON; one that never ends is looked through once
Value = TypeVar("Value")
# what asks for nothing that is not done anyway
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_tokens", "mirostat", "n_probs"), (0,)),
    **dict.fromkeys(("typical_p", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("store", "echo", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    "cache_prompt": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
    **dict.fromkeys(("functions", "function_call", "audio", "web_search_options"), ()),
}


class Refused(Exception):
    """What a client is told instead of an answer: a message, its status and, in OpenAI's words, the parameter and a code.

    headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = INVALID,
        status: int = 400,
        headers: Mapping[str, str] = NOTHING,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers

    @property
    def note(self) -> str:
        """For the log."""
        return f"{self.code or ''} {self.param or ''}".strip()

    def body(self, path: str = "") -> dict[str, Any]:
        """Return what a client of that path reads: the type of the error is OpenAI's or Anthropic's."""
        kinds, other = ANTHROPICS_KINDS if path.startswith(ANTHROPICS) else KINDS
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else other)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}, "type": "error"}


def body_of(data: bytes) -> dict[str, Any]:
    """The object that a body is. Raises Refused for JSON that is none, is nested too deep or holds half characters."""
    if data.count(b"[") + data.count(b"{") > MOST_VALUES:
        bare = STRING.sub(b"", data)
        if bare.count(b"[") + bare.count(b"{") > MOST_VALUES:
            raise Refused(f"the body holds more than {MOST_VALUES} lists and objects", None)
    try:
        value = json.loads(data.decode(), parse_float=finite, parse_constant=_no_number)
    except RecursionError:
        raise Refused(f"the body is nested too deep; at most {MOST_NESTED} values within values are read", None) from None
    except ValueError as error:
        raise Refused(f"the body is no JSON: {short(error)}; expected an object", None) from None
    if not isinstance(value, dict):
        raise Refused(f"the body is a {type(value).__name__}; expected an object", None)
    level, depth = list[Any]([value]), 0
    while level:
        depth += 1
        if depth > MOST_NESTED:
            raise Refused(f"the body is nested too deep; at most {MOST_NESTED} values within values are read", None)
        level = [each for several in level for each in _values(several)]
    return value


def _values(value: Any) -> Iterator[Any]:
    """What is in a list or an object that may hold more."""
    for each in [*value, *value.values()] if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield each
        elif isinstance(each, str) and not each.isascii():
            with refusing(None):
                text("a string of the body", each)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


@contextmanager
def refusing(param: str | None) -> Iterator[None]:
    """What is wrong within is that parameter's."""
    try:
        yield
    except Refused as error:
        error.param = param
        raise
    except (TypeError, ValueError) as error:
        raise Refused(str(error), param) from None


class Fields:
    """A body's fields, each of which is to be taken once; null is as good as none."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, check: Callable[[str, Any], Value], default: Value) -> Value:
        """The value as checked, or the default. Raises Refused."""
        if name not in self._body:
            return default
        with refusing(name):
            return check(name, self._body.pop(name))

    def end(self, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
        """Raises Refused where something is left that asks for anything."""
        for name, value in self._body.items():
            if name not in neutral:
                raise Refused(f"there is no parameter {short(name)}", short(name), UNKNOWN)
            if not any((value == each and type(value) is not bool) or value is each for each in neutral[name]):
                told = " or ".join(map(json.dumps, neutral[name]))
                instead = f"; expected {told}, or nothing" if told else "; leave it out"
                raise Refused(f"{name} is not done here{instead}", name, NOT_DONE)


def yes_or_no(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {short(value, repr)}; expected true or false")
    return value


def false(name: str, value: Any) -> bool:
    if yes_or_no(name, value):
        raise Refused(f"{name} is not done here; expected false", name, NOT_DONE)
    return False


def an_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {short(value, repr)}; expected an object")
    return value


def a_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"{name} is {short(value, repr)}; expected a list of one or more")
    return value


def objects(name: str, values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a list, each with what it is called."""
    if not isinstance(values, list):
        raise TypeError(f"{name} is {short(values, repr)}; expected a list")
    for i, value in enumerate(values):
        yield f"{name}[{i}]", an_object(f"{name}[{i}]", value)


def between(least: int, most: int | None = None) -> Callable[[str, Any], int]:
    return lambda name, value: whole(name, value, least, most)


def words(name: str, value: Any, kinds: Collection[str] = ("text",), between: str = "") -> str:
    """A text, or the texts of several parts. Raises TypeError, and Refused for parts that are none."""
    if not isinstance(value, list):
        return text(name, value)
    said = list[str]()
    for told, part in objects(name, value):
        if (kind := part.get("type")) not in kinds:
            raise Refused(f"{told} is of the type {short(kind, repr)}, which is not done here; expected text", name, NOT_DONE)
        said.append(text(f"text of {told}", part.get("text")))
    return between.join(said)
