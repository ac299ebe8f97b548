"""A toy family in one file with what Llama does not need: four norms per layer, and a recurrent state."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from specdec import kernels
from specdec.layers.attention import Attention
from specdec.layers.buffers import Buffers, pad
from specdec.layers.mlp import MLP
from specdec.layers.weights import fuse_tensors
from specdec.model import ARCHITECTURES
from specdec.model.kv_cache import INITIAL_CAPACITY
from specdec.model.llama import Llama
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import FP32, INT8
from specdec.runtime.op_program import Floats1, Floats2, Floats3, ForwardContext, Kernel
from specdec.runtime.simd import PANEL_ROWS
from specdec.runtime.work_stealing import get_chunk_range
from specdec.sampling import Sampling
from tests.tools import reference
from tests.tools.decode import generate_tokens
from tests.tools.random_models import THREAD_COUNTS, interrupt_after, random_model, random_tokens, run_in_blocks

CONFIG = ModelConfig(40, 50, 3, 5, 1, 105, 700, architecture="toy")
N_STATES = 7
LAYER_TENSORS = ("rms_att_out", "rms_ffn_out", "decay", "gain")


def run_state(run: ForwardContext, thread: int, x: Floats2, states: Floats2, decay: Floats1, gain: Floats1) -> None:
    """Compute state = decay * state + x[t]; x[t] += gain * state; states (N, D) of the last N lengths."""
    first, last = get_chunk_range(decay.size, run.chunk, run.n_chunks)
    n = states.shape[0]
    for k in range(first, last):
        state = states[run.pos % n, k] if run.pos > 0 else np.float32(0.0)
        for t in range(run.n_tokens):
            state = decay[k] * state + x[t, k]
            x[t, k] += gain[k] * state
            states[(run.pos + t + 1) % n, k] = state


def add_normed(run: ForwardContext, thread: int, x: Floats2, normed: Floats3) -> None:
    """Compute x[t] += normed[t] of the same thread: this chunk's columns."""
    first, last = get_chunk_range(x.shape[1], run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        for k in range(first, last):
            x[t, k] += normed[thread, t, k]


STATE, ADD_NORMED = Kernel(run_state, cache=False), Kernel(add_normed, cache=False)


@dataclass(kw_only=True)
class ToyBuffers(Buffers):
    states: list


class Toy(Llama):
    """x += gain * state; x += norm(wo attention(norm(x))); x += norm(w2 swiglu(w13 norm(x)))."""

    can_run_trees = False
    releases_windows = False
    n_rewindable_states = N_STATES

    def shapes(self, config):
        return super().shapes(config) | dict.fromkeys(LAYER_TENSORS, (config.n_layers, config.dim))

    def plans(self, config):
        stored, own = self.shapes(config), super().plans(config)
        for i in range(config.n_layers):
            own |= fuse_tensors(dict.fromkeys(LAYER_TENSORS, (config.dim,)), {}, stored, i)
        return own

    def make_buffers(self, config, weights, sizes, new):
        states = [new.sequence(N_STATES, pad(config.dim)) for _ in range(config.n_layers)]
        return ToyBuffers(**vars(super().make_buffers(config, weights, sizes, new)), states=states)

    def layers(self, config, weights, b):
        w, v = weights.matrices, weights.vectors
        # the arrays of Llama's blocks, whose matmuls have the first ones
        attention, mlp = b.new.share(Attention), b.new.share(MLP)
        _, heads = attention.rows(w["0.qkv"].n_total_rows), attention.rows(pad(config.dim), 1)
        _, hidden = mlp.rows(w["0.up"].n_total_rows), mlp.rows(pad(config.hidden_dim), 1)
        branch = b.new.share(Toy).rows(pad(config.dim), 1)

        def norm(name, x=b.x):
            return kernels.rms_norm(b.normed, x, v[name], config.dim, config.norm_eps, False, 0)

        def add_branch(name):
            return [norm(name, branch), ADD_NORMED(b.x[0], b.normed)]

        def layer(i, own):
            (_, *qkv), attention, _, (_, *mlp), _ = own  # norms and matmuls are Llama's; what follows differs
            return [
                [STATE(b.x[0], b.states[i], v[f"{i}.decay"], v[f"{i}.gain"])],
                [norm(f"{i}.rms_att"), *qkv],
                attention,
                [w[f"{i}.wo"].matmul(branch[0], heads, b.scratch)],
                add_branch(f"{i}.rms_att_out"),
                [norm(f"{i}.rms_ffn"), *mlp],
                [w[f"{i}.down"].matmul(branch[0], hidden, b.scratch)],
                add_branch(f"{i}.rms_ffn_out"),
            ]

        return [layer(i, own) for i, own in enumerate(super().layers(config, weights, b))]


TOY = Toy()


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "toy", lambda config: TOY)


