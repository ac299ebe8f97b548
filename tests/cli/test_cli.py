"""The command line end to end: options, files, pipes, terminals, Ctrl-C, and invalid input."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from typer.models import OptionInfo

import specdec
from specdec.cli.app import COMMANDS
from specdec.cli.bench import BenchRequest
from specdec.cli.generate import TextRequest
from specdec.draft.draft_length import CostCurve, CostModel
from specdec.loaders import load_checkpoint, model_paths
from specdec.model_config import ModelConfig
from specdec.runtime.cpu_topology import get_thread_choices, get_topology
from specdec.runtime.parallel_region import get_available_threads
from specdec.tokenizer import Tokenizer
from tests.conftest import Pair
from tests.fakes.terminal import (
    COMMAND,
    PROMPT,
    TIMEOUT_S,
    Screen,
    make_arguments,
    make_endless_arguments,
    run_in_terminal,
    run_process,
)
from tests.tools.checkpoint_files import (
    CORRUPTIONS,
    SHARED,
    make_tokenizer_corruptions,
    make_valid_bytes,
    random_tensors,
    read_tensors,
    small_pieces,
    tokenizer_bytes,
    write_checkpoint,
    write_int8_checkpoint,
    write_tokenizer,
)
from tests.tools.command_runs import Run, assert_rejected, from_json, run  # noqa: F401

JSON_FIELDS = {
    "text", "tokens", "n_prompt", "n_generated", "n_drafted", "n_accepted", "n_nodes", "acceptance_rate", "target_passes",
    "tokens_per_pass", "accepted_histogram", "load_seconds", "warmup_seconds", "prefill_seconds", "decode_seconds",
    "tokens_per_second", "acceptance_by_position", "speed_up", "stop_reason", "seed", "settings", "experts_alone",
    "experts_per_token",
}  # fmt: skip


# Damaged files


def damaged(pair: Pair, folder: Path, name: str) -> Path:
    """Write a file with the draft's config and that damage."""
    version, damage = CORRUPTIONS[name]
    path = folder / "damaged.bin"
    path.write_bytes(damage.corrupt(make_valid_bytes(load_checkpoint(pair.draft).config, version)))
    return path


DAMAGES = [
    *(pytest.param("-m", name, marks=pytest.mark.campaign) for name in CORRUPTIONS),
    *(
        ("-d", f"version {name}")
        for name in ("0, one byte short", "0, one byte long", "1, NaN", "1, dim huge", "2, one byte short", "2, group size zero")
    ),
]


@pytest.mark.parametrize(("option", "name"), DAMAGES)
def test_damaged_model_is_rejected_by_name(run: Run, pair: Pair, tmp_path: Path, option: str, name: str) -> None:
    path = damaged(pair, tmp_path, name)
    word = CORRUPTIONS[name][1].expected_word if option == "-d" else ""
    assert_rejected(run("-m", pair.target, "-z", pair.tokenizer, option, path), path, word)


@pytest.mark.parametrize("name", make_tokenizer_corruptions())
def test_damaged_tokenizer_is_rejected_by_name(run: Run, pair: Pair, tmp_path: Path, name: str) -> None:
    path = tmp_path / "damaged.bin"
    path.write_bytes(make_tokenizer_corruptions()[name].corrupt(tokenizer_bytes(small_pieces())))
    assert_rejected(run("-m", pair.target, "-z", path), path)


@pytest.mark.parametrize("option", ["-m", "-d", "-z"])
def test_path_without_a_file_is_rejected_by_name(run: Run, pair: Pair, tmp_path: Path, option: str) -> None:
    for path, words in (
        (tmp_path / "nowhere.bin", [tmp_path / "nowhere.bin", "No such file"]),
        (tmp_path, [tmp_path, "tokenizer.json" if option == "-z" else "directory"]),
        ("a" * 5000, ["aaa", "too long"]),
        (pair.target / "x.bin", [pair.target / "x.bin"]),
        (tmp_path / "a\nb.bin", ["b.bin"]),
    ):
        assert_rejected(run("-m", pair.target, option, path), *words)


def test_draft_with_other_vocabulary_is_rejected_by_name(run: Run, pair: Pair, tmp_path: Path) -> None:
    config = ModelConfig(64, 96, 1, 4, 2, 299, 32)
    path = write_checkpoint(tmp_path / "other.bin", config, random_tensors(config, 0))
    assert_rejected(run("-m", pair.target, "-d", path), path, "299", "300")


def test_tokenizer_with_other_vocabulary_is_rejected_by_name(run: Run, pair: Pair, tmp_path: Path) -> None:
    for n in (299, 301):
        path = write_tokenizer(tmp_path / "other.bin", (small_pieces() * 2)[:n])
        assert_rejected(run("-m", pair.target, "-z", path), path, n, "300")
    config = ModelConfig(64, 96, 1, 4, 2, 290, 32)
    path = write_checkpoint(tmp_path / "model.bin", config, random_tensors(config, 0))
    adjacent = write_tokenizer(tmp_path / "tokenizer.bin", small_pieces())
    assert_rejected(run("-m", path), adjacent, "290", "300")


