"""A command line becomes a request: Typer's commands, whose options are a request's fields, and words among options."""

import re
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from specdec.cli.options import option_of
from specdec.cli.request import Asked
from specdec.cli.suggestions import no_command, strange_option, word_too_many
from specdec.loaders.model_lookup import is_model_name

T = TypeVar("T")
Command: Any = next(kind for kind in TyperGroup.__mro__ if kind.__name__ == "Command")
NUMERALS = {int: re.compile("[0-9]{1,18}"), float: re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")}


def request_of(kind: type[Asked], context: Any, values: dict[str, Any]) -> Asked:
    """What a parsed command line asks for."""
    given = {
        param.name: max(param.opts, key=len)
        for param in context.command.params
        if getattr(context.get_parameter_source(param.name), "name", "") == "COMMANDLINE"
    }
    return kind(**values, given=given, words=tuple(context.args), command=context.invoked_subcommand or "")


def taking(kind: type[Asked], run: Callable[[Asked], None]) -> Callable[..., None]:
    """What runs as Typer wants it: a function whose parameters are the fields that this kind of request offers."""

    def command(context: typer.Context, **values: Any) -> None:
        run(request_of(kind, context, values))

    fields: dict[str, Any] = {name: kind.__dataclass_fields__[name] for name in kind.offers.split()}
    hints: dict[str, Any] = {name: Annotated[field.type, option_of(kind, name)] for name, field in fields.items()}
    hints["context"] = typer.Context
    defaults = {name: field.default for name, field in fields.items()} | {"context": Parameter.empty}
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name]) for name in hints]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__, command.__doc__ = hints, run.__doc__
    return command


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


class OneCommand(TyperCommand):
    """A command with a name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _words_of(self, ctx, args)
        ctx.allow_extra_args = True  # until whoever asks for help has it
        words = list(super().parse_args(ctx, args))
        if words and not ctx.resilient_parsing:
            raise typer.BadParameter(word_too_many(self, words[0], is_model_name(words[0])))
        return words

    def get_params(self, ctx: Any) -> list[Any]:
        return _seen_to(super().get_params(ctx))


class Commands(TyperGroup):
    """Commands; and where the first word is none, a text's own words, which the context's `args` are then, among options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = _words_of(self, ctx, args)
        if words[:1] in (["help"], ["version"]) and args == words:
            known = [word for word in words[1:2] if word in self.commands]
            args = ["--version"] if words == ["version"] else [*known, "--help"]
        elif words and words[0] not in self.commands:
            is_word = not is_model_name(words[0]) and " " not in words[0] and not ctx.resilient_parsing
            if is_word and (flaw := no_command(words, args, list(self.commands))):
                raise typer.BadParameter(flaw)
            ctx.allow_interspersed_args = True
            return list(Command.parse_args(self, ctx, args))
        return list(super().parse_args(ctx, args))

    def get_params(self, ctx: Any) -> list[Any]:
        return _seen_to(super().get_params(ctx))


def _words_of(command: Any, ctx: Any, args: list[str]) -> list[str]:
    """What stands on a command line beside options. Refuses a second -d, of which Typer would take the last."""
    if (told := strange_option(args)) and not ctx.resilient_parsing:
        raise typer.BadParameter(told)
    _, words, options = command.make_parser(ctx).parse_args(args=list(args))
    if [option.name for option in options].count("draft") > 1:
        raise typer.BadParameter("-d names one draft; what drafts for it is --stage NAME")
    return list(words)


def _seen_to(params: list[Any]) -> list[Any]:
    """The options that Typer adds itself stand among those of the output, which come last, and take no value, as other flags."""
    for param in params:
        if not getattr(param, "rich_help_panel", "") and getattr(param, "is_flag", False):
            param.rich_help_panel, param.metavar = "Output", ""
        if hasattr(param, "type_descriptor") and not isinstance(param.process_value, AsItStands):  # older Typers have Click judge
            param.process_value = AsItStands(param)
    return params


def several(option: str, told: str, read: Callable[[str], T], fits: Callable[[T], bool], right: str) -> list[T]:
    """The values of a list that are parted by commas, each once. Raises ValueError."""
    try:
        values = list(dict.fromkeys(read(part.strip()) for part in told.split(",")))
        if all(map(fits, values)):
            return values
    except ValueError:
        pass
    raise ValueError(f"{option} is {told!r}; expected {right}, parted by commas")
