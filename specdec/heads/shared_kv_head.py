"""Heads that read the KV cache of their target and have none of their own, such as Gemma 4's assistant.

With 32 of 2,048 centroids, a guess of an assistant of E2B's size takes 1.0 to 1.3 ms; over all 262,144 ids it takes 5.6 to 10.1.

Shapes: R rows of the classifier.
"""

from collections.abc import Iterable

import numpy as np

from specdec.argument_checks import count_common_prefix
from specdec.head_config import AssistantConfig
from specdec.heads.gemma4_assistant import AssistantBuffers, Gemma4Assistant
from specdec.heads.head import Head, HeadCache
from specdec.layers.buffers import Buffers
from specdec.model.kv_cache import KVCache
from specdec.model_config import ModelConfig, get_assistant_config, require_type
from specdec.runtime.memory import align_to_cache_line
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import PANEL_ROWS, Array, Float32, round_up


class SharedKVHead(Head):
    """A draft head without keys and values of its own, which attends to those of its target. Everything else is as in `Head`.

    With centroids, target_ids (R,) gives the ids of the classifier's rows, grouped by centroid. The KV cache format is the
    target's.
    """

    def new_draft_cache(self, target_cache: KVCache) -> "SharedKVHeadCache":
        """Return a cache for the sequence that target_cache holds; see `Head.new_draft_cache`."""
        return SharedKVHeadCache(self, target_cache)


