"""The engine thread: each batched output equals the library's for that request, whatever else runs."""

import time
from dataclasses import replace

import numpy as np
import pytest

from specdec import Proposal, Sampling, SpeculativeDecoder
from specdec.draft.lookup import PredictionDrafter
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.events import Prompt, Step
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.loaders import load_checkpoint, optional_dependencies
from specdec.loaders.model_loader import load_model
from specdec.logprobs import compute_logprobs
from specdec.model.kv_cache import KVCache
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.quant import INT8
from specdec.server.engine_thread import QueueFullError, ShutdownError
from specdec.tokenizer import BOS
from specdec.verification import Draft
from tests.tools.configs import replace_config
from tests.tools.engine_threads import (  # noqa: F401
    TIMEOUT_S,
    Output,
    assert_all_same,
    assert_same,
    generate_with_library,
    make_engine,
    make_request,
    submit,
    submit_all,
)
from tests.tools.prompt_caches import endless  # noqa: F401  (a fixture)
from tests.tools.random_heads import make_head
from tests.tools.random_models import make_started_policy

WORDS = ["abc abd ", "The ", "once more ", "[x] ", "aab ", "ba "]


def random_request(decoder, rng, max_tokens=60):
    prompt = "".join(rng.choice(WORDS, rng.integers(1, 12)))
    sampling = Sampling(float(rng.choice([0.0, 0.8, 1.0, 1.5])), int(rng.choice([0, 5])), 0.9, int(rng.integers(40)))
    stops = [str(rng.choice(["b", "ab", "x y", "c a"]))] if rng.random() < 0.2 else []
    return GenerationRequest(decoder.encode(prompt), int(rng.integers(0, max_tokens)), sampling, stops)


def test_every_sampler_gives_the_same_output_in_a_batch(make_engine, pair):
    """Penalties, biases and truncated distributions are mixed in one pass."""
    rng = np.random.default_rng(3)
    options = [
        {}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0},
        {"logit_bias": {270: 4.0, 280: -100.0}}, {"min_p": 0.02, "repetition_penalty": 0.8, "frequency_penalty": -0.3},
    ]  # fmt: skip
    for name in ("draft", "lookup", "plain"):
        decoder = make_decoder(name, pair)
        requests = [random_request(decoder, rng) for _ in range(21)]
        for i, request in enumerate(requests):
            requests[i] = replace(request, sampling=replace(request.sampling, **options[i % len(options)]))
        assert_all_same(decoder, requests, submit_all(make_engine(decoder), requests))


def generate_many(decoder, engine, rng, n, max_tokens=60):
    """Submit n requests, cancel a fifth of them at random times, and compare the others with the library."""
    requests, outputs, handles = [random_request(decoder, rng, max_tokens) for _ in range(n)], [], []
    for i, request in enumerate(requests):
        outputs.append(Output())
        if i and rng.random() < 0.3:  # continue an earlier request
            previous = requests[rng.integers(i)]
            longer = (previous.prompt + request.prompt[1:])[: decoder.n_positions]
            request = requests[i] = replace(request, prompt=longer)
        handles.append(submit(engine, request, outputs[-1]))
        if rng.random() < 0.5:
            outputs[rng.integers(i + 1)].started.wait(float(rng.random()) * 0.05)
        if rng.random() < 0.2:
            handles[rng.integers(i + 1)].cancel()
    n_compared = 0
    for request, handle, output in zip(requests, handles, outputs, strict=True):
        if not handle.is_cancelled:
            assert_same(decoder, request, output)
            n_compared += 1
        else:
            output = "".join(event.text for event in [*output.events] if not isinstance(event, Proposal | Exception))
            assert generate_with_library(decoder, request)[0].startswith(output)
    return n_compared


