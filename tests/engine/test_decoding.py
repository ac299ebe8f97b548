"""The loop: the text is the target's own, the distribution is the target's, and the caches hold what they should."""

import contextlib
import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.model import ModelDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import MAX_GAMMA, FixedLength
from specdec.draft.tree import TreeDrafter
from specdec.engine.decoding import Prompt, Proposal, Statistics, Step, Text, decode, run
from specdec.loaders.model_lookup import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model.transformer import Transformer
from specdec.runtime.threads import available_threads
from specdec.sampling import Sampler, Sampling
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS, CoupledVerifier, Draft
from tests.tools import reference
from tests.tools.checkpoint_files import SHARED, random_tensors
from tests.tools.random_models import END_MARKS, continuation, tiny_model

real = pytest.mark.skipif(not SHARED.exists(), reason="needs the real pair in ../shared")
SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, seed=2), Sampling(0.7, 20, 0.95, 3), Sampling(1.5, 0, 1.0, 4)]


def steps_of(events):
    return [event for event in events if isinstance(event, Step)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seeds", [(0, 1), (2, 3)])
def test_coupled_text_is_the_plain_text_for_every_gamma(sampling, seeds):
    target, draft = tiny_model(seeds[0], layers=3), tiny_model(seeds[1])
    plain, _ = continuation(target, None, sampling)
    for gamma in range(1, 9):
        assert continuation(target, draft, sampling, gamma)[0] == plain


def test_a_draft_that_is_the_target_is_accepted_whole():
    for sampling in SAMPLINGS:
        target, twin = tiny_model(0), tiny_model(0)
        plain, _ = continuation(target, None, sampling)
        drafter = ModelDrafter(twin, Sampler(twin.config.vocab_size, sampling), CoupledVerifier.draft_noise, END_MARKS)
        steps = steps_of(decode(target, drafter, CoupledVerifier(105, sampling), [BOS, 7, 9], 60, FixedLength(4), END_MARKS))
        assert [token for step in steps for token in step.tokens] == plain
        # behind an end mark nothing is judged any more
        assert all(step.n_accepted == len(step.draft_tokens) for step in steps if step.stop_reason not in ("bos", "eos"))


class HostileDrafter:
    """Proposes what the target will not say: always wrong, and of every length."""

    def __init__(self, wrong):
        self.wrong = wrong
        self.lengths = itertools.cycle((3, 0, 1, 7))

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy):
        return Draft([self.wrong] * min(policy.max_tokens, next(self.lengths)))


class Script:
    """A target that is sure of each next token of a text, and holds no model."""

    lock, n_passes, n_short = contextlib.nullcontext(), 0, 0
    experts_read = 0.0, 0

    def __init__(self, text, vocab_size=20, n_positions=100):
        self.text, self.vocab_size, self.n_positions, self.passes = text, vocab_size, n_positions, []

    def forward(self, tokens, n_logits=1):
        self.passes.append((list(tokens), n_logits))
        return np.eye(self.vocab_size, dtype=np.float32)[[self.text[i + 1] for i in range(len(tokens) - n_logits, len(tokens))]]


class Guesses:
    """A drafter that proposes what it was told, in turns."""

    def __init__(self, *proposals):
        self.proposals = [*proposals]

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy):
        return Draft(self.proposals.pop(0)[: policy.max_tokens])


def test_the_loop_by_hand():
    """Two of three proposals stand and the target corrects the third; then all stand; then none; then the end mark."""
    text = [BOS, 5, 6, 7, 8, 9, 10, 11, 12, EOS, 13, 14, 15]
    target, drafter = Script(text), Guesses([6, 7, 4], [9, 10], [3, 3], [EOS, 5])
    verifier = CoupledVerifier(20, Sampling(0.0))
    events = list(decode(target, drafter, verifier, [BOS, 5], 50, FixedLength(3), END_MARKS))
    assert events[0].tokens == [BOS, 5]
    assert [event.tokens for event in events[1::2]] == [[6, 7, 4], [9, 10], [3, 3], [EOS, 5]]
    steps = [(step.tokens, step.n_accepted, step.stop_reason) for step in events[2::2]]
    assert steps == [([6, 7, 8], 2, None), ([9, 10, 11], 2, None), ([12], 0, None), ([], 1, "eos")]
    passes = [([BOS], 0), ([BOS, 5, 6, 7, 4], 4), ([*text[:5], 9, 10], 3), ([*text[:8], 3, 3], 3), ([*text[:9], EOS, 5], 3)]
    assert target.passes == passes


