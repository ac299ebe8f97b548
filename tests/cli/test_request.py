"""What a command line asks for, without a model: values, what cannot be, what has no effect, names of options for parameters."""

import dataclasses
import io
import sys
from inspect import get_annotations
from typing import Any, get_args

import pytest
from typer.main import get_command

from specdec.cli import main
from specdec.cli.bench import BenchRequest
from specdec.cli.chat import ChatRequest
from specdec.cli.generate import TextRequest
from specdec.cli.models import ListRequest
from specdec.cli.options import OF_PARAMETERS, in_options, option_of
from specdec.cli.parser import request_of
from specdec.cli.race import RaceRequest
from specdec.cli.request import Request
from specdec.cli.serve import ServeRequest
from specdec.cli.sweep import SweepRequest
from specdec.loaders.model_lookup import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.ui.output import Roles

KINDS: dict[str, type[Request]] = {
    "": TextRequest, "race": RaceRequest, "chat": ChatRequest, "sweep": SweepRequest, "models": ListRequest,
    "bench": BenchRequest, "serve": ServeRequest,
}  # fmt: skip


def asked(*words: object) -> Any:
    """The request of a command line."""
    group: Any = get_command(main.app)
    name, *rest = words if words and words[0] in KINDS else ("", *words)
    command = group.commands[name] if name else group
    context = command.make_context("specdec", list(map(str, rest)))
    return request_of(KINDS[str(name)], context, context.params)


