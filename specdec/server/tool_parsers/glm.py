"""GLM's tool calls: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`, as of GLM 4.5 to 4.7."""

from collections.abc import Generator

from specdec.argument_checks import JSONObject, shorten
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

    def _read_name(self) -> Generator[None, str, tuple[str | None, str]]:
        """Read the name of a tool, up to the next tag; see `Qwen3CoderParser._read_name`."""
        text = yield from self._read_until("<")
        name = text.removesuffix("<").strip() if text.endswith("<") else None
        if name in self.tools:
            self.unread("<")
        return name, text

    def _read_key(self) -> Generator[None, str, tuple[str | None, str]]:
        """Read the name of a parameter and the tag before its value; see `Qwen3CoderParser._read_key`."""
        tag = yield from self._read_tag(KEY_OPEN, self.close_mark)
        if tag.lstrip() != KEY_OPEN:
            return None, tag
        key = yield from self._read_until(KEY_CLOSE)
        value_tag = yield from self._read_tag(VALUE_OPEN)
        is_key = key.endswith(KEY_CLOSE) and value_tag.lstrip() == VALUE_OPEN
        return key.removesuffix(KEY_CLOSE).strip() if is_key else None, tag + key + value_tag

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
