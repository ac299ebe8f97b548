"""Run each fuzzer for a moment, on the same first cases every time; `python -m tests.tools.fuzz` runs more."""

import pytest

from tests.tools import fuzz


@pytest.mark.campaign
@pytest.mark.parametrize("name", fuzz.CAMPAIGNS)
def test_no_random_case_breaks_a_promise(name):
    ends, failures = fuzz.run(name, 0.7, first=0, at_least=10)
    assert not failures, "\n".join(failures)
    assert ends.total() >= 10
    assert ends[fuzz.FINE] > 0


def test_a_failure_is_told_with_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setitem(fuzz.CAMPAIGNS, "texts", lambda rng: fuzz.FINE if rng.random() < 0.5 else 1 / 0)
    ends, failures = fuzz.run("texts", 0, first=500, at_least=40)
    assert ends["failed"] + ends[fuzz.FINE] == 40
    case = failures[0].split()[-1]
    assert failures[0] == f"ZeroDivisionError: division by zero\n    python -m tests.tools.fuzz --only texts --case {case}"
    with pytest.raises(ZeroDivisionError):
        fuzz.run_case("texts", int(case))
