"""Tool calls under a grammar: each call is valid for one of the tools, whatever the model would generate."""

import json
import re

import pytest

from specdec import SpeculativeDecoder
from specdec.loaders import optional_dependencies
from specdec.server.engine_thread import EngineThread
from specdec.server.tool_parsers import TOOL_PARSERS
from specdec.server.tool_parsers.generic import GenericParser
from specdec.server.tool_parsers.harmony import HarmonyParser
from specdec.server.tool_parsers.muse_glimmer import MuseGlimmerParser
from tests.fakes.asgi import send_request
from tests.fakes.server import CHAT, CONVERSATION, make_app
from tests.tools.model_folders import SMOLLM2_TEMPLATE, TOOL_TEMPLATE_PREFIX, make_chat_folder

pytestmark = pytest.mark.skipif(not optional_dependencies.is_installed(optional_dependencies.GUIDANCE), reason="needs llguidance")
CITY = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"City": {"type": "string", "enum": ["Oslo", "Rom"]}},
}  # fmt: skip
WEATHER = {"name": "get.weather-1", "description": 'of "a city"', "parameters": CITY}
TIME = {"name": "time"}
TEMPLATES = {
    f"{parser.__name__.removesuffix('Parser')} {i}": "{% if tools %}{% set signs = " + json.dumps(signs) + " %}{% endif %}"
    for parser in TOOL_PARSERS
    for i, signs in enumerate(parser.template_signs)
}


def make_tools(*functions, **options):
    return [{"type": "function", "function": function | options} for function in functions]


WITH_HEADERS = (HarmonyParser, MuseGlimmerParser)  # an answer is a message, which has a header
WRONG = {"type": "object", "properties": {"x": {"type": "string", "format": "zork"}}, "required": ["x"]}
PARSERS = {parser.__name__.removesuffix("Parser"): parser for parser in TOOL_PARSERS}
MARKS = sorted({name for parser in TOOL_PARSERS for name in parser.get_marks()})


@pytest.fixture(scope="module")
def marked_model(tmp_path_factory):
    """Return a model whose tokenizer has the marks of all formats as special tokens."""
    template = TOOL_TEMPLATE_PREFIX + SMOLLM2_TEMPLATE
    path = make_chat_folder(tmp_path_factory.mktemp("forcing") / "talker", template, MARKS, special=True)
    decoder = SpeculativeDecoder(path, "lookup", n_threads=1, gamma=4)
    scheduler = EngineThread(decoder, 4, 32, 10**8)
    yield decoder, scheduler
    scheduler.close(0.0)


# without harmony's marks a random model never ends its reasoning
@pytest.fixture(
    params=[
        (tool_format, marks) for tool_format in TEMPLATES for marks in (False, True) if marks or "Harmony" not in tool_format
    ],
    ids=str,
)
def chat_app(request, decoder, scheduler, marked_model, monkeypatch):
    tool_format, has_marks = request.param
    decoder, scheduler = marked_model if has_marks else (decoder, scheduler)
    source = decoder.chat_template.source.removeprefix(TOOL_TEMPLATE_PREFIX)
    monkeypatch.setattr(decoder.chat_template, "source", TEMPLATES[tool_format] + source)
    app = make_app(decoder, scheduler)
    app.is_harmony = "Harmony" in tool_format
    return app


def is_valid_call(call):
    """Return whether a call is valid for one of the tools."""
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "time":
        return arguments == {}
    assert call["function"]["name"] == "get.weather-1"
    return arguments["city"] in ("Oslo", "Rom") and 1 <= arguments["days"] <= 9 and len(arguments) == 2


