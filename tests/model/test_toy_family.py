"""A family that needs what Llama does not, in one file: four norms a layer, and a running state that no slot of a cache holds."""

from dataclasses import replace

import numpy as np
import pytest

from specdec import kernels
from specdec.config import Config
from specdec.layers.base import Architecture, Buffer, Layers, packed
from specdec.model import llama
from specdec.model.registry import ARCHITECTURES
from specdec.model.transformer import FIRST_POSITIONS, Transformer
from specdec.quant import FP32, INT8
from specdec.runtime.program import Floats1, Floats2, Floats3, Operation, Pass
from specdec.runtime.tile import STRIP_ROWS
from specdec.runtime.work_stealing import share
from specdec.sampling import Sampling
from tests.tools import reference
from tests.tools.random_models import THREADS, broken_off, continuation, random_model, run_in_blocks, tokens_for

CONFIG = Config(40, 50, 3, 5, 1, 105, 700, architecture="toy")
N_STATES = 7
OF_LAYERS = ("rms_att_out", "rms_ffn_out", "decay", "gain")


def run_state(run: Pass, thread: int, x: Floats2, states: Floats2, decay: Floats1, gain: Floats1) -> None:
    """state = decay * state + x[t]; x[t] += gain * state: this part's columns; states (N, D) of the last N lengths."""
    first, last = share(decay.size, run.part, run.n_parts)
    n = states.shape[0]
    for k in range(first, last):
        state = states[run.pos % n, k] if run.pos > 0 else np.float32(0.0)
        for t in range(run.n_tokens):
            state = decay[k] * state + x[t, k]
            x[t, k] += gain[k] * state
            states[(run.pos + t + 1) % n, k] = state


def add_normed(run: Pass, thread: int, x: Floats2, normed: Floats3) -> None:
    """x[t] += this part's columns of what its thread has normed."""
    first, last = share(x.shape[1], run.part, run.n_parts)
    for t in range(run.n_tokens):
        for k in range(first, last):
            x[t, k] += normed[thread, t, k]


STATE, ADD_NORMED = Operation(run_state, kept=False), Operation(add_normed, kept=False)


def shapes(config):
    return llama.shapes(config) | dict.fromkeys(OF_LAYERS, (config.n_layers, config.dim))


def pack_of(config):
    stored, own = shapes(config), llama.pack_of(config)
    for i in range(config.n_layers):
        own |= packed(dict.fromkeys(OF_LAYERS, (config.dim,)), {}, stored, i)
    return own


def buffers(config, weights, room):
    padded = weights.vectors["rms_final"].size
    return llama.buffers(config, weights, room) | {
        "states": Buffer((config.n_layers, N_STATES, padded), whose="text"),
        "branch": Buffer((1, kernels.MAX_TOKENS, padded), whose="token"),
    }


def program(config, weights, b):
    """x += gain * state; x += norm(wo attention(norm(x))); x += norm(w2 swiglu(w13 norm(x))), layer by layer."""
    w, v = weights.matrices, weights.vectors

    def norm(name, x=b.x, of_logits=False):
        return kernels.rms_norm(b.normed, x, v[name], config.dim, config.norm_eps, of_logits, 0)

    def joined(name):
        return [norm(name, b.branch), ADD_NORMED(b.x[0], b.normed)]

    def layer(i):
        (_, *qkv), attention, _, (_, *mlp), _ = ours.layers[i]  # a norm and its products; only what is behind them is another
        return [
            [STATE(b.x[0], b.states[i], v[f"{i}.decay"], v[f"{i}.gain"])],
            [norm(f"{i}.rms_att"), *qkv],
            attention,
            [w[f"{i}.wo"].product(b.branch[0], b.heads, b.scratch)],
            joined(f"{i}.rms_att_out"),
            [norm(f"{i}.rms_ffn"), *mlp],
            [w[f"{i}.down"].product(b.branch[0], b.hidden, b.scratch)],
            joined(f"{i}.rms_ffn_out"),
        ]

    ours = llama.program(config, weights, b)
    return Layers(ours.first, [layer(i) for i in range(config.n_layers)], ours.last)


TOY = Architecture(shapes, pack_of, buffers, program, llama.fill, n_states=N_STATES)


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "toy", TOY)


def tensors_of(config):
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 5 for name, shape in shapes(config).items()}
    tensors |= {name: 1 + tensor for name, tensor in tensors.items() if name.startswith("rms")}
    return tensors | {"decay": np.float32(0.9) - np.abs(tensors["decay"])}


def model_of(n_threads=1, kind=FP32, layers=()):
    return Transformer(CONFIG, TOY.pack(CONFIG, tensors_of(CONFIG), kind), n_threads, hidden_layers=layers)


