"""Model families: each option of a config against a float64 oracle, and bit for bit where bits are promised."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.layers.rope import compute_positions_per_radian, fill_cos_sin
from specdec.model import get_architecture
from specdec.model.kv_cache import INITIAL_CAPACITY
from specdec.model.model import Model
from specdec.model_config import ExpertsConfig, Llama3RopeScaling, YarnRopeScaling
from specdec.quant import FP32, INT8
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES
from specdec.sampling import Sampling
from specdec.verification import CoupledVerifier
from tests.tools import reference
from tests.tools.cache_contents import get_buffers
from tests.tools.configs import make_config, replace_config
from tests.tools.decode import generate_tokens, make_model_drafter
from tests.tools.family_models import FAMILIES, GEMMA, POISON, make_cache, make_model, random_tensors
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, make_started_policy, random_tokens, run_in_blocks

GEMMA |= {"attention_scale": 0.4}
ALL = FAMILIES | {name: replace(config, seq_len=400) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", ALL)
def test_logits_match_oracle(name: str) -> None:
    config = ALL[name]
    tokens = random_tokens(config, 60)
    expected = reference.forward(config, random_tensors(config), tokens)
    # float32 sums of some hundred products of order 1; a wrong formula is off by order 1
    np.testing.assert_allclose(run_in_blocks(make_model(config), tokens, 7), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_changes_oracle_logits(name: str) -> None:
    """So the test above cannot pass with an option that both sides ignore."""
    config = FAMILIES[name]
    tokens, tensors = random_tokens(config, 3), random_tensors(config)
    expected = reference.forward(config, tensors, tokens)
    for tensor in tensors:
        if tensor == "bk" and not config.attention.has_rope:
            continue  # without RoPE, it adds the same to all scores of a query
        own = tensors[tensor]
        other = reference.forward(config, tensors | {tensor: own[..., ::-1] if own.shape[-1] > 1 else 2 * own}, tokens)
        assert np.abs(other - expected).max() > 1e-3 * np.abs(expected).max(), tensor


@pytest.mark.parametrize("weight_format", [FP32, INT8], ids=lambda weight_format: weight_format.name)
@pytest.mark.parametrize("name", ALL)
def test_logits_do_not_depend_on_batch_or_threads(name: str, weight_format) -> None:
    config = ALL[name]
    tokens = random_tokens(config, 60)
    alone = run_in_blocks(make_model(config, weight_format=weight_format), tokens, 1)
    for n_threads in THREAD_COUNTS:
        cache = make_cache(config, n_threads, weight_format)
        for block in (2, 5, 8, 17, 60):
            np.testing.assert_array_equal(run_in_blocks(cache, tokens, block).view(np.int32), alone.view(np.int32))


@pytest.mark.parametrize("name", ALL)
def test_logits_survive_buffer_growth(name: str) -> None:
    config = ALL[name]
    tokens = random_tokens(config, INITIAL_CAPACITY + 40)
    grown, at_once = make_cache(config), make_cache(config)
    for end in (1, INITIAL_CAPACITY - 1, INITIAL_CAPACITY, INITIAL_CAPACITY + 1, len(tokens)):
        logits = grown.forward(tokens[:end], 1).copy()
    np.testing.assert_array_equal(at_once.forward(tokens, 1), logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_output_equals_target_output_with_any_draft(name: str) -> None:
    target, draft = make_model(FAMILIES[name]), make_model(FAMILIES[name], weight_format=INT8)
    sampling = Sampling(0.8, seed=3)
    plain, _ = generate_tokens(target, None, sampling, max_tokens=40)
    drafted, statistics = generate_tokens(target, draft, sampling, max_tokens=40)
    assert drafted == plain
    assert statistics.n_accepted > 0
    assert make_model_drafter(draft, CoupledVerifier, sampling).propose([1, 5], make_started_policy(3)).tokens


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "everything",
        "gemma",
        "lfm2, odd",
        "mamba 2, odd",
        "gpt2, odd",
        "olmo2",
        "gpt-oss",
        "experts of sigmoids",
        "one block a layer",
        "mamba 2 next to attention",
        "xielu",
    ],
)
def test_non_finite_weights_reach_logits(name: str, value: float) -> None:
    """Put a NaN or an infinity in each tensor: every logit that is not finite in the oracle is not finite here."""
    config = FAMILIES[name]
    sequence = [1] * POISON + [POISON] * 3  # the position equals the token id
    sound = random_tensors(config)
    for tensor in sound:
        tensors = sound | {tensor: sound[tensor].copy()}
        row = POISON if tensor in ("tok_emb", "pos_emb", "wcls") else 0
        tensors[tensor].reshape(-1, sound[tensor].shape[-1])[row, -1] = value
        cache = Model(config, get_architecture(config).plan_weights(config, tensors).pack(), 1).new_cache()
        with np.errstate(all="ignore"):
            lost = ~np.isfinite(reference.forward(config, tensors, sequence))
        assert lost.any() or "experts" in tensor or "router" in tensor or (tensor, value) == ("eps", np.inf), tensor
        assert not np.isfinite(cache.forward(sequence, len(sequence))[lost]).any(), tensor


@pytest.mark.parametrize(
    "name",
    ["gpt2, odd", "qwen3, heads across strips", "llama with biases", "gemma", "lfm2, odd", "mamba 2, odd", "olmo2", "gpt-oss"],
)
def test_non_finite_token_does_not_affect_later_sequences(name: str) -> None:
    config = FAMILIES[name]
    tensors = random_tensors(config)
    tensors["tok_emb"][POISON] *= 1e30  # its squares overflow
    cache = Model(config, get_architecture(config).plan_weights(config, tensors).pack(), 1).new_cache()
    sequence = [token for token in random_tokens(config, 30) if token != POISON]
    expected = cache.forward(sequence, len(sequence)).copy()
    assert np.isfinite(expected).all()
    assert not np.isfinite(cache.forward([*sequence[:5], POISON], 1)).any()
    logits = cache.forward([*sequence[:12], POISON, *sequence[12:14]], 4)
    np.testing.assert_array_equal(logits[0], expected[11])
    assert not np.isfinite(logits[1:]).any()
    np.testing.assert_array_equal(cache.forward(sequence, len(sequence)), expected)


# Positions


@pytest.mark.parametrize(("seq_len", "window"), [(20, 12), (12, 20), (12, 0)])
def test_beyond_seq_len_window_or_seq_len_limits_attention(seq_len: int, window: int) -> None:
    config = replace_config(FAMILIES["mistral"], seq_len=seq_len, window=window)
    tokens = random_tokens(config, 60)
    expected = reference.forward(config, random_tensors(config), tokens, 12)
    got = run_in_blocks(make_model(config, n_positions=64), tokens, 7)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_llama3_rope_scaling_scales_only_slow_pairs() -> None:
    config = replace_config(FAMILIES["llama 3"], head_dim=128, rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192))
    np.testing.assert_allclose(1 / compute_positions_per_radian(config), reference.rope_frequencies(config), rtol=1e-12)
    ratio = compute_positions_per_radian(config) / compute_positions_per_radian(replace_config(config, rope_scaling=None))
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(32) and ((ratio > 1.01) & (ratio < 31)).any()


@pytest.mark.parametrize("head_dim", [2, 12, 80])
def test_longer_rope_tables_extend_shorter_ones(head_dim: int) -> None:
    config = replace(FAMILIES["llama 3"], head_dim=head_dim)
    short, long = ([zeros(n, head_dim + LANES) for _ in range(2)] for n in (100, 9000))
    fill_cos_sin(config, *short)
    fill_cos_sin(config, *long)
    np.testing.assert_array_equal([table[:100] for table in long], short)
    angles = 8999 * reference.rope_frequencies(config)
    np.testing.assert_allclose(long[0][8999, 0:head_dim:2], np.cos(angles), rtol=0, atol=1e-7)
    np.testing.assert_allclose(long[1][8999, 1:head_dim:2], np.sin(angles), rtol=0, atol=1e-7)
    np.testing.assert_array_equal(long[1][:, 0:head_dim:2], -long[1][:, 1:head_dim:2])


def test_learned_positions_limit_n_positions() -> None:
    config = replace(FAMILIES["gpt2"], seq_len=50)
    model = make_model(config, n_positions=400)
    assert model.n_positions == 50
    tokens, cache = random_tokens(config, 51), model.new_cache()
    cache.forward(tokens[:50])
    with pytest.raises(ValueError, match="51 tokens do not fit 50 positions"):
        cache.forward(tokens)


def test_unused_context_takes_no_memory() -> None:
    config = replace(FAMILIES["llama 3"], seq_len=131_072)
    model, short = make_model(config), make_model(replace(config, seq_len=INITIAL_CAPACITY))
    assert model.n_positions == 131_072
    taken, needed = (sum(each.array.nbytes for each in get_buffers(m.new_cache()).new.own) for m in (model, short))
    assert taken == needed
    assert model.get_sequence_bytes(131_072) > 131_072 * 2 * 4 * config.n_layers * config.kv_dim


# Configs


def test_unknown_architecture_error_lists_supported_ones() -> None:
    with pytest.raises(ValueError, match=r"'mamba'.*llama"):
        get_architecture(make_config(8, 8, 1, 1, 1, 8, 8, architecture="mamba"))


@pytest.mark.parametrize("flag", ["qkv_bias", "wo_bias", "mlp_bias", "qk_norm"])
def test_weights_of_another_config_are_rejected(flag: str) -> None:
    config = FAMILIES["everything"]
    other = replace_config(config, **{flag: False})
    weights = [get_architecture(c).plan_weights(c, random_tensors(c)).pack() for c in (config, other)]
    with pytest.raises(ValueError, match="of the weights is unknown to the config"):
        Model(other, weights[0])
    with pytest.raises(ValueError, match=r"(has the shape .*|is missing); the config needs the shape"):
        Model(config, weights[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": -2}, "head_dim is -2"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"norm_eps": -1e-5}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": 0.0}, "rope's theta"),
        ({"rope_theta": float("inf")}, "rope's theta"),
        ({"window": -1}, "attention's window"),
        ({"rope_scaling": Llama3RopeScaling(0.0, 1.0, 4.0, 40)}, "rope's scaling's factor"),
        ({"rope_scaling": Llama3RopeScaling(8.0, 4.0, 4.0, 40)}, "rope's scaling's high_freq_factor"),
        ({"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 0)}, "rope's scaling's original_seq_len"),
        ({"rope_scaling": YarnRopeScaling(0.5, 40)}, "rope's scaling's factor is 0.5"),
        ({"rope_scaling": YarnRopeScaling(2.0, 40, 1.0, 2.0)}, "rope's scaling's beta_fast"),
        ({"rope_scaling": YarnRopeScaling(2.0, 40), "rope_theta": 1.0}, "rope's theta is 1.0"),
        ({"query_scale": -0.1, "query_span": 5}, "rope's query_scale is -0.1"),
        ({"long_freq_factors": (2.0,) * 6}, "rope's longrope_threshold is 0"),
        ({"longrope_threshold": 5}, "rope's longrope_threshold is 5"),
        (
            {"longrope_threshold": 5, "long_freq_factors": (2.0,) * 5},
            "rope's long_freq_factors are 5; expected one for each of 6 pairs",
        ),
        ({"longrope_threshold": 5, "long_freq_factors": (0.0,) * 6}, "rope's long_freq_factors are not all positive"),
        (
            {"longrope_threshold": 5, "long_freq_factors": (2.0,) * 6, "query_scale": 0.1, "query_span": 5},
            "rope's longrope_threshold is 5",
        ),
        ({"query_scale": 0.1}, "rope's query_scale is 0.1 and query_span is 0"),
        ({"activation": "xielu", "experts": ExpertsConfig(5, 2, 30)}, "activation is xielu; expected MLPs without experts"),
        ({"activation": "xielu", "mlp_scales": (1.1, 0.9)}, "mlp_scales are (1.1, 0.9); expected none with xielu"),
        ({"activation": "relu2", "mlp_scales": (1.1, 0.9)}, "mlp_scales are (1.1, 0.9); expected none with relu2"),
    ],
)
def test_invalid_configs_are_reported(changes: dict, words: str) -> None:
    assert replace_config(FAMILIES["llama 3"], **changes).find_error().startswith(words)
