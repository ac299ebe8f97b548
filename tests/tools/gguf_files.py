"""GGUF files for the tests: written byte by byte, and made from the fixtures' folders and tokenizers."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.loaders.gguf_file import GGUFFile
from specdec.model_config import Llama3RopeScaling, ModelConfig
from tests.tools import hf_folders
from tests.tools.hf_folders import FIXTURES

TOKENIZERS = FIXTURES / "tokenizers"
TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "I32": 26,
    "I64": 27, "BF16": 30, "Q2_K": 10, "Q3_K": 11, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
    "TQ1_0": 34, "TQ2_0": 35, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42,
}  # fmt: skip
BLOCK_SIZES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210), "Q2_K": (256, 84), "Q3_K": (256, 110), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17), "Q1_0": (128, 18), "Q2_0": (64, 18), "TQ2_0": (256, 66),
    "TQ1_0": (256, 54), "NVFP4": (64, 36),
}  # fmt: skip
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
Keys = dict[str, Any]


class TypedValue(NamedTuple):
    """A value with an explicit GGUF type; 9 is an array with elements of type `inner`."""

    kind: int
    value: Any
    inner: int = 0


class RawTensor(NamedTuple):
    """A tensor as type, shape (outermost dimension first) and bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes


def encode_string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def to_typed_value(value: Any) -> TypedValue:
    """Return the value typed as writers do: integers as u32, or i32 in arrays."""
    if isinstance(value, TypedValue):
        return value
    if isinstance(value, list):
        return TypedValue(9, value, {str: 8, float: 6, int: 5, bool: 7}[type(value[0])])
    return TypedValue({str: 8, float: 6, int: 4, bool: 7}[type(value)], value)


def encode_value(value: Any) -> bytes:
    kind, content, inner = to_typed_value(value)

    def plain(kind: int, content: Any) -> bytes:
        return encode_string(content) if kind == 8 else struct.pack("<" + FORMATS[kind], content)

    head = struct.pack("<I", kind)
    if kind != 9:
        return head + plain(kind, content)
    return head + struct.pack("<IQ", inner, len(content)) + b"".join(plain(inner, each) for each in content)


def to_raw_tensor(tensor: Any) -> RawTensor:
    return tensor if isinstance(tensor, RawTensor) else RawTensor(DTYPES[tensor.dtype], tensor.shape, tensor.tobytes())


def header_bytes(keys: Mapping[str, Any], tensors: Mapping[str, Any], version: int = 3, alignment: int = 32) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    out += b"".join(encode_string(key) + encode_value(value) for key, value in keys.items())
    at = 0
    for name, tensor in tensors.items():
        kind, shape, data = to_raw_tensor(tensor)
        out += (
            encode_string(name)
            + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            + struct.pack("<IQ", TYPE_IDS[kind], at)
        )
        at += -(-len(data) // alignment) * alignment
    return out


def gguf_bytes(keys: Mapping[str, Any], tensors: Mapping[str, Any], version: int = 3, alignment: int = 32) -> bytes:
    """Return a whole file."""

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % alignment)

    data = [padded(to_raw_tensor(tensor).data) for tensor in tensors.values()]
    return padded(header_bytes(keys, tensors, version, alignment)) + b"".join(data)


def make_split_files(keys: Keys, tensors: Mapping[str, Any], n: int) -> list[bytes]:
    """Return the n shards of a split file."""
    names = list(tensors)
    size = math.ceil(len(names) / n)
    parts = []
    for i in range(n):
        own = {"split.no": TypedValue(2, i), "split.count": TypedValue(2, n), "split.tensors.count": TypedValue(5, len(names))}
        part = {name: tensors[name] for name in names[i * size : (i + 1) * size]}
        parts.append(gguf_bytes((keys if i == 0 else {}) | own, part))
    return parts


def write_parts(folder: Path, parts: list[bytes]) -> Path:
    """Write the shards to a folder and return the path of the first."""
    for i, data in enumerate(parts):
        (folder / f"model-{i + 1:05}-of-{len(parts):05}.gguf").write_bytes(data)
    return folder / f"model-00001-of-{len(parts):05}.gguf"


def random_blocks(rng: np.random.Generator, kind: str, rows: int, n: int, scale: float = 0.02) -> RawTensor:
    """Return a matrix of random codes with scales of about this size."""
    n_weights, n_bytes = BLOCK_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * n // n_weights, n_bytes), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 128 + np.rint(np.log2(scale * rng.random(len(blocks)) + 1e-6))
        return RawTensor(kind, (rows, n), blocks.tobytes())
    if kind == "NVFP4":
        blocks[:, :4] = rng.integers(0, 0x18, (len(blocks), 4))
        return RawTensor(kind, (rows, n), blocks.tobytes())
    offsets = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)} | dict.fromkeys(
        ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "Q1_0", "Q2_0"), (0,)
    )
    for at in offsets.get(kind, (0, 2)):
        divisor = {"K": 16, "L": 10, "S": 160}.get(kind[-1], 1)
        scales = (rng.standard_normal(len(blocks)) * scale / divisor).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return RawTensor(kind, (rows, n), blocks.tobytes())


