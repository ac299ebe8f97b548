"""Tool calls of models whose chat template takes no tools or has an unknown format: `{"tool_calls": [{"name": ..., ...}, ...]}`.

The tools, earlier calls and their results are described in ordinary messages, as llama.cpp does it.
"""

import json
from collections.abc import Generator, Sequence

from specdec.argument_checks import JSONDict, JSONObject
from specdec.server.json_values import WHITESPACE
from specdec.server.tool_parsers.base import Reader, ToolParser
from specdec.server.tool_parsers.grammar import GrammarBuilder, quote_json
from specdec.server.tool_parsers.json_calls import JsonCallParser

INSTRUCTIONS = """You can call the following functions, each described by a JSON object:

{}

To call functions, answer with JSON of this form and nothing else: {{"tool_calls": [{{"name": NAME, "arguments": {{...}}}}]}}
If no function is needed, answer with plain text."""


class GenericParser(ToolParser):
    """A parser of tool calls in JSON objects `{"tool_calls": [call, ...]}`, which may have text before and after them."""

    open_mark = '{"tool_calls"'

    def read_call(self) -> Reader:
        """Read the list up to its end, or up to where it is not a call anymore."""
        text, char = self.open_mark, ""
        for expected in ":[":
            text += (char := (yield from self._read_next()))
            if char[-1:] != expected:
                return self.emit_text(text)
        while char[-1:] in ("[", ","):
            call = JsonCallParser(self.tools)
            while not (call.is_text or call.is_complete) and (char := (yield)):
                self.emit(*call.push(char))
            if not call.is_call:
                return self.emit_unfinished(text + call.pending)
            text, char = "", (yield from self._read_next())
        if char[-1:] == "]":
            char = (yield from self._read_next()).lstrip(WHITESPACE).removeprefix("}")
        self.unread(char)

    def _read_next(self) -> Generator[None, str, str]:
        """Return the next character that is not white space, with the white space before it."""
        text = ""
        while char := (yield):
            text += char
            if char not in WHITESPACE:
                break
        return text

    @classmethod
    def write_calls(cls, grammar: GrammarBuilder, call: str, opening: str = "") -> str:
        """Return a Lark expression for the list of calls."""
        comma = '", " '
        return f'{opening or quote_json(cls.open_mark)} ": " "[" {call}{grammar.write_repeated(comma + call)} "]}}"'


def describe_tools(messages: Sequence[JSONObject], tools: Sequence[JSONObject]) -> list[JSONDict]:
    """Return chat messages with the tools described in the system message, and with calls and results as JSON in their content.

    Args:
        messages: Messages in the form that chat templates expect.
        tools: The offered tools in that form; may be empty.
    """
    described = [_describe_message(message) for message in messages]
    if tools:
        text = INSTRUCTIONS.format("\n".join(_to_json(tool["function"]) for tool in tools))
        if described[0]["role"] == "system":
            text = f"{described.pop(0)['content']}\n\n{text}"
        described.insert(0, {"role": "system", "content": text})
    return described


def _describe_message(message: JSONObject) -> JSONDict:
    if message["role"] == "tool":
        return {"role": "user", "content": _to_json({"tool_result": {"name": message["name"], "content": message["content"]}})}
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls := message.get("tool_calls"):
        text = _to_json({"tool_calls": [call["function"] for call in calls]})
        others["content"] = f"{message['content']}\n\n{text}" if message["content"] else text
    return others


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
