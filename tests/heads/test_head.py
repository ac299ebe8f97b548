"""Heads as models: the hidden states they read, their passes, and the pairs that they run again when the target has states."""

import copy
import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from specdec.head_config import HeadConfig
from specdec.heads.eagle3 import EAGLE3
from specdec.heads.head import Head
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.loaders import load_checkpoint
from specdec.model import get_architecture
from specdec.model.kv_cache import INITIAL_CAPACITY
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import FP32, INT4, INT8
from specdec.runtime import op_program
from tests.tools.cache_contents import get_buffers
from tests.tools.checkpoint_files import random_tensors
from tests.tools.half_precision import to_half, widen_tensors
from tests.tools.hf_folders import FIXTURES
from tests.tools.random_heads import compute_oracle_logits, make_head, new_head_cache, random_head
from tests.tools.random_models import (
    CONFIGS,
    THREAD_COUNTS,
    fake_three_threads,
    interrupt_after,
    random_model,
    random_tokens,
    scatter_phases,
)

N_GUESSED = 5
REFERENCE = sorted(path.stem for path in FIXTURES.glob("heads/*.npz"))


def load_reference_head(name):
    """Return a target cache of the fixtures, its head's, and speculators' results for it; see make_heads.py."""
    target_numbers = load_checkpoint(FIXTURES / name)
    weights = get_architecture(target_numbers.config).plan_weights(target_numbers.config, target_numbers.tensors).pack()
    target = Model(target_numbers.config, weights, 1, kv="f32")
    with np.load(FIXTURES / "heads" / f"{name}.npz") as file:
        reference = dict(file)
    numbers = json.loads(str(reference["numbers"]))
    numbers |= {"draft_vocab_size": numbers.pop("n_rows"), "target_layers": (*numbers.pop("layers"),)}
    config, tensors, _ = random_head(target.config, **numbers, own_classifier=True)
    weights = EAGLE3.plan_weights(config, {name: reference[name] for name in tensors}).pack()
    head = new_head_cache(Head(config, weights, target, reference["ids"], 1, kv="f32"))
    return head.target_cache, head, reference


