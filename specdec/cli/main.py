"""The command line: the app, its commands, exit codes. Knows no arrays and no formats."""

import io
import os
import re
import sys
import warnings
from typing import Any, cast

import typer

from specdec.cli import bench, chat, generate, models, race, serve, sweep
from specdec.cli.exits import BROKEN_PIPE, complain, say, writing
from specdec.cli.options import in_options
from specdec.cli.parser import Commands, OneCommand, taking
from specdec.cli.suggestions import no_numeral, no_option
from specdec.loaders import CheckpointError, CheckpointWarning
from specdec.tokenizer import TokenizerError
from specdec.ui.signals import exit_code, signals

app = typer.Typer(
    cls=Commands,
    subcommand_metavar="[PROMPT] | COMMAND ...",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback(invoke_without_command=True)(taking(generate.TextRequest, generate.write))
app.command("race", cls=OneCommand)(taking(race.RaceRequest, race.run))
app.command("chat", cls=OneCommand)(taking(chat.ChatRequest, chat.run))
app.command("serve", cls=OneCommand)(taking(serve.ServeRequest, serve.run))
app.command("sweep", cls=OneCommand)(taking(sweep.SweepRequest, sweep.run))
app.command("models", cls=OneCommand)(taking(models.ListRequest, models.run))
app.command("bench", cls=OneCommand)(taking(bench.BenchRequest, bench.run))
COMPLETING = "_COMPLETE"  # at the end of what a shell says it in, behind the program's name
# how wide and high a terminal is to be taken for: by POSIX what is no number from 1 counts as not set; Rich and Typer stumble
SIZES = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
NO_THREAD = "can't start new thread"  # as Python says it
UsageError = cast(type[Exception], next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"))


def main() -> None:
    """One line on stderr and exit code 2 for whatever the person at the keyboard can mend."""
    # a closed stream is None: what goes there is lost; a file name of no encoding, or a story in an ASCII terminal, still prints
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for name in SIZES:
        if not re.fullmatch("0*[1-9][0-9]{0,3}", os.environ.get(name, "1")):
            del os.environ[name]
    warnings.showwarning = _show_warning
    warnings.filterwarnings("always", category=CheckpointWarning)
    try:
        with writing():
            code = app(prog_name="specdec", standalone_mode=False)
    except typer.Exit as done:
        code = done.exit_code
    except UsageError as error:
        code = complain(usage(error))
    except (CheckpointError, TokenizerError, ValueError) as error:
        code = complain(in_options(str(error)))
    except MemoryError as error:
        reason = f"not enough memory{f' ({error})' if str(error) else ''}"
        code = complain(f"{reason}; a smaller model, or a shorter text (--max-tokens), takes less")
    except RuntimeError as error:
        if NO_THREAD not in str(error):
            raise
        code = complain(f"{error}: a limit of memory or processes is reached (ulimit -v, ulimit -u); raise it, or use -j 1")
    except SystemExit as end:
        # Typer's, where a shell asks what completes a word; Rich's, where the reader of its output has left
        code = BROKEN_PIPE if end.code == 1 and COMPLETING not in " ".join(os.environ) else end.code
    sys.exit(exit_code(signals.asked) if signals.asked else code or 0)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning of ours in a line, as everything that the person at the keyboard should know; others as Python does."""
    if issubclass(category, CheckpointWarning):
        say(str(message))
    else:
        _show_as_python_does(message, category, *where, **more)


_show_as_python_does = warnings.showwarning


def usage(error: Exception) -> str:
    """What is wrong with a command line, and what would be right."""
    if name := getattr(error, "option_name", "") if hasattr(error, "possibilities") else "":
        return no_option(name, list(getattr(error, "possibilities", None) or []), error.ctx)  # type: ignore[attr-defined]
    message: str = error.format_message()  # type: ignore[attr-defined]
    return no_numeral(error) or message.removeprefix("Invalid value: ")
