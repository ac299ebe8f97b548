"""Hugging Face folders for the tests: the fixtures of make_fixtures.py, and copies of them with something changed."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specdec.config import ConvConfig, DeltaConfig, ExpertsConfig, InputsConfig, RopeScaling, YarnScaling
from specdec.loaders import Checkpoint, CheckpointError, load_checkpoint
from tests.tools.configs import made

FIXTURES = Path(__file__).parents[1] / "fixtures"
MICROSCALED = "gpt_oss_mxfp4"  # whose blocks' product is not that of the floats that transformers makes of them
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz") if path.parent.name != MICROSCALED)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "I64": np.int64}
GONE = sys.intern("<gone>")  # as a key's value, by identity: no such key
GRANITE: dict[str, float] = {"embedding_scale": 1.5, "attention_scale": 0.3, "residual_scale": 0.7, "logit_divisor": 2}
UNTURNED = {"is_turned": False}
PHI3_FACTORS = tuple(float(np.float32(factor)) for factor in (1, 1.15, 1.3, 1.45, 1.6, 1.75))
PHI3_LONG = {"long_divisors": (1.0, 3.5, 6.0, 8.5, 11.0, 13.5), "n_short": 64}
PHI3_SCALE = float(np.sqrt(np.float32(7) / np.float32(6)))  # sqrt(1 + log(128 / 64) / log(64))


Layers = tuple[dict[str, Any], ...]  # as `made` takes them


def some_layers(own: dict[str, Any], layers: Collection[int], n_layers: int) -> Layers:
    """Of n_layers those have that of their own."""
    return tuple(own if i in layers else {} for i in range(n_layers)) if layers else ()


def full_layers(layers: Collection[int], n_layers: int, **more: Any) -> Layers:
    """Of which those have no window, and that of their own."""
    return some_layers({"window": 0, **more}, layers, n_layers)


def gemma(dim: int, full: Collection[int], n_layers: int, theta: float = 1e4, divisors: tuple[float, ...] = ()) -> dict[str, Any]:
    """What all of Gemma 3's have; theta: of angles in layers with a window, divisors: of those in the others."""
    scale = float(np.sqrt(np.float32(dim)))
    return {
        "norms": "around", "activation": "gelu", "norm_eps": 1e-6, "rope_theta": theta, "qk_norm": True, "embedding_scale": scale,
        "layers": gemma_layers(full, n_layers, divisors),
    }  # fmt: skip