DECODERS = {
    "plain": {"draft": None},
    "lookup": {},
    "lookup, gamma 7": {"gamma": 7},
    "lookup, rejection": {"verify": "rejection"},
    "lookup, block, 1 thread": {"verify": "block", "n_threads": 1},
    "draft": {"draft": "draft"},
    "draft, gamma 3": {"draft": "draft", "gamma": 3, "n_threads": 1},
    "draft, rejection": {"draft": "draft", "verify": "rejection", "gamma": 2},
    "draft, block": {"draft": "draft", "verify": "block"},
    "draft, trees, rejection": {"draft": "draft", "verify": "rejection", "tree": "on"},
    "draft, trees": {"draft": "draft", "tree": "on"},
    "stage": {"draft": "draft", "stage": "lookup"},
    "stage, rejection": {"draft": "draft", "stage": "lookup", "verify": "rejection"},
    "self, int8, f16": {"draft": "self", "kv": "f16"},
    "int8": {"draft": None, "quantize": "target"},
    "head": {"draft": "head"},
    "head, rejection": {"draft": "head", "verify": "rejection"},
}


def make_decoder(name, pair):
    settings = dict(DECODERS[name])
    draft, target = settings.pop("draft", "lookup"), pair.target
    if draft == "head":
        target = load_model(pair.target, n_threads=1)
        draft = make_head(target, INT8, draft_vocab_size=150)
    return SpeculativeDecoder(target, pair.draft if draft == "draft" else draft, pair.tokenizer, **settings)


@pytest.mark.parametrize("name", DECODERS)
def test_batched_output_equals_library_output(name, pair, make_engine):
    decoder, rng = make_decoder(name, pair), np.random.default_rng(7)
    engine = make_engine(decoder, int(rng.integers(4, 9)))
    assert generate_many(decoder, engine, rng, 14, 50) > 5
    metrics = engine.metrics
    assert (metrics.running, metrics.queued, metrics.failed) == (0, 0, 0) and metrics.done + metrics.cancelled == 14
    if name == "plain":
        assert metrics.passes < metrics.generated_tokens + metrics.prompt_tokens / 2


@pytest.mark.campaign
@pytest.mark.parametrize("n_slots", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["plain", "lookup", "draft", "head", "draft, block"])
def test_many_batched_outputs_equal_library_output(name, n_slots, pair, make_engine):
    decoder = make_decoder(name, pair)
    assert generate_many(decoder, make_engine(decoder, n_slots), np.random.default_rng(n_slots), 50, 100) > 25


def test_cancelling_frees_the_slot_within_a_step(endless, make_engine):
    engine, first, second = make_engine(endless, max_running=1), Output(), Output()
    handle = submit(engine, make_request(endless, 50_000), first)
    assert first.started.wait(TIMEOUT_S)
    submit(engine, make_request(endless, 5), second)
    assert not second.events
    passes = engine.metrics.passes
    handle.cancel()
    n = len(first.events)
    assert_same(endless, make_request(endless, 5), second)
    assert len(first.events) <= n + 2 and not first.finished.is_set() and engine.metrics.cancelled == 1
    assert engine.metrics.passes < passes + 50
    waiting = Output()
    handle = submit(engine, make_request(endless, 50_000), first)
    submit(engine, make_request(endless, 50_000), waiting).cancel()
    handle.cancel()
    engine.close(TIMEOUT_S)
    assert not waiting.events and engine.metrics.cancelled == 3


def test_excess_requests_are_rejected(endless, make_engine):
    engine, output = make_engine(endless, max_running=1, max_waiting=1), Output()
    handles = [submit(engine, make_request(endless, 50_000), output) for _ in range(2)]
    with pytest.raises(QueueFullError):
        submit(engine, make_request(endless, 1), output)
    handles[1].cancel()
    assert output.started.wait(TIMEOUT_S)
    engine.close(0.0)
    with pytest.raises(ShutdownError):
        submit(engine, make_request(endless, 1), output)


