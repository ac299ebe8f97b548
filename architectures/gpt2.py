"""GPT-2 (Radford et al. 2019): its tensors, its matrices, its pass."""

from ..kernels import add_bias, add_positions, layer_norm
from ..machine.programs import Program, Row
from ..machine.tiles import STRIP_ROWS
from ..weights.matrix import n_strips
from .attention import attention, move_path, whole_heads
from .blocks import block_buffers, by_layer
from .config import Config
from .gates import gelu
from .plan import Architecture, Buffers, Layers, Part, Vector, Weights


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """By llama2.c's names and those of their biases; `wcls` only where it is not the embedding."""
    layers, dim, hidden = config.n_layers, config.dim, config.hidden_dim
    tensors: dict[str, tuple[int, ...]] = {"tok_emb": (config.vocab_size, dim), "pos_emb": (config.seq_len, dim)}
    tensors |= dict.fromkeys(("wq", "wk", "wv", "wo"), (layers, dim, dim))
    tensors |= {"w1": (layers, hidden, dim), "w2": (layers, dim, hidden), "b1": (layers, hidden)}
    tensors |= dict.fromkeys(("bq", "bk", "bv", "bo", "b2"), (layers, dim))
    tensors |= dict.fromkeys(("ln_att", "ln_att_bias", "ln_ffn", "ln_ffn_bias"), (layers, dim))
    tensors |= dict.fromkeys(("ln_final", "ln_final_bias"), (dim,))
    return tensors if config.shared_classifier else tensors | {"wcls": (config.vocab_size, dim)}


def parts(config: Config) -> dict[str, Part]:
    """q, k and v are one product."""
    dim, hidden = config.dim, config.hidden_dim
    table = (config.vocab_size,)
    matrices = {
        "embedding": Part((("tok_emb", None),), table, dim),
        "classifier": Part((("tok_emb" if config.shared_classifier else "wcls", None),), table, dim),
    }
    for i in range(config.n_layers):
        matrices[f"{i}.qkv"] = Part((("wq", i), ("wk", i), ("wv", i)), (dim, dim, dim), dim)
        matrices[f"{i}.wo"] = Part((("wo", i),), (dim,), dim)
        matrices[f"{i}.up"] = Part((("w1", i),), (hidden,), dim)
        matrices[f"{i}.down"] = Part((("w2", i),), (dim,), hidden)
    return matrices


def vectors(config: Config) -> dict[str, Vector]:
    """Norms, biases, and the positions' table."""
    dim, hidden = config.dim, config.hidden_dim
    own = {name: Vector(((name, None),), (dim,)) for name in ("ln_final", "ln_final_bias")}
    own["pos_emb"] = Vector((("pos_emb", None),), (dim,), n_rows=config.seq_len)
    for i in range(config.n_layers):
        for name in ("ln_att", "ln_att_bias", "ln_ffn", "ln_ffn_bias", "bo", "b2"):
            own[f"{i}.{name}"] = Vector(((name, i),), (dim,))
        own[f"{i}.bqkv"] = Vector((("bq", i), ("bk", i), ("bv", i)), (dim, dim, dim))
        own[f"{i}.b1"] = Vector((("b1", i),), (hidden,))
    return own


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """x = embedding + position; for each layer x += wo attention(qkv norm(x)), x += w2 gelu(w1 norm(x)); wcls norm(x)."""
    w, v, of_layers = weights.matrices, weights.vectors, by_layer(config, weights, b)
    k_row = n_strips(config.dim) * STRIP_ROWS

    def norm(name: str, of_logits: bool = False) -> Row:
        return normed(config, weights, b, name, of_logits)

    unit = whole_heads(config) if b.kv.is_scaled else 1

    def layer(i: int) -> Program:
        own = of_layers[i]
        return [
            [
                norm(f"{i}.ln_att"),
                w[f"{i}.qkv"].product(b.qkv, b.normed, b.scratch, unit=unit),
                add_bias(b.qkv, v[f"{i}.bqkv"], unit),
                b.kv.store_keys(own.keys, own.key_scales, b.qkv, unit, k_row),
                b.kv.store_values(own.values, own.value_scales, b.qkv, unit, 2 * k_row, config.head_dim),
            ],
            [attention(config, own)],
            [w[f"{i}.wo"].product(b.x[0], b.heads, b.scratch, adding=True), add_bias(b.x[0], v[f"{i}.bo"], 1)],
            [
                norm(f"{i}.ln_ffn"),
                w[f"{i}.up"].product(b.up, b.normed, b.scratch),
                add_bias(b.up, v[f"{i}.b1"], 1),
                gelu(b.hidden, b.up),
            ],
            [w[f"{i}.down"].product(b.x[0], b.hidden, b.scratch, adding=True), add_bias(b.x[0], v[f"{i}.b2"], 1)],
        ]

    return Layers(
        [[w["embedding"].embedding(b.x[0], b.tokens), add_positions(b.x[0], v["pos_emb"], b.depths, config.dim)]],
        [layer(i) for i in range(config.n_layers)],
        [[norm("ln_final", of_logits=True), w["classifier"].product(b.logits, b.normed, b.scratch, of_logits=True)]],
    )


def normed(config: Config, weights: Weights, b: Buffers, name: str = "ln_final", of_logits: bool = False) -> Row:
    """normed = layernorm(x), by the weights of that name."""
    weight, bias = (weights.vectors[each] for each in (name, f"{name}_bias"))
    return layer_norm(b.normed, b.x, weight, bias, config.dim, config.norm_eps, of_logits)


GPT2 = Architecture(shapes, parts, vectors, block_buffers, program, learned_positions=True, move=move_path, outcome=normed)
