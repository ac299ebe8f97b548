"""Convert tests/fixtures to GGUF with llama.cpp's converter: `python tests/tools/make_converted.py LLAMA_CPP [NAME ...]`.

NAME is a folder of tests/fixtures. It becomes gguf/NAME.gguf, with _ for /, without a tokenizer. The default is all of
`CONVERTED`, and granite4: a dense Granite 4 with random weights, as transformers saves it but with the published layer types.
granite4.npz has `tokens` and transformers' fp32 `logits` for them. The script needs torch, transformers and the converter's
requirements; no test needs them.
"""

import json
import runpy
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONVERTED = (
    "apertus", "bailing_moe_v2", "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4",
    "falcon_h1", "gemma2", "gemma4", "gemma4_dense", "gemma4_images", "gemma4_moe", "glm4", "glm4_moe_lite", "gpt_oss",
    "gpt_oss_mxfp4", "granite_h", "granitemoe", "granitemoe_shared", "hunyuan_v1_dense", "laguna", "laguna_elements",
    "lfm2_moe", "minicpm", "moonlight", "muse_glimmer", "nemotron", "nemotron_h", "nemotron_h_dense", "olmo2", "olmo3",
    "olmoe", "phimoe", "qwen2_moe", "qwen2_vl", "qwen35_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smolvlm",
    "stablelm", "heads/assistants/plain",
)  # fmt: skip
PUBLISHED_NAMES = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}  # of classes that transformers calls otherwise
SIZES = {
    "vocab_size": 404, "hidden_size": 32, "intermediate_size": 40, "shared_intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_heads": 4, "mamba_d_head": 16,
}  # fmt: skip


def make_granite4_folder(path: Path) -> None:
    """Save the model with the tokenizer of a fixture and the config keys of published models."""
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(**SIZES, layer_types=["full_attention"] * 2)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 1.6 / parameter.shape[1] ** 0.5)
    model.save_pretrained(path)
    shutil.copy(FIXTURES / "tokenizers" / "llama3.json", path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, SIZES["vocab_size"], 40))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0]
    np.savez_compressed(FIXTURES / "gguf" / "granite4.npz", tokens=tokens.numpy(), logits=logits.numpy())
    values = json.loads((path / "config.json").read_text()) | {"layer_types": ["attention"] * 2}
    del values["num_experts_per_tok"]
    (path / "config.json").write_text(json.dumps(values))


def use_published_layer_types(path: Path, values: dict[str, Any]) -> None:
    """Write a hybrid's types of layers to its config as published models name them, which the converter expects."""
    if values["model_type"] == "granitemoehybrid":
        names = {"full_attention": "attention", "linear_attention": "mamba"}
        path.write_text(json.dumps(values | {"layer_types": [names[each] for each in values["layer_types"]]}))
    if values["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        types = values.pop("layers_block_type")
        if "moe" not in types:
            values = {key: value for key, value in values.items() if "expert" not in key}
        pattern = "".join(letters[each] for each in types)
        values |= {"mamba_d_head": values["mamba_head_dim"]}  # the converter takes 64 without it
        values |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(types)}
        path.write_text(json.dumps(values))
        base = import_module("conversion.base")  # transformers adds keys that make a dense model one with experts
        base.ModelBase.load_hparams = staticmethod(lambda *_, **__: dict(values))


def convert(source: Path, target: Path, llama_cpp: Path) -> None:
    """Convert a folder, with its tokenizer if it has one."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import conversion
    from conversion import base

    conversion.load_all_models()
    base.TextModel.get_vocab_base_pre = lambda *_: "dbrx"  # else found by checksums of published tokenizers
    if not (source / "tokenizer.json").exists():
        for model in {model for models in base.ModelBase._model_classes.values() for model in models.values()}:
            model.set_vocab = lambda self: None
        source = Path(shutil.copytree(source, target.with_suffix(".folder")))
        values = json.loads((source / "config.json").read_text())
        tokens = {
            f"{i}": i for i in range(values.get("text_config", values)["vocab_size"])
        }  # the converter counts Gemma's tokens
        use_published_layer_types(source / "config.json", values)
        values["architectures"] = [PUBLISHED_NAMES.get(each, each) for each in values["architectures"]]
        (source / "config.json").write_text(json.dumps(values))
        (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    sys.argv = ["convert", str(source), "--outfile", str(target)]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    llama_cpp, *names = sys.argv[1:]
    for name in names or ("granite4", *CONVERTED):
        with tempfile.TemporaryDirectory() as folder:
            if name == "granite4":
                make_granite4_folder(Path(folder))
            source = Path(folder) if name == "granite4" else FIXTURES / name
            file = Path(folder) / f"{name.replace('/', '_')}.gguf"
            convert(source, file, Path(llama_cpp).resolve())
            shutil.copy(file, FIXTURES / "gguf")
