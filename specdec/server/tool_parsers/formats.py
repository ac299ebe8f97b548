"""The formats in which models write tool calls, recognized by their chat templates, with their parsers. Knows no requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from specdec.server.tool_parsers.json_calls import (
    SPECIAL_TOKEN_MARK,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
    WHITESPACE,
    ArgumentsDelta,
    DelimitedToolParser,
    Delta,
    IncrementalToolParser,
    JsonScanner,
    Llama3JsonParser,
    Reasoning,
    TaggedJsonParser,
    ToolCall,
    ToolParser,
    get_partial_match_length,
)
from specdec.server.tool_parsers.non_json_calls import (
    FUNCTION_OPEN,
    GEMMA_MARKS,
    GEMMA_QUOTES,
    PYTHON_MARKS,
    ToolSchemas,
    XmlToolParser,
    make_gemma_parser,
    make_python_parser,
)

MISTRAL_TOOL_CALLS, MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
MAX_NAME_CHARS = 100  # of a tool's name with its marks
CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"  # of Harmony
END_MARKS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER_CHARS = 200  # of a message
RECIPIENT_PREFIX = "to=functions."
SPECIAL_TOKEN_FORMATS = ("harmony", "gemma", "python")  # only special tokens are marks, if the tokenizer has them all


class MistralParser(DelimitedToolParser):
    """A parser of Mistral's tool calls.

    Formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` once per call. What follows
    the mark and is not a call is text.
    """

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__((MISTRAL_TOOL_CALLS, ""), lambda _: [])
        self._tools = tools
        self._parser: IncrementalToolParser | JsonScanner = JsonScanner()

    def end(self) -> list[Delta]:
        """Return the pending text when the output ends, also an object in a list that ends before its arguments."""
        parser = self._parser
        object_text = (
            parser.pending
            if isinstance(parser, IncrementalToolParser) and not parser.is_call and self._handler == self._read_object
            else ""
        )
        prefix = MISTRAL_TOOL_CALLS if self._handler == self._read_call and not self._pending else self._pending_space
        text, self._pending, self._pending_space = prefix + self._pending + object_text, "", ""
        return [text] if text.strip() or (text and not self._has_called) else []

    def _read_call(self, char: str) -> list[Delta]:
        """Handle a character after the mark `[TOOL_CALLS]`: a list of calls or a name follows."""
        self._pending_space, self._pending = "", (self._pending or MISTRAL_TOOL_CALLS) + char
        if char == "[" and self._pending.rstrip(WHITESPACE + "[") + "[" == MISTRAL_TOOL_CALLS + "[":
            self._parser, self._handler = IncrementalToolParser(self._tools), self._read_object
        elif char not in WHITESPACE:
            self._handler = self._read_name
        return []

    def _read_name(self, char: str) -> list[Delta]:
        self._pending += char
        if self._pending.endswith(MISTRAL_ARGS):
            name = self._pending.removeprefix(MISTRAL_TOOL_CALLS).removesuffix(MISTRAL_ARGS).partition("[")[0].strip()
            if name in self._tools:
                self._parser, self._handler = JsonScanner(), self._read_arguments
                return self._start_call(ToolCall(name))
        return self._abandon_call() if len(self._pending) > MAX_NAME_CHARS or char == "{" else []

    def _read_arguments(self, char: str) -> list[Delta]:
        assert isinstance(self._parser, JsonScanner)
        if self._parser.is_complete and char not in WHITESPACE:
            self._handler = self._read_text
            return self._read_text(char)
        self._parser.accept(char)
        return [ArgumentsDelta(char)] if char not in WHITESPACE or not self._parser.is_complete else []

    def _read_object(self, char: str) -> list[Delta]:
        assert isinstance(self._parser, IncrementalToolParser)
        if self._parser.is_complete:
            return self._read_separator(char)
        deltas = self._parser.push(char)
        if deltas and isinstance(deltas[0], ToolCall):
            self._start_call(deltas[0])
        if self._parser.is_text:
            self._pending += self._parser.pending
            return self._abandon_call()
        return deltas

    def _read_separator(self, char: str) -> list[Delta]:
        """Handle a character between the objects of a list of calls; anything but a comma or the list's end is text."""
        if char == ",":
            self._parser, self._pending = IncrementalToolParser(self._tools), ""
        elif char == "]":
            self._handler = self._read_text
        elif char not in WHITESPACE:
            self._pending = char
            return self._abandon_call()
        return []

    def _start_call(self, call: ToolCall) -> list[Delta]:
        self._pending, self._has_called = "", True
        return [call]

    def _abandon_call(self) -> list[Delta]:
        """Return the pending text as text, since it is not a call, and go on with text."""
        text, self._pending, self._handler = self._pending, "", self._read_text
        return [text]


class HarmonyParser(ToolParser):
    """A parser of messages in OpenAI's Harmony format, `<|channel|>NAME<|message|>text<|end|>`.

    The analysis channel is reasoning; a message to a function is a tool call. A mark in a string of a call's arguments is not
    one.
    """

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__()
        self._tools, self._header = tools, ""  # the mark of the current message's header
        self._make_delta: Callable[[str], Delta] = str
        self._arguments_scanner: JsonScanner | None = None  # of the current call, as long as they are JSON

    def _read_text(self, char: str) -> list[Delta]:
        if self._arguments_scanner and self._arguments_scanner.is_in_string:
            return self._emit(char)
        self._pending += char
        marks = (MESSAGE,) if self._header else (CHANNEL, START, *END_MARKS)
        mark = next((mark for mark in marks if self._pending.endswith(mark)), "")
        if self._header and not mark:
            if len(self._pending) <= MAX_HEADER_CHARS:
                return []
            text, self._header, self._pending = self._header + self._pending, "", ""
            return self._emit(text)
        n = len(self._pending) - (len(mark) or max(get_partial_match_length(self._pending, mark) for mark in marks))
        text, self._pending = self._pending[:n], self._pending[n:] if not mark else ""
        deltas = self._start_message(text) if self._header else self._emit(text)
        if mark:
            self._header = mark if mark in (CHANNEL, START) else ""
        return deltas

    def end(self) -> list[Delta]:
        """Return the pending text when the output ends, also the unfinished header of a message."""
        return [self._header + self._pending] if self._header else self._emit(self._pending)

    def _start_message(self, header: str) -> list[Delta]:
        channel, _, rest = header.partition(RECIPIENT_PREFIX)
        channel = channel.rpartition(CHANNEL)[2]
        name = rest.split(maxsplit=1)[0].partition("<")[0] if rest.strip() else ""
        self._arguments_scanner = JsonScanner() if name in self._tools else None
        if self._arguments_scanner:
            self._make_delta = ArgumentsDelta
            return [ToolCall(name)]
        self._make_delta = Reasoning if channel.strip().startswith("analysis") and not rest else str
        return []

    def _emit(self, text: str) -> list[Delta]:
        if self._arguments_scanner and not all(map(self._arguments_scanner.accept, text)):
            self._arguments_scanner = None
        return [self._make_delta(text)] if text else []


class SpecialTokenParser(ToolParser):
    """A tool parser for output in which only special tokens are marks, and text that spells the same is not.

    A `SPECIAL_TOKEN_MARK` precedes special tokens. The inner parser gets it in the place of every other "<", and its deltas get
    the "<" back.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser, self._is_mark = parser, False

    def push(self, text: str) -> list[Delta]:
        """Take more of the output, and return the deltas of the inner parser."""
        deltas = list[Delta]()
        for char in text:
            is_mark, self._is_mark = self._is_mark, char == SPECIAL_TOKEN_MARK
            if char != SPECIAL_TOKEN_MARK:
                deltas += self._parser.push(SPECIAL_TOKEN_MARK if char == "<" and not is_mark else char)
        return [_restore_marks(each) for each in deltas]

    def end(self) -> list[Delta]:
        """Return the last deltas of the inner parser when the output ends."""
        return [_restore_marks(each) for each in self._parser.end()]


def _restore_marks(delta: Delta) -> Delta:
    if isinstance(delta, str):
        return delta.replace(SPECIAL_TOKEN_MARK, "<")
    return type(delta)(*[text.replace(SPECIAL_TOKEN_MARK, "<") for text in vars(delta).values()])


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: Name of the format; the formats of several models may share it.
        template_signs: Strings that a chat template has if its model uses the format.
        parser_factory: Makes a parser for the calls.
        open_mark: Mark before a call.
        close_mark: Mark after a call.
        extra_marks: Other marks that the output must show even if they are special tokens.
    """

    name: str
    template_signs: tuple[str, ...]
    parser_factory: Callable[[ToolSchemas], ToolParser]
    open_mark: str = ""
    close_mark: str = ""
    extra_marks: tuple[str, ...] = ()

    @property
    def is_always_parsed(self) -> bool:
        """Whether outputs are parsed even without tools, as in Harmony, where all output is in messages."""
        return self.parser_factory is HarmonyParser

    @property
    def visible_marks(self) -> tuple[str, ...]:
        """All marks of the format, which the output must show even if they are special tokens."""
        return (*filter(None, (self.open_mark, self.close_mark)), *self.extra_marks)

    def get_visible_tokens(self, specials: Mapping[str, int]) -> dict[int, str]:
        """Return the ids of the special tokens that the output must show, with their text.

        The text starts with `SPECIAL_TOKEN_MARK` if only special tokens are marks.

        Args:
            specials: Ids of the tokenizer's special tokens by name.
        """
        mark = SPECIAL_TOKEN_MARK * (self.name in SPECIAL_TOKEN_FORMATS and specials.keys() >= {*self.visible_marks})
        return {specials[name]: mark + name for name in self.visible_marks if name in specials}

    def make_parser(self, tools: ToolSchemas, visible_tokens: Mapping[int, str]) -> ToolParser:
        """Return a parser that splits an output into text and tool calls.

        Args:
            tools: Schemas of the arguments, by tool name.
            visible_tokens: Special tokens that the output shows, from `get_visible_tokens`.
        """
        parser = self.parser_factory(tools)
        return SpecialTokenParser(parser) if any(name[0] == SPECIAL_TOKEN_MARK for name in visible_tokens.values()) else parser


# in order of priority, if a template has the signs of several
TOOL_FORMATS = (
    ToolFormat("harmony", (CHANNEL, MESSAGE), HarmonyParser, extra_marks=(CHANNEL, MESSAGE, START, CONSTRAIN, *END_MARKS)),
    *(
        ToolFormat("gemma", marks[:1], partial(make_gemma_parser, marks), *marks, (quote,))
        for marks, quote in zip(GEMMA_MARKS, GEMMA_QUOTES, strict=True)
    ),
    ToolFormat("python", ("<|tool_call_start|>",), make_python_parser, *PYTHON_MARKS),
    ToolFormat("python", ("<|tool_list_start|>",), make_python_parser, *PYTHON_MARKS),
    ToolFormat("named", (MISTRAL_TOOL_CALLS, MISTRAL_ARGS), MistralParser, MISTRAL_TOOL_CALLS, extra_marks=(MISTRAL_ARGS,)),
    ToolFormat("listed", (MISTRAL_TOOL_CALLS,), MistralParser, MISTRAL_TOOL_CALLS),
    ToolFormat("xml", (TOOL_CALL_OPEN, FUNCTION_OPEN), XmlToolParser, TOOL_CALL_OPEN, TOOL_CALL_CLOSE),
    ToolFormat("tags", (TOOL_CALL_OPEN,), TaggedJsonParser, TOOL_CALL_OPEN, TOOL_CALL_CLOSE),
    ToolFormat("alone", ("<|python_tag|>",), Llama3JsonParser),
    ToolFormat("alone", ("ipython",), Llama3JsonParser),
)


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the tool-call format of the model that a chat template belongs to; None if it is unknown, and calls are text."""
    return next(
        (tool_format for tool_format in TOOL_FORMATS if all(sign in template for sign in tool_format.template_signs)), None
    )
