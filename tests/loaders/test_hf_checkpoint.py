"""Loading of Hugging Face folders: the result equals that of transformers, or the folder is rejected in one line."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.loaders import CheckpointError, CheckpointWarning, load_checkpoint
from specdec.loaders.checkpoint import DerivedTensor
from specdec.loaders.model_loader import load_model
from specdec.mixer_config import DeltaNetConfig, Mamba2Config
from specdec.model import get_architecture
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.model_config import ExpertsConfig, Llama3RopeScaling, YarnRopeScaling
from tests.tools import hf_folders
from tests.tools.checkpoint_files import limit_memory
from tests.tools.configs import describe_config, make_gemma3_layers, override_full_layers, replace_config
from tests.tools.half_precision import to_half
from tests.tools.hf_folders import (
    CONFIG_TABLE,
    CONFIGS,
    FIXTURES,
    INDEX,
    MXFP4_FIXTURE,
    WEIGHTS,
    assert_rejected,
    assert_same_tensors,
    copy_fixture,
    edit_tensors,
    join_safetensors,
    read_all_tensors,
    split_safetensors,
    wrap_multimodal,
)

# Tensors and configs


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama3", "wq"),
        ("phi3", "wk"),
        ("phi3", "w3"),
        ("lfm2", "w3"),
        ("qwen35_odd", "0.wq"),
        ("qwen35_odd", "2.wg"),
        ("qwen35_odd", "1.conv"),
        ("qwen3_next_odd", "0.delta_qkv"),
        ("qwen3_next_odd", "3.delta_a"),
        ("granite_h_odd", "0.mamba_xbc"),
        ("granite_h_odd", "2.mamba_norm"),
        ("qwen2", "wk"),
        ("qwen2", "bq"),
        ("qwen3", "k_norm"),
        ("gpt2", "wk"),
        ("gpt2_base", "w2"),
    ],
)
def test_slices_of_a_view_equal_slices_of_the_whole(name: str, key: str) -> None:
    tensor = load_checkpoint(FIXTURES / name).tensors[key]
    tensor = tensor[1] if isinstance(tensor, list) else tensor
    whole = tensor[:]
    assert (tensor.shape, tensor.dtype) == (whole.shape, whole.dtype)
    for first in range(0, len(whole) + 1, 3):
        for last in range(first, len(whole) + 1, 5):
            rows = tensor[first:last]
            np.testing.assert_array_equal(rows, whole[first:last], strict=True)
            assert rows.flags.c_contiguous


@pytest.mark.parametrize("name", hf_folders.NAMES)
def test_configs_match_the_golden_ones_and_shapes_the_config(name: str) -> None:
    checkpoint = load_checkpoint(FIXTURES / name)
    assert describe_config(checkpoint.config) == CONFIG_TABLE[name]
    shapes = {key: array.shape for key, array in read_all_tensors(checkpoint).items()}
    assert shapes == get_architecture(checkpoint.config).shapes(checkpoint.config)
    assert checkpoint.path == FIXTURES / name
    ends = {"llama3": [2, 5, 9], "gpt2": [0], "gpt2_base": [0]}.get(name, [2])
    assert checkpoint.eos_tokens == dict.fromkeys(ends, "eos")
    assert checkpoint.bos_token_id == (0 if "gpt2" in name else 1)


def assert_loads_like(folder: Path, name: str) -> None:
    """Raise AssertionError unless a folder gives the same model as a fixture."""
    got, expected = load_checkpoint(folder), load_checkpoint(FIXTURES / name)
    assert (got.config, got.eos_tokens, got.bos_token_id) == (expected.config, expected.eos_tokens, expected.bos_token_id)
    assert_same_tensors(got, expected)


# Logits


def make_cache(name: str, **changes: Any) -> KVCache:
    """Return a cache in fp32, as in transformers, of a fixture's model with changes to its config."""
    checkpoint = load_checkpoint(FIXTURES / name)
    config = replace_config(checkpoint.config, **changes)
    return Model(config, get_architecture(config).plan_weights(config, checkpoint.tensors).pack(), kv="f32").new_cache()


