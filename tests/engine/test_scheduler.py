"""Texts that share passes: each is what the library writes of that request alone, whoever comes and goes beside it."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from specdec import Proposal, Sampling, SpeculativeDecoder
from specdec.draft.ngram import PredictionDrafter
from specdec.engine.decoding import Job, Prompt, Step
from specdec.engine.kv_slots import Seats
from specdec.engine.scheduler import Client, Closed, Engine, Full, logprobs_of
from specdec.kernels import MAX_TOKENS
from specdec.loaders import load_checkpoint, optional_dependencies
from specdec.loaders.loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.quant import INT8
from specdec.tokenizer import BOS
from specdec.verification import Draft
from tests.tools.configs import changed
from tests.tools.random_heads import head_of
from tests.tools.random_models import begun

PATIENCE = 60.0  # seconds until a test gives up
WORDS = ["abc abd ", "The ", "once more ", "[x] ", "aab ", "ba "]


class Heard:
    """What was told of a text."""

    def __init__(self, slow=0.0):
        self.events, self.ended, self.spoke, self._slow = [], threading.Event(), threading.Event(), slow

    def __call__(self, event):
        assert threading.current_thread().name == "engine" and not self.ended.is_set()
        self.events.append(event)
        time.sleep(self._slow)
        if isinstance(event, Step):
            self.spoke.set()
        if isinstance(event, Exception) or (isinstance(event, Step) and event.stop_reason):
            self.ended.set()

    def all(self):
        assert self.ended.wait(PATIENCE), "nothing is heard"
        return self.events

    @property
    def text(self):
        return "".join(event.text for event in self.all() if not isinstance(event, Proposal))

    @property
    def steps(self):
        return [event for event in self.events if isinstance(event, Step)]


def submit(engine, job, hear, who=Client()):  # noqa: B008 (it cannot be changed)
    """One text of that client."""
    return engine.submit([job], [hear], who)[0]


@pytest.fixture
def engines():
    """Makes engines, and ends them."""
    made = []

    def make(decoder, n_slots=8, n_queue=1000, cache_bytes=10**9):
        made.append(Engine(decoder, n_slots, n_queue, cache_bytes))
        return made[-1]

    yield make
    for engine in made:
        engine.close(0.0)
        assert not engine._thread.is_alive()


def job_of(decoder, rng, most=60):
    prompt = "".join(rng.choice(WORDS, rng.integers(1, 12)))
    sampling = Sampling(float(rng.choice([0.0, 0.8, 1.0, 1.5])), int(rng.choice([0, 5])), 0.9, int(rng.integers(40)))
    stops = [str(rng.choice(["b", "ab", "x y", "c a"]))] if rng.random() < 0.2 else []
    return Job(decoder.encode(prompt), int(rng.integers(0, most)), sampling, stops)


def test_every_sampler_has_the_same_text_beside_others(engines, pair):
    """Of penalties, biases and shares of the likeliest, mixed in one pass, with drafts that are drawn alike."""
    rng = np.random.default_rng(3)
    asked = [
        {}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0},
        {"logit_bias": {270: 4.0, 280: -100.0}}, {"min_p": 0.02, "repetition_penalty": 0.8, "frequency_penalty": -0.3},
    ]  # fmt: skip
    for name in ("draft", "ngram", "plain"):
        decoder = decoder_of(name, pair)
        engine, jobs, heard = engines(decoder), [], []
        for i in range(21):
            job = job_of(decoder, rng)
            jobs.append(replace(job, sampling=replace(job.sampling, **asked[i % len(asked)])))
            heard.append(Heard())
            submit(engine, jobs[-1], heard[-1])
        for job, told in zip(jobs, heard, strict=True):
            assert_same(decoder, job, told)


def of_the_library(decoder, job):
    """Text, tokens and the reason to stop."""
    events = [*decoder.stream(job.prompt, job.max_tokens, job.sampling, stop=list(job.stops), shape=job.shape)]
    steps = [event for event in events if isinstance(event, Step)]
    text = "".join(event.text for event in events if not isinstance(event, Proposal))
    return text, [token for step in steps for token in step.tokens], steps[-1].stop_reason if steps else "max_tokens"


def assert_same(decoder, job, heard):
    assert not isinstance(heard.all()[-1], Exception), heard.events[-1]
    assert isinstance(heard.events[0], Prompt) and heard.events[0].tokens == job.prompt
    tokens = [token for step in heard.steps for token in step.tokens]
    assert (heard.text, tokens, heard.steps[-1].stop_reason) == of_the_library(decoder, job)


def write_many(decoder, engine, rng, n, most=60):
    """n texts that come and go, a fifth of them cancelled at some moment, each compared with the library's."""
    jobs, heard, tickets = [job_of(decoder, rng, most) for _ in range(n)], [], []
    for i, job in enumerate(jobs):
        heard.append(Heard())
        if i and rng.random() < 0.3:  # a text before goes on
            before = jobs[rng.integers(i)]
            longer = (before.prompt + job.prompt[1:])[: decoder.n_positions]
            job = jobs[i] = replace(job, prompt=longer)
        tickets.append(submit(engine, job, heard[-1]))
        if rng.random() < 0.5:
            heard[rng.integers(i + 1)].spoke.wait(float(rng.random()) * 0.05)
        if rng.random() < 0.2:
            tickets[rng.integers(i + 1)].cancel()
    n_compared = 0
    for job, ticket, told in zip(jobs, tickets, heard, strict=True):
        if not ticket.is_cancelled:
            assert_same(decoder, job, told)
            n_compared += 1
        else:
            told = "".join(event.text for event in [*told.events] if not isinstance(event, Proposal | Exception))
            assert of_the_library(decoder, job)[0].startswith(told)
    return n_compared


