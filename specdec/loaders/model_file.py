"""Files of a model: read ranges of bytes and JSON objects, and recognize files in unsupported formats by their first bytes."""

import codecs
import json
import os
import re
from collections import Counter
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specdec.argument_checks import (
    UTF16_MARKS,
    CheckpointError,
    JSONDict,
    decode_text,
    format_json_value,
    shorten,
    wrap_read_errors,
)
from specdec.runtime.disk_store import NewFile

# Names of files in a Hugging Face folder
CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # all weights in one file, or the index of the shards
PICKLE_WEIGHTS = "pytorch_model.bin"  # the weights of older folders
MERGE_HINT = "merge it with merge_and_unload of peft, and save it with save_pretrained"  # for an adapter
TOKENIZER_FILE = "tokenizer.json"
GGUF_MAGIC = b"GGUF"
READ_CHUNK_BYTES = 1 << 26  # Ctrl-C works between two reads
MAX_JSON_BYTES = 100_000_000  # limit of a safetensors header; other JSON files are far smaller
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(?!00000)(\d{5})\.gguf", re.ASCII | re.DOTALL)
SNIFF_BYTES = 512
MIN_TEXT_BYTES = 2  # one byte alone is no evidence
EXPECTED_MODEL = "expected a GGUF file, a folder with config.json and model.safetensors, or a llama2.c checkpoint"
ORIGINAL_HINT = "use the original model's folder, or a GGUF file of it"
DOWNLOAD_AGAIN_HINT = "download it again"
LFS_POINTER = b"version https://git-lfs"  # the first bytes of what a clone without Git LFS has in place of a large file
IS_LFS_POINTER = "is a Git LFS pointer in place of the file; run `git lfs pull` in its folder, or download the file itself"
PICKLE = "a PyTorch file, which may run code when it is read, so it is not supported"

Bytes = npt.NDArray[np.uint8]


class ModelFile:
    """A file of a model, to read ranges of bytes from, with a check that it stays the same file while it is in use.

    Raises CheckpointError if it cannot be read. It is not memory-mapped: truncating a mapped file kills every process that reads
    the mapping.
    """

    def __init__(self, path: Path) -> None:
        """Remember the file's size and identity; raise CheckpointError if it is not a readable file."""
        self.path = path
        with wrap_read_errors(path, CheckpointError, "a model file"):
            self._identity = _get_identity(path.stat())
            self.size = path.stat().st_size

    def make_error(self, name: str, problem: str) -> CheckpointError:
        """Return an error, to be raised, about a tensor or a key of the file; `problem` follows its name."""
        return CheckpointError(f"{self.path}: {format_json_value(name)} {problem}")

    def read(self, start: int, n_bytes: int) -> Bytes:
        """Read n_bytes of the file from byte `start` on, and return them as a vector.

        Raises:
            CheckpointError: The file cannot be read, or has changed since this object was created.
        """
        return self.read_strided(start, 1, n_bytes, n_bytes).reshape(-1)

    def read_strided(self, start: int, n: int, n_bytes: int, stride: int) -> Bytes:
        """Read n runs of n_bytes of the file, and return them as (n, n_bytes).

        Args:
            start: Byte at which the first run begins.
            n: Number of runs.
            n_bytes: Bytes of a run.
            stride: Bytes from the start of a run to the start of the next.

        Raises:
            CheckpointError: As in `read`.
        """
        runs = np.empty((n, n_bytes), np.uint8)
        with wrap_read_errors(self.path, CheckpointError), self.path.open("rb", buffering=0) as file:
            chunks = runs.reshape(1, -1) if n_bytes == stride else runs
            is_complete = all(_fill_buffer(file, start + i * stride, chunk) for i, chunk in enumerate(chunks))
            identity = _get_identity(os.fstat(file.fileno()))
        if not is_complete or identity != self._identity:
            raise CheckpointError(f"{self.path} changed while it was being read; try again when it is complete")
        return runs


def _fill_buffer(file: FileIO, start: int, data: Bytes) -> bool:
    """Fill a buffer with the bytes of a file from byte `start` on; return False if the file ends before the buffer is full."""
    file.seek(start)
    done = 0
    while done < data.size and (n := file.readinto(data.data[done : done + READ_CHUNK_BYTES])):
        done += n
    return done == data.size


def _get_identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


# GGUF files


def is_gguf(path: Path) -> bool:
    """Return whether a file is to be read as GGUF, because it has the suffix .gguf or begins with GGUF's magic bytes.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = ModelFile(path)
    return path.suffix == ".gguf" or file.read(0, min(len(GGUF_MAGIC), file.size)).tobytes() == GGUF_MAGIC


def list_shard_names(name: str) -> list[str]:
    """Return the file names of all shards of a split GGUF model from the name of one shard, in order; [name] for another file."""
    match = _SHARD_NAME.fullmatch(name)
    return [f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(int(match[3]))] if match else [name]


def list_shards(path: Path) -> list[Path]:
    """Return a model's path, with the other shards that exist if it is a shard of a split GGUF model, in order."""
    shards = (path.with_name(name) for name in list_shard_names(path.name))
    return [shard for shard in shards if shard == path or shard.is_file()]


