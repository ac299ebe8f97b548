"""`specdec ngrams`: a table of what follows what in a target's text. Knows no arrays and no formats."""

from pathlib import Path

from ..decoder import AUTO, NGRAM
from ..sampling import Sampling
from ..screens.interrupts import signals
from ..screens.output import on_one_line
from ..screens.progress import TIMING, loading, telling
from .options import (
    DraftFile,
    HowMany,
    KVOption,
    ModelFile,
    PromptFile,
    TableFile,
    Temperature,
    TextFile,
    Threads,
    TokenizerFile,
    TopP,
    WhatToQuantize,
)
from .wiring import NONE, check_arguments, decoder_of, found, or_the_pair, writing


def count(
    table: TableFile,
    model: ModelFile = None,
    draft: DraftFile = "",
    quantize: WhatToQuantize = "draft",
    kv: KVOption = AUTO,
    tokenizer: TokenizerFile = "",
    file: TextFile = "",
    prompts: PromptFile = "",
    tokens: HowMany = 50_000,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.9,
    threads: Threads = 0,
) -> None:
    """Count what follows what in a target's text: a table for -d and --stage.

    Ctrl-C keeps what was counted until then.
    """
    from ..drafting import ngram_table  # which nothing else needs
    from ..measuring import counting, sweep  # which nothing else needs

    check_arguments("", top_p, 0, threads, verify="coupled", quantize=quantize, tree=AUTO, kv=kv)
    beginnings = sweep.prompts_of(prompts) if prompts else sweep.PROMPTS
    ngram_table.check_place(Path(table))
    model, draft = or_the_pair(model, draft)
    sources = found(model, "" if draft == NONE or file else draft or NGRAM, "", tokenizer=tokenizer)
    with loading() as show:
        decoder = decoder_of(sources, tokenizer, quantize, kv, threads, show)
        tell, asked = telling(show, "counting"), lambda: signals.asked
        if file:
            texts = counting.read(Path(file), decoder.tokenizer, tell, asked)
        else:
            show(TIMING)
            decoder.warm_up()
            texts = counting.written(decoder, beginnings, tokens, Sampling(temperature, 0, top_p, 1), tell, asked)
        signals.text_begins()
        counted = ngram_table.count(texts, decoder.n_ids)
        ngram_table.save_table(counted, Path(table))
    with writing():
        print(f"{on_one_line(table)}: what follows in {counted.keys.size} contexts, in {Path(table).stat().st_size} bytes")
