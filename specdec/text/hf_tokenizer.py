"""Text to token ids and back, from a Hugging Face tokenizer.json, or what would be one. Knows nothing of models.

The `tokenizers` library encodes (`encoder`). What a token says is computed here, since a text is shown while it grows: its bytes
by the file's decoder, which is GPT-2's table of bytes ("ByteLevel") or SentencePiece's pieces (a space is "▁", a byte "<0x0A>").
"""

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import validation
from specdec.loaders import optional_dependencies
from specdec.loaders.format_sniffing import IS_LFS_POINTER, LFS_POINTER, what_is
from specdec.text.encoder import Encoder
from specdec.tokenizer import NO_TEXT_YET, AnyTokenizer, Part, Tokenizer, TokenizerError, file_bytes, text_of

TOKENIZER_FILE = "tokenizer.json"
DECODERS = "ByteLevel, Metaspace or SentencePiece's (Replace, ByteFallback, Fuse, Strip of one space in front)"
TOKENIZER = "expected a tokenizer.json, a folder that holds one, a GGUF file, or a tokenizer.bin of llama2.c"
TEXT_HAS_BEGUN = 0
EACH_BYTE = "specdec.each_byte"  # an error handler's name: a U+FFFD for each byte of a broken character, as ByteFallback has it


class JsonTokenizer:
    """The tokenizer of a tokenizer.json, or of the folder that holds one.

    bos: the token that an empty text begins with where the file's template writes none; by default an end mark. end_marks: the
    tokens that end a text; by default the eos_token of the file's neighbours. data: what a tokenizer.json would hold, of a file
    that is another. A special token's name in a text is text.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        bos: int | None = None,
        end_marks: Mapping[int, str] | None = None,
        data: bytes | None = None,
    ) -> None:
        self.path = _file_of(Path(path))
        data = file_bytes(self.path, "a tokenizer.json") if data is None else data
        self._encoder = _loaded(self.path, data)
        self._names = self._encoder.names
        self._ids = {name: token for token, name in self._names.items()}
        self._decoder = _decoder_of(self.path, self._encoder.decoder)
        self.specials = {name: token for token, name in self._encoder.specials.items()}
        self.vocab_size = max(self._names, default=0) + 1
        self.longest = max(map(len, self._names.values()), default=1)
        self.end_marks = dict(end_marks or self._eos())
        self._bos = bos
        self._marks = {*self.specials.values(), *self.end_marks}
        self._cached: dict[int, bytes | None] = {}
        self._digest = hashlib.sha256(data).digest()

    @property
    def broken_characters(self) -> str:
        return EACH_BYTE if self._decoder.has_bytes else "replace"

    def __repr__(self) -> str:
        return f"<JsonTokenizer of {self.vocab_size} tokens, {self.path}>"

    def encode(self, text: str) -> list[int]:
        """What the template puts in front, and the ids of the text; one token at least.

        Raises TypeError for what is no string, ValueError for half a character, TokenizerError for a file that cannot do it.
        """
        text = validation.text("the text", text)
        with _refusing(f"the tokenizer {self.path} cannot encode the text"):
            ids = self._encoder.encode(text)
        return ids or [self._bos if self._bos is not None else min(self.end_marks, default=0)]

    def encode_rendered(self, parts: Sequence[Part]) -> list[int]:
        """The ids of what a template wrote; see `ChatTokenizer`. Raises TokenizerError for a file that cannot do it."""
        with _refusing(f"the tokenizer {self.path} cannot encode the text"):
            return self._encoder.encode_parts(parts)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a whole sequence."""
        return text_of(self, tokens)

    def says(self, token: int) -> bytes | None:
        if token not in self._cached:
            name = None if token in self._marks else self._names.get(token)
            self._cached[token] = None if name is None else self._decoder.bytes_of(name)
        return self._cached[token]

    def piece(self, token: int, before: int) -> tuple[bytes, int]:
        """The token's bytes, less what the decoder takes from the beginning of a text."""
        said = self.says(token)
        if said is None:
            return b"", before
        if before == NO_TEXT_YET:
            said_first = self._decoder.at_the_beginning(said)
            return said_first, TEXT_HAS_BEGUN if said else before
        return said, before

    def is_of(self, path: Path) -> bool:
        """Whether a file, or the one in a folder, is the same to the byte."""
        path = _file_of(path)
        return path.suffix == ".json" and hashlib.sha256(file_bytes(path, "a tokenizer.json")).digest() == self._digest

    def is_spelled_like(self, other: "JsonTokenizer") -> bool:
        """Whether tokens of the same name say the same in both."""
        return self._decoder == other._decoder

    def name(self, token: int) -> str | None:
        """How the file spells a token, special or not."""
        return self._names.get(token)

    def _eos(self) -> dict[int, str]:
        """The eos_token that the file's neighbours name."""
        for neighbour in ("tokenizer_config.json", "special_tokens_map.json"):
            name = _json_object(self.path.with_name(neighbour)).get("eos_token")
            name = name.get("content") if isinstance(name, dict) else name
            token = self._ids.get(name) if isinstance(name, str) else None
            if token is not None:
                return {token: "eos"}
        return {}


