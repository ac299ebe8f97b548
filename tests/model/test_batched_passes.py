"""Batches over every family and weight format: logits are bit-identical to those of single passes."""

import numpy as np
import pytest

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.model import Model
from tests.tools.golden import WEIGHT_FORMATS, pack_weights
from tests.tools.hf_folders import CONFIGS
from tests.tools.random_models import THREAD_COUNTS, random_tokens

CASES = [(model, [*WEIGHT_FORMATS][i % len(WEIGHT_FORMATS)], ("f32", "f16")[i // 2 % 2]) for i, model in enumerate(CONFIGS)]
CASES += [("gpt2", "fp32", "f32"), ("gpt2", "int8", "f16"), ("llama3", "packed bf16", "f16"), ("qwen3", "bf16", "f32")]


def run_random_batches(first: Model, alone: Model, n_sequences: int, rng: np.random.Generator) -> int:
    """Run passes with proposals of any length, partly accepted, next to prefill chunks; return the number of passes."""
    n_positions = min(first.longrope_threshold or first.n_positions, 90)
    sequences = [random_tokens(first.config, int(rng.integers(2, n_positions)), i) for i in range(n_sequences)]
    clones, lengths, n_passes = [first, *(first.clone_for_sequence() for _ in sequences[1:])], [0] * n_sequences, 0
    while any(n < len(sequence) for n, sequence in zip(lengths, sequences, strict=True)):
        n_free, jobs = MAX_BATCH_TOKENS, []
        for i in rng.permutation(n_sequences):
            left = len(sequences[i]) - lengths[i]
            n = min(int(rng.choice([1, 2, 4, 20])), left, n_free)
            if n:
                end = lengths[i] + n
                jobs.append((i, sequences[i][:end], int(rng.choice([0, 1, n]))))
                lengths[i], n_free = end - (int(rng.integers(0, n)) if left > n else 0), n_free - n
        batched = Model.forward_batch([(clones[i], tokens, n_logits) for i, tokens, n_logits in jobs])
        n_passes += 1
        for (_, tokens, n_logits), logits in zip(jobs, batched, strict=True):
            alone.forward([], 0)
            np.testing.assert_array_equal(logits.view(np.int32), alone.forward(tokens, n_logits).view(np.int32))
    return n_passes


@pytest.mark.parametrize(("model", "weight_format", "kv"), CASES)
def test_batch_of_eight_gives_logits_of_single_passes(model: str, weight_format: str, kv) -> None:
    config, weights = pack_weights(model, weight_format)
    for n_threads in THREAD_COUNTS:
        first, alone = Model(config, weights, n_threads, kv=kv), Model(config, weights, 1, kv=kv)
        assert run_random_batches(first, alone, 8, np.random.default_rng(n_threads)) > 5


@pytest.mark.parametrize("n_sequences", [5, pytest.param(12, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(("model", "weight_format", "kv"), CASES)
def test_copy_kv_shares_a_common_prefix(model: str, weight_format: str, kv, n_sequences: int) -> None:
    """With any length, back and forth; both continue. A recurrent state is copied for the longest length that has one."""
    config, weights = pack_weights(model, weight_format)
    first, alone = (Model(config, weights, 1, kv=kv, hidden_layers=layers) for layers in ((1,), ()))
    second, rng, n_copied = first.clone_for_sequence(), np.random.default_rng(3), 0
    for i in range(n_sequences):
        sequence = random_tokens(config, int(rng.integers(12, first.n_positions - 5)), i)
        first.forward(sequence, int(rng.integers(0, 6)))
        if first.can_run_trees:
            first.forward_tree(sequence, [5, 6], [-1, 0])
        n = int(rng.integers(max(1, len(sequence) - rng.choice([9, 80])), len(sequence) + 1))
        other = sequence[:n] + random_tokens(config, 4, 50 + i)
        n_cached = len(other) - 1 - first.count_prefill_tokens(other)
        second.copy_kv(first, other)
        assert second.n_cached_tokens == n_cached and (n_cached == 0 or n_cached >= n)
        n_copied += bool(n_cached)
        for clone, tokens in ((second, other), (first, [*sequence, 7]), (second, [*other, 8])):
            alone.forward([], 0)
            np.testing.assert_array_equal(clone.forward(tokens, 2).view(np.int32), alone.forward(tokens, 2).view(np.int32))
            own = Model(config, weights, 1, kv=kv, hidden_layers=(1,))
            own.forward(tokens)
            np.testing.assert_array_equal(clone.get_hidden_states(tokens, 0), own.get_hidden_states(tokens, 0))
        first, second = second, first
    assert n_copied > n_sequences // 4


def test_copy_kv_requires_same_config_weights_and_kv() -> None:
    config, weights = pack_weights("llama3", "fp32")
    model, again = Model(config, weights, 1, kv="f32"), pack_weights("llama3", "fp32")[1]
    others = [Model(config, weights, 1, kv="f16"), Model(config, weights, 1, kv="f32", hidden_layers=(0,))]
    for other in [*others, Model(config, again, 1, kv="f32")]:
        with pytest.raises(ValueError, match="only between models with the same config"):
            other.copy_kv(model, [1, 2])
    sequence = random_tokens(config, 30)
    expected = model.forward(sequence, 3).copy()
    for other in (model, model.with_capacity(40)):
        other.copy_kv(model, sequence)
        assert other.n_cached_tokens == 29
        np.testing.assert_array_equal(other.forward(sequence, 3), expected)
