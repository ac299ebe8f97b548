"""`specdec bench`: times a model of one's own, or passes of one with random weights. Knows no arrays and no formats."""

from dataclasses import dataclass
from typing import cast

from rich.console import Console

from specdec.cli.exits import say, writing
from specdec.cli.options import flag, of_machine, of_measuring, of_model
from specdec.cli.parser import several
from specdec.cli.request import Request
from specdec.loaders.loader import Loader, opened
from specdec.loaders.model_lookup import find, telling_how_to_restore
from specdec.model.transformer import KV
from specdec.runtime.cpu_topology import thread_choices
from specdec.runtime.threads import available_threads
from specdec.ui.progress import LOADING, TIMING, Bar, loading, telling

MOST_TOKENS = 1 << 20
OF_A_FILE, OF_A_SHAPE = ("prompts", "counts", "depths", "kv"), ("shape", "int8")


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Request):
    """Of `specdec bench`."""

    offers = "model prompts counts depths thread_counts kv shape int8 as_json"
    prompts: str = of_measuring("512", "-p", "--n-prompt", metavar="LIST", help="Tokens of prompts to time; 0: none.")
    counts: str = of_measuring("128", "-n", "--n-gen", metavar="LIST", help="Tokens to write one by one; 0: none.")
    depths: str = of_measuring("0", "-d", "--depth", metavar="LIST", help="How many tokens stand before what is timed.")
    thread_counts: str = of_machine(
        "0", "-j", "--threads", metavar="LIST",
        help="Numbers of CPU threads. 0: one for each core, and others that may be faster.",
    )  # fmt: skip
    shape: str = of_model(
        "42M", "--shape", metavar="SHAPE", help="Of the model: 15M, 42M, 110M, or dim,hidden,layers,heads,kv,vocab,seq."
    )
    int8: bool = flag("--int8", group="Model", help="Quantize the weights to int8, as --quantize does.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.threads_to_time
        if not any((*self.tokens("--n-prompt", self.prompts), *self.tokens("--n-gen", self.counts))):
            raise ValueError("-p and -n are 0: nothing is left to time")

    @property
    def threads_to_time(self) -> list[int]:
        """Numbers of threads, those that may be best where none is named."""
        most = available_threads()
        named = several("threads", self.thread_counts, int, lambda n: 0 <= n <= most, f"numbers up to this machine's {most}")
        return [*dict.fromkeys(n for each in named for n in ([each] if each else thread_choices()))]

    def tokens(self, option: str, told: str) -> list[int]:
        """Of a list of numbers of tokens. Raises ValueError."""
        return several(option, told, int, lambda n: 0 <= n <= MOST_TOKENS, f"numbers of tokens up to {MOST_TOKENS}")


def run(request: BenchRequest) -> None:
    """Time a model of your own, as llama-bench does, or passes of one with random weights.

    specdec bench -m model.gguf -p 512 -n 128
    """
    idle = [request.given[name] for name in (OF_A_SHAPE if request.model else OF_A_FILE) if name in request.given]
    if idle:
        say(f"{', '.join(idle)}: no effect with{'' if request.model else 'out'} -m")
    if request.model:
        _time_own(request, request.model)
        return
    from specdec.bench import random_weights  # which nothing else needs

    config = random_weights.parse_shape(request.shape)
    with loading("making weights") as show:
        result = random_weights.run(config, request.threads_to_time[0], request.int8, lambda doing: telling(show, doing))
    with writing():
        print(random_weights.to_json(result)) if request.as_json else Console().print(
            random_weights.to_table(result, request.shape)
        )


def _time_own(request: BenchRequest, name: str) -> None:
    from specdec.bench import model

    prompts, counts = request.tokens("--n-prompt", request.prompts), request.tokens("--n-gen", request.counts)
    threads, depths = request.threads_to_time, request.tokens("--depth", request.depths)
    with loading() as show, telling_how_to_restore():
        checkpoint = opened("target", find(name))
        cells = model.cells_of(prompts, counts, depths, threads, checkpoint.config.seq_len)
        loader = Loader(max(threads), cast(KV, request.kv), lambda name, share: show(Bar(f"{LOADING} {name}", share)))
        report = model.run(name, loader.load(checkpoint, None), cells, telling(show, TIMING))
    with writing():
        print(model.to_json(report)) if request.as_json else Console().print(model.to_table(report))
