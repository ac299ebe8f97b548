"""The command line: options, wiring, exit codes. Knows no arrays and no formats."""

import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console

import specdec

from .decoder import AUTO, FIXED_GAMMA, NGRAM, SELF, SpeculativeDecoder, kinds_to_make
from .decoding import VERIFIERS, Prompt, Statistics, VerifyMode
from .files import default_pair, find, telling_how_to_restore
from .interrupts import exit_code, signals
from .machine.threads import available_threads
from .output import PlainView, SilentView, View, print_summary, printable, to_json
from .panel import LivePanel
from .planning import MAX_GAMMA
from .readers import CheckpointError
from .sampling import Sampling
from .tokenizer import TokenizerError

DEFAULT_PROMPT = "Once upon a time"
LOADING = "loading; a first run compiles the kernels, 10 to 20 seconds"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
UsageError = cast(type[Exception], next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"))
BAR_CELLS = 24
FEW_PASSES = 20  # that tell nothing
NONE = "none"  # as a draft: the target decodes alone
BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


def option(*names: str, group: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=group, **more)


def flag(*names: str, group: str, help: str) -> Any:
    return option(*names, group=group, help=help, metavar="")


ModelFile = Annotated[
    str,
    option(
        *("-m", "--model"), group="Models", metavar="NAME",
        help="Target: a Hugging Face folder or org/name, or a llama2.c checkpoint: a path, or a name in models/.",
    ),
]  # fmt: skip
DraftFile = Annotated[
    str,
    option(
        *("-d", "--draft"), group="Models", metavar="NAME|self|ngram|none",
        help="Draft, as -m; self: a copy of the target in fewer bits; ngram: what followed in the text, the default with -m.",
    ),
]  # fmt: skip
WhatToQuantize = Annotated[
    str,
    option(
        "--quantize", group="Models", metavar="WHAT",
        help="Make int8 while loading: draft, target, both or none; or as in draft=int4. A draft's bits never change the text.",
    ),
]  # fmt: skip
TokenizerFile = Annotated[
    str,
    option(
        *("-z", "--tokenizer"), group="Models", metavar="FILE",
        help="Tokenizer. By default the folder's; for a checkpoint tok<vocab>.bin or tokenizer.bin beside it, else in models/.",
    ),
]  # fmt: skip
PromptText = Annotated[str, option("-i", "--prompt", group="Text", metavar="TEXT", help="What the text begins with.")]
Steps = Annotated[
    int,
    option(
        *("-n", "--steps"), group="Text", metavar="N", min=0,
        help="Tokens in all, prompt included, BOS not. 0: to the end of the target's context, or of memory.",
    ),
]  # fmt: skip
Temperature = Annotated[float, option("-t", "--temperature", group="Sampling", metavar="X", min=0.0, help="0 is greedy.")]
TopP = Annotated[
    float,
    option(
        *("-p", "--top-p"), group="Sampling", metavar="X", min=0.0, max=1.0,
        help="Keep the smallest set heavier than this. 0, 1: off.",
    ),
]  # fmt: skip
TopK = Annotated[int, option("-k", "--top-k", group="Sampling", metavar="N", min=0, help="Keep this many tokens. 0: off.")]
Seed = Annotated[
    int, option("-s", "--seed", group="Sampling", metavar="N", min=0, help="Same seed, same text. 0: a new one each time.")
]
Gamma = Annotated[
    str,
    option(
        *("-g", "--gamma"),
        group="Speculation",
        metavar="N|auto",
        help="Draft tokens per step (γ). auto: as many as pay, none where none do; with --verify rejection or block, 4.",
    ),
]
VerifyOption = Annotated[
    str,
    option(
        "--verify", group="Speculation", metavar="coupled|rejection|block",
        help="coupled: the text is the plain run's of the same seed. rejection (Leviathan et al. 2023), block (Sun et al. 2024; "
        "accepts more): same distribution.",
    ),
]  # fmt: skip
Threads = Annotated[
    int,
    option(
        "-j", "--threads", group="Machine", metavar="N", min=0, help="CPU threads. 0: all cores; a text takes fewer if faster."
    ),
]
Plain = Annotated[bool, flag("--plain", group="Output", help="No panel: the text on stdout as it comes, the summary on stderr.")]
Pace = Annotated[
    float,
    option(
        "--pace", group="Output", metavar="X", min=0.0,
        help="Steps a second at most, to watch the panel; the pauses are not in the rates. 0: full speed.",
    ),
]  # fmt: skip
AsJson = Annotated[bool, flag("--json", group="Output", help="One JSON object on stdout.")]
ShowVersion = Annotated[bool, flag("--version", group="Output", help="Print the version and exit.")]
Shape = Annotated[
    str, option("--shape", group="Model", metavar="SHAPE", help="15M, 42M, 110M, or dim,hidden,layers,heads,kv,vocab,seq.")
]
Int8 = Annotated[bool, flag("--int8", group="Model", help="Weights quantized to int8, as --quantize does.")]


@app.callback(invoke_without_command=True)
def tell(
    context: typer.Context,
    model: ModelFile = "",
    draft: DraftFile = "",
    quantize: WhatToQuantize = "draft",
    tokenizer: TokenizerFile = "",
    prompt: PromptText = DEFAULT_PROMPT,
    steps: Steps = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = 0,
    gamma: Gamma = AUTO,
    verify: VerifyOption = "coupled",
    threads: Threads = 0,
    plain: Plain = False,
    pace: Pace = 0.0,
    as_json: AsJson = False,
    version: ShowVersion = False,
) -> None:
    """Speculative decoding of llama2.c models on the CPU.

    A small draft model proposes tokens, the target judges several of them in
    one pass, and you see which ones stood. The text is the one that the target
    alone would have written with the same seed.
    """
    if context.invoked_subcommand:
        return
    if version:
        print(specdec.__version__)
        return
    _check_arguments(prompt, top_p, seed, threads, verify=verify, quantize=quantize)
    _gamma(gamma)
    if not model:
        target, small = default_pair()
        model, draft = str(target), draft or str(small)
    elif not draft and verify == "coupled":  # whose text no drafter changes
        draft = NGRAM
    draft = "" if draft == NONE else draft
    sampling = Sampling(temperature, top_k, top_p, seed or int.from_bytes(os.urandom(4), "little") or 1)
    sources = [name if name in ("", SELF, NGRAM) else find(name) for name in (model, draft)]  # fetching shows a bar of its own
    with loading() as show:
        begin = time.perf_counter()
        with telling_how_to_restore():
            decoder = SpeculativeDecoder(
                sources[0],
                sources[1] or None,
                tokenizer or None,
                gamma=_gamma(gamma),
                verify=cast(VerifyMode, verify),
                n_threads=threads or None,
                quantize=quantize,
                progress=lambda name, share: show(progress_bar(name, share)),
            )
        show(LOADING)
        prompt_tokens = decoder.encode(prompt)
        loaded = time.perf_counter()
        decoder.warm_up()
        times = {"load_seconds": loaded - begin, "warmup_seconds": time.perf_counter() - loaded}
    statistics = Statistics(len(prompt_tokens))
    # llama2.c counts positions: n steps make n + 1 tokens, BOS included
    total = min(steps or decoder.n_positions, decoder.target.n_positions)
    if not steps and total < decoder.target.n_positions:
        _tell(f"this machine's memory has room for {total} of the {decoder.target.n_positions} tokens of the target's context")
    max_tokens = max(0, total + 1 - len(prompt_tokens))
    out = Console()
    n_proposed = (FIXED_GAMMA if gamma == AUTO else int(gamma)) if draft else 0
    view: View
    if as_json:
        view = SilentView(decoder.tokenizer)
    elif not plain and LivePanel.fits(out):
        title = " + ".join(Path(name).name.removesuffix(".bin") for name in (model, draft) if name)
        view = LivePanel(decoder.tokenizer, out, statistics, max_tokens, n_proposed, title, pace)
    else:
        view = PlainView(decoder.tokenizer, sys.stdout)
    with writing():
        _run(view, decoder, prompt, max_tokens, sampling, statistics)
        statistics.plain_seconds = decoder.plain_seconds
        if isinstance(view, SilentView):
            settings = {
                "model": model,
                "draft": draft or None,
                "prompt": prompt,
                "steps": steps,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "gamma": _gamma(gamma) if draft else 0,
                "verify": verify,
                "quantize": quantize,
                "threads": decoder.target.n_threads,
                "tokenizer": str(decoder.tokenizer.path),
                "weights": decoder.weights,
            }
            print(to_json(statistics, view.text, view.tokens, **times, seed=sampling.seed, settings=settings))
        else:
            told = {"seed": sampling.seed, "threads": decoder.target.n_threads, "weights": decoder.weights, **_whose(decoder)}
            told |= _advice(decoder, statistics)
            print_summary(Console(stderr=True), statistics, **told)


def _whose(decoder: SpeculativeDecoder) -> dict[str, str]:
    """What the draft has no part in, for the summary."""
    if not (decoder.draft or decoder.ngrams):
        return {}
    return {"text" if decoder.verify == "coupled" else "distribution": f"the {decoder.target.weights.kind} target's own"}


def _advice(decoder: SpeculativeDecoder, statistics: Statistics) -> dict[str, str]:
    """What to do where a draft does not pay, for the summary."""
    if not decoder.draft or statistics.target_passes < FEW_PASSES:
        return {}
    n_drafted = sum(statistics.drafted_histogram[1:])
    if decoder.gamma == AUTO and n_drafted < statistics.target_passes / 4:
        return {"note": f"a draft does not pay here: {n_drafted} of {statistics.target_passes} passes had one"}
    if decoder.gamma != AUTO and 0 < statistics.speed_up < 1:
        return {"note": "-g does not pay here: leave it out"}
    return {}


def _run(
    view: View,
    decoder: SpeculativeDecoder,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    statistics: Statistics,
) -> None:
    """Decode into the view, until the text or somebody's patience is at its end."""
    with view:
        for event in decoder.stream(prompt, max_tokens, sampling):
            if isinstance(event, Prompt):  # before, while a long one is read, there is nothing to print at the end
                signals.text_begins()
            statistics.add(event)
            view.show(event)
            if signals.asked:
                statistics.stop_reason = "interrupted"
                break


def _gamma(text: str) -> int | Literal["auto"]:
    """The draft length that an option names."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GAMMA:
        raise typer.BadParameter(f"{text!r} is neither auto nor 1 to {MAX_GAMMA}.", param_hint="'-g' / '--gamma'")
    return int(text)


def _check_arguments(prompt: str, top_p: float, seed: int, threads: int, verify: str, quantize: str) -> None:
    """What Typer's own types do not check."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not valid UTF-8", param_hint="'-i' / '--prompt'") from None
    if math.isnan(top_p):
        raise typer.BadParameter(f"{top_p} is not a number from 0 to 1.", param_hint="'-p' / '--top-p'")
    if seed >= 2**63:
        raise typer.BadParameter(f"{seed} is not below 2^63.", param_hint="'-s' / '--seed'")
    if verify not in VERIFIERS:
        raise typer.BadParameter(f"{verify!r} is not one of {', '.join(VERIFIERS)}.", param_hint="'--verify'")
    try:
        kinds_to_make(quantize)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="'--quantize'") from None
    _check_threads(threads)


