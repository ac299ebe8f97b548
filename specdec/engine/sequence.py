"""Sequence: one request being generated, with its status, its KV caches and its decoding state."""

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from specdec.argument_checks import count_common_prefix, replace_unknown_tokens
from specdec.engine.prefix_cache import MIN_SHARED_PREFIX_TOKENS, KVSlot
from specdec.engine.request import GenerationRequest
from specdec.events import Event, PrefillProgress, Prompt, Proposal, Step, StopReason
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.kv_cache import KVCache
from specdec.speculative import DecodingState, Verified
from specdec.tokenizer import AnyTokenizer

MIN_DEFERRED_TOKENS = 4 * MAX_BATCH_TOKENS  # of a prompt that a draft model reads after the first token
INTERRUPTED: StopReason = "interrupted"  # of a sequence that ends because the process does


class SequenceStatus(Enum):
    """The stage of a sequence between its request and its last token."""

    WAITING = "waiting"  # for a slot
    PREFILL = "prefill"  # the prompt runs
    RECOMPUTE = "recompute"  # the whole sequence runs again, with other RoPE factors
    DECODE = "decode"  # the next draft is to be proposed
    VERIFY = "verify"  # a draft, possibly an empty one, waits for its pass
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


BEFORE_OUTPUT = (SequenceStatus.WAITING, SequenceStatus.PREFILL)
PREFILLING = (SequenceStatus.PREFILL, SequenceStatus.RECOMPUTE)
ENDED = (SequenceStatus.FINISHED, SequenceStatus.CANCELLED, SequenceStatus.FAILED)


class Client(NamedTuple):
    """The sender of a request.

    Attributes:
        name: Key for fairness between clients.
        cache_salt: Key for cache sharing: only clients with the same salt read each other's KV caches.
    """

    name: str = ""
    cache_salt: str = ""


