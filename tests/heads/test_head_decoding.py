"""Heads in the decoding loop: output and distribution are the target's own, also with several sequences on one target."""

import itertools
import json
import pickle
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.draft.cost_calibration import measure
from specdec.draft.draft_length import FixedLength
from specdec.events import Statistics
from specdec.head_config import HeadConfig
from specdec.heads.head import Head
from specdec.layers.weights import Weights
from specdec.loaders import CheckpointError, CheckpointWarning
from specdec.loaders.model_loader import load_model
from specdec.quant import INT8
from specdec.sampling import Sampler
from specdec.text.tokenizer_lookup import SharedVocabulary
from specdec.tokenizer import BOS
from specdec.verification import VERIFIERS
from tests.conftest import Pair
from tests.tools import reference
from tests.tools.cache_contents import get_idle_and_used_slots
from tests.tools.command_runs import Run, run  # noqa: F401  (a fixture)
from tests.tools.decode import END_MARKS, SAMPLINGS, collect, decode, generate_tokens, get_tokens, make_model_drafter
from tests.tools.head_files import DIALECTS, write_gguf
from tests.tools.random_heads import head_folder, make_head, new_head_cache, random_head
from tests.tools.random_models import make_started_policy, tiny_model


def run_events(head, sampling, gamma=4, verify="coupled", prompt=(BOS, 7, 9), max_tokens=60, eos_tokens=END_MARKS):
    """Return the events of a target with its head, given by the head or by a cache of it."""
    cache = new_head_cache(head) if isinstance(head, Head) else head
    verifier = VERIFIERS[verify](cache.model.vocab_size, sampling)
    drafter = make_model_drafter(cache, verifier, sampling, eos_tokens=eos_tokens)
    return decode(cache.target_cache, drafter, verifier, prompt, max_tokens, FixedLength(gamma), eos_tokens)


@pytest.mark.parametrize(("n_heads", "min_tokens"), [(16, 400), pytest.param(2400, 100_000, marks=pytest.mark.campaign)])
def test_a_head_changes_no_output(n_heads, min_tokens):
    """From prompts of one token on, past the head's window, to the target's last position."""
    n, statistics = 0, Statistics()
    for case in range(n_heads):
        rng = np.random.default_rng(case)
        target = tiny_model(case, layers=3)
        numbers = {"seq_len": int(rng.choice([16, 128])), "norm_before_residual": bool(rng.choice([False, True]))}
        head = make_head(
            target, rng.choice([None, INT8]) or INT8, seed=case, draft_vocab_size=int(rng.choice([0, 30, 104])), **numbers
        )
        sampling = Sampling(*[(0.0, 0, 0.0), (1.0, 0, 0.9), (0.7, 20, 0.95), (1.5, 0, 1.0)][case % 4], case)
        prompt = rng.integers(3, 105, int(rng.choice([1, 2, 5, 100]))).tolist()
        plain, _ = generate_tokens(target, None, sampling, prompt=prompt, max_tokens=200)
        gamma = int(rng.choice([1, 2, 4, 63], p=[0.4, 0.3, 0.25, 0.05]))
        for event in run_events(head, sampling, gamma, prompt=prompt, max_tokens=200):
            statistics.add(event)
            if isinstance(event, Step):
                assert event.tokens == plain[: len(event.tokens)]
                plain = plain[len(event.tokens) :]
                n += len(event.tokens)
        assert not plain
    assert n > min_tokens and statistics.n_accepted > 4


def test_a_head_prefills_a_long_prompt_and_drafts_to_the_last_position():
    target, sampling = tiny_model(2, seq_len=400, layers=3), Sampling(1.0, 0, 0.0, 9)
    head, prompt = make_head(target, draft_vocab_size=80, seq_len=64), np.random.default_rng(1).integers(3, 105, 300).tolist()
    verifier = VERIFIERS["coupled"](105, sampling)
    plain = get_tokens(decode(target.new_cache(), None, verifier, prompt, 200, FixedLength(1), {}))
    tokens, statistics = collect(run_events(head, sampling, 5, prompt=prompt, max_tokens=200, eos_tokens={}))
    assert tokens == plain and statistics.stop_reason == "seq_len"
    assert statistics.n_generated == 101 and statistics.n_drafted > 300