def send_chat(app, seed=1, **fields):
    body = {
        "messages": CONVERSATION,
        "tools": make_tools(WEATHER, TIME),
        "max_tokens": 240,
        "temperature": 1,
        "seed": seed,
    } | fields
    if app.is_harmony:
        body["logit_bias"] = {str(400 + MARKS.index("<|end|>")): 50}
    response = send_request(app, CHAT, body)
    assert response.status == 200, response.body
    return response


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_required_tool_is_called(chat_app, is_strict):
    for seed in range(6):
        tools = make_tools(WEATHER, TIME, strict=is_strict)
        (choice,) = send_chat(chat_app, seed, tool_choice="required", tools=tools, parallel_tool_calls=False).json["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert is_valid_call(call)


@pytest.mark.parametrize("name", ["get.weather-1", "time"])
def test_a_named_tool_is_called_complete_and_in_a_stream(chat_app, name):
    choice = {"type": "function", "function": {"name": name}}
    (complete,) = send_chat(chat_app, tool_choice=choice, parallel_tool_calls=False).json["choices"]
    (call,) = complete["message"]["tool_calls"]
    assert is_valid_call(call) and call["function"]["name"] == name
    events = send_chat(chat_app, tool_choice=choice, parallel_tool_calls=False, stream=True).events
    deltas = [each for event in events for each in event["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(each["function"]["arguments"] for each in deltas) == call["function"]["arguments"]
    assert [each["function"]["name"] for each in deltas if "name" in each["function"]] == [name]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_parallel_calls_are_each_valid(chat_app, request):
    """At most the last call is truncated; all others are valid."""
    n_calls = []
    for seed in range(12):
        (choice,) = send_chat(chat_app, seed, tool_choice="required", max_tokens=200, temperature=5).json["choices"]
        calls = choice["message"]["tool_calls"]
        complete = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        assert all(map(is_valid_call, complete))
        n_calls.append(len(calls))
    name = request.node.callspec.params["chat_app"][0].split()[0]
    assert max(n_calls) > 1 if name not in ("Llama3", "Harmony") else set(n_calls) == {1}


def test_a_truncated_call_is_reported_and_returned(chat_app):
    for max_tokens in (1, 2, 5, 9, 14, 20, 27, 35, 45, 60, 80, 110, 140, 180, 240):
        (choice,) = send_chat(chat_app, tool_choice="required", max_tokens=max_tokens, parallel_tool_calls=False).json["choices"]
        if choice["finish_reason"] == "tool_calls":
            return
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        assert chat_app.is_harmony or message["content"] or message.get("tool_calls") or message.get("reasoning_content")
    pytest.fail("no call was complete after 240 tokens")


@pytest.mark.parametrize("n_outputs", [4, pytest.param(12, marks=pytest.mark.campaign)])
def test_strict_calls_are_valid_after_the_open_mark(chat_app, n_outputs):
    """The output is text, or a valid call after text."""
    finishes = set()
    for seed in range(n_outputs):
        (choice,) = send_chat(chat_app, seed, tools=make_tools(WEATHER, TIME, strict=True), max_tokens=60).json["choices"]
        finishes.add(choice["finish_reason"])
        calls = choice["message"].get("tool_calls", [])
        assert all(map(is_valid_call, calls if choice["finish_reason"] != "length" else calls[:-1]))
        assert "<tool_call>" not in (choice["message"]["content"] or "") or choice["finish_reason"] == "length"
    assert finishes


TEXTS = {
    "Hermes": {
        "hi": True, "": True, 'hi <tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>': True,
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>': False, "<tool_call>\n{": True, "<tool_call> x": False,
        'a<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "time"': True,
        '<tool_call>\n{"name": "get.weather-1", "arguments": {"city": "Paris"': False,
    },
    "Llama3": {"hi {": True, '{"name": "time", "parameters": {}}': True, "{x": False, '{"name": "other"': False},
    "Qwen3Coder": {
        "<tool_call>\n<function=time>\n</function>\n</tool_call>": True, "a <tool_call>\n<function=rain>": False,
        "<tool_call>\n<function=get.weather-1>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>": True,
        "<tool_call>\n<function=get.weather-1>\n<parameter=city>\nParis": False, "<function=time>": True,
        "<tool_call>\n<function=get.weather-1>\n<parameter=days>": False,
    },
    "GLM": {
        "<tool_call>time</tool_call>": True, "<tool_call>time\n</tool_call><tool_call>time": True, "<tool_call>rain": False,
        "<tool_call>get.weather-1<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>3": True,
        "a <tool_call>get.weather-1\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days": True,
        "<tool_call>get.weather-1<arg_key>city</arg_key><arg_value>Paris": False, "<tool_call>get.weather-1</tool_call>": False,
    },
    "MistralList": {
        "a [TOOL_CALLS": True, '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]': True,
        "[TOOL_CALLS][]": False, "[TOOL_CALLS]time": False,
    },
    "Mistral": {"[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]get.weather-1[ARGS]{": True, "[TOOL_CALLS]rain": False, "[": True},
    "Harmony": {
        "<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}": True,
        "<|channel|>analysis": False, "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}": True,
        "<|channel|>final<|message|>Hi.": True, "<|channel|>commentary to=functions.rain": False,
    },
    "Gemma": {
        "<|tool_call>call:get.weather": False, "Hm <|tool_call>call:time{}<tool_call|>": True, "<|tool_call>call:rain": False,
    },
    "LFM2": {
        "<|tool_call_start|>[time(), time()]<|tool_call_end|>": True, "<|tool_call_start|>[time(x=1)": False, "[time()]": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_the_strict_grammar_matches_the_parser(name, decoder):
    tools = [WEATHER, TIME] if name not in ("Gemma", "LFM2") else [TIME]
    grammar = PARSERS[name].make_grammar(decoder.tokenizer, tools, False, False)
    for text, is_allowed in TEXTS[name].items():
        tokens = decoder.tokenizer.encode(text) if text else []
        state = grammar.get_constraint().begin([1])
        assert (state.count_allowed(tokens) == len(tokens)) == is_allowed, text


def make_tool(schema, **keywords):
    return {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"], **keywords},
    }


VALUE_CASES = {
    "Gemma": ("<|tool_call>call:f{x:", [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"null}": True, '<|"|>a': True, "3": False}),
        ({"type": ["integer", "string"]}, {"3}": True, '<|"|>a<|"|>}': True, "true": False}),
        ({"const": 7}, {"7}": True, "8": False}), ({"enum": ["a", None]}, {'<|"|>a<|"|>}': True, "null}": True, '<|"|>b': False}),
        ({"type": "array"}, {"[1]}": True, "{": False, "1": False}), ({"type": "object"}, {"{a:1}}": True, "[": False}),
    ]),
    "Qwen3Coder": ("<tool_call>\n<function=f>\n<parameter=x>\n", [
        ({"type": "string"}, {"a\n</parameter>\n</function>": True, "a</parameter>\n": True, "a</parameter>b": False}),
    ]),
    "GLM": ("<tool_call>f<arg_key>x</arg_key><arg_value>", [
        ({"type": "string"}, {"a\n</arg_value></tool_call>": True, "a</arg_value>b": False}),
        ({"type": "integer"}, {"7</arg_value>\n</tool_call>": True, "a": False}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUE_CASES)
def test_non_json_values_follow_their_schemas(name, decoder):
    prefix, cases = VALUE_CASES[name]
    for schema, texts in cases:
        grammar = PARSERS[name].make_grammar(decoder.tokenizer, [make_tool(schema)], True, True)
        for text, is_allowed in texts.items():
            tokens = decoder.tokenizer.encode(prefix + text)
            assert (grammar.get_constraint().begin([1]).count_allowed(tokens) == len(tokens)) == is_allowed, (schema, text)


LIST = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(("name", "schema", "keywords", "message"), [
    ("Gemma", LIST | {"maxItems": 3}, {}, "maxItems of a list"), ("Gemma", LIST | {"minItems": 1}, {}, "minItems of a list"),
    ("Gemma", {"type": "object", "minProperties": 1}, {}, "minProperties of an object"),
    ("Gemma", {"oneOf": [LIST]}, {}, "oneOf of a value"), ("Gemma", {"enum": ["a<tool_call|>"]}, {}, "cannot be written"),
    ("Gemma", {"enum": ['<|"|>']}, {}, "cannot be written"), ("Qwen3Coder", {"enum": ["a</parameter>"]}, {}, "cannot be written"),
    ("GLM", {"enum": ["a</arg_value>"]}, {}, "cannot be written"),
    ("Qwen3Coder", {"type": "string", "pattern": "a"}, {}, "pattern of a string"),
    ("Qwen3Coder", LIST, {"minProperties": 1}, "an object"),
    ("LFM2", LIST, {"anyOf": []}, "anyOf of an object"),
])  # fmt: skip
def test_unsupported_strict_schemas_are_rejected(decoder, name, schema, keywords, message):
    with pytest.raises(ValueError, match=f"the tool f: .*{message}"):
        PARSERS[name].make_grammar(decoder.tokenizer, [make_tool(schema, **keywords)], True, True)


def test_invalid_tool_parameters_are_rejected_by_name(chat_app):
    for fields, param in (
        ({"tool_choice": "required", "tools": []}, "tool_choice"), ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"), ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": "required", "tools": make_tools({"name": "a", "parameters": {"type": "nonsense"}})}, "tools"),
        ({"tool_choice": "required", "tools": make_tools({"name": "a", "parameters": {"pattern": "a{99999}{99999}"}})}, "tools"),
        ({"tools": make_tools({"name": "a", "parameters": {"type": "array"}})}, "tools"),
        ({"tools": make_tools({"name": "a", "parameters": WRONG}, strict=True)}, "tools"),
        ({"tools": make_tools(TIME, strict=1)}, "tools"),
    ):  # fmt: skip
        response = send_request(chat_app, CHAT, {"messages": CONVERSATION, "tools": make_tools(WEATHER)} | fields)
        assert (response.status, response.error["param"]) == (400, param), (fields, response.body)
        if (tool := fields.get("tools")) and tool[0]["function"]["name"] == "a":
            assert "the tool a: " in response.error["message"], response.body


def test_a_response_follows_its_schema_or_is_a_call(chat_app):
    """With a schema and tools, each output is one of the two."""
    response_format = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"const": 7}, "maxItems": 3}}}
    kinds = set()
    for seed in range(6):
        (choice,) = send_chat(chat_app, seed, response_format=response_format).json["choices"]
        message = choice["message"]
        if calls := message.get("tool_calls"):
            assert all(map(is_valid_call, calls if choice["finish_reason"] != "length" else calls[:-1]))
        elif choice["finish_reason"] == "stop":
            assert json.loads(message["content"]) in ([], [7], [7, 7], [7, 7, 7])
        kinds.add(bool(calls))
    assert kinds