class Sequence:
    """A request being generated.

    Attributes:
        request: The request, validated.
        client: The sender.
        status: The stage that the sequence is in.
        submit_time: When the request arrived, as `time.perf_counter`.
        start_time: When the sequence got its slot; infinite before.
        slot: The KV caches, from `start` on.
        state: The state of speculative decoding, from `start` on.
        n_cached: Prompt tokens found in a KV cache, which need not run.
        prefix_donor: Another sequence that is prefilling a prefix of both prompts. This sequence waits for it and then copies the
            KV cache of the prefix. None if there is no such sequence.
        n_shared_prefix: Tokens of the prefix that both prompts share.
        n_steps: Number of steps so far.
        first_token_seconds: Time from the request to the first token; None before.
    """

    slot: KVSlot
    state: DecodingState

    def __init__(self, request: GenerationRequest, tokenizer: AnyTokenizer, client: Client = Client()) -> None:  # noqa: B008
        """Create a waiting sequence that has no KV cache slot yet."""
        self.request, self.client = request, client
        self.status = SequenceStatus.WAITING
        self.submit_time, self.start_time = time.perf_counter(), math.inf
        self.n_cached = self.n_shared_prefix = self.n_steps = 0
        self.prefix_donor: Sequence | None = None
        self.first_token_seconds: float | None = None
        self._detokenizer = request.make_detokenizer(tokenizer)
        self._prefill_work, self._prefill_start = 0, 0.0  # tokens times weight bytes of this prefill; when it began
        self._extra_seconds = 0.0  # of a prefill of the whole sequence, which counts to the next step
        self._skipped_caches = list[KVCache]()  # of drafts that cannot prefill this prompt
        self._is_draft_deferred = False  # whether draft models prefill the prompt after the first token

    @property
    def has_ended(self) -> bool:
        """Whether the sequence is finished, cancelled or failed."""
        return self.status in ENDED

    @property
    def has_started(self) -> bool:
        """Whether the sequence has or had a slot."""
        return self.start_time < math.inf

    @property
    def is_prefilling(self) -> bool:
        """Whether the prompt, or the whole sequence, is to run before the next token."""
        return self.status in PREFILLING

    @property
    def has_proposed(self) -> bool:
        """Whether the sequence has a draft, possibly an empty one, that has not been verified yet."""
        return self.status is SequenceStatus.VERIFY

    @property
    def cache(self) -> KVCache:
        """The target's KV cache of this sequence."""
        return self.slot.caches.target

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt, then the generated ones."""
        return self.state.tokens

    @property
    def has_tree(self) -> bool:
        """Whether the draft to verify is a tree of tokens, which needs a forward pass of its own."""
        return self.has_proposed and self.state.draft.parents is not None

    def start(self, slot: KVSlot, state: DecodingState) -> None:
        """Store the slot and the decoding state, count the cached prompt tokens, and begin the prefill of the prompt."""
        self.slot, self.state, self.start_time = slot, state, time.perf_counter()
        self.n_cached = self.count_prefilled()
        self.begin_prefill(SequenceStatus.PREFILL)

    def begin_prefill(self, status: SequenceStatus) -> None:
        """Begin to run the prompt, or the whole sequence again."""
        self.status, self._prefill_start, self._skipped_caches = status, time.perf_counter(), []
        self._is_draft_deferred = status is SequenceStatus.PREFILL and self._can_defer_draft()
        self._prefill_work = self._count_prefill_work()

    def _can_defer_draft(self) -> bool:
        """Return whether draft models can read the prompt after the first token, and it is long enough for that."""
        # Other verifiers' outputs depend on the draft, and a draft that reads the target's hidden states follows its passes.
        can_defer = self.state.verifier.is_coupled and not any(each.model.target_layers for each in self.slot.caches.drafts)
        return can_defer and self.request.max_tokens > 0 and self._count_draft_prefill_tokens() >= MIN_DEFERRED_TOKENS

    def start_decoding(self) -> Prompt | None:
        """End the prefill and prepare the drafter; return the `Prompt` event, or None after a repeated prefill."""
        # Drop what the cache holds beyond the sequence: a head would draft from the hidden states of an earlier output.
        self.cache.forward(self.tokens[:-1], 0, len(self.tokens))
        if self.state.drafter and not self._is_draft_deferred:
            self.state.drafter.prepare([*self.tokens])
        is_repeated, now = self.status is SequenceStatus.RECOMPUTE, time.perf_counter()
        self.status = SequenceStatus.DECODE
        if is_repeated:
            self._extra_seconds = now - self._prefill_start
            return None
        return self._make_prompt_event(now - self.start_time)

    def _make_prompt_event(self, seconds: float) -> Prompt:
        """Return the `Prompt` event, with the seconds that the prefill took."""
        return self._detokenizer.add_prompt_text(Prompt([*self.request.prompt], seconds, n_cached=self.n_cached))

    def propose(self) -> None:
        """Make the draft for the next pass, or run a prefill chunk of a deferred draft model, once there is a first token."""
        if self._is_draft_deferred and self.first_token_seconds is not None:
            begin = time.perf_counter()
            if self._count_draft_prefill_tokens() > MAX_BATCH_TOKENS:
                self.prefill_draft_models()
            elif self.state.drafter:
                self._is_draft_deferred = False
                self.state.drafter.prepare([*self.tokens])
            self._extra_seconds += time.perf_counter() - begin
        self.state.propose(can_draft=not self._is_draft_deferred)
        self.status = SequenceStatus.VERIFY

    def make_proposal_event(self) -> Proposal:
        """Return the `Proposal` event of the current draft."""
        return self._detokenizer.add_draft_text(self.state.proposal)

    def commit(self, verified: Verified, seconds: float, experts: tuple[float, int]) -> Step:
        """Add verified tokens and return the `Step` event with its text; see `DecodingState.commit` for the arguments.

        A step with a stop reason finishes the sequence.
        """
        return self._finish_step(self.state.commit(verified, seconds, experts))

    def interrupt(self) -> list[Event]:
        """Finish the sequence now, and return its last events: the `Prompt` if it has none yet, and an empty step."""
        is_early = self.status in BEFORE_OUTPUT
        prompt: list[Event] = [self._make_prompt_event(0.0)] if is_early else []
        return [*prompt, self._finish_step(Step([], [], 0, 0.0, 0.0, INTERRUPTED))]

    def end(self, status: SequenceStatus) -> None:
        """Set the status with which the sequence has ended."""
        self.status = status

    def _finish_step(self, step: Step) -> Step:
        """Return a step with its text and the time of a repeated prefill, and count it."""
        self.n_steps += 1
        if self._extra_seconds:
            step, self._extra_seconds = replace(step, seconds=step.seconds + self._extra_seconds), 0.0
        step = self._detokenizer.add_text(step)
        if step.tokens and self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.submit_time
        self.status = SequenceStatus.FINISHED if step.stop_reason else SequenceStatus.DECODE
        return step

    @property
    def n_prefill_tokens(self) -> int:
        """Number of tokens that the target has to run before it can run the last token of the sequence."""
        return self.cache.count_prefill_tokens(self.tokens)

    def get_prefill_input(self, n: int) -> list[int]:
        """Return the tokens of the sequence up to the end of a prefill chunk of n tokens, including those already cached."""
        return self.tokens[: len(self.tokens) - 1 - self.n_prefill_tokens + n]

    def count_prefilled(self) -> int:
        """Return how many tokens of the prompt are in the KV cache of the sequence's slot."""
        return self.slot.count_cached_tokens(self.request.prompt)

    def prefill_draft_models(self) -> bool:
        """Run a prefill chunk of a draft model that has not run all tokens; return False if there is none."""
        for cache, tokens in self._iter_prefill_inputs():
            n_left = cache.count_prefill_tokens(tokens) if cache is not self.cache else 0
            if n_left:
                cache.forward(tokens[: len(tokens) - 1 - max(n_left - MAX_BATCH_TOKENS, 0)], 0, len(tokens))
                if cache.count_prefill_tokens(tokens) >= n_left:
                    self._skipped_caches.append(cache)
                return True
        return False

    def _count_draft_prefill_tokens(self) -> int:
        """Return the tokens that the draft model with the most of them has yet to run."""
        inputs = (each for each in self._iter_prefill_inputs() if each[0] is not self.cache)
        return max((cache.count_prefill_tokens(tokens) for cache, tokens in inputs), default=0)

    def _iter_prefill_inputs(self) -> Iterator[tuple[KVCache, list[int]]]:
        """Yield each cache that can prefill the sequence, with the tokens as its model knows them."""
        for cache in self.slot.caches.all:
            if len(self.tokens) <= cache.model.n_positions and cache not in self._skipped_caches:
                yield cache, replace_unknown_tokens(self.tokens, cache.model.vocab_size)

    @property
    def prefill_progress(self) -> PrefillProgress | None:
        """The event that reports the progress of the prefill; None if there was nothing to run."""
        if not self._prefill_work:
            return None
        event = PrefillProgress([*self.tokens], 1 - self._count_prefill_work() / self._prefill_work)
        return self._detokenizer.add_prompt_text(event)

    def _count_prefill_work(self) -> int:
        """Return the tokens that all models have yet to run before the first token, times the bytes of their weights."""
        inputs = (each for each in self._iter_prefill_inputs() if each[0] is self.cache or not self._is_draft_deferred)
        return sum(cache.count_prefill_tokens(tokens) * cache.model.weights.n_bytes for cache, tokens in inputs)

    @property
    def needs_draft_prefill(self) -> bool:
        """Whether draft models prefill the prompt before the decoding starts."""
        return self.state.drafter is not None and not self._is_draft_deferred

    def find_prefix_donor(self, running: Collection["Sequence"]) -> bool:
        """Find an earlier sequence that is prefilling a prefix of this prompt, and return whether there is one.

        Sets `prefix_donor` and `n_shared_prefix` to the sequence with the longest prefix. The prefix must have at least
        `MIN_SHARED_PREFIX_TOKENS` tokens more than this sequence has cached.
        """
        prompt, is_long = self.request.prompt, self.cache.model.config.has_long_rope
        best = self.n_cached + MIN_SHARED_PREFIX_TOKENS - 1, len(prompt)
        for other in running:
            other_prompt = other.request.prompt
            n_common, n_prefilled = count_common_prefix(other_prompt[:-1], prompt, len(prompt) - 1), other.count_prefilled()
            is_compatible = other.slot.cache_salt == self.slot.cache_salt and is_long(len(other_prompt)) == is_long(len(prompt))
            if (
                is_compatible
                and n_prefilled < n_common
                and other.status is SequenceStatus.PREFILL
                and other.start_time < self.start_time
                and (n_common, n_prefilled) > best
            ):
                self.prefix_donor, self.n_shared_prefix, best = other, n_common, (n_common, n_prefilled)
        return self.prefix_donor is not None

    def update_prefix_wait(self, running: Collection["Sequence"]) -> bool:
        """Return whether this sequence has to wait for another one that is prefilling a prefix of its prompt.

        Copies the KV cache of the prefix once it has run, or of its first tokens if the other sequence has stopped. Then looks
        for another sequence to wait for.
        """
        if not (donor := self.prefix_donor):
            return False
        if donor.status is SequenceStatus.PREFILL and donor.count_prefilled() < self.n_shared_prefix:
            return True
        self.prefix_donor = None
        self.slot.copy_from(donor.slot, self.request.prompt)
        self.n_cached = self.count_prefilled()
        self._prefill_work = self._count_prefill_work()
        return self.find_prefix_donor(running)

    def get_min_prefill_tokens(self, running: Collection["Sequence"]) -> int:
        """Return how many tokens have to run until this sequence, or one that waits for a prefix from it, can continue."""
        shared = (other.n_shared_prefix - self.count_prefilled() for other in running if other.prefix_donor is self)
        return min([self.n_prefill_tokens, *shared])
