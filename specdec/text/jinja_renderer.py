"""Render chat templates in jinja2's sandbox, and find which parts of the text come from messages. Independent of models.

Settings and functions are those of transformers 5.23 (`utils/chat_template_utils.py`), so that the text is the same. The sandbox
keeps a template from running code. CPU time and sizes are limited, so a template that loops or doubles a string ends. A malicious
template can still waste the time and memory of the process.

A special token may only come from the template, never from a message. So the strings of the template's source are `TrackedStr`s,
which know for each of their characters that the template wrote it, and keep this through the operations that templates apply to
them. All other text (messages, tools, options, numbers, and what an operation made without keeping track) is not the template's:
it is rendered the same, but is plain text for the tokenizer.
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
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.argument_checks import JSONObject
from specdec.tokenizer import RenderedSegment

MIN_JINJA_VERSION = [3, 1, 6]  # earlier sandboxes have known escapes
MAX_CPU_S, MAX_CPU_S_PER_CHARACTER = 5.0, 2e-5  # one rendering usually takes a millisecond
MAX_SIZE = 32 << 20  # characters of a string, items of a list
MAX_CACHED_PREFIXES = 100_000
WORD = re.compile(r"[\w-]+", re.ASCII)  # a role that a template may use in a special token
# Lengths and hashes of the rendered prefixes of conversations, by hashes of their messages.
RenderedPrefixes = dict[int, tuple[int, int]]


class RenderingError(ValueError):
    """An error for a template that cannot render the given messages; the message is one line."""


class _RenderState(threading.local):
    """The state of the rendering in the current thread; each thread has its own values.

    Attributes:
        now: The time that templates see.
        deadline: The limit in CPU seconds of the thread.
    """

    now = datetime.datetime.min
    deadline = 0.0


STATE = _RenderState()


class TrackedStr(str):
    """A string that knows which of its characters come from the template's source.

    Operations return a `TrackedStr` if a method here says so. A string that another one, such as `%`, makes of messages is not
    the template's; see `track_result`.
    """

    _mask: bytes  # 1 for each character of the template's source, otherwise 0

    def __new__(cls, text: str = "", mask: bytes | None = None) -> "TrackedStr":
        """Return a string with the given mask; None if no character comes from the template's source."""
        tracked = super().__new__(cls, text)
        tracked._mask = get_mask(text) if mask is None else mask
        assert len(tracked) == len(tracked._mask)
        return tracked

    def __str__(self) -> str:
        """Return the string itself, still tracked."""
        return self

    def __getitem__(self, key: Any) -> "TrackedStr":
        """Return a character or a slice."""
        text = str.__getitem__(self, key)
        return TrackedStr(text, self._mask[key if isinstance(key, slice) else slice(key, key + 1 or None)])

    def __iter__(self) -> Iterator[str]:
        """Yield each character."""
        return map(self.__getitem__, range(len(self)))

    def __add__(self, other: str) -> "TrackedStr":
        """Return the string with another one behind it."""
        return NotImplemented if is_markup(other) else TrackedStr(str.__add__(self, other), self._mask + get_mask(other))

    def __radd__(self, other: str) -> "TrackedStr":
        """Return the string with another one before it."""
        return NotImplemented if is_markup(other) else TrackedStr(str.__add__(other, self), get_mask(other) + self._mask)

    def join(self, parts: Iterable[str]) -> "TrackedStr":
        """Return the strings with this one between each two of them."""
        parts = [*parts]
        return TrackedStr(str.join(self, parts), self._mask.join(map(get_mask, parts)))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        """Return the string with `new` instead of each `old`."""
        text: str = check_result(str.replace(self, old, new, count))
        masks = self._mask + get_mask(new)
        if masks.count(1) == len(masks):
            return track(text)
        return TrackedStr(new).join(self.split(old, count)) if old else text

    def strip(self, characters: str | None = None) -> "TrackedStr":
        """Return the string without the given characters (default: white space) at both ends."""
        return self._strip("lstrip", characters)._strip("rstrip", characters)

    def _strip(self, method: str, *values: Any) -> "TrackedStr":
        """Return what a str method leaves of this string after it removed characters at one end."""
        n = len(getattr(str, method)(self, *values))
        return self[:n] if method in ("rstrip", "removesuffix") else self[len(self) - n :]

    def _split(self, method: str, *values: Any, **named: Any) -> list["TrackedStr"]:
        """Return the parts into which a str method splits this string."""
        separator = [*values, named.get("sep")][0]
        gap = len(separator) if isinstance(separator, str) and "split" in method else 0
        parts = list[TrackedStr]()
        at = 0
        for part in getattr(str, method)(self, *values, **named):
            at = self.find(part, at)
            parts.append(self[at : at + len(part)])
            at += len(part) + gap
        return parts

    def _change_case(self, method: str) -> str:
        """Return this string in another case, which nearly always has as many characters; otherwise it is not tracked."""
        cased: str = getattr(str, method)(self)
        return TrackedStr(cased, self._mask) if len(cased) == len(self) else cased


