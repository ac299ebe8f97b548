"""int8 weights: layout, products, equal bits on every path, and the cost in accuracy and memory."""

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
from specdec.bench.pass_speed import MODEL_SHAPES
from specdec.loaders import load_checkpoint
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import INT8, WeightFormat
from specdec.quant.int8 import (
    BYTES_PER_WORD,
    GROUP_HEADER_WORDS,
    NATIVE_INT8,
    PORTABLE_INT8,
    choose_dot4,
    make_tile,
    quantize_activations,
    quantize_rows,
)
from specdec.quant.matmul import make_matmul
from specdec.quant.packed_matrix import Int8Rows, pack_matrix
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Kernel
from specdec.runtime.simd import CPU_FEATURES, PANEL_ROWS, round_up
from tests.tools import reference
from tests.tools.block_tensors import FEATURES, RUNS_HERE
from tests.tools.checkpoint_files import ROOT, quantized_tensors, random_tensors, write_checkpoint, write_int8_checkpoint
from tests.tools.random_models import (
    CONFIGS,
    THREAD_COUNTS,
    int8_model,
    random_tokens,
    round_to_float32,
    run_in_blocks,
    run_product,
)

# A story like those that the bundled pair was trained on; neither model has seen it.
STORY = """Once upon a time, there was a small boat named Pip. Pip lived near a quiet beach with his friend Sara. Every morning, \
Sara came to the water and said, "Good morning, Pip! Where will we go today?" One day, the wind was very strong. Pip was scared \
and did not want to leave. Sara sat down next to him and told him a funny story about a fish that could sing. Pip laughed so \
hard that he forgot to be afraid. They went out on the sea together and saw three big birds. When the sun went down, they came \
home and were happy. Sara hugged Pip and said, "You are the bravest boat I know." """
RUNQ = ModelConfig(48, 40, 2, 4, 2, 112, 96)
RUNQ_UNSHARED = ModelConfig(64, 96, 2, 8, 2, 64, 96, shared_classifier=False)


