"""Checkpoints, tokenizers and damaged files for the tests, written from the formats' descriptions."""

import struct
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.loaders import Checkpoint
from specdec.model.llama import LLAMA
from specdec.model_config import ModelConfig
from specdec.runtime.simd import Float32
from tests.tools.reference import quantize

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"  # real weights and texts; tests that need them skip if it does not exist

V0_NAMES = ("tok_emb", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", "freqs", "wcls")
V1_NAMES = ("rms_att", "rms_ffn", "rms_final", "tok_emb", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "wcls")
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
V1_HEADER = 256
FIRST_TEXT_TOKEN = 3 + 256  # after <unk>, BOS, EOS and the bytes


@contextmanager
def limit_memory(n_bytes: float) -> Iterator[None]:
    """Fail if the block allocates n_bytes or more at once, whether it raises or not."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < n_bytes, f"{peak} bytes"


def random_tensors(config: ModelConfig, seed: int, scale: float = 0.3) -> dict[str, Float32]:
    """Return all tensors of a config: matrices with this deviation, norms near one."""
    rng = np.random.default_rng(seed)

    def one(name: str, shape: tuple[int, ...]) -> Float32:
        noise = rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
        return noise + np.float32(1) if name.startswith("rms") else noise

    return {name: one(name, shape) for name, shape in LLAMA.shapes(config).items()}


def checkpoint_bytes(config: ModelConfig, tensors: Mapping[str, Float32], version: int = 0) -> bytes:
    """Return the file of a model, version 0 or 1."""
    shared = config.shared_classifier
    numbers = [getattr(config, field) for field in FIELDS]
    if version == 0:
        numbers[FIELDS.index("vocab_size")] *= 1 if shared else -1
        header = struct.pack("<7i", *numbers)
        tables = np.full((config.seq_len, config.dim // config.n_heads), 7.0, np.float32)  # never to be read
        tensors = {**tensors, "freqs": tables}
    else:
        header = struct.pack("<4si7iB", b"24ka", version, *numbers, shared).ljust(V1_HEADER, b"\0")
    names = [name for name in (V0_NAMES if version == 0 else V1_NAMES) if name != "wcls" or not shared]
    return header + b"".join(np.ascontiguousarray(tensors[name], "<f4").tobytes() for name in names)


def write_checkpoint(path: Path, config: ModelConfig, tensors: Mapping[str, Float32], version: int = 0) -> Path:
    path.write_bytes(checkpoint_bytes(config, tensors, version))
    return path


def quantized_tensors(config: ModelConfig, tensors: Mapping[str, Float32], group: int) -> dict[str, Any]:
    """Return the tensors of a version 2 file: norms unchanged, `reference.QuantizedMatrix`, lists for layers."""
    result: dict[str, Any] = {}
    for name, shape in LLAMA.shapes(config).items():
        if name.startswith("rms"):
            result[name] = tensors[name]
        elif len(shape) == 2:
            result[name] = quantize(tensors[name], group)
        else:
            result[name] = [quantize(matrix, group) for matrix in tensors[name]]
    return result


def int8_checkpoint_bytes(config: ModelConfig, tensors: Mapping[str, Any], group: int) -> bytes:
    """Return the version 2 file of `quantized_tensors`."""
    numbers = [getattr(config, field) for field in FIELDS]
    data = struct.pack("<4si7iBi", b"24ka", 2, *numbers, config.shared_classifier, group).ljust(V1_HEADER, b"\0")
    for name in V1_NAMES:
        if name.startswith("rms"):
            data += tensors[name].astype("<f4").tobytes()
        elif name in tensors:
            matrices = tensors[name] if isinstance(tensors[name], list) else [tensors[name]]
            data += b"".join(m.values.tobytes() + m.scales.astype("<f4").tobytes() for m in matrices)
    return data


def write_int8_checkpoint(path: Path, config: ModelConfig, tensors: Mapping[str, Float32], group: int) -> Path:
    path.write_bytes(int8_checkpoint_bytes(config, quantized_tensors(config, tensors, group), group))
    return path


def tokenizer_bytes(pieces_and_scores: Iterable[tuple[bytes, float]]) -> bytes:
    records = list(pieces_and_scores)
    longest = max((len(piece) for piece, _ in records), default=0)
    return struct.pack("<I", longest) + b"".join(struct.pack("<fi", s, len(piece)) + piece for piece, s in records)


def write_tokenizer(path: Path, pieces_and_scores: Iterable[tuple[bytes, float]]) -> Path:
    path.write_bytes(tokenizer_bytes(pieces_and_scores))
    return path


def base_pieces() -> list[tuple[bytes, float]]:
    """Return <unk>, BOS, EOS and the 256 bytes, as in every llama2.c tokenizer."""
    names = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    return [(name, 0.0) for name in names]


MERGES = "he| the| then| t|in|er| a|on|re|nd| o|en|  |ll|[bold]|[brackets]|[/red]|mé|日日| 🙂"
CHARACTERS = " etaoinshrdlumc.[]é日🙂"


def small_pieces() -> list[tuple[bytes, float]]:
    """Return 300 tokens: the base, a few merges, then single characters with falling scores."""
    pieces = [*MERGES.split("|"), *CHARACTERS]
    return [*base_pieces(), *((piece.encode(), -float(i)) for i, piece in enumerate(pieces))]


def restrict_to_pieces(tensors: dict[str, Float32]) -> dict[str, Float32]:
    """Change a model so that it generates text pieces only: no bytes, no EOS and no <unk>.

    x[0] is 3 throughout, and the classifier (unshared) turns it into a bias.
    """
    tensors["tok_emb"][:, 0] = 3
    tensors["wo"][:, 0] = 0
    tensors["w2"][:, 0] = 0
    tensors["wcls"][:, 0] = 0
    tensors["wcls"][:FIRST_TEXT_TOKEN, 0] = -40
    return tensors


def read_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all tensors of a file: arrays, `Int8Rows`, and lists of those."""

    def whole(tensor: Any) -> Any:
        if isinstance(tensor, list):
            return [whole(part) for part in tensor]
        return tensor[:]

    return {name: whole(tensor) for name, tensor in checkpoint.tensors.items()}


class Corruption(NamedTuple):
    """A corruption of a checkpoint's bytes, and a word that the error must contain next to the file's name."""

    corrupt: Callable[[bytes], bytes]
    expected_word: str


def with_int(offset: int, value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + struct.pack("<i", value) + data[offset + 4 :]


def with_last_float(value: float) -> Callable[[bytes], bytes]:
    return lambda data: data[:-4] + struct.pack("<f", value)


def make_corruptions(version: int) -> dict[str, Corruption]:
    """Return the corruptions of a checkpoint file (unshared, GQA)."""
    first = 0 if version == 0 else 8

    def field(name: str, value: int) -> Callable[[bytes], bytes]:
        return with_int(first + 4 * FIELDS.index(name), value)

    cases = {
        "empty": Corruption(lambda data: b"", "empty"),
        "one byte": Corruption(lambda data: data[:1], "truncated"),
        "half a header": Corruption(lambda data: data[:20], "truncated"),
        "header alone": Corruption(lambda data: data[: 28 if version == 0 else V1_HEADER], "truncated"),
        "half": Corruption(lambda data: data[: len(data) // 2], "truncated"),
        "one byte short": Corruption(lambda data: data[:-1], "truncated"),
        "one number short": Corruption(lambda data: data[:-4], "truncated"),
        "one byte long": Corruption(lambda data: data + b"\0", "too long"),
        "twice": Corruption(lambda data: data + data, "too long"),
        "text": Corruption(lambda data: b"Once upon a time, there was a little girl named Lily. " * 20, ""),
        "dim not divisible by heads": Corruption(field("n_heads", 10), "n_heads 10"),
        "heads not divisible by kv heads": Corruption(field("n_kv_heads", 3), "n_kv_heads"),
        "odd head size": Corruption(field("n_heads", 16), "head_dim"),
        "NaN": Corruption(with_last_float(float("nan")), "NaN"),
        "infinity": Corruption(with_last_float(float("inf")), "NaN or infinite"),
        "minus infinity": Corruption(with_last_float(float("-inf")), "NaN or infinite"),
    }
    for name in FIELDS:
        cases[f"{name} zero"] = Corruption(field(name, 0), name)
        # a version 0 checkpoint with a negative vocabulary is one that does not share its classifier
        if (version, name) != (0, "vocab_size"):
            cases[f"{name} negative"] = Corruption(field(name, -7), name)
            cases[f"{name} lowest"] = Corruption(field(name, -(2**31)), name)
        if version == 0 or name != "seq_len":  # only a version 0 file holds tables of that length
            cases[f"{name} huge"] = Corruption(field(name, 2**31 - 1), "")
    if version == 2:
        cases |= {
            "half a version 2 header": Corruption(lambda data: data[:40], "truncated"),
            "flag": Corruption(lambda data: data[:36] + b"\x02" + data[37:], "flag"),
            "group size zero": Corruption(with_int(37, 0), "group size"),
            "group size negative": Corruption(with_int(37, -8), "group size"),
            "group size that divides nothing": Corruption(with_int(37, 7), "group size of 7"),
            "group size huge": Corruption(with_int(37, 2**31 - 1), "group size"),
            "another group size": Corruption(with_int(37, 4), "truncated"),
            "claims to be version 1": Corruption(with_int(4, 1), "truncated"),
            "negative scale": Corruption(with_last_float(-1.0), "negative scales"),
        }
    if version == 1:
        cases |= {
            "half a version 1 header": Corruption(lambda data: data[:100], "truncated"),
            "wrong magic": Corruption(lambda data: b"ak42" + data[4:], ""),
            "version 0 with a magic": Corruption(with_int(4, 0), "expected 1 or 2"),
            "claims to be version 2": Corruption(with_int(4, 2), "group size of 0"),
            "version 3": Corruption(with_int(4, 3), "version 3"),
            "version -1": Corruption(with_int(4, -1), "version -1"),
            "flag": Corruption(lambda data: data[:36] + b"\x07" + data[37:], "flag"),
        }
    return cases


CORRUPTIONS = {f"version {v}, {name}": (v, damage) for v in (0, 1, 2) for name, damage in make_corruptions(v).items()}
CORRUPTED_GROUP = 8  # group size of the version 2 file to corrupt


def make_valid_bytes(config: ModelConfig, version: int) -> bytes:
    """Return a file with random weights for `make_corruptions`."""
    tensors = random_tensors(config, 0)
    if version < 2:
        return checkpoint_bytes(config, tensors, version)
    return int8_checkpoint_bytes(config, quantized_tensors(config, tensors, CORRUPTED_GROUP), CORRUPTED_GROUP)


def make_tokenizer_corruptions() -> dict[str, Corruption]:
    """Return the corruptions of a tokenizer file."""

    def with_length(value: int) -> Callable[[bytes], bytes]:
        return with_int(8, value)  # of the first token

    return {
        "empty": Corruption(lambda data: b"", "empty"),
        "three bytes": Corruption(lambda data: data[:3], "truncated"),
        "longest piece alone": Corruption(lambda data: data[:4], ""),
        "one byte short": Corruption(lambda data: data[:-1], ""),
        "cut in a record's head": Corruption(lambda data: data[: 4 + 8 + 5 + 3], ""),
        "2 more bytes": Corruption(lambda data: data + b"\0\0", ""),
        "negative length": Corruption(with_length(-1), "length"),
        "huge length": Corruption(with_length(2**31 - 1), "length"),
        "NaN score": Corruption(lambda data: data[:4] + struct.pack("<f", float("nan")) + data[8:], ""),
        "text": Corruption(lambda data: b"Once upon a time, there was a little girl named Lily. " * 20, ""),
    }
