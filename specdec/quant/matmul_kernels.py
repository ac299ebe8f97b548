"""Factories for the matmul and embedding kernels of a weight format, from its tile and its weight reader."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specdec.runtime.code_cache import inlined
from specdec.runtime.matmul_tile import PANEL_ROWS, MatmulSlice, TileLimits, multiply_panels
from specdec.runtime.op_program import Floats2, Floats3, ForwardContext, Ints1, Ints2, Kernel
from specdec.runtime.work_stealing import get_chunk_range


class MatmulArgs(NamedTuple):
    """Arguments of the kernel that `Matrix.matmul` runs.

    accumulate and logits_only are 0 or 1; first_panel and n_total_panels: see `Matrix`.
    """

    out: Floats2
    w: Floats3
    x: Floats3
    scratch: Floats3
    n: int
    group_size: int
    accumulate: int
    unit: int
    logits_only: int
    first_panel: int
    n_total_panels: int


class ExpertMatmulArgs(NamedTuple):
    """Arguments of the kernel that `Matrix.expert_matmul` runs; see there for per_token."""

    out: Floats2
    w: Floats3
    x: Floats3
    scratch: Floats3
    gathered: Floats3
    tokens: Ints2
    starts: Ints2
    n: int
    group_size: int
    per_token: int
    unit: int


@inlined
def get_chunk_panels(run, p):
    """Return the first and the end panel of `MatmulArgs.w` in this chunk of the whole matrix, split `unit` panels at a time."""
    first, last = get_chunk_range(p.n_total_panels // p.unit, run.chunk, run.n_chunks)
    return max(p.unit * first - p.first_panel, 0), min(p.unit * last - p.first_panel, p.w.shape[0])


def make_matmul(tile: Any, limits: TileLimits, get_activations: Any) -> Callable[..., None]:
    """Return the kernel function of `Matrix.matmul` that multiplies by a tile.

    Args:
        tile: Intrinsic of the tile (`make_tile`).
        limits: Limits of the tile's shape.
        get_activations: Inlined function (run, thread, args, n_tokens) that returns x in the form that the tile takes, and the
            words per group (`format_arg` of the tile).
    """

    def matmul(run: ForwardContext, thread: int, p: MatmulArgs) -> None:
        first, last = get_chunk_panels(run, p)
        n_tokens = run.n_logits if p.logits_only else run.n_tokens
        x, group_words = get_activations(run, thread, p, n_tokens)
        multiply_panels(tile, limits, p.out, p.w, x, group_words, MatmulSlice(first, last, n_tokens, p.first_panel), p.accumulate)

    return matmul


def make_expert_matmul(tile: Any, limits: TileLimits, get_activations: Any) -> Callable[..., None]:
    """Return the kernel function of `Matrix.expert_matmul` that multiplies this chunk's panels of every expert by a tile.

    The tile needs the rows of x of one expert's tokens next to each other. With one row per slot they are; with one row per token
    they are copied if tokens lie between them.
    """

    def expert_matmul(run: ForwardContext, thread: int, p: ExpertMatmulArgs) -> None:
        rows, group_words = get_activations(run, thread, p, run.n_tokens * max(p.per_token, 1))
        starts, slot_tokens, gathered = p.starts[thread], p.tokens[thread], p.gathered[thread]
        expert_panels = p.w.shape[0] // (starts.size - 1)
        first, last = get_chunk_range(expert_panels // p.unit, run.chunk, run.n_chunks)
        for expert in range(starts.size - 1):
            start, end = starts[expert], starts[expert + 1]
            n = end - start
            if n == 0:
                continue
            at = start if p.per_token > 0 else slot_tokens[start]
            x = rows[at : at + n]
            if p.per_token == 0 and slot_tokens[end - 1] != at + n - 1:  # tokens ascend, so these rows are not consecutive
                for i in range(n):
                    token = slot_tokens[start + i]
                    for k in range(rows.shape[1]):
                        gathered[i, k] = rows[token, k]
                x = gathered[:n]
            w, matmul_slice = (
                p.w[expert * expert_panels : (expert + 1) * expert_panels],
                MatmulSlice(p.unit * first, p.unit * last, n, 0),
            )
            multiply_panels(tile, limits, p.out[start:end], w, x, group_words, matmul_slice, False)

    return expert_matmul


def make_matmul_kernels(module: str, prefix: str, tile: Any, limits: TileLimits, get_activations: Any) -> tuple[Kernel, Kernel]:
    """Return the matmul and the expert matmul kernel of a tile, registered in a module under names that start with `prefix`.

    The other arguments are those of `make_matmul`.
    """
    kernels = make_matmul(tile, limits, get_activations), make_expert_matmul(tile, limits, get_activations)
    matmul, expert_matmul = (Kernel(kernel).register(prefix + kernel.__name__, module) for kernel in kernels)
    return matmul, expert_matmul


def make_embed_kernel(module: str, prefix: str, get_weight: Any) -> Kernel:
    """Return the kernel of `Matrix.embed`, out[t] = W[tokens[t]], registered in a module under a name that starts with `prefix`.

    get_weight is an inlined function (w, panel, row, k, n, group_size) that returns column k of a panel's row as float32.
    """

    def embed(run: ForwardContext, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group_size: int) -> None:
        first, last = get_chunk_range(n, run.chunk, run.n_chunks)
        for t in range(run.n_tokens):
            panel, row = divmod(tokens[t], PANEL_ROWS)
            out[t, n:] = 0.0  # an earlier pass may have left NaN there
            for k in range(first, last):
                out[t, k] = get_weight(w, panel, row, k, n, group_size)

    return Kernel(embed).register(f"{prefix}embed", module)