def make_tensors(config):
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 5 for name, shape in TOY.shapes(config).items()}
    tensors |= {name: 1 + tensor for name, tensor in tensors.items() if name.startswith("rms")}
    return tensors | {"decay": np.float32(0.9) - np.abs(tensors["decay"])}


def make_model(n_threads=1, weight_format=FP32):
    return Model(CONFIG, TOY.pack(CONFIG, make_tensors(CONFIG), weight_format), n_threads)


def make_cache(n_threads=1, weight_format=FP32, layers=()):
    return make_model(n_threads, weight_format).new_cache(layers)


def oracle(config, tensors, tokens):
    """Return logits (T, V), and the hidden states (T, D) before each layer and behind the last."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    n, angles, hidden = len(tokens), reference.rope_frequencies(config), []
    x = t["tok_emb"][tokens]
    for i in range(config.n_layers):
        hidden.append(x)
        state, states = np.zeros(config.dim), []
        for row in x:
            state = t["decay"][i] * state + row
            states.append(state)
        x = x + t["gain"][i] * np.array(states)
        h = reference.rms_norm(x, t["rms_att"][i])
        q, k, v = ((h @ t[f"w{c}"][i].T).reshape(n, -1, config.head_dim) for c in "qkv")
        q, k = (np.stack([reference.rope(row, pos * angles) for pos, row in enumerate(heads)]) for heads in (q, k))
        x = x + reference.rms_norm(reference.attention(q, k, v) @ t["wo"][i].T, t["rms_att_out"][i])
        h = reference.rms_norm(x, t["rms_ffn"][i])
        gate = h @ t["w1"][i].T
        x = x + reference.rms_norm((gate / (1 + np.exp(-gate)) * (h @ t["w3"][i].T)) @ t["w2"][i].T, t["rms_ffn_out"][i])
    return reference.rms_norm(x, t["rms_final"]) @ t["tok_emb"].T, [*hidden, x]


def assert_near(got, expected):
    """Compare float32 sums of some ten products of order 1; a wrong formula is off by order 1."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_logits_and_hidden_states_match_oracle_for_any_batch_and_threads():
    tokens, layers = random_tokens(CONFIG, 75), (0, 3, 1)
    expected, hidden = oracle(CONFIG, make_tensors(CONFIG), tokens)
    alone = run_in_blocks(make_model(), tokens, 1)
    assert_near(alone, expected)
    for n_threads in THREAD_COUNTS:
        cache = make_cache(n_threads, layers=layers)
        for block in (1, 2, 6, 7, 8, 9, 64):
            cache.forward([], 0)
            for begin in range(0, len(tokens), block):
                part = slice(begin, min(begin + block, len(tokens)))
                logits = cache.forward(tokens[: part.stop], part.stop - part.start)
                np.testing.assert_array_equal(logits, alone[part])
            states = cache.get_hidden_states(tokens, 5)
            assert_near(states, np.concatenate([hidden[layer][5:] for layer in layers], axis=1))


