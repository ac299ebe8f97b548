"""The tokenizer of a Hugging Face tokenizer.json, or of equivalent data, for encoding and decoding. Independent of models.

The `tokenizers` library encodes (`hf_encoder`). Decoding is done here, since output is shown while it grows. The decoder is
GPT-2's byte table ("ByteLevel") or SentencePiece's pieces (a space is "▁", a byte "<0x0A>").
"""

import codecs
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec import argument_checks
from specdec.argument_checks import CheckpointError
from specdec.loaders import optional_dependencies
from specdec.loaders.model_file import IS_LFS_POINTER, LFS_POINTER, TOKENIZER_FILE, read_optional_json_object
from specdec.text.hf_encoder import Encoder, load_encoder
from specdec.tokenizer import TEXT_NOT_STARTED, RenderedSegment, TokenizerError, decode_tokens, read_file_bytes

SUPPORTED_DECODERS = "ByteLevel, Metaspace or SentencePiece's (Replace, ByteFallback, Fuse, Strip of one space in front)"
TEXT_STARTED = 0
NO_DUPLICATES: Mapping[int, str] = MappingProxyType({})
# Name of a codec error handler: a U+FFFD for each byte of an invalid character, as with ByteFallback.
REPLACE_EACH_BYTE = "specdec.each_byte"


class HFTokenizer:
    """A tokenizer loaded from a tokenizer.json or from a folder with one. In a text, names of special tokens stay plain text.

    Args:
        path: The file or folder.
        bos: The token of an empty text if the file's template adds none; by default one of `eos_tokens`.
        eos_tokens: The end-of-sequence tokens with names; by default the eos_token in neighbouring files.
        encoder: The encoder, if `path` is another kind of file.
        duplicates: Names by id of further tokens, which are decoded like the first token of that name.

    Raises:
        TokenizerError: The file is missing or not valid, or the tokenizers package is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        bos: int | None = None,
        eos_tokens: Mapping[int, str] | None = None,
        encoder: Encoder | None = None,
        duplicates: Mapping[int, str] = NO_DUPLICATES,
    ) -> None:
        """Load the tokenizer.json, and find its special and its end-of-sequence tokens."""
        self.path, self._digest = _find_tokenizer_file(Path(path)), b""
        if encoder is None:
            data = read_file_bytes(self.path, "a tokenizer.json")
            self._digest, encoder = hashlib.sha256(data).digest(), _load_encoder(self.path, data)
        self._encoder = encoder
        self._names = {**self._encoder.names, **duplicates}
        self._decoder = _parse_decoder(self.path, self._encoder.decoder)
        self.specials = {name: token for token, name in self._encoder.specials.items()}
        self.vocab_size = max(self._names, default=0) + 1
        self.eos_tokens = dict(eos_tokens or self._find_eos_tokens())
        self._bos = bos
        self._special_ids = {*self.specials.values(), *self.eos_tokens}
        self._special_ids |= {token for token, name in duplicates.items() if name in self.specials}
        self._bytes_cache: dict[int, bytes | None] = {}

    @functools.cached_property
    def max_token_length(self) -> int:
        """The number of characters of the longest token name."""
        return max(map(len, self._names.values()), default=1)

    @property
    def utf8_errors(self) -> str:
        """The name of the Python codec error handler for bytes that are not valid UTF-8."""
        return REPLACE_EACH_BYTE if self._decoder.has_byte_fallback else "replace"

    def __repr__(self) -> str:
        """Return the size of the vocabulary and the path as text."""
        return f"<HFTokenizer of {self.vocab_size} tokens, {self.path}>"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, after the ids that the file's template puts in front; at least one id.

        Raises:
            TypeError: The text is not a string.
            ValueError: The text contains a lone surrogate.
            TokenizerError: The library cannot encode the text.
        """
        text = argument_checks.check_string("the text", text)
        with wrap_library_errors(f"the tokenizer {self.path} cannot encode the text"):
            ids = self._encoder.encode(text)
        return ids or [self._bos if self._bos is not None else min(self.eos_tokens, default=0)]

    def encode_rendered(self, segments: Sequence[RenderedSegment]) -> list[int]:
        """Return the token ids of a rendered chat template, without BOS in front (see `AnyTokenizer`).

        Raises:
            TokenizerError: The library cannot encode the text.
        """
        with wrap_library_errors(f"the tokenizer {self.path} cannot encode the text"):
            return self._encoder.encode_segments(segments)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of a whole sequence of token ids, in which special tokens have no text."""
        return decode_tokens(self, tokens)

    def token_to_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token id stands for in a text; None for special tokens and unknown ids."""
        if token not in self._bytes_cache:
            name = None if token in self._special_ids else self._names.get(token)
            self._bytes_cache[token] = None if name is None else self._decoder.decode_name(name)
        return self._bytes_cache[token]

    def decode_incrementally(self, token: int, state: int) -> tuple[bytes, int]:
        """Return the bytes that the next token adds to a text, and the new decoding state.

        What the file's decoder strips at the start of a text is left out. `state` is what the previous call returned; see
        `AnyTokenizer`.
        """
        data = self.token_to_bytes(token)
        if data is None:
            return b"", state
        if state == TEXT_NOT_STARTED:
            return self._decoder.strip_start(data), TEXT_STARTED if data else state
        return data, state

    def is_same_file(self, path: Path) -> bool:
        """Return whether a .json file, or the tokenizer.json in a folder, has the same bytes as this tokenizer's own file.

        Raises:
            TokenizerError: The file cannot be read, or the folder has no tokenizer.json.
        """
        path = _find_tokenizer_file(path)
        return path.suffix == ".json" and hashlib.sha256(read_file_bytes(path, "a tokenizer.json")).digest() == self._digest

    def has_same_decoder(self, other: "HFTokenizer") -> bool:
        """Return whether both tokenizers decode equally, so that tokens of the same name have the same bytes."""
        return self._decoder == other._decoder

    def id_to_token(self, token: int) -> str | None:
        """Return the name of a token id in the file, also of a special token, or None for an unknown id."""
        return self._names.get(token)

    def _find_eos_tokens(self) -> dict[int, str]:
        """Return the id of the eos_token that a file next to the tokenizer names, as {id: "eos"}, or {} if there is none."""
        for neighbour in ("tokenizer_config.json", "special_tokens_map.json"):
            with suppress(CheckpointError):  # a damaged file names none
                name = read_optional_json_object(self.path.with_name(neighbour)).get("eos_token")
                name = name.get("content") if isinstance(name, dict) else name
                found = [token for token, each in self._encoder.names.items() if each == name]
                if found:
                    return {found[-1]: "eos"}
        return {}