def gemma4(
    dim: int, kinds: str, n_shared: int, head_dim: int, window: int, n_turned: int, hidden_dim: int | None = None, **own: Any
) -> dict[str, Any]:
    """What all of Gemma 4's have; kinds: of layers, w or a; head_dim, n_turned, own: of those that see all; hidden_dim:
    of layers that take the keys and values of others.
    """
    divisors = (1.0,) * n_turned + (float(np.float32(1e30)),) * (head_dim // 2 - n_turned)
    whole = {"head_dim": head_dim, "window": 0, "rope_theta": 1e4, "rope_divisors": divisors, **own}
    layers = [whole if kind == "a" else {} for kind in kinds]
    first = len(kinds) - n_shared
    for i in range(first, len(kinds)):
        layers[i] = layers[i] | {"kv_layer": kinds.rindex(kinds[i], 0, first), "hidden_dim": hidden_dim}
    return {
        "norms": "around", "activation": "gelu", "norm_eps": 1e-6, "rope_theta": 100.0, "qk_norm": True, "value_norm": True,
        "embedding_scale": float(np.sqrt(np.float32(dim))), "attention_scale": 1.0, "layer_scale": True, "window": window,
        "layers": tuple(layers),
    }  # fmt: skip


def gemma_layers(full: Collection[int], n_layers: int, divisors: tuple[float, ...] = ()) -> Layers:
    """Those of a Gemma 3 of which some see the whole text."""
    return full_layers(full, n_layers, rope_theta=1e6, rope_divisors=divisors)


CONFIGS = {
    "llama": made(20, 37, 2, 2, 2, 65, 128, False, norm_eps=1e-6),
    "llama_tied": made(32, 48, 2, 4, 2, 72, 128, True, norm_eps=1e-6),
    "llama_biases": made(24, 40, 2, 3, 1, 64, 128, False, norm_eps=1e-6, qkv_bias=True, wo_bias=True, mlp_bias=True),
    "llama3": made(
        32, 48, 2, 4, 2, 70, 128, True, norm_eps=1e-6, rope_theta=5e5, head_dim=16, rope_scaling=RopeScaling(8, 1, 4, 64)
    ),
    "mistral": made(32, 40, 3, 4, 2, 64, 128, False, norm_eps=1e-6, window=12),
    "qwen2": made(32, 48, 2, 4, 2, 80, 128, True, norm_eps=1e-6, qkv_bias=True),
    "qwen2_window": made(24, 30, 2, 2, 1, 64, 128, False, norm_eps=1e-6, qkv_bias=True, window=17),
    "qwen3": made(32, 48, 2, 4, 2, 66, 128, False, norm_eps=1e-6, head_dim=12, qk_norm=True),
    "gpt2": made(18, 72, 2, 3, 3, 71, 64, True, "gpt2"),
    "gpt2_base": made(32, 50, 2, 4, 4, 64, 96, True, "gpt2"),
    "granite": made(24, 45, 3, 4, 2, 68, 128, True, norm_eps=1e-6, **GRANITE),
    "granite_biases": made(
        20,
        30,
        2,
        2,
        1,
        70,
        128,
        False,
        norm_eps=1e-6,
        qkv_bias=True,
        wo_bias=True,
        mlp_bias=True,
        attention_scale=1,
        logit_divisor=0.5,
    ),
    "granite_hybrid": made(32, 36, 2, 4, 2, 64, 128, False, norm_eps=1e-6, **GRANITE),
    "smollm3": made(24, 40, 5, 3, 1, 72, 128, True, norm_eps=1e-6, rope_theta=2e6, layers=some_layers(UNTURNED, (3,), 5)),
    "smollm3_layers": made(
        36,
        30,
        2,
        2,
        2,
        65,
        128,
        False,
        norm_eps=1e-6,
        rope_theta=2e6,
        qkv_bias=True,
        wo_bias=True,
        layers=some_layers(UNTURNED, (0,), 2),
    ),
    "phi3": made(32, 44, 2, 2, 1, 68, 128, rope_dim=12, rope_divisors=PHI3_FACTORS, rope_scale=PHI3_SCALE, **PHI3_LONG),
    "phi3_plain": made(20, 30, 2, 2, 2, 65, 128, False, window=9),
    "phi3_factor": made(
        40,
        37,
        2,
        4,
        2,
        70,
        128,
        False,
        rope_dim=4,
        rope_divisors=PHI3_FACTORS[:2],
        rope_scale=float(np.float32(1.3)),
        long_divisors=(1.0, 3.5),
        n_short=64,
    ),
    "ministral3": made(
        28,
        44,
        2,
        4,
        2,
        70,
        128,
        False,
        rope_theta=100,
        head_dim=16,
        rope_scaling=YarnScaling(4, 16, beta_fast=2),
        query_scale=float(np.float32(0.1)),
        query_span=16,
    ),
    "ministral3_beside": made(
        24,
        37,
        2,
        3,
        1,
        66,
        128,
        True,
        rope_theta=100,
        head_dim=20,
        rope_scaling=YarnScaling(8, 20, 4, 0.5, in_whole_pairs=False),
        rope_scale=float(np.float32(1 + 0.1 * math.log(8))),
        query_scale=float(np.float32(0.4)),
        query_span=20,
    ),
    "ministral3_scale": made(
        20,
        30,
        2,
        2,
        2,
        64,
        128,
        False,
        rope_theta=100,
        head_dim=12,
        rope_scaling=YarnScaling(2, 7),
        rope_scale=float(np.float32(1.2)),
        query_scale=1.5,
        query_span=7,
    ),
    "phi3_long": made(
        24,
        40,
        2,
        2,
        1,
        66,
        128,
        False,
        rope_dim=6,
        rope_divisors=PHI3_FACTORS[:3],
        rope_scale=float(np.float32(math.sqrt(1 + math.log(128 / 17) / math.log(17)))),
        long_divisors=(1.0, 3.5, 6.0),
        n_short=17,
    ),
    "gemma3": made(18, 21, 7, 3, 1, 70, 128, head_dim=6, window=9, **gemma(18, (5,), 7)),
    "gemma3_scaled": made(
        20,
        26,
        4,
        2,
        1,
        65,
        128,
        False,
        head_dim=14,
        window=17,
        attention_scale=float(np.float32(11**-0.5)),
        **gemma(20, (0, 3), 4, 500.0, (8.0,) * 7),
    ),
    "gemma3_half": made(22, 30, 5, 2, 2, 77, 128, head_dim=8, window=5, **gemma(22, (2,), 5)),
    "lfm2": made(32, 48, 4, 4, 2, 68, 128, True, rope_theta=1e6, qk_norm=True, conv=((0, 1, 3), ConvConfig())),
    "lfm2_biases": made(20, 37, 3, 2, 1, 65, 128, False, rope_theta=1e6, qk_norm=True, conv=((1,), ConvConfig(4, True))),
    "lfm2_odd": made(36, 55, 3, 3, 3, 70, 128, False, norm_eps=1e-6, rope_theta=1e4, qk_norm=True, conv=((0, 2), ConvConfig(2))),
}
CONFIGS |= {
    "qwen35": made(
        32, 48, 4, 2, 1, 70, 128, True, norm_eps=1e-6, head_dim=16, rope_dim=4, qk_norm=True, attention_gate=True,
        delta=((0, 1, 2), DeltaConfig(2, 4, 8, 16)),
    ),
    "qwen35_odd": made(
        36, 40, 3, 3, 1, 65, 128, False, norm_eps=1e-6, rope_theta=1e5, head_dim=20, rope_dim=10, qk_norm=True,
        attention_gate=True, delta=((1,), DeltaConfig(3, 3, 7, 5, 3)),
    ),
    "qwen35_images": made(
        64, 40, 2, 2, 2, 72, 128, True, norm_eps=1e-6, rope_theta=1e7, head_dim=32, rope_dim=8, qk_norm=True,
        attention_gate=True, delta=((0,), DeltaConfig(1, 2, 32, 40)),
    ),
    "qwen2_layers": made(
        24, 30, 3, 2, 1, 66, 128, False, norm_eps=1e-6, qkv_bias=True, window=9, rope_divisors=(4.0,) * 6,
        layers=full_layers((0,), 3),
    ),
    "qwen3_moe": made(
        32, 40, 3, 4, 2, 70, 128, False, norm_eps=1e-6, head_dim=12, qk_norm=True,
        experts=ExpertsConfig(6, 2, 20, True, (1,)),
    ),
    "mixtral": made(24, 36, 2, 3, 1, 66, 128, False, norm_eps=1e-5, rope_theta=1e6, experts=ExpertsConfig(5, 3, 36)),
    "olmo2": made(40, 36, 3, 5, 1, 69, 128, False, norms="behind", qk_norm="whole"),
    "olmoe": made(36, 20, 2, 3, 1, 67, 128, False, qk_norm="whole", experts=ExpertsConfig(7, 3, 20, False)),
    "granitemoe": made(32, 24, 2, 4, 2, 70, 128, False, norm_eps=1e-6, experts=ExpertsConfig(4, 4, 24), **GRANITE),
    "granitemoe_shared": made(
        40, 20, 2, 5, 1, 65, 128, False, norm_eps=1e-6, experts=ExpertsConfig(5, 2, 20, shared_dim=33), **GRANITE
    ),
    "lfm2_moe": made(
        32, 44, 4, 4, 2, 68, 128, True, rope_theta=1e6, qk_norm=True, conv=((0, 1, 3), ConvConfig()),
        experts=ExpertsConfig(6, 3, 20, True, (0,), True, True),
    ),
    "qwen35_moe": made(
        32, 48, 4, 2, 1, 70, 128, False, norm_eps=1e-6, head_dim=16, rope_dim=4, qk_norm=True, attention_gate=True,
        delta=((0, 1, 2), DeltaConfig(2, 2, 16, 16)), experts=ExpertsConfig(6, 2, 12, shared_dim=28, shared_gate=True),
    ),
    "gpt_oss": made(
        32, 32, 3, 4, 2, 70, 128, False, rope_theta=100, head_dim=12, rope_scaling=YarnScaling(8, 16, 4, 1, in_whole_pairs=False),
        rope_scale=float(np.float32(1 + 0.1 * math.log(8))), window=11, layers=full_layers((1,), 3), qkv_bias=True,
        wo_bias=True, sinks=True, experts=ExpertsConfig(6, 3, 32, limit=7.0, alpha=1.702),
    ),
    "gemma4": made(
        20, 21, 6, 2, 1, 70, 128, head_dim=6, inputs=InputsConfig(7, 70), logit_cap=3.0, **gemma4(20, "wawwaa", 3, 16, 9, 2, 42)
    ),
    "gemma4_images": made(
        32, 24, 5, 4, 2, 66, 128, head_dim=8, inputs=InputsConfig(32, 66), logit_cap=30.0, **gemma4(32, "wwawa", 2, 12, 5, 1)
    ),
    "gemma4_dense": made(
        24, 30, 4, 4, 2, 75, 128, False, head_dim=8, **gemma4(24, "wwwa", 0, 16, 11, 2, n_kv_heads=1, values_are_keys=True)
    ),
    "gemma4_moe": made(
        28, 26, 4, 4, 2, 68, 128, head_dim=8, logit_cap=20.0, experts=ExpertsConfig(6, 3, 12, is_beside=True),
        **gemma4(28, "wwwa", 0, 12, 8, 1, values_are_keys=True),
    ),
    "seed_oss": made(36, 44, 2, 3, 1, 67, 128, False, norm_eps=1e-6, head_dim=10, qkv_bias=True),
    "qwen3_next": made(
        32, 48, 4, 2, 1, 70, 128, False, norm_eps=1e-6, head_dim=16, rope_dim=4, qk_norm=True, attention_gate=True,
        delta=((0, 1, 2), DeltaConfig(2, 4, 16, 16)), experts=ExpertsConfig(6, 2, 12, shared_dim=28, shared_gate=True),
    ),
    "qwen3_next_odd": made(
        36, 40, 4, 3, 1, 65, 128, False, norm_eps=1e-6, rope_theta=1e5, head_dim=20, rope_dim=10, qk_norm=True,
        attention_gate=True, delta=((0, 2, 3), DeltaConfig(2, 6, 7, 5, 3)),
        experts=ExpertsConfig(5, 3, 20, False, (0, 1, 2), shared_dim=9, shared_gate=True),
    ),
    "olmo3": made(
        40, 36, 4, 5, 1, 71, 128, False, norms="behind", qk_norm="whole", rope_theta=100, window=9,
        layers=full_layers((3,), 4, rope_scaling=YarnScaling(4, 16, 2, 0.1), rope_scale=float(np.float32(1 + 0.1 * math.log(4)))),
    ),
    "glm4": made(36, 40, 2, 3, 1, 68, 128, False, norms="around", norm_eps=1.5625e-7, head_dim=12, rope_dim=6, qkv_bias=True),
}  # fmt: skip


class Expected(NamedTuple):
    """What transformers says of a fixture: tokens (60,), logits (60, V), the greedy continuation of the first five tokens.

    sums: the CRC-32 of each tensor's bytes.
    """

    tokens: list[int]
    logits: Any
    continuation: list[int]
    sums: dict[str, int]


def expected(name: str) -> Expected:
    with np.load(FIXTURES / name / "expected.npz") as file:
        sums = dict(zip(file["names"].tolist(), file["sums"].tolist(), strict=True))
        return Expected(file["tokens"].tolist(), file["logits"], file["continuation"].tolist(), sums)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what lies behind it."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def joined(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    """A safetensors file of that header, an object or any bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def safetensors_bytes(tensors: Mapping[str, tuple[str, Any]]) -> bytes:
    """A whole file of arrays and what the header says that they are."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at := at + array.nbytes]}
    return joined(header, b"".join(array.tobytes() for _, array in tensors.values()))


def stored(folder: Path) -> dict[str, tuple[str, Any]]:
    """All tensors of a sound folder: their dtypes' names and their arrays, of bf16 the bits."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, data = split(path.read_bytes())
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                array = np.frombuffer(data[first:last], DTYPES.get(entry["dtype"], np.uint8))
                is_known = math.prod(entry["shape"]) == array.size
                result[name] = entry["dtype"], array.reshape(entry["shape"]) if is_known else array
    return result


def copy(folder: Path, name: str = "llama", /, **changes: Any) -> Path:
    """A fixture's copy in a new folder, whose config.json has other values."""
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("expected.npz"))
    return configure(folder, **changes)


