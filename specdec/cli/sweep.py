"""`specdec sweep`: which options are fastest for these models and prompts. Knows no arrays and no formats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import typer
from rich.console import Console

from specdec.cli.exits import say, writing
from specdec.cli.model_loading import Loaded, models_of
from specdec.cli.options import flag, most_used, of_measuring, of_output, of_sampling, of_speculation, of_text
from specdec.cli.parser import several
from specdec.cli.prompts import text_in
from specdec.cli.request import DRAFT, Request, gamma_of, with_models
from specdec.draft.policy import MAX_GAMMA
from specdec.draft.settings import AUTO, Gamma
from specdec.ui.progress import loading, telling
from specdec.ui.signals import signals


@dataclass(frozen=True, kw_only=True)
class SweepRequest(Request):
    """Of `specdec sweep`."""

    offers = (
        "model draft stage quantize kv pack tokenizer prompts tokens temperatures top_p gammas rounds seeds full threads "
        "as_json as_csv svg"
    )
    draft: str = most_used("", "-d", "--draft", metavar="NAME", help=f"{DRAFT}.")
    prompts: str = of_text("", "--prompts", metavar="FILE", help="One prompt a line. By default a dozen stories.")
    tokens: str = of_text(
        "", "--max-tokens", metavar="LIST", help="New tokens of each text. By default 50,200; with --full 50,100,200,500."
    )
    temperatures: str = of_sampling("0,1", "--temperatures", metavar="LIST", help="Sampling temperatures; 0 is greedy.")
    gammas: str = of_speculation(
        "1,2,4,8,auto", "-g", "--gammas", metavar="LIST", help="Draft tokens per step (γ), 1 to 63, or auto."
    )
    rounds: int = of_measuring(0, "--rounds", metavar="N", min=0, help="How often each text is timed. 0: 3; with --full 5.")
    seeds: int = of_measuring(0, "--seeds", metavar="N", min=0, help="Sampled texts of each prompt. 0: 1; with --full 3.")
    full: bool = flag("--full", group="Measuring", help="All lengths, more rounds and seeds: minutes instead of one.")
    as_csv: bool = flag("--csv", group="Output", help="Rows of CSV on stdout.")
    svg: str = of_output("", "--svg", metavar="FILE", help="Draw the speed-ups as a bar chart.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.lengths, self.degrees, self.draft_lengths
        if self.as_json and self.as_csv:
            raise ValueError("--json and --csv both go to stdout; leave one of the two out")

    @cached_property
    def lengths(self) -> list[int]:
        """New tokens of the texts."""
        text = self.tokens or ("50,100,200,500" if self.full else "50,200")
        return several("--max-tokens", text, int, lambda n: n > 0, "whole numbers from 1 on")

    @cached_property
    def degrees(self) -> list[float]:
        """Temperatures."""
        return several("--temperatures", self.temperatures, float, lambda t: 0 <= t < math.inf, "numbers from 0 (greedy) on")

    @cached_property
    def draft_lengths(self) -> list[Gamma]:
        return several("--gammas", self.gammas, gamma_of, lambda _: True, f"1 to {MAX_GAMMA} or {AUTO}")

    @property
    def n_rounds(self) -> int:
        return self.rounds or (5 if self.full else 3)

    @property
    def n_seeds(self) -> int:
        return self.seeds or (3 if self.full else 1)

    def settled(self) -> "SweepRequest":
        """With its models where they belong."""
        request = with_models(self)
        if self.draft and not request.draft:
            raise ValueError("a sweep compares drafts; leave out -d to try n-grams alone")
        return request

    def beginnings(self) -> Sequence[str]:
        """The prompts: the lines of a file that are not empty, each once, or those that come along."""
        from specdec.bench.sweep import PROMPTS

        lines = text_in(self.prompts).splitlines() if self.prompts else PROMPTS
        prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
        if not prompts:
            raise ValueError(f"--prompts: {self.prompts} has no line with a prompt")
        return prompts

    def settings(self, models: Loaded, prompts: Sequence[str]) -> dict[str, Any]:
        """For JSON: what was measured, and how."""
        return {
            **self.named,
            "quantize": self.quantize,
            "threads": models.decoder.target.n_threads,
            **models.made_with,
            "prompts": prompts,
            "rounds": self.n_rounds,
            "seeds": self.n_seeds,
            "top_p": self.top_p,
        }


def run(request: SweepRequest) -> None:
    """Find the options that are fastest for these models and prompts.

    The target alone, the draft alone, n-grams and the pair write the same texts
    in turn. It takes a minute for the pair that comes along.
    """
    from specdec.bench import sweep  # which nothing else needs
    from specdec.ui import sweep_report as chart

    prompts = request.beginnings()
    if request.svg:
        chart.check_writable(request.svg)
    request = request.settled()
    with models_of(request) as models:
        pair = models.decoder
        samplings = sweep.samplings_of(request.degrees, request.top_p, request.n_seeds)
        texts, notes = sweep.texts_of(pair, prompts, request.lengths, samplings)
    settings, left_out = sweep.settings_of(pair, request.draft_lengths)
    signals.text_begins()
    try:
        with loading("measuring") as show:
            measured = sweep.measure(settings, texts, request.n_rounds, telling(show, "measuring"), lambda: signals.asked)
    except sweep.TextsDiffer as error:
        say(str(error))
        raise typer.Exit(1) from None
    counts = {"prompt": len(prompts), "round": request.n_rounds, "thread": pair.target.n_threads}
    told = [f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items()]
    scale = ", ".join([*told, pair.weights, f"top-p {request.top_p:g}"])
    report = chart.Report.of(measured, request.roles.pair, [scale, *notes, *left_out])
    flaw = chart.write_svg(report, request.svg) if request.svg else ""  # first: whoever reads stdout may have left
    with writing():
        if request.as_json:
            print(chart.to_json(report, **request.settings(models, prompts)))
        elif request.as_csv:
            print(chart.to_csv(report), end="")
            Console(stderr=True, soft_wrap=True).print(report.conclusion, markup=False, highlight=False)
        else:
            chart.show(report, Console())
    if flaw:
        raise ValueError(flaw)
