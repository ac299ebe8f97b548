"""Small languages by hand (Brzozowski 1964): what may follow, byte by byte, for tests of shapes; nothing of the product's.

A language is NOTHING, EMPTY (the empty text) or a tuple; as they are put together no other one is without a text.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.runtime.simd import Float32
from specdec.verification import Draft

Language = tuple[Any, ...]
NOTHING, EMPTY = ("nothing",), ("empty",)


def one_of(characters: str) -> Language:
    """A byte of those."""
    return "byte", frozenset(characters.encode())


def either(*languages: Language) -> Language:
    parts = frozenset().union(*(each[1] if each[0] == "either" else {each} for each in languages)) - {NOTHING}
    return ("either", parts) if len(parts) > 1 else next(iter(parts), NOTHING)


def then(first: Language, second: Language) -> Language:
    if NOTHING in (first, second):
        return NOTHING
    if EMPTY in (first, second):
        return second if first == EMPTY else first
    return "then", first, second


def text(words: str) -> Language:
    return functools.reduce(lambda later, byte: then(("byte", frozenset([byte])), later), reversed(words.encode()), EMPTY)


def any_number(language: Language) -> Language:
    return EMPTY if language in (NOTHING, EMPTY) else ("any number", language)


def is_complete(language: Language) -> bool:
    """Whether the empty text is of it."""
    kind = language[0]
    if kind == "either":
        return any(map(is_complete, language[1]))
    return is_complete(language[1]) and is_complete(language[2]) if kind == "then" else kind in ("empty", "any number")


@functools.lru_cache(None)
def behind(language: Language, byte: int) -> Language:
    """What may follow that byte."""
    match language:
        case ("byte", known):
            return EMPTY if byte in known else NOTHING
        case ("either", parts):
            return either(*(behind(part, byte) for part in parts))
        case ("any number", part):
            return then(behind(part, byte), language)
        case ("then", first, second):
            later = behind(second, byte) if is_complete(first) else NOTHING
            return either(then(behind(first, byte), second), later)
    return NOTHING


def after(language: Language, data: bytes) -> Language:
    for byte in data:
        language = behind(language, byte)
    return language


def allowed(language: Language, vocabulary: Sequence[bytes], end_marks: Mapping[int, str]) -> list[bool]:
    """Of each token whether it may follow: by its bytes, one after the other; an end mark where the text is complete."""
    return [
        is_complete(language) if token in end_marks else bool(said) and after(language, said) != NOTHING
        for token, said in enumerate(vocabulary)
    ]


class LanguageShape:
    """A language as `decoding.Shape`: forced is a token that alone may follow."""

    def __init__(self, language: Language, vocabulary: Sequence[bytes], end_marks: Mapping[int, str]) -> None:
        self.language, self.vocabulary, self.end_marks = language, vocabulary, end_marks

    def begin(self, prompt: list[int]) -> "LanguageWalk":
        return LanguageWalk(self, self.language)


class LanguageWalk:
    def __init__(self, shape: LanguageShape, language: Language) -> None:
        self._shape, self.language, self.trouble = shape, language, None

    def _allowed(self, language: Language) -> list[int]:
        return [*np.flatnonzero(allowed(language, self._shape.vocabulary, self._shape.end_marks))]

    @property
    def is_over(self) -> bool:
        return self.language == EMPTY

    def forced(self, most: int) -> list[int]:
        tokens, language = list[int](), self.language
        while len(tokens) < most and len(only := self._allowed(language)) == 1 and only[0] not in self._shape.end_marks:
            tokens.append(int(only[0]))
            language = after(language, self._shape.vocabulary[tokens[-1]])
        return tokens

    def n_allowed(self, tokens: list[int]) -> int:
        language = self.language
        for n, token in enumerate(tokens):
            if not allowed(language, self._shape.vocabulary, self._shape.end_marks)[token]:
                return n
            language = after(language, self._shape.vocabulary[token])
        return len(tokens)

    def find_end(self, tokens: list[int]) -> int | None:
        language = self.language
        for n, token in enumerate([*tokens, -1]):
            if language == EMPTY:
                return n
            language = after(language, self._shape.vocabulary[token])
        return None

    def mask(self, logits: Float32, draft: Draft) -> None:
        self._mask_behind(logits, draft, -1, self.language)

    def _mask_behind(self, logits: Float32, draft: Draft, node: int, language: Language) -> None:
        fits = allowed(language, self._shape.vocabulary, self._shape.end_marks)
        logits[node + 1, np.logical_not(fits[: logits.shape[1]])] = -np.inf
        for child in draft.children(node):
            token = draft.tokens[child]
            if child + 1 < len(logits) and fits[token] and token not in self._shape.end_marks:
                self._mask_behind(logits, draft, child, after(language, self._shape.vocabulary[token]))

    def takes(self, tokens: list[int]) -> None:
        for token in tokens:
            self.language = after(self.language, self._shape.vocabulary[token])
