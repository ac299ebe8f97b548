"""Statistics over decoding events: the estimated speed-up over the target alone."""

import random

import pytest

from specdec.events import Statistics, Step


def estimate(plain: list[float], drafted: list[float], cost: float = 1.5) -> float | None:
    """Return the estimated speed-up of steps without a draft and, in random order, steps of three tokens, by their seconds."""
    statistics = Statistics()
    for seconds in plain:
        statistics.add(Step([5], [], 0, seconds, 0.0))
    for seconds in random.Random(1).sample(drafted, len(drafted)):
        statistics.add(Step([5, 6, 7], [5, 6, 9], 2, seconds, 0.3 * seconds, n_nodes=3, cost=cost))
    return statistics.speed_up


@pytest.mark.parametrize(
    ("plain", "drafted", "cost", "expected"),
    [
        ([], [1.5] * 30, 1.5, 90 / 45),  # calibrated costs alone
        ([], [9.0] * 30, 1.5, 90 / 45),  # their seconds do not matter without a step to compare with
        ([1.0] * 8, [1.5] * 30, 1.5, 98 / (8 + 45)),
        ([1.0] * 8 + [9.0] * 4, [1.5] * 25 + [9.0] * 5, 1.5, 102 / (12 + 45)),  # stalls are filtered out
        ([1.0] * 400, [1.5] * 30, 3.0, 490 / (400 + 45)),  # many plain steps correct a wrong calibration
        ([1.0] * 4, [1.5] * 30, 6.0, 94 / (4 + 90)),  # four correct it by half, on a logarithmic scale
        ([9.0] * 400, [0.1] * 30, 1.0, 490 / 430),  # no pass is faster than one over a single token
        ([1.0] * 40, [], 1.5, None),  # nothing was drafted
        ([1.0] * 40, [1.5] * 30, 0.0, None),  # no cost is known
    ],
)
def test_speed_up_follows_calibrated_costs_and_plain_steps(
    plain: list[float], drafted: list[float], cost: float, expected: float | None
) -> None:
    assert estimate(plain, drafted, cost) == (None if expected is None else pytest.approx(expected, rel=0.02))


def test_search_time_of_plain_steps_counts() -> None:
    statistics = Statistics()
    for _ in range(40):
        statistics.add(Step([5], [], 0, 1.25, 0.25))  # a search that found nothing
    statistics.add(Step([5, 6], [5], 1, 1.0, 0.0, n_nodes=1, cost=1.0))
    assert statistics.speed_up == pytest.approx(42 / 51)
