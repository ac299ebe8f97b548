"""The Typer app with all commands, and the mapping of errors to exit codes."""

import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from inspect import getdoc
from typing import Any, cast

import typer

from specdec.cli import batch, bench, chat, compile, generate, models, race, serve, sweep
from specdec.cli.common_options import Request, get_given_options
from specdec.cli.output_errors import BROKEN_PIPE_EXIT_CODE, guard_output, print_message
from specdec.cli.typer_commands import CommandGroup, Subcommand, format_usage_error
from specdec.loaders import CheckpointError, CheckpointWarning
from specdec.tokenizer import TokenizerError
from specdec.ui.signals import exit_code, signals

app = typer.Typer(
    cls=CommandGroup,
    subcommand_metavar="[PROMPT] | COMMAND ...",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The request of each command, and the function that runs it.
COMMANDS: dict[str, tuple[type[Request], Callable[[Any], None]]] = {
    "race": (race.RaceRequest, race.run),
    "chat": (chat.ChatRequest, chat.run),
    "serve": (serve.ServeRequest, serve.run),
    "batch": (batch.BatchJobRequest, batch.run),
    "sweep": (sweep.SweepRequest, sweep.run),
    "models": (models.ModelsRequest, models.run),
    "bench": (bench.BenchRequest, bench.run),
    "compile": (compile.CompileRequest, compile.run),
}
app.callback(invoke_without_command=True, help=getdoc(generate.run))(generate.TextRequest)
for _name, (_request_class, _run) in COMMANDS.items():
    app.command(_name, cls=Subcommand, help=getdoc(_run))(_request_class)
COMPLETION_VARIABLE = "_COMPLETE"  # suffix of the variable that a shell's completion sets; the program's name comes first
# Overrides of the terminal's size. POSIX treats anything but a number from 1 on as unset; Rich and Typer fail on it.
SIZE_VARIABLES = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
NO_THREAD_MESSAGE = "can't start new thread"  # Python's own message
UsageError = cast(type[Exception], next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"))


def main() -> None:
    """Run the command line and exit; errors that the user can fix print one line on stderr and exit with code 2."""
    _prepare_output()
    code: Any = 2
    try:
        with guard_output():
            code = _run_command()
    except typer.Exit as done:
        code = done.exit_code
    except UsageError as error:
        print_message(format_usage_error(error))
    except (CheckpointError, TokenizerError, ValueError) as error:
        print_message(str(error))
    except MemoryError as error:
        reason = f"not enough memory: {error}".rstrip(": ")
        print_message(f"{reason}; use a smaller model or a shorter output (--max-tokens)")
    except RuntimeError as error:
        if NO_THREAD_MESSAGE not in str(error):
            raise
        print_message(f"{error}: the limit on memory or processes is reached (ulimit -v, ulimit -u); raise it, or use -j 1")
    except SystemExit as end:
        # Typer exits with 1 for shell completion; Rich exits with 1 when the reader of its output has closed the pipe.
        code = BROKEN_PIPE_EXIT_CODE if end.code == 1 and COMPLETION_VARIABLE not in " ".join(os.environ) else end.code
    sys.exit(exit_code(signals.end_signal) if signals.end_signal else code or 0)


def _prepare_output() -> None:
    """Make the streams accept all text, remove invalid terminal sizes, and show warnings in one line each."""
    # A closed stream is None; its output is dropped. Undecodable file names and non-ASCII output still print on any terminal.
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for name in SIZE_VARIABLES:
        if not re.fullmatch("0*[1-9][0-9]{0,3}", os.environ.get(name, "1")):
            del os.environ[name]
    warnings.showwarning = lambda message, *_, **__: print_message(str(message))
    warnings.filterwarnings("always", category=CheckpointWarning)


def _run_command() -> Any:
    """Parse the command line and run its command; return the exit code, which Typer's own options, such as --help, set."""
    request = app(prog_name="specdec", standalone_mode=False)
    if not isinstance(request, Request):
        return request
    context: Any = request.context
    if context.parent and (misplaced := ", ".join(get_given_options(context.parent).values())):
        name = context.info_name
        advice = f"put them after {name}, or use -i {name} if it is the prompt"
        print_message(f"options before {name} have no effect: {misplaced}; {advice}")
    run = dict(COMMANDS.values()).get(type(request), generate.run)
    run(request)
    return 0
