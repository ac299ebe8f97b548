"""`specdec sweep`: finds the fastest speculation options for these models and prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import typer
from rich.console import Console

from specdec.argument_checks import parse_list
from specdec.cli.common_options import AS_JSON, TOP_P, ModelRequest, parse_gamma, with_models
from specdec.cli.model_loading import load_models
from specdec.cli.option_fields import option
from specdec.cli.output_errors import guard_output, print_message
from specdec.cli.prompt_sources import read_text_input
from specdec.draft.draft_length import MAX_GAMMA
from specdec.draft.settings import AUTO, Gamma
from specdec.sampling import Sampling
from specdec.ui.progress import make_progress_callback, show_status
from specdec.ui.signals import signals


@dataclass(frozen=True, kw_only=True)
class SweepRequest(ModelRequest):
    """The options of `specdec sweep`."""

    prompts: str = option("", "--prompts FILE", "Generation", "File with one prompt per line. By default a dozen story openings.")
    tokens: str = option("50,200", "--max-tokens LIST", "Generation", "New tokens per output.")
    temperatures: str = option("0,1", "--temperatures LIST", "Sampling", "Sampling temperatures. 0: greedy.")
    top_p: float = TOP_P
    gammas: str = option("1,2,4,8,auto", "-g, --gammas LIST", "Speculation", "Draft tokens per step (γ), 1 to 63, or auto.")
    rounds: int = option(3, "--rounds N", "Measuring", "Timed runs of each output.", min=1)
    seeds: int = option(1, "--seeds N", "Measuring", "Sampled outputs per prompt.", min=1)
    as_json: bool = AS_JSON
    svg: str = option("", "--svg FILE", "Output", "Write the table and the bars to this file as SVG.")

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if one is not valid."""
        super().__post_init__()
        _ = self.lengths, self.samplings, self.draft_lengths

    @cached_property
    def lengths(self) -> list[int]:
        """The numbers of new tokens per output, from --max-tokens."""
        return parse_list("--max-tokens", self.tokens, int, lambda n: n > 0, "whole numbers from 1 on")

    @cached_property
    def samplings(self) -> list[Sampling]:
        """The sampling settings: each of --temperatures, with --seeds seeds at positive ones."""
        expected = "numbers from 0 (greedy) on"
        values = parse_list("--temperatures", self.temperatures, float, lambda t: 0 <= t < math.inf, expected)
        return [Sampling(t, 0, self.top_p, seed) for t in values for seed in range(1, 1 + (self.seeds if t else 1))]

    @cached_property
    def draft_lengths(self) -> list[Gamma]:
        """The draft lengths to compare, numbers or "auto", from --gammas."""
        return parse_list("--gammas", self.gammas, parse_gamma, lambda _: True, f"1 to {MAX_GAMMA} or {AUTO}")

    def resolve(self) -> "SweepRequest":
        """Return a copy of the request with the names of its models filled in.

        Raises:
            ValueError: The draft is "none".
        """
        request = with_models(self)
        if self.draft and not request.draft:
            raise ValueError("sweep needs a draft; leave out -d to measure lookup")
        return request

    def read_prompts(self) -> Sequence[str]:
        """Return the distinct non-empty lines of the prompt file, or the default prompts.

        Raises:
            ValueError: The file cannot be read, or has no prompt.
        """
        from specdec.bench.sweep import PROMPTS

        lines = read_text_input(self.prompts).splitlines() if self.prompts else PROMPTS
        prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
        if not prompts:
            raise ValueError(f"--prompts: {self.prompts} has no line with a prompt")
        return prompts


def run(request: SweepRequest) -> None:
    """Find the fastest options for these models and prompts.

    The target alone, the draft alone, lookup and the pair generate the same
    outputs in turn. This takes a minute for the embedded pair.
    """
    from specdec.bench import sweep  # imported here, since no other command needs it
    from specdec.ui import sweep_report as chart

    prompts = request.read_prompts()
    if request.svg:
        chart.check_writable(request.svg)
    request = request.resolve()
    with load_models(request) as models:
        pair = models.decoder
        cases, notes = sweep.make_cases(pair, prompts, request.lengths, request.samplings)
    settings, skipped = sweep.make_settings(pair, request.draft_lengths)
    signals.begin_output()
    try:
        with show_status("measuring") as show:
            on_progress = make_progress_callback(show, "measuring")
            measured = sweep.measure(settings, cases, request.rounds, on_progress, lambda: signals.end_signal)
    except sweep.OutputMismatchError as error:
        print_message(str(error))
        raise typer.Exit(1) from None
    n_threads = pair.target.n_threads
    counts = {"prompt": len(prompts), "round": request.rounds, "thread": n_threads}
    counted = [f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items()]
    scale = ", ".join([*counted, pair.weights, f"top-p {request.top_p:g}"])
    report = chart.SweepReport.from_runs(measured, request.labels.pair, [scale, *notes, *skipped])
    svg_error = chart.write_svg(report, request.svg) if request.svg else ""  # before stdout, whose reader may have closed it
    with guard_output():
        if request.as_json:
            options = {"quantize": request.quantize, "top_p": request.top_p, "rounds": request.rounds, "seeds": request.seeds}
            details = {**request.model_names, **models.metadata, **options, "threads": n_threads, "prompts": prompts}
            print(chart.to_json(report, **details))
        else:
            chart.print_report(report, Console())
    if svg_error:
        raise ValueError(svg_error)
