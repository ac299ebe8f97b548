"""Loading of GGUF files: the result equals that of the package gguf and of the converted folder, or the file is rejected."""

import math
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.families import load_definitions
from specdec.families.family import GGUFFamily
from specdec.layers.rope import compute_positions_per_radian
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.gguf_blocks import BlockTensor
from specdec.loaders.gguf_checkpoint import GGUFModel
from specdec.loaders.gguf_file import GGUFFile
from specdec.loaders.head_checkpoint import load_mtp_head
from specdec.loaders.model_loader import load_model
from specdec.model import get_architecture
from specdec.model.model import Model
from specdec.model_config import Llama3RopeScaling, ModelConfig
from specdec.quant.gguf_repacking import BLOCK_TYPES, WEIGHT_FORMATS, dequantize
from specdec.quant.packed_matrix import GGUFBlockRows, pack_matrix
from specdec.runtime.memory import all_finite
from tests.tools import hf_folders
from tests.tools.block_tensors import block_model
from tests.tools.checkpoint_files import limit_memory
from tests.tools.configs import make_gemma3_layers, override_full_layers, replace_config
from tests.tools.gguf_files import (
    BLOCK_SIZES,
    CONVERTED,
    NAMES,
    TYPE_IDS,
    Keys,
    RawTensor,
    TypedValue,
    encode_string,
    encode_value,
    gguf_bytes,
    header_bytes,
    make_model_keys,
    make_model_tensors,
    make_split_files,
    random_blocks,
    read_converted,
    rope_divisors,
    write_model,
    write_parts,
)
from tests.tools.half_precision import widen_exactly
from tests.tools.hf_folders import CONFIGS, FIXTURES, assert_rejected, assert_same_tensors, get_error, read_all_tensors

PACKAGE = FIXTURES / "gguf"


# Models


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
def test_dequantized_blocks_equal_those_of_the_package(type_name: str) -> None:
    with np.load(PACKAGE / "blocks.npz") as file:
        blocks, floats = file[type_name], file[f"{type_name}_floats"]
    assert blocks.shape[1] == BLOCK_TYPES[type_name].n_bytes and floats.shape[1] == BLOCK_TYPES[type_name].layout.block_columns
    np.testing.assert_array_equal(dequantize(GGUFBlockRows(type_name, blocks)), floats, strict=True)
    np.testing.assert_array_equal(dequantize(GGUFBlockRows(type_name, blocks.reshape(2, -1))), floats.reshape(2, -1), strict=True)


def test_a_file_written_by_the_package_is_read() -> None:
    file = GGUFFile(PACKAGE / "package.gguf")
    expected_keys = {
        "general.architecture": "llama", "llama.block_count": 3, "llama.attention.layer_norm_rms_epsilon": 1e-5, "a.truth": True,
        "a.number": -(2**40), "a.float": 0.1, "tokenizer.ggml.tokens": ["<unk>", "é", "\u2581the", ""],
        "tokenizer.ggml.scores": [0.0, -1.5, -2.0, 0.25], "a.list": [1, 2, 3],
    }  # fmt: skip
    assert {key: file.metadata[key] for key in expected_keys} == expected_keys
    with np.load(PACKAGE / "package.npz") as expected:
        assert set(file.entries) == set(expected)
        for name, floats in expected.items():
            np.testing.assert_array_equal(widen_exactly(file.get_tensor(name)[:]), floats)


def write_fixture(folder: Path, name: str, version: int = 3, **changes: Any) -> Path:
    """Write a fixture as a GGUF file, with changes to its keys."""
    path = folder / f"{name}.gguf"
    path.write_bytes(gguf_bytes(make_model_keys(name) | changes, make_model_tensors(name), version))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_equals_its_folder_bit_by_bit(tmp_path: Path, name: str) -> None:
    """Includes permuted and fused rows of heads, as each architecture stores them."""
    checkpoint, folder = load_checkpoint(write_fixture(tmp_path, name)), load_checkpoint(FIXTURES / name)
    expected, got = read_all_tensors(folder), read_all_tensors(checkpoint)
    config = folder.config
    if isinstance(config.rope.scaling, Llama3RopeScaling):
        config = replace_config(config, rope_scaling=None, rope_divisors=tuple(map(float, rope_divisors(config))))
    assert checkpoint.config == config
    assert set(got) == set(expected)
    for key, wide in expected.items():
        if got[key].dtype != wide.dtype:  # vectors are fp32 in GGUF
            wide = widen_exactly(wide)
        np.testing.assert_array_equal(got[key], wide, strict=True)


def load_fp32_kv_model(path: Path) -> Model:
    """Load a model with an fp32 KV cache, as in transformers."""
    checkpoint = load_checkpoint(path)
    weights = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors).pack()
    return Model(checkpoint.config, weights, kv="f32")


MODEL_NAMES = [
    "llama3",
    "qwen3",
    "granite_hybrid",
    "smollm3",
    "phi3",
    "ministral3",
    "gemma3",
    "gemma3_half",
    "lfm2",
    "lfm2_odd",
    "qwen35",
]


@pytest.mark.parametrize("name", [*MODEL_NAMES, "qwen35_images", "gpt2"])
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    """llama3 has frequency factors in the file instead of a formula."""
    expected, model = hf_folders.load_expected(name), load_fp32_kv_model(write_fixture(tmp_path, name))
    difference = np.abs(model.new_cache().forward(expected.tokens, len(expected.tokens)) - expected.logits).max(1)
    assert (difference / np.abs(expected.logits).max(1)).max() < 3e-5


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_and_any_alignment_are_read(tmp_path: Path, version: int) -> None:
    expected = load_checkpoint(write_fixture(tmp_path, "llama_tied", version))
    keys = make_model_keys("llama_tied") | {"general.alignment": 256}
    path = tmp_path / "no-suffix"
    path.write_bytes(gguf_bytes(keys, make_model_tensors("llama_tied"), version, 256))
    assert_same_tensors(load_checkpoint(path), expected)


