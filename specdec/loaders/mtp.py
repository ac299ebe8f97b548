"""Read the MTP (multi-token prediction) head in a model's own files as a `Checkpoint`.

A folder stores the head's tensors next to the model's tensors, and transformers ignores the head. A GGUF file stores the head in
the layer after the model's last one.
"""

import re
from dataclasses import replace

from specdec.families.family import TensorSource, select_tensor_specs
from specdec.families.tensor_specs import TensorSpec
from specdec.loaders import gguf_checkpoint
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.hf_checkpoint import HFFolder
from specdec.loaders.tensor_assembly import assemble_tensors
from specdec.model_config import HeadConfig, ModelConfig


def load_mtp_head(target: Checkpoint) -> Checkpoint | None:
    """Open the MTP (multi-token prediction) head in a target model's own files as a `Checkpoint`; return None if there is none.

    Raises:
        CheckpointError: The head is damaged or not supported.
    """
    if not target.mtp_specs:
        return None
    source: HFFolder | gguf_checkpoint.GGUFModel
    if target.path.is_dir():
        prefix, layer = re.escape(next(iter(target.mtp_specs[0].values())).name.partition(".")[0]), 0
        source = HFFolder(target.path, re.compile(r"(?!)"), re.compile(rf"(?!{prefix}\.).*", re.DOTALL))  # ignore all others
        has_head = any(True for _ in source)
    else:
        source, layer = gguf_checkpoint.GGUFModel(target.path), target.config.n_layers
        source.ignore(name for name in source if not name.startswith(f"blk.{layer}."))
        has_head = source.n_nextn > 0
    if not has_head:
        return None
    config = make_head_config(target.config)
    tensors = assemble_tensors(config, _select_layer_specs(target, layer, source), source)
    source.check_all_used()
    return Checkpoint(target.path, config, tensors)


def _select_layer_specs(target: Checkpoint, layer: int, source: TensorSource) -> dict[str, TensorSpec]:
    """Return the tensor specs of a target's MTP head, with the head's layer number in the file filled into the stored names.

    If the target has alternative specs, those that match the tensors in the file are chosen.

    Args:
        target: The model with the MTP head.
        layer: The head's layer number in the file.
        source: The tensors of the file.
    """

    def fill_layer(spec: TensorSpec) -> TensorSpec:
        return spec._replace(name=spec.name.replace("{}", str(layer), 1))

    specs, *alternatives = ({name: fill_layer(spec) for name, spec in each.items()} for each in target.mtp_specs)
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
