"""Calls of tools whose form is forced: each is one of the tools', by its schema, whatever the model would write."""

import json
import re
from types import SimpleNamespace

import pytest

from specdec import SpeculativeDecoder
from specdec.engine.scheduler import Engine
from specdec.loaders import optional_dependencies
from specdec.server.app import app_of
from specdec.server.auth import Guard
from specdec.server.openai_requests import Model
from specdec.server.tool_parsers.formats import WAYS as ALL
from specdec.server.tool_parsers.formats import way_of
from specdec.server.tool_parsers.grammar import grammar_of_calls
from tests.server.test_openai_api import CALLING, CHAT, TALK, ask, decoder, engine, service_of  # noqa: F401
from tests.test_end_to_end import folder
from tests.tools.hf_folders import FIXTURES

pytestmark = pytest.mark.skipif(not optional_dependencies.has(optional_dependencies.GUIDANCE), reason="needs llguidance")
CITY = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"City": {"type": "string", "enum": ["Oslo", "Rom"]}},
}  # fmt: skip
WEATHER = {"name": "get.weather-1", "description": 'of "a city"', "parameters": CITY}
TIME = {"name": "time"}
WAYS = {
    f"{way.name} {i}": "{% if tools %}{% set signs = " + json.dumps(way.signs) + " %}{% endif %}" for i, way in enumerate(ALL)
}


def tools_of(*functions, **more):
    return [{"type": "function", "function": function | more} for function in functions]


WRONG = {"type": "object", "properties": {"x": {"type": "string", "format": "zork"}}, "required": ["x"]}
MARKS = sorted({name for way in ALL for name in way.shown})


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A model whose tokenizer has the marks of all ways as special tokens."""
    path = folder(tmp_path_factory.mktemp("forcing") / "talker", positions=320, padding=40)
    holds = json.loads((path / "tokenizer.json").read_text())
    of = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    holds["added_tokens"] += [{"id": 400 + i, "content": name, **of} for i, name in enumerate(MARKS)]
    (path / "tokenizer.json").write_text(json.dumps(holds))
    (path / "chat_template.jinja").write_text(CALLING + (FIXTURES / "chat" / "smollm2.jinja").read_text())
    (path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    decoder = SpeculativeDecoder(path, "ngram", n_threads=1, gamma=4)
    engine = Engine(decoder, 4, 32, 10**8)
    yield decoder, engine
    engine.close(0.0)


# of harmony's without marks a random model ends no thought
@pytest.fixture(params=[(way, marks) for way in WAYS for marks in (False, True) if marks or "harmony" not in way], ids=str)
def talker(request, decoder, engine, marked, monkeypatch):
    way, has_marks = request.param
    decoder, engine = marked if has_marks else (decoder, engine)
    source = decoder.chat_template.source.removeprefix(CALLING)
    monkeypatch.setattr(decoder.chat_template, "source", WAYS[way] + source)
    service = service_of(Model("talker", decoder, decoder.chat_template), engine)
    app = Guard(app_of(service), (), {"localhost"}, print)
    app.is_harmony = "harmony" in way
    return app


def sound(call):
    """Whether a call is one of the tools', with arguments by its schema."""
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "time":
        return arguments == {}
    assert call["function"]["name"] == "get.weather-1"
    return arguments["city"] in ("Oslo", "Rom") and 1 <= arguments["days"] <= 9 and len(arguments) == 2


def asked(app, seed=1, **more):
    body = {"messages": TALK, "tools": tools_of(WEATHER, TIME), "max_tokens": 120, "temperature": 1, "seed": seed} | more
    if app.is_harmony:
        body["logit_bias"] = {str(400 + MARKS.index("<|end|>")): 50}
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


def test_several_calls_are_each_whole(talker, request):
    """A text is cut by its length in one of them, or not at all; all that are whole are sound."""
    n_calls = []
    for seed in range(12):
        (choice,) = asked(talker, seed, tool_choice="required", max_tokens=200, temperature=5).json["choices"]
        calls = choice["message"]["tool_calls"]
        whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        assert all(map(sound, whole))
        n_calls.append(len(calls))
    name = request.node.callspec.params["talker"][0].split()[0]
    assert max(n_calls) > 1 if name not in ("alone", "harmony") else set(n_calls) == {1}


