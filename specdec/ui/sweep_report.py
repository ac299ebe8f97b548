"""Reports of a sweep: a table and bars for the terminal or as SVG, and JSON."""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from specdec.bench.sweep import (
    SettingResult,
    SweepRuns,
    format_conclusion,
    format_temperature,
)
from specdec.ui.plain_views import sanitize_line

MAX_POSITIONS_SHOWN = 8  # acceptance rates in the table
COLUMN_TITLES = ("min", "mean", "max", "tok/s", "accepted", "a pass", "by position, %")
MAX_BAR_CELLS = 44
EIGHTH_BLOCKS = " ▏▎▍▌▋▊▉"
STYLES = ("magenta", "green", "red", "default")  # by temperature, the first one greedy; readable on black and on white
SVG_WIDTH = 100  # cells


@dataclass(frozen=True)
class SweepReport:
    """The report of a sweep over speculation settings: results by length and over all lengths, notes and a conclusion.

    Attributes:
        title: Name of the pair.
        cells: Results by setting, temperature and length.
        totals: Results by setting and temperature.
        conclusion: One sentence on the best options.
        notes: What was left out, and why.
        is_complete: Whether the sweep ran to its end.
    """

    title: str
    cells: list[SettingResult]
    totals: list[SettingResult]
    conclusion: str
    notes: list[str]
    is_complete: bool

    @classmethod
    def from_runs(cls, measured: SweepRuns, title: str, notes: Sequence[str]) -> "SweepReport":
        """Compute the report of a sweep from its recorded runs; an interrupted sweep gets a note.

        Args:
            measured: The runs.
            title: Name of the pair.
            notes: What was left out, and why.
        """
        cells, totals = measured.compute_cells(), measured.compute_totals()
        interrupted = [] if measured.is_complete else [f"interrupted: results of {len(measured.runs)} texts"]
        return cls(title, cells, totals, format_conclusion(totals), [*notes, *interrupted], measured.is_complete)

    @property
    def charted_totals(self) -> list[SettingResult]:
        """The totals without those of the draft alone, which would dwarf the other bars."""
        return [result for result in self.totals if result.kind != "draft"]

    def format_draft_alone(self) -> str:
        """Return one sentence on the speed-up of the draft alone, which has no bar; "" if it was not measured."""
        speedups = [f"{f.speedup_mean:.1f} ({self.format_temperature(f.temperature)})" for f in self.totals if f.kind == "draft"]
        return f"The draft alone, with texts of its own: {', '.join(speedups)}." if speedups else ""

    def format_experts(self) -> str:
        """Return one sentence on how many experts a mixture reads per token under each setting; "" for other models."""
        counts = [
            f"{f.experts_per_token:.1f} ({f.setting}, {self.format_temperature(f.temperature)})"
            for f in self.totals
            if f.experts_alone
        ]
        return f"Experts that a layer reads for a token: {', '.join(counts)}." if counts else ""

    @property
    def temperatures(self) -> list[float]:
        """The distinct sampling temperatures of the sweep, in order."""
        return list(dict.fromkeys(result.temperature for result in self.totals))

    def format_temperature(self, temperature: float) -> str:
        """Return the name of a temperature in the report, such as "greedy", "sampled" or "temperature 0.7"."""
        return format_temperature(temperature, self.temperatures)


# Terminal


def print_report(report: SweepReport, console: Console) -> None:
    """Print the table, bars, notes and conclusion of a sweep report, without styles if the console is not a terminal."""
    parts: list[RenderableType] = []
    if report.cells:
        title = Text("mean speed-up, all lengths", style="bold")
        name = Text(sanitize_line(report.title), "bold")
        parts = [name, to_table(report, console.width), Text(), title, to_bars(report, console), Text()]
    parts += [Text(sanitize_line(note), style="dim") for note in report.notes]
    lines = (report.format_draft_alone(), report.format_experts())
    parts += [Text(line) for line in lines if line]
    console.print(Group(*parts, Text(report.conclusion, style="bold")))


