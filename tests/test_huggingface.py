"""readers/huggingface.py: a folder is read as transformers reads it, or refused by name in one line."""

import json
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.architectures import Config, architecture_of
from specdec.architectures.config import RopeScaling
from specdec.readers import Checkpoint, CheckpointError, load_checkpoint
from specdec.readers.huggingface import Pairs, Transposed
from specdec.transformer import Transformer
from tests import folders
from tests.folders import FIXTURES, GONE, INDEX, WEIGHTS, configure, copy, joined, retensor, split

LLAMAS = [name for name in folders.NAMES if not name.startswith("gpt2")]


def read_all(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every tensor, those of layers one on the other."""
    tensors = checkpoint.tensors
    return {name: np.stack([t[:] for t in ts]) if isinstance(ts, list) else ts[:] for name, ts in tensors.items()}


def message_of(folder: Path, *words: str) -> str:
    """The refusal's text, which is a line, names the folder or a file in it, and says those words."""
    with pytest.raises(CheckpointError) as caught:
        read_all(load_checkpoint(folder))
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 300 + len(str(folder))
    for word in words:
        assert word in message.replace(str(folder), ""), message
    message.encode()
    return message


# What is read


def adjacent(rows: Any, head_dim: int) -> Any:
    """Rows of halves of heads, one by one to where RoPE's pairs are adjacent."""
    result = np.empty_like(rows)
    for row in range(len(rows)):
        head, i = divmod(row, head_dim)
        first, second = head_dim * head + i // 2, head_dim * head + i // 2 + head_dim // 2
        result[row] = rows[second if i % 2 else first]
    return result


def llama_oracle(config: Config, t: dict[str, Any], i: int) -> dict[str, Any]:
    """Layer i's tensors, out of the stored ones, by our names."""
    at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
    names = {
        "wq": at + "q_proj.weight", "wk": at + "k_proj.weight", "wv": at + "v_proj.weight", "wo": at + "o_proj.weight",
        "bq": at + "q_proj.bias", "bk": at + "k_proj.bias", "bv": at + "v_proj.bias", "bo": at + "o_proj.bias",
        "q_norm": at + "q_norm.weight", "k_norm": at + "k_norm.weight",
        "w1": mlp + "gate_proj.weight", "w2": mlp + "down_proj.weight", "w3": mlp + "up_proj.weight",
        "b1": mlp + "gate_proj.bias", "b2": mlp + "down_proj.bias", "b3": mlp + "up_proj.bias",
        "rms_att": f"model.layers.{i}.input_layernorm.weight", "rms_ffn": f"model.layers.{i}.post_attention_layernorm.weight",
    }  # fmt: skip
    turned = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")
    there = {name: t[full] for name, full in names.items() if full in t}
    return {name: adjacent(array, config.head_dim) if name in turned else array for name, array in there.items()}


def gpt2_oracle(config: Config, t: dict[str, Any], i: int) -> dict[str, Any]:
    h, n = f"h.{i}.", config.dim
    q, k, v = (slice(j * n, j * n + n) for j in range(3))
    matrix, bias = t[h + "attn.c_attn.weight"].T, t[h + "attn.c_attn.bias"]
    return {
        "wq": matrix[q], "wk": matrix[k], "wv": matrix[v], "bq": bias[q], "bk": bias[k], "bv": bias[v],
        "wo": t[h + "attn.c_proj.weight"].T, "bo": t[h + "attn.c_proj.bias"],
        "w1": t[h + "mlp.c_fc.weight"].T, "b1": t[h + "mlp.c_fc.bias"],
        "w2": t[h + "mlp.c_proj.weight"].T, "b2": t[h + "mlp.c_proj.bias"],
        "ln_att": t[h + "ln_1.weight"], "ln_att_bias": t[h + "ln_1.bias"],
        "ln_ffn": t[h + "ln_2.weight"], "ln_ffn_bias": t[h + "ln_2.bias"],
    }  # fmt: skip


def oracle(name: str, config: Config) -> dict[str, Any]:
    tensors = {full: array for full, (_, array) in folders.stored(FIXTURES / name).items()}
    if config.architecture == "gpt2":
        tensors = {full.removeprefix("transformer."): array for full, array in tensors.items()}
        whole = {"tok_emb": "wte.weight", "pos_emb": "wpe.weight", "ln_final": "ln_f.weight", "ln_final_bias": "ln_f.bias"}
        layer = gpt2_oracle
    else:
        whole = {"tok_emb": "model.embed_tokens.weight", "rms_final": "model.norm.weight", "wcls": "lm_head.weight"}
        layer = llama_oracle
    layers = [layer(config, tensors, i) for i in range(config.n_layers)]
    stacked = {key: np.stack([each[key] for each in layers]) for key in layers[0]}
    return stacked | {key: tensors[full] for key, full in whole.items() if full in tensors}


@pytest.mark.parametrize("name", folders.NAMES)
def test_every_tensor_is_the_stored_one_in_our_order_of_rows(name: str) -> None:
    checkpoint = load_checkpoint(FIXTURES / name)
    expected, got = oracle(name, checkpoint.config), read_all(checkpoint)
    assert set(got) == set(expected)
    assert {key: array.shape for key, array in got.items()} == architecture_of(checkpoint.config).shapes(checkpoint.config)
    for key, array in got.items():
        np.testing.assert_array_equal(array, expected[key], strict=True)


@pytest.mark.parametrize(
    ("name", "key"),
    [("llama3", "wq"), ("qwen2", "wk"), ("qwen2", "bq"), ("qwen3", "k_norm"), ("gpt2", "wk"), ("gpt2_base", "w2")],
)
def test_any_rows_of_a_view_are_those_of_the_whole(name: str, key: str) -> None:
    tensor = load_checkpoint(FIXTURES / name).tensors[key][1]
    whole = tensor[:]
    assert (tensor.shape, tensor.dtype) == (whole.shape, whole.dtype)
    for first in range(0, len(whole) + 1, 3):
        for last in range(first, len(whole) + 1, 5):
            rows = tensor[first:last]
            np.testing.assert_array_equal(rows, whole[first:last], strict=True)
            assert rows.flags.c_contiguous


CONFIGS = {
    "llama": Config(20, 37, 2, 2, 2, 65, 128, False, norm_eps=1e-6),
    "llama_tied": Config(32, 48, 2, 4, 2, 72, 128, True, norm_eps=1e-6),
    "llama_biases": Config(24, 40, 2, 3, 1, 64, 128, False, norm_eps=1e-6, qkv_bias=True, wo_bias=True, mlp_bias=True),
    "llama3": Config(
        32, 48, 2, 4, 2, 70, 128, True, norm_eps=1e-6, rope_theta=5e5, head_dim=16, rope_scaling=RopeScaling(8, 1, 4, 64)
    ),
    "mistral": Config(32, 40, 3, 4, 2, 64, 128, False, norm_eps=1e-6, window=12),
    "qwen2": Config(32, 48, 2, 4, 2, 80, 128, True, norm_eps=1e-6, qkv_bias=True),
    "qwen2_window": Config(24, 30, 2, 2, 1, 64, 128, False, norm_eps=1e-6, qkv_bias=True, window=17),
    "qwen3": Config(32, 48, 2, 4, 2, 66, 128, False, norm_eps=1e-6, head_dim=12, qk_norm=True),
    "gpt2": Config(18, 72, 2, 3, 3, 71, 64, True, "gpt2"),
    "gpt2_base": Config(32, 50, 2, 4, 4, 64, 96, True, "gpt2"),
}


@pytest.mark.parametrize("name", folders.NAMES)
def test_a_config_says_what_config_json_says(name: str) -> None:
    checkpoint = load_checkpoint(FIXTURES / name)
    assert checkpoint.config == CONFIGS[name]
    assert checkpoint.path == FIXTURES / name
    ends = {"llama3": [2, 5, 9], "gpt2": [0], "gpt2_base": [0]}.get(name, [2])
    assert checkpoint.end_marks == dict.fromkeys(ends, "eos")
    assert checkpoint.bos == (0 if "gpt2" in name else 1)


# What comes out of it


def model_of(name: str, **changes: Any) -> Transformer:
    """A fixture's model, some numbers of whose config are others."""
    checkpoint = load_checkpoint(FIXTURES / name)
    config = replace(checkpoint.config, **changes)
    return Transformer(config, architecture_of(config).pack(config, checkpoint.tensors))


def error_of(model: Transformer, expected: folders.Expected) -> float:
    """The largest difference of a logit from transformers', of the largest logit at its position."""
    difference = np.abs(model.forward(expected.tokens, len(expected.tokens)) - expected.logits).max(1)
    return float((difference / np.abs(expected.logits).max(1)).max())


@pytest.mark.parametrize("name", folders.NAMES)
def test_logits_and_greedy_text_are_those_of_transformers(name: str) -> None:
    """At each of 60 positions; 1.3e-5 is the most that was seen of 39 random models."""
    model, expected = model_of(name), folders.expected(name)
    assert error_of(model, expected) < 3e-5
    text = expected.tokens[:5]
    for _ in expected.continuation:
        text.append(int(model.forward(text)[0].argmax()))
    assert text[5:] == expected.continuation


FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"window": 0}),
    ("mistral", {"window": 11}),
    ("mistral", {"window": 13}),
    ("qwen2_window", {"window": 0}),
    ("llama3", {"rope_scaling": None}),
    ("llama3", {"rope_scaling": RopeScaling(8, 1, 3, 64)}),
    ("llama", {"rope_theta": 20000.0}),
]


