"""Typed access to the keys of a config file, with a check of each value when it is read."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from specdec.argument_checks import MIN_SCALE, CheckpointError, JSONDict, JSONObject, format_json_value

MAX_SIZE = 2**31 - 1
MAX_DIM = 1 << 20  # limit of dimensions for which lists are made before tensor shapes are checked
MAX_FLOAT32 = 2.0**128 - 2.0**104
NO_DEFAULTS: JSONObject = {}
QUANTIZATION_KEYS = ("quantization_config", "quantization")  # MLX writes the second, or both
ORIGINAL_HINT = "use the original model in BF16 or a GGUF file of it, such as org/name:Q4_K_M"


class ConfigValues:
    """The keys of a config file, with the family's defaults for missing ones; each value is checked when it is read."""

    def __init__(
        self,
        path: Path,
        given: JSONObject,
        defaults: JSONObject = NO_DEFAULTS,
        prefix: str = "",
        aliases: Mapping[str, str] = NO_DEFAULTS,
    ) -> None:
        """Wrap the keys of a file.

        Args:
            path: The file, for errors.
            given: The keys and values of the file.
            defaults: Values of missing keys.
            prefix: Common prefix of all keys in the file, which the methods add.
            aliases: The file's own names of keys that the family names otherwise, for errors.
        """
        self.path, self._prefix, self._aliases = path, prefix, aliases
        self._values = {**defaults, **given}

    def __getitem__(self, key: str) -> Any:
        """Return the unchecked value of a key, or None if it is missing."""
        return self._values.get(self._prefix + key)

    def __contains__(self, key: str) -> bool:
        """Return whether the file or the defaults have a key."""
        return self._prefix + key in self._values

    def make_error(self, key: str, expected: str) -> CheckpointError:
        """Return a CheckpointError, to be raised, about the value of a key; `expected` is a phrase for the valid values."""
        name = self._aliases.get(key, self._prefix + key)
        return CheckpointError(f"{self.path}: {name} is {format_json_value(self[key])}; expected {expected}")

    def get_int(self, key: str, default: int | None = None, max_value: int = MAX_SIZE) -> int:
        """Return the value of a key as an integer from 1 to max_value, or the default if the key is missing.

        Raises:
            CheckpointError: The value is not an integer in this range.
        """
        value = self[key]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= max_value:
            raise self.make_error(key, f"an integer from 1 to {max_value}")
        return value

    def get_count(self, key: str) -> int:
        """Return the value of a key as an integer like `get_int`, or 0 if the key is 0 or missing. Raises CheckpointError."""
        return 0 if self[key] in (0, None) else self.get_int(key)

    def get_float(self, key: str, min_value: float, max_value: float, default: float | None = None) -> float:
        """Return the value of a key as a float from min_value to max_value, or the default if the key is missing.

        Raises:
            CheckpointError: The value is not a number in this range.
        """
        value = self[key]
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not min_value <= value <= max_value:
            raise self.make_error(key, f"a number from {min_value:g} to {max_value:g}")
        return float(value)

    def get_scale(self, key: str, default: float | None = None) -> float:
        """Return the value of a key as a factor, neither huge nor tiny, or the default if missing. Raises CheckpointError."""
        return self.get_float(key, MIN_SCALE, 1 / MIN_SCALE, default)

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """Return the value of a key as a boolean, or the default if the key is missing. Raises CheckpointError."""
        value = self[key]
        if value is None and default is not None:
            return default
        if type(value) is not bool:
            raise self.make_error(key, "true or false")
        return value

    def get_object(self, key: str, expected: str = "an object") -> JSONDict:
        """Return the nested object that is the value of a key, or {} if the key is missing. Raises CheckpointError."""
        value = {} if self[key] is None else self[key]
        if not isinstance(value, dict):
            raise self.make_error(key, expected)
        return value

    def get_per_layer(self, key: str, n: int, allowed: Iterable[object], expected: str) -> list[object]:
        """Return the value of a key as a list with one of the allowed values for each of n layers. Raises CheckpointError."""
        value, known = self[key], [*allowed]
        if (
            not isinstance(value, list)
            or len(value) != n
            or not all(any(_is_same(each, choice) for choice in known) for each in value)
        ):
            raise self.make_error(key, f"{expected} for each of {n} layers")
        return value

    def get_layer_floats(self, key: str, n: int) -> list[float]:
        """Return the value of a key as a number for each of n layers; one number counts for all. Raises CheckpointError."""
        value = self[key]
        numbers = value if isinstance(value, list) else [value] * n
        if len(numbers) != n or not all(type(x) in (int, float) and abs(x) <= MAX_FLOAT32 for x in numbers):
            raise self.make_error(key, f"a finite number for each of {n} layers")
        return [float(x) for x in numbers]

    def get_layer_ints(self, key: str, n: int) -> list[int]:
        """Return the value of a key as an integer for each of n layers; one number counts for all. Raises CheckpointError."""
        value = self[key]
        numbers: list[int] = value if isinstance(value, list) else [value] * n
        if len(numbers) != n or not all(type(x) is int and 1 <= x <= MAX_SIZE for x in numbers):
            raise self.make_error(key, f"an integer of 1 or more, or one for each of {n} layers")
        return numbers

    def get_layer_indices(self, key: str, n: int) -> list[int]:
        """Return the value of a key as a list of layer indices from 0 to n - 1. Raises CheckpointError."""
        value = self[key]
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < n for i in value):
            raise self.make_error(key, f"a list of layers from 0 to {n - 1}")
        return value

    def require(self, key: str, *choices: object) -> None:
        """Raise CheckpointError if the value of a key is not one of the choices; the error names only the first choice."""
        if not any(_is_same(self[key], choice) for choice in choices):
            raise self.make_error(key, f"{format_json_value(choices[0])}; other values are not supported")


def check_neutral_values(
    values: ConfigValues, neutral: Mapping[str, tuple[object, ...]], supported: Collection[str] = ()
) -> None:
    """Raise CheckpointError if a config file has a key that requests arithmetic that is not supported, such as quantization.

    Args:
        values: The keys of the file.
        neutral: Keys that change the arithmetic, and their values that change nothing.
        supported: Keys whose other values are supported.
    """
    for key in (key for key in neutral if key in values and key not in supported):
        if key in QUANTIZATION_KEYS and isinstance(values[key], dict):
            method = values[key].get("quant_method")
            method_phrase = "by MLX" if "group_size" in values[key] else "by an unknown method"
            if method:
                method_phrase = f"by {format_json_value(method)}"
            raise CheckpointError(
                f"{values.path}: the weights are quantized {method_phrase}, which is not supported; {ORIGINAL_HINT}"
            )
        values.require(key, *neutral[key])


def _is_same(value: object, choice: object) -> bool:
    """Return whether a value equals a choice, where 1 and true (or 0 and false) are different."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)
