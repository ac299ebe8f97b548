"""The command line: options, wiring, exit codes. Knows no arrays and no formats."""

import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast, get_args

import typer
from rich.console import Console

import specdec

from .decoder import AUTO, NGRAM, SELF, SpeculativeDecoder, TreeMode, kinds_to_make
from .decoding import VERIFIERS, Prompt, Statistics, VerifyMode
from .files import default_pair, find, telling_how_to_restore
from .interrupts import exit_code, signals
from .machine.threads import available_threads
from .options import (
    AsCsv,
    AsJson,
    DraftFile,
    DraftFiles,
    Full,
    Gamma,
    Gammas,
    HowMany,
    Int8,
    KVOption,
    Lengths,
    ModelFile,
    Pace,
    Plain,
    PromptFile,
    PromptText,
    Rounds,
    Seed,
    Seeds,
    Shape,
    ShowVersion,
    StageName,
    Stats,
    Steps,
    SvgFile,
    TableFile,
    Temperature,
    Temperatures,
    TextFile,
    Threads,
    TokenizerFile,
    TopK,
    TopP,
    TreeOption,
    VerifyOption,
    WhatToQuantize,
)
from .output import FEW_PASSES, PlainView, Roles, SilentView, View, print_result, print_summary, printable, to_json
from .panel import LivePanel
from .planning import MAX_GAMMA
from .readers import CheckpointError
from .sampling import Sampling
from .tokenizer import TokenizerError
from .transformer import KV

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
NONE = "none"  # as a draft: the target decodes alone
BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


