"""LFM2: what its convolutions remember of a text, through rejections, breaks, other texts and long ones; trees are refused."""

from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.bench.sweep import settings_of
from specdec.config import ConvConfig, DeltaConfig, LayerConfig
from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Step, decode
from specdec.kernels import MAX_TOKENS
from specdec.model.registry import architecture_of
from specdec.model.transformer import FIRST_POSITIONS, Transformer
from specdec.quant import FP32, INT8
from specdec.sampling import Sampling
from specdec.verification import VERIFIERS, Draft
from tests.model.test_architectures import random_tensors
from tests.tools.configs import changed, made
from tests.tools.random_models import CONFIGS, THREADS, broken_off, continuation, random_model, tokens_for

CONFIG = made(40, 50, 4, 5, 1, 105, 700, False, head_dim=12, qk_norm=True, conv=((0, 1, 3), ConvConfig(4, True)))
CONV = LayerConfig(mixer=ConvConfig(4, True))
FLAWS = [
    ({"layers": (CONV, LayerConfig(mixer=DeltaConfig(1, 1, 4, 4)), CONV, LayerConfig())}, "layers have 2 kinds of mixers"),
    ({"layers": (CONV, LayerConfig(mixer=ConvConfig(4)), CONV, LayerConfig())}, "layers have 2 kinds of mixers"),
    ({"layers": (CONV,) * 4}, "all layers have mixers"),
    ({"layers": (), "mixer": ConvConfig()}, "all layers have mixers"),
    ({"layers": (CONV,) * 3}, "there are 3 layers"),
    ({"conv": ((1,), ConvConfig(0))}, "mixer's n_taps is 0"),
    ({"conv": ((1,), ConvConfig(17))}, "mixer's n_taps is 17"),
]


def model_of(n_threads=1, kind=FP32):
    return Transformer(CONFIG, architecture_of(CONFIG).pack(CONFIG, random_tensors(CONFIG), kind), n_threads)


@pytest.mark.parametrize(("changes", "words"), FLAWS, ids=str)
def test_layers_that_are_none_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Transformer(changed(CONFIG, **changes), model_of().weights)


def test_a_text_goes_back_by_a_pass_for_nothing_and_farther_from_its_beginning():
    """From the farthest that it got; with the bits of a model that has run no other text, on either number of threads."""
    rng, tokens = np.random.default_rng(1), tokens_for(CONFIG, 150)
    models, fresh = [model_of(n_threads) for n_threads in THREADS], model_of()
    for model in models:
        model.forward(tokens)
    farthest, n_free = len(tokens), 0
    for back in (0, 1, 2, 3, MAX_TOKENS - 1, MAX_TOKENS, 17, 5, MAX_TOKENS + 1, 1, 90, 4, 63, 64, 0, 30):
        kept = tokens[: farthest - back]
        tokens = [*kept, *rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 70))).tolist()]
        is_free = farthest - len(kept) <= MAX_TOKENS
        n_free += is_free
        assert {model.unread(tokens) + 1 for model in models} == {len(tokens) - is_free * len(kept)}
        logits = [model.forward(tokens, 1).copy() for model in models]
        fresh.forward([], 0)
        for each in logits:
            np.testing.assert_array_equal(each, fresh.forward(tokens, 1))
        farthest = max(farthest * is_free, len(tokens))
    assert n_free > 8


class Guesses:
    """Of a text as many tokens as chance has it, then wrong ones."""

    def __init__(self, text):
        self.text, self.rng, self.rejected = text, np.random.default_rng(2), set()

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy):
        n = int(self.rng.integers(0, policy.max_tokens + 1))
        expected = self.text[len(tokens) : len(tokens) + policy.max_tokens]
        self.rejected.add(len(expected[n:]))
        return Draft([*expected[:n], *((token + 1) % CONFIG.vocab_size for token in expected[n:])])


