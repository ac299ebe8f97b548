"""race.py, race_screen.py: what is measured, and what is to be seen of it."""

import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console, ConsoleDimensions

from specdec.bench.race import Lane, Race, measure
from specdec.decoder import SpeculativeDecoder
from specdec.engine.decoding import Prompt, Step
from specdec.sampling import Sampling
from specdec.text.detokenizer import Wording
from specdec.tokenizer import Tokenizer
from specdec.ui.output import Roles
from specdec.ui.race import RaceView
from specdec.ui.terminal_window import Window
from specdec.ui.text_layout import width_of
from tests.conftest import Pair
from tests.fakes.terminal import PROMPT, Job, Screen, with_pair
from tests.tools.checkpoint_files import ROOT
from tests.ui.test_panel import Clock, Keys, grew

SIZES = [(20, 8), (40, 12), (71, 20), (72, 8), (80, 24), (120, 40), (200, 60)]


def lane_of(tokenizer: Tokenizer, tokens: list[int], n_a_step: int, seconds: float) -> Lane:
    """Steps of the same length, in which all tokens but the last were guessed."""
    lane, wording = Lane(), Wording(tokenizer)
    lane.add(wording.of(Prompt(tokenizer.encode("the"), 1.0)))
    for start in range(0, len(tokens), n_a_step):
        some = tokens[start : start + n_a_step]
        lane.add(wording.of(Step(some, some[:-1], len(some) - 1, seconds, 0.0, "max_tokens")))
    return lane


class Theatre:
    """A race on a console of a given size: the target takes 0.1 s a token, the pair that for four. Frames are kept."""

    def __init__(self, tokenizer: Tokenizer, width: int, height: int, text: str = " the end then" * 12) -> None:
        tokens = tokenizer.encode(text)[1:]
        self.race = Race(lane_of(tokenizer, tokens, 1, 0.1), lane_of(tokenizer, tokens, 4, 0.1), 1, True)
        self.screen, self.clock, self.keys = Screen(width, height), Clock(), Keys()
        self.typed: dict[int, bytes] = {}
        self.n_sleeps = 0
        self.bytes = io.BytesIO()
        file = io.TextIOWrapper(self.bytes, encoding="utf-8", newline="", write_through=True)
        self.console = Console(file=file, width=width, height=height, force_terminal=True, legacy_windows=False)
        self.view = RaceView(
            self.race,
            Roles("big", "by little", "big + little"),
            Window(self.console, self.keys, self.clock, self.sleep),
        )

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds
        self.n_sleeps += 1
        self.keys.typed = [self.typed[self.n_sleeps]] if self.n_sleeps in self.typed else []
        rows = self.view.rows(self.console.size)
        assert len(rows) < self.console.height
        assert max(map(width_of, rows)) <= self.console.width

    def play(self) -> Screen:
        self.view.play()
        self.screen.feed(self.bytes.getvalue().decode().replace("\r\n", "\n").replace("\n", "\r\n"))
        return self.screen


