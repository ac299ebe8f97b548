"""Hugging Face folders for the tests: the fixtures of make_fixtures.py, and copies of them with something changed."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz"))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}
GONE = object()  # as a key's value: no such key


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
