"""Makes tests/fixtures/heads/assistants with transformers 5.23: `python tests/tools/make_assistants.py`. No test needs it.

`target` is a tiny Gemma 4 of random weights, `plain` and `ordered` are random assistants of it, the latter with centroids, and
expected.npz holds `tokens` (N,) and of each assistant what transformers' own loop says behind the first `lengths` of them: its
greedy guesses `NAME_guesses` (L, G), and the logits `NAME_logits` (L, G, V) that they are of.
"""

import shutil

import numpy as np
import torch
from make_fixtures import FIXTURES, gemma4_sizes, randomized
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

N_TOKENS, N_GUESSES, LENGTHS = 60, 4, (2, 3, 9, 10, 11, 30, 60)
PLACE = FIXTURES / "heads" / "assistants"
HEADS = {"head_dim": 6, "global_head_dim": 16, "sliding_window": 9}
ASSISTANTS = {
    "plain": gemma4_sizes(192, 24, 40, 4, 2, 1, layers="wwwa", **HEADS),
    "ordered": gemma4_sizes(192, 18, 32, 3, 4, 1, layers="awa", **HEADS),
}
MODES = Gemma4TextConfig.kv_sharing_modes.fget


def modes(config):
    """transformers 5.23 asks for a layer with keys and values of its own, which an assistant has not."""
    return ["reuse"] * config.num_hidden_layers if config.num_kv_shared_layers == config.num_hidden_layers else MODES(config)


def blunt(model):
    """The same, of smaller scores: the sharp ones of a model that does not scale them make 1e-3 of what rounding does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name:
                parameter.mul_(0.3)
    return model.eval()


def make_target():
    config = Gemma4TextConfig(
        **gemma4_sizes(192, 20, 30, 6, 2, 1, layers="wawwaa", **HEADS), hidden_size_per_layer_input=7, num_kv_shared_layers=3
    )
    torch.manual_seed(1)
    return blunt(randomized(Gemma4ForCausalLM(config)))


def make_assistant(name, seed):
    text = Gemma4TextConfig(**ASSISTANTS[name] | {"vocab_size_per_layer_input": 0}, hidden_size_per_layer_input=0)
    of_order = {"use_ordered_embeddings": True, "num_centroids": 6, "centroid_intermediate_top_k": 2}
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=20, **(of_order if name == "ordered" else {}))
    torch.manual_seed(seed)
    model = blunt(randomized(Gemma4AssistantForCausalLM(config)))
    if model.masked_embedding:
        order = np.random.default_rng(seed).permutation(192)
        model.masked_embedding.token_ordering.copy_(torch.from_numpy(order))
    return model


def expected(target, assistant, tokens):
    assistant.generation_config.num_assistant_tokens = N_GUESSES
    guesses, logits = [], []
    for n in LENGTHS:
        loop = SinglePositionMultiTokenCandidateGenerator(
            assistant, target.get_input_embeddings(), GenerationConfig(max_length=N_TOKENS + 20)
        )
        told = target(tokens[None, : n - 1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        ids, of_ids = loop.get_candidates(tokens[None, :n], {}, told, False, 0)
        guesses.append(ids[0, n:].numpy())
        logits.append(of_ids[0].numpy())
    return np.stack(guesses), np.stack(logits)


def main():
    torch.set_num_threads(1)
    Gemma4TextConfig.kv_sharing_modes = property(modes)
    shutil.rmtree(PLACE, ignore_errors=True)
    tokens = torch.from_numpy(np.random.default_rng(5).integers(3, 192, N_TOKENS))
    target = make_target()
    target.save_pretrained(PLACE / "target")
    told = {"tokens": tokens.numpy(), "lengths": np.array(LENGTHS)}
    with torch.no_grad():
        for seed, name in enumerate(ASSISTANTS):
            assistant = make_assistant(name, 10 + seed)
            assistant.save_pretrained(PLACE / name)
            told[f"{name}_guesses"], told[f"{name}_logits"] = expected(target, assistant, tokens)
    np.savez_compressed(PLACE / "expected.npz", **told)
    for path in PLACE.glob("*/generation_config.json"):
        path.unlink()


if __name__ == "__main__":
    main()