@pytest.mark.parametrize("gamma", [3, 63])
def test_the_text_is_the_plain_one_however_much_of_a_proposal_is_rejected(gamma):
    prompt, verifier, model = tokens_for(CONFIG, 5), VERIFIERS["coupled"](CONFIG.vocab_size, Sampling(1.0, seed=4)), model_of()

    def text(drafter):
        events = decode(model, drafter, verifier, prompt, 400, FixedLength(gamma), {})
        return [*prompt, *(token for event in events if isinstance(event, Step) for token in event.tokens)]

    plain = text(None)
    drafter = Guesses(plain)
    assert text(drafter) == plain and len(plain) > FIRST_POSITIONS
    assert len(drafter.rejected) > min(gamma, 8)
    assert text(NgramDrafter({})) == plain


def test_a_pass_that_was_broken_off_leaves_the_text_its_inputs():
    tokens, wrong, model = tokens_for(CONFIG, 200), tokens_for(CONFIG, 200, seed=8), model_of()
    expected = model_of().forward(tokens, 64).copy()
    model.forward(tokens[:100])
    for n in (1, 2, 64, 3, 40):
        with broken_off(model):
            model.forward([*tokens[:100], *wrong[:n]])
        assert model.n_held == 100 and model.unread(tokens) == 99
    np.testing.assert_array_equal(model.forward(tokens, 64), expected)


def test_texts_take_turns():
    one, other, model = tokens_for(CONFIG, 150), tokens_for(CONFIG, 90, seed=8), model_of()
    expected = {len(text): model_of().forward(text, 3).copy() for text in (one, other)}
    for text in (one, other, one, [*one[:20], *other[20:]], other, one):
        logits = model.forward(text, 3)
        if text in (one, other):
            np.testing.assert_array_equal(logits, expected[len(text)])


def test_a_tree_is_refused_and_a_draft_of_another_family_may_draft_for_it():
    target, sampling = model_of(), Sampling(0.8, seed=3)
    with pytest.raises(ValueError, match=r"^this model runs no trees: its state is that of one text$"):
        target.forward_tree([1, 2], [3], [-1])
    plain, _ = continuation(target, None, sampling, max_tokens=60)
    for draft in (random_model(CONFIGS["odd"]), model_of(kind=INT8)):
        assert continuation(target, draft, sampling, gamma=7, max_tokens=60)[0] == plain


def test_a_decoder_refuses_trees_or_does_without_them(tokenizer_path):
    """Also of a draft alone, and in a sweep."""
    config = changed(CONFIG, vocab_size=300, conv=((0, 1, 3), ConvConfig()))
    target, other = (Transformer(config, architecture_of(config).pack(config, random_tensors(config)), 1) for _ in range(2))
    llama = random_model(replace(CONFIGS["odd"], vocab_size=300))
    for models, whose in (((target, other), "target"), ((llama, target), "draft")):
        with pytest.raises(ValueError, match=f'^the {whose} runs no trees: its state is that of one text; leave out tree "on"$'):
            SpeculativeDecoder(*models, tokenizer_path, tree="on")
    pair, alone = SpeculativeDecoder(target, llama, tokenizer_path, tree="auto"), SpeculativeDecoder(target, None, tokenizer_path)
    assert len({tuple(decoder.generate("one", 20, temperature=0).tokens) for decoder in (pair, alone)}) == 1
    settings, notes = settings_of(pair, ["auto"])
    assert "trees are left out" in " ".join(notes) and not any("trees" in setting.name for setting in settings)


@pytest.mark.parametrize("n_threads", THREADS)
def test_texts_that_share_passes_have_inputs_of_their_own(n_threads):
    """Whatever the others go back by."""
    rng, seats = np.random.default_rng(3), [model_of(n_threads)]
    seats += [seats[0].seat() for _ in range(2)]
    texts, fresh = [tokens_for(CONFIG, 20 + i, seed=i) for i in range(3)], model_of()
    for _ in range(25):
        jobs = []
        for i in rng.permutation(3)[: int(rng.integers(1, 4))]:
            kept = texts[i][: max(len(texts[i]) - int(rng.integers(0, 12)), 1)]
            texts[i] = [*kept, *rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 20))).tolist()]
            jobs.append((seats[i], texts[i], int(rng.integers(1, 6))))
        for (_, text, n_logits), logits in zip(jobs, Transformer.forward_together(jobs), strict=True):
            fresh.forward([], 0)
            np.testing.assert_array_equal(logits, fresh.forward(text, n_logits))