@pytest.mark.parametrize(("name", "changes"), FEATURES, ids=str)
def test_a_fixture_tells_whether_its_feature_is_done(name: str, changes: dict[str, Any]) -> None:
    assert error_of(model_of(name, **changes), folders.expected(name)) > 1e-2


# Configs


def config_of(folder: Path, name: str = "llama", /, **changes: Any) -> Config:
    return load_checkpoint(copy(folder, name, **changes)).config


def test_rope_of_an_older_transformers_is_the_same(tmp_path: Path) -> None:
    scaling = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
    old = {"rope_parameters": GONE, "rope_theta": 500000, "rope_scaling": scaling}
    assert config_of(tmp_path / "old", "llama3", **old) == CONFIGS["llama3"]
    new = scaling | {"rope_type": "llama3"}
    assert config_of(tmp_path / "both", "llama3", **old | {"rope_scaling": new}) == CONFIGS["llama3"]
    none = {"rope_parameters": GONE, "rope_theta": GONE, "rope_scaling": None}
    plain = replace(CONFIGS["llama3"], rope_theta=10000.0, rope_scaling=None)
    assert config_of(tmp_path / "none", "llama3", **none) == plain


def test_where_a_file_is_silent_its_familys_default_holds(tmp_path: Path) -> None:
    """transformers 5.23: Qwen2 has no window unless asked, GPT-2 ties, Llama does not, and eps differ."""
    silent = dict.fromkeys(("rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "head_dim", "hidden_act"), GONE)
    assert config_of(tmp_path / "llama", "llama", **silent) == CONFIGS["llama"]
    windows = dict.fromkeys(("use_sliding_window", "sliding_window", "layer_types", "max_window_layers"), GONE)
    assert config_of(tmp_path / "qwen2", "qwen2_window", **windows).window == 0
    assert config_of(tmp_path / "mistral", "mistral", sliding_window=GONE).window == 4096
    assert config_of(tmp_path / "null", "mistral", sliding_window=None).window == 0
    assert config_of(tmp_path / "gpt2", "gpt2", tie_word_embeddings=GONE, layer_norm_epsilon=GONE) == CONFIGS["gpt2"]


def test_a_window_of_qwen_counts_where_all_layers_have_it(tmp_path: Path) -> None:
    full, sliding = ["full_attention"] * 2, ["sliding_attention"] * 2
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, 17),
        ({"use_sliding_window": False, "layer_types": full}, 0),
        ({"layer_types": full, "max_window_layers": 2}, 0),
        ({"layer_types": GONE, "max_window_layers": 2}, 0),
        ({"layer_types": GONE, "max_window_layers": 28}, 0),
        ({"layer_types": GONE, "max_window_layers": 0}, 17),
        ({"layer_types": GONE, "max_window_layers": 1}, None),
        ({"layer_types": [full[0], sliding[0]]}, None),
        ({"layer_types": sliding, "use_sliding_window": False}, None),
        ({"layer_types": sliding[:1]}, None),
        ({"layer_types": 5}, None),
    ]
    for i, (changes, window) in enumerate(cases):
        folder = copy(tmp_path / str(i), "qwen2_window", **changes)
        if window is None:
            message_of(folder, "layer")
        else:
            assert load_checkpoint(folder).config.window == window, changes