# JSON and text files


def read_json_object(path: Path) -> JSONDict:
    """Read a JSON file and return its object as a dict.

    Raises:
        CheckpointError: The file cannot be read, is too large, or holds no valid JSON object.
    """
    file = ModelFile(path)
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {file.size} bytes; expected a JSON object of {MAX_JSON_BYTES} at most")
    return parse_json_object(path, file.read(0, file.size).tobytes())


def read_optional_json_object(path: Path) -> JSONDict:
    """Read a JSON file that may be missing, and return its object as a dict, {} if there is no file.

    Raises:
        CheckpointError: As in `read_json_object`.
    """
    return read_json_object(path) if path.exists() else {}


def parse_json_object(path: Path, data: bytes, part_name: str = "") -> JSONDict:
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
        value = json.loads(decode_text(data), object_pairs_hook=_reject_duplicate_keys)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 at byte {error.start}; expected a JSON object") from None
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply; expected a JSON object") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {' '.join(str(error).split())[:100]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {format_json_value(value)}; expected an object")
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
    with NewFile(path, mode) as file:
        file.write(text.encode())
        file.publish()


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> JSONDict:
    result = dict(pairs)
    if len(result) < len(pairs):
        ((duplicate, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {format_json_value(duplicate)} is given twice in an object")
    return result


# Files in unsupported formats

# The first bytes of files that people take for models, what they are, and what to do; the first match counts.
UNSUPPORTED_FORMATS = (
    (rb".{8}\{\s*\"", "a safetensors file", "name the folder that holds it, its config.json and its tokenizer.json"),
    (rb"PK\x03\x04.{26}[^/]{1,30}/(data\.pkl|byteorder|version|\.format)", PICKLE, ORIGINAL_HINT),
    (rb"\x80[\x02-\x05](\x8a\x0a\x6c\xfc\x9c\x46|\x95|ctorch|\}|\]|c)", PICKLE, ORIGINAL_HINT),
    (rb"MZqFpD", "a llamafile, which is a program with a GGUF file in it", "unpack the GGUF file with unzip and name it"),
    (rb"\x08[\x01-\x10][\x12\x3a]", "an ONNX model, which is not supported", ORIGINAL_HINT),
    (rb"lmgg|fmgg|tjgg|algg", "a ggml file that is older than GGUF", "convert it, or download a GGUF file"),
    (rb"\n.\n.<(unk|pad|s)>", "a SentencePiece tokenizer", "make a tokenizer.json with save_pretrained of transformers"),
    (rb"PK\x03\x04|\x1f\x8b\x08|BZh|\xfd7zXZ|7z\xbc\xaf|Rar!|.{257}ustar", "an archive", "unpack it first"),
)
WEB_PAGE = re.compile(rb"\s*(<!doctype|<html|<\?xml)", re.IGNORECASE)


def identify_file(path: Path, expected: str) -> str:
    """Return the part of an error that says what an unsupported file is and what to do; "" if the format is not recognized.

    An example is "is an archive; unpack it first". The file is recognized by its first bytes.

    Args:
        path: A file, not a folder.
        expected: What the caller can read, for the error about a text file.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = ModelFile(path)
    head = file.read(0, min(SNIFF_BYTES, file.size)).tobytes()
    if head.startswith(LFS_POINTER):
        return IS_LFS_POINTER
    if WEB_PAGE.match(head):
        return "is a web page, not the file that it links to; download the file itself"
    if text := _decode_text(head):
        return f"is a text file that begins with {shorten(text)!r}; {expected}"
    known = (f"is {name}; {advice}" for signature, name, advice in UNSUPPORTED_FORMATS if re.match(signature, head, re.DOTALL))
    return next(known, "")


def is_text(path: Path) -> bool:
    """Return whether the first bytes of a file are printable text; False for a web page or a Git LFS pointer.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = ModelFile(path)
    return bool(_decode_text(file.read(0, min(SNIFF_BYTES, file.size)).tobytes()))


def reject_unsupported_formats(path: Path) -> None:
    """Raise CheckpointError if a file's first bytes are those of an unsupported format or of something other than a model."""
    if problem := identify_file(path, EXPECTED_MODEL):
        raise CheckpointError(f"{path} {problem}")


def _decode_text(head: bytes) -> str:
    """Decode the first bytes of a file; return "" if they are not printable text, or are a Git LFS pointer or a web page."""
    if len(head) < MIN_TEXT_BYTES or head.startswith(LFS_POINTER) or WEB_PAGE.match(head):
        return ""
    is_wide = head.startswith(UTF16_MARKS)
    try:
        text = codecs.getincrementaldecoder("utf-16" if is_wide else "utf-8-sig")().decode(
            head
        )  # the last character may be cut off
    except UnicodeDecodeError:
        return ""
    return text if all(char.isprintable() or char.isspace() for char in text) else ""