@pytest.mark.parametrize("parser", [each for each in (*TOOL_PARSERS, GenericParser) if each not in WITH_HEADERS])
@pytest.mark.parametrize("answer", ['{"name": "Oslo", "days": 7}', '{"name": "time"}', '{"tool": 2}', "{}", '["[TOOL_CALLS]"]'])
def test_a_response_that_begins_like_a_call_is_possible(decoder, parser, answer):
    """The lexer of the grammar reads the longest possible piece, so the pieces of calls must be those of JSON."""
    schema = {"type": type(json.loads(answer)).__name__.replace("dict", "object").replace("list", "array")}
    if "name" in answer:
        properties = {"name": {"type": "string"}, "days": {"type": "integer"}}
        schema |= {"properties": properties, "required": ["name"], "additionalProperties": False}
    constraint = parser.make_grammar(decoder.tokenizer, [TIME | {"strict": False}], False, False, schema).get_constraint()
    for tokens in (decoder.encode(answer), [token for char in answer for token in decoder.encode(char)]):
        assert constraint.begin([]).find_end(tokens) == len(tokens)


@pytest.fixture
def harmony_app(marked_model, monkeypatch):
    """Return a function that sends a request to a random model of Harmony, and returns its choice and reasoning tokens."""
    decoder, scheduler = marked_model
    source = "{# <|channel|><|message|> #}{% if tools %}{% endif %}{{ messages[0].content }}<|start|>assistant"
    monkeypatch.setattr(decoder.chat_template, "source", source)
    app = make_app(decoder, scheduler)
    words = [decoder.tokenizer.token_to_bytes(token) or b"" for token in range(400)]

    def send(kind="analysis", **fields):
        """Send a request whose output begins with a channel if `kind` is one, else without."""
        bias = {str(token): 14 for token, word in enumerate(words) if word and kind.encode().startswith(word)}
        bias |= {str(400 + MARKS.index("<|channel|>")): 8 if kind else -20}
        body = {"messages": CONVERSATION, "max_tokens": 120, "temperature": 1, "logit_bias": bias, **fields}
        response = send_request(app, CHAT, body)
        assert response.status == 200, response.body
        return response.json["choices"][0], response.json["usage"]["completion_tokens_details"]["reasoning_tokens"]

    return send


