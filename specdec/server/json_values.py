"""JSON from clients and models: parsing within limits, and a validator that takes one character at a time. Knows no requests."""

import json
import re
import sys
from contextlib import suppress

WHITESPACE = " \t\n\r"  # of JSON
LINE_SEPARATORS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}  # where str.splitlines also splits JSON
CLOSING_BRACKETS = {"{": "}", "[": "]"}
SCALAR_PATTERN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null", re.ASCII)
MAX_NUMBER_CHARS = 400
MAX_FLOAT = sys.float_info.max
MAX_JSON_DEPTH = 500  # levels of nesting: some Python versions can parse more than they can serialize
AFTER_BACKSLASH = 9  # the state after a backslash; states 4 to 1 count the digits left after \\u


def parse_finite_float(digits: str) -> float:
    """Parse the digits of a JSON number; clips it to the range of finite floats, since JSON has no infinity."""
    return max(-MAX_FLOAT, min(float(digits), MAX_FLOAT))


def parse_json(text: str) -> object:
    """Parse a JSON text into a value that can be serialized again; constants such as NaN become strings.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    with suppress(RecursionError):
        value = json.loads(text, parse_float=parse_finite_float, parse_constant=str)
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(MAX_JSON_DEPTH + 1):
            if not level:
                return value
            children = (each for one in level for each in (one.values() if isinstance(one, dict) else one))
            level = [each for each in children if isinstance(each, dict | list)]
    raise ValueError("nested too deeply")


def encode_json(value: object) -> bytes:
    """Encode a value as compact JSON in UTF-8, in one line, with lone surrogates escaped as in `format_sse_event`.

    The value is encoded piece by piece, so that other threads can run in between.
    """
    text = "".join(json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(value))
    return text.translate(LINE_SEPARATORS).encode(errors="backslashreplace")


class JsonScanner:
    """A validator of JSON (RFC 8259) that takes one character at a time.

    Attributes:
        stack: Opening brackets of the unfinished lists and objects.
        expected: What comes next, apart from white space: "value", "key", ":", "," (or the end of the list or object), or
            "first }" or "first ]" after an opening bracket.
        is_in_string: Whether a string is open.
        is_complete: Whether the outermost value has ended. A number or constant only ends with the white space after it.
    """

    def __init__(self) -> None:
        """Start before the first character."""
        self.stack, self.expected, self._escape_state = list[str](), "value", 0
        self._scalar = ""  # an unfinished number or constant
        self.is_in_string = self.is_complete = False

    def accept(self, char: str) -> bool:
        """Take the next character, and return whether the text can still be JSON with it.

        Numbers and constants are only checked once they end, apart from their length.
        """
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
            case "}" | "]" if self.stack and CLOSING_BRACKETS[self.stack[-1]] == char and self.expected in (",", f"first {char}"):
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
