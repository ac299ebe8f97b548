"""Anthropic's interface and OpenAI's newer one: the same texts as a chat's, in events and whole."""

import base64
import gc
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from specdec import Step
from specdec.engine.scheduler import Client, Closed, Full
from specdec.loaders import optional_dependencies
from specdec.server.app import app_of
from specdec.server.auth import Guard
from specdec.server.openai_requests import Model
from specdec.server.tool_parsers.formats import way_of
from specdec.server.tool_parsers.incremental import DEEPEST, value_of
from specdec.text.structured_output import ShapeError
from tests.server.test_openai_api import (  # noqa: F401  (fixtures)
    CHAT,
    DRAWN,
    TAGS,
    TALK,
    TOOL,
    Prompt,
    Script,
    app,
    ask,
    decoder,
    engine,
    service_of,
    serving,
    step,
)

EMBEDDINGS = "/v1/embeddings"
MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
BODIES = {
    MESSAGES: {"messages": TALK, "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5},
    RESPONSES: {"input": "Where did the robin go?", "max_output_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5},
}  # fmt: skip
FORCED = {
    MESSAGES: {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
    RESPONSES: {"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]},
}  # fmt: skip


def text_in(path, answer):
    if path == MESSAGES:
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


@pytest.mark.parametrize("path", BODIES)
def test_the_text_is_that_of_a_chat_whole_and_in_a_stream(app, path):
    own = ask(app, CHAT, {"messages": TALK, **DRAWN}).json
    whole = ask(app, path, BODIES[path])
    assert whole.status == 200, whole.body
    words = own["choices"][0]["message"]["content"]
    assert text_in(path, whole.json) == words and whole.json["model"] == "talker"
    usage = whole.json["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (own["usage"]["prompt_tokens"], own["usage"]["completion_tokens"])
    events = ask(app, path, BODIES[path] | {"stream": True}).events
    kinds = [each["type"] for each in events]
    if path == MESSAGES:
        assert whole.json["stop_reason"] == "max_tokens" and whole.json["role"] == "assistant"
        assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]
        assert "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta") == words
        assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"]
    else:
        assert whole.json["status"] == "incomplete" and whole.json["incomplete_details"] == {"reason": "max_output_tokens"}
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-1] == "response.incomplete" and text_in(path, events[-1]["response"]) == words
        assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == words
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert events[-1]["response"]["usage"] == usage


def told(serving, path, *events, stream=False, **more):
    body = BODIES[path] | FORCED[path] | {"stream": stream} | more
    return ask(serving(Script(Prompt([1], 0.0), *events)), path, body)


CALLING = [step("Let me "), step("see.\n\n"), step(TAGS[:30]), step(TAGS[30:50]), step(TAGS[50:], "eos")]


def test_calls_are_blocks_and_items_with_their_arguments_as_they_come(serving):
    answer = told(serving, MESSAGES, *CALLING).json
    words, call = answer["content"]
    assert words == {"type": "text", "text": "Let me see."} and answer["stop_reason"] == "tool_use"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    events = told(serving, MESSAGES, *CALLING, stream=True).events
    starts = [each for each in events if each["type"] == "content_block_start"]
    assert [(each["index"], each["content_block"]["type"]) for each in starts] == [(0, "text"), (1, "tool_use")]
    stops = [each["index"] for each in events if each["type"] == "content_block_stop"]
    assert stops == [0, 1]
    grown = [each["delta"]["partial_json"] for each in events if each.get("delta", {}).get("type") == "input_json_delta"]
    assert len(grown) > 1 and json.loads("".join(grown)) == {"city": "Oslo"}
    answer = told(serving, RESPONSES, *CALLING).json
    message, call = answer["output"]
    assert message["content"][0]["text"] == "Let me see." and answer["status"] == "completed"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Oslo"})
    events = told(serving, RESPONSES, *CALLING, stream=True).events
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert "".join(dict.fromkeys([kind[0] for kind in kinds])) == "cifo" or len(kinds) > 8
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(each["delta"] for each in events if each["type"].endswith("arguments.delta")) == call["arguments"]
    done = [each["item"] for each in events if each["type"].endswith("item.done")]
    assert [each["status"] for each in done] == ["completed"] * 2
    assert [each["name"] for each in done if each["type"] == "function_call"] == ["weather"]
    for one, two in pairwise([each["output_index"] for each in events if "output_index" in each]):
        assert two in (one, one + 1)


@pytest.mark.parametrize("path", BODIES)
def test_whatever_a_calls_arguments_hold_the_answer_is_json(serving, path):
    """Numbers beyond all floats, and half a character."""
    for call in ('{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}'):
        text = "<tool_call>\n" + call % '{"x": [1e999, -1e999], "y": "a\\ud800"}' + "\n</tool_call>"
        answer = told(serving, path, step(text, "eos"))
        assert answer.status == 200 and b"Infinity" not in answer.body
        (said,) = answer.json["content" if path == MESSAGES else "output"]
        given = said["input"] if path == MESSAGES else json.loads(said["arguments"])
        assert given["y"] == "a\ud800" and len(given["x"]) == 2
        assert told(serving, path, step(text, "eos"), stream=True).status == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [400, 900, 1500, 20_000])
def test_arguments_that_are_nested_beyond_bounds_are_told(serving, path, n):
    """Where they are no value to Python, they are a text."""
    for call in ('{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}'):
        text = "<tool_call>\n" + call % ('{"x": ' + "[" * n + "]" * n + "}") + "\n</tool_call>"
        answer = told(serving, path, step(text, "eos"))
        assert answer.status == 200 and answer.body.count(b"[") >= n


def test_every_python_reads_values_to_one_depth():
    text = "[" * DEEPEST + "]" * DEEPEST
    assert json.dumps(value_of(text)) == text
    with pytest.raises(ValueError, match="too deep"):
        value_of(f"[{text}]")


def test_a_call_that_is_cut_is_told(serving):
    cut = [step(TAGS[:58], "max_tokens")]
    answer = told(serving, MESSAGES, *cut).json
    assert answer["stop_reason"] == "max_tokens" and "weather" in answer["content"][0]["text"]
    answer = told(serving, RESPONSES, *cut).json
    assert answer["status"] == "incomplete"
    assert answer["output"][0]["status"] == "incomplete" and answer["output"][0]["arguments"].startswith('{"ci')
    events = told(serving, RESPONSES, step("I look. "), *cut, stream=True).events
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert [each["status"] for each in done] == ["completed", "incomplete"] and done == events[-1]["response"]["output"]


def test_a_response_repeats_what_was_asked(app):
    asked = {"tool_choice": "none", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 1, **FORCED[RESPONSES]}
    answer = ask(app, RESPONSES, {"input": "x", "instructions": "Be short.", "top_logprobs": 0, **asked}).json
    assert asked.items() <= answer.items() and answer["instructions"] == "Be short." and answer["metadata"] == {}
    assert "cache_write_tokens" in answer["usage"]["input_tokens_details"], "which OpenAI's package wants"
    plain = ask(app, RESPONSES, {"input": "x", "max_output_tokens": 1, "tools": None}).json
    assert (plain["tool_choice"], plain["text"], plain["tools"]) == ("auto", {"format": {"type": "text"}}, [])


def test_what_a_response_repeats_of_its_request_is_json(app):
    body = {"input": "x", "max_output_tokens": 1, "metadata": {"a": "NUMBER"}}
    reply = ask(app, RESPONSES, pieces=[json.dumps(body).replace('"NUMBER"', "-1e999").encode()])
    assert reply.status == 200 and b"Infinity" not in reply.body and reply.json["metadata"]["a"] == -sys.float_info.max


@pytest.mark.parametrize("end", [{"end": "stop", "stop_string": "lo"}, {"end": "eos"}, {"end": "max_tokens"}])
def test_a_call_that_is_cut_is_no_reason_to_call(serving, end):
    """Its arguments are no JSON; one that is whole is a reason as ever. The length has a word of its own."""
    body = {"messages": TALK, "tools": [TOOL], **DRAWN}
    for text, finish in ((TAGS[:58], "stop"), (TAGS + TAGS[:58], "stop"), (TAGS + "lo", "tool_calls"), ("lo", "stop")):
        for size in (1, 58, 500):
            steps = [step(text[i : i + size]) for i in range(0, len(text), size)]
            (choice,) = ask(serving(Script(Prompt([1], 0.0), *steps, step("", **end))), CHAT, body).json["choices"]
            assert choice["finish_reason"] == ("length" if end["end"] == "max_tokens" else finish), text


def test_a_call_that_a_stop_string_cuts_off_before_its_arguments_is_no_reason_to_call(serving, decoder, monkeypatch):
    monkeypatch.setattr(decoder.chat_template, "source", "{# [TOOL_CALLS][ARGS] tools #}{{ messages[0].content }}")
    for end, finish in (({"end": "stop", "stop_string": "{"}, "stop"), ({"end": "eos"}, "tool_calls")):
        script = Script(Prompt([1], 0.0), step("[TOOL_CALLS]weather[ARGS]"), step("", **end))
        (choice,) = ask(serving(script), CHAT, {"messages": TALK, "tools": [TOOL], **DRAWN}).json["choices"]
        assert choice["finish_reason"] == finish and choice["message"]["tool_calls"]


class Ids(Script):
    """An engine whose texts are those tokens, so many a step."""

    def __init__(self, decoder, tokens, size):
        super().__init__()
        self.decoder, self.pieces = decoder, [tokens[i : i + size] for i in range(0, len(tokens), size)]

    def submit(self, jobs, hears, who):
        for job, hear in zip(jobs, hears, strict=True):
            words = self.decoder.team.wording(self.decoder.team.checked(job))
            steps = [Step(each, [], 0, 0.0, 0.0) for each in self.pieces]
            for event in (Prompt([1], 0.0), *steps, Step([], [], 0, 0.0, 0.0, "eos")):
                hear(words.of(event))
        return [self for _ in jobs]


MARKED = [  # special tokens between ^
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


@pytest.mark.parametrize(("template", "text", "said", "city"), MARKED)
def test_what_spells_a_special_token_is_no_mark(serving, decoder, monkeypatch, template, text, said, city):
    """In strings of calls and in answers: by ids."""
    monkeypatch.setattr(decoder.chat_template, "source", template + "{% if tools %}{% endif %}{{ messages[0].content }}")
    specials = {name: 390 + i for i, name in enumerate(way_of(template).shown)}
    monkeypatch.setattr(decoder.tokenizer, "specials", specials)
    parts = [[specials[part]] if i % 2 else decoder.encode(part) if part else [] for i, part in enumerate(text.split("^"))]
    tokens = [token for part in parts for token in part]
    for size in (1, 4, len(tokens)):
        body = {"messages": TALK, "tools": [TOOL], "specdec": True, "stop": ["<|never"]}
        reply = ask(serving(Ids(decoder, tokens, size)), CHAT, body)
        assert reply.status == 200, reply.body
        message = reply.json["choices"][0]["message"]
        assert {name: message[name] for name in said} == said
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert calls == ([{"city": city}] if city else []) and b"\\ud" not in reply.body


def test_a_text_ends_at_a_stop_string_that_holds_marks(serving, decoder, monkeypatch):
    marks = "{# <|channel|><|message|> #}"
    monkeypatch.setattr(decoder.chat_template, "source", marks + "{{ messages[0].content }}")
    specials = {name: 390 + i for i, name in enumerate(way_of(marks).shown)}
    monkeypatch.setattr(decoder.tokenizer, "specials", specials)
    parts = ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant"]
    tokens = [token for part in parts for token in ([specials[part]] if part in specials else decoder.encode(part))]
    for stop in ("<|end|>", "<|end|><|start|>", "a<|end|>"):
        answer = ask(serving(Ids(decoder, tokens, 1)), MESSAGES, BODIES[MESSAGES] | {"stop_sequences": [stop]}).json
        assert answer["stop_sequence"] == stop
        assert "".join(block["thinking"] for block in answer["content"]) == "a".removesuffix(stop[0])


def test_the_stop_string_is_named(app, decoder):
    own = ask(app, CHAT, {"messages": TALK, **DRAWN, "max_tokens": 40}).json["choices"][0]["message"]["content"]
    middle = len(own) // 2
    stop = own[middle : middle + 3]
    body = BODIES[MESSAGES] | {"max_tokens": 40}
    whole = ask(app, MESSAGES, body | {"stop_sequences": ["never there", stop, "nor this"]}).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert text_in(MESSAGES, whole) == own[: own.index(stop)]
    assert ask(app, MESSAGES, body | {"stop_sequences": ["never there"]}).json["stop_reason"] in ("end_turn", "max_tokens")


def test_what_went_before_reaches_the_template(app, decoder, monkeypatch):
    seen, encode = [], decoder.encode_chat
    monkeypatch.setattr(
        decoder, "encode_chat", lambda messages, tools, options: seen.append((messages, tools)) or encode(messages, tools)
    )
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}], "is_error": True},
            {"type": "text", "text": "So?"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind."}]
    body = {"messages": talk, "system": system, "max_tokens": 1, **FORCED[MESSAGES], "metadata": {"user_id": "a"}}
    assert ask(app, MESSAGES, body).status == 200
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "m"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "toolu_1", "name": "weather", "arguments": '{"city": "Oslo"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "toolu_1", "output": "Error: rain"}, {"role": "user", "content": "So?"},
    ]  # fmt: skip
    more = {"instructions": "Be short.", "store": False, "include": ["reasoning.encrypted_content"], "reasoning": None}
    assert ask(app, RESPONSES, {"input": items, "max_output_tokens": 1, **FORCED[RESPONSES], **more}).status == 200
    (one, tools), (two, same) = seen
    assert one == two and tools == same == [TOOL | {"function": {"name": "weather", "parameters": {"type": "object"}}}]
    assert one[0] == {"role": "system", "content": "Be short.\n\nBe kind."}
    assert one[2]["reasoning_content"] == "hm" and one[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert one[3] == {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "Error: rain"}


def test_tokens_are_counted(app):
    body = {"messages": TALK, "model": "talker"}
    assert ask(app, COUNT, body).json == {
        "input_tokens": ask(app, MESSAGES, body | {"max_tokens": 1}).json["usage"]["input_tokens"]
    }
    assert ask(app, COUNT, {"messages": [*TALK, {"role": "assistant", "content": "South"}]}).status == 200
    assert ask(app, COUNT, {"messages": []}).status == 400


@pytest.mark.parametrize("pooling", ["", "mean", "last", "cls"])
def test_embeddings_are_the_models_last_hidden_states(app, decoder, monkeypatch, pooling):
    monkeypatch.setattr(decoder, "team", replace(decoder.team, source=SimpleNamespace(pooling=pooling)))
    texts = ["The robin flew away. " * 12, "One", "One, two, three"]
    model = decoder.target.seat([decoder.target.config.n_layers + 1])
    expected = []
    for text in texts:
        tokens = decoder.encode(text)
        model.forward(tokens, 1)
        states = model.hidden(tokens, 0).astype(np.float64)
        vector = {"": states.mean(0), "mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
        expected.append(vector / np.linalg.norm(vector))
    reply = ask(app, EMBEDDINGS, {"input": texts, "model": "talker", "user": "x"}).json
    assert [each["index"] for each in reply["data"]] == [0, 1, 2] and reply["object"] == "list"
    vectors = np.array([each["embedding"] for each in reply["data"]])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert reply["usage"] == {key: sum(len(decoder.encode(text)) for text in texts) for key in ("prompt_tokens", "total_tokens")}
    told = ask(app, EMBEDDINGS, {"input": [decoder.encode(text) for text in texts], "encoding_format": "base64"}).json["data"]
    again = np.array([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in told])
    np.testing.assert_array_equal(again, vectors.astype(np.float32))
    (short,) = ask(app, EMBEDDINGS, {"input": texts[0], "dimensions": 8}).json["data"]
    np.testing.assert_allclose(short["embedding"], vectors[0, :8] / np.linalg.norm(vectors[0, :8]), atol=1e-6)


def test_embeddings_are_made_between_others_passes_and_end_with_their_client(app, decoder, engine, caplog):
    """Beside answers, which stay what they are; and a client that leaves waits for nobody."""
    own = ask(app, CHAT, {"messages": TALK, **DRAWN, "max_tokens": 60}).json["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(8) as pool:
        bodies = [(CHAT, {"messages": TALK, **DRAWN, "max_tokens": 60}), (EMBEDDINGS, {"input": ["The robin " * 40] * 9})] * 4
        replies = list(pool.map(lambda each: ask(app, *each), bodies))
    assert {reply.json["choices"][0]["message"]["content"] for reply in replies[::2]} == {own}
    assert len({reply.body for reply in replies[1::2]}) == 1
    with pytest.raises(ConnectionResetError):
        embeddings = app_of(service_of(Model("talker", decoder, None), engine))
        ask(bare(embeddings), EMBEDDINGS, {"input": ["The robin " * 60] * 500}, leaves_after=0)
    assert ask(app, EMBEDDINGS, {"input": "x"}).status == 200
    gc.collect()
    assert not caplog.records, "what nobody waits for is no trouble"


def bare(inner):
    """An app whose errors are seen."""

    async def outer(scope, receive, send):
        await inner({**scope, "who": Client(), "notes": []}, receive, send)

    return outer


REFUSED = [
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
    *((path, {"tools": FORCED[path]["tools"][0]}, "tools") for path in BODIES),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"), (MESSAGES, {"tool_choice": "auto"}, "tool_choice"),
    (MESSAGES, {"thinking": {"type": "maybe"}}, "thinking"), (MESSAGES, {"system": 5}, "system"),
    (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers"), (MESSAGES, {"stop_sequences": [1]}, "stop"),
    (MESSAGES, {"chat_template_kwargs": 5, "thinking": {"type": "enabled"}}, "chat_template_kwargs"),
    (MESSAGES, {"messages": [*TALK, {"role": "assistant", "content": "South"}]}, "messages"),
    (MESSAGES, {"messages": [*TALK, {"role": "assistant", "content": "South"}, {"role": "user", "content": []}]}, "messages"),
    (MESSAGES, {"output_config": {"x": 1}}, "output_config"), (MESSAGES, {"model": "claude"}, "model"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"), (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"background": True}, "background"), (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": None}, "messages"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"), (RESPONSES, {"n": 2}, "n"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"}]}, "messages"),
    (RESPONSES, {"tools": [{"type": "mcp", "name": "a"}]}, "tools"),
    (RESPONSES, {"tool_choice": {"type": "x"}}, "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "response_format"), (RESPONSES, {"truncation": "all"}, "truncation"),
    (RESPONSES, {"reasoning": {"depth": 1}}, "reasoning"),
    (RESPONSES, {"top_logprobs": 2}, "top_logprobs"), (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_not_done_is_refused_by_name(app, case):
    path, more, param = REFUSED[case]
    reply = ask(app, path, BODIES.get(path, {"input": "a"}) | more)
    assert reply.status in (400, 404) and reply.json["type"] == "error", reply.body
    assert reply.error["param"] == param and "\n" not in reply.error["message"]


@pytest.mark.skipif(not optional_dependencies.has(optional_dependencies.GUIDANCE), reason="needs llguidance")
def test_tools_are_forced_and_answers_shaped(app):
    wants = {
        MESSAGES: {"tool_choice": {"type": "any"}, "max_tokens": 120},
        RESPONSES: {"tool_choice": "required", "max_output_tokens": 120},
    }
    for path, more in wants.items():
        answer = ask(app, path, BODIES[path] | FORCED[path] | more).json
        called = answer["content"] if path == MESSAGES else answer["output"]
        assert called[0]["name"] == "weather"
    schema = {"type": "array", "items": {"const": 7}, "maxItems": 3}
    shape = {"type": "json_schema", "schema": schema, "name": "x"}
    for path, more in ((MESSAGES, {"output_config": {"format": shape}}), (RESPONSES, {"text": {"format": shape}})):
        answer = ask(app, path, BODIES[path] | more).json
        assert json.loads(text_in(path, answer)) in ([], [7], [7, 7], [7, 7, 7])


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_fails_says_so(serving, path):
    events = told(serving, path, step("a"), ShapeError("the shape cannot go on"), stream=True).events
    assert events[-1]["type"] == {"/v1/messages": "error", "/v1/responses": "response.failed"}[path]
    assert "the shape cannot go on" in json.dumps(events[-1])


@pytest.mark.parametrize("n_bodies", [400, pytest.param(2500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("path", [CHAT, *BODIES, COUNT, EMBEDDINGS])
def test_no_body_is_answered_by_a_failure(app, path, n_bodies):
    """Any value in any field: an answer, or a refusal in a line that names a parameter or says what is wrong."""
    rng = random.Random(path)
    body = {"input": "a", "dimensions": 3} if path == EMBEDDINGS else BODIES.get(path) or BODIES[MESSAGES]
    names = [*body, "system", "tools", "tool_choice", "thinking", "output_config", "instructions", "text", "reasoning", "stop",
             "stop_sequences", "response_format", "logit_bias", "min_p", "repetition_penalty", "chat_template_kwargs", "metadata",
             "include", "n", "stream", "parallel_tool_calls"]  # fmt: skip
    statuses = set()
    for _ in range(n_bodies):
        one = json.loads(json.dumps(body | (FORCED.get(path, {}) if rng.random() < 0.5 else {})))
        for _ in range(rng.randrange(1, 3)):
            one[rng.choice(names)] = some(rng, 0)
        if path != EMBEDDINGS:
            one["max_output_tokens" if path == RESPONSES else "max_tokens"] = 1
        reply = ask(app, path, one)
        statuses.add(reply.status)
        assert reply.status in (200, 400, 404), (one, reply.body)
        if reply.status != 200:
            assert reply.error["message"] and "\n" not in reply.error["message"] and len(reply.error["message"]) < 400, reply.body
    assert {200, 400} <= statuses


WORDS = [
    "auto", "required", "any", "tool", "none", "text", "json_object", "json_schema", "user", "assistant", "function", "weather",
    "", "input_text", "tool_use", "tool_result", "thinking", "message", "function_call", "function_call_output", "reasoning",
    "{}",    "\u00e9\U0001f600", "enabled", "high",
]  # fmt: skip
KEYS = [
    "type", "name", "role", "content", "text", "function", "format", "schema", "parameters", "input_schema", "arguments",
    "call_id", "id", "tool_use_id", "input", "output", "effort", "properties", "5", "summary", "strict",
    "json_schema", "description",
]  # fmt: skip


def some(rng, depth):
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return rng.choice(WORDS)
    if kind < 5:
        return rng.choice([None, True, False, 0, 1, -1, 0.5, 1e300, 2**70])
    if kind < 6:
        return [some(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): some(rng, depth + 1) for _ in range(rng.randrange(4))}


def test_an_anthropic_client_brings_its_key_its_own_way(serving, decoder, engine):
    service = service_of(Model("talker", decoder, decoder.chat_template), engine)
    guarded = Guard(app_of(service), ["secret"], {"localhost"}, lambda line: None)
    for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
        assert ask(guarded, MESSAGES, BODIES[MESSAGES], headers=headers).status == status


def test_errors_have_anthropics_types_at_its_paths_and_openais_elsewhere(serving, app):
    class Failing:
        error = ValueError("within")

        def submit(self, jobs, hears, who):
            raise self.error

    keyed, failing = serving(keys=("secret",)), serving(engine=Failing())
    others = {RESPONSES: "invalid_request_error", CHAT: "invalid_request_error"}
    for ask_at, status, kind in (
        (lambda path: ask(app, path, {"model": "nope"}), 404, "not_found_error"),
        (lambda path: ask(app, path, method="PUT"), 405, "invalid_request_error"),
        (lambda path: ask(app, path, {"max_tokens": "x"}), 400, "invalid_request_error"),
        (lambda path: ask(keyed, path, {}), 401, "authentication_error"),
        (lambda path: ask(app, path, {}, headers={"host": "evil.example"}), 403, "permission_error"),
        (lambda path: ask(app, path, pieces=[bytes(5 << 20)]), 413, "request_too_large"),
    ):
        for path, expected in ((MESSAGES, kind), (COUNT, kind), *others.items()):
            reply = ask_at(path)
            assert (reply.status, reply.error["type"]) == (status, expected), (path, reply.body)
    for error, status, kind, other in (
        (Full(), 429, "rate_limit_error", "rate_limit_error"),
        (Closed(), 503, "overloaded_error", "server_error"),
        (RuntimeError("within"), 500, "api_error", "server_error"),
    ):
        Failing.error = error
        for path, expected in ((MESSAGES, kind), (RESPONSES, other)):
            reply = ask(failing, path, BODIES[path])
            assert (reply.status, reply.error["type"]) == (status, expected) and "within" not in reply.error["message"]


def test_fields_of_no_effect_are_taken_where_the_real_interface_has_them(app):
    more = {"prompt_cache_retention": "24h", "prompt_cache_key": "a", "safety_identifier": "b", "service_tier": "auto"}
    assert ask(app, CHAT, {"messages": TALK, "max_tokens": 1, **more}).status == 200
    assert ask(app, RESPONSES, BODIES[RESPONSES] | more).status == 200
    assert ask(app, RESPONSES, BODIES[RESPONSES] | {"prompt_cache_retention": 1}).error["param"] == "prompt_cache_retention"
    assert ask(app, MESSAGES, BODIES[MESSAGES] | {"prompt_cache_retention": "24h"}).error["code"] == "unknown_parameter"
