"""Token trees: a node's logits are those of the chain of its ancestors, bit for bit, however the tree was run and kept."""

import itertools
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from specdec.config import Config
from specdec.kernels import MAX_TOKENS
from specdec.layers import base
from specdec.model.registry import architecture_of
from specdec.model.transformer import FIRST_POSITIONS, Transformer
from specdec.quant import BF16, FP32, INT8, Kind
from specdec.runtime.simd import Float32
from tests.model.test_architectures import FAMILIES, POISON, model_of, random_tensors
from tests.tools.configs import changed, made
from tests.tools.random_models import CONFIGS, THREADS, random_model, tokens_for

# head_dims of 2 to 128, heads that share keys, windows, norms of heads, learned positions
ALL = FAMILIES | CONFIGS | {"head_dim 2": made(14, 20, 2, 7, 1, 105, 400), "many heads": made(96, 40, 1, 24, 1, 105, 400)}
SHAPES = {name: config for name, config in ALL.items() if architecture_of(config).move}  # of the families that run trees


def random_parents(n: int, seed: int) -> list[int]:
    """Of one tree of n nodes: its node 0 follows the text, and so may others."""
    rng = np.random.default_rng(seed)
    return [int(rng.integers(-1, node)) if node else -1 for node in range(n)]


def a_star(n: int) -> list[int]:
    return [-1] * n


def a_chain(n: int) -> list[int]:
    return [*range(-1, n - 1)]


def combs(n: int) -> list[int]:
    """Each node of a chain has a sibling behind it."""
    return [-1, *(node // 2 * 2 for node in range(n - 1))]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def logits_of_chains(model: Transformer, tokens: list[int], nodes: list[int], parents: list[int]) -> Float32:
    """The logits at the text's last token and at each node, each run as a chain."""
    paths = [[], *(path_to(node, parents) for node in range(len(nodes)))]
    return np.concatenate([model.forward(tokens + [nodes[node] for node in path]).copy() for path in paths])


def assert_same_bits(got: Float32, expected: Float32) -> None:
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def bf16_model(config: Config, n_threads: int = 1) -> Transformer:
    tensors = {name: (tensor.view(np.uint32) >> 16).astype(np.uint16) for name, tensor in random_tensors(config).items()}
    return Transformer(config, architecture_of(config).pack(config, tensors), n_threads)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, FP32) for name in SHAPES), *((name, INT8) for name in SHAPES), ("gqa", BF16), ("gpt2", BF16)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_nodes_logits_are_those_of_the_chain_of_its_ancestors_bit_for_bit(name: str, kind: Kind) -> None:
    """Trees of every sort, at once behind a text of every length around a vector, a strip and what a pass holds."""
    config = replace(SHAPES[name], seq_len=400)
    chains, *trees = (bf16_model(config, n) if kind is BF16 else model_of(config, n, kind) for n in (1, *THREADS))
    shapes = [(1, a_star), (9, a_chain), (8, a_star), (7, combs), (30, lambda n: random_parents(n, 7))]
    for n, (n_nodes, parents_of) in zip((1, 15, 16, 31, 33), shapes, strict=True):
        tokens, nodes, parents = tokens_for(config, n), tokens_for(config, n_nodes, n), parents_of(n_nodes)
        expected = logits_of_chains(chains, tokens, nodes, parents)
        for model in trees:
            assert_same_bits(model.forward_tree(tokens, nodes, parents), expected)


@pytest.mark.parametrize(("name", "window"), [*(("mistral", window) for window in (1, 2, 5, 16, 33)), ("gemma", 5)])
def test_a_window_is_one_of_positions_and_not_of_slots(name: str, window: int) -> None:
    """Shorter than the tree is deep, too."""
    config = changed(FAMILIES[name], window=window)
    for n, parents in itertools.product((1, 17, 40), (a_chain(20), combs(30), random_parents(50, window), a_star(10))):
        tokens, nodes = tokens_for(config, n), tokens_for(config, len(parents), 5)
        expected = logits_of_chains(model_of(config), tokens, nodes, parents)
        assert_same_bits(model_of(config, max(THREADS)).forward_tree(tokens, nodes, parents), expected)


