"""The installed models, in the models/ folders and the hub's cache; reads headers, and no weights."""

import functools
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from specdec.argument_checks import JSONDict
from specdec.draft.model_bundle import MTP
from specdec.draft.self_copy import can_self_draft
from specdec.draft.settings import parse_quantize
from specdec.loaders import MTP_PREFIX, Checkpoint, CheckpointError, hf_hub, load_builtin_head, load_checkpoint
from specdec.loaders.head_checkpoint import find_incompatibility
from specdec.loaders.model_aliases import read_aliases
from specdec.loaders.model_file import list_shards
from specdec.loaders.model_paths import find_local, get_model_folders, list_model_paths
from specdec.model import count_parameters, get_architecture
from specdec.model.model import count_kv_bytes_per_token
from specdec.model_config import ModelConfig
from specdec.text.chat_template import TemplateError, load_chat_template
from specdec.text.tokenizer_lookup import MAX_PADDING_ROWS
from specdec.tokenizer import TokenizerError

MAX_DRAFT_SIZE_RATIO = 0.5  # parameters of a draft, relative to the target's
DRAFT_NAME = re.compile(rf"^{MTP_PREFIX}|[-_.](assistant|draft|mtp|eagle3?)\b", re.IGNORECASE)
LOAD_BYTES_PER_S = 1.2e9  # typical speed of reading and packing a file on two cores
MAX_NEIGHBOURS = 4  # whose headers are read to find a draft
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True)
class CatalogEntry:
    """An entry in the list of installed models: a model, or a draft head, which drafts for some models.

    Attributes:
        name: Name for -m, or for -d if it is a head.
        path: File or folder.
        n_bytes: Size of its files.
        matrix_bytes: Size in memory of each matrix, by name; a matrix of experts holds all of a layer's.
        config: Parsed config, None if it cannot be read.
        token_texts: Text of each id, where the files have one.
        error: Why it cannot be used; "" if it can.
        family: Name of its family in its files.
        builtin_head: Path of the head that drafts for it: of its own files, or next to them; None without one.
        can_self_draft: Whether a quantized copy of it can draft for it (-d self).
        draft_formats: The weight formats in which it drafts without --quantize.
        draft_bytes: Size in memory of its matrices in these formats.
    """

    name: str
    path: Path
    n_bytes: int
    matrix_bytes: dict[str, int] = field(default_factory=dict, repr=False)
    config: ModelConfig | None = None
    token_texts: dict[int, str] = field(default_factory=dict, repr=False)
    error: str = ""
    family: str = ""
    builtin_head: Path | None = None
    can_self_draft: bool = False
    draft_formats: str = ""
    draft_bytes: int = 0

    @property
    def is_head(self) -> bool:
        """Whether the entry is a draft head rather than a model."""
        return bool(self.config and self.config.head)

    @property
    def n_parameters(self) -> int:
        """The number of parameters of the model, 0 if its config cannot be read."""
        return count_parameters(self.config) if self.config else 0

    @property
    def n_active_parameters(self) -> int:
        """The number of parameters that one token uses: in a mixture of experts, only the chosen experts count."""
        return self._count_active(self._get_tensor_sizes())

    @property
    def n_bytes_per_token(self) -> int:
        """The bytes of weights that one token reads: the chosen experts, and of an embedding that is no classifier one row."""
        return self._count_active({name: n for name, n in self.matrix_bytes.items() if not name.startswith("embedding")})

    def _count_active(self, sizes: Mapping[str, int]) -> int:
        """Return the sum of the sizes of tensors or matrices, by name, in which only the chosen experts count."""
        experts = self.config and self.config.experts
        n_expert_items = sum(size for name, size in sizes.items() if ".experts_" in name) if experts else 0
        return sum(sizes.values()) - (
            n_expert_items // experts.n_experts * (experts.n_experts - experts.n_experts_used) if experts else 0
        )

    def _get_tensor_sizes(self) -> dict[str, int]:
        """Return the number of elements of each tensor, by name."""
        shapes = get_architecture(self.config).shapes(self.config) if self.config else {}
        return {name: math.prod(shape) for name, shape in shapes.items()}


