"""Calls of tools in a text that comes letter by letter: JSON in tags, as of Qwen and SmolLM, or alone, as of Llama 3. Knows no
requests."""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ARGUMENTS = ("arguments", "parameters")  # what they are called
KEYS = ("name", *ARGUMENTS, "id", "type")  # an object that has others is no call
SPACE = " \t\n\r"  # of JSON
CLOSES = {"{": "}", "[": "]"}
OPENS = {closes: opens for opens, closes in CLOSES.items()}
WORD = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null", re.ASCII)
LONGEST_NUMBER = 400
LARGEST = sys.float_info.max
DEEPEST = 500  # values within values: some Pythons read more than they can write again
FIRST_ESCAPED = 9  # what follows a backslash; of \\u, four digits do
MARK = "\udc3c"  # stands before the name of a special token, where that alone is a mark: no text holds half a character


@dataclass(frozen=True)
class Call:
    """A call begins. arguments: of a JSON object, as it is written, as far as it has come."""

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class More:
    """What the arguments of the last call go on with."""

    arguments: str


@dataclass(frozen=True)
class Thought:
    """What a model thinks before it answers, where its way to write tells that apart."""

    words: str


Said = str | Thought | Call | More


def finite(digits: str) -> float:
    """A number of JSON, which has no infinity: one beyond all floats is the largest."""
    return max(-LARGEST, min(float(digits), LARGEST))


def value_of(text: str) -> Any:
    """What JSON stands for, as JSON can say it again; what is no number is a text. Raises ValueError."""
    with suppress(RecursionError):
        value = json.loads(text, parse_float=finite, parse_constant=str)
        level: list[Any] = [[value]]
        for _ in range(DEEPEST + 1):
            level = [each for held in level for each in _held(held) if isinstance(each, dict | list)]
            if not level:
                return value
    raise ValueError("nested too deep")


