"""Typer commands with hints for wrong command lines: values, misspelled commands, and words among options."""

import difflib
import math
import shlex
from contextlib import suppress
from functools import partial
from typing import Any

from typer.core import TyperCommand, TyperGroup

from specdec.argument_checks import shorten
from specdec.cli.option_fields import PANELS, decode_argument
from specdec.loaders.model_paths import is_model_name

Command: Any = next(base for base in TyperGroup.__mro__ if base.__name__ == "Command")
MIN_COMMAND_SIMILARITY = 0.75  # above it a word is a misspelled command rather than a prompt
# ollama's commands
FOREIGN_COMMANDS = {"run": "chat", "pull": "models pull", "rm": "models rm", "list": "models", "ls": "models"}
TEXT_METAVARS = ("TEXT", "REGEX")  # of options that are not names of files or models
TYPE_NAMES = {int: "a whole number", float: "a number"}


def convert_value(param: Any, context: Any, value: Any) -> Any:
    """Return a parameter's value as Typer does, but without pydantic, whose import takes 0.15 s of every start.

    Args:
        param: Typer's parameter.
        context: Typer's context.
        value: The text of the command line, or the default.

    Raises:
        ValueError: The value is not a number within the parameter's limits.
    """
    number_type, limits = param.type_descriptor.annotation, param.type_descriptor.parameter_info
    if param.metavar in TEXT_METAVARS:
        return decode_argument(value)
    if number_type not in TYPE_NAMES or not isinstance(value, str):
        return param.callback(context, param, value) if param.callback else value  # of Typer's own flags
    least = -math.inf if limits.min is None else limits.min
    most = math.inf if limits.max is None else limits.max
    with suppress(ValueError):
        number = number_type(value)
        if least <= number <= most:  # not a number is not within any limits
            return number
    minimum = "" if limits.min is None else f", {least:g} or more"
    span = minimum if limits.max is None else f" from {least:,.10g} to {most:,.10g}"
    name, expected = max(param.opts, key=len), TYPE_NAMES[number_type]
    raise ValueError(f"{name} is {shorten(value, repr)}; expected {expected}{span} ({param.help})")


class CommandParameters:
    """A mixin of commands whose parameters are converted by `convert_value` and sorted by the panels of the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's parameters, with Typer's own flags in the output panel."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if not getattr(param, "rich_help_panel", "") and getattr(param, "is_flag", False):
                param.rich_help_panel, param.metavar = "Output", ""
            if hasattr(param, "type_descriptor"):  # older Typers leave validation to Click
                param.process_value = partial(convert_value, param)
        return sorted(params, key=lambda param: PANELS.index(getattr(param, "rich_help_panel", None) or PANELS[0]))


class Subcommand(CommandParameters, TyperCommand):
    """A Typer command with a name, such as `specdec chat`, that rejects extra words with a hint."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's arguments into the context and return the words that are left.

        Raises:
            ValueError: A word is not taken by the command.
        """
        _parse_words(self, ctx, args)
        ctx.allow_extra_args = True  # --help still works behind extra words
        words = list(super().parse_args(ctx, args))
        if words and not ctx.resilient_parsing:
            raise ValueError(f"unexpected word {words[0]!r}; use -m NAME for a model; --help lists all options")
        return words


class CommandGroup(CommandParameters, TyperGroup):
    """The group of all commands, which also parses the command without a name.

    If the first word is not the name of a command, the words go to the context's `args`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command's name, or the prompt and options of the command without a name, and return the arguments left.

        The word "help" is treated as --help.

        Raises:
            ValueError: The first word is a misspelled command, or one of ollama.
        """
        words = _parse_words(self, ctx, args)
        if words[:1] == ["help"] and args == words:
            args = words = [*words[1:2], "--help"]
        if not words or words[0] in self.commands:
            return list(super().parse_args(ctx, args))
        first = words[0]
        is_prompt = ctx.resilient_parsing or " " in first or is_model_name(first)
        similar = next(iter(difflib.get_close_matches(first.lower(), self.commands, 1, MIN_COMMAND_SIMILARITY)), "")
        command = FOREIGN_COMMANDS.get(first, similar)
        if command and not is_prompt:
            prompt = shlex.quote(" ".join(words))
            raise ValueError(f"unknown command {first!r}; did you mean 'specdec {command}'? If it is the prompt, use -i {prompt}")
        ctx.allow_interspersed_args = True
        return list(Command.parse_args(self, ctx, args))


def _parse_words(command: Any, ctx: Any, args: list[str]) -> list[str]:
    """Return the positional words of a command line.

    Raises:
        ValueError: -d is given twice; Typer would take the last one.
    """
    _, words, given = command.make_parser(ctx).parse_args(args=list(args))
    if [param.name for param in given].count("draft") > 1:
        raise ValueError("-d is given twice; expected one draft; use --stage NAME for the draft of a draft")
    return list(words)


def format_usage_error(error: Any) -> str:
    """Return the message for an error that Typer raised: what is wrong with the command line and how to fix it."""
    if hasattr(error, "possibilities"):
        options = [option for param in error.ctx.command.params for option in param.opts]
        longer = [option for option in options if option.startswith(error.option_name)]  # an abbreviation is not similar
        error.possibilities = longer or error.possibilities
    return f"{error.format_message().removeprefix('Invalid value: ').rstrip('.')}; --help lists all options"
