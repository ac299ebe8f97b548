"""The options of the command line, as Typer wants them: names, words of help, limits. Knows nothing of what they do."""

import os
import re
from contextlib import suppress
from typing import Annotated, Any

import typer

MOST_USED = "Most used"
# what the library's errors call by its parameters, as a command line has it
OF_PARAMETERS = {
    "target": "-m", "draft": "-d", "tokenizer": "-z", "stage": "--stage", "template": "--template", "quantize": "--quantize",
    "kv": "--kv", "pack": "--pack", "gamma": "--gamma", "verify": "--verify", "tree": "--tree", "threads": "--threads",
    "prompt": "--prompt", "stop": "--stop", "max_tokens": "--max-tokens", "temperature": "--temperature", "top_p": "--top-p",
    "top_k": "--top-k", "seed": "--seed", "prompts": "--prompts", "shape": "--shape", "system": "--system",
    "min_p": "--min-p", "repetition_penalty": "--repeat-penalty", "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty", "logit_bias": "--logit-bias",
}  # fmt: skip
_PARAMETER = "|".join(OF_PARAMETERS)
_TOLD = re.compile(rf"\b({_PARAMETER})=(?:\.\.\.|'([^']*)')|(?:^|(?<=, and ))({_PARAMETER})(?= (?:is|holds) )")


def option(*names: str, group: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=group, **more)


def in_options(message: str) -> str:
    """What the library says of its parameters: draft=... is -d, kv='f32' is --kv f32, and "gamma is 0" is "--gamma is 0"."""
    return _TOLD.sub(lambda told: f"{OF_PARAMETERS[told[1] or told[3]]} {told[2] or ''}".rstrip(), message)


def flag(*names: str, group: str, help: str) -> Any:
    return option(*names, group=group, help=help, metavar="")


def as_utf8(value: Any) -> Any:
    """A text of the command line, or several, as it was typed: in UTF-8, also where the locale made other letters of it."""
    if isinstance(value, list):
        return [as_utf8(text) for text in value]
    with suppress(TypeError, UnicodeError):  # None, or bytes of no UTF-8
        return os.fsencode(value).decode()
    return value


def _refuse_steps(value: object) -> None:
    """llama2.c's -n, where a person may look for it."""
    if value is not None:
        raise typer.BadParameter("it counts the prompt too, of which a talk has many; --max-tokens N limits an answer.")


