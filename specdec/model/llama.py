"""Llama (Touvron et al. 2023, arXiv:2307.09288) and families like it: an embedding, layers of two blocks each, and a classifier.

The config determines which blocks a layer has, and how they differ from Llama's. A tensor that all layers have holds one matrix
for each layer. A tensor that only some layers have, or that holds a matrix for each expert or head, has the layer's number in its
name: "2.wq".

Shapes: S cached positions, K head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from specdec.kernels import scale_rows
from specdec.layers.activations import add_logit_bias, softcap
from specdec.layers.architecture import (
    Architecture,
    Buffers,
    BufferSizes,
    BufferSpec,
    ForwardProgram,
    FusedTensors,
    PackedTensors,
    Shapes,
    Weights,
    fuse_tensors,
)
from specdec.layers.attention import ATTENTION, move_path
from specdec.layers.block import (
    N_REWINDABLE_STATES,
    ROPE_FIELDS,
    ROPE_TABLES,
    Block,
    block_buffers,
    group_layers,
    norm,
    split_by_layer,
)
from specdec.layers.mlp import MLP
from specdec.layers.rope import fill_cos_sin, fill_query_cos_sin
from specdec.mixer_config import DeltaNetConfig, Mamba2Config, ShortConvConfig
from specdec.model_config import ModelConfig
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import LANES

PARALLEL_MAMBA2 = "mamba2:PARALLEL_MAMBA2"
GLOBAL_TENSORS = (
    "tok_emb",
    "wcls",
    "wcls_bias",
    "rms_final",
    "rms_final_bias",
    "inputs",
    "inputs_norm_in",
)  # packed tensors that belong to no layer
TOKEN_TABLE = "input_rows"  # of the per-layer inputs
FUSED_VOCAB = {"embedding": FusedTensors(("tok_emb",)), "classifier": FusedTensors(("wcls",))}
MIXERS = {  # blocks that replace attention
    ShortConvConfig: "short_conv:SHORT_CONV", DeltaNetConfig: "delta_net:DELTA_NET", Mamba2Config: "mamba2:MAMBA2",
}  # fmt: skip

LATENT_ATTENTION = "latent_attention:LATENT_ATTENTION_BLOCK"


def load_layer(name: str) -> Any:
    """Return a module of `specdec.layers`, or with a colon an object in one, which only some models need."""
    return resolve_name(f"specdec.layers.{name}")


def get_blocks(config: ModelConfig, i: int) -> tuple[Block, ...]:
    """Return layer i's blocks in order: attention or a mixer, an MLP or experts, and per-layer inputs, as far as it has them."""
    layer = config.layer_config(i)
    first = load_layer(LATENT_ATTENTION) if config.attention.latent else ATTENTION
    if layer.mixer:
        first = load_layer(PARALLEL_MAMBA2 if getattr(layer.mixer, "is_parallel", False) else MIXERS[type(layer.mixer)])
    blocks = [first, MLP]
    if config.experts and i not in config.experts.dense_layers:
        blocks[1] = load_layer("moe:PARALLEL_MOE" if config.experts.has_parallel_mlp else "moe:MOE")
    blocks = {"both": blocks, "first": blocks[:1], "second": blocks[1:]}[layer.blocks]
    return (*blocks, load_layer("per_layer_inputs:PER_LAYER_INPUTS")) if config.per_layer_inputs else (*blocks,)


def iter_blocks(config: ModelConfig) -> Iterator[tuple[int, Block]]:
    """Iterate over all blocks of all layers, in the order in which they run, as (layer index, block)."""
    return ((i, block) for i in range(config.n_layers) for block in get_blocks(config, i))


def layer_shapes(config: ModelConfig, i: int) -> Shapes:
    """Return the shapes of all tensors of layer i, by name without the layer's number."""
    return {name: shape for block in get_blocks(config, i) for name, shape in block.shapes(config.layer_config(i)).items()}


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of all tensors of a model, by llama2.c's names.

    The classifier `wcls` is left out if it is the embedding.
    """
    has_own_matrices = config.experts or config.layers or config.attention.latent
    n = config.n_layers if has_own_matrices else 1  # one is enough if all are alike
    layers = [layer_shapes(config, i) for i in range(n)]
    common = {
        name: shape for name, shape in layers[0].items() if len(shape) < 3 and all(each.get(name) == shape for each in layers)
    }
    layer_tensors = {
        f"{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items() if name not in common
    }
    table = (config.vocab_size, config.dim)
    stacked = {name: (config.n_layers, *shape) for name, shape in common.items()}
    others: Shapes = load_layer("per_layer_inputs").global_shapes(config) if config.per_layer_inputs else {}
    tensors = {"tok_emb": table, **stacked, "rms_final": (config.dim,), **others, **layer_tensors}
    if config.layer_norm:
        tensors["rms_final_bias"] = (config.dim,)
    if config.classifier_bias:
        tensors["wcls_bias"] = (config.vocab_size,)
    return tensors if config.shared_classifier else tensors | {"wcls": table}


def packed_tensors(config: ModelConfig) -> PackedTensors:
    """Return descriptions of all matrices and vectors to pack, by name; the classifier may be the embedding itself."""
    stored = shapes(config)
    packed = fuse_tensors({name: stored[name] for name in GLOBAL_TENSORS if name in stored}, FUSED_VOCAB, stored)
    packed.setdefault("classifier", packed["embedding"])
    for i, block in iter_blocks(config):
        packed |= fuse_tensors(block.shapes(config.layer_config(i)), block.fused, stored, i)
    return packed


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of all buffers of a Llama-like model, by name: those of its blocks and its RoPE tables.

    rope_cos, rope_sin (S, K + LANES): entry j belongs to row j % K of a head; sines are negative for a pair's first row.
    query_cos, query_sin: tables of queries, if a scale depends on their position.
    long_rope_cos, long_rope_sin: tables with long RoPE factors, if there are any.
    """
    specs = block_buffers(config, weights, sizes)
    for suffix, layers in group_layers(config, *ROPE_FIELDS).items():
        table = BufferSpec((sizes.n_positions, config.layer_config(layers[0]).rope_table_dim + LANES))
        specs |= {name + suffix: table for name in ROPE_TABLES}
    if config.rope.query_scale:
        specs |= dict.fromkeys(("query_cos", "query_sin"), specs["rope_cos"])
    if config.rope.longrope_threshold:
        specs |= dict.fromkeys(("long_rope_cos", "long_rope_sin"), specs["rope_cos"])
    for _, block in iter_blocks(config):
        specs |= block.buffers(config, weights, sizes)
    return specs