def test_closing_aborts_sequences_with_a_final_event(endless, make_engine):
    engine = make_engine(endless, max_running=2)
    outputs = submit_all(engine, [make_request(endless, n) for n in (50_000, 3, 50_000, 50_000)])
    assert outputs[2].started.wait(TIMEOUT_S)
    engine.close(0.05)
    reasons = [output.wait()[-1].stop_reason for output in outputs]
    assert reasons == ["interrupted", "max_tokens", "interrupted", "interrupted"]
    assert [type(event) for event in outputs[3].events] == [Prompt, Step] and outputs[3].text == "abc"
    whole = endless.generate("abc", 400, Sampling(1.0, seed=3)).text
    assert whole.startswith(outputs[2].text[:200]) and len(outputs[2].text) > 4
    engine.close(0.0)


def test_sequences_finish_within_the_grace_period(endless, make_engine):
    engine = make_engine(endless)
    outputs = submit_all(engine, [make_request(endless, 40)] * 3)
    engine.close(TIMEOUT_S)
    assert [output.events[-1].stop_reason for output in outputs] == ["max_tokens"] * 3


def test_zero_max_tokens_gives_a_final_step(endless, make_engine):
    output = Output()
    submit(make_engine(endless), make_request(endless, 0), output)
    assert [type(event) for event in output.wait()] == [Prompt, Step] and output.events[-1].stop_reason == "max_tokens"


def test_an_error_fails_only_its_sequence(pair, make_engine):
    tensors = load_checkpoint(pair.endless).tensors
    tensors = {name: np.array(tensor[:]) for name, tensor in tensors.items()}
    config, poison = load_checkpoint(pair.endless).config, 0  # a token that no output contains
    tensors["tok_emb"][poison] = 1e30
    decoder = SpeculativeDecoder(Model(config, LLAMA.plan_weights(config, tensors).pack(), 1), None, pair.tokenizer)
    engine = make_engine(decoder)
    requests = [make_request(decoder, 60, prompt) for prompt in ("abc", "The ", "aab", "ba ")]
    requests[1] = replace(requests[1], prompt=[*requests[1].prompt, poison])
    outputs = submit_all(engine, requests)
    assert "not finite" in str(outputs[1].wait()[-1]) and engine.metrics.failed == 1
    for i in (0, 2, 3):
        assert_same(decoder, requests[i], outputs[i])
    again = Output()
    submit(engine, requests[0], again)
    assert_same(decoder, requests[0], again)


def test_a_failed_pass_fails_only_the_sequence_that_caused_it(endless, make_engine, monkeypatch):
    grow = KVCache.reserve

    def reserve(cache, n_slots):
        if n_slots > 290:
            raise MemoryError("out of memory")
        grow(cache, n_slots)

    monkeypatch.setattr(KVCache, "reserve", reserve)
    requests = [make_request(endless, n) for n in (250, 400, 270)]
    outputs = submit_all(make_engine(endless), requests)
    assert isinstance(outputs[1].wait()[-1], MemoryError) and len(outputs[1].steps) > 250
    assert [outputs[i].wait()[-1].stop_reason for i in (0, 2)] == ["max_tokens"] * 2
    monkeypatch.undo()
    assert_same(endless, requests[2], outputs[2])


def test_a_failed_slot_allocation_fails_only_its_request(endless, make_engine, monkeypatch):
    engine, acquire = make_engine(endless, cache_bytes=1), PrefixCache.acquire
    monkeypatch.setattr(
        PrefixCache, "acquire", lambda pool, prompt, *more: 1 / 0 if len(prompt) > 9 else acquire(pool, prompt, *more)
    )
    requests = [make_request(endless, 9, prompt) for prompt in ("abc", "abc " * 9, "ab")]
    outputs = submit_all(engine, requests)
    assert isinstance(outputs[1].wait()[0], ZeroDivisionError)
    for i in (0, 2):
        assert_same(endless, requests[i], outputs[i])
    assert (engine.metrics.failed, engine.metrics.queued, engine.metrics.running) == (1, 0, 0)


