"""KV cache formats: rounding, bits that do not depend on the batch, memory, and the kv option."""

import functools
import pickle
from dataclasses import replace

import numba
import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model import get_architecture
from specdec.model.model import Model, count_kv_bytes_per_token
from specdec.quant import BF16, FP32, INT8
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES, load, make_store, narrow, portable_to_nearest_fp16, store, store_item, vector
from specdec.sampling import Sampling
from tests.tools import reference
from tests.tools.cache_contents import get_buffers
from tests.tools.checkpoint_files import random_tensors
from tests.tools.decode import generate_tokens
from tests.tools.family_models import FAMILIES, LATENT
from tests.tools.family_models import random_tensors as family_tensors
from tests.tools.half_precision import to_half
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, random_model, random_tokens, run_in_blocks

portable_store = make_store(vector, functools.partial(narrow, to_nearest=portable_to_nearest_fp16))


@numba.njit
def convert_to_f16(native, portable, single, widened, x):
    for at in range(0, x.size, LANES):
        store(native, at, load(x, at))
        portable_store(portable, at, load(x, at))
        store(widened, at, load(native, at))
        for i in range(LANES):
            store_item(single, at + i, x[at + i])


def make_edge_cases():
    """Return every fp16 value, the ties between two, their neighbors in float32, and values beyond fp16."""
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    halves = np.sort(halves[np.isfinite(halves)]).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    x = np.concatenate([halves, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    x = np.concatenate([x, -x, np.float32([65519.996, 65520, 65536, 3e38, np.inf, np.nan, 1e-45, 2**-126, 0.0, -0.0])])
    return np.pad(x, (0, -x.size % LANES))


def test_fp16_conversions_round_to_nearest_even_and_overflow_to_nan():
    x = np.ascontiguousarray(make_edge_cases())
    native, portable, single = (np.zeros(x.size, np.uint16) for _ in range(3))
    widened = zeros(x.size)
    convert_to_f16(native, portable, single, widened, x)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    is_finite = np.isfinite(expected)
    assert (~is_finite).sum() == 5
    for bits in (native, portable, single):
        np.testing.assert_array_equal(bits[is_finite], expected.view(np.uint16)[is_finite])
        assert np.isnan(bits.view(np.float16)[~is_finite]).all()
    np.testing.assert_array_equal(widened[is_finite], expected[is_finite].astype(np.float32))


@pytest.mark.campaign
@pytest.mark.parametrize("kv", ["f16", "q8"])
@pytest.mark.parametrize("weight_format", [FP32, BF16, INT8], ids=lambda weight_format: weight_format.name)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_with_compact_kv_do_not_depend_on_batch_or_threads(name, weight_format, kv):
    config = CONFIGS[name]
    tokens = random_tokens(config, 70)
    tensors = {name: to_half(tensor, weight_format.name) for name, tensor in random_tensors(config, 1, 0.1).items()}
    weights = get_architecture(config).plan_weights(config, tensors, None if weight_format is BF16 else weight_format).pack()
    expected = run_in_blocks(Model(config, weights, 1, kv=kv), tokens, 1)
    for n_threads in THREAD_COUNTS:
        cache = Model(config, weights, n_threads, kv=kv).new_cache()
        for block in (2, 3, 8, 9, 64):
            np.testing.assert_array_equal(run_in_blocks(cache, tokens, block), expected)


@pytest.mark.parametrize("kv", ["f16", "q8"])
@pytest.mark.parametrize(
    "name", ["everything", "gpt2, odd", "qwen3, heads across strips", "gpt-oss", "all norms of the whole", LATENT[1]]
)
def test_only_keys_and_values_are_rounded(name, kv):
    """The oracle that rounds them is far nearer than the one that does not. Trees keep what chains keep."""
    config = FAMILIES[name]
    tensors, sequence = family_tensors(config), random_tokens(config, 40)
    cache = Model(config, get_architecture(config).plan_weights(config, tensors).pack(), 1, kv=kv).new_cache()
    got = run_in_blocks(cache, sequence, 7)
    rounding = {"f16": np.float16, "q8": reference.round_to_q8}[kv]
    rounded, exact = (reference.forward(config, tensors, sequence, round_kv=kept) for kept in (rounding, np.float64))
    assert np.median(np.abs(got - rounded)) < np.median(np.abs(got - exact)) / 10
    nodes, parents = [4, 5, 6, 7, 8], [-1, 0, -1, 2, 2]
    logits = cache.forward_tree(sequence[:20], nodes, parents).copy()
    cache.commit_path([2, 4])
    np.testing.assert_array_equal(cache.forward([*sequence[:20], 6, 8], 1)[0], logits[5])
    cache.forward([], 0)
    np.testing.assert_array_equal(cache.forward([*sequence[:20], 6, 8], 1)[0], logits[5])


@pytest.mark.parametrize(
    "name",
    [
        "everything",
        "gemma 4",
        "lfm2",
        "gpt2",
        "latent attention",
        "latent attention of whole panels",
        "mamba 2",
        "mamba 2 next to attention",
        "one block a layer",
    ],
)
def test_bytes_per_token_are_those_by_which_a_cache_grows(name):
    config = FAMILIES[name]
    for kv in ("f32", "f16", "q8"):
        model = Model(config, get_architecture(config).plan_weights(config, family_tensors(config)).pack(), 1, kv=kv)
        short, long = (sum(each.array.nbytes for each in model.grow_buffers(n, 0, None).growing) for n in (64, 128))
        assert long - short == 64 * count_kv_bytes_per_token(config, kv) > 0


def test_key_or_value_beyond_fp16_range_becomes_nan():
    config = CONFIGS["gqa"]
    for name in ("wk", "wv"):
        tensors = random_tensors(config, 1)
        tensors[name] *= 1e6
        weights = get_architecture(config).plan_weights(config, tensors).pack()
        assert np.isfinite(Model(config, weights, 1).new_cache().forward([1, 2], 1)).all()
        f16 = Model(config, weights, 1, kv="f16").new_cache()
        assert np.isnan(f16.forward([1, 2], 1)).all()
        with pytest.raises(ValueError, match=r"not finite: .* too large for f16 \(kv='f32' holds them\)$"):
            generate_tokens(f16, None, Sampling(0))


def test_q8_keeps_non_finite_values_and_zeros():
    config = CONFIGS["gqa"]
    tensors = random_tensors(config, 1)
    for name in ("wk", "wv"):
        for factor, is_finite in ((1e6, True), (0.0, True), (np.inf, False), (np.nan, False)):
            with np.errstate(invalid="ignore"):
                changed = tensors | {name: np.where(tensors[name] == tensors[name].flat[0], np.float32(factor), tensors[name])}
            if np.isfinite(factor):
                changed = tensors | {name: tensors[name] * np.float32(factor)}
            cache = Model(config, get_architecture(config).plan_weights(config, changed).pack(), 1, kv="q8").new_cache()
            assert np.isfinite(cache.forward([1, 2], 1)).all() == is_finite


def test_auto_kv_follows_weights_and_f16_halves_the_cache():
    config = replace(CONFIGS["gqa"], seq_len=4096)
    f32, int8 = random_model(config), random_model(config, INT8)
    assert (f32.kv, int8.kv) == ("f32", "f16")
    f16 = Model(config, f32.weights, 1, kv="f16")
    cached = 2 * 4 * config.n_layers * config.n_kv_heads * (config.head_dim + 32) // 2 * 4096  # values fill panels of 32
    assert cached / 2 <= f32.get_sequence_bytes(4096) - f16.get_sequence_bytes(4096) < cached / 2 * 1.05
    q8 = Model(config, f32.weights, 1, kv="q8")
    n_bytes = [get_buffers(model.new_cache()).layers[0].kv.keys.nbytes for model in (f32, f16, q8)]
    assert n_bytes[0] == 2 * n_bytes[1] == 4 * n_bytes[2]
    scales = 2 * 4 * config.n_layers * config.n_kv_heads * 4096
    assert cached / 4 - scales < f16.get_sequence_bytes(4096) - q8.get_sequence_bytes(4096) < cached / 4


def test_pickled_and_grown_models_keep_kv_format():
    config = replace(CONFIGS["gqa"], seq_len=600)
    sequence = random_tokens(config, 600)
    for kv in ("f32", "f16", "q8"):
        model = Model(config, random_model(config).weights, 1, kv=kv)
        again = pickle.loads(pickle.dumps(model))
        assert again.kv == kv
        cache = model.new_cache()
        cache.forward(sequence[:300])
        grown = cache.forward(sequence).copy()
        np.testing.assert_array_equal(again.new_cache().forward(sequence), grown)


@pytest.mark.parametrize(
    ("settings", "expected_kv"),
    [({}, "f32"), ({"quantize": "target"}, "f16"), ({"kv": "f16"}, "f16"), ({"quantize": "both", "kv": "f32"}, "f32")],
    ids=str,
)
def test_drafts_use_kv_format_of_target(settings, expected_kv):
    """One option determines the output, also in modes where the draft affects it."""
    decoder = SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, **settings)
    again = pickle.loads(pickle.dumps(decoder))
    assert {model.kv for model in (decoder.target, decoder.draft, again.target, again.draft)} == {expected_kv}


@pytest.mark.parametrize("kv", ["fp16", "", None, 16, ["f16"]])
def test_unknown_kv_format_is_rejected(kv):
    with pytest.raises(ValueError, match=r"^kv is .*; expected one of auto, f32, f16, q8$"):
        Model(CONFIGS["gqa"], random_model(CONFIGS["gqa"]).weights, kv=kv)