def test_missing_files_are_named_with_the_way_to_get_them(run: Run, pair: Pair, tmp_path: Path) -> None:
    alone = tmp_path / "alone.bin"
    alone.write_bytes(pair.target.read_bytes())
    assert_rejected(run("-m", alone), "tok300.bin", "tokenizer.bin", tmp_path, "-z")
    assert_rejected(run(), "no model is given, and the default pair lacks", "git checkout models")


# Invalid options


CORES = get_topology().description
INVALID_OPTIONS = [
    (["-g", "0"], "--gamma is '0'; expected auto or 1 to 63"), (["-g", "-1"], "--gamma"), (["-g", "64"], "--gamma"),
    (["-g", "99999999999999999999"], "--gamma"), (["-g", "four"], "--gamma is 'four'"),
    (["-t", "-0.1"], "--temperature is -0.1"), (["-t", "nan"], "--temperature is 'nan'"),
    (["-t", "inf"], "--temperature is inf"), (["-t", "-inf"], "--temperature is -inf"),
    (["-t", "hot"], "--temperature is 'hot'"), (["-p", "-0.1"], "--top-p is -0.1"), (["-p", "1.01"], "--top-p is 1.01"),
    (["-p", "nan"], "--top-p is 'nan'"), (["-k", "-1"], "--top-k is -1"), (["-k", "1.5"], "--top-k is '1.5'"),
    (["-n", "-1"], "--steps is '-1'"), (["-n", "many"], "--steps is 'many'"), (["-s", "-1"], "--seed is -1"),
    (["-s", str(2**63)], "--seed is"), (["-s", "\udcff"], "--seed"), (["-j", "-1"], "--threads is '-1'"),
    (["-j", "100000"], f"--threads is 100000; expected at most {get_available_threads()} (this machine has {CORES})"),
    (["--verify", "never"], "--verify is 'never'; expected one of coupled, rejection, block"),
    (["--verify", "\udcff"], "--verify"), (["--tree", "never"], "--tree is 'never'"),
    (["--tree", "on", "--verify", "block"], "--tree is 'on', and --verify is 'block', which supports only chains"),
    (["-i", "a\udcffb"], "--prompt holds"), (["-z", "\udcff"], "\\udcff"), (["-d", "\udcff"], "\\udcff"),
    (["-m", "\udcff"], "\\udcff"), (["--\udcff"], "\\udcff"), (["--quantize", "int4"], "--quantize is 'int4'"),
    (["--pack", "some"], "--pack is 'some'; expected one of"),
    (["--kv", "fp16"], "--kv is 'fp16'; expected one of auto, f32, f16"),
    (["-d", "self", "--quantize", "both=int8"], "int8 already"), (["-Q"], "-Q"), (["--nonsense"], "--nonsense"),
    (["--temperatur", "1"], "--temperature"), (["--gama", "1"], "--gamma"), (["--top_p", "1"], "--top-p"),
    (["--promt", "x"], "--prompt"), (["-g"], "-g"), (["--prompt"], "--prompt"),
    (["--prompt-cache-size", "5"], "--prompt-cache-size needs --prompt-cache DIR"),
    (["extra", "words"], "got 2 words: 'extra words'; name a draft with -d, and put quotes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "word"),
    INVALID_OPTIONS,
    ids=lambda value: " ".join(value).encode("ascii", "backslashreplace").decode() if isinstance(value, list) else None,
)
def test_invalid_option_is_rejected_by_name(run: Run, pair: Pair, arguments: list[str], word: str) -> None:
    assert_rejected(run("-m", pair.target, *arguments), word)


@pytest.mark.parametrize("mode", ["--plain", "--json"])
def test_prompt_longer_than_context_is_rejected(run: Run, pair: Pair, mode: str) -> None:
    assert_rejected(run("-m", pair.target, "-i", "x" * 200, mode), "prompt", "202", "128")


def test_prompt_that_just_fits_context_is_accepted(run: Run, pair: Pair) -> None:
    full = from_json(run(*make_arguments(pair, "-i", "x" * 126, "-n", 0, "--json")))
    assert (full["n_prompt"], full["n_generated"], full["stop_reason"]) == (128, 1, "seq_len")
    assert_rejected(run("-m", pair.target, "-i", "x" * 127), "129")


@pytest.mark.parametrize("shape", ["1,2", "42", "0,1,1,1,1,3,64", "64,96,1,3,1,300,64", "64,96,1,4,3,300,64", "a,b,c,d,e,f,g"])
def test_bench_rejects_invalid_shape(run: Run, shape: str) -> None:
    assert_rejected(run("bench", "--shape", shape), "--shape")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["-p", "x"], "--n-prompt is 'x'"), (["-p", "0", "-n", "0"], "-p and -n are both 0; at least one must be more"),
        (["-d", "-1"], "--depth is '-1'"), (["-j", "9999"], "--threads is '9999'"), (["-n", "1.5"], "--n-gen is '1.5'"),
        (["-p", "9999"], "exceed the model's 128"), (["--kv", "q6"], "--kv"),
        (["-p", "8", "-n", "0", "-d", "9992"], "sequences of 10000 tokens"),
    ],
)  # fmt: skip
def test_bench_rejects_invalid_options_for_own_model(run: Run, pair: Pair, options: list[str], word: str) -> None:
    assert_rejected(run("bench", "-m", pair.target, *options), word)


