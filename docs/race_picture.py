"""Draws docs/race.svg, which moves, from a real race: python docs/race_picture.py [OUT [TARGET DRAFT]]

Both texts are those of the fastest runs, and each word comes when its pass was over, a fixed number of times slower.
"""

import itertools
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec import Sampling, SpeculativeDecoder
from specdec.bench.race import Lane, measure, seconds_told
from specdec.loaders.model_lookup import default_pair
from specdec.ui.output import Roles
from specdec.ui.race import Track
from specdec.ui.text_layout import Row

PROMPT, TOKENS, SAMPLING = "Once upon a time", 160, Sampling(0)
SLOWER_SECONDS, LAST_SECONDS = 9.0, 5.0  # that the slower one takes in the picture, and that the end is in sight
COLUMNS, MOST_ROWS = 46, 60
CELL, LINE, PAD, TOP = 7.83, 19, 16, 48  # of a monospaced font of 13 pixels
PANE = COLUMNS * CELL + 28
COLORS = {"prompt": "#f0f6fc", "accepted": "#4ade80", "target": "#c9d1d9", "frame": "#30363d", "faint": "#8b949e"}
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


class Clock:
    """Style classes of what appears at a moment and stays until the picture begins again; of what grows until then."""

    def __init__(self, slower: float) -> None:
        self.slower = slower
        self._names: dict[tuple[str, str], str] = {}

    def at(self, seconds: float, how: str = "shown") -> str:
        share = f"{100 * seconds * self.slower / (SLOWER_SECONDS + LAST_SECONDS):.2f}"
        return self._names.setdefault((share, how), f"{how[0]}{len(self._names)}")

    def styles(self) -> str:
        rules = []
        for (share, how), name in self._names.items():
            first, last = ("opacity:0", "opacity:1") if how == "shown" else ("transform:scaleX(0)", "transform:none")
            rules.append(f"@keyframes {name}{{0%{{{first}}}{share}%{{{last}}}}}.{name}{{animation-name:{name}}}")
        seconds = SLOWER_SECONDS + LAST_SECONDS
        rules.append(
            f"[class]{{animation-duration:{seconds:g}s;animation-iteration-count:infinite;animation-timing-function:step-end}}"
        )
        rules.append("rect[class]{animation-timing-function:linear}@media(prefers-reduced-motion){[class]{animation:none}}")
        return "\n".join(rules)


def text_at(x: float, y: float, text: str, color: str, name: str = "", weight: int = 400) -> str:
    extra = f' class="{name}"' * bool(name) + f' font-weight="{weight}"' * (weight != 400)
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{extra}>{escape(text)}</text>'


def words(before: list[Row], after: list[Row]) -> Iterator[tuple[int, int, str, str]]:
    """What came at the end of a text: row, column, word, and of what kind it is."""
    for i, row in enumerate(after):
        at = sum(len(text) for text, _ in before[i]) if i < len(before) else 0
        new = [(character, kind) for text, kind in row for character in text][at:]
        for (is_gap, kind), group in itertools.groupby(new, lambda each: (each[0] == " ", each[1])):
            word = "".join(character for character, _ in group)
            if not is_gap:
                yield i, at, word, kind
            at += len(word)


def pane(lane: Lane, name: str, x: float, clock: Clock) -> tuple[list[str], int]:
    """A text in a frame, its bar, and its figures once it is done; how many rows it has."""
    track, story = Track(name, lane), list[Row]()
    parts = [text_at(x + 14, 38, name, COLORS["prompt"], weight=700)]
    for end in [0.0, *lane.ends]:
        track.go_to(end)
        rows = track.story.rows(COLUMNS) if track.is_done else track.story.tail(COLUMNS, MOST_ROWS)
        for row, column, word, kind in words(story, rows):
            weight = 700 if kind == "prompt" else 400
            name = clock.at(end) if end else ""
            parts.append(text_at(x + 14 + CELL * column, TOP + LINE * (row + 1), word, COLORS[kind], name, weight))
        story = [list(row) for row in rows]  # which go on growing
    return parts, len(story)


def foot(lane: Lane, x: float, y: float, clock: Clock) -> list[str]:
    """The frame, and below the text the bar and the figures, which come once the text is done."""
    s, end = lane.statistics, lane.ends[-1]
    figures = f"{s.n_generated} tokens in {s.target_passes} passes, {seconds_told(end)}"
    bar = f'<rect x="{x + 14:.1f}" y="{y:.1f}" width="{PANE - 28:.1f}" height="4" rx="2" fill='
    return [
        f'<rect x="{x:.1f}" y="14" width="{PANE:.1f}" height="{y + 24:.1f}" rx="8" fill="none" stroke="{COLORS["frame"]}"/>',
        f'{bar}"{COLORS["frame"]}"/>',
        f'{bar}"{COLORS["faint"]}" class="{clock.at(end, "grows")}" style="transform-origin:{x + 14:.1f}px 0"/>',
        text_at(x + 14, y + 26, figures, COLORS["prompt"], clock.at(end), 700),
    ]


def main(out: str = str(Path(__file__).with_name("race.svg")), *names: str) -> None:
    target, draft = map(str, names or default_pair())
    decoder = SpeculativeDecoder(target, draft)
    decoder.warm_up()
    race = measure(decoder, PROMPT, TOKENS, SAMPLING)
    length = max(race.alone.ends[-1], race.pair.ends[-1])
    clock = Clock(SLOWER_SECONDS / length)
    roles = Roles(Path(target).stem, f"by {Path(draft).stem}")
    sides = [(race.alone, f"{roles.target} alone", PAD), (race.pair, f"{roles.target} + {Path(draft).stem}", 2 * PAD + PANE)]
    panes = [pane(lane, name, x, clock) for lane, name, x in sides]
    y = TOP + LINE * max(n_rows for _, n_rows in panes) + 18
    feet = [foot(lane, x, y, clock) for lane, _, x in sides]
    legend = (
        (f"green: guessed {roles.guessed} and confirmed", COLORS["accepted"]),
        (f"white: {roles.target}'s own", COLORS["target"]),
    )
    parts, x = [part for found in (*(parts for parts, _ in panes), *feet) for part in found], float(PAD + 14)
    for told, color in legend:
        parts.append(text_at(x, y + 62, told, color))
        x += CELL * (len(told) + 3)
    slow = f"slow motion, {clock.slower:.0f} times slower; each ran alone"
    parts.append(text_at(2 * PAD + PANE + 14, y + 88, slow, COLORS["faint"]))
    parts.append(text_at(PAD + 14, y + 88, race.sentence, COLORS["prompt"], clock.at(length), 700))
    width, height = 3 * PAD + 2 * PANE, y + 106
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="13">',
        f"<title>{escape(roles.target)} alone, and with {escape(Path(draft).stem)}: {escape(race.sentence)}</title>",
        f"<style>{clock.styles()}</style>",
        '<rect width="100%" height="100%" rx="10" fill="#0d1117"/>',
        *parts,
        "</svg>\n",
    ]
    Path(out).write_text("\n".join(svg), encoding="utf-8")
    print("\n".join([*race.report(sides[0][1], sides[1][1]), race.sentence]))


if __name__ == "__main__":
    main(*sys.argv[1:])
