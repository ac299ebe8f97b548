"""Outcomes, a temporary folder, edge values, and damage of files for the campaigns of tests/tools/fuzz.py."""

import atexit
import json
import math
import re
import shutil
import struct
import tempfile
from pathlib import Path

from specdec.model import get_architecture
from tests.tools.gguf_files import RawTensor, TypedValue, gguf_bytes, header_bytes, to_raw_tensor
from tests.tools.hf_folders import join_safetensors, split_safetensors

FINE, REFUSED = "fine", "refused"
FOLDER = Path(tempfile.mkdtemp(prefix="specdec-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
EDGE_INTS = (0, 1, 2, 3, 7, 8, -1, -2, 255, 2**15, 2**16, 2**24, 2**30, 2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1)
EDGE_FLOATS = (math.nan, math.inf, -math.inf, -0.0, 1e-45, 1e-40, 1e-30, 1e19, 3e38, -3e38, -1.0)

GGUF_VALUES = (
    0, 1, 2, 3, 5, 31, 2**31, 0.0, 1.0, math.nan, math.inf, 1e-5, True, False, "", "llama", "eagle3", "gpt2", "yarn", "linear",
    "\udcff", TypedValue(10, 2**60), TypedValue(5, -1), TypedValue(11, -(2**60)), [1, 2], [1, 1, 2], [-1, 2, 3], ["a", "b"],
    [0.5, math.nan], [True],
)  # fmt: skip
GGUF_ITEMS = {
    str: ("", "a", "the", "\u2581", "a b", "\0", "<0x41>", "<|im_end|>", "\udcff", "\u0120", "\u0120 t", "é", "x" * 999),
    int: (0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1),
    float: (0.0, -1.0, math.inf, -math.inf, math.nan, 3e38, -1e-40),
}
GGUF_SHAPES = ((0, 32), (2**40, 0), (2**62, 2**62), (0,), (1,), (32, 96), (32, 1), (72, 0, 32), (2**63,))


def check_one_line(error, *words):
    """Return REFUSED if an error's message is one line, short but for a list of all that is supported, with one of the words."""
    message = str(error)
    length = len(message.partition("; supported: ")[0])
    assert message and "\n" not in message and length < 300 + 2 * len(max(words, key=len)), f"not one short line: {message!r}"
    assert any(word in message for word in words), f"none of {words} in {message!r}"
    return REFUSED


def corrupt(rng, data, other, header, fields):
    """Return a file's bytes with random damage.

    Args:
        rng: Source of randomness.
        data: Bytes to damage.
        other: Bytes of another file, some of which may replace the end.
        header: Size of the header in bytes.
        fields: Offsets of int32 fields of the header.
    """
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        match rng.randrange(7):
            case 0 | 1 if data:  # flipped bits, in the header or anywhere
                for _ in range(rng.randint(1, 8)):
                    data[rng.randrange(min(header, len(data)) if rng.random() < 0.5 else len(data))] ^= 1 << rng.randrange(8)
            case 2:
                del data[rng.choice([rng.randint(0, len(data)), rng.randint(0, min(header, len(data))), -1]) :]
            case 3:
                data += rng.randbytes(rng.choice([1, 4, rng.randint(1, 5000)]))
            case 4:
                data = data[: rng.choice([header, rng.randint(0, len(data))])] + other[rng.randint(0, len(other)) :]
            case 5:
                at, value = rng.choice(fields), rng.choice([*EDGE_INTS, rng.randint(1, 300)])
                data[at : at + 4] = struct.pack("<i", value)
            case 6 if len(data) >= header + 4:
                at = header + rng.randrange((len(data) - header) // 4) * 4
                data[at : at + 4] = struct.pack("<f", rng.choice(EDGE_FLOATS))
    return bytes(data)


def random_json(rng):
    """Return a JSON value, or one that only Python's json module can write."""
    return rng.choice([
        None, True, False, 0, 1, 2, 3, 7, -1, 16, 64, 128, 2**31, 2**63, 10**30, 10**400, 0.0, 1.0, 1e-6, 0.5, 1e5, 5e5, 1e300,
        math.nan, math.inf, "", "silu", "default", "llama3", "llama", "gpt2", "qwen2", "x" * 5000, "\ud800", "a\nb", [], [1],
        [2, 3], ["full_attention"] * 2, ["sliding_attention"] * 2, {}, {"rope_type": "yarn"}, {"a": {"b": [None]}},
    ])  # fmt: skip


def damage_folder(rng, folder, keys, values=()):
    """Damage files of a Hugging Face folder: their bytes, a safetensors header, or values of JSON files.

    Args:
        rng: Source of randomness.
        folder: The folder.
        keys: Keys of config.json to add.
        values: Values to give to keys, next to those of `random_json`.
    """
    files = sorted(folder.iterdir(), key=lambda file: (file.name == "config.json", file.name))[-4:]
    for path in rng.sample(files, min(len(files), rng.choice([0, 1, 1, 1, 2]))):
        data = path.read_bytes()
        if path.suffix == ".safetensors" and rng.random() < 0.5:
            header, rest = split_safetensors(data)
            name = rng.choice(list(header))
            target, key = rng.choice(
                [(header, name), (header[name], rng.choice(["dtype", "shape", "data_offsets"])), (header, "x")]
            )
            other = dict(rng.choice(list(header.values())))
            target[key] = rng.choice([random_json(rng), other, "F16", "I64", [0, 64], [8, 4], [2**70, 2]])
            if rng.random() < 0.2:
                header[name + rng.choice([".weight", "x", "\n"])] = header.pop(name)
            path.write_bytes(join_safetensors(header, rest))
        elif path.suffix == ".json" and rng.random() < 0.7:
            content = json.loads(data)
            target = rng.choice([content, *(value for value in content.values() if isinstance(value, dict))])
            for _ in range(rng.choice([1, 1, 2])):
                key = rng.choice([*target, *keys])
                target[key] = rng.choice([random_json(rng), rng.choice(values or [None])])
                if rng.random() < 0.1:
                    del target[key]
            path.write_text(json.dumps(content))
        else:
            start = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
            path.write_bytes(corrupt(rng, data, rng.choice(files).read_bytes(), start, [0, 4, 8, start]))


def damage_gguf(rng, keys, tensors, more_keys):
    """Return a GGUF file whose keys, items of lists, tensors or bytes may be damaged; more_keys: keys to add."""
    if rng.random() < 0.5:
        for _ in range(rng.choice([1, 1, 2])):
            keys[rng.choice([*keys, *more_keys])] = rng.choice(GGUF_VALUES)
        if rng.random() < 0.1:
            del keys[rng.choice(list(keys))]
    lists = [key for key, value in keys.items() if isinstance(value, list)]
    for key in rng.sample(lists, min(len(lists), rng.choice([0, 0, 1, 2]))):
        items = keys[key] = list(keys[key])
        for _ in range(rng.choice([1, 1, len(items)])):
            items[rng.randrange(len(items))] = rng.choice(GGUF_ITEMS.get(type(items[0]), items))
    if rng.random() < 0.2:
        name = rng.choice(list(tensors))
        tensor = to_raw_tensor(tensors.pop(name))
        changes = ({}, {"type": rng.choice(["I64", "I32", "F16", "Q8_0"])}, {"shape": rng.choice(GGUF_SHAPES)})
        tensors[name + rng.choice(["", "", "x", "\n"])] = tensor._replace(**rng.choice(changes))
    if rng.random() < 0.1:
        tensors[rng.choice(["output.weight", "token_embd.weight", "x"])] = RawTensor("F32", rng.choice(GGUF_SHAPES), b"")
    data, header = gguf_bytes(keys, tensors), len(header_bytes(keys, tensors))
    if rng.random() < 0.5:
        return data
    marks = [match.start() for match in re.finditer(b"blk|token|general|split|rope", data[:header])]
    fields = [at + rng.choice([-8, 20, 24, 28, 32, 36]) for at in rng.choices(marks, k=5)] if marks else []
    return corrupt(rng, data, gguf_bytes(keys, {}), header, [4, 8, 12, 16, 20, *fields])


def check_tensors(checkpoint, is_read=True):
    """Check that a checkpoint has the tensors that its config needs; is_read: also read them."""
    shapes = get_architecture(checkpoint.config).shapes(checkpoint.config)
    for name, tensor in checkpoint.tensors.items():
        is_list = isinstance(tensor, list)
        assert ((len(tensor), *tensor[0].shape) if is_list else tensor.shape) == shapes.pop(name), name
        for each in (tensor if is_list else [tensor]) if is_read else []:
            assert each[:].shape == each.shape, name
    assert not shapes