DECODERS = {
    "plain": {"draft": None},
    "ngram": {},
    "ngram, gamma 7": {"gamma": 7},
    "ngram, rejection": {"verify": "rejection"},
    "ngram, block, 1 thread": {"verify": "block", "n_threads": 1},
    "draft": {"draft": "draft"},
    "draft, gamma 3": {"draft": "draft", "gamma": 3, "n_threads": 1},
    "draft, rejection": {"draft": "draft", "verify": "rejection", "gamma": 2},
    "draft, block": {"draft": "draft", "verify": "block"},
    "draft, trees, rejection": {"draft": "draft", "verify": "rejection", "tree": "on"},
    "draft, trees": {"draft": "draft", "tree": "on"},
    "stage": {"draft": "draft", "stage": "ngram"},
    "stage, rejection": {"draft": "draft", "stage": "ngram", "verify": "rejection"},
    "self, int8, f16": {"draft": "self", "kv": "f16"},
    "int8": {"draft": None, "quantize": "target"},
    "head": {"draft": "head"},
    "head, rejection": {"draft": "head", "verify": "rejection"},
}


def decoder_of(name, pair):
    settings = dict(DECODERS[name])
    draft, target = settings.pop("draft", "ngram"), pair.target
    if draft == "head":
        target = load_model(pair.target, n_threads=1)
        draft = head_of(target, INT8, n_rows=150)
    return SpeculativeDecoder(target, pair.draft if draft == "draft" else draft, pair.tokenizer, **settings)


@pytest.mark.parametrize("name", DECODERS)
def test_texts_that_share_passes_are_those_of_the_library(name, pair, engines):
    decoder, rng = decoder_of(name, pair), np.random.default_rng(7)
    engine = engines(decoder, int(rng.integers(4, 9)))
    assert write_many(decoder, engine, rng, 14, 50) > 5
    figures = engine.figures
    assert (figures.running, figures.queued, figures.failed) == (0, 0, 0) and figures.done + figures.cancelled == 14
    if name == "plain":
        assert figures.passes < figures.generated_tokens + figures.prompt_tokens / 2


@pytest.mark.campaign
@pytest.mark.parametrize("n_slots", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["plain", "ngram", "draft", "head", "draft, block"])
def test_a_thousand_texts_that_share_passes_are_those_of_the_library(name, n_slots, pair, engines):
    decoder = decoder_of(name, pair)
    assert write_many(decoder, engines(decoder, n_slots), np.random.default_rng(n_slots), 50, 100) > 25


@pytest.fixture(scope="module")
def endless(pair):
    """A decoder whose texts end by their length alone."""
    return SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1)


def a_job(decoder, n, prompt="abc", **more):
    return Job(decoder.encode(prompt), n, Sampling(1.0, seed=3), **more)