def compute_error(cache: KVCache, expected: hf_folders.Expected) -> float:
    """Return the largest difference of a logit from transformers', relative to the largest logit at its position."""
    difference = np.abs(cache.forward(expected.tokens, len(expected.tokens)) - expected.logits).max(1)
    return float((difference / np.abs(expected.logits).max(1)).max())


@pytest.mark.parametrize("name", hf_folders.NAMES)
def test_logits_and_greedy_output_equal_those_of_transformers(name: str) -> None:
    """At each of 60 positions; the largest error of 39 random models was 1.3e-5."""
    cache, expected = make_cache(name), hf_folders.load_expected(name)
    assert compute_error(cache, expected) < 3e-5
    tokens = expected.tokens[:5]
    for _ in expected.continuation:
        tokens.append(int(cache.forward(tokens)[0].argmax()))
    assert tokens[5:] == expected.continuation


EXPERTS_ALONE = ("qwen2_moe", "qwen35_moe", "qwen3_next", "qwen3_vl_moe", "deepseek_v2_groups", "nemotron_h")


@pytest.mark.parametrize("name", EXPERTS_ALONE)
def test_a_width_that_no_layer_uses_takes_no_memory(name: str) -> None:
    """An MLP of a billion rows, in models whose layers have experts in its place."""
    cache, expected = make_cache(name, hidden_dim=10**9), hf_folders.load_expected(name)
    assert compute_error(cache, expected) < 3e-5


def make_muse_layers(windows: Collection[int], rotated: Collection[int]) -> tuple[dict[str, Any], ...]:
    """Return the layers of a Muse Glimmer, given their windows and which of them have RoPE."""
    return tuple({"window": window, "has_rope": i in rotated} for i, window in enumerate(windows))


def make_laguna_layers(heads: Collection[int], window: int = 0) -> tuple[dict[str, Any], ...]:
    """Return the layers of a Laguna, given their numbers of query heads; all but each fourth may have a window."""
    sliding = {"window": window, "rope_theta": 50, "rope_dim": 0, "rope_scaling": None} if window else {"window": 0}
    return tuple({"n_heads": n, **({"window": 0} if i % 4 == 0 else sliding)} for i, n in enumerate(heads))


FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"window": 0}),
    ("phi3", {"rope_dim": 0, "rope_divisors": (), "long_freq_factors": (), "longrope_threshold": 0}),
    ("phi3", {"rope_divisors": ()}),
    ("phi3_long", {"longrope_threshold": 18}),
    ("phi3_long", {"longrope_threshold": 16}),
    ("phi3_long", {"longrope_threshold": 0, "long_freq_factors": ()}),
    ("phi3", {"rope_scale": 1.0}),
    ("phi3_plain", {"window": 10}),
    ("lfm2", {"norm_eps": 1e-2}),
    ("lfm2_odd", {"rope_theta": 1e6}),
    ("mistral", {"window": 11}),
    ("mistral", {"window": 13}),
    ("qwen2_window", {"window": 0}),
    ("llama3", {"rope_scaling": None}),
    ("llama3", {"rope_scaling": Llama3RopeScaling(8, 1, 3, 64)}),
    ("llama", {"rope_theta": 20000.0}),
    ("qwen2_5_vl", {"window": 0}),
    ("qwen3_vl", {"rope_theta": 1e4}),
    ("exaone4", {"window": 11}),
    ("exaone4", {"layers": override_full_layers((3,), 4)}),
    ("ernie4_5", {"rope_theta": 1e6}),
    ("hunyuan_v1_dense", {"qk_norm": True}),
    ("hunyuan_v1_dense", {"rope_theta": 1e4}),
    ("stablelm", {"rope_dim": 4}),
    ("nemotron", {"rope_dim": 12}),
    ("apertus", {"qk_norm": "rotated"}),
    ("bitnet", {"activation": "silu"}),
    ("apertus", {"rope_scaling": None}),
    ("minicpm", {"residual_scale": 1.0}),
    ("ernie4_5_moe", {"experts": ExpertsConfig(6, 2, 24, False, (0,), shared_hidden_dim=48)}),
    ("phimoe", {"experts": ExpertsConfig(5, 2, 20)}),
    ("phimoe", {"rope_scale": 1.0}),
    ("gemma2", {"window": 10}),
    ("gemma2", {"softcap": 0.0}),
    ("gemma2", {"logit_softcap": 0.0}),
    ("deepseek_v2", {"attention_scale": 0.0}),
    ("deepseek_v2", {"experts": replace(CONFIGS["deepseek_v2"].experts, norm_topk_prob=True)}),
    ("deepseek_v2_groups", {"experts": replace(CONFIGS["deepseek_v2_groups"].experts, n_groups=1, n_groups_used=1)}),
    ("deepseek_v2_groups", {"experts": replace(CONFIGS["deepseek_v2_groups"].experts, n_groups_used=1)}),
    ("deepseek_v3", {"experts": replace(CONFIGS["deepseek_v3"].experts, n_groups=1, n_groups_used=1)}),
    ("moonlight", {"experts": replace(CONFIGS["moonlight"].experts, routed_scaling_factor=1.0)}),
    ("glm4_moe_lite", {"norm_eps": 0.1}),
    ("gemma3", {"window": 10}),
    ("gemma3", {"layers": ()}),
    ("gemma3", {"layers": make_gemma3_layers((4,), 7)}),
    ("gemma3", {"rope_theta": 1e6}),
    ("gemma3_scaled", {"rope_theta": 1e4}),
    ("gemma3_scaled", {"layers": make_gemma3_layers((0, 3), 4)}),
    ("gemma3_scaled", {"attention_scale": 0.0}),
    ("gemma3_half", {"embedding_scale": 1.0}),
    ("ministral3", {"query_scale": 0.0}),
    ("ministral3", {"query_span": 17}),
    ("ministral3", {"rope_scaling": YarnRopeScaling(4, 16, beta_fast=2, truncate=False)}),
    ("ministral3", {"rope_scaling": YarnRopeScaling(4, 16, beta_fast=1)}),
    ("ministral3_vision", {"rope_scaling": YarnRopeScaling(8, 20, 4, 1, truncate=False)}),
    ("ministral3_scale", {"rope_scaling": None}),
    ("qwen35", {"rope_dim": 8}),
    ("qwen35_odd", {"rope_theta": 2e5}),
    ("qwen35_images", {"norm_eps": 0.1}),
    ("glm4", {"rope_dim": 4}),
    ("glm4", {"norm_placement": "before"}),
    ("olmo3", {"window": 10}),
    ("olmo3", {"layers": override_full_layers((3,), 4)}),
    ("olmo3", {"layers": override_full_layers((2, 3), 4, rope_scaling=YarnRopeScaling(4, 16, 2, 0.1))}),
    ("qwen3_next", {"delta": ((0, 1, 2), DeltaNetConfig(2, 4, 16, 16, tiled_heads=True))}),
    ("qwen3_next_odd", {"experts": ExpertsConfig(5, 3, 20, True, (0, 1, 2), shared_hidden_dim=9, shared_gate=True)}),
    ("qwen35", {"delta": ((0, 1, 2), DeltaNetConfig(2, 4, 8, 16, tiled_heads=True))}),
    ("granite_h", {"residual_scale": 1.0}),
    ("nemotron_h", {"has_rope": True}),
    ("falcon_h1", {"projection_scales": (2.0, 2.0, 1.0)}),
    ("falcon_h1", {"projection_scales": (1.0, 1.0, 1.0)}),
    ("falcon_h1", {"projection_scales": (2.0, 1.0, 2.0)}),
    ("falcon_h1", {"mlp_scales": (2.0, 0.5)}),
    ("falcon_h1", {"mamba": ((0, 1), Mamba2Config(4, 12, 2, 16, 4, True, False, True, (1.0, 0.25, 2.0, 0.125, 0.5), 1.0))}),
    ("falcon_h1", {"mamba": ((0, 1), Mamba2Config(4, 12, 2, 16, 4, True, False, True, (1.0, 0.25, 0.125, 2.0, 1.0), 2.0))}),
    ("falcon_h1_odd", {"rope_theta": 100.0}),
    ("nemotron_h", {"experts": ExpertsConfig(6, 2, 20, True, (0, 2, 3), True, True, 0.0, 0.0, 1.0, 28)}),
    ("nemotron_h", {"experts": ExpertsConfig(6, 2, 20, False, (0, 2, 3), True, True, 0.0, 0.0, 2.5, 28)}),
    ("nemotron_h_dense", {"norm_eps": 0.1}),
    ("laguna", {"layers": make_laguna_layers((4, 6, 6, 6, 4), 10)}),
    ("laguna", {"rope_scale": 1.2}),
    ("laguna", {"experts": replace(CONFIGS["laguna"].experts, routed_scaling_factor=1.0)}),
    ("laguna_elements", {"rope_dim": 0, "layers": make_laguna_layers((3, 3, 3))}),
    ("muse_glimmer_layers", {"post_norm_eps": 0.2}),
    ("muse_glimmer", {"embedding_norm": False}),
    ("muse_glimmer", {"plain_query_scale": 1.0}),
    ("muse_glimmer", {"layers": make_muse_layers((0, 9, 9, 9, 0), (0, 1, 2, 3))}),
    ("muse_glimmer_layers", {"layers": make_muse_layers((0, 7, 8, 0), (0, 2))}),
    ("granite_h", {"norm_eps": 1e-1}),
    ("granite_h", {"has_rope": True}),
]


