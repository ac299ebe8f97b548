"""Tests of grammar_worker.py: processes that are killed, crash, get no CPU time, or cannot be started."""

import signal
import subprocess
from typing import Any

import pytest

from specdec.text import grammar_worker
from specdec.text.grammar_worker import WorkerLostError, try_grammar

GRAMMAR = '{"grammars": [{"json_schema": {"type": "object"}}]}'
pytest.importorskip("llguidance", reason="the extra [shape] is not installed")


def end_process_by(monkeypatch: pytest.MonkeyPatch, signal_number: int) -> None:
    """Replace worker processes by one that a signal ends."""
    run_original = subprocess.run

    def run_and_kill(command: list[str], **more: Any) -> Any:
        script = f"import os; os.kill(os.getpid(), {int(signal_number)})"
        return run_original([command[0], "-c", script], **more)

    monkeypatch.setattr("subprocess.run", run_and_kill)


def test_a_grammar_is_tried_in_a_process() -> None:
    seconds, reason = try_grammar(GRAMMAR, 300, 10.0)
    assert 0.0 < seconds < 10.0 and reason == ""
    assert try_grammar(GRAMMAR.replace("object", "other"), 300, 10.0)[1] == "Invalid type: other"


def test_a_process_killed_at_work_raises_worker_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        end_process_by(patched, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="the system has ended the worker process"):
            try_grammar(GRAMMAR, 300, 10.0)
    assert try_grammar(GRAMMAR, 300, 10.0)[1] == ""


def test_a_process_that_crashes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    end_process_by(monkeypatch, signal.SIGABRT)
    assert try_grammar(GRAMMAR, 300, 10.0) == (10.0, "it needs too much memory")


@pytest.mark.parametrize("exit_code", [-24, None])
def test_only_without_a_cpu_limit_a_timeout_is_a_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, exit_code: int | None
) -> None:
    def time_out(command: list[str], timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", time_out)
    monkeypatch.setattr(grammar_worker, "SIGXCPU_EXIT_CODE", exit_code)
    if not exit_code:
        assert try_grammar(GRAMMAR, 300, 10.0) == (10.0, "it takes too long to build")
        return
    with pytest.raises(WorkerLostError, match="the machine is too busy"):
        try_grammar(GRAMMAR, 300, 10.0)


def test_a_failure_to_start_a_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(*_: Any, **more: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.run", fail_to_start)
    with pytest.raises(WorkerLostError, match="cannot start a worker process: Resource temporarily unavailable"):
        try_grammar(GRAMMAR, 300, 1.0)
