"""Configs by one list of names: what belongs in which record is told by the records' own fields."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from specdec.config import AttentionConfig, Config, ConvConfig, DeltaConfig, LayerConfig, RopeConfig

OTHERWISE = {  # names that say in whose record they are
    "rope_theta": "theta", "rope_dim": "dim", "rope_scaling": "scaling", "rope_divisors": "divisors", "rope_scale": "scale",
    "attention_scale": "scale", "attention_gate": "gate",
}  # fmt: skip
OWN = {field.name for field in fields(Config)}
OF_ROPE = {*[field.name for field in fields(RopeConfig)] + [name for name in OTHERWISE if name.startswith("rope_")]} - {"scale"}
SIZES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len", "head_dim")
OF_LAYER = {field.name for field in fields(LayerConfig)}


def attention(before: AttentionConfig, numbers: Mapping[str, Any]) -> AttentionConfig:
    """The same with those of its numbers, and of its RoPE's."""
    ours = {OTHERWISE.get(name, name): value for name, value in numbers.items() if name not in OF_ROPE}
    turning = {OTHERWISE.get(name, name): value for name, value in numbers.items() if name in OF_ROPE}
    return replace(before, **ours, rope=replace(before.rope, **turning))


def kept(own: AttentionConfig, before: AttentionConfig, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Of numbers that are new before a layer: those that it has not others of."""

    def value(of: AttentionConfig, name: str) -> Any:
        return getattr(of.rope if name in OF_ROPE else of, OTHERWISE.get(name, name))

    return {name: number for name, number in numbers.items() if value(own, name) == value(before, name)}


def changed(config: Config, **numbers: Any) -> Config:
    """The same with those numbers; layers: of each a `LayerConfig`, or a dictionary of what it has of its own."""
    mixing = {name: numbers.pop(name) for name in ("conv", "delta") if name in numbers}
    own, before = {name: value for name, value in numbers.items() if name in OWN}, config.attention
    new = {name: numbers[name] for name in {*numbers} - OWN}
    whole = attention(own.pop("attention", before), new)

    def layer(each: LayerConfig | Mapping[str, Any]) -> LayerConfig:
        if isinstance(each, LayerConfig):
            ours = each.attention
            return replace(each, attention=attention(ours, kept(ours, before, new)) if ours else None)
        sizes, other = ({name: each[name] for name in each if (name in OF_LAYER) == is_size} for is_size in (True, False))
        return LayerConfig(**sizes, attention=attention(whole, other) if other else None)

    layers = tuple(map(layer, own.pop("layers", config.layers)))
    config = replace(config, **own, attention=whole, layers=layers)
    return replace(config, layers=mixed(config.n_layers, *mixing.popitem()[1])) if mixing else config


def made(*sizes: Any, **numbers: Any) -> Config:
    """A config of the numbers that llama2.c's header has, and others by their names."""
    names = [field.name for field in fields(Config)]
    sized = dict(zip(names, sizes, strict=False)) | {name: numbers.pop(name) for name in SIZES if name in numbers}
    return changed(Config(**sized), **numbers)


def mixed(n_layers: int, layers: Collection[int], mixer: ConvConfig | DeltaConfig) -> tuple[LayerConfig, ...]:
    """`Config.layers` of which those have that mixer."""
    return tuple(LayerConfig(mixer=mixer if i in layers else None) for i in range(n_layers))
