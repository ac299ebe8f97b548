"""Incremental parsers for JSON tool calls: in tags, as of Qwen and SmolLM, or bare, as of Llama 3. Knows no requests."""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("name", *ARGUMENT_KEYS, "id", "type")  # an object with other keys is not a call
WHITESPACE = " \t\n\r"  # of JSON
CLOSING_BRACKETS = {"{": "}", "[": "]"}
OPENING_BRACKETS = {closes: opens for opens, closes in CLOSING_BRACKETS.items()}
SCALAR_PATTERN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null", re.ASCII)
MAX_NUMBER_CHARS = 400
MAX_FLOAT = sys.float_info.max
MAX_JSON_DEPTH = 500  # levels of nesting: some Python versions can parse more than they can serialize
AFTER_BACKSLASH = 9  # the state after a backslash; states 4 to 1 count the digits left after \\u
# precedes the name of a special token where only special tokens are marks; a lone surrogate, which no text contains
SPECIAL_TOKEN_MARK = "\udc3c"


@dataclass(frozen=True)
class ToolCall:
    """The start of a tool call in an output.

    Attributes:
        name: Name of the tool.
        arguments: The JSON of the arguments as far as it has come.
    """

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class ArgumentsDelta:
    """A further piece of the JSON arguments of the last tool call."""

    arguments: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the text that a model writes while it thinks, before its answer."""

    text: str


Delta = str | Reasoning | ToolCall | ArgumentsDelta


def parse_finite_float(digits: str) -> float:
    """Parse the digits of a JSON number; clips it to the range of finite floats, since JSON has no infinity."""
    return max(-MAX_FLOAT, min(float(digits), MAX_FLOAT))


def parse_json(text: str) -> Any:
    """Parse a JSON text into a value that can be serialized again; constants such as NaN become strings.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    with suppress(RecursionError):
        value = json.loads(text, parse_float=parse_finite_float, parse_constant=str)
        level: list[Any] = [[value]]
        for _ in range(MAX_JSON_DEPTH + 1):
            level = [each for container in level for each in _get_children(container) if isinstance(each, dict | list)]
            if not level:
                return value
    raise ValueError("nested too deeply")


