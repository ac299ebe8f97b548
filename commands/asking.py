"""What a command line asks for: words that may be a model, a prompt or a command, where the prompt is, what has no effect."""

import difflib
import os
import re
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..drafting.team import NGRAM, SELF
from ..readers.files import is_model_name
from .options import as_utf8
from .wiring import NONE, say

DEFAULT_PROMPT = "Once upon a time"
STDIN = "-"  # as a prompt
WAIT_SECONDS = 0.5  # for a pipe, before somebody is told what it waits for
LIKE_A_COMMAND = 0.75  # of the letters: rather a slip than a prompt
Command: Any = next(kind for kind in TyperGroup.__mro__ if kind.__name__ == "Command")


NUMERALS = {int: re.compile("[0-9]{1,18}"), float: re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")}


class AsItStands:
    """In the place of a parameter's `process_value`: defaults, words and plain numerals within the limits are what they say. All
    else is Typer's to judge, which imports pydantic for it, 0.1 s of every start."""

    def __init__(self, param: Any) -> None:
        self._param, self.judge = param, param.process_value

    def __call__(self, context: Any, value: Any) -> Any:
        param = self._param
        kind, limits = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        if value is None and not param.required:
            value = () if param.multiple or param.nargs == -1 else None
        elif isinstance(value, str) and kind in NUMERALS and NUMERALS[kind].fullmatch(value):
            number = kind(value)
            if (limits.min is not None and number < limits.min) or (limits.max is not None and number > limits.max):
                return self.judge(context, value)
            value = number
        elif type(value) is not kind or kind not in (str, *NUMERALS):
            return self.judge(context, value)
        return param.callback(context, param, value) if param.callback else value


def _seen_to(params: list[Any]) -> list[Any]:
    """The options that Typer adds itself stand among those of the output, which come last, and take no value, as other flags."""
    for param in params:
        if not getattr(param, "rich_help_panel", "") and getattr(param, "is_flag", False):
            param.rich_help_panel, param.metavar = "Output", ""
        if hasattr(param, "type_descriptor") and not isinstance(param.process_value, AsItStands):  # older Typers have Click judge
            param.process_value = AsItStands(param)
    return params


class OneCommand(TyperCommand):
    """A command with a name."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _seen_to(super().get_params(ctx))


class Commands(TyperGroup):
    """Commands; and where the first word is none, a text's own words, which the context's `args` are then, among options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = self.make_parser(ctx).parse_args(args=list(args))[1][:1]
        if not first or first[0] in self.commands:
            return list(super().parse_args(ctx, args))
        ctx.allow_interspersed_args = True
        return list(Command.parse_args(self, ctx, args))

    def get_params(self, ctx: Any) -> list[Any]:
        return _seen_to(super().get_params(ctx))


def are_given(context: Any, *names: str) -> list[str]:
    """Those parameters that stand on the command line, as somebody would type them; all of them, where none are named."""
    return [
        max(param.opts, key=len)
        for param in context.command.params
        if (not names or param.name in names) and getattr(context.get_parameter_source(param.name), "name", "") == "COMMANDLINE"
    ]


def model_and_prompt(words: Sequence[str], commands: Sequence[str]) -> tuple[str | None, str | None]:
    """What the words of a command line are: a model, a prompt, both or neither; llama2.c has the model first."""
    models = [word for word in words if is_model_name(word)]
    texts = [as_utf8(word) for word in words if word not in models]
    close = difflib.get_close_matches(texts[0].lower(), commands, 1, LIKE_A_COMMAND) if len(words) == len(texts) == 1 else []
    if close:
        raise typer.BadParameter(f"no command {texts[0]!r}; did you mean {close[0]!r}? A prompt of that word is -i {texts[0]}")
    if len(models) > 1 or len(texts) > 1:
        what = "name the draft with -d" if len(models) > 1 else "put quotes around a prompt of several words, or name it with -i"
        raise typer.BadParameter(f"{' '.join(words)!r} are {len(words)} words; {what}")
    return models[0] if models else None, texts[0] if texts else None


def prompt_of(prompt: str | None, file: str, word: str | None) -> str:
    """The prompt, wherever it is: an option, a file, a word, a pipe; else the usual one. A line break at its end goes."""
    ways = {"-i": prompt, "-f": file or None, repr(word): word}
    given = [way for way, value in ways.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} are two prompts; leave one out")
    if file:
        try:
            return _text_of(Path(file).read_bytes(), file)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    if prompt == STDIN:
        return _read_stdin()
    if given:
        return prompt if prompt is not None else str(word)
    return (_is_piped() and _read_stdin()) or DEFAULT_PROMPT


def draft_name(name: str) -> str:
    """As it was given, but that self, ngram and none may have capitals."""
    lower = name.lower()
    return lower if lower in (SELF, NGRAM, NONE) and not Path(name).exists() else name


def tell_what_has_no_effect(context: Any, has_draft: bool, has_model: bool, as_json: bool, plain: bool, greedy: bool) -> None:
    """A line on stderr for the options that were given for nothing."""
    reasons = (
        ("without a draft", not has_draft, ("gamma", "verify")),
        ("without a draft that is a model", not has_model, ("tree",)),
        ("with --json", as_json, ("pace", "plain", "stats")),
        ("with --plain", plain and not as_json, ("pace",)),
        ("at temperature 0", greedy, ("top_k", "top_p")),
    )
    idle = [(why, names) for why, holds, options in reasons if holds and (names := are_given(context, *options))]
    if idle:
        say("; ".join(f"{', '.join(names)}: no effect {why}" for why, names in idle))


def _is_piped() -> bool:
    with suppress(OSError):
        mode = os.fstat(0).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False


def tell_if_nothing_comes(advice: str) -> None:
    """A line on stderr where stdin is a pipe that is silent."""
    with suppress(OSError, ValueError):  # Windows has no such look at a pipe
        if not sys.stdin.isatty() and not select.select([0], [], [], WAIT_SECONDS)[0]:
            say(f"waiting for a prompt from stdin; {advice}")


def _read_stdin() -> str:
    tell_if_nothing_comes("-i TEXT gives one")
    try:
        with os.fdopen(0, "rb", closefd=False) as stdin:
            return _text_of(stdin.read(), "stdin")
    except OSError as error:
        raise ValueError(f"cannot read the prompt from stdin: {error.strerror}") from None


def _text_of(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not valid UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")
