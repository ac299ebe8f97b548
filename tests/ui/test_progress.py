"""Status lines, and the messages of compilation in them."""

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
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from specdec import kernels
from specdec.events import Event, PrefillProgress, Prompt, Statistics, Step
from specdec.loaders import resumable_download
from specdec.runtime import code_cache
from specdec.ui import progress
from specdec.ui.keyboard import Keyboard
from specdec.ui.plain_views import PlainView, run_view
from specdec.ui.progress import ProgressBar, show_prefill_progress, show_status
from specdec.ui.signals import signals
from specdec.ui.text_layout import cell_width
from tests.tools.waiting import wait_until


class Terminal:
    """A pseudo-terminal on stderr. shown: what was written to it, once it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
        self.parent, child = os.openpty()
        self._stream = os.fdopen(child, "w", encoding=encoding)
        monkeypatch.setattr(sys, "stderr", self._stream)
        self.shown = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    def close(self) -> None:
        encoding, data = self._stream.encoding, b""
        self._stream.flush()
        while select.select([self.parent], [], [], 0.2)[0]:
            data += os.read(self.parent, 4096)
        self._stream.close()
        os.close(self.parent)
        self.shown = data.decode(encoding)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Terminal]:
    if sys.platform == "win32":
        pytest.skip("has no pseudo-terminals")
    monkeypatch.setattr(progress, "TICK_INTERVAL_S", 0.01)
    return lambda encoding="utf-8": Terminal(monkeypatch, encoding)


def test_long_task_logs_progress_without_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.2)
    with show_status("reading") as show:
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < 0.7:
            show("nothing that has a share")
            show(ProgressBar("reading", passed))
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert 1 <= len(lines) <= 3 and all(re.fullmatch(r"specdec: reading: +\d+%", line) for line in lines)


def test_nothing_is_echoed_while_a_status_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()

    @contextmanager
    def mute(_: Keyboard) -> Iterator[None]:
        events.append("muted")
        yield
        events.append("echoes")

    monkeypatch.setattr(Keyboard, "mute_echo", mute)
    with show_status("loading"):
        assert events == ["muted"]
    assert events == ["muted", "echoes"]


def test_download_shows_size_and_time_left(terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "UPDATE_INTERVAL_S", -1.0)
    place = terminal()
    with show_status("looking for org/name"):
        for n in (50, 75, 99):  # resumes at 50 MB
            resumable_download.progress_callbacks[-1]("org/name", n * 10**6, 100 * 10**6)
        for _ in range(2):
            resumable_download.progress_callbacks[-1]("tokenizer.bin", 3 * 10**6, 0)  # unknown size
    place.close()
    assert not resumable_download.progress_callbacks
    assert re.search(r"looking for org/name.*downloading org/name ━+ +75% of 100 MB, 0 s left", place.shown)
    assert re.search(r" 99% of 100 MB, 0 s left.*downloading tokenizer.bin +0%, 3 MB", place.shown)


def test_nothing_is_drawn_after_stop(terminal: Callable[..., Terminal]) -> None:
    """The signal thread erases the line while the main thread goes on loading until the process ends."""
    place = terminal()
    with show_status("waiting") as show:
        show("half of it")
        signals.run_cleanups()
        show("more than half")
        time.sleep(0.05)
    place.close()
    assert "half of it" in place.shown
    assert place.shown.split("half of it")[-1].strip() == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_line_is_animated_and_erased_at_the_end(terminal: Callable[..., Terminal], encoding: str) -> None:
    place = terminal(encoding)
    with show_status("waiting"):
        wait_until(lambda: bool(select.select([place.parent], [], [], 0)[0]))
        time.sleep(0.3)
    place.close()
    looks = set(re.findall(r"(\S) waiting", place.shown))
    assert len(looks) > 2
    assert looks <= set(progress.SPINNER if encoding == "utf-8" else progress.ASCII_SPINNER)
    assert place.shown.endswith("\r" + " " * len("x waiting^C") + "\r")


def test_short_task_has_no_line(terminal: Callable[..., Terminal]) -> None:
    place = terminal()
    with show_status("reading", after=60.0) as show:
        show("reading on")
        time.sleep(0.05)
    place.close()
    assert place.shown.strip() == ""


def test_line_is_one_row_without_control_sequences(terminal: Callable[..., Terminal]) -> None:
    place = terminal()
    place.resize(30)
    with show_status("loading \x1b[2J\x1b]0;title\x07a\nname \u65e5\u65e5\u65e5\u65e5\u65e5\u65e5\u65e5\u65e5\u65e5"):
        pass
    place.close()
    assert "\x1b" not in place.shown and "\n" not in place.shown and "\x07" not in place.shown
    assert max(map(cell_width, place.shown.split("\r"))) <= 29


@pytest.mark.parametrize("width", [10, 20, 38, 78, 200])
@pytest.mark.parametrize("doing", ["reading", "loading a-model-with-a-long-name-Q4_K_M.gguf", "\u65e5" * 30])
def test_bar_fits_and_keeps_percentage(width: int, doing: str) -> None:
    for share in (0.0, 0.004, 0.5, 1.0):
        text = ProgressBar(doing, share, ", 77 s left").render(width, is_utf=True)
        assert cell_width(text) <= width
        assert width < 30 or f"{share:.0%}, 77 s left" in text
        assert width < 38 or share < 0.5 or "\u2501" in text


# Compiling


def test_compilation_is_shown_and_previous_message_returns(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function is compiled during the compilation of its caller."""
    place = terminal()
    monkeypatch.setattr(code_cache, "_scan_cache", lambda: ({"kernels.rope", "quant.fp32.matmul"}, False))
    monkeypatch.setattr(code_cache, "get_cache_dir", lambda: "somewhere")
    monkeypatch.setattr(code_cache, "_n_started", 0)
    monkeypatch.setattr(code_cache, "list_cached_names", set)
    monkeypatch.setattr(code_cache, "_expected_names", set())
    code_cache.expect_functions(["quant.int8.matmul", "kernels.mix", "kernels.rope", "kernels.a", "kernels.b"])
    caches = [compiled_function(name) for name in ("quant.int8.matmul", "quant.int8.quantize_activations", "kernels.mix")]
    codegen = SimpleNamespace(codegen=lambda: None)
    monkeypatch.setattr(code_cache.MachineCodeCache, "_load", lambda *_: None)
    monkeypatch.setattr(code_cache.MachineCodeCache, "_get_file_name", lambda *_: "name")
    monkeypatch.setattr(code_cache.compile_locks, "acquire", lambda _: False)
    with show_status("timing"):
        caches[0].load_overload(None, codegen)
        caches[1].load_overload(None, codegen)
        caches[1].save_overload(None, Uncompiled)
        caches[0].save_overload(None, Uncompiled)
        caches[2].load_overload(None, codegen)
        caches[2].save_overload(None, Uncompiled)
    place.close()
    messages = [row[2:].strip() for row in place.shown.split("\r") if row.strip()]
    messages = [row for row, before in zip(messages, ["", *messages], strict=False) if row != before]
    new = "of about 4 (a new weight format)"
    assert messages == [
        "timing", f"compiling kernels: 1 {new}", f"compiling kernels: 2 {new}", "timing",
        "compiling kernels: 3 of about 4 (for the first time)", "timing",
    ]  # fmt: skip


