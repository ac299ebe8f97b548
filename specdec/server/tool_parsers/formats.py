"""The ways in which models write calls of tools, and who reads them; a template's words tell which is its model's. Knows no
requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from specdec.server.tool_parsers.incremental import (
    CLOSE,
    MARK,
    OPEN,
    SPACE,
    Alone,
    Blocks,
    Call,
    Calls,
    InTags,
    Json,
    More,
    Reading,
    Said,
    Thought,
    n_begun,
)
from specdec.server.tool_parsers.non_json import GEMMA, PYTHON, QUOTES, XML, Tools, Xml, gemma_calls, python_calls

TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"  # Mistral's marks
LONGEST_NAME = 100  # of a tool, with what may stand beside it
CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"  # harmony's
ENDS = ("<|end|>", "<|call|>", "<|return|>")
LONGEST_HEAD = 200  # letters, of a message's names
RECIPIENT = "to=functions."
BY_IDS = ("harmony", "gemma", "python")  # ways whose marks are special tokens, where a tokenizer has them all


class Marked(Blocks):
    """Mistral's: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` as often as there are
    calls. What comes behind the mark and is no call is text."""

    def __init__(self, tools: Tools) -> None:
        super().__init__((TOOL_CALLS, ""), lambda _: [])
        self._tools = tools
        self._reading: Reading | Json = Json()

    def end(self) -> list[Said]:
        """What was held and is no call; of a JSON list also the object that is cut before its arguments."""
        reading = self._reading
        inner = reading.held if isinstance(reading, Reading) and not reading.is_call and self._read == self._in_object else ""
        before = TOOL_CALLS if self._read == self._inside and not self._held else self._space
        said, self._held, self._space = before + self._held + inner, "", ""
        return [said] if said.strip() or (said and not self._has_called) else []

    def _inside(self, letter: str) -> list[Said]:
        """Behind the mark: a list, or a name."""
        self._space, self._held = "", (self._held or TOOL_CALLS) + letter
        if letter == "[" and self._held.rstrip(SPACE + "[") + "[" == TOOL_CALLS + "[":
            self._reading, self._read = Reading(self._tools), self._in_object
        elif letter not in SPACE:
            self._read = self._in_name
        return []

    def _in_name(self, letter: str) -> list[Said]:
        self._held += letter
        if self._held.endswith(ARGS):
            name = self._held.removeprefix(TOOL_CALLS).removesuffix(ARGS).partition("[")[0].strip()
            if name in self._tools:
                self._reading, self._read = Json(), self._in_arguments
                return self._begins(Call(name))
        return self._fails() if len(self._held) > LONGEST_NAME or letter == "{" else []

    def _in_arguments(self, letter: str) -> list[Said]:
        assert isinstance(self._reading, Json)
        if self._reading.is_over and letter not in SPACE:
            self._read = self._outside
            return self._outside(letter)
        self._reading.takes(letter)
        return [More(letter)] if letter not in SPACE or not self._reading.is_over else []

    def _in_object(self, letter: str) -> list[Said]:
        assert isinstance(self._reading, Reading)
        if self._reading.is_over:
            return self._between(letter)
        said = self._reading.push(letter)
        if said and isinstance(said[0], Call):
            self._begins(said[0])
        if self._reading.is_text:
            self._held += self._reading.held
            return self._fails()
        return said

    def _between(self, letter: str) -> list[Said]:
        """Objects of a list."""
        if letter == ",":
            self._reading, self._held = Reading(self._tools), ""
        elif letter == "]":
            self._read = self._outside
        elif letter not in SPACE:
            self._held = letter
            return self._fails()
        return []

    def _begins(self, call: Call) -> list[Said]:
        self._held, self._has_called = "", True
        return [call]

    def _fails(self) -> list[Said]:
        """It is no call."""
        said, self._held, self._read = self._held, "", self._outside
        return [said]


class Channels(Calls):
    """Harmony's messages: `<|channel|>NAME<|message|>words<|end|>`, of which analysis is thought and one to a function a call. A
    mark is none within a string of a call's arguments."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools, self._head = tools, ""  # the mark of a message, before whose words it stands
        self._says: Callable[[str], Said] = str
        self._arguments: Json | None = None  # of the call that goes on, as long as they are JSON

    def _outside(self, letter: str) -> list[Said]:
        if self._arguments and self._arguments.in_string:
            return self._words(letter)
        self._held += letter
        marks = (MESSAGE,) if self._head else (CHANNEL, START, *ENDS)
        mark = next((mark for mark in marks if self._held.endswith(mark)), "")
        if self._head and not mark:
            if len(self._held) <= LONGEST_HEAD:
                return []
            words, self._head, self._held = self._head + self._held, "", ""
            return self._words(words)
        n = len(self._held) - (len(mark) or max(n_begun(self._held, mark) for mark in marks))
        words, self._held = self._held[:n], self._held[n:] if not mark else ""
        said = self._begins(words) if self._head else self._words(words)
        if mark:
            self._head = mark if mark in (CHANNEL, START) else ""
        return said

    def end(self) -> list[Said]:
        """A head that is cut is no answer, and not dropped."""
        return [self._head + self._held] if self._head else self._words(self._held)

    def _begins(self, head: str) -> list[Said]:
        channel, _, rest = head.partition(RECIPIENT)
        channel = channel.rpartition(CHANNEL)[2]
        name = rest.split(maxsplit=1)[0].partition("<")[0] if rest.strip() else ""
        self._arguments = Json() if name in self._tools else None
        if self._arguments:
            self._says = More
            return [Call(name)]
        self._says = Thought if channel.strip().startswith("analysis") and not rest else str
        return []

    def _words(self, words: str) -> list[Said]:
        if self._arguments and not all(map(self._arguments.takes, words)):
            self._arguments = None
        return [self._says(words)] if words else []


