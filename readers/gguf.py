"""A GGUF file, or several that are one model, to a `Checkpoint`: what its keys say of the model, and which tensor is which.

Keys, names and what a silent file means are llama.cpp's (gguf-py's constants.py, src/llama-model.cpp). Whatever changes the
arithmetic is either done or refused by name; other keys are not looked at.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import Config, ConvConfig, DeltaConfig, ExpertsConfig, HeadConfig
from ..architectures.config import LEAST_SCALE, YarnScaling
from ..architectures.rope import yarn_scale
from ..machine.vectors import Int64
from ..tokenizer import STRIPS
from .config_json import MAX_THETA, MOST_LAYERS, gemma3_scales
from .gguf_file import MAGIC, GgufFile
from .heads import are_layers, check_rows, checked_ids
from .json_text import shown
from .model_file import Checkpoint, CheckpointError, ModelFile, advised, telling_os_errors
from .places import CONV_IN, GATED, QKV, QKV_BIASES, TURNED_TAPS, Place, are_equal, tensors_of
from .values import Values

ARCHITECTURE = "general.architecture"
VOCABULARY, TOKENS, CHAT_TEMPLATE = "tokenizer.ggml.", "tokenizer.ggml.tokens", "tokenizer.chat_template"
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS = 99999
EMBEDDING, HEAD, ROPE_DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
IDS = "d2t"  # a head's, absolute, unlike those in safetensors
LAYERS = ("eagle3.target_layers", "eagle3.extract_layers")  # of the target, by the key of today's converter and of the first
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)

LAYER_NAMES = {
    "rms_att": "attn_norm.weight", "wq": "attn_q.weight", "wk": "attn_k.weight", "wv": "attn_v.weight",
    "wo": "attn_output.weight", "bq": "attn_q.bias", "bk": "attn_k.bias", "bv": "attn_v.bias", "bo": "attn_output.bias",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight", "rms_ffn": "ffn_norm.weight", "w1": "ffn_gate.weight",
    "w2": "ffn_down.weight", "w3": "ffn_up.weight", "b1": "ffn_gate.bias", "b2": "ffn_down.bias", "b3": "ffn_up.bias",
}  # fmt: skip
OUTER_PLACES = {"tok_emb": Place(EMBEDDING), "wcls": Place(HEAD)}
TURNED = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")  # stored in adjacent pairs by `llama`, `granite`, `smollm3` and `mistral3`
LLAMA_PLACES = OUTER_PLACES | {
    "rms_final": Place("output_norm.weight"),
    **{name: Place(f"blk.{{}}.{stored}") for name, stored in LAYER_NAMES.items()},
}
QWEN_PLACES = LLAMA_PLACES | {name: LLAMA_PLACES[name]._replace(halves=True) for name in TURNED}
EXPERTS_PLACES = {
    "router": Place("blk.{}.ffn_gate_inp.weight"),
    "experts_w1": Place("blk.{}.ffn_gate_exps.weight", each=True),
    "experts_w2": Place("blk.{}.ffn_down_exps.weight", each=True),
    "experts_w3": Place("blk.{}.ffn_up_exps.weight", each=True),
}
PHI3_PLACES = LLAMA_PLACES | {
    **{name: Place("blk.{}.attn_qkv.weight", halves=name != "wv", among=QKV) for name in QKV},
    **dict.fromkeys(GATED, Place("blk.{}.ffn_up.weight", among=GATED)),
}
GEMMA3_PLACES = QWEN_PLACES | {
    "rms_att_out": Place("blk.{}.post_attention_norm.weight"), "rms_ffn_out": Place("blk.{}.post_ffw_norm.weight"),
}  # fmt: skip
LFM2_PLACES = QWEN_PLACES | {
    **dict.fromkeys(CONV_IN, Place("blk.{}.shortconv.in_proj.weight", among=CONV_IN)),
    "conv": Place("blk.{}.shortconv.conv.weight", made=TURNED_TAPS),
    "conv_out": Place("blk.{}.shortconv.out_proj.weight"),
    "rms_final": Place("token_embd_norm.weight"),
}
QWEN35_PLACES = QWEN_PLACES | {
    "wq": Place("blk.{}.attn_q.weight", halves=True, turn=(0, 2)),
    "wg": Place("blk.{}.attn_q.weight", turn=(1, 2)),
    "rms_ffn": Place("blk.{}.post_attention_norm.weight"),
    "delta_qkv": Place("blk.{}.attn_qkv.weight"),
    "delta_z": Place("blk.{}.attn_gate.weight"),
    "delta_b": Place("blk.{}.ssm_beta.weight"),
    "delta_a": Place("blk.{}.ssm_alpha.weight"),
    "delta_out": Place("blk.{}.ssm_out.weight"),
    "conv": Place("blk.{}.ssm_conv1d.weight", made=TURNED_TAPS),
    "rate": Place("blk.{}.ssm_a"),
    "dt": Place("blk.{}.ssm_dt.bias"),
    "delta_norm": Place("blk.{}.ssm_norm.weight"),
}
GPT2_PLACES = OUTER_PLACES | {
    "pos_emb": Place("position_embd.weight"),
    "ln_att": Place("blk.{}.attn_norm.weight"),
    "ln_att_bias": Place("blk.{}.attn_norm.bias"),
    **dict.fromkeys(QKV, Place("blk.{}.attn_qkv.weight", among=QKV)),
    **dict.fromkeys(QKV_BIASES, Place("blk.{}.attn_qkv.bias", among=QKV_BIASES)),
    "wo": Place("blk.{}.attn_output.weight"),
    "bo": Place("blk.{}.attn_output.bias"),
    "ln_ffn": Place("blk.{}.ffn_norm.weight"),
    "ln_ffn_bias": Place("blk.{}.ffn_norm.bias"),
    "w1": Place("blk.{}.ffn_up.weight"),
    "b1": Place("blk.{}.ffn_up.bias"),
    "w2": Place("blk.{}.ffn_down.weight"),
    "b2": Place("blk.{}.ffn_down.bias"),
    "ln_final": Place("output_norm.weight"),
    "ln_final_bias": Place("output_norm.bias"),
}
EAGLE3_PLACES = OUTER_PLACES | {
    "fc": Place("fc.weight"),
    "fc_norm": Place("enc.output_norm.weight", alone=True),
    "rms_emb": Place("blk.0.attn_norm.weight"),
    "rms_hidden": Place("blk.0.attn_norm_2.weight"),
    **{name: Place(f"blk.0.{LAYER_NAMES[name]}") for name in ("wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")},
    "rms_final": Place("output_norm.weight"),
}
PLACES = {
    "llama": LLAMA_PLACES | EXPERTS_PLACES, "qwen2": QWEN_PLACES, "qwen3": QWEN_PLACES, "qwen3moe": QWEN_PLACES | EXPERTS_PLACES,
    "granite": LLAMA_PLACES, "smollm3": LLAMA_PLACES, "phi3": PHI3_PLACES, "gemma3": GEMMA3_PLACES, "mistral3": LLAMA_PLACES,
    "lfm2": LFM2_PLACES, "qwen35": QWEN35_PLACES, "gpt2": GPT2_PLACES, "eagle3": EAGLE3_PLACES,
}  # fmt: skip

BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # a number, or a list of one a layer
OWN_BY_LAYER = {"attention.head_count_kv": ("lfm2",)}  # of these, what tells kinds of layers apart
SAMPLING = {"temperature": "general.sampling.temp", "top_p": "general.sampling.top_p", "top_k": "general.sampling.top_k"}
WINDOW = "attention.sliding_window"
# what other arithmetic than ours is asked for by, behind the architecture's name, and the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0, None),
    "use_parallel_residual": (False, None),
    "hidden_activation": ("silu", None),
    "logit_scale": (1, 0, None),
    "residual_scale": (1, 0, None),
    "embedding_scale": (1, 0, None),
    "attn_logit_softcapping": (0, None),
    "final_logit_softcapping": (0, None),
    "attention.causal": (True, None),
    "attention.scale": (0, None),
    "attention.clamp_kqv": (0, None),
    "attention.max_alibi_bias": (0, None),
    WINDOW: (0, None),
    "attention.temperature_scale": (0, None),
    "rope.scaling.attn_factor": (1, 0, None),
    "rope.scaling.alpha": (0, None),
    "rope.scaling.yarn_ext_factor": (1, None),
    "norm_output": (False, None),
}
# Granite's, for which 0 stands for none, too; and whether it has RoPE
SCALES = {
    "embedding_scale": "embedding_scale", "attention.scale": "attention_scale", "residual_scale": "residual_scale",
    "logit_scale": "logit_divisor",
}  # fmt: skip
PHI3_SCALE, SHORT, LONG = "rope.scaling.attn_factor", "rope_factors_short.weight", "rope_factors_long.weight"
QUERY_SCALE = "attention.temperature_scale"
PARTIAL_ROPE = ("phi3", "qwen35")
RECURRENT, INTERVAL = "qwen35.attention.recurrent_layers", "qwen35.full_attention_interval"
NEXTN = "qwen35.nextn_predict_layers"  # behind those of the model, which draft
EXPERTS = "expert_count"  # of which a Mixtral has some, and is called a llama
DONE = {
    "llama": (EXPERTS,),
    "qwen3moe": (EXPERTS,),
    "granite": (*SCALES,),
    "phi3": (PHI3_SCALE, WINDOW),
    "gemma3": (WINDOW,),
    "mistral3": (QUERY_SCALE,),
}  # of `NEUTRAL`
# Gemma 3's, where a file is silent, and the model whose scale of scores is not by a head's length
GEMMA3_PATTERN, GEMMA3_LOCAL_THETA, GEMMA3_27B_LAYERS = 6, 10000.0, 62
YARN_SCALE, CLOSE = "rope.scaling.yarn_attn_factor", 1e-3  # which llama.cpp computes anew; what rounding moves
BETAS = "beta_fast", "beta_slow"
HAS_ROPE = "granite.rope.scaling.finetuned"
NO_ROPE_INTERVAL = 4  # of SmolLM3's layers, of which a file does not tell


def is_gguf(path: Path) -> bool:
    """By the first bytes of a file, or by its name. Raises CheckpointError for one that cannot be read."""
    file = ModelFile(path)
    return path.suffix == ".gguf" or file.read(0, min(len(MAGIC), file.size)).tobytes() == MAGIC


def read_vocabulary(path: Path) -> dict[str, Any]:
    """What a GGUF file's keys say of a tokenizer, without their common beginning; nothing of another file."""
    return _vocabulary(GgufFile(path)) if is_gguf(path) else {}


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a file, and the others that it is split into, after checking all that their headers can tell.

    Raises CheckpointError for anything but a complete and consistent model; numbers are checked when they are read.
    """
    model = Model(path)
    if n_nextn(model) and not any(name.startswith("blk.0.") for name in model):
        raise CheckpointError(f"{path} holds an MTP head without its model; name a file of both, with which it drafts by itself")
    config = config_of(model)
    tensors = tensors_of(config, PLACES[model.architecture], model)
    ids = None
    if config.head and IDS in model:
        ids = checked_ids(model.integers(IDS, config.head.n_rows), config.vocab_size, model.told(IDS))
    model.leave_out([f"blk.{config.n_layers + i}." for i in range(n_nextn(model))])
    model.check_all_used()
    if config.head:  # whose tokenizer, where the file has one, is the target's
        return Checkpoint(path, config, tensors, target_ids=ids)
    template = model.keys.get(CHAT_TEMPLATE)
    return Checkpoint(
        path, config, tensors, vocabulary=_vocabulary(model.first), family=model.architecture,
        chat_template=template if isinstance(template, str) else None, sampling=advised(model.keys, SAMPLING),
    )  # fmt: skip


class Model:
    """The keys of a model's first file, and the tensors of all. Raises CheckpointError for parts that do not fit together."""

    def __init__(self, path: Path) -> None:
        self.first = GgufFile(path)
        self.path, self.keys = path, self.first.keys
        self._sources: dict[str, GgufFile] = {}
        self._used: set[str] = set()
        for file in _parts(self.first):
            for name in file.entries:
                if name in self._sources:
                    raise CheckpointError(f"{file.path} holds the tensor {shown(name)}, as {self._sources[name].path} does")
                self._sources[name] = file
        n, expected = len(self._sources), self.keys.get(SPLIT_TENSORS)
        if expected is not None and expected != n:
            raise CheckpointError(f"{path}: {SPLIT_TENSORS} is {shown(expected)}; its parts hold {n} tensors")
        architecture = self.keys.get(ARCHITECTURE)
        if not isinstance(architecture, str) or architecture not in PLACES:
            raise CheckpointError(f"{path}: {ARCHITECTURE} is {shown(architecture)}; there are {', '.join(PLACES)}")
        self.architecture = architecture

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def leave_out(self, beginnings: Iterable[str]) -> None:
        """Tensors whose names begin so are not needed."""
        starts = (*beginnings,)
        self._used |= {name for name in self._sources if name.startswith(starts)}

    def check_all_used(self) -> None:
        """Raises CheckpointError for a tensor that nobody asked for."""
        for name in self._sources:
            if name not in self._used:
                raise CheckpointError(f"{self.told(name)} has no place in the model that the keys describe")

    def told(self, name: str) -> str:
        """Its file and its name, for people."""
        return f"{self._sources[name].path}: {shown(name)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError for a tensor that is missing."""
        if name not in self._sources:
            raise CheckpointError(f"{self.path} holds no tensor {name}, which its keys need")
        return self._sources[name].entries[name].shape

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        """Raises CheckpointError for one that is missing or of another shape."""
        return self._source(name, shape).tensor(name)

    def integers(self, name: str, n: int) -> Int64:
        """As `tensor`, of n whole numbers, which are read."""
        return self._source(name, (n,)).integers(name)

    def _source(self, name: str, shape: tuple[int, ...]) -> GgufFile:
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.told(name)} has the shape {found}; the keys say {shape}")
        self._used.add(name)
        return self._sources[name]

    def is_twice(self, name: str, other: str) -> bool:
        """Whether two tensors are one; then the second is left out."""
        a, b = (self._sources[each] for each in (name, other))
        result = a.entries[name][:2] == b.entries[other][:2] and are_equal(a.stored(name), b.stored(other))
        if result:
            self._used.add(other)
        return result