@pytest.mark.parametrize(
    ("max_tokens", "n_positions", "reason"), [(4, 100, "max_tokens"), (50, 5, "seq_len"), (0, 100, "max_tokens")]
)
def test_the_loop_stops_where_it_should(max_tokens, n_positions, reason):
    target = Script([BOS, *range(4, 19)], n_positions=n_positions)
    statistics, tokens = Statistics(2), []
    for event in decode(target, None, CoupledVerifier(20, Sampling(0.0)), [BOS, 4], max_tokens, FixedLength(3), END_MARKS):
        statistics.add(event)
        tokens += event.tokens if isinstance(event, Step) else []
    assert tokens == list(range(5, 5 + min(max_tokens, n_positions - 1)))
    assert statistics.stop_reason == reason
    assert statistics.target_passes == len(tokens)


def test_a_hostile_drafter_changes_nothing():
    for sampling in SAMPLINGS:
        target = tiny_model(0)
        plain, _ = continuation(target, None, sampling)
        wrong = next(token for token in range(3, 105) if token not in plain)
        verifier = CoupledVerifier(105, sampling)
        steps = steps_of(decode(target, HostileDrafter(wrong), verifier, [BOS, 7, 9], 60, FixedLength(8), END_MARKS))
        assert [token for step in steps for token in step.tokens] == plain
        assert sum(step.n_accepted for step in steps) == 0 < sum(len(step.draft_tokens) for step in steps)


@pytest.mark.campaign
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_coupled_text_of_the_embedded_pair_is_the_plain_text_beyond_the_drafts_window(temperature):
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
def test_stories260k_tells_its_golden_story():
    golden = (SHARED / "golden" / "stories260K_t0_n257.txt").read_text()
    decoder = SpeculativeDecoder(SHARED / "models" / "stories260K.bin", None)
    assert decoder.generate("", 257, temperature=0).text == golden.rstrip("\n")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("verify", VERIFIERS)