ModelFile = Annotated[
    str | None,
    option(
        *("-m", "--model"), group=MOST_USED, metavar="NAME",
        help="Target: a folder, org/name or org/name:Q4_K_M on the hub, a GGUF or llama2.c file.",
    ),
]  # fmt: skip
ModelWord = Annotated[str | None, typer.Argument(metavar="MODEL", show_default=False, help="The target, as with -m.")]
DraftName = Annotated[
    str,
    option(
        *("-d", "--draft"), group=MOST_USED, metavar="NAME",
        help="Draft: as -m, a head, mtp (the target's own), self (a copy in fewer bits), ngram (what stood in the text).",
    ),
]  # fmt: skip
DraftOrNone = Annotated[
    str,
    option(
        *("-d", "--draft"), group=MOST_USED, metavar="NAME",
        help="Draft: as -m, a head, mtp (the target's own), self (a copy in fewer bits), ngram (what stood in the text), none.",
    ),
]  # fmt: skip
StageName = Annotated[
    str,
    option(
        "--stage", group="Models", metavar="ngram|NAME",
        help="Guess for the draft, too: by n-grams or a smaller model. The draft checks that before the target does.",
    ),
]  # fmt: skip
WhatToQuantize = Annotated[
    str,
    option(
        "--quantize", group="Models", metavar="WHAT",
        help="Make weights int8: draft, target, both or none; draft=int4 makes int4. The draft's bits never change the text.",
    ),
]  # fmt: skip
PromptCacheFolder = Annotated[
    str,
    option(
        "--prompt-cache", group="Models", metavar="DIR",
        help="Keep what is read of prompts here, for later runs: whoever can read the folder can read what was said.",
    ),
]  # fmt: skip
PromptCacheSize = Annotated[
    int, option("--prompt-cache-size", group="Models", metavar="MB", min=1, max=10**8, help="That it may take at most.")
]
KVOption = Annotated[
    str,
    option(
        "--kv", group="Models", metavar="auto|f32|f16|q8",
        help="Type of the KV cache. f16 takes half the memory, q8 a quarter; each type has a text of its own. auto: f32 for a "
        "target of fp32 weights, else f16.",
    ),
]  # fmt: skip
PackOption = Annotated[
    str,
    option(
        "--pack", group="Models", metavar="auto|on|none",
        help="Keep bf16 weights in 12 bits, without losing one: the same text. auto: where a trial shows that it is faster.",
    ),
]  # fmt: skip
TokenizerFile = Annotated[
    str,
    option(
        *("-z", "--tokenizer"), group="Models", metavar="FILE",
        help="Tokenizer. By default the folder's own; for a checkpoint tok<vocab>.bin or tokenizer.bin, beside it or in models/.",
    ),
]  # fmt: skip
PromptText = Annotated[
    str | None,
    option(
        *("-i", "--prompt"), group=MOST_USED, metavar="TEXT", callback=as_utf8,
        help="The prompt, as PROMPT; - or a pipe: stdin. [dim]\\[default: Once upon a time][/dim]",
    ),
]  # fmt: skip
PromptTextFile = Annotated[str, option("-f", "--file", group="Text", metavar="FILE", help="Read the prompt from this file.")]
StopStrings = Annotated[
    list[str] | None,
    option("--stop", group="Text", metavar="TEXT", callback=as_utf8, help="Stop before this string; may be given several times."),
]
SchemaFile = Annotated[
    str,
    option("--schema", group="Text", metavar="FILE|json", help="Write one JSON value by this JSON Schema; json: any object."),
]
Regex = Annotated[
    str, option("--regex", group="Text", metavar="REGEX", callback=as_utf8, help="Write what this regex matches as a whole.")
]
Samples = Annotated[
    int, option("--samples", group="Text", metavar="N", min=1, help="Write N texts, with this seed and the next ones.")
]
Steps = Annotated[
    int | None,
    option(
        *("-n", "--steps"), group=MOST_USED, metavar="N", min=0,
        help="Tokens in all, with the prompt's; 0: as many as fit. [dim]\\[default: 256][/dim]",
    ),
]  # fmt: skip
NewTokens = Annotated[
    int | None,
    option("--max-tokens", group=MOST_USED, metavar="N", min=1, help="New tokens at most, without the prompt's; instead of -n."),
]
Temperature = Annotated[
    float, option("-t", "--temperature", group=MOST_USED, metavar="X", min=0.0, help="Sampling temperature; 0 is greedy.")
]
TopP = Annotated[
    float,
    option(
        *("-p", "--top-p"), group="Sampling", metavar="X", min=0.0, max=1.0,
        help="Keep the smallest set of tokens with more probability than X. 0, 1: off.",
    ),
]  # fmt: skip
TopK = Annotated[
    int, option("-k", "--top-k", group="Sampling", metavar="N", min=0, help="Keep the N most likely tokens. 0: off.")
]
_UNSAID = "for requests that do not say. By default the model's own (generation_config.json), else"
ServedTemperature = Annotated[
    float | None,
    option("-t", "--temperature", group="Sampling", metavar="X", min=0.0, help=f"Temperature {_UNSAID} 0.7. 0 is greedy."),
]
ServedTopP = Annotated[
    float | None,
    option("-p", "--top-p", group="Sampling", metavar="X", min=0.0, max=1.0, help=f"Top-p {_UNSAID} 0.9. 0, 1: off."),
]
ServedTopK = Annotated[
    int | None, option("-k", "--top-k", group="Sampling", metavar="N", min=0, help=f"Top-k {_UNSAID} 0. 0: off.")
]
MinP = Annotated[
    float,
    option(
        "--min-p",
        group="Sampling",
        metavar="X",
        min=0.0,
        max=1.0,
        help="Leave out what is less likely than X times the likeliest.",
    ),
]
RepeatPenalty = Annotated[
    float,
    option(
        "--repeat-penalty", group="Sampling", metavar="X", min=0.01, max=100.0,
        help="Make tokens of the prompt and the text less likely, above 1.",
    ),
]  # fmt: skip
PresencePenalty = Annotated[
    float,
    option(
        "--presence-penalty", group="Sampling", metavar="X", min=-100.0, max=100.0,
        help="Take X from the logits of tokens that the text has.",
    ),
]  # fmt: skip
FrequencyPenalty = Annotated[
    float,
    option(
        "--frequency-penalty", group="Sampling", metavar="X", min=-100.0, max=100.0,
        help="Take X from the logits of tokens for each time that the text has them.",
    ),
]  # fmt: skip
LogitBias = Annotated[
    list[str] | None,
    option("--logit-bias", group="Sampling", metavar="ID=X", help="Add X, -100 to 100, to a token's logit. Can be repeated."),
]
Seed = Annotated[
    int,
    option(
        "-s", "--seed", group="Sampling", metavar="N", min=0, help="The same seed gives the same text. 0: a new seed each time."
    ),
]
Gamma = Annotated[
    str,
    option(
        *("-g", "--gamma"),
        group="Speculation",
        metavar="N|auto",
        help="Draft tokens per step (γ). auto: as many as pay, none where none do; 4 with --verify rejection or block.",
    ),
]
VerifyOption = Annotated[
    str,
    option(
        "--verify", group="Speculation", metavar="coupled|rejection|block",
        help="coupled: the text that the target alone writes with this seed. rejection (Leviathan et al. 2023), block (Sun et "
        "al. 2024; accepts more): its distribution.",
    ),
]  # fmt: skip
TreeOption = Annotated[
    str,
    option(
        "--tree", group="Speculation", metavar="auto|on|off",
        help="on: propose several candidates for a place (a token tree). Same text. auto means off: no pair was faster by them.",
    ),
]  # fmt: skip
Threads = Annotated[
    int,
    option(
        "-j", "--threads", group="Machine", metavar="N", min=0, help="CPU threads. 0: all cores, or fewer where those are faster."
    ),
]
Plain = Annotated[
    bool, flag("--plain", group="Output", help="No panel: the text goes to stdout as it comes, the result to stderr.")
]
Pace = Annotated[
    float | None,
    option(
        "--pace", group="Output", metavar="X", min=0.0,
        help="Passes a second at most, to watch the panel. 0: full speed. By default a short text takes four seconds.",
    ),
]  # fmt: skip
Stats = Annotated[bool, flag("--stats", group="Output", help="Then all figures: drafted, accepted, mean length, by position.")]
AsJson = Annotated[bool, flag("--json", group="Output", help="One JSON object on stdout.")]
ShowVersion = Annotated[
    bool, flag("--version", group="Output", help="Print the version and the arithmetic's revision, and exit.")
]
Shape = Annotated[
    str,
    option(
        "--shape", group="Model", metavar="SHAPE", help="Of the model: 15M, 42M, 110M, or dim,hidden,layers,heads,kv,vocab,seq."
    ),
]
PromptLengths = Annotated[
    str, option("-p", "--n-prompt", group="Measuring", metavar="LIST", help="Tokens of prompts to time; 0: none.")
]
TextLengths = Annotated[
    str, option("-n", "--n-gen", group="Measuring", metavar="LIST", help="Tokens to write one by one; 0: none.")
]
Depths = Annotated[
    str, option("-d", "--depth", group="Measuring", metavar="LIST", help="How many tokens stand before what is timed.")
]
ThreadCounts = Annotated[
    str,
    option(
        "-j", "--threads", group="Machine", metavar="LIST",
        help="Numbers of CPU threads. 0: one for each core, and others that may be faster.",
    ),
]  # fmt: skip
Int8 = Annotated[bool, flag("--int8", group="Model", help="Quantize the weights to int8, as --quantize does.")]

