"""specdec/loaders/hf_folder.py: a folder is read as transformers reads it, or refused by name in one line."""

import json
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.config import Config, ConvConfig, DeltaConfig, ExpertsConfig, RopeScaling, YarnScaling
from specdec.layers.recurrent import fill_rates
from specdec.loaders import CheckpointError, CheckpointWarning, load_checkpoint
from specdec.loaders.checkpoint import Derived
from specdec.loaders.loader import load_model
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant.matrix import floats
from tests.tools import hf_folders
from tests.tools.configs import changed
from tests.tools.gguf_files import CONVERTED
from tests.tools.hf_folders import (
    CONFIGS,
    FIXTURES,
    INDEX,
    MICROSCALED,
    WEIGHTS,
    beside_images,
    copy,
    full_layers,
    gemma_layers,
    joined,
    message_of,
    read_all,
    retensor,
    split,
)

LLAMAS = [name for name in hf_folders.NAMES if not name.startswith("gpt2")]


# What is read


def adjacent(rows: Any, config: Config) -> Any:
    """Rows of halves of heads, one by one to where RoPE's pairs are adjacent; those that it does not turn stay."""
    result = rows.copy()
    for row in range(len(rows)):
        head, i = divmod(row, config.head_dim)
        if i < config.n_turned:
            first = config.head_dim * head + i // 2
            result[row] = rows[first + config.n_turned // 2 if i % 2 else first]
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
    if (shared := f"model.layers.{i}.shared_mlp.input_linear.weight") in t:
        gate, up = np.split(t[shared], 2)
        t = t | {names["w1"]: gate, names["w3"]: up, names["w2"]: t[shared.replace("input", "output")]}
    if (fused := at + "qkv_proj.weight") in t:
        q, k, v = np.split(t[fused], [config.q_dim, config.q_dim + config.kv_dim])
        gate, up = np.split(t[mlp + "gate_up_proj.weight"], 2)
        t = t | {names["wq"]: q, names["wk"]: k, names["wv"]: v, names["w1"]: gate, names["w3"]: up}
    if config.norms == "around":
        stem = f"model.layers.{i}."
        names |= {
            "rms_att_out": stem + "post_attention_layernorm.weight",
            "rms_ffn": stem + "pre_feedforward_layernorm.weight",
            "rms_ffn_out": stem + "post_feedforward_layernorm.weight",
        }
    turned = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")
    there = {name: t[full] for name, full in names.items() if full in t}
    return {name: adjacent(array, config) if name in turned else array for name, array in there.items()}


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


def lfm2_oracle(config: Config, t: dict[str, Any]) -> dict[str, Any]:
    """All tensors; those that only some layers have by their layer's number."""
    ours = {
        "self_attn.q_proj": "wq", "self_attn.k_proj": "wk", "self_attn.v_proj": "wv", "self_attn.out_proj": "wo",
        "self_attn.q_layernorm": "q_norm", "self_attn.k_layernorm": "k_norm", "conv.conv": "conv", "conv.out_proj": "conv_out",
    }  # fmt: skip
    of_all = {"rms_att": "operator_norm", "rms_ffn": "ffn_norm"} | {f"w{i}": f"feed_forward.w{i}" for i in (1, 2, 3)}
    tensors = {
        name: np.stack([t[f"model.layers.{i}.{stored}.weight"] for i in range(config.n_layers)])
        for name, stored in of_all.items()
    }
    for full, array in t.items():
        if not full.startswith("model.layers.") or any(stored in full for stored in of_all.values()):
            continue
        layer, stored, kind = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", full).groups()  # type: ignore[union-attr]
        end = "_bias" if kind == "bias" else ""
        if stored == "conv.in_proj":
            parts = zip("bcx", np.split(array, 3), strict=True)
            tensors |= {f"{layer}.conv_{letter}{end}": part for letter, part in parts}
        elif (name := ours[stored]) in ("wq", "wk", "q_norm", "k_norm"):
            tensors[f"{layer}.{name}"] = adjacent(array, config)
        else:
            tensors[f"{layer}.{name}{end}"] = array[:, 0].T if array.ndim == 3 else array
    outer = {"tok_emb": "model.embed_tokens.weight", "rms_final": "model.embedding_norm.weight", "wcls": "lm_head.weight"}
    return tensors | {name: t[full] for name, full in outer.items() if full in t}


def qwen35_oracle(config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
    """All tensors: norms are what 1 is added to, queries and gates lie in turns, decays are stored by their logarithm."""
    t = {full.replace("model.language_model.", "model."): tensor for full, tensor in tensors.items()}
    t = {full: floats(tensor) if tensor.ndim == 1 else tensor for full, tensor in t.items()}
    t = {full: 1 + tensor if full.endswith("norm.weight") and "linear" not in full else tensor for full, tensor in t.items()}
    own = {"tok_emb": t["model.embed_tokens.weight"], "rms_final": t["model.norm.weight"]}
    own |= {"wcls": t["lm_head.weight"]} if "lm_head.weight" in t else {}
    both = ("rms_att", "rms_ffn", *([] if config.experts else ["w1", "w2", "w3"]))
    layers = [llama_oracle(config, t, i) for i in range(config.n_layers)]
    own |= {name: np.stack([layer[name] for layer in layers]) for name in both}
    for i, layer in enumerate(layers):
        own |= mlp_oracle(config, t, i) if config.experts else {}
        if (linear := config.mixing(DeltaConfig)) and i not in linear:
            double = t[f"model.layers.{i}.self_attn.q_proj.weight"].reshape(config.n_heads, 2, config.head_dim, config.dim)
            layer["wq"], gates = (double[:, part].reshape(config.q_dim, config.dim) for part in (0, 1))
            own |= {f"{i}.wq": adjacent(layer.pop("wq"), config), f"{i}.wg": gates}
            own |= {f"{i}.{name}": tensor for name, tensor in layer.items() if name not in (*both, "w1", "w2", "w3")}
            continue
        at = f"model.layers.{i}.linear_attn."
        t |= split_by_heads(config, t, at)
        own |= {f"{i}.delta_{name}": t[f"{at}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")}
        own |= {f"{i}.delta_out": t[at + "out_proj.weight"], f"{i}.delta_norm": t[at + "norm.weight"]}
        own |= {f"{i}.conv": floats(t[at + "conv1d.weight"][:, 0].T), f"{i}.dt": t[at + "dt_bias"]}
        own[f"{i}.rate"] = np.empty_like(t[at + "A_log"])
        fill_rates(own[f"{i}.rate"], t[at + "A_log"])
        np.testing.assert_allclose(own[f"{i}.rate"], -np.exp(t[at + "A_log"].astype(np.float64)), rtol=2.5e-7)
    return own


def split_by_heads(config: Config, t: dict[str, Any], at: str) -> dict[str, Any]:
    """Of a Qwen3-Next the four products of a delta net, of the two in which those of each head of keys are neighbours."""
    d = next(own.mixer for own in config.layers if own.mixer)
    assert isinstance(d, DeltaConfig)
    if at + "in_proj_ba.weight" not in t:
        return {}
    first, second = (t[f"{at}in_proj_{name}.weight"].reshape(d.n_key_heads, -1, config.dim) for name in ("qkvz", "ba"))
    n, n_shared = d.n_values // d.n_key_heads, d.n_value_heads // d.n_key_heads
    sizes = {"q": d.key_dim, "k": d.key_dim, "v": n, "z": n}
    parts, start = dict[str, Any](), 0
    for name, size in sizes.items():
        parts[name], start = first[:, start : start + size].reshape(-1, config.dim), start + size
    made = {"qkv": np.concatenate([parts[name] for name in "qkv"]), "z": parts["z"]}
    made |= {"b": second[:, :n_shared].reshape(-1, config.dim), "a": second[:, n_shared:].reshape(-1, config.dim)}
    return {f"{at}in_proj_{name}.weight": part for name, part in made.items()}


OF_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def mlp_oracle(config: Config, t: dict[str, Any], i: int) -> dict[str, Any]:
    """Those of layer i's experts, all below each other, or of its MLP."""
    assert config.experts
    at = f"model.layers.{i}.mlp."
    if i in config.experts.dense_layers:
        return {f"{i}.{ours}": t[f"{at}{stored}.weight"] for stored, ours in OF_MIXTRAL.items()}
    own = {f"{i}.router": t[at + "gate.weight"]}
    for stored, ours in OF_MIXTRAL.items():
        end = f"{ours if f'{at}experts.0.{ours}.weight' in t else stored}.weight"
        own[f"{i}.experts_{ours}"] = np.stack([t[f"{at}experts.{e}.{end}"] for e in range(config.experts.n)])
        if config.experts.shared_dim:
            own[f"{i}.shared_{ours}"] = t[f"{at}shared_expert.{end}"]
    return own | ({f"{i}.shared_gate": t[at + "shared_expert_gate.weight"]} if config.experts.shared_gate else {})


def mixture_oracle(config: Config, t: dict[str, Any]) -> dict[str, Any]:
    """All tensors: of experts those of all below each other, by the names of Qwen3-MoE or of Mixtral."""
    t = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in t.items()}
    own, layers = dict[str, Any](), list[dict[str, Any]]()
    for i in range(config.n_layers):
        own |= mlp_oracle(config, t, i)
        layers.append({name: tensor for name, tensor in llama_oracle(config, t, i).items() if name not in ("w1", "w2", "w3")})
    if config.experts and not config.experts.dense_layers:
        own["router"] = np.stack([own.pop(f"{i}.router") for i in range(config.n_layers)])
    outer = {"tok_emb": "model.embed_tokens.weight", "rms_final": "model.norm.weight", "wcls": "lm_head.weight"}
    stacked = {name: np.stack([each[name] for each in layers]) for name in layers[0]}
    return own | stacked | {name: t[full] for name, full in outer.items() if full in t}


def oracle(name: str, config: Config) -> dict[str, Any]:
    tensors = {full.removeprefix("language_model."): array for full, (_, array) in hf_folders.stored(FIXTURES / name).items()}
    if config.mixing(ConvConfig):
        found = lfm2_oracle(config, tensors)  # taps are made, which are floats then
        return found | {key: floats(array) for key, array in found.items() if key.endswith(".conv")}
    if config.mixing(DeltaConfig):
        return qwen35_oracle(config, tensors)
    if config.experts:
        return mixture_oracle(config, tensors)
    if config.architecture == "gpt2":
        tensors = {full.removeprefix("transformer."): array for full, array in tensors.items()}
        whole = {"tok_emb": "wte.weight", "pos_emb": "wpe.weight", "ln_final": "ln_f.weight", "ln_final_bias": "ln_f.bias"}
        layer = gpt2_oracle
    else:
        whole = {"tok_emb": "model.embed_tokens.weight", "rms_final": "model.norm.weight", "wcls": "lm_head.weight"}
        layer = llama_oracle
    layers = [layer(config, tensors, i) for i in range(config.n_layers)]
    stacked = {key: np.stack([each[key] for each in layers]) for key in layers[0]}
    result = stacked | {key: tensors[full] for key, full in whole.items() if full in tensors}
    if config.norms == "around":  # whose norms are stored less one
        result |= {key: 1 + floats(array) for key, array in result.items() if key.startswith("rms") or key.endswith("norm")}
    return result


@pytest.mark.parametrize("name", [name for name in hf_folders.NAMES if name not in CONVERTED])
def test_every_tensor_is_the_stored_one_in_our_order_of_rows(name: str) -> None:
    checkpoint = load_checkpoint(FIXTURES / name)
    expected, got = oracle(name, checkpoint.config), read_all(checkpoint)
    assert set(got) == set(expected)
    assert {key: array.shape for key, array in got.items()} == architecture_of(checkpoint.config).shapes(checkpoint.config)
    for key, array in got.items():
        wanted = expected[key]
        is_wider = "dt" in key or "delta_norm" in key  # in the oracle
        np.testing.assert_array_equal(floats(array) if is_wider else array, wanted, strict=True)


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
        ("qwen2", "wk"),
        ("qwen2", "bq"),
        ("qwen3", "k_norm"),
        ("gpt2", "wk"),
        ("gpt2_base", "w2"),
    ],
)
def test_any_rows_of_a_view_are_those_of_the_whole(name: str, key: str) -> None:
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
def test_a_config_says_what_config_json_says(name: str) -> None:
    checkpoint = load_checkpoint(FIXTURES / name)
    assert checkpoint.config == CONFIGS[name]
    assert checkpoint.path == FIXTURES / name
    ends = {"llama3": [2, 5, 9], "gpt2": [0], "gpt2_base": [0]}.get(name, [2])
    assert checkpoint.end_marks == dict.fromkeys(ends, "eos")
    assert checkpoint.bos == (0 if "gpt2" in name else 1)


