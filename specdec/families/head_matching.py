"""Check whether a draft head is compatible with a target: by its sizes, and by the model family that it was trained for."""

from specdec.families.config_values import MAX_SIZE, format_json_value
from specdec.heads.gemma4_assistant import AssistantConfig, find_kv_source_layers
from specdec.model_config import ModelConfig, ShortConvConfig

MAX_TARGET_LAYERS = 64  # limit of the target layers that a head reads
# Family of each supported verifier architecture, by its name in config.json.
VERIFIER_FAMILIES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2", "Lfm2ForCausalLM": "lfm2", "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5ForCausalLM": "qwen35",
}  # fmt: skip


def is_layer_list(ids: object) -> bool:
    """Return whether a value is a valid list of target layers: not empty, not too long, without duplicates."""
    if not isinstance(ids, list | tuple) or not 0 < len(ids) <= MAX_TARGET_LAYERS:
        return False
    return all(type(i) is int and 0 <= i <= MAX_SIZE for i in ids) and len({*ids}) == len(ids)


def infer_family(target: ModelConfig) -> str:
    """Return the name of a target's model family, inferred from the parts of its config in which families differ."""
    if target.architecture != "llama":
        return target.architecture
    if any(layer.mixer for layer in target.layers):
        return "lfm2" if target.find_mixer_layers(ShortConvConfig) else "qwen35"
    if target.norm_placement != "before":
        return "gemma"
    if target.attention.qk_norm:
        return "qwen3"
    return "qwen2" if target.attention.qkv_bias and not target.attention.wo_bias else "llama"


def find_incompatibility(config: ModelConfig, target: ModelConfig) -> str:
    """Return a sentence that says why a draft head cannot be used with a target model, or "" if it can.

    Args:
        config: The config of the draft head.
        target: The config of the target.
    """
    head, n_layers = config.head, target.n_layers
    if not head:
        return "it is not a draft head"
    if head.target_dim != target.dim:
        return f"it takes hidden states of dimension {head.target_dim}; the target's have {target.dim}"
    if config.vocab_size != target.vocab_size:
        return f"it is for a vocabulary of {config.vocab_size} tokens; the target has {target.vocab_size}"
    if isinstance(head, AssistantConfig):  # it uses the target's keys and values
        try:
            find_kv_source_layers(config, target)
        except ValueError as error:
            return str(error)
        return ""
    layers = head.get_target_layers(n_layers)
    if not is_layer_list(layers) or max(layers) > n_layers:
        return f"it takes the inputs of the layers {', '.join(map(str, layers))}; the target has {n_layers} layers"
    family = infer_family(target)
    if VERIFIER_FAMILIES.get(head.target_architecture, family) != family:
        return f"it was trained for a {format_json_value(head.target_architecture)}; the target is a {family} model"
    return ""
