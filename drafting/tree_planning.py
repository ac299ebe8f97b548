"""What tree of tokens a proposal becomes: what pays, by measured costs and by what has stood so far. Knows no models.

A node's survival is the chance that the target's text goes through it: the product, along its path, of how often candidates of
such rank and confidence were the target's token. A tree of nodes of survivals S yields 1 + sum S tokens, so a node is worth its
while where S exceeds the best rate times the seconds that another token adds to the pass (OPT-Tree, arXiv:2406.17276; Sequoia,
arXiv:2402.12374). Where a pass gets dearer with each token no sibling is, and the tree is a chain.
"""

import heapq
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..decoding import Plan
from .estimates import BUCKETS, MARGIN_RATES, MAX_GAMMA, Acceptance, Costs, bucket_of
from .planning import AutoLength, FixedLength

# Of candidates behind the first, how often each was the token where those before it were not, by how far its score is behind
# the first one's: before anything was seen, as the embedded pair had it.
SECOND_RATES = (*[0.6] * 4, 0.5, 0.45, *[0.4] * (BUCKETS - 6))
THIRD_RATES = (*[0.45] * 4, 0.4, 0.35, *[0.3] * (BUCKETS - 6))
STATIC_RATES = 0.75, 0.5, 0.4  # in the place of all of them where a tree must depend on nothing that was seen
STATIC_NODES = 15  # of a tree whose depth is given: with the text's last token a pass of 16
STEPS = np.array([1, 2, 3, 4, 6, 8])  # nodes more that are considered at once
REPRICED = 16  # rounds after which what nodes cost is looked at again
WIDEST = 8  # nodes of a level that the draft runs at once
FORGETS = 0.05  # what the newest tree weighs in what trees cost beyond chains
DOUBTED = 0.9  # what that falls by where it has a chain proposed, so that a tree is tried again
# Rounds after which it is asked whether trees pay, tokens a round that they have to gain then, and rounds of chains if they do
# not, each time twice as many: growing a tree takes a small model's round too much Python.
LOOKS, PAYS, FIRST_REST, LAST_REST = 8, 0.05, 128, 4096


def new_acceptances(first: Acceptance | None = None) -> list[Acceptance]:
    """Of candidates by rank, each counted where those before it were not the token; first: a chain's, to share."""
    return [first or Acceptance(MARGIN_RATES), Acceptance(SECOND_RATES), Acceptance(THIRD_RATES)]


class TreePlan(Plan, Protocol):
    """Whoever decides how a tree of candidates grows, level by level; `begins` and `saw` are those of a `Plan`."""

    tree: "CandidateTree"
    is_tree: bool  # whether the proposal that has begun may be one; else it is a chain, and the plan that of one

    def offers(self, node: int, tokens: list[int], scores: list[float]) -> None:
        """The best candidates behind a node, -1 for the text's end, the best first, with their noisy scores."""

    def grows(self) -> list[int]:
        """The nodes of the newest level whose candidates are wanted; none: it is grown."""

    def picks(self) -> list[int]:
        """The nodes that are proposed, each with its parent before it; the path of first choices at the front."""