@pytest.mark.parametrize("name", ["gqa", "mistral", "gpt2"])
@pytest.mark.parametrize("n", [FIRST_POSITIONS - 64, FIRST_POSITIONS - 3, FIRST_POSITIONS, FIRST_POSITIONS + 1])
def test_a_tree_may_outgrow_the_buffers(name: str, n: int) -> None:
    config = replace(SHAPES[name], seq_len=1000)
    tokens, nodes, parents = tokens_for(config, n), tokens_for(config, 63, 5), random_parents(63, n)
    expected = logits_of_chains(model_of(config), tokens, nodes, parents)
    model = model_of(config)
    model.forward(tokens)
    for end in (2, 10, 40, 63):  # level by level: rows of nodes move to the larger buffers
        got = model.forward_tree(tokens, nodes[:end], parents[:end], end).copy()
        assert_same_bits(got, expected[1 : end + 1])


@pytest.mark.parametrize("name", ["odd", "gpt2", "everything"])
def test_the_last_position_is_a_trees_too(name: str) -> None:
    """Siblings share it: they take room, and no position."""
    config = replace(SHAPES[name], seq_len=40)
    tokens, nodes = tokens_for(config, 38), tokens_for(config, 63, 5)
    parents = [-1] * 30 + [*range(30)] + [0, 1, 2]
    expected = logits_of_chains(model_of(config), tokens, nodes, parents)
    model = model_of(config)
    assert_same_bits(model.forward_tree(tokens, nodes, parents), expected)
    with pytest.raises(ValueError, match="39 tokens and a tree of depth 2 do not fit 40 positions"):
        model.forward_tree([*tokens, nodes[0]], nodes, parents)
    assert_same_bits(model.forward([*tokens, nodes[0], nodes[30]]), expected[31:32])


