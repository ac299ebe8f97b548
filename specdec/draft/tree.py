"""Proposals that are trees of tokens, which have paid on no pair that was measured: nothing here runs unless asked for."""

import functools
import heapq
from collections.abc import Sequence

from specdec.draft.model import ModelDrafter
from specdec.draft.policy import MAX_GAMMA
from specdec.engine.decoding import LengthPolicy
from specdec.model.transformer import Transformer, room_behind
from specdec.runtime.simd import Float32
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.text.vocabulary import Vocabulary
from specdec.verification import Draft

RATES = 0.75, 0.5, 0.4  # of the candidates for a place, how often each is the token where those before it are not
N_NODES = 15  # of a tree: with the text's last token a pass of 16; twice its depth where that is more
ROOT = 0  # in a shape, the text's end


class TreeDrafter(ModelDrafter):
    """A smaller model that proposes several candidates for a place: a tree as deep as the policy has proposals long.

    Candidates are the best under the noise of their place, which all branches share. Trees have the `shape_of` their depth, so
    that nothing that was drawn has a say, and `rejection` may judge them; but what is behind an end mark, or has no probability,
    is left out.
    """

    _model: Transformer

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """tail: none."""
        model, shape, stream = self._model, shape_of(policy.max_tokens), self._noise(len(tokens))
        if self._adjusting:
            self._adjusting.follow(tokens)
        text = self._seen(tokens, self._start(len(tokens) + min(policy.max_tokens, model.n_positions // 2)))
        room = room_behind(len(text), model.n_positions, model.n_short)
        above = {child: node for node, children in enumerate(shape) for child in children}
        paths: dict[int, list[int]] = {ROOT: []}  # of nodes in the shape: the tokens behind the text
        drawn_from = dict[int, Float32]()  # and q
        run: dict[int, int] = {ROOT: -1}  # nodes behind which the draft looks, and where they are in `nodes`
        nodes, parents = list[int](), list[int]()
        firsts, level = [ROOT], [ROOT]  # the path of first choices, and the newest nodes that have children
        with model.lock:
            while level and len(paths[level[0]]) <= room:
                for node in level if drawn_from else []:
                    run[node] = len(nodes)
                    nodes.append(paths[node][-1])
                    parents.append(run[above[node]])
                logits, room_of_q = model.forward_tree(text, nodes, parents, len(level)), self._draw_room(len(run))
                for node, row in zip(level, logits, strict=True):
                    q, path = room_of_q[run[node] + 1], paths[node]
                    if self._adjusting:
                        row = self._adjusting.adjusted(row, path)
                    found, _ = self._sampler.draw_few(q, row, stream, len(tokens) + len(path))
                    children = shape[node][: len(found)]
                    for child, token in zip(children, found, strict=False):
                        paths[child], drawn_from[child] = [*path, token], q
                    firsts += children[:1] if node == firsts[-1] else []
                level = [child for node in level for child in shape[node] if shape[child] and child in paths]
                level = [node for node in level if paths[node][-1] not in self._end_marks]
        order = sorted(drawn_from, key=lambda node: node not in firsts)  # a cache keeps the path that is laid first where it is
        places = {node: i for i, node in enumerate([ROOT, *order], -1)}
        links = [places[above[node]] for node in order]
        is_chain = links == [*range(-1, len(links) - 1)]
        said = [paths[node][-1] for node in order]
        return Draft(said, [drawn_from[node] for node in order], None if is_chain else links)


@functools.cache
def shape_of(depth: int) -> list[list[int]]:
    """The children of the root and of each node, by rank: of all trees of such a depth and size the likeliest nodes' own.

    A node is as likely as its path by RATES (Sequoia, arXiv:2402.12374; OPT-Tree, arXiv:2406.17276).
    """
    most = min(MAX_GAMMA, max(N_NODES, 2 * depth))
    children: list[list[int]] = [[]]
    heap = [(-RATES[0], ROOT, 0, 1, 1.0)] if depth else []  # survival, parent, rank, level, what those before it leave
    while heap and len(children) <= most:
        negative, parent, rank, level, left = heapq.heappop(heap)
        node, survival = len(children), -negative
        children.append([])
        children[parent].append(node)
        if level < depth:
            heapq.heappush(heap, (-survival * RATES[0], node, 0, level + 1, survival))
        if rank + 1 < len(RATES):
            heapq.heappush(heap, (-(left - survival) * RATES[rank + 1], parent, rank + 1, level, left - survival))
    return children


def run_trees(models: Sequence[Transformer], vocabulary: Vocabulary) -> None:
    """A tree of each model, a path of it kept, and draws of several candidates: so that all that they need is compiled."""
    sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
    for model in models:
        with model.lock:
            sampler.draw_few(sampler.new_probs(), model.forward([0])[0], TARGET_NOISE, 1)
            if model.n_positions > 1:
                model.forward_tree([0], [0, 0], [-1, -1])
                model.keep([1])
