"""Grammars that make tool calls valid, from the model's tool-call format and the tools' schemas. Knows no requests."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.argument_checks import shorten
from specdec.server.tool_parsers.formats import CHANNEL, CONSTRAIN, END_MARKS, MESSAGE, MISTRAL_ARGS, START, ToolFormat
from specdec.server.tool_parsers.json_calls import ARGUMENT_KEYS
from specdec.server.tool_parsers.non_json_calls import (
    FUNCTION_CLOSE,
    PARAMETER_CLOSE,
    get_enum_values,
    get_schema_types,
    is_string_parameter,
    resolve_ref,
)
from specdec.text.structured_output import Grammar, serialize_schema
from specdec.tokenizer import AnyTokenizer

PLAIN_SCHEMA_KEYS = {"type", "properties", "required", "description", "title", "$defs", "$schema", "definitions"}
NAME_PATTERN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)  # names that Python's and Gemma's formats can express
ANY_TEXT = "/(?s:.+)/"
UNQUOTED_TEXT = "/[^<]+/"  # if the quotes are not special tokens
# schema keys that only set a type, or nothing
SUPPORTED_KEYS = PLAIN_SCHEMA_KEYS - {"properties", "required"} | {"default", "examples"}
OBJECT_KEYS = ("properties", "required", "additionalProperties")  # additional properties are never generated
MAX_SCHEMA_DEPTH = 6  # of objects and lists in Gemma's format, which llguidance's JSON schemas do not cover


def make_tool_grammar(
    tokenizer: AnyTokenizer,
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    is_required: bool,
    is_single_call: bool,
    response_schema: Mapping[str, Any] | None = None,
) -> Grammar:
    """Return a grammar, not built yet, of outputs that call the tools in the tool-call format of the model.

    For schemas that are not `strict`, keywords that llguidance does not know are ignored.

    Args:
        tokenizer: The target's tokenizer.
        tool_format: The format of calls.
        tools: The functions, with name, parameters and strict.
        is_required: Whether an output must call a tool. Otherwise it may be any text, also before a call.
        is_single_call: Whether at most one call is allowed.
        response_schema: Schema of an output without calls; None for any text.

    Raises:
        ValueError: The parameters of a tool are not a valid schema; TypeError likewise.
    """
    return _GrammarBuilder(tokenizer, tool_format, is_single_call).build(tools, is_required, response_schema)


class _GrammarBuilder:
    """A builder of a Lark grammar for tool calls, which collects its rules.

    There is one rule per line, with a prefix for the errors of each line. Methods named `_format_*` return Lark expressions; they
    add the rules that the expressions refer to.
    """

    def __init__(self, tokenizer: AnyTokenizer, tool_format: ToolFormat, is_single_call: bool) -> None:
        self._tokenizer, self._tool_format, self._is_single_call = tokenizer, tool_format, is_single_call
        self._specials: Mapping[str, int] = getattr(tokenizer, "specials", {})
        self._lines = list[tuple[str, str]]()
        self._error_prefix, self._is_strict, self._has_any_rules = "", False, False

    def build(self, tools: Sequence[Mapping[str, Any]], is_required: bool, response_schema: Mapping[str, Any] | None) -> Grammar:
        """Return the grammar of outputs that call the tools, as in `make_tool_grammar`.

        Raises:
            ValueError: The parameters of a tool cannot be expressed; the message names the tool.
        """
        rules = []
        for tool in tools:
            self._error_prefix, self._is_strict = f"the tool {tool['name']}: ", bool(tool.get("strict"))
            try:
                rules.append(self._add_rule(self._format_call(tool)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self._error_prefix}{error}") from None
        self._error_prefix, self._is_strict = "", True
        call = self._add_rule(" | ".join(rules))
        if response_schema is not None:
            start = f"{self._add_json_rule(response_schema)} | {self._format_calls(call)}"
        else:
            start = self._format_calls(call) if is_required else self._format_optional_calls(call)
        lines = [*(line for line, _ in self._lines), f"start: {start}"]
        grammar = json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]}, ensure_ascii=False)
        return Grammar(self._tokenizer, "tools", grammar, tuple(prefix for _, prefix in self._lines))

    def _add_rule(self, body: str, attributes: str = "") -> str:
        """Add a rule with the given body to the grammar, and return the new name of the rule."""
        name = f"r{len(self._lines)}"
        self._lines.append((f"{name}{attributes}: {body}", self._error_prefix))
        return name

    def _format_mark(self, name: str) -> str:
        """Return a Lark expression for a mark: a special token, or the mark's text if the tokenizer has no such token."""
        return f"<[{self._specials[name]}]>" if name in self._specials else _quote(name)

    def _format_calls(self, call: str, opening: str = "") -> str:
        """Return a Lark expression for one tool call, or for several if they are allowed.

        Args:
            call: Rule of a call without the marks around it.
            opening: Rule that ends with the first call's mark; if empty, only the mark precedes the call.
        """
        tool_format = self._tool_format
        mark, close = (self._format_mark(each) if each else "" for each in (tool_format.open_mark, tool_format.close_mark))
        first = opening or mark
        match tool_format.name:
            case "tags" | "xml":
                repeated = f' ("\\n" {mark} "\\n" {call} "\\n" {close})*'
                return f'{first} "\\n" {call} "\\n" {close}{self._repeat_if_parallel(repeated)}'
            case "listed" | "python":
                repeated = self._repeat_if_parallel(f' (", " {call})*')
                return f'{first} "[" {call}{repeated} "]" {close}'
            case "named" | "gemma":
                repeated = self._repeat_if_parallel(f" ({mark} {call} {close})*")
                return f"{first} {call} {close}{repeated}"
            case "harmony":
                return f"{self._format_reasoning()}? {call}"
        return call

    def _repeat_if_parallel(self, repeated: str) -> str:
        return "" if self._is_single_call else repeated

    def _format_optional_calls(self, call: str) -> str:
        """Return a Lark expression for tool calls, possibly after text, and for text without any call."""
        tool_format = self._tool_format
        if tool_format.name == "harmony":
            text, has_mark = self._add_rule(ANY_TEXT), CHANNEL in self._specials  # otherwise the mark could be any text
            message = f'{self._format_mark(CHANNEL)} ("final" | "commentary") {self._format_mark(MESSAGE)} {text}?'
            return f"{self._format_reasoning()}? ({call} | {message})" + f" | {text}" * has_mark
        if not tool_format.open_mark:
            return f"{call} | {self._add_rule('/[^{](?s:.*)/')}"
        if tool_format.open_mark in self._specials:
            text = self._add_rule(ANY_TEXT)
            return f"{text} | {text}? {self._format_calls(call)}"
        self._lines.append((f"OTHER: {ANY_TEXT} & ~/(?s:.*){re.escape(tool_format.open_mark)}(?s:.*)/", ""))
        opening = self._add_rule("/(?s:.*)/", f"[suffix={_quote(tool_format.open_mark)}]")
        return f"OTHER | {self._format_calls(call, opening)}"

    def _format_reasoning(self) -> str:
        text, end = self._add_rule(ANY_TEXT), self._format_mark(END_MARKS[0])
        start = f'{self._format_mark(START)} "assistant"'
        return f'({self._format_mark(CHANNEL)} "analysis" {self._format_mark(MESSAGE)} {text} {end} {start})'

    def _format_call(self, tool: Mapping[str, Any]) -> str:
        """Return a Lark expression for a call of the given tool, without the marks around it.

        Raises:
            ValueError: The format cannot express the tool's name or parameters.
        """
        tool_format, name, schema = self._tool_format, tool["name"], get_parameters_schema(tool)
        serialize_schema(schema, not self._is_strict)
        if schema.get("type") != "object":
            raise ValueError(f"its parameters have the type {shorten(schema.get('type'), repr)}; expected object")
        if tool_format.name in ("python", "gemma"):
            self._check_names([name, *(key for key, *_ in _get_properties(schema))])
        if tool_format.name in ("python", "gemma", "xml"):
            self._check_supported_keys("an object", schema, *OBJECT_KEYS)
        match tool_format.name:
            case "tags" | "alone" | "listed":
                prefix = f'{{"name": "{name}", "{ARGUMENT_KEYS[tool_format.name == "alone"]}": '
                return f'{_quote(prefix)} {self._add_json_rule(schema)} "}}"'
            case "named":
                return f"{_quote(name)} {self._format_mark(MISTRAL_ARGS)} {self._add_json_rule(schema)}"
            case "harmony":
                header = _quote(f"commentary to=functions.{name} ")
                return (
                    f'{self._format_mark(CHANNEL)} {header} {self._format_mark(CONSTRAIN)} "json" '
                    f"{self._format_mark(MESSAGE)} {self._add_json_rule(schema)}"
                )
            case "xml":
                parameters = [
                    (self._format_parameter(key, each, schema), is_required) for key, each, is_required in _get_properties(schema)
                ]
                body = " ".join(parameter if is_required else f"({parameter})?" for parameter, is_required in parameters)
                return f"{_quote(f'<function={name}>')} {body} {_quote(chr(10) + FUNCTION_CLOSE)}"
            case "python":
                items = [(f"{_quote(f'{key}=')} {self._add_json_rule(_add_definitions(each, schema))}", is_required)
                         for key, each, is_required in _get_properties(schema)]  # fmt: skip
                return f'{_quote(f"{name}(")} {self._format_list(items, ", ")} ")"'
        return f'{_quote(f"call:{name}{{")} {self._format_fields(schema, schema, 0)} "}}"'

    def _add_json_rule(self, schema: Mapping[str, Any]) -> str:
        return self._add_rule("%json " + serialize_schema(schema, not self._is_strict).replace("\x7f", "\\u007f"))

    def _check_supported_keys(self, value_name: str, schema: Mapping[str, Any], *supported: str) -> None:
        """Raise ValueError for unsupported keys of a strict schema; only the tool formats with JSON support all keys."""
        if self._is_strict and (unsupported := [key for key in schema if key not in SUPPORTED_KEYS and key not in supported]):
            raise ValueError(
                f"it uses {', '.join(map(shorten, unsupported))} of {value_name}, which this model's calls do not support"
            )

    def _format_constant(self, value: Any, *marks: str) -> str:
        """Return a Lark string for a constant: a string as it is, anything else as JSON.

        Raises:
            ValueError: The constant is a string that contains one of the marks.
        """
        if isinstance(value, str) and any(mark in value for mark in marks):
            raise ValueError(f"{shorten(value, repr)} cannot be written in this model's calls")
        return _quote(value if isinstance(value, str) else json.dumps(value))

    def _format_parameter(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Return a Lark expression for a tool's parameter in XML: a string as it is, anything else as JSON."""
        if ">" in key or "\n" in key:
            raise ValueError(f"{shorten(key, repr)} is not a valid name in this model's calls")
        prefix, suffix = _quote(f"\n<parameter={key}>\n"), _quote(f"\n{PARAMETER_CLOSE}")
        if not is_string_parameter(schema, root):
            return f"{prefix} {self._add_json_rule(_add_definitions(schema, root))} {suffix}"
        if values := _get_enum_strings(resolve_ref(schema, root)):
            return f"{prefix} ({' | '.join(self._format_constant(value, PARAMETER_CLOSE) for value in values)}) {suffix}"
        self._check_supported_keys("a string", resolve_ref(schema, root))
        # parsers end the value at the first close tag, even within a line
        return f"{prefix} {self._add_rule('/(?s:.*)/', f'[suffix={_quote(PARAMETER_CLOSE)}]')}"

    def _format_list(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Add rules for items in their order with separators between them, and return the name of the first rule.

        Args:
            items: Lark expression of each item, and whether the item is required.
            separator: Text between items.
        """
        tail, head = self._add_rule('""'), self._add_rule('""')
        for item, is_required in reversed(items):
            rule = self._add_rule(item)
            rest = f"{_quote(separator)} {rule} {tail}"
            head = self._add_rule(f"{rule} {tail}" + ("" if is_required else f" | {head}"))
            tail = self._add_rule(rest if is_required else f"{rest} | {tail}")
        return head

    def _format_fields(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """Return a Lark expression for the keys and values of an object in Gemma's format, without the braces."""
        properties = _get_properties(schema)
        self._check_names([key for key, *_ in properties])
        items = [
            (f"{_quote(f'{key}:')} {self._format_value(each, root, depth)}", is_required) for key, each, is_required in properties
        ]
        return self._format_list(items, ",")

    def _format_value(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """Return a Lark expression for a value of a schema in Gemma's format: strings in its own quotes, keys without.

        Beyond `MAX_SCHEMA_DEPTH` levels any value is allowed.
        """
        schema = resolve_ref(schema, root)
        choices = schema.get("anyOf")
        if values := get_enum_values(schema):
            alternatives = [
                self._format_string(value) if isinstance(value, str) else self._format_constant(value) for value in values
            ]
        elif isinstance(choices, list) and "type" not in schema and depth < MAX_SCHEMA_DEPTH:
            self._check_supported_keys("a value", schema, "anyOf")
            alternatives = [self._format_value(each, root, depth + 1) for each in choices if isinstance(each, Mapping)] or [
                self._get_any_rule("any")
            ]
        else:
            alternatives = [
                self._format_type(type_name, schema, root, depth)
                for type_name in sorted(get_schema_types(schema, root)) or ["any"]
            ]
        return f"({' | '.join(alternatives)})"

    def _format_string(self, value: str) -> str:
        quote = self._tool_format.extra_marks[0]
        constant = self._format_constant(value, quote, self._tool_format.close_mark)
        return f"{self._format_mark(quote)} {constant} {self._format_mark(quote)}"

    def _format_type(self, type_name: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """Return a Lark expression for a value of the given JSON type by a schema, in Gemma's format."""
        match type_name:
            case "integer" | "number" | "boolean" | "null":
                return self._add_json_rule(_add_definitions({**schema, "type": type_name}, root))
            case "array":
                self._check_supported_keys("a list", schema, "items")
                if not isinstance(items := schema.get("items"), Mapping) or depth == MAX_SCHEMA_DEPTH:
                    return self._get_any_rule("any_list")
                item = self._add_rule(self._format_value(items, root, depth + 1))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                self._check_supported_keys("an object", schema, *OBJECT_KEYS)
                is_open = not _get_properties(schema) or depth == MAX_SCHEMA_DEPTH
                return (
                    self._get_any_rule("any_object") if is_open else f'"{{" {self._format_fields(schema, root, depth + 1)} "}}"'
                )
        self._check_supported_keys("a string" if type_name == "string" else "a value", schema)
        return self._get_any_rule("any_string" if type_name == "string" else "any")

    def _get_any_rule(self, rule: str) -> str:
        """Return the given rule name, which stands for any string, list, object or value in Gemma's format.

        The first call adds all of these rules.
        """
        if not self._has_any_rules:
            quote = self._format_mark(self._tool_format.extra_marks[0])
            self._has_any_rules = True
            simple = self._add_json_rule({"type": ["number", "boolean", "null"]})
            rules = (
                f"any_string: {quote} {self._add_rule(ANY_TEXT if quote[0] == '<' else UNQUOTED_TEXT)}? {quote}",
                "KEY: /[A-Za-z_][A-Za-z0-9_.-]*/",
                'any_list: "[" (any ("," any)*)? "]"',
                'any_object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
                f"any: any_string | any_list | any_object | {simple}",
            )
            self._lines += [(line, "") for line in rules]
        return rule

    def _check_names(self, names: Sequence[str]) -> None:
        for name in names:
            if not NAME_PATTERN.fullmatch(name):
                raise ValueError(f"{shorten(name, repr)} is not an identifier, which names in this model's calls must be")


def get_parameters_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments, an object.

    A schema with plain keys only forbids additional properties unless it allows them.
    """
    parameters = tool.get("parameters") or {"type": "object"}
    if parameters.keys() <= PLAIN_SCHEMA_KEYS:
        return {"type": "object", "properties": {}, "additionalProperties": False, **parameters}
    return parameters


def _quote(text: str) -> str:
    """Return a text as a quoted string of Lark's syntax."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _get_properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return the name and schema of each property of an object's schema, and whether the property is required."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    required = required if isinstance(required, list) else []
    return [(key, each if isinstance(each, Mapping) else {}, key in required) for key, each in properties.items()]


def _add_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of the root schema together with the definitions of the root that the part may refer to."""
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def _get_enum_strings(schema: Mapping[str, Any]) -> list[str]:
    """Return the strings that a JSON schema allows by `enum` or `const`; empty if it lists none."""
    return [value for value in get_enum_values(schema) if isinstance(value, str)]