def oracle(config, tensors, tokens):
    """Logits (T, V), and the hidden states (T, D) before each layer and behind the last."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    n, angles, hidden = len(tokens), reference.frequencies(config), []
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
    """float32 sums of some ten products of order 1; a wrong formula is off by order 1."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_logits_and_hidden_states_are_those_of_the_oracle_whatever_the_batch_and_the_threads():
    tokens, layers = tokens_for(CONFIG, 75), (0, 3, 1)
    expected, hidden = oracle(CONFIG, tensors_of(CONFIG), tokens)
    alone = run_in_blocks(model_of(), tokens, 1)
    assert_near(alone, expected)
    for n_threads in THREADS:
        model = model_of(n_threads, layers=layers)
        for block in (1, 2, 6, 7, 8, 9, 64):
            model.forward([], 0)
            for begin in range(0, len(tokens), block):
                part = slice(begin, min(begin + block, len(tokens)))
                logits = model.forward(tokens[: part.stop], part.stop - part.start)
                np.testing.assert_array_equal(logits, alone[part])
            states = model.hidden(tokens, 5)
            assert_near(states, np.concatenate([hidden[layer][5:] for layer in layers], axis=1))


def test_every_tensor_of_the_toy_matters_to_the_oracle():
    tokens, tensors = tokens_for(CONFIG, 5), tensors_of(CONFIG)
    expected = oracle(CONFIG, tensors, tokens)[0]
    for name, tensor in tensors.items():
        other = oracle(CONFIG, tensors | {name: tensor[..., ::-1]}, tokens)[0]
        assert np.abs(other - expected).max() > 1e-3 * np.abs(expected).max(), name


@pytest.mark.parametrize("kind", [FP32, INT8], ids=lambda kind: kind.name)
def test_a_state_goes_back_with_its_text_however_far(kind):
    """Up to N_STATES - 1 tokens it is there; farther, the text is run again."""
    rng, tokens = np.random.default_rng(1), tokens_for(CONFIG, 90)
    model, fresh = model_of(kind=kind), model_of(kind=kind)
    n_run = []
    for back in (0, 1, 2, N_STATES - 1, N_STATES, 3, 1, 40, N_STATES - 1, 1, 5, 89):
        kept = tokens[: len(tokens) - back]
        tokens = [*kept, *rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 20))).tolist()]
        n_run.append(model.unread(tokens) + 1 - (len(tokens) - len(kept)))
        logits = model.forward(tokens).copy()
        fresh.forward([], 0)
        np.testing.assert_array_equal(logits, fresh.forward(tokens))
    assert n_run.count(0) >= 5 and max(n_run) > 60


def test_a_pass_that_was_broken_off_leaves_no_state_of_its_own():
    tokens = tokens_for(CONFIG, 60)
    model, expected = model_of(), model_of().forward(tokens).copy()
    model.forward(tokens[:30])
    with broken_off(model):
        model.forward([*tokens[:30], *tokens[:20]])
    np.testing.assert_array_equal(model.forward(tokens), expected)


def test_a_text_that_outgrows_its_buffers_keeps_its_state():
    tokens = tokens_for(CONFIG, FIRST_POSITIONS + 40)
    grown, at_once = model_of(layers=(2,)), model_of(layers=(2,))
    for end in (FIRST_POSITIONS - 1, FIRST_POSITIONS + 1, len(tokens)):
        logits = grown.forward(tokens[:end])
    np.testing.assert_array_equal(at_once.forward(tokens), logits)
    states = grown.hidden(tokens, 0)
    assert states.shape == (len(tokens), CONFIG.dim)
    np.testing.assert_array_equal(states, at_once.hidden(tokens, 0))


def test_what_drafts_for_it_changes_no_token_and_a_tree_is_refused():
    target, draft, sampling = model_of(), model_of(kind=INT8), Sampling(0.8, seed=3)
    plain, _ = continuation(target, None, sampling, max_tokens=40)
    drafted, statistics = continuation(target, draft, sampling, gamma=4, max_tokens=40)
    assert drafted == plain and 0 < statistics.n_accepted < statistics.n_drafted
    with pytest.raises(ValueError, match=r"^this model runs no trees: its state is that of one text$"):
        target.forward_tree([1, 2], [3], [-1])


def test_room_for_a_text_counts_what_the_family_declares():
    padded = -(-CONFIG.dim // STRIP_ROWS) * STRIP_ROWS
    own = 4 * padded * (CONFIG.n_layers * N_STATES + kernels.MAX_TOKENS)
    assert model_of().text_bytes(100) == random_model(replace(CONFIG, architecture="llama")).text_bytes(100) + own


def test_texts_that_share_passes_have_states_of_their_own():
    first, alone = model_of(2), [model_of(), model_of()]
    seats, texts = [first.seat(), first], [tokens_for(CONFIG, 60, seed) for seed in (1, 2)]
    for ends in ((20, 30), (21, 34), (25, 33), (60, 41)):
        jobs = [(text[:end], 1) for text, end in zip(texts, ends, strict=True)]
        together = Transformer.forward_together([(seat, *job) for seat, job in zip(seats, jobs, strict=True)])
        for logits, model, job in zip(together, alone, jobs, strict=True):
            np.testing.assert_array_equal(logits, model.forward(*job))