# Output


@pytest.mark.parametrize(
    "extra",
    [[], ["--verify", "rejection"], ["--verify", "block"], ["--tree", "on"], ["-t", "0"], ["-g", "1"], ["-k", "5"]],
    ids=str,
)
def test_json_output_is_one_object_with_consistent_statistics(run: Run, pair: Pair, extra: list[str]) -> None:
    code, out, err = run(*make_arguments(pair, "-n", 60, "--json", *extra))
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    result = json.loads(out)
    assert set(result) == JSON_FIELDS
    tokenizer = Tokenizer(pair.tokenizer)
    prompt = tokenizer.encode(PROMPT)
    assert result["text"] == tokenizer.decode(prompt + result["tokens"])
    assert result["text"].startswith(PROMPT)
    assert result["n_prompt"] == len(prompt)
    assert result["n_generated"] == len(result["tokens"]) == 61 - len(prompt)
    assert result["stop_reason"] == "max_tokens"
    histogram = result["accepted_histogram"]
    assert sum(histogram) == result["target_passes"]
    assert sum(i * n for i, n in enumerate(histogram)) == result["n_accepted"]
    assert result["n_generated"] == result["n_accepted"] + result["target_passes"]
    assert 0 < result["n_accepted"] < result["n_drafted"]
    assert result["speed_up"] is None or result["speed_up"] > 0
    by_position = result["acceptance_by_position"]
    assert by_position[0] == pytest.approx(1 - histogram[0] / sum(histogram), abs=0.1)  # except for passes without a proposal
    assert all(0 <= rate <= 1 for rate in by_position) and len(by_position) <= 4
    assert result["acceptance_rate"] == pytest.approx(result["n_accepted"] / result["n_drafted"])
    assert result["tokens_per_pass"] == pytest.approx(result["n_generated"] / result["target_passes"])
    assert result["tokens_per_second"] == pytest.approx(result["n_generated"] / result["decode_seconds"])
    for seconds in ("load_seconds", "warmup_seconds", "prefill_seconds", "decode_seconds"):
        assert result[seconds] > 0
    assert result["seed"] == 5
    names = {"model", "draft", "tokenizer", "gamma", "temperature", "top_p", "top_k", "verify", "quantize", "weights"}
    assert names <= set(result["settings"])


def test_race_without_terminal_prints_statistics_and_summary(run: Run, pair: Pair) -> None:
    code, out, _ = run("race", *make_arguments(pair, "-n", 60))
    assert (code, len(out.splitlines())) == (0, 3) and "big alone " in out and "same output, letter for letter; " in out
    alone, result = (
        from_json(run(*make_arguments(pair, "-n", 60, "--json"))),
        from_json(run("race", *make_arguments(pair, "-n", 60, "--json"))),
    )
    assert result["same_text"] and (result["text"], result["tokens"]) == (alone["text"], alone["tokens"])
    assert result["alone"]["n_generated"] == result["pair"]["n_generated"] == len(result["tokens"])
    speeds = [result[who]["tokens_per_second"] for who in ("pair", "alone")]
    assert result["ratio"] == pytest.approx(speeds[0] / speeds[1])
    assert_rejected(run("race", "-m", pair.target, "-d", "none"), "-d")
    assert_rejected(run("race", *make_arguments(pair, "-n", 1)), "-n 1 counts the prompt")


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ([], "target fp32, draft int8"),
        (["--quantize", "draft"], "target fp32, draft int8"),
        (["--quantize", "none"], "target fp32, draft fp32"),
        (["--quantize", "target"], "target int8, draft fp32"),
        (["--quantize", "both"], "target int8, draft int8"),
        (["-d", "self"], "target fp32, draft int8"),
        (["-d", "self", "--quantize", "none"], "target fp32, draft int8"),
        (["-d", "self", "--quantize", "draft=int4"], "target fp32, draft int4 and int8"),
        (["--quantize", "target=int8,draft=int4"], "target int8, draft int4"),
    ],
    ids=str,
)
def test_quantization_is_reported_and_fp32_target_output_is_unchanged(
    run: Run, pair: Pair, more: list[str], weights: str
) -> None:
    alone = from_json(run("-m", pair.target, "-i", PROMPT, "-s", 5, "-j", 1, "-n", 100, "--json"))
    result = from_json(run(*make_arguments(pair, "-n", 100, "--json", *more)))
    assert result["settings"]["weights"] == weights
    if weights.startswith("target fp32"):
        assert result["tokens"] == alone["tokens"]
    assert result["n_accepted"] > 0
    for verify, what in (("coupled", "text"), ("rejection", "distribution")):
        _, _, summary = run(*make_arguments(pair, "-n", 20, "--plain", "--stats", "--verify", verify, *more))
        assert weights in summary
        assert re.search(rf"^{what} +the {weights[7:11]} target's own$", summary, re.MULTILINE)


