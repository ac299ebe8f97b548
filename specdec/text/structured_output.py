"""Constrain completions to JSON by a schema, to any JSON object, or to a full regex match. Independent of models.

The package llguidance computes which tokens may follow. If a constraint leaves only one continuation, only one token is allowed:
the first of the tokenizer's encoding of that continuation, so that the text is tokenized as in the model's training data.
"""

import functools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specdec import argument_checks
from specdec.argument_checks import JSONObject
from specdec.loaders import optional_dependencies
from specdec.protocols import ConstraintState
from specdec.text.grammar_worker import WorkerLostError, make_matcher, try_grammar
from specdec.tokenizer import TEXT_NOT_STARTED, AnyTokenizer
from specdec.verification import Draft

REQUIRED_PACKAGES = {optional_dependencies.GUIDANCE: "for structured output"}
MAX_SCHEMA_CHARACTERS, MAX_PATTERN_CHARACTERS = 100_000, 10_000
MAX_REPEATS = 100_000  # of a part of a pattern
BUILD_TIMEOUT_S = 3.0
MAX_CONCURRENT_BUILDS = 2
MAX_CACHED_CONSTRAINTS, MAX_CACHED_ERRORS, MAX_CACHED_VOCABULARIES, MAX_CACHED_ENCODINGS = 16, 64, 4, 4096
MAX_TRIAL_TOKENS = 32  # forced tokens that are tried before a new constraint is accepted
MAX_ATTEMPTS = 2
# A forced text is encoded in parts of this length, or of twice the longest token.
MIN_ENCODED_CHARACTERS = 32
ANY_OBJECT_SCHEMA = {"type": "object"}
JSON_STYLE = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": False, "lenient": False,
}  # fmt: skip
# Indexed by a byte of the bitmask (one bit per token): 17 us for 49,152 tokens; numpy's own masks take 30 to 280 us.
MAX_LOGITS_BY_BYTE = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(np.inf), np.float32(-np.inf))
SPECIAL_TOKEN_PREFIX = b"\xff"  # of the names of special tokens in llguidance; never valid UTF-8
Value = TypeVar("Value")
# Parts of a regex: repetition counts, groups, and anything else that must be skipped as a whole.
_REGEX_PARTS = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(|\{(\d{1,18})(?:,(\d{0,18}))?\}|.", re.DOTALL)


class ConstraintError(ValueError):
    """An error for a constraint that a completion cannot satisfy: its leading space would be lost, or no token can follow."""


class GrammarConstraint:
    """A constraint on completions given by a grammar, compiled for one tokenizer; implements `protocols.Constraint`.

    All sequences share the lexer states found so far.

    Args:
        vocabulary: The tokenizer in llguidance's form.
        grammar: The grammar, as llguidance takes it.

    Raises:
        ValueError: The grammar cannot be compiled.
    """

    def __init__(self, vocabulary: "_LLGuidanceVocabulary", grammar: str) -> None:
        """Compile the grammar."""
        self.vocabulary, self._grammar = vocabulary, grammar
        self.reset()

    @property
    def tokenizer(self) -> AnyTokenizer:
        """The tokenizer that the constraint was made for."""
        return self.vocabulary.tokenizer

    def begin(self, prompt: list[int]) -> ConstraintState:
        """Start a new sequence and return its state in the constraint.

        Raises:
            ConstraintError: The completion may start with a space, and the tokenizer would drop this space after the prompt.
            ValueError: No token can follow.
        """
        state = GrammarState(self)
        if self.vocabulary.is_space_lost(prompt) and (state.get_allowed() & self.vocabulary.has_leading_space).any():
            raise ConstraintError(
                "the constraint can start with a space, which is lost in a completion without a prompt; pass a prompt"
            )
        return state

    def reset(self) -> None:
        """Compile the grammar again and discard the shared lexer states, because one sequence can use up the limit for all.

        Raises:
            ValueError: The grammar cannot be compiled.
        """
        try:
            self._matcher = make_matcher(self.vocabulary.ll_tokenizer, self._grammar)
        except ValueError as error:
            raise self.vocabulary.pop_error() or error from None

    def copy_matcher(self) -> Any:
        """Return a new llguidance matcher that is at the start of the grammar."""
        return self._matcher.deep_copy()


class GrammarState:
    """The progress of one sequence through its grammar, which decides the allowed tokens.

    It implements `protocols.ConstraintState`. An llguidance matcher that has failed stays failed. The reason can be a mere
    proposal, or lexer states of other sequences. So the matcher is rebuilt once before an error is reported.
    """

    def __init__(self, constraint: GrammarConstraint) -> None:
        """Start at the beginning of the grammar."""
        self._constraint, self._matcher = constraint, constraint.copy_matcher()
        self._vocab_size = len(constraint.vocabulary.tokens)
        self._bitmask = np.empty(-(-self._vocab_size // 32), "<u4")
        self._tokens = list[int]()
        self.error: Exception | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the output satisfies the grammar and no further token may follow."""
        return bool(self._matcher.is_stopped())

    def get_allowed(self) -> Any:
        """Return a boolean array (V,) that is True for tokens that may follow; raise ValueError if none may."""
        return self._compute_max_logits() > 0

    def _compute_max_logits(self) -> Any:
        """Return upper bounds of the next token's logits: (V,) float32, inf for tokens that may follow, else -inf.

        Raises:
            ValueError: No token may follow.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bitmask.ctypes.data, self._bitmask.nbytes)
        self._check_matcher()
        return MAX_LOGITS_BY_BYTE.take(self._bitmask.view(np.uint8), axis=0, mode="clip").reshape(-1)[: self._vocab_size]

    def get_forced_tokens(self, max_n: int) -> list[int]:
        """Return the next tokens, at most `max_n`, for which the grammar leaves no choice; the state does not change."""
        for _ in range(MAX_ATTEMPTS):
            tokens, matcher = list[int](), self._matcher
            while len(tokens) < max_n and (forced := matcher.compute_ff_tokens()) and matcher.try_consume_tokens(forced[:1]):
                tokens.append(forced[0])
            if self._rollback(len(tokens)):
                return tokens
        return []

    def count_allowed(self, tokens: list[int]) -> int:
        """Return how many of the given tokens, from the first on, the grammar allows next; the state does not change."""
        n = int(self._matcher.validate_tokens(tokens))
        return n if self._rollback(0) else 0

    def find_end(self, tokens: list[int]) -> int | None:
        """Return after how many of the given tokens the output is complete, or None if they do not complete it.

        The state does not change.
        """
        for _ in range(MAX_ATTEMPTS):
            n, is_complete = 0, self.is_complete
            while not is_complete and n < len(tokens) and self._matcher.try_consume_tokens(tokens[n : n + 1]):
                n, is_complete = n + 1, self.is_complete
            if self._rollback(n):
                return n if is_complete else None
        return None

    def mask_logits(self, logits: Any, draft: Draft) -> None:
        """Set the logits of tokens that may not follow to -inf, in place, in each row of a draft.

        Rows that could not be checked because of an error are masked entirely.

        Args:
            logits: The rows of logits (n, V): the first is the one after the sequence, the others follow the draft's tokens.
            draft: The tree of draft tokens.

        Raises:
            ValueError: The first row could not be checked. An error in another row is only stored in `error`.
        """
        self.error = None
        for _ in range(MAX_ATTEMPTS):
            masked_nodes = set[int]()
            try:
                self._mask_subtree(logits, draft, -1, masked_nodes)
                return
            except ValueError as error:
                self.error = error
            self._rebuild_matcher()
        if self.error and -1 not in masked_nodes:
            raise self.error
        logits[
            [row for row in range(len(logits)) if row - 1 not in masked_nodes]
        ] = -np.inf  # nothing after an unchecked row can be accepted

    def _mask_subtree(self, logits: Any, draft: Draft, node: int, masked_nodes: set[int]) -> None:
        """Mask the row of logits after a draft node (-1: after the sequence), then the rows of the node's descendants.

        Each masked node is added to `masked_nodes`. Rows that are not finite are skipped, with their descendants.
        """
        row = logits[node + 1]
        if not np.isfinite(row.max()):  # the verifier reports damaged weights
            return
        max_logits, n = self._compute_max_logits(), min(self._vocab_size, len(row))
        np.minimum(row[:n], max_logits[:n], out=row[:n])
        row[n:] = -np.inf
        masked_nodes.add(node)
        for child in draft.children(node):
            if child + 1 < len(logits) and self._matcher.try_consume_tokens([draft.tokens[child]]):
                self._mask_subtree(logits, draft, child, masked_nodes)
                self._matcher.rollback(1)

    def commit(self, tokens: list[int]) -> None:
        """Add accepted tokens to the sequence and advance its state.

        Raises:
            ValueError: The grammar does not allow the tokens, or no token may follow.
        """
        self._tokens += tokens
        if not self._matcher.consume_tokens(tokens):
            self._rebuild_matcher()

    def _rollback(self, n: int) -> bool:
        """Undo the matcher's last n tokens; return False if the matcher had failed and was rebuilt, so the caller must retry."""
        if self._matcher.is_error():
            self._rebuild_matcher()
            return False
        return not n or bool(self._matcher.rollback(n))

    def _rebuild_matcher(self) -> None:
        """Replace the matcher by a new one at the current position, without the lexer states of other sequences.

        Raises:
            ValueError: No token may follow, or the grammar cannot be compiled.
        """
        self._constraint.reset()
        self._matcher = self._constraint.copy_matcher()
        self._matcher.consume_tokens(self._tokens)
        self._check_matcher()

    def _check_matcher(self) -> None:
        """Raise the reason if the matcher has failed, which llguidance itself reports as the end of the output.

        Raises:
            ConstraintError: The matcher has failed; an error of the tokenizer is raised instead if there was one.
        """
        if self._matcher.is_error():
            reason = _format_reason(self._matcher.get_error())
            raise self._constraint.vocabulary.pop_error() or ConstraintError(f"the constraint cannot continue: {reason}")


class _LLGuidanceVocabulary:
    """A tokenizer with the interface that llguidance expects: the bytes of each token, and encoding by a call.

    Attributes:
        has_leading_space: (V,) whether each token starts with a space.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        import llguidance

        token_bytes = [tokenizer.token_to_bytes(token) or b"" for token in range(tokenizer.vocab_size)]
        self.tokens = [b"" if each.startswith(SPECIAL_TOKEN_PREFIX) else each for each in token_bytes]
        eos_ids = [token for token in tokenizer.eos_tokens if token < len(token_bytes)]
        if not eos_ids:  # llguidance needs one
            eos_ids = [len(self.tokens)]
            self.tokens.append(b"")
        self.eos_token_id, self.special_token_ids = eos_ids[0], list[int]()
        self.tokenizer = tokenizer
        self._encode = functools.lru_cache(MAX_CACHED_ENCODINGS)(self._encode_continuation)
        self.has_leading_space = np.array([each.startswith(b" ") for each in self.tokens])
        self._error: Exception | None = None
        self.ll_tokenizer = llguidance.LLTokenizer(self, eos_token=eos_ids)

    def __call__(self, text: str) -> list[int]:
        try:
            return self._encode(text[: max(MIN_ENCODED_CHARACTERS, 2 * self._max_token_bytes)])
        except Exception as error:
            self._error = error
            raise

    def pop_error(self) -> Exception | None:
        """Return and clear the tokenizer's error in the last encoding (or None), which llguidance hides behind its own."""
        error, self._error = self._error, None
        return error

    def _encode_continuation(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of a sequence, without the space or BOS that a tokenizer adds at a start.

        Raises:
            ValueError: The tokenizer has no token for one of the bytes.
        """
        data = text.encode()
        for prefix in ("", "\n"):  # no tokenizer adds a space after a newline
            ids = [token for token in self.tokenizer.encode(prefix + text) if self.tokens[token]]
            for i in range(min(len(ids), len(prefix) + 2)):
                if b"".join([self.tokens[token] for token in ids[i:]]) == data:
                    return ids[i:]
        ids, at = [], 0  # else greedily, with the longest token at each position
        while at < len(data):
            ends = range(min(len(data), at + self._max_token_bytes), at, -1)
            end = next((end for end in ends if data[at:end] in self._id_by_bytes), None)
            if end is None:
                raise ValueError(f"{self.tokenizer.path} has no token for the byte {data[at]}, which the constraint requires")
            ids.append(self._id_by_bytes[data[at:end]])
            at = end
        return ids

    @functools.cached_property
    def _id_by_bytes(self) -> dict[bytes, int]:
        return {each: token for token, each in enumerate(self.tokens) if each}

    @functools.cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self._id_by_bytes))

    def is_space_lost(self, prompt: list[int]) -> bool:
        """Return whether a completion after this prompt would lose its first character if that is a space."""
        state = TEXT_NOT_STARTED
        for token in prompt:
            state = self.tokenizer.decode_incrementally(token, state)[1]
        token = int(self.has_leading_space.argmax())
        has_any = bool(self.has_leading_space[token])
        return has_any and self.tokenizer.decode_incrementally(token, state)[0] != self.tokens[token]


class CPUTimer:
    """A counter of CPU seconds spent on building a grammar.

    It counts the time of this thread inside `with`; the caller adds the worker process's time to `seconds`.
    """

    def __init__(self) -> None:
        """Start with 0 seconds."""
        self.seconds = 0.0

    def __enter__(self) -> None:
        """Start the clock of this thread."""
        self.seconds -= time.thread_time()

    def __exit__(self, *_: object) -> None:
        """Stop the clock and add the CPU time of the block to `seconds`."""
        self.seconds += time.thread_time()


class Grammar(NamedTuple):
    """The source of a constraint before it is built, which is also the key of the caches.

    Attributes:
        tokenizer: The tokenizer that the constraint is for.
        kind: "regex" (`source` is the pattern), or "schema" or "tools" (`source` is an llguidance grammar).
        source: The pattern or the llguidance grammar.
        line_owners: For each line of the source, a phrase for the part of the request that it comes from, for errors.
    """

    tokenizer: AnyTokenizer
    kind: str
    source: str
    line_owners: tuple[str, ...] = ()

    @property
    def request_field(self) -> str:
        """The name of the API request's field that contains the grammar: tools or response_format."""
        return "tools" if self.kind == "tools" else "response_format"

    def get_cached(self) -> GrammarConstraint | None:
        """Return the constraint of this grammar if it was built before and is still cached, else None.

        Raises:
            ValueError: The grammar was rejected before, with the same message.
        """
        with _CACHE_LOCK:
            if self in _CONSTRAINT_CACHE:
                _CONSTRAINT_CACHE.move_to_end(self)
                return _CONSTRAINT_CACHE[self]
            if message := _ERROR_CACHE.get(self):
                raise ValueError(message)
        return None

    def get_constraint(self) -> GrammarConstraint:
        """Return the constraint of this grammar, which all its users share; build it unless it is cached.

        Raises:
            ValueError: The grammar cannot be used. One line.
        """
        return self.build(CPUTimer())

    def build(self, timer: CPUTimer) -> GrammarConstraint:
        """Return the constraint of this grammar as `get_constraint` does, and add the CPU seconds spent on it to the timer.

        Raises:
            ValueError: The grammar cannot be used. One line.
            WorkerLostError: No worker process could be started, or the system stopped it.
        """
        if missing := optional_dependencies.format_missing_packages(REQUIRED_PACKAGES):
            raise ValueError(missing)
        if (constraint := self.get_cached()) is not None:
            return constraint
        try:
            constraint = self._build_constraint(timer)
        except WorkerLostError:
            raise
        except ValueError as error:
            message = f"the {self.kind} cannot be used: {self._find_line_owner(str(error))}{_format_reason(str(error))}"
            with _CACHE_LOCK:
                _cache_value(_ERROR_CACHE, self, message, MAX_CACHED_ERRORS)
            raise ValueError(message) from None
        with _CACHE_LOCK:
            return _cache_value(_CONSTRAINT_CACHE, self, constraint, MAX_CACHED_CONSTRAINTS)

    def _find_line_owner(self, error: str) -> str:
        """Return the owner, in `line_owners`, of the source line that an llguidance error names, or "" if there is none."""
        match = re.match(r"(?:at )?(\d{1,9})\(", error)
        return self.line_owners[int(match[1]) - 1] if match and 0 < int(match[1]) <= len(self.line_owners) else ""

    def _build_constraint(self, timer: CPUTimer) -> GrammarConstraint:
        import llguidance

        with timer:
            grammar = self.source if self.kind != "regex" else llguidance.LLMatcher.grammar_from_regex(self.source)
        with _WORKER_SLOTS:
            seconds, reason = try_grammar(grammar, self.tokenizer.vocab_size, BUILD_TIMEOUT_S)
        timer.seconds += seconds
        if reason:
            raise ValueError(reason)
        vocabulary = _get_vocabulary(self.tokenizer)  # its time is not counted: other grammars share it
        with timer:
            constraint = GrammarConstraint(vocabulary, grammar)
            state = GrammarState(constraint)
            state.commit(state.get_forced_tokens(MAX_TRIAL_TOKENS))
            if not state.is_complete:
                state.get_allowed()
        return constraint


def json_schema(tokenizer: AnyTokenizer, schema: JSONObject) -> GrammarConstraint:
    """Build a constraint by which a completion is one JSON value that matches a schema (the JSON Schema subset of llguidance).

    There is white space only after "," and ":".

    Raises:
        TypeError: The schema is not an object.
        ValueError: The schema cannot be used, or llguidance is not installed. One line.
    """
    return make_schema_grammar(tokenizer, schema).get_constraint()


def json_object(tokenizer: AnyTokenizer) -> GrammarConstraint:
    """Build a constraint by which a completion is one JSON object of any content, formatted as in `json_schema`.

    Raises:
        ValueError: The constraint cannot be built, or llguidance is not installed. One line.
    """
    return json_schema(tokenizer, ANY_OBJECT_SCHEMA)


def make_schema_grammar(tokenizer: AnyTokenizer, schema: JSONObject) -> Grammar:
    """Return the `Grammar` of a JSON Schema, which is not built yet.

    Raises:
        TypeError: The schema is not an object.
        ValueError: The schema is not valid or too large. One line.
    """
    return Grammar(tokenizer, "schema", f'{{"grammars": [{{"json_schema": {serialize_schema(schema)}}}]}}')


def is_installed() -> bool:
    """Return whether llguidance, the package that structured output requires, is installed."""
    return not optional_dependencies.format_missing_packages(REQUIRED_PACKAGES)


def serialize_schema(schema: JSONObject, is_lenient: bool = False) -> str:
    """Return a JSON Schema as a JSON string that also has llguidance's formatting options.

    Args:
        schema: The JSON Schema.
        is_lenient: Whether unknown keywords are ignored.

    Raises:
        TypeError: The schema is not an object.
        ValueError: The schema cannot be serialized, is too large or repeats part of a pattern too often.
    """
    if not isinstance(schema, Mapping):
        raise TypeError(f"the schema is {argument_checks.shorten(schema, repr)}; expected an object")
    if "x-guidance" in schema:
        raise ValueError("the schema uses x-guidance, which is not supported")
    try:
        text = json.dumps({**schema, "x-guidance": {**JSON_STYLE, "lenient": is_lenient}}, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (RecursionError, TypeError, ValueError) as error:
        nested = "it is nested too deeply"
        reason = nested if isinstance(error, RecursionError) else argument_checks.shorten(error)
        raise ValueError(f"the schema is not valid JSON: {reason}") from None
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"the schema has {len(text)} characters; at most {MAX_SCHEMA_CHARACTERS} are supported")
    for pattern in _find_patterns(schema):
        _check_repeats(f"the schema's pattern {argument_checks.shorten(pattern, repr)}", pattern)
    return text


def regex(tokenizer: AnyTokenizer, pattern: str) -> GrammarConstraint:
    """Build a constraint by which a whole completion matches a pattern in Rust's regex syntax, without look-around.

    Raises:
        TypeError: The pattern is not a string.
        ValueError: The pattern cannot be used, or llguidance is not installed. One line.
    """
    argument_checks.check_string("the regex", pattern)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance ignores it
        raise ValueError(f"the regex {argument_checks.shorten(pattern, repr)} ends in a backslash; expected a character after it")
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise ValueError(f"the regex has {len(pattern)} characters; at most {MAX_PATTERN_CHARACTERS} are supported")
    _check_repeats("the regex", pattern)
    return Grammar(tokenizer, "regex", pattern).get_constraint()


def _cache_value(cache: OrderedDict[Grammar, Value], grammar: Grammar, value: Value, max_n: int) -> Value:
    """Add a value to a cache of at most `max_n` entries and return it, or the value that another thread has added meanwhile."""
    value = cache.setdefault(grammar, value)
    while len(cache) > max_n:
        cache.popitem(last=False)
    return value


_CONSTRAINT_CACHE = OrderedDict[Grammar, GrammarConstraint]()  # least recently used first, as below
_ERROR_CACHE = OrderedDict[Grammar, str]()
_CACHE_LOCK = threading.Lock()
_WORKER_SLOTS = threading.BoundedSemaphore(MAX_CONCURRENT_BUILDS)
_VOCABULARY_LOCK = threading.Lock()


def _get_vocabulary(tokenizer: AnyTokenizer) -> _LLGuidanceVocabulary:
    """Return the cached llguidance vocabulary of a tokenizer, or make it; a lock prevents two threads from doing so at once."""
    with _VOCABULARY_LOCK:
        return _make_vocabulary(tokenizer)  # type: ignore[arg-type]


_make_vocabulary = functools.lru_cache(MAX_CACHED_VOCABULARIES)(_LLGuidanceVocabulary)


def _format_reason(error: str) -> str:
    """Convert llguidance's error of several lines to a one-line reason of at most 160 characters."""
    if match := re.search(r"Unimplemented keys: \[(.*?)\]", error):
        keys = match[1].replace('"', "")
        return f"it uses {keys}, which {'are' if ',' in keys else 'is'} not supported"
    if "NoExtension" in error:
        return "no text matches it"
    line = next((line for line in reversed(error.split("\n")) if line.startswith("error: ")), error.split("\n")[0])
    line = re.sub(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?", "", line.removeprefix("error: "))
    line = " ".join(line.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def _find_patterns(schema: object) -> list[str]:
    """Return a list of all regexes in a JSON Schema: its values of `pattern` and its names in `patternProperties`."""
    patterns, stack = list[str](), [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            pattern, properties = value.get("pattern"), value.get("patternProperties")
            patterns += [pattern] if isinstance(pattern, str) else []
            patterns += properties if isinstance(properties, Mapping) else []
        if isinstance(value, Mapping | list):
            stack += value.values() if isinstance(value, Mapping) else value
    return patterns


def _check_repeats(name: str, pattern: str) -> None:
    """Raise ValueError if a regex repeats a part more than MAX_REPEATS times, where nested repeat counts multiply.

    Forced text of that length would take seconds to encode. `name` describes the regex in the error.
    """
    outer_counts = list[int]()  # maxima of the enclosing groups
    max_count, count = 1, 1  # maximum count in this group; count of the last atom
    for part in _REGEX_PARTS.finditer(pattern):
        if part[0][0] == "(":
            outer_counts.append(max_count)
            max_count = count = 1
        elif part[0] == ")":
            count, max_count = max_count, max(max_count, outer_counts.pop() if outer_counts else 1)
        elif part[0][0] == "{":
            count *= max(1, *(int(n or 0) for n in part.groups()))
            max_count = max(max_count, count)
        else:
            count = 1
        if max_count > MAX_REPEATS:
            raise ValueError(f"{name} repeats a part {max_count} times; at most {MAX_REPEATS}")
