"""Make the model folders of tests/fixtures and their expected outputs with transformers: `python tests/tools/make_fixtures.py`.

Do not run it with -m: transformers would take our kernels.py for a package. It needs torch, transformers and safetensors; no test
needs them. Each folder is a tiny model with random weights as `save_pretrained` writes it. Its config.json defines it: for a new
model write one with the keys that differ from the defaults of its config class, and with "dtype". Its expected.npz has:

- `tokens` (60,), and transformers' fp32 `logits` (60, V) for them
- `continuation`: the greedy output after the first five tokens
- `names` and `sums`: the CRC-32 of each tensor's bytes as the safetensors library reads them
- `mtp_logits` if the model has an MTP head, see `compute_expected_mtp`
"""

import copy
import importlib.metadata
import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    Glm4MoeConfig,
    GraniteConfig,
    logging,
)
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm4_moe_lite
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

FIXTURES = Path(__file__).parents[1] / "fixtures"
N_TOKENS, N_PROMPT, N_CONTINUATION = 60, 5, 24
N_MTP, N_GUESSED = 24, 3  # tokens of the sequence that an MTP head continues, and draft tokens
MIN_LEAD = 1e-2  # logits by which each greedy token leads, so that rounding does not change the output
# Models that transformers has under another name: the config of a model of its own that computes the same
SOURCES = {
    "bailing_moe_v2": Glm4MoeConfig(
        vocab_size=68, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=12, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_qk_norm=True,
        partial_rotary_factor=0.5, n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1,
        first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, rms_norm_eps=1e-6, dtype="bfloat16",
    ),
    "minicpm": GraniteConfig(
        vocab_size=68, hidden_size=32, intermediate_size=39, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, bos_token_id=1, eos_token_id=2, embedding_multiplier=3.0, attention_multiplier=0.25,
        residual_multiplier=0.7, logits_scaling=2.0, dtype="bfloat16",
    ),
}  # fmt: skip
# Arguments of `save` for the others
LAYOUTS = {
    "llama3": {"shards": "10KB", "ends": [2, 5, 9]},
    "mistral": {"shards": "12KB"},
    "gpt2_base": {"as_base": True},
    "gpt_oss_mxfp4": {"microscaled": True},
    "qwen3_vl_moe": {"as_transposed": True},
}


def load_definition(folder):
    """Return the config that defines a fixture, without the keys of what is not made of it."""
    if folder.name in SOURCES:
        return SOURCES[folder.name]
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def get_auto_class(config):
    """Return the class that makes models of a config; image models have another."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def random_model(config, seed):
    """Return a random model: norms near one, biases and matrices large enough for selective attention and distinct logits."""
    torch.manual_seed(seed)
    model = get_auto_class(config).from_config(copy.deepcopy(config), dtype=torch.float32)  # changes the config's dtype
    return randomize(model).to(config.dtype).eval()


def randomize(model):
    """Replace the weights by those that `random_model` describes, and return the model."""
    config = model.config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_norm, is_gemma = "norm" in name or "ln_" in name or name.endswith("scale"), "gemma" in config.model_type
            if parameter.dim() > 1:
                n_inputs = parameter.shape[0 if "c_" in name else 1]
                spread = 0.12 if is_gemma else 0.7  # small embeddings, or a tied model repeats its last token
                parameter.copy_(noise * (spread if "wpe" in name or "embed" in name or "wte" in name else 1.6 / n_inputs**0.5))
            else:
                adds_one = config.model_type.startswith(("gemma2", "gemma3")) or config.model_type == "nemotron"
                one = 0 if adds_one else 1  # transformers adds 1 itself
                parameter.copy_(one + 0.2 * noise if is_norm and name.endswith(("weight", "scale")) else 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if name.endswith("act_fn.beta"):
                buffer.copy_(0.5 + 0.2 * torch.randn_like(buffer))
            if name.endswith("act_fn.eps"):
                buffer.copy_(-0.2 * torch.rand_like(buffer))  # published models have -1e-6, which changes no fixture
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    return model


class Mtp(torch.nn.Module):
    """The MTP head of a model, which transformers leaves out: built from its layer and norms, the rest as in vLLM."""

    def __init__(self, config):
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers, config.layer_types, config._attn_implementation = 1, ["full_attention"], "eager"
        n, norm, rotary = config.hidden_size, qwen3_5.Qwen3_5RMSNorm, qwen3_5.Qwen3_5TextRotaryEmbedding
        layer = qwen3_5_moe.Qwen3_5MoeDecoderLayer if hasattr(config, "num_experts") else qwen3_5.Qwen3_5DecoderLayer
        if config.model_type == "glm4_moe_lite":
            norm, rotary = glm4_moe_lite.Glm4MoeLiteRMSNorm, glm4_moe_lite.Glm4MoeLiteRotaryEmbedding
            layer, config.mlp_layer_types = glm4_moe_lite.Glm4MoeLiteDecoderLayer, ["sparse"]
        if config.model_type == "qwen3_next":
            norm, rotary = qwen3_next.Qwen3NextRMSNorm, qwen3_next.Qwen3NextRotaryEmbedding
            layer = qwen3_next.Qwen3NextDecoderLayer
        self.fc = torch.nn.Linear(2 * n, n, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(n, config.rms_norm_eps) for _ in range(3))
        self.layers = torch.nn.ModuleList([layer(config, 0)])
        self.rotary = [rotary(config)]  # in a list: its buffers are not part of the state dict

    def forward(self, embedded, states):
        """Return normed outputs (N, D) for pairs of an embedding and a state: the target's after its last norm, or an output."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], -1))[None]
        n = x.shape[1]
        angles = self.rotary[0](x, torch.arange(n)[None])
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask)[0])


