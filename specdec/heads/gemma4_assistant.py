"""Gemma 4's own draft (Gemma Team 2026): a few layers that attend to their target's keys and values; tensors, matrices, and pass.

A token is guessed of the last token's embedding, the target's, and of what the target's last norm makes of the token before it.
Behind a guess the assistant's own output takes the place of that. Layers make queries alone, at the last token's position for all
guesses behind it, and see what the target has cached, which ends in front of that token. It holds nothing of a text.
"""

from dataclasses import dataclass, replace
from typing import Any

from specdec.config import Config, Flaws, HeadConfig, known_as, not_positive
from specdec.kernels import MAX_TOKENS, copy_rows, scale_rows
from specdec.layers.base import Architecture, Buffer, Buffers, Layers, Packed, Part, Room, Shapes, Weights, packed
from specdec.layers.block import CACHED, TURNING, by_layer, norm
from specdec.model import llama
from specdec.quant.matrix import Matrix
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS

PRE, POST, CENTROIDS = "pre", "post", "centroids"


@dataclass(frozen=True)
class AssistantConfig(HeadConfig):
    """What an assistant needs beside a model's numbers.

    n_centroids: into so many parts of the same size its vocabulary is cut, in the order in which its classifier lies; it says
    those tokens alone that lie in the n_chosen parts whose centroids are nearest. 0: it says all.
    """

    n_centroids: int = 0
    n_chosen: int = 0

    @property
    def n_states(self) -> int:
        return 1

    @property
    def n_said(self) -> int:
        """How many tokens have logits in a pass."""
        return self.n_rows // self.n_centroids * self.n_chosen if self.n_centroids else self.n_rows

    def layers_of(self, n_layers: int) -> tuple[int, ...]:
        """Behind the target's last norm."""
        return (n_layers + 1,)

    def flaws(self, dim: int, vocab_size: int) -> Flaws:
        yield from not_positive(self, "target_dim")
        if self.n_rows != vocab_size:
            yield f"n_rows is {self.n_rows}; expected vocab_size, {vocab_size}"
        if self.n_centroids < 0 or (self.n_centroids and self.n_rows % (self.n_centroids * STRIP_ROWS)):
            yield f"n_centroids is {self.n_centroids}; expected as many parts of a multiple of {STRIP_ROWS} tokens"
        if not min(self.n_centroids, 1) <= self.n_chosen <= self.n_centroids:
            yield f"n_chosen is {self.n_chosen}; expected 1 to n_centroids, {self.n_centroids}"


def assistant_of(config: Config) -> AssistantConfig:
    """What an assistant needs beside a model's numbers, which `Config.flaw` has asked for."""
    return known_as(config.head, AssistantConfig)


def sources(config: Config, target: Config) -> list[int]:
    """Of each layer the target's whose keys and values it takes: the last one of its type, with a window or without, that makes
    some. Raises ValueError, in words, where there is none or heads differ.
    """
    last = {bool(target.of_layer(i).attention.window): i for i in range(target.n_layers) if target.of_layer(i).has_cache}
    found = []
    for own in map(config.of_layer, range(config.n_layers)):
        name, source = "a window" if own.attention.window else "the whole text in sight", last.get(bool(own.attention.window))
        if source is None:
            raise ValueError(f"it takes the keys and values of a layer with {name}; the target has none")
        ours, theirs = (f"{each.n_kv_heads} x {each.head_dim}" for each in (own, target.of_layer(source)))
        if ours != theirs:
            raise ValueError(f"it takes keys of {ours} numbers where layers have {name}; the target's are {theirs}")
        found.append(source)
    return found


def taken(config: Config, target: Config, weights: Weights, b: Buffers) -> list[dict[str, Any]]:
    """Of each layer the arrays of the target's buffers that are its cache."""
    of_target = by_layer(target, weights, b)
    return [{name: getattr(of_target[source], name) for name in CACHED} for source in sources(config, target)]


def shapes(config: Config) -> Shapes:
    """Llama's, what makes x of an embedding and a state, what makes a state of x, and the centroids."""
    head, dim = assistant_of(config), config.dim
    centroids = {CENTROIDS: (head.n_centroids, dim)} if head.n_centroids else {}
    return llama.shapes(config) | {PRE: (dim, 2 * head.target_dim), POST: (head.target_dim, dim)} | centroids


def pack_of(config: Config) -> Packed:
    """Llama's, but for the embedding, which is the target's, and those of `shapes`."""
    stored, own = shapes(config), llama.pack_of(config)
    del own["embedding"]
    own |= packed({name: stored[name] for name in (PRE, POST, CENTROIDS) if name in stored}, {}, stored)
    if assistant_of(config).own_embedding:  # on a target
        own["embedding"] = Part((("embedding", None),), (config.vocab_size,), assistant_of(config).target_dim)
    return own


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Llama's, without a cache, for a position more; embedded (1, T, H padded): the last token; pairs (1, T, 2 H and more): that
    and the state, one behind the other; outputs (T, H padded): the next state; nearness (T, C padded): of centroids.
    """
    head = assistant_of(config)
    width = round_up(head.target_dim, STRIP_ROWS)
    return llama.buffers(config, weights, room._replace(n_positions=room.n_positions + STRIP_ROWS)) | {
        "embedded": Buffer((1, MAX_TOKENS, width), whose="token"),
        "pairs": Buffer((1, MAX_TOKENS, round_up(head.target_dim + width, STRIP_ROWS)), whose="token"),
        "outputs": Buffer((MAX_TOKENS, width), whose="token"),
        "nearness": Buffer((MAX_TOKENS, round_up(max(head.n_centroids, 1), STRIP_ROWS)), whose="token"),
    }


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """x = pre concat(embedding, state), layers, post rmsnorm(x), and logits where no centroids choose them (`says`).

    It runs at the last slot that the target has filled, whose successor's position heads are turned by. taken: see `taken`.
    """
    head, w = assistant_of(config), weights.matrices
    tables = {name: table[1:] for name, table in vars(b).items() if name.startswith(TURNING)}
    of_layers = zip(by_layer(config, weights, Buffers(**vars(b) | tables)), b.taken, strict=True)
    layers = llama.programs(config, weights, [Buffers(**vars(own) | of_target) for own, of_target in of_layers])
    embedding = w["embedding"].embedding(b.embedded[0], b.tokens)
    output = [norm(config, weights, b, "rms_final"), w[POST].product(b.outputs, b.normed, b.scratch)]
    if head.n_centroids:
        output.append(w[CENTROIDS].product(b.nearness, b.normed, b.scratch))
    return Layers(
        [
            [embedding, scale_rows(b.embedded[0], config.embedding_scale, head.target_dim)],
            [copy_rows(b.pairs[0], b.embedded, 0, 0, head.target_dim, False)],
            [w[PRE].product(b.x[0], b.pairs, b.scratch)],
        ],
        layers,
        [output] if head.n_centroids else [output, *llama.classify(config, weights, b)],
    )


def says(config: Config, weights: Weights, b: Buffers, classifier: Matrix) -> Layers:
    """Logits by those rows of the classifier that centroids chose, of the x that `program` leaves."""
    chosen = replace(weights, matrices=weights.matrices | {"classifier": classifier})
    return Layers([], [], llama.classify(config, chosen, b))


GEMMA4_ASSISTANT = Architecture(shapes, pack_of, buffers, program, llama.fill)
