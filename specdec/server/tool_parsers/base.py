"""The incremental parser of model output that all tool-call formats share. Knows no requests."""

import re
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

from specdec.argument_checks import JSONObject
from specdec.server.tool_parsers.grammar import ANY_TEXT, GrammarBuilder, quote, quote_json
from specdec.text.reasoning import SPECIAL_TOKEN_MARK
from specdec.text.structured_output import Grammar
from specdec.tokenizer import AnyTokenizer

ToolSchemas = Mapping[str, JSONObject]  # schemas of the arguments, by tool name
Reader = Generator[None, str, None]  # is sent the characters of an output, then "" until it stops
Layout = Literal["sequence", "lines", "list"]


@dataclass(frozen=True)
class Delta:
    """A new piece of an output.

    Attributes:
        kind: Whether the piece is text, reasoning or a tool call.
        text: The text; for a tool call, the JSON of its arguments.
        name: The tool, if the piece starts a tool call; None for text, and for more arguments of the last call.
    """

    kind: Literal["text", "reasoning", "tool_call"]
    text: str = ""
    name: str | None = None

    def continues(self, other: "Delta") -> bool:
        """Return whether this piece belongs to the same part of the output as the one before it."""
        return self.kind == other.kind and self.name is None


class ToolParser:
    """A parser that splits the output of a model into text, reasoning and tool calls while it is generated.

    Each piece is emitted as soon as it cannot become anything else. A subclass for a format of tool calls overrides `read_call`,
    and the `write_*` methods that describe its calls as a Lark grammar. Methods named `read_*` are generators that are sent one
    character at a time, and "" after the end of the output until they stop.

    Args:
        tools: The tools that may be called. Calls of others are text.
        visible_tokens: Special tokens that the output shows, from `get_visible_tokens`.

    Attributes:
        template_signs: A chat template whose model uses the format has all strings of one of these tuples.
        open_mark: Mark before a call; "" if there is none.
        close_mark: Mark after a call; "" if there is none.
        extra_marks: Other marks that the output must show even if they are special tokens.
        layout: Whether several calls are one after another, each with its marks; on lines of their own; or a list between marks.
        arguments_key: Key of the arguments in a call that is a JSON object.
        has_special_marks: Whether only special tokens count as marks, and not text like them, if all marks are special tokens.
        is_always_parsed: Whether outputs are parsed even without tools.
        is_ended: Whether the output has ended.
        is_reasoning: Whether the output is inside a thought that the format itself marks.
    """

    template_signs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    open_mark: ClassVar[str] = ""
    close_mark: ClassVar[str] = ""
    extra_marks: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[Layout] = "sequence"
    arguments_key: ClassVar[str] = "arguments"
    has_special_marks: ClassVar[bool] = False
    is_always_parsed: ClassVar[bool] = False

    def __init__(self, tools: ToolSchemas, visible_tokens: Mapping[int, str] = {}) -> None:
        """Create a parser before the first text."""
        self.tools, self.is_ended, self.is_reasoning = tools, False, False
        self._only_special_marks = self.has_special_marks and any(
            name[0] == SPECIAL_TOKEN_MARK for name in visible_tokens.values()
        )
        self._input, self._deltas, self._is_special = deque[str](), list[Delta](), False
        self._pending_space, self._has_called = "", False
        self._reader = self.read_output()
        next(self._reader)

    @classmethod
    def get_marks(cls) -> tuple[str, ...]:
        """Return all marks of the format, which the output must show even if they are special tokens."""
        return (*filter(None, (cls.open_mark, cls.close_mark)), *cls.extra_marks)

    @classmethod
    def get_visible_tokens(cls, specials: Mapping[str, int]) -> dict[int, str]:
        """Return the ids of the special tokens that the output must show, with their text.

        The text starts with `SPECIAL_TOKEN_MARK` if only special tokens are marks.

        Args:
            specials: Ids of the tokenizer's special tokens by name.
        """
        mark = SPECIAL_TOKEN_MARK * (cls.has_special_marks and specials.keys() >= {*cls.get_marks()})
        return {specials[name]: mark + name for name in cls.get_marks() if name in specials}

    def push(self, text: str) -> list[Delta]:
        """Take more of the output, and return the pieces that are now certain."""
        for char in text:
            if char != SPECIAL_TOKEN_MARK:
                is_text = char == "<" and self._only_special_marks and not self._is_special
                self._input.append(SPECIAL_TOKEN_MARK if is_text else char)  # readers find no mark in the text
            self._is_special = char == SPECIAL_TOKEN_MARK
        while self._input:
            self._reader.send(self._input.popleft())
        return self._take_deltas()

    def end(self) -> list[Delta]:
        """Return the pieces that are pending when the output ends."""
        self.is_ended = True
        with suppress(StopIteration):
            while True:
                self._reader.send(self._input.popleft() if self._input else "")
        if self._pending_space and not self._has_called:
            self._deltas.append(Delta("text", self._pending_space))
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def unread(self, text: str) -> None:
        """Put back characters that the next reader shall read."""
        self._input.extendleft(reversed(text))

    def emit(self, *deltas: Delta) -> None:
        """Add pieces to the result. White space before a tool call is dropped."""
        for delta in deltas:
            if delta.name is not None:
                self._pending_space, self._has_called = "", True
            if self._only_special_marks:
                delta = replace(delta, text=delta.text.replace(SPECIAL_TOKEN_MARK, "<"))
            self._deltas.append(delta)

    def emit_text(self, text: str) -> None:
        """Emit text without the white space at its end, which is kept back since a tool call may follow it."""
        text = self._pending_space + text
        stripped = text.rstrip()
        self._pending_space = text[len(stripped) :]
        if stripped:
            self.emit(Delta("text", stripped))

    @property
    def is_cut(self) -> bool:
        """Whether the output has ended after a call, so that the beginning of a further one is not text."""
        return self.is_ended and self._has_called

    def emit_unfinished(self, text: str) -> None:
        """Emit text that is not a call, unless it is the beginning of a further call at the end of the output."""
        if not self.is_cut:
            self.emit_text(text)

    @property
    def text_marks(self) -> tuple[str, ...]:
        """The marks that end the text which is being read."""
        return (self.open_mark,)

    def read_output(self) -> Reader:
        """Read all of the output: text, and calls after open marks."""
        while (yield from self.read_text()):
            yield from self.read_call()

    def read_text(self) -> Generator[None, str, str]:
        """Emit text up to the next of the `text_marks`, and return that mark; "" at the end of the output."""
        pending = ""
        while char := (yield):
            pending += char
            marks, start = self.text_marks, 0
            prefixes = _get_prefixes(marks)
            while start < len(pending) and pending[start:] not in prefixes:
                start += 1
            self.emit_text(pending[:start])
            pending = pending[start:]
            if pending in marks:
                return pending
        self.emit_unfinished(pending)
        return ""

    def read_call(self) -> Reader:
        """Read and emit what follows the open mark, up to the end of the call, or as text if it is not a call."""
        raise NotImplementedError

    @classmethod
    def make_grammar(
        cls,
        tokenizer: AnyTokenizer,
        tools: Sequence[JSONObject],
        is_required: bool,
        is_single_call: bool,
        response_schema: JSONObject | None = None,
    ) -> Grammar:
        """Return a grammar, not built yet, of outputs that call the tools in this format.

        For schemas that are not `strict`, keywords that llguidance does not know are ignored.

        Args:
            tokenizer: The target's tokenizer.
            tools: The functions, with name, parameters and strict.
            is_required: Whether an output must call a tool. Otherwise it may be any text, also before a call.
            is_single_call: Whether at most one call is allowed.
            response_schema: Schema of an output without calls; None for any text.

        Raises:
            ValueError: The parameters of a tool cannot be expressed; the message names the tool.
        """
        grammar = GrammarBuilder(tokenizer.specials, is_single_call)
        rules = []
        for tool in tools:
            with grammar.begin_tool(tool) as schema:
                rules.append(grammar.add_rule(cls.write_call(grammar, tool["name"], schema)))
        call = grammar.add_rule(" | ".join(rules))
        if response_schema is not None:
            answer = cls.write_answer(grammar, grammar.add_json_rule(response_schema))
            start = f"{answer} | {cls.write_calls(grammar, call)}"
        else:
            start = cls.write_calls(grammar, call) if is_required else cls.write_optional_calls(grammar, call)
        return grammar.build(tokenizer, start)

    @classmethod
    def write_call(cls, grammar: GrammarBuilder, name: str, schema: JSONObject) -> str:
        """Return a Lark expression for a call of a tool, without the marks around it; a JSON object unless it is overridden.

        Args:
            grammar: The grammar, to which rules are added that the expression refers to.
            name: Name of the tool.
            schema: Schema of its arguments, an object.

        Raises:
            ValueError: The format cannot express the name or the arguments.
        """
        prefix = f'{{"name": "{name}", "{cls.arguments_key}": '
        return f'{quote_json(prefix)} {grammar.add_json_rule(schema)} "}}"'

    @classmethod
    def write_calls(cls, grammar: GrammarBuilder, call: str, opening: str = "") -> str:
        """Return a Lark expression for one tool call, or for several if they are allowed.

        Args:
            grammar: The grammar.
            call: Rule of a call without the marks around it.
            opening: Rule that ends with the first call's mark; if empty, only the mark precedes the call.
        """
        mark, close = grammar.write_marks(cls.open_mark, cls.close_mark)
        if cls.layout == "list":
            comma = '", " '
            return f'{opening or mark} "[" {call}{grammar.write_repeated(comma + call)} "]" {close}'
        newline = '"\\n" ' if cls.layout == "lines" else ""
        marked = f"{newline}{call} {newline}{close}"
        return f"{opening or mark} {marked}{grammar.write_repeated(f'{newline}{mark} {marked}')}"

    @classmethod
    def write_answer(cls, grammar: GrammarBuilder, answer: str) -> str:
        """Return a Lark expression for an answer without calls, where `answer` is the rule of its text; here just that rule."""
        return answer

    @classmethod
    def write_optional_calls(cls, grammar: GrammarBuilder, call: str) -> str:
        """Return a Lark expression for tool calls, possibly after text, and for text without any call."""
        if cls.open_mark in grammar.specials:
            text = grammar.add_rule(ANY_TEXT)
            return f"{text} | {text}? {cls.write_calls(grammar, call)}"
        grammar.add_lines(f"OTHER: {ANY_TEXT} & ~/(?s:.*){re.escape(cls.open_mark)}(?s:.*)/")
        opening = grammar.add_rule("/(?s:.*)/", f"[suffix={quote(cls.open_mark)}]")
        return f"OTHER | {cls.write_calls(grammar, call, opening)}"


@lru_cache
def _get_prefixes(marks: tuple[str, ...]) -> set[str]:
    return {mark[:n] for mark in marks for n in range(1, len(mark) + 1)}
