"""Anthropic's Messages API and OpenAI's Responses API: the same output as a chat, as events and complete responses."""

import base64
import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from specdec import Prompt
from specdec.engine.sequence import Client
from specdec.loaders import optional_dependencies
from specdec.server.app import Endpoints
from specdec.server.engine_thread import QueueFullError, ShutdownError
from specdec.server.generation_fields import ServedModel
from specdec.server.json_values import MAX_JSON_DEPTH, parse_json
from specdec.server.tool_parsers import find_tool_parser
from specdec.text.structured_output import ConstraintError
from tests.fakes.asgi import send_request
from tests.fakes.server import CHAT, CONVERSATION, SAMPLING_FIELDS, TOOL, FakeScheduler, make_state, step
from tests.tools.server_requests import COUNT, MESSAGES, RESPONSES, TokenScheduler
from tests.tools.tool_calls import TAGGED_CALL

EMBEDDINGS = "/v1/embeddings"
BODIES = {
    MESSAGES: {"messages": CONVERSATION, "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5},
    RESPONSES: {"input": "Where did the robin go?", "max_output_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5},
}  # fmt: skip
TOOLS = {
    MESSAGES: {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
    RESPONSES: {"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]},
}  # fmt: skip


def get_text(path, answer):
    if path == MESSAGES:
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


@pytest.mark.parametrize("path", BODIES)
def test_responses_and_streams_equal_chat_output(app, path):
    chat = send_request(app, CHAT, {"messages": CONVERSATION, **SAMPLING_FIELDS}).json
    complete = send_request(app, path, BODIES[path])
    assert complete.status == 200, complete.body
    text = chat["choices"][0]["message"]["content"]
    assert get_text(path, complete.json) == text and complete.json["model"] == "talker"
    usage = complete.json["usage"]
    n_prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert (n_prompt, usage["output_tokens"]) == (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])
    events = send_request(app, path, BODIES[path] | {"stream": True}).events
    types = [each["type"] for each in events]
    if path == MESSAGES:
        assert complete.json["stop_reason"] == "max_tokens" and complete.json["role"] == "assistant"
        assert types[:2] == ["message_start", "content_block_start"] and types[-2:] == ["message_delta", "message_stop"]
        assert "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta") == text
        assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert events[-2]["usage"] == usage
    else:
        assert complete.json["status"] == "incomplete" and complete.json["incomplete_details"] == {"reason": "max_output_tokens"}
        assert types[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert types[-1] == "response.incomplete" and get_text(path, events[-1]["response"]) == text
        assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == text
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert events[-1]["response"]["usage"] == usage


def respond(make_test_app, path, *events, stream=False, **fields):
    body = BODIES[path] | TOOLS[path] | {"stream": stream} | fields
    return send_request(make_test_app(FakeScheduler(Prompt([1], 0.0), *events)), path, body)


CALL_STEPS = [step("Let me "), step("see.\n\n"), step(TAGGED_CALL[:30]), step(TAGGED_CALL[30:50]), step(TAGGED_CALL[50:], "eos")]


def test_tool_calls_are_blocks_and_items_with_streamed_arguments(make_test_app):
    response = respond(make_test_app, MESSAGES, *CALL_STEPS).json
    text_block, call = response["content"]
    assert text_block == {"type": "text", "text": "Let me see."} and response["stop_reason"] == "tool_use"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    events = respond(make_test_app, MESSAGES, *CALL_STEPS, stream=True).events
    starts = [each for each in events if each["type"] == "content_block_start"]
    assert [(each["index"], each["content_block"]["type"]) for each in starts] == [(0, "text"), (1, "tool_use")]
    stops = [each["index"] for each in events if each["type"] == "content_block_stop"]
    assert stops == [0, 1]
    argument_deltas = [
        each["delta"]["partial_json"] for each in events if each.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert len(argument_deltas) > 1 and json.loads("".join(argument_deltas)) == {"city": "Oslo"}
    response = respond(make_test_app, RESPONSES, *CALL_STEPS).json
    message, call = response["output"]
    assert message["content"][0]["text"] == "Let me see." and response["status"] == "completed"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Oslo"})
    events = respond(make_test_app, RESPONSES, *CALL_STEPS, stream=True).events
    types = [each["type"].removeprefix("response.") for each in events]
    assert "".join(dict.fromkeys([kind[0] for kind in types])) == "cifo" or len(types) > 8
    assert types[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(each["delta"] for each in events if each["type"].endswith("arguments.delta")) == call["arguments"]
    done = [each["item"] for each in events if each["type"].endswith("item.done")]
    assert [each["status"] for each in done] == ["completed"] * 2
    assert [each["name"] for each in done if each["type"] == "function_call"] == ["weather"]
    for one, two in pairwise([each["output_index"] for each in events if "output_index" in each]):
        assert two in (one, one + 1)


@pytest.mark.parametrize("path", BODIES)
def test_responses_are_json_for_extreme_call_arguments(make_test_app, path):
    """Numbers beyond the range of floats, and lone surrogates."""
    for call in ('{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}'):
        text = "<tool_call>\n" + call % '{"x": [1e999, -1e999], "y": "a\\ud800"}' + "\n</tool_call>"
        response = respond(make_test_app, path, step(text, "eos"))
        assert response.status == 200 and b"Infinity" not in response.body
        (item,) = response.json["content" if path == MESSAGES else "output"]
        given = item["input"] if path == MESSAGES else json.loads(item["arguments"])
        assert given["y"] == "a\ud800" and len(given["x"]) == 2
        assert respond(make_test_app, path, step(text, "eos"), stream=True).status == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [400, 900, 1500, 20_000])
def test_deeply_nested_arguments_are_returned(make_test_app, path, n):
    """Arguments that Python cannot parse are returned as a string."""
    for call in ('{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}'):
        text = "<tool_call>\n" + call % ('{"x": ' + "[" * n + "]" * n + "}") + "\n</tool_call>"
        response = respond(make_test_app, path, step(text, "eos"))
        assert response.status == 200 and response.body.count(b"[") >= n


def test_the_json_depth_limit_is_the_same_for_all_pythons():
    text = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert json.dumps(parse_json(text)) == text
    with pytest.raises(ValueError, match="too deep"):
        parse_json(f"[{text}]")


def test_a_truncated_call_is_returned(make_test_app):
    steps = [step(TAGGED_CALL[:58], "max_tokens")]
    response = respond(make_test_app, MESSAGES, *steps).json
    assert response["stop_reason"] == "max_tokens" and "weather" in response["content"][0]["text"]
    response = respond(make_test_app, RESPONSES, *steps).json
    assert response["status"] == "incomplete"
    assert response["output"][0]["status"] == "incomplete" and response["output"][0]["arguments"].startswith('{"ci')
    events = respond(make_test_app, RESPONSES, step("I look. "), *steps, stream=True).events
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert [each["status"] for each in done] == ["completed", "incomplete"] and done == events[-1]["response"]["output"]


def test_a_response_echoes_request_fields(app):
    echoed = {"tool_choice": "none", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 1, **TOOLS[RESPONSES]}
    response = send_request(app, RESPONSES, {"input": "x", "instructions": "Be short.", "top_logprobs": 0, **echoed}).json
    assert echoed.items() <= response.items() and response["instructions"] == "Be short." and response["metadata"] == {}
    assert "cache_write_tokens" in response["usage"]["input_tokens_details"], "OpenAI's package needs it"
    plain = send_request(app, RESPONSES, {"input": "x", "max_output_tokens": 1, "tools": None}).json
    assert (plain["tool_choice"], plain["text"], plain["tools"]) == ("auto", {"format": {"type": "text"}}, [])


def test_echoed_fields_are_json(app):
    body = {"input": "x", "max_output_tokens": 1, "metadata": {"a": "NUMBER"}}
    response = send_request(app, RESPONSES, chunks=[json.dumps(body).replace('"NUMBER"', "-1e999").encode()])
    assert response.status == 200 and b"Infinity" not in response.body and response.json["metadata"]["a"] == -sys.float_info.max


@pytest.mark.parametrize(
    "end", [{"stop_reason": "stop", "stop_string": "lo"}, {"stop_reason": "eos"}, {"stop_reason": "max_tokens"}]
)
def test_the_finish_reason_is_tool_calls_only_for_complete_calls(make_test_app, end):
    """A truncated call is not complete; an earlier complete one counts. max_tokens always gives "length"."""
    body = {"messages": CONVERSATION, "tools": [TOOL], **SAMPLING_FIELDS}
    for text, finish in (
        (TAGGED_CALL[:58], "stop"),
        (TAGGED_CALL + TAGGED_CALL[:58], "stop"),
        (TAGGED_CALL + "lo", "tool_calls"),
        ("lo", "stop"),
    ):
        for size in (1, 58, 500):
            steps = [step(text[i : i + size]) for i in range(0, len(text), size)]
            (choice,) = send_request(make_test_app(FakeScheduler(Prompt([1], 0.0), *steps, step("", **end))), CHAT, body).json[
                "choices"
            ]
            assert choice["finish_reason"] == ("length" if end["stop_reason"] == "max_tokens" else finish), text


def test_a_call_stopped_before_its_arguments_is_not_complete(make_test_app, decoder, monkeypatch):
    monkeypatch.setattr(decoder.chat_template, "source", "{# [TOOL_CALLS][ARGS] tools #}{{ messages[0].content }}")
    for end, finish in (({"stop_reason": "stop", "stop_string": "{"}, "stop"), ({"stop_reason": "eos"}, "tool_calls")):
        fake = FakeScheduler(Prompt([1], 0.0), step("[TOOL_CALLS]weather[ARGS]"), step("", **end))
        (choice,) = send_request(make_test_app(fake), CHAT, {"messages": CONVERSATION, "tools": [TOOL], **SAMPLING_FIELDS}).json[
            "choices"
        ]
        assert choice["finish_reason"] == finish and choice["message"]["tool_calls"]


SPECIAL_TOKEN_CASES = [  # special tokens are enclosed in ^
    ("{# <|tool_call_start|> #}", 'Hm ^<|tool_call_start|>^[weather(city="<|tool_call_end|>\\"<")]^<|tool_call_end|>^ <|tool_',
     {"content": "Hm <|tool_"}, '<|tool_call_end|>"<'),
    ("{# <|tool_call> #}", '^<|tool_call>^call:weather{city:^<|"|>^<tool_call|><|"|>^<|"|>^}^<tool_call|>^', {"content": None},
     '<tool_call|><|"|>'),
    ("{# <|tool_call_start|> #}", '<|tool_call_start|>[weather(city="a")]<|tool_call_end|>',
     {"content": '<|tool_call_start|>[weather(city="a")]<|tool_call_end|>'}, None),
    ("{# <|channel|><|message|> #}", "^<|channel|>^analysis^<|message|>^a <|end|>^<|end|>^^<|start|>^assistant^<|channel|>^final"
     "^<|message|>^\u00e9 <|end|> and <|channel|>final<|message|> are marks <", {"reasoning_content": "a <|end|>",
     "content": "\u00e9 <|end|> and <|channel|>final<|message|> are marks <"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("template", "text", "expected", "city"), SPECIAL_TOKEN_CASES)
def test_text_that_spells_a_special_token_is_not_a_mark(make_test_app, decoder, monkeypatch, template, text, expected, city):
    """Take only special token ids for marks, in strings of calls and in text."""
    monkeypatch.setattr(decoder.chat_template, "source", template + "{% if tools %}{% endif %}{{ messages[0].content }}")
    specials = {name: 390 + i for i, name in enumerate(find_tool_parser(template).get_marks())}
    monkeypatch.setattr(decoder.tokenizer, "specials", specials)
    parts = [[specials[part]] if i % 2 else decoder.encode(part) if part else [] for i, part in enumerate(text.split("^"))]
    tokens = [token for part in parts for token in part]
    for size in (1, 4, len(tokens)):
        body = {"messages": CONVERSATION, "tools": [TOOL], "specdec": True, "stop": ["<|never"]}
        response = send_request(make_test_app(TokenScheduler(decoder, tokens, size)), CHAT, body)
        assert response.status == 200, response.body
        message = response.json["choices"][0]["message"]
        assert {name: message[name] for name in expected} == expected
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert calls == ([{"city": city}] if city else []) and b"\\ud" not in response.body


def test_stop_strings_may_contain_special_tokens_and_have_no_effect_in_a_thought(make_test_app, decoder, monkeypatch):
    marks = "{# <|channel|><|message|> #}"
    monkeypatch.setattr(decoder.chat_template, "source", marks + "{{ messages[0].content }}")
    specials = {name: 390 + i for i, name in enumerate(find_tool_parser(marks).get_marks())}
    monkeypatch.setattr(decoder.tokenizer, "specials", specials)
    message = ["<|end|>", "<|start|>", "assistant"]
    parts = ["<|channel|>", "analysis", "<|message|>", "a", *message, "<|channel|>", "final", "<|message|>", "a", *message]
    tokens = [token for part in parts for token in ([specials[part]] if part in specials else decoder.encode(part))]
    for stop in ("<|end|>", "<|end|><|start|>", "a<|end|>"):
        response = send_request(
            make_test_app(TokenScheduler(decoder, tokens, 1)), MESSAGES, BODIES[MESSAGES] | {"stop_sequences": [stop]}
        ).json
        assert response["stop_sequence"] == stop
        texts = {"thinking": "a", "text": "a".removesuffix(stop[0])}
        assert [block[block["type"]] for block in response["content"]] == [text for text in texts.values() if text]


def test_the_stop_string_is_returned(app, decoder):
    text = send_request(app, CHAT, {"messages": CONVERSATION, **SAMPLING_FIELDS, "max_tokens": 40}).json["choices"][0]["message"][
        "content"
    ]
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    body = BODIES[MESSAGES] | {"max_tokens": 40}
    complete = send_request(app, MESSAGES, body | {"stop_sequences": ["never there", stop, "nor this"]}).json
    assert (complete["stop_reason"], complete["stop_sequence"]) == ("stop_sequence", stop)
    assert get_text(MESSAGES, complete) == text[: text.index(stop)]
    assert send_request(app, MESSAGES, body | {"stop_sequences": ["never there"]}).json["stop_reason"] in (
        "end_turn",
        "max_tokens",
    )


def test_the_whole_conversation_reaches_the_template(app, prompts):
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}], "is_error": True},
            {"type": "text", "text": "So?"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind."}]
    body = {"messages": conversation, "system": system, "max_tokens": 1, **TOOLS[MESSAGES], "metadata": {"user_id": "a"}}
    assert send_request(app, MESSAGES, body).status == 200
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "m"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "toolu_1", "name": "weather", "arguments": '{"city": "Oslo"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "toolu_1", "output": "Error: rain"}, {"role": "user", "content": "So?"},
    ]  # fmt: skip
    fields = {"instructions": "Be short.", "store": False, "include": ["reasoning.encrypted_content"], "reasoning": None}
    assert send_request(app, RESPONSES, {"input": items, "max_output_tokens": 1, **TOOLS[RESPONSES], **fields}).status == 200
    (one, tools, _), (two, same, _) = prompts
    assert one == two and tools == same == [TOOL | {"function": {"name": "weather", "parameters": {"type": "object"}}}]
    assert one[0] == {"role": "system", "content": "Be short.\n\nBe kind."}
    assert one[2]["reasoning_content"] == "hm" and one[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert one[3] == {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "Error: rain"}


def test_prompt_tokens_are_counted(app):
    body = {"messages": CONVERSATION, "model": "talker"}
    usage = send_request(app, MESSAGES, body | {"max_tokens": 1}).json["usage"]
    assert send_request(app, COUNT, body).json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert send_request(app, COUNT, {"messages": [*CONVERSATION, {"role": "assistant", "content": "South"}]}).status == 200
    assert send_request(app, COUNT, {"messages": []}).status == 400


@pytest.mark.parametrize("pooling", ["", "mean", "last", "cls"])
def test_embeddings_are_pooled_hidden_states(app, decoder, monkeypatch, pooling):
    monkeypatch.setattr(decoder, "bundle", replace(decoder.bundle, checkpoint=SimpleNamespace(pooling=pooling)))
    texts = ["The robin flew away. " * 12, "One", "One, two, three"]
    cache = decoder.target.new_cache([decoder.target.config.n_layers + 1])
    expected = []
    for text in texts:
        tokens = decoder.encode(text)
        cache.forward(tokens, 1)
        states = cache.get_hidden_states(tokens, 0).astype(np.float64)
        vector = {"": states.mean(0), "mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
        expected.append(vector / np.linalg.norm(vector))
    response = send_request(app, EMBEDDINGS, {"input": texts, "model": "talker", "user": "x"}).json
    assert [each["index"] for each in response["data"]] == [0, 1, 2] and response["object"] == "list"
    vectors = np.array([each["embedding"] for each in response["data"]])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert response["usage"] == {
        key: sum(len(decoder.encode(text)) for text in texts) for key in ("prompt_tokens", "total_tokens")
    }
    base64_data = send_request(
        app, EMBEDDINGS, {"input": [decoder.encode(text) for text in texts], "encoding_format": "base64"}
    ).json["data"]
    decoded = np.array([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in base64_data])
    np.testing.assert_array_equal(decoded, vectors.astype(np.float32))
    (short,) = send_request(app, EMBEDDINGS, {"input": texts[0], "dimensions": 8}).json["data"]
    np.testing.assert_allclose(short["embedding"], vectors[0, :8] / np.linalg.norm(vectors[0, :8]), atol=1e-6)


def test_embeddings_run_between_passes_and_stop_on_disconnect(app, decoder, scheduler, caplog):
    """Chat outputs stay the same next to embeddings, and a disconnected client's tasks stop."""
    expected = send_request(app, CHAT, {"messages": CONVERSATION, **SAMPLING_FIELDS, "max_tokens": 60}).json["choices"][0][
        "message"
    ]["content"]
    with ThreadPoolExecutor(8) as pool:
        bodies = [
            (CHAT, {"messages": CONVERSATION, **SAMPLING_FIELDS, "max_tokens": 60}),
            (EMBEDDINGS, {"input": ["The robin " * 40] * 9}),
        ] * 4
        responses = list(pool.map(lambda each: send_request(app, *each), bodies))
    assert {response.json["choices"][0]["message"]["content"] for response in responses[::2]} == {expected}
    assert len({response.body for response in responses[1::2]}) == 1
    with pytest.raises(ConnectionResetError):
        embeddings = Endpoints(make_state(ServedModel("talker", decoder, None), scheduler))
        send_request(with_client(embeddings), EMBEDDINGS, {"input": ["The robin " * 60] * 500}, disconnect_after=0)
    assert send_request(app, EMBEDDINGS, {"input": "x"}).status == 200
    gc.collect()
    assert not caplog.records, "cancelled tasks log nothing"


def with_client(inner):
    """Return the app with a client in its scope, without error handling."""

    async def outer(scope, receive, send):
        await inner({**scope, "api_client": Client(), "notes": []}, receive, send)

    return outer


REJECTED_REQUESTS = [
    (EMBEDDINGS, {"input": []}, "input"), (EMBEDDINGS, {"input": None}, "input"), (EMBEDDINGS, {"input": [[]]}, "input"),
    (EMBEDDINGS, {"input": [1, "a"]}, "input"), (EMBEDDINGS, {"input": [[10**9]]}, "input"), (EMBEDDINGS, {"n": 1}, "n"),
    (EMBEDDINGS, {"input": "a " * 4000}, "input"), (EMBEDDINGS, {"dimensions": 10**6}, "dimensions"),
    (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format"), (EMBEDDINGS, {"input": ["a"] * 3000}, "input"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"), (MESSAGES, {"max_tokens": 0}, "max_tokens"), (MESSAGES, {"n": 2}, "n"),
    (MESSAGES, {"messages": None}, "messages"), (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 1}]}]}, "messages"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "messages"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"), (MESSAGES, {"tools": {}}, "tools"),
    *((path, {"tools": TOOLS[path]["tools"][0]}, "tools") for path in BODIES),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"), (MESSAGES, {"tool_choice": "auto"}, "tool_choice"),
    (MESSAGES, {"thinking": {"type": "maybe"}}, "thinking"), (MESSAGES, {"system": 5}, "system"),
    (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers"), (MESSAGES, {"stop_sequences": [1]}, "stop"),
    (MESSAGES, {"chat_template_kwargs": 5, "thinking": {"type": "enabled"}}, "chat_template_kwargs"),
    (MESSAGES, {"messages": [*CONVERSATION, {"role": "assistant", "content": "South"}]}, "messages"),
    (MESSAGES, {"messages": [*CONVERSATION, {"role": "assistant", "content": "South"}, {"role": "user", "content": []}]},
     "messages"),
    (MESSAGES, {"output_config": {"x": 1}}, "output_config"), (MESSAGES, {"model": "claude"}, "model"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"), (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"background": True}, "background"), (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": None}, "messages"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"), (RESPONSES, {"n": 2}, "n"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    (RESPONSES, {"tools": [{"type": 5, "name": "a"}]}, "tools"),
    (RESPONSES, {"tool_choice": {"type": "x"}}, "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "response_format"), (RESPONSES, {"truncation": "all"}, "truncation"),
    (RESPONSES, {"reasoning": {"depth": 1}}, "reasoning"),
    (RESPONSES, {"top_logprobs": 2}, "top_logprobs"), (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REJECTED_REQUESTS)))
def test_invalid_and_unsupported_fields_are_rejected_by_name(app, case):
    path, fields, param = REJECTED_REQUESTS[case]
    response = send_request(app, path, BODIES.get(path, {"input": "a"}) | fields)
    assert response.status in (400, 404) and response.json["type"] == "error", response.body
    assert response.error["param"] == param and "\n" not in response.error["message"]


@pytest.mark.parametrize(("path", "field"), [(MESSAGES, "output_config"), (RESPONSES, "text")])
def test_a_format_without_a_schema_is_rejected_with_the_name_of_the_missing_field(app, path, field):
    response = send_request(app, path, BODIES[path] | {field: {"format": {"type": "json_schema", "name": "x"}}})
    assert response.status == 400 and response.error["message"].startswith("schema of "), response.body


@pytest.mark.skipif(not optional_dependencies.is_installed(optional_dependencies.GUIDANCE), reason="needs llguidance")
def test_required_tools_and_response_schemas_are_enforced(app):
    required = {
        MESSAGES: {"tool_choice": {"type": "any"}, "max_tokens": 120},
        RESPONSES: {"tool_choice": "required", "max_output_tokens": 120},
    }
    for path, fields in required.items():
        response = send_request(app, path, BODIES[path] | TOOLS[path] | fields).json
        items = response["content"] if path == MESSAGES else response["output"]
        assert items[0]["name"] == "weather"
    schema = {"type": "array", "items": {"const": 7}, "maxItems": 3}
    text_format = {"type": "json_schema", "schema": schema, "name": "x"}
    for path, fields in ((MESSAGES, {"output_config": {"format": text_format}}), (RESPONSES, {"text": {"format": text_format}})):
        response = send_request(app, path, BODIES[path] | fields).json
        assert json.loads(get_text(path, response)) in ([], [7], [7, 7], [7, 7, 7])


@pytest.mark.parametrize("path", BODIES)
def test_a_failed_stream_ends_with_an_error_event(make_test_app, path):
    events = respond(make_test_app, path, step("a"), ConstraintError("the constraint cannot go on"), stream=True).events
    assert events[-1]["type"] == {"/v1/messages": "error", "/v1/responses": "response.failed"}[path]
    assert "the constraint cannot go on" in json.dumps(events[-1])


def test_anthropic_clients_send_the_key_in_x_api_key(make_test_app):
    app = make_test_app(keys=["secret"])
    for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
        assert send_request(app, MESSAGES, BODIES[MESSAGES], headers=headers).status == status


def test_error_types_depend_on_the_api_of_the_path(make_test_app, app):
    class Failing:
        error = ValueError("within")

        def submit(self, requests, callbacks, client):
            raise self.error

    keyed, failing = make_test_app(keys=("secret",)), make_test_app(scheduler=Failing())
    others = {RESPONSES: "invalid_request_error", CHAT: "invalid_request_error"}
    for send, status, error_type in (
        (lambda path: send_request(app, path, {"model": "nope"}), 404, "not_found_error"),
        (lambda path: send_request(app, path, method="PUT"), 405, "invalid_request_error"),
        (lambda path: send_request(app, path, {"max_tokens": "x"}), 400, "invalid_request_error"),
        (lambda path: send_request(keyed, path, {}), 401, "authentication_error"),
        (lambda path: send_request(app, path, {}, headers={"host": "evil.example"}), 403, "permission_error"),
        (lambda path: send_request(app, path, chunks=[bytes(5 << 20)]), 413, "request_too_large"),
    ):
        for path, expected in ((MESSAGES, error_type), (COUNT, error_type), *others.items()):
            response = send(path)
            assert (response.status, response.error["type"]) == (status, expected), (path, response.body)
    for error, status, error_type, openai_type in (
        (QueueFullError(), 429, "rate_limit_error", "rate_limit_error"),
        (ShutdownError(), 503, "overloaded_error", "server_error"),
        (RuntimeError("within"), 500, "api_error", "server_error"),
    ):
        Failing.error = error
        for path, expected in ((MESSAGES, error_type), (RESPONSES, openai_type)):
            response = send_request(failing, path, BODIES[path])
            assert (response.status, response.error["type"]) == (status, expected) and "within" not in response.error["message"]


def test_fields_without_effect_are_accepted_where_the_api_has_them(app):
    fields = {"prompt_cache_retention": "24h", "prompt_cache_key": "a", "safety_identifier": "b", "service_tier": "auto"}
    assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1, **fields}).status == 200
    assert send_request(app, RESPONSES, BODIES[RESPONSES] | fields).status == 200
    assert (
        send_request(app, RESPONSES, BODIES[RESPONSES] | {"prompt_cache_retention": 1}).error["param"] == "prompt_cache_retention"
    )
    assert send_request(app, MESSAGES, BODIES[MESSAGES] | {"prompt_cache_retention": "24h"}).error["code"] == "unknown_parameter"


@pytest.mark.parametrize("messages", [{}, {"messages": None}, {"messages": []}], ids=["missing", "null", "empty"])
def test_messages_are_needed_next_to_a_system_prompt(app, messages):
    response = send_request(app, MESSAGES, {"max_tokens": 2, "system": "s", **messages})
    assert response.status == 400 and "messages" in response.error["message"]
