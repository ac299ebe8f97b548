"""Speculative decoding of llama2.c models on CPU threads: the command line, and what `import specdec` offers as a library.

python specdec.py -m stories42M.bin -d stories15M.bin -i "Once upon a time"
"""

import io
import math
import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until `main` can catch it: the imports below take a while

# This module is also the package `specdec`: its siblings import as specdec.kernels and so on, from a checkout and installed
# alike, so that an installation puts nothing called `kernels` or `tokenizer` on the path (see the README's rationale).
__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules.setdefault("specdec", sys.modules[__name__])

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

import typer
from rich.console import Console

from specdec import bench as benchmark
from specdec.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from specdec.decoding import (
    MAX_GAMMA,
    VERIFIERS,
    ModelDrafter,
    Sampling,
    Statistics,
    Step,
    Verify,
    decode,
)
from specdec.kernels import Transformer, available_threads
from specdec.packing import int8_copy, pack_weights
from specdec.panel import LivePanel, PlainView, SilentView, View, print_summary, printable, to_json
from specdec.tokenizer import Tokenizer, TokenizerError

__all__ = [
    "CheckpointError",
    "Generation",
    "Sampling",
    "SpeculativeDecoder",
    "Statistics",
    "Step",
    "Tokenizer",
    "TokenizerError",
    "Transformer",
]
__version__ = "0.1.0"

MODELS = Path(__file__).resolve().parent / "models"
DEFAULT_TARGET, DEFAULT_DRAFT = MODELS / "stories6M.bin", MODELS / "stories650K.bin"
DEFAULT_TOKENIZER = MODELS / "tok1024.bin"
RESTORE = "restore it with 'git checkout models' or by installing again"
DEFAULT_PROMPT = "Once upon a time"
HUB, LLAMA2C = "https://huggingface.co/karpathy/tinyllamas", "https://github.com/karpathy/llama2.c"
SELF = "self"  # as a draft: an int8 copy of the target
Quantize = Literal["target", "draft", "both", "none"]
TRIAL_SECONDS, TRIAL_TOKENS, TRIAL_MARGIN = 0.05, 4, 1.25  # of the choice of threads; all of them unless so much slower


class Generation(NamedTuple):
    """What `SpeculativeDecoder.generate` returns: the text, prompt included, and the figures."""

    text: str
    statistics: Statistics