# What comes out of it


def model_of(name: str, **changes: Any) -> Transformer:
    """A fixture's model, some numbers of whose config are others, with keys and values in fp32 as transformers' are."""
    checkpoint = load_checkpoint(FIXTURES / name)
    config = changed(checkpoint.config, **changes)
    return Transformer(config, architecture_of(config).pack(config, checkpoint.tensors), kv="f32")


def error_of(model: Transformer, expected: hf_folders.Expected) -> float:
    """The largest difference of a logit from transformers', of the largest logit at its position."""
    difference = np.abs(model.forward(expected.tokens, len(expected.tokens)) - expected.logits).max(1)
    return float((difference / np.abs(expected.logits).max(1)).max())


@pytest.mark.parametrize("name", hf_folders.NAMES)
def test_logits_and_greedy_text_are_those_of_transformers(name: str) -> None:
    """At each of 60 positions; 1.3e-5 is the most that was seen of 39 random models."""
    model, expected = model_of(name), hf_folders.expected(name)
    assert error_of(model, expected) < 3e-5
    text = expected.tokens[:5]
    for _ in expected.continuation:
        text.append(int(model.forward(text)[0].argmax()))
    assert text[5:] == expected.continuation


FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"window": 0}),
    ("phi3", {"rope_dim": 0, "rope_divisors": (), "long_divisors": (), "n_short": 0}),
    ("phi3", {"rope_divisors": ()}),
    ("phi3_long", {"n_short": 18}),
    ("phi3_long", {"n_short": 16}),
    ("phi3_long", {"n_short": 0, "long_divisors": ()}),
    ("phi3", {"rope_scale": 1.0}),
    ("phi3_plain", {"window": 10}),
    ("lfm2", {"norm_eps": 1e-2}),
    ("lfm2_odd", {"rope_theta": 1e6}),
    ("mistral", {"window": 11}),
    ("mistral", {"window": 13}),
    ("qwen2_window", {"window": 0}),
    ("llama3", {"rope_scaling": None}),
    ("llama3", {"rope_scaling": RopeScaling(8, 1, 3, 64)}),
    ("llama", {"rope_theta": 20000.0}),
    ("gemma3", {"window": 10}),
    ("gemma3", {"layers": ()}),
    ("gemma3", {"layers": gemma_layers((4,), 7)}),
    ("gemma3", {"rope_theta": 1e6}),
    ("gemma3_scaled", {"rope_theta": 1e4}),
    ("gemma3_scaled", {"layers": gemma_layers((0, 3), 4)}),
    ("gemma3_scaled", {"attention_scale": 0.0}),
    ("gemma3_half", {"embedding_scale": 1.0}),
    ("ministral3", {"query_scale": 0.0}),
    ("ministral3", {"query_span": 17}),
    ("ministral3", {"rope_scaling": YarnScaling(4, 16, beta_fast=2, in_whole_pairs=False)}),
    ("ministral3", {"rope_scaling": YarnScaling(4, 16, beta_fast=1)}),
    ("ministral3_beside", {"rope_scaling": YarnScaling(8, 20, 4, 1, in_whole_pairs=False)}),
    ("ministral3_scale", {"rope_scaling": None}),
    ("qwen35", {"rope_dim": 8}),
    ("qwen35_odd", {"rope_theta": 2e5}),
    ("qwen35_images", {"norm_eps": 0.1}),
    ("glm4", {"rope_dim": 4}),
    ("glm4", {"norms": "before"}),
    ("olmo3", {"window": 10}),
    ("olmo3", {"layers": full_layers((3,), 4)}),
    ("olmo3", {"layers": full_layers((2, 3), 4, rope_scaling=YarnScaling(4, 16, 2, 0.1))}),
    ("qwen3_next", {"delta": ((0, 1, 2), DeltaConfig(2, 4, 16, 16, in_turns=True))}),
    ("qwen3_next_odd", {"experts": ExpertsConfig(5, 3, 20, True, (0, 1, 2), shared_dim=9, shared_gate=True)}),
    ("qwen35", {"delta": ((0, 1, 2), DeltaConfig(2, 4, 8, 16, in_turns=True))}),
]


