"""Definitions of a model family: in a Hugging Face folder, in a GGUF file, as a draft head, and named chat templates."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specdec.families.config_values import ConfigValues
from specdec.families.hf_common import IGNORED_NAMES, PREFIX
from specdec.families.tensor_specs import TensorSpec
from specdec.model_config import ModelConfig

TensorSpecs = Mapping[str, TensorSpec]


def list_no_tensors(config: ModelConfig) -> Iterable[str]:
    """Return no names; the default of families that need all tensors of their files."""
    return ()


class TensorSource(Protocol):
    """The tensors of a model's files by name."""

    def __contains__(self, name: str, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def get_shape(self, name: str, /) -> tuple[int, ...]:
        """Return a tensor's shape. Raises CheckpointError if it is missing."""

    def get_tensor(self, name: str, shape: tuple[int, ...], /) -> Any:
        """Return a tensor. Raises CheckpointError if it is missing or has another shape."""


@dataclass(frozen=True)
class HFFamily:
    """A family in a Hugging Face folder.

    Attributes:
        model_type: Its name in config.json.
        defaults: Values of missing keys, as in transformers 5.23 (`models/*/configuration_*.py`).
        parse_config: Function that builds the config from the keys with those defaults. Raises CheckpointError.
        tensor_specs: Specs of its tensors by our names; stored names are without what `prefix` matches.
        alternatives: Specs that replace others if the file has the first of them.
        mtp_specs: Specs of the MTP head that the files may contain, then alternatives for it.
        prefix: Regex of the prefix of stored names.
        ignored_names: Regex of the names of tensors that are never needed.
        supported_keys: Keys of `hf_common.NEUTRAL_VALUES` that the family supports.
        key_aliases: Other names of keys, and the names that we use.
        multimodal_types: model_type of multimodal files that have this family in text_config, and whether they tie the embedding.
        list_unused: Function that returns names of tensors that a file may have but a model with this config does not need.
    """

    model_type: str
    defaults: Mapping[str, Any]
    parse_config: Callable[[ConfigValues], ModelConfig]
    tensor_specs: TensorSpecs
    alternatives: Sequence[TensorSpecs] = ()
    mtp_specs: Sequence[TensorSpecs] = ()
    prefix: re.Pattern[str] = PREFIX
    ignored_names: re.Pattern[str] = IGNORED_NAMES
    supported_keys: tuple[str, ...] = ()
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    multimodal_types: Mapping[str, bool] = field(default_factory=dict)
    list_unused: Callable[[ModelConfig], Iterable[str]] = list_no_tensors


@dataclass(frozen=True)
class HFHead:
    """A draft head in a folder of its own.

    Attributes:
        is_head_config: Function that returns whether a config.json describes this head.
        parse_config: Function that builds the config from the path, the keys and the tensors. Raises CheckpointError.
        get_tensor_specs: Function that returns the specs of its tensors.
        get_id_map_name: Function that returns the tensor with the token ids of its rows; "" if it needs none.
        has_id_offsets: Whether the id map has offsets from the row's index instead of ids.
        id_ordered_tensors: Tensors that are stored in the order of ids, and are taken in the order of rows.
        prefix, ignored_names, list_unused: As in `HFFamily`.
        folder_names: Name of its folder inside the model's, and of one next to it, with "{}" for the model folder's name.
    """

    is_head_config: Callable[[Mapping[str, Any]], bool]
    parse_config: Callable[[Path, Mapping[str, Any], TensorSource], ModelConfig]
    get_tensor_specs: Callable[[ModelConfig, TensorSource], TensorSpecs]
    get_id_map_name: Callable[[ModelConfig, TensorSource], str]
    has_id_offsets: bool = False
    id_ordered_tensors: tuple[str, ...] = ()
    prefix: re.Pattern[str] = PREFIX
    ignored_names: re.Pattern[str] = IGNORED_NAMES
    list_unused: Callable[[ModelConfig], Iterable[str]] = list_no_tensors
    folder_names: tuple[str, str] | None = None


class GGUFMetadata(ConfigValues):
    """The metadata of a GGUF file: the keys of its architecture.

    Attributes:
        common_fields: Fields of `ModelConfig` that are parsed alike for all families.
        tensors: The file's tensors.
    """

    def __init__(
        self, path: Path, given: Mapping[str, Any], prefix: str, common_fields: Mapping[str, Any], tensors: TensorSource
    ) -> None:
        super().__init__(path, given, prefix=prefix)
        self.common_fields, self.tensors = common_fields, tensors


@dataclass(frozen=True)
class GGUFFamily:
    """A family in a GGUF file.

    Attributes:
        architecture: Its name there.
        parse_config: Function that builds the config. Raises CheckpointError.
        tensor_specs, alternatives, list_unused: As in `HFFamily`.
        mtp_specs: Specs of the MTP head that may be in the layer after the last one, then alternatives for it.
        supported_keys: Keys of `gguf_common.NEUTRAL_VALUES` that the family supports.
        per_layer_keys: Keys of `gguf_common.PER_LAYER_KEYS` that may differ between layers.
        is_head: Whether it is a draft head for another file's model.
        id_map_name: Tensor with the token ids of a head's rows, if it has one.
    """

    architecture: str
    parse_config: Callable[[GGUFMetadata], ModelConfig]
    tensor_specs: TensorSpecs
    alternatives: Sequence[TensorSpecs] = ()
    mtp_specs: Sequence[TensorSpecs] = ()
    supported_keys: tuple[str, ...] = ()
    per_layer_keys: tuple[str, ...] = ()
    is_head: bool = False
    id_map_name: str = ""
    list_unused: Callable[[ModelConfig], Iterable[str]] = list_no_tensors


def select_tensor_specs(
    specs: TensorSpecs, alternatives: Sequence[TensorSpecs], source: TensorSource, n_layers: int
) -> dict[str, TensorSpec]:
    """Return the specs for a source of n_layers layers, replaced by each alternative if its first tensor exists there."""
    found = dict(specs)
    for others in alternatives:
        first = next(iter(others.values())).name
        if any(first.format(i, 0) in source for i in range(n_layers)):
            found |= others
    return found


class NamedChatTemplate(NamedTuple):
    """A chat template that can be chosen by name because no model file contains it.

    Attributes:
        name: Its name.
        source: The Jinja template.
        variables: Its variables, such as bos_token.
        description: The models that it is for.
    """

    name: str
    source: str
    variables: Mapping[str, str]
    description: str
