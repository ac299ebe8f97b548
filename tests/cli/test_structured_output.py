"""--schema and --regex of the command line, a talk whose answers have a shape, and what is wrong with either, end to end."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from specdec import Step
from specdec.loaders import optional_dependencies
from specdec.sampling import Sampling
from specdec.text.conversation import Conversation, Settings
from tests.cli.test_cli import Run, assert_refused, from_json, run
from tests.conftest import Pair
from tests.fakes.terminal import PROMPT, with_pair
from tests.test_public_api import talking

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
@pytest.mark.parametrize("draft", [[], ["-d", "ngram"], ["--tree", "on"], ["--verify", "block"]], ids=str)
def test_a_text_of_a_schema_is_json_by_it(run: Run, pair: Pair, schema: Path, draft: list[str]) -> None:
    result = from_json(run(*with_pair(pair, "--schema", schema, "--max-tokens", 60, "--json", *draft)))
    said = json.loads(result["text"].removeprefix(PROMPT))
    assert [*said] == ["a", "b"] and 0 <= said["a"] <= 99 and said["b"] in ("x", "y")
    assert result["settings"]["schema"] == str(schema) and result["stop_reason"] in ("bos", "eos")
    assert result["n_accepted"] > 5


@needs_guidance
def test_any_object_and_what_a_regex_matches(run: Run, pair: Pair) -> None:
    result = from_json(run(*with_pair(pair, "--schema", "json", "--max-tokens", 9, "--json")))
    assert result["text"].removeprefix(PROMPT).startswith("{")
    result = from_json(run(*with_pair(pair, "--regex", " né{2}!", "--max-tokens", 20, "--json")))
    assert result["text"].removeprefix(PROMPT) == " néé!" and result["settings"]["regex"] == " né{2}!"
    code, out, _ = run(*with_pair(pair, "--regex", "(a|b){3}", "--plain"))
    assert code == 0 and len(out.removeprefix(PROMPT)) == 4


@needs_guidance
def test_what_is_wrong_with_a_shape_is_a_line(run: Run, pair: Pair, schema: Path, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        return assert_refused(run(*with_pair(pair, *words)), "")

    assert "--schema and --regex are two shapes of a text" in refused("--schema", schema, "--regex", "a")
    assert "the regex cannot be used: unclosed group" in refused("--regex", "(a")
    assert "cannot read" in refused("--schema", tmp_path / "none.json")
    assert "--schema takes the name of a file; write the schema to one" in refused("--schema", '{"type": "object"}')
    for content, words in {
        "[]": "is a JSON list; expected an object", "{": "is no JSON", "[" * 1_000_000: "nested beyond all bounds",
        '{"a": 1, "a": 2}': "stands twice", '{"not": {}}': "uses not, which is not supported", "\udcff": "is no UTF-8 at byte 0",
    }.items():  # fmt: skip
        schema.write_bytes(content.encode(errors="surrogateescape"))
        assert words in refused("--schema", schema)


def test_a_missing_package_is_told_before_a_model_is_looked_for(run: Run, schema: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_dependencies, "has", lambda package: package != optional_dependencies.GUIDANCE)
    for shape in (["--schema", schema], ["--regex", "a"]):
        line = assert_refused(run("-m", "nowhere.bin", *shape, "x"), "")
        assert line.endswith("a package is missing: llguidance, to write in a shape; pip install llguidance\n")


@needs_guidance
def test_each_answer_of_a_talk_has_its_shape(talking: Any) -> None:
    conversation = Conversation(talking, "", Settings(max_tokens=60, seed=5), shape=talking.json_schema(SCHEMA))
    for ask in (lambda: conversation.ask("Who?"), lambda: conversation.ask("And?"), conversation.regenerate):
        said = json.loads("".join([event.text for event in ask() if isinstance(event, Step)]))
        assert set(said) == {"a", "b"}
    whole = talking.answer([{"role": "user", "content": "Who?"}], 60, Sampling(0), shape=talking.regex("(yes|no)[.!]"))
    assert whole.text in ("yes.", "no.", "yes!", "no!") and whole.statistics.stop_reason == "eos"
