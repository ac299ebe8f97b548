"""A clock and a keyboard for views."""

import io

from specdec.ui.keyboard import Keyboard


class Clock:
    """A clock that advances only when the test sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Keys(Keyboard):
    """A keyboard that the test types on."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.typed: list[bytes] = []

    def read_keys(self) -> list[bytes]:
        typed, self.typed = self.typed, []
        return typed


def has_grown(before: list[str], after: list[str]) -> bool:
    """Return whether the rows are the earlier ones with something at the end."""
    n = len(before) - 1
    return n < 0 or (len(after) > n and before[:n] == after[:n] and after[n].startswith(before[n]))