def list_entries(folder: Path | None = None) -> list[CatalogEntry]:
    """Return an entry for each installed model or draft head, those of models/ first, also for those that cannot be read.

    Args:
        folder: A folder or a single model to list instead.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    return [_read_entry(name, path) for path, name in _find_models(folder).items()]


def get_model_sizes(folder: Path | None = None) -> dict[str, int]:
    """Return the size in bytes of each model that can be loaded, by name: of all installed ones and aliases, or of a folder's.

    Models with a chat template come first. A model's header is read again only if its files have changed.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    paths = {Path(name).name if folder else name: path for path, name in _find_models(folder).items()}
    for alias, model in () if folder else read_aliases().items():
        with suppress(CheckpointError):
            if alias not in paths and (path := find_local(model)):
                paths[alias] = path
    facts = {name: _read_facts(path, _get_fingerprint(path)) for name, path in paths.items()}
    chats_first = sorted(facts.items(), key=lambda item: not item[1][1])
    return {name: size for name, (size, _) in chats_first if size}


def _find_models(folder: Path | None = None) -> dict[Path, str]:
    """Return the paths of the installed models, or of those in a folder, each once, with their names for -m."""
    found: dict[Path, str] = {}
    for name, path in _list_folder(folder) if folder else list_installed():
        if name not in found.values():  # -m takes the first of a name
            found.setdefault(path.resolve(), name)
    return found


@functools.lru_cache(4096)
def _read_facts(path: Path, _: tuple[object, ...]) -> tuple[int, bool]:
    """Return the size of a model's weights in bytes and whether it has a chat template; 0 for what cannot be served.

    That is a draft head, or files that cannot be read. Results are cached by path and by the second argument, the fingerprint of
    the files: a GGUF header with the vocabulary of Llama 3 takes 0.26 s to read.
    """
    try:
        checkpoint = load_checkpoint(path)
        n_bytes = 0 if checkpoint.config.head else _count_bytes(path)
    except (CheckpointError, OSError):
        return 0, False
    try:
        load_chat_template(checkpoint, path)
    except (TemplateError, TokenizerError):
        return n_bytes, False
    return n_bytes, True


def _get_fingerprint(path: Path) -> tuple[object, ...]:
    """Return a hashable value that changes when a model's files do: their names, times and sizes."""
    with suppress(OSError):
        files = path.iterdir() if path.is_dir() else list_shards(path)
        stats = [(file.name, file.stat()) for file in files if file.exists()]
        return tuple(sorted((name, one.st_mtime_ns, one.st_size) for name, one in stats))
    return ()


def _count_bytes(path: Path) -> int:
    """Return the total size of a model's weight files in bytes."""
    files = [path] if path.is_file() else [file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in files if file.exists())


def make_row(entry: CatalogEntry, found: Sequence[CatalogEntry]) -> JSONDict:
    """Return a dict for JSON that describes an installed model or draft head, with the drafts or targets that fit it.

    Args:
        entry: An entry with a config.
        found: All entries, among which the entry's drafts or targets are searched.
    """
    config = entry.config
    assert config
    head = config.head and {
        "width": config.head.target_dim,
        "layers": config.head.target_layers,
        "targets": [other.name for other in found if _can_draft_for(entry, other)],
    }
    return {
        "name": entry.name,
        "path": str(entry.path),
        "family": entry.family or config.architecture,
        "architecture": config.architecture,
        "layers": config.n_layers,
        "dim": config.dim,
        "parameters": entry.n_parameters,
        "parameters_read": entry.n_active_parameters,
        "kv_bytes_per_token": count_kv_bytes_per_token(config, "f16"),
        "bytes": entry.n_bytes,
        "memory_bytes": sum(entry.matrix_bytes.values()),
        "bytes_per_token": entry.n_bytes_per_token,
        "vocabulary": config.vocab_size,
        "context": config.seq_len,
        "drafts": [*[MTP][: bool(entry.builtin_head)], *(other.name for other in find_drafts(entry, found))],
        "self": entry.can_self_draft,
        "as_draft": {
            "weights": entry.draft_formats,
            "memory_bytes": entry.draft_bytes,
            "load_seconds": round(entry.n_bytes / LOAD_BYTES_PER_S, 2),
            "fits": any(_can_draft_for(entry, other) for other in found),
        },
        "head": head,
    }


