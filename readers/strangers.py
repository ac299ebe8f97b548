"""Files that are no model of ours, known by their first bytes, and what to do instead. Reads nothing else."""

import re
from pathlib import Path

from ..families.values import CheckpointError
from .model_file import ModelFile

HEAD_BYTES = 64
FOLDER = "name the folder of a Hugging Face model in safetensors' format, a GGUF file or a llama2.c file"
PICKLE = f"a file of PyTorch's, which may run code when it is read, and is not; {FOLDER}"
# what a file begins with, and what it is
STRANGERS: tuple[tuple[re.Pattern[bytes], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), what)
    for pattern, what in (
        (rb".{8}\{\s*\"", "a safetensors file; name the folder that holds it, its config.json and its tokenizer.json"),
        (rb"PK\x03\x04.{26}[^/]{1,30}/(data\.pkl|byteorder|version|\.format)", PICKLE),
        (rb"PK\x03\x04", f"a zip archive, or a file of PyTorch's; {FOLDER}"),
        (rb"\x80[\x02-\x05](\x8a\x0a\x6c\xfc\x9c\x46|\x95|ctorch|\}|\]|c)", PICKLE),
        (rb"\x08[\x01-\x10]\x12", f"a model of ONNX, which is not read; {FOLDER}"),
        (rb"\s*(<!doctype|<html|<\?xml)", "a page of the web, not the file that it links to; download the file itself"),
        (rb"version https://git-lfs", "what git keeps in the place of a large file; fetch the file itself with `git lfs pull`"),
        (rb"\x1f\x8b\x08", "packed by gzip; unpack it first"),
        (rb"\x89HDF\r\n\x1a\n", f"a file of HDF5, as Keras writes, which is not read; {FOLDER}"),
        (rb"(lmgg|fmgg|tjgg|algg)", "of ggml's time before GGUF; convert it, or fetch a .gguf file"),
    )
)


def refuse_strangers(path: Path) -> None:
    """Raises CheckpointError for a file that is known to be something else."""
    file = ModelFile(path)
    head = file.read(0, min(HEAD_BYTES, file.size)).tobytes()
    for beginning, what in STRANGERS:
        if beginning.match(head):
            raise CheckpointError(f"{path} is {what}")
