"""Gemma 4's assistant against transformers' own loop, and on its target: it reads keys and values that are not its own."""

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.cli import model_catalog
from specdec.draft.model import HeadDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Statistics, decode
from specdec.families import gemma4_assistant
from specdec.heads.shared_kv_head import Assistant
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.head_compatibility import check_fit
from specdec.loaders.loader import Loader
from specdec.model.transformer import FIRST_POSITIONS, Transformer
from specdec.quant import INT4, INT8, Kind
from specdec.quant.matrix import floats
from specdec.runtime import program
from specdec.sampling import Sampler
from specdec.verification import VERIFIERS
from tests.tools.checkpoint_files import write_tokenizer
from tests.tools.hf_folders import FIXTURES, read_all, retensor
from tests.tools.random_models import END_MARKS, THREADS, continuation, scattered, three_threads

PLACE = FIXTURES / "heads" / "assistants"
NAMES = ("plain", "ordered")
TOLD = dict(np.load(PLACE / "expected.npz"))
TOKENS = TOLD["tokens"].tolist()
N_POSITIONS = 500
OF_FIVE = {"use_ordered_embeddings": True, "num_centroids": 5, "centroid_intermediate_top_k": 2}


def target_of(n_threads: int = 1, kv: Any = "f32") -> Transformer:
    checkpoint = load_checkpoint(PLACE / "target")
    return Transformer(checkpoint.config, Loader().pack(checkpoint, None), n_threads, N_POSITIONS, kv)


def assistant_on(target: Transformer, name: str, n_threads: int = 1, kind: Kind | None = None) -> Assistant:
    checkpoint = load_checkpoint(PLACE / name)
    weights = Loader().pack(checkpoint, kind)
    return Assistant(checkpoint.config, weights, target, checkpoint.target_ids, n_threads, N_POSITIONS)


def guessed(assistant: Assistant, text: list[int], n: int = 4) -> np.ndarray:
    """Logits of a chain of greedy guesses behind a text, of which the target runs all but the last token."""
    assistant.target.forward(text[:-1], 0)
    rows = list[np.ndarray]()
    for _ in range(n):
        rows.append(assistant.forward([*text, *(int(row.argmax()) for row in rows)])[0].copy())
    return np.stack(rows)


@pytest.mark.parametrize("name", NAMES)
def test_chains_of_guesses_are_those_of_transformers(name: str) -> None:
    """Of texts shorter and longer than the window; one position more or less in sight is off by 0.07 and more."""
    assistant = assistant_on(target_of(), name)
    for length, guesses, expected in zip(TOLD["lengths"], TOLD[f"{name}_guesses"], TOLD[f"{name}_logits"], strict=True):
        logits = guessed(assistant, TOKENS[:length], len(guesses))
        said = np.isfinite(logits)
        assert (said.sum(1) == (64 if name == "ordered" else 192)).all()
        np.testing.assert_allclose(logits[said], expected[said], rtol=0, atol=1e-4)
        assert logits.argmax(1).tolist() == guesses.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_on_the_text_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on what was guessed before, on threads, on how the target came to the text, nor on its buffers having grown."""
    expected = {n: guessed(assistant_on(target_of(), name), TOKENS[:n]) for n in (2, 17, 60)}
    three_threads(monkeypatch)
    for n_threads in (*THREADS, 3):
        target = target_of(n_threads)
        assistant = assistant_on(target, name, n_threads)
        if n_threads == 3:
            monkeypatch.setattr(program, "run_on_threads", scattered(7))
        for n in (60, 2, 17, 60):
            assistant.target.forward([*TOKENS[:n], 7, 7, 7], 3)
            assistant.forward([*TOKENS[:n], 7, 9, 11])
            np.testing.assert_array_equal(guessed(assistant, TOKENS[:n]), expected[n])
        target.forward([5] * (FIRST_POSITIONS + 40), 0)
        np.testing.assert_array_equal(guessed(assistant, TOKENS[:17]), expected[17])
        other = pickle.loads(pickle.dumps(assistant))
        np.testing.assert_array_equal(guessed(other, TOKENS[:17]), expected[17])


def test_several_logits_are_those_of_each_text() -> None:
    """Where the target holds the text, each is by the state of the token before; behind nothing there are none."""
    assistant = assistant_on(target_of(), "plain")
    alone = [guessed(assistant, TOKENS[:n], 1)[0] for n in range(2, 12)]
    assistant.target.forward(TOKENS[:30], 0)
    np.testing.assert_array_equal(assistant.forward(TOKENS[:11], 10), alone)
    assert assistant.drafts_for(TOKENS[:31]) and not assistant.drafts_for(TOKENS[:32]) and not assistant.drafts_for(TOKENS[:1])
    with pytest.raises(ValueError, match="holds no hidden states"):
        assistant.forward([9, 9, 9])


def texts(kv: Any, name: str, kind: Kind | None, verify: str) -> Statistics:
    """That no text is another with an assistant, beyond where the target's buffers grow."""
    target = target_of(kv=kv)
    assistant, statistics = assistant_on(target, name, kind=kind), Statistics()
    prompt = (TOKENS * 5)[: FIRST_POSITIONS - 30]
    for sampling in (Sampling(0.0, seed=1), Sampling(0.8, seed=2), Sampling(1.2, 20, 0.95, seed=3)):
        verifier = VERIFIERS[verify](192, sampling)
        plain, _ = continuation(target, None, sampling, prompt=prompt, max_tokens=60)
        drafter = HeadDrafter(assistant, Sampler(192, sampling), verifier.draft_noise, END_MARKS)
        text = list[int]()
        for event in decode(target, drafter, verifier, [*prompt], 60, FixedLength(3), END_MARKS):
            statistics.add(event)
            text += event.tokens if isinstance(event, Step) else []
        assert verify != "coupled" or text == plain
    return statistics


