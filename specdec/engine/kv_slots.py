"""KV cache slots: one for each running sequence, and idle ones for the conversations that may continue."""

from collections.abc import Callable, Sequence

from specdec.argument_checks import replace_unknown_tokens
from specdec.draft.model_bundle import ModelBundle
from specdec.runtime.simd import round_up

# prompt tokens that are worth a copy from another slot; also other tokens in a slot that are worth keeping it
MIN_SHARED_PREFIX_TOKENS = 8
CAPACITY_STEP_TOKENS = 128  # granularity of cache sizes


class KVSlot:
    """A set of models with KV caches, used by one sequence at a time.

    Attributes:
        bundle: The models.
        cache_salt: Only sequences with the same salt may reuse the KV caches.
        n_reserved: Most tokens that the current sequence may grow to; 0 for an idle slot.
        n_peak: Most tokens that any finished sequence in the slot has had.
    """

    def __init__(self, bundle: ModelBundle, cache_salt: str) -> None:
        self.bundle, self.cache_salt = bundle, cache_salt
        self.n_reserved = self.n_peak = 0

    def count_cached_tokens(self, prompt: list[int]) -> int:
        """Return how many tokens at the start of a prompt are in the target's KV cache and need not run again."""
        return max(len(prompt) - 1, 0) - self.bundle.target.count_prefill_tokens(prompt)

    def copy_kv(self, other: "KVSlot", prompt: list[int]) -> None:
        """Copy the KV cache of a prompt's prefix from another slot, for each model that saves enough tokens by the copy."""
        for model, other_model in zip(self.bundle.models.values(), other.bundle.models.values(), strict=True):
            tokens = replace_unknown_tokens(prompt, model.config.vocab_size)
            if (
                len(tokens) <= model.n_positions
                and model.count_prefill_tokens(tokens) - other_model.count_prefill_tokens(tokens) >= MIN_SHARED_PREFIX_TOKENS
            ):
                model.copy_kv(other_model, tokens)

    def save_to_prefix_cache(self, tokens: list[int], is_prefilled: bool = True) -> None:
        """Save the target's KV cache of the given tokens to the prefix cache; do nothing without a prefix cache.

        Args:
            tokens: Tokens of the sequence.
            is_prefilled: Whether the prefill of the tokens is complete.
        """
        if self.bundle.prompt_cache:
            self.bundle.prompt_cache.save(self.bundle.target, tokens, is_prefilled, self.cache_salt)

    @property
    def n_held(self) -> int:
        """Number of tokens in the target's KV cache, left by the last sequence that used the slot."""
        return self.bundle.target.n_cached_tokens

    @property
    def capacity(self) -> int:
        """Number of tokens that the slot needs memory for, now or later, rounded up to `CAPACITY_STEP_TOKENS`."""
        n: int = round_up(max(self.n_reserved, self.n_peak), CAPACITY_STEP_TOKENS)
        return n

    def get_n_bytes(self, n: int) -> int:
        """Return the memory in bytes that the KV caches of all models take for a sequence of n tokens."""
        return sum(model.get_sequence_bytes(min(n, model.n_positions), True) for model in self.bundle.models.values())


