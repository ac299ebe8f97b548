"""The panel at several sizes, with and without colour, and the plain-text and JSON views."""

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

from specdec.events import Event, PrefillProgress, Prompt, Proposal, Statistics, Step
from specdec.text.detokenizer import EventDetokenizer
from specdec.tokenizer import BOS, FIRST_BYTE, Tokenizer
from specdec.ui.keyboard import Keyboard
from specdec.ui.panel import MIN_SHOW_S, MIN_SHOW_TOKENS, PANEL_DELAY_S, LivePanel, buffer_events
from specdec.ui.plain_views import (
    ModelLabels,
    PlainView,
    SilentView,
    StreamSanitizer,
    format_result,
    print_summary,
    sanitize,
    to_json,
)
from specdec.ui.terminal_window import STYLES, STYLES_NO_COLOR, Window, fit_items
from specdec.ui.text_layout import Row, StyledText, row_width
from tests.fakes.terminal import Screen
from tests.tools.decode import add_text
from tests.tools.panel_keys import Clock, Keys, has_grown

SIZES = [(40, 10), (60, 12), (80, 24), (120, 40)]
OTHER_SIZES = [(20, 8), (63, 10), (64, 10), (80, 8), (200, 60)]
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
MAX_TOKENS = 200


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
            ModelLabels("big", guessed, "big + little"), pace,
        )  # fmt: skip
        self.n_fed, self._wording = 0, EventDetokenizer(tokenizer, include_draft_text=True)

    def __enter__(self) -> "Stage":
        self.panel.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.panel.__exit__(None, None, None)

    def show(self, event: Event | PrefillProgress) -> None:
        self.panel.show(add_text(event, self._wording))

    def token(self, piece: str) -> int:
        return self.tokenizer.pieces.index(piece.encode())

    def encode(self, text: str) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode()]

    def begin(self, text: str = "Once upon") -> None:
        self.show(Prompt(self.tokenizer.encode(text), 1.0))

    def propose(self, text: str) -> str:
        """Show a proposal and return its frame."""
        self.clock.now += 1
        start = len(self.output)
        self.show(Proposal(self.encode(text)))
        return self.output[start:]

    def step(self, tokens: list[int], draft: list[int] | None = None, n_accepted: int = 0, source: str = "") -> str:
        """Show one step and return what it wrote to the terminal."""
        start = len(self.output)
        self.clock.now += 1
        self.show(Proposal(draft or []))
        self.clock.now += 1
        step = Step(tokens, draft or [], n_accepted, 0.01, 0.004, draft_source=source)
        self.statistics.add(step)
        self.show(step)
        return self.output[start:]

    def press(self, *keys: bytes) -> None:
        """Type keys and let the panel read them."""
        self.keys.typed = [*keys]
        self.panel.poll()

    @property
    def output(self) -> str:
        return self.bytes.getvalue().decode()

    def feed(self, screen: Screen) -> Screen:
        """Feed a screen what was written since the last time, with line breaks as a terminal driver makes them."""
        new, self.n_fed = self.output[self.n_fed :], len(self.output)
        screen.feed(new.replace("\r\n", "\n").replace("\n", "\r\n"))
        return screen

    def rows(self) -> list[Row]:
        """Return the panel as it would be drawn now."""
        return self.panel.render(self.console.size)

    def lines(self) -> list[str]:
        return ["".join([text for text, _ in row]) for row in self.rows()]

    def screen(self) -> str:
        return "\n".join(self.lines())

    def section(self, n: int) -> list[str]:
        """Return the lines within the frame: those of the text (0), the passes (1) or the statistics (2)."""
        lines = self.lines()
        rules = [i for i, line in enumerate(lines) if line and line[0] in "╭├╰"]
        return [line[2:-2].rstrip() for line in lines[rules[n] + 1 : rules[n + 1]]]

    def style_of(self, word: str) -> str:
        """Return the style of the one run among the passes that has the word."""
        rules = [i for i, row in enumerate(self.rows()) if row and row[0][0][0] in "╭├╰"]
        passes = self.rows()[rules[1] + 1 : rules[2]]
        kinds = {kind for row in passes for text, kind in row if word in text}
        assert len(kinds) == 1, kinds
        return kinds.pop()

    def assert_fits(self) -> None:
        rows = self.rows()
        assert len(rows) <= max(1, self.console.height - 1)
        assert max(map(row_width, rows)) <= self.console.width
        assert not any(character in line for line in self.lines() for character in "\t\r\n\x1b\x07")
        framed = [row for row in rows if row and row[-1][1] == "edge"]
        assert len({row_width(row) for row in framed}) <= 1