def test_per_layer_lists_of_equal_numbers_are_supported(tmp_path: Path) -> None:
    """The converter writes a dense Granite 4 like this."""
    keys, config = make_model_keys("granite_hybrid"), CONFIGS["granite_hybrid"]
    for key in ("attention.head_count_kv", "attention.head_count", "feed_forward_length"):
        keys[f"granite.{key}"] = [keys[f"granite.{key}"]] * config.n_layers
    assert load_checkpoint(write_model(tmp_path, keys, make_model_tensors("granite_hybrid"))).config == config


def test_an_mtp_head_without_its_layer_is_rejected(tmp_path: Path) -> None:
    tensors = {name: each for name, each in make_model_tensors("qwen35").items() if not name.startswith("blk.")}
    keys = make_model_keys("qwen35") | {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    path = write_model(tmp_path, keys, tensors).rename(tmp_path / "mtp-model.gguf")
    with pytest.raises(CheckpointError, match=r"has no tensor blk\.\d+\."):
        load_checkpoint(path)


def test_a_layer_of_the_model_is_not_taken_for_an_mtp_head(tmp_path: Path) -> None:
    path = write_fixture(tmp_path, "qwen35_odd", **{"qwen35.nextn_predict_layers": 1})
    with pytest.raises(CheckpointError, match=r"nextn_predict_layers is 1; the layer of blk\.2\..* is one of the model's own"):
        load_checkpoint(path)


def test_missing_keys_have_defaults(tmp_path: Path) -> None:
    keys = make_model_keys("llama")
    for key in ("attention.head_count_kv", "rope.freq_base", "attention.key_length", "attention.value_length", "vocab_size"):
        del keys[f"llama.{key}"]
    assert load_checkpoint(write_model(tmp_path, keys, make_model_tensors("llama"))).config == CONFIGS["llama"]


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4),
        ({"rope.scaling.factor": 4.0}, 4),
        ({"rope.scale_linear": 2.0}, 2),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, 1),
    ],
)
def test_linear_scaling_divides_all_angles_by_the_factor(tmp_path: Path, changes: Keys, factor: int) -> None:
    config = load_checkpoint(write_fixture(tmp_path, "llama", **{f"llama.{key}": value for key, value in changes.items()})).config
    np.testing.assert_array_equal(compute_positions_per_radian(config), factor * compute_positions_per_radian(CONFIGS["llama"]))


def test_yarn_extends_the_context_and_linear_scaling_does_not(tmp_path: Path) -> None:
    """Without an original length, the context is the original one, as in llama.cpp."""
    for scaling, original, context in (("yarn", 64, 256), ("yarn", None, 512), ("yarn", 32, 128), ("linear", 64, 128)):
        keys = {"type": scaling, "factor": 4.0, "original_context_length": original}
        path = write_fixture(tmp_path, "llama", **{f"llama.rope.scaling.{key}": value for key, value in keys.items() if value})
        assert load_checkpoint(path).config.seq_len == context, keys


def test_gemma_3_keys_are_interpreted_like_llama_cpp(tmp_path: Path) -> None:
    """Full-attention layers from a list or an interval, RoPE of the other layers, and the score scale of the largest model."""
    config = CONFIGS["gemma3"]
    for changes, others in (
        (
            {"attention.sliding_window_pattern": [True, False, True, True, True, False, True]},
            {"layers": make_gemma3_layers((1, 5), 7)},
        ),
        ({"attention.sliding_window_pattern": 2}, {"layers": make_gemma3_layers((1, 3, 5), 7)}),
        ({"attention.sliding_window": 0}, {"layers": make_gemma3_layers(range(7), 7), "window": 0}),
        ({"rope.freq_base_swa": 500.0}, {"rope_theta": 500.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"layers": make_gemma3_layers((5,), 7, (8.0,) * 3)}),
    ):
        keys = {f"gemma3.{key}": value for key, value in changes.items()}
        assert load_checkpoint(write_fixture(tmp_path, "gemma3", **keys)).config == replace_config(config, **others), changes
    tensors = make_model_tensors("gemma3_half")
    for i in range(5, 62):
        tensors |= {name.replace("blk.0.", f"blk.{i}."): each for name, each in tensors.items() if name.startswith("blk.0.")}
    path = write_model(tmp_path, make_model_keys("gemma3_half") | {"gemma3.block_count": 62}, tensors)
    assert load_checkpoint(path).config.attention.scale == pytest.approx((22 / 2) ** -0.5)
    bias = {"blk.0.attn_output.bias": np.zeros(22, np.float32)}
    write_model(tmp_path, make_model_keys("gemma3_half"), make_model_tensors("gemma3_half") | bias)
    assert "blk.0.attn_output.bias" in get_refusal(path)
    for words, change in (
        ("sliding_window_pattern", {"gemma3.attention.sliding_window_pattern": [True] * 6}),
        ("sliding_window_pattern", {"gemma3.attention.sliding_window_pattern": [1] * 7}),
        ("freq_base_swa", {"gemma3.rope.freq_base_swa": 0.5}),
        ("key_length_swa", {"gemma3.attention.key_length_swa": 4}),
        ("scaling.type", {"gemma3.rope.scaling.type": "yarn"}),
        ("final_logit_softcapping", {"gemma3.final_logit_softcapping": 30.0}),
    ):
        assert words in get_refusal(write_fixture(tmp_path, "gemma3", **change))


