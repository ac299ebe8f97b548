"""Files that are not models are identified by their first bytes, where a model or a tokenizer is expected."""

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.model_file import UNSUPPORTED_FORMATS, is_text
from specdec.text.tokenizer_lookup import load_tokenizer
from specdec.tokenizer import TokenizerError
from tests.tools.checkpoint_files import small_pieces, write_tokenizer

REST = bytes(range(256)) * 2


def zip_bytes(name: str) -> bytes:
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        archive.writestr(name, b"x" * 50)
    return data.getvalue()


def tar_bytes() -> bytes:
    with tarfile.open(fileobj=(data := io.BytesIO()), mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.bin"))
    return data.getvalue()


BINARY = {
    "a safetensors file; name the folder that holds it": b"\x40\1\0\0\0\0\0\0" + b'{"__metadata__":{"format":"pt"}' + REST,
    "a PyTorch file, which may run code": zip_bytes("model/data.pkl"),
    "a PyTorch file, which may run code when it is read": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03." + REST,
    "a llamafile": b"MZqFpD='\n" + REST,
    "an ONNX model, which is not supported; use the original": b"\x08\x08\x12\x07pytorch" + REST,
    "a ggml file that is older than GGUF": b"tjgg" + REST,
    "a SentencePiece tokenizer; make a tokenizer.json": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02" + REST,
    "an archive; unpack it first": zip_bytes("readme.txt"),
    "an archive; unpack": b"\x1f\x8b\x08\0" + REST,
    "an archive; ": tar_bytes(),
}
TEXTS = {
    "a Git LFS pointer in place of the file; run `git lfs pull`": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a web page, not the file that it links to": b"\n<!DOCTYPE html><html>\xff",
    "a text file that begins with 'Entry not found'": b"Entry not found",
    "a text file that begins with 'Une fois'": "Une fois\n".encode("utf-16"),
}


def test_every_unsupported_format_has_an_example() -> None:
    for signature, name, _ in UNSUPPORTED_FORMATS:
        examples = [data for message, data in BINARY.items() if message.startswith(name[:9])]
        assert any(re.match(signature, data, re.DOTALL) for data in examples), name


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "model.safetensors", "model"])
@pytest.mark.parametrize("message", [*BINARY, *TEXTS])
def test_an_unsupported_format_is_identified_whatever_the_file_name(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes((BINARY | TEXTS)[message])
    with pytest.raises(CheckpointError, match=re.escape(f"{path} is {message}")) as caught:
        load_checkpoint(path)
    assert "; " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("message", [*BINARY, *TEXTS])
def test_an_unsupported_format_is_identified_in_place_of_a_tokenizer(tmp_path: Path, message: str) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes((BINARY | TEXTS)[message])
    with pytest.raises(TokenizerError, match=re.escape(f"{path} is {message}")):
        load_tokenizer(path)


def test_a_tokenizer_in_place_of_a_model_names_the_tokenizer_option(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tok300.bin", [(b"<unk>", 0.0), *small_pieces()[1:]])
    with pytest.raises(CheckpointError, match=r"is a llama2\.c tokenizer, not a model; name it with tokenizer=\.\.\."):
        load_checkpoint(path)


def test_is_text_accepts_a_cut_character_and_rejects_an_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "text"
    pointer = TEXTS["a Git LFS pointer in place of the file; run `git lfs pull`"]
    texts = ("é" * 300).encode(), b"a" + ("é" * 300).encode(), b"ab"
    for data in (*texts, b"a", b"", b"a\0b", pointer):
        path.write_bytes(data)
        assert is_text(path) is (data in texts), data[:9]