def test_after_every_step_the_cache_holds_all_tokens_but_the_last(verify, sampling):
    target, draft, fresh = tiny_model(0, layers=3), tiny_model(1), tiny_model(0, layers=3)
    verifier = VERIFIERS[verify](105, sampling)
    tokens = [BOS, 7, 9]
    drafter = ModelDrafter(draft, Sampler(draft.config.vocab_size, sampling), verifier.draft_noise, END_MARKS)
    for step in decode(target, drafter, verifier, [BOS, 7, 9], 40, FixedLength(5), END_MARKS):
        if not isinstance(step, Step):
            continue
        tokens += step.tokens
        if step.stop_reason in ("bos", "eos"):
            break
        n = len(tokens) - 1
        assert target._held[:n] == tokens[:n]
        assert draft._held[: n - 1] == tokens[: n - 1]  # one behind after a step whose proposals all stood
        fresh.forward(tokens[:-1], 0)
        panels = -(-n // 16)
        keys = target._buffers.keys[:, :, :panels].swapaxes(3, 4).reshape(3, 1, -1, 8)[:, :, :n]
        fresh_keys = fresh._buffers.keys[:, :, :panels].swapaxes(3, 4).reshape(3, 1, -1, 8)[:, :, :n]
        np.testing.assert_array_equal(keys, fresh_keys)
        np.testing.assert_array_equal(target._buffers.values[:, :, :, :n], fresh._buffers.values[:, :, :, :n])


def sequences(target, draft, sampling_of, verify, n_runs, length):
    """How often each continuation of `length` tokens came up in n_runs seeds."""
    counts = {}
    for seed in range(n_runs):
        tokens, _ = continuation(target, draft, sampling_of(seed), 3, verify, [BOS, 3], length)
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    return counts


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("filters", [(1.0, 0, 1.0), (0.8, 4, 0.9)])
def test_continuations_follow_the_target_distribution_over_an_enumerated_vocabulary(verify, filters):
    """All continuations of 3 tokens over 6, by the oracle's probabilities, an end mark ending one early.

    Chi-square over 6,000 seeds, cells expected below 8 pooled; false alarm below 1e-6 a case, and the seeds are fixed.
    """
    temperature, top_k, top_p = filters
    target, draft = (tiny_model(seed, vocab=6, seq_len=64, scale=0.05) for seed in (3, 4))
    expected = {}

    def enumerate_from(tokens, mass):
        if len(tokens) == 5:
            expected[tuple(tokens[2:])] = mass
            return
        logits = reference.forward(target.config, random_tensors(target.config, 3, 0.05), tokens)[-1]
        for token, p in enumerate(reference.probabilities(logits, temperature, top_k, top_p)):
            if p > 0 and token in (BOS, EOS):
                ended = tuple(tokens[2:])
                expected[ended] = expected.get(ended, 0) + mass * p
            elif p > 0:
                enumerate_from([*tokens, token], mass * p)

    enumerate_from([BOS, 3], 1.0)
    n_runs = 6000
    counts = sequences(target, draft, lambda seed: Sampling(temperature, top_k, top_p, seed), verify, n_runs, 3)
    assert set(counts) <= set(expected)
    big = {cell: n_runs * p for cell, p in expected.items() if n_runs * p >= 8}
    rest = n_runs - sum(big.values())
    chi = sum((counts.get(cell, 0) - e) ** 2 / e for cell, e in big.items())
    if rest >= 8:
        chi += (sum(n for cell, n in counts.items() if cell not in big) - rest) ** 2 / rest
    assert len(big) >= 12
    assert chi < reference.chi_square_limit(len(big), 4.8)


class Favourite:
    """A drafter that always proposes the same tokens, and no probabilities."""

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy):
        return Draft([3, 4][: policy.max_tokens])


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
def test_a_drafter_without_probabilities_leaves_the_distribution_as_it_is(verify):
    """The first two tokens over 6, of 6,000 seeds, with such a drafter and without; chi-square, false alarm below 1e-6 a case."""
    target = tiny_model(3, vocab=6, seq_len=64, scale=0.05)
    counts = {}
    for seed in range(6000):
        verifier = VERIFIERS[verify](6, Sampling(1.0, 0, 1.0, seed))
        events = decode(target, Favourite(), verifier, [BOS, 3], 2, FixedLength(2), END_MARKS)
        tokens = tuple(token for step in steps_of(events) for token in step.tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    expected = {}
    tensors = random_tensors(target.config, 3, 0.05)
    for first, p in enumerate(reference.probabilities(reference.forward(target.config, tensors, [BOS, 3])[-1], 1.0, 0, 1.0)):
        if first in END_MARKS:
            expected[()] = expected.get((), 0) + 6000 * p
            continue
        after = reference.probabilities(reference.forward(target.config, tensors, [BOS, 3, first])[-1], 1.0, 0, 1.0)
        for second, q in enumerate(after):
            cell = (first,) if second in END_MARKS else (first, second)
            expected[cell] = expected.get(cell, 0) + 6000 * p * q
    assert set(counts) <= set(expected)
    assert min(expected.values()) > 8
    chi = sum((counts.get(cell, 0) - e) ** 2 / e for cell, e in expected.items())
    assert chi < reference.chi_square_limit(len(expected) - 1, 4.8)


def test_rejection_mode_accepts_and_rejects_on_the_way():
    _, statistics = continuation(tiny_model(0), tiny_model(1), Sampling(1.5, 0, 1.0, 3), verify="rejection")
    assert 0 < statistics.n_accepted < statistics.n_drafted


def broken_model(seed):
    """Finite weights whose logits are not: the last step of a forward overflows."""
    model = tiny_model(seed)
    model.weights.vectors["rms_final"][: model.config.dim] = 3e38
    return model


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_whose_logits_are_not_finite_proposes_nothing(verify, temperature):
    sampling = Sampling(temperature, seed=5)
    plain, _ = continuation(tiny_model(0), None, sampling, verify=verify)
    tokens, statistics = continuation(tiny_model(0), broken_model(1), sampling, verify=verify)
    assert tokens == plain
    assert statistics.n_drafted == 0


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_whose_logits_are_not_finite_is_refused(verify, temperature):
    for draft in (None, tiny_model(1)):
        with pytest.raises(ValueError, match="not finite"):
            continuation(broken_model(0), draft, Sampling(temperature, seed=5), verify=verify)


def test_any_top_k_above_the_vocabulary_keeps_all_of_it():
    plain, _ = continuation(tiny_model(0), None, Sampling(1.0, 0, 0.9, 5))
    assert continuation(tiny_model(0), None, Sampling(1.0, 2**80, 0.9, 5))[0] == plain


def test_a_short_draft_never_ends_the_story():
    target, sampling = tiny_model(0, seq_len=128), Sampling(1.0, seed=11)
    draft = tiny_model(0, seq_len=24, n_positions=128)  # the target's own weights, seen through a window of 24
    plain, _ = continuation(target, None, sampling, max_tokens=200)
    tokens, statistics = continuation(target, draft, sampling, max_tokens=200)
    assert tokens == plain
    assert len(tokens) > 60
    assert statistics.n_accepted > 0


def acceptance_by_position(target, draft, tokenizer, first):
    """Accepted / drafted from position `first` on, over 24 sampled stories."""
    accepted = drafted = 0
    decoder = SpeculativeDecoder(target, draft, tokenizer, gamma=4)
    for seed in range(1, 25):
        position = len(decoder.encode("Once upon a time"))
        for step in steps_of(decoder.stream("Once upon a time", 495, Sampling(0.8, seed=seed))):
            if position >= first:
                accepted += step.n_accepted
                drafted += len(step.draft_tokens)
            position += len(step.tokens)
    assert drafted > 3000
    return accepted / drafted


@pytest.mark.campaign
@real
def test_a_window_of_128_keeps_nine_tenths_of_the_acceptance_of_the_whole_past():
    """stories260K for stories3M from position 128 on: the stories are the same, only the draft's past is cut. Measured 0.99."""
    models = SHARED / "models"
    decoder = SpeculativeDecoder(models / "stories3M.bin", models / "stories260K.bin")
    whole, tokenizer = decoder.draft, decoder.tokenizer
    window = Transformer(replace(whole.config, seq_len=128), whole.weights, n_positions=512)
    slid = acceptance_by_position(decoder.target, window, tokenizer, 128)
    assert slid > 0.9 * acceptance_by_position(decoder.target, whole, tokenizer, 128)


def test_generation_stops_at_an_end_mark_and_does_not_print_it():
    stops = set()
    for seed in range(40):
        target, draft = tiny_model(3, vocab=6, scale=0.1), tiny_model(4, vocab=6, scale=0.1)
        tokens, statistics = continuation(target, draft, Sampling(1.0, 0, 1.0, seed), prompt=(BOS, 5))
        stops.add(statistics.stop_reason)
        assert BOS not in tokens and EOS not in tokens
        assert statistics.n_generated == len(tokens)
        if statistics.stop_reason != "max_tokens":
            assert len(tokens) < 60
            # an accepted end mark counts as accepted, and nothing behind it does
            assert statistics.n_accepted <= len(tokens) + 1
    assert {"bos", "eos"} <= stops


def test_generation_stops_at_max_tokens_and_at_seq_len():
    target, draft, greedy = tiny_model(0, seq_len=64), tiny_model(1, seq_len=64), Sampling(0.0)
    for verify in VERIFIERS:
        for n in (0, 1, 2, 5, 17):
            tokens, statistics = continuation(target, draft, greedy, 4, verify, max_tokens=n)
            assert (len(tokens), statistics.stop_reason) == (n, "max_tokens")
        # the last of 65 tokens is never run, so 64 positions are enough for it
        tokens, statistics = continuation(target, draft, greedy, 4, verify, max_tokens=1000)
        assert (3 + len(tokens), statistics.stop_reason) == (65, "seq_len")


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    target, draft = tiny_model(0), tiny_model(1)
    for verify in VERIFIERS:
        first = continuation(target, draft, Sampling(1.0, 0, 1.0, 5), verify=verify)[0]
        assert continuation(target, draft, Sampling(1.0, 0, 1.0, 5), verify=verify)[0] == first
        assert continuation(target, draft, Sampling(1.0, 0, 1.0, 6), verify=verify)[0] != first


def test_the_largest_gamma_fits_one_pass():
    target, twin = tiny_model(0), tiny_model(0)
    plain, _ = continuation(target, None, Sampling(0.0), max_tokens=100)
    tokens, statistics = continuation(target, twin, Sampling(0.0), MAX_GAMMA, max_tokens=100)
    assert tokens == plain
    assert statistics.accepted_histogram[MAX_GAMMA] == 1


def test_figures_of_the_statistics_agree_with_each_other():
    tokens, s = continuation(tiny_model(0, layers=3), tiny_model(1), Sampling(0.0), max_tokens=12)
    assert s.n_generated == len(tokens) == 12
    assert s.n_generated == s.n_accepted + s.target_passes  # each pass adds one token of the target's own
    assert sum(i * n for i, n in enumerate(s.accepted_histogram)) == s.n_accepted
    assert sum(s.accepted_histogram) == s.target_passes
    assert s.acceptance_rate == s.n_accepted / s.n_drafted
    assert s.decode_seconds > 0


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.1}, {"top_p": -0.1}, {"seed": -1}]
)
def test_sampling_out_of_range_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


