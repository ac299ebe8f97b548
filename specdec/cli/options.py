"""Options of the command line: a request's fields, with the names, help and limits that Typer wants. Knows no request."""

import os
import re
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Any

import typer

OPTION = "option"  # in a field's metadata
# what the library's errors call by its parameters, as a command line has it
OF_PARAMETERS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "stage", "template", "quantize", "kv", "pack", "gamma", "verify", "tree", "threads", "prompt", "stop", "max_tokens",
        "temperature", "top_p", "top_k", "seed", "prompts", "shape", "system", "min_p", "presence_penalty", "frequency_penalty",
        "logit_bias",
    )
} | {"target": "-m", "draft": "-d", "tokenizer": "-z", "repetition_penalty": "--repeat-penalty"}  # fmt: skip
_PARAMETER = "|".join(OF_PARAMETERS)
_TOLD = re.compile(rf"\b({_PARAMETER})=(?:\.\.\.|'([^']*)')|(?:^|(?<=, and ))({_PARAMETER})(?= (?:of \d+ )?(?:is|holds) )")


def option(default: Any, *names: str, group: str, help: str, **more: Any) -> Any:
    """A field that is an option of those names; group: the panel of the help that it stands in."""
    told = typer.Option(*names, help=help, rich_help_panel=group, **more)
    return field(default=default, metadata={OPTION: told})


# the panels of the help, each a way to say an option that stands in it
PANELS = "Most used", "Text", "Models", "Model", "Sampling", "Speculation", "Measuring", "Server", "Machine", "Output"
most_used, of_text, of_models, of_model, of_sampling, of_speculation, of_measuring, of_server, of_machine, of_output = (
    partial(option, group=panel) for panel in PANELS
)


def flag(*names: str, group: str, help: str) -> Any:
    """A field that is false unless its option is there."""
    return option(False, *names, group=group, help=help, metavar="")


def argument(default: Any, **more: Any) -> Any:
    """A field that is a word among the options."""
    return field(default=default, metadata={OPTION: typer.Argument(show_default=False, **more)})


def option_of(kind: type, name: str) -> Any:
    """What Typer is told of a field: by the class that says it, of which others have the default alone."""
    fields = [each.__dict__.get("__dataclass_fields__", {}).get(name) for each in kind.__mro__]
    return next(each.metadata[OPTION] for each in fields if each and OPTION in each.metadata)


def in_options(message: str) -> str:
    """What the library says of its parameters: draft=... is -d, kv='f32' is --kv f32, and "gamma is 0" is "--gamma is 0"."""
    return _TOLD.sub(lambda told: f"{OF_PARAMETERS[told[1] or told[3]]} {told[2] or ''}".rstrip(), message)


def as_utf8(value: Any) -> Any:
    """A text of the command line, or several, as it was typed: in UTF-8, also where the locale made other letters of it."""
    if isinstance(value, list):
        return [as_utf8(text) for text in value]
    with suppress(TypeError, UnicodeError):  # None, or bytes of no UTF-8
        return os.fsencode(value).decode()
    return value