def story_of(picture: str, side: int) -> list[str]:
    """The rows of one of two texts that are beside each other."""
    rows = picture.splitlines()
    top, bottom = (next(i for i, row in enumerate(rows) if row.startswith(corner)) for corner in "╭├")
    story = [row.split("││")[side].strip("│ ") for row in rows[top + 1 : bottom]]
    while story and not story[-1]:
        story.pop()
    return story


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_race_fits_and_ends_with_the_text(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    theatre = Theatre(tokenizer, *size)
    screen = theatre.play()
    assert "╭" not in screen.text() and not screen.cursor_hidden
    assert screen.text().startswith("the")
    assert " ".join(screen.text().split()).count("the end then") == 12
    assert len(screen.pictures) > 10


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_each_text_grows_at_its_own_speed_and_only_at_its_end(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    theatre = Theatre(tokenizer, *size)
    pictures = theatre.play().pictures
    for side in (0, 1):
        stories = [story_of(picture, side) for picture in pictures]
        assert stories[-1] and all(grew(before, after) for before, after in pairwise(stories))
    middle = pictures[len(pictures) // 4]
    assert len("".join(story_of(middle, 1))) > 2 * len("".join(story_of(middle, 0)))
    n_tokens = len(theatre.race.alone.tokens)
    assert f"same text, letter for letter; {n_tokens / -(-n_tokens // 4):.1f} times as fast" in pictures[-1]
    assert "times slower" in middle or "as fast as it ran" in middle


def test_keys_pause_step_slow_down_and_end(tokenizer: Tokenizer) -> None:
    theatre = Theatre(tokenizer, 80, 24)
    theatre.typed = {3: b"\x1b[C", 4: b"\x1b[C", 5: b"-", 6: b"?", 7: b"q"}
    theatre.view.factor = 10
    pictures = theatre.play().pictures
    assert " 2 tokens in 2 passes" in pictures[-4] and "paused; slow motion, 10 times slower" in pictures[-4]
    assert "20 times slower" in pictures[-3] and "space: pause" not in pictures[-3] and "space: pause" in pictures[-2]
    assert theatre.n_sleeps == 7


def test_resizing_in_a_race_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    theatre = Theatre(tokenizer, 120, 40)
    theatre.view.play()
    for width, height in ((40, 12), (80, 24), (80, 6), (10, 3), (20, 8)):
        rows = theatre.view.rows(ConsoleDimensions(width, height))
        assert len(rows) < height or height < 3
        assert max(map(width_of, rows)) <= width


@pytest.mark.parametrize("width", [20, 40, 60, 79])
def test_the_figures_of_a_race_fit_a_narrow_terminal(tokenizer: Tokenizer, width: int) -> None:
    race = Theatre(tokenizer, 80, 24).race
    names = "big alone", "big + a-draft"
    wide, narrow = race.report(*names), race.report(*names, width)
    assert len(wide) == 2 and min(map(len, wide)) > 60
    assert max(map(len, narrow)) <= width
    words = " ".join(narrow).replace(" in ", " ").replace(",", "").split()
    assert words == [word for line in wide for word in line.replace(" in ", " ").replace(",", "").split()]
    assert race.report(*names, 200) == wide


def test_the_fastest_runs_count_and_both_write_one_text(pair: Pair) -> None:
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=4, n_threads=1)
    decoder.warm_up()
    shares: list[float] = []
    race = measure(decoder, PROMPT, 40, Sampling(seed=5), shares.append)
    assert race.is_same_text and race.alone.tokens == race.pair.tokens
    assert race.n_rounds >= 1 and max(shares) == 1.0
    assert not race.alone.statistics.n_drafted and race.pair.statistics.n_drafted
    assert race.ratio == pytest.approx(race.alone.ends[-1] / race.pair.ends[-1])
    assert f"{race.ratio:.1f} times as fast" in race.sentence or race.ratio < 1


def test_a_race_on_a_terminal_leaves_the_text_and_the_figures(pair: Pair) -> None:
    with Job(["race", *with_pair(pair, "-n", 60)], 80, 24) as job:
        job.read_until(frames=2)
        job.type(b"q")
        assert job.report() == "0"
        text = job.screen().text()
    assert "same text, letter for letter; " in text and "seed 5" in text and "╭" not in text


def test_the_script_draws_a_picture_that_moves_and_ends_with_both_texts(tmp_path: Path) -> None:
    out = tmp_path / "race.svg"
    subprocess.run([sys.executable, ROOT / "docs/race_picture.py", out], check=True, capture_output=True)
    for path in (out, ROOT / "docs/race.svg"):
        texts = [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        assert "@keyframes" in path.read_text(encoding="utf-8") and path.stat().st_size < 1 << 20
        assert texts.count("Once") == 2 and any("same text, letter for letter" in text for text in texts)