def _get_children(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def parse_call(text: str, tools: Collection[str]) -> ToolCall | None:
    """Return the tool call that a JSON text with a name and arguments is; None for any other text.

    The name must be one of `tools`, and the arguments an object.
    """
    try:
        value = parse_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in tools:
        return None
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def get_partial_match_length(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is also a beginning of a mark, but not the whole mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


class JsonScanner:
    """A validator of JSON (RFC 8259) that takes one character at a time.

    Attributes:
        stack: Opening brackets of the unfinished lists and objects.
        expected: What comes next, apart from white space: "value", "key", ":", "," (or the end of the list or object), or
            "first }" or "first ]" after an opening bracket.
        is_in_string: Whether a string is open.
        is_complete: Whether a value has ended.
    """

    def __init__(self) -> None:
        self.stack, self.expected, self._escape_state = list[str](), "value", 0
        self._scalar = ""  # an unfinished number or constant
        self.is_in_string = self.is_complete = False

    def accept(self, char: str) -> bool:
        """Take the next character, and return whether the text can still be JSON with it."""
        if self.is_in_string:
            return self._accept_in_string(char)
        if self._scalar and char not in WHITESPACE + ",]}":
            self._scalar += char
            return len(self._scalar) <= MAX_NUMBER_CHARS
        if self._scalar and not SCALAR_PATTERN.fullmatch(self._scalar):
            return False
        if self._scalar:
            self._scalar = ""
            self._end_value()
        if char in WHITESPACE:
            return True
        if self.is_complete:
            return False
        match char:
            case "}" | "]" if self.stack and self.stack[-1] == OPENING_BRACKETS[char] and self.expected in (",", f"first {char}"):
                self.stack.pop()
                self._end_value()
            case "," if self.expected == "," and self.stack:
                self.expected = "key" if self.stack[-1] == "{" else "value"
            case ":" if self.expected == ":":
                self.expected = "value"
            case '"' if self.expected in ("key", "value", "first }", "first ]"):
                self.is_in_string = True
            case "{" | "[" if self.expected in ("value", "first ]"):
                self.stack.append(char)
                self.expected = f"first {CLOSING_BRACKETS[char]}"
            case _ if self.expected in ("value", "first ]") and char in "-0123456789tfn":
                self._scalar = char
            case _:
                return False
        return True

    def _accept_in_string(self, char: str) -> bool:
        if self._escape_state:
            is_first = self._escape_state == AFTER_BACKSLASH
            self._escape_state = 4 if is_first and char == "u" else 0 if is_first else self._escape_state - 1
            return char in '"\\/bfnrtu' if is_first else char in "0123456789abcdefABCDEF"
        if char == "\\":
            self._escape_state = AFTER_BACKSLASH
        elif char == '"':
            self.is_in_string = False
            if self.expected in ("key", "first }"):
                self.expected = ":"
            else:
                self._end_value()
        return char >= " "

    def _end_value(self) -> None:
        """Expect a comma or a closing bracket after a value; after the outermost value, mark the JSON as complete."""
        self.expected, self.is_complete = ",", not self.stack


class IncrementalToolParser(JsonScanner):
    """A parser of a text that may be a tool call, a JSON object with a name and arguments.

    A tool call is emitted as soon as its name is known and its arguments start.

    Attributes:
        is_text: Whether the text is known not to be a call.
        is_call: Whether the text is known to be a call.
        pending: The text that was received and not emitted.
    """

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._tools = tools
        self.pending, self._name, self._key, self._string = "", "", "", ""
        self.is_text = self.is_call = self._is_in_arguments = False

    def push(self, char: str) -> list[Delta]:
        """Take a character and return the new call or the new piece of its arguments, if any.

        Text that is not a call is not returned; it is in `pending`, and `is_text` is set.
        """
        was_in_string, expected, depth = self.is_in_string, self.expected, len(self.stack)
        is_valid = self.accept(char)
        if not self.is_call:
            self.pending += char
        if not is_valid:
            self.is_text = not self.is_call
            return [ArgumentsDelta(char)] if self._is_in_arguments else []
        if self._is_in_arguments:
            self._is_in_arguments = len(self.stack) > 1
            return [ArgumentsDelta(char)]
        if depth == 0 and char not in WHITESPACE and char != "{":
            self.is_text = True
        elif depth == 1 and not self.is_call:
            return self._read_top_level(char, was_in_string, expected)
        elif self.is_complete and not self.is_call:
            return self._parse_complete()
        return []

    def _read_top_level(self, char: str, was_in_string: bool, expected: str) -> list[Delta]:
        """Handle a character of a key or value of the outermost object; return the call if its arguments start."""
        if self.is_complete:
            return self._parse_complete()
        if self.is_in_string:
            self._string = self._string + char if was_in_string else '"'
        elif was_in_string:
            string, self._string = json.loads(self._string + char), ""
            if expected in ("key", "first }"):
                self._key = string
                self.is_text = string not in CALL_KEYS
            elif self._key == "name":
                self._name = string
                self.is_text = string not in self._tools
        elif self._key in ARGUMENT_KEYS and expected == "value" and char == "{" and self._name:
            self.is_call = self._is_in_arguments = True
            self.pending = ""
            return [ToolCall(self._name, "{")]
        return []

    def _parse_complete(self) -> list[Delta]:
        """Return the call of an object that has ended, in a list, which is empty if the object is not a call.

        Needed where the name came last, or without arguments.
        """
        call = parse_call(self.pending, self._tools)
        self.is_call, self.is_text = call is not None, call is None
        return [call] if call else []


class ToolParser:
    """Base class of parsers that split streamed output into text, reasoning and tool calls.

    Each delta is emitted as soon as it cannot become anything else. `_handler` reads the next character; `_pending` is the text
    that was received and not emitted.
    """

    def __init__(self) -> None:
        self._pending, self._handler = "", self._read_text

    def push(self, text: str) -> list[Delta]:
        """Take more of the output, and return the text, reasoning and tool calls that are now certain."""
        deltas = list[Delta]()
        for char in text:
            deltas += self._handler(char)
        return deltas

    def end(self) -> list[Delta]:
        """Return the text and the pieces of tool calls that are pending when the output ends."""
        raise NotImplementedError

    def _read_text(self, char: str) -> list[Delta]:
        """Handle a character outside of tool calls, and return the new deltas."""
        raise NotImplementedError


class DelimitedToolParser(ToolParser):
    """A parser of tool calls between two marks.

    White space around calls is dropped. What is not a call is text, with its marks.

    Args:
        marks: The open and close marks.
        parse_calls: Returns the calls of the text between the marks, or none if it is something else.
    """

    def __init__(self, marks: tuple[str, str], parse_calls: Callable[[str], list[ToolCall]]) -> None:
        super().__init__()
        self._open_mark, self._close_mark, self._parse_calls = *marks, parse_calls
        self._pending_space, self._has_called = "", False
        self._buffer, self._tail = list[str](), ""  # characters before the next mark, and the last of them

    def end(self) -> list[Delta]:
        """Return the pending text when the output ends, also an unfinished call with its open mark."""
        deltas = self._emit_text(
            ("" if self._handler == self._read_text else self._open_mark) + self._pending + "".join(self._buffer)
        )
        return deltas if self._has_called or not self._pending_space else [*deltas, self._pending_space]

    def _read_text(self, char: str) -> list[Delta]:
        self._pending += char
        is_open = self._pending.endswith(self._open_mark)
        n = len(self._pending) - (len(self._open_mark) if is_open else get_partial_match_length(self._pending, self._open_mark))
        text, self._pending = self._pending[:n], self._pending[n:]
        if is_open:
            self._pending, self._handler = "", self._read_call
        return self._emit_text(text)

    def _read_call(self, char: str) -> list[Delta]:
        if (inner := self._read_until(self._close_mark, char)) is None:
            return []
        self._handler = self._read_text
        if calls := self._parse_calls(inner):
            return self._emit_calls(*calls)
        return self._emit_text(self._open_mark + inner + self._close_mark)

    def _read_until(self, mark: str, char: str) -> str | None:
        """Take a character; return the text before a mark once the mark is complete, and None until then."""
        self._buffer.append(char)
        self._tail = (self._tail + char)[-len(mark) :]
        if self._tail != mark:
            return None
        inner = "".join(self._buffer)[: -len(mark)]
        self._buffer, self._tail = [], ""
        return inner

    def _emit_calls(self, *calls: ToolCall) -> list[Delta]:
        self._pending_space, self._has_called = "", True
        return [*calls]

    def _emit_text(self, text: str) -> list[Delta]:
        """Return text without the white space at its end, which is kept back since a tool call may follow it."""
        text = self._pending_space + text
        stripped = text.rstrip()
        self._pending_space = text[len(stripped) :]
        return [stripped] if stripped else []


class TaggedJsonParser(DelimitedToolParser):
    """A parser of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__((TOOL_CALL_OPEN, TOOL_CALL_CLOSE), lambda _: [])
        self._tools, self._parser = tools, IncrementalToolParser(tools)

    def end(self) -> list[Delta]:
        """Return the pending text when the output ends; nothing if a tool call has been emitted and is still open."""
        if self._handler == self._read_call:
            if self._parser.is_call:
                return []
            self._pending = self._parser.pending + self._pending
        return super().end()

    def _read_call(self, char: str) -> list[Delta]:
        """Handle a character after the open tag, and return the new call, arguments or text.

        A close tag in a JSON string is not one.
        """
        parser = self._parser
        if not parser.is_in_string and (self._pending or char == TOOL_CALL_CLOSE[0]):
            self._pending += char
            if self._pending == TOOL_CALL_CLOSE:
                return self._end_call("" if parser.is_call else TOOL_CALL_CLOSE)
            if TOOL_CALL_CLOSE.startswith(self._pending):
                return []
        chars, self._pending = self._pending or char, ""
        deltas = list[Delta]()
        for i, each in enumerate(chars):
            if parser.is_complete and each not in WHITESPACE:
                return [*deltas, *self._end_call(chars[i:])]
            deltas += parser.push(each)
            if parser.is_text:
                return [*deltas, *self._end_call(chars[i + 1 :])]
        if any(isinstance(each, ToolCall) for each in deltas):
            self._pending_space, self._has_called = "", True
        return deltas

    def _end_call(self, rest: str) -> list[Delta]:
        """End a tool call and return the `rest` as text; if it was not a call, return its open tag and JSON as text too."""
        text = "" if self._parser.is_call else TOOL_CALL_OPEN + self._parser.pending
        self._pending, self._handler, self._parser = "", self._read_text, IncrementalToolParser(self._tools)
        return self._emit_text(text + rest)


class Llama3JsonParser(ToolParser):
    """A parser of an output that is one tool call, a JSON object with a name and parameters; any other output is text."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._parser = IncrementalToolParser(tools)

    def _read_text(self, char: str) -> list[Delta]:
        parser = self._parser
        if parser.is_text or (parser.is_complete and char not in WHITESPACE):
            parser.is_text = True
            return [char]
        if parser.is_complete:
            return []
        deltas = parser.push(char)
        return [*deltas, parser.pending] if parser.is_text else deltas

    def end(self) -> list[Delta]:
        """Return the pending text when the output ends, unless it was a tool call."""
        parser = self._parser
        return [parser.pending] if parser.pending and not (parser.is_text or parser.is_call) else []
