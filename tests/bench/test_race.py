"""The race: its measurement and its view."""

import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console, ConsoleDimensions

from specdec.bench.measure import RecordedRun
from specdec.bench.race import Race, measure
from specdec.events import Prompt, Step
from specdec.sampling import Sampling
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.text.detokenizer import EventDetokenizer
from specdec.tokenizer import Tokenizer
from specdec.ui.plain_views import ModelLabels
from specdec.ui.race import RaceView
from specdec.ui.terminal_window import Window
from specdec.ui.text_layout import row_width
from tests.conftest import Pair
from tests.fakes.terminal import PROMPT, Screen, ShellJob, make_arguments
from tests.tools.checkpoint_files import ROOT
from tests.tools.decode import add_text
from tests.tools.panel_keys import Clock, Keys, has_grown

SIZES = [(20, 8), (40, 12), (71, 20), (72, 8), (80, 24), (120, 40), (200, 60)]


def make_run(tokenizer: Tokenizer, tokens: list[int], n_a_step: int, seconds: float) -> RecordedRun:
    """Return a run of steps of equal duration, with all tokens but the last of each accepted."""
    lane, wording = RecordedRun(), EventDetokenizer(tokenizer)
    lane.add(add_text(Prompt(tokenizer.encode("the"), 1.0), wording))
    for start in range(0, len(tokens), n_a_step):
        some = tokens[start : start + n_a_step]
        lane.add(add_text(Step(some, some[:-1], len(some) - 1, seconds, 0.0, "max_tokens"), wording))
    return lane


class RaceStage:
    """A race on a console of a given size, with kept frames: the target takes 0.1 s a token, the pair 0.1 s for four."""

    def __init__(self, tokenizer: Tokenizer, width: int, height: int, text: str = " the end then" * 12) -> None:
        tokens = tokenizer.encode(text)[1:]
        self.race = Race(make_run(tokenizer, tokens, 1, 0.1), make_run(tokenizer, tokens, 4, 0.1), 1, True)
        self.screen, self.clock, self.keys = Screen(width, height), Clock(), Keys()
        self.typed: dict[int, bytes] = {}
        self.n_sleeps = 0
        self.bytes = io.BytesIO()
        file = io.TextIOWrapper(self.bytes, encoding="utf-8", newline="", write_through=True)
        self.console = Console(file=file, width=width, height=height, force_terminal=True, legacy_windows=False)
        self.view = RaceView(
            self.race, ModelLabels("big", "by little", "big + little"), Window(self.console, self.keys, self.clock, self.sleep)
        )

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds
        self.n_sleeps += 1
        self.keys.typed = [self.typed[self.n_sleeps]] if self.n_sleeps in self.typed else []
        rows = self.view.render(self.console.size)
        assert len(rows) < self.console.height
        assert max(map(row_width, rows)) <= self.console.width

    def play(self) -> Screen:
        self.view.play()
        self.screen.feed(self.bytes.getvalue().decode().replace("\r\n", "\n").replace("\n", "\r\n"))
        return self.screen


