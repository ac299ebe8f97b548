"""Prefix cache: the KV caches of running sequences, and idle ones for prompts that begin like an earlier one.

Eight new conversations with the same instructions have their first token after 0.50 to 0.83 s, without a shared prefix after 1.4.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from specdec.argument_checks import replace_unknown_tokens
from specdec.draft.lookup_tables import LookupMemory
from specdec.draft.model_bundle import ModelBundle, SequenceCaches
from specdec.runtime.parallel_region import create_fork_safe_lock
from specdec.runtime.simd import round_up

if TYPE_CHECKING:
    from specdec.engine.disk_prompt_cache import PromptCache

# prompt tokens that are worth a copy from another slot; also other tokens in a slot that are worth keeping it
MIN_SHARED_PREFIX_TOKENS = 8
MAX_MEMORIES = 16  # of looked-up drafts, 4.5 MB each
CAPACITY_STEP_TOKENS = 128  # granularity of cache sizes


class KVSlot:
    """The KV caches of all models for one sequence at a time.

    Attributes:
        caches: The KV caches.
        cache_salt: Only sequences with the same salt may reuse the KV caches.
        memory: The tokens and runner-ups that sequences with the same salt have left for looked-up drafts.
        n_reserved: Most tokens that the current sequence may grow to; 0 for an idle slot.
        n_peak: Most tokens that any finished sequence in the slot has had.
    """

    def __init__(self, caches: SequenceCaches, cache_salt: str, memory: LookupMemory) -> None:
        """Create a slot from caches that nothing else uses."""
        self.caches, self.cache_salt, self.memory = caches, cache_salt, memory
        self.n_reserved = self.n_peak = 0

    def reserve(self, n_tokens: int, memory: LookupMemory) -> None:
        """Record the needs of the slot's new sequence; allocates nothing.

        Args:
            n_tokens: Most tokens that the sequence may grow to.
            memory: Tables in which the sequence looks up drafts.
        """
        self.n_reserved, self.memory = n_tokens, memory

    def release(self, n_tokens: int) -> None:
        """Make the slot idle after its sequence has ended with n_tokens tokens."""
        self.n_reserved, self.n_peak = 0, max(self.n_peak, n_tokens)

    def count_cached_tokens(self, prompt: list[int]) -> int:
        """Return how many tokens at the start of a prompt are in the target's KV cache and need not run again."""
        return max(len(prompt) - 1, 0) - self.caches.target.count_prefill_tokens(prompt)

    def copy_from(self, other: "KVSlot", prompt: list[int]) -> None:
        """Copy the KV cache of a prompt's prefix from another slot, for each model.

        A model is skipped if the copy saves it less than MIN_SHARED_PREFIX_TOKENS tokens, or the prompt exceeds its positions.
        """
        for cache, other_cache in zip(self.caches.all, other.caches.all, strict=True):
            tokens = replace_unknown_tokens(prompt, cache.model.vocab_size)
            if (
                len(tokens) <= cache.model.n_positions
                and cache.count_prefill_tokens(tokens) - other_cache.count_prefill_tokens(tokens) >= MIN_SHARED_PREFIX_TOKENS
            ):
                cache.copy_from(other_cache, tokens)

    @property
    def n_held(self) -> int:
        """Number of tokens in the target's KV cache, left by the last sequence that used the slot."""
        return self.caches.target.n_tokens

    @property
    def capacity(self) -> int:
        """Number of tokens that the slot needs memory for, now or later, rounded up to `CAPACITY_STEP_TOKENS`."""
        n: int = round_up(max(self.n_reserved, self.n_peak), CAPACITY_STEP_TOKENS)
        return n