def test_blocks_of_mxfp4_are_the_numbers_that_transformers_makes_of_them() -> None:
    """Both matrices that lie in turns, too; as floats, since the product of blocks rounds what it multiplies to bytes."""
    checkpoint, expected = load_checkpoint(FIXTURES / MICROSCALED), hf_folders.expected(MICROSCALED)
    numbers = {
        name: [tensor[0 : tensor.shape[0]] for tensor in tensors] if "experts_w" in name else tensors
        for name, tensors in checkpoint.tensors.items()
    }
    model = Transformer(checkpoint.config, architecture_of(checkpoint.config).pack(checkpoint.config, numbers), kv="f32")
    assert error_of(model, expected) < 3e-5
    assert load_model(FIXTURES / MICROSCALED).weights.kind == "MXFP4 and bf16", "4 bits stay 4 bits"


def test_any_rows_of_blocks_that_lie_in_turns_are_those_of_the_whole() -> None:
    for tensors in (load_checkpoint(FIXTURES / MICROSCALED).tensors[f"1.experts_w{i}"] for i in (1, 2, 3)):
        whole = tensors[2].blocks(0, tensors[2].shape[0])
        for first, last in ((0, 1), (3, 20), (30, 32), (5, 5)):
            np.testing.assert_array_equal(tensors[2].blocks(first, last), whole[first:last])


