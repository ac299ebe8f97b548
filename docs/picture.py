"""Draws docs/panel.svg from a real run: python docs/picture.py TARGET DRAFT [SEED]"""

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, ConsoleDimensions
from rich.style import Style
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec import Sampling, SpeculativeDecoder, Statistics, Step
from specdec.ui.output import Roles
from specdec.ui.panel import LivePanel
from specdec.ui.terminal_window import Window
from specdec.ui.text_layout import Row

SIZE = ConsoleDimensions(96, 24)
PASSES = 24  # of the run before the picture is taken
TOKENS = 252
STYLES = {
    "prompt": "bold", "accepted": "green", "rejected": "strike red", "unread": "dim strike", "proposed": "magenta",
    "strong": "bold", "faint": "dim", "edge": "dim",
}  # fmt: skip


def main(target: str, draft: str, seed: str = "1") -> None:
    decoder = SpeculativeDecoder(target, draft)
    decoder.warm_up()
    console = Console(record=True, width=SIZE.width, file=io.StringIO(), force_terminal=True)
    statistics = Statistics(len(decoder.encode("Once upon a time")))
    names = Path(target).stem, Path(draft).stem
    roles = Roles(names[0], f"by {names[1]}", " + ".join(names))
    silent = Window(Console(file=io.StringIO(), force_terminal=True))
    panel = LivePanel(silent, statistics, TOKENS, roles)
    for event in decoder.read_and_stream("Once upon a time", TOKENS, Sampling(0.8, seed=int(seed))):
        statistics.add(event)
        panel.show(event)
        if isinstance(event, Step) and statistics.target_passes == PASSES:
            break
    for row in panel.rows(SIZE):
        console.print(Text.assemble(*words(row)), soft_wrap=True)
    console.save_svg(str(Path(__file__).with_name("panel.svg")), title="specdec")


def words(row: Row) -> Iterator[tuple[str, Style]]:
    """Each apart from the spaces before it: some viewers leave those out and stretch the word."""
    for text, kind in row:
        for i, part in enumerate(re.findall(r" +|[^ ]+", text)):
            yield part, Style.parse(STYLES.get(kind, "")) + Style(meta={"part": i % 2})


if __name__ == "__main__":
    main(*sys.argv[1:])
