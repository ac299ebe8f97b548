"""`specdec sweep`: which options are fastest for these models and prompts. Knows no arrays and no formats."""

import typer
from rich.console import Console

from ..drafting.settings import AUTO
from ..screens.interrupts import signals
from ..screens.progress import TIMING, loading, telling
from .options import (
    AsCsv,
    AsJson,
    DraftFile,
    Full,
    Gammas,
    KVOption,
    Lengths,
    ModelFile,
    PromptFile,
    Rounds,
    Seeds,
    StageName,
    SvgFile,
    Temperatures,
    Threads,
    TokenizerFile,
    TopP,
    WhatToQuantize,
)
from .wiring import NONE, check_arguments, decoder_of, found, made_with, or_the_pair, say, titles_of, writing


def compare(
    model: ModelFile = None,
    draft: DraftFile = "",
    stage: StageName = "",
    quantize: WhatToQuantize = "draft",
    kv: KVOption = AUTO,
    tokenizer: TokenizerFile = "",
    prompts: PromptFile = "",
    tokens: Lengths = "",
    temperatures: Temperatures = "0,1",
    top_p: TopP = 0.9,
    gammas: Gammas = "1,2,4,8,auto",
    rounds: Rounds = 0,
    seeds: Seeds = 0,
    full: Full = False,
    threads: Threads = 0,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    svg: SvgFile = "",
) -> None:
    """Find the options that are fastest for these models and prompts.

    The target alone, the draft alone, n-grams and the pair write the same texts
    in turn. It takes a minute for the pair that comes along.
    """
    from ..measuring import sweep  # which nothing else needs
    from ..screens import sweep as sweep_chart  # which nothing else needs

    check_arguments("", top_p, 0, threads, verify="coupled", quantize=quantize, tree="off", kv=kv)
    if draft == NONE:
        raise typer.BadParameter("a sweep compares drafts; leave it out to try n-grams alone.", param_hint="'-d' / '--draft'")
    if as_json and as_csv:
        raise typer.BadParameter("one of the two goes to stdout.", param_hint="'--json' / '--csv'")
    lengths = sweep.lengths_of(tokens or ("50,100,200,500" if full else "50,200"))
    degrees, sizes = sweep.temperatures_of(temperatures), sweep.gammas_of(gammas)
    beginnings = sweep.prompts_of(prompts) if prompts else sweep.PROMPTS
    rounds, seeds = rounds or (5 if full else 3), seeds or (3 if full else 1)
    if svg:
        sweep_chart.check_writable(svg)
    model, draft = or_the_pair(model, draft)
    sources = found(model, draft, stage, tokenizer=tokenizer)
    with loading() as show:
        pair = decoder_of(sources, tokenizer, quantize, kv, threads, show)
        texts, notes = sweep.texts_of(pair, beginnings, lengths, sweep.samplings_of(degrees, top_p, seeds))
        show(TIMING)
        pair.warm_up()  # which chooses the threads of both models
        settings, left_out = sweep.settings_of(pair, sizes)
        signals.text_begins()
        try:
            measured = sweep.measure(settings, texts, rounds, telling(show, "measuring"), lambda: signals.asked)
        except sweep.TextsDiffer as error:
            wrong = str(error)
        else:
            wrong = ""
    if wrong:
        say(wrong)
        raise typer.Exit(1)
    n_threads = pair.target.n_threads
    counts = {"prompt": len(beginnings), "round": rounds, "thread": n_threads}
    told = [f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items()]
    scale = ", ".join([*told, pair.weights, f"top-p {top_p:g}"])
    title = " + ".join(titles_of(model, draft, stage))
    report = sweep_chart.Report.of(measured, title, [scale, *notes, *left_out])
    flaw = sweep_chart.write_svg(report, svg) if svg else ""  # first: whoever reads stdout may have left
    with writing():
        if as_json:
            settled = {
                "model": model,
                "draft": draft or None,
                "stage": stage or None,
                "quantize": quantize,
                "threads": n_threads,
                **made_with(pair),
            }
            print(sweep_chart.to_json(report, **settled, prompts=beginnings, rounds=rounds, seeds=seeds, top_p=top_p))
        elif as_csv:
            print(sweep_chart.to_csv(report), end="")
            Console(stderr=True, soft_wrap=True).print(report.conclusion, markup=False, highlight=False)
        else:
            sweep_chart.show(report, Console())
    if flaw:
        raise ValueError(flaw)
