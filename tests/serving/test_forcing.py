"""Calls of tools whose form is forced: each is one of the tools', by its schema, whatever the model would write."""

import json
import re
from types import SimpleNamespace

import pytest

from specdec.readers import extras
from specdec.serving.app import Service, app_of
from specdec.serving.asked import Model
from specdec.serving.calls import calls_of
from specdec.serving.forcing import can_force, grammar_of_calls
from specdec.serving.guard import Guard
from tests.serving.test_api import CALLING, CHAT, TALK, ask, decoder, engine, serving  # noqa: F401

pytestmark = pytest.mark.skipif(not extras.has(extras.GUIDANCE), reason="needs llguidance")
CITY = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"City": {"type": "string", "enum": ["Oslo", "Rom"]}},
}  # fmt: skip
WEATHER = {"name": "get.weather-1", "description": 'of "a city"', "parameters": CITY}
TIME = {"name": "time"}
WAYS = {"in tags": CALLING, "alone": "{% if tools %}{# ipython #}{% endif %}"}


def tools_of(*functions, **more):
    return [{"type": "function", "function": function | more} for function in functions]


@pytest.fixture(params=WAYS)
def talker(request, decoder, serving, monkeypatch):  # noqa: F811
    source = decoder.chat_template.source.removeprefix(CALLING)
    monkeypatch.setattr(decoder.chat_template, "source", WAYS[request.param] + source)
    return serving()


def sound(call):
    """Whether a call is one of the tools', with arguments by its schema."""
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "time":
        return arguments == {}
    assert call["function"]["name"] == "get.weather-1"
    return arguments["city"] in ("Oslo", "Rom") and 1 <= arguments["days"] <= 9 and len(arguments) == 2


def asked(app, seed=1, **more):
    body = {"messages": TALK, "tools": tools_of(WEATHER, TIME), "max_tokens": 120, "temperature": 1, "seed": seed} | more
    reply = ask(app, CHAT, body)
    assert reply.status == 200, reply.body
    return reply


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_tool_that_is_required_is_called(talker, is_strict):
    for seed in range(6):
        tools = tools_of(WEATHER, TIME, strict=is_strict)
        (choice,) = asked(talker, seed, tool_choice="required", tools=tools, parallel_tool_calls=False).json["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert sound(call)


@pytest.mark.parametrize("name", ["get.weather-1", "time"])
def test_a_tool_that_is_named_is_called_whole_and_in_a_stream(talker, name):
    choice = {"type": "function", "function": {"name": name}}
    (whole,) = asked(talker, tool_choice=choice, parallel_tool_calls=False).json["choices"]
    (call,) = whole["message"]["tool_calls"]
    assert sound(call) and call["function"]["name"] == name
    events = asked(talker, tool_choice=choice, parallel_tool_calls=False, stream=True).events
    pieces = [each for event in events for each in event["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(each["function"]["arguments"] for each in pieces) == call["function"]["arguments"]
    assert [each["function"]["name"] for each in pieces if "name" in each["function"]] == [name]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_several_calls_are_each_whole(talker, decoder):  # noqa: F811
    """A text is cut by its length in one of them, or not at all; all that are whole are sound."""
    n_calls = []
    for seed in range(5):
        (choice,) = asked(talker, seed, tool_choice="required", max_tokens=200).json["choices"]
        calls = choice["message"]["tool_calls"]
        whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        assert all(map(sound, whole))
        n_calls.append(len(calls))
    if "<tool_call>" in decoder.chat_template.source:
        assert max(n_calls) > 1
    else:
        assert set(n_calls) == {1}


def test_a_call_that_is_cut_says_so_and_is_not_dropped(talker):
    for most in (1, 2, 5, 9, 14, 20, 27, 35, 45, 60, 80, 110, 140):
        (choice,) = asked(talker, tool_choice="required", max_tokens=most, parallel_tool_calls=False).json["choices"]
        if choice["finish_reason"] == "tool_calls":
            return
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        assert message["content"] or message["tool_calls"]
    pytest.fail("no call was whole after 140 tokens")


def test_what_is_strict_is_forced_from_the_marker_on(talker):
    """A text, or a sound call; what stands before one is text."""
    finishes = set()
    for seed in range(12):
        (choice,) = asked(talker, seed, tools=tools_of(WEATHER, TIME, strict=True), max_tokens=60).json["choices"]
        finishes.add(choice["finish_reason"])
        calls = choice["message"].get("tool_calls", [])
        assert all(map(sound, calls if choice["finish_reason"] != "length" else calls[:-1]))
        assert "<tool_call>" not in (choice["message"]["content"] or "") or choice["finish_reason"] == "length"
    assert finishes


TEXTS = {
    "in tags": {
        "hi": True, "": True, 'hi <tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>': True,
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>': False, "<tool_call>\n{": True, "<tool_call> x": False,
        'a<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "time"': True,
        '<tool_call>\n{"name": "get.weather-1", "arguments": {"city": "Paris"': False,
    },
    "alone": {"hi {": True, '{"name": "time", "parameters": {}}': True, "{x": False, '{"name": "other"': False},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_grammar_of_what_is_strict_is_that_of_the_parser(way, decoder):  # noqa: F811
    grammar = grammar_of_calls(decoder.tokenizer, WAYS[way], [WEATHER, TIME], False, False)
    for text, may_be in TEXTS[way].items():
        tokens = decoder.tokenizer.encode(text) if text else []
        walk = grammar.built().begin([1])
        assert (walk.n_allowed(tokens) == len(tokens)) == may_be, text
    assert calls_of(WAYS[way], {"time"})


def test_what_cannot_be_forced_is_refused_by_name(talker):
    for more, param in (
        ({"tool_choice": "required", "tools": []}, "tool_choice"), ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"), ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": "required", "tools": tools_of({"name": "a", "parameters": {"type": "nonsense"}})}, "tools"),
        ({"tool_choice": "required", "tools": tools_of({"name": "a", "parameters": {"pattern": "a{99999}{99999}"}})}, "tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": tools_of(TIME, strict=1)}, "tools"),
    ):  # fmt: skip
        reply = ask(talker, CHAT, {"messages": TALK, "tools": tools_of(WEATHER)} | more)
        assert (reply.status, reply.error["param"]) == (400, param), (more, reply.body)


def test_ways_that_are_no_json_are_not_forced(decoder, engine, monkeypatch):  # noqa: F811
    assert not can_force("<tool_call><function=name>") and not can_force("tools") and can_force("<tool_call>")
    template = SimpleNamespace(source="{{ tools }}", takes_tools=True, place="", asks_for=lambda name: False)
    service = Service(Model("talker", decoder, template), engine, "print", 1)
    app = Guard(app_of(service), (), {"localhost"}, lambda line: None)
    reply = ask(app, CHAT, {"messages": TALK, "tools": tools_of(TIME), "tool_choice": "required"})
    assert reply.status == 400 and re.search("cannot be forced", reply.error["message"])
