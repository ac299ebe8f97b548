"""Token trees: a node's logits are bit-identical to those of its path, however the tree was run and committed."""

import itertools
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model import get_architecture
from specdec.model.kv_cache import INITIAL_CAPACITY, KVCache
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import BF16, FP32, INT8, WeightFormat
from specdec.runtime.simd import Float32
from tests.tools.configs import make_config, replace_config
from tests.tools.family_models import FAMILIES, POISON, make_cache, random_tensors
from tests.tools.half_precision import assert_same_bits, to_half
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, get_path, random_cache, random_tokens

# head_dims of 2 to 128, heads that share keys, windows, norms of heads, learned positions
ALL = (
    FAMILIES
    | CONFIGS
    | {"head_dim 2": make_config(14, 20, 2, 7, 1, 105, 400), "many heads": make_config(96, 40, 1, 24, 1, 105, 400)}
)
SHAPES = {name: config for name, config in ALL.items() if not any(each.mixer for each in config.layers)}


def random_parents(n: int, seed: int) -> list[int]:
    """Return a tree of n nodes; node 0 follows the sequence, and others may."""
    rng = np.random.default_rng(seed)
    return [int(rng.integers(-1, node)) if node else -1 for node in range(n)]


def make_star(n: int) -> list[int]:
    return [-1] * n


def make_chain(n: int) -> list[int]:
    return [*range(-1, n - 1)]