def rename_as_last_layer(tensors, n_layers):
    """Return the tensors of an MTP head as published GLMs name them: a layer after the last, with a tensor for each expert."""
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("layers.0.")
        if "experts." in name and tensor.dim() == 3:
            parts = {"down_proj": tensor}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True))
            for part, experts in parts.items():
                renamed |= {f"mlp.experts.{i}.{part}.weight": expert.contiguous() for i, expert in enumerate(experts)}
        else:
            module, _, kind = name.rpartition(".")
            renamed[f"{names.get(module, module)}.{kind}"] = tensor
    return {f"model.layers.{n_layers}.{name}": tensor for name, tensor in renamed.items()}


def read_mtp(folder, config):
    """Return the tensors of the MTP head of a folder, with the names of the module `Mtp`."""
    tensors = load_file(folder / "model.safetensors")
    if config.model_type != "glm4_moe_lite":
        return {name.removeprefix("mtp."): tensor.float() for name, tensor in tensors.items() if name.startswith("mtp.")}
    own = {}
    for name, expected in Mtp(config).state_dict().items():
        if expected.dim() < 3:
            (stored,) = rename_as_last_layer({name: expected}, config.num_hidden_layers)
            own[name] = tensors[stored].float()
            continue
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        at = f"model.layers.{config.num_hidden_layers}.mlp.experts"
        experts = [torch.cat([tensors[f"{at}.{i}.{part}.weight"] for part in parts]) for i in range(len(expected))]
        own[name] = torch.stack(experts).float()
    return own


