"""Events to plain text, JSON and a summary. Knows no models.

Each view is a context manager that is shown the events of a text; on leaving, also by an exception, it shows all text there is.
What came of it is `print_result`'s to say, once the story is over, and `print_summary` has all figures.
"""

import json
import re
import unicodedata
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from specdec.engine.decoding import Event, Prefill, Prompt, Statistics, Step
from specdec.ui.signals import signals

# What terminals obey: control sequences, strings up to their end, and short ones; and what turns the direction of a row
_SEQUENCES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)|\x1b[ -/]*[0-~]")
_UNFINISHED = re.compile(r"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|\x1b[]PX^_][^\x07\x1b\x9c\n]*\x1b?|\x1b[ -/]*)\Z")
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
FEW_PASSES = 20  # that tell nothing
MOST_POSITIONS = 8  # in the table of figures
# of a text's statistics, in its JSON
FIGURES = (
    "n_prompt", "n_generated", "n_drafted", "n_accepted", "n_nodes", "acceptance_rate", "target_passes", "tokens_per_pass",
    "accepted_histogram", "prefill_seconds", "decode_seconds", "tokens_per_second", "acceptance_by_position", "speed_up",
    "experts_alone", "experts_per_token", "stop_reason",
)  # fmt: skip
LONGEST_SEQUENCE = 64  # characters that wait for the end of one


class View(Protocol):
    """What the events of a text go to. ended: whether somebody has seen enough."""

    ended: bool = False

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def show(self, event: Event | Prefill) -> None: ...


@dataclass(frozen=True)
class Roles:
    """Who writes: the target's name, where guesses come from ("by stories650K", "from the text so far"; "" for no guesses), and
    what both are called together."""

    target: str
    guessed: str = ""
    pair: str = ""


def time_left(seconds: float, share: float) -> str:
    """How long what has taken so many seconds will go on, as words behind others; "" where nobody can tell yet."""
    return f", {seconds * (1 - share) / share:.0f} s left" if share > 0.01 else ""


def printable(text: str) -> str:
    """Text without what could move a cursor or turn a row; line breaks and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    text = _SEQUENCES.sub("", text).replace("\u2028", "\n").replace("\u2029", "\n")
    return "".join([c for c in text if c in "\n\t" or not (unicodedata.category(c) == "Cc" or c in _TURNING)])


def on_one_line(text: str) -> str:
    """A name of which nobody knows what is in it, or a message with names, as a terminal may show it: `printable`, in one row."""
    return " ".join(printable(text).split())


class Printable:
    """`printable` for a text that comes in pieces: a control sequence may begin in one and end in another."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, text: str) -> str:
        text = self._rest + text
        unfinished = _UNFINISHED.search(text)
        self._rest = unfinished[0] if unfinished and len(unfinished[0]) <= LONGEST_SEQUENCE else ""
        return printable(text[: len(text) - len(self._rest)])

    def end(self) -> str:
        """What is left of a sequence that never ended."""
        return printable(self._rest)


def show(view: View, events: Iterator[Event | Prefill], statistics: Statistics, prompt: Prompt | None = None) -> None:
    """Show the events, until the text or somebody's patience is at its end; one that ends before it begins is its prompt."""
    signals.text_begins()
    has_begun = False
    with view:
        for event in events:
            has_begun = has_begun or isinstance(event, Prompt)
            statistics.add(event)
            view.show(event)
            if signals.asked or view.ended:
                statistics.stop_reason = "interrupted"
                break
        if isinstance(events, Generator):  # its line goes
            events.close()
        if prompt and not has_begun:
            view.show(prompt)


class PlainView(View):
    """The text alone, as it comes."""

    def __init__(self, out: TextIO) -> None:
        self._printable, self._out = Printable(), out
        self._is_in_row = False

    def __exit__(self, *_: Any) -> None:
        self._out.write(self._printable.end() + "\n")
        self._out.flush()

    def show(self, event: Event | Prefill) -> None:
        if isinstance(event, Prompt | Step):
            self._out.write(self._printable.push(event.text))
            self._out.flush()
        elif isinstance(event, Prefill) and self._is_in_row and self._out.isatty():  # its row is about to be that of the reading
            self._out.write("\n")
            self._out.flush()
        self._is_in_row = isinstance(event, Prompt | Step)


