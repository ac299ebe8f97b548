"""The tensors of a model's files by their names: which there are, of which shape, and which nobody asked for. Knows no format."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from specdec.families.config_values import CheckpointError, shown
from specdec.runtime.simd import Int64

File = TypeVar("File", bound=Any)  # an open file: its path, entries by names with their shapes, and tensors and integers by names


class NamedTensors(Generic[File]):
    """Those of several files; needed, said, described: how errors tell what asks for a tensor, for a shape, for the model."""

    needed = said = described = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sources: dict[str, tuple[File, str]] = {}  # with the name in the file
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def leave_out(self, names: Iterable[str]) -> None:
        """Those tensors are not needed."""
        self._used.update(names)

    def check_all_used(self) -> None:
        """Raises CheckpointError for a tensor that nobody asked for."""
        for name in self._sources:
            if name not in self._used:
                raise CheckpointError(f"{self.told(name)} has no place in the model that {self.described}")

    def told(self, name: str) -> str:
        """Its file and its name there, for people."""
        file, full = self._sources[name]
        return f"{file.path}: {shown(full)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError for a tensor that is missing."""
        if name not in self._sources:
            raise CheckpointError(f"{self.path} holds no tensor {name}, which {self.needed}")
        file, full = self._sources[name]
        shape: tuple[int, ...] = file.entries[full].shape
        return shape

    def tensor(self, name: str, shape: tuple[int, ...], *types: Any) -> Any:
        """Raises CheckpointError for one that is missing or of another shape or type; types: as its file takes them."""
        file, full = self._source(name, shape)
        return file.tensor(full, *types)

    def integers(self, name: str, n: int) -> Int64:
        """As `tensor`, of n whole numbers, which are read."""
        file, full = self._source(name, (n,))
        numbers: Int64 = file.integers(full)
        return numbers

    def _source(self, name: str, shape: tuple[int, ...]) -> tuple[File, str]:
        """The file of a tensor that is used, and its name there."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.told(name)} has the shape {found}; {self.said} {shape}")
        self._used.add(name)
        return self._sources[name]
