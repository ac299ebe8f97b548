"""Token trees in the decoding loop: output and distribution are the target's own, and statistics count the accepted path."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import MAX_GAMMA, FixedLength
from specdec.draft.tree import CANDIDATE_ACCEPTANCE, N_NODES, TreeDrafter, build_tree
from specdec.events import Proposal, Statistics
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.sampling import N_CANDIDATES, Sampler, Sampling, draw_gumbel_top_k
from specdec.tokenizer import BOS, EOS
from specdec.verification import CoupledVerifier, Draft
from tests.tools import reference
from tests.tools.decode import END_MARKS, SAMPLINGS, generate_tokens, get_tokens, verify_proposal
from tests.tools.random_models import tiny_model
from tests.tools.staged_runs import events_of
from tests.tools.verification_tables import Table, row


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seeds", [(0, 1), (2, 3)])
def test_output_of_trees_equals_plain_output(sampling, seeds):
    """Check every depth; some outputs end at an end-of-sequence token."""
    target, draft = tiny_model(seeds[0], layers=3), tiny_model(seeds[1])
    plain, statistics = generate_tokens(target, None, sampling)
    for gamma in (1, 2, 3, 5, 9, MAX_GAMMA):
        events = events_of(target, draft, sampling, gamma)
        assert get_tokens(events) == plain
        assert events[-1].stop_reason == statistics.stop_reason


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft_positions", [7, 24, 128])
def test_output_equals_plain_output_at_the_ends_of_contexts(sampling, draft_positions):
    """With a draft that slides its window, one with few positions, and up to the target's last position."""
    target = tiny_model(0, seq_len=90)
    for draft in (tiny_model(0, seq_len=draft_positions), tiny_model(0, seq_len=draft_positions, n_positions=90)):
        for max_tokens in (1, 2, 5, 200):
            plain, statistics = generate_tokens(target, None, sampling, max_tokens=max_tokens)
            for gamma in (4, 9):
                events = events_of(target, draft, sampling, gamma, max_tokens=max_tokens)
                assert get_tokens(events) == plain
                assert events[-1].stop_reason == statistics.stop_reason


def test_a_draft_may_have_fewer_tokens():
    for sampling in SAMPLINGS:
        target, draft = tiny_model(0), tiny_model(1, vocab=60)
        plain, _ = generate_tokens(target, None, sampling)
        assert get_tokens(events_of(target, draft, sampling, 3)) == plain


def test_embedded_pair_generates_plain_output_with_every_tree():
    plain = SpeculativeDecoder(DEFAULT_TARGET, None)
    decoder = SpeculativeDecoder(plain.target, DEFAULT_DRAFT, plain.tokenizer)
    for temperature in (0.0, 1.0):
        expected = plain.generate("Once upon a time", 160, temperature=temperature, seed=1).text
        for decoder.tree, decoder.gamma in (("on", "auto"), ("on", 3), ("on", MAX_GAMMA)):
            assert decoder.generate("Once upon a time", 160, temperature=temperature, seed=1).text == expected


def test_coupled_verifier_accepts_the_path_of_the_targets_tokens():
    """Verify the tree root -> 3, 4; 4 -> 5, 3; 5 -> end of sequence; 3 -> 7."""
    draft = Draft([3, 4, 5, 3, EOS, 7], None, [-1, -1, 1, 1, 2, 0])
    verifier = CoupledVerifier(10, Sampling(0.0))

    def verify_with(*target_tokens):
        """Verify with a target that generates these tokens at the root, after node 0, and so on."""
        return verify_proposal(np.eye(10, dtype=np.float32)[[*target_tokens]], draft, verifier, 7, END_MARKS)

    assert verify_with(8, 0, 0, 0, 0, 0, 0) == ([8], 0)
    assert verify_with(3, 9, 0, 0, 0, 0, 0) == ([3, 9], 1)
    assert verify_with(3, 7, 0, 0, 0, 0, 6) == ([3, 7, 6], 2)
    assert verify_with(4, 0, 3, 0, 6, 0, 0) == ([4, 3, 6], 2)
    assert verify_with(4, 0, 5, EOS, 0, 6, 0) == ([4, 5, EOS], 3)
    assert verify_with(4, 0, EOS, 0, 0, 0, 0) == ([4, EOS], 1)
    assert [draft.path(path) for path in ([], [8], [3, 9], [4], [4, 3, 6])] == [[3, 7], [3, 7], [3, 7], [4, 5, EOS], [4, 3]]