# Of sweep

Gammas = Annotated[
    str, option("-g", "--gammas", group="Speculation", metavar="LIST", help="Draft tokens per step (γ), 1 to 63, or auto.")
]
Lengths = Annotated[
    str,
    option(
        "--max-tokens", group="Text", metavar="LIST",
        help="New tokens of each text. By default 50,200; with --full 50,100,200,500.",
    ),
]  # fmt: skip
Temperatures = Annotated[
    str, option("--temperatures", group="Sampling", metavar="LIST", help="Sampling temperatures; 0 is greedy.")
]
PromptFile = Annotated[
    str, option("--prompts", group="Text", metavar="FILE", help="One prompt a line. By default a dozen stories.")
]
Rounds = Annotated[
    int, option("--rounds", group="Measuring", metavar="N", min=0, help="How often each text is timed. 0: 3; with --full 5.")
]
Seeds = Annotated[
    int, option("--seeds", group="Measuring", metavar="N", min=0, help="Sampled texts of each prompt. 0: 1; with --full 3.")
]
Full = Annotated[bool, flag("--full", group="Measuring", help="All lengths, more rounds and seeds: minutes instead of one.")]
AsCsv = Annotated[bool, flag("--csv", group="Output", help="Rows of CSV on stdout.")]
SvgFile = Annotated[str, option("--svg", group="Output", metavar="FILE", help="Draw the speed-ups as a bar chart.")]

