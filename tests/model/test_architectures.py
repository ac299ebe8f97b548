"""Families of models: each flag of a config against a float64 oracle, and bit for bit where bits are promised."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.config import Config, ConvConfig, ExpertsConfig, InputsConfig, RopeScaling, YarnScaling
from specdec.draft.model import ModelDrafter
from specdec.layers.rope import fill_tables, positions_a_radian
from specdec.model.registry import architecture_of
from specdec.model.transformer import FIRST_POSITIONS, Transformer
from specdec.quant import FP32, INT8
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES
from specdec.sampling import Sampler, Sampling
from specdec.verification import CoupledVerifier
from tests.tools import reference
from tests.tools.configs import changed, made
from tests.tools.hf_folders import full_layers, gemma4
from tests.tools.random_models import END_MARKS, THREADS, begun, continuation, run_in_blocks, tokens_for

LLAMA_3 = RopeScaling(8.0, 1.0, 4.0, 40)  # of so few positions that pairs of all three sorts are there
LONGROPE = {"rope_dim": 8, "rope_divisors": (1.0, 1.2, 1.4, 1.6), "long_divisors": (1.0, 3.0, 5.0, 7.0), "n_short": 20}
YARN = {"rope_theta": 100.0, "rope_scaling": YarnScaling(4.0, 19, 2.0), "query_scale": 0.7, "query_span": 19}
ALL = {"wo_bias": True, "qkv_bias": True, "mlp_bias": True, "qk_norm": True}
GEMMA = {
    "norms": "around",
    "activation": "gelu",
    "qk_norm": True,
    "rope_theta": 100.0,
    "embedding_scale": 6.3,
}
GEMMA |= {"attention_scale": 0.4}
GEMMA_LAYERS = full_layers((2,), 4, rope_theta=1e6, rope_divisors=(8.0,) * 12)

# dim, hidden, layers, heads, kv heads, vocab, seq_len
FAMILIES = {
    "llama 3": made(40, 50, 2, 4, 2, 105, 400, head_dim=12, rope_theta=5e5, rope_scaling=LLAMA_3, norm_eps=1e-6),
    "llama with biases": made(36, 33, 2, 3, 1, 105, 400, wo_bias=True, qkv_bias=True, mlp_bias=True),
    "mistral": made(64, 96, 2, 4, 2, 105, 400, shared_classifier=False, head_dim=8, window=19),
    "qwen2": made(96, 64, 2, 6, 2, 105, 400, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    "qwen3": made(64, 96, 2, 2, 1, 105, 400, head_dim=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
    "qwen3, heads across strips": made(64, 40, 2, 4, 2, 105, 400, head_dim=80, qk_norm=True),
    "qwen3, heads of 12": made(40, 50, 2, 5, 5, 105, 400, head_dim=12, qk_norm=True),
    "everything": made(40, 50, 2, 6, 3, 105, 400, False, head_dim=24, window=30, rope_scaling=LLAMA_3, **ALL),
    "gemma": made(40, 50, 4, 4, 2, 105, 400, head_dim=24, window=13, layers=GEMMA_LAYERS, **GEMMA),
    "phi 3": made(40, 50, 2, 4, 2, 105, 400, head_dim=12, rope_scale=1.2, **LONGROPE),
    "ministral 3": made(40, 50, 2, 4, 2, 105, 400, head_dim=20, rope_scale=1.1, **YARN),
    "lfm2": made(64, 96, 3, 4, 2, 105, 400, qk_norm=True, conv=((0, 2), ConvConfig())),
    "lfm2, odd": made(
        40, 50, 3, 5, 1, 105, 400, False, norm_eps=1e-6, head_dim=12, qk_norm=True, conv=((1,), ConvConfig(4, True))
    ),
    "olmo2": made(40, 50, 2, 4, 2, 105, 400, False, norms="behind", qk_norm="whole"),
    "all norms of the whole": made(40, 50, 2, 5, 1, 105, 400, head_dim=12, norms="around", qk_norm="whole", qkv_bias=True),
    "experts": made(40, 50, 3, 4, 2, 105, 400, False, experts=ExpertsConfig(5, 2, 30, False, (1,))),
    "experts, one shared": made(48, 1, 2, 4, 4, 105, 400, qk_norm="whole", experts=ExpertsConfig(8, 3, 20, shared_dim=35)),
    "gpt-oss": made(
        40, 50, 3, 6, 2, 105, 400, False, head_dim=12, window=17, layers=full_layers((1,), 3), qkv_bias=True, wo_bias=True,
        sinks=True, experts=ExpertsConfig(5, 3, 20, limit=0.9, alpha=1.702),
    ),
    "gemma 4": made(
        40, 50, 6, 4, 2, 105, 400, False, head_dim=12, inputs=InputsConfig(9, 110), logit_cap=2.0,
        **gemma4(40, "wawwaw", 3, 20, 13, 3, 70) | {"attention_scale": 0.2},  # else a last bit makes other texts
    ),
    "gemma 4, experts": made(
        40, 50, 3, 4, 2, 105, 400, False, head_dim=12, inputs=InputsConfig(20, 105),
        experts=ExpertsConfig(5, 2, 30, is_beside=True),
        **gemma4(40, "waw", 1, 24, 13, 4, 70) | {"attention_scale": 0.2},
    ),
    "gemma 4, values that are keys": made(
        36, 50, 3, 6, 3, 105, 400, head_dim=8, **gemma4(36, "waa", 1, 20, 19, 2, n_kv_heads=1, values_are_keys=True)
    ),
    "experts of sigmoids": made(
        40, 50, 3, 5, 1, 105, 400, False, head_dim=12, conv=((1,), ConvConfig(4, True)),
        experts=ExpertsConfig(4, 2, 24, True, (0,), True, True, 1.5, 17, True),
    ),
    "experts of sigmoids, as they are": made(40, 1, 1, 5, 1, 105, 400, experts=ExpertsConfig(3, 3, 33, False, (), True)),
    "gpt2": made(48, 96, 2, 4, 4, 105, 400, architecture="gpt2"),
    "gpt2, odd": made(40, 50, 2, 5, 5, 64, 400, False, architecture="gpt2", norm_eps=1e-6),
}  # fmt: skip


def random_tensors(config: Config) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = architecture_of(config).shapes(config)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 5 for name, shape in shapes.items()}
    norms = [name for name in shapes if name.startswith(("rms", "ln")) or name.endswith("norm")]
    return tensors | {name: tensors[name] + 1 for name in norms if not name.endswith("bias")}


def model_of(config: Config, n_threads: int = 1, kind=FP32, n_positions: int | None = None) -> Transformer:
    weights = architecture_of(config).pack(config, random_tensors(config), kind)
    return Transformer(config, weights, n_threads, n_positions)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_oracle(name: str) -> None:
    config = FAMILIES[name]
    tokens = tokens_for(config, 60)
    expected = reference.forward(config, random_tensors(config), tokens)
    # float32 sums of some hundred products of order 1; a wrong formula is off by order 1
    np.testing.assert_allclose(run_in_blocks(model_of(config), tokens, 7), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_family_matters_to_the_oracle(name: str) -> None:
    """So that the test above cannot pass a flag that both sides forgot."""
    config = FAMILIES[name]
    tokens, tensors = tokens_for(config, 3), random_tensors(config)
    expected = reference.forward(config, tensors, tokens)
    for tensor in tensors:
        if (config.architecture, tensor) == ("gpt2", "bk"):
            continue  # adds the same to all scores of a query that nothing turns
        own = tensors[tensor]
        other = reference.forward(config, tensors | {tensor: own[..., ::-1] if own.shape[-1] > 1 else 2 * own}, tokens)
        assert np.abs(other - expected).max() > 1e-3 * np.abs(expected).max(), tensor


@pytest.mark.parametrize("kind", [FP32, INT8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_the_batch_or_the_threads_bit_for_bit(name: str, kind) -> None:
    config = FAMILIES[name]
    tokens = tokens_for(config, 60)
    alone = run_in_blocks(model_of(config, kind=kind), tokens, 1)
    for n_threads in THREADS:
        model = model_of(config, n_threads, kind)
        for block in (2, 5, 8, 17, 60):
            np.testing.assert_array_equal(run_in_blocks(model, tokens, block).view(np.int32), alone.view(np.int32))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_that_outgrows_its_buffers_keeps_its_logits(name: str) -> None:
    config = FAMILIES[name]
    tokens = tokens_for(config, FIRST_POSITIONS + 40)
    grown, at_once = model_of(config), model_of(config)
    for end in (1, FIRST_POSITIONS - 1, FIRST_POSITIONS, FIRST_POSITIONS + 1, len(tokens)):
        logits = grown.forward(tokens[:end], 1).copy()
    np.testing.assert_array_equal(at_once.forward(tokens, 1), logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_the_targets_own_whatever_drafts_for_it(name: str) -> None:
    target, draft = model_of(FAMILIES[name]), model_of(FAMILIES[name], kind=INT8)
    sampling = Sampling(0.8, seed=3)
    plain, _ = continuation(target, None, sampling, max_tokens=40)
    drafted, statistics = continuation(target, draft, sampling, max_tokens=40)
    assert drafted == plain
    assert statistics.n_accepted > 0
    assert (
        ModelDrafter(draft, Sampler(draft.config.vocab_size, sampling), CoupledVerifier.draft_noise, END_MARKS)
        .propose([1, 5], begun(3))
        .tokens
    )


@pytest.mark.parametrize("name", ["everything", "gemma", "gpt2", "gpt-oss", "all norms of the whole"])
def test_texts_that_share_passes_get_the_logits_that_they_would_get_alone(name: str) -> None:
    config = FAMILIES[name]
    first, alone = model_of(config, max(THREADS)), model_of(config)
    seats, texts = [first, first.seat()], [tokens_for(config, n, n) for n in (70, 40)]
    for ends in ((30, 10), (33, 40), (70, 41)):
        jobs = [(seat, text[:end], 3) for seat, text, end in zip(seats, texts, ends, strict=True)]
        for logits, (_, tokens, n_logits) in zip(Transformer.forward_together(jobs), jobs, strict=True):
            np.testing.assert_array_equal(logits, alone.forward(tokens, n_logits))


POISON = 7  # the token whose values are not finite somewhere inside


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", ["everything", "gemma", "lfm2, odd", "gpt2, odd", "olmo2", "gpt-oss", "experts of sigmoids"])
def test_what_is_not_finite_goes_through_every_operation(name: str, value: float) -> None:
    """Of whichever tensor, in logits that the oracle has no number for; of experts those that tokens go through."""
    config = FAMILIES[name]
    text = [1] * POISON + [POISON] * 3  # the token at the position of its number
    sound = random_tensors(config)
    for tensor in sound:
        tensors = sound | {tensor: sound[tensor].copy()}
        row = POISON if tensor in ("tok_emb", "pos_emb", "wcls") else 0
        tensors[tensor].reshape(-1, sound[tensor].shape[-1])[row, -1] = value
        model = Transformer(config, architecture_of(config).pack(config, tensors), 1)
        with np.errstate(all="ignore"):
            lost = ~np.isfinite(reference.forward(config, tensors, text))
        assert lost.any() or "experts" in tensor or "router" in tensor, tensor
        assert not np.isfinite(model.forward(text, len(text))[lost]).any(), tensor


@pytest.mark.parametrize(
    "name", ["gpt2, odd", "qwen3, heads across strips", "llama with biases", "gemma", "lfm2, odd", "olmo2", "gpt-oss"]
)
def test_a_token_that_is_not_finite_leaves_nothing_behind(name: str) -> None:
    config = FAMILIES[name]
    tensors = random_tensors(config)
    tensors["tok_emb"][POISON] *= 1e30  # whose squares overflow
    model = Transformer(config, architecture_of(config).pack(config, tensors), 1)
    text = [token for token in tokens_for(config, 30) if token != POISON]
    expected = model.forward(text, len(text)).copy()
    assert np.isfinite(expected).all()
    assert not np.isfinite(model.forward([*text[:5], POISON], 1)).any()
    logits = model.forward([*text[:12], POISON, *text[12:14]], 4)
    np.testing.assert_array_equal(logits[0], expected[11])
    assert not np.isfinite(logits[1:]).any()
    np.testing.assert_array_equal(model.forward(text, len(text)), expected)


# Positions


@pytest.mark.parametrize(("seq_len", "window"), [(20, 12), (12, 20), (12, 0)])
def test_beyond_its_seq_len_a_model_sees_what_its_window_or_its_seq_len_holds(seq_len: int, window: int) -> None:
    config = changed(FAMILIES["mistral"], seq_len=seq_len, window=window)
    tokens = tokens_for(config, 60)
    expected = reference.forward(config, random_tensors(config), tokens, 12)
    got = run_in_blocks(model_of(config, n_positions=64), tokens, 7)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_llama_3_scales_slow_pairs_alone() -> None:
    config = changed(FAMILIES["llama 3"], head_dim=128, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192))
    np.testing.assert_allclose(1 / positions_a_radian(config), reference.frequencies(config), rtol=1e-12)
    ratio = positions_a_radian(config) / positions_a_radian(changed(config, rope_scaling=None))
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(32) and ((ratio > 1.01) & (ratio < 31)).any()


@pytest.mark.parametrize("head_dim", [2, 12, 80])
def test_the_tables_of_a_long_text_are_those_of_a_short_one_and_more(head_dim: int) -> None:
    config = replace(FAMILIES["llama 3"], head_dim=head_dim)
    short, long = ([zeros(n, head_dim + LANES) for _ in range(2)] for n in (100, 9000))
    fill_tables(config, *short)
    fill_tables(config, *long)
    np.testing.assert_array_equal([table[:100] for table in long], short)
    angles = 8999 * reference.frequencies(config)
    np.testing.assert_allclose(long[0][8999, 0:head_dim:2], np.cos(angles), rtol=0, atol=1e-7)
    np.testing.assert_allclose(long[1][8999, 1:head_dim:2], np.sin(angles), rtol=0, atol=1e-7)
    np.testing.assert_array_equal(long[1][:, 0:head_dim:2], -long[1][:, 1:head_dim:2])


def test_a_model_whose_positions_are_learned_ends_with_them() -> None:
    config = replace(FAMILIES["gpt2"], seq_len=50)
    model = model_of(config, n_positions=400)
    assert model.n_positions == 50
    tokens = tokens_for(config, 51)
    model.forward(tokens[:50])
    with pytest.raises(ValueError, match="51 tokens do not fit 50 positions"):
        model.forward(tokens)


def test_a_context_that_is_not_used_takes_no_memory() -> None:
    config = replace(FAMILIES["llama 3"], seq_len=131_072)
    model, short = model_of(config), model_of(replace(config, seq_len=FIRST_POSITIONS))
    assert model.n_positions == 131_072
    taken, needed = (sum(getattr(array, "nbytes", 0) for array in vars(m._buffers).values()) for m in (model, short))
    assert taken == needed
    assert model.text_bytes(131_072) > 131_072 * 2 * 4 * config.n_layers * config.kv_dim


# Configs


def test_an_architecture_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"'mamba'.*llama.*gpt2"):
        architecture_of(made(8, 8, 1, 1, 1, 8, 8, architecture="mamba"))


@pytest.mark.parametrize("flag", ["qkv_bias", "wo_bias", "mlp_bias", "qk_norm"])
def test_weights_of_another_flag_are_refused(flag: str) -> None:
    config = FAMILIES["everything"]
    other = changed(config, **{flag: False})
    weights = [architecture_of(c).pack(c, random_tensors(c)) for c in (config, other)]
    with pytest.raises(ValueError, match="none of the config's"):
        Transformer(other, weights[0])
    with pytest.raises(ValueError, match="has not the shape"):
        Transformer(config, weights[1])


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ({"head_dim": -2}, "head_dim is -2"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"norm_eps": -1e-5}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": 0.0}, "rope's theta"),
        ({"rope_theta": float("inf")}, "rope's theta"),
        ({"window": -1}, "attention's window"),
        ({"rope_scaling": RopeScaling(0.0, 1.0, 4.0, 40)}, "rope's scaling's factor"),
        ({"rope_scaling": RopeScaling(8.0, 4.0, 4.0, 40)}, "rope's scaling's high_freq_factor"),
        ({"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 0)}, "rope's scaling's original_seq_len"),
        ({"rope_scaling": YarnScaling(0.5, 40)}, "rope's scaling's factor is 0.5"),
        ({"rope_scaling": YarnScaling(2.0, 40, 1.0, 2.0)}, "rope's scaling's beta_fast"),
        ({"rope_scaling": YarnScaling(2.0, 40), "rope_theta": 1.0}, "rope's theta is 1.0"),
        ({"query_scale": -0.1, "query_span": 5}, "rope's query_scale is -0.1"),
        ({"long_divisors": (2.0,) * 6}, "rope's n_short is 0"),
        ({"n_short": 5}, "rope's n_short is 5"),
        ({"n_short": 5, "long_divisors": (2.0,) * 5}, "rope's long_divisors are 5; expected one for each of 6 pairs"),
        ({"n_short": 5, "long_divisors": (0.0,) * 6}, "rope's long_divisors are not all positive"),
        ({"n_short": 5, "long_divisors": (2.0,) * 6, "query_scale": 0.1, "query_span": 5}, "rope's n_short is 5"),
        ({"query_scale": 0.1}, "rope's query_scale is 0.1 by 0 positions"),
    ],
)
def test_numbers_that_are_no_models_are_named(flaw: dict, words: str) -> None:
    assert changed(FAMILIES["llama 3"], **flaw).flaw().startswith(words)
