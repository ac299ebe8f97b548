"""Forward passes: against float64 oracles within rounding, and bit for bit where bits are promised."""

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers import buffers
from specdec.loaders import load_checkpoint
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model import llama
from specdec.model.kv_cache import KVCache
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import FP32, INT8
from specdec.runtime.simd import PANEL_ROWS
from tests.tools import reference
from tests.tools.checkpoint_files import ROOT, SHARED, random_tensors
from tests.tools.configs import replace_config
from tests.tools.random_models import (
    CONFIGS,
    THREAD_COUNTS,
    interrupt_after,
    random_cache,
    random_model,
    random_tokens,
    run_in_blocks,
)


def test_logits_of_real_model_do_not_depend_on_batch_or_threads():
    for path in (DEFAULT_TARGET, DEFAULT_DRAFT, *sorted(SHARED.glob("models/stories*.bin"))):
        checkpoint = load_checkpoint(path)
        weights = LLAMA.plan_weights(checkpoint.config, checkpoint.tensors).pack()
        tokens = random_tokens(checkpoint.config, 130)
        alone = run_in_blocks(Model(checkpoint.config, weights, 1, n_positions=130), tokens, 1)
        for n_threads in THREAD_COUNTS:
            cache = Model(checkpoint.config, weights, n_threads, n_positions=130).new_cache()
            for block in [*range(2, 18), 64]:
                np.testing.assert_array_equal(run_in_blocks(cache, tokens, block).view(np.int32), alone.view(np.int32))


def test_long_prompt_runs_in_chunks_and_keeps_last_logits():
    config = ModelConfig(64, 172, 2, 8, 4, 512, 300)
    tokens = random_tokens(config, 200)
    cache = random_cache(config)
    alone = run_in_blocks(cache, tokens, 1)
    for n_logits in (0, 1, 5, 64):
        cache.forward([], 0)
        logits = cache.forward(tokens, n_logits)
        np.testing.assert_array_equal(logits, alone[len(tokens) - n_logits :])
        assert cache.n_tokens == len(tokens)


def test_prefilled_prompt_has_nothing_left_and_same_logits():
    config = ModelConfig(64, 172, 2, 8, 4, 512, 300)
    tokens = random_tokens(config, 200)
    expected = random_cache(config).forward(tokens).copy()
    cache = random_cache(config)
    for end in (50, 114, 199):
        cache.forward(tokens[:end], 0, len(tokens))
        assert (cache.n_tokens, cache.count_prefill_tokens(tokens)) == (end, 199 - end)
    n_passes = cache.model.n_passes
    cache.forward(tokens[:199], 0)
    assert cache.count_prefill_tokens([*tokens[:100], *tokens[:30]]) == 29
    np.testing.assert_array_equal(cache.forward(tokens), expected)
    assert cache.count_prefill_tokens(tokens[:1]) == cache.count_prefill_tokens([]) == 0 and cache.model.n_passes == n_passes + 2


def test_logits_do_not_depend_on_previous_sequence():
    config = CONFIGS["gqa"]
    tokens = random_tokens(config, 30)
    cache = random_cache(config)
    expected = run_in_blocks(cache, tokens, 30)[-5:]
    cache.forward(tokens[:25] + random_tokens(config, 20, seed=9))
    np.testing.assert_array_equal(cache.forward(tokens, 5), expected)


@pytest.mark.parametrize("window", [1, 5, 16, 23])
def test_beyond_seq_len_attention_is_a_sliding_window(window):
    config = ModelConfig(64, 172, 2, 8, 4, 512, window)
    tokens = random_tokens(config, 60)
    expected = reference.forward(config, random_tensors(config, 0), tokens, window)
    alone = run_in_blocks(random_model(config, n_positions=64), tokens, 1)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    for block in (2, 7, 8, 9, 17, 60):
        np.testing.assert_array_equal(run_in_blocks(random_model(config, n_positions=64), tokens, block), alone)


@pytest.mark.parametrize(
    ("tokens", "n_logits"), [([1] * 3, 4), ([512], 1), ([-1], 1), ([1] * 97, 1), ([1] * 70, 65), ([1], -1), ([], 1)]
)
def test_invalid_forward_is_rejected(tokens, n_logits):
    with pytest.raises(ValueError, match=r"token|n_logits"):
        random_cache(CONFIGS["gqa"]).forward(tokens, n_logits)


