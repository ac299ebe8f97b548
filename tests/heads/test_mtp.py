"""The built-in heads of Qwen3.5, Qwen3-Next and GLM-4.7-Flash: compared with transformers, from both formats, in the loop."""

from dataclasses import replace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import FixedLength
from specdec.draft.installed_models import find_neighbour_draft, list_entries, make_row
from specdec.heads.head import Head
from specdec.loaders import CheckpointError, load_builtin_head, load_checkpoint
from specdec.loaders.head_checkpoint import load_mtp_head
from specdec.model import get_architecture
from specdec.model.model import Model
from specdec.quant import BF16, INT8
from specdec.quant.packed_matrix import to_float32
from specdec.runtime import op_program
from specdec.sampling import Sampling
from specdec.verification import VERIFIERS
from tests.tools.checkpoint_files import write_tokenizer
from tests.tools.decode import collect, decode, get_tokens, make_model_drafter
from tests.tools.gguf_files import gguf_bytes, make_model_with_head, random_blocks, read_converted
from tests.tools.hf_folders import FIXTURES, copy_fixture, edit_tensors, read_all_tensors
from tests.tools.random_heads import new_head_cache
from tests.tools.random_models import THREAD_COUNTS, fake_three_threads, interrupt_after, random_tokens, scatter_phases

NAMES = ("qwen35", "qwen35_images", "qwen35_moe", "qwen3_next", "glm4_moe_lite")
N_POSITIONS = 300
PROMPT = [1, 7, 9]


