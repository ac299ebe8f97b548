"""GLM's tool calls: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`, as of GLM 4.5 to 4.7."""

import json
from collections.abc import Generator

from specdec.argument_checks import JSONObject, shorten
from specdec.server.tool_parsers.base import Delta, Reader
from specdec.server.tool_parsers.grammar import GrammarBuilder, quote
from specdec.server.tool_parsers.qwen3_coder import MAX_TAG_CHARS, Qwen3CoderParser

KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"
NEWLINE = '"\\n"?'  # GLM 4.5 and 4.6 write each tag on a line of its own, GLM 4.7 writes all in one line


class GLMParser(Qwen3CoderParser):
    """A parser of calls with a pair of tags for each name and each value."""

    template_signs = (("<tool_call>", KEY_OPEN, VALUE_OPEN),)
    extra_marks = (KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE)
    layout = "sequence"
    value_close, padding = VALUE_CLOSE, ""

    def read_call(self) -> Reader:
        """Read a call. What cannot belong to it is read again, since another call may start in it."""
        text = yield from self._read_until("<")
        name = text.removesuffix("<").strip()
        if name == text.strip() or name not in self.tools:
            if not self.is_cut:
                self.emit_text(self.open_mark)
                self.unread(text)
            return
        self.unread("<")
        self.emit(Delta("tool_call", "{", name))
        separator = ""
        while (tag := (yield from self._read_tag(KEY_OPEN, self.close_mark))).lstrip() == KEY_OPEN:
            key = yield from self._read_until(KEY_CLOSE)
            value_tag = yield from self._read_tag(VALUE_OPEN)
            if value_tag.lstrip() != VALUE_OPEN or not key.endswith(KEY_CLOSE):
                tag += key + value_tag
                break
            key = key.removesuffix(KEY_CLOSE).strip()
            value = yield from self._read_value(key, self.tools[name])
            self.emit(Delta("tool_call", f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}"))
            separator = ", "
        if self.is_ended:
            return
        self.emit(Delta("tool_call", "}"))
        if tag.lstrip() != self.close_mark:
            self.unread(tag)

    def _read_until(self, end: str) -> Generator[None, str, str]:
        """Return the text up to `end`, or its first characters if `end` is not among them."""
        text = ""
        while not text.endswith(end) and len(text) < MAX_TAG_CHARS and (char := (yield)):
            text += char
        return text

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool: its name, then its parameters in their order."""
        return f"{quote(name)} {cls.write_parameters(grammar, schema)} {NEWLINE}"

    @classmethod
    def write_key(cls, key: str) -> str:
        """Return a Lark expression for what is before the value of a parameter; see `Qwen3CoderParser.write_key`."""
        if "<" in key or "\n" in key:
            raise ValueError(f"{shorten(key, repr)} is not a valid name in this model's calls")
        return f"{NEWLINE} {quote(KEY_OPEN + key + KEY_CLOSE)} {NEWLINE} {quote(VALUE_OPEN)}"
