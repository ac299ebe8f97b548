"""Mistral's tool calls: a list of JSON objects after `[TOOL_CALLS]`, or `[TOOL_CALLS]NAME[ARGS]{...}` once per call."""

from typing import ClassVar

from specdec.argument_checks import JSONObject
from specdec.server.json_values import WHITESPACE, JsonScanner
from specdec.server.tool_parsers.base import Delta, Layout, Reader, ToolParser
from specdec.server.tool_parsers.grammar import GrammarBuilder, quote
from specdec.server.tool_parsers.json_calls import JsonCallParser

ARGS = "[ARGS]"
MAX_NAME_CHARS = 1000  # of a tool's name with its marks


class MistralListParser(ToolParser):
    """A parser of `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, which also reads `[TOOL_CALLS]NAME[ARGS]{...}`.

    What follows the mark and is not a call is text.
    """

    template_signs: ClassVar[tuple[tuple[str, ...], ...]] = (("[TOOL_CALLS]",),)
    open_mark = "[TOOL_CALLS]"
    layout: ClassVar[Layout] = "list"

    def read_call(self) -> Reader:
        """Read a list of calls, or a call with its name before its arguments."""
        self._pending_space, text = "", self.open_mark
        while (char := (yield)) and char in WHITESPACE:
            text += char
        yield from self._read_list(text + char) if char == "[" else self._read_named_call(text + char)

    def _read_list(self, text: str) -> Reader:
        """Read a list of calls that are JSON objects; emits `text`, which was read before, if the first one is not a call."""
        while True:
            call = JsonCallParser(self.tools)
            while not call.is_text and not call.is_complete and (char := (yield)):
                self.emit(*call.push(char))
            text += call.pending
            if not call.is_call:
                break
            text = ""
            while (char := (yield)) and char in WHITESPACE:
                pass
            if char != ",":
                text = char.strip("]")
                break
        if text.strip() and not self.is_cut:
            self.emit(Delta("text", text))

    def _read_named_call(self, text: str) -> Reader:
        """Read the rest of a name and arguments as JSON; emits `text`, which was read before, if they are not a call."""
        name = ""
        while name not in self.tools and (char := (yield)):
            text += char
            if text.endswith(ARGS):
                name = text.removeprefix(self.open_mark).removesuffix(ARGS).partition("[")[0].strip()
            if name not in self.tools and (len(text) > MAX_NAME_CHARS or char == "{"):
                break
        if name not in self.tools:
            if not self.is_cut:
                self.emit(Delta("text", text))
            return
        self.emit(Delta("tool_call", "", name))
        scanner = JsonScanner()
        while (char := (yield)) and (not scanner.is_complete or char in WHITESPACE):
            scanner.accept(char)
            if not scanner.is_complete or char not in WHITESPACE:
                self.emit(Delta("tool_call", char))
        self.unread(char)


class MistralParser(MistralListParser):
    """A parser of the same calls for models that write `[TOOL_CALLS]NAME[ARGS]{...}`."""

    template_signs = (("[TOOL_CALLS]", ARGS),)
    extra_marks = (ARGS,)
    layout = "sequence"

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool: its name, and the arguments in JSON."""
        return " ".join([quote(name), *grammar.write_marks(ARGS), grammar.add_json_rule(schema)])
