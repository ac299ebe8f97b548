"""Text to token ids and back, from a llama2.c tokenizer.bin, and what every tokenizer can do. Knows nothing of models.

The encoding is SentencePiece's byte-pair encoding with byte fallback, as in karpathy/llama2.c's run.c: BOS, a space in front
of the text, one token a character (or one for each of its bytes), then the best-scoring merge of two neighbours, repeatedly.
"""

import codecs
import functools
import heapq
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from specdec import validation
from specdec.validation import whole

UNKNOWN, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3  # id of <0x00>
STRIPS = "special_tokens_strip"  # a key beside those of a GGUF file: its special tokens take the white space behind them
WHITE_SPACE = " \t\n\v\f\r"
NOTHING: Mapping[int, str] = {}
NO_TEXT_YET = -1  # what a text begins with, of which `piece` is told


class TokenizerError(ValueError):
    """A file that cannot be used as a tokenizer: one line with the file, what is wrong and what would be right."""


@runtime_checkable
class AnyTokenizer(Protocol):
    """Text to ids and back.

    vocab_size: the highest id that it knows, plus one. end_marks: the tokens that end a text, with their names.
    """

    path: Path

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_marks(self) -> dict[int, str]: ...
    @property
    def broken_characters(self) -> str:
        """What becomes of bytes that are no UTF-8: a name of Python's error handlers."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...
    def says(self, token: int) -> bytes | None:
        """The bytes of a token within a text; None for one that is no text, and for an id that is no token."""

    def piece(self, token: int, before: int) -> tuple[bytes, int]:
        """The bytes of a token after `before`, and what to tell of it to the next one; NO_TEXT_YET comes before the first."""


class Part(NamedTuple):
    """Of what a template wrote: some words, and whether a message said them; else they are the template's own."""

    words: str
    is_said: bool


class Pieces(NamedTuple):
    """A vocabulary of SentencePiece's.

    pieces, scores: of each id, a space being a space. from_text: the ids that characters and merges may become; byte_ids: that of
    each byte. whole: pieces that are one token wherever they stand. silent: ids that are no text; end_marks: those that end one,
    with names. bos: what an empty text begins with, and, where begins, any. has_space: whether a space is put in front of each
    stretch of text. space: how a text may write one otherwise; stripping: ids that take the white space behind them.
    """

    pieces: list[bytes]
    scores: list[float]
    from_text: Iterable[int]
    byte_ids: Sequence[int]
    whole: Collection[bytes]
    silent: Collection[int]
    end_marks: dict[int, str]
    bos: int
    begins: bool = True
    has_space: bool = True
    space: str = " "
    stripping: Collection[int] = ()