def test_a_text_that_is_cancelled_frees_its_place_within_a_step(endless, engines):
    engine, first, second = engines(endless, n_slots=1), Heard(), Heard()
    ticket = submit(engine, a_job(endless, 50_000), first)
    submit(engine, a_job(endless, 5), second)
    assert first.spoke.wait(PATIENCE) and not second.events
    passes = engine.figures.passes
    ticket.cancel()
    n = len(first.events)
    assert_same(endless, a_job(endless, 5), second)
    assert len(first.events) <= n + 2 and not first.ended.is_set() and engine.figures.cancelled == 1
    assert engine.figures.passes < passes + 50
    waits = Heard()
    ticket = submit(engine, a_job(endless, 50_000), first)
    submit(engine, a_job(endless, 50_000), waits).cancel()
    ticket.cancel()
    engine.close(PATIENCE)
    assert not waits.events and engine.figures.cancelled == 3


def test_what_does_not_fit_is_refused(endless, engines):
    engine, heard = engines(endless, n_slots=1, n_queue=1), Heard()
    for wrong in (Job([10**6], 5, Sampling()), Job([1], -1, Sampling()), Job([1], 5, Sampling(), [""])):
        with pytest.raises(ValueError, match=r"expected|holds"):
            submit(engine, wrong, heard)
    with pytest.raises(ValueError, match="expected"):
        submit(engine, Job([1], 5, Sampling(), prediction=[300]), heard)
    tickets = [submit(engine, a_job(endless, 50_000), heard) for _ in range(2)]
    with pytest.raises(Full):
        submit(engine, a_job(endless, 1), heard)
    tickets[1].cancel()
    assert heard.spoke.wait(PATIENCE)
    engine.close(0.0)
    with pytest.raises(Closed):
        submit(engine, a_job(endless, 1), heard)


def test_at_the_end_texts_end_or_are_cut_with_a_last_word(endless, engines):
    engine, heard = engines(endless, n_slots=2), [Heard() for _ in range(4)]
    for told, n in zip(heard, (50_000, 3, 50_000, 50_000), strict=True):
        submit(engine, a_job(endless, n), told)
    assert heard[2].spoke.wait(PATIENCE)
    engine.close(0.05)
    reasons = [told.all()[-1].stop_reason for told in heard]
    assert reasons == ["interrupted", "max_tokens", "interrupted", "interrupted"]
    assert [type(event) for event in heard[3].events] == [Prompt, Step] and heard[3].text == "abc"
    whole = endless.generate("abc", 400, Sampling(1.0, seed=3)).text
    assert whole.startswith(heard[2].text[:200]) and len(heard[2].text) > 4
    engine.close(0.0)


def test_texts_end_within_the_grace(endless, engines):
    engine, heard = engines(endless), [Heard() for _ in range(3)]
    for told in heard:
        submit(engine, a_job(endless, 40), told)
    engine.close(PATIENCE)
    assert [told.events[-1].stop_reason for told in heard] == ["max_tokens"] * 3


def test_a_text_of_no_tokens_has_a_last_step(endless, engines):
    heard = Heard()
    submit(engines(endless), a_job(endless, 0), heard)
    assert [type(event) for event in heard.all()] == [Prompt, Step] and heard.events[-1].stop_reason == "max_tokens"


def test_an_error_in_a_text_ends_that_text_alone(pair, engines):
    tensors = load_checkpoint(pair.endless).tensors
    tensors = {name: np.array(tensor[:]) for name, tensor in tensors.items()}
    config, poison = load_checkpoint(pair.endless).config, 0  # which no text says
    tensors["tok_emb"][poison] = 1e30
    decoder = SpeculativeDecoder(Transformer(config, LLAMA.pack(config, tensors), 1), None, pair.tokenizer)
    engine, heard = engines(decoder), [Heard() for _ in range(4)]
    jobs = [a_job(decoder, 60, prompt) for prompt in ("abc", "The ", "aab", "ba ")]
    jobs[1] = replace(jobs[1], prompt=[*jobs[1].prompt, poison])
    for job, told in zip(jobs, heard, strict=True):
        submit(engine, job, told)
    assert "not finite" in str(heard[1].all()[-1]) and engine.figures.failed == 1
    for i in (0, 2, 3):
        assert_same(decoder, jobs[i], heard[i])
    again = Heard()
    submit(engine, jobs[0], again)
    assert_same(decoder, jobs[0], again)


