"""What several commands need: models found and loaded with a bar, and values that Typer's types do not check."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import typer

from .decoder import NGRAM, SELF, SpeculativeDecoder, TreeMode
from .decoding import VERIFIERS
from .files import find, telling_how_to_restore
from .machine.threads import available_threads
from .progress import LOADING, progress_bar
from .quantizing import kinds_to_make


def found(*names: str) -> list[str | Path]:
    """Where models of those names are; fetching one shows a bar of its own."""
    return [name if name in ("", SELF, NGRAM) else find(name) for name in names]


def decoder_of(
    sources: list[str | Path], tokenizer: str, quantize: str, threads: int, show: Callable[[str], None], **more: Any
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
            progress=lambda name, share: show(progress_bar(name, share)),
            **more,
        )
    show(LOADING)
    return decoder


def check_arguments(prompt: str, top_p: float, seed: int, threads: int, verify: str, quantize: str, tree: str) -> None:
    """What Typer's own types do not check."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not valid UTF-8", param_hint="'-i' / '--prompt'") from None
    if math.isnan(top_p):
        raise typer.BadParameter(f"{top_p} is not a number from 0 to 1.", param_hint="'-p' / '--top-p'")
    if seed >= 2**63:
        raise typer.BadParameter(f"{seed} is not below 2^63.", param_hint="'-s' / '--seed'")
    options = ("verify", verify, tuple(VERIFIERS)), ("tree", tree, get_args(TreeMode))
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
