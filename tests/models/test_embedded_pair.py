"""The embedded pair: small, in llama2.c's formats, with a draft that pays."""

import math

import pytest

from specdec import SpeculativeDecoder
from specdec.loaders import load_checkpoint
from specdec.loaders.model_paths import BUNDLED_MODELS_DIR, DEFAULT_DRAFT, DEFAULT_TARGET

PROMPTS = ("Once upon a time", "The little dog", "Tom and Mia", "One day, a bird", "Sara had a big")


def test_folder_is_below_32_megabytes():
    files = [
        BUNDLED_MODELS_DIR / "tok1024.bin",
        DEFAULT_TARGET,
        DEFAULT_DRAFT,
        BUNDLED_MODELS_DIR / "README.md",
        BUNDLED_MODELS_DIR / "train.py",
    ]
    assert sum(path.stat().st_size for path in files) < 32e6


def test_draft_has_tenth_of_target_weights_and_shorter_context():
    target, draft = (load_checkpoint(path) for path in (DEFAULT_TARGET, DEFAULT_DRAFT))
    size = [sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()) for checkpoint in (target, draft)]
    assert 6e6 <= size[0] <= 12e6
    assert size[1] <= size[0] / 10
    assert target.config.seq_len >= 512 > draft.config.seq_len
    assert target.config.n_kv_heads < target.config.n_heads


@pytest.mark.parametrize(("temperature", "at_least"), [(0.0, 0.8), (1.0, 0.7)])
def test_single_draft_token_is_mostly_accepted(temperature, at_least):
    """With gamma 1 every proposal counts alone: measured 0.88 and 0.77 over 50 held-out prompts, here over 5 other prompts."""
    decoder = SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, gamma=1)
    accepted = drafted = 0
    for seed, prompt in enumerate(PROMPTS, 1):
        statistics = decoder.generate(prompt, 200, temperature=temperature, seed=seed).statistics
        accepted += statistics.n_accepted
        drafted += statistics.n_drafted
    assert drafted > 300
    assert accepted / drafted > at_least