def test_a_pass_that_fails_ends_the_text_that_is_to_blame(endless, engines, monkeypatch):
    grow = Transformer._reserve

    def reserve(model, n_slots):
        if n_slots > 290:
            raise MemoryError("no room")
        grow(model, n_slots)

    monkeypatch.setattr(Transformer, "_reserve", reserve)
    engine, heard = engines(endless), [Heard() for _ in range(3)]
    jobs = [a_job(endless, n) for n in (250, 400, 270)]
    for job, told in zip(jobs, heard, strict=True):
        submit(engine, job, told)
    assert isinstance(heard[1].all()[-1], MemoryError) and len(heard[1].steps) > 250
    assert [heard[i].all()[-1].stop_reason for i in (0, 2)] == ["max_tokens"] * 2
    monkeypatch.undo()
    assert_same(endless, jobs[2], heard[2])


def test_a_text_that_no_cache_can_be_made_for_fails_alone(endless, engines, monkeypatch):
    engine, heard, new = engines(endless, cache_bytes=1), [Heard() for _ in range(3)], Seats.take
    monkeypatch.setattr(Seats, "take", lambda seats, prompt, *more: 1 / 0 if len(prompt) > 9 else new(seats, prompt, *more))
    jobs = [a_job(endless, 9, prompt) for prompt in ("abc", "abc " * 9, "ab")]
    for job, told in zip(jobs, heard, strict=True):
        submit(engine, job, told)
    assert isinstance(heard[1].all()[0], ZeroDivisionError)
    for i in (0, 2):
        assert_same(endless, jobs[i], heard[i])
    assert (engine.figures.failed, engine.figures.queued, engine.figures.running) == (1, 0, 0)


def test_where_nothing_warms_up_every_text_fails(pair, engines, monkeypatch):
    decoder, heard = SpeculativeDecoder(pair.target, None, pair.tokenizer, n_threads=1), Heard()
    monkeypatch.setattr(decoder, "warm_up", lambda: 1 / 0)
    engine = engines(decoder)
    submit(engine, a_job(decoder, 5), heard)
    assert isinstance(heard.all()[0], ZeroDivisionError) and engine.figures.failed == 1


def test_who_cannot_hear_is_left_out(endless, engines):
    def deaf(event):
        raise OSError("nobody is there")

    engine, heard = engines(endless, n_slots=1), Heard()
    submit(engine, a_job(endless, 50_000), deaf)
    submit(engine, a_job(endless, 9), heard)
    assert_same(endless, a_job(endless, 9), heard)
    assert engine.figures.cancelled == 1


def test_a_conversation_that_goes_on_finds_its_cache_and_the_oldest_is_dropped(endless, engines):
    rng = np.random.default_rng(0)
    prompts = [[BOS, *rng.integers(3, 300, 100).tolist()] for _ in range(3)]
    size = endless.team.seat().target.text_bytes(105, True)

    def cached(engine, prompt):
        before, heard, job = engine.figures.cached_tokens, Heard(), Job(prompt, 4, Sampling(0.0))
        submit(engine, job, heard)
        assert_same(endless, job, heard)
        return engine.figures.cached_tokens - before, [*prompt, *(token for step in heard.steps for token in step.tokens)]

    engine = engines(endless, cache_bytes=int(2.5 * size))
    said = [cached(engine, prompt)[1] for prompt in prompts[:2]]
    assert cached(engine, [*said[0], 5, 6])[0] == 104
    assert cached(engine, [*said[1], 5, 6])[0] == 104
    cached(engine, prompts[2])  # the first one has been idle longest
    assert cached(engine, [*said[1], 7])[0] == 105
    assert cached(engine, [*said[0], 7])[0] == 0
    alone = engines(endless, cache_bytes=1)
    assert cached(alone, prompts[0])[0] == 0
    assert cached(alone, prompts[1])[0] == 0


@pytest.mark.parametrize("name", ["plain", "draft", "head", "stage"])
def test_what_prompts_begin_with_is_read_once(name, pair, engines):
    """By the first that comes; others take it over, while it is read and later."""
    decoder, rng = decoder_of(name, pair), np.random.default_rng(0)
    engine = engines(decoder, n_slots=3)
    begins = [BOS, *rng.integers(3, 300, 70).tolist()]
    jobs = [Job([*begins, *rng.integers(3, 300, n).tolist()], 9, Sampling(0.0)) for n in (20, 5, 15, 10, 30)]
    jobs += [jobs[0], replace(jobs[0], sampling=Sampling(1.0, seed=1))]
    heard = [Heard() for _ in jobs]
    with decoder.target.lock:  # until all are here
        for job, told in zip(jobs, heard, strict=True):
            submit(engine, job, told)
    for job, told in zip(jobs, heard, strict=True):
        assert_same(decoder, job, told)
    n_read = engine.figures.prompt_tokens - engine.figures.cached_tokens
    assert n_read <= 71 + 20 + 5 + 15 + 10 + 30 + 2


