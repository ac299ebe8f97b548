"""A narrow head says the whole one's bits or -inf, its rows follow the text, and no text hangs on it."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.architectures import Config, Weights
from specdec.architectures.llama import LLAMA
from specdec.decoder import SpeculativeDecoder
from specdec.decoding import CoupledVerifier, Step, decode
from specdec.drafting import heads
from specdec.drafting.costs import narrow_head_of
from specdec.drafting.drafters import ModelDrafter
from specdec.drafting.heads import NarrowHead, Thrift
from specdec.drafting.planning import Costs, FixedLength
from specdec.readers.loading import load_model
from specdec.sampling import Sampler, Sampling
from specdec.transformer import Transformer
from specdec.weights import BF16, FP16, FP32, INT8, Kind
from specdec.weights.blocks import KINDS
from tests.checkpoints import random_tensors
from tests.folders import FIXTURES
from tests.models import END_MARKS, THREADS, continuation, tiny_model, tokens_for
from tests.test_half import half_tensors

CONFIG = Config(40, 50, 2, 5, 1, 393, 400)  # 13 strips: the first three are always scored
GPT2 = "gpt2"


def model_of(kind: Kind | str, n_threads: int = 1) -> Transformer:
    if isinstance(kind, str):
        return load_model(FIXTURES / "gpt2_base", n_threads=n_threads)
    is_half = kind in (BF16, FP16)
    tensors = half_tensors(CONFIG, kind.name) if is_half else random_tensors(CONFIG, 0)
    return Transformer(CONFIG, LLAMA.pack(CONFIG, tensors, None if is_half else kind), n_threads)


def expected_of(logits: np.ndarray, head: NarrowHead) -> np.ndarray:
    held = [head.holds(token) for token in range(logits.shape[1])]
    return np.where(held, logits, np.float32(-np.inf))


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("kind", [FP32, INT8, BF16, FP16, GPT2], ids=lambda kind: getattr(kind, "name", kind))
def test_what_it_scores_are_the_bits_of_the_whole_head_and_the_rest_is_minus_infinity(kind: Kind | str, n_threads: int) -> None:
    model, whole = model_of(kind, n_threads), model_of(kind)
    head = NarrowHead(model.weights)
    tokens = [token % whole.config.vocab_size for token in tokens_for(CONFIG, 90)]
    for n in (1, 2, 9, 80, 80, 40, 90):  # tokens that are new, none, and a text that was cut
        logits = model.forward_narrowly(tokens[:n], head)
        assert np.array_equal(logits, expected_of(whole.forward(tokens[:n]), head)), n
        if n % 2:
            assert np.array_equal(model.widen(head), whole.forward(tokens[:n]))
        head.hear([token for token in tokens[:n] if token != 1])
    assert head.n_first == 32 * max(1, model.weights.matrices["classifier"].n_rows // 32 // 4)
    assert np.array_equal(model.forward(tokens), whole.forward(tokens))  # and the whole head is as it was


def test_it_goes_on_where_a_models_buffers_have_grown() -> None:
    model, head, tokens = model_of(INT8), None, tokens_for(CONFIG, 300)
    head = NarrowHead(model.weights)
    model.forward_narrowly(tokens[:200], head)
    assert np.array_equal(model.forward_narrowly(tokens, head).copy(), expected_of(model_of(INT8).forward(tokens), head))


def test_the_tokens_that_were_heard_first_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "N_HEARD", 32)
    model = model_of(INT8)
    head, whole = NarrowHead(model.weights), model_of(INT8).forward([5])
    head.hear(range(200, 232))
    assert np.array_equal(model.forward_narrowly([5], head), expected_of(whole, head))
    head.hear([100, 200, 392, 231, 10_000])  # one that was dropped, one that is held, and an id that is none of the model's
    assert [token for token in range(393) if head.holds(token)] == [*range(96), 100, 200, *range(203, 232), 392]
    assert np.array_equal(model.forward_narrowly([5], head), expected_of(whole, head))


def narrow_text(target: Transformer, draft: Transformer, sampling: Sampling, loss: float) -> tuple[list[int], int]:
    """The text of a target whose draft has a narrow head, and how many proposals stood."""
    sampler = Sampler(target.config.vocab_size, sampling, draft.config.vocab_size)
    thrift = Thrift(draft, NarrowHead(draft.weights), loss)
    drafter = ModelDrafter(draft, sampler, CoupledVerifier.draft_noise, END_MARKS, thrift)
    verifier = CoupledVerifier(target.config.vocab_size, sampling)
    events = [*decode(target, drafter, verifier, [1, 7, 9], 60, FixedLength(4), END_MARKS)]
    steps = [event for event in events if isinstance(event, Step)]
    return [token for step in steps for token in step.tokens], sum(step.n_accepted for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("loss", [0.1, 1000.0])
def test_coupled_text_is_the_plain_text(temperature: float, loss: float) -> None:
    n_stood = 0
    for seed in range(4):
        target, sampling = tiny_model(seed, vocab=393), Sampling(temperature, seed=seed)
        plain, _ = continuation(target, None, sampling)
        for draft in (tiny_model(seed, vocab=393), tiny_model(seed + 1, vocab=393), tiny_model(seed, vocab=300)):
            tokens, n = narrow_text(target, draft, sampling, loss)
            assert tokens == plain
            n_stood += n
    assert n_stood > 40  # it proposes, and not in vain


class Scripted:
    """In the place of a model and of a head, which holds the even tokens."""

    def holds(self, token: int) -> bool:
        return token % 2 == 0

    def hear(self, tokens: object) -> None:
        pass


def test_a_head_that_costs_more_than_it_saves_pauses_longer_each_time_and_one_that_pays_does_not() -> None:
    def used(says: int, is_enough: bool) -> list[bool]:
        """Whether the head was used, over 1,000 proposals of two tokens, 4 4, of which the target makes 4 and what it says."""
        thrift, tokens, result = Thrift(Scripted(), Scripted(), 10.0), [0], []  # type: ignore[arg-type]
        for _ in range(1000):
            result.append(thrift.begins(tokens))
            if result[-1]:
                thrift.drew(4, is_enough=True)
                thrift.drew(4, is_enough)
            tokens += [4, says]
        return result

    assert all(used(4, True))
    assert all(used(6, True))  # the draft's own mistake
    assert all(used(7, False))  # the whole head's
    pauses = [len(run) for run in "".join("x" if is_used else "." for is_used in used(7, True)).split("x") if run]
    assert pauses[:4] == [64, 128, 256, 512]


@pytest.mark.parametrize("verify", ["coupled", "rejection", "block"])
def test_a_decoder_uses_it_where_no_text_hangs_on_it(pair, verify, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(pair.target, pair.draft, gamma=4, verify=verify)
    whole = [decoder.generate("ab", 40, temperature=temperature, seed=5).text for temperature in (0.0, 1.0)]
    assert decoder._head is None  # of a small vocabulary
    decoder._head, decoder._loss = NarrowHead(decoder.draft.weights), 10.0
    passes: list[object] = []
    monkeypatch.setattr(Transformer, "forward_narrowly", counted(Transformer.forward_narrowly, passes))
    assert [decoder.generate("ab", 40, temperature=temperature, seed=5).text for temperature in (0.0, 1.0)] == whole
    assert bool(passes) == (verify == "coupled")


def test_a_short_head_and_one_of_blocks_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model_of(INT8).weights
    assert not heads.may_narrow(weights)
    monkeypatch.setattr(heads, "LEAST_IDS", 416)  # as many as fill 13 strips
    assert heads.may_narrow(weights)
    blocks = replace(weights.matrices["classifier"], kind=KINDS["Q4_0"])
    assert not heads.may_narrow(Weights({**weights.matrices, "classifier": blocks}, weights.vectors))


@pytest.mark.parametrize(("share", "is_used"), [(0.9, True), (0.99, False)])
def test_it_is_used_where_it_is_faster_as_measured(pair, share: float, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, clock, forward = SpeculativeDecoder(pair.target, pair.draft), Clock(), Transformer.forward
    costs = Costs({1: 1.0, 2: 1.0}, 1.0)
    monkeypatch.setattr("specdec.drafting.costs.may_narrow", lambda _: True)
    monkeypatch.setattr("specdec.drafting.costs.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(Transformer, "forward", taking(clock, 1.0, forward))
    monkeypatch.setattr(Transformer, "forward_narrowly", taking(clock, share, Transformer.forward_narrowly))
    head, loss = narrow_head_of(decoder.draft, costs, decoder._vocabulary)
    assert (head is not None) == is_used
    assert costs.draft == pytest.approx(share if is_used else 1.0)
    assert loss == pytest.approx(2.0 / (1 - share) if is_used else 0.0)


class Clock:
    """Seconds, which go on when they are told to."""

    now = 0.0


def taking(clock, seconds, function):
    def call(*args):
        clock.now += seconds
        return function(*args)

    return call


def counted(function, calls):
    def call(*args):
        calls.append(args)
        return function(*args)

    return call
