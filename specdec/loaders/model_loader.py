"""Load a model by name: find its files, read and pack its weights, and compute how long a sequence fits into memory.

Drafting is elsewhere (`specdec.draft`).
"""

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Literal, get_args

from specdec import quant
from specdec.argument_checks import CheckpointError, CheckpointWarning, check_choice, check_int, check_path
from specdec.layers.weights import VOCAB_MATRICES, MatrixPlan, Weights, get_tensor
from specdec.loaders import load_checkpoint
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.model_file import ADAPTER_CONFIG, MERGE_HINT
from specdec.loaders.model_paths import resolve_path
from specdec.model import get_architecture
from specdec.model.model import KVFormatName, Model
from specdec.quant import WeightFormat
from specdec.runtime.memory import get_physical_memory_bytes
from specdec.runtime.parallel_region import get_available_threads

if TYPE_CHECKING:
    from specdec.loaders.packed_weights import PackedWeightsCache

PackMode = Literal["auto", "on", "none"]  # whether bf16 weights are packed into 12 bits: where that is faster, always, never
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
            weight_format: Format for weights that are floats in the file; None: as `pack_mode` says, which may run a benchmark.

        Raises:
            CheckpointError: The weights are damaged or do not fit into memory.
        """
        formats = self.list_weight_formats(checkpoint, weight_format)
        plan_weights = get_architecture(checkpoint.config).plan_weights
        names = (plan_weights(checkpoint.config, checkpoint.tensors, each).format_names for each in formats)
        key = checkpoint.path.resolve(), repr(checkpoint.config), *names
        if key not in self.loaded:
            self.loaded[key] = self._load_or_pack(checkpoint, formats)
        return self.loaded[key]

    def _load_or_pack(self, checkpoint: Checkpoint, formats: Sequence[WeightFormat | None]) -> Weights:
        """Return packed weights as `pack` does, without looking for weights that are loaded already."""
        name, config, tensors = checkpoint.path.name, checkpoint.config, checkpoint.tensors
        architecture = get_architecture(config)

        def report(share: float) -> None:
            self.progress(name, share)

        cache: PackedWeightsCache | None = None
        if self.packed != AUTO or architecture.plan_weights(config, tensors).estimate_bytes(formats[0]) >= MIN_KEPT_BYTES:
            cache = import_module("specdec.loaders.packed_weights").open_packed_weights(self.packed)
        if cache and (stored := cache.load(checkpoint, formats, report)):
            return stored
        is_last_used = len(formats) == 1 or is_packing_faster(checkpoint, self.n_threads or get_available_threads())
        used = formats[-1] if is_last_used else formats[0]
        try:
            if not cache:
                return architecture.pack(config, tensors, used, report)
            with cache.open_writer(checkpoint, formats, used) as writer:
                return architecture.pack(config, tensors, used, report, writer.add)
        except MemoryError as error:
            problem = f"{checkpoint.path} does not fit into memory: {error or 'there is none left for its weights'}"
            raise CheckpointError(f"{problem}; use a smaller model, or a GGUF file of it with fewer bits per weight") from None

    def list_weight_formats(self, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> list[WeightFormat | None]:
        """List the one or two formats that `pack` chooses from for the float weights of a checkpoint; None: as in the file.

        `pack` uses the last one, unless a benchmark on this machine finds it slower than the first.

        Args:
            checkpoint: The model's config and tensors.
            weight_format: The format that the caller wants, the only one in the list; None: `pack_mode` decides.
        """
        if weight_format is not None or self.pack_mode == "none":
            return [weight_format]
        if self.pack_mode == "on":
            return [quant.PACKED_BF16]
        return [None, quant.PACKED_BF16] if is_packing_candidate(checkpoint) else [None]


def find_packable(checkpoint: Checkpoint, without: Collection[str] = ()) -> list[MatrixPlan]:
    """Return the distinct bf16 matrices that can be packed into 12 bits per weight, except those named in `without`."""
    config, tensors, architecture = checkpoint.config, checkpoint.tensors, get_architecture(checkpoint.config)
    if "bf16" not in architecture.plan_weights(config, tensors).format_names:
        return []
    packed = architecture.plan_weights(config, tensors, quant.PACKED_BF16).shards
    found = (shard for name, shards in packed.items() if name not in without for shard in shards)
    return [*dict.fromkeys(shard.plan for shard in found if shard.weight_format is quant.PACKED_BF16)]


def is_packing_candidate(checkpoint: Checkpoint) -> bool:
    """Return whether a model has enough bf16 weights for a trial of packing them into 12 bits."""
    return sum(sum(matrix.rows) * matrix.n for matrix in find_packable(checkpoint)) >= MIN_PACKED_WEIGHTS


def is_packing_faster(checkpoint: Checkpoint, n_threads: int) -> bool:
    """Time the first bf16 matrices of the layers, and return whether 12 bits per weight are faster on n_threads threads."""
    sources = (source for matrix in find_packable(checkpoint, without=VOCAB_MATRICES) for source in matrix.tensors)
    matrices = (get_tensor(checkpoint.tensors, *source) for source in sources)
    return bool(import_module("specdec.quant.bf16_12bit").is_packing_faster(matrices, n_threads))


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
