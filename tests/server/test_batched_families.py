"""Batched outputs of every family: each equals the family's output without a batch, on one thread."""

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.engine.request import GenerationRequest
from specdec.loaders import load_checkpoint
from specdec.loaders.model_loader import load_model
from specdec.model import get_architecture
from specdec.model.model import Model
from specdec.quant import INT8, PACKED_BF16
from specdec.server.engine_thread import EngineThread
from specdec.tokenizer import BOS, Tokenizer
from tests.tools.checkpoint_files import write_tokenizer
from tests.tools.configs import make_config
from tests.tools.engine_threads import Output, assert_same, submit
from tests.tools.family_models import make_model
from tests.tools.hf_folders import CONFIGS, FIXTURES, read_folder_tensors

FAMILIES = list(CONFIGS)
WEIGHT_FORMATS = {"own": None, "int8": INT8, "12 bits": PACKED_BF16}
DRAFTS = ["lookup", "self", None]


def random_requests(config, rng, n):
    """Return n requests; some continue another prompt, some have a wrong prediction."""
    requests = []
    for _ in range(n):
        prompt = [BOS, *rng.integers(3, config.vocab_size, int(rng.integers(0, 90))).tolist()]
        if requests and rng.random() < 0.4:
            previous = requests[rng.integers(len(requests))].prompt
            prompt = [*previous[: int(rng.integers(1, len(previous) + 1))], *prompt[1:8]]
        sampling = Sampling(float(rng.choice([0.0, 0.8, 1.3])), seed=int(rng.integers(99)))
        prediction = rng.integers(3, config.vocab_size, 6 if rng.random() < 0.2 else 0).tolist()
        n_tokens = int(rng.integers(1, 50))
        requests.append(GenerationRequest(prompt[: config.seq_len - 1], n_tokens, sampling, prediction=prediction))
    return requests


def compare_batch(name, weight_format, draft, rng, tokenizer, n):
    """Generate n outputs in a batch, compare the uncancelled ones with plain decoding, and return their number."""
    checkpoint = load_checkpoint(FIXTURES / name)
    config, architecture = checkpoint.config, get_architecture(checkpoint.config)
    is_bf16 = any(
        dtype == "BF16" for dtype, _ in read_folder_tensors(FIXTURES / name).values()
    )  # 12-bit weights need bf16 tensors
    weights = architecture.plan_weights(
        config, checkpoint.tensors, WEIGHT_FORMATS[weight_format] if is_bf16 or weight_format == "int8" else None
    ).pack()
    kv = str(rng.choice(["f32", "f16"]))
    plain = SpeculativeDecoder(Model(config, weights, 1, kv=kv), None, tokenizer)
    gamma = [3, "auto"][rng.integers(2)]
    if draft == "mtp":
        decoder = SpeculativeDecoder(FIXTURES / name, "mtp", tokenizer, gamma=gamma, kv=kv)
    else:
        draft = Model(config, weights.convert(INT8), 2, kv=kv) if draft == "self" else draft
        decoder = SpeculativeDecoder(Model(config, weights, 2, kv=kv), draft, tokenizer, gamma=gamma)
    engine, requests, outputs = EngineThread(decoder, 4, n, int(rng.choice([10**8, 10**5]))), random_requests(config, rng, n), []
    handles = []
    for request in requests:
        outputs.append(Output())
        handles.append(submit(engine, request, outputs[-1]))
        if rng.random() < 0.15:
            handles[rng.integers(len(handles))].cancel()
        if rng.random() < 0.3:
            outputs[rng.integers(len(outputs))].started.wait(float(rng.random()) * 0.02)
    uncancelled = [
        (request, output) for request, output, handle in zip(requests, outputs, handles, strict=True) if not handle.is_cancelled
    ]
    for request, output in uncancelled:
        assert_same(plain, request, output)
    engine.close(0.0)
    return len(uncancelled)


@pytest.fixture
def make_tokenizer(tmp_path):
    """Return a function that makes a tokenizer of n ids."""

    def make(n):
        vocabulary = [(f"<{i}>".encode() if i < 3 else f"{i} ".encode(), 0) for i in range(n)]
        return Tokenizer(write_tokenizer(tmp_path / "letters.bin", vocabulary))

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_batched_output_equals_unbatched_output_of_each_family(name, make_tokenizer):
    i = FAMILIES.index(name)
    weight_format, draft = (
        ("own", "mtp") if name in ("qwen35", "glm4_moe_lite") else (list(WEIGHT_FORMATS)[i % 3], DRAFTS[i // 3 % 3])
    )
    tokenizer = make_tokenizer(CONFIGS[name].vocab_size)
    assert compare_batch(name, weight_format, draft, np.random.default_rng(i), tokenizer, 8) > 2


@pytest.mark.parametrize("name", ["bitnet", "gemma4_dense", "laguna", "muse_glimmer", "qwen3"])
@pytest.mark.parametrize("draft", ["lookup", "smaller model"])
def test_a_draft_changes_no_output_of_a_family(name, draft, make_tokenizer):
    """The smaller model is a random Llama of the same vocabulary."""
    target, config, tokenizer = load_model(FIXTURES / name, 1), CONFIGS[name], make_tokenizer(CONFIGS[name].vocab_size)
    smaller = make_model(make_config(40, 50, 1, 4, 2, config.vocab_size, config.seq_len))
    decoder = SpeculativeDecoder(target, "lookup" if draft == "lookup" else smaller, tokenizer, gamma=3)
    plain = SpeculativeDecoder(target, None, tokenizer)
    for temperature in (0.0, 0.8):
        prompt = [BOS, *[5, 9, 7, 11] * 4]
        expected = plain.generate(prompt, max_tokens=40, temperature=temperature)
        drafted = decoder.generate(prompt, max_tokens=40, temperature=temperature)
        assert drafted.tokens == expected.tokens
        assert drafted.statistics.n_drafted > 0


@pytest.mark.campaign
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_batched_outputs_equal_unbatched_output_of_each_family(name, draft, make_tokenizer):
    rng = np.random.default_rng(DRAFTS.index(draft))
    weight_format = str(rng.choice(list(WEIGHT_FORMATS)))
    assert compare_batch(name, weight_format, draft, rng, make_tokenizer(CONFIGS[name].vocab_size), 16) > 4
