"""Make tests/fixtures/gguf with the package gguf 0.19: `python -m tests.tools.make_gguf`. No test needs the package.

blocks.npz has for each type random blocks `TYPE` (4, bytes) and their values `TYPE_floats`. package.gguf is a file that the
package wrote, and package.npz has its values.
"""

from pathlib import Path

import gguf
import numpy as np

from tests.tools.gguf_files import BLOCK_SIZES, random_blocks

FOLDER = Path(__file__).parents[1] / "fixtures" / "gguf"


def dequantize(rows: np.ndarray, kind: str) -> np.ndarray:
    """Return the values of blocks; the package has no code for Q1_0 and Q2_0, whose fp16 scales come first."""
    if kind not in ("Q1_0", "Q2_0"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    bits = np.unpackbits(rows[:, 2:], axis=1, bitorder="little").astype(np.int8)
    codes = 2 * bits - 1 if kind == "Q1_0" else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    return codes * rows[:, :2].copy().view(np.float16).astype(np.float32)


def write_blocks() -> None:
    rng = np.random.default_rng(1)
    arrays = {}
    for kind, (n_weights, n_bytes) in BLOCK_SIZES.items():
        rows = np.frombuffer(random_blocks(rng, kind, 4, n_weights).data, np.uint8).reshape(4, n_bytes)
        arrays[kind] = rows
        arrays[f"{kind}_floats"] = dequantize(rows, kind)
    np.savez_compressed(FOLDER / "blocks.npz", **arrays)


def write_package_file() -> None:
    rng = np.random.default_rng(2)
    writer = gguf.GGUFWriter(FOLDER / "package.gguf", "llama")
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("a.truth", True)
    writer.add_int64("a.number", -(2**40))
    writer.add_float64("a.float", 0.1)
    writer.add_array("tokenizer.ggml.tokens", ["<unk>", "é", "\u2581the", ""])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, -2.0, 0.25])
    writer.add_array("a.list", [1, 2, 3])
    arrays = {}
    for name, kind, shape in (
        ("token_embd.weight", "Q8_0", (6, 64)),
        ("output_norm.weight", "F32", (33,)),
        ("blk.0.attn_q.weight", "Q4_0", (3, 32)),
        ("blk.0.attn_k.weight", "F16", (5, 7)),
        ("blk.0.attn_v.weight", "BF16", (2, 3, 5)),
    ):
        numbers = rng.standard_normal(shape).astype(np.float32)
        packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        arrays[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(FOLDER / "package.npz", **arrays)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write_blocks()
    write_package_file()
