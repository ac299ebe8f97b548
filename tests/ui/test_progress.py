"""progress.py: the line that says what is being done; and what compiling tells it."""

import fcntl
import io
import os
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from specdec.engine.decoding import Event, Prefill, Prompt, Statistics, Step
from specdec.loaders import download
from specdec.runtime import code_cache
from specdec.ui import progress
from specdec.ui.output import PlainView, show
from specdec.ui.progress import Bar, loading, read_in_a_line
from specdec.ui.signals import signals
from specdec.ui.text_layout import cells
from tests.fakes.terminal import wait_until


class Terminal:
    """A pseudo-terminal on stderr. shown: what was written to it, once it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
        self._parent, child = os.openpty()
        self._stream = os.fdopen(child, "w", encoding=encoding)
        monkeypatch.setattr(sys, "stderr", self._stream)
        self.shown = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._parent, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    def close(self) -> None:
        encoding, data = self._stream.encoding, b""
        self._stream.flush()
        while select.select([self._parent], [], [], 0.2)[0]:
            data += os.read(self._parent, 4096)
        self._stream.close()
        os.close(self._parent)
        self.shown = data.decode(encoding)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Terminal]:
    if sys.platform == "win32":
        pytest.skip("has no pseudo-terminals")
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    return lambda encoding="utf-8": Terminal(monkeypatch, encoding)


def test_where_there_is_no_terminal_what_takes_long_says_so_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(progress, "WORD_SECONDS", 0.2)
    with loading("reading") as show:
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < 0.7:
            show("nothing that has a share")
            show(Bar("reading", passed))
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert 1 <= len(lines) <= 3 and all(re.fullmatch(r"specdec: reading: +\d+%", line) for line in lines)


def test_a_download_is_shown_with_its_size_and_the_time_that_is_left(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOW_SECONDS", -1.0)
    place = terminal()
    with loading("looking for org/name"):
        for n in (50, 75, 99):  # it goes on with 50 MB
            download.on_progress[-1]("org/name", n * 10**6, 100 * 10**6)
        for _ in range(2):
            download.on_progress[-1]("tokenizer.bin", 3 * 10**6, 0)  # nobody knows how much it is
    place.close()
    assert not download.on_progress
    assert re.search(r"looking for org/name.*downloading org/name ━+ +75% of 100 MB, 0 s left", place.shown)
    assert re.search(r" 99% of 100 MB, 0 s left.*downloading tokenizer.bin +0%, 3 MB", place.shown)


def test_nothing_is_shown_behind_a_sudden_end(terminal: Callable[..., Terminal]) -> None:
    """The thread that hears a signal erases the line, while the main thread goes on loading until the process is gone."""
    place = terminal()
    with loading("waiting") as show:
        show("half of it")
        signals._tidy()
        show("more than half")
        time.sleep(0.05)
    place.close()
    assert "half of it" in place.shown
    assert place.shown.split("half of it")[-1].strip() == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_line_moves_as_long_as_it_stands_and_leaves_nothing(terminal: Callable[..., Terminal], encoding: str) -> None:
    place = terminal(encoding)
    with loading("waiting"):
        wait_until(lambda: bool(select.select([place._parent], [], [], 0)[0]))
        time.sleep(0.3)
    place.close()
    looks = set(re.findall(r"(\S) waiting", place.shown))
    assert len(looks) > 2
    assert looks <= set(progress.LOOKS if encoding == "utf-8" else progress.ASCII_LOOKS)
    assert place.shown.endswith("\r" + " " * len("x waiting^C") + "\r")


def test_what_is_over_at_once_has_no_line(terminal: Callable[..., Terminal]) -> None:
    place = terminal()
    with loading("reading", after=60.0) as show:
        show("reading on")
        time.sleep(0.05)
    place.close()
    assert place.shown.strip() == ""


def test_a_name_brings_no_control_sequence_and_no_second_row_into_the_line(terminal: Callable[..., Terminal]) -> None:
    place = terminal()
    place.resize(30)
    with loading("loading \x1b[2J\x1b]0;title\x07a\nname \u65e5\u65e5\u65e5\u65e5\u65e5\u65e5\u65e5\u65e5\u65e5"):
        pass
    place.close()
    assert "\x1b" not in place.shown and "\n" not in place.shown and "\x07" not in place.shown
    assert max(map(cells, place.shown.split("\r"))) <= 29


@pytest.mark.parametrize("width", [10, 20, 38, 78, 200])
@pytest.mark.parametrize("doing", ["reading", "loading a-model-with-a-long-name-Q4_K_M.gguf", "\u65e5" * 30])
def test_a_bar_fits_and_its_figures_stay(width: int, doing: str) -> None:
    for share in (0.0, 0.004, 0.5, 1.0):
        text = Bar(doing, share, ", 77 s left").text(width, is_utf=True)
        assert cells(text) <= width
        assert width < 30 or f"{share:.0%}, 77 s left" in text
        assert width < 38 or share < 0.5 or "\u2501" in text


# Compiling


def test_compiling_is_told_with_how_many_and_what_was_told_before_comes_back(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function is compiled in the middle of another one that calls it."""
    place = terminal()
    monkeypatch.setattr(code_cache, "_kept", lambda: ({"kernels.rope", "quant.fp32.product"}, False))
    monkeypatch.setattr(code_cache, "folder", lambda: "somewhere")
    monkeypatch.setattr(code_cache, "_n_begun", 0)
    asked = [compiled_function(name) for name in ("quant.int8.product", "quant.int8.quantize", "kernels.mix")]
    codegen = SimpleNamespace(codegen=lambda: None)
    monkeypatch.setattr(code_cache.MachineCode, "_load", lambda *_: None)
    monkeypatch.setattr(code_cache.MachineCode, "_path", lambda *_: "path")
    monkeypatch.setattr(code_cache.claims, "take", lambda _: False)
    with loading("timing"):
        asked[0].load_overload(None, codegen)
        asked[1].load_overload(None, codegen)
        asked[1].save_overload(None, Uncompiled)
        asked[0].save_overload(None, Uncompiled)
        asked[2].load_overload(None, codegen)
        asked[2].save_overload(None, Uncompiled)
    place.close()
    told = [row[2:].strip() for row in place.shown.split("\r") if row.strip()]
    told = [row for row, before in zip(told, ["", *told], strict=False) if row != before]
    new = "a new kind of weights: quant.int8"
    assert told == [
        "timing", f"compiling 1, {new}.product", f"compiling 2, {new}.quantize", f"compiling 2, {new}.product",
        "timing", "compiling 3, for the first time: kernels.mix", "timing",
    ]  # fmt: skip