def assert_near(got, expected):
    """Check equality within 1e-4, for numbers of order 1 to 10: a wrong layer or position gives an error of order 1."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", REFERENCE)
def test_features_and_logits_equal_those_of_speculators_after_any_rejection(name):
    """Chains of five draft tokens after each position, whatever was drafted there before."""
    target, head, reference = load_reference_head(name)
    tokens, logits, rng = reference["tokens"].tolist(), reference["logits"], np.random.default_rng(0)
    n = len(tokens) - 1
    others = np.delete(np.arange(target.model.vocab_size), reference["ids"])
    for i in range(n):
        target.forward(tokens[: i + 1])
        bad = rng.integers(0, target.model.vocab_size, N_GUESSED).tolist()
        head.forward([*tokens[: i + 1 + i % 2], *bad[i % 4 :]])
        for g in range(min(N_GUESSED + 1, n - i)):
            got = head.forward(tokens[: i + g + 2])[0]
            assert_near(got[reference["ids"]], logits[g, i])
            assert (got[others] == -np.inf).all()
    target.forward(tokens)
    assert_near(target.get_hidden_states(tokens[:-1], 0), reference["states"])
    assert_near(head.forward(tokens, n)[:, reference["ids"]], logits[0])
    assert head.compute_features(tokens, 0, n) == n
    assert_near(get_buffers(head).x[0, :n, : head.model.config.dim], reference["features"])


# Compared with the oracle: sizes that speculators does not support, the target's embedding or classifier, windows

WINDOW = {"seq_len": 9}
SHAPES = {
    "the target's tables": ("gqa", {}),
    "its classifier": ("gqa", {"own_embedding": True, "norm_before_residual": True, "seq_len": 16}),
    "its embedding": ("head_dim_48", {"draft_vocab_size": 41, "fc_norm": "whole", "norm_output": True}),
    "odd": (
        "odd",
        {"draft_vocab_size": 50, "dim": 42, "hidden_dim": 33, "n_heads": 3, "n_kv_heads": 1, "own_embedding": True,
         "fc_norm": "each"},
    ),
    "narrow": (
        "head_dim_12",
        {"draft_vocab_size": 17, "dim": 20, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "own_embedding": True,
         "qk_norm": True} | WINDOW,
    ),
    "biases": (
        "odd",
        {"draft_vocab_size": 105, "qkv_bias": True, "wo_bias": True, "mlp_bias": True, "target_layers": (3, 1),
         "norm_before_residual": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_the_oracles_for_each_shape_and_beyond_the_window(name):
    target_numbers, numbers = SHAPES[name]
    model = random_model(CONFIGS[target_numbers])
    config, tensors, ids = random_head(model.config, **numbers)
    head = new_head_cache(Head(config, EAGLE3.plan_weights(config, tensors).pack(), model, ids, 1, 80))
    target = head.target_cache
    head_parts = random_tensors(CONFIGS[target_numbers], 0, 0.3)
    tables = {"tok_emb": head_parts["tok_emb"], "wcls": head_parts.get("wcls", head_parts["tok_emb"])}
    tokens, n_true = random_tokens(model.config, 45), 36
    target.forward(tokens[:n_true])
    expected = compute_oracle_logits(config, tables | tensors, target.get_hidden_states(tokens, 0), tokens)
    rows = slice(None) if ids is None else ids
    got = head.forward(tokens, 30)[:, rows]
    np.testing.assert_allclose(got, expected[-30:], rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", SHAPES)
def test_quantized_weights_give_similar_logits_that_do_not_depend_on_the_batch(name):
    """Unrelated logits differ by 1.4; the target's tables are borrowed as they are."""
    target_numbers, numbers = SHAPES[name]
    model = random_model(CONFIGS[target_numbers], INT8)
    config, tensors, ids = random_head(model.config, **numbers)
    tokens = random_tokens(model.config, 45)
    exact, *heads = (
        new_head_cache(Head(config, EAGLE3.plan_weights(config, tensors, weight_format).pack(), model, ids, 1, 80))
        for weight_format in (FP32, INT8, INT4)
    )
    for head in (exact, *heads):
        head.target_cache.forward(tokens[:40])
    rows = slice(None) if ids is None else ids
    expected = exact.forward(tokens, 44)[:, rows]
    for head, most in zip(heads, (0.1, 0.6), strict=True):
        for table in ("embedding", "classifier")[config.head.own_embedding : 2 - config.head.own_classifier]:
            assert head.model.weights.matrices[table].panels is model.weights.matrices[table].panels
        alone = np.concatenate([head.forward(tokens[:n])[:, rows].copy() for n in range(2, len(tokens) + 1)])
        np.testing.assert_array_equal(head.forward(tokens, 44)[:, rows], alone)
        assert 0 < np.linalg.norm(alone - expected) / np.linalg.norm(expected) < most


@pytest.mark.parametrize("weight_format", ["fp16", "bf16"])
def test_16_bit_weights_give_the_same_logits_as_their_values_in_fp32(weight_format):
    target = random_model(CONFIGS["gqa"])
    config, tensors, _ = random_head(target.config, own_classifier=True, own_embedding=True)
    halves = {name: to_half(tensor, weight_format) for name, tensor in tensors.items()}
    heads = [
        new_head_cache(Head(config, EAGLE3.plan_weights(config, given).pack(), target, kv="f32"))
        for given in (halves, widen_tensors(halves))
    ]
    assert heads[0].model.weights.format_names == weight_format
    tokens = random_tokens(target.config, 30)
    for head in heads:
        head.target_cache.forward(tokens[:-5])
    np.testing.assert_array_equal(*(head.forward(tokens, 20) for head in heads))


