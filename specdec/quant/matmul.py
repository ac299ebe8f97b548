"""What multiplies a matrix, or looks its rows up, made of a tile and of what a weight is. Knows no kind of weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specdec.runtime.code_cache import inlined
from specdec.runtime.program import Floats2, Floats3, Ints1, Ints2, Operation, Pass
from specdec.runtime.tile import STRIP_ROWS, Tokens, Work, multiply_strips
from specdec.runtime.work_stealing import share


class Product(NamedTuple):
    """What the operation of `Matrix.product` takes; adding and of_logits are 0 or 1; first, total: as of `Matrix`."""

    out: Floats2
    w: Floats3
    x: Floats3
    scratch: Floats3
    n: int
    group: int
    adding: int
    unit: int
    of_logits: int
    first: int
    total: int


class Mixture(NamedTuple):
    """What the operation of `Matrix.experts` takes; per_token: as of `Matrix.experts`."""

    out: Floats2
    w: Floats3
    x: Floats3
    scratch: Floats3
    gathered: Floats3
    tokens: Ints2
    starts: Ints2
    n: int
    group: int
    per_token: int
    unit: int


@inlined
def own_strips(run, p):
    """Of the strips of `Product.w` those that are this part's of the whole, `unit` at a time."""
    first, last = share(p.total // p.unit, run.part, run.n_parts)
    return max(p.unit * first - p.first, 0), min(p.unit * last - p.first, p.w.shape[0])


def product_by(tile: Any, tokens: Tokens, x_of: Any) -> Callable[..., None]:
    """The kernel of `Matrix.product` by a tile, which takes so many tokens of x as `x_of` gives it, with the quads of a group."""

    def product(run: Pass, thread: int, p: Product) -> None:
        first, last = own_strips(run, p)
        n_tokens = run.n_logits if p.of_logits else run.n_tokens
        x, n_quads = x_of(run, thread, p, n_tokens)
        multiply_strips(tile, tokens, p.out, p.w, x, n_quads, Work(first, last, n_tokens, p.first), p.adding)

    return product


def experts_by(tile: Any, tokens: Tokens, x_of: Any) -> Callable[..., None]:
    """The kernel of `Matrix.experts` by the same: this part's strips of every expert.

    Rows of x of one expert's tokens have to lie one behind the other: slots do.
    """

    def experts(run: Pass, thread: int, p: Mixture) -> None:
        rows, n_quads = x_of(run, thread, p, run.n_tokens * max(p.per_token, 1))
        starts, of_slot, gathered = p.starts[thread], p.tokens[thread], p.gathered[thread]
        strips = p.w.shape[0] // (starts.size - 1)
        first, last = share(strips // p.unit, run.part, run.n_parts)
        for expert in range(starts.size - 1):
            start, end = starts[expert], starts[expert + 1]
            n = end - start
            if n == 0:
                continue
            at = start if p.per_token > 0 else of_slot[start]
            here = rows[at : at + n]
            if p.per_token == 0 and of_slot[end - 1] != at + n - 1:  # tokens ascend, so these are not neighbours
                for i in range(n):
                    token = of_slot[start + i]
                    for k in range(rows.shape[1]):
                        gathered[i, k] = rows[token, k]
                here = gathered[:n]
            w, work = p.w[expert * strips : (expert + 1) * strips], Work(p.unit * first, p.unit * last, n, 0)
            multiply_strips(tile, tokens, p.out[start:end], w, here, n_quads, work, False)

    return experts


def multiplied_by(module: str, prefix: str, tile: Any, tokens: Tokens, x_of: Any) -> tuple[Operation, Operation]:
    """Both as operations of a module, whose names begin so."""
    kernels = product_by(tile, tokens, x_of), experts_by(tile, tokens, x_of)
    product, experts = (Operation(kernel).named(prefix + kernel.__name__, module) for kernel in kernels)
    return product, experts


def embedded_by(module: str, prefix: str, weight_at: Any) -> Operation:
    """The operation of `Matrix.embedding`, out[t] = W[tokens[t]], by what gives the weight of a row of a strip in column k."""

    def embed(run: Pass, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group: int) -> None:
        first, last = share(n, run.part, run.n_parts)
        for t in range(run.n_tokens):
            strip, row = divmod(tokens[t], STRIP_ROWS)
            out[t, n:] = 0.0  # what an earlier pass left there may be NaN
            for k in range(first, last):
                out[t, k] = weight_at(w, strip, row, k, n, group)

    return Operation(embed).named(f"{prefix}embed", module)