def test_mxfp4_logits_equal_those_of_transformers() -> None:
    """Includes both interleaved matrices; as floats, because the matmul of quantized blocks rounds activations to int8."""
    checkpoint, expected = load_checkpoint(FIXTURES / MXFP4_FIXTURE), hf_folders.load_expected(MXFP4_FIXTURE)
    numbers = {
        name: [tensor[0 : tensor.shape[0]] for tensor in tensors] if "experts_w" in name else tensors
        for name, tensors in checkpoint.tensors.items()
    }
    model = Model(
        checkpoint.config, get_architecture(checkpoint.config).plan_weights(checkpoint.config, numbers).pack(), kv="f32"
    )
    assert compute_error(model.new_cache(), expected) < 3e-5
    assert load_model(FIXTURES / MXFP4_FIXTURE).weights.format_names == "MXFP4 and bf16", "4 bits stay 4 bits"


def test_slices_of_interleaved_mxfp4_blocks_equal_slices_of_the_whole() -> None:
    for tensors in (load_checkpoint(FIXTURES / MXFP4_FIXTURE).tensors[f"1.experts_w{i}"] for i in (1, 2, 3)):
        whole = tensors[2].read_blocks(0, tensors[2].shape[0]).raw_bytes
        for first, last in ((0, 1), (3, 20), (30, 32), (5, 5)):
            np.testing.assert_array_equal(tensors[2].read_blocks(first, last).raw_bytes, whole[first:last])


def test_damaged_mxfp4_blocks_are_rejected_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"

    def assert_change_rejected(change: Callable[[dict[str, tuple[str, Any]]], Any], *words: str) -> None:
        folder = copy_fixture(tmp_path / str(len([*tmp_path.iterdir()])), MXFP4_FIXTURE)
        assert_rejected(edit_tensors(folder, change), *words)

    assert_change_rejected(lambda t: t.pop(f"{name}_scales"), "has no tensor", "gate_up_proj_scales")
    assert_change_rejected(lambda t: t.update({f"{name}_scales": ("I8", t[f"{name}_scales"][1])}), '"I8"', "expected U8")
    assert_change_rejected(lambda t: t.update({f"{name}_scales": ("U8", t[f"{name}_scales"][1][:, 1:])}), "has the shape")
    assert_change_rejected(lambda t: t.update({f"{name}_blocks": ("U8", t[f"{name}_blocks"][1][:5])}), "has the shape")
    assert_change_rejected(
        lambda t: t.update({f"{name}_scales": ("U8", t[f"{name}_scales"][1] | 255)}), "scales below 2^-24 or above 2^15"
    )
    assert_rejected(copy_fixture(tmp_path / "odd", MXFP4_FIXTURE, hidden_size=65), "")


TERNARY_FORMAT = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}