def test_statistics_count_the_accepted_path_without_branches():
    target, draft = (tiny_model(seed, vocab=31, scale=0.1) for seed in (0, 1))
    statistics, n_branched, n_nodes = Statistics(3), 0, 0
    events = itertools.chain.from_iterable(events_of(target, draft, Sampling(1.0, 0, 0.9, seed), 4) for seed in range(9))
    for proposal, step in itertools.pairwise(events):
        statistics.add(step)
        if not isinstance(proposal, Proposal):
            continue
        nodes, parents = proposal.tree
        assert step.n_nodes == len(nodes) == len(parents)
        n_generated = min(step.n_accepted, len(step.tokens))  # an end-of-sequence token is not counted
        assert step.draft_tokens[:n_generated] == step.tokens[:n_generated]
        assert step.n_accepted <= len(step.draft_tokens) <= 4
        paths = [[]]
        for node, parent in zip(nodes, parents, strict=True):
            paths.append([*paths[parent + 1], node])
        assert proposal.tokens in paths and step.draft_tokens in paths
        n_branched += step.draft_tokens != proposal.tokens
        n_nodes += len(nodes)
    assert n_branched > 20
    assert sum(statistics.drafted_histogram) == statistics.target_passes
    assert len(statistics.acceptance_by_position) == 4
    assert n_nodes == statistics.n_nodes > statistics.n_drafted > statistics.n_accepted > 0


# The distribution


def test_candidates_are_draws_without_replacement_in_distribution():
    """The first three of 6 tokens, 20,000 times, against the product of the remaining probabilities; chi-square, 1e-6."""
    p = np.array([0.3, 0.25, 0.2, 0.15, 0.07, 0.03])
    tokens, scores, counts = np.empty(N_CANDIDATES, np.int64), np.empty(N_CANDIDATES), Counter()
    for position in range(20_000):
        draw_gumbel_top_k(row(p), 6, 3, 1, position, tokens, scores)
        assert (np.diff(scores) <= 0).all()
        counts[tuple(tokens.tolist())] += 1
    expected = {
        drawn: math.prod(p[token] / (1 - sum(p[t] for t in drawn[:i])) for i, token in enumerate(drawn))
        for drawn in itertools.permutations(range(6), 3)
    }
    reference.check_counts(counts, expected, min_cells=100)


class TreeTable(Table):
    """A `Table` with trees, in which the next token depends only on the last one."""

    def forward_tree(self, tokens, nodes, parents, n_logits=None):
        rows = self.forward([tokens[-1], *nodes], len(nodes) + 1)
        return rows if n_logits is None else rows[len(rows) - n_logits :]


def count_sequences(target, draft, n_runs, n_tokens, gamma, temperature=1.0):
    counts = Counter()
    for seed in range(n_runs):
        sampling = Sampling(temperature, 0, 0.0, seed)
        counts[tuple(get_tokens(events_of(target, draft, sampling, gamma, "rejection", [0], n_tokens, {})))] += 1
    return counts