class Uncompiled:
    """What has nothing that could be kept."""

    codegen = None

    class library:
        has_dynamic_globals = True


def compiled_function(name: str) -> code_cache.MachineCode:
    code = code_cache.MachineCode.__new__(code_cache.MachineCode)
    code._name = name
    return code


@pytest.mark.parametrize(
    ("kept", "is_changed", "folder", "reason"),
    [
        (set(), False, "there", "a first run"),
        (set(), True, "there", "the first run of this version"),
        ({"quant.int8x.product"}, False, "there", "a new kind of weights"),
        ({"quant.int8.embed"}, False, "there", "for the first time"),
        ({"quant.int8.embed"}, False, "", "as in every run: there is no folder for machine code"),
    ],
)
def test_why_something_is_compiled_is_told(
    monkeypatch: pytest.MonkeyPatch, kept: set[str], is_changed: bool, folder: str, reason: str
) -> None:
    monkeypatch.setattr(code_cache, "_kept", lambda: (kept, is_changed))
    monkeypatch.setattr(code_cache, "folder", lambda: folder)
    assert code_cache.why("quant.int8.product") == reason


# A prompt, and a text that nobody sees


@pytest.mark.parametrize("n_unseen", [0, 8])
def test_the_line_of_a_reading_is_gone_before_the_text_comes_and_stays_where_nobody_sees_that(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch, n_unseen: int
) -> None:
    place, steps = terminal(), [Step([5, 6], [], 0, 0.1, 0.0) for _ in range(3)]
    events: list[Event | Prefill] = [Prefill([1], 0.0), Prefill([1], 0.5), Prompt([1], 0.1), *steps]
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SHOW_SECONDS", -1.0)
    given = []
    for event in read_in_a_line(iter(events), n_unseen):
        given.append(event)
        if isinstance(event, Prompt | Step):
            print("TEXT", end="", flush=True, file=sys.stderr)
    place.close()
    assert given == events
    before, *behind = place.shown.split("TEXT")
    assert "reading" in before and "50%" in before
    if n_unseen:
        assert ["75%" in part for part in behind] == [False, False, True, False]
        assert "writing" in behind[1]
    else:
        assert before.split("\r")[-2].strip() == ""
        assert not "".join(behind).strip()


def test_a_text_that_is_ended_while_it_is_read_anew_is_what_it_was(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    def events() -> Iterator[Event | Prefill]:
        yield Prompt([1, 2], 0.0, "Once upon")
        yield Step([5], [], 0, 0.1, 0.0, pieces=[" a"])
        yield Prefill([1, 2, 5], 0.0)
        monkeypatch.setattr(signals, "asked", 2)
        yield Prefill([1, 2, 5], 0.5)
        raise AssertionError("nobody asks for more")

    place, out, statistics = terminal(), io.StringIO(), Statistics(n_prompt=2)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(signals, "text_begins", lambda: None)
    show(PlainView(out), read_in_a_line(events()), statistics, Prompt([1, 2], 0.0, "Once upon"))
    assert out.getvalue() == "Once upon a\n"
    assert (statistics.stop_reason, statistics.n_generated) == ("interrupted", 1)
    place.close()
    assert "reading" in place.shown and place.shown.split("\r")[-2].strip() == ""


def test_a_text_that_is_ended_while_its_prompt_is_read_is_its_prompt(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    def events() -> Iterator[Event | Prefill]:
        yield Prefill([1, 2], 0.0)
        monkeypatch.setattr(signals, "asked", 2)
        yield Prefill([1, 2], 0.5)
        raise AssertionError("nobody asks for more")

    place, out, statistics = terminal(), io.StringIO(), Statistics(n_prompt=2)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(signals, "text_begins", lambda: None)
    show(PlainView(out), read_in_a_line(events()), statistics, Prompt([1, 2], 0.0, "Once upon"))
    assert out.getvalue() == "Once upon\n"
    assert (statistics.stop_reason, statistics.n_generated) == ("interrupted", 0)
    place.close()
    assert place.shown.split("\r")[-2].strip() == ""
