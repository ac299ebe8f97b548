"""workers.py: what becomes of a request whose process is ended by the system, or cannot be begun."""

import json
import os
import signal
import subprocess
import threading
import time
from typing import Any

import pytest

from specdec.text import workers
from specdec.text.workers import Lost, Unanswered, Worker

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

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    return begun


def test_a_process_that_the_system_has_killed_is_begun_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, worker = ending(monkeypatch, 1, signal.SIGKILL), Worker("shape_worker")
    assert "error" not in worker.ask(GRAMMAR, 10.0)
    assert len(begun) == 2
    worker.close()


def test_who_is_killed_again_and_again_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, worker = ending(monkeypatch, 9, signal.SIGKILL), Worker("shape_worker")
    with pytest.raises(Lost, match="the system has ended the process"):
        worker.ask(GRAMMAR, 10.0)
    assert len(begun) == workers.ATTEMPTS
    worker.close()


def test_a_process_that_ends_by_itself_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, worker = ending(monkeypatch, 9, signal.SIGABRT), Worker("shape_worker")
    with pytest.raises(Unanswered) as told:
        worker.ask(GRAMMAR, 10.0)
    assert len(begun) == 1 and not told.value.is_late
    worker.close()


def test_where_no_process_can_be_had_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **more: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(workers.subprocess, "Popen", none)
    with pytest.raises(Lost, match="no process to work in: Resource temporarily unavailable"):
        Worker("shape_worker").ask(GRAMMAR, 1.0)


def test_who_asks_while_a_process_is_busy_asks_another_one() -> None:
    worker, answers = Worker("shape_worker"), list[dict[str, Any]]()
    assert "error" not in worker.ask(GRAMMAR, 10.0)
    slow = {
        "n": 300,
        "grammar": json.dumps({"grammars": [{"json_schema": {"patternProperties": {f"^p{k}x{k}$": {} for k in range(300)}}}]}),
    }

    def wait_for_the_slow() -> None:
        with pytest.raises(Unanswered):
            worker.ask(slow, 1.2)
        answers.append({"slow": True})

    waiting = threading.Thread(target=wait_for_the_slow)
    waiting.start()
    while not worker._lock.locked():
        time.sleep(0.001)
    answers.append(worker.ask(GRAMMAR, 10.0))
    waiting.join()
    assert "slow" in answers[1] and not {"slow", "error"} & answers[0].keys()
    worker.close()