def activations(n_tokens: int, n: int) -> np.ndarray:
    """Rows with a group of zeros, one of halves, and one too small for its scale."""
    x = np.random.default_rng(n).standard_normal((n_tokens, n)).astype(np.float32)
    x[0, : n // 2] = 0
    x[1] = np.resize(np.array([127, 0.5, -0.5, 1.5, -1.5, 2.5], np.float32), n)
    x[2] = 189 * np.finfo(np.float32).smallest_subnormal
    rows = zeros(n_tokens, round_up(n, PANEL_ROWS))
    rows[:, :n] = x
    return rows


def quantized_rows(x: np.ndarray, n: int, group_size: int) -> np.ndarray:
    """Return the output of `quantize_activations` as (T, groups, words)."""
    n_groups, group_words = -(-n // group_size), -(-group_size // BYTES_PER_WORD)
    codes = zeros(len(x), n_groups * (GROUP_HEADER_WORDS + group_words))
    codes[:] = np.nan
    quantize_activations(codes, x, n, group_size, len(x), 128, 1)
    return codes.reshape(len(x), n_groups, -1)


@pytest.mark.parametrize(("n", "group_size"), [(64, 64), (96, 32), (172, 32), (50, 25), (33, 11), (36, 4), (40, 2), (7, 1)])
def test_activations_are_quantized_like_runq(n, group_size):
    x = activations(5, n)
    packed = quantized_rows(x, n, group_size)
    for t in (0, 1, 3, 4):  # by runq's rule, the codes of row 2 exceed int8
        codes, scales = reference.quantize_activations(x[t, :n], group_size)
        got = packed[t].view(np.int8).reshape(len(scales), -1)[:, 4 * GROUP_HEADER_WORDS :]
        np.testing.assert_array_equal(got[:, :group_size].reshape(-1)[:n], codes)
        assert not got[:, group_size:].any()
        assert not got[:, :group_size].reshape(-1)[n:].any()
        np.testing.assert_array_equal(packed[t, :, 0], scales)
        np.testing.assert_array_equal(packed[t, :, 1].view(np.int32), -128 * got.sum(1, np.int32))
        np.testing.assert_array_equal(packed[t, :, 2], scales * got.sum(1, np.float32))
    assert np.abs(packed[2].view(np.int8)[:, 4 * GROUP_HEADER_WORDS :].astype(int)).max() == 127


@functools.cache
def make_format(instruction_set: str) -> WeightFormat:
    """Return int8 with the matmul of that instruction set, even if the CPU would choose another."""
    return replace(INT8, matmul=Kernel(make_matmul(*make_tile(instruction_set)), cache=False))


@pytest.mark.campaign
@pytest.mark.parametrize("instruction_set", RUNS_HERE)
@pytest.mark.parametrize(("n", "group_size"), [(96, 32), (172, 32), (128, 64), (50, 25), (40, 2)])
def test_int8_matmul_is_exact_in_a_group_and_one_chain_over_groups(n, group_size, instruction_set):
    """Compared with exact arithmetic, rounded after every group."""
    if not RUNS_HERE[instruction_set]:
        pytest.skip(f"this CPU has no {instruction_set}")
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((n, n)).astype(np.float32)
    matrix = pack_matrix(
        [rows if group_size in (32, 64) else QuantizedTensor(reference.quantize(rows, group_size))], make_format(instruction_set)
    )
    assert matrix.group_size == group_size
    x = activations(17, n)
    out = zeros(17, round_up(n, PANEL_ROWS))
    out[:] = start = rng.standard_normal(out.shape).astype(np.float32)
    run_product(matrix, out, x, adding=True)
    values, scales = quantize_padded(rows, group_size)
    for t, r in ((0, 0), (1, 3), (3, n // 2), (8, n - 1), (16, 1)):
        acc = Fraction(float(start[t, r]))
        x_codes, x_scales = reference.quantize_activations(x[t, :n], group_size)
        x_codes = np.concatenate([x_codes, np.zeros(-n % group_size, np.int64)]).reshape(-1, group_size)
        for g, x_scale in enumerate(x_scales):
            total = int(values[r, g].astype(int) @ x_codes[g])
            acc = Fraction(float(round_to_float32(total * Fraction(float(scales[r, g] * x_scale)) + acc)))
        assert float(out[t, r]) == float(acc)


@pytest.mark.parametrize("instruction_set", RUNS_HERE)
def test_the_largest_int8_products_are_exact(instruction_set):
    """Codes of 127, and of -128, which files may hold, all of one sign: two products nearly fill 16 bits."""
    if not RUNS_HERE[instruction_set]:
        pytest.skip(f"this CPU has no {instruction_set}")
    codes = np.tile(np.array([-128, 127, -127], np.int8)[:, None], (1, 128))
    matrix = pack_matrix(
        [QuantizedTensor(reference.QuantizedMatrix(codes, np.ones(6, np.float32), 64))], make_format(instruction_set)
    )
    x, out = zeros(9, 128), zeros(9, PANEL_ROWS)
    x[:] = np.array([1, -1] * 4 + [1])[:, None]
    run_product(matrix, out, x)
    group_sum = codes[:, :64].astype(np.float32).sum(1) * np.float32(127) * (np.float32(1) / np.float32(127))
    np.testing.assert_array_equal(out[:, :3], x[:, :1] * (group_sum + group_sum))


class QuantizedTensor:
    """A `reference.QuantizedMatrix` as a tensor; its groups do not cross rows."""

    def __init__(self, matrix: reference.QuantizedMatrix) -> None:
        self.shape, self.group, self.matrix = matrix.values.shape, matrix.group, matrix

    def __getitem__(self, rows: slice) -> Int8Rows:
        n_groups = self.shape[1] // self.group
        values = self.matrix.values[rows].reshape(-1, n_groups, self.group)
        return Int8Rows(values, self.matrix.scales.reshape(-1, n_groups)[rows])


def quantize_padded(matrix, group_size):
    """Return values (rows, groups, group size) and scales (rows, groups) by the oracle, each row padded with zeros."""
    rows = len(matrix)
    padded = np.concatenate([matrix, np.zeros((rows, -matrix.shape[1] % group_size), np.float32)], 1)
    values, scales, _ = reference.quantize(padded, group_size)
    return values.reshape(rows, -1, group_size), scales.reshape(rows, -1)


def test_instruction_set_follows_cpu_features():
    assert choose_dot4("+sse2,+avx2,-avx512vnni,-avxvnni") == "avx2"
    assert choose_dot4("+avx2,+avxvnni,-avxvnniint8") == "avxvnni"
    assert choose_dot4("+avx512f,+avx512vnni,+avxvnni") == "avx512vnni"
    assert choose_dot4("+neon,+dotprod") == "sdot"
    assert choose_dot4("+crc,+neon,-dotprod") == "neon"
    assert choose_dot4("+sse2,+avx,-avx2") == "portable"


OLD_CPU = {"NUMBA_CPU_NAME": "ivybridge", "NUMBA_CPU_FEATURES": "+sse4.2,+avx"}
OLDER_CPU = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt"}
INT8_LOGITS = """
from specdec.runtime.simd import CPU_FEATURES
from specdec.quant.dot4 import choose_dot4
from tests.tools.random_models import CONFIGS, int8_model, random_tokens
config = CONFIGS["gqa"]
print(choose_dot4(CPU_FEATURES), int8_model(config).new_cache().forward(random_tokens(config, 20), 20).tobytes().hex())
"""


@pytest.mark.skipif(not {"+avx2", "+fma"} <= set(FEATURES), reason="simulates an x86 CPU with AVX2")
def test_cpu_does_not_run_code_cached_for_another_and_gives_the_same_logits():
    """This CPU, then one with AVX2 as its widest instructions, which finds the first one's machine code in the cache."""
    native, older = (
        subprocess.check_output([sys.executable, "-c", INT8_LOGITS], cwd=ROOT, env=os.environ | cpu, text=True).split()
        for cpu in ({}, OLDER_CPU)
    )
    assert (native[0], older[0]) == (choose_dot4(CPU_FEATURES), "avx2")
    assert native[1] == older[1]


@pytest.mark.parametrize(
    ("config", "group_size"),
    [(RUNQ, 2), (RUNQ, 3), (RUNQ, 24), (RUNQ, 64), (RUNQ_UNSHARED, 4), (RUNQ_UNSHARED, 32), (RUNQ_UNSHARED, 64)],
)
def test_version_2_model_matches_runq(tmp_path, config, group_size):
    """Compared with the numpy oracle: group sizes that are part of a word, odd or whole vectors, and groups that cross rows."""
    tensors = random_tensors(config, 0, 0.1)
    checkpoint = load_checkpoint(write_int8_checkpoint(tmp_path / "model.bin", config, tensors, group_size))
    weights = LLAMA.plan_weights(config, checkpoint.tensors).pack()
    tokens = random_tokens(config, 30)
    got = run_in_blocks(Model(config, weights, kv="f32"), tokens, 7)
    expected = reference.forward(config, quantized_tensors(config, tensors, group_size), tokens)
    fp32 = reference.forward(config, tensors, tokens)
    # The error is float32 rounding, except where a value near a tie gets another code. That is rare, and smaller than int8's own
    # error, which a wrong formula would exceed.
    error, int8_error = np.abs(got - expected), np.abs(fp32 - expected)
    assert np.median(error) < 1e-5 * np.abs(expected).max() < np.median(int8_error) / 5
    assert error.max() < int8_error.max() / 3


@pytest.mark.parametrize("name", CONFIGS)
def test_int8_logit_bits_do_not_depend_on_batch_threads_or_instructions(name):
    config = CONFIGS[name]
    tokens = random_tokens(config, 70)
    alone = run_in_blocks(int8_model(config, weight_format=PORTABLE_INT8), tokens, 1).view(np.int32)
    for n_threads in THREAD_COUNTS:
        for weight_format in (NATIVE_INT8, PORTABLE_INT8):
            model = int8_model(config, n_threads, weight_format)
            for chunk in [*range(1, 18), 64]:
                np.testing.assert_array_equal(run_in_blocks(model, tokens, chunk).view(np.int32), alone)


def quantize_by_numpy(rows: np.ndarray, group_size: int) -> Int8Rows:
    """Quantize by numpy: the oracle of `quantize_rows`."""
    groups = np.zeros((rows.shape[0], round_up(rows.shape[1], group_size)), np.float32)
    groups[:, : rows.shape[1]] = rows
    groups = groups.reshape(rows.shape[0], -1, group_size)
    scales = np.maximum(groups.max(-1), np.float32(0) - groups.min(-1)) / np.float32(127)
    scales[scales < np.finfo(np.float32).tiny] = 0
    groups /= np.where(scales > 0, scales, np.float32(1))[:, :, None]
    return Int8Rows(np.rint(groups, out=groups).astype(np.int8), scales)


def pack_by_numpy(grouped: Int8Rows) -> np.ndarray:
    """Return the words of panels by the layout's description: scales, then words of codes w + 128, the rows innermost."""
    n_rows, n_groups, group_size = grouped.values.shape
    padded, padded_group = round_up(n_rows, PANEL_ROWS), round_up(group_size, BYTES_PER_WORD)
    codes, scales = np.full((padded, n_groups, padded_group), 128, np.uint8), np.zeros((padded, n_groups, 1), np.float32)
    codes[:n_rows, :, :group_size] = grouped.values.astype(int) + 128
    scales[:n_rows, :, 0] = grouped.scales
    words = np.concatenate([scales.view(np.uint32), codes.view(np.uint32)], 2)
    return words.reshape(padded // PANEL_ROWS, PANEL_ROWS, n_groups, -1).transpose(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("n", "group_size"), [(64, 64), (576, 64), (96, 32), (172, 32), (50, 25), (33, 11), (40, 2), (7, 1), (5, 32)]
)
def test_weights_are_quantized_and_packed_like_numpy_bit_for_bit(n: int, group_size: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.standard_normal((70, n)).astype(np.float32) * np.float32(10) ** rng.integers(-44, 37, (70, 1)).astype(np.float32)
    rows[0], rows[1], rows[2, : n // 2] = 0, -0.0, 0
    rows[3] = np.resize(np.array([127, 0.5, -0.5, 1.5, -1.5, 2.5], np.float32), n)  # ties
    got, expected = quantize_rows(rows, group_size), quantize_by_numpy(rows, group_size)
    np.testing.assert_array_equal(got.values, expected.values)
    np.testing.assert_array_equal(got.scales.view(np.uint32), expected.scales.view(np.uint32))
    panels = zeros(2 * 3 + 1, *INT8.get_panel_shape(n, group_size))
    INT8.pack(panels, 1, 2, expected, group_size)
    np.testing.assert_array_equal(panels[1::2].view(np.uint32).reshape(pack_by_numpy(expected).shape), pack_by_numpy(expected))
    assert not panels[::2].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_weights_have_a_nonfinite_scale(bad: float) -> None:
    rows = np.ones((3, 96), np.float32)
    rows[1, 40] = bad
    scales = quantize_rows(rows, 32).scales
    assert not np.isfinite(scales[1, 1])
    assert np.isfinite(np.delete(scales.reshape(-1), 4)).all()


def test_tiny_weights_keep_their_sign_or_become_zero():
    """190 / 127 units of the smallest float round to one unit, and then a weight would be 190 scales, which exceeds int8."""
    rows = np.full((400, 32), 1e-45, np.float32) * np.arange(400, dtype=np.float32)[:, None]
    rows[:, 1::2] *= -1
    for scaled in (rows, rows * np.float32(1e7), rows * np.float32(1e9)):
        values = quantize_rows(scaled, 32).values
        assert (values[:, 0].astype(int) * np.sign(scaled) >= 0).all()


def test_int8_conversion_equals_quantizing_at_load():
    for config in CONFIGS.values():
        tensors = random_tensors(config, 0)
        loaded = LLAMA.plan_weights(config, tensors, INT8).pack()
        fp32 = LLAMA.plan_weights(config, tensors).pack()
        converted = fp32.convert(INT8)
        for name, matrix in converted.matrices.items():
            np.testing.assert_array_equal(matrix.panels.view(np.uint8), loaded.matrices[name].panels.view(np.uint8))
        assert converted.vectors is fp32.vectors
        assert (converted.matrices["embedding"] is converted.matrices["classifier"]) == config.shared_classifier


def test_converting_an_int8_model_again_changes_nothing():
    """The largest weight of a group is 127 scales, so the same codes result, with nearly the same scales."""
    config = CONFIGS["gqa"]
    once = LLAMA.plan_weights(config, random_tensors(config, 0), INT8).pack()
    twice = once.convert(INT8)
    for name, matrix in once.matrices.items():
        np.testing.assert_allclose(matrix[:], twice.matrices[name][:], rtol=3e-7)


def test_int8_model_takes_at_most_a_quarter_more_than_its_file():
    """Everything that stays resident with a model of the public shapes, except caches and activations."""
    for shape in MODEL_SHAPES.values():
        config = replace(ModelConfig(*shape), n_layers=1, vocab_size=4000)
        tensors = {name: np.zeros(shape, np.float32) for name, shape in LLAMA.shapes(config).items()}
        weights = LLAMA.plan_weights(config, tensors, INT8).pack()
        n = sum(tensor.size for tensor in tensors.values())
        file_bytes = n + 4 * n // 64  # version 2 at its default group size
        assert weights.n_bytes <= 1.25 * file_bytes


LOADING = """
import sys
from pathlib import Path
from specdec.loaders.model_loader import load_model
def load(path):
    return load_model(Path(path), int8=True, n_threads=1)
small, big = sys.argv[1:]
load(small).new_cache().forward([1])
status = lambda name: int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024
before = status("VmRSS")
cache = load(big).new_cache()
cache.forward([1] * 8)
print(status("VmRSS") - before, status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
@pytest.mark.parametrize("version", [1, 2])
def test_loading_never_holds_the_whole_model_twice(tmp_path, version):
    """VmRSS and VmHWM of a separate process.

    An empty cache of 80 MB exists. Slack: 12 MiB for the allocator, activations and one block.
    """
    config = ModelConfig(512, 1376, 10, 8, 8, 4000, 2048)
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


def perplexity(model: Model, tokens: list[int]) -> float:
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
def test_output_does_not_depend_on_the_draft_or_its_format(draft, quantize, temperature):
    plain = SpeculativeDecoder(DEFAULT_TARGET, None)
    decoder = SpeculativeDecoder(plain.target, draft, plain.tokenizer, quantize=quantize, gamma=4)
    assert (decoder.draft.weights.format_names == "int8") == (draft == "self" or quantize == "draft")
    text, statistics = decoder.generate("Once upon a time", 150, temperature=temperature, seed=3)
    assert text == plain.generate("Once upon a time", 150, temperature=temperature, seed=3).text
    assert statistics.acceptance_rate > (0.9 if draft == "self" else 0.4)


def test_int8_target_has_the_same_output_with_any_draft():
    outputs = {
        SpeculativeDecoder(DEFAULT_TARGET, draft, quantize=quantize, gamma=4)
        .generate("Once upon a time", 150, temperature=1.0, seed=3)
        .text
        for draft, quantize in ((None, "target"), (DEFAULT_DRAFT, "target"), (DEFAULT_DRAFT, "both"))
    }
    assert len(outputs) == 1


def test_environment_variable_forces_the_portable_kernels():
    """On this CPU, and on x86 also on a simulated one without instructions for byte sums."""
    code = (
        "from specdec.quant.int8 import *; from specdec.quant.gguf_repacking import WEIGHT_FORMATS; "
        "print(choose_dot4(simd.CPU_FEATURES), DOT4_NAME, INT8 is PORTABLE_INT8, WEIGHT_FORMATS['Q4_0'].matmul.name)"
    )
    cpus = [{}, OLD_CPU] if "+avx" in FEATURES else [{}]
    for cpu, value in itertools.product(cpus, ("1", "0", "")):
        environment = os.environ | cpu | {"SPECDEC_PORTABLE": value}
        best, *printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True).split()
        expected = "portable" if value == "1" else best
        assert printed == [expected, str(expected == "portable"), f"quant.gguf_repacking.{expected}_Q4_0_matmul"]
        assert best == "portable" or not cpu


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_activations_have_a_nonfinite_scale(bad):
    x = zeros(3, 96)
    x[:] = 1.0
    x[1, 40] = bad
    codes = zeros(3, 3 * (GROUP_HEADER_WORDS + 8))
    quantize_activations(codes, x, 96, 32, 3, 128, 1)
    scales = codes.reshape(3, 3, -1)[:, :, 0]
    assert np.isnan(scales[1, 1])
    assert np.isfinite(np.delete(scales.reshape(-1), 4)).all()