def count_tokens(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each pass from now on runs."""
    counts: list[int] = []
    runner = model._runner

    def run(n_tokens: int, *rest: int) -> None:
        counts.append(n_tokens)
        runner(n_tokens, *rest)

    monkeypatch.setattr(model, "_runner", run)
    return counts


@pytest.mark.parametrize("name", ["gqa", "gpt2", "mistral"])
def test_a_tree_that_grows_runs_its_new_nodes_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES[name]
    tokens, nodes, parents = tokens_for(config, 45), tokens_for(config, 40, 5), random_parents(40, 3)
    at_once = model_of(config).forward_tree(tokens, nodes, parents).copy()
    assert_same_bits(at_once, logits_of_chains(model_of(config), tokens, nodes, parents))
    model = model_of(config)
    counts = count_tokens(model, monkeypatch)
    assert_same_bits(model.forward(tokens), at_once[:1])
    for begin, end in itertools.pairwise((0, 1, 4, 5, 20, 40)):
        got = model.forward_tree(tokens, nodes[:end], parents[:end], end - begin)
        assert_same_bits(got, at_once[begin + 1 : end + 1])
    assert counts == [45, 1, 3, 1, 15, 20]
    del counts[:]
    assert model.forward_tree(tokens, nodes, parents, 0).shape == (0, config.vocab_size)
    assert_same_bits(model.forward_tree(tokens, nodes, parents, 7), at_once[-7:])
    other = [*nodes[:10], (nodes[10] + 1) % config.vocab_size, *nodes[11:]]
    model.forward_tree(tokens, other, parents, 1)
    assert_same_bits(model.forward_tree(tokens, nodes, parents), at_once)
    assert_same_bits(
        model.forward_tree(tokens[:20], nodes, parents, 1), model_of(config).forward_tree(tokens[:20], nodes, parents, 1)
    )
    assert_same_bits(model.forward_tree(tokens, nodes, parents, 1), at_once[-1:])
    assert counts == [7, 30, 41, 40, 1, 64]


def test_a_long_text_and_its_tree_go_in_blocks_of_which_the_last_holds_the_tree() -> None:
    config = FAMILIES["qwen2"]
    nodes, parents = tokens_for(config, 63, 5), random_parents(63, 4)
    for n in (2, 64, 65, 150):
        tokens = tokens_for(config, n)
        expected = logits_of_chains(model_of(config), tokens, nodes, parents)
        assert_same_bits(model_of(config, max(THREADS)).forward_tree(tokens, nodes, parents), expected)


# What is kept


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "found"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_path_that_is_kept_is_text_and_leaves_nothing_else_behind(name: str, asked: bool, monkeypatch) -> None:
    """Whether it is asked to be kept, or found when the text goes on that way."""
    config = replace(SHAPES[name], seq_len=400)
    model, tokens, parents = model_of(config, max(THREADS)), tokens_for(config, 29), random_parents(40, 11)
    model.forward(tokens)
    counts = count_tokens(model, monkeypatch)
    for round in range(6):
        nodes = tokens_for(config, 40, 100 + round)
        model.forward_tree(tokens, nodes, parents)
        path = path_to([39, 0, 25, 30, 38, 12][round], parents)
        if asked:
            model.keep(path)
            assert model.n_held == len(tokens) + len(path)
        tokens = [*tokens, *(nodes[node] for node in path), 5 + round]
        del counts[:]
        assert_same_bits(model.forward(tokens), model_of(config).forward(tokens))
        assert counts == [1]
        assert model.n_held == len(tokens)


def test_what_is_not_kept_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["gqa"]
    model, fresh = random_model(config), random_model(config)
    tokens, nodes, parents = tokens_for(config, 20), tokens_for(config, 20, 5), random_parents(20, 1)
    counts = count_tokens(model, monkeypatch)
    expected = fresh.forward_tree(tokens, nodes, parents).copy()
    for other in ([*tokens, 9, 9, 9], tokens, tokens[:10], [7]):
        assert_same_bits(model.forward_tree(tokens, nodes, parents), expected)
        assert_same_bits(model.forward(other), fresh.forward(other))
        with pytest.raises(ValueError, match="path"):
            model.keep([0])
    model.forward_tree(tokens, nodes, parents)
    model.keep([])
    with pytest.raises(ValueError, match="path"):
        model.keep([0])
    del counts[:]
    model.forward_tree(tokens, nodes, parents, 1)
    assert counts == [20]


@pytest.mark.parametrize("path", [[1], [0, 3], [0, 1, 1], [4], [-1], [0, 10**30]])
def test_a_path_that_is_none_is_refused_and_the_tree_stays(path: list[int]) -> None:
    config = CONFIGS["gqa"]
    model, tokens, nodes, parents = random_model(config), tokens_for(config, 9), [5, 6, 7, 8], [-1, 0, 0, 2]
    expected = model.forward_tree(tokens, nodes, parents).copy()
    with pytest.raises(ValueError, match="path is"):
        model.keep(path)
    with pytest.raises(TypeError, match="path are"):
        model.keep([0.0])  # type: ignore[list-item]
    model.keep([0, 2])
    assert_same_bits(model.forward([*tokens, 5, 7, 8]), expected[4:])


# What is refused, and what goes wrong


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([1], [5, 6], [-1, 1]), "parents"),
        (([1], [5, 6], [-1, 2]), "parents"),
        (([1], [5, 6], [-2, 0]), "parents"),
        (([1], [5], [10**30]), "parents"),
        (([1], [5, 6], [-1]), "parent"),
        (([], [5], [-1]), "token"),
        (([1], [5] * MAX_TOKENS, [-1] * MAX_TOKENS), "nodes"),
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
def test_a_tree_that_cannot_be_run_is_refused_and_changes_nothing(given: tuple, words: str) -> None:
    model, tokens = random_model(CONFIGS["gqa"]), [1, 2, 3]
    expected = random_model(CONFIGS["gqa"]).forward_tree(tokens, [5, 6], [-1, 0]).copy()
    model.forward_tree(tokens, [5], [-1])
    with pytest.raises(ValueError, match=words):
        model.forward_tree(*given)
    assert_same_bits(model.forward_tree(tokens, [5, 6], [-1, 0], 1), expected[2:])
    assert_same_bits(model.forward_tree(tokens, [], []), expected[:1])


def test_what_is_no_tree_is_refused() -> None:
    model = random_model(CONFIGS["gqa"])
    for given in (([1.0], [], []), ([1], [5.0], [-1]), ([1], [5], [None]), ([1], 5, [-1]), ([1], [5], [-1], "1")):
        with pytest.raises(TypeError, match=r"^(tokens|nodes|parents|n_logits) (are|is) .*expected (a )?whole number"):
            model.forward_tree(*given)


@pytest.mark.parametrize("name", ["gpt2, odd", "llama with biases", "mistral"])
def test_a_node_that_is_not_finite_spoils_its_descendants_alone(name: str) -> None:
    config = FAMILIES[name]
    tensors = random_tensors(config)
    tensors["tok_emb"][POISON] *= 1e30  # whose squares overflow
    model, fresh = (Transformer(config, architecture_of(config).pack(config, tensors), 1) for _ in range(2))
    parents = random_parents(30, 2)
    nodes = [token if token != POISON else 1 for token in tokens_for(config, 30, 5)]
    sick = {3, 8, 14}
    spoilt = [bool(sick & {*path_to(node, parents)}) for node in range(30)]
    tokens = [1, *(8 + token % 50 for token in tokens_for(config, 20))]
    expected = fresh.forward_tree(tokens, nodes, parents).copy()
    assert np.isfinite(expected).all() and any(spoilt) and not all(spoilt)
    got = model.forward_tree(tokens, [POISON if node in sick else token for node, token in enumerate(nodes)], parents).copy()
    spoilt = [False, *spoilt]
    assert not np.isfinite(got[spoilt]).any()
    assert_same_bits(got[np.invert(spoilt)], expected[np.invert(spoilt)])
    assert_same_bits(model.forward_tree(tokens, nodes, parents), expected)  # in the slots that held them


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("module", "where"), [(base, "zeros"), (base, "Runner")])
def test_a_growth_that_fails_leaves_a_tree_that_works(monkeypatch: pytest.MonkeyPatch, module, where: str, error) -> None:
    config = replace(CONFIGS["gqa"], seq_len=1000)
    tokens, nodes, parents = tokens_for(config, 250), tokens_for(config, 20, 5), random_parents(20, 6)
    expected = random_model(config).forward_tree(tokens, nodes, parents).copy()
    model = random_model(config)
    model.forward_tree(tokens, nodes[:5], parents[:5])

    def fails(*_):
        raise error

    with monkeypatch.context() as context:
        context.setattr(module, where, fails)
        with pytest.raises(error):
            model.forward_tree(tokens, nodes, parents, 15)
    assert_same_bits(model.forward_tree(tokens, nodes, parents, 15), expected[6:])


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")
def test_a_pass_or_a_keep_that_is_interrupted_leaves_a_cache_that_knows_what_it_holds() -> None:
    """KeyboardInterrupts at random moments of 200 rounds of trees, by a timer, most of them before a round is done."""
    config = made(64, 172, 2, 8, 4, 512, 400)
    model, fresh = random_model(config), random_model(config)
    rng, n_interrupts = np.random.default_rng(0), 0

    def one_round(text: list[int], nodes: list[int], parents: list[int], path: list[int]) -> list[int]:
        model.forward_tree(text, nodes[:6], parents[:6])
        model.forward_tree(text, nodes, parents, 6)
        model.keep(path)
        text = [*text, *(nodes[node] for node in path)]
        model.forward(text, 0)
        return text

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    tokens = tokens_for(config, 10)
    seconds = []
    for _ in range(9):  # the first one compiles
        begin = time.perf_counter()
        one_round(tokens, [5] * 12, a_star(12), [3])
        seconds.append(time.perf_counter() - begin)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for round in range(200):
            nodes, parents = tokens_for(config, 12, round), random_parents(12, round)
            path = path_to(int(rng.integers(12)), parents)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + rng.uniform(0, min(seconds)))
                one_round(tokens, nodes, parents, path)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                n_interrupts += 1
            text = [*tokens, *(nodes[node] for node in path)]
            assert_same_bits(model.forward_tree(text, [5, 6], [-1, -1]), fresh.forward_tree(text, [5, 6], [-1, -1]))
            tokens = text if len(text) < 100 else tokens_for(config, 10, round)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_interrupts > 20
