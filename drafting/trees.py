"""Proposals that are trees of tokens, which have paid on no pair that was measured: nothing here runs unless asked for."""

import math
import time
from collections.abc import Callable, Container, Sequence

from ..decoding import Draft, Plan
from ..machine.vectors import Float32
from ..sampling import TARGET_NOISE, Sampler, Sampling
from ..text.vocabulary import Vocabulary
from ..transformer import Transformer, room_behind
from .estimates import Acceptance, Costs
from .model_drafter import ModelDrafter
from .settings import Settings
from .timing import COSTS_SECONDS
from .tree_planning import STATIC_RATES, WIDEST, AutoTree, StaticTree, TreeCosts, TreePlan, new_acceptances

TREE_SECONDS = 2e-3  # what a target's token has to take for "auto" to try trees: growing one costs up to 100 us of Python
TREE_WIDTHS = 2, 4, WIDEST  # of levels, timed as `timing` does passes


class TreeDrafter(ModelDrafter):
    """A smaller model that proposes several candidates for a place, and runs those that the plan wants to go on from at once.

    Candidates are the best under the noise of their place, which all branches share. plan: how a tree grows; `propose` takes it
    to have begun.
    """

    def __init__(
        self, model: Transformer, sampler: Sampler, noise: Callable[[int], int], end_marks: Container[int], plan: TreePlan
    ) -> None:
        super().__init__(model, sampler, noise, end_marks)
        self._trees, self.plan = model, plan

    def propose(self, tokens: list[int], plan: Plan, tail: Sequence[int] = ()) -> Draft:
        growing, model = self.plan, self._trees
        if tail or not growing.is_tree:
            return super().propose(tokens, plan, tail)
        growing.tree.plant(tokens)
        if self._adjusting:
            self._adjusting.follow(tokens)
        start, stream = self._start(len(tokens) + min(plan.most, model.n_positions // 2)), self._noise(len(tokens))
        text = self._seen(tokens, start)
        first_room = room_behind(len(text), model.n_positions, model.n_short)
        nodes, parents = list[int](), list[int]()  # that the draft has run behind the text, which a chain is part of
        places = {-1: -1}  # of the plan's nodes among those
        rows: dict[int, Float32] = {}  # what the candidates behind a node were drawn from
        level, depth = [-1], 0
        with model.lock:
            while level and depth <= first_room:
                if len(level) > 1 or nodes:
                    for node in level:
                        places[node] = len(nodes)
                        nodes.append(growing.tree.tokens[node])
                        parents.append(places.get(growing.tree.parents[node], -1))
                    logits = model.forward_tree(text, nodes, parents, len(level))
                else:
                    if depth:
                        text.append(growing.tree.tokens[level[0]])
                    logits = model.forward(text)
                room = self._draw_room(len(rows) + len(level))[len(rows) :]
                for node, row, q in zip(level, logits, room, strict=False):
                    if self._adjusting:
                        row = self._adjusting.adjusted(row, growing.tree.path(node))
                    found, scores = self._sampler.draw_few(q, row, stream, len(tokens) + depth)
                    rows[node] = q
                    growing.offers(node, found, scores)
                level, depth = growing.grows(), depth + 1
        tree, picked = growing.tree, growing.picks()
        order = {node: i for i, node in enumerate(picked)} | {-1: -1}
        above = [order[tree.parents[node]] for node in picked]
        is_chain = above == [*range(-1, len(above) - 1)]
        drawn_from = [rows[tree.parents[node]] for node in picked]
        return Draft([tree.tokens[node] for node in picked], drawn_from, None if is_chain else above)


class Trees:
    """What trees of a draft cost and bring, over texts. models: all that run them, the draft's last."""

    def __init__(
        self, models: Sequence[Transformer], vocabulary: Vocabulary, end_marks: Container[int], acceptance: Acceptance
    ) -> None:
        self._models, self._end_marks = models, end_marks
        self._sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
        self._acceptances = new_acceptances(acceptance)
        self._costs: TreeCosts | None = None

    def drafter(
        self, model: Transformer, settings: Settings, costs: Costs | None, sampler: Sampler, noise: Callable[[int], int]
    ) -> TreeDrafter | None:
        """What drafts a text by such settings, with its plan; None where chains are to. model: the draft, on the text's seat."""
        plan: TreePlan
        is_forced, acceptances, marks = settings.tree == "on", self._acceptances, self._end_marks
        if settings.follows_clock and costs and self._costs and (is_forced or costs.of(1) > TREE_SECONDS):
            plan = AutoTree(costs, self._costs, acceptances, marks, is_forced)
        elif is_forced:
            rates = [acceptance.rate for acceptance in acceptances] if settings.verify == "coupled" else STATIC_RATES
            plan = StaticTree(settings.n_drafted, costs, acceptances, marks, rates)
        else:
            return None
        return TreeDrafter(model, sampler, noise, marks, plan)

    def run(self) -> None:
        """A tree of each model, a path of it kept, and draws of several candidates: so that all that they need is compiled."""
        for model in self._models:
            with model.lock:
                self._sampler.draw_few(self._sampler.new_probs(), model.forward([0])[0], TARGET_NOISE, 1)
                if model.n_positions > 1:
                    model.forward_tree([0], [0, 0], [-1, -1])
                    model.keep([1])

    def measure(self) -> None:
        """What the draft's passes over siblings take beside those over a chain, with their draws: the least of several."""
        jobs = [(1, False), (WIDEST, False), *((n, True) for n in TREE_WIDTHS)]
        if self._models[-1].n_positions <= WIDEST:
            self._costs = TreeCosts.measured({}, 0.0)
            return
        least = dict.fromkeys(jobs, math.inf)
        deadline = time.perf_counter() + COSTS_SECONDS
        while math.inf in least.values() or time.perf_counter() < deadline:
            for job in jobs:
                least[job] = min(least[job], self._seconds(*job))
        token, branching = least[1, False], least[WIDEST, True] - least[WIDEST, False]
        widths = {n: least[n, True] / token for n in TREE_WIDTHS}
        self._costs = TreeCosts.measured(widths, min(branching, token))  # more is noise

    def _seconds(self, n: int, is_tree: bool) -> float:
        """Of a pass of the draft over so many tokens."""
        probs, draft = self._sampler.new_probs(), self._models[-1]
        begin = time.perf_counter()
        with draft.lock:
            logits = draft.forward_tree([0], [0] * n, [-1] * n, n) if is_tree else draft.forward([0] * (n + 1), n)
            for row in logits:
                self._sampler.draw_few(probs, row, TARGET_NOISE, n)
        return time.perf_counter() - begin