def configure(folder: Path, file: str = "config.json", /, **changes: Any) -> Path:
    """The folder, some values of whose config are others or `GONE`."""
    path = folder / file
    values = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not GONE}))
    return folder


def retensor(folder: Path, change: Callable[[dict[str, tuple[str, Any]]], Any]) -> Path:
    """The folder, whose tensors are changed and lie in one file."""
    tensors = stored(folder)
    change(tensors)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors))
    return folder


def beside_images(folder: Path, prefix: str, head: str = "lm_head.weight", /, **others: Any) -> Path:
    """The folder, whose model is that of the text of one that sees images too: nested in its config, its tensors named so."""
    values = json.loads((folder / "config.json").read_text())
    values["text_config"] = values | {"architectures": None}
    values |= {"model_type": "mistral3", "vision_config": {"model_type": "pixtral", "hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in (values | others).items() if value is not GONE}))

    def rename(tensors: dict[str, tuple[str, Any]]) -> None:
        images = ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight")
        own = {head if name == "lm_head.weight" else name.replace("model.", prefix, 1): each for name, each in tensors.items()}
        tensors.clear()
        tensors |= own | {name: ("F32", np.ones((3, 2), np.float32)) for name in images}

    return retensor(folder, rename)


def read_all(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every tensor, those of layers one on the other."""
    tensors = checkpoint.tensors
    return {name: np.stack([t[:] for t in ts]) if isinstance(ts, list) else ts[:] for name, ts in tensors.items()}


def message_of(folder: Path, *words: str) -> str:
    """The refusal's text, which is a line, names the folder or a file in it, and says those words."""
    with pytest.raises(CheckpointError) as caught:
        read_all(load_checkpoint(folder))
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(folder))
    for word in words:
        assert word in message.replace(str(folder), ""), message
    message.encode()
    return message
