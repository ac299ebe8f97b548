"""Looked-up drafts in whole decoders: the output is the target's own, and what a client leaves behind serves only that client."""

import random
from pathlib import Path

import pytest

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import CostCurve, CostModel
from specdec.draft.lookup_tables import LookupMemory
from specdec.engine import autotuner
from specdec.engine.disk_prompt_cache import PromptCache
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Client, Sequence
from specdec.events import Step
from specdec.model.kv_cache import KVCache
from specdec.runtime.disk_store import DiskStore
from specdec.sampling import Sampling
from tests.conftest import Pair

MODELS = Path(__file__).parents[2] / "models"
PROMPTS = ("Once upon a time", "Lily and Tom went to the park. Lily", "The dog", "One day, a bird", "")


@pytest.fixture(autouse=True)
def _lookups_are_profitable(monkeypatch):
    """Make long proposals and trees profitable, whatever passes take."""
    monkeypatch.setattr(autotuner, "measure", lambda *_: CostCurve({1: 1.0, 64: 1.1}))
    monkeypatch.setattr("specdec.draft.cost_calibration.CalibrationFile.read", lambda self: None)
    monkeypatch.setattr(CostModel, "end_pass", lambda *_: None)


def run(decoder, prefix_cache, cases, max_running):
    """Generate from all (prompt, n tokens, Sampling, salt) in one scheduler; return the tokens of each, and all steps."""
    scheduler, outputs, steps = decoder.make_scheduler(prefix_cache, max_running), {}, []
    sequences = []
    for prompt, n_tokens, sampling, salt in cases:
        request = GenerationRequest(decoder.encode(prompt), n_tokens, sampling)
        sequences.append(Sequence(request, decoder.tokenizer, Client(salt, salt)))
        scheduler.add(sequences[-1])
        outputs[sequences[-1]] = []
    while scheduler.waiting or scheduler.running:
        for sequence, event in scheduler.step():
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Step):
                outputs[sequence] += event.tokens
                steps.append(event)
    return [outputs[sequence] for sequence in sequences], steps


def make_cases(rng, n, n_tokens):
    """Return n random cases for `run`; few prompts, seeds and salts, so that what a sequence leaves helps a later one."""
    return [
        (
            rng.choice(PROMPTS),
            n_tokens,
            Sampling(rng.choice([0.0, 0.5, 0.8, 1.0]), rng.choice([0, 40]), rng.choice([0.0, 0.9]), rng.randrange(6)),
            rng.choice("ab"),
        )
        for _ in range(n)
    ]


def test_output_equals_plain_output(pair: Pair) -> None:
    """With chains, trees and several sequences in a batch, and with what earlier sequences of a client have left."""
    rng = random.Random(1)
    cases = make_cases(rng, 12, 60)
    plain = SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1)
    plain.warm_up()
    expected = run(plain, PrefixCache(plain.bundle, 1), cases, 1)[0]
    n_trees = n_accepted = 0
    for tree, max_running in (("auto", 1), ("off", 1), ("auto", 3)):
        decoder = SpeculativeDecoder(pair.endless, "lookup", pair.tokenizer, tree=tree, n_threads=1)
        decoder.warm_up()
        prefix_cache = PrefixCache(decoder.bundle, 2)
        for _ in range(2):
            outputs, steps = run(decoder, prefix_cache, cases, max_running)
            assert outputs == expected
            n_trees += sum(step.n_nodes > len(step.draft_tokens) for step in steps)
            n_accepted += sum(step.n_accepted for step in steps)
    assert n_trees > 20 and n_accepted > 500


def test_clients_with_different_salts_share_no_memory(pair: Pair) -> None:
    decoder = SpeculativeDecoder(pair.endless, "lookup", pair.tokenizer, n_threads=1)
    decoder.warm_up()
    prefix_cache = PrefixCache(decoder.bundle, 4)
    run(decoder, prefix_cache, [("abc", 40, Sampling(), "a")], 1)
    memories = {salt: prefix_cache.acquire([1], 9, salt).memory for salt in ("a", "b", "")}
    assert [memory.pool.size[0] > 0 for memory in memories.values()] == [True, False, False]
    assert [memory.runner_ups.keys.any() for memory in memories.values()] == [True, False, False]
    assert prefix_cache.acquire([1], 9, "a").memory is memories["a"]


def test_memories_of_clients_are_bounded(pair: Pair) -> None:
    decoder = SpeculativeDecoder(pair.endless, "lookup", pair.tokenizer, n_threads=1)
    prefix_cache = PrefixCache(decoder.bundle, 4)
    memories = []
    for i in range(100):
        slot = prefix_cache.acquire([1], 9, str(i))
        prefix_cache.release(slot, 1)
        memories.append(slot.memory)
    are_kept = [prefix_cache.acquire([1], 9, str(i)).memory is memories[i] for i in reversed(range(100))]
    assert are_kept == [True] * 16 + [False] * 84


