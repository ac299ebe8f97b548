"""The user's settings: those of speculative decoding, which can be changed between two sequences, and the weight formats."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from specdec import quant
from specdec.argument_checks import check_choice, check_int, shorten
from specdec.draft.draft_length import MAX_GAMMA
from specdec.loaders.checkpoint import Checkpoint
from specdec.model import get_architecture
from specdec.quant import WeightFormat
from specdec.verification import VERIFIERS, VerifyMode

AUTO: Literal["auto"] = "auto"
Gamma = int | Literal["auto"]
# auto: for looked-up drafts where they are profitable; no pair of models was faster by trees
TreeMode = Literal["auto", "on", "off"]
FIXED_GAMMA = 4  # draft tokens per round if measured times must not influence the draft length

# A draft is int8 if that fits into a cache of this size: int4 is hardly faster there, and accepted less often.
MAX_CACHED_BYTES = 32 << 20
# A draft that would be larger in int4 is int3. Smaller ones may stay in a cache, and fewer bits cost them more acceptance.
MAX_INT4_BYTES = 128 << 20
MAX_DRAFT_SHARE = 0.85  # bytes of a quantized draft, relative to its file
QUANTIZE_FORMATS = {"int8": "INT8", "int4": "INT4", "int3": "INT3", "none": ""}  # names in `quant`


@dataclass(frozen=True)
class SpeculativeSettings:
    """The settings `gamma`, `verify` and `tree` of a `SpeculativeDecoder`, checked when an instance is made.

    Raises:
        ValueError: If a value is not valid, or `tree` is "on" and `verify` is "block".
        TypeError: If a value has the wrong type.
    """

    gamma: Gamma = AUTO
    verify: VerifyMode = "coupled"
    tree: TreeMode = "auto"

    def __post_init__(self) -> None:
        """Check the settings, and convert `gamma` to an int."""
        if not isinstance(self.gamma, str) or self.gamma != AUTO:
            try:
                object.__setattr__(self, "gamma", check_int("gamma", self.gamma, 1, MAX_GAMMA))
            except (TypeError, ValueError) as error:
                raise type(error)(f"gamma is {shorten(self.gamma, repr)}; expected {AUTO} or 1 to {MAX_GAMMA}") from None
        check_choice("verify", self.verify, cast(Collection[VerifyMode], VERIFIERS))
        check_choice("tree", self.tree, get_args(TreeMode))
        if self.tree == "on" and self.verify == "block":
            raise ValueError("tree is 'on', and verify is 'block', which supports only chains; leave one of them out")

    @property
    def is_adaptive(self) -> bool:
        """Whether measured times may decide the draft length: not with "rejection" and "block", where it changes the output."""
        return self.gamma == AUTO and self.verify == "coupled"

    @property
    def fixed_gamma(self) -> int:
        """The number of draft tokens per round if measured times do not decide it: gamma, or FIXED_GAMMA if gamma is "auto"."""
        return FIXED_GAMMA if self.gamma == AUTO else self.gamma


def settings_property(name: str) -> Any:
    """Return a property that gets a field of an object's `_settings`, and replaces it with a checked value when it is set."""

    def set_field(owner: Any, value: object) -> None:
        owner._settings = replace(owner._settings, **{name: value})

    return property(lambda owner: getattr(owner._settings, name), set_field)


@dataclass(frozen=True)
class QuantizeOptions:
    """The weight formats to which the weights of the target and the draft are quantized on loading; None keeps them.

    Attributes:
        target: The format of the target.
        draft: The format of the draft.
        is_draft_auto: Whether the draft's size decides its format; `draft` is None then.
    """

    target: WeightFormat | None
    draft: WeightFormat | None
    is_draft_auto: bool

    def choose_draft_format(self, checkpoint: Checkpoint) -> WeightFormat | None:
        """Return the format of a draft that is not a copy of its target; None keeps that of its file.

        It is int8 if that fits into the caches of many CPUs, int3 if it is so large that it would be read from memory even in
        int4, else int4, and neither if that saves too few bytes. A token of Qwen2.5-Coder 0.5B takes 0.25 of a pass of its 1.5B
        target in int4, 0.36 as in its file (Q4_K_M). With int3 instead of int4, the pair is 1.04 times as fast with AVX-512 VNNI
        (code 1.18), as fast with AVX2, and takes 59 MB less.
        """
        if not self.is_draft_auto:
            return quant.DRAFT_INT4 if self.draft is quant.INT4 else self.draft
        estimate = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors).estimate_bytes
        found: WeightFormat
        if estimate(quant.INT8) <= MAX_CACHED_BYTES:
            found = quant.INT8
        elif estimate(quant.DRAFT_INT4) <= MAX_INT4_BYTES or checkpoint.config.head:
            found = quant.DRAFT_INT4
        else:
            found = quant.INT3
        return found if estimate(found) <= MAX_DRAFT_SHARE * estimate() else None


def parse_quantize(quantize: str) -> QuantizeOptions:
    """Parse a `quantize` argument such as "draft=int4,target=int8" into the weight formats of the target and the draft.

    Args:
        quantize: "none", or parts separated by commas: "target" (int8), "draft" (by its size) or "both", alone or with "=int8",
            "=int4", "=int3" or "=none".

    Raises:
        ValueError: If the argument has another form.
    """
    formats = {"target": "none", "draft": "none"}
    models = {"target": ("target",), "draft": ("draft",), "both": ("target", "draft")}
    parts = quantize.split(",") if isinstance(quantize, str) else [""]
    for part in parts if parts != ["none"] else []:
        model, _, name = part.partition("=")
        if model not in models or (name or "int8") not in QUANTIZE_FORMATS or part.endswith("="):
            raise ValueError(
                f"quantize is {shorten(quantize, repr)}; expected none, or draft, target or both, alone or as in "
                "draft=int4,target=int8"
            )
        formats |= {each: name or ("int8" if each == "target" else AUTO) for each in models[model]}
    target, draft = (getattr(quant, QUANTIZE_FORMATS.get(name, ""), None) for name in formats.values())
    return QuantizeOptions(target, draft, formats["draft"] == AUTO)