def make_comb(n: int) -> list[int]:
    """Return a chain whose nodes each have a sibling."""
    return [-1, *(node // 2 * 2 for node in range(n - 1))]


def compute_chain_logits(cache: KVCache, tokens: list[int], nodes: list[int], parents: list[int]) -> Float32:
    """Return the logits at the last token and at each node, each run as a chain."""
    paths = [[], *(get_path(node, parents) for node in range(len(nodes)))]
    return np.concatenate([cache.forward(tokens + [nodes[node] for node in path]).copy() for path in paths])


def bf16_cache(config: ModelConfig, n_threads: int = 1) -> KVCache:
    tensors = {name: to_half(tensor, "bf16") for name, tensor in random_tensors(config).items()}
    return Model(config, get_architecture(config).plan_weights(config, tensors).pack(), n_threads).new_cache()


@pytest.mark.parametrize(
    ("name", "weight_format"),
    [*((name, FP32) for name in SHAPES), *((name, INT8) for name in SHAPES), ("gqa", BF16), ("gpt2", BF16)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_node_logits_equal_logits_of_its_path(name: str, weight_format: WeightFormat) -> None:
    """Trees of every shape, behind sequences of lengths around a vector, a panel and a pass."""
    config = replace(SHAPES[name], seq_len=400)
    chains, *trees = (
        bf16_cache(config, n) if weight_format is BF16 else make_cache(config, n, weight_format) for n in (1, *THREAD_COUNTS)
    )
    shapes = [(1, make_star), (9, make_chain), (8, make_star), (7, make_comb), (30, lambda n: random_parents(n, 7))]
    for n, (n_nodes, parents_of) in zip((1, 15, 16, 31, 33), shapes, strict=True):
        tokens, nodes, parents = random_tokens(config, n), random_tokens(config, n_nodes, n), parents_of(n_nodes)
        expected = compute_chain_logits(chains, tokens, nodes, parents)
        for cache in trees:
            assert_same_bits(cache.forward_tree(tokens, nodes, parents), expected)


@pytest.mark.parametrize(("name", "window"), [*(("mistral", window) for window in (1, 2, 5, 16, 33)), ("gemma", 5)])
def test_window_counts_positions_not_slots(name: str, window: int) -> None:
    """Also for windows shorter than the depth of the tree."""
    config = replace_config(FAMILIES[name], window=window)
    for n, parents in itertools.product((1, 17, 40), (make_chain(20), make_comb(30), random_parents(50, window), make_star(10))):
        tokens, nodes = random_tokens(config, n), random_tokens(config, len(parents), 5)
        expected = compute_chain_logits(make_cache(config), tokens, nodes, parents)
        assert_same_bits(make_cache(config, max(THREAD_COUNTS)).forward_tree(tokens, nodes, parents), expected)


@pytest.mark.parametrize("name", ["gqa", "mistral", "gpt2"])
@pytest.mark.parametrize("n", [INITIAL_CAPACITY - 64, INITIAL_CAPACITY - 3, INITIAL_CAPACITY, INITIAL_CAPACITY + 1])
def test_tree_can_outgrow_buffers(name: str, n: int) -> None:
    config = replace(SHAPES[name], seq_len=1000)
    tokens, nodes, parents = random_tokens(config, n), random_tokens(config, 63, 5), random_parents(63, n)
    expected = compute_chain_logits(make_cache(config), tokens, nodes, parents)
    cache = make_cache(config)
    cache.forward(tokens)
    for end in (2, 10, 40, 63):  # level by level: rows of nodes move to the larger buffers
        got = cache.forward_tree(tokens, nodes[:end], parents[:end], end).copy()
        assert_same_bits(got, expected[1 : end + 1])


@pytest.mark.parametrize("name", ["odd", "gpt2", "everything"])
def test_tree_can_use_last_position(name: str) -> None:
    """Siblings share it: they need slots, but no positions."""
    config = replace(SHAPES[name], seq_len=40)
    tokens, nodes = random_tokens(config, 38), random_tokens(config, 63, 5)
    parents = [-1] * 30 + [*range(30)] + [0, 1, 2]
    expected = compute_chain_logits(make_cache(config), tokens, nodes, parents)
    cache = make_cache(config)
    assert_same_bits(cache.forward_tree(tokens, nodes, parents), expected)
    with pytest.raises(ValueError, match="39 tokens and a tree of depth 2 do not fit 40 positions"):
        cache.forward_tree([*tokens, nodes[0]], nodes, parents)
    assert_same_bits(cache.forward([*tokens, nodes[0], nodes[30]]), expected[31:32])


def count_tokens(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tokens of each pass from now on."""
    counts: list[int] = []
    executor = cache.executor

    def run(n_tokens: int, *rest: int) -> None:
        counts.append(n_tokens)
        executor(n_tokens, *rest)

    monkeypatch.setattr(cache, "executor", run)
    return counts


@pytest.mark.parametrize("name", ["gqa", "gpt2", "mistral"])
def test_growing_tree_runs_only_new_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES[name]
    tokens, nodes, parents = random_tokens(config, 45), random_tokens(config, 40, 5), random_parents(40, 3)
    at_once = make_cache(config).forward_tree(tokens, nodes, parents).copy()
    assert_same_bits(at_once, compute_chain_logits(make_cache(config), tokens, nodes, parents))
    cache = make_cache(config)
    counts = count_tokens(cache, monkeypatch)
    assert_same_bits(cache.forward(tokens), at_once[:1])
    for begin, end in itertools.pairwise((0, 1, 4, 5, 20, 40)):
        got = cache.forward_tree(tokens, nodes[:end], parents[:end], end - begin)
        assert_same_bits(got, at_once[begin + 1 : end + 1])
    assert counts == [45, 1, 3, 1, 15, 20]
    del counts[:]
    assert cache.forward_tree(tokens, nodes, parents, 0).shape == (0, config.vocab_size)
    assert_same_bits(cache.forward_tree(tokens, nodes, parents, 7), at_once[-7:])
    other = [*nodes[:10], (nodes[10] + 1) % config.vocab_size, *nodes[11:]]
    cache.forward_tree(tokens, other, parents, 1)
    assert_same_bits(cache.forward_tree(tokens, nodes, parents), at_once)
    assert_same_bits(
        cache.forward_tree(tokens[:20], nodes, parents, 1), make_cache(config).forward_tree(tokens[:20], nodes, parents, 1)
    )
    assert_same_bits(cache.forward_tree(tokens, nodes, parents, 1), at_once[-1:])
    assert counts == [7, 30, 41, 40, 1, 64]


def test_long_sequence_runs_in_chunks_with_tree_in_the_last() -> None:
    config = FAMILIES["qwen2"]
    nodes, parents = random_tokens(config, 63, 5), random_parents(63, 4)
    for n in (2, 64, 65, 150):
        tokens = random_tokens(config, n)
        expected = compute_chain_logits(make_cache(config), tokens, nodes, parents)
        assert_same_bits(make_cache(config, max(THREAD_COUNTS)).forward_tree(tokens, nodes, parents), expected)


# Committed paths


@pytest.mark.parametrize("is_explicit", [True, False], ids=["explicit", "found"])
@pytest.mark.parametrize("name", SHAPES)
def test_committed_path_becomes_part_of_sequence(name: str, is_explicit: bool, monkeypatch) -> None:
    """Committed explicitly, or found when the sequence continues that way."""
    config = replace(SHAPES[name], seq_len=400)
    cache, tokens, parents = make_cache(config, max(THREAD_COUNTS)), random_tokens(config, 29), random_parents(40, 11)
    cache.forward(tokens)
    counts = count_tokens(cache, monkeypatch)
    for round in range(6):
        nodes = random_tokens(config, 40, 100 + round)
        cache.forward_tree(tokens, nodes, parents)
        path = get_path([39, 0, 25, 30, 38, 12][round], parents)
        if is_explicit:
            cache.commit_path(path)
            assert cache.n_tokens == len(tokens) + len(path)
        tokens = [*tokens, *(nodes[node] for node in path), 5 + round]
        del counts[:]
        assert_same_bits(cache.forward(tokens), make_cache(config).forward(tokens))
        assert counts == [1]
        assert cache.n_tokens == len(tokens)


def test_uncommitted_nodes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["gqa"]
    cache, fresh = random_cache(config), random_cache(config)
    tokens, nodes, parents = random_tokens(config, 20), random_tokens(config, 20, 5), random_parents(20, 1)
    counts = count_tokens(cache, monkeypatch)
    expected = fresh.forward_tree(tokens, nodes, parents).copy()
    for other in ([*tokens, 9, 9, 9], tokens, tokens[:10], [7]):
        assert_same_bits(cache.forward_tree(tokens, nodes, parents), expected)
        assert_same_bits(cache.forward(other), fresh.forward(other))
        with pytest.raises(ValueError, match="path"):
            cache.commit_path([0])
    cache.forward_tree(tokens, nodes, parents)
    cache.commit_path([])
    with pytest.raises(ValueError, match="path"):
        cache.commit_path([0])
    del counts[:]
    cache.forward_tree(tokens, nodes, parents, 1)
    assert counts == [20]


@pytest.mark.parametrize("path", [[1], [0, 3], [0, 1, 1], [4], [-1], [0, 10**30]])
def test_invalid_path_is_rejected_and_keeps_tree(path: list[int]) -> None:
    config = CONFIGS["gqa"]
    cache, tokens, nodes, parents = random_cache(config), random_tokens(config, 9), [5, 6, 7, 8], [-1, 0, 0, 2]
    expected = cache.forward_tree(tokens, nodes, parents).copy()
    with pytest.raises(ValueError, match="path is"):
        cache.commit_path(path)
    with pytest.raises(TypeError, match="path are"):
        cache.commit_path([0.0])  # type: ignore[list-item]
    cache.commit_path([0, 2])
    assert_same_bits(cache.forward([*tokens, 5, 7, 8]), expected[4:])


# Errors


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([1], [5, 6], [-1, 1]), "parents"),
        (([1], [5, 6], [-1, 2]), "parents"),
        (([1], [5, 6], [-2, 0]), "parents"),
        (([1], [5], [10**30]), "parents"),
        (([1], [5, 6], [-1]), "parent"),
        (([], [5], [-1]), "token"),
        (([1], [5] * MAX_BATCH_TOKENS, [-1] * MAX_BATCH_TOKENS), "nodes"),
        (([1], [512], [-1]), "nodes hold 512; expected 0 to 511"),
        (([1], [-1], [-1]), "nodes hold -1;"),
        (([512], [5], [-1]), "tokens hold 512;"),
        (([1], [10**30], [-1]), "nodes hold 1000"),
        (([1] * 96, [5], [-1]), "do not fit 96 positions"),
        (([1] * 97, [], []), "do not fit 96 positions"),
        (([1], [5], [-1], 3), "n_logits"),
        (([1], [5], [-1], -1), "n_logits"),
    ],
)
def test_invalid_tree_is_rejected_and_changes_nothing(given: tuple, words: str) -> None:
    cache, tokens = random_cache(CONFIGS["gqa"]), [1, 2, 3]
    expected = random_cache(CONFIGS["gqa"]).forward_tree(tokens, [5, 6], [-1, 0]).copy()
    cache.forward_tree(tokens, [5], [-1])
    with pytest.raises(ValueError, match=words):
        cache.forward_tree(*given)
    assert_same_bits(cache.forward_tree(tokens, [5, 6], [-1, 0], 1), expected[2:])
    assert_same_bits(cache.forward_tree(tokens, [], []), expected[:1])


def test_non_integer_trees_are_rejected() -> None:
    cache = random_cache(CONFIGS["gqa"])
    for given in (([1.0], [], []), ([1], [5.0], [-1]), ([1], [5], [None]), ([1], 5, [-1]), ([1], [5], [-1], "1")):
        with pytest.raises(TypeError, match=r"^(tokens|nodes|parents|n_logits) (are|is) .*expected (a )?whole number"):
            cache.forward_tree(*given)


@pytest.mark.parametrize("name", ["gpt2, odd", "llama with biases", "mistral"])
def test_non_finite_node_affects_only_descendants(name: str) -> None:
    config = FAMILIES[name]
    tensors = random_tensors(config)
    tensors["tok_emb"][POISON] *= 1e30  # its squares overflow
    cache, fresh = (Model(config, get_architecture(config).plan_weights(config, tensors).pack(), 1).new_cache() for _ in range(2))
    parents = random_parents(30, 2)
    nodes = [token if token != POISON else 1 for token in random_tokens(config, 30, 5)]
    sick = {3, 8, 14}
    non_finite = [bool(sick & {*get_path(node, parents)}) for node in range(30)]
    tokens = [1, *(8 + token % 50 for token in random_tokens(config, 20))]
    expected = fresh.forward_tree(tokens, nodes, parents).copy()
    assert np.isfinite(expected).all() and any(non_finite) and not all(non_finite)
    got = cache.forward_tree(tokens, [POISON if node in sick else token for node, token in enumerate(nodes)], parents).copy()
    non_finite = [False, *non_finite]
    assert not np.isfinite(got[non_finite]).any()
    assert_same_bits(got[np.invert(non_finite)], expected[np.invert(non_finite)])
    assert_same_bits(cache.forward_tree(tokens, nodes, parents), expected)  # in the slots that held them


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")
def test_interrupted_pass_or_commit_keeps_cache_consistent() -> None:
    """Timers interrupt 200 rounds of trees at random moments, mostly before a round is done."""
    config = make_config(64, 172, 2, 8, 4, 512, 400)
    cache, fresh = random_cache(config), random_cache(config)
    rng, n_interrupts = np.random.default_rng(0), 0

    def one_round(sequence: list[int], nodes: list[int], parents: list[int], path: list[int]) -> list[int]:
        cache.forward_tree(sequence, nodes[:6], parents[:6])
        cache.forward_tree(sequence, nodes, parents, 6)
        cache.commit_path(path)
        sequence = [*sequence, *(nodes[node] for node in path)]
        cache.forward(sequence, 0)
        return sequence

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    tokens = random_tokens(config, 10)
    seconds = []
    for _ in range(9):  # the first one compiles
        begin = time.perf_counter()
        one_round(tokens, [5] * 12, make_star(12), [3])
        seconds.append(time.perf_counter() - begin)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for round in range(200):
            nodes, parents = random_tokens(config, 12, round), random_parents(12, round)
            path = get_path(int(rng.integers(12)), parents)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + rng.uniform(0, min(seconds)))
                one_round(tokens, nodes, parents, path)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                n_interrupts += 1
            sequence = [*tokens, *(nodes[node] for node in path)]
            assert_same_bits(cache.forward_tree(sequence, [5, 6], [-1, -1]), fresh.forward_tree(sequence, [5, 6], [-1, -1]))
            tokens = sequence if len(sequence) < 100 else random_tokens(config, 10, round)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_interrupts > 20
