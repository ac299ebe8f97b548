"""Gemma 4's assistant, compared with transformers' own loop, and with the KV cache of its target."""

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.draft import installed_models
from specdec.families import gemma4_assistant
from specdec.heads.shared_kv_head import SharedKVHead, SharedKVHeadCache
from specdec.loaders import CheckpointError, check_compatibility, load_checkpoint
from specdec.loaders.model_loader import Loader
from specdec.model.kv_cache import INITIAL_CAPACITY
from specdec.model.model import Model
from specdec.quant import INT4, INT8, WeightFormat
from specdec.quant.packed_matrix import to_float32
from specdec.runtime import op_program
from tests.tools.checkpoint_files import write_tokenizer
from tests.tools.decode import generate_tokens
from tests.tools.hf_folders import FIXTURES, edit_tensors, read_all_tensors
from tests.tools.random_models import THREAD_COUNTS, fake_three_threads, scatter_phases

PLACE = FIXTURES / "heads" / "assistants"
NAMES = ("plain", "ordered")
REFERENCE = dict(np.load(PLACE / "expected.npz"))
TOKENS = REFERENCE["tokens"].tolist()
N_POSITIONS = 500
OF_FIVE = {"use_ordered_embeddings": True, "num_centroids": 5, "centroid_intermediate_top_k": 2}


def make_target(n_threads: int = 1, kv: Any = "f32") -> Model:
    checkpoint = load_checkpoint(PLACE / "target")
    return Model(checkpoint.config, Loader().pack(checkpoint, None), n_threads, N_POSITIONS, kv)


def make_assistant(target: Model, name: str, n_threads: int = 1, weight_format: WeightFormat | None = None) -> SharedKVHeadCache:
    """Return a cache of an assistant over a new cache of its target."""
    checkpoint = load_checkpoint(PLACE / name)
    weights = Loader().pack(checkpoint, weight_format)
    return new_cache(SharedKVHead(checkpoint.config, weights, target, checkpoint.target_ids, n_threads, N_POSITIONS))


def new_cache(assistant: SharedKVHead) -> SharedKVHeadCache:
    return assistant.new_draft_cache(assistant.target.new_cache(assistant.target_layers))


def chain_logits(assistant: SharedKVHeadCache, tokens: list[int], n: int = 4) -> np.ndarray:
    """Return the logits of a chain of greedy draft tokens; the target runs all tokens but the last."""
    assistant.target_cache.forward(tokens[:-1], 0)
    rows = list[np.ndarray]()
    for _ in range(n):
        rows.append(assistant.forward([*tokens, *(int(row.argmax()) for row in rows)])[0].copy())
    return np.stack(rows)


@pytest.mark.parametrize("name", NAMES)
def test_draft_chains_equal_those_of_transformers(name: str) -> None:
    """Compare sequences shorter and longer than the window; one visible position more or less gives an error of 0.07 and more."""
    assistant = make_assistant(make_target(), name)
    for length, drafted, expected in zip(
        REFERENCE["lengths"], REFERENCE[f"{name}_guesses"], REFERENCE[f"{name}_logits"], strict=True
    ):
        logits = chain_logits(assistant, TOKENS[:length], len(drafted))
        generated = np.isfinite(logits)
        assert (generated.sum(1) == (64 if name == "ordered" else 192)).all()
        np.testing.assert_allclose(logits[generated], expected[generated], rtol=0, atol=1e-4)
        assert logits.argmax(1).tolist() == drafted.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_logits_depend_only_on_the_sequence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on earlier drafts, threads, the passes by which the target reached the sequence, or grown buffers."""
    expected = {n: chain_logits(make_assistant(make_target(), name), TOKENS[:n]) for n in (2, 17, 60)}
    fake_three_threads(monkeypatch)
    for n_threads in (*THREAD_COUNTS, 3):
        target = make_target(n_threads)
        assistant = make_assistant(target, name, n_threads)
        if n_threads == 3:
            monkeypatch.setattr(op_program, "run_on_threads", scatter_phases(7))
        for n in (60, 2, 17, 60):
            assistant.target_cache.forward([*TOKENS[:n], 7, 7, 7], 3)
            assistant.forward([*TOKENS[:n], 7, 9, 11])
            np.testing.assert_array_equal(chain_logits(assistant, TOKENS[:n]), expected[n])
        assistant.target_cache.forward([5] * (INITIAL_CAPACITY + 40), 0)
        np.testing.assert_array_equal(chain_logits(assistant, TOKENS[:17]), expected[17])
        other = pickle.loads(pickle.dumps(assistant.head))
        np.testing.assert_array_equal(chain_logits(new_cache(other), TOKENS[:17]), expected[17])


def test_several_logits_equal_those_of_each_prefix() -> None:
    """Compute each draft token from the target's state of the token before; without a token there is none."""
    assistant = make_assistant(make_target(), "plain")
    alone = [chain_logits(assistant, TOKENS[:n], 1)[0] for n in range(2, 12)]
    assistant.target_cache.forward(TOKENS[:30], 0)
    np.testing.assert_array_equal(assistant.forward(TOKENS[:11], 10), alone)
    assert assistant.can_draft(TOKENS[:31]) and not assistant.can_draft(TOKENS[:32]) and not assistant.can_draft(TOKENS[:1])
    with pytest.raises(ValueError, match="holds no hidden states"):
        assistant.forward([9, 9, 9])


