"""What is wrong with a command line, and what would be right: slips, and habits from other programs. Knows no requests."""

import difflib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.cli.prompts import STDIN
from specdec.loaders.model_lookup import is_text_file
from specdec.validation import short

LIKE_A_COMMAND = 0.75  # of the letters: rather a slip than a prompt
# what other programs call commands, and how many words may follow there
ELSEWHERE: Mapping[str, tuple[str, int]] = {
    "list": ("models", 0), "ls": ("models", 0), "ps": ("models", 0), "show": ("models", 1), "run": ("chat", 2),
    "info": ("models", 1), "pull": ("models pull", 1), "download": ("models pull", 1), "get": ("models pull", 1),
    "rm": ("models rm", 1), "remove": ("models rm", 1), "delete": ("models rm", 1), "benchmark": ("bench", 0),
    "repl": ("chat", 1), "api": ("serve", 1),
}  # fmt: skip
WRITES = ("generate", "complete", "completion", "infer", "inference", "predict", "cli")  # the command without a name does it
UNKNOWN: Mapping[str, str] = {
    "search": "https://huggingface.co/models lists models",
    "convert": "GGUF files and Hugging Face folders are read as they are",
    "quantize": "--quantize makes weights int8 or int4 while a model is loaded",
}
# what they call options, and those that are gone; a command before one: there alone
_CONTEXT, _DRAFTED, _CPU = "a text takes the memory it needs; --max-tokens limits it", "-g N drafts N", "it runs on CPU threads"
_KEPT = "--kv is the type of the cache"
HABITS: Mapping[str, str] = {
    "--compare": "specdec race compares the pair with the target alone",
    "sweep -t": "--temperatures LIST has several", "sweep -n": "--max-tokens LIST has several",
    "bench -t": "threads are -j LIST", "bench -r": "all take five turns",
    "--temp": "the temperature is -t X", "--n-predict": "--max-tokens N", "--predict": "--max-tokens N",
    "-c": _CONTEXT, "--ctx-size": _CONTEXT, "--num-ctx": _CONTEXT, "--max-model-len": _CONTEXT,
    "-hf": "-m org/name is on the hub", "--hf-repo": "-m org/name is on the hub",
    "-md": "the draft is -d NAME", "--model-draft": "the draft is -d NAME",
    "--draft-max": _DRAFTED, "--draft-n": _DRAFTED, "--num-speculative-tokens": _DRAFTED,
    "-ngl": _CPU, "--gpu-layers": _CPU, "--n-gpu-layers": _CPU, "--device": _CPU,
    "-sys": "the system prompt is -y TEXT of specdec chat", "--system-prompt": "the system prompt is -y TEXT of specdec chat",
    "-cnv": "specdec chat talks", "--conversation": "specdec chat talks", "--interactive": "specdec chat talks",
    "-r": "--stop TEXT ends a text", "--reverse-prompt": "--stop TEXT ends a text",
    "--json-schema": "--schema FILE", "--format": "--schema FILE or json", "--grammar": "--schema FILE or --regex REGEX",
    "-ctk": _KEPT, "-ctv": _KEPT, "--cache-type-k": _KEPT, "--cache-type-v": _KEPT, "--kv-cache-dtype": _KEPT,
    "-np": "--slots N of specdec serve", "--parallel": "--slots N of specdec serve",
    "--lora": "adapters are not supported; merge_and_unload of peft merges one into its model",
    "--chat-template": "--template FILE", "--api-key": "--api-key-file FILE, of one key a line",
    "-v": "--version, or --stats", "-V": "--version", "--verbose": "--stats",
}  # fmt: skip
# what they mean by options that are others here
MEANT = {
    "--top-p": "the prompt is -i TEXT", "--seed": "the system prompt is -y TEXT of specdec chat",
    "serve --top-p": "the port is --port N",
}  # fmt: skip
TOLD = {int: "a whole number", float: "a number"}
NUMBER = re.compile(r"[-+.]*\d[-+.\d]*")


