"""Read and write small files: JSON objects with one-line errors, and text that is replaced atomically."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.families.config_values import CheckpointError, format_json_value
from specdec.loaders.checkpoint import ModelFile
from specdec.loaders.unsupported_formats import IS_LFS_POINTER, LFS_POINTER

MAX_JSON_BYTES = 100_000_000  # limit of a safetensors header; other JSON files are far smaller


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file and return its object as a dict.

    Raises:
        CheckpointError: The file cannot be read, is too large, or holds no valid JSON object.
    """
    file = ModelFile(path)
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {file.size} bytes; expected a JSON object of {MAX_JSON_BYTES} at most")
    return parse_json_object(path, file.read(0, file.size).tobytes())


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that may be missing, and return its object as a dict, {} if there is no file.

    Raises:
        CheckpointError: As in `read_json_object`.
    """
    return read_json_object(path) if path.exists() else {}


def parse_json_object(path: Path, data: bytes, part_name: str = "") -> dict[str, Any]:
    """Parse bytes of a file as a JSON object, and return the object as a dict.

    Args:
        path: The file, for errors.
        data: The bytes.
        part_name: Name of this part of the file, such as "the header", for errors.

    Raises:
        CheckpointError: The bytes are not a JSON object, or a key occurs twice.
    """
    where = f"{path}: {part_name}" if part_name else f"{path}"
    if data.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} {IS_LFS_POINTER}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 at byte {error.start}; expected a JSON object") from None
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply; expected a JSON object") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {' '.join(str(error).split())[:100]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is a JSON {_get_json_type(value)}; expected an object")
    return value


def write_text_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file completely or not at all: if writing fails, the old file stays as it is.

    Args:
        path: The file.
        text: Its new content.
        mode: Permissions of the file, before the umask.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {format_json_value(duplicate)} is given twice in an object")
    return result


def _get_json_type(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
