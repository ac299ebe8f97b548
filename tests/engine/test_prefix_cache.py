"""The prefix cache: which KV caches are reused or copied, which sequences wait, and how much memory they take."""

import threading
from collections import defaultdict

import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.engine.disk_prompt_cache import PromptCache
from specdec.engine.prefix_cache import PrefixCache
from specdec.events import PrefillProgress, Step
from specdec.loaders import load_checkpoint
from specdec.model import get_architecture
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.tokenizer import BOS, Tokenizer
from tests.tools.cache_contents import get_cached_tokens, get_idle_and_used_slots
from tests.tools.checkpoint_files import write_tokenizer
from tests.tools.decode import get_tokens
from tests.tools.hf_folders import CONFIGS, FIXTURES
from tests.tools.prompt_caches import RNG, CountingCache, add_sequence, endless, random_tokens  # noqa: F401  (a fixture)

PREFIX = [BOS, *RNG.integers(3, 64, 12).tolist()]


def test_a_shared_prefix_is_copied_and_each_conversation_keeps_its_slot(endless):
    prefixes = CountingCache(endless, 100)
    first = prefixes.prefill([*PREFIX, *random_tokens(60)], 10)
    second = prefixes.acquire([*PREFIX, *random_tokens(20)], 60)  # copied from a slot in use
    assert second is not first and (first.n_held, second.n_held) == (73, 13)
    conversation = [*PREFIX, *random_tokens(40)]
    second.caches.target.forward(conversation)
    for slot in (first, second):
        prefixes.release(slot, slot.n_held)
    assert prefixes.acquire([*conversation, 5, 6], 90) is second  # the conversation continues
    third = prefixes.acquire([*conversation[:40], 5, 6], 90)
    assert third not in (first, second) and third.n_held == 40
    fourth = prefixes.acquire([BOS, *random_tokens(30)], 90)
    assert fourth.n_held == 0 and first.n_held == 73 and prefixes.n_made == 4


@pytest.mark.parametrize("n_large", [3000, 1700])
def test_a_large_slot_is_evicted_for_small_ones_with_the_same_prefix(endless, n_large):
    prefixes = CountingCache(endless, 6)
    prefixes.release(prefixes.prefill([*PREFIX, *random_tokens(n_large)], 2), n_large)
    for _ in range(3):
        slots = [prefixes.prefill([*PREFIX, *random_tokens(20)], 100) for _ in range(4)]
        assert all(slot and slot.capacity == 256 for slot in slots) and prefixes.n_bytes <= 6 * prefixes.size
        for slot in slots:
            prefixes.release(slot, 130)


def test_the_largest_possible_sequence_reuses_its_own_slot(endless):
    prefixes, prompt = CountingCache(endless, 6), [*PREFIX, *random_tokens(1500)]
    slot = prefixes.prefill([*prompt, *random_tokens(100)], 0)
    prefixes.release(slot, 1613)
    assert prefixes.acquire(prompt, 1613) is slot


def test_waiting_for_memory_changes_nothing(endless):
    prefixes = CountingCache(endless, 3)
    prefixes.release(prefixes.prefill([*PREFIX, *random_tokens(100)], 0), 113)
    running, n_made = prefixes.prefill([BOS, 4], 500), prefixes.n_made
    slots = get_idle_and_used_slots(prefixes)
    assert all(prefixes.acquire([*PREFIX, *random_tokens(10)], 280) is None for _ in range(20))
    assert prefixes.n_made == n_made and get_idle_and_used_slots(prefixes) == slots
    prefixes.release(running, 500)
    assert prefixes.acquire([*PREFIX, *random_tokens(10)], 280).n_held == 13


def make_scheduler(decoder, max_running=8):
    decoder.warm_up()
    return decoder.make_scheduler(PrefixCache(decoder.bundle, 4 * max_running), max_running)


def run_until(scheduler, is_done):
    """Run steps of a scheduler until a condition holds; return the events of each sequence, without progress."""
    events = defaultdict(list)
    while not is_done():
        assert scheduler.running or scheduler.waiting
        for sequence, event in scheduler.step():
            events[sequence] += [] if isinstance(event, PrefillProgress) else [event]
    return events


def assert_same(decoder, sequence, events):
    request = sequence.request
    assert isinstance(events[-1], Step) and sequence.has_ended
    assert get_tokens(events) == get_tokens(decoder.stream(request.prompt, request.max_tokens, request.sampling))


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "granite_h"])
def test_no_sequence_waits_for_a_recurrent_state_that_cannot_be_copied(name, tmp_path):
    """The state is that of a long sequence, which is past the shared prefix."""
    checkpoint = load_checkpoint(FIXTURES / name)
    weights = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors).pack()
    vocabulary = [(f"<{i}>".encode() if i < 3 else f"{i} ".encode(), 0) for i in range(CONFIGS[name].vocab_size)]
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "letters.bin", vocabulary))
    decoder = SpeculativeDecoder(Model(checkpoint.config, weights, 1, 40_000), None, tokenizer)
    scheduler = make_scheduler(decoder)
    long = add_sequence(scheduler, decoder, [*PREFIX, *random_tokens(20_000)], 2)
    run_until(scheduler, lambda: scheduler.running and long.cache.n_tokens >= 200)
    short = add_sequence(scheduler, decoder, [*PREFIX, 7, 8, 9], 2)
    events = run_until(scheduler, lambda: short.has_ended)
    assert not events[long]
    assert_same(decoder, short, events[short])