def test_who_reads_for_others_may_leave(endless, engines):
    engine, rng = engines(endless, n_slots=3), np.random.default_rng(0)
    begins = [BOS, *rng.integers(3, 300, 3000).tolist()]
    jobs = [Job([*begins, i], 5, Sampling(0.0)) for i in (3, 4, 5)]
    heard = [Heard() for _ in jobs]
    tickets = [submit(engine, job, told) for job, told in zip(jobs, heard, strict=True)]
    passes = engine.figures.passes
    while engine.figures.passes < passes + 5:
        time.sleep(0.001)
    tickets[0].cancel()
    for job, told in zip(jobs[1:], heard[1:], strict=True):
        assert_same(endless, job, told)
    figures = engine.figures
    assert figures.cancelled == 1 and figures.cached_tokens > figures.prompt_tokens / 2


def test_nobody_waits_for_a_long_prompt(endless, engines):
    engine, writes, reads = engines(endless), Heard(), Heard()
    submit(engine, a_job(endless, 50_000), writes)
    assert writes.spoke.wait(PATIENCE)
    n = len(writes.steps)
    prompt = [BOS, *np.random.default_rng(1).integers(3, 300, 3000).tolist()]
    submit(engine, Job(prompt, 3, Sampling(0.0)), reads)
    reads.all()
    assert len(writes.steps) - n >= 3000 // MAX_TOKENS  # a token with each piece
    assert engine.figures.prompt_tokens >= 3000


@pytest.mark.parametrize("name", ["plain", "ngram", "draft", "draft, trees, rejection"])
def test_log_probabilities_are_those_of_the_targets_logits(name, pair, engines):
    decoder = decoder_of(name, pair)
    engine, jobs = engines(decoder), [a_job(decoder, 20, prompt, top_logprobs=n) for prompt, n in (("abc abc", 3), ("The ", 0))]
    heard = [Heard() for _ in jobs]
    for job, told in zip(jobs, heard, strict=True):
        submit(engine, job, told)
    for job, told in zip(jobs, heard, strict=True):
        told.all()
        tokens, one_by_one = [*job.prompt], [one for step in told.steps for one in step.logprobs]
        said = [token for step in told.steps for token in step.tokens]
        assert [one.token for one in one_by_one] == said and said
        for one in one_by_one:
            logits = decoder.target.forward(tokens)[0, : decoder.n_ids].astype(np.float64)
            expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert one.logprob == pytest.approx(expected[one.token], abs=1e-12)
            order = sorted(range(len(expected)), key=lambda i: (-expected[i], i))[: job.top_logprobs]
            assert [token for token, _ in one.top] == order
            tokens.append(one.token)


def test_log_probabilities_of_one_text_are_the_same_whatever_others_say(pair, engines):
    """A canary in the others' prompts is nowhere in this one's answer."""
    decoder = decoder_of("ngram", pair)
    job = a_job(decoder, 30, "aab aab", top_logprobs=5)
    told = []
    for others in ([], ["abc abd "] * 5, ["[x] The once more"] * 7):
        engine, heard = engines(decoder), Heard()
        for i, canary in enumerate(others):
            submit(engine, Job(decoder.encode(canary * 3), 40, Sampling(1.2, seed=i)), Heard())
        submit(engine, job, heard)
        told.append((heard.text, [one for step in heard.steps for one in step.logprobs]))
        engine.close(0.0)
    assert told[0] == told[1] == told[2]


def test_logprobs_by_hand():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]], np.float32))
    first, second = logprobs_of(logits, Draft([1, 0], None, [-1, 0]), [1, 2], 2)
    assert np.exp(first.logprob) == pytest.approx(0.25) and [token for token, _ in first.top] == [0, 1]
    assert np.exp(second.logprob) == pytest.approx(0.8) and second.top[0] == (2, second.logprob)


@pytest.mark.parametrize("name", ["plain", "ngram", "draft", "ngram, gamma 7", "draft, gamma 3", "ngram, rejection"])
def test_a_prediction_is_proposed_and_changes_no_text(name, pair, engines):
    """How much of it, the clock decides where no length is set."""
    decoder = decoder_of(name, pair)
    job = a_job(decoder, 40)
    text, tokens, _ = of_the_library(decoder, job)
    engine = engines(decoder)
    for prediction in (tokens, [*tokens[:10], 5, 5, *tokens[12:]], [7] * 30):
        heard = Heard()
        submit(engine, replace(job, prediction=prediction), heard)
        assert heard.text == text
        n_accepted = sum(step.n_accepted for step in heard.steps)
        if "gamma" in name and prediction is tokens:
            assert n_accepted > 20


