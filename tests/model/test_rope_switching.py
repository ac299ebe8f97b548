"""LongRoPE: logits match those of the sequence alone, it is prefilled again once, and the progress is reported."""

import io
from typing import Any

import numpy as np
import pytest

from specdec import Prompt, Sampling, SpeculativeDecoder, Step
from specdec.events import Event, PrefillProgress
from specdec.model.kv_cache import KVCache
from specdec.model.llama import LLAMA
from specdec.model.model import Model, get_token_headroom
from specdec.quant import FP32, INT8
from specdec.tokenizer import Tokenizer
from specdec.ui.plain_views import PlainView
from tests.tools.configs import replace_config
from tests.tools.family_models import FAMILIES, random_tensors
from tests.tools.random_heads import make_head
from tests.tools.random_models import random_tokens

CONFIG = FAMILIES["phi 3"]
N_SHORT = CONFIG.rope.longrope_threshold


def make_model(weight_format: Any = FP32, **changes: Any) -> Model:
    config = replace_config(CONFIG, **changes)
    return Model(config, LLAMA.plan_weights(config, random_tensors(config), weight_format).pack(), 1)


def make_cache() -> KVCache:
    return make_model().new_cache()


class RopeSwitchCounter:
    """Counts how often each KV cache switched to long RoPE factors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[KVCache, int] = {}
        switch = KVCache.switch_rope

        def counted(cache: KVCache, is_long: bool) -> None:
            self.counts[cache] = self.counts.get(cache, 0) + (is_long > cache.has_long_rope)
            switch(cache, is_long)

        monkeypatch.setattr(KVCache, "switch_rope", counted)


def test_logits_do_not_depend_on_tokens() -> None:
    tokens = random_tokens(CONFIG, 40)
    alone = [make_cache().forward(tokens[:n])[0].copy() for n in range(1, 41)]
    cache = make_cache()
    for n, n_logits in (
        (15, 3), (19, 1), (22, 5), (20, 4), (40, 40), (21, 1), (20, 1), (21, 2), (33, 0), (33, 13), (33, 14), (4, 2),
    ):  # fmt: skip
        got = cache.forward(tokens[:n], n_logits)
        np.testing.assert_array_equal(got, np.array(alone[n - n_logits : n]).reshape(got.shape), str((n, n_logits)))
    cache = make_cache()
    cache.forward(tokens[:-1], 0, len(tokens))
    n_left = [cache.count_prefill_tokens(each) for each in (tokens, tokens[:N_SHORT])]
    assert (cache.n_tokens, n_left) == (39, [0, N_SHORT - 1])
    np.testing.assert_array_equal(cache.forward(tokens)[0], alone[-1])


def test_batched_sequences_switch_rope_separately() -> None:
    sequences = [random_tokens(CONFIG, n, seed=n) for n in (N_SHORT - 2, N_SHORT, N_SHORT + 9)]
    alone = [make_cache().forward(sequence, 2).copy() for sequence in sequences]
    model = make_model()
    caches = [model.new_cache() for _ in sequences]
    for cache, sequence in zip(caches, sequences, strict=True):
        cache.forward(sequence[:-2], 0, len(sequence))
        assert cache.count_uncached_tokens(sequence, 2) == 2
    batched = model.forward([(cache, sequence, 2) for cache, sequence in zip(caches, sequences, strict=True)])
    np.testing.assert_array_equal(np.array(batched), np.array(alone))
    assert caches[1].count_uncached_tokens([*sequences[1], 5], 1) == N_SHORT + 1
    with pytest.raises(ValueError, match="gets longer than 20 tokens"):
        model.forward([(caches[1], [*sequences[1], 5], 2), (caches[0], [*sequences[0], 5], 1)])


def test_prompt_is_prefilled_once_with_final_rope_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    switches, cache = RopeSwitchCounter(monkeypatch), make_cache()
    for n in (N_SHORT - 1, N_SHORT, N_SHORT + 1, 40):
        for end in (10, n - 1):
            cache.forward(random_tokens(CONFIG, n, seed=n)[:end], 0, n)
        assert (cache.n_tokens, cache.has_long_rope) == (n - 1, n > N_SHORT)
    assert switches.counts == {cache: 1}


def test_token_headroom_ends_at_longrope_threshold() -> None:
    assert [get_token_headroom(n, 100, 20) for n in (1, 19, 20, 21, 99)] == [19, 1, 0, 79, 1]
    assert get_token_headroom(30, 100, 0) == 70


DRAFTS: list[tuple[Any, dict[str, Any]]] = [
    ("lookup", {"gamma": 4}),
    ("self", {"gamma": 4}),
    ("self", {}),
    ("lookup", {}),
    ("model", {"gamma": 5}),
    ("model", {"gamma": 3, "tree": "on"}),
    ("model", {"stage": "lookup", "gamma": 4}),
    ("shorter", {"gamma": 4}),
    ("plain", {"gamma": 4}),
]


def make_draft(name: str, size: int) -> Any:
    others: dict[str, Any] = {"shorter": {"longrope_threshold": 13}, "plain": {"longrope_threshold": 0, "long_freq_factors": ()}}
    return name if name in ("lookup", "self") else make_model(INT8, vocab_size=size, **others.get(name, {}))


@pytest.mark.parametrize(("draft", "settings"), DRAFTS, ids=str)
def test_drafted_output_equals_plain_output_with_one_rerun_per_model(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, draft: str, settings: dict[str, Any]
) -> None:
    size = tokenizer.vocab_size
    for temperature, seed in ((0.0, 0), (1.0, 3)):
        target = make_model(vocab_size=size)
        plain = SpeculativeDecoder(target, None, tokenizer).generate([1, 7, 9], 40, temperature=temperature, seed=seed)
        assert len(plain.tokens) > 2 * N_SHORT - 3, "the output ends before it is long"
        decoder = SpeculativeDecoder(make_model(vocab_size=size), make_draft(draft, size), tokenizer, **settings)
        decoder.warm_up()
        switches = RopeSwitchCounter(monkeypatch)
        assert decoder.generate([1, 7, 9], 40, temperature=temperature, seed=seed).tokens == plain.tokens
        assert switches.counts and set(switches.counts.values()) <= {0, 1}


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_sampled_output_does_not_depend_on_previous_sequence(tokenizer: Tokenizer, verify: Any) -> None:
    size, sampling = tokenizer.vocab_size, {"temperature": 1.0, "seed": 5}
    decoder = SpeculativeDecoder(make_model(vocab_size=size), make_draft("model", size), tokenizer, gamma=4, verify=verify)
    first = decoder.generate([1, 7, 9], 40, **sampling).tokens
    decoder.generate([1, 8, 4], 40, **sampling)
    assert decoder.generate([1, 7, 9], 40, **sampling).tokens == first


def test_head_proposals_do_not_depend_on_when_sequence_got_long() -> None:
    tokens, logits = random_tokens(CONFIG, 300), []  # the head's buffers grow after the switch
    for starts in ((300,), (10, 18, 30, 300)):
        head = make_head(make_model())
        target_cache = head.target.new_cache(head.target_layers)
        head_cache = head.new_draft_cache(target_cache)
        for n in starts:
            target_cache.forward(tokens[: n - 1], 0)
            got = head_cache.forward(tokens[:n])[0].copy()
        logits.append(got)
    np.testing.assert_array_equal(*logits)


def test_second_prefill_reports_progress(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(make_model(vocab_size=tokenizer.vocab_size), None, tokenizer)
    decoder.warm_up()
    plain = decoder.generate([1, 7, 9], 40, temperature=0.0).tokens
    clock = [0.0]
    forward = Model.forward

    def slow(model: Model, batch: Any) -> Any:
        clock[0] += 100.0 * (batch[0][2] == 0)
        return forward(model, batch)

    monkeypatch.setattr(Model, "forward", slow)
    monkeypatch.setattr("specdec.engine.sequence.time.perf_counter", lambda: clock[0])
    events = [*decoder.read_and_stream([1, 7, 9], 40, Sampling(temperature=0.0))]
    types = [type(event) for event in events]
    first = next(i for i, type_ in enumerate(types) if type_ is PrefillProgress and Step in types[:i])
    tokens = [token for event in events[:first] if isinstance(event, Step) for token in event.tokens]
    progress = [event for event in events[first:] if isinstance(event, PrefillProgress)]
    assert [1, 7, 9, *tokens] == progress[0].tokens and len(progress[0].tokens) == N_SHORT + 1
    assert (progress[0].fraction, progress[-1].fraction) == (0.0, 1.0)
    steps = [event for event in events if isinstance(event, Step)]
    assert [token for step in steps for token in step.tokens] == plain
    assert [step.seconds > 0 for step in steps].count(True) == 1 and events[
        first + len(progress)
    ] in steps  # it counts to the next step


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "expected"), [(Terminal(), "a\nb\n"), (io.StringIO(), "ab\n")])
def test_prefill_progress_starts_a_new_line_on_a_terminal(out: io.StringIO, expected: str) -> None:
    events: list[Event | PrefillProgress] = [
        PrefillProgress([1], 0.0), Prompt([1], 0.0, ""), Step([5], [], 0, 0.1, 0.0, pieces=["a"]), PrefillProgress([1, 5], 0.0),
        PrefillProgress([1, 5], 1.0), Step([6], [], 0, 0.1, 0.0, pieces=["b"]),
    ]  # fmt: skip
    with PlainView(out) as view:
        for event in events:
            view.show(event)
    assert out.getvalue() == expected
