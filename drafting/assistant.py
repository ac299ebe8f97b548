"""Gemma 4's own draft on its target, whose keys and values it reads: a head without a cache. Knows no drafter."""

from dataclasses import replace
from typing import Any

import numpy as np

from ..architectures import Config, Weights
from ..architectures.assistant import assistant_of, says, taken
from ..architectures.plan import Buffers
from ..machine.memory import aligned
from ..machine.programs import Runner
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import Float32, Int64, round_up
from ..transformer import KV, Node, Transformer
from .heads import Head


class Assistant(Head):
    """An assistant: what it says depends on the text alone, and on where in it the guesses begin.

    Behind a text all of whose tokens but the last the target holds, it guesses by the state of the last one that it holds, and
    behind a guess by its own output. Its programs run over the target's buffers, and are written anew where these have grown.
    target_ids: of each row of the classifier, where centroids choose among them, which lie one's rows behind the other's.
    All else as `Head`; what keys and values are kept in is the target's.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        target: Transformer,
        target_ids: Int64 | None = None,
        n_threads: int | None = None,
        n_positions: int | None = None,
        kv: KV = "auto",
    ) -> None:
        self._caches: list[dict[str, Any]] = []  # of each layer the target's arrays, over which the programs are
        self._ran: tuple[int, list[int]] | None = None  # where the guesses of the last pass begin, and the text up to its token
        self._chosen: tuple[Any, Runner] | None = None  # strips of the classifier that centroids chose, and what multiplies them
        super().__init__(config, weights, target, target_ids, n_threads, n_positions, target.kv)

    def drafts_for(self, tokens: list[int]) -> bool:
        """Whether the target holds all of a text but its last token, and more than nothing."""
        with self.lock, self.target.lock:
            return 0 < len(tokens) - 1 <= len(self._states(tokens, 0))

    def unread(self, tokens: list[int]) -> int:
        """0: it holds nothing of a text."""
        return 0

    def _forward(self, tokens: list[int], nodes: list[Node], n_logits: int, n_total: int = 0) -> Float32:
        """Logits at the last of the tokens; of a text that the target holds, each by the state of the token before."""
        self._turn.n_passes += 1
        logits = self._by_target.room(n_logits)
        with self.target.lock:
            n_held = len(self._states(tokens, 0))
            for row, at in enumerate(range(len(tokens) - n_logits, len(tokens))):
                self._guess(tokens, at, min(at, n_held))
                self._say(logits[row])
        return logits

    def _guess(self, tokens: list[int], at: int, first: int) -> None:
        """Run the token at that place of a text; guesses begin behind the token at `first`."""
        if first == 0:
            raise ValueError(f"the target holds no hidden states of the text; {at} of {at} tokens would be guesses")
        self._follow_target()
        goes_on = at > first and self._ran == (first, tokens[:at])
        for place in range(at if goes_on else first, at + 1):
            self._run_token(tokens, place, first)

    def _run_token(self, tokens: list[int], at: int, first: int) -> None:
        b, width = self._buffers, self.target.config.dim
        state = b.outputs[0] if at > first else self.target.hidden(tokens, first - 1)[0]
        self._ran = None
        b.pairs[0, 0, width : 2 * width] = state[:width]
        b.tokens[:1] = self._checked("tokens", tokens[at : at + 1])
        self._runner(1, first - 1, 1, self._n_threads)
        self._ran = first, tokens[: at + 1]

    def _say(self, logits: Float32) -> None:
        """What the last pass says, by the target's ids."""
        head = assistant_of(self._config)
        if not head.n_centroids:
            logits[:] = self._buffers.logits[0, : len(logits)]
            return
        assert self._chosen and self.target_ids is not None
        strips, runner = self._chosen
        nearest = np.argsort(-self._buffers.nearness[0, : head.n_centroids], kind="stable")[: head.n_chosen]
        whole = self._weights.matrices["classifier"].strips
        strips.reshape(head.n_chosen, -1)[:] = whole.reshape(head.n_centroids, -1)[nearest]
        runner(1, 0, 1, self._n_threads)
        logits[:] = -np.inf
        ids = self.target_ids.reshape(head.n_centroids, -1)[nearest].ravel()
        logits[ids] = self._buffers.logits[0, : len(ids)]

    def _follow_target(self) -> None:
        """Programs over the buffers that the target has now."""
        caches = self._caches_of_target()
        if any(own[name] is not now[name] for own, now in zip(self._caches, caches, strict=True) for name in own):
            self._build(0, ())

    def _caches_of_target(self) -> list[dict[str, Any]]:
        target = self.target
        return target.look(lambda buffers, held, snapshots: taken(self._config, target.config, target.weights, buffers))

    def _build(self, capacity: int, layers: tuple[int, ...]) -> None:
        """Buffers for as many slots as the target has, and the programs over them and its caches."""
        caches = self._caches_of_target()
        config, weights, architecture, common = self._config, self._weights, self._architecture, self._turn.common
        capacity = max(caches[0]["values"].shape[2], capacity)
        room = self._room(capacity, 0)
        buffers = architecture.new_buffers(config, weights, room, None, common)
        if capacity > common.n_positions:
            architecture.fill(config, buffers, common.n_positions)
            common = architecture.common(config, weights, room, buffers)
        program = architecture.program(config, weights, Buffers(**vars(buffers) | {"taken": caches})).program({})
        runner, chosen = Runner(program), self._chooser(buffers)
        # all or nothing, as a transformer's
        self._runner, self._buffers, self._capacity, self._turn.common, self._caches, self._chosen, self._ran = (
            runner, buffers, capacity, common, caches, chosen, None,
        )  # fmt: skip

    def _chooser(self, buffers: Buffers) -> tuple[Any, Runner] | None:
        """Room for the strips that centroids choose, and the program that multiplies them."""
        head, classifier = assistant_of(self._config), self._weights.matrices["classifier"]
        if not head.n_centroids:
            return None
        n = round_up(head.n_said, STRIP_ROWS) // STRIP_ROWS
        strips = aligned(np.zeros((n, *classifier.strips.shape[1:]), classifier.strips.dtype))
        chosen = replace(classifier, strips=strips)
        return strips, Runner(says(self._config, self._weights, buffers, chosen).program({}))
