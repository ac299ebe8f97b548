"""Constraints on outputs that begin with a thought: they apply after its end mark, and the thought has a token limit.

All of it is a function of the tokens so far, so the output is the target's own with any draft. In a draft, the end mark may be at
any position: the rows before it are free, and the inner constraint masks the part of the draft after it.
"""

import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from specdec.protocols import Constraint, ConstraintState
from specdec.text.reasoning import MAX_NEWLINES, SPECIAL_TOKEN_MARK, WHITE_SPACE, ReasoningMarks
from specdec.tokenizer import AnyTokenizer
from specdec.verification import Draft

MAX_SPACES = 8  # tokens of white space before a start mark, if the answer has a constraint
MAX_HEADER_TOKENS = 8  # of the header that an end mark begins; then its end is forced
Phase = Literal["before", "thought", "header", "after", "answer"]


class Position(NamedTuple):
    """A position in an output that may begin with a thought.

    Attributes:
        phase: Whether the position is before a possible thought or in its start mark, in the thought, in the header after its end
            mark, behind both or newlines after them, or in the answer.
        n: Number of tokens so far in the thought or in the header, or of newlines after them.
        tail: The last bytes of the output, which may be a part of a mark.
        start: The tokens before a possible thought, if the answer has a constraint: they may also belong to the answer.
    """

    phase: Phase
    n: int = 0
    tail: bytes = b""
    start: tuple[int, ...] = ()


SPECIAL_TOKEN_BYTE = b"\xff"  # precedes the name of a special token; no text in UTF-8 contains it
ANSWER_POSITION = Position("answer")
THOUGHT_PHASES = ("thought", "header")  # without the inner constraint


class MarkTokens(NamedTuple):
    """The tokens of a vocabulary that can be part of the marks of a thought, or of the newlines after them.

    Attributes:
        continuing: The tokens that continue a start mark, by the bytes of the mark before them. A token that completes the mark
            may have text after it.
        banned: The tokens that complete the last mark and have text after it, by the number of bytes of the mark before them.
        newlines: The number of newlines of each token that has nothing else.
    """

    continuing: dict[bytes, list[int]]
    banned: dict[int, list[int]]
    newlines: dict[int, int]


