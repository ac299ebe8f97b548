"""The command line: its commands, and the one without a name, which writes a text; exit codes. Knows no arrays and no formats."""

import io
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import cast

import typer
from rich.console import Console

import specdec

from ..decoder import SpeculativeDecoder
from ..decoding import Event, Prefill, Prompt, Statistics, VerifyMode
from ..drafting.settings import AUTO, TreeMode
from ..drafting.team import NGRAM
from ..readers import CheckpointError
from ..sampling import Sampling
from ..screens.interrupts import exit_code, signals
from ..screens.output import FEW_PASSES, PlainView, Roles, SilentView, View, print_result, print_summary, to_json
from ..screens.panel import LivePanel
from ..screens.progress import TIMING, loading, read_in_a_line, telling
from ..screens.window import obstacle
from ..tokenizer import TokenizerError
from . import chat as chat_command
from . import models as models_command
from . import race as race_command
from . import sweep as sweep_command
from .asking import Commands, OneCommand, are_given, draft_name, model_and_prompt, prompt_of, tell_what_has_no_effect
from .options import (
    AsJson,
    Compare,
    DraftFiles,
    Gamma,
    Int8,
    KVOption,
    ModelFile,
    NewTokens,
    Pace,
    Plain,
    PromptText,
    PromptTextFile,
    Samples,
    Seed,
    Shape,
    ShowVersion,
    StageName,
    Stats,
    Steps,
    StopStrings,
    Temperature,
    Threads,
    TokenizerFile,
    TopK,
    TopP,
    TreeOption,
    VerifyOption,
    WhatToQuantize,
    in_options,
)
from .wiring import (
    BROKEN_PIPE,
    NONE,
    check_arguments,
    check_threads,
    complain,
    decoder_of,
    found,
    gamma_of,
    made_with,
    or_the_pair,
    roles_of,
    room_of,
    say,
    seed_of,
    stages_of,
    steps_of,
    titles_of,
    writing,
)

