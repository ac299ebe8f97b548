"""The decoding loop: output and distribution are the target's own, and KV caches hold the expected tokens."""

import itertools
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import MAX_GAMMA, FixedLength
from specdec.draft.lookup import LookupDrafter
from specdec.draft.model_drafters import ModelDrafter
from specdec.draft.tree import TreeDrafter
from specdec.engine.scheduler import Scheduler
from specdec.events import Prompt, Proposal, Step
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.runtime.parallel_region import get_available_threads
from specdec.sampling import Sampler, Sampling
from specdec.speculative import DecodingState
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS, CoupledVerifier
from tests.tools import reference
from tests.tools.checkpoint_files import SHARED, random_tensors
from tests.tools.decode import (
    END_MARKS,
    SAMPLINGS,
    FakeCache,
    FakeDrafter,
    decode,
    generate_tokens,
    get_steps,
    get_tokens,
    make_model_drafter,
    run_target,
)
from tests.tools.random_models import tiny_model

real = pytest.mark.skipif(not SHARED.exists(), reason="needs the real pair in ../shared")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seeds", [(0, 1), (2, 3)])
def test_coupled_output_equals_plain_output_for_every_gamma(sampling, seeds):
    target, draft = tiny_model(seeds[0], layers=3), tiny_model(seeds[1])
    plain, _ = generate_tokens(target, None, sampling)
    for gamma in range(1, 9):
        assert generate_tokens(target, draft, sampling, gamma)[0] == plain


def test_all_get_tokens_a_draft_that_is_the_target_are_accepted():
    for sampling in SAMPLINGS:
        target, twin = tiny_model(0), tiny_model(0)
        plain, _ = generate_tokens(target, None, sampling)
        drafter, verifier = make_model_drafter(twin, CoupledVerifier, sampling), CoupledVerifier(105, sampling)
        steps = get_steps(decode(target.new_cache(), drafter, verifier, [BOS, 7, 9], 60, FixedLength(4)))
        assert [token for step in steps for token in step.tokens] == plain
        # nothing is verified after an end-of-sequence token
        assert all(step.n_accepted == len(step.draft_tokens) for step in steps if step.stop_reason not in ("bos", "eos"))


class ScriptedTarget(FakeCache):
    """A KV cache of a target that generates a given sequence with certainty, without a model."""

    def __init__(self, script, vocab_size=20, n_positions=100):
        self.text, self.vocab_size, self.n_positions, self.passes = script, vocab_size, n_positions, []

    def forward(self, tokens, n_logits=1):
        self.passes.append((list(tokens), n_logits))
        return np.eye(self.vocab_size, dtype=np.float32)[[self.text[i + 1] for i in range(len(tokens) - n_logits, len(tokens))]]


def test_the_loop_accepts_corrects_and_ends_as_computed_by_hand():
    """Two of three draft tokens are accepted and the target corrects the third; then all; then none; then the end of sequence."""
    script = [BOS, 5, 6, 7, 8, 9, 10, 11, 12, EOS, 13, 14, 15]
    proposals = iter([[6, 7, 4], [9, 10], [3, 3], [EOS, 5]])
    target, drafter = ScriptedTarget(script), FakeDrafter(lambda *_: next(proposals))
    verifier = CoupledVerifier(20, Sampling(0.0))
    events = list(decode(target, drafter, verifier, [BOS, 5], 50, FixedLength(3)))
    assert events[0].tokens == [BOS, 5]
    assert [event.tokens for event in events[1::2]] == [[6, 7, 4], [9, 10], [3, 3], [EOS, 5]]
    steps = [(step.tokens, step.n_accepted, step.stop_reason) for step in events[2::2]]
    assert steps == [([6, 7, 8], 2, None), ([9, 10, 11], 2, None), ([12], 0, None), ([], 1, "eos")]
    passes = [([BOS], 0), ([BOS, 5, 6, 7, 4], 4), ([*script[:5], 9, 10], 3), ([*script[:8], 3, 3], 3), ([*script[:9], EOS, 5], 3)]
    assert target.passes == passes


