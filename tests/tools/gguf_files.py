"""GGUF files for the tests: written byte by byte, and made from the fixtures' folders and tokenizers."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.layers.recurrent_ops import fill_decay_rates
from specdec.loaders.gguf_file import GGUFFile
from specdec.mixer_config import DeltaNetConfig, ShortConvConfig
from specdec.model_config import Llama3RopeScaling, ModelConfig, YarnRopeScaling
from tests.tools import hf_folders
from tests.tools.half_precision import widen_exactly
from tests.tools.hf_folders import CONFIG_TABLE, CONFIGS, FIXTURES

TOKENIZERS = FIXTURES / "tokenizers"
TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "I32": 26,
    "I64": 27, "BF16": 30, "Q2_K": 10, "Q3_K": 11, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
    "TQ1_0": 34, "TQ2_0": 35, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42,
}  # fmt: skip
BLOCK_SIZES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210), "Q2_K": (256, 84), "Q3_K": (256, 110), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17), "Q1_0": (128, 18), "Q2_0": (64, 18), "TQ2_0": (256, 66),
    "TQ1_0": (256, 54), "NVFP4": (64, 36),
}  # fmt: skip
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
Keys = dict[str, Any]


class TypedValue(NamedTuple):
    """A value with an explicit GGUF type; 9 is an array with elements of type `inner`."""

    kind: int
    value: Any
    inner: int = 0


class RawTensor(NamedTuple):
    """A tensor as type, shape (outermost dimension first) and bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes


def encode_string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def to_typed_value(value: Any) -> TypedValue:
    """Return the value typed as writers do: integers as u32, or i32 in arrays."""
    if isinstance(value, TypedValue):
        return value
    if isinstance(value, list):
        return TypedValue(9, value, {str: 8, float: 6, int: 5, bool: 7}[type(value[0])])
    return TypedValue({str: 8, float: 6, int: 4, bool: 7}[type(value)], value)


def encode_value(value: Any) -> bytes:
    kind, content, inner = to_typed_value(value)

    def plain(kind: int, content: Any) -> bytes:
        return encode_string(content) if kind == 8 else struct.pack("<" + FORMATS[kind], content)

    head = struct.pack("<I", kind)
    if kind != 9:
        return head + plain(kind, content)
    return head + struct.pack("<IQ", inner, len(content)) + b"".join(plain(inner, each) for each in content)


def to_raw_tensor(tensor: Any) -> RawTensor:
    return tensor if isinstance(tensor, RawTensor) else RawTensor(DTYPES[tensor.dtype], tensor.shape, tensor.tobytes())


def header_bytes(keys: Mapping[str, Any], tensors: Mapping[str, Any], version: int = 3, alignment: int = 32) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    out += b"".join(encode_string(key) + encode_value(value) for key, value in keys.items())
    at = 0
    for name, tensor in tensors.items():
        kind, shape, data = to_raw_tensor(tensor)
        out += (
            encode_string(name)
            + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            + struct.pack("<IQ", TYPE_IDS[kind], at)
        )
        at += -(-len(data) // alignment) * alignment
    return out


def gguf_bytes(keys: Mapping[str, Any], tensors: Mapping[str, Any], version: int = 3, alignment: int = 32) -> bytes:
    """Return a whole file."""

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % alignment)

    data = [padded(to_raw_tensor(tensor).data) for tensor in tensors.values()]
    return padded(header_bytes(keys, tensors, version, alignment)) + b"".join(data)


def make_split_files(keys: Keys, tensors: Mapping[str, Any], n: int) -> list[bytes]:
    """Return the n shards of a split file."""
    names = list(tensors)
    size = math.ceil(len(names) / n)
    parts = []
    for i in range(n):
        own = {"split.no": TypedValue(2, i), "split.count": TypedValue(2, n), "split.tensors.count": TypedValue(5, len(names))}
        part = {name: tensors[name] for name in names[i * size : (i + 1) * size]}
        parts.append(gguf_bytes((keys if i == 0 else {}) | own, part))
    return parts


def write_parts(folder: Path, parts: list[bytes]) -> Path:
    """Write the shards to a folder and return the path of the first."""
    for i, data in enumerate(parts):
        (folder / f"model-{i + 1:05}-of-{len(parts):05}.gguf").write_bytes(data)
    return folder / f"model-00001-of-{len(parts):05}.gguf"


