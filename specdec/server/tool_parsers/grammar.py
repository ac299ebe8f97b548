"""Calls of tools that cannot break: a grammar of the model's way to write them and of the tools' schemas. Knows no requests."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.server.tool_parsers.formats import ARGS, CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, Way
from specdec.server.tool_parsers.incremental import ARGUMENTS
from specdec.server.tool_parsers.non_json import END_OF_FUNCTION, END_OF_PARAMETER, is_text, kinds_of, resolved, values_of
from specdec.text.structured_output import Grammar, checked_schema
from specdec.tokenizer import AnyTokenizer
from specdec.validation import short

PLAIN_KEYS = {"type", "properties", "required", "description", "title", "$defs", "$schema", "definitions"}
WORD = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)  # what Python's and Gemma's ways can write as a name
ANYTHING = "/(?s:.+)/"
NO_QUOTE = "/[^<]+/"  # where the quotes are no special tokens
SAID = PLAIN_KEYS - {"properties", "required"} | {"default", "examples"}  # of a schema, which ask for a kind of value or nothing
OF_OBJECTS = ("properties", "required", "additionalProperties")  # what is not named is never written
MOST_LEVELS = 6  # of objects and lists whose schemas are followed where no schema of llguidance's does it


def grammar_of_calls(
    tokenizer: AnyTokenizer,
    way: Way,
    tools: Sequence[Mapping[str, Any]],
    is_needed: bool,
    one_call: bool,
    answer: Mapping[str, Any] | None = None,
) -> Grammar:
    """Texts that are calls of those tools, written in that way; not built yet. Of schemas that are not `strict`, what llguidance
    does not know is not held.

    is_needed: whether a text has to call one; else it may be any that begins no call, which may also stand before one. answer:
    the schema of a text that calls none. Raises ValueError and TypeError for parameters that are no schema.
    """
    return _Rules(tokenizer, way, one_call).grammar(tools, is_needed, answer)


class _Rules:
    """Lark's rules, a line each; of whom a line is, errors tell."""

    def __init__(self, tokenizer: AnyTokenizer, way: Way, one_call: bool) -> None:
        self._tokenizer, self._way, self._one_call = tokenizer, way, one_call
        self._specials: Mapping[str, int] = getattr(tokenizer, "specials", {})
        self._lines = list[tuple[str, str]]()
        self._tool, self._is_strict, self._has_any = "", False, False

    def grammar(self, tools: Sequence[Mapping[str, Any]], is_needed: bool, answer: Mapping[str, Any] | None) -> Grammar:
        several = []
        for tool in tools:
            self._tool, self._is_strict = f"the tool {tool['name']}: ", bool(tool.get("strict"))
            try:
                several.append(self._rule(self._call(tool)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self._tool}{error}") from None
        self._tool, self._is_strict = "", True
        call = self._rule(" | ".join(several))
        if answer is not None:
            start = f"{self._json(answer)} | {self._calls(call)}"
        else:
            start = self._calls(call) if is_needed else self._beside(call)
        lines = [*(line for line, _ in self._lines), f"start: {start}"]
        said = json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]}, ensure_ascii=False)
        return Grammar(self._tokenizer, "tools", said, tuple(of for _, of in self._lines))

    def _rule(self, said: str, more: str = "") -> str:
        """The name of a rule of its own."""
        name = f"r{len(self._lines)}"
        self._lines.append((f"{name}{more}: {said}", self._tool))
        return name

    def _mark(self, name: str) -> str:
        """A special token, or what spells it where the tokenizer has none."""
        return f"<[{self._specials[name]}]>" if name in self._specials else _said(name)

    def _calls(self, call: str, opens: str = "") -> str:
        """One call or several. opens: a rule that ends with the first one's mark."""
        way = self._way
        mark, close = (self._mark(each) if each else "" for each in (way.opens, way.closes))
        first = opens or mark
        match way.name:
            case "tags" | "xml":
                more = f' ("\\n" {mark} "\\n" {call} "\\n" {close})*'
                return f'{first} "\\n" {call} "\\n" {close}{self._several(more)}'
            case "listed" | "python":
                more = self._several(f' (", " {call})*')
                return f'{first} "[" {call}{more} "]" {close}'
            case "named" | "gemma":
                more = self._several(f" ({mark} {call} {close})*")
                return f"{first} {call} {close}{more}"
            case "harmony":
                return f"{self._thought()}? {call}"
        return call

    def _several(self, more: str) -> str:
        return "" if self._one_call else more

    def _beside(self, call: str) -> str:
        """Calls, and texts that begin none."""
        way = self._way
        if way.name == "harmony":
            words, bare = self._rule(ANYTHING), CHANNEL in self._specials  # else it would be of any text
            answer = f'{self._mark(CHANNEL)} ("final" | "commentary") {self._mark(MESSAGE)} {words}?'
            return f"{self._thought()}? ({call} | {answer})" + f" | {words}" * bare
        if not way.opens:
            return f"{call} | {self._rule('/[^{](?s:.*)/')}"
        if way.opens in self._specials:
            words = self._rule(ANYTHING)
            return f"{words} | {words}? {self._calls(call)}"
        self._lines.append((f"OTHER: {ANYTHING} & ~/(?s:.*){re.escape(way.opens)}(?s:.*)/", ""))
        opening = self._rule("/(?s:.*)/", f"[suffix={_said(way.opens)}]")
        return f"OTHER | {self._calls(call, opening)}"

    def _thought(self) -> str:
        words, end = self._rule(ANYTHING), self._mark(ENDS[0])
        start = f'{self._mark(START)} "assistant"'
        return f'({self._mark(CHANNEL)} "analysis" {self._mark(MESSAGE)} {words} {end} {start})'

    def _call(self, tool: Mapping[str, Any]) -> str:
        """One of that tool, without the marks around it."""
        way, name, schema = self._way, tool["name"], parameters_of(tool)
        checked_schema(schema, not self._is_strict)
        if schema.get("type") != "object":
            raise ValueError(f"its parameters are of the type {short(schema.get('type'), repr)}; expected object")
        if way.name in ("python", "gemma"):
            self._check_words([name, *(key for key, *_ in _properties(schema))])
        if way.name in ("python", "gemma", "xml"):
            self._check_held("an object", schema, *OF_OBJECTS)
        match way.name:
            case "tags" | "alone" | "listed":
                begin = f'{{"name": "{name}", "{ARGUMENTS[way.name == "alone"]}": '
                return f'{_said(begin)} {self._json(schema)} "}}"'
            case "named":
                return f"{_said(name)} {self._mark(ARGS)} {self._json(schema)}"
            case "harmony":
                head = _said(f"commentary to=functions.{name} ")
                return f'{self._mark(CHANNEL)} {head} {self._mark(CONSTRAIN)} "json" {self._mark(MESSAGE)} {self._json(schema)}'
            case "xml":
                given = [(self._parameter(key, each, schema), is_needed) for key, each, is_needed in _properties(schema)]
                told = " ".join(one if is_needed else f"({one})?" for one, is_needed in given)
                return f"{_said(f'<function={name}>')} {told} {_said(chr(10) + END_OF_FUNCTION)}"
            case "python":
                items = [(f"{_said(f'{key}=')} {self._json(_whole(each, schema))}", is_needed)
                         for key, each, is_needed in _properties(schema)]  # fmt: skip
                return f'{_said(f"{name}(")} {self._listed(items, ", ")} ")"'
        return f'{_said(f"call:{name}{{")} {self._fields(schema, schema, 0)} "}}"'

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule("%json " + checked_schema(schema, not self._is_strict).replace("\x7f", "\\u007f"))

    def _check_held(self, what: str, schema: Mapping[str, Any], *held: str) -> None:
        """Raises ValueError for what is asked of such a value beside what is held, as no way but JSON's can hold all."""
        if self._is_strict and (more := [key for key in schema if key not in SAID and key not in held]):
            raise ValueError(f"it uses {', '.join(map(short, more))} of {what}, which this model's calls cannot hold")

    def _constant(self, value: Any, *marks: str) -> str:
        """A value that may be no other: as JSON has it, but for a string, which holds none of those marks."""
        if isinstance(value, str) and any(mark in value for mark in marks):
            raise ValueError(f"{short(value, repr)} is no text that this model's calls can hold")
        return _said(value if isinstance(value, str) else json.dumps(value))

    def _parameter(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """One of XML: a string as it is, anything else as JSON."""
        if ">" in key or "\n" in key:
            raise ValueError(f"{short(key, repr)} is no name that this model's calls can hold")
        begin, end = _said(f"\n<parameter={key}>\n"), _said(f"\n{END_OF_PARAMETER}")
        if not is_text(schema, root):
            return f"{begin} {self._json(_whole(schema, root))} {end}"
        if values := _words(resolved(schema, root)):
            return f"{begin} ({' | '.join(self._constant(value, END_OF_PARAMETER) for value in values)}) {end}"
        self._check_held("a string", resolved(schema, root))
        # whoever reads it takes the first tag for the end, wherever in a line it stands
        return f"{begin} {self._rule('/(?s:.*)/', f'[suffix={_said(END_OF_PARAMETER)}]')}"

    def _listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Items in their order, separated; those that are not needed may be missing."""
        tail, head = self._rule('""'), self._rule('""')
        for item, is_needed in reversed(items):
            one = self._rule(item)
            behind = f"{_said(separator)} {one} {tail}"
            head = self._rule(f"{one} {tail}" + ("" if is_needed else f" | {head}"))
            tail = self._rule(behind if is_needed else f"{behind} | {tail}")
        return head

    def _fields(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """Keys and values of an object as Gemma writes it."""
        given = _properties(schema)
        self._check_words([key for key, *_ in given])
        items = [(f"{_said(f'{key}:')} {self._value(each, root, depth)}", is_needed) for key, each, is_needed in given]
        return self._listed(items, ",")

    def _value(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """A value as Gemma writes it: strings in its own quotes, keys without. Of what refers to itself, a few levels."""
        schema = resolved(schema, root)
        several = schema.get("anyOf")
        if values := values_of(schema):
            told = [self._quoted(value) if isinstance(value, str) else self._constant(value) for value in values]
        elif isinstance(several, list) and "type" not in schema and depth < MOST_LEVELS:
            self._check_held("a value", schema, "anyOf")
            told = [self._value(each, root, depth + 1) for each in several if isinstance(each, Mapping)] or [self._any("any")]
        else:
            told = [self._of_kind(kind, schema, root, depth) for kind in sorted(kinds_of(schema, root)) or ["any"]]
        return f"({' | '.join(told)})"

    def _quoted(self, value: str) -> str:
        quote = self._way.marks[0]
        return f"{self._mark(quote)} {self._constant(value, quote, self._way.closes)} {self._mark(quote)}"

    def _of_kind(self, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """A value of one of the types that it may have."""
        match kind:
            case "integer" | "number" | "boolean" | "null":
                return self._json(_whole({**schema, "type": kind}, root))
            case "array":
                self._check_held("a list", schema, "items")
                if not isinstance(items := schema.get("items"), Mapping) or depth == MOST_LEVELS:
                    return self._any("any_list")
                item = self._rule(self._value(items, root, depth + 1))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                self._check_held("an object", schema, *OF_OBJECTS)
                is_open = not _properties(schema) or depth == MOST_LEVELS
                return self._any("any_object") if is_open else f'"{{" {self._fields(schema, root, depth + 1)} "}}"'
        self._check_held("a string" if kind == "string" else "a value", schema)
        return self._any("any_string" if kind == "string" else "any")

    def _any(self, rule: str) -> str:
        """What holds any string, list, object or value, as Gemma writes it."""
        if not self._has_any:
            quote = self._mark(self._way.marks[0])
            self._has_any = True
            simple = self._json({"type": ["number", "boolean", "null"]})
            several = (
                f"any_string: {quote} {self._rule(ANYTHING if quote[0] == '<' else NO_QUOTE)}? {quote}",
                "KEY: /[A-Za-z_][A-Za-z0-9_.-]*/",
                'any_list: "[" (any ("," any)*)? "]"',
                'any_object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
                f"any: any_string | any_list | any_object | {simple}",
            )
            self._lines += [(line, "") for line in several]
        return rule

    def _check_words(self, names: Sequence[str]) -> None:
        for name in names:
            if not WORD.fullmatch(name):
                raise ValueError(f"{short(name, repr)} is no word; this model's calls hold no other names")


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of arguments: an object, of no others than are named where some are or none is, unless it says so."""
    parameters = tool.get("parameters") or {"type": "object"}
    if parameters.keys() <= PLAIN_KEYS:
        return {"type": "object", "properties": {}, "additionalProperties": False, **parameters}
    return parameters


def _said(text: str) -> str:
    """As Lark writes a string."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Names, schemas, and whether they are needed."""
    properties, needed = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    needed = needed if isinstance(needed, list) else []
    return [(key, each if isinstance(each, Mapping) else {}, key in needed) for key, each in properties.items()]


def _whole(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema with what it may refer to."""
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def _words(schema: Mapping[str, Any]) -> list[str]:
    """The strings that one may be, where they are told."""
    return [value for value in values_of(schema) if isinstance(value, str)]
