"""A sweep's figures to eyes and files: table and bars for a terminal, JSON, CSV, an SVG. Knows no models."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from specdec.bench.sweep import Figures, Measured, Overall, conclusion, name_of, overall
from specdec.ui.output import on_one_line

MOST_POSITIONS = 8  # of a table's rates
HEADS = ("min", "mean", "max", "tok/s", "accepted", "a pass", "by position, %")
BAR_CELLS = 44
EIGHTHS = " ▏▎▍▌▋▊▉"
STYLES = ("magenta", "green", "red", "default")  # of temperatures, the first one greedy; all can be read on black and on white
COLORS = ("#0e7490", "#c2410c", "#7c3aed", "#4d7c0f")


@dataclass(frozen=True)
class Report:
    """What a sweep has found: figures by length and over all of them, in words too. notes: what was left out, and why."""

    title: str
    cells: list[Figures]
    totals: list[Figures]
    overall: Overall | None
    conclusion: str
    notes: list[str]
    is_whole: bool

    @classmethod
    def of(cls, measured: Measured, title: str, notes: Sequence[str]) -> "Report":
        cells, totals = measured.cells(), measured.totals()
        short = [] if measured.is_whole else [f"interrupted: what was measured until then, {len(measured.runs)} texts"]
        return cls(title, cells, totals, overall(cells), conclusion(totals), [*notes, *short], measured.is_whole)

    @property
    def charted(self) -> list[Figures]:
        """The totals but those of the draft alone, beside which the other bars would vanish."""
        return [figures for figures in self.totals if figures.kind != "draft"]

    def draft_alone_in_words(self) -> str:
        """What the charts leave out."""
        told = [f"{f.speedup_mean:.1f} ({self.name(f.temperature)})" for f in self.totals if f.kind == "draft"]
        return f"The draft alone, with texts of its own: {', '.join(told)}." if told else ""

    def experts_in_words(self) -> str:
        """Of a mixture, what the settings read."""
        told = [f"{f.experts_per_token:.1f} ({f.setting}, {self.name(f.temperature)})" for f in self.totals if f.experts_alone]
        return f"Experts that a layer reads for a token: {', '.join(told)}." if told else ""

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(figures.temperature for figures in self.totals))

    def name(self, temperature: float) -> str:
        return name_of(temperature, self.temperatures)

    def overall_in_words(self) -> str:
        """The line that other projects' tables end in."""
        if not self.overall:
            return ""
        best = self.overall.best
        return (
            f"Fixed γ: mean {self.overall.mean:.2f} times the target alone, best {best.speedup_mean:.2f} "
            f"({best.setting}, {self.name(best.temperature)}, {best.max_tokens} tokens), best text {self.overall.best_text:.2f}."
        )


# For a terminal


def show(report: Report, console: Console) -> None:
    """Table, bars, notes and the sentence; plain where the console is no terminal."""
    parts: list[RenderableType] = []
    if report.cells:
        title = Text("mean speed-up, all lengths", style="bold")
        parts = [Text(report.title, "bold"), to_table(report, console.width), Text(), title, to_bars(report, console), Text()]
    parts += [Text(on_one_line(note), style="dim") for note in report.notes]
    words = (report.draft_alone_in_words(), report.experts_in_words(), report.overall_in_words())
    parts += [Text(line) for line in words if line]
    console.print(Group(*parts, Text(report.conclusion, style="bold")))


def to_table(report: Report, width: int) -> Table:
    """A block of settings for each temperature and length, with heads of its own."""
    kinds = dict.fromkeys((f.temperature, f.max_tokens) for f in report.cells)
    titles = {kind: f"{report.name(kind[0])}, {kind[1]} tokens" for kind in kinds}
    names = max(len(name) for name in (*titles.values(), *(f.setting for f in report.cells)))
    widths = [names, 5, 5, 5, 6, 8, 6]
    while sum(widths) + len(widths) > width and len(widths) > 1:
        widths.pop()
    room = width - sum(widths) - len(widths)
    if room >= len(HEADS[-1]) and len(widths) == len(HEADS):
        widths.append(room)

    columns = [Column(min_width=n, justify="right" if 0 < i < len(HEADS) else "left") for i, n in enumerate(widths)]
    table = Table.grid(*columns, padding=(0, 1, 0, 0))
    for kind, title in titles.items():
        table.add_row(*[Text(title, "bold"), *(Text(head, "dim") for head in HEADS)][: len(widths)])
        for f in report.cells:
            if (f.temperature, f.max_tokens) == kind:
                table.add_row(*_row(f, room)[: len(widths)])
    return table