@app.callback(invoke_without_command=True)
def tell(
    context: typer.Context,
    model: ModelFile = "",
    drafts: DraftFiles = None,
    stage: StageName = "",
    quantize: WhatToQuantize = "draft",
    kv: KVOption = AUTO,
    tokenizer: TokenizerFile = "",
    prompt: PromptText = DEFAULT_PROMPT,
    steps: Steps = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = 0,
    gamma: Gamma = AUTO,
    verify: VerifyOption = "coupled",
    tree: TreeOption = AUTO,
    threads: Threads = 0,
    plain: Plain = False,
    pace: Pace = 0.0,
    stats: Stats = False,
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
        print(f"specdec {specdec.__version__}, arithmetic {specdec.__arithmetic__}")
        return
    _check_arguments(prompt, top_p, seed, threads, verify=verify, quantize=quantize, tree=tree, kv=kv)
    _gamma(gamma)
    draft, stage = _stages(drafts or [], stage)
    if not model:
        target, small = default_pair()
        model, draft = str(target), draft or str(small)
    elif not draft and verify == "coupled":  # whose text no drafter changes
        draft = NGRAM
    draft = "" if draft == NONE else draft
    sampling = Sampling(temperature, top_k, top_p, seed or int.from_bytes(os.urandom(4), "little") or 1)
    sources = _found(model, draft, stage)
    with loading() as show:
        begin = time.perf_counter()
        decoder = _decoder(
            sources,
            tokenizer,
            quantize,
            threads,
            show,
            gamma=_gamma(gamma),
            verify=cast(VerifyMode, verify),
            tree=cast(TreeMode, tree),
            kv=cast(KV, kv),
        )
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
    names = [Path(name).name.removesuffix(".bin") for name in (model, draft, stage) if name]
    origins = {NGRAM: "from the text so far", SELF: f"by {names[0]} in int8"}
    roles = Roles(names[0], origins.get(draft, f"by {names[1]}") if draft else "")
    view: View
    if as_json:
        view = SilentView(decoder.tokenizer)
    elif not plain and LivePanel.fits(out):
        view = LivePanel(decoder.tokenizer, out, statistics, max_tokens, roles, " + ".join(names), pace)
    else:
        if pace and not plain:
            _tell("--pace has no effect: no panel fits here")
        view = PlainView(decoder.tokenizer, sys.stdout)
    with writing():
        _run(view, decoder, prompt, max_tokens, sampling, statistics)
        statistics.plain_seconds = decoder.plain_seconds
        if isinstance(view, SilentView):
            settings = {
                "model": model,
                "draft": draft or None,
                "stage": stage or None,
                "prompt": prompt,
                "steps": steps,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "gamma": _gamma(gamma) if draft else 0,
                "verify": verify,
                "tree": tree,
                "quantize": quantize,
                "kv": decoder.target.kv,
                "threads": decoder.target.n_threads,
                "tokenizer": str(decoder.tokenizer.path),
                "weights": decoder.weights,
            }
            print(to_json(statistics, view.text, view.tokens, **times, seed=sampling.seed, settings=settings))
        else:
            at_a_pace = isinstance(view, LivePanel) and view.was_held
            errors, note = Console(stderr=True), "" if at_a_pace else _advice(decoder, statistics)
            is_to_see = bool(draft) and isinstance(view, LivePanel) and not view.was_seen
            more = "--stats has more" + ", --pace 4 lets you watch" * is_to_see
            print_result(errors, statistics, roles, verify == "coupled", at_a_pace, note, f"seed {sampling.seed}; {more}")
            if stats:
                told = {"seed": sampling.seed, "threads": decoder.target.n_threads, "weights": decoder.weights}
                print_summary(errors, statistics, **told, **_whose(decoder))


def _stages(drafts: list[str], stage: str) -> tuple[str, str]:
    """The draft and what drafts for it, of -d, which may come twice, and --stage."""
    if len(drafts) > 2:
        raise typer.BadParameter("two at most: a draft, and what drafts for it.", param_hint="'-d' / '--draft'")
    if len(drafts) == 2 and stage:
        raise typer.BadParameter("a second -d drafts for the draft already; name one of the two.", param_hint="'--stage'")
    stage = drafts[1] if len(drafts) == 2 else stage
    return drafts[0] if drafts else "", "" if stage == NONE else stage


def _found(*names: str) -> list[str | Path]:
    """Where models of those names are; fetching one shows a bar of its own."""
    return [name if name in ("", SELF, NGRAM) else find(name) for name in names]


def _decoder(
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


def _whose(decoder: SpeculativeDecoder) -> dict[str, str]:
    """What the draft has no part in, for the summary."""
    if not (decoder.draft or decoder.ngrams):
        return {}
    return {"text" if decoder.verify == "coupled" else "distribution": f"the {decoder.target.weights.kind} target's own"}


def _advice(decoder: SpeculativeDecoder, statistics: Statistics) -> str:
    """What to do where a draft does not pay."""
    if not decoder.draft or statistics.target_passes < FEW_PASSES:
        return ""
    n_drafted = sum(statistics.drafted_histogram[1:])
    if decoder.gamma == AUTO and n_drafted < statistics.target_passes / 4:
        return f"a draft does not pay here: {n_drafted} of {statistics.target_passes} passes had one"
    if decoder.gamma != AUTO and 0 < statistics.speed_up < 1:
        return "-g does not pay here: leave it out"
    return ""


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
            if signals.asked or view.ended:
                statistics.stop_reason = "interrupted"
                break


def _gamma(text: str) -> int | Literal["auto"]:
    """The draft length that an option names."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GAMMA:
        raise typer.BadParameter(f"{text!r} is neither auto nor 1 to {MAX_GAMMA}.", param_hint="'-g' / '--gamma'")
    return int(text)


def _check_arguments(
    prompt: str, top_p: float, seed: int, threads: int, verify: str, quantize: str, tree: str, kv: str = AUTO
) -> None:
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


@app.command("sweep")
def compare(
    model: ModelFile = "",
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
    from . import sweep, sweep_chart  # which nothing else needs

    _check_arguments("", top_p, 0, threads, verify="coupled", quantize=quantize, tree=AUTO, kv=kv)
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
    sources = _found(model, draft, stage)
    with loading() as show:
        pair = _decoder(sources, tokenizer, quantize, threads, show, kv=cast(KV, kv))
        texts, notes = sweep.texts_of(pair, beginnings, lengths, sweep.samplings_of(degrees, top_p, seeds))
        pair.warm_up()  # which chooses the threads of both models
        settings, left_out = sweep.settings_of(pair, sizes)
        signals.text_begins()
        try:
            measured = sweep.measure(settings, texts, rounds, _telling(show, "measuring"), lambda: signals.asked)
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
    title = " + ".join(Path(name).name.removesuffix(".bin") for name in (model, draft, stage) if name)
    report = sweep_chart.Report.of(measured, title, [scale, *notes, *left_out])
    flaw = sweep_chart.write_svg(report, svg) if svg else ""  # first: whoever reads stdout may have left
    with writing():
        if as_json:
            settled = {
                "model": model,
                "draft": draft or None,
                "stage": stage or None,
                "quantize": quantize,
                "kv": pair.target.kv,
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


def _telling(show: Callable[[str], None], doing: str) -> Callable[[float], None]:
    """What shows a share that is done as a bar, with the time that is left; not so often that it would cost any."""
    begin, last = time.monotonic(), 0.0

    def tell(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + 0.1:
            last = now
            left = f", {(now - begin) * (1 - share) / share:.0f} s left" if share > 0.01 else ""
            show(f"{doing} {'━' * round(BAR_CELLS * share):{BAR_CELLS}} {share:4.0%}{left}")

    return tell


@app.command("ngrams")
def count(
    table: TableFile,
    model: ModelFile = "",
    draft: DraftFile = "",
    quantize: WhatToQuantize = "draft",
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
    from . import counting, ngram_table, sweep  # which nothing else needs

    _check_arguments("", top_p, 0, threads, verify="coupled", quantize=quantize, tree=AUTO)
    beginnings = sweep.prompts_of(prompts) if prompts else sweep.PROMPTS
    ngram_table.check_place(Path(table))
    if not model:
        target, small = default_pair()
        model, draft = str(target), draft or str(small)
    sources = _found(model, "" if draft == NONE or file else draft or NGRAM, "")
    with loading() as show:
        decoder = _decoder(sources, tokenizer, quantize, threads, show)
        tell, asked = _telling(show, "counting"), lambda: signals.asked
        if file:
            texts = counting.read(Path(file), decoder.tokenizer, tell, asked)
        else:
            decoder.warm_up()
            texts = counting.written(decoder, beginnings, tokens, Sampling(temperature, 0, top_p, 1), tell, asked)
        signals.text_begins()
        counted = ngram_table.count(texts, decoder.vocabulary.n_target)
        ngram_table.save_table(counted, Path(table))
    with writing():
        print(f"{table}: what follows in {counted.keys.size} contexts, in {Path(table).stat().st_size} bytes")