@pytest.mark.parametrize(
    ("kv", "name", "weight_format", "verify"),
    [
        ("f32", "plain", None, "coupled"),
        ("f16", "ordered", INT8, "coupled"),
        ("q8", "plain", INT8, "coupled"),
        ("f16", "ordered", INT4, "coupled"),
        *(("f32", name, None, verify) for name in NAMES for verify in ("rejection", "block")),
    ],
)
def test_an_assistant_changes_no_output(kv: Any, name: str, weight_format: WeightFormat | None, verify: str) -> None:
    """Also beyond the point where the target's buffers grow. Other verifiers than `coupled` only accept some of its tokens."""
    target, n_accepted = make_target(kv=kv), 0
    assistant = make_assistant(target, name, weight_format=weight_format)
    prompt = (TOKENS * 5)[: INITIAL_CAPACITY - 30]
    for sampling in (Sampling(0.0, seed=1), Sampling(0.8, seed=2), Sampling(1.2, 20, 0.95, seed=3)):
        plain, _ = generate_tokens(target, None, sampling, prompt=prompt)
        tokens, statistics = generate_tokens(assistant.target_cache, assistant, sampling, 3, verify, prompt)
        assert verify != "coupled" or tokens == plain
        n_accepted += statistics.n_accepted
    assert n_accepted > 3


def words(folder: Path) -> Path:
    return write_tokenizer(
        folder / "tok192.bin", [(f"<{i}>".encode() if i < 3 else chr(900 + i).encode(), 0) for i in range(192)]
    )


