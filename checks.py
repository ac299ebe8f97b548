"""Values that a caller hands over: checked, and told by the parameter's name. Knows nothing of what they are for."""

import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import TypeVar

Choice = TypeVar("Choice")


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number from least to most. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; expected a whole number")
    n = operator.index(value)
    if n < least or (most is not None and n > most):
        raise ValueError(f"{name} is {_short(n)}; expected {least} {'or more' if most is None else f'to {most}'}")
    return n


def real(name: str, value: object, most: float, hint: str) -> float:
    """A number from 0 to most, finite; hint: what it means at its ends. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; expected a number")
    try:
        x = float(value)
    except OverflowError:
        x = math.inf
    if not (0 <= x <= most and math.isfinite(x)):
        raise ValueError(f"{name} is {_short(value)}; expected {hint}")
    return x


def one_of(name: str, value: Choice, choices: Collection[Choice]) -> Choice:
    """One of the choices. Raises ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}")
    return value


def text(name: str, value: object) -> str:
    """A string that UTF-8 can hold. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds {value[error.start]!r} at {error.start}: half a character, no valid UTF-8") from None
    return value


def _short(value: object) -> str:
    try:
        words = str(value)
    except ValueError:  # Python refuses to write out a number of more than 4300 digits
        return "a number beyond all bounds"
    return words if len(words) <= 40 else f"{words[:37]}..."
