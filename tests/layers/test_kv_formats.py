"""The KV cache in fp32 or fp16: what is rounded, the bits that hang on nothing else, and what a user says."""

import pickle
from dataclasses import replace

import numba
import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.loaders.model_lookup import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant import BF16, FP32, INT8
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES, load, load_either, portable_store_either, put_either, store, store_either
from specdec.sampling import Sampling
from tests.model.test_architectures import FAMILIES
from tests.model.test_architectures import random_tensors as family_tensors
from tests.tools import reference
from tests.tools.checkpoint_files import random_tensors
from tests.tools.random_models import CONFIGS, THREADS, continuation, random_model, run_in_blocks, tokens_for


@numba.njit
def narrowed(native, portable, single, widened, x):
    for at in range(0, x.size, LANES):
        store_either(native, at, load(x, at))
        portable_store_either(portable, at, load(x, at))
        store(widened, at, load_either(native, at))
        for i in range(LANES):
            put_either(single, at + i, x[at + i])


def edges():
    """Every fp16, what lies halfway between two, its neighbours in float32, and what fp16 does not hold."""
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    halves = np.sort(halves[np.isfinite(halves)]).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    x = np.concatenate([halves, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    x = np.concatenate([x, -x, np.float32([65519.996, 65520, 65536, 3e38, np.inf, np.nan, 1e-45, 2**-126, 0.0, -0.0])])
    return np.pad(x, (0, -x.size % LANES))


def test_every_way_to_fp16_rounds_to_nearest_even_and_tells_what_it_does_not_hold():
    x = np.ascontiguousarray(edges())
    native, portable, single = (np.zeros(x.size, np.uint16) for _ in range(3))
    widened = zeros(x.size)
    narrowed(native, portable, single, widened, x)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    is_held = np.isfinite(expected)
    assert (~is_held).sum() == 5
    for bits in (native, portable, single):
        np.testing.assert_array_equal(bits[is_held], expected.view(np.uint16)[is_held])
        assert np.isnan(bits.view(np.float16)[~is_held]).all()
    np.testing.assert_array_equal(widened[is_held], expected[is_held].astype(np.float32))


@pytest.mark.campaign
@pytest.mark.parametrize("kv", ["f16", "q8"])
@pytest.mark.parametrize("kind", [FP32, BF16, INT8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_fewer_bits_hang_on_no_batch_and_no_thread(name, kind, kv):
    config = CONFIGS[name]
    tokens = tokens_for(config, 70)
    tensors = random_tensors(config, 1, 0.1)
    if kind is BF16:
        tensors = {name: (tensor.view(np.uint32) >> 16).astype(np.uint16) for name, tensor in tensors.items()}
    weights = architecture_of(config).pack(config, tensors, None if kind is BF16 else kind)
    expected = run_in_blocks(Transformer(config, weights, 1, kv=kv), tokens, 1)
    for n_threads in THREADS:
        model = Transformer(config, weights, n_threads, kv=kv)
        for block in (2, 3, 8, 9, 64):
            np.testing.assert_array_equal(run_in_blocks(model, tokens, block), expected)


@pytest.mark.parametrize("kv", ["f16", "q8"])
@pytest.mark.parametrize("name", ["everything", "gpt2, odd", "qwen3, heads across strips", "gpt-oss", "all norms of the whole"])
def test_keys_and_values_are_rounded_and_nothing_else(name, kv):
    """Against the oracle that rounds them, which is far nearer than the one that does not; trees keep what chains have."""
    config = FAMILIES[name]
    tensors, text = family_tensors(config), tokens_for(config, 40)
    model = Transformer(config, architecture_of(config).pack(config, tensors), 1, kv=kv)
    got = run_in_blocks(model, text, 7)
    rounding = {"f16": np.float16, "q8": reference.bytes_of}[kv]
    rounded, exact = (reference.forward(config, tensors, text, kept=kept) for kept in (rounding, np.float64))
    assert np.median(np.abs(got - rounded)) < np.median(np.abs(got - exact)) / 10
    nodes, parents = [4, 5, 6, 7, 8], [-1, 0, -1, 2, 2]
    logits = model.forward_tree(text[:20], nodes, parents).copy()
    model.keep([2, 4])
    np.testing.assert_array_equal(model.forward([*text[:20], 6, 8], 1)[0], logits[5])
    model.forward([], 0)
    np.testing.assert_array_equal(model.forward([*text[:20], 6, 8], 1)[0], logits[5])


def test_a_key_or_value_beyond_fp16_makes_nan_and_no_smaller_number():
    config = CONFIGS["gqa"]
    for name in ("wk", "wv"):
        tensors = random_tensors(config, 1)
        tensors[name] *= 1e6
        weights = architecture_of(config).pack(config, tensors)
        assert np.isfinite(Transformer(config, weights, 1).forward([1, 2], 1)).all()
        halved = Transformer(config, weights, 1, kv="f16")
        assert np.isnan(halved.forward([1, 2], 1)).all()
        with pytest.raises(ValueError, match=r"not finite: .* too large for f16 \(kv='f32' holds them\)$"):
            continuation(halved, None, Sampling(0))


def test_a_key_or_value_that_is_not_finite_stays_so_in_bytes_and_zeros_are_zeros():
    config = CONFIGS["gqa"]
    tensors = random_tensors(config, 1)
    for name in ("wk", "wv"):
        for factor, is_finite in ((1e6, True), (0.0, True), (np.inf, False), (np.nan, False)):
            with np.errstate(invalid="ignore"):
                changed = tensors | {name: np.where(tensors[name] == tensors[name].flat[0], np.float32(factor), tensors[name])}
            if np.isfinite(factor):
                changed = tensors | {name: tensors[name] * np.float32(factor)}
            model = Transformer(config, architecture_of(config).pack(config, changed), 1, kv="q8")
            assert np.isfinite(model.forward([1, 2], 1)).all() == is_finite


def test_the_cache_is_f32_where_all_weights_are_and_half_as_large_else():
    config = replace(CONFIGS["gqa"], seq_len=4096)
    f32, int8 = random_model(config), random_model(config, INT8)
    assert (f32.kv, int8.kv) == ("f32", "f16")
    halved = Transformer(config, f32.weights, 1, kv="f16")
    cached = 2 * 4 * config.n_layers * config.n_kv_heads * (config.head_dim + 32) // 2 * 4096  # values fill strips of 32
    assert cached / 2 <= f32.text_bytes(4096) - halved.text_bytes(4096) < cached / 2 * 1.05
    assert halved._buffers.keys.nbytes * 2 == f32._buffers.keys.nbytes
    quarter = Transformer(config, f32.weights, 1, kv="q8")
    assert quarter._buffers.keys.nbytes * 4 == f32._buffers.keys.nbytes
    scales = 2 * 4 * config.n_layers * config.n_kv_heads * 4096
    assert cached / 4 - scales < halved.text_bytes(4096) - quarter.text_bytes(4096) < cached / 4


def test_a_pickled_model_and_one_that_grows_keep_the_cache_they_have():
    config = replace(CONFIGS["gqa"], seq_len=600)
    text = tokens_for(config, 600)
    for kind in ("f32", "f16", "q8"):
        model = Transformer(config, random_model(config).weights, 1, kv=kind)
        again = pickle.loads(pickle.dumps(model))
        assert again.kv == kind
        grown = model.forward(text[:300]) is not None and model.forward(text).copy()
        np.testing.assert_array_equal(again.forward(text), grown)


@pytest.mark.parametrize(
    ("said", "kept"),
    [({}, "f32"), ({"quantize": "target"}, "f16"), ({"kv": "f16"}, "f16"), ({"quantize": "both", "kv": "f32"}, "f32")],
    ids=str,
)
def test_drafts_keep_what_their_target_keeps(said, kept):
    """So one word says what a text hangs on, in the modes whose text a draft changes too."""
    decoder = SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, **said)
    again = pickle.loads(pickle.dumps(decoder))
    assert {model.kv for model in (decoder.target, decoder.draft, again.target, again.draft)} == {kept}


@pytest.mark.parametrize("kv", ["fp16", "", None, 16, ["f16"]])
def test_another_cache_is_refused(kv):
    with pytest.raises(ValueError, match=r"^kv is .*; expected one of auto, f32, f16, q8$"):
        Transformer(CONFIGS["gqa"], random_model(CONFIGS["gqa"]).weights, kv=kv)
