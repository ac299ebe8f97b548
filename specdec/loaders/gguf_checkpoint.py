"""Open a GGUF file, or the shards of a split one, as a `Checkpoint`: map its metadata to a config, and its tensors to ours.

Keys, names and defaults are llama.cpp's (gguf-py's constants.py, src/llama-model.cpp). A key that changes the arithmetic is
either supported or rejected by name; other keys are ignored.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from specdec.argument_checks import CheckpointError, JSONDict, format_json_value, wrap_read_errors
from specdec.families import DFLASH, load_definition, load_definitions
from specdec.families.config_values import MAX_DIM, ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata
from specdec.families.gguf_common import (
    EMBEDDING,
    EXPERT_DIM_KEY,
    HEADS_KEY,
    LM_HEAD,
    MLP_DIM_KEY,
    NEXTN_LAYERS_KEY,
    PER_LAYER_KEYS,
    check_unsupported_keys,
)
from specdec.families.hf_common import MAX_LAYERS
from specdec.families.pre_tokenizers import has_rstrip_special_tokens
from specdec.families.tensor_specs import select_tensor_specs
from specdec.loaders import import_reader
from specdec.loaders.checkpoint import FLOATS, Checkpoint, Dtype, check_id_map, check_target_ids, parse_default_sampling
from specdec.loaders.gguf_blocks import BlockTensor
from specdec.loaders.gguf_file import GGUFFile
from specdec.loaders.model_file import list_shard_names
from specdec.loaders.rerankers import find_rerank_template, read_rerank_head
from specdec.loaders.tensor_assembly import TensorIndex, assemble_tensors, is_equal
from specdec.model_config import ModelConfig
from specdec.quant.gguf_repacking import MAX_NVFP4_TENSOR_SCALE, NVFP4
from specdec.quant.packed_matrix import to_float32
from specdec.runtime.simd import Float32
from specdec.tokenizer import SPECIAL_TOKENS_STRIP_KEY

ARCHITECTURE_KEY, TYPE_KEY = "general.architecture", "general.type"
NON_MODEL_TYPES = {  # files that do not hold a language model
    "adapter": "an adapter (LoRA) alone; merge it into its model with llama.cpp's llama-export-lora",
    "mmproj": "the part of a model that reads images; name the GGUF file of the model itself",
    "clip": "the part of a model that reads images; name the GGUF file of the model itself",
    "imatrix": "an importance matrix, which is for quantizing; name the GGUF file of a model",
    "dflash": DFLASH,
}
TOKENIZER_PREFIX, TOKENS_KEY, CHAT_TEMPLATE_KEY = "tokenizer.ggml.", "tokenizer.ggml.tokens", "tokenizer.chat_template"
TOOL_TEMPLATE_KEY = f"{CHAT_TEMPLATE_KEY}.tool_use"
SPLIT_NUMBER_KEY, SPLIT_COUNT_KEY, SPLIT_TENSORS_KEY = "split.no", "split.count", "split.tensors.count"
MAX_SHARDS = 99999
RERANK_HEAD = "cls.output.weight"
POOLING_TYPES = {"1": "mean", "2": "cls", "3": "last"}
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp", "top_p": "general.sampling.top_p", "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip


def read_vocabulary(path: Path) -> JSONDict:
    """Return the tokenizer's metadata in a GGUF file, by key without the prefix tokenizer.ggml.

    Raises:
        CheckpointError: The file cannot be read or is damaged.
    """
    return _get_vocabulary(GGUFFile(path))


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file and its shards as a `Checkpoint`, after checking everything that their headers show.

    Raises:
        CheckpointError: The model is not complete and consistent. Weights are checked when they are read.
    """
    model = GGUFModel(path)
    config = read_config(model)
    if model.is_mtp_head:
        return cast(Checkpoint, import_reader("head_checkpoint").assemble_gguf_head(model, config))
    model.read_layer_numbers(config.n_layers)
    tensors = assemble_tensors(
        config, select_tensor_specs(model.family.tensor_specs, model.family.alternatives, model, config.n_layers), model
    )
    ids = None
    if config.head and (id_map := model.family.id_map_name) in model:
        ids = check_target_ids(
            model.read_integers(id_map, config.head.draft_vocab_size), config.vocab_size, model.describe(id_map)
        )
    prefixes = tuple(f"blk.{config.n_layers + i}." for i in range(model.n_nextn))
    extra = [name for name in model if name.startswith(prefixes)]
    if extra and not any(".nextn." in name for name in extra):
        raise CheckpointError(f"{path}: {NEXTN_LAYERS_KEY} is {model.n_nextn}; the layer of {extra[0]} is one of the model's own")
    model.ignore([*extra, *model.family.list_unused(config)])
    rerank_template = find_rerank_template(path, model.family.name, model.metadata)
    rerank_head = read_rerank_head(model, RERANK_HEAD, config.dim) if rerank_template else None
    model.check_all_used()
    if config.head:  # it uses the target's tokenizer, even if the file has one
        return Checkpoint(path, config, tensors, target_ids=ids)
    template, tool_template = (model.metadata.get(key) for key in (CHAT_TEMPLATE_KEY, TOOL_TEMPLATE_KEY))
    return Checkpoint(
        path, config, tensors, vocabulary=_get_vocabulary(model.first_file), family=model.family.name,
        mtp_specs=model.family.mtp_specs,
        chat_template=template if isinstance(template, str) else None,
        tool_template=tool_template if isinstance(tool_template, str) else None,
        default_sampling=parse_default_sampling(model.metadata, SAMPLING_KEYS),
        pooling=POOLING_TYPES.get(str(model.metadata.get(f"{model.family.name}.pooling_type")), ""),
        rerank_template=rerank_template, rerank_head=rerank_head,
    )  # fmt: skip


