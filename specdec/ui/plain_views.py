"""Plain-text and JSON views of decoding events, and the summaries printed after a run.

A view is a context manager that receives the events of one generation. On leaving, also by an exception, it shows all the text
it has. `print_result` then prints the result, and `print_summary` all statistics.
"""

import json
import re
import unicodedata
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from specdec.events import Event, PrefillProgress, Prompt, Statistics, Step, ThoughtStep
from specdec.ui.signals import signals

# What terminals interpret: control sequences, control strings up to their end, short escapes; and bidirectional controls.
_CONTROL_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)|\x1b[ -/]*[0-~]"
)
_PARTIAL_SEQUENCE = re.compile(r"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|\x1b[]PX^_][^\x07\x1b\x9c\n]*\x1b?|\x1b[ -/]*)\Z")
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
MIN_ADVICE_PASSES = 20  # fewer passes say nothing about a draft
MAX_POSITIONS_SHOWN = 8  # in the summary
# The statistics in the JSON output.
STATISTICS_FIELDS = (
    "n_prompt", "n_generated", "n_drafted", "n_accepted", "n_nodes", "acceptance_rate", "target_passes", "tokens_per_pass",
    "accepted_histogram", "prefill_seconds", "decode_seconds", "tokens_per_second", "acceptance_by_position", "speed_up",
    "experts_alone", "experts_per_token", "stop_reason",
)  # fmt: skip
MAX_SEQUENCE_LENGTH = 64  # characters of an unfinished control sequence that are held back


class View(Protocol):
    """The interface of a view: a context manager that shows the decoding events of one generation.

    Attributes:
        ended: Whether the user has asked the view to end the generation.
    """

    ended: bool = False

    def __enter__(self) -> "View":
        """Start to show a generation; this one does nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing; this one does nothing."""
        return

    def show(self, event: Event | PrefillProgress) -> None:
        """Show one decoding event, such as the prompt or a verified step."""


@dataclass(frozen=True)
class ModelLabels:
    """The names of the models in views.

    Attributes:
        target: Name of the target.
        draft_label: Origin of draft tokens ("by stories650K", "from what came before"); "" without a draft.
        pair: Name of target and draft together.
    """

    target: str
    draft_label: str = ""
    pair: str = ""

    @classmethod
    def from_names(cls, target: str, draft: str, stage: str) -> "ModelLabels":
        """Return the labels of models with these names or paths, or keywords such as "lookup"; "" for none."""
        file_names = [Path(name).name for name in (target, draft, stage) if name]
        names = [sanitize_line(name.removesuffix(".bin").removesuffix(".gguf")) for name in file_names]
        origins = {"lookup": "from what came before", "self": f"by {names[0]} in fewer bits", "mtp": f"by {names[0]}'s own head"}
        return cls(names[0], origins.get(draft, f"by {names[1]}") if draft else "", " + ".join(names))


def format_time_left(seconds: float, share: float) -> str:
    """Return the estimated time left as text, such as ", 12 s left"; "" while at most 1% is completed.

    Args:
        seconds: Time taken so far.
        share: Completed fraction, 0 to 1.
    """
    return f", {seconds * (1 - share) / share:.0f} s left" if share > 0.01 else ""


