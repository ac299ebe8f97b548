"""Scheduler: continuous batching. A step plans a batch, runs one forward pass over it, and commits what the pass verified.

    batch = scheduler.schedule()
    events = batch.events + scheduler.commit(batch, scheduler.runner.run(batch))

A pass takes the last token of each decoding sequence and its draft tokens. The rest of its capacity goes to prefill chunks.
The logits at a position depend on that sequence's tokens alone, so each output equals the one without a batch. The command line
and the library run a scheduler with one sequence, the server one with many (engine_thread.py). Eight clients get 319 tokens per
second of SmolLM2 Q8_0, one gets 67; first tokens of prompts, read in chunks between the steps of others, come after 0.21 to 0.26
s for eight clients (llama-server: 0.68 to 0.72).
"""

from collections import deque
from collections.abc import Iterator

from specdec.draft.acceptance import LOOKUP_ACCEPTANCE, Acceptance
from specdec.draft.draft_length import CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.lookup import LookupDrafter, PredictionDrafter
from specdec.draft.lookup_tables import LookupMemory
from specdec.draft.model_bundle import SequenceCaches
from specdec.draft.model_drafters import make_logits_processor
from specdec.draft.settings import SpeculativeSettings
from specdec.engine.autotuner import Autotuner
from specdec.engine.fair_share import FairShare
from specdec.engine.metrics import Metrics
from specdec.engine.model_runner import Batch, ModelRunner, PrefillChunk, Results, SequenceEvent
from specdec.engine.observers import CostRecorder, PromptSaver, StepObserver
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Sequence, SequenceStatus
from specdec.events import Event, PrefillProgress, Step
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.protocols import Drafter, LengthPolicy
from specdec.speculative import DecodingState
from specdec.verification import VERIFIERS

