"""Assistants: drafts that read the keys and values of the target they were made for, heads without a cache. Knows no drafter."""

from dataclasses import replace
from typing import Any

import numpy as np

from specdec.heads.gemma4_assistant import assistant_of, says, taken
from specdec.heads.head import Head
from specdec.layers.base import Buffers
from specdec.layers.rope import Node
from specdec.runtime.memory import aligned
from specdec.runtime.program import Runner
from specdec.runtime.simd import Float32, round_up
from specdec.runtime.tile import STRIP_ROWS
from specdec.validation import n_common


class Assistant(Head):
    """An assistant: what it says depends on the text alone, and on where in it the guesses begin.

    Behind a text all of whose tokens but the last the target holds, it guesses by the state of the last one that it holds, and
    behind a guess by its own output. Its programs run over the target's buffers, and are written anew where these have grown.
    target_ids: of each row of the classifier, where centroids choose among them, which lie one's rows behind the other's.
    All else as `Head`; what keys and values are kept in is the target's.
    """

    _of_target: Buffers  # over which the programs are
    _chosen: tuple[Any, Runner] | None  # strips of the classifier that centroids chose, and what multiplies them
    _ran: tuple[int, list[int]] | None  # where the guesses of the last pass begin, and the text up to its token

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
        logits = self.by_target.room(n_logits)
        if n_logits:
            self.target.look(lambda buffers, held, snapshots: self._guess_all(logits, tokens, buffers, held))
        return logits

    def _guess_all(self, logits: Float32, tokens: list[int], of_target: Buffers, held: list[int]) -> None:
        """Fill the logits, with the target's buffers to itself, which hold those tokens."""
        if of_target is not self._of_target:
            self._build_over(of_target)
        n_held = n_common(held, tokens, len(tokens)) if self.target.hidden_layers == self._taken else 0
        for at, row in enumerate(logits, len(tokens) - len(logits)):
            first = min(at, n_held)
            if first == 0:
                raise ValueError(f"the target holds no hidden states of the text; {at} of {at} tokens would be guesses")
            goes_on = at > first and self._ran == (first, tokens[:at])
            for place in range(at if goes_on else first, at + 1):
                self._run_token(tokens, place, first)
            self._say(row)

    def _run_token(self, tokens: list[int], at: int, first: int) -> None:
        """A pass over the token at that place of a text, where guesses begin behind the token at `first`."""
        b, width = self._buffers, self.target.config.dim
        state = b.outputs[0, :width] if at > first else self._of_target.hidden_states[first - 1]
        b.pairs[0, 0, width : 2 * width] = state
        b.tokens[:1] = self._checked("tokens", tokens[at : at + 1])
        self._ran = None
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

    def _build(self, capacity: int, layers: tuple[int, ...]) -> None:
        self.target.look(lambda buffers, held, snapshots: self._build_over(buffers))

    def _build_over(self, of_target: Buffers) -> None:
        """Buffers for as many slots as the target's have, and the programs over both."""
        config, weights, architecture, common = self._config, self._weights, self._architecture, self._turn.common
        caches = taken(config, self.target.config, self.target.weights, of_target)
        room = self._room(caches[0]["values"].shape[2], 0)
        buffers, common = architecture.grown(config, weights, room, None, common)
        runner = Runner(architecture.program(config, weights, Buffers(**vars(buffers) | {"taken": caches})).program({}))
        chosen = self._chooser(buffers)
        # all or nothing, as a transformer's
        self._of_target, self._runner, self._buffers, self._turn.common, self._chosen, self._ran = (
            of_target, runner, buffers, common, chosen, None,
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