class Tokenizer:
    """The pieces and scores of a tokenizer.bin, whose number of tokens is as many as the file holds, or of another file.

    end_marks: tokens that end a text next to those of the vocabulary, as far as it has them.
    """

    broken_characters = "replace"

    def __init__(
        self, path: str | os.PathLike[str], vocabulary: Pieces | None = None, end_marks: Mapping[int, str] = NOTHING
    ) -> None:
        self.path = Path(path)
        own = vocabulary or _read(self.path)
        marks = own.end_marks | {token: name for token, name in end_marks.items() if token < len(own.pieces)}
        self._vocabulary = own._replace(silent={*own.silent, *marks}, end_marks=marks)
        self.pieces, self.scores = own[:2]
        self.end_marks = self._vocabulary.end_marks
        self._ids: dict[bytes, int] = {}
        for token in self._vocabulary.from_text:
            self._ids.setdefault(self.pieces[token], token)
        self._whole = {piece.decode(errors="surrogateescape") for piece in self._vocabulary.whole}
        beginnings = "|".join(map(re.escape, sorted({piece[:2] for piece in self._whole})))
        self._begins_whole = re.compile(f"(?={beginnings})" if beginnings else r"(?!)")
        self._longest_first = sorted({len(piece) for piece in self._whole}, reverse=True)
        named = [token for token in enumerate(self._vocabulary.byte_ids) if token[1] < self.vocab_size]
        self._byte_of = {token: byte for byte, token in named if self.pieces[token].upper() == b"<0X%02X>" % byte}
        self._before_space = self._vocabulary.bos if self._vocabulary.begins else NO_TEXT_YET

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size} tokens, {self.path}>"

    def encode(self, text: str) -> list[int]:
        """BOS, where there is one, and the ids of the text.

        Raises TypeError for what is no string, ValueError for half a character.
        """
        text = validation.text("the text", text)
        return ([self._vocabulary.bos] if self._vocabulary.begins or not text else []) + self._encoded(text)

    @property
    def specials(self) -> dict[str, int]:
        """Marks by their names, which a chat template may write; llama2.c's files have a line for each."""
        names = {token: self.pieces[token].decode(errors="replace").strip() for token in self._vocabulary.silent}
        return {name: token for token, name in names.items() if name}

    @functools.cached_property
    def longest(self) -> int:
        return max(map(len, self.pieces))

    def encode_rendered(self, parts: Sequence[Part]) -> list[int]:
        """The ids of what a template wrote; see `ChatTokenizer`. Each stretch between marks is a text of its own."""
        specials, tokens, at = self.specials, list[int](), 0
        hole = next(letter for letter in map(chr, range(0x10FFFF)) if not any(letter in name for name in specials))
        text = "".join([part.words for part in parts])
        own = "".join([hole * len(part.words) if part.is_said else part.words for part in parts])
        for found in re.finditer("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)", own):
            tokens += [*self._encoded(text[at : found.start()]), specials[found[0]]]
            at = found.end() + self._n_stripped(specials[found[0]], text[found.end() :])
        return tokens + self._encoded(text[at:])

    def _n_stripped(self, token: int, behind: str) -> int:
        """How many characters behind a token it takes."""
        return len(behind) - len(behind.lstrip(WHITE_SPACE)) if token in self._vocabulary.stripping else 0

    def _encoded(self, text: str) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(self._cut(text.replace(self._vocabulary.space, " "))):
            if i % 2:
                tokens.append(self._ids[part.encode()])
                continue
            part = part[self._n_stripped(tokens[-1], part) if i else 0 :]
            if part:
                tokens += self._merge(self._characters(" " * self._vocabulary.has_space + part))
        return tokens

    def _cut(self, text: str) -> list[str]:
        """The text in parts, every second of them a piece that is one token wherever it stands: of several the longest.

        There may be six thousand, which a pattern of alternatives would try one by one.
        """
        parts, begin = [], 0
        for found in self._begins_whole.finditer(text):
            if (at := found.start()) >= begin:
                seen = (text[at : at + n] for n in self._longest_first)
                if piece := next((part for part in seen if part in self._whole), ""):
                    parts += [text[begin:at], piece]
                    begin = at + len(piece)
        return [*parts, text[begin:]]

    def _characters(self, text: str) -> list[int]:
        tokens = []
        for character in text:
            raw = character.encode()
            token = self._ids.get(raw)
            tokens += [token] if token is not None else [self._vocabulary.byte_ids[byte] for byte in raw]
        return [token if token < self.vocab_size else UNKNOWN for token in tokens]

    def _merge(self, tokens: list[int]) -> list[int]:
        """Merge the best-scoring pair of neighbours, the leftmost of equals, until no two make a piece.

        A heap holds every pair that can merge; an entry is stale once one of its two tokens has changed.
        """
        n = len(tokens)
        left, right = list(range(-1, n - 1)), list(range(1, n + 1))
        heap: list[tuple[float, int, int, int, int, int]] = []

        def consider(i: int, j: int) -> None:
            if i >= 0 and j < n:
                merged = self._ids.get(self.pieces[tokens[i]] + self.pieces[tokens[j]])
                if merged is not None:
                    heapq.heappush(heap, (-self.scores[merged], i, j, tokens[i], tokens[j], merged))

        for i in range(n - 1):
            consider(i, i + 1)
        while heap:
            _, i, j, first, second, merged = heapq.heappop(heap)
            if tokens[i] != first or tokens[j] != second or right[i] != j:
                continue
            tokens[i], tokens[j] = merged, -1
            right[i] = right[j]
            if right[i] < n:
                left[right[i]] = i
            consider(left[i], i)
            consider(i, right[i])
        return [token for token in tokens if token >= 0]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a sequence that begins with BOS."""
        return text_of(self, tokens)

    def says(self, token: int) -> bytes | None:
        if not UNKNOWN < token < self.vocab_size or token in self._vocabulary.silent:
            return None
        return self._bytes_of(token)

    def piece(self, token: int, before: int) -> tuple[bytes, int]:
        """The token's bytes, less the space that was put in front of the text."""
        if token in self._vocabulary.silent:
            return b"", token
        said = self._bytes_of(token)
        is_first = before == self._before_space and self._vocabulary.has_space
        return said.removeprefix(b" ") if is_first else said, token

    def _bytes_of(self, token: int) -> bytes:
        return bytes([self._byte_of[token]]) if token in self._byte_of else self.pieces[token]


