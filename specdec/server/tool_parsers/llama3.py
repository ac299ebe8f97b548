"""Llama 3's tool calls: the output is one JSON object `{"name": ..., "parameters": {...}}`."""

from specdec.server.tool_parsers.base import Delta, Reader, ToolParser
from specdec.server.tool_parsers.grammar import GrammarBuilder
from specdec.server.tool_parsers.json_calls import JsonCallParser


class Llama3Parser(ToolParser):
    """A parser of an output that is one tool call; any other output is text."""

    template_signs = (("<|python_tag|>",), ("ipython",))
    arguments_key = "parameters"

    def read_output(self) -> Reader:
        """Read the call, and text after it; or all of the output as text if it does not start with a call."""
        call = JsonCallParser(self.tools)
        while not call.is_text and (char := (yield)) and call.can_continue_with(char):
            self.emit(*call.push(char))
        text = char if call.is_call else call.pending
        while text:
            self.emit(Delta("text", text))
            text = yield

    @classmethod
    def write_calls(cls, grammar: GrammarBuilder, call: str, opening: str = "") -> str:
        """Return the rule of the only call."""
        return call

    @classmethod
    def write_optional_calls(cls, grammar: GrammarBuilder, call: str) -> str:
        """Return a Lark expression for a call, and for a text that does not start like one."""
        return f"{call} | {grammar.add_rule('/[^{](?s:.*)/')}"
