"""Hugging Face folders for the tests: the fixtures of make_fixtures.py, and changed copies of them."""

import functools
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specdec.loaders import Checkpoint, CheckpointError, load_checkpoint
from specdec.model_config import ModelConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
MXFP4_FIXTURE = "gpt_oss_mxfp4"  # a matmul of its blocks differs from one of the floats that transformers makes of them
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz") if path.parent.name != MXFP4_FIXTURE)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "I64": np.int64}
DELETED = sys.intern("<gone>")  # value, compared by identity, that deletes a key
TABLE = FIXTURES / "golden.json"  # see tests/tools/golden.py
CONFIG_TABLE: dict[str, Any] = json.loads(TABLE.read_text())["configs"]


@functools.cache
def load_config(name: str) -> ModelConfig:
    """Return the config of a fixture."""
    return load_checkpoint(FIXTURES / name).config


class FixtureConfigs(Mapping[str, ModelConfig]):
    """The configs of the fixtures, each loaded when it is needed; new fixtures come behind those of `CONFIG_TABLE`."""

    def __getitem__(self, name: str) -> ModelConfig:
        return load_config(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*CONFIG_TABLE, *(name for name in NAMES if name not in CONFIG_TABLE)])

    def __len__(self) -> int:
        return len({*CONFIG_TABLE, *NAMES})


CONFIGS = FixtureConfigs()


class Expected(NamedTuple):
    """Results of transformers for a fixture.

    Attributes:
        tokens: (60,).
        logits: (60, V).
        continuation: Greedy continuation of the first five tokens.
        sums: CRC-32 of each tensor's bytes.
    """

    tokens: list[int]
    logits: Any
    continuation: list[int]
    sums: dict[str, int]


def load_expected(name: str) -> Expected:
    with np.load(FIXTURES / name / "expected.npz") as file:
        sums = dict(zip(file["names"].tolist(), file["sums"].tolist(), strict=True))
        return Expected(file["tokens"].tolist(), file["logits"], file["continuation"].tolist(), sums)


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file and the data behind it."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def join_safetensors(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    """Return a safetensors file with this header, an object or any bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def safetensors_bytes(tensors: Mapping[str, tuple[str, Any]]) -> bytes:
    """Return a safetensors file with arrays and their dtypes in the header."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at := at + array.nbytes]}
    return join_safetensors(header, b"".join(array.tobytes() for _, array in tensors.values()))


def read_folder_tensors(folder: Path) -> dict[str, tuple[str, Any]]:
    """Return all tensors of a valid folder: names of dtypes and arrays, with the bits of bf16."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, data = split_safetensors(path.read_bytes())
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                array = np.frombuffer(data[first:last], DTYPES.get(entry["dtype"], np.uint8))
                is_known = math.prod(entry["shape"]) == array.size
                result[name] = entry["dtype"], array.reshape(entry["shape"]) if is_known else array
    return result


def copy_fixture(folder: Path, name: str = "llama", /, **changes: Any) -> Path:
    """Copy a fixture to a new folder and change values of its config.json."""
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("expected.npz"))
    return edit_config(folder, **changes)


def edit_config(folder: Path, file: str = "config.json", /, **changes: Any) -> Path:
    """Change values of a folder's config; `DELETED` removes a key. Return the folder."""
    path = folder / file
    values = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not DELETED}))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, tuple[str, Any]]], Any]) -> Path:
    """Change the tensors of a folder and write them to one file. Return the folder."""
    tensors = read_folder_tensors(folder)
    change(tensors)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors))
    return folder


def wrap_multimodal(folder: Path, prefix: str, head: str = "lm_head.weight", /, **others: Any) -> Path:
    """Turn a model into the language model of a multimodal one: nested config, prefixed tensors. Return the folder."""
    values = json.loads((folder / "config.json").read_text())
    values["text_config"] = values | {"architectures": None}
    values |= {"model_type": "mistral3", "vision_config": {"model_type": "pixtral", "hidden_size": 8}}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in (values | others).items() if value is not DELETED})
    )

    def rename(tensors: dict[str, tuple[str, Any]]) -> None:
        images = ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight")
        own = {head if name == "lm_head.weight" else name.replace("model.", prefix, 1): each for name, each in tensors.items()}
        tensors.clear()
        tensors |= own | {name: ("F32", np.ones((3, 2), np.float32)) for name in images}

    return edit_tensors(folder, rename)


def read_all_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all tensors, those of layers stacked."""
    tensors = checkpoint.tensors
    return {name: np.stack([t[:] for t in ts]) if isinstance(ts, list) else ts[:] for name, ts in tensors.items()}


def assert_same_tensors(got: Checkpoint | dict[str, Any], expected: Checkpoint | dict[str, Any]) -> None:
    """Raise AssertionError unless both have the same tensors, with equal shapes and dtypes."""
    arrays, others = (read_all_tensors(each) if isinstance(each, Checkpoint) else each for each in (got, expected))
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, others[name], name, strict=True)


def get_error(call: Callable[[], object], error: type[Exception] = CheckpointError) -> str:
    """Return the error message of a call, which is one line."""
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_rejected(folder: Path, *words: str) -> str:
    """Return the error message, after checking that it is one line and names the folder and the words."""
    message = get_error(lambda: read_all_tensors(load_checkpoint(folder)))
    assert str(folder) in message
    assert len(message.partition("; supported: ")[0]) < 400 + len(str(folder))
    for word in words:
        assert word in message.replace(str(folder), ""), message
    message.encode()
    return message