def no_option(name: str, likest: list[str], context: Any) -> str:
    """Of an option that a command has not: another program's, another command's, or one that is like it."""
    root, command = context.find_root().command, context.command
    if right := HABITS.get(f"{context.info_name} {name}") or HABITS.get(name.replace("_", "-")):
        return f"no option {name}; {right}"
    offered = {"specdec": root, **{f"specdec {word}": each for word, each in root.commands.items()}}
    if having := [word for word, each in offered.items() if name in _names_of(each)]:
        return f"no option {name} here; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    likest = [each for each in _names_of(command) if len(name) > 3 and each.startswith(name)] or likest
    return f"no option {name}; " + (f"did you mean {likest[0]}?" if likest else "--help lists those that there are")


def no_numeral(error: Any) -> str:
    """Of a value that is no number, or beyond an option's limits, as Typer's judge says it; "" for another error."""
    param: Any = getattr(error, "param", None)
    judged: Any = getattr(error.__cause__, "errors", None)
    kind = param and judged and param.type_descriptor.annotation
    if kind not in TOLD:
        return ""
    limits, name, value = param.type_descriptor.parameter_info, max(param.opts, key=len), str(judged()[0]["input"])
    least = "" if limits.min is None else f", {limits.min:g} or more"
    span = f" from {limits.min:,.10g} to {limits.max:,.10g}" if limits.max is not None else least
    meant = MEANT.get(f"{error.ctx.info_name} {name}") or ("" if NUMBER.fullmatch(value) else MEANT.get(name))
    return f"{name} is {short(value, repr)}; expected {TOLD[kind]}{span}" + (f"; {meant}" if meant else "")


def strange_option(args: list[str]) -> str:
    """Of an option of several letters behind one dash, which would be read as several options; "" where there is none."""
    for before, arg in zip(["", *args], args, strict=False):
        if before == "--":  # only words are behind it
            break
        if len(arg) > 2 and arg[1] != "-" and arg in HABITS and not before.startswith("-"):
            return f"no option {arg}; {HABITS[arg]}"
    return ""


def word_too_many(command: Any, word: str, is_model: bool) -> str:
    """Of a word behind a command that takes none, or one less."""
    names = _names_of(command)
    right = "a model is -m NAME" if is_model or "-i" not in names else "a prompt is -i TEXT"
    if word.isdecimal() and "-n" in names:
        right = f"a number of tokens is -n {word}"
    return f"{word!r} is one word too many; {right}, and --help lists all options"


def no_command(words: list[str], args: list[str], commands: list[str]) -> str:
    """Return what to type instead of a word that other programs, or a slip, have for a command; "" for a prompt."""
    said = [*itertools.takewhile(lambda each: not each.startswith("-"), words)]
    word, n_more = words[0].lower(), len(said) - 1
    if word in WRITES and n_more <= 1:
        at = args.index(words[0])
        right = f"leave it out: {shlex.join(['specdec', *args[:at], *args[at + 1 :]])}."
    elif word in UNKNOWN and n_more <= 2:
        right = f"{UNKNOWN[word]}."
    elif meant := _like_a_command(word, n_more, commands):
        right = f"did you mean {meant!r}?"
    else:
        return ""
    return f"no command {words[0]!r}; {right} As a prompt it is -i {shlex.quote(' '.join(said))}"


def word_that_is_none(words: Sequence[str]) -> str:
    """Return what is wrong with a word that is neither a prompt nor a model, and what to type; "" if there is none."""
    for i, word in enumerate(words):
        quoted = shlex.quote(word)
        if i and NUMBER.fullmatch(word):
            right = f"a number of tokens is -n {word}" if word.isdecimal() else f"a temperature is -t {word}"
            return f"{word!r} is a second word; {right}, and as a prompt it is -i {quoted}"
        if word != STDIN and is_text_file(word):
            return f"{word!r} is a text file; -f {quoted} reads the prompt from it, and the word as a prompt is -i {quoted}"
    return ""


def _like_a_command(word: str, n_more: int, commands: list[str]) -> str:
    """Return the command that a word means rather than a prompt; "" for none."""
    if word in ELSEWHERE and n_more <= ELSEWHERE[word][1]:
        return ELSEWHERE[word][0]
    return next(iter(difflib.get_close_matches(word, commands, 1, LIKE_A_COMMAND)), "")


def _names_of(command: Any) -> list[str]:
    """What its options are called."""
    return [name for param in command.params if not getattr(param, "hidden", False) for name in param.opts]
