"""Draws docs/panel.svg from a real run: python docs/picture.py TARGET DRAFT [SEED]"""

import io
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec import Sampling, SpeculativeDecoder, Statistics
from specdec.panel import LivePanel

STEPS = 40  # of the run before the picture is taken


def main(target: str, draft: str, seed: str = "1") -> None:
    decoder = SpeculativeDecoder(target, draft)
    decoder.warm_up()
    console = Console(record=True, width=92, height=20, file=io.StringIO(), force_terminal=True)
    statistics = Statistics(len(decoder.encode("Once upon a time")))
    title = " + ".join(Path(name).stem for name in (target, draft))
    panel = LivePanel(decoder.tokenizer, console, statistics, 252, decoder.gamma, title)
    for event in decoder.stream("Once upon a time", 252, Sampling(0.8, seed=int(seed))):
        statistics.add(event)
        panel.show(event)
        if statistics.target_passes == STEPS:
            break
    console.export_text()  # forget the frames so far
    console.print(panel)
    console.save_svg(str(Path(__file__).with_name("panel.svg")), title="specdec")


if __name__ == "__main__":
    main(*sys.argv[1:])
