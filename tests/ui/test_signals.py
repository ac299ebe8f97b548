"""However it ends: signals at any moment, Ctrl-Z, settings and machines that do not fit; the terminal is always given back."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

import specdec
from specdec.cli import entry
from specdec.ui import signals
from tests.conftest import Pair
from tests.fakes.terminal import COMMAND, LONGEST, PROMPT, Job, Screen, catches, endless, started, wait_until, with_pair
from tests.tools.checkpoint_files import ROOT

INT, TERM, HUP, STOP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP


def end(job: Job) -> tuple[int, Screen]:
    """The exit code and the last screen, which every ending leaves in order."""
    code, screen = int(job.report()), job.screen()
    assert not screen.cursor_hidden
    assert job.echoes()
    assert "╭" not in screen.text()
    for word in ("Traceback", "Exception"):
        assert word not in screen.text()
    return code, screen


# While the text is written


def test_a_signal_ends_the_panel_as_ctrl_c_does(pair: Pair) -> None:
    with Job(endless(pair, "-n", 0)) as job:
        job.read_until(frames=3)
        os.kill(job.pid, HUP)
        code, screen = end(job)
    assert code == 128 + HUP
    assert screen.hid_cursor
    assert screen.text().startswith(PROMPT)
    assert len(screen.text().split("green:")[0]) > 50
    assert "interrupted" in screen.text()


def test_a_signal_sent_again_as_timeout_does_leaves_the_text_so_far_and_nohup_is_heeded(pair: Pair) -> None:
    with started(endless(pair, "-n", 0), preexec_fn=lambda: signal.signal(HUP, signal.SIG_IGN)) as process:
        start = process.stdout.read(100)
        process.send_signal(HUP)
        start += process.stdout.read(1000)
        for _ in range(20):
            process.send_signal(TERM)
        out, err = start + process.stdout.read(), process.stderr.read()
        assert process.wait(60) in (128 + TERM, -TERM)  # the last one may meet a process that has printed all
    assert out.decode().startswith(PROMPT)
    assert out.endswith(b"\n")
    assert b"Traceback" not in err
    assert b"interrupted" in err


def test_a_signal_with_json_still_gives_one_object(pair: Pair) -> None:
    code = """
from specdec.cli.entry import main
from specdec.engine.decoding import Statistics
def telling(statistics, step, add=Statistics._add_step):
    add(statistics, step)
    print("a step", flush=True)
