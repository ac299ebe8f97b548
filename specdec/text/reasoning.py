"""The marks around a model's thoughts, and an incremental splitter of thoughts and answers. Independent of models.

The marks are derived from the chat template, as llama.cpp does (common/chat-diff-analyzer.cpp): an assistant's turn is rendered
with and without `reasoning_content`, and the difference has the marks. A table has those of templates that do not take it.
"""

import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from specdec.argument_checks import JSONDict
from specdec.text.chat_template import ChatTemplate, TemplateError
from specdec.text.detokenizer import find_first
from specdec.tokenizer import AnyTokenizer, RenderedSegment, StreamingDetokenizer

# precedes the name of a special token where only special tokens are marks; a lone surrogate, which no text contains
SPECIAL_TOKEN_MARK = "\udc3c"
WHITE_SPACE = " \t\r\n"  # may precede the mark of a thought
MAX_MARK_CHARS = 40
MAX_NEWLINES = 2  # between the end mark and an answer with a constraint
N_TAIL_TOKENS = 32  # of a prompt, which contain the mark that may be at its end
THOUGHT, ANSWER = "Hmm, a thought", "The answer"  # of a conversation that is rendered to find the marks
# names of the template variable that switches thoughts on and off: of most templates, and of DeepSeek's and Granite's
THINKING_OPTIONS = "enable_thinking", "thinking"
LAST_TAG = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])$")
PartKind = Literal["reasoning", "text", "unclosed"]


class TemplateMarks(NamedTuple):
    """The marks around a thought in the output of a model.

    Attributes:
        start: Precedes a thought.
        end: Follows a thought.
        before_end: Text that may precede the end mark and is no part of the thought; "" for none.
        header_end: Ends the header of the answer's message if the end mark is the beginning of that header; "" for none.
        message_end: Ends the message of a thought, in formats of messages with headers such as Harmony; "" for none.
    """

    start: str
    end: str
    before_end: str = ""
    header_end: str = ""
    message_end: str = ""

    @property
    def closing(self) -> str:
        """The text that ends a thought at its token limit."""
        return self.before_end + self.end + self.header_end