def _check_threads(threads: int) -> None:
    if threads > available_threads():
        raise typer.BadParameter(
            f"{threads} threads; this machine has cores for {available_threads()}.", param_hint="'-j' / '--threads'"
        )


@app.command("bench")
def measure(shape: Shape = "42M", threads: Threads = 0, int8: Int8 = False, as_json: AsJson = False) -> None:
    """Time passes over T tokens of a model with random weights, beside the memory bandwidth they are up against."""
    from . import bench as benchmark  # which nothing else needs

    _check_threads(threads)
    try:
        config = benchmark.parse_shape(shape)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--shape'") from None
    with loading(""):
        result = benchmark.run(config, threads or None, "int8" if int8 else "fp32")
    with writing():
        print(benchmark.to_json(result)) if as_json else Console().print(benchmark.to_table(result, shape))


def progress_bar(name: str, share: float) -> str:
    """How far the loading of a model is, in a line."""
    return f"loading {name} {'━' * round(BAR_CELLS * share):{BAR_CELLS}} {share:4.0%}"


@contextmanager
def loading(message: str = LOADING) -> Iterator[Callable[[str], None]]:
    """Around all that writes no output: a terminal shows the message meanwhile, and a disk's trouble is not the output's.

    Gives what shows another message instead.
    """
    is_shown = bool(message) and sys.stderr.isatty()
    room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if is_shown else 0
    width = 0

    def show(line: str) -> None:
        nonlocal width
        if is_shown:
            width = max(width, len(line))
            with suppress(OSError):  # the terminal has gone
                os.write(sys.stderr.fileno(), f"\r{line.ljust(width)[:room]}\r".encode(errors="replace"))

    def erase() -> None:
        show(" " * (width + len("^C")))

    with signals.at_sudden_end(erase, do=lambda: show(message)):
        try:
            yield show
        except OSError as error:
            raise ValueError(f"cannot load: {error.filename or 'a file'}: {error.strerror or error}") from None
        finally:
            erase()


