"""Requests as agents send them: parts that have no effect here, later system messages, broken calls, limits of -1."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec import Prompt, SpeculativeDecoder
from specdec.server import anthropic_messages, field_validation, generation_response
from specdec.server.field_validation import EXTRAS, APIError, log_once, skip_extra
from specdec.server.generation_fields import ServedModel
from specdec.server.infill import FILE_MARKS, INFILL_MARKS
from specdec.server.llama_infill import parse_infill_request
from specdec.server.ollama import parse_ollama_generate
from specdec.server.openai_chat import parse_chat_request, parse_completion_request
from specdec.server.openai_responses_api import ResponsesFormatter, parse_response_request
from specdec.server.tool_parsers import HermesParser
from specdec.text.chat_template import ChatTemplate
from tests.fakes.asgi import send_request
from tests.fakes.server import CHAT, COMPLETIONS, CONVERSATION, TOOL, FakeScheduler, make_app, step
from tests.tools.hf_folders import FIXTURES
from tests.tools.model_folders import make_chat_folder
from tests.tools.server_requests import COUNT, MESSAGES, RESPONSES, TokenScheduler
from tests.tools.thoughts import SOURCES

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
BROKEN_CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": '{"city": "Os'}}]}
LATER_SYSTEM = [*CONVERSATION, {"role": "assistant", "content": "South."}, {"role": "system", "content": "Be brief."}]


def use_template(decoder: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(decoder.chat_template, "source", (FIXTURES / "chat" / f"{name}.jinja").read_text())


def test_each_rule_of_the_table_is_a_class_a_tuple_or_a_word() -> None:
    for kind, rules in EXTRAS.items():
        for name, rule in rules.items():
            assert isinstance(rule, type | tuple | str), (kind, name)
            assert not kind.endswith("field") or name != "*", "unknown fields are rejected by name"


def test_what_is_left_out_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_validation, "_logged", set())
    for _ in range(2):
        skip_extra("responses tool", "tools[0]", "mcp")
    assert [record.getMessage() for record in caplog.records] == ["left out: responses tool of the type mcp"]
    for value in (None, 5, ["mcp"]):
        with pytest.raises(APIError, match=r"tools\[0\] has the type .*, which is not supported"):
            skip_extra("responses tool", "tools[0]", value)
    for i in range(500):
        log_once(str(i))
    assert len(caplog.records) == field_validation.MAX_LOGGED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {}}]}),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}, {"type": "custom", "name": "f", "input_schema": {}}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "m" * 128}}]}),
        (RESPONSES, {"tools": [{"type": "tool_search"}, {"type": "mcp", "server_label": "x"}, RESPONSES_TOOL]}),
        (RESPONSES, {"input": [{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "w"}]}),
        (RESPONSES, {"input": [
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}, {"role": "user", "content": "hi"},
        ]}),
        (CHAT, {"seed": -1, "top_k": -1, "max_tokens": 3}),
        (CHAT, {"response_format": {"type": "json_schema", "schema": {"type": "boolean"}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "json_schema": None, "schema": {"type": "boolean"}}}}),
        (CHAT, {"chat_template_kwargs": {"documents": [{"title": "a", "text": "<|im_end|>"}], "a": "<|im_end|>"}}),
        (CHAT, {"chat_template_kwargs": {"date": "26 Jul 2024", "list": [1, {"a": None}], "none": None, "x": {"y": 0.5}}}),
    ],
)  # fmt: skip
def test_what_agents_send_along_is_accepted(app: Any, path: str, body: dict[str, Any]) -> None:
    defaults = {CHAT: {"messages": CONVERSATION}, MESSAGES: {"messages": CONVERSATION}, RESPONSES: {"input": "x"}}[path]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    response = send_request(app, path, {limit: 1, **defaults, **body})
    assert response.status == 200, response.body


def test_a_note_stands_for_blocks_of_anthropics_own_tools(app: Any, prompts: list[Any]) -> None:
    blocks = [
        {"type": "text", "text": "Hm."}, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "x"}]},
    ]  # fmt: skip
    messages = [*CONVERSATION, {"role": "assistant", "content": blocks}, {"role": "user", "content": "Why?"}]
    assert send_request(app, MESSAGES, {"messages": messages, "max_tokens": 1}).status == 200
    assert prompts[0][0][1]["content"] == "Hm.\n\n[server_tool_use left out]\n\n[web_search_tool_result left out]"
    messages = [{"role": "user", "content": blocks[1:2]}]
    assert send_request(app, MESSAGES, {"messages": messages, "max_tokens": 1}).status == 400


def test_tools_and_items_that_are_left_out_do_not_reach_the_template(app: Any, prompts: list[Any]) -> None:
    body = {"tools": [{"type": "mcp"}, RESPONSES_TOOL], "input": [{"type": "web_search_call"}, {"role": "user", "content": "x"}]}
    assert send_request(app, RESPONSES, {**body, "max_output_tokens": 1}).status == 200
    messages, tools, _ = prompts[0]
    assert messages == [{"role": "user", "content": "x"}] and [tool["function"]["name"] for tool in tools] == ["weather"]


NAMESPACE = {
    "type": "namespace", "name": "mcp__maps", "description": "Maps.",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}, {"type": "custom"}],
}  # fmt: skip


def test_tools_of_a_namespace_are_called_by_both_names(
    make_test_app: Any, decoder: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codex sends the tools of each MCP server as a namespace, and needs it in calls."""
    text = '<tool_call>\n{"name": "mcp__maps__find", "arguments": {}}\n</tool_call>'
    app = make_test_app(FakeScheduler(Prompt([1], 0.0), step(text), step("", "eos")))
    names = {"name": "find", "namespace": "mcp__maps"}
    items = [{"role": "user", "content": "x"}, CALL | names, {"type": "function_call_output", "call_id": "c1", "output": "y"}]
    choice = {"type": "function", **names}
    body = {"input": items, "tools": [RESPONSES_TOOL, NAMESPACE], "max_output_tokens": 99, "tool_choice": choice}
    (call,) = send_request(app, RESPONSES, body).json["output"]
    assert {key: call[key] for key in ("type", "name", "namespace", "arguments")} == {
        "type": "function_call", **names, "arguments": "{}",
    }  # fmt: skip
    messages, tools, _ = prompts[0]
    assert [tool["function"]["name"] for tool in tools] == ["weather", "mcp__maps__find"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == messages[2]["name"] == "mcp__maps__find"
    events = send_request(app, RESPONSES, body | {"stream": True}).events
    changes = [
        event.get("item", event) for event in events if event["type"].endswith(("item.added", "item.done", "arguments.done"))
    ]
    assert [(each["name"], each["namespace"]) for each in changes] == [("find", "mcp__maps")] * 3


@pytest.mark.parametrize(
    "tools",
    [
        [NAMESPACE, RESPONSES_TOOL | {"name": "mcp__maps__find"}], [NAMESPACE, NAMESPACE | {"name": "mcp__maps__"}],
        [NAMESPACE | {"name": 5}], [NAMESPACE | {"tools": 5}], [NAMESPACE | {"tools": [5]}], [NAMESPACE | {"name": "m" * 128}],
        [NAMESPACE | {"tools": [{"type": "function", "name": ["x"]}]}],
    ],
)  # fmt: skip
def test_wrong_namespaces_are_rejected(app: Any, tools: list[Any]) -> None:
    response = send_request(app, RESPONSES, {"input": "x", "tools": tools, "max_output_tokens": 1})
    assert response.status == 400 and response.error["param"] == "tools"


@pytest.mark.parametrize("is_list", [True, False])
def test_the_billing_header_of_claude_code_does_not_reach_the_model(app: Any, prompts: list[Any], is_list: bool) -> None:
    """It differs in each session, so prompts would have no beginning in common."""
    header = "x-anthropic-billing-header: cc_version=2.1.197.c0d; cc_entrypoint=cli; cch=eb6c6;"
    for texts in ([header, "Be brief.", header], [header], ["Be brief.", header]):
        system = [{"type": "text", "text": text} for text in texts] if is_list else "\n\n".join(texts)
        body = {"system": system, "messages": CONVERSATION, "max_tokens": 1}
        assert send_request(app, MESSAGES, body).status == send_request(app, COUNT, body | {"max_tokens": None}).status == 200
        expected = "\n\n".join(texts[texts[0] == header :])
        for messages, *_ in prompts[-2:]:
            assert messages == [{"role": "system", "content": expected}] * bool(expected) + CONVERSATION


def test_threads_begin_but_are_not_held(app: Any) -> None:
    """Anthropic's clients then send the whole conversation again, if the error has this code."""
    body = {"messages": CONVERSATION, "max_tokens": 1}
    assert send_request(app, MESSAGES, body | {"thread": {"type": "create"}}).status == 200
    response = send_request(app, MESSAGES, body | {"thread": {"type": "continue", "previous_message_id": "msg_1"}})
    assert response.status == 404 and response.error["details"] == {"error_code": "thread_not_found"}
    assert send_request(app, MESSAGES, body | {"thread": {"type": "fork"}}).status == 400
    assert "details" not in send_request(app, CHAT, {"messages": 5}).error


def test_an_encrypted_thought_comes_back(
    make_test_app: Any, decoder: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that store nothing either keep `encrypted_content` alone."""
    monkeypatch.setattr(decoder.chat_template, "source", SOURCES["Qwen3"][0])
    app = make_test_app(FakeScheduler(Prompt([1], 0.0), step("<think>Hm</think>Yes"), step("", "eos")))
    body = {"input": "x", "max_output_tokens": 99, "store": False, "include": ["reasoning.encrypted_content"]}
    for item in (
        send_request(app, RESPONSES, body).json["output"][0],
        send_request(app, RESPONSES, body | {"stream": True}).events[-1]["response"]["output"][0],
    ):
        returned = {"type": "reasoning", "id": item["id"], "summary": [], "encrypted_content": item["encrypted_content"]}
        items = [{"role": "user", "content": "x"}, returned, {"role": "user", "content": "y"}]
        assert send_request(app, RESPONSES, {"input": items, "max_output_tokens": 99}).status == 200
        assert prompts[-1][0][1]["reasoning_content"] == "Hm"
    items[1] = returned | {"encrypted_content": "gAAAAA of another server"}
    assert send_request(app, RESPONSES, {"input": items, "max_output_tokens": 99}).status == 200
    assert [message["content"] for message in prompts[-1][0]] == ["x", "y"]
    assert "encrypted_content" not in send_request(app, RESPONSES, {"input": "x"}).json["output"][0]


def test_a_reference_to_an_item_is_rejected_with_the_way_out(app: Any) -> None:
    """The OpenAI provider of Vercel's AI SDK sends it unless its option `store` is false."""
    items = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "rs_1"}]
    message = send_request(app, RESPONSES, {"input": items}).error["message"]
    assert message.startswith("input[1] has the type 'item_reference', which is not supported") and "store: false" in message


