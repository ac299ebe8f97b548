"""The parser of one output into a thought, text and tool calls. Knows no requests."""

from collections.abc import Sequence
from dataclasses import replace

from specdec.server.tool_parsers.bare_calls import BareCallReader
from specdec.server.tool_parsers.base import Delta, ToolParser
from specdec.text.reasoning import SPECIAL_TOKEN_MARK, PartKind, ReasoningSplitter


class OutputParser:
    """A parser of one output into a thought, text and tool calls.

    A tool call in a thought is a part of it, unless the thought has no end.

    Args:
        splitter: Splits the thought from the answer; None if there is no thought, or `tool_parser` reads it.
        tool_parser: Reads the tool calls of the answer; None if there are none.
    """

    def __init__(self, splitter: ReasoningSplitter | None, tool_parser: ToolParser | None) -> None:
        """Create a parser before the first text."""
        self._splitter, self._tool_parser = splitter, tool_parser
        self._bare_calls = BareCallReader(tool_parser.tools) if tool_parser and tool_parser.open_mark else None
        self._n_parsed_tokens = 0  # of a thought that `tool_parser` reads

    @property
    def n_reasoning_tokens(self) -> int:
        """The number of tokens of the thought so far, without those of its marks."""
        return self._splitter.n_tokens if self._splitter else self._n_parsed_tokens

    def push(self, text: str, is_token: bool = True) -> list[Delta]:
        """Take more of the output, and return the pieces that are now certain.

        Args:
            text: The text.
            is_token: Whether the text is that of one token, which counts for `n_reasoning_tokens`.
        """
        if self._splitter:
            return self._parse(self._splitter.push(text, is_token))
        was_reasoning = self._tool_parser is not None and self._tool_parser.is_reasoning
        deltas = self._parse([("text", text)])
        self._n_parsed_tokens += bool(was_reasoning and self._tool_parser and self._tool_parser.is_reasoning and is_token)
        return deltas

    def end(self) -> list[Delta]:
        """Return the pieces that are pending when the output ends."""
        deltas = self._parse(self._splitter.end()) if self._splitter else []
        if self._bare_calls and self._bare_calls.deltas:
            return deltas + self._bare_calls.deltas
        if self._tool_parser:
            deltas += self._tool_parser.push(self._bare_calls.text) if self._bare_calls else []
            deltas += self._tool_parser.end()
        if self._splitter and self._splitter.is_reasoning:  # a thought without an end, which may have calls
            return [replace(each, kind="reasoning") if each.kind == "text" else each for each in deltas]
        return deltas

    def _parse(self, parts: Sequence[tuple[PartKind, str]]) -> list[Delta]:
        deltas = list[Delta]()
        for kind, text in parts:
            if self._splitter:
                text = text.replace(SPECIAL_TOKEN_MARK, "")
            if self._tool_parser and kind != "reasoning":
                if self._bare_calls and not self._bare_calls.push(text):
                    text, self._bare_calls = self._bare_calls.text, None
                if not self._bare_calls:
                    deltas += self._tool_parser.push(text)
            elif text:
                deltas.append(Delta("reasoning" if kind == "reasoning" else "text", text))
        return deltas
