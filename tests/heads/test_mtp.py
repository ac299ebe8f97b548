"""The head that a Qwen3.5 or a Qwen3-Next brings along: against transformers' layer, from both formats, and in the loop."""

from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.model import HeadDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Statistics, Step, decode
from specdec.heads.head import Head
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.mtp import head_of
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant import BF16, INT8
from specdec.quant.matrix import floats
from specdec.runtime import program
from specdec.sampling import Sampler, Sampling
from specdec.verification import VERIFIERS
from tests.tools import random_models
from tests.tools.checkpoint_files import write_tokenizer
from tests.tools.gguf_files import gguf_bytes, with_head
from tests.tools.hf_folders import FIXTURES, copy, read_all, retensor
from tests.tools.random_models import THREADS, broken_off, continuation, scattered, three_threads, tokens_for

NAMES = ("qwen35", "qwen35_images", "qwen35_moe", "qwen3_next")
N_POSITIONS = 300
PROMPT = [1, 7, 9]


def pair_of(name="qwen35", n_threads=1, kind=None):
    """A target of the fixtures and its head; kind: of the head."""
    source = load_checkpoint(FIXTURES / name)
    weights = architecture_of(source.config).pack(source.config, source.tensors)
    target = Transformer(source.config, weights, n_threads, N_POSITIONS, kv="f32")
    own = head_of(source)
    head = architecture_of(own.config).pack(own.config, own.tensors, kind)
    return target, Head(own.config, head, target, None, n_threads, N_POSITIONS, kv="f32")


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_layer_after_any_rejection(name):
    """Chains of guesses behind each position, whatever was guessed there before; by 3e-5 of the largest."""
    target, head = pair_of(name)
    with np.load(FIXTURES / name / "expected.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["mtp_logits"]
    n_guessed, n, _ = logits.shape
    rng, largest = np.random.default_rng(0), np.abs(logits).max()
    for i in range(n):
        target.forward(tokens[: i + 1])
        head.forward([*tokens[: i + 1 + i % 2], *rng.integers(0, target.config.vocab_size, 3 + i % 2).tolist()])
        for g in range(min(n_guessed, n - i)):
            got = head.forward(tokens[: i + g + 2])[0]
            assert np.abs(got - logits[g, i]).max() < 3e-5 * largest
    target.forward(tokens[: n + 1])
    assert np.abs(head.forward(tokens[: n + 1], n) - logits[0]).max() < 3e-5 * largest


def test_bits_do_not_depend_on_the_batch_or_the_threads_and_a_broken_pass_leaves_nothing():
    tokens = tokens_for(pair_of()[0].config, 120)
    target, head = pair_of()
    target.forward(tokens)
    alone = np.concatenate([head.forward(tokens[:end]).copy() for end in range(2, len(tokens) + 1)])
    for n_threads in THREADS:
        target, head = pair_of(n_threads=n_threads)
        target.forward(tokens)
        for begin, end in ((0, 64), (64, 119)):
            np.testing.assert_array_equal(head.forward(tokens[: end + 1], end - begin), alone[begin:end])
        for broken in ("_runner", "_take"):
            with broken_off(head, broken):
                head.forward([*tokens[:20], *tokens[:30]])
            np.testing.assert_array_equal(head.forward(tokens, 64), alone[-64:])


@pytest.mark.parametrize("name", NAMES)
def test_no_phase_of_a_head_needs_what_its_thread_made_in_another_one(name, monkeypatch):
    tokens = tokens_for(pair_of(name)[0].config, 40)
    three_threads(monkeypatch)
    logits = []
    for n_threads in (1, 3):
        target, head = pair_of(name, n_threads)
        if n_threads > 1:
            monkeypatch.setattr(program, "run_on_threads", scattered(7))
        target.forward(tokens[:30])
        logits.append([head.forward(tokens[:end], n).copy() for end, n in ((20, 5), (31, 1), (33, 2))])
    for a, b in zip(*logits, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_gguf_file_has_the_same_head_and_a_target_without_one_has_none(tmp_path):
    path = tmp_path / "model.gguf"
    keys, tensors = with_head("qwen35_images")
    path.write_bytes(gguf_bytes(keys, tensors))
    source, folder = load_checkpoint(path), load_checkpoint(FIXTURES / "qwen35_images")
    assert source.config.n_layers == 2 and source.config.layers[0].mixer == replace(folder.config.layers[0].mixer, in_turns=True)
    found, expected = head_of(source), head_of(folder)
    assert found.config == expected.config
    for name, tensor in read_all(expected).items():
        np.testing.assert_array_equal(floats(read_all(found)[name]), floats(tensor))
    assert head_of(load_checkpoint(FIXTURES / "qwen35_odd")) is head_of(load_checkpoint(FIXTURES / "qwen3")) is None
    for name in ("qwen35_moe", "qwen3_next"):  # as the real converter has it
        found, expected = (read_all(head_of(load_checkpoint(FIXTURES / each))) for each in (f"gguf/{name}.gguf", name))
        for key, tensor in expected.items():
            np.testing.assert_array_equal(floats(np.array(found[key])), floats(np.array(tensor)))
    path.write_bytes(gguf_bytes(keys, tensors | {"blk.2.nextn.embed_tokens.weight": tensors["token_embd.weight"]}))
    with pytest.raises(CheckpointError, match="embed_tokens"):
        head_of(load_checkpoint(path))


def test_experts_of_a_head_are_one_tensor_or_each_its_own_as_published(tmp_path):
    def parted(tensors):
        for name in [name for name in tensors if name.startswith("mtp.") and ".experts." in name]:
            kind, stacked = tensors.pop(name)
            gate, up = np.split(stacked, 2, 1)
            parts = {"down_proj": stacked} if "down" in name else {"gate_proj": gate, "up_proj": up}
            at = name.rpartition(".")[0]
            tensors.update({f"{at}.{i}.{part}.weight": (kind, own) for part, each in parts.items() for i, own in enumerate(each)})

    folder = retensor(copy(tmp_path / "model", "qwen3_next"), parted)
    found, expected = (read_all(head_of(load_checkpoint(each))) for each in (folder, FIXTURES / "qwen3_next"))
    for key, tensor in expected.items():
        np.testing.assert_array_equal(np.array(found[key]), np.array(tensor))


def test_what_is_no_head_or_a_damaged_one_is_told_where_it_is_asked_for(tmp_path):
    """Left to itself, a target whose head cannot be read drafts without it."""
    few, letters = (
        write_tokenizer(tmp_path / f"{n}.bin", [(f"<{i}>".encode() if i < 3 else bytes([57 + i]), 0) for i in range(n)])
        for n in (65, 70)
    )
    without = SpeculativeDecoder(FIXTURES / "qwen35_odd", "auto", few)
    assert without.draft is None and without.has_draft
    with pytest.raises(ValueError, match=r"qwen35_odd brings no head along \(mtp\)"):
        SpeculativeDecoder(FIXTURES / "qwen35_odd", "mtp", few)
    with pytest.raises(ValueError, match="name the target by its file"):
        SpeculativeDecoder(pair_of()[0], "mtp", letters)
    folder = retensor(copy(tmp_path / "damaged", "qwen35"), lambda tensors: tensors.pop("mtp.norm.weight"))
    message = r"holds no tensor mtp\.norm\.weight"
    with pytest.raises(CheckpointError, match=message):
        SpeculativeDecoder(folder, "mtp", letters)
    assert SpeculativeDecoder(folder, "auto", letters).draft is None
    own = SpeculativeDecoder(FIXTURES / "qwen35", tokenizer=letters)
    assert isinstance(own.draft, Head) and own.weights == "target bf16, head bf16 and int8"
    assert {name: own.draft.weights.matrices[name].kind for name in ("embedding", "classifier")} == {
        "embedding": BF16,
        "classifier": INT8,
    }
    plain = SpeculativeDecoder(FIXTURES / "qwen35", None, letters)
    for temperature in (0.0, 1.0):
        texts = [decoder.generate([1, 7, 9], 40, temperature=temperature, seed=5).tokens for decoder in (plain, own)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_text_is_the_plain_one_and_guesses_stand(verify, monkeypatch):
    monkeypatch.setattr(random_models, "END_MARKS", {})
    n_accepted = 0
    for name in NAMES:
        for sampling in (Sampling(0.0, seed=1), Sampling(0.9, seed=2)):
            plain, _ = continuation(pair_of(name)[0], None, sampling, prompt=PROMPT, max_tokens=60)
            for gamma in (1, 3, 7):
                target, head = pair_of(name, kind=INT8)
                size = target.config.vocab_size
                verifier = VERIFIERS[verify](size, sampling)
                drafter = HeadDrafter(head, Sampler(size, sampling), verifier.draft_noise, {})
                statistics, tokens = Statistics(len(PROMPT)), []
                for event in decode(target, drafter, verifier, PROMPT, 60, FixedLength(gamma), {}):
                    statistics.add(event)
                    tokens += event.tokens if isinstance(event, Step) else []
                assert statistics.n_drafted > 40
                n_accepted += statistics.n_accepted
                assert tokens == plain or verify == "rejection"
    assert n_accepted > 5  # of a random head