def get_text_rows(picture: str, side: int) -> list[str]:
    """Return the rows of the text on one side."""
    rows = picture.splitlines()
    top, bottom = (next(i for i, row in enumerate(rows) if row.startswith(corner)) for corner in "╭├")
    story = [row.split("││")[side].strip("│ ") for row in rows[top + 1 : bottom]]
    while story and not story[-1]:
        story.pop()
    return story


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_race_fits_terminal_and_ends_with_output(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    stage = RaceStage(tokenizer, *size)
    screen = stage.play()
    assert "╭" not in screen.get_text() and not screen.cursor_hidden
    assert screen.get_text().startswith("the")
    assert " ".join(screen.get_text().split()).count("the end then") == 12
    assert len(screen.frames) > 10


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_each_text_grows_at_its_speed_and_only_at_its_end(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    stage = RaceStage(tokenizer, *size)
    pictures = stage.play().frames
    for side in (0, 1):
        frames = [get_text_rows(picture, side) for picture in pictures]
        assert frames[-1] and all(has_grown(before, after) for before, after in pairwise(frames))
    middle = pictures[len(pictures) // 4]
    assert len("".join(get_text_rows(middle, 1))) > 2 * len("".join(get_text_rows(middle, 0)))
    n_tokens = len(stage.race.alone.tokens)
    assert f"same output, letter for letter; {n_tokens / -(-n_tokens // 4):.1f} times as fast" in pictures[-1]
    assert "times slower" in middle or "as fast as it ran" in middle


def test_keys_pause_step_slow_down_and_end(tokenizer: Tokenizer) -> None:
    stage = RaceStage(tokenizer, 80, 24)
    stage.typed = {3: b"\x1b[C", 4: b"\x1b[C", 5: b"-", 6: b"?", 7: b"q"}
    stage.view.slowdown = 10
    pictures = stage.play().frames
    assert " 2 tokens in 2 passes" in pictures[-4] and "paused; slow motion, 10 times slower" in pictures[-4]
    assert "20 times slower" in pictures[-3] and "space: pause" not in pictures[-3] and "space: pause" in pictures[-2]
    assert stage.n_sleeps == 7


def test_resizing_race_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    stage = RaceStage(tokenizer, 120, 40)
    stage.view.play()
    for width, height in ((40, 12), (80, 24), (80, 6), (10, 3), (20, 8)):
        rows = stage.view.render(ConsoleDimensions(width, height))
        assert len(rows) < height or height < 3
        assert max(map(row_width, rows)) <= width


@pytest.mark.parametrize("width", [20, 40, 60, 79])
def test_race_statistics_fit_narrow_terminal(tokenizer: Tokenizer, width: int) -> None:
    race = RaceStage(tokenizer, 80, 24).race
    names = "big alone", "big + a-draft"
    wide, narrow = race.format_lines(*names), race.format_lines(*names, width)
    assert len(wide) == 2 and min(map(len, wide)) > 60
    assert max(map(len, narrow)) <= width
    assert " ".join(narrow).split() == " ".join(wide).split()
    assert race.format_lines(*names, 200) == wide


def test_fastest_runs_count_and_outputs_are_equal(pair: Pair) -> None:
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=4, n_threads=1)
    decoder.warm_up()
    shares: list[float] = []
    race = measure(decoder, PROMPT, 40, Sampling(seed=5), shares.append)
    assert race.is_same_text and race.alone.tokens == race.pair.tokens
    assert race.n_rounds >= 1 and max(shares) == 1.0
    assert not race.alone.statistics.n_drafted and race.pair.statistics.n_drafted
    assert race.speedup == pytest.approx(race.alone.end_seconds[-1] / race.pair.end_seconds[-1])
    assert f"{race.speedup:.1f} times as fast" in race.summary or race.speedup < 1


def test_race_on_terminal_leaves_output_and_statistics(pair: Pair) -> None:
    with ShellJob(["race", *make_arguments(pair, "-n", 60)], 80, 24) as job:
        job.read_until(frames=2)
        job.type_keys(b"q")
        assert job.read_report() == "0"
        text = job.make_screen().get_text()
    assert "same output, letter for letter; " in text and "seed 5" in text and "╭" not in text


def test_script_draws_animation_that_ends_with_both_outputs(tmp_path: Path) -> None:
    out = tmp_path / "race.svg"
    subprocess.run([sys.executable, ROOT / "docs/race_picture.py", out], check=True, capture_output=True)
    for path in (out, ROOT / "docs/race.svg"):
        texts = [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        assert "@keyframes" in path.read_text(encoding="utf-8") and path.stat().st_size < 1 << 20
        assert texts.count("Once") == 2 and any("same output, letter for letter" in text for text in texts)
