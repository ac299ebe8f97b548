"""panel.py: what is drawn at several sizes, in colour and without, and what plain text and JSON hold."""

import io
import json
import os
import pty
import random
import re
import select
import termios
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from rich.console import Console, ConsoleDimensions

from specdec.engine.decoding import Event, Prefill, Prompt, Proposal, Statistics, Step
from specdec.text.detokenizer import Wording, worded
from specdec.tokenizer import BOS, FIRST_BYTE, Tokenizer
from specdec.ui.keyboard import WISHES, Keyboard
from specdec.ui.output import PlainView, Printable, Roles, SilentView, print_summary, printable, result, to_json
from specdec.ui.panel import SEEN_SECONDS, SEEN_TOKENS, UNSEEN_SECONDS, LivePanel, ahead, bins
from specdec.ui.terminal_window import STYLES, STYLES_NO_COLOR, Window, fitting
from specdec.ui.text_layout import Row, Story, width_of
from tests.fakes.terminal import Screen

SIZES = [(40, 10), (60, 12), (80, 24), (120, 40)]
OTHER_SIZES = [(20, 8), (63, 10), (64, 10), (80, 8), (200, 60)]
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
MAX_TOKENS = 200


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Keys(Keyboard):
    """A keyboard on which the test types."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.typed: list[bytes] = []

    def pressed(self) -> list[bytes]:
        typed, self.typed = self.typed, []
        return typed


class Stage:
    """A panel on a console of a given size, whose output is kept."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        width: int = 80,
        height: int = 24,
        guessed: str = "by little",
        no_color: bool = False,
        ascii: bool = False,
        pace: float | None = 0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.tokenizer, self.clock, self.statistics = tokenizer, Clock(), Statistics(n_prompt=5)
        self.bytes = io.BytesIO()
        encoding, errors = ("ascii", "backslashreplace") if ascii else ("utf-8", "strict")
        self.file = io.TextIOWrapper(self.bytes, encoding=encoding, errors=errors, newline="", write_through=True)
        self.console = Console(
            file=self.file, width=width, height=height, force_terminal=True, no_color=no_color, legacy_windows=False
        )
        self.keys = Keys()
        self.panel = LivePanel(
            Window(self.console, self.keys, self.clock, sleep or self.clock.sleep), self.statistics, MAX_TOKENS,
            Roles("big", guessed, "big + little"), pace,
        )  # fmt: skip
        self.n_fed, self._wording = 0, Wording(tokenizer, tells_guesses=True)

    def __enter__(self) -> "Stage":
        self.panel.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.panel.__exit__(None, None, None)

    def show(self, event: Event | Prefill) -> None:
        self.panel.show(self._wording.of(event))

    def token(self, piece: str) -> int:
        return self.tokenizer.pieces.index(piece.encode())

    def spell(self, text: str) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode()]

    def begin(self, text: str = "Once upon") -> None:
        self.show(Prompt(self.tokenizer.encode(text), 1.0))

    def propose(self, text: str) -> str:
        """A proposal, as a frame shows it."""
        self.clock.now += 1
        start = len(self.output)
        self.show(Proposal(self.spell(text)))
        return self.output[start:]

    def step(self, tokens: list[int], draft: list[int] | None = None, n_accepted: int = 0) -> str:
        """One step of the loop; what it wrote to the terminal."""
        start = len(self.output)
        self.clock.now += 1
        self.show(Proposal(draft or []))
        self.clock.now += 1
        step = Step(tokens, draft or [], n_accepted, 0.01, 0.004)
        self.statistics.add(step)
        self.show(step)
        return self.output[start:]

    @property
    def output(self) -> str:
        return self.bytes.getvalue().decode()

    def feed(self, screen: Screen) -> Screen:
        """What was written since the last time, to a terminal; its line breaks are such as its driver makes."""
        new, self.n_fed = self.output[self.n_fed :], len(self.output)
        screen.feed(new.replace("\r\n", "\n").replace("\n", "\r\n"))
        return screen

    def rows(self) -> list[Row]:
        """The panel as it would be drawn now."""
        return self.panel.rows(self.console.size)

    def lines(self) -> list[str]:
        return ["".join([text for text, _ in row]) for row in self.rows()]

    def screen(self) -> str:
        return "\n".join(self.lines())

    def section(self, n: int) -> list[str]:
        """The lines within the frame: those of the text (0), of the passes (1) or of the figures (2)."""
        lines = self.lines()
        rules = [i for i, line in enumerate(lines) if line and line[0] in "╭├╰"]
        return [line[2:-2].rstrip() for line in lines[rules[n] + 1 : rules[n + 1]]]

    def kind_of(self, word: str) -> str:
        """Of the one run that holds a word, among the passes."""
        rules = [i for i, row in enumerate(self.rows()) if row and row[0][0][0] in "╭├╰"]
        passes = self.rows()[rules[1] + 1 : rules[2]]
        kinds = {kind for row in passes for text, kind in row if word in text}
        assert len(kinds) == 1, kinds
        return kinds.pop()

    def assert_fits(self) -> None:
        rows = self.rows()
        assert len(rows) <= max(1, self.console.height - 1)
        assert max(map(width_of, rows)) <= self.console.width
        assert not any(character in line for line in self.lines() for character in "\t\r\n\x1b\x07")
        framed = [row for row in rows if row and row[-1][1] == "edge"]
        assert len({width_of(row) for row in framed}) <= 1


