"""Batches over every family and weight format: logits are bit-identical to those of single passes."""

import numpy as np
import pytest

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.kv_cache import INITIAL_CAPACITY, KVCache
from specdec.model.model import Model
from tests.tools.golden import WEIGHT_FORMATS, pack_weights
from tests.tools.hf_folders import CONFIGS
from tests.tools.random_models import THREAD_COUNTS, random_tokens

CASES = [(model, [*WEIGHT_FORMATS][i % len(WEIGHT_FORMATS)], ("f32", "f16")[i // 2 % 2]) for i, model in enumerate(CONFIGS)]
CASES += [("gpt2", "fp32", "f32"), ("gpt2", "int8", "f16"), ("llama3", "packed bf16", "f16"), ("qwen3", "bf16", "f32")]


def run_random_batches(model: Model, alone: KVCache, n_sequences: int, rng: np.random.Generator, max_tokens: int = 90) -> int:
    """Run passes with proposals of any length, partly accepted, next to prefill chunks; return the number of passes."""
    n_positions = min(model.longrope_threshold or model.n_positions, max_tokens)
    sequences = [random_tokens(model.config, int(rng.integers(2, n_positions)), i) for i in range(n_sequences)]
    caches, lengths, n_passes = [model.new_cache() for _ in sequences], [0] * n_sequences, 0
    while any(n < len(sequence) for n, sequence in zip(lengths, sequences, strict=True)):
        n_free, jobs = MAX_BATCH_TOKENS, []
        for i in rng.permutation(n_sequences):
            left = len(sequences[i]) - lengths[i]
            n = min(int(rng.choice([1, 2, 4, 20])), left, n_free)
            if n:
                end = lengths[i] + n
                jobs.append((i, sequences[i][:end], int(rng.choice([0, 1, n // 2, n]))))
                lengths[i], n_free = end - (int(rng.integers(0, n)) if left > n else 0), n_free - n
        batched = model.forward([(caches[i], tokens, n_logits) for i, tokens, n_logits in jobs])
        n_passes += 1
        for (_, tokens, n_logits), logits in zip(jobs, batched, strict=True):
            alone.forward([], 0)
            np.testing.assert_array_equal(logits.view(np.int32), alone.forward(tokens, n_logits).view(np.int32))
    return n_passes


@pytest.mark.parametrize(("model", "weight_format", "kv"), CASES)
def test_batch_of_eight_gives_logits_of_single_passes(model: str, weight_format: str, kv) -> None:
    config, weights = pack_weights(model, weight_format)
    for n_threads in THREAD_COUNTS:
        batched, alone = Model(config, weights, n_threads, kv=kv), Model(config, weights, 1, kv=kv).new_cache()
        assert run_random_batches(batched, alone, 8, np.random.default_rng(n_threads)) > 5


@pytest.mark.parametrize(("weight_format", "kv"), [("fp32", "f16"), ("int8", "f32")])
def test_batches_can_outgrow_buffers(weight_format: str, kv) -> None:
    config, weights = pack_weights("llama3", weight_format)
    for n_threads in THREAD_COUNTS:
        batched, alone = (Model(config, weights, n, 2 * INITIAL_CAPACITY, kv) for n in (n_threads, 1))
        cache = alone.new_cache()
        run_random_batches(batched, cache, 5, np.random.default_rng(1), batched.n_positions)
        assert cache._capacity > INITIAL_CAPACITY


@pytest.mark.parametrize("n_sequences", [5, pytest.param(12, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(("model", "weight_format", "kv"), CASES)
def test_copied_cache_continues_a_common_prefix(model: str, weight_format: str, kv, n_sequences: int) -> None:
    """With any length, back and forth; both continue. A recurrent state is copied for the longest length that has one."""
    loaded = Model(*pack_weights(model, weight_format), 1, kv=kv)
    first, second, alone, own = (loaded.new_cache(layers) for layers in ((1,), (1,), (), (1,)))
    rng, n_copied = np.random.default_rng(3), 0
    for i in range(n_sequences):
        sequence = random_tokens(loaded.config, int(rng.integers(12, loaded.n_positions - 5)), i)
        first.forward(sequence, int(rng.integers(0, 6)))
        if loaded.can_run_trees:
            first.forward_tree(sequence, [5, 6], [-1, 0])
        n = int(rng.integers(max(1, len(sequence) - rng.choice([9, 80])), len(sequence) + 1))
        other = sequence[:n] + random_tokens(loaded.config, 4, 50 + i)
        n_cached = len(other) - 1 - first.count_prefill_tokens(other)
        second.copy_from(first, other)
        assert second.n_tokens == n_cached and (n_cached == 0 or n_cached >= n)
        n_copied += bool(n_cached)
        for cache, tokens in ((second, other), (first, [*sequence, 7]), (second, [*other, 8])):
            alone.forward([], 0)
            expected = alone.forward(tokens, 2).copy()
            np.testing.assert_array_equal(cache.forward(tokens, 2).view(np.int32), expected.view(np.int32))
            own.forward([], 0)
            own.forward(tokens)
            np.testing.assert_array_equal(cache.get_hidden_states(tokens, 0), own.get_hidden_states(tokens, 0))
        first, second = second, first
    assert n_copied > n_sequences // 4


def test_only_caches_of_one_model_and_the_same_hidden_layers_can_be_copied() -> None:
    config, weights = pack_weights("llama3", "fp32")
    model = Model(config, weights, 1, kv="f32")
    cache, sequence = model.new_cache(), random_tokens(config, 30)
    for other in (Model(config, weights, 1, kv="f16").new_cache(), model.with_capacity(40).new_cache(), model.new_cache((0,))):
        with pytest.raises(ValueError, match="only to another one of the same model with the same hidden_layers"):
            other.copy_from(cache, [1, 2])
    expected = cache.forward(sequence, 3).copy()
    for other in (cache, model.new_cache()):
        other.copy_from(cache, sequence)
        assert other.n_tokens == 29
        np.testing.assert_array_equal(other.forward(sequence, 3), expected)
