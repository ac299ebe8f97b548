"""The API without a socket: OpenAI's chat and completions, rejected requests, and access control."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import Prompt, Sampling, SpeculativeDecoder
from specdec.cli import serve
from specdec.engine.metrics import BUCKET_BOUNDS_S, Metrics, format_prometheus
from specdec.events import TokenLogprob
from specdec.server import access_control, body_limits, generation_response
from specdec.server import app as server
from specdec.server.engine_thread import EngineThread, QueueFullError, ShutdownError
from specdec.server.field_validation import MAX_BODY_DEPTH, APIError, parse_body
from specdec.server.generation_fields import ServedModel, wrap_encoding_errors
from specdec.server.json_values import JsonScanner, encode_json
from specdec.server.model_manager import LOCAL_DIRECTORY_PATTERN
from specdec.server.openai_chat import MessageParser
from specdec.server.response_formatter import format_sse_event
from specdec.text.grammar_worker import WorkerLostError
from specdec.text.structured_output import ConstraintError
from tests.fakes.asgi import Response, send_request
from tests.fakes.server import CHAT, COMPLETIONS, CONVERSATION, SAMPLING_FIELDS, TOOL, FakeScheduler, make_app, step
from tests.tools.server_requests import random_json
from tests.tools.tool_calls import TAGGED_CALL
from tests.tools.waiting import wait_until

SAMPLING = Sampling(temperature=0.8, top_p=0.9, seed=5)


def test_responses_and_streams_equal_library_output(app: Any, decoder: SpeculativeDecoder) -> None:
    expected = decoder.answer(CONVERSATION, 12, SAMPLING)
    complete = send_request(app, CHAT, {"messages": CONVERSATION, "model": "talker", "specdec": True, **SAMPLING_FIELDS})
    assert complete.status == 200 and complete.json["object"] == "chat.completion" and complete.json["model"] == "talker"
    (choice,) = complete.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == ("length" if expected.statistics.stop_reason == "max_tokens" else "stop")
    n = expected.statistics.n_prompt, expected.statistics.n_generated
    usage = complete.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (*n, sum(n))
    details = usage["completion_tokens_details"]  # drafts depend on what the client has generated before
    assert details["accepted_prediction_tokens"] == complete.json["specdec"]["accepted"]
    stream = send_request(
        app, CHAT, {"messages": CONVERSATION, "stream": True, "stream_options": {"include_usage": True}, **SAMPLING_FIELDS}
    )
    assert stream.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, last_usage = stream.events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in (*middle, last)) == expected.text
    assert [event["choices"][0]["finish_reason"] for event in middle] == [None] * len(middle)
    assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert last_usage["choices"] == [] and last["usage"] is None
    details = {name: usage[name] for name in ("completion_tokens_details", "prompt_tokens_details")}
    assert last_usage["usage"] | details == usage
    assert len({event["id"] for event in stream.events}) == 1


def test_completions_of_texts_and_ids_have_seeds_of_their_own(app: Any, decoder: SpeculativeDecoder) -> None:
    prompts = ["One, two,", decoder.encode("The robin")]
    seeds = [Sampling(temperature=0.8, top_p=0.9, seed=seed) for seed in (5, 6)]
    expected = [decoder.generate(prompt, 12, sampling).continuation for prompt in prompts for sampling in seeds]
    for prompt, texts in ((prompts, expected), (prompts[0], expected[:2]), (prompts[1], expected[2:])):
        response = send_request(app, COMPLETIONS, {"prompt": prompt, "n": 2, **SAMPLING_FIELDS})
        assert [choice["text"] for choice in response.json["choices"]] == texts
        assert [choice["index"] for choice in response.json["choices"]] == list(range(len(texts)))
    events = send_request(app, COMPLETIONS, {"prompt": prompts, "n": 2, "stream": True, **SAMPLING_FIELDS}).events
    streamed = [""] * 4
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == expected
    assert len(send_request(app, COMPLETIONS, {}).json["choices"]) == 1


def test_greedy_sampling_by_temperature_top_k_or_top_p(app: Any, decoder: SpeculativeDecoder) -> None:
    expected = decoder.answer(CONVERSATION, 12, temperature=0).text
    for fields in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0, "top_k": 5}):
        response = send_request(app, CHAT, {"messages": CONVERSATION, "max_completion_tokens": 12, **fields})
        assert response.json["choices"][0]["message"]["content"] == expected


def test_missing_fields_use_the_default_sampling_of_the_server(decoder: SpeculativeDecoder) -> None:
    fake = FakeScheduler(Prompt([1], 0.0), step("a", "eos"))
    model = ServedModel("talker", decoder, decoder.chat_template, Sampling(0.6, 20, 0.8))
    app = make_app(model, fake)
    for body in ({}, {"temperature": 0.1}, {"top_p": 0.5, "top_k": 3}, {"top_p": 0}):
        assert send_request(app, COMPLETIONS, {"seed": 1, **body}).status == 200
    samplings = [(request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) for request in fake.requests]
    assert samplings == [(0.6, 20, 0.8), (0.1, 20, 0.8), (0.6, 3, 0.5), (0.6, 1, 0.0)]


def test_default_sampling_prefers_options_to_recommendations(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(recommended: dict[str, float], **options: Any) -> tuple[float, int, float]:
        monkeypatch.setattr(serve, "get_recommended_sampling", lambda *_: recommended)
        sampling = serve.describe_model(serve.ServeRequest(**options), decoder, "talker").default_sampling
        return sampling.temperature, sampling.top_k, sampling.top_p

    assert resolve({}) == (0.7, 0, 0.9)
    assert resolve({"temperature": 0.6, "top_k": 20}) == (0.6, 20, 0.9)
    assert resolve({"temperature": 0.6, "top_p": 0.8}, served_temperature=0.0, served_top_k=5) == (0.0, 5, 0.8)


def test_template_options_reach_the_template(
    app: Any, decoder: SpeculativeDecoder, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [*CONVERSATION, {"role": "assistant", "content": "South.", "reasoning_content": "Birds fly."}, *CONVERSATION]
    for body in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False, "n": 3}}, {}):
        assert send_request(app, CHAT, {"messages": messages, "max_tokens": 1, **body}).status == 200
    assert [options for *_, options in prompts] == [{"enable_thinking": False}, {"enable_thinking": False, "n": 3}, {}]
    assert prompts[0][0][1]["reasoning_content"] == "Birds fly."
    monkeypatch.setattr(decoder.chat_template, "source", "{{ reasoning_effort }}{% if enable_thinking %}!{% endif %}x")
    assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1, "reasoning_effort": "high"}).status == 200
    assert prompts[-1][2] == {"reasoning_effort": "high", "enable_thinking": True}
    monkeypatch.setattr(decoder.chat_template, "source", "{{ reasoning_strength }}x")
    assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1, "reasoning_effort": "low"}).status == 200
    assert prompts[-1][2] == {"reasoning_strength": "low"}
    monkeypatch.setattr(decoder.chat_template, "source", "{% if thinking %}!{% endif %}{{ messages[0].content }}")
    assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1, "reasoning_effort": "none"}).status == 200
    assert prompts[-1][2] == {"enable_thinking": False, "thinking": False}
    monkeypatch.setattr(decoder.chat_template, "source", "{{ thinking_budget }}{{ messages[0].content }}")
    assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1, "reasoning_effort": "none"}).status == 200
    assert prompts[-1][2] == {"enable_thinking": False, "thinking_budget": 0}
    with pytest.raises(ValueError, match=r"role of messages\[0\] is 'bot'; expected one of system, user, assistant"):
        decoder.encode_chat([{"role": "bot", "content": "x"}])


def test_a_killed_worker_is_a_server_error(app: Any, monkeypatch: Any) -> None:
    def raise_lost(*_: Any) -> Any:
        raise WorkerLostError("the system has ended it")

    monkeypatch.setattr("specdec.text.structured_output.try_grammar", raise_lost)
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "lost"}}}
    response = send_request(app, CHAT, {"messages": CONVERSATION, "response_format": response_format})
    assert (response.status, response.error["type"], "retry-after" in response.headers) == (503, "server_error", True)


def test_an_unsatisfiable_schema_is_rejected_before_the_first_byte(app: Any) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": endless}}
    for is_stream in (False, True):
        response = send_request(app, CHAT, {"messages": CONVERSATION, "response_format": response_format, "stream": is_stream})
        assert (response.status, response.error["param"]) == (400, "response_format") and "cannot continue" in response.error[
            "message"
        ]


def test_a_constraint_error_is_reported_with_its_message(make_test_app: Callable[..., Any]) -> None:
    app = make_test_app(
        FakeScheduler(Prompt([1], 0.0), step("a"), ConstraintError("the constraint cannot go on: too many items"))
    )
    complete = send_request(app, COMPLETIONS, {})
    assert (complete.status, complete.error["param"]) == (400, "response_format")
    first, error = send_request(app, COMPLETIONS, {"stream": True}).events
    assert first["choices"][0]["text"] == "a" and error["error"]["message"] == "the constraint cannot go on: too many items"


def test_a_stream_without_output_sends_heartbeats(make_test_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_response, "HEARTBEAT_INTERVAL_S", 0.0)
    steps = [step(piece) for piece in ("<tool_call>", '{"name": ', '"weather"')]
    app = make_test_app(FakeScheduler(Prompt([1], 0.0), *steps, step("", "eos")))
    response = send_request(app, CHAT, {"messages": CONVERSATION, "tools": [TOOL], "stream": True})
    assert response.body.count(b": waiting") >= 2


def test_request_ids_are_logged_and_trailing_slashes_do_not_redirect(make_test_app: Callable[..., Any]) -> None:
    log = list[str]()
    app = make_test_app(log=log)
    for path, status in (("/v1/models/", 200), ("/v1/nothing/", 404), ("/v1/models", 200)):
        response = send_request(app, path)
        assert response.status == status and "location" not in response.headers
        assert response.headers["x-request-id"] in log[-1]
    send_request(app, COMPLETIONS, {"top_k": "x"})
    assert "invalid_value top_k" in log[-1]


def test_large_responses_are_encoded_and_split() -> None:
    value = {"choices": [{"logprobs": [{"token": "a", "top": [["b", -1.5]] * 20} for _ in range(3000)]}]}
    assert json.loads(encode_json(value)) == value and encode_json({"\u00e9": 1}) == '{"\u00e9":1}'.encode()


def test_json_of_any_text_is_one_line_also_for_clients_that_split_by_unicode() -> None:
    value = {"text": "a\x85b\u2028c\u2029d\n\x1ce\ud800"}
    for encoded, prefix, suffix in ((encode_json(value), b"", b""), (format_sse_event(value), b"data: ", b"\n\n")):
        line = encoded.removeprefix(prefix).removesuffix(suffix)
        assert len(line.decode().splitlines()) == 1 and json.loads(line) == value
    assert [len(piece) for piece in generation_response.split_body(bytes(150_000))] == [65536, 65536, 18928]


def test_a_stop_string_ends_the_output_before_it(app: Any, decoder: SpeculativeDecoder) -> None:
    expected = decoder.answer(CONVERSATION, 12, SAMPLING).text
    stop = expected[len(expected) // 2 :][:2]
    response = send_request(app, CHAT, {"messages": CONVERSATION, "stop": [stop, "never"], **SAMPLING_FIELDS}).json["choices"][0]
    assert (response["message"]["content"], response["finish_reason"]) == (expected[: expected.index(stop)], "stop")


def test_draft_details_add_up_to_the_output(app: Any) -> None:
    messages = [{"role": "user", "content": "again and again " * 12}]
    body = {"messages": messages, "stream": True, "specdec": True, "temperature": 0, "max_tokens": 40}
    events = [event for event in send_request(app, CHAT, body).events if "specdec" in event]
    for event in events:
        runs = event["specdec"]["runs"]
        assert "".join(text for _, text in runs) == event["choices"][0]["delta"].get("content", "")
        assert {source for source, _ in runs} <= {"guessed", "own"}
    last = events[-1]["specdec"]
    assert last["tokens"] == 40 and last["accepted"] <= last["drafted"] and last["passes"] <= 40
    assert not any("specdec" in event for event in send_request(app, CHAT, body | {"specdec": False}).events)


def test_text_parts_and_developer_messages_equal_plain_ones(app: Any) -> None:
    parts = [{"type": "text", "text": "Where did "}, {"type": "text", "text": "the robin go?"}]
    plain = [{"role": "system", "content": "Sing."}, *CONVERSATION]
    equivalent = [{"role": "developer", "content": "Sing."}, {"role": "user", "content": parts, "name": "Ann"}]
    choices = [
        send_request(app, CHAT, {"messages": messages, **SAMPLING_FIELDS}).json["choices"] for messages in (plain, equivalent)
    ]
    assert choices[0] == choices[1]


def test_a_prediction_does_not_change_the_output(app: Any) -> None:
    plain = send_request(app, CHAT, {"messages": CONVERSATION, **SAMPLING_FIELDS}).json["choices"]
    prediction = {"type": "content", "content": plain[0]["message"]["content"]}
    assert (
        send_request(app, CHAT, {"messages": CONVERSATION, "prediction": prediction, **SAMPLING_FIELDS}).json["choices"] == plain
    )


def test_structured_output_equals_library_output(app: Any, decoder: SpeculativeDecoder) -> None:
    pytest.importorskip("llguidance", reason="the extra [shape] is not installed")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    expected = decoder.answer(CONVERSATION, 12, SAMPLING, constraint=decoder.json_schema(schema)).text
    choice = send_request(app, CHAT, {"messages": CONVERSATION, "response_format": response_format, **SAMPLING_FIELDS}).json[
        "choices"
    ][0]
    assert choice["message"]["content"] == expected and json.loads(expected)["n"] in (1, 22, 333)
    any_object = send_request(
        app, CHAT, {"messages": CONVERSATION, "response_format": {"type": "json_object"}, **SAMPLING_FIELDS}
    ).json["choices"][0]
    assert any_object["message"]["content"].startswith("{")
    for invalid in ({"type": "nonsense"}, {"pattern": "("}, {"$ref": "http://x/y"}):
        response_format = {"type": "json_schema", "json_schema": {"schema": invalid}}
        assert (
            send_request(app, CHAT, {"messages": CONVERSATION, "response_format": response_format}).error["param"]
            == "response_format"
        )


REJECTED_REQUESTS: list[tuple[str, dict[str, Any], str, int, str]] = [
    *[
        (path, {name: value}, name, 400, "unsupported_parameter")
        for path in (CHAT, COMPLETIONS)
        for name, value in (
            ("store", True), ("suffix", "x"), ("functions", [{}]), ("echo", True), ("typical_p", 0.5), ("mirostat", 2),
            ("ignore_eos", True), ("best_of", 2),
        )
    ],
    *[
        (CHAT, {name: value}, name, 400, "invalid_value")
        for name, value in (
            ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("top_p", 2), ("top_p", "x"), ("top_k", -2),
            ("top_k", 1.5), ("seed", 2**63), ("seed", "x"), ("max_tokens", 0), ("max_completion_tokens", -5), ("n", 0), ("n", 17),
            ("n", True), ("stop", 5), ("stop", ["a"] * 17), ("stop", ["x" * 1001]), ("stop", [1]), ("stream", "yes"),
            ("stream_options", 1), ("logprobs", 2), ("top_logprobs", 2), ("user", 1), ("messages", []), ("messages", "hi"),
            ("messages", [1]), ("messages", [{"role": "robin", "content": "x"}]), ("messages", [{"role": "user"}]),
            ("messages", [{"role": "tool", "tool_call_id": 1, "content": "x"}]),
            ("tools", {}), ("tools", [1]), ("tools", [{"type": "function"}]),
            ("tools", [{"type": "function", "function": {"name": "a b"}}]), ("specdec", 1), ("prediction", "x"),
            ("min_p", 2), ("min_p", "x"), ("repetition_penalty", 0), ("repeat_penalty", 1000), ("presence_penalty", True),
            ("frequency_penalty", -101), ("frequency_penalty", False), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}),
            ("logit_bias", {"1": 101}), ("logit_bias", {"999999": 1}), ("logit_bias", [1]), ("logit_bias", {"1" * 5000: 1}),
            ("prediction", {"type": "other"}), ("response_format", {"type": "xml"}), ("response_format", "json"),
        )
    ],
    (CHAT, {"messages": None}, "messages", 400, "missing_parameter"),
    (CHAT, {"model": "gpt-4"}, "model", 404, "model_not_found"),
    (CHAT, {"nonsense": 1}, "nonsense", 400, "unknown_parameter"),
    (CHAT, {"stream_options": {"x": 1}}, "x", 400, "unknown_parameter"),
    (CHAT, {"tool_choice": "any", "tools": [TOOL]}, "tool_choice", 400, "invalid_value"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", 400, "invalid_value"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools", 400, "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", 400, "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "audio": {"id": 1}}]}, "messages", 400, "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": "robin " * 400}]}, "messages", 400, "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "robin " * 90000}]}, "messages", 400, "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "robin " * 400}, "prompt", 400, "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "robin " * 90000}, "prompt", 400, "context_length_exceeded"),
    (COMPLETIONS, {"prompt": [5] * 400}, "prompt", 400, "context_length_exceeded"),
    (COMPLETIONS, {"prompt": [10**9]}, "prompt", 400, "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"messages": True}}, "chat_template_kwargs", 400, "invalid_value"),
    (CHAT, {"reasoning_effort": "very much"}, "reasoning_effort", 400, "invalid_value"),
    (COMPLETIONS, {"reasoning_effort": "low"}, "reasoning_effort", 400, "unknown_parameter"),
    (COMPLETIONS, {"prompt": [[1], "x", 1.5]}, "prompt", 400, "invalid_value"),
    (COMPLETIONS, {"prompt": ["x"] * 9, "n": 2}, "n", 400, "invalid_value"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", 400, "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "status", "code"), REJECTED_REQUESTS)
def test_invalid_and_unsupported_fields_are_rejected_by_name(
    app: Any, path: str, body: Any, param: str, status: int, code: str
) -> None:
    response = send_request(app, path, ({"messages": CONVERSATION} if path == CHAT else {}) | body)
    assert (response.status, response.error["param"], response.error["code"]) == (status, param, code), response.body
    assert response.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_sampler_fields_have_their_effects(app: Any, path: str) -> None:
    """The repetition penalty has two names; a bias can leave a single token."""
    body: dict[str, Any] = {"seed": 5, "temperature": 1, "max_tokens": 12} | ({"messages": CONVERSATION} if path == CHAT else {})

    def generate(**fields: Any) -> str:
        choice = send_request(app, path, body | fields).json["choices"][0]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])

    assert generate() == generate(min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias={})
    penalties: dict[str, Any] = {"min_p": 0.02, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    assert generate(**penalties, repetition_penalty=1.4) == generate(**penalties, repeat_penalty=1.4) != generate()
    assert len({*generate(logit_bias={"70": 100}).split()}) <= 1
    assert send_request(app, path, body | {"logit_bias": {"999999": 1}}).status == 400


def test_fields_without_effect_are_accepted(app: Any) -> None:
    numbers = {"frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "seed": -3}
    choices = {"store": False, "logprobs": False, "stream": False, "parallel_tool_calls": True, "tool_choice": "none"}
    others = {"logit_bias": {}, "metadata": None, "audio": None, "stop": None, "tools": [], "modalities": ["text"], "user": "ann"}
    samplers = {"repetition_penalty": 1.0, "repeat_penalty": 1, "min_p": 0, "min_tokens": 0, "mirostat": 0, "ignore_eos": False}
    servers = {"cache_prompt": True, "skip_special_tokens": True, "add_generation_prompt": True, "metadata": {"a": "b"}}
    strings = {"service_tier": "priority", "verbosity": "low", "reasoning_effort": "low", "chat_template_kwargs": {}}
    neutral = {**numbers, **choices, **others, **samplers, **servers, **strings, "response_format": {"type": "text"}}
    assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1, **neutral}).status == 200


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"), (b"{", "not valid JSON"), (b"\xff{}", "not valid JSON"),
        (b"[]", "expected an object"), (b"1", "expected an object"),
        (b'{"seed": NaN}', "NaN is not a JSON number"), (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 40_000, "nested too deep"), (b'{"a":' * 40_000, "nested too deep"), (b"[" * 10**6, "lists and objects"),
        (b"[" * 60_000 + b'"' + b'\\"' * 10**6, "lists and objects"), (b'"' + b'[\\"' * 10**6, "not valid JSON"),
        (b"[" * 900 + b"]" * 900, "the body is a list"),
        (b"null", "the body is null; expected an object"),
        (b'"text"', 'the body is "text"; expected an object'),
        (b'{"x": ' + b"[" * MAX_BODY_DEPTH + b"]" * MAX_BODY_DEPTH + b"}", "nested too deep"),
        (b'{"prompt": [' + b"{}," * 10**6 + b"1]}", "lists and objects"),
        (b'{"prompt": "\\ud800"}', "half a character"), (b'{"\\udc00": 1}', "half a character"),
    ],
)  # fmt: skip
def test_invalid_bodies_are_rejected(app: Any, data: bytes, message: str) -> None:
    response = send_request(app, COMPLETIONS, chunks=[data])
    assert response.status == 400 and message in response.error["message"]


def test_bodies_that_are_too_large_too_slow_or_not_json_are_rejected(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    announced = send_request(app, COMPLETIONS, chunks=[], headers={"content-length": str(100 << 20)})
    chunk = b" " * (1 << 20)
    sent = send_request(app, COMPLETIONS, chunks=[chunk] * 8)
    for response in (announced, sent):
        assert (response.status, response.error["code"]) == (413, "request_too_large")
    for content_type in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert send_request(app, COMPLETIONS, {}, {"content-type": content_type}).status == 415
    assert send_request(app, COMPLETIONS, {"max_tokens": 1}, {"content-type": "application/json; charset=utf-8"}).status == 200
    assert "uncompressed" in send_request(app, COMPLETIONS, {}, {"content-encoding": "gzip"}).error["message"]
    assert send_request(app, COMPLETIONS, {"max_tokens": 1}, {"content-encoding": ""}).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(body_limits, "MAX_TOTAL_BODY_BYTES", 3 << 20)
        assert send_request(app, COMPLETIONS, chunks=[chunk] * 4).status == 429
        assert send_request(app, COMPLETIONS, chunks=[chunk, b"{}"]).status == 200, "a rejected body frees the buffer"
    monkeypatch.setattr(body_limits, "BODY_TIMEOUT_S", 0.01)
    assert send_request(app, COMPLETIONS, chunks=[], method="POST").status == 408


def test_brackets_in_strings_do_not_count_as_lists(app: Any) -> None:
    text = '[{\\"' * 20_000
    assert send_request(app, COMPLETIONS, {"prompt": text * 4}).error["code"] == "context_length_exceeded"
    assert parse_body(json.dumps({"a": text * 4, "b": "\\", "c": []}).encode()) == {"a": text * 4, "b": "\\", "c": []}


def test_unknown_paths_and_methods_get_openai_errors(app: Any) -> None:
    assert (send_request(app, "/v1/images", {}).status, send_request(app, "/v1/images", {}).error["code"]) == (404, None)
    for method, path, allowed in (
        ("GET", CHAT, {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("OPTIONS", COMPLETIONS, {"POST"}),
    ):
        response = send_request(app, path, method=method)
        assert response.status == 405 and response.error and {*response.headers["allow"].split(", ")} == allowed
    assert send_request(app, "/v1/models/gpt-4").error["code"] == "model_not_found"
    assert send_request(app, "/v1/models/talker").json == send_request(app, "/v1/models").json["data"][0]


@pytest.mark.parametrize(
    ("location", "message", "expected"),
    [
        ("m/x.gguf", "prompt is [9]; expected ids from 0 to 9", "prompt is [9]; expected ids from 0 to 9"),
        ("m/x.gguf", "the tokenizer m/x.gguf cannot encode the text", "the tokenizer the model's file cannot encode the text"),
        ("m/x.gguf", "m/x.gguf: the template makes nothing", "the template makes nothing"),
        ("/a/prompt/x", "a prompt of /a/prompt/x, or /a/prompt/y: no", "a prompt of the model's file, or the model's file: no"),
        ("/a/m/x", "'/a/m/x' is not /a/m/x2 or /b/a/m/x", "'the model's file' is not the model's file or /b/a/m/x"),
        ("/srv/m/x", "/srv/m-2/x and /srv/m/x.", "/srv/m-2/x and the model's file."),
        ("x.gguf", "x.gguf: no text of x.gguf or tax.gguf", "no text of x.gguf or tax.gguf"),
    ],
)  # fmt: skip
def test_encoding_errors_hide_local_paths_only(app: Any, location: str, message: str, expected: str) -> None:
    model: Any = SimpleNamespace(template=None, decoder=SimpleNamespace(tokenizer=SimpleNamespace(path=Path(location))))
    with pytest.raises(APIError) as error, wrap_encoding_errors(model, "input"):
        raise ValueError(message)
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("/srv/my models/org/a.bin is truncated", "a.bin is truncated"),
        ("no /srv/a.bin or /srv/my models/b.bin; 3 / 4 GB, and/or", "no a.bin or b.bin; 3 / 4 GB, and/or"),
        ("//host/share/a.bin (C:\\models\\b.bin)", "a.bin (b.bin)"),
    ],
)
def test_loading_errors_hide_folders_only(message: str, expected: str) -> None:
    assert LOCAL_DIRECTORY_PATTERN.sub("", message) == expected


# Access control


@pytest.mark.parametrize(
    ("host", "is_accepted"),
    [
        ("127.0.0.1:8080", True), ("localhost:8080", True), ("LOCALHOST", True), ("[::1]:8080", True), ("192.168.0.7", True),
        ("evil.example", False), ("evil.example:8080", False), ("127.0.0.1.evil.example", False), ("", False), ("8080", False),
        ("localhost.evil.example:8080", False), ("[::1", False), ("\xe9", False),
    ],
)  # fmt: skip
def test_other_host_names_are_rejected_without_a_key(
    make_test_app: Callable[..., Any], app: Any, host: str, is_accepted: bool
) -> None:
    """With DNS rebinding, a page of that name could read the responses."""
    assert (send_request(app, "/v1/models", headers={"host": host}).status == 200) is is_accepted
    keyed = make_test_app(keys=("right",))
    assert send_request(keyed, "/v1/models", headers={"host": host, "authorization": "Bearer right"}).status == 200


def test_http_1_0_requests_need_no_host(app: Any) -> None:
    """Health checks send them; no browser does."""

    async def old(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "http_version": "1.0"}, receive, send)

    assert (
        send_request(old, "/health", headers={"host": None}).status == 200
        and send_request(app, "/health", headers={"host": None}).status == 403
    )
    assert send_request(old, "/health", headers={"host": "evil.example"}).status == 403
    assert send_request(old, "/health", headers={"host": None, "origin": "http://evil.example"}).status == 403


@pytest.mark.parametrize(
    ("headers", "is_accepted"),
    [
        ({"origin": "http://127.0.0.1:8080"}, True), ({"origin": "https://evil.example"}, False), ({"origin": "null"}, False),
        ({"origin": "http://127.0.0.1:9"}, False), ({"sec-fetch-site": "cross-site"}, False), ({"origin": ""}, False),
        ({"sec-fetch-site": "same-site"}, False), ({"sec-fetch-site": "same-origin"}, True), ({"sec-fetch-site": "none"}, True),
        ({"origin": "http://[::1"}, False),
    ],
)  # fmt: skip
def test_requests_from_other_origins_are_rejected(app: Any, headers: dict[str, str], is_accepted: bool) -> None:
    for response in (
        send_request(app, COMPLETIONS, {"max_tokens": 1}, headers),
        send_request(app, "/v1/models", headers=headers),
    ):
        assert response.status == (200 if is_accepted else 403)
        assert not any(name.startswith("access-control") for name in response.headers)
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert send_request(app, COMPLETIONS, None, preflight, method="OPTIONS").status == 403
    assert send_request(app, "/", headers={"sec-fetch-site": "cross-site"}).status == 200, "links to the page are allowed"


def test_one_of_the_api_keys_is_required(make_test_app: Callable[..., Any]) -> None:
    log = list[str]()
    keyed = make_test_app(keys=("first", "second"), log=log)
    for authorization in ("Bearer first", "bearer second", "Bearer  second "):
        assert send_request(keyed, COMPLETIONS, {"max_tokens": 1}, {"authorization": authorization}).status == 200
    for invalid in (None, "", "Bearer", "Bearer ", "first", "Basic first", "Bearer firs", "Bearer first2", "Bearer f\xe9"):
        for path in ("/v1/models", "/metrics", "/nothing"):
            response = send_request(keyed, path, headers={"authorization": invalid})
            assert (response.status, response.error["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    assert send_request(keyed, "/health").json == {"status": "ok"} and send_request(keyed, "/").status == 200
    assert not any(key in line for line in log for key in ("first", "second"))


# Errors and disconnects


def test_a_disconnected_client_is_cancelled(make_test_app: Callable[..., Any]) -> None:
    for disconnect_after, body in ((1, {"stream": True}), (0, {"stream": False, "n": 2}), (0, {"stream": True})):
        endless = FakeScheduler(Prompt([1], 0.0), step("a"))
        send_request(make_test_app(endless), COMPLETIONS, body, disconnect_after=disconnect_after)
        assert endless.n_cancelled == len(endless.requests) == body.get("n", 1)


@pytest.mark.parametrize(
    ("error", "status", "code"), [(QueueFullError(), 429, "queue_full"), (ShutdownError(), 503, "shutting_down")]
)
def test_scheduler_errors_get_their_status(make_test_app: Callable[..., Any], error: Exception, status: int, code: str) -> None:
    for stream in (True, False):
        response = send_request(make_test_app(FakeScheduler(error=error)), COMPLETIONS, {"stream": stream})
        assert (response.status, response.error["code"]) == (status, code)
        assert "retry-after" in response.headers


def test_internal_errors_reveal_no_details(make_test_app: Callable[..., Any]) -> None:
    log = list[str]()
    broken = make_test_app(FakeScheduler(Prompt([1], 0.0), step("a"), RuntimeError("/secret/path")), log=log)
    complete = send_request(broken, COMPLETIONS, {})
    assert complete.status == 500 and complete.error["type"] == "server_error" and b"secret" not in complete.body
    first, error = send_request(broken, COMPLETIONS, {"stream": True}).events
    assert first["choices"][0]["text"] == "a" and error["error"]["code"] == "server_error" and "secret" not in str(error)
    assert len(log) == 2 and all("RuntimeError: /secret/path" in line for line in log)


def test_no_exception_is_a_module_constant() -> None:
    """An exception that is raised again and again would keep the bodies of all its requests in memory."""
    assert not [
        name for module in (server, access_control) for name, value in vars(module).items() if isinstance(value, BaseException)
    ]


def test_an_aborted_stream_ends_with_a_finish_reason(make_test_app: Callable[..., Any]) -> None:
    aborted = make_test_app(FakeScheduler(Prompt([1], 0.0), step("a"), step("", "interrupted")))
    *_, last = send_request(aborted, CHAT, {"messages": CONVERSATION, "stream": True}).events
    assert last["choices"][0]["finish_reason"] == "length"


def test_a_model_without_a_template_points_to_completions(decoder: SpeculativeDecoder) -> None:
    app = make_app(ServedModel("stories", decoder, None), FakeScheduler())
    assert "/v1/completions" in send_request(app, CHAT, {"messages": CONVERSATION}).error["message"]
    assert send_request(app, "/v1/models").json["data"][0]["specdec"]["can_chat"] is False


def test_template_errors_hide_local_paths(app: Any, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.chat_template, "source", "{{ raise_exception('no ' + messages[0]['content']) }}")
    message = send_request(app, CHAT, {"messages": [{"role": "user", "content": "robin"}]}).error["message"]
    assert message == "template error: no robin"


# Tools


WEATHER_CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}


def test_the_json_scanner_agrees_with_the_json_library() -> None:
    rng, n_invalid = random.Random(3), 0
    for _ in range(4000):
        text = json.dumps(random_json(rng, 0), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice('{}[]",:\\u0e.-+ 1tn') * rng.randrange(2) + text[at + rng.randrange(2) :]
        scanner = JsonScanner()
        is_accepted = all(scanner.accept(char) for char in text + "\n") and scanner.is_complete
        try:
            json.loads(text, parse_constant=lambda name: 1 / 0)
            is_json = True
        except (ValueError, ZeroDivisionError):
            is_json, n_invalid = False, n_invalid + 1
        assert is_accepted is is_json, text
    assert n_invalid > 500


def test_tool_calls_are_returned_in_responses_and_streams(make_test_app: Callable[..., Any]) -> None:
    fake = FakeScheduler(
        Prompt([1], 0.0), step("I look. "), step(TAGGED_CALL[:48]), step(TAGGED_CALL[48:]), step(TAGGED_CALL), step("", "eos")
    )
    app, body = make_test_app(fake), {"messages": CONVERSATION, "tools": [TOOL]}
    choice = send_request(app, CHAT, body).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [WEATHER_CALL] * 2
    events = [event["choices"][0] for event in send_request(app, CHAT, body | {"stream": True}).events]
    calls = [call for event in events for call in event["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 0, 1] and len({call["id"] for call in calls if "id" in call}) == 2
    assert "".join(call["function"]["arguments"] for call in calls if not call["index"]) == WEATHER_CALL["arguments"]
    assert events[-1]["finish_reason"] == "tool_calls"
    one = send_request(app, CHAT, body | {"parallel_tool_calls": False}).json["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    for without in ({"tool_choice": "none"}, {"tools": []}):
        choice = send_request(app, CHAT, body | without).json["choices"][0]
        assert choice["finish_reason"] == "stop" and TAGGED_CALL in choice["message"]["content"]


def test_tools_calls_and_results_reach_the_template(app: Any, prompts: list[Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    conversation = [
        *CONVERSATION,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert send_request(app, CHAT, {"messages": conversation, "tools": [TOOL], "max_tokens": 1}).status == 200
    ((messages, tools, _),) = prompts
    assert tools == [TOOL]
    assert messages[1]["content"] == "" and messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}


FIRST_ID = "call00000"


@pytest.mark.parametrize(
    ("call", "result", "expected_id", "arguments"),
    [
        ({}, {}, "c1", {}),
        ({"index": 0, "type": None}, {}, "c1", {}),
        ({"id": None}, {"tool_call_id": None}, FIRST_ID, {}),
        ({"id": None}, {"tool_call_id": ""}, FIRST_ID, {}),
        ({}, {"tool_call_id": None}, "c1", {}),
        ({"function": {"name": "weather", "arguments": None}}, {}, "c1", {}),
        ({"function": {"name": "weather"}}, {}, "c1", {}),
        ({"function": {"name": "weather", "arguments": ""}}, {}, "c1", {}),
        ({"function": {"name": "weather", "arguments": {"city": "Oslo"}}}, {}, "c1", {"city": "Oslo"}),
        ({"function": {"name": "weather", "arguments": '{"city": "Os'}}, {}, "c1", '{"city": "Os'),
        ({}, {"role": "function", "tool_call_id": None, "name": "weather"}, "c1", {}),
        ({}, {"content": None}, "c1", {}),
    ],
)
def test_calls_and_results_of_the_history_find_each_other(
    call: dict[str, Any], result: dict[str, Any], expected_id: str, arguments: Any
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}} | call
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"} | result
    parser = MessageParser()
    parsed = parser.parse("messages[0]", {"role": "assistant", "tool_calls": [call]})["tool_calls"][0]
    assert parsed == {"id": expected_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = parser.parse("messages[1]", result)
    assert answer == {"role": "tool", "tool_call_id": expected_id, "name": "weather", "content": result["content"] or ""}


def test_results_without_ids_belong_to_the_last_calls_in_their_order() -> None:
    parser, names = MessageParser(), ("one", "two", "three")
    for calls in (names[:2], names):
        parser.parse("m", {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in calls]})
    assert [parser.parse("m", {"role": "tool", "content": ""})["name"] for _ in range(4)] == [*names, ""]
    parser.parse("m", {"role": "assistant", "function_call": {"name": "one", "arguments": "{}"}})
    assert parser.parse("m", {"role": "function", "name": "x", "content": "1"})["name"] == "one"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, {"id": "m1"}), ({}, {"reasoning_details": [{"type": "reasoning.text", "text": "t"}]}),
        ({}, {"annotations": [{"type": "url_citation"}]}), ({}, {"cache_control": {"type": "ephemeral"}}),
        ({}, {"refusal": ""}), ({}, {"prefix": False}), ({"stop": [""]}, {}), ({"stop": ""}, {}), ({"stop_token_ids": []}, {}),
        ({"max_tokens": 12.0}, {}), ({"seed": 5.0}, {}), ({"top_k": 0.0}, {}), ({"n": 1.0}, {}), ({"top_logprobs": 0.0}, {}),
    ],
)  # fmt: skip
def test_what_cannot_change_the_output_is_accepted(app: Any, body: dict[str, Any], message: dict[str, Any]) -> None:
    expected = send_request(app, CHAT, {"messages": CONVERSATION, **SAMPLING_FIELDS}).json["choices"]
    response = send_request(app, CHAT, {"messages": [CONVERSATION[0] | message], **SAMPLING_FIELDS, **body})
    assert response.status == 200 and response.json["choices"] == expected


@pytest.mark.parametrize(
    "message", [{"audio": {"id": "a"}}, {"images": ["AA=="]}, {"prefix": True}, {"role": "function", "tool_call_id": 1}]
)
def test_what_may_change_the_output_is_rejected_by_name(app: Any, message: dict[str, Any]) -> None:
    response = send_request(app, CHAT, {"messages": [CONVERSATION[0] | message]})
    *_, name = message
    assert response.status == 400 and name in response.json["error"]["message"]
    assert response.json["error"]["param"] == "messages"


def test_fields_of_other_apis_switch_thinking(app: Any, prompts: list[Any]) -> None:
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    bodies: list[dict[str, Any]] = [on, {"thinking": {"type": "enabled"}}, off, {"thinking": {"type": "disabled"}}]
    for body in [*bodies, {**off, "chat_template_kwargs": on}, {**off, "reasoning_effort": "high"}]:
        assert send_request(app, CHAT, {"messages": CONVERSATION, "max_tokens": 1, **body}).status == 200
    assert [options for *_, options in prompts] == [on, on, off, off, on, off]
    for body in ({"thinking": {"type": "maybe"}}, {"enable_thinking": "no"}):
        assert send_request(app, CHAT, {"messages": CONVERSATION, **body}).json["error"]["param"] == next(iter(body))


def test_usage_has_the_cached_tokens_of_the_prompt(app: Any) -> None:
    messages = [{"role": "user", "content": "The robin flew far away. " * 8}]
    first, second = (send_request(app, CHAT, {"messages": messages, "max_tokens": 1, "n": 2}).json["usage"] for _ in range(2))
    n = first["prompt_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] < n - 40, "no earlier prompt ends like this one"
    assert second["prompt_tokens_details"] == {"cached_tokens": n - 1} and second["prompt_tokens"] == n
    cached = send_request(app, "/v1/messages", {"messages": messages, "max_tokens": 1}).json["usage"]
    assert (cached["input_tokens"], cached["cache_read_input_tokens"]) == (1, n - 1)
    usage = send_request(app, "/v1/responses", {"input": messages, "max_output_tokens": 1}).json["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (n, n - 1)


# Log probabilities


def test_logprobs_have_the_format_of_each_endpoint(make_test_app: Callable[..., Any], decoder: SpeculativeDecoder) -> None:
    robin, mark = decoder.tokenizer.encode(" robin")[0], 0
    robin_bytes = decoder.tokenizer.token_to_bytes(robin) or b""
    logprobs = [TokenLogprob(robin, -0.5, [(robin, -0.5), (mark, -1.0)]), TokenLogprob(robin, float("-inf"), [])]
    fake = FakeScheduler(Prompt([1], 0.0), step(" robin robin", "max_tokens", logprobs=logprobs))
    app, name = make_test_app(fake), robin_bytes.decode()
    chat = send_request(app, CHAT, {"messages": CONVERSATION, "logprobs": True, "top_logprobs": 2}).json["choices"][0]["logprobs"]
    first, second = chat["content"]
    assert (first["token"], first["logprob"], bytes(first["bytes"])) == (name, -0.5, robin_bytes)
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [(name, -0.5), ("<|endoftext|>", -1.0)]
    assert second["logprob"] == -9999.0 and second["top_logprobs"] == []
    assert fake.requests[-1].top_logprobs == 2
    for stream in (False, True):
        response = send_request(app, COMPLETIONS, {"logprobs": 1, "stream": stream})
        choice = (response.events[0] if stream else response.json)["choices"][0]
        assert choice["logprobs"]["tokens"] == [name] * 2 and choice["logprobs"]["text_offset"] == [0, len(name)]
        assert choice["logprobs"]["top_logprobs"][0] == {name: -0.5, "<|endoftext|>": -1.0}
    send_request(app, CHAT, {"messages": CONVERSATION})
    assert fake.requests[-1].top_logprobs is None


# Page, metrics, log


def test_the_page_is_self_contained_and_its_policy_allows_nothing_else(app: Any) -> None:
    response = send_request(app, "/")
    page, policy = response.body.decode(), response.headers["content-security-policy"]
    assert response.headers["content-type"].startswith("text/html")
    assert not re.findall(
        r"(?:src|href)=[\"'](?!data:)|https?://|@import|innerHTML|insertAdjacentHTML|document\.write|eval\(", page
    )
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("'sha256-") == 2
    assert "style=" not in page and not re.search(r"\son\w+=", page)


MARKDOWN = {
    "a **b** *c* `d<e` snake_case_name 2*3": "<p>a <strong>b</strong> <em>c</em> <code>d&lt;e</code> snake_case_name 2*3</p>",
    "# T\n\n- a\n  - b\n- c": "<h3>T</h3><ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>",
    "2. a\n\n   ```py\n   b **c**\n   ```\n3. d": "<ol><li><p>a</p><pre><code>b **c**</code></pre></li><li><p>d</p></li></ol>",
    "> q\n\n| a | b |\n|--|--|\n| c | d |": "<blockquote><p>q</p></blockquote>"
    "<table><tr><th> a </th><th> b </th></tr><tr><td> c </td><td> d </td></tr></table>",
    "[x](https://a.b/c)": "<p><a https://a.b/c>x</a></p>",
    "[x](javascript:alert(1)) <b onclick=x>": "<p>[x](javascript:alert(1)) &lt;b onclick=x></p>",
    "```\nnever closed": "<pre><code>never closed</code></pre>",
    "half **of `it": "<p>half **of `it</p>",
}


@pytest.mark.skipif(not shutil.which("node"), reason="needs node, which runs the page's script")
def test_the_page_renders_markdown_with_colors() -> None:
    runs = [[["own", text]] for text in MARKDOWN] + [[["own", "Hel"], ["guessed", "lo **wor"], ["own", "ld** x"]]]
    command = ["node", Path(__file__).parents[1] / "fakes" / "page.mjs", server.PAGE_PATH]
    done = subprocess.run(command, input=json.dumps(runs), capture_output=True, text=True, check=True, timeout=60)
    *rendered, colored = json.loads(done.stdout)
    assert dict(zip(MARKDOWN, rendered, strict=True)) == MARKDOWN
    assert colored == "<p>Hello<span guessed> </span><strong><span guessed>world</span></strong> x</p>"


@pytest.mark.skipif(not shutil.which("node"), reason="needs node, which runs the page's script")
def test_the_page_reports_an_unreachable_server_and_retries() -> None:
    command = ["node", Path(__file__).parents[1] / "fakes" / "page.mjs", server.PAGE_PATH, "talk"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    message = "The server at http://here does not answer. Start it with specdec serve, then try again."
    assert result["shown"] == [
        message,
        [message],
        ["Retry"],
        [],
        ["Copy", "Retry"],
        [message],
        ["Copy", "Copy", "Retry"],
        [message],
    ]
    assert result["asked"][:3] == [["one"], ["one"], ["one", "first!", "two"]]
    assert result["asked"][3:5] == [["one", "first!", "two", "sec", "three"]] * 2 and result["copied"] == "third"
    # a thought is folded above the answer and goes back with the history
    summary, thought = result["thoughts"]["shown"]
    assert re.fullmatch(r"thought for \d+\.\d s, 212 tokens", summary) and thought == "Hm <b>"
    assert result["thoughts"]["place"][:3] == ["H2", "DETAILS", "DIV"]
    sent = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm <b>"}
    assert result["asked"][-1] == [sent, {"role": "user", "content": "five"}]
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    assert result["switched"] == [None, False, on, False, off, False, None, True]


def test_metrics_are_in_prometheus_format(app: Any, scheduler: EngineThread) -> None:
    send_request(app, COMPLETIONS, {"max_tokens": 3})
    wait_until(lambda: not scheduler.metrics.running)
    response = send_request(app, "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = {}
    for line in response.body.decode().splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) specdec_\w+ .+|specdec_\w+(\{(le|model)=\"[^\"]+\"\})? [-+.e0-9]+", line), line
        if not line.startswith("#"):
            name, _, value = line.partition(" ")
            values[name] = float(value)
    metrics = scheduler.metrics
    assert values["specdec_generated_tokens_total"] == metrics.generated_tokens >= 3
    assert values['specdec_model_generated_tokens_total{model="talker"}'] == metrics.generated_tokens
    assert values["specdec_requests_running"] == 0
    buckets = [values[f'specdec_first_token_seconds_bucket{{le="{bound}"}}'] for bound in (*BUCKET_BOUNDS_S, "+Inf")]
    assert buckets == sorted(buckets) and buckets[-1] == values["specdec_first_token_seconds_count"] >= 1
    assert "specdec_acceptance_rate 0\n" in format_prometheus({"m": Metrics()})


def test_the_log_contains_no_message_content(make_test_app: Callable[..., Any]) -> None:
    log = list[str]()
    app = make_test_app(log=log)
    send_request(app, CHAT, {"messages": [{"role": "user", "content": "canary"}], "max_tokens": 2, "seed": 1})
    send_request(app, "/\n\x1b[31m")
    send_request(app, "/health")
    assert len(log) == 2 and "canary" not in log[0] and re.search(r"200 \d+\.\d\d s \d+\+2 tokens \(req_\w{16}\)$", log[0])
    assert "\x1b" not in log[1] and "\n" not in log[1]
    assert json.loads(json.dumps(log)) == log and isinstance(send_request(app, "/health"), Response)


@pytest.mark.parametrize("text", ["", "robin", "a \u00e9\u65e5 \U0001f642 b", "<|im_end|>"])
def test_text_survives_tokenize_and_detokenize(app: Any, text: str) -> None:
    tokens = send_request(app, "/tokenize", {"content": text}).json["tokens"]
    with_special = send_request(app, "/tokenize", {"content": text, "add_special": True}).json["tokens"]
    assert with_special[len(with_special) - len(tokens) :] == tokens and len(with_special) - len(tokens) in (0, 1)
    assert send_request(app, "/detokenize", {"tokens": tokens}).json == {"content": text}


def test_invalid_tokens_and_contents_are_rejected(app: Any) -> None:
    for path, body in (
        ("/tokenize", {"content": 5}), ("/tokenize", {"content": "a", "add_special": 1}), ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": "abc"}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [1.5]}), ("/detokenize", {"tokens": [True]}), ("/detokenize", {"tokens": {"1": 2}}),
    ):  # fmt: skip
        response = send_request(app, path, body)
        assert response.status == 400 and response.error["type"] == "invalid_request_error", (path, body, response.body)
