"""Processes of our own that do what files of others ask for, and may be ended. Knows nothing of what that is.

A chat template or a tokenizer.json comes from whoever made the model. Either can loop for ever or ask for all memory, where
Python cannot stop it: so it runs behind a pipe, with a limit of memory, and each request has its seconds. They are the process's
own, which a busy machine does not take from it; where a system counts none, and for one that sleeps, the clock's are BUSY times
as many.

This file is both ends. As a program it reads a line of JSON and, if the line names a size, so many bytes; it writes what the
`answer` of the module that it was told to load makes of them, which is a line of JSON, too, or what it raises as an "error".
"""

import functools
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__)
BUSY = 8
ATTEMPTS = 2
ENDING_SECONDS = 1.0
KILLED = -getattr(signal, "SIGKILL", 0) or None
OUT_OF_TIME = -getattr(signal, "SIGXCPU", 0) or None  # what a process ended with that had no seconds left


class Lost(ValueError):
    """There is no process, or the system has ended one after the other: nothing is wrong with what was asked."""


class Killed(Exception):
    """The system has ended the process."""


class Unanswered(Exception):
    """A worker has no answer. is_late: whether its seconds were over; else it ended, as one does that gets no memory."""

    def __init__(self, is_late: bool) -> None:
        super().__init__("late" if is_late else "ended")
        self.is_late = is_late


class Worker:
    """A process that answers requests; it begins with the first one, and begins anew where one ended it. Who asks while it is
    busy asks another one, of which there is one more.

    module: the file's name without .py, which has `answer(request, data)` and MOST_BYTES of memory. beginning: what each new
    process is told first, and beginning_seconds: how long that may take.
    """

    def __init__(
        self, module: str, beginning: bytes | None = None, beginning_seconds: float = 0.0, is_other: bool = False
    ) -> None:
        self._module, self._beginning, self._beginning_seconds = module, beginning, beginning_seconds
        self._is_other = is_other
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = int
        self._pid = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Worker, (self._module, self._beginning, self._beginning_seconds)

    @functools.cached_property
    def _other(self) -> "Worker":
        return Worker(self._module, self._beginning, self._beginning_seconds, True)

    def close(self) -> None:
        """End the process, as happens to that of a worker that nobody has any more; the next request begins another."""
        self._over()
        if "_other" in vars(self):
            self._other.close()

    def _over(self) -> None:
        """The process is, or is ended."""
        self._process = None
        self._end()

    def begin(self) -> dict[str, Any]:
        """The answer to the beginning. Raises Unanswered, and Lost where there can be no process."""
        return self._again(self._begun)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request. Raises Unanswered, and Lost where there can be no process."""
        if self._lock.locked() and not self._is_other:
            return self._other.ask(request, seconds)

        def asked() -> dict[str, Any]:
            self._begun()
            return self._answer(request, b"", seconds)

        return self._again(asked)

    def _again(self, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer, of another process where the system has killed the first, as it does for want of memory."""
        with self._lock:
            for _ in range(ATTEMPTS):
                try:
                    return answer()
                except OSError as error:
                    raise Lost(f"no process to work in: {error.strerror or error}") from None
                except Killed:
                    pass
        raise Lost("the system has ended the process that was to do this, more than once; free some memory")

    def _begun(self) -> dict[str, Any]:
        """What a process that had to be begun said; nothing, where there is one."""
        if self._process and self._pid == os.getpid():
            return {}
        command = [sys.executable, "-S", "-E", str(HERE), json.dumps(sys.path), str(HERE.with_name(f"{self._module}.py"))]
        pipe = subprocess.PIPE
        # in a session of its own, so that Ctrl-C is not its; it ends with the pipe from here
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _ended, self._process, self._pid)
        if self._beginning is None:
            return {}
        return self._answer({"size": len(self._beginning)}, self._beginning, self._beginning_seconds)

    def _answer(self, request: dict[str, Any], data: bytes, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process and process.stdin and process.stdout
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(BUSY * seconds, end)
        timer.start()
        try:
            process.stdin.write(json.dumps(request | {"seconds": seconds}).encode() + b"\n" + data)
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = b""
        except BaseException:  # half a reply would be taken for the next one's
            self._over()
            raise
        finally:
            timer.cancel()
            timer.join()
        if is_late.is_set() or not reply.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)  # of one that has closed its pipe; else it is ended now
            code = process.returncode
            self._over()
            if not is_late.is_set() and code == KILLED:
                raise Killed
            raise Unanswered(is_late.is_set() or code == OUT_OF_TIME)
        answer: dict[str, Any] = json.loads(reply)
        return answer


def _ended(process: subprocess.Popen[bytes], pid: int) -> None:
    if pid == os.getpid():  # in a fork it is the other's
        process.kill()
        with suppress(OSError), process:  # which waits for it, and closes its pipes: one may still hold what it did not read
            pass


def main() -> None:
    """Load the module of a path with another process's packages, and answer until the pipe ends."""
    path, place = sys.argv[1:]
    sys.path[:] = json.loads(path)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _limited("RLIMIT_AS", module.MOST_BYTES)
    _limited("RLIMIT_CORE", 0)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        data = sys.stdin.buffer.read(request.get("size", 0))
        _limited("RLIMIT_CPU", math.ceil(time.process_time() + request["seconds"]))
        sys.stdout.write(json.dumps(_answered(module.answer, request, data)) + "\n")
        sys.stdout.flush()


def _answered(answer: Callable[[dict[str, Any], bytes], dict[str, Any]], request: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The answer; where there is none, an "error" of what was raised instead."""
    try:
        return answer(request, data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library is no Exception
        return {"error": str(error) or type(error).__name__}


def _limited(name: str, limit: int) -> None:
    """This process has so much of that, unless it has less already or the system knows no such limit."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        resource.setrlimit(getattr(resource, name), (limit, resource.getrlimit(getattr(resource, name))[1]))


if __name__ == "__main__":
    main()