class ReasoningConstraint:
    """A constraint on the answer after a thought, and on the number of tokens of the thought; implements `protocols.Constraint`.

    A model that opens its thoughts itself may also answer at once. Then the inner constraint holds from the start. Marks are
    found in the text, whatever its tokens are.

    Args:
        marks: The marks around the thought.
        tokenizer: The tokenizer of the sequence.
        inner: The constraint of the answer; None for any answer.
        budget: The maximum number of tokens of the thought; then its end is forced. None for no limit.
        is_required: Whether the output must have an answer, so that it cannot end in its thought.

    Attributes:
        tokenizer: The tokenizer of the sequence.
        inner: The constraint of the answer; None for any answer.
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        tokenizer: AnyTokenizer,
        inner: Constraint | None = None,
        budget: int | None = None,
        is_required: bool = False,
    ) -> None:
        """Decide where the thought begins, and find the tokens that overlap its end mark."""
        self.tokenizer, self.inner, self._marks, self._budget = tokenizer, inner, marks, budget
        self._is_required, self._end, self._header_end = is_required, _to_bytes(marks.end), _to_bytes(marks.header_end)
        self.start = Position("thought") if marks.opens_in_prompt else Position("before")
        starts: list[tuple[bytes, Phase]] = [(_to_bytes(marks.start), "thought")]
        # an answer without a thought may have the header too
        self._starts = starts + ([(self._end, "header")] if self._header_end else [])
        self._tokens = MarkTokens({}, {}, {})
        if inner:
            mark_texts = tuple(mark for mark, _ in self._starts)
            visible = tuple((token, _to_bytes(text)) for token, text in marks.visible_tokens.items())
            self._tokens = _find_tokens(tokenizer, mark_texts, self._header_end or self._end, visible)  # type: ignore[arg-type]
        self._eos_tokens = [*tokenizer.eos_tokens] if inner and is_required else []

    def with_inner(self, inner: Constraint) -> "ReasoningConstraint":
        """Return a copy with another constraint of the answer."""
        return ReasoningConstraint(self._marks, self.tokenizer, inner, self._budget, self._is_required)

    def begin(self, prompt: list[int]) -> ConstraintState:
        """Start a new sequence with this prompt and return its state in the constraint."""
        return ReasoningConstraintState(self, self.inner.begin(prompt) if self.inner else None)

    def advance(self, position: Position, token: int) -> Position:
        """Return the position after a token, which is allowed at the given one."""
        phase, n, tail, start = position
        data = tail + self._get_bytes(token)
        match phase:
            case "before":
                return self._read_start(data, (*start, token) if self.inner else ())
            case "thought" if self._budget is not None and n >= self._budget and self._header_end:  # is being closed
                is_closed = n + 1 - self._budget >= len(self._marks.closing_tokens)
                return Position("after") if is_closed else Position("thought", n + 1)
            case "thought":
                following = self._read_thought(n + 1, data)
                n_forced = n + 1 - self._budget if self._budget is not None else 0
                is_closed = n_forced >= len(self._marks.closing_tokens) > 0
                return Position("after") if is_closed and following.phase == "thought" else following
            case "header":
                return self._read_header(n + 1, data)
            case "after" if n + self._tokens.newlines.get(token, MAX_NEWLINES + 1) <= self._marks.max_newlines:
                return Position("after", n + self._tokens.newlines[token])
        return ANSWER_POSITION

    def _read_start(self, data: bytes, start: tuple[int, ...]) -> Position:
        """Return the position after `data`, all text so far before a possible thought, and its tokens `start`."""
        data = data.lstrip(WHITE_SPACE.encode())
        for mark, phase in self._starts:
            if data.startswith(mark):
                rest = data[len(mark) :]
                return self._read_thought(0, rest) if phase == "thought" else self._read_header(0, rest)
        may_begin = any(mark.startswith(data) for mark, _ in self._starts) and (data or len(start) <= MAX_SPACES)
        return Position("before", 0, data, start) if may_begin else ANSWER_POSITION

    def _read_thought(self, n: int, data: bytes) -> Position:
        """Return the position after `n` tokens of a thought, with `data` as the last bytes, which may have the end mark."""
        _, is_end, rest = data.partition(self._end)
        if not is_end:
            return Position("thought", n, data[1 - len(self._end) :])
        return self._read_header(0, rest) if self._header_end else self._begin_answer(rest)

    def _read_header(self, n: int, data: bytes) -> Position:
        """Return the position after `n` tokens of a header, with `data` as the last bytes, which may have its end."""
        _, is_end, rest = data.partition(self._header_end)
        return self._begin_answer(rest) if is_end else Position("header", n, data[1 - len(self._header_end) :])

    def _begin_answer(self, rest: bytes) -> Position:
        """Return the position after the last mark and `rest`, the bytes after the mark in the same token."""
        return ANSWER_POSITION if rest.strip(b"\n") and not self.inner else Position("after", len(rest))

    def get_forced_token(self, position: Position) -> int | None:
        """Return the only token that may follow in a thought or a header that is at its limit; None at other positions.

        It is the next token of the text that ends the thought or the header.
        """
        phase, n, _, _ = position
        if phase == "thought" and self._budget is not None and n >= self._budget:
            return next(iter(self._marks.closing_tokens[n - self._budget :]), None)
        if phase == "header" and n >= MAX_HEADER_TOKENS and self.inner:
            return next(iter(self._marks.header_end_tokens[n - MAX_HEADER_TOKENS :]), None)
        return None

    def get_banned_tokens(self, position: Position) -> list[int]:
        """Return the tokens that may not follow in a thought or a header.

        These are the tokens that complete the last mark and begin the answer, and EOS if there must be an answer.
        """
        banned, last = [*self._eos_tokens], self._header_end or self._end
        if position.phase == ("header" if self._header_end else "thought"):
            for n, tokens in self._tokens.banned.items():
                banned += tokens if position.tail.endswith(last[:n]) else []
        return banned

    def get_free_tokens(self, position: Position) -> list[int]:
        """Return the tokens that may follow whether or not the inner constraint allows them: of a start mark, or of newlines.

        The position must be before a possible thought, or after it and before the answer.
        """
        if position.phase == "before":  # GLM writes a newline before its mark
            spaces = [] if position.tail or len(position.start) >= self._marks.max_newlines else [*self._tokens.newlines]
            return self._tokens.continuing.get(position.tail, []) + spaces
        return [token for token, n in self._tokens.newlines.items() if position.n + n <= self._marks.max_newlines]

    def _get_bytes(self, token: int) -> bytes:
        if text := self._marks.visible_tokens.get(token):
            return _to_bytes(text)
        return _get_token_bytes(self.tokenizer, token)


class ReasoningConstraintState:
    """The progress of one sequence through its thought, then through the inner constraint; a `protocols.ConstraintState`.

    Args:
        constraint: The constraint.
        inner: The state of the inner constraint, which is at its start until the answer begins; None for any answer.
    """

    def __init__(self, constraint: ReasoningConstraint, inner: ConstraintState | None) -> None:
        """Start where the prompt ends: in the thought, or before it."""
        self._constraint, self._inner, self._position = constraint, inner, constraint.start

    @property
    def error(self) -> Exception | None:
        """The error that the inner constraint's state has stored, or None."""
        return self._inner.error if self._inner else None

    @property
    def is_complete(self) -> bool:
        """Whether the answer satisfies the inner constraint and may only end; False without an inner constraint."""
        return bool(self._position.phase == "answer" and self._inner and self._inner.is_complete)

    def get_forced_tokens(self, max_n: int) -> list[int]:
        """Return the next tokens, at most `max_n`, for which the budget or the inner constraint leaves no choice."""
        if self._position.phase == "answer":
            return self._inner.get_forced_tokens(max_n) if self._inner else []
        tokens, position = list[int](), self._position
        while len(tokens) < max_n and (token := self._constraint.get_forced_token(position)) is not None:
            tokens.append(token)
            position = self._constraint.advance(position, token)
        return tokens

    def _split_answer(self, tokens: list[int]) -> tuple[int, list[int] | None]:
        """Split tokens that follow the sequence at the start of the answer.

        Returns:
            The number of allowed tokens before the answer, and the tokens of the answer, or None if it does not begin. If tokens
            that could become a start mark belong to the answer after all, it includes those that are in the sequence already.
        """
        position = self._position
        if position.phase == "answer":
            return 0, tokens
        for n, token in enumerate(tokens):
            if not self._is_allowed(position, token):
                return n, None
            previous, position = position, self._constraint.advance(position, token)
            if position.phase == "answer":
                return n, [*self._position.start, *tokens] if previous.phase == "before" else tokens[n:]
        return len(tokens), None

    def _is_allowed(self, position: Position, token: int) -> bool:
        """Return whether a token before the answer is allowed."""
        if (forced := self._constraint.get_forced_token(position)) is not None:
            return token == forced
        if position.phase == "before" and self._inner and token not in self._constraint.get_free_tokens(position):
            return self._inner.count_allowed([*position.start, token]) > len(position.start)
        return position.phase not in THOUGHT_PHASES or token not in self._constraint.get_banned_tokens(position)

    def count_allowed(self, tokens: list[int]) -> int:
        """Return how many of the given tokens, from the first on, may follow."""
        n, answer = self._split_answer(tokens)
        if answer is None:
            return n
        return max(n, len(tokens) - len(answer) + self._inner.count_allowed(answer)) if self._inner else len(tokens)

    def find_end(self, tokens: list[int]) -> int | None:
        """Return after how many of the given tokens the inner constraint is complete, or None if they do not complete it."""
        _, answer = self._split_answer(tokens)
        if not self._inner or answer is None or (end := self._inner.find_end(answer)) is None:
            return None
        return max(len(tokens) - len(answer) + end, 0)

    def mask_logits(self, logits: Any, draft: Draft) -> None:
        """Set the logits of tokens that may not follow to -inf, in place, in each row of a draft.

        Raises:
            ValueError: The inner constraint could not be checked in the first row.
        """
        if self._position.phase == "answer":
            if self._inner:
                self._inner.mask_logits(logits, draft)
        else:
            self._mask_subtree(logits, draft, -1, self._position)

    def _mask_subtree(self, logits: Any, draft: Draft, node: int, position: Position) -> None:
        """Mask the row of logits after a draft node (-1: after the sequence) at a position before the answer, and those below."""
        if node + 1 >= len(logits) or not np.isfinite((row := logits[node + 1]).max()):
            return
        constraint = self._constraint
        if (forced := constraint.get_forced_token(position)) is not None:
            logit = row[forced]
            row.fill(-np.inf)
            row[forced] = logit if np.isfinite(logit) else 0.0
        elif position.phase in THOUGHT_PHASES:
            row[[token for token in constraint.get_banned_tokens(position) if token < len(row)]] = -np.inf
        next_positions = {child: constraint.advance(position, draft.tokens[child]) for child in draft.children(node)}
        if self._inner and (position.phase == "after" or (position.phase == "before" and node == -1)):
            self._mask_answer(logits, draft, node, position)
        for child, following in next_positions.items():
            if following.phase != "answer":
                self._mask_subtree(logits, draft, child, following)

    def _mask_answer(self, logits: Any, draft: Draft, node: int, position: Position) -> None:
        """Apply the inner constraint to the rows from a node on where the output is in the start mark, or may be in the answer.

        Args:
            logits: The rows of logits.
            draft: The draft.
            node: The node after which the inner constraint is at its start, or -1 for the sequence.
            position: The position after the node: before a possible thought, or after it.
        """
        assert self._inner
        constraint, start = self._constraint, [*position.start]
        positions, indices, parents = {node: position}, {node: len(start) - 1}, [*range(-1, len(start) - 1)]
        for child, parent in enumerate(draft.parents or range(-1, len(draft.tokens) - 1)):
            if parent not in indices or child + 1 >= len(logits):
                continue
            following = constraint.advance(positions[parent], draft.tokens[child]) if parent in positions else ANSWER_POSITION
            if following.phase == "before":
                positions[child] = following
            elif following.phase != "answer":
                continue
            indices[child] = len(parents)
            parents.append(indices[parent])
        rows = [each + 1 for each in indices]
        part = np.concatenate([np.zeros((len(start), logits.shape[1]), logits.dtype), logits[rows]])
        tokens = start + [draft.tokens[each] for each in [*indices][1:]]
        self._inner.mask_logits(part, Draft(tokens, parents=None if draft.parents is None else parents))
        for i, each in enumerate(indices):
            if each in positions:
                prefix, row = [*positions[each].start], part[len(start) + i]
                if self._inner.count_allowed(prefix) < len(prefix):
                    row.fill(-np.inf)
                free = [token for token in constraint.get_free_tokens(positions[each]) if token < len(row)]
                row[free] = logits[each + 1, free]
        logits[rows] = part[len(start) :]

    def commit(self, tokens: list[int]) -> None:
        """Add accepted tokens to the sequence and advance its state."""
        n, start = 0, self._position.start
        while n < len(tokens) and self._position.phase != "answer":
            previous, self._position = self._position, self._constraint.advance(self._position, tokens[n])
            if self._position.phase == "answer" and previous.phase == "before":  # the start belongs to the answer
                n, tokens = 0, [*start, *tokens]
            n += self._position.phase != "answer"
        if self._inner and tokens[n:]:
            self._inner.commit(tokens[n:])


