"""Processes of our own that try what clients send and may be ended. Knows nothing of what that is.

A schema comes from whoever uses the server, and building it can take minutes and all memory, where Python cannot stop it. So it
is tried behind a pipe first, with limits of memory and of CPU seconds, which a busy machine does not take from it. On systems
that count no CPU seconds, and for a process that sleeps, the limit is BUSY times as many seconds of the clock.
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

BUSY = 8
KILLED = -getattr(signal, "SIGKILL", 0) or None
OUT_OF_TIME = -getattr(signal, "SIGXCPU", 0) or None  # what a process ended with that had no seconds left


class Lost(ValueError):
    """There is no process, or the system has ended it: nothing is wrong with what was asked."""


class Unanswered(Exception):
    """A worker has no answer. is_late: whether its seconds were over; else it ended, as one does that gets no memory."""

    def __init__(self, is_late: bool) -> None:
        super().__init__("late" if is_late else "ended")
        self.is_late = is_late


class Worker:
    """A process that answers one request at a time; it begins with the first one, and begins anew where one ended it.

    module: the file's name without .py. As a program, given a sys.path, it reads requests, a line of JSON each, that say how many
    "seconds" they may take, and writes a line of JSON for each.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the process, as happens to that of a worker that nobody has any more; the next request begins another."""
        process, self._process = self._process, None
        if process:
            _end(process)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request. Raise Unanswered, and Lost where there can be no process."""
        process = self._begun()
        assert process.stdin and process.stdout
        timer, begin = threading.Timer(BUSY * seconds, process.kill), time.monotonic()
        timer.start()
        try:
            process.stdin.write(json.dumps(request | {"seconds": seconds}).encode() + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = b""
        except BaseException:  # half a reply would be taken for the next one's
            self.close()
            raise
        finally:
            timer.cancel()
        is_late = time.monotonic() - begin >= BUSY * seconds  # the process is ended then
        if reply.endswith(b"\n") and not is_late:
            answer: dict[str, Any] = json.loads(reply)
            return answer
        code = process.wait()
        self.close()
        if code == KILLED and not is_late:
            raise Lost("the system has ended the process that was to do this; ask again, or free some memory")
        raise Unanswered(is_late or code == OUT_OF_TIME)

    def _begun(self) -> "subprocess.Popen[bytes]":
        """Return the process, a new one where there is none any more."""
        if not self._process or self._process.poll() is not None:
            self.close()
            place, pipe = Path(__file__).with_name(f"{self._module}.py"), subprocess.PIPE
            command = [sys.executable, "-S", "-E", str(place), json.dumps(sys.path)]
            try:  # in a session of its own, so that Ctrl-C is not its
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise Lost(f"no process to work in: {error.strerror or error}") from None
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError), process:  # which waits for it, and closes its pipes: one may still hold what it did not read
        pass
