"""Token trees as proposals. They were profitable on none of the measured pairs, so they are used only on request.

The included pair is 2.92 times as fast as its target with chains and 2.29 times with trees; played with a pass of 16 tokens that
takes 1.1 passes of one, 3.87 and 4.68 times.
"""

import functools
import heapq
from collections.abc import Sequence

from specdec.draft.draft_length import MAX_GAMMA
from specdec.draft.model_drafters import ModelDrafter
from specdec.model.kv_cache import KVCache
from specdec.model.model import get_token_headroom
from specdec.protocols import LengthPolicy
from specdec.runtime.simd import Float32
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary
from specdec.verification import Draft

CANDIDATE_ACCEPTANCE = 0.75, 0.5, 0.4  # probability that a candidate is the next token if those before it are not
N_NODES = 15  # of a tree, or twice its depth if that is more; with the sequence's last token a pass of 16
ROOT = 0  # node of a tree's shape that stands for the sequence's last token


class TreeDrafter(ModelDrafter):
    """A drafter that proposes token trees, with a smaller model that draws several candidates for each position.

    The policy gives the depth of a tree. The candidates are the best under the noise of their position, which all branches share.
    The shape of a tree depends only on its depth (`build_tree`) and not on drawn tokens, so that `rejection` can verify it. Nodes
    after an end-of-sequence token, or without probability, are left out.
    """

    has_variable_length = False
    _cache: KVCache

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """Return a tree of draft tokens after the sequence, of depth policy.max_tokens or less; without branches it is a chain.

        Args:
            tokens: The sequence.
            policy: Sets the depth of the tree.
            tail: Not used, since trees have no second-level drafter.
        """
        cache, model = self._cache, self._model
        shape, stream = build_tree(policy.max_tokens), self._get_stream(len(tokens))
        self._follow(tokens)
        visible = self._get_visible_tokens(
            tokens, self._find_window_start(len(tokens) + min(policy.max_tokens, model.n_positions // 2))
        )
        headroom = get_token_headroom(len(visible), model.n_positions, model.longrope_threshold)
        above = {child: node for node, children in enumerate(shape) for child in children}
        paths: dict[int, list[int]] = {ROOT: []}  # by node of the shape: its tokens after the sequence
        drawn_from = dict[int, Float32]()  # by node: q
        run: dict[int, int] = {ROOT: -1}  # nodes that the draft model runs, and their indices in `nodes`
        nodes, parents = list[int](), list[int]()
        firsts, level = [ROOT], [ROOT]  # the path of first choices, and the deepest nodes with children
        with model.lock:
            while level and len(paths[level[0]]) <= headroom:
                for node in level if drawn_from else []:
                    run[node] = len(nodes)
                    nodes.append(paths[node][-1])
                    parents.append(run[above[node]])
                logits, q_buffers = cache.forward_tree(visible, nodes, parents, len(level)), self._get_probs_buffers(len(run))
                for node, row in zip(level, logits, strict=True):
                    q, path = q_buffers[run[node] + 1], paths[node]
                    if self._logits_processor:
                        row = self._logits_processor.apply_to_copy(row, path)
                    candidates, _ = self._sampler.draw_candidates(q, row, stream, len(tokens) + len(path))
                    children = shape[node][: len(candidates)]
                    for child, token in zip(children, candidates, strict=False):
                        paths[child], drawn_from[child] = [*path, token], q
                    firsts += children[:1] if node == firsts[-1] else []
                level = [child for node in level for child in shape[node] if shape[child] and child in paths]
                level = [node for node in level if paths[node][-1] not in self._eos_tokens]
        order = sorted(drawn_from, key=lambda node: node not in firsts)  # the KV cache need not move a path that comes first
        indices = {node: i for i, node in enumerate([ROOT, *order], -1)}
        links = [indices[above[node]] for node in order]
        is_chain = links == [*range(-1, len(links) - 1)]
        drafted = [paths[node][-1] for node in order]
        return Draft(drafted, [drawn_from[node] for node in order], None if is_chain else links)


@functools.cache
def build_tree(depth: int) -> list[list[int]]:
    """Return the shape of the proposal tree for a depth: for the root and each other node, the numbers of its children.

    The children are ordered by rank. The tree has the most likely nodes. The probability of a node follows from
    CANDIDATE_ACCEPTANCE along its path (Sequoia, arXiv:2402.12374; OPT-Tree, arXiv:2406.17276).
    """
    n_nodes = min(MAX_GAMMA, max(N_NODES, 2 * depth))
    children: list[list[int]] = [[]]
    # negative survival, parent, rank, level, probability that the parent is accepted and no earlier sibling
    heap = [(-CANDIDATE_ACCEPTANCE[0], ROOT, 0, 1, 1.0)] if depth else []
    while heap and len(children) <= n_nodes:
        negative, parent, rank, level, remaining = heapq.heappop(heap)
        node, survival = len(children), -negative
        children.append([])
        children[parent].append(node)
        if level < depth:
            heapq.heappush(heap, (-survival * CANDIDATE_ACCEPTANCE[0], node, 0, level + 1, survival))
        if rank + 1 < len(CANDIDATE_ACCEPTANCE):
            heapq.heappush(
                heap, (-(remaining - survival) * CANDIDATE_ACCEPTANCE[rank + 1], parent, rank + 1, level, remaining - survival)
            )
    return children


def warm_up_trees(caches: Sequence[KVCache], vocabulary: SharedVocabulary) -> None:
    """Compile the code for token trees by running one on each cache; this overwrites the contents of the caches."""
    sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
    for cache in caches:
        with cache.model.lock:
            can_hold_nodes = cache.model.n_positions > 1
            logits = cache.forward_tree([0], [0, 0], [-1, -1]) if can_hold_nodes else cache.forward([0])
            sampler.draw_candidates(sampler.new_probs(), logits[0], TARGET_NOISE, 1)
            if can_hold_nodes:
                cache.commit_path([1])