def random_blocks(rng: np.random.Generator, kind: str, rows: int, n: int, scale: float = 0.02) -> RawTensor:
    """Return a matrix of random codes with scales of about this size."""
    n_weights, n_bytes = BLOCK_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * n // n_weights, n_bytes), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 128 + np.rint(np.log2(scale * rng.random(len(blocks)) + 1e-6))
        return RawTensor(kind, (rows, n), blocks.tobytes())
    if kind == "NVFP4":
        blocks[:, :4] = rng.integers(0, 0x18, (len(blocks), 4))
        return RawTensor(kind, (rows, n), blocks.tobytes())
    offsets = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)} | dict.fromkeys(
        ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "Q1_0", "Q2_0"), (0,)
    )
    for at in offsets.get(kind, (0, 2)):
        divisor = {"K": 16, "L": 10, "S": 160}.get(kind[-1], 1)
        scales = (rng.standard_normal(len(blocks)) * scale / divisor).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return RawTensor(kind, (rows, n), blocks.tobytes())


# Models

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "shared_mlp.input_linear": "ffn_gate",
    "shared_mlp.output_linear": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm",
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
QWEN35_NAMES = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.out_proj": "ssm_out", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip
GPT2_NAMES = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
# values that GGUF files do not have, or value heads in another order
EXCLUDED = {
    "smollm3_layers", "phi3_factor", "phi3_long", "ministral3_vision", "ministral3_scale", "gemma3_scaled", "lfm2_biases",
    "qwen35", "qwen35_images", "qwen3_next_odd", "granite_h_odd", "falcon_h1_odd", "muse_glimmer_layers",
}  # fmt: skip
CONVERTED = [
    path.stem for path in sorted((FIXTURES / "gguf").glob("*.gguf")) if (FIXTURES / path.stem).is_dir()
]  # files of llama.cpp's converter, not written here
PERMUTED = ("llama", "granite", "smollm3", "mistral3")
SCALES = {
    "embedding_scale": "embedding_scale", "residual_scale": "residual_scale",
    "logit_divisor": "logit_scale",
}  # fmt: skip


def get_gguf_architecture(name: str) -> str:
    """Return GGUF's name for a fixture's family."""
    families = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "ministral3": "mistral3"}
    families |= {
        a: a for a in ("phi3", "qwen2", "qwen35", "qwen3", "gemma3", "gpt2", "granite", "smollm3", "lfm2", "llama", "bitnet")
    }
    return next(a for start, a in families.items() if name.startswith(start))


NAMES = [
    name
    for name in hf_folders.NAMES
    if name in CONFIG_TABLE
    and name not in (*EXCLUDED, *CONVERTED)
    and ("window" not in CONFIG_TABLE[name].get("attention", {}) or name.startswith("gemma3"))
]


def get_stored_name(full: str, a: str = "llama") -> str:
    """Return a tensor's name in GGUF for an architecture."""
    layer, rest = "", full.removeprefix("transformer.").replace("model.language_model.", "model.")
    for prefix in ("model.layers.", "h."):
        if rest.startswith(prefix):
            number, _, rest = rest.removeprefix(prefix).partition(".")
            layer = f"blk.{number}."
    stem, _, end = rest.rpartition(".")
    if end in ("A_log", "dt_bias"):
        return layer + {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}[end]
    others = {"gemma3": GEMMA3_NAMES, "qwen35": QWEN35_NAMES}.get(a, {})
    return f"{layer}{(LLAMA_NAMES | GPT2_NAMES | others)[stem]}.{end}"


def interleave_halves(array: Any, head_dim: int) -> Any:
    """Return rows in the order of `llama`: the halves of each head, interleaved."""
    heads = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(array.shape)


