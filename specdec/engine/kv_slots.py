"""KV cache slots: one for each running sequence, and idle ones for the conversations that may continue."""

from collections.abc import Callable, Sequence

from specdec.argument_checks import replace_unknown_tokens
from specdec.draft.model_bundle import ModelBundle
from specdec.runtime.simd import round_up

# prompt tokens that are worth a copy from another slot; also other tokens in a slot that are worth keeping it
MIN_SHARED_PREFIX_TOKENS = 8
CAPACITY_STEP_TOKENS = 128  # granularity of cache sizes


class KVSlot:
    """The models of one sequence, with a KV cache of its own.

    Attributes:
        cache_salt: Only sequences with the same salt may reuse what the slot holds.
        n_reserved: Tokens that the sequence may grow to.
        n_peak: Most tokens that a finished sequence has had in it.
    """

    def __init__(self, bundle: ModelBundle, cache_salt: str) -> None:
        self.bundle, self.cache_salt = bundle, cache_salt
        self.n_reserved = self.n_peak = 0

    def count_cached_tokens(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt need not run again."""
        return max(len(prompt) - 1, 0) - self.bundle.target.count_prefill_tokens(prompt)

    def copy_kv(self, other: "KVSlot", prompt: list[int]) -> None:
        """Copy the KV entries of a prompt from another slot, for each model where they save enough tokens."""
        for model, other_model in zip(self.bundle.models.values(), other.bundle.models.values(), strict=True):
            tokens = replace_unknown_tokens(prompt, model.config.vocab_size)
            if (
                len(tokens) <= model.n_positions
                and model.count_prefill_tokens(tokens) - other_model.count_prefill_tokens(tokens) >= MIN_SHARED_PREFIX_TOKENS
            ):
                model.copy_kv(other_model, tokens)

    def save_to_prefix_cache(self, tokens: list[int], is_prefilled: bool = True) -> None:
        """Save the KV cache of a sequence to the prefix cache, if there is one."""
        if self.bundle.prompt_cache:
            self.bundle.prompt_cache.save(self.bundle.target, tokens, is_prefilled, self.cache_salt)

    @property
    def n_held(self) -> int:
        """Tokens of the last sequence that the KV cache holds."""
        return self.bundle.target.n_cached_tokens

    @property
    def capacity(self) -> int:
        """Tokens that the slot has or may come to have memory for, rounded up to `CAPACITY_STEP_TOKENS`."""
        n: int = round_up(max(self.n_reserved, self.n_peak), CAPACITY_STEP_TOKENS)
        return n

    def get_n_bytes(self, n: int) -> int:
        """Return the memory of the KV caches for n tokens, in bytes."""
        return sum(model.get_sequence_bytes(min(n, model.n_positions), True) for model in self.bundle.models.values())


class SlotPool:
    """Slots whose KV caches take at most `max_bytes`, or a single larger one; the one that is idle longest is dropped first.

    Slots are reused only with the same cache salt: the time of a prefill would reveal how other clients' prompts begin.

    Args:
        make_bundle: Makes models with a KV cache of their own.
        max_bytes: Memory limit of all slots.
        max_idle: Most idle slots; beyond it, the one that is idle longest serves the next conversation.
    """

    def __init__(self, make_bundle: Callable[[], ModelBundle], max_bytes: int, max_idle: int) -> None:
        self._make_bundle, self.max_bytes, self._max_idle = make_bundle, max_bytes, max_idle
        self._bytes_by_capacity: dict[int, int] = {}
        self._idle, self._in_use = list[KVSlot](), list[KVSlot]()  # the first one has been idle longest

    def acquire(self, prompt: list[int], n_tokens: int, cache_salt: str = "") -> KVSlot | None:
        """Return a slot that holds the longest cached prefix of a prompt, or None while there is no memory for one.

        It is the slot with that prefix where little else would be lost, otherwise another one with a copy of the prefix. A copy
        serves, for example, instructions that many prompts begin with.

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
        """Return a slot to the idle ones after a sequence of n_tokens tokens."""
        self._in_use.remove(slot)
        slot.n_peak = max(slot.n_peak, n_tokens)
        slot.n_reserved = 0
        self._idle.append(slot)

    def drop(self, slot: KVSlot) -> None:
        """Drop a slot in use, for example after an error."""
        self._in_use.remove(slot)

    def _get_free_slot(self, source: KVSlot | None, n_prefix: int, n_tokens: int, cache_salt: str) -> KVSlot:
        """Return a free slot for a prompt, the first n_prefix tokens of which `source` holds.

        In this order: the source, if it is idle and not worth keeping; an empty slot; a new one; with `max_idle` idle slots, the
        one that is idle longest, the source last. Slots too large to fit next to those in use are skipped. A slot with another
        cache salt only gives up its place.
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
        """Return whether to keep a slot, for its other tokens, next to a copy of n_prefix of them.

        It takes `MIN_SHARED_PREFIX_TOKENS` other tokens if both fit, otherwise more of them than the prefix has.
        """
        both_fit = self._can_fit((*self._in_use, source), n_tokens)
        return source.n_held - n_prefix >= (MIN_SHARED_PREFIX_TOKENS if both_fit else n_prefix + 1)

    def _can_fit(self, slots: Sequence[KVSlot], n_tokens: int) -> bool:
        """Return whether a slot of n_tokens fits next to those slots; always true without any."""
        capacities = [round_up(n_tokens, CAPACITY_STEP_TOKENS), *(slot.capacity for slot in slots)]
        for capacity in {*capacities} - {*self._bytes_by_capacity}:
            if slots:
                self._bytes_by_capacity[capacity] = slots[0].get_n_bytes(capacity)
        return not slots or sum(self._bytes_by_capacity[capacity] for capacity in capacities) <= self.max_bytes
