"""int8: the layout, the products, the promises about bits, and what it costs in accuracy and memory."""

import functools
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.bench.random_weights import SHAPES
from specdec.config import Config
from specdec.loaders import load_checkpoint
from specdec.loaders.model_lookup import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.quant import INT8, Kind
from specdec.quant.int8 import (
    GROUP_HEAD,
    NATIVE_INT8,
    PORTABLE_INT8,
    QUADS,
    best_dot4,
    dot4_tile,
    quantize,
    quantize_rows,
    quantized,
)
from specdec.quant.matmul import product_by
from specdec.quant.matrix import Grouped, pack
from specdec.runtime.memory import zeros
from specdec.runtime.program import Operation
from specdec.runtime.simd import CPU_FEATURES, round_up
from specdec.runtime.tile import STRIP_ROWS
from tests.tools import reference
from tests.tools.checkpoint_files import ROOT, SHARED, quantized_tensors, random_tensors, write_checkpoint, write_int8_checkpoint
from tests.tools.random_models import CONFIGS, THREADS, int8_model, product, round_to_float32, run_in_blocks, tokens_for

# what a story of the kind that the embedded pair knows looks like; neither model saw it
STORY = """Once upon a time, there was a small boat named Pip. Pip lived near a quiet beach with his friend Sara. Every morning, \
Sara came to the water and said, "Good morning, Pip! Where will we go today?" One day, the wind was very strong. Pip was scared \
and did not want to leave. Sara sat down next to him and told him a funny story about a fish that could sing. Pip laughed so \
hard that he forgot to be afraid. They went out on the sea together and saw three big birds. When the sun went down, they came \
home and were happy. Sara hugged Pip and said, "You are the bravest boat I know." """
RUNQ = Config(48, 40, 2, 4, 2, 112, 96)
RUNQ_UNSHARED = Config(64, 96, 2, 8, 2, 64, 96, shared_classifier=False)