def make_ternary_folders(path: Path) -> tuple[Path, Path]:
    """Write a BitNet model with four weights in a byte, and the same model in fp32; return both folders."""
    rng, sizes = np.random.default_rng(0), {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    packed = copy_fixture(path / "packed", "bitnet", **sizes, **heads, quantization_config=TERNARY_FORMAT)
    floats = copy_fixture(path / "floats", "bitnet", **sizes, **heads)
    shapes = {"self_attn.q": (256, 256), "self_attn.k": (128, 256), "self_attn.v": (128, 256), "self_attn.o": (256, 256)}
    shapes |= {"mlp.gate": (512, 256), "mlp.up": (512, 256), "mlp.down": (256, 512)}
    norms = {"input_layernorm": 256, "post_attention_layernorm": 256, "self_attn.attn_sub_norm": 256, "mlp.ffn_sub_norm": 512}
    both = {f"model.layers.{i}.{name}.weight": (n,) for i in range(2) for name, n in norms.items()}
    both |= {"model.norm.weight": (256,), "model.embed_tokens.weight": (40, 256)}
    shared = {name: ("F32", rng.random(shape, np.float32)) for name, shape in both.items()}
    stored, wide = dict(shared), dict(shared)
    for name, (n, columns) in [(f"model.layers.{i}.{key}_proj.weight", shape) for i in range(2) for key, shape in shapes.items()]:
        codes, scale = rng.integers(0, 3, (n, columns), np.uint8), np.float32(rng.integers(100, 200) / 128)
        quarters = codes.reshape(4, n // 4, columns) << np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
        stored[name] = ("U8", np.bitwise_or.reduce(quarters, 0))
        stored[f"{name}_scale"] = ("BF16", to_half(np.array([scale]), "bf16"))
        wide[name] = ("F32", (codes.astype(np.float32) - 1) * scale)
    for folder, tensors in ((packed, stored), (floats, wide)):
        (folder / WEIGHTS).write_bytes(hf_folders.safetensors_bytes(tensors))
    return packed, floats


def test_packed_ternary_weights_equal_their_floats(tmp_path: Path) -> None:
    packed, floats = make_ternary_folders(tmp_path)
    assert_same_tensors(load_checkpoint(packed), load_checkpoint(floats))
    assert load_model(packed).weights.format_names == "TQ2_0 and fp32", "2 bits stay 2 bits"
    tensor = load_checkpoint(packed).tensors["wq"][1]
    whole = tensor.read_blocks(0, 256).raw_bytes
    for first, last in ((0, 1), (3, 70), (100, 256), (5, 5)):
        np.testing.assert_array_equal(tensor.read_blocks(first, last).raw_bytes, whole[first:last])


def test_damaged_ternary_weights_are_rejected_by_name(tmp_path: Path) -> None:
    packed, _ = make_ternary_folders(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    cases: tuple[tuple[str, str, Any, str], ...] = (
        (name, "U8", np.zeros((127, 256), np.uint8), "has the shape"),
        (name, "I8", np.zeros((128, 256), np.int8), "expected U8"),
        (f"{name}_scale", "F32", np.array([1e9], np.float32), "expected a number that fp16 can hold"),
        (f"{name}_scale", "F32", np.array([np.nan], np.float32), "NaN"),
        (f"{name}_scale", "F32", np.ones(2, np.float32), "has the shape"),
    )
    tensors = hf_folders.read_folder_tensors(packed)
    for key, dtype, array, message in cases:
        (packed / WEIGHTS).write_bytes(hf_folders.safetensors_bytes(tensors | {key: (dtype, array)}))
        assert_rejected(packed, message)


@pytest.mark.parametrize(("name", "changes"), FEATURES, ids=str)
def test_fixtures_detect_a_missing_feature(name: str, changes: dict[str, Any]) -> None:
    assert compute_error(make_cache(name, **changes), hf_folders.load_expected(name)) > 1e-2


# Folders


@pytest.mark.parametrize(
    ("name", "prefix", "head"),
    [
        ("mistral", "language_model.model.", "language_model.lm_head.weight"),  # names on the hub
        ("mistral", "model.language_model.", "lm_head.weight"),  # names of transformers' modules
        ("llama_tied", "language_model.model.", ""),
    ],
)
def test_the_language_model_of_a_multimodal_folder_is_loaded(tmp_path: Path, name: str, prefix: str, head: str) -> None:
    assert_loads_like(wrap_multimodal(copy_fixture(tmp_path / "model", name), prefix, head), name)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_flat_config_of_published_qwen_vl_folders_is_loaded(tmp_path: Path, name: str) -> None:
    """They have the language model's keys at the top level, and the older type of their RoPE."""
    folder = copy_fixture(tmp_path / "model", name)
    values = json.loads((folder / "config.json").read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (folder / "config.json").write_text(json.dumps(text | values | flat))
    checkpoint = load_checkpoint(folder)
    assert (checkpoint.config, checkpoint.family) == (CONFIGS[name], name)


def test_multimodal_gemma_3_is_loaded(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model", "gemma3")
    assert_loads_like(wrap_multimodal(folder, "language_model.model.", model_type="gemma3"), "gemma3")


def make_empty_files(folder: Path, *names: str) -> Path:
    """Create a folder of empty files."""
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


OTHERS = {
    "consolidated.safetensors": "belongs to a format that is not supported; use the original",
    "consolidated.00.pth": "belongs to a format that is not supported; use the original",
    "model.pth": "belongs to a format that is not supported",
    "pytorch_model-00001-of-00002.bin": "is a PyTorch file; convert it",
    "model.onnx": "belongs to a format that is not supported; use the original",
    "openvino_model.xml": "belongs to a format that is not supported; use the original",
    "flax_model.msgpack": "belongs to a format that is not supported",
    "weights.npz": "belongs to a format that is not supported",
    "model_index.json": "belongs to a format that is not supported",
    "model-00001-of-00002.safetensors": "is a shard; download model.safetensors.index.json",
    "model.safetensors.incomplete": "is not finished",
    "models--org--name": "name a model by its repository: org/name",
    "mmproj-model.gguf": "expected a Hugging Face folder",
    "model.gguf": "name one of its GGUF files: ",
}


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_in_another_format_is_reported_with_advice(tmp_path: Path, name: str, has_config: bool) -> None:
    folder = copy_fixture(tmp_path / "model")
    (folder / WEIGHTS).rename(folder / name)
    if not has_config:
        (folder / "config.json").unlink()
    assert_rejected(folder, OTHERS[name])


def test_a_config_that_is_a_git_lfs_pointer_is_reported(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model")
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert_rejected(folder, "config.json is a Git LFS pointer")


def test_the_error_about_a_folder_without_a_model_says_what_it_contains(tmp_path: Path) -> None:
    assert_rejected(make_empty_files(tmp_path / "empty"), "config.json", "Hugging Face")
    assert_rejected(make_empty_files(tmp_path / "gguf", "model-Q8_0.gguf"), "config.json", "GGUF")
    assert_rejected(make_empty_files(tmp_path / "adapter", "adapter_config.json", "adapter_model.safetensors"), "adapter")
    assert_rejected(make_empty_files(tmp_path / "weights", WEIGHTS), "config.json")
    folder = copy_fixture(tmp_path / "torch")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert_rejected(folder, WEIGHTS, "save_pretrained")
    (folder / "pytorch_model.bin").unlink()
    assert_rejected(folder, WEIGHTS, INDEX)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert_rejected(folder, "config.json", "directory")


def test_an_adapter_next_to_a_model_causes_a_warning(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model")
    load_model(folder, n_threads=1)  # a warning would fail this test
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.warns(CheckpointWarning, match=r"model holds an adapter \(adapter_config.json\), which is not applied: .*merge"):
        load_model(folder, n_threads=1)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_inside_a_folder_is_rejected_as_one_part_of_a_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="name the folder"):
        load_checkpoint(copy_fixture(tmp_path / "model") / name)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_broken_link_is_reported_by_name(tmp_path: Path, name: str) -> None:
    """Like a snapshot of the hub's cache that was copied without its blobs."""
    folder = copy_fixture(tmp_path / "model")
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/0123")
    assert_rejected(folder, name, "link")


def read_weight_map(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def write_weight_map(folder: Path, weight_map: Any) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_missing_shard_is_reported_by_name(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model", "mistral")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    assert_rejected(folder, shard.name, "missing", INDEX)


OUTSIDE = ["../b/model.safetensors", "/etc/passwd", "..", "a/../../b", "C:\\b", "..\\b"]
NO_NAMES = ["", "a\0b", "a\nb", "\ud800", "x" * 5000, 5, None, ["a"], {}]


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES], ids=lambda name: ascii(name)[:20])
def test_an_index_that_points_out_of_the_folder_is_rejected(tmp_path: Path, name: Any) -> None:
    folder = copy_fixture(tmp_path / "model", "mistral")
    copy_fixture(tmp_path / "b")
    assert_rejected(
        write_weight_map(folder, read_weight_map(folder) | {"lm_head.weight": name}), INDEX, "expected a file next to it"
    )


def test_a_shard_may_be_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "snapshot", "mistral")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    assert_loads_like(folder, "mistral")


def test_an_index_that_disagrees_with_its_shards_is_rejected(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model", "mistral")
    weight_map = read_weight_map(folder)
    head, norm = "lm_head.weight", "model.norm.weight"
    other = next(name for name in weight_map.values() if name != weight_map[head])
    assert_rejected(write_weight_map(folder, weight_map | {head: other}), other, head)
    assert_rejected(write_weight_map(folder, weight_map | {"nonsense": other}), other, "nonsense")
    assert_rejected(write_weight_map(folder, {key: name for key, name in weight_map.items() if key != norm}), norm)
    for nothing in ({}, [], None, 5):
        assert_rejected(write_weight_map(folder, nothing), "weight_map")


def test_a_single_file_takes_precedence_over_an_index(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model")
    (folder / INDEX).write_text("nonsense")
    assert load_checkpoint(folder).config == CONFIGS["llama"]


# Tensors


def set_tensors(**changes: Any) -> Callable[[dict[str, tuple[str, Any]]], None]:
    return lambda tensors: tensors.update(changes)


def rename(tensors: dict[str, tuple[str, Any]], new: Callable[[str], str]) -> None:
    old = dict(tensors)
    tensors.clear()
    tensors.update({new(name): value for name, value in old.items()})


def test_a_missing_tensor_is_reported_by_name(tmp_path: Path) -> None:
    for i, name in enumerate(
        ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight")
    ):
        folder = edit_tensors(copy_fixture(tmp_path / str(i)), lambda tensors, name=name: tensors.pop(name))
        assert_rejected(folder, name.removeprefix("model."))


def test_an_unknown_tensor_is_rejected_by_name(tmp_path: Path) -> None:
    one = ("F32", np.ones((4, 4), np.float32))
    for i, name in enumerate(("score.weight", "model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.extra", "a\nb")):
        assert_rejected(edit_tensors(copy_fixture(tmp_path / str(i)), set_tensors(**{name: one})), json.dumps(name)[1:-1])


def test_buffers_of_older_versions_are_ignored(tmp_path: Path) -> None:
    buffer = ("F32", np.full(5, np.nan, np.float32))
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq")
    assert_loads_like(edit_tensors(copy_fixture(tmp_path / "llama"), set_tensors(**dict.fromkeys(names, buffer))), "llama")
    mask = ("BOOL", np.ones((1, 1, 8, 8), np.uint8))
    names = ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")
    assert_loads_like(edit_tensors(copy_fixture(tmp_path / "gpt2", "gpt2"), set_tensors(**dict.fromkeys(names, mask))), "gpt2")


def test_tensor_names_with_and_without_prefix_are_supported(tmp_path: Path) -> None:
    folder = edit_tensors(
        copy_fixture(tmp_path / "a", "llama_tied"), lambda tensors: rename(tensors, lambda name: name.removeprefix("model."))
    )
    assert_loads_like(folder, "llama_tied")
    folder = edit_tensors(
        copy_fixture(tmp_path / "b", "gpt2_base"), lambda tensors: rename(tensors, lambda name: f"transformer.{name}")
    )
    assert_loads_like(folder, "gpt2_base")


def test_a_tensor_under_two_names_is_rejected(tmp_path: Path) -> None:
    folder = edit_tensors(
        copy_fixture(tmp_path / "a"), lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"]})
    )
    assert_rejected(folder, "norm.weight", "twice, under two names")


def test_tied_tensors_may_both_be_stored(tmp_path: Path) -> None:
    """Like in transformers, equal tensors are tied, different ones are both used, and a classifier alone is the embedding."""
    emb, head = "model.embed_tokens.weight", "lm_head.weight"
    assert_loads_like(edit_tensors(copy_fixture(tmp_path / "a", "llama_tied"), lambda t: t.update({head: t[emb]})), "llama_tied")
    assert_loads_like(
        edit_tensors(copy_fixture(tmp_path / "b", "llama_tied"), lambda t: t.update({head: t.pop(emb)})), "llama_tied"
    )
    folder = edit_tensors(copy_fixture(tmp_path / "c", "llama_tied"), lambda t: t.update({head: ("BF16", t[emb][1] ^ 1)}))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == replace(CONFIGS["llama_tied"], shared_classifier=False)
    np.testing.assert_array_equal(checkpoint.tensors["wcls"][:], checkpoint.tensors["tok_emb"][:] ^ 1)


def test_a_wrong_shape_or_dtype_is_rejected_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    for i, array in enumerate((np.ones((37, 20)), np.ones(20 * 37), np.ones((20, 37, 1)), np.float32(1))):
        folder = edit_tensors(copy_fixture(tmp_path / str(i)), set_tensors(**{name: ("F32", np.asarray(array, np.float32))}))
        assert_rejected(folder, name, "(20, 37)", WEIGHTS)
    for dtype, array in (
        ("F64", np.ones((20, 37))),
        ("I8", np.ones((20, 37), np.int8)),
        ("F8_E4M3", np.ones((20, 37), np.uint8)),
    ):
        assert_rejected(edit_tensors(copy_fixture(tmp_path / dtype), set_tensors(**{name: (dtype, array)})), name, dtype)


@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen3", "gpt2", "gpt2_base"])
def test_non_finite_weights_are_rejected_in_every_tensor(tmp_path: Path, name: str) -> None:
    for i, (key, (dtype, array)) in enumerate(hf_folders.read_folder_tensors(FIXTURES / name).items()):
        if key.endswith(("attn.bias", "masked_bias")):
            continue
        damaged = array.copy()
        damaged.flat[array.size // 2] = 0x7FC0 if dtype == "BF16" else np.nan
        assert_rejected(edit_tensors(copy_fixture(tmp_path / str(i), name), set_tensors(**{key: (dtype, damaged)})), key, "NaN")


def test_a_damaged_shard_is_rejected_by_name(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path / "model", "mistral")
    shard = sorted(folder.glob("*.safetensors"))[1]
    header, data = split_safetensors(shard.read_bytes())
    shard.write_bytes(join_safetensors(header, data[:-2]))
    assert_rejected(folder, shard.name, "truncated")


# Memory


def test_loading_reads_no_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = copy_fixture(tmp_path / "model", "gpt2", n_positions=2000, vocab_size=3000, n_embd=192, n_layer=1)

    def grow(tensors: dict[str, tuple[str, Any]]) -> None:
        rename(tensors, lambda name: name)
        for name in [name for name in tensors if ".h.1." in name]:
            del tensors[name]
        for name, (_, array) in list(tensors.items()):
            shape = [{18: 192, 54: 576, 72: 768, 71: 3000, 64: 2000}[n] for n in array.shape]
            tensors[name] = "F32", rng.standard_normal(shape).astype(np.float32)

    edit_tensors(folder, grow)
    load_checkpoint(folder)
    with limit_memory(200_000):
        tensors = load_checkpoint(folder).tensors
    with limit_memory(3.5 * 4 * 100 * 192 + 100_000):
        assert tensors["w1"][0][100:200].shape == (100, 192)


def test_views_know_their_shapes_without_reading() -> None:
    tensors = load_checkpoint(FIXTURES / "gpt2").tensors
    assert isinstance(tensors["w1"][0], DerivedTensor)
    assert (tensors["w1"][0].shape, tensors["wk"][1].shape, tensors["bk"][1].shape) == ((72, 18), (18, 18), (18,))
    llama = load_checkpoint(FIXTURES / "llama_tied").tensors
    assert isinstance(llama["wk"][0], DerivedTensor)
    assert (llama["wk"][0].shape, llama["wk"][0].dtype) == ((16, 32), np.dtype(np.uint16))
    assert re.fullmatch(r"model\.layers\.0\..*q_proj\.weight", llama["wq"][0].source.name)
