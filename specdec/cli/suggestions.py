"""Suggestions for wrong command lines: misspellings, and options and commands of other programs."""

import difflib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.argument_checks import shorten
from specdec.cli.prompt_sources import STDIN
from specdec.loaders.model_paths import is_text_file

MIN_COMMAND_SIMILARITY = 0.75  # above it a word is a misspelled command rather than a prompt
# Commands of other programs: our command, and how many words may follow.
FOREIGN_COMMANDS: Mapping[str, tuple[str, int]] = {
    "list": ("models", 0), "ls": ("models", 0), "ps": ("models", 0), "show": ("models", 1), "run": ("chat", 2),
    "info": ("models", 1), "pull": ("models pull", 1), "download": ("models pull", 1), "get": ("models pull", 1),
    "rm": ("models rm", 1), "remove": ("models rm", 1), "delete": ("models rm", 1), "benchmark": ("bench", 0),
    "repl": ("chat", 1), "api": ("serve", 1),
}  # fmt: skip
GENERATE_WORDS = (
    "generate",
    "complete",
    "completion",
    "infer",
    "inference",
    "predict",
    "cli",
)  # what the command without a name does
UNSUPPORTED_COMMANDS: Mapping[str, str] = {
    "search": "https://huggingface.co/models lists models",
    "convert": "GGUF files and Hugging Face folders are read as they are",
    "quantize": "--quantize makes weights int8 or int4 while a model is loaded",
}
# Options of other programs, and removed ones. A command's name in front limits the hint to that command.
_CONTEXT_HINT, _DRAFT_HINT, _CPU_HINT = (
    "a sequence takes the memory it needs; --max-tokens limits it",
    "-g N drafts N",
    "it runs on CPU threads",
)
_KV_HINT, _STOP_HINT = "--kv is the type of the cache", "the stop string is --stop TEXT"
_CHAT_HINT = "specdec chat holds a conversation"
FOREIGN_OPTIONS: Mapping[str, str] = {
    "--compare": "specdec race compares the pair with the target alone",
    "sweep -t": "--temperatures LIST has several", "sweep -n": "--max-tokens LIST has several",
    "bench -t": "threads are -j LIST", "bench -r": "it always runs five rounds",
    "--temp": "the temperature is -t X", "--n-predict": "--max-tokens N", "--predict": "--max-tokens N",
    "-c": _CONTEXT_HINT, "--ctx-size": _CONTEXT_HINT, "--num-ctx": _CONTEXT_HINT, "--max-model-len": _CONTEXT_HINT,
    "-hf": "-m org/name is on the hub", "--hf-repo": "-m org/name is on the hub",
    "-md": "the draft is -d NAME", "--model-draft": "the draft is -d NAME",
    "--draft-max": _DRAFT_HINT, "--draft-n": _DRAFT_HINT, "--num-speculative-tokens": _DRAFT_HINT,
    "-ngl": _CPU_HINT, "--gpu-layers": _CPU_HINT, "--n-gpu-layers": _CPU_HINT, "--device": _CPU_HINT,
    "-sys": "the system prompt is -y TEXT of specdec chat", "--system-prompt": "the system prompt is -y TEXT of specdec chat",
    "-cnv": _CHAT_HINT, "--conversation": _CHAT_HINT, "--interactive": _CHAT_HINT,
    "-r": _STOP_HINT, "--reverse-prompt": _STOP_HINT,
    "--json-schema": "--schema FILE", "--format": "--schema FILE or json", "--grammar": "--schema FILE or --regex REGEX",
    "-ctk": _KV_HINT, "-ctv": _KV_HINT, "--cache-type-k": _KV_HINT, "--cache-type-v": _KV_HINT, "--kv-cache-dtype": _KV_HINT,
    "-np": "--slots N of specdec serve", "--parallel": "--slots N of specdec serve",
    "--lora": "adapters are not supported; merge_and_unload of peft merges one into its model",
    "--chat-template": "--template FILE", "--api-key": "--api-key-file FILE, of one key a line",
    "-v": "--version, or --stats", "-V": "--version", "--verbose": "--stats",
}  # fmt: skip
# Options that have another meaning in other programs.
MISUSED_OPTIONS = {
    "--top-p": "the prompt is -i TEXT", "--seed": "the system prompt is -y TEXT of specdec chat",
    "serve --top-p": "the port is --port N",
}  # fmt: skip
TYPE_NAMES = {int: "a whole number", float: "a number"}
NUMBER = re.compile(r"[-+.]*\d[-+.\d]*")


