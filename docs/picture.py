"""Draw docs/panel.svg from a real run: python docs/picture.py TARGET DRAFT [SEED]."""

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from race_picture import run_script
from rich.console import Console, ConsoleDimensions
from rich.style import Style
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec import Sampling, SpeculativeDecoder, Statistics, Step
from specdec.ui.panel import LivePanel
from specdec.ui.plain_views import ModelLabels
from specdec.ui.terminal_window import Window
from specdec.ui.text_layout import Row

SIZE = ConsoleDimensions(96, 24)
N_PASSES = 24  # passes before the picture is taken
MAX_TOKENS = 252
STYLES = {
    "prompt": "bold", "accepted": "green", "rejected": "strike red", "unread": "dim strike", "proposed": "magenta",
    "strong": "bold", "faint": "dim", "edge": "dim",
}  # fmt: skip


def main(target: str, draft: str, seed: str = "1") -> None:
    """Run the pair and save a picture of its panel."""
    decoder = SpeculativeDecoder(target, draft)
    decoder.warm_up()
    console = Console(record=True, width=SIZE.width, file=io.StringIO(), force_terminal=True)
    statistics = Statistics(len(decoder.encode("Once upon a time")))
    names = Path(target).stem, Path(draft).stem
    labels = ModelLabels(names[0], f"by {names[1]}", " + ".join(names))
    silent = Window(Console(file=io.StringIO(), force_terminal=True))
    panel = LivePanel(silent, statistics, MAX_TOKENS, labels)
    for event in decoder.read_and_stream("Once upon a time", MAX_TOKENS, Sampling(0.8, seed=int(seed))):
        statistics.add(event)
        panel.show(event)
        if isinstance(event, Step) and statistics.target_passes == N_PASSES:
            break
    for row in panel.render(SIZE):
        console.print(Text.assemble(*split_words(row)), soft_wrap=True)
    console.save_svg(str(Path(__file__).with_name("panel.svg")), title="specdec")


def split_words(row: Row) -> Iterator[tuple[str, Style]]:
    """Yield each word apart from the spaces before it; some viewers drop leading spaces and stretch the word."""
    for text, style in row:
        for i, part in enumerate(re.findall(r" +|[^ ]+", text)):
            yield part, Style.parse(STYLES.get(style, "")) + Style(meta={"part": i % 2})


if __name__ == "__main__":
    run_script(main)