def test_damaged_blocks_of_mxfp4_are_told_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"

    def with_blocks(change: Callable[[dict[str, tuple[str, Any]]], Any], *words: str) -> None:
        folder = copy(tmp_path / str(len([*tmp_path.iterdir()])), MICROSCALED)
        message_of(retensor(folder, change), *words)

    with_blocks(lambda t: t.pop(f"{name}_scales"), "holds no tensor", "gate_up_proj_scales")
    with_blocks(lambda t: t.update({f"{name}_scales": ("I8", t[f"{name}_scales"][1])}), '"I8"', "expected U8")
    with_blocks(lambda t: t.update({f"{name}_scales": ("U8", t[f"{name}_scales"][1][:, 1:])}), "has the shape")
    with_blocks(lambda t: t.update({f"{name}_blocks": ("U8", t[f"{name}_blocks"][1][:5])}), "has the shape")
    with_blocks(lambda t: t.update({f"{name}_scales": ("U8", t[f"{name}_scales"][1] | 255)}), "scales below 2^-24 or above 2^15")
    message_of(copy(tmp_path / "odd", MICROSCALED, hidden_size=65), "")


@pytest.mark.parametrize(("name", "changes"), FEATURES, ids=str)
def test_a_fixture_tells_whether_its_feature_is_done(name: str, changes: dict[str, Any]) -> None:
    assert error_of(model_of(name, **changes), hf_folders.expected(name)) > 1e-2


