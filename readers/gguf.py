"""A GGUF file, or several that are one model, to a `Checkpoint`: what its keys say of the model, and which tensor is which.

Keys, names and what a silent file means are llama.cpp's (gguf-py's constants.py, src/llama-model.cpp). Whatever changes the
arithmetic is either done or refused by name; other keys are not looked at.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..architectures import Config
from ..families import GGUFS, Keys
from ..families.family import chosen
from ..families.folders import MOST_LAYERS
from ..families.ggufs import BY_LAYER, EMBEDDING, EXPERT_DIM, HEAD, NEUTRAL, NEXTN
from ..families.splits import special_tokens_strip
from ..families.values import CheckpointError, Values, shown
from ..tokenizer import STRIPS
from .gguf_file import MAGIC, GgufFile
from .heads import check_rows, checked_ids
from .model_file import Checkpoint, ModelFile, advised, telling_os_errors
from .named_tensors import NamedTensors
from .parts import parts_of
from .places import are_equal, tensors_of

ARCHITECTURE = "general.architecture"
VOCABULARY, TOKENS, CHAT_TEMPLATE = "tokenizer.ggml.", "tokenizer.ggml.tokens", "tokenizer.chat_template"
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS = 99999
POOLINGS = {"1": "mean", "2": "cls", "3": "last"}
SAMPLING = {
    "temperature": "general.sampling.temp", "top_p": "general.sampling.top_p", "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip


def is_gguf(path: Path) -> bool:
    """By the first bytes of a file, or by its name. Raises CheckpointError for one that cannot be read."""
    file = ModelFile(path)
    return path.suffix == ".gguf" or file.read(0, min(len(MAGIC), file.size)).tobytes() == MAGIC


def read_vocabulary(path: Path) -> dict[str, Any]:
    """What a GGUF file's keys say of a tokenizer, without their common beginning; nothing of another file."""
    return _vocabulary(GgufFile(path)) if is_gguf(path) else {}


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a file, and the others that it is split into, after checking all that their headers can tell.

    Raises CheckpointError for anything but a complete and consistent model; numbers are checked when they are read.
    """
    model = Model(path)
    if model.n_nextn and not any(name.startswith("blk.0.") for name in model):
        raise CheckpointError(f"{path} holds an MTP head without its model; name a file of both, with which it drafts by itself")
    config = config_of(model)
    tensors = tensors_of(config, chosen(model.family.places, model.family.instead, model, config.n_layers), model)
    ids = None
    if config.head and (told := model.family.ids) in model:
        ids = checked_ids(model.integers(told, config.head.n_rows), config.vocab_size, model.told(told))
    model.leave_out([*(f"blk.{config.n_layers + i}." for i in range(model.n_nextn)), *model.family.unused(config)])
    model.check_all_used()
    if config.head:  # whose tokenizer, where the file has one, is the target's
        return Checkpoint(path, config, tensors, target_ids=ids)
    template = model.keys.get(CHAT_TEMPLATE)
    return Checkpoint(
        path, config, tensors, vocabulary=_vocabulary(model.first), family=model.family.architecture, mtp=model.family.mtp,
        chat_template=template if isinstance(template, str) else None, sampling=advised(model.keys, SAMPLING),
        pooling=POOLINGS.get(str(model.keys.get(f"{model.family.architecture}.pooling_type")), ""),
    )  # fmt: skip


class Model(NamedTensors[GgufFile]):
    """The keys of a model's first file, and the tensors of all. Raises CheckpointError for parts that do not fit together."""

    needed, said, described = "its keys need", "the keys say", "the keys describe"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.first = GgufFile(path)
        self.keys = self.first.keys
        for file in _parts(self.first):
            for name in file.entries:
                if name in self:
                    raise CheckpointError(f"{file.path} holds the tensor {shown(name)}, as {self._sources[name][0].path} does")
                self._sources[name] = file, name
        n, expected = len(self._sources), self.keys.get(SPLIT_TENSORS)
        if expected is not None and expected != n:
            raise CheckpointError(f"{path}: {SPLIT_TENSORS} is {shown(expected)}; its parts hold {n} tensors")
        architecture = self.keys.get(ARCHITECTURE)
        if not isinstance(architecture, str) or architecture not in GGUFS:
            raise CheckpointError(f"{path}: {ARCHITECTURE} is {shown(architecture)}; there are {', '.join(GGUFS)}")
        self.family = GGUFS[architecture]
        nextn = f"{architecture}.{NEXTN}"
        is_there = self.family.mtp and self.keys.get(nextn, 0) != 0
        # layers behind those of the model, which draft
        self.n_nextn = Values(path, self.keys, {}).whole(nextn) if is_there else 0

    def leave_out(self, beginnings: Iterable[str]) -> None:
        """Tensors whose names begin so are not needed."""
        starts = (*beginnings,)
        self._used |= {name for name in self if name.startswith(starts)}

    def is_twice(self, name: str, other: str) -> bool:
        """Whether two tensors are one; then the second is left out."""
        a, b = (self._sources[each][0] for each in (name, other))
        result = a.entries[name][:2] == b.entries[other][:2] and are_equal(a.stored(name), b.stored(other))
        if result:
            self._used.add(other)
        return result


