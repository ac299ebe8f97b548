"""Calls of tools that cannot break: a grammar of the model's way to write them and of the tools' schemas. Knows no requests."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..text.shapes import Grammar, checked_schema
from ..tokenizer import AnyTokenizer
from .calls import ALONE, ARGUMENTS, CLOSE, IN_TAGS, OPEN, way_of

XML = "<function="  # of templates whose calls are no JSON
# texts that begin no call, in Lark's words: without the tag, or not with a brace
TEXT_BESIDE = {IN_TAGS: f"/(?s:.+)/ & ~/(?s:.*){OPEN}(?s:.*)/", ALONE: r"/[^{](?s:.*)/"}


def can_force(template: str) -> bool:
    """Whether the way is known in which a model of that template calls tools."""
    return way_of(template) == ALONE or (way_of(template) == IN_TAGS and XML not in template)


def grammar_of_calls(
    tokenizer: AnyTokenizer, template: str, tools: Sequence[Mapping[str, Any]], is_needed: bool, one_call: bool
) -> Grammar:
    """Texts that are calls of those tools, as the model's template has them written; not built yet.

    is_needed: whether a text has to call one; else it may be any that begins no call, which in tags may also stand before one.
    Raises ValueError and TypeError for parameters that are no schema.
    """
    way = way_of(template)
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        begin = json.dumps(f'{{"name": "{tool["name"]}", "{ARGUMENTS[way == ALONE]}": ')
        rules += [f'call_{i}: {begin} arguments_{i} "}}"', f"arguments_{i}: %json {checked_schema(_parameters(tool))}"]
    more = "" if one_call else f' ("\\n{OPEN}\\n" call "\\n{CLOSE}")*'
    if way == ALONE:
        rules.append("start: call" + " | other" * (not is_needed))
    elif is_needed:
        rules.append(f'start: "{OPEN}\\n" call "\\n{CLOSE}"{more}')
    else:
        rules += [f'start: other | opening "\\n" call "\\n{CLOSE}"{more}', f'opening[suffix="{OPEN}"]: /(?s:.*)/']
    rules += [f"other: OTHER\nOTHER: {TEXT_BESIDE[way]}"] * (not is_needed)
    return Grammar(tokenizer, "tools", json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}]}))


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of arguments: an object, of no others than are named where some are or none is, unless it says so."""
    parameters = tool.get("parameters") or {"type": "object"}
    if parameters.keys() <= {"type", "properties", "required", "description", "title", "$defs", "$schema", "definitions"}:
        return {"type": "object", "properties": {}, "additionalProperties": False, **parameters}
    return parameters
