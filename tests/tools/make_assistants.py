"""Make tests/fixtures/heads/assistants with transformers 5.23: `python tests/tools/make_assistants.py`. No test needs it.

`target` is a tiny Gemma 4 with random weights; `plain` and `ordered` are random assistants for it, `ordered` with centroids. Each
is defined by its config.json. expected.npz has `tokens` (N,), prompt `lengths` (L,) and for each assistant the output of
transformers' own loop after that many tokens: greedy draft tokens `NAME_guesses` (L, G) and their logits `NAME_logits` (L, G, V).
"""

import numpy as np
import torch
from make_fixtures import FIXTURES, randomize
from transformers import AutoConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

N_TOKENS, N_GUESSES, LENGTHS = 60, 4, (2, 3, 9, 10, 11, 30, 60)
FOLDER = FIXTURES / "heads" / "assistants"
ASSISTANTS = ("plain", "ordered")
ORIGINAL_MODES = Gemma4TextConfig.kv_sharing_modes.fget


def get_kv_modes(config):
    """Return the KV modes of an assistant: transformers 5.23 requires a layer with its own KV cache, and it has none."""
    return (
        ["reuse"] * config.num_hidden_layers
        if config.num_kv_shared_layers == config.num_hidden_layers
        else ORIGINAL_MODES(config)
    )


def soften_scores(model):
    """Return the model with smaller attention scores: sharp, unscaled ones would amplify rounding errors to 1e-3."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name:
                parameter.mul_(0.3)
    return model.eval()


def make_target():
    torch.manual_seed(1)
    return soften_scores(randomize(Gemma4ForCausalLM(AutoConfig.from_pretrained(FOLDER / "target"))))


def make_assistant(name, seed):
    torch.manual_seed(seed)
    model = soften_scores(randomize(Gemma4AssistantForCausalLM(AutoConfig.from_pretrained(FOLDER / name))))
    if model.masked_embedding:
        order = np.random.default_rng(seed).permutation(192)
        model.masked_embedding.token_ordering.copy_(torch.from_numpy(order))
    return model


def compute_expected(target, assistant, tokens):
    assistant.generation_config.num_assistant_tokens = N_GUESSES
    guesses, logits = [], []
    for n in LENGTHS:
        loop = SinglePositionMultiTokenCandidateGenerator(
            assistant, target.get_input_embeddings(), GenerationConfig(max_length=N_TOKENS + 20)
        )
        outputs = target(tokens[None, : n - 1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        ids, id_logits = loop.get_candidates(tokens[None, :n], {}, outputs, False, 0)
        guesses.append(ids[0, n:].numpy())
        logits.append(id_logits[0].numpy())
    return np.stack(guesses), np.stack(logits)


def main():
    torch.set_num_threads(1)
    Gemma4TextConfig.kv_sharing_modes = property(get_kv_modes)
    tokens = torch.from_numpy(np.random.default_rng(5).integers(3, 192, N_TOKENS))
    target = make_target()
    target.save_pretrained(FOLDER / "target")
    arrays = {"tokens": tokens.numpy(), "lengths": np.array(LENGTHS)}
    with torch.no_grad():
        for seed, name in enumerate(ASSISTANTS):
            assistant = make_assistant(name, 10 + seed)
            assistant.save_pretrained(FOLDER / name)
            arrays[f"{name}_guesses"], arrays[f"{name}_logits"] = compute_expected(target, assistant, tokens)
    np.savez_compressed(FOLDER / "expected.npz", **arrays)
    for path in FOLDER.glob("*/generation_config.json"):
        path.unlink()


if __name__ == "__main__":
    main()
