"""Translation of values in Python's or Gemma's syntax to JSON, and the base of the formats with such values."""

import ast
import json
import re
from collections.abc import Iterable
from typing import Any

from specdec.server.tool_parsers.base import Delta, Reader, ToolParser
from specdec.text.reasoning import SPECIAL_TOKEN_MARK

GEMMA_QUOTES = ('<|"|>', "<escape>")  # of Gemma and FunctionGemma; opening and closing quotes are the same
CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
# 1 string, 2 Gemma string, a number, 3 name and 4 what follows it, or a character that JSON writes in another way
LEXEME_PATTERN = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(<\|"\|>.*?<\|"\|>|<escape>.*?<escape>)"""
    r"""|-?\d[\w.+-]*|([A-Za-z_][\w.-]*)(\s*[:=(])?|[=)]""",
    re.DOTALL | re.ASCII,
)


def translate_to_json(text: str) -> str:
    """Return a value in Python's or Gemma's syntax as JSON, in which a call `name(key=value)` is `["name", {"key": value}]`.

    Other texts become something that is not JSON.

    Raises:
        ValueError: The text has an unquoted name that is neither a key, a constant nor that of a call.
    """
    return LEXEME_PATTERN.sub(_translate_lexeme, text)


def count_calls(text: str) -> int:
    """Return the number of calls `name(` in a text, with those in the place of values, where none is allowed."""
    return sum((lexeme[4] or "").endswith("(") for lexeme in LEXEME_PATTERN.finditer(text))


def _translate_lexeme(lexeme: re.Match[str]) -> str:
    string, gemma_string, name, separator = lexeme.groups()
    if string or gemma_string:
        return json.dumps(_parse_string(string or gemma_string))
    if separator:
        return f'["{name}", {{' if separator.endswith("(") else f'"{name}":'
    if name and name not in CONSTANTS:
        raise ValueError(f"unknown constant {name}")
    return json.dumps(CONSTANTS[name]) if name else {"=": ":", ")": "}]"}.get(lexeme[0], lexeme[0])


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

    def parse_calls(self, text: str) -> Iterable[tuple[Any, Any]]:
        """Return the name and arguments of each call of the text between the marks; raises ValueError for other texts."""
        raise NotImplementedError

    def read_call(self) -> Reader:
        """Read all calls up to the close mark; if one is invalid, or of an unknown tool, everything is text."""
        text = ""
        while not text.endswith(self.close_mark) and (char := (yield)):
            text += char
        calls = list[Delta]()
        if text.endswith(self.close_mark):
            calls = self._make_deltas(text.removesuffix(self.close_mark))
        if calls:
            self.emit(*calls)
        else:
            self.emit_unfinished(self.open_mark + text)

    def _make_deltas(self, text: str) -> list[Delta]:
        deltas = list[Delta]()
        try:
            for name, arguments in self.parse_calls(text):
                if name not in self.tools or not isinstance(arguments, dict):
                    return []
                deltas.append(Delta("tool_call", json.dumps(arguments, ensure_ascii=False), name))
        except (TypeError, ValueError):
            return []
        return deltas
