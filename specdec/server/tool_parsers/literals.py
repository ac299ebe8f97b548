"""A reader of values in Python's or Gemma's syntax, and the base of the formats with such values. Knows no requests."""

import ast
import json
import re
from collections.abc import Iterator

from specdec.argument_checks import JSONDict
from specdec.server.json_values import parse_json
from specdec.server.tool_parsers.base import Delta, Reader, ToolParser
from specdec.text.reasoning import SPECIAL_TOKEN_MARK

GEMMA_QUOTES = ('<|"|>', "<escape>")  # of Gemma and FunctionGemma; opening and closing quotes are the same
CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
MAX_VALUE_DEPTH = 64  # levels of nesting
# 1 quoted string, 2 Gemma string, 3 number, 4 name, 5 any other character
LEXEME_PATTERN = re.compile(
    r"""\s*(?:("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(<\|"\|>.*?<\|"\|>|<escape>.*?<escape>)"""
    r"""|(-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.-]))|([A-Za-z_][\w.-]*)|(.))\s*""",
    re.DOTALL | re.ASCII,
)


class LiteralReader:
    """A reader of values in Python's or Gemma's syntax. Its methods raise ValueError for invalid input.

    Args:
        text: The text to read.

    Attributes:
        lexeme: The next lexeme; None at the end.
    """

    def __init__(self, text: str) -> None:
        """Start at the first lexeme of the text."""
        self._lexemes = LEXEME_PATTERN.finditer(text)
        self._advance()

    def _advance(self) -> None:
        self.lexeme = next(self._lexemes, None)

    def accept(self, char: str) -> bool:
        """Skip the given character if it is next, and return whether it was."""
        is_next = self.lexeme is not None and self.lexeme[5] == char
        if is_next:
            self._advance()
        return is_next

    def expect(self, char: str) -> None:
        """Skip the given character; raises ValueError if another one is next."""
        if not self.accept(char):
            raise ValueError(f"expected {char}")

    def expect_end(self) -> None:
        """Raise ValueError if anything is left."""
        if self.lexeme:
            raise ValueError("expected the end")

    def iter_until(self, close_char: str) -> Iterator[None]:
        """Yield before each item of a list separated by commas, until the closing character; the caller reads the items.

        The commas and the closing character are skipped.
        """
        if self.accept(close_char):
            return
        yield
        while not self.accept(close_char):
            self.expect(",")
            yield

    def read_name(self) -> str:
        """Read an unquoted name and return it; raises ValueError if something else is next."""
        if not self.lexeme or not (name := self.lexeme[4]):
            raise ValueError("expected a name")
        self._advance()
        return name

    def read_items(self, close_char: str, separator: str, depth: int = 0) -> JSONDict:
        """Read names with values up to the closing character, and return them as a dict. Names may be quoted.

        Args:
            close_char: The character after the last item.
            separator: The character between a name and its value.
            depth: Levels of nesting so far.
        """
        items = JSONDict()
        for _ in self.iter_until(close_char):
            key = self.read_value() if self.lexeme and (self.lexeme[1] or self.lexeme[2]) else self.read_name()
            self.expect(separator)
            items[str(key)] = self.read_value(depth)
        return items

    def read_value(self, depth: int = 0) -> object:
        """Read a string, number, constant, list or object, and return its value.

        Raises:
            ValueError: Something else is next, or the value is nested too deeply.
        """
        lexeme = self.lexeme
        if lexeme is None or depth > MAX_VALUE_DEPTH:
            raise ValueError("expected a value")
        self._advance()
        if lexeme[1] or lexeme[2]:
            return _parse_string(lexeme[1] or lexeme[2])
        if lexeme[3]:
            return parse_json(lexeme[3])
        if lexeme[4] in CONSTANTS:
            return CONSTANTS[lexeme[4]]
        if lexeme[5] == "[":
            return [self.read_value(depth + 1) for _ in self.iter_until("]")]
        if lexeme[5] == "{":
            return self.read_items("}", ":", depth + 1)
        raise ValueError("expected a value")


def _parse_string(quoted: str) -> str:
    """Return the value of a quoted string; if the string is neither valid JSON nor Python, the text between its quotes."""
    for quote in GEMMA_QUOTES:
        if quoted.startswith(quote):
            return quoted[len(quote) : -len(quote)]
    quoted = quoted.replace(SPECIAL_TOKEN_MARK, "<")
    try:
        value = json.loads(quoted) if quoted[0] == '"' else ast.literal_eval(quoted)
        value.encode()  # rejects lone surrogates
    except (ValueError, SyntaxError, MemoryError):
        return quoted[1:-1]
    return str(value)


class LiteralCallParser(ToolParser):
    """Base class of parsers that read all calls between two marks at once."""

    has_special_marks = True

    def iter_calls(self, text: str) -> Iterator[tuple[str, JSONDict]]:
        """Yield the name and arguments of each call of the text between the marks; raises ValueError for other texts."""
        raise NotImplementedError

    def read_call(self) -> Reader:
        """Read all calls up to the close mark; if one is invalid, or of an unknown tool, everything is text."""
        text = ""
        while not text.endswith(self.close_mark) and (char := (yield)):
            text += char
        try:
            calls = [*self.iter_calls(text.removesuffix(self.close_mark))] if text.endswith(self.close_mark) else []
        except (ValueError, RecursionError):
            calls = []
        if calls and all(name in self.tools for name, _ in calls):
            self.emit(*(Delta("tool_call", json.dumps(arguments, ensure_ascii=False), name) for name, arguments in calls))
        else:
            self.emit_unfinished(self.open_mark + text)
