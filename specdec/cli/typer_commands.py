"""Typer commands built from request dataclasses, and the parsing of words among options."""

import re
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from specdec.cli.common_options import RequestT
from specdec.cli.option_fields import get_option_info
from specdec.cli.suggestions import explain_extra_word, explain_foreign_option, explain_unknown_command
from specdec.loaders.model_paths import is_model_name

T = TypeVar("T")
Command: Any = next(base for base in TyperGroup.__mro__ if base.__name__ == "Command")
NUMBER_PATTERNS = {int: re.compile("[0-9]{1,18}"), float: re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")}


def build_request(request_class: type[RequestT], context: Any, values: dict[str, Any]) -> RequestT:
    """Return the request object of a command line that Typer has parsed.

    Args:
        request_class: Class of the request.
        context: Typer's context.
        values: Values of the request's fields.

    Raises:
        ValueError: A value is invalid.
    """
    given = {
        param.name: max(param.opts, key=len)
        for param in context.command.params
        if getattr(context.get_parameter_source(param.name), "name", "") == "COMMANDLINE"
    }
    return request_class(**values, given=given, words=tuple(context.args), command=context.invoked_subcommand or "")


def make_command(request_class: type[RequestT], run: Callable[[RequestT], None]) -> Callable[..., None]:
    """Return a function for Typer that calls `run` with a request; its parameters are the options of the request class."""

    def command(context: typer.Context, **values: Any) -> None:
        run(build_request(request_class, context, values))

    fields: dict[str, Any] = {name: request_class.__dataclass_fields__[name] for name in request_class.option_names.split()}
    hints: dict[str, Any] = {name: Annotated[field.type, get_option_info(request_class, name)] for name, field in fields.items()}
    hints["context"] = typer.Context
    defaults = {name: field.default for name, field in fields.items()} | {"context": Parameter.empty}
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name]) for name in hints]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__, command.__doc__ = hints, run.__doc__
    return command


class FastProcessValue:
    """A fast replacement of a Typer parameter's `process_value` for defaults, strings, and plain numbers within the limits.

    All other values go to Typer, which imports pydantic to validate them: 0.1 s of every start.
    """

    def __init__(self, param: Any) -> None:
        """Remember the parameter, and its own `process_value` as the fallback."""
        self._param, self.fallback = param, param.process_value

    def __call__(self, context: Any, value: Any) -> Any:
        """Convert and check a command-line value of the parameter, call the parameter's callback, and return the result."""
        param = self._param
        value_type, limits = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        if value is None and not param.required:
            value = () if param.multiple or param.nargs == -1 else None
        elif isinstance(value, str) and value_type in NUMBER_PATTERNS and NUMBER_PATTERNS[value_type].fullmatch(value):
            number = value_type(value)
            if (limits.min is not None and number < limits.min) or (limits.max is not None and number > limits.max):
                return self.fallback(context, value)
            value = number
        elif type(value) is not value_type or value_type not in (str, *NUMBER_PATTERNS):
            return self.fallback(context, value)
        return param.callback(context, param, value) if param.callback else value


class FastParameters:
    """A mixin of commands whose parameters convert their values as `FastProcessValue` does."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's parameters, with faster conversion, and with Typer's own flags in the output panel."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if not getattr(param, "rich_help_panel", "") and getattr(param, "is_flag", False):
                param.rich_help_panel, param.metavar = "Output", ""
            # older Typers leave validation to Click
            if hasattr(param, "type_descriptor") and not isinstance(param.process_value, FastProcessValue):
                param.process_value = FastProcessValue(param)
        return params


class Subcommand(FastParameters, TyperCommand):
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


class CommandGroup(FastParameters, TyperGroup):
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