@pytest.mark.parametrize(
    ("more", "kv"),
    [([], "f32"), (["--quantize", "target"], "f16"), (["--kv", "f16"], "f16"), (["--quantize", "both", "--kv", "f32"], "f32")],
    ids=str,
)
def test_kv_format_and_arithmetic_revision_are_reported(run: Run, pair: Pair, more: list[str], kv: str) -> None:
    result = from_json(run(*make_arguments(pair, "-n", 40, "--json", *more)))
    race = from_json(run("race", *make_arguments(pair, "-n", 40, "--json", *more)))
    assert race["same_text"] and race["text"] == result["text"]
    for settings in (result["settings"], race):
        assert (settings["kv"], settings["arithmetic"]) == (kv, specdec.__arithmetic__)
    _, _, summary = run(*make_arguments(pair, "-n", 40, "--plain", "--stats", *more))
    assert re.search(rf"^kv +{kv}$", summary, re.MULTILINE)
    assert re.search(rf"^arithmetic +{specdec.__arithmetic__}$", summary, re.MULTILINE)


@pytest.mark.parametrize("tree", ["auto", "on", "off"])
@pytest.mark.parametrize("gamma", ["auto", 3])
def test_token_tree_does_not_change_output(run: Run, pair: Pair, tree: str, gamma: str) -> None:
    arguments = ["-m", pair.target, "-i", PROMPT, "-s", 5, "-j", 1, "-n", 100, "--json"]
    alone, result = from_json(run(*arguments)), from_json(run(*arguments, "-d", pair.draft, "--tree", tree, "-g", gamma))
    assert result["tokens"] == alone["tokens"]
    assert result["settings"]["tree"] == tree
    assert result["n_nodes"] >= result["n_drafted"] >= result["n_accepted"]
    if gamma != "auto":  # auto may draft nothing
        assert (result["n_nodes"] > result["n_drafted"]) == (tree == "on")
        assert result["n_accepted"] > 0


@pytest.mark.parametrize("verify", ["coupled", "rejection", "block"])
def test_lookup_draft_without_draft_model(run: Run, pair: Pair, verify: str) -> None:
    arguments = ("-m", pair.target, "-i", "ab ab ab ab ab ab", "-t", 0, "-j", 1, "-n", 100, "--json")
    alone, result = from_json(run(*arguments)), from_json(run(*arguments, "-d", "lookup", "-g", 4, "--verify", verify))
    assert result["tokens"] == alone["tokens"]
    assert result["n_drafted"] > 0
    assert result["settings"]["draft"] == "lookup"


