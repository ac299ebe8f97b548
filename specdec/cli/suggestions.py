"""Suggestions for wrong command lines: misspellings, and words and values in the wrong place."""

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Any

from specdec.argument_checks import shorten
from specdec.cli.prompt_sources import STDIN
from specdec.loaders.model_paths import is_model_name, is_text_file

MIN_COMMAND_SIMILARITY = 0.75  # above it a word is a misspelled command rather than a prompt
MODELS_ACTIONS = ("pull", "rm", "list", "ls")  # words after `specdec models`
_NO_CONTEXT_OPTION = "leave it out, since the context grows up to the model's own; --max-tokens N limits the output"
_NO_GPU_OPTION = "leave it out, since specdec runs on the CPU"
# Options of llama.cpp and what to use in their place.
LLAMA_CPP_OPTIONS = {
    "-ngl": _NO_GPU_OPTION, "--gpu-layers": _NO_GPU_OPTION, "--n-gpu-layers": _NO_GPU_OPTION,
    "-c": _NO_CONTEXT_OPTION, "--ctx-size": _NO_CONTEXT_OPTION,
    "-md": "use -d NAME for the draft", "--model-draft": "use -d NAME for the draft",
    "-hf": "use -m org/name, or -m org/name:Q4_K_M", "-hfr": "use -m org/name, or -m org/name:Q4_K_M",
    "--hf-repo": "use -m org/name, or -m org/name:Q4_K_M", "-hfd": "use -d org/name for the draft",
    "--draft-max": "use -g N for the draft length", "-np": "use --slots N", "--parallel": "use --slots N",
    "-ctk": "use --kv f16 or q8", "--cache-type-k": "use --kv f16 or q8", "-cnv": "use specdec chat",
    "--predict": "use --max-tokens N", "--n-predict": "use --max-tokens N", "-sys": "use -y TEXT, in specdec chat",
    "-fa": "leave it out", "--mlock": "leave it out", "--no-mmap": "leave it out", "--jinja": "leave it out",
}  # fmt: skip
TYPE_NAMES = {int: "a whole number", float: "a number"}
NUMBER = re.compile(r"[-+.]*\d[-+.\d]*")
TEXT_FILE_NAME = re.compile(r"\S+\.(txt|text|md)", re.IGNORECASE)


def explain_invalid_number(param: Any, context: Any, value: str) -> str:
    """Return the error message for an option's value that is not a number or outside its limits.

    Args:
        param: Typer's parameter.
        context: Typer's context.
        value: The value.
    """
    limits = param.type_descriptor.parameter_info
    name = max(param.opts, key=len)
    minimum = "" if limits.min is None else f", {limits.min:g} or more"
    span = f" from {limits.min:,.10g} to {limits.max:,.10g}" if limits.max is not None else minimum
    hint = "; use -n 0 for as many as fit" if name == "--steps" and value.startswith("-") else ""
    if name == "--top-p" and context.info_name == "serve":
        hint = f"; use --port {value if value.isdecimal() else 'N'} for the port"
    elif name == "--top-p" and not NUMBER.fullmatch(value):
        hint = "; use -i TEXT for the prompt"
    return f"{name} is {shorten(value, repr)}; expected {TYPE_NAMES[param.type_descriptor.annotation]}{span}{hint}"


def explain_foreign_option(arguments: Sequence[str]) -> str:
    """Return the error message for the first argument that is an option of llama.cpp; "" if there is none.

    Without it, `-ngl 3` would be read as `-n gl`, and `-hf` as `-h -f`.
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    found = next((name for name in (argument.partition("=")[0] for argument in options) if name in LLAMA_CPP_OPTIONS), "")
    return f"{found} is an option of llama.cpp; {LLAMA_CPP_OPTIONS[found]}" if found else ""


def explain_extra_word(command: Any, word: str, is_model: bool) -> str:
    """Return the error message for a positional word that a command does not take.

    Args:
        command: Typer's command.
        word: The word.
        is_model: Whether the word looks like the name of a model.
    """
    names = [name for param in command.params for name in param.opts]
    hint = "use -m NAME for a model" if is_model or "-i" not in names else "use -i TEXT for a prompt"
    if word.isdecimal() and "-n" in names:
        hint = f"use -n {word} for the number of tokens"
    return f"unexpected word {word!r}; {hint}; --help lists all options"


def explain_unknown_command(words: Sequence[str], commands: Sequence[str]) -> str:
    """Return the error message if the first word is a misspelled command; "" if it starts a prompt.

    Args:
        words: The positional words.
        commands: All commands.
    """
    if words[0] == "run":  # as ollama says
        model = words[1] if len(words) > 1 else "NAME"
        return f"unknown command 'run'; use 'specdec chat {model}'. If it is the prompt, use -i {shlex.quote(' '.join(words))}"
    similar = difflib.get_close_matches(words[0].lower(), commands, 1, MIN_COMMAND_SIMILARITY)
    if words[0] in MODELS_ACTIONS and len(words) <= 2:
        similar = [f"models {words[0]}"]
    if not similar:
        return ""
    prompt = shlex.quote(" ".join(words))
    return f"unknown command {words[0]!r}; did you mean {similar[0]!r}? If it is the prompt, use -i {prompt}"


def explain_misplaced_word(words: Sequence[str], has_prompt: bool = False) -> str:
    """Return the error message for a positional word that is a number or names a text file; "" if there is none.

    A number in first place may be the prompt, unless `has_prompt`.

    Args:
        words: The positional words.
        has_prompt: Whether an option gives the prompt.
    """
    for i, word in enumerate(words):
        quoted = shlex.quote(word)
        if (i or has_prompt) and NUMBER.fullmatch(word):
            hint = f"use -n {word} for the number of tokens" if word.isdecimal() else f"use -t {word} for the temperature"
            is_after_model = i and not has_prompt and is_model_name(words[i - 1])
            return f"unexpected number {word!r}; {hint}" + (f", or -i {quoted} if it is the prompt" if is_after_model else "")
        if word != STDIN and is_text_file(word):
            return f"{word!r} is a text file; use -f {quoted} to read the prompt from it, or -i {quoted} if it is the prompt"
        if TEXT_FILE_NAME.fullmatch(word) and not has_prompt:
            return (
                f"the file {word!r} is not found; use -f FILE to read the prompt from a file, or -i {quoted} if it is the prompt"
            )
    return ""