class GGUFModel(TensorIndex[GGUFFile]):
    """A model in one or several GGUF files: the metadata of the first file, and an index of the tensors of all shards.

    Raises CheckpointError if shards are missing or do not match, or if the architecture is not supported.
    """

    need_phrase, shape_phrase, model_phrase = "its keys need", "the keys say", "the keys describe"

    def __init__(self, path: Path) -> None:
        """Open all shards, check that they belong together, and find the family."""
        super().__init__(path)
        self.first_file = GGUFFile(path)
        self.metadata = self.first_file.metadata
        for file in _open_shards(self.first_file):
            for name in file.entries:
                if name in self:
                    raise CheckpointError(
                        f"{file.path} holds the tensor {format_json_value(name)}, as {self._sources[name][0].path} does"
                    )
                self._sources[name] = file, name
        n, expected = len(self._sources), self.metadata.get(SPLIT_TENSORS_KEY)
        if expected is not None and expected != n:
            raise CheckpointError(f"{path}: {SPLIT_TENSORS_KEY} is {format_json_value(expected)}; its shards hold {n} tensors")
        architecture = self.metadata.get(ARCHITECTURE_KEY)
        if other := NON_MODEL_TYPES.get(str(self.metadata.get(TYPE_KEY))) or NON_MODEL_TYPES.get(str(architecture)):
            raise CheckpointError(f"{path} holds {other}")
        if not (family := load_definition(GGUFFamily, architecture)):
            names = ", ".join(sorted(each.name for each in load_definitions(GGUFFamily)))
            raise CheckpointError(
                f"{path}: {ARCHITECTURE_KEY} {format_json_value(architecture)} is not supported; supported: {names}"
            )
        self.family = family
        self._layer_numbers = dict[str, Float32]()
        # MTP layers, stored after those of the model
        self.n_nextn = (
            ConfigValues(path, self.metadata, prefix=f"{architecture}.").get_count(NEXTN_LAYERS_KEY)
            if self.family.mtp_specs
            else 0
        )

    @property
    def is_mtp_head(self) -> bool:
        """Whether the file holds an MTP head without its model; the metadata is the model's."""
        return self.n_nextn > 0 and not any(name.startswith("blk.0.") for name in self)

    def read_layer_numbers(self, n_layers: int) -> None:
        """Read the family's `layer_number_keys`, for `get_tensor`: a vector of one number per layer, named `KEY.LAYER`.

        Raises:
            CheckpointError: A key is missing or does not give a number for each layer.
        """
        values = ConfigValues(self.path, self.metadata)
        for key in self.family.layer_number_keys:
            numbers = np.array(values.get_layer_floats(key, n_layers), np.float32)
            self._layer_numbers |= {f"{key}.{i}": numbers[i : i + 1] for i in range(n_layers)}

    def get_tensor(self, name: str, shape: tuple[int, ...], types: Mapping[str, Dtype] = FLOATS) -> Any:
        """Return the tensor with a name and mark it as used, as in `TensorIndex`, or the number of a layer from the metadata.

        An outermost dimension of 1 may be missing: ggml's writers, its quantizer among them, drop it.
        """
        if name in self._layer_numbers:
            return self._layer_numbers[name]
        if shape[0] == 1 and self.get_shape(name) == shape[1:]:
            tensor = super().get_tensor(name, shape[1:], types).flatten_matrices()
        else:
            tensor = super().get_tensor(name, shape, types)
        return self._add_scales(tensor, name, shape) if isinstance(tensor, BlockTensor) and tensor.type == NVFP4 else tensor

    def _add_scales(self, tensor: Any, name: str, shape: tuple[int, ...]) -> Any:
        """Return an NVFP4 tensor with the scale of all its weights, or of each matrix, if the file has that in another tensor.

        Its input scale, for activations of 4 bits, is ignored. Scales that are a tensor of the family's own are applied there.

        Raises:
            CheckpointError: The scales have another shape or are not finite or too large.
        """
        input_scale_name, scale_name = (f"{name.removesuffix('weight')}{each}" for each in ("input_scale", "scale"))
        self.ignore([input_scale_name])
        own_names = {spec.name for spec in self.family.tensor_specs.values()}
        if scale_name not in self or re.sub(r"\d+", "{}", scale_name) in own_names:
            return tensor
        *lengths, n_rows, _ = shape
        scales = to_float32(super().get_tensor(scale_name, (math.prod(lengths),))[:])
        if (largest := abs(scales).max()) > MAX_NVFP4_TENSOR_SCALE:
            raise CheckpointError(f"{self.describe(scale_name)} holds {largest}; expected at most {MAX_NVFP4_TENSOR_SCALE}")
        return replace(tensor, scales=np.repeat(scales, n_rows))

    def is_duplicate(self, name: str, other: str) -> bool:
        """Return whether the tensors with two names are equal, after reading both; if so, mark the second as used."""
        a, b = (self._sources[each][0] for each in (name, other))
        result = a.entries[name][:2] == b.entries[other][:2] and is_equal(a.get_raw_tensor(name), b.get_raw_tensor(other))
        if result:
            self._used.add(other)
        return result


