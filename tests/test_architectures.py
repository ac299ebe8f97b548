"""The seam between a pass and what it computes: a second architecture with operations of its own runs like the first."""

import numpy as np
import pytest

from specdec.architectures import ARCHITECTURES, Config, architecture_of
from specdec.drafters import ModelDrafter
from specdec.sampling import Sampling
from specdec.transformer import Transformer
from specdec.weights import FP32, INT8
from tests.gpt2 import GPT2, reference
from tests.models import END_MARKS, THREADS, continuation, run_in_blocks, tokens_for

CONFIGS = [
    Config(48, 96, 2, 4, 4, 105, 64, architecture="gpt2"),
    Config(40, 50, 3, 5, 5, 64, 64, architecture="gpt2"),
]


@pytest.fixture(autouse=True)
def with_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "gpt2", GPT2)


def random_tensors(config: Config) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 5 for name, shape in GPT2.shapes(config).items()}
    return {name: tensor + 1 if name in ("ln1", "ln2", "ln_f") else tensor for name, tensor in tensors.items()}


def gpt2(config: Config, n_threads: int = 1, kind=FP32) -> Transformer:
    return Transformer(config, GPT2.pack(config, random_tensors(config), kind), n_threads)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"dim {config.dim}")
def test_gpt2_is_the_oracles(config: Config) -> None:
    tokens = tokens_for(config, 50)
    expected = reference(config, random_tensors(config), tokens)
    # float32 sums of some hundred products of order 1; a wrong formula is off by order 1
    np.testing.assert_allclose(run_in_blocks(gpt2(config), tokens, 7), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", [FP32, INT8], ids=lambda kind: kind.name)
def test_its_logits_do_not_depend_on_the_batch_or_the_threads_bit_for_bit(kind) -> None:
    config = CONFIGS[1]
    tokens = tokens_for(config, 60)
    alone = run_in_blocks(gpt2(config, kind=kind), tokens, 1)
    for n_threads in THREADS:
        for block in (2, 5, 8, 17, 60):
            np.testing.assert_array_equal(run_in_blocks(gpt2(config, n_threads, kind), tokens, block), alone)


def test_its_text_is_its_own_whatever_drafts_for_it() -> None:
    target, draft = gpt2(CONFIGS[1]), gpt2(CONFIGS[1], kind=INT8)
    sampling = Sampling(0.8, seed=3)
    plain, _ = continuation(target, None, sampling, max_tokens=40)
    drafted, statistics = continuation(target, draft, sampling, max_tokens=40)
    assert drafted == plain
    assert statistics.n_accepted > 0
    assert ModelDrafter(draft, sampling, 0, END_MARKS).propose([1, 5], 3).tokens


def test_an_architecture_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"'mamba'.*llama"):
        architecture_of(Config(8, 8, 1, 1, 1, 8, 8, architecture="mamba"))
