"""What several commands need: models found and loaded, who guesses, output and its end, a line on stderr. Knows no options."""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast, get_args

import typer

import specdec

from ..decoder import SpeculativeDecoder
from ..decoding import VERIFIERS
from ..drafting.copies import kinds_to_make
from ..drafting.estimates import MAX_GAMMA
from ..drafting.settings import AUTO, TreeMode
from ..drafting.team import NGRAM, SELF
from ..machine.threads import available_threads
from ..readers import CheckpointError, extras
from ..readers.files import default_pair, find, needs, telling_how_to_restore
from ..screens.output import Roles, on_one_line
from ..screens.progress import LOADING, Bar, Show
from ..transformer import KV

NONE = "none"  # as a draft: the target decodes alone
DEFAULT_STEPS = 256  # of -n
BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


def or_the_pair(model: str | None, draft: str) -> tuple[str, str]:
    """Names of a target and a draft: of the pair that comes along, where no target is named."""
    if model is not None:
        return model, draft
    target, small = default_pair()
    return str(target), draft or str(small)


def titles_of(*names: str) -> list[str]:
    """What people call the models of those names, as it may be shown, without those that are ""."""
    return [on_one_line(Path(name).name.removesuffix(".bin").removesuffix(".gguf")) for name in names if name]


def seed_of(seed: int) -> int:
    """That seed, or a new one for 0."""
    return seed or int.from_bytes(os.urandom(4), "little") or 1


def found(*names: str, tokenizer: str, more: Mapping[str, str] | None = None) -> list[str | Path]:
    """Where the target, the draft and the stage are; fetching one shows a bar of its own.

    tokenizer: as it was named. more: packages that the run takes beside those that read the models, and what for: what is
    missing is told, all of it, before anything is fetched or loaded. Raises CheckpointError.
    """
    named = ["" if name in (SELF, NGRAM) else name for name in names]
    if lacking := extras.missing({**needs(named, tokenizer), **(more or {})}):
        raise CheckpointError(lacking)
    words = (SELF, NGRAM, NONE)
    return [find(name, words=words[: 3 * bool(i)]) if name else names[i] for i, name in enumerate(named)]


def decoder_of(
    sources: list[str | Path], tokenizer: str, quantize: str, kv: str, threads: int, show: Show, **more: Any
) -> SpeculativeDecoder:
    """Of a target, a draft and a stage, or "" where there is none; shows how far their loading is."""
    with telling_how_to_restore():
        decoder = SpeculativeDecoder(
            sources[0],
            sources[1] or None,
            tokenizer or None,
            stage=sources[2] or None,
            n_threads=threads or None,
            quantize=quantize,
            kv=cast(KV, kv),
            progress=lambda name, share: show(Bar(f"{LOADING} {name}", share)),
            **more,
        )
    show(LOADING)
    return decoder


def made_with(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """What a text hangs on beside the names of models and how it is drawn."""
    return {"weights": decoder.weights, "kv": decoder.target.kv, "arithmetic": specdec.__arithmetic__}


def check_arguments(prompt: str, top_p: float, seed: int, threads: int, verify: str, quantize: str, tree: str, kv: str) -> None:
    """What Typer's own types do not check."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not valid UTF-8", param_hint="'-i' / '--prompt'") from None
    if math.isnan(top_p):
        raise typer.BadParameter(f"{top_p} is not a number from 0 to 1.", param_hint="'-p' / '--top-p'")
    if seed >= 2**63:
        raise typer.BadParameter(f"{seed} is not below 2^63.", param_hint="'-s' / '--seed'")
    options = ("verify", verify, tuple(VERIFIERS)), ("tree", tree, get_args(TreeMode)), ("kv", kv, get_args(KV))
    for name, value, choices in options:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.", param_hint=f"'--{name}'")
    if tree == "on" and verify == "block":
        raise typer.BadParameter("--verify block judges chains alone; leave one of the two out.", param_hint="'--tree'")
    try:
        kinds_to_make(quantize)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="'--quantize'") from None
    check_threads(threads)


def check_threads(threads: int) -> None:
    if threads > available_threads():
        raise typer.BadParameter(
            f"{threads} threads; this machine has cores for {available_threads()}.", param_hint="'-j' / '--threads'"
        )


def stages_of(drafts: list[str], stage: str) -> tuple[str, str]:
    """The draft and what drafts for it, of -d, which may come twice, and --stage."""
    if len(drafts) > 2:
        raise typer.BadParameter("two at most: a draft, and what drafts for it.", param_hint="'-d' / '--draft'")
    if len(drafts) == 2 and stage:
        raise typer.BadParameter("a second -d drafts for the draft already; name one of the two.", param_hint="'--stage'")
    stage = drafts[1] if len(drafts) == 2 else stage
    return drafts[0] if drafts else "", "" if stage == NONE else stage


def gamma_of(text: str) -> int | Literal["auto"]:
    """The draft length that an option names."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GAMMA:
        raise typer.BadParameter(f"{text!r} is neither auto nor 1 to {MAX_GAMMA}.", param_hint="'-g' / '--gamma'")
    return int(text)


def steps_of(steps: int | None, max_tokens: int | None) -> int | None:
    """What -n says, or is where neither it nor --max-tokens is given; None for the latter."""
    if steps is not None and max_tokens is not None:
        raise typer.BadParameter("-n counts the prompt's tokens too and --max-tokens does not; leave one of the two out.")
    return DEFAULT_STEPS if steps is None and max_tokens is None else steps


def room_of(decoder: SpeculativeDecoder, n_prompt: int, steps: int | None, max_tokens: int | None) -> int:
    """How many tokens may follow the prompt, by the one of the two that is given. Raises ValueError where -n has none left."""
    n_positions = decoder.target.n_positions
    room = n_positions + 1 - n_prompt  # the last token is never run
    if max_tokens is not None:
        return min(max_tokens, room)
    # llama2.c counts positions: n steps make n + 1 tokens, BOS included
    if steps:
        if steps < n_prompt:
            n = min(200, room)
            raise ValueError(
                f"-n {steps} counts the prompt, which has {n_prompt} tokens; --max-tokens {n} would write {n} new ones"
            )
        return min(steps + 1 - n_prompt, room)
    if decoder.n_positions < n_positions:
        say(f"this machine's memory has room for {decoder.n_positions} of the {n_positions} tokens of the target's context")
    return max(decoder.n_positions + 1 - n_prompt, 1)  # of a prompt that is too long for it the decoder tells


def roles_of(names: list[str], draft: str) -> Roles:
    """Who writes, by the names of target and draft."""
    origins = {NGRAM: "from the text so far", SELF: f"by {names[0]} in fewer bits"}
    return Roles(names[0], origins.get(draft, f"by {names[1]}") if draft else "")


@contextmanager
def writing() -> Iterator[None]:
    """Around all output: a reader that has seen enough ends it quietly, a full disk is told in one line."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # let the interpreter's last flush go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE if isinstance(error, BrokenPipeError) else complain(f"cannot write the output: {error.strerror}")
        raise typer.Exit(code) from None


def complain(message: str) -> int:
    say(message)
    return 2


def say(message: str) -> None:
    """One line on stderr."""
    with suppress(OSError):
        print(f"specdec: {on_one_line(message)}", file=sys.stderr)
