"""The weight format of a draft, by its size and by request."""

import re
from dataclasses import replace

import pytest

from specdec.argument_checks import CheckpointWarning
from specdec.draft import settings
from specdec.draft.model_bundle import load_bundle, warn_of_no_effect
from specdec.draft.settings import parse_quantize
from specdec.loaders.model_loader import Loader, load_model, open_checkpoint
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.quant import DRAFT_INT4, INT3, INT8


@pytest.mark.parametrize(
    ("quantize", "max_int8_bytes", "max_int4_bytes", "max_share", "expected"),
    [
        ("draft", 1 << 30, 0, 0.85, INT8),
        ("draft", 0, 1 << 30, 0.85, DRAFT_INT4),
        ("draft", 0, 0, 0.85, INT3),
        ("draft", 0, 0, 0.01, None),
        ("none", 0, 0, 0.85, None),
        ("draft=int8", 0, 0, 0.85, INT8),
        ("draft=int4", 1 << 30, 0, 0.85, DRAFT_INT4),
        ("draft=int3", 1 << 30, 0, 0.85, INT3),
        ("target", 0, 0, 0.85, None),
    ],
)
def test_a_larger_draft_has_fewer_bits_where_that_saves_bytes(
    monkeypatch: pytest.MonkeyPatch, quantize: str, max_int8_bytes: int, max_int4_bytes: int, max_share: float, expected: object
) -> None:
    monkeypatch.setattr(settings, "MAX_CACHED_BYTES", max_int8_bytes)
    monkeypatch.setattr(settings, "MAX_INT4_BYTES", max_int4_bytes)
    monkeypatch.setattr(settings, "MAX_DRAFT_SHARE", max_share)
    assert parse_quantize(quantize).choose_draft_format(open_checkpoint("draft", DEFAULT_DRAFT)) is expected


def test_a_head_is_int4_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_CACHED_BYTES", "MAX_INT4_BYTES"):
        monkeypatch.setattr(settings, name, 0)
    checkpoint = open_checkpoint("draft", DEFAULT_DRAFT)
    head = replace(checkpoint, config=replace(checkpoint.config, head="eagle"))
    assert parse_quantize("draft").choose_draft_format(head) is DRAFT_INT4


def test_a_requested_format_without_effect_is_reported() -> None:
    checkpoint, model = open_checkpoint("draft", DEFAULT_DRAFT), load_model(DEFAULT_DRAFT)
    with pytest.warns(CheckpointWarning, match="stays fp32: int8 would not make this draft much smaller"):
        warn_of_no_effect("draft", INT8, checkpoint, model.weights)


@pytest.mark.parametrize(("draft", "reason"), [("lookup", "it has no weights"), (None, "it is a loaded model")])
def test_a_format_of_a_draft_that_is_not_loaded_is_reported(draft: str | None, reason: str) -> None:
    with pytest.warns(CheckpointWarning, match=f"int8 weights were requested for the draft, but {reason}"):
        load_bundle(DEFAULT_TARGET, draft or load_model(DEFAULT_DRAFT), None, None, "draft=int8", Loader())


def test_the_memory_of_a_draft_is_summed_up() -> None:
    bundle = load_bundle(DEFAULT_TARGET, DEFAULT_DRAFT, None, None, "draft", Loader())
    assert re.fullmatch(r"int8, 0\.7 MB, loaded in \d+\.\d s", bundle.draft_summary)
    assert load_bundle(DEFAULT_TARGET, "lookup", None, None, "draft", Loader()).draft_summary == ""
