"""The folder of a Gemma 4 assistant, the model's own draft, to a `Checkpoint`; and where it lies beside a model.

Names and keys are those that transformers 5.23 saves (`models/gemma4_assistant`).
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..architectures import ASSISTANT, Config
from ..architectures.assistant import assistant_of
from ..families import folders, gemma4, gemma4_assistant
from ..families.folders import HEAD, NEUTRAL
from ..families.places import Place
from ..families.values import CheckpointError, Values
from ..machine.vectors import Int64
from .config_json import CONFIG, TEXT, check_neutral
from .heads import checked_ids
from .huggingface import Folder
from .json_text import read_object
from .model_file import Checkpoint, telling_os_errors
from .places import are_equal, tensors_of

INSIDE, BESIDE = "assistant", "{}-assistant"  # what a folder is called that lies in a model's, or beside it


@dataclass(frozen=True)
class Ordered:
    """A matrix whose rows are those of a stored one in another order."""

    stored: Any
    order: Int64

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.dtype  # type: ignore[no-any-return]

    @functools.cached_property
    def _rows(self) -> npt.NDArray[Any]:
        return self.stored[:]  # type: ignore[no-any-return]

    def __getitem__(self, index: slice) -> npt.NDArray[Any]:
        return self._rows[self.order[index]]


def is_assistant(folder: Path) -> bool:
    """Whether a folder's config.json is that of an assistant. Raises CheckpointError for one that is damaged."""
    with telling_os_errors(folder):
        if not (folder / CONFIG).exists():
            return False
    return read_object(folder / CONFIG).get("model_type") == ASSISTANT


def beside(model: Path) -> Checkpoint | None:
    """The assistant in a model's folder, or in one beside that; None where there is none. Raises CheckpointError."""
    whole = model.absolute()
    for folder in (whole / INSIDE, whole.with_name(BESIDE.format(whole.name))):
        if model.is_dir() and is_assistant(folder):
            return load_checkpoint(folder)
    return None


def config_of(path: Path) -> Config:
    """The numbers of an assistant's folder. Raises CheckpointError for what are none, and for arithmetic that is not done."""
    given = read_object(path / CONFIG)
    own = Values(path / CONFIG, given, gemma4_assistant.DEFAULTS)
    of_text = given.get(TEXT)
    if not isinstance(of_text, dict):
        raise own.refusal(TEXT, "an object, the config of its layers")
    text = Values(path / CONFIG, of_text, gemma4.DEFAULTS | gemma4_assistant.INPUTS)
    for values in (own, text):
        check_neutral(values, {key: neutral for key, neutral in NEUTRAL.items() if key not in gemma4.DOES})
    config = gemma4_assistant.config(own, text)
    if flaw := config.flaw():
        raise CheckpointError(f"{path / CONFIG} describes no assistant: {flaw}")
    return config


def load_checkpoint(path: Path) -> Checkpoint:
    """Open an assistant's folder, after checking all that its headers can tell.

    Raises CheckpointError for anything but a complete and consistent one; numbers are checked when they are read.
    """
    config = config_of(path)
    folder = Folder(path, folders.PREFIX, folders.HARMLESS)
    places = dict(gemma4_assistant.PLACES)
    if HEAD in folder:
        table = (config.vocab_size, config.dim)
        if places["tok_emb"].name not in folder:
            places["tok_emb"] = Place(HEAD)
        elif not are_equal(*(folder.tensor(name, table) for name in (places["tok_emb"].name, HEAD))):
            raise CheckpointError(f"{folder.told(HEAD)} is not the embedding, as which {CONFIG} says that it is saved")
        folder.leave_out(HEAD)
    tensors, ids = tensors_of(config, places, folder), None
    if assistant_of(config).n_centroids:
        order = folder.integers(gemma4_assistant.ORDER, config.vocab_size)
        ids = checked_ids(order, config.vocab_size, folder.told(gemma4_assistant.ORDER))
        tensors["tok_emb"] = Ordered(tensors["tok_emb"], ids)
    for name in gemma4.unused(config):
        folder.leave_out(name)
    folder.check_all_used()
    return Checkpoint(path, config, tensors, target_ids=ids, family=ASSISTANT)