def make_pair(name="qwen35", n_threads=1, weight_format=None):
    """Return KV caches of a target of the fixtures, and of its head in a weight format."""
    source = load_checkpoint(FIXTURES / name)
    weights = get_architecture(source.config).plan_weights(source.config, source.tensors).pack()
    target = Model(source.config, weights, n_threads, N_POSITIONS, kv="f32")
    head_tensors = load_mtp_head(source)
    head = get_architecture(head_tensors.config).plan_weights(head_tensors.config, head_tensors.tensors, weight_format).pack()
    cache = new_head_cache(Head(head_tensors.config, head, target, None, n_threads, N_POSITIONS, kv="f32"))
    return cache.target_cache, cache


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers_after_any_rejection(name):
    """Chains of draft tokens after each position, whatever was drafted there before; within 3e-5 of the largest logit."""
    target, head = make_pair(name)
    with np.load(FIXTURES / name / "expected.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["mtp_logits"]
    n_drafted, n, _ = logits.shape
    rng, largest = np.random.default_rng(0), np.abs(logits).max()
    for i in range(n):
        target.forward(tokens[: i + 1])
        head.forward([*tokens[: i + 1 + i % 2], *rng.integers(0, target.model.vocab_size, 3 + i % 2).tolist()])
        for g in range(min(n_drafted, n - i)):
            got = head.forward(tokens[: i + g + 2])[0]
            assert np.abs(got - logits[g, i]).max() < 3e-5 * largest
    target.forward(tokens[: n + 1])
    assert np.abs(head.forward(tokens[: n + 1], n) - logits[0]).max() < 3e-5 * largest


def test_logits_do_not_depend_on_batch_threads_or_an_interrupted_pass():
    tokens = random_tokens(make_pair()[0].model.config, 120)
    target, head = make_pair()
    target.forward(tokens)
    alone = np.concatenate([head.forward(tokens[:end]).copy() for end in range(2, len(tokens) + 1)])
    for n_threads in THREAD_COUNTS:
        target, head = make_pair(n_threads=n_threads)
        target.forward(tokens)
        for begin, end in ((0, 64), (64, 119)):
            np.testing.assert_array_equal(head.forward(tokens[: end + 1], end - begin), alone[begin:end])
        for broken in ("executor", "compute_features"):
            with interrupt_after(head, broken):
                head.forward([*tokens[:20], *tokens[:30]])
            np.testing.assert_array_equal(head.forward(tokens, 64), alone[-64:])


@pytest.mark.parametrize("name", NAMES)
def test_phases_do_not_depend_on_thread_assignment(name, monkeypatch):
    tokens = random_tokens(make_pair(name)[0].model.config, 40)
    fake_three_threads(monkeypatch)
    logits = []
    for n_threads in (1, 3):
        target, head = make_pair(name, n_threads)
        if n_threads > 1:
            monkeypatch.setattr(op_program, "run_on_threads", scatter_phases(7))
        target.forward(tokens[:30])
        logits.append([head.forward(tokens[:end], n).copy() for end, n in ((20, 5), (31, 1), (33, 2))])
    for a, b in zip(*logits, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_gguf_file_has_the_same_head_as_the_folder(tmp_path):
    path = tmp_path / "model.gguf"
    keys, tensors = make_model_with_head("qwen35_images")
    path.write_bytes(gguf_bytes(keys, tensors))
    source, folder = load_checkpoint(path), load_checkpoint(FIXTURES / "qwen35_images")
    assert source.config.n_layers == 2 and source.config.layers[0].mixer == replace(
        folder.config.layers[0].mixer, tiled_heads=True
    )
    found, expected = load_mtp_head(source), load_mtp_head(folder)
    assert found.config == expected.config
    for name, tensor in read_all_tensors(expected).items():
        np.testing.assert_array_equal(to_float32(read_all_tensors(found)[name]), to_float32(tensor))
    assert load_mtp_head(load_checkpoint(FIXTURES / "qwen35_odd")) is load_mtp_head(load_checkpoint(FIXTURES / "qwen3")) is None
    for name in ("qwen35_moe", "qwen3_next", "glm4_moe_lite"):  # as in llama.cpp's converter
        found, expected = (
            read_all_tensors(load_mtp_head(load_checkpoint(FIXTURES / each))) for each in (f"gguf/{name}.gguf", name)
        )
        for key, tensor in expected.items():
            np.testing.assert_array_equal(to_float32(np.array(found[key])), to_float32(np.array(tensor)))
    path.write_bytes(gguf_bytes(keys, tensors | {"blk.2.nextn.embed_tokens.weight": tensors["token_embd.weight"]}))
    with pytest.raises(CheckpointError, match="embed_tokens"):
        load_mtp_head(load_checkpoint(path))


def test_a_heads_queries_keys_and_values_may_have_several_formats(tmp_path):
    """Most files of llama.cpp's quantizer have them. Other values give other logits, so they are multiplied, too."""
    path, (keys, tensors), rows = tmp_path / "model.gguf", make_model_with_head("qwen35_images"), []
    for seed in range(2):
        values = random_blocks(np.random.default_rng(seed), "Q8_0", 64, 64)
        path.write_bytes(gguf_bytes(keys, tensors | {"blk.2.attn_v.weight": values}))
        target, head = sources = load_checkpoint(path), load_mtp_head(load_checkpoint(path))
        plans = (get_architecture(each.config).plan_weights(each.config, each.tensors) for each in sources)
        weights, head_weights = (plan.pack() for plan in plans)
        assert [shard.weight_format.name for shard in head_weights.shards["0.qkv"]] == ["bf16", "Q8_0", "bf16"]
        cache = new_head_cache(Head(head.config, head_weights, Model(target.config, weights, 1, N_POSITIONS)))
        cache.target_cache.forward(PROMPT)
        rows.append(cache.forward(PROMPT)[0].copy())
    assert np.isfinite(rows).all() and (rows[0] != rows[1]).any()


@pytest.mark.parametrize("with_copies", [True, False])
def test_a_head_in_a_file_of_its_own_drafts_for_its_target(tmp_path, with_copies):
    """The file is like one of llama.cpp's converter: the model's metadata and, in most, copies of the vocabulary matrices."""
    keys, tensors = make_model_with_head("qwen35_images")
    copies = ("token_embd.weight", "output_norm.weight", "output.weight") if with_copies else ()
    head = {name: each for name, each in tensors.items() if name.startswith("blk.2.") or name in copies}
    layers = {"qwen35.block_count": 2, "qwen35.nextn_predict_layers": 0}
    recurrent = keys["qwen35.attention.recurrent_layers"]
    layers["qwen35.attention.recurrent_layers"] = recurrent._replace(value=recurrent.value[:2])
    target, path = tmp_path / "small-Q8_0.gguf", tmp_path / "mtp-small-F16.gguf"
    target.write_bytes(gguf_bytes(keys | layers, {name: each for name, each in tensors.items() if not name.startswith("blk.2.")}))
    assert load_builtin_head(load_checkpoint(target)) is None
    path.write_bytes(gguf_bytes(keys, head))
    other = tmp_path / "mtp-small-Q8_0.gguf"  # of a model with another number of layers
    names = {name: name.replace("blk.2.", "blk.3.") for name in head}
    more = {"qwen35.block_count": 4, "qwen35.attention.recurrent_layers": recurrent._replace(value=[*recurrent.value, False])}
    other.write_bytes(gguf_bytes(keys | more, {names[name]: each for name, each in head.items()}))
    expected = read_all_tensors(load_mtp_head(load_checkpoint(FIXTURES / "qwen35_images")))
    for name, tensor in read_all_tensors(load_checkpoint(path)).items():
        np.testing.assert_array_equal(to_float32(tensor), to_float32(expected[name]))
    n = load_checkpoint(target).config.vocab_size
    tokenizer = write_tokenizer(
        tmp_path / "tok.bin", [(f"<{i}>".encode() if i < 3 else chr(900 + i).encode(), 0) for i in range(n)]
    )
    plain = SpeculativeDecoder(target, None, tokenizer).generate(PROMPT, 40, temperature=0).tokens
    for draft in ("auto", "mtp", path):
        decoder = SpeculativeDecoder(target, draft, tokenizer)
        assert isinstance(decoder.draft, Head)
        assert decoder.generate(PROMPT, 40, temperature=0).tokens == plain
    with pytest.raises(CheckpointError, match="it is the head of a model of 3 layers; the target has 2"):
        SpeculativeDecoder(target, other, tokenizer)
    with pytest.raises(CheckpointError, match="is a head that drafts for a model"):
        SpeculativeDecoder(path, None, tokenizer)
    assert find_neighbour_draft(target) == path
    rows = {entry.path.name: entry for entry in list_entries(tmp_path)}
    assert make_row(rows[target.name], [*rows.values()])["drafts"] == ["mtp", str(path)]
    assert make_row(rows[path.name], [*rows.values()])["head"]["targets"] == [str(target)]


def test_copies_of_the_targets_embedding_and_classifier_are_ignored(tmp_path):
    """Published GLM-4.7-Flash and DeepSeek-V3 files have such copies. Other tensors that a head does not need are refused."""
    expected = read_all_tensors(load_mtp_head(load_checkpoint(FIXTURES / "glm4_moe_lite")))

    def add(tensors, names=("embed_tokens", "shared_head.head")):
        tensors.update({f"model.layers.3.{name}.weight": tensors["lm_head.weight"] for name in names})

    folder = edit_tensors(copy_fixture(tmp_path / "model", "glm4_moe_lite"), add)
    found = read_all_tensors(load_mtp_head(load_checkpoint(folder)))
    assert {*found} == {*expected}
    for key, tensor in expected.items():
        np.testing.assert_array_equal(np.array(found[key]), np.array(tensor))
    with pytest.raises(CheckpointError, match="unknown"):
        load_mtp_head(load_checkpoint(edit_tensors(folder, lambda tensors: add(tensors, ["unknown"]))))
    (keys, tensors), path = read_converted("glm4_moe_lite"), tmp_path / "model.gguf"
    copies = ("embed_tokens", "shared_head_head")
    path.write_bytes(gguf_bytes(keys, tensors | {f"blk.3.nextn.{name}.weight": tensors["output.weight"] for name in copies}))
    assert {*read_all_tensors(load_mtp_head(load_checkpoint(path)))} == {*expected}


def test_experts_of_a_head_may_be_stacked_or_separate_tensors(tmp_path):
    def separate(tensors):
        for name in [name for name in tensors if name.startswith("mtp.") and ".experts." in name]:
            stored_format, stacked = tensors.pop(name)
            gate, up = np.split(stacked, 2, 1)
            parts = {"down_proj": stacked} if "down" in name else {"gate_proj": gate, "up_proj": up}
            at = name.rpartition(".")[0]
            tensors.update(
                {
                    f"{at}.{i}.{part}.weight": (stored_format, expert)
                    for part, each in parts.items()
                    for i, expert in enumerate(each)
                }
            )

    folder = edit_tensors(copy_fixture(tmp_path / "model", "qwen3_next"), separate)
    found, expected = (read_all_tensors(load_mtp_head(load_checkpoint(each))) for each in (folder, FIXTURES / "qwen3_next"))
    for key, tensor in expected.items():
        np.testing.assert_array_equal(np.array(found[key]), np.array(tensor))


def test_a_missing_or_damaged_head_is_reported_only_if_it_is_requested(tmp_path):
    """Decode by default without a head that cannot be read."""
    small, characters = (
        write_tokenizer(tmp_path / f"{n}.bin", [(f"<{i}>".encode() if i < 3 else bytes([57 + i]), 0) for i in range(n)])
        for n in (65, 70)
    )
    without = SpeculativeDecoder(FIXTURES / "qwen35_odd", "auto", small)
    assert without.draft is None and without.has_draft
    with pytest.raises(ValueError, match=r"qwen35_odd has no built-in head \(mtp\)"):
        SpeculativeDecoder(FIXTURES / "qwen35_odd", "mtp", small)
    with pytest.raises(ValueError, match="name the target by its file"):
        SpeculativeDecoder(make_pair()[0].model, "mtp", characters)
    folder = edit_tensors(copy_fixture(tmp_path / "damaged", "qwen35"), lambda tensors: tensors.pop("mtp.norm.weight"))
    message = r"has no tensor mtp\.norm\.weight"
    with pytest.raises(CheckpointError, match=message):
        SpeculativeDecoder(folder, "mtp", characters)
    assert SpeculativeDecoder(folder, "auto", characters).draft is None
    with_head = SpeculativeDecoder(FIXTURES / "qwen35", tokenizer=characters)
    assert isinstance(with_head.draft, Head) and with_head.weights == "target bf16, head bf16 and int8"
    assert {name: with_head.draft.weights.matrices[name].weight_format for name in ("embedding", "classifier")} == {
        "embedding": BF16,
        "classifier": INT8,
    }
    plain = SpeculativeDecoder(FIXTURES / "qwen35", None, characters)
    for temperature in (0.0, 1.0):
        outputs = [decoder.generate([1, 7, 9], 40, temperature=temperature, seed=5).tokens for decoder in (plain, with_head)]
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_output_is_plain_and_draft_tokens_are_accepted(verify):
    n_accepted = 0
    for name in NAMES:
        for sampling in (Sampling(0.0, seed=1), Sampling(0.9, seed=2)):
            target, head = make_pair(name, weight_format=INT8)
            verifier = VERIFIERS[verify](target.model.vocab_size, sampling)
            plain = get_tokens(decode(target, None, verifier, PROMPT, 60, FixedLength(1), {}))
            for gamma in (1, 3, 7):
                cache = new_head_cache(head.head)
                drafter = make_model_drafter(cache, verifier, sampling, eos_tokens={})
                tokens, statistics = collect(decode(cache.target_cache, drafter, verifier, PROMPT, 60, FixedLength(gamma), {}))
                assert statistics.n_drafted > 40
                n_accepted += statistics.n_accepted
                assert tokens == plain or verify == "rejection"
    assert n_accepted > 5  # the head is random
