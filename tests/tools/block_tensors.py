"""Random tensors of GGUF block types."""

from typing import Any

import numpy as np

from specdec.quant.gguf_repacking import BLOCK_TYPES, dequantize
from specdec.quant.packed_matrix import GGUFBlockRows
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import CPU_FEATURES
from tests.tools.gguf_files import BLOCK_SIZES, Keys, make_model_keys, random_blocks

N, ROWS = 512, 70


class RandomBlockTensor:
    """A tensor of random GGUF blocks: random codes, and scales of up to 0.01, some of them tiny or 0."""

    def __init__(self, type_: str, rows: int, n: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.type, self.shape = type_, (rows, n)
        size = BLOCK_TYPES[type_].n_bytes
        raw = rng.integers(0, 256, (rows, n // BLOCK_TYPES[type_].layout.block_columns, size), np.uint8)
        scales = (rng.random((*raw.shape[:2], 2)) * 0.01).astype(np.float16)
        scales[0, 0], scales[1, 0], scales[2, 0] = 0, 6e-8, -0.01
        if type_ == "NVFP4":
            raw[:, :, :4] = rng.integers(0, 0x28, (*raw.shape[:2], 4))
        for i, at in enumerate((0,) if type_ == "MXFP4" else BLOCK_TYPES[type_].scale_offsets):
            raw[:, :, at : at + 2] = scales[:, :, i : i + 1].view(np.uint8)
        if type_ == "MXFP4":
            raw[:, :, 0] = rng.integers(104, 124, raw.shape[:2])
            raw[0, 0] = 0
        self.raw = raw.reshape(rows, -1)
        self.scales: np.ndarray | None = None

    def read_blocks(self, first: int, last: int) -> GGUFBlockRows:
        return GGUFBlockRows(self.type, self.raw[first:last], None if self.scales is None else self.scales[first:last])

    def __getitem__(self, rows: slice) -> np.ndarray:
        return dequantize(self.read_blocks(*rows.indices(self.shape[0])[:2]))


def run_matmul(matrix, x, n_tokens, n_threads=1):
    out = zeros(len(x), matrix.n_rows)
    scratch = zeros(n_threads, len(x), matrix.scratch_words)
    Executor([[matrix.matmul(out, x[None], scratch)]])(n_tokens, 0, 0, n_threads)
    return out[:n_tokens]


FEATURES = CPU_FEATURES.split(",")


RUNS_HERE = {
    "portable": True,
    "avx512vnni": "+avx512vnni" in FEATURES,
    "avxvnni": "+avxvnni" in FEATURES or {"+avx512vnni", "+avx512vl"} <= set(FEATURES),
    "avx2": "+avx2" in FEATURES,
    "sdot": "+dotprod" in FEATURES,
    "neon": "+neon" in FEATURES,
}


WIDE = {"embedding_length": 256, "feed_forward_length": 512, "attention.key_length": 64, "attention.value_length": 64}


def block_model(a: str, rng: np.random.Generator) -> tuple[Keys, dict[str, Any]]:
    """Return a model of width 256 with matrices of every quantized type."""
    keys = make_model_keys({"llama": "llama_tied", "qwen2": "qwen2", "gpt2": "gpt2"}[a])
    keys |= {f"{a}.{key}": value for key, value in WIDE.items() if a != "gpt2" or "length" in key}
    keys[f"{a}.attention.head_count"] = 4
    keys.pop(f"{a}.vocab_size", None)
    shapes = {
        "token_embd": (40, 256),
        "blk.{}.attn_output": (256, 256),
        "blk.{}.ffn_up": (512, 256),
        "blk.{}.ffn_down": (256, 512),
    }
    vectors = {"output_norm.weight": 256, "blk.{}.attn_norm.weight": 256, "blk.{}.ffn_norm.weight": 256}
    if a == "gpt2":
        shapes |= {"blk.{}.attn_qkv": (768, 256)}
        vectors |= {name.replace("weight", "bias"): n for name, n in vectors.items()}
        vectors |= {"blk.{}.attn_qkv.bias": 768, "blk.{}.attn_output.bias": 256, "blk.{}.ffn_up.bias": 512}
        vectors["blk.{}.ffn_down.bias"] = 256
    else:
        shapes |= {
            "blk.{}.attn_q": (256, 256),
            "blk.{}.attn_k": (128, 256),
            "blk.{}.attn_v": (128, 256),
            "blk.{}.ffn_gate": (512, 256),
        }
    if a == "qwen2":
        vectors |= {"blk.{}.attn_q.bias": 256, "blk.{}.attn_k.bias": 128, "blk.{}.attn_v.bias": 128}
    type_names = list(BLOCK_SIZES)
    tensors: dict[str, Any] = {"position_embd.weight": rng.standard_normal((64, 256)).astype(np.float32)} if a == "gpt2" else {}
    for name in [each.format(i) for each in shapes for i in range(2 if "{}" in each else 1)]:
        shape = next(shape for each, shape in shapes.items() if name in (each.format(0), each.format(1)))
        tensors[f"{name}.weight"] = random_blocks(rng, type_names[len(tensors) % len(type_names)], *shape)
    for name in [each.format(i) for each in vectors for i in range(2 if "{}" in each else 1)]:
        n = next(n for each, n in vectors.items() if name in (each.format(0), each.format(1)))
        tensors[name] = (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)
    return keys, tensors