def test_draft_tokens_are_drawn_with_the_targets_noise():
    head, sampling = new_head_cache(make_head(tiny_model(0, layers=3), draft_vocab_size=50)), SAMPLINGS[1]
    prompt, drafter = [BOS, 7, 9, 20, 33], make_model_drafter(head, VERIFIERS["coupled"], sampling)
    head.target_cache.forward(prompt[:-1])
    proposed = drafter.propose(prompt, make_started_policy(5)).tokens
    sampler, tokens = Sampler(105, sampling), prompt
    for token in proposed:
        assert token == sampler.draw(sampler.new_probs(), head.forward(tokens)[0], 0, len(tokens))
        assert token in head.head.target_ids
        tokens = [*tokens, token]
    assert len(proposed) == 5 or proposed[-1] in END_MARKS
    assert drafter.propose([BOS], make_started_policy(5)).tokens == []
    assert drafter.propose([8, *prompt], make_started_policy(5)).tokens == []  # the target holds no states of that sequence


@pytest.mark.parametrize("verify", VERIFIERS)
def test_a_repeated_request_gives_the_same_steps(tokenizer, verify):
    """The target still holds the end of the first output, from which a head must not draft."""
    target = tiny_model(5, layers=3, vocab=tokenizer.vocab_size)
    decoder = SpeculativeDecoder(target, make_head(target, seed=4), tokenizer, gamma=4, verify=verify)
    for seed in range(12):
        first, second = (
            [(step.tokens, step.draft_tokens) for step in decoder.stream([1, 5, 7, 9, 11, 13], 60, temperature=1.0, seed=seed)
             if isinstance(step, Step)] for _ in range(2)
        )  # fmt: skip
        assert first == second


@pytest.mark.parametrize("verify", VERIFIERS)
def test_sequences_that_take_turns_equal_those_alone(verify):
    target, sampling = tiny_model(5, layers=3), Sampling(1.0, 0, 0.0, 7)
    heads = [make_head(target, draft_vocab_size=60), make_head(target, seed=1, draft_vocab_size=90)]
    requests = [(head, [BOS, *range(3, 3 + n)]) for head, n in ((heads[0], 0), (heads[0], 20), (heads[1], 2), (heads[1], 41))]
    alone = [get_tokens(run_events(head, sampling, verify=verify, prompt=prompt)) for head, prompt in requests]
    streams = [run_events(head, sampling, verify=verify, prompt=prompt) for head, prompt in requests]
    rounds = [*itertools.zip_longest(*streams)]
    assert [get_tokens(filter(None, events)) for events in zip(*rounds, strict=True)] == alone
    cache = new_head_cache(heads[0])  # which has run another sequence
    cache.target_cache.forward([8, 9]), cache.forward([8, 9])
    assert get_tokens(run_events(cache, sampling, verify=verify, prompt=requests[1][1])) == alone[1]


