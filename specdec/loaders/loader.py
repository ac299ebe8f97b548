"""A name becomes a model: found, read and packed; and how long its texts may get in this machine's memory. Knows no drafts."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from specdec.families.config_values import CheckpointError, CheckpointWarning
from specdec.layers.base import Weights
from specdec.loaders import load_checkpoint
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.hf_config import ADAPTER_CONFIG, MERGE
from specdec.loaders.model_lookup import find
from specdec.model.registry import architecture_of
from specdec.model.transformer import KV, Transformer
from specdec.quant import INT8, PACKED_BF16, Kind
from specdec.runtime.memory import physical_memory_bytes
from specdec.runtime.threads import available_threads
from specdec.validation import file_name, one_of, whole

Pack = Literal["auto", "on", "none"]  # whether bf16 weights become 12 bits: where that is faster, always, never
Progress = Callable[[str, float], None]  # is told the name of a model and the share of it that is loaded
TARGET_SHARE = 0.75  # of the memory beside its weights, that the target's text may take; what drafts gets along with the rest


def tell_nobody(name: str, share: float) -> None:
    """Of a `Progress` that nobody watches."""


@dataclass(frozen=True)
class Loader:
    """How checkpoints become models: n_threads and kv as `Transformer` says, who is told of the progress, and `Pack`."""

    n_threads: int | None = None
    kv: KV = "auto"
    progress: Progress = tell_nobody
    packing: Pack = "auto"

    def __post_init__(self) -> None:
        one_of("kv", self.kv, get_args(KV))
        one_of("pack", self.packing, get_args(Pack))
        if self.n_threads is not None:
            whole("n_threads", self.n_threads, 1, available_threads())

    def load(self, checkpoint: Checkpoint, kind: Kind | None, n_positions: int | None = None) -> Transformer:
        """The model in a checkpoint; kind as in `pack`. Raises CheckpointError."""
        return Transformer(checkpoint.config, self.pack(checkpoint, kind), self.n_threads, n_positions, self.kv)

    def pack(self, checkpoint: Checkpoint, kind: Kind | None) -> Weights:
        """The weights in a checkpoint; kind: what they become where they are floats. Raises CheckpointError."""
        name, config, tensors = checkpoint.path.name, checkpoint.config, checkpoint.tensors
        architecture, kinds = architecture_of(config), self.likely_kinds(checkpoint, kind)
        if len(kinds) > 1 and not architecture.packing_pays(config, tensors, self.n_threads or available_threads()):
            kinds.pop()
        try:
            return architecture.pack(config, tensors, kinds[-1], lambda share: self.progress(name, share))
        except MemoryError as error:
            told = f"{checkpoint.path} does not fit into memory: {error or 'there is none left for its weights'}"
            raise CheckpointError(f"{told}; use a smaller model, or a GGUF file of it in fewer bits") from None

    def likely_kinds(self, checkpoint: Checkpoint, kind: Kind | None) -> list[Kind | None]:
        """What `pack` may make of a checkpoint's floats: the last one unless a trial is against it."""
        if kind is not None or self.packing == "none":
            return [kind]
        if self.packing == "on":
            return [PACKED_BF16]
        architecture = architecture_of(checkpoint.config)
        return [None, PACKED_BF16] if architecture.packing_may_pay(checkpoint.config, checkpoint.tensors) else [None]


def load_model(
    path: str | os.PathLike[str],
    int8: bool = False,
    n_threads: int | None = None,
    n_positions: int | None = None,
    kv: KV = "auto",
    pack: Pack = "auto",
) -> Transformer:
    """The model of a path or a name; int8: whether its weights become int8 where they are floats; pack: see `Pack`; all else as
    `Transformer` says.

    Raises CheckpointError.
    """
    return Loader(n_threads, kv, packing=pack).load(opened("path", path), INT8 if int8 else None, n_positions)


def opened(parameter: str, name: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint of that path or name. Raises CheckpointError for a head that is named as what no head can be.

    Warns of an adapter next to a model's weights. Nothing says whether they hold it already: some tools leave it there when they
    have merged it.
    """
    checkpoint = load_checkpoint(find(file_name(parameter, name)))
    if checkpoint.config.head and parameter != "draft":
        raise CheckpointError(f"{checkpoint.path} is a head that drafts for a model; name it with draft=...")
    if (checkpoint.path / ADAPTER_CONFIG).exists():
        warnings.warn(
            f"{checkpoint.path} holds an adapter ({ADAPTER_CONFIG}), which is not applied: the model's weights run as they are; "
            f"if they do not hold it yet, {MERGE}",
            CheckpointWarning,
            stacklevel=2,
        )
    return checkpoint


def room_beside(target: Transformer) -> float:
    """Bytes of memory beside a target's weights."""
    return physical_memory_bytes() - target.weights.n_bytes


def longest_text(target: Transformer) -> int:
    """How many positions a text may have: the target's context, or as many as its share of the machine's memory holds."""
    return target.positions_within(TARGET_SHARE * room_beside(target), target.n_positions)


def check_memory(target: Transformer, n_tokens: int) -> None:
    """Raises ValueError for a text that the memory cannot hold."""
    n = min(n_tokens, target.n_positions)
    if n > (most := longest_text(target)):
        raise ValueError(
            f"a text of {n} tokens needs {target.text_bytes(n) / 2**30:.1f} GiB beside the weights; this machine's memory has "
            f"room for {most} tokens (max_tokens=...)"
        )
