"""The ways in which files write a family: a Hugging Face folder, a GGUF file, a head. Knows no family."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specdec.config import Config
from specdec.families.config_values import Values
from specdec.families.hf_common import HARMLESS, PREFIX
from specdec.families.tensor_specs import Place

Places = Mapping[str, Place]


def no_names(config: Config) -> Iterable[str]:
    """Of a family whose models need all that their files hold."""
    return ()


class Tensors(Protocol):
    """Those of a model's files: whether there is one of a name, and which there are."""

    def __contains__(self, name: str, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str, /) -> tuple[int, ...]:
        """Raises CheckpointError for a tensor that is missing."""

    def tensor(self, name: str, shape: tuple[int, ...], /) -> Any:
        """Raises CheckpointError for one that is missing or of another shape."""


@dataclass(frozen=True)
class InFolder:
    """A family in a Hugging Face folder.

    model_type: its name in config.json, and defaults: what its keys are where that file is silent, as transformers 5.23 has it
    (`models/*/configuration_*.py`); config: its numbers, of keys with those defaults. Raises CheckpointError.
    places: of its tensors, by ours of names, without what `prefix` finds at their beginnings; instead: places of some that go
    before, where the file holds one of them; mtp: places of the head that it may bring along, and of what may lie there
    instead; harmless: names that nobody needs.
    does: which of `folders.NEUTRAL` it does; aliases: other names of keys, which are turned into ours.
    beside: the model_type of files where it lies in text_config beside others, and whether its classifier is the embedding there.
    unused: names of what a file may hold that such a model does not need.
    """

    model_type: str
    defaults: Mapping[str, Any]
    config: Callable[[Values], Config]
    places: Places
    instead: Sequence[Places] = ()
    mtp: Sequence[Places] = ()
    prefix: re.Pattern[str] = PREFIX
    harmless: re.Pattern[str] = HARMLESS
    does: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, bool] = field(default_factory=dict)
    unused: Callable[[Config], Iterable[str]] = no_names


@dataclass(frozen=True)
class HeadInFolder:
    """A head that drafts, in a folder of its own.

    is_one: whether a config.json is that of one; config: its numbers, of that file, of its keys and by which tensors there are.
    Raises CheckpointError. places: of its tensors; ids: the tensor that says which ids its rows are of, "" where they need none;
    are_offsets: whether those count from a row's own number; in_order: tensors that hold their rows by ids, and are taken by
    rows; prefix, harmless, unused: as of `InFolder`; beside: what a folder is called that lies in a model's, and one beside it,
    "{}" for its name.
    """

    is_one: Callable[[Mapping[str, Any]], bool]
    config: Callable[[Path, Mapping[str, Any], Tensors], Config]
    places: Callable[[Config, Tensors], Places]
    ids: Callable[[Config, Tensors], str]
    are_offsets: bool = False
    in_order: tuple[str, ...] = ()
    prefix: re.Pattern[str] = PREFIX
    harmless: re.Pattern[str] = HARMLESS
    unused: Callable[[Config], Iterable[str]] = no_names
    beside: tuple[str, str] | None = None


class Keys(Values):
    """What a GGUF file says of a model: the keys of its architecture; the numbers that all families have, by `Config`'s names;
    and its tensors.
    """

    def __init__(self, path: Path, given: Mapping[str, Any], beginning: str, common: Mapping[str, Any], tensors: Tensors) -> None:
        super().__init__(path, given, beginning=beginning)
        self.common, self.tensors = common, tensors


@dataclass(frozen=True)
class InGguf:
    """A family in a GGUF file.

    architecture: its name there; config: its numbers. Raises CheckpointError. places, instead: as of a folder; mtp: places of the
    head that it may bring along in the layer behind its last, and of what may lie there instead. does: which of `ggufs.NEUTRAL`
    it does; by_layer: which of `ggufs.BY_LAYER` tell its layers apart; is_head: whether it is a head that drafts, for another
    file's model; ids: the tensor that says which ids a head's rows are of, where it has one; unused: as of a folder.
    """

    architecture: str
    config: Callable[[Keys], Config]
    places: Places
    instead: Sequence[Places] = ()
    mtp: Sequence[Places] = ()
    does: tuple[str, ...] = ()
    by_layer: tuple[str, ...] = ()
    is_head: bool = False
    ids: str = ""
    unused: Callable[[Config], Iterable[str]] = no_names


def chosen(places: Places, instead: Sequence[Places], source: Tensors, n_layers: int) -> dict[str, Place]:
    """Places in a source of so many layers: of those that go before, such as have their first tensor there."""
    found = dict(places)
    for others in instead:
        first = next(iter(others.values())).name
        if any(first.format(i, 0) in source for i in range(n_layers)):
            found |= others
    return found


class Template(NamedTuple):
    """A chat template that no file brings along, by the name that people give it.

    variables: bos_token and so on; whose: of which models, for people.
    """

    name: str
    source: str
    variables: Mapping[str, str]
    whose: str