Statistics._add_step = telling
main()
"""
    with Job(endless(pair, "-n", 0, "--json"), command=[sys.executable, "-c", code]) as job:
        job.read_until(word="a step")
        os.kill(job.pid, INT)
        status, _ = end(job)
    assert status == 130
    result = json.loads(job.raw[job.raw.index(b"{") :])
    assert result["stop_reason"] == "interrupted"
    assert result["text"].startswith(PROMPT)
    assert len(result["tokens"]) == result["n_generated"] > 0


def fill(pipe: IO[bytes]) -> None:
    """To the last byte, so that whoever writes to it waits."""
    end = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(end, b" " * size)
    os.close(end)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems open no pipe by its number")
@pytest.mark.parametrize(("patience", "is_sent_again"), [(0.2, False), (1e6, True)])
def test_a_reader_that_sleeps_keeps_nobody_from_ending_it(pair: Pair, patience: float, is_sent_again: bool) -> None:
    """The pipe is full, so the text cannot be finished: it ends when patience does, or by a second signal."""
    seconds = f"signals.PATIENCE_SECONDS, signals.SAME_WISH_SECONDS = {patience}, 0.0"
    code = f"from specdec.cli.entry import main; from specdec.ui import signals; {seconds}; main()"
    with started(endless(pair, "-n", 0), command=[sys.executable, "-c", code]) as process:
        process.stdout.read(100)
        fill(process.stdout)
        process.send_signal(TERM)
        if is_sent_again:
            wait_until(lambda: process.send_signal(TERM) or process.poll() is not None)
        assert process.wait(LONGEST) == 128 + TERM
        assert process.stderr.read() == b""


# While the prompt is read


@pytest.fixture
def long_prompt(tmp_path: Path) -> Path:
    """What a small model takes many seconds to read."""
    path = tmp_path / "long.txt"
    path.write_text("the then " * 6_000)
    return path


@pytest.mark.parametrize(("key", "more"), [(b"q", []), (b"\x03", []), (b"\x03", ["--plain"]), (b"\x03", ["--json"])])
def test_while_a_long_prompt_is_read_keys_and_ctrl_c_are_heard(
    pair: Pair, long_prompt: Path, key: bytes, more: list[str]
) -> None:
    with Job(["-m", pair.endless, "-d", "none", "-f", long_prompt, "-j", 1, "-n", 0, *more]) as job:
        job.read_until(word="reading")
        job.type(key)
        code, screen = end(job)
    assert code == (0 if key == b"q" else 130)
    assert "interrupted" in screen.text()
    assert "reading" not in screen.text()
    assert "the then the then" in screen.text()
    if not more:
        assert "the then" in screen.pictures[0]
    if more == ["--json"]:
        told = json.loads(job.raw[job.raw.index(b"{") :])
        assert (told["text"], told["tokens"], told["stop_reason"]) == ("the then " * 6_000, [], "interrupted")


# Before the text begins


def test_a_signal_while_kernels_compile_ends_it_at_once_and_quietly(pair: Pair, tmp_path: Path) -> None:
    cases: list[tuple[int, list[object]]] = [(INT, endless(pair)), (TERM, ["bench", "--shape", "64,96,1,4,2,300,64"])]
    with contextlib.ExitStack() as jobs:
        compiling = []
        for signum, arguments in cases:
            job = jobs.enter_context(Job(arguments, NUMBA_CACHE_DIR=str(tmp_path / str(signum))))
            compiling.append((signum, job))
        for signum, job in compiling:
            wait_until(lambda signum=signum: any((tmp_path / str(signum)).rglob("*.code")))  # type: ignore[misc]
            time.sleep(0.2)
            begin = time.monotonic()
            os.kill(job.pid, signum)
            code, screen = end(job)
            assert time.monotonic() - begin < 2
            assert code == 128 + signum
            assert screen.text().strip() == ""


def test_programs_of_tests_hear_signals_where_the_tests_do_not(pair: Pair) -> None:
    """As under nohup, or in a script's background."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (INT, HUP)]
    try:
        with Job(endless(pair)) as job, started(endless(pair, "-n", 0)) as process:
            for number in (INT, HUP):
                wait_until(lambda number=number: catches(job.pid, number))  # type: ignore[misc]
                wait_until(lambda number=number: catches(process.pid, number))  # type: ignore[misc]
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_a_signal_in_the_first_second_ends_it_at_once_and_quietly(pair: Pair) -> None:
    with contextlib.ExitStack() as jobs:
        for seconds, signum in ((0, INT), (0.1, TERM), (0.2, HUP)):
            job = jobs.enter_context(Job(endless(pair)))
            wait_until(lambda job=job: catches(job.pid, TERM))  # type: ignore[misc]
            time.sleep(seconds)
            os.kill(job.pid, signum)
            code, screen = end(job)
            assert code == 128 + signum
            assert screen.text().strip() == ""


def test_a_signal_at_a_random_moment_leaves_the_terminal_in_order(pair: Pair) -> None:
    """A short form of what was tried hundreds of times; the seconds are those of a run, from the imports to the end."""
    with Job(endless(pair, "-n", 4000), command=[sys.executable, str(ROOT / "specdec.py")]) as job:
        wait_until(lambda: catches(job.pid, TERM))
        time.sleep(random.uniform(0, 1.5))
        os.kill(job.pid, TERM)
        code, _ = end(job)
        assert code in (0, 128 + TERM, -TERM)  # the last: while the interpreter itself takes leave, all being said