class ByIds(Calls):
    """What another one reads of a text whose marks are special tokens, and none is what spells one: of that it is handed a `MARK`
    for a "<"."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._is_mark = calls, False

    def push(self, piece: str) -> list[Said]:
        said = list[Said]()
        for letter in piece:
            is_mark, self._is_mark = self._is_mark, letter == MARK
            if letter != MARK:
                said += self._calls.push(MARK if letter == "<" and not is_mark else letter)
        return [_spelled(each) for each in said]

    def end(self) -> list[Said]:
        return [_spelled(each) for each in self._calls.end()]


def _spelled(said: Said) -> Said:
    if isinstance(said, str):
        return said.replace(MARK, "<")
    return type(said)(*[words.replace(MARK, "<") for words in vars(said).values()])


@dataclass(frozen=True)
class Way:
    """How models of some templates write calls. signs: words of a template, all of which tell of it; reads: who finds the calls.

    opens, closes: the marks of a call; marks: what else a text is to show, though it be special tokens.
    """

    name: str
    signs: tuple[str, ...]
    reads: Callable[[Tools], Calls]
    opens: str = ""
    closes: str = ""
    marks: tuple[str, ...] = ()

    @property
    def is_always_read(self) -> bool:
        """Also without tools: all that a model says stands in messages."""
        return self.reads is Channels

    @property
    def shown(self) -> tuple[str, ...]:
        """The marks that a text is to show."""
        return (*filter(None, (self.opens, self.closes)), *self.marks)

    def shows(self, specials: Mapping[str, int]) -> dict[int, str]:
        """The special tokens that a text is to show, by what they are there; behind a `MARK` where no others can be marks."""
        mark = MARK * (self.name in BY_IDS and specials.keys() >= {*self.shown})
        return {specials[name]: mark + name for name in self.shown if name in specials}

    def finder(self, tools: Tools, shows: Mapping[int, str]) -> Calls:
        """Who finds the calls of a text that shows those."""
        calls = self.reads(tools)
        return ByIds(calls) if any(name[0] == MARK for name in shows.values()) else calls


# of several, the first whose signs a template has
WAYS = (
    Way("harmony", (CHANNEL, MESSAGE), Channels, marks=(CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)),
    *(Way("gemma", marks[:1], partial(gemma_calls, marks), *marks, (quote,)) for marks, quote in zip(GEMMA, QUOTES, strict=True)),
    Way("python", ("<|tool_call_start|>",), python_calls, *PYTHON),
    Way("python", ("<|tool_list_start|>",), python_calls, *PYTHON),
    Way("named", (TOOL_CALLS, ARGS), Marked, TOOL_CALLS, marks=(ARGS,)),
    Way("listed", (TOOL_CALLS,), Marked, TOOL_CALLS),
    Way("xml", (OPEN, XML), Xml, OPEN, CLOSE),
    Way("tags", (OPEN,), InTags, OPEN, CLOSE),
    Way("alone", ("<|python_tag|>",), Alone),
    Way("alone", ("ipython",), Alone),
)


def way_of(template: str) -> Way | None:
    """How a model of that template writes calls; None where nobody knows: they are text then."""
    return next((way for way in WAYS if all(sign in template for sign in way.signs)), None)
