"""A head as a model: the hidden states it takes, its pass, and what it runs again once its target knows better."""

import copy
import itertools
import json
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from specdec.config import Config, HeadConfig
from specdec.heads.eagle3 import EAGLE3
from specdec.heads.head import Head
from specdec.kernels import MAX_TOKENS
from specdec.loaders import load_checkpoint
from specdec.model.registry import architecture_of
from specdec.model.transformer import FIRST_POSITIONS, Transformer
from specdec.quant import FP32, INT4, INT8
from specdec.quant.matrix import floats
from specdec.runtime import program
from tests.tools.checkpoint_files import random_tensors
from tests.tools.hf_folders import FIXTURES
from tests.tools.random_heads import head_of, oracle, random_head
from tests.tools.random_models import CONFIGS, THREADS, broken_off, random_model, scattered, three_threads, tokens_for

N_GUESSED = 5
TOLD = sorted(path.stem for path in FIXTURES.glob("heads/*.npz"))


def told_head(name):
    """A target of the fixtures, its head, and what speculators says of it: see make_heads.py."""
    of_target = load_checkpoint(FIXTURES / name)
    weights = architecture_of(of_target.config).pack(of_target.config, of_target.tensors)
    target = Transformer(of_target.config, weights, 1, kv="f32")
    with np.load(FIXTURES / "heads" / f"{name}.npz") as file:
        told = dict(file)
    numbers = json.loads(str(told["numbers"]))
    config, tensors, _ = random_head(target.config, **numbers | {"layers": (*numbers["layers"],)}, own_classifier=True)
    weights = EAGLE3.pack(config, {name: told[name] for name in tensors})
    return target, Head(config, weights, target, told["ids"], 1, kv="f32"), told


