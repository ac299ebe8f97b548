"""Model folders with their tokenizers, from the command line and the library: output alone and with a draft."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.loaders import CheckpointError
from specdec.loaders.model_loader import TARGET_MEMORY_SHARE, load_model
from tests.tools.command_runs import Run, from_json, run  # noqa: F401  (a fixture)
from tests.tools.hf_folders import safetensors_bytes

pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec.text.hf_tokenizer import HFTokenizer
from tests.tools.model_folders import SAMPLINGS, generate_tokens, llama_shapes, make_folder

SIZES = {"dim": 48, "hidden": 72, "layers": 2, "heads": 4, "kv_heads": 2, "positions": 96}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_draft_does_not_change_the_output(tmp_path: Path, family: str) -> None:
    """With its int8 copy as the draft, and with another model that has fewer rows."""
    target, other = (
        make_folder(tmp_path / "target", family, padding=30),
        make_folder(tmp_path / "draft", family, padding=7, seed=1),
    )
    alone, by_itself, by_other = (SpeculativeDecoder(target, draft, gamma=4) for draft in (None, "self", other))
    assert (
        alone.target.weights.format_names == "bf16"
        and by_itself.draft is not None
        and by_itself.draft.weights.format_names == "int8"
    )
    for sampling in SAMPLINGS:
        assert generate_tokens(by_itself, sampling) == generate_tokens(by_other, sampling) == generate_tokens(alone, sampling)


def test_padding_rows_are_never_sampled(tmp_path: Path) -> None:
    """Although their logits are the largest: their embeddings are those of the others, many times as long."""
    target, draft = make_folder(tmp_path / "target", padding=40), make_folder(tmp_path / "draft", padding=64)
    n = HFTokenizer(target).vocab_size
    logits = load_model(target).new_cache().forward([1, 2, 3], 3)
    assert logits.shape[1] == n + 40
    for verify in ("coupled", "rejection"):
        decoder = SpeculativeDecoder(target, draft, verify=verify)  # type: ignore[arg-type]
        for seed in range(1, 6):
            assert max(generate_tokens(decoder, Sampling(5.0, top_p=0, seed=seed))) < n
            assert max(generate_tokens(decoder, Sampling(5.0, top_p=0, seed=seed, min_p=0.9))) < n


def test_a_target_may_sample_tokens_that_its_draft_lacks(tmp_path: Path) -> None:
    target, draft = make_folder(tmp_path / "target", seed=2), make_folder(tmp_path / "draft", seed=3)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    n = HFTokenizer(target).vocab_size
    config = json.loads((draft / "config.json").read_text())
    cut = n - 40
    tokenizer["model"]["vocab"] = {name: token for name, token in tokenizer["model"]["vocab"].items() if token < cut}
    names = set(tokenizer["model"]["vocab"])
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) in names]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    shapes = llama_shapes(cut, 96)
    rng = np.random.default_rng(5)
    tensors = {name: ("F32", rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    (draft / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": cut}))
    alone, drafted = SpeculativeDecoder(target, None), SpeculativeDecoder(target, draft, gamma=4)
    seen: set[int] = set()
    for seed in range(1, 9):
        sampling = Sampling(3.0, top_p=0, seed=seed)
        seen.update(tokens := generate_tokens(alone, sampling))
        assert generate_tokens(drafted, sampling) == tokens
    assert max(seen) >= cut


def test_a_draft_keeps_drafting_beyond_its_context(tmp_path: Path) -> None:
    """GPT-2's positions are a table in the file; its context slides along the sequence."""
    target, draft = make_folder(tmp_path / "target", "llama"), make_folder(tmp_path / "draft", "gpt2", positions=24)
    decoder = SpeculativeDecoder(target, draft, gamma=4)
    assert decoder.draft is not None and decoder.draft.n_positions == 24
    steps = [event for event in decoder.stream("The cat sat", 80, Sampling(0.9, seed=2)) if isinstance(event, Step)]
    assert sum(len(step.tokens) for step in steps) == 80
    assert all(step.draft_tokens for step in steps[:-1])
    assert generate_tokens(decoder, SAMPLINGS[0], 80) == generate_tokens(SpeculativeDecoder(target, None), SAMPLINGS[0], 80)


