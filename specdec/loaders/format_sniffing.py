"""Files of other kinds, recognised by their first bytes, and what to do with them. Reads nothing else."""

import codecs
import re
from pathlib import Path
from typing import NamedTuple

from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import ModelFile
from specdec.validation import short

HEAD_BYTES = 512
LEAST_TEXT = 2  # bytes: one alone tells nothing
MODEL = "expected a GGUF file, a folder with config.json and model.safetensors, or a llama2.c checkpoint"
ORIGINAL = "use the original model's folder, or a GGUF file of it"
DOWNLOAD, DOWNLOAD_AGAIN, UNPACK = "download the file itself", "download it again", "unpack it first"
LFS_POINTER = b"version https://git-lfs"  # the first bytes of what a clone without Git LFS holds in place of a large file
IS_LFS_POINTER = "is a Git LFS pointer in place of the file; run `git lfs pull` in its folder, or download the file itself"
PICKLE = "a PyTorch file, which may run code when it is read, so it is not supported"


class Stranger(NamedTuple):
    """A kind of file: a regex of its first bytes, its name with an article, and what to do; "" if only another file helps."""

    beginning: bytes
    name: str
    advice: str = ""


# of binary files; the first that fits counts
STRANGERS = (
    Stranger(rb".{8}\{\s*\"", "a safetensors file", "name the folder that holds it, its config.json and its tokenizer.json"),
    Stranger(rb"PK\x03\x04.{26}[^/]{1,30}/(data\.pkl|byteorder|version|\.format)", PICKLE),
    Stranger(rb"\x80[\x02-\x05](\x8a\x0a\x6c\xfc\x9c\x46|\x95|ctorch|\}|\]|c)", PICKLE),
    Stranger(rb"PK\x03\x04", "a zip archive, or a PyTorch file"),
    Stranger(rb"MZqFpD", "a llamafile, which is a program with a GGUF file in it", "unpack that with unzip and name it"),
    Stranger(rb"\x08[\x01-\x10][\x12\x3a]", "an ONNX model, which is not supported", ORIGINAL),
    Stranger(rb".{4}TFL3", "a TensorFlow Lite model, which is not supported", ORIGINAL),
    Stranger(rb"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes them, which is not supported", ORIGINAL),
    Stranger(rb"\x93NUMPY", "an array of NumPy, which is not supported", ORIGINAL),
    Stranger(rb"(lmgg|fmgg|tjgg|algg)", "a ggml file from before GGUF", "convert it, or download a GGUF file"),
    Stranger(
        rb"\n.\n.<(unk|pad|s)>", "a SentencePiece tokenizer", "make a tokenizer.json of it with save_pretrained of transformers"
    ),
    Stranger(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8|RIFF.{4}WEBP|BM.{4}\0{4}", "a picture"),
    Stranger(rb"%PDF-", "a PDF document"),
    Stranger(rb"MZ|\x7fELF|\xcf\xfa\xed\xfe", "a program"),
    Stranger(rb"\x1f\x8b\x08|BZh\d1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|7z\xbc\xaf\x27\x1c|Rar!", "a compressed file", UNPACK),
    Stranger(rb".{257}ustar", "a tar archive", UNPACK),
    Stranger(rb"\0{64}", "a file that begins with zeros, as an unfinished download does", DOWNLOAD),
)
WEB_PAGE = re.compile(rb"\s*(<!doctype|<html|<\?xml)", re.IGNORECASE)


def what_is(path: Path, expected: str) -> str:
    """Return what a file is and what to do, such as "is a picture; expected ..."; "" if its first bytes are none of these.

    Args:
        path: A file, not a folder.
        expected: What the caller can read, for kinds of files that have no advice of their own.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = ModelFile(path)
    head = file.read(0, min(HEAD_BYTES, file.size)).tobytes()
    if head.startswith(LFS_POINTER):
        return IS_LFS_POINTER
    if WEB_PAGE.match(head):
        return f"is a web page, not the file that it links to; {DOWNLOAD}"
    if text := _text_of(head):
        return f"is a text file, which begins {short(text)!r}; {expected}"
    found = (stranger for stranger in STRANGERS if re.match(stranger.beginning, head, re.DOTALL))
    return next((f"is {stranger.name}; {stranger.advice or expected}" for stranger in found), "")


def is_text(path: Path) -> bool:
    """Return whether a file begins like a text. Raises CheckpointError for one that cannot be read."""
    file = ModelFile(path)
    return bool(_text_of(file.read(0, min(HEAD_BYTES, file.size)).tobytes()))


def refuse_strangers(path: Path) -> None:
    """Raise CheckpointError for a file that is known to be something else than a model."""
    if flaw := what_is(path, MODEL):
        raise CheckpointError(f"{path} {flaw}")


def _text_of(head: bytes) -> str:
    """Return the text that the first bytes of a file are; "" if they are none, or one in place of another file."""
    if len(head) < LEAST_TEXT or head.startswith(LFS_POINTER) or WEB_PAGE.match(head):
        return ""
    is_wide = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        text = codecs.getincrementaldecoder("utf-16" if is_wide else "utf-8-sig")().decode(head)  # the last letter may be cut
    except UnicodeDecodeError:
        return ""
    return text if all(letter.isprintable() or letter.isspace() for letter in text) else ""