class SpeculativeDecoder:
    """A target, a draft that proposes for it, and their tokenizer.

    target, draft: paths of llama2.c checkpoints (also looked for in models/) or loaded `Transformer`s; without a draft, plain
    decoding; the draft "self" is an int8 copy of the target. tokenizer: a path or a `Tokenizer`; found beside the target or in
    models/ where not given. gamma: draft tokens a step, 1 to 63. verify: "coupled" (the text is the plain run's of the same seed)
    or "rejection" (Leviathan et al. 2023). n_threads: by default all cores, or fewer where a trial shows that they are
    faster; it changes no text. quantize: which of the fp32 checkpoints that are named by path become int8: "target", "draft",
    "both" or "none"; an int8 draft changes no text, an int8 target does.

    Raises CheckpointError or TokenizerError for files that cannot be used, ValueError for values or models that do not fit.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Transformer,
        draft: str | os.PathLike[str] | Transformer | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
        *,
        gamma: int = 4,
        verify: Verify = "coupled",
        n_threads: int | None = None,
        quantize: Quantize = "draft",
    ) -> None:
        if quantize not in get_args(Quantize):
            raise ValueError(f"quantize is {quantize!r}; expected one of {', '.join(get_args(Quantize))}")
        if not 1 <= gamma <= MAX_GAMMA:
            raise ValueError(f"gamma is {gamma}; expected 1 to {MAX_GAMMA} draft tokens a step")
        if verify not in VERIFIERS:
            raise ValueError(f"verify is {verify!r}; expected one of {', '.join(VERIFIERS)}")
        self.gamma, self.verify = gamma, verify
        path = None
        if isinstance(target, Transformer):
            self.target = target
        else:
            path = find(target)
            int8 = quantize in ("target", "both")
            self.target = _transformer(load_checkpoint(path, int8), n_threads, None, int8)
        config = self.target.config
        self.tokenizer = _tokenizer(tokenizer, path, config.vocab_size)
        if draft is None or isinstance(draft, Transformer):
            self.draft = draft
        elif draft == SELF:
            if self.target.weights.is_int8:
                raise ValueError(
                    "the target is int8 already, from its file or by --quantize, so an int8 copy of it is no faster draft; "
                    "leave it fp32 or name another draft"
                )
            self.draft = Transformer(config, int8_copy(config, self.target.weights), n_threads, self.target.n_positions)
        else:
            int8 = quantize in ("draft", "both")
            checkpoint = load_checkpoint(find(draft), int8)
            self.draft = _transformer(checkpoint, n_threads, self.target.n_positions, int8)
        if self.draft and self.draft.config.vocab_size != config.vocab_size:
            name = "the draft" if isinstance(draft, Transformer) else f"the draft {draft}"
            n = self.draft.config.vocab_size
            raise ValueError(f"{name} has a vocabulary of {n} tokens, the target one of {config.vocab_size}; they must agree")
        if self.draft is self.target:
            raise ValueError("target and draft are one object; they need a KV cache each")
        if self.draft and self.draft.n_positions < self.target.n_positions:
            self.draft = Transformer(self.draft.config, self.draft.weights, self.draft.n_threads, self.target.n_positions)
        self._is_warm = False
        self._models = [model for model in (self.target, self.draft) if model]
        is_free = n_threads is None and not any(isinstance(model, Transformer) for model in (target, draft))
        self._most_threads = self.target.n_threads if is_free else 1  # to choose from

    def encode(self, prompt: str) -> list[int]:
        """The prompt's tokens, BOS first. Raises ValueError for one that the target's seq_len cannot hold."""
        tokens = self.tokenizer.encode(prompt)
        if len(tokens) > self.target.n_positions:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the target's seq_len is {self.target.n_positions}")
        return tokens

    def stream(
        self,
        prompt: str = "",
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.9,
        seed: int = 0,
        on_draft: Callable[[list[int]], None] | None = None,
    ) -> Iterator[Step]:
        """Steps as they come, the prefill first; ends at BOS, EOS, max_tokens or the target's seq_len.

        max_tokens: beyond the prompt; temperature, top_k, top_p, seed: see `Sampling`; on_draft hears of each proposal before the
        target judges it. Raises ValueError for a value out of range, a prompt longer than the target's seq_len, or a target whose
        logits are not finite. A model's cache holds one text: going on with a stream after another has begun on one of its
        models raises RuntimeError.
        """
        if not self._is_warm:
            self.warm_up()
        sampling = Sampling(temperature, top_k, top_p, seed)
        verifier = VERIFIERS[self.verify](self.target.config.vocab_size, sampling)
        drafter = ModelDrafter(self.draft, sampling, verifier.draft_noise) if self.draft else None
        return self._alone(decode(self.target, drafter, verifier, self.encode(prompt), max_tokens, self.gamma, on_draft))

    def _alone(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, as long as no other stream has taken over a cache."""
        caches = [model.cache for model in self._models]
        for cache in caches:
            cache.user = steps
        while all(cache.user is steps for cache in caches):
            try:
                step = next(steps)
            except StopIteration:
                return
            yield step
        raise RuntimeError("another stream has begun on a model of this one; the model's cache holds its text now")

    def generate(
        self,
        prompt: str = "",
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.9,
        seed: int = 0,
    ) -> Generation:
        """The whole text, prompt included, and its statistics; parameters and errors are those of `stream`."""
        tokens = self.encode(prompt)
        statistics = Statistics(n_prompt=len(tokens))
        for step in self.stream(prompt, max_tokens, temperature, top_k, top_p, seed):
            statistics.add(step)
            tokens += step.tokens
        return Generation(self.tokenizer.decode(tokens), statistics)

    @property
    def weights(self) -> str:
        """What the weights are, in words: "target fp32, draft int8"."""
        models = {"target": self.target, "draft": self.draft}
        return ", ".join(f"{name} {_kind(model)}" for name, model in models.items() if model)

    def warm_up(self) -> None:
        """Compile, or load from numba's cache, whatever a text needs; the first text does it where nobody has.

        Then choose the number of threads, unless it was given: the barriers of a pass cost a small model or a busy machine more
        than another thread gains, and a text is the same with any number.
        """
        self._is_warm = True
        self._seconds(2)
        if self._most_threads > 1:
            self._choose_threads()

    def _seconds(self, max_tokens: int) -> float:
        """What that many tokens take."""
        return sum(step.seconds for step in self.stream("", max_tokens))

    def _choose_threads(self) -> None:
        """All threads, or 1, 2, 4, ... if clearly faster; each is tried in turn until the trial has taken TRIAL_SECONDS."""
        most = self._most_threads
        seconds = {min(2**i, most): 0.0 for i in range(most.bit_length() + 1)}
        while sum(seconds.values()) < TRIAL_SECONDS:
            for n in seconds:
                self._use_threads(n)
                seconds[n] += self._seconds(TRIAL_TOKENS)
        best = min(seconds, key=seconds.__getitem__)
        self._use_threads(best if TRIAL_MARGIN * seconds[best] < seconds[most] else most)

    def _use_threads(self, n: int) -> None:
        for model in self._models:
            model.n_threads = n


