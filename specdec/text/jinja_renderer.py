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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.tokenizer import RenderedSegment

MIN_JINJA_VERSION = [3, 1, 6]  # earlier sandboxes have known escapes
MAX_CPU_S, MAX_CPU_S_PER_CHARACTER = 5.0, 2e-5  # one rendering usually takes a millisecond
MAX_SIZE = 32 << 20  # characters of a string, items of a list
MAX_CACHED_PREFIXES = 100_000
PLACEHOLDER_CODEPOINTS = range(0x40000, 0xE0000)  # planes 4 to 13, in which Unicode defines no character
PLACEHOLDERS = re.compile("[\U00040000-\U000dffff]+")
WORD = re.compile(r"[\w-]+", re.ASCII)  # a role that a template may use in a special token
# Lengths and hashes of the rendered prefixes of conversations, by hashes of their messages.
RenderedPrefixes = dict[int, tuple[int, int]]


class RenderingError(ValueError):
    """An error for a template that cannot render the given messages; the message is one line."""


class PlaceholderMap(dict[int, str]):
    """A mapping from the code points of messages to placeholders, for str.translate; it grows with each new code point.

    Attributes:
        originals: The characters of messages, by the code points of their placeholders.
    """

    def __init__(self) -> None:
        """Create an empty mapping."""
        self.originals = dict[int, str]()

    def __missing__(self, code: int) -> str:
        """Assign the next placeholder to a new code point; raise RenderingError if there is none left."""
        if len(self) == len(PLACEHOLDER_CODEPOINTS):
            raise RenderingError(f"the messages have more than {len(self)} different characters")
        placeholder = PLACEHOLDER_CODEPOINTS[len(self)]
        self[code], self.originals[placeholder] = chr(placeholder), chr(code)
        return self[code]


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
    """Return the original characters of tracked strings, which may be in a tuple; return any other value unchanged."""
    if type(value) is tuple:
        return tuple(map(get_original, value))
    return value._original if isinstance(value, TrackedStr) else value


def make_tracked(text: str) -> "TrackedStr":
    """Return a tracked string of placeholders for a text of a message."""
    assert STATE.placeholders is not None
    return TrackedStr(text.translate(STATE.placeholders))


def has_placeholders(text: str) -> bool:
    """Return whether a text contains placeholders."""
    return not text.isascii() and STATE.placeholders is not None and PLACEHOLDERS.search(text) is not None


class TrackedStr(str):
    """A string of placeholders that answers a template's questions as the original characters of a message would.

    str methods that are not overridden here work on the placeholders themselves, so the rendered text is wrong and is rejected.
    """

    def strip(self, characters: str | None = None) -> "TrackedStr":
        """Return this tracked string without the given characters (default: white space) at both ends, as str.strip does."""
        return self._strip("lstrip", characters)._strip("rstrip", characters)

    @functools.cached_property
    def _original(self) -> str:
        assert STATE.placeholders is not None
        return self.translate(STATE.placeholders.originals)

    def _ask_original(self, method: str, *values: Any, **named: Any) -> Any:
        """Return the result of a str method for the original characters."""
        return getattr(str, method)(self._original, *map(get_original, values), **named)

    def _strip(self, method: str, *values: Any) -> "TrackedStr":
        """Return what a str method leaves of this string after it removed characters at one end."""
        n = len(self._ask_original(method, *values))
        return self[:n] if method in ("rstrip", "removesuffix") else self[len(self) - n :]

    def _split(self, method: str, *values: Any, **named: Any) -> list["TrackedStr"]:
        """Return slices of this string for the parts into which a str method splits the original characters."""
        separator = [*values, named.get("sep")][0]
        gap = len(separator) if isinstance(separator, str) and "split" in method else 0
        slices, at = list[TrackedStr](), 0
        for part in self._ask_original(method, *values, **named):
            at = self._original.find(part, at)
            slices.append(self[at : at + len(part)])
            at += len(part) + gap
        return slices

    def _change_case(self, method: str) -> "TrackedStr":
        """Return this string in another case if that has as many characters, which is nearly always so, else unchanged."""
        cased = self._ask_original(method)
        if len(cased) != len(self):
            return self
        pairs = zip(self, cased, strict=True)
        return TrackedStr("".join([make_tracked(new) if has_placeholders(old) else new for old, new in pairs]))

    def __str__(self) -> str:
        """Return the string itself, still tracked."""
        return self

    def __getitem__(self, key: Any) -> "TrackedStr":
        """Return a part of the string, still tracked."""
        return TrackedStr(str.__getitem__(self, key))

    def __add__(self, other: str) -> "TrackedStr":
        """Return the string with another one behind it, still tracked."""
        return TrackedStr(str.__add__(self, other))

    def replace(self, old: str, new: str, count: Any = -1) -> "TrackedStr":
        """Return a tracked string in which `new` replaces `old` where the original characters have it."""
        is_insertion = not old  # between any two characters
        return TrackedStr(str.replace(self, "", new, count) if is_insertion else str.join(new, self._split("split", old, count)))


