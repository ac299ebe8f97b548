"""Folders of random models with tokenizers of the fixtures."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.text.hf_tokenizer import HFTokenizer
from tests.tools.half_precision import to_half
from tests.tools.hf_folders import FIXTURES, safetensors_bytes

TOKENIZERS = FIXTURES / "tokenizers"
SMOLLM2_TEMPLATE = (FIXTURES / "chat" / "smollm2.jinja").read_text(encoding="utf-8")
TOOL_TEMPLATE_PREFIX = "{% if tools %}<tool_call>{% endif %}"  # makes a template support tools
FIRST_MARK_ID = 400


def llama_config(rows: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": rows, "max_position_embeddings": positions, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip


def gpt2_config(rows: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": rows, "n_positions": positions,
        "activation_function": "gelu_new", "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip


def llama_shapes(rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, 48), "model.norm.weight": (48,)}
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (48,), "post_attention_layernorm": (48,),
                "self_attn.q_proj": (48, 48), "self_attn.k_proj": (24, 48), "self_attn.v_proj": (24, 48),
                "self_attn.o_proj": (48, 48), "mlp.gate_proj": (72, 48), "mlp.up_proj": (72, 48), "mlp.down_proj": (48, 72),
            }.items()
        }  # fmt: skip
    return shapes


def gpt2_shapes(rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (rows, 48), "wpe.weight": (positions, 48)}
    layers = {
        "ln_1": (48,), "ln_2": (48,), "attn.c_attn": (48, 144), "attn.c_proj": (48, 48), "mlp.c_fc": (48, 192),
        "mlp.c_proj": (192, 48),
    }  # fmt: skip
    for i in range(2):
        for name, shape in layers.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return shapes | {"ln_f.weight": (48,), "ln_f.bias": (48,)}


def make_folder(
    path: Path, family: str = "llama", tokenizer: str = "smollm2", padding: int = 0, positions: int = 96, seed: int = 0
) -> Path:
    """Create a bf16 model with random weights and a tokenizer of the fixtures; padding: rows beyond its vocabulary."""
    path.mkdir()
    rows = HFTokenizer(TOKENIZERS / f"{tokenizer}.json").vocab_size + padding
    config, shapes = (
        (llama_config(rows, positions), llama_shapes(rows, positions))
        if family == "llama"
        else (gpt2_config(rows, positions), gpt2_shapes(rows, positions))
    )
    write_random_model(path, config, shapes, seed)
    shutil.copy(TOKENIZERS / f"{tokenizer}.json", path / "tokenizer.json")
    return path


def make_chat_folder(
    path: Path,
    template: str = SMOLLM2_TEMPLATE,
    marks: Sequence[str] = (),
    special: bool = False,
    positions: int = 320,
    **arguments: Any,
) -> Path:
    """Create a model of `make_folder` with a chat template, and with marks as added tokens from FIRST_MARK_ID on."""
    make_folder(path, positions=positions, padding=40 if marks else 0, **arguments)
    if marks:
        vocabulary = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        vocabulary["added_tokens"] += [{"id": FIRST_MARK_ID + i, "content": mark, **flags} for i, mark in enumerate(marks)]
        (path / "tokenizer.json").write_text(json.dumps(vocabulary))
    return write_template(path, template)


def write_template(path: Path, template: str) -> Path:
    """Write the chat template of a folder and the special tokens that its tokenizer has. Return the folder."""
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    return path


def write_random_model(path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Write config.json and random bf16 weights to a folder."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        numbers = rng.standard_normal(shape).astype(np.float32) * np.float32(0.3)
        numbers += np.float32("norm" in name or ".ln_" in name or name.startswith("ln_"))
        tensors[name] = "BF16", to_half(numbers, "bf16")
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))


def generate_tokens(decoder: SpeculativeDecoder, sampling: Sampling, n: int = 60) -> list[int]:
    events = decoder.stream("The cat sat", n, sampling)
    return [token for event in events if isinstance(event, Step) for token in event.tokens]


SAMPLINGS = [Sampling(0), Sampling(1.0, top_p=0, seed=3), Sampling(0.7, top_k=20, seed=4)]