# Folders


@pytest.mark.parametrize(
    ("name", "prefix", "head"),
    [
        ("mistral", "language_model.model.", "language_model.lm_head.weight"),  # as the hub has them
        ("mistral", "model.language_model.", "lm_head.weight"),  # as transformers' modules are called
        ("llama_tied", "language_model.model.", ""),
    ],
)
def test_the_model_of_a_text_is_read_from_beside_that_of_images(tmp_path: Path, name: str, prefix: str, head: str) -> None:
    checkpoint = load_checkpoint(beside_images(copy(tmp_path / "model", name), prefix, head))
    assert checkpoint.config == CONFIGS[name]
    for key, array in oracle(name, CONFIGS[name]).items():
        np.testing.assert_array_equal(read_all(checkpoint)[key], array)


def test_gemma_3_beside_images_is_read(tmp_path: Path) -> None:
    folder = beside_images(copy(tmp_path / "model", "gemma3"), "language_model.model.", model_type="gemma3")
    got, expected = load_checkpoint(folder), load_checkpoint(FIXTURES / "gemma3")
    assert (got.config, got.end_marks, got.bos) == (expected.config, expected.end_marks, expected.bos)
    for key, array in read_all(expected).items():
        np.testing.assert_array_equal(read_all(got)[key], array)


