"""The user's settings: those of speculative decoding, which can be changed between two sequences, and the weight formats."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from specdec import quant
from specdec.argument_checks import check_choice, check_int, shorten
from specdec.draft.draft_length import MAX_GAMMA
from specdec.quant import WeightFormat
from specdec.verification import VERIFIERS, VerifyMode

AUTO: Literal["auto"] = "auto"
Gamma = int | Literal["auto"]
# auto: for looked-up drafts where they are profitable; no pair of models was faster by trees
TreeMode = Literal["auto", "on", "off"]
FIXED_GAMMA = 4  # draft tokens per round if measured times must not influence the draft length

QUANTIZE_FORMATS = {"int8": "INT8", "int4": "INT4", "none": ""}  # names in `quant`


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
    """The weight formats to which float weights of the target and the draft are quantized on loading; None keeps them.

    Attributes:
        target: The format of the target.
        draft: The format of the draft.
        is_draft_requested: Whether the draft's format was given by name.
    """

    target: WeightFormat | None
    draft: WeightFormat | None
    is_draft_requested: bool


def parse_quantize(quantize: str) -> QuantizeOptions:
    """Parse a `quantize` argument such as "draft=int4,target=int8" into the weight formats of the target and the draft.

    Args:
        quantize: "none", or parts separated by commas: "target", "draft" or "both", alone (int8) or with "=int8", "=int4" or
            "=none".

    Raises:
        ValueError: If the argument has another form.
    """
    formats: dict[str, WeightFormat | None] = {"target": None, "draft": None}
    is_requested = False
    models = {"target": ("target",), "draft": ("draft",), "both": ("target", "draft")}
    parts = quantize.split(",") if isinstance(quantize, str) else [""]
    for part in parts if parts != ["none"] else []:
        model, _, name = part.partition("=")
        if model not in models or (name or "int8") not in QUANTIZE_FORMATS or part.endswith("="):
            raise ValueError(
                f"quantize is {shorten(quantize, repr)}; expected none, or draft, target or both, alone or as in "
                "draft=int4,target=int8"
            )
        formats |= dict.fromkeys(models[model], getattr(quant, QUANTIZE_FORMATS[name or "int8"], None))
        is_requested = is_requested or (name != "" and model != "target")
    return QuantizeOptions(formats["target"], formats["draft"], is_requested)