def _row(f: Figures, room: int) -> tuple[str, ...]:
    """room: cells for the rates by position, of which as many are shown as fit."""
    speeds = [f"{x:.2f}" for x in (f.speedup_min, f.speedup_mean, f.speedup_max)]
    rates = [f"{f.acceptance_rate:.0%}", f"{f.tokens_per_pass:.2f}"] if f.n_drafted else ["", ""]
    by_position = [f"{100 * rate:.0f}" for rate in f.acceptance_by_position[:MOST_POSITIONS]]
    if len(by_position) < len(f.acceptance_by_position):
        by_position.append("…")
    while len(" ".join(by_position)) > room and len(by_position) > 1:
        by_position[-2:] = ["…"]
    return (f.setting, *speeds, f"{f.tokens_per_second:.0f}", *rates, " ".join(by_position))


def to_bars(report: Report, console: Console) -> Table:
    """Mean speed-ups over all lengths, a bar for each setting and temperature."""
    table = Table.grid(*[Column(no_wrap=True) for _ in range(4)], padding=(0, 1, 0, 0))
    highest = max((f.speedup_mean for f in report.charted), default=1.0)
    cells = max(4, min(BAR_CELLS, console.width - 34))
    is_utf = console.encoding.startswith("utf")
    for setting, of_setting in _by_setting(report.charted):
        for i, f in enumerate(of_setting):
            style = STYLES[report.temperatures.index(f.temperature) % len(STYLES)]
            bar = Text(bar_of(f.speedup_mean / highest, cells, is_utf), style=style)
            table.add_row("" if i else setting, report.name(f.temperature), f"{f.speedup_mean:.2f}", bar)
    return table