def test_threads_that_share_a_head_generate_the_same_as_alone():
    target, sampling = tiny_model(6, layers=3), Sampling(1.0, 0, 0.0, 7)
    head = make_head(target, draft_vocab_size=60)
    prompts = [[BOS, *range(3, 3 + n)] for n in (1, 9, 30)]
    alone = [get_tokens(run_events(head, sampling, prompt=prompt, max_tokens=90)) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        events = pool.map(lambda prompt: [*run_events(head, sampling, prompt=prompt, max_tokens=90)], prompts * 4)
        assert [get_tokens(each) for each in events] == alone * 4


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("n_runs", [600, pytest.param(5_000, marks=pytest.mark.campaign)])
def test_a_head_with_some_of_the_ids_keeps_the_targets_distribution(verify, n_runs):
    """Chi-square of the first two tokens, rare cells pooled, false alarm below 1e-6 per case; the seeds are fixed."""
    target = tiny_model(8, vocab=12, layers=3, scale=0.2)
    head, prompt = make_head(target, draft_vocab_size=7), [3, 4, 5]

    def softmax(tokens):
        powers = np.exp(target.new_cache().forward(tokens)[0].astype(np.float64))
        return powers / powers.sum()

    first = softmax(prompt)
    expected = {(a, b): first[a] * p for a in range(12) for b, p in enumerate(softmax([*prompt, a]))}
    counts = Counter()
    for seed in range(n_runs):
        sampling = Sampling(1.0, 0, 0.0, seed)
        counts[tuple(get_tokens(run_events(head, sampling, 3, verify, prompt, 2, {})))] += 1
    reference.check_counts(counts, expected, min_cells=8)


# Decoders


def generate(decoder, sampling=SAMPLINGS[1], n=60):
    return get_tokens(decoder.stream("Once upon", n, sampling))


def test_a_named_head_drafts(pair: Pair, tmp_path: Path) -> None:
    """With a named and a loaded target; int8 by default."""
    path, alone = head_folder(tmp_path / "head", pair), SpeculativeDecoder(pair.target, None, pair.tokenizer)
    for target in (pair.target, load_model(pair.target)):
        for gamma in (4, 63, "auto"):
            decoder = SpeculativeDecoder(target, path, pair.tokenizer, gamma=gamma)
            assert decoder.shared == {"head": 80} and isinstance(decoder.draft, Head)
            assert decoder.weights.startswith("target fp32, head ") and decoder.weights.endswith("int8 (80 of 300 tokens)")
            for sampling in SAMPLINGS:
                assert generate(decoder, sampling) == generate(alone, sampling)
    full = SpeculativeDecoder(pair.target, path, pair.tokenizer, quantize="none")
    assert full.weights == "target fp32, head fp32 (80 of 300 tokens)"


def test_the_costs_of_a_head_are_measured(pair: Pair, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(pair.target, head_folder(tmp_path / "head", pair), pair.tokenizer)
    decoder.warm_up()
    curve = decoder.autotuner.curve
    assert curve and curve.draft_token > 0 and curve.pass_seconds[1] > 0


def test_the_target_prefills_before_the_head(pair: Pair, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(pair.target, head_folder(tmp_path / "head", pair), pair.tokenizer)
    prompt = [1, *[260, 261] * 50]
    fractions = [*decoder.read(prompt)]
    assert fractions[0] == 0 and fractions[-1] == 1 and fractions == sorted(fractions)
    [slot], _ = get_idle_and_used_slots(decoder)
    assert [cache.count_prefill_tokens(prompt) for cache in slot.caches.all] == [0, 0]
    assert [*decoder.read(prompt)] == []


def test_a_pickled_decoder_keeps_its_head(pair: Pair, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(pair.target, head_folder(tmp_path / "head", pair), pair.tokenizer, verify="rejection")
    again = pickle.loads(pickle.dumps(decoder))
    assert isinstance(again.draft, Head) and again.draft.target is again.target and again.weights == decoder.weights
    assert generate(again) == generate(decoder)
    other = SpeculativeDecoder(load_model(pair.target), None, pair.tokenizer)
    with pytest.raises(ValueError, match=r"^the draft is a head of another target"):
        SpeculativeDecoder(other.target, decoder.draft, pair.tokenizer)


def test_a_head_drafts_up_to_its_last_position_in_memory(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borrowed weights are stored once; after its last position the head proposes nothing."""
    path, target = head_folder(tmp_path / "head", pair), load_model(pair.target)
    full, alone = SpeculativeDecoder(target, path, pair.tokenizer, gamma=4), SpeculativeDecoder(target, None, pair.tokenizer)
    assert isinstance(full.draft, Head)
    borrowed = {id(matrix.panels) for matrix in target.weights.matrices.values()}
    own = {name: shards for name, shards in full.draft.weights.shards.items() if id(shards[0].panels) not in borrowed}
    n_own_bytes = Weights(own, full.draft.weights.vectors).n_bytes
    memory = target.weights.n_bytes + 4 * (n_own_bytes + full.draft.get_sequence_bytes(60))
    monkeypatch.setattr("specdec.loaders.model_loader.get_physical_memory_bytes", lambda: memory)
    decoder = SpeculativeDecoder(target, path, pair.tokenizer, gamma=4)
    assert decoder.draft and 30 < decoder.draft.n_positions < 80
    monkeypatch.undo()
    sampling = Sampling(1.0, 0, 0.0, 3)
    steps = [event for event in decoder.stream([1, *[260] * 20], 100, sampling) if isinstance(event, Step)]
    assert steps[0].draft_tokens and not steps[-1].draft_tokens
    for prompt in ([1, *[260] * 20], [1, *[261] * 90]):
        assert decoder.generate(prompt, 30, sampling).tokens == alone.generate(prompt, 30, sampling).tokens


def test_unsupported_uses_of_a_head_are_refused(pair: Pair, tmp_path: Path) -> None:
    path = head_folder(tmp_path / "head", pair)
    for refused in (
        lambda: SpeculativeDecoder(pair.target, path, pair.tokenizer, stage="lookup"),
        lambda: SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, stage=path),
        lambda: SpeculativeDecoder(path, None, pair.tokenizer),
        lambda: SpeculativeDecoder(pair.target, path, pair.tokenizer, tree="on"),
        lambda: SpeculativeDecoder(SpeculativeDecoder(pair.target, path, pair.tokenizer).draft, None, pair.tokenizer),
        lambda: SpeculativeDecoder(pair.target, head_folder(tmp_path / "wide", pair, target_dim=32), pair.tokenizer),
        lambda: load_model(path),
    ):
        with pytest.raises((ValueError, CheckpointError), match=" head") as caught:
            refused()
        assert "\n" not in str(caught.value)


def test_a_head_without_layer_ids_names_the_layers_that_it_reads(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadConfig, "get_target_layers", lambda head, n_layers: (1, 2, n_layers))
    n_layers = load_model(pair.target).config.n_layers
    with pytest.warns(CheckpointWarning, match=f"head does not name the target's layers .*: 1, 2, {n_layers}$"):
        SpeculativeDecoder(pair.target, head_folder(tmp_path / "head", pair, target_layers=()), pair.tokenizer)


@pytest.mark.parametrize("dialect", [*DIALECTS, "gguf"])
def test_the_command_line_accepts_a_head_as_a_draft(run: Run, pair: Pair, tmp_path: Path, dialect: str) -> None:
    config, tensors, ids = random_head(load_model(pair.target).config, draft_vocab_size=80, target_layers=(1, 2, 3))
    path = tmp_path / "my-head.gguf"
    path = write_gguf(path, config, tensors, ids) if dialect == "gguf" else head_folder(tmp_path / "my-head", pair, dialect)
    args = ("-m", pair.target, "-d", path, "-z", pair.tokenizer, "-i", "Once upon", "-s", 5)
    code, out, err = run(*args, "-n", 40, "-g", 4, "--json")
    result = json.loads(out)
    assert (code, err) == (0, "") and result["n_drafted"] and result["settings"]["weights"].endswith("int8 (80 of 300 tokens)")
    assert result["tokens"] == json.loads(run(*args[:2], *args[4:], "-d", "none", "-n", 40, "--json")[1])["tokens"]
    if dialect == "gguf":
        (prompts := tmp_path / "prompts").write_text("Once upon\n")
        assert json.loads(run("race", *args, "-n", 40, "--json")[1])["same_text"]
        code, out, err = run("sweep", *args[:6], "--prompts", prompts, "--max-tokens", 20, "--gammas", "2,auto", "--json")
        assert code == 0 and "the draft alone, trees and stages are left out: a head generates no text" in err + out
        code, out, err = run(*args, "-n", 40, "--tree", "on")
        assert (code, out) == (2, "") and err.count("\n") == 1 and "a head proposes chains" in err


def test_a_head_can_be_timed_while_another_sequence_uses_its_target(monkeypatch):
    target = tiny_model(8, layers=3)
    head, other, clock = new_head_cache(make_head(target)), target.new_cache(), time.perf_counter

    def run_other_sequence():
        if target.lock.acquire(blocking=False):
            other.forward([7, 8, 9])
            target.lock.release()

    def busy():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run_other_sequence).result()
        return clock()

    monkeypatch.setattr("specdec.draft.cost_calibration.time.perf_counter", busy)
    assert measure(head.target_cache, head, SharedVocabulary(105, 105)).draft_token > 0


@pytest.mark.parametrize("n_positions", [1, 2, 3])
def test_a_head_drafts_for_a_target_with_few_positions(pair: Pair, n_positions):
    target = load_model(pair.target, n_positions=n_positions)
    plain = SpeculativeDecoder(target, None, tokenizer=pair.tokenizer).generate("", n_positions, seed=4)
    for draft in (load_model(pair.draft), make_head(target)):
        decoder = SpeculativeDecoder(target, draft, tokenizer=pair.tokenizer)
        assert decoder.generate("", n_positions, seed=4).tokens == plain.tokens