def test_end_marks_are_those_of_both_files(tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, list[int]]] = [
        (2, GONE, [2]), ([3, 4], 2, [3, 4, 2]), (GONE, [7], [7]), (GONE, GONE, [2]), (None, GONE, []), (None, 5, [5]),
        ([], [], []), (64, GONE, [64]), (65, 128001, []),  # beyond the vocabulary: they never come
    ]  # fmt: skip
    for i, (config, generation, expected) in enumerate(cases):
        folder = configure(
            copy(tmp_path / str(i), "llama", eos_token_id=config), "generation_config.json", eos_token_id=generation
        )
        assert list(load_checkpoint(folder).end_marks) == expected
    (folder / "generation_config.json").unlink()
    assert load_checkpoint(configure(folder, eos_token_id=9, bos_token_id=None)).end_marks == {9: "eos"}
    assert load_checkpoint(folder).bos is None


ONE_WORD: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "gemma2"}, '"gemma2" is not there; there are llama, mistral, qwen2, qwen3, gpt2'),
    ("llama", {"model_type": GONE}, "model_type"),
    ("llama", {"model_type": ["llama"]}, "model_type"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"hidden_act": None}, "hidden_act"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"n_inner": 0}, "n_inner"),
    ("gpt2", {"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon"),
    ("gpt2", {"n_head": 4}, "n_heads 4"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("llama", {"rope_scaling": {"rope_type": ["llama3"]}}, "rope_type"),
    ("llama", {"rope_scaling": "llama3"}, "rope_scaling"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta"),
    ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq"),
    ("llama", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ("llama", {"attention_bias": "yes"}, "attention_bias"),
    ("llama", {"mlp_bias": 1}, "mlp_bias"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"sliding_window": 16}, "sliding_window"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"sliding_window": "12"}, "sliding_window"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
    ("llama", {"tie_word_embeddings": 0}, "tie_word_embeddings"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, '"gptq"'),
    ("llama", {"quantization_config": []}, "quantization_config"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("llama", {"num_experts": 8}, "num_experts"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("llama", {"attention_multiplier": 0.5}, "attention_multiplier"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"head_dim": 5}, "head_dim"),
    ("llama", {"head_dim": -10}, "head_dim"),
    ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps"),
    *(("llama", {"hidden_size": bad}, "hidden_size") for bad in (0, -20, 20.0, "20", None, True, [20], 10**30, 2**31)),
    ("llama", {"num_hidden_layers": 3}, "layers.2."),
    ("llama", {"num_hidden_layers": 1}, "layers.1"),
    ("llama", {"num_hidden_layers": 2**31 - 1}, "layers.2"),
    ("llama", {"vocab_size": 64}, "embed_tokens.weight"),
    ("llama", {"vocab_size": 2**31 - 1}, "embed_tokens.weight"),
    ("llama", {"intermediate_size": 36}, "mlp.gate_proj.weight"),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "n_heads 4"),
    ("llama", {"num_key_value_heads": 1}, "self_attn.k_proj.weight"),
    ("llama_biases", {"attention_bias": False}, "bias"),
    ("llama", {"attention_bias": True}, "self_attn.q_proj.bias"),
    ("llama_tied", {"tie_word_embeddings": False}, "lm_head.weight"),
    *(("llama", {"eos_token_id": bad}, "eos_token_id") for bad in (-1, "2", True, 2.0, {}, [2, -1], [2, None], [[2]])),
    *(("llama", {"bos_token_id": bad}, "bos_token_id") for bad in (-1, "1", False, 1.5)),
]


@pytest.mark.parametrize(
    ("name", "changes", "word"), ONE_WORD, ids=lambda value: None if isinstance(value, str) else str(value)[:60]
)
def test_a_config_that_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], word: str
) -> None:
    message_of(copy(tmp_path / "model", name, **changes), word)


