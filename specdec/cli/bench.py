"""`specdec bench`: times a model of your own, or passes of a model with random weights."""

from dataclasses import dataclass
from typing import cast, get_args

from rich.console import Console
from rich.table import Table

from specdec.argument_checks import check_choice, parse_list
from specdec.cli.common_options import AS_JSON, KV, MODEL, Request
from specdec.cli.option_fields import option
from specdec.cli.output_errors import guard_output
from specdec.loaders.model_loader import Loader, open_checkpoint
from specdec.loaders.model_paths import resolve_path
from specdec.model.model import KVFormatName
from specdec.runtime.cpu_topology import get_thread_choices, get_topology
from specdec.runtime.parallel_region import get_available_threads
from specdec.ui.progress import LOADING, TIMING, ProgressBar, make_progress_callback, show_status

MAX_BENCH_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Request):
    """The options of `specdec bench`."""

    model: str | None = MODEL
    prompts: str = option("512", "-p, --n-prompt LIST", "Measuring", "Prompt lengths to time, in tokens. 0: none.")
    counts: str = option("128", "-n, --n-gen LIST", "Measuring", "Numbers of tokens to generate one by one. 0: none.")
    depths: str = option("0", "-d, --depth LIST", "Measuring", "Numbers of tokens in the KV cache before the timed ones.")
    thread_counts: str = option(
        "0", "-j, --threads LIST", "Machine", "Numbers of CPU threads. 0: one per core, and the other numbers that may be faster."
    )
    kv: str = KV
    shape: str = option(
        "42M", "--shape SHAPE", "Random model", "15M, 42M, 110M, or dim,hidden,layers,heads,kv,vocab,seq of the random model."
    )
    int8: bool = option(False, "--int8", "Random model", "Quantize the weights to int8, as --quantize does.")
    as_json: bool = AS_JSON

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if one is not valid."""
        super().__post_init__()
        check_choice("kv", self.kv, get_args(KVFormatName))
        prompts, counts, _ = self.token_counts
        if not any(prompts + counts):
            raise ValueError("-p and -n are both 0; at least one must be more")
        _ = self.timed_thread_counts

    @property
    def timed_thread_counts(self) -> list[int]:
        """The thread counts to time, as -j lists them; 0 stands for all counts that may be the fastest."""
        n_cores = get_available_threads()
        expected = f"numbers up to {n_cores} (this machine has {get_topology().description})"
        named = parse_list("threads", self.thread_counts, int, lambda n: 0 <= n <= n_cores, expected)
        return [*dict.fromkeys(n for each in named for n in ([each] if each else get_thread_choices()))]

    @property
    def token_counts(self) -> list[list[int]]:
        """The numbers of tokens of -p, -n and -d."""
        texts = {"--n-prompt": self.prompts, "--n-gen": self.counts, "--depth": self.depths}
        expected = f"numbers of tokens up to {MAX_BENCH_TOKENS}"
        return [parse_list(name, text, int, lambda n: 0 <= n <= MAX_BENCH_TOKENS, expected) for name, text in texts.items()]


def run(request: BenchRequest) -> None:
    """Time your own model as llama-bench does, or forward passes of a model with random weights.

    specdec bench -m model.gguf -p 512 -n 128
    """
    result, table = _time_model(request, request.model) if request.model else _time_random_model(request)
    with guard_output():
        print(result) if request.as_json else Console().print(table)


def _time_model(request: BenchRequest, name: str) -> tuple[str, Table]:
    from specdec.bench import model_speed  # imported here, since no other command needs it

    threads = request.timed_thread_counts
    with show_status() as show:
        checkpoint = open_checkpoint("target", resolve_path(name))
        prompts, counts, depths = request.token_counts
        cases = model_speed.make_cases(prompts, counts, depths, threads, checkpoint.config.seq_len)
        kv = cast(KVFormatName, request.kv)
        loader = Loader(max(threads), kv, lambda name, share: show(ProgressBar(f"{LOADING} {name}", share)))
        report = model_speed.run(name, loader.load(checkpoint, None), cases, make_progress_callback(show, TIMING))
    return model_speed.to_json(report), model_speed.to_table(report)


def _time_random_model(request: BenchRequest) -> tuple[str, Table]:
    from specdec.bench import pass_speed

    config, n_threads = pass_speed.parse_shape(request.shape), request.timed_thread_counts[0]
    with show_status("making weights") as show:
        result = pass_speed.run(config, n_threads, request.int8, lambda task: make_progress_callback(show, task))
    return pass_speed.to_json(result), pass_speed.to_table(result, request.shape)
