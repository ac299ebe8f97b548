"""What is warm and measured, who drafts by which policy, and on how many threads: of models of no files and no tokenizer."""

from types import SimpleNamespace

import pytest

from specdec.draft import autotuner
from specdec.draft.autotuner import Tuning
from specdec.draft.costs import CostCurve
from specdec.draft.resolver import NGRAM, Origin, Team
from specdec.draft.settings import Settings
from specdec.draft.thread_tuner import Pace
from specdec.engine.decoding import Job, Prompt, Step
from specdec.sampling import Sampling
from specdec.text.vocabulary import Vocabulary
from specdec.tokenizer import BOS
from tests.tools.random_models import END_MARKS, tiny_model

OWN = Vocabulary(105, 105)
TOKENIZER = SimpleNamespace(end_marks=END_MARKS, encode=lambda text: [BOS])
DRAFTS = {"none": None, "n-grams": NGRAM, "model": tiny_model(1)}


def tuning_of(draft="model", stage=None):
    return Tuning(Team(tiny_model(0), Origin(DRAFTS[draft], OWN), Origin(stage, OWN), TOKENIZER))


@pytest.fixture
def told(monkeypatch):
    """The names of drafter and policy of each text that begins, in the place of the text."""
    seen = []

    def write(target, text, reader):
        seen.append((type(text.drafter).__name__, type(text.policy).__name__))
        yield Step([], [], 0, 0.01 / target.n_threads, 0.0)

    monkeypatch.setattr(autotuner, "write", write)
    return seen


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_done_is_not_done_again_and_other_settings_ask_for_their_own_alone(told, draft):
    one = tuning_of(draft)
    assert [*one.undone(Settings())] == ["passes [False]" if draft != "model" else "passes [False, False]"] + [
        name for name in ("coupled", "measures") if name == "measures" or draft != "none"
    ]
    one.warm_up(Settings())
    curve = one.curve
    assert (curve is None) == (draft == "none") and not one.undone(Settings(4))
    other = Settings(4, "block")
    assert [*one.undone(other)] == (["block"] if draft != "none" else [])
    one.warm_up(other)
    assert one.curve is curve


@pytest.mark.parametrize(
    ("draft", "settings", "expected"),
    [
        ("none", Settings(), ("NoneType", "FixedLength")),
        ("n-grams", Settings(), ("NgramDrafter", "DraftLengthPolicy")),
        ("n-grams", Settings(verify="block"), ("NgramDrafter", "FixedLength")),
        ("model", Settings(), ("ModelDrafter", "DraftLengthPolicy")),
        ("model", Settings(5), ("ModelDrafter", "FixedLength")),
        ("model", Settings(verify="rejection"), ("ModelDrafter", "FixedLength")),
        ("model", Settings(tree="auto"), ("ModelDrafter", "DraftLengthPolicy")),
        ("model", Settings(tree="on"), ("TreeDrafter", "FixedLength")),
        ("model", Settings(verify="rejection", tree="on"), ("TreeDrafter", "FixedLength")),
        ("n-grams", Settings(tree="on"), ("NgramDrafter", "DraftLengthPolicy")),
    ],
)
def test_who_drafts_by_which_policy(told, monkeypatch, draft, settings, expected):
    """Beside a target whose token takes a second, so that all pay."""
    monkeypatch.setattr(autotuner, "measure", lambda *_: CostCurve({1: 1.0, 64: 1.1}, 0.01))
    one = tuning_of(draft)
    one.warm_up(settings)
    list(one.events(Job([BOS, 5], 5, Sampling()), settings))
    assert told[-1] == expected


def test_beside_a_quick_target_nobody_looks_for_n_grams(told, monkeypatch):
    monkeypatch.setattr(autotuner, "measure", lambda *_: CostCurve({1: 1e-4, 64: 1.1e-4}, 1e-5))
    one = tuning_of("n-grams")
    one.warm_up(Settings())
    list(one.events(Job([BOS, 5], 5, Sampling()), Settings()))
    assert told[-1] == ("NoneType", "FixedLength")


def test_a_stage_guesses_once_it_is_measured(told):
    one = tuning_of("model", NGRAM)
    list(one.events(Job([BOS, 5], 5, Sampling()), Settings()))
    one.warm_up(Settings())
    list(one.events(Job([BOS, 5], 5, Sampling()), Settings()))
    assert [told[0][0], told[-1][0]] == ["ModelDrafter", "StagedDrafter"]


def test_events_go_through_as_they_are_and_choose_the_threads(monkeypatch):
    events = [Prompt([1], 9.0), *(Step([5], [], 0, seconds, 0.0) for seconds in [0.001] * 300 + [0.05] * 9)]
    monkeypatch.setattr(autotuner, "write", lambda *_: iter(events))
    one, used = tuning_of("none"), [4]
    one._pace = Pace([4, 3, 2, 1], 4, used.append)
    assert list(one.events(Job([BOS], 5, Sampling()), Settings())) == events
    assert {*used} == {4, 3, 2, 1}


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"gamma": 0}, "gamma is 0; expected auto or 1 to"),
        ({"verify": "x"}, "verify is"),
        ({"tree": "x"}, "tree is"),
        ({"tree": "on", "verify": "block"}, "chains"),
    ],
)
def test_settings_that_are_none_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        Settings(**wrong)
