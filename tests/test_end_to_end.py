"""Folders of models with their tokenizers, from the command line and the library: what they write, alone and with a draft."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.loaders import CheckpointError
from specdec.loaders.loader import TARGET_SHARE, load_model
from specdec.model.gpt2 import GPT2
from specdec.tokenizer import TokenizerError
from tests.cli.test_cli import Run, from_json, run  # noqa: F401  (a fixture)
from tests.tools.hf_folders import FIXTURES, safetensors_bytes

pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec.text.hf_tokenizer import JsonTokenizer

TOKENIZERS = FIXTURES / "tokenizers"
SIZES = {"dim": 48, "hidden": 72, "layers": 2, "heads": 4, "kv_heads": 2, "positions": 96}


def llama_config(rows: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": rows, "max_position_embeddings": positions, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip


def gpt2_config(rows: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": rows, "n_positions": positions,
        "activation_function": "gelu_new", "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip


def llama_shapes(rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, 48), "model.norm.weight": (48,)}
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (48,), "post_attention_layernorm": (48,),
                "self_attn.q_proj": (48, 48), "self_attn.k_proj": (24, 48), "self_attn.v_proj": (24, 48),
                "self_attn.o_proj": (48, 48), "mlp.gate_proj": (72, 48), "mlp.up_proj": (72, 48), "mlp.down_proj": (48, 72),
            }.items()
        }  # fmt: skip
    return shapes


def gpt2_shapes(rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (rows, 48), "wpe.weight": (positions, 48)}
    layers = {
        "ln_1": (48,), "ln_2": (48,), "attn.c_attn": (48, 144), "attn.c_proj": (48, 48), "mlp.c_fc": (48, 192),
        "mlp.c_proj": (192, 48),
    }  # fmt: skip
    for i in range(2):
        for name, shape in layers.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return shapes | {"ln_f.weight": (48,), "ln_f.bias": (48,)}


def folder(
    path: Path, family: str = "llama", tokenizer: str = "smollm2", padding: int = 0, positions: int = 96, seed: int = 0
) -> Path:
    """A bf16 model of random weights, with a tokenizer of the fixtures'; padding: rows beyond it."""
    path.mkdir()
    rows = JsonTokenizer(TOKENIZERS / f"{tokenizer}.json").vocab_size + padding
    config, shapes = (
        (llama_config(rows, positions), llama_shapes(rows, positions))
        if family == "llama"
        else (gpt2_config(rows, positions), gpt2_shapes(rows, positions))
    )
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        numbers = rng.standard_normal(shape).astype(np.float32) * np.float32(0.3)
        numbers += np.float32("norm" in name or ".ln_" in name or name.startswith("ln_"))
        tensors[name] = "BF16", (numbers.view(np.uint32) >> 16).astype(np.uint16)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    shutil.copy(TOKENIZERS / f"{tokenizer}.json", path / "tokenizer.json")
    return path


def text_of(decoder: SpeculativeDecoder, sampling: Sampling, n: int = 60) -> list[int]:
    events = decoder.stream("The cat sat", n, sampling)
    return [token for event in events if isinstance(event, Step) for token in event.tokens]


