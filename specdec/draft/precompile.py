"""What passes of models will run is compiled while their weights are loaded. Knows no files."""

from collections.abc import Mapping, Sequence
from subprocess import Popen
from typing import Any

from specdec.config import Config
from specdec.layers.base import Room
from specdec.layers.kv_formats import KV_CACHES
from specdec.model.registry import architecture_of
from specdec.model.transformer import KV, kv_of
from specdec.quant import Kind
from specdec.runtime.compile_ahead import compile_ahead
from specdec.runtime.program import Operation
from specdec.runtime.tile import STRIP_ROWS


def compile_passes(config: Config, tensors: Mapping[str, Any], kinds: Sequence[Kind | None], kv: KV) -> list[Popen[bytes]]:
    """Processes that compile what passes of models will run, and what draws, while this one loads the weights.

    kinds: what the tensors become in each of the models, the target's first; see `Architecture.pack`.
    """
    outlines = [architecture_of(config).outline(config, tensors, kind) for kind in kinds]
    kv = kv_of(outlines[0], kv)
    architecture, room = architecture_of(config), Room(KV_CACHES[kv], STRIP_ROWS, 1)
    operations: dict[Operation, None] = {}
    for outline in outlines:
        program = architecture.program(config, outline, architecture.new_buffers(config, outline, room)).program({})
        operations |= dict.fromkeys(row.operation for phase in program for row in phase)
    return compile_ahead([*operations], [KV_CACHES[kv].attention.name, "sampling.draw_once"])
