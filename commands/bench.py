"""`specdec bench`: times passes of a model with random weights. Knows no arrays and no formats."""

from dataclasses import dataclass

from rich.console import Console

from ..screens.progress import loading, telling
from . import options
from .endings import writing
from .request import Request


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Request):
    """Of `specdec bench`."""

    shape: options.Shape = "42M"
    threads: options.Threads = 0
    int8: options.Int8 = False
    as_json: options.AsJson = False


def run(request: BenchRequest) -> None:
    """Time passes over T tokens of a model with random weights, beside the memory bandwidth they are up against."""
    from ..measuring import bench  # which nothing else needs

    config = bench.parse_shape(request.shape)
    with loading("making weights") as show:
        kind = "int8" if request.int8 else "fp32"
        result = bench.run(config, request.threads or None, kind, lambda doing: telling(show, doing))
    with writing():
        print(bench.to_json(result)) if request.as_json else Console().print(bench.to_table(result, request.shape))
