"""An index of the tensors in a model's files by name, which checks their shapes and finds unused ones."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from specdec.families.config_values import CheckpointError, format_json_value
from specdec.runtime.simd import Int64

File = TypeVar("File", bound=Any)  # an open file with path, entries (shapes by name), get_tensor and read_integers


class TensorIndex(Generic[File]):
    """An index of the tensors in a model's files by name, which records the tensors that are used; base class.

    Attributes:
        need_phrase: Part of error messages that says what needs a tensor, such as "its config.json needs".
        shape_phrase: Part of error messages that says what gives a shape, such as "config.json says".
        model_phrase: Part of error messages that says what describes the model, such as "config.json describes".
    """

    need_phrase = shape_phrase = model_phrase = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sources: dict[str, tuple[File, str]] = {}  # the file, and the name in it
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def ignore(self, names: Iterable[str]) -> None:
        """Mark the tensors with the given names as used, because the model does not need them; unknown names do no harm."""
        self._used.update(names)

    def check_all_used(self) -> None:
        """Raise CheckpointError if a tensor in the files was neither used nor ignored."""
        for name in self._sources:
            if name not in self._used:
                raise CheckpointError(f"{self.describe(name)} is not part of the model that {self.model_phrase}")

    def describe(self, name: str) -> str:
        """Return the path of a tensor's file and the tensor's name in that file as a string, for error messages."""
        file, full = self._sources[name]
        return f"{file.path}: {format_json_value(full)}"

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor with a name.

        Raises:
            CheckpointError: No file has the tensor.
        """
        if name not in self._sources:
            raise CheckpointError(f"{self.path} has no tensor {name}, which {self.need_phrase}")
        file, full = self._sources[name]
        shape: tuple[int, ...] = file.entries[full].shape
        return shape

    def get_tensor(self, name: str, shape: tuple[int, ...], *types: Any) -> Any:
        """Return the tensor with a name for reading later, after checking its shape and type, and mark the tensor as used.

        Args:
            name: Name of the tensor.
            shape: The expected shape.
            types: Accepted types, passed to the file's `get_tensor`.

        Raises:
            CheckpointError: The tensor is missing or has another shape or type.
        """
        file, full = self._find_source(name, shape)
        return file.get_tensor(full, *types)

    def read_integers(self, name: str, n: int) -> Int64:
        """Read the vector of n integers with a name, (n,), and mark it as used.

        Raises:
            CheckpointError: As in `get_tensor`.
        """
        file, full = self._find_source(name, (n,))
        integers: Int64 = file.read_integers(full)
        return integers

    def _find_source(self, name: str, shape: tuple[int, ...]) -> tuple[File, str]:
        """Return a tensor's file and the tensor's name in that file, after checking the shape, and mark the tensor as used.

        Raises:
            CheckpointError: The tensor is missing or has another shape.
        """
        found = self.get_shape(name)
        if found != shape:
            raise CheckpointError(f"{self.describe(name)} has the shape {found}; {self.shape_phrase} {shape}")
        self._used.add(name)
        return self._sources[name]