@pytest.mark.parametrize(
    ("kv", "name", "kind"), [("f32", "plain", None), ("f16", "ordered", INT8), ("q8", "plain", INT8), ("f16", "ordered", INT4)]
)
def test_it_changes_no_text(kv: Any, name: str, kind: Kind | None) -> None:
    assert texts(kv, name, kind, "coupled").n_accepted > 3


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_other_verifiers_take_what_it_says(name: str, verify: str) -> None:
    assert texts("f32", name, None, verify).n_accepted > 3


def words(folder: Path) -> Path:
    return write_tokenizer(
        folder / "tok192.bin", [(f"<{i}>".encode() if i < 3 else chr(900 + i).encode(), 0) for i in range(192)]
    )


@pytest.mark.parametrize(("name", "place"), [("plain", "model-assistant"), ("ordered", "model/assistant")])
def test_the_one_beside_a_model_is_the_default_draft(name: str, place: str, tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    shutil.copytree(PLACE / "target", tmp_path / "model")
    without = SpeculativeDecoder(tmp_path / "model", "auto", tokenizer)
    assert without.draft is None and without.has_draft
    shutil.copytree(PLACE / name, tmp_path / place)
    expected = without.generate([1, 7, 9], max_tokens=30, temperature=0).tokens
    for draft in ("auto", "mtp", tmp_path / place):
        decoder = SpeculativeDecoder(tmp_path / "model", draft, tokenizer)
        assert isinstance(decoder.draft, Assistant)
        assert decoder.generate([1, 7, 9], max_tokens=30, temperature=0).tokens == expected


@pytest.mark.parametrize(
    ("values", "of_text", "flaw"),
    [
        ({"backbone_hidden_size": 24}, {}, "it takes states of 24 numbers; the target's have 20"),
        ({}, {"vocab_size": 190}, "it is for 190 ids; the target has 192"),
        ({}, {"head_dim": 8}, "it takes keys of 1 x 8 numbers where layers have a window; the target's are 1 x 6"),
        (
            {}, {"per_layer_config": {"3": {"head_dim": 16, "num_key_value_heads": 2}}},
            "it takes keys of 2 x 16 numbers where layers have the whole text in sight; the target's are 1 x 16",
        ),
    ],
)  # fmt: skip
def test_one_of_another_target_is_told_before_its_weights_are_read(
    values: dict[str, Any], of_text: dict[str, Any], flaw: str, tmp_path: Path
) -> None:
    target, one = load_checkpoint(PLACE / "target"), load_checkpoint(PLACE / "plain")
    folder = tmp_path / "assistant"
    folder.mkdir()
    given = json.loads((PLACE / "plain" / "config.json").read_text())
    text = given["text_config"] | of_text
    (folder / "config.json").write_text(json.dumps(given | values | {"text_config": text}))
    config = gemma4_assistant.config(folder / "config.json", json.loads((folder / "config.json").read_text()), ())
    with pytest.raises(CheckpointError, match=re.escape(f"does not fit the target: {flaw}")):
        check_fit(replace(one, config=config), target.config)


@pytest.mark.parametrize(
    ("values", "of_text", "flaw"),
    [
        ({"text_config": None}, {}, "text_config is null; expected an object"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings is false"),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; expected 4"),
        ({}, {"hidden_size_per_layer_input": 7}, "hidden_size_per_layer_input is 7; expected 0"),
        ({}, {"enable_moe_block": True}, "enable_moe_block is true"),
        (OF_FIVE, {}, "n_centroids is 5; expected as many parts of a multiple of"),
        (
            {"use_ordered_embeddings": True, "num_centroids": 6, "centroid_intermediate_top_k": 7}, {},
            "centroid_intermediate_top_k is 7; expected a whole number from 1 to 6",
        ),
    ],
)  # fmt: skip
def test_what_is_not_done_is_told_in_a_line(values: dict[str, Any], of_text: dict[str, Any], flaw: str, tmp_path: Path) -> None:
    given = json.loads((PLACE / "plain" / "config.json").read_text())
    text = given["text_config"] | of_text
    folder = shutil.copytree(PLACE / "plain", tmp_path / "assistant")
    (folder / "config.json").write_text(json.dumps(given | {"text_config": text} | values))
    with pytest.raises(CheckpointError, match=re.escape(flaw)):
        load_checkpoint(folder)


def test_an_order_that_is_none_is_told(tmp_path: Path) -> None:
    folder = shutil.copytree(PLACE / "ordered", tmp_path / "assistant")
    name = "masked_embedding.token_ordering"
    retensor(folder, lambda tensors: tensors.update({name: (tensors[name][0], np.zeros(192, np.int64))}))
    with pytest.raises(CheckpointError, match="says the id 0 for 192 rows"):
        load_checkpoint(folder)


def test_models_tells_which_targets_it_fits(tmp_path: Path) -> None:
    shutil.copytree(PLACE / "target", tmp_path / "model")
    shutil.copytree(PLACE / "plain", tmp_path / "model-assistant")
    found = {entry.path.name: entry for entry in model_catalog.entries(tmp_path)}
    rows = {name: model_catalog.row_of(entry, [*found.values()]) for name, entry in found.items()}
    assert rows["model"]["drafts"] == ["mtp", str(tmp_path / "model-assistant")] and rows["model"]["head"] is None
    assert rows["model-assistant"]["head"]["targets"] == [str(tmp_path / "model")]


def test_the_file_that_llama_cpp_converts_is_the_folder_in_fp16() -> None:
    """As `tests/tools/make_converted.py` makes it."""
    file, folder = load_checkpoint(FIXTURES / "gguf" / "heads_assistants_plain.gguf"), load_checkpoint(PLACE / "plain")
    assert replace(file.config, layers=(), hidden_dim=40) == replace(folder.config, layers=(), hidden_dim=40)
    assert [file.config.of_layer(i) for i in range(4)] == [folder.config.of_layer(i) for i in range(4)]
    expected = read_all(folder)
    for name, tensor in read_all(file).items():
        np.testing.assert_allclose(floats(tensor), floats(expected[name]), rtol=1e-3, atol=1e-4)
    target = target_of()
    with_file = Assistant(file.config, Loader().pack(file, None), target, None, 1, N_POSITIONS)
    logits = guessed(assistant_on(target, "plain"), TOKENS[:20])
    np.testing.assert_allclose(guessed(with_file, TOKENS[:20]), logits, rtol=0, atol=0.03)


def test_a_gguf_file_drafts_too(tmp_path: Path) -> None:
    tokenizer, draft = words(tmp_path), FIXTURES / "gguf" / "heads_assistants_plain.gguf"
    expected = SpeculativeDecoder(PLACE / "target", None, tokenizer).generate([1, 7, 9], max_tokens=30).tokens
    decoder = SpeculativeDecoder(PLACE / "target", draft, tokenizer)
    assert isinstance(decoder.draft, Assistant) and decoder.generate([1, 7, 9], max_tokens=30).tokens == expected
    with pytest.raises(CheckpointError, match="does not fit the target"):
        check_fit(load_checkpoint(draft), load_checkpoint(FIXTURES / "gemma4").config)


def test_one_on_a_seat_reads_the_seat_s_text() -> None:
    """As in the server, where texts share passes."""
    target = target_of()
    assistant = assistant_on(target, "ordered")
    expected = {n: guessed(assistant, TOKENS[:n]) for n in (12, 40)}
    seat = target.seat()
    other = assistant.of(seat)
    Transformer.forward_together([(target, TOKENS[:11], 0), (seat, TOKENS[:39], 1)])
    np.testing.assert_array_equal(guessed(other, TOKENS[:40]), expected[40])
    np.testing.assert_array_equal(guessed(assistant, TOKENS[:12]), expected[12])