def test_a_failed_warm_up_fails_every_request(pair, make_engine, monkeypatch):
    decoder, output = SpeculativeDecoder(pair.target, None, pair.tokenizer, n_threads=1), Output()
    monkeypatch.setattr(decoder, "warm_up", lambda: 1 / 0)
    engine = make_engine(decoder)
    submit(engine, make_request(decoder, 5), output)
    assert isinstance(output.wait()[0], ZeroDivisionError) and engine.metrics.failed == 1


def test_a_callback_that_raises_cancels_its_request(endless, make_engine):
    def raise_error(event):
        raise OSError("disconnected")

    engine, output = make_engine(endless, max_running=1), Output()
    submit(engine, make_request(endless, 9), raise_error)
    submit(engine, make_request(endless, 9), output)
    assert_same(endless, make_request(endless, 9), output)
    assert engine.metrics.cancelled == 1


def test_a_continued_conversation_reuses_its_cache_until_eviction(endless, make_engine):
    rng = np.random.default_rng(0)
    prompts = [[BOS, *rng.integers(3, 300, 100).tolist()] for _ in range(3)]
    size = endless.target.get_sequence_bytes(105, True)

    def cached(engine, prompt):
        before, output, request = engine.metrics.cached_tokens, Output(), GenerationRequest(prompt, 4, Sampling(0.0))
        submit(engine, request, output)
        assert_same(endless, request, output)
        return engine.metrics.cached_tokens - before, [*prompt, *(token for step in output.steps for token in step.tokens)]

    engine = make_engine(endless, cache_bytes=int(2.5 * size))
    conversations = [cached(engine, prompt)[1] for prompt in prompts[:2]]
    assert cached(engine, [*conversations[0], 5, 6])[0] == 104
    assert cached(engine, [*conversations[1], 5, 6])[0] == 104
    cached(engine, prompts[2])  # evicts the first one, which has been idle longest
    assert cached(engine, [*conversations[1], 7])[0] == 105
    assert cached(engine, [*conversations[0], 7])[0] == 0
    alone = make_engine(endless, cache_bytes=1)
    assert cached(alone, prompts[0])[0] == 0
    assert cached(alone, prompts[1])[0] == 0


@pytest.mark.parametrize("name", ["plain", "draft", "head", "stage"])
def test_a_shared_prefix_is_prefilled_once(name, pair, make_engine):
    """The first sequence prefills it; others copy it, then and later."""
    decoder, rng = make_decoder(name, pair), np.random.default_rng(0)
    engine = make_engine(decoder, max_running=3)
    prefix = [BOS, *rng.integers(3, 300, 70).tolist()]
    requests = [GenerationRequest([*prefix, *rng.integers(3, 300, n).tolist()], 9, Sampling(0.0)) for n in (20, 5, 15, 10, 30)]
    requests += [requests[0], replace(requests[0], sampling=Sampling(1.0, seed=1))]
    with decoder.target.lock:  # until all are submitted
        outputs = submit_all(engine, requests)
    assert_all_same(decoder, requests, outputs)
    n_prefilled = engine.metrics.prompt_tokens - engine.metrics.cached_tokens
    assert n_prefilled <= 71 + 20 + 5 + 15 + 10 + 30 + 2


def test_a_prefix_donor_can_be_cancelled(endless, make_engine):
    engine, rng = make_engine(endless, max_running=3), np.random.default_rng(0)
    prefix = [BOS, *rng.integers(3, 300, 3000).tolist()]
    requests = [GenerationRequest([*prefix, i], 5, Sampling(0.0)) for i in (3, 4, 5)]
    outputs = [Output() for _ in requests]
    handles = [submit(engine, request, output) for request, output in zip(requests, outputs, strict=True)]
    passes = engine.metrics.passes
    while engine.metrics.passes < passes + 5:
        time.sleep(0.001)
    handles[0].cancel()
    assert_all_same(endless, requests[1:], outputs[1:])
    metrics = engine.metrics
    assert metrics.cancelled == 1 and metrics.cached_tokens > metrics.prompt_tokens / 2