class SilentView(View):
    """Collects the text, and shows nothing: for JSON, which comes at the end."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []

    def show(self, event: Event | Prefill) -> None:
        if isinstance(event, Prompt | Step):
            self.text += event.text
        if isinstance(event, Step):
            self.tokens += event.tokens


def result(statistics: Statistics, roles: Roles, is_same_text: bool) -> str:
    """Return what came of the guesses, in a sentence; "" if there were none."""
    s = statistics
    if not s.n_drafted:
        return ""
    same = "the same text" if is_same_text else "the same distribution"
    if not s.speed_up:
        return f"{s.tokens_per_pass:.1f} tokens in a pass of {roles.target}, which alone writes one; {same}."
    if 0.95 <= s.speed_up < 1.05:
        return f"As fast as {roles.target} alone; {same}."
    return f"{s.speed_up:.{1 if s.speed_up > 1 else 2}f} times as fast as {roles.target} alone; {same}."


def print_result(console: Console, statistics: Statistics, roles: Roles, is_same_text: bool, note: str, more: str) -> None:
    """A sentence, what can be done better, how much there was, and what the caller has to add."""
    s = statistics
    sentence = result(s, roles, is_same_text)
    if sentence:
        console.print(Text(sentence, "bold"))
    if note:
        console.print(Text(f"note: {note}"))
    speed = "" if not s.n_generated else f" at {s.tokens_per_second:,.0f} tok/s"
    end = ", interrupted" if s.stop_reason == "interrupted" else ""
    console.print(Text(f"{s.n_generated} token{'s' * (s.n_generated != 1)}{speed}{end}; {more}", "dim"))


def print_summary(console: Console, statistics: Statistics, **more: object) -> None:
    """The figures of a finished text, one a row, and what the caller adds."""
    s = statistics
    rows = [("prompt tokens", f"{s.n_prompt}"), ("generated", f"{s.n_generated}")]
    if s.n_drafted:
        rows += [
            ("drafted", f"{s.n_drafted}"),
            ("accepted", f"{s.n_accepted}"),
            ("acceptance rate", f"{s.acceptance_rate:.1%}"),
            ("by position", _by_position(s.acceptance_by_position)),
            ("mean length", f"{s.tokens_per_pass:.2f} tokens a pass"),
        ]
        if s.speed_up:
            rows.append(("speed-up over the target alone", f"{s.speed_up:.2f}"))
    if s.experts_alone:
        rows.append(("experts a token", f"{s.experts_alone} alone, {s.experts_per_token:.1f} in these passes"))
    rows += [
        ("prefill", f"{s.prefill_seconds:.3f} s"),
        ("decode", f"{s.decode_seconds:.3f} s"),
        ("speed", f"{s.tokens_per_second:.1f} tok/s"),
        ("stopped by", f"{s.stop_reason}"),
        *((label, f"{value}") for label, value in more.items()),
    ]
    table = Table.grid(Column(style="dim"), Column(justify="right"), padding=(0, 2))
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)


def _by_position(rates: list[float]) -> str:
    """Acceptance of the first proposals, the second ones, ..., as many as fit."""
    shown = " ".join([f"{rate:.0%}" for rate in rates[:MOST_POSITIONS]])
    return shown + " ..." * (len(rates) > MOST_POSITIONS)


def to_json(statistics: Statistics, text: str, tokens: list[int], **extra: Any) -> str:
    """One JSON object: the text, the tokens, every figure, and what the caller adds."""
    told = {name: getattr(statistics, name) for name in FIGURES}
    experts = {name: told[name] or None for name in ("experts_alone", "experts_per_token")}
    return json.dumps({"text": text, "tokens": tokens} | told | experts | extra)