for _method, _names in (
    (TrackedStr._strip, "lstrip rstrip removeprefix removesuffix"),
    (TrackedStr._split, "split rsplit splitlines partition rpartition"),
    (TrackedStr._change_case, "upper lower title capitalize casefold swapcase"),
    (TrackedStr._ask_original, "startswith endswith find rfind index rindex count isalnum isalpha isascii isdecimal isdigit"),
    (TrackedStr._ask_original, "isidentifier islower isnumeric isprintable isspace istitle isupper"),
    (TrackedStr._ask_original, "__hash__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __contains__"),
):
    for _name in _names.split():
        setattr(TrackedStr, _name, functools.partialmethod(_method, _name))


def join_strings(parts: Iterable[Any]) -> str:
    """Return the concatenation of values as one string, tracked if it contains placeholders; raise RenderingError if too long."""
    joined: str = check_result("".join(map(str, parts)))
    return joined


def check_result(value: Any) -> Any:
    """Return the value, as a tracked string if it contains placeholders; raise RenderingError if it is beyond MAX_SIZE."""
    if type(value) is not int:
        check_size(get_size(value))
    return TrackedStr(value) if isinstance(value, str) and has_placeholders(value) else value


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
            node.node = nodes.Filter(node.node, "check_result", [], [], None, None).set_lineno(node.lineno)
        for node in tree.find_all(nodes.Const):
            check_size(get_size(node.value))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the result of a binary operator in a template; raise RenderingError if the result is too large."""
        if operator == "*":
            check_size(get_size(left) * get_size(right))
        elif operator == "**":
            check_size(2 ** min(get_size(left).bit_length() * get_size(right), 64))
        return check_result(super().call_binop(context, operator, left, right))


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
    escaped = dict[int, str]()
    for character in set(written):
        if not character.isascii():
            is_tracked = has_placeholders(character)
            new = json.dumps(TrackedStr(character)._original if is_tracked else character, ensure_ascii=ensure_ascii)[1:-1]
            escaped[ord(character)] = make_tracked(new) if is_tracked else new
    return join_strings([written.translate(escaped)])


def strftime_now(form: str) -> str:
    """Return the start time of the rendering, formatted with a strftime format; both renderings get the same time."""
    return STATE.now.strftime(form)


def random_item(values: Any) -> Any:
    """Return an item of a sequence with a fixed seed, so that both renderings of a conversation get the same item."""
    return random.Random(0).choice(values)


ENVIRONMENT = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, loopcontrols])
ENVIRONMENT.filters |= {"tojson": tojson, "random": random_item, "check_result": check_result}
ENVIRONMENT.filters["check_time"] = jinja2.pass_context(check_time)  # a context filter is not evaluated at compile time
ENVIRONMENT.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
del ENVIRONMENT.globals["lipsum"]


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """Compile the source of a Jinja template and return the template, in which `~` joins with `join_strings`.

    Raises:
        jinja2.TemplateSyntaxError: The source is not valid.
    """
    template = ENVIRONMENT.from_string(source)
    template.root_render_func.__globals__["str_join"] = join_strings
    return template


@functools.lru_cache(maxsize=8)
def find_variables(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads and that its caller may set; empty if it is not valid."""
    try:
        return frozenset(meta.find_undeclared_variables(ENVIRONMENT.parse(source)))
    except jinja2.TemplateSyntaxError:
        return frozenset()


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
        """Store the template and the conversation; raise RenderingError if jinja2 is too old to be safe."""
        self._source, self._variables, self._messages, self._tools = source, variables, messages, tools
        self._now, self.segment_edges, self.prefix_ends = datetime.datetime.now(), list[int](), list[int]()
        if [int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]] < MIN_JINJA_VERSION:
            raise RenderingError(f"jinja2 {jinja2.__version__} has an unsafe sandbox; pip install 'jinja2>=3.1.6'")
        self.n_characters = sum(map(len, find_strings([messages, tools])))

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
        if PLACEHOLDERS.search("".join([self._source, *find_strings(self._variables)])):
            raise RenderingError("the template has characters that Unicode leaves unassigned")
        text, substituted = self.text, ""
        STATE.placeholders = placeholders = PlaceholderMap()
        try:
            messages, tools = [substitute_message(message) for message in self._messages], substitute_strings(self._tools)
            with suppress(Exception):  # for example a function that does not accept placeholders
                substituted = self._render(messages, tools)
        finally:
            STATE.placeholders = None
        if substituted.translate(placeholders.originals) != text:
            raise RenderingError(
                "the template changes a message in a way that is not supported; expected one that inserts it unchanged"
            )
        self.segment_edges = [edge for run in PLACEHOLDERS.finditer(substituted) for edge in run.span()]

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