def test_a_repeated_request_is_drafted_from_the_first(pair: Pair) -> None:
    decoder = SpeculativeDecoder(pair.endless, "lookup", pair.tokenizer, n_threads=1)
    decoder.warm_up()
    prefix_cache = PrefixCache(decoder.bundle, 4)
    counts = [len(run(decoder, prefix_cache, [("abc", 60, Sampling(1.0, seed=3), salt)], 1)[1]) for salt in "aab"]
    assert counts[1] < counts[0] / 2 and counts[2] > counts[0] / 2


def new_target_cache(pair: Pair) -> KVCache:
    return SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1).target.new_cache()


def count_steps(pair, folder, salt, expected, report=print, n_bytes=10**9):
    """Return the steps of a request to a new decoder with a folder of prompts, after comparing the output."""
    prompts = PromptCache(folder, n_bytes, 2, report)
    decoder = SpeculativeDecoder(pair.endless, "lookup", pair.tokenizer, n_threads=1)
    decoder.warm_up()
    outputs, steps = run(decoder, PrefixCache(decoder.bundle, 2, prompts), [("abc", 60, Sampling(1.0, seed=3), salt)], 1)
    prompts.flush()
    assert outputs == expected
    return len(steps)


@pytest.fixture
def expected(pair: Pair):
    plain = SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1)
    return [plain.generate("abc", 60, Sampling(1.0, seed=3)).tokens]


def test_another_process_drafts_from_what_this_one_has_kept(pair: Pair, tmp_path, expected) -> None:
    """Another salt finds none of it."""
    first, again, other = (count_steps(pair, tmp_path, salt, expected) for salt in ("a", "a", "b"))
    assert again < first / 2 < other
    files = [*tmp_path.glob("*.lookup")]
    assert len(files) == 2 and {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:99], lambda data: b"", lambda data: data[:-9] + b"123456789"]
)
def test_a_damaged_memory_is_reported_and_ignored(damage, pair: Pair, tmp_path, expected) -> None:
    first, lines = count_steps(pair, tmp_path, "a", expected), []
    [file] = tmp_path.glob("*.lookup")
    file.write_bytes(damage(file.read_bytes()))
    assert count_steps(pair, tmp_path, "a", expected, lines.append) > first / 2
    assert len(lines) == 1 and "is damaged" in lines[0]


@pytest.mark.parametrize("token", [-2, 10**6, 2**31 - 1])
def test_a_forged_memory_proposes_no_unknown_token(token, pair: Pair, tmp_path, expected) -> None:
    first = count_steps(pair, tmp_path, "a", expected)
    [file] = tmp_path.glob("*.lookup")
    memory, prompts = LookupMemory(), PromptCache(tmp_path, 10**9, 2, print)
    memory.pool.tokens[5] = memory.runner_ups.tokens[7, 3] = token
    prompts.save_memory(new_target_cache(pair), memory, "a")
    prompts.flush()
    assert [*tmp_path.glob("*.lookup")] == [file]
    assert count_steps(pair, tmp_path, "a", expected) > first / 2


def test_a_folder_too_small_for_a_memory_gets_none(pair: Pair, tmp_path, expected) -> None:
    count_steps(pair, tmp_path, "a", expected, n_bytes=10**7)
    assert not [*tmp_path.glob("*.lookup")]


def test_memories_are_written_rarely_and_at_the_end(pair: Pair, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, memory = PromptCache(tmp_path, 10**9, 2, print), LookupMemory()
    cache, written, write = new_target_cache(pair), [], DiskStore.write
    monkeypatch.setattr(DiskStore, "write", lambda *arguments: (written.append(1), write(*arguments)))
    for i in range(5):
        memory.add([*range(10 * i, 10 * i + 9)])
        prompts.save_memory(cache, memory)
    prompts.flush()
    again = LookupMemory()
    PromptCache(tmp_path, 10**9, 2, print).restore_memory(cache, again, cache.model.vocab_size)
    assert 1 <= len(written) <= 3 and again.pool.size[0] == memory.pool.size[0]


@pytest.mark.campaign
def test_100000_sampled_tokens_equal_plain_output(tmp_path) -> None:
    """Generate with the included story model: chains, trees, batches of four, and memories restored from disk."""
    rng, model, tokenizer = random.Random(7), str(MODELS / "stories6M.bin"), str(MODELS / "tok1024.bin")
    plain = SpeculativeDecoder(model, None, tokenizer)
    plain.warm_up()
    n_tokens = n_trees = 0
    for n_round in range(6):
        cases = make_cases(rng, 24, 200)
        expected = run(plain, PrefixCache(plain.bundle, 1), cases, 1)[0]
        for tree, max_running in (("auto", 1), ("off", 1), ("auto", 4), ("off", 4)):
            decoder = SpeculativeDecoder(model, "lookup", tokenizer, tree=tree)
            decoder.warm_up()
            prompts = PromptCache(tmp_path / f"{tree} {max_running}", 10**9, 2, print)
            outputs, steps = run(decoder, PrefixCache(decoder.bundle, 4, prompts), cases, max_running)
            prompts.flush()
            assert outputs == expected, (n_round, tree, max_running)
            n_tokens += sum(map(len, outputs))
            n_trees += sum(step.n_nodes > len(step.draft_tokens) for step in steps)
    assert n_tokens > 100_000 and n_trees > 1000