MAX_ADDED_PREFILL_S = 0.1  # that prefill chunks may add to a pass which decoding sequences wait for
MIN_PREFILL_CHUNK_TOKENS = 8
MIN_THROUGHPUT_SHARE = 0.97  # of the highest throughput; more sequences at once would only take memory


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
        runner: Runs the batches.
        metrics: Counters of what the scheduler has done.
        prefix_cache: The argument of that name.
        bundle: The models.
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
        self._autotuner, self._settings, self.prefix_cache = autotuner, settings, prefix_cache
        self.bundle = autotuner.bundle
        self._costs: CostModel | None = autotuner.make_cost_model(settings, is_batch=max_running != 1)
        self.max_running = max_running or find_batch_size(self._costs)
        self.runner, self._shares = ModelRunner(self.bundle.target), FairShare(self.max_running)
        self._recompute_lengths = self.bundle.recompute_lengths
        self.waiting, self.running = deque[Sequence](), list[Sequence]()
        self.metrics = metrics or Metrics()
        saver = PromptSaver(self.bundle, prefix_cache.prompt_cache)
        recorder = CostRecorder(autotuner, self._costs, max_running == 1 and settings.is_adaptive)
        self._observers: tuple[StepObserver, ...] = (saver, recorder, self.metrics)
        self._is_prefill_turn = False  # since the last pass had no capacity left for prefill chunks

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence, which waits for a slot."""
        self.waiting.append(sequence)

    def stream(self, sequence: Sequence) -> Iterator[Event | PrefillProgress]:
        """Add a sequence, run steps until it ends, and yield the events of all sequences.

        Closing the iterator ends the sequence early. At the end the slot is released.

        Raises:
            Exception: The error of any sequence that fails.
        """
        self.add(sequence)
        try:
            while not sequence.has_ended:
                batch = self.schedule()
                yield from _get_events(batch.events)  # a view shows a proposal before the pass that verifies it
                yield from _get_events(self.commit(batch, self.runner.run(batch)))
        finally:
            self.cancel(sequence)

    def step(self) -> list[SequenceEvent]:
        """Plan a batch, run it and commit its tokens; return all events and errors, in order."""
        batch = self.schedule()
        return batch.events + self.commit(batch, self.runner.run(batch))

    def schedule(self) -> Batch:
        """Admit waiting sequences, let those that decode propose drafts, and return what the next pass runs."""
        batch = Batch()
        if self.waiting:
            self._admit(batch)
        ready: list[Sequence] = []
        prefilling: list[Sequence] = []  # together at most max_running
        for sequence in self._shares.interleave(self.running):
            if len(prefilling) + len(ready) == self.max_running:
                break
            if sequence.is_prefilling and self._prepare(sequence, batch):
                prefilling.append(sequence)
            if sequence.status in (SequenceStatus.DECODE, SequenceStatus.VERIFY):
                ready.append(sequence)
        if not self._is_prefill_turn:
            max_tokens = MAX_BATCH_TOKENS - (MIN_PREFILL_CHUNK_TOKENS if prefilling else 0)
            self._propose(ready, max_tokens, batch)
        if prefilling:
            prefilling = self._shares.hold_back(prefilling, batch.decoding)
            if not (batch.decoding and batch.decoding[0].has_tree):  # a tree runs alone
                batch.chunks = self._select_prefill_chunks(prefilling, batch.n_tokens)
        self._is_prefill_turn = bool(prefilling) and not batch.chunks
        return batch

    def commit(self, batch: Batch, results: Results) -> list[SequenceEvent]:
        """Add the verified tokens of a pass to its sequences, and return the steps, errors and progress.

        Finished sequences end. A sequence that has grown into other RoPE factors begins to run all its tokens again.

        Args:
            batch: What the pass has run; nothing happens if it is empty.
            results: What the pass returned.
        """
        if not (counts := batch.token_counts):
            return []
        self._shares.charge(counts, results.seconds)
        if len(self.running) > 1:
            has_run = {sequence for sequence, _ in counts}
            self.running = sorted(self.running, key=has_run.__contains__)  # a new list, since other threads read the old one
        done, steps = Batch(), dict[Sequence, Step]()
        for sequence, _ in counts:
            outcome = results.outcomes.get(sequence)
            if isinstance(outcome, Exception):
                done.add_event(sequence, self._fail(sequence, outcome))
                continue
            if outcome:
                steps[sequence] = step = sequence.commit(outcome, results.seconds, results.experts)
                done.add_event(sequence, step)
                if sequence.has_ended or not (self._recompute_lengths and self._has_crossed_length(sequence, len(step.tokens))):
                    continue
                sequence.begin_prefill(SequenceStatus.RECOMPUTE)
            done.add_event(sequence, sequence.prefill_progress)
        for observer in self._observers:
            observer.on_pass(batch, results, steps)
        for sequence in steps:
            if sequence.has_ended:
                self._end(sequence, sequence.status)
        return done.events

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence early and release its slot, if it has one; do nothing if the scheduler has removed it already."""
        if sequence in self.running or sequence in self.waiting:
            self._end(sequence, sequence.status if sequence.has_ended else SequenceStatus.CANCELLED)

    def abort(self) -> list[SequenceEvent]:
        """End all sequences; return the prompt of each, if not sent yet, and a last step with the reason "interrupted"."""
        events = list[SequenceEvent]()
        for sequence in [*self.running, *self.waiting]:
            events += [(sequence, event) for event in sequence.interrupt()]
            self._end(sequence, sequence.status)
        return events

    def fail_all(self, error: Exception) -> list[Sequence]:
        """End all running sequences by an error, drop their slots, and return them; waiting sequences keep waiting."""
        failed = [*self.running]
        for sequence in failed:
            self._fail(sequence, error)
        return failed

    def _admit(self, batch: Batch) -> None:
        """Start waiting sequences, client by client, while there are slots and memory for KV caches; report their progress."""
        while sequence := self._shares.get_next(self.waiting, self.running):
            request, slot = sequence.request, None
            try:
                n_tokens = min(len(request.prompt) + request.max_tokens, self.bundle.target.n_positions)
                slot = self.prefix_cache.acquire(request.prompt, n_tokens, sequence.client.cache_salt)
                if not slot:
                    return
                if self._costs and not self.running:
                    self._costs.begin_batch()
                state = make_decoding_state(
                    self._autotuner, slot.caches, request, self._settings, self._costs, self.max_running == 1, slot.memory
                )
                sequence.start(slot, state)
                sequence.find_prefix_donor(self.running)
            except Exception as error:
                if slot:
                    self.prefix_cache.drop(slot)
                batch.add_event(sequence, self._fail(sequence, error))
                continue
            except BaseException:  # an interrupt
                if slot:
                    self.prefix_cache.drop(slot)
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
            for observer in self._observers:
                observer.on_prompt(sequence)
            if sequence.state.is_finished:
                self._end(sequence)
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

    def _select_prefill_chunks(self, prefilling: list[Sequence], n_decode_tokens: int) -> list[PrefillChunk]:
        """Return the sequences to prefill in the next pass, each with the number of tokens of its chunk.

        Chunks are small enough that decoding sequences do not wait for long. The sequence with the fewest tokens left goes first;
        the sequences that wait for its prefix count too. The oldest sequence always gets a chunk.

        Args:
            prefilling: The sequences that may be prefilled.
            n_decode_tokens: Tokens of the sequences that decode in the pass.
        """
        if not prefilling:
            return []
        budget = self._autotuner.prefill_limit.n_tokens
        if n_decode_tokens:
            assert self._costs
            cost = self._costs.pass_cost
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

    def _has_crossed_length(self, sequence: Sequence, n_new: int) -> bool:
        """Return whether the last n_new tokens took a sequence past a length at which its RoPE factors change."""
        n = len(sequence.tokens)
        return any(n - n_new <= length < n for length in self._recompute_lengths)

    def _end(self, sequence: Sequence, status: SequenceStatus = SequenceStatus.FINISHED) -> None:
        """End a sequence with a status, and release its slot: the KV caches stay for later prompts, unless it failed."""
        sequence.end(status)
        try:
            for observer in self._observers:
                observer.on_end(sequence)
        finally:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            elif sequence in self.running:
                self.running.remove(sequence)
                if status is SequenceStatus.FAILED:
                    self.prefix_cache.drop(sequence.slot)
                else:
                    self.prefix_cache.release(sequence.slot, len(sequence.tokens))

    def _fail(self, sequence: Sequence, error: Exception) -> Exception:
        """End a sequence by an error, and return the error."""
        self._end(sequence, SequenceStatus.FAILED)
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


