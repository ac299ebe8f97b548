"""What the next process knows of a pair: read as it was written, and of a file that is damaged or foreign nothing."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.decoding import Step
from specdec.drafting import remembered
from specdec.drafting.estimates import BUCKETS, KNOWN_WEIGHT, Acceptance, Costs, Experts
from specdec.drafting.remembered import MOST_FILES, Remembered, stamp
from specdec.kernels import MAX_TOKENS
from specdec.machine.cache import keep
from specdec.readers.loading import load_model
from specdec.transformer import Transformer
from tests.folders import FIXTURES
from tests.models import tiny_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "folder", lambda: str(tmp_path / "stamp"))
    (tmp_path / "stamp").mkdir()
    return tmp_path / "stamp"


def a_team(kind=0):
    return [tiny_model(kind), tiny_model(1)]


def something():
    costs, acceptance = Costs({1: 1.0, 8: 2.0}, 0.1, 0.05), Acceptance()
    for i in range(40):
        costs.saw(3, 1.7, 0.3)
        acceptance.saw(i % 5, i % 3 > 0)
    costs.credit = 7.5
    return costs, acceptance


def test_the_next_process_begins_with_what_this_one_knows(folder):
    costs, acceptance = something()
    Remembered(a_team(), "").write(costs, acceptance)
    again = Acceptance()
    known = Remembered(a_team(), "").read(again)
    assert np.allclose(known.passes, costs.passes) and (known.draft, known.start) == (costs.draft, costs.start)
    assert known.credit == 7.5 and not known.is_new
    assert np.allclose(again.rates, acceptance.rates)
    assert max(again.seen) <= KNOWN_WEIGHT  # so that a text of another kind is soon followed


def test_what_experts_cost_is_known_too(folder):
    target = load_model(FIXTURES / "qwen3_moe")
    of = target.config.experts
    costs = Costs({1: 1.0, 64: 3.0}, 0.0, 0.0, Experts(of.n, of.n_chosen, 0.25, 0.5, lambda: 3.0))
    Remembered([target], "ngram").write(costs, Acceptance())
    known = Remembered([target], "ngram").read(Acceptance())
    assert (known.experts.seconds, known.experts.repeats) == (0.25, 0.5) and known.passes == pytest.approx(costs.passes)
    target.forward([1, 2, 3], 1)
    assert known.experts.of_last == 0.25 * (target.experts_read[0] / target.experts_read[1] - 1)


def test_other_weights_threads_and_drafts_are_other_files(folder, monkeypatch):
    costs, acceptance = something()
    Remembered(a_team(), "").write(costs, acceptance)
    assert Remembered(a_team(2), "").read(Acceptance()) is None
    assert Remembered(a_team()[:1], "ngram").read(Acceptance()) is None
    model = tiny_model(0)
    more = [Transformer(model.config, model.weights, 2), tiny_model(1)]
    assert Remembered(more, "").read(Acceptance()) is None
    assert Remembered(a_team(), "").read(Acceptance())
    monkeypatch.setattr(remembered, "CPU_FEATURES", "another machine")
    assert Remembered(a_team(), "").read(Acceptance()) is None


def test_one_weight_of_each_matrix_that_is_looked_at_tells_models_apart():
    weights = tiny_model(0).weights
    name, matrix = next(iter(weights.matrices.items()))
    strips = matrix.strips.copy()
    strips.reshape(-1)[0] += 1
    other = replace(weights, matrices=weights.matrices | {name: replace(matrix, strips=strips)})
    assert stamp(weights) == stamp(tiny_model(0).weights) != stamp(other)


def damaged(folder):
    [path] = folder.glob("*.known")
    data = path.read_bytes()
    yield b""
    yield data[:20]
    yield data[:-1]
    for i in range(0, len(data), 97):
        yield data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]


def test_a_damaged_file_counts_as_none(folder):
    Remembered(a_team(), "").write(*something())
    [path] = folder.glob("*.known")
    for data in [*damaged(folder)]:
        path.write_bytes(data)
        acceptance = Acceptance()
        assert Remembered(a_team(), "").read(acceptance) is None and vars(acceptance) == vars(Acceptance())


WRONG = {
    "passes of no time": {"passes": [0.0] * (MAX_TOKENS + 1)},
    "too few passes": {"passes": [1.0] * MAX_TOKENS},
    "a word": {"passes": ["one"] * (MAX_TOKENS + 1)},
    "no number": {"passes": [float("nan")] * (MAX_TOKENS + 1)},
    "without end": {"draft": [float("inf"), 0.0, 1.0]},
    "below nothing": {"draft": [-1.0, 0.0, 1.0]},
    "a model that drafts for nothing": {"draft": [0.0, 0.0, 1.0]},
    "more stood than were seen": {"stood": [2.0] * (BUCKETS + 1), "seen": [1.0] * (BUCKETS + 1)},
    "none seen": {"stood": [0.0] * (BUCKETS + 1), "seen": [0.0] * (BUCKETS + 1)},
    "a number": {"seen": 1.0},
    "nothing": {"seen": None},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_that_cannot_be_count_as_none(folder, wrong):
    """In a file that is whole: another version's."""
    Remembered(a_team(), "").write(*something())
    [path] = folder.glob("*.known")
    known = json.loads(path.read_bytes()[32:])
    keep(str(path), json.dumps(known | WRONG[wrong]).encode())
    assert Remembered(a_team(), "").read(Acceptance()) is None
    for content in (b"[]", b"{}", b"nonsense", b"[" * 10_000):
        keep(str(path), content)
        assert Remembered(a_team(), "").read(Acceptance()) is None


def test_files_are_few_and_seconds_apart(folder, monkeypatch):
    one = Remembered(a_team(), "")
    costs, acceptance = something()
    one.write(costs, acceptance)
    [path] = folder.glob("*.known")
    path.unlink()
    one.write(costs, acceptance)
    assert not [*folder.glob("*.known")]
    for i in range(MOST_FILES + 5):
        (folder / f"{i}.known").write_bytes(b"")
    Remembered(a_team(), "").write(costs, acceptance)
    assert path.exists() and len([*folder.glob("*.known")]) == MOST_FILES


def test_where_nothing_can_be_kept_nothing_is_lost(folder, monkeypatch):
    folder.rmdir()
    folder.write_text("a file")
    Remembered(a_team(), "").write(*something())
    assert Remembered(a_team(), "").read(Acceptance()) is None


def test_a_text_is_the_same_whatever_was_known_and_leaves_what_it_showed(folder, pair, monkeypatch):
    def write():
        decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, n_threads=1)  # a choice may come out otherwise
        events = [*decoder.stream("abc", 60)]
        return [token for event in events if isinstance(event, Step) for token in event.tokens], decoder.tuning.costs

    monkeypatch.setattr("specdec.drafting.tuning.LEAST_STEPS", 1)  # how many it takes is the clock's
    first, measured = write()
    assert len([*folder.glob("*.known")]) == 1
    monkeypatch.setattr("specdec.drafting.tuning.costs_of", None)  # nothing is timed again
    again, known = write()
    assert again == first and known is not measured
