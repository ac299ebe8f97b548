"""A builder of Lark grammars for tool calls, and what the grammars and parsers need to know of JSON schemas. Knows no formats."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specdec.argument_checks import JSONObject, shorten
from specdec.text.structured_output import Grammar, serialize_schema
from specdec.tokenizer import AnyTokenizer

PLAIN_SCHEMA_KEYS = {"type", "properties", "required", "description", "title", "$defs", "$schema", "definitions"}
NAME_PATTERN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)  # names that Python's and Gemma's formats can express
ANY_TEXT = "/(?s:.+)/"
# schema keys that only set a type, or nothing
SUPPORTED_KEYS = PLAIN_SCHEMA_KEYS - {"properties", "required"} | {"default", "examples"}
OBJECT_KEYS = ("properties", "required", "additionalProperties")  # additional properties are never generated
VALUE_KEYS = ("const", "enum", "default", "examples")  # of schemas, with values that are no schemas
JSON_LEXEME_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"|[:,] |[^":, ]')
LOOKAROUND_PATTERN = re.compile(r"\\[bB]|\(\?<?[=!]")
MAX_REFERENCES = 64  # of a schema to another one, in a row


class GrammarBuilder:
    """A builder of a Lark grammar for tool calls, which collects its rules, one per line.

    Methods named `write_*` return Lark expressions; they add the rules that the expressions refer to.

    Args:
        specials: Ids of the tokenizer's special tokens by name.
        is_single_call: Whether at most one call is allowed.
    """

    def __init__(self, specials: Mapping[str, int], is_single_call: bool) -> None:
        """Create a grammar without rules."""
        self.specials, self._is_single_call = specials, is_single_call
        self._lines = list[tuple[str, str]]()  # each with a prefix for its errors
        self._error_prefix, self._is_strict = "", True

    @contextmanager
    def begin_tool(self, tool: JSONObject) -> Iterator[JSONObject]:
        """Yield the JSON schema of a tool's arguments; errors in the context, and in rules that it adds, name the tool.

        A schema whose keys are all in `PLAIN_SCHEMA_KEYS` gets `additionalProperties: false`. If the tool is not `strict`,
        patterns that llguidance does not support are removed.

        Raises:
            ValueError: The schema is invalid or not one of an object, or the context raises ValueError or TypeError.
        """
        self._error_prefix, self._is_strict = f"the tool {tool['name']}: ", bool(tool.get("strict"))
        try:
            schema = tool.get("parameters") or {"type": "object"}
            schema = schema if self._is_strict else _drop_lookarounds(schema)
            if schema.keys() <= PLAIN_SCHEMA_KEYS:
                schema = {"type": "object", "properties": {}, "additionalProperties": False, **schema}
            serialize_schema(schema, not self._is_strict)
            if schema.get("type") != "object":
                raise ValueError(f"its parameters have the type {shorten(schema.get('type'), repr)}; expected object")
            yield schema
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self._error_prefix}{error}") from None
        self._error_prefix, self._is_strict = "", True

    def build(self, tokenizer: AnyTokenizer, start: str) -> Grammar:
        """Return the grammar of outputs that match the Lark expression `start`, not built yet."""
        lines = [*(line for line, _ in self._lines), f"start: {start}"]
        grammar = json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]}, ensure_ascii=False)
        return Grammar(tokenizer, "tools", grammar, tuple(prefix for _, prefix in self._lines))

    def add_lines(self, *lines: str) -> None:
        """Add lines of the form `name: body` to the grammar, except those that it has already."""
        self._lines += [(line, "") for line in lines if (line, "") not in self._lines]

    def add_rule(self, body: str, attributes: str = "") -> str:
        """Add a rule with the given body to the grammar, and return the new name of the rule."""
        name = f"r{len(self._lines)}"
        self._lines.append((f"{name}{attributes}: {body}", self._error_prefix))
        return name

    def add_json_rule(self, schema: JSONObject, root: JSONObject | None = None) -> str:
        """Add a rule for JSON with a schema, which may refer to the definitions of a root schema, and return its name."""
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root} if root else {}
        text = serialize_schema({**definitions, **schema}, not self._is_strict)
        return self.add_rule("%json " + text.replace("\x7f", "\\u007f"))

    def write_marks(self, *marks: str) -> list[str]:
        """Return a Lark expression for each mark: a special token, or the mark's text if the tokenizer has no such token."""
        return [f"<[{self.specials[mark]}]>" if mark in self.specials else quote(mark) if mark else "" for mark in marks]

    def write_repeated(self, calls: str) -> str:
        """Return a Lark expression for any number of further calls; "" if at most one call is allowed."""
        return "" if self._is_single_call else f" ({calls})*"

    def write_constant(self, value: Any, *marks: str) -> str:
        """Return a Lark string for a constant: a string as it is, anything else as JSON.

        Raises:
            ValueError: The constant is a string that contains one of the marks.
        """
        if isinstance(value, str) and any(mark in value for mark in marks):
            raise ValueError(f"{shorten(value, repr)} cannot be written in this model's calls")
        return quote(value if isinstance(value, str) else json.dumps(value))

    def write_items(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Add rules for items in their order with separators between them, and return the name of the first rule.

        Args:
            items: Lark expression of each item, and whether the item is required.
            separator: Text between items.
        """
        tail, head = self.add_rule('""'), self.add_rule('""')
        for item, is_required in reversed(items):
            rule = self.add_rule(item)
            rest = f"{quote(separator)} {rule} {tail}"
            head = self.add_rule(f"{rule} {tail}" + ("" if is_required else f" | {head}"))
            tail = self.add_rule(rest if is_required else f"{rest} | {tail}")
        return head

    def check_supported_keys(self, value_name: str, schema: JSONObject, *supported: str) -> None:
        """Raise ValueError if a strict schema has unsupported keys, for tool formats that cannot use a `%json` rule.

        Args:
            value_name: Kind of the value, such as "an object", for the error.
            schema: The schema of the value.
            supported: Supported keys in addition to `SUPPORTED_KEYS`.
        """
        if self._is_strict and (unsupported := [key for key in schema if key not in SUPPORTED_KEYS and key not in supported]):
            raise ValueError(
                f"it uses {', '.join(map(shorten, unsupported))} of {value_name}, which this model's calls do not support"
            )


def _drop_lookarounds(schema: Any) -> Any:
    """Return a schema without the patterns that llguidance cannot compile: those with lookarounds or word boundaries."""
    if isinstance(schema, list):
        return [_drop_lookarounds(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    pattern = schema.get("pattern")
    is_dropped = isinstance(pattern, str) and LOOKAROUND_PATTERN.search(pattern)
    kept = {key: each for key, each in schema.items() if key != "pattern" or not is_dropped}
    return {key: each if key in VALUE_KEYS else _drop_lookarounds(each) for key, each in kept.items()}


def quote(text: str) -> str:
    """Return a text as a quoted string of Lark's syntax."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def quote_json(text: str) -> str:
    """Return a Lark expression for the beginning of a JSON text, split like `%json` splits it.

    The lexer of llguidance reads the longest possible lexeme and never goes back. A single lexeme would rule out every other JSON
    that begins with the same characters.
    """
    return " ".join(map(quote, JSON_LEXEME_PATTERN.findall(text)))


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError if one of the names of a tool and its arguments is not an identifier."""
    for name in names:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"{shorten(name, repr)} is not an identifier, which names in this model's calls must be")


def get_properties(schema: JSONObject) -> list[tuple[str, JSONObject, bool]]:
    """Return the name and schema of each property of an object's schema, and whether the property is required."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    required = required if isinstance(required, list) else []
    return [(key, each if isinstance(each, Mapping) else {}, key in required) for key, each in properties.items()]


def get_schema_types(schema: JSONObject, root: JSONObject) -> set[str]:
    """Return the JSON types that a value may have by a schema; empty if the schema does not list them.

    Without a type, a list of allowed values decides: {"string"} if all of them are strings, otherwise {"any"}.
    """
    schema = resolve_ref(schema, root)
    types = schema.get("type")
    if types is None and (values := get_enum_values(schema)):
        return {"string"} if all(isinstance(value, str) for value in values) else {"any"}
    return {types} if isinstance(types, str) else {str(name) for name in types} if isinstance(types, list) else set()


def get_enum_values(schema: JSONObject) -> list[object]:
    """Return the values that a JSON schema allows by `enum` or `const`; empty if it has neither."""
    values = schema.get("enum")
    return values if isinstance(values, list) else [schema["const"]] if "const" in schema else []


def resolve_ref(schema: JSONObject, root: JSONObject) -> JSONObject:
    """Return the schema that `$ref` of a schema refers to within the root schema; without a reference, the schema itself."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(name := schema.get("$ref"), str) or not name.startswith("#/"):
            return schema
        target: object = root
        for key in name[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return schema
        schema = target
    return schema
