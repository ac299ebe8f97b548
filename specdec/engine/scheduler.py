"""Continuous batching: a thread that owns the target model and runs all requests in shared forward passes. Knows no HTTP.

A pass takes the last token of each running sequence and its draft tokens. The rest of its capacity goes to prefill chunks.
The logits at a position depend on that sequence's tokens alone, so each output equals the one without a batch.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as GenericSequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from specdec.argument_checks import count_common_prefix, replace_unknown_tokens
from specdec.draft.draft_length import CostModel
from specdec.engine.auxiliary_tasks import AuxiliaryTask, AuxiliaryTaskQueue
from specdec.engine.decode_loop import (
    Event,
    GenerationRequest,
    PrefillProgress,
    Prompt,
    Sequence,
    Step,
    TokenLogprob,
    run_and_verify,
)
from specdec.engine.kv_slots import MIN_SHARED_PREFIX_TOKENS, KVSlot, SlotPool
from specdec.engine.metrics import Metrics
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.transformer import Transformer
from specdec.runtime.simd import Float32
from specdec.server.field_validation import APIError
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.text.detokenizer import EventDetokenizer
from specdec.verification import Draft

INTERRUPTED = "interrupted"
IDLE_SLOTS_PER_SEQUENCE = 4  # idle slots for each running sequence, kept for conversations that may continue
MAX_PREFILL_CHUNK_S = 0.1  # that prefill chunks may add to a pass which decoding sequences wait for
MAX_FAIRNESS_GAP_S = 1.0  # lead in pass time over another client, beyond which a client's prompts wait
MIN_PREFILL_CHUNK_TOKENS = 8
MAX_EXTRA_WAITING = 64  # more requests that may wait when the queue is full, each of a client with no other request


class Client(NamedTuple):
    """The sender of a request.

    Attributes:
        name: Key for fairness between clients.
        cache_salt: Key for cache sharing: only clients with the same salt read each other's KV caches.
    """

    name: str = ""
    cache_salt: str = ""


class QueueFullError(APIError):
    """The error (HTTP status 429) that rejects a request because too many requests or auxiliary tasks wait already."""

    def __init__(self) -> None:
        super().__init__("the request queue is full; try again later", None, "queue_full", 429)


class ShutdownError(APIError):
    """The error (HTTP status 503) for a request that is rejected or stopped because the server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", None, "shutting_down", 503)


EventCallback = Callable[[Event | PrefillProgress | Exception], None]


class RequestHandle:
    """A submitted generation request, with its client and the callback for its events; it can be cancelled."""

    def __init__(self, request: GenerationRequest, on_event: EventCallback, wake: Callable[[], None], client: Client) -> None:
        self.request, self.on_event, self.client, self.submit_time = request, on_event, client, time.perf_counter()
        self.is_cancelled = False
        self._wake = wake

    def cancel(self) -> None:
        """Mark the request as cancelled and wake the scheduler, which frees the KV cache slot within one step.

        The callback gets no event after the one that is being sent.
        """
        self.is_cancelled = True
        self._wake()


