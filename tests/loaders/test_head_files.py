"""Heads that draft: what their files say in every dialect, what is refused, and which targets they fit."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.config import Config, HeadConfig, RopeScaling
from specdec.families.head_compatibility import misfit
from specdec.loaders import Checkpoint, CheckpointError, load_checkpoint
from specdec.loaders.head_compatibility import check_fit
from specdec.loaders.model_lookup import needs
from specdec.model.registry import architecture_of
from tests.tools import fuzz_heads, gguf_files, head_files, hf_folders
from tests.tools.configs import changed, made
from tests.tools.fuzz_common import FINE
from tests.tools.fuzz_common import REFUSED as REFUSED_IN_ONE_LINE
from tests.tools.gguf_files import Raw
from tests.tools.head_files import DIALECTS, write_folder, write_gguf
from tests.tools.hf_folders import CONFIGS, GONE, configure, message_of, read_all, retensor

IDS = "eagle_aux_hidden_state_layer_ids"
HEAD = made(
    32, 48, 1, 4, 2, 72, 64, False, "eagle3", norm_eps=1e-6, head_dim=8,
    head=HeadConfig(32, (2, 4, 7), 20, False, True, made_for="LlamaForCausalLM"),
)  # fmt: skip
HEADS = {
    "of some ids": HEAD,
    "of all ids": replace(HEAD, head=replace(HEAD.head, n_rows=72)),
    "with nothing of its own": replace(HEAD, head=replace(HEAD.head, n_rows=72, own_classifier=False)),
    "of another width": changed(
        HEAD, rope_theta=5e5, head_dim=12,
        head=HeadConfig(24, (1, 8, 3), 20, True, True, norm_before_residual=True, fc_norm="whole"),
    ),
    "like qwen3": changed(HEAD, qk_norm=True, head=replace(HEAD.head, fc_norm="each", norm_output=True, layers=())),
    "of scaled angles": changed(HEAD, rope_scaling=RopeScaling(8, 1, 4, 32), seq_len=96),
    "with biases": changed(HEAD, qkv_bias=True, wo_bias=True, mlp_bias=True),
    "of four states": replace(HEAD, head=replace(HEAD.head, layers=(1, 2, 5, 3), fc_norm="each")),
}  # fmt: skip
TARGET = Config(32, 64, 8, 4, 2, 72, 128)


def random_tensors(config: Config, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in architecture_of(config).shapes(config).items()
    }
    if dtype == np.uint16:
        return {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in arrays.items()}
    return {name: array.astype(dtype) for name, array in arrays.items()}


def random_ids(config: Config) -> Any:
    """Not in order, of heads of some ids; of all ids none."""
    assert config.head
    n, rng = config.head.n_rows, np.random.default_rng(8)
    return None if n == config.vocab_size else rng.permutation(config.vocab_size)[:n]


def sound(folder: Path, config: Config = HEAD, dialect: str = "speculators") -> Path:
    return write_folder(folder, config, random_tensors(config), random_ids(config), dialect)


def sound_gguf(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda keys, tensors: None) -> Path:
    keys, tensors = head_files.gguf_parts(HEAD, random_tensors(HEAD), random_ids(HEAD))
    change(keys, tensors)
    path.write_bytes(gguf_files.gguf_bytes(keys, tensors))
    return path


def same(checkpoint: Checkpoint, config: Config, tensors: dict[str, Any], ids: Any) -> None:
    assert checkpoint.config == config
    found = read_all(checkpoint)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, name)
    assert (checkpoint.target_ids is None) == (ids is None)
    if ids is not None:
        assert checkpoint.target_ids.dtype == np.int64
        np.testing.assert_array_equal(checkpoint.target_ids, ids)
    assert (checkpoint.end_marks, checkpoint.bos, checkpoint.vocabulary, checkpoint.chat_template) == ({}, None, {}, None)


# What is read


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_the_same_in_every_dialect(tmp_path: Path, name: str, dialect: str) -> None:
    config = HEADS[name]
    assert config.head
    made_for = config.head.made_for if "speculators" in dialect else ""
    path = sound(tmp_path, config, dialect)
    told = replace(config, head=replace(config.head, made_for=made_for))
    same(load_checkpoint(path), told, random_tensors(config), random_ids(config))


@pytest.mark.parametrize("name", ["of some ids", "of all ids", "with nothing of its own", "of another width"])
def test_a_head_in_gguf_is_the_same(tmp_path: Path, name: str) -> None:
    config = HEADS[name]
    assert config.head
    path = write_gguf(tmp_path / "head.gguf", config, random_tensors(config), random_ids(config))
    same(
        load_checkpoint(path), replace(config, head=replace(config.head, made_for="")), random_tensors(config), random_ids(config)
    )


def test_angles_in_gguf_are_divided_as_a_folder_says(tmp_path: Path) -> None:
    config = HEADS["of scaled angles"]
    checkpoint = load_checkpoint(write_gguf(tmp_path / "head.gguf", config, random_tensors(config), random_ids(config)))
    assert checkpoint.config.rope.divisors == tuple(map(float, gguf_files.rope_divisors(config)))
    assert checkpoint.config.rope.scaling is None


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_half_as_many_bytes_are_read_as_they_are(tmp_path: Path, dtype: Any) -> None:
    config, tensors = HEADS["like qwen3"], random_tensors(HEADS["like qwen3"], dtype)
    same(load_checkpoint(write_folder(tmp_path, config, tensors, random_ids(config))), config, tensors, random_ids(config))
    tensors = random_tensors(HEAD, dtype)
    found = load_checkpoint(write_gguf(tmp_path / "head.gguf", HEAD, tensors, random_ids(HEAD)))
    for name, array in read_all(found).items():
        wide = (
            (tensors[name].astype(np.uint32) << 16).view(np.float32) if dtype == np.uint16 else tensors[name].astype(np.float32)
        )
        np.testing.assert_array_equal(array, wide if array.ndim == 1 else tensors[name], name)


def test_a_head_may_lie_in_several_files(tmp_path: Path) -> None:
    tensors = head_files.folder_tensors(HEAD, random_tensors(HEAD), random_ids(HEAD), "eagle")
    sound(tmp_path, HEAD, "eagle")
    (tmp_path / hf_folders.WEIGHTS).unlink()
    shards = {f"model-0000{i + 1}-of-00002.safetensors": list(tensors)[i::2] for i in range(2)}
    for file, names in shards.items():
        (tmp_path / file).write_bytes(hf_folders.safetensors_bytes({name: tensors[name] for name in names}))
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (tmp_path / hf_folders.INDEX).write_text(json.dumps(index))
    plain = replace(HEAD, head=replace(HEAD.head, made_for=""))
    same(load_checkpoint(tmp_path), plain, random_tensors(HEAD), random_ids(HEAD))


def test_a_silent_config_means_what_its_dialect_means(tmp_path: Path) -> None:
    for dialect in ("eagle", "speculators"):
        sound(tmp_path, HEAD, dialect)
        silent = dict.fromkeys(
            ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "target_hidden_size", "eagle_config", IDS), GONE
        )
        configure(tmp_path, **silent)
        config = load_checkpoint(tmp_path).config
        assert config.head
        assert (config.rope.theta, config.head.layers, config.head.target_dim) == (10000, (), 32)
        assert not (config.head.norm_before_residual or config.head.norm_output or config.head.fc_norm)
    configure(sound(tmp_path, HEADS["of all ids"], "eagle"), draft_vocab_size=GONE)
    head = load_checkpoint(tmp_path).config.head
    assert head and head.n_rows == 72
    message_of(configure(sound(tmp_path), draft_vocab_size=GONE), "32000")
    layer = head_files.config_values(HEADS["like qwen3"], "speculators")["transformer_layer_config"]
    del layer["model_type"]
    configure(sound(tmp_path, HEADS["like qwen3"]), transformer_layer_config=layer)
    assert load_checkpoint(tmp_path).config.attention.qk_norm


@pytest.mark.parametrize(
    ("top", "eagle", "layers"),
    [
        ([2, 4, 7], None, (2, 4, 7)), (None, [1, 3, 6], (2, 4, 7)), ([2, 4, 7], [1, 3, 6], (2, 4, 7)), ([], [], ()),
        (None, None, ()), ([0, 8, 3], None, (0, 8, 3)),
    ],
)  # fmt: skip
def test_layers_at_the_top_are_taken_before_and_those_of_eagle_config_behind(
    tmp_path: Path, top: Any, eagle: Any, layers: tuple[int, ...]
) -> None:
    configure(sound(tmp_path, HEAD, "eagle"), **{IDS: top, "eagle_config": {IDS: eagle}})
    head = load_checkpoint(tmp_path).config.head
    assert head and head.layers == layers


def test_flags_may_stand_in_eagle_config(tmp_path: Path) -> None:
    configure(sound(tmp_path, HEAD, "eagle"), norm_output=GONE, eagle_config={"norm_output": True, "norm_before_residual": True})
    head = load_checkpoint(tmp_path).config.head
    assert head and head.norm_output and head.norm_before_residual


def test_layers_in_gguf_go_by_two_names(tmp_path: Path) -> None:
    def older(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["eagle3.extract_layers"] = keys.pop("eagle3.target_layers")

    head = load_checkpoint(sound_gguf(tmp_path / "head.gguf", older)).config.head
    assert head and head.layers == (2, 4, 7)


def test_the_tokenizer_in_a_heads_gguf_is_the_targets(tmp_path: Path) -> None:
    def with_tokens(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["tokenizer.ggml.tokens"] = [str(i) for i in range(72)]
        del keys["eagle3.vocab_size"]

    checkpoint = load_checkpoint(sound_gguf(tmp_path / "head.gguf", with_tokens))
    assert (checkpoint.config.vocab_size, checkpoint.vocabulary) == (72, {})


def test_a_head_takes_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.loaders.optional_dependencies.has", lambda package: False)
    (tmp_path / "target.bin").write_bytes(bytes(100))
    names = [str(tmp_path / "target.bin"), str(sound(tmp_path / "head"))]
    assert needs(names) == {}
    configure(tmp_path / "head", speculators_model_type=GONE, draft_vocab_size=GONE, architectures=GONE)
    assert list(needs(names)) == ["tokenizers"]


@pytest.mark.parametrize("key", ["draft_vocab_size", "eagle_config", "speculators_model_type"])
def test_a_model_whose_config_says_nothing_of_a_head_is_none(tmp_path: Path, key: str) -> None:
    assert not load_checkpoint(hf_folders.copy(tmp_path / "model", "llama", **{key: None})).config.head


# What is refused


def d2t(change: Callable[[Any], Any], dtype: str = "I64") -> Callable[[Path], Any]:
    """Of a folder, whose offsets are changed."""
    return lambda folder: retensor(folder, lambda tensors: tensors.update(d2t=(dtype, change(tensors["d2t"][1]))))


def with_layer(**changes: Any) -> Callable[[Path], Any]:
    layer = head_files.config_values(HEAD, "speculators")["transformer_layer_config"] | changes
    return lambda folder: configure(folder, transformer_layer_config=layer)


def without(name: str) -> Callable[[Path], Any]:
    return lambda folder: retensor(folder, lambda tensors: tensors.pop(name))


def other(name: str, shape: tuple[int, ...]) -> Callable[[Path], Any]:
    return lambda folder: retensor(folder, lambda tensors: tensors.update({name: ("F32", np.zeros(shape, np.float32))}))


def ids_in_gguf(ids: Any, *shape: int) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    return lambda keys, tensors: tensors.update(d2t=Raw("I64", shape or ids.shape, ids.astype(np.int64).tobytes()))


def but(array: Any, row: int, value: int) -> Any:
    """The array, in which one number is another."""
    return np.where(np.arange(len(array)) == row, value, array)


REFUSED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "an id below 0": (d2t(lambda d: but(d, 3, -4)), ('"d2t" says the id -1 for row 3', "0 to 71")),
    "an id beyond": (d2t(lambda d: but(d, 19, 53)), ('"d2t" says the id 72 for row 19',)),
    "an offset beyond all": (d2t(lambda d: but(d, 19, 2**63 - 1)), ("the id -9223372036854775790 for row 19",)),
    "an id twice": (d2t(lambda d: but(d, 1, d[0] - 1)), ("for 2 rows; expected each id once",)),
    "offsets of fewer rows": (d2t(lambda d: d[:-1]), ("shape (19,)", "says (20,)")),
    "offsets in a matrix": (d2t(lambda d: d.reshape(4, 5)), ("shape (4, 5)", "says (20,)")),
    "offsets in I32": (d2t(lambda d: d.astype(np.int32), "I32"), ('"d2t" is "I32"; expected I64',)),
    "offsets in F32": (d2t(lambda d: d.astype(np.float32), "F32"), ('"d2t" is "F32"; expected I64',)),
    "no offsets": (without("d2t"), ("says 20 of 72 ids, and has no d2t",)),
    "no rows": (without("lm_head.weight"), ("n_rows is 20", "72")),
    "a tensor missing": (without("layers.0.hidden_norm.weight"), ("no tensor layers.0.hidden_norm.weight",)),
    "a tensor of another shape": (other("fc.weight", (32, 64)), ("(32, 64)", "(32, 96)")),
    "an unknown tensor": (other("fc.bias", (32,)), ('"fc.bias" has no place',)),
    "two layers' names": (other("midlayer.hidden_norm.weight", (32,)), ("no tensor midlayer",)),
    "norms that nobody asks for": (other("input_norm.weight", (96,)), ('"input_norm.weight" has no place',)),
    "NaN": (
        lambda path: retensor(path, lambda t: t.update({"norm.weight": ("F32", np.full(32, np.nan, np.float32))})), ("NaN",)
    ),
    "norms that are not there": (lambda path: configure(path, norm_before_fc=True), ("no tensor input_norm.weight",)),
    "norm for each that is not there": (lambda path: configure(path, fc_norm=True), ("no tensor fc_norm.0.weight",)),
    "both norms": (lambda path: configure(path, norm_before_fc=True, fc_norm=True), ("fc_norm is true", "norm_before_fc")),
    "more rows than ids": (lambda path: configure(path, draft_vocab_size=73), ("n_rows is 73", "72")),
    "rows that are no number": (lambda path: configure(path, draft_vocab_size="20"), ('draft_vocab_size is "20"',)),
    "another width": (lambda path: configure(path, target_hidden_size=24), ("dim is 32", "24")),
    "a flag that is none": (lambda path: configure(path, norm_output=1), ("norm_output is 1", "true or false")),
    "another head": (lambda path: configure(path, speculators_model_type="eagle"), ('is "eagle"', "eagle3")),
    "no layer": (lambda path: configure(path, transformer_layer_config=GONE), ("4096",)),
    "a layer that is none": (lambda path: configure(path, transformer_layer_config=[1]), ("is [1]; expected an object",)),
    "a layer of another family": (with_layer(model_type="gpt_oss"), ('that of "gpt_oss"; there are llama, qwen3',)),
    "a layer of several families": (with_layer(model_type=["llama"]), ('that of ["llama"]; there are llama, qwen3',)),
    "a layer of no name": (with_layer(model_type={}), ("that of {}; there are llama, qwen3",)),
    "several layers": (with_layer(num_hidden_layers=2), ("num_hidden_layers is 2; expected 1",)),
    "another activation": (with_layer(hidden_act="gelu"), ('hidden_act is "gelu"',)),
    "another RoPE": (with_layer(rope_scaling={"rope_type": "su", "factor": 2}), ('rope_type is "su"',)),
    "a quantized head": (lambda path: configure(path, quantization_config={"quant_method": "awq"}), ('quantized by "awq"',)),
    "a layer twice": (lambda path: configure(path, **{IDS: [2, 2, 5]}), ("[2, 2, 5]", "each once")),
    "a layer below 0": (lambda path: configure(path, **{IDS: [-1, 2, 5]}), ("[-1, 2, 5]",)),
    "layers that are none": (lambda path: configure(path, **{IDS: "2"}), (f'{IDS} is "2"',)),
    "a layer that is a truth": (lambda path: configure(path, **{IDS: [True, 2, 5]}), ("[true, 2, 5]",)),
    "two opinions of the layers": (
        lambda path: configure(path, eagle_config={IDS: [2, 4, 7]}), ("[2, 4, 7] at the top and [2, 4, 7] in eagle_config",)
    ),
    "the last state": (lambda path: configure(path, eagle_config={"use_aux_hidden_state": False}), ("use_aux_hidden_state is",)),
    "drafts in parallel": (lambda path: configure(path, eagle_config={"parallel_draft_step": 4}), ("parallel_draft_step is 4",)),
    "no weights": (lambda path: (path / hf_folders.WEIGHTS).unlink(), ("neither model.safetensors nor",)),
    "a pickle": (
        lambda path: (path / hf_folders.WEIGHTS).rename(path / "pytorch_model.bin"),
        ("pytorch_model.bin alone", "run code", "save_file", "weights_only=True"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_flawed_head_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    spoil, words = REFUSED[name]
    spoil(sound(tmp_path / "head"))
    message_of(tmp_path / "head", *words)


def test_a_head_tied_to_its_own_embedding_is_refused(tmp_path: Path) -> None:
    config = replace(HEAD, head=replace(HEAD.head, n_rows=72, own_embedding=True, own_classifier=False))
    configure(sound(tmp_path, config, "eagle"), tie_word_embeddings=True)
    message_of(tmp_path, "tie_word_embeddings is true; expected false")


REFUSED_GGUF: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], tuple[str, ...]]] = {
    "an id beyond": (ids_in_gguf(np.arange(53, 73)), ('"d2t" says the id 72 for row 19',)),
    "an id twice": (ids_in_gguf(np.zeros(20)), ("the id 0 for 20 rows",)),
    "ids of fewer rows": (ids_in_gguf(np.arange(19)), ("(20, 32)", "(19, 32)")),
    "ids in a matrix": (ids_in_gguf(np.arange(20), 20, 1), ('"d2t" has the shape (20, 1)',)),
    "ids in F32": (lambda k, t: t.update(d2t=np.arange(20, dtype=np.float32)), ('"d2t" is of type F32; expected I64',)),
    "ids in I32": (lambda k, t: t.update(d2t=Raw("I32", (20,), bytes(80))), ("type I32",)),
    "no ids": (lambda k, t: t.pop("d2t"), ("says 20 of 72 ids, and has no d2t",)),
    "no rows": (lambda k, t: t.pop("output.weight"), ("n_rows is 20",)),
    "a matrix of ids": (
        lambda k, t: t.update({"fc.weight": Raw("I64", (32, 96), bytes(32 * 96 * 8))}), ('"fc.weight" is of type I64; expected',)
    ),
    "two layers": (lambda k, t: k.update({"eagle3.block_count": 2}), ("eagle3.block_count is 2; expected 1",)),
    "no layers": (lambda k, t: k.pop("eagle3.target_layers"), ("eagle3.target_layers is null; expected layers",)),
    "layers that are none": (lambda k, t: k.update({"eagle3.target_layers": [0.5, 1.0]}), ("target_layers is [0.5, 1.0]",)),
    "no width": (lambda k, t: k.pop("eagle3.target_hidden_size"), ("eagle3.target_hidden_size is null",)),
    "no ids at all": (lambda k, t: k.pop("eagle3.vocab_size"), ("eagle3.vocab_size is null",)),
    "norms that are not there": (lambda k, t: k.update({"eagle3.norm_before_fc": True}), ("no tensor enc.output_norm.weight",)),
    "a normed output": (lambda k, t: k.update({"eagle3.norm_output": True}), ("eagle3.norm_output is true",)),
    "a flag that is none": (lambda k, t: k.update({"eagle3.norm_before_residual": 1}), ("eagle3.norm_before_residual is 1",)),
    "a bias": (lambda k, t: t.update({"blk.0.attn_q.bias": np.zeros(32, np.float32)}), ('"blk.0.attn_q.bias" has no place',)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_GGUF)
def test_a_flawed_head_in_gguf_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    change, words = REFUSED_GGUF[name]
    message_of(sound_gguf(tmp_path / "head.gguf", change), *words)


def test_whole_numbers_are_no_weights_of_any_model(tmp_path: Path) -> None:
    keys, tensors = gguf_files.model_keys("llama"), gguf_files.model_tensors("llama")
    rows = tensors["blk.0.ffn_up.weight"].shape
    tensors["blk.0.ffn_up.weight"] = Raw("I64", rows, bytes(8 * rows[0] * rows[1]))
    (tmp_path / "model.gguf").write_bytes(gguf_files.gguf_bytes(keys, tensors))
    message_of(tmp_path / "model.gguf", '"blk.0.ffn_up.weight" is of type I64; expected F32, F16, BF16')


@pytest.mark.campaign
def test_of_5000_damaged_heads_each_is_refused_in_one_line_or_is_sound() -> None:
    """`python -m tests.tools.fuzz --only heads --case N` repeats one."""
    ends = Counter(fuzz_heads.heads(random.Random(f"heads {case}")) for case in range(5000))
    assert ends[REFUSED_IN_ONE_LINE] > 3500
    assert ends[FINE] > 500


# Which targets it fits


@pytest.mark.parametrize(
    ("head", "target", "words"),
    [
        ({}, {}, ""),
        ({}, {"dim": 64}, "takes states of 32 numbers; the target's have 64"),
        ({}, {"n_layers": 6}, "the states before the layers 2, 4, 7; the target has 6 layers"),
        ({}, {"n_layers": 7}, ""),
        ({}, {"vocab_size": 80}, "for 72 ids; the target has 80"),
        ({"layers": ()}, {}, ""),
        ({"layers": ()}, {"n_layers": 2}, "before the layers 2, 1, -1; the target has 2 layers"),
        ({"layers": ()}, {"n_layers": 5}, "before the layers 2, 2, 2; the target has 5 layers"),
        ({}, {"qk_norm": True}, 'made for a "LlamaForCausalLM"; the target is like qwen3'),
        ({}, {"qkv_bias": True}, "the target is like qwen2"),
        ({}, {"qkv_bias": True, "wo_bias": True}, ""),
        ({"made_for": "Qwen3ForCausalLM"}, {}, 'made for a "Qwen3ForCausalLM"; the target is like llama'),
        ({"made_for": "Qwen3ForCausalLM"}, {"qk_norm": True}, ""),
        ({"made_for": "MistralForCausalLM"}, {"window": 12}, ""),
        ({"made_for": "NobodyKnowsForCausalLM"}, {"qk_norm": True}, ""),
        ({"made_for": ""}, {"qk_norm": True}, ""),
    ],
)
def test_a_head_fits_by_width_layers_ids_and_family(head: dict[str, Any], target: dict[str, Any], words: str) -> None:
    assert HEAD.head
    told = misfit(replace(HEAD, head=replace(HEAD.head, **head)), changed(TARGET, **target))
    assert (words in told) if words else told == ""
    assert "\n" not in told


def test_what_does_not_fit_is_told_with_the_heads_path(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(sound(tmp_path))
    check_fit(checkpoint, TARGET)
    with pytest.raises(CheckpointError, match="does not fit the target: it is for 72 ids") as caught:
        check_fit(checkpoint, replace(TARGET, vocab_size=80))
    assert str(tmp_path) in str(caught.value)
    assert misfit(CONFIGS["llama"], TARGET) == "it is no head"
