"""Thoughts in the chat: apart from the answer in the history, on the terminal and in the panel, and switched on and off."""

import io
import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions

pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec import Prompt, Step
from specdec.events import Proposal, Statistics, ThoughtStep
from specdec.text.conversation import Conversation
from specdec.text.detokenizer import EventDetokenizer
from specdec.text.reasoning_constraint import ReasoningConstraint
from specdec.ui.chat import MAX_THOUGHT_ROWS, AnswerView, ChatSession
from specdec.ui.panel import LivePanel
from specdec.ui.plain_views import ModelLabels, sanitize
from specdec.ui.terminal_window import STYLES, Window
from tests.fakes.terminal import Screen
from tests.tools.conversations import (
    QUESTION,
    make_conversation,  # noqa: F401  (a fixture)
    model,  # noqa: F401  (a fixture)
)
from tests.tools.thoughts import SOURCES, split_steps


@pytest.fixture
def thinker(make_conversation: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Conversation]:
    """Return a function that makes a conversation with a model in the style of Qwen3 that generates the given text."""

    def make(text: str, size: int = 3, stop_reason: str = "eos") -> Conversation:
        conversation = make_conversation()
        decoder = conversation.decoder
        monkeypatch.setattr(decoder.chat_template, "source", SOURCES["Qwen3"][0])
        events = [Prompt([1], 0.0), *split_steps(text, size, stop_reason, 0.5)]
        monkeypatch.setattr(decoder, "read_and_stream", lambda *_, **__: iter(events))
        return conversation

    return make


@pytest.mark.parametrize("size", [1, 4, 99])
def test_a_thought_is_kept_apart_from_the_answer_and_reaches_the_template(
    thinker: Callable[..., Conversation], size: int, tmp_path: Path
) -> None:
    conversation = thinker("<think>\nHm, a robin.\n</think>\n\nYes.", size)
    shown = [event for event in conversation.ask(QUESTION) if isinstance(event, Step)]
    assert "".join(step.text for step in shown) == "Yes."
    thought = "".join(piece for step in shown if isinstance(step, ThoughtStep) for piece in step.thought_pieces)
    answer = conversation.messages[-1]
    assert (answer["content"], answer["reasoning_content"]) == ("Yes.", "Hm, a robin.") and thought == "Hm, a robin."
    assert [step.is_thought_end for step in shown if isinstance(step, ThoughtStep)].count(True) == 1
    conversation.messages = [*conversation.messages, {"role": "user", "content": "Why?"}]
    rendered = conversation.decoder.chat_template.render(conversation.get_visible_messages())
    assert "<think>\nHm, a robin.\n</think>\n\nYes.<|im_end|>" in rendered
    conversation.messages = conversation.messages[:-1]
    conversation.save(tmp_path / "kept")
    saved = conversation.messages
    conversation.clear()
    conversation.load(tmp_path / "kept")
    assert conversation.messages == saved


def test_an_interrupted_thought_is_kept_without_an_answer(thinker: Callable[..., Conversation]) -> None:
    conversation = thinker("<think>\nHm, a robin.\n</think>\n\nYes.", 4)
    events = conversation.ask(QUESTION)
    for event in events:
        if isinstance(event, ThoughtStep) and event.n_thought_tokens == 2:
            break
    events.close()
    answer = conversation.messages[-1]
    assert answer["content"] == "" and "Hm, a robin.".startswith(answer["reasoning_content"]) and answer["reasoning_content"]


def show_answer(conversation: Conversation, width: int, styles: dict[str, str], screen: Screen) -> Iterator[None]:
    """Show an answer in a view whose output a screen shows; yields after each step."""
    out = io.StringIO()
    with AnswerView(out, lambda: width, styles) as view:
        for event in conversation.ask(QUESTION):
            view.show(event)
            screen.feed(out.getvalue().replace("\n", "\r\n"))
            out.seek(0)
            out.truncate()
            yield
    screen.feed(out.getvalue().replace("\n", "\r\n"))