def to_table(report: SweepReport, width: int) -> Table:
    """Return a Rich table of a report with a block of settings for each temperature and length, each with its header.

    Columns at the right that do not fit `width` are left out.
    """
    groups = dict.fromkeys((f.temperature, f.max_tokens) for f in report.cells)
    titles = {group: f"{report.format_temperature(group[0])}, {group[1]} tokens" for group in groups}
    names = max(len(name) for name in (*titles.values(), *(f.setting for f in report.cells)))
    widths = [names, 5, 5, 5, 6, 8, 6]
    while sum(widths) + len(widths) > width and len(widths) > 1:
        widths.pop()
    rates_width = width - sum(widths) - len(widths)
    if rates_width >= len(COLUMN_TITLES[-1]) and len(widths) == len(COLUMN_TITLES):
        widths.append(rates_width)

    columns = [Column(min_width=n, justify="right" if 0 < i < len(COLUMN_TITLES) else "left") for i, n in enumerate(widths)]
    table = Table.grid(*columns, padding=(0, 1, 0, 0))
    for group, title in titles.items():
        table.add_row(*[Text(title, "bold"), *(Text(head, "dim") for head in COLUMN_TITLES)][: len(widths)])
        for f in report.cells:
            if (f.temperature, f.max_tokens) == group:
                table.add_row(*_format_row(f, rates_width)[: len(widths)])
    return table


def _format_row(f: SettingResult, rates_width: int) -> tuple[str, ...]:
    """Return the table row of a result as one text per column; the last has as many acceptance rates as `rates_width` fits."""
    speeds = [f"{x:.2f}" for x in (f.speedup_min, f.speedup_mean, f.speedup_max)]
    rates = [f"{f.acceptance_rate:.0%}", f"{f.tokens_per_pass:.2f}"] if f.n_drafted else ["", ""]
    by_position = [f"{100 * rate:.0f}" for rate in f.acceptance_by_position[:MAX_POSITIONS_SHOWN]]
    if len(by_position) < len(f.acceptance_by_position):
        by_position.append("…")
    while len(" ".join(by_position)) > rates_width and len(by_position) > 1:
        by_position[-2:] = ["…"]
    return (f.setting, *speeds, f"{f.tokens_per_second:.0f}", *rates, " ".join(by_position))


def to_bars(report: SweepReport, console: Console) -> Table:
    """Return a Rich table with a bar of the mean speed-up over all lengths for each setting and temperature."""
    table = Table.grid(*[Column(no_wrap=True) for _ in range(4)], padding=(0, 1, 0, 0))
    highest = max((f.speedup_mean for f in report.charted_totals), default=1.0)
    cells = max(4, min(MAX_BAR_CELLS, console.width - 34))
    is_utf = console.encoding.startswith("utf")
    for setting, results in _group_by_setting(report.charted_totals):
        for i, f in enumerate(results):
            style = STYLES[report.temperatures.index(f.temperature) % len(STYLES)]
            bar = Text(make_bar(f.speedup_mean / highest, cells, is_utf), style=style)
            table.add_row("" if i else setting, report.format_temperature(f.temperature), f"{f.speedup_mean:.2f}", bar)
    return table


def make_bar(share: float, cells: int, is_utf: bool = True) -> str:
    """Return a text bar that fills `share` (0 to 1) of `cells` terminal cells, in eighths of a cell, or in # without UTF."""
    if not is_utf:
        return "#" * round(share * cells)
    whole, eighths = divmod(round(share * cells * 8), 8)
    return "█" * whole + EIGHTH_BLOCKS[eighths].strip()


def _group_by_setting(totals: Sequence[SettingResult]) -> Iterator[tuple[str, list[SettingResult]]]:
    for setting in dict.fromkeys(f.setting for f in totals):
        yield setting, [f for f in totals if f.setting == setting]


# JSON


def to_json(report: SweepReport, **more: object) -> str:
    """Return a sweep report as the text of one JSON object, with the further fields in `more`."""
    return json.dumps(
        more
        | {
            "cells": [asdict(f) for f in report.cells],
            "totals": [asdict(f) for f in report.totals],
            "conclusion": report.conclusion,
            "notes": report.notes,
            "interrupted": not report.is_complete,
        }
    )


# SVG


def check_writable(path: str) -> None:
    """Check that a file can be written at a path; leave no new file behind.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        was_there = Path(path).exists()
        with Path(path).open("a"):
            pass
        if not was_there:
            Path(path).unlink()
    except (OSError, ValueError) as error:
        raise ValueError(f"--svg: {_format_write_error(path, error)}") from None


def write_svg(report: SweepReport, path: str) -> str:
    """Write a picture of a report to an SVG file, if there are results; return an error message, or "" on success."""
    try:
        if report.totals:
            Path(path).write_text(to_svg(report), encoding="utf-8", errors="replace")
    except OSError as error:
        return _format_write_error(path, error)
    return ""


def _format_write_error(path: str, error: Exception) -> str:
    return f"cannot write {path}: {getattr(error, 'strerror', None) or error}"


def to_svg(report: SweepReport) -> str:
    """Return a picture of a report as SVG text, with what `print_report` prints."""
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=SVG_WIDTH)
    print_report(report, console)
    return console.export_svg(title=sanitize_line(report.title))
