"""Parsers for tool calls that are not JSON: XML (Qwen3-Coder), Python syntax (LFM2) and Gemma's. Knows no requests."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specdec.server.tool_parsers.json_calls import (
    SPECIAL_TOKEN_MARK,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
    ArgumentsDelta,
    DelimitedToolParser,
    Delta,
    JsonScanner,
    ToolCall,
    parse_json,
)

ToolSchemas = Mapping[str, Mapping[str, Any]]  # schemas of the arguments, by tool name
FUNCTION_OPEN = "<function="
PARAMETER_CLOSE, FUNCTION_CLOSE = "</parameter>", "</function>"
FUNCTION_PATTERN, PARAMETER_PATTERN = re.compile(r"\s*<function=([^>]*)>"), re.compile(r"\s*<parameter=([^>]*)>")
MAX_TAG_CHARS = 200
PYTHON_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
GEMMA_MARKS = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
GEMMA_QUOTES = ('<|"|>', "<escape>")  # of Gemma; opening and closing quotes are the same
CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
MAX_VALUE_DEPTH = 64  # levels of nesting
# of Python's and Gemma's values: 1 quoted string, 2 Gemma string, 3 number, 4 name, 5 any other character
LEXEME_PATTERN = re.compile(
    r"""\s*(?:("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(<\|"\|>.*?<\|"\|>|<escape>.*?<escape>)"""
    r"""|(-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.-]))|([A-Za-z_][\w.-]*)|(.))\s*""",
    re.DOTALL | re.ASCII,
)


class XmlToolParser(DelimitedToolParser):
    """A parser of tool calls in XML, which emits each parameter once it is complete. A close tag in a JSON string is not one.

    Format: `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.
    """

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__((TOOL_CALL_OPEN, TOOL_CALL_CLOSE), lambda _: [])
        self._tools = tools
        self._name = self._key = ""
        self._n_parameters = 0  # of the current call
        self._schema: Mapping[str, Any] = {}  # of the current parameter
        self._scanner: JsonScanner | None = None  # of its value, as long as that is JSON

    def _read_call(self, char: str) -> list[Delta]:
        self._pending += char
        match = FUNCTION_PATTERN.fullmatch(self._pending)
        if match and match[1] in self._tools:
            self._name, self._n_parameters, self._pending, self._handler = match[1], 0, "", self._read_parameter_tag
            return self._emit_calls(ToolCall(self._name, "{"))
        return [] if not match and _can_start_with(self._pending, FUNCTION_OPEN) else self._abandon_call(TOOL_CALL_OPEN)

    def _read_parameter_tag(self, char: str) -> list[Delta]:
        """Handle a character between the parameters of a tool call; return the end of the arguments when it ends."""
        self._pending += char
        if match := PARAMETER_PATTERN.fullmatch(self._pending):
            self._key, self._pending, self._handler = match[1], "", self._read_value
            properties = self._tools[self._name].get("properties")
            schema = properties.get(self._key) if isinstance(properties, Mapping) else None
            self._schema = schema if isinstance(schema, Mapping) else {}
            self._scanner = None if is_string_parameter(self._schema, self._tools[self._name]) else JsonScanner()
            return []
        if self._pending.lstrip() == FUNCTION_CLOSE:
            self._pending, self._handler = "", self._read_closing_tag
            return [ArgumentsDelta("}")]
        return (
            []
            if _can_start_with(self._pending, "<parameter=", FUNCTION_CLOSE)
            else [ArgumentsDelta("}"), *self._abandon_call("")]
        )

    def _read_value(self, char: str) -> list[Delta]:
        if self._scanner and not self._scanner.accept(char):
            self._scanner = None
        if self._scanner and self._scanner.is_in_string:
            self._buffer.append(char)
            self._tail = ""
            return []
        if (text := self._read_until(PARAMETER_CLOSE, char)) is None:
            return []
        value = parse_xml_value(text.removeprefix("\n").removesuffix("\n"), self._schema, self._tools[self._name])
        self._n_parameters, self._handler = self._n_parameters + 1, self._read_parameter_tag
        return [self._format_argument(json.dumps(value, ensure_ascii=False))]

    def _format_argument(self, value: str) -> ArgumentsDelta:
        return ArgumentsDelta(f"{', ' * (self._n_parameters > 1)}{json.dumps(self._key, ensure_ascii=False)}: {value}")

    def _read_closing_tag(self, char: str) -> list[Delta]:
        """Handle a character after the end of the function; drop the close tag, and return anything else as text."""
        self._pending += char
        if self._pending.lstrip() == TOOL_CALL_CLOSE:
            self._pending, self._handler = "", self._read_text
            return []
        return [] if _can_start_with(self._pending, TOOL_CALL_CLOSE) else self._abandon_call("")

    def _abandon_call(self, prefix: str) -> list[Delta]:
        """Return `prefix` and the pending text as text; the pending text is parsed again, since a call may start in it."""
        deltas, pending = self._emit_text(prefix), self._pending
        self._pending, self._handler = "", self._read_text
        return deltas + self.push(pending)

    def end(self) -> list[Delta]:
        """Return the deltas that are pending when the output ends.

        The value of an unfinished parameter is emitted as an unterminated string.
        """
        if self._handler == self._read_value:
            self._n_parameters += 1
            text = "".join(self._buffer).removeprefix("\n")
            return [self._format_argument(json.dumps(text, ensure_ascii=False)[:-1])]
        if self._handler in (self._read_parameter_tag, self._read_closing_tag):
            return []
        return super().end()


def _can_start_with(text: str, *marks: str) -> bool:
    """Return whether a text can be the beginning of a mark, or starts with one, after white space.

    False for a text of more than `MAX_TAG_CHARS` characters.
    """
    text = text.lstrip()
    return len(text) <= MAX_TAG_CHARS and any(text.startswith(mark) or mark.startswith(text) for mark in marks)


def get_schema_types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a value may have by a schema; empty if the schema does not list them.

    Without a type, a list of allowed values decides: {"string"} if all of them are strings, otherwise {"any"}.
    """
    schema = resolve_ref(schema, root)
    types = schema.get("type")
    if types is None and (values := get_enum_values(schema)):
        return {"string"} if all(isinstance(value, str) for value in values) else {"any"}
    return {types} if isinstance(types, str) else {str(name) for name in types} if isinstance(types, list) else set()


def get_enum_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a JSON schema allows by `enum` or `const`; empty if it has neither."""
    values = schema.get("enum")
    return values if isinstance(values, list) else [schema["const"]] if "const" in schema else []


def resolve_ref(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that `$ref` of a schema refers to within the root schema; without a reference, the schema itself."""
    for _ in range(MAX_VALUE_DEPTH):
        if not isinstance(name := schema.get("$ref"), str) or not name.startswith("#/"):
            return schema
        target: Any = root
        for key in name[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return schema
        schema = target
    return schema


def is_string_parameter(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return whether a tool's parameter in XML is plain text instead of JSON: a string, or one without a schema."""
    return get_schema_types(schema, root) == {"string"} or not schema


def parse_xml_value(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return the value of a tool's parameter in XML: the text of a string, otherwise parsed JSON, or text if it is invalid."""
    if is_string_parameter(schema, root):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return CONSTANTS.get(text.strip(), text)


class LiteralParser:
    """A parser of values in Python's or Gemma's syntax. Its methods raise ValueError for invalid input.

    Args:
        text: The text to parse.

    Attributes:
        lexeme: The next lexeme; None at the end.
    """

    def __init__(self, text: str) -> None:
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

    def read_items(self, close_char: str, separator: str, depth: int = 0) -> dict[str, Any]:
        """Read names with values up to the closing character, and return them as a dict. Names may be quoted.

        Args:
            close_char: The character after the last item.
            separator: The character between a name and its value.
            depth: Levels of nesting so far.
        """
        items = dict[str, Any]()
        for _ in self.iter_until(close_char):
            key = self.read_value() if self.lexeme and (self.lexeme[1] or self.lexeme[2]) else self.read_name()
            self.expect(separator)
            items[str(key)] = self.read_value(depth)
        return items

    def read_value(self, depth: int = 0) -> Any:
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


def make_python_parser(tools: ToolSchemas) -> DelimitedToolParser:
    """Return a parser of tool calls such as `<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>`."""

    def iter_calls(parser: LiteralParser) -> Iterator[tuple[str, dict[str, Any]]]:
        parser.expect("[")
        for _ in parser.iter_until("]"):
            name = parser.read_name()
            parser.expect("(")
            yield name, parser.read_items(")", "=")

    return DelimitedToolParser(PYTHON_MARKS, lambda text: _parse_calls(text, iter_calls, tools))


def make_gemma_parser(marks: tuple[str, str], tools: ToolSchemas) -> DelimitedToolParser:
    """Return a parser of tool calls such as `<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>`, between the given marks."""

    def iter_calls(parser: LiteralParser) -> Iterator[tuple[str, dict[str, Any]]]:
        name = parser.read_name()
        parser.expect("{")
        yield name, parser.read_items("}", ":")

    return DelimitedToolParser(marks, lambda text: _parse_calls(text.removeprefix("call:"), iter_calls, tools))


def _parse_calls(
    text: str, iter_calls: Callable[[LiteralParser], Iterator[tuple[str, dict[str, Any]]]], tools: ToolSchemas
) -> list[ToolCall]:
    """Return the tool calls that a text consists of; empty if it is something else or a tool is unknown.

    Args:
        text: The text between the marks.
        iter_calls: Yields the name and arguments of each call from a parser of the text.
        tools: The known tools.
    """
    parser = LiteralParser(text)
    try:
        calls = [*iter_calls(parser)]
    except (ValueError, RecursionError):
        return []
    is_valid = parser.lexeme is None and all(name in tools for name, _ in calls)
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls] if is_valid else []
