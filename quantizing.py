"""What models of floats become while they are loaded: int8, int4 or what they are. Knows no files."""

from .architectures import Weights
from .checks import short
from .weights import INT4, INT8, Kind

QUANTIZED = {"int8": INT8, "int4": INT4, "none": None}
# A copy of the target is int8 where that has so few bytes that it stays in a cache, where int4 is hardly faster and accepted
# less; beyond, memory is the limit. It has to be that much smaller than the target.
CACHED_BYTES, WORTH_A_COPY = 32 << 20, 0.75


def kinds_to_make(quantize: str) -> dict[str, Kind | None]:
    """What the weights of target and draft become where they are floats; None: what they are. Raises ValueError."""
    kinds: dict[str, Kind | None] = {"target": None, "draft": None}
    models = {"target": ("target",), "draft": ("draft",), "both": ("target", "draft")}
    if not isinstance(quantize, str) or quantize != "none":
        for part in quantize.split(",") if isinstance(quantize, str) else [""]:
            model, _, name = part.partition("=")
            if model not in models or (name or "int8") not in QUANTIZED or part.endswith("="):
                raise ValueError(
                    f"quantize is {short(quantize, repr)}; expected none, or draft, target or both, alone or as in "
                    "draft=int4,target=int8"
                )
            kinds |= dict.fromkeys(models[model], QUANTIZED[name or "int8"])
    return kinds


def kind_of_copy(weights: Weights, asked: Kind | None) -> Kind:
    """What a copy of a target that drafts for it is made of. Raises ValueError where that is hardly less than the target."""
    kinds = [asked] if asked else [INT8, INT4]
    if weights.n_bytes_as(INT8) > CACHED_BYTES:
        kinds.reverse()
    for kind in kinds:
        if weights.n_bytes_as(kind) <= WORTH_A_COPY * weights.n_bytes:
            return kind
    raise ValueError(
        f"the target is {weights.kind} already, from its file or by --quantize, so an {kinds[0].name} copy of it is no faster "
        "draft; leave it as it is or name another draft"
    )
