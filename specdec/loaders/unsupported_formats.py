"""Recognition of files in unsupported formats by their first bytes, with advice on what to do."""

import codecs
import re
from pathlib import Path
from typing import NamedTuple

from specdec.argument_checks import shorten
from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import ModelFile

SNIFF_BYTES = 512
MIN_TEXT_BYTES = 2  # one byte alone is no evidence
EXPECTED_MODEL = "expected a GGUF file, a folder with config.json and model.safetensors, or a llama2.c checkpoint"
ORIGINAL_HINT = "use the original model's folder, or a GGUF file of it"
DOWNLOAD_HINT, DOWNLOAD_AGAIN_HINT, UNPACK_HINT = "download the file itself", "download it again", "unpack it first"
LFS_POINTER = b"version https://git-lfs"  # the first bytes of what a clone without Git LFS has in place of a large file
IS_LFS_POINTER = "is a Git LFS pointer in place of the file; run `git lfs pull` in its folder, or download the file itself"
PICKLE = "a PyTorch file, which may run code when it is read, so it is not supported"


class UnsupportedFormat(NamedTuple):
    """A file format that is recognized but cannot be loaded, with advice for the error message.

    Attributes:
        signature: Regex that matches the first bytes of a file in the format.
        name: Name of the format with an article.
        advice: What the user can do; "" if only another file helps.
    """

    signature: bytes
    name: str
    advice: str = ""


# Binary formats; the first match counts.
UNSUPPORTED_FORMATS = (
    UnsupportedFormat(
        rb".{8}\{\s*\"", "a safetensors file", "name the folder that holds it, its config.json and its tokenizer.json"
    ),
    UnsupportedFormat(rb"PK\x03\x04.{26}[^/]{1,30}/(data\.pkl|byteorder|version|\.format)", PICKLE),
    UnsupportedFormat(rb"\x80[\x02-\x05](\x8a\x0a\x6c\xfc\x9c\x46|\x95|ctorch|\}|\]|c)", PICKLE),
    UnsupportedFormat(rb"PK\x03\x04", "a zip archive, or a PyTorch file"),
    UnsupportedFormat(
        rb"MZqFpD", "a llamafile, which is a program with a GGUF file in it", "unpack the GGUF file with unzip and name it"
    ),
    UnsupportedFormat(rb"\x08[\x01-\x10][\x12\x3a]", "an ONNX model, which is not supported", ORIGINAL_HINT),
    UnsupportedFormat(rb".{4}TFL3", "a TensorFlow Lite model, which is not supported", ORIGINAL_HINT),
    UnsupportedFormat(rb"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes them, which is not supported", ORIGINAL_HINT),
    UnsupportedFormat(rb"\x93NUMPY", "a NumPy array, which is not supported", ORIGINAL_HINT),
    UnsupportedFormat(rb"(lmgg|fmgg|tjgg|algg)", "a ggml file that is older than GGUF", "convert it, or download a GGUF file"),
    UnsupportedFormat(
        rb"\n.\n.<(unk|pad|s)>", "a SentencePiece tokenizer", "make a tokenizer.json of it with save_pretrained of transformers"
    ),
    UnsupportedFormat(rb"\x89PNG\r\n\x1a\n", "a PNG image"),
    UnsupportedFormat(rb"\xff\xd8\xff", "a JPEG image"),
    UnsupportedFormat(rb"GIF8|RIFF.{4}WEBP|BM.{4}\0{4}|II\*\0|MM\0\*", "an image"),
    UnsupportedFormat(rb"ID3[\2-\4]|fLaC|OggS|RIFF.{4}WAVE|.{4}ftyp|\x1a\x45\xdf\xa3", "an audio or video file"),
    UnsupportedFormat(rb"SQLite format 3\0", "an SQLite database"),
    UnsupportedFormat(rb"%PDF-", "a PDF document"),
    UnsupportedFormat(rb"MZ|\x7fELF|\xcf\xfa\xed\xfe", "a program"),
    UnsupportedFormat(
        rb"\x1f\x8b\x08|BZh\d1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|7z\xbc\xaf\x27\x1c|Rar!", "a compressed file", UNPACK_HINT
    ),
    UnsupportedFormat(rb".{257}ustar", "a tar archive", UNPACK_HINT),
    UnsupportedFormat(rb"\0{64}", "a file that begins with zeros, like an unfinished download", DOWNLOAD_HINT),
)
WEB_PAGE = re.compile(rb"\s*(<!doctype|<html|<\?xml)", re.IGNORECASE)


def identify_file(path: Path, expected: str) -> str:
    """Return the part of an error that says what an unsupported file is and what to do; "" if the format is not recognized.

    An example is "is a PNG image; expected a GGUF file". The file is recognized by its first bytes.

    Args:
        path: A file, not a folder.
        expected: What the caller can read, for formats without advice of their own.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = ModelFile(path)
    head = file.read(0, min(SNIFF_BYTES, file.size)).tobytes()
    if head.startswith(LFS_POINTER):
        return IS_LFS_POINTER
    if WEB_PAGE.match(head):
        return f"is a web page, not the file that it links to; {DOWNLOAD_HINT}"
    if text := _decode_text(head):
        return f"is a text file that begins with {shorten(text)!r}; {expected}"
    found = (each for each in UNSUPPORTED_FORMATS if re.match(each.signature, head, re.DOTALL))
    return next((f"is {each.name}; {each.advice or expected}" for each in found), "")


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
    is_wide = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        text = codecs.getincrementaldecoder("utf-16" if is_wide else "utf-8-sig")().decode(
            head
        )  # the last character may be cut off
    except UnicodeDecodeError:
        return ""
    return text if all(char.isprintable() or char.isspace() for char in text) else ""