def test_a_call_that_is_cut_says_so_and_is_not_dropped(talker):
    for most in (1, 2, 5, 9, 14, 20, 27, 35, 45, 60, 80, 110, 140):
        (choice,) = asked(talker, tool_choice="required", max_tokens=most, parallel_tool_calls=False).json["choices"]
        if choice["finish_reason"] == "tool_calls":
            return
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        assert talker.is_harmony or message["content"] or message.get("tool_calls") or message.get("reasoning_content")
    pytest.fail("no call was whole after 140 tokens")


@pytest.mark.parametrize("n_texts", [4, pytest.param(12, marks=pytest.mark.campaign)])
def test_what_is_strict_is_forced_from_the_marker_on(talker, n_texts):
    """A text, or a sound call; what stands before one is text."""
    finishes = set()
    for seed in range(n_texts):
        (choice,) = asked(talker, seed, tools=tools_of(WEATHER, TIME, strict=True), max_tokens=60).json["choices"]
        finishes.add(choice["finish_reason"])
        calls = choice["message"].get("tool_calls", [])
        assert all(map(sound, calls if choice["finish_reason"] != "length" else calls[:-1]))
        assert "<tool_call>" not in (choice["message"]["content"] or "") or choice["finish_reason"] == "length"
    assert finishes


