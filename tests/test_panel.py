"""panel.py: what is drawn at several sizes, in colour and without, and what plain text and JSON hold."""

import io
import json
import random
import re
from itertools import pairwise

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from specdec.decoding import Prompt, Proposal, Statistics, Step
from specdec.output import PlainView, SilentView, print_summary, printable, to_json
from specdec.panel import LivePanel
from specdec.tokenizer import BOS, FIRST_BYTE, Tokenizer

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


class Stage:
    """A panel on a console of a given size, whose output is kept."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        width: int = 80,
        height: int = 24,
        gamma: int = 4,
        no_color: bool = False,
        ascii: bool = False,
        pace: float = 0,
    ) -> None:
        self.tokenizer, self.clock, self.statistics = tokenizer, Clock(), Statistics(n_prompt=5)
        self.bytes = io.BytesIO()
        encoding, errors = ("ascii", "backslashreplace") if ascii else ("utf-8", "strict")
        self.file = io.TextIOWrapper(self.bytes, encoding=encoding, errors=errors, newline="", write_through=True)
        self.console, self.twin = (
            Console(
                file=self.file, width=width, height=height, force_terminal=True, color_system="standard",
                no_color=no_color, legacy_windows=False,
            )
            for _ in range(2)
        )  # fmt: skip
        self.panel = LivePanel(
            tokenizer, self.console, self.statistics, MAX_TOKENS, gamma, "big + little", pace, self.clock, self.clock.sleep
        )

    def __enter__(self) -> "Stage":
        self.panel.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.panel.__exit__(None, None, None)

    def token(self, piece: str) -> int:
        return self.tokenizer.pieces.index(piece.encode())

    def spell(self, text: str) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode()]

    def begin(self, text: str = "Once upon") -> None:
        self.panel.show(Prompt(self.tokenizer.encode(text), 0.0))

    def step(self, tokens: list[int], draft: list[int] | None = None, n_accepted: int = 0) -> str:
        """One step of the loop; what it wrote to the terminal."""
        start = len(self.output)
        self.clock.now += 1
        self.panel.show(Proposal(draft or []))
        self.clock.now += 1
        step = Step(tokens, draft or [], n_accepted, 0.01, 0.004)
        self.statistics.add(step)
        self.panel.show(step)
        return self.output[start:]

    @property
    def output(self) -> str:
        return self.bytes.getvalue().decode()

    def lines(self) -> list[str]:
        """The panel as it would be drawn now, a string a row."""
        rows = self.console.render_lines(self.panel, self.console.options, pad=False)
        return ["".join([segment.text for segment in row if not segment.control]) for row in rows]

    def screen(self) -> str:
        return "\n".join(self.lines())

    def drawn(self) -> str:
        """The same with its escape codes."""
        with self.twin.capture() as capture:
            self.twin.print(self.panel)
        return capture.get()

    def style_of(self, word: str, drawn: str | None = None) -> Style:
        return style_of(word, drawn or self.drawn(), self.console)

    def assert_fits(self) -> None:
        lines = self.lines()
        assert len(lines) <= self.console.height
        assert max(cell_len(line) for line in lines) <= self.console.width
        assert not any(character in line for line in lines for character in "\t\r\x1b\x07")


def style_of(word: str, drawn: str, console: Console) -> Style:
    """The one style in which a word stands in a frame that holds it once."""
    text = Text.from_ansi(ESCAPE.sub(lambda m: m[0] if m[2] == "m" else "", drawn))
    assert text.plain.count(word) == 1, text.plain
    start = text.plain.index(word)
    styles = {str(text.get_style_at_offset(console, at)) for at in range(start, start + len(word))}
    assert len(styles) == 1, styles
    return Style.parse(styles.pop())


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


@pytest.mark.parametrize("gamma", [0, 1, 4, 7, 8, 63])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_panel_fits_whatever_gamma(tokenizer: Tokenizer, size: tuple[int, int], gamma: int) -> None:
    with Stage(tokenizer, *size, gamma=gamma) as stage:
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
def test_proposals_are_in_sight_before_they_are_judged(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin("the " * 300)
        stage.clock.now += 1
        start = len(stage.output)
        stage.panel.show(Proposal(stage.spell("QUERY")))
        frame = stage.output[start:]
        proposed = stage.style_of("QUERY", frame)
        stage.panel.show(Proposal([]))
        assert proposed.color is not None
        assert not proposed.strike
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
    with Stage(tokenizer, 80, 24, gamma=2) as stage:
        for n_accepted in (0, 2, 2, 2):
            stage.step(stage.spell("x" * (n_accepted + 1)), stage.spell("xx"), n_accepted)
        lines = [line.rstrip(" │") for line in stage.lines()]
    shares = {label: line for label in "012" for line in lines if re.search(rf" {label} +█* +\d+%$", line)}
    assert {label: line.split()[-1] for label, line in shares.items()} == {"0": "25%", "1": "0%", "2": "75%"}
    bars = [shares[label].count("█") for label in "012"]
    assert bars[1] == 0 < bars[0] < bars[2]


def test_model_text_in_brackets_stays_text(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("[bold]p[/bold]")
        tokens = [stage.token("[brackets]"), stage.token("[bold]"), stage.token("[/red]")]
        stage.step([*tokens, *stage.spell("[/]")], tokens[:1] + stage.spell("[zz]"), 1)
        screen = stage.screen()
        assert "[bold]p[/bold][brackets][zz][bold][/red][/]" in screen
        assert not stage.style_of("[/red]").bold
    assert "[bold]p[/bold][brackets][bold][/red][/]" in ESCAPE.sub("", stage.output)


def test_control_characters_of_a_model_never_reach_the_terminal(tokenizer: Tokenizer) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x1b[?1049h\r\x08\x9b31m\x00\x7f"
    with Stage(tokenizer) as stage:
        stage.begin(evil)
        stage.step(stage.spell(evil), stage.spell(evil), 5)
        stage.step(stage.spell("x"), stage.spell(evil), 0)
        stage.clock.now += 5
    rest = ESCAPE.sub("", stage.output)
    assert not [c for c in rest if c != "\n" and c != "\r" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    assert {(m[1], m[2]) for m in ESCAPE.finditer(stage.output) if m[2] != "m"} <= {
        ("?25", "l"), ("?25", "h"), ("1", "A"), ("2", "K"),
    }  # fmt: skip
    assert printable("a\x1bb\x00c\x9bd\re\n\tf") == "abcde\n\tf"


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


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rejected_tokens_are_struck_through_and_then_vanish(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    with Stage(tokenizer, *size) as stage:
        stage.begin()
        stage.step(stage.spell("YESown"), stage.spell("YESNO"), 3)
        assert stage.style_of("NO").strike
        assert not stage.style_of("YES").strike
        assert not stage.style_of("own").strike
        assert "YESNOown" in stage.screen()
        stage.clock.now += 0.5
        assert "NO" in stage.screen()
        stage.clock.now += 4.5
        assert "NO" not in stage.screen()
        assert "YESown" in stage.screen()
    assert "NO" not in ESCAPE.sub("", stage.output).split("╯")[-1]


def test_accepted_and_rejected_and_own_tokens_differ_in_colour(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.spell("YESown"), stage.spell("YESNO"), 3)
        accepted, rejected, own = (stage.style_of(word) for word in ("YES", "NO", "own"))
    assert accepted.color is not None
    assert rejected.color is not None
    assert accepted.color != rejected.color
    assert own.color is None
    assert not (own.bold or own.italic or own.underline)


def test_accepted_and_rejected_and_own_tokens_differ_without_colour(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, no_color=True) as stage:
        stage.begin("the")
        stage.clock.now += 1
        start = len(stage.output)
        stage.panel.show(Proposal(stage.spell("QUERY")))
        proposed = stage.style_of("QUERY", stage.output[start:])
        stage.step(stage.spell("YESown"), stage.spell("YESNO"), 3)
        accepted, rejected, own = (stage.style_of(word) for word in ("YES", "NO", "own"))
        codes = {int(code or 0) for m in ESCAPE.finditer(stage.output) if m[2] == "m" for code in m[1].split(";")}
    assert rejected.strike
    assert len({str(style) for style in (proposed, accepted, rejected, own)}) == 4
    assert str(own) in ("", "none")
    assert not [code for code in codes if 30 <= code <= 49 or 90 <= code <= 107]


def test_the_legend_wears_the_styles_that_it_explains(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, gamma=4) as stage:
        stage.begin("the")
        stage.step(stage.spell("YESown"), stage.spell("YESNO"), 3)
        bottom = stage.drawn().splitlines()[-1]
        assert stage.style_of("rejected", bottom) == stage.style_of("NO")
        assert stage.style_of("accepted", bottom).color == stage.style_of("YES").color
    with Stage(tokenizer, gamma=0) as stage:
        assert "rejected" not in stage.screen()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_on_leaving_the_whole_story_stands_once_in_its_colours(tokenizer: Tokenizer, size: tuple[int, int]) -> None:
    words = [f"word{i}" for i in range(100)]
    with Stage(tokenizer, *size) as stage:
        stage.begin("the")
        for word in words:
            stage.step(stage.spell(f" {word}."), stage.spell(f" {word}") + stage.spell("NO"), len(word) + 1)
    last = stage.output[stage.output.rindex("\x1b[?25h") :]
    plain = ESCAPE.sub("", last)
    story = "the " + " ".join(f"{word}." for word in words)
    assert story in " ".join(plain.split())  # wrapped between words
    assert plain.count("word50.") == 1
    assert style_of("word7", last.split(".", 8)[7], stage.console).color is not None


def test_the_cursor_is_hidden_while_the_panel_lives_and_restored_after_an_interrupt(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    with pytest.raises(KeyboardInterrupt), stage:
        assert stage.output.rindex("\x1b[?25l") >= 0
        stage.begin("the")
        stage.step(stage.spell("SOFAR"))
        raise KeyboardInterrupt
    assert stage.output.rindex("\x1b[?25h") > stage.output.rindex("\x1b[?25l")
    assert ESCAPE.sub("", stage.output).split("╯")[-1].count("SOFAR") == 1


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step(stage.spell("é")[:1])
        assert "\ufffd" not in stage.screen()
    assert "\ufffd" in stage.output


def test_a_character_split_over_two_steps_is_drawn_whole(tokenizer: Tokenizer) -> None:
    first, second = "é".encode()
    with Stage(tokenizer) as stage:
        stage.begin("the")
        stage.step([FIRST_BYTE + first], [FIRST_BYTE + first, FIRST_BYTE + 65], 1)
        stage.step([FIRST_BYTE + second], [FIRST_BYTE + second], 1)
        stage.clock.now += 10
        assert "é" in stage.screen()
        assert "\ufffd" not in stage.screen()


def test_frames_come_when_due_and_not_for_every_step(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer) as stage:
        stage.begin("the")
        length = len(stage.output)
        for _ in range(50):
            stage.panel.show(Proposal([5]))
            stage.panel.show(Step([5], [5], 1, 0.0, 0.0))
        assert len(stage.output) == length
        stage.clock.now += 1
        stage.panel.show(Proposal([5]))
        assert len(stage.output) > length


def test_the_memory_of_the_tail_does_not_grow_with_the_story(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, 40, 10) as stage:
        stage.begin("the")
        for _ in range(400):
            stage.panel.show(Step(stage.spell("abcdefghij"), stage.spell("nonsense"), 0, 0.0, 0.0))
        assert stage.panel._recent_length < 40 * 40


def test_an_ascii_terminal_gets_an_ascii_frame(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, ascii=True) as stage:
        stage.begin("the")
        stage.step(stage.spell("abé"), stage.spell("abx"), 2)
        frame = stage.screen()
        assert not [c for c in frame if ord(c) > 127 and c not in "éγ"]
    assert "\\xe9" in stage.bytes.getvalue().decode("ascii")


def test_plain_text_comes_as_it_is_written_and_characters_come_whole(tokenizer: Tokenizer) -> None:
    out = io.StringIO()
    first, second = "é".encode()
    with PlainView(tokenizer, out) as view:
        view.show(Prompt(tokenizer.encode("the"), 0.0))
        assert out.getvalue() == "the"
        view.show(Proposal([FIRST_BYTE + 65]))
        view.show(Step([FIRST_BYTE + first], [FIRST_BYTE + first, FIRST_BYTE + 65], 1, 0.0, 0.0))
        assert out.getvalue() == "the"
        view.show(Step([FIRST_BYTE + second, FIRST_BYTE + 33], [], 0, 0.0, 0.0))
        assert out.getvalue() == "theé!"
        view.show(Step([FIRST_BYTE + 27, FIRST_BYTE + 91, FIRST_BYTE + first], [], 0, 0.0, 0.0))
    assert out.getvalue() == "theé![\ufffd\n"


def test_plain_text_waits_in_no_buffer(tokenizer: Tokenizer) -> None:
    written = io.BytesIO()
    with PlainView(tokenizer, io.TextIOWrapper(written, encoding="utf-8", newline="")) as view:
        view.show(Prompt(tokenizer.encode("the"), 0.0))
        assert written.getvalue() == b"the"
        view.show(Step([FIRST_BYTE + 33], [], 0, 0.0, 0.0))
        assert written.getvalue() == b"the!"


def test_plain_text_ends_with_a_line_break_after_an_interrupt_too(tokenizer: Tokenizer) -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), PlainView(tokenizer, out) as view:
        view.show(Prompt(tokenizer.encode("the"), 0.0))
        raise KeyboardInterrupt
    assert out.getvalue() == "the\n"


def test_the_silent_view_keeps_the_prompt_in_the_text_and_out_of_the_tokens(tokenizer: Tokenizer) -> None:
    with SilentView(tokenizer) as view:
        view.show(Prompt(tokenizer.encode("the"), 0.0))
        view.show(Step([FIRST_BYTE + 65, FIRST_BYTE + 66], [5], 0, 0.0, 0.0))
        view.show(Step([FIRST_BYTE + 67], [5], 0, 0.0, 0.0))
    assert view.text == "theABC"
    assert view.tokens == [FIRST_BYTE + byte for byte in b"ABC"]


def some_statistics() -> Statistics:
    statistics = Statistics(n_prompt=5)
    statistics.add(Prompt([1], 0.25))
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
        "tokens per pass": "2.00", "prefill": "0.250 s", "decode": "0.750 s", "speed": "5.3 tok/s",
        "stopped by": "max_tokens", "seed": "17", "weights": "target fp32",
    }  # fmt: skip


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
    with Stage(tokenizer, gamma=4) as stage:
        stage.panel.show(Prompt([BOS], 0.0))
        stage.assert_fits()


def test_at_a_pace_every_step_is_seen_proposed_and_then_judged(tokenizer: Tokenizer) -> None:
    """The steps come as fast as they can; the panel makes them last."""
    with Stage(tokenizer, pace=4) as stage:
        stage.begin()
        for _ in range(5):
            begin, start = stage.clock.now, len(stage.output)
            stage.panel.show(Proposal([stage.token(" the"), stage.token(" o")]))
            assert stage.clock.now - begin == pytest.approx(1 / 8)
            proposed, start = stage.output[start:], len(stage.output)
            stage.panel.show(
                Step([stage.token(" the"), stage.token(" a")], [stage.token(" the"), stage.token(" o")], 1, 0.01, 0.004)
            )
            judged = stage.output[start:]
            assert stage.clock.now - begin == pytest.approx(1 / 4)
            assert proposed
            assert judged
            assert proposed != judged


def test_a_pace_near_zero_waits_no_longer_than_a_clock_can_tell(tokenizer: Tokenizer) -> None:
    with Stage(tokenizer, pace=1e-300) as stage:
        stage.begin()
        begin = stage.clock.now
        stage.panel.show(Proposal([stage.token(" the")]))
        assert 0 < stage.clock.now - begin <= 86_400
