"""--schema and --regex of the command line, chats with a constraint, and invalid constraints, end to end."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from specdec import Step
from specdec.loaders import optional_dependencies
from specdec.sampling import Sampling
from specdec.text.conversation import ChatSettings, Conversation
from tests.conftest import Pair
from tests.fakes.terminal import PROMPT, make_arguments
from tests.tools.command_runs import Run, assert_rejected, from_json, run
from tests.tools.thoughts import talking

__all__ = ["run", "talking"]  # fixtures
needs_guidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason='needs the package llguidance: pip install ".[test]"'
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "y"]}}}
SCHEMA |= {"required": ["a", "b"], "additionalProperties": False}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return path


@needs_guidance
@pytest.mark.parametrize("draft", [[], ["-d", "lookup"], ["--tree", "on"], ["--verify", "block"]], ids=str)
def test_schema_output_is_valid_json(run: Run, pair: Pair, schema: Path, draft: list[str]) -> None:
    result = from_json(run(*make_arguments(pair, "--schema", schema, "--max-tokens", 60, "--json", *draft)))
    value = json.loads(result["text"].removeprefix(PROMPT))
    assert [*value] == ["a", "b"] and 0 <= value["a"] <= 99 and value["b"] in ("x", "y")
    assert result["settings"]["schema"] == str(schema) and result["stop_reason"] in ("bos", "eos")
    assert result["n_accepted"] > 5


@needs_guidance
def test_json_object_and_regex_constrain_output(run: Run, pair: Pair) -> None:
    result = from_json(run(*make_arguments(pair, "--schema", "json", "--max-tokens", 9, "--json")))
    assert result["text"].removeprefix(PROMPT).startswith("{")
    result = from_json(run(*make_arguments(pair, "--regex", " né{2}!", "--max-tokens", 20, "--json")))
    assert result["text"].removeprefix(PROMPT) == " néé!" and result["settings"]["regex"] == " né{2}!"
    code, out, _ = run(*make_arguments(pair, "--regex", "(a|b){3}", "--plain"))
    assert code == 0 and len(out.removeprefix(PROMPT)) == 4


@needs_guidance
def test_invalid_constraint_is_one_line(run: Run, pair: Pair, schema: Path, tmp_path: Path) -> None:
    def rejected(*words: object) -> str:
        return assert_rejected(run(*make_arguments(pair, *words)), "")

    assert "--schema and --regex exclude each other" in rejected("--schema", schema, "--regex", "a")
    assert "the regex cannot be used: unclosed group" in rejected("--regex", "(a")
    assert "cannot read" in rejected("--schema", tmp_path / "none.json")
    for content, words in {
        "[]": "is []; expected an object", "{": "is not valid JSON", "[" * 1_000_000: "nested too deeply",
        '{"a": 1, "a": 2}': "is given twice", '{"not": {}}': "uses not, which is not supported",
        "\udcff": "is not UTF-8 at byte 0",
    }.items():  # fmt: skip
        schema.write_bytes(content.encode(errors="surrogateescape"))
        assert words in rejected("--schema", schema)


def test_missing_package_is_reported_before_model_lookup(run: Run, schema: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_dependencies, "is_installed", lambda package: package != optional_dependencies.GUIDANCE)
    for shape in (["--schema", schema], ["--regex", "a"]):
        line = assert_rejected(run("-m", "nowhere.bin", *shape, "x"), "")
        assert line.endswith("package not found: llguidance, for structured output; install with: pip install llguidance\n")


@needs_guidance
def test_every_chat_answer_follows_constraint(talking: Any) -> None:
    conversation = Conversation(talking, "", ChatSettings(max_tokens=60, seed=5), constraint=talking.json_schema(SCHEMA))
    for ask in (lambda: conversation.ask("Who?"), lambda: conversation.ask("And?"), conversation.regenerate):
        value = json.loads("".join([event.text for event in ask() if isinstance(event, Step)]))
        assert set(value) == {"a", "b"}
    whole = talking.answer([{"role": "user", "content": "Who?"}], 60, Sampling(0), constraint=talking.regex("(yes|no)[.!]"))
    assert whole.text in ("yes.", "no.", "yes!", "no!") and whole.statistics.stop_reason == "eos"
