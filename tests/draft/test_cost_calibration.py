"""Calibration files: the next process reads what was written, and nothing from a file that is damaged or of another model."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft import cost_calibration
from specdec.draft.acceptance import N_BUCKETS, Acceptance
from specdec.draft.cost_calibration import MAX_STORED_BYTES, CalibrationFile, fingerprint_weights, measure
from specdec.draft.draft_length import CostCurve
from specdec.engine.autotuner import SLOW_PASS_S
from specdec.events import Step
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.model import Model
from specdec.runtime.code_cache import CALIBRATION_SUFFIX
from specdec.runtime.disk_store import DiskStore
from specdec.runtime.simd import MAX_TILE_TOKENS
from specdec.text.tokenizer_lookup import SharedVocabulary
from tests.tools.random_models import tiny_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "stamp", CALIBRATION_SUFFIX)
    monkeypatch.setattr(cost_calibration, "get_store", lambda: store)
    (tmp_path / "stamp").mkdir()
    return tmp_path / "stamp"


def make_models(kind=0):
    return [tiny_model(kind), tiny_model(1)]


def make_measurements():
    acceptance = Acceptance()
    for i in range(40):
        acceptance.update([i % 5] * 3, i % 3)
    return CostCurve({1: 1.0, 8: 2.0}, 0.1), acceptance


def test_stored_costs_and_acceptance_are_read_again(folder):
    curve, acceptance = make_measurements()
    CalibrationFile(make_models(), "").write(curve, acceptance)
    known, reread = CalibrationFile(make_models(), "").read()
    assert np.allclose(known.pass_seconds, curve.pass_seconds)
    assert known.draft_token == 0.1
    assert np.allclose(reread.rates, acceptance.rates)


def test_other_weights_threads_and_drafts_use_other_files(folder, monkeypatch):
    CalibrationFile(make_models(), "").write(*make_measurements())
    assert CalibrationFile(make_models(2), "").read() is None
    assert CalibrationFile(make_models()[:1], "lookup").read() is None
    model = tiny_model(0)
    more = [Model(model.config, model.weights, 2), tiny_model(1)]
    assert CalibrationFile(more, "").read() is None
    assert CalibrationFile(make_models(), "").read()
    monkeypatch.setattr(cost_calibration, "CPU_FEATURES", "another machine")
    assert CalibrationFile(make_models(), "").read() is None


def test_fingerprint_changes_with_a_sampled_weight_of_each_matrix():
    weights = tiny_model(0).weights
    name, matrix = next(iter(weights.matrices.items()))
    panels = matrix.panels.copy()
    panels.reshape(-1)[0] += 1
    other = replace(weights, shards=weights.shards | {name: (replace(matrix, panels=panels),)})
    assert fingerprint_weights(weights) == fingerprint_weights(tiny_model(0).weights) != fingerprint_weights(other)


def damage(folder):
    [path] = folder.glob("*.known")
    data = path.read_bytes()
    yield b""
    yield data[:20]
    yield data[:-1]
    for i in range(0, len(data), 97):
        yield data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]


def test_a_damaged_file_is_ignored(folder):
    CalibrationFile(make_models(), "").write(*make_measurements())
    [path] = folder.glob("*.known")
    for data in [*damage(folder)]:
        path.write_bytes(data)
        assert CalibrationFile(make_models(), "").read() is None


# A number of the file by its index, and an impossible value
WRONG = {
    "a pass of no time": (3, 0.0),
    "a word": (3, "one"),
    "no number": (3, float("nan")),
    "without end": (MAX_BATCH_TOKENS + 1, float("inf")),
    "below nothing": (MAX_BATCH_TOKENS + 1, -1.0),
    "a model that drafts for nothing": (MAX_BATCH_TOKENS + 1, 0.0),
    "more accepted than were seen": (-1, 2.0),
    "a list": (-N_BUCKETS - 1, [1.0]),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_file_with_impossible_numbers_is_ignored(folder, change):
    """Put an unknown value into an intact file, as another version might."""
    CalibrationFile(make_models(), "").write(*make_measurements())
    [path] = folder.glob("*.known")
    store = DiskStore(folder, CALIBRATION_SUFFIX)
    numbers = json.loads(bytes(store.read(path.name) or b""))
    index, value = WRONG[change]
    numbers[index] = value
    store.write(path.name, json.dumps(numbers).encode())
    assert CalibrationFile(make_models(), "").read() is None
    for content in (b"[]", b"{}", b"null", b"nonsense", b"[" * 10_000):
        store.write(path.name, content)
        assert CalibrationFile(make_models(), "").read() is None


def test_number_of_files_and_rate_of_writes_are_limited(folder, monkeypatch):
    one = CalibrationFile(make_models(), "")
    curve, acceptance = make_measurements()
    one.write(curve, acceptance)
    [path] = folder.glob("*.known")
    path.unlink()
    one.write(curve, acceptance)
    assert not [*folder.glob("*.known")]
    for i in range(5):
        older = folder / f"{i:024}.known"
        older.write_bytes(bytes(MAX_STORED_BYTES // 4))
        os.utime(older, (i, i))
    CalibrationFile(make_models(), "").write(curve, acceptance)
    assert path.exists() and [int(older.stem) for older in sorted(folder.glob("0*.known")) if older != path] == [2, 3, 4]


def test_an_unwritable_folder_is_no_error(folder, monkeypatch):
    folder.rmdir()
    folder.write_text("a file")
    CalibrationFile(make_models(), "").write(*make_measurements())
    assert CalibrationFile(make_models(), "").read() is None


def test_output_does_not_depend_on_stored_measurements_and_updates_them(folder, pair):
    def write():
        decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, n_threads=1)  # the choice may differ
        events = [*decoder.stream("abc", 60)]
        return [token for event in events if isinstance(event, Step) for token in event.tokens]

    first = write()
    [path] = folder.glob("*.known")
    store = DiskStore(folder, CALIBRATION_SUFFIX)
    numbers = json.loads(bytes(store.read(path.name) or b""))
    for draft in (numbers[MAX_BATCH_TOKENS + 1] / 1000, 1e3):
        numbers[MAX_BATCH_TOKENS + 1] = draft
        store.write(path.name, json.dumps(numbers).encode())
        assert write() == first


@pytest.mark.parametrize("seconds", [1e-9, 1e3])
def test_an_expensive_draft_in_a_file_is_measured_again(folder, pair, seconds):
    """The minimum of stored and new costs counts, since noise only ever adds time."""
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, n_threads=1)
    file = CalibrationFile([decoder.target, decoder.draft], "")
    file.write(CostCurve({1: 1e-9, 64: 1e-9}, seconds), Acceptance())
    decoder.warm_up()
    curve = decoder.autotuner.curve
    assert curve.pass_seconds[1] == 1e-9 and curve.draft_token < 1


@pytest.mark.parametrize("is_recheck", [False, True])
def test_short_passes_of_the_slowest_target_are_measured_too(monkeypatch, is_recheck):
    """A line from 1 to 8 tokens would overrate the cost of short drafts; later starts measure another one again."""
    monkeypatch.setattr(cost_calibration, "MEASURE_BUDGET_S", 0.0)
    monkeypatch.setattr(cost_calibration, "RECHECK_BUDGET_S", 0.0)
    cache, passes = tiny_model(0).new_cache(), list[int]()
    forward, n = cache.forward, cache.model.config.vocab_size
    monkeypatch.setattr(cache, "forward", lambda tokens, n_logits: passes.append(len(tokens)) or forward(tokens, n_logits))
    for _ in range(60 if is_recheck else 1):
        measure(cache, None, SharedVocabulary(n, n), is_recheck)
    assert {*passes} == {1, 2, 4, MAX_TILE_TOKENS}
    assert len(passes) <= (120 if is_recheck else 4)


@pytest.mark.parametrize(("seconds", "is_measured"), [(1e3, False), (SLOW_PASS_S, True)])
def test_a_slow_target_begins_with_stored_costs(folder, pair, seconds, is_measured):
    decoder = SpeculativeDecoder(pair.target, "lookup", pair.tokenizer, n_threads=1)
    CalibrationFile([decoder.target], "lookup").write(CostCurve({1: seconds, 8: 2 * seconds}), Acceptance())
    decoder.warm_up()
    assert (decoder.autotuner.curve.pass_seconds[1] < seconds) is is_measured