def assert_near(got, expected):
    """Within 1e-4, of numbers of order 1 to 10: a wrong layer or position is off by order 1."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", TOLD)
def test_features_and_logits_are_those_of_speculators_after_any_rejection(name):
    """Chains of five guesses behind each position, whatever was guessed there before."""
    target, head, told = told_head(name)
    tokens, logits, rng = told["tokens"].tolist(), told["logits"], np.random.default_rng(0)
    n = len(tokens) - 1
    others = np.delete(np.arange(target.config.vocab_size), told["ids"])
    for i in range(n):
        target.forward(tokens[: i + 1])
        wrong = rng.integers(0, target.config.vocab_size, N_GUESSED).tolist()
        head.forward([*tokens[: i + 1 + i % 2], *wrong[i % 4 :]])
        for g in range(min(N_GUESSED + 1, n - i)):
            got = head.forward(tokens[: i + g + 2])[0]
            assert_near(got[told["ids"]], logits[g, i])
            assert (got[others] == -np.inf).all()
    target.forward(tokens)
    assert_near(target.hidden(tokens[:-1], 0), told["states"])
    assert_near(head.forward(tokens, n)[:, told["ids"]], logits[0])
    assert head._take(tokens, 0, n) == n
    assert_near(head._buffers.x[0, :n, : head.config.dim], told["features"])


# Against the oracle: other sizes than speculators can, the target's own embedding or classifier, windows

WINDOW = {"seq_len": 9}
SHAPES = {
    "the target's tables": ("gqa", {}),
    "its classifier": ("gqa", {"own_embedding": True, "norm_before_residual": True, "seq_len": 16}),
    "its embedding": ("head_dim_48", {"n_rows": 41, "fc_norm": "whole", "norm_output": True}),
    "odd": (
        "odd",
        {"n_rows": 50, "dim": 42, "hidden_dim": 33, "n_heads": 3, "n_kv_heads": 1, "own_embedding": True, "fc_norm": "each"},
    ),
    "narrow": (
        "head_dim_12",
        {"n_rows": 17, "dim": 20, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "own_embedding": True, "qk_norm": True} | WINDOW,
    ),
    "biases": (
        "odd",
        {"n_rows": 105, "qkv_bias": True, "wo_bias": True, "mlp_bias": True, "layers": (3, 1), "norm_before_residual": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_oracle_whatever_the_shape_and_beyond_the_window(name):
    of_target, numbers = SHAPES[name]
    target = random_model(CONFIGS[of_target])
    config, tensors, ids = random_head(target.config, **numbers)
    head = Head(config, EAGLE3.pack(config, tensors), target, ids, 1, 80)
    own = random_tensors(CONFIGS[of_target], 0, 0.3)
    tables = {"tok_emb": own["tok_emb"], "wcls": own.get("wcls", own["tok_emb"])}
    tokens, n_true = tokens_for(target.config, 45), 36
    target.forward(tokens[:n_true])
    expected = oracle(config, tables | tensors, target.hidden(tokens, 0), tokens)
    rows = slice(None) if ids is None else ids
    got = head.forward(tokens, 30)[:, rows]
    np.testing.assert_allclose(got, expected[-30:], rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", SHAPES)
def test_weights_of_fewer_bits_say_nearly_the_same_and_the_same_bits_whatever_the_batch(name):
    """Of logits that have nothing in common the error is 1.4; the target's tables are borrowed as they are."""
    of_target, numbers = SHAPES[name]
    target = random_model(CONFIGS[of_target], INT8)
    config, tensors, ids = random_head(target.config, **numbers)
    tokens = tokens_for(target.config, 45)
    exact, *heads = (Head(config, EAGLE3.pack(config, tensors, kind), target, ids, 1, 80) for kind in (FP32, INT8, INT4))
    target.forward(tokens[:40])
    rows = slice(None) if ids is None else ids
    expected = exact.forward(tokens, 44)[:, rows]
    for head, most in zip(heads, (0.1, 0.6), strict=True):
        for table in ("embedding", "classifier")[config.head.own_embedding : 2 - config.head.own_classifier]:
            assert head.weights.matrices[table].strips is target.weights.matrices[table].strips
        alone = np.concatenate([head.forward(tokens[:n])[:, rows].copy() for n in range(2, len(tokens) + 1)])
        np.testing.assert_array_equal(head.forward(tokens, 44)[:, rows], alone)
        assert 0 < np.linalg.norm(alone - expected) / np.linalg.norm(expected) < most


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_weights_of_two_bytes_give_the_bits_of_the_same_numbers_in_four(dtype):
    target = random_model(CONFIGS["gqa"])
    config, tensors, _ = random_head(target.config, own_classifier=True, own_embedding=True)
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    if dtype is np.uint16:  # the bits of bf16
        halves = {name: (tensor.view(np.uint32) >> 16).astype(np.uint16) for name, tensor in tensors.items()}
    heads = [
        Head(config, EAGLE3.pack(config, given), target, kv="f32")
        for given in (halves, {name: floats(tensor) for name, tensor in halves.items()})
    ]
    assert heads[0].weights.kind == {np.float16: "fp16", np.uint16: "bf16"}[dtype]
    tokens = tokens_for(target.config, 30)
    target.forward(tokens[:-5])
    np.testing.assert_array_equal(*(head.forward(tokens, 20) for head in heads))


def test_logits_do_not_depend_on_the_batch_or_the_threads_or_the_order_bit_for_bit():
    config, numbers = CONFIGS["odd"], {"n_rows": 50, "fc_norm": "each", "norm_output": True, "norm_before_residual": True}
    tokens, n_true = tokens_for(config, 78), 70
    target = random_model(config)
    head = head_of(target, **numbers)
    target.forward(tokens[:n_true])
    alone = np.concatenate([head.forward(tokens[:n]).copy() for n in range(2, len(tokens) + 1)])
    for n_threads in THREADS:
        head = head_of(target, n_threads=n_threads, **numbers)
        np.testing.assert_array_equal(head.forward(tokens, 60), alone[-60:])
        np.testing.assert_array_equal(head.forward(tokens, 60), alone[-60:])
        head.n_threads = 1
        head.forward([], 0)
        assert [*head.read(tokens[:50])][-1] == 0 and head.n_held == 49
        np.testing.assert_array_equal(head.forward(tokens[:75], 3), alone[71:74])
        np.testing.assert_array_equal(head.forward(tokens[:9], 8), alone[:8])


