"""Tools for models whose chat template takes none: described in the system message, called with JSON."""

import json
from typing import Any

import pytest

from specdec import Prompt
from specdec.server import field_validation
from specdec.server.tool_parsers import find_tool_parser
from specdec.server.tool_parsers.generic import GenericParser, describe_tools
from tests.fakes.asgi import send_request
from tests.fakes.server import CHAT, CONVERSATION, FakeScheduler, step
from tests.tools.tool_calls import parse, simplify

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}
FUNCTIONS = {"weather": CITY, "clock": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in FUNCTIONS.items()]
CALL_TEXT = '{"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]}'
OSLO = ("weather", {"city": "Oslo"})
TWO_CALLS = '{"tool_calls":[ {"name":"weather","arguments":{"city":"Oslo"}} , {"name": "get.time-1", "arguments": {}}\n] } '


@pytest.fixture
def prompts(prompts: list[Any], decoder: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Use a template without tools, and return the list of rendered chats."""
    monkeypatch.setattr(decoder.chat_template, "source", "{{ messages[-1].content }}")  # a short prompt
    monkeypatch.setattr(field_validation, "_logged", set())
    return prompts


@pytest.mark.parametrize("size", [1, 3, 500])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL_TEXT, [OSLO]),
        (TWO_CALLS, [OSLO, ("get.time-1", {})]),
        (f"Let me see.\n\n{CALL_TEXT}", ["Let me see.", OSLO]),
        (f"{CALL_TEXT} Done.", [OSLO, " Done."]),
        (CALL_TEXT.replace("weather", "rain"), [CALL_TEXT.replace("weather", "rain")]),
        (CALL_TEXT[:56], [("weather", '{"city"')]),
        ('{"tool_calls": 1}', ['{"tool_calls": 1}']),
        ('{"tool_calls"', ['{"tool_calls"']),
        ('{"tool_calls": [', ['{"tool_calls": [']),
        ('{"tool": {}} {', ['{"tool": {}} {']),
    ],
)
def test_calls_are_found_and_other_text_stays_text(text: str, expected: list[Any], size: int) -> None:
    assert simplify(parse(GenericParser, text, size)) == expected


def test_tools_calls_and_results_are_described_in_messages(app: Any, prompts: list[Any], caplog: Any) -> None:
    call = {"id": "c", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *CONVERSATION,
        {"role": "assistant", "content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    response = send_request(app, CHAT, {"messages": messages, "tools": TOOLS, "max_tokens": 1})
    assert response.status == 200, response.body
    (rendered, tools, _), *_ = prompts
    assert tools is None and [each["role"] for each in rendered] == ["system", "user", "assistant", "user"]
    assert rendered[0]["content"].startswith("Be brief.\n\nYou can call")
    assert all(json.dumps(tool["function"]) in rendered[0]["content"] for tool in TOOLS)
    assert rendered[2] == {"role": "assistant", "content": f"Hm.\n\n{CALL_TEXT}"}
    assert json.loads(rendered[3]["content"]) == {"tool_result": {"name": "weather", "content": "rain"}}
    send_request(app, CHAT, {"messages": CONVERSATION, "tools": TOOLS, "max_tokens": 1})
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == ["the chat template"], "logged once"
    assert describe_tools(CONVERSATION, []) == CONVERSATION


def test_tools_of_an_unknown_format_are_described_too(
    app: Any, decoder: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Calls of Seed-OSS, Granite 3.3 or LFM2.5-Instruct would stay text, without a word."""
    monkeypatch.setattr(decoder.chat_template, "source", "{% if tools %}<seed:tool_call>{% endif %}{{ messages[-1].content }}")
    assert find_tool_parser(decoder.chat_template.source) is None
    assert send_request(app, CHAT, {"messages": CONVERSATION, "tools": TOOLS, "max_tokens": 1}).status == 200
    rendered, tools, _ = prompts[-1]
    assert tools is None and rendered[0]["content"].startswith("You can call")
    assert "unknown format" in caplog.records[-1].getMessage()
    assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1}).status == 200 and prompts[-1][0] == CONVERSATION


def test_a_template_without_a_system_role_gets_the_tools_in_the_first_message(
    app: Any, decoder: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(decoder.chat_template, "source", source)
    send_request(app, CHAT, {"messages": CONVERSATION, "tools": TOOLS, "max_tokens": 1})
    (message,) = prompts[-1][0]
    assert message["role"] == "user" and "weather" in message["content"] and message["content"].endswith("robin go?")


def test_calls_are_returned_whole_and_in_streams(make_test_app: Any, prompts: list[Any]) -> None:
    steps = [step(CALL_TEXT[:20]), step(CALL_TEXT[20:50]), step(CALL_TEXT[50:], "eos")]
    body = {"messages": CONVERSATION, "tools": TOOLS[:1]}
    app = make_test_app(FakeScheduler(Prompt([1], 0.0), *steps))
    (choice,) = send_request(app, CHAT, body).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == OSLO
    events = send_request(app, CHAT, {**body, "stream": True}).events
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(delta["function"].get("arguments", "") for delta in deltas) == call["function"]["arguments"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}, "auto"])
def test_the_grammar_makes_calls_valid(app: Any, decoder: Any, prompts: list[Any], choice: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra [shape] is not installed")
    for seed in range(4):
        body = {"messages": CONVERSATION, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        bias = {} if choice != "auto" else {"logit_bias": {str(decoder.tokenizer.encode("{")[0]): 20}}
        response = send_request(app, CHAT, {**body, **bias, "max_tokens": 120, "temperature": 1})
        assert response.status == 200, response.body
        (answer,) = response.json["choices"]
        calls = answer["message"].get("tool_calls", [])
        assert len(calls) == 1 or choice == "auto"
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {} if call["function"]["name"] == "clock" else arguments["city"] in ("Oslo", "Rome")
            assert call["function"]["name"] == "weather" or isinstance(choice, str)


def test_the_grammar_of_auto_begins_at_the_first_mark(decoder: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra [shape] is not installed")
    functions = [tool["function"] | {"strict": False} for tool in TOOLS]
    for is_required in (False, True):
        constraint = GenericParser.make_grammar(decoder.tokenizer, functions, is_required, True).get_constraint()
        for text, is_allowed in (
            (CALL_TEXT, True),
            (f"Well. {CALL_TEXT}", not is_required),
            ('{"tool": 1} and {"a"', not is_required),
            (CALL_TEXT.replace("weather", "rain"), False),
            (f"{CALL_TEXT} more", False),
            ('Well. {"tool_calls" and', False),
        ):
            tokens = decoder.tokenizer.encode(text)
            assert (constraint.begin([1]).count_allowed(tokens) == len(tokens)) == is_allowed, (text, is_required)
