"""Regular languages by derivatives (Brzozowski 1964): an oracle for constraints that shares no code with the package.

A language is EMPTY_LANGUAGE, EMPTY_STRING (only the empty string) or another tuple. The functions below simplify, so that every
language except EMPTY_LANGUAGE has a string.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.runtime.simd import Float32
from specdec.verification import Draft

Language = tuple[Any, ...]
EMPTY_LANGUAGE, EMPTY_STRING = ("nothing",), ("empty",)


def byte_class(characters: str) -> Language:
    """Return the language of one byte of the characters."""
    return "byte", frozenset(characters.encode())


def union(*languages: Language) -> Language:
    parts = frozenset().union(*(each[1] if each[0] == "either" else {each} for each in languages)) - {EMPTY_LANGUAGE}
    return ("either", parts) if len(parts) > 1 else next(iter(parts), EMPTY_LANGUAGE)


def concatenate(first: Language, second: Language) -> Language:
    if EMPTY_LANGUAGE in (first, second):
        return EMPTY_LANGUAGE
    if EMPTY_STRING in (first, second):
        return second if first == EMPTY_STRING else first
    return "then", first, second


def literal(string: str) -> Language:
    return functools.reduce(
        lambda later, byte: concatenate(("byte", frozenset([byte])), later), reversed(string.encode()), EMPTY_STRING
    )


def repeat(language: Language) -> Language:
    return EMPTY_STRING if language in (EMPTY_LANGUAGE, EMPTY_STRING) else ("any number", language)


def is_nullable(language: Language) -> bool:
    """Return whether the language has the empty string."""
    kind = language[0]
    if kind == "either":
        return any(map(is_nullable, language[1]))
    return is_nullable(language[1]) and is_nullable(language[2]) if kind == "then" else kind in ("empty", "any number")


@functools.lru_cache(None)
def derive(language: Language, byte: int) -> Language:
    """Return what may follow a byte (the derivative)."""
    match language:
        case ("byte", known):
            return EMPTY_STRING if byte in known else EMPTY_LANGUAGE
        case ("either", parts):
            return union(*(derive(part, byte) for part in parts))
        case ("any number", part):
            return concatenate(derive(part, byte), language)
        case ("then", first, second):
            later = derive(second, byte) if is_nullable(first) else EMPTY_LANGUAGE
            return union(concatenate(derive(first, byte), second), later)
    return EMPTY_LANGUAGE


def derive_all(language: Language, data: bytes) -> Language:
    for byte in data:
        language = derive(language, byte)
    return language


def get_allowed(language: Language, vocabulary: Sequence[bytes], end_marks: Mapping[int, str]) -> list[bool]:
    """Return for each token whether it may follow, byte by byte; an end-of-sequence token may follow a complete string."""
    return [
        is_nullable(language) if token in end_marks else bool(piece) and derive_all(language, piece) != EMPTY_LANGUAGE
        for token, piece in enumerate(vocabulary)
    ]


class LanguageConstraint:
    """A language as a `Constraint`: a token is forced if only it may follow."""

    def __init__(self, language: Language, vocabulary: Sequence[bytes], end_marks: Mapping[int, str]) -> None:
        self.language, self.vocabulary, self.end_marks = language, vocabulary, end_marks

    def begin(self, prompt: list[int]) -> "LanguageState":
        return LanguageState(self, self.language)


class LanguageState:
    """The `ConstraintState` of a `LanguageConstraint`."""

    def __init__(self, constraint: LanguageConstraint, language: Language) -> None:
        self._constraint, self.language, self.error = constraint, language, None

    def _get_allowed(self, language: Language) -> list[int]:
        return [*np.flatnonzero(get_allowed(language, self._constraint.vocabulary, self._constraint.end_marks))]

    @property
    def is_complete(self) -> bool:
        return self.language == EMPTY_STRING

    def get_forced_tokens(self, max_n: int) -> list[int]:
        tokens, language = list[int](), self.language
        while len(tokens) < max_n and len(only := self._get_allowed(language)) == 1 and only[0] not in self._constraint.end_marks:
            tokens.append(int(only[0]))
            language = derive_all(language, self._constraint.vocabulary[tokens[-1]])
        return tokens

    def count_allowed(self, tokens: list[int]) -> int:
        language = self.language
        for n, token in enumerate(tokens):
            if not get_allowed(language, self._constraint.vocabulary, self._constraint.end_marks)[token]:
                return n
            language = derive_all(language, self._constraint.vocabulary[token])
        return len(tokens)

    def find_end(self, tokens: list[int]) -> int | None:
        language = self.language
        for n, token in enumerate([*tokens, -1]):
            if language == EMPTY_STRING:
                return n
            language = derive_all(language, self._constraint.vocabulary[token])
        return None

    def mask_logits(self, logits: Float32, draft: Draft) -> None:
        self._mask_subtree(logits, draft, -1, self.language)

    def _mask_subtree(self, logits: Float32, draft: Draft, node: int, language: Language) -> None:
        allowed = get_allowed(language, self._constraint.vocabulary, self._constraint.end_marks)
        logits[node + 1, np.logical_not(allowed[: logits.shape[1]])] = -np.inf
        for child in draft.children(node):
            token = draft.tokens[child]
            if child + 1 < len(logits) and allowed[token] and token not in self._constraint.end_marks:
                self._mask_subtree(logits, draft, child, derive_all(language, self._constraint.vocabulary[token]))

    def commit(self, tokens: list[int]) -> None:
        for token in tokens:
            self.language = derive_all(self.language, self._constraint.vocabulary[token])
