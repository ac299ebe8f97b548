"""Loading of draft heads: every dialect of their files, rejected files, and which targets they are compatible with."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.head_config import HeadConfig
from specdec.loaders import Checkpoint, CheckpointError, check_compatibility, load_checkpoint
from specdec.loaders.head_checkpoint import find_incompatibility
from specdec.loaders.model_paths import find_required_packages
from specdec.model import get_architecture
from specdec.model_config import Llama3RopeScaling, ModelConfig
from tests.tools import fuzz_heads, gguf_files, head_files, hf_folders
from tests.tools.configs import make_config, replace_config
from tests.tools.fuzz_common import FINE
from tests.tools.fuzz_common import REFUSED as REFUSED_IN_ONE_LINE
from tests.tools.gguf_files import RawTensor
from tests.tools.half_precision import to_half, widen_exactly
from tests.tools.head_files import DIALECTS, write_folder, write_gguf
from tests.tools.hf_folders import (
    CONFIGS,
    DELETED,
    assert_rejected,
    assert_same_tensors,
    edit_config,
    edit_tensors,
    read_all_tensors,
)

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
HEAD = make_config(
    32, 48, 1, 4, 2, 72, 64, False, "eagle3", norm_eps=1e-6, head_dim=8,
    head=HeadConfig(32, (2, 4, 7), 20, False, True),
)  # fmt: skip
HEADS = {
    "of some ids": HEAD,
    "of all ids": replace(HEAD, head=replace(HEAD.head, draft_vocab_size=72)),
    "with nothing of its own": replace(HEAD, head=replace(HEAD.head, draft_vocab_size=72, own_classifier=False)),
    "of another width": replace_config(
        HEAD, rope_theta=5e5, head_dim=12,
        head=HeadConfig(24, (1, 8, 3), 20, True, True, norm_before_residual=True, fc_norm="whole"),
    ),
    "like qwen3": replace_config(HEAD, qk_norm=True, head=replace(HEAD.head, fc_norm="each", norm_output=True, target_layers=())),
    "of scaled angles": replace_config(HEAD, rope_scaling=Llama3RopeScaling(8, 1, 4, 32), seq_len=96),
    "with biases": replace_config(HEAD, qkv_bias=True, wo_bias=True, mlp_bias=True),
    "of four states": replace(HEAD, head=replace(HEAD.head, target_layers=(1, 2, 5, 3), fc_norm="each")),
}  # fmt: skip
TARGET = ModelConfig(32, 64, 8, 4, 2, 72, 128)


def random_tensors(config: ModelConfig, weight_format: str = "fp32") -> dict[str, Any]:
    rng = np.random.default_rng(7)
    shapes = get_architecture(config).shapes(config)
    return {name: to_half(rng.standard_normal(shape).astype(np.float32), weight_format) for name, shape in shapes.items()}


def random_ids(config: ModelConfig) -> Any:
    """Return ids in random order for a head with a reduced vocabulary, else None."""
    assert config.head
    n, rng = config.head.draft_vocab_size, np.random.default_rng(8)
    return None if n == config.vocab_size else rng.permutation(config.vocab_size)[:n]


def write_valid_head(folder: Path, config: ModelConfig = HEAD, dialect: str = "speculators") -> Path:
    return write_folder(folder, config, random_tensors(config), random_ids(config), dialect)


def write_valid_gguf(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda keys, tensors: None) -> Path:
    keys, tensors = head_files.make_gguf_parts(HEAD, random_tensors(HEAD), random_ids(HEAD))
    change(keys, tensors)
    path.write_bytes(gguf_files.gguf_bytes(keys, tensors))
    return path


def assert_loads(checkpoint: Checkpoint, config: ModelConfig, tensors: dict[str, Any], ids: Any) -> None:
    assert checkpoint.config == config
    assert_same_tensors(checkpoint, tensors)
    assert (checkpoint.target_ids is None) == (ids is None)
    if ids is not None:
        assert checkpoint.target_ids.dtype == np.int64
        np.testing.assert_array_equal(checkpoint.target_ids, ids)
    assert checkpoint.eos_tokens == checkpoint.vocabulary == {} and checkpoint.bos_token_id is checkpoint.chat_template is None


# Dialects


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_loads_the_same_from_every_dialect(tmp_path: Path, name: str, dialect: str) -> None:
    config = HEADS[name]
    path = write_valid_head(tmp_path, config, dialect)
    assert_loads(load_checkpoint(path), config, random_tensors(config), random_ids(config))


@pytest.mark.parametrize("name", ["of some ids", "of all ids", "with nothing of its own", "of another width"])
def test_a_head_in_gguf_loads_the_same_tensors(tmp_path: Path, name: str) -> None:
    config = HEADS[name]
    path = write_gguf(tmp_path / "head.gguf", config, random_tensors(config), random_ids(config))
    assert_loads(load_checkpoint(path), config, random_tensors(config), random_ids(config))


def test_scaled_rope_in_gguf_becomes_frequency_factors(tmp_path: Path) -> None:
    config = HEADS["of scaled angles"]
    checkpoint = load_checkpoint(write_gguf(tmp_path / "head.gguf", config, random_tensors(config), random_ids(config)))
    assert checkpoint.config.rope.freq_factors == tuple(map(float, gguf_files.rope_divisors(config)))
    assert checkpoint.config.rope.scaling is None


@pytest.mark.parametrize("weight_format", ["fp16", "bf16"])
def test_two_byte_floats_are_kept(tmp_path: Path, weight_format: str) -> None:
    config, tensors = HEADS["like qwen3"], random_tensors(HEADS["like qwen3"], weight_format)
    assert_loads(
        load_checkpoint(write_folder(tmp_path, config, tensors, random_ids(config))), config, tensors, random_ids(config)
    )
    tensors = random_tensors(HEAD, weight_format)
    found = load_checkpoint(write_gguf(tmp_path / "head.gguf", HEAD, tensors, random_ids(HEAD)))
    for name, array in read_all_tensors(found).items():
        np.testing.assert_array_equal(array, widen_exactly(tensors[name]) if array.ndim == 1 else tensors[name], name)


def test_a_head_may_be_sharded(tmp_path: Path) -> None:
    tensors = head_files.make_folder_tensors(HEAD, random_tensors(HEAD), random_ids(HEAD), "eagle")
    write_valid_head(tmp_path, HEAD, "eagle")
    (tmp_path / hf_folders.WEIGHTS).unlink()
    shards = {f"model-0000{i + 1}-of-00002.safetensors": list(tensors)[i::2] for i in range(2)}
    for file, names in shards.items():
        (tmp_path / file).write_bytes(hf_folders.safetensors_bytes({name: tensors[name] for name in names}))
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (tmp_path / hf_folders.INDEX).write_text(json.dumps(index))
    assert_loads(load_checkpoint(tmp_path), HEAD, random_tensors(HEAD), random_ids(HEAD))


def test_missing_keys_have_the_defaults_of_the_dialect(tmp_path: Path) -> None:
    for dialect in ("eagle", "speculators"):
        write_valid_head(tmp_path, HEAD, dialect)
        flags = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
        edit_config(tmp_path, **dict.fromkeys((*flags, "target_hidden_size", "eagle_config", LAYER_IDS_KEY), DELETED))
        config = load_checkpoint(tmp_path).config
        assert config.head
        assert (config.rope.theta, config.head.target_layers, config.head.target_dim) == (10000, (), 32)
        assert not (config.head.norm_before_residual or config.head.norm_output or config.head.fc_norm)
    edit_config(write_valid_head(tmp_path, HEADS["of all ids"], "eagle"), draft_vocab_size=DELETED)
    head = load_checkpoint(tmp_path).config.head
    assert head and head.draft_vocab_size == 72
    assert_rejected(edit_config(write_valid_head(tmp_path), draft_vocab_size=DELETED), "32000")
    layer = head_files.make_config_values(HEADS["like qwen3"], "speculators")["transformer_layer_config"]
    del layer["model_type"]
    edit_config(write_valid_head(tmp_path, HEADS["like qwen3"]), transformer_layer_config=layer)
    assert load_checkpoint(tmp_path).config.attention.qk_norm


@pytest.mark.parametrize(
    ("top", "eagle", "layers"),
    [
        ([2, 4, 7], None, (2, 4, 7)), (None, [1, 3, 6], (2, 4, 7)), ([2, 4, 7], [1, 3, 6], (2, 4, 7)), ([], [], ()),
        (None, None, ()), ([0, 8, 3], None, (0, 8, 3)),
    ],
)  # fmt: skip
def test_layer_ids_in_eagle_config_count_one_less_than_at_the_top(
    tmp_path: Path, top: Any, eagle: Any, layers: tuple[int, ...]
) -> None:
    edit_config(write_valid_head(tmp_path, HEAD, "eagle"), **{LAYER_IDS_KEY: top, "eagle_config": {LAYER_IDS_KEY: eagle}})
    head = load_checkpoint(tmp_path).config.head
    assert head and head.target_layers == layers


def test_flags_may_be_in_eagle_config(tmp_path: Path) -> None:
    edit_config(
        write_valid_head(tmp_path, HEAD, "eagle"),
        norm_output=DELETED,
        eagle_config={"norm_output": True, "norm_before_residual": True},
    )
    head = load_checkpoint(tmp_path).config.head
    assert head and head.norm_output and head.norm_before_residual


def test_target_layers_in_gguf_have_two_key_names(tmp_path: Path) -> None:
    def older(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["eagle3.extract_layers"] = keys.pop("eagle3.target_layers")

    head = load_checkpoint(write_valid_gguf(tmp_path / "head.gguf", older)).config.head
    assert head and head.target_layers == (2, 4, 7)


def test_the_tokenizer_in_a_gguf_head_is_ignored(tmp_path: Path) -> None:
    def with_tokens(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["tokenizer.ggml.tokens"] = [str(i) for i in range(72)]
        del keys["eagle3.vocab_size"]

    checkpoint = load_checkpoint(write_valid_gguf(tmp_path / "head.gguf", with_tokens))
    assert (checkpoint.config.vocab_size, checkpoint.vocabulary) == (72, {})


def test_a_head_needs_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.loaders.optional_dependencies.is_installed", lambda package: False)
    (tmp_path / "target.bin").write_bytes(bytes(100))
    names = [str(tmp_path / "target.bin"), str(write_valid_head(tmp_path / "head"))]
    assert find_required_packages(names) == {}
    edit_config(tmp_path / "head", speculators_model_type=DELETED, draft_vocab_size=DELETED, architectures=DELETED)
    assert list(find_required_packages(names)) == ["tokenizers"]


@pytest.mark.parametrize("key", ["draft_vocab_size", "eagle_config", "speculators_model_type"])
def test_a_config_with_null_head_keys_is_not_a_head(tmp_path: Path, key: str) -> None:
    assert not load_checkpoint(hf_folders.copy_fixture(tmp_path / "model", "llama", **{key: None})).config.head


# Invalid heads


def edit_d2t(change: Callable[[Any], Any], dtype: str = "I64") -> Callable[[Path], Any]:
    """Return an edit that changes the offsets of a folder."""
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update(d2t=(dtype, change(tensors["d2t"][1]))))


def edit_keys(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: edit_config(folder, **changes)


def edit_layer(**changes: Any) -> Callable[[Path], Any]:
    layer = head_files.make_config_values(HEAD, "speculators")["transformer_layer_config"] | changes
    return lambda folder: edit_config(folder, transformer_layer_config=layer)


def remove_tensor(name: str) -> Callable[[Path], Any]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def add_tensor(name: str, shape: tuple[int, ...]) -> Callable[[Path], Any]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: ("F32", np.zeros(shape, np.float32))}))


def set_gguf_ids(ids: Any, *shape: int) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    return lambda keys, tensors: tensors.update(d2t=RawTensor("I64", shape or ids.shape, ids.astype(np.int64).tobytes()))


def replace_at(array: Any, row: int, value: int) -> Any:
    """Return the array with one number replaced."""
    return np.where(np.arange(len(array)) == row, value, array)


REFUSED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "an id below 0": (edit_d2t(lambda d: replace_at(d, 3, -4)), ('"d2t" maps row 3 to the id -1', "0 to 71")),
    "an id beyond": (edit_d2t(lambda d: replace_at(d, 19, 53)), ('"d2t" maps row 19 to the id 72',)),
    "an offset beyond all": (edit_d2t(lambda d: replace_at(d, 19, 2**63 - 1)), ("row 19 to the id -9223372036854775790",)),
    "an id twice": (edit_d2t(lambda d: replace_at(d, 1, d[0] - 1)), ("maps 2 rows", "expected each id once")),
    "offsets of fewer rows": (edit_d2t(lambda d: d[:-1]), ("shape (19,)", "says (20,)")),
    "offsets in a matrix": (edit_d2t(lambda d: d.reshape(4, 5)), ("shape (4, 5)", "says (20,)")),
    "offsets in I32": (edit_d2t(lambda d: d.astype(np.int32), "I32"), ('"d2t" is "I32"; expected I64',)),
    "offsets in F32": (edit_d2t(lambda d: d.astype(np.float32), "F32"), ('"d2t" is "F32"; expected I64',)),
    "no offsets": (remove_tensor("d2t"), ("has 20 of 72 ids, but no d2t",)),
    "no rows": (remove_tensor("lm_head.weight"), ("draft_vocab_size is 20", "72")),
    "a tensor missing": (remove_tensor("layers.0.hidden_norm.weight"), ("no tensor layers.0.hidden_norm.weight",)),
    "a tensor of another shape": (add_tensor("fc.weight", (32, 64)), ("(32, 64)", "(32, 96)")),
    "an unknown tensor": (add_tensor("fc.bias", (32,)), ('"fc.bias" is not part of',)),
    "two layers' names": (add_tensor("midlayer.hidden_norm.weight", (32,)), ("no tensor midlayer",)),
    "unused norms": (add_tensor("input_norm.weight", (96,)), ('"input_norm.weight" is not part of',)),
    "NaN": (
        lambda path: edit_tensors(path, lambda t: t.update({"norm.weight": ("F32", np.full(32, np.nan, np.float32))})), ("NaN",)
    ),
    "norms that are not there": (edit_keys(norm_before_fc=True), ("no tensor input_norm.weight",)),
    "norm for each that is not there": (edit_keys(fc_norm=True), ("no tensor fc_norm.0.weight",)),
    "both norms": (edit_keys(norm_before_fc=True, fc_norm=True), ("fc_norm is true", "norm_before_fc")),
    "more rows than ids": (edit_keys(draft_vocab_size=73), ("draft_vocab_size is 73", "72")),
    "rows that are not a number": (edit_keys(draft_vocab_size="20"), ('draft_vocab_size is "20"',)),
    "another width": (edit_keys(target_hidden_size=24), ("dim is 32", "24")),
    "a flag that is none": (edit_keys(norm_output=1), ("norm_output is 1", "true or false")),
    "another head": (edit_keys(speculators_model_type="eagle"), ('is "eagle"', "eagle3")),
    "no layer": (edit_keys(transformer_layer_config=DELETED), ("4096",)),
    "a layer that is none": (edit_keys(transformer_layer_config=[1]), ("is [1]; expected an object",)),
    "a layer of another family": (edit_layer(model_type="gpt_oss"), ('model_type "gpt_oss"; supported: llama, qwen3',)),
    "a layer of several families": (edit_layer(model_type=["llama"]), ('model_type ["llama"]; supported: llama, qwen3',)),
    "a layer of no name": (edit_layer(model_type={}), ("model_type {}; supported: llama, qwen3",)),
    "several layers": (edit_layer(num_hidden_layers=2), ("num_hidden_layers is 2; expected 1",)),
    "another activation": (edit_layer(hidden_act="gelu"), ('hidden_act is "gelu"',)),
    "another RoPE": (edit_layer(rope_scaling={"rope_type": "su", "factor": 2}), ('rope_type is "su"',)),
    "a quantized head": (edit_keys(quantization_config={"quant_method": "awq"}), ('quantized by "awq"',)),
    "a layer twice": (edit_keys(**{LAYER_IDS_KEY: [2, 2, 5]}), ("[2, 2, 5]", "without duplicates")),
    "a layer below 0": (edit_keys(**{LAYER_IDS_KEY: [-1, 2, 5]}), ("[-1, 2, 5]",)),
    "layers that are none": (edit_keys(**{LAYER_IDS_KEY: "2"}), (f'{LAYER_IDS_KEY} is "2"',)),
    "a layer that is a boolean": (edit_keys(**{LAYER_IDS_KEY: [True, 2, 5]}), ("[true, 2, 5]",)),
    "two different lists of layers": (
        edit_keys(eagle_config={LAYER_IDS_KEY: [2, 4, 7]}),
        ("[2, 4, 7] at the top and [2, 4, 7] in eagle_config",),
    ),
    "the last state": (edit_keys(eagle_config={"use_aux_hidden_state": False}),
    ("use_aux_hidden_state is",)),
    "drafts in parallel": (edit_keys(eagle_config={"parallel_draft_step": 4}),
    ("parallel_draft_step is 4",)),
    "no weights": (lambda path: (path / hf_folders.WEIGHTS).unlink(), ("neither model.safetensors nor",)),
    "a pickle": (
        lambda path: (path / hf_folders.WEIGHTS).rename(path / "pytorch_model.bin"),
        ("only in pytorch_model.bin", "run code", "save_file", "weights_only=True"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_head_is_rejected_in_one_line(tmp_path: Path, name: str) -> None:
    damage, words = REFUSED[name]
    damage(write_valid_head(tmp_path / "head"))
    assert_rejected(tmp_path / "head", *words)


def test_a_head_tied_to_its_own_embedding_is_rejected(tmp_path: Path) -> None:
    config = replace(HEAD, head=replace(HEAD.head, draft_vocab_size=72, own_embedding=True, own_classifier=False))
    edit_config(write_valid_head(tmp_path, config, "eagle"), tie_word_embeddings=True)
    assert_rejected(tmp_path, "tie_word_embeddings is true; expected false")


REFUSED_GGUF: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], tuple[str, ...]]] = {
    "an id beyond": (set_gguf_ids(np.arange(53, 73)), ('"d2t" maps row 19 to the id 72',)),
    "an id twice": (set_gguf_ids(np.zeros(20)), ("20 rows to the id 0",)),
    "ids of fewer rows": (set_gguf_ids(np.arange(19)), ("(20, 32)", "(19, 32)")),
    "ids in a matrix": (set_gguf_ids(np.arange(20), 20, 1), ('"d2t" has the shape (20, 1)',)),
    "ids in F32": (lambda k, t: t.update(d2t=np.arange(20, dtype=np.float32)), ('"d2t" is "F32"; expected I64',)),
    "ids in I32": (lambda k, t: t.update(d2t=RawTensor("I32", (20,), bytes(80))), ("type I32",)),
    "no ids": (lambda k, t: t.pop("d2t"), ("has 20 of 72 ids, but no d2t",)),
    "no rows": (lambda k, t: t.pop("output.weight"), ("draft_vocab_size is 20",)),
    "a matrix of ids": (
        lambda k, t: t.update({"fc.weight": RawTensor("I64", (32, 96), bytes(32 * 96 * 8))}),
        ('"fc.weight" is "I64"; expected',)
    ),
    "two layers": (lambda k, t: k.update({"eagle3.block_count": 2}), ("eagle3.block_count is 2; expected 1",)),
    "no layers": (lambda k, t: k.pop("eagle3.target_layers"), ("eagle3.target_layers is null; expected a list of target",)),
    "layers that are none": (lambda k, t: k.update({"eagle3.target_layers": [0.5, 1.0]}), ("target_layers is [0.5, 1.0]",)),
    "no width": (lambda k, t: k.pop("eagle3.target_hidden_size"), ("eagle3.target_hidden_size is null",)),
    "no ids at all": (lambda k, t: k.pop("eagle3.vocab_size"), ("eagle3.vocab_size is null",)),
    "norms that are not there": (lambda k, t: k.update({"eagle3.norm_before_fc": True}), ("no tensor enc.output_norm.weight",)),
    "a normed output": (lambda k, t: k.update({"eagle3.norm_output": True}), ("eagle3.norm_output is true",)),
    "a flag that is none": (lambda k, t: k.update({"eagle3.norm_before_residual": 1}), ("eagle3.norm_before_residual is 1",)),
    "a bias": (lambda k, t: t.update({"blk.0.attn_q.bias": np.zeros(32, np.float32)}), ('"blk.0.attn_q.bias" is not part of',)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_GGUF)
def test_an_invalid_gguf_head_is_rejected_in_one_line(tmp_path: Path, name: str) -> None:
    change, words = REFUSED_GGUF[name]
    assert_rejected(write_valid_gguf(tmp_path / "head.gguf", change), *words)


def test_integer_weights_are_rejected(tmp_path: Path) -> None:
    keys, tensors = gguf_files.make_model_keys("llama"), gguf_files.make_model_tensors("llama")
    rows = tensors["blk.0.ffn_up.weight"].shape
    tensors["blk.0.ffn_up.weight"] = RawTensor("I64", rows, bytes(8 * rows[0] * rows[1]))
    (tmp_path / "model.gguf").write_bytes(gguf_files.gguf_bytes(keys, tensors))
    assert_rejected(tmp_path / "model.gguf", '"blk.0.ffn_up.weight" is "I64"; expected F32, F16, BF16')


@pytest.mark.campaign
def test_5000_damaged_heads_are_rejected_in_one_line_or_valid() -> None:
    """Run `python -m tests.tools.fuzz --only heads --case N` to repeat one."""
    ends = Counter(fuzz_heads.fuzz_head(random.Random(f"heads {case}")) for case in range(5000))
    assert ends[REFUSED_IN_ONE_LINE] > 3400
    assert ends[FINE] > 500


# Compatibility


@pytest.mark.parametrize(
    ("head", "target", "words"),
    [
        ({}, {}, ""),
        ({}, {"dim": 64}, "takes hidden states of dimension 32; the target's have 64"),
        ({}, {"n_layers": 6}, "the inputs of the layers 2, 4, 7; the target has 6 layers"),
        ({}, {"n_layers": 7}, ""),
        ({}, {"vocab_size": 80}, "for a vocabulary of 72 tokens; the target has 80"),
        ({"target_layers": ()}, {}, ""),
        ({"target_layers": ()}, {"n_layers": 2}, "inputs of the layers 2, 1, -1; the target has 2 layers"),
        ({"target_layers": ()}, {"n_layers": 5}, "inputs of the layers 2, 2, 2; the target has 5 layers"),
        ({}, {"qk_norm": True}, ""),
    ],
)
def test_compatibility_depends_on_width_layers_and_vocabulary(head: dict[str, Any], target: dict[str, Any], words: str) -> None:
    assert HEAD.head
    reason = find_incompatibility(replace(HEAD, head=replace(HEAD.head, **head)), replace_config(TARGET, **target))
    assert (words in reason) if words else reason == ""
    assert "\n" not in reason


def test_the_incompatibility_error_names_the_head(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_valid_head(tmp_path))
    check_compatibility(checkpoint, TARGET)
    with pytest.raises(CheckpointError, match="is not compatible with the target: it is for a vocabulary of 72 tokens") as caught:
        check_compatibility(checkpoint, replace(TARGET, vocab_size=80))
    assert str(tmp_path) in str(caught.value)
    assert find_incompatibility(CONFIGS["llama"], TARGET) == "it is not a draft head"
