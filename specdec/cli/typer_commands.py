"""Typer commands with hints for wrong command lines: values, and words among options."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from specdec.cli.option_fields import PANELS
from specdec.cli.suggestions import (
    explain_extra_word,
    explain_foreign_option,
    explain_invalid_number,
    explain_unknown_command,
)
from specdec.loaders.model_paths import is_model_name

T = TypeVar("T")
Command: Any = next(base for base in TyperGroup.__mro__ if base.__name__ == "Command")


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
    if value is None and (param.multiple or param.nargs == -1):
        value = ()
    elif number_type in (int, float) and isinstance(value, str):
        least = -math.inf if limits.min is None else limits.min
        most = math.inf if limits.max is None else limits.max
        number = None
        with suppress(ValueError):
            number = number_type(value)
        if number is None or not least <= number <= most:  # not a number is not within any limits
            raise ValueError(explain_invalid_number(param, context, value))
        value = number
    return param.callback(context, param, value) if param.callback else value


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
            typer.BadParameter: A word is not taken by the command.
        """
        _parse_words(self, ctx, args)
        ctx.allow_extra_args = True  # --help still works behind extra words
        words = list(super().parse_args(ctx, args))
        if words and not ctx.resilient_parsing:
            raise typer.BadParameter(explain_extra_word(self, words[0], is_model_name(words[0])))
        return words


class CommandGroup(CommandParameters, TyperGroup):
    """The group of all commands, which also parses the command without a name.

    If the first word is not the name of a command, the words go to the context's `args`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command's name, or the prompt and options of the command without a name, and return the arguments left.

        The words "help" and "version" are treated as --help and --version.

        Raises:
            typer.BadParameter: The first word is a misspelled command.
        """
        words = _parse_words(self, ctx, args)
        if words[:1] in (["help"], ["version"]) and args == words:
            known = [word for word in words[1:2] if word in self.commands]
            args = ["--version"] if words == ["version"] else [*known, "--help"]
        elif words and words[0] not in self.commands:
            is_word = not is_model_name(words[0]) and " " not in words[0] and not ctx.resilient_parsing
            if is_word and (error := explain_unknown_command(words, list(self.commands))):
                raise typer.BadParameter(error)
            ctx.allow_interspersed_args = True
            return list(Command.parse_args(self, ctx, args))
        return list(super().parse_args(ctx, args))


def _parse_words(command: Any, ctx: Any, args: list[str]) -> list[str]:
    """Return the positional words of a command line.

    Raises:
        typer.BadParameter: An option is one of llama.cpp, or -d is given twice; Typer would take the last one.
    """
    known = {name for param in command.params for name in param.opts}
    if error := explain_foreign_option([argument for argument in args if argument not in known]):
        raise typer.BadParameter(error)
    _, words, options = command.make_parser(ctx).parse_args(args=list(args))
    if [option.name for option in options].count("draft") > 1:
        raise typer.BadParameter("-d is given twice; expected one draft; use --stage NAME for the draft of a draft")
    return list(words)


def parse_list(option: str, text: str, parse: Callable[[str], T], is_valid: Callable[[T], bool], expected: str) -> list[T]:
    """Parse a comma-separated list into its distinct values, in order.

    Args:
        option: Name of the option, for the error.
        text: The list.
        parse: Converts one item; may raise ValueError.
        is_valid: Returns whether a value is allowed.
        expected: Description of the allowed values, for the error.

    Raises:
        ValueError: An item cannot be parsed or is not allowed.
    """
    try:
        values = list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        if all(map(is_valid, values)):
            return values
    except ValueError:
        pass
    raise ValueError(f"{option} is {text!r}; expected {expected}, separated by commas")
