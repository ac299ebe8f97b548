"""LFM2's tool calls in Python's syntax: `<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>`."""

from typing import Any

from specdec.argument_checks import JSONObject
from specdec.server.json_values import parse_json
from specdec.server.tool_parsers.grammar import OBJECT_KEYS, GrammarBuilder, check_names, get_properties, quote
from specdec.server.tool_parsers.literals import LiteralCallParser, count_calls, translate_to_json


class LFM2Parser(LiteralCallParser):
    """A parser of a list of calls with keyword arguments."""

    template_signs = (("<|tool_call_start|>",), ("<|tool_list_start|>",))
    open_mark, close_mark = "<|tool_call_start|>", "<|tool_call_end|>"
    layout = "list"

    def parse_calls(self, text: str) -> Any:
        """Return the name and arguments of each call of a text; raises ValueError if it is something else."""
        calls: Any = parse_json(translate_to_json(text))
        if len(calls) != count_calls(text):
            raise ValueError("a call is no value")
        return calls

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool: its name, and the arguments in JSON."""
        properties = get_properties(schema)
        check_names([name, *(key for key, *_ in properties)])
        grammar.check_supported_keys("an object", schema, *OBJECT_KEYS)
        items = [
            (f"{quote(f'{key}=')} {grammar.add_json_rule(each, schema)}", is_required) for key, each, is_required in properties
        ]
        return f'{quote(f"{name}(")} {grammar.write_items(items, ", ")} ")"'
