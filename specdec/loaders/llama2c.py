"""Read a llama2.c checkpoint as a `ModelConfig` and tensors, and check it.

Layouts as in karpathy/llama2.c: run.c reads version 0, export.py writes versions 0 to 2. All fields are little-endian.
"""

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.argument_checks import CheckpointError
from specdec.loaders.checkpoint import Checkpoint, FileTensor
from specdec.loaders.model_file import DOWNLOAD_AGAIN_HINT, EXPECTED_MODEL, ModelFile
from specdec.model.llama import LLAMA
from specdec.model_config import ModelConfig
from specdec.quant.packed_matrix import Int8Rows

MAGIC = 0x616B3432  # "ak42"
V0_HEADER_BYTES, V1_HEADER_BYTES = 28, 256
MAX_PLAUSIBLE_SIZE = 2**24  # two header fields beyond it are not those of a damaged checkpoint, but of another file
HEADER_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
ROPE_TABLES = "rope"  # the tables of version 0, which are skipped
V0_ORDER = ("tok_emb", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", ROPE_TABLES, "wcls")
V1_ORDER = ("rms_att", "rms_ffn", "rms_final", "tok_emb", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "wcls")
# The first bytes of a tokenizer.bin: the longest token's length, and the first token's score, length and text.
TOKENIZER_SIGNATURE = re.compile(rb".{8}\x05\0\0\0<unk>", re.DOTALL)
FP32_TENSORS = ("rms_att", "rms_ffn", "rms_final")  # fp32 in every version


# The chat template of Llama 2, which no llama2.c file contains, and its variables
LLAMA2_TEMPLATE = """\
{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}\
{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('user and assistant have to take turns, user first') }}{% endif %}\
{% if loop.index0 == 0 and system is not false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
LLAMA2_VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


class Header(NamedTuple):
    """The parsed header of a llama2.c checkpoint.

    Attributes:
        config: The model's config.
        order: Names of the tensors in the order of the file.
        start: First byte of the first tensor.
        group_size: Number of int8 weights that share a scale; 0 for fp32 weights.
    """

    config: ModelConfig
    order: tuple[str, ...]
    start: int
    group_size: int = 0


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a llama2.c file of version 0, 1 or 2 as a `Checkpoint`, after checking everything that its header shows.

    Raises:
        CheckpointError: The model is not complete and consistent. Weights are checked when they are read.
    """
    file = ModelFile(Path(path))
    config, order, offset, file_group = _read_header(file)
    shapes: dict[str, tuple[int, ...]] = {**LLAMA.shapes(config), ROPE_TABLES: (config.seq_len, config.head_dim)}
    groups = {name: 0 if name in FP32_TENSORS else file_group for name in order if name in shapes}
    for name, group in groups.items():
        n = math.prod(shapes[name][-2:])
        if group and n % group:
            raise CheckpointError(f"{file.path} has a group size of {group}, which does not divide the {n} weights of {name}")
    sizes = {name: _count_bytes(math.prod(shapes[name]), group) for name, group in groups.items()}
    if file.size != (expected := offset + sum(sizes.values())):
        problem = "truncated" if file.size < expected else "too long"
        raise CheckpointError(
            f"{file.path} is {problem}: {file.size} bytes, its header describes {expected}; {DOWNLOAD_AGAIN_HINT}"
        )
    tensors: dict[str, Any] = {}
    for name, group in groups.items():
        shape, n_matrices = shapes[name], math.prod(shapes[name][:-2])
        if not group:
            tensors[name] = FileTensor(file, name, shape, offset)
        else:
            n_bytes = sizes[name] // n_matrices
            matrices = [Int8Tensor(file, name, (shape[-2], shape[-1]), offset + i * n_bytes, group) for i in range(n_matrices)]
            tensors[name] = matrices if len(shape) > 2 else matrices[0]
        offset += sizes[name]
    tensors.pop(ROPE_TABLES, None)
    return Checkpoint(file.path, config, tensors)


@dataclass(frozen=True)
class Int8Tensor:
    """An int8 matrix in a llama2.c file of version 2; [first:last] reads rows as `Int8Rows`.

    In the file, each run of `file_group_size` weights has a scale, and a run may cross rows. The rows that are read have the
    largest groups that do not cross rows. Reading raises CheckpointError for negative or non-finite scales.
    """

    file: ModelFile
    name: str
    shape: tuple[int, int]
    start: int
    file_group_size: int

    @property
    def scales(self) -> FileTensor:
        """The scales of the matrix, one for each run of `file_group_size` weights, as a vector that is not read yet."""
        n = math.prod(self.shape)
        return FileTensor(self.file, self.name, (n // self.file_group_size,), self.start + n)

    @property
    def group(self) -> int:
        """Number of weights in a group of the rows that are read: the largest that divides both the run and the row."""
        return math.gcd(self.file_group_size, self.shape[1])

    def __getitem__(self, index: slice) -> Int8Rows:
        """Read the rows of a slice with their scales; raise CheckpointError if a scale is negative."""
        first, last, _ = index.indices(self.shape[0])
        n = self.shape[1]
        values = self.file.read(self.start + first * n, (last - first) * n).view(np.int8)
        runs = np.arange(first * n, last * n, self.group) // self.file_group_size
        scales = self.scales[runs[0] : runs[-1] + 1] if last > first else self.scales[:0]
        if (scales < 0).any():
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds negative scales")
        rows = last - first
        return Int8Rows(values.reshape(rows, -1, self.group), scales[runs - runs[0] if rows else runs].reshape(rows, -1))


def _count_bytes(n: int, group_size: int) -> int:
    """Return how many bytes a tensor of n weights takes in a llama2.c file; group_size: int8 weights per scale, 0 for fp32."""
    return n + 4 * n // group_size if group_size else 4 * n


def _read_header(file: ModelFile) -> Header:
    """Read and check the header of a llama2.c file; raise CheckpointError if it is not one of version 0, 1 or 2."""
    path = file.path
    if file.size < V0_HEADER_BYTES:
        problem = "is empty" if file.size == 0 else f"is truncated: {file.size} bytes cannot hold a header"
        raise CheckpointError(f"{path} {problem}; {EXPECTED_MODEL}")
    head = file.read(0, min(file.size, V1_HEADER_BYTES)).tobytes()
    if TOKENIZER_SIGNATURE.match(head):
        raise CheckpointError(f"{path} is a llama2.c tokenizer, not a model; name it with tokenizer=...")
    magic, version = struct.unpack_from("<Ii", head)
    if magic != MAGIC:
        fields = dict(zip(HEADER_FIELDS, struct.unpack_from("<7i", head), strict=True))
        shared = fields["vocab_size"] > 0
        fields["vocab_size"] = abs(fields["vocab_size"])
        return Header(_make_config(path, fields, shared), V0_ORDER, V0_HEADER_BYTES)
    if version not in (1, 2):
        raise CheckpointError(f"{path} is a checkpoint of unknown version {version}; expected 1 or 2 (0 has no magic number)")
    if len(head) < V1_HEADER_BYTES:
        raise CheckpointError(f"{path} is truncated: {len(head)} bytes, a version {version} header alone has {V1_HEADER_BYTES}")
    *values, shared_flag, group = struct.unpack_from("<7iBi", head, 8)
    if shared_flag > 1:
        raise CheckpointError(f"{path} has a shared-classifier flag of {shared_flag}; expected 0 or 1")
    config = _make_config(path, dict(zip(HEADER_FIELDS, values, strict=True)), bool(shared_flag))
    if version == 2 and group <= 0:
        raise CheckpointError(f"{path} has a group size of {group}; expected a positive number of weights that share a scale")
    return Header(config, V1_ORDER, V1_HEADER_BYTES, group if version == 2 else 0)


def _make_config(path: Path, fields: dict[str, Any], shared: bool) -> ModelConfig:
    """Return the config of the HEADER_FIELDS; raise CheckpointError if they are not those of a valid model."""
    config = ModelConfig(**fields, shared_classifier=shared)
    if sum(not 0 < value <= MAX_PLAUSIBLE_SIZE for value in fields.values()) > 1:
        raise CheckpointError(f"{path} is not a model file; {EXPECTED_MODEL}")
    if problem := config.find_error():
        raise CheckpointError(f"{path} is not a model file, or a damaged llama2.c checkpoint ({problem}); {EXPECTED_MODEL}")
    return config
