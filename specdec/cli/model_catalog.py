"""The models that are there: in models/ here and beside this file, and in the hub's cache. Reads headers, and no weights."""

import functools
import json
import math
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.config import Config
from specdec.draft.resolver import MTP
from specdec.draft.self_copy import is_worth_a_copy
from specdec.loaders import CheckpointError, hub, load_checkpoint
from specdec.loaders.builtin_heads import has_own_head
from specdec.loaders.gguf_shards import parts_of
from specdec.loaders.head_compatibility import fits
from specdec.loaders.model_lookup import model_folders, models_in
from specdec.model.registry import architecture_of
from specdec.text.vocabulary import MOST_PADDING

MOST_OF_A_TARGET = 0.5  # of its parameters, that a model has which is worth drafting with
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True)
class Entry:
    """A model, or a head that drafts for some.

    name: what -m, or of a head -d, takes; n_bytes: of its files; words: how ids are spelled, where files say; flaw: why it is
    neither; family: what its files call it; has_head: whether one that drafts for it lies in its own files; has_copy: whether a
    copy of it in fewer bits drafts for it (-d self).
    """

    name: str
    path: Path
    n_bytes: int
    config: Config | None = None
    words: dict[int, str] = field(default_factory=dict, repr=False)
    flaw: str = ""
    family: str = ""
    has_head: bool = False
    has_copy: bool = False

    @property
    def is_head(self) -> bool:
        """Whether it drafts for models and is none itself."""
        return bool(self.config and self.config.head)

    @property
    def n_parameters(self) -> int:
        return sum(self._sizes().values())

    @property
    def n_read(self) -> int:
        """Of the parameters those that a token goes through: of experts as many as it chooses."""
        experts = self.config and self.config.experts
        sizes = self._sizes()
        unread = sum(size for name, size in sizes.items() if ".experts_" in name) if experts else 0
        return sum(sizes.values()) - (unread // experts.n * (experts.n - experts.n_chosen) if experts else 0)

    def _sizes(self) -> dict[str, int]:
        """Of tensors, by name."""
        shapes = architecture_of(self.config).shapes(self.config) if self.config else {}
        return {name: math.prod(shape) for name, shape in shapes.items()}


def entries(place: Path | None = None) -> list[Entry]:
    """All that are found, each once, those of models/ first; or those of a folder, or a model alone. Raises CheckpointError."""
    return [_entry(name, path) for path, name in _found(place).items()]


def model_sizes() -> dict[str, int]:
    """Return the bytes of each model that can be loaded, by name. A header is read again only where its files have changed."""
    sizes = {name: _model_size(path, _stamp(path)) for path, name in _found().items()}
    return {name: size for name, size in sizes.items() if size}


def _found(place: Path | None = None) -> dict[Path, str]:
    """What there is, each once, and the name that -m takes."""
    found: dict[Path, str] = {}
    for name, path in _places_in(place) if place else places():
        if name not in found.values():  # -m takes the first of a name
            found.setdefault(path.resolve(), name)
    return found


@functools.lru_cache(4096)
def _model_size(path: Path, _: tuple[object, ...]) -> int:
    """Return the bytes of a model's files; 0 for a head, and for what cannot be read."""
    with suppress(CheckpointError, OSError):
        return 0 if load_checkpoint(path).config.head else _n_bytes(path)
    return 0


def _stamp(path: Path) -> tuple[object, ...]:
    """Return what changes when a model's files do."""
    with suppress(OSError):
        files = path.iterdir() if path.is_dir() else [path.with_name(name) for name in parts_of(path.name)]
        stats = [(file.name, file.stat()) for file in files if file.exists()]
        return tuple(sorted((name, one.st_mtime_ns, one.st_size) for name, one in stats))
    return ()


def _n_bytes(path: Path) -> int:
    """Return the bytes of a model's files."""
    files = [path] if path.is_file() else [file for pattern in WEIGHTS for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in files if file.exists())


def row_of(entry: Entry, found: Sequence[Entry]) -> dict[str, Any]:
    """What is told of one that can be read, among all that are there."""
    config = entry.config
    assert config
    head = config.head and {
        "width": config.head.target_dim,
        "layers": config.head.layers,
        "targets": [other.name for other in found if _drafts_for(entry, other)],
    }
    return {
        "name": entry.name,
        "path": str(entry.path),
        "family": entry.family or config.architecture,
        "architecture": config.architecture,
        "layers": config.n_layers,
        "dim": config.dim,
        "parameters": entry.n_parameters,
        "parameters_read": entry.n_read,
        "bytes": entry.n_bytes,
        "vocabulary": config.vocab_size,
        "context": config.seq_len,
        "drafts": [*[MTP][: entry.has_head], *(other.name for other in drafts_for(entry, found))],
        "self": entry.has_copy,
        "head": head,
    }


def drafts_for(target: Entry, others: Sequence[Entry]) -> list[Entry]:
    """Heads that fit it, and models that are much smaller and spell their ids as it does, as far as files tell; largest first."""
    drafts = [other for other in others if _drafts_for(other, target)]
    return sorted(drafts, key=lambda other: (not other.is_head, -other.n_parameters))


def _drafts_for(one: Entry, target: Entry) -> bool:
    if not one.config or not target.config or target.is_head:
        return False
    if one.is_head:
        return fits(one.config, target.config)
    return one.n_parameters <= MOST_OF_A_TARGET * target.n_parameters and _are_alike(one, target)


def _are_alike(one: Entry, other: Entry) -> bool:
    if not one.config or not other.config or bool(one.words) != bool(other.words):
        return False
    if not one.words:
        return one.config.vocab_size == other.config.vocab_size
    is_near = abs(len(one.words) - len(other.words)) <= MOST_PADDING
    return is_near and all(one.words[token] == other.words[token] for token in one.words.keys() & other.words.keys())


def places() -> Iterator[tuple[str, Path]]:
    """The names of what is there, and where; of several of a name -m takes the first."""
    for folder in model_folders():
        with suppress(OSError):
            yield from ((path.name, path) for path in models_in(folder))
    yield from hub.cached_models()


def _places_in(place: Path) -> list[tuple[str, Path]]:
    try:
        is_model = (place / "config.json").is_file() or not stat.S_ISDIR(place.stat().st_mode)
        return [(str(path), path) for path in ([place] if is_model else models_in(place))]
    except OSError as error:
        raise CheckpointError(f"cannot list {place}: {error.strerror}; expected a folder, a model, or pull, rm, name") from None


def _entry(name: str, path: Path) -> Entry:
    n_bytes = _n_bytes(path)
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError as error:
        return Entry(name, path, n_bytes, flaw=str(error))
    words = dict(enumerate(checkpoint.vocabulary.get("tokens", ()))) if checkpoint.vocabulary else _words(path)
    family, has_head = checkpoint.family, has_own_head(checkpoint)
    has_copy = not checkpoint.config.head and is_worth_a_copy(checkpoint.config, checkpoint.tensors)
    return Entry(name, path, n_bytes, checkpoint.config, words, family=family, has_head=has_head, has_copy=has_copy)


def _words(path: Path) -> dict[int, str]:
    """How a folder's tokenizer spells its ids; nothing where there is none."""
    try:
        vocabulary = json.loads((path / "tokenizer.json").read_bytes())["model"]["vocab"]
        return {token: word for word, token in vocabulary.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