def test_what_changes_nothing_is_no_hindrance(tmp_path: Path) -> None:
    harmless = {
        "_name_or_path": "x", "architectures": None, "pretraining_tp": 4, "torch_dtype": "float64", "initializer_range": 7,
        "use_cache": False, "partial_rotary_factor": 1.0, "quantization_config": None, "pruned_heads": {}, "num_experts": 0,
        "attn_logit_softcapping": None, "rope_interleaved": False, "sliding_window": 4096, "pad_token_id": -1,
        "max_window_layers": 1, "tomorrow": {"key": [1]}, "reorder_and_upcast_attn": True, "is_causal": True,
    }  # fmt: skip
    assert config_of(tmp_path / "model", "llama", **harmless) == CONFIGS["llama"]


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "a list": (b"[1]", "a JSON list; expected an object"),
    "null": (b"null", "null"),
    "empty": (b"", "no JSON"),
    "half": (b'{"model_type": "lla', "no JSON"),
    "two": (b"{}{}", "no JSON"),
    "no UTF-8": (b'{"a": "\xff"}', "UTF-8"),
    "nested": (b'{"a":' * 100_000, "nested"),
    "lists without end": (b"[" * 200_000, "nested"),
    "a number of 5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "no JSON"),
    "a key twice": (b'{"model_type": "llama", "model_type": "gpt2"}', "twice"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("damage", BAD_JSON)
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, file: str, damage: str) -> None:
    folder = copy(tmp_path / "model", "mistral")
    (folder / file).write_bytes(BAD_JSON[damage][0])
    message_of(folder, file, BAD_JSON[damage][1])


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(2**40)
    tracemalloc.start()
    try:
        message_of(folder, "config.json", str(2**40))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Folders