def test_long_compilation_is_logged_without_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(code_cache, "_scan_cache", lambda: (set(), False))
    monkeypatch.setattr(progress, "COMPILE_LOG_DELAY_S", -1.0)
    with show_status():
        for n in range(1, 5):
            code_cache.compile_reporters[-1]("kernels.attend", n, 9)
            code_cache.compile_reporters[-1]("", n, 9)
    assert out.getvalue() == "specdec: compiling kernels: 2 of about 9 (a first run)\n"


class Uncompiled:
    """An object without anything to cache."""

    codegen = None
    library = SimpleNamespace(has_dynamic_globals=True)


def compiled_function(name: str) -> code_cache.MachineCodeCache:
    return code_cache.MachineCodeCache(kernels.rope.function, name)


@pytest.mark.parametrize(
    ("kept", "is_changed", "folder", "reason"),
    [
        (set(), False, "there", "a first run"),
        (set(), True, "there", "the first run of this version"),
        ({"quant.int8x.matmul"}, False, "there", "a new weight format"),
        ({"quant.int8.embed"}, False, "there", "for the first time"),
        ({"quant.int8.embed"}, False, "", "as in every run: no cache folder is writable"),
    ],
)
def test_reason_of_compilation_is_shown(
    monkeypatch: pytest.MonkeyPatch, kept: set[str], is_changed: bool, folder: str, reason: str
) -> None:
    monkeypatch.setattr(code_cache, "_scan_cache", lambda: (kept, is_changed))
    monkeypatch.setattr(code_cache, "get_cache_dir", lambda: folder)
    assert code_cache.get_compile_reason("quant.int8.matmul") == reason


# Prefill, and hidden output


@pytest.mark.parametrize("n_unseen", [0, 8])
def test_prefill_line_is_removed_before_shown_output_and_stays_for_hidden_output(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch, n_unseen: int
) -> None:
    place, steps = terminal(), [Step([5, 6], [], 0, 0.1, 0.0) for _ in range(3)]
    events: list[Event | PrefillProgress] = [PrefillProgress([1], 0.0), PrefillProgress([1], 0.5), Prompt([1], 0.1), *steps]
    monkeypatch.setattr(progress, "STATUS_DELAY_S", 0.0)
    monkeypatch.setattr(progress, "UPDATE_INTERVAL_S", -1.0)
    given = []
    for event in show_prefill_progress(iter(events), n_unseen):
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


@pytest.mark.parametrize("is_later", [False, True])
def test_interrupt_during_prefill_keeps_the_prompt_and_the_output(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch, is_later: bool
) -> None:
    def events() -> Iterator[Event | PrefillProgress]:
        if is_later:
            yield Prompt([1, 2], 0.0, "Once upon")
            yield Step([5], [], 0, 0.1, 0.0, pieces=[" a"])
        yield PrefillProgress([1, 2, 5], 0.0)
        monkeypatch.setattr(signals, "end_signal", 2)
        yield PrefillProgress([1, 2, 5], 0.5)
        raise AssertionError("nobody asks for more")

    place, out, statistics = terminal(), io.StringIO(), Statistics(n_prompt=2)
    monkeypatch.setattr(progress, "STATUS_DELAY_S", 0.0)
    monkeypatch.setattr(signals, "begin_output", lambda: None)
    run_view(PlainView(out), show_prefill_progress(events()), statistics, Prompt([1, 2], 0.0, "Once upon"))
    assert out.getvalue() == "Once upon" + " a" * is_later + "\n"
    assert (statistics.stop_reason, statistics.n_generated) == ("interrupted", int(is_later))
    place.close()
    assert "reading" in place.shown and place.shown.split("\r")[-2].strip() == ""