class ScheduledSequence:
    """A running sequence with its KV cache slot, its draft and its prefill progress.

    Attributes:
        n_cached: Prompt tokens found in a KV cache, which need not run.
        draft: The draft to verify next; None before `propose` is called.
        prefix_donor: Another sequence that is prefilling a prefix of both prompts. This sequence waits for it and then copies the
            KV cache of the prefix. None if there is no such sequence.
        n_shared_prefix: Tokens of the prefix that both prompts share.
    """

    def __init__(self, handle: RequestHandle, sequence: Sequence, slot: KVSlot, detokenizer: EventDetokenizer) -> None:
        self.handle, self.sequence, self.slot, self.detokenizer = handle, sequence, slot, detokenizer
        self.model: Transformer = slot.bundle.target
        self.n_cached, self.start_time = self.count_prefilled(), time.perf_counter()
        self.draft: Draft | None = None
        self.prefix_donor: ScheduledSequence | None = None
        self.n_shared_prefix = 0
        self.is_prefilled = self.has_output = self.is_finished = False

    @property
    def client(self) -> str:
        """The name of the client that sent the request."""
        return self.handle.client.name

    @property
    def n_prefill_tokens(self) -> int:
        """Number of tokens that the target has to run before it can run the last token of the sequence."""
        return self.model.count_prefill_tokens(self.sequence.tokens)

    def get_prefill_input(self, n: int) -> list[int]:
        """Return the tokens of the sequence up to the end of a prefill chunk of n tokens, including those already cached."""
        return self.sequence.tokens[: len(self.sequence.tokens) - 1 - self.n_prefill_tokens + n]

    def count_prefilled(self) -> int:
        """Return how many tokens of the prompt are in the KV cache of the sequence's slot."""
        return self.slot.count_cached_tokens(self.handle.request.prompt)

    def find_prefix_donor(self, running: Collection["ScheduledSequence"]) -> bool:
        """Find an earlier sequence that is prefilling a prefix of this prompt, and return whether there is one.

        Sets `prefix_donor` and `n_shared_prefix` to the sequence with the longest prefix. The prefix must have at least
        `MIN_SHARED_PREFIX_TOKENS` tokens more than this sequence has cached.
        """
        prompt, is_long = self.handle.request.prompt, self.model.config.has_long_rope
        best = self.n_cached + MIN_SHARED_PREFIX_TOKENS - 1, len(prompt)
        for other in running:
            other_prompt = other.handle.request.prompt
            n_common, n_prefilled = count_common_prefix(other_prompt[:-1], prompt, len(prompt) - 1), other.count_prefilled()
            is_compatible = other.slot.cache_salt == self.slot.cache_salt and is_long(len(other_prompt)) == is_long(len(prompt))
            if (
                is_compatible
                and n_prefilled < n_common
                and not other.is_prefilled
                and other.start_time < self.start_time
                and (n_common, n_prefilled) > best
            ):
                self.prefix_donor, self.n_shared_prefix, best = other, n_common, (n_common, n_prefilled)
        return self.prefix_donor is not None

    def update_prefix_wait(self, running: Collection["ScheduledSequence"]) -> bool:
        """Return whether this sequence has to wait for another one that is prefilling a prefix of its prompt.

        Copies the KV cache of the prefix once it has run, or of its first tokens if the other sequence has stopped. Then looks
        for another sequence to wait for.
        """
        if not (donor := self.prefix_donor):
            return False
        if donor in running and not donor.is_prefilled and donor.count_prefilled() < self.n_shared_prefix:
            return True
        self.prefix_donor = None
        self.slot.copy_kv(donor.slot, self.handle.request.prompt)
        self.n_cached = self.count_prefilled()
        return self.find_prefix_donor(running)

    def get_min_prefill_tokens(self, running: Collection["ScheduledSequence"]) -> int:
        """Return how many tokens have to run until this sequence, or one that waits for a prefix from it, can continue."""
        shared = (other.n_shared_prefix - self.count_prefilled() for other in running if other.prefix_donor is self)
        return min([self.n_prefill_tokens, *shared])

    def prefill_draft_models(self) -> bool:
        """Run a prefill chunk of a draft model that has not run the whole prompt; return False if there is none."""
        for model in self.slot.bundle.models.values():
            tokens = replace_unknown_tokens(self.handle.request.prompt, model.config.vocab_size)
            if model is not self.model and len(tokens) <= model.n_positions and (n_left := model.count_prefill_tokens(tokens)):
                model.forward(tokens[: len(tokens) - 1 - max(n_left - MAX_BATCH_TOKENS, 0)], 0, len(tokens))
                return True
        return False

    @property
    def has_tree(self) -> bool:
        """Whether the draft to verify is a tree of tokens, which needs a forward pass of its own."""
        return self.draft is not None and self.draft.parents is not None


