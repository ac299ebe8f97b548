"""Checks of values that a caller hands over; an error names the parameter. Knows nothing of what they are for."""

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

Choice = TypeVar("Choice")


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number from least to most. Raises TypeError or ValueError."""
    try:
        n = None if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__") else operator.index(value)
    except TypeError:  # an array, or a class
        n = None
    if n is None:
        raise TypeError(f"{name} is {short(value, repr)}; expected a whole number")
    if n < least or (most is not None and n > most):
        raise ValueError(f"{name} is {short(n)}; expected {least} {'or more' if most is None else f'to {most}'}")
    return n


def real(name: str, value: object, most: float, hint: str, least: float = 0.0) -> float:
    """A number from least to most, finite; hint: what it means at its ends. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {short(value, repr)}; expected a number")
    try:
        x = float(value)
    except OverflowError:
        x = math.inf
    if not (least <= x <= most and math.isfinite(x)):
        raise ValueError(f"{name} is {short(value)}; expected {hint}")
    return x


def one_of(name: str, value: Choice, choices: Collection[Choice]) -> Choice:
    """One of the choices. Raises ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {short(value, repr)}; expected one of {', '.join(map(str, choices))}")
    return value


def text(name: str, value: object) -> str:
    """A string that UTF-8 can hold. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {short(value, repr)}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds {value[error.start]!r} at {error.start}: half a character, no valid UTF-8") from None
    return value


def ids(name: str, values: Iterable[object]) -> list[int]:
    """The whole numbers of a sequence. Raises TypeError."""
    try:
        return list(map(operator.index, values))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} are {short(values, repr)}; expected whole numbers") from None


def file_name(name: str, value: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """A path, not of bytes. Raises TypeError."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{name} is {short(value, repr)}; expected a path")
    return value


@contextmanager
def reading(path: Path, kind: type[ValueError], what: str = "") -> Iterator[None]:
    """Around reading: what the system says of a file, in one line, as an error of that kind.

    what: is expected, where it has to be a regular file.
    """
    try:
        if what and path.is_dir():
            raise kind(f"{path} is a directory; expected {what}")
        if what and path.exists() and not path.is_file():
            raise kind(f"{path} is no regular file; expected {what}")
        yield
    except kind:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise kind(f"cannot read {path}: {reason}") from None


def short(value: object, words_of: Callable[[object], str] = str) -> str:
    """At most 40 letters on one line."""
    try:
        words = " ".join(words_of(value).split())
    except ValueError:  # Python refuses to write out a number of more than 4300 digits
        return "a number beyond all bounds"
    return words if len(words) <= 40 else f"{words[:37]}..."


def is_list(value: object) -> TypeGuard[Collection[Any]]:
    """Whether it is several values, an array too."""
    return hasattr(type(value), "__len__") and hasattr(type(value), "__iter__") and not isinstance(value, str | bytes | Mapping)


def strings(name: str, value: object) -> list[str]:
    """A string or several, none of them empty, as a list. Raises TypeError or ValueError."""
    if not isinstance(value, str) and not is_list(value):
        raise TypeError(f"{name} is {short(value, repr)}; expected a string or several")
    several = [text(name, each) for each in ([value] if isinstance(value, str) else value)]
    if "" in several:
        raise ValueError(f"{name} holds '', a string of no letters, which is everywhere")
    return several


def known(tokens: list[int], n_rows: int) -> list[int]:
    """A text as a model of so many tokens knows it, whose target may know more."""
    return [token if token < n_rows else 0 for token in tokens]


def n_common(held: list[Any], wanted: list[Any], limit: int) -> int:
    """With how many of the same, at most limit, two lists begin."""
    n = min(len(held), limit)
    held = held if n == len(held) else held[:n]
    if held == wanted[:n]:
        return n
    return next(i for i in range(n) if held[i] != wanted[i])
