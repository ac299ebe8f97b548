"""What several commands need: models found and loaded with a bar, output and its end, a line on stderr. Knows no options."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import typer

from .decoder import NGRAM, SELF, SpeculativeDecoder, TreeMode, kinds_to_make
from .decoding import VERIFIERS
from .files import find, telling_how_to_restore
from .interrupts import signals
from .machine import cache
from .machine.threads import available_threads
from .output import printable

LOADING = "loading"
NONE = "none"  # as a draft: the target decodes alone
BAR_CELLS = 24
BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


def found(*names: str) -> list[str | Path]:
    """Where models of those names are; fetching one shows a bar of its own."""
    return [name if name in ("", SELF, NGRAM) else find(name) for name in names]


def decoder_of(
    sources: list[str | Path], tokenizer: str, quantize: str, threads: int, show: Callable[[str], None], **more: Any
) -> SpeculativeDecoder:
    """Of a target, a draft and a stage, or "" where there is none; shows how far their loading is."""
    with telling_how_to_restore():
        decoder = SpeculativeDecoder(
            sources[0],
            sources[1] or None,
            tokenizer or None,
            stage=sources[2] or None,
            n_threads=threads or None,
            quantize=quantize,
            progress=lambda name, share: show(progress_bar(name, share)),
            **more,
        )
    show(LOADING)
    return decoder


def check_arguments(prompt: str, top_p: float, seed: int, threads: int, verify: str, quantize: str, tree: str) -> None:
    """What Typer's own types do not check."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not valid UTF-8", param_hint="'-i' / '--prompt'") from None
    if math.isnan(top_p):
        raise typer.BadParameter(f"{top_p} is not a number from 0 to 1.", param_hint="'-p' / '--top-p'")
    if seed >= 2**63:
        raise typer.BadParameter(f"{seed} is not below 2^63.", param_hint="'-s' / '--seed'")
    options = ("verify", verify, tuple(VERIFIERS)), ("tree", tree, get_args(TreeMode))
    for name, value, choices in options:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.", param_hint=f"'--{name}'")
    if tree == "on" and verify == "block":
        raise typer.BadParameter("--verify block judges chains alone; leave one of the two out.", param_hint="'--tree'")
    try:
        kinds_to_make(quantize)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="'--quantize'") from None
    check_threads(threads)


def check_threads(threads: int) -> None:
    if threads > available_threads():
        raise typer.BadParameter(
            f"{threads} threads; this machine has cores for {available_threads()}.", param_hint="'-j' / '--threads'"
        )


def progress_bar(name: str, share: float) -> str:
    """How far the loading of a model is, in a line."""
    return f"loading {name} {'━' * round(BAR_CELLS * share):{BAR_CELLS}} {share:4.0%}"


@contextmanager
def loading(message: str = LOADING) -> Iterator[Callable[[str], None]]:
    """Around all that writes no output: a terminal shows the message meanwhile, and a disk's trouble is not the output's.

    Gives what shows another message instead.
    """
    is_shown = bool(message) and sys.stderr.isatty()
    room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if is_shown else 0
    width = n_compiled = 0

    def show(line: str) -> None:
        nonlocal width
        if is_shown:
            width = max(width, len(line))
            with suppress(OSError):  # the terminal has gone
                os.write(sys.stderr.fileno(), f"\r{line.ljust(width)[:room]}\r".encode(errors="replace"))

    def erase() -> None:
        show(" " * (width + len("^C")))

    def compiling(name: str) -> None:
        nonlocal n_compiled
        n_compiled += 1
        show(f"a first run compiles, 10 to 20 seconds: {name} ({n_compiled})")

    with signals.at_sudden_end(erase, do=lambda: show(message)):
        cache.on_compiling.append(compiling)
        try:
            yield show
        except OSError as error:
            raise ValueError(f"cannot load: {error.filename or 'a file'}: {error.strerror or error}") from None
        finally:
            cache.on_compiling.remove(compiling)
            erase()


@contextmanager
def writing() -> Iterator[None]:
    """Around all output: a reader that has seen enough ends it quietly, a full disk is told in one line."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # let the interpreter's last flush go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE if isinstance(error, BrokenPipeError) else complain(f"cannot write the output: {error.strerror}")
        raise typer.Exit(code) from None


def telling(show: Callable[[str], None], doing: str) -> Callable[[float], None]:
    """What shows a share that is done as a bar, with the time that is left; not so often that it would cost any."""
    begin, last = time.monotonic(), 0.0

    def tell(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + 0.1:
            last = now
            left = f", {(now - begin) * (1 - share) / share:.0f} s left" if share > 0.01 else ""
            show(f"{doing} {'━' * round(BAR_CELLS * share):{BAR_CELLS}} {share:4.0%}{left}")

    return tell


def complain(message: str) -> int:
    say(message)
    return 2


def say(message: str) -> None:
    """One line on stderr."""
    with suppress(OSError):
        print(f"specdec: {printable(' '.join(message.split()))}", file=sys.stderr)
