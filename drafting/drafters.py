"""Whatever proposes tokens. Knows nothing of verifying."""

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ..architectures import Config
from ..machine.vectors import Float32, ceil_div
from ..sampling import Sampler
from ..transformer import Transformer, known
from .heads import Thrift
from .planning import Plan
from .tree_planning import TreePlan

SURE = 2.0  # margin from which on a narrow head is not asked for its other tokens


@dataclass(frozen=True)
class Draft:
    """Proposed tokens; where a proposal ends may hang on its tokens and their q, on none that was drawn and left out.

    q: what each was drawn from, (1, V padded) a token; None where they were not drawn. parents: of each an earlier one's index,
    or -1; None where each follows the one before. Siblings were drawn from one q in their order, without replacement.
    """

    tokens: list[int]
    q: list[Float32] | None = None
    parents: list[int] | None = None

    def children(self, node: int) -> list[int]:
        """What is proposed behind a token, or, of -1, behind the text: indexes, the first choice first."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, tokens: list[int]) -> list[int]:
        """The proposed tokens from the text on that begin with those, as far as they are proposed; then first choices."""
        if self.parents is None:
            return self.tokens
        path, node = list[int](), -1
        while children := self.children(node):
            at = len(path)
            node = next((c for c in children if at < len(tokens) and self.tokens[c] == tokens[at]), children[0])
            path.append(self.tokens[node])
        return path


class Drafter(Protocol):
    """A proposal may be shorter than planned, and empty."""

    def get_ready(self, tokens: list[int]) -> None:
        """Take in a prompt."""

    def propose(self, tokens: list[int], plan: Plan) -> Draft:
        """Tokens that may follow tokens, as long as the plan, which has begun, goes on."""


class Model(Protocol):
    """What a drafter asks of a model: logits at the last tokens of a text, under a lock as long as they are read."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def config(self) -> Config: ...
    @property
    def n_positions(self) -> int: ...
    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32: ...


class ModelDrafter:
    """A smaller model that decodes one token after the other. Beyond its own seq_len it sees a sliding window.

    sampler: draws its tokens; noise: the stream of those from a position on; end_marks: the tokens behind which it
    proposes none. thrift: of a narrow head, for a text that does not hang on q.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        noise: Callable[[int], int],
        end_marks: Container[int],
        thrift: Thrift | None = None,
    ) -> None:
        self._model, self._sampler, self._noise, self._end_marks = model, sampler, noise, end_marks
        self._thrift = thrift
        self._n_rows = model.config.vocab_size  # the target may know more tokens
        self._q: list[Float32] = []

    def get_ready(self, tokens: list[int]) -> None:
        with self._model.lock:
            self._model.forward(self._seen(tokens, self._start(len(tokens)))[:-1], n_logits=0)

    def propose(self, tokens: list[int], plan: Plan, tail: Sequence[int] = ()) -> Draft:
        """tail: what may follow tokens: a proposal for that draft whose round it is (see `stages`)."""
        start = self._start(len(tokens) + len(tail) + min(plan.most, self._model.n_positions // 2))
        stream, text, n = self._noise(len(tokens)), self._seen([*tokens, *tail] if tail else tokens, start), 0
        with self._model.lock:
            is_narrow = self._thrift is not None and self._thrift.begins(tokens)
            while len(text) <= self._model.n_positions:
                q = self._draw_room(n + 1)[n]
                token, margin = self._next(q, text, stream, start + len(text), is_narrow)
                if token < 0:
                    break
                text.append(token)
                n += 1
                if not plan.goes_on(margin) or token in self._end_marks:
                    break
        return Draft(text[len(text) - n :], self._q[:n])

    def _next(self, q: Float32, text: list[int], stream: int, position: int, is_narrow: bool) -> tuple[int, float]:
        """The token behind a text, drawn from q, and its margin; of a narrow head that is not sure of it, of the whole one."""
        if not self._thrift or not is_narrow:
            return self._sampler.draw_surely(q, self._model.forward(text)[0], stream, position)
        token, margin = self._sampler.draw_surely(q, self._thrift.forward(text)[0], stream, position)
        is_enough = margin >= SURE
        if not is_enough:
            token, margin = self._sampler.draw_surely(q, self._thrift.widen()[0], stream, position)
        self._thrift.drew(token, is_enough)
        return token, margin

    def _draw_room(self, n: int) -> list[Float32]:
        """n rows of probabilities, valid until the next proposal."""
        while len(self._q) < n:
            self._q.append(self._sampler.new_probs())
        return self._q

    def _seen(self, tokens: list[int], start: int) -> list[int]:
        """What the draft sees of a text."""
        seen = tokens[start:]
        return seen if self._sampler.vocab_size <= self._n_rows else known(seen, self._n_rows)

    def _start(self, n_tokens: int) -> int:
        """Where the text begins that the draft sees: later, by half of its positions, where those cannot go on."""
        step = max(self._model.n_positions // 2, 1)
        return int(ceil_div(max(n_tokens - self._model.n_positions, 0), step)) * step


class TreeDrafter(ModelDrafter):
    """A smaller model that proposes several candidates for a place, and runs those that the plan wants to go on from at once.

    Candidates are the best under the noise of their place, which all branches share. plan: how a tree grows; `propose` takes it
    to have begun.
    """

    def __init__(
        self,
        model: Transformer,
        sampler: Sampler,
        noise: Callable[[int], int],
        end_marks: Container[int],
        plan: TreePlan,
        thrift: Thrift | None = None,
    ) -> None:
        super().__init__(model, sampler, noise, end_marks, thrift)
        self._trees, self._plan = model, plan

    def propose(self, tokens: list[int], plan: Plan, tail: Sequence[int] = ()) -> Draft:
        growing, model = self._plan, self._trees
        if tail or not growing.is_tree:
            return super().propose(tokens, plan, tail)
        growing.tree.plant(tokens)
        start, stream = self._start(len(tokens) + min(plan.most, model.n_positions // 2)), self._noise(len(tokens))
        text = self._seen(tokens, start)
        first_room = model.n_positions - len(text)
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
