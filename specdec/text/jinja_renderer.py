"""Render chat templates in jinja2's sandbox, and find which parts of the text come from messages. Independent of models.

Settings and functions are those of transformers 5.23 (`utils/chat_template_utils.py`), so that the text is the same. The sandbox
keeps a template from running code. CPU time and sizes are limited, so a template that loops or doubles a string ends. A malicious
template can still waste the time and memory of the process.

To attribute each character to the template or a message, a conversation is rendered twice: with the messages, and with each of
their characters replaced by a placeholder, a character that Unicode leaves unassigned. `TrackedStr` is a string of placeholders.
It answers every question of the template (such as `startswith`) for the original characters. If the second text equals the first
except for placeholders, those are the messages' characters. Otherwise the text cannot be attributed and the template is rejected.
"""

import datetime
import functools
import json
import random
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.tokenizer import RenderedSegment

MIN_JINJA_VERSION = [3, 1, 6]  # earlier sandboxes have known escapes
MAX_CPU_S, MAX_CPU_S_PER_CHARACTER = 5.0, 2e-5  # one rendering usually takes a millisecond
MAX_SIZE = 32 << 20  # characters of a string, items of a list
MAX_POWER_BITS = 1 << 16
MAX_CACHED_PREFIXES = 100_000
CHUNK_LENGTH = 1 << 16  # characters translated at once; other threads wait meanwhile
PLACEHOLDER_CODEPOINTS = range(0x40000, 0xE0000)  # planes 4 to 13, in which Unicode defines no character
WORD = re.compile(r"[\w-]+", re.ASCII)  # a role that a template may use in a special token
# Lengths and hashes of the rendered prefixes of conversations, by hashes of their messages.
RenderedPrefixes = dict[int, tuple[int, int]]


class RenderingError(ValueError):
    """An error for a template that cannot render the given messages; the message is one line."""