def show_steps(stage: Stage, tokens: list[int], rng: random.Random) -> None:
    """Show steps that generate these tokens, with four proposals each, some of them rejected."""
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
def test_panel_is_never_larger_than_terminal(tokenizer: Tokenizer, size: tuple[int, int], text: str) -> None:
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
def test_panel_fits_at_any_gamma(tokenizer: Tokenizer, size: tuple[int, int], gamma: int) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        for n_accepted in range(gamma + 1):
            draft = "x" * n_accepted + "y" * (gamma - n_accepted)
            stage.step(stage.encode("x" * (n_accepted + 1)), stage.encode(draft), n_accepted)
            stage.assert_fits()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_newest_text_is_shown(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        for i in range(60):
            word = f"w{i}w"
            separator = "\n\n" if i % 7 == 0 else " "
            stage.step(stage.encode(separator + "then there " + word), stage.encode("nonsense"), 0)
            assert word in stage.screen()
    assert not size[1] < 20 or "w10w" not in stage.screen()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_draft_tokens_are_shown_before_verification(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin("the " * 300)
        assert f"\x1b[{STYLES['proposed']}mQUERY" in stage.propose("QUERY")
        stage.show(Proposal([]))
        assert "QUERY" not in stage.screen()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_statistics_are_shown(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        stage.step(stage.encode("abc"), stage.encode("abxx"), 2)
        screen = stage.screen()
    assert "300" in screen  # tokens a second
    assert "tok/s" in screen
    assert "50%" in screen  # acceptance
    assert "3.0" in screen  # tokens a pass
    assert f"3/{MAX_TOKENS}" in screen


def test_histogram_has_bar_for_every_accepted_length(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 120, 40) as stage:
        for n_accepted in (0, 2, 2, 2):
            stage.step(stage.encode("x" * (n_accepted + 1)), stage.encode("xx"), n_accepted)
        lines = stage.section(1)
        assert "guesses right in a pass" in stage.screen()
    bars = [re.search(r" (\d) (█*) +(\d+)%$", line) for line in lines[:3]]
    assert [(m[1], len(m[2]), m[3]) for m in bars if m] == [("0", 3, "25"), ("1", 0, "0"), ("2", 9, "75")]


def test_last_row_of_histogram_has_all_larger_lengths(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 120, 16) as stage:
        for n_accepted in (0, 7, 8, 9):
            stage.step(stage.encode("x" * (n_accepted + 1)), stage.encode("x" * 9), n_accepted)
        endings = [line.split()[-1] for line in stage.section(1)]
        assert endings[0] == "25%" and endings[-1] == "75%" and re.search(r" \d\+ ", stage.section(1)[-1])


def test_markup_in_model_text_is_not_interpreted(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("[bold]p[/bold]")
        tokens = [stage.token("[brackets]"), stage.token("[bold]"), stage.token("[/red]")]
        stage.step([*tokens, *stage.encode("[/]")], tokens[:1] + stage.encode("[zz]"), 1)
        assert stage.section(1)[0].startswith("[brackets][zz] [bold][/red][/]")
    assert "[bold]p[/bold][brackets][bold][/red][/]" in ESCAPE.sub("", stage.output).splitlines()[-3]


def test_generated_control_characters_never_reach_terminal(tokenizer: Tokenizer) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x1b[?1049h\r\x08\x9b31m\x00\x7f"
    with Stage(tokenizer) as stage:
        stage.begin(evil)
        stage.step(stage.encode(evil), stage.encode(evil), 5)
        stage.step(stage.encode("x"), stage.encode(evil), 0)
        stage.clock.now += 5
    rest = ESCAPE.sub("", stage.output)
    assert not [c for c in rest if c != "\n" and c != "\r" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    stage.feed(Screen(80, 24))  # fails on any code that is not the panel's own
    assert sanitize("a\x1b7b\x00c\x9bd\re\n\tf") == "abce\n\tf"
    assert sanitize("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x1bPq\x1b\\y\u202ez\u2066!") == "red xyz!"


def test_control_sequence_across_tokens_is_removed() -> None:
    """It is removed whole and alone; an unfinished sequence is printed without its ESC."""
    text = "a\x1b[1;31mred\x1b]8;;x\x1b\\link\x1b(Bend\x9b2J!"
    for seed in range(50):
        rng, stream, out = random.Random(seed), StreamSanitizer(), ""
        cuts = sorted(rng.sample(range(1, len(text)), 6))
        for start, end in pairwise([0, *cuts, len(text)]):
            out += stream.push(text[start:end])
        assert out + stream.end() == "aredlinkend!"
    stream = StreamSanitizer()
    assert stream.push("x\x1b]" + "y" * 100) + stream.push("z") == "x" + "y" * 100 + "z"
    assert stream.push("\x1b[3") == ""
    assert stream.end() == "3"


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_fit_without_control_characters(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    with Stage(tokenizer, *SIZES[seed % 4]) as stage:
        stage.begin()
        for _ in range(15):
            show_steps(stage, rng.choices(range(3, tokenizer.vocab_size), k=10), rng)
            stage.assert_fits()
    rest = ESCAPE.sub("", stage.output)
    assert not [c for c in rest if c not in "\n\r\t" and (ord(c) < 32 or 127 <= ord(c) < 160)]


# Text


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rejected_tokens_are_never_in_the_text(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin("the")
        stage.step(stage.encode(" YES. own "), stage.encode(" YES. NO"), 5)
        assert "NO" not in "\n".join(stage.section(0))
        assert "YES. own" in "\n".join(stage.section(0))
        assert "YES. NO own" in "\n".join(stage.section(1))
    assert "NO" not in ESCAPE.sub("", stage.output).split("╯")[-1]


@pytest.mark.campaign
@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("size", [(40, 12), (80, 24), (120, 40)], ids=str)
def test_shown_text_never_changes_between_frames(tokenizer: Tokenizer, size: tuple[int, int], pages: int) -> None:
    """No row outside the panel changes either, with or without an alternate screen."""
    screen = Screen(*size, pages)
    screen.feed("$ one\r\n$ two\r\n")
    rng = random.Random(sum(size))
    with Stage(tokenizer, *size) as stage:
        stage.begin("the")
        for _ in range(60):
            show_steps(stage, [*rng.choices(range(259, tokenizer.vocab_size), k=3), stage.token(" the")], rng)
            stage.feed(screen)
    stories = [get_text_rows(picture) for picture in screen.frames if "╭" in picture]
    assert len(stories) > 100
    assert max(map(len, stories)) > 3
    for before, after in pairwise(stories):
        assert any(has_grown(before[k:], after) for k in range(len(before) + 1)), (before, after)
    final = stage.feed(screen).get_text()
    assert final.startswith("$ one\n$ two\nthe")
    assert "╭" not in final
    assert not screen.cursor_hidden


def get_text_rows(picture: str) -> list[str]:
    """Return the rows of the text in a window, without empty ones at the end."""
    rows = picture.splitlines()
    top = next(i for i, row in enumerate(rows) if row.startswith("╭"))
    bottom = next(i for i, row in enumerate(rows) if row.startswith("├"))
    text_rows = [row[2:-2].rstrip() for row in rows[top + 1 : bottom]]
    while text_rows and not text_rows[-1]:
        text_rows.pop()
    return text_rows


def test_resizing_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    screen = Screen(120, 40)
    screen.feed("$ one\r\n$ two\r\n")
    with Stage(tokenizer, 120, 40) as stage:
        stage.begin("the")
        for width, height in ((120, 40), (40, 12), (80, 24), (80, 6), (80, 24), (20, 8), (200, 50), (10, 3), (60, 20)):
            stage.console.size = ConsoleDimensions(width, height)
            screen.resize(width, height)
            for word in ("one", "two"):
                stage.step(stage.encode(f" {word}"), stage.encode("NO"), 0)
            window = stage.feed(screen).get_window()
            is_framed = height >= 8 and width >= 20
            assert window.count("╭") == window.count("╮") == window.count("╰") == window.count("╯") == is_framed
            rows = [row.rstrip() for row in window.splitlines() if row.strip()]
            assert rows == [line.rstrip() for line in stage.lines() if line.strip()]
    assert stage.feed(screen).get_text().startswith("$ one\n$ two\nthe one two one two")


def test_word_has_style_of_its_first_piece() -> None:
    styled = StyledText()
    for text, kind in [
        ("Onc", "prompt"),
        (" rabb", "accepted"),
        ("it", "target"),
        (", ", "target"),
        ("don", "target"),
        ("'t. I", "accepted"),
    ]:
        styled.add(text, kind)
    assert styled.wrap(80) == [[("Onc", "prompt"), (" rabbit", "accepted"), (", don't", "target"), (". I", "accepted")]]


@pytest.mark.parametrize("width", [5, 12, 40, 76])
def test_text_grows_only_at_its_end_and_is_complete(width: int) -> None:
    rng = random.Random(width)
    pieces = (
        " the", " rabb", "it", "s", "\n", " ", ",", " 日本", "語", "🙂", " supercalifragilistic", "expialidocious", "é",
        "e\u0301",
    )  # fmt: skip
    for _ in range(20):
        styled, before, text = StyledText(), [], ""
        for _ in range(120):
            piece = rng.choice(pieces)
            text += piece
            styled.add(piece, rng.choice(["accepted", "target"]))
            after = [[(c, kind) for run, kind in row for c in run] for row in styled.tail(width, 60)]
            n = len(before) - 1
            if n >= 0 and len(after) < 60:
                assert before[:n] == after[:n]
                assert after[n][: len(before[n])] == before[n]
            before = after
        rows = styled.wrap(width)
        assert max(map(row_width, rows)) <= width
        plain = "".join([run for row in rows for run, _ in row])
        assert "".join(plain.split()) == "".join(text.split())


def test_colours_are_readable_on_black_and_white() -> None:
    """Yellow, cyan and white are unreadable on white, blue and black on black."""
    codes = {code for style in (*STYLES.values(), *STYLES_NO_COLOR.values()) for code in style.split(";") if code}
    assert {code for code in codes if len(code) > 1} <= {"31", "32", "35"}


def test_token_styles_differ_with_and_without_colour(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.encode(" YES. own"), stage.encode(" YES. NO. no"), 5)
        kinds = [stage.style_of(word) for word in ("YES", "NO", "no", "own")]
    assert kinds == ["accepted", "rejected", "unread", "target"]
    for styles in (STYLES, STYLES_NO_COLOR):
        assert len({styles[kind] for kind in [*kinds, "proposed"]}) == 5
        assert styles["target"] == ""
        assert "9" in styles["rejected"].split(";") and "9" in styles["unread"].split(";")
    assert not re.search(r"\b[349]\d", ";".join(STYLES_NO_COLOR.values()))


def test_both_endings_of_split_word_are_shown_whole(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.encode(" a rabbit"), stage.encode(" a rabble is"), 7)
        assert stage.section(1)[0].startswith("a rabble is rabbit  ")
        assert stage.style_of("rabble") == "rejected"
        stage.step(stage.encode("s. I"), stage.encode("s."), 2)
        assert stage.section(1)[1].startswith("rabbits. I  ")
        assert stage.style_of("s.") == "accepted"


def test_unread_draft_tokens_are_cut_first(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 40, 12) as stage:
        stage.begin("the")
        stage.step(stage.encode(" yes own"), stage.encode(" yes NO" + " more" * 20), 4)
        assert re.fullmatch(r"yes NO more more[more ]*… own +\+8", stage.section(1)[0])
        stage.step(stage.encode(" yes" * 20 + " own"), stage.encode(" yes" * 20 + " NO"), 80)
        assert re.fullmatch(r"…[yes ]* NO own +\+84", stage.section(1)[0])


# Wording


@pytest.mark.parametrize("guessed", ["by little", "from the text so far"])
@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (120, 40)])
def test_legend_has_the_styles_it_explains(tokenizer: Tokenizer, width: int, height: int, guessed: str) -> None:
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


def test_panel_without_draft_does_not_mention_guesses(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, guessed="") as stage:
        stage.begin("the")
        stage.step(stage.encode(" end"))
        screen = stage.screen()
        assert not any(word in screen for word in ("guess", "struck", "pass", "green"))
    assert "guess" not in stage.output
    assert ESCAPE.sub("", stage.output).split("╯")[-1].strip() == "the end"


@pytest.mark.parametrize("size", [*SIZES, *OTHER_SIZES], ids=str)
def test_passes_name_where_their_guesses_were_looked_up(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        for source in ("this text", "earlier text", "runner-up", ""):
            stage.step(stage.encode("abc"), stage.encode("ab") if source else [], 2 if source else 0, source)
            stage.step(stage.encode("word " * 9), stage.encode("word " * 30), 44, source)
            stage.assert_fits()
        if size[0] >= 64 and size[1] >= 30:
            endings = [re.split(" {2,}", line.strip())[-1] for line in stage.section(1)] if size[0] < 92 else []
            assert not endings or endings[-3:] == ["runner-up +45", "+3", "+45"], endings
            assert "earlier text" in stage.screen() and "runner-up" in stage.screen()
    assert stage.statistics.accepted_by_source == {"this text": 46, "earlier text": 46, "runner-up": 46}


def test_paced_run_shows_pace_then_true_speed(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin()
        stage.step(stage.encode("abc"), stage.encode("ab"), 2)
        assert "300 tok/s" in stage.screen()
        stage.keys.typed = [b"-"]
        stage.step(stage.encode("abc"), stage.encode("ab"), 2)
        assert "16 passes a second" in stage.screen()
        stage.keys.typed = [b"+"]
        stage.step(stage.encode("abc"), stage.encode("ab"), 2)
        assert "300 tok/s" in stage.screen()  # without the pacing delays


@pytest.mark.parametrize(("n_accepted", "seconds"), [(0, 0.0001), (3, 0.0005), (3, 0.03)])
def test_short_output_is_shown_for_four_seconds_at_even_pace(tokenizer: Tokenizer, n_accepted: int, seconds: float) -> None:
    with Stage(tokenizer, pace=None) as stage:
        stage.show(Prompt(tokenizer.encode("Once upon"), 0.001))
        begin, shown = stage.clock.now, list[float]()
        while stage.statistics.n_generated < MAX_TOKENS:
            stage.show(Proposal(stage.encode("abc"[:n_accepted])))
            stage.clock.now += seconds
            step = Step(stage.encode("abcd"[: n_accepted + 1]), stage.encode("abc"[:n_accepted]), n_accepted, seconds, 0.0)
            stage.statistics.add(step)
            stage.show(step)
            shown.append(stage.clock.now)
        length = MIN_SHOW_S * min(MAX_TOKENS / MIN_SHOW_TOKENS, 1.0)
        assert 0.9 * length < stage.clock.now - begin < 1.25 * length + len(shown) * seconds * 0.1
        assert stage.panel.was_drawn
        gaps = [after - before for before, after in pairwise([begin, *shown])]
        if len(gaps) > 10:
            few = [sum(gaps[i : i + 8]) for i in range(8, len(gaps) - 8, 8)]
            assert max(few) < 3 * min(few)


@pytest.mark.parametrize("key", [b"+", b"?", b"q"])
def test_any_key_ends_auto_pacing(tokenizer: Tokenizer, key: bytes) -> None:
    with Stage(tokenizer, pace=None) as stage:
        stage.show(Prompt(tokenizer.encode("Once upon"), 0.001))
        for i in range(10):
            if i == 5:
                begin, stage.keys.typed = stage.clock.now, [key]
            stage.clock.now += 0.03
            stage.show(Step(stage.encode("a"), [], 0, 0.03, 0.0))
        assert stage.clock.now - begin < 5 * 0.03 + 0.15


def test_buffer_runs_ahead_of_slow_display_and_passes_slow_events_on() -> None:
    clock = Clock()
    seen = list[tuple[int, float]]()

    def written(seconds: float) -> Iterator[Step]:
        for i in range(40):
            clock.now += seconds
            yield Step([i], [], 0, seconds, 0.0)

    for seconds in (0.001, 0.2):
        seen.clear()
        begin = clock.now
        for event in buffer_events(written(seconds), clock):
            seen.append((event.tokens[0], clock.now - begin))
            clock.now += 0.05
        assert [token for token, _ in seen] == [*range(40)]
        if seconds == 0.2:
            assert all(at == pytest.approx(0.2 + 0.25 * i) for i, (_, at) in enumerate(seen))
        else:  # all at once except the first, before the speed is known
            assert seen[-1][1] == pytest.approx(40 * 0.001 + 39 * 0.05)


SPEEDS = {
    0.0: "4.0 tokens per pass of big instead of 1",
    0.5: "0.50 times as fast as big alone, 4.0 tokens per pass",
    1.03: "As fast as big alone, 4.0 tokens per pass",
    2.94: "2.9 times as fast as big alone, 4.0 tokens per pass",
}


@pytest.mark.parametrize("speed_up", SPEEDS)
def test_result_is_one_correct_sentence(speed_up: float, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics, roles = Statistics(n_prompt=5), ModelLabels("big", "by little")
    for _ in range(20):
        statistics.add(Step([5, 6, 7, 8], [5, 6, 7, 9], 3, 0.5, 0.1))
    assert format_result(statistics, roles, True) == f"{SPEEDS[0.0]}; same output."  # no cost is calibrated
    monkeypatch.setattr(Statistics, "speed_up", speed_up or None)
    assert format_result(statistics, roles, True) == f"{SPEEDS[speed_up]}; same output."
    assert format_result(statistics, roles, False) == f"{SPEEDS[speed_up]}; same distribution."
    assert format_result(Statistics(n_prompt=3), roles, True) == ""


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_final_page_has_whole_text_once_in_colours(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    words = [f"word{i}" for i in range(100)]
    with Stage(tokenizer, *size) as stage:
        stage.begin("the")
        for word in words:
            stage.step(stage.encode(f" {word}."), stage.encode(f" {word}") + stage.encode("NO"), len(word) + 1)
    last = stage.output[stage.output.rindex("\x1b[?1049l") :]
    plain = ESCAPE.sub("", last)
    text = "the " + " ".join(f"{word}." for word in words)
    assert text in " ".join(plain.split())  # wrapped between words
    assert plain.count("word50.") == 1
    assert re.search(r"\x1b\[32m[^\x1b]*word7\x1b\[m\.", last)
    assert "green: guessed by little and confirmed" in plain
    assert "struck" not in plain  # nothing was rejected


def test_terminal_is_restored_after_error(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    with pytest.raises(KeyboardInterrupt), stage:
        stage.begin("the")
        stage.step(stage.encode("SOFAR"))
        assert stage.feed(screen := Screen(80, 24)).cursor_hidden
        raise KeyboardInterrupt
    assert not stage.feed(screen).cursor_hidden
    assert screen.get_text().startswith("theSOFAR\n")


def test_very_short_output_has_no_panel(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.show(Prompt(tokenizer.encode("the"), 0.001))
        stage.clock.now += PANEL_DELAY_S / 2
        stage.show(Step(stage.encode(" end"), [], 0, 0.0, 0.0))
        assert stage.output == ""
        assert not stage.panel.was_drawn
    assert stage.output == "\x1b[1mthe\x1b[m end\n"


# Prefill


@pytest.mark.parametrize("size", [*SIZES, (30, 8), (200, 60)], ids=str)
def test_first_frame_shows_prefill_progress_and_time_left(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    prompt = tokenizer.encode("Once there then the end. " * 40)
    with Stage(tokenizer, *size) as stage:
        stage.show(PrefillProgress(prompt, 0.0))
        for share in (0.0, 0.25, 0.5):
            stage.clock.now += 1
            stage.show(PrefillProgress(prompt, share))
            assert "end." in stage.output
            assert f"{share:.0%}" in stage.screen()
            assert "tok/s" not in stage.screen()
            stage.assert_fits()
        if size[0] >= 40:
            assert "reading" in stage.screen() and "50%, 3 s left" in stage.screen()
        stage.show(Prompt(prompt, 3.0))
        assert "reading" not in stage.screen()
        stage.step(stage.encode("X"))
        assert stage.screen().count("X") >= 1
    assert ESCAPE.sub("", stage.output).split("╯")[-1].count("Once") == 40


def test_short_prefill_has_no_panel(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        for share in (0.0, 0.5, 1.0):
            stage.show(PrefillProgress(tokenizer.encode("the"), share))
            stage.clock.now += PANEL_DELAY_S / 4
        stage.show(Prompt(tokenizer.encode("the"), 3 * PANEL_DELAY_S / 4))
        assert stage.output == ""


def test_later_prefill_keeps_text_and_shows_progress(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once")
    with Stage(tokenizer) as stage:
        stage.show(Prompt(prompt, 0.0))
        stage.step(stage.encode("there"))
        for share in (0.0, 0.25):
            stage.clock.now += 1
            stage.show(PrefillProgress([*prompt, *stage.encode("there")], share))
        assert "reading all of" in stage.screen() and "25%, 3 s left" in stage.screen()
        assert stage.screen().count("Once") == 1
        stage.step(stage.encode("X"))
        assert "reading" not in stage.screen()
    assert ESCAPE.sub("", stage.output).split("╯")[-1].count("Once") == 1


def test_q_works_during_prefill(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.show(PrefillProgress(tokenizer.encode("the"), 0.0))
        stage.keys.typed = [b"q"]
        stage.clock.now += 1
        stage.show(PrefillProgress(tokenizer.encode("the"), 0.5))
        assert stage.panel.ended
    assert stage.output.endswith("\x1b[1mthe\x1b[m\n")


# Keys


def test_keys_are_split_and_terminal_modes_restored() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin, os.fdopen(ours, "wb", buffering=0) as hands:
        before = termios.tcgetattr(stdin)
        keyboard = Keyboard(stdin)
        keyboard.open()
        hands.write(b" q\x1b[C\x1b[1;5A\xc3\xa9\x1b")
        assert keyboard.read_keys() == [b" ", b"q", b"\x1b[C", b"\x1b[1;5A", b"\xc3", b"\xa9"]
        hands.write(b"OC?")
        assert keyboard.read_keys() == [b"\x1bOC", b"?"]
        assert keyboard.read_keys() == []
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
        stage.step(stage.encode("x"))
        assert len(moments) == 100
        stage.step(stage.encode("x"))
        assert len(moments) == 100
        assert "paused" not in stage.screen()


def test_paused_text_has_every_letter_of_shown_passes(tokenizer: Tokenizer) -> None:
    """At full speed a word that may not fit its row waits for its end; placed words do not move."""
    with Stage(tokenizer, 40, 12) as stage:
        stage.begin("the")
        stage.step(stage.encode(" then and then and then unfin"))
        assert "unfin" not in "".join(stage.section(0))
        stage.press(b" ")
        assert stage.section(0)[0] == "the then and then and then unfin"
        stage.press(b" ")
        stage.step(stage.encode("ishedness end"))
        assert stage.section(0)[:2] == ["the then and then and then unfinishe", "dness end"]


@pytest.mark.parametrize("arrow", [b"\x1b[C", b"\x1bOC"])
def test_right_arrow_takes_one_step(tokenizer: Tokenizer, arrow: bytes) -> None:
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
            stage.step(stage.encode("x"), stage.encode("y"))
    assert steps == [1, 2, 3, 4]


def test_plus_and_minus_change_the_pace(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, pace=5) as stage:
        for key, pace in zip("+------=", ("8", "4", "2", "1", "0.5", "0.25", "0.25", "0.5"), strict=True):
            stage.press(key.encode())
            assert f" {pace} passes a second " in stage.screen()
        stage.press(*[b"+"] * 9)
        assert "passes a second" not in stage.screen()


def test_q_ends_and_question_mark_shows_keys(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.press(b"x", b"\x1b", b"\x1b[A")
        assert "green:" in stage.screen()
        stage.keys.typed = [b"?"]
        stage.step(stage.encode("x"))
        assert all(word in stage.screen() for word in ("space: pause", "q: end", "+ -: pace", "one pass"))
        assert "green:" not in stage.screen()
        assert not stage.panel.ended
        stage.keys.typed = [b"q"]
        stage.step(stage.encode("x"))
        assert stage.panel.ended


def test_incomplete_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.encode("é")[:1])
        assert "\ufffd" not in stage.screen()
        stage.show(Step([], [], 0, 0.01, 0.0, "max_tokens"))
    assert "\ufffd" in stage.output


def test_character_split_over_two_steps_is_drawn_whole(tokenizer: Tokenizer) -> None:
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


def test_memory_of_tail_does_not_grow_with_text(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 40, 10) as stage:
        stage.begin("the")
        for _ in range(400):
            stage.show(Step(stage.encode("abcdefghij"), stage.encode("nonsense"), 0, 0.0, 0.0))
        stage.clock.now += 1
        assert stage.lines()
        assert len(stage.panel._passes) < 20
        assert sum([row_width(row) for row in stage.panel._styled_text.tail(36, 1000)]) < 40 * 80


def test_ascii_terminal_gets_ascii_frame(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, ascii=True) as stage:
        stage.begin("the")
        stage.step(stage.encode("abé"), stage.encode("abx"), 2)
        frame = stage.screen()
        assert not [c for c in frame if ord(c) > 127 and c != "é"]
    assert "\\xe9" in stage.bytes.getvalue().decode("ascii")


def test_plain_output_streams_whole_characters(tokenizer: Tokenizer) -> None:
    out = io.StringIO()
    first, second = "é".encode()
    with PlainView(out) as view:
        detokenizer, texts = EventDetokenizer(tokenizer), ("the", "the", "the", "theé!", "theé!\ufffd")
        events = [
            Prompt(tokenizer.encode("the"), 0.0),
            Proposal([FIRST_BYTE + 65]),
            Step([FIRST_BYTE + first], [FIRST_BYTE + first, FIRST_BYTE + 65], 1, 0.0, 0.0),
            Step([FIRST_BYTE + second, FIRST_BYTE + 33], [], 0, 0.0, 0.0),
            Step([FIRST_BYTE + 27, FIRST_BYTE + 91, FIRST_BYTE + first], [], 0, 0.0, 0.0, "eos"),
        ]
        for event, so_far in zip(events, texts, strict=True):
            view.show(add_text(event, detokenizer))
            assert out.getvalue() == so_far
    assert out.getvalue() == "theé!\ufffd\n"


def test_plain_output_is_flushed(tokenizer: Tokenizer) -> None:
    written = io.BytesIO()
    with PlainView(io.TextIOWrapper(written, encoding="utf-8", newline="")) as view:
        view.show(Prompt([], 0.0, "the"))
        assert written.getvalue() == b"the"
        view.show(Step([5], [], 0, 0.0, 0.0, pieces=["!"]))
        assert written.getvalue() == b"the!"


def test_plain_output_ends_with_line_break_after_interrupt() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), PlainView(out) as view:
        view.show(Prompt([], 0.0, "the"))
        raise KeyboardInterrupt
    assert out.getvalue() == "the\n"


def test_silent_view_has_prompt_in_text_but_not_in_tokens() -> None:
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
def test_summary_has_all_statistics_and_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    print_summary(console, some_statistics(), seed=17, weights="target fp32")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert len({len(line.rstrip()) for line in text.splitlines()}) == 1 or width < 80, "right-aligned"
    figures = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in text.splitlines())
    assert figures == {
        "prompt tokens": "5", "generated": "4", "drafted": "6", "accepted": "2", "acceptance rate": "33.3%",
        "by position": "50% 50% 0% 0%", "mean length": "2.00 tokens a pass",
        "prefill": "0.250 s", "decode": "0.750 s", "speed": "5.3 tok/s",
        "stopped by": "max_tokens", "seed": "17", "weights": "target fp32",
    }  # fmt: skip


def test_experts_per_token_are_reported_alone_and_in_passes(tokenizer: Tokenizer) -> None:
    """Two passes, over three tokens and one, read 18 and 8 experts for four tokens."""
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


def test_json_has_statistics_and_extra_fields() -> None:
    result = json.loads(to_json(some_statistics(), "the\n\x1b[31m\ufffd", [5, 6], seed=3, extra="x"))
    assert result["text"] == "the\n\x1b[31m\ufffd"
    assert result["tokens"] == [5, 6]
    assert result["accepted_histogram"] == [1, 0, 1]
    assert result["tokens_per_second"] == pytest.approx(4 / 0.75)
    assert (result["seed"], result["extra"]) == (3, "x")


def test_no_division_by_zero_without_output(tokenizer: Tokenizer) -> None:
    statistics = Statistics(n_prompt=1)
    assert json.loads(to_json(statistics, "", []))["tokens_per_second"] == 0
    print_summary(Console(file=io.StringIO()), statistics)
    with Stage(tokenizer) as stage:
        stage.show(Prompt([BOS], 0.0))
        stage.assert_fits()


def test_paced_step_is_shown_proposed_then_verified(tokenizer: Tokenizer) -> None:
    """Steps come as fast as they can; the panel holds them."""
    with Stage(tokenizer, pace=4) as stage:
        stage.begin()
        for _ in range(5):
            begin, start = stage.clock.now, len(stage.output)
            stage.show(Proposal([stage.token(" the"), stage.token(" o")]))
            assert stage.clock.now - begin == pytest.approx(1 / 8)
            proposed, start = stage.output[start:], len(stage.output)
            stage.show(Step([stage.token(" the"), stage.token(" a")], [stage.token(" the"), stage.token(" o")], 1, 0.01, 0.004))
            verified = stage.output[start:]
            assert stage.clock.now - begin == pytest.approx(1 / 4)
            assert proposed
            assert verified
            assert proposed != verified


@pytest.mark.parametrize("guessed", ["by little", ""])
def test_paced_step_without_draft_is_shown_as_long(tokenizer: Tokenizer, guessed: str) -> None:
    with Stage(tokenizer, pace=4, guessed=guessed) as stage:
        stage.begin()
        begin = stage.clock.now
        for _ in range(3):
            stage.show(Proposal([]))
            stage.show(Step(stage.encode("x"), [], 0, 0.01, 0.0))
        assert stage.clock.now - begin == pytest.approx(3 / 4)


def test_tiny_pace_waits_within_clock_resolution(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, pace=1e-300) as stage:
        stage.begin()
        begin = stage.clock.now
        stage.show(Proposal([stage.token(" the")]))
        assert 0 < stage.clock.now - begin <= 86_400


def test_legend_takes_longest_form_that_fits() -> None:
    forms: list[Row] = [[("a long word", "accepted"), ("another", "target")], [("short", "accepted"), ("it", "target")]]
    assert [len(rows) for rows in (fit_items(forms, 30, 2), fit_items(forms, 11, 2))] == [1, 2]
    for rows in (fit_items(forms, 10, 2), fit_items(forms, 11, 1)):
        assert rows == [[*forms[1][:1], ("   ", "plain"), forms[1][1]]]
    assert fit_items(forms, 4, 1) == [[("short", "accepted")]]  # no form fits
