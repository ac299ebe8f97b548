"""Scheduler: continuous batching. Each step plans a batch, runs one forward pass over it, and commits what it verified.

A pass takes the last token of each decoding sequence and its draft tokens. The rest of its capacity goes to prefill chunks.
The logits at a position depend on that sequence's tokens alone, so each output equals the one without a batch. The command line
and the library run a scheduler with one sequence, the server one with many (engine_thread.py).
"""

import time
from collections import deque
from collections.abc import Iterator

from specdec.draft.draft_length import CostModel
from specdec.draft.settings import SpeculativeSettings
from specdec.engine.autotuner import Autotuner
from specdec.engine.decoding_setup import make_decoding_state
from specdec.engine.fair_share import FairShare
from specdec.engine.metrics import Metrics
from specdec.engine.model_runner import Batch, ModelRunner, PrefillChunk, Results, SequenceEvent
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.sequence import Sequence, SequenceStatus
from specdec.events import Event, PrefillProgress, Step
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.speculative import Verified

MAX_ADDED_PREFILL_S = 0.1  # that prefill chunks may add to a pass which decoding sequences wait for
MIN_PREFILL_CHUNK_TOKENS = 8
MIN_THROUGHPUT_SHARE = 0.97  # of the highest throughput; more sequences at once would only take memory

INTERRUPTED = "interrupted"  # the stop reason of aborted sequences