def test_a_library_installs_nothing() -> None:
    code = """
import signal, threading
before = [signal.getsignal(n) for n in signal.valid_signals()]
import specdec
from specdec import SpeculativeDecoder, Tokenizer
assert [signal.getsignal(n) for n in signal.valid_signals()] == before
assert signal.set_wakeup_fd(-1) == -1
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_in_another_thread_the_command_leaves_signals_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec", "--help"])
    before = [signal.getsignal(n) for n in signals.ENDS]
    codes: list[object] = []

    def run() -> None:
        with pytest.raises(SystemExit) as done:
            entry.main()
        codes.append(done.value.code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert codes == [0]
    assert "Usage" in capsys.readouterr().out
    assert [signal.getsignal(n) for n in signals.ENDS] == before


# Ctrl-Z


def stopped(job: Job) -> Screen:
    """The screen that the shell finds; the panel has gone from it."""
    assert job.report() == "stopped"
    screen = job.screen()
    assert not screen.cursor_hidden
    assert job.echoes()
    assert screen.text().strip() == ""
    return screen


def test_ctrl_z_takes_the_panel_away_at_any_pace_and_fg_draws_it_anew(pair: Pair) -> None:
    with Job(endless(pair, "-n", 0, "--pace", 0.01)) as job:
        job.read_until(frames=1)
        for _ in range(2):
            job.type(b"\x1a")
            stopped(job)
            job.go_on()
            job.read_until(frames=1)
            assert not job.echoes()
            screen = job.screen()
            assert screen.cursor_hidden
            assert screen.window().count("╭") == screen.window().count("╰") == 1
        job.type(b"\x03")
        code, screen = end(job)
    assert code == 130
    assert screen.text().startswith(PROMPT)


def test_in_the_background_nothing_is_drawn_and_a_signal_ends_it(pair: Pair) -> None:
    with Job(endless(pair, "-n", 0)) as job:
        job.read_until(frames=1)
        job.type(b"\x1a")
        stopped(job)
        length = len(job.raw)
        job.go_on(in_foreground=False)
        time.sleep(0.5)
        os.kill(job.pid, TERM)
        code, screen = end(job)
    assert code == 128 + TERM
    assert b"\x1b[?25l" not in job.raw[length:]
    assert "╭" not in job.raw[length:].decode()
    assert screen.text().startswith(PROMPT)


def test_ctrl_z_while_loading_stops_it_with_the_cursor_in_sight(pair: Pair) -> None:
    with Job(with_pair(pair, "-n", 50)) as job:
        job.read_until(word="loading")
        job.type(b"\x1a")
        assert job.report() == "stopped"
        assert not job.screen().cursor_hidden
        job.go_on()
        code, _ = end(job)
    assert code == 0


# Keys, and a terminal that changes


def test_keys_pause_and_step_and_end_and_nothing_of_them_is_seen_or_left(pair: Pair) -> None:
    with Job(endless(pair, "-n", 0, "--pace", 4)) as job:
        job.read_until(frames=2)
        assert not job.echoes()
        job.type(b" ")
        job.read_until(word="paused")
        job.type(b"?")
        job.read_until(word="space: pause")
        length = len(job.raw)
        time.sleep(0.3)
        job.type(b"\x1b[Cxyz\x1b[A")
        job.read_until(frames=2)  # guessed, and checked
        assert b"paused" in job.raw[length:]
        job.type(b"q")
        code, screen = end(job)
    assert code == 0
    assert screen.text().startswith(PROMPT)
    assert "interrupted" in screen.text()
    assert not any(word in screen.text() for word in ("xyz", "[C", "[A"))


def test_what_comes_through_a_pipe_is_no_key(pair: Pair) -> None:
    command = ["/bin/sh", "-c", 'yes q | "$0" "$@"', *COMMAND]
    with Job(with_pair(pair, "-n", 60, "--pace", 100), command=command) as job:
        code, screen = end(job)
    assert code == 0
    assert screen.hid_cursor
    assert "interrupted" not in screen.text()


def test_a_terminal_that_is_resized_shows_one_panel_and_at_the_end_none(pair: Pair) -> None:
    with Job(endless(pair, "-n", 0, "--pace", 20)) as job:
        screen, n_fed = Screen(job.width, job.height), 0
        for width, height in ((120, 40), (40, 12), (80, 24), (80, 6), (80, 24)):
            job.read_until(word="\x1b[?2026l")
            time.sleep(0.2)
            job.read_until(word="\x1b[?2026l")
            whole = job.raw.rindex(b"\x1b[?2026l") + len(b"\x1b[?2026l")
            screen.feed(job.raw[n_fed:whole].decode())
            n_fed = whole
            assert screen.window().count("╭") == screen.window().count("╰") == (screen.height > 6)
            job.resize(width, height)
            screen.resize(width, height)
        os.kill(job.pid, TERM)
        assert int(job.report()) == 128 + TERM
        screen.feed(job.raw[n_fed:].decode())
    assert screen.text().startswith(PROMPT)
    assert "╭" not in screen.text()
    assert not screen.cursor_hidden


# Settings and machines that do not fit


def refused(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False, timeout=LONGEST)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("specdec: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("NUMBA_DISABLE_JIT", "1", "must be 0"),
        ("NUMBA_NUM_THREADS", "0", "from 1 to 9999"),
        ("NUMBA_NUM_THREADS", "abc", "from 1 to 9999"),
        ("NUMBA_NUM_THREADS", "10000", "from 1 to 9999"),
        ("NUMBA_OPT", "fast", "set another, or none"),
        ("NUMBA_THREADING_LAYER", "nonsense", "workqueue"),
    ],
)
def test_a_setting_of_numba_that_cannot_be_is_told_with_what_can(name: str, value: str, right: str) -> None:
    error = refused(COMMAND, **{name: value})
    assert name in error
    assert repr(value) in error
    assert right in error


def test_a_machine_without_shared_memory_gets_its_text_and_no_warning() -> None:
    code = f"""
