"""Make tests/fixtures/heads with speculators 0.9: `python tests/tools/make_heads.py`. No test needs it.

Each file has a random head for a target of make_fixtures.py and the outputs of speculators in fp32:

- `tokens` (N,)
- `states` (N - 1, 3 H): the target's hidden states before `layers`, from transformers
- `features` (N - 1, h)
- `logits` (N_GUESSED + 1, N - 1, R): at [g, i] those of pair i + g, where the pairs up to i are run with the target's states and
  the g pairs after them with the head's own output

The tensors have our names and order. Embedding and sizes are the target's, all else is random.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch

# speculators imports its training code, which requires packages that nothing here runs
sys.modules |= {name: MagicMock(__spec__=None) for name in ("speculators.train", "speculators.train.data", "loguru")}

from speculators import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, logging  # noqa: E402

FIXTURES = Path(__file__).parents[1] / "fixtures"
N_TOKENS, N_GUESSED = 24, 5
LLAMA = {"head_dim": 8, "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
NAMES = {
    "fc.weight": "fc", "input_norm.weight": "fc_norm", "layers.0.input_layernorm.weight": "rms_emb",
    "layers.0.hidden_norm.weight": "rms_hidden", "layers.0.post_attention_layernorm.weight": "rms_ffn",
    **{f"layers.0.self_attn.{x}_proj.weight": f"w{x}" for x in "qkvo"},
    **{f"layers.0.self_attn.{x}_proj.bias": f"b{x}" for x in "qkvo"},
    **{f"layers.0.self_attn.{x}_norm.weight": f"{x}_norm" for x in "qk"},
    "layers.0.mlp.gate_proj.weight": "w1", "layers.0.mlp.up_proj.weight": "w3", "layers.0.mlp.down_proj.weight": "w2",
    "norm.weight": "rms_final", "lm_head.weight": "wcls",
}  # fmt: skip
ROTATED = {"wq", "wk", "bq", "bk", "q_norm", "k_norm"}  # their rows are two halves per head, here interleaved pairs

# target: config class and sizes of the head's layer, target layers, rows of the classifier, options of the format
HEADS = {
    "llama_tied": (LlamaConfig, LLAMA, (0, 1, 2), 40, {}),
    "llama3": (LlamaConfig, LLAMA | {"attention_bias": True}, (2, 0, 1), 33, {"norm_before_fc": True, "norm_output": True}),
    "qwen3": (Qwen3Config, {"head_dim": 12}, (0, 1, 2), 66, {"norm_before_residual": True, "fc_norm": True}),
    "mistral": (
        Qwen3Config, {"head_dim": 10, "num_attention_heads": 2, "num_key_value_heads": 1}, (1, 2, 3), 50,
        {"norm_before_residual": True, "norm_output": True},
    ),
}  # fmt: skip


def get_hidden_states(target, tokens, layers):
    """Return the residual stream before each of the layers, concatenated (N, 3 H); after the last layer it is not normed."""
    taken = {}
    target.model.norm.register_forward_pre_hook(lambda _, inputs: taken.update(last=inputs[0][0]))
    states = target(tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([taken["last"] if layer == len(states) - 1 else states[layer][0] for layer in layers], dim=-1)


def random_head(config, embedding, seed):
    torch.manual_seed(seed)
    head = Eagle3DraftModel(config)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.6 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
        head.embed_tokens.weight.copy_(embedding)
    return head.eval()


def to_our_order(name, tensor, head_dim):
    if name not in ROTATED:
        return tensor
    return tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def make(name, seed):
    family, sizes, layers, n_rows, dialect = HEADS[name]
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32, attn_implementation="eager").eval()
    c = target.config
    sizes = {
        "hidden_size": c.hidden_size, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": c.vocab_size, "max_position_embeddings": 128, "pad_token_id": None, **sizes,
    }  # fmt: skip
    layer = family(**sizes)
    layer._attn_implementation = "eager"
    greedy = GreedyTokenProposalConfig(speculative_tokens=N_GUESSED)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=n_rows, eagle_aux_hidden_state_layer_ids=list(layers), **dialect,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[greedy], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(3, c.vocab_size, N_TOKENS))
    head, logits, features = random_head(config, target.get_input_embeddings().weight, seed), [], []
    head.lm_head.register_forward_hook(lambda _, inputs, output: logits.append(output[0]))
    head.fc.register_forward_hook(lambda _, inputs, output: features.append(output[0]))
    n = N_TOKENS - 1
    with torch.no_grad():
        states = get_hidden_states(target, tokens, layers)[:n]
        head(states[None], tokens[None, 1:], torch.zeros(1, n, dtype=torch.long), ttt_steps=N_GUESSED + 1)
    tensors = {
        NAMES[key]: to_our_order(NAMES[key], tensor.numpy(), layer.head_dim)
        for key, tensor in head.state_dict().items()
        if key in NAMES
    }
    if head.fc_norm:
        tensors["fc_norm"] = np.stack([norm.weight.detach().numpy() for norm in head.fc_norm])
    if head.input_norm:
        tensors["fc_norm"] = tensors["fc_norm"][None]
    numbers = {
        "hidden_dim": 44, "n_heads": layer.num_attention_heads, "n_kv_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim, "norm_eps": layer.rms_norm_eps, "qk_norm": family is Qwen3Config,
        "qkv_bias": layer.attention_bias, "wo_bias": layer.attention_bias, "n_rows": n_rows, "layers": layers,
        "norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output,
        "fc_norm": "each" if config.fc_norm else "whole" if config.norm_before_fc else "",
    }  # fmt: skip
    ids = np.sort(rng.permutation(c.vocab_size)[:n_rows])
    arrays = {"tokens": tokens, "states": states, "features": features[0], "logits": torch.stack(logits)}
    path = FIXTURES / "heads" / f"{name}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, numbers=json.dumps(numbers), ids=ids, **{k: v.numpy() for k, v in arrays.items()}, **tensors)
    return path.stat().st_size


def main():
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for seed, name in enumerate(HEADS):
        print(f"{name}: {make(name, seed)} bytes")
    print({package: importlib.metadata.version(package) for package in ("torch", "transformers", "speculators")})


if __name__ == "__main__":
    main()
