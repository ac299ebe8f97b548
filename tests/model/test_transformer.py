"""Forward passes: against float64 oracles within rounding, and bit for bit where bits are promised."""

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers import architecture
from specdec.loaders import load_checkpoint
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model import transformer
from specdec.model.kv_cache import INITIAL_CAPACITY
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import FP32, INT8
from specdec.runtime.matmul_tile import PANEL_ROWS
from tests.tools import reference
from tests.tools.checkpoint_files import ROOT, SHARED, random_tensors
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, interrupt_after, random_model, random_tokens, run_in_blocks


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_oracle(name):
    config = CONFIGS[name]
    tokens = random_tokens(config, 40)
    expected = reference.forward(config, random_tensors(config, 0), tokens)
    got = run_in_blocks(random_model(config), tokens, 7)
    # float32 sums of a few hundred products of order 1: rounding of order 1e-6, and a wrong formula is off by order 1
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_do_not_depend_on_batch_or_threads(name):
    config = CONFIGS[name]
    tokens = random_tokens(config, 70)
    alone = run_in_blocks(random_model(config), tokens, 1)
    for n_threads in THREAD_COUNTS:
        transformer = random_model(config, n_threads=n_threads)
        for block in [*range(1, 18), 64]:
            np.testing.assert_array_equal(run_in_blocks(transformer, tokens, block).view(np.int32), alone.view(np.int32))


def test_logits_of_real_model_do_not_depend_on_batch_or_threads():
    for path in (DEFAULT_TARGET, DEFAULT_DRAFT, *sorted(SHARED.glob("models/stories*.bin"))):
        checkpoint = load_checkpoint(path)
        weights = LLAMA.pack(checkpoint.config, checkpoint.tensors)
        tokens = random_tokens(checkpoint.config, 130)
        alone = run_in_blocks(Model(checkpoint.config, weights, 1, n_positions=130), tokens, 1)
        for n_threads in THREAD_COUNTS:
            transformer = Model(checkpoint.config, weights, n_threads, n_positions=130)
            for block in [*range(2, 18), 64]:
                np.testing.assert_array_equal(run_in_blocks(transformer, tokens, block).view(np.int32), alone.view(np.int32))


def test_long_prompt_runs_in_chunks_and_keeps_last_logits():
    config = ModelConfig(64, 172, 2, 8, 4, 512, 300)
    tokens = random_tokens(config, 200)
    transformer = random_model(config)
    alone = run_in_blocks(transformer, tokens, 1)
    for n_logits in (0, 1, 5, 64):
        transformer.forward([], 0)
        logits = transformer.forward(tokens, n_logits)
        np.testing.assert_array_equal(logits, alone[len(tokens) - n_logits :])
        assert transformer.n_cached_tokens == len(tokens)


def test_prefilled_prompt_has_nothing_left_and_same_logits():
    config = ModelConfig(64, 172, 2, 8, 4, 512, 300)
    tokens = random_tokens(config, 200)
    expected = random_model(config).forward(tokens).copy()
    model = random_model(config)
    parts = [len(tokens) - 1, *model.prefill(tokens)]
    assert parts[-1] == model.count_prefill_tokens(tokens) == 0
    assert model.n_cached_tokens == len(tokens) - 1
    assert not [*model.prefill(tokens)]
    assert [*model.prefill([*tokens[:100], *tokens[:30]])][-1] == 0
    assert all(1 <= n - left <= MAX_BATCH_TOKENS for n, left in pairwise(parts))
    assert [*model.prefill(tokens)]
    np.testing.assert_array_equal(model.forward(tokens), expected)
    assert [*model.prefill(tokens[:1])] == [*model.prefill([])] == []