def explain_unknown_option(name: str, similar: list[str], context: Any) -> str:
    """Return the error for an unknown option: one of another program, of another command, or a misspelled one.

    Args:
        name: The option.
        similar: Similar options, the most similar first.
        context: Typer's context.
    """
    root, command = context.find_root().command, context.command
    if hint := FOREIGN_OPTIONS.get(f"{context.info_name} {name}") or FOREIGN_OPTIONS.get(name.replace("_", "-")):
        return f"no option {name}; {hint}"
    offered = {"specdec": root, **{f"specdec {word}": other for word, other in root.commands.items()}}
    if commands := [word for word, other in offered.items() if name in _get_option_names(other)]:
        return f"no option {name} here; {', '.join(commands)} {'has' if len(commands) == 1 else 'have'} it"
    similar = [other for other in _get_option_names(command) if len(name) > 3 and other.startswith(name)] or similar
    return f"no option {name}; " + (f"did you mean {similar[0]}?" if similar else "--help lists all options")


def explain_invalid_number(error: Any) -> str:
    """Return the error for a value that is not a number or outside the limits; "" for another error.

    Args:
        error: The exception of Typer's validation.
    """
    param: Any = getattr(error, "param", None)
    validation: Any = getattr(error.__cause__, "errors", None)
    value_type = param and validation and param.type_descriptor.annotation
    if value_type not in TYPE_NAMES:
        return ""
    limits, name, value = param.type_descriptor.parameter_info, max(param.opts, key=len), str(validation()[0]["input"])
    minimum = "" if limits.min is None else f", {limits.min:g} or more"
    span = f" from {limits.min:,.10g} to {limits.max:,.10g}" if limits.max is not None else minimum
    hint = MISUSED_OPTIONS.get(f"{error.ctx.info_name} {name}") or ("" if NUMBER.fullmatch(value) else MISUSED_OPTIONS.get(name))
    return f"{name} is {shorten(value, repr)}; expected {TYPE_NAMES[value_type]}{span}" + (f"; {hint}" if hint else "")


def explain_foreign_option(args: list[str]) -> str:
    """Return the error for a long option behind a single dash, which would be parsed as several options; "" if there is none."""
    for before, arg in zip(["", *args], args, strict=False):
        if before == "--":  # only words follow
            break
        if len(arg) > 2 and arg[1] != "-" and arg in FOREIGN_OPTIONS and not before.startswith("-"):
            return f"no option {arg}; {FOREIGN_OPTIONS[arg]}"
    return ""


def explain_extra_word(command: Any, word: str, is_model: bool) -> str:
    """Return the error for a word that the command does not take.

    Args:
        command: Typer's command.
        word: The word.
        is_model: Whether it looks like the name of a model.
    """
    names = _get_option_names(command)
    hint = "a model is -m NAME" if is_model or "-i" not in names else "a prompt is -i TEXT"
    if word.isdecimal() and "-n" in names:
        hint = f"a number of tokens is -n {word}"
    return f"{word!r} is an extra word; {hint}, and --help lists all options"


def explain_unknown_command(words: list[str], args: list[str], commands: list[str]) -> str:
    """Return the error for a word that is a command of another program or a misspelled one; "" for a prompt.

    Args:
        words: The positional words.
        args: The whole command line.
        commands: Our commands.
    """
    prompt_words = [*itertools.takewhile(lambda each: not each.startswith("-"), words)]
    word, n_more = words[0].lower(), len(prompt_words) - 1
    if word in GENERATE_WORDS and n_more <= 1:
        at = args.index(words[0])
        hint = f"leave it out: {shlex.join(['specdec', *args[:at], *args[at + 1 :]])}."
    elif word in UNSUPPORTED_COMMANDS and n_more <= 2:
        hint = f"{UNSUPPORTED_COMMANDS[word]}."
    elif similar := _find_similar_command(word, n_more, commands):
        hint = f"did you mean {similar!r}?"
    else:
        return ""
    return f"no command {words[0]!r}; {hint} As a prompt it is -i {shlex.quote(' '.join(prompt_words))}"


def explain_misplaced_word(words: Sequence[str]) -> str:
    """Return the error for a word that is neither a prompt nor a model; "" if there is none."""
    for i, word in enumerate(words):
        quoted = shlex.quote(word)
        if i and NUMBER.fullmatch(word):
            hint = f"a number of tokens is -n {word}" if word.isdecimal() else f"a temperature is -t {word}"
            return f"{word!r} is a second word; {hint}, and as a prompt it is -i {quoted}"
        if word != STDIN and is_text_file(word):
            return f"{word!r} is a text file; -f {quoted} reads the prompt from it, and the word as a prompt is -i {quoted}"
    return ""


def _find_similar_command(word: str, n_more: int, commands: list[str]) -> str:
    """Return the command that a word probably means; "" for a prompt."""
    if word in FOREIGN_COMMANDS and n_more <= FOREIGN_COMMANDS[word][1]:
        return FOREIGN_COMMANDS[word][0]
    return next(iter(difflib.get_close_matches(word, commands, 1, MIN_COMMAND_SIMILARITY)), "")


def _get_option_names(command: Any) -> list[str]:
    """Return the names of a command's visible options."""
    return [name for param in command.params if not getattr(param, "hidden", False) for name in param.opts]
