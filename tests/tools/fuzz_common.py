"""What the campaigns of tests/tools/fuzz.py have in common: how a case ends, a folder for files, and harm done to them."""

import atexit
import math
import shutil
import struct
import tempfile
from pathlib import Path

FINE, REFUSED = "fine", "refused"
FOLDER = Path(tempfile.mkdtemp(prefix="specdec-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
EXTREMES = (0, 1, 2, 3, 7, 8, -1, -2, 255, 2**15, 2**16, 2**24, 2**30, 2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1)
ODD_FLOATS = (math.nan, math.inf, -math.inf, -0.0, 1e-45, 1e-40, 1e-30, 1e19, 3e38, -3e38, -1.0)


def one_line(error, *words):
    """The refusal's words, which are one line and hold one of those."""
    told = str(error)
    assert told and "\n" not in told and len(told) < 300 + 2 * len(max(words, key=len)), f"not one short line: {told!r}"
    assert any(word in told for word in words), f"none of {words} in {told!r}"
    return REFUSED


def damaged(rng, data, other, header, fields):
    """Bytes with some harm done: header bytes of which int32 fields begin at those offsets, and another file's bytes."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        match rng.randrange(7):
            case 0 | 1 if data:  # bits, of the header or of anything
                for _ in range(rng.randint(1, 8)):
                    data[rng.randrange(min(header, len(data)) if rng.random() < 0.5 else len(data))] ^= 1 << rng.randrange(8)
            case 2:
                del data[rng.choice([rng.randint(0, len(data)), rng.randint(0, min(header, len(data))), -1]) :]
            case 3:
                data += rng.randbytes(rng.choice([1, 4, rng.randint(1, 5000)]))
            case 4:
                data = data[: rng.choice([header, rng.randint(0, len(data))])] + other[rng.randint(0, len(other)) :]
            case 5:
                at, value = rng.choice(fields), rng.choice([*EXTREMES, rng.randint(1, 300)])
                data[at : at + 4] = struct.pack("<i", value)
            case 6 if len(data) >= header + 4:
                at = header + rng.randrange((len(data) - header) // 4) * 4
                data[at : at + 4] = struct.pack("<f", rng.choice(ODD_FLOATS))
    return bytes(data)


def random_json(rng):
    """Any value that JSON can say, and some that only Python's can."""
    return rng.choice([
        None, True, False, 0, 1, 2, 3, 7, -1, 16, 64, 128, 2**31, 2**63, 10**30, 10**400, 0.0, 1.0, 1e-6, 0.5, 1e5, 5e5, 1e300,
        math.nan, math.inf, "", "silu", "default", "llama3", "llama", "gpt2", "qwen2", "x" * 5000, "\ud800", "a\nb", [], [1],
        [2, 3], ["full_attention"] * 2, ["sliding_attention"] * 2, {}, {"rope_type": "yarn"}, {"a": {"b": [None]}},
    ])  # fmt: skip