def bar_of(share: float, cells: int, is_utf: bool = True) -> str:
    """A bar of that share of so many cells, to the eighth of one where the encoding has a sign for it."""
    if not is_utf:
        return "#" * round(share * cells)
    whole, eighths = divmod(round(share * cells * 8), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def _by_setting(totals: Sequence[Figures]) -> Iterator[tuple[str, list[Figures]]]:
    for setting in dict.fromkeys(f.setting for f in totals):
        yield setting, [f for f in totals if f.setting == setting]


# For programs


def to_json(report: Report, **more: Any) -> str:
    """One object: the figures, the words, and what the caller adds."""
    best = report.overall and {
        "mean": report.overall.mean,
        "best": report.overall.best.speedup_mean,
        "best_setting": asdict(report.overall.best),
        "best_text": report.overall.best_text,
    }
    return json.dumps(
        more
        | {
            "cells": [asdict(f) for f in report.cells],
            "totals": [asdict(f) for f in report.totals],
            "fixed_gamma": best,
            "conclusion": report.conclusion,
            "notes": report.notes,
            "interrupted": not report.is_whole,
        }
    )


def to_csv(report: Report) -> str:
    """A row for each setting, temperature and length; rates by position are parted by spaces."""
    out = io.StringIO()
    names = [field.name for field in fields(Figures)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for f in report.cells:
        by_position = " ".join(f"{rate:.4f}" for rate in f.acceptance_by_position)
        floats = {name: f"{value:.4f}" for name, value in asdict(f).items() if isinstance(value, float) and name != "temperature"}
        writer.writerow(asdict(f) | floats | {"acceptance_by_position": by_position})
    return out.getvalue()


# For a page


def check_writable(path: str) -> None:
    """Before a long run: whether a file can be written there; leaves none behind. Raises ValueError."""
    try:
        was_there = Path(path).exists()
        with Path(path).open("a"):
            pass
        if not was_there:
            Path(path).unlink()
    except (OSError, ValueError) as error:
        raise ValueError(f"--svg: {_not_written(path, error)}") from None


def write_svg(report: Report, path: str) -> str:
    """Draw it, if there is anything to draw; a word on why it could not be written, else nothing."""
    try:
        if report.totals:
            Path(path).write_text(to_svg(report), encoding="utf-8")
    except OSError as error:
        return _not_written(path, error)
    return ""


def _not_written(path: str, error: Exception) -> str:
    return f"cannot write {path}: {getattr(error, 'strerror', None) or error}"


WIDTH, MARGIN, LABELS, VALUES = 760, 24, 104, 150  # px: of the picture, around it, left of the bars, right of them
BAR, GAP, TOP, BOTTOM = 15, 13, 96, 62  # px: height of a bar, between settings, above the first one, below the last
CHARACTER = 6.6  # px that one takes at most on the average, at FONT
FONT = 12
INK, PALE = "#1f2937", "#6b7280"


def to_svg(report: Report) -> str:
    """Speed-ups by setting, a bar for each temperature: its end is the mean over all texts, the line its smallest and largest."""
    settings = list(_by_setting(report.charted))
    highest = max((f.speedup_max for f in report.charted), default=1.0)
    step = next((s for s in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0) if highest / s <= 9), highest / 4)
    scale = (WIDTH - 2 * MARGIN - LABELS - VALUES) / (step * -(-highest // step))
    left = MARGIN + LABELS
    height = TOP + sum(BAR * len(of) + GAP for _, of in settings) + BOTTOM
    bottom = height - BOTTOM
    parts = [f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    parts.append(_text(MARGIN, 34, report.title, size=16))
    parts.append(_text(MARGIN, 54, "times the target alone: mean of all texts, and its smallest and largest", color=PALE))
    x = float(MARGIN)
    for i, temperature in enumerate(report.temperatures):
        parts.append(f'<rect x="{x:.1f}" y="66" width="11" height="11" rx="2" fill="{COLORS[i % len(COLORS)]}"/>')
        parts.append(_text(x + 16, 76, report.name(temperature)))
        x += 36 + CHARACTER * len(report.name(temperature))
    for tick in sorted({1.0, *(step * i for i in range(int(-(-highest // step)) + 1))}):
        at = left + scale * tick
        look = f'stroke="{PALE}" stroke-dasharray="4 3"' if tick == 1 else 'stroke="#e5e7eb"'
        parts.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{bottom}" {look}/>')
        if tick != 1 or scale > CHARACTER * 1.5:  # beside the 0
            parts.append(_text(at, bottom + 17, f"{tick:g}", color=PALE, anchor="middle"))
    y = float(TOP)
    for setting, of_setting in settings:
        parts.append(_text(left - 10, y + BAR * len(of_setting) / 2 + 4, setting, anchor="end"))
        for f in of_setting:
            color, middle = COLORS[report.temperatures.index(f.temperature) % len(COLORS)], y + BAR / 2 - 0.5
            low, mean, high = (left + scale * v for v in (f.speedup_min, f.speedup_mean, f.speedup_max))
            parts.append(f'<rect x="{left}" y="{y:.1f}" width="{mean - left:.1f}" height="{BAR - 2}" rx="2" fill="{color}"/>')
            if high > low:
                whisker = f"M{low:.1f} {middle - 3}v6M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 3}v6"
                parts.append(f'<path d="{whisker}" stroke="{INK}" stroke-opacity=".55" stroke-width="1.5"/>')
            told = f"{f.speedup_mean:.2f} · {f.tokens_per_second:.0f} tok/s"
            # white in front of the lines is a text of its own: where paint-order is not known, a stroke would lie on the letters
            looks = {"white": ' stroke="white" stroke-width="3" aria-hidden="true"', INK: ""}
            parts += [_text(max(mean, high) + 7, middle + 4, told, color=color, more=more) for color, more in looks.items()]
            y += BAR
        y += GAP
    parts.append(_text(MARGIN, height - 16, report.draft_alone_in_words(), color=PALE))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, \'DejaVu Sans\', Helvetica, Arial, sans-serif" role="img">\n'
        f"<title>{escape(_fitting(report.title, 200))}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, size: int = FONT, color: str = INK, anchor: str = "start", more: str = "") -> str:
    """A line at most as long as the picture has room for; one that is larger than others is bold. more: attributes."""
    room = x if anchor == "end" else WIDTH - MARGIN - x
    width, weight = (CHARACTER * size / FONT * 1.25, ' font-weight="600"') if size > FONT else (CHARACTER, "")
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{weight}'
    return f'<text {place} fill="{color}"{more}>{escape(_fitting(text, int(room / width)))}</text>'


def _fitting(text: str, n: int) -> str:
    """No control characters, which XML does not know, and no more than n characters."""
    text = on_one_line(text)
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= n else text[: max(n - 1, 0)] + "…"