def test_non_integer_tokens_are_rejected():
    for tokens in ([1.0], ["1"], [None], 5, None, np.zeros((2, 2)), object()):
        with pytest.raises(TypeError, match=r"^tokens are .*; expected whole numbers$"):
            random_cache(CONFIGS["gqa"]).forward(tokens)
    for n in (1.0, "1", None, [1]):
        with pytest.raises(TypeError, match="n_logits"):
            random_cache(CONFIGS["gqa"]).forward([1, 2, 3], n)


@pytest.mark.parametrize("n", [0, -1, 10**9])
def test_n_threads_cannot_exceed_constructor_value(n):
    with pytest.raises(ValueError, match="n_threads"):
        random_model(CONFIGS["gqa"], n_threads=n)
    alone = random_model(CONFIGS["gqa"])
    with pytest.raises(ValueError, match="n_threads"):
        alone.n_threads = 2
    with pytest.raises(TypeError, match="n_threads"):
        alone.n_threads = 1.0


@pytest.mark.parametrize("n", [0, -5])
def test_n_positions_must_be_positive(n):
    with pytest.raises(ValueError, match="n_positions"):
        random_model(CONFIGS["gqa"], n_positions=n)


def test_a_model_with_other_angles_beyond_a_length_is_not_longer() -> None:
    """It must be rejected, since transformers changes all angles there ("dynamic" RoPE); a draft model gets fewer positions."""
    model = random_model(replace_config(CONFIGS["gqa"], max_positions=64), n_positions=64)
    assert model.find_max_positions(1e12, 100) == 64
    with pytest.raises(ValueError, match="n_positions must be at most 64, got 65: beyond that, the model has other RoPE angles"):
        model.with_capacity(65)


def test_weights_of_another_shape_are_rejected():
    weights = {name: LLAMA.plan_weights(config, random_tensors(config, 0)).pack() for name, config in CONFIGS.items()}
    for name, config in CONFIGS.items():
        for other in CONFIGS:
            if other != name:
                with pytest.raises(ValueError, match="shape"):
                    Model(config, weights[other])


@pytest.mark.parametrize("changes", [{"n_kv_heads": 3}, {"n_heads": 64, "n_kv_heads": 64, "head_dim": 0}, {"seq_len": 0}])
def test_invalid_config_is_rejected(changes):
    config = replace(CONFIGS["gqa"], **changes)
    with pytest.raises(ValueError, match=next(iter(changes)) + "|head_dim"):
        Model(config, LLAMA.plan_weights(config, random_tensors(config, 0)).pack())


def test_model_unpickles_on_machine_with_fewer_threads(monkeypatch):
    pickled = pickle.dumps(random_model(CONFIGS["gqa"], n_threads=max(THREAD_COUNTS)))
    for module in ("model.model", "runtime.parallel_region"):
        monkeypatch.setattr(f"specdec.{module}.get_available_threads", lambda: 1)
    assert pickle.loads(pickled).n_threads == 1


def test_pickled_or_copied_model_gives_same_bits():
    """Arrays lose their alignment to cache lines on the way, which tile loads need."""
    tokens = random_tokens(CONFIGS["gqa"], 20)
    first = random_model(CONFIGS["gqa"])
    expected = first.new_cache().forward(tokens, 20).copy()
    for twin in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        np.testing.assert_array_equal(twin.new_cache().forward(tokens, 20), expected)
        matrices = twin.weights.matrices
        assert matrices["embedding"].panels is matrices["classifier"].panels


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("module", "where"), [(buffers, "zeros"), (buffers.LazyMemory, "zeros"), (llama, "Executor")])
def test_failed_growth_keeps_model_usable(monkeypatch, module, where, error):
    config = replace(CONFIGS["gqa"], seq_len=1000)
    tokens = random_tokens(config, 300)
    expected = random_cache(config).forward(tokens, 40)
    grown = random_cache(config)
    grown.forward(tokens[:250])

    def fails(*_):
        raise error

    with monkeypatch.context() as context:
        context.setattr(module, where, fails)
        with pytest.raises(error):
            grown.forward(tokens, 40)
    np.testing.assert_array_equal(grown.forward(tokens, 40), expected)