def _parts(first: GgufFile) -> list[GgufFile]:
    """All files of the model that begins with that one."""
    count, number = (Values(first.path, first.keys, {key: 0})[key] for key in (SPLIT_COUNT, SPLIT_NUMBER))
    if type(count) is not int or not 0 <= count <= MOST_PARTS:
        raise CheckpointError(f"{first.path}: {SPLIT_COUNT} is {shown(count)}; expected 1 to {MOST_PARTS}")
    if count <= 1:
        return [first]
    paths = [first.path.with_name(name) for name in parts_of(first.path.name)]
    if len(paths) != count:
        raise CheckpointError(f"{first.path} is one of {count} parts; expected a name that ends in -00001-of-{count:05}.gguf")
    if number != 0:
        raise CheckpointError(f"{first.path} is a later part of {count}; name the first, {paths[0]}")
    files = [first]
    for i, path in enumerate(paths[1:], 1):
        with telling_os_errors(path):
            if not path.exists():
                raise CheckpointError(f"{path} is missing, which is a part of {first.path.name}; download it again, whole")
        files.append(GgufFile(path))
        if (told := files[-1].keys.get(SPLIT_NUMBER)) != i:
            raise CheckpointError(f"{path}: {SPLIT_NUMBER} is {shown(told)}; expected {i}")
    return files


def _vocabulary(file: GgufFile) -> dict[str, Any]:
    """Also whether special tokens take the white space behind them."""
    own = {key.removeprefix(VOCABULARY): value for key, value in file.keys.items() if key.startswith(VOCABULARY)}
    return own | {STRIPS: True} if own and special_tokens_strip(file.keys) else own


def config_of(model: Model) -> Config:
    """What the keys, and the tensors that are there or not, say of the model."""
    a, values = model.family.architecture, Values(model.path, model.keys, {TOKENS: None})
    for key, neutral in NEUTRAL.items():
        if f"{a}.{key}" in values and key not in model.family.does:
            values.must_be(f"{a}.{key}", *neutral)
    rows = _rows(model, values, f"{a}.vocab_size", is_borrowed=model.family.is_head and EMBEDDING not in model)
    n_blocks = values.whole(f"{a}.block_count", MOST_LAYERS)
    values = values.with_one_of_lists([f"{a}.{key}" for key in BY_LAYER if key not in model.family.by_layer], n_blocks)
    common: dict[str, Any] = {
        "dim": values.whole(f"{a}.embedding_length"),
        "hidden_dim": _width(model, values, f"{a}.feed_forward_length", f"{a}.{EXPERT_DIM}"),
        "n_layers": n_blocks - model.n_nextn,
        "n_heads": values.whole(f"{a}.attention.head_count"),
        "seq_len": values.whole(f"{a}.context_length"),
        "vocab_size": rows,
        "shared_classifier": not model.family.is_head and (HEAD not in model or model.is_twice(EMBEDDING, HEAD)),
    }
    config = model.family.config(Keys(a, values, common, model))
    if flaw := config.flaw():
        raise CheckpointError(f"{model.path} describes no model: {flaw}")
    if config.head:
        check_rows(config.head, rows, model.family.ids in model, f"{model.path}")
    return config


def _width(model: Model, values: Values, key: str, otherwise: str) -> int:
    """Of an MLP; 1 where each layer's own is told."""
    if "feed_forward_length" in model.family.by_layer and isinstance(values[key], list):
        return 1
    return values.whole(key if key in values else otherwise)


def _rows(model: Model, values: Values, key: str, is_borrowed: bool) -> int:
    """How many ids there are: rows of the table of tokens, whatever the keys say, or what they say where it is borrowed."""
    tokens = values[TOKENS]
    if is_borrowed:
        return values.whole(key) if key in values or not isinstance(tokens, list) else len(tokens)
    rows = model.shape(EMBEDDING)[0]
    if key in values and values[key] != rows:
        raise values.refusal(key, f"{rows}, the rows of {EMBEDDING}")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise CheckpointError(f"{values.path}: {TOKENS} are {len(tokens)}; expected {rows}, the rows of {EMBEDDING}")
    return rows