def load_tokenizer(path: Path, bos: int | None = None, end_marks: Mapping[int, str] | None = None) -> AnyTokenizer:
    """Load the tokenizer of a folder or a .json file (see `JsonTokenizer`), else that of a llama2.c file.

    Raises TokenizerError, which says what a file is that is no tokenizer.
    """
    if path.is_dir() or path.suffix == ".json":
        return JsonTokenizer(path, bos, end_marks)
    try:
        return Tokenizer(path, end_marks=end_marks or {})
    except TokenizerError:
        if flaw := what_is(path, TOKENIZER) if path.is_file() else "":
            raise TokenizerError(f"{path} {flaw}") from None
        raise


@dataclass(frozen=True)
class _Decoder:
    """How the names of tokens become bytes.

    is_byte_level: by GPT-2's table. Else: replacements within a name, in turn; whether <0x0A> is a byte; and at the beginning of
    a text, `strip` goes once, or wherever it stands in the first token.
    """

    is_byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    has_bytes: bool = False
    strip: bytes = b""
    strips_all: bool = False

    def bytes_of(self, name: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes([BYTE_OF[character] for character in name])
            except KeyError:  # an added token is written as it is
                return name.encode()
        for old, new in self.replacements:
            name = name.replace(old, new)
        if self.has_bytes and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes.fromhex(name[3:5])
            except ValueError:
                pass
        return name.encode()

    def at_the_beginning(self, said: bytes) -> bytes:
        if self.strips_all:
            return said.replace(self.strip, b"")
        return said.removeprefix(self.strip)


def _decoder_of(path: Path, decoder: Any) -> _Decoder:
    """The file's decoder. Raises TokenizerError for one that is not done here."""
    if decoder is None:
        raise TokenizerError(f"{path} has no decoder; expected {DECODERS}")
    stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return _Decoder(is_byte_level=True)
    replacements: list[tuple[str, str]] = []
    has_bytes = is_fused = strips_all = False
    strip = ""
    for stage in stages:
        match stage:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (
                has_bytes or is_fused or len(new) > len(old)  # which could double, thirty times
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
                strips_all = stage.get("prepend_scheme", "always") != "never" and stage.get("add_prefix_space", True)
                strip = " " * strips_all
            case _:
                shown = validation.short(stage, json.dumps)
                raise TokenizerError(f"{path} has a decoder with {shown}, which is not supported; expected {DECODERS}")
    return _Decoder(False, tuple(replacements), has_bytes, strip.encode(), strips_all)


def _loaded(path: Path, data: bytes) -> Encoder:
    """Return what encodes with a file. Raise TokenizerError."""
    if not optional_dependencies.has(optional_dependencies.TOKENIZERS):
        install = optional_dependencies.install([optional_dependencies.TOKENIZERS])
        raise TokenizerError(f"{path} is read with the package tokenizers, which is missing; {install}")
    if data.startswith(LFS_POINTER):
        raise TokenizerError(f"{path} {IS_LFS_POINTER}")
    with _refusing(f"{path} is no tokenizer.json, or one that the package tokenizers cannot read"):
        return Encoder(data)


@contextmanager
def _refusing(told: str) -> Iterator[None]:
    """Raise TokenizerError for whatever the library raises."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise TokenizerError(f"{told}: {validation.short(str(error) or type(error).__name__)}") from None


def _file_of(path: Path) -> Path:
    """The tokenizer.json of a folder; a file is one already. Raises TokenizerError for a folder that has none."""
    if not path.is_dir() or (path / TOKENIZER_FILE).exists():
        return path / TOKENIZER_FILE if path.is_dir() else path
    others = [name for name in ("tokenizer.model", "vocab.json") if (path / name).exists()]
    way = (
        f"transformers makes one of its {others[0]}: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        if others
        else "copy it from where the model comes from, or name it with tokenizer=..."
    )
    raise TokenizerError(f"{path} has no {TOKENIZER_FILE}; {way}")


def _json_object(path: Path) -> dict[str, Any]:
    """What a file that may be missing or damaged holds."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _byte_table() -> dict[str, int]:
    """A character for each byte, as in GPT-2: what Latin-1 prints is itself, the others follow from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_table()


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)