def get_rows(screen: Screen) -> list[str]:
    return ["".join(row).rstrip() for row in screen.rows]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("<think>\nHm, hm.\n</think>\n\nYes.", ["thought for 9.0 s, 9 tokens", "Yes.", ""]),
        ("<think>\n\n</think>\n\nYes.", ["Yes.", ""]), ("Yes.", ["Yes.", ""]),
    ],
)  # fmt: skip
def test_a_thought_is_folded_on_a_terminal_and_left_out_elsewhere(
    thinker: Callable[..., Conversation], text: str, rows: list[str]
) -> None:
    for width, styles, expected in ((40, STYLES, rows), (40, {}, rows[-2:]), (0, {}, rows[-2:])):
        screen = Screen(40, 24)
        deque(show_answer(thinker(text, 1), width, styles, screen), 0)
        assert get_rows(screen) == expected and (2 in screen.styles) == (len(expected) == 3)


def test_the_last_rows_of_a_thought_are_shown_while_the_model_thinks(thinker: Callable[..., Conversation]) -> None:
    words = [f"word{i}" for i in range(60)]
    text = f"<think>\n{' '.join(words[:30])}\n\n{' '.join(words[30:])}\n</think>\n\nYes."
    for width, height, size in ((20, 24, 1), (20, 24, 7), (31, 8, 3), (9, 24, 2)):
        screen, shown = Screen(width, height), list[str]()
        for _ in show_answer(thinker(text, size), width, STYLES, screen):
            rows = get_rows(screen)
            shown.append("".join(rows).replace(" ", ""))
            assert len([row for row in rows if "word" in row]) <= MAX_THOUGHT_ROWS
        assert all(any(word in page for page in shown) for word in words[:-1])
        assert "".join(get_rows(screen)).replace(" ", "").endswith("tokensYes.") and "word" not in "".join(get_rows(screen))


def test_a_thought_that_is_interrupted_stays(thinker: Callable[..., Conversation]) -> None:
    screen = Screen(40, 24)
    steps = show_answer(thinker("<think>\nHm, a robin. Or not?\n</think>\n\nYes.", 4), 40, STYLES, screen)
    for _ in steps:
        if "robin" in get_rows(screen)[0]:
            break
    steps.close()  # type: ignore[attr-defined]
    assert get_rows(screen)[0].startswith("Hm, a robin")


