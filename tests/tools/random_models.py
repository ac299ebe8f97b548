"""Models and passes for the tests: shapes, random weights, and the ways to run them."""

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from specdec.config import Config
from specdec.draft.model import ModelDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Statistics, Step, Text, decode
from specdec.model import transformer
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.quant import FP32, INT8, Kind
from specdec.quant.matrix import Matrix
from specdec.runtime import program, threads
from specdec.runtime.memory import zeros
from specdec.runtime.program import N_ROWS, ROW_WORDS, Runner
from specdec.runtime.simd import Float32
from specdec.runtime.threads import available_threads
from specdec.sampling import Sampler
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS
from tests.tools.checkpoint_files import random_tensors

# dim, hidden, layers, heads, kv heads, vocab, seq_len: GQA, odd sizes, head_dim 8 and 12, more than one panel of positions
CONFIGS = {
    "gqa": Config(64, 172, 2, 8, 4, 512, 96),
    "odd": Config(40, 50, 3, 5, 1, 105, 80),
    "head_dim_12": Config(36, 33, 2, 3, 3, 105, 80),
    "head_dim_48": Config(96, 128, 2, 2, 2, 64, 80, shared_classifier=False),
}
THREADS = [n for n in (1, 2) if n <= available_threads()]


def random_model(
    config: Config, kind: Kind = FP32, n_threads: int = 1, seed: int = 0, scale: float = 0.3, n_positions: int | None = None
) -> Transformer:
    return Transformer(config, LLAMA.pack(config, random_tensors(config, seed, scale), kind), n_threads, n_positions)


def int8_model(config: Config, n_threads: int = 1, kind: Kind = INT8, n_positions: int | None = None) -> Transformer:
    return random_model(config, kind, n_threads, scale=0.1, n_positions=n_positions)


def tokens_for(config: Config, n: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, config.vocab_size, n).tolist()
    return tokens


def run_in_blocks(model: Transformer, tokens: list[int], block: int) -> Float32:
    """All logits, `block` tokens a pass."""
    model.forward([], 0)
    ends = [min(i + block, len(tokens)) for i in range(0, len(tokens), block)]
    return np.concatenate([model.forward(tokens[:end], (end - 1) % block + 1).copy() for end in ends])


def product(matrix: Matrix, out: Float32, x: Float32, adding: bool = False) -> None:
    """out[t] (+)= W x[t], as a program of one row."""
    scratch = zeros(1, len(x), matrix.scratch_words)
    Runner([[matrix.product(out, x[None], scratch, adding=adding)]])(len(x), 0, 0, 1)


def round_to_float32(exact: Fraction) -> Any:
    """The float32 nearest to a fraction: float64 first, corrected where that rounds to a tie."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda c: abs(Fraction(float(c)) - exact))


def begun(n: int) -> FixedLength:
    """A policy whose round, of up to n tokens, has begun."""
    policy = FixedLength(n)
    policy.start(n)
    return policy


END_MARKS = {BOS: "bos", EOS: "eos"}


def tiny_model(seed, vocab=105, seq_len=128, n_positions=None, layers=2, scale=None):
    config = Config(40, 50, layers, 5, 1, vocab, seq_len)
    tensors = random_tensors(config, seed) if scale is None else random_tensors(config, seed, scale)
    return Transformer(config, LLAMA.pack(config, tensors), 1, n_positions)


def continuation(target, draft, sampling, gamma=4, verify="coupled", prompt=(BOS, 7, 9), max_tokens=60):
    """The generated tokens and the statistics."""
    verifier = VERIFIERS[verify](target.config.vocab_size, sampling)
    drafter = ModelDrafter(draft, Sampler(draft.config.vocab_size, sampling), verifier.draft_noise, END_MARKS) if draft else None
    statistics, tokens = Statistics(len(prompt)), []
    for event in decode(target, drafter, verifier, list(prompt), max_tokens, FixedLength(gamma), END_MARKS):
        statistics.add(event)
        tokens += event.tokens if isinstance(event, Step) else []
    return tokens, statistics


def judge(logits, draft, verifier, position, end_marks):
    """What a text of so many tokens goes on with, of which that draft was proposed."""
    text = Text([0] * position, 99, 99, None, verifier, FixedLength(1), end_marks)
    text.draft = draft
    return text.judge(logits)


@contextmanager
def broken_off(model, work="_runner"):
    """Ctrl-C at the end of a model's work, which has written all that it writes; expects that it comes through."""
    *owners, work = work.split(".")
    owner = getattr(model, *owners) if owners else model
    whole = getattr(owner, work)

    def run(*numbers):
        whole(*numbers)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, work, run)
        with pytest.raises(KeyboardInterrupt):
            yield


def in_turn(which: GenericSequence[int]) -> Callable[..., None]:
    """`run_on_threads` of those threads alone, one behind the other."""

    def run(function: int, a: int, b: int, first: int, last: int, n_threads: int) -> None:
        for thread in which:
            ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(function)(a, b, first, last, thread)

    return run


def scattered(seed: int) -> Callable[..., None]:
    """`run_on_threads` that gives each phase to one thread, now this, now that: what one keeps for itself is not the next's."""
    rng = np.random.default_rng(seed)

    def run(function: int, numbers: int, rows: int, first: int, last: int, n_threads: int) -> None:
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(function)
        while first < last:
            end = first + ctypes.c_int64.from_address(rows + 8 * (first * ROW_WORDS + N_ROWS)).value
            call(numbers, rows, first, end, int(rng.integers(n_threads)))
            first = end

    return run


def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has so many, which `in_turn` and `scattered` run one at a time."""
    for module in (transformer, program, threads):
        monkeypatch.setattr(module, "available_threads", lambda: 3)
