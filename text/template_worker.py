"""Renders chat templates, and tells what of a text messages said; runs in a process of `workers`. Knows nothing of the rest.

A template comes from whoever made the model, and no sandbox keeps it from looping for ever or from asking for all memory.
Settings and functions are those of transformers 5.23 (`utils/chat_template_utils.py`), so that the text is the same.

Who wrote which character, the template or a message, is found by rendering twice: with the messages, and with each of their
characters replaced by a stand-in, one to which Unicode gives no meaning. `Said` is such a string; asked whether it begins with
something, it answers for what it stands for. Where the second text is the first one but for stand-ins, they are what was said.
Where it is not, the template made something of the messages that nobody can follow, and it is refused.
"""

import datetime
import functools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.runtime
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BYTES = 1 << 30  # of memory
MOST_KNOWN = 100_000  # beginnings
LEAST_VERSION = (3, 1, 6)  # of jinja2: before, there were ways out of the sandbox
STAND_INS = range(0x40000, 0xE0000)  # planes 4 to 13, of which Unicode has given out none
WORD = re.compile(r"[\w-]+", re.ASCII)  # a role that a template may make a special token of
known: dict[int, tuple[int, int]] = {}  # lengths and hashes of the texts of beginnings, by hashes of their messages
moment = datetime.datetime.now()  # of the request: all its texts are of one time


class Meaning(dict[int, str]):
    """What stand-ins stand for, by their codes, which are as many as were asked for."""

    def __init__(self, taken: Iterable[str]) -> None:
        super().__init__()
        present = set().union(*taken)
        self._free = (code for code in STAND_INS if chr(code) not in present)
        self._stand_ins = dict[int, str]()

    def hide(self, words: str) -> str:
        """Stand-ins in the place of all characters."""
        for code in dict.fromkeys(map(ord, words)):
            if code not in self._stand_ins:
                stand_in = next(self._free)
                self[stand_in], self._stand_ins[code] = chr(code), chr(stand_in)
        return words.translate(self._stand_ins)

    def edges(self, text: str) -> list[int]:
        """Where stand-ins begin and end, by turns, and the text's end."""
        edges, is_said = list[int](), False
        for i, character in enumerate(text):
            if (ord(character) in self) is not is_said:
                is_said = not is_said
                edges.append(i)
        return [*edges, len(text)]


meaning = Meaning(())


def plain(value: Any) -> Any:
    """What a string stands for; another value as it is."""
    return value._plain if isinstance(value, Said) else value


def said(words: str) -> "Said":
    return Said(meaning.hide(words))


class Said(str):
    """A string with stand-ins in it, which a template takes for what it stands for.

    What is missing here is done with the stand-ins, which shows in the text.
    """

    @functools.cached_property
    def _plain(self) -> str:
        return str.translate(self, meaning)

    def _parts(self, parts: Iterable[str], gap: int = 0) -> list["Said"]:
        """Those parts of what it stands for, each behind the one before and so many characters."""
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
    """A method that tells of a string and returns none."""
    method = getattr(str, name)

    def answering(self: Said, *values: Any) -> Any:
        return method(self._plain, *(tuple(map(plain, value)) if type(value) is tuple else plain(value) for value in values))

    return answering


def _in_other_case(name: str) -> Callable[[Said], str]:
    """A method that changes each character on its own, nearly always."""
    method = getattr(str, name)

    def changed(self: Said) -> str:
        cased = method(self._plain)
        if len(cased) != len(self):
            return str(method(str.__str__(self)))
        both = zip(str.__iter__(self), cased, strict=True)
        return Said("".join([said(new) if ord(old) in meaning else new for old, new in both]))

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


def joined(parts: Iterable[Any]) -> str:
    """The strings one behind the other, which is what templates do all the time."""
    whole = "".join(map(str, parts))
    return whole if whole.isascii() or meaning.keys().isdisjoint(map(ord, set(whole))) else Said(whole)


class Generation(Extension):
    """`{% generation %}`, which tells trainers what the assistant said, and changes no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(joined)


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(plain(message)))


def tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As `json.dumps` writes it; what was said is said in its escapes, too."""
    written = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    rare = {ord(character) for character in set(written) if not character.isascii()}
    escaped = {code: json.dumps(meaning.get(code, chr(code)), ensure_ascii=ensure_ascii)[1:-1] for code in rare}
    return joined([written.translate({code: said(new) if code in meaning else new for code, new in escaped.items()})])