def test_prefill_chunks_are_short_for_a_slow_model(monkeypatch):
    config = ModelConfig(64, 172, 2, 8, 4, 512, 600)
    tokens, clock, speed = random_tokens(config, 500), [0.0], [0.0]
    monkeypatch.setattr(transformer.time, "perf_counter", lambda: clock[0])
    forward = Model.forward

    def slow(model, tokens, n_logits=1, n_total=0):
        clock[0] += speed[0] * (len(tokens) - model.n_cached_tokens)
        return forward(model, tokens, n_logits, n_total)

    monkeypatch.setattr(Model, "forward", slow)
    for speed[0], n in (
        (1e-6, MAX_BATCH_TOKENS),
        (0.25 / transformer.FIRST_PREFILL_CHUNK_TOKENS, transformer.FIRST_PREFILL_CHUNK_TOKENS),
        (1.0, transformer.MIN_PREFILL_CHUNK_TOKENS),
    ):
        parts = [*random_model(config).prefill(tokens)]
        assert parts[-3] - parts[-2] == n
        assert parts[-1] == 0


def test_two_interleaved_prefills_on_one_model_finish():
    """Each chunk of one drops the cache of the other."""
    config = ModelConfig(64, 172, 2, 8, 4, 512, 300)
    model = random_model(config)
    readers = [model.prefill(random_tokens(config, 200, seed=seed)) for seed in (1, 2)]
    assert len([*zip(*readers, strict=False)]) < 60


def test_logits_do_not_depend_on_previous_sequence():
    config = CONFIGS["gqa"]
    tokens = random_tokens(config, 30)
    transformer = random_model(config)
    expected = run_in_blocks(transformer, tokens, 30)[-5:]
    transformer.forward(tokens[:25] + random_tokens(config, 20, seed=9))
    np.testing.assert_array_equal(transformer.forward(tokens, 5), expected)


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
        random_model(CONFIGS["gqa"]).forward(tokens, n_logits)


def test_non_integer_tokens_are_rejected():
    for tokens in ([1.0], ["1"], [None], 5, None, np.zeros((2, 2)), object()):
        with pytest.raises(TypeError, match=r"^tokens are .*; expected whole numbers$"):
            random_model(CONFIGS["gqa"]).forward(tokens)
    for n in (1.0, "1", None, [1]):
        with pytest.raises(TypeError, match="n_logits"):
            random_model(CONFIGS["gqa"]).forward([1, 2, 3], n)


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


def test_weights_of_another_shape_are_rejected():
    weights = {name: LLAMA.pack(config, random_tensors(config, 0)) for name, config in CONFIGS.items()}
    for name, config in CONFIGS.items():
        for other in CONFIGS:
            if other != name:
                with pytest.raises(ValueError, match="shape"):
                    Model(config, weights[other])


@pytest.mark.parametrize("changes", [{"n_kv_heads": 3}, {"n_heads": 64, "n_kv_heads": 64, "head_dim": 0}, {"seq_len": 0}])
def test_invalid_config_is_rejected(changes):
    config = replace(CONFIGS["gqa"], **changes)
    with pytest.raises(ValueError, match=next(iter(changes)) + "|head_dim"):
        Model(config, LLAMA.pack(config, random_tensors(config, 0)))


def test_model_unpickles_on_machine_with_fewer_threads(monkeypatch):
    pickled = pickle.dumps(random_model(CONFIGS["gqa"], n_threads=max(THREAD_COUNTS)))
    for module in ("model.transformer", "runtime.parallel_region"):
        monkeypatch.setattr(f"specdec.{module}.get_available_threads", lambda: 1)
    assert pickle.loads(pickled).n_threads == 1


