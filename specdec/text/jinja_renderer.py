"""Render chat templates in jinja2's sandbox, and find what of a text the messages said. Knows nothing of models.

Settings and functions are those of transformers 5.23 (`utils/chat_template_utils.py`), so that the text is the same. The sandbox
keeps a template from running code. CPU seconds and sizes have limits, so that one that loops or doubles a string ends; a template
that means harm can still waste the time and memory of whoever loads it.

To find who wrote which character, the template or a message, a conversation is rendered twice: with the messages, and with each
of their characters replaced by a stand-in, a character to which Unicode gives no meaning. `Said` is such a string: it answers
every question of the template (such as `startswith`) for the characters that it stands for. Where the second text equals the
first one but for stand-ins, those are what the messages said. Elsewhere nobody can follow what the template made of the messages,
and it is refused.
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

from specdec.tokenizer import Part

OLDEST_VERSION = [3, 1, 6]  # of jinja2: there were ways out of earlier sandboxes
CPU_SECONDS, SECONDS_PER_CHARACTER = 5.0, 2e-5  # of one rendering, which takes a millisecond; and more for long messages
MAX_SIZE = 32 << 20  # characters of a string, items of a list
MAX_POWER_BITS = 1 << 16
MAX_KNOWN_BEGINNINGS = 100_000
PIECE_LENGTH = 1 << 16  # characters that are translated at once: other threads wait for each piece
STAND_INS = range(0x40000, 0xE0000)  # planes 4 to 13, in which Unicode defines no character
WORD = re.compile(r"[\w-]+", re.ASCII)  # a role that a template may make a special token of
Known = dict[int, tuple[int, int]]  # lengths and hashes of the texts of a conversation's beginnings, by hashes of their messages


class RenderingError(ValueError):
    """A template that cannot render these messages, in one line."""


class StandIns:
    """A run of codes that no string of a conversation holds; each stands for a character that messages say.

    pattern: matches a run of stand-ins.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        anywhere = re.compile(f"[{chr(STAND_INS[0])}-{chr(STAND_INS[-1])}]")
        present = {ord(character) for text in taken for character in anywhere.findall(text)}
        edges = [STAND_INS.start - 1, *sorted(present), STAND_INS.stop]
        self._n_free, self._first = max((end - begin - 1, begin + 1) for begin, end in pairwise(edges))
        self.pattern = re.compile(f"[{chr(self._first)}-{chr(self._first + self._n_free - 1)}]+")
        self._meant, self._stand_ins = dict[int, str](), dict[int, str]()

    def hide(self, words: str) -> str:
        """Return the words with a stand-in for each character."""
        new = set[str]().union(*pieces(words)).difference(map(chr, self._stand_ins))
        if len(new) > self._n_free - len(self._meant):
            raise RenderingError(f"messages of more than {self._n_free} different characters")
        for code, character in enumerate(sorted(new), self._first + len(self._meant)):
            self._meant[code], self._stand_ins[ord(character)] = character, chr(code)
        return "".join([piece.translate(self._stand_ins) for piece in pieces(words)])

    def show(self, hidden: str) -> str:
        """Return the words with the characters that stand-ins stand for."""
        return "".join([piece.translate(self._meant) for piece in pieces(hidden)])


def pieces(words: str) -> Iterator[str]:
    """Yield a string piece by piece, each a plain string."""
    return (str.__getitem__(words, slice(i, i + PIECE_LENGTH)) for i in range(0, len(words), PIECE_LENGTH))


class _State(threading.local):
    """The rendering that a thread is at.

    stand_ins: None while nothing is hidden; now: the time that templates are told; deadline: in CPU seconds of the thread.
    """

    stand_ins: StandIns | None = None
    now = datetime.datetime.min
    deadline = 0.0


STATE = _State()


def plain(value: Any) -> Any:
    """Return what a string stands for; another value as it is."""
    return value._plain if isinstance(value, Said) else value


def said(words: str) -> "Said":
    """Return the words of a message, hidden."""
    assert STATE.stand_ins
    return Said(STATE.stand_ins.hide(words))


