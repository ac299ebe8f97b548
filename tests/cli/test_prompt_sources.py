"""Requests from command lines: words, sources of prompts, names as typed, and ineffective options."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from typer.core import TyperOption
from typer.main import get_command

from specdec.cli.app import app
from specdec.head_config import HeadConfig
from specdec.loaders import load_checkpoint, packed_weights
from specdec.loaders import model_paths as files
from specdec.loaders.model_loader import Loader, load_model
from specdec.model import get_architecture
from specdec.model_config import ModelConfig
from specdec.runtime import code_cache
from specdec.tokenizer import Tokenizer
from specdec.ui.progress import show_status
from tests.conftest import VOCAB, Pair
from tests.fakes.hub import make_snapshot
from tests.fakes.terminal import COMMAND, PROMPT, TIMEOUT_S, make_arguments, make_endless_arguments, run_in_terminal
from tests.tools.command_runs import A_NOTE, Run, assert_rejected, from_json, run  # noqa: F401  (a fixture)
from tests.tools.configs import replace_config
from tests.tools.gguf_files import CONFIGS, CONVERTED, gguf_bytes, make_model_keys, make_model_tensors
from tests.tools.head_files import write_folder
from tests.tools.hf_folders import FIXTURES


@pytest.fixture
def ask(run: Run, pair: Pair) -> Run:
    """Run with a seed and JSON output; the target is not given yet."""
    return lambda *arguments: run(*arguments, "-s", 5, "-j", 1, "-n", 30, "--json")


def settings(result: tuple[int, str, str]) -> dict[str, object]:
    return dict(from_json(result)["settings"])


# Words

VALUES = (None, "40", "007", "0", "1.5", "1.", ".5", "-1", "+1", "1e3", "inf", " 4", "4 ", "1_000", "9" * 30, "", "word")


@pytest.mark.parametrize("value", VALUES)
def test_converted_value_equals_typers_own(value: str | None) -> None:
    """Check every option, given and as default."""
    group = get_command(app)
    context = group.make_context("specdec", [], resilient_parsing=True)
    for command in (group, *group.commands.values()):
        for param in command.get_params(context):
            is_single = not (getattr(param, "is_flag", False) or param.multiple or param.nargs == -1)
            if hasattr(TyperOption, "get_runtime_param") and is_single:  # parameters of older Typers have no such validation
                for given in (value, param.default):
                    typers_own = partial(type(param).process_value, param)
                    assert process_result(param.process_value, context, given) == process_result(typers_own, context, given)


def process_result(process: Callable[..., object], context: object, value: object) -> str:
    try:
        return repr(process(context, value))
    except Exception:
        return "an error"


def test_error_for_a_word_in_the_place_of_a_number_explains_the_option() -> None:
    group, n_wrong = get_command(app), 0
    for command in (group, *group.commands.values()):
        words = [] if command is group else [command.name]
        for param in command.params:
            if getattr(param, "metavar", "") in ("N", "X", "S", "MB") and not param.hidden:
                with pytest.raises(ValueError, match=r"is 'word'; expected a(uto or 1 to 63| (whole )?number.* [(])"):
                    app([*words, param.opts[0], "word"], standalone_mode=False)
                n_wrong += 1
    assert n_wrong > 30


def test_word_is_prompt_or_model_in_llama2c_order(ask: Run, pair: Pair) -> None:
    expected = from_json(ask("-m", pair.target, "-i", PROMPT))
    for words in (
        ("-m", pair.target, PROMPT),
        (PROMPT, "-m", pair.target),
        (pair.target, "-i", PROMPT),
        (pair.target, PROMPT),
        ("-t", 1, pair.target, "-k", 0, PROMPT),
    ):
        assert from_json(ask(*words))["text"] == expected["text"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["swep"], "did you mean 'specdec sweep'?"),
        (["list"], "did you mean 'specdec models'?"),
        (["rm", "org/name"], "did you mean 'specdec models rm'?"),
        (["chta", "hi"], "did you mean 'specdec chat'?"),
        (["Bensh"], "did you mean 'specdec bench'?"),
        (["Once", "upon", "a", "time"], "quotes"),
        (["a.bin", "b.bin"], "expected one model and one prompt, got 2 words: 'a.bin b.bin'; name a draft with -d"),
        (["a.bin", "-m", "b.bin"], "two targets"),
        (["hello", "-i", "there"], "expected one prompt, got -i and 'hello'; leave one out"),
        (["-n", "-1"], "--steps is '-1'; expected a whole number, 0 or more (Tokens with the prompt. 0: as many as fit"),
        (["-g", "0"], "--gamma is '0'; expected auto or 1 to 63; use -d none for no draft"),
        (["run", "a.bin"], "unknown command 'run'; did you mean 'specdec chat'? If it is the prompt, use -i 'run a.bin'"),
        (["models", "nosuch"], "expected a folder, a model, or the action pull, rm, name or clean"),
        (["models", "x", "y"], "expected FOLDER, or pull NAME, rm NAME, name SHORT NAME, clean"),
        (["-p", "Once upon a time"], "--top-p is 'Once upon a time'; expected a number (Keep the likeliest tokens"),
        (["-m", ""], "the model name is empty"),
        (["nope.gguf"], "'nope.gguf' not found here, in models or in"),
        (["--temprature", "1"], "No such option: --temprature (Possible options: --temperature"),
        (["--temp", "0.7"], "No such option: --temp (Possible options: --temperature"),
        (["-m", "https://huggingface.co/org/name"], "is a URL; name the model as org/name"),
        (["--logit-bias", "5=500"], "specdec: --logit-bias of 5 is 500"),
        (["--zzz"], "No such option: --zzz; --help lists"),
        (["-j", "x"], "--threads is 'x'; expected a whole number, 0 or more (CPU threads."),
        (["--min-p", "2"], "--min-p is 2.0; expected a number from 0 (off) to 1"),
        (["race", "hello"], "unexpected word 'hello'; use -m NAME for a model; --help"),
        (["sweep", "a.bin"], "unexpected word 'a.bin'; use -m NAME for a model; --help"),
        (["chat", "hello", "-m", "b.bin"], "a message with -i"),
        (["chat", "-n", "5"], "No such option: -n"),
        (["pull", "org/name"], "did you mean 'specdec models pull'? If it is the prompt, use -i 'pull org/name'\n"),
        (["Once upon a time", "20"], "unexpected number '20'; use -n 20 for the number of tokens, or -t 20 for the temperature"),
        (["a.bin", "Once upon a time", "20"], "use -n 20"),
        (["-i", "Once upon a time", "20"], "use -n 20"),
        (["-f", "a.txt", "20"], "use -n 20"),
        (["a.bin", "20"], ", or -i 20 if it is the prompt\n"),
        (["a.bin", "0.9", "256", "Once upon a time"], "use -t 0.9 for the temperature, or -i 0.9 if it is the prompt"),
        (["serve", "-p", "8080"], "--top-p is '8080'; expected a number from 0 to 1 (For requests that set none."),
        (["serve", "8080"], "'8080' not found"),
        (["chat", "--no-histroy"], "No such option: --no-histroy (Possible options: --no-history); --help lists"),
    ],
)
def test_ambiguous_words_are_rejected_with_hint(run: Run, words: list[str], expected: str) -> None:
    assert_rejected(run(*words), expected)


def test_word_that_is_no_misspelled_command_is_a_prompt(run: Run, pair: Pair) -> None:
    result = run("-m", pair.target, "-s", 5, "-j", 1, "-n", 30, "--json", "--", "-md")
    assert settings(result)["prompt"] == "-md"
    assert run("race", "hello", "--help")[0] == 0


def test_t_used_as_threads_prints_temperature_hint(run: Run, pair: Pair) -> None:
    assert "; use -j N for threads" in run(*make_arguments(pair, "-t", 8, "-n", 10))[2]
    assert "for threads" not in run(*make_arguments(pair, "-t", 2, "-n", 10))[2]


def test_command_name_is_command_and_prompt_only_after_i(ask: Run, run: Run, pair: Pair) -> None:
    assert settings(ask("-m", pair.target, "-i", "bench"))["prompt"] == "bench"
    code, out, err = run("-g", 3, "-t", 0, "bench", "-m", pair.target, "-p", 8, "-n", 0, "-j", 1, "--json")
    assert (code, err.count("\n")) == (0, 1)
    assert "options before bench have no effect: --temperature, --gamma; put them after bench" in err
    assert "timed" in json.loads(out)


def test_text_file_instead_of_prompt_prints_file_option_hint(run: Run, pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "my prompt.txt"
    path.write_text("Once upon a time\n")
    for words in ([path], [path, "-m", pair.target], ["-n", 20, path]):
        assert_rejected(run(*words), f"'{path}' names a text file; use -f '{path}' to read the prompt from it")
    assert_rejected(
        run("-m", path, "-i", "x"), f"{path} is a text file that begins with 'Once upon a time'; expected a GGUF file"
    )
    assert_rejected(run("p.txt", "-m", pair.target), "'p.txt' names a text file; use -f p.txt to read the prompt from it, or -i")
    gone = tmp_path / "model.gguf"
    gone.write_text("Entry not found")
    assert_rejected(run(gone), f"{gone} is a text file that begins with 'Entry not found'; expected a GGUF file")


# Prompts


def test_empty_and_very_long_words_are_prompts(ask: Run, pair: Pair) -> None:
    assert settings(ask("-m", pair.endless, ""))["prompt"] == ""
    assert settings(ask("-m", pair.endless, "é/" * 5, "-n", 300))["prompt"] == "é/" * 5
    assert_rejected(ask("-m", pair.endless, "🙂" * 200), "counts the prompt")


def pipe(piped: bytes, *words: object) -> "subprocess.CompletedProcess[bytes]":
    """Run the command with these bytes as stdin."""
    command = [*COMMAND, "-s", "5", "-j", "1", *map(str, words)]
    return subprocess.run(command, input=piped, capture_output=True, timeout=TIMEOUT_S, check=False)


def test_prompt_is_read_from_file_or_stdin(ask: Run, pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(f"{PROMPT}\n")
    expected = from_json(ask("-m", pair.target, "-i", PROMPT))["text"]
    assert from_json(ask("-m", pair.target, "-f", path))["text"] == expected
    path.write_bytes(b"\xff")
    assert_rejected(ask("-m", pair.target, "-f", path), path, "UTF-8")
    assert_rejected(ask("-m", pair.target, "-f", tmp_path / "no"), "No such file")
    for words in (["-m", pair.target], ["-m", pair.target, "-"], ["-m", pair.target, "-f", "-"], [pair.target, "-i", "-"]):
        assert pipe(f"{PROMPT}\n".encode(), *words, "-n", 30).stdout.decode() == expected + "\n"
    done = pipe(b"\xff", "-i", "-")
    assert (done.returncode, done.stderr) == (2, b"specdec: stdin is not valid UTF-8 at byte 0; expected UTF-8 text\n")
    assert pipe(b"", "-n", 10).stdout.startswith(b"Once upon a time")


def test_prompt_file_and_pipe_are_joined(pair: Pair, tmp_path: Path) -> None:
    """They come in this order, with blank lines between them; an option's value may look like another program's option."""
    path = tmp_path / "p.txt"
    path.write_text("the file\n")
    for words, piped, prompt in (
        (["the then"], b"some text\n", "the then\n\nsome text"),
        (["-i", "the", "-f", path], b"some text\n", "the\n\nthe file\n\nsome text"),
        (["-i", "the", "-f", path], b"", "the\n\nthe file"),
        (["-i", "the", "-f", "-"], b"text", "the\n\ntext"),
        (["--", "-ngl"], b"", "-ngl"),
    ):
        done = pipe(piped, "-m", pair.target, "--max-tokens", 1, "--json", *words)
        assert json.loads(done.stdout)["settings"]["prompt"] == prompt


def test_waiting_for_stdin_prints_message(pair: Pair) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, "-m", pair.target, "-n", "20"], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stderr and process.stdin and process.stdout
        assert b"waiting for a prompt from stdin; use -i TEXT" in process.stderr.readline()
        process.stdin.write(PROMPT.encode())
        process.stdin.close()
        assert process.stdout.read().decode().startswith(PROMPT)


def test_prompt_longer_than_n_is_rejected(run: Run, pair: Pair) -> None:
    n = len(Tokenizer(pair.tokenizer).encode(PROMPT)) - 1  # without BOS
    for steps in (1, n):
        message = f"-n {steps} counts the prompt, which has {n + 1} tokens; use --max-tokens 126 to generate 126"
        assert_rejected(run(*make_arguments(pair, "-n", steps)), message)
    assert from_json(run(*make_arguments(pair, "-n", n + 1, "--json")))["n_generated"] == 1
    for few in ([], ["-n", 256]):
        assert_rejected(
            run(*make_endless_arguments(pair, *few, "-i", "x" * 300)), "-n 256 counts", "use --max-tokens 200 to generate"
        )


def test_max_tokens_counts_only_new_tokens(run: Run, pair: Pair) -> None:
    whole = from_json(run(*make_arguments(pair, "-n", 0, "--json")))
    for n in (1, 7):
        result = from_json(run(*make_arguments(pair, "--max-tokens", n, "--json")))
        assert (result["tokens"], result["stop_reason"]) == (whole["tokens"][:n], "max_tokens")
        assert (result["settings"]["steps"], result["settings"]["max_tokens"]) == (None, n)
    assert from_json(run(*make_arguments(pair, "--max-tokens", 126, "--json")))["tokens"] == whole["tokens"]
    assert len(from_json(run("race", *make_arguments(pair, "--max-tokens", 7, "--json")))["tokens"]) == 7
    for command in ([], ["race"]):
        assert_rejected(run(*command, *make_arguments(pair, "-n", 7, "--max-tokens", 7)), "-n counts the prompt", "leave one")
        assert_rejected(run(*command, *make_arguments(pair, "--max-tokens", 0)), "--max-tokens")


def test_length_beyond_context_prints_note(run: Run, pair: Pair) -> None:
    """The context is 128 tokens; the default of 256 for -n prints no note."""
    whole = run(*make_arguments(pair, "-n", 0, "--plain"))[1]
    n = 129 - len(Tokenizer(pair.tokenizer).encode(PROMPT))
    for option, value in (("-n", 129), ("-n", 100_000), ("--max-tokens", n + 1)):
        code, out, err = run(*make_arguments(pair, option, value, "--plain"))
        message = f"specdec: {option} {value} exceeds the target's context of 128 tokens; generating at most {n} new ones\n"
        assert (code, out) == (0, whole) and message in err
    for few in ([], ["-n", 128], ["--max-tokens", n]):
        assert "exceeds" not in run(*make_arguments(pair, *few, "--plain"))[2]


def test_draft_that_is_not_smaller_prints_note(run: Run, pair: Pair) -> None:
    message = "specdec: the draft is not smaller than the target ("
    swapped = ["-m", pair.draft, "-d", pair.target, "--quantize", "none", "-z", pair.tokenizer, "-i", PROMPT, "-n", 20]
    assert message in run(*swapped)[2] and "so it saves no time; name the large model with -m" in run(*swapped)[2]
    assert message in run(*make_arguments(pair, "-d", pair.target, "--quantize", "none", "-n", 20))[2]
    staged = run(*make_arguments(pair, "--stage", pair.target, "-n", 20))[2]
    assert "specdec: the stage is not smaller than the draft (" in staged and message not in staged
    assert "not smaller" not in run(*make_arguments(pair, "-n", 20))[2]


# Names


def test_model_names_are_found_as_typed(ask: Run, pair: Pair, tmp_path: Path) -> None:
    for name in ("target", "draft", "tokenizer"):
        place = {"tokenizer": "tok300.bin"}.get(name, f"{name}.bin")
        (tmp_path / "models" / place).write_bytes(getattr(pair, name).read_bytes())
    assert settings(ask("-m", "target", "-d", "draft"))["model"] == "target"
    assert settings(ask("target", "-d", "Self"))["draft"] == "self"
    assert settings(ask("target", "-d", "LOOKUP"))["draft"] == "lookup"
    assert settings(ask("target", "-d", "None"))["draft"] is None


# Stop strings and samples


def test_output_ends_before_stop_string_in_every_view(run: Run, pair: Pair) -> None:
    whole = from_json(run(*make_arguments(pair, "-n", 100, "--json")))["text"]
    stop = whole[len(PROMPT) + 20 : len(PROMPT) + 23]
    expected = whole[: whole.index(stop, len(PROMPT))]
    stops = ("-n", 100, "--stop", stop, "--stop", "\x00never")
    result = from_json(run(*make_arguments(pair, *stops, "--json")))
    assert (result["text"], result["stop_reason"]) == (expected, "stop")
    code, out, _ = run(*make_arguments(pair, *stops, "--plain"))
    assert (code, out) == (0, expected + "\n")
    _, screen, _ = run_in_terminal(make_arguments(pair, *stops[:4]), 80, 24)
    shown = "".join(screen.get_text().split("green:")[0].split())
    assert shown == "".join(expected.split())
    for stop, error in (("", "at least one character"), ("\udcff", "no valid UTF-8")):
        assert_rejected(run(*make_arguments(pair, "--stop", stop)), "--stop", error)


def test_samples_use_this_seed_and_the_next_ones(run: Run, pair: Pair) -> None:
    code, out, _ = run(*make_arguments(pair, "-n", 30, "--samples", 3, "--json"))
    several = [json.loads(line) for line in out.splitlines()]
    assert (code, [one["seed"] for one in several]) == (0, [5, 6, 7])
    alone = [from_json(run(*make_arguments(pair, "-n", 30, "-s", seed, "--json")))["text"] for seed in (5, 6, 7)]
    assert [one["text"] for one in several] == alone
    code, out, err = run(*make_arguments(pair, "-n", 30, "--samples", 2, "--plain"))
    assert out == f"{alone[0]}\n\n{alone[1]}\n"
    assert "seed 5" in err and "seed 6" in err
    assert_rejected(run("--samples", 0), "--samples")


# Installed models


def test_installed_models_are_listed_with_fitting_drafts(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(packed_weights, "get_default_folder", lambda: None)
    assert run("models")[:2] == (
        0,
        "no models found in models/ or in the hub's cache; download one with: specdec models pull org/name\n",
    )
    for name in ("target", "draft"):
        (tmp_path / "models" / f"{name}.bin").write_bytes(getattr(pair, name).read_bytes())
    (tmp_path / "models" / "tok300.bin").write_bytes(pair.tokenizer.read_bytes())
    (tmp_path / "models" / "broken.bin").write_bytes(b"PK\x03\x04")
    snapshot = make_snapshot(tmp_path / "hub")
    name = next(iter(CONFIGS))
    (snapshot / "tiny-Q8_0.gguf").write_bytes(gguf_bytes(make_model_keys(name), make_model_tensors(name)))
    listed = from_json(run("models", "--json"))
    assert [(row["name"], row["drafts"]) for row in listed["models"]][:2] == [("draft.bin", []), ("target.bin", [])]
    assert [row["name"] for row in listed["unreadable"]] == ["broken.bin"]
    assert listed["models"][1]["vocabulary"] == 300
    assert [row["name"] for row in listed["models"]][2:] == ["org/name:Q8_0"]
    monkeypatch.setattr("specdec.draft.installed_models.MAX_DRAFT_SIZE_RATIO", 0.9)
    installed = tmp_path / "installed" / "models"
    installed.mkdir(parents=True)
    monkeypatch.setattr(files, "BUNDLED_MODELS_DIR", installed)  # the checkout's models/ has the same names
    for name in ("target", "draft"):
        (installed / f"{name}.bin").write_bytes(getattr(pair, name).read_bytes())
    code, out, err = run("models")
    assert [line.split()[0] for line in out.splitlines()].count("draft.bin") == 1
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.startswith("target.bin"))
    assert row.split()[-1] == "draft.bin"
    assert "llama 3 x 64" in row
    assert "cannot be used" in out
    code, out, err = run("models", installed)
    assert (code, err) == (0, "") and [line.split()[0] for line in out.splitlines()] == ["model", "draft.bin", "target.bin"]
    assert out.splitlines()[2].split()[-1] == "draft.bin"
    listed = from_json(run("models", installed, "--json"))
    assert [(row["name"], row["drafts"]) for row in listed["models"]] == [
        (str(installed / "draft.bin"), []),
        (str(installed / "target.bin"), [str(installed / "draft.bin")]),
    ]
    assert len(from_json(run("models", installed / "draft.bin", "--json"))["models"]) == 1
    assert run("models", tmp_path / "installed")[:2] == (0, f"no models in {tmp_path / 'installed'}\n")
    assert_rejected(run("models", tmp_path / "nowhere"), "cannot list", "No such file")


def test_models_are_listed_with_family_names_of_their_files(run: Run, tmp_path: Path) -> None:
    names = ("granite", "granite_hybrid", "smollm3", "phi3", "ministral3", "gemma3", "lfm2", "qwen35")
    for name in names:
        shutil.copytree(FIXTURES / name, tmp_path / name)
        (tmp_path / f"{name}.gguf").write_bytes(gguf_bytes(make_model_keys(name), make_model_tensors(name)))
    listed = {Path(row["name"]).name: row["family"] for row in from_json(run("models", tmp_path, "--json"))["models"]}
    folders = ["granite", "granitemoehybrid", "smollm3", "phi3", "ministral3", "gemma3", "lfm2", "qwen3_5"]
    files = ["granite", "granite", "smollm3", "phi3", "mistral3", "gemma3", "lfm2", "qwen35"]
    assert [listed[name] for name in names] == folders and [listed[f"{name}.gguf"] for name in names] == files
    assert "gemma3 7 x 18" in run("models", tmp_path)[1]


def test_list_shows_weights_read_per_token_with_experts(run: Run, tmp_path: Path) -> None:
    """Use the Qwen3-MoE fixture: 2 of 3 layers have 6 experts of 3 x 20 x 32 weights, and a token uses 2."""
    shutil.copytree(FIXTURES / "qwen3_moe", tmp_path / "qwen3_moe")
    (row,) = from_json(run("models", tmp_path / "qwen3_moe", "--json"))["models"]
    assert row["parameters"] - row["parameters_read"] == 2 * 4 * 3 * 20 * 32
    assert "46 k, 31 k read" in run("models", tmp_path)[1]
    weights = load_model(tmp_path / "qwen3_moe", pack="none").weights.matrices
    sizes = {name: matrix.panels.nbytes for name, matrix in weights.items()}
    assert row["memory_bytes"] == sum(sizes.values())
    expert_bytes = sum(size for name, size in sizes.items() if ".experts_" in name)
    assert row["bytes_per_token"] == row["memory_bytes"] - sizes["embedding"] - expert_bytes * 4 // 6
    (dense,) = from_json(run("models", FIXTURES / "llama", "--json"))["models"]
    assert dense["parameters"] == dense["parameters_read"]
    (tied,) = from_json(run("models", FIXTURES / "llama_tied", "--json"))["models"]
    assert tied["memory_bytes"] == tied["bytes_per_token"]


@pytest.mark.parametrize("name", CONVERTED)
def test_listed_memory_is_that_of_the_loaded_weights(run: Run, name: str) -> None:
    path = FIXTURES / "gguf" / f"{name}.gguf"
    (row,) = from_json(run("models", path, "--json"))["models"]
    weights = Loader(pack_mode="none", packed="off").pack(load_checkpoint(path), None)
    assert row["memory_bytes"] == weights.n_bytes - sum(vector.nbytes for vector in weights.vectors.values())


def test_heads_are_listed_with_fitting_models(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    shutil.copytree(FIXTURES / "llama3", folder / "target")
    shutil.copytree(FIXTURES / "llama_tied", folder / "other")
    target, head = CONFIGS["llama3"], HeadConfig(32, (0, 1, 2), 20, False, True)
    config = replace_config(target, n_layers=1, shared_classifier=False, architecture="eagle3", rope_scaling=None, head=head)
    of_nobody = replace(config, vocab_size=99, head=replace(head, target_layers=(2, 9, 4)))
    for name, each in (("drafts", config), ("nobody", of_nobody)):
        tensors = {tensor: np.zeros(shape, np.float32) for tensor, shape in get_architecture(each).shapes(each).items()}
        write_folder(folder / name, each, tensors, range(20))
    write_folder(folder / "unsound", config, {"fc": np.zeros((32, 96), np.float32)}, range(20))
    listed = from_json(run("models", folder, "--json"))
    assert [(Path(row["name"]).name, row["drafts"], row["head"]) for row in listed["models"]] == [
        ("drafts", [], {"width": 32, "layers": [0, 1, 2], "targets": [str(folder / "target")]}),
        ("nobody", [], {"width": 32, "layers": [2, 9, 4], "targets": []}),
        ("other", [], None),
        ("target", [str(folder / "drafts")], None),
    ]
    assert [Path(row["name"]).name for row in listed["unreadable"]] == ["unsound"]
    code, out, err = run("models", folder)
    rows = {line.split()[0]: line.rstrip() for line in out.splitlines()}
    assert (code, err) == (0, "")
    assert rows["drafts"].endswith("for target") and "eagle3 1 x 32" in rows["drafts"]
    assert rows["nobody"].endswith("for models 32 wide, of 9 layers or more")  # rows are not cut in a pipe
    assert rows["target"].endswith(" drafts")


def unlikely_head(folder: Path, ids: Sequence[int] = range(VOCAB)) -> Path:
    config = ModelConfig(64, 96, 1, 4, 2, VOCAB, 128, False, "eagle3", head=HeadConfig(64, (0, 1, 2), VOCAB, False, True))
    tensors = {tensor: np.zeros(shape, np.float32) for tensor, shape in get_architecture(config).shapes(config).items()}
    return write_folder(folder, config, tensors, ids)


def test_damaged_head_is_rejected_in_one_line(run: Run, pair: Pair, tmp_path: Path) -> None:
    head = unlikely_head(tmp_path / "head", [0, *range(VOCAB - 1)])
    assert_rejected(run("-m", pair.target, "-d", head, "-z", pair.tokenizer), '"d2t" maps 2 rows to the id 0')


@pytest.mark.parametrize("words", [["-m", "{head}"], ["-m", "{target}", "-d", "{draft}", "--stage", "{head}"]])
def test_head_is_rejected_as_model(run: Run, pair: Pair, tmp_path: Path, words: list[str]) -> None:
    head = unlikely_head(tmp_path / "head")
    line = [word.format(head=head, target=pair.target, draft=pair.draft) for word in words]
    assert_rejected(run(*line, "-z", pair.tokenizer), f"{head} is a head that drafts for a model; name it with -d\n")


# Unknown names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-m", "stores6M"], ["'stores6M' not found here, in models or in", "; did you mean 'stories6M.bin'?"]),
        (["-m", "STORIES6m.gguf"], ["; did you mean 'stories6M.bin'?"]),
        (["-m", "models/storis6M.bin"], ["; did you mean 'models/stories6M.bin'?"]),
        (["-m", "{here}/models/storis6M.bin"], ["No such file", "; did you mean '{here}/models/stories6M.bin'?"]),
        (["-m", "stories15m"], ["; did you mean 'stories15M.bin'?"]),
        (["-m", "org/nmae"], ["HF_HUB_OFFLINE", "; did you mean 'org/name'?"]),
        (["-m", "org/nane:Q8_0"], ["; did you mean 'org/name:Q8_0'?"]),
        (["-m", "stories6M", "-d", "slef"], ["; did you mean 'self'?"]),
        (["-m", "stories6M", "-d", "look-up"], ["; did you mean 'lookup'?"]),
    ],
)  # fmt: skip
def test_misspelled_name_suggests_similar_ones(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "models" / "stories6M.bin").write_bytes(pair.target.read_bytes())
    snapshot = make_snapshot(tmp_path / "hub")
    (snapshot / "tiny-Q8_0.gguf").touch()
    assert_rejected(run(*(word.format(here=tmp_path) for word in words)), *(word.format(here=tmp_path) for word in expected))


def test_stories_models_without_a_network_are_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = "-m", "stories42M.bin", "-d", "stories15M.bin", "-i", "Once upon a time"
    assert_rejected(run(*words), "no complete copy of stories42M.bin", "HF_HUB_OFFLINE forbids downloads")
    (tmp_path / "stories42M.bin").touch()
    assert_rejected(run(*words), "no complete copy of stories15M.bin", "HF_HUB_OFFLINE forbids downloads")


EVIL = "a\x1b]0;title\x07\x1b[31mb\u202e\nc.bin"


@pytest.mark.parametrize("command", [["race"], ["--plain", "--stats"]], ids=lambda words: words[0])
def test_control_sequences_in_names_are_not_printed(run: Run, pair: Pair, tmp_path: Path, command: list[str]) -> None:
    draft = tmp_path / EVIL
    draft.write_bytes(pair.draft.read_bytes())
    code, out, err = run(*command, *make_arguments(pair, "-n", 30, "-s", 5, "-d", draft), "-g", 2)
    assert code == 0
    printed = out + err
    assert not set(printed) & set("\x1b\x07\u202e")
    assert command[0] == "--plain" or "big + ab c " in printed


def test_names_in_errors_and_lists_are_on_one_line(run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert_rejected(run("-m", EVIL), "not found here, in models or in")
    (tmp_path / "models" / EVIL).write_bytes(pair.draft.read_bytes())
    out = run("models")[1]
    assert out.splitlines()[1].startswith("ab c.bin  llama") and not set(out) & set("\x1b\x07\u202e")


# Optional packages


def test_all_missing_packages_are_reported_before_loading(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "stdin", None)
    for package in ("tokenizers", "huggingface_hub", "jinja2"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("specdec.cli.model_loading.SpeculativeDecoder", lambda *_, **__: pytest.fail("something is loaded"))
    folder, tiny = tmp_path / "folder", tmp_path / "tiny.gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    keys = next(iter(CONFIGS))
    tiny.write_bytes(gguf_bytes(make_model_keys(keys) | {"tokenizer.ggml.model": "gpt2"}, make_model_tensors(keys)))
    reading, fetching, chatting = "tokenizers, to read", "huggingface_hub, to download", "jinja2, to render"
    for words, missing in (
        (["-m", folder], {reading}),
        (["-m", tiny], {reading}),
        (["-m", pair.target, "-d", folder], {reading}),
        (["-m", pair.target, "-z", folder], {reading}),
        (["-m", "stories15M"], {fetching}),
        (["-m", pair.target, "-d", "org/name"], {fetching, reading}),
        (["race", "-m", "org/name:Q8_0"], {fetching, reading}),
        (["sweep", "-m", folder, "-d", "stories15M"], {fetching, reading}),
        (["chat", "-m", pair.target, "-i", "hi"], {chatting}),
        (["chat", "-m", tiny, "-i", "hi"], {reading, chatting}),
        (["chat", "-m", "org/name", "-i", "hi"], {fetching, reading, chatting}),
    ):
        result = run(*words)
        assert_rejected(result, *missing, "; install with: pip install ")
        assert all((each in result[2]) == (each in missing) for each in (reading, fetching, chatting)), words


# First run, shell completion


def test_compilation_is_shown_in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    monkeypatch.setattr(os, "write", lambda _, data: written.append(data))
    with show_status():
        code_cache.compile_reporters[-1]("kernels.attend", 9, 10)
    assert any(b"compiling kernels: 9 of about 10 (" in line for line in written)
    assert not code_cache.compile_reporters
    assert all(cell_len(line.decode().strip("\r")) <= 79 for line in written)


@pytest.mark.parametrize("way", ["--show-completion", "_SPECDEC_COMPLETE"])
def test_shell_completion_works(way: str) -> None:
    if way.startswith("--"):
        environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
        done = subprocess.run([*COMMAND, way, "bash"], env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
        assert b"_COMPLETE=complete_bash" in done.stdout
    else:
        environment = os.environ | {way: "complete_bash", "COMP_WORDS": "specdec sw", "COMP_CWORD": "1"}
        done = subprocess.run(COMMAND, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
        assert done.stdout.split() == [b"sweep"]
    assert (done.returncode, done.stderr) == (0, b"")


def test_first_screen_of_help_has_main_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = "\n".join(run("--help")[1].splitlines()[:24])
    for word in ("Usage", "PROMPT", "--prompt", "--model", "--draft", "--steps", "--temperature", 'specdec "Once upon a time"'):
        assert word in screen