class SharedKVHeadCache(HeadCache):
    """The state of a head that reads the KV cache of its target: programs over the target's buffers, and the last state.

    Its logits depend only on the sequence and on the position where the draft tokens begin. If the target holds all tokens but
    the last, the head predicts from the state of the last token that the target holds. After a draft token it predicts from its
    own output. The programs are rebuilt when the target's buffers have grown.
    """

    _buffers: AssistantBuffers  # type: ignore[assignment]
    _target_buffers: Buffers  # which the programs use
    _candidate_classifier: tuple[Array, Executor] | None  # panels of the classifier's candidate rows, and their program
    _last_pass: tuple[int, list[int]] | None  # where the draft tokens of the last pass begin, and the tokens up to its own

    def can_draft(self, tokens: list[int]) -> bool:
        """Return whether the head can draft after the tokens, since the target holds the hidden states of all but the last."""
        with self.model.lock, self.target_cache.model.lock:
            return 0 < len(tokens) - 1 <= len(self.target_cache.get_hidden_states(tokens, 0))

    def trim_classifier(self, eos_tokens: Iterable[int]) -> None:
        """Do nothing: the centroids of a head choose its candidates, and the programs change with the target's buffers."""

    def count_prefill_tokens(self, tokens: list[int]) -> int:
        """Return 0, since a prefill has nothing to run for a head without a KV cache."""
        return 0

    def run(self, tokens: list[int], n_logits: int, n_total: int = 0) -> Float32:
        """Return logits (n_logits, V) at the last tokens, each from the target's or the head's state of the token before.

        The arguments are those of `KVCache.run`; without a KV cache, the final length does not matter.

        Raises:
            ValueError: If the target holds no hidden states of the sequence.
        """
        self.model.n_passes += 1
        logits = self.head.vocab_mapper.get_buffer(n_logits)
        if n_logits:
            self.target_cache.export_kv(lambda buffers, held, snapshots: self._fill_logits(logits, tokens, buffers, held))
        return logits

    def _fill_logits(self, logits: Float32, tokens: list[int], target_buffers: Buffers, held: list[int]) -> None:
        """Fill a logits array for the last tokens of a sequence; requires exclusive access to the target's buffers.

        Args:
            logits: The array to fill, (n, V) for the last n tokens.
            tokens: All tokens of the sequence.
            target_buffers: The target's buffers; the programs are rebuilt if these are new.
            held: The tokens in the target's KV cache.

        Raises:
            ValueError: If the target holds no hidden states of the sequence.
        """
        if target_buffers is not self._target_buffers:
            self._build_for_target(target_buffers)
        n_held = count_common_prefix(held, tokens, len(tokens))
        for position, row in enumerate(logits, len(tokens) - len(logits)):
            first = min(position, n_held)
            if first == 0:
                raise ValueError(
                    f"the target holds no hidden states of the sequence; {position} of {position} tokens would run without"
                )
            continues = position > first and self._last_pass == (first, tokens[:position])
            for i in range(position if continues else first, position + 1):
                self._run_token(tokens, i, first)
            self._write_logits(row)

    def _run_token(self, tokens: list[int], position: int, first: int) -> None:
        """Run a pass over one token, which leaves the next state and logits (or the nearness of centroids) in the buffers.

        Args:
            tokens: All tokens of the sequence.
            position: The position of the token.
            first: The number of tokens that the target holds; the token at this position is the last before draft tokens.
        """
        b, width = self._buffers, self.head.target.config.dim
        target_states = self._target_buffers.hidden_states
        assert target_states is not None
        b.pairs[0, 0, width : 2 * width] = b.outputs[0, :width] if position > first else target_states[first - 1]
        b.tokens[:1] = self._check_tokens("tokens", tokens[position : position + 1])
        self._last_pass = None
        self.executor(1, first - 1, 1, self.model.n_threads)
        self._last_pass = first, tokens[: position + 1]

    def _write_logits(self, logits: Float32) -> None:
        """Write the logits of the last pass, mapped to the target's ids, to an array (V,); with centroids compute them first."""
        head = get_assistant_config(self.model.config)
        if not head.n_centroids:
            logits[:] = self._buffers.logits[0, : len(logits)]
            return
        assert self._candidate_classifier and self.head.target_ids is not None
        panels, executor = self._candidate_classifier
        nearest = np.argsort(-self._buffers.nearness[0, : head.n_centroids], kind="stable")[: head.centroid_top_k]
        all_panels = self.model.weights.matrices["classifier"].panels
        panels.reshape(head.centroid_top_k, -1)[:] = all_panels.reshape(head.n_centroids, -1)[nearest]
        executor(1, 0, 1, self.model.n_threads)
        logits[:] = -np.inf
        ids = self.head.target_ids.reshape(head.n_centroids, -1)[nearest].ravel()
        logits[ids] = self._buffers.logits[0, : len(ids)]

    def _allocate(self, capacity: int) -> None:
        """Allocate buffers and build programs for the target's current buffers; `capacity` is not used."""
        self.target_cache.export_kv(lambda buffers, held, snapshots: self._build_for_target(buffers))

    def _build_for_target(self, target_buffers: Buffers) -> None:
        """Allocate the head's buffers with as many slots as the target's, and build the programs that use both."""
        model, target = self.model, self.head.target
        buffers = require_type(model.grow_buffers(target_buffers.sizes.n_positions, 0, None), AssistantBuffers)
        buffers.share_kv(model.config, target.config, target_buffers)
        program = model.architecture.program(model.config, model.weights, buffers)
        executor, candidates = Executor(program), self._make_candidate_classifier(buffers)
        # the fields change together, after everything that may fail
        self._target_buffers, self.executor, self._buffers = target_buffers, executor, buffers
        self._candidate_classifier, self._last_pass = candidates, None

    def _make_candidate_classifier(self, buffers: Buffers) -> tuple[Array, Executor] | None:
        """Allocate panels for the classifier's candidate rows, and build the program that computes their logits.

        Returns:
            The panels, to be filled before each run, and the program; None without centroids.
        """
        head, classifier = get_assistant_config(self.model.config), self.model.weights.matrices["classifier"]
        if not head.n_centroids:
            return None
        n = round_up(head.n_candidates, PANEL_ROWS) // PANEL_ROWS
        panels = align_to_cache_line(np.zeros((n, *classifier.panels.shape[1:]), classifier.panels.dtype))
        architecture = require_type(self.model.architecture, Gemma4Assistant)
        program = architecture.classify_candidates(self.model.config, self.model.weights, buffers, panels)
        return panels, Executor(program)


def get_head_class(config: ModelConfig) -> type[Head]:
    """Return the class of a draft head with this configuration."""
    return SharedKVHead if isinstance(config.head, AssistantConfig) else Head
