"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

TIMEOUT_S = 600.0  # the first run on a machine compiles, for minutes on a slow or busy one


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition is true, or raise AssertionError."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
