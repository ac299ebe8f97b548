"""Runs a program as on a system that is not POSIX: `python tests/tools/non_posix.py PROGRAM ...`, on this one.

What Windows' Python has not is taken away before anything is imported: modules, functions, signals, /proc and /sys; a file that
is there cannot be replaced while somebody has it open, as there, which is played by refusing all.
"""

import builtins
import fcntl
import importlib
import importlib.abc
import io
import mmap
import os
import runpy
import signal
import sys
import types
from pathlib import Path

MODULES = ("termios", "tty", "fcntl", "resource", "pwd", "grp", "pty", "readline", "syslog")
OF_OS = (
    "fork", "forkpty", "register_at_fork", "getpgrp", "getpgid", "tcgetpgrp", "tcsetpgrp", "killpg", "setsid", "sysconf", "nice",
    "sched_getaffinity", "sched_setaffinity", "sched_yield", "getuid", "geteuid", "getloadavg", "mkfifo", "WNOHANG", "wait4",
    "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "pread", "preadv", "posix_fallocate", "fchmod", "chown", "statvfs",
)  # fmt: skip
OF_SIGNAL = (
    "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGCONT", "SIGWINCH", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGCHLD",
    "SIGTTIN", "SIGTTOU", "SIGSTOP", "alarm", "setitimer", "pthread_kill", "pthread_sigmask", "sigwait", "siginterrupt",
)  # fmt: skip
OF_MMAP = ("MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MADV_NOHUGEPAGE", "MADV_DONTNEED", "PROT_READ", "PROT_WRITE")


class Missing(importlib.abc.MetaPathFinder):
    """Finds nothing of what is not there."""

    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_files(real):
    """That function, for which /proc and /sys are not there."""

    def guarded(path, *args, **kwargs):
        if str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *args, **kwargs)

    return guarded


def in_use(real):
    """That function, which replaces nothing that is there."""

    def guarded(source, target, **more):
        if Path(target).exists():
            raise PermissionError(
                13, "The process cannot access the file because it is being used by another process", str(target)
            )
        return real(source, target, **more)

    return guarded


def msvcrt():
    """Locks of bytes as Windows' Python has them."""
    module, lock = types.ModuleType("msvcrt"), fcntl.lockf
    module.LK_NBLCK, module.LK_UNLCK = 2, 0
    kinds = {module.LK_NBLCK: fcntl.LOCK_EX | fcntl.LOCK_NB, module.LK_UNLCK: fcntl.LOCK_UN}
    module.locking = lambda file, kind, n: lock(file, kinds[kind], n, os.lseek(file, 0, os.SEEK_CUR))
    return module


def take_away():
    sys.modules["msvcrt"] = msvcrt()
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Missing())
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL), (mmap, OF_MMAP)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.open = io.open = without_files(builtins.open)
    os.replace = in_use(os.replace)


if __name__ == "__main__":
    for name in ("asyncio", "multiprocessing", "subprocess", "tempfile"):  # others there, which need here what is taken away
        importlib.import_module(name)
    take_away()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
