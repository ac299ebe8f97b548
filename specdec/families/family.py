"""Types that define a model family: in a Hugging Face folder, in a GGUF file, as a draft head, or by a named chat template."""

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
    """Return no tensor names; the default for families that need all tensors of their files."""
    return ()


class TensorSource(Protocol):
    """The protocol of a model's files as a collection of tensors by name."""

    def __contains__(self, name: str, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def get_shape(self, name: str, /) -> tuple[int, ...]:
        """Return the shape of the tensor with this name; raise CheckpointError if it is missing."""

    def get_tensor(self, name: str, shape: tuple[int, ...], /) -> Any:
        """Return the tensor with this name; raise CheckpointError if it is missing or has another shape."""


@dataclass(frozen=True)
class HFFamily:
    """The definition of a model family in Hugging Face folders: how to read its config.json and its tensors.

    Attributes:
        model_type: The name of the family in config.json.
        defaults: Values of missing keys, as in transformers 5.23 (`models/*/configuration_*.py`).
        parse_config: Function that builds the config from the keys with those defaults. Raises CheckpointError.
        tensor_specs: Specs of the family's tensors by our names; stored names are without what `prefix` matches.
        alternatives: Groups of specs; each group replaces the specs of the same names if the file has the group's first tensor.
        mtp_specs: Specs of the MTP head that the files may contain, then alternatives for these specs.
        prefix: Regex of the prefix of stored names.
        ignored_names: Regex of the names of tensors that are never needed.
        supported_keys: Keys of `hf_common.NEUTRAL_VALUES` that the family supports.
        key_aliases: A dict from other names of keys to the names that we use.
        multimodal_types: A dict from the model_type of multimodal files that have this family in text_config to whether these
            files tie the embedding to the classifier.
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
    """The definition of a draft head in a Hugging Face folder of its own: how to read its config.json and its tensors.

    Attributes:
        is_head_config: Function that returns whether a config.json describes this head.
        parse_config: Function that builds the config from the path, the keys and the tensors. Raises CheckpointError.
        get_tensor_specs: Function that returns the specs of the head's tensors.
        get_id_map_name: Function that returns the name of the tensor that maps rows of the head's classifier to token ids; "" if
            the folder has none.
        has_id_offsets: Whether that tensor has offsets from the row's index instead of ids.
        id_ordered_tensors: Tensors that are stored in the order of ids, and are taken in the order of rows.
        prefix, ignored_names, list_unused: As in `HFFamily`.
        folder_names: Name of the head's folder inside the model's folder, and of one next to it, with "{}" for the name of the
            model's folder.
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
    """The metadata of a GGUF file: typed access to the keys that start with the architecture's name.

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
    """The definition of a model family in GGUF files: how to read its metadata and its tensors.

    Attributes:
        architecture: The name of the family in GGUF files.
        parse_config: Function that builds the config from the metadata. Raises CheckpointError.
        tensor_specs, alternatives, list_unused: As in `HFFamily`.
        mtp_specs: Specs of the MTP head that may be in the layer after the last one, then alternatives for these specs.
        supported_keys: Keys of `gguf_common.NEUTRAL_VALUES` that the family supports.
        per_layer_keys: Keys of `gguf_common.PER_LAYER_KEYS` that may differ between layers.
        is_head: Whether the family is a draft head for another file's model.
        id_map_name: Name of the tensor that maps rows of a draft head's classifier to token ids; "" if there is none.
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
    """Return the tensor specs that fit a model's files, by our names.

    Args:
        specs: The family's main specs.
        alternatives: Groups of specs; each group replaces the specs of the same names if its first tensor is in the files.
        source: The tensors of the files.
        n_layers: Number of layers in the files.
    """
    found = dict(specs)
    for others in alternatives:
        first = next(iter(others.values())).name
        if any(first.format(i, 0) in source for i in range(n_layers)):
            found |= others
    return found


class NamedChatTemplate(NamedTuple):
    """A chat template that users choose by name because no model file contains it.

    Attributes:
        name: The name that users give.
        source: The Jinja template.
        variables: The template's variables, such as bos_token.
        description: The models that the template is for.
    """

    name: str
    source: str
    variables: Mapping[str, str]
    description: str
