"""What a user sets of drafting, and may set anew between two texts. Knows no models."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from specdec.draft.policy import MAX_GAMMA
from specdec.validation import one_of, short, whole
from specdec.verification import VERIFIERS, VerifyMode

AUTO: Literal["auto"] = "auto"
Gamma = int | Literal["auto"]
TreeMode = Literal["auto", "on", "off"]  # auto: off, since no pair was faster by trees
FIXED_GAMMA = 4  # where the clock must not decide


@dataclass(frozen=True)
class Settings:
    """gamma, verify and tree, as `SpeculativeDecoder` says. Raises ValueError and TypeError."""

    gamma: Gamma = AUTO
    verify: VerifyMode = "coupled"
    tree: TreeMode = "off"

    def __post_init__(self) -> None:
        if not isinstance(self.gamma, str) or self.gamma != AUTO:
            try:
                object.__setattr__(self, "gamma", whole("gamma", self.gamma, 1, MAX_GAMMA))
            except (TypeError, ValueError) as error:
                raise type(error)(f"gamma is {short(self.gamma, repr)}; expected {AUTO} or 1 to {MAX_GAMMA}") from None
        one_of("verify", self.verify, cast(Collection[VerifyMode], VERIFIERS))
        one_of("tree", self.tree, get_args(TreeMode))
        if self.tree == "on" and self.verify == "block":
            raise ValueError("tree is 'on', and verify is 'block', which judges chains alone; leave one of them out")

    @property
    def follows_clock(self) -> bool:
        """Whether what pays decides how long proposals get: texts of `rejection` and `block` depend on that, and must not."""
        return self.gamma == AUTO and self.verify == "coupled"

    @property
    def n_drafted(self) -> int:
        """Tokens of a proposal that the clock has no say in."""
        return FIXED_GAMMA if self.gamma == AUTO else self.gamma


def setting(name: str) -> Any:
    """One of the `Settings` that an object keeps as `_settings`, as a property of its own: what is set is checked."""

    def change(owner: Any, value: object) -> None:
        owner._settings = replace(owner._settings, **{name: value})

    return property(lambda owner: getattr(owner._settings, name), change)