class PrefixCache:
    """Slots with KV caches that take at most `max_bytes` together; a single slot may be larger. Threads may share it.

    If memory is short, the slot that has been idle longest is dropped first. Slots are reused only with the same cache salt:
    the time of a prefill would reveal how other clients' prompts begin.

    Args:
        bundle: The models.
        max_idle: Most idle slots; beyond it, the one that is idle longest serves the next conversation.
        prompt_cache: Keeps prefilled prompts of the target on disk for later processes; None for none.
        max_bytes: Memory limit of all slots, in bytes; infinite by default.

    Attributes:
        prompt_cache: The argument of that name.
        idle: Slots without a sequence; the first one has been idle longest.
        in_use: Slots with a running sequence.
    """

    def __init__(
        self, bundle: ModelBundle, max_idle: int, prompt_cache: "PromptCache | None" = None, max_bytes: float = math.inf
    ) -> None:
        """Create a prefix cache without slots."""
        self._bundle, self.prompt_cache, self._max_bytes, self._max_idle = bundle, prompt_cache, max_bytes, max_idle
        self._lock: threading.RLock
        create_fork_safe_lock(self, "_lock")
        self._bytes_by_capacity: dict[int, int] = {}
        self.idle, self.in_use = list[KVSlot](), weakref.WeakSet[KVSlot]()
        self._memories = dict[str, LookupMemory]()  # by cache salt, the last used one at the end
        self._ended = deque[tuple[KVSlot, int | None]]()  # slots that are in use no more, with the length if it is known

    def acquire(self, prompt: list[int], n_tokens: int, cache_salt: str = "") -> KVSlot | None:
        """Return a slot for a new sequence, filled with the longest cached prefix of its prompt; None while memory is short.

        The slot that holds the prefix is returned where little else in it would be lost, otherwise another slot with a copy of
        the prefix. A copy serves, for example, instructions that many prompts begin with. Idle slots are dropped to free memory.
        The prompt cache on disk, if there is one, may add more of the prompt.

        Args:
            prompt: Tokens of the prompt.
            n_tokens: Most tokens that the sequence may grow to.
            cache_salt: Only slots with the same salt are reused.
        """
        with self._lock:
            self.settle()
            if not self._can_fit(self.in_use, n_tokens):
                return None
            return self._acquire(prompt, n_tokens, cache_salt)

    def _acquire(self, prompt: list[int], n_tokens: int, cache_salt: str) -> KVSlot:
        """Return a slot as `acquire` does; `acquire` has checked that the slot fits into memory."""
        n_held_by_slot = {
            slot: slot.count_cached_tokens(prompt) for slot in (*self.in_use, *self.idle) if slot.cache_salt == cache_salt
        }
        source = max(
            (slot for slot, n in n_held_by_slot.items() if n >= MIN_SHARED_PREFIX_TOKENS),
            default=None,
            key=n_held_by_slot.__getitem__,
        )
        slot = self._get_free_slot(source, n_held_by_slot[source] if source else 0, n_tokens, cache_salt)
        slot.reserve(n_tokens, self._get_memory(slot.caches, cache_salt))
        while self.idle and not self._can_fit((*self.idle, *self.in_use), slot.capacity):
            del self.idle[0]
        if source and source is not slot:
            slot.copy_from(source, prompt)
        if self.prompt_cache and len(prompt) <= self._bundle.target.n_positions:
            self.prompt_cache.restore(slot.caches.target, prompt, cache_salt)
        self.in_use.add(slot)
        return slot

    def release(self, slot: KVSlot, n_tokens: int) -> None:
        """Make a slot idle after its sequence has ended with n_tokens tokens; the KV caches stay for later prompts.

        This takes no lock, since the garbage collector may end an abandoned stream at any point.
        """
        self._ended.append((slot, n_tokens))

    def drop(self, slot: KVSlot) -> None:
        """Remove a slot in use together with its KV caches, for example after an error; this takes no lock either."""
        self._ended.append((slot, None))

    def settle(self) -> None:
        """Make idle the slots that have ended, and drop those that are idle longest beyond the limit."""
        while self._ended:
            slot, n_tokens = self._ended.popleft()
            self.in_use.discard(slot)
            if n_tokens is not None:
                slot.release(n_tokens)
                self.idle.append(slot)
        del self.idle[: max(len(self.idle) - self._max_idle, 0)]

    def limit_bytes(self, max_bytes: float) -> None:
        """Set the memory limit of all slots, for sequences that start from now on."""
        self._max_bytes = max_bytes

    def _get_free_slot(self, source: KVSlot | None, n_prefix: int, n_tokens: int, cache_salt: str) -> KVSlot:
        """Take a slot for a prompt from the idle slots, or make a new one, and return it.

        In this order: `source`, if it is idle and not worth keeping; an empty slot; a new one; with `max_idle` idle slots, the
        one that is idle longest, `source` last. Slots too large to fit next to those in use are skipped. A slot with another
        cache salt is dropped for a new one.

        Args:
            source: The slot that holds the longest prefix of the prompt, if any.
            n_prefix: Tokens of that prefix.
            n_tokens: Most tokens that the sequence may grow to.
            cache_salt: The salt of the new slot.
        """
        idle = [slot for slot in self.idle if self._can_fit(self.in_use, max(n_tokens, slot.n_peak))]
        slot = next((slot for slot in idle if not slot.n_held), None)
        if source and source in idle and not self._is_worth_keeping(source, n_prefix, n_tokens):
            slot = source
        elif not slot and len(self.idle) >= self._max_idle:
            candidates = [slot for slot in idle if slot is not source] or idle
            slot = candidates[0] if candidates else self.idle.pop(0)
        if slot in self.idle:
            self.idle.remove(slot)
            if slot.cache_salt == cache_salt:
                return slot
        caches = self._bundle.new_caches()
        return KVSlot(caches, cache_salt, self._get_memory(caches, cache_salt))

    def _get_memory(self, caches: SequenceCaches, cache_salt: str) -> LookupMemory:
        """Return the memory of looked-up drafts of a cache salt, or a new one, filled from the prompt cache if there is one.

        Beyond `MAX_MEMORIES`, the one used longest ago is dropped.
        """
        memory = self._memories.pop(cache_salt, None)
        if not memory:
            memory = LookupMemory()
            if self.prompt_cache and self._bundle.uses_lookup:
                self.prompt_cache.restore_memory(caches.target, memory, self._bundle.n_ids, cache_salt)
        self._memories[cache_salt] = memory
        if len(self._memories) > MAX_MEMORIES:
            del self._memories[next(iter(self._memories))]
        return memory

    def _is_worth_keeping(self, source: KVSlot, n_prefix: int, n_tokens: int) -> bool:
        """Return whether to keep a slot for its other tokens, and copy its first n_prefix tokens to another slot instead.

        The slot must hold `MIN_SHARED_PREFIX_TOKENS` other tokens if both slots fit into memory, otherwise more than n_prefix.
        """
        both_fit = self._can_fit((*self.in_use, source), n_tokens)
        return source.n_held - n_prefix >= (MIN_SHARED_PREFIX_TOKENS if both_fit else n_prefix + 1)

    def _can_fit(self, slots: Iterable[KVSlot], n_tokens: int) -> bool:
        """Return whether a slot for n_tokens tokens fits into memory next to the given slots; True if there are none."""
        others = [slot.capacity for slot in slots]
        if not others:
            return True
        capacities = [round_up(n_tokens, CAPACITY_STEP_TOKENS), *others]
        for capacity in {*capacities} - self._bytes_by_capacity.keys():
            self._bytes_by_capacity[capacity] = self._bundle.get_sequence_bytes(capacity)
        return sum(self._bytes_by_capacity[capacity] for capacity in capacities) <= self._max_bytes