def test_a_drafter_that_is_always_wrong_changes_no_output():
    for sampling in SAMPLINGS:
        target = tiny_model(0)
        plain, _ = generate_tokens(target, None, sampling)
        bad_token = next(token for token in range(3, 105) if token not in plain)
        verifier, lengths = CoupledVerifier(105, sampling), itertools.cycle((3, 0, 1, 7))
        drafter = FakeDrafter(lambda *_, token=bad_token, lengths=lengths: [token] * next(lengths))
        steps = get_steps(decode(target.new_cache(), drafter, verifier, [BOS, 7, 9], 60, FixedLength(8)))
        assert [token for step in steps for token in step.tokens] == plain
        assert sum(step.n_accepted for step in steps) == 0 < sum(len(step.draft_tokens) for step in steps)


@pytest.mark.campaign
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_embedded_pair_generates_plain_output_beyond_the_drafts_window(temperature):
    plain = SpeculativeDecoder(DEFAULT_TARGET, None)
    for prompt, seed in (("Once upon a time", 1), ("The dragon was", 2)):
        expected = plain.generate(prompt, 200, temperature=temperature, seed=seed)
        for gamma in range(1, 9):
            decoder = SpeculativeDecoder(plain.target, DEFAULT_DRAFT, plain.tokenizer, gamma=gamma)
            text, statistics = decoder.generate(prompt, 200, temperature=temperature, seed=seed)
            assert text == expected.text
            assert statistics.n_accepted > 0
            assert decoder.draft.config.seq_len == 128


@real
def test_stories260k_generates_its_golden_story():
    golden = (SHARED / "golden" / "stories260K_t0_n257.txt").read_text()
    decoder = SpeculativeDecoder(SHARED / "models" / "stories260K.bin", None)
    assert decoder.generate("", 257, temperature=0).text == golden.rstrip("\n")


def expect_outputs(config, prompt, n_left, filters=(1.0, 0, 1.0)):
    """Return the oracle's probability of each output of up to n_left tokens; an end-of-sequence token ends one early."""
    if n_left == 0:
        return {(): 1.0}
    logits, expected = reference.forward(config, random_tensors(config, 3, 0.05), prompt)[-1], Counter()
    for token, p in enumerate(reference.probabilities(logits, *filters)):
        if p > 0 and token in END_MARKS:
            expected[()] += p
        elif p > 0:
            later = expect_outputs(config, [*prompt, token], n_left - 1, filters)
            expected.update({(token, *tokens): p * mass for tokens, mass in later.items()})
    return expected


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("filters", [(1.0, 0, 1.0), (0.8, 4, 0.9)])
def test_continuations_follow_the_target_distribution(verify, filters):
    """All continuations of 3 tokens over 6, with the oracle's probabilities; an end-of-sequence token ends one early.

    Chi-square over 6,000 seeds, cells expected below 8 pooled; false alarm below 1e-6 per case, and the seeds are fixed.
    """
    target, draft = (tiny_model(seed, vocab=6, seq_len=64, scale=0.05) for seed in (3, 4))
    counts = Counter()
    for seed in range(6000):
        counts[tuple(generate_tokens(target, draft, Sampling(*filters, seed), 3, verify, [BOS, 3], 3)[0])] += 1
    reference.check_counts(counts, expect_outputs(target.config, [BOS, 3], 3, filters), 12)


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
def test_a_drafter_without_probabilities_keeps_the_distribution(verify):
    """The first two tokens over 6, 6,000 seeds, with such a drafter and without; chi-square, false alarm below 1e-6 per case."""
    target, drafter = tiny_model(3, vocab=6, seq_len=64, scale=0.05), FakeDrafter(lambda *_: [3, 4])
    counts = Counter()
    for seed in range(6000):
        verifier = VERIFIERS[verify](6, Sampling(1.0, 0, 1.0, seed))
        counts[tuple(get_tokens(decode(target.new_cache(), drafter, verifier, [BOS, 3], 2, FixedLength(2))))] += 1
    reference.check_counts(counts, expect_outputs(target.config, [BOS, 3], 2))


def make_broken_model(seed):
    """Return a model with finite weights and logits that are not: the last operation of a forward pass overflows."""
    model = tiny_model(seed)
    model.weights.vectors["rms_final"][: model.config.dim] = 3e38
    return model


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_logits_that_are_not_finite_proposes_nothing(verify, temperature):
    sampling = Sampling(temperature, seed=5)
    plain, _ = generate_tokens(tiny_model(0), None, sampling, verify=verify)
    tokens, statistics = generate_tokens(tiny_model(0), make_broken_model(1), sampling, verify=verify)
    assert tokens == plain
    assert statistics.n_drafted == 0


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_with_logits_that_are_not_finite_is_refused(verify, temperature):
    for draft in (None, tiny_model(1)):
        with pytest.raises(ValueError, match="not finite"):
            generate_tokens(make_broken_model(0), draft, Sampling(temperature, seed=5), verify=verify)