def _parts(first: GgufFile) -> list[GgufFile]:
    """All files of the model that begins with that one."""
    count, number = (Values(first.path, first.keys, {key: 0})[key] for key in (SPLIT_COUNT, SPLIT_NUMBER))
    if type(count) is not int or not 0 <= count <= MOST_PARTS:
        raise CheckpointError(f"{first.path}: {SPLIT_COUNT} is {shown(count)}; expected 1 to {MOST_PARTS}")
    if count <= 1:
        return [first]
    name = _PART.fullmatch(first.path.name)
    if not name or int(name[3]) != count:
        raise CheckpointError(f"{first.path} is one of {count} parts; expected a name that ends in -00001-of-{count:05}.gguf")
    paths = [first.path.with_name(f"{name[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    if number != 0:
        raise CheckpointError(f"{first.path} is a later part of {count}; name the first, {paths[0]}")
    files = [first]
    for i, path in enumerate(paths[1:], 1):
        with telling_os_errors(path):
            if not path.exists():
                raise CheckpointError(f"{path} is missing, which is a part of {first.path.name}; download it again, whole")
        files.append(GgufFile(path))
        if (told := files[-1].keys.get(SPLIT_NUMBER)) != i:
            raise CheckpointError(f"{path}: {SPLIT_NUMBER} is {shown(told)}; expected {i}")
    return files


def _vocabulary(file: GgufFile) -> dict[str, Any]:
    """Also whether special tokens take the white space behind them, which a Phi-3's name tells (llama-vocab.cpp)."""
    own = {key.removeprefix(VOCABULARY): value for key, value in file.keys.items() if key.startswith(VOCABULARY)}
    is_named = any(name in str(file.keys.get("general.name")).lower() for name in ("phi-3", "phi3"))
    is_phi3 = is_named or (file.keys.get(ARCHITECTURE) == "phi3" and own.get("model") == "llama")
    return own | {STRIPS: True} if own and is_phi3 else own


def config_of(model: Model) -> Config:
    """What the keys, and the tensors that are there or not, say of the model."""
    a = model.architecture
    is_head = a == "eagle3"
    values = Values(model.path, model.keys, {TOKENS: None})
    for key, neutral in NEUTRAL.items():
        if f"{a}.{key}" in values and key not in DONE.get(a, ()):
            values.must_be(f"{a}.{key}", *neutral)
    rows = _rows(model, values, f"{a}.vocab_size", is_borrowed=is_head and EMBEDDING not in model)
    n_blocks = values.whole(f"{a}.block_count", MOST_LAYERS)
    values = values.with_one_of_lists([f"{a}.{key}" for key in BY_LAYER if a not in OWN_BY_LAYER.get(key, ())], n_blocks)
    common: dict[str, Any] = {
        "dim": values.whole(f"{a}.embedding_length"),
        "hidden_dim": values.whole(f"{a}.feed_forward_length"),
        "n_layers": n_blocks - n_nextn(model),
        "n_heads": values.whole(f"{a}.attention.head_count"),
        "seq_len": values.whole(f"{a}.context_length"),
        "vocab_size": rows,
        "shared_classifier": not is_head and (HEAD not in model or model.is_twice(EMBEDDING, HEAD)),
    }
    config = _gpt2(values, common) if a == "gpt2" else _llama(model, values, common)
    if is_head:  # llama.cpp adds no biases to one
        config = replace(config, architecture=a, head=_head(model, values, rows), qkv_bias=False, wo_bias=False, mlp_bias=False)
    if flaw := config.flaw():
        raise CheckpointError(f"{model.path} describes no model: {flaw}")
    if config.head:
        check_rows(config.head, rows, IDS in model, f"{model.path}")
    return config


def _rows(model: Model, values: Values, key: str, is_borrowed: bool) -> int:
    """How many ids there are: rows of the table of tokens, whatever the keys say, or what they say where it is borrowed."""
    tokens = values[TOKENS]
    if is_borrowed:
        return values.whole(key) if key in values or not isinstance(tokens, list) else len(tokens)
    rows = model.shape(EMBEDDING)[0]
    if key in values and values[key] != rows:
        raise values.refusal(key, f"{rows}, the rows of {EMBEDDING}")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise CheckpointError(f"{values.path}: {TOKENS} are {len(tokens)}; expected {rows}, the rows of {EMBEDDING}")
    return rows


def _head(model: Model, values: Values, rows: int) -> HeadConfig:
    """What is a head's alone; a classifier or an embedding that is not there is the target's."""
    values.must_be("eagle3.block_count", 1)
    layers = next((key for key in LAYERS if key in values), LAYERS[0])
    if not isinstance(values[layers], list) or not are_layers(values[layers]):
        raise values.refusal(layers, "layers of the target, each once")
    sized = next((name for name in (IDS, HEAD) if name in model), "")
    return HeadConfig(
        target_dim=values.whole("eagle3.target_hidden_size"),
        layers=tuple(values[layers]),
        n_rows=model.shape(sized)[0] if sized else rows,
        own_embedding=EMBEDDING in model,
        own_classifier=HEAD in model,
        norm_before_residual="eagle3.norm_before_residual" in values and values.flag("eagle3.norm_before_residual"),
        fc_norm="whole" if "eagle3.norm_before_fc" in values and values.flag("eagle3.norm_before_fc") else "",
    )


def _gpt2(values: Values, common: Mapping[str, Any]) -> Config:
    eps = values.real("gpt2.attention.layer_norm_epsilon", 0, 1)
    return Config(**common, n_kv_heads=common["n_heads"], architecture="gpt2", norm_eps=eps)


def _llama(model: Model, values: Values, common: Mapping[str, Any]) -> Config:
    a, n_heads = model.architecture, common["n_heads"]

    def optional(key: str, default: int) -> int:
        return values.whole(f"{a}.{key}") if f"{a}.{key}" in values else default

    head_dim = optional("attention.key_length", common["dim"] // n_heads)
    for key in ("attention.value_length", "rope.dimension_count")[: 1 if a in PARTIAL_ROPE else 2]:
        if optional(key, head_dim) != head_dim:
            raise values.refusal(f"{a}.{key}", f"{head_dim}, a head's length")
    n_turned = optional("rope.dimension_count", head_dim)
    more, n_kv_heads = dict[str, Any](), common["n_heads"]
    if a == "granite":
        more = _granite_scales(values)
    elif a == "phi3":
        more = _phi3(model, values, common["seq_len"], n_turned)
    elif a == "gemma3":
        more = _gemma3(values, common, head_dim)
    elif a == "qwen35":
        more = _delta_net(model, values, common["n_layers"])
    elif values[f"{a}.{EXPERTS}"] not in (0, None):
        more = _experts(model, values, common)
    theta, kv_heads = f"{a}.rope.freq_base", "attention.head_count_kv"
    if a == "lfm2":
        more, n_kv_heads = _lfm2(values, f"{a}.{kv_heads}", common["n_layers"])
    else:
        n_kv_heads = optional(kv_heads, n_heads)
    return Config(
        **{**common, **_rope(model, values, n_turned, common["seq_len"]), **more},
        n_kv_heads=n_kv_heads,
        norm_eps=values.real(f"{a}.attention.layer_norm_rms_epsilon", 0, 1),
        rope_theta=values.real(theta, 1, MAX_THETA) if theta in values else 10000.0,
        head_dim=head_dim,
        rope_dim=0 if n_turned == head_dim else n_turned,
        qkv_bias="blk.0.attn_q.bias" in model,
        wo_bias="blk.0.attn_output.bias" in model,
        mlp_bias="blk.0.ffn_gate.bias" in model,
        qk_norm=a in ("qwen3", "qwen3moe", "gemma3", "lfm2", "qwen35"),
        no_rope_layers=_no_rope_layers(values, a, common["n_layers"]),
    )


def _granite_scales(values: Values) -> dict[str, Any]:
    given = {ours: f"granite.{key}" for key, ours in SCALES.items() if values[f"granite.{key}"] not in (None, 0)}
    return {ours: values.real(key, LEAST_SCALE, 1 / LEAST_SCALE) for ours, key in given.items()}


def _phi3(model: Model, values: Values, n_positions: int, n_turned: int) -> dict[str, Any]:
    """Its window, and what scales its RoPE."""
    window, found = f"phi3.{WINDOW}", dict[str, Any]()
    if values[window] not in (None, 0) and (seen := values.whole(window)) < n_positions:
        found["window"] = seen
    if values[key := f"phi3.{PHI3_SCALE}"] not in (None, 0):
        found["rope_scale"] = float(np.float32(values.real(key, LEAST_SCALE, 1 / LEAST_SCALE)))
    if SHORT in model or LONG in model:
        short, long = (tuple(float(x) for x in model.tensor(name, (n_turned // 2,))[:]) for name in (SHORT, LONG))
        original = values.whole("phi3.rope.scaling.original_context_length")
        found["rope_divisors"] = short
        if short != long and n_positions > original:
            found |= {"long_divisors": long, "n_short": original}
    return found


def _gemma3(values: Values, common: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Its windows, the RoPE of layers that have one, and its scales, of which a file does not tell."""
    values.must_be("gemma3.rope.scaling.type", None, "linear", "none")
    dim, n_layers, pattern, window = common["dim"], common["n_layers"], f"gemma3.{WINDOW}_pattern", f"gemma3.{WINDOW}"
    scales = gemma3_scales(dim, head_dim, dim // common["n_heads"] if n_layers == GEMMA3_27B_LAYERS else head_dim)
    found = {"architecture": "gemma", "full_layers": (*range(n_layers),), **scales}
    if values[window] in (None, 0):
        return found
    if isinstance(flags := values[pattern], list):
        if len(flags) != n_layers or not all(isinstance(flag, bool) for flag in flags):
            raise values.refusal(pattern, f"true or false for each of {n_layers} layers")
        full = tuple(layer for layer, flag in enumerate(flags) if not flag)
    else:
        every = values.whole(pattern) if pattern in values else GEMMA3_PATTERN
        full = (*range(every - 1, n_layers, every),)
    local = "gemma3.rope.freq_base_swa"
    theta = values.real(local, 1, MAX_THETA) if local in values else GEMMA3_LOCAL_THETA
    return found | {"window": values.whole(window), "full_layers": full, "local_theta": theta}


def _lfm2(values: Values, key: str, n_layers: int) -> tuple[dict[str, Any], int]:
    """Its convolutions, and how many heads keys and values have elsewhere; key: tells it of each layer, 0 of convolutions."""
    heads = values[key]
    if not isinstance(heads, list) or len(heads) != n_layers or any(type(n) is not int or n < 0 for n in heads):
        raise values.refusal(key, f"numbers of {n_layers} layers, 0 of convolutions")
    if 0 not in heads or len({*heads} - {0}) != 1:
        raise values.refusal(key, "layers of both kinds, all attention with as many heads")
    convolutions = tuple(i for i, n in enumerate(heads) if n == 0)
    return {"architecture": "lfm2", "conv": ConvConfig(convolutions, values.whole("lfm2.shortconv.l_cache"))}, max(heads)


def _experts(model: Model, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without experts are told by their tensors; what the chosen ones count is divided by their sum, as in llama.cpp."""
    a, width = model.architecture, f"{model.architecture}.expert_feed_forward_length"
    values.must_be(f"{a}.expert_shared_count", None, 0)
    values.must_be(f"{a}.expert_weights_scale", None, 0, 1)
    experts = ExpertsConfig(
        n=values.whole(f"{a}.{EXPERTS}"),
        n_chosen=values.whole(f"{a}.expert_used_count"),
        hidden_dim=values.whole(width) if width in values else common["hidden_dim"],
        dense_layers=tuple(i for i in range(common["n_layers"]) if EXPERTS_PLACES["router"].name.format(i) not in model),
    )
    return {"architecture": "mixture", "experts": experts}


def n_nextn(model: Model) -> int:
    """How many layers behind those of the model draft."""
    return Values(model.path, model.keys, {}).whole(NEXTN) if model.keys.get(NEXTN, 0) != 0 else 0


def _delta_net(model: Model, values: Values, n_layers: int) -> dict[str, Any]:
    """Which layers are no attention, and what they are; heads of values that share one of keys lie in turns."""
    given, interval = values[RECURRENT], 4 if values[INTERVAL] is None else values.whole(INTERVAL)
    are = [(i + 1) % interval != 0 for i in range(n_layers)] if given is None else given
    n = n_layers + n_nextn(model)
    if not isinstance(are, list) or len(are) not in (n_layers, n) or not all(type(each) is bool for each in are):
        raise values.refusal(RECURRENT, f"true or false for each of {n} layers")
    n_values, n_value_heads = (values.whole(f"qwen35.ssm.{key}") for key in ("inner_size", "time_step_rank"))
    if n_values % n_value_heads:
        raise values.refusal("qwen35.ssm.inner_size", f"a multiple of {n_value_heads}, the heads")
    n_key_heads = values.whole("qwen35.ssm.group_count")
    delta = DeltaConfig(
        layers=tuple(i for i in range(n_layers) if are[i]),
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=values.whole("qwen35.ssm.state_size"),
        value_dim=n_values // n_value_heads,
        n_taps=values.whole("qwen35.ssm.conv_kernel"),
        in_turns=n_key_heads != n_value_heads,
    )
    return {"architecture": "qwen35", "attention_gate": True, "delta": delta}


def _no_rope_layers(values: Values, a: str, n_layers: int) -> tuple[int, ...]:
    """Those whose queries and keys are not turned."""
    if a == "smollm3":
        return (*range(NO_ROPE_INTERVAL - 1, n_layers, NO_ROPE_INTERVAL),)
    if a == "granite" and HAS_ROPE in values and not values.flag(HAS_ROPE):
        return (*range(n_layers),)
    return ()


def _rope(model: Model, values: Values, n_turned: int, n_positions: int) -> dict[str, Any]:
    """What scales its angles, one that is the same for all or yarn, and its queries; of each pair's angle alone `_divisors`."""
    a = model.architecture
    kind, factor, older = (f"{a}.rope.{key}" for key in ("scaling.type", "scaling.factor", "scale_linear"))
    if kind in values:
        values.must_be(kind, "linear", "yarn", "none")
    key = factor if factor in values else older
    common = (values.real(key, 0, 1e6) if key in values and values[kind] != "none" else 0.0) or 1.0  # 0 stands for none, too
    divisors = _divisors(model, n_turned)
    found: dict[str, Any] = {"rope_divisors": divisors}
    original, scale = f"{a}.rope.scaling.original_context_length", f"{a}.{QUERY_SCALE}"
    span = values.whole(original) if original in values else n_positions
    if scale in values:
        found |= {"query_scale": float(np.float32(values.real(scale, 0, 1e6))), "query_span": span}
    if values[kind] != "yarn":
        if f"{a}.{YARN_SCALE}" in values:
            values.must_be(f"{a}.{YARN_SCALE}", 1)
        scaled = tuple(common * each for each in divisors or (1.0,) * (n_turned // 2))
        return found if common == 1 else found | {"rope_divisors": scaled}
    betas: dict[str, Any] = {
        name: values.real(each, 1e-6, 1e6) for name in BETAS if (each := f"{a}.rope.scaling.yarn_{name}") in values
    }
    share = values.real(each, 0, 1e6) if (each := f"{a}.rope.scaling.yarn_log_multiplier") in values else 0.0
    if common < 1:
        raise values.refusal(key, "a number from 1 on")
    rope_scale = yarn_scale(common) / (yarn_scale(common, share) if share else 1.0)
    if (key := f"{a}.{YARN_SCALE}") in values and values[key] != 1 and abs(values.real(key, 0, 1e6) - rope_scale) > CLOSE:
        raise values.refusal(key, f"{rope_scale:.4g}, which follows from the factor, or 1")
    return found | {"rope_scaling": YarnScaling(common, span, **betas), "rope_scale": float(np.float32(rope_scale))}


def _divisors(model: Model, n_turned: int) -> tuple[float, ...]:
    """Those of a tensor, as Llama 3.1 has them."""
    return tuple(float(x) for x in model.tensor(ROPE_DIVISORS, (n_turned // 2,))[:]) if ROPE_DIVISORS in model else ()