def test_a_request_is_what_the_command_line_says() -> None:
    request = asked(
        "a", "-m", "b.bin", "-d", "c.bin", "-n", 9, "-t", 0.5, "-s", 7, "-g", 3, "--stop", "x", "--stop", "y", "--json"
    )
    assert (request.words, request.model, request.draft, request.steps, request.stops) == (
        ("a",),
        "b.bin",
        "c.bin",
        9,
        ["x", "y"],
    )
    assert (request.sampling.temperature, request.sampling.seed, request.drafting.gamma) == (0.5, 7, 3)
    assert (request.as_json, request.plain, request.verify, request.given["gamma"]) == (True, False, "coupled", "--gamma")
    assert set(request.given) == {"model", "draft", "steps", "temperature", "seed", "gamma", "stop", "as_json"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.draft = "d.bin"
    assert asked("-s", 0).sampling != asked("-s", 0).sampling
    same = asked("-s", 0)
    assert same.sampling is same.sampling


def test_a_dash_in_a_talk_is_the_pipe_that_is_read_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.cli.prompts.text_in", lambda file, *_: {"": "what a pipe says"}[file])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for words in ([], ["-"], ["-i", "-"], ["-f", "-"]):
        request = asked("chat", "-m", "x.bin", *words).settled()
        assert (request.prompt, request.word, request.model) == ("what a pipe says", None, "x.bin")


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_field_is_no_other_thing_in_one_command_than_in_another(kind: type[Request]) -> None:
    """What a command has an option for may have a default of its own, of the same type."""
    own = get_annotations(kind)
    for name, hint in get_annotations(Request).items():
        assert name not in own or own[name] in (hint, *get_args(hint)), name


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_command_offers_each_option_that_its_request_adds(kind: type[Request]) -> None:
    offered = kind.offers.split()
    assert len(offered) == len(set(offered)) and set(get_annotations(kind)) <= set(offered)
    assert all(option_of(kind, name) for name in offered)


@pytest.mark.parametrize(
    ("words", "model", "draft", "stage", "roles"),
    [
        ([], DEFAULT_TARGET, DEFAULT_DRAFT, "", Roles("stories6M", "by stories650K", "stories6M + stories650K")),
        (["-d", "NONE"], DEFAULT_TARGET, "", "", Roles("stories6M", "", "stories6M")),
        (["-m", "a.bin"], "a.bin", "auto", "", Roles("a", "by auto", "a + auto")),  # until it is loaded
        (["-m", "a.bin", "-d", "Ngram"], "a.bin", "ngram", "", Roles("a", "from the text so far", "a + ngram")),
        (["-m", "a.bin", "-d", "MTP"], "a.bin", "mtp", "", Roles("a", "by a's own head", "a + mtp")),
        (["x/a.gguf", "-d", "Self", "--stage", "None"], "x/a.gguf", "self", "", Roles("a", "by a in fewer bits", "a + self")),
        (["-m", "a", "-d", "b", "--stage", "ngram"], "a", "b", "ngram", Roles("a", "by b", "a + b + ngram")),
        (["-m", "a.bin", "--verify", "block"], "a.bin", "", "", Roles("a", "", "a")),
    ],
    ids=str,
)
def test_models_that_are_not_named_are_settled(words: list[str], model: object, draft: object, stage: str, roles: Roles) -> None:
    request = asked(*words, "-i", "x").settled()
    assert (request.model, request.draft, request.stage, request.roles) == (str(model), str(draft), stage, roles)


def test_the_prompt_and_its_length_are_settled() -> None:
    assert [asked(*words).settled().prompt for words in (["a b"], ["-i", "c\n"], ["a.bin", "d"])] == ["a b", "c\n", "d"]
    assert [(r.steps, r.max_tokens) for r in (asked("x", *n).settled() for n in ([], ["-n", 0], ["--max-tokens", 5]))] == [
        (256, None), (0, None), (None, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gamma": "0"}, "gamma is '0'; expected auto or 1 to 63"),
        ({"gamma": "four"}, "gamma is 'four'"),
        ({"verify": "never"}, "verify is 'never'; expected one of coupled, rejection, block"),
        ({"tree": "on", "verify": "block"}, "tree is 'on', and verify is 'block'"),
        ({"kv": "f64"}, "kv is 'f64'"),
        ({"pack": "some"}, "pack is 'some'; expected one of auto, on, none"),
        ({"quantize": "int4"}, "quantize is 'int4'"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"seed": 2**63}, "seed is"),
        ({"threads": 100_000}, "threads is 100000; this machine has cores for"),
        ({"prompt": "\udcff"}, "prompt holds"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told_by_the_parameter_and_then_by_the_option(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^{said}") as error:
        Request(**values)
    assert in_options(str(error.value)).startswith("--" + next(iter(values)).replace("_", "-"))


def test_errors_of_the_library_are_told_with_options() -> None:
    assert in_options("no tokenizer; name it with tokenizer=...") == "no tokenizer; name it with -z"
    assert in_options("too large for f16 (kv='f32' holds them)") == "too large for f16 (--kv f32 holds them)"
    assert in_options("tree is 'on', and verify is 'block'; x") == "--tree is 'on', and --verify is 'block'; x"
    for kept in ("the draft is small", "the target is int8 already", "as in draft=int4,target=int8", "a prompt is long"):
        assert in_options(kept) == kept


def test_a_parameters_option_is_one_that_a_command_has() -> None:
    group: Any = get_command(main.app)
    options = {option for command in (group, *group.commands.values()) for param in command.params for option in param.opts}
    assert set(OF_PARAMETERS.values()) <= options


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-d", "none", "-g", 4], "--gamma: no effect without a draft"),
        (["-d", "ngram", "--tree", "on"], "--tree: no effect without a draft that is a model"),
        (["--json", "--pace", 3, "--stats"], "--pace, --stats: no effect with --json"),
        (["-t", 0, "-k", 3, "-p", 0.5], "--top-p, --top-k: no effect at temperature 0"),
        (["-d", "self", "-g", 4, "--tree", "on", "--pace", 3], ""),
    ],
    ids=str,
)
def test_what_has_no_effect_is_known_before_anything_is_loaded(words: list[object], said: str) -> None:
    assert asked("-m", "a.bin", "-i", "x", *words).settled().without_effect() == said


def test_a_sweep_reads_its_lists_once() -> None:
    request = asked("sweep", "-g", "1, 1,auto", "--max-tokens", "5,20", "--temperatures", "0,0.5")
    assert (request.draft_lengths, request.lengths, request.degrees) == ([1, "auto"], [5, 20], [0, 0.5])
    assert (request.n_rounds, request.n_seeds) == (3, 1)
    assert [asked("sweep", "--full").lengths, asked("sweep", "--full").n_rounds] == [[50, 100, 200, 500], 5]
