"""Checks of caller-supplied values, errors of model files, and small helpers. Independent of other modules."""

import codecs
import json
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

Choice = TypeVar("Choice")
# Objects of JSON from outside, or the metadata of a GGUF file. The code that reads a value checks its type.
JSONDict = dict[str, Any]
JSONObject = Mapping[str, Any]
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class CheckpointError(ValueError):
    """An error for a file that cannot be used as a model; one line with the file, what is wrong and what is expected."""


class CheckpointWarning(UserWarning):
    """A warning about files of a model: one is not used although the output may depend on it, or packed weights are kept."""


def format_json_value(value: object) -> str:
    """Return a value as JSON on one line, truncated to 60 characters, for error messages."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = "a value nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_int(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return the value as an int if it is an integer from `minimum` to `maximum`, else raise an error with the parameter's name.

    Args:
        name: The name of the parameter, for the error.
        value: The value to check; any type with `__index__`, such as a numpy integer.
        minimum: The smallest valid value.
        maximum: The largest valid value; None for no limit.

    Raises:
        TypeError: The value has another type; a bool is not accepted.
        ValueError: The value is out of range.
    """
    try:
        n = None if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__") else operator.index(value)
    except TypeError:  # an array or a class
        n = None
    if n is None:
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a whole number")
    if n < minimum or (maximum is not None and n > maximum):
        raise ValueError(f"{name} is {shorten(n)}; expected {minimum} {'or more' if maximum is None else f'to {maximum}'}")
    return n


def check_float(name: str, value: object, maximum: float, expected: str, minimum: float = 0.0) -> float:
    """Return the value as a float if it is a finite number from `minimum` to `maximum`, else raise an error.

    Args:
        name: The name of the parameter, for the error.
        value: The value to check.
        maximum: The largest valid value.
        expected: A description of the valid range, for the error.
        minimum: The smallest valid value.

    Raises:
        TypeError: The value has another type; a bool is not accepted.
        ValueError: The value is out of range or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a number")
    try:
        x = float(value)
    except OverflowError:
        x = math.inf
    if not (minimum <= x <= maximum and math.isfinite(x)):
        raise ValueError(f"{name} is {shorten(value)}; expected {expected}")
    return x


def check_choice(name: str, value: Choice, choices: Collection[Choice]) -> Choice:
    """Return the value unchanged if it is one of the allowed strings; raise ValueError with a list of these strings otherwise."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {shorten(value, repr)}; expected one of {', '.join(map(str, choices))}")
    return value


