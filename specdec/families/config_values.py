"""The keys of a config file, each checked as it is read. Knows no family."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_SIZE = 2**31 - 1
WIDEST = 1 << 20  # of what is listed number by number before any tensor tells its size: a head
NO_DEFAULTS: Mapping[str, Any] = {}
QUANTIZED = ("quantization_config", "quantization")  # keys; MLX writes the second, or both
ORIGINAL = "use the original model in BF16 or a GGUF file of it, such as org/name:Q4_K_M"


class CheckpointError(ValueError):
    """A file that cannot be used as a model: one line with the file, what is wrong and what would be right."""


class CheckpointWarning(UserWarning):
    """Something that lies with a model and is not used, though its text may depend on it."""


def shown(value: object) -> str:
    """A JSON value on one line, cut short."""
    try:
        words = json.dumps(value)
    except (ValueError, RecursionError):
        words = "beyond all bounds"
    return words if len(words) <= 60 else f"{words[:57]}..."


class Values:
    """The keys of a config file, where a file is silent its family's, each checked as it is read."""

    def __init__(
        self, path: Path, given: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS, beginning: str = ""
    ) -> None:
        """beginning: of all of its keys in the file, which nobody has to say."""
        self.path, self._beginning = path, beginning
        self._values = {**defaults, **given}

    def __getitem__(self, key: str) -> Any:
        return self._values.get(self._beginning + key)

    def __contains__(self, key: str) -> bool:
        return self._beginning + key in self._values

    def refusal(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._beginning}{key} is {shown(self[key])}; expected {expected}")

    def whole(self, key: str, otherwise: int | None = None, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to most; otherwise: what a silent file means."""
        value = self[key]
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or not 1 <= value <= most:
            raise self.refusal(key, f"a whole number from 1 to {most}")
        return value

    def count(self, key: str) -> int:
        """As `whole`; 0 where the file says 0, or is silent."""
        return 0 if self[key] in (0, None) else self.whole(key)

    def real(self, key: str, least: float, most: float, otherwise: float | None = None) -> float:
        """A number from least to most; otherwise: what a silent file means."""
        value = self[key]
        if value is None and otherwise is not None:
            return otherwise
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refusal(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, otherwise: bool | None = None) -> bool:
        """True or false; otherwise: what a silent file means."""
        value = self[key]
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not bool:
            raise self.refusal(key, "true or false")
        return value

    def object(self, key: str, expected: str = "an object") -> dict[str, Any]:
        """One in another; {} where the file is silent."""
        value = {} if self[key] is None else self[key]
        if not isinstance(value, dict):
            raise self.refusal(key, expected)
        return value

    def of_layers(self, key: str, n: int, kinds: Iterable[Any], expected: str) -> list[Any]:
        """A list of one of kinds for each of n layers."""
        value, known = self[key], [*kinds]
        if not isinstance(value, list) or len(value) != n or not all(any(_same(each, kind) for kind in known) for each in value):
            raise self.refusal(key, f"{expected} for each of {n} layers")
        return value

    def layers(self, key: str, n: int) -> list[int]:
        """A list of some of n layers."""
        value = self[key]
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < n for i in value):
            raise self.refusal(key, f"a list of layers from 0 to {n - 1}")
        return value

    def must_be(self, key: str, *choices: Any) -> None:
        """Raises CheckpointError for a value that is none of the choices; the error names the first."""
        if not any(_same(self[key], choice) for choice in choices):
            raise self.refusal(key, f"{shown(choices[0])}; other values are not supported")


def check_neutral(values: Values, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises CheckpointError for a key that asks for other arithmetic; neutral: those that might, and what asks for nothing."""
    for key in filter(values.__contains__, neutral):
        if key in QUANTIZED and isinstance(values[key], dict):
            method = values[key].get("quant_method")
            how = (
                f"by {shown(method)}"
                if method
                else "as MLX does it"
                if "group_size" in values[key]
                else "in a way it does not name"
            )
            raise CheckpointError(f"{values.path}: the weights are quantized {how}, which is not supported; {ORIGINAL}")
        values.must_be(key, *neutral[key])


def _same(value: Any, choice: Any) -> bool:
    """Equality, of 1 and true not."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)
