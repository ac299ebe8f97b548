"""Endings of the command: signals at any moment, Ctrl-Z, invalid settings and small machines; the terminal is always restored."""

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
from specdec.cli import bootstrap
from specdec.ui import signals
from tests.conftest import Pair
from tests.fakes.terminal import (
    COMMAND,
    PROMPT,
    TIMEOUT_S,
    Screen,
    ShellJob,
    has_signal_handler,
    make_arguments,
    make_endless_arguments,
    run_process,
)
from tests.tools.checkpoint_files import ROOT
from tests.tools.waiting import wait_until

INT, TERM, HUP, STOP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP


def end(job: ShellJob) -> tuple[int, Screen]:
    """Return the exit code and the last screen, which every ending leaves in order."""
    code, screen = int(job.read_report()), job.make_screen()
    assert not screen.cursor_hidden
    assert job.is_echoing()
    assert "╭" not in screen.get_text()
    for word in ("Traceback", "Exception"):
        assert word not in screen.get_text()
    return code, screen


# During generation


def test_signal_ends_panel_like_ctrl_c(pair: Pair) -> None:
    with ShellJob(make_endless_arguments(pair, "-n", 0)) as job:
        job.read_until(frames=3)
        os.kill(job.pid, HUP)
        code, screen = end(job)
    assert code == 128 + HUP
    assert screen.was_cursor_hidden
    assert screen.get_text().startswith(PROMPT)
    assert len(screen.get_text().split("green:")[0]) > 50
    assert "interrupted" in screen.get_text()


def test_repeated_signal_keeps_output_and_nohup_is_respected(pair: Pair) -> None:
    with run_process(make_endless_arguments(pair, "-n", 0), preexec_fn=lambda: signal.signal(HUP, signal.SIG_IGN)) as process:
        start = process.stdout.read(100)
        process.send_signal(HUP)
        start += process.stdout.read(1000)
        for _ in range(20):
            process.send_signal(TERM)
        out, err = start + process.stdout.read(), process.stderr.read()
        assert process.wait(60) in (128 + TERM, -TERM)  # the last one may reach a process that has printed everything
    assert out.decode().startswith(PROMPT)
    assert out.endswith(b"\n")
    assert b"Traceback" not in err
    assert b"interrupted" in err


def test_signal_with_json_gives_one_object(pair: Pair) -> None:
    code = """
from specdec.cli.bootstrap import main
from specdec.events import Statistics
def telling(statistics, step, add=Statistics._add_step):
    add(statistics, step)
    print("a step", flush=True)
Statistics._add_step = telling
main()
"""
    with ShellJob(make_endless_arguments(pair, "-n", 0, "--json"), command=[sys.executable, "-c", code]) as job:
        job.read_until(word="a step")
        os.kill(job.pid, INT)
        status, _ = end(job)
    assert status == 130
    result = json.loads(job.raw[job.raw.index(b"{") :])
    assert result["stop_reason"] == "interrupted"
    assert result["text"].startswith(PROMPT)
    assert len(result["tokens"]) == result["n_generated"] > 0


def fill(pipe: IO[bytes]) -> None:
    """Fill a pipe to the last byte, so that writers block."""
    end = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(end, b" " * size)
    os.close(end)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems open no pipe by its number")
@pytest.mark.parametrize(("grace_period", "is_repeated"), [(0.2, False), (1e6, True)])
def test_stalled_reader_does_not_block_the_end(pair: Pair, grace_period: float, is_repeated: bool) -> None:
    """The pipe is full, so the output cannot be finished: it ends with the grace period, or by a second signal."""
    seconds = f"signals.GRACE_PERIOD_S, signals.REPEAT_WINDOW_S = {grace_period}, 0.0"
    code = f"from specdec.cli.bootstrap import main; from specdec.ui import signals; {seconds}; main()"
    with run_process(make_endless_arguments(pair, "-n", 0), command=[sys.executable, "-c", code]) as process:
        process.stdout.read(100)
        fill(process.stdout)
        process.send_signal(TERM)
        if is_repeated:
            wait_until(lambda: process.send_signal(TERM) or process.poll() is not None)
        assert process.wait(TIMEOUT_S) == 128 + TERM
        assert process.stderr.read() == b""


