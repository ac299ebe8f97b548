"""Tests of worker_process.py: processes that are killed, crash, or cannot be started."""

import os
import signal
import subprocess
from typing import Any

import pytest

from specdec.text import worker_process
from specdec.text.worker_process import Worker, WorkerFailedError, WorkerLostError

GRAMMAR = {"grammar": '{"grammars": [{"json_schema": {"type": "object"}}]}', "n": 300}
pytest.importorskip("llguidance", reason="the extra [shape] is not installed")


def kill_first_processes(monkeypatch: pytest.MonkeyPatch, n: int, signal_number: int) -> list[int]:
    """Patch Popen to send a signal to the first n processes; return the list of started pids."""
    pids, popen_original = list[int](), subprocess.Popen

    def popen_and_kill(*args: Any, **more: Any) -> Any:
        process = popen_original(*args, **more)
        pids.append(process.pid)
        if len(pids) <= n:
            os.kill(process.pid, signal_number)
        return process

    monkeypatch.setattr(worker_process.subprocess, "Popen", popen_and_kill)
    return pids


def test_a_process_killed_while_idle_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, worker = kill_first_processes(monkeypatch, 0, signal.SIGKILL), Worker("grammar_worker")
    assert "error" not in worker.request(GRAMMAR, 10.0)
    assert worker._process
    os.kill(pids[0], signal.SIGKILL)
    worker._process.wait()
    assert "error" not in worker.request(GRAMMAR, 10.0)
    assert len(pids) == 2
    worker.close()


def test_a_process_killed_at_work_raises_worker_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, worker = kill_first_processes(monkeypatch, 1, signal.SIGKILL), Worker("grammar_worker")
    with pytest.raises(WorkerLostError, match="the system has ended the worker process"):
        worker.request(GRAMMAR, 10.0)
    assert len(pids) == 1 and "error" not in worker.request(GRAMMAR, 10.0)
    worker.close()


def test_a_process_that_crashes_raises_worker_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, worker = kill_first_processes(monkeypatch, 9, signal.SIGABRT), Worker("grammar_worker")
    with pytest.raises(WorkerFailedError) as caught:
        worker.request(GRAMMAR, 10.0)
    assert len(pids) == 1 and not caught.value.is_timeout


def test_a_failure_to_start_a_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(*_: Any, **more: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(worker_process.subprocess, "Popen", fail_to_start)
    with pytest.raises(WorkerLostError, match="cannot start a worker process: Resource temporarily unavailable"):
        Worker("grammar_worker").request(GRAMMAR, 1.0)