def test_a_long_prompt_does_not_block_decoding(endless, make_engine):
    engine, decoding, prefilling = make_engine(endless), Output(), Output()
    submit(engine, make_request(endless, 50_000), decoding)
    assert decoding.started.wait(TIMEOUT_S)
    n = len(decoding.steps)
    prompt = [BOS, *np.random.default_rng(1).integers(3, 300, 3000).tolist()]
    submit(engine, GenerationRequest(prompt, 3, Sampling(0.0)), prefilling)
    prefilling.wait()
    assert len(decoding.steps) - n >= 3000 // MAX_BATCH_TOKENS  # a token with each chunk
    assert engine.metrics.prompt_tokens >= 3000


@pytest.mark.parametrize("name", ["plain", "lookup", "draft", "draft, trees, rejection"])
def test_logprobs_equal_those_of_the_target_logits(name, pair, make_engine):
    decoder = make_decoder(name, pair)
    requests = [make_request(decoder, 20, prompt, top_logprobs=n) for prompt, n in (("abc abc", 3), ("The ", 0))]
    for request, output in zip(requests, submit_all(make_engine(decoder), requests), strict=True):
        output.wait()
        cache, tokens = decoder.target.new_cache(), [*request.prompt]
        logprobs = [entry for step in output.steps for entry in step.logprobs]
        generated = [token for step in output.steps for token in step.tokens]
        assert [entry.token for entry in logprobs] == generated and generated
        for entry in logprobs:
            logits = cache.forward(tokens)[0, : decoder.n_ids].astype(np.float64)
            expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-12)
            order = sorted(range(len(expected)), key=lambda i: (-expected[i], i))[: request.top_logprobs]
            assert [token for token, _ in entry.top] == order
            tokens.append(entry.token)


def test_logprobs_do_not_depend_on_other_sequences(pair, make_engine):
    """The other prompts leave no trace in this output."""
    decoder = make_decoder("lookup", pair)
    request = make_request(decoder, 30, "aab aab", top_logprobs=5)
    results = []
    for others in ([], ["abc abd "] * 5, ["[x] The once more"] * 7):
        engine, output = make_engine(decoder), Output()
        for i, canary in enumerate(others):
            submit(engine, GenerationRequest(decoder.encode(canary * 3), 40, Sampling(1.2, seed=i)), Output())
        submit(engine, request, output)
        results.append((output.text, [entry for step in output.steps for entry in step.logprobs]))
        engine.close(0.0)
    assert results[0] == results[1] == results[2]


def test_logprobs_match_values_by_hand():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]], np.float32))
    first, second = compute_logprobs(logits, Draft([1, 0], None, [-1, 0]), [1, 2], 2)
    assert np.exp(first.logprob) == pytest.approx(0.25) and [token for token, _ in first.top] == [0, 1]
    assert np.exp(second.logprob) == pytest.approx(0.8) and second.top[0] == (2, second.logprob)


@pytest.mark.parametrize("name", ["plain", "lookup", "draft", "lookup, gamma 7", "draft, gamma 3", "lookup, rejection"])
def test_a_prediction_is_drafted_and_does_not_change_the_output(name, pair, make_engine):
    """Without a set gamma, the draft length depends on timing."""
    decoder = make_decoder(name, pair)
    request = make_request(decoder, 40)
    text, tokens, _ = generate_with_library(decoder, request)
    engine = make_engine(decoder)
    for prediction in (tokens, [*tokens[:10], 5, 5, *tokens[12:]], [7] * 30):
        output = Output()
        submit(engine, replace(request, prediction=prediction), output)
        assert output.text == text
        n_accepted = sum(step.n_accepted for step in output.steps)
        if "gamma" in name and prediction is tokens:
            assert n_accepted > 20


