"""The incremental parser of one tool call that is a JSON object with a name and arguments. Knows no requests."""

import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from specdec.server.json_values import WHITESPACE, JsonScanner, parse_json
from specdec.server.tool_parsers.base import Delta

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("name", *ARGUMENT_KEYS, "id", "type")  # an object with other keys is not a call


class JsonCallParser(JsonScanner):
    """A parser of a text that may be a tool call, a JSON object with a name and arguments.

    A tool call is emitted as soon as its name is known and its arguments start. Raw line breaks in strings and commas before a
    closing bracket, which small models write, are mended.

    Attributes:
        is_text: Whether the text is known not to be a call.
        is_call: Whether the text is known to be a call.
        pending: The text that was received and not emitted.
    """

    def __init__(self, tools: Collection[str]) -> None:
        """Create a parser before the first character."""
        super().__init__()
        self._tools = tools
        self.pending, self._name, self._key = "", "", ""
        self._string_start = 0  # of a string of the outermost object, in `_json`
        self._json, self._comma = "", ""  # what was accepted before the arguments; a comma that a bracket may follow
        self.is_text = self.is_call = self._is_in_arguments = False

    def can_continue_with(self, char: str) -> bool:
        """Return whether a character may belong to the call, or follow it as white space."""
        return not self.is_text and (not self.is_complete or char in WHITESPACE)

    def push(self, char: str) -> list[Delta]:
        """Take a character and return the new call or the new piece of its arguments, if any.

        Text that is not a call is not returned; it is in `pending`, and `is_text` is set.
        """
        if not self.is_call:
            self.pending += char
        return [delta for each in self._mend(char) for delta in self._push(each)]

    def _mend(self, char: str) -> str:
        """Return what to read instead of a character."""
        if self.is_in_string:
            return json.dumps(char)[1:-1] if char < " " else char
        if self._comma and char in WHITESPACE:
            return ""
        comma, self._comma = self._comma, ""
        if char == "," and not comma and self.stack and (self.expected == "," or self._scalar):
            self._comma = char
            return ""
        return char if char in "}]" else comma + char

    def _push(self, char: str) -> list[Delta]:
        """Take a character as `_mend` returned it; see `push`."""
        was_in_string, expected, depth = self.is_in_string, self.expected, len(self.stack)
        is_valid = self.accept(char)
        if self.is_call:
            deltas = [Delta("tool_call", char)] if self._is_in_arguments else []
            self._is_in_arguments &= not is_valid or len(self.stack) > 1
            return deltas
        self._json += char
        if not is_valid or (depth == 0 and char not in WHITESPACE + "{"):
            self.is_text = True
        elif self.is_complete:
            return self._parse_complete()
        elif depth == 1 and self.is_in_string and not was_in_string:
            self._string_start = len(self._json) - 1
        elif depth == 1 and was_in_string and not self.is_in_string:
            self._read_string(json.loads(self._json[self._string_start :]), expected)
        elif (
            depth == 1 and char == "{" and not was_in_string and expected == "value" and self._key in ARGUMENT_KEYS and self._name
        ):
            self.is_call, self._is_in_arguments, self.pending = True, True, ""
            return [Delta("tool_call", "{", self._name)]
        return []

    def _read_string(self, string: str, expected: str) -> None:
        """Store a complete key, or the name of the tool, of the outermost object; sets `is_text` if a call cannot have it.

        Args:
            string: The key or value.
            expected: What was expected when the string was open (see `JsonScanner`).
        """
        if expected in ("key", "first }"):
            self._key, self.is_text = string, string not in CALL_KEYS
        elif self._key == "name":
            self._name, self.is_text = string, string not in self._tools

    def _parse_complete(self) -> list[Delta]:
        """Parse a finished object, and return a list with the call that it is; empty if it is not a call.

        This is needed if the name came last, or if the arguments are missing, null or a string with JSON.
        """
        value: Any = {}
        arguments: Any = None
        with suppress(ValueError):
            value = parse_json(self._json)
            arguments = next((value[key] for key in ARGUMENT_KEYS if key in value), None) or {}
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        name: Any = value.get("name")
        self.is_call = isinstance(name, str) and name in self._tools and isinstance(arguments, dict)
        self.is_text = not self.is_call
        return [Delta("tool_call", json.dumps(arguments, ensure_ascii=False), name)] if self.is_call else []
