"""`specdec race`, and what `--compare` shares with it: the target alone and the pair. Knows no arrays and no formats."""

from collections.abc import Sequence
from typing import Any, cast

import typer
from rich.console import Console

from ..decoder import SpeculativeDecoder
from ..drafting.settings import AUTO, TreeMode
from ..drafting.team import NGRAM
from ..measuring.race import Race, measure, to_json
from ..sampling import Sampling
from ..screens.interrupts import signals
from ..screens.progress import READING, TIMING, loading, telling
from ..screens.window import fits
from .asking import draft_name, prompt_of
from .options import (
    AsJson,
    DraftFiles,
    Gamma,
    KVOption,
    ModelFile,
    NewTokens,
    PromptText,
    Seed,
    StageName,
    Steps,
    Temperature,
    Threads,
    TokenizerFile,
    TopK,
    TopP,
    TreeOption,
    WhatToQuantize,
)
from .wiring import (
    NONE,
    check_arguments,
    decoder_of,
    found,
    gamma_of,
    made_with,
    or_the_pair,
    roles_of,
    room_of,
    seed_of,
    stages_of,
    steps_of,
    titles_of,
    writing,
)


def both(decoder: SpeculativeDecoder, prompt: list[int], max_tokens: int, sampling: Sampling, stops: Sequence[str] = ()) -> Race:
    """The target alone and the pair, measured in turns once the prompt is read."""
    with loading(READING) as show:
        tell = telling(show, READING)
        for share in decoder.read(prompt):
            tell(share)
        return measure(decoder, prompt, max_tokens, sampling, telling(show, "running both"), stops)


def run(
    model: ModelFile = None,
    drafts: DraftFiles = None,
    stage: StageName = "",
    quantize: WhatToQuantize = "draft",
    kv: KVOption = AUTO,
    tokenizer: TokenizerFile = "",
    prompt: PromptText = None,
    steps: Steps = None,
    new_tokens: NewTokens = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = 0,
    gamma: Gamma = AUTO,
    tree: TreeOption = "off",
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Watch the target alone and the pair write one text, side by side.

    Both run by themselves first, a few times each; then their fastest runs are
    shown together, in slow motion.
    """
    from ..screens.race import RaceView  # which nothing else needs

    check_arguments(prompt or "", top_p, seed, threads, verify="coupled", quantize=quantize, tree=tree, kv=kv)
    draft, stage = stages_of([draft_name(name) for name in drafts or []], draft_name(stage))
    steps = steps_of(steps, new_tokens)
    prompt = prompt_of(prompt, "", None)
    if draft == NONE:
        raise typer.BadParameter("a race needs one.", param_hint="'-d' / '--draft'")
    model, draft = or_the_pair(model, draft)
    draft = draft or NGRAM
    sampling = Sampling(temperature, top_k, top_p, seed_of(seed))
    settings: dict[str, Any] = {"gamma": gamma_of(gamma), "tree": cast(TreeMode, tree)}
    sources = found(model, draft, stage, tokenizer=tokenizer)
    with loading() as show:
        decoder = decoder_of(sources, tokenizer, quantize, kv, threads, show, **settings)
        prompt_tokens = decoder.encode(prompt)
        show(TIMING)
        decoder.warm_up()
    race = both(decoder, prompt_tokens, room_of(decoder, len(prompt_tokens), steps, new_tokens), sampling)
    names = titles_of(model, draft, stage)
    out, pair = Console(), " + ".join(names)
    signals.text_begins()
    with writing():
        if as_json:
            text = decoder.tokenizer.decode(prompt_tokens + race.pair.tokens)
            print(to_json(race, text, model=model, draft=draft, stage=stage or None, seed=sampling.seed, **made_with(decoder)))
        else:
            if fits(out):
                RaceView(race, roles_of(names, draft), pair, decoder.tokenizer, out).play()
            figures = race.report(f"{names[0]} alone", pair, out.width if out.is_terminal else None)
            lines = [*figures, f"{race.sentence}; seed {sampling.seed}"]
            out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=not out.is_terminal)
    if not race.is_same_text:
        raise typer.Exit(1)