@pytest.mark.parametrize("flags", [*itertools.product((False, True), repeat=2)])
def test_no_phase_of_a_head_needs_what_its_thread_made_in_another_one(monkeypatch, flags):
    numbers = dict(zip(("norm_output", "norm_before_residual"), flags, strict=True)) | {"n_rows": 50, "fc_norm": "each"}
    tokens, logits = tokens_for(CONFIGS["odd"], 40), []
    target = random_model(CONFIGS["odd"])
    three_threads(monkeypatch)
    for n_threads in (1, 3):
        head = head_of(target, n_threads=n_threads, **numbers)
        target.forward(tokens[:30])
        with monkeypatch.context() as context:
            if n_threads > 1:
                context.setattr(program, "run_on_threads", scattered(3))
            logits.append([head.forward(tokens[:end], n).copy() for end, n in ((20, 5), (31, 1), (34, 3))])
    for a, b in zip(*logits, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_text_that_outgrows_its_buffers_keeps_its_pairs():
    target = random_model(CONFIGS["odd"], n_positions=700)
    tokens = tokens_for(target.config, 2 * FIRST_POSITIONS + 40)
    numbers = {"n_rows": 50, "fc_norm": "whole", "norm_output": True}
    grown, at_once = head_of(target, **numbers), head_of(target, **numbers)
    for end in (FIRST_POSITIONS - 1, FIRST_POSITIONS + 2, len(tokens) - 3):
        target.forward(tokens[:end])
        grown.forward(tokens[: end + 2])
    np.testing.assert_array_equal(at_once.forward(tokens, 9), grown.forward(tokens, 9))


# The truth and guesses


class Counted:
    """The passes of a head, by their first pair and number of pairs."""

    def __init__(self, head, monkeypatch):
        head.forward([], 0)
        runner, self.passes = head._runner, []

        def run(n, pos, *others):
            self.passes.append((pos, n))
            runner(n, pos, *others)

        monkeypatch.setattr(head, "_runner", run)

    def new(self):
        passes, self.passes = self.passes, []
        return passes


def test_a_pair_runs_once_with_a_guess_and_once_with_the_truth_and_no_text_borrows_another_s(monkeypatch):
    target = random_model(CONFIGS["gqa"])
    head, tokens = head_of(target), tokens_for(target.config, 90)
    passes = Counted(head, monkeypatch)
    assert not head.drafts_for(tokens[:1]) and not head.drafts_for(tokens[:11])
    target.forward(tokens[:10])
    assert head.drafts_for(tokens[:11]) and not head.drafts_for(tokens[:12]) and not head.drafts_for(tokens[:1])
    for n in (11, 12, 13):
        head.forward(tokens[:n])
    assert passes.new() == [(0, 10), (10, 1), (11, 1)]
    head.forward(tokens[:13])
    assert passes.new() == [(11, 1)]  # its logits may be gone
    other = [*tokens[:11], 500, *tokens[12:]]
    head.forward(other[:13])
    assert passes.new() == [(10, 1), (11, 1)]
    assert not head.drafts_for(tokens[:13])
    target.forward(tokens[:12])
    assert head.drafts_for(tokens[:13])
    head.forward(tokens[:14])
    assert passes.new() == [(10, 2), (12, 1)]
    target.forward(other[:40])  # another text: the truth of ten pairs is that of both, and that of two more this one's
    assert head.drafts_for(tokens[:12]) and head.drafts_for(other[:41])
    assert not head.drafts_for(tokens[:13])  # that ran with the truth, which is gone: what tells its logits has to run again
    head.forward(tokens[:40], n_logits=0)
    assert passes.new() == [] and head.n_held == 14
    head.forward(other[:41])
    assert passes.new() == [(10, 30)]
    with pytest.raises(ValueError, match=r"^the target holds no hidden states of the text; 49 of 49 pairs would be guesses$"):
        head.forward([3, *tokens[:49]])
    target.forward(tokens)
    assert head.unread(tokens) == 88 and [*head.read(tokens)][-1] == 0 and head.unread(tokens) == 0
    assert [pair for first, n in passes.new() for pair in range(first, first + n)] == [*range(88)]


def test_a_head_follows_its_target_s_tree_and_more_text_than_a_pass_holds():
    target, alone = random_model(CONFIGS["gqa"]), random_model(CONFIGS["gqa"])
    tokens = tokens_for(target.config, 96)
    assert len(tokens) > MAX_TOKENS
    alone_head, head = head_of(alone), head_of(target)
    alone.forward(tokens[:-1])
    expected = alone_head.forward(tokens, 5)
    target.forward_tree(tokens[:91], [5, tokens[91], 7, *tokens[92:94], 9, tokens[94]], [-1, -1, 0, 1, 3, 4, 4])
    assert head.drafts_for(tokens)
    np.testing.assert_array_equal(head.forward(tokens, 5), expected)


def test_a_pass_that_was_broken_off_leaves_nothing_that_is_taken_for_the_truth():
    target = random_model(CONFIGS["gqa"])
    head, tokens = head_of(target), tokens_for(target.config, 90)
    target.forward(tokens[:89])
    expected = head.forward(tokens, 64).copy()
    head.forward(tokens[:30])
    for broken in ("_runner", "_take"):
        with broken_off(head, broken):
            head.forward([*tokens[:20], *tokens[:30]])
        np.testing.assert_array_equal(head.forward(tokens, 64), expected)


def test_a_signal_handler_that_runs_the_target_changes_no_logits(monkeypatch):
    """At the worst moment: between the look at the target's states and their copy."""
    target = random_model(CONFIGS["gqa"])
    head, tokens = head_of(target), tokens_for(target.config, 60)
    target.forward(tokens[:59])
    expected = head.forward(tokens, 20).copy()
    head.forward([], 0)
    hidden, interrupts = target.hidden, [tokens[:59], tokens_for(target.config, 70, seed=2)]

    def interrupted(*arguments):
        states = hidden(*arguments)
        if interrupts:
            target.forward(interrupts.pop())  # writes where states are: first another text, then this one again
        return states

    monkeypatch.setattr(target, "hidden", interrupted)
    np.testing.assert_array_equal(head.forward(tokens, 20), expected)
    assert not interrupts


def test_threads_that_take_turns_get_the_logits_of_their_own_texts():
    target = random_model(CONFIGS["gqa"])
    head = head_of(target)
    texts = [tokens_for(target.config, 40, seed) for seed in range(3)]
    expected = []
    for text in texts:
        target.forward(text[:-3])
        expected.append(head.forward(text, 10).copy())
    wrong = []

    def work(i):
        for _ in range(20):
            with head.lock, target.lock:
                target.forward(texts[i][:-3])
                if not np.array_equal(head.forward(texts[i], 10), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_pickled_head_has_the_target_that_was_pickled_with_it():
    target = random_model(CONFIGS["head_dim_48"])
    head, tokens = head_of(target, n_rows=41), tokens_for(target.config, 30)
    target.forward(tokens[:29])
    expected = head.forward(tokens, 10).copy()
    twin_target, twin = pickle.loads(pickle.dumps((target, head)))
    assert twin.target is twin_target and copy.copy(head).target is target
    assert twin.weights.matrices["embedding"].strips is twin_target.weights.matrices["embedding"].strips
    assert not twin.drafts_for(tokens)
    twin_target.forward(tokens[:29])
    np.testing.assert_array_equal(twin.forward(tokens, 10), expected)
    np.testing.assert_array_equal(twin.target_ids, head.target_ids)
    assert (twin.n_positions, twin.kv, twin.config) == (head.n_positions, head.kv, head.config)


# What is refused


def test_what_is_no_head_of_the_target_is_refused():
    target = random_model(CONFIGS["gqa"])
    config, tensors, ids = random_head(target.config, n_rows=50)
    weights = EAGLE3.pack(config, tensors)

    def refused(match, config=config, weights=weights, target=target, ids=ids):
        with pytest.raises(ValueError, match=match):
            Head(config, weights, target, ids)

    refused("^a llama model is no head$", target.config, target.weights)
    odd = random_model(CONFIGS["odd"])
    refused("^a head for a target of width 64 and 512 tokens does not fit one of 40 and 105$", target=odd)
    for wrong in (ids[:-1], np.append(ids[:-1], ids[0]), np.append(ids[:-1], 512), np.append(ids[:-1], -1)):
        refused("^target_ids are not 50 different ids of 0 to 511$", ids=wrong)
    refused("classifier", weights=EAGLE3.pack(*random_head(target.config)[:2]))
    head = Head(config, weights, target, ids)
    other, tensors, _ = random_head(target.config, layers=(0, 1))
    keeps = r"^the target keeps the hidden states before layers \(0, 1, 2\), not \(0, 1\)$"
    refused(keeps, other, EAGLE3.pack(other, tensors), ids=None)
    for n in (0, 1):
        with pytest.raises(ValueError, match=f"^n_logits is {n + 1}; |n_logits is 1"):
            head.forward([5] * n, 1)
    target.forward([5, 6])
    with pytest.raises(ValueError, match=r"^tokens hold 512; expected 0 to 511$"):
        head.forward([5, 6, 512])
    with pytest.raises(ValueError, match="runs no trees"):
        head.forward_tree([5, 6], [7], [-1])


FLAWS = {
    "target_dim is 0": {"target_dim": 0},
    "n_rows is 0": {"n_rows": 0},
    "n_rows is 106": {"n_rows": 106},
    "has target_dim, 40": {"dim": 48, "own_classifier": False},
    "the target's classifier has 105": {"n_rows": 50, "own_classifier": False},
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_numbers_that_are_no_head_are_told(flaw):
    numbers = {"target_dim": 40, "layers": (0, 1, 2), "n_rows": 105, "own_embedding": False, "own_classifier": True} | FLAWS[flaw]
    dim = numbers.pop("dim", 40)
    assert flaw in Config(dim, 50, 1, 4, 1, 105, 80, architecture="eagle3", head=HeadConfig(**numbers)).flaw()


def test_a_head_and_nothing_else_has_a_head_s_numbers():
    head = HeadConfig(40, (), 105, False, False)
    assert "expected both" in Config(40, 50, 1, 5, 1, 105, 80, architecture="eagle3").flaw()
    assert "expected both" in Config(40, 50, 1, 5, 1, 105, 80, head=head).flaw()
    assert (head.n_states, head.layers_of(30)) == (3, (2, 15, 27))


def test_a_target_that_scales_its_residuals_gives_the_stream_that_heads_are_trained_on():
    config = replace(CONFIGS["gqa"], residual_scale=0.22, embedding_scale=12.0)
    target, tokens = random_model(config), tokens_for(config, 20)
    head = head_of(target)
    target.forward(tokens)
    head._take(tokens, 0, 19)
    embeddings = np.float32(12) * random_tensors(config, 0, 0.3)["tok_emb"][tokens[:19]]
    np.testing.assert_allclose(head._buffers.taps[0, :19, : config.dim], embeddings, rtol=1e-6)