def test_a_classifier_equal_to_the_embedding_is_shared(tmp_path: Path) -> None:
    keys, tensors = make_model_keys("gpt2"), make_model_tensors("gpt2")
    path = write_model(tmp_path, keys, tensors | {"output.weight": tensors["token_embd.weight"]})
    assert load_checkpoint(path).config.shared_classifier
    write_model(tmp_path, keys, tensors | {"output.weight": tensors["token_embd.weight"] * 2})
    checkpoint = load_checkpoint(path)
    assert not checkpoint.config.shared_classifier
    np.testing.assert_array_equal(checkpoint.tensors["wcls"][:], 2 * checkpoint.tensors["tok_emb"][:])


# Blocks


def dequantize_all(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the same tensors, dequantized."""
    return {
        name: dequantize(GGUFBlockRows(tensor.type, np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)))
        if isinstance(tensor, RawTensor)
        else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("a", ["llama", "qwen2", "gpt2"])
def test_quantized_tensors_have_the_same_row_order_as_floats(tmp_path: Path, a: str) -> None:
    keys, tensors = block_model(a, np.random.default_rng(3))
    floats = load_checkpoint(write_model(tmp_path, keys, dequantize_all(tensors)).rename(tmp_path / "floats.gguf")).tensors
    blocks = load_checkpoint(write_model(tmp_path, keys, tensors)).tensors
    type_names = set()
    for name, whole in floats.items():
        for tensor, expected in zip(*(each if isinstance(each, list) else [each] for each in (blocks[name], whole)), strict=True):
            np.testing.assert_array_equal(tensor[:], expected[:], strict=True)
            if isinstance(tensor, BlockTensor):
                type_names.add(tensor.type)
                n = tensor.shape[0]
                blocks_slice = tensor.read_blocks(n // 3, n // 2)
                assert blocks_slice.raw_bytes.flags.c_contiguous and blocks_slice.raw_bytes.dtype == np.uint8
                np.testing.assert_array_equal(dequantize(blocks_slice), expected[n // 3 : n // 2])
                np.testing.assert_array_equal(tensor[n // 3 : n // 2], expected[n // 3 : n // 2])
    assert len(type_names) > 4


def write_raw_tensor(folder: Path, type_name: str, data: bytes | bytearray) -> Any:
    """Write a model with one more tensor, of 72 rows and 256 columns, and return that tensor."""
    tensors = make_model_tensors("llama_tied") | {"x": RawTensor(type_name, (72, 256), bytes(data))}
    return GGUFFile(write_model(folder, make_model_keys("llama_tied"), tensors)).get_tensor("x")


def test_mxfp4_exponents_out_of_fp16_range_are_rejected_unless_the_block_is_zero(tmp_path: Path) -> None:
    cases = (103, 1, False), (144, 1, False), (255, 7, False), (104, 1, True), (143, 9, True), (0, 0x88, True)
    for exponent, codes, is_valid in cases:
        data = bytearray(random_blocks(np.random.default_rng(0), "MXFP4", 72, 256).data)
        data[-17:] = bytes([exponent] + [codes] * 16)
        tensor = write_raw_tensor(tmp_path, "MXFP4", data)
        if is_valid:
            assert np.isfinite(tensor[:]).all()
        else:
            with pytest.raises(CheckpointError, match=r'model\.gguf is damaged: "x" holds scales below 2\^-24 or above 2\^15'):
                tensor[:]


@pytest.mark.parametrize("scale", [0x7F, 0x80, 0xFF])
def test_nvfp4_scales_that_are_nan_or_negative_are_rejected(tmp_path: Path, scale: int) -> None:
    data = bytearray(random_blocks(np.random.default_rng(0), "NVFP4", 72, 256).data)
    data[-33] = scale
    tensor = write_raw_tensor(tmp_path, "NVFP4", data)
    tensor[0:71]
    with pytest.raises(CheckpointError, match=r'model\.gguf is damaged: "x" holds NaN or negative scales'):
        tensor[:]


SCALED_SHAPES = {"token_embd": (40, 128), "blk.0.attn_q": (128, 128), "blk.0.ffn_up_exps": (3, 64, 128)}


def make_scaled_tensors() -> dict[str, Any]:
    """Return NVFP4 tensors with a scale of each matrix, and input scales."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, (*lengths, n) in SCALED_SHAPES.items():
        blocks = random_blocks(rng, "NVFP4", math.prod(lengths), n)
        tensors[f"{name}.weight"] = blocks._replace(shape=(*lengths, n))
        for kind in ("scale", "input_scale"):
            tensors[f"{name}.{kind}"] = rng.random(lengths[0] if len(lengths) > 1 else 1, np.float32) + np.float32(0.01)
    return tensors


def test_a_scale_of_a_tensor_multiplies_the_scales_of_its_groups(tmp_path: Path) -> None:
    """The matrices of experts have one each. Includes slices and selected rows, and the packed matrix."""
    tensors = make_scaled_tensors()
    model = GGUFModel(write_model(tmp_path, make_model_keys("llama_tied"), tensors))
    for name, shape in SCALED_SHAPES.items():
        blocks = np.frombuffer(tensors[f"{name}.weight"].data, np.uint8).reshape(-1, 36)
        scales = np.repeat(tensors[f"{name}.scale"], len(blocks) // len(tensors[f"{name}.scale"]))
        expected = dequantize(GGUFBlockRows("NVFP4", blocks, scales)).reshape(-1, shape[-1])
        unscaled = dequantize(GGUFBlockRows("NVFP4", blocks)) * scales[:, None]
        np.testing.assert_allclose(expected, unscaled.reshape(expected.shape), rtol=2e-7)
        tensor = model.get_tensor(f"{name}.weight", shape)
        np.testing.assert_array_equal(tensor[:], expected)
        np.testing.assert_array_equal(tensor.slice_rows(30, 40)[3:], expected[33:40])
        np.testing.assert_array_equal(tensor.select_rows(np.array([39, 2, 1]))[:2], expected[[39, 2]])
        matrix = pack_matrix([tensor], WEIGHT_FORMATS["NVFP4"])
        np.testing.assert_array_equal(matrix[: len(expected)], expected)
    model.check_all_used()


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (np.ones(2, np.float32), r"has the shape \(2,\)"),
        (np.full(1, np.inf, np.float32), "NaN or infinite"),
        (np.full(1, 4096, np.float32), "holds 4096.0; expected at most 2048"),
        (RawTensor("Q8_0", (1, 32), bytes(34)), r"has the shape \(1, 32\)"),
    ],
)
def test_a_scale_of_a_tensor_is_one_finite_number(tmp_path: Path, scale: Any, problem: str) -> None:
    path = write_model(tmp_path, make_model_keys("llama_tied"), make_scaled_tensors() | {"blk.0.attn_q.scale": scale})
    with pytest.raises(CheckpointError, match=f"blk.0.attn_q.scale.*{problem}"):
        GGUFModel(path).get_tensor("blk.0.attn_q.weight", SCALED_SHAPES["blk.0.attn_q"])


