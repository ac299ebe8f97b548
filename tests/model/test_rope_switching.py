"""Families that turn all of a long text otherwise: its logits are those of the text alone, and it is run anew once, and told."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specdec import Prompt, Sampling, SpeculativeDecoder, Step
from specdec.draft.resolver import Team
from specdec.engine.decoding import Event, Prefill
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer, room_behind
from specdec.quant import FP32, INT8
from specdec.tokenizer import Tokenizer
from specdec.ui.output import PlainView
from tests.model.test_architectures import FAMILIES, random_tensors
from tests.tools.configs import changed
from tests.tools.random_heads import head_of
from tests.tools.random_models import tokens_for

CONFIG = FAMILIES["phi 3"]
N_SHORT = CONFIG.rope.n_short


def model_of(kind: Any = FP32, **numbers: Any) -> Transformer:
    config = changed(CONFIG, **numbers)
    return Transformer(config, LLAMA.pack(config, random_tensors(config), kind), 1)


class Turns:
    """How often each model was told to run texts as long ones, by its id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, int] = {}
        switch = Transformer._switch

        def counted(model: Transformer, is_long: bool) -> None:
            self.of[id(model)] = self.of.get(id(model), 0) + (is_long > model.is_long)
            switch(model, is_long)

        monkeypatch.setattr(Transformer, "_switch", counted)


def test_logits_are_those_of_the_text_whatever_the_cache_holds_bit_for_bit() -> None:
    tokens = tokens_for(CONFIG, 40)
    alone = [model_of().forward(tokens[:n])[0].copy() for n in range(1, 41)]
    model = model_of()
    for n, n_logits in (
        (15, 3),
        (19, 1),
        (22, 5),
        (20, 4),
        (40, 40),
        (21, 1),
        (20, 1),
        (21, 2),
        (33, 0),
        (33, 13),
        (33, 14),
        (4, 2),
    ):
        got = model.forward(tokens[:n], n_logits)
        np.testing.assert_array_equal(got, np.array(alone[n - n_logits : n]).reshape(got.shape), str((n, n_logits)))
    model = model_of()
    assert [*model.read(tokens)][-1] == 0
    assert (model.n_held, model.unread(tokens), model.unread(tokens[:N_SHORT])) == (39, 0, N_SHORT - 1)
    np.testing.assert_array_equal(model.forward(tokens)[0], alone[-1])


def test_texts_that_share_passes_are_long_or_short_each_by_itself() -> None:
    texts = [tokens_for(CONFIG, n, seed=n) for n in (N_SHORT - 2, N_SHORT, N_SHORT + 9)]
    alone = [model_of().forward(text, 2).copy() for text in texts]
    model = model_of()
    seats = [model.seat() for _ in texts]
    for seat, text in zip(seats, texts, strict=True):
        [*seat.read(text[:-1])]
        assert seat.n_to_run(text, 2) == 2
    together = Transformer.forward_together([(seat, text, 2) for seat, text in zip(seats, texts, strict=True)])
    np.testing.assert_array_equal(np.array(together), np.array(alone))
    assert seats[1].n_to_run([*texts[1], 5], 1) == N_SHORT + 1
    with pytest.raises(ValueError, match="gets longer than 20 tokens"):
        Transformer.forward_together([(seats[1], [*texts[1], 5], 2), (seats[0], [*texts[0], 5], 1)])


def test_a_prompt_is_read_once_as_what_it_is_going_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, model = Turns(monkeypatch), model_of()
    for n in (N_SHORT - 1, N_SHORT, N_SHORT + 1, 40):
        [*model.read(tokens_for(CONFIG, n, seed=n))]
        assert (model.n_held, model.is_long) == (n - 1, n > N_SHORT)
    assert turns.of == {id(model): 1}


def test_room_behind_a_text_ends_with_the_short_ones() -> None:
    assert [room_behind(n, 100, 20) for n in (1, 19, 20, 21, 99)] == [19, 1, 0, 79, 1]
    assert room_behind(30, 100, 0) == 70


DRAFTS: list[tuple[Any, dict[str, Any]]] = [
    ("ngram", {"gamma": 4}),
    ("self", {"gamma": 4}),
    ("self", {}),
    ("ngram", {}),
    ("model", {"gamma": 5}),
    ("model", {"gamma": 3, "tree": "on"}),
    ("model", {"stage": "ngram", "gamma": 4}),
    ("shorter", {"gamma": 4}),
    ("plain", {"gamma": 4}),
]