def _to_bytes(mark: str) -> bytes:
    """Return the bytes of a mark, with `SPECIAL_TOKEN_BYTE` before each special token."""
    return SPECIAL_TOKEN_BYTE.join([part.encode() for part in mark.split(SPECIAL_TOKEN_MARK)])


def _get_token_bytes(tokenizer: AnyTokenizer, token: int) -> bytes:
    """Return the bytes of a token that is no mark, which never contain `SPECIAL_TOKEN_BYTE`."""
    return (tokenizer.token_to_bytes(token) or b"").replace(SPECIAL_TOKEN_BYTE, b"\xfe")


@functools.lru_cache(maxsize=4)
def _find_tokens(
    tokenizer: AnyTokenizer, starts: tuple[bytes, ...], end: bytes, visible: tuple[tuple[int, bytes], ...]
) -> MarkTokens:
    """Return the tokens that can be part of the marks of a thought, or of the newlines after them.

    Args:
        tokenizer: The tokenizer.
        starts: The marks that the output may begin with.
        end: The last mark before the answer.
        visible: Ids of the marks' special tokens, with their text.
    """
    tokens, names = MarkTokens({}, {}, {}), dict(visible)
    by_first = dict[bytes, set[bytes]]()  # the prefixes by the byte that follows them
    for mark in starts:
        for n in range(len(mark)):
            by_first.setdefault(mark[n : n + 1], set()).add(mark[:n])
    for token in {**dict.fromkeys(range(tokenizer.vocab_size)), **names}:
        data = names.get(token) or _get_token_bytes(tokenizer, token)
        if not data:
            continue
        if not data.strip(b"\n") and len(data) <= MAX_NEWLINES:
            tokens.newlines[token] = len(data)
        for prefix in by_first.get(data[:1], ()):
            if any(mark.startswith(text := prefix + data) or text.startswith(mark) for mark in starts):
                tokens.continuing.setdefault(prefix, []).append(token)
        stripped = data.lstrip(WHITE_SPACE.encode())
        if len(stripped) < len(data) and any(stripped and (m.startswith(stripped) or stripped.startswith(m)) for m in starts):
            tokens.continuing.setdefault(b"", []).append(token)
        if end[-1:] in data[:-1]:
            for n in range(len(end)):
                before, is_end, rest = data.partition(end[n:])
                if is_end and (not before or not n) and (rest.strip(b"\n") or len(rest) > MAX_NEWLINES):
                    tokens.banned.setdefault(n, []).append(token)
    return tokens
