"""KV cache slots: which caches are reused or copied, which sequences wait, and how much memory they take."""

from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.engine.decode_loop import GenerationRequest
from specdec.engine.kv_slots import SlotPool
from specdec.loaders import load_checkpoint
from specdec.model import get_architecture
from specdec.model.transformer import Transformer
from specdec.tokenizer import BOS
from tests.engine.test_batched_families import make_tokenizer  # noqa: F401
from tests.engine.test_scheduler import Output, assert_same, endless, make_scheduler, submit  # noqa: F401  (fixtures)
from tests.tools.hf_folders import CONFIGS, FIXTURES

RNG = np.random.default_rng(0)
PREFIX = [BOS, *RNG.integers(3, 64, 12).tolist()]


def random_tokens(n):
    return RNG.integers(3, 64, n).tolist()


class CountingPool(SlotPool):
    """A pool with memory for n slots of 256 tokens, which counts the bundles it makes."""

    def __init__(self, decoder, n_slots):
        self.size, self.n_made = decoder.bundle.clone_for_sequence().target.get_sequence_bytes(256, True), 0

        def make_bundle():
            self.n_made += 1
            return decoder.bundle.clone_for_sequence()

        super().__init__(make_bundle, int(n_slots * self.size), 16)

    @property
    def n_bytes(self):
        return sum(slot.get_n_bytes(slot.capacity) for slot in (*self._idle, *self._in_use))

    def prefill(self, prompt, n_more):
        """Return a slot that has run a prompt, with n_more tokens reserved; None without memory."""
        slot = self.acquire(prompt, len(prompt) + n_more)
        if slot:
            slot.bundle.target.forward(prompt)
        return slot


def test_a_shared_prefix_is_copied_and_each_conversation_keeps_its_slot(endless):
    pool = CountingPool(endless, 100)
    first = pool.prefill([*PREFIX, *random_tokens(60)], 10)
    second = pool.acquire([*PREFIX, *random_tokens(20)], 60)  # copied from a slot in use
    assert second is not first and (first.n_held, second.n_held) == (73, 13)
    conversation = [*PREFIX, *random_tokens(40)]
    second.bundle.target.forward(conversation)
    for slot in (first, second):
        pool.release(slot, slot.n_held)
    assert pool.acquire([*conversation, 5, 6], 90) is second  # the conversation continues
    third = pool.acquire([*conversation[:40], 5, 6], 90)
    assert third not in (first, second) and third.n_held == 40
    fourth = pool.acquire([BOS, *random_tokens(30)], 90)
    assert fourth.n_held == 0 and first.n_held == 73 and pool.n_made == 4


@pytest.mark.parametrize("n_large", [3000, 1700])
def test_a_large_slot_is_evicted_for_small_ones_with_the_same_prefix(endless, n_large):
    pool = CountingPool(endless, 6)
    pool.release(pool.prefill([*PREFIX, *random_tokens(n_large)], 2), n_large)
    for _ in range(3):
        slots = [pool.prefill([*PREFIX, *random_tokens(20)], 100) for _ in range(4)]
        assert all(slot and slot.capacity == 256 for slot in slots) and pool.n_bytes <= 6 * pool.size
        for slot in slots:
            pool.release(slot, 130)


def test_the_largest_possible_sequence_reuses_its_own_slot(endless):
    pool, prompt = CountingPool(endless, 6), [*PREFIX, *random_tokens(1500)]
    slot = pool.prefill([*prompt, *random_tokens(100)], 0)
    pool.release(slot, 1613)
    assert pool.acquire(prompt, 1613) is slot


def test_waiting_for_memory_changes_nothing(endless):
    pool = CountingPool(endless, 3)
    pool.release(pool.prefill([*PREFIX, *random_tokens(100)], 0), 113)
    running, n_made = pool.prefill([BOS, 4], 500), pool.n_made
    idle = [*pool._idle]
    assert all(pool.acquire([*PREFIX, *random_tokens(10)], 280) is None for _ in range(20))
    assert pool.n_made == n_made and pool._idle == idle
    pool.release(running, 500)
    assert pool.acquire([*PREFIX, *random_tokens(10)], 280).n_held == 13


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_no_sequence_waits_for_a_recurrent_state_that_cannot_be_copied(name, make_tokenizer, make_scheduler):
    """The state is that of a long sequence, which is past the shared prefix."""
    checkpoint = load_checkpoint(FIXTURES / name)
    weights = get_architecture(checkpoint.config).pack(checkpoint.config, checkpoint.tensors)
    model = Transformer(checkpoint.config, weights, 1, 40_000)
    decoder = SpeculativeDecoder(model, None, make_tokenizer(CONFIGS[name].vocab_size))
    scheduler, long_output, output = make_scheduler(decoder), Output(), Output()
    submit(scheduler, GenerationRequest([*PREFIX, *random_tokens(20_000)], 2, Sampling(0.0)), long_output)
    request = GenerationRequest([*PREFIX, 7, 8, 9], 2, Sampling(0.0))
    while not output.events:
        with model.lock:
            if scheduler._running and scheduler._running[0].model.n_cached_tokens >= 200:
                submit(scheduler, request, output)
                break
    assert_same(decoder, request, output)
    assert not long_output.events