def test_a_command_shows_the_thought_before_the_last_answer(
    thinker: Callable[..., Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    for text, shown in (("<think>\nHm,\x1b[2J hm.\n</think>\n\nYes.", "Hm, hm.\n"), ("Yes.", "")):
        conversation = thinker(text)
        chat = ChatSession(conversation, ModelLabels("a"), plain=True)
        chat.handle_input("/thought")
        assert "the last answer has no thought" in capsys.readouterr().err
        deque(conversation.ask(QUESTION), 0)
        chat.handle_input("/thought")
        captured = capsys.readouterr()
        assert captured.out == shown and ("has no thought" in captured.err) == (not shown)


def test_a_thought_is_folded_in_the_panel_and_a_key_opens_it(thinker: Callable[..., Conversation]) -> None:
    out = io.StringIO()
    window = Window(Console(file=out, force_terminal=True, width=60, height=30))
    panel, shown = LivePanel(window, Statistics(), 99, ModelLabels("a")), list[str]()

    def get_page() -> list[str]:
        return [row.strip() for row in sanitize(panel._final_page()).split("\n")][:-1]

    panel.show(Prompt([1], 0.0, "Is it a robin?"))
    for event in list(thinker("<think>\nHm, hm.\n</think>\n\nYes.", 1).ask(QUESTION))[1:]:
        panel.show(event)
        shown.append("\n".join(get_page()))
    assert any("Hm, hm." in page and "thought for" not in page for page in shown), "while the model thinks"
    folded = ["Is it a robin?", "thought for 9.0 s, 9 tokens", "", "Yes."]
    assert get_page() == folded
    for action, page in (("thought", [folded[0], "Hm, hm.", *folded[1:]]), ("thought", folded), ("explain", folded)):
        panel.handle_input(action)
        assert get_page() == page
    rows = ["".join(text for text, _ in row) for row in panel.render(ConsoleDimensions(100, 30))]
    assert any("t: the thought" in row for row in rows)


def test_thinking_is_switched_if_the_template_takes_it(
    thinker: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = thinker("Yes.")
    chat = ChatSession(conversation, ModelLabels("a"), plain=True)
    decoder, prompts = conversation.decoder, list[list[int]]()
    monkeypatch.setattr(decoder, "read_and_stream", lambda prompt, *_, **__: prompts.append(prompt) or iter([]))

    def encode() -> list[int]:
        assert [*conversation.ask(QUESTION)] == []
        return prompts[-1]

    default = encode()
    for command, notice, is_default in (
        ("/think", "as the chat template has it", True), ("/think off", "thinking: off", False),
        ("/think maybe", "/think takes on or off", False), ("/think on", "thinking: on", True),
    ):  # fmt: skip
        chat.handle_input(command)
        assert notice in capsys.readouterr().err and (encode() == default) == is_default
    decoder.chat_template.source = "{{ messages[-1].content }}"
    conversation.thinking = None
    chat.handle_input("/think off")
    assert "cannot switch thinking" in capsys.readouterr().err and conversation.thinking is None


def stream_with_text(tokenizer: Any, events: list[Any], *request: Any, **_: Any) -> Iterator[Any]:
    detokenizer = EventDetokenizer(tokenizer, (), request[-1].visible_tokens, include_draft_text=True)
    add_text = {Step: detokenizer.add_text, Proposal: detokenizer.add_draft_text, Prompt: detokenizer.add_prompt_text}
    return iter([add_text[type(event)](event) for event in events])


@pytest.mark.parametrize("size", [1, 5, 99])
def test_special_tokens_are_the_marks_of_a_thought(
    make_conversation: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Their names are not in the texts, also not after the thought and in drafts; Harmony's headers are not either."""
    for specials, source, before, between, after in (
        ({"[THINK]": 390, "[/THINK]": 391}, "[/THINK]", [390], [391], [391]),
        (
            {"<|channel|>": 390, "<|message|>": 391, "<|end|>": 392, "<|start|>": 393}, "<|channel|>",
            [390, "analysis", 391], [392, 393, "assistant", 390, "final", 391], [],
        ),
    ):  # fmt: skip
        conversation = make_conversation()
        decoder = conversation.decoder
        monkeypatch.setattr(decoder.chat_template, "source", f"{{{{ messages[-1].content }}}}{{# {source} #}}")
        monkeypatch.setattr(decoder.tokenizer, "specials", specials)
        parts = [*before, "Hm, a robin", *between, "Yes", *after]
        tokens = [token for part in parts for token in ([part] if isinstance(part, int) else decoder.encode(part))]
        steps = [Step(tokens[i : i + size], [], 0, 0.1, 0.0) for i in range(0, len(tokens), size)]

        events = [Prompt([1], 0.0), Proposal([390]), *steps, Step([], [390], 0, 0.0, 0.0, "eos")]
        stream = partial(stream_with_text, decoder.tokenizer, events)
        monkeypatch.setattr(decoder, "read_and_stream", stream)
        _, proposal, *shown = conversation.ask(QUESTION)
        answer, name = conversation.messages[-1], next(iter(specials))
        assert answer["reasoning_content"].strip() == "Hm, a robin"
        assert answer["content"].strip() == "Yes" + "[/THINK]" * bool(after)
        assert "".join(step.text for step in shown) == answer["content"]
        assert proposal.pieces == shown[-1].wrong == [name]


def test_a_constraint_holds_behind_the_thought(thinker: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="the extra [json] is not installed")
    conversation, shapes = thinker(""), list[Any]()
    decoder = conversation.decoder
    conversation.constraint = constraint = decoder.regex("70?")
    monkeypatch.setattr(decoder, "read_and_stream", lambda *_, constraint: shapes.append(constraint) or iter([]))
    for is_on in (True, False):
        conversation.set_thinking(is_on)
        assert [*conversation.ask(QUESTION)] == []
    wrapped, plain = shapes
    assert isinstance(wrapped, ReasoningConstraint) and wrapped.inner is constraint is plain


def test_json_output_has_the_thought_in_a_field(thinker: Callable[..., Conversation], capsys: pytest.CaptureFixture[str]) -> None:
    for text, thought, answer in (("<think>Hm</think>\n\nYes", "Hm", "Yes"), ("Yes", None, "Yes")):
        conversation = thinker(text)
        ChatSession(conversation, ModelLabels("a"), json_extra={}).show_answer(conversation.ask(QUESTION))
        result = json.loads(capsys.readouterr().out)
        assert (result["text"], result.get("reasoning_content")) == (answer, thought)