# During prefill


@pytest.fixture
def long_prompt(tmp_path: Path) -> Path:
    """Write a prompt that takes a small model many seconds."""
    path = tmp_path / "long.txt"
    path.write_text("the then " * 6_000)
    return path


@pytest.mark.parametrize(("key", "more"), [(b"q", []), (b"\x03", []), (b"\x03", ["--plain"]), (b"\x03", ["--json"])])
def test_keys_and_ctrl_c_work_during_prefill(pair: Pair, long_prompt: Path, key: bytes, more: list[str]) -> None:
    with ShellJob(["-m", pair.endless, "-d", "none", "-f", long_prompt, "-j", 1, "-n", 0, *more]) as job:
        job.read_until(word="reading")
        job.type_keys(key)
        code, screen = end(job)
    assert code == (0 if key == b"q" else 130)
    assert "interrupted" in screen.get_text()
    assert "reading" not in screen.get_text()
    assert "the then the then" in screen.get_text()
    if not more:
        assert "the then" in screen.frames[0]
    if more == ["--json"]:
        result = json.loads(job.raw[job.raw.index(b"{") :])
        assert (result["text"], result["tokens"], result["stop_reason"]) == ("the then " * 6_000, [], "interrupted")


# Before the output


def test_signal_during_compilation_ends_at_once_quietly(pair: Pair, tmp_path: Path) -> None:
    cases: list[tuple[int, list[object]]] = [
        (INT, make_endless_arguments(pair)),
        (TERM, ["bench", "--shape", "64,96,1,4,2,300,64"]),
    ]
    with contextlib.ExitStack() as jobs:
        compiling = []
        for signum, arguments in cases:
            job = jobs.enter_context(ShellJob(arguments, NUMBA_CACHE_DIR=str(tmp_path / str(signum))))
            compiling.append((signum, job))
        for signum, job in compiling:
            wait_until(lambda signum=signum: any((tmp_path / str(signum)).rglob("*.code")))  # type: ignore[misc]
            time.sleep(0.2)
            begin = time.monotonic()
            os.kill(job.pid, signum)
            code, screen = end(job)
            assert time.monotonic() - begin < 2
            assert code == 128 + signum
            assert screen.get_text().strip() == ""


def test_signal_during_startup_ends_at_once_quietly(pair: Pair) -> None:
    with contextlib.ExitStack() as jobs:
        for seconds, signum in ((0, INT), (0.1, TERM), (0.2, HUP)):
            job = jobs.enter_context(ShellJob(make_endless_arguments(pair)))
            wait_until(lambda job=job: has_signal_handler(job.pid, TERM))  # type: ignore[misc]
            time.sleep(seconds)
            os.kill(job.pid, signum)
            code, screen = end(job)
            assert code == 128 + signum
            assert screen.get_text().strip() == ""


def test_signal_at_random_moment_restores_terminal(pair: Pair) -> None:
    """A short form of an experiment with hundreds of runs; the seconds cover a run from the imports to the end."""
    with ShellJob(make_endless_arguments(pair, "-n", 4000), command=[sys.executable, str(ROOT / "specdec.py")]) as job:
        wait_until(lambda: has_signal_handler(job.pid, TERM))
        time.sleep(random.uniform(0, 1.5))
        os.kill(job.pid, TERM)
        code, _ = end(job)
        assert code in (0, 128 + TERM, -TERM)  # the last: during the interpreter's shutdown, after all output


def test_library_import_installs_no_handlers() -> None:
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