app = typer.Typer(
    cls=Commands,
    subcommand_metavar="[PROMPT] | COMMAND ...",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMPLETING = "_COMPLETE"  # at the end of what a shell says it in, behind the program's name
UsageError = cast(type[Exception], next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"))

app.command("race", cls=OneCommand)(race_command.run)
app.command("chat", cls=OneCommand)(chat_command.talk)
app.command("sweep", cls=OneCommand)(sweep_command.compare)
app.command("models", cls=OneCommand)(models_command.show)


@app.callback(invoke_without_command=True)
def tell(
    context: typer.Context,
    prompt: PromptText = None,
    model: ModelFile = None,
    drafts: DraftFiles = None,
    steps: Steps = None,
    new_tokens: NewTokens = None,
    temperature: Temperature = 1.0,
    file: PromptTextFile = "",
    stop: StopStrings = None,
    samples: Samples = 1,
    stage: StageName = "",
    quantize: WhatToQuantize = "draft",
    kv: KVOption = AUTO,
    tokenizer: TokenizerFile = "",
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = 0,
    gamma: Gamma = AUTO,
    verify: VerifyOption = "coupled",
    tree: TreeOption = "off",
    threads: Threads = 0,
    plain: Plain = False,
    pace: Pace = 0.0,
    stats: Stats = False,
    compare_both: Compare = False,
    as_json: AsJson = False,
    version: ShowVersion = False,
) -> None:
    """Speculative decoding on the CPU: a small draft guesses, the target checks.

    specdec "Once upon a time" -t 0
    specdec -m openai-community/gpt2-medium -d distilbert/distilgpt2 -i "Why"
    """
    if context.invoked_subcommand:
        if given := are_given(context):
            name = context.invoked_subcommand
            say(f"{', '.join(given)}: no effect before {name}, whose options come behind it; a prompt of that word is -i {name}")
        return
    if version:
        print(f"specdec {specdec.__version__}, arithmetic {specdec.__arithmetic__}")
        return
    named, word = model_and_prompt(context.args, list(cast(Commands, context.command).commands))
    if named is not None and model is not None:
        raise typer.BadParameter(f"{named!r} and -m {model!r} are two targets; name a draft with -d")
    model = named if model is None else model
    check_arguments(prompt or word or "", top_p, seed, threads, verify=verify, quantize=quantize, tree=tree, kv=kv)
    gamma_of(gamma)
    steps = steps_of(steps, new_tokens)
    _check_stops(stop or [])
    draft, stage = stages_of([draft_name(name) for name in drafts or []], draft_name(stage))
    prompt = prompt_of(prompt, file, word)
    model, draft = or_the_pair(model, draft)
    if not draft and verify == "coupled":  # whose text no drafter changes
        draft = NGRAM
    draft = "" if draft == NONE else draft
    if compare_both and (samples > 1 or not draft):
        reason = "it compares one text; leave out --samples." if samples > 1 else "there is no draft whose gain it could tell."
        raise typer.BadParameter(reason, param_hint="'--compare'")
    first = Sampling(temperature, top_k, top_p, seed_of(seed))
    sources = found(model, draft, stage, tokenizer=tokenizer)
    with loading() as show:
        begin = time.perf_counter()
        decoder = decoder_of(
            sources,
            tokenizer,
            quantize,
            kv,
            threads,
            show,
            gamma=gamma_of(gamma),
            verify=cast(VerifyMode, verify),
            tree=cast(TreeMode, tree),
        )
        prompt_tokens = decoder.encode(prompt)
        loaded = time.perf_counter()
        show(TIMING)
        decoder.warm_up()
        times = {"load_seconds": loaded - begin, "warmup_seconds": time.perf_counter() - loaded}
    max_tokens = room_of(decoder, len(prompt_tokens), steps, new_tokens)
    tell_what_has_no_effect(context, bool(draft), bool(decoder.draft), as_json, plain, greedy=temperature == 0)
    names = titles_of(model, draft, stage)
    roles = roles_of(names, draft)
    out = Console()
    has_panel = not (as_json or plain or obstacle(out))
    if pace and not (as_json or plain or has_panel):
        say(f"--pace has no effect: {obstacle(out)}")
    settings = {
        "model": model,
        "draft": draft or None,
        "stage": stage or None,
        "prompt": prompt,
        "steps": steps,
        "max_tokens": new_tokens,
        "stop": stop or [],
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "gamma": gamma_of(gamma) if draft else 0,
        "verify": verify,
        "tree": tree,
        "quantize": quantize,
        "threads": decoder.target.n_threads,
        "tokenizer": str(decoder.tokenizer.path),
        **made_with(decoder),
    }
    for i in range(samples):
        sampling, statistics = replace(first, seed=(first.seed + i) % 2**63), Statistics(len(prompt_tokens))
        view: View = SilentView() if as_json else PlainView(sys.stdout)
        if has_panel:
            view = LivePanel(decoder.tokenizer, out, statistics, max_tokens, roles, " + ".join(names), pace, stops=stop or [])
        race = race_command.both(decoder, prompt_tokens, max_tokens, sampling, stop or []) if compare_both else None
        with writing():
            if i and not as_json:
                print(flush=True)
            events: Iterator[Event | Prefill] = (
                iter(race.pair.events) if race else decoder.read_and_stream(prompt_tokens, max_tokens, sampling, stop=stop or [])
            )
            if not isinstance(view, LivePanel):  # which shows itself how far the prompt is read
                events = read_in_a_line(events, max_tokens if as_json else 0)
            _run(view, events, statistics, Prompt(prompt_tokens, 0.0, decoder.tokenizer.decode(prompt_tokens)))
            statistics.plain_seconds = race.alone.statistics.seconds_per_token if race else decoder.plain_seconds
            if isinstance(view, SilentView):
                told = {**times, **({"compare": race.figures()} if race else {}), "seed": sampling.seed, "settings": settings}
                print(to_json(statistics, view.text, view.tokens, **told), flush=True)
            else:
                _tell_result(view, decoder, statistics, roles, sampling.seed, stats)
                if race:
                    errors = Console(stderr=True)
                    lines = race.report(f"{roles.target} alone", " + ".join(names), errors.width if errors.is_terminal else None)
                    lines += [race.sentence] if verify == "coupled" else []
                    errors.print("\n".join(lines), markup=False, highlight=False, soft_wrap=not errors.is_terminal)
        if race and verify == "coupled" and not race.is_same_text:
            raise typer.Exit(1)
        if statistics.stop_reason == "interrupted":
            break


def _tell_result(
    view: View, decoder: SpeculativeDecoder, statistics: Statistics, roles: Roles, seed: int, has_figures: bool
) -> None:
    """What came of a text, on stderr."""
    at_a_pace = isinstance(view, LivePanel) and view.was_held
    errors, note = Console(stderr=True), "" if at_a_pace else _advice(decoder, statistics)
    is_to_see = bool(roles.guessed) and isinstance(view, LivePanel) and not view.was_seen
    more = f"seed {seed}; --stats has more" + ", --pace 4 lets you watch" * is_to_see
    print_result(errors, statistics, roles, decoder.verify == "coupled", at_a_pace, note, more)
    if has_figures:
        told = {"seed": seed, "threads": decoder.target.n_threads, **made_with(decoder), **_whose(decoder)}
        print_summary(errors, statistics, **told)


def _whose(decoder: SpeculativeDecoder) -> dict[str, str]:
    """What the draft has no part in, for the summary."""
    if not decoder.has_draft:
        return {}
    return {"text" if decoder.verify == "coupled" else "distribution": f"the {decoder.target.weights.kind} target's own"}


def _advice(decoder: SpeculativeDecoder, statistics: Statistics) -> str:
    """What to do where a draft does not pay."""
    if not decoder.draft or statistics.target_passes < FEW_PASSES:
        return ""
    n_drafted = sum(statistics.drafted_histogram[1:])
    if decoder.gamma == AUTO and n_drafted < statistics.target_passes / 4:
        return f"a draft does not pay here: {n_drafted} of {statistics.target_passes} passes had one"
    if decoder.gamma != AUTO and statistics.speed_up and statistics.speed_up < 1:
        return "-g does not pay here: leave it out"
    return ""


def _run(view: View, events: Iterator[Event | Prefill], statistics: Statistics, prompt: Prompt) -> None:
    """Show the events, until the text or somebody's patience is at its end; one that ends before it begins is its prompt."""
    signals.text_begins()
    with view:
        for event in events:
            if not isinstance(event, Prefill):
                statistics.add(event)
            view.show(event)
            if signals.asked or view.ended:
                statistics.stop_reason = "interrupted"
                break
        if isinstance(events, Generator):  # its line goes
            events.close()
        if isinstance(event, Prefill):
            view.show(prompt)


def _check_stops(stops: list[str]) -> None:
    for stop in stops:
        if not stop or stop.encode(errors="ignore").decode() != stop:
            raise typer.BadParameter("a string of no letters, or no valid UTF-8.", param_hint="'--stop'")


@app.command("bench", cls=OneCommand)
def measure(shape: Shape = "42M", threads: Threads = 0, int8: Int8 = False, as_json: AsJson = False) -> None:
    """Time passes over T tokens of a model with random weights, beside the memory bandwidth they are up against."""
    from ..measuring import bench as benchmark  # which nothing else needs

    check_threads(threads)
    try:
        config = benchmark.parse_shape(shape)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--shape'") from None
    with loading("making weights") as show:
        result = benchmark.run(config, threads or None, "int8" if int8 else "fp32", lambda doing: telling(show, doing))
    with writing():
        print(benchmark.to_json(result)) if as_json else Console().print(benchmark.to_table(result, shape))


def main() -> None:
    """The command line: one line on stderr and exit code 2 for whatever the person at the keyboard can mend."""
    # a closed stream is None: what goes there is lost; a file name of no encoding, or a story in an ASCII terminal, still prints
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with writing():
            code = app(prog_name="specdec", standalone_mode=False)
    except typer.Exit as done:
        code = done.exit_code
    except UsageError as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        if likest := getattr(error, "possibilities", None):  # of which the message makes a list by the alphabet
            message = f"no option {error.option_name}; did you mean {likest[0]}?"  # type: ignore[attr-defined]
        is_prompt = "'-p'" in message and " valid " in message  # llama.cpp's option
        code = complain(f"{message} The prompt is -i TEXT." if is_prompt else message)
    except (CheckpointError, TokenizerError, ValueError) as error:
        code = complain(in_options(str(error)))
    except MemoryError as error:
        code = complain(str(error) or "not enough memory for this model")
    except SystemExit as end:
        # Typer's, where a shell asks what completes a word; Rich's, where the reader of its output has left
        code = BROKEN_PIPE if end.code == 1 and COMPLETING not in " ".join(os.environ) else end.code
    sys.exit(exit_code(signals.asked) if signals.asked else code or 0)
