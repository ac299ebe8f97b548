"""The resolution of named drafts, and what is refused before weights are read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.draft.model_bundle import LOOKUP, DraftResolver, DraftSource, ModelBundle, load_bundle
from specdec.draft.settings import SpeculativeSettings, parse_quantize
from specdec.engine.autotuner import Autotuner
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import Sequence
from specdec.events import PrefillProgress
from specdec.loaders.model_loader import Loader, compute_max_positions, load_model
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.sampling import Sampler, Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary
from tests.conftest import Pair
from tests.tools.random_models import random_model


def make_resolver(pair: Pair, quantize: str = "draft") -> DraftResolver:
    bundle = load_bundle(pair.target, None, None, pair.tokenizer, "draft", Loader(1))
    return DraftResolver(bundle.target, bundle.tokenizer, {}, parse_quantize(quantize), Loader(1))


def test_draft_is_none_lookup_a_model_or_a_copy(pair: Pair) -> None:
    resolver = make_resolver(pair)
    n = resolver.target.config.vocab_size
    assert resolver.resolve("draft", None).model_or_lookup is None
    lookup, model, copy = (resolver.resolve("draft", named) for named in (LOOKUP, pair.draft, "self"))
    assert lookup.model_or_lookup == LOOKUP and lookup.model is None and lookup.prior_acceptance != model.prior_acceptance
    assert (
        model.model
        and model.model.weights.format_names == "int8"
        and model.model.config.n_layers != resolver.target.config.n_layers
    )
    assert copy.model and copy.model.weights.format_names == "int8" and copy.model.config == resolver.target.config
    assert [source.vocabulary.n_target for source in (lookup, model, copy)] == [n] * 3
    loaded = load_model(pair.draft, n_threads=1, n_positions=resolver.target.n_positions)
    assert resolver.resolve("draft", loaded).model_or_lookup is loaded


def share_memory(one: Model, other: Model) -> bool:
    return all(
        np.shares_memory(matrix.panels, other.weights.matrices[name].panels) for name, matrix in one.weights.matrices.items()
    )


def test_target_that_drafts_for_itself_is_loaded_once(pair: Pair) -> None:
    bundle = load_bundle(pair.target, pair.target, None, pair.tokenizer, "none", Loader(1))
    assert bundle.draft.model and bundle.draft.model is not bundle.target
    assert share_memory(bundle.draft.model, bundle.target)
    other = load_bundle(pair.target, pair.target, None, pair.tokenizer, "draft", Loader(1))
    assert other.draft.model and not share_memory(other.draft.model, other.target)


def test_copy_has_the_requested_weight_format(pair: Pair) -> None:
    copy = make_resolver(pair, "draft=int4").resolve("draft", "self").model
    assert copy and "int4" in copy.weights.format_names


def test_draft_positions_are_limited_by_the_memory_next_to_the_target(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = make_resolver(pair)
    full = resolver.resolve("draft", pair.draft).model
    monkeypatch.setattr("specdec.loaders.model_loader.get_physical_memory_bytes", lambda: resolver.target.weights.n_bytes)
    window = resolver.resolve("draft", pair.draft).model
    assert full and window and window.n_positions < full.n_positions == resolver.target.n_positions
    assert compute_max_positions(resolver.target) < resolver.target.n_positions


@pytest.mark.parametrize(
    ("draft", "stage", "message"),
    [
        (None, "lookup", "a stage needs a draft that is a model"),
        ("lookup", "self", "a stage needs a draft that is a model"),
        ("self", "self", "a copy of the target is not smaller"),
    ],
)
def test_an_unsupported_stage_is_refused_before_weights_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, draft: str | None, stage: str, message: str
) -> None:
    monkeypatch.setattr(Loader, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        load_bundle(pair.target, draft, stage, None, "draft", Loader(1))


def test_one_object_cannot_be_two_models(pair: Pair) -> None:
    target, draft = (load_model(path, n_threads=1) for path in (pair.target, pair.draft))
    for draft_given, stage, message in ((target, None, "target and draft"), (draft, draft, "draft and stage")):
        with pytest.raises(ValueError, match=f"{message} are the same object"):
            load_bundle(target, draft_given, stage, pair.tokenizer, "draft", Loader(1))


def test_only_a_bundle_of_named_models_can_choose_its_threads(pair: Pair) -> None:
    named = load_bundle(pair.target, pair.draft, "lookup", pair.tokenizer, "none", Loader())
    assert named.can_choose_threads and list(named.models) == ["target", "draft"]
    assert named.checkpoint and not named.checkpoint.tensors  # their memory is free again
    for target, loader in ((pair.target, Loader(1)), (load_model(pair.target), Loader())):
        assert not load_bundle(target, None, None, pair.tokenizer, "none", loader).can_choose_threads


def test_a_draft_draws_no_id_that_the_target_does_not_have(pair: Pair) -> None:
    source = make_resolver(pair).resolve("draft", pair.draft)
    assert source.model
    sampler = Sampler(source.vocabulary.n_target, Sampling(), source.vocabulary.n_common)
    logits = source.model.new_cache().forward([1])[0].copy()
    logits[:] = 0
    assert all(sampler.draw(sampler.new_probs(), logits, 0, i) < source.vocabulary.n_common for i in range(50))


@pytest.mark.parametrize("arguments", [{"n_threads": 0}, {"n_threads": 10**6}, {"kv": "fp16"}])
def test_a_loader_refuses_bad_arguments(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))} is .*; expected"):
        Loader(**arguments)  # type: ignore[arg-type]


def test_a_loader_reports_progress(pair: Pair) -> None:
    fractions: list[tuple[str, float]] = []
    load_bundle(pair.target, None, None, pair.tokenizer, "none", Loader(1, "f16", lambda *args: fractions.append(args)))
    assert fractions and fractions[-1] == (Path(pair.target).name, 1.0)


def test_prefill_progress_is_weighted_by_bytes_of_models_that_can_hold_the_prompt(pair: Pair) -> None:
    large, small = ModelConfig(64, 172, 4, 8, 4, 300, 300), ModelConfig(64, 172, 1, 8, 4, 290, 300)
    models = [random_model(large), random_model(small), random_model(replace(small, seq_len=10))]
    tokens, vocabulary = [*range(200, 300)], SharedVocabulary(300, 300)
    tokenizer = load_bundle(pair.target, None, None, pair.tokenizer, "draft", Loader(1)).tokenizer
    bundle = ModelBundle(models[0], DraftSource(models[1], vocabulary), DraftSource(models[2], vocabulary), tokenizer)
    autotuner, prefixes = Autotuner(bundle), PrefixCache(bundle, 1)

    def prefill() -> tuple[Sequence, list[float]]:
        """Run the prefill of a sequence; return the sequence, and the fractions that its events report."""
        request = GenerationRequest(tokens, 0, Sampling())
        sequence = Sequence(request, tokenizer)
        events = Scheduler(autotuner, SpeculativeSettings(4), prefixes).stream(sequence)
        return sequence, [event.fraction for event in events if isinstance(event, PrefillProgress)]

    sequence, fractions = prefill()
    assert fractions[0] == 0 and fractions[-1] == 1 and fractions == sorted(fractions)
    assert [cache.n_tokens for cache in sequence.slot.caches.all] == [99, 99, 0]
    first_part = models[0].weights.n_bytes / (models[0].weights.n_bytes + models[1].weights.n_bytes)
    assert any(abs(fraction - first_part) < 1e-9 for fraction in fractions)
    assert prefill()[1] == []
