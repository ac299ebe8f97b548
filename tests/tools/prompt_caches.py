"""KV caches of small models, for tests of the prompt caches."""

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Sequence
from specdec.kernels import MAX_BATCH_TOKENS
from tests.tools.family_models import load_fixture_model


@pytest.fixture(scope="module")
def endless(pair):
    """Return a decoder whose outputs end only at their maximum length."""
    return SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1)


def new_cache(name, kv="f16", kind=None, n_threads=1):
    return load_fixture_model(name, n_threads, kind, kv).new_cache()


def prefill(cache, tokens):
    """Prefill a prompt in chunks, as the scheduler does, and return the number of tokens that had to run."""
    n_prefilled = cache.count_prefill_tokens(tokens)
    while n_left := cache.count_prefill_tokens(tokens):
        n = min(cache.count_tokens_to_snapshot(tokens), MAX_BATCH_TOKENS)
        cache.forward(tokens[: len(tokens) - 1 - n_left + n], 0, len(tokens))
    return n_prefilled


class CountingCache(PrefixCache):
    """A prefix cache with memory for n slots of 256 tokens, which counts the slots it makes."""

    def __init__(self, decoder, n_slots, max_idle=16):
        self.size, self.n_made = decoder.bundle.get_sequence_bytes(256), 0
        super().__init__(decoder.bundle, max_idle, max_bytes=n_slots * self.size)

    def _get_free_slot(self, *arguments):
        idle = [*self.idle]
        slot = super()._get_free_slot(*arguments)
        self.n_made += slot not in idle
        return slot

    @property
    def n_bytes(self):
        return sum(self._bundle.get_sequence_bytes(slot.capacity) for slot in (*self.idle, *self.in_use))

    def prefill(self, prompt, n_more):
        """Return a slot that has run a prompt, with n_more tokens reserved; None without memory."""
        slot = self.acquire(prompt, len(prompt) + n_more)
        if slot:
            slot.caches.target.forward(prompt)
        return slot


GREEDY, RNG = Sampling(0.0), np.random.default_rng(0)


def add_sequence(scheduler, decoder, prompt, n, sampling=GREEDY):
    """Add a sequence of n tokens to a scheduler, and return it."""
    sequence = Sequence(GenerationRequest(prompt, n, sampling), decoder.tokenizer)
    scheduler.add(sequence)
    return sequence


def random_tokens(n):
    return RNG.integers(3, 64, n).tolist()