@contextmanager
def writing() -> Iterator[None]:
    """Around all output: a reader that has seen enough ends it quietly, a full disk is told in one line."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # let the interpreter's last flush go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE if isinstance(error, BrokenPipeError) else _complain(f"cannot write the output: {error.strerror}")
        raise typer.Exit(code) from None


def main() -> None:
    """The command line: one line on stderr and exit code 2 for whatever the person at the keyboard can mend."""
    # a closed stream is None: what goes there is lost; a file name of no encoding, or a story in an ASCII terminal, still prints
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with writing():
            code = app(standalone_mode=False)
    except typer.Exit as done:
        code = done.exit_code
    except UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        code = _complain(f"{message} A model is named with -m." if message.startswith("No such command") else message)
    except (CheckpointError, TokenizerError, ValueError) as error:
        code = _complain(str(error))
    except MemoryError as error:
        code = _complain(str(error) or "not enough memory for this model")
    except SystemExit:  # Rich's, where the reader of its output has left
        code = BROKEN_PIPE
    sys.exit(exit_code(signals.asked) if signals.asked else code or 0)


def _complain(message: str) -> int:
    _tell(message)
    return 2


def _tell(message: str) -> None:
    """One line on stderr."""
    with suppress(OSError):
        print(f"specdec: {printable(' '.join(message.split()))}", file=sys.stderr)


# The sweep's own command

Gammas = Annotated[
    str, option("-g", "--gammas", group="Speculation", metavar="LIST", help="Draft tokens per step (γ), 1 to 63, or auto.")
]
Lengths = Annotated[
    str,
    option("--tokens", group="Text", metavar="LIST", help="Lengths of the texts. By default 50,200; with --full 50,100,200,500."),
]
Temperatures = Annotated[str, option("--temperatures", group="Sampling", metavar="LIST", help="0 is greedy.")]
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


@app.command("sweep")
def compare(
    model: ModelFile = "",
    draft: DraftFile = "",
    quantize: WhatToQuantize = "draft",
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
    from . import sweep, sweep_chart  # which nothing else needs

    _check_arguments("", top_p, 0, threads, verify="coupled", quantize=quantize)
    if as_json and as_csv:
        raise typer.BadParameter("one of the two goes to stdout.", param_hint="'--json' / '--csv'")
    lengths = sweep.lengths_of(tokens or ("50,100,200,500" if full else "50,200"))
    degrees, sizes = sweep.temperatures_of(temperatures), sweep.gammas_of(gammas)
    beginnings = sweep.prompts_of(prompts) if prompts else sweep.PROMPTS
    rounds, seeds = rounds or (5 if full else 3), seeds or (3 if full else 1)
    if svg:
        sweep_chart.check_writable(svg)
    if not model:
        target, small = default_pair()
        model, draft = str(target), draft or str(small)
    sources = [name if name in ("", SELF, NGRAM) else find(name) for name in (model, draft)]
    with loading() as show:
        with telling_how_to_restore():
            pair = SpeculativeDecoder(
                sources[0],
                sources[1] or None,
                tokenizer or None,
                n_threads=threads or None,
                quantize=quantize,
                progress=lambda name, share: show(progress_bar(name, share)),
            )
        show(LOADING)
        texts, notes = sweep.texts_of(pair, beginnings, lengths, sweep.samplings_of(degrees, top_p, seeds))
        pair.warm_up()  # which chooses the threads of both models
        settings, left_out = sweep.settings_of(pair, sizes)
        signals.text_begins()
        try:
            measured = sweep.measure(settings, texts, rounds, _telling(show), lambda: signals.asked)
        except sweep.TextsDiffer as error:
            wrong = str(error)
        else:
            wrong = ""
    if wrong:
        _tell(wrong)
        raise typer.Exit(1)
    n_threads = pair.target.n_threads
    counts = {"prompt": len(beginnings), "round": rounds, "thread": n_threads}
    told = [f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items()]
    scale = ", ".join([*told, pair.weights, f"top-p {top_p:g}"])
    title = " + ".join(Path(name).name.removesuffix(".bin") for name in (model, draft) if name)
    report = sweep_chart.Report.of(measured, title, [scale, *notes, *left_out])
    flaw = sweep_chart.write_svg(report, svg) if svg else ""  # first: whoever reads stdout may have left
    with writing():
        if as_json:
            settled = {
                "model": model,
                "draft": draft or None,
                "quantize": quantize,
                "threads": n_threads,
                "weights": pair.weights,
            }
            print(sweep_chart.to_json(report, **settled, prompts=beginnings, rounds=rounds, seeds=seeds, top_p=top_p))
        elif as_csv:
            print(sweep_chart.to_csv(report), end="")
            Console(stderr=True, soft_wrap=True).print(report.conclusion, markup=False, highlight=False)
        else:
            sweep_chart.show(report, Console())
    if flaw:
        raise ValueError(flaw)


def _telling(show: Callable[[str], None]) -> Callable[[float], None]:
    """What shows a share that is done as a bar, with the time that is left; not so often that it would cost any."""
    begin, last = time.monotonic(), 0.0

    def tell(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + 0.1:
            last = now
            left = f", {(now - begin) * (1 - share) / share:.0f} s left" if share > 0.01 else ""
            show(f"measuring {'━' * round(BAR_CELLS * share):{BAR_CELLS}} {share:4.0%}{left}")

    return tell
