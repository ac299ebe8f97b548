"""What the next process knows of a pair: read as it was written, and nothing from a file that is damaged or foreign."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft import calibration
from specdec.draft.acceptance import MAX_EARLIER, N_BUCKETS, Acceptance
from specdec.draft.calibration import MAX_FILES, CalibrationFile, sampled_stamp
from specdec.draft.costs import CostCurve, ExpertCosts
from specdec.engine.decoding import Step
from specdec.kernels import MAX_TOKENS
from specdec.loaders.loader import load_model
from specdec.model.transformer import Transformer
from specdec.runtime.code_cache import keep
from tests.tools.hf_folders import FIXTURES
from tests.tools.random_models import tiny_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "folder", lambda: str(tmp_path / "stamp"))
    (tmp_path / "stamp").mkdir()
    return tmp_path / "stamp"


def a_team(kind=0):
    return [tiny_model(kind), tiny_model(1)]


def something():
    acceptance = Acceptance()
    for i in range(40):
        acceptance.update([([i % 5] * 3, i % 3)])
    return CostCurve({1: 1.0, 8: 2.0}, 0.1, 0.05), acceptance


def test_the_next_process_begins_with_what_this_one_knows(folder):
    curve, acceptance = something()
    CalibrationFile(a_team(), "").write(curve, acceptance)
    known, again = CalibrationFile(a_team(), "").read()
    assert np.allclose(known.passes, curve.passes)
    assert (known.draft_token, known.draft_start) == (curve.draft_token, curve.draft_start)
    assert np.allclose(again.rates, acceptance.rates)
    assert again.mean == pytest.approx(acceptance.mean) and again.n_accepted == MAX_EARLIER


def test_what_experts_cost_is_known_too(folder):
    target = load_model(FIXTURES / "qwen3_moe")
    of = target.config.experts
    curve = CostCurve({1: 1.0, 64: 3.0}, 0.0, 0.0, ExpertCosts(of.n, of.n_chosen, 0.25, 0.5, lambda: 3.0))
    CalibrationFile([target], "ngram").write(curve, Acceptance())
    known, _ = CalibrationFile([target], "ngram").read()
    assert (known.experts.seconds, known.experts.repeats) == (0.25, 0.5) and known.passes == pytest.approx(curve.passes)
    target.forward([1, 2, 3], 1)
    assert known.experts.extra_of(known.experts.n_read()) == 0.25 * (target.experts_read[0] / target.experts_read[1] - 1)


def test_other_weights_threads_and_drafts_are_other_files(folder, monkeypatch):
    CalibrationFile(a_team(), "").write(*something())
    assert CalibrationFile(a_team(2), "").read() is None
    assert CalibrationFile(a_team()[:1], "ngram").read() is None
    model = tiny_model(0)
    more = [Transformer(model.config, model.weights, 2), tiny_model(1)]
    assert CalibrationFile(more, "").read() is None
    assert CalibrationFile(a_team(), "").read()
    monkeypatch.setattr(calibration, "CPU_FEATURES", "another machine")
    assert CalibrationFile(a_team(), "").read() is None


def test_one_weight_of_each_matrix_that_is_looked_at_tells_models_apart():
    weights = tiny_model(0).weights
    name, matrix = next(iter(weights.matrices.items()))
    strips = matrix.strips.copy()
    strips.reshape(-1)[0] += 1
    other = replace(weights, matrices=weights.matrices | {name: replace(matrix, strips=strips)})
    assert sampled_stamp(weights) == sampled_stamp(tiny_model(0).weights) != sampled_stamp(other)


def damaged(folder):
    [path] = folder.glob("*.known")
    data = path.read_bytes()
    yield b""
    yield data[:20]
    yield data[:-1]
    for i in range(0, len(data), 97):
        yield data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]


def test_a_damaged_file_counts_as_none(folder):
    CalibrationFile(a_team(), "").write(*something())
    [path] = folder.glob("*.known")
    for data in [*damaged(folder)]:
        path.write_bytes(data)
        assert CalibrationFile(a_team(), "").read() is None


WRONG = {
    "passes of no time": {"passes": [0.0] * (MAX_TOKENS + 1)},
    "too few passes": {"passes": [1.0] * MAX_TOKENS},
    "a word": {"passes": ["one"] * (MAX_TOKENS + 1)},
    "no number": {"passes": [float("nan")] * (MAX_TOKENS + 1)},
    "without end": {"draft": [float("inf"), 0.0, 1.0]},
    "below nothing": {"draft": [-1.0, 0.0, 1.0]},
    "a model that drafts for nothing": {"draft": [0.0, 0.0, 1.0]},
    "more accepted than were seen": {"rates": [2.0] * (N_BUCKETS + 1)},
    "too few rates": {"rates": [0.5] * N_BUCKETS},
    "a number": {"rates": 1.0},
    "nothing": {"rates": None},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_that_cannot_be_count_as_none(folder, wrong):
    """In a file that is whole: another version's."""
    CalibrationFile(a_team(), "").write(*something())
    [path] = folder.glob("*.known")
    known = json.loads(path.read_bytes()[32:])
    keep(str(path), json.dumps(known | WRONG[wrong]).encode())
    assert CalibrationFile(a_team(), "").read() is None
    for content in (b"[]", b"{}", b"nonsense", b"[" * 10_000):
        keep(str(path), content)
        assert CalibrationFile(a_team(), "").read() is None


def test_files_are_few_and_seconds_apart(folder, monkeypatch):
    one = CalibrationFile(a_team(), "")
    curve, acceptance = something()
    one.write(curve, acceptance)
    [path] = folder.glob("*.known")
    path.unlink()
    one.write(curve, acceptance)
    assert not [*folder.glob("*.known")]
    for i in range(MAX_FILES + 5):
        (folder / f"{i}.known").write_bytes(b"")
    CalibrationFile(a_team(), "").write(curve, acceptance)
    assert path.exists() and len([*folder.glob("*.known")]) == MAX_FILES


def test_where_nothing_can_be_kept_nothing_is_lost(folder, monkeypatch):
    folder.rmdir()
    folder.write_text("a file")
    CalibrationFile(a_team(), "").write(*something())
    assert CalibrationFile(a_team(), "").read() is None


def test_a_text_is_the_same_whatever_was_known_and_leaves_what_it_showed(folder, pair, monkeypatch):
    def write():
        decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, n_threads=1)  # a choice may come out otherwise
        events = [*decoder.stream("abc", 60)]
        return [token for event in events if isinstance(event, Step) for token in event.tokens]

    monkeypatch.setattr("specdec.draft.autotuner.MIN_STEPS", 1)  # how many it takes is the clock's
    first = write()
    [path] = folder.glob("*.known")
    known = json.loads(path.read_bytes()[32:])
    for draft in (known["draft"][0] / 1000, 1e3):
        keep(str(path), json.dumps(known | {"draft": [draft, 0.0, 0.0]}).encode())
        assert write() == first


@pytest.mark.parametrize("seconds", [1e-9, 1e3])
def test_a_draft_that_a_file_says_is_dear_is_measured_again(folder, pair, seconds):
    """Of a file's costs and those that are measured when a process begins the lesser ones hold: noise only adds to them."""
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, n_threads=1)
    file = CalibrationFile([decoder.target, decoder.draft], "")
    file.write(CostCurve({1: 1e-9, 64: 1e-9}, seconds), Acceptance())
    decoder.warm_up()
    assert decoder.tuning.curve.passes[1] == 1e-9
    assert decoder.tuning.curve.draft_token < 1