def _kind(model: Transformer) -> str:
    return "int8" if model.weights.is_int8 else "fp32"


def _folders() -> tuple[Path, Path]:
    """Where names are looked for: models/ here, then the one beside this file."""
    return Path("models"), MODELS


def find(name: str | os.PathLike[str], source: str = f"the stories models are at {HUB}") -> Path:
    """The file of that path, else of that name in models/. Raises CheckpointError, which tells the source."""
    path = Path(name)
    found = _first([path, *(folder / path for folder in _folders())])
    if not found and not path.is_absolute():
        raise CheckpointError(f"{path} is neither here nor in {' or '.join(map(str, _folders()))}; {source}")
    return found or path


def _first(paths: list[Path]) -> Path | None:
    """The first that exists. Raises CheckpointError for one that cannot be looked for."""
    for path in paths:
        try:
            if path.exists():
                return path
        except OSError as error:
            raise CheckpointError(f"cannot look for {path}: {error.strerror}") from None
    return None


def _transformer(checkpoint: Checkpoint, n_threads: int | None, n_positions: int | None, int8: bool) -> Transformer:
    weights = pack_weights(checkpoint.config, checkpoint.tensors, int8, checkpoint.release)
    return Transformer(checkpoint.config, weights, n_threads, n_positions)


def _tokenizer(given: str | os.PathLike[str] | Tokenizer | None, target: Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer that was given, else tok<vocab>.bin or tokenizer.bin beside the target, else in models/."""
    if isinstance(given, Tokenizer):
        tokenizer = given
    elif given is not None:
        tokenizer = Tokenizer(find(given, f"llama2.c's tokenizer.bin is at {LLAMA2C}"))
    else:
        folders = [*([target.parent] if target else []), *_folders()]
        names = [f"tok{vocab_size}.bin", "tokenizer.bin"]
        found = _first([folder / name for folder in folders for name in names])
        if not found:
            where = ", ".join(str(folder) for folder in folders)
            raise TokenizerError(f"no {' or '.join(names)} in any of {where}; name the tokenizer with -z")
        tokenizer = Tokenizer(found)
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"{tokenizer.path} holds {tokenizer.vocab_size} tokens, the target has {vocab_size}; name the target's own with -z"
        )
    return tokenizer


# --------------------------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------------------------

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
UsageError = cast(type[Exception], next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"))
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE


def option(*names: str, group: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=group, **more)


def flag(*names: str, group: str, help: str) -> Any:
    return option(*names, group=group, help=help, metavar="")


ModelFile = Annotated[
    str, option("-m", "--model", group="Models", metavar="FILE", help="Target checkpoint: a path, or a name in models/.")
]
DraftFile = Annotated[
    str,
    option(
        *("-d", "--draft"), group="Models", metavar="FILE|self",
        help="Draft checkpoint; self: an int8 copy of the target. Without -d a named target decodes alone.",
    ),
]  # fmt: skip
WhatToQuantize = Annotated[
    str,
    option(
        "--quantize", group="Models", metavar="WHAT",
        help="Make int8 while loading: draft, target, both or none. An int8 draft changes the speed, never the text.",
    ),
]  # fmt: skip
TokenizerFile = Annotated[
    str,
    option(
        *("-z", "--tokenizer"), group="Models", metavar="FILE",
        help="Tokenizer. By default tok<vocab>.bin or tokenizer.bin beside the model, else in models/.",
    ),
]  # fmt: skip
Prompt = Annotated[str, option("-i", "--prompt", group="Text", metavar="TEXT", help="What the text begins with.")]
Steps = Annotated[
    int,
    option(
        *("-n", "--steps"), group="Text", metavar="N", min=0,
        help="Tokens in all, prompt included, BOS not. 0: up to the target's seq_len.",
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
    int, option("-g", "--gamma", group="Speculation", metavar="N", min=1, max=MAX_GAMMA, help="Draft tokens per step (γ).")
]
VerifyMode = Annotated[
    str,
    option(
        "--verify", group="Speculation", metavar="coupled|rejection",
        help="coupled: the text is the plain run's of the same seed. rejection: same distribution (Leviathan et al. 2023).",
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
    prompt: Prompt = DEFAULT_PROMPT,
    steps: Steps = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = 0,
    gamma: Gamma = 4,
    verify: VerifyMode = "coupled",
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
        print(__version__)
        return
    _check_arguments(prompt, top_p, seed, threads, verify=verify, quantize=quantize)
    model, draft = _default_pair(model, draft)
    sampling = Sampling(temperature, top_k, top_p, seed or secrets.randbits(32) or 1)
    errors = Console(stderr=True)
    with errors.status("loading; a first run compiles the kernels, 10 to 20 seconds") if sys.stderr.isatty() else nullcontext():
        begin = time.perf_counter()
        with default_models():
            decoder = SpeculativeDecoder(
                model,
                draft or None,
                tokenizer or None,
                gamma=gamma,
                verify=cast(Verify, verify),
                n_threads=threads or None,
                quantize=cast(Quantize, quantize),
            )
        prompt_tokens = decoder.encode(prompt)
        loaded = time.perf_counter()
        decoder.warm_up()
        times = {"load_seconds": loaded - begin, "warmup_seconds": time.perf_counter() - loaded}
    statistics = Statistics(len(prompt_tokens))
    # llama2.c counts positions: n steps make n + 1 tokens, BOS included
    total = min(steps or decoder.target.n_positions, decoder.target.n_positions)
    max_tokens = max(0, total + 1 - len(prompt_tokens))
    out = Console()
    view: View
    if as_json:
        view = SilentView(decoder.tokenizer)
    elif not plain and LivePanel.fits(out):
        title = " + ".join(Path(name).stem for name in (model, draft) if name)
        view = LivePanel(decoder.tokenizer, out, statistics, max_tokens, gamma if draft else 0, title, pace)
    else:
        view = PlainView(decoder.tokenizer, sys.stdout)
    with writing():
        interrupted = _run(view, decoder, prompt, prompt_tokens, max_tokens, sampling, statistics)
        if isinstance(view, SilentView):
            settings = {
                "model": model,
                "draft": draft or None,
                "prompt": prompt,
                "steps": steps,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "gamma": gamma if draft else 0,
                "verify": verify,
                "quantize": quantize,
                "threads": decoder.target.n_threads,
                "tokenizer": str(decoder.tokenizer.path),
                "weights": decoder.weights,
            }
            print(to_json(statistics, view.text, view.tokens, **times, seed=sampling.seed, settings=settings))
        else:
            told = {"seed": sampling.seed, "threads": decoder.target.n_threads, "weights": decoder.weights, **_whose(decoder)}
            print_summary(errors, statistics, **told)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _whose(decoder: SpeculativeDecoder) -> dict[str, str]:
    """What the draft has no part in, for the summary."""
    if not decoder.draft:
        return {}
    return {"text" if decoder.verify == "coupled" else "distribution": f"the {_kind(decoder.target)} target's own"}


def _run(
    view: View,
    decoder: SpeculativeDecoder,
    prompt: str,
    prompt_tokens: list[int],
    max_tokens: int,
    sampling: Sampling,
    statistics: Statistics,
) -> bool:
    """Decode into the view; whether Ctrl-C ended it."""
    try:
        with view:
            view.begin(prompt_tokens)
            s = sampling
            for step in decoder.stream(prompt, max_tokens, s.temperature, s.top_k, s.top_p, s.seed, view.draft):
                statistics.add(step)
                view.step(step)
    except KeyboardInterrupt:
        statistics.stop_reason = "interrupted"
        return True
    return False


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
    for name, value, choices in (("verify", verify, tuple(VERIFIERS)), ("quantize", quantize, get_args(Quantize))):
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.", param_hint=f"'--{name}'")
    _check_threads(threads)


def _check_threads(threads: int) -> None:
    if threads > available_threads():
        raise typer.BadParameter(
            f"{threads} threads; this machine has cores for {available_threads()}.", param_hint="'-j' / '--threads'"
        )


@contextmanager
def default_models() -> Iterator[None]:
    """Around loading: a file of ours that is damaged is told with the way to get it again."""
    try:
        yield
    except (CheckpointError, TokenizerError) as error:
        ours = any(str(path) in str(error) for path in _defaults())
        raise type(error)(f"{error}; {RESTORE}" if ours else str(error)) from None


def _defaults() -> tuple[Path, Path, Path]:
    return DEFAULT_TARGET, DEFAULT_DRAFT, DEFAULT_TOKENIZER


def _default_pair(model: str, draft: str) -> tuple[str, str]:
    """The embedded pair where no target is named."""
    if model:
        return model, draft
    missing = [str(path) for path in _defaults() if not path.exists()]
    if missing:
        raise CheckpointError(
            f"no -m, and the default pair lacks {' and '.join(missing)}; {RESTORE}, "
            f"or get stories15M.bin from {HUB} and tokenizer.bin from {LLAMA2C}, and name the model: -m stories15M.bin"
        )
    return str(DEFAULT_TARGET), draft or str(DEFAULT_DRAFT)


@app.command("bench")
def bench(shape: Shape = "42M", threads: Threads = 0, int8: Int8 = False, as_json: AsJson = False) -> None:
    """Time passes over T tokens of a model with random weights, beside the memory bandwidth they are up against."""
    _check_threads(threads)
    try:
        config = benchmark.parse_shape(shape)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--shape'") from None
    result = benchmark.run(config, threads or None, int8)
    with writing():
        print(benchmark.to_json(result)) if as_json else Console().print(benchmark.to_table(result, shape))


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
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    except MemoryError:
        code = _complain("not enough memory for this model")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit:  # Rich's, where the reader of its output has left
        code = BROKEN_PIPE
    sys.exit(code or 0)


def _complain(message: str) -> int:
    with suppress(OSError):
        print(f"specdec: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