def test_top_k_above_the_vocabulary_keeps_all_tokens():
    plain, _ = generate_tokens(tiny_model(0), None, Sampling(1.0, 0, 0.9, 5))
    assert generate_tokens(tiny_model(0), None, Sampling(1.0, 2**80, 0.9, 5))[0] == plain


def test_a_draft_with_a_short_context_continues_to_draft():
    target, sampling = tiny_model(0, seq_len=128), Sampling(1.0, seed=11)
    draft = tiny_model(0, seq_len=24, n_positions=128)  # the target's own weights, seen through a window of 24
    plain, _ = generate_tokens(target, None, sampling, max_tokens=200)
    tokens, statistics = generate_tokens(target, draft, sampling, max_tokens=200)
    assert tokens == plain
    assert len(tokens) > 60
    assert statistics.n_accepted > 0


def mean_acceptance_from(target, draft, tokenizer, first):
    """Return accepted / drafted tokens from position `first` on, over 24 sampled stories."""
    accepted = drafted = 0
    decoder = SpeculativeDecoder(target, draft, tokenizer, gamma=4)
    for seed in range(1, 25):
        position = len(decoder.encode("Once upon a time"))
        for step in get_steps(decoder.stream("Once upon a time", 495, Sampling(0.8, seed=seed))):
            if position >= first:
                accepted += step.n_accepted
                drafted += len(step.draft_tokens)
            position += len(step.tokens)
    assert drafted > 3000
    return accepted / drafted


@pytest.mark.campaign
@real
def test_a_window_of_128_keeps_nine_tenths_of_the_acceptance():
    """stories260K for stories3M from position 128 on: the same stories, only the draft's context is cut. Measured 0.99."""
    models = SHARED / "models"
    decoder = SpeculativeDecoder(models / "stories3M.bin", models / "stories260K.bin")
    full, tokenizer = decoder.draft, decoder.tokenizer
    window = Model(replace(full.config, seq_len=128), full.weights, n_positions=512)
    windowed = mean_acceptance_from(decoder.target, window, tokenizer, 128)
    assert windowed > 0.9 * mean_acceptance_from(decoder.target, full, tokenizer, 128)


def test_generation_stops_at_an_eos_token_without_its_text():
    stops = set()
    for seed in range(40):
        target, draft = tiny_model(3, vocab=6, scale=0.1), tiny_model(4, vocab=6, scale=0.1)
        tokens, statistics = generate_tokens(target, draft, Sampling(1.0, 0, 1.0, seed), prompt=(BOS, 5))
        stops.add(statistics.stop_reason)
        assert BOS not in tokens and EOS not in tokens
        assert statistics.n_generated == len(tokens)
        if statistics.stop_reason != "max_tokens":
            assert len(tokens) < 60
            # an accepted end-of-sequence token counts as accepted, and nothing after it
            assert statistics.n_accepted <= len(tokens) + 1
    assert {"bos", "eos"} <= stops


def test_generation_stops_at_max_tokens_and_seq_len():
    target, draft, greedy = tiny_model(0, seq_len=64), tiny_model(1, seq_len=64), Sampling(0.0)
    for verify in VERIFIERS:
        for n in (0, 1, 2, 5, 17):
            tokens, statistics = generate_tokens(target, draft, greedy, 4, verify, max_tokens=n)
            assert (len(tokens), statistics.stop_reason) == (n, "max_tokens")
        # the last of 65 tokens is never run, so 64 positions are enough
        tokens, statistics = generate_tokens(target, draft, greedy, 4, verify, max_tokens=1000)
        assert (3 + len(tokens), statistics.stop_reason) == (65, "seq_len")


def test_output_depends_on_the_seed_only():
    target, draft = tiny_model(0), tiny_model(1)
    for verify in VERIFIERS:
        first = generate_tokens(target, draft, Sampling(1.0, 0, 1.0, 5), verify=verify)[0]
        assert generate_tokens(target, draft, Sampling(1.0, 0, 1.0, 5), verify=verify)[0] == first
        assert generate_tokens(target, draft, Sampling(1.0, 0, 1.0, 6), verify=verify)[0] != first


