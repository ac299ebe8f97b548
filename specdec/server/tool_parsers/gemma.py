"""Gemma's tool calls, `<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>`, and those of FunctionGemma with other marks."""

from collections.abc import Mapping
from typing import Any

from specdec.argument_checks import JSONObject
from specdec.server.json_values import parse_json
from specdec.server.tool_parsers.grammar import (
    ANY_TEXT,
    OBJECT_KEYS,
    GrammarBuilder,
    check_names,
    get_enum_values,
    get_properties,
    get_schema_types,
    quote,
    resolve_ref,
)
from specdec.server.tool_parsers.literals import GEMMA_QUOTES, LiteralCallParser, count_calls, translate_to_json
from specdec.text.structured_output import serialize_schema

UNQUOTED_TEXT = "/[^<]+/"  # if the quotes are not special tokens
MAX_SCHEMA_DEPTH = 6  # of objects and lists, which llguidance's JSON schemas do not cover


class GemmaParser(LiteralCallParser):
    """A parser of one call per pair of marks, with an object whose keys are unquoted and whose strings have special quotes."""

    template_signs = (("<|tool_call>",),)
    open_mark, close_mark = "<|tool_call>", "<tool_call|>"
    extra_marks = GEMMA_QUOTES[:1]

    def parse_calls(self, text: str) -> list[tuple[Any, Any]]:
        """Return the name and arguments of the only call of a text; raises ValueError if it is something else."""
        if count_calls(text):
            raise ValueError("a call is no value")
        name, brace, rest = text.removeprefix("call:").partition("{")
        return [(name.strip(), parse_json(translate_to_json(brace + rest)))]

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool: its name, and the arguments as an object."""
        check_names([name, *(key for key, *_ in get_properties(schema))])
        return f"{quote(f'call:{name}')} {cls._write_object(grammar, schema, schema, 0)}"

    @classmethod
    def _write_object(cls, grammar: GrammarBuilder, schema: JSONObject, root: JSONObject, depth: int) -> str:
        properties = get_properties(schema)
        grammar.check_supported_keys("an object", schema, *OBJECT_KEYS)
        check_names([key for key, *_ in properties])
        items = [
            (f"{quote(f'{key}:')} {cls._write_value(grammar, each, root, depth)}", is_required)
            for key, each, is_required in properties
        ]
        return f'"{{" {grammar.write_items(items, ",")} "}}"'

    @classmethod
    def _write_value(cls, grammar: GrammarBuilder, schema: JSONObject, root: JSONObject, depth: int) -> str:
        """Return a Lark expression for a value of a schema. Beyond `MAX_SCHEMA_DEPTH` levels any value is allowed."""
        schema = resolve_ref(schema, root)
        choices = schema.get("anyOf")
        if values := get_enum_values(schema):
            alternatives = [cls._write_constant(grammar, value) for value in values]
        elif isinstance(choices, list) and "type" not in schema and depth < MAX_SCHEMA_DEPTH:
            grammar.check_supported_keys("a value", schema, "anyOf")
            alternatives = [cls._write_value(grammar, each, root, depth + 1) for each in choices if isinstance(each, Mapping)]
        else:
            types = sorted(get_schema_types(schema, root))
            alternatives = [cls._write_type(grammar, type_name, schema, root, depth) for type_name in types or ["any"]]
        return f"({' | '.join(alternatives) or cls._write_any(grammar, 'any')})"

    @classmethod
    def _write_constant(cls, grammar: GrammarBuilder, value: object) -> str:
        (mark,) = grammar.write_marks(*cls.extra_marks)
        constant = grammar.write_constant(value, *cls.extra_marks, cls.close_mark)
        return f"{mark} {constant} {mark}" if isinstance(value, str) else constant

    @classmethod
    def _write_type(cls, grammar: GrammarBuilder, type_name: str, schema: JSONObject, root: JSONObject, depth: int) -> str:
        """Return a Lark expression for a value of the given JSON type by a schema."""
        match type_name:
            case "integer" | "number" | "boolean" | "null":
                return grammar.add_json_rule({**schema, "type": type_name}, root)
            case "array":
                grammar.check_supported_keys("a list", schema, "items")
                if not isinstance(items := schema.get("items"), Mapping) or depth == MAX_SCHEMA_DEPTH:
                    return cls._write_any(grammar, "any_list")
                item = grammar.add_rule(cls._write_value(grammar, items, root, depth + 1))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object" if get_properties(schema) and depth < MAX_SCHEMA_DEPTH:
                return cls._write_object(grammar, schema, root, depth + 1)
            case "object":
                grammar.check_supported_keys("an object", schema, *OBJECT_KEYS)
                return cls._write_any(grammar, "any_object")
        grammar.check_supported_keys("a string" if type_name == "string" else "a value", schema)
        return cls._write_any(grammar, "any_string" if type_name == "string" else "any")

    @classmethod
    def _write_any(cls, grammar: GrammarBuilder, rule: str) -> str:
        """Return the given rule name, which stands for any string, list, object or value; adds these rules if needed."""
        (mark,) = grammar.write_marks(*cls.extra_marks)
        grammar.add_lines(
            f"any_string: {mark} ({ANY_TEXT if mark[0] == '<' else UNQUOTED_TEXT})? {mark}",
            "KEY: /[A-Za-z_][A-Za-z0-9_.-]*/",
            'any_list: "[" (any ("," any)*)? "]"',
            'any_object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
            f"any_simple: %json {serialize_schema({'type': ['number', 'boolean', 'null']})}",
            "any: any_string | any_list | any_object | any_simple",
        )
        return rule


class FunctionGemmaParser(GemmaParser):
    """A parser of FunctionGemma's calls."""

    template_signs = (("<start_function_call>",),)
    open_mark, close_mark = "<start_function_call>", "<end_function_call>"
    extra_marks = GEMMA_QUOTES[1:]