def find_drafts(target: CatalogEntry, others: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    """Return the heads and the much smaller models with the same vocabulary that can draft for a target.

    Heads come first, then models from large to small. The decision uses the files' metadata alone.
    """
    drafts = [other for other in others if _can_draft_for(other, target)]
    return sorted(drafts, key=lambda other: (not other.is_head, -other.n_parameters))


def find_neighbour_draft(target: Path) -> Path | None:
    """Return the path of a draft next to a target: one with the name of a draft, else the smallest one that fits, or None.

    A target with a head in its own files needs none. At most MAX_NEIGHBOURS models are opened.
    """
    with suppress(OSError):
        max_bytes = MAX_DRAFT_SIZE_RATIO * _count_bytes(target)
        sizes = {path: _count_bytes(path) for path in list_model_paths(target.parent) if path != target}
        possible = [path for path, n_bytes in sizes.items() if 0 < n_bytes <= max_bytes or DRAFT_NAME.search(path.name)]
        likely = sorted(possible, key=lambda path: (not DRAFT_NAME.search(path.name), sizes[path]))[:MAX_NEIGHBOURS]
        entry = _read_entry(target.name, target) if likely else None
        if entry and entry.builtin_head:
            return entry.builtin_head if entry.builtin_head != target else None
        if entry:
            return next((path for path in likely if _can_draft_for(_read_entry(path.name, path), entry)), None)
    return None


def _can_draft_for(draft: CatalogEntry, target: CatalogEntry) -> bool:
    if not draft.config or not target.config or target.is_head:
        return False
    if draft.is_head:
        return not find_incompatibility(draft.config, target.config)
    return draft.n_parameters <= MAX_DRAFT_SIZE_RATIO * target.n_parameters and _have_same_vocabulary(draft, target)


def _have_same_vocabulary(one: CatalogEntry, other: CatalogEntry) -> bool:
    if not one.config or not other.config or bool(one.token_texts) != bool(other.token_texts):
        return False
    if not one.token_texts:
        return one.config.vocab_size == other.config.vocab_size
    is_near = abs(len(one.token_texts) - len(other.token_texts)) <= MAX_PADDING_ROWS
    return is_near and all(
        one.token_texts[token] == other.token_texts[token] for token in one.token_texts.keys() & other.token_texts.keys()
    )


def list_installed() -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each installed model, in models/ and then in the hub's cache; -m takes the first of a name."""
    for folder in get_model_folders():
        with suppress(OSError):
            yield from ((path.name, path) for path in list_model_paths(folder))
    yield from hf_hub.list_cached_models()


def _list_folder(folder: Path) -> list[tuple[str, Path]]:
    try:
        is_model = (folder / "config.json").is_file() or not stat.S_ISDIR(folder.stat().st_mode)
        return [(str(path), path) for path in ([folder] if is_model else list_model_paths(folder))]
    except OSError as error:
        raise CheckpointError(
            f"cannot list {folder}: {error.strerror}; expected a folder, a model, or the action pull, rm, name or clean"
        ) from None


def _read_entry(name: str, path: Path) -> CatalogEntry:
    n_bytes = _count_bytes(path)
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError as error:
        return CatalogEntry(name, path, n_bytes, error=str(error))
    token_texts = dict(enumerate(checkpoint.vocabulary.get("tokens", ()))) if checkpoint.vocabulary else _read_token_texts(path)
    plan = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors)
    draft_plan = replace(plan, weight_format=parse_quantize("draft").choose_draft_format(checkpoint))
    head: Checkpoint | None = None
    with suppress(CheckpointError):
        head = load_builtin_head(checkpoint)
    has_copy = not checkpoint.config.head and can_self_draft(checkpoint.config, checkpoint.tensors)
    return CatalogEntry(
        name, path, n_bytes, plan.count_matrix_bytes(), checkpoint.config, token_texts,
        family=checkpoint.family, builtin_head=head.path if head else None, can_self_draft=has_copy,
        draft_formats=" and ".join(sorted({*draft_plan.format_names})), draft_bytes=draft_plan.estimate_bytes(),
    )  # fmt: skip


def _read_token_texts(path: Path) -> dict[int, str]:
    """Return the token text of each id in the tokenizer.json of a folder; empty if there is none that can be read."""
    try:
        vocabulary = json.loads((path / "tokenizer.json").read_bytes())["model"]["vocab"]
        return {token: text for text, token in vocabulary.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
