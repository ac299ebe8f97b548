"""Calls of tools that are no JSON: XML, as Qwen3-Coder writes them, Python's syntax, as LFM2, and Gemma's. Knows no requests."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specdec.server.tool_parsers.incremental import CLOSE, MARK, OPEN, Blocks, Call, Json, More, Said, value_of

Tools = Mapping[str, Mapping[str, Any]]  # the schemas of arguments, by the tools' names
XML = "<function="
END_OF_PARAMETER, END_OF_FUNCTION = "</parameter>", "</function>"
FUNCTION, PARAMETER = re.compile(r"\s*<function=([^>]*)>"), re.compile(r"\s*<parameter=([^>]*)>")
LONGEST_TAG = 200  # letters
PYTHON = ("<|tool_call_start|>", "<|tool_call_end|>")
GEMMA = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
QUOTES = ('<|"|>', "<escape>")  # Gemma's, which end with what they begin with
WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
DEEPEST = 64  # values within values
# of Python's and Gemma's values: a string, a number, a word, or a letter that stands for itself
PIECE = re.compile(
    r"""\s*(?:("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(<\|"\|>.*?<\|"\|>|<escape>.*?<escape>)"""
    r"""|(-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.-]))|([A-Za-z_][\w.-]*)|(.))\s*""",
    re.DOTALL | re.ASCII,
)


class Xml(Blocks):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, each parameter once it is whole. The
    tag that closes one is none within a string of JSON."""

    def __init__(self, tools: Tools) -> None:
        super().__init__((OPEN, CLOSE), lambda _: [])
        self._tools = tools
        self._name = self._key = ""
        self._n = 0  # parameters of the call that has begun
        self._schema: Mapping[str, Any] = {}  # of the parameter that goes on
        self._json: Json | None = None  # its value, as long as it is JSON

    def _inside(self, letter: str) -> list[Said]:
        self._held += letter
        found = FUNCTION.fullmatch(self._held)
        if found and found[1] in self._tools:
            self._name, self._n, self._held, self._read = found[1], 0, "", self._between
            return self._calls(Call(self._name, "{"))
        return [] if not found and _begins(self._held, XML) else self._fails(OPEN)

    def _between(self, letter: str) -> list[Said]:
        """Parameters."""
        self._held += letter
        if found := PARAMETER.fullmatch(self._held):
            self._key, self._held, self._read = found[1], "", self._value
            properties = self._tools[self._name].get("properties")
            schema = properties.get(self._key) if isinstance(properties, Mapping) else None
            self._schema = schema if isinstance(schema, Mapping) else {}
            self._json = None if is_text(self._schema, self._tools[self._name]) else Json()
            return []
        if self._held.lstrip() == END_OF_FUNCTION:
            self._held, self._read = "", self._behind
            return [More("}")]
        return [] if _begins(self._held, "<parameter=", END_OF_FUNCTION) else [More("}"), *self._fails("")]

    def _value(self, letter: str) -> list[Said]:
        if self._json and not self._json.takes(letter):
            self._json = None
        if self._json and self._json.in_string:
            self._inner.append(letter)
            self._tail = ""
            return []
        if (text := self._until(END_OF_PARAMETER, letter)) is None:
            return []
        value = written(text.removeprefix("\n").removesuffix("\n"), self._schema, self._tools[self._name])
        self._n, self._read = self._n + 1, self._between
        return [self._argument(json.dumps(value, ensure_ascii=False))]

    def _argument(self, value: str) -> More:
        return More(f"{', ' * (self._n > 1)}{json.dumps(self._key, ensure_ascii=False)}: {value}")

    def _behind(self, letter: str) -> list[Said]:
        """The function: the tag that closes is no text."""
        self._held += letter
        if self._held.lstrip() == CLOSE:
            self._held, self._read = "", self._outside
            return []
        return [] if _begins(self._held, CLOSE) else self._fails("")

    def _fails(self, before: str) -> list[Said]:
        """What is held is no part of a call, and may hold the beginning of one."""
        said, letters = self._text(before), self._held
        self._held, self._read = "", self._outside
        return said + self.push(letters)

    def end(self) -> list[Said]:
        """A call that has begun is cut as it stands: of a parameter, as of a string that has no end, what has come is told."""
        if self._read == self._value:
            self._n += 1
            text = "".join(self._inner).removeprefix("\n")
            return [self._argument(json.dumps(text, ensure_ascii=False)[:-1])]
        if self._read in (self._between, self._behind):
            return []
        return super().end()


def _begins(text: str, *marks: str) -> bool:
    """Whether it begins with one of them behind space, or may come to, within reason."""
    text = text.lstrip()
    return len(text) <= LONGEST_TAG and any(text.startswith(mark) or mark.startswith(text) for mark in marks)


def kinds_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """The types that a value may have; none where that is not plain."""
    schema = resolved(schema, root)
    kinds = schema.get("type")
    if kinds is None and (values := values_of(schema)):
        return {"string"} if all(isinstance(value, str) for value in values) else {"any"}
    return {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds} if isinstance(kinds, list) else set()


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values that one may be, where they are told."""
    values = schema.get("enum")
    return values if isinstance(values, list) else [schema["const"]] if "const" in schema else []


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema refers to within the whole, or itself."""
    for _ in range(DEEPEST):
        if not isinstance(name := schema.get("$ref"), str) or not name.startswith("#/"):
            return schema
        found: Any = root
        for part in name[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        schema = found
    return schema


def is_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a parameter in XML is its own text, and not JSON: a string, or one of which nothing is said."""
    return kinds_of(schema, root) == {"string"} or not schema


def written(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The value that a parameter in XML stands for: JSON, unless it is a string."""
    if is_text(schema, root):
        return text
    try:
        return value_of(text)
    except ValueError:
        return WORDS.get(text.strip(), text)


class Values:
    """Values as Python or Gemma write them. Raises ValueError for what is none. piece: what comes next, None at the end."""

    def __init__(self, text: str) -> None:
        self._pieces = PIECE.finditer(text)
        self._next()

    def _next(self) -> None:
        self.piece = next(self._pieces, None)

    def takes(self, letter: str) -> bool:
        """Whether that letter is next; it is then taken."""
        is_next = self.piece is not None and self.piece[5] == letter
        if is_next:
            self._next()
        return is_next

    def wants(self, letter: str) -> None:
        if not self.takes(letter):
            raise ValueError(f"expected {letter}")

    def up_to(self, close: str) -> Iterator[None]:
        """Once for each of several, between which commas stand, until the letter that closes them."""
        if self.takes(close):
            return
        yield
        while not self.takes(close):
            self.wants(",")
            yield

    def word(self) -> str:
        """A name."""
        if not self.piece or not (word := self.piece[4]):
            raise ValueError("expected a name")
        self._next()
        return word

    def items(self, close: str, equals: str, depth: int = 0) -> dict[str, Any]:
        """Names and values, up to the letter that closes them. Names may be in quotes."""
        found = dict[str, Any]()
        for _ in self.up_to(close):
            key = self.value() if self.piece and (self.piece[1] or self.piece[2]) else self.word()
            self.wants(equals)
            found[str(key)] = self.value(depth)
        return found

    def value(self, depth: int = 0) -> Any:
        piece = self.piece
        if piece is None or depth > DEEPEST:
            raise ValueError("expected a value")
        self._next()
        if piece[1] or piece[2]:
            return _string(piece[1] or piece[2])
        if piece[3]:
            return value_of(piece[3])
        if piece[4] in WORDS:
            return WORDS[piece[4]]
        if piece[5] == "[":
            return [self.value(depth + 1) for _ in self.up_to("]")]
        if piece[5] == "{":
            return self.items("}", ":", depth + 1)
        raise ValueError("expected a value")


def _string(piece: str) -> str:
    """What a string in quotes says; where it is not written as JSON or Python do, what stands between them."""
    for quote in QUOTES:
        if piece.startswith(quote):
            return piece[len(quote) : -len(quote)]
    piece = piece.replace(MARK, "<")
    try:
        said = json.loads(piece) if piece[0] == '"' else ast.literal_eval(piece)
        said.encode()  # half a character is none
    except (ValueError, SyntaxError, MemoryError):
        return piece[1:-1]
    return str(said)


def python_calls(tools: Tools) -> Blocks:
    """`<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>`."""

    def reads(values: Values) -> Iterator[tuple[str, dict[str, Any]]]:
        values.wants("[")
        for _ in values.up_to("]"):
            name = values.word()
            values.wants("(")
            yield name, values.items(")", "=")

    return Blocks(PYTHON, lambda text: _calls(text, reads, tools))


def gemma_calls(marks: tuple[str, str], tools: Tools) -> Blocks:
    """`<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>`."""

    def reads(values: Values) -> Iterator[tuple[str, dict[str, Any]]]:
        name = values.word()
        values.wants("{")
        yield name, values.items("}", ":")

    return Blocks(marks, lambda text: _calls(text.removeprefix("call:"), reads, tools))


def _calls(text: str, reads: Callable[[Values], Iterator[tuple[str, dict[str, Any]]]], tools: Tools) -> list[Call]:
    """The calls that a text is, all of them of tools that there are; none where it is something else."""
    values = Values(text)
    try:
        found = [*reads(values)]
    except (ValueError, RecursionError):
        return []
    is_right = values.piece is None and all(name in tools for name, _ in found)
    return [Call(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found] if is_right else []
