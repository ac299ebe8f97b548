"""Shapes of texts: JSON by a schema, any JSON object, what a regex matches. Knows nothing of models.

The package llguidance says which tokens may follow. Where a shape leaves one continuation it allows one token alone, the first of
how the tokenizer would write that continuation, so that the text is written as the model has learnt to.
"""

import functools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from queue import LifoQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specdec import validation
from specdec.engine.decoding import Shape, Walk
from specdec.loaders import optional_dependencies
from specdec.text.grammar_worker import matcher_of
from specdec.text.worker_process import Lost, Unanswered, Worker
from specdec.tokenizer import NO_TEXT_YET, AnyTokenizer
from specdec.verification import Draft

NEEDS = {optional_dependencies.GUIDANCE: "to write in a shape"}
MOST_SCHEMA, MOST_PATTERN = 100_000, 10_000  # characters
MOST_REPEATED = 100_000  # times that a part of a pattern may stand
BUILDING_SECONDS = 3.0
BUILDERS = 2  # shapes that are built at once
KEPT_SHAPES, KEPT_REFUSALS, KEPT_VOCABULARIES, KEPT_SPELLINGS = 16, 64, 4, 4096
TRIED = 32  # tokens that a shape forces are tried before it is believed
ATTEMPTS = 2
LEAST_SPELLED = 32  # characters: so far ahead, and two of the longest tokens, the tokenizer writes what must follow
ANY_OBJECT = {"type": "object"}
STYLE = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": False, "lenient": False,
}  # fmt: skip
# by a mask's bytes, a token a bit: 17 us for 49,152 tokens, of which numpy's own masks take 30 to 280
LIMITS_OF_BITS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(np.inf), np.float32(-np.inf))
SPECIAL = b"\xff"  # what llguidance begins the names of special tokens with; no text holds it
Value = TypeVar("Value")
# of a regex: what repeats or may hold a repetition, and whatever else
_PARTS = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(|\{(\d{1,18})(?:,(\d{0,18}))?\}|.", re.DOTALL)


class ShapeError(ValueError):
    """A shape that a text cannot be written in: it begins with what the text loses, or cannot go on."""


class GuidedShape:
    """A grammar that has been built for a tokenizer; see `decoding.Shape`. Texts share what its lexer finds out on the way."""

    def __init__(self, vocabulary: "_Vocabulary", grammar: str) -> None:
        self.vocabulary, self._grammar = vocabulary, grammar
        self.renew()

    def begin(self, prompt: list[int]) -> Walk:
        walk = GuidedWalk(self)
        if self.vocabulary.loses_space(prompt) and (walk.allowed() & self.vocabulary.spaced).any():
            raise ShapeError("the shape may begin with a space, which a text without a prompt loses; give it a prompt")
        return walk

    def renew(self) -> None:
        """Forget what was found out: one text may have used up all room for it. Raises ValueError."""
        try:
            self._matcher = matcher_of(self.vocabulary.guidance, self._grammar)
        except ValueError as error:
            raise self.vocabulary.told() or error from None

    def matcher(self) -> Any:
        """llguidance's, at the beginning of a text."""
        return self._matcher.deep_copy()


class GuidedWalk:
    """Where a text stands in its shape; see `decoding.Walk`.

    A matcher that has failed stays so. It may have failed at what was proposed alone, or for what other texts found out: so it
    is made anew, once, before that is believed.
    """

    def __init__(self, shape: GuidedShape) -> None:
        self._shape, self._matcher = shape, shape.matcher()
        self._n = len(shape.vocabulary.tokens)
        self._words = np.empty(-(-self._n // 32), "<u4")
        self._taken = list[int]()
        self.trouble: Exception | None = None

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Any:
        """Which tokens may follow: (V,) bool. Raises ValueError."""
        return self._limits() > 0

    def _limits(self) -> Any:
        """What the logits of tokens may be at most: (V,) float32, infinite, or -inf of those that may not follow."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        return LIMITS_OF_BITS.take(self._words.view(np.uint8), axis=0, mode="clip").reshape(-1)[: self._n]

    def forced(self, most: int) -> list[int]:
        for _ in range(ATTEMPTS):
            tokens, matcher = list[int](), self._matcher
            while len(tokens) < most and (ahead := matcher.compute_ff_tokens()) and matcher.try_consume_tokens(ahead[:1]):
                tokens.append(ahead[0])
            if self._goes_back(len(tokens)):
                return tokens
        return []

    def n_allowed(self, tokens: list[int]) -> int:
        n = int(self._matcher.validate_tokens(tokens))
        return n if self._goes_back(0) else 0

    def find_end(self, tokens: list[int]) -> int | None:
        for _ in range(ATTEMPTS):
            n, is_over = 0, self.is_over
            while not is_over and n < len(tokens) and self._matcher.try_consume_tokens(tokens[n : n + 1]):
                n, is_over = n + 1, self.is_over
            if self._goes_back(n):
                return n if is_over else None
        return None

    def mask(self, logits: Any, draft: Draft) -> None:
        self.trouble = None
        for _ in range(ATTEMPTS):
            done = set[int]()
            try:
                self._mask_behind(logits, draft, -1, done)
                return
            except ValueError as error:
                self.trouble = error
            self._anew()
        if self.trouble and -1 not in done:
            raise self.trouble
        logits[[row for row in range(len(logits)) if row - 1 not in done]] = -np.inf  # which may be proposed for nothing

    def _mask_behind(self, logits: Any, draft: Draft, node: int, done: set[int]) -> None:
        """The row of a proposed token, or, of -1, that behind the text; then those of what is proposed behind it."""
        row = logits[node + 1]
        if not np.isfinite(row.max()):  # damaged weights are to be told of
            return
        limits, n = self._limits(), min(self._n, len(row))
        np.minimum(row[:n], limits[:n], out=row[:n])
        row[n:] = -np.inf
        done.add(node)
        for child in draft.children(node):
            if child + 1 < len(logits) and self._matcher.try_consume_tokens([draft.tokens[child]]):
                self._mask_behind(logits, draft, child, done)
                self._matcher.rollback(1)

    def takes(self, tokens: list[int]) -> None:
        self._taken += tokens
        if not self._matcher.consume_tokens(tokens):
            self._anew()

    def _goes_back(self, n: int) -> bool:
        """Back by n tokens; of a matcher that has failed to where the text stands, and it has to be asked again."""
        if self._matcher.is_error():
            self._anew()
            return False
        return not n or bool(self._matcher.rollback(n))

    def _anew(self) -> None:
        """A matcher that has found out nothing, where the text stands. Raises ValueError."""
        self._shape.renew()
        self._matcher = self._shape.matcher()
        self._matcher.consume_tokens(self._taken)
        self._check()

    def _check(self) -> None:
        """Raises ValueError where nothing fits any more, which llguidance takes for an end."""
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            raise self._shape.vocabulary.told() or ShapeError(f"the shape cannot go on: {reason}")


class _Vocabulary:
    """A tokenizer as llguidance takes one, by the names that it asks for: the bytes of each token, and how a text is written.

    spaced: (V,) which tokens begin with a space.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        import llguidance

        said = [tokenizer.says(token) or b"" for token in range(tokenizer.vocab_size)]
        self.tokens = [b"" if each.startswith(SPECIAL) else each for each in said]
        marks = [token for token in tokenizer.end_marks if token < len(said)]
        if not marks:
            marks = [len(self.tokens)]
            self.tokens.append(b"")
        self.eos_token_id, self.special_token_ids = marks[0], list[int]()
        self.tokenizer = tokenizer
        self._spellings: dict[str, list[int]] = {}
        self.spaced = np.array([each.startswith(b" ") for each in self.tokens])
        self._trouble: Exception | None = None
        self.guidance = llguidance.LLTokenizer(self, eos_token=marks)

    def __call__(self, text: str) -> list[int]:
        text = text[: max(LEAST_SPELLED, 2 * self._longest)]
        if (spelled := self._spellings.get(text)) is None:
            if len(self._spellings) >= KEPT_SPELLINGS:
                self._spellings.clear()
            try:
                spelled = self._spellings[text] = self._spelled(text)
            except Exception as error:
                self._trouble = error
                raise
        return spelled

    def told(self) -> Exception | None:
        """What went wrong within the last call, of which llguidance makes an error of its own."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def _spelled(self, text: str) -> list[int]:
        """The tokens of a text that is no text's beginning."""
        data = text.encode()
        for before in ("", "\n"):  # behind which no tokenizer puts a space
            ids = [token for token in self.tokenizer.encode(before + text) if self.tokens[token]]
            for i in range(min(len(ids), len(before) + 2)):
                if b"".join([self.tokens[token] for token in ids[i:]]) == data:
                    return ids[i:]
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                raise ValueError(f"{self.tokenizer.path} has no token for the byte {data[at]}, which the shape wants")
            ids.append(self._ids[data[at:end]])
            at = end
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {each: token for token, each in enumerate(self.tokens) if each}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))

    def loses_space(self, prompt: list[int]) -> bool:
        """Whether a text that goes on behind those tokens would begin without the space of its first token."""
        before = NO_TEXT_YET
        for token in prompt:
            before = self.tokenizer.piece(token, before)[1]
        spaced = int(self.spaced.argmax())
        return bool(self.spaced[spaced]) and self.tokenizer.piece(spaced, before)[0] != self.tokens[spaced]


def check_shape(shape: Shape | None, tokenizer: AnyTokenizer) -> None:
    """Raises TypeError for what is no shape, ValueError for one of other tokens."""
    if shape is not None and not callable(getattr(shape, "begin", None)):
        raise TypeError(f"shape is {validation.short(shape, repr)}; expected what json_schema, json_object or regex makes")
    if isinstance(shape, GuidedShape) and shape.vocabulary.tokenizer is not tokenizer:
        raise ValueError("the shape was made for another tokenizer; make it by this decoder's json_schema, json_object or regex")


class Cost:
    """CPU seconds that a grammar's building took: of the process that tries it, and of the thread within."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.seconds -= time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time()


class Grammar(NamedTuple):
    """What a shape is built from. kind: "regex", of which `said` is the text, or "schema" or "tools", in words of
    llguidance. of: whom each of its lines is of, for errors."""

    tokenizer: AnyTokenizer
    kind: str
    said: str
    of: tuple[str, ...] = ()

    @property
    def param(self) -> str:
        """The parameter of a request that asks for it."""
        return "tools" if self.kind == "tools" else "response_format"

    def kept(self) -> GuidedShape | None:
        """The shape, if somebody has built it. Raises ValueError where it was refused."""
        with _KEEPING:
            if self in _SHAPES:
                _SHAPES.move_to_end(self)
                return _SHAPES[self]
            if refused := _REFUSALS.get(self):
                raise ValueError(refused)
        return None

    def built(self) -> GuidedShape:
        """The shape, one for all who ask: texts share what its lexer has found out. Raises ValueError, in a line."""
        return self.build(Cost())

    def build(self, cost: Cost) -> GuidedShape:
        """Return what `built` does, and add what that took to the cost."""
        if lacking := optional_dependencies.missing(NEEDS):
            raise ValueError(lacking)
        if (shape := self.kept()) is not None:
            return shape
        try:
            shape = self._new(cost)
        except Lost:
            raise
        except ValueError as error:
            refused = f"the {self.kind} cannot be used: {self._blamed(str(error))}{_reason(str(error))}"
            with _KEEPING:
                _keep(_REFUSALS, self, refused, KEPT_REFUSALS)
            raise ValueError(refused) from None
        with _KEEPING:
            return _keep(_SHAPES, self, shape, KEPT_SHAPES)

    def _blamed(self, error: str) -> str:
        """Whom the line is of that an error names."""
        found = re.match(r"(?:at )?(\d{1,9})\(", error)
        return self.of[int(found[1]) - 1] if found and 0 < int(found[1]) <= len(self.of) else ""

    def _new(self, cost: Cost) -> GuidedShape:
        import llguidance

        with cost:
            grammar = self.said if self.kind != "regex" else llguidance.LLMatcher.grammar_from_regex(self.said)
        worker, answer = _BUILDERS.get(), dict[str, Any]()
        try:
            answer = worker.ask({"grammar": grammar, "n": self.tokenizer.vocab_size}, BUILDING_SECONDS)
        except Unanswered as error:
            raise ValueError("it takes too long to build" if error.is_late else "it needs too much memory") from None
        finally:
            _BUILDERS.put(worker)
            cost.seconds += answer.get("seconds", BUILDING_SECONDS)
        if "error" in answer:
            raise ValueError(answer["error"])
        vocabulary = _vocabulary(self.tokenizer)  # which is no grammar's cost
        with cost:
            shape = GuidedShape(vocabulary, grammar)
            walk = GuidedWalk(shape)
            walk.takes(walk.forced(TRIED))
            if not walk.is_over:
                walk.allowed()
        return shape


def json_schema(tokenizer: AnyTokenizer, schema: Mapping[str, Any]) -> GuidedShape:
    """One JSON value by a schema (JSON Schema, as far as llguidance does it), without space but behind "," and ":".

    Raises ValueError, in a line, for a schema that cannot be used, and where llguidance is missing.
    """
    return grammar_of(tokenizer, schema).built()


def json_object(tokenizer: AnyTokenizer) -> GuidedShape:
    """Any one JSON object, written as `json_schema` says."""
    return json_schema(tokenizer, ANY_OBJECT)


def grammar_of(tokenizer: AnyTokenizer, schema: Mapping[str, Any]) -> Grammar:
    """That of a schema, not built yet. Raises ValueError, in a line, for one that is none."""
    return Grammar(tokenizer, "schema", f'{{"grammars": [{{"json_schema": {checked_schema(schema)}}}]}}')


def is_installed() -> bool:
    """Whether shapes can be built."""
    return not optional_dependencies.missing(NEEDS)


def checked_schema(schema: Mapping[str, Any], is_lenient: bool = False) -> str:
    """A schema as llguidance takes it, in JSON. is_lenient: what it does not know is passed over.

    Raises ValueError and TypeError for what is none.
    """
    if not isinstance(schema, Mapping):
        raise TypeError(f"the schema is {validation.short(schema, repr)}; expected an object")
    if "x-guidance" in schema:
        raise ValueError("the schema uses x-guidance, which is not supported")
    try:
        text = json.dumps({**schema, "x-guidance": {**STYLE, "lenient": is_lenient}}, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (RecursionError, TypeError, ValueError) as error:
        nested = "it is nested beyond all bounds"
        reason = nested if isinstance(error, RecursionError) else validation.short(error)
        raise ValueError(f"the schema is no JSON: {reason}") from None
    if len(text) > MOST_SCHEMA:
        raise ValueError(f"the schema has {len(text)} characters; at most {MOST_SCHEMA} are read")
    for pattern in _patterns(schema):
        _check_repeats(f"the schema's pattern {validation.short(pattern, repr)}", pattern)
    return text


def regex(tokenizer: AnyTokenizer, pattern: str) -> GuidedShape:
    """What a pattern of Rust's regex syntax matches as a whole; without look-around. Raises ValueError, in a line."""
    validation.text("the regex", pattern)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance drops it
        raise ValueError(f"the regex {validation.short(pattern, repr)} ends in a backslash; expected what it escapes")
    if len(pattern) > MOST_PATTERN:
        raise ValueError(f"the regex has {len(pattern)} characters; at most {MOST_PATTERN} are read")
    _check_repeats("the regex", pattern)
    return Grammar(tokenizer, "regex", pattern).built()


def _keep(kept: OrderedDict[Grammar, Value], grammar: Grammar, value: Value, most: int) -> Value:
    """The value, or the one that somebody else has kept meanwhile."""
    value = kept.setdefault(grammar, value)
    while len(kept) > most:
        kept.popitem(last=False)
    return value


_SHAPES, _REFUSALS = OrderedDict[Grammar, GuidedShape](), OrderedDict[Grammar, str]()  # what was used last is the last
_KEEPING = threading.Lock()
_BUILDERS = LifoQueue[Worker]()  # the last one that worked has begun
for _ in range(BUILDERS):
    _BUILDERS.put(Worker("grammar_worker"))
_VOCABULARY = threading.Lock()


def _vocabulary(tokenizer: AnyTokenizer) -> _Vocabulary:
    """Return the vocabulary of a tokenizer. Who comes while one is made waits for it, so that none is made twice."""
    with _VOCABULARY:
        return _made(tokenizer)  # type: ignore[arg-type]


_made = functools.lru_cache(KEPT_VOCABULARIES)(_Vocabulary)


def _reason(words: str) -> str:
    """What is wrong, of what llguidance says in several lines."""
    if found := re.search(r"Unimplemented keys: \[(.*?)\]", words):
        keys = found[1].replace('"', "")
        return f"it uses {keys}, which {'are' if ',' in keys else 'is'} not supported"
    if "NoExtension" in words:
        return "nothing fits it"
    line = next((line for line in reversed(words.split("\n")) if line.startswith("error: ")), words.split("\n")[0])
    line = re.sub(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?", "", line.removeprefix("error: "))
    line = " ".join(line.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def _patterns(schema: Any) -> list[str]:
    """All regexes that a schema names."""
    found, todo = list[str](), [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            pattern, properties = value.get("pattern"), value.get("patternProperties")
            found += [pattern] if isinstance(pattern, str) else []
            found += properties if isinstance(properties, Mapping) else []
        if isinstance(value, Mapping | list):
            todo += value.values() if isinstance(value, Mapping) else value
    return found


def _check_repeats(name: str, pattern: str) -> None:
    """Refuses counts whose product, of a part within a part, is so large that it would take seconds to write what is forced."""
    levels = list[int]()  # of the groups around this one
    most, last = 1, 1  # times that something within this group stands, and that the last atom does
    for part in _PARTS.finditer(pattern):
        if part[0][0] == "(":
            levels.append(most)
            most = last = 1
        elif part[0] == ")":
            last, most = most, max(most, levels.pop() if levels else 1)
        elif part[0][0] == "{":
            last *= max(1, *(int(n or 0) for n in part.groups()))
            most = max(most, last)
        else:
            last = 1
        if most > MOST_REPEATED:
            raise ValueError(f"{name} repeats a part {most} times; at most {MOST_REPEATED}")
