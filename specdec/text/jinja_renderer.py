"""Rendering of chat templates in jinja2's sandbox, and attribution of the text to messages. Independent of models.

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
    """A template that cannot render these messages; one line."""


class PlaceholderMap:
    """A mapping of message characters to a range of code points that no string of a conversation uses.

    Attributes:
        pattern: Matches a run of placeholders.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        any_codepoint = re.compile(f"[{chr(PLACEHOLDER_CODEPOINTS[0])}-{chr(PLACEHOLDER_CODEPOINTS[-1])}]")
        present = {ord(character) for text in strings for character in any_codepoint.findall(text)}
        edges = [PLACEHOLDER_CODEPOINTS.start - 1, *sorted(present), PLACEHOLDER_CODEPOINTS.stop]
        self._n_free, self._first = max((end - begin - 1, begin + 1) for begin, end in pairwise(edges))
        self.pattern = re.compile(f"[{chr(self._first)}-{chr(self._first + self._n_free - 1)}]+")
        self._originals, self._placeholders = dict[int, str](), dict[int, str]()

    def substitute(self, text: str) -> str:
        """Return the text with a placeholder for each character."""
        new = set[str]().union(*split_chunks(text)).difference(map(chr, self._placeholders))
        if len(new) > self._n_free - len(self._originals):
            raise RenderingError(f"the messages have more than {self._n_free} different characters")
        for code, character in enumerate(sorted(new), self._first + len(self._originals)):
            self._originals[code], self._placeholders[ord(character)] = character, chr(code)
        return "".join([chunk.translate(self._placeholders) for chunk in split_chunks(text)])

    def restore(self, text: str) -> str:
        """Return the text with the original characters."""
        return "".join([chunk.translate(self._originals) for chunk in split_chunks(text)])


def split_chunks(text: str) -> Iterator[str]:
    """Yield a string in chunks, each a plain str."""
    return (str.__getitem__(text, slice(i, i + CHUNK_LENGTH)) for i in range(0, len(text), CHUNK_LENGTH))


class _RenderState(threading.local):
    """The state of the rendering in a thread.

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
    """Return the original of a tracked string; any other value unchanged."""
    return value._original if isinstance(value, TrackedStr) else value


def make_tracked(text: str) -> "TrackedStr":
    """Return the text of a message as placeholders."""
    assert STATE.placeholders
    return TrackedStr(STATE.placeholders.substitute(text))


class TrackedStr(str):
    """A string of placeholders that a template treats as the original characters.

    Methods that are missing here see the placeholders themselves, which shows in the text.
    """

    @functools.cached_property
    def _original(self) -> str:
        assert STATE.placeholders
        return STATE.placeholders.restore(self)

    def _slice_parts(self, parts: Iterable[str], gap: int = 0) -> list["TrackedStr"]:
        """Return slices for those parts of the original, each `gap` characters after the previous one."""
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
        """Return the result of str.join, with placeholders."""
        return TrackedStr(str.join(self, parts))

    def strip(self, characters: str | None = None) -> "TrackedStr":
        """Return the result of str.strip, with placeholders."""
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> "TrackedStr":
        """Return the result of str.lstrip, with placeholders."""
        return self[len(self) - len(self._original.lstrip(get_original(characters))) :]

    def rstrip(self, characters: str | None = None) -> "TrackedStr":
        """Return the result of str.rstrip, with placeholders."""
        return self[: len(self._original.rstrip(get_original(characters)))]

    def removeprefix(self, prefix: str) -> "TrackedStr":
        """Return the result of str.removeprefix, with placeholders."""
        return self[len(self) - len(self._original.removeprefix(get_original(prefix))) :]

    def removesuffix(self, suffix: str) -> "TrackedStr":
        """Return the result of str.removesuffix, with placeholders."""
        return self[: len(self._original.removesuffix(get_original(suffix)))]

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list["TrackedStr"]:  # type: ignore[override]
        """Return the result of str.split, with placeholders."""
        return self._slice_parts(self._original.split(get_original(sep), maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list["TrackedStr"]:  # type: ignore[override]
        """Return the result of str.rsplit, with placeholders."""
        return self._slice_parts(self._original.rsplit(get_original(sep), maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list["TrackedStr"]:  # type: ignore[override]
        """Return the result of str.splitlines, with placeholders."""
        return self._slice_parts(self._original.splitlines(keepends))

    def partition(self, sep: str) -> tuple["TrackedStr", "TrackedStr", "TrackedStr"]:
        """Return the result of str.partition, with placeholders."""
        first, between, last = self._slice_parts(self._original.partition(get_original(sep)))
        return first, between, last

    def rpartition(self, sep: str) -> tuple["TrackedStr", "TrackedStr", "TrackedStr"]:
        """Return the result of str.rpartition, with placeholders."""
        first, between, last = self._slice_parts(self._original.rpartition(get_original(sep)))
        return first, between, last

    def replace(self, old: str, new: str, count: Any = -1) -> "TrackedStr":
        """Return the result of str.replace, with placeholders."""
        if not old:  # insert between any two characters
            return TrackedStr(str.replace(self, "", new, count))
        return TrackedStr(str.join(new, self.split(old, count)))


def _delegate_to_original(name: str) -> Callable[..., Any]:
    """Return a method that calls a str method on the original and returns its result."""
    method = getattr(str, name)

    def delegate(self: TrackedStr, *values: Any) -> Any:
        return method(
            self._original,
            *(tuple(map(get_original, value)) if type(value) is tuple else get_original(value) for value in values),
        )

    return delegate


def _make_case_method(name: str) -> Callable[[TrackedStr], str]:
    """Return a method that changes the case of each character; nearly always the length stays the same."""
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
    """Return the concatenated strings; tracked if one of them is."""
    joined = limit_size("".join(map(str, parts)))
    return TrackedStr(joined) if has_placeholders(joined) else joined


def limit_size(value: Any) -> Any:
    """Return the value; raise RenderingError for a string or list that is too long."""
    if type(value) is not int:
        check_size(get_size(value))
    return value


def get_size(value: Any) -> int:
    """Return the number of characters or items of a value; an integer itself, which can be used as a repeat count."""
    return value if type(value) is int else len(value) if isinstance(value, str | list | tuple) else 0


def check_size(size: float) -> None:
    """Raise RenderingError if a size is beyond MAX_SIZE."""
    if size > MAX_SIZE:
        raise RenderingError(f"the template makes more than {MAX_SIZE} characters or items")


def check_time(*_: Any) -> None:
    """Raise RenderingError if the CPU time is over."""
    if time.thread_time() > STATE.deadline:
        raise RenderingError("the template takes too long")


class GenerationExtension(Extension):
    """The `{% generation %}` block, which marks the assistant's text for training and does not change it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Any) -> Any:
        """Return the body of the block as a scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits: loops, macros and blocks check the time; sizes of operators' results and variables are checked."""

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
        """Return the result of a binary operator with a check of its size."""
        if operator == "*":
            check_size(get_size(left) * get_size(right))
        elif operator == "**":
            check_size(2 ** min(get_size(left).bit_length() * get_size(right), 64))
        return limit_size(super().call_binop(context, operator, left, right))