@pytest.mark.campaign
@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("case", ["poor", "alike", "five"])
def test_rejection_of_trees_keeps_the_targets_distribution(gamma, case):
    """Sequences of 3 tokens over 3 or 5, 6,000 fixed seeds; chi-square, false alarm below 1e-6 per case.

    "alike": the draft is the target, so residuals are rounding errors; "five": more tokens than candidates.
    """
    rng = np.random.default_rng(7)
    size = 5 if case == "five" else 3
    target = TreeTable(rng.dirichlet(np.full(size, 1.0), size) * 0.9 + 0.1 / size)
    draft = target if case == "alike" else TreeTable(rng.dirichlet(np.full(size, 0.7), size) * 0.9 + 0.1 / size)
    target.probs /= target.probs.sum(1, keepdims=True)
    length = 3 if size == 3 else 2
    reference.check_counts(count_sequences(target, draft, 6000, length, gamma), target.expect(length))


def test_siblings_raise_tokens_per_pass_and_greedy_output_is_plain():
    target, draft = (tiny_model(seed, vocab=31, scale=0.1) for seed in (0, 1))
    tree, chain = Statistics(3), Statistics(3)
    for seed in range(30):
        sampling = Sampling(1.0, 0, 0.9, seed)
        for event in events_of(target, draft, sampling, 3, "rejection"):
            tree.add(event)
        plain_draft = generate_tokens(target, draft, sampling, 3, "rejection")[1]
        chain.n_generated, chain.target_passes = (
            chain.n_generated + plain_draft.n_generated,
            chain.target_passes + plain_draft.target_passes,
        )
    assert tree.tokens_per_pass > 1.2 * chain.tokens_per_pass
    plain, _ = generate_tokens(target, None, Sampling(0.0))
    assert get_tokens(events_of(target, draft, Sampling(0.0), 3, "rejection")) == plain


def test_rejection_with_trees_is_deterministic_for_a_seed():
    """The output depends neither on measured times nor on the sequence before."""
    decoder = SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, verify="rejection", tree="on", gamma=3)
    first, repeated = (decoder.generate("Once upon a time", 60, seed=9) for _ in range(2))
    assert first.text == repeated.text
    assert first.statistics.n_nodes == repeated.statistics.n_nodes > first.statistics.n_drafted


@pytest.mark.parametrize(("verify", "tree"), [("block", "on"), ("coupled", "sometimes"), ("coupled", 1)])
def test_bad_tree_settings_are_refused(verify, tree):
    with pytest.raises((ValueError, TypeError), match="tree is"):
        SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, verify=verify, tree=tree)


def test_block_verification_with_trees_is_refused():
    decoder = SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, tree="on")
    with pytest.raises(ValueError, match="tree is 'on'"):
        decoder.verify = "block"
    assert decoder.verify == "coupled"


# Which nodes there are


@pytest.mark.parametrize("depth", [1, 2, 4, 9, 40, MAX_GAMMA])
def test_built_tree_reaches_the_maximum_depth_and_size(depth):
    shape = build_tree(depth)
    assert len(shape) - 1 <= min(MAX_GAMMA, max(N_NODES, 2 * depth))
    depths = {0: 0}
    for node, children in enumerate(shape):
        assert len(children) <= len(CANDIDATE_ACCEPTANCE)
        depths |= dict.fromkeys(children, depths[node] + 1)
    assert len(depths) == len(shape)
    assert max(depths.values()) <= depth
    assert depth > 9 or max(depths.values()) == depth


def test_first_choices_come_first_and_no_node_follows_an_eos_token():
    cache, n_eos = tiny_model(0, vocab=31, scale=0.1).new_cache(), 0
    for seed in range(40):
        sampling = Sampling(1.0, seed=seed)
        eos_tokens = {3: "one", 4: "another", 5: "a third"}
        drafter = TreeDrafter(cache, Sampler(31, sampling), lambda _: 0, eos_tokens)
        policy = FixedLength(4)
        policy.start(10)
        draft = drafter.propose([BOS, 7, 9], policy)
        assert len(draft.tokens) <= N_NODES
        path, node = [], -1
        while children := draft.children(node):
            path.append(node := children[0])
        assert path == [*range(len(path))]
        candidates = [node for node, token in enumerate(draft.tokens) if token in eos_tokens]
        assert not any(draft.children(node) for node in candidates)
        n_eos += len(candidates)
    assert n_eos > 10