def only(folder: Path, *names: str) -> Path:
    """A folder of empty files."""
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_a_folder_that_is_no_model_says_what_it_is_instead(tmp_path: Path) -> None:
    message_of(only(tmp_path / "empty"), "config.json", "Hugging Face")
    message_of(only(tmp_path / "gguf", "model-Q8_0.gguf"), "config.json", "GGUF")
    message_of(only(tmp_path / "adapter", "adapter_config.json", "adapter_model.safetensors"), "adapter")
    message_of(only(tmp_path / "weights", WEIGHTS), "config.json")
    folder = copy(tmp_path / "torch")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    message_of(folder, WEIGHTS, "save_pretrained")
    (folder / "pytorch_model.bin").unlink()
    message_of(folder, WEIGHTS, INDEX)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    message_of(folder, "config.json", "directory")


def test_a_file_of_a_folder_is_told_to_be_a_part(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name the folder"):
        load_checkpoint(copy(tmp_path / "model") / WEIGHTS)


def index_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def reindex(folder: Path, weight_map: Any) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_missing_shard_is_told_by_name(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model", "mistral")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    message_of(folder, shard.name, "missing", INDEX)


OUTSIDE = ["../b/model.safetensors", "/etc/passwd", "..", "a/../../b", "C:\\b", "..\\b"]
NO_NAMES = ["", "a\0b", "a\nb", "\ud800", "x" * 5000, 5, None, ["a"], {}]


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES], ids=lambda name: ascii(name)[:20])
def test_an_index_that_points_out_of_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    folder = copy(tmp_path / "model", "mistral")
    copy(tmp_path / "b")
    message_of(reindex(folder, index_of(folder) | {"lm_head.weight": name}), INDEX, "expected one beside it")


