"""Muse Glimmer's messages ` to=RECIPIENT<|message|>text<|eom|>`: thoughts, answers, and tool calls in XML."""

from specdec.argument_checks import JSONObject
from specdec.server.tool_parsers.base import Delta, Reader
from specdec.server.tool_parsers.grammar import ANY_TEXT, GrammarBuilder, quote
from specdec.server.tool_parsers.qwen3_coder import Qwen3CoderParser

START, MESSAGE, MESSAGE_END, TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
ROLE, RECIPIENT_PREFIX, THINKER = "assistant", "to=", "to=self"
MAX_HEADER_CHARS = 1000  # of a message


class MuseGlimmerParser(Qwen3CoderParser):
    """A parser of messages. One to the model itself is reasoning, and one to a tool has a call.

    The output begins in the header of its first message, since prompts end in `<|start|>assistant`.
    """

    template_signs = (("<atem:function_calls>", MESSAGE),)
    open_mark, close_mark = "<atem:function_calls>", "</atem:function_calls>"
    extra_marks = (START, MESSAGE, MESSAGE_END, TURN_END)
    is_always_parsed = True
    function_open, function_close = '<atem:invoke name="', "</atem:invoke>"
    parameter_open, value_close = '<atem:parameter name="', "</atem:parameter>"
    tag_end, padding = '">', ""

    @property
    def text_marks(self) -> tuple[str, ...]:
        """The marks that end the text of a message; a call in a thought is none."""
        marks = (START, MESSAGE_END, TURN_END)
        return marks if self.is_reasoning else (self.open_mark, *marks)

    def read_output(self) -> Reader:
        """Read all messages, each with its header."""
        yield from self._read_header()
        while mark := (yield from self.read_text()):
            if mark == self.open_mark:
                yield from self.read_call()
                continue
            self.is_reasoning = False
            if mark == START:
                yield from self._read_header()

    def _read_header(self) -> Reader:
        """Read the header of a message. What cannot be one is read again, as text."""
        header = ""
        while not header.endswith(MESSAGE) and self._is_header(header) and (char := (yield)):
            header += char
        if header.endswith(MESSAGE):
            self.is_reasoning = header.removesuffix(MESSAGE).endswith(THINKER)
        else:
            self.unread(header)

    @staticmethod
    def _is_header(text: str) -> bool:
        """Return whether a text may be the beginning of a header."""
        rest = text.removeprefix(ROLE).lstrip(" ")
        is_begun = any(each.startswith(rest) for each in (ROLE, RECIPIENT_PREFIX, MESSAGE))
        return len(text) <= MAX_HEADER_CHARS and (is_begun or rest.startswith(RECIPIENT_PREFIX))

    def emit_text(self, text: str) -> None:
        """Emit text of the current message, as reasoning in a thought."""
        if not self.is_reasoning:
            super().emit_text(text)
        elif text:
            self.emit(Delta("reasoning", text))

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool, a message to it."""
        message, opening, closing = grammar.write_marks(MESSAGE, cls.open_mark, cls.close_mark)
        call = super().write_call(grammar, name, schema)
        return f'{quote(f" {RECIPIENT_PREFIX}{name}")} {message} {opening} "\\n" {call} "\\n" {closing}'

    @classmethod
    def write_calls(cls, grammar: GrammarBuilder, call: str, opening: str = "") -> str:
        """Return a Lark expression for one tool call or several; see `HarmonyParser.write_calls`."""
        end, start = grammar.write_marks(MESSAGE_END, START)
        return f"{cls._write_start(grammar)} {call}{grammar.write_repeated(f'{end} {start} {quote(ROLE)} {call}')}"

    @classmethod
    def write_answer(cls, grammar: GrammarBuilder, answer: str) -> str:
        """Return a Lark expression for an answer, which is a message to the user."""
        (message,) = grammar.write_marks(MESSAGE)
        return f'{cls._write_start(grammar)} " to=user"? {message} {answer}'

    @classmethod
    def write_optional_calls(cls, grammar: GrammarBuilder, call: str) -> str:
        """Return a Lark expression for an answer, calls, or calls after a message to the user, and for other text."""
        text, calls = grammar.add_rule(ANY_TEXT), cls.write_calls(grammar, call)
        answer = cls.write_answer(grammar, f"{text}?")
        if MESSAGE not in grammar.specials:  # the mark could be any text
            return f"{calls} | {answer}"
        (end,) = grammar.write_marks(MESSAGE_END)
        return f"{calls} | {answer} ({end} {calls})? | {text}"

    @classmethod
    def _write_start(cls, grammar: GrammarBuilder) -> str:
        """Return a Lark expression for the optional `<|start|>assistant` between a thought and the header of the next message."""
        (start,) = grammar.write_marks(START)
        return f"({start} {quote(ROLE)})?"
