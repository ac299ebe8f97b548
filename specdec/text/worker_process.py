"""Run untrusted requests in worker processes that can be killed. Independent of what the requests are.

A schema comes from any user of the server. Building it can take minutes and all memory, and Python cannot stop it. So it is
tried in a process behind a pipe first, with limits on memory and CPU seconds, which a busy machine does not shorten. On systems
without a CPU limit, and for a process that sleeps, the limit is WALL_CLOCK_FACTOR times as many seconds of wall-clock time.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

WALL_CLOCK_FACTOR = 8
SIGKILL_EXIT_CODE = -getattr(signal, "SIGKILL", 0) or None
SIGXCPU_EXIT_CODE = -getattr(signal, "SIGXCPU", 0) or None  # exit code after the CPU limit


class WorkerLostError(ValueError):
    """An error for a worker process that could not be started or was killed by the system, without a fault in the request."""


class WorkerFailedError(Exception):
    """An error for a request that a worker process did not answer.

    Attributes:
        is_timeout: Whether a time limit was exceeded; otherwise the process ended, for example for lack of memory.
    """

    def __init__(self, is_timeout: bool) -> None:
        super().__init__("late" if is_timeout else "ended")
        self.is_timeout = is_timeout


class Worker:
    """A worker process that answers one request at a time; it starts with the first request, and again after it has ended.

    Args:
        module: The file name, without .py, of the program to run. It gets sys.path as JSON in its first argument. It reads
            requests as lines of JSON, each with its "seconds" limit, and writes a line of JSON for each.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Kill the worker process; the next request starts another one. Garbage collection of the worker kills it, too."""
        process, self._process = self._process, None
        if process:
            _kill(process)

    def request(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request to the worker process and return the process's answer, a JSON object.

        The process is started if it does not run, and killed after an error.

        Args:
            message: The request, an object that JSON can represent.
            seconds: The limit in CPU seconds, which is added to the request.

        Raises:
            WorkerFailedError: There is no answer within the limits.
            WorkerLostError: The process could not be started, or the system killed it.
        """
        process = self._get_process()
        assert process.stdin and process.stdout
        timer, begin = threading.Timer(WALL_CLOCK_FACTOR * seconds, process.kill), time.monotonic()
        timer.start()
        try:
            process.stdin.write(json.dumps(message | {"seconds": seconds}).encode() + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = b""
        except BaseException:  # the next request must not read the rest of this reply
            self.close()
            raise
        finally:
            timer.cancel()
        is_timeout = time.monotonic() - begin >= WALL_CLOCK_FACTOR * seconds  # the timer then kills the process
        if reply.endswith(b"\n") and not is_timeout:
            answer: dict[str, Any] = json.loads(reply)
            return answer
        code = process.wait()
        self.close()
        if code == SIGKILL_EXIT_CODE and not is_timeout:
            raise WorkerLostError("the system has ended the worker process; try again, or free some memory")
        raise WorkerFailedError(is_timeout or code == SIGXCPU_EXIT_CODE)

    def _get_process(self) -> "subprocess.Popen[bytes]":
        """Return the running worker process, or start one; raise WorkerLostError if the start fails."""
        if not self._process or self._process.poll() is not None:
            self.close()
            script, pipe = Path(__file__).with_name(f"{self._module}.py"), subprocess.PIPE
            command = [sys.executable, "-S", "-E", str(script), json.dumps(sys.path)]
            try:  # in its own session, so that Ctrl-C does not reach it
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise WorkerLostError(f"cannot start a worker process: {error.strerror or error}") from None
            weakref.finalize(self, _kill, self._process)
        return self._process


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError), process:  # waits for the end and closes the pipes; flushing one can fail
        pass
