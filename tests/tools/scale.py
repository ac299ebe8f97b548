"""Write models of real sizes with random weights and time loading and decoding: `python -m tests.tools.scale FOLDER`.

llama2-7b.bin, a version 2 file of 7 GB, and smollm2-1.7b/, a bf16 folder of three shards, 3.4 GB. Not part of the tests.
"""

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from specdec.loaders.model_loader import load_model
from specdec.model.llama import LLAMA
from specdec.model_config import ModelConfig
from specdec.runtime.memory import all_finite, zeros
from tests.tools.checkpoint_files import FIELDS, V1_HEADER, V1_NAMES
from tests.tools.configs import make_config

LLAMA2_7B = ModelConfig(4096, 11008, 32, 32, 32, 32000, 4096, shared_classifier=False)
SMOLLM2_17B = make_config(2048, 8192, 24, 32, 32, 49152, 8192, rope_theta=130000.0)
GROUP_SIZE = 64
BLOCK = 1 << 24  # bytes of random weights, which are repeated
MIB = 2**20


def write_int8_file(path: Path, config: ModelConfig) -> None:
    """Write a version 2 checkpoint whose weights have a standard deviation of 0.02."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, BLOCK, np.int8).tobytes()
    scale = struct.pack("<f", 0.02 / 73)
    numbers = [getattr(config, field) for field in FIELDS]
    with path.open("wb") as file:
        file.write(struct.pack("<4si7iBi", b"24ka", 2, *numbers, config.shared_classifier, GROUP_SIZE).ljust(V1_HEADER, b"\0"))
        shapes = LLAMA.shapes(config)
        for name in (name for name in V1_NAMES if name in shapes):
            n = int(np.prod(shapes[name][-2:] if len(shapes[name]) == 3 else shapes[name]))
            for _ in range(shapes[name][0] if len(shapes[name]) == 3 else 1):
                if name.startswith("rms"):
                    file.write(np.ones(n, "<f4").tobytes())
                else:
                    file.writelines(repeat_block(codes, n))
                    file.write(scale * (n // GROUP_SIZE))


def repeat_block(block: bytes, n_bytes: int) -> Iterator[bytes]:
    """Yield n_bytes of a repeated block."""
    yield from (block for _ in range(n_bytes // len(block)))
    yield block[: n_bytes % len(block)]


NAMES = {
    "rms_att": "input_layernorm",
    "rms_ffn": "post_attention_layernorm",
    **{f"w{c}": f"self_attn.{c}_proj" for c in "qkvo"},
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}


def write_bf16_folder(folder: Path, config: ModelConfig, n_shards: int = 3) -> None:
    """Write a Hugging Face folder of bf16 shards without a tokenizer."""
    folder.mkdir(exist_ok=True)
    numbers = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "tie_word_embeddings": True,
        "hidden_size": config.dim, "intermediate_size": config.hidden_dim, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.seq_len, "rms_norm_eps": config.norm_eps, "rope_theta": config.rope.theta,
        "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(numbers))
    tensors: dict[str, tuple[int, ...]] = {}
    for name, shape in LLAMA.shapes(config).items():
        if name in NAMES:
            tensors |= {f"model.layers.{i}.{NAMES[name]}.weight": shape[1:] for i in range(shape[0])}
        else:
            tensors[{"tok_emb": "model.embed_tokens.weight", "rms_final": "model.norm.weight"}[name]] = shape
    weights = (np.random.default_rng(0).standard_normal(BLOCK // 2).astype(np.float32) * 0.02).view(np.uint32) >> 16
    block, one_bytes = weights.astype("<u2").tobytes(), struct.pack("<H", 0x3F80)
    names, shard_of = list(tensors), {}
    for shard in range(n_shards):
        file_name = f"model-{shard + 1:05}-of-{n_shards:05}.safetensors"
        shard_names = names[shard * len(names) // n_shards : (shard + 1) * len(names) // n_shards]
        header, at = {}, 0
        for name in shard_names:
            n_bytes = 2 * int(np.prod(tensors[name]))
            header[name] = {"dtype": "BF16", "shape": tensors[name], "data_offsets": [at, at + n_bytes]}
            at += n_bytes
            shard_of[name] = file_name
        header_bytes = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(struct.pack("<Q", len(header_bytes)) + header_bytes)
            for name in shard_names:
                file.writelines(repeat_block(one_bytes * 4096 if "norm" in name else block, 2 * int(np.prod(tensors[name]))))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def get_peak_mib() -> float:
    """Return the peak resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def measure(path: Path) -> None:
    """Load and decode in this process, and print the measurements."""
    n_bytes = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    before, begin = get_peak_mib(), time.perf_counter()
    model = load_model(path)
    seconds = time.perf_counter() - begin
    after = get_peak_mib()
    block, tokens, cache = zeros(BLOCK * 16 // 4), [1, 5, 9], model.new_cache()
    block[:] = 1
    passes, reads = [], []
    cache.forward(tokens)
    for _ in range(12):
        tokens.append(7)
        passes.append(model.weights.n_bytes / time_call(lambda: cache.forward(tokens)) / 1e9)
        reads.append(max(block.nbytes / time_call(lambda: all_finite(block)) / 1e9 for _ in range(3)))
    rate, read = np.median(passes), np.median(reads)
    print(
        f"{path.name}: {n_bytes / 1e9:.2f} GB in {seconds:.1f} s ({n_bytes / 1e9 / seconds:.2f} GB/s), "
        f"peak {(after - before) * MIB / n_bytes:.3f} of the file; {rate * 1e9 / model.weights.n_bytes:.2f} tok/s, "
        f"{rate:.1f} GB/s of weights where a read reaches {read:.1f} ({rate / read:.0%})",
        flush=True,
    )


def time_call(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        measure(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        for path, write, config in (
            (folder / "llama2-7b.bin", write_int8_file, LLAMA2_7B),
            (folder / "smollm2-1.7b", write_bf16_folder, SMOLLM2_17B),
        ):
            if not path.exists():
                write(path, config)
            subprocess.run([sys.executable, "-m", "tests.tools.scale", path, "measure"], check=True)
