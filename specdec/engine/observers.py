"""Observers of a scheduler, which save prompts and learn costs (metrics.py has one that counts). They change no output."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specdec.draft.draft_length import CostModel
from specdec.draft.model_bundle import ModelBundle
from specdec.engine.autotuner import Autotuner
from specdec.engine.model_runner import Batch, Results
from specdec.engine.sequence import Sequence, SequenceStatus
from specdec.events import Step
from specdec.speculative import Verified

if TYPE_CHECKING:
    from specdec.engine.disk_prompt_cache import PromptCache


class StepObserver:
    """A base class of observers, whose methods do nothing by default."""

    def on_prompt(self, sequence: Sequence) -> None:
        """Take note of a sequence whose prompt has been prefilled."""

    def on_pass(self, batch: Batch, results: Results, steps: Mapping[Sequence, Step]) -> None:
        """Take note of a forward pass, after its tokens were added to the sequences and before finished sequences end.

        Args:
            batch: What the pass ran.
            results: What it returned.
            steps: The step of each sequence that decoded without an error.
        """

    def on_end(self, sequence: Sequence) -> None:
        """Take note of a sequence that has ended, as its status says, before its slot is released."""


class PromptSaver(StepObserver):
    """An observer that keeps the KV caches of prompts on disk, and the tokens of ended sequences for looked-up drafts.

    Args:
        bundle: The models.
        prompt_cache: Where to keep both; None to keep only the tokens, in memory.
    """

    def __init__(self, bundle: ModelBundle, prompt_cache: "PromptCache | None") -> None:
        """Save nothing yet."""
        self._bundle, self._prompt_cache = bundle, prompt_cache

    def on_prompt(self, sequence: Sequence) -> None:
        """Save the prompt."""
        self._save(sequence, sequence.request.prompt)

    def on_pass(self, batch: Batch, results: Results, steps: Mapping[Sequence, Step]) -> None:
        """Save what the KV caches hold of prompts that are being prefilled."""
        for sequence, _ in batch.chunks:
            if not isinstance(results.outcomes.get(sequence), Exception):
                self._save(sequence, sequence.request.prompt, False)

    def on_end(self, sequence: Sequence) -> None:
        """Save the whole sequence, unless it failed or never had a slot."""
        if sequence.status is SequenceStatus.FAILED or not sequence.has_started:
            return
        if self._bundle.uses_lookup:
            slot = sequence.slot
            slot.memory.add(sequence.tokens)
            if self._prompt_cache:
                with self._prompt_cache.report_failures():
                    self._prompt_cache.save_memory(slot.caches.target, slot.memory, slot.cache_salt)
        self._save(sequence, sequence.tokens)

    def _save(self, sequence: Sequence, tokens: list[int], is_prefilled: bool = True) -> None:
        """Save the target's KV cache of the tokens; `is_prefilled` says whether their prefill is complete."""
        if self._prompt_cache:
            with self._prompt_cache.report_failures():
                self._prompt_cache.save(sequence.cache, tokens, is_prefilled, sequence.slot.cache_salt)


class CostRecorder(StepObserver):
    """An observer of the time of passes, for the number of threads, the size of prefill chunks, and the draft length.

    Args:
        autotuner: The autotuner of the models.
        costs: The cost model of the scheduler; None for drafts of fixed length.
        is_saved: Whether the costs are kept for later sequences.
    """

    def __init__(self, autotuner: Autotuner, costs: CostModel | None, is_saved: bool) -> None:
        """Record nothing yet."""
        self._autotuner, self._costs, self._is_saved = autotuner, costs, is_saved

    def on_pass(self, batch: Batch, results: Results, steps: Mapping[Sequence, Step]) -> None:
        """Record the time of a pass that only prefilled, or only decoded without an error."""
        seconds = results.seconds
        if not batch.decoding:
            self._autotuner.prefill_limit.update(seconds)
        elif not batch.chunks and len(steps) == len(batch.decoding):
            n_tokens = batch.n_tokens
            if tuner := self._autotuner.thread_tuner:
                tuner.record_step(n_tokens, sum(step.draft_seconds for step in steps.values()) + seconds)
            if self._costs and len(steps) == self._costs.n_sequences:
                n_generated = sum(len(each.tokens) for each in results.outcomes.values() if isinstance(each, Verified))
                self._costs.end_pass(n_tokens, n_generated, seconds)

    def on_end(self, sequence: Sequence) -> None:
        """Save the costs, if they are kept and the sequence has decoded."""
        if self._costs and self._is_saved and sequence.n_steps:
            self._autotuner.save_costs(self._costs)
