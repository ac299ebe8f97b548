"""Load a model by name: find its files, read and pack its weights, and compute how long a sequence fits into memory.

Drafting is elsewhere (`specdec.draft`).
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Literal, get_args

from specdec import quant
from specdec.argument_checks import CheckpointError, CheckpointWarning, check_choice, check_int, check_path
from specdec.layers.weights import Weights
from specdec.loaders import load_checkpoint
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.model_file import ADAPTER_CONFIG, MERGE_HINT
from specdec.loaders.model_paths import resolve_path
from specdec.model import get_architecture
from specdec.model.model import KVFormatName, Model
from specdec.quant import WeightFormat
from specdec.runtime.memory import get_physical_memory_bytes
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.tile_simd import HAS_BYTE_LOOKUP

if TYPE_CHECKING:
    from specdec.loaders.packed_weights import PackedWeightsCache

PackMode = Literal["auto", "on", "none"]  # whether bf16 weights are packed into 12 bits: in large models, always, never
ProgressCallback = Callable[[str, float], None]  # called with the name of a model and the loaded share of it, 0 to 1
AUTO = "auto"
MIN_KEPT_BYTES = 100_000_000  # a smaller model is packed in about 0.2 s
MIN_PACKED_WEIGHTS = 16 << 20  # a smaller model may stay in a cache, where packing into 12 bits gains nothing
TARGET_MEMORY_SHARE = 0.75  # of the memory headroom, for the target's KV cache; the draft uses the rest


def ignore_progress(name: str, share: float) -> None:
    """Do nothing with the loading progress of a model; the default `ProgressCallback`."""


@dataclass(frozen=True)
class Loader:
    """Settings for building models from checkpoints: threads, KV cache format, weight packing and a progress callback.

    Raises ValueError or TypeError if a setting is not valid.

    Attributes:
        n_threads: Threads of a forward pass, as in `Model`.
        kv: Number format of the KV cache, as in `Model`.
        progress: Callback for the loading progress, see `ProgressCallback`.
        pack_mode: Whether bf16 weights are packed into 12 bits, see `PackMode`.
        packed: Whether packed weights are kept on disk: "auto" those of MIN_KEPT_BYTES or more, "on", "off", or the folder.
        loaded: The weights that `pack` has returned, by path and weight formats, so that a target that drafts for itself is
            loaded once.
    """

    n_threads: int | None = None
    kv: KVFormatName = "auto"
    progress: ProgressCallback = ignore_progress
    pack_mode: PackMode = "auto"
    packed: str | os.PathLike[str] = AUTO
    loaded: dict[tuple[object, ...], Weights] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Check the settings; raise TypeError or ValueError if one is not valid."""
        check_choice("kv", self.kv, get_args(KVFormatName))
        check_choice("pack", self.pack_mode, get_args(PackMode))
        check_path("packed", self.packed)
        if self.n_threads is not None:
            check_int("n_threads", self.n_threads, 1, get_available_threads())

    def load(self, checkpoint: Checkpoint, weight_format: WeightFormat | None, n_positions: int | None = None) -> Model:
        """Read and pack the weights of a checkpoint and return a `Model` that is ready to run.

        Args:
            checkpoint: The model's config and tensors.
            weight_format: Format for weights that are floats in the file, as in `pack`.
            n_positions: Capacity of the KV cache in tokens, as in `Model`.

        Raises:
            CheckpointError: The weights are damaged or do not fit into memory.
        """
        return Model(checkpoint.config, self.pack(checkpoint, weight_format), self.n_threads, n_positions, self.kv)

    def pack(self, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> Weights:
        """Return the weights of a checkpoint packed for the kernels: mapped from the cache, or read and packed, with progress.

        Args:
            checkpoint: The model's config and tensors.
            weight_format: Format for weights that are floats in the file; None: as `pack_mode` says.

        Raises:
            CheckpointError: The weights are damaged or do not fit into memory.
        """
        used = self.choose_weight_format(checkpoint, weight_format)
        plan = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors, used)
        key = checkpoint.path.resolve(), repr(checkpoint.config), plan.format_names
        if key not in self.loaded:
            self.loaded[key] = self._load_or_pack(checkpoint, used)
        return self.loaded[key]

    def _load_or_pack(self, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> Weights:
        """Return packed weights as `pack` does, without looking for weights that are loaded already."""
        name, config, tensors = checkpoint.path.name, checkpoint.config, checkpoint.tensors
        plan = get_architecture(config).plan_weights(config, tensors, weight_format)

        def report(share: float) -> None:
            self.progress(name, share)

        cache: PackedWeightsCache | None = None
        if self.packed != AUTO or plan.estimate_bytes() >= MIN_KEPT_BYTES:
            cache = import_module("specdec.loaders.packed_weights").open_packed_weights(self.packed)
        if cache and (stored := cache.load(checkpoint, weight_format, report)):
            return stored
        try:
            if not cache:
                return plan.pack(report)
            with cache.open_writer(checkpoint, weight_format) as writer:
                return plan.pack(report, writer.add)
        except MemoryError as error:
            problem = f"{checkpoint.path} does not fit into memory: {error or 'there is none left for its weights'}"
            raise CheckpointError(f"{problem}; use a smaller model, or a GGUF file of it with fewer bits per weight") from None

    def choose_weight_format(self, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> WeightFormat | None:
        """Return the format for the float weights of a checkpoint; None: as in the file.

        Args:
            checkpoint: The model's config and tensors.
            weight_format: The format that the caller wants; None: `pack_mode` decides.
        """
        if weight_format is not None or self.pack_mode == "none":
            return weight_format
        if self.pack_mode == "on" or (HAS_BYTE_LOOKUP and count_packable_weights(checkpoint) >= MIN_PACKED_WEIGHTS):
            return quant.PACKED_BF16
        return None


def count_packable_weights(checkpoint: Checkpoint) -> int:
    """Return the number of bf16 weights that can be packed into 12 bits."""
    config, tensors, architecture = checkpoint.config, checkpoint.tensors, get_architecture(checkpoint.config)
    if "bf16" not in architecture.plan_weights(config, tensors).format_names:
        return 0
    shards = architecture.plan_weights(config, tensors, quant.PACKED_BF16).shards.values()
    plans = {shard.plan for own in shards for shard in own if shard.weight_format is quant.PACKED_BF16}
    return sum(sum(plan.rows) * plan.n for plan in plans)


def load_model(
    path: str | os.PathLike[str],
    int8: bool = False,
    n_threads: int | None = None,
    n_positions: int | None = None,
    kv: KVFormatName = "auto",
    pack: PackMode = "auto",
) -> Model:
    """Load a model by its path or name, with its weights, and return a `Model`; a missing model is downloaded.

    Args:
        path: A path, a bundled or published model, an alias, or a repository on the hub.
        int8: Whether float weights are quantized to int8.
        n_threads: Threads of a forward pass, as in `Model`.
        n_positions: Capacity of the KV cache in tokens, as in `Model`.
        kv: Number format of the KV cache, as in `Model`.
        pack: Whether bf16 weights are packed into 12 bits, see `PackMode`.

    Raises:
        CheckpointError: There is no such model, or it cannot be loaded.
    """
    return Loader(n_threads, kv, pack_mode=pack).load(open_checkpoint("path", path), quant.INT8 if int8 else None, n_positions)


def open_checkpoint(parameter: str, name: str | os.PathLike[str]) -> Checkpoint:
    """Open a model by its path or name as a `Checkpoint`, without reading its weights; a missing model is downloaded.

    Warns with CheckpointWarning if an adapter lies next to the weights. No file says whether the weights include the adapter:
    some tools leave it there after merging.

    Args:
        parameter: The caller's parameter, such as "target", for errors. Only "draft" accepts a draft head.
        name: The path or name.

    Raises:
        CheckpointError: There is no such model, it is damaged, or it is a draft head for another parameter.
    """
    checkpoint = load_checkpoint(resolve_path(check_path(parameter, name)))
    if checkpoint.config.head and parameter != "draft":
        raise CheckpointError(f"{checkpoint.path} is a head that drafts for a model; name it with draft=...")
    if (checkpoint.path / ADAPTER_CONFIG).exists():
        warnings.warn(
            f"{checkpoint.path} holds an adapter ({ADAPTER_CONFIG}), which is not applied: the model's weights run as they are; "
            f"if they do not hold it yet, {MERGE_HINT}",
            CheckpointWarning,
            stacklevel=2,
        )
    return checkpoint


def get_memory_headroom(target: Model) -> float:
    """Return how many bytes of this machine's physical memory remain after a target's weights."""
    return get_physical_memory_bytes() - target.weights.n_bytes


def compute_max_positions(target: Model) -> int:
    """Return the length in tokens of the longest sequence that a target can run on this machine.

    The limit is the target's context, or what its KV cache can hold in TARGET_MEMORY_SHARE of the memory headroom.
    """
    return target.find_max_positions(TARGET_MEMORY_SHARE * get_memory_headroom(target), target.n_positions)


def check_memory(target: Model, n_tokens: int) -> None:
    """Raise ValueError if a target's KV cache for a sequence of n_tokens does not fit into this machine's memory.

    Tokens beyond the target's context are not counted.
    """
    n = min(n_tokens, target.n_positions)
    if n > (max_positions := compute_max_positions(target)):
        raise ValueError(
            f"a sequence of {n} tokens needs {target.get_sequence_bytes(n) / 2**30:.1f} GiB in addition to the weights; "
            f"this machine's memory has room for {max_positions} tokens (max_tokens=...)"
        )
