"""Hermes' tool calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as of Qwen 2.5 and SmolLM."""

from specdec.server.tool_parsers.base import Reader, ToolParser
from specdec.server.tool_parsers.json_calls import JsonCallParser


class HermesParser(ToolParser):
    """A parser of JSON objects in tags, one per call. A close tag in a JSON string is not one."""

    template_signs = (("<tool_call>",),)
    open_mark, close_mark = "<tool_call>", "</tool_call>"
    layout = "lines"

    def read_call(self) -> Reader:
        """Read a call up to its close tag, or up to where it is not a call anymore."""
        call, rest = JsonCallParser(self.tools), ""
        while rest != self.close_mark and (char := (yield)):
            rest += char
            if not call.is_in_string and self.close_mark.startswith(rest):
                continue
            while rest and call.can_continue_with(rest[0]):
                self.emit(*call.push(rest[0]))
                rest = rest[1:]
            if rest or call.is_text:
                break
        if not call.is_call:
            self.emit_unfinished(self.open_mark + call.pending + rest)
        elif rest != self.close_mark and not self.is_ended:
            self.emit_text(rest)
