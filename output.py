"""Events to plain text, JSON and a summary. Knows no models.

Each view is a context manager that is shown the events of a text; on leaving, also by an exception, it shows all text there is.
The summary is `print_summary`'s, once the story is over.
"""

import json
import unicodedata
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.table import Table

from .decoding import Event, Prompt, Proposal, Statistics, Step
from .tokenizer import AnyTokenizer, TextStream


class View(Protocol):
    """What the events of a text go to."""

    def __enter__(self) -> "View": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def show(self, event: Event) -> None: ...


def printable(text: str) -> str:
    """Text without the control characters that could move a cursor or worse; line breaks and tabs stay."""
    return "".join([c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc"])


class PlainView:
    """The text alone, as it comes."""

    def __init__(self, tokenizer: AnyTokenizer, out: TextIO) -> None:
        self._stream, self._out = TextStream(tokenizer), out

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: Any) -> None:
        self._out.write(printable(self._stream.end()) + "\n")
        self._out.flush()

    def show(self, event: Event) -> None:
        if not isinstance(event, Proposal):
            self._out.write(printable("".join([self._stream.push(token) for token in event.tokens])))
            self._out.flush()


class SilentView:
    """Collects the text, and shows nothing: for JSON, which comes at the end."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompt: list[int] = []
        self.tokens: list[int] = []

    def __enter__(self) -> "SilentView":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def show(self, event: Event) -> None:
        if isinstance(event, Prompt):
            self._prompt = event.tokens
        if isinstance(event, Step):
            self.tokens += event.tokens

    @property
    def text(self) -> str:
        return self._tokenizer.decode(self._prompt + self.tokens)


def print_summary(console: Console, statistics: Statistics, **more: object) -> None:
    """The figures of a finished text, one a row, and what the caller adds."""
    s = statistics
    rows = [("prompt tokens", f"{s.n_prompt}"), ("generated", f"{s.n_generated}")]
    if s.n_drafted:
        rows += [
            ("drafted", f"{s.n_drafted}"),
            ("accepted", f"{s.n_accepted}"),
            ("acceptance rate", f"{s.acceptance_rate:.1%}"),
            ("tokens per pass", f"{s.tokens_per_pass:.2f}"),
        ]
        if s.speed_up:
            rows.append(("speed-up over the target alone", f"{s.speed_up:.2f}"))
    rows += [
        ("prefill", f"{s.prefill_seconds:.3f} s"),
        ("decode", f"{s.decode_seconds:.3f} s"),
        ("speed", f"{s.tokens_per_second:.1f} tok/s"),
        ("stopped by", f"{s.stop_reason}"),
        *((label, f"{value}") for label, value in more.items()),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)


def to_json(statistics: Statistics, text: str, tokens: list[int], **extra: Any) -> str:
    """One JSON object: the text, the tokens, every figure, and what the caller adds."""
    s = statistics
    return json.dumps(
        {
            "text": text,
            "tokens": tokens,
            "n_prompt": s.n_prompt,
            "n_generated": s.n_generated,
            "n_drafted": s.n_drafted,
            "n_accepted": s.n_accepted,
            "n_nodes": s.n_nodes,
            "acceptance_rate": s.acceptance_rate,
            "target_passes": s.target_passes,
            "tokens_per_pass": s.tokens_per_pass,
            "accepted_histogram": s.accepted_histogram,
            "prefill_seconds": s.prefill_seconds,
            "decode_seconds": s.decode_seconds,
            "tokens_per_second": s.tokens_per_second,
            "acceptance_by_position": s.acceptance_by_position,
            "speed_up": s.speed_up or None,
            "stop_reason": s.stop_reason,
        }
        | extra
    )
