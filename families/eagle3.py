"""EAGLE-3's heads (Li et al. 2025, arXiv:2503.01840): as llama.cpp writes them to GGUF, and for which families they are made."""

from ..architectures import Config, ConvConfig, HeadConfig
from . import ggufs
from .family import Family, InGguf, Keys
from .places import Place
from .values import MAX_SIZE

IDS = "d2t"  # of rows, absolute, unlike those in safetensors
LAYERS = ("target_layers", "extract_layers")  # of the target, by the key of today's converter and of the first
MOST_LAYERS = 64  # of a target, that a head may take the states before
OF_LAYER = ("llama", "qwen3")  # a head's layer is one of these; where a file is silent, EAGLE's and that of speculators
# of the models that heads are made for, as their config.json names them, those that are read here
MADE_FOR = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2", "Lfm2ForCausalLM": "lfm2", "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5ForCausalLM": "qwen35",
}  # fmt: skip
PLACES = ggufs.OUTER_PLACES | {
    "fc": Place("fc.weight"),
    "fc_norm": Place("enc.output_norm.weight", alone=True),
    "rms_emb": Place("blk.0.attn_norm.weight"),
    "rms_hidden": Place("blk.0.attn_norm_2.weight"),
    **{name: Place(f"blk.0.{ggufs.LAYER_NAMES[name]}") for name in ("wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")},
    "rms_final": Place("output_norm.weight"),
}


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


def gguf_config(k: Keys) -> Config:
    """The numbers that the keys say; a classifier or an embedding that is not there is the target's, and nothing adds a bias."""
    k.must_be("block_count", 1)
    layers = next((key for key in LAYERS if key in k), LAYERS[0])
    if not are_layers(k[layers]):
        raise k.values.refusal(k.key(layers), "layers of the target, each once")
    sized = next((name for name in (IDS, ggufs.HEAD) if name in k.tensors), "")
    head = HeadConfig(
        target_dim=k.whole("target_hidden_size"),
        layers=tuple(k[layers]),
        n_rows=k.tensors.shape(sized)[0] if sized else k.common["vocab_size"],
        own_embedding=ggufs.EMBEDDING in k.tensors,
        own_classifier=ggufs.HEAD in k.tensors,
        norm_before_residual=k.flag("norm_before_residual", False),
        fc_norm="whole" if k.flag("norm_before_fc", False) else "",
    )
    return Config(**ggufs.numbers(k, has_biases=False), architecture="eagle3", head=head)


FAMILY = Family((), (InGguf("eagle3", gguf_config, PLACES, is_head=True),))