def test_version_2_files_work_as_target_and_draft(run: Run, pair: Pair, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(pair.target)
    path = write_int8_checkpoint(tmp_path / "int8.bin", checkpoint.config, read_tensors(checkpoint), 32)
    alone = from_json(run("-m", path, "-z", pair.tokenizer, "-i", PROMPT, "-s", 5, "-n", 100, "--json", "--quantize", "none"))
    assert alone["settings"]["weights"] == "target int8"
    for draft in (path, pair.draft):
        drafted = from_json(run("-m", path, "-d", draft, "-z", pair.tokenizer, "-i", PROMPT, "-s", 5, "-n", 100, "--json"))
        assert drafted["tokens"] == alone["tokens"]
        assert drafted["settings"]["weights"] == "target int8, draft int8"
    copied = from_json(run("-m", path, "-d", "self", "-z", pair.tokenizer, "-i", PROMPT, "-s", 5, "-n", 100, "--json"))
    assert (copied["tokens"], copied["settings"]["weights"]) == (alone["tokens"], "target int8, draft int4 and int8")
    more = ("--quantize", "draft=int8")
    assert_rejected(run("-m", path, "-d", "self", "-z", pair.tokenizer, *more), "few bits already")


def test_output_with_draft_equals_output_without(run: Run, pair: Pair) -> None:
    for more in (["-t", 0], ["-t", 1], ["-t", 1.5, "-p", 1], ["-k", 3]):
        arguments = ("-m", pair.target, "-i", PROMPT, "-s", 5, "-j", 1, "-n", 100, "--json", *more)
        alone = from_json(run(*arguments, "-d", "none"))
        for drafted in (
            run(*make_arguments(pair, "-n", 100, "--json", "-g", 3, *more)),
            run(*arguments),
            run(*arguments, "-g", 7),
        ):
            assert from_json(drafted)["tokens"] == alone["tokens"]
        assert from_json(run(*arguments))["settings"]["draft"] == "lookup"
        assert json.loads(run(*arguments, "--verify", "rejection")[1])["n_drafted"] == 0  # a draft would change the output
        assert (alone["n_drafted"], alone["acceptance_rate"]) == (0, 0)


def test_same_seed_gives_same_output_and_other_seed_another(run: Run, pair: Pair) -> None:
    texts = [from_json(run(*make_arguments(pair, "-n", 60, "--json", "-s", seed)))["text"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_seed_zero_draws_new_seed_and_reports_it(run: Run, pair: Pair) -> None:
    first, second = (from_json(run(*make_arguments(pair, "-n", 60, "--json", "-s", 0))) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = from_json(run(*make_arguments(pair, "-n", 60, "--json", "-s", first["seed"])))
    assert again["text"] == first["text"]


def test_steps_include_prompt_and_zero_means_whole_context(run: Run, pair: Pair) -> None:
    few, all_, more = (from_json(run(*make_arguments(pair, "-n", n, "--json"))) for n in (9, 0, 128))
    assert few["n_prompt"] + few["n_generated"] == 10
    assert all_["n_prompt"] + all_["n_generated"] == 129
    assert all_["stop_reason"] == "seq_len"
    assert more["tokens"] == all_["tokens"]


def test_disk_error_while_loading_is_not_reported_as_output_error(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some.nbi")

    monkeypatch.setattr("specdec.loaders.model_loader.load_checkpoint", full)
    assert "output" not in assert_rejected(run(*make_arguments(pair)), "some.nbi", "No space left")


def test_empty_prompt_generates_from_bos(run: Run, pair: Pair) -> None:
    result = from_json(run(*make_arguments(pair, "-i", "", "-n", 20, "--json")))
    assert (result["n_prompt"], result["n_generated"]) == (1, 20)
    assert result["text"] == Tokenizer(pair.tokenizer).decode([1, *result["tokens"]])


def test_bench_times_own_model_like_llama_bench(run: Run, pair: Pair) -> None:
    code, out, err = run("bench", "-m", pair.target, "-p", "8,70", "-n", 3, "-d", "0,20", "-j", 1, "--json")
    result = from_json((code, out, err))
    tests = ["pp8", "pp70", "tg3", "pp8 @ d20", "pp70 @ d20", "tg3 @ d20"]
    assert [(each["threads"], each["test"]) for each in result["timed"]] == [(1, test) for test in tests]
    assert all(0 < each["least"] <= each["tokens_per_s"] <= each["most"] for each in result["timed"])
    assert {result["weights"], result["kv"]} == {"fp32", "f32"}
    assert all(result[name] for name in ("cores", "instructions", "system"))


def test_bench_times_likely_best_thread_counts_by_default() -> None:
    assert BenchRequest(model="x", thread_counts="0").timed_thread_counts == get_thread_choices()
    assert BenchRequest(model="x", thread_counts="1,0,1").timed_thread_counts == [*dict.fromkeys([1, *get_thread_choices()])]


@pytest.mark.parametrize("more", [[], ["--int8"]])
def test_bench_has_row_for_every_token_count(run: Run, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    monkeypatch.setattr("specdec.bench.pass_speed.ROUNDS", 3)
    code, out, _ = run("bench", "--shape", "64,96,1,4,2,300,64", "-j", 1, "--json", *more)  # a slow machine logs progress
    result = from_json((code, out, ""))
    assert list(result["shape"].values()) == [64, 96, 1, 4, 2, 300, 64]
    assert min(result["read_gb_per_s"], result["gflop_per_s"]) > 0
    assert result["weights"] == ("int8" if more else "fp32")
    assert result["prefill_tokens"] == 64
    assert result["prefill_seconds"] > 0
    assert [row["tokens"] for row in result["rows"]] == [1, 2, 4, 8, 16, 64]
    for row in result["rows"]:
        shares = {"memory": row["gb_per_s"] / result["read_gb_per_s"], "arithmetic": row["gflop_per_s"] / result["gflop_per_s"]}
        assert row["seconds"] > 0
        assert row["limit"] == max(shares, key=shares.__getitem__)
        assert row["share"] == pytest.approx(max(shares.values()))


def test_plain_output_goes_to_stdout_and_summary_to_stderr(run: Run, pair: Pair) -> None:
    text = from_json(run(*make_arguments(pair, "-n", 60, "--json")))["text"]
    code, out, err = run(*make_arguments(pair, "-n", 60, "--plain"))
    assert (code, out) == (0, text + "\n")
    sentence, *_, figures = err.splitlines()
    assert re.fullmatch(r"([\d.]+ times as fast|As fast|[\d.]+ tokens per pass of big instead) .*; same output\.", sentence)
    assert re.fullmatch(r"\d+ tokens at [\d,]+ tok/s; seed 5; more with --stats", figures)
    code, out, err = run(*make_arguments(pair, "-n", 60, "--plain", "--stats", "--verify", "block"))
    assert "; same distribution.\n" in err
    labels = ("prompt tokens", "generated", "drafted", "accepted", "by position", "mean length", "prefill", "decode", "tok/s")
    assert all(label in err for label in labels)
    assert "\x1b" not in out + err


def test_model_is_searched_at_its_path_then_in_models_folder(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    written = {"t.bin": pair.target, "d.bin": pair.draft, "z.bin": pair.tokenizer, "tok300.bin": pair.tokenizer}
    for name, path in written.items():
        (model_paths.BUNDLED_MODELS_DIR / name).write_bytes(path.read_bytes())
    expected = from_json(run(*make_arguments(pair, "-n", 30, "--json")))["text"]
    for more in ([], ["-z", "z.bin"]):
        result = from_json(run(*make_arguments(pair, "-m", "t.bin", "-d", "d.bin", "-n", 30, "--json", *more)))
        assert result["text"] == expected
    (elsewhere / "t.bin").write_bytes(b"")
    assert_rejected(run("-m", "t.bin"), "t.bin", "empty")


def test_tokenizer_next_to_model_takes_precedence(run: Run, pair: Pair) -> None:
    for name in ("tok300.bin", "tokenizer.bin"):
        (model_paths.BUNDLED_MODELS_DIR / name).write_bytes(b"")
    assert from_json(run(*make_arguments(pair, "-n", 10, "--json")))["n_generated"] > 0


def test_default_pair_is_used_without_model_option(run: Run, pair: Pair) -> None:
    (model_paths.BUNDLED_MODELS_DIR / "target.bin").write_bytes(pair.target.read_bytes())
    (model_paths.BUNDLED_MODELS_DIR / "tok300.bin").write_bytes(pair.tokenizer.read_bytes())
    assert_rejected(run("-i", PROMPT, "-n", 20), "draft.bin", "git checkout models")
    (model_paths.BUNDLED_MODELS_DIR / "draft.bin").write_bytes(pair.draft.read_bytes())
    assert from_json(run("-i", PROMPT, "-n", 20, "-j", 1, "-g", 4, "--json"))["n_drafted"] > 0
    assert "git checkout" not in assert_rejected(run("-d", "mtp", "-i", PROMPT), "has no built-in head"), "but is whole"
    for name in ("target.bin", "draft.bin", "tok300.bin"):
        path = model_paths.BUNDLED_MODELS_DIR / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert_rejected(run("-i", PROMPT), path)
        path.write_bytes(whole)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns_and_lists_every_option(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, "") and "<bool>" not in out
    assert max(map(cell_len, out.splitlines())) <= 80
    request_class = COMMANDS[command][0] if command else TextRequest
    offered = [each.default for each in fields(request_class)]
    options = [info for info in offered if isinstance(info, OptionInfo) and not info.hidden]
    for name in ["-h", "--help", *(name for info in options for name in info.param_decls or ())]:
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", out), name


@pytest.mark.parametrize(("name", "value"), [("COLUMNS", "0"), ("COLUMNS", "100000"), ("LINES", "²"), ("TERMINAL_WIDTH", "wide")])
def test_invalid_terminal_size_variable_counts_as_unset(name: str, value: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--help"], env=os.environ | {name: value}, capture_output=True, encoding="utf-8", check=True, timeout=TIMEOUT_S
    )
    assert max(map(cell_len, done.stdout.splitlines())) == 80
    assert done.stderr == ""


def test_version_is_printed(run: Run) -> None:
    for words in (["--version"], ["--version", "-n", "5"]):
        assert run(*words) == (0, f"specdec {specdec.__version__}, arithmetic {specdec.__arithmetic__}\n", "")


# Real processes: pipes


def shell(arguments: Sequence[object], **more: Any) -> "subprocess.CompletedProcess[bytes]":
    command = [argument if isinstance(argument, bytes) else str(argument) for argument in (*COMMAND, *arguments)]
    options = {"capture_output": True, "timeout": 120} | more
    return subprocess.run(command, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_piped_stdout_has_only_the_output(run: Run, pair: Pair) -> None:
    text = from_json(run(*make_arguments(pair, "-n", 60, "--json")))["text"]
    done = shell(make_arguments(pair, "-n", 60))
    assert done.returncode == 0
    assert done.stdout.decode() == text + "\n"
    assert b"tok/s" in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_short_output_is_slowed_only_at_a_terminal(pair: Pair) -> None:
    code, screen, raw = run_in_terminal(make_arguments(pair, "-n", 20), 80, 24)
    assert code == 0 and "╭" in raw and "tokens" in screen.get_text() and "tok/s" in screen.get_text()
    code, _, raw = run_in_terminal(make_arguments(pair, "-n", 20, "--plain"), 80, 24)
    assert code == 0 and "╭" not in raw


def test_forced_colour_does_not_turn_a_pipe_into_a_terminal(pair: Pair) -> None:
    done = shell(make_arguments(pair, "-n", 20), env=os.environ | {"FORCE_COLOR": "1"})
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert "│".encode() not in done.stdout
    assert b"loading" not in done.stderr


def test_closed_pipe_ends_quietly(pair: Pair) -> None:
    with run_process(make_endless_arguments(pair, "-n", 0)) as process:
        assert process.stdout.read(10).decode().startswith(PROMPT)
        process.stdout.close()
        err = process.stderr.read()
        code = process.wait(60)
    assert err == b""
    assert code == 141  # what a shell reports for SIGPIPE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_full_disk_error_is_one_line(pair: Pair) -> None:
    with open("/dev/full", "wb") as full:
        done = shell(make_arguments(pair, "-n", 20), stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") == 1
    with open("/dev/full", "wb") as full:
        assert shell(make_arguments(pair, "-n", 20), stdout=full, stderr=full, capture_output=False).returncode == 2


def test_closed_stdout_gives_no_traceback(pair: Pair) -> None:
    command = ["sh", "-c", 'exec "$0" "$@" >&-', *COMMAND, *map(str, make_arguments(pair, "-n", 20))]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    assert b"Traceback" not in done.stderr


def test_non_utf8_prompt_is_rejected_in_one_line(pair: Pair) -> None:
    for arguments, word in ((["-m", pair.target, "-i", b"caf\xe9"], "--prompt"), (["-m", b"caf\xe9.bin"], "caf")):
        done = shell(arguments)
        assert_rejected((done.returncode, done.stdout.decode(), done.stderr.decode()), word)


@pytest.mark.parametrize("words", [["é日"], ["-i", "é日"]])
def test_texts_are_utf8_even_in_a_locale_of_another_encoding(pair: Pair, words: list[str]) -> None:
    command = [*COMMAND, *words, "-m", str(pair.target), "-t", "0", "-j", "1", "--max-tokens", "2", "--stop", "ü", "--json"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=TIMEOUT_S)
    settings = json.loads(done.stdout)["settings"]
    assert (settings["prompt"], settings["stop"]) == ("é日", ["ü"])


def test_ctrl_c_keeps_piped_output_so_far(pair: Pair) -> None:
    with run_process(make_endless_arguments(pair, "-n", 0)) as process:
        start = process.stdout.read(100)
        process.send_signal(signal.SIGINT)
        out, err = start + process.stdout.read(), process.stderr.read()
        code = process.wait(60)
    assert code == 130
    assert out.decode().startswith(PROMPT)
    assert out.endswith(b"\n")
    assert b"Traceback" not in err
    assert b"interrupted" in err


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real weights of ../shared")
def test_default_pair_writes_story_to_pipe(pair: Pair) -> None:
    models = SHARED / "models"
    done = shell(["-m", models / "stories3M.bin", "-d", models / "stories260K.bin", "-t", 0, "-n", 64, "-g", 4, "--json"])
    result = json.loads(done.stdout)
    assert result["text"].startswith("Once upon a time")
    assert result["acceptance_rate"] > 0.5
    assert result["tokens_per_pass"] > 2


# Real processes: terminals


# A short output is shown for one second instead of four.
HURRIED = [
    sys.executable,
    "-c",
    "from specdec.cli.bootstrap import main; from specdec.ui import panel; panel.MIN_SHOW_S = 1.0; main()",
]


def colours(screen: Screen) -> set[int]:
    return {code for code in screen.styles if 30 <= code <= 49 or 90 <= code <= 107}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10)])
def test_terminal_shows_panel_then_output_once(run: Run, pair: Pair, width: int, height: int) -> None:
    arguments = make_endless_arguments(pair, "-n", 5000)
    result = from_json(run(*arguments, "--json"))
    text = result["text"]
    code, screen, raw = run_in_terminal(arguments, width, height, command=HURRIED)
    assert code == 0
    assert "loading" in raw
    assert screen.was_cursor_hidden
    assert not screen.cursor_hidden
    panels = [picture for picture in screen.frames if "╰" in picture]
    assert panels
    for word in ("tok/s", "endless", f"/{result['n_generated']}"):
        assert any(word in picture for picture in panels), word
    for picture in panels:
        rows = picture.splitlines()
        assert len(rows) <= height
        assert sum("╭" in row for row in rows) == sum("╰" in row for row in rows) == 1
    final = screen.get_text()
    assert "╭" not in final
    assert "╰" not in final
    shown, output = "".join(final.split()), "".join(text.split())  # wrapped between words
    assert shown.count(output) == 1
    legend = "green: guessed by little and confirmed plain: endless's own"
    for words in (legend, "same output.", "tok/s"):
        assert "".join(words.split()) in shown[shown.index(output) + len(output) :]
    assert colours(screen)
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")


def test_terminal_too_low_for_panel_gets_plain_output(run: Run, pair: Pair) -> None:
    text = from_json(run(*make_arguments(pair, "-n", 60, "--json")))["text"]
    code, screen, raw = run_in_terminal(make_arguments(pair, "-n", 60), 80, 7)
    assert code == 0
    assert screen.get_text().startswith(text + "\n")
    assert "╭" not in raw
    assert "the panel is not available" not in screen.get_text()


def test_panel_without_colour_has_no_colour_codes(pair: Pair) -> None:
    code, screen, _ = run_in_terminal(make_arguments(pair, "-n", 100, "--pace", 200), 80, 24, NO_COLOR="1")
    assert code == 0
    assert any("╭" in picture and "big + little" in picture for picture in screen.frames)
    assert not colours(screen)
    assert 4 in screen.styles  # accepted tokens are underlined


@pytest.mark.parametrize("arguments", [[], ["--plain"]], ids=["dumb", "plain"])
def test_dumb_terminal_and_plain_option_get_plain_output(run: Run, pair: Pair, arguments: list[str]) -> None:
    text = from_json(run(*make_arguments(pair, "-n", 60, "--json")))["text"]
    term = "xterm" if arguments else "dumb"
    code, screen, raw = run_in_terminal(make_arguments(pair, "-n", 60, *arguments), 80, 24, TERM=term)
    assert code == 0
    assert screen.get_text().startswith(text + "\n")
    assert "╭" not in raw
    assert "tok/s" in screen.get_text()
    if not arguments:
        assert "\x1b" not in raw


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10)])
def test_ctrl_c_prints_output_so_far_and_restores_cursor(pair: Pair, width: int, height: int) -> None:
    code, screen, raw = run_in_terminal(make_endless_arguments(pair, "-n", 0, "--pace", 0), width, height, interrupt_after=2)
    assert code == 130
    assert not screen.cursor_hidden
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    final = screen.get_text()
    assert "╭" not in final
    assert final.startswith(PROMPT)
    assert "^C" not in raw
    assert len(final.split("green:")[0]) > 50
    assert "interrupted" in final
    assert "Traceback" not in final


def test_damaged_file_in_terminal_is_one_line_and_keeps_cursor(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    code, screen, _ = run_in_terminal(["-m", tmp_path / "empty.bin"], 200, 24)
    assert code == 2
    assert not screen.cursor_hidden
    assert re.fullmatch(r"specdec: \S+empty\.bin is empty.*", screen.get_text().strip())


def test_generated_control_characters_cannot_move_cursor(run: Run, tmp_path: Path) -> None:
    """`Screen` fails on any code that is not the panel's own."""
    config = ModelConfig(64, 96, 1, 4, 2, 300, 20_000)
    tensors = random_tensors(config, 3, 0.1)
    tensors["tok_emb"][1:3] = 0
    path = write_checkpoint(tmp_path / "wild.bin", config, tensors, version=1)
    write_tokenizer(tmp_path / "tok300.bin", small_pieces())
    prompt = "a\x1b[2J\x07"
    arguments = ["-m", path, "-d", path, "-i", prompt, "-t", 1.5, "-k", 100, "-s", 2, "-n", 4000, "-j", 1]
    assert from_json(run(*arguments, "--json"))["n_generated"] > 3000
    code, screen, _ = run_in_terminal(arguments, 80, 24, command=HURRIED)
    assert code == 0
    assert len(screen.frames) > 20
    assert screen.get_text().startswith("a")
    assert "[2J" not in screen.get_text()


def test_slow_draft_prints_advice(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock makes the draft a hundred times as expensive as its target."""
    monkeypatch.setattr("specdec.engine.autotuner.measure", lambda *_: CostCurve({1: 1e-6, 8: 2e-6}, 1e-4))
    monkeypatch.setattr(CostModel, "end_pass", lambda *_: None)
    arguments = ("-m", pair.endless, "-d", pair.draft, "-s", 3, "-j", 1, "-n", 100, "--plain")
    _, _, summary = run(*arguments)
    assert re.search(r"^note: only 0 of \d+ passes had a draft, because more would cost more time than", summary, re.MULTILINE)
    assert "times as fast" not in summary
    _, _, summary = run(*arguments, "-g", 2)
    result = r"^0\.\d\d times as fast as endless alone, \d\.\d tokens per pass; same output\.\nnote: -g makes"
    assert re.search(result, summary, re.MULTILINE)  # after progress, which a slow machine logs
    assert "note" not in run(*arguments[:2], "-d", "none", *arguments[4:])[2]


# Stages


def test_stage_does_not_change_output_and_is_reported(run: Run, pair: Pair) -> None:
    arguments = ("-m", pair.target, "-d", pair.draft, "-s", 3, "-j", 1, "-n", 60, "-g", 4, "--json")
    plain = from_json(run(*arguments))
    assert plain["settings"]["stage"] is None
    for stage in (["--stage", "lookup"], ["--stage", pair.draft]):
        got = from_json(run(*arguments, *stage))
        assert [got[name] for name in ("text", "accepted_histogram")] == [plain[name] for name in ("text", "accepted_histogram")]
        assert got["settings"]["stage"] == str(stage[1])
    assert from_json(run(*arguments, "--stage", "none"))["settings"]["stage"] is None


def test_invalid_stage_is_one_line(run: Run, pair: Pair) -> None:
    two = ("-m", pair.target, "-d", pair.draft)
    for command in ([], ["race"], ["chat"], ["serve"], ["sweep"]):
        assert_rejected(run(*command, *two, "-d", "lookup"), "-d is given twice; expected one draft; use --stage NAME")
    assert_rejected(run("-m", pair.target, "--stage", "lookup"), "there is none; name one with -d")
    assert_rejected(run("-m", pair.target, "-d", "none", "--stage", "lookup"), "there is none; name one with -d")
    assert_rejected(run(*two, "--stage", "self"), "not smaller than the draft")
    assert_rejected(run(*two, "--stage", "nope"), "'nope' not found here, in models or in")