# Models

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
CONVERTED = [
    path.stem for path in sorted((FIXTURES / "gguf").glob("*.gguf")) if (FIXTURES / path.stem).is_dir()
]  # files of llama.cpp's converter


def get_stored_name(full: str) -> str:
    """Return the name of a Llama's tensor in GGUF."""
    layer, rest = "", full
    if rest.startswith("model.layers."):
        number, _, rest = rest.removeprefix("model.layers.").partition(".")
        layer = f"blk.{number}."
    stem, _, end = rest.rpartition(".")
    return f"{layer}{LLAMA_NAMES[stem]}.{end}"


def interleave_halves(array: Any, head_dim: int) -> Any:
    """Return rows in the order of `llama`: the halves of each head, interleaved."""
    heads = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(array.shape)


def rope_divisors(config: ModelConfig) -> Any:
    """Return Llama 3.1's frequency factors in fp32: 1 for fast pairs, the factor for slow ones."""
    scaling = config.rope.scaling
    assert isinstance(scaling, Llama3RopeScaling)
    waves = 2 * math.pi * config.rope.theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    low, high = (scaling.original_seq_len / each for each in (scaling.low_freq_factor, scaling.high_freq_factor))
    smooth = (scaling.original_seq_len / waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = 1 / ((1 - smooth) / scaling.factor + smooth)
    return np.where(waves < high, 1, np.where(waves > low, scaling.factor, between)).astype(np.float32)


# Tokenizers


def make_tokenizer_keys(name: str, path: Path | None = None) -> Keys:
    """Return the metadata that a converter writes for a fixture's tokenizer, or for a changed copy of it."""
    content = json.loads((path or TOKENIZERS / f"{name}.json").read_text(encoding="utf-8"))
    vocabulary = dict(content["model"]["vocab"])
    added = {each["id"]: each for each in content["added_tokens"]}
    vocabulary |= {each["content"]: token for token, each in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    keys: Keys = {"tokens": tokens}
    if name in ("llama2", "gemma3"):
        bos, eos = ("<s>", "</s>") if name == "llama2" else ("<bos>", "<eos>")
        ranks = {"".join(merge): i for i, merge in reversed(list(enumerate(content["model"]["merges"])))}
        types = [6 if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)]
        types[vocabulary["<unk>"]] = 2
        keys |= {"model": "llama", "scores": [-float(ranks.get(token, 10**6)) for token in tokens]}
        keys |= {"bos_token_id": vocabulary[bos], "eos_token_id": vocabulary[eos], "unknown_token_id": vocabulary["<unk>"]}
        if name == "gemma3":  # a converter writes its tokens for runs of spaces as spaces
            keys |= {"add_space_prefix": False, "pre": "default"}
            keys["tokens"] = [t.replace("▁", " ") if kind == 4 else t for t, kind in zip(tokens, types, strict=True)]
    else:
        pre, bos, eos = {
            "gpt2": ("gpt-2", "<|endoftext|>", "<|endoftext|>"),
            "smollm2": ("smollm", "<|im_start|>", "<|im_end|>"),
            "qwen2": ("qwen2", "<|endoftext|>", "<|im_end|>"),
            "tekken": ("tekken", "<s>", "</s>"),
            "qwen35": ("qwen35", "<|endoftext|>", "<|im_end|>"),
            "phi4": ("gpt-4o", "<|endoftext|>", "<|end|>"),
            "lfm2": ("lfm2", "<|startoftext|>", "<|im_end|>"),
            "llama3": ("llama-bpe", "<|begin_of_text|>", "<|end_of_text|>"),
        }[name]
        keys |= {"model": "gpt2", "pre": pre, "merges": merges, "bos_token_id": vocabulary[bos], "eos_token_id": vocabulary[eos]}
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | {"token_type": types}).items()}


CONFIG_KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
}  # fmt: skip


def convert_folder(folder: Path, tokenizer: str) -> tuple[Keys, dict[str, Any]]:
    """Return metadata and tensors of a folder with a Llama or Qwen3 and a copy of a fixture's tokenizer."""
    values = json.loads((folder / "config.json").read_text())
    a, head_dim = values["model_type"], values["hidden_size"] // values["num_attention_heads"]
    keys: Keys = {"general.architecture": a} | {f"{a}.{key}": values[name] for key, name in CONFIG_KEYS.items() if name in values}
    tensors = {}
    for full, (_, array) in hf_folders.read_folder_tensors(folder).items():
        stored = get_stored_name(full)
        is_rotated = a == "llama" and stored.split(".")[-2] in ("attn_q", "attn_k")
        rows = interleave_halves(array, head_dim) if is_rotated else array
        tensors[stored] = (rows.astype(np.uint32) << 16).view(np.float32) if array.ndim == 1 else rows
    return keys | make_tokenizer_keys(tokenizer, folder / "tokenizer.json"), tensors


def read_converted(name: str) -> tuple[Keys, dict[str, Any]]:
    """Return metadata and tensors of a file that llama.cpp's converter wrote."""
    file = GGUFFile(FIXTURES / "gguf" / f"{name}.gguf")
    entries = {
        each: RawTensor(entry.type, entry.shape, file.get_raw_tensor(each)[:].tobytes()) for each, entry in file.entries.items()
    }
    return {key: value for key, value in file.metadata.items() if value != []}, entries