def add_mtp(folder, model, seed):
    """Add a random MTP head to the tensors of a saved model."""
    torch.manual_seed(seed)
    config = model.config.get_text_config()
    tensors, own, is_glm = load_file(folder / "model.safetensors"), {}, config.model_type == "glm4_moe_lite"
    for name, tensor in Mtp(config).state_dict().items():
        noise = torch.randn_like(tensor)
        noise *= 0.2 if tensor.dim() == 1 else 1.6 / tensor.shape[1] ** 0.5
        own[name] = (noise + (is_glm and "norm" in name)).to(torch.float32 if name.endswith("correction_bias") else model.dtype)
    tensors |= (
        rename_as_last_layer(own, config.num_hidden_layers) if is_glm else {f"mtp.{name}": each for name, each in own.items()}
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values.get("text_config", values)["num_nextn_predict_layers" if is_glm else "mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def compute_expected_mtp(folder, tokens):
    """Return logits (N_GUESSED + 1, N - 1, V): at [g, i] of pair i + g, where the pairs after i use the head's own output."""
    auto_class = get_auto_class(AutoConfig.from_pretrained(folder))
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head = Mtp(model.config.get_text_config())
    head.load_state_dict(read_mtp(folder, model.config.get_text_config()))
    with torch.no_grad():
        text_model = getattr(model.model, "language_model", model.model)
        states, embedded = text_model(tokens[None]).last_hidden_state[0], text_model.embed_tokens(tokens)
        logits = torch.zeros(N_GUESSED + 1, len(tokens) - 1, model.config.get_text_config().vocab_size)
        for i in range(len(tokens) - 1):
            inputs = states[: i + 1]
            for g in range(min(N_GUESSED + 1, len(tokens) - 1 - i)):
                outputs = head(embedded[1 : i + g + 2], inputs)
                logits[g, i] = model.lm_head(outputs[-1])
                inputs = torch.cat([inputs, outputs[-1:]])
    return logits.numpy()


def quantize_mxfp4(folder):
    """Replace the experts' matrices by random MXFP4 blocks, with the names and the order of the published gpt-oss."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        n_experts, n_inputs, n_outputs = tensors.pop(name).shape
        shape = (n_experts, n_outputs, n_inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 124, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def transpose_experts(folder):
    """Store the matrices of experts as (inputs, outputs), as the published Qwen3-VL does."""
    tensors = load_file(folder / "model.safetensors")
    experts = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | experts, folder / "model.safetensors", {"format": "pt"})


def rename_as_ling(folder):
    """Give tensors and config of a saved GLM-4.5 the names of a published Ling 2.0, for which transformers has no class."""
    names = {
        "embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias",
    }  # fmt: skip
    stored, tensors = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        for part in [part for part in names if part in name]:
            name = name.replace(part, names[part])
        if "self_attn.q_proj" in name:
            joined = torch.cat([stored[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
            tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = joined
        elif "self_attn" not in name:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    values = {renamed.get(key, key): value for key, value in values.items()}
    own = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "score_function": "sigmoid"}
    own |= {"use_bias": False, "use_qkv_bias": False, "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(values | own, indent=2) + "\n")


def rename_as_minicpm(folder):
    """Turn a Granite with the default score scale into a MiniCPM, which transformers knows only as remote code."""
    values = json.loads((folder / "config.json").read_text())
    del values["attention_multiplier"]
    values["scale_emb"] = values.pop("embedding_multiplier")
    values["scale_depth"] = values.pop("residual_multiplier") * values["num_hidden_layers"] ** 0.5
    values["dim_model_base"] = values["hidden_size"] / values.pop("logits_scaling")
    values |= {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def save(model, folder, shards="1GB", ends=None, as_base=False, microscaled=False, as_transposed=False):
    model.generation_config = GenerationConfig.from_model_config(model.config)
    if ends:
        model.generation_config.eos_token_id = ends
    model.save_pretrained(folder, max_shard_size=shards)
    if microscaled:
        quantize_mxfp4(folder)
    if as_transposed:
        transpose_experts(folder)
    if as_base:  # as openai-community/gpt2: no prefix, and the buffers of older versions
        path = folder / "model.safetensors"
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
        n = model.config.n_positions
        for i in range(model.config.n_layer):
            tensors[f"h.{i}.attn.bias"] = torch.ones(n, n, dtype=torch.uint8).tril()[None, None, :8, :8].contiguous()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(tensors, path, {"format": "pt"})


def compute_expected(folder, seed):
    """Return transformers' fp32 tokens, logits and greedy continuation of a folder, and the smallest lead of a greedy token."""
    config = AutoConfig.from_pretrained(folder)
    model = get_auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(3, config.get_text_config().vocab_size, N_TOKENS))
    with torch.no_grad():
        # each prefix by itself: LongRoPE rotates long sequences differently from their first token on
        logits = torch.stack([model(tokens[None, : i + 1], use_cache=False).logits[0, -1] for i in range(N_TOKENS)])
        sequence = tokens[:N_PROMPT].tolist()
        leads = []
        for _ in range(N_CONTINUATION):
            best = model(torch.tensor([sequence]), use_cache=False).logits[0, -1].topk(2)
            leads.append(float(best.values[0] - best.values[1]))
            sequence.append(int(best.indices[0]))
        model.generation_config = GenerationConfig(max_new_tokens=N_CONTINUATION, do_sample=False)
        generated = model.generate(tokens[None, :N_PROMPT], attention_mask=torch.ones(1, N_PROMPT))[0].tolist()
    assert generated == sequence, "generate and passes over the whole sequence disagree"
    return tokens.numpy(), logits.numpy(), np.array(sequence[N_PROMPT:]), min(leads)


def compute_checksums(folder):
    """Return the CRC-32 of each tensor's bytes by name."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: zlib.crc32(tensor.flatten().view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}


def make(name):
    folder = FIXTURES / name
    config = load_definition(folder)
    text = config.get_text_config()
    has_mtp = text.model_type == "glm4_moe_lite" or getattr(text, "mtp_num_hidden_layers", 0) > 0
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        model = random_model(config, seed)
        save(model, folder, **LAYOUTS.get(name, {}))
        if has_mtp:
            add_mtp(folder, model, seed)
        tokens, logits, continuation, lead = compute_expected(folder, seed)
        if lead > MIN_LEAD and len(set(continuation.tolist())) > 8:
            if name == "bailing_moe_v2":
                rename_as_ling(folder)
            sums = compute_checksums(folder)
            arrays = {"names": np.array(list(sums)), "sums": np.array(list(sums.values()))}
            if has_mtp:
                arrays["mtp_logits"] = compute_expected_mtp(folder, torch.from_numpy(tokens[:N_MTP]))
            if name == "minicpm":
                rename_as_minicpm(folder)
            np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits, continuation=continuation, **arrays)
            return seed, lead
    raise SystemExit(f"{name}: no seed gives a greedy output without near ties")


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or sorted(path.parent.name for path in FIXTURES.glob("*/config.json")):
        seed, lead = make(name)
        n_bytes = sum(path.stat().st_size for path in (FIXTURES / name).iterdir())
        print(f"{name}: seed {seed}, lead {lead:.3f}, {n_bytes} bytes")
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", "safetensors", "numpy")}
    (FIXTURES / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