# the header of an answer may also have its format: `<|channel|>final <|constrain|>json<|message|>`
HARMONY_MARKS = TemplateMarks(
    "<|channel|>analysis<|message|>", "<|channel|>final", "<|end|><|start|>assistant", "<|message|>", "<|end|>"
)
MUSE_GLIMMER_MARKS = TemplateMarks(
    "to=self<|message|>", "to=user<|message|>", "<|eom|><|start|>assistant ", message_end="<|eom|>"
)
# by a string that templates contain
KNOWN_MARKS = {
    "to=self<|message|>": MUSE_GLIMMER_MARKS,
    "<|channel|>": HARMONY_MARKS,
    "[/THINK]": TemplateMarks("[THINK]", "[/THINK]"),
    "</seed:think>": TemplateMarks("<seed:think>", "</seed:think>"),
    "<channel|>": TemplateMarks("<|channel>thought", "<channel|>"),
    "</think>": TemplateMarks("<think>", "</think>"),
}


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks around a thought as the text of one output has them, where `SPECIAL_TOKEN_MARK` precedes each special token.

    Attributes:
        start: Precedes a thought.
        end: Follows a thought.
        opens_in_prompt: Whether the prompt ends inside a thought.
        closes_in_prompt: Whether the prompt ends after a thought, since thinking is disabled.
        closing_tokens: Token ids of a text that ends the thought.
        visible_tokens: Ids of the marks' special tokens, with their text in the output.
        before_end: Text that may precede the end mark and is no part of the thought; "" for none.
        header_end: Ends the header that the end mark begins; "" for none.
        header_end_tokens: Token ids of `header_end`.
        message_end: Ends the message of a thought, in formats of messages with headers; "" for none.
        message_end_tokens: Token ids of `message_end`.
        max_newlines: The most newlines between the last mark and an answer with a constraint.
    """

    start: str
    end: str
    opens_in_prompt: bool = False
    closes_in_prompt: bool = False
    closing_tokens: tuple[int, ...] = ()
    visible_tokens: Mapping[int, str] = field(default_factory=dict)
    before_end: str = ""
    header_end: str = ""
    header_end_tokens: tuple[int, ...] = ()
    message_end: str = ""
    message_end_tokens: tuple[int, ...] = ()
    max_newlines: int = MAX_NEWLINES

    def make_splitter(self, hold_mark: str = "") -> "ReasoningSplitter":
        """Return a new splitter for one output; see `ReasoningSplitter`."""
        ends = (self.before_end + self.end, self.end)
        return ReasoningSplitter(self.start, ends, self.opens_in_prompt, hold_mark, self.header_end, self.closes_in_prompt)

    def without_header(self) -> "ReasoningMarks":
        """Return marks where a thought ends at `message_end`, not after the header of the next message.

        They are for a grammar that matches this header itself.
        """
        return replace(self, end=self.message_end, before_end="", header_end="", closing_tokens=self.message_end_tokens)


def make_thinking_options(template: ChatTemplate, is_on: bool) -> JSONDict:
    """Return the template variables that switch thoughts on or off and that the template reads; empty if it reads none."""
    options = dict.fromkeys(THINKING_OPTIONS, is_on) | ({} if is_on else {"thinking_budget": 0})  # the last one of Seed-OSS
    return {name: value for name, value in options.items() if template.takes_variable(name)}


def find_template_marks(template: ChatTemplate) -> TemplateMarks | None:
    """Return the marks around thoughts of the model that a chat template belongs to; None if it does not think."""
    return _find_marks(template.source, template.location, tuple(template.variables.items()))


@functools.lru_cache(maxsize=16)
def _find_marks(source: str, location: str, variables: tuple[tuple[str, str], ...]) -> TemplateMarks | None:
    if "reasoning_content" in source:
        try:
            if marks := _derive_marks(ChatTemplate(source, location, dict(variables))):
                return marks
        except (TemplateError, ValueError):  # the template rejects such a conversation
            pass
    return next((marks for sign, marks in KNOWN_MARKS.items() if sign in source), None)


def _derive_marks(template: ChatTemplate) -> TemplateMarks | None:
    """Return the marks that a template writes around the `reasoning_content` of an answer; None if it writes none."""
    question, answer = {"role": "user", "content": "A question"}, {"role": "assistant", "content": ANSWER}
    without = template.render([question, answer])
    before, _, rest = template.render([question, answer | {"reasoning_content": THOUGHT}]).partition(THOUGHT)
    end, is_before_answer, _ = rest.partition(ANSWER)
    n_common = next((i for i, pair in enumerate(zip(before, without, strict=False)) if pair[0] != pair[1]), len(before))
    start, end = before[n_common:].strip(), end.strip()
    # where there is no thought, the template writes an empty one, or a tag that begins alike
    if (match := LAST_TAG.search(before.rstrip())) and match[0].endswith(start):
        start = match[0]
    is_valid = is_before_answer and all(1 < len(mark) <= MAX_MARK_CHARS for mark in (start, end))
    return TemplateMarks(start, end) if is_valid else None


def find_reasoning_marks(template: ChatTemplate, tokenizer: AnyTokenizer, prompt: list[int]) -> ReasoningMarks | None:
    """Return the marks around a thought in the output after a prompt; None for a model that does not think.

    Args:
        template: The model's chat template.
        tokenizer: The model's tokenizer.
        prompt: The token ids of the rendered prompt.
    """
    if not (marks := find_template_marks(template)):
        return None
    specials = tokenizer.specials
    visible = {name: SPECIAL_TOKEN_MARK + name for name in specials if name and any(name in mark for mark in marks)}
    stream = StreamingDetokenizer(tokenizer, {token: name for name, token in specials.items()})
    tail = "".join([stream.push(token) for token in prompt[-N_TAIL_TOKENS:]]).rstrip()
    return ReasoningMarks(
        _replace_names(marks.start, visible),
        _replace_names(marks.end, visible),
        tail.endswith(marks.start),
        tail.endswith(marks.end),
        _encode_mark(tokenizer, marks.closing),
        {specials[name]: text for name, text in visible.items()},
        _replace_names(marks.before_end, visible),
        _replace_names(marks.header_end, visible),
        _encode_mark(tokenizer, marks.header_end),
        _replace_names(marks.message_end, visible),
        _encode_mark(tokenizer, marks.message_end),
        0 if marks.message_end else MAX_NEWLINES,
    )


def _replace_names(mark: str, visible: Mapping[str, str]) -> str:
    names = sorted(visible, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, names)) or r"(?!)", lambda match: visible[match[0]], mark)


def _encode_mark(tokenizer: AnyTokenizer, mark: str) -> tuple[int, ...]:
    """Return the token ids of a mark in the middle of a text, without a space that the tokenizer adds at a start."""
    newline, tokens = (tokenizer.encode_rendered([RenderedSegment(text, False)]) for text in ("\n", f"\n{mark}"))
    is_prefix = tokens[: len(newline)] == newline
    return tuple(tokens[len(newline) :] if is_prefix else tokenizer.encode_rendered([RenderedSegment(mark, False)]))


class ReasoningSplitter:
    """A splitter of streamed output into a thought, which can only be at its beginning, and the answer after it.

    Each piece is returned as soon as it cannot become part of a mark. Newlines at both ends of the thought are dropped, and those
    before the answer. Without a thought the text is returned as it is. An output that begins with an end mark has an empty
    thought.

    Args:
        start: The mark before the thought.
        ends: The marks after the thought; the first one in the output ends it.
        is_open: Whether the output begins inside the thought.
        hold_mark: A mark, such as that of a tool call, from which on a thought is held back until its end; "" for none. If the
            thought has no end, what was held back is returned as "unclosed".
        header_end: Ends the header that an end mark begins, and that is dropped; "" for none.
        drops_ends: Whether end marks in the answer are dropped, which models write although thinking is disabled.

    Attributes:
        phase: Whether the output is before a possible thought, in it, held back in it, in the header after its end mark, after
            both, or in the answer.
    """

    def __init__(
        self,
        start: str,
        ends: Sequence[str],
        is_open: bool = False,
        hold_mark: str = "",
        header_end: str = "",
        drops_ends: bool = False,
    ) -> None:
        """Start before the first text."""
        self._dropped_marks = ends if drops_ends else ()
        self._start, self._ends, self._hold_mark, self._header_end = start, [*dict.fromkeys(ends)], hold_mark, header_end
        self.phase: Literal["before", "thought", "held", "header", "after", "answer"] = "thought" if is_open else "before"
        self._pending, self._held, self._has_reasoning = "", list[str](), False
        self._n_characters, self._token_starts, self._token_ends = 0, list[int](), list[int]()  # up to the end of the thought
        self._thought_start: int | None = 0 if is_open else None  # an offset in the output
        self._thought_end: int | None = None

    @property
    def is_reasoning(self) -> bool:
        """Whether the output is inside the thought."""
        return self.phase in ("thought", "held")

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the thought so far, without those of its marks."""
        if (start := self._thought_start) is None:
            return 0
        end = self._n_characters if self._thought_end is None else self._thought_end
        return max(bisect_right(self._token_ends, end) - bisect_left(self._token_starts, start), 0)

    def push(self, text: str, is_token: bool = True) -> list[tuple[PartKind, str]]:
        """Take more of the output, and return the parts that are now certain, each with its kind.

        Args:
            text: The text.
            is_token: Whether the text is that of one token, which counts for `n_tokens`.
        """
        parts = list[tuple[PartKind, str]]()
        if is_token and self.phase in ("before", "thought", "held"):
            self._token_starts.append(self._n_characters)
            self._token_ends.append(self._n_characters + len(text))
        self._n_characters += len(text)
        self._pending += text
        if self.phase == "before":
            self._read_start(parts)
        if self.phase == "thought":
            self._read_thought(parts)
        if self.phase == "held":
            self._read_held(parts)
        if self.phase == "header":
            self._read_header()
        if self.phase == "after":
            self._pending = self._pending.lstrip("\r\n")
            self.phase = "answer" if self._pending else "after"
        if self.phase == "answer":
            self._read_answer(parts)
        return parts

    def end(self) -> list[tuple[PartKind, str]]:
        """Return the parts that are pending when the output ends."""
        pending, self._pending = self._pending, ""
        match self.phase:
            case "before" | "answer":
                return [("text", pending)] if pending else []
            case "thought":
                return [("reasoning", thought)] if (thought := pending.rstrip("\r\n")) else []
            case "held":
                return [("unclosed", "".join([*self._held, pending]))]
        return []

    def _read_start(self, parts: list[tuple[PartKind, str]]) -> None:
        stripped, marks = self._pending.lstrip(WHITE_SPACE), (self._start, *self._ends)
        if mark := next((each for each in marks if stripped.startswith(each)), ""):
            self._pending = stripped[len(mark) :]
            self.phase = "thought" if mark == self._start else "header"
            self._thought_start = self._n_characters - len(self._pending) if self.phase == "thought" else None
        elif not any(each.startswith(stripped) for each in marks):
            self.phase = "answer"

    def _read_thought(self, parts: list[tuple[PartKind, str]]) -> None:
        """Move the text up to the next mark from the pending text to the parts; what may become a mark stays."""
        text = self._pending if self._has_reasoning else self._pending.lstrip("\r\n")
        marks = [mark for mark in (*self._ends, self._hold_mark) if mark]
        n_before, mark = find_first(text, marks)
        if mark and mark != self._hold_mark:
            self._thought_end = self._n_characters - len(text) + n_before
        thought = text[:n_before]
        if mark != self._hold_mark or not mark:  # newlines may be the last of the thought
            thought = thought.rstrip("\r\n")
        if thought:
            self._has_reasoning = True
            parts.append(("reasoning", thought))
        if not mark:
            self._pending = text[len(thought) :]
        elif mark != self._hold_mark:
            self.phase, self._pending = "header", text[n_before + len(mark) :]
        else:
            self.phase, self._pending = "held", text[n_before:]

    def _read_held(self, parts: list[tuple[PartKind, str]]) -> None:
        n, mark = find_first(self._pending, self._ends)
        if mark:
            self._thought_end = self._n_characters - len(self._pending) + n
        self._held.append(self._pending[:n])
        self._pending = self._pending[n:]
        if mark:
            parts.append(("reasoning", "".join(self._held).rstrip("\r\n")))
            self.phase, self._pending = "header", self._pending[len(mark) :]

    def _read_answer(self, parts: list[tuple[PartKind, str]]) -> None:
        is_end = False
        while not is_end:
            n, mark = find_first(self._pending, self._dropped_marks)
            if n:
                parts.append(("text", self._pending[:n]))
            self._pending = self._pending[n + len(mark) :]
            is_end = not mark

    def _read_header(self) -> None:
        if self._header_end:
            n, mark = find_first(self._pending, [self._header_end])
            self._pending = self._pending[n + len(mark) :]
            if not mark:
                return
        self.phase = "after"
