"""Llama (Touvron et al. 2023, arXiv:2307.09288) and what is like it: an embedding, layers of two blocks each, and a classifier.

Which blocks a layer has, and what they do beside Llama's, is told by the config. A tensor that all layers have holds that of each
of them; one that only some have, or that holds a matrix for each expert, is called by the layer's number: "2.wq".
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specdec.config import Config, ConvConfig, DeltaConfig
from specdec.kernels import scale_rows
from specdec.layers import per_layer_inputs
from specdec.layers.activations import cap
from specdec.layers.attention import ATTENTION, move_path
from specdec.layers.base import Architecture, Buffer, Buffers, Joined, Layers, Packed, Room, Shapes, Weights, packed
from specdec.layers.block import ANGLES, TURNING, Block, alike, block_buffers, by_layer, norm
from specdec.layers.delta_net import DELTA
from specdec.layers.mlp import MLP
from specdec.layers.moe import BESIDE, MIXTURE
from specdec.layers.per_layer_inputs import INPUTS
from specdec.layers.recurrent import N_STATES
from specdec.layers.rope import fill_query_tables, fill_tables
from specdec.layers.short_conv import CONVOLUTION
from specdec.runtime.program import Program, Row
from specdec.runtime.simd import LANES

OUTER = ("tok_emb", "wcls", "rms_final", "inputs", "inputs_norm_in")  # tensors that are packed, and are no layer's
TABLES = {"embedding": Joined(("tok_emb",)), "classifier": Joined(("wcls",))}
MIXERS = {ConvConfig: CONVOLUTION, DeltaConfig: DELTA}  # what may stand in the place of attention


def blocks_of(config: Config, i: int) -> tuple[Block, ...]:
    """What mixes positions in layer i, what does not, and what takes more of a token than the residual stream has."""
    first = MIXERS.get(type(config.of_layer(i).mixer), ATTENTION)
    second = MLP
    if config.experts and i not in config.experts.dense_layers:
        second = BESIDE if config.experts.is_beside else MIXTURE
    return (first, second, INPUTS) if config.inputs else (first, second)


def all_blocks(config: Config) -> Iterator[tuple[int, Block]]:
    """Those of all layers, in the order in which they run, by the number of their layer."""
    return ((i, block) for i in range(config.n_layers) for block in blocks_of(config, i))


def layer_shapes(config: Config, i: int) -> Shapes:
    """Those of layer i's blocks."""
    return {name: shape for block in blocks_of(config, i) for name, shape in block.shapes(config.of_layer(i)).items()}


def shapes(config: Config) -> Shapes:
    """By llama2.c's names; `wcls` only where it is not the embedding."""
    differ = config.experts or config.layers
    layers = [layer_shapes(config, i) for i in range(config.n_layers if differ else 1)]  # of all alike, one tells of all
    common = {n: shape for n, shape in layers[0].items() if len(shape) < 3 and all(each.get(n) == shape for each in layers)}
    own = {f"{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items() if name not in common}
    table = (config.vocab_size, config.dim)
    of_all = {name: (config.n_layers, *shape) for name, shape in common.items()}
    outer = {"rms_final": (config.dim,)} | (per_layer_inputs.outer_shapes(config) if config.inputs else {})
    return {"tok_emb": table, **of_all, **outer, **own} | ({} if config.shared_classifier else {"wcls": table})


def pack_of(config: Config) -> Packed:
    """What blocks say; a classifier that has no tensor of its own is the embedding."""
    stored = shapes(config)
    own = packed({name: stored[name] for name in OUTER if name in stored}, TABLES, stored)
    own.setdefault("classifier", own["embedding"])
    for i, block in all_blocks(config):
        own |= packed(block.shapes(config.of_layer(i)), block.joined, stored, i)
    return own


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Those of blocks; rope_cos, rope_sin (S, K + LANES): entry j belongs to row j % K of a head; sines are negative for a pair's
    first row.

    query_cos, query_sin: those of queries, where these have a scale of their position's; long_rope_cos, long_rope_sin: those of
    long texts, where these have divisors of their own.
    """
    own = block_buffers(config, weights, room)
    for end, layers in alike(config, *ANGLES).items():
        table = Buffer((room.n_positions, config.of_layer(layers[0]).head_dim + LANES))
        own |= {name + end: table for name in TURNING}
    if config.rope.query_scale:
        own |= dict.fromkeys(("query_cos", "query_sin"), own["rope_cos"])
    if config.rope.n_short:
        own |= dict.fromkeys(("long_rope_cos", "long_rope_sin"), own["rope_cos"])
    for _, block in all_blocks(config):
        own |= block.buffers(config, weights, room)
    return own


def fill(config: Config, b: Buffers, start: int) -> None:
    """`Architecture.fill`."""
    for end, layers in alike(config, *ANGLES).items():
        cos, sin = (getattr(b, name + end) for name in TURNING)
        fill_tables(config.of_layer(layers[0]), cos, sin, start)
    if config.rope.n_short:
        long = replace(config.rope, divisors=config.rope.long_divisors)
        fill_tables(replace(config, attention=replace(config.attention, rope=long)), b.long_rope_cos, b.long_rope_sin, start)
    if config.rope.query_scale:
        fill_query_tables(config, b.query_cos, b.query_sin, b.rope_cos, b.rope_sin, start)


def embed(config: Config, weights: Weights, b: Buffers) -> Program:
    """x = embedding."""
    scale = config.embedding_scale / config.residual_scale
    scaled = [scale_rows(b.x[0], scale, config.dim)] if scale != 1 else []
    first = [[weights.matrices["embedding"].embedding(b.x[0], b.tokens), *scaled]]
    return [*first, *per_layer_inputs.first_program(config, weights, b)] if config.inputs else first


def classify(config: Config, weights: Weights, b: Buffers) -> Program:
    """logits = wcls rmsnorm(x), of the last tokens."""
    product = weights.matrices["classifier"].product(b.logits, b.normed, b.scratch, of_logits=True)
    capped = [cap(b.logits, config.logit_cap)] if config.logit_cap else []
    return [[norm(config, weights, b, "rms_final", of_logits=True), product, *capped]]


def outcome(config: Config, weights: Weights, b: Buffers) -> Row:
    """normed = rmsnorm(x), as the classifier takes it, but for a divisor of logits."""
    return norm(config, weights, b, "rms_final")


def programs(config: Config, weights: Weights, of_layers: Sequence[Buffers]) -> list[Program]:
    """Those of layers, of each over its own buffers."""
    return [
        [phase for block in blocks_of(config, i) for phase in block.program(config.of_layer(i), weights, own, i)]
        for i, own in enumerate(of_layers)
    ]


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """x = embedding; of each layer its two blocks; wcls rmsnorm(x)."""
    layers = programs(config, weights, by_layer(config, weights, b))
    return Layers(embed(config, weights, b), layers, classify(config, weights, b))


def tables(config: Config) -> dict[str, str]:
    """`Architecture.tables`."""
    return {per_layer_inputs.ROWS: per_layer_inputs.ROWS} if config.inputs else {}


LLAMA = Architecture(shapes, pack_of, buffers, program, fill, move=move_path, outcome=outcome, caches=by_layer, tables=tables)
WITH_STATES = replace(LLAMA, move=None, caches=None, n_states=N_STATES)  # which is that of one text
