"""Types that define a model family: how to read its Hugging Face folder, its GGUF file, or a draft head."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.argument_checks import JSONObject
from specdec.families.config_values import MAX_SIZE, ConfigValues
from specdec.families.tensor_specs import TensorSource, TensorSpecs
from specdec.model_config import ModelConfig

PREFIX = re.compile(
    r"(model\.language_model|model\.text_model|language_model\.model|language_model|model)\."
)  # all but the last in multimodal models
IGNORED_NAMES = re.compile(
    r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(vision_tower|vision_model|multi_modal_projector|connector)\..*"
)
MAX_TARGET_LAYERS = 64  # limit of the target layers that a head reads


def list_no_tensors(config: ModelConfig) -> Iterable[str]:
    """Return no tensor names; the default for families that need all tensors of their files."""
    return ()


@dataclass(frozen=True)
class HFFamily:
    """The definition of a model family in Hugging Face folders: how to read its config.json and its tensors.

    Attributes:
        name: The model_type of the family in config.json.
        defaults: Values of missing keys, as in transformers 5.23 (`models/*/configuration_*.py`).
        parse_config: Function that builds the config from the keys with those defaults. Raises CheckpointError.
        tensor_specs: Specs of the family's tensors by our names; stored names are without what `prefix` matches.
        alternatives: Groups of specs; each group replaces the specs of the same names if the file has the group's first tensor.
        mtp_specs: Specs of the MTP head that the files may contain, then alternatives for these specs.
        prefix: Regex of the prefix of stored names.
        ignored_names: Regex of the names of tensors that are never needed.
        supported_keys: Keys of `hf_common.NEUTRAL_VALUES` that the family supports. Keys of expert counts count as
            supported if they are in `defaults`.
        key_aliases: A dict from other names of keys to the names that we use.
        multimodal_types: A dict from the model_type of multimodal files that have this family in text_config to whether these
            files tie the embedding to the classifier.
        list_unused: Function that returns names of tensors that a file may have but a model with this config does not need.
    """

    name: str
    defaults: JSONObject
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

    @property
    def has_mtp_layers(self) -> bool:
        """Whether MTP heads are stored as layers after those of the model."""
        return bool(self.mtp_specs) and next(iter(self.mtp_specs[0].values())).name.startswith("layers.{}")


@dataclass(frozen=True)
class HFHead:
    """The definition of a draft head in a Hugging Face folder of its own: how to read its config.json and its tensors.

    Attributes:
        name: The name of the head.
        parse_config: Function that builds the config from the path, the keys and the tensors. Raises CheckpointError.
        get_tensor_specs: Function that returns the specs of the head's tensors.
        get_id_map_name: Function that returns the name of the tensor that maps rows of the head's classifier to token ids; "" if
            the folder has none.
        has_id_offsets: Whether that tensor has offsets from the row's index instead of ids.
        id_ordered_tensors: Tensors that are stored in the order of ids, and are taken in the order of rows.
        prefix, ignored_names, list_unused: As in `HFFamily`.
    """

    name: str
    parse_config: Callable[[Path, JSONObject, TensorSource], ModelConfig]
    get_tensor_specs: Callable[[ModelConfig, TensorSource], TensorSpecs]
    get_id_map_name: Callable[[ModelConfig, TensorSource], str]
    has_id_offsets: bool = False
    id_ordered_tensors: tuple[str, ...] = ()
    prefix: re.Pattern[str] = PREFIX
    ignored_names: re.Pattern[str] = IGNORED_NAMES
    list_unused: Callable[[ModelConfig], Iterable[str]] = list_no_tensors


class GGUFMetadata(ConfigValues):
    """The metadata of a GGUF file: typed access to the keys that start with the architecture's name.

    Attributes:
        common_fields: Fields of `ModelConfig` that are parsed alike for all families.
        tensors: The file's tensors.
    """

    def __init__(self, path: Path, given: JSONObject, prefix: str, common_fields: JSONObject, tensors: TensorSource) -> None:
        """Store the keys that the file gives, the fields that all families share, and the tensors."""
        super().__init__(path, given, prefix=prefix)
        self.common_fields, self.tensors = common_fields, tensors


@dataclass(frozen=True)
class GGUFFamily:
    """The definition of a model family in GGUF files: how to read its metadata and its tensors.

    Attributes:
        name: The architecture of the family in GGUF files.
        parse_config: Function that builds the config from the metadata. Raises CheckpointError.
        tensor_specs, alternatives, list_unused: As in `HFFamily`.
        mtp_specs: Specs of the MTP head that may be in the layer after the last one, then alternatives for these specs.
        supported_keys: Keys of `gguf_common.NEUTRAL_VALUES` that the family supports.
        per_layer_keys: Keys of `gguf_common.PER_LAYER_KEYS` that may differ between layers.
        layer_number_keys: Whole keys with a number for each layer, which `tensor_specs` name like tensors: `KEY.{}`.
        is_head: Whether the family is a draft head for another file's model.
        id_map_name: Name of the tensor that maps rows of a draft head's classifier to token ids; "" if there is none.
    """

    name: str
    parse_config: Callable[[GGUFMetadata], ModelConfig]
    tensor_specs: TensorSpecs
    alternatives: Sequence[TensorSpecs] = ()
    mtp_specs: Sequence[TensorSpecs] = ()
    supported_keys: tuple[str, ...] = ()
    per_layer_keys: tuple[str, ...] = ()
    layer_number_keys: tuple[str, ...] = ()
    is_head: bool = False
    id_map_name: str = ""
    list_unused: Callable[[ModelConfig], Iterable[str]] = list_no_tensors


def is_layer_list(ids: object) -> bool:
    """Return whether a value is a valid list of target layers: not empty, not too long, without duplicates."""
    if not isinstance(ids, list | tuple) or not 0 < len(ids) <= MAX_TARGET_LAYERS:
        return False
    return all(type(i) is int and 0 <= i <= MAX_SIZE for i in ids) and len({*ids}) == len(ids)