def test_pickled_or_copied_model_gives_same_bits():
    """Arrays lose their alignment to cache lines on the way, which tile loads need."""
    tokens = random_tokens(CONFIGS["gqa"], 20)
    first = random_model(CONFIGS["gqa"])
    expected = first.forward(tokens, 20).copy()
    for twin in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        np.testing.assert_array_equal(twin.forward(tokens, 20), expected)
        matrices = twin.weights.matrices
        assert matrices["embedding"].panels is matrices["classifier"].panels


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_survive_buffer_growth(name):
    """256 positions are allocated from the start; the second model allocates all of them at once."""
    config = replace(CONFIGS[name], seq_len=1000)
    tokens = random_tokens(config, 700)
    grown, at_once = random_model(config), random_model(config)
    for end in (1, 200, 255, 256, 257, 300, 600, 700):
        logits = grown.forward(tokens[:end], 1).copy()
    np.testing.assert_array_equal(at_once.forward(tokens, 1), logits)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("module", "where"), [(architecture, "zeros"), (architecture, "lazy_zeros"), (architecture, "Executor")])
def test_failed_growth_keeps_model_usable(monkeypatch, module, where, error):
    config = replace(CONFIGS["gqa"], seq_len=1000)
    tokens = random_tokens(config, 300)
    expected = random_model(config).forward(tokens, 40)
    grown = random_model(config)
    grown.forward(tokens[:250])

    def fails(*_):
        raise error

    with monkeypatch.context() as context:
        context.setattr(module, where, fails)
        with pytest.raises(error):
            grown.forward(tokens, 40)
    np.testing.assert_array_equal(grown.forward(tokens, 40), expected)


