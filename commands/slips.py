"""What is wrong with a command line, and what would be right: slips, and habits from other programs. Knows no requests."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from ..checks import short

LIKE_A_COMMAND = 0.75  # of the letters: rather a slip than a prompt
# what other programs call commands, and how many words may follow there
ELSEWHERE: Mapping[str, tuple[str, int]] = {
    "list": ("models", 0), "ls": ("models", 0), "ps": ("models", 0), "show": ("models", 1), "run": ("chat", 2),
    "pull": ("models pull", 1), "rm": ("models rm", 1), "benchmark": ("bench", 0),
}  # fmt: skip
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
    "--chat-template": "--template FILE", "--api-key": "--api-key-file FILE, of one key a line",
    "-v": "--version, or --stats", "-V": "--version", "--verbose": "--stats",
}  # fmt: skip
# what they mean by options that are others here
MEANT = {"--top-p": "the prompt is -i TEXT", "--seed": "the system prompt is -y TEXT of specdec chat"}
TOLD = {int: "a whole number", float: "a number"}


def no_option(name: str, likest: list[str], context: Any) -> str:
    """Of an option that a command has not: another program's, another command's, or one that is like it."""
    root, command = context.find_root().command, context.command
    if right := HABITS.get(f"{context.info_name} {name}") or HABITS.get(name):
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
    is_number = re.fullmatch(r"[-+.\d]+", value)
    hint = f"; {MEANT[name]}" if name in MEANT and not is_number else ""
    return f"{name} is {short(value, repr)}; expected {TOLD[kind]}{span}{hint}"


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
    right = "a model is -m NAME" if is_model or "-i" not in _names_of(command) else "a prompt is -i TEXT"
    return f"{word!r} is one word too many; {right}, and --help lists all options"


def like_a_command(words: list[str], commands: list[str]) -> str:
    """The command that was meant rather than a prompt of that word; "" for none."""
    word = words[0].lower()
    if word in ELSEWHERE and len(words) <= 1 + ELSEWHERE[word][1]:
        return ELSEWHERE[word][0]
    return next(iter(difflib.get_close_matches(word, commands, 1, LIKE_A_COMMAND)), "")


def _names_of(command: Any) -> list[str]:
    """What its options are called."""
    return [name for param in command.params if not getattr(param, "hidden", False) for name in param.opts]