def test_the_library_streams_what_it_generates_with_a_draft_or_without(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=3)
    text, statistics = decoder.generate("ab", 30, temperature=0.9, top_k=50, top_p=0.95, seed=4)
    plain = SpeculativeDecoder(pair.target, None).generate("ab", 30, temperature=0.9, top_k=50, top_p=0.95, seed=4)
    assert text == plain.text
    assert text.startswith("ab")
    first, *events = decoder.stream("ab", 30, Sampling(0.9, 50, 0.95, 4))
    assert isinstance(first, Prompt)
    assert first.tokens == decoder.encode("ab")
    assert sum(len(step.tokens) for step in steps_of(events)) == statistics.n_generated
    proposals, steps = events[::2], events[1::2]
    assert all(isinstance(proposal, Proposal) for proposal in proposals)
    assert [proposal.tokens for proposal in proposals] == [step.draft_tokens for step in steps]


def test_models_that_do_not_fit_are_refused(pair):
    other = tiny_model(0, vocab=105)
    with pytest.raises(ValueError, match="105"):
        SpeculativeDecoder(pair.target, other)
    with pytest.raises(ValueError, match="gamma"):
        SpeculativeDecoder(pair.target, pair.draft, gamma=0)
    with pytest.raises(ValueError, match="verify"):
        SpeculativeDecoder(pair.target, pair.draft, verify="maybe")