def test_logits_do_not_depend_on_batch_threads_or_order():
    config, numbers = (
        CONFIGS["odd"],
        {"draft_vocab_size": 50, "fc_norm": "each", "norm_output": True, "norm_before_residual": True},
    )
    tokens, n_true = random_tokens(config, 78), 70
    model = random_model(config)
    head = new_head_cache(make_head(model, **numbers))
    head.target_cache.forward(tokens[:n_true])
    alone = np.concatenate([head.forward(tokens[:n]).copy() for n in range(2, len(tokens) + 1)])
    for n_threads in THREAD_COUNTS:
        head = new_head_cache(make_head(model, n_threads=n_threads, **numbers), head.target_cache)
        np.testing.assert_array_equal(head.forward(tokens, 60), alone[-60:])
        np.testing.assert_array_equal(head.forward(tokens, 60), alone[-60:])
        head.model.n_threads = 1
        head.forward([], 0)
        head.forward(tokens[:49], 0)
        assert head.count_prefill_tokens(tokens[:50]) == 0 and head.n_tokens == 49
        np.testing.assert_array_equal(head.forward(tokens[:75], 3), alone[71:74])
        np.testing.assert_array_equal(head.forward(tokens[:9], 8), alone[:8])


@pytest.mark.parametrize("flags", [*itertools.product((False, True), repeat=2)])
def test_phases_do_not_depend_on_thread_assignment(monkeypatch, flags):
    numbers = dict(zip(("norm_output", "norm_before_residual"), flags, strict=True)) | {"draft_vocab_size": 50, "fc_norm": "each"}
    tokens, logits = random_tokens(CONFIGS["odd"], 40), []
    target = random_model(CONFIGS["odd"])
    fake_three_threads(monkeypatch)
    for n_threads in (1, 3):
        head = new_head_cache(make_head(target, n_threads=n_threads, **numbers))
        head.target_cache.forward(tokens[:30])
        with monkeypatch.context() as context:
            if n_threads > 1:
                context.setattr(op_program, "run_on_threads", scatter_phases(3))
            logits.append([head.forward(tokens[:end], n).copy() for end, n in ((20, 5), (31, 1), (34, 3))])
    for a, b in zip(*logits, strict=True):
        np.testing.assert_array_equal(a, b)


def test_pairs_are_kept_when_buffers_grow():
    model = random_model(CONFIGS["odd"], n_positions=700)
    tokens = random_tokens(model.config, 2 * INITIAL_CAPACITY + 40)
    numbers = {"draft_vocab_size": 50, "fc_norm": "whole", "norm_output": True}
    grown = new_head_cache(make_head(model, **numbers))
    target, at_once = grown.target_cache, new_head_cache(make_head(model, **numbers), grown.target_cache)
    for end in (INITIAL_CAPACITY - 1, INITIAL_CAPACITY + 2, len(tokens) - 3):
        target.forward(tokens[:end])
        grown.forward(tokens[: end + 2])
    np.testing.assert_array_equal(at_once.forward(tokens, 9), grown.forward(tokens, 9))


# Pairs with and without states of the target


def make_caches(config):
    """Return a cache of a random target, and a cache of a random head over it."""
    head = new_head_cache(make_head(random_model(config)))
    return head.target_cache, head


class PassRecorder:
    """Records the passes of a head, by their first pair and number of pairs."""

    def __init__(self, head, monkeypatch):
        head.forward([], 0)
        runner, self.passes = head.executor, []

        def run(n, pos, *others):
            self.passes.append((pos, n))
            runner(n, pos, *others)

        monkeypatch.setattr(head, "executor", run)

    def new(self):
        passes, self.passes = self.passes, []
        return passes