def fill_position_tables(config: ModelConfig, b: Buffers, start: int) -> None:
    """Fill all RoPE tables in the buffers, from position `start` on."""
    for suffix, layers in group_layers(config, *ROPE_FIELDS).items():
        cos, sin = (getattr(b, name + suffix) for name in ROPE_TABLES)
        fill_cos_sin(config.layer_config(layers[0]), cos, sin, start)
    if config.rope.longrope_threshold:
        rope = replace(config.rope, freq_factors=config.rope.long_freq_factors)
        fill_cos_sin(replace(config, attention=replace(config.attention, rope=rope)), b.long_rope_cos, b.long_rope_sin, start)
    if config.rope.query_scale:
        fill_query_cos_sin(config, b.query_cos, b.query_sin, b.rope_cos, b.rope_sin, start)


def embed(config: ModelConfig, weights: Weights, b: Buffers) -> Program:
    """Return the program that sets x to the tokens' scaled embeddings and computes the per-layer inputs, if there are any."""
    scale = config.embedding_scale / config.residual_scale
    scale_ops = [scale_rows(b.x[0], scale, config.dim)] if scale != 1 else []
    ops = [[weights.matrices["embedding"].embed(b.x[0], b.tokens), *scale_ops]]
    return [*ops, *load_layer("per_layer_inputs").embedding_program(config, weights, b)] if config.per_layer_inputs else ops


def classify(config: ModelConfig, weights: Weights, b: Buffers) -> Program:
    """Return the program of logits = wcls rmsnorm(x), for the tokens with requested logits, with a bias and a softcap if any."""
    matmul = weights.matrices["classifier"].matmul(b.logits, b.normed, b.scratch, logits_only=True)
    bias_ops = [add_logit_bias(b.logits, weights.vectors["wcls_bias"])] if config.classifier_bias else []
    softcap_ops = [softcap(b.logits, config.logit_softcap)] if config.logit_softcap else []
    return [[norm(config, weights, b, "rms_final", logits_only=True), matmul, *bias_ops, *softcap_ops]]


def final_norm(config: ModelConfig, weights: Weights, b: Buffers) -> Op:
    """Return the op of normed = rmsnorm(x) for all tokens: the classifier's input before it is divided by logit_divisor."""
    return norm(config, weights, b, "rms_final")


def layer_programs(config: ModelConfig, weights: Weights, layer_buffers: Sequence[Buffers]) -> list[Program]:
    """Return one program for each layer, which runs the layer's blocks over its own entry of layer_buffers."""
    return [
        [phase for block in get_blocks(config, i) for phase in block.program(config.layer_config(i), weights, own, i)]
        for i, own in enumerate(layer_buffers)
    ]


def program(config: ModelConfig, weights: Weights, b: Buffers) -> ForwardProgram:
    """Return the forward pass: x = embedding, then the blocks of each layer, then logits = wcls rmsnorm(x)."""
    layers = layer_programs(config, weights, split_by_layer(config, weights, b))
    return ForwardProgram(embed(config, weights, b), layers, classify(config, weights, b))


def table_tensors(config: ModelConfig) -> dict[str, str]:
    """Return the name of the per-layer inputs' table, which stays in its file, by the buffer that it fills; else empty."""
    return {TOKEN_TABLE: TOKEN_TABLE} if config.per_layer_inputs else {}


LLAMA = Architecture(
    shapes,
    packed_tensors,
    buffers,
    program,
    fill_position_tables,
    move_path=move_path,
    final_norm=final_norm,
    split_by_layer=split_by_layer,
    table_tensors=table_tensors,
)
# With a recurrent state of one sequence
LLAMA_RECURRENT = replace(LLAMA, move_path=None, split_by_layer=None, n_rewindable_states=N_REWINDABLE_STATES)
