"""Prefill chunks of the scheduler: a pass is short enough to read keyboard input between two of them."""

import pytest

from specdec import SpeculativeDecoder
from specdec.engine.autotuner import FIRST_PREFILL_TOKENS, MIN_PREFILL_TOKENS
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.model import Model
from specdec.tokenizer import Tokenizer
from tests.tools.random_models import random_tokens, tiny_model


@pytest.mark.parametrize(
    ("seconds_per_token", "n_expected"),
    [(1e-6, MAX_BATCH_TOKENS), (0.25 / FIRST_PREFILL_TOKENS, FIRST_PREFILL_TOKENS), (1.0, MIN_PREFILL_TOKENS)],
)
def test_prefill_chunks_are_short_for_a_slow_model(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, seconds_per_token: float, n_expected: int
) -> None:
    model = tiny_model(0, vocab=tokenizer.vocab_size, seq_len=600)
    decoder, clock, n_run = SpeculativeDecoder(model, None, tokenizer), [0.0], list[int]()
    decoder.warm_up()
    forward = Model.forward

    def run_slowly(model: Model, batch: list) -> list:
        n_run.append(sum(cache.count_uncached_tokens(tokens, n_logits) for cache, tokens, n_logits, *_ in batch))
        clock[0] += seconds_per_token * n_run[-1]
        return forward(model, batch)

    monkeypatch.setattr(Model, "forward", run_slowly)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    fractions = [*decoder.read(random_tokens(model.config, 500))]
    assert n_run[-2] == n_expected and sum(n_run) == 499 and max(n_run) <= MAX_BATCH_TOKENS
    assert (fractions[0], fractions[-1], len(fractions)) == (0.0, 1.0, len(n_run) + 1) and fractions == sorted(fractions)
    assert not [*decoder.read(random_tokens(model.config, 500))], "the KV cache holds the prompt"