class CandidateTree:
    """Candidates and how likely they are to be the text, and what became of them."""

    def __init__(self, acceptances: Sequence[Acceptance]) -> None:
        self.acceptances = acceptances
        self._begins_at = 0
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.survivals: list[float] = []
        self.depth = 0  # levels that are whole
        self._level = 0  # the newest level's first node
        self._offers: dict[int, tuple[list[int], list[float], int]] = {}  # of a node, and its first child

    def plant(self, text: list[int]) -> None:
        """Begin a tree behind a text, having seen in it what became of the last one."""
        node = -1
        for token in text[self._begins_at :]:
            if node not in self._offers:
                break
            tokens, scores, first = self._offers[node]
            for rank, candidate in enumerate(tokens):
                self.acceptances[rank].saw(_bucket(scores, rank), candidate == token)
                if candidate == token:
                    break
            else:
                break
            node = first + rank if first + rank < len(self.tokens) and self.parents[first + rank] == node else len(self.tokens)
        self._clear()
        self._begins_at = len(text)

    def path(self, node: int) -> list[int]:
        """The tokens from the text to a node; -1 is the text's end."""
        path = list[int]()
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def add(self, parent: int, tokens: list[int], scores: list[float], most: int, least: float = 0.0) -> None:
        """Up to `most` candidates behind a node: the first, and others as long as their survival exceeds `least`."""
        self._offers[parent] = tokens, scores, len(self.tokens)
        left = self.survivals[parent] if parent >= 0 else 1.0
        for rank, token in enumerate(tokens[:most]):
            survival = left * self.acceptances[rank].rates[_bucket(scores, rank)]
            if (rank and survival <= least) or len(self.tokens) == MAX_GAMMA:
                break
            self.tokens.append(token)
            self.parents.append(parent)
            self.survivals.append(survival)
            left -= survival

    def next_level(self) -> list[int]:
        """The nodes of the newest level, the likeliest first; what is added from now on is the next."""
        level = sorted(range(self._level, len(self.tokens)), key=self.survivals.__getitem__, reverse=True)
        self._level = len(self.tokens)
        self.depth += 1
        return level

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return len(self.tokens) <= self.depth

    def ranked(self) -> list[int]:
        """All nodes, the likeliest first, and a parent before its children."""
        return sorted(range(len(self.tokens)), key=self.survivals.__getitem__, reverse=True)

    def first_choices(self, nodes: Container[int]) -> list[int]:
        """The path through nodes that always takes the first child."""
        path, node = list[int](), -1
        for child, parent in enumerate(self.parents):
            if parent == node and child in nodes:
                path.append(child)
                node = child
        return path

    def in_order(self, nodes: set[int]) -> list[int]:
        """The path of first choices, which a cache keeps where it is, then the others as they came."""
        path = self.first_choices(nodes)
        return path + sorted(nodes.difference(path))


def _bucket(scores: list[float], rank: int) -> int:
    """The first one's margin to the second; of others, how far they are behind the first."""
    return bucket_of(scores[0] - scores[rank or 1])


@dataclass
class TreeCosts:
    """What trees cost beyond chains, measured when warm.

    widths: what a pass of the draft over 0 to WIDEST nodes takes, with their draws, in those over one; branching: seconds that
    a tree costs more than a chain of as many nodes, kept up with what steps take. advantage: tokens that trees were reckoned to
    gain over chains in the last rounds that were looked at, less what they took longer; rest: rounds of chains that are left,
    the first of which tell what a draft's tokens take.
    """

    widths: list[float]
    branching: float
    advantage: float = 0.0
    n_looks: int = 0
    rest: int = 0
    next_rest: int = FIRST_REST

    @classmethod
    def measured(cls, widths: Mapping[int, float], branching: float, rest: int = 2 * LOOKS) -> "TreeCosts":
        """From widths at some n."""
        points = {0: 0.0, 1: 1.0} | dict(widths)
        curve = np.interp(range(WIDEST + 1), [*points], [*points.values()])
        return cls(np.maximum.accumulate(curve).tolist(), max(0.0, branching), rest=rest)

    def of_levels(self, costs: Costs, levels: Sequence[int]) -> float:
        """Seconds of a draft that runs levels of such widths, were it as quick at it as at a chain."""
        return costs.start + sum(self.widths[n] for n in levels) * costs.draft

    def looked(self, advantage: float) -> None:
        """A tree's tokens beyond a chain's, as they are reckoned; where LOOKS of them did not pay, chains it is for a while."""
        self.advantage += advantage
        self.n_looks += 1
        if self.n_looks == LOOKS:
            if self.advantage > LOOKS * PAYS:
                self.next_rest = FIRST_REST
            else:
                self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LAST_REST)
            self.advantage, self.n_looks = 0.0, 0

    def saw(self, beyond: float, most: float) -> None:
        """A tree's pass took so much more than one over a chain of as many nodes."""
        self.branching += FORGETS * (min(max(beyond, 0.0), most) - self.branching)