SAMPLINGS = [Sampling(0), Sampling(1.0, top_p=0, seed=3), Sampling(0.7, top_k=20, seed=4)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_draft_changes_no_token_of_a_folders_text(tmp_path: Path, family: str) -> None:
    """By the int8 copy of itself, and by another model that knows less rows."""
    target, other = folder(tmp_path / "target", family, padding=30), folder(tmp_path / "draft", family, padding=7, seed=1)
    alone, by_itself, by_other = (SpeculativeDecoder(target, draft, gamma=4) for draft in (None, "self", other))
    assert alone.target.weights.kind == "bf16" and by_itself.draft is not None and by_itself.draft.weights.kind == "int8"
    for sampling in SAMPLINGS:
        assert text_of(by_itself, sampling) == text_of(by_other, sampling) == text_of(alone, sampling)


def test_rows_past_the_tokenizer_never_win(tmp_path: Path) -> None:
    """Though their logits are the largest: their embeddings are those of the others, many times as long."""
    target, draft = folder(tmp_path / "target", padding=40), folder(tmp_path / "draft", padding=64)
    n = JsonTokenizer(target).vocab_size
    model = load_model(target)
    logits = model.forward([1, 2, 3], 3)
    assert logits.shape[1] == n + 40
    for verify in ("coupled", "rejection"):
        decoder = SpeculativeDecoder(target, draft, verify=verify)  # type: ignore[arg-type]
        for seed in range(1, 6):
            assert max(text_of(decoder, Sampling(5.0, top_p=0, seed=seed))) < n
            assert max(text_of(decoder, Sampling(5.0, top_p=0, seed=seed, min_p=0.9))) < n


def test_a_target_may_say_tokens_that_its_draft_has_no_row_for(tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "target", seed=2), folder(tmp_path / "draft", seed=3)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    n = JsonTokenizer(target).vocab_size
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
    said: set[int] = set()
    for seed in range(1, 9):
        sampling = Sampling(3.0, top_p=0, seed=seed)
        said.update(tokens := text_of(alone, sampling))
        assert text_of(drafted, sampling) == tokens
    assert max(said) >= cut


def test_a_draft_whose_positions_end_goes_on_drafting(tmp_path: Path) -> None:
    """GPT-2's are a table of the file's; its text slides along it."""
    target, draft = folder(tmp_path / "target", "llama"), folder(tmp_path / "draft", "gpt2", positions=24)
    decoder = SpeculativeDecoder(target, draft, gamma=4)
    assert decoder.draft is not None and decoder.draft.n_positions == 24
    steps = [event for event in decoder.stream("The cat sat", 80, Sampling(0.9, seed=2)) if isinstance(event, Step)]
    assert sum(len(step.tokens) for step in steps) == 80
    assert all(step.draft_tokens for step in steps[:-1])
    assert text_of(decoder, SAMPLINGS[0], 80) == text_of(SpeculativeDecoder(target, None), SAMPLINGS[0], 80)


def test_a_text_of_learned_positions_ends_with_them(tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(folder(tmp_path / "target", "gpt2", positions=40))
    statistics = decoder.generate("The cat sat", 100, temperature=3.0, top_p=0, seed=1).statistics
    assert statistics.stop_reason == "seq_len"
    assert statistics.n_prompt + statistics.n_generated == 41


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_draft_of_another_tokenizer_changes_no_token(tmp_path: Path, verify: str) -> None:
    """Of GPT-2's vocabulary, most of which is the target's in another order; as a stage, too, and pickled."""
    target, draft = folder(tmp_path / "target"), folder(tmp_path / "draft", tokenizer="gpt2", padding=5)
    other = SpeculativeDecoder(target, draft, verify=verify, gamma=4)  # type: ignore[arg-type]
    assert 380 < other.shared["draft"] < other.n_ids and other.draft and other.draft.config.vocab_size == other.n_ids
    assert f"draft int8 ({other.shared['draft']} of {other.n_ids} tokens)" in other.weights
    texts = [text_of(other, sampling) for sampling in SAMPLINGS]
    assert max(map(max, texts)) < other.n_ids
    again = pickle.loads(pickle.dumps(other))
    assert again.shared == other.shared and [text_of(again, sampling) for sampling in SAMPLINGS] == texts
    if verify == "coupled":
        staged = SpeculativeDecoder(target, folder(tmp_path / "same", seed=1), stage=draft)
        forked = SpeculativeDecoder(target, draft, tree="on")
        alone = SpeculativeDecoder(target, None)
        for sampling, text in zip(SAMPLINGS, texts, strict=True):
            assert text_of(alone, sampling) == text == text_of(staged, sampling) == text_of(forked, sampling)
        assert staged.shared == {"stage": other.shared["draft"]} and alone.shared == {}


def test_what_a_draft_of_another_tokenizer_shares_is_told(run: Run, tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "target"), folder(tmp_path / "draft", tokenizer="gpt2")
    asked = ("-i", "The cat sat", "-n", 30, "-s", 5, "-t", 1, "--json")
    code, out, err = run("-m", target, "-d", draft, *asked)
    shared = SpeculativeDecoder(target, draft).shared["draft"]
    assert code == 0 and json.loads(out)["settings"]["weights"].endswith(f"draft int8 ({shared} of 400 tokens)")
    assert err == f"specdec: the draft has another vocabulary, with {shared} of the target's 400 tokens: it guesses those alone\n"
    assert json.loads(out)["tokens"] == json.loads(run("-m", target, "-d", "none", *asked)[1])["tokens"]
    code, out, err = run("race", "-m", target, "-d", draft, *asked)
    assert code == 0 and json.loads(out)["same_text"] and "another vocabulary" in err


def test_a_loaded_model_takes_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "target")
    decoder = SpeculativeDecoder(load_model(path), load_model(path, int8=True), tokenizer=path)
    assert text_of(decoder, SAMPLINGS[1]) == text_of(SpeculativeDecoder(path, None), SAMPLINGS[1])
    again = pickle.loads(pickle.dumps(decoder))
    assert text_of(again, SAMPLINGS[1]) == text_of(decoder, SAMPLINGS[1])


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    path = folder(tmp_path / "target")
    (path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"target has no tokenizer\.json"):
        SpeculativeDecoder(path)


def test_weights_of_two_bytes_are_kept_once(tmp_path: Path) -> None:
    path = folder(tmp_path / "target")
    model = load_model(path)
    n_bytes = (path / "model.safetensors").stat().st_size
    assert n_bytes <= model.weights.n_bytes + 4096 and model.weights.n_bytes < 1.3 * n_bytes  # strips and vectors are padded
    assert load_model(path, int8=True).weights.kind == "int8"


def test_the_command_line_tells_the_text_of_a_folder(run: Run, tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "target"), folder(tmp_path / "draft", seed=1)
    for more in ([], ["-d", draft], ["-d", "self"], ["--quantize", "none", "-d", draft]):
        result = from_json(run("-m", target, *more, "-i", "The cat sat", "-n", 30, "-s", 5, "-t", 1, "--json"))
        assert result["text"].startswith("The cat sat") and len(result["tokens"]) > 5
        assert result["tokens"] == (first := locals().get("first", result["tokens"]))
    code, out, err = run("-m", tmp_path / "target" / "model.safetensors")
    assert code == 2 and "name the folder" in err and err.count("\n") == 1


def test_no_steps_go_to_the_end_of_the_context(run: Run, tmp_path: Path) -> None:
    target = folder(tmp_path / "target", positions=64)
    code, out, _ = run("-m", target, "-n", 0, "-s", 1, "-t", 4, "-p", 0, "--json")
    result = json.loads(out)
    assert code == 0 and result["stop_reason"] == "seq_len" and result["n_prompt"] + result["n_generated"] == 65


def test_the_memory_is_told_before_a_text_that_does_not_fit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    target = folder(tmp_path / "target", positions=100_000)
    model = load_model(target)
    room = model.weights.n_bytes + model.text_bytes(3000) / TARGET_SHARE
    monkeypatch.setattr("specdec.loaders.loader.physical_memory_bytes", lambda: room)
    n = SpeculativeDecoder(target).n_positions
    assert 2900 < n <= 3000
    code, _, err = run("-m", target, "-n", 50_000)
    assert code == 2 and f"has room for {n} tokens" in err and err.count("\n") == 1
    monkeypatch.setattr(
        "specdec.loaders.loader.physical_memory_bytes", lambda: model.weights.n_bytes + model.text_bytes(300) / TARGET_SHARE
    )
    code, out, err = run("-m", target, "-n", 0, "-s", 1, "-t", 4, "-p", 0, "--json")
    assert code == 0 and "of the 100000 tokens of the target's context" in err
    assert json.loads(out)["n_generated"] <= 320


def test_how_long_a_text_may_get_does_not_depend_on_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What drafts sees as much of the text as the rest of the memory holds; where that is nothing, it guesses nothing."""
    target = folder(tmp_path / "target", positions=100_000)
    model = load_model(target)
    texts = []
    for text_bytes in (model.text_bytes(600), 0):
        room = model.weights.n_bytes + (model.text_bytes(3000) + text_bytes) / TARGET_SHARE
        monkeypatch.setattr("specdec.loaders.loader.physical_memory_bytes", lambda room=room: room)
        alone, pair = SpeculativeDecoder(target), SpeculativeDecoder(target, "self")
        assert pair.draft is not None and pair.draft.n_positions < alone.n_positions == pair.n_positions
        texts += [decoder.generate([1], 900, temperature=0.0).tokens for decoder in (alone, pair)]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_an_adapter_next_to_a_model_is_told_of_in_a_line(run: Run, tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "target"), folder(tmp_path / "draft")
    for path in (target, draft):
        (path / "adapter_config.json").write_text("{}")
    code, out, err = run("-m", target, "-d", draft, "-i", "The cat sat", "-n", 9, "--json")
    lines = [line for line in err.splitlines() if "adapter" in line]
    assert code == 0 and json.loads(out)["text"].startswith("The cat sat")
    assert [line.partition(" holds an adapter")[0] for line in lines] == [f"specdec: {path}" for path in (target, draft)]


def test_a_bad_folder_is_one_line(run: Run, tmp_path: Path) -> None:
    path = folder(tmp_path / "target")
    (path / "config.json").write_text('{"model_type": "mamba"}')
    code, _, err = run("-m", path)
    assert code == 2 and "mamba" in err and "qwen3" in err and err.count("\n") == 1
    with pytest.raises(CheckpointError, match="mamba"):
        SpeculativeDecoder(path)


def test_gpt2_is_a_family_of_its_own(tmp_path: Path) -> None:
    assert load_model(folder(tmp_path / "target", "gpt2")).config.architecture == "gpt2"
    assert GPT2.learned_positions


def test_a_draft_of_many_more_rows_and_no_tokenizer_is_refused(tmp_path: Path) -> None:
    """Rows that pad a vocabulary are few; these are another one."""
    target, draft = folder(tmp_path / "target"), folder(tmp_path / "draft", padding=1500)
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="they must agree"):
        SpeculativeDecoder(target, draft)


def test_a_wrong_tokenizer_is_told_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, other = folder(tmp_path / "target", padding=0), folder(tmp_path / "other", tokenizer="llama2")
    monkeypatch.setattr("specdec.loaders.loader.Loader.load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"name the target's own with tokenizer=\.\.\."):
        SpeculativeDecoder(target, tokenizer=other)
