"""Signals, and what the terminal needs at a sudden end. Knows no views and no models.

Until the text begins, a signal that asks for the end (Ctrl-C, SIGTERM, the terminal that closes) ends the process at once. From
then on the first one is noted, and whoever writes the text stops there and prints what there is; where that takes too long, or
one is sent again, the process ends at once after all. No signal ever raises: LLVM's callbacks would swallow the exception, and
an import would stop halfway. A thread listens, since Python's own handlers wait for the main thread, which may be in LLVM.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGBREAK")
ENDS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
STOP = getattr(signal, "SIGTSTP", None)  # Ctrl-Z; not on Windows
GO_ON = getattr(signal, "SIGCONT", None)  # what the shell sends after it
SAME_WISH_SECONDS = 1.0  # `timeout` sends its signal twice, a finger stays on Ctrl-C
PATIENCE_SECONDS = 5.0  # for the step in flight and the printing: a reader of a pipe may have gone to sleep
TIDYING_SECONDS = 0.5  # a terminal that has been halted with Ctrl-S takes no output


class Signals:
    """The process's signals, once `install` has been called; before that, and in a library, nothing is asked and nobody asks.

    asked: the signal that has asked for the end of the text, else 0. stop_asked: whether Ctrl-Z has asked for a stop.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.stop_asked = False
        self._asked_at = 0.0
        self._patience: float | None = None
        self._is_listening = False
        self._has_text = False
        self._is_asking = False
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._undoing: list[Callable[[], object]] = []

    def install(self) -> None:
        """Listen from now on to what is not ignored; in a thread that is not the main one, leave signals to their owner."""
        if threading.current_thread() is not threading.main_thread():
            return
        mouth, ear = socket.socketpair()
        mouth.setblocking(False)
        with suppress(RuntimeError):  # no thread to be had: signals do as they do
            threading.Thread(target=self._listen, args=(ear,), daemon=True).start()
            signal.set_wakeup_fd(mouth.detach(), warn_on_full_buffer=False)
            self._is_listening = True
            for signum in ENDS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                    signal.signal(signum, _leave_it_to_the_thread)

    def text_begins(self, patience_seconds: float | None = None) -> None:
        """From now on there is something to print at the end, which may take so long, by default PATIENCE_SECONDS."""
        with self._lock:  # which a sudden end does not give back
            self._has_text, self._patience = True, patience_seconds

    def granted(self) -> None:
        """What was asked for has been done in full, and is no interruption."""
        with self._lock:
            self.asked = 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Within, a person types a line: Ctrl-C raises KeyboardInterrupt, what else asks for the end is granted at once. Behind
        it a text begins that nobody has asked to end."""
        is_mine = self._is_listening and signal.getsignal(signal.SIGINT) is _leave_it_to_the_thread
        with self._lock:
            self._is_asking, self._has_text, self.asked = is_mine, False, 0
        self._woken.clear()
        try:
            if is_mine:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            yield
        finally:
            if is_mine:
                signal.signal(signal.SIGINT, _leave_it_to_the_thread)
            with self._lock:
                self._is_asking, self._has_text, self.asked = False, True, 0

    def sleep(self, seconds: float) -> None:
        """No longer than until somebody asks for something."""
        self._woken.wait(seconds)

    @contextmanager
    def at_sudden_end(self, undo: Callable[[], object], do: Callable[[], object] = lambda: None) -> Iterator[None]:
        """`do` something to the terminal that an end at once, within, will `undo`; none comes in between, or before a `do`."""
        try:
            with self._lock:
                self._undoing.append(undo)
                do()
            yield
        finally:
            self._undoing.remove(undo)

    @contextmanager
    def undone(self, undo: Callable[[], object], do: Callable[[], object] = lambda: None) -> Iterator[None]:
        """The same, where an end at its time `undo`es it too."""
        with self.at_sudden_end(undo, do):
            try:
                yield
            finally:
                undo()

    @contextmanager
    def noting_stops(self) -> Iterator[None]:
        """Within, Ctrl-Z is noted; whoever has put the terminal in order then calls `stop`."""
        if STOP is None or not self._is_listening or signal.getsignal(STOP) is not signal.SIG_DFL:
            yield
            return
        signal.signal(STOP, _leave_it_to_the_thread)
        try:
            yield
            if self.stop_asked:
                self.stop()
        finally:
            signal.signal(STOP, signal.SIG_DFL)

    def stop(self) -> None:
        """Stop as Ctrl-Z does; returns when the shell lets the job go on."""
        assert STOP is not None
        self.stop_asked = False
        self._woken.clear()
        if self.asked:
            self._woken.set()
        signal.signal(STOP, signal.SIG_DFL)
        signal.raise_signal(STOP)
        signal.signal(STOP, _leave_it_to_the_thread)

    def _listen(self, ear: socket.socket) -> None:
        while True:
            patience = PATIENCE_SECONDS if self._patience is None else self._patience
            left = self._asked_at + patience - time.monotonic()
            ear.settimeout(max(left, 0.001) if self.asked else None)
            try:
                signum = ear.recv(1)[0]
            except TimeoutError:
                signum = self.asked
            is_mine = self._lock.acquire(timeout=TIDYING_SECONDS)  # else the main thread waits for the terminal, maybe for ever
            self._hear(signum)
            if is_mine:
                self._lock.release()

    def _hear(self, signum: int) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT and self._is_asking:
            return
        if signum == STOP:
            self.stop_asked = True
        elif signum == GO_ON and self._is_asking:  # any thread may have got it, and the main one waits for keys
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGWINCH)
        elif signum in ENDS and (not self._has_text or (self.asked and now > self._asked_at + SAME_WISH_SECONDS)):
            self._end_at_once(signum)
        elif signum in ENDS and not self.asked:
            self._asked_at, self.asked = now, signum
        self._woken.set()

    def _end_at_once(self, signum: int) -> None:
        with suppress(RuntimeError):  # no thread to be had
            tidying = threading.Thread(target=self._tidy, daemon=True)
            tidying.start()
            tidying.join(TIDYING_SECONDS)
        os._exit(exit_code(signum))

    def _tidy(self) -> None:
        for undo in reversed(self._undoing):
            with suppress(OSError, ValueError):  # the terminal has gone, or its stream is closed
                undo()


signals = Signals()


def exit_code(signum: int) -> int:
    """What a shell reports for a process that the signal has ended."""
    return 128 + signum


def in_foreground(stream: IO[str]) -> bool:
    """Whether a terminal there is this job's: true where there is no terminal or no job."""
    try:
        return os.tcgetpgrp(stream.fileno()) in (0, os.getpgrp())  # 0: the job in front is of another container
    except (AttributeError, OSError, ValueError):
        return True


def _leave_it_to_the_thread(*_: object) -> None:
    """The byte in the socket has said it all."""