class AutoTree(AutoLength):
    """The tree that pays; a chain where no sibling does. is_forced: also where a chain is reckoned to be as good.

    costs, tree_costs and acceptances outlive a text. end_marks: tokens that end one, behind which nothing grows.
    """

    def __init__(
        self,
        costs: Costs,
        tree_costs: TreeCosts,
        acceptances: Sequence[Acceptance],
        end_marks: Container[int],
        is_forced: bool = False,
    ) -> None:
        super().__init__(costs, acceptances[0])
        self.tree = CandidateTree(acceptances)
        self._tree_costs, self._end_marks, self._is_forced = tree_costs, end_marks, is_forced
        self._passes: list[float] = []  # seconds, as `Costs.passes`
        self._another: list[float] = []  # seconds that a node more takes, where there are so many, with those that come with it
        self._rate = 0.0
        self._levels: list[int] = []  # how many nodes the draft ran of each
        self._branches, self._gain = False, 0.0
        self.is_tree = True

    def begins(self, most: int) -> bool:
        begins = super().begins(most)
        self._levels, self._branches = [], False
        self.is_tree = begins and not self._is_trial and (self._is_forced or not self._tree_costs.rest)
        if begins and not self.is_tree:
            self._tree_costs.rest = max(0, self._tree_costs.rest - 1)
        if self.is_tree:
            self._levels.append(1)
            self._rate = self.rate
            if not self._passes or self._round % REPRICED == 0:
                self._passes, self._another = prices(self.costs)
        return begins

    def offers(self, node: int, tokens: list[int], scores: list[float]) -> None:
        n = len(self.tree.tokens)
        if n == MAX_GAMMA:
            self.tree.add(node, tokens, scores, 1)
        else:
            self.tree.add(node, tokens, scores, len(tokens), self._rate * self._another[n])

    def grows(self) -> list[int]:
        tree, n = self.tree, len(self.tree.tokens)
        level = [node for node in tree.next_level() if tree.tokens[node] not in self._end_marks]
        if tree.depth >= self.most or n == MAX_GAMMA:
            return []
        widths, mass, n_run = self._tree_costs.widths, 0.0, 0
        for node in level[:WIDEST]:
            survival = tree.survivals[node]
            if n_run:  # it goes along with a level that is run anyway
                seconds = (widths[n_run + 1] - widths[n_run]) * self.costs.draft + self._another[n]
                if survival * self.acceptance.rate <= self._rate * seconds:
                    break
            mass += survival
            n_run += 1
        if mass <= self._needed[n]:
            return []
        self._levels.append(n_run)
        return level[:n_run]

    def picks(self) -> list[int]:
        tree = self.tree
        order = tree.ranked()[: self.affordable]
        n, worth = self._most_worth(order)
        self._gain, self._branches = 0.0, False
        if not tree.is_chain:
            path = tree.first_choices(set(order))
            if order[:n] != path[:n]:
                n_chain, worth_chain = self._most_worth(path)
                self._gain = max(0.0, worth - self._rate * self._tree_costs.branching - worth_chain)
                self._branches = self._is_forced or self._gain > 0.0
                if not self._branches:
                    order, n = path, n_chain
                    self._tree_costs.branching *= DOUBTED
        return tree.in_order({*order[:n]})

    def _most_worth(self, order: list[int]) -> tuple[int, float]:
        """How many nodes in that order are the most worth, at least one, and what: tokens, less those that their pass costs."""
        survivals, passes, rate = self.tree.survivals, self._passes, self._rate
        gain, n_best, best = 0.0, 0, -np.inf
        for n, node in enumerate(order, 1):
            gain += survivals[node]
            worth = gain - rate * passes[n + 1]
            if worth > best:
                n_best, best = n, worth
        return n_best, best

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        if not self.is_tree or not n_drafted:
            super().saw(n_drafted, n_accepted, pass_seconds, draft_seconds)
            return
        costs, branching = self.costs, 0.0
        if self._branches:
            branching = self._tree_costs.branching
            self._tree_costs.saw(pass_seconds - costs.of_last(n_drafted + 1), costs.of(1))
        as_a_chain = costs.of_draft(n_drafted, self._since_draft)  # which tells the costs of chains nothing new
        self._saw_round(n_drafted, n_accepted, pass_seconds + draft_seconds)
        self._saw_costs(n_drafted, pass_seconds - branching, as_a_chain)
        self._budget, self._since_draft = 0.0, 0
        if self._levels:
            quick = self._tree_costs.of_levels(costs, self._levels)
            self._tree_costs.looked(self._gain - self._rate * min(draft_seconds - quick, 4 * quick))


