"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): Llama's tensors and two norms more a layer, and its pass.

A norm stands behind attention and one behind the MLP, too, GELU gates, and heads of queries and keys are normed. Most layers see
a window and turn heads by angles of their own; only every sixth, of those as published, sees the whole text.
"""

from dataclasses import replace

from ..kernels import MAX_TOKENS, add_norm, geglu
from ..machine.programs import Program, Row
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import round_up
from . import llama
from .blocks import move_path
from .config import Config
from .plan import Architecture, Buffer, Buffers, Layers, Room, Vector, Weights
from .rope import fill_tables

BEHIND = ("rms_att_out", "rms_ffn_out")


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Llama's, and the norms behind attention and behind the MLP."""
    return llama.shapes(config) | dict.fromkeys(BEHIND, (config.n_layers, config.dim))


def vectors(config: Config) -> dict[str, Vector]:
    """The same."""
    own = {f"{i}.{name}": Vector(((name, i),), (config.dim,)) for name in BEHIND for i in range(config.n_layers)}
    return llama.vectors(config) | own


def full(config: Config) -> Config:
    """The numbers of a layer that sees all."""
    return replace(config, window=0)


def windowed(config: Config) -> Config:
    """The numbers of a layer that sees a window."""
    return replace(config, rope_theta=config.local_theta, rope_divisors=())


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Llama's; local_cos, local_sin: tables for layers with a window; branch (1, T, D padded): what is to be normed and added."""
    ours = llama.buffers(config, weights, room)
    tables = {"local_cos": ours["rope_cos"], "local_sin": ours["rope_sin"]}
    return ours | tables | {"branch": Buffer((1, MAX_TOKENS, round_up(config.dim, STRIP_ROWS)), whose="token")}


def fill(config: Config, b: Buffers, start: int) -> None:
    """`Architecture.fill`."""
    llama.fill(full(config), b, start)
    fill_tables(windowed(config), b.local_cos, b.local_sin, start)


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """x = embedding; for each layer x += norm(wo attention(rope(qkv norm(x)))), x += norm(w2 geglu(w13 norm(x))); wcls norm(x).

    All norms are `rms_norm`, of heads too.
    """
    w, v = weights.matrices, weights.vectors
    local = Buffers(**vars(b) | {"rope_cos": b.local_cos, "rope_sin": b.local_sin})

    def added(name: str) -> list[Row]:
        return [add_norm(b.x[0], b.branch, v[name], config.dim, config.norm_eps)]

    def layer(i: int) -> Program:
        own, tables = (full(config), b) if i in config.full_layers else (windowed(config), local)
        norm = llama.norm(config, weights, b, f"{i}.rms_att")
        qkv, attention, _, (before, up, _), _ = llama.layer(own, weights, tables, i, b.normed, [norm])
        return [
            qkv,
            attention,
            [w[f"{i}.wo"].product(b.branch[0], b.heads, b.scratch)],
            added(f"{i}.rms_att_out"),
            [before, up, geglu(b.hidden, b.up)],
            [w[f"{i}.down"].product(b.branch[0], b.hidden, b.scratch)],
            added(f"{i}.rms_ffn_out"),
        ]

    return Layers(llama.embed(config, weights, b), [layer(i) for i in range(config.n_layers)], llama.classify(config, weights, b))


GEMMA = Architecture(shapes, llama.parts, vectors, buffers, program, fill, move=move_path)
