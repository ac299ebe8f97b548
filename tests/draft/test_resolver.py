"""Who drafts for a target, by what was named; and what is refused before weights are read."""

from dataclasses import replace
from pathlib import Path

import pytest

from specdec.config import Config
from specdec.draft.resolver import NGRAM, Finder, Origin, Team, team_of
from specdec.draft.self_copy import kinds_to_make
from specdec.loaders.loader import Loader, load_model, longest_text
from specdec.sampling import Sampler, Sampling
from specdec.text.vocabulary import Vocabulary
from tests.conftest import Pair
from tests.tools.random_models import random_model


def finder_of(pair: Pair, quantize: str = "draft") -> Finder:
    team = team_of(pair.target, None, None, pair.tokenizer, quantize, Loader(1))
    return Finder(team.target, team.tokenizer, {}, kinds_to_make(quantize), Loader(1))


def test_what_drafts_is_nothing_n_grams_a_model_or_a_copy(pair: Pair) -> None:
    finder = finder_of(pair)
    n = finder.target.config.vocab_size
    assert finder.origin("draft", None).source is None
    ngrams, model, copy = (finder.origin("draft", named) for named in (NGRAM, pair.draft, "self"))
    assert ngrams.source == NGRAM and ngrams.model is None and ngrams.rates != model.rates
    assert model.model and model.model.weights.kind == "int8" and model.model.config.n_layers != finder.target.config.n_layers
    assert copy.model and copy.model.weights.kind == "int8" and copy.model.config == finder.target.config
    assert [origin.vocabulary.n_target for origin in (ngrams, model, copy)] == [n] * 3
    loaded = load_model(pair.draft, n_threads=1, n_positions=finder.target.n_positions)
    assert finder.origin("draft", loaded).source is loaded


def test_a_copy_is_of_the_kind_that_was_asked_for(pair: Pair) -> None:
    copy = finder_of(pair, "draft=int4").origin("draft", "self").model
    assert copy and "int4" in copy.weights.kind


def test_what_drafts_sees_as_much_of_a_text_as_the_memory_beside_the_target_holds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = finder_of(pair)
    whole = finder.origin("draft", pair.draft).model
    monkeypatch.setattr("specdec.loaders.loader.physical_memory_bytes", lambda: finder.target.weights.n_bytes)
    window = finder.origin("draft", pair.draft).model
    assert whole and window and window.n_positions < whole.n_positions == finder.target.n_positions
    assert longest_text(finder.target) < finder.target.n_positions


@pytest.mark.parametrize(
    ("draft", "stage", "told"),
    [
        (None, "ngram", "a stage drafts for a draft that is a model"),
        ("ngram", "self", "a stage drafts for a draft that is a model"),
        ("self", "self", "would be a copy of the target"),
    ],
)
def test_a_stage_that_cannot_be_is_told_before_weights_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, draft: str | None, stage: str, told: str
) -> None:
    monkeypatch.setattr(Loader, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=told):
        team_of(pair.target, draft, stage, None, "draft", Loader(1))


def test_one_object_cannot_be_two_models(pair: Pair) -> None:
    target, draft = (load_model(path, n_threads=1) for path in (pair.target, pair.draft))
    for draft_given, stage, told in ((target, None, "target and draft"), (draft, draft, "draft and stage")):
        with pytest.raises(ValueError, match=f"{told} are one object"):
            team_of(target, draft_given, stage, pair.tokenizer, "draft", Loader(1))


def test_a_team_of_names_may_choose_its_threads_and_one_of_models_may_not(pair: Pair) -> None:
    named = team_of(pair.target, pair.draft, "ngram", pair.tokenizer, "none", Loader())
    assert named.may_choose and list(named.models) == ["target", "draft"]
    assert named.source and not named.source.tensors  # whose memory is free again
    for target, loader in ((pair.target, Loader(1)), (load_model(pair.target), Loader())):
        assert not team_of(target, None, None, pair.tokenizer, "none", loader).may_choose


def test_a_draft_draws_no_id_that_the_target_does_not_know(pair: Pair) -> None:
    origin = finder_of(pair).origin("draft", pair.draft)
    assert origin.model
    sampler = Sampler(origin.vocabulary.n_target, Sampling(), origin.vocabulary.n_common)
    logits = origin.model.forward([1])[0].copy()
    logits[:] = 0
    assert all(sampler.draw(sampler.new_probs(), logits, 0, i) < origin.vocabulary.n_common for i in range(50))


@pytest.mark.parametrize("wrong", [{"n_threads": 0}, {"n_threads": 10**6}, {"kv": "fp16"}])
def test_a_loader_refuses_what_no_model_takes(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*; expected"):
        Loader(**wrong)  # type: ignore[arg-type]


def test_a_loader_tells_how_far_it_is(pair: Pair) -> None:
    shares: list[tuple[str, float]] = []
    team_of(pair.target, None, None, pair.tokenizer, "none", Loader(1, "f16", lambda *told: shares.append(told)))
    assert shares and shares[-1] == (Path(pair.target).name, 1.0)


def test_all_models_are_read_by_their_bytes_but_what_cannot_hold_a_text(pair: Pair) -> None:
    large, small = Config(64, 172, 4, 8, 4, 512, 300), Config(64, 172, 1, 8, 4, 500, 300)
    models = [random_model(large), random_model(small), random_model(replace(small, seq_len=10))]
    tokens, own = [*range(412, 512)], Vocabulary(512, 512)
    tokenizer = team_of(pair.target, None, None, pair.tokenizer, "draft", Loader(1)).tokenizer
    team = Team(models[0], Origin(models[1], own), Origin(models[2], own), tokenizer)
    shares = [*team.read(tokens)]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert [model.n_held for model in models] == [99, 99, 0]
    part = models[0].weights.n_bytes / (models[0].weights.n_bytes + models[1].weights.n_bytes)
    assert any(abs(share - part) < 1e-9 for share in shares)
    assert [*team.read(tokens)] == []