def raise_exception(message: object) -> None:
    """Raise TemplateError with a message of the template."""
    raise jinja2.TemplateError(str(get_original(message)))


def tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the output of `json.dumps`; escapes of message characters are placeholders, too."""
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
    """Return the formatted time of the rendering."""
    return STATE.now.strftime(form)


def random_item(values: Any) -> Any:
    """Return the same item in both renderings."""
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
    """Return a compiled template with `join_strings` as the `~` operator."""
    template = ENVIRONMENT.from_string(source)
    template.root_render_func.__globals__["str_join"] = join_strings
    return template


@contextmanager
def wrap_render_errors() -> Iterator[None]:
    """Convert any error of a template to RenderingError."""
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
    """A conversation rendered by a template. Raises RenderingError.

    Attributes:
        n_characters: The number of characters in messages and tools.
        segment_edges: Alternating starts and ends of message text in `text`.
        prefix_ends: See `find_prefix_ends`.
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
        """The rendered text."""
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
        """Find which parts of the text come from messages."""
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
        """Return the segments of a range of the text."""
        first, last = bisect_right(self.segment_edges, begin), bisect_right(self.segment_edges, end)
        edges = [begin, *self.segment_edges[first:last], end]
        return [RenderedSegment(self.text[a:b], (first + i) % 2 == 1) for i, (a, b) in enumerate(pairwise(edges)) if a < b]

    def find_prefix_ends(self, prefix_lengths: Iterable[int], cache: RenderedPrefixes) -> None:
        """Find where prefixes of the conversation, given by their numbers of messages, end in the text; -1 if one differs.

        A conversation of n turns has n prefixes, and the next turn has all of them again, so the cache keeps their lengths.
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
    """Yield all strings of a JSON value, including names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from find_strings(each)


def substitute_strings(value: Any) -> Any:
    """Return a JSON value with placeholders for its strings, except for names of one word, which templates look up."""
    if isinstance(value, str):
        return make_tracked(value)
    if isinstance(value, list):
        return [substitute_strings(each) for each in value]
    if isinstance(value, dict):
        return {name if WORD.fullmatch(name) else make_tracked(name): substitute_strings(each) for name, each in value.items()}
    return value


def substitute_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with placeholders, except for a role of one word, which may be part of a special token."""
    substituted: dict[str, Any] = substitute_strings(message)
    return substituted | ({"role": message["role"]} if WORD.fullmatch(message["role"]) else {})
