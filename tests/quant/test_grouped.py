"""Weights in groups: GGUF's block types and our own int4: their numbers, their products, and the promises about bits."""

import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft import self_copy as quantizing
from specdec.draft.self_copy import kinds_to_make
from specdec.loaders.gguf_blocks import dequantized
from specdec.loaders.model_lookup import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.quant import FP32, INT4, INT8, kind_for
from specdec.quant.gguf_blocks import KINDS, TYPES
from specdec.quant.grouped import group_tile
from specdec.quant.int4 import quantize
from specdec.quant.int8 import DOT4, quantized
from specdec.quant.matmul import product_by
from specdec.quant.matrix import pack
from specdec.runtime.memory import zeros
from specdec.runtime.program import Operation, Runner
from specdec.runtime.tile import STRIP_ROWS
from tests.quant.test_int8 import RUNS_HERE
from tests.tools import reference
from tests.tools.checkpoint_files import random_tensors
from tests.tools.random_models import CONFIGS, THREADS, random_model, round_to_float32, run_in_blocks, tokens_for

N, ROWS = 512, 70
MIXES = {
    ("Q4_K", "Q6_K", "Q5_K"): "mixed K",
    ("Q4_0", "Q5_0", "Q8_0"): "Q8_0",
    ("Q5_1", "Q8_0", "Q4_0"): "mixed",
    ("Q6_K", "Q8_0"): "fp32",
    ("Q4_0", "Q5_0"): "Q5_0",
    ("Q5_0", "Q4_1", "Q4_0"): "Q5_1",
    ("Q4_1", "Q4_0"): "Q4_1",
    ("MXFP4", "Q8_0"): "fp32",
    ("Q2_K", "Q6_K", "Q3_K"): "mixed K",
    ("IQ4_XS", "Q6_K"): "fp32",
}