@dataclass(frozen=True)
class _Decoder:
    """A decoder from the name of a token, as written in tokenizer.json, to the bytes that the token stands for.

    Attributes:
        is_byte_level: Whether GPT-2's byte table is used; the other attributes then do not apply.
        replacements: Replacements within a name, in order.
        has_byte_fallback: Whether <0x0A> is a byte.
        strip: What is stripped at the start of a text.
        strip_everywhere: Whether `strip` is removed everywhere in the first token, not once.
    """

    is_byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_fallback: bool = False
    strip: bytes = b""
    strip_everywhere: bool = False

    def decode_name(self, name: str) -> bytes:
        """Return the bytes that a token with this name stands for."""
        if self.is_byte_level:
            try:
                return bytes([BYTE_DECODER[character] for character in name])
            except KeyError:  # an added token, which is written as plain text
                return name.encode()
        for old, new in self.replacements:
            name = name.replace(old, new)
        if self.has_byte_fallback and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes.fromhex(name[3:5])
            except ValueError:
                pass
        return name.encode()

    def strip_start(self, data: bytes) -> bytes:
        """Return the bytes of a text's first token after removal of what the decoder strips at the start of a text."""
        if self.strip_everywhere:
            return data.replace(self.strip, b"")
        return data.removeprefix(self.strip)


def _parse_decoder(path: Path, decoder: Any) -> _Decoder:
    """Convert the decoder section of a tokenizer.json, parsed from JSON, to a `_Decoder`.

    Raises:
        TokenizerError: The decoder is missing or not supported.
    """
    if decoder is None:
        raise TokenizerError(f"{path} has no decoder; expected {SUPPORTED_DECODERS}")
    stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return _Decoder(is_byte_level=True)
    replacements: list[tuple[str, str]] = []
    has_bytes = is_fused = strip_all = False
    strip = ""
    for stage in stages:
        match stage:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (
                has_bytes or is_fused or len(new) > len(old)  # a growing one could double thirty times
            ):
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not is_fused:
                has_bytes = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": str(strip), "start": 0 | 1 as start, "stop": 0} if is_fused:
                strip *= start
            case {"type": "Metaspace", "replacement": str(space)} if len(stages) == 1:
                replacements.append((space, " "))
                strip_all = stage.get("prepend_scheme", "always") != "never" and stage.get("add_prefix_space", True)
                strip = " " * strip_all
            case _:
                stage_text = argument_checks.shorten(stage, json.dumps)
                raise TokenizerError(
                    f"{path} has a decoder with {stage_text}, which is not supported; expected {SUPPORTED_DECODERS}"
                )
    return _Decoder(False, tuple(replacements), has_bytes, strip.encode(), strip_all)


def check_library(path: Path) -> None:
    """Raise TokenizerError if the tokenizers package, which a file needs, is not installed."""
    if not optional_dependencies.is_installed(optional_dependencies.TOKENIZERS):
        install = optional_dependencies.format_install_command([optional_dependencies.TOKENIZERS])
        raise TokenizerError(f"{path} needs the package tokenizers, which is not installed; {install}")


def _load_encoder(path: Path, data: bytes) -> Encoder:
    """Return the encoder for the contents of a tokenizer.json.

    Raises:
        TokenizerError: The tokenizers package is not installed or cannot read the contents.
    """
    check_library(path)
    if data.startswith(LFS_POINTER):
        raise TokenizerError(f"{path} {IS_LFS_POINTER}")
    with wrap_library_errors(f"{path} is not a tokenizer.json, or the package tokenizers cannot read it"):
        return load_encoder(data)


@contextmanager
def wrap_library_errors(message: str) -> Iterator[None]:
    """Return a context that raises TokenizerError, with this message in front, for any error of the tokenizers package."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, TokenizerError):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise TokenizerError(f"{message}: {argument_checks.shorten(str(error) or type(error).__name__)}") from None


def _find_tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a folder, or the file itself; raise TokenizerError for a folder without one."""
    if not path.is_dir():
        return path
    if (path / TOKENIZER_FILE).exists():
        return path / TOKENIZER_FILE
    advice = "copy it from the model's source, make one with AutoTokenizer of transformers, or pass tokenizer=..."
    raise TokenizerError(f"{path} has no {TOKENIZER_FILE}; {advice}")


def _make_byte_decoder() -> dict[str, int]:
    """Return GPT-2's byte table as a dict from character to byte.

    Printable Latin-1 characters are their own byte; the other bytes are the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_DECODER = _make_byte_decoder()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)
