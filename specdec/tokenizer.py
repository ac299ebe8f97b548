"""The tokenizer protocol, the llama2.c and SentencePiece tokenizer, and streaming detokenization. Independent of models.

`Tokenizer.encode` is SentencePiece's byte-pair encoding with byte fallback, as in karpathy/llama2.c's run.c. It starts with BOS,
a leading space and one token per character (or one per byte). It then merges the best-scoring pair of neighbours, repeatedly.
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

from specdec import argument_checks
from specdec.argument_checks import check_int

UNKNOWN, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3  # id of <0x00>
# Our own key next to those of a GGUF file: its special tokens strip the white space after them.
SPECIAL_TOKENS_STRIP_KEY = "special_tokens_strip"
WHITE_SPACE = " \t\n\v\f\r"
NO_TOKENS: Mapping[int, str] = {}
TEXT_NOT_STARTED = -1  # initial state of `decode_incrementally`


class TokenizerError(ValueError):
    """An error for a file that is not a usable tokenizer; one line with the file, what is wrong and what is expected."""


@runtime_checkable
class AnyTokenizer(Protocol):
    """The protocol that every tokenizer implements: conversion of text to token ids and of token ids to text.

    Attributes:
        path: The file that the tokenizer was loaded from.
    """

    path: Path

    @property
    def vocab_size(self) -> int:
        """The highest known token id plus one, which bounds the ids that the tokenizer accepts."""

    @property
    def eos_tokens(self) -> dict[int, str]:
        """The ids of the end-of-sequence tokens, each with a short name for its kind ("eos", "eot", ...)."""

    @property
    def utf8_errors(self) -> str:
        """The name of the Python codec error handler for bytes that are not valid UTF-8."""

    @property
    def specials(self) -> dict[str, int]:
        """The ids of all special tokens by name."""

    @property
    def max_token_length(self) -> int:
        """The length of the longest token in characters or bytes."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with BOS if the tokenizer adds it."""

    def encode_rendered(self, segments: "Sequence[RenderedSegment]") -> list[int]:
        """Return the token ids of the segments of a rendered chat template, without BOS in front.

        Names of special tokens become those tokens in the template's own segments, and stay plain text in message segments.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of a whole sequence of token ids, in which special tokens have no text."""

    def token_to_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token id stands for in a text; None for special tokens and unknown ids."""

    def decode_incrementally(self, token: int, state: int) -> tuple[bytes, int]:
        """Return the bytes that the next token of a sequence adds to its text, and the decoding state after the token.

        Args:
            token: The token id.
            state: The state that the previous call returned; TEXT_NOT_STARTED for the first token.
        """


class RenderedSegment(NamedTuple):
    """A piece of the text that a chat template rendered.

    Attributes:
        text: The piece of text.
        is_message: Whether the piece was inserted from a message; otherwise the template itself wrote it.
    """

    text: str
    is_message: bool


class SentencePieceVocab(NamedTuple):
    """The tokens of a SentencePiece vocabulary, with the settings for encoding and decoding.

    Attributes:
        pieces: The bytes of each id, with plain spaces.
        scores: The merge score of each id.
        mergeable_ids: The ids that characters and merges can become.
        byte_ids: The id of each byte value.
        user_defined: Pieces that are always one token, wherever they occur.
        non_text_ids: Ids without text.
        eos_tokens: End-of-sequence ids with their names.
        bos: The id that an empty text starts with, and with `add_bos` every text.
        add_bos: Whether `encode` adds BOS.
        add_space_prefix: Whether each stretch of text between special tokens gets a leading space.
        space_symbol: A character that means a space wherever it occurs in a text.
        rstrip_ids: Tokens that remove the white space that follows them in a text.
    """

    pieces: list[bytes]
    scores: list[float]
    mergeable_ids: Iterable[int]
    byte_ids: Sequence[int]
    user_defined: Collection[bytes]
    non_text_ids: Collection[int]
    eos_tokens: dict[int, str]
    bos: int
    add_bos: bool = True
    add_space_prefix: bool = True
    space_symbol: str = " "
    rstrip_ids: Collection[int] = ()


class Tokenizer:
    """A tokenizer with SentencePiece's byte-pair encoding, by default loaded from a llama2.c tokenizer.bin.

    Args:
        path: The tokenizer file. It is read only if `vocabulary` is None.
        vocabulary: The vocabulary from a file of another format; None to read `path` as a tokenizer.bin.
        eos_tokens: Additional end-of-sequence tokens with their names; ids beyond the vocabulary are ignored.

    Raises:
        TokenizerError: The file is not a valid tokenizer.bin.
    """

    utf8_errors = "replace"

    def __init__(
        self,
        path: str | os.PathLike[str],
        vocabulary: SentencePieceVocab | None = None,
        eos_tokens: Mapping[int, str] = NO_TOKENS,
    ) -> None:
        """Read the file unless a vocabulary is given, and prepare the merges."""
        self.path = Path(path)
        vocab = vocabulary or _read_llama2c_vocab(self.path)
        all_eos = vocab.eos_tokens | {token: name for token, name in eos_tokens.items() if token < len(vocab.pieces)}
        self._vocabulary = vocab._replace(non_text_ids={*vocab.non_text_ids, *all_eos}, eos_tokens=all_eos)
        self.pieces, self.scores = vocab[:2]
        self.eos_tokens = self._vocabulary.eos_tokens
        self._ids: dict[bytes, int] = {}
        for token in self._vocabulary.mergeable_ids:
            self._ids.setdefault(self.pieces[token], token)
        self._user_defined = {piece.decode(errors="surrogateescape") for piece in self._vocabulary.user_defined}
        starts = "|".join(map(re.escape, sorted({piece[:2] for piece in self._user_defined})))
        self._user_defined_start = re.compile(f"(?={starts})" if starts else r"(?!)")
        self._user_defined_lengths = sorted({len(piece) for piece in self._user_defined}, reverse=True)
        byte_tokens = [(byte, token) for byte, token in enumerate(self._vocabulary.byte_ids) if token < self.vocab_size]
        self._byte_by_id = {token: byte for byte, token in byte_tokens if self.pieces[token].upper() == b"<0X%02X>" % byte}
        self._space_prefix_state = self._vocabulary.bos if self._vocabulary.add_bos else TEXT_NOT_STARTED

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self.pieces)

    def __repr__(self) -> str:
        """Return the size of the vocabulary and the path as text."""
        return f"<Tokenizer of {self.vocab_size} tokens, {self.path}>"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with BOS in front if the vocabulary adds it or the text is empty.

        Raises:
            TypeError: The text is not a string.
            ValueError: The text contains a lone surrogate.
        """
        text = argument_checks.check_string("the text", text)
        return ([self._vocabulary.bos] if self._vocabulary.add_bos or not text else []) + self._encode_text(text)

    @property
    def specials(self) -> dict[str, int]:
        """The ids of all special tokens by name, as chat templates write the names; the white space around a name is removed."""
        names = {token: self.pieces[token].decode(errors="replace").strip() for token in self._vocabulary.non_text_ids}
        return {name: token for token, name in names.items() if name}

    @functools.cached_property
    def max_token_length(self) -> int:
        """The length of the longest token in bytes."""
        return max(map(len, self.pieces))

    def encode_rendered(self, segments: Sequence[RenderedSegment]) -> list[int]:
        """Return the token ids of a rendered chat template, without BOS in front; see `AnyTokenizer`.

        Names of special tokens become those tokens, except in messages. Each stretch between them is encoded as a separate text.
        """
        specials, tokens, at = self.specials, list[int](), 0
        # Messages are masked with a character of no special token's name, so that only the template's names match.
        mask = next(char for char in map(chr, range(0x10FFFF)) if not any(char in name for name in specials))
        text = "".join([segment.text for segment in segments])
        masked = "".join([mask * len(segment.text) if segment.is_message else segment.text for segment in segments])
        for match in re.finditer("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)", masked):
            tokens += [*self._encode_text(text[at : match.start()]), specials[match[0]]]
            at = match.end() + self._count_stripped(specials[match[0]], text[match.end() :])
        return tokens + self._encode_text(text[at:])

    def _count_stripped(self, token: int, following: str) -> int:
        """Return how many white-space characters at the start of `following` are dropped because a token precedes them.

        Args:
            token: The id of the token before the text; only ids in the vocabulary's `rstrip_ids` drop white space.
            following: The text after the token.
        """
        return len(following) - len(following.lstrip(WHITE_SPACE)) if token in self._vocabulary.rstrip_ids else 0

    def _encode_text(self, text: str) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(self._split_user_defined(text.replace(self._vocabulary.space_symbol, " "))):
            if i % 2:  # a user-defined piece
                tokens.append(self._ids[part.encode()])
                continue
            part = part[self._count_stripped(tokens[-1], part) if i else 0 :]
            if part:
                tokens += self._merge(self._encode_characters(" " * self._vocabulary.add_space_prefix + part))
        return tokens

    def _split_user_defined(self, text: str) -> list[str]:
        """Split a text into a list in which every second string is a user-defined piece; the longest piece wins.

        There can be six thousand pieces, which an alternation pattern would try one by one.
        """
        parts, begin = [], 0
        for match in self._user_defined_start.finditer(text):
            if (at := match.start()) >= begin:
                candidates = (text[at : at + n] for n in self._user_defined_lengths)
                if piece := next((each for each in candidates if each in self._user_defined), ""):
                    parts += [text[begin:at], piece]
                    begin = at + len(piece)
        return [*parts, text[begin:]]

    def _encode_characters(self, text: str) -> list[int]:
        tokens = []
        for character in text:
            raw = character.encode()
            token = self._ids.get(raw)
            tokens += [token] if token is not None else [self._vocabulary.byte_ids[byte] for byte in raw]
        return [token if token < self.vocab_size else UNKNOWN for token in tokens]

    def _merge(self, tokens: list[int]) -> list[int]:
        """Merge neighbouring tokens, best score and leftmost first, until no pair forms a piece; return the remaining ids.

        A heap holds every pair that can merge. An entry is stale once one of its two tokens has changed. The argument is
        overwritten.
        """
        n = len(tokens)
        left, right = list(range(-1, n - 1)), list(range(1, n + 1))
        heap: list[tuple[float, int, int, int, int, int]] = []

        def push_pair(i: int, j: int) -> None:
            if i >= 0 and j < n:
                merged = self._ids.get(self.pieces[tokens[i]] + self.pieces[tokens[j]])
                if merged is not None:
                    heapq.heappush(heap, (-self.scores[merged], i, j, tokens[i], tokens[j], merged))

        for i in range(n - 1):
            push_pair(i, i + 1)
        while heap:
            _, i, j, first, second, merged = heapq.heappop(heap)
            if tokens[i] != first or tokens[j] != second or right[i] != j:
                continue
            tokens[i], tokens[j] = merged, -1
            right[i] = right[j]
            if right[i] < n:
                left[right[i]] = i
            push_pair(left[i], i)
            push_pair(i, right[i])
        return [token for token in tokens if token >= 0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of a whole sequence of token ids that starts with BOS, in which special tokens have no text."""
        return decode_tokens(self, tokens)

    def token_to_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token id stands for in a text; None for special tokens and unknown ids."""
        if not UNKNOWN < token < self.vocab_size or token in self._vocabulary.non_text_ids:
            return None
        return self._get_bytes(token)

    def decode_incrementally(self, token: int, state: int) -> tuple[bytes, int]:
        """Return the bytes that the next token adds to a text, and the new decoding state.

        The space that `encode` adds in front of a text is left out. `state` is what the previous call returned; see
        `AnyTokenizer`.
        """
        if token in self._vocabulary.non_text_ids:
            return b"", token
        data = self._get_bytes(token)
        is_first = state == self._space_prefix_state and self._vocabulary.add_space_prefix
        return data.removeprefix(b" ") if is_first else data, token

    def _get_bytes(self, token: int) -> bytes:
        return bytes([self._byte_by_id[token]]) if token in self._byte_by_id else self.pieces[token]


class StreamingDetokenizer:
    """A streaming decoder from token ids to text, which keeps the bytes of an incomplete character until the next token.

    Args:
        tokenizer: The tokenizer of the sequence.
        visible_tokens: The special tokens that appear in the text, with the string to show for each.
    """

    def __init__(self, tokenizer: AnyTokenizer, visible_tokens: Mapping[int, str] = NO_TOKENS) -> None:
        """Start before the first token."""
        self._tokenizer, self._visible_tokens = tokenizer, visible_tokens
        self._state = TEXT_NOT_STARTED
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.utf8_errors)

    def push(self, token: int) -> str:
        """Add the next token to the stream and return the new text, which is empty for most special tokens.

        A token that ends inside a character adds only the characters before it; a visible special token adds its own string.

        Raises:
            TypeError: The token is not an integer.
            ValueError: The token is out of range.
        """
        check_int("a token", token, 0, self._tokenizer.vocab_size - 1)
        piece, self._state = self._tokenizer.decode_incrementally(token, self._state)
        return (
            self._utf8_decoder.decode(b"", True) + self._visible_tokens[token]
            if token in self._visible_tokens
            else self._utf8_decoder.decode(piece)
        )

    def peek(self, tokens: Iterable[int]) -> list[str]:
        """Return the text that each of several next tokens would add, one string per token, without changing the stream."""
        utf8_state, state = self._utf8_decoder.getstate(), self._state
        texts = [self.push(token) for token in tokens]
        self._utf8_decoder.setstate(utf8_state)
        self._state = state
        return texts

    def flush(self) -> str:
        """End the stream and return U+FFFD for a character that was never completed, else an empty string."""
        return self._utf8_decoder.decode(b"", final=True)