def test_the_prefix_donor_of_a_short_prompt_is_prefilled_first(endless, make_scheduler):
    scheduler, finished = make_scheduler(endless), SimpleQueue()

    def make_callback(name):
        return lambda event: finished.put(name) if isinstance(event, Exception) or getattr(event, "stop_reason", None) else None

    prefix = [BOS, *random_tokens(150)]
    with endless.target.lock:
        handles = [submit(scheduler, GenerationRequest([BOS, *random_tokens(20_000)], 1, Sampling(0.0)), make_callback("oldest"))]
        handles += [
            submit(scheduler, GenerationRequest([BOS, *random_tokens(500)], 1, Sampling(0.0)), make_callback("longer"))
            for _ in range(4)
        ]
        handles.append(
            submit(scheduler, GenerationRequest([*prefix, *random_tokens(10_000)], 1, Sampling(0.0)), make_callback("leader"))
        )
        handles.append(submit(scheduler, GenerationRequest([*prefix, 5, 6], 1, Sampling(0.0)), make_callback("short")))
    assert (first := finished.get(timeout=60)) == "short", first
    for handle in handles:
        handle.cancel()


def test_a_prefix_copy_without_memory_fails_only_its_sequence(endless, make_scheduler, monkeypatch):
    copy_kv, n_failed = Transformer._copy_kv, 0

    def fail_five_times(model, other, n):
        nonlocal n_failed
        if n_failed < 5:
            n_failed += 1
            raise MemoryError("out of memory")
        copy_kv(model, other, n)

    monkeypatch.setattr(Transformer, "_copy_kv", fail_five_times)
    scheduler, prefix = make_scheduler(endless, max_running=3), [BOS, *random_tokens(200)]
    requests = [GenerationRequest([*prefix[: 30 + 5 * i], *random_tokens(10)], 20, Sampling(1.0, seed=i)) for i in range(30)]
    outputs = [Output() for _ in requests]
    for request, output in zip(requests, outputs, strict=True):
        submit(scheduler, request, output)
    n_errors = sum(isinstance(output.wait()[-1], Exception) for output in outputs)
    for request, output in zip(requests, outputs, strict=True):
        if not isinstance(output.events[-1], Exception):
            assert_same(endless, request, output)
    assert n_errors == n_failed == 5 and not scheduler._slot_pool._in_use


@pytest.mark.parametrize("n_slots", [1, 2, 8])
def test_a_prompt_changed_in_the_middle_finds_both_versions_cached(endless, make_scheduler, n_slots):
    """With prompts A, A' (another date) and A again, the tokens after the date stay cached, with any number of slots."""
    scheduler = make_scheduler(endless, n_slots)
    original = [BOS, *random_tokens(300)]
    changed = [*original[:150], 3 + (original[150] - 2) % 61, *original[151:]]

    def n_cached(prompt):
        before, output = scheduler.metrics.cached_tokens, Output()
        submit(scheduler, GenerationRequest(prompt, 2, Sampling(0.0)), output)
        output.wait()
        return scheduler.metrics.cached_tokens - before

    assert n_cached(original) == 0 and n_cached(changed) == 150
    for _ in range(3):
        assert n_cached(original) == n_cached(changed) == 300


def test_a_copy_never_replaces_its_source(endless):
    """The pool has as many idle slots as allowed, and the source has been idle longest."""
    pool = CountingPool(endless, 100)
    pool._max_idle = 2
    prompt = [*PREFIX, *random_tokens(60)]
    first, second = pool.prefill(prompt, 2), pool.prefill([BOS, *random_tokens(60)], 2)
    for slot in (first, second):
        pool.release(slot, 75)
    slot = pool.acquire([*prompt[:30], *second.bundle.target._cached_tokens[1:4]], 80)
    assert slot is second and slot.n_held == 30 and first.n_held == len(prompt) and pool._idle == [first]


def test_a_failed_restore_leaves_no_slot_in_use(endless):
    class Broken:
        def restore(self, *_):
            raise MemoryError

    pool, calls = CountingPool(endless, 2), []
    make_bundle = pool._make_bundle
    pool._make_bundle = lambda: calls.append(1) or replace(make_bundle(), prompt_cache=Broken())
    for _ in range(5):
        with pytest.raises(MemoryError):
            pool.acquire([*PREFIX, *random_tokens(10)], 200)
    assert len(calls) == 5 and not pool._in_use