def test_a_prediction_goes_on_where_the_text_comes_back_to_it():
    drafter = PredictionDrafter({2}, 3, [10, 11, 12, 13, 14, 15, 16, 2, 9])
    assert drafter.propose([1, 5, 6], begun(8)).tokens == [10, 11, 12, 13, 14, 15, 16, 2]
    assert drafter.propose([1, 5, 6, 10, 11], begun(3)).tokens == [12, 13, 14]
    assert drafter.propose([1, 5, 6, 10, 99], begun(3)).tokens == []
    assert drafter.propose([1, 5, 6, 10, 99, 12, 13], begun(3)).tokens == [14, 15]
    assert drafter.propose([1, 5, 6, *range(10, 17), 2, 9], begun(3)).tokens == []


@pytest.mark.skipif(not optional_dependencies.has(optional_dependencies.GUIDANCE), reason="needs llguidance")
@pytest.mark.parametrize("name", ["plain", "ngram", "ngram, rejection", "draft, block", "draft, trees", "stage", "head"])
def test_a_text_in_a_shape_is_that_of_the_library_beside_texts_without_one(name, pair, engines):
    decoder = decoder_of(name, pair)
    engine, jobs = engines(decoder), [a_job(decoder, 30, "abc "), a_job(decoder, 25, "The ", top_logprobs=1)]
    jobs = [*jobs, *(replace(job, shape=decoder.regex("(ab|ba|aab){1,9}")) for job in jobs)]
    heard = [Heard() for _ in jobs]
    for job, told in zip(jobs, heard, strict=True):
        submit(engine, job, told)
    for job, told in zip(jobs, heard, strict=True):
        assert_same(decoder, job, told)
    assert set("".join(step.text for step in heard[2].steps)) <= set("ab")


@pytest.mark.parametrize("draft", [None, "ngram", "draft"])
def test_texts_that_get_long_are_read_anew_beside_others(draft, pair, engines):
    """Of a family that turns all of a long text otherwise: prompts that are long, and texts that get so."""
    checkpoint = load_checkpoint(pair.target)
    config = changed(checkpoint.config, n_short=30, long_divisors=(3.0,) * 8)
    weights = LLAMA.pack(config, {name: np.array(tensor[:]) for name, tensor in checkpoint.tensors.items()})
    target = Transformer(config, weights, 1)
    decoder = SpeculativeDecoder(target, pair.draft if draft == "draft" else draft, pair.tokenizer, n_threads=1)
    engine, rng = engines(decoder, 4), np.random.default_rng(3)
    prompts = [[BOS, *rng.integers(3, 300, int(n)).tolist()] for n in (3, 25, 29, 30, 31, 50, 70, 110)]
    jobs, heard = [Job(prompt, 40, Sampling(0.9, seed=2)) for prompt in prompts], [Heard() for _ in prompts]
    for job, told in zip(jobs, heard, strict=True):
        submit(engine, job, told)
    for job, told in zip(jobs, heard, strict=True):
        assert_same(decoder, job, told)
    again = Heard()
    submit(engine, replace(jobs[0], prompt=[*jobs[0].prompt, 5]), again)
    assert_same(decoder, replace(jobs[0], prompt=[*jobs[0].prompt, 5]), again)


def test_drafts_read_a_long_prompt_piece_by_piece(pair, engines):
    """A draft that holds all of it reads as much at a time as a pass holds, while another text is written."""
    decoder = SpeculativeDecoder(pair.endless, load_model(pair.endless, n_threads=1), pair.tokenizer, n_threads=1, gamma=2)
    engine, writes, reads = engines(decoder), Heard(), Heard()
    ticket = submit(engine, a_job(decoder, 50_000), writes)
    assert writes.spoke.wait(PATIENCE)
    n, job = len(writes.steps), Job([BOS, *np.random.default_rng(1).integers(3, 300, 1000).tolist()], 5, Sampling(0.0))
    submit(engine, job, reads)
    reads.all()
    assert len(writes.steps) - n >= 2 * (1000 // MAX_TOKENS)
    ticket.cancel()
    assert_same(decoder, job, reads)