for _method, _names in (
    (TrackedStr._strip, "lstrip rstrip removeprefix removesuffix"),
    (TrackedStr._split, "split rsplit splitlines partition rpartition"),
    (TrackedStr._change_case, "upper lower title capitalize casefold swapcase"),
):
    for _name in _names.split():
        setattr(TrackedStr, _name, functools.partialmethod(_method, _name))


def get_mask(text: str) -> bytes:
    """Return a byte for each character of a string: 1 if it comes from the template's source, otherwise 0."""
    return text._mask if isinstance(text, TrackedStr) else bytes(len(text))


def track(text: str) -> TrackedStr:
    """Return a string whose characters all come from the template's source."""
    return TrackedStr(text, b"\1" * len(text))


def track_result(result: object, *inputs: object) -> object:
    """Return the result of an operation: a string of strings from the template's source is the template's, too."""
    return track(result) if isinstance(result, str) and _is_from_template(inputs) else result


def _is_from_template(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_from_template, value))
    return isinstance(value, TrackedStr) and 0 not in value._mask


def is_markup(value: object) -> bool:
    """Return whether a value escapes the strings that are added to it, or is no string."""
    return not isinstance(value, str) or hasattr(value, "__html__")


def join_strings(parts: Iterable[object]) -> str:
    """Return the concatenation of values as one string; raise RenderingError if it is too long."""
    strings = [*map(str, parts)]
    check_size(sum(map(len, strings)))
    return TrackedStr().join(strings)


def check_result(value: Any) -> Any:
    """Return the value; raise RenderingError if it is beyond MAX_SIZE."""
    if type(value) is not int:
        check_size(get_size(value))
    return value


def get_size(value: object) -> int:
    """Return the length of a string, list or tuple, an integer itself (it can be a repeat count), and 0 for other values."""
    return value if type(value) is int else len(value) if isinstance(value, str | list | tuple) else 0


def check_size(size: float) -> None:
    """Raise RenderingError if a size in characters or items is beyond MAX_SIZE."""
    if size > MAX_SIZE:
        raise RenderingError(f"the template makes more than {MAX_SIZE} characters or items")


def check_time(*_: object) -> None:
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


class TrackingCodeGenerator(CodeGenerator):
    """A compiler of templates that makes the strings of their source `TrackedStr`s."""

    def visit_Const(self, node: nodes.Const, frame: object) -> None:  # noqa: N802 (jinja2's interface)
        """Write a constant."""
        if isinstance(node.value, str):
            self.write(self._output_const_repr([node.value]))
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[object]) -> str:
        return f"environment.track({super()._output_const_repr(group)})"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A jinja2 sandbox with limits on CPU time and on the sizes of values, which end a runaway template with RenderingError.

    Loops, macros and blocks check the time; the results of operators and the values of variables are checked for their size.
    """

    code_generator_class = TrackingCodeGenerator
    concat = staticmethod(join_strings)
    track = staticmethod(functools.lru_cache(maxsize=4096)(track))
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> object:
        tree = super()._parse(source, name, filename)
        for node in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))]:
            check = nodes.Filter(nodes.Const(None), "check_time", [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))
        for node in [*tree.find_all(nodes.Assign)]:
            node.node = nodes.Filter(node.node, "check_result", [], [], None, None).set_lineno(node.lineno)
        for node in tree.find_all(nodes.Const):
            check_size(get_size(node.value))
        return tree

    def call_binop(self, context: object, operator: str, left: object, right: object) -> object:
        """Return the result of a binary operator in a template; raise RenderingError if the result is too large."""
        if operator == "*":
            check_size(get_size(left) * get_size(right))
        elif operator == "**":
            check_size(2 ** min(get_size(left).bit_length() * get_size(right), 64))
        return track_result(check_result(super().call_binop(context, operator, left, right)), left, right)

    def call(self, context: object, function: object, *arguments: object, **named: object) -> object:
        """Return the result of a function or method that a template calls."""
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        result = super().call(context, function, *arguments, **named)
        values = [value for name, value in named.items() if name not in ("_loop_vars", "_block_vars")]  # added by jinja2
        return track_result(result, owner, arguments, *values)


def raise_exception(message: object) -> None:
    """Raise jinja2's TemplateError with a message that the template gives; templates call it to reject messages."""
    raise jinja2.TemplateError(str(message))


def tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialize a value as JSON and return a string, as transformers' `tojson` filter does; the arguments are `json.dumps`'."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def join(context: object, values: object, separator: str = "", attribute: object = None) -> str:
    """Return the strings with a separator between each two of them, as jinja2's filter does, but tracked."""
    joined: str = do_join(context, values, TrackedStr(separator), attribute)
    return joined


def strftime_now(form: str) -> str:
    """Return the start time of the rendering, formatted with a strftime format; the prefixes of a conversation get the same."""
    return STATE.now.strftime(form)


def random_item(values: Any) -> Any:
    """Return an item of a sequence with a fixed seed, so that the prefixes of a conversation get the same item."""
    return random.Random(0).choice(values)


# the optimizer would evaluate constant expressions to constants that are not tracked, such as lists
ENVIRONMENT = LimitedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, loopcontrols], optimized=False
)
ENVIRONMENT.filters |= {"tojson": tojson, "random": random_item, "check_result": check_result}
ENVIRONMENT.filters["join"] = jinja2.pass_eval_context(join)
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
    """A conversation rendered by a template, with the parts of the text that the template's source contains.

    Args:
        source: The Jinja source of the template.
        variables: Special tokens by variable, which count as parts of the source.
        messages: The conversation.
        tools: Functions that the model may call, or None.
        options: Other template variables.

    Attributes:
        n_characters: The number of characters in messages, tools and options.
        prefix_ends: Where prefixes of the conversation end in `text`; empty before `find_prefix_ends`.

    Raises:
        RenderingError: Any method, if the template fails.
    """

    @wrap_render_errors()
    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        messages: Sequence[JSONObject],
        tools: Sequence[object] | None = None,
        options: Mapping[str, object] = {},
    ) -> None:
        """Store the template and the conversation; raise RenderingError if jinja2 is too old to be safe."""
        self._source, self._messages = source, [_track_role(message) for message in messages]
        self._variables = {name: track(value) for name, value in variables.items()}
        self._options = {"documents": None, **options, "tools": tools, "xml_tools": tools, "add_generation_prompt": True}
        self._now, self.prefix_ends = datetime.datetime.now(), list[int]()
        if [int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]] < MIN_JINJA_VERSION:
            raise RenderingError(f"jinja2 {jinja2.__version__} has an unsafe sandbox; pip install 'jinja2>=3.1.6'")
        self.n_characters = sum(map(len, find_strings([messages, tools, options])))

    @functools.cached_property
    def _tracked_text(self) -> str:
        return self._render(self._messages)

    @functools.cached_property
    def text(self) -> str:
        """The conversation's rendered text, up to the start of the model's answer."""
        return "".join([self._tracked_text])  # not tracked

    @functools.cached_property
    def _segment_edges(self) -> list[int]:
        """Alternating starts and ends of what is not the template's in `text`."""
        return [edge for run in re.finditer(rb"\0+", get_mask(self._tracked_text)) for edge in run.span()]

    @wrap_render_errors()
    def _render(self, messages: Sequence[JSONObject]) -> str:
        STATE.now = self._now
        STATE.deadline = time.thread_time() + MAX_CPU_S + MAX_CPU_S_PER_CHARACTER * self.n_characters
        text: str = compile_template(self._source).render(self._variables | self._options, messages=messages)
        return text

    def get_segments(self, begin: int, end: int) -> list[RenderedSegment]:
        """Return the rendered text from `begin` to `end` as segments, each either the template's or not."""
        first, last = bisect_right(self._segment_edges, begin), bisect_right(self._segment_edges, end)
        edges = [begin, *self._segment_edges[first:last], end]
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
        hashes = [hash((self._source, json.dumps([self._variables, self._options])))]
        for message in self._messages:
            hashes.append(hash((hashes[-1], json.dumps(message))))
        for n in prefix_lengths:
            end, prefix_hash = cache.get(hashes[n], (0, None))
            if hash(self.text[:end]) != prefix_hash:  # a new prefix, or one with another date
                prefix = self._render(self._messages[:n])
                end, prefix_hash = cache[hashes[n]] = len(prefix), hash(prefix)
            self.prefix_ends.append(end if hash(self.text[:end]) == prefix_hash else -1)


def find_strings(value: object) -> Iterator[str]:
    """Yield every string in a nested JSON value, including the names in objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from find_strings(each)


def _track_role(message: JSONObject) -> JSONObject:
    """Return a message whose role may be a part of a special token, if it is one word."""
    return {**message, "role": track(message["role"])} if WORD.fullmatch(message["role"]) else message