class SlotPool:
    """A pool of slots with KV caches that take at most `max_bytes` together; a single slot may be larger.

    Where memory is short, the slot that has been idle longest is dropped first. Slots are reused only with the same cache salt:
    the time of a prefill would reveal how other clients' prompts begin.

    Args:
        make_bundle: Returns models with KV caches of their own, for a new slot.
        max_bytes: Memory limit of all slots, in bytes.
        max_idle: Most idle slots; beyond it, the one that is idle longest serves the next conversation.
    """

    def __init__(self, make_bundle: Callable[[], ModelBundle], max_bytes: int, max_idle: int) -> None:
        self._make_bundle, self.max_bytes, self._max_idle = make_bundle, max_bytes, max_idle
        self._bytes_by_capacity: dict[int, int] = {}
        self._idle, self._in_use = list[KVSlot](), list[KVSlot]()  # the first one has been idle longest

    def acquire(self, prompt: list[int], n_tokens: int, cache_salt: str = "") -> KVSlot | None:
        """Return a slot for a new sequence, filled with the longest cached prefix of its prompt; None while memory is short.

        The slot that holds the prefix is returned where little else in it would be lost, otherwise another slot with a copy of
        the prefix. A copy serves, for example, instructions that many prompts begin with. Idle slots are dropped to free memory.
        The prefix cache, if there is one, may add more of the prompt.

        Args:
            prompt: Tokens of the prompt.
            n_tokens: Most tokens that the sequence may grow to.
            cache_salt: Only slots with the same salt are reused.
        """
        if not self._can_fit(self._in_use, n_tokens):
            return None
        n_held_by_slot = {
            slot: slot.count_cached_tokens(prompt) for slot in (*self._in_use, *self._idle) if slot.cache_salt == cache_salt
        }
        source = max(
            (slot for slot, n in n_held_by_slot.items() if n >= MIN_SHARED_PREFIX_TOKENS),
            default=None,
            key=n_held_by_slot.__getitem__,
        )
        slot = self._get_free_slot(source, n_held_by_slot[source] if source else 0, n_tokens, cache_salt)
        slot.n_reserved = n_tokens
        while self._idle and not self._can_fit((*self._idle, *self._in_use), slot.capacity):
            del self._idle[0]
        if source and source is not slot:
            slot.copy_kv(source, prompt)
        if prompt_cache := slot.bundle.prompt_cache:
            prompt_cache.restore(slot.bundle.target, prompt, cache_salt)
        self._in_use.append(slot)
        return slot

    def release(self, slot: KVSlot, n_tokens: int) -> None:
        """Make a slot idle after its sequence has ended with n_tokens tokens; the KV caches stay for later prompts."""
        self._in_use.remove(slot)
        slot.n_peak = max(slot.n_peak, n_tokens)
        slot.n_reserved = 0
        self._idle.append(slot)

    def drop(self, slot: KVSlot) -> None:
        """Remove a slot in use from the pool together with its KV caches, for example after an error."""
        self._in_use.remove(slot)

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
        idle = [slot for slot in self._idle if self._can_fit(self._in_use, max(n_tokens, slot.n_peak))]
        slot = next((slot for slot in idle if not slot.n_held), None)
        if source and source in idle and not self._is_worth_keeping(source, n_prefix, n_tokens):
            slot = source
        elif not slot and len(self._idle) >= self._max_idle:
            candidates = [slot for slot in idle if slot is not source] or idle
            slot = candidates[0] if candidates else self._idle.pop(0)
        if slot in self._idle:
            self._idle.remove(slot)
            if slot.cache_salt == cache_salt:
                return slot
        return KVSlot(self._make_bundle(), cache_salt)

    def _is_worth_keeping(self, source: KVSlot, n_prefix: int, n_tokens: int) -> bool:
        """Return whether to keep a slot for its other tokens, and copy its first n_prefix tokens to another slot instead.

        The slot must hold `MIN_SHARED_PREFIX_TOKENS` other tokens if both slots fit into memory, otherwise more than n_prefix.
        """
        both_fit = self._can_fit((*self._in_use, source), n_tokens)
        return source.n_held - n_prefix >= (MIN_SHARED_PREFIX_TOKENS if both_fit else n_prefix + 1)

    def _can_fit(self, slots: Sequence[KVSlot], n_tokens: int) -> bool:
        """Return whether a slot for n_tokens tokens fits into memory next to the given slots; True if there are none."""
        capacities = [round_up(n_tokens, CAPACITY_STEP_TOKENS), *(slot.capacity for slot in slots)]
        for capacity in {*capacities} - {*self._bytes_by_capacity}:
            if slots:
                self._bytes_by_capacity[capacity] = slots[0].get_n_bytes(capacity)
        return not slots or sum(self._bytes_by_capacity[capacity] for capacity in capacities) <= self.max_bytes
