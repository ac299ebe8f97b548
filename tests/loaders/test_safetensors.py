"""Reading of safetensors files: a header is that of a complete file, or the file is rejected in one line."""

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.loaders import CheckpointError
from specdec.loaders.safetensors import SafetensorsFile
from tests.tools import hf_folders
from tests.tools.checkpoint_files import limit_memory
from tests.tools.hf_folders import get_error, join_safetensors, safetensors_bytes

ARRAYS = {
    "a": ("F32", np.arange(-6, 6, dtype=np.float32).reshape(3, 4)),
    "b": ("BF16", np.arange(0x3F00, 0x3F0A, dtype=np.uint16).reshape(5, 2)),
    "c": ("F16", np.arange(7, dtype=np.float16)),
    "d": ("U8", np.arange(3, dtype=np.uint8)),
}
HEADER, DATA = hf_folders.split_safetensors(safetensors_bytes(ARRAYS))


def get_message(path: Path, data: bytes) -> str:
    """Return the error message, which is one line and names the file."""
    path.write_bytes(data)
    message = get_error(lambda: SafetensorsFile(path))
    assert str(path) in message
    assert len(message) < 300 + len(str(path))
    return message


def with_entry(name: str, **changes: Any) -> bytes:
    return join_safetensors(HEADER | {name: HEADER[name] | changes}, DATA)


@pytest.mark.parametrize("padding", [b"", b"   "])
def test_reading_returns_what_was_written(tmp_path: Path, padding: bytes) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"__metadata__": {"format": "pt"}, **HEADER}).encode() + padding
    path.write_bytes(join_safetensors(header, DATA))
    file = SafetensorsFile(path)
    assert list(file.entries) == list(ARRAYS)
    for name, (_, array) in list(ARRAYS.items())[:3]:
        tensor = file.get_tensor(name)
        assert tensor.dtype == array.dtype
        np.testing.assert_array_equal(tensor[:], array, strict=True)
        np.testing.assert_array_equal(tensor[1:3], array[1:3], strict=True)
        np.testing.assert_array_equal(tensor.slice_rows(1, 3)[1:], array[2:3], strict=True)
    np.testing.assert_array_equal(file.get_tensor("a").read_columns(1, 3), ARRAYS["a"][1][:, 1:3], strict=True)


@pytest.mark.parametrize("name", hf_folders.NAMES)
def test_tensors_equal_those_of_the_safetensors_library(name: str) -> None:
    sums = hf_folders.load_expected(name).sums
    found = {}
    for path in (hf_folders.FIXTURES / name).glob("*.safetensors"):
        file = SafetensorsFile(path)
        found |= {
            tensor: zlib.crc32(file.get_tensor(tensor)[:].tobytes()) for tensor in file.entries if "attn." not in tensor[-17:]
        }
    assert found == {tensor: value for tensor, value in sums.items() if "attn." not in tensor[-17:]}
    assert len(found) > 10


@pytest.mark.parametrize(("name", "bits"), [("a", np.float32(np.nan)), ("b", 0x7F80), ("b", 0xFFC0), ("c", np.float16(-np.inf))])
def test_non_finite_weights_are_rejected_in_every_dtype(tmp_path: Path, name: str, bits: Any) -> None:
    arrays = {key: (dtype, array.copy()) for key, (dtype, array) in ARRAYS.items()}
    arrays[name][1].flat[-1] = bits
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(arrays))
    tensor = SafetensorsFile(path).get_tensor(name)
    np.testing.assert_array_equal(tensor[:-1], arrays[name][1][:-1])
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinite weights"):
        tensor[:]


DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "five bytes": (b"\1\0\0\0\0", "truncated: 5 bytes"),
    "header of 2^60 bytes": ((2**60).to_bytes(8, "little") + b"{}", str(2**60)),
    "header of 2^64 - 1 bytes": (b"\xff" * 8 + b"{}", str(2**64 - 1)),
    "header beyond the file": ((50).to_bytes(8, "little") + b"{}", "truncated"),
    "no JSON": (join_safetensors(b"{'a': 1}", b""), "is not valid JSON"),
    "no UTF-8": (join_safetensors(b'{"\xff": 1}', b""), "UTF-8"),
    "a list": (join_safetensors(b"[]", b""), "brace"),
    "a space first": (join_safetensors(b" {}", b""), "brace"),
    "no header": (join_safetensors(b"", b""), "brace"),
    "nested": (join_safetensors(b'{"a":' * 100_000, b""), "nested"),
    "a number of 5000 digits": (join_safetensors(b'{"a": ' + b"9" * 5000 + b"}", b""), "is not valid JSON"),
    "a key twice": (join_safetensors(json.dumps(HEADER).encode()[:-1] + b', "a": {}}', DATA), 'the key "a" is given twice'),
    "an offset twice": (
        join_safetensors(json.dumps(HEADER).encode().replace(b'"shape"', b'"data_offsets": [0, 4], "shape"', 1), DATA),
        "is given twice",
    ),
    "metadata that is a list": (join_safetensors({"__metadata__": [1], **HEADER}, DATA), "__metadata__"),
    "metadata of numbers": (join_safetensors({"__metadata__": {"a": 1}, **HEADER}, DATA), "__metadata__"),
    "an entry that is a list": (join_safetensors(HEADER | {"a": []}, DATA), '"a" is []'),
    "no dtype": (join_safetensors(HEADER | {"a": {"shape": [3, 4], "data_offsets": [0, 48]}}, DATA), '"a"'),
    "dtype that is a number": (with_entry("a", dtype=5), '"a"'),
    "shape that is a number": (with_entry("a", shape=12), '"a"'),
    "shape of truth values": (with_entry("c", shape=[True, 7]), '"c"'),
    "shape of floats": (with_entry("c", shape=[7.0]), '"c"'),
    "negative shape": (with_entry("a", shape=[-3, -4]), '"a"'),
    "shape of a million dimensions": (with_entry("a", shape=[2**62] * 10**5), '"a"'),
    "one offset": (with_entry("a", data_offsets=[0]), '"a"'),
    "negative offset": (with_entry("a", data_offsets=[-48, 0]), '"a"'),
    "offset as a float": (with_entry("a", data_offsets=[0, 48.0]), '"a"'),
    "another size": (with_entry("a", shape=[3, 5]), '"a" of F32 [3, 5] lies in 48 bytes'),
    "another dtype": (with_entry("a", dtype="F16"), '"a" of F16 [3, 4] lies in 48 bytes'),
    "offsets in the wrong order": (with_entry("a", data_offsets=[48, 0]), '"a"'),
    "overlapping offsets": (with_entry("b", data_offsets=[44, 64]), '"b" overlaps'),
    "one span for two": (join_safetensors(HEADER | {"e": HEADER["a"]}, DATA), "overlaps"),
    "a hole": (join_safetensors({k: v for k, v in HEADER.items() if k != "b"}, DATA), '"c" leaves a hole'),
    "a hole at the beginning": (join_safetensors({k: v for k, v in HEADER.items() if k != "a"}, DATA), '"b" leaves a hole'),
    "offsets past the end": (
        join_safetensors({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, DATA),
        "truncated",
    ),
    "offsets past 2^64": (join_safetensors({"a": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 2**72]}}, DATA), '"a"'),
    "an unknown dtype that ends before it begins": (
        join_safetensors({"x": {"dtype": "F9", "shape": [], "data_offsets": [4, 0]}}, DATA),
        '"x"',
    ),
    "a byte less": (join_safetensors(HEADER, DATA[:-1]), "truncated"),
    "a byte more": (join_safetensors(HEADER, DATA + b"\0"), "too long"),
    "a name that no terminal can write": (join_safetensors(b'{"\\ud800\\n": 1}', b""), r'"\ud800\n"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_rejected(tmp_path: Path, damage: str) -> None:
    data, word = DAMAGES[damage]
    with limit_memory((1 << 20) + 20 * len(data)):
        message = get_message(tmp_path / "model.safetensors", data)
    assert word in message
    message.encode()


def test_a_git_lfs_pointer_is_reported_with_advice(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    assert "git lfs pull" in get_message(tmp_path / "model.safetensors", pointer)


@pytest.mark.parametrize(("dtype", "words"), [("U8", r'"d" is "U8"; expected F32, F16, BF16'), ("F3\nE1M1", r"F3\\nE1M1")])
def test_an_unsupported_dtype_is_rejected_only_when_the_tensor_is_used(tmp_path: Path, dtype: str, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_entry("d", dtype=dtype))
    file = SafetensorsFile(path)
    np.testing.assert_array_equal(file.get_tensor("a")[:], ARRAYS["a"][1])
    with pytest.raises(CheckpointError, match=words):
        file.get_tensor("d")


def test_a_file_that_changes_while_it_is_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(join_safetensors(HEADER, DATA))
    tensor = SafetensorsFile(path).get_tensor("a")
    os.truncate(path, path.stat().st_size - len(DATA))
    for read in (lambda: tensor[:], lambda: tensor.read_columns(1, 3)):
        with pytest.raises(CheckpointError, match=re.escape(f"{path} changed while")):
            read()
