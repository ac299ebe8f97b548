"""The first cases of each fuzzing campaign; `python -m tests.tools.fuzz` runs more."""

import pytest

from tests.tools import fuzz


@pytest.mark.campaign
@pytest.mark.parametrize("name", fuzz.CAMPAIGNS)
def test_no_random_case_breaks_a_promise(name):
    ends, failures = fuzz.run(name, 0.7, first=0, min_cases=10)
    assert not failures, "\n".join(failures)
    assert ends.total() >= 10
    assert ends[fuzz.FINE] > 0


def test_a_failure_is_reported_with_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setitem(fuzz.CAMPAIGNS, "decoding", lambda rng: fuzz.FINE if rng.random() < 0.5 else 1 / 0)
    ends, failures = fuzz.run("decoding", 0, first=500, min_cases=40)
    assert ends["failed"] + ends[fuzz.FINE] == 40
    case = failures[0].split()[-1]
    assert failures[0] == f"ZeroDivisionError: division by zero\n    python -m tests.tools.fuzz --only decoding --case {case}"
    with pytest.raises(ZeroDivisionError):
        fuzz.run_case("decoding", int(case))
