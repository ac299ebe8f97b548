"""A GGUF file, or several that are one model, to a `Checkpoint`: what its keys say of the model, and which tensor is which.

Keys, names and what a silent file means are llama.cpp's (gguf-py's constants.py, src/llama-model.cpp). Whatever changes the
arithmetic is either done or refused by name; other keys are not looked at.
"""

from pathlib import Path
from typing import Any

from specdec.config import Config
from specdec.families import GGUFS, Keys
from specdec.families.config_values import WIDEST, CheckpointError, Values, check_neutral, shown
from specdec.families.family import chosen
from specdec.families.gguf_common import BY_LAYER, EMBEDDING, EXPERT_DIM, HEAD, MLP_DIM, NEUTRAL, NEXTN
from specdec.families.hf_common import MOST_LAYERS
from specdec.families.pre_tokenizers import special_tokens_strip
from specdec.loaders.checkpoint import Checkpoint, ModelFile, advised
from specdec.loaders.gguf_file import MAGIC, GgufFile
from specdec.loaders.gguf_shards import parts_of
from specdec.loaders.head_compatibility import check_rows, checked_ids
from specdec.loaders.tensor_assembly import are_equal, tensors_of
from specdec.loaders.tensor_index import NamedTensors
from specdec.tokenizer import STRIPS
from specdec.validation import reading

ARCHITECTURE, TYPE = "general.architecture", "general.type"
OTHER_TYPES = {  # of files that hold no model
    "adapter": "an adapter (LoRA) alone; merge it into its model with llama.cpp's llama-export-lora",
    "mmproj": "the part of a model that reads images; name the GGUF file of the model itself",
    "clip": "the part of a model that reads images; name the GGUF file of the model itself",
    "imatrix": "an importance matrix, which is for quantizing; name the GGUF file of a model",
}
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
    prefixes = tuple(f"blk.{config.n_layers + i}." for i in range(model.n_nextn))
    behind = [name for name in model if name.startswith(prefixes)]
    if behind and not any(".nextn." in name for name in behind):
        raise CheckpointError(f"{path}: {NEXTN} is {model.n_nextn}; the layer of {behind[0]} is one of the model's own")
    model.leave_out([*behind, *model.family.unused(config)])
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
        if other := OTHER_TYPES.get(str(self.keys.get(TYPE))) or OTHER_TYPES.get(str(architecture)):
            raise CheckpointError(f"{path} holds {other}")
        if not isinstance(architecture, str) or architecture not in GGUFS:
            told = f"{ARCHITECTURE} {shown(architecture)} is not supported; supported: {', '.join(sorted(GGUFS))}"
            raise CheckpointError(f"{path}: {told}")
        self.family = GGUFS[architecture]
        # layers behind those of the model, which draft
        self.n_nextn = Values(path, self.keys, beginning=f"{architecture}.").count(NEXTN) if self.family.mtp else 0

    def tensor(self, name: str, shape: tuple[int, ...], *types: Any) -> Any:
        """Writers of ggml's, its quantizer among them, leave out an outermost length of 1."""
        if shape[0] == 1 and self.shape(name) == shape[1:]:
            return super().tensor(name, shape[1:], *types).flat()
        return super().tensor(name, shape, *types)

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
        with reading(path, CheckpointError):
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
    family, a = model.family, f"{model.family.architecture}."
    said = Values(model.path, model.keys, beginning=a)
    check_neutral(said, {key: neutral for key, neutral in NEUTRAL.items() if key not in family.does})
    rows = _rows(model, said, is_borrowed=family.is_head and EMBEDDING not in model)
    n_blocks = said.whole("block_count", most=MOST_LAYERS)
    lists = {key: said[key] for key in BY_LAYER if key not in family.by_layer and isinstance(said[key], list)}
    one_of_list = {a + key: numbers[0] for key, numbers in lists.items() if numbers and numbers == numbers[:1] * n_blocks}
    given = model.keys | one_of_list
    said = Values(model.path, given, beginning=a)
    # of an MLP; 1 where each layer's own is told
    width = 1 if isinstance(said[MLP_DIM], list) and MLP_DIM in family.by_layer else None
    common: dict[str, Any] = {
        "dim": said.whole("embedding_length", most=WIDEST),
        "hidden_dim": width or said.whole(MLP_DIM if MLP_DIM in said else EXPERT_DIM),
        "n_layers": n_blocks - model.n_nextn,
        "n_heads": said.whole("attention.head_count"),
        "seq_len": said.whole("context_length"),
        "vocab_size": rows,
        "shared_classifier": not family.is_head and (HEAD not in model or model.is_twice(EMBEDDING, HEAD)),
    }
    config = family.config(Keys(model.path, given, a, common, model))
    if flaw := config.flaw():
        raise CheckpointError(f"{model.path} describes no model: {flaw}")
    if config.head:
        check_rows(config.head, rows, model.family.ids in model, f"{model.path}")
    return config


def _rows(model: Model, said: Values, is_borrowed: bool) -> int:
    """How many ids there are: rows of the table of tokens, whatever the keys say, or what they say where it is borrowed."""
    tokens, key = model.keys.get(TOKENS), "vocab_size"
    if is_borrowed:
        return said.whole(key) if key in said or not isinstance(tokens, list) else len(tokens)
    rows = model.shape(EMBEDDING)[0]
    if key in said and said[key] != rows:
        raise said.refusal(key, f"{rows}, the rows of {EMBEDDING}")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise CheckpointError(f"{said.path}: {TOKENS} are {len(tokens)}; expected {rows}, the rows of {EMBEDDING}")
    return rows