def activations(n_tokens: int, n: int) -> np.ndarray:
    """Rows with a group of zeros, one of halves, and one too small for its scale."""
    x = np.random.default_rng(n).standard_normal((n_tokens, n)).astype(np.float32)
    x[0, : n // 2] = 0
    x[1] = np.resize(np.array([127, 0.5, -0.5, 1.5, -1.5, 2.5], np.float32), n)
    x[2] = 189 * np.finfo(np.float32).smallest_subnormal
    rows = zeros(n_tokens, round_up(n, STRIP_ROWS))
    rows[:, :n] = x
    return rows


def quantized_rows(x: np.ndarray, n: int, group: int) -> np.ndarray:
    """What `quantize` writes: (T, groups, words)."""
    n_groups, n_quads = -(-n // group), -(-group // QUADS)
    codes = zeros(len(x), n_groups * (GROUP_HEAD + n_quads))
    codes[:] = np.nan
    quantize(codes, x, n, group, len(x))
    return codes.reshape(len(x), n_groups, -1)


@pytest.mark.parametrize(("n", "group"), [(64, 64), (96, 32), (172, 32), (50, 25), (33, 11), (36, 4), (40, 2), (7, 1)])
def test_activations_are_quantized_as_runq_does(n, group):
    x = activations(5, n)
    packed = quantized_rows(x, n, group)
    for t in (0, 1, 3, 4):  # the third has no codes within int8 by runq's rule
        codes, scales = reference.quantized_activations(x[t, :n], group)
        got = packed[t].view(np.int8).reshape(len(scales), -1)[:, 4 * GROUP_HEAD :]
        np.testing.assert_array_equal(got[:, :group].reshape(-1)[:n], codes)
        assert not got[:, group:].any()
        assert not got[:, :group].reshape(-1)[n:].any()
        np.testing.assert_array_equal(packed[t, :, 0], scales)
        np.testing.assert_array_equal(packed[t, :, 1].view(np.int32), -128 * got.sum(1, np.int32))
        np.testing.assert_array_equal(packed[t, :, 2], scales * got.sum(1, np.float32))
    assert np.abs(packed[2].view(np.int8)[:, 4 * GROUP_HEAD :].astype(int)).max() == 127


@functools.cache
def kind_with(path: str) -> Kind:
    """int8 with the product by that instruction, also where it is not the one that the CPU would choose."""
    return replace(INT8, product=Operation(product_by(*dot4_tile(path), quantized), kept=False))


FEATURES = CPU_FEATURES.split(",")
RUNS_HERE = {
    "portable": True,
    "avx512vnni": "+avx512vnni" in FEATURES,
    "avxvnni": "+avxvnni" in FEATURES or {"+avx512vnni", "+avx512vl"} <= set(FEATURES),
    "avx2": "+avx2" in FEATURES,
    "sdot": "+dotprod" in FEATURES,
    "neon": "+neon" in FEATURES,
}


@pytest.mark.campaign
@pytest.mark.parametrize("path", RUNS_HERE)
@pytest.mark.parametrize(("n", "group"), [(96, 32), (172, 32), (128, 64), (50, 25), (40, 2)])
def test_an_int8_product_is_exact_in_a_group_and_one_chain_over_the_groups(n, group, path):
    """Against exact arithmetic rounded after every group."""
    if not RUNS_HERE[path]:
        pytest.skip(f"this CPU has no {path}")
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((n, n)).astype(np.float32)
    matrix = pack([rows if group in (32, 64) else Loaded(reference.quantized(rows, group))], kind_with(path))
    assert matrix.group == group
    x = activations(17, n)
    out = zeros(17, round_up(n, STRIP_ROWS))
    out[:] = start = rng.standard_normal(out.shape).astype(np.float32)
    product(matrix, out, x, adding=True)
    values, scales = padded_quantized(rows, group)
    for t, r in ((0, 0), (1, 3), (3, n // 2), (8, n - 1), (16, 1)):
        acc = Fraction(float(start[t, r]))
        x_codes, x_scales = reference.quantized_activations(x[t, :n], group)
        x_codes = np.concatenate([x_codes, np.zeros(-n % group, np.int64)]).reshape(-1, group)
        for g, x_scale in enumerate(x_scales):
            total = int(values[r, g].astype(int) @ x_codes[g])
            acc = Fraction(float(round_to_float32(total * Fraction(float(scales[r, g] * x_scale)) + acc)))
        assert float(out[t, r]) == float(acc)


@pytest.mark.parametrize("path", RUNS_HERE)
def test_the_largest_int8_products_are_exact(path):
    """Codes of 127 and of -128, which files may hold, all of one sign: two products nearly fill 16 bits."""
    if not RUNS_HERE[path]:
        pytest.skip(f"this CPU has no {path}")
    codes = np.tile(np.array([-128, 127, -127], np.int8)[:, None], (1, 128))
    matrix = pack([Loaded(reference.Quantized(codes, np.ones(6, np.float32), 64))], kind_with(path))
    x, out = zeros(9, 128), zeros(9, STRIP_ROWS)
    x[:] = np.array([1, -1] * 4 + [1])[:, None]
    product(matrix, out, x)
    a_group = codes[:, :64].astype(np.float32).sum(1) * np.float32(127) * (np.float32(1) / np.float32(127))
    np.testing.assert_array_equal(out[:, :3], x[:, :1] * (a_group + a_group))


class Loaded:
    """A `reference.Quantized` whose groups do not cross rows, as a reader gives it."""

    def __init__(self, matrix: reference.Quantized) -> None:
        self.shape, self.group, self.matrix = matrix.values.shape, matrix.group, matrix

    def __getitem__(self, rows: slice) -> Grouped:
        n_groups = self.shape[1] // self.group
        values = self.matrix.values[rows].reshape(-1, n_groups, self.group)
        return Grouped(values, self.matrix.scales.reshape(-1, n_groups)[rows])


def padded_quantized(matrix, group):
    """values (rows, groups, group) and scales (rows, groups) by the oracle, each row filled up with zeros."""
    rows = len(matrix)
    padded = np.concatenate([matrix, np.zeros((rows, -matrix.shape[1] % group), np.float32)], 1)
    values, scales, _ = reference.quantized(padded, group)
    return values.reshape(rows, -1, group), scales.reshape(rows, -1)


def test_every_instruction_is_chosen_by_the_feature_that_promises_it():
    assert best_dot4("+sse2,+avx2,-avx512vnni,-avxvnni") == "avx2"
    assert best_dot4("+avx2,+avxvnni,-avxvnniint8") == "avxvnni"
    assert best_dot4("+avx512f,+avx512vnni,+avxvnni") == "avx512vnni"
    assert best_dot4("+neon,+dotprod") == "sdot"
    assert best_dot4("+crc,+neon,-dotprod") == "neon"
    assert best_dot4("+sse2,+avx,-avx2") == "portable"


OLD_CPU = {"NUMBA_CPU_NAME": "ivybridge", "NUMBA_CPU_FEATURES": "+sse4.2,+avx"}
OLDER_CPU = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt"}
INT8_LOGITS = """
from specdec.runtime.simd import CPU_FEATURES
from specdec.quant.int8 import best_dot4
from tests.tools.random_models import CONFIGS, int8_model, tokens_for
config = CONFIGS["gqa"]
print(best_dot4(CPU_FEATURES), int8_model(config).forward(tokens_for(config, 20), 20).tobytes().hex())
"""


@pytest.mark.skipif(not {"+avx2", "+fma"} <= set(FEATURES), reason="plays an x86 CPU with AVX2")
def test_a_cpu_never_runs_what_was_cached_for_another_and_says_the_same():
    """This CPU, then one with AVX2 as its widest instructions, which finds the first one's machine code in the cache."""
    here, there = (
        subprocess.check_output([sys.executable, "-c", INT8_LOGITS], cwd=ROOT, env=os.environ | cpu, text=True).split()
        for cpu in ({}, OLDER_CPU)
    )
    assert (here[0], there[0]) == (best_dot4(CPU_FEATURES), "avx2")
    assert here[1] == there[1]


@pytest.mark.parametrize(
    ("config", "group"),
    [(RUNQ, 2), (RUNQ, 3), (RUNQ, 24), (RUNQ, 64), (RUNQ_UNSHARED, 4), (RUNQ_UNSHARED, 32), (RUNQ_UNSHARED, 64)],
)
def test_a_version_2_model_is_runq(tmp_path, config, group):
    """The whole forward against the numpy oracle: parts of a quad, an odd group, whole vectors, groups that cross rows."""
    tensors = random_tensors(config, 0, 0.1)
    checkpoint = load_checkpoint(write_int8_checkpoint(tmp_path / "model.bin", config, tensors, group))
    weights = LLAMA.pack(config, checkpoint.tensors)
    tokens = tokens_for(config, 30)
    got = run_in_blocks(Transformer(config, weights, kv="f32"), tokens, 7)
    expected = reference.forward(config, quantized_tensors(config, tensors, group), tokens)
    fp32 = reference.forward(config, tensors, tokens)
    # rounding of float32, but where a code at the edge between two integers falls the other way: rarely, and by less than
    # int8's own error, which a wrong formula could not stay below
    error, own_error = np.abs(got - expected), np.abs(fp32 - expected)
    assert np.median(error) < 1e-5 * np.abs(expected).max() < np.median(own_error) / 5
    assert error.max() < own_error.max() / 3


@pytest.mark.parametrize("name", CONFIGS)
def test_int8_logits_do_not_depend_on_the_batch_the_threads_or_the_path_bit_for_bit(name):
    config = CONFIGS[name]
    tokens = tokens_for(config, 70)
    alone = run_in_blocks(int8_model(config, kind=PORTABLE_INT8), tokens, 1).view(np.int32)
    for n_threads in THREADS:
        for kind in (NATIVE_INT8, PORTABLE_INT8):
            model = int8_model(config, n_threads, kind)
            for block in [*range(1, 18), 64]:
                np.testing.assert_array_equal(run_in_blocks(model, tokens, block).view(np.int32), alone)


def test_real_int8_logits_do_not_depend_on_the_batch_the_threads_or_the_path_bit_for_bit():
    for path in (DEFAULT_TARGET, DEFAULT_DRAFT, *sorted(SHARED.glob("models/stories*.bin"))):
        checkpoint = load_checkpoint(path)
        native, portable = (LLAMA.pack(checkpoint.config, checkpoint.tensors, kind) for kind in (NATIVE_INT8, PORTABLE_INT8))
        tokens = tokens_for(checkpoint.config, 130)
        alone = run_in_blocks(Transformer(checkpoint.config, native, 1, n_positions=130), tokens, 1)
        for n_threads in THREADS:
            for weights in (native, portable):
                model = Transformer(checkpoint.config, weights, n_threads, n_positions=130)
                for block in (2, 5, 8, 9, 17, 64):
                    np.testing.assert_array_equal(run_in_blocks(model, tokens, block).view(np.int32), alone.view(np.int32))


def rows_by_numpy(rows: np.ndarray, group: int) -> Grouped:
    """`quantize_rows` as it was written first."""
    groups = np.zeros((rows.shape[0], round_up(rows.shape[1], group)), np.float32)
    groups[:, : rows.shape[1]] = rows
    groups = groups.reshape(rows.shape[0], -1, group)
    scales = np.maximum(groups.max(-1), np.float32(0) - groups.min(-1)) / np.float32(127)
    scales[scales < np.finfo(np.float32).tiny] = 0
    groups /= np.where(scales > 0, scales, np.float32(1))[:, :, None]
    return Grouped(np.rint(groups, out=groups).astype(np.int8), scales)


def strips_by_numpy(grouped: Grouped) -> np.ndarray:
    """The words of strips, by the layout's description: scales, then quads of codes w + 128, the rows of each innermost."""
    n_rows, n_groups, group = grouped.values.shape
    padded, quads = round_up(n_rows, STRIP_ROWS), round_up(group, QUADS)
    codes, scales = np.full((padded, n_groups, quads), 128, np.uint8), np.zeros((padded, n_groups, 1), np.float32)
    codes[:n_rows, :, :group] = grouped.values.astype(int) + 128
    scales[:n_rows, :, 0] = grouped.scales
    words = np.concatenate([scales.view(np.uint32), codes.view(np.uint32)], 2)
    return words.reshape(padded // STRIP_ROWS, STRIP_ROWS, n_groups, -1).transpose(0, 2, 3, 1)


@pytest.mark.parametrize(("n", "group"), [(64, 64), (576, 64), (96, 32), (172, 32), (50, 25), (33, 11), (40, 2), (7, 1), (5, 32)])
def test_weights_are_quantized_and_packed_bit_for_bit_as_numpy_does(n: int, group: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.standard_normal((70, n)).astype(np.float32) * np.float32(10) ** rng.integers(-44, 37, (70, 1)).astype(np.float32)
    rows[0], rows[1], rows[2, : n // 2] = 0, -0.0, 0
    rows[3] = np.resize(np.array([127, 0.5, -0.5, 1.5, -1.5, 2.5], np.float32), n)  # ties
    got, expected = quantize_rows(rows, group), rows_by_numpy(rows, group)
    np.testing.assert_array_equal(got.values, expected.values)
    np.testing.assert_array_equal(got.scales.view(np.uint32), expected.scales.view(np.uint32))
    strips = zeros(2 * 3 + 1, *INT8.strip_shape(n, group))
    INT8.fill(strips, 1, 2, expected, group)
    np.testing.assert_array_equal(
        strips[1::2].view(np.uint32).reshape(strips_by_numpy(expected).shape), strips_by_numpy(expected)
    )
    assert not strips[::2].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_have_no_finite_scale(bad: float) -> None:
    rows = np.ones((3, 96), np.float32)
    rows[1, 40] = bad
    scales = quantize_rows(rows, 32).scales
    assert not np.isfinite(scales[1, 1])
    assert np.isfinite(np.delete(scales.reshape(-1), 4)).all()


def test_weights_that_nearly_vanish_keep_their_sign_or_vanish():
    """190 / 127 units of the smallest float are one unit, and 190 of it no int8."""
    rows = np.full((400, 32), 1e-45, np.float32) * np.arange(400, dtype=np.float32)[:, None]
    rows[:, 1::2] *= -1
    for scaled in (rows, rows * np.float32(1e7), rows * np.float32(1e9)):
        values = quantize_rows(scaled, 32).values
        assert (values[:, 0].astype(int) * np.sign(scaled) >= 0).all()


def test_an_int8_copy_of_a_model_is_the_model_quantized_while_loading():
    for config in CONFIGS.values():
        tensors = random_tensors(config, 0)
        loaded = LLAMA.pack(config, tensors, INT8)
        fp32 = LLAMA.pack(config, tensors)
        copied = fp32.converted(INT8)
        for name, matrix in copied.matrices.items():
            np.testing.assert_array_equal(matrix.strips.view(np.uint8), loaded.matrices[name].strips.view(np.uint8))
        assert copied.vectors is fp32.vectors
        assert (copied.matrices["embedding"] is copied.matrices["classifier"]) == config.shared_classifier


def test_an_int8_model_converted_once_more_is_the_same():
    """Its floats are values times scales, the largest of them 127 scales: the same codes come out, from scales that are near."""
    config = CONFIGS["gqa"]
    once = LLAMA.pack(config, random_tensors(config, 0), INT8)
    twice = once.converted(INT8)
    for name, matrix in once.matrices.items():
        a, b = (m.kind.rows(m.strips, m.n, m.group) for m in (matrix, twice.matrices[name]))
        np.testing.assert_allclose(a, b, rtol=3e-7)


def test_an_int8_model_takes_at_most_a_quarter_more_than_its_file():
    """Everything that stays with a model of the public shapes, beside caches and activations."""
    for shape in SHAPES.values():
        config = replace(Config(*shape), n_layers=1, vocab_size=4000)
        tensors = {name: np.zeros(shape, np.float32) for name, shape in LLAMA.shapes(config).items()}
        weights = LLAMA.pack(config, tensors, INT8)
        n = sum(tensor.size for tensor in tensors.values())
        file_bytes = n + 4 * n // 64  # version 2 at its default group size
        assert weights.n_bytes <= 1.25 * file_bytes


LOADING = """
import sys
from pathlib import Path
from specdec.loaders.loader import load_model
def load(path):
    return load_model(Path(path), int8=True, n_threads=1)
small, big = sys.argv[1:]
load(small).forward([1])
status = lambda name: int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024
before = status("VmRSS")
model = load(big)
model.forward([1] * 8)
print(status("VmRSS") - before, status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
@pytest.mark.parametrize("version", [1, 2])
def test_loading_never_holds_the_whole_model_twice(tmp_path, version):
    """VmRSS and VmHWM of a process of its own; a cache of 80 MB is there, and empty. Slack: 12 MiB for the allocator,
    activations and one block."""
    config = Config(512, 1376, 10, 8, 8, 4000, 2048)
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in LLAMA.shapes(config).items()}
    big = tmp_path / "big.bin"
    write_checkpoint(big, config, tensors, 1) if version == 1 else write_int8_checkpoint(big, config, tensors, 64)
    small = write_checkpoint(tmp_path / "small.bin", CONFIGS["gqa"], random_tensors(CONFIGS["gqa"], 0))
    command = [sys.executable, "-c", LOADING, str(small), str(big)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    resident, peak = map(int, done.stdout.split())
    n = sum(tensor.size for tensor in tensors.values())
    slack, file_bytes = 12 << 20, n + 4 * n // 64
    assert resident < 1.25 * file_bytes + slack / 2
    assert peak < (1.25 * file_bytes + slack if version == 2 else 4 * n)


def perplexity(model: Transformer, tokens: list[int]) -> float:
    logits = run_in_blocks(model, tokens, 64)[:-1].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(tokens) - 1), tokens[1:]]
    return math.exp(losses.mean())


def test_int8_costs_less_than_one_percent_of_perplexity_on_real_weights():
    decoder = SpeculativeDecoder(DEFAULT_TARGET, "self")
    tokens = decoder.encode(STORY)
    assert perplexity(decoder.draft, tokens) == pytest.approx(perplexity(decoder.target, tokens), rel=0.01)


@pytest.mark.campaign
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["self", DEFAULT_DRAFT])
@pytest.mark.parametrize("quantize", ["draft", "none"])
def test_the_text_does_not_change_by_one_bit_whatever_the_draft_is_made_of(draft, quantize, temperature):
    plain = SpeculativeDecoder(DEFAULT_TARGET, None)
    decoder = SpeculativeDecoder(plain.target, draft, plain.tokenizer, quantize=quantize, gamma=4)
    assert (decoder.draft.weights.kind == "int8") == (draft == "self" or quantize == "draft")
    text, statistics = decoder.generate("Once upon a time", 150, temperature=temperature, seed=3)
    assert text == plain.generate("Once upon a time", 150, temperature=temperature, seed=3).text
    assert statistics.acceptance_rate > (0.9 if draft == "self" else 0.4)


def test_an_int8_target_has_its_own_text_with_any_draft():
    texts = {
        SpeculativeDecoder(DEFAULT_TARGET, draft, quantize=quantize, gamma=4)
        .generate("Once upon a time", 150, temperature=1.0, seed=3)
        .text
        for draft, quantize in ((None, "target"), (DEFAULT_DRAFT, "target"), (DEFAULT_DRAFT, "both"))
    }
    assert len(texts) == 1


def test_the_environment_forces_the_portable_path():
    """On this CPU, and, on x86, on one that has no instruction for sums of bytes."""
    code = "from specdec.quant.int8 import *; print(best_dot4(CPU_FEATURES), DOT4, INT8 is PORTABLE_INT8)"
    cpus = [{}, OLD_CPU] if "+avx" in FEATURES else [{}]
    for cpu, value in itertools.product(cpus, ("1", "0", "")):
        environment = os.environ | cpu | {"SPECDEC_PORTABLE": value}
        best, *told = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True).split()
        expected = "portable" if value == "1" else best
        assert told == [expected, str(expected == "portable")]
        assert best == "portable" or not cpu


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_have_no_finite_scale(bad):
    x = zeros(3, 96)
    x[:] = 1.0
    x[1, 40] = bad
    codes = zeros(3, 3 * (GROUP_HEAD + 8))
    quantize(codes, x, 96, 32, 3)
    scales = codes.reshape(3, 3, -1)[:, :, 0]
    assert np.isnan(scales[1, 1])
    assert np.isfinite(np.delete(scales.reshape(-1), 4)).all()