def decode_tokens(tokenizer: AnyTokenizer, tokens: Iterable[int]) -> str:
    """Return the text of a whole sequence of token ids, decoded with the given tokenizer."""
    stream = StreamingDetokenizer(tokenizer)
    return "".join([stream.push(token) for token in tokens]) + stream.flush()


def read_file_bytes(path: Path, expected: str) -> bytes:
    """Read a whole file and return its bytes.

    Args:
        path: The file.
        expected: What the file should be, for the error.

    Raises:
        TokenizerError: The file cannot be read.
    """
    with argument_checks.wrap_read_errors(path, TokenizerError, expected):
        return path.read_bytes()


def _read_llama2c_vocab(path: Path) -> SentencePieceVocab:
    """Read a llama2.c tokenizer.bin and return its vocabulary; raise TokenizerError for a damaged file.

    The file is a uint32 with the longest piece's length, then per token a float32 score, an int32 length and the bytes.
    """
    data = read_file_bytes(path, "a llama2.c tokenizer file")
    if len(data) < 4:
        raise TokenizerError(f"{path} {'is empty' if not data else 'is truncated'}; expected a llama2.c tokenizer file")
    (max_length,) = struct.unpack_from("<I", data)
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
        if not 0 <= length <= max_length or at + length > len(data) or math.isnan(score):
            raise TokenizerError(f"{path} is damaged or not a llama2.c tokenizer file: token {len(pieces)} has length {length}")
        pieces.append(data[at : at + length])
        scores.append(score)
        at += length
    if len(pieces) < 3:
        raise TokenizerError(f"{path} has {len(pieces)} tokens; expected <unk>, BOS, EOS and more")
    eos = {BOS: "bos", EOS: "eos"}  # llama2.c ends a text at either
    return SentencePieceVocab(pieces, scores, range(len(pieces)), range(FIRST_BYTE, FIRST_BYTE + 256), (), eos, eos, BOS)
