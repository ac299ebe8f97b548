"""Texts that share passes, of every family and kind of weights: logits are those that each would get alone, bit for bit."""

import numpy as np
import pytest

from specdec.kernels import MAX_TOKENS
from specdec.model.transformer import Transformer
from tests.tools.golden import KINDS, weights_of
from tests.tools.hf_folders import CONFIGS
from tests.tools.random_models import THREADS, tokens_for

CASES = [(model, [*KINDS][i % len(KINDS)], ("f32", "f16")[i // 2 % 2]) for i, model in enumerate(CONFIGS)]
CASES += [("gpt2", "fp32", "f32"), ("gpt2", "int8", "f16"), ("llama3", "packed bf16", "f16"), ("qwen3", "bf16", "f32")]


def share_passes(first: Transformer, alone: Transformer, n_texts: int, rng: np.random.Generator) -> int:
    """Steps with proposals of any length of which some stand, beside pieces of prompts; how many passes."""
    n_positions = min(first.n_short or first.n_positions, 90)
    texts = [tokens_for(first.config, int(rng.integers(2, n_positions)), i) for i in range(n_texts)]
    seats, at, n_passes = [first, *(first.seat() for _ in texts[1:])], [0] * n_texts, 0
    while any(n < len(text) for n, text in zip(at, texts, strict=True)):
        room, jobs = MAX_TOKENS, []
        for i in rng.permutation(n_texts):
            left = len(texts[i]) - at[i]
            n = min(int(rng.choice([1, 2, 4, 20])), left, room)
            if n:
                end = at[i] + n
                jobs.append((i, texts[i][:end], int(rng.choice([0, 1, n]))))
                at[i], room = end - (int(rng.integers(0, n)) if left > n else 0), room - n
        together = Transformer.forward_together([(seats[i], tokens, n_logits) for i, tokens, n_logits in jobs])
        n_passes += 1
        for (_, tokens, n_logits), logits in zip(jobs, together, strict=True):
            alone.forward([], 0)
            np.testing.assert_array_equal(logits.view(np.int32), alone.forward(tokens, n_logits).view(np.int32))
    return n_passes


@pytest.mark.parametrize(("model", "kind", "kv"), CASES)
def test_eight_texts_that_share_passes_get_the_logits_that_each_gets_alone(model: str, kind: str, kv) -> None:
    config, weights = weights_of(model, kind)
    for n_threads in THREADS:
        first, alone = Transformer(config, weights, n_threads, kv=kv), Transformer(config, weights, 1, kv=kv)
        assert share_passes(first, alone, 8, np.random.default_rng(n_threads)) > 5


@pytest.mark.parametrize("n_texts", [5, pytest.param(12, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(("model", "kind", "kv"), CASES)
def test_what_one_text_has_read_goes_over_to_another_that_begins_alike(model: str, kind: str, kv, n_texts: int) -> None:
    """Of any length, back and forth; both go on by themselves. A running state goes over as far back as it can be had."""
    config, weights = weights_of(model, kind)
    first, alone = (Transformer(config, weights, 1, kv=kv, hidden_layers=layers) for layers in ((1,), ()))
    second, rng, n_taken = first.seat(), np.random.default_rng(3), 0
    for i in range(n_texts):
        text = tokens_for(config, int(rng.integers(12, first.n_positions - 5)), i)
        first.forward(text, int(rng.integers(0, 6)))
        if first.runs_trees:
            first.forward_tree(text, [5, 6], [-1, 0])
        n = int(rng.integers(max(1, len(text) - rng.choice([9, 80])), len(text) + 1))
        other = text[:n] + tokens_for(config, 4, 50 + i)
        n_known = len(other) - 1 - first.unread(other)
        second.take_over(first, other)
        assert second.n_held == n_known and (n_known == 0 or n_known >= n)
        n_taken += bool(n_known)
        for seat, tokens in ((second, other), (first, [*text, 7]), (second, [*other, 8])):
            alone.forward([], 0)
            np.testing.assert_array_equal(seat.forward(tokens, 2).view(np.int32), alone.forward(tokens, 2).view(np.int32))
            own = Transformer(config, weights, 1, kv=kv, hidden_layers=(1,))
            own.forward(tokens)
            np.testing.assert_array_equal(seat.hidden(tokens, 0), own.hidden(tokens, 0))
        first, second = second, first
    assert n_taken > n_texts // 4


def test_a_text_goes_over_to_a_model_that_keeps_the_same_alone() -> None:
    config, weights = weights_of("llama3", "fp32")
    model, again = Transformer(config, weights, 1, kv="f32"), weights_of("llama3", "fp32")[1]
    others = [Transformer(config, weights, 1, kv="f16"), Transformer(config, weights, 1, kv="f32", hidden_layers=(0,))]
    for other in [*others, Transformer(config, again, 1, kv="f32")]:
        with pytest.raises(ValueError, match="same weights that keeps the same"):
            other.take_over(model, [1, 2])
    text = tokens_for(config, 30)
    expected = model.forward(text, 3).copy()
    for other in (model, model.with_positions(40)):
        other.take_over(model, text)
        assert other.n_held == 29
        np.testing.assert_array_equal(other.forward(text, 3), expected)