class Given:
    """A matrix of a block type, as a reader gives it: random codes, scales of up to a hundredth, some of them tiny or 0."""

    def __init__(self, type_: str, rows: int, n: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.type, self.shape = type_, (rows, n)
        size = TYPES[type_].n_bytes
        octets = rng.integers(0, 256, (rows, n // TYPES[type_].form.columns, size), np.uint8)
        numbers = (rng.random((*octets.shape[:2], 2)) * 0.01).astype(np.float16)
        numbers[0, 0], numbers[1, 0], numbers[2, 0] = 0, 6e-8, -0.01
        at = slice(size - 2, size) if type_ in ("Q6_K", "Q3_K") else slice(0, 4 if TYPES[type_].form.has_minima else 2)
        at = slice(size - 4, size) if type_ == "Q2_K" else at
        octets[:, :, at] = numbers.view(np.uint8)[:, :, : at.stop - at.start]
        if type_ == "MXFP4":
            octets[:, :, 0] = rng.integers(104, 124, octets.shape[:2])
            octets[0, 0] = 0
        self.octets = octets.reshape(rows, -1)

    def blocks(self, first: int, last: int) -> np.ndarray:
        return self.octets[first:last]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return dequantized(self.type, self.octets[rows])


def given(type_: str, seed: int) -> np.ndarray | Given:
    if type_:
        return Given(type_, ROWS, N, seed)
    return np.random.default_rng(seed).standard_normal((ROWS, N)).astype(np.float32)


def multiplied(matrix, x, n_tokens, n_threads=1):
    out = zeros(len(x), matrix.n_rows)
    scratch = zeros(n_threads, len(x), matrix.scratch_words)
    Runner([[matrix.product(out, x[None], scratch)]])(n_tokens, 0, 0, n_threads)
    return out[:n_tokens]


def activations(n_tokens: int, n: int = N) -> np.ndarray:
    x = zeros(n_tokens, n)
    x[:] = np.random.default_rng(5).standard_normal(x.shape)
    return x


@pytest.mark.parametrize("types", [*((name,) for name in TYPES), *MIXES], ids="+".join)
def test_block_types_keep_their_numbers_and_multiply_as_floats_do(types):
    """Bit for bit but where types mix in one that has minima, which adds a rounding; products: what int8 activations cost."""
    tensors = [given(name, i) for i, name in enumerate(types)]
    kind = kind_for(tensors)
    assert kind.name == MIXES.get(types, types[0])
    mixes_in_minima = len({TYPES[name].form.has_minima for name in types}) > 1
    matrix = pack(tensors, kind)
    stored = kind.rows(matrix.strips, N, matrix.group)
    expected = np.zeros_like(stored)
    for i, tensor in enumerate(tensors):
        first = i * -(-ROWS // STRIP_ROWS) * STRIP_ROWS
        expected[first : first + ROWS] = tensor[0:ROWS]
    np.testing.assert_allclose(stored, expected, rtol=0, atol=1e-6 if mixes_in_minima else 0)
    x = activations(9)
    floats = x.astype(np.float64) @ expected.astype(np.float64).T
    assert np.abs(multiplied(matrix, x, 9) - floats).max() < 0.01 * np.abs(floats).max()
    tokens = np.array([3, 69, 31, 1, 0])
    rows = zeros(5, N)
    Runner([[matrix.embedding(rows, tokens)]])(5, 0, 0, 1)
    np.testing.assert_array_equal(rows, stored[tokens])


@pytest.mark.parametrize("name", TYPES)
def test_a_type_takes_no_more_memory_than_its_file_but_for_a_k_types_factors(name):
    n_bytes, form, *_ = TYPES[name]
    taken = 4 * form.block_words / STRIP_ROWS
    # factors of 4 and 6 bits lie in bytes, exponents in fp16, codes of 2 and 3 bits in 4
    more = {"Q4_K": 1.03, "Q5_K": 1.03, "IQ4_XS": 1.03, "MXFP4": 18 / 17, "Q3_K": 1.33, "Q2_K": 1.96}
    assert taken <= more.get(name, 1) * n_bytes


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q4_K", "Q6_K", "MXFP4", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"])
def test_a_product_is_exact_in_a_group_and_one_chain_over_the_groups(name):
    """Against exact arithmetic rounded after every step of the chain."""
    form, tensor = TYPES[name].form, Given(name, ROWS, N)
    x = activations(9)
    out = multiplied(pack([tensor], KINDS[name]), x, 9)
    scales, minima, codes = by_group(name, tensor)
    for t, r in ((0, 0), (1, 3), (3, 35), (8, 69)):
        acc = np.float32(0)
        x_codes, x_scales = reference.quantized_activations(x[t], form.group)
        for g, x_scale in enumerate(x_scales):
            of_group = x_codes.reshape(-1, form.group)[g]
            total = Fraction(int(codes[r, g] @ of_group)) * Fraction(float(scales[r, g] * np.float32(x_scale)))
            acc = round_to_float32(total + Fraction(float(acc)))
            if form.has_minima:
                x_sum = np.float32(of_group.sum()) * np.float32(x_scale)
                acc = round_to_float32(Fraction(float(minima[r, g])) * Fraction(float(x_sum)) + Fraction(float(acc)))
        assert out[t, r] == acc


def by_group(name, tensor):
    """Scales and minima (rows, groups), codes (rows, groups, group): out of weights that are a * scale + minimum of known a."""
    form = TYPES[name].form
    weights = tensor[0:ROWS].reshape(ROWS, -1, form.group)
    matrix = pack([tensor], KINDS[name])
    blocks = matrix.strips.reshape(len(matrix.strips), -1, form.block_words)
    numbers = blocks[..., : form.factors_at].view(np.float16).astype(np.float32)
    numbers = numbers.reshape(*blocks.shape[:2], form.n_levels, 1, STRIP_ROWS)
    if form.n_groups > 1:
        factors = blocks[..., form.factors_at : form.codes_at].view(np.int8)
        numbers = numbers * factors.reshape(*blocks.shape[:2], form.n_levels, form.n_groups, STRIP_ROWS)
    levels = [numbers[:, :, i].transpose(0, 3, 1, 2).reshape(-1, weights.shape[1])[:ROWS] for i in range(form.n_levels)]
    scales, minima = levels[0], levels[1] if form.has_minima else np.zeros_like(levels[0])
    divisor = np.where(scales == 0, 1, scales)[..., None].astype(np.float64)
    return scales, minima, np.rint((weights - minima[..., None].astype(np.float64)) / divisor).astype(int)


def kind_with(name, path):
    return replace(KINDS[name], product=Operation(product_by(*group_tile(TYPES[name].form, path), quantized), kept=False))


@pytest.mark.parametrize("name", [*TYPES, "int4"])
def test_products_do_not_depend_on_the_batch_or_the_threads_bit_for_bit(name):
    matrix = pack([given("", 0)], INT4) if name == "int4" else pack([Given(name, ROWS, N)], KINDS[name])
    x = activations(64)
    alone = np.concatenate([multiplied(matrix, x[t : t + 1], 1) for t in range(64)])
    for n_threads in THREADS:
        for n_tokens in range(1, 65):
            out = multiplied(matrix, x, n_tokens, n_threads)
            np.testing.assert_array_equal(out.view(np.int32), alone[:n_tokens].view(np.int32))


@pytest.mark.campaign
@pytest.mark.parametrize("path", [path for path in RUNS_HERE if path != DOT4])
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q6_K", "Q8_0"])
def test_every_instruction_gives_the_same_bits(name, path):
    """Rows and tokens of the largest codes among them, whose sums come near to what 16 bits hold."""
    if not RUNS_HERE[path]:
        pytest.skip(f"this CPU has no {path}")
    tensor, x = Given(name, ROWS, N), activations(11)
    codes = tensor.octets.reshape(ROWS, -1, TYPES[name].n_bytes)[:, :, 4:-2]
    codes[5], codes[6], codes[7] = 0xFF, 0x80, 0x7F
    x[1], x[2], x[9] = 1, -1, np.resize([1, -1], N)
    best, other = (multiplied(pack([tensor], kind), x, 11) for kind in (KINDS[name], kind_with(name, path)))
    np.testing.assert_array_equal(best.view(np.int32), other.view(np.int32))


def min_max_error(rows: np.ndarray) -> np.ndarray:
    """Squared error of each group of 32 whose range is cut into 15 steps."""
    groups = rows.reshape(len(rows), -1, 32).astype(np.float64)
    low, width = groups.min(-1, keepdims=True), np.ptp(groups, axis=-1, keepdims=True)
    steps = np.where(width > 0, width / 15, 1)
    return ((np.rint((groups - low) / steps) * steps + low - groups) ** 2).sum(-1)


def test_int4_makes_less_error_than_the_range_of_a_group_cut_in_15():
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((200, 576)) * rng.random((200, 1))).astype(np.float32)
    matrix = pack([rows], INT4)
    error = ((INT4.rows(matrix.strips, 576, 32)[:200] - rows).reshape(200, -1, 32).astype(np.float64) ** 2).sum(-1)
    assert error.sum() < 0.85 * min_max_error(rows).sum()
    assert (error < 1.05 * min_max_error(rows) + 1e-9).all()  # fp16's rounding


def test_int4_of_what_has_few_bits_is_exact():
    codes = np.random.default_rng(0).integers(0, 16, (40, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    rows = (codes * 0.25 - 2).astype(np.float32)
    rows[7], rows[8] = 0, -3
    matrix = pack([rows], INT4)
    np.testing.assert_array_equal(INT4.rows(matrix.strips, 64, 32)[:40], rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int4_of_what_is_not_finite_is_not_finite(bad):
    rows = np.ones((3, 96), np.float32)
    rows[1, 40] = bad
    numbers = quantize(rows).numbers.view(np.float16)
    assert np.isnan(numbers[1, 1]).all()
    assert np.isfinite(np.delete(numbers.reshape(-1, 2), 4, 0)).all()


@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-7, 1e-5, 1e4, 1e6, 1e30])
def test_int4_of_tiny_and_huge_weights_is_finite_and_near_where_fp16_reaches(size):
    rows = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32) * np.float32(size)
    got = INT4.rows(pack([rows], INT4).strips, 64, 32)[:40]
    assert np.isfinite(got).all()
    if 1e-5 <= size <= 1e4:
        assert np.abs(got - rows).max() < 0.2 * np.abs(rows).max()
    assert np.abs(got).max() <= 2 * max(np.abs(rows).max(), 6e-8)


def test_an_int4_row_need_not_fill_its_last_group():
    rows = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    matrix = pack([rows], INT4)
    x = zeros(3, 64)
    x[:, :50] = np.random.default_rng(1).standard_normal((3, 50))
    x[:, 50:] = np.nan
    stored = INT4.rows(matrix.strips, 50, 32)[:40]
    expected = x[:, :50] @ stored.T
    np.testing.assert_allclose(multiplied(matrix, x, 3)[:, :40], expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_int4_logits_are_those_of_its_floats_and_do_not_depend_on_the_batch(name):
    config = CONFIGS[name]
    weights = LLAMA.pack(config, random_tensors(config, 0, 0.1), INT4)
    tokens = tokens_for(config, 40)
    logits = run_in_blocks(Transformer(config, weights, 1), tokens, 1)
    floats = run_in_blocks(Transformer(config, weights.converted(FP32), 1), tokens, 8)
    assert np.abs(logits - floats).max() < 0.1 * np.abs(floats).max()
    for n_threads in THREADS:
        for block in (2, 9, 40):
            got = run_in_blocks(Transformer(config, weights, n_threads), tokens, block)
            np.testing.assert_array_equal(got.view(np.int32), logits.view(np.int32))


def test_a_model_in_groups_is_pickled_whole():
    model = random_model(CONFIGS["gqa"], INT4)
    again = pickle.loads(pickle.dumps(model))
    assert again.weights.kind == "int4 and int8"
    np.testing.assert_array_equal(again.forward([1, 2, 3], 3), model.forward([1, 2, 3], 3))


def test_quantize_says_what_each_model_becomes():
    for words, kinds in {
        "none": (None, None),
        "draft": (None, INT8),
        "both": (INT8, INT8),
        "draft=int4": (None, INT4),
        "both=int4": (INT4, INT4),
        "target=int8,draft=int4": (INT8, INT4),
        "both=int8,draft=none": (INT8, None),
    }.items():
        made = kinds_to_make(words)
        assert (made.target, made.draft) == kinds


@pytest.mark.parametrize(
    "words", ["", "int4", "draft=", "draft=int5", "draft,", "none,draft", "draft int4 and int8", "draft==int4", None, 4]
)
def test_quantize_refuses_what_it_does_not_know(words):
    with pytest.raises(ValueError, match=r"^quantize is .* expected none, or draft, target or both, alone or as in"):
        kinds_to_make(words)


@pytest.mark.parametrize(
    ("quantize", "weights"),
    [
        ("draft", "target fp32, draft int8"),  # of few bytes
        ("draft=int4", "target fp32, draft int4 and int8"),
        ("target", "target int8, draft int4 and int8"),
        ("target=int8,draft=int4", "target int8, draft int4 and int8"),
    ],
)
def test_a_copy_of_the_target_has_fewer_bits_than_it(quantize, weights):
    decoder = SpeculativeDecoder(DEFAULT_TARGET, "self", quantize=quantize, gamma=4)
    assert decoder.weights == weights
    text, statistics = decoder.generate("Once upon a time", 60, temperature=0.0)
    alone = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    assert text == alone.generate("Once upon a time", 60, temperature=0.0).text
    assert statistics.acceptance_rate > 0.7


@pytest.mark.parametrize(("accepted", "weights"), [(None, "int4 and int8"), (0.87, "int4 and int8"), (0.83, "int8")])
def test_beyond_the_caches_a_copy_is_int4_where_enough_of_that_is_accepted(monkeypatch, accepted, weights):
    """Of stories6M 0.95 (None); at the bytes of both, int4 has to reach 0.85."""
    monkeypatch.setattr(quantizing, "CACHED_BYTES", 0)
    if accepted is not None:
        monkeypatch.setattr(quantizing, "overlap", lambda *_: accepted)
    assert SpeculativeDecoder(DEFAULT_TARGET, "self").weights == f"target fp32, draft {weights}"


def test_the_overlap_is_how_many_of_a_drafts_tokens_rejection_sampling_accepts():
    """Drawn 40,000 times: four deviations are a false alarm in 16,000 runs, of a fixed seed."""
    decoder = SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT)
    tokens = decoder.encode("Once upon a time there was a little girl who")
    ps, qs = (
        [reference.softmax(row.astype(float)) for row in m.forward(tokens, len(tokens))] for m in (decoder.target, decoder.draft)
    )
    rng, n = np.random.default_rng(5), 40_000 // len(tokens)
    accepted = 0
    for p, q in zip(ps, qs, strict=True):
        drawn = rng.choice(len(q), n, p=q)
        accepted += (rng.random(n) * q[drawn] < p[drawn]).sum()
    share = quantizing.overlap(decoder.target, decoder.draft, tokens)
    assert abs(accepted / (n * len(tokens)) - share) < 4 * (share * (1 - share) / (n * len(tokens))) ** 0.5
    assert quantizing.overlap(decoder.target, decoder.target, tokens) == pytest.approx(1)


def test_the_speed_up_is_the_best_lengths():
    """Simulated: a proposal's tokens are right one by one, and the first wrong one ends it."""
    rng = np.random.default_rng(5)
    for accepted, cost in ((0.78, 0.36), (0.95, 0.53), (0.97, 0.36)):
        runs = np.cumprod(rng.random((20_000, 24)) < accepted, 1)
        best = max((1 + runs[:, :gamma].sum(1).mean()) / (1 + gamma * cost) for gamma in range(1, 25))
        assert quantizing.speed_up(accepted, cost) == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("quantize", ["target=int4", "both=int8", "target,draft=int8", "both=int4"])
def test_a_target_in_few_bits_is_no_draft_of_itself(quantize):
    with pytest.raises(ValueError, match=r"the target is int[48].* already, .* no faster draft"):
        SpeculativeDecoder(DEFAULT_TARGET, "self", quantize=quantize)