def _held(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def call_of(text: str, tools: Collection[str]) -> Call | None:
    """The call that a text is: a JSON object of a name and arguments; None for any other."""
    try:
        value = value_of(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in tools:
        return None
    arguments: Any = next((value[key] for key in ARGUMENTS if key in value), {})
    return Call(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def n_begun(text: str, mark: str) -> int:
    """How much of a text's end may become the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


class Json:
    """Reads JSON (RFC 8259) letter by letter. is_over: whether a value has ended.

    inside: what opened the lists and objects that have not ended; awaits: what comes next, beside space: "value", "key", ":" or
    "," where the list or object may also end.
    """

    def __init__(self) -> None:
        self.inside, self.awaits, self._escaped = list[str](), "value", 0
        self._word = ""  # a number or a name that has begun
        self.in_string = self.is_over = False

    def takes(self, letter: str) -> bool:
        """Whether it may stand there."""
        if self.in_string:
            return self._in_string(letter)
        if self._word and letter not in SPACE + ",]}":
            self._word += letter
            return len(self._word) <= LONGEST_NUMBER
        if self._word and not WORD.fullmatch(self._word):
            return False
        if self._word:
            self._word = ""
            self._ends()
        if letter in SPACE:
            return True
        if self.is_over:
            return False
        match letter:
            case "}" | "]" if self.inside and self.inside[-1] == OPENS[letter] and self.awaits in (",", f"first {letter}"):
                self.inside.pop()
                self._ends()
            case "," if self.awaits == "," and self.inside:
                self.awaits = "key" if self.inside[-1] == "{" else "value"
            case ":" if self.awaits == ":":
                self.awaits = "value"
            case '"' if self.awaits in ("key", "value", "first }", "first ]"):
                self.in_string = True
            case "{" | "[" if self.awaits in ("value", "first ]"):
                self.inside.append(letter)
                self.awaits = f"first {CLOSES[letter]}"
            case _ if self.awaits in ("value", "first ]") and letter in "-0123456789tfn":
                self._word = letter
            case _:
                return False
        return True

    def _in_string(self, letter: str) -> bool:
        if self._escaped:
            is_first = self._escaped == FIRST_ESCAPED
            self._escaped = 4 if is_first and letter == "u" else 0 if is_first else self._escaped - 1
            return letter in '"\\/bfnrtu' if is_first else letter in "0123456789abcdefABCDEF"
        if letter == "\\":
            self._escaped = FIRST_ESCAPED
        elif letter == '"':
            self.in_string = False
            if self.awaits in ("key", "first }"):
                self.awaits = ":"
            else:
                self._ends()
        return letter >= " "

    def _ends(self) -> None:
        """A value has."""
        self.awaits, self.is_over = ",", not self.inside


class Reading(Json):
    """A text that may be a call: a JSON object of a name and arguments. What it says is what can be nothing else.

    is_text: whether it is none; held: what has come and is not said; is_call: whether it is one.
    """

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._tools = tools
        self.held, self._name, self._key, self._string = "", "", "", ""
        self.is_text = self.is_call = self._is_within = False

    def push(self, letter: str) -> list[Said]:
        """Of text, nothing: `held` has it."""
        was, awaited, depth = self.in_string, self.awaits, len(self.inside)
        is_taken = self.takes(letter)
        if not self.is_call:
            self.held += letter
        if not is_taken:
            self.is_text = not self.is_call
            return [More(letter)] if self._is_within else []
        if self._is_within:
            self._is_within = len(self.inside) > 1
            return [More(letter)]
        if depth == 0 and letter not in SPACE and letter != "{":
            self.is_text = True
        elif depth == 1 and not self.is_call:
            return self._at_top(letter, was, awaited)
        elif self.is_over and not self.is_call:
            return self._whole()
        return []

    def _at_top(self, letter: str, was_string: bool, awaited: str) -> list[Said]:
        """A letter right within the object, of a key or a value."""
        if self.is_over:
            return self._whole()
        if self.in_string:
            self._string = self._string + letter if was_string else '"'
        elif was_string:
            said, self._string = json.loads(self._string + letter), ""
            if awaited in ("key", "first }"):
                self._key = said
                self.is_text = said not in KEYS
            elif self._key == "name":
                self._name = said
                self.is_text = said not in self._tools
        elif self._key in ARGUMENTS and awaited == "value" and letter == "{" and self._name:
            self.is_call = self._is_within = True
            self.held = ""
            return [Call(self._name, "{")]
        return []

    def _whole(self) -> list[Said]:
        """The object has ended, and it was not seen on the way that it is a call: the name came last, or no arguments."""
        call = call_of(self.held, self._tools)
        self.is_call, self.is_text = call is not None, call is None
        return [call] if call else []


class Calls:
    """A text that comes in pieces becomes text and calls, in their order, each as soon as it cannot become anything else.

    Letters are read one by one, each by what `_read` is by then; `_held` is what has come and is not said.
    """

    def __init__(self) -> None:
        self._held, self._read = "", self._outside

    def push(self, piece: str) -> list[Said]:
        said = list[Said]()
        for letter in piece:
            said += self._read(letter)
        return said

    def end(self) -> list[Said]:
        raise NotImplementedError

    def _outside(self, letter: str) -> list[Said]:
        """A letter that is in no call."""
        raise NotImplementedError


class Blocks(Calls):
    """Text, and between two marks calls. The space around them is dropped; what is no call is text, marks and all.

    reads: the calls of what stands between the marks; none where it is something else.
    """

    def __init__(self, marks: tuple[str, str], reads: Callable[[str], list[Call]]) -> None:
        super().__init__()
        self._open, self._close, self._reads = *marks, reads
        self._space, self._has_called = "", False
        self._inner, self._tail = list[str](), ""  # letters that wait for a mark, and the last of them

    def end(self) -> list[Said]:
        said = self._text(("" if self._read == self._outside else self._open) + self._held + "".join(self._inner))
        return said if self._has_called or not self._space else [*said, self._space]

    def _outside(self, letter: str) -> list[Said]:
        self._held += letter
        is_open = self._held.endswith(self._open)
        n = len(self._held) - (len(self._open) if is_open else n_begun(self._held, self._open))
        words, self._held = self._held[:n], self._held[n:]
        if is_open:
            self._held, self._read = "", self._inside
        return self._text(words)

    def _inside(self, letter: str) -> list[Said]:
        if (inner := self._until(self._close, letter)) is None:
            return []
        self._read = self._outside
        if calls := self._reads(inner):
            return self._calls(*calls)
        return self._text(self._open + inner + self._close)

    def _until(self, mark: str, letter: str) -> str | None:
        """What came before the mark, once it has."""
        self._inner.append(letter)
        self._tail = (self._tail + letter)[-len(mark) :]
        if self._tail != mark:
            return None
        inner = "".join(self._inner)[: -len(mark)]
        self._inner, self._tail = [], ""
        return inner

    def _calls(self, *calls: Call) -> list[Said]:
        self._space, self._has_called = "", True
        return [*calls]

    def _text(self, text: str) -> list[Said]:
        """Without the space at its end, which may stand before a call."""
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        return [words] if words else []


class InTags(Blocks):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls, each as soon as it is one."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__((OPEN, CLOSE), lambda _: [])
        self._tools, self._reading = tools, Reading(tools)

    def end(self) -> list[Said]:
        if self._read == self._inside:
            if self._reading.is_call:
                return []
            self._held = self._reading.held + self._held
        return super().end()

    def _inside(self, letter: str) -> list[Said]:
        """The tag that closes is none within a string."""
        reading = self._reading
        if not reading.in_string and (self._held or letter == CLOSE[0]):
            self._held += letter
            if self._held == CLOSE:
                return self._is_over("" if reading.is_call else CLOSE)
            if CLOSE.startswith(self._held):
                return []
        letters, self._held = self._held or letter, ""
        said = list[Said]()
        for i, each in enumerate(letters):
            if reading.is_over and each not in SPACE:
                return [*said, *self._is_over(letters[i:])]
            said += reading.push(each)
            if reading.is_text:
                return [*said, *self._is_over(letters[i + 1 :])]
        if any(isinstance(each, Call) for each in said):
            self._space, self._has_called = "", True
        return said

    def _is_over(self, rest: str) -> list[Said]:
        """The reading is; if it was of no call, it was text, and so is the rest."""
        before = "" if self._reading.is_call else OPEN + self._reading.held
        self._held, self._read, self._reading = "", self._outside, Reading(self._tools)
        return self._text(before + rest)


class Alone(Calls):
    """An answer that is one JSON object of a name and parameters."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._reading = Reading(tools)

    def _outside(self, letter: str) -> list[Said]:
        reading = self._reading
        if reading.is_text or (reading.is_over and letter not in SPACE):
            reading.is_text = True
            return [letter]
        if reading.is_over:
            return []
        said = reading.push(letter)
        return [*said, reading.held] if reading.is_text else said

    def end(self) -> list[Said]:
        reading = self._reading
        return [reading.held] if reading.held and not (reading.is_text or reading.is_call) else []