import sys
from multiprocessing.context import BaseContext
def refuse(context):
    raise OSError(30, "Read-only file system")
BaseContext.RLock = refuse
sys.path.insert(0, {str(ROOT)!r})
from specdec.cli.entry import main
main()
"""
    command = [sys.executable, "-W", "error", "-c", code, "-t", "0", "-n", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    assert (done.returncode, done.stdout) == (0, "Once upon a time,\n"), done.stderr
    assert "lock" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit no address space")
def test_too_little_memory_to_load_numba_is_told_with_the_limit() -> None:
    error = refused(["sh", "-c", 'ulimit -v 200000; exec "$0" "$@"', *COMMAND])
    assert "limited to 204 MB" in error


@pytest.mark.parametrize("package", ["numba", "typer"])
def test_a_missing_package_is_told_with_how_to_get_it(package: str) -> None:
    code = f"""
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name == "{package}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Nowhere())
sys.path.insert(0, {str(ROOT)!r})
from specdec.cli.entry import main
main()
"""
    error = refused([sys.executable, "-c", code])
    assert f"{package} is missing; install with: " in error and f"-m pip install '{ROOT}[hub]'" in error


def test_a_python_without_any_package_names_all_of_them_and_one_command() -> None:
    """-S leaves out the folders in which packages are installed."""
    error = refused([sys.executable, "-E", "-S", str(ROOT / "specdec.py"), "Once upon a time"])
    assert "numba, numpy, rich, typer are missing; install with: " in error and f"-m pip install '{ROOT}[hub]'" in error


def test_the_version_needs_no_package() -> None:
    for words in (["--version"], ["version"]):
        command = [sys.executable, "-E", "-S", str(ROOT / "specdec.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONGEST)
        assert (done.stdout, done.stderr) == (f"specdec {specdec.__version__}, arithmetic {specdec.__arithmetic__}\n", "")


@pytest.fixture(autouse=True)
def _signals_are_pytest_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process no test may leave a handler behind."""
    before = {n: signal.getsignal(n) for n in (*signals.ENDS, STOP)}
    yield
    assert {n: signal.getsignal(n) for n in before} == before