def test_a_response_of_harmony_follows_its_schema_in_the_final_channel(harmony_app):
    """With and without a thought, which ends at its budget, also if tools are offered."""
    schema, thoughts = {"type": "array", "items": {"const": 7}, "maxItems": 3}, set()
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "thinking_budget_tokens": 8}
    for tools in ([], make_tools(TIME)):
        for seed in range(4):
            for kind in ("analysis", "final", *([] if tools else [""])):
                choice, n = harmony_app(kind, seed=seed, tools=tools, **fields)
                message = choice["message"]
                is_answer = not message.get("tool_calls")
                assert n <= 8 and (not is_answer or json.loads(message["content"]) in ([], [7], [7, 7], [7, 7, 7]))
                thoughts.add((bool(tools), is_answer, "reasoning_content" in message))
    assert thoughts >= {(False, True, True), (False, True, False), (True, True, False)}
    assert thoughts & {(True, True, True), (True, False, True)}


def test_a_call_of_harmony_may_follow_a_message_to_the_user(marked_model):
    decoder, _ = marked_model
    grammar, marks = PARSERS["Harmony"].make_grammar(decoder.tokenizer, [TIME], False, False), re.compile(r"<\|\w+\|>")
    channel, message, end = "<|channel|>", "<|message|>", "<|end|>"
    call, preamble = f"{channel}commentary to=functions.time <|constrain|>json{message}{{}}", f"{channel}commentary{message}Hm."
    for text, is_allowed in (
        (f"{preamble}{end}<|start|>assistant{call}", True), (f"<|start|>assistant{preamble}{end}<|start|>assistant{call}", True),
        (f"{preamble}{end}<|start|>assistant{channel}final{message}Hi.", True), (f"{preamble}{end}{call}", False),
        (preamble, True),
        (f"{preamble}{end}<|start|>assistant{preamble}{end}", False), (f"{channel}final{message}Hi.{end}", False), ("Hi.", True),
    ):  # fmt: skip
        names, words = marks.findall(text), marks.split(text)
        tokens = [*encode_plain(decoder, words[0])]
        for name, word in zip(names, words[1:], strict=True):
            tokens += [400 + MARKS.index(name), *encode_plain(decoder, word)]
        state = grammar.get_constraint().begin([1])
        assert (state.count_allowed(tokens) == len(tokens)) == is_allowed, text


def encode_plain(decoder, text):
    return decoder.tokenizer.encode(text) if text else []


def test_a_budget_ends_a_thought_of_harmony_before_a_call(harmony_app):
    for budget, seed in ((0, 1), (1, 3), (2, 2), (5, 3)):
        choice, n = harmony_app(seed=seed, thinking_budget_tokens=budget, tools=make_tools(TIME, WEATHER), tool_choice="required")
        (call,) = choice["message"]["tool_calls"]
        assert is_valid_call(call) and n == budget and choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]
