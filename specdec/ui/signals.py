"""Signal handling, and the terminal cleanup when the process is killed.

Until the output begins, an end signal (Ctrl-C, SIGTERM, a closed terminal) ends the process at once. From then
on the first one is noted: the generation stops there and prints what there is. If that takes too long, or another signal comes,
the process ends at once. No signal ever raises: LLVM's callbacks would swallow the exception, and an import would stop
halfway. A thread listens, since Python's own handlers wait for the main thread, which may be in LLVM.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

END_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGBREAK")
END_SIGNALS = [getattr(signal, name) for name in END_SIGNAL_NAMES if hasattr(signal, name)]
STOP_SIGNAL = getattr(signal, "SIGTSTP", None)  # Ctrl-Z; not on Windows
CONTINUE_SIGNAL = getattr(signal, "SIGCONT", None)  # the shell sends it on `fg`
REPEAT_WINDOW_S = 1.0  # `timeout` sends its signal twice, and Ctrl-C may be held down
GRACE_PERIOD_S = 5.0  # for the current step and the printing; the reader of a pipe may stall
CLEANUP_TIMEOUT_S = 0.5  # a terminal halted with Ctrl-S takes no output


class SignalHandler:
    """The handler of the process's end signals and of Ctrl-Z; it leaves signals alone until `install`, as in a library.

    Attributes:
        end_signal: Number of the noted signal that asked the process to end, else 0.
        is_stop_requested: Whether Ctrl-Z has asked to suspend the process.
    """

    def __init__(self) -> None:
        """Start without a signal; the handlers are installed by `install`."""
        self.end_signal = 0
        self.is_stop_requested = False
        self._end_signal_time = 0.0
        self._grace_seconds: float | None = None
        self._is_listening = False
        self._has_output = False
        self._is_prompting = False
        self._wake_event = threading.Event()
        self._lock = threading.Lock()
        self._cleanups: list[Callable[[], object]] = []

    def install(self) -> None:
        """Start a thread that handles the end signals, except ignored ones; outside the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        send_socket, receive_socket = socket.socketpair()
        send_socket.setblocking(False)
        with suppress(RuntimeError):  # no thread is available: signals keep their default action
            threading.Thread(target=self._listen, args=(receive_socket,), daemon=True).start()
            signal.set_wakeup_fd(send_socket.detach(), warn_on_full_buffer=False)
            self._is_listening = True
            for signum in END_SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                    signal.signal(signum, _ignore_in_main_thread)

    def begin_output(self, grace_seconds: float | None = None) -> None:
        """Defer end signals from now on: the first one is noted in `end_signal`, so that the caller can finish its output.

        The process ends at once if the grace period is over or another end signal comes.

        Args:
            grace_seconds: Time to finish, by default GRACE_PERIOD_S.
        """
        with self._lock:  # never released once the process is being killed
            self._has_output, self._grace_seconds = True, grace_seconds

    def clear_end_signal(self) -> None:
        """Forget the noted end signal, after a complete shutdown, so that the exit code reports no interruption."""
        with self._lock:
            self.end_signal = 0

    @contextmanager
    def raise_interrupts(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt within the context, where the user types a line; other end signals end the process.

        Afterwards end signals are deferred, as after `begin_output`, and none is noted.
        """
        is_installed = self._is_listening and signal.getsignal(signal.SIGINT) is _ignore_in_main_thread
        with self._lock:
            self._is_prompting, self._has_output, self.end_signal = is_installed, False, 0
        self._wake_event.clear()
        try:
            if is_installed:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            yield
        finally:
            if is_installed:
                signal.signal(signal.SIGINT, _ignore_in_main_thread)
            with self._lock:
                self._is_prompting, self._has_output, self.end_signal = False, True, 0

    def sleep(self, seconds: float) -> None:
        """Sleep for some seconds, or until a signal arrives; return at once if one has arrived already."""
        self._wake_event.wait(seconds)

    @contextmanager
    def undo_on_kill(self, undo: Callable[[], object], do: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Run `do`, and run `undo` if a signal ends the process within the context; no signal ends the process during `do`."""
        try:
            with self._lock:
                self._cleanups.append(undo)
                do()
            yield
        finally:
            self._cleanups.remove(undo)

    @contextmanager
    def undo_on_exit(self, undo: Callable[[], object], do: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Run `do`, and run `undo` when the context is left or a signal ends the process within it."""
        with self.undo_on_kill(undo, do):
            try:
                yield
            finally:
                undo()

    @contextmanager
    def defer_stops(self) -> Iterator[None]:
        """Only note Ctrl-Z within the context, so that the caller can restore the terminal before it calls `suspend`.

        If Ctrl-Z is still noted when the context is left without an exception, the process is suspended then.
        """
        if STOP_SIGNAL is None or not self._is_listening or signal.getsignal(STOP_SIGNAL) is not signal.SIG_DFL:
            yield
            return
        signal.signal(STOP_SIGNAL, _ignore_in_main_thread)
        try:
            yield
            if self.is_stop_requested:
                self.suspend()
        finally:
            signal.signal(STOP_SIGNAL, signal.SIG_DFL)

    def suspend(self) -> None:
        """Suspend the process as Ctrl-Z does; return when the shell resumes the job."""
        assert STOP_SIGNAL is not None
        self.is_stop_requested = False
        self._wake_event.clear()
        if self.end_signal:
            self._wake_event.set()
        signal.signal(STOP_SIGNAL, signal.SIG_DFL)
        signal.raise_signal(STOP_SIGNAL)
        signal.signal(STOP_SIGNAL, _ignore_in_main_thread)

    def _listen(self, receive_socket: socket.socket) -> None:
        while True:
            grace_period = GRACE_PERIOD_S if self._grace_seconds is None else self._grace_seconds
            left = self._end_signal_time + grace_period - time.monotonic()
            receive_socket.settimeout(max(left, 0.001) if self.end_signal else None)
            try:
                signum = receive_socket.recv(1)[0]
            except TimeoutError:
                signum = self.end_signal
            is_locked = self._lock.acquire(timeout=CLEANUP_TIMEOUT_S)  # else the main thread is blocked by the terminal
            self._handle(signum)
            if is_locked:
                self._lock.release()

    def _handle(self, signum: int) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT and self._is_prompting:
            return
        if signum == STOP_SIGNAL:
            self.is_stop_requested = True
        elif signum == CONTINUE_SIGNAL and self._is_prompting:  # wake the main thread, which waits for keys
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGWINCH)
        elif signum in END_SIGNALS and (
            not self._has_output or (self.end_signal and now > self._end_signal_time + REPEAT_WINDOW_S)
        ):
            self._exit_now(signum)
        elif signum in END_SIGNALS and not self.end_signal:
            self._end_signal_time, self.end_signal = now, signum
        self._wake_event.set()

    def _exit_now(self, signum: int) -> None:
        with suppress(RuntimeError):  # no thread is available
            cleanup = threading.Thread(target=self.run_cleanups, daemon=True)
            cleanup.start()
            cleanup.join(CLEANUP_TIMEOUT_S)
        os._exit(exit_code(signum))

    def run_cleanups(self) -> None:
        """Undo what the process has changed of the terminal, the last change first."""
        for undo in reversed(self._cleanups):
            with suppress(OSError, ValueError):  # the terminal or its stream has closed
                undo()


signals = SignalHandler()


def exit_code(signum: int) -> int:
    """Return the exit code that a shell reports for a process ended by the signal."""
    return 128 + signum


def is_in_foreground(stream: IO[str]) -> bool:
    """Return whether this process is in the foreground job of a stream's terminal; True without a terminal or job control."""
    try:
        return os.tcgetpgrp(stream.fileno()) in (0, os.getpgrp())  # 0: the foreground job is in another container
    except (AttributeError, OSError, ValueError):
        return True


def _ignore_in_main_thread(*_: object) -> None:
    """Do nothing, as the signal handler in the main thread; the listening thread gets the signal from the wakeup socket."""
