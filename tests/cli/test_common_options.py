"""Requests of command lines, without a model: values, limits, ineffective options, and options of parameters."""

import dataclasses
from itertools import combinations
from typing import Any, get_args, get_type_hints

import pytest
from typer.main import get_command
from typer.models import ParameterInfo

from specdec.cli import app
from specdec.cli.common_options import Request
from specdec.cli.generate import TextRequest
from specdec.cli.option_fields import PARAMETER_OPTIONS, translate_parameters
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.ui.plain_views import ModelLabels

KINDS: dict[str, type[Request]] = {"": TextRequest, **{name: request_class for name, (request_class, _) in app.COMMANDS.items()}}


def make_request(*words: object) -> Any:
    """Return the request of a command line."""
    group: Any = get_command(app.app)
    name, *rest = words if words and words[0] in KINDS else ("", *words)
    command = group.commands[name] if name else group
    context = command.make_context("specdec", list(map(str, rest)))
    return KINDS[str(name)](context=context, **context.params)


def test_request_has_values_of_command_line() -> None:
    request = make_request(
        "a", "-m", "b.bin", "-d", "c.bin", "-n", 9, "-t", 0.5, "-s", 7, "-g", 3, "--stop", "x", "--stop", "y", "--json"
    )
    values = request.context.args, request.model, request.draft, request.steps, [*request.stop]
    assert values == (["a"], "b.bin", "c.bin", 9, ["x", "y"])
    assert (request.sampling.temperature, request.sampling.seed, request.draft_settings.gamma) == (0.5, 7, 3)
    assert (request.as_json, request.plain, request.verify, request.given["gamma"]) == (True, False, "coupled", "--gamma")
    assert set(request.given) == {"model", "draft", "steps", "temperature", "seed", "gamma", "stop", "as_json"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.draft = "d.bin"
    assert make_request("-s", 0).sampling != make_request("-s", 0).sampling
    same = make_request("-s", 0)
    assert same.sampling is same.sampling


def test_commands_share_groups_of_options() -> None:
    assert make_request("chat", "-g", 3).draft_settings.gamma == 3
    assert make_request("race", "--min-p", 0.1).sampling.min_p == 0.1
    assert [make_request(name, "--weight-cache", "off").weight_cache for name in ("race", "sweep", "compile")] == ["off"] * 3
    assert (make_request("compile", "-m", "x", "-j", 1).model, make_request("chat").temperature) == ("x", 0.7)


def test_dash_in_chat_reads_the_pipe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.cli.prompt_sources.read_text_input", lambda file, *_: {"": "what a pipe says"}[file])
    monkeypatch.setattr("specdec.cli.prompt_sources.is_piped", lambda *_: True)
    for words in ([], ["-"], ["-i", "-"], ["-f", "-"]):
        request = make_request("chat", "-m", "x.bin", *words).resolve()
        assert (request.prompt, request.word, request.model) == ("what a pipe says", None, "x.bin")


@pytest.mark.parametrize(("one", "other"), [*combinations(KINDS.values(), 2)])
def test_field_has_same_type_in_every_command(one: type[Request], other: type[Request]) -> None:
    """A command may give an option a default of its own, so that it is never None."""
    hints, others = get_type_hints(one), get_type_hints(other)
    for name in (hints.keys() & others.keys()) - {"prompts"}:  # a file of sweep, lengths of bench
        assert {hints[name], *get_args(hints[name])} & {others[name], *get_args(others[name])}, name


@pytest.mark.parametrize("request_class", KINDS.values())
def test_every_field_is_an_option(request_class: type[Request]) -> None:
    fields = {each.name: each.default for each in dataclasses.fields(request_class)}
    assert fields.pop("context") is None
    assert fields and all(isinstance(default, ParameterInfo) for default in fields.values())


@pytest.mark.parametrize(
    ("words", "model", "draft", "stage", "labels"),
    [
        ([], DEFAULT_TARGET, DEFAULT_DRAFT, "", ModelLabels("stories6M", "by stories650K", "stories6M + stories650K")),
        (["-d", "NONE"], DEFAULT_TARGET, "", "", ModelLabels("stories6M", "", "stories6M")),
        (["-m", "a.bin"], "a.bin", "auto", "", ModelLabels("a", "by auto", "a + auto")),  # until it is loaded
        (["-m", "a.bin", "-d", "Lookup"], "a.bin", "lookup", "", ModelLabels("a", "from what came before", "a + lookup")),
        (["-m", "a.bin", "-d", "MTP"], "a.bin", "mtp", "", ModelLabels("a", "by a's own head", "a + mtp")),
        (
            ["x/a.gguf", "-d", "Self", "--stage", "None"],
            "x/a.gguf",
            "self",
            "",
            ModelLabels("a", "by a in fewer bits", "a + self"),
        ),
        (["-m", "a", "-d", "b", "--stage", "lookup"], "a", "b", "lookup", ModelLabels("a", "by b", "a + b + lookup")),
        (["-m", "a.bin", "--verify", "block"], "a.bin", "", "", ModelLabels("a", "", "a")),
    ],
    ids=str,
)
def test_unnamed_models_are_resolved(words: list[str], model: object, draft: object, stage: str, labels: ModelLabels) -> None:
    request = make_request(*words, "-i", "x").resolve()
    assert (request.model, request.draft, request.stage, request.labels) == (str(model), str(draft), stage, labels)


def test_prompt_and_length_are_resolved() -> None:
    assert [make_request(*words).resolve().prompt for words in (["a b"], ["-i", "c\n"], ["a.bin", "d"])] == ["a b", "c\n", "d"]
    assert [(r.steps, r.max_tokens) for r in (make_request("x", *n).resolve() for n in ([], ["-n", 0], ["--max-tokens", 5]))] == [
        (256, None), (0, None), (None, 5),
    ]  # fmt: skip


def test_library_errors_are_translated_to_options() -> None:
    assert translate_parameters("no tokenizer; name it with tokenizer=...") == "no tokenizer; name it with -z"
    assert translate_parameters("too large for f16 (kv='f32' holds them)") == "too large for f16 (--kv f32 holds them)"
    assert translate_parameters("tree is 'on', and verify is 'block'; x") == "--tree is 'on', and --verify is 'block'; x"
    for kept in ("the draft is small", "the target is int8 already", "as in draft=int4,target=int8", "a prompt is long"):
        assert translate_parameters(kept) == kept


def test_translated_options_exist() -> None:
    group: Any = get_command(app.app)
    options = {option for command in (group, *group.commands.values()) for param in command.params for option in param.opts}
    assert set(PARAMETER_OPTIONS.values()) <= options


def test_sweep_parses_lists_once() -> None:
    request = make_request("sweep", "-g", "1, 1,auto", "--max-tokens", "5,20", "--temperatures", "0,0.5")
    assert (request.draft_lengths, request.lengths) == ([1, "auto"], [5, 20])
    assert (request.rounds, [each.temperature for each in request.samplings]) == (3, [0, 0.5])
