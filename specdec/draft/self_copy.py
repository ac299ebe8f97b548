"""Self-drafts, which are quantized copies of the target: SmolLM2-135M in bf16 is 1.67 to 2.18 times as fast at temperature 0."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from specdec import quant
from specdec.draft.settings import MAX_CACHED_BYTES
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.weights import Tensors
from specdec.loaders.model_loader import Loader
from specdec.model import get_architecture
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import WeightFormat
from specdec.runtime.simd import Float32

# The size of a self-draft may be at most MAX_COPY_RATIO of the target's. Of int8 copies 0.96 to 0.99 was accepted, so that is
# not estimated.
MAX_COPY_RATIO, INT8_ACCEPTANCE = 0.75, 0.95
SAMPLE_TEXT = (
    "The house stood at the end of a narrow road, and nobody had lived in it for years. In the spring of 1912 a doctor "
    "bought it, because it was cheap and because he liked its garden. He had the roof mended first; then he asked a "
    "carpenter how much it would cost to replace the windows and all of the doors."
)


def make_self_draft(target: Model, requested: WeightFormat | None, encode: Callable[[str], list[int]], loader: Loader) -> Model:
    """Return a new model, a quantized copy of a target, to use as its draft.

    A pass over weights that exceed the caches takes a time proportional to their bytes. The acceptance of an int4 copy is
    estimated on a sample text.

    Args:
        target: The target.
        requested: The weight format, or None to choose int8 or int4, the one that is expected to be faster.
        encode: Function that tokenizes a string; used on the sample text.
        loader: Provides n_threads, the KV cache format and the progress callback.

    Raises:
        ValueError: If a copy is hardly smaller than the target.
    """
    weights = target.weights
    ratios = {
        each: weights.estimate_bytes(each) / weights.n_bytes for each in ([requested] if requested else [quant.INT8, quant.INT4])
    }
    formats = [each for each, ratio in ratios.items() if ratio <= MAX_COPY_RATIO]
    if not formats:
        raise ValueError(
            f"the target is {weights.format_names} already, from its file or by quantize=..., so an "
            f"{next(iter(ratios)).name} copy is not a faster draft; leave it as it is or name another draft"
        )

    def make(weight_format: WeightFormat) -> Model:
        new = weights.convert(weight_format, lambda fraction: loader.progress(f"a copy in {weight_format.name}", fraction))
        return Model(target.config, new, loader.n_threads, target.n_positions, loader.kv)

    if len(formats) == 1 or weights.estimate_bytes(quant.INT8) <= MAX_CACHED_BYTES:
        return make(formats[0])
    copy, sample = make(quant.INT4), encode(SAMPLE_TEXT)[: min(MAX_BATCH_TOKENS, target.n_positions)]
    accepted = estimate_acceptance(target, copy, sample) if sample else 0.0  # a vocabulary may lack the sample's characters
    if estimate_speed_up(accepted, ratios[quant.INT4]) > estimate_speed_up(INT8_ACCEPTANCE, ratios[quant.INT8]):
        return copy
    del copy  # free its memory before another one is made
    return make(quant.INT8)


def can_self_draft(config: ModelConfig, tensors: Tensors, requested: WeightFormat | None = None) -> bool:
    """Return whether a copy of a model would be small enough to be its draft, without reading weights.

    Args:
        config: The model's config.
        tensors: The tensors in its file.
        requested: The copy's format, or None for int8 or int4.
    """
    plan = get_architecture(config).plan_weights(config, tensors)
    most = MAX_COPY_RATIO * plan.estimate_bytes()
    formats = [requested] if requested else [quant.INT8, quant.INT4]
    return any(plan.estimate_bytes(each) <= most for each in formats)


def estimate_acceptance(target: Model, draft: Model, tokens: list[int]) -> float:
    """Run both models on a sample text, and return the expected acceptance rate of the draft, from 0 to 1.

    It is the mean of sum min(p, q) over the sample's tokens (Leviathan et al. 2023).
    """
    p, q = (_softmax(model.new_cache().forward(tokens, len(tokens))) for model in (target, draft))
    return float(np.minimum(p, q).sum(1).mean())


def estimate_speed_up(accepted: float, cost: float) -> float:
    """Return the expected ratio of decoding speeds with and without a draft, at the best draft length (Leviathan et al. 2023).

    Args:
        accepted: The acceptance rate, from 0 to 1.
        cost: Time of the draft's forward pass, divided by that of the target's.
    """
    lengths = range(1, MAX_BATCH_TOKENS)
    return max(sum(accepted**i for i in range(gamma + 1)) / (1 + gamma * cost) for gamma in lengths)


def _softmax(logits: Float32) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # logits that are not finite are reported when the model generates
        powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
        return np.asarray(powers / powers.sum(1, keepdims=True))