def test_hidden_states_are_kept_by_position_and_do_not_change_logits():
    """tests/model/test_toy_family.py compares hidden states with an oracle."""
    config = CONFIGS["gqa"]
    tokens, model = random_tokens(config, 90), random_model(config)
    logits, n_rows, n_bytes = model.forward(tokens, 20).copy(), len(model._executor._ops), model.get_sequence_bytes(100)
    assert model.hidden_layers == () and model.get_hidden_states(tokens, 0).size == 0
    model.hidden_layers = [2, 0]
    assert (model.n_cached_tokens, len(model._executor._ops)) == (0, n_rows + 2)
    assert model.get_sequence_bytes(100) - n_bytes == 4 * 2 * config.dim * (
        -(-(100 + MAX_BATCH_TOKENS) // PANEL_ROWS) * PANEL_ROWS
    )
    for twin in (model, pickle.loads(pickle.dumps(model))):
        assert twin.hidden_layers == (2, 0) and len(twin.get_hidden_states(tokens, 0)) == 0
        np.testing.assert_array_equal(twin.forward(tokens, 20), logits)
        states = twin.get_hidden_states(tokens, 0)
        np.testing.assert_array_equal(states[:, config.dim :], random_tensors(config, 0)["tok_emb"][tokens])
        np.testing.assert_array_equal(twin.get_hidden_states(tokens, 88), states[88:])
    model.hidden_layers = []
    np.testing.assert_array_equal(model.forward(tokens, 20), logits)
    assert len(model._executor._ops) == n_rows and model.get_hidden_states(tokens, 0).size == 0


def test_hidden_states_belong_to_requested_sequence():
    config = CONFIGS["gqa"]
    tokens, model = random_tokens(config, 90), random_model(config)
    model.hidden_layers = [1]
    model.forward(tokens)
    states = model.get_hidden_states(tokens, 0).copy()
    other = [*tokens[:40], tokens[40] + 1, *tokens[41:]]
    model.forward(other)
    assert model.get_hidden_states(tokens, 41).size == 0
    np.testing.assert_array_equal(model.get_hidden_states(tokens, 7), states[7:40])
    assert np.abs(model.get_hidden_states(other, 41) - states[41:]).max() > 1e-3
    # the second branch of this tree is the sequence
    model.forward_tree(tokens[:30], [5, tokens[30], 7, tokens[31], tokens[32]], [-1, -1, 0, 1, 3])
    assert len(model.get_hidden_states(tokens[:30], 0)) == 30
    np.testing.assert_array_equal(model.get_hidden_states(tokens, 0), states[:33])
    assert model.n_cached_tokens == 33
    logits = model.forward(tokens).copy()
    np.testing.assert_array_equal(random_model(config).forward(tokens), logits)
    np.testing.assert_array_equal(model.get_hidden_states(tokens, 0), states)
    with interrupt_after(model):
        model.forward(other)
    np.testing.assert_array_equal(model.get_hidden_states(tokens, 0), states[:40])
    assert len(model.get_hidden_states(other, 0)) == 40


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_after_last_norm_give_logits(name):
    config = CONFIGS[name]
    tokens, model, tensors = random_tokens(config, 40), random_model(config), random_tensors(config, 0)
    logits, n_rows = model.forward(tokens, 40).copy(), len(model._executor._ops)
    twin = model.clone_for_sequence([config.n_layers + 1])
    assert len(twin._executor._ops) == n_rows + 2
    for n in (3, 30, 40):
        np.testing.assert_array_equal(twin.forward(tokens[:n], 1), logits[n - 1 : n])
    states = twin.get_hidden_states(tokens, 0)
    classifier = tensors["tok_emb" if config.shared_classifier or "wcls" not in tensors else "wcls"].astype(np.float64)
    expected = states.astype(np.float64) @ classifier.T / config.logit_divisor
    assert np.abs(expected - logits).max() < 3e-5 * np.abs(logits).max()


@pytest.mark.parametrize("layers", [[4], [-1], [1, 1], [1.0], "1"])
def test_invalid_hidden_layers_are_rejected(layers):
    with pytest.raises((ValueError, TypeError), match="hidden_layers"):
        random_model(CONFIGS["gqa"]).hidden_layers = layers


FORKED = """
import os, signal, sys, threading, time
from tests.tools.random_models import CONFIGS, random_model

config = CONFIGS["gqa"]
model, busy = random_model(config), random_model(config)
mine, other = list(range(5, 70)), list(range(99, 170))
expected, others = (random_model(config).forward(tokens).tobytes() for tokens in (mine, other))
model.forward(mine)

def work():
    with busy.lock:
        time.sleep(60)

threading.Thread(target=work, daemon=True).start()
while busy.lock.acquire(blocking=False):
    busy.lock.release()
child = os.fork()
if child == 0:  # it has its own cache, and must not wait for threads that are gone
    signal.alarm(20)
    os._exit(0 if (model.forward(other).tobytes(), busy.forward(other).tobytes()) == (others, others) else 1)
print(os.waitpid(child, 0)[1], model.forward(mine).tobytes() == expected)
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


def poisoned_model(config: ModelConfig, int8: bool, where: str) -> Model:
    """Return a model with finite weights in which a pass over POISON, the only token with a value in column 1, overflows."""
    tensors = random_tensors(config, 0)
    tensors["tok_emb"][:, 1] = tensors["wo"][:, 1] = tensors["w2"][:, 1] = 0
    tensors["tok_emb"][POISON, 1] = 1e20 if where == "norm" else 1
    if where == "hidden":
        tensors["rms_ffn"][:, 1] = tensors["w1"][:, :, 1] = tensors["w3"][:, :, 1] = 1e19
    if where == "keys":
        tensors["rms_att"][:, 1] = tensors["wq"][:, :, 1] = tensors["wk"][:, :, 1] = 1e19
    return Model(config, LLAMA.pack(config, tensors, INT8 if int8 else FP32), 1)


@pytest.mark.parametrize("where", ["norm", "hidden", "keys"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", POISONED)
def test_logits_depend_only_on_preceding_tokens_even_after_non_finite_ones(name, int8, where):
    config = POISONED[name]
    sequence = [token for token in random_tokens(config, 30) if token != POISON]
    expected = poisoned_model(config, int8, where).forward(sequence, len(sequence)).copy()
    assert np.isfinite(expected).all()
    transformer = poisoned_model(config, int8, where)
    assert not np.isfinite(transformer.forward([*sequence[:5], POISON], 1)).any()
    np.testing.assert_array_equal(transformer.forward(sequence, len(sequence)), expected)  # after a sequence with it
    logits = transformer.forward([*sequence[:12], POISON, POISON, *sequence[12:14]], 5)  # as a proposal next to others
    np.testing.assert_array_equal(logits[0], expected[11])
    assert not np.isfinite(logits[1:]).any()
    np.testing.assert_array_equal(transformer.forward(sequence, len(sequence) - 12), expected[12:])


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("weight_format", [FP32, INT8])
@pytest.mark.parametrize("n_threads", THREAD_COUNTS)
def test_batch_gives_logits_of_single_passes(n_threads, weight_format, kv):
    """With any lengths, chunks, with and without logits, truncations, and growth."""
    config, rng = replace(CONFIGS["odd"], seq_len=2 * INITIAL_CAPACITY), np.random.default_rng(n_threads)
    weights = random_model(config, weight_format).weights
    first = Model(config, weights, n_threads, kv=kv)
    clones = [first, *(first.clone_for_sequence() for _ in range(4))]
    alone = [Model(config, weights, 1, kv=kv) for _ in clones]
    sequences, at = [random_tokens(config, n, n) for n in (1, 40, 7, INITIAL_CAPACITY + 30, 90)], [0] * 5
    for _ in range(40):
        jobs, n_free = [], MAX_BATCH_TOKENS
        for i in rng.permutation(5):
            if n := min(int(rng.integers(1, 25)), len(sequences[i]) - at[i], n_free):
                at[i], n_free = at[i] + n, n_free - n
                jobs.append((i, sequences[i][: at[i]], int(rng.integers(0, n + 1))))
        batched = Model.forward_batch([(clones[i], tokens, n_logits) for i, tokens, n_logits in jobs])
        for (i, tokens, n_logits), logits in zip(jobs, batched, strict=True):
            np.testing.assert_array_equal(logits, alone[i].forward(tokens, n_logits))
            at[i] -= int(rng.integers(0, 4)) if at[i] > 10 else 0
    assert at[3] > INITIAL_CAPACITY
    np.testing.assert_array_equal(clones[3].forward(sequences[3][:60], 60), alone[3].forward(sequences[3][:60], 60))


def test_invalid_batches_are_rejected_and_lose_nothing():
    config = CONFIGS["gqa"]
    model, other, tokens = random_model(config), random_model(config), random_tokens(config, 80)
    clone = model.clone_for_sequence()
    for sequences in ([(model, [1], 1), (other, [1], 1)], [(model, [1], 1), (model, [1, 2], 1)]):
        with pytest.raises(ValueError, match="different clones of one model"):
            Model.forward_batch(sequences)
    model.forward(tokens[:30])
    with pytest.raises(ValueError, match="65 tokens of 2 sequences"):
        Model.forward_batch([(model, tokens[:50], 1), (clone, tokens[:45], 1)])
    for wrong, error in (([config.vocab_size], "tokens hold"), ([1] * 97, "97 tokens do not fit")):
        with pytest.raises(ValueError, match=error):
            Model.forward_batch([(model, tokens[:40], 1), (clone, wrong, 1)])
    assert (model.n_cached_tokens, clone.n_cached_tokens, Model.forward_batch([])) == (30, 0, [])
    assert model.count_uncached_tokens(tokens[:40], 1) == 10
    with interrupt_after(model, "_executor.run_batch"):
        Model.forward_batch([(model, tokens[:40], 1), (clone, tokens[:45], 1)])
    assert (model.n_cached_tokens, clone.n_cached_tokens) == (30, 0)
    expected = other.forward(tokens[:45]).copy()
    np.testing.assert_array_equal(Model.forward_batch([(model, tokens[:40], 0), (clone, tokens[:45], 1)])[1], expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(clone)).forward(tokens[:45]), expected)
