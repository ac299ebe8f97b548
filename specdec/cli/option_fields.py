"""Helpers that declare command-line options as dataclass fields with Typer metadata."""

import os
import re
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Any

import typer

OPTION = "option"  # key of the Typer option in a field's metadata
# The library's parameter names, which its errors mention, and the command-line option of each.
PARAMETER_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "stage", "template", "quantize", "kv", "pack", "gamma", "verify", "tree", "threads", "prompt", "stop", "max_tokens",
        "temperature", "top_p", "top_k", "seed", "prompts", "shape", "system", "min_p", "presence_penalty", "frequency_penalty",
        "logit_bias",
    )
} | {"target": "-m", "draft": "-d", "tokenizer": "-z", "repetition_penalty": "--repeat-penalty"}  # fmt: skip
_PARAMETER_PATTERN = "|".join(PARAMETER_OPTIONS)
_PARAMETER_REFERENCE = re.compile(
    rf"\b({_PARAMETER_PATTERN})=(?:\.\.\.|'([^']*)')"
    rf"|(?:^|(?<=, and ))({_PARAMETER_PATTERN})(?= (?:of \d+ )?(?:is|holds|contains|must) )"
)


def option(default: Any, *names: str, group: str, help: str, **more: Any) -> Any:
    """Return a dataclass field that is a command-line option.

    Args:
        default: Default value.
        *names: Option names, such as "-n" and "--steps".
        group: Panel of the help that lists the option.
        help: Help text.
        **more: Further arguments of `typer.Option`.
    """
    info = typer.Option(*names, help=help, rich_help_panel=group, **more)
    return field(default=default, metadata={OPTION: info})


# The panels of the help, and a function for each that declares an option in it.
PANELS = (
    "Most used",
    "Generation",
    "Models",
    "Random model",
    "Sampling",
    "Speculation",
    "Measuring",
    "Server",
    "Machine",
    "Output",
)
(
    common_option,
    text_option,
    models_option,
    model_option,
    sampling_option,
    speculation_option,
    measuring_option,
    server_option,
    machine_option,
    output_option,
) = (partial(option, group=panel) for panel in PANELS)


def flag(*names: str, group: str, help: str) -> Any:
    """Return a boolean dataclass field that is False unless its command-line option is given."""
    return option(False, *names, group=group, help=help, metavar="")


def argument(default: Any, **more: Any) -> Any:
    """Return a dataclass field that is a positional command-line argument; `more` has arguments of `typer.Argument`."""
    return field(default=default, metadata={OPTION: typer.Argument(show_default=False, **more)})


def get_option_info(request_class: type, name: str) -> Any:
    """Return the Typer option of a request class's field, from the first class in the MRO that declares one.

    Subclasses may override a field's default alone.
    """
    fields = [each.__dict__.get("__dataclass_fields__", {}).get(name) for each in request_class.__mro__]
    return next(each.metadata[OPTION] for each in fields if each and OPTION in each.metadata)


def translate_parameters(message: str) -> str:
    """Return an error message with the library's parameter names replaced by command-line options.

    For example, draft=... becomes -d, kv='f32' becomes --kv f32, and "gamma is 0" becomes "--gamma is 0".
    """
    return _PARAMETER_REFERENCE.sub(lambda match: f"{PARAMETER_OPTIONS[match[1] or match[3]]} {match[2] or ''}".rstrip(), message)


def decode_utf8(value: Any) -> Any:
    """Decode a command-line string, or a list of them, as UTF-8 even if the locale has another encoding.

    Other values, and bytes that are not UTF-8, are returned unchanged.
    """
    if isinstance(value, list):
        return [decode_utf8(text) for text in value]
    with suppress(TypeError, UnicodeError):  # None, or bytes that are not UTF-8
        return os.fsencode(value).decode()
    return value