def test_the_maximum_gamma_fits_into_one_pass():
    target, twin = tiny_model(0), tiny_model(0)
    plain, _ = generate_tokens(target, None, Sampling(0.0), max_tokens=100)
    tokens, statistics = generate_tokens(target, twin, Sampling(0.0), MAX_GAMMA, max_tokens=100)
    assert tokens == plain
    assert statistics.accepted_histogram[MAX_GAMMA] == 1


def test_statistics_are_consistent():
    tokens, s = generate_tokens(tiny_model(0, layers=3), tiny_model(1), Sampling(0.0), max_tokens=12)
    assert s.n_generated == len(tokens) == 12
    assert s.n_generated == s.n_accepted + s.target_passes  # each pass adds one token of the target's own
    assert sum(i * n for i, n in enumerate(s.accepted_histogram)) == s.n_accepted
    assert sum(s.accepted_histogram) == s.target_passes
    assert s.acceptance_rate == s.n_accepted / s.n_drafted
    assert s.decode_seconds > 0


def test_streamed_events_equal_the_generation(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=3)
    text, statistics = decoder.generate("ab", 30, temperature=0.9, top_k=50, top_p=0.95, seed=4)
    plain = SpeculativeDecoder(pair.target, None).generate("ab", 30, temperature=0.9, top_k=50, top_p=0.95, seed=4)
    assert text == plain.text
    assert text.startswith("ab")
    first, *events = decoder.stream("ab", 30, Sampling(0.9, 50, 0.95, 4))
    assert isinstance(first, Prompt)
    assert first.tokens == decoder.encode("ab")
    assert sum(len(step.tokens) for step in get_steps(events)) == statistics.n_generated
    proposals, steps = events[::2], events[1::2]
    assert all(isinstance(proposal, Proposal) for proposal in proposals)
    assert [proposal.tokens for proposal in proposals] == [step.draft_tokens for step in steps]


def test_models_that_do_not_fit_together_are_refused(pair):
    other = tiny_model(0, vocab=105)
    with pytest.raises(ValueError, match="105"):
        SpeculativeDecoder(pair.target, other)
    with pytest.raises(ValueError, match="gamma"):
        SpeculativeDecoder(pair.target, pair.draft, gamma=0)
    with pytest.raises(ValueError, match="verify"):
        SpeculativeDecoder(pair.target, pair.draft, verify="maybe")