@pytest.mark.parametrize(("name", "place"), [("plain", "model-assistant"), ("ordered", "model/assistant")])
def test_an_assistant_next_to_a_model_is_the_default_draft(name: str, place: str, tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    shutil.copytree(PLACE / "target", tmp_path / "model")
    without = SpeculativeDecoder(tmp_path / "model", "auto", tokenizer)
    assert without.draft is None and without.has_draft
    shutil.copytree(PLACE / name, tmp_path / place)
    expected = without.generate([1, 7, 9], max_tokens=30, temperature=0).tokens
    for draft in ("auto", "mtp", tmp_path / place):
        decoder = SpeculativeDecoder(tmp_path / "model", draft, tokenizer)
        assert isinstance(decoder.draft, SharedKVHead)
        assert decoder.generate([1, 7, 9], max_tokens=30, temperature=0).tokens == expected


@pytest.mark.parametrize(
    ("values", "text_config", "message"),
    [
        ({"backbone_hidden_size": 24}, {}, "it takes hidden states of dimension 24; the target's have 20"),
        ({}, {"vocab_size": 190}, "it is for a vocabulary of 190 tokens; the target has 192"),
        ({}, {"head_dim": 8}, "it reads keys of 1 x 8 numbers in layers with sliding-window attention; the target's are 1 x 6"),
        (
            {}, {"per_layer_config": {"3": {"head_dim": 16, "num_key_value_heads": 2}}},
            "it reads keys of 2 x 16 numbers in layers with full attention; the target's are 1 x 16",
        ),
    ],
)  # fmt: skip
def test_an_assistant_of_another_target_is_refused_before_its_weights_are_read(
    values: dict[str, Any], text_config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target, one = load_checkpoint(PLACE / "target"), load_checkpoint(PLACE / "plain")
    folder = tmp_path / "assistant"
    folder.mkdir()
    given = json.loads((PLACE / "plain" / "config.json").read_text())
    config_text = given["text_config"] | text_config
    (folder / "config.json").write_text(json.dumps(given | values | {"text_config": config_text}))
    config = gemma4_assistant.parse_config(folder / "config.json", json.loads((folder / "config.json").read_text()), ())
    with pytest.raises(CheckpointError, match=re.escape(f"is not compatible with the target: {message}")):
        check_compatibility(replace(one, config=config), target.config)


@pytest.mark.parametrize(
    ("values", "text_config", "message"),
    [
        ({"text_config": None}, {}, "text_config is null; expected an object"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings is false"),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; expected 4"),
        ({}, {"hidden_size_per_layer_input": 7}, "hidden_size_per_layer_input is 7; expected 0"),
        ({}, {"enable_moe_block": True}, "enable_moe_block is true"),
        (OF_FIVE, {}, "n_centroids is 5; expected equal parts of a multiple of"),
        (
            {"use_ordered_embeddings": True, "num_centroids": 6, "centroid_intermediate_top_k": 7}, {},
            "centroid_intermediate_top_k is 7; expected an integer from 1 to 6",
        ),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_refused_in_one_line(
    values: dict[str, Any], text_config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = json.loads((PLACE / "plain" / "config.json").read_text())
    config_text = given["text_config"] | text_config
    folder = shutil.copytree(PLACE / "plain", tmp_path / "assistant")
    (folder / "config.json").write_text(json.dumps(given | {"text_config": config_text} | values))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(folder)


def test_the_assistant_of_gemma_4_12b_has_other_defaults(tmp_path: Path) -> None:
    folder = shutil.copytree(PLACE / "plain", tmp_path / "assistant")
    given = json.loads((folder / "config.json").read_text())
    del given["text_config"]["max_position_embeddings"]
    given["text_config"]["model_type"] = "gemma4_unified_text"
    (folder / "config.json").write_text(json.dumps(given | {"model_type": "gemma4_unified_assistant"}))
    assert load_checkpoint(folder).config == replace(load_checkpoint(PLACE / "plain").config, seq_len=262144)
    del given["backbone_hidden_size"]
    (folder / "config.json").write_text(json.dumps(given | {"model_type": "gemma4_unified_assistant"}))
    with pytest.raises(CheckpointError, match="7680"):
        load_checkpoint(folder)


def test_a_bad_token_ordering_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(PLACE / "ordered", tmp_path / "assistant")
    name = "masked_embedding.token_ordering"
    edit_tensors(folder, lambda tensors: tensors.update({name: (tensors[name][0], np.zeros(192, np.int64))}))
    with pytest.raises(CheckpointError, match="maps 192 rows to the id 0"):
        load_checkpoint(folder)


def test_the_models_command_lists_fitting_targets(tmp_path: Path) -> None:
    shutil.copytree(PLACE / "target", tmp_path / "model")
    shutil.copytree(PLACE / "plain", tmp_path / "model-assistant")
    found = {entry.path.name: entry for entry in installed_models.list_entries(tmp_path)}
    rows = {name: installed_models.make_row(entry, [*found.values()]) for name, entry in found.items()}
    assert rows["model"]["drafts"] == ["mtp", str(tmp_path / "model-assistant")] and rows["model"]["head"] is None
    assert rows["model-assistant"]["head"]["targets"] == [str(tmp_path / "model")]


def test_a_file_converted_by_llama_cpp_equals_the_folder_in_fp16() -> None:
    """Compare a file that `tests/tools/make_converted.py` made with the folder it was made of."""
    file, folder = load_checkpoint(FIXTURES / "gguf" / "heads_assistants_plain.gguf"), load_checkpoint(PLACE / "plain")
    assert replace(file.config, layers=(), hidden_dim=40) == replace(folder.config, layers=(), hidden_dim=40)
    assert [file.config.layer_config(i) for i in range(4)] == [folder.config.layer_config(i) for i in range(4)]
    expected = read_all_tensors(folder)
    for name, tensor in read_all_tensors(file).items():
        np.testing.assert_allclose(to_float32(tensor), to_float32(expected[name]), rtol=1e-3, atol=1e-4)
    target = make_target()
    with_file = new_cache(SharedKVHead(file.config, Loader().pack(file, None), target, None, 1, N_POSITIONS))
    logits = chain_logits(make_assistant(target, "plain"), TOKENS[:20])
    np.testing.assert_allclose(chain_logits(with_file, TOKENS[:20]), logits, rtol=0, atol=0.03)


def test_a_gguf_assistant_drafts(tmp_path: Path) -> None:
    tokenizer, draft = words(tmp_path), FIXTURES / "gguf" / "heads_assistants_plain.gguf"
    expected = SpeculativeDecoder(PLACE / "target", None, tokenizer).generate([1, 7, 9], max_tokens=30).tokens
    decoder = SpeculativeDecoder(PLACE / "target", draft, tokenizer)
    assert isinstance(decoder.draft, SharedKVHead) and decoder.generate([1, 7, 9], max_tokens=30).tokens == expected
    with pytest.raises(CheckpointError, match="is not compatible with the target"):
        check_compatibility(load_checkpoint(draft), load_checkpoint(FIXTURES / "gemma4").config)


def test_each_sequence_reads_the_kv_cache_of_its_own_target() -> None:
    """The sequences share passes, like those of the server."""
    target = make_target()
    assistant = make_assistant(target, "ordered")
    expected = {n: chain_logits(assistant, TOKENS[:n]) for n in (12, 40)}
    other = new_cache(assistant.head)
    target.forward([(assistant.target_cache, TOKENS[:11], 0), (other.target_cache, TOKENS[:39], 1)])
    np.testing.assert_array_equal(chain_logits(other, TOKENS[:40]), expected[40])
    np.testing.assert_array_equal(chain_logits(assistant, TOKENS[:12]), expected[12])