class Scheduler:
    """The scheduler of a model: its thread generates the sequences of all requests, up to `max_running` in a forward pass.

    A conversation that continues finds its KV cache. A sequence with a KV cache larger than `cache_bytes` runs alone. Clients are
    equal: the client with the fewest running sequences is next, and one with less than its share of the slots need not wait for
    a slot. Passes interleave the clients. The prompts of a client wait while it is ahead of another running client in pass time.
    Auxiliary tasks get half of the time.

    Args:
        decoder: The target and its draft models.
        max_running: Sequences per pass.
        max_waiting: Requests that may wait for a slot.
        cache_bytes: Memory limit of all KV caches together, in bytes.
    """

    def __init__(self, decoder: SpeculativeDecoder, max_running: int, max_waiting: int, cache_bytes: int) -> None:
        self._decoder, self._max_running, self._max_waiting = decoder, max_running, max_waiting
        self._waiting = deque[RequestHandle]()
        self._running = list[ScheduledSequence]()  # ordered by their last run, the most recent last
        self._slot_pool = SlotPool(decoder.bundle.clone_for_sequence, cache_bytes, IDLE_SLOTS_PER_SEQUENCE * max_running)
        self._auxiliary_tasks = AuxiliaryTaskQueue()
        self._changed = threading.Condition()
        self._is_closed = self._is_aborted = False
        self._is_prefill_turn = False  # since the last pass had no capacity left for prefill chunks
        self._seconds_until_auxiliary = 0.0  # pass time before the next auxiliary task step
        # pass time of each client: of those that run, and of those that were ahead of them
        self._client_seconds = dict[str, float]()
        self._cost_model: CostModel
        self._last_pass_end = 0.0  # 0.0 after the scheduler was idle
        self._metrics = Metrics()
        self._thread = threading.Thread(target=self._run_loop, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def metrics(self) -> Metrics:
        """The counters of the scheduler, updated with the numbers of sequences that run and wait now."""
        self._metrics.running, self._metrics.queued = len(self._running), len(self._waiting)
        return self._metrics

    def submit(
        self, requests: GenericSequence[GenerationRequest], callbacks: GenericSequence[EventCallback], client: Client
    ) -> list[RequestHandle]:
        """Queue all sequences of a client's request for generation, or none of them, and return a handle for each.

        Args:
            requests: One per sequence.
            callbacks: One per sequence, called on the scheduler's thread with each event. The last event is a step with a stop
                reason or an error.
            client: The sender.

        Returns:
            The handles of the sequences, in their order.

        Raises:
            QueueFullError: Too many requests wait.
            ShutdownError: The scheduler is shutting down.
            ValueError: A request is invalid, as in `SpeculativeDecoder.stream`; TypeError likewise.
        """
        validate = self._decoder.bundle.validate_request
        handles = [
            RequestHandle(validate(request), on_event, self._wake, client)
            for request, on_event in zip(requests, callbacks, strict=True)
        ]
        with self._changed:
            if self._is_closed:
                raise ShutdownError()
            unfinished = [*self._waiting, *(sequence.handle for sequence in self._running)]
            is_new = all(handle.client.name != client.name for handle in unfinished)
            if len(unfinished) + len(handles) > self._max_running + self._max_waiting + MAX_EXTRA_WAITING * (
                is_new and bool(unfinished)
            ):
                raise QueueFullError()
            self._waiting.extend(handles)
            self._changed.notify()
        return handles

    def submit_auxiliary(
        self, tasks: GenericSequence[Callable[[Transformer], AuxiliaryTask]], client: Client
    ) -> "list[Future[Any]]":
        """Queue tasks that use the target and run step by step between forward passes, and return their futures.

        Args:
            tasks: Functions that take the target and return a task (see `AuxiliaryTaskQueue`).
            client: The sender.

        Raises:
            QueueFullError: Too many tasks wait; none of the tasks is queued.
            ShutdownError: The scheduler is shutting down.
        """
        with self._changed:
            if self._is_closed:
                raise ShutdownError()
            if not (futures := self._auxiliary_tasks.add([partial(task, self._decoder.target) for task in tasks], client.name)):
                raise QueueFullError()
            self._changed.notify()
        return futures

    def limit_caches(self, cache_bytes: int) -> None:
        """Set the memory limit of all KV caches in bytes, for sequences that start from now on."""
        self._slot_pool.max_bytes = cache_bytes

    def close(self, grace: float) -> None:
        """Reject new requests, abort those that are unfinished after `grace` seconds, and wait until the thread has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(grace)
        self._is_aborted = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run_loop(self) -> None:
        startup_error: Exception | None = None
        try:
            self._decoder.warm_up()
            self._cost_model = self._decoder.autotuner.make_batch_cost_model()
        except Exception as error:
            startup_error = error
        while self._wait_for_work():
            if startup_error:
                for handle in [*self._waiting]:
                    self._fail_request(self._pop_waiting(handle), startup_error)
                self._auxiliary_tasks.fail_all(startup_error)
                continue
            if self._is_aborted:
                self._auxiliary_tasks.fail_all(ShutdownError())
            start = time.perf_counter()
            if self._auxiliary_tasks and (self._seconds_until_auxiliary <= 0 or not self._running):
                self._auxiliary_tasks.step()
                self._seconds_until_auxiliary = 2 * (time.perf_counter() - start)
            self._reap_finished()
            self._admit()
            try:
                self._run_next_pass()
            except Exception as error:  # clients must not wait for a sequence that cannot continue
                for sequence in [*self._running]:
                    self._fail_sequence(sequence, error)
            self._seconds_until_auxiliary -= time.perf_counter() - start

    def _wait_for_work(self) -> bool:
        """Block until the scheduler has work or is closed; return False once it is closed and has no work left."""
        with self._changed:
            while not (self._waiting or self._running or self._auxiliary_tasks or self._is_closed):
                self._last_pass_end = 0.0
                self._changed.wait()
            return bool(self._waiting or self._running or self._auxiliary_tasks)

    def _reap_finished(self) -> None:
        """Remove and count the cancelled sequences and requests; after the grace period, abort and remove all the others too."""
        for sequence in [sequence for sequence in self._running if sequence.handle.is_cancelled or self._is_aborted]:
            if not sequence.handle.is_cancelled:
                self._abort(sequence.handle, sequence.detokenizer, sequence.is_prefilled)
            self._remove(sequence)
        with self._changed:
            removed = [handle for handle in self._waiting if handle.is_cancelled or self._is_aborted]
            for handle in removed:
                self._waiting.remove(handle)
        for handle in removed:
            if not handle.is_cancelled:
                self._abort(handle, self._decoder.bundle.make_detokenizer(handle.request), False)
            self._count_finished(handle.is_cancelled)

    def _abort(self, handle: RequestHandle, detokenizer: EventDetokenizer, is_prefilled: bool) -> None:
        """Send the last events of an aborted request: its prompt, if not sent yet, and a step with the reason "interrupted"."""
        if not is_prefilled:
            self._send_event(handle, detokenizer.detokenize(Prompt(handle.request.prompt, 0.0)))
        self._send_event(handle, detokenizer.detokenize(Step([], [], 0, 0.0, 0.0, INTERRUPTED)))

    def _remove(self, sequence: ScheduledSequence) -> None:
        self._running.remove(sequence)
        sequence.slot.save_to_prefix_cache(sequence.sequence.tokens)
        self._slot_pool.release(sequence.slot, len(sequence.sequence.tokens))
        self._count_finished(sequence.handle.is_cancelled and not sequence.is_finished)

    def _count_finished(self, is_cancelled: bool) -> None:
        """Count a sequence in the metrics, as cancelled or as done."""
        self._metrics.cancelled += is_cancelled
        self._metrics.done += not is_cancelled

    def _admit(self) -> None:
        """Turn waiting requests into running sequences, client by client, while there are slots and memory for KV caches."""
        while handle := self._get_next_waiting():
            request, slot = handle.request, None
            try:
                n_tokens = min(len(request.prompt) + request.max_tokens, self._decoder.target.n_positions)
                slot = self._slot_pool.acquire(request.prompt, n_tokens, handle.client.cache_salt)
                if not slot:
                    return
                sequence = self._make_sequence(handle, slot)
                sequence.find_prefix_donor(self._running)
            except Exception as error:
                if slot:
                    self._slot_pool.drop(slot)
                self._fail_request(self._pop_waiting(handle), error)
                continue
            self._pop_waiting(handle)
            self._start_client(handle.client.name)
            self._running.append(sequence)

    def _start_client(self, client: str) -> None:
        """Set the pass time of a client that starts a sequence, so that it gets no credit for the time it was idle.

        It is the lowest pass time of the running clients, or the client's own earlier pass time if that is higher. After the
        virtual token counter of "Fairness in Serving Large Language Models" (arXiv 2401.00588).
        """
        running_clients = {sequence.client for sequence in self._running}
        min_seconds = min([self._client_seconds[name] for name in running_clients], default=0.0)
        known = self._client_seconds if running_clients else dict[str, float]()
        self._client_seconds = {
            name: seconds for name, seconds in known.items() if name in running_clients or seconds > min_seconds
        }
        self._client_seconds.setdefault(client, min_seconds)

    def _get_next_waiting(self) -> RequestHandle | None:
        """Return the first waiting request of the client with the fewest running sequences, or None if it has to wait.

        It has to wait while no slot is free, unless the client has less than its share of the slots.
        """
        running = Counter(sequence.client for sequence in self._running)
        with self._changed:
            first = min(self._waiting, key=lambda handle: running[handle.client.name], default=None)
            n_clients = len({handle.client.name for handle in self._waiting} | running.keys())
        if not first:
            return None
        has_less = running[first.client.name] < max(self._max_running // n_clients, 1)
        return first if len(self._running) < self._max_running * (2 if has_less else 1) else None

    def _pop_waiting(self, handle: RequestHandle) -> RequestHandle:
        """Remove a request from the queue of waiting requests, and return it."""
        with self._changed:
            self._waiting.remove(handle)
        return handle

    def _make_sequence(self, handle: RequestHandle, slot: KVSlot) -> ScheduledSequence:
        decoder, request = self._decoder, handle.request
        sequence = decoder.make_sequence(slot.bundle, request, self._cost_model)
        if request.top_logprobs is not None:
            sequence.compute_logprobs = partial(compute_logprobs, n_top=request.top_logprobs, n_ids=decoder.n_ids)
        return ScheduledSequence(handle, sequence, slot, decoder.bundle.make_detokenizer(request))

    def _run_next_pass(self) -> None:
        """Choose the decode batch and the prefill chunks of the next forward pass, and run the pass."""
        n_threads = self._decoder.target.n_threads
        prefilling, ready = list[ScheduledSequence](), list[ScheduledSequence]()  # together at most max_running
        for sequence in self._interleave_clients():
            for model in sequence.slot.bundle.models.values():
                model.n_threads = n_threads
            if len(prefilling) + len(ready) == self._max_running:
                break
            if self._is_waiting_for_prefix(sequence):
                continue
            if sequence.n_prefill_tokens:
                prefilling.append(sequence)
            elif sequence.is_prefilled or self._start_decoding(sequence):
                ready.append(sequence)
        ready.sort(key=lambda sequence: sequence.draft is None)  # drafts that did not fit the last pass go first
        max_tokens = MAX_BATCH_TOKENS - (MIN_PREFILL_CHUNK_TOKENS if prefilling else 0)
        decode_batch = [] if self._is_prefill_turn else self._select_decode_batch(ready, max_tokens)
        # prompts wait while their client is too far ahead of the others in this pass
        seconds = [self._client_seconds[sequence.client] for sequence in (*decode_batch, *prefilling)]
        max_seconds = min(seconds, default=0.0) + MAX_FAIRNESS_GAP_S
        prefilling = [sequence for sequence in prefilling if self._client_seconds[sequence.client] <= max_seconds]
        if decode_batch and decode_batch[0].has_tree:
            self._is_prefill_turn = bool(prefilling)
            self._run_alone(decode_batch[0])
            self._move_to_back(decode_batch[:1])
            return
        chunks = self._select_prefill_chunks(prefilling, decode_batch)
        self._is_prefill_turn = bool(prefilling) and not chunks
        if decode_batch or chunks:
            self._run_batch(decode_batch, chunks)
            self._move_to_back([*decode_batch, *(sequence for sequence, _ in chunks)])

    def _move_to_back(self, sequences: Collection[ScheduledSequence]) -> None:
        """Move the given sequences, which have just run, to the back of the list of running sequences."""
        # a new list, since other threads read the old one
        self._running = sorted(self._running, key=lambda sequence: sequence in sequences)

    def _interleave_clients(self) -> list[ScheduledSequence]:
        """Return the running sequences in turns: the first sequence of each client, then the second of each, and so on.

        The sequence that a client ran most recently comes last among the sequences of that client.
        """
        n_before, ranked = Counter[str](), list[tuple[int, ScheduledSequence]]()
        for sequence in self._running:
            ranked.append((n_before[sequence.client], sequence))
            n_before[sequence.client] += 1
        return [sequence for _, sequence in sorted(ranked, key=lambda each: each[0])]

    def _is_waiting_for_prefix(self, sequence: ScheduledSequence) -> bool:
        """Return whether a sequence has to wait for another one that is prefilling a prefix of both prompts.

        Copies the KV cache of the prefix once it has run. If that raises, the sequence fails and the result is True.
        """
        with self._isolate_errors(sequence):
            return sequence.update_prefix_wait(self._running)
        return True

    def _start_decoding(self, sequence: ScheduledSequence) -> bool:
        """Finish the prefill of a sequence after the target has run its prompt; return whether it is ready to decode.

        Runs a prefill chunk of a draft model and returns False while one is left. Then prepares the drafter, saves the KV cache
        and sends the `Prompt` event. Finishes a sequence that may not generate any token.
        """
        metrics, request, drafter = self._metrics, sequence.handle.request, sequence.sequence.drafter
        with self._isolate_errors(sequence):
            if drafter:
                if sequence.prefill_draft_models():
                    return False
                drafter.prepare(request.prompt)
            sequence.is_prefilled = True
        if not sequence.is_prefilled:
            return False
        sequence.slot.save_to_prefix_cache(request.prompt)
        metrics.prompt_tokens += len(request.prompt)
        metrics.cached_tokens += sequence.n_cached
        event = Prompt(request.prompt, time.perf_counter() - sequence.start_time)
        self._send_event(sequence.handle, sequence.detokenizer.detokenize(event))
        if sequence.sequence.is_finished:
            self._finish(sequence, Step([], [], 0, 0.0, 0.0, "max_tokens"))
        return not sequence.sequence.is_finished

    def _select_decode_batch(self, ready: list[ScheduledSequence], max_tokens: int) -> list[ScheduledSequence]:
        """Return the ready sequences to decode in the next pass: their last tokens and drafts fit into `max_tokens`.

        Proposes the missing drafts. A sequence with a tree is returned alone. Those that do not fit go first in the next pass.
        """
        self._cost_model.begin_pass(len(ready), max_tokens)
        batch, n_tokens = list[ScheduledSequence](), 0
        for sequence in ready:
            if sequence.draft is None:
                with self._isolate_errors(sequence):
                    sequence.draft = sequence.sequence.propose()
                if sequence.draft is None:
                    continue
            n = 1 + len(sequence.draft.tokens)
            if n_tokens and (n_tokens + n > max_tokens or sequence.has_tree):
                continue
            batch.append(sequence)
            n_tokens += n
            self._cost_model.add_tokens(n - 1)
            if sequence.has_tree:
                break
        return batch

    def _select_prefill_chunks(
        self, prefilling: list[ScheduledSequence], decode_batch: list[ScheduledSequence]
    ) -> list[tuple[ScheduledSequence, int]]:
        """Return the sequences to prefill in the next pass, each with the number of tokens of its chunk.

        Chunks are small enough that decoding sequences do not wait for long. The sequence with the fewest tokens left goes first;
        the sequences that wait for its prefix count too. The oldest sequence always gets a chunk.
        """
        cost = self._cost_model.pass_cost
        n_decode_tokens = sum(1 + len(sequence.draft.tokens) for sequence in decode_batch if sequence.draft)
        budget = MAX_BATCH_TOKENS - n_decode_tokens
        if decode_batch:
            while (
                budget > MIN_PREFILL_CHUNK_TOKENS and cost(n_decode_tokens + budget) - cost(n_decode_tokens) > MAX_PREFILL_CHUNK_S
            ):
                budget -= 1
        oldest = min(prefilling, key=lambda sequence: sequence.start_time, default=None)
        chunks = list[tuple[ScheduledSequence, int]]()
        for sequence in sorted(prefilling, key=lambda sequence: sequence.get_min_prefill_tokens(self._running)):
            n_reserved = MIN_PREFILL_CHUNK_TOKENS if oldest not in (None, sequence, *(chosen for chosen, _ in chunks)) else 0
            n = min(sequence.model.count_tokens_to_snapshot(sequence.sequence.tokens), budget - n_reserved)
            if n > 0:
                chunks.append((sequence, n))
                budget -= n
        return chunks

    def _run_batch(self, decode_batch: list[ScheduledSequence], chunks: list[tuple[ScheduledSequence, int]]) -> None:
        """Run a forward pass of prefill chunks and a decode batch, then verify the drafts and send the new tokens.

        Adds the pass time to the clients' and updates the cost model. If the pass fails, each sequence runs alone.
        """
        # inputs: the prefill chunks, then the decode batch
        start = time.perf_counter()
        inputs = [(sequence.model, sequence.get_prefill_input(n), 0, len(sequence.sequence.tokens)) for sequence, n in chunks]
        for sequence in decode_batch:
            draft_tokens = sequence.draft.tokens if sequence.draft else []
            inputs.append((sequence.model, sequence.sequence.tokens + draft_tokens, len(draft_tokens) + 1, 0))
        self._metrics.passes += 1
        with self._decoder.target.lock:
            try:
                all_logits = Transformer.forward_batch(inputs)
            except Exception:
                self._run_separately(decode_batch, chunks)
                return
            verified = list[tuple[ScheduledSequence, tuple[list[int], int]]]()
            for sequence, logits in zip(decode_batch, all_logits[len(chunks) :], strict=True):
                with self._isolate_errors(sequence):
                    verified.append((sequence, sequence.sequence.verify(logits)))
        # pass time by client, in proportion to its tokens
        seconds = time.perf_counter() - start
        n_tokens = sum(len(logits) for logits in all_logits)
        token_counts = [*chunks, *zip(decode_batch, map(len, all_logits[len(chunks) :]), strict=True)]
        n_run = sum(n for _, n in token_counts)
        for sequence, n in token_counts:
            self._client_seconds[sequence.client] += seconds * n / n_run
        for sequence, _ in chunks:
            sequence.slot.save_to_prefix_cache(sequence.handle.request.prompt, False)
        if not chunks:
            self._decoder.autotuner.record_step(n_tokens, seconds)
        n_generated = sum([self._commit_step(sequence, *outcome, seconds) for sequence, outcome in verified])
        if len(verified) == self._cost_model.n_sequences and not chunks:
            self._cost_model.end_pass(n_tokens, n_generated, seconds, start - self._last_pass_end if self._last_pass_end else 0.0)
        self._last_pass_end = time.perf_counter()

    def _run_separately(self, decode_batch: list[ScheduledSequence], chunks: list[tuple[ScheduledSequence, int]]) -> None:
        """Run each sequence of a failed pass in a pass of its own, so that only the one that causes the error fails."""
        for sequence, n in chunks:
            with self._isolate_errors(sequence):
                sequence.model.forward(sequence.get_prefill_input(n), 0, len(sequence.sequence.tokens))
        for sequence in decode_batch:
            self._run_alone(sequence)

    def _run_alone(self, sequence: ScheduledSequence) -> None:
        """Run a decode step of one sequence in a pass of its own and send the new tokens; the sequence fails if that raises."""
        start = time.perf_counter()
        with self._isolate_errors(sequence):
            outcome = run_and_verify(sequence.model, sequence.sequence)
            self._metrics.passes += 1
            seconds = time.perf_counter() - start
            self._client_seconds[sequence.client] += seconds
            self._commit_step(sequence, *outcome, seconds)

    def _commit_step(self, sequence: ScheduledSequence, new: list[int], n_accepted: int, seconds: float) -> int:
        """Add verified tokens to a sequence, send them, finish the sequence if it ends, and return the number of the tokens."""
        n = len(new)  # before commit, which drops an end-of-sequence token
        step = sequence.detokenizer.detokenize(sequence.sequence.commit(new, n_accepted, seconds))
        sequence.draft = None
        assert isinstance(step, Step)
        self._record_step(sequence, step)
        if step.stop_reason:
            self._finish(sequence, step)
        else:
            self._send_event(sequence.handle, step)
        return n

    def _record_step(self, sequence: ScheduledSequence, step: Step) -> None:
        metrics = self._metrics
        if step.tokens and not sequence.has_output:
            sequence.has_output = True
            metrics.time_to_first_token.observe(time.perf_counter() - sequence.handle.submit_time)
        metrics.generated_tokens += len(step.tokens)
        metrics.drafted_tokens += len(step.draft_tokens)
        metrics.accepted_tokens += step.n_accepted

    def _finish(self, sequence: ScheduledSequence, step: Step) -> None:
        sequence.is_finished = True
        self._remove(sequence)
        self._send_event(sequence.handle, step)

    @contextmanager
    def _isolate_errors(self, sequence: ScheduledSequence) -> Iterator[None]:
        """Fail only the given sequence if the work inside the context raises, and suppress the exception."""
        try:
            yield
        except Exception as error:
            self._fail_sequence(sequence, error)

    def _fail_sequence(self, sequence: ScheduledSequence, error: Exception) -> None:
        self._running.remove(sequence)
        self._slot_pool.drop(sequence.slot)
        self._fail_request(sequence.handle, error)

    def _fail_request(self, handle: RequestHandle, error: Exception) -> None:
        self._metrics.failed += 1
        self._send_event(handle, error)

    @staticmethod
    def _send_event(handle: RequestHandle, event: Event | PrefillProgress | Exception) -> None:
        """Send an event to the callback of a request that is not cancelled; a callback that raises cancels its request."""
        if handle.is_cancelled:
            return
        try:
            handle.on_event(event)
        except Exception:
            handle.is_cancelled = True


def compute_logprobs(logits: Float32, draft: Draft, new: list[int], n_top: int, n_ids: int | None = None) -> list[TokenLogprob]:
    """Return the log-probabilities of new tokens and of the most probable ones at their positions.

    Args:
        logits: Logits (n + 1, V) at the sequence's last token and at each of the n draft tokens.
        draft: The draft that was verified.
        new: The tokens to rate.
        n_top: Number of most probable tokens per position.
        n_ids: Number of ids that have tokens, from 0; None for all of V.
    """
    results, node = list[TokenLogprob](), -1
    for token in new:
        logprobs = logits[node + 1, :n_ids].astype(np.float64)
        logprobs -= logprobs.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        top = np.argpartition(-logprobs, n_top)[:n_top] if n_top < len(logprobs) else np.arange(len(logprobs))
        top = top[np.lexsort((top, -logprobs[top]))]
        results.append(
            TokenLogprob(token, float(logprobs[token]), [(int(candidate), float(logprobs[candidate])) for candidate in top])
        )
        node = next((child for child in draft.children(node) if draft.tokens[child] == token), -1)
    return results