def test_a_shard_may_be_a_link_out_of_the_folder_as_in_the_hubs_cache(tmp_path: Path) -> None:
    folder = copy(tmp_path / "snapshot", "mistral")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    for name, array in read_all(load_checkpoint(folder)).items():
        np.testing.assert_array_equal(array, oracle("mistral", CONFIGS["mistral"])[name])


def test_an_index_and_its_shards_agree_on_who_holds_what(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model", "mistral")
    weight_map = index_of(folder)
    head, norm = "lm_head.weight", "model.norm.weight"
    other = next(name for name in weight_map.values() if name != weight_map[head])
    message_of(reindex(folder, weight_map | {head: other}), other, head)
    message_of(reindex(folder, weight_map | {"nonsense": other}), other, "nonsense")
    message_of(reindex(folder, {key: name for key, name in weight_map.items() if key != norm}), norm)
    for nothing in ({}, [], None, 5):
        message_of(reindex(folder, nothing), "weight_map")


def test_one_whole_file_goes_before_an_index(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model")
    (folder / INDEX).write_text("nonsense")
    assert load_checkpoint(folder).config == CONFIGS["llama"]


# Tensors


def change_of(**changes: Any) -> Callable[[dict[str, tuple[str, Any]]], None]:
    return lambda tensors: tensors.update(changes)


def rename(tensors: dict[str, tuple[str, Any]], new: Callable[[str], str]) -> None:
    old = dict(tensors)
    tensors.clear()
    tensors.update({new(name): value for name, value in old.items()})


def assert_same(folder: Path, name: str) -> None:
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == CONFIGS[name]
    for key, array in read_all(checkpoint).items():
        np.testing.assert_array_equal(array, oracle(name, checkpoint.config)[key])


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    for i, name in enumerate(
        ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight")
    ):
        folder = retensor(copy(tmp_path / str(i)), lambda tensors, name=name: tensors.pop(name))
        message_of(folder, name.removeprefix("model."))


def test_a_tensor_that_has_no_place_is_named_and_not_ignored(tmp_path: Path) -> None:
    one = ("F32", np.ones((4, 4), np.float32))
    for i, name in enumerate(("score.weight", "model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.extra", "a\nb")):
        message_of(retensor(copy(tmp_path / str(i)), change_of(**{name: one})), json.dumps(name)[1:-1])


def test_buffers_of_older_versions_are_left_out(tmp_path: Path) -> None:
    buffer = ("F32", np.full(5, np.nan, np.float32))
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq")
    assert_same(retensor(copy(tmp_path / "llama"), change_of(**dict.fromkeys(names, buffer))), "llama")
    mask = ("BOOL", np.ones((1, 1, 8, 8), np.uint8))
    names = ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")
    assert_same(retensor(copy(tmp_path / "gpt2", "gpt2"), change_of(**dict.fromkeys(names, mask))), "gpt2")


def test_a_base_models_names_have_no_prefix(tmp_path: Path) -> None:
    folder = retensor(
        copy(tmp_path / "a", "llama_tied"), lambda tensors: rename(tensors, lambda name: name.removeprefix("model."))
    )
    assert_same(folder, "llama_tied")
    folder = retensor(copy(tmp_path / "b", "gpt2_base"), lambda tensors: rename(tensors, lambda name: f"transformer.{name}"))
    assert_same(folder, "gpt2_base")


def test_a_tensor_with_and_without_its_prefix_is_refused(tmp_path: Path) -> None:
    folder = retensor(copy(tmp_path / "a"), lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"]}))
    message_of(folder, "norm.weight", "a second time")


def test_what_is_tied_may_be_there_twice(tmp_path: Path) -> None:
    """As in transformers: equal, it is one; different, the weights are believed; the head alone is the embedding."""
    emb, head = "model.embed_tokens.weight", "lm_head.weight"
    assert_same(retensor(copy(tmp_path / "a", "llama_tied"), lambda t: t.update({head: t[emb]})), "llama_tied")
    assert_same(retensor(copy(tmp_path / "b", "llama_tied"), lambda t: t.update({head: t.pop(emb)})), "llama_tied")
    folder = retensor(copy(tmp_path / "c", "llama_tied"), lambda t: t.update({head: ("BF16", t[emb][1] ^ 1)}))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == replace(CONFIGS["llama_tied"], shared_classifier=False)
    np.testing.assert_array_equal(checkpoint.tensors["wcls"][:], checkpoint.tensors["tok_emb"][:] ^ 1)


def test_a_wrong_shape_or_dtype_is_told_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    for i, array in enumerate((np.ones((37, 20)), np.ones(20 * 37), np.ones((20, 37, 1)), np.float32(1))):
        folder = retensor(copy(tmp_path / str(i)), change_of(**{name: ("F32", np.asarray(array, np.float32))}))
        message_of(folder, name, "(20, 37)", WEIGHTS)
    for dtype, array in (
        ("F64", np.ones((20, 37))),
        ("I8", np.ones((20, 37), np.int8)),
        ("F8_E4M3", np.ones((20, 37), np.uint8)),
    ):
        message_of(retensor(copy(tmp_path / dtype), change_of(**{name: (dtype, array)})), name, dtype)


@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen3", "gpt2", "gpt2_base"])
def test_a_number_that_is_not_finite_is_found_in_any_tensor(tmp_path: Path, name: str) -> None:
    for i, (key, (dtype, array)) in enumerate(folders.stored(FIXTURES / name).items()):
        if key.endswith(("attn.bias", "masked_bias")):
            continue
        flawed = array.copy()
        flawed.flat[array.size // 2] = 0x7FC0 if dtype == "BF16" else np.nan
        message_of(retensor(copy(tmp_path / str(i), name), change_of(**{key: (dtype, flawed)})), key, "NaN")


def test_a_shard_that_is_damaged_is_told_by_its_name(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model", "mistral")
    shard = sorted(folder.glob("*.safetensors"))[1]
    header, data = split(shard.read_bytes())
    shard.write_bytes(joined(header, data[:-2]))
    message_of(folder, shard.name, "truncated")


# What it costs


def test_loading_copies_no_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = copy(tmp_path / "model", "gpt2", n_positions=2000, vocab_size=3000, n_embd=192, n_layer=1)

    def grow(tensors: dict[str, tuple[str, Any]]) -> None:
        rename(tensors, lambda name: name)
        for name in [name for name in tensors if ".h.1." in name]:
            del tensors[name]
        for name, (_, array) in list(tensors.items()):
            shape = [{18: 192, 54: 576, 72: 768, 71: 3000, 64: 2000}[n] for n in array.shape]
            tensors[name] = "F32", rng.standard_normal(shape).astype(np.float32)

    retensor(folder, grow)
    load_checkpoint(folder)
    tracemalloc.start()
    try:
        tensors = load_checkpoint(folder).tensors
        assert tracemalloc.get_traced_memory()[1] < 200_000
        rows = tensors["w1"][0][100:200]
        assert rows.shape == (100, 192)
        assert tracemalloc.get_traced_memory()[1] < 3.5 * rows.nbytes + 100_000
    finally:
        tracemalloc.stop()


def test_views_know_their_shapes_without_reading() -> None:
    tensors = load_checkpoint(FIXTURES / "gpt2").tensors
    assert isinstance(tensors["w1"][0], Transposed)
    assert (tensors["w1"][0].shape, tensors["wk"][1].shape, tensors["bk"][1].shape) == ((72, 18), (18, 18), (18,))
    llama = load_checkpoint(FIXTURES / "llama_tied").tensors
    assert isinstance(llama["wk"][0], Pairs)
    assert (llama["wk"][0].shape, llama["wk"][0].dtype) == ((16, 32), np.dtype(np.uint16))
    assert re.fullmatch(r"model\.layers\.0\..*q_proj\.weight", llama["wq"][0].halves.name)