def _open_shards(first: GGUFFile) -> list[GGUFFile]:
    """Open the later shards of a split model, and return all its files with the given first one, in order.

    Raises:
        CheckpointError: A shard is missing, or the numbers in the metadata do not match the file names.
    """
    count, number = (ConfigValues(first.path, first.metadata, {key: 0})[key] for key in (SPLIT_COUNT_KEY, SPLIT_NUMBER_KEY))
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise CheckpointError(f"{first.path}: {SPLIT_COUNT_KEY} is {format_json_value(count)}; expected 1 to {MAX_SHARDS}")
    if count <= 1:
        return [first]
    paths = [first.path.with_name(name) for name in list_shard_names(first.path.name)]
    if len(paths) != count:
        raise CheckpointError(f"{first.path} is one of {count} shards; expected a name that ends in -00001-of-{count:05}.gguf")
    if number != 0:
        raise CheckpointError(f"{first.path} is a later shard of {count}; name the first, {paths[0]}")
    files = [first]
    for i, path in enumerate(paths[1:], 1):
        with wrap_read_errors(path, CheckpointError):
            if not path.exists():
                raise CheckpointError(f"{path} is missing; it is a shard of {first.path.name}: download the whole model again")
        files.append(GGUFFile(path))
        if (shard_number := files[-1].metadata.get(SPLIT_NUMBER_KEY)) != i:
            raise CheckpointError(f"{path}: {SPLIT_NUMBER_KEY} is {format_json_value(shard_number)}; expected {i}")
    return files