def test_hidden_states_are_kept_by_position_and_do_not_change_logits():
    config = CONFIGS["gqa"]
    tokens, model = random_tokens(config, 90), random_model(config)
    plain, cache = model.new_cache(), model.new_cache([2, 0])
    logits, n_bytes = plain.forward(tokens, 20).copy(), model.get_sequence_bytes(100)
    assert plain.hidden_layers == () and plain.get_hidden_states(tokens, 0).size == 0
    assert model.get_sequence_bytes(100, n_hidden_layers=2) - n_bytes == 4 * 2 * config.dim * (
        -(-(100 + MAX_BATCH_TOKENS) // PANEL_ROWS) * PANEL_ROWS
    )
    assert cache.hidden_layers == (2, 0) and len(cache.get_hidden_states(tokens, 0)) == 0
    np.testing.assert_array_equal(cache.forward(tokens, 20), logits)
    states = cache.get_hidden_states(tokens, 0)
    np.testing.assert_array_equal(states[:, config.dim :], random_tensors(config, 0)["tok_emb"][tokens])
    np.testing.assert_array_equal(cache.get_hidden_states(tokens, 88), states[88:])
    np.testing.assert_array_equal(model.new_cache().forward(tokens, 20), logits)


def test_hidden_states_belong_to_requested_sequence():
    config = CONFIGS["gqa"]
    tokens, cache = random_tokens(config, 90), random_model(config).new_cache([1])
    cache.forward(tokens)
    states = cache.get_hidden_states(tokens, 0).copy()
    other = [*tokens[:40], tokens[40] + 1, *tokens[41:]]
    cache.forward(other)
    assert cache.get_hidden_states(tokens, 41).size == 0
    np.testing.assert_array_equal(cache.get_hidden_states(tokens, 7), states[7:40])
    assert np.abs(cache.get_hidden_states(other, 41) - states[41:]).max() > 1e-3
    # the second branch of this tree is the sequence
    cache.forward_tree(tokens[:30], [5, tokens[30], 7, tokens[31], tokens[32]], [-1, -1, 0, 1, 3])
    assert len(cache.get_hidden_states(tokens[:30], 0)) == 30
    np.testing.assert_array_equal(cache.get_hidden_states(tokens, 0), states[:33])
    assert cache.n_tokens == 33
    logits = cache.forward(tokens).copy()
    np.testing.assert_array_equal(random_cache(config).forward(tokens), logits)
    np.testing.assert_array_equal(cache.get_hidden_states(tokens, 0), states)
    with interrupt_after(cache):
        cache.forward(other)
    np.testing.assert_array_equal(cache.get_hidden_states(tokens, 0), states[:40])
    assert len(cache.get_hidden_states(other, 0)) == 40


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_after_last_norm_give_logits(name):
    config = CONFIGS[name]
    tokens, model, tensors = random_tokens(config, 40), random_model(config), random_tensors(config, 0)
    plain, cache = model.new_cache(), model.new_cache([config.n_layers + 1])
    logits = plain.forward(tokens, 40).copy()
    for n in (3, 30, 40):
        np.testing.assert_array_equal(cache.forward(tokens[:n], 1), logits[n - 1 : n])
    states = cache.get_hidden_states(tokens, 0)
    classifier = tensors["tok_emb" if config.shared_classifier or "wcls" not in tensors else "wcls"].astype(np.float64)
    expected = states.astype(np.float64) @ classifier.T / config.logit_divisor
    assert np.abs(expected - logits).max() < 3e-5 * np.abs(logits).max()


@pytest.mark.parametrize("layers", [[4], [-1], [1, 1], [1.0], "1"])
def test_invalid_hidden_layers_are_rejected(layers):
    with pytest.raises((ValueError, TypeError), match="hidden_layers"):
        random_model(CONFIGS["gqa"]).new_cache(layers)


FORKED = """
import os, signal, sys, threading, time
from tests.tools.random_models import CONFIGS, random_cache

config = CONFIGS["gqa"]
cache, busy = random_cache(config), random_cache(config)
mine, other = list(range(5, 70)), list(range(99, 170))
expected, others = (random_cache(config).forward(tokens).tobytes() for tokens in (mine, other))
cache.forward(mine)

def work():
    with busy.model.lock:
        time.sleep(60)

threading.Thread(target=work, daemon=True).start()
while busy.model.lock.acquire(blocking=False):
    busy.model.lock.release()
child = os.fork()
if child == 0:  # it has its own cache, and must not wait for threads that are gone
    signal.alarm(20)
    os._exit(0 if (cache.forward(other).tobytes(), busy.forward(other).tobytes()) == (others, others) else 1)
print(os.waitpid(child, 0)[1], cache.forward(mine).tobytes() == expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_process_has_own_cache_and_locks():
    done = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "0 True\n", done.stderr


# After a pass that is not finite

POISONED = {
    "dim 8": ModelConfig(8, 24, 2, 2, 1, 40, 64),
    "dim 36": ModelConfig(36, 33, 2, 3, 3, 105, 80),
    "dim 40": ModelConfig(40, 50, 3, 5, 1, 105, 80),
    "dim 32": ModelConfig(32, 64, 2, 4, 4, 40, 64),
}
POISON = 7  # token with values that overflow


def poisoned_cache(config: ModelConfig, int8: bool, where: str) -> KVCache:
    """Return a cache of a model with finite weights that overflows at POISON, the only token with a value in column 1."""
    tensors = random_tensors(config, 0)
    tensors["tok_emb"][:, 1] = tensors["wo"][:, 1] = tensors["w2"][:, 1] = 0
    tensors["tok_emb"][POISON, 1] = 1e20 if where == "norm" else 1
    if where == "hidden":
        tensors["rms_ffn"][:, 1] = tensors["w1"][:, :, 1] = tensors["w3"][:, :, 1] = 1e19
    if where == "keys":
        tensors["rms_att"][:, 1] = tensors["wq"][:, :, 1] = tensors["wk"][:, :, 1] = 1e19
    return Model(config, LLAMA.plan_weights(config, tensors, INT8 if int8 else FP32).pack(), 1).new_cache()


@pytest.mark.parametrize("where", ["norm", "hidden", "keys"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", POISONED)
def test_logits_depend_only_on_preceding_tokens_even_after_non_finite_ones(name, int8, where):
    config = POISONED[name]
    sequence = [token for token in random_tokens(config, 30) if token != POISON]
    expected = poisoned_cache(config, int8, where).forward(sequence, len(sequence)).copy()
    assert np.isfinite(expected).all()
    cache = poisoned_cache(config, int8, where)
    assert not np.isfinite(cache.forward([*sequence[:5], POISON], 1)).any()
    np.testing.assert_array_equal(cache.forward(sequence, len(sequence)), expected)  # after a sequence with it
    logits = cache.forward([*sequence[:12], POISON, POISON, *sequence[12:14]], 5)  # as a proposal next to others
    np.testing.assert_array_equal(logits[0], expected[11])
    assert not np.isfinite(logits[1:]).any()
    np.testing.assert_array_equal(cache.forward(sequence, len(sequence) - 12), expected[12:])


def test_invalid_batches_are_rejected_and_lose_nothing():
    config = CONFIGS["gqa"]
    model, tokens = random_model(config), random_tokens(config, 80)
    one, two, other = model.new_cache(), model.new_cache(), random_cache(config)
    for caches, error in (
        ((one, other), "must belong to this model and have the same hidden_layers"),
        ((one, model.new_cache([1])), "must belong to this model and have the same hidden_layers"),
        ((one, one), "must be different ones"),
    ):
        with pytest.raises(ValueError, match=error):
            model.forward([(cache, [1], 1) for cache in caches])
    one.forward(tokens[:30])
    with pytest.raises(ValueError, match="65 tokens of 2 sequences"):
        model.forward([(one, tokens[:50], 1), (two, tokens[:45], 1)])
    for wrong, error in (([config.vocab_size], "tokens hold"), ([1] * 97, "97 tokens do not fit")):
        with pytest.raises(ValueError, match=error):
            model.forward([(one, tokens[:40], 1), (two, wrong, 1)])
    assert (one.n_tokens, two.n_tokens, model.forward([])) == (30, 0, [])
    assert one.count_uncached_tokens(tokens[:40], 1) == 10
    with interrupt_after(one, "executor.run_batch"):
        model.forward([(one, tokens[:40], 1), (two, tokens[:45], 1)])
    assert (one.n_tokens, two.n_tokens) == (30, 0)
    expected = other.forward(tokens[:45]).copy()
    np.testing.assert_array_equal(model.forward([(one, tokens[:40], 0), (two, tokens[:45], 1)])[1], expected)