class TextStream:
    """Tokens to text as they come; the bytes of an unfinished character wait for the next token.

    shown: marks that are text nevertheless, by what they are there.
    """

    def __init__(self, tokenizer: AnyTokenizer, shown: Mapping[int, str] = NOTHING) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self._before = NO_TEXT_YET
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.broken_characters)

    def push(self, token: int) -> str:
        """The text that this token completes; marks are not text. Raises ValueError for a token out of range."""
        whole("a token", token, 0, self._tokenizer.vocab_size - 1)
        piece, self._before = self._tokenizer.piece(token, self._before)
        return self._utf8.decode(b"", True) + self._shown[token] if token in self._shown else self._utf8.decode(piece)

    def peek(self, tokens: Iterable[int]) -> list[str]:
        """The text of each of the tokens that may come next, the stream left as it is."""
        state, before = self._utf8.getstate(), self._before
        texts = [self.push(token) for token in tokens]
        self._utf8.setstate(state)
        self._before = before
        return texts

    def end(self) -> str:
        """What is left of a character that never ended, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def text_of(tokenizer: AnyTokenizer, tokens: Iterable[int]) -> str:
    """The text of a whole sequence."""
    stream = TextStream(tokenizer)
    return "".join([stream.push(token) for token in tokens]) + stream.end()


def file_bytes(path: Path, what: str) -> bytes:
    """All of a file that is to be `what`. Raises TokenizerError."""
    with validation.reading(path, TokenizerError, what):
        return path.read_bytes()


def _read(path: Path) -> Pieces:
    """uint32 longest piece, then a float32 score, an int32 length and that many bytes for each token."""
    data = file_bytes(path, "a llama2.c tokenizer file")
    if len(data) < 4:
        raise TokenizerError(f"{path} {'is empty' if not data else 'is truncated'}; expected a llama2.c tokenizer file")
    (longest,) = struct.unpack_from("<I", data)
    pieces: list[bytes] = []
    scores: list[float] = []
    at = 4
    while at < len(data):
        if at + 8 > len(data):
            raise TokenizerError(
                f"{path} is truncated or too long: {len(data) - at} bytes are left after token {len(pieces) - 1}"
            )
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 <= length <= longest or at + length > len(data) or math.isnan(score):
            raise TokenizerError(f"{path} is damaged or no llama2.c tokenizer file: token {len(pieces)} has length {length}")
        pieces.append(data[at : at + length])
        scores.append(score)
        at += length
    if len(pieces) < 3:
        raise TokenizerError(f"{path} holds {len(pieces)} tokens; expected <unk>, BOS, EOS and more")
    marks = {BOS: "bos", EOS: "eos"}
    return Pieces(pieces, scores, range(len(pieces)), range(FIRST_BYTE, FIRST_BYTE + 256), (), marks, marks, BOS)