def only(folder: Path, *names: str) -> Path:
    """A folder of empty files."""
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


OTHERS = {
    "consolidated.safetensors": "in Mistral's own format, which is not supported; download config.json, model*.safetensors",
    "consolidated.00.pth": "in Meta's own format, which is not supported",
    "model.pth": "a PyTorch file, which is not supported; convert it",
    "pytorch_model-00001-of-00002.bin": "a PyTorch file, which is not supported; convert it",
    "model.onnx": "an ONNX model is not supported; use the original",
    "openvino_model.xml": "an OpenVINO model is not supported; use the original",
    "tf_model.h5": "weights of TensorFlow or Flax, which are not supported",
    "flax_model.msgpack": "weights of TensorFlow or Flax, which are not supported",
    "weights.npz": "weights of MLX, which are not supported",
    "model_index.json": "a pipeline of diffusers, which makes pictures",
    "model-00001-of-00002.safetensors": "is a shard; download model.safetensors.index.json",
    "model.safetensors.incomplete": "is not finished",
    "models--org--name": "name a model by its repository: org/name",
    "mmproj-model.gguf": "expected a Hugging Face folder",
    "model.gguf": "name one of its GGUF files: ",
}


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_format_names_it_and_the_way_out(tmp_path: Path, name: str, has_config: bool) -> None:
    folder = copy(tmp_path / "model")
    (folder / WEIGHTS).rename(folder / name)
    if not has_config:
        (folder / "config.json").unlink()
    message_of(folder, OTHERS[name])


def test_weights_by_another_name_and_a_folder_of_models_are_told_with_what_to_do(tmp_path: Path) -> None:
    folder = copy(tmp_path / "some" / "model")
    message_of(tmp_path / "some", "name one of the models in it: /model")
    (folder / WEIGHTS).rename(folder / "mine.safetensors")
    message_of(folder, f"rename its mine.safetensors to {WEIGHTS}")
    (folder / "config.json").unlink()
    message_of(folder, "download config.json and tokenizer.json to it, from where mine.safetensors comes from")


def test_a_config_that_is_a_pointer_of_git_lfs_is_told(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model")
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    message_of(folder, "config.json is a Git LFS pointer")


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


def test_an_adapter_next_to_a_model_is_not_ignored_without_a_word(tmp_path: Path) -> None:
    folder = copy(tmp_path / "model")
    load_model(folder, n_threads=1)  # says nothing, or this test fails
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.warns(CheckpointWarning, match=r"model holds an adapter \(adapter_config.json\), which is not applied: .*merge"):
        load_model(folder, n_threads=1)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_of_a_folder_is_told_to_be_a_part(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="name the folder"):
        load_checkpoint(copy(tmp_path / "model") / name)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_link_to_nothing_is_told_by_name(tmp_path: Path, name: str) -> None:
    """As in a snapshot of the hub's cache that was copied without its blobs."""
    folder = copy(tmp_path / "model")
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/0123")
    message_of(folder, name, "link")


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
    for i, (key, (dtype, array)) in enumerate(hf_folders.stored(FIXTURES / name).items()):
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
    assert isinstance(tensors["w1"][0], Derived)
    assert (tensors["w1"][0].shape, tensors["wk"][1].shape, tensors["bk"][1].shape) == ((72, 18), (18, 18), (18,))
    llama = load_checkpoint(FIXTURES / "llama_tied").tensors
    assert isinstance(llama["wk"][0], Derived)
    assert (llama["wk"][0].shape, llama["wk"][0].dtype) == ((16, 32), np.dtype(np.uint16))
    assert re.fullmatch(r"model\.layers\.0\..*q_proj\.weight", llama["wq"][0].stored.name)