def test_a_consumer_that_stops_early_leaves_a_decoder_that_works(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    expected = decoder.generate("ab", 30, seed=4).text
    for _ in itertools.islice(decoder.stream("ab", 30, Sampling(seed=9)), 3):
        pass
    assert decoder.generate("ab", 30, seed=4).text == expected


def taking_turns(*streams):
    """The tokens of each stream, one event of each at a time."""
    texts = [[] for _ in streams]
    for events in itertools.zip_longest(*streams):
        for text, event in zip(texts, events, strict=True):
            text += event.tokens if isinstance(event, Step) else []
    return texts


def tokens_of(events):
    return [token for step in steps_of(events) for token in step.tokens]


@pytest.mark.parametrize("verify", VERIFIERS)
def test_streams_that_take_turns_on_one_decoder_each_say_what_they_would_alone(pair, verify):
    decoder = SpeculativeDecoder(pair.target, pair.draft, verify=verify)
    requests = [("Once", 40, Sampling(seed=1)), ("Then", 60, Sampling(0.0)), ("Once", 30, Sampling(seed=3))]
    alone = [tokens_of(decoder.stream(*request)) for request in requests]
    assert taking_turns(*(decoder.stream(*request) for request in requests)) == alone


def test_so_do_streams_of_several_decoders_that_share_a_model(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    for model in (decoder.target, decoder.draft):
        other = SpeculativeDecoder(model, None, decoder.tokenizer)
        pairs = [(decoder, "Once"), (other, "Then")]
        alone = [tokens_of(d.stream(prompt, 30)) for d, prompt in pairs]
        assert taking_turns(*(d.stream(prompt, 30) for d, prompt in pairs)) == alone


def test_threads_that_share_a_decoder_each_get_the_right_text(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    swapped = SpeculativeDecoder(decoder.draft, decoder.target, decoder.tokenizer)  # its models in the other order
    calls = [
        lambda: decoder.generate("Lily", 50, seed=3).text,
        lambda: decoder.generate("ab", 40, temperature=0.7, seed=4).text,
        lambda: tokens_of(decoder.stream("Once", 40, Sampling(seed=5))),
        lambda: swapped.generate("Once", 28, seed=6).text,
    ]
    alone = [call() for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(6):
            assert [future.result() for future in [pool.submit(call) for call in calls]] == alone


def test_a_text_that_is_begun_while_another_is_judged_disturbs_neither(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=4)
    sampling = Sampling(seed=1)
    alone, inner = tokens_of(decoder.stream("Once", 30, sampling)), decoder.generate("Then", 20, seed=2).text
    tokens, texts = [], []
    for event in decoder.stream("Once", 30, sampling):
        tokens += event.tokens if isinstance(event, Step) else []
        texts += [decoder.generate("Then", 20, seed=2).text] if isinstance(event, Proposal) else []
    assert tokens == alone
    assert len(texts) > 3
    assert set(texts) == {inner}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of the system")
def test_a_signal_handler_gets_the_right_text_or_is_refused_and_spoils_none(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft)
    outer, inner = (decoder.generate(prompt, 120, seed=1).text for prompt in ("Once", "Then"))
    texts, refused = [], []

    def decode_too(*_):
        try:
            texts.append(decoder.generate("Then", 120, seed=1).text)
        except RuntimeError as error:
            refused.append(str(error))
        signal.setitimer(signal.ITIMER_REAL, 0.0137)  # not before: on a slow machine handlers would interrupt each other for ever

    before = signal.signal(signal.SIGALRM, decode_too)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0003)
        deadline = time.monotonic() + 2
        while (len(refused) < 3 or not texts) and time.monotonic() < deadline:
            assert decoder.generate("Once", 120, seed=1).text == outer
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(texts) <= {inner}
    assert all("signal handler" in error for error in refused), refused
    assert texts or refused


class Interrupted:
    """A model over whose logits another pass runs as soon as a forward has returned, as a signal handler's may."""

    def __init__(self, model):
        self._model, self.lock, self.n_positions, self.n_short = model, model.lock, model.n_positions, 0
        self.n_interrupts, self.experts_read = 0, (0.0, 0)

    @property
    def n_passes(self):
        return self._model.n_passes

    def forward(self, tokens, n_logits=1):
        logits = self._model.forward(tokens, n_logits)
        if n_logits and len(tokens) % 3 == 0 and self.n_interrupts < 8:
            self.n_interrupts += 1
            self._model.forward([BOS, 17, 4, 99, 5, 6, 7], min(n_logits, 7))
        return logits


def test_logits_that_a_handlers_pass_ran_over_are_judged_anew():
    for sampling in SAMPLINGS:
        plain, _ = continuation(tiny_model(0), None, sampling)
        target = Interrupted(tiny_model(0))
        drafter = ModelDrafter(tiny_model(1), Sampler(105, sampling), CoupledVerifier.draft_noise, END_MARKS)
        steps = steps_of(decode(target, drafter, CoupledVerifier(105, sampling), [BOS, 7, 9], 60, FixedLength(4), END_MARKS))
        assert [token for step in steps for token in step.tokens] == plain
        assert target.n_interrupts > 0


class Trial:
    """In the place of `write`: steps that take as long as the number of threads says."""

    def __init__(self, seconds):
        self.seconds, self.tried = seconds, []

    def __call__(self, target, *_):
        self.tried.append(target.n_threads)
        yield Step([5], [], 0, self.seconds[target.n_threads], 0.0, None)


@pytest.mark.skipif(available_threads() < 2, reason="needs two cores to choose from")
@pytest.mark.parametrize(("alone", "together", "expected"), [(1.0, 0.7, 2), (1.0, 1.2, 2), (1.0, 1.3, 1)])
def test_threads_that_are_clearly_slower_are_left_out(pair, monkeypatch, alone, together, expected):
    trial = Trial({1: alone / 100, 2: together / 100})
    monkeypatch.setattr("specdec.draft.autotuner.write", trial)
    for draft in (None, pair.draft):
        decoder = SpeculativeDecoder(pair.target, draft)
        decoder.tuning.choices = [2, 1]  # whatever the machine has
        for model in filter(None, (decoder.target, decoder.draft)):
            model.n_threads = 2
        trial.tried.clear()
        decoder.warm_up()
        assert {model.n_threads for model in (decoder.target, decoder.draft) if model} == {expected}
        assert set(trial.tried) == {1, 2}


def test_a_number_of_threads_that_was_given_is_kept(pair, monkeypatch):
    trial = Trial(dict.fromkeys(range(1, available_threads() + 1), 0.01))
    monkeypatch.setattr("specdec.draft.autotuner.write", trial)
    given = available_threads()
    SpeculativeDecoder(pair.target, pair.draft, n_threads=given).warm_up()
    loaded = SpeculativeDecoder(pair.target).target
    SpeculativeDecoder(loaded, None, pair.tokenizer).warm_up()
    assert set(trial.tried) == {given}


# Steps by hand


def drafter_of(kind, draft, verifier, sampling):
    """A drafter and its policy; of all kinds on one model."""
    sampler, policy = Sampler(105, sampling, draft.config.vocab_size), FixedLength(4)
    if kind == "tree":
        return TreeDrafter(draft, sampler, verifier.draft_noise, END_MARKS), FixedLength(4)
    if kind == "model":
        return ModelDrafter(draft, sampler, verifier.draft_noise, END_MARKS), policy
    return (NgramDrafter(END_MARKS) if kind == "ngram" else None), policy


def beginning(draft, kind, verify, sampling):
    """What `decode` and `Text` are told beside target and prompt."""
    verifier = VERIFIERS[verify](105, sampling)
    drafter, policy = drafter_of(kind, draft, verifier, sampling)
    return {"drafter": drafter, "verifier": verifier, "max_tokens": 50, "policy": policy, "end_marks": END_MARKS}


def logits_of(target, text):
    if text.draft.parents is None:
        return target.forward(text.tokens + text.draft.tokens, len(text.draft.tokens) + 1).copy()
    return target.forward_tree(text.tokens, text.draft.tokens, text.draft.parents).copy()


def one_by_one(target, texts):
    """A step of each in turn."""
    for text in texts:
        text.wants()
        yield text, text.takes(*run(target, text), 0.0)


def all_at_once(target, texts):
    """All say what they want before any pass runs, and judge when all have run."""
    for text in texts:
        text.wants()
    for text, logits in [(text, logits_of(target, text)) for text in texts]:
        yield text, text.takes(*text.judge(logits), 0.0)


@pytest.mark.parametrize("turns", [one_by_one, all_at_once])
@pytest.mark.parametrize(
    ("kind", "verify"),
    [(kind, verify) for kind in ("model", "ngram", "tree", None) for verify in VERIFIERS if (kind, verify) != ("tree", "block")],
)
def test_two_texts_that_take_turns_on_one_target_are_what_they_are_alone(turns, kind, verify):
    """And so is every step of them; the model that drafts for both is one too."""
    prompts = {"one": [BOS, 7, 9, 7, 9, 7], "other": [BOS, 7, 9, 30, 31] * 3}
    for sampling in SAMPLINGS:
        target, draft = tiny_model(0, scale=0.1), tiny_model(1, scale=0.1)
        alone, together = ({name: [] for name in prompts} for _ in range(2))
        for name, prompt in prompts.items():
            told = beginning(draft, kind, verify, sampling)
            alone[name] = [s for s in decode(target, prompt=prompt, **told) if isinstance(s, Step)]
        texts = {}
        for name, prompt in prompts.items():
            told = beginning(draft, kind, verify, sampling)
            texts[name] = Text([*prompt], n_positions=target.n_positions, **told)
        while running := {name: text for name, text in texts.items() if not text.has_ended}:
            for text, step in turns(target, [*running.values()]):
                together[next(name for name in texts if texts[name] is text)].append(step)
        for name, prompt in prompts.items():
            steps = [(s.tokens, s.draft_tokens, s.n_accepted, s.stop_reason) for s in alone[name]]
            assert [(s.tokens, s.draft_tokens, s.n_accepted, s.stop_reason) for s in together[name]] == steps
            said = [token for step in alone[name] for token in step.tokens]
            assert texts[name].tokens == prompt + said and 0 < len(said) <= 50
        assert kind is None or sum(step.n_nodes for steps in alone.values() for step in steps) > 0


def test_judging_changes_nothing_so_that_a_pass_may_be_run_again():
    target, draft, sampling = tiny_model(0), tiny_model(1), Sampling(0.8, seed=3)
    told = beginning(draft, "model", "rejection", sampling)
    text = Text([BOS, 7, 9], n_positions=target.n_positions, **told)
    text.wants()
    logits = logits_of(target, text)
    assert text.judge(logits) == text.judge(logits) and text.tokens == [BOS, 7, 9]
