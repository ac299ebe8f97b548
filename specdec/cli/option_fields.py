"""Helpers that declare command-line options as fields of dataclasses, and that name the options in the library's errors."""

import os
import re
from contextlib import suppress
from typing import Any

import typer

# The panels of the help, in their order.
PANELS = (
    "Most used", "Generation", "Models", "Random model", "Sampling", "Speculation", "Measuring", "Server", "Machine", "Output",
)  # fmt: skip
# The library's parameter names, which its errors mention, and the command-line option of each.
PARAMETER_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "stage", "template", "quantize", "kv", "pack", "gamma", "verify", "tree", "threads", "prompt", "stop", "max_tokens",
        "temperature", "top_p", "top_k", "seed", "prompts", "shape", "system", "min_p", "presence_penalty", "frequency_penalty",
        "logit_bias", "shard",
    )
} | {"target": "-m", "draft": "-d", "tokenizer": "-z", "repetition_penalty": "--repeat-penalty"}  # fmt: skip
_PARAMETER_PATTERN = "|".join(PARAMETER_OPTIONS)
_PARAMETER_REFERENCE = re.compile(
    rf"\b({_PARAMETER_PATTERN})=(?:\.\.\.|'([^']*)')"
    rf"|(?:^|(?<=, and ))({_PARAMETER_PATTERN})(?= (?:of \d+ )?(?:is|holds|contains|must) )"
)


def option(default: Any, declaration: str, panel: str, help: str, **more: Any) -> Any:
    """Return a Typer option, the default of a dataclass field.

    Args:
        default: Default value; False declares a flag.
        declaration: Names and metavar as the help shows them, such as "-n, --steps N".
        panel: Panel of the help that lists the option.
        help: Help text.
        **more: Further arguments of `typer.Option`.
    """
    names = declaration.replace(",", "").split()
    metavar = "" if names[-1].startswith("-") else names.pop()
    return typer.Option(default, *names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def argument(metavar: str, help: str) -> Any:
    """Return a positional Typer argument, None by default."""
    return typer.Argument(None, metavar=metavar, help=help, show_default=False)


def decode_argument(value: Any) -> Any:
    """Return a text of the command line, or a list of texts, decoded as UTF-8 even if the locale has another encoding.

    None, and bytes that are not UTF-8, stay as they are.
    """
    if isinstance(value, list):
        return [decode_argument(each) for each in value]
    with suppress(TypeError, UnicodeError):
        return os.fsencode(value).decode()
    return value


def translate_parameters(message: str) -> str:
    """Return an error message with the library's parameter names replaced by command-line options.

    For example, draft=... becomes -d, kv='f32' becomes --kv f32, and "gamma is 0" becomes "--gamma is 0".
    """
    return _PARAMETER_REFERENCE.sub(lambda match: f"{PARAMETER_OPTIONS[match[1] or match[3]]} {match[2] or ''}".rstrip(), message)
