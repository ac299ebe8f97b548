"""OpenAI's Harmony format, in which all output is in messages: `<|channel|>NAME<|message|>text<|end|>`."""

from typing import Literal

from specdec.argument_checks import JSONObject
from specdec.server.json_values import JsonScanner
from specdec.server.tool_parsers.base import Delta, Reader, ToolParser
from specdec.server.tool_parsers.grammar import ANY_TEXT, GrammarBuilder, quote

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
END_MARKS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT_PREFIX = "to=functions."
MAX_HEADER_CHARS = 1000  # of a message


class HarmonyParser(ToolParser):
    """A parser of messages. The analysis channel is reasoning, and a message to a function is a tool call.

    A mark in a string of a call's arguments is not one.
    """

    template_signs = ((CHANNEL, MESSAGE),)
    extra_marks = (CHANNEL, MESSAGE, START, CONSTRAIN, *END_MARKS)
    has_special_marks = is_always_parsed = True
    _kind: Literal["text", "reasoning", "tool_call"] = "text"  # of the current message
    _arguments: JsonScanner | None = None  # of the current call, as long as they are JSON

    @property
    def text_marks(self) -> tuple[str, ...]:
        """The marks that end the text of a message, none within a string of arguments."""
        return () if self._arguments and self._arguments.is_in_string else (CHANNEL, START, *END_MARKS)

    def read_output(self) -> Reader:
        """Read all messages, each with its header."""
        while mark := (yield from self.read_text()):
            header, self.is_reasoning = "", False
            while mark not in END_MARKS and not header.endswith(MESSAGE) and len(header) <= MAX_HEADER_CHARS:
                if not (char := (yield)):
                    return self.emit(Delta("text", mark + header))
                header += char
            if header.endswith(MESSAGE):
                self._start_message(header.removesuffix(MESSAGE))
            elif mark not in END_MARKS:
                self.emit_text(mark + header)

    def _start_message(self, header: str) -> None:
        channel, _, rest = header.partition(RECIPIENT_PREFIX)
        channel = channel.rpartition(CHANNEL)[2]
        name = rest.split(maxsplit=1)[0].partition("<")[0] if rest.strip() else ""
        self._kind = "reasoning" if channel.strip().startswith("analysis") and not rest else "text"
        self._arguments, self.is_reasoning = None, self._kind == "reasoning"
        if name in self.tools:
            self._kind, self._arguments = "tool_call", JsonScanner()
            self.emit(Delta("tool_call", "", name))

    def emit_text(self, text: str) -> None:
        """Emit text of the current message as text, reasoning, or arguments of a call, and scan arguments as JSON.

        `text_marks` needs the scan to ignore marks within strings. At the first character that cannot be JSON, the scan of this
        call stops, but its text is still emitted.
        """
        if self._arguments and not all(map(self._arguments.accept, text)):
            self._arguments = None
        if text:
            self.emit(Delta(self._kind, text))

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool, a message to a function."""
        channel, constrain, message = grammar.write_marks(CHANNEL, CONSTRAIN, MESSAGE)
        header = quote(f"commentary {RECIPIENT_PREFIX}{name} ")
        return f'{channel} {header} {constrain} "json" {message} {grammar.add_json_rule(schema)}'

    @classmethod
    def write_calls(cls, grammar: GrammarBuilder, call: str, opening: str = "") -> str:
        """Return a Lark expression for a single call, which may begin with the `<|start|>assistant` that follows a thought.

        The grammar does not cover the thought itself. `opening` is ignored, since the call has its own header.
        """
        return f"{cls._write_start(grammar)} {call}"

    @classmethod
    def write_answer(cls, grammar: GrammarBuilder, answer: str) -> str:
        """Return a Lark expression for an answer of JSON, which is a message in the final channel."""
        channel, constrain, message = grammar.write_marks(CHANNEL, CONSTRAIN, MESSAGE)
        return f'{cls._write_start(grammar)} {channel} "final" (" "? {constrain} "json")? {message} {answer}'

    @classmethod
    def write_optional_calls(cls, grammar: GrammarBuilder, call: str) -> str:
        """Return a Lark expression for a call or an answer, which may follow a message to the user, and for other text."""
        channel, message, end, start = grammar.write_marks(CHANNEL, MESSAGE, END_MARKS[0], START)
        text = grammar.add_rule(ANY_TEXT)
        answer = f'{channel} ("final" | "commentary") {message} {text}?'
        if CHANNEL not in grammar.specials:  # the mark could be any text
            return f"{cls._write_start(grammar)} ({call} | {answer})"
        preamble = f'{channel} "commentary" {message} {text} {end} {start} "assistant"'
        return f"{cls._write_start(grammar)} ({preamble})? ({call} | {answer}) | {text}"

    @classmethod
    def _write_start(cls, grammar: GrammarBuilder) -> str:
        """Return a Lark expression for the optional `<|start|>assistant` between a thought and the header of the next message."""
        (start,) = grammar.write_marks(START)
        return f'({start} "assistant")?'
