"""The head that a model brings along in its own files, to a `Checkpoint`: it predicts more tokens (MTP).

A folder has its tensors beside those of the model, which transformers leaves out; a GGUF file has them in the layer behind the
last one.
"""

import re
from dataclasses import replace

from specdec.config import Config, HeadConfig
from specdec.families.family import Tensors, chosen
from specdec.families.tensor_specs import Place
from specdec.loaders import gguf
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.hf_folder import Folder
from specdec.loaders.tensor_assembly import tensors_of


def head_of(target: Checkpoint) -> Checkpoint | None:
    """The head in a target's files; None where there is none. Raises CheckpointError for one that is damaged or not done here."""
    if not target.mtp:
        return None
    source: Folder | gguf.Model
    if target.path.is_dir():
        beginning, layer = re.escape(next(iter(target.mtp[0].values())).name.partition(".")[0]), 0
        source = Folder(target.path, re.compile(r"(?!)"), re.compile(rf"(?!{beginning}\.).*", re.DOTALL))  # those alone
        has_one = any(True for _ in source)
    else:
        source, layer = gguf.Model(target.path), target.config.n_layers
        source.leave_out(name for name in source if not name.startswith(f"blk.{layer}."))
        has_one = source.n_nextn > 0
    if not has_one:
        return None
    config = head_config(target.config)
    tensors = tensors_of(config, _of_layer(target, layer, source), source)
    source.check_all_used()
    return Checkpoint(target.path, config, tensors)


def _of_layer(target: Checkpoint, layer: int, source: Tensors) -> dict[str, Place]:
    """Places of the head, whose one layer has that number in the file."""

    def placed(place: Place) -> Place:
        return place._replace(name=place.name.replace("{}", str(layer), 1))

    places, *instead = ({name: placed(place) for name, place in each.items()} for each in target.mtp)
    return chosen(places, instead, source, 1)


def head_config(target: Config) -> Config:
    """The numbers of a head, whose one layer is as the target's with attention are."""
    head = HeadConfig(
        target_dim=target.dim,
        layers=(target.n_layers,),
        n_rows=target.vocab_size,
        own_embedding=False,
        own_classifier=False,
        norm_output=True,
    )
    experts = target.experts and replace(target.experts, dense_layers=())
    return replace(target, architecture="mtp", n_layers=1, shared_classifier=False, layers=(), head=head, experts=experts)