class Scheduler:
    """The scheduler of a target and its drafts, which generates up to max_running sequences in each forward pass.

    A conversation that continues finds its KV cache. Clients are equal: the client with the fewest running sequences is next, and
    one with less than its share of the slots need not wait for a slot. Passes interleave the clients. The prompts of a client
    wait while it is ahead of another running client in pass time. A scheduler belongs to one thread at a time.

    Args:
        autotuner: The autotuner of the models, which must be warmed up.
        settings: The settings of speculative decoding.
        prefix_cache: The KV caches, which schedulers may share.
        max_running: Sequences per pass; 0 for as many as raise the throughput.
        metrics: Counters to update; by default new ones.

    Attributes:
        max_running: Sequences per pass.
        waiting: The sequences that wait for a slot.
        running: The sequences that have one, ordered by their last run, the most recent last.
        metrics: Counters of what the scheduler has done.
    """

    def __init__(
        self,
        autotuner: Autotuner,
        settings: SpeculativeSettings,
        prefix_cache: PrefixCache,
        max_running: int = 1,
        metrics: Metrics | None = None,
    ) -> None:
        """Create a scheduler without sequences."""
        self._autotuner, self._settings, self._prefix_cache = autotuner, settings, prefix_cache
        self._bundle = autotuner.bundle
        self._costs: CostModel | None = autotuner.make_cost_model(settings, is_batch=max_running != 1)
        self.max_running = max_running or find_batch_size(self._costs)
        self._runner, self._shares = ModelRunner(self._bundle.target), FairShare(self.max_running)
        self._recompute_lengths = self._bundle.recompute_lengths
        self.waiting, self.running = deque[Sequence](), list[Sequence]()
        self.metrics = metrics or Metrics()
        self._is_prefill_turn = False  # since the last pass had no capacity left for prefill chunks

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence, which waits for a slot."""
        self.waiting.append(sequence)

    def stream(self, sequence: Sequence) -> Iterator[Event | PrefillProgress]:
        """Add a sequence, run steps until it ends, and yield the events of all sequences.

        Closing the iterator ends the sequence early. At the end the slot is released and adaptive settings save measured costs.

        Raises:
            Exception: The error of any sequence that fails.
        """
        self.add(sequence)
        try:
            while not sequence.is_finished:
                batch = self.schedule()
                yield from _get_events(batch.events)  # a view shows a proposal before the pass that verifies it
                yield from _get_events(self.run(batch))
        finally:
            sequence.cancel()
            self.reap()
            if self._costs and self._settings.is_adaptive:
                self._autotuner.save_costs(self._costs)

    def step(self) -> list[SequenceEvent]:
        """Plan a batch and run it; return all events and errors, in order."""
        batch = self.schedule()
        return batch.events + self.run(batch)

    def schedule(self) -> Batch:
        """Remove cancelled sequences, admit waiting ones, let them propose drafts, and return what the next pass runs."""
        batch = Batch()
        self.reap()
        if self.waiting:
            self._admit(batch)
        ready: list[Sequence] = []
        prefilling: list[Sequence] = []  # together at most max_running
        for sequence in self._shares.interleave(self.running):
            if len(prefilling) + len(ready) == self.max_running:
                break
            if sequence.status is SequenceStatus.PREFILL and self._prepare(sequence, batch):
                prefilling.append(sequence)
            if sequence.status in (SequenceStatus.DECODE, SequenceStatus.VERIFY):
                ready.append(sequence)
        if not self._is_prefill_turn:
            max_tokens = MAX_BATCH_TOKENS - (MIN_PREFILL_CHUNK_TOKENS if prefilling else 0)
            self._propose(ready, max_tokens, batch)
        if prefilling:
            prefilling = self._shares.hold_back(prefilling, batch.decoding)
            if not (batch.decoding and batch.decoding[0].has_tree):  # a tree runs alone
                batch.chunks = self._select_prefill_chunks(prefilling, batch.decoding)
        self._is_prefill_turn = bool(prefilling) and not batch.chunks
        return batch

    def run(self, batch: Batch) -> list[SequenceEvent]:
        """Run a forward pass over a batch, and return the steps, errors and progress that result; an empty one runs no pass."""
        if not (batch.chunks or batch.decoding):
            return []
        start = time.perf_counter()
        results = self._runner.run(batch)
        return self._commit(batch, results, time.perf_counter() - start)

    def abort(self) -> list[SequenceEvent]:
        """End all sequences; return the prompt of each, if not sent yet, and a last step with the reason "interrupted"."""
        self.reap()
        events = list[SequenceEvent]()
        for sequence in [*self.running, *self.waiting]:
            if not sequence.has_sent_prompt:
                events.append((sequence, sequence.make_prompt_event()))
            events.append((sequence, sequence.finish_step(Step([], [], 0, 0.0, 0.0, INTERRUPTED))))
            if sequence in self.running:
                self._remove(sequence)
            else:
                self.waiting.remove(sequence)
                self._finish(sequence)
        return events

    def fail_all(self, error: Exception) -> list[Sequence]:
        """End all running sequences by an error, drop their slots, and return them; waiting sequences keep waiting."""
        failed = [*self.running]
        for sequence in failed:
            self._fail(sequence, error)
        return failed

    def reap(self) -> None:
        """Remove the cancelled sequences, running and waiting, and release the slots of those that run."""
        for sequence in [sequence for sequence in self.running if sequence.is_cancelled]:
            self._remove(sequence)
        for sequence in [sequence for sequence in self.waiting if sequence.is_cancelled]:
            self.waiting.remove(sequence)
            self._finish(sequence)

    def _admit(self, batch: Batch) -> None:
        """Start waiting sequences, client by client, while there are slots and memory for KV caches; report their progress."""
        while sequence := self._shares.get_next(self.waiting, self.running):
            request, slot = sequence.request, None
            try:
                n_tokens = min(len(request.prompt) + request.max_tokens, self._bundle.target.n_positions)
                slot = self._prefix_cache.acquire(request.prompt, n_tokens, sequence.client.cache_salt)
                if not slot:
                    return
                state = make_decoding_state(
                    self._autotuner, slot.caches, request, self._settings, self._costs, self.max_running == 1, slot.memory
                )
                sequence.start(slot, state)
                sequence.find_prefix_donor(self.running)
            except Exception as error:
                if slot:
                    self._prefix_cache.drop(slot)
                self.waiting.remove(sequence)
                batch.add_event(sequence, self._fail(sequence, error))
                continue
            except BaseException:  # an interrupt
                if slot:
                    self._prefix_cache.drop(slot)
                raise
            self.waiting.remove(sequence)
            self._shares.start(sequence.client.name, self.running)
            self.running.append(sequence)
            batch.add_event(sequence, sequence.prefill_progress)

    def _prepare(self, sequence: Sequence, batch: Batch) -> bool:
        """Return whether the target has prompt tokens of a sequence to run in this pass; if not, advance its prefill otherwise.

        A sequence that waits for another one to prefill their common prefix does nothing. When the target is done, each call runs
        one chunk of a draft model, and the call after the last chunk starts the decoding. A sequence that may not generate any
        token ends then. The batch gets the progress of the draft models, the `Prompt` event when the decoding starts, or the
        error of the sequence.
        """
        try:
            if sequence.update_prefix_wait(self.running):
                return False
            if sequence.n_prefill_tokens:
                return True
            if sequence.needs_draft_prefill and sequence.prefill_draft_models():
                batch.add_event(sequence, sequence.prefill_progress)
                return False
            event = sequence.start_decoding()
        except Exception as error:
            batch.add_event(sequence, self._fail(sequence, error))
            return False
        if event:
            request = sequence.request
            self._prefix_cache.save_to_disk(sequence.slot, request.prompt)
            self.metrics.record_prompt(len(request.prompt), sequence.n_cached)
            if sequence.state.is_finished:
                self._remove(sequence)
            batch.add_event(sequence, event)
        return False

    def _propose(self, ready: list[Sequence], max_tokens: int, batch: Batch) -> None:
        """Let the ready sequences propose drafts, and add the sequences that fit into the next pass to the batch.

        A sequence adds its last token and its draft tokens to the pass. Sequences left over from the last pass keep their
        drafts and come first. The first sequence always fits. A sequence with a tree runs alone.

        Args:
            ready: The sequences that can decode.
            max_tokens: Maximum number of tokens in the pass.
            batch: The batch, which also gets each new `Proposal` that has tokens, and the errors.
        """
        if self._costs:
            self._costs.begin_pass(len(ready), max_tokens)
        n_tokens = 0
        for sequence in sorted(ready, key=lambda sequence: not sequence.has_proposed) if len(ready) > 1 else ready:
            if not sequence.has_proposed:
                try:
                    sequence.propose()
                except Exception as error:
                    batch.add_event(sequence, self._fail(sequence, error))
                    continue
                if sequence.state.draft.tokens:
                    batch.add_event(sequence, sequence.make_proposal_event())
            n = 1 + len(sequence.state.draft.tokens)
            if n_tokens and (n_tokens + n > max_tokens or sequence.has_tree):
                continue
            batch.decoding.append(sequence)
            n_tokens += n
            if self._costs:
                self._costs.n_tokens += n - 1
            if sequence.has_tree:
                break

    def _select_prefill_chunks(self, prefilling: list[Sequence], decode_batch: list[Sequence]) -> list[PrefillChunk]:
        """Return the sequences to prefill in the next pass, each with the number of tokens of its chunk.

        Chunks are small enough that decoding sequences do not wait for long. The sequence with the fewest tokens left goes first;
        the sequences that wait for its prefix count too. The oldest sequence always gets a chunk.
        """
        if not prefilling:
            return []
        budget = self._autotuner.prefill_limit.n_tokens
        if decode_batch:
            assert self._costs
            cost, n_decode_tokens = self._costs.pass_cost, sum(1 + len(each.state.draft.tokens) for each in decode_batch)
            budget = MAX_BATCH_TOKENS - n_decode_tokens
            while (
                budget > MIN_PREFILL_CHUNK_TOKENS and cost(n_decode_tokens + budget) - cost(n_decode_tokens) > MAX_ADDED_PREFILL_S
            ):
                budget -= 1
        oldest = min(prefilling, key=lambda sequence: sequence.start_time)
        chunks = list[PrefillChunk]()
        for sequence in sorted(prefilling, key=lambda sequence: sequence.get_min_prefill_tokens(self.running)):
            is_oldest_left = oldest is not sequence and all(chosen is not oldest for chosen, _ in chunks)
            n_reserved = MIN_PREFILL_CHUNK_TOKENS if is_oldest_left else 0
            n = min(sequence.cache.count_tokens_to_snapshot(sequence.tokens), budget - n_reserved)
            if n > 0:
                chunks.append((sequence, n))
                budget -= n
        return chunks

    def _commit(self, batch: Batch, results: Results, seconds: float) -> list[SequenceEvent]:
        """Add the verified tokens of a pass to its sequences, record its costs, and return the steps, errors and progress.

        Args:
            batch: What the pass has run.
            results: The result of each decoding sequence, and the error of each sequence that failed.
            seconds: Time of the pass.
        """
        done = Batch()
        self.metrics.record_pass()
        counts = [*batch.chunks, *((sequence, 1 + len(sequence.state.draft.tokens)) for sequence in batch.decoding)]
        self._shares.charge(counts, seconds)
        if len(self.running) > 1:
            has_run = {sequence for sequence, _ in counts}
            self.running = sorted(self.running, key=has_run.__contains__)  # a new list, since other threads read the old one
        for sequence, _ in batch.chunks:
            if isinstance(error := results.get(sequence), Exception):
                done.add_event(sequence, self._fail(sequence, error))
            else:
                self._prefix_cache.save_to_disk(sequence.slot, sequence.request.prompt, False)
                done.add_event(sequence, sequence.prefill_progress)
        steps = self._commit_steps(batch.decoding, results, seconds, done)
        if batch.decoding and not batch.chunks and len(steps) == len(batch.decoding):
            self._record_costs(sum(n for _, n in counts), results, steps, seconds)
        elif not batch.decoding:
            self._autotuner.prefill_limit.update(seconds)
        return done.events

    def _commit_steps(self, decoding: list[Sequence], results: Results, seconds: float, done: Batch) -> list[Step]:
        """Add the verified tokens of a pass to its sequences, and return the steps of those that did not fail.

        Finished sequences are removed. A sequence that has grown into other RoPE factors starts a prefill of all its tokens.

        Args:
            decoding: The sequences that decoded in the pass.
            results: The result of each.
            seconds: Time of the pass.
            done: Gets the steps, errors and progress.
        """
        steps, experts = list[Step](), self._bundle.target.experts_read
        for sequence in decoding:
            verified = results[sequence]
            if isinstance(verified, Exception):
                done.add_event(sequence, self._fail(sequence, verified))
                continue
            had_output = sequence.first_token_seconds is not None
            steps.append(sequence.finish_step(sequence.state.commit(verified, seconds, experts)))
            self.metrics.record_step(steps[-1])
            if not had_output and sequence.first_token_seconds is not None:
                self.metrics.time_to_first_token.observe(sequence.first_token_seconds)
            done.add_event(sequence, steps[-1])
            if sequence.is_finished:
                self._remove(sequence)
            elif self._recompute_lengths and self._has_crossed_length(sequence, len(steps[-1].tokens)):
                sequence.begin_prefill()
                done.add_event(sequence, sequence.prefill_progress)
        return steps

    def _record_costs(self, n_tokens: int, results: Results, steps: list[Step], seconds: float) -> None:
        """Record the costs of a pass without prefill chunks, whose time shows what drafts cost.

        Args:
            n_tokens: Tokens that the pass has run.
            results: Its verified tokens.
            steps: Its steps.
            seconds: Its time.
        """
        self._autotuner.record_step(n_tokens, sum(step.draft_seconds for step in steps) + seconds)
        if self._costs and len(steps) == self._costs.n_sequences:
            n_generated = sum(len(each.tokens) for each in results.values() if isinstance(each, Verified))
            self._costs.end_pass(n_tokens, n_generated, seconds)

    def _has_crossed_length(self, sequence: Sequence, n_new: int) -> bool:
        """Return whether the last n_new tokens took a sequence past a length at which its RoPE factors change."""
        n = len(sequence.tokens)
        return any(n - n_new <= length < n for length in self._recompute_lengths)

    def _remove(self, sequence: Sequence) -> None:
        """End a running sequence, remember its tokens for looked-up drafts, save its KV cache to disk, and release its slot.

        The slot keeps the KV caches for later prompts.
        """
        self.running.remove(sequence)
        try:
            self._prefix_cache.remember(sequence.slot, sequence.tokens)
            self._prefix_cache.save_to_disk(sequence.slot, sequence.tokens)
        finally:
            self._prefix_cache.release(sequence.slot, len(sequence.tokens))
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence and count it as cancelled or as done."""
        self.metrics.record_end(sequence.is_cancelled and not sequence.is_finished)
        sequence.finish()

    def _fail(self, sequence: Sequence, error: Exception) -> Exception:
        """End a sequence by an error, drop its slot, and return the error."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._prefix_cache.drop(sequence.slot)
        self.metrics.record_failure()
        sequence.finish()
        return error


def _get_events(events: list[SequenceEvent]) -> Iterator[Event | PrefillProgress]:
    """Yield events without their sequences; raise the first error among them."""
    for _, event in events:
        if isinstance(event, Exception):
            raise event
        yield event


def find_batch_size(costs: CostModel | None) -> int:
    """Return the lowest number of sequences whose plain passes generate nearly as many tokens per second as any number does."""
    seconds = costs.curve.pass_seconds if costs else [0.0, 1.0]
    throughputs = [n / seconds[n] for n in range(1, len(seconds))]
    return next(n for n, each in enumerate(throughputs, 1) if each >= MIN_THROUGHPUT_SHARE * max(throughputs))