def prices(costs: Costs) -> tuple[list[float], list[float]]:
    """Seconds of passes over 0 to MAX_TOKENS tokens; and, of trees of 0 to MAX_GAMMA - 1 nodes, those that a node more takes.

    The latter as a share of those of a few nodes more, since passes get dearer in steps.
    """
    passes = np.array(costs.passes)
    after = np.minimum(np.arange(MAX_GAMMA)[:, None] + STEPS, MAX_GAMMA)
    before = np.arange(MAX_GAMMA)[:, None]
    another = ((passes[after + 1] - passes[before + 1]) / (after - before)).min(axis=1)
    return passes.tolist(), another.tolist()


class StaticTree(FixedLength):
    """Always a tree of the same shape, up to gamma deep: the nodes that are the likeliest by their ranks alone.

    rates: of candidates by rank, where those before them were not the token. Nothing that was drawn has a say, so that
    `rejection` may judge it; but what is behind an end mark, or has no probability, is left out.
    """

    is_tree = True

    def __init__(
        self,
        gamma: int,
        costs: Costs | None,
        acceptances: Sequence[Acceptance],
        end_marks: Container[int],
        rates: Sequence[float] = STATIC_RATES,
    ) -> None:
        super().__init__(gamma, costs)
        self.tree = CandidateTree(acceptances)
        self._end_marks, self._rates = end_marks, rates
        self._shape: list[list[int]] = [[]]
        self._shape_depth = 0
        self._places: dict[int, int] = {}  # of nodes in the shape

    def begins(self, most: int) -> bool:
        begins = super().begins(most)
        if self._shape_depth != self.most:
            self._shape, self._shape_depth = static_shape(self.most, self._rates), self.most
        self._places = {-1: 0}
        return begins

    def offers(self, node: int, tokens: list[int], scores: list[float]) -> None:
        children, first = self._shape[self._places[node]], len(self.tree.tokens)
        self.tree.add(node, tokens, scores, len(children), -1.0)
        self._places.update(zip(range(first, len(self.tree.tokens)), children, strict=False))

    def grows(self) -> list[int]:
        tree = self.tree
        level = [node for node in sorted(tree.next_level()) if self._shape[self._places[node]]]
        return [node for node in level if tree.tokens[node] not in self._end_marks]

    def picks(self) -> list[int]:
        return self.tree.in_order({*range(len(self.tree.tokens))})

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        if self._costs:  # of chains, which a tree's draft tells nothing new
            draft_seconds = self._costs.start + n_drafted * self._costs.draft
        super().saw(n_drafted, n_accepted, pass_seconds, draft_seconds)


def static_shape(depth: int, rates: Sequence[float]) -> list[list[int]]:
    """The children of the root and of each node, by rank: of all trees of such a depth and size the likeliest nodes' own."""
    most = min(MAX_GAMMA, max(STATIC_NODES, 2 * depth))
    children: list[list[int]] = [[]]
    heap = [(-rates[0], 0, 0, 1, 1.0)] if depth else []  # survival, parent, rank, level, what those before it leave
    while heap and len(children) <= most:
        negative, parent, rank, level, left = heapq.heappop(heap)
        node, survival = len(children), -negative
        children.append([])
        children[parent].append(node)
        if level < depth:
            heapq.heappush(heap, (-survival * rates[0], node, 0, level + 1, survival))
        if rank + 1 < len(rates):
            heapq.heappush(heap, (-(left - survival) * rates[rank + 1], parent, rank + 1, level, left - survival))
    return children
