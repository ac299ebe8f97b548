"""The autotuner: which tasks are completed, which drafter and policy a sequence gets, and on how many threads, without files."""

from types import SimpleNamespace

import pytest

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import CostCurve
from specdec.draft.lookup_tables import LookupMemory
from specdec.draft.model_bundle import LOOKUP, DraftSource, ModelBundle
from specdec.draft.settings import SpeculativeSettings
from specdec.draft.thread_tuner import ThreadTuner
from specdec.engine import autotuner
from specdec.engine.autotuner import Autotuner
from specdec.engine.request import GenerationRequest
from specdec.engine.scheduler import Scheduler, make_decoding_state
from specdec.engine.warm_up import WarmUp
from specdec.events import Step
from specdec.runtime.cpu_topology import CpuTopology
from specdec.sampling import Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary
from specdec.tokenizer import BOS
from tests.tools.decode import END_MARKS, get_steps
from tests.tools.random_models import tiny_model

OWN = SharedVocabulary(105, 105)
TOKENIZER = SimpleNamespace(eos_tokens=END_MARKS, encode=lambda text: [BOS], utf8_errors="replace")
DRAFTS = {"none": None, "lookup": LOOKUP, "model": tiny_model(1)}


def make_autotuner(draft="model", stage=None):
    return Autotuner(ModelBundle(tiny_model(0), DraftSource(DRAFTS[draft], OWN), DraftSource(stage, OWN), TOKENIZER))


@pytest.fixture
def fast_steps(monkeypatch):
    """Let warm-up generate nothing: a step on n threads takes 10 / n ms."""
    monkeypatch.setattr(Scheduler, "stream", lambda self, _: iter([Step([], [], 0, 0.01 / self.bundle.target.n_threads, 0.0)]))


def get_pending_tasks(warm_up, settings):
    return [name for name, _ in warm_up.list_pending_tasks(settings)]


def get_drafter_and_policy(tuner, settings):
    """Return the class names of drafter and policy of a new sequence."""
    costs, request = tuner.make_cost_model(settings, is_batch=False), GenerationRequest([BOS, 5], 5, Sampling())
    state = make_decoding_state(tuner, tuner.bundle.new_caches(), request, settings, costs, True, LookupMemory())
    return type(state.drafter).__name__, type(state.policy).__name__


@pytest.mark.parametrize("draft", DRAFTS)
def test_tasks_run_once_and_other_settings_add_only_their_own(fast_steps, draft):
    tuner = make_autotuner(draft)
    warm_up = WarmUp(tuner)
    tasks = {
        "none": ["passes [False]", "measures"],
        "model": ["passes [False, False]", "coupled", "measures"],
        "lookup": ["passes [False]", "coupled", "lookup", "trees", "coupled of trees", "measures"],
    }
    assert get_pending_tasks(warm_up, SpeculativeSettings()) == tasks[draft]
    warm_up.run(SpeculativeSettings())
    curve = tuner.curve
    assert (curve is None) == (draft == "none") and warm_up.is_complete(SpeculativeSettings(4))
    other = SpeculativeSettings(4, "block")
    assert get_pending_tasks(warm_up, other) == (["block"] if draft != "none" else [])
    warm_up.run(other)
    assert tuner.curve is curve and warm_up.is_complete(other)


@pytest.mark.parametrize(
    ("draft", "settings", "expected"),
    [
        ("none", SpeculativeSettings(), ("NoneType", "FixedLength")),
        ("lookup", SpeculativeSettings(), ("LookupDrafter", "DraftLengthPolicy")),
        ("lookup", SpeculativeSettings(verify="block"), ("LookupDrafter", "FixedLength")),
        ("model", SpeculativeSettings(), ("ModelDrafter", "DraftLengthPolicy")),
        ("model", SpeculativeSettings(5), ("ModelDrafter", "FixedLength")),
        ("model", SpeculativeSettings(verify="rejection"), ("ModelDrafter", "FixedLength")),
        ("model", SpeculativeSettings(tree="auto"), ("ModelDrafter", "DraftLengthPolicy")),
        ("model", SpeculativeSettings(tree="on"), ("TreeDrafter", "FixedLength")),
        ("model", SpeculativeSettings(verify="rejection", tree="on"), ("TreeDrafter", "FixedLength")),
        ("lookup", SpeculativeSettings(tree="on"), ("LookupDrafter", "DraftLengthPolicy")),
    ],
)
def test_drafter_and_policy_by_settings(fast_steps, monkeypatch, draft, settings, expected):
    """With a target that takes a second per token, so that all drafts are profitable."""
    monkeypatch.setattr(autotuner, "measure", lambda *_: CostCurve({1: 1.0, 64: 1.1}, 0.01))
    tuner = make_autotuner(draft)
    WarmUp(tuner).run(settings)
    assert get_drafter_and_policy(tuner, settings) == expected


def test_no_lookup_is_searched_with_a_fast_target(fast_steps, monkeypatch):
    monkeypatch.setattr(autotuner, "measure", lambda *_: CostCurve({1: 1e-4, 64: 1.1e-4}, 1e-5))
    tuner = make_autotuner("lookup")
    WarmUp(tuner).run(SpeculativeSettings())
    assert get_drafter_and_policy(tuner, SpeculativeSettings()) == ("NoneType", "FixedLength")


def test_a_stage_is_used_once_it_is_measured(fast_steps):
    tuner = make_autotuner("model", LOOKUP)
    assert get_drafter_and_policy(tuner, SpeculativeSettings())[0] == "ModelDrafter"
    WarmUp(tuner).run(SpeculativeSettings())
    assert get_drafter_and_policy(tuner, SpeculativeSettings())[0] == "StagedDrafter"


def test_steps_tune_the_threads(pair, monkeypatch):
    decoder, recorded = SpeculativeDecoder(pair.target, pair.draft, gamma=3, n_threads=1), []
    decoder.warm_up()
    tuner = ThreadTuner([1], 1, pytest.fail)
    monkeypatch.setattr(tuner, "record_step", lambda *step: recorded.append(step))
    monkeypatch.setattr(decoder.autotuner, "thread_tuner", tuner)
    assert recorded == [(1 + step.n_nodes, step.seconds) for step in get_steps(decoder.stream("ab", 30))] != []


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
    monkeypatch.setattr(type(tuner.bundle.target), "n_threads", n_threads)
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


def test_costs_are_saved_after_sequences_that_have_decoded(pair, monkeypatch):
    """A prompt alone teaches nothing, and a file is written at most every ten seconds."""
    saved = []
    monkeypatch.setattr(Autotuner, "save_costs", lambda _, costs: saved.append(costs))
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, n_threads=1)
    assert [*decoder.read([BOS, 5, 6])] and not saved
    assert get_steps(decoder.stream([BOS, 5, 6], 4)) and len(saved) == 1
