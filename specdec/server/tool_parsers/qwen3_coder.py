"""Qwen3-Coder's tool calls in XML: `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`."""

import json
from collections.abc import Generator, Mapping
from typing import ClassVar

from specdec.argument_checks import JSONObject, shorten
from specdec.server.json_values import JsonScanner, parse_json
from specdec.server.tool_parsers.base import Delta, Layout, Reader, ToolParser
from specdec.server.tool_parsers.grammar import (
    OBJECT_KEYS,
    GrammarBuilder,
    get_enum_values,
    get_properties,
    get_schema_types,
    quote,
    resolve_ref,
)
from specdec.server.tool_parsers.literals import CONSTANTS

MAX_TAG_CHARS = 1000
# by the Python type of a parsed value
JSON_TYPES = {
    str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}, list: {"array"},
    dict: {"object"},
}  # fmt: skip


class Qwen3CoderParser(ToolParser):
    """A parser that emits each parameter once it is complete. A close tag in a JSON string is not one.

    Attributes:
        function_open: Text before the name of a tool.
        function_close: Tag after a tool's parameters.
        parameter_open: Text before the name of a parameter.
        tag_end: Text after a name.
        value_close: Tag after a value.
        padding: Text between a value and the tags around it.
    """

    template_signs: ClassVar[tuple[tuple[str, ...], ...]] = (("<tool_call>", "<function="),)
    open_mark, close_mark = "<tool_call>", "</tool_call>"
    layout: ClassVar[Layout] = "lines"
    function_open: ClassVar[str] = "<function="
    function_close: ClassVar[str] = "</function>"
    parameter_open: ClassVar[str] = "<parameter="
    tag_end: ClassVar[str] = ">"
    value_close: ClassVar[str] = "</parameter>"
    padding: ClassVar[str] = "\n"

    def read_call(self) -> Reader:
        """Read a call. What cannot belong to it is read again, since another call may start in it."""
        name, text = yield from self._read_name()
        if name is None or name not in self.tools:
            if not self.is_cut:
                self.emit_text(self.open_mark)
                self.unread(text)
            return
        self.emit(Delta("tool_call", "{", name))
        separator = ""
        key, tag = yield from self._read_key()
        while key is not None:
            value = yield from self._read_value(key, self.tools[name])
            self.emit(Delta("tool_call", f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}"))
            separator = ", "
            key, tag = yield from self._read_key()
        if self.is_ended:
            return
        self.emit(Delta("tool_call", "}"))
        if tag.lstrip() == self.function_close:
            tag = yield from self._read_tag(self.close_mark)
        if tag.lstrip() != self.close_mark and not self.is_ended:
            self.unread(tag)

    def _read_name(self) -> Generator[None, str, tuple[str | None, str]]:
        """Return the name of a tool after the open mark, or None if there is none, and the text that was read."""
        tag = yield from self._read_tag(self.function_open)
        return self._get_name(tag, self.function_open), tag

    def _read_key(self) -> Generator[None, str, tuple[str | None, str]]:
        """Return the name of the next parameter, or None if there is none, and the text that was read."""
        tag = yield from self._read_tag(self.parameter_open, self.function_close)
        return self._get_name(tag, self.parameter_open), tag

    def _get_name(self, tag: str, start: str) -> str | None:
        """Return the name in a tag that begins with `start`; None if it is no such tag."""
        text = tag.lstrip()
        is_tag = text.startswith(start) and text.endswith(self.tag_end)
        return text.removeprefix(start).removesuffix(self.tag_end) if is_tag else None

    def _read_tag(self, *starts: str) -> Generator[None, str, str]:
        """Return the text up to the end of a tag, or up to where it cannot be one that starts with one of `starts`."""
        text = ""
        while not text.endswith(">") and (char := (yield)):
            text += char
            stripped = text.lstrip()
            if len(stripped) > MAX_TAG_CHARS or not any(
                stripped.startswith(each) or each.startswith(stripped) for each in starts
            ):
                break
        return text

    def _read_value(self, key: str, root: JSONObject) -> Generator[None, str, str]:
        """Return the value of a parameter as JSON; if the output ends before it does, as an unterminated string."""
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        schema = schema if isinstance(schema, Mapping) else {}
        is_string = _is_string(schema, root)
        scanner = None if is_string else JsonScanner()  # as long as the value is JSON
        text, n_strings = "", 0  # the close tag starts after `n_strings` characters, not in a string
        while not text.endswith(self.value_close, n_strings) and (char := (yield)):
            text += char
            if scanner and not scanner.accept(char):
                scanner = None
            if scanner and scanner.is_in_string:
                n_strings = len(text)
        if self.is_ended:
            return json.dumps(text.removeprefix(self.padding), ensure_ascii=False)[:-1]
        text = text.removesuffix(self.value_close).removeprefix(self.padding).removesuffix(self.padding)
        try:
            value = text if is_string else parse_json(text)
        except ValueError:
            value = CONSTANTS.get(text.strip(), text)
        types = _get_value_types(schema, root)
        if "string" in types and not types & JSON_TYPES[type(value)]:
            value = text
        return json.dumps(value, ensure_ascii=False)

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool: its parameters on lines of their own, in their order."""
        opening, closing = quote(f"{cls.function_open}{name}{cls.tag_end}"), quote(f"\n{cls.function_close}")
        return f"{opening} {cls.write_parameters(grammar, schema)} {closing}"

    @classmethod
    def write_parameters(cls, grammar: GrammarBuilder, schema: JSONObject) -> str:
        """Return a Lark expression for the parameters of a call, where those that are not required may be missing."""
        grammar.check_supported_keys("an object", schema, *OBJECT_KEYS)
        parameters = [
            (cls._write_parameter(grammar, key, each, schema), required) for key, each, required in get_properties(schema)
        ]
        return " ".join(parameter if is_required else f"({parameter})?" for parameter, is_required in parameters)

    @classmethod
    def write_key(cls, key: str) -> str:
        """Return a Lark expression for what is before the value of a parameter.

        Raises:
            ValueError: The format cannot express the name.
        """
        if cls.tag_end in key or "\n" in key:
            raise ValueError(f"{shorten(key, repr)} is not a valid name in this model's calls")
        return quote(f"\n{cls.parameter_open}{key}{cls.tag_end}{cls.padding}")

    @classmethod
    def _write_parameter(cls, grammar: GrammarBuilder, key: str, schema: JSONObject, root: JSONObject) -> str:
        """Return a Lark expression for a parameter with its tags: a string as plain text, anything else as JSON.

        Raises:
            ValueError: The format cannot express the name, or the schema uses unsupported keys.
        """
        prefix, suffix = cls.write_key(key), quote(cls.padding + cls.value_close)
        if not _is_string(schema, root):
            return f"{prefix} {grammar.add_json_rule(schema, root)} {suffix}"
        schema = resolve_ref(schema, root)
        if values := [value for value in get_enum_values(schema) if isinstance(value, str)]:
            return f"{prefix} ({' | '.join(grammar.write_constant(value, cls.value_close) for value in values)}) {suffix}"
        grammar.check_supported_keys("a string", schema)
        # parsers end the value at the first close tag, even within a line
        return f"{prefix} {grammar.add_rule('/(?s:.*)/', f'[suffix={quote(cls.value_close)}]')}"


def _get_value_types(schema: JSONObject, root: JSONObject) -> set[str]:
    """Return the JSON types that a parameter may have by its schema and those of its `anyOf` and `oneOf`; empty for any."""
    schema = resolve_ref(schema, root)
    choices = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    types = [get_schema_types(each, root) for each in (schema, *choices) if isinstance(each, Mapping)]
    return set[str]().union(*types)


def _is_string(schema: JSONObject, root: JSONObject) -> bool:
    """Return whether a parameter is plain text instead of JSON: a string, or one without a schema."""
    return get_schema_types(schema, root) == {"string"} or not schema