def test_a_pair_runs_once_without_and_once_with_target_states_of_its_own_sequence(monkeypatch):
    target, head = make_caches(CONFIGS["gqa"])
    tokens = random_tokens(CONFIGS["gqa"], 90)
    passes = PassRecorder(head, monkeypatch)
    assert not head.can_draft(tokens[:1]) and not head.can_draft(tokens[:11])
    target.forward(tokens[:10])
    assert head.can_draft(tokens[:11]) and not head.can_draft(tokens[:12]) and not head.can_draft(tokens[:1])
    for n in (11, 12, 13):
        head.forward(tokens[:n])
    assert passes.new() == [(0, 10), (10, 1), (11, 1)]
    head.forward(tokens[:13])
    assert passes.new() == [(11, 1)]  # its logits may be gone
    other = [*tokens[:11], 500, *tokens[12:]]
    head.forward(other[:13])
    assert passes.new() == [(10, 1), (11, 1)]
    assert not head.can_draft(tokens[:13])
    target.forward(tokens[:12])
    assert head.can_draft(tokens[:13])
    head.forward(tokens[:14])
    assert passes.new() == [(10, 2), (12, 1)]
    target.forward(other[:40])  # another sequence: the states of ten pairs belong to both, those of two more to this one
    assert head.can_draft(tokens[:12]) and head.can_draft(other[:41])
    assert not head.can_draft(tokens[:13])  # the pair ran with states that are gone, and must run again for its logits
    head.forward(tokens[:40], n_logits=0)
    assert passes.new() == [] and head.n_tokens == 14
    head.forward(other[:41])
    assert passes.new() == [(10, 30)]
    with pytest.raises(
        ValueError, match=r"^the target holds no hidden states of the sequence; 49 of 49 pairs would run without$"
    ):
        head.forward([3, *tokens[:49]])
    target.forward(tokens)
    assert head.count_prefill_tokens(tokens) == 88
    head.forward(tokens[:-1], 0)
    assert head.count_prefill_tokens(tokens) == 0
    assert [pair for first, n in passes.new() for pair in range(first, first + n)] == [*range(88)]


def test_a_head_follows_a_tree_of_its_target_and_more_tokens_than_a_pass():
    (target, head), (alone, alone_head) = make_caches(CONFIGS["gqa"]), make_caches(CONFIGS["gqa"])
    tokens = random_tokens(CONFIGS["gqa"], 96)
    assert len(tokens) > MAX_BATCH_TOKENS
    alone.forward(tokens[:-1])
    expected = alone_head.forward(tokens, 5)
    target.forward_tree(tokens[:91], [5, tokens[91], 7, *tokens[92:94], 9, tokens[94]], [-1, -1, 0, 1, 3, 4, 4])
    assert head.can_draft(tokens)
    np.testing.assert_array_equal(head.forward(tokens, 5), expected)


def test_an_interrupted_pass_leaves_no_wrong_pairs():
    target, head = make_caches(CONFIGS["gqa"])
    tokens = random_tokens(CONFIGS["gqa"], 90)
    target.forward(tokens[:89])
    expected = head.forward(tokens, 64).copy()
    head.forward(tokens[:30])
    for broken in ("executor", "compute_features"):
        with interrupt_after(head, broken):
            head.forward([*tokens[:20], *tokens[:30]])
        np.testing.assert_array_equal(head.forward(tokens, 64), expected)


def test_a_target_pass_in_a_signal_handler_changes_no_logits(monkeypatch):
    """At the worst moment, between the lookup of the target's states and their copy."""
    target, head = make_caches(CONFIGS["gqa"])
    tokens = random_tokens(CONFIGS["gqa"], 60)
    target.forward(tokens[:59])
    expected = head.forward(tokens, 20).copy()
    head.forward([], 0)
    hidden, interrupts = target.get_hidden_states, [tokens[:59], random_tokens(CONFIGS["gqa"], 70, seed=2)]

    def interrupted(*arguments):
        states = hidden(*arguments)
        if interrupts:
            target.forward(interrupts.pop())  # overwrites the states: first with another sequence, then with this one again
        return states

    monkeypatch.setattr(target, "get_hidden_states", interrupted)
    np.testing.assert_array_equal(head.forward(tokens, 20), expected)
    assert not interrupts


def test_a_pickled_head_keeps_its_target():
    target = random_model(CONFIGS["head_dim_48"])
    head, tokens = make_head(target, draft_vocab_size=41), random_tokens(target.config, 30)
    cache = new_head_cache(head)
    cache.target_cache.forward(tokens[:29])
    expected = cache.forward(tokens, 10).copy()
    twin_target, twin = pickle.loads(pickle.dumps((target, head)))
    assert twin.target is twin_target and copy.copy(head).target is target
    assert twin.weights.matrices["embedding"].panels is twin_target.weights.matrices["embedding"].panels
    cache = new_head_cache(twin)
    assert not cache.can_draft(tokens)
    cache.target_cache.forward(tokens[:29])
    np.testing.assert_array_equal(cache.forward(tokens, 10), expected)
    np.testing.assert_array_equal(twin.target_ids, head.target_ids)
    assert (twin.n_positions, twin.kv, twin.config) == (head.n_positions, head.kv, head.config)