def test_a_decoder_works_after_a_stream_that_was_abandoned(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    expected = decoder.generate("ab", 30, seed=4).text
    for _ in itertools.islice(decoder.stream("ab", 30, Sampling(seed=9)), 3):
        pass
    assert decoder.generate("ab", 30, seed=4).text == expected


def take_turns(*streams):
    """Return the tokens of each stream, which advance by one event in turn."""
    outputs = [[] for _ in streams]
    for events in itertools.zip_longest(*streams):
        for output, event in zip(outputs, events, strict=True):
            output += event.tokens if isinstance(event, Step) else []
    return outputs


@pytest.mark.parametrize("verify", VERIFIERS)
def test_streams_that_take_turns_on_one_decoder_equal_those_alone(pair, verify):
    decoder = SpeculativeDecoder(pair.target, pair.draft, verify=verify)
    requests = [("Once", 40, Sampling(seed=1)), ("Then", 60, Sampling(0.0)), ("Once", 30, Sampling(seed=3))]
    alone = [get_tokens(decoder.stream(*request)) for request in requests]
    assert take_turns(*(decoder.stream(*request) for request in requests)) == alone


def test_streams_of_decoders_that_share_a_model_equal_those_alone(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    for model in (decoder.target, decoder.draft):
        other = SpeculativeDecoder(model, None, decoder.tokenizer)
        pairs = [(decoder, "Once"), (other, "Then")]
        alone = [get_tokens(d.stream(prompt, 30)) for d, prompt in pairs]
        assert take_turns(*(d.stream(prompt, 30) for d, prompt in pairs)) == alone


def test_threads_that_share_a_decoder_get_the_right_output(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    swapped = SpeculativeDecoder(decoder.draft, decoder.target, decoder.tokenizer)  # the same models in the other order
    calls = [
        lambda: decoder.generate("Lily", 50, seed=3).text,
        lambda: decoder.generate("ab", 40, temperature=0.7, seed=4).text,
        lambda: get_tokens(decoder.stream("Once", 40, Sampling(seed=5))),
        lambda: swapped.generate("Once", 28, seed=6).text,
    ]
    alone = [call() for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(6):
            assert [future.result() for future in [pool.submit(call) for call in calls]] == alone


def test_a_sequence_that_starts_while_another_is_verified_disturbs_neither(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=4)
    sampling = Sampling(seed=1)
    alone, inner = get_tokens(decoder.stream("Once", 30, sampling)), decoder.generate("Then", 20, seed=2).text
    tokens, outputs = [], []
    for event in decoder.stream("Once", 30, sampling):
        tokens += event.tokens if isinstance(event, Step) else []
        outputs += [decoder.generate("Then", 20, seed=2).text] if isinstance(event, Proposal) else []
    assert tokens == alone
    assert len(outputs) > 3
    assert set(outputs) == {inner}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of the system")
def test_generation_in_a_signal_handler_is_right_or_refused_and_harmless(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    outer, inner = (decoder.generate(prompt, 120, seed=1).text for prompt in ("Once", "Then"))
    outputs, refused = [], []

    def generate_too(*_):
        try:
            outputs.append(decoder.generate("Then", 120, seed=1).text)
        except RuntimeError as error:
            refused.append(str(error))
        signal.setitimer(signal.ITIMER_REAL, 0.0137)  # not earlier: on a slow machine handlers would interrupt each other forever

    before = signal.signal(signal.SIGALRM, generate_too)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0003)
        deadline = time.monotonic() + 2
        while (len(refused) < 3 or not outputs) and time.monotonic() < deadline:
            assert decoder.generate("Once", 120, seed=1).text == outer
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(outputs) <= {inner}
    assert all("signal handler" in error for error in refused), refused
    assert outputs or refused


@pytest.mark.parametrize("tree", ["off", "on"])
def test_logits_overwritten_by_a_signal_handler_are_computed_again(pair, tree, monkeypatch):
    """Another pass overwrites the target's logits right after some passes, as one in a signal handler may."""
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=4, tree=tree)
    alone = [get_tokens(decoder.stream("ab", 40, sampling)) for sampling in SAMPLINGS]
    original, other, n_interrupts = KVCache.run_tree, decoder.target.new_cache(), 0

    def run_tree(cache, tokens, nodes, n_logits, n_total=0):
        nonlocal n_interrupts
        logits = original(cache, tokens, nodes, n_logits, n_total)
        if cache.model is decoder.target and n_logits and len(tokens) % 3 == 0 and n_interrupts < 8:
            n_interrupts += 1
            original(other, [BOS, 17, 4, 99, 5, 6, 7], [], min(n_logits, 7))
        return logits

    monkeypatch.setattr(KVCache, "run_tree", run_tree)
    for sampling, expected in zip(SAMPLINGS, alone, strict=True):
        n_interrupts = 0
        assert get_tokens(decoder.stream("ab", 40, sampling)) == expected
        assert n_interrupts > 0


class FakeTrial:
    """Replaces `Scheduler.stream` with steps of given seconds for one thread and for several."""

    def __init__(self, seconds):
        self.seconds, self.tried = seconds, []

    def run(self, scheduler):
        n_threads = scheduler.bundle.target.n_threads
        self.tried.append(n_threads)
        yield Step([5], [], 0, self.seconds[n_threads], 0.0, None)


@pytest.mark.skipif(get_available_threads() < 2, reason="needs two cores to choose from")
@pytest.mark.parametrize(("alone", "together", "expected"), [(1.0, 0.7, 2), (1.0, 1.2, 2), (1.0, 1.3, 1)])
def test_clearly_slower_numbers_of_threads_are_not_used(pair, monkeypatch, alone, together, expected):
    trial = FakeTrial({1: alone / 100, 2: together / 100})
    monkeypatch.setattr(Scheduler, "stream", lambda scheduler, _: trial.run(scheduler))
    for draft in (None, pair.draft):
        decoder = SpeculativeDecoder(pair.target, draft)
        decoder.autotuner.thread_choices = [2, 1]  # independent of the machine
        for model in filter(None, (decoder.target, decoder.draft)):
            model.n_threads = 2
        trial.tried.clear()
        decoder.warm_up()
        assert {model.n_threads for model in (decoder.target, decoder.draft) if model} == {expected}
        assert set(trial.tried) == {1, 2}


def test_a_given_number_of_threads_is_kept(pair, monkeypatch):
    trial = FakeTrial(dict.fromkeys(range(1, get_available_threads() + 1), 0.01))
    monkeypatch.setattr(Scheduler, "stream", lambda scheduler, _: trial.run(scheduler))
    given = get_available_threads()
    SpeculativeDecoder(pair.target, pair.draft, n_threads=given).warm_up()
    loaded = SpeculativeDecoder(pair.target).target
    SpeculativeDecoder(loaded, None, pair.tokenizer).warm_up()
    assert set(trial.tried) == {given}


# Steps by hand


def make_arguments(draft, kind, verify, sampling):
    """Return the arguments of `decode` except cache and prompt; drafters have caches of one model."""
    verifier = VERIFIERS[verify](105, sampling)
    arguments = draft.new_cache(), Sampler(105, sampling), verifier.get_draft_stream, END_MARKS
    drafters = {"model": lambda: ModelDrafter(*arguments), "tree": lambda: TreeDrafter(*arguments)}
    drafter = drafters.get(kind, lambda: LookupDrafter(END_MARKS) if kind else None)()
    return {"drafter": drafter, "verifier": verifier, "max_tokens": 50, "policy": FixedLength(4), "eos_tokens": END_MARKS}


def one_by_one(sequences):
    """Run a step of each sequence in turn; they share no cache, but the models."""
    for state, cache in sequences:
        state.propose()
        yield state, state.commit(state.verify(run_target(cache, state)), 0.0)


def all_at_once(sequences):
    """Let all sequences propose before any pass runs, and verify after all passes."""
    for state, _ in sequences:
        state.propose()
    for state, logits in [(state, run_target(cache, state).copy()) for state, cache in sequences]:
        yield state, state.commit(state.verify(logits), 0.0)


@pytest.mark.parametrize("run_steps", [one_by_one, all_at_once])
@pytest.mark.parametrize(
    ("kind", "verify"),
    [(kind, verify) for kind in ("model", "lookup", "tree", None) for verify in VERIFIERS if (kind, verify) != ("tree", "block")],
)
def test_sequences_that_take_turns_on_one_target_equal_those_alone(run_steps, kind, verify):
    """Take turns at every step, also with one draft model for both."""
    prompts = [BOS, 7, 9, 7, 9, 7], [BOS, 7, 9, 30, 31] * 3
    for sampling in SAMPLINGS:
        target, draft = tiny_model(0, scale=0.1), tiny_model(1, scale=0.1)
        alone = [
            get_steps(decode(target.new_cache(), prompt=prompt, **make_arguments(draft, kind, verify, sampling)))
            for prompt in prompts
        ]
        sequences = [
            (DecodingState([*prompt], n_positions=128, **make_arguments(draft, kind, verify, sampling)), target.new_cache())
            for prompt in prompts
        ]
        together = {id(state): [] for state, _ in sequences}
        while running := [sequence for sequence in sequences if not sequence[0].is_finished]:
            for state, step in run_steps(running):
                together[id(state)].append(step)
        for (state, _), prompt, steps in zip(sequences, prompts, alone, strict=True):
            expected = [(s.tokens, s.draft_tokens, s.n_accepted, s.stop_reason) for s in steps]
            assert [(s.tokens, s.draft_tokens, s.n_accepted, s.stop_reason) for s in together[id(state)]] == expected
            assert state.tokens == prompt + get_tokens(steps) and 0 < len(get_tokens(steps)) <= 50
        assert kind is None or sum(step.n_nodes for steps in alone for step in steps) > 0


def test_verify_can_be_called_again_after_another_pass():
    target, draft, sampling = tiny_model(0), tiny_model(1), Sampling(0.8, seed=3)
    state = DecodingState([BOS, 7, 9], n_positions=128, **make_arguments(draft, "model", "rejection", sampling))
    state.propose()
    logits = run_target(target.new_cache(), state).copy()
    assert state.verify(logits) == state.verify(logits) and state.tokens == [BOS, 7, 9]