def tell_a_story(stage: Stage, tokens: list[int], rng: random.Random) -> None:
    """Steps that write these tokens, four proposals each, some of them rejected."""
    while tokens:
        n = min(rng.randrange(5), len(tokens) - 1)
        rejected = rng.choices(range(3, stage.tokenizer.vocab_size), k=4 - n)
        stage.step(tokens[: n + 1], tokens[:n] + rejected, n)
        tokens = tokens[n + 1 :]


TEXTS = {
    "prose": "Once there then the end.  " * 60,
    "one word": "abcdefgh" * 100,
    "lines": "the\n\n\nend\n" * 40,
    "wide": "日日 🙂é" * 80,
    "tabs": "a\tb\t\t" * 60,
    "brackets": "[bold]x[/bold] [/] [brackets] [red]y \\[z] " * 30,
    "control": "\x1b[2J\x1b[31mred\x07\x08\r\x0b\x0c\x00\x7f\x9b1m" * 30,
    "accents": "e\u0301\u200b\u200d\u202e" * 60,
    "spaces": " " * 900,
}


@pytest.mark.campaign
@pytest.mark.parametrize("size", SIZES + OTHER_SIZES, ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_the_panel_is_never_wider_or_taller_than_the_terminal(tokenizer: Tokenizer, size: tuple[int, int], text: str) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.assert_fits()
        stage.begin("Once")
        stage.assert_fits()
        tokens = tokenizer.encode(TEXTS[text])[1:]
        for start in range(0, len(tokens), 97):
            accepted = tokens[start : start + 50]
            stage.step(tokens[start : start + 97], [*accepted, 5, 6], len(accepted))
            stage.assert_fits()
            stage.clock.now += 10
            stage.assert_fits()


@pytest.mark.campaign
@pytest.mark.parametrize("gamma", [1, 4, 7, 8, 63])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_panel_fits_whatever_gamma(tokenizer: Tokenizer, size: tuple[int, int], gamma: int) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        for n_accepted in range(gamma + 1):
            draft = "x" * n_accepted + "y" * (gamma - n_accepted)
            stage.step(stage.spell("x" * (n_accepted + 1)), stage.spell(draft), n_accepted)
            stage.assert_fits()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_newest_text_is_in_sight(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        for i in range(60):
            word = f"w{i}w"
            separator = "\n\n" if i % 7 == 0 else " "
            stage.step(stage.spell(separator + "then there " + word), stage.spell("nonsense"), 0)
            assert word in stage.screen()
    assert not size[1] < 20 or "w10w" not in stage.screen()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_guesses_are_in_sight_before_they_are_checked(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin("the " * 300)
        assert f"\x1b[{STYLES['proposed']}mQUERY" in stage.propose("QUERY")
        stage.show(Proposal([]))
        assert "QUERY" not in stage.screen()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_figures_are_in_sight(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        stage.step(stage.spell("abc"), stage.spell("abxx"), 2)
        screen = stage.screen()
    assert "300" in screen  # tokens a second
    assert "tok/s" in screen
    assert "50%" in screen  # acceptance
    assert "3.0" in screen  # tokens a pass
    assert f"3/{MAX_TOKENS}" in screen


def test_the_histogram_has_a_bar_for_every_accepted_length(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 120, 40) as stage:
        for n_accepted in (0, 2, 2, 2):
            stage.step(stage.spell("x" * (n_accepted + 1)), stage.spell("xx"), n_accepted)
        lines = stage.section(1)
        assert "guesses right in a pass" in stage.screen()
    bars = [re.search(r" (\d) (█*) +(\d+)%$", line) for line in lines[:3]]
    assert [(m[1], len(m[2]), m[3]) for m in bars if m] == [("0", 3, "25"), ("1", 0, "0"), ("2", 9, "75")]


def test_long_guesses_share_bins_that_cover_all_lengths_once() -> None:
    assert bins(5, 8) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert bins(64, 8) == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63)]
    assert bins(64, 4) == [(0, 0), (1, 3), (4, 15), (16, 63)]
    for n in range(1, 65):
        for most in range(2, 9):
            binned = bins(n, most)
            assert len(binned) <= most
            assert [i for first, last in binned for i in range(first, last + 1)] == list(range(n))


def test_model_text_in_brackets_stays_text(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("[bold]p[/bold]")
        tokens = [stage.token("[brackets]"), stage.token("[bold]"), stage.token("[/red]")]
        stage.step([*tokens, *stage.spell("[/]")], tokens[:1] + stage.spell("[zz]"), 1)
        assert stage.section(1)[0].startswith("[brackets][zz] [bold][/red][/]")
    assert "[bold]p[/bold][brackets][bold][/red][/]" in ESCAPE.sub("", stage.output).splitlines()[-3]


def test_control_characters_of_a_model_never_reach_the_terminal(tokenizer: Tokenizer) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x1b[?1049h\r\x08\x9b31m\x00\x7f"
    with Stage(tokenizer) as stage:
        stage.begin(evil)
        stage.step(stage.spell(evil), stage.spell(evil), 5)
        stage.step(stage.spell("x"), stage.spell(evil), 0)
        stage.clock.now += 5
    rest = ESCAPE.sub("", stage.output)
    assert not [c for c in rest if c != "\n" and c != "\r" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    stage.feed(Screen(80, 24))  # which fails on any code that is not the panel's own
    assert printable("a\x1b7b\x00c\x9bd\re\n\tf") == "abce\n\tf"
    assert printable("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x1bPq\x1b\\y\u202ez\u2066!") == "red xyz!"


def test_a_control_sequence_in_several_tokens_leaves_no_trace() -> None:
    """Whole where it comes in one piece, and no other text with it; a beginning that never ends is given back without its ESC."""
    text = "a\x1b[1;31mred\x1b]8;;x\x1b\\link\x1b(Bend\x9b2J!"
    for seed in range(50):
        rng, stream, out = random.Random(seed), Printable(), ""
        cuts = sorted(rng.sample(range(1, len(text)), 6))
        for start, end in pairwise([0, *cuts, len(text)]):
            out += stream.push(text[start:end])
        assert out + stream.end() == "aredlinkend!"
    stream = Printable()
    assert stream.push("x\x1b]" + "y" * 100) + stream.push("z") == "x" + "y" * 100 + "z"
    assert stream.push("\x1b[3") == ""
    assert stream.end() == "3"


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_fit_and_bring_no_control_characters(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    with Stage(tokenizer, *SIZES[seed % 4]) as stage:
        stage.begin()
        for _ in range(15):
            tell_a_story(stage, rng.choices(range(3, tokenizer.vocab_size), k=10), rng)
            stage.assert_fits()
    rest = ESCAPE.sub("", stage.output)
    assert not [c for c in rest if c not in "\n\r\t" and (ord(c) < 32 or 127 <= ord(c) < 160)]


# What is read


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_wrong_guesses_are_never_in_the_story(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin("the")
        stage.step(stage.spell(" YES. own "), stage.spell(" YES. NO"), 5)
        assert "NO" not in "\n".join(stage.section(0))
        assert "YES. own" in "\n".join(stage.section(0))
        assert "YES. NO own" in "\n".join(stage.section(1))
    assert "NO" not in ESCAPE.sub("", stage.output).split("╯")[-1]


@pytest.mark.campaign
@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("size", [(40, 12), (80, 24), (120, 40)], ids=str)
def test_no_line_that_was_read_changes_in_any_frame(tokenizer: Tokenizer, size: tuple[int, int], pages: int) -> None:
    """Nor does any row outside the panel, whether or not the terminal has a second page."""
    screen = Screen(*size, pages)
    screen.feed("$ one\r\n$ two\r\n")
    rng = random.Random(sum(size))
    with Stage(tokenizer, *size) as stage:
        stage.begin("the")
        for _ in range(60):
            tell_a_story(stage, [*rng.choices(range(259, tokenizer.vocab_size), k=3), stage.token(" the")], rng)
            stage.feed(screen)
    stories = [story_of(picture) for picture in screen.pictures if "╭" in picture]
    assert len(stories) > 100
    assert max(map(len, stories)) > 3
    for before, after in pairwise(stories):
        assert any(grew(before[k:], after) for k in range(len(before) + 1)), (before, after)
    final = stage.feed(screen).text()
    assert final.startswith("$ one\n$ two\nthe")
    assert "╭" not in final
    assert not screen.cursor_hidden


def story_of(picture: str) -> list[str]:
    """The rows of the text in a window, the empty ones at its end left out."""
    rows = picture.splitlines()
    top = next(i for i, row in enumerate(rows) if row.startswith("╭"))
    bottom = next(i for i, row in enumerate(rows) if row.startswith("├"))
    story = [row[2:-2].rstrip() for row in rows[top + 1 : bottom]]
    while story and not story[-1]:
        story.pop()
    return story


def grew(before: list[str], after: list[str]) -> bool:
    """Whether the rows are those of before with something at the end."""
    n = len(before) - 1
    return n < 0 or (len(after) > n and before[:n] == after[:n] and after[n].startswith(before[n]))


def test_resizing_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    screen = Screen(120, 40)
    screen.feed("$ one\r\n$ two\r\n")
    with Stage(tokenizer, 120, 40) as stage:
        stage.begin("the")
        for width, height in ((120, 40), (40, 12), (80, 24), (80, 6), (80, 24), (20, 8), (200, 50), (10, 3), (60, 20)):
            stage.console.size = ConsoleDimensions(width, height)
            screen.resize(width, height)
            for word in ("one", "two"):
                stage.step(stage.spell(f" {word}"), stage.spell("NO"), 0)
            window = stage.feed(screen).window()
            is_framed = height >= 8 and width >= 20
            assert window.count("╭") == window.count("╮") == window.count("╰") == window.count("╯") == is_framed
            rows = [row.rstrip() for row in window.splitlines() if row.strip()]
            assert rows == [line.rstrip() for line in stage.lines() if line.strip()]
    assert stage.feed(screen).text().startswith("$ one\n$ two\nthe one two one two")


def test_a_word_is_of_the_kind_of_its_first_piece_and_never_changes() -> None:
    story = Story()
    for text, kind in [
        ("Onc", "prompt"),
        (" rabb", "accepted"),
        ("it", "target"),
        (", ", "target"),
        ("don", "target"),
        ("'t. I", "accepted"),
    ]:
        story.add(text, kind)
    assert story.rows(80) == [[("Onc", "prompt"), (" rabbit", "accepted"), (", don't", "target"), (". I", "accepted")]]


@pytest.mark.parametrize("width", [5, 12, 40, 76])
def test_a_story_only_grows_at_its_end_and_holds_every_letter(width: int) -> None:
    rng = random.Random(width)
    pieces = [
        " the",
        " rabb",
        "it",
        "s",
        "\n",
        " ",
        ",",
        " 日本",
        "語",
        "🙂",
        " supercalifragilistic",
        "expialidocious",
        "é",
        "e\u0301",
    ]
    for _ in range(20):
        story, before, text = Story(), [], ""
        for _ in range(120):
            piece = rng.choice(pieces)
            text += piece
            story.add(piece, rng.choice(["accepted", "target"]))
            after = [[(c, kind) for run, kind in row for c in run] for row in story.tail(width, 60)]
            n = len(before) - 1
            if n >= 0 and len(after) < 60:
                assert before[:n] == after[:n]
                assert after[n][: len(before[n])] == before[n]
            before = after
        rows = story.rows(width)
        assert max(map(width_of, rows)) <= width
        told = "".join([run for row in rows for run, _ in row])
        assert "".join(told.split()) == "".join(text.split())


def test_every_colour_can_be_read_on_black_and_on_white() -> None:
    """Yellow, cyan and white are lost on white, blue and black on black."""
    codes = {code for style in (*STYLES.values(), *STYLES_NO_COLOR.values()) for code in style.split(";") if code}
    assert {code for code in codes if len(code) > 1} <= {"31", "32", "35"}


def test_guessed_and_struck_and_own_tokens_differ_with_colour_and_without(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.spell(" YES. own"), stage.spell(" YES. NO. no"), 5)
        kinds = [stage.kind_of(word) for word in ("YES", "NO", "no", "own")]
    assert kinds == ["accepted", "rejected", "unread", "target"]
    for styles in (STYLES, STYLES_NO_COLOR):
        assert len({styles[kind] for kind in [*kinds, "proposed"]}) == 5
        assert styles["target"] == ""
        assert "9" in styles["rejected"].split(";") and "9" in styles["unread"].split(";")
    assert not re.search(r"\b[349]\d", ";".join(STYLES_NO_COLOR.values()))


def test_the_two_endings_of_a_split_word_are_both_shown_whole(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.spell(" a rabbit"), stage.spell(" a rabble is"), 7)
        assert stage.section(1)[0].startswith("a rabble is rabbit  ")
        assert stage.kind_of("rabble") == "rejected"
        stage.step(stage.spell("s. I"), stage.spell("s."), 2)
        assert stage.section(1)[1].startswith("rabbits. I  ")
        assert stage.kind_of("s.") == "accepted"


def test_what_was_guessed_in_vain_is_the_first_that_is_cut(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 40, 12) as stage:
        stage.begin("the")
        stage.step(stage.spell(" yes own"), stage.spell(" yes NO" + " more" * 20), 4)
        assert re.fullmatch(r"yes NO more more[more ]*… own +\+8", stage.section(1)[0])
        stage.step(stage.spell(" yes" * 20 + " own"), stage.spell(" yes" * 20 + " NO"), 80)
        assert re.fullmatch(r"…[yes ]* NO own +\+84", stage.section(1)[0])


# The words


@pytest.mark.parametrize("guessed", ["by little", "from the text so far"])
@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (120, 40)])
def test_the_legend_wears_the_styles_that_it_explains(tokenizer: Tokenizer, width: int, height: int, guessed: str) -> None:
    with Stage(tokenizer, width, height, guessed) as stage:
        legend = [run for row in stage.rows() if row and row[-1][1] != "edge" for run in row if run[1] != "plain"]
        assert [kind for _, kind in legend] == ["accepted", "target", "rejected"]
        if width > 40:
            assert [text for text, _ in legend] == [
                f"green: guessed {guessed} and confirmed", "plain: big's own", "struck: guessed wrong",
            ]  # fmt: skip
            assert f"guessed {guessed}; big checks a line in one pass" in stage.screen()
    with Stage(tokenizer, width, height, no_color=True) as stage:
        assert width == 40 or "underlined: guessed by little and confirmed" in stage.screen()


def test_without_guesses_nothing_speaks_of_them(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, guessed="") as stage:
        stage.begin("the")
        stage.step(stage.spell(" end"))
        screen = stage.screen()
        assert not any(word in screen for word in ("guess", "struck", "pass", "green"))
    assert "guess" not in stage.output
    assert ESCAPE.sub("", stage.output).split("╯")[-1].strip() == "the end"


@pytest.mark.parametrize("size", [*SIZES, *OTHER_SIZES], ids=str)
def test_where_few_passes_have_guesses_the_rows_are_the_texts_and_it_says_why(
    tokenizer: Tokenizer, size: tuple[int, int]
) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        before = len([line for line in stage.lines() if "│" in line])
        stage.step(stage.spell("ab"), stage.spell("a"), 1)
        for i in range(60):
            stage.step(stage.spell(f" word{i}"))
        lines = stage.lines()
        assert len([line for line in lines if "│" in line]) == before
        assert all(width_of(row) <= size[0] for row in stage.rows()) and len(lines) <= size[1]
        if size[0] >= 40 and size[1] >= 10:
            [line] = [line for line in lines if "├" in line and "few guesses" in line]
            assert not [line for line in lines if line.endswith("+1 │")]
            if size[0] >= 80:
                assert "few guesses by little: more would cost more than they gain" in line
        for _ in range(40):
            stage.step(stage.spell("xy"), stage.spell("x"), 1)
        assert "few guesses" not in "".join(stage.lines())


def test_a_run_that_was_slowed_down_tells_its_pace_and_then_its_own_speed(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin()
        stage.step(stage.spell("abc"), stage.spell("ab"), 2)
        assert "300 tok/s" in stage.screen()
        stage.keys.typed = [b"-"]
        stage.step(stage.spell("abc"), stage.spell("ab"), 2)
        assert "16 passes a second" in stage.screen()
        stage.keys.typed = [b"+"]
        stage.step(stage.spell("abc"), stage.spell("ab"), 2)
        assert "300 tok/s" in stage.screen()  # without the waiting


@pytest.mark.parametrize(("n_accepted", "seconds"), [(0, 0.0001), (3, 0.0005), (3, 0.03)])
def test_a_text_that_would_be_over_in_a_moment_is_seen_for_four_seconds_at_an_even_pace(
    tokenizer: Tokenizer, n_accepted: int, seconds: float
) -> None:
    with Stage(tokenizer, pace=None) as stage:
        stage.show(Prompt(tokenizer.encode("Once upon"), 0.001))
        begin, shown = stage.clock.now, list[float]()
        while stage.statistics.n_generated < MAX_TOKENS:
            stage.show(Proposal(stage.spell("abc"[:n_accepted])))
            stage.clock.now += seconds
            step = Step(stage.spell("abcd"[: n_accepted + 1]), stage.spell("abc"[:n_accepted]), n_accepted, seconds, 0.0)
            stage.statistics.add(step)
            stage.show(step)
            shown.append(stage.clock.now)
        length = SEEN_SECONDS * min(MAX_TOKENS / SEEN_TOKENS, 1.0)
        assert 0.9 * length < stage.clock.now - begin < 1.25 * length + len(shown) * seconds * 0.1
        assert stage.panel.was_seen
        gaps = [after - before for before, after in pairwise([begin, *shown])]
        if len(gaps) > 10:
            few = [sum(gaps[i : i + 8]) for i in range(8, len(gaps) - 8, 8)]
            assert max(few) < 3 * min(few)


@pytest.mark.parametrize("key", [b"+", b"?", b"q"])
def test_any_key_ends_the_even_pace(tokenizer: Tokenizer, key: bytes) -> None:
    with Stage(tokenizer, pace=None) as stage:
        stage.show(Prompt(tokenizer.encode("Once upon"), 0.001))
        for i in range(10):
            if i == 5:
                begin, stage.keys.typed = stage.clock.now, [key]
            stage.clock.now += 0.03
            stage.show(Step(stage.spell("a"), [], 0, 0.03, 0.0))
        assert stage.clock.now - begin < 5 * 0.03 + 0.15


def test_what_is_seen_slowly_is_written_ahead_and_what_is_written_slowly_comes_at_once() -> None:
    clock = Clock()
    seen = list[tuple[int, float]]()

    def written(seconds: float) -> Iterator[Step]:
        for i in range(40):
            clock.now += seconds
            yield Step([i], [], 0, seconds, 0.0)

    for seconds in (0.001, 0.2):
        seen.clear()
        begin = clock.now
        for event in ahead(written(seconds), clock):
            seen.append((event.tokens[0], clock.now - begin))
            clock.now += 0.05
        assert [token for token, _ in seen] == [*range(40)]
        if seconds == 0.2:
            assert all(at == pytest.approx(0.2 + 0.25 * i) for i, (_, at) in enumerate(seen))
        else:  # all of it at once, but for the first, of which nobody knows yet
            assert seen[-1][1] == pytest.approx(40 * 0.001 + 39 * 0.05)


SPEEDS = {
    0.0: "4.0 tokens in a pass of big, which alone writes one",
    0.5: "0.50 times as fast as big alone",
    1.03: "As fast as big alone",
    2.94: "2.9 times as fast as big alone",
}


@pytest.mark.parametrize("speed_up", SPEEDS)
def test_the_result_is_one_true_sentence(speed_up: float, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics, roles = Statistics(n_prompt=5), Roles("big", "by little")
    for _ in range(20):
        statistics.add(Step([5, 6, 7, 8], [5, 6, 7, 9], 3, 0.5, 0.1))
    assert result(statistics, roles, True) == f"{SPEEDS[0.0]}; the same text."  # no step shows what one without a draft takes
    monkeypatch.setattr(Statistics, "speed_up", speed_up or None)
    assert result(statistics, roles, True) == f"{SPEEDS[speed_up]}; the same text."
    assert result(statistics, roles, False) == f"{SPEEDS[speed_up]}; the same distribution."
    assert result(Statistics(n_prompt=3), roles, True) == ""


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_on_leaving_the_whole_story_stands_once_in_its_colours(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    words = [f"word{i}" for i in range(100)]
    with Stage(tokenizer, *size) as stage:
        stage.begin("the")
        for word in words:
            stage.step(stage.spell(f" {word}."), stage.spell(f" {word}") + stage.spell("NO"), len(word) + 1)
    last = stage.output[stage.output.rindex("\x1b[?1049l") :]
    plain = ESCAPE.sub("", last)
    story = "the " + " ".join(f"{word}." for word in words)
    assert story in " ".join(plain.split())  # wrapped between words
    assert plain.count("word50.") == 1
    assert re.search(r"\x1b\[32m[^\x1b]*word7\x1b\[m\.", last)
    assert "green: guessed by little and confirmed" in plain
    assert "struck" not in plain  # where nothing is


def test_the_terminal_is_given_back_after_an_error_too(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    with pytest.raises(KeyboardInterrupt), stage:
        stage.begin("the")
        stage.step(stage.spell("SOFAR"))
        assert stage.feed(screen := Screen(80, 24)).cursor_hidden
        raise KeyboardInterrupt
    assert not stage.feed(screen).cursor_hidden
    assert screen.text().startswith("theSOFAR\n")


def test_a_text_of_a_moment_has_no_panel(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.show(Prompt(tokenizer.encode("the"), 0.001))
        stage.clock.now += UNSEEN_SECONDS / 2
        stage.show(Step(stage.spell(" end"), [], 0, 0.0, 0.0))
        assert stage.output == ""
        assert not stage.panel.was_seen
    assert stage.output == "\x1b[1mthe\x1b[m end\n"


# The prompt


@pytest.mark.parametrize("size", [*SIZES, (30, 8), (200, 60)], ids=str)
def test_a_prompt_that_is_read_is_in_the_first_frame_with_how_far_it_is_and_how_long_it_takes(
    tokenizer: Tokenizer, size: tuple[int, int]
) -> None:
    prompt = tokenizer.encode("Once there then the end. " * 40)
    with Stage(tokenizer, *size) as stage:
        stage.show(Prefill(prompt, 0.0))
        for share in (0.0, 0.25, 0.5):
            stage.clock.now += 1
            stage.show(Prefill(prompt, share))
            assert "end." in stage.output
            assert f"{share:.0%}" in stage.screen()
            assert "tok/s" not in stage.screen()
            stage.assert_fits()
        if size[0] >= 40:
            assert "reading" in stage.screen() and "50%, 3 s left" in stage.screen()
        stage.show(Prompt(prompt, 3.0))
        assert "reading" not in stage.screen()
        stage.step(stage.spell("X"))
        assert stage.screen().count("X") >= 1
    assert ESCAPE.sub("", stage.output).split("╯")[-1].count("Once") == 40


def test_a_prompt_that_is_read_in_a_moment_has_no_panel(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        for share in (0.0, 0.5, 1.0):
            stage.show(Prefill(tokenizer.encode("the"), share))
            stage.clock.now += UNSEEN_SECONDS / 4
        stage.show(Prompt(tokenizer.encode("the"), 3 * UNSEEN_SECONDS / 4))
        assert stage.output == ""


def test_a_text_that_is_read_anew_stays_in_sight_and_says_so(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once")
    with Stage(tokenizer) as stage:
        stage.show(Prompt(prompt, 0.0))
        stage.step(stage.spell("there"))
        for share in (0.0, 0.25):
            stage.clock.now += 1
            stage.show(Prefill([*prompt, *stage.spell("there")], share))
        assert "reading all of" in stage.screen() and "25%, 3 s left" in stage.screen()
        assert stage.screen().count("Once") == 1
        stage.step(stage.spell("X"))
        assert "reading" not in stage.screen()
    assert ESCAPE.sub("", stage.output).split("╯")[-1].count("Once") == 1


def test_q_is_heard_while_the_prompt_is_read(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.show(Prefill(tokenizer.encode("the"), 0.0))
        stage.keys.typed = [b"q"]
        stage.clock.now += 1
        stage.show(Prefill(tokenizer.encode("the"), 0.5))
        assert stage.panel.ended
    assert stage.output.endswith("\x1b[1mthe\x1b[m\n")


# Keys


def test_keys_come_one_by_one_and_the_terminal_is_as_it_was() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin, os.fdopen(ours, "wb", buffering=0) as hands:
        before = termios.tcgetattr(stdin)
        keyboard = Keyboard(stdin)
        keyboard.open()
        hands.write(b" q\x1b[C\x1b[1;5A\xc3\xa9\x1b")
        assert keyboard.pressed() == [b" ", b"q", b"\x1b[C", b"\x1b[1;5A", b"\xc3", b"\xa9"]
        hands.write(b"OC?")
        assert keyboard.pressed() == [b"\x1bOC", b"?"]
        assert keyboard.pressed() == []
        hands.write(b"left\n")
        keyboard.close()
        assert termios.tcgetattr(stdin) == before
        assert not select.select([stdin], [], [], 0)[0]


def test_space_pauses_until_it_is_pressed_again(tokenizer: Tokenizer) -> None:
    moments: list[float] = []

    def sleep(seconds: float) -> None:
        stage.clock.now += seconds
        moments.append(stage.clock.now)
        if len(moments) == 1:
            assert "paused" in stage.lines()[-3]
        if len(moments) == 100:
            stage.keys.typed = [b" "]

    with Stage(tokenizer, sleep=sleep) as stage:
        stage.begin("the")
        stage.keys.typed = [b" "]
        stage.step(stage.spell("x"))
        assert len(moments) == 100
        stage.step(stage.spell("x"))
        assert len(moments) == 100
        assert "paused" not in stage.screen()


def test_at_a_pause_the_text_has_every_letter_of_the_passes_below_it(tokenizer: Tokenizer) -> None:
    """At full speed a word that may not fit its row waits for its end; and a word that has its place does not move."""
    with Stage(tokenizer, 40, 12) as stage:
        stage.begin("the")
        stage.step(stage.spell(" then and then and then unfin"))
        assert "unfin" not in "".join(stage.section(0))
        stage.keys.typed = [b" "]
        stage.panel._look()
        assert stage.section(0)[0] == "the then and then and then unfin"
        stage.panel._obey(WISHES[b" "])
        stage.step(stage.spell("ishedness end"))
        assert stage.section(0)[:2] == ["the then and then and then unfinishe", "dness end"]


@pytest.mark.parametrize("arrow", [b"\x1b[C", b"\x1bOC"])
def test_the_right_arrow_takes_one_step(tokenizer: Tokenizer, arrow: bytes) -> None:
    steps: list[int] = []

    def sleep(seconds: float) -> None:
        stage.clock.now += seconds
        if stage.panel._proposed is None:  # the step is done, and it waits
            steps.append(stage.statistics.target_passes)
            stage.keys.typed = [arrow]

    with Stage(tokenizer, sleep=sleep) as stage:
        stage.begin("the")
        stage.keys.typed = [arrow]
        for _ in range(4):
            stage.step(stage.spell("x"), stage.spell("y"))
    assert steps == [1, 2, 3, 4]


def test_plus_and_minus_change_the_pace(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, pace=5) as stage:
        for key, pace in [
            (b"+", "8"),
            (b"-", "4"),
            (b"-", "2"),
            (b"-", "1"),
            (b"-", "0.5"),
            (b"-", "0.25"),
            (b"-", "0.25"),
            (b"=", "0.5"),
        ]:
            stage.panel._obey(WISHES[key])
            assert f" {pace} passes a second " in stage.screen()
        for _ in range(9):
            stage.panel._obey(WISHES[b"+"])
        assert "passes a second" not in stage.screen()


def test_q_ends_and_a_question_mark_shows_the_keys(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.keys.typed = [b"x", b"\x1b", b"\x1b[A"]
        stage.panel._look()
        assert "green:" in stage.screen()
        stage.keys.typed = [b"?"]
        stage.step(stage.spell("x"))
        assert all(word in stage.screen() for word in ("space: pause", "q: end", "+ -: pace", "one pass"))
        assert "green:" not in stage.screen()
        assert not stage.panel.ended
        stage.keys.typed = [b"q"]
        stage.step(stage.spell("x"))
        assert stage.panel.ended


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.spell("é")[:1])
        assert "\ufffd" not in stage.screen()
        stage.show(Step([], [], 0, 0.01, 0.0, "max_tokens"))
    assert "\ufffd" in stage.output


def test_a_character_split_over_two_steps_is_drawn_whole(tokenizer: Tokenizer) -> None:
    first, second = "é".encode()
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step([FIRST_BYTE + first], [FIRST_BYTE + first, FIRST_BYTE + 65], 1)
        stage.step([FIRST_BYTE + second], [FIRST_BYTE + second], 1)
        stage.clock.now += 10
        assert stage.section(0)[0] == "theé"


def test_frames_come_when_due_and_not_for_every_step(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        length = len(stage.output)
        for _ in range(50):
            stage.show(Proposal([5]))
            stage.show(Step([5], [5], 1, 0.0, 0.0))
        assert len(stage.output) == length
        stage.clock.now += 1
        stage.show(Proposal([5]))
        assert len(stage.output) > length


def test_the_memory_of_the_tail_does_not_grow_with_the_story(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 40, 10) as stage:
        stage.begin("the")
        for _ in range(400):
            stage.show(Step(stage.spell("abcdefghij"), stage.spell("nonsense"), 0, 0.0, 0.0))
        stage.clock.now += 1
        assert stage.lines()
        assert len(stage.panel._passes) < 20
        assert sum([width_of(row) for row in stage.panel._story.tail(36, 1000)]) < 40 * 80


def test_an_ascii_terminal_gets_an_ascii_frame(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, ascii=True) as stage:
        stage.begin("the")
        stage.step(stage.spell("abé"), stage.spell("abx"), 2)
        frame = stage.screen()
        assert not [c for c in frame if ord(c) > 127 and c != "é"]
    assert "\\xe9" in stage.bytes.getvalue().decode("ascii")


def test_plain_text_comes_as_it_is_written_and_characters_come_whole(tokenizer: Tokenizer) -> None:
    out = io.StringIO()
    first, second = "é".encode()
    with PlainView(out) as view:
        events = iter(
            [
                Prompt(tokenizer.encode("the"), 0.0),
                Proposal([FIRST_BYTE + 65]),
                Step([FIRST_BYTE + first], [FIRST_BYTE + first, FIRST_BYTE + 65], 1, 0.0, 0.0),
                Step([FIRST_BYTE + second, FIRST_BYTE + 33], [], 0, 0.0, 0.0),
                Step([FIRST_BYTE + 27, FIRST_BYTE + 91, FIRST_BYTE + first], [], 0, 0.0, 0.0, "eos"),
            ]
        )
        for event, so_far in zip(worded(events, Wording(tokenizer)), ("the", "the", "the", "theé!", "theé!\ufffd"), strict=True):
            view.show(event)
            assert out.getvalue() == so_far
    assert out.getvalue() == "theé!\ufffd\n"


def test_plain_text_waits_in_no_buffer(tokenizer: Tokenizer) -> None:
    written = io.BytesIO()
    with PlainView(io.TextIOWrapper(written, encoding="utf-8", newline="")) as view:
        view.show(Prompt([], 0.0, "the"))
        assert written.getvalue() == b"the"
        view.show(Step([5], [], 0, 0.0, 0.0, pieces=["!"]))
        assert written.getvalue() == b"the!"


def test_plain_text_ends_with_a_line_break_after_an_interrupt_too() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), PlainView(out) as view:
        view.show(Prompt([], 0.0, "the"))
        raise KeyboardInterrupt
    assert out.getvalue() == "the\n"


def test_the_silent_view_keeps_the_prompt_in_the_text_and_out_of_the_tokens() -> None:
    with SilentView() as view:
        view.show(Prompt([1], 0.0, "the"))
        view.show(Step([65, 66], [5], 0, 0.0, 0.0, pieces=["A", "B"]))
        view.show(Step([67], [5], 0, 0.0, 0.0, pieces=["C"]))
    assert view.text == "theABC"
    assert view.tokens == [65, 66, 67]


def some_statistics() -> Statistics:
    statistics = Statistics(n_prompt=5)
    statistics.add(Prompt([1, 2, 3, 4, 5], 0.25))
    statistics.add(Step([5, 6, 7], [5, 6, 8, 9], 2, 0.5, 0.1))
    statistics.add(Step([5], [7, 6], 0, 0.25, 0.1, stop_reason="max_tokens"))
    return statistics


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_summary_has_every_figure_and_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    print_summary(console, some_statistics(), seed=17, weights="target fp32")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    figures = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in text.splitlines())
    assert figures == {
        "prompt tokens": "5", "generated": "4", "drafted": "6", "accepted": "2", "acceptance rate": "33.3%",
        "by position": "50% 50% 0% 0%", "mean length": "2.00 tokens a pass",
        "prefill": "0.250 s", "decode": "0.750 s", "speed": "5.3 tok/s",
        "stopped by": "max_tokens", "seed": "17", "weights": "target fp32",
    }  # fmt: skip


def test_of_a_mixture_it_is_told_what_a_token_reads_alone_and_in_passes(tokenizer: Tokenizer) -> None:
    """Of two passes, over three tokens and over one: 18 and 8 experts for four tokens."""
    steps = [Step([5, 6, 7], [5, 6, 8], 2, 0.5, 0.1, experts=(18.0, 8)), Step([5], [], 0, 0.25, 0.1, experts=(8.0, 8))]
    statistics, console = Statistics(), Console(file=io.StringIO(), width=80)
    for step in steps:
        statistics.add(step)
    assert (statistics.experts_alone, statistics.experts_per_token) == (8, 6.5)
    print_summary(console, statistics)
    assert "experts a token  8 alone, 6.5 in these passes" in re.sub(" {2,}", "  ", console.file.getvalue())  # type: ignore
    figures = json.loads(to_json(statistics, "", []))
    assert (figures["experts_alone"], figures["experts_per_token"]) == (8, 6.5)
    with Stage(tokenizer, 120, 24) as stage:
        stage.begin()
        for step in steps:
            stage.clock.now += 1
            stage.statistics.add(step)
            stage.show(step)
        assert "6.5 experts a token instead of 8" in stage.screen()


def test_the_right_edges_of_the_summary_are_one() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_summary(console, some_statistics(), seed=17, weights="target fp32")
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert all(len(a) == len(b) for a, b in pairwise(lines))


def test_json_says_the_figures_and_what_is_added() -> None:
    result = json.loads(to_json(some_statistics(), "the\n\x1b[31m\ufffd", [5, 6], seed=3, extra="x"))
    assert result["text"] == "the\n\x1b[31m\ufffd"
    assert result["tokens"] == [5, 6]
    assert result["accepted_histogram"] == [1, 0, 1]
    assert result["tokens_per_second"] == pytest.approx(4 / 0.75)
    assert (result["seed"], result["extra"]) == (3, "x")


def test_nothing_generated_divides_nothing_by_zero(tokenizer: Tokenizer) -> None:
    statistics = Statistics(n_prompt=1)
    assert json.loads(to_json(statistics, "", []))["tokens_per_second"] == 0
    print_summary(Console(file=io.StringIO()), statistics)
    with Stage(tokenizer) as stage:
        stage.show(Prompt([BOS], 0.0))
        stage.assert_fits()


def test_at_a_pace_every_step_is_seen_proposed_and_then_judged(tokenizer: Tokenizer) -> None:
    """The steps come as fast as they can; the panel makes them last."""
    with Stage(tokenizer, pace=4) as stage:
        stage.begin()
        for _ in range(5):
            begin, start = stage.clock.now, len(stage.output)
            stage.show(Proposal([stage.token(" the"), stage.token(" o")]))
            assert stage.clock.now - begin == pytest.approx(1 / 8)
            proposed, start = stage.output[start:], len(stage.output)
            stage.show(Step([stage.token(" the"), stage.token(" a")], [stage.token(" the"), stage.token(" o")], 1, 0.01, 0.004))
            judged = stage.output[start:]
            assert stage.clock.now - begin == pytest.approx(1 / 4)
            assert proposed
            assert judged
            assert proposed != judged


@pytest.mark.parametrize("guessed", ["by little", ""])
def test_at_a_pace_a_step_without_guesses_is_seen_as_long(tokenizer: Tokenizer, guessed: str) -> None:
    with Stage(tokenizer, pace=4, guessed=guessed) as stage:
        stage.begin()
        begin = stage.clock.now
        for _ in range(3):
            stage.show(Proposal([]))
            stage.show(Step(stage.spell("x"), [], 0, 0.01, 0.0))
        assert stage.clock.now - begin == pytest.approx(3 / 4)


def test_a_pace_near_zero_waits_no_longer_than_a_clock_can_tell(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, pace=1e-300) as stage:
        stage.begin()
        begin = stage.clock.now
        stage.show(Proposal([stage.token(" the")]))
        assert 0 < stage.clock.now - begin <= 86_400


def test_what_the_colours_mean_takes_the_words_that_fit() -> None:
    forms: list[Row] = [[("a long word", "accepted"), ("another", "target")], [("short", "accepted"), ("it", "target")]]
    assert [len(rows) for rows in (fitting(forms, 30, 2), fitting(forms, 11, 2))] == [1, 2]
    for rows in (fitting(forms, 10, 2), fitting(forms, 11, 1)):
        assert rows == [[*forms[1][:1], ("   ", "plain"), forms[1][1]]]
    assert fitting(forms, 4, 1) == [[("short", "accepted")]]  # no form fits
