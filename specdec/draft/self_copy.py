"""What models of floats become while they are loaded: int8, int4 or what they are. Knows no files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.config import Config
from specdec.kernels import MAX_TOKENS
from specdec.loaders.loader import Loader
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant import INT4, INT8, Kind
from specdec.runtime.simd import Float32
from specdec.validation import short

QUANTIZED = {"int8": INT8, "int4": INT4, "none": None}
# A copy of the target is int8 where that has so few bytes that it stays in a cache: int4 is hardly faster there, and accepted
# less. It has to be that much smaller than the target. Of int8 copies 0.96 to 0.99 was accepted, so those need no look.
CACHED_BYTES, WORTH_A_COPY, INT8_ACCEPTED = 32 << 20, 0.75, 0.95
SAMPLE = (
    "The house stood at the end of a narrow road, and nobody had lived in it for years. In the spring of 1912 a doctor "
    "bought it, because it was cheap and because he liked its garden. He had the roof mended first; then he asked a "
    "carpenter how much it would cost to replace the windows and all of the doors."
)


@dataclass(frozen=True)
class Kinds:
    """What the weights of target and draft become where they are floats; None: what they are. is_asked: of a draft by name."""

    target: Kind | None
    draft: Kind | None
    is_asked: bool


def kinds_to_make(quantize: str) -> Kinds:
    """What `SpeculativeDecoder`'s quantize asks for. Raises ValueError."""
    kinds: dict[str, Kind | None] = {"target": None, "draft": None}
    is_asked = False
    models = {"target": ("target",), "draft": ("draft",), "both": ("target", "draft")}
    parts = quantize.split(",") if isinstance(quantize, str) else [""]
    for part in parts if parts != ["none"] else []:
        model, _, name = part.partition("=")
        if model not in models or (name or "int8") not in QUANTIZED or part.endswith("="):
            raise ValueError(
                f"quantize is {short(quantize, repr)}; expected none, or draft, target or both, alone or as in "
                "draft=int4,target=int8"
            )
        kinds |= dict.fromkeys(models[model], QUANTIZED[name or "int8"])
        is_asked = is_asked or (name != "" and model != "target")
    return Kinds(kinds["target"], kinds["draft"], is_asked)


def copy_of(target: Transformer, asked: Kind | None, ids_of: Callable[[str], list[int]], loader: Loader) -> Transformer:
    """A copy of a target that drafts for it, of the kind asked for or, with None, of the one that is to be faster.

    Beyond the caches a pass takes the time of its bytes; how often an int4 copy is right is seen on a sample text. ids_of: its
    tokens; loader: tells what is made. Raises ValueError where a copy is hardly less than the target.
    """
    weights = target.weights
    shares = {kind: weights.n_bytes_as(kind) / weights.n_bytes for kind in ([asked] if asked else [INT8, INT4])}
    kinds = [kind for kind, share in shares.items() if share <= WORTH_A_COPY]
    if not kinds:
        raise ValueError(
            f"the target is {weights.kind} already, from its file or by quantize=..., so an {next(iter(shares)).name} copy of "
            "it is no faster draft; leave it as it is or name another draft"
        )

    def made(kind: Kind) -> Transformer:
        new = weights.converted(kind, lambda share: loader.progress(f"a copy in {kind.name}", share))
        return Transformer(target.config, new, loader.n_threads, target.n_positions, loader.kv)

    if len(kinds) == 1 or weights.n_bytes_as(INT8) <= CACHED_BYTES:
        return made(kinds[0])
    copy, sample = made(INT4), ids_of(SAMPLE)[: min(MAX_TOKENS, target.n_positions)]
    accepted = overlap(target, copy, sample) if sample else 0.0  # of a vocabulary that has no word for it
    if speed_up(accepted, shares[INT4]) > speed_up(INT8_ACCEPTED, shares[INT8]):
        return copy
    del copy  # before another one takes memory
    return made(INT8)


def is_worth_a_copy(config: Config, tensors: Mapping[str, Any]) -> bool:
    """Return whether `copy_of` makes a draft of a model in a file, without reading its weights."""
    architecture = architecture_of(config)
    most = WORTH_A_COPY * architecture.n_bytes_as(config, tensors)
    return any(architecture.n_bytes_as(config, tensors, kind) <= most for kind in (INT8, INT4))


def overlap(target: Transformer, draft: Transformer, tokens: list[int]) -> float:
    """sum min(p, q), the mean over a text: the share of the draft's tokens that are accepted (Leviathan et al. 2023)."""
    p, q = (_softmax(model.forward(tokens, len(tokens))) for model in (target, draft))
    return float(np.minimum(p, q).sum(1).mean())


def speed_up(accepted: float, cost: float) -> float:
    """Over the target alone, at the best length of proposals; cost: of a draft's pass, in the target's (as above)."""
    lengths = range(1, MAX_TOKENS)
    return max(sum(accepted**i for i in range(gamma + 1)) / (1 + gamma * cost) for gamma in lengths)


def _softmax(logits: Float32) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of a model whose logits are not finite, which is told when it writes
        powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
        return np.asarray(powers / powers.sum(1, keepdims=True))