# Of models

WhatOfModels = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WHAT", show_default=False,
        help="A folder to look into instead, or a model. Or what to do: pull NAME, rm NAME, name SHORT NAME.",
    ),
]  # fmt: skip
Yes = Annotated[bool, flag("-y", "--yes", group="Output", help="Remove without a question.")]

# Of chat

SystemPrompt = Annotated[str, option("-y", "--system", group="Text", metavar="TEXT", callback=as_utf8, help="System prompt.")]
FirstMessage = Annotated[str, option("-i", "--prompt", group="Text", metavar="TEXT", callback=as_utf8, help="The first message.")]
FirstMessageFile = Annotated[
    str,
    option("-f", "--file", group="Text", metavar="FILE", help="A file whose text follows that of -i; a pipe's follows both."),
]
StepsOfATalk = Annotated[int | None, typer.Option("-n", "--steps", hidden=True, callback=_refuse_steps)]
AnswerTokens = Annotated[int, option("--max-tokens", group="Text", metavar="N", min=1, help="Tokens of an answer at most.")]
TemplateFile = Annotated[
    str,
    option("--template", group="Models", metavar="FILE", help="Chat template (Jinja), or llama2. By default the model's own."),
]
NoHistory = Annotated[bool, flag("--no-history", group="Output", help="Keep neither messages nor the talk after the session.")]
PlainChat = Annotated[bool, flag("--plain", group="Output", help="No colours.")]

# Of serve

Host = Annotated[
    str,
    option("--host", group="Server", metavar="HOST", help="Listen at this address. Others than this machine's own need a key."),
]
Port = Annotated[int, option("--port", group="Server", metavar="N", min=0, max=65535, help="Listen at this port. 0: a free one.")]
ApiKeyFile = Annotated[
    str, option("--api-key-file", group="Server", metavar="FILE", help="Ask for one of the keys in this file, one a line.")
]
NoKey = Annotated[bool, flag("--no-key", group="Server", help="Listen beyond this machine without a key: for everybody.")]
Slots = Annotated[int, option("--slots", group="Server", metavar="N", min=1, max=256, help="Texts that are written at once.")]
Queue = Annotated[
    int, option("--queue", group="Server", metavar="N", min=0, max=4096, help="Texts that wait beside them; more are refused.")
]
Grace = Annotated[
    float,
    option("--grace", group="Server", metavar="S", min=0.0, max=3600.0, help="Seconds that answers have to end after SIGTERM."),
]
KeepAlive = Annotated[
    float,
    option(
        "--keep-alive", group="Server", metavar="S", min=0.0, max=1e9,
        help="Without -m: seconds that a model stays which nobody asks. It goes earlier where another one needs its memory.",
    ),
]  # fmt: skip
CacheSize = Annotated[
    int,
    option(
        "--cache", group="Server", metavar="MB", min=0,
        help="Memory for keys and values of texts that run or may go on. 0: half of what is there beside the weights.",
    ),
]  # fmt: skip