class Said(str):
    """A string with stand-ins, which a template takes for the characters that they stand for.

    Methods that are missing here see the stand-ins themselves, which shows in the text.
    """

    @functools.cached_property
    def _plain(self) -> str:
        assert STATE.stand_ins
        return STATE.stand_ins.show(self)

    def _parts(self, parts: Iterable[str], gap: int = 0) -> list["Said"]:
        """Return those parts of what it stands for, each `gap` characters behind the one before."""
        own, at = list[Said](), 0
        for part in parts:
            at = self._plain.find(part, at)
            own.append(self[at : at + len(part)])
            at += len(part) + gap
        return own

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> "Said":
        return Said(str.__getitem__(self, key))

    def __iter__(self) -> Iterator["Said"]:
        return map(Said, str.__iter__(self))

    def __add__(self, other: str) -> "Said":
        return Said(str.__add__(self, other))

    def __radd__(self, other: str) -> "Said":
        return Said(str.__add__(other, self))

    def join(self, parts: Iterable[str]) -> "Said":
        return Said(str.join(self, parts))

    def strip(self, characters: str | None = None) -> "Said":
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> "Said":
        return self[len(self) - len(self._plain.lstrip(plain(characters))) :]

    def rstrip(self, characters: str | None = None) -> "Said":
        return self[: len(self._plain.rstrip(plain(characters)))]

    def removeprefix(self, prefix: str) -> "Said":
        return self[len(self) - len(self._plain.removeprefix(plain(prefix))) :]

    def removesuffix(self, suffix: str) -> "Said":
        return self[: len(self._plain.removesuffix(plain(suffix)))]

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list["Said"]:  # type: ignore[override]
        return self._parts(self._plain.split(plain(sep), maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list["Said"]:  # type: ignore[override]
        return self._parts(self._plain.rsplit(plain(sep), maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list["Said"]:  # type: ignore[override]
        return self._parts(self._plain.splitlines(keepends))

    def partition(self, sep: str) -> tuple["Said", "Said", "Said"]:
        first, between, last = self._parts(self._plain.partition(plain(sep)))
        return first, between, last

    def rpartition(self, sep: str) -> tuple["Said", "Said", "Said"]:
        first, between, last = self._parts(self._plain.rpartition(plain(sep)))
        return first, between, last

    def replace(self, old: str, new: str, count: Any = -1) -> "Said":
        if not old:  # between any two characters, whatever they are
            return Said(str.replace(self, "", new, count))
        return Said(str.join(new, self.split(old, count)))


def _of_what_is_meant(name: str) -> Callable[..., Any]:
    """Return a method that asks about a string and returns none."""
    method = getattr(str, name)

    def answering(self: Said, *values: Any) -> Any:
        return method(self._plain, *(tuple(map(plain, value)) if type(value) is tuple else plain(value) for value in values))

    return answering


def _in_other_case(name: str) -> Callable[[Said], str]:
    """Return a method that changes each character on its own, nearly always."""
    method = getattr(str, name)

    def changed(self: Said) -> str:
        cased = method(self._plain)
        if len(cased) != len(self):
            return str(method(str.__str__(self)))
        both = zip(str.__iter__(self), cased, strict=True)
        return Said("".join([said(new) if is_hidden(old) else new for old, new in both]))

    return changed


TELLING = (
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
    "__hash__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__",
)  # fmt: skip
for _name in TELLING:
    setattr(Said, _name, _of_what_is_meant(_name))
for _name in ("upper", "lower", "title", "capitalize", "casefold", "swapcase"):
    setattr(Said, _name, _in_other_case(_name))


def is_hidden(words: str) -> bool:
    """Return whether stand-ins are among the words."""
    return not words.isascii() and STATE.stand_ins is not None and STATE.stand_ins.pattern.search(words) is not None


def joined(parts: Iterable[Any]) -> str:
    """Return the strings one behind the other, as templates do all the time."""
    whole = of_size("".join(map(str, parts)))
    return Said(whole) if is_hidden(whole) else whole


def of_size(value: Any) -> Any:
    """Return the value. Raise RenderingError for a string or a list that is too long."""
    if type(value) is not int:
        check_size(size_of(value))
    return value


def size_of(value: Any) -> int:
    """Return how many characters or items a value has; of a whole number the number, which may become so many."""
    return value if type(value) is int else len(value) if isinstance(value, str | list | tuple) else 0


def check_size(size: float) -> None:
    if size > MAX_SIZE:
        raise RenderingError(f"the template asks for more than {MAX_SIZE} characters or items")


def check_time(*_: Any) -> None:
    if time.thread_time() > STATE.deadline:
        raise RenderingError("the template takes too long")


class Generation(Extension):
    """`{% generation %}`, which marks for training what the assistant said, and changes no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits: loops, macros and blocks look at the time, and what operators make and names keep has a size."""

    concat = staticmethod(joined)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        tree = super()._parse(source, name, filename)
        for node in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))]:
            check = nodes.Filter(nodes.Const(None), "check_time", [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))
        for node in [*tree.find_all(nodes.Assign)]:
            node.node = nodes.Filter(node.node, "of_size", [], [], None, None).set_lineno(node.lineno)
        for node in tree.find_all(nodes.Const):
            check_size(size_of(node.value))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            check_size(size_of(left) * size_of(right))
        elif operator == "**":
            check_size(2 ** min(size_of(left).bit_length() * size_of(right), 64))
        return of_size(super().call_binop(context, operator, left, right))


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(plain(message)))


def tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return what `json.dumps` writes; escapes of what messages said are hidden, too."""
    written = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    rare, shown = {character for character in set(written) if not character.isascii()}, STATE.stand_ins
    escaped = {each: json.dumps(shown.show(each) if shown else each, ensure_ascii=ensure_ascii)[1:-1] for each in rare}
    return joined([written.translate({ord(each): said(new) if is_hidden(each) else new for each, new in escaped.items()})])


def strftime_now(form: str) -> str:
    return STATE.now.strftime(form)


def random_item(values: Any) -> Any:
    """Return the same item in both renderings."""
    return random.Random(0).choice(values)


def _environment() -> Environment:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters |= {"tojson": tojson, "random": random_item, "of_size": of_size}
    # what asks for a context is not computed when a template is compiled
    environment.filters["check_time"] = jinja2.pass_context(check_time)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del environment.globals["lipsum"]
    return environment


ENVIRONMENT = _environment()


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Return a template whose `~` joins as `joined` does."""
    template = ENVIRONMENT.from_string(source)
    template.root_render_func.__globals__["str_join"] = joined
    return template


@contextmanager
def in_words() -> Iterator[None]:
    """Raise RenderingError, in words, for whatever a template raises."""
    try:
        yield
    except RenderingError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise RenderingError(f"line {error.lineno} of the template: {error.message}") from None
    except jinja2.exceptions.SecurityError as error:
        raise RenderingError(f"the template asks for what a sandbox forbids: {error}") from None
    except jinja2.TemplateError as error:
        raise RenderingError(f"the template says: {error}") from None
    except Exception as error:  # whatever Python raises inside a template
        raise RenderingError(f"the template fails: {type(error).__name__}: {error}") from None


class Rendering:
    """A conversation as a template writes it. Raises RenderingError.

    variables: what the template may ask for besides messages and tools. n_characters: of messages and tools. text: the whole.
    edges: where in it what messages and tools say begins and ends, by turns; ends: see `find_ends`.
    """

    @in_words()
    def __init__(
        self, source: str, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> None:
        self._source, self._variables, self._messages, self._tools = source, variables, messages, tools
        self._now, self.edges, self.ends = datetime.datetime.now(), list[int](), list[int]()
        if [int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]] < OLDEST_VERSION:
            raise RenderingError(f"jinja2 {jinja2.__version__} has a leaky sandbox; pip install 'jinja2>=3.1.6'")
        self._said = [*strings_in([messages, tools])]
        self.n_characters = sum(map(len, self._said))

    @functools.cached_property
    def text(self) -> str:
        return self._rendered(self._messages, self._tools)

    @in_words()
    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        STATE.now = self._now
        STATE.deadline = time.thread_time() + CPU_SECONDS + SECONDS_PER_CHARACTER * self.n_characters
        text: str = compiled(self._source).render(
            self._variables, messages=messages, tools=tools, xml_tools=tools, documents=None, add_generation_prompt=True
        )
        return text

    @in_words()
    def find_edges(self) -> None:
        """Find who said what."""
        STATE.stand_ins = stand_ins = StandIns([self._source, *strings_in(self._variables), *self._said])
        hidden = ""
        try:
            messages, tools = [hidden_message(message) for message in self._messages], hidden_in(self._tools)
            with suppress(Exception):  # such as a function's that takes no stand-ins
                hidden = self._rendered(messages, tools)
        finally:
            STATE.stand_ins = None
        if stand_ins.show(hidden) != self.text:
            raise RenderingError("the template makes of a message what cannot be followed; expected one that writes it as it is")
        self.edges = [edge for run in stand_ins.pattern.finditer(hidden) for edge in run.span()]

    def parts(self, begin: int, end: int) -> list[Part]:
        """Return what stands from there to there."""
        first, last = bisect_right(self.edges, begin), bisect_right(self.edges, end)
        edges = [begin, *self.edges[first:last], end]
        return [Part(self.text[a:b], (first + i) % 2 == 1) for i, (a, b) in enumerate(pairwise(edges)) if a < b]

    def find_ends(self, beginnings: Iterable[int], known: Known) -> None:
        """Find where in the text its beginnings end, of so many messages each; -1 for one that does not begin it.

        A conversation of n turns has n beginnings, and the next turn has all of them again: known keeps what they were.
        """
        if len(known) > MAX_KNOWN_BEGINNINGS:
            known.clear()
        hashes = [hash((self._source, json.dumps([self._variables, self._tools])))]
        for message in self._messages:
            hashes.append(hash((hashes[-1], json.dumps(message))))
        for n in beginnings:
            end, hashed = known.get(hashes[n], (0, None))
            if hash(self.text[:end]) != hashed:  # a new one, or one of another day
                beginning = self._rendered(self._messages[:n], self._tools)
                end, hashed = known[hashes[n]] = len(beginning), hash(beginning)
            self.ends.append(end if hash(self.text[:end]) == hashed else -1)


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from strings_in(each)


def hidden_in(value: Any) -> Any:
    """Return a JSON value whose strings are hidden; names of one word, which templates ask for, stay."""
    if isinstance(value, str):
        return said(value)
    if isinstance(value, list):
        return [hidden_in(each) for each in value]
    if isinstance(value, dict):
        return {name if WORD.fullmatch(name) else said(name): hidden_in(each) for name, each in value.items()}
    return value


def hidden_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with what it says hidden; a role of one word stays, which may be in a special token."""
    hidden: dict[str, Any] = hidden_in(message)
    return hidden | ({"role": message["role"]} if WORD.fullmatch(message["role"]) else {})