def test_a_note_stands_for_an_image_in_the_output_of_a_tool(app: Any, prompts: list[Any]) -> None:
    output = [{"type": "input_text", "text": "seen: "}, IMAGE]
    items = [{"role": "user", "content": "x"}, CALL, {"type": "function_call_output", "call_id": "c1", "output": output}]
    assert send_request(app, RESPONSES, {"input": items, "tools": [RESPONSES_TOOL], "max_output_tokens": 1}).status == 200
    assert prompts[0][0][-1]["content"] == "seen: [input_image left out]"
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]}
    messages = [*CONVERSATION, use, {"role": "user", "content": [result]}]
    assert send_request(app, MESSAGES, {"messages": messages, "max_tokens": 1}).status == 200
    assert prompts[1][0][-1]["content"] == "[image left out]"
    body = {"input": [{"role": "user", "content": [IMAGE]}]}
    assert send_request(app, RESPONSES, body).error["code"] == "unsupported_parameter", (
        "a question about an image cannot be answered"
    )


def test_leading_system_messages_are_joined(app: Any, prompts: list[Any]) -> None:
    first = [{"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}]
    assert send_request(app, CHAT, {"messages": [*first, *CONVERSATION], "max_tokens": 1}).status == 200
    assert prompts[0][0][0] == {"role": "system", "content": "One.\n\nTwo."} and len(prompts[0][0]) == 2
    assert send_request(app, CHAT, {"messages": [*first[:1], *CONVERSATION], "max_tokens": 1}).status == 200
    assert prompts[1][0][0] == first[0]


def test_later_system_messages_are_the_users_where_the_template_raises(
    app: Any, decoder: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [*LATER_SYSTEM, {"role": "user", "content": "And the wren?"}], "max_tokens": 1}
    assert send_request(app, CHAT, body).status == 200
    assert [each["role"] for each in prompts.pop()[0]] == ["user", "assistant", "system", "user"]
    use_template(decoder, monkeypatch, "qwen35")
    assert send_request(app, CHAT, body).status == 200
    assert prompts[-1][0][-1] == {"role": "user", "content": "Be brief.\n\nAnd the wren?"}
    monkeypatch.setattr(decoder.chat_template, "source", "{{ raise_exception('never') }}")
    assert "never" in send_request(app, CHAT, body).error["message"]


def test_broken_arguments_of_an_earlier_call_reach_the_template(
    app: Any, decoder: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "cut off"}
    body = {"messages": [*CONVERSATION, BROKEN_CALL, result], "tools": [TOOL], "max_tokens": 1}
    assert send_request(app, CHAT, body).status == 200
    assert prompts[-1][0][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'
    use_template(decoder, monkeypatch, "qwen35")  # takes objects alone
    assert send_request(app, CHAT, {**body, "tools": None}).status == 200
    assert prompts[-1][0][1]["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"city": "Os'}
    items = [{"role": "user", "content": "x"}, CALL | {"arguments": "{"}, {"role": "user", "content": "y"}]
    assert send_request(app, RESPONSES, {"input": items, "max_output_tokens": 1}).status == 200


def test_the_schema_of_json_object_holds(app: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra [shape] is not installed")
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    response_format = {"type": "json_object", "schema": schema}
    response = send_request(app, CHAT, {"messages": CONVERSATION, "response_format": response_format, "max_tokens": 40}).json
    assert json.loads(response["choices"][0]["message"]["content"]) == {"n": 7}


def test_minus_one_means_no_limit_and_a_random_seed(make_test_app: Any, decoder: Any) -> None:
    fake = FakeScheduler(Prompt([1], 0.0), step("a", "eos"))
    for path, body in ((CHAT, {"messages": CONVERSATION}), (COMPLETIONS, {"prompt": "a"})):
        for _ in range(2):
            response = send_request(make_test_app(fake), path, {**body, "seed": -1, "top_k": -1, "max_tokens": -1})
            assert response.status == 200, response.body
    assert len({request.sampling.seed for request in fake.requests}) == 4
    for request in fake.requests:
        assert request.sampling.top_k == 0 and request.max_tokens == decoder.n_positions + 1 - len(request.prompt)


def test_template_options_have_a_limited_size(app: Any) -> None:
    response = send_request(app, CHAT, {"messages": CONVERSATION, "chat_template_kwargs": {"a": "x" * 70_000}})
    assert (response.status, response.error["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("n_words", [400, 90_000])
def test_a_prompt_that_is_too_long_is_reported_in_the_words_that_agents_look_for(app: Any, n_words: int) -> None:
    text = "robin " * n_words
    for path in (MESSAGES, COUNT):
        response = send_request(app, path, {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": True})
        words = response.error["message"].split()
        assert (
            response.status == 400
            and words[:4] == ["prompt", "is", "too", "long:"]
            and words[5:] == ["tokens", ">", "320", "maximum"]
        )
        assert int(words[4]) > 320
    response = send_request(app, RESPONSES, {"input": text, "stream": True})
    assert response.status == 200 and [event["type"] for event in response.events] == ["response.created", "response.failed"]
    assert response.events[1]["response"]["error"]["code"] == "context_length_exceeded"
    assert send_request(app, RESPONSES, {"input": text}).status == 400
    assert send_request(app, RESPONSES, {"input": "x", "stream": True, "nonsense": 1}).status == 400


@pytest.mark.parametrize(("path", "event"), [(MESSAGES, "ping"), (RESPONSES, "response.in_progress")])
def test_a_stream_without_output_sends_events(make_test_app: Any, monkeypatch: pytest.MonkeyPatch, path: str, event: str) -> None:
    monkeypatch.setattr(generation_response, "HEARTBEAT_INTERVAL_S", 0.0)
    steps = [step(piece) for piece in ("<tool_call>", '{"name": ', '"weather"')]
    body = {
        MESSAGES: {"messages": CONVERSATION, "max_tokens": 9, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
        RESPONSES: {"input": "x", "tools": [RESPONSES_TOOL]},
    }[path]
    app = make_test_app(FakeScheduler(Prompt([1], 0.0), *steps, step("", "eos")))
    events = send_request(app, path, {**body, "stream": True}).events
    assert [each["type"] for each in events].count(event) >= 3
    if path == RESPONSES:
        assert [each["sequence_number"] for each in events] == list(range(len(events)))


def test_a_long_silence_has_events_that_anthropics_libraries_pass_on(make_test_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They drop pings, and Claude Code gives up after 300 s without another event."""
    assert anthropic_messages.HEARTBEATS_PER_DELTA * generation_response.HEARTBEAT_INTERVAL_S < 200
    monkeypatch.setattr(generation_response, "HEARTBEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr(anthropic_messages, "HEARTBEATS_PER_DELTA", 2)
    app = make_test_app(FakeScheduler(*[Prompt([1], 0.0)] * 9, step("Hm.", "eos")))
    events = send_request(app, MESSAGES, {"messages": CONVERSATION, "max_tokens": 9, "stream": True}).events
    types = [each["type"] for each in events]
    *silent, last = [each for each in events if each["type"] == "message_delta"]
    assert types[0] == "message_start" and len(silent) == types.count("ping") // 2 >= 3
    nothing = {"stop_reason": None, "stop_sequence": None}
    assert all(each["delta"] == nothing and each["usage"] == {"output_tokens": 0} for each in silent)
    assert last["delta"]["stop_reason"] == "end_turn"


@pytest.fixture
def coder(tmp_path: Path) -> ServedModel:
    """Return a model whose tokenizer has the tokens of Qwen 2.5 Coder, which its file does not mark as special."""
    path = make_chat_folder(tmp_path / "coder", marks=(*INFILL_MARKS[0], *FILE_MARKS[0], "<|fim_pad|>"))
    return ServedModel("coder", SpeculativeDecoder(path, "lookup", n_threads=1), None)


def test_a_suffix_fills_in_the_middle(coder: ServedModel, app: Any) -> None:
    begin, end = "def f(n):\n    return ", "\n\nprint(f(3))"
    (request,), _ = parse_completion_request({"prompt": begin, "suffix": end}, coder)
    encode = coder.decoder.tokenizer.encode
    assert request.prompt == [400, *encode(begin), 401, *encode(end), 402]
    (written,), _ = parse_completion_request({"prompt": f"<|fim_prefix|>{begin}<|fim_suffix|>{end}<|fim_middle|>"}, coder)
    assert written.prompt == request.prompt, "as clients with templates of their own write it"
    (infilled,), _ = parse_ollama_generate({"prompt": begin, "suffix": end}, coder)
    assert infilled.prompt == request.prompt
    for body, word in (({"prompt": [5], "suffix": "x"}, "text"), ({"prompt": "a", "suffix": "x" * 10**5}, "context")):
        with pytest.raises(APIError, match=word):
            parse_completion_request(body, coder)
    assert "has no tokens for it" in send_request(app, COMPLETIONS, {"prompt": "a", "suffix": "b"}).error["message"]


def make_infill(tokenizer: Any, before: str, after: str) -> list[int]:
    return [400, *tokenizer.encode(before), 401, *tokenizer.encode(after), 402]


def test_llama_cpps_infill_has_the_files_of_the_project(coder: ServedModel) -> None:
    tokenizer, body = coder.decoder.tokenizer, {"input_prefix": "def f(n):\n", "prompt": "    return ", "input_suffix": "\n"}
    gap = make_infill(tokenizer, "def f(n):\n    return ", "\n")
    (request,), _ = parse_infill_request(body, coder)
    assert request.prompt == gap
    files = [{"filename": f"{name}.py", "text": name * 50} for name in "abc"]
    head = [403, *tokenizer.encode("project\n")]
    parts = [[404, *tokenizer.encode(f"{each['filename']}\n{each['text']}")] for each in files]
    tail = [404, *tokenizer.encode("file\n"), *gap]
    n = coder.decoder.n_positions
    for n_predict, n_left_out in ((1, 0), (n - len(head + tail) - len(parts[1]) - len(parts[2]), 1), (n, 1)):
        (request,), _ = parse_infill_request(body | {"input_extra": files, "n_predict": n_predict}, coder)
        kept = [token for part in parts[n_left_out:] for token in part]
        while n_left_out < 3 and len(head + kept + tail) > max(n - n_predict, n // 2):
            n_left_out += 1
            kept = [token for part in parts[n_left_out:] for token in part]
        assert request.prompt == (head + kept + tail if kept else gap)
    long = {"filename": "long.py", "text": "x" * 10**6}
    (request,), _ = parse_infill_request(body | {"input_extra": [files[0], long, files[1]], "n_predict": 1}, coder)
    assert request.prompt == head + parts[1] + tail


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_infill_ends_at_the_tokens_that_follow_it(coder: ServedModel, is_stream: bool) -> None:
    text = coder.decoder.encode("n * f(n - 1)")
    hints = {"n_indent": 4, "t_max_predict_ms": 500, "samplers": ["top_k", "infill"], "cache_prompt": True, "id_slot": -1}
    for last, stop, expected in (
        ([405], [], ("eos", "")), ([404], [], ("eos", "")), ([], [], ("eos", "")), ([], [" - 1"], ("word", " - 1")),
    ):  # fmt: skip
        app = make_app(coder, TokenScheduler(coder.decoder, [*text, *last, *text], 3))
        body = {"input_prefix": "a", "input_suffix": "b", "stream": is_stream, "stop": stop, **hints}
        response = send_request(app, "/infill", body)
        if is_stream:
            events = [json.loads(each.removeprefix("data: ")) for each in response.body.decode().split("\n\n") if each]
            content, result = "".join(each["content"] for each in events), events[-1]
            assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]
        else:
            content, result = response.json["content"], response.json
        whole = ["n * f(n", ")"][0] if stop else "n * f(n - 1)" * (1 + (not last))
        assert content.strip().replace(") n", ")n") == whole
        assert (result["stop_type"], result["stopping_word"]) == expected and result["timings"]["predicted_n"] > 0
    names = ["content", "timings/prompt_n", "nothing/x"]
    app = make_app(coder, TokenScheduler(coder.decoder, text, 3))
    result = send_request(app, "/infill", {"input_prefix": "a", "response_fields": names}).json
    assert {*result} == {*names[:2]}


@pytest.mark.parametrize(("body", "param"), [
    ({"input_prefix": 5}, "input_prefix"), ({"input_extra": [{"filename": "x"}]}, "input_extra"), ({"n_probs": 3}, "n_probs"),
    ({"input_extra": [5]}, "input_extra"), ({"input_extra": 5}, "input_extra"), ({"grammar": "root"}, "grammar"),
    ({"input_suffix": "x" * 10**5}, "input_suffix"), ({"response_fields": "x"}, "response_fields"),
    ({"n_predict": 0}, "n_predict"), ({"t_max_predict_ms": "x"}, "t_max_predict_ms"), ({"input_prefix": "x " * 400}, "prompt"),
])  # fmt: skip
def test_errors_of_an_infill_name_the_field(coder: ServedModel, body: dict[str, Any], param: str) -> None:
    response = send_request(make_app(coder, FakeScheduler()), "/infill", body)
    assert (response.status, response.error["param"]) == (400, param), response.body


@pytest.mark.parametrize("pattern", ["\\d\\w\\b", "^(?=a).*$", "^(?!a)", "(?<=a)b", "(?<!a)b"])
def test_a_pattern_that_cannot_be_enforced_is_not_where_the_tool_is_not_strict(app: Any, pattern: str) -> None:
    pytest.importorskip("llguidance", reason="the extra [shape] is not installed")
    inner = {"type": "object", "properties": {"s": {"type": "string", "pattern": pattern}}, "required": ["s"]}
    parameters = {"type": "object", "properties": {"o": inner, "pattern": {"type": "string"}}}
    for is_strict, status in ((False, 200), (True, 400)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": is_strict}}
        assert send_request(app, CHAT, {"messages": CONVERSATION, "tools": [tool], "max_tokens": 1}).status == status


def test_a_template_for_tools_is_used_if_tools_are_offered(app: Any, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("no tools", "here", {}, "{# <tool_call> #}tools: {{ tools[0].function.name }}")
    monkeypatch.setattr(decoder, "chat_template", template)
    model = ServedModel("talker", decoder, template)
    for body, prompt, is_parsed in (
        ({"tools": [TOOL]}, "tools: weather", True), ({}, "no tools", False),
        ({"tools": [TOOL], "tool_choice": "none"}, "no tools", False),
    ):  # fmt: skip
        (request,), options = parse_chat_request({"messages": CONVERSATION, **body}, model)
        assert decoder.tokenizer.decode(request.prompt) == prompt
        assert (options.tool_parser is HermesParser) == is_parsed


def test_a_response_continues_the_events_that_were_sent_while_its_model_was_loaded(decoder: Any) -> None:
    model, body = ServedModel("talker", decoder, decoder.chat_template), {"input": "x"}
    requests, options = parse_response_request(body, model)
    for n_loading, types, first in ((0, ["created", "in_progress"], 0), (1, ["in_progress"], 2), (5, ["in_progress"], 6)):
        formatter = ResponsesFormatter(body, requests, options, model, "abc", n_loading)
        loading = b"".join(formatter.format_loading("loading", "abc", i) for i in range(n_loading))
        assert loading.count(b"sequence_number") == first
        data = [json.loads(line[6:]) for line in formatter.format_start().decode().split("\n") if line.startswith("data: ")]
        assert [event["type"] for event in data] == [f"response.{each}" for each in types]
        assert [event["sequence_number"] for event in data] == [*range(first, first + len(data))]
        assert {event["response"]["id"] for event in data} == {"resp_abc"}