def test_a_scale_of_a_tensor_of_another_type_is_rejected(tmp_path: Path, small: tuple[Keys, dict[str, Any]]) -> None:
    keys, tensors = small
    path = write_model(tmp_path, keys, tensors | {"blk.0.attn_q.scale": np.ones(1, np.float32)})
    assert '"blk.0.attn_q.scale" is not part of the model' in get_refusal(path)


def test_infinite_scales_are_rejected(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    for type_name in BLOCK_SIZES:
        for at in BLOCK_TYPES[type_name].scale_offsets:
            for bits in (0x7C00, 0xFC00, 0x7E01):
                data = bytearray(random_blocks(rng, type_name, 72, 256).data)
                offset = len(data) - BLOCK_SIZES[type_name][1] + at
                data[offset : offset + 2] = struct.pack("<H", bits)
                tensor = write_raw_tensor(tmp_path, type_name, data)
                tensor[0:1]
                with pytest.raises(CheckpointError, match=r'model\.gguf is damaged: "x" holds NaN or infinite scales'):
                    tensor[:]


# Shards


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_split_model_equals_the_whole_one(tmp_path: Path, n: int) -> None:
    path = write_parts(tmp_path, make_split_files(make_model_keys("qwen3"), make_model_tensors("qwen3"), n))
    assert_same_tensors(load_checkpoint(path), load_checkpoint(write_fixture(tmp_path, "qwen3")))


def test_an_incomplete_split_is_rejected_with_the_shard(tmp_path: Path) -> None:
    keys, tensors = make_model_keys("llama"), make_model_tensors("llama")
    shards = make_split_files(keys, tensors, 3)
    first = write_parts(tmp_path, shards)
    second = first.with_name("model-00002-of-00003.gguf")
    assert_rejected(second, "later shard", "model-00001-of-00003.gguf")
    second.write_bytes(shards[2])
    assert "split.no is 2; expected 1" in get_refusal(first)
    second.write_bytes(make_split_files(keys, tensors | {"output_norm.weight": tensors["output_norm.weight"]}, 2)[1])
    assert "holds the tensor" in get_refusal(first)
    second.unlink()
    assert "model-00002-of-00003.gguf is missing" in get_refusal(first)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(shards[0])
    assert "-00001-of-00003.gguf" in get_refusal(alone)


# Invalid files


@pytest.fixture(autouse=True, scope="module")
def compile_finite_check() -> None:
    """Compile the check for finite numbers first; it takes more memory than an error may."""
    assert all(all_finite(np.zeros(1, dtype)) for dtype in (np.float32, np.float16, np.uint16))


def get_refusal(path: Path) -> str:
    """Return the error message: one short line that names the file's folder, raised quickly and with little memory."""
    begin = time.monotonic()
    with limit_memory(2**24):
        message = get_error(lambda: read_all_tensors(load_checkpoint(path)))
    assert time.monotonic() - begin < 5
    assert str(path.parent) in message
    assert len(message.partition("; supported: ")[0]) < 300 + 2 * len(str(path))
    return message


@pytest.fixture
def small() -> tuple[Keys, dict[str, Any]]:
    return make_model_keys("llama_tied"), make_model_tensors("llama_tied")


def cuts(size: int, header: int) -> Iterator[int]:
    yield from range(0, header, 7)
    yield from range(header, size, 997)
    yield size - 33


def test_a_truncated_file_is_rejected(tmp_path: Path, small: tuple[Keys, dict[str, Any]]) -> None:
    data, header = gguf_bytes(*small), len(header_bytes(*small))
    path = tmp_path / "model.gguf"
    for cut in cuts(len(data), header):
        path.write_bytes(data[:cut])
        message = get_refusal(path)
        assert any(word in message for word in ("truncated", "damaged", "is empty", "not a GGUF file")), (cut, message)


def test_unsupported_types_are_reported_by_name(tmp_path: Path, small: tuple[Keys, dict[str, Any]]) -> None:
    path, name = tmp_path / "model.gguf", b"blk.1.attn_q.weight"
    names = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S"}
    names |= {22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 28: "F64", 29: "IQ1_M"}
    unknown = {number: f"number {number}" for number in (*range(100),) if number not in {*names, *TYPE_IDS.values()}}
    for number, type_name in (names | unknown).items():
        data = bytearray(gguf_bytes(*small))
        at = data.index(name) + len(name) + 4 + 16
        data[at : at + 4] = struct.pack("<I", number)
        path.write_bytes(data)
        expected = f"is of type {type_name}, which is not supported; download or convert the model again as Q4_K_M or Q4_0"
        assert f'"blk.1.attn_q.weight" {expected}; supported: F32' in get_refusal(path)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


HUGE = (2**60, 2**63, 2**64 - 1, 2**40)


def test_huge_counts_are_rejected_quickly(tmp_path: Path, small: tuple[Keys, dict[str, Any]]) -> None:
    path, data = tmp_path / "model.gguf", gguf_bytes(*small)
    key, name = data.index(b"general.architecture"), data.index(b"blk.1.attn_q.weight")
    offsets = {8: "tensors", 16: "keys", key - 8: "name", key + 24: "", name - 8: "name", name + 23: "", name + 31: ""}
    for at, word in offsets.items():
        for n in HUGE:
            path.write_bytes(data[:at] + u64(n) + data[at + 8 :])
            assert word in get_refusal(path)
    for type_name in (8, 4, 7, 9, 77):
        for n in HUGE:
            array = struct.pack("<IIQ", 9, type_name, n)
            path.write_bytes(data[:16] + u64(len(small[0]) + 1) + encode_string("a.list") + array + data[24:])
            assert "a.list" in get_refusal(path)


L = "llama."
BAD_KEYS: dict[str, tuple[Keys, tuple[str, ...]]] = {
    "no architecture": ({"general.architecture": None}, ("general.architecture", "qwen3")),
    "an unknown architecture": ({"general.architecture": "mamba"}, ("mamba", "qwen3")),
    "an architecture that is a number": ({"general.architecture": 5}, ("general.architecture", "5")),
    "no layers": ({L + "block_count": None}, ("llama.block_count",)),
    "more layers": ({L + "block_count": 3}, ("blk.2.",)),
    "fewer layers": ({L + "block_count": 1}, ("not part of",)),
    "layers beyond bounds": ({L + "block_count": TypedValue(10, 2**60)}, ("llama.block_count",)),
    "layers in words": ({L + "block_count": "two"}, ("llama.block_count", "two")),
    "a boolean of layers": ({L + "block_count": True}, ("llama.block_count", "true")),
    "heads by layer": ({L + "attention.head_count": [4, 2]}, ("llama.attention.head_count", "[4, 2]")),
    "heads of no layer": ({L + "attention.head_count": TypedValue(9, [], 5)}, ("llama.attention.head_count", "[]")),
    "too few heads": ({L + "attention.head_count_kv": [2]}, ("llama.attention.head_count_kv", "[2]")),
    "no heads": ({L + "attention.head_count": 0}, ("llama.attention.head_count",)),
    "odd heads": ({L + "attention.head_count_kv": 3}, ("n_kv_heads",)),
    "a head beyond all": ({L + "attention.key_length": 2**31 - 2}, ("key_length", "1048576")),
    "a width beyond all": ({L + "embedding_length": 2**31 - 2}, ("embedding_length", "1048576")),
    "another width": ({L + "embedding_length": 64}, ("shape",)),
    "an eps of NaN": ({L + "attention.layer_norm_rms_epsilon": math.nan}, ("epsilon", "NaN")),
    "an eps in words": ({L + "attention.layer_norm_rms_epsilon": "1e-5"}, ("epsilon",)),
    "an infinite base": ({L + "rope.freq_base": math.inf}, ("rope.freq_base",)),
    "half a head rotated": ({L + "rope.dimension_count": 4}, ("rope.dimension_count", "8")),
    "another scaling": ({L + "rope.scaling.type": "longrope"}, ("longrope", "linear")),
    "yarn that shortens": ({L + "rope.scaling.type": "yarn", L + "rope.scaling.factor": 0.5}, ("rope.scaling.factor is 0.5",)),
    "yarn by half": ({L + "rope.scaling.type": "yarn", L + "rope.scaling.yarn_ext_factor": 0.5}, ("yarn_ext_factor",)),
    "a scale of queries": ({L + "attention.temperature_scale": 0.1}, ("temperature_scale",)),
    "experts": ({L + "expert_count": 8}, ("llama.expert_used_count",)),
    "more chosen than there are": ({L + "expert_count": 4, L + "expert_used_count": 5}, ("n_experts_used is 5",)),
    "a window": ({L + "attention.sliding_window": 16}, ("sliding_window",)),
    "another vocabulary": ({L + "vocab_size": 71}, ("vocab_size", "72")),
    "fewer tokens": ({"tokenizer.ggml.tokens": ["a"] * 71}, ("71", "72")),
    "an odd alignment": ({"general.alignment": 24}, ("general.alignment", "24")),
    "no alignment": ({"general.alignment": 0}, ("general.alignment",)),
    "an alignment in words": ({"general.alignment": "32"}, ("general.alignment",)),
    "splits in words": ({"split.count": "3"}, ("split.count",)),
    "splits beyond bounds": ({"split.count": TypedValue(10, 2**60)}, ("split.count",)),
    "tensors of other shards": ({"split.tensors.count": 5}, ("split.tensors.count", "5")),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_invalid_keys_are_reported_by_name(tmp_path: Path, small: tuple[Keys, dict[str, Any]], case: str) -> None:
    changes, words = BAD_KEYS[case]
    message = get_refusal(write_model(tmp_path, small[0] | changes, small[1]))
    assert all(word in message for word in words), message


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


def with_other(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update(changes)


NAN = np.full(32, np.nan, np.float32)
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "missing": (without("blk.1.ffn_up.weight"), ("blk.1.ffn_up.weight",)),
    "no embedding": (without("token_embd.weight"), ("token_embd.weight",)),
    "one too many": (with_other(**{"blk.0.extra.weight": NAN}), ("blk.0.extra.weight", "not part of")),
    "a line in a name": (with_other(**{"a\nb": NAN}), ("a\\nb", "not part of")),
    "half the biases": (with_other(**{"blk.0.attn_q.bias": NAN}), ("no tensor", "bias")),
    "a shape": (with_other(**{"output_norm.weight": NAN[:31]}), ("(31,)", "(32,)")),
    "transposed": (with_other(**{"blk.0.ffn_up.weight": np.zeros((32, 48), np.float16)}), ("(32, 48)",)),
    "NaN": (with_other(**{"output_norm.weight": NAN}), ("output_norm.weight", "NaN")),
    "a vector of blocks": (with_other(**{"output_norm.weight": RawTensor("Q8_0", (32,), bytes(34))}), ("Q8_0",)),
    "half a block": (with_other(**{"output_norm.weight": RawTensor("Q4_K", (2, 128), bytes(144))}), ("256",)),
    "five dimensions": (with_other(x=np.zeros((1,) * 5, np.float32)), ("5 dimensions",)),
    "no rows": (with_other(**{"token_embd.weight": np.zeros((0, 32), np.float32)}), ("(0, 32)", "no dimension of 0")),
    "no columns": (
        with_other(**dict.fromkeys(("token_embd.weight", "output.weight"), RawTensor("F32", (2**40, 0), b""))),
        ("(1099511627776, 0)", "no dimension of 0"),
    ),
    "frequency factors of 0": (with_other(**{"rope_freqs.weight": np.zeros(4, np.float32)}), ("rope's freq_factors",)),
    "frequency factors of another head": (with_other(**{"rope_freqs.weight": np.ones(5, np.float32)}), ("rope_freqs", "(5,)")),
}


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("general.type", "adapter", "holds an adapter (LoRA) alone; merge it"),
        ("general.type", "mmproj", "reads images; name the GGUF file of the model itself"),
        ("general.type", "imatrix", "holds an importance matrix"),
        ("general.architecture", "dflash", "holds a DFlash draft head"),
        ("general.architecture", "clip", "reads images; name the GGUF file of the model itself"),
        (
            "general.architecture",
            "bloom",
            'general.architecture "bloom" is not supported; supported: '
            + ", ".join(sorted(each.name for each in load_definitions(GGUFFamily))),
        ),
    ],
)
def test_the_error_about_a_file_without_a_model_says_what_it_contains(
    tmp_path: Path, small: tuple[Keys, dict[str, Any]], key: str, value: str, word: str
) -> None:
    assert word in get_refusal(write_model(tmp_path, small[0] | {key: value}, small[1]))


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_invalid_tensors_are_reported_by_name(tmp_path: Path, small: tuple[Keys, dict[str, Any]], case: str) -> None:
    change, words = BAD_TENSORS[case]
    change(small[1])
    message = get_refusal(write_model(tmp_path, *small))
    assert all(word in message for word in words), message


