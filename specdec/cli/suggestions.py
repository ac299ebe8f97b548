"""Suggestions for wrong command lines: misspellings, and options and commands of other programs."""

import difflib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.argument_checks import shorten
from specdec.cli.prompt_sources import STDIN
from specdec.loaders.model_paths import is_model_name, is_text_file

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
    "search": "find models at https://huggingface.co/models",
    "convert": "no conversion is needed: name a GGUF file or a Hugging Face folder with -m",
    "quantize": "use --quantize to make weights int8 or int4 while a model is loaded",
}
# Options of other programs, and removed ones. A command's name in front limits the hint to that command.
_CONTEXT_HINT, _DRAFT_HINT, _CPU_HINT = (
    "a sequence takes the memory that it needs; limit it with --max-tokens",
    "use -g N for the draft length",
    "specdec runs on the CPU only; use -j N for threads",
)
_KV_HINT, _STOP_HINT = "use --kv for the type of the KV cache", "use --stop TEXT for a stop string"
_SYSTEM_HINT = "use specdec chat -y TEXT for a system prompt"
_CHAT_HINT = "use specdec chat for a conversation"
FOREIGN_OPTIONS: Mapping[str, str] = {
    "--compare": "use specdec race to compare the pair with the target alone",
    "sweep -t": "use --temperatures LIST", "sweep -n": "use --max-tokens LIST",
    "bench -t": "use -j LIST for threads", "bench -r": "bench always runs five rounds",
    "--temp": "use -t X for the temperature", "--n-predict": "use --max-tokens N", "--predict": "use --max-tokens N",
    "-c": _CONTEXT_HINT, "--ctx-size": _CONTEXT_HINT, "--num-ctx": _CONTEXT_HINT, "--max-model-len": _CONTEXT_HINT,
    "-hf": "use -m org/name for a model on the hub", "--hf-repo": "use -m org/name for a model on the hub",
    "-md": "use -d NAME for the draft", "--model-draft": "use -d NAME for the draft",
    "--draft-max": _DRAFT_HINT, "--draft-n": _DRAFT_HINT, "--num-speculative-tokens": _DRAFT_HINT,
    "-ngl": _CPU_HINT, "--gpu-layers": _CPU_HINT, "--n-gpu-layers": _CPU_HINT, "--device": _CPU_HINT,
    "-sys": _SYSTEM_HINT, "--system-prompt": _SYSTEM_HINT,
    "-cnv": _CHAT_HINT, "--conversation": _CHAT_HINT, "--interactive": _CHAT_HINT,
    "-r": _STOP_HINT, "--reverse-prompt": _STOP_HINT,
    "--json-schema": "use --schema FILE", "--format": "use --schema FILE or --schema json",
    "--grammar": "use --schema FILE or --regex REGEX",
    "-ctk": _KV_HINT, "-ctv": _KV_HINT, "--cache-type-k": _KV_HINT, "--cache-type-v": _KV_HINT, "--kv-cache-dtype": _KV_HINT,
    "-np": "use specdec serve --slots N", "--parallel": "use specdec serve --slots N",
    "--lora": "adapters are not supported; merge one into its model with merge_and_unload of peft",
    "--chat-template": "use --template FILE", "--api-key": "use --api-key-file FILE, with one key per line",
    "-v": "use --version, or --stats", "-V": "use --version", "--verbose": "use --stats",
}  # fmt: skip
# Options that have another meaning in other programs.
MISUSED_OPTIONS = {
    "--top-p": "use -i TEXT for the prompt", "--seed": _SYSTEM_HINT,
    "serve --top-p": "use --port N for the port",
}  # fmt: skip
TYPE_NAMES = {int: "a whole number", float: "a number"}
NUMBER = re.compile(r"[-+.]*\d[-+.\d]*")


def explain_unknown_option(name: str, similar: list[str], context: Any) -> str:
    """Return the error message for an unknown option: one of another program, of another command, or a misspelled one.

    Args:
        name: The option.
        similar: Similar options, the most similar first.
        context: Typer's context.
    """
    root, command = context.find_root().command, context.command
    if hint := FOREIGN_OPTIONS.get(f"{context.info_name} {name}") or FOREIGN_OPTIONS.get(name.replace("_", "-")):
        return f"unknown option {name}; {hint}"
    offered = {"specdec": root, **{f"specdec {word}": other for word, other in root.commands.items()}}
    if commands := [word for word, other in offered.items() if name in _get_option_names(other)]:
        return f"{name} is not an option of this command; {' and '.join(commands)} {'has' if len(commands) == 1 else 'have'} it"
    similar = [other for other in _get_option_names(command) if len(name) > 3 and other.startswith(name)] or similar
    return f"unknown option {name}; " + (f"did you mean {similar[0]}?" if similar else "--help lists all options")


def explain_invalid_number(error: Any) -> str:
    """Return the error message for an option's value that is not a number or outside its limits; "" for another error.

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
    hint = hint.replace("--port N", f"--port {value}") if hint and value.isdecimal() else hint
    return f"{name} is {shorten(value, repr)}; expected {TYPE_NAMES[value_type]}{span}" + (f"; {hint}" if hint else "")


def explain_foreign_option(args: list[str]) -> str:
    """Return the error message for another program's option such as -ngl in a command line; "" if there is none.

    Typer would parse a long option behind a single dash as several options.
    """
    for before, arg in zip(["", *args], args, strict=False):
        if before == "--":  # only words follow
            break
        if len(arg) > 2 and arg[1] != "-" and arg in FOREIGN_OPTIONS and not before.startswith("-"):
            return f"unknown option {arg}; {FOREIGN_OPTIONS[arg]}"
    return ""


def explain_extra_word(command: Any, word: str, is_model: bool) -> str:
    """Return the error message for a positional word that a command does not take.

    Args:
        command: Typer's command.
        word: The word.
        is_model: Whether the word looks like the name of a model.
    """
    names = _get_option_names(command)
    hint = "use -m NAME for a model" if is_model or "-i" not in names else "use -i TEXT for a prompt"
    if word.isdecimal() and "-n" in names:
        hint = f"use -n {word} for the number of tokens"
    return f"unexpected word {word!r}; {hint}; --help lists all options"


def explain_unknown_command(words: list[str], args: list[str], commands: list[str]) -> str:
    """Return the error message if the first word is a command of another program or a misspelled one; "" for a prompt.

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
    return f"unknown command {words[0]!r}; {hint} If it is the prompt, use -i {shlex.quote(' '.join(prompt_words))}"


def explain_misplaced_word(words: Sequence[str], has_prompt: bool = False) -> str:
    """Return the error message for a positional word that is a number or a text file rather than a prompt; "" if none is.

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
    return ""


def _find_similar_command(word: str, n_more: int, commands: list[str]) -> str:
    """Return the name of our command that a word followed by n_more words probably means; "" if it starts a prompt."""
    if word in FOREIGN_COMMANDS and n_more <= FOREIGN_COMMANDS[word][1]:
        return FOREIGN_COMMANDS[word][0]
    return next(iter(difflib.get_close_matches(word, commands, 1, MIN_COMMAND_SIMILARITY)), "")


def _get_option_names(command: Any) -> list[str]:
    """Return all names of a command's visible options, such as "-m" and "--model"."""
    return [name for param in command.params if not getattr(param, "hidden", False) for name in param.opts]
