"""Texts of every family that share passes: each is the family's own, token by token on one thread."""

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.engine.decoding import Job
from specdec.engine.scheduler import Engine
from specdec.loaders import load_checkpoint
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant import INT8, PACKED_BF16
from specdec.tokenizer import BOS, Tokenizer
from tests.engine.test_scheduler import Heard, assert_same, submit
from tests.tools.checkpoint_files import write_tokenizer
from tests.tools.hf_folders import CONFIGS, FIXTURES, stored

FAMILIES = list(CONFIGS)
KINDS = {"own": None, "int8": INT8, "12 bits": PACKED_BF16}
DRAFTS = ["ngram", "self", None]


def jobs_of(config, rng, n):
    """Some of them go on with another's prompt, some with a wrong prediction."""
    jobs = []
    for _ in range(n):
        prompt = [BOS, *rng.integers(3, config.vocab_size, int(rng.integers(0, 90))).tolist()]
        if jobs and rng.random() < 0.4:
            before = jobs[rng.integers(len(jobs))].prompt
            prompt = [*before[: int(rng.integers(1, len(before) + 1))], *prompt[1:8]]
        sampling = Sampling(float(rng.choice([0.0, 0.8, 1.3])), seed=int(rng.integers(99)))
        prediction = rng.integers(3, config.vocab_size, 6 if rng.random() < 0.2 else 0).tolist()
        n_tokens = int(rng.integers(1, 50))
        jobs.append(Job(prompt[: config.seq_len - 1], n_tokens, sampling, prediction=prediction))
    return jobs


def write_together(name, kind, draft, rng, tokenizer, n):
    """Of n texts those that nobody cancelled, each compared with the plain one; how many they were."""
    checkpoint = load_checkpoint(FIXTURES / name)
    config, architecture = checkpoint.config, architecture_of(checkpoint.config)
    is_bf16 = any(dtype == "BF16" for dtype, _ in stored(FIXTURES / name).values())  # others have no 12 bits
    weights = architecture.pack(config, checkpoint.tensors, KINDS[kind] if is_bf16 or kind == "int8" else None)
    kv = str(rng.choice(["f32", "f16"]))
    plain = SpeculativeDecoder(Transformer(config, weights, 1, kv=kv), None, tokenizer)
    gamma = [3, "auto"][rng.integers(2)]
    if draft == "mtp":
        decoder = SpeculativeDecoder(FIXTURES / name, "mtp", tokenizer, gamma=gamma, kv=kv)
    else:
        draft = Transformer(config, weights.converted(INT8), 2, kv=kv) if draft == "self" else draft
        decoder = SpeculativeDecoder(Transformer(config, weights, 2, kv=kv), draft, tokenizer, gamma=gamma)
    engine, jobs, heard = Engine(decoder, 4, n, int(rng.choice([10**8, 10**5]))), jobs_of(config, rng, n), []
    tickets = []
    for job in jobs:
        heard.append(Heard())
        tickets.append(submit(engine, job, heard[-1]))
        if rng.random() < 0.15:
            tickets[rng.integers(len(tickets))].cancel()
        if rng.random() < 0.3:
            heard[rng.integers(len(heard))].spoke.wait(float(rng.random()) * 0.02)
    left = [(job, told) for job, told, ticket in zip(jobs, heard, tickets, strict=True) if not ticket.is_cancelled]
    for job, told in left:
        assert_same(plain, job, told)
    engine.close(0.0)
    return len(left)


@pytest.fixture
def letters(tmp_path):
    """A tokenizer of n ids."""

    def of(n):
        words = [(f"<{i}>".encode() if i < 3 else f"{i} ".encode(), 0) for i in range(n)]
        return Tokenizer(write_tokenizer(tmp_path / "letters.bin", words))

    return of


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_that_share_passes_are_the_familys_own(name, letters):
    i = FAMILIES.index(name)
    kind, draft = ("own", "mtp") if name == "qwen35" else (list(KINDS)[i % 3], DRAFTS[i // 3 % 3])
    tokenizer = letters(CONFIGS[name].vocab_size)
    assert write_together(name, kind, draft, np.random.default_rng(i), tokenizer, 8) > 2


@pytest.mark.campaign
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_texts_that_share_passes_are_the_familys_own(name, draft, letters):
    rng = np.random.default_rng(DRAFTS.index(draft))
    kind = str(rng.choice(list(KINDS)))
    assert write_together(name, kind, draft, rng, letters(CONFIGS[name].vocab_size), 16) > 4
