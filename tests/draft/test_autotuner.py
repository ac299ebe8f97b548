"""The autotuner: which tasks are completed, which drafter and policy a sequence gets, and on how many threads, without files."""

from types import SimpleNamespace

import pytest

from specdec.draft import autotuner
from specdec.draft.autotuner import Autotuner
from specdec.draft.cost_curves import CostCurve
from specdec.draft.model_bundle import NGRAM, DraftSource, ModelBundle
from specdec.draft.settings import SpeculativeSettings
from specdec.draft.thread_tuner import ThreadTuner
from specdec.engine.decode_loop import GenerationRequest, Prompt, Step
from specdec.runtime.cpu_topology import CpuTopology
from specdec.sampling import Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary
from specdec.tokenizer import BOS
from tests.tools.random_models import END_MARKS, tiny_model

OWN = SharedVocabulary(105, 105)
TOKENIZER = SimpleNamespace(eos_tokens=END_MARKS, encode=lambda text: [BOS])
DRAFTS = {"none": None, "n-grams": NGRAM, "model": tiny_model(1)}


def make_autotuner(draft="model", stage=None):
    return Autotuner(ModelBundle(tiny_model(0), DraftSource(DRAFTS[draft], OWN), DraftSource(stage, OWN), TOKENIZER))


@pytest.fixture
def drafter_names(monkeypatch):
    """Replace `stream_events` and collect the class names of drafter and policy of each sequence that starts."""
    names = []

    def write(target, sequence, prefiller):
        names.append((type(sequence.drafter).__name__, type(sequence.policy).__name__))
        yield Step([], [], 0, 0.01 / target.n_threads, 0.0)

    monkeypatch.setattr(autotuner, "stream_events", write)
    return names


@pytest.mark.parametrize("draft", DRAFTS)
def test_tasks_run_once_and_other_settings_add_only_their_own(drafter_names, draft):
    tuner = make_autotuner(draft)
    assert [*tuner.get_pending_tasks(SpeculativeSettings())] == [
        "passes [False]" if draft != "model" else "passes [False, False]"
    ] + [name for name in ("coupled", "measures") if name == "measures" or draft != "none"]
    tuner.warm_up(SpeculativeSettings())
    curve = tuner.curve
    assert (curve is None) == (draft == "none") and not tuner.get_pending_tasks(SpeculativeSettings(4))
    other = SpeculativeSettings(4, "block")
    assert [*tuner.get_pending_tasks(other)] == (["block"] if draft != "none" else [])
    tuner.warm_up(other)
    assert tuner.curve is curve


@pytest.mark.parametrize(
    ("draft", "settings", "expected"),
    [
        ("none", SpeculativeSettings(), ("NoneType", "FixedLength")),
        ("n-grams", SpeculativeSettings(), ("NgramDrafter", "DraftLengthPolicy")),
        ("n-grams", SpeculativeSettings(verify="block"), ("NgramDrafter", "FixedLength")),
        ("model", SpeculativeSettings(), ("ModelDrafter", "DraftLengthPolicy")),
        ("model", SpeculativeSettings(5), ("ModelDrafter", "FixedLength")),
        ("model", SpeculativeSettings(verify="rejection"), ("ModelDrafter", "FixedLength")),
        ("model", SpeculativeSettings(tree="auto"), ("ModelDrafter", "DraftLengthPolicy")),
        ("model", SpeculativeSettings(tree="on"), ("TreeDrafter", "FixedLength")),
        ("model", SpeculativeSettings(verify="rejection", tree="on"), ("TreeDrafter", "FixedLength")),
        ("n-grams", SpeculativeSettings(tree="on"), ("NgramDrafter", "DraftLengthPolicy")),
    ],
)
def test_drafter_and_policy_by_settings(drafter_names, monkeypatch, draft, settings, expected):
    """With a target that takes a second per token, so that all drafts are profitable."""
    monkeypatch.setattr(autotuner, "measure", lambda *_: CostCurve({1: 1.0, 64: 1.1}, 0.01))
    tuner = make_autotuner(draft)
    tuner.warm_up(settings)
    list(tuner.stream(GenerationRequest([BOS, 5], 5, Sampling()), settings))
    assert drafter_names[-1] == expected


def test_no_ngrams_are_searched_with_a_fast_target(drafter_names, monkeypatch):
    monkeypatch.setattr(autotuner, "measure", lambda *_: CostCurve({1: 1e-4, 64: 1.1e-4}, 1e-5))
    tuner = make_autotuner("n-grams")
    tuner.warm_up(SpeculativeSettings())
    list(tuner.stream(GenerationRequest([BOS, 5], 5, Sampling()), SpeculativeSettings()))
    assert drafter_names[-1] == ("NoneType", "FixedLength")


def test_a_stage_is_used_once_it_is_measured(drafter_names):
    tuner = make_autotuner("model", NGRAM)
    list(tuner.stream(GenerationRequest([BOS, 5], 5, Sampling()), SpeculativeSettings()))
    tuner.warm_up(SpeculativeSettings())
    list(tuner.stream(GenerationRequest([BOS, 5], 5, Sampling()), SpeculativeSettings()))
    assert [drafter_names[0][0], drafter_names[-1][0]] == ["ModelDrafter", "StagedDrafter"]


def test_events_pass_through_unchanged_and_tune_the_threads(monkeypatch):
    events = [Prompt([1], 9.0), *(Step([5], [], 0, seconds, 0.0) for seconds in [0.001] * 300 + [0.05] * 9)]
    monkeypatch.setattr(autotuner, "stream_events", lambda *_: iter(events))
    tuner, used = make_autotuner("none"), [4]
    tuner._thread_tuner = ThreadTuner([4, 3, 2, 1], 4, used.append)
    assert list(tuner.stream(GenerationRequest([BOS], 5, Sampling()), SpeculativeSettings())) == events
    assert {*used} == {4, 3, 2, 1}


@pytest.mark.parametrize(
    ("n_threads", "times", "expected"),
    [
        (1, {2: 1.0, 1: 0.3125}, "1 thread (3.2 times as fast as 2 here); 2 cores"),
        (2, {2: 1.0, 1: 1.7}, "2 threads (1.7 times as fast as 1 here); 2 cores"),
        (4, {8: 1.0, 4: 0.5, 1: 2.0}, "4 threads (2 times as fast as 8 and 4 times as fast as 1 here); 2 cores"),
        (2, {2: 1.0}, "2 threads; 2 cores"),
        (2, {}, "2 threads; 2 cores"),
        (3, {2: 1.0, 1: 1.7}, "3 threads; 2 cores"),
    ],
)
def test_the_thread_summary_compares_the_number_in_use_with_the_others(monkeypatch, n_threads, times, expected):
    tuner = make_autotuner("none")
    monkeypatch.setattr(autotuner, "get_topology", lambda: CpuTopology(2, 0, 2))
    monkeypatch.setattr(type(tuner._bundle.target), "n_threads", n_threads)
    tuner.relative_step_times = times
    assert tuner.thread_summary == expected


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gamma": 0}, "gamma is 0; expected auto or 1 to"),
        ({"verify": "x"}, "verify is"),
        ({"tree": "x"}, "tree is"),
        ({"tree": "on", "verify": "block"}, "chains"),
    ],
)
def test_bad_settings_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        SpeculativeSettings(**settings)
