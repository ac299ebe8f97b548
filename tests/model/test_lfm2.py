"""LFM2: the state of its convolutions through rejections, interruptions, other sequences and long ones; decoders reject trees."""

from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.bench.sweep import make_settings
from specdec.draft.draft_length import FixedLength
from specdec.draft.lookup import LookupDrafter
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.mixer_config import DeltaNetConfig, ShortConvConfig
from specdec.model.kv_cache import INITIAL_CAPACITY
from specdec.model.model import Model
from specdec.model_config import LayerConfig
from specdec.sampling import Sampling
from specdec.verification import VERIFIERS
from tests.tools.configs import make_config, replace_config
from tests.tools.decode import FakeDrafter, decode, get_tokens
from tests.tools.family_models import make_cache, make_model
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, interrupt_after, random_model, random_tokens

CONFIG = make_config(40, 50, 4, 5, 1, 105, 700, False, head_dim=12, qk_norm=True, conv=((0, 1, 3), ShortConvConfig(4, True)))
CONV = LayerConfig(mixer=ShortConvConfig(4, True))
INVALID_CONFIGS = [
    ({"layers": (CONV, LayerConfig(mixer=DeltaNetConfig(1, 1, 4, 4)), CONV, LayerConfig())}, "layers have 2 kinds of mixers"),
    ({"layers": (CONV, LayerConfig(mixer=ShortConvConfig(4)), CONV, LayerConfig())}, "layers have 2 kinds of mixers"),
    ({"layers": (CONV,) * 4}, "all layers have mixers"),
    ({"layers": (), "mixer": ShortConvConfig()}, "all layers have mixers"),
    ({"layers": (CONV,) * 3}, "layers has 3 entries"),
    ({"conv": ((1,), ShortConvConfig(0))}, "mixer's kernel_size is 0"),
    ({"conv": ((1,), ShortConvConfig(17))}, "mixer's kernel_size is 17"),
]


@pytest.mark.parametrize(("changes", "words"), INVALID_CONFIGS, ids=str)
def test_invalid_layers_are_rejected(changes, words):
    weights = make_model(CONFIG).weights
    with pytest.raises(ValueError, match=words):
        Model(replace_config(CONFIG, **changes), weights)


def test_rewind_within_a_pass_is_free_and_beyond_reruns():
    """Measured from the greatest length so far; bits match those of a fresh model, for all thread counts."""
    rng, tokens = np.random.default_rng(1), random_tokens(CONFIG, 150)
    caches, fresh = [make_cache(CONFIG, n_threads) for n_threads in THREAD_COUNTS], make_cache(CONFIG)
    for cache in caches:
        cache.forward(tokens)
    farthest, n_free = len(tokens), 0
    for back in (0, 1, 2, 3, MAX_BATCH_TOKENS - 1, MAX_BATCH_TOKENS, 17, 5, MAX_BATCH_TOKENS + 1, 1, 90, 4, 63, 64, 0, 30):
        kept = tokens[: farthest - back]
        tokens = [*kept, *rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 70))).tolist()]
        is_free = farthest - len(kept) <= MAX_BATCH_TOKENS
        n_free += is_free
        assert {cache.count_prefill_tokens(tokens) + 1 for cache in caches} == {len(tokens) - is_free * len(kept)}
        logits = [cache.forward(tokens, 1).copy() for cache in caches]
        fresh.forward([], 0)
        for each in logits:
            np.testing.assert_array_equal(each, fresh.forward(tokens, 1))
        farthest = max(farthest * is_free, len(tokens))
    assert n_free > 8


def make_partly_wrong_drafter(sequence):
    """Return a drafter of a random number of right tokens, then wrong ones, and the set of the numbers of wrong ones."""
    rng, n_wrong = np.random.default_rng(2), set()

    def propose(tokens, policy):
        n = int(rng.integers(0, policy.max_tokens + 1))
        expected = sequence[len(tokens) : len(tokens) + policy.max_tokens]
        n_wrong.add(len(expected[n:]))
        return [*expected[:n], *((token + 1) % CONFIG.vocab_size for token in expected[n:])]

    return FakeDrafter(propose), n_wrong


@pytest.mark.parametrize("gamma", [3, 63])
def test_output_equals_plain_output_for_any_rejections(gamma):
    prompt, cache = random_tokens(CONFIG, 5), make_cache(CONFIG)
    verifier = VERIFIERS["coupled"](CONFIG.vocab_size, Sampling(1.0, seed=4))

    def generate(drafter):
        return [*prompt, *get_tokens(decode(cache, drafter, verifier, prompt, 400, FixedLength(gamma), {}))]

    plain = generate(None)
    drafter, n_wrong = make_partly_wrong_drafter(plain)
    assert generate(drafter) == plain and len(plain) > INITIAL_CAPACITY
    assert len(n_wrong) > min(gamma, 8)
    assert generate(LookupDrafter({})) == plain


def test_interrupted_pass_keeps_convolution_inputs():
    tokens, wrong, cache = random_tokens(CONFIG, 200), random_tokens(CONFIG, 200, seed=8), make_cache(CONFIG)
    expected = make_cache(CONFIG).forward(tokens, 64).copy()
    cache.forward(tokens[:100])
    for n in (1, 2, 64, 3, 40):
        with interrupt_after(cache):
            cache.forward([*tokens[:100], *wrong[:n]])
        assert cache.n_tokens == 100 and cache.count_prefill_tokens(tokens) == 99
    np.testing.assert_array_equal(cache.forward(tokens, 64), expected)


def test_decoder_rejects_trees_or_omits_them(tokenizer_path):
    """Also if only the draft has a recurrent state, and in a sweep."""
    config = replace_config(CONFIG, vocab_size=300, conv=((0, 1, 3), ShortConvConfig()))
    target, other = (make_model(config) for _ in range(2))
    llama = random_model(replace(CONFIGS["odd"], vocab_size=300))
    for models, role in (((target, other), "target"), ((llama, target), "draft")):
        error = f'^trees are not supported by the {role}: its recurrent state holds one sequence; leave out tree "on"$'
        with pytest.raises(ValueError, match=error):
            SpeculativeDecoder(*models, tokenizer_path, tree="on")
    pair, alone = SpeculativeDecoder(target, llama, tokenizer_path, tree="auto"), SpeculativeDecoder(target, None, tokenizer_path)
    assert len({tuple(decoder.generate("one", 20, temperature=0).tokens) for decoder in (pair, alone)}) == 1
    settings, notes = make_settings(pair, ["auto"])
    assert "trees are left out" in " ".join(notes) and not any("trees" in setting.name for setting in settings)
