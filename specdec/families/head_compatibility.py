"""Whether a head that drafts fits a target: by its sizes, and by the family of models that it was made for."""

from specdec.config import Config, ConvConfig
from specdec.families.config_values import MAX_SIZE, shown
from specdec.heads.gemma4_assistant import AssistantConfig, sources

MOST_LAYERS = 64  # of a target, that a head may take the states before
# of the models that heads are made for, as their config.json names them, those that are read here
MADE_FOR = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2", "Lfm2ForCausalLM": "lfm2", "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5ForCausalLM": "qwen35",
}  # fmt: skip


def are_layers(ids: object) -> bool:
    """Whether a head can take its states before those layers: some, and each once."""
    if not isinstance(ids, list | tuple) or not 0 < len(ids) <= MOST_LAYERS:
        return False
    return all(type(i) is int and 0 <= i <= MAX_SIZE for i in ids) and len({*ids}) == len(ids)


def family_like(target: Config) -> str:
    """Which family that looks like, by what tells families apart in a config."""
    if target.architecture != "llama":
        return target.architecture
    if any(layer.mixer for layer in target.layers):
        return "lfm2" if target.mixing(ConvConfig) else "qwen35"
    if target.norms != "before":
        return "gemma"
    if target.attention.qk_norm:
        return "qwen3"
    return "qwen2" if target.attention.qkv_bias and not target.attention.wo_bias else "llama"


def misfit(config: Config, target: Config) -> str:
    """What keeps a head from drafting for a target, in words; empty where nothing does."""
    head, n_layers = config.head, target.n_layers
    if not head:
        return "it is no head"
    if head.target_dim != target.dim:
        return f"it takes states of {head.target_dim} numbers; the target's have {target.dim}"
    if config.vocab_size != target.vocab_size:
        return f"it is for {config.vocab_size} ids; the target has {target.vocab_size}"
    if isinstance(head, AssistantConfig):  # which takes the target's keys and values
        try:
            sources(config, target)
        except ValueError as error:
            return str(error)
        return ""
    layers = head.layers_of(n_layers)
    if not are_layers(layers) or max(layers) > n_layers:
        return f"it takes the states before the layers {', '.join(map(str, layers))}; the target has {n_layers} layers"
    family = family_like(target)
    if MADE_FOR.get(head.made_for, family) != family:
        return f"it was made for a {shown(head.made_for)}; the target is like {family}"
    return ""