def _get_vocabulary(file: GGUFFile) -> JSONDict:
    """Return the tokenizer's metadata in a GGUF file, by key without the prefix tokenizer.ggml; {} if the file has no tokenizer.

    The key `SPECIAL_TOKENS_STRIP_KEY` is added if the tokenizer's special tokens strip the white space after them.
    """
    vocabulary = {
        key.removeprefix(TOKENIZER_PREFIX): value for key, value in file.metadata.items() if key.startswith(TOKENIZER_PREFIX)
    }
    return (
        vocabulary | {SPECIAL_TOKENS_STRIP_KEY: True} if vocabulary and has_rstrip_special_tokens(file.metadata) else vocabulary
    )


def read_config(model: GGUFModel) -> ModelConfig:
    """Build the `ModelConfig` of a GGUF model from its metadata and from which tensors exist.

    If the classifier is stored and equals the embedding, the classifier is marked as used.

    Raises:
        CheckpointError: A key is missing, not valid or not supported.
    """
    family, prefix = model.family, f"{model.family.name}."
    values = ConfigValues(model.path, model.metadata, prefix=prefix)
    check_unsupported_keys(values, family)
    vocab_size = _get_vocab_size(model, values, is_borrowed=(family.is_head or model.is_mtp_head) and EMBEDDING not in model)
    n_blocks = values.get_int("block_count", max_value=MAX_LAYERS)
    # A list that gives the same number for each layer stands for that number.
    lists = {key: values[key] for key in PER_LAYER_KEYS if key not in family.per_layer_keys and isinstance(values[key], list)}
    uniform = {prefix + key: numbers[0] for key, numbers in lists.items() if numbers and numbers == numbers[:1] * n_blocks}
    given = model.metadata | uniform
    values = ConfigValues(model.path, given, prefix=prefix)

    def get_size(key: str) -> int:
        """Return the value of a key, or a placeholder where each layer has its own."""
        return 1 if isinstance(values[key], list) and key in family.per_layer_keys else values.get_int(key)

    common: JSONDict = {
        "dim": values.get_int("embedding_length", max_value=MAX_DIM),
        "hidden_dim": get_size(MLP_DIM_KEY if MLP_DIM_KEY in values else EXPERT_DIM_KEY),
        "n_layers": n_blocks - model.n_nextn,
        "n_heads": get_size(HEADS_KEY),
        "seq_len": values.get_int("context_length"),
        "vocab_size": vocab_size,
        "shared_classifier": not (family.is_head or model.is_mtp_head)
        and (LM_HEAD not in model or model.is_duplicate(EMBEDDING, LM_HEAD)),
    }
    config = family.parse_config(GGUFMetadata(model.path, given, prefix, common, model)).extend_to_yarn_context()
    if problem := config.find_error():
        raise CheckpointError(f"{model.path} does not describe a valid model: {problem}")
    if config.head:
        check_id_map(config.head, vocab_size, model.family.id_map_name in model, f"{model.path}")
    return config


def _get_vocab_size(model: GGUFModel, values: ConfigValues, is_borrowed: bool) -> int:
    """Return the number of token ids: the rows of the token embedding, which the keys must match.

    A draft head that borrows the target's embedding may have no such rows; its keys give the number.

    Raises:
        CheckpointError: The keys do not match the rows, or the number is missing.
    """
    tokens, key = model.metadata.get(TOKENS_KEY), "vocab_size"
    if is_borrowed:
        return values.get_int(key) if key in values or not isinstance(tokens, list) else len(tokens)
    rows = model.get_shape(EMBEDDING)[0]
    if key in values and values[key] != rows:
        raise values.make_error(key, f"{rows}, the rows of {EMBEDDING}")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise CheckpointError(f"{values.path}: {TOKENS_KEY} has {len(tokens)} items; expected {rows}, the rows of {EMBEDDING}")
    return rows
