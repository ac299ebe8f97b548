"""Random models for the tests, and helpers that run them."""

import ctypes
import functools
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from specdec.draft.draft_length import FixedLength
from specdec.model.kv_cache import KVCache
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import FP32, INT8, WeightFormat
from specdec.quant.packed_matrix import Matrix
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import N_OPS_WORD, OP_WORDS, Executor
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.simd import Float32
from tests.tools.checkpoint_files import random_tensors
from tests.tools.decode import get_cache

# dim, hidden, layers, heads, kv heads, vocab, seq_len: GQA, odd sizes, head_dim 8 and 12, more than one panel of positions
CONFIGS = {
    "gqa": ModelConfig(64, 172, 2, 8, 4, 512, 96),
    "odd": ModelConfig(40, 50, 3, 5, 1, 105, 80),
    "head_dim_12": ModelConfig(36, 33, 2, 3, 3, 105, 80),
    "head_dim_48": ModelConfig(96, 128, 2, 2, 2, 64, 80, shared_classifier=False),
}
THREAD_COUNTS = [n for n in (1, 2) if n <= get_available_threads()]


def random_model(
    config: ModelConfig,
    weight_format: WeightFormat = FP32,
    n_threads: int = 1,
    seed: int = 0,
    scale: float = 0.3,
    n_positions: int | None = None,
) -> Model:
    return Model(
        config, LLAMA.plan_weights(config, random_tensors(config, seed, scale), weight_format).pack(), n_threads, n_positions
    )


def random_cache(config: ModelConfig, weight_format: WeightFormat = FP32, n_threads: int = 1) -> KVCache:
    """Return an empty cache of a random model."""
    return random_model(config, weight_format, n_threads).new_cache()


def int8_model(
    config: ModelConfig, n_threads: int = 1, weight_format: WeightFormat = INT8, n_positions: int | None = None
) -> Model:
    return random_model(config, weight_format, n_threads, scale=0.1, n_positions=n_positions)


def random_tokens(config: ModelConfig, n: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, config.vocab_size, n).tolist()
    return tokens


def run_in_blocks(model: Model | KVCache, tokens: list[int], block: int) -> Float32:
    """Return all logits of a new sequence, run with `block` tokens per pass."""
    cache = get_cache(model)
    cache.forward([], 0)
    ends = [min(i + block, len(tokens)) for i in range(0, len(tokens), block)]
    return np.concatenate([cache.forward(tokens[:end], (end - 1) % block + 1).copy() for end in ends])


def run_product(matrix: Matrix, out: Float32, x: Float32, adding: bool = False) -> None:
    """Compute out[t] (+)= W x[t] by a program with one op."""
    scratch = zeros(1, len(x), matrix.scratch_words)
    Executor([[matrix.matmul(out, x[None], scratch, accumulate=adding)]])(len(x), 0, 0, 1)


def round_to_float32(exact: Fraction) -> Any:
    """Return the float32 nearest to a fraction: via float64, corrected where that rounds to a tie."""
    nearest = np.float32(float(exact))
    candidates = [nearest, np.nextafter(nearest, np.float32(-np.inf)), np.nextafter(nearest, np.float32(np.inf))]
    return min(candidates, key=lambda c: abs(Fraction(float(c)) - exact))


def make_started_policy(n: int) -> FixedLength:
    """Return a policy in a started round of up to n tokens."""
    policy = FixedLength(n)
    policy.start(n)
    return policy


def tiny_model(seed, vocab=105, seq_len=128, n_positions=None, layers=2, scale=None):
    config = ModelConfig(40, 50, layers, 5, 1, vocab, seq_len)
    tensors = random_tensors(config, seed) if scale is None else random_tensors(config, seed, scale)
    return Model(config, LLAMA.plan_weights(config, tensors).pack(), 1, n_positions)


@contextmanager
def interrupt_after(cache, work="executor"):
    """Raise KeyboardInterrupt at the end of a method of the cache, after it has written its results; expect it to propagate."""
    *owners, work = work.split(".")
    owner = functools.reduce(getattr, owners, cache)
    original = getattr(owner, work)

    def run(*numbers):
        original(*numbers)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, work, run)
        with pytest.raises(KeyboardInterrupt):
            yield


def run_sequentially(which: GenericSequence[int]) -> Callable[..., None]:
    """Return a `run_on_threads` that runs only the given threads, one after another."""

    def run(function: int, a: int, b: int, first: int, last: int, n_threads: int) -> None:
        for thread in which:
            ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(function)(a, b, first, last, thread)

    return run


def scatter_phases(seed: int) -> Callable[..., None]:
    """Return a `run_on_threads` that gives each phase to a random thread.

    So what one thread keeps for itself is not there in the next phase.
    """
    rng = np.random.default_rng(seed)

    def run(function: int, numbers: int, rows: int, first: int, last: int, n_threads: int) -> None:
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(function)
        while first < last:
            end = first + ctypes.c_int64.from_address(rows + 8 * (first * OP_WORDS + N_OPS_WORD)).value
            call(numbers, rows, first, end, int(rng.integers(n_threads)))
            first = end

    return run


def fake_three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has three threads; `run_sequentially` and `scatter_phases` run one at a time."""
    for module in ("model.model", "runtime.op_program", "runtime.parallel_region"):
        monkeypatch.setattr(f"specdec.{module}.get_available_threads", lambda: 3)


def get_path(node, parents):
    """Return the ancestors of a node, root first, and the node itself; empty for -1."""
    return [] if node < 0 else [*get_path(parents[node], parents), node]