TEXTS = {
    "tags": {
        "hi": True, "": True, 'hi <tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>': True,
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>': False, "<tool_call>\n{": True, "<tool_call> x": False,
        'a<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "time"': True,
        '<tool_call>\n{"name": "get.weather-1", "arguments": {"city": "Paris"': False,
    },
    "alone": {"hi {": True, '{"name": "time", "parameters": {}}': True, "{x": False, '{"name": "other"': False},
    "xml": {
        "<tool_call>\n<function=time>\n</function>\n</tool_call>": True, "a <tool_call>\n<function=rain>": False,
        "<tool_call>\n<function=get.weather-1>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>": True,
        "<tool_call>\n<function=get.weather-1>\n<parameter=city>\nParis": False, "<function=time>": True,
        "<tool_call>\n<function=get.weather-1>\n<parameter=days>": False,
    },
    "listed": {
        "a [TOOL_CALLS": True, '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]': True,
        "[TOOL_CALLS][]": False, "[TOOL_CALLS]time": False,
    },
    "named": {"[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]get.weather-1[ARGS]{": True, "[TOOL_CALLS]rain": False, "[": True},
    "harmony": {
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json"
        "<|message|>{}": True,
        "<|channel|>final<|message|>Hi.": True, "<|channel|>commentary to=functions.rain": False,
    },
    "gemma": {
        "<|tool_call>call:get.weather": False, "Hm <|tool_call>call:time{}<tool_call|>": True, "<|tool_call>call:rain": False,
    },
    "python": {
        "<|tool_call_start|>[time(), time()]<|tool_call_end|>": True, "<|tool_call_start|>[time(x=1)": False, "[time()]": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_the_grammar_of_what_is_strict_is_that_of_the_parser(name, decoder):
    way = next(way for way in ALL if way.name == name)
    tools = [WEATHER, TIME] if name not in ("gemma", "python") else [TIME]
    grammar = grammar_of_calls(decoder.tokenizer, way, tools, False, False)
    for text, may_be in TEXTS[name].items():
        tokens = decoder.tokenizer.encode(text) if text else []
        walk = grammar.built().begin([1])
        assert (walk.n_allowed(tokens) == len(tokens)) == may_be, text


def tool_of(schema, **more):
    return {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"], **more}}


HELD = {
    "gemma": ("<|tool_call>call:f{x:", [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"null}": True, '<|"|>a': True, "3": False}),
        ({"type": ["integer", "string"]}, {"3}": True, '<|"|>a<|"|>}': True, "true": False}),
        ({"const": 7}, {"7}": True, "8": False}), ({"enum": ["a", None]}, {'<|"|>a<|"|>}': True, "null}": True, '<|"|>b': False}),
        ({"type": "array"}, {"[1]}": True, "{": False, "1": False}), ({"type": "object"}, {"{a:1}}": True, "[": False}),
    ]),
    "xml": ("<tool_call>\n<function=f>\n<parameter=x>\n", [
        ({"type": "string"}, {"a\n</parameter>\n</function>": True, "a</parameter>\n": True, "a</parameter>b": False}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_values_that_are_no_json_are_held_to_their_schemas(name, decoder):
    way, (begin, cases) = next(way for way in ALL if way.name == name), HELD[name]
    for schema, texts in cases:
        grammar = grammar_of_calls(decoder.tokenizer, way, [tool_of(schema)], True, True)
        for text, may_be in texts.items():
            tokens = decoder.tokenizer.encode(begin + text)
            assert (grammar.built().begin([1]).n_allowed(tokens) == len(tokens)) == may_be, (schema, text)


LIST = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(("name", "schema", "more", "message"), [
    ("gemma", LIST | {"maxItems": 3}, {}, "maxItems of a list"), ("gemma", LIST | {"minItems": 1}, {}, "minItems of a list"),
    ("gemma", {"type": "object", "minProperties": 1}, {}, "minProperties of an object"),
    ("gemma", {"oneOf": [LIST]}, {}, "oneOf of a value"), ("gemma", {"enum": ["a<tool_call|>"]}, {}, "no text"),
    ("gemma", {"enum": ['<|"|>']}, {}, "no text"), ("xml", {"enum": ["a</parameter>"]}, {}, "no text"),
    ("xml", {"type": "string", "pattern": "a"}, {}, "pattern of a string"), ("xml", LIST, {"minProperties": 1}, "an object"),
    ("python", LIST, {"anyOf": []}, "anyOf of an object"),
])  # fmt: skip
def test_what_is_strict_and_cannot_be_held_is_refused(decoder, name, schema, more, message):
    way = next(way for way in ALL if way.name == name)
    with pytest.raises(ValueError, match=f"the tool f: .*{message}"):
        grammar_of_calls(decoder.tokenizer, way, [tool_of(schema, **more)], True, True)


def test_what_cannot_be_forced_is_refused_by_name(talker):
    for more, param in (
        ({"tool_choice": "required", "tools": []}, "tool_choice"), ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"), ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": "required", "tools": tools_of({"name": "a", "parameters": {"type": "nonsense"}})}, "tools"),
        ({"tool_choice": "required", "tools": tools_of({"name": "a", "parameters": {"pattern": "a{99999}{99999}"}})}, "tools"),
        ({"tools": tools_of({"name": "a", "parameters": {"type": "array"}})}, "tools"),
        ({"tools": tools_of({"name": "a", "parameters": WRONG}, strict=True)}, "tools"),
        ({"tools": tools_of(TIME, strict=1)}, "tools"),
    ):  # fmt: skip
        reply = ask(talker, CHAT, {"messages": TALK, "tools": tools_of(WEATHER)} | more)
        assert (reply.status, reply.error["param"]) == (400, param), (more, reply.body)
        if (tool := more.get("tools")) and tool[0]["function"]["name"] == "a":
            assert "the tool a: " in reply.error["message"], reply.body


def test_ways_that_nobody_knows_are_not_forced(decoder, engine):
    assert way_of("tools") is None
    template = SimpleNamespace(source="{{ tools }}", takes_tools=True, place="", asks_for=lambda name: False)
    service = service_of(Model("talker", decoder, template), engine)
    app = Guard(app_of(service), (), {"localhost"}, lambda line: None)
    for more, param in (
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": tools_of(TIME, strict=True)}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):  # fmt: skip
        reply = ask(app, CHAT, {"messages": TALK, "tools": tools_of(TIME)} | more)
        assert reply.status == 400 and reply.error["param"] == param and re.search("is known here", reply.error["message"])


def test_an_answer_by_a_schema_or_a_call(talker):
    """Both at once: whatever comes is one of them."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"const": 7}, "maxItems": 3}}}
    kinds = set()
    for seed in range(6):
        (choice,) = asked(talker, seed, response_format=form).json["choices"]
        message = choice["message"]
        if calls := message.get("tool_calls"):
            assert all(map(sound, calls if choice["finish_reason"] != "length" else calls[:-1]))
        elif choice["finish_reason"] == "stop":
            assert json.loads(message["content"]) in ([], [7], [7, 7], [7, 7, 7])
        kinds.add(bool(calls))
    assert kinds
