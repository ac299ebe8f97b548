"""Configs from one flat list of fields; the dataclasses' own fields determine where each belongs."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from specdec.mixer_config import MixerConfig
from specdec.model_config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig

RECORD_FIELD_NAMES = {  # flat names that differ from the dataclass's field
    "rope_theta": "theta", "rope_dim": "dim", "rope_scaling": "scaling", "rope_divisors": "freq_factors",
    "rope_scale": "attention_factor", "attention_scale": "scale", "attention_gate": "gate",
}  # fmt: skip
GPT2 = {
    "has_rope": False, "qkv_bias": True, "wo_bias": True, "mlp_bias": True, "activation": "ungated_gelu", "layer_norm": True,
    "learned_positions": True,
}  # fmt: skip
CONFIG_FIELDS = {field.name for field in fields(ModelConfig)}
ROPE_FIELDS = {*[field.name for field in fields(RopeConfig)] + [name for name in RECORD_FIELD_NAMES if name.startswith("rope_")]}
SIZE_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len", "head_dim")
LAYER_FIELDS = {field.name for field in fields(LayerConfig)}


def replace_attention(before: AttentionConfig, changes: Mapping[str, Any]) -> AttentionConfig:
    """Return a copy with changed fields of attention and of its RoPE."""
    own_changes = {RECORD_FIELD_NAMES.get(name, name): value for name, value in changes.items() if name not in ROPE_FIELDS}
    rope_changes = {RECORD_FIELD_NAMES.get(name, name): value for name, value in changes.items() if name in ROPE_FIELDS}
    return replace(before, **own_changes, rope=replace(before.rope, **rope_changes))


def keep_overrides(own: AttentionConfig, before: AttentionConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of all layers that a layer follows: those where its value equals the old one."""

    def value(of: AttentionConfig, name: str) -> Any:
        return getattr(of.rope if name in ROPE_FIELDS else of, RECORD_FIELD_NAMES.get(name, name))

    return {name: new for name, new in changes.items() if value(own, name) == value(before, name)}


def replace_config(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a copy with changes; layers: for each a `LayerConfig` or a dictionary of its overrides."""
    mixers = {name: changes.pop(name) for name in ("conv", "delta", "mamba") if name in changes}
    own, before = {name: value for name, value in changes.items() if name in CONFIG_FIELDS}, config.attention
    new = {name: changes[name] for name in {*changes} - CONFIG_FIELDS}
    whole = replace_attention(own.pop("attention", before), new)

    def layer(each: LayerConfig | Mapping[str, Any]) -> LayerConfig:
        if isinstance(each, LayerConfig):
            layer_attention = each.attention
            return replace(
                each,
                attention=replace_attention(layer_attention, keep_overrides(layer_attention, before, new))
                if layer_attention
                else None,
            )
        sizes, other = ({name: each[name] for name in each if (name in LAYER_FIELDS) == is_size} for is_size in (True, False))
        return LayerConfig(**sizes, attention=replace_attention(whole, other) if other else None)

    layers = tuple(map(layer, own.pop("layers", config.layers)))
    config = replace(config, **own, attention=whole, layers=layers)
    return replace(config, layers=make_mixer_layers(config.n_layers, *mixers.popitem()[1])) if mixers else config


def make_config(*sizes: Any, **changes: Any) -> ModelConfig:
    """Return a config with the fields of a llama2.c header and others by name."""
    names = [field.name for field in fields(ModelConfig)]
    sized = dict(zip(names, sizes, strict=False)) | {name: changes.pop(name) for name in SIZE_FIELDS if name in changes}
    return replace_config(ModelConfig(**sized), **changes)


def make_mixer_layers(n_layers: int, layers: Collection[int], mixer: MixerConfig) -> tuple[LayerConfig, ...]:
    """Return `ModelConfig.layers` where the given layers have this mixer."""
    return tuple(LayerConfig(mixer=mixer if i in layers else None) for i in range(n_layers))


def override_full_layers(layers: Collection[int], n_layers: int, **more: Any) -> tuple[dict[str, Any], ...]:
    """Return the overrides of n_layers layers, of which the given ones have full attention."""
    return tuple({"window": 0, **more} if i in layers else {} for i in range(n_layers)) if layers else ()


def make_gemma3_layers(full: Collection[int], n_layers: int, divisors: tuple[float, ...] = ()) -> tuple[dict[str, Any], ...]:
    """Return the layers of a Gemma 3 with some full-attention layers, whose angles are divided by the divisors."""
    return override_full_layers(full, n_layers, rope_theta=1e6, rope_divisors=divisors)


def describe_config(part: Any) -> Any:
    """Return a config or a part of one as JSON has it, without the fields that have their defaults."""
    if isinstance(part, tuple):
        return [describe_config(each) for each in part]
    if not is_dataclass(part):
        return part
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    own = {field.name: describe_config(values[field.name]) for field in fields(part) if values[field.name] != field.default}
    return {"type": type(part).__name__} | own
