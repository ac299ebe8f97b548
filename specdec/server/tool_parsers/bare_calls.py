"""Tool calls in JSON without the marks of the model's format, as Qwen2.5-Coder writes them. Knows no requests."""

from collections.abc import Collection

from specdec.server.json_values import WHITESPACE
from specdec.server.tool_parsers.base import Delta
from specdec.server.tool_parsers.json_calls import JsonCallParser
from specdec.text.reasoning import SPECIAL_TOKEN_MARK

FILLER = WHITESPACE + "{}[],"  # may be around calls, as the marks of Markdown blocks may: lists, and doubled braces


class BareCallReader:
    """A reader of an answer that may be nothing but JSON objects with the name of a tool and arguments.

    Args:
        tools: The names of the tools.

    Attributes:
        text: All that was read.
        deltas: The calls.
    """

    def __init__(self, tools: Collection[str]) -> None:
        """Start before the first text."""
        self.text, self.deltas = "", list[Delta]()
        self._tools, self._is_block_mark = tools, False
        self._last_char = ""  # outside of calls, apart from white space
        self._call: JsonCallParser | None = None

    def push(self, text: str) -> bool:
        """Take more of the answer, and return whether it can still be nothing but calls."""
        self.text += text
        return all(map(self._accept, text))

    def _accept(self, char: str) -> bool:
        if char == SPECIAL_TOKEN_MARK:
            return False
        if self._call and self._call.can_continue_with(char):
            self.deltas += self._call.push(char)
            return not self._call.is_text
        self._call = None
        if char == '"' and self._last_char == "{":
            self._call = JsonCallParser(self._tools)
            self.deltas += [*self._call.push("{"), *self._call.push(char)]
            return True
        self._is_block_mark = char == "`" or (self._is_block_mark and char.isalpha())  # such as ```json
        self._last_char = self._last_char if char in WHITESPACE else char
        return self._is_block_mark or char in FILLER
