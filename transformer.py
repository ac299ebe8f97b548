"""Tokens to logits: a model's buffers, the cache that knows its tokens, and the pass. Knows no files."""

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .architectures import Config, Weights, architecture_of
from .architectures.rope import fill_tables
from .checks import ids, whole
from .kernels import MAX_TOKENS, Buffers
from .machine.memory import lazy_zeros, zeros
from .machine.programs import Runner
from .machine.threads import available_threads, give_lock
from .machine.tiles import STRIP_ROWS, TILE_TOKENS
from .machine.vectors import LANES, Float32, ceil_div, round_up

FIRST_POSITIONS = 256  # that a model has room for before its text grows
LAZY = ("keys", "values")  # of which only what is written becomes resident


def buffer_shapes(config: Config, weights: Weights, n_positions: int, n_threads: int) -> dict[str, tuple[int, ...]]:
    """The shapes of `Buffers`, but for the tokens."""
    head_dim, kv_heads, layers = config.head_dim, config.n_kv_heads, config.n_layers
    positions, dim = round_up(n_positions, STRIP_ROWS), round_up(config.dim, STRIP_ROWS)
    turned = 0 if architecture_of(config).learned_positions else positions
    head_blocks = ceil_div(head_dim, LANES)
    matrices = weights.matrices
    return {
        "keys": (layers, kv_heads, positions // STRIP_ROWS, head_dim, STRIP_ROWS),
        "values": (layers, kv_heads, head_blocks, positions, LANES),
        "rope_cos": (turned, head_dim + LANES),
        "rope_sin": (turned, head_dim + LANES),
        "x": (1, MAX_TOKENS, dim),
        "normed": (n_threads, MAX_TOKENS, dim),
        "scratch": (n_threads, MAX_TOKENS, max(matrix.scratch_words for matrix in matrices.values())),
        "qkv": (MAX_TOKENS, matrices["0.qkv"].n_rows),
        "heads": (1, MAX_TOKENS, round_up(config.q_dim, STRIP_ROWS)),
        "scores": (n_threads, TILE_TOKENS, positions),
        "mixed": (n_threads, TILE_TOKENS, head_blocks * LANES),
        "up": (MAX_TOKENS, matrices["0.up"].n_rows),
        "hidden": (1, MAX_TOKENS, round_up(config.hidden_dim, STRIP_ROWS)),
        "logits": (MAX_TOKENS, matrices["classifier"].n_rows),
    }


class Transformer:
    """A model on CPU threads, with the KV cache of the text that it ran last.

    weights: packed (`Architecture.pack`); n_threads: all cores by default; n_positions: how far a text may go, by default
    seq_len, and no farther than that where positions are learned. Buffers grow with the text. Beyond its own seq_len a model
    sees a sliding window of that many positions.

    Whatever runs, the logits are those of the tokens that were asked for: the cache knows which tokens it holds. Threads may
    share a model; `lock` is for whoever reads logits that another's pass must not overwrite. A model can be pickled and copied.

    Raises ValueError for weights of another shape than the config's, for n_threads that the machine does not give and for
    n_positions below 1.
    """

    def __init__(self, config: Config, weights: Weights, n_threads: int | None = None, n_positions: int | None = None) -> None:
        if flaw := config.flaw():
            raise ValueError(flaw)
        self._architecture = architecture_of(config)
        self._architecture.check(config, weights)
        self._config, self._weights = config, weights.aligned()
        self._most_threads = available_threads()
        self.n_threads = self._most_threads if n_threads is None else n_threads
        self._most_threads = self.n_threads
        self._n_positions = config.seq_len if n_positions is None else whole("n_positions", n_positions, 1)
        if self._architecture.learned_positions:
            self._n_positions = min(self._n_positions, config.seq_len)
        self.lock: threading._RLock
        give_lock(self, "lock")
        self._is_running = False
        self.n_passes = 0  # so that whoever reads logits can tell whether a signal handler ran a pass meanwhile
        self._held: list[int] = []  # the tokens whose keys and values the cache holds
        self._capacity = 0
        self._buffers: Buffers
        self._reserve(min(self._n_positions, FIRST_POSITIONS))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._config, self._weights, self._most_threads, self._n_positions)

    @property
    def config(self) -> Config:
        return self._config

    @property
    def weights(self) -> Weights:
        return self._weights

    @property
    def n_positions(self) -> int:
        return self._n_positions

    @property
    def n_threads(self) -> int:
        """How many threads a pass takes: at most as many as the model was made for. Changes the speed alone."""
        return self._n_threads

    @n_threads.setter
    def n_threads(self, n: int) -> None:
        self._n_threads = whole("n_threads", n, 1, self._most_threads)

    @property
    def n_held(self) -> int:
        """How many tokens of the last text the cache holds."""
        return len(self._held)

    def text_bytes(self, n_positions: int) -> int:
        """What a text of so many positions takes beside the weights."""
        shapes = buffer_shapes(self._config, self._weights, n_positions, self._most_threads)
        return sum(4 * math.prod(shape) for shape in shapes.values())

    def forward(self, tokens: Sequence[int], n_logits: int = 1) -> Float32:
        """Logits (n_logits, V) at the last of the tokens of a text, valid until the next call; runs what the cache does not hold.

        Raises ValueError for n_logits beyond the tokens or MAX_TOKENS, a token out of range or more tokens than n_positions,
        TypeError for tokens that are no whole numbers, MemoryError where the cache cannot grow, RuntimeError in a signal handler
        that interrupts a pass.
        """
        tokens = tokens if isinstance(tokens, list) else ids("tokens", tokens)
        n = len(tokens)
        if type(n_logits) is not int or not 0 <= n_logits <= min(n, MAX_TOKENS):
            n_logits = whole("n_logits", n_logits, 0, min(n, MAX_TOKENS))
        if n > self._n_positions:
            raise ValueError(f"{n} tokens do not fit {self._n_positions} positions")
        with self.lock:
            if self._is_running:
                raise RuntimeError("this thread is in the middle of a pass of this model; a signal handler cannot use it")
            try:
                self._is_running = True
                self.n_passes += 1
                self._run(tokens, n_logits)
                return self._buffers.logits[:n_logits, : self._config.vocab_size]
            finally:
                self._is_running = False

    def _run(self, tokens: list[int], n_logits: int) -> None:
        """The tokens that the cache does not hold, and the last n_logits."""
        start = self._n_common(tokens, len(tokens) - n_logits)
        new = ids("tokens", tokens[start:])
        if new and not 0 <= min(new) <= max(new) < self._config.vocab_size:
            raise ValueError(f"token out of range 0..{self._config.vocab_size - 1}")
        self._reserve(len(tokens))
        del self._held[start:]
        while new:
            # the last pass is a full one where there are several, so that it holds all n_logits tokens
            block = new[: len(new) % MAX_TOKENS or MAX_TOKENS]
            del new[: len(block)]
            self._buffers.tokens[: len(block)] = block
            self._runner(len(block), len(self._held), 0 if new else n_logits, self._n_threads)
            self._held += block

    def _n_common(self, tokens: list[int], limit: int) -> int:
        """How many tokens, at most limit, the cache holds of a text."""
        n = min(len(self._held), limit)
        held = self._held if n == len(self._held) else self._held[:n]
        if held == tokens[:n]:
            return n
        return next(i for i in range(n) if held[i] != tokens[i])

    def _reserve(self, n_positions: int) -> None:
        """Room for a text of that many positions, twice as much as there was if that is not enough."""
        if n_positions <= self._capacity:
            return
        most = min(max(n_positions, 2 * self._capacity), self._n_positions)
        shapes = buffer_shapes(self._config, self._weights, most, self._most_threads)
        arrays = {name: (lazy_zeros if name in LAZY else zeros)(*shape) for name, shape in shapes.items()}
        capacity = arrays["values"].shape[3]
        buffers = Buffers(tokens=np.zeros(MAX_TOKENS, np.int64), **arrays)
        if self._capacity:
            buffers.rope_cos[: self._capacity] = self._buffers.rope_cos
            buffers.rope_sin[: self._capacity] = self._buffers.rope_sin
        fill_tables(self._config, buffers.rope_cos, buffers.rope_sin, self._capacity)
        if self._held:
            buffers.keys[:, :, : self._capacity // STRIP_ROWS] = self._buffers.keys
            buffers.values[:, :, :, : self._capacity] = self._buffers.values
        runner = Runner(self._architecture.program(self._config, self._weights, buffers))
        # all or nothing: an interrupt between two calls would leave a program of buffers that are gone
        self._runner, self._buffers, self._capacity = runner, buffers, capacity


def _rebuilt(config: Config, weights: Weights, n_threads: int, n_positions: int) -> Transformer:
    """A model from its pickled parts, maybe on a machine of fewer cores."""
    return Transformer(config, weights, min(n_threads, available_threads()), n_positions)
