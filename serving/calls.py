"""Calls of tools in what a model writes: JSON in tags, as of Qwen and SmolLM, or alone, as of Llama 3. Knows no requests."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  # of Llama 3's templates


@dataclass(frozen=True)
class Call:
    """arguments: a JSON object, written out."""

    name: str
    arguments: str


Said = str | Call


class Calls(Protocol):
    """A text that comes in pieces becomes text and calls, in their order."""

    def push(self, piece: str) -> list[Said]: ...
    def end(self) -> list[Said]: ...


def calls_of(template: str, tools: Collection[str]) -> Calls | None:
    """How a model of that template writes calls of tools of those names; None where nobody knows: they are text then."""
    if OPEN in template:
        return InTags(tools)
    return Alone(tools) if PYTHON_TAG in template or "ipython" in template else None


def call_of(text: str, tools: Collection[str]) -> Call | None:
    """The call that a text is: a JSON object of a name and arguments; None for any other."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in tools:
        return None
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    return Call(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


class InTags:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls; space around them is dropped."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._held, self._space = "", ""
        self._is_inside = self._has_called = False

    def push(self, piece: str) -> list[Said]:
        self._held += piece
        said = list[Said]()
        while True:
            before, mark, behind = self._held.partition(CLOSE if self._is_inside else OPEN)
            if not mark:
                break
            said += self._called(before, mark) if self._is_inside else self._text(before)
            self._held, self._is_inside = behind, not self._is_inside
        if not self._is_inside:  # what may become a tag waits for what follows
            n = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
            said += self._text(self._held[: len(self._held) - n])
            self._held = self._held[len(self._held) - n :]
        return said

    def end(self) -> list[Said]:
        said = self._called(self._held, "") if self._is_inside else self._text(self._held)
        return said if self._has_called or not self._space else [*said, self._space]

    def _text(self, text: str) -> list[Said]:
        """Without the space at its end, which may stand before a call."""
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        return [words] if words else []

    def _called(self, inside: str, mark: str) -> list[Said]:
        call = call_of(inside, self._tools)
        if call is None:
            return self._text(OPEN + inside + mark)
        self._space, self._has_called = "", True
        return [call]


class Alone:
    """An answer that is one JSON object of a name and parameters."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._held: str | None = ""

    def push(self, piece: str) -> list[Said]:
        if self._held is None:
            return [piece]
        self._held += piece
        if not self._held.strip() or self._held.lstrip().startswith("{"):
            return []
        said, self._held = self._held, None
        return [said]

    def end(self) -> list[Said]:
        held, self._held = self._held, None
        return [call_of(held, self._tools) or held] if held else []