class PlaceholderMap:
    """A mapping from the characters of messages to placeholders, code points that none of the given strings contain.

    Attributes:
        pattern: Regex that matches a run of placeholders.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        any_codepoint = re.compile(f"[{chr(PLACEHOLDER_CODEPOINTS[0])}-{chr(PLACEHOLDER_CODEPOINTS[-1])}]")
        present = {ord(character) for text in strings for character in any_codepoint.findall(text)}
        edges = [PLACEHOLDER_CODEPOINTS.start - 1, *sorted(present), PLACEHOLDER_CODEPOINTS.stop]
        self._n_free, self._first = max((end - begin - 1, begin + 1) for begin, end in pairwise(edges))
        self.pattern = re.compile(f"[{chr(self._first)}-{chr(self._first + self._n_free - 1)}]+")
        self._originals, self._placeholders = dict[int, str](), dict[int, str]()

    def substitute(self, text: str) -> str:
        """Return a text with every character replaced by its placeholder; new characters are added to the mapping.

        Raises:
            RenderingError: There are too few placeholders.
        """
        new = set[str]().union(*split_chunks(text)).difference(map(chr, self._placeholders))
        if len(new) > self._n_free - len(self._originals):
            raise RenderingError(f"the messages have more than {self._n_free} different characters")
        for code, character in enumerate(sorted(new), self._first + len(self._originals)):
            self._originals[code], self._placeholders[ord(character)] = character, chr(code)
        return "".join([chunk.translate(self._placeholders) for chunk in split_chunks(text)])

    def restore(self, text: str) -> str:
        """Return a text with every placeholder replaced by its original character."""
        return "".join([chunk.translate(self._originals) for chunk in split_chunks(text)])


def split_chunks(text: str) -> Iterator[str]:
    """Yield a string in chunks of CHUNK_LENGTH characters, each a plain str, so that other threads can run in between."""
    return (str.__getitem__(text, slice(i, i + CHUNK_LENGTH)) for i in range(0, len(text), CHUNK_LENGTH))


class _RenderState(threading.local):
    """The state of the rendering in the current thread; each thread has its own values.

    Attributes:
        placeholders: None while none are in use.
        now: The time that templates see.
        deadline: The limit in CPU seconds of the thread.
    """

    placeholders: PlaceholderMap | None = None
    now = datetime.datetime.min
    deadline = 0.0


STATE = _RenderState()


def get_original(value: Any) -> Any:
    """Return the original characters of a tracked string as a plain str; return any other value unchanged."""
    return value._original if isinstance(value, TrackedStr) else value


def make_tracked(text: str) -> "TrackedStr":
    """Return a tracked string of placeholders for a text of a message."""
    assert STATE.placeholders
    return TrackedStr(STATE.placeholders.substitute(text))


class TrackedStr(str):
    """A string of placeholders that answers a template's questions as the original characters of a message would.

    str methods that are not overridden here work on the placeholders themselves, so the rendered text is wrong and is rejected.
    """

    @functools.cached_property
    def _original(self) -> str:
        assert STATE.placeholders
        return STATE.placeholders.restore(self)

    def _slice_parts(self, parts: Iterable[str], gap: int = 0) -> list["TrackedStr"]:
        """Return slices of this string for consecutive parts of the original, each `gap` characters after the previous one."""
        slices, at = list[TrackedStr](), 0
        for part in parts:
            at = self._original.find(part, at)
            slices.append(self[at : at + len(part)])
            at += len(part) + gap
        return slices

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> "TrackedStr":
        return TrackedStr(str.__getitem__(self, key))

    def __iter__(self) -> Iterator["TrackedStr"]:
        return map(TrackedStr, str.__iter__(self))

    def __add__(self, other: str) -> "TrackedStr":
        return TrackedStr(str.__add__(self, other))

    def __radd__(self, other: str) -> "TrackedStr":
        return TrackedStr(str.__add__(other, self))

    def join(self, parts: Iterable[str]) -> "TrackedStr":
        """Join the parts with this string as separator, as str.join does, and return a tracked string."""
        return TrackedStr(str.join(self, parts))

    def strip(self, characters: str | None = None) -> "TrackedStr":
        """Return this tracked string without the given characters (default: white space) at both ends, as str.strip does."""
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> "TrackedStr":
        """Return this tracked string without the given characters (default: white space) at the start, as str.lstrip does."""
        return self[len(self) - len(self._original.lstrip(get_original(characters))) :]

    def rstrip(self, characters: str | None = None) -> "TrackedStr":
        """Return this tracked string without the given characters (default: white space) at the end, as str.rstrip does."""
        return self[: len(self._original.rstrip(get_original(characters)))]

    def removeprefix(self, prefix: str) -> "TrackedStr":
        """Return this tracked string without a prefix of the original characters, as str.removeprefix does."""
        return self[len(self) - len(self._original.removeprefix(get_original(prefix))) :]

    def removesuffix(self, suffix: str) -> "TrackedStr":
        """Return this tracked string without a suffix of the original characters, as str.removesuffix does."""
        return self[: len(self._original.removesuffix(get_original(suffix)))]

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list["TrackedStr"]:  # type: ignore[override]
        """Return the tracked parts between separators in the original characters, as str.split does."""
        return self._slice_parts(self._original.split(get_original(sep), maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list["TrackedStr"]:  # type: ignore[override]
        """Return the tracked parts between separators in the original characters, split from the right as str.rsplit does."""
        return self._slice_parts(self._original.rsplit(get_original(sep), maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list["TrackedStr"]:  # type: ignore[override]
        """Return the tracked lines of the original characters, as str.splitlines does."""
        return self._slice_parts(self._original.splitlines(keepends))

    def partition(self, sep: str) -> tuple["TrackedStr", "TrackedStr", "TrackedStr"]:
        """Return the tracked parts before, at and after the first separator, as str.partition does."""
        first, between, last = self._slice_parts(self._original.partition(get_original(sep)))
        return first, between, last

    def rpartition(self, sep: str) -> tuple["TrackedStr", "TrackedStr", "TrackedStr"]:
        """Return the tracked parts before, at and after the last separator, as str.rpartition does."""
        first, between, last = self._slice_parts(self._original.rpartition(get_original(sep)))
        return first, between, last

    def replace(self, old: str, new: str, count: Any = -1) -> "TrackedStr":
        """Return a tracked string in which `new` replaces `old` wherever the original characters have it, as str.replace does."""
        if not old:  # insert between any two characters
            return TrackedStr(str.replace(self, "", new, count))
        return TrackedStr(str.join(new, self.split(old, count)))


def _delegate_to_original(name: str) -> Callable[..., Any]:
    """Return a method for `TrackedStr` that calls the named str method on the original characters and returns its result."""
    method = getattr(str, name)

    def delegate(self: TrackedStr, *values: Any) -> Any:
        return method(
            self._original,
            *(tuple(map(get_original, value)) if type(value) is tuple else get_original(value) for value in values),
        )

    return delegate


def _make_case_method(name: str) -> Callable[[TrackedStr], str]:
    """Return a method for `TrackedStr` that changes the case as the named str method does.

    The result is tracked if it has as many characters as the original, which is nearly always so.
    """
    method = getattr(str, name)

    def change_case(self: TrackedStr) -> str:
        cased = method(self._original)
        if len(cased) != len(self):
            return str(method(str.__str__(self)))
        both = zip(str.__iter__(self), cased, strict=True)
        return TrackedStr("".join([make_tracked(new) if has_placeholders(old) else new for old, new in both]))

    return change_case


DELEGATED_METHODS = (
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
    "__hash__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__",
)  # fmt: skip
for _name in DELEGATED_METHODS:
    setattr(TrackedStr, _name, _delegate_to_original(_name))
for _name in ("upper", "lower", "title", "capitalize", "casefold", "swapcase"):
    setattr(TrackedStr, _name, _make_case_method(_name))


def has_placeholders(text: str) -> bool:
    """Return whether a text contains placeholders."""
    return not text.isascii() and STATE.placeholders is not None and STATE.placeholders.pattern.search(text) is not None


def join_strings(parts: Iterable[Any]) -> str:
    """Return the concatenation of values as one string, tracked if it contains placeholders; raise RenderingError if too long."""
    joined = limit_size("".join(map(str, parts)))
    return TrackedStr(joined) if has_placeholders(joined) else joined


def limit_size(value: Any) -> Any:
    """Return the value unchanged; raise RenderingError for a string, list or tuple with more than MAX_SIZE elements."""
    if type(value) is not int:
        check_size(get_size(value))
    return value


def get_size(value: Any) -> int:
    """Return the length of a string, list or tuple, an integer itself (it can be a repeat count), and 0 for other values."""
    return value if type(value) is int else len(value) if isinstance(value, str | list | tuple) else 0


def check_size(size: float) -> None:
    """Raise RenderingError if a size in characters or items is beyond MAX_SIZE."""
    if size > MAX_SIZE:
        raise RenderingError(f"the template makes more than {MAX_SIZE} characters or items")


def check_time(*_: Any) -> None:
    """Raise RenderingError if the CPU time limit of the rendering in this thread is exceeded; ignore the arguments."""
    if time.thread_time() > STATE.deadline:
        raise RenderingError("the template takes too long")


class GenerationExtension(Extension):
    """The `{% generation %}` block for jinja2, which marks the assistant's text for training and leaves the text unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Any) -> Any:
        """Parse a block up to `endgeneration` and return its body as a jinja2 scope node."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A jinja2 sandbox with limits on CPU time and on the sizes of values, which end a runaway template with RenderingError.

    Loops, macros and blocks check the time; the results of operators and the values of variables are checked for their size.
    """

    concat = staticmethod(join_strings)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        tree = super()._parse(source, name, filename)
        for node in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))]:
            check = nodes.Filter(nodes.Const(None), "check_time", [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))
        for node in [*tree.find_all(nodes.Assign)]:
            node.node = nodes.Filter(node.node, "limit_size", [], [], None, None).set_lineno(node.lineno)
        for node in tree.find_all(nodes.Const):
            check_size(get_size(node.value))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the result of a binary operator in a template; raise RenderingError if the result is too large."""
        if operator == "*":
            check_size(get_size(left) * get_size(right))
        elif operator == "**":
            check_size(2 ** min(get_size(left).bit_length() * get_size(right), 64))
        return limit_size(super().call_binop(context, operator, left, right))


def raise_exception(message: object) -> None:
    """Raise jinja2's TemplateError with a message that the template gives; templates call it to reject messages."""
    raise jinja2.TemplateError(str(get_original(message)))


def tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialize a value as JSON and return a string, as transformers' `tojson` filter does.

    The arguments are those of `json.dumps`. The result is tracked if it has characters of messages. Escapes of these
    characters are placeholders, too.
    """
    written = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    non_ascii, placeholders = {character for character in set(written) if not character.isascii()}, STATE.placeholders
    escaped = {
        each: json.dumps(placeholders.restore(each) if placeholders else each, ensure_ascii=ensure_ascii)[1:-1]
        for each in non_ascii
    }
    return join_strings(
        [written.translate({ord(each): make_tracked(new) if has_placeholders(each) else new for each, new in escaped.items()})]
    )


def strftime_now(form: str) -> str:
    """Return the start time of the rendering, formatted with a strftime format; both renderings get the same time."""
    return STATE.now.strftime(form)


def random_item(values: Any) -> Any:
    """Return an item of a sequence with a fixed seed, so that both renderings of a conversation get the same item."""
    return random.Random(0).choice(values)


def _make_environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, loopcontrols])
    environment.filters |= {"tojson": tojson, "random": random_item, "limit_size": limit_size}
    # A context filter is not evaluated at compile time.
    environment.filters["check_time"] = jinja2.pass_context(check_time)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del environment.globals["lipsum"]
    return environment


ENVIRONMENT = _make_environment()


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """Compile the source of a Jinja template and return the template, in which `~` joins with `join_strings`.

    Raises:
        jinja2.TemplateSyntaxError: The source is not valid.
    """
    template = ENVIRONMENT.from_string(source)
    template.root_render_func.__globals__["str_join"] = join_strings
    return template


@contextmanager
def wrap_render_errors() -> Iterator[None]:
    """Return a context (or decorator) in which any error of a template is raised again as a one-line RenderingError."""
    try:
        yield
    except RenderingError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise RenderingError(f"syntax error in line {error.lineno} of the template: {error.message}") from None
    except jinja2.exceptions.SecurityError as error:
        raise RenderingError(f"the template uses what the sandbox forbids: {error}") from None
    except jinja2.TemplateError as error:
        raise RenderingError(f"template error: {error}") from None
    except Exception as error:  # any Python error inside a template
        raise RenderingError(f"the template fails: {type(error).__name__}: {error}") from None


class Rendering:
    """A conversation rendered by a template, with the parts of the text that come from messages.

    Args:
        source: The Jinja source of the template.
        variables: Template variables next to the messages.
        messages: The conversation.
        tools: Functions that the model may call, or None.

    Attributes:
        n_characters: The number of characters in messages and tools.
        segment_edges: Alternating starts and ends of message text in `text`; empty before `find_segment_edges`.
        prefix_ends: Where prefixes of the conversation end in `text`; empty before `find_prefix_ends`.

    Raises:
        RenderingError: Any method, if the template fails.
    """

    @wrap_render_errors()
    def __init__(
        self, source: str, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> None:
        self._source, self._variables, self._messages, self._tools = source, variables, messages, tools
        self._now, self.segment_edges, self.prefix_ends = datetime.datetime.now(), list[int](), list[int]()
        if [int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]] < MIN_JINJA_VERSION:
            raise RenderingError(f"jinja2 {jinja2.__version__} has an unsafe sandbox; pip install 'jinja2>=3.1.6'")
        self._message_strings = [*find_strings([messages, tools])]
        self.n_characters = sum(map(len, self._message_strings))

    @functools.cached_property
    def text(self) -> str:
        """The conversation's rendered text, up to the start of the model's answer."""
        return self._render(self._messages, self._tools)

    @wrap_render_errors()
    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        STATE.now = self._now
        STATE.deadline = time.thread_time() + MAX_CPU_S + MAX_CPU_S_PER_CHARACTER * self.n_characters
        text: str = compile_template(self._source).render(
            self._variables, messages=messages, tools=tools, xml_tools=tools, documents=None, add_generation_prompt=True
        )
        return text

    @wrap_render_errors()
    def find_segment_edges(self) -> None:
        """Find which parts of the text come from messages and set `segment_edges`.

        Raises:
            RenderingError: The template changes a message in a way that is not supported.
        """
        STATE.placeholders = placeholders = PlaceholderMap([self._source, *find_strings(self._variables), *self._message_strings])
        substituted = ""
        try:
            messages, tools = [substitute_message(message) for message in self._messages], substitute_strings(self._tools)
            with suppress(Exception):  # for example a function that does not accept placeholders
                substituted = self._render(messages, tools)
        finally:
            STATE.placeholders = None
        if placeholders.restore(substituted) != self.text:
            raise RenderingError(
                "the template changes a message in a way that is not supported; expected one that inserts it unchanged"
            )
        self.segment_edges = [edge for run in placeholders.pattern.finditer(substituted) for edge in run.span()]

    def get_segments(self, begin: int, end: int) -> list[RenderedSegment]:
        """Return the rendered text from `begin` to `end` as segments, each from either a message or the template."""
        first, last = bisect_right(self.segment_edges, begin), bisect_right(self.segment_edges, end)
        edges = [begin, *self.segment_edges[first:last], end]
        return [RenderedSegment(self.text[a:b], (first + i) % 2 == 1) for i, (a, b) in enumerate(pairwise(edges)) if a < b]

    def find_prefix_ends(self, prefix_lengths: Iterable[int], cache: RenderedPrefixes) -> None:
        """Find where prefixes of the conversation end in the text, and append each position to `prefix_ends`.

        The position is -1 if the prefix rendered alone differs from the start of the text. A conversation of n turns has n
        prefixes, and the next turn has all of them again, so the cache keeps their lengths.

        Args:
            prefix_lengths: The number of messages of each prefix.
            cache: Lengths and hashes of prefixes rendered before; it is updated.
        """
        if len(cache) > MAX_CACHED_PREFIXES:
            cache.clear()
        hashes = [hash((self._source, json.dumps([self._variables, self._tools])))]
        for message in self._messages:
            hashes.append(hash((hashes[-1], json.dumps(message))))
        for n in prefix_lengths:
            end, prefix_hash = cache.get(hashes[n], (0, None))
            if hash(self.text[:end]) != prefix_hash:  # a new prefix, or one with another date
                prefix = self._render(self._messages[:n], self._tools)
                end, prefix_hash = cache[hashes[n]] = len(prefix), hash(prefix)
            self.prefix_ends.append(end if hash(self.text[:end]) == prefix_hash else -1)


def find_strings(value: Any) -> Iterator[str]:
    """Yield every string in a nested JSON value, including the names in objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from find_strings(each)


def substitute_strings(value: Any) -> Any:
    """Return a copy of a nested JSON value with tracked strings of placeholders in the place of its strings.

    Names in objects that are one word stay, since templates look them up.
    """
    if isinstance(value, str):
        return make_tracked(value)
    if isinstance(value, list):
        return [substitute_strings(each) for each in value]
    if isinstance(value, dict):
        return {name if WORD.fullmatch(name) else make_tracked(name): substitute_strings(each) for name, each in value.items()}
    return value


def substitute_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message with tracked strings in the place of its strings.

    Names of one word stay, and so does a role of one word, which may be part of a special token.
    """
    substituted: dict[str, Any] = substitute_strings(message)
    return substituted | ({"role": message["role"]} if WORD.fullmatch(message["role"]) else {})
