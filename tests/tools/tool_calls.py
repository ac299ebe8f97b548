"""Tool calls in each format, and the parts that parsers make of them."""

import json
from dataclasses import replace

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}}
CITY["properties"]["note"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TOOLS = {"weather": CITY, "get.time-1": {}}


def join_deltas(deltas):
    """Return the deltas with each that continues the one before it merged with it."""
    joined = []
    for delta in deltas:
        if joined and delta.continues(joined[-1]):
            joined[-1] = replace(joined[-1], text=joined[-1].text + delta.text)
        else:
            joined.append(delta)
    return joined


def simplify(deltas):
    """Return texts as strings, and calls as the name and the arguments, parsed if they are complete."""
    simplified = []
    for delta in join_deltas(deltas):
        if delta.name is None:
            simplified.append(delta.text if delta.kind == "text" else delta)
            continue
        try:
            simplified.append((delta.name, json.loads(delta.text)))
        except ValueError:
            simplified.append((delta.name, delta.text))
    return simplified


def parse(parser_class, text, size, tools=TOOLS):
    parser = parser_class(tools)
    return [each for at in range(0, len(text), size) for each in parser.push(text[at : at + size])] + parser.end()


TAGGED_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
