"""JSON of files: an object, or one line that tells what is wrong. Knows no format that is written in it."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.families.config_values import CheckpointError, shown
from specdec.loaders.checkpoint import ModelFile
from specdec.loaders.format_sniffing import IS_LFS_POINTER, LFS_POINTER

MAX_BYTES = 100_000_000  # of a header, as the safetensors format has it; nothing else comes near


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises CheckpointError."""
    file = ModelFile(path)
    if file.size > MAX_BYTES:
        raise CheckpointError(f"{path} has {file.size} bytes; expected a JSON object of {MAX_BYTES} at most")
    return parse_object(path, file.read(0, file.size).tobytes())


def object_if_there(path: Path) -> dict[str, Any]:
    """As `read_object`; {} where there is no file."""
    return read_object(path) if path.exists() else {}


def parse_object(path: Path, data: bytes, what: str = "") -> dict[str, Any]:
    """The object that those bytes of the file say; what: they are, for people. Raises CheckpointError, also for a key twice."""
    where = f"{path}: {what}" if what else f"{path}"
    if data.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} {IS_LFS_POINTER}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_doubles)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is no UTF-8 at byte {error.start}; expected a JSON object") from None
    except RecursionError:
        raise CheckpointError(f"{where} is nested beyond all bounds; expected a JSON object") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is no JSON: {' '.join(str(error).split())[:100]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is a JSON {_kind(value)}; expected an object")
    return value


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file whole or not at all: a full disk leaves the old one. Raises OSError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(double)} stands twice in an object")
    return result


def _kind(value: object) -> str:
    kinds = {list: "list", str: "string", bool: "truth value", int: "number", float: "number"}
    return kinds.get(type(value), "null")