def check_string(name: str, value: object) -> str:
    """Return the value unchanged if it is a string that UTF-8 can encode.

    Raises:
        TypeError: The value is not a string.
        ValueError: The string contains a lone surrogate.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds {value[error.start]!r} at {error.start}: half a character, no valid UTF-8") from None
    return value


def check_ints(name: str, values: Iterable[object]) -> list[int]:
    """Return the integers of an iterable as a list of ints; raise TypeError if it is not iterable or an item is no integer."""
    try:
        return list(map(operator.index, values))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} are {shorten(values, repr)}; expected whole numbers") from None


def check_path(name: str, value: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the value unchanged if it is a str or an os.PathLike; raise TypeError for any other type, bytes included."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a path")
    return value


@contextmanager
def wrap_read_errors(path: Path, error_type: type[ValueError], expected: str = "") -> Iterator[None]:
    """Return a context in which errors while reading a file are raised again as one-line errors of the given type.

    Args:
        path: The file, which the error names.
        error_type: The type of the raised errors; an error that already has this type passes unchanged.
        expected: What the file should be. If given, a path that exists and is not a regular file is an error.
    """
    try:
        if expected and path.is_dir():
            raise error_type(f"{path} is a directory; expected {expected}")
        if expected and path.exists() and not path.is_file():
            raise error_type(f"{path} is not a regular file; expected {expected}")
        yield
    except error_type:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise error_type(f"cannot read {path}: {reason}") from None


def decode_text(data: bytes) -> str:
    """Decode a text that a person wrote: UTF-8 with or without a byte order mark, or UTF-16 with one, as of PowerShell.

    Raises:
        UnicodeDecodeError: The bytes are something else.
    """
    return data.decode("utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig")


def shorten(value: object, to_string: Callable[[object], str] = str) -> str:
    """Convert any value to a string of one line and at most 40 characters, cut with "..." if it is longer."""
    try:
        text = " ".join(to_string(value).split())
    except ValueError:  # Python's limit for converting an int to a string
        return "a number of more than 4300 digits"
    return text if len(text) <= 40 else f"{text[:37]}..."


def is_list(value: object) -> TypeGuard[Collection[object]]:
    """Return whether a value is list-like: a sized iterable, such as an array, but no string, bytes or mapping."""
    return hasattr(type(value), "__len__") and hasattr(type(value), "__iter__") and not isinstance(value, str | bytes | Mapping)


def check_strings(name: str, value: object) -> list[str]:
    """Return a list of non-empty strings, given one string or a collection of strings.

    Raises:
        TypeError: The value has another type.
        ValueError: A string is empty or contains a lone surrogate.
    """
    if not isinstance(value, str) and not is_list(value):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a string or several")
    strings = [check_string(name, each) for each in ([value] if isinstance(value, str) else value)]
    if "" in strings:
        raise ValueError(f"{name} contains ''; expected a string of at least one character")
    return strings


def parse_list(
    option: str, text: str, parse: Callable[[str], Choice], is_valid: Callable[[Choice], bool], expected: str
) -> list[Choice]:
    """Parse a comma-separated list into its distinct values, in order.

    Args:
        option: Name of the option, for the error.
        text: The list.
        parse: Converts one item; may raise ValueError.
        is_valid: Returns whether a value is allowed.
        expected: Description of the allowed values, for the error.

    Raises:
        ValueError: An item cannot be parsed or is not allowed.
    """
    with suppress(ValueError):
        values = list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        if all(map(is_valid, values)):
            return values
    raise ValueError(f"{option} is {text!r}; expected {expected}, separated by commas")


def replace_unknown_tokens(tokens: list[int], vocab_size: int) -> list[int]:
    """Return the token ids with every id of `vocab_size` or more replaced by 0, for a model with a smaller vocabulary."""
    return [token if token < vocab_size else 0 for token in tokens]


def count_common_prefix(a: Sequence[object], b: Sequence[object], limit: int) -> int:
    """Return the length of the common prefix of two lists, at most `limit`; another thread may change the lists meanwhile."""
    a = a[:limit]
    b = b[: len(a)]
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Fields of a model configuration

MIN_SCALE, MAX_SCALE = 1e-6, 1e6  # of all scales, so that their squares are finite in float32, too
ErrorMessages = Iterator[str]  # one message for each invalid field; callers report the first


def check_positive(config: object, *names: str) -> ErrorMessages:
    """Yield an error message for each named field of a config that is not a finite number above 0."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            yield f"{name} is {getattr(config, name)}; expected a positive number"


def check_range(config: object, minimum: float, maximum: float, *names: str) -> ErrorMessages:
    """Yield an error message for each named field of a config that is not a finite number from minimum to maximum."""
    expected = f"{minimum:g} or more" if maximum == math.inf else f"{minimum:g} to {maximum:g}"
    for name in names:
        value = getattr(config, name)
        if not (minimum <= value <= maximum and value < math.inf):
            yield f"{name} is {value}; expected {expected}"


def check_scales(name: str, scales: Sequence[float], n: int) -> ErrorMessages:
    """Yield an error message unless `scales` is empty or has n factors, each MAX_SCALE or less in magnitude."""
    if scales and not (len(scales) == n and all(abs(scale) <= MAX_SCALE for scale in scales)):
        yield f"{name} are {scales}; expected {n} numbers up to {MAX_SCALE:g}, or none"


def prefix_errors(name: str, errors: ErrorMessages) -> ErrorMessages:
    """Return the error messages of a nested config, each with "<name>'s" in front."""
    owner = f"{name}'" if name.endswith("s") else f"{name}'s"
    return (f"{owner} {error}" for error in errors)
