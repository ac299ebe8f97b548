"""Draft heads: open a head in a folder of its own or in a model's files as a `Checkpoint`, and check which targets it fits."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.argument_checks import CheckpointError, wrap_read_errors
from specdec.families import detect_head, load_definition
from specdec.families.family import PREFIX, HFHead, is_layer_list
from specdec.families.tensor_specs import TensorSource, TensorSpec, TensorSpecs, select_tensor_specs
from specdec.head_config import AssistantConfig, HeadConfig
from specdec.loaders import import_reader
from specdec.loaders.checkpoint import Checkpoint, DerivedTensor, check_id_map, check_target_ids
from specdec.loaders.hf_checkpoint import HFFolder, has_tied_embedding
from specdec.loaders.model_file import CONFIG, INDEX, PICKLE_WEIGHTS, WEIGHTS, read_json_object
from specdec.loaders.tensor_assembly import TensorIndex, assemble_tensors
from specdec.model_config import ModelConfig, find_kv_source_layers
from specdec.runtime.simd import Int64

if TYPE_CHECKING:
    from specdec.loaders.gguf_checkpoint import GGUFModel

# Tensors of an MTP head that are copies of the target's embedding and classifier, or matrices that are stored in parts, too
SHARED_WITH_TARGET = ("embed_tokens", "shared_head.head")
GGUF_SHARED_WITH_TARGET = ("nextn.embed_tokens", "nextn.shared_head_head", "attn_kv_b")


def reorder_rows(stored: Any, order: Int64) -> DerivedTensor:
    """Return a tensor with row order[i] of a stored matrix as row i; the first read reads and caches the whole matrix."""
    read_all = functools.cache(lambda: stored[:])
    return DerivedTensor(stored, stored.shape, stored.dtype, lambda first, last: read_all()[order[first:last]])


def load_checkpoint(path: Path) -> Checkpoint:
    """Open the folder of a draft head as a `Checkpoint`, after checking everything that its headers show.

    Raises:
        CheckpointError: It is not a head's folder, or the head is not complete and consistent. Weights are checked when they are
            read.
    """
    with wrap_read_errors(path, CheckpointError):
        if (path / PICKLE_WEIGHTS).exists() and not any((path / name).exists() for name in (WEIGHTS, INDEX)):
            raise CheckpointError(
                f"{path} has its weights only in {PICKLE_WEIGHTS}, which may run code when it is read; write them to "
                f"{WEIGHTS}: "
                f"save_file(torch.load('{PICKLE_WEIGHTS}', weights_only=True), '{WEIGHTS}'), with save_file of safetensors.torch"
            )
    given = read_json_object(path / CONFIG)
    if not (head := load_definition(HFHead, detect_head(given))):
        raise CheckpointError(f"{path / CONFIG} does not describe a draft head")
    folder = HFFolder(path, head.prefix, head.ignored_names)
    config = head.parse_config(path / CONFIG, given, folder)
    if (problem := config.find_error()) or not config.head:
        raise CheckpointError(f"{path / CONFIG} does not describe a valid draft head: {problem}")
    id_map = head.get_id_map_name(config, folder)
    check_id_map(config.head, config.vocab_size, bool(id_map), f"{path / CONFIG}")
    specs, ids = {**head.get_tensor_specs(config, folder)}, None
    if config.shared_classifier and not has_tied_embedding(folder, specs, config):
        raise CheckpointError(f"{path} has a classifier that differs from the embedding, but its {CONFIG} ties them")
    tensors = assemble_tensors(config, specs, folder)
    if id_map:
        stored_ids = folder.read_integers(id_map, config.head.draft_vocab_size)
        ids = stored_ids + np.arange(len(stored_ids)) if head.has_id_offsets else stored_ids
        ids = check_target_ids(ids, config.vocab_size, folder.describe(id_map))
        tensors |= {name: reorder_rows(tensors[name], ids) for name in head.id_ordered_tensors}
    folder.ignore(head.list_unused(config))
    folder.check_all_used()
    return Checkpoint(path, config, tensors, target_ids=ids, family=config.architecture)


# MTP heads


def load_mtp_head(target: Checkpoint) -> Checkpoint | None:
    """Open the MTP (multi-token prediction) head in a target model's own files as a `Checkpoint`; return None if there is none.

    Raises:
        CheckpointError: The head is damaged or not supported.
    """
    if not target.mtp_specs:
        return None
    source: Any
    first_name = next(iter(target.mtp_specs[0].values())).name
    if target.path.is_dir() and first_name.startswith("layers.{}"):  # the layer after those of the model
        layer = target.config.n_layers
        source = HFFolder(target.path, PREFIX, re.compile(rf"(?!layers\.{layer}\.).*", re.DOTALL))
        source.ignore(f"layers.{layer}.{name}.weight" for name in SHARED_WITH_TARGET)
        has_head = any(True for _ in source)
    elif target.path.is_dir():
        prefix, layer = re.escape(first_name.partition(".")[0]), 0
        source = HFFolder(target.path, re.compile(r"(?!)"), re.compile(rf"(?!{prefix}\.).*", re.DOTALL))  # ignore all others
        has_head = any(True for _ in source)
    else:
        source = import_reader("gguf_checkpoint").GGUFModel(target.path)
        return assemble_gguf_head(source, target.config) if source.n_nextn else None
    return _assemble_mtp_head(source, target.config, target.mtp_specs, layer) if has_head else None


def assemble_gguf_head(source: "GGUFModel", target: ModelConfig) -> Checkpoint:
    """Return the MTP head in a GGUF file as a `Checkpoint`: the layer after those of the target with the given config.

    A file that holds a head alone may have copies of the target's embedding, norm and classifier, which are ignored.

    Raises:
        CheckpointError: The head is damaged or not supported.
    """
    layer = target.n_layers
    source.ignore(name for name in source if not name.startswith(f"blk.{layer}."))
    if target.attention.latent:
        source.ignore(f"blk.{layer}.{name}.weight" for name in GGUF_SHARED_WITH_TARGET)
    return _assemble_mtp_head(source, target, source.family.mtp_specs, layer)


def _assemble_mtp_head(source: TensorIndex[Any], target: ModelConfig, mtp_specs: Sequence[TensorSpecs], layer: int) -> Checkpoint:
    config = make_head_config(target)
    tensors = assemble_tensors(config, _select_layer_specs(mtp_specs, layer, source), source)
    source.check_all_used()
    return Checkpoint(source.path, config, tensors)


def _select_layer_specs(mtp_specs: Sequence[TensorSpecs], layer: int, source: TensorSource) -> dict[str, TensorSpec]:
    """Return the tensor specs of a target's MTP head, with the head's layer number in the file filled into the stored names.

    If the target has alternative specs, those that match the tensors in the file are chosen.

    Args:
        mtp_specs: The family's specs of MTP heads.
        layer: The head's layer number in the file.
        source: The tensors of the file.
    """

    def fill_layer(spec: TensorSpec) -> TensorSpec:
        return spec._replace(name=spec.name.replace("{}", str(layer), 1))

    specs, *alternatives = ({name: fill_layer(spec) for name, spec in each.items()} for each in mtp_specs)
    return select_tensor_specs(specs, alternatives, source, 1)


def make_head_config(target: ModelConfig) -> ModelConfig:
    """Return the config of the MTP head of a target with the given config: one layer, like the target's attention layers."""
    head = HeadConfig(
        target_dim=target.dim,
        target_layers=(target.n_layers,),
        draft_vocab_size=target.vocab_size,
        own_embedding=False,
        own_classifier=False,
        norm_output=True,
    )
    experts = target.experts and replace(target.experts, dense_layers=())
    return replace(target, architecture="mtp", n_layers=1, shared_classifier=False, layers=(), head=head, experts=experts)


# Targets


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
    if config.architecture == "mtp" and layers != (n_layers,):
        return f"it is the head of a model of {layers[0]} layers; the target has {n_layers}"
    if not is_layer_list(layers) or max(layers) > n_layers:
        return f"it takes the inputs of the layers {', '.join(map(str, layers))}; the target has {n_layers} layers"
    return ""