def make_decoding_state(
    autotuner: Autotuner,
    caches: SequenceCaches,
    request: GenerationRequest,
    settings: SpeculativeSettings,
    costs: CostModel | None,
    is_alone: bool,
    memory: LookupMemory,
) -> DecodingState:
    """Return the decoding state of a new sequence, with the verifier, drafter, length policy and constraint that it needs.

    A sequence with a predicted output and the coupled verifier drafts from the prediction. Otherwise it uses the bundle's draft,
    or no draft if the target is too fast for looked-up ones.

    Args:
        autotuner: The autotuner of the models, warmed up.
        caches: The KV caches for this sequence.
        request: A validated request.
        settings: The settings of speculative decoding.
        costs: The cost model of the sequence's batch; None for drafts of fixed length.
        is_alone: Whether the batch is only this sequence.
        memory: What earlier sequences of the same client have left for looked-up drafts.
    """
    bundle = autotuner.bundle
    vocabulary, target, eos_tokens = bundle.draft.vocabulary, bundle.target, bundle.tokenizer.eos_tokens
    # without a draft only forced tokens are verified, which each verifier accepts
    verify = "coupled" if bundle.draft.is_empty else settings.verify
    verifier = VERIFIERS[verify](vocabulary.n_target, request.sampling)
    # with other verifiers the output depends on the draft, so a prediction would change it
    is_predicted = bool(request.prediction) and verify == "coupled"
    if is_predicted:
        drafter: Drafter | None = PredictionDrafter(
            eos_tokens, len(request.prompt), request.prediction, request.sampling, memory, vocabulary.n_target
        )
    elif bundle.uses_lookup and verifier.is_coupled:
        is_too_fast = settings.is_adaptive and autotuner.is_too_fast_for_lookup
        can_branch = bundle.can_lookup_branch(settings) and not (request.constraint or request.sampling.has_logit_adjustments)
        drafter = None if is_too_fast else LookupDrafter(eos_tokens, request.sampling, memory, vocabulary.n_target, can_branch)
    else:
        drafter = bundle.make_drafter(caches, request.sampling, verifier, settings, is_alone, autotuner.draft_calibration)
    return DecodingState(
        [*request.prompt],
        request.max_tokens,
        target.n_positions,
        drafter,
        verifier,
        _make_length_policy(autotuner, settings, costs, drafter, is_predicted),
        eos_tokens,
        request.constraint,
        target.longrope_threshold,
        request.top_logprobs,
        bundle.n_ids,
        autotuner.step_costs,
        make_logits_processor(request.sampling, vocabulary.n_target),
    )


def _make_length_policy(
    autotuner: Autotuner, settings: SpeculativeSettings, costs: CostModel | None, drafter: Drafter | None, is_predicted: bool
) -> LengthPolicy:
    """Return the draft length policy of a sequence; `is_predicted` says whether it drafts from a predicted output."""
    if not (costs and drafter and settings.is_adaptive and drafter.has_variable_length):
        return FixedLength(settings.fixed_gamma)
    has_draft_model = autotuner.bundle.draft.model is not None
    acceptance = Acceptance(LOOKUP_ACCEPTANCE) if is_predicted and has_draft_model else autotuner.acceptance
    return DraftLengthPolicy(costs, acceptance, is_free=is_predicted or not has_draft_model)