def test_duplicate_overlapping_or_unaligned_entries_are_rejected(tmp_path: Path, small: tuple[Keys, dict[str, Any]]) -> None:
    path, data = tmp_path / "model.gguf", gguf_bytes(*small)
    path.write_bytes(data.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"))
    assert "twice" in get_refusal(path)
    block = encode_string("llama.block_count") + encode_value(2)
    path.write_bytes(data[:16] + u64(len(small[0]) + 1) + block + data[24:])
    assert "twice" in get_refusal(path)
    name = b"blk.1.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16 + 4
    (offset,) = struct.unpack_from("<Q", data, at)
    for wrong_offset, word in ((offset + 4, "multiple"), (offset - 32, "overlaps"), (2**62, "truncated"), (0, "overlaps")):
        path.write_bytes(data[:at] + u64(wrong_offset) + data[at + 8 :])
        assert word in get_refusal(path)


def test_other_formats_and_versions_are_identified(tmp_path: Path, small: tuple[Keys, dict[str, Any]]) -> None:
    path, data = tmp_path / "model.gguf", gguf_bytes(*small)
    for version, word in ((1, "version 1"), (4, "version 4"), (3 << 24, "version 50331648")):
        path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
        assert word in get_refusal(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "is a Git LFS pointer in place of the file; run `git lfs pull`" in get_refusal(path)
    path.write_bytes(data[:16] + u64(len(small[0]) + 1) + encode_string("a.flag") + struct.pack("<IB", 7, 2) + data[24:])
    assert "a.flag" in get_refusal(path)
    path.unlink()
    path.mkdir()
    assert "model.gguf" in get_refusal(path)


@pytest.mark.parametrize(
    "special", ["", "x" * 255, "x" * 256, "x" * 70_000, "a\0b", "\0" * 8, "\x01" + "\0" * 7 + "b", "\udcc3", "é日🙂"]
)
def test_strings_of_any_length_and_content_are_read(tmp_path: Path, special: str) -> None:
    """Short ones without zero bytes are read many at once."""
    words = [f"token{i}" for i in range(30_000)]
    for strings in ([special], [special] * 200, [*words, special, *words], [special, *words], [*words, special, special]):
        path = write_model(tmp_path, {"first": strings, "second": words}, {})
        assert GGUFFile(path).metadata == {"first": strings, "second": words}


def test_type_ids_match_the_format() -> None:
    from specdec.loaders.gguf_file import TENSOR_TYPES

    assert {TENSOR_TYPES[number]: number for number in TYPE_IDS.values()} == TYPE_IDS


def test_a_dense_granite_4_of_the_real_converter_has_the_expected_logits() -> None:
    path = FIXTURES / "gguf" / "granite4.gguf"
    assert GGUFFile(path).metadata["granite.attention.head_count_kv"] == [2, 2]
    expected, model = np.load(FIXTURES / "gguf" / "granite4.npz"), load_model(path)
    cache = model.new_cache()
    logits = np.stack([cache.forward(expected["tokens"][: i + 1].tolist())[0].copy() for i in range(len(expected["tokens"]))])
    np.testing.assert_allclose(logits[:, : model.config.vocab_size], expected["logits"], atol=0.02)


@pytest.mark.parametrize("name", CONVERTED)
def test_logits_of_converted_files_equal_those_of_the_folder(name: str) -> None:
    """Bit by bit: matrices keep their format, and vectors are widened to fp32."""
    tokens = hf_folders.load_expected(name).tokens
    logits = [
        load_model(path).new_cache().forward(tokens, 60).copy() for path in (FIXTURES / name, FIXTURES / "gguf" / f"{name}.gguf")
    ]
    np.testing.assert_array_equal(*logits)


def test_the_bias_of_ernies_router_may_be_a_vector(tmp_path: Path) -> None:
    (keys, tensors), name = read_converted("ernie4_5_moe"), "blk.1.exp_probs_b.bias"
    path = write_model(tmp_path, keys, tensors | {name: tensors[name]._replace(shape=(6,))})
    got, expected = (load_checkpoint(each).tensors["1.router_bias"][:] for each in (path, PACKAGE / "ernie4_5_moe.gguf"))
    np.testing.assert_array_equal(got, expected)
    assert name in get_refusal(write_model(tmp_path, keys, tensors | {name: tensors[name]._replace(shape=(2, 3))}))


@pytest.mark.parametrize("name", ["qwen35_moe", "qwen3_next"])
def test_a_dimension_of_1_may_be_dropped_as_llama_cpps_quantizer_does(tmp_path: Path, name: str) -> None:
    keys, tensors = read_converted(name)
    ones = {each: raw._replace(shape=raw.shape[1:]) for each, raw in tensors.items() if raw.shape[:1] == (1,)}
    assert [*ones] == [each for each in tensors if each.endswith("ffn_gate_inp_shexp.weight")]
    got, expected = load_checkpoint(write_model(tmp_path, keys, tensors | ones)), load_checkpoint(PACKAGE / f"{name}.gguf")
    assert_same_tensors(got, expected)
    assert_same_tensors(load_mtp_head(got), load_mtp_head(expected))
    path = write_model(tmp_path, keys, tensors | {each: raw._replace(shape=(8, 4)) for each, raw in ones.items()})
    assert 'ffn_gate_inp_shexp.weight" has the shape (8, 4); the keys say (1, 32)' in get_refusal(path)


def join_key_value_tensors(tensors: dict[str, RawTensor], nope: int) -> dict[str, RawTensor]:
    """Return tensors as older files have them: keys and values of all heads in one matrix."""
    joined = dict(tensors)
    for name in [name for name in tensors if name.endswith("attn_k_b.weight")]:
        other = name.replace("attn_k_b", "attn_v_b")
        keys, values = (np.frombuffer(joined.pop(each).data, np.uint16).reshape(tensors[each].shape) for each in (name, other))
        assert keys.shape[2] == nope
        matrix = np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, values.shape[2])
        joined[name.replace("attn_k_b", "attn_kv_b")] = RawTensor(tensors[name].type, matrix.shape, matrix.tobytes())
    return joined


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite"])
def test_older_files_with_keys_and_values_in_one_matrix_give_the_same_model(tmp_path: Path, name: str) -> None:
    (keys, tensors), latent = read_converted(name), CONFIGS[name].attention.latent
    assert latent
    old_keys = keys | {
        "deepseek2.attention.key_length": latent.head_dim,
        "deepseek2.attention.value_length": latent.value_dim,
        "deepseek2.attention.head_count_kv": CONFIGS[name].n_heads,
    }
    for key in ("key_length_mla", "value_length_mla"):
        del old_keys[f"deepseek2.attention.{key}"]
    joined, expected = join_key_value_tensors(tensors, latent.nope_dim), load_checkpoint(FIXTURES / "gguf" / f"{name}.gguf")
    for written_keys, written in ((old_keys, joined), (keys, joined), (keys, joined | tensors)):
        got = load_checkpoint(write_model(tmp_path, written_keys, written))
        assert got.config == expected.config
        assert_same_tensors(got, expected)
        assert_same_tensors(load_mtp_head(got) or {}, load_mtp_head(expected) or {})


def test_how_experts_are_scored_follows_the_key_or_the_bias_for_the_choice(tmp_path: Path) -> None:
    for name, is_sigmoid in (("deepseek_v2", False), ("deepseek_v3", True), ("glm4_moe_lite", True)):
        keys, tensors = read_converted(name)
        path = write_model(tmp_path, {key: value for key, value in keys.items() if "gating" not in key}, tensors)
        experts = load_checkpoint(path).config.experts
        assert experts and experts.is_sigmoid == is_sigmoid
        write_model(tmp_path, keys | {"deepseek2.expert_gating_func": 3}, tensors)
        assert "deepseek2.expert_gating_func is 3; expected 2" in get_refusal(path)


def test_shared_experts_have_the_size_of_their_tensors(tmp_path: Path) -> None:
    """llama.cpp's converter counts two shared experts of a Ling 2.0 twice, unless its config gives their size."""
    keys, tensors = read_converted("bailing_moe_v2")
    path = write_model(tmp_path, keys | {"bailingmoe2.expert_shared_count": 2}, tensors)
    assert load_checkpoint(path).config == load_checkpoint(PACKAGE / "bailing_moe_v2.gguf").config


def test_a_multimodal_glm_4_is_rejected_by_its_rope_sections(tmp_path: Path) -> None:
    keys, tensors = read_converted("glm4")
    path = write_model(tmp_path, keys | {"glm4.rope.dimension_sections": [2, 1, 0, 0]}, tensors)
    assert "glm4.rope.dimension_sections is [2, 1, 0, 0]" in get_refusal(path)


def test_missing_keys_of_gemma_2_have_the_defaults_of_llama_cpp(tmp_path: Path) -> None:
    (keys, tensors), config = read_converted("gemma2"), CONFIGS["gemma2"]
    window, theta = "gemma2.attention.sliding_window", "gemma2.rope.freq_base_swa"
    for key, value, expected in (
        (window, None, replace_config(config, window=4096)),
        ("gemma2.attn_logit_softcapping", None, replace_config(config, softcap=50.0)),
        ("gemma2.final_logit_softcapping", None, replace_config(config, logit_softcap=30.0)),
        (f"{window}_pattern", 4, replace_config(config, layers=override_full_layers((3,), 4))),
        (theta, 50.0, replace_config(config, rope_theta=50.0, layers=override_full_layers((1, 3), 4, rope_theta=10000.0))),
    ):
        assert load_checkpoint(write_model(tmp_path, keys | {key: value}, tensors)).config == expected, key


def test_sliding_window_layers_of_olmo_3_match_llama_cpp(tmp_path: Path) -> None:
    (keys, tensors), config = read_converted("olmo3"), CONFIGS["olmo3"]
    window, local, full = "olmo2.attention.sliding_window", config.layer_config(0), config.layer_config(3)
    for changes, expected in (
        ({window: None, f"{window}_pattern": None}, [full] * 4),
        ({f"{window}_pattern": None}, [local] * 3 + [full]),
        ({f"{window}_pattern": 2}, [local, full] * 2),
        ({"olmo2.rope.freq_base_swa": None}, [local] * 3 + [full]),
        ({"olmo2.rope.freq_base_swa": 50.0}, [replace_config(local, rope_theta=50.0)] * 3 + [full]),
    ):
        found = load_checkpoint(write_model(tmp_path, keys | changes, tensors)).config
        assert [found.layer_config(i) for i in range(4)] == expected, changes


def test_older_and_newer_qwen3_next_files_give_the_same_delta_nets(tmp_path: Path) -> None:
    """The fused projection, grouped by key head as in the folder: in floats, and in quantized blocks."""
    keys, tensors = read_converted("qwen3_next")
    older = {name: each for name, each in tensors.items() if "attn_qkv" not in name and "attn_gate" not in name}
    for full, (_, array) in hf_folders.read_folder_tensors(FIXTURES / "qwen3_next").items():
        if full.endswith("in_proj_qkvz.weight"):
            older[f"blk.{full.split('.')[2]}.ssm_in.weight"] = array
    assert_same_tensors(load_checkpoint(write_model(tmp_path, keys, older)), load_checkpoint(PACKAGE / "qwen3_next.gguf"))
    blocks = random_blocks(np.random.default_rng(0), "Q8_0", 192, 32)
    path = write_model(tmp_path, keys, older | {"blk.1.ssm_in.weight": blocks})
    heads = dequantize(GGUFBlockRows("Q8_0", np.frombuffer(blocks.data, np.uint8).reshape(192, -1))).reshape(2, 96, 32)
    np.testing.assert_array_equal(load_checkpoint(path).tensors["1.delta_z"][30:40], heads[:, 64:].reshape(64, 32)[30:40])


def test_the_layers_of_a_laguna_follow_its_keys(tmp_path: Path) -> None:
    """YaRN's factor is the file's own; each fourth layer from the first on has no window, unless a key differs."""
    keys, tensors = read_converted("laguna")

    def read(**changes: Any) -> ModelConfig:
        changed = keys | {f"laguna.{key.replace('__', '.')}": value for key, value in changes.items()}
        return load_checkpoint(write_model(tmp_path, changed, tensors)).config

    assert read() == read(expert_gating_func=None) == CONFIGS["laguna"]
    computed = read(rope__scaling__yarn_attn_factor=None).rope.attention_factor
    assert computed == float(np.float32(1 + 0.1 * math.log(8)))
    key, windows = "attention__sliding_window_pattern", {2: [0, 9, 0, 9, 0], 5: [0, 9, 9, 9, 9]}
    for pattern, expected in [*windows.items(), ([True, False, True, True, False], [9, 0, 9, 9, 0])]:
        config = read(**{key: pattern})
        assert [config.layer_config(i).attention.window for i in range(5)] == expected
    full = read(attention__sliding_window=None)
    assert {full.layer_config(i).rope for i in range(5)} == {CONFIGS["laguna"].rope}
    for name, value, word in (
        ("attention__head_count", [4, 6, 6, 6], "attention.head_count"), ("attention__head_count", 4, "attn_q.weight"),
        ("expert_weights_norm", False, "expert_weights_norm"), ("expert_gating_func", 1, "expert_gating_func"),
        ("rope__dimension_count_swa", 7, "dim is 7"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=word):
            read(**{name: value})


def test_numbers_of_layers_in_the_metadata_are_one_for_each_layer_or_one_for_all(tmp_path: Path) -> None:
    keys, tensors = read_converted("apertus")
    path = write_model(tmp_path, keys | {"xielu.beta": 0.25}, tensors)
    assert [each[:].tolist() for each in load_checkpoint(path).tensors["beta"]] == [[0.25]] * 3
    for value in (None, [0.5, 0.5], [0.5] * 4, [0.5, 0.5, math.nan], [0.5, math.inf, 0.5], "0.5", [True] * 3, ["a"] * 3):
        message = get_refusal(write_model(tmp_path, keys | {"xielu.beta": value}, tensors))
        assert "xielu.beta is " in message and "expected a finite number for each of 3 layers" in message
    write_model(tmp_path, keys, tensors | {"xielu.beta.0": tensors["blk.0.attn_norm.weight"]})
    assert "xielu.beta.0" in get_refusal(path)