def test_command_in_other_thread_leaves_signals_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec", "--help"])
    before = [signal.getsignal(n) for n in signals.END_SIGNALS]
    codes: list[object] = []

    def run() -> None:
        with pytest.raises(SystemExit) as done:
            bootstrap.main()
        codes.append(done.value.code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert codes == [0]
    assert "Usage" in capsys.readouterr().out
    assert [signal.getsignal(n) for n in signals.END_SIGNALS] == before


# Ctrl-Z


def stopped(job: ShellJob) -> Screen:
    """Return the screen that the shell finds, without the panel."""
    assert job.read_report() == "stopped"
    screen = job.make_screen()
    assert not screen.cursor_hidden
    assert job.is_echoing()
    assert screen.get_text().strip() == ""
    return screen


def test_ctrl_z_removes_panel_and_fg_redraws_it(pair: Pair) -> None:
    with ShellJob(make_endless_arguments(pair, "-n", 0, "--pace", 0.01)) as job:
        job.read_until(frames=1)
        for _ in range(2):
            job.type_keys(b"\x1a")
            stopped(job)
            job.resume()
            job.read_until(frames=1)
            assert not job.is_echoing()
            screen = job.make_screen()
            assert screen.cursor_hidden
            assert screen.get_window().count("╭") == screen.get_window().count("╰") == 1
        job.type_keys(b"\x03")
        code, screen = end(job)
    assert code == 130
    assert screen.get_text().startswith(PROMPT)


def test_background_job_draws_nothing_and_ends_on_signal(pair: Pair) -> None:
    with ShellJob(make_endless_arguments(pair, "-n", 0)) as job:
        job.read_until(frames=1)
        job.type_keys(b"\x1a")
        stopped(job)
        length = len(job.raw)
        job.resume(in_foreground=False)
        time.sleep(0.5)
        os.kill(job.pid, TERM)
        code, screen = end(job)
    assert code == 128 + TERM
    assert b"\x1b[?25l" not in job.raw[length:]
    assert "╭" not in job.raw[length:].decode()
    assert screen.get_text().startswith(PROMPT)


def test_ctrl_z_while_loading_keeps_cursor_visible(pair: Pair) -> None:
    with ShellJob(make_arguments(pair, "-n", 50)) as job:
        job.read_until(word="loading")
        job.type_keys(b"\x1a")
        assert job.read_report() == "stopped"
        assert not job.make_screen().cursor_hidden
        job.resume()
        code, _ = end(job)
    assert code == 0


# Keys, and a terminal that changes


def test_keys_pause_step_and_end_without_echo(pair: Pair) -> None:
    with ShellJob(make_endless_arguments(pair, "-n", 0, "--pace", 4)) as job:
        job.read_until(frames=2)
        assert not job.is_echoing()
        job.type_keys(b" ")
        job.read_until(word="paused")
        job.type_keys(b"?")
        job.read_until(word="space: pause")
        length = len(job.raw)
        time.sleep(0.3)
        job.type_keys(b"\x1b[Cxyz\x1b[A")
        job.read_until(frames=2)  # proposed, then verified
        assert b"paused" in job.raw[length:]
        job.type_keys(b"q")
        code, screen = end(job)
    assert code == 0
    assert screen.get_text().startswith(PROMPT)
    assert "interrupted" in screen.get_text()
    assert not any(word in screen.get_text() for word in ("xyz", "[C", "[A"))


def test_piped_input_is_not_read_as_keys(pair: Pair) -> None:
    command = ["/bin/sh", "-c", 'echo q | "$0" "$@"', *COMMAND]
    with ShellJob(make_arguments(pair, "-n", 60, "--pace", 100), command=command) as job:
        code, screen = end(job)
    assert code == 0
    assert screen.was_cursor_hidden
    assert "interrupted" not in screen.get_text()


def test_resized_terminal_shows_one_panel_and_none_at_the_end(pair: Pair) -> None:
    with ShellJob(make_endless_arguments(pair, "-n", 0, "--pace", 20)) as job:
        screen, n_fed = Screen(job.width, job.height), 0
        for width, height in ((120, 40), (40, 12), (80, 24), (80, 6), (80, 24)):
            job.read_until(word="\x1b[?2026l")
            time.sleep(0.2)
            job.read_until(word="\x1b[?2026l")
            whole = job.raw.rindex(b"\x1b[?2026l") + len(b"\x1b[?2026l")
            screen.feed(job.raw[n_fed:whole].decode())
            n_fed = whole
            assert screen.get_window().count("╭") == screen.get_window().count("╰") == (screen.height > 6)
            job.resize(width, height)
            screen.resize(width, height)
        os.kill(job.pid, TERM)
        assert int(job.read_report()) == 128 + TERM
        screen.feed(job.raw[n_fed:].decode())
    assert screen.get_text().startswith(PROMPT)
    assert "╭" not in screen.get_text()
    assert not screen.cursor_hidden


# Invalid settings and small machines


def run_rejected(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("specdec: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NUMBA_DISABLE_JIT", "1", "unset it"),
        ("NUMBA_NUM_THREADS", "abc", "set a valid value, or unset it"),
        ("NUMBA_NUM_THREADS", "0", "set 1 to 1024, or unset it"),
        ("NUMBA_NUM_THREADS", "10000", "set 1 to 1024, or unset it"),
        ("NUMBA_NUM_THREADS", " +10_000", "set 1 to 1024, or unset it"),
        ("NUMBA_OPT", "fast", "set a valid value, or unset it"),
    ],
)
def test_invalid_numba_setting_prints_valid_values(name: str, value: str, expected: str) -> None:
    error = run_rejected(COMMAND, **{name: value})
    assert name in error
    assert expected in error
    assert "memory" not in error