def strftime_now(form: str) -> str:
    return moment.strftime(form)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> Any:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


jinja2.runtime.str_join = joined  # what `~` becomes


def ends_of(render: Callable[..., str], request: dict[str, Any], whole: str) -> list[int]:
    """Where in a conversation's text its beginnings end, of so many messages each; -1 for what does not begin it.

    A talk of n turns has n beginnings, all of them the next turn's too: the length of each and its hash are kept.
    """
    if len(known) > MOST_KNOWN:
        known.clear()
    messages, ends = request["messages"], []
    hashes = [hash((request["source"], json.dumps([request[name] for name in ("variables", "options", "tools")])))]
    for message in messages:
        hashes.append(hash((hashes[-1], json.dumps(message))))
    for n in request["beginnings"]:
        end, hashed = known.get(hashes[n], (0, None))
        if hash(whole[:end]) != hashed:  # a new one, or one of another day
            beginning = render(messages[:n])
            end, hashed = known[hashes[n]] = len(beginning), hash(beginning)
        ends.append(end if hash(whole[:end]) == hashed else -1)
    return ends


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from strings_in(each)


def hidden_in(value: Any) -> Any:
    """A JSON value whose strings are said by messages; names of one word, which templates ask for, stay."""
    if isinstance(value, str):
        return said(value)
    if isinstance(value, list):
        return [hidden_in(each) for each in value]
    if isinstance(value, dict):
        return {name if WORD.fullmatch(name) else said(name): hidden_in(each) for name, each in value.items()}
    return value


def hidden_message(message: dict[str, Any]) -> dict[str, Any]:
    """What is said of a message hidden; a role of one word stays, which may be in a special token."""
    hidden: dict[str, Any] = hidden_in(message)
    return hidden | ({"role": message["role"]} if WORD.fullmatch(message["role"]) else {})


def edges_of(render: Callable[..., str], messages: list[dict[str, Any]], tools: Any, whole: str) -> list[int] | None:
    """Where in a conversation's text what messages and tools say begins and ends, by turns; None where that cannot be told."""
    try:
        hidden = render([hidden_message(message) for message in messages], hidden_in(tools))
    except Exception:  # as with a function that takes no stand-ins
        return None
    return meaning.edges(hidden) if plain(hidden) == whole else None


def answer(request: dict[str, Any], _: bytes) -> dict[str, Any]:
    """A conversation's text, the edges of what messages say, and where its "beginnings" end; or what is wrong with the template.

    "most" are the characters that the text may have.
    """
    global meaning, moment
    moment = datetime.datetime.now()
    messages, tools = request["messages"], request["tools"]

    def render(messages: list[dict[str, Any]], tools: Any = tools) -> str:
        random.seed(0)
        text: str = compiled(request["source"]).render(
            {**request["variables"], **request["options"]},
            messages=messages, tools=tools, xml_tools=tools, documents=None, add_generation_prompt=True,
        )  # fmt: skip
        return text

    try:
        version = tuple(int(part) for part in jinja2.__version__.split(".")[:3])
        if version < LEAST_VERSION:
            return {"error": f"jinja2 {jinja2.__version__} has a leaky sandbox; pip install 'jinja2>=3.1.6'"}
        whole = render(messages)
        if len(whole) > request["most"]:
            wrong = f"the template makes a text of {len(whole)} characters; there is room for {request['most']}"
            return {"error": wrong, "is_too_long": True}
        taken = [request["source"], *request["variables"].values(), *strings_in([messages, tools, request["options"]])]
        if 2 * len(set().union(*taken)) > len(STAND_INS):
            return {"error": f"messages of more than {len(STAND_INS) // 2} different characters"}
        meaning = Meaning(taken)
        edges = edges_of(render, messages, tools, whole)
        if edges is None:
            return {"error": "the template makes of a message what cannot be followed; expected one that writes it as it is"}
        return {"text": whole, "edges": edges, "ends": ends_of(render, request, whole)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno} of the template: {error.message}"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"the template asks for what a sandbox forbids: {error}"}
    except jinja2.TemplateError as error:
        return {"error": f"the template says: {error}"}
    except MemoryError:
        return {"error": "the template needs more than 1 GiB of memory"}
    except Exception as error:  # whatever Python raises inside a template
        return {"error": f"the template fails: {type(error).__name__}: {error}"}
