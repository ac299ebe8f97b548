"""Thoughts in the command without a name: apart from the answer in the panel, as plain text and in JSON."""

import io
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec import Prompt, Sampling, SpeculativeDecoder, Step
from specdec.cli.generate import GenerationRunner
from specdec.events import Statistics
from specdec.ui.panel import LivePanel
from specdec.ui.plain_views import ModelLabels, PlainView, sanitize
from specdec.ui.terminal_window import Window
from tests.conftest import Pair
from tests.tools.model_folders import make_chat_folder
from tests.tools.thoughts import SOURCES, split_steps

PROMPT = "Is it a robin? "


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeDecoder:
    path = make_chat_folder(tmp_path_factory.mktemp("generate") / "thinker", SOURCES["Qwen3"][0])
    return SpeculativeDecoder(path, None, n_threads=1)


@pytest.fixture
def make_runner(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a runner whose model generates the given text, and the calls of the decoder."""

    def make(text: str, **options: Any) -> tuple[GenerationRunner, list[Any]]:
        events, calls = [Prompt([1], 0.0, PROMPT), *split_steps(text, 3, "eos", 0.5)], list[Any]()
        monkeypatch.setattr(decoder, "read_and_stream", lambda *given, **_: calls.append(given) or iter(events))
        settings = {"stop": [], "as_json": False, "plain": True, "pace": 0.0, "stats": False, **options}
        request = SimpleNamespace(**settings, get_settings=lambda models: {})
        resolved = SimpleNamespace(labels=ModelLabels("a"))
        models = SimpleNamespace(decoder=decoder, request=resolved, load_seconds=0.0, warmup_seconds=0.0, metadata={})
        return GenerationRunner(cast(Any, request), cast(Any, models), [1], 99, None), calls

    return make


TEXTS = [("<think>\nHm, hm.\n</think>\n\nYes.", "Hm, hm.", "Yes."), ("Yes.", "", "Yes."), ("<think>\nHm", "Hm", "")]


@pytest.mark.parametrize(("text", "thought", "answer"), TEXTS)
def test_plain_text_is_the_answer_and_the_thought_goes_to_stderr(
    make_runner: Any, text: str, thought: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, calls = make_runner(text)
    runner.generate(Sampling())
    captured = capsys.readouterr()
    assert captured.out == f"{PROMPT}{answer}\n"
    assert captured.err.startswith(f"{thought}\nthought for ") == bool(thought)
    assert calls[0][-1].start == "<think>", "stop strings are searched in the answer alone"


@pytest.mark.parametrize(("text", "thought", "answer"), TEXTS)
def test_json_output_has_the_thought_in_a_field(
    make_runner: Any, text: str, thought: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runner(text, as_json=True)[0].generate(Sampling())
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == PROMPT + answer and result.get("reasoning_content", "") == thought
    assert len(result["tokens"]) == -(-len(text) // 3)


def test_the_panel_folds_the_thought(make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    runner, _ = make_runner(TEXTS[0][0], plain=False)
    window = Window(Console(file=out, force_terminal=True, width=60, height=30))
    panel = LivePanel(window, Statistics(), 99, ModelLabels("a"))
    monkeypatch.setattr(GenerationRunner, "make_view", lambda self, statistics: panel)
    runner.generate(Sampling())
    rows = [row.strip() for row in sanitize(out.getvalue()).split("\n")]
    assert rows[-5:-1] == [PROMPT.strip(), "thought for 3.0 s, 2 tokens", "", "Yes."]


def test_a_terminal_gets_the_thought_in_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    with PlainView(out, out) as view:
        for event in [Prompt([1], 0.0, PROMPT), *make_thought_steps("Hm\x1b[2J, hm.", "Yes.")]:
            view.show(event)
    assert out.getvalue() == f"{PROMPT}\nHm, hm.\nthought for 1.0 s, 2 tokens\nYes.\n"


def make_thought_steps(thought: str, answer: str) -> list[Step]:
    from specdec.events import ThoughtStep

    fields = {"n_thought_tokens": 2, "thought_seconds": 1.0}
    begin, end = thought[:4], thought[4:]
    return [
        ThoughtStep([1], [], 0, 0.5, 0.0, pieces=[""], thought_pieces=[begin], **fields),
        ThoughtStep([1], [], 0, 0.5, 0.0, pieces=[answer], thought_pieces=[end], is_thought_end=True, **fields),
    ]


def test_models_that_do_not_think_have_no_marks(pair: Pair, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SpeculativeDecoder(pair.target, None).find_reasoning_marks([1]) is None
    assert decoder.find_reasoning_marks([1]) is not None
    monkeypatch.setattr(decoder.chat_template, "source", SOURCES["no thoughts"][0])
    assert decoder.find_reasoning_marks([1]) is None