def test_missing_shared_memory_gives_no_warning() -> None:
    code = f"""
import sys
from multiprocessing.context import BaseContext
def refuse(context):
    raise OSError(30, "Read-only file system")
BaseContext.RLock = refuse
sys.path.insert(0, {str(ROOT)!r})
from specdec.cli.bootstrap import main
main()
"""
    command = [sys.executable, "-W", "error", "-c", code, "-t", "0", "-n", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "Once upon a time,\n"), done.stderr
    assert "lock" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit no address space")
def test_memory_limit_too_low_for_numba_is_reported() -> None:
    error = run_rejected(["sh", "-c", 'ulimit -v 200000; exec "$0" "$@"', *COMMAND])
    assert "specdec needs 600 MB of memory, also under a limit (ulimit -v)" in error


@pytest.mark.parametrize("package", ["numba", "typer"])
def test_missing_package_error_prints_install_command(package: str) -> None:
    code = f"""
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name == "{package}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Nowhere())
sys.path.insert(0, {str(ROOT)!r})
from specdec.cli.bootstrap import main
main()
"""
    error = run_rejected([sys.executable, "-c", code])
    assert f"package not found: {package}; install with: " in error and f"-m pip install '{ROOT}[hub]'" in error


def test_python_without_packages_lists_all_and_one_command() -> None:
    """-S leaves out the folders of installed packages."""
    error = run_rejected([sys.executable, "-E", "-S", str(ROOT / "specdec.py"), "Once upon a time"])
    assert "packages not found: numba, numpy, rich, typer; install with: " in error and f"-m pip install '{ROOT}[hub]'" in error


def test_version_needs_no_package() -> None:
    for words in (["--version"], ["version"]):
        command = [sys.executable, "-E", "-S", str(ROOT / "specdec.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        assert (done.stdout, done.stderr) == (f"specdec {specdec.__version__}, arithmetic {specdec.__arithmetic__}\n", "")
        command = [sys.executable, "-X", "importtime", str(ROOT / "specdec.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "specdec.cli.output_errors" in imported and not imported & {"typer", "rich", "numba", "numpy"}


@pytest.fixture(autouse=True)
def _signals_are_pytest_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a test leaves a signal handler in this process."""
    before = {n: signal.getsignal(n) for n in (*signals.END_SIGNALS, STOP)}
    yield
    assert {n: signal.getsignal(n) for n in before} == before
