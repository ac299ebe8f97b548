"""The head that a Qwen3.5 brings along in its own files, to a `Checkpoint`: it predicts more tokens (MTP).

A folder has its tensors under `mtp.`, which transformers leaves out; a GGUF file has them in the layer behind the last one, by
llama.cpp's names.
"""

import re
from dataclasses import replace

from ..architectures import Config, HeadConfig
from . import gguf
from .huggingface import ATTENTION_OF_QWEN35, LLAMA_NAMES, Folder, Names
from .model_file import Checkpoint
from .places import ONE_MORE, Place, tensors_of

LAYER = ("rms_att", "wq", "wk", "wv", "wg", "wo", "q_norm", "k_norm", "rms_ffn", "w1", "w2", "w3")
PLACES = {
    **{
        name: place._replace(name="mtp." + place.name.format(0))
        for name, place in {**LLAMA_NAMES.places, **ATTENTION_OF_QWEN35}.items()
        if name in LAYER
    },
    "fc": Place("mtp.fc.weight"),
    "rms_emb": Place("mtp.pre_fc_norm_embedding.weight", made=ONE_MORE),
    "rms_hidden": Place("mtp.pre_fc_norm_hidden.weight", made=ONE_MORE),
    "rms_final": Place("mtp.norm.weight", made=ONE_MORE),
}
NAMES = Names(re.compile(r"(?!)"), PLACES, re.compile(r"(?!mtp\.).*", re.DOTALL))  # of the folder those alone
OF_NEXTN = {"fc": "eh_proj", "rms_emb": "enorm", "rms_hidden": "hnorm", "rms_final": "shared_head_norm"}


def head_of(target: Checkpoint) -> Checkpoint | None:
    """The head in a target's files; None where there is none. Raises CheckpointError for one that is damaged or not done here."""
    if target.config.architecture != "qwen35":
        return None
    return _of_folder(target) if target.path.is_dir() else _of_gguf(target)


def _of_folder(target: Checkpoint) -> Checkpoint | None:
    folder = Folder(target.path, NAMES)
    if not any(True for _ in folder):
        return None
    config = head_config(target.config)
    tensors = tensors_of(config, PLACES, folder)
    folder.check_all_used()
    return Checkpoint(target.path, config, tensors)


def _of_gguf(target: Checkpoint) -> Checkpoint | None:
    model = gguf.Model(target.path)
    if not gguf.n_nextn(model):
        return None
    block = f"blk.{target.config.n_layers}."
    places = {
        name: place._replace(name=place.name.format(target.config.n_layers))
        for name, place in gguf.QWEN35_PLACES.items()
        if name in LAYER
    }
    places |= {name: Place(f"{block}nextn.{stored}.weight") for name, stored in OF_NEXTN.items()}
    config = head_config(target.config)
    tensors = tensors_of(config, places, model)
    model.leave_out(name for name in model if not name.startswith(block))
    model.check_all_used()
    return Checkpoint(target.path, config, tensors)


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
    return replace(target, architecture="mtp", n_layers=1, shared_classifier=False, delta=None, head=head)