def make_model_tensors(name: str) -> dict[str, Any]:
    """Return a fixture's tensors as a converter writes them: vectors in fp32, matrices (outputs, inputs)."""
    config, tensors = CONFIGS[name], {}
    tensors |= make_expert_tensors(name)
    for full, (_, array) in hf_folders.read_folder_tensors(FIXTURES / name).items():
        if ".experts." in full:
            continue
        if full.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        if "input_linear" in full:  # the gate, then what it gates
            for part, rows in zip(("gate", "up"), np.split(array, 2), strict=True):
                tensors[get_stored_name(full).replace("ffn_gate", f"ffn_{part}")] = rows
            continue
        if full.startswith(("model.visual.", "mtp.")):
            continue
        stored, result = get_stored_name(full, get_gguf_architecture(name)), array
        if get_gguf_architecture(name) == "qwen35":
            result = convert_qwen35_tensor(config, full, array)
        if get_gguf_architecture(name) == "gpt2" and ".c_" in f".{full}" and array.ndim == 2:
            result = np.ascontiguousarray(array.T)
        if get_gguf_architecture(name) in PERMUTED and stored.split(".")[-2] in ("attn_q", "attn_k"):
            result = interleave_halves(array, config.head_dim)
        if result.ndim == 3:  # of a convolution
            result = widen_exactly(result)[:, 0]
        tensors[stored] = widen_exactly(result) if result.ndim == 1 else result
        if get_gguf_architecture(name) == "gemma3" and result.ndim == 1:
            tensors[stored] += 1
    if name == "phi3":
        factors = json.loads((FIXTURES / name / "config.json").read_text())["rope_parameters"]
        for kind in ("short", "long"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(factors[f"{kind}_factor"], np.float32)
    if isinstance(config.rope.scaling, Llama3RopeScaling):
        tensors["rope_freqs.weight"] = rope_divisors(config)
    return tensors


def make_expert_tensors(name: str) -> dict[str, Any]:
    """Return a fixture's experts as a converter writes them: all of a layer in one tensor."""
    found: dict[str, list[Any]] = {}
    kinds = {"gate_proj": "gate", "w1": "gate", "down_proj": "down", "w2": "down", "up_proj": "up", "w3": "up"}
    for full, (_, array) in sorted(
        hf_folders.read_folder_tensors(FIXTURES / name).items()
    ):  # sorted correctly, as there are fewer than ten
        if ".experts." in full:
            _, _, layer, *_, kind, _ = full.split(".")
            found.setdefault(f"blk.{layer}.ffn_{kinds[kind]}_exps.weight", []).append(array)
    return {stored: np.stack(arrays) for stored, arrays in found.items()}


def get_delta_config(config: ModelConfig) -> DeltaNetConfig | None:
    """Return the config of the delta nets, or None."""
    return next((own.mixer for own in config.layers if isinstance(own.mixer, DeltaNetConfig)), None)


def convert_qwen35_tensor(config: ModelConfig, full: str, array: Any) -> Any:
    """Return a tensor as llama.cpp's converter writes it: norms unchanged, value heads interleaved by key head."""
    d = get_delta_config(config)
    assert d
    wide = widen_exactly(array)
    if full.endswith("A_log"):
        rates = np.empty_like(wide)
        fill_decay_rates(rates, wide)
        array = rates
    elif full.endswith("norm.weight") and not full.endswith("linear_attn.norm.weight"):
        array = wide + np.float32(1)
    elif "conv1d" in full:
        array = wide[:, 0]
    if ".linear_attn." not in full or full.endswith("norm.weight"):
        return array
    n_in_front = d.conv_dim - d.total_value_dim if "in_proj_qkv" in full or "conv1d" in full else 0
    front, heads = np.split(array.T if "out_proj" in full else array, [n_in_front])
    by_keys = heads.reshape(d.n_key_heads, d.n_value_heads // d.n_key_heads, -1, *heads.shape[1:])
    result = np.concatenate([front, by_keys.swapaxes(0, 1).reshape(heads.shape)])
    return np.ascontiguousarray(result.T if "out_proj" in full else result)


def make_model_with_head(name: str) -> tuple[Keys, dict[str, Any]]:
    """Return metadata and tensors of a Qwen3.5 fixture, with its built-in head as the layer after the last."""
    config, tensors = CONFIGS[name], make_model_tensors(name)
    keys = make_model_keys(name) | {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": config.n_layers + 1}
    recurrent = keys["qwen35.attention.recurrent_layers"]
    keys["qwen35.attention.recurrent_layers"] = recurrent._replace(value=[*recurrent.value, False])
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    for full, (_, array) in hf_folders.read_folder_tensors(FIXTURES / name).items():
        if full.startswith("mtp."):
            own = full.removeprefix("mtp.").removesuffix(".weight")
            layer = f"model.layers.{config.n_layers}.{own.removeprefix('layers.0.')}.weight"
            stored = f"blk.{config.n_layers}.nextn.{names[own]}.weight" if own in names else get_stored_name(layer, "qwen35")
            tensors[stored] = convert_qwen35_tensor(config, "norm.weight" if array.ndim == 1 else full, array)
    return keys, tensors


def rope_divisors(config: ModelConfig) -> Any:
    """Return Llama 3.1's frequency factors in fp32: 1 for fast pairs, the factor for slow ones."""
    scaling = config.rope.scaling
    assert isinstance(scaling, Llama3RopeScaling)
    waves = 2 * math.pi * config.rope.theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    low, high = (scaling.original_seq_len / each for each in (scaling.low_freq_factor, scaling.high_freq_factor))
    smooth = (scaling.original_seq_len / waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = 1 / ((1 - smooth) / scaling.factor + smooth)
    return np.where(waves < high, 1, np.where(waves > low, scaling.factor, between)).astype(np.float32)


def make_model_keys(name: str) -> Keys:
    """Return the metadata that a converter writes for a fixture's config."""
    config, a = CONFIGS[name], get_gguf_architecture(name)
    keys: Keys = {
        "general.architecture": a,
        f"{a}.block_count": config.n_layers,
        f"{a}.context_length": config.seq_len,
        f"{a}.embedding_length": config.dim,
        f"{a}.feed_forward_length": config.hidden_dim,
        f"{a}.attention.head_count": config.n_heads,
    }
    if a == "gpt2":
        return keys | {"gpt2.attention.layer_norm_epsilon": config.norm_eps}
    if a == "phi3":
        keys |= {"phi3.rope.dimension_count": config.rotary_dim, "phi3.rope.scaling.attn_factor": config.rope.attention_factor}
        keys |= {"phi3.context_length": 128, "phi3.rope.scaling.original_context_length": 64}
    if a == "gemma3":
        keys |= {"gemma3.attention.sliding_window": config.attention.window}
        if name != "gemma3":  # one full-attention layer in six is the default
            windows = [config.layer_config(i).attention.window for i in range(config.n_layers)]
            keys |= {"gemma3.attention.sliding_window_pattern": windows.index(0) + 1}
    if isinstance(yarn := config.rope.scaling, YarnRopeScaling):
        scaling = {"type": "yarn", "factor": yarn.factor, "original_context_length": yarn.original_seq_len}
        scaling |= {"yarn_beta_fast": yarn.beta_fast, "yarn_beta_slow": yarn.beta_slow, "yarn_log_multiplier": 1.0}
        keys |= {f"{a}.rope.scaling.{key}": value for key, value in scaling.items()}
        keys |= {f"{a}.attention.temperature_scale": config.rope.query_scale, f"{a}.rope.dimension_count": config.head_dim}
    kv_heads: Any = config.n_kv_heads
    mixers = [overrides.mixer for overrides in config.layers]
    if convolutions := [i for i, mixer in enumerate(mixers) if isinstance(mixer, ShortConvConfig)]:
        kv_heads = [0 if i in convolutions else kv_heads for i in range(config.n_layers)]
        keys["lfm2.shortconv.l_cache"] = config.layers[convolutions[0]].mixer.kernel_size
    if d := get_delta_config(config):
        recurrent = [isinstance(mixer, DeltaNetConfig) for mixer in mixers]
        keys |= {
            "qwen35.rope.dimension_count": config.rotary_dim,
            "qwen35.rope.dimension_sections": TypedValue(9, [11, 11, 10, 0], 5),
        }
        keys |= {"qwen35.attention.recurrent_layers": TypedValue(9, recurrent, 7), "qwen35.full_attention_interval": 4}
        numbers = (d.kernel_size, d.key_head_dim, d.n_key_heads, d.n_value_heads, d.total_value_dim)
        names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
        keys |= {f"qwen35.ssm.{key}": number for key, number in zip(names, numbers, strict=True)}
    if e := config.experts:
        numbers = {"expert_count": e.n_experts, "expert_used_count": e.n_experts_used, "expert_feed_forward_length": e.hidden_dim}
        keys |= {f"{a}.{key}": number for key, number in numbers.items()}
    return keys | {
        f"{a}.attention.head_count_kv": kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{a}.rope.freq_base": next((own.attention.rope.theta for own in config.layers if own.attention), config.rope.theta),
        f"{a}.attention.key_length": config.head_dim,
        f"{a}.attention.value_length": config.head_dim,
        f"{a}.vocab_size": config.vocab_size,
        **({f"{a}.{key}": getattr(config, ours) for ours, key in SCALES.items()} if a == "granite" else {}),
        **({f"{a}.attention.scale": config.attention.scale} if a == "granite" else {}),
    }


# Tokenizers


def make_tokenizer_keys(name: str, path: Path | None = None) -> Keys:
    """Return the metadata that a converter writes for a fixture's tokenizer, or for a changed copy of it."""
    content = json.loads((path or TOKENIZERS / f"{name}.json").read_text(encoding="utf-8"))
    vocabulary = dict(content["model"]["vocab"])
    added = {each["id"]: each for each in content["added_tokens"]}
    vocabulary |= {each["content"]: token for token, each in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    keys: Keys = {"tokens": tokens}
    if name in ("llama2", "gemma3"):
        bos, eos = ("<s>", "</s>") if name == "llama2" else ("<bos>", "<eos>")
        ranks = {"".join(merge): i for i, merge in reversed(list(enumerate(content["model"]["merges"])))}
        types = [6 if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)]
        types[vocabulary["<unk>"]] = 2
        keys |= {"model": "llama", "scores": [-float(ranks.get(token, 10**6)) for token in tokens]}
        keys |= {"bos_token_id": vocabulary[bos], "eos_token_id": vocabulary[eos], "unknown_token_id": vocabulary["<unk>"]}
        if name == "gemma3":  # a converter writes its tokens for runs of spaces as spaces
            keys |= {"add_space_prefix": False, "pre": "default"}
            keys["tokens"] = [t.replace("▁", " ") if kind == 4 else t for t, kind in zip(tokens, types, strict=True)]
    else:
        pre, bos, eos = {
            "gpt2": ("gpt-2", "<|endoftext|>", "<|endoftext|>"),
            "smollm2": ("smollm", "<|im_start|>", "<|im_end|>"),
            "qwen2": ("qwen2", "<|endoftext|>", "<|im_end|>"),
            "tekken": ("tekken", "<s>", "</s>"),
            "qwen35": ("qwen35", "<|endoftext|>", "<|im_end|>"),
            "phi4": ("gpt-4o", "<|endoftext|>", "<|end|>"),
            "lfm2": ("lfm2", "<|startoftext|>", "<|im_end|>"),
            "llama3": ("llama-bpe", "<|begin_of_text|>", "<|end_of_text|>"),
        }[name]
        keys |= {"model": "gpt2", "pre": pre, "merges": merges, "bos_token_id": vocabulary[bos], "eos_token_id": vocabulary[eos]}
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | {"token_type": types}).items()}


def convert_random_folder(folder: Path) -> tuple[Keys, dict[str, Any]]:
    """Return metadata and tensors of a random Llama or Qwen3 in bf16, as llama.cpp's converter writes them."""
    values = json.loads((folder / "config.json").read_text())
    names = {
        "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    }  # fmt: skip
    a = values["model_type"]
    keys = {"general.architecture": a} | {f"{a}.{key}": values[name] for key, name in names.items() if name in values}
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    tensors = {}
    for full, (_, array) in hf_folders.read_folder_tensors(folder).items():
        stored = get_stored_name(full)
        if array.ndim == 1:
            array = widen_exactly(array)
        elif a == "llama" and stored.endswith(("attn_q.weight", "attn_k.weight")):
            array = interleave_halves(array, head_dim)
        tensors[stored] = array
    return keys, tensors


def make_model_with_tokenizer(name: str, folder: Path) -> tuple[Keys, dict[str, Any]]:
    """Return metadata and tensors of a folder of tests/test_end_to_end.py, with a tokenizer of the fixtures."""
    keys, tensors = convert_random_folder(folder)
    templates = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    return keys | templates | make_tokenizer_keys(name), tensors


def write_model(folder: Path, keys: Keys, tensors: Mapping[str, Any]) -> Path:
    """Write model.gguf to a folder, without the keys that are None. Return its path."""
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes({key: value for key, value in keys.items() if value is not None}, tensors))
    return path


def read_converted(name: str) -> tuple[Keys, dict[str, Any]]:
    """Return metadata and tensors of a file that llama.cpp's converter wrote."""
    file = GGUFFile(FIXTURES / "gguf" / f"{name}.gguf")
    entries = {
        each: RawTensor(entry.type, entry.shape, file.get_raw_tensor(each)[:].tobytes()) for each, entry in file.entries.items()
    }
    return {key: value for key, value in file.metadata.items() if value != []}, entries
