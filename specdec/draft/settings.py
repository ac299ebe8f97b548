"""The user's settings of speculative decoding, which can be changed between two sequences."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from specdec.argument_checks import check_choice, check_int, shorten
from specdec.draft.draft_length import MAX_GAMMA
from specdec.verification import VERIFIERS, VerifyMode

AUTO: Literal["auto"] = "auto"
Gamma = int | Literal["auto"]
TreeMode = Literal["auto", "on", "off"]  # auto: off, since no pair was faster by trees
FIXED_GAMMA = 4  # draft tokens per round if measured times must not influence the draft length


@dataclass(frozen=True)
class SpeculativeSettings:
    """The settings `gamma`, `verify` and `tree` of a `SpeculativeDecoder`, checked when an instance is made.

    Raises:
        ValueError: If a value is not valid, or `tree` is "on" and `verify` is "block".
        TypeError: If a value has the wrong type.
    """

    gamma: Gamma = AUTO
    verify: VerifyMode = "coupled"
    tree: TreeMode = "off"

    def __post_init__(self) -> None:
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
