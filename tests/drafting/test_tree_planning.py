"""What becomes a tree: played with costs and odds that are known, against chains."""

import random

import pytest

from specdec.drafting.estimates import MAX_GAMMA, Costs
from specdec.drafting.planning import AutoLength
from specdec.drafting.tree_planning import (
    LAST_REST,
    LOOKS,
    STATIC_NODES,
    STATIC_RATES,
    WIDEST,
    AutoTree,
    CandidateTree,
    StaticTree,
    TreeCosts,
    new_acceptances,
    prices,
    static_shape,
)
from specdec.kernels import MAX_TOKENS

# a pass over so many tokens and a draft's token: nearly free tokens, some, and dear ones
MACHINES = {
    "flat": ({1: 1.0, 8: 1.02, 64: 1.3}, 0.03),
    "some": ({1: 1.0, 8: 1.4, 64: 9.0}, 0.04),
    "steep": ({1: 1.0, 64: 50.0}, 0.04),
}
WIDTHS = {2: 1.1, 4: 1.2, 8: 1.4}
TOKENS = 3000


def tree_costs(branching=0.0, rest=0):
    return TreeCosts.measured(WIDTHS, branching, rest)


def auto(machine, branching=0.0, **more):
    passes, draft = MACHINES[machine]
    costs = Costs(passes, draft)
    for _ in range(2):  # else the first steps look at that
        costs.saw(0, passes[1], 0.0)
    return AutoTree(costs, tree_costs(branching), new_acceptances(), {2}, **more)


class World:
    """Texts of which the draft knows the next token's odds: its candidates are tokens 10, 11, 12, and else it is 13."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def margins(self):
        return [self.rng.expovariate(0.6), self.rng.expovariate(0.6)]

    def scores(self):
        first, second = self.margins()
        return [0.0, -first, -first - second]

    def token(self, scores):
        odds = [4.0, 4.0 * 2 ** (scores[1] * 2), 4.0 * 2 ** (scores[2] * 2), 0.3]
        return self.rng.choices([10, 11, 12, 13], odds)[0]


def play(plan, machine, seed=1, tokens=TOKENS, branching=0.0):
    """Tokens a second of a text, and nodes a pass."""
    passes, draft = MACHINES[machine]
    costs, world = Costs(passes, draft), World(seed)
    text, seconds, n_nodes, n_passes = [], 0.0, 0, 0
    while len(text) < tokens:
        scores, n_accepted, draft_seconds, chosen = {}, 0, 0.0, []
        if plan.begins(tokens):
            if not getattr(plan, "is_tree", False):
                scores[-1] = world.scores()
                chosen, parents = [0], [-1]
                while plan.goes_on(-scores[chosen[-1] - 1][1]):
                    scores[chosen[-1]] = world.scores()
                    parents.append(chosen[-1])
                    chosen.append(chosen[-1] + 1)
                tokens_of, draft_seconds = [10] * len(chosen), draft * len(chosen)
            else:
                plan.tree.plant(text)
                level = [-1]
                while level:
                    draft_seconds += draft * tree_costs().widths[len(level)]
                    for node in level:
                        scores[node] = world.scores()
                        plan.offers(node, [10, 11, 12], scores[node])
                    level = plan.grows()
                chosen, tokens_of, parents = plan.picks(), plan.tree.tokens, plan.tree.parents
        node, stands = -1, True
        while stands:
            token = world.token(scores.get(node) or world.scores())
            text.append(token)
            following = [child for child in chosen if parents[child] == node and tokens_of[child] == token]
            stands = bool(following)
            node, n_accepted = (following[0], n_accepted + 1) if stands else (node, n_accepted)
        pass_seconds = costs.of(len(chosen) + 1)
        if [parents[child] for child in chosen] != [-1, *chosen][:-1]:
            pass_seconds += branching
        plan.saw(len(chosen), n_accepted, pass_seconds, draft_seconds)
        seconds, n_nodes, n_passes = seconds + pass_seconds + draft_seconds, n_nodes + len(chosen), n_passes + 1
    return len(text) / seconds, n_nodes / n_passes


def chain_of(machine):
    passes, draft = MACHINES[machine]
    return AutoLength(Costs(passes, draft), new_acceptances()[0])


def test_trees_are_far_faster_where_tokens_of_a_pass_are_nearly_free():
    """Measured 1.5 times."""
    assert play(auto("flat"), "flat")[0] > 1.25 * play(chain_of("flat"), "flat")[0]


@pytest.mark.campaign
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("branching", [0.0, 0.5])
def test_and_nowhere_slower_than_chains(machine, branching):
    """Be a tree's pass as dear as it may: within what finding that out costs, over six texts."""
    trees = [play(auto(machine, branching), machine, seed, branching=branching)[0] for seed in range(6)]
    chains = [play(chain_of(machine), machine, seed)[0] for seed in range(6)]
    assert sum(trees) > 0.97 * sum(chains)


def test_where_each_token_makes_a_pass_dearer_a_tree_is_a_chain():
    _, n_nodes = play(auto("steep"), "steep")
    assert n_nodes < 1.5
    assert play(auto("flat"), "flat")[1] > 8