# Refused arguments


def test_a_head_that_does_not_fit_the_target_is_refused():
    target = random_model(CONFIGS["gqa"])
    config, tensors, ids = random_head(target.config, draft_vocab_size=50)
    weights = EAGLE3.plan_weights(config, tensors).pack()

    def refused(match, config=config, weights=weights, target=target, ids=ids):
        with pytest.raises(ValueError, match=match):
            Head(config, weights, target, ids)

    refused("^a llama model is not a head$", target.config, target.weights)
    other_target = random_model(CONFIGS["odd"])
    refused("^a head for a target of width 64 and 512 tokens does not fit one of 40 and 105$", target=other_target)
    for bad_ids in (ids[:-1], np.append(ids[:-1], ids[0]), np.append(ids[:-1], 512), np.append(ids[:-1], -1)):
        refused("^target_ids must be 50 different ids from 0 to 511$", ids=bad_ids)
    refused("classifier", weights=EAGLE3.plan_weights(*random_head(target.config)[:2]).pack())
    message = r"^the head needs a cache of its target with the hidden states before layers \(0, 1, 2\)$"
    for cache in (target.new_cache((0, 1)), target.new_cache(), random_model(CONFIGS["gqa"]).new_cache((0, 1, 2))):
        with pytest.raises(ValueError, match=message):
            Head(config, weights, target, ids).new_draft_cache(cache)
    head = new_head_cache(Head(config, weights, target, ids))
    for n in (0, 1):
        with pytest.raises(ValueError, match=f"^n_logits is {n + 1}; |n_logits is 1"):
            head.forward([5] * n, 1)
    head.target_cache.forward([5, 6])
    with pytest.raises(ValueError, match=r"^tokens hold 512; expected 0 to 511$"):
        head.forward([5, 6, 512])
    with pytest.raises(ValueError, match="token trees are not supported"):
        head.forward_tree([5, 6], [7], [-1])


ERRORS = {
    "target_dim is 0": {"target_dim": 0},
    "draft_vocab_size is 0": {"draft_vocab_size": 0},
    "draft_vocab_size is 106": {"draft_vocab_size": 106},
    "expected target_dim, 40": {"dim": 48, "own_classifier": False},
    "the target's classifier has 105": {"draft_vocab_size": 50, "own_classifier": False},
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_head_configurations_are_reported(message):
    numbers = {
        "target_dim": 40,
        "target_layers": (0, 1, 2),
        "draft_vocab_size": 105,
        "own_embedding": False,
        "own_classifier": True,
    } | ERRORS[message]
    dim = numbers.pop("dim", 40)
    assert message in ModelConfig(dim, 50, 1, 4, 1, 105, 80, architecture="eagle3", head=HeadConfig(**numbers)).find_error()


def test_only_a_head_has_a_head_configuration():
    head = HeadConfig(40, (), 105, False, False)
    assert "expected head for draft heads only" in ModelConfig(40, 50, 1, 5, 1, 105, 80, architecture="eagle3").find_error()
    assert "expected head for draft heads only" in ModelConfig(40, 50, 1, 5, 1, 105, 80, head=head).find_error()
    assert (head.n_target_states, head.get_target_layers(30)) == (3, (2, 15, 27))


def test_features_use_the_unscaled_residual_stream_of_a_target_that_scales_it():
    config = replace(CONFIGS["gqa"], residual_scale=0.22, embedding_scale=12.0)
    target, head = make_caches(config)
    tokens = random_tokens(config, 20)
    target.forward(tokens)
    head.compute_features(tokens, 0, 19)
    embeddings = np.float32(12) * random_tensors(config, 0, 0.3)["tok_emb"][tokens[:19]]
    np.testing.assert_allclose(get_buffers(head).taps[0, :19, : config.dim], embeddings, rtol=1e-6)