def draft_of(name: str, size: int) -> Any:
    others: dict[str, Any] = {"shorter": {"n_short": 13}, "plain": {"n_short": 0, "long_divisors": ()}}
    return name if name in ("ngram", "self") else model_of(INT8, vocab_size=size, **others.get(name, {}))


@pytest.mark.parametrize(("draft", "settings"), DRAFTS, ids=str)
def test_texts_with_a_draft_are_the_plain_ones_and_each_model_reads_anew_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, draft: str, settings: dict[str, Any]
) -> None:
    size = tokenizer.vocab_size
    for temperature, seed in ((0.0, 0), (1.0, 3)):
        target = model_of(vocab_size=size)
        plain = SpeculativeDecoder(target, None, tokenizer).generate([1, 7, 9], 40, temperature=temperature, seed=seed)
        assert len(plain.tokens) > 2 * N_SHORT - 3, "the text ends before it is long"
        decoder = SpeculativeDecoder(model_of(vocab_size=size), draft_of(draft, size), tokenizer, **settings)
        decoder.warm_up()
        turns = Turns(monkeypatch)
        assert decoder.generate([1, 7, 9], 40, temperature=temperature, seed=seed).tokens == plain.tokens
        assert turns.of and set(turns.of.values()) <= {0, 1}


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_a_draw_is_the_same_behind_whatever_text_was_there_before(tokenizer: Tokenizer, verify: Any) -> None:
    size, sampling = tokenizer.vocab_size, {"temperature": 1.0, "seed": 5}
    decoder = SpeculativeDecoder(model_of(vocab_size=size), draft_of("model", size), tokenizer, gamma=4, verify=verify)
    first = decoder.generate([1, 7, 9], 40, **sampling).tokens
    decoder.generate([1, 8, 4], 40, **sampling)
    assert decoder.generate([1, 7, 9], 40, **sampling).tokens == first


def test_what_a_head_proposes_behind_a_long_text_does_not_depend_on_when_it_got_long() -> None:
    tokens, logits = tokens_for(CONFIG, 300), []  # the head's buffers grow behind the turn
    for starts in ((300,), (10, 18, 30, 300)):
        target = model_of()
        head = head_of(target)
        for n in starts:
            target.forward(tokens[: n - 1], 0)
            got = head.forward(tokens[:n])[0].copy()
        logits.append(got)
    np.testing.assert_array_equal(*logits)


def test_a_text_that_is_read_anew_tells_how_far_it_is(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(model_of(vocab_size=tokenizer.vocab_size), None, tokenizer)
    decoder.warm_up()
    plain = decoder.generate([1, 7, 9], 40, temperature=0.0).tokens
    clock = [0.0]
    read = Team.read

    def slow(team: Team, tokens: list[int]) -> Iterator[float]:
        for share in read(team, tokens):
            clock[0] += 100.0
            yield share

    monkeypatch.setattr(Team, "read", slow)
    monkeypatch.setattr("specdec.engine.decoding.time.perf_counter", lambda: clock[0])
    events = [*decoder.read_and_stream([1, 7, 9], 40, Sampling(temperature=0.0))]
    kinds = [type(event) for event in events]
    at = next(i for i, kind in enumerate(kinds) if kind is Prefill and Step in kinds[:i])
    tokens = [token for event in events[:at] if isinstance(event, Step) for token in event.tokens]
    told = [event for event in events[at:] if isinstance(event, Prefill)]
    assert [1, 7, 9, *tokens] == told[0].tokens and len(told[0].tokens) == N_SHORT + 1
    assert (told[0].share, told[-1].share) == (0.0, 1.0)
    steps = [event for event in events if isinstance(event, Step)]
    assert [token for step in steps for token in step.tokens] == plain
    assert [step.seconds > 0 for step in steps].count(True) == 1 and events[at + len(told)] in steps  # the reading is the next's


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "expected"), [(Terminal(), "a\nb\n"), (io.StringIO(), "ab\n")])
def test_the_line_of_a_reading_gets_a_row_of_its_own_on_a_terminal(out: io.StringIO, expected: str) -> None:
    events: list[Event | Prefill] = [
        Prefill([1], 0.0), Prompt([1], 0.0, ""), Step([5], [], 0, 0.1, 0.0, pieces=["a"]), Prefill([1, 5], 0.0),
        Prefill([1, 5], 1.0), Step([6], [], 0, 0.1, 0.0, pieces=["b"]),
    ]  # fmt: skip
    with PlainView(out) as view:
        for event in events:
            view.show(event)
    assert out.getvalue() == expected
