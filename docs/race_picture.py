"""Draw the animated docs/race.svg from a real race: python docs/race_picture.py [OUT [TARGET DRAFT]].

Both outputs are those of the fastest runs. Each word appears when its pass has ended, a fixed factor slower than measured.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec import CheckpointError, Sampling, SpeculativeDecoder
from specdec.bench.measure import RecordedRun
from specdec.bench.race import format_seconds, measure
from specdec.loaders.model_paths import get_default_pair
from specdec.ui.plain_views import ModelLabels
from specdec.ui.race import RunReplay
from specdec.ui.text_layout import Row

PROMPT, MAX_TOKENS, SAMPLING = "Once upon a time", 160, Sampling(0)
RACE_DURATION_S, END_HOLD_S = 9.0, 5.0  # animation of the slower run, and display of the finished race
COLUMNS, MAX_ROWS = 46, 60
CELL_WIDTH, LINE_HEIGHT, PADDING, TOP_MARGIN = 7.83, 19, 16, 48  # for a monospaced font of 13 pixels
PANE_WIDTH = COLUMNS * CELL_WIDTH + 28
COLORS = {"prompt": "#f0f6fc", "accepted": "#4ade80", "target": "#c9d1d9", "frame": "#30363d", "faint": "#8b949e"}
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


class AnimationClock:
    """CSS classes of elements that appear, or finish growing, at a moment of a recording.

    Args:
        slowdown: Seconds of the animation for each measured second.
        duration_s: Seconds of the whole animation, which then starts again.
    """

    def __init__(self, slowdown: float, duration_s: float) -> None:
        """Create a clock without classes."""
        self.slowdown, self._duration_s = slowdown, duration_s
        self._class_names: dict[tuple[str, str], str] = {}

    def get_class(self, seconds: float, how: str = "shown") -> str:
        """Return the class of an element that appears ("shown") or finishes growing ("grows") at a measured time."""
        share = f"{100 * seconds * self.slowdown / self._duration_s:.2f}"
        return self._class_names.setdefault((share, how), f"{how[0]}{len(self._class_names)}")

    def to_css(self) -> str:
        """Return the animations of all classes."""
        rules = []
        for (share, how), name in self._class_names.items():
            first, last = ("opacity:0", "opacity:1") if how == "shown" else ("transform:scaleX(0)", "transform:none")
            rules.append(f"@keyframes {name}{{0%{{{first}}}{share}%{{{last}}}}}.{name}{{animation-name:{name}}}")
        rules.append(
            f"[class]{{animation-duration:{self._duration_s:g}s;animation-iteration-count:infinite;animation-timing-function:step-end}}"
        )
        rules.append("rect[class]{animation-timing-function:linear}@media(prefers-reduced-motion){[class]{animation:none}}")
        return "\n".join(rules)


def make_text(x: float, y: float, text: str, color: str, name: str = "", weight: int = 400) -> str:
    """Return an SVG text element."""
    extra = f' class="{name}"' * bool(name) + f' font-weight="{weight}"' * (weight != 400)
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{extra}>{escape(text)}</text>'


def find_new_words(before: list[Row], after: list[Row]) -> Iterator[tuple[int, int, str, str]]:
    """Yield row, column, word and style of the words that were added at the end of a text."""
    for i, row in enumerate(after):
        at = sum(len(text) for text, _ in before[i]) if i < len(before) else 0
        new = [(character, style) for text, style in row for character in text][at:]
        for (is_gap, style), group in itertools.groupby(new, lambda each: (each[0] == " ", each[1])):
            word = "".join(character for character, _ in group)
            if not is_gap:
                yield i, at, word, style
            at += len(word)


def make_pane(run: RecordedRun, name: str, x: float, clock: AnimationClock) -> tuple[list[str], int]:
    """Return the words of a run with its name, and the number of rows."""
    replay, shown_rows = RunReplay(name, run), list[Row]()
    parts = [make_text(x + 14, 38, name, COLORS["prompt"], weight=700)]
    for end in [0.0, *run.end_seconds]:
        replay.advance_to(end)
        rows = replay.styled_text.wrap(COLUMNS) if replay.is_done else replay.styled_text.tail(COLUMNS, MAX_ROWS)
        for row, column, word, style in find_new_words(shown_rows, rows):
            weight = 700 if style == "prompt" else 400
            name = clock.get_class(end) if end else ""
            parts.append(
                make_text(x + 14 + CELL_WIDTH * column, TOP_MARGIN + LINE_HEIGHT * (row + 1), word, COLORS[style], name, weight)
            )
        shown_rows = [list(row) for row in rows]  # copies, since the rows keep growing
    return parts, len(shown_rows)


def make_footer(run: RecordedRun, x: float, y: float, clock: AnimationClock) -> list[str]:
    """Return the frame, the progress bar, and the statistics, which appear when the run is done."""
    s, end = run.statistics, run.end_seconds[-1]
    summary = f"{s.n_generated} tokens in {s.target_passes} passes, {format_seconds(end)}"
    bar = f'<rect x="{x + 14:.1f}" y="{y:.1f}" width="{PANE_WIDTH - 28:.1f}" height="4" rx="2" fill='
    return [
        f'<rect x="{x:.1f}" y="14" width="{PANE_WIDTH:.1f}" height="{y + 24:.1f}" rx="8" fill="none" '
        f'stroke="{COLORS["frame"]}"/>',
        f'{bar}"{COLORS["frame"]}"/>',
        f'{bar}"{COLORS["faint"]}" class="{clock.get_class(end, "grows")}" style="transform-origin:{x + 14:.1f}px 0"/>',
        make_text(x + 14, y + 26, summary, COLORS["prompt"], clock.get_class(end), 700),
    ]


def main(out: str = str(Path(__file__).with_name("race.svg")), *names: str) -> None:
    """Run a race and draw it."""
    target, draft = map(str, names or get_default_pair())
    decoder = SpeculativeDecoder(target, draft)
    decoder.warm_up()
    race = measure(decoder, PROMPT, MAX_TOKENS, SAMPLING)
    length = max(race.alone.end_seconds[-1], race.pair.end_seconds[-1])
    clock = AnimationClock(RACE_DURATION_S / length, RACE_DURATION_S + END_HOLD_S)
    labels = ModelLabels(Path(target).stem, f"by {Path(draft).stem}")
    sides = [
        (race.alone, f"{labels.target} alone", PADDING),
        (race.pair, f"{labels.target} + {Path(draft).stem}", 2 * PADDING + PANE_WIDTH),
    ]
    panes = [make_pane(run, name, x, clock) for run, name, x in sides]
    y = TOP_MARGIN + LINE_HEIGHT * max(n_rows for _, n_rows in panes) + 18
    feet = [make_footer(run, x, y, clock) for run, _, x in sides]
    legend = (
        (f"green: guessed {labels.draft_label} and confirmed", COLORS["accepted"]),
        (f"white: {labels.target}'s own", COLORS["target"]),
    )
    parts, x = [part for found in (*(parts for parts, _ in panes), *feet) for part in found], float(PADDING + 14)
    for text, color in legend:
        parts.append(make_text(x, y + 62, text, color))
        x += CELL_WIDTH * (len(text) + 3)
    slow = f"slow motion, {clock.slowdown:.0f} times slower; each ran alone"
    parts.append(make_text(2 * PADDING + PANE_WIDTH + 14, y + 88, slow, COLORS["faint"]))
    parts.append(make_text(PADDING + 14, y + 88, race.summary, COLORS["prompt"], clock.get_class(length), 700))
    width, height = 3 * PADDING + 2 * PANE_WIDTH, y + 106
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="13">',
        f"<title>{escape(labels.target)} alone, and with {escape(Path(draft).stem)}: {escape(race.summary)}</title>",
        f"<style>{clock.to_css()}</style>",
        '<rect width="100%" height="100%" rx="10" fill="#0d1117"/>',
        *parts,
        "</svg>\n",
    ]
    Path(out).write_text("\n".join(svg), encoding="utf-8")
    print("\n".join([*race.format_lines(sides[0][1], sides[1][1]), race.summary]))


def run_script(main: Callable[..., None]) -> None:
    """Call `main` with the script's arguments; print an error that the user can fix as one line."""
    try:
        main(*sys.argv[1:])
    except (CheckpointError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    run_script(main)