def test_output_ends_with_the_learned_positions(tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(make_folder(tmp_path / "target", "gpt2", positions=40))
    statistics = decoder.generate("The cat sat", 100, temperature=3.0, top_p=0, seed=1).statistics
    assert statistics.stop_reason == "seq_len"
    assert statistics.n_prompt + statistics.n_generated == 41


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_draft_with_another_tokenizer_does_not_change_the_output(tmp_path: Path, verify: str) -> None:
    """With GPT-2's vocabulary, mostly the target's in another order; also as a stage, and pickled."""
    target, draft = make_folder(tmp_path / "target"), make_folder(tmp_path / "draft", tokenizer="gpt2", padding=5)
    other = SpeculativeDecoder(target, draft, verify=verify, gamma=4)  # type: ignore[arg-type]
    assert 380 < other.shared["draft"] < other.n_ids and other.draft and other.draft.vocab_size == other.n_ids
    assert f"draft int8 ({other.shared['draft']} of {other.n_ids} tokens)" in other.weights
    outputs = [generate_tokens(other, sampling) for sampling in SAMPLINGS]
    assert max(map(max, outputs)) < other.n_ids
    again = pickle.loads(pickle.dumps(other))
    assert again.shared == other.shared and [generate_tokens(again, sampling) for sampling in SAMPLINGS] == outputs
    if verify == "coupled":
        staged = SpeculativeDecoder(target, make_folder(tmp_path / "same", seed=1), stage=draft)
        forked = SpeculativeDecoder(target, draft, tree="on")
        alone = SpeculativeDecoder(target, None)
        for sampling, tokens in zip(SAMPLINGS, outputs, strict=True):
            assert (
                generate_tokens(alone, sampling)
                == tokens
                == generate_tokens(staged, sampling)
                == generate_tokens(forked, sampling)
            )
        assert staged.shared == {"stage": other.shared["draft"]} and alone.shared == {}


def test_the_shared_vocabulary_of_another_tokenizer_is_reported(run: Run, tmp_path: Path) -> None:
    target, draft = make_folder(tmp_path / "target"), make_folder(tmp_path / "draft", tokenizer="gpt2")
    options = ("-i", "The cat sat", "-n", 30, "-s", 5, "-t", 1, "--json")
    code, out, err = run("-m", target, "-d", draft, *options)
    shared = SpeculativeDecoder(target, draft).shared["draft"]
    assert code == 0 and json.loads(out)["settings"]["weights"].endswith(f"draft int8 ({shared} of 400 tokens)")
    assert (
        err == f"specdec: the draft has another vocabulary, with {shared} of the target's 400 tokens, and proposes only those\n"
    )
    assert json.loads(out)["tokens"] == json.loads(run("-m", target, "-d", "none", *options)[1])["tokens"]
    code, out, err = run("race", "-m", target, "-d", draft, *options)
    assert code == 0 and json.loads(out)["same_text"] and "another vocabulary" in err


def test_a_loaded_model_can_use_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "target")
    decoder = SpeculativeDecoder(load_model(path), load_model(path, int8=True), tokenizer=path)
    assert generate_tokens(decoder, SAMPLINGS[1]) == generate_tokens(SpeculativeDecoder(path, None), SAMPLINGS[1])
    again = pickle.loads(pickle.dumps(decoder))
    assert generate_tokens(again, SAMPLINGS[1]) == generate_tokens(decoder, SAMPLINGS[1])


def test_bf16_weights_are_stored_once(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "target")
    model = load_model(path)
    n_bytes = (path / "model.safetensors").stat().st_size
    assert n_bytes <= model.weights.n_bytes + 4096 and model.weights.n_bytes < 1.3 * n_bytes  # panels and vectors are padded
    assert load_model(path, int8=True).weights.format_names == "int8"


def test_the_command_line_generates_from_a_folder(run: Run, tmp_path: Path) -> None:
    target, draft = make_folder(tmp_path / "target"), make_folder(tmp_path / "draft", seed=1)
    for more in ([], ["-d", draft], ["-d", "self"], ["--quantize", "none", "-d", draft]):
        result = from_json(run("-m", target, *more, "-i", "The cat sat", "-n", 30, "-s", 5, "-t", 1, "--json"))
        assert result["text"].startswith("The cat sat") and len(result["tokens"]) > 5
        assert result["tokens"] == (first := locals().get("first", result["tokens"]))
    code, out, err = run("-m", tmp_path / "target" / "model.safetensors")
    assert code == 2 and "name the folder" in err and err.count("\n") == 1