def test_a_prediction_resumes_where_the_output_matches_again():
    drafter = PredictionDrafter({2}, 3, [10, 11, 12, 13, 14, 15, 16, 2, 9])
    assert drafter.propose([1, 5, 6], make_started_policy(8)).tokens == [10, 11, 12, 13, 14, 15, 16, 2]
    assert drafter.propose([1, 5, 6, 10, 11], make_started_policy(3)).tokens == [12, 13, 14]
    assert drafter.propose([1, 5, 6, 10, 99], make_started_policy(3)).tokens == []
    assert drafter.propose([1, 5, 6, 10, 99, 12, 13], make_started_policy(3)).tokens == [14, 15]
    assert drafter.propose([1, 5, 6, *range(10, 17), 2, 9], make_started_policy(3)).tokens == []


@pytest.mark.skipif(not optional_dependencies.is_installed(optional_dependencies.GUIDANCE), reason="needs llguidance")
@pytest.mark.parametrize("name", ["plain", "lookup", "lookup, rejection", "draft, block", "draft, trees", "stage", "head"])
def test_constrained_output_equals_library_output_in_a_batch(name, pair, make_engine):
    decoder = make_decoder(name, pair)
    requests = [make_request(decoder, 30, "abc "), make_request(decoder, 25, "The ", top_logprobs=1)]
    requests += [replace(request, constraint=decoder.regex("(ab|ba|aab){1,9}")) for request in requests]
    outputs = submit_all(make_engine(decoder), requests)
    assert_all_same(decoder, requests, outputs)
    assert set("".join(step.text for step in outputs[2].steps)) <= set("ab")


@pytest.mark.parametrize("draft", [None, "lookup", "draft"])
def test_sequences_beyond_the_longrope_threshold_are_recomputed_in_a_batch(draft, pair, make_engine):
    """A LongRoPE model uses other factors for long sequences: long prompts, and sequences that become long."""
    checkpoint = load_checkpoint(pair.target)
    config = replace_config(checkpoint.config, longrope_threshold=30, long_freq_factors=(3.0,) * 8)
    weights = LLAMA.plan_weights(config, {name: np.array(tensor[:]) for name, tensor in checkpoint.tensors.items()}).pack()
    target = Model(config, weights, 1)
    decoder = SpeculativeDecoder(target, pair.draft if draft == "draft" else draft, pair.tokenizer, n_threads=1)
    engine, rng = make_engine(decoder, 4), np.random.default_rng(3)
    prompts = [[BOS, *rng.integers(3, 300, int(n)).tolist()] for n in (3, 25, 29, 30, 31, 50, 70, 110)]
    requests = [GenerationRequest(prompt, 40, Sampling(0.9, seed=2)) for prompt in prompts]
    assert_all_same(decoder, requests, submit_all(engine, requests))
    again = [replace(requests[0], prompt=[*prompts[0], 5])]
    assert_all_same(decoder, again, submit_all(engine, again))


def test_draft_models_prefill_long_prompts_in_chunks(pair, make_engine):
    """After the first token, a draft model prefills as much at a step as a pass holds, while another sequence decodes."""
    decoder = SpeculativeDecoder(pair.endless, load_model(pair.endless, n_threads=1), pair.tokenizer, n_threads=1, gamma=2)
    engine, decoding, prefilling = make_engine(decoder), Output(), Output()
    handle = submit(engine, make_request(decoder, 50_000), decoding)
    assert decoding.started.wait(TIMEOUT_S)
    n, prompt = len(decoding.steps), [BOS, *np.random.default_rng(1).integers(3, 300, 1000).tolist()]
    request = GenerationRequest(prompt, 30, Sampling(0.0))
    submit(engine, request, prefilling)
    prefilling.wait()
    assert len(decoding.steps) - n >= 2 * (1000 // MAX_BATCH_TOKENS)
    handle.cancel()
    assert_same(decoder, request, prefilling)
