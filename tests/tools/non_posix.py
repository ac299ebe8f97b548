"""Run a program as on a system that is not POSIX: `python tests/tools/non_posix.py PROGRAM ...`.

Removes what Windows' Python does not have before anything is imported: modules, functions, signals, /proc and /sys. Windows
cannot replace a file that another process has open; here no existing file can be replaced.
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
OS_NAMES = (
    "fork", "forkpty", "register_at_fork", "getpgrp", "getpgid", "tcgetpgrp", "tcsetpgrp", "killpg", "setsid", "sysconf", "nice",
    "sched_getaffinity", "sched_setaffinity", "sched_yield", "getuid", "geteuid", "getloadavg", "mkfifo", "WNOHANG", "wait4",
    "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "pread", "preadv", "posix_fallocate", "fchmod", "chown", "statvfs",
)  # fmt: skip
SIGNAL_NAMES = (
    "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGCONT", "SIGWINCH", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGCHLD",
    "SIGTTIN", "SIGTTOU", "SIGSTOP", "alarm", "setitimer", "pthread_kill", "pthread_sigmask", "sigwait", "siginterrupt",
)  # fmt: skip
MMAP_NAMES = ("MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MADV_NOHUGEPAGE", "MADV_DONTNEED", "PROT_READ", "PROT_WRITE")


class MissingModuleFinder(importlib.abc.MetaPathFinder):
    """An import hook that raises an error for the modules that Windows does not have."""

    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide_system_files(real):
    """Return the function with /proc and /sys hidden."""

    def guarded(path, *args, **kwargs):
        if str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *args, **kwargs)

    return guarded


def refuse_replacing(real):
    """Return the function such that it does not replace existing files."""

    def guarded(source, target, **more):
        if Path(target).exists():
            raise PermissionError(
                13, "The process cannot access the file because it is being used by another process", str(target)
            )
        return real(source, target, **more)

    return guarded


def make_msvcrt():
    """Return a module with the byte locks of Windows' Python."""
    module, lock = types.ModuleType("msvcrt"), fcntl.lockf
    module.LK_NBLCK, module.LK_UNLCK = 2, 0
    commands = {module.LK_NBLCK: fcntl.LOCK_EX | fcntl.LOCK_NB, module.LK_UNLCK: fcntl.LOCK_UN}
    module.locking = lambda file, mode, n: lock(file, commands[mode], n, os.lseek(file, 0, os.SEEK_CUR))
    return module


def remove_posix():
    sys.modules["msvcrt"] = make_msvcrt()
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, MissingModuleFinder())
    for module, names in ((os, OS_NAMES), (signal, SIGNAL_NAMES), (mmap, MMAP_NAMES)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.open = io.open = hide_system_files(builtins.open)
    os.replace = refuse_replacing(os.replace)


if __name__ == "__main__":
    for name in ("asyncio", "multiprocessing", "subprocess", "tempfile"):  # on Windows they do not need what is removed here
        importlib.import_module(name)
    remove_posix()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
