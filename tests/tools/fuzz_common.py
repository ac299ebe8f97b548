"""Outcomes, a temporary folder, edge values and file corruption for the campaigns of tests/tools/fuzz.py."""

import atexit
import math
import shutil
import struct
import tempfile
from pathlib import Path

FINE, REFUSED = "fine", "refused"
FOLDER = Path(tempfile.mkdtemp(prefix="specdec-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
EDGE_INTS = (0, 1, 2, 3, 7, 8, -1, -2, 255, 2**15, 2**16, 2**24, 2**30, 2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1)
EDGE_FLOATS = (math.nan, math.inf, -math.inf, -0.0, 1e-45, 1e-40, 1e-30, 1e19, 3e38, -3e38, -1.0)


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