def test_zero_steps_generate_to_the_end_of_the_context(run: Run, tmp_path: Path) -> None:
    target = make_folder(tmp_path / "target", positions=64)
    code, out, _ = run("-m", target, "-n", 0, "-s", 1, "-t", 4, "-p", 0, "--json")
    result = json.loads(out)
    assert code == 0 and result["stop_reason"] == "seq_len" and result["n_prompt"] + result["n_generated"] == 65


def test_a_sequence_that_does_not_fit_into_memory_is_rejected(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    target = make_folder(tmp_path / "target", positions=100_000)
    model = load_model(target)
    memory_bytes = model.weights.n_bytes + model.get_sequence_bytes(3000) / TARGET_MEMORY_SHARE
    monkeypatch.setattr("specdec.loaders.model_loader.get_physical_memory_bytes", lambda: memory_bytes)
    n = SpeculativeDecoder(target).n_positions
    assert n >= 3000 and model.get_sequence_bytes(n) == model.get_sequence_bytes(3000) < model.get_sequence_bytes(n + 1)
    code, _, err = run("-m", target, "-n", 50_000)
    assert code == 2 and f"has room for {n} tokens" in err and err.count("\n") == 1
    monkeypatch.setattr(
        "specdec.loaders.model_loader.get_physical_memory_bytes",
        lambda: model.weights.n_bytes + model.get_sequence_bytes(300) / TARGET_MEMORY_SHARE,
    )
    code, out, err = run("-m", target, "-n", 0, "-s", 1, "-t", 4, "-p", 0, "--json")
    assert code == 0 and "tokens that the target's context has left" in err
    assert json.loads(out)["n_generated"] <= 320


def test_the_longest_sequence_does_not_depend_on_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The draft's context is as long as the rest of the memory allows; without any, it proposes nothing."""
    target = make_folder(tmp_path / "target", positions=100_000)
    model = load_model(target)
    outputs = []
    for draft_bytes in (model.get_sequence_bytes(600), 0):
        memory_bytes = model.weights.n_bytes + (model.get_sequence_bytes(3000) + draft_bytes) / TARGET_MEMORY_SHARE
        monkeypatch.setattr(
            "specdec.loaders.model_loader.get_physical_memory_bytes", lambda memory_bytes=memory_bytes: memory_bytes
        )
        alone, pair = SpeculativeDecoder(target), SpeculativeDecoder(target, "self")
        assert pair.draft is not None and pair.draft.n_positions < alone.n_positions == pair.n_positions
        outputs += [decoder.generate([1], 900, temperature=0.0).tokens for decoder in (alone, pair)]
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]


def test_an_adapter_next_to_a_model_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    target, draft = make_folder(tmp_path / "target"), make_folder(tmp_path / "draft")
    for path in (target, draft):
        (path / "adapter_config.json").write_text("{}")
    code, out, err = run("-m", target, "-d", draft, "-i", "The cat sat", "-n", 9, "--json")
    lines = [line for line in err.splitlines() if "adapter" in line]
    assert code == 0 and json.loads(out)["text"].startswith("The cat sat")
    assert [line.partition(" holds an adapter")[0] for line in lines] == [f"specdec: {path}" for path in (target, draft)]


def test_an_unsupported_folder_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "target")
    (path / "config.json").write_text('{"model_type": "mamba"}')
    code, _, err = run("-m", path)
    assert code == 2 and "mamba" in err and "qwen3" in err and err.count("\n") == 1
    with pytest.raises(CheckpointError, match="mamba"):
        SpeculativeDecoder(path)


def test_a_draft_with_many_more_rows_and_no_tokenizer_is_rejected(tmp_path: Path) -> None:
    """A vocabulary is padded with a few rows; more of them are another vocabulary."""
    target, draft = make_folder(tmp_path / "target"), make_folder(tmp_path / "draft", padding=1500)
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="these must be equal"):
        SpeculativeDecoder(target, draft)


def test_a_wrong_tokenizer_is_rejected_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, other = make_folder(tmp_path / "target", padding=0), make_folder(tmp_path / "other", tokenizer="llama2")
    monkeypatch.setattr("specdec.loaders.model_loader.Loader.load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"pass the target's own tokenizer with tokenizer=\.\.\."):
        SpeculativeDecoder(target, tokenizer=other)
