"""workers.py: what becomes of a request whose process is ended by the system, or cannot be begun."""

import os
import signal
import subprocess
from typing import Any

import pytest

from specdec.text import worker_process
from specdec.text.worker_process import Lost, Unanswered, Worker

GRAMMAR = {"grammar": '{"grammars": [{"json_schema": {"type": "object"}}]}', "n": 300}
pytest.importorskip("llguidance", reason="the extra [shape] is not installed")


def ending(monkeypatch: pytest.MonkeyPatch, n: int, number: int) -> list[int]:
    """The first n processes end by that signal before they answer."""
    begun, begin = list[int](), subprocess.Popen

    def popen(*args: Any, **more: Any) -> Any:
        process = begin(*args, **more)
        begun.append(process.pid)
        if len(begun) <= n:
            os.kill(process.pid, number)
        return process

    monkeypatch.setattr(worker_process.subprocess, "Popen", popen)
    return begun


def test_a_process_that_was_killed_while_idle_is_begun_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, worker = ending(monkeypatch, 0, signal.SIGKILL), Worker("grammar_worker")
    assert "error" not in worker.ask(GRAMMAR, 10.0)
    assert worker._process
    os.kill(begun[0], signal.SIGKILL)
    worker._process.wait()
    assert "error" not in worker.ask(GRAMMAR, 10.0)
    assert len(begun) == 2
    worker.close()


def test_a_process_that_the_system_kills_at_work_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, worker = ending(monkeypatch, 1, signal.SIGKILL), Worker("grammar_worker")
    with pytest.raises(Lost, match="the system has ended the process"):
        worker.ask(GRAMMAR, 10.0)
    assert len(begun) == 1 and "error" not in worker.ask(GRAMMAR, 10.0)
    worker.close()


def test_a_process_that_ends_by_itself_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, worker = ending(monkeypatch, 9, signal.SIGABRT), Worker("grammar_worker")
    with pytest.raises(Unanswered) as told:
        worker.ask(GRAMMAR, 10.0)
    assert len(begun) == 1 and not told.value.is_late


def test_where_no_process_can_be_had_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **more: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(worker_process.subprocess, "Popen", none)
    with pytest.raises(Lost, match="no process to work in: Resource temporarily unavailable"):
        Worker("grammar_worker").ask(GRAMMAR, 1.0)
