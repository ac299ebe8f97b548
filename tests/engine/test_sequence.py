"""A sequence: when its draft model reads the prompt."""

import pytest

from specdec import SpeculativeDecoder
from specdec.engine import sequence
from specdec.verification import VerifyMode
from tests.conftest import Pair
from tests.tools.decode import get_steps

PROMPT = [1 + i % 90 for i in range(40)]


@pytest.mark.parametrize(
    ("min_tokens", "verify", "is_deferred"), [(30, "coupled", True), (50, "coupled", False), (30, "rejection", False)]
)
def test_a_draft_model_reads_a_long_prompt_after_the_first_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, min_tokens: int, verify: VerifyMode, is_deferred: bool
) -> None:
    monkeypatch.setattr(sequence, "MIN_DEFERRED_TOKENS", min_tokens)
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=3, verify=verify, n_threads=1)
    steps = get_steps(decoder.stream(PROMPT, 12))
    assert [bool(step.draft_tokens) for step in steps[:4]] == ([False, True, True, True] if is_deferred else [True] * 4)
    if verify == "coupled":
        alone = SpeculativeDecoder(pair.target, None, pair.tokenizer, n_threads=1)
        assert [token for step in steps for token in step.tokens] == alone.generate(PROMPT, 12).tokens