def test_where_trees_do_not_pay_they_are_looked_at_now_and_then():
    plan, rounds = auto("some"), []
    plan._tree_costs.rest = 2 * LOOKS
    for _ in range(5000):
        if not plan.begins(50):  # it looks at the target alone
            plan.saw(0, 0, plan.costs.of(1), 0.0)
        rounds.append(plan.is_tree)
        if plan.is_tree:
            plan._tree_costs.looked(0.0)
    assert not any(rounds[:LOOKS]) and 2 * LOOKS <= sum(rounds[:1000]) <= 4 * LOOKS
    assert sum(rounds) < 0.01 * len(rounds) + LOOKS
    for _ in range(LAST_REST + 4 * LOOKS):
        if not plan.begins(50):  # it looks at the target alone
            plan.saw(0, 0, plan.costs.of(1), 0.0)
        if plan.is_tree:
            plan._tree_costs.looked(1.0)
    assert plan.is_tree


def test_what_a_tree_costs_beyond_a_chain_is_learned_and_doubted():
    plan = auto("some", 0.0)
    play(plan, "some", branching=0.5)
    assert plan._tree_costs.branching > 0.05  # where trees pay no more
    plan = auto("flat", 5.0)  # a moment of the start that lasted long
    play(plan, "flat", tokens=6000)
    assert plan._tree_costs.branching < 0.2


def test_candidates_are_counted_by_rank_where_those_before_them_failed():
    acceptances = new_acceptances()
    tree = CandidateTree(acceptances)
    tree.plant([1])
    tree.add(-1, [10, 11, 12], [0.0, -1.0, -3.0], 2)
    assert (tree.tokens, tree.parents) == ([10, 11], [-1, -1])
    tree.next_level()
    tree.add(1, [20, 21], [0.0, -9.0, -float("inf")], 3)
    before = [[*acceptance._seen] for acceptance in acceptances]
    tree.plant([1, 11, 20, 77])
    seen = [
        sum(a != b for a, b in zip(acceptance._seen, old, strict=True))
        for acceptance, old in zip(acceptances, before, strict=True)
    ]
    assert seen == [3, 2, 0]  # each a bucket and all; the first twice, of two buckets
    before = [[*acceptance._seen] for acceptance in acceptances]
    tree.plant([1, 11, 20, 77, 78])  # nothing was offered
    assert before == [acceptance._seen for acceptance in acceptances]


def test_survivals_fall_along_a_path_and_among_siblings_add_up_to_less_than_their_parents():
    tree = CandidateTree(new_acceptances())
    tree.plant([])
    tree.add(-1, [10, 11, 12], [0.0, -0.1, -0.2], 3)
    tree.add(0, [10, 11, 12], [0.0, -0.1, -0.2], 3)
    assert sum(tree.survivals[:3]) < 1 and sum(tree.survivals[3:]) < tree.survivals[0]
    assert tree.in_order({5, 4, 3, 0, 1}) == [0, 3, 1, 4, 5]
    assert tree.first_choices({1, 4}) == [1]
    order = tree.ranked()
    assert all(order.index(parent) < order.index(node) for node, parent in enumerate(tree.parents) if parent >= 0)


def test_no_tree_is_larger_than_a_pass():
    for plan in (auto("flat"), StaticTree(MAX_GAMMA, None, new_acceptances(), {})):
        assert plan.begins(1000)
        plan.tree.plant([])
        level = [-1]
        while level:
            for node in level:
                plan.offers(node, [10, 11, 12], [0.0, -0.01, -0.02])
            level = plan.grows()
            assert isinstance(plan, StaticTree) or len(level) <= WIDEST
        assert len(plan.picks()) <= MAX_GAMMA == MAX_TOKENS - 1


def test_nothing_grows_behind_an_end_mark():
    for plan in (auto("flat"), StaticTree(4, None, new_acceptances(), {2})):
        plan.begins(10)
        plan.tree.plant([])
        plan.offers(-1, [2, 11, 12], [0.0, -0.01, -0.02])
        assert 0 not in plan.grows()


@pytest.mark.parametrize("depth", [1, 2, 4, 9, 40, MAX_GAMMA])
def test_a_static_shape_is_as_deep_and_as_large_as_it_may(depth):
    shape = static_shape(depth, STATIC_RATES)
    assert len(shape) - 1 <= min(MAX_GAMMA, max(STATIC_NODES, 2 * depth))
    depths = {0: 0}
    for node, children in enumerate(shape):
        assert len(children) <= len(STATIC_RATES)
        depths |= dict.fromkeys(children, depths[node] + 1)
    assert len(depths) == len(shape)
    assert max(depths.values()) <= depth
    assert depth > 9 or max(depths.values()) == depth


def test_what_another_node_costs_is_never_less_than_nothing():
    passes, another = prices(Costs({1: 1.0, 8: 1.1, 9: 2.0, 64: 9.0}, 0.1))
    assert len(passes) == MAX_TOKENS + 1 and len(another) == MAX_GAMMA
    assert min(another) >= 0
    assert another[7] > 5 * another[6]  # the step