def sanitize(text: str) -> str:
    """Return text without control sequences and control characters, also bidirectional ones; line breaks and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    text = _CONTROL_SEQUENCE.sub("", text).replace("\u2028", "\n").replace("\u2029", "\n")
    return "".join([c for c in text if c in "\n\t" or not (unicodedata.category(c) == "Cc" or c in _BIDI_CONTROLS)])


def sanitize_line(text: str) -> str:
    """Return untrusted text as one line without control characters; whitespace becomes single spaces."""
    return " ".join(sanitize(text).split())


class StreamSanitizer:
    """A filter that removes control characters from text that comes in pieces, even if a control sequence spans pieces."""

    def __init__(self) -> None:
        """Start before the first text."""
        self._partial = ""

    def push(self, text: str) -> str:
        """Add a piece and return its sanitized text; the start of an unfinished control sequence is held back."""
        text = self._partial + text
        unfinished = _PARTIAL_SEQUENCE.search(text)
        self._partial = unfinished[0] if unfinished and len(unfinished[0]) <= MAX_SEQUENCE_LENGTH else ""
        return sanitize(text[: len(text) - len(self._partial)])

    def end(self) -> str:
        """Return, after the last piece, the sanitized text of a control sequence that was held back and never ended."""
        return sanitize(self._partial)


def run_view(view: View, events: Iterator[Event | PrefillProgress], statistics: Statistics, prompt: Prompt | None = None) -> None:
    """Show the decoding events of a generation in a view until the generation, the view or a signal ends it.

    End signals are deferred from here on. If the view or a signal ends the generation, its stop reason is "interrupted".

    Args:
        view: The view; entered here, and left at the end.
        events: The decoding events; a generator is closed at the end.
        statistics: Statistics that each event is added to.
        prompt: Shown if the generation ends before its prompt was shown.
    """
    signals.begin_output()
    has_begun = False
    with view:
        for event in events:
            has_begun = has_begun or isinstance(event, Prompt)
            statistics.add(event)
            view.show(event)
            if signals.end_signal or view.ended:
                statistics.stop_reason = "interrupted"
                break
        if isinstance(events, Generator):  # removes its status line
            events.close()
        if prompt and not has_begun:
            view.show(prompt)


def format_thought(step: ThoughtStep) -> str:
    """Return the time and the number of tokens of a thought as text, such as "thought for 3.2 s, 212 tokens"."""
    n = step.n_thought_tokens
    return f"thought for {step.thought_seconds:.1f} s, {n} token{'s' * (n != 1)}"


class PlainView(View):
    """A view that writes the prompt and the generated text to a stream as they come, without colours or statistics.

    Args:
        out: The stream.
        thought_out: The stream for a thought before the text, and for its time and length; None to leave them out.
    """

    def __init__(self, out: TextIO, thought_out: TextIO | None = None) -> None:
        """Store the streams to write to."""
        self._sanitizer, self._out = StreamSanitizer(), out
        self._thought_sanitizer, self._thought_out = StreamSanitizer(), thought_out
        self._is_mid_row = self._has_thought = False

    def __exit__(self, *_: object) -> None:
        """Write the text that was held back, and a line break."""
        self._out.write(self._sanitizer.end() + "\n")
        self._out.flush()

    def show(self, event: Event | PrefillProgress) -> None:
        """Write the text of a prompt or step; before the status line of a later prefill, end the row on a terminal."""
        if isinstance(event, ThoughtStep) and self._thought_out:
            self._show_thought(event, self._thought_out)
        if isinstance(event, Prompt | Step):
            self._out.write(self._sanitizer.push(event.text))
            self._out.flush()
        elif isinstance(event, PrefillProgress):
            self._end_row()  # the status line of the prefill takes the row
        self._is_mid_row = isinstance(event, Prompt | Step)

    def _end_row(self) -> None:
        if self._is_mid_row and self._out.isatty():
            self._out.write("\n")
            self._out.flush()

    def _show_thought(self, step: ThoughtStep, out: TextIO) -> None:
        text = self._thought_sanitizer.push("".join(step.thought_pieces))
        if text and not self._has_thought:
            self._end_row()
            self._has_thought = True
        is_end = step.is_thought_end and self._has_thought
        out.write(f"{text}{self._thought_sanitizer.end()}\n{format_thought(step)}\n" if is_end else text)
        out.flush()


class SilentView(View):
    """A view that collects text and tokens and shows nothing, for JSON output at the end."""

    def __init__(self) -> None:
        """Start without text and tokens."""
        self.text = ""
        self.tokens: list[int] = []

    def show(self, event: Event | PrefillProgress) -> None:
        """Append the text of a prompt or step, and the tokens of a step, to the collected ones."""
        if isinstance(event, Prompt | Step):
            self.text += event.text
        if isinstance(event, Step):
            self.tokens += event.tokens


def format_result(statistics: Statistics, labels: ModelLabels, is_same_text: bool) -> str:
    """Return one sentence that compares a generation's speed with the target alone; "" if nothing was drafted.

    It also says that the output is the same if `is_same_text`, else that its distribution is.
    """
    s = statistics
    if not s.n_drafted:
        return ""
    same_output = "same output" if is_same_text else "same distribution"
    per_pass = f"{s.tokens_per_pass:.1f} tokens per pass"
    if not s.speed_up:
        return f"{per_pass} of {labels.target} instead of 1; {same_output}."
    if 0.95 <= s.speed_up < 1.05:
        return f"As fast as {labels.target} alone, {per_pass}; {same_output}."
    return f"{s.speed_up:.{1 if s.speed_up > 1 else 2}f} times as fast as {labels.target} alone, {per_pass}; {same_output}."


def get_advice(statistics: Statistics, is_auto: bool) -> str:
    """Return a note for the user if the draft was hardly used or made generation slower; "" if there is none.

    Args:
        statistics: Statistics of a generation with a draft model.
        is_auto: Whether the draft length adapts (-g auto).
    """
    n_passes, n_drafted = statistics.target_passes, sum(statistics.drafted_histogram[1:])
    if n_passes < MIN_ADVICE_PASSES:
        return ""
    if is_auto and n_drafted < n_passes / 4:
        return f"only {n_drafted} of {n_passes} passes had a draft, because more would cost more time than they save"
    if not is_auto and statistics.speed_up and statistics.speed_up < 1:
        return "-g makes generation slower here; leave it out"
    return ""


def print_result(console: Console, statistics: Statistics, labels: ModelLabels, is_same_text: bool, note: str, more: str) -> None:
    """Print the result of a generation in a few lines: speed-up over the target alone, a note, and the tokens and their speed.

    Args:
        console: Where to print.
        statistics: Statistics of the generation.
        labels: Names of the models.
        is_same_text: Whether the output equals the target's own, rather than its distribution.
        note: Advice; "" for none.
        more: Suffix of the last line.
    """
    s = statistics
    sentence = format_result(s, labels, is_same_text)
    if sentence:
        console.print(Text(sentence, "bold"))
    if note:
        console.print(Text(f"note: {note}"))
    speed = "" if not s.n_generated else f" at {s.tokens_per_second:,.0f} tok/s"
    end = ", interrupted" if s.stop_reason == "interrupted" else ""
    console.print(Text(f"{s.n_generated} token{'s' * (s.n_generated != 1)}{speed}{end}; {more}", "dim"))


def print_summary(console: Console, statistics: Statistics, **more: object) -> None:
    """Print all statistics of a finished generation as a table with one value per row.

    Args:
        console: Where to print.
        statistics: Statistics of the generation.
        **more: Labels and values of further rows.
    """
    s = statistics
    rows = [("prompt tokens", f"{s.n_prompt}"), ("generated", f"{s.n_generated}")]
    if s.n_drafted:
        rows += [
            ("drafted", f"{s.n_drafted}"),
            ("accepted", f"{s.n_accepted}"),
            ("acceptance rate", f"{s.acceptance_rate:.1%}"),
            ("by position", _format_by_position(s.acceptance_by_position)),
            ("mean length", f"{s.tokens_per_pass:.2f} tokens a pass"),
        ]
        if s.accepted_by_source:
            rows.append(("right by source", ", ".join(f"{name} {n}" for name, n in s.accepted_by_source.items())))
        if s.coverage is not None:
            rows.append(("candidates of the draft", f"{s.coverage:.1%} of the last tokens"))
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


def _format_by_position(rates: list[float]) -> str:
    """Return the acceptance rates of the first MAX_POSITIONS_SHOWN draft positions as text, with "..." if there are more."""
    shown = " ".join([f"{rate:.0%}" for rate in rates[:MAX_POSITIONS_SHOWN]])
    return shown + " ..." * (len(rates) > MAX_POSITIONS_SHOWN)


def to_json(statistics: Statistics, text: str, tokens: list[int], **extra: object) -> str:
    """Return a generation as the text of one JSON object: its text, tokens and statistics, and the fields in `extra`."""
    fields = {name: getattr(statistics, name) for name in STATISTICS_FIELDS}
    experts = {name: fields[name] or None for name in ("experts_alone", "experts_per_token")}
    return json.dumps({"text": text, "tokens": tokens} | fields | experts | extra)