def test_every_tensor_changes_oracle_logits():
    tokens, tensors = random_tokens(CONFIG, 5), make_tensors(CONFIG)
    expected = oracle(CONFIG, tensors, tokens)[0]
    for name, tensor in tensors.items():
        other = oracle(CONFIG, tensors | {name: tensor[..., ::-1]}, tokens)[0]
        assert np.abs(other - expected).max() > 1e-3 * np.abs(expected).max(), name


@pytest.mark.parametrize("weight_format", [FP32, INT8], ids=lambda weight_format: weight_format.name)
def test_state_rewinds_by_any_length(weight_format):
    """Up to N_STATES - 1 tokens the state is there; beyond, the sequence runs again."""
    rng, tokens = np.random.default_rng(1), random_tokens(CONFIG, 90)
    cache, fresh = make_cache(weight_format=weight_format), make_cache(weight_format=weight_format)
    n_run = []
    for back in (0, 1, 2, N_STATES - 1, N_STATES, 3, 1, 40, N_STATES - 1, 1, 5, 89):
        kept = tokens[: len(tokens) - back]
        tokens = [*kept, *rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 20))).tolist()]
        n_run.append(cache.count_prefill_tokens(tokens) + 1 - (len(tokens) - len(kept)))
        logits = cache.forward(tokens).copy()
        fresh.forward([], 0)
        np.testing.assert_array_equal(logits, fresh.forward(tokens))
    assert n_run.count(0) >= 5 and max(n_run) > 60


def test_interrupted_pass_leaves_no_state():
    tokens = random_tokens(CONFIG, 60)
    cache, expected = make_cache(), make_cache().forward(tokens).copy()
    cache.forward(tokens[:30])
    with interrupt_after(cache):
        cache.forward([*tokens[:30], *tokens[:20]])
    np.testing.assert_array_equal(cache.forward(tokens), expected)


def test_state_survives_buffer_growth():
    tokens = random_tokens(CONFIG, INITIAL_CAPACITY + 40)
    grown, at_once = make_cache(layers=(2,)), make_cache(layers=(2,))
    for end in (INITIAL_CAPACITY - 1, INITIAL_CAPACITY + 1, len(tokens)):
        logits = grown.forward(tokens[:end])
    np.testing.assert_array_equal(at_once.forward(tokens), logits)
    states = grown.get_hidden_states(tokens, 0)
    assert states.shape == (len(tokens), CONFIG.dim)
    np.testing.assert_array_equal(states, at_once.get_hidden_states(tokens, 0))


def test_drafts_change_no_token_and_trees_are_rejected():
    target, draft, sampling = make_model(), make_model(weight_format=INT8), Sampling(0.8, seed=3)
    plain, _ = generate_tokens(target, None, sampling, max_tokens=40)
    drafted, statistics = generate_tokens(target, draft, sampling, gamma=4, max_tokens=40)
    assert drafted == plain and 0 < statistics.n_accepted < statistics.n_drafted
    with pytest.raises(ValueError, match=r"^token trees are not supported by models with a recurrent state$"):
        target.new_cache().forward_tree([1, 2], [3], [-1])


def test_sequence_bytes_include_buffers_of_family():
    padded = -(-CONFIG.dim // PANEL_ROWS) * PANEL_ROWS
    own = 4 * padded * (CONFIG.n_layers * N_STATES + kernels.MAX_BATCH_TOKENS)
    assert (
        make_model().get_sequence_bytes(100) == random_model(replace(CONFIG, architecture="llama")).get_sequence_bytes(100) + own
    )


def test_batched_sequences_have_own_states():
    model, alone = make_model(2), [make_cache(), make_cache()]
    caches, sequences = [model.new_cache(), model.new_cache()], [random_tokens(CONFIG, 60, seed) for seed in (1, 2)]
    for ends in ((20, 30), (21, 34), (25, 33), (60, 41)):
        jobs = [(sequence[:end], 1) for sequence, end in zip(sequences, ends, strict=True)]
        batched = model.forward([(cache, *job) for cache, job in zip(caches, jobs, strict=True)])
        for logits, single, job in zip(batched, alone, jobs, strict=True):
            np.testing.assert_array_equal(logits, single.forward(*job))