def test_the_prefix_donor_of_a_short_prompt_is_prefilled_first(endless):
    scheduler, prefix = make_scheduler(endless), [BOS, *random_tokens(150)]
    prompts = [[BOS, *random_tokens(n)] for n in (20_000, 500, 500, 500, 500)]
    prompts += [[*prefix, *random_tokens(10_000)], [*prefix, 5, 6]]
    *others, short = [add_sequence(scheduler, endless, prompt, 1) for prompt in prompts]
    run_until(scheduler, lambda: any(sequence.has_ended for sequence in (short, *others)))
    assert short.has_ended and not any(sequence.has_ended for sequence in others)


def test_a_prefix_copy_without_memory_fails_only_its_sequence(endless, monkeypatch):
    copy_from, n_failed = KVCache.copy_from, 0

    def fail_five_times(cache, other, tokens):
        nonlocal n_failed
        if n_failed < 5:
            n_failed += 1
            raise MemoryError("out of memory")
        copy_from(cache, other, tokens)

    monkeypatch.setattr(KVCache, "copy_from", fail_five_times)
    scheduler, prefix = make_scheduler(endless, max_running=3), [BOS, *random_tokens(200)]
    prompts = [[*prefix[: 30 + 5 * i], *random_tokens(10)] for i in range(30)]
    sequences = [add_sequence(scheduler, endless, prompt, 20, Sampling(1.0, seed=i)) for i, prompt in enumerate(prompts)]
    events = run_until(scheduler, lambda: all(sequence.has_ended for sequence in sequences))
    failed = [sequence for sequence in sequences if isinstance(events[sequence][-1], MemoryError)]
    for sequence in sequences:
        if sequence not in failed:
            assert_same(endless, sequence, events[sequence])
    assert len(failed) == n_failed == 5 and not get_idle_and_used_slots(scheduler)[1]


@pytest.mark.parametrize("n_slots", [1, 2, 8])
def test_a_prompt_changed_in_the_middle_finds_both_versions_cached(endless, n_slots):
    """With prompts A, A' (another date) and A again, the tokens after the date stay cached, with any number of slots."""
    scheduler = make_scheduler(endless, n_slots)
    original = [BOS, *random_tokens(300)]
    changed = [*original[:150], 3 + (original[150] - 2) % 61, *original[151:]]

    def n_cached(prompt):
        before, sequence = scheduler.metrics.cached_tokens, add_sequence(scheduler, endless, prompt, 2)
        run_until(scheduler, lambda: sequence.has_ended)
        return scheduler.metrics.cached_tokens - before

    assert n_cached(original) == 0 and n_cached(changed) == 150
    for _ in range(3):
        assert n_cached(original) == n_cached(changed) == 300


def test_a_copy_never_replaces_its_source(endless):
    """The prefixes has as many idle slots as allowed, and the source has been idle longest."""
    prefixes = CountingCache(endless, 100, max_idle=2)
    prompt = [*PREFIX, *random_tokens(60)]
    first, second = prefixes.prefill(prompt, 2), prefixes.prefill([BOS, *random_tokens(60)], 2)
    for slot in (first, second):
        prefixes.release(slot, 75)
    slot = prefixes.acquire([*prompt[:30], *get_cached_tokens(second.caches.target)[1:4]], 80)
    assert slot is second and slot.n_held == 30 and first.n_held == len(prompt)
    assert get_idle_and_used_slots(prefixes) == ([first], [second])


def test_a_failed_restore_leaves_no_slot_in_use(endless):
    class Broken:
        def restore(self, *_):
            raise MemoryError

    prefixes = CountingCache(endless, 2)
    prefixes.prompt_cache = Broken()
    for _ in range(5):
        with pytest.raises(MemoryError):
            prefixes.acquire([*PREFIX, *random_tokens(10)], 200)
    assert prefixes.n_made == 5 and not get_idle_and_used_slots(prefixes)[1]


def test_a_slot_is_released_while_another_thread_holds_the_lock(endless):
    prefixes = CountingCache(endless, 4)
    slot = prefixes.prefill([BOS, *PREFIX], 2)
    held, done = threading.Event(), threading.Event()

    class SlowPromptCache:
        def restore(self, *_):
            held.set()
            done.wait()

    prefixes.prompt_cache = SlowPromptCache()
    thread = threading.Thread(target=prefixes.acquire, args=([BOS], 5, "other"))
    thread.start()
    held.wait()
    prefixes.release(slot, 10)  # as the garbage collector does with an abandoned stream
    done.set()
    thread.join()
    assert prefixes.acquire([BOS, *PREFIX], 20) is slot


def test_idle_slots_beyond_the_limit_are_dropped(endless):
    streams = [endless.stream([BOS, i], 9) for i in range(5)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()
    endless.generate([BOS, 9], 2)
    idle, used = get_idle_and_used_slots(endless)
    assert len(idle) == 1 and not used


def test_an_interrupted_admission_leaves_no_slot_in_use(endless, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.engine.scheduler.make_decoding_state", interrupt)
    with pytest.raises(KeyboardInterrupt):
        endless.generate([BOS, 5], 3)
    monkeypatch.undo()
    assert not get_idle_and_used_slots(endless)[1] and len(endless.generate([BOS, 5], 3).tokens) == 3


def test_a_prompt_that_cannot_be_kept_fails_no_output(pair, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("too little")

    lines = []
    prompts = PromptCache(tmp_path / "prompts", 10**9, 1, lines.append)
    decoder = SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1, prompt_cache=prompts)
    monkeypatch.setattr(PromptCache, "save", fail)
    assert len(decoder.generate([BOS, 5], 3).tokens) == 3
    assert len(lines) == 1 and "too little" in lines[0]
