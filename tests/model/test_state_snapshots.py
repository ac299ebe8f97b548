"""Snapshots of running states: a text that goes back goes on from the nearest one, with the bits of one that never did."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specdec.loaders import load_checkpoint
from specdec.model import state_snapshots
from specdec.model.registry import architecture_of
from specdec.model.state_snapshots import BEFORE_END, LEAST, MOST, Snapshot, Snapshots
from specdec.model.transformer import Transformer
from specdec.quant import INT8
from tests.tools.hf_folders import FIXTURES
from tests.tools.random_models import THREADS, broken_off, tokens_for

NAMES = ("lfm2", "lfm2_odd", "qwen35", "qwen35_odd")


@cache
def weights_of(name, kind=None):
    checkpoint = load_checkpoint(FIXTURES / name)
    return replace(checkpoint.config, seq_len=3000), architecture_of(checkpoint.config).pack(
        checkpoint.config, checkpoint.tensors, kind
    )


@pytest.fixture(params=NAMES)
def model(request):
    return model_of(request.param)


def model_of(name, n_threads=1, kind=None):
    return Transformer(*weights_of(name, kind), n_threads)


def like(model):
    return Transformer(model.config, model.weights, 1)


def read(model, tokens):
    n = model.unread(tokens)
    assert [*model.read(tokens)][-1:] in ([], [0]) and model.unread(tokens) == 0
    return n


def test_a_talk_whose_thoughts_are_dropped_reads_little_more_than_is_new(model):
    """Twenty turns: behind each answer the next prompt begins anew where the thought began, or a few words before."""
    rng, fresh = np.random.default_rng(1), like(model)
    draw = lambda n: rng.integers(0, model.config.vocab_size, n).tolist()  # noqa: E731
    prompt, n_read, n_new = draw(90), 0, 0
    n_read += read(model, prompt)
    n_new += len(prompt) - 1
    for turn in range(20):
        logits = model.forward(prompt, 1)
        if turn % 5 == 0:
            fresh.forward(prompt[:1])
            np.testing.assert_array_equal(logits.copy(), fresh.forward(prompt, 1))
        thought = [*prompt, *draw(120)]
        for n in range(len(prompt) + 1, len(thought), 7):
            model.forward(thought[:n], 1)
        new = draw(130)  # the answer without its thought, and a question
        prompt = [*prompt[: len(prompt) - int(rng.integers(0, 8))], *new]
        n_read += read(model, prompt)
        n_new += len(new)
    assert n_read < 1.2 * n_new, (n_read, n_new)


@pytest.mark.parametrize("kind", [None, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_behind_a_snapshot_are_those_of_a_text_that_never_went_back(name, kind):
    rng, config = np.random.default_rng(2), weights_of(name)[0]
    models = [model_of(name, n_threads, kind) for n_threads in THREADS]
    text, n_saved = tokens_for(config, 1500), 0
    for model in models:
        read(model, text)
    for n in (1400, 1100, 1490, 700, 30, 1300, 513, 1480):
        other = [*text[:n], *rng.integers(0, config.vocab_size, 120).tolist()]
        fresh = model_of(name, 1, kind)
        expected = fresh.forward(other, 30)
        for model in models:
            unread = model.unread(other)
            n_saved += len(other) - 1 - unread > 0
            with broken_off(model):
                model.forward(other)
            read(model, other)
            np.testing.assert_array_equal(model.forward(other, 30), expected)
            read(model, text)
    assert n_saved > 3 * len(models)


def test_another_seat_takes_over_what_a_snapshot_holds(model):
    tokens = tokens_for(model.config, 900)
    read(model, tokens)
    model.forward([*tokens, 5, 6, 7], 3)
    model.read([*tokens, *tokens[:300]])
    for n in (880, 700, 600):
        other = [*tokens[:n], *tokens[::-1]][: n + 200]
        seat = model.seat()
        seat.take_over(model, other)
        assert 512 <= seat.n_held <= n and model.unread(other) == len(other) - 1 - seat.n_held
        logits = seat.forward(other, 20).copy()
        np.testing.assert_array_equal(logits, like(model).forward(other, 20))
        again = [*other[: len(other) - 150], 1, 2, 3]
        np.testing.assert_array_equal(seat.forward(again, 2).copy(), like(model).forward(again, 2))


def test_prompts_that_share_passes_keep_theirs_too(model):
    one, two = tokens_for(model.config, 700), tokens_for(model.config, 690)[::-1]
    seats = [model.seat(), model.seat()]
    for n in range(20, 640, 20):
        Transformer.forward_together([(seats[0], one[:n], 0, 700), (seats[1], two[:n], 0, 690)])
    for seat, tokens in zip(seats, (one, two), strict=True):
        other = [*tokens[:600], 9, 9, 9]
        assert seat.unread(other) <= 95
        np.testing.assert_array_equal(seat.forward(other, 2).copy(), like(model).forward(other, 2))


def test_a_model_without_a_state_takes_none():
    from tests.tools.random_models import CONFIGS as PLAIN
    from tests.tools.random_models import random_model

    model = random_model(PLAIN["gqa"])
    tokens = tokens_for(model.config, 90)
    assert read(model, tokens) == 89 and model.n_to_stop([*tokens, 1]) == 1 and not [*model._snapshots]


def test_there_are_at_most_so_many_the_newest_and_the_farthest_apart(monkeypatch):
    rows, kept = np.zeros((1, 2, 16), np.float32), Snapshots()
    for n in range(1, 1000):
        kept.add(Snapshot(n * 10, rows, None))
    lengths = [each.n for each in kept]
    assert len(lengths) == MOST and lengths[-1] == 9990 and lengths == sorted(lengths)
    gaps = np.diff([0, *lengths])
    assert gaps.max() < 4 * 9990 / MOST
    monkeypatch.setattr(state_snapshots, "MOST_BYTES", 1)
    kept.add(Snapshot(10_000, rows, None))
    assert len([*kept]) == LEAST and kept.best(10_000) == 10_000 and kept.best(5) == 0
    kept.forget(9_999)
    assert 10_000 not in [each.n for each in kept]


def test_room_for_a_text_counts_its_snapshots(model):
    plain = sum(
        buffer.n_bytes
        for buffer in architecture_of(model.config).all_buffers(model.config, model.weights, model._room(1024, 0)).values()
        if buffer.is_own
    )
    read(model, tokens_for(model.config, 2900))
    held = sum(each.n_bytes for each in model._snapshots)
    assert 0 < held <= model.text_bytes(1024 - 64, True) - plain
    assert BEFORE_END < 64
