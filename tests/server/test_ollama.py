"""ollama's API: the same output as OpenAI's, in ollama's format."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import Prompt
from specdec.loaders import load_checkpoint
from specdec.server import generation_response, ollama
from specdec.server.generation_fields import ServedModel
from specdec.text.structured_output import ConstraintError
from tests.fakes.asgi import Response, send_request
from tests.fakes.server import CHAT, COMPLETIONS, CONVERSATION, SAMPLING_FIELDS, TOOL, FakeScheduler, step
from tests.tools.gguf_files import gguf_bytes, make_model_keys, make_model_tensors
from tests.tools.tool_calls import TAGGED_CALL

OPTIONS = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "num_predict": 12}
CHAT_BODY = {"model": "talker:latest", "messages": CONVERSATION, "options": OPTIONS}


def read_lines(response: Response) -> list[Any]:
    assert response.status == 200 and response.headers["content-type"] == "application/x-ndjson", response.body
    lines = [json.loads(line) for line in response.body.decode().splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def test_a_chat_equals_that_of_openai_and_is_streamed_by_default(app: Any) -> None:
    expected = send_request(app, CHAT, {"messages": CONVERSATION, **SAMPLING_FIELDS}).json
    text = expected["choices"][0]["message"]["content"]
    *lines, last = read_lines(send_request(app, "/api/chat", CHAT_BODY))
    assert "".join(line["message"]["content"] for line in lines) == text and last["message"]["content"] == ""
    complete = send_request(app, "/api/chat", {**CHAT_BODY, "stream": False}).json
    assert complete["message"] == {"role": "assistant", "content": text} and complete["model"] == "talker" and complete["done"]
    for answer in (last, complete):
        assert answer["done_reason"] == "length" and answer["total_duration"] >= answer["eval_duration"] > 0
        tokens = answer["prompt_eval_count"], answer["eval_count"]
        assert tokens == (expected["usage"]["prompt_tokens"], expected["usage"]["completion_tokens"])


def test_generate_is_a_chat_or_a_raw_completion(app: Any) -> None:
    prompt, system = CONVERSATION[0]["content"], {"role": "system", "content": "Be brief."}
    for body, messages in (({}, CONVERSATION), ({"system": "Be brief."}, [system, *CONVERSATION])):
        text = send_request(app, CHAT, {"messages": messages, **SAMPLING_FIELDS}).json["choices"][0]["message"]["content"]
        lines = read_lines(send_request(app, "/api/generate", {"prompt": prompt, "options": OPTIONS, **body}))
        assert "".join(line["response"] for line in lines) == text and "message" not in lines[0]
    text = send_request(app, COMPLETIONS, {"prompt": prompt, **SAMPLING_FIELDS}).json["choices"][0]["text"]
    body = {"prompt": prompt, "raw": True, "stream": False, "options": OPTIONS}
    assert send_request(app, "/api/generate", body).json["response"] == text


def test_tool_calls_are_objects_and_their_results_find_them(make_test_app: Any, prompts: list[Any]) -> None:
    steps = [step("Hm. "), step(TAGGED_CALL[:50]), step(TAGGED_CALL[50:], "eos")]
    app = make_test_app(FakeScheduler(Prompt([1], 0.0), *steps))
    body = {**CHAT_BODY, "tools": [TOOL]}
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    text, call, last = read_lines(send_request(app, "/api/chat", body))
    assert text["message"]["content"] == "Hm." and call["message"]["tool_calls"][0]["function"] == function | {"index": 0}
    assert last["done_reason"] == "stop"
    message = send_request(app, "/api/chat", {**body, "stream": False}).json["message"]
    assert message["content"] == "Hm." and [each["function"] for each in message["tool_calls"]] == [function | {"index": 0}]
    both = make_test_app(FakeScheduler(Prompt([1], 0.0), step(TAGGED_CALL), step(f"\n{TAGGED_CALL}", "eos")))
    first, second, _ = read_lines(send_request(both, "/api/chat", body))
    assert [each["message"]["tool_calls"][0]["function"]["index"] for each in (first, second)] == [0, 1]
    cut = make_test_app(FakeScheduler(Prompt([1], 0.0), step(TAGGED_CALL[:58], "max_tokens")))
    assert "weather" in send_request(cut, "/api/chat", {**body, "stream": False}).json["message"]["content"]
    history = [*CONVERSATION, {"role": "assistant", "tool_calls": [{"function": function}]}, {"role": "tool", "content": "rain"}]
    assert send_request(app, "/api/chat", {**body, "messages": history}).status == 200
    messages = prompts[-1][0]
    assert messages[1]["tool_calls"][0]["function"] == function and messages[2]["name"] == "weather"


def test_thinking_is_switched_by_think(app: Any, prompts: list[Any]) -> None:
    for think in (True, False, "high", None):
        assert send_request(app, "/api/chat", {**CHAT_BODY, "think": think}).status == 200
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    assert [options for *_, options in prompts] == [on, off, on, {}]


def test_a_format_holds(app: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra [shape] is not installed")
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    for path, body in (("/api/chat", CHAT_BODY), ("/api/generate", {"prompt": "x"})):
        response = send_request(app, path, {**body, "format": schema, "options": {"num_predict": 40}, "stream": False}).json
        assert json.loads(response["message"]["content"] if path == "/api/chat" else response["response"]) == {"n": 7}
    assert send_request(app, "/api/chat", {**CHAT_BODY, "format": "json"}).status == 200


def test_models_are_listed_and_shown(app: Any, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = send_request(app, "/api/tags").json["models"]
    assert model["name"] == model["model"] == "talker" and model["size"] > 0 and send_request(app, "/api/ps").json["models"]
    shown = send_request(app, "/api/show", {"model": "talker:latest"}).json
    assert shown["model_info"]["llama.context_length"] == decoder.n_positions and "tools" in shown["capabilities"]
    assert shown["template"] == decoder.chat_template.source
    assert "thinking" not in shown["capabilities"]
    monkeypatch.setattr(decoder.chat_template, "source", "<think></think>")
    assert "thinking" in send_request(app, "/api/show", {"model": "talker"}).json["capabilities"]
    assert send_request(app, "/api/show", {"name": "other"}).json == {"error": "model not found; /api/tags lists the models"}
    assert send_request(app, "/api/version").json["version"]


def test_the_details_of_a_gguf_file_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(make_model_keys("qwen2"), make_model_tensors("qwen2")))
    checkpoint = load_checkpoint(path)
    target = SimpleNamespace(config=checkpoint.config, weights=SimpleNamespace(format_names="q8_0"))
    decoder = SimpleNamespace(target=target, bundle=SimpleNamespace(checkpoint=checkpoint))
    details = ollama.format_model("short", 5, ServedModel("short", decoder, None))["details"]  # type: ignore[arg-type]
    assert (details["format"], details["family"], details["quantization_level"]) == ("gguf", "qwen2", "q8_0")
    assert float(details["parameter_size"].removesuffix("M")) >= 0.0


def test_models_that_are_here_need_no_pull_and_none_can_be_changed(app: Any) -> None:
    assert send_request(app, "/api/pull", {"model": "talker:latest"}).json == {"status": "success"}
    assert send_request(app, "/api/pull", {"name": "talker", "stream": False}).json == {"status": "success"}
    for path, body, status in (("/api/pull", {"model": "other"}, 404), ("/api/delete", {"model": "talker"}, 403)):
        response = send_request(app, path, body)
        assert response.status == status and "specdec models" in response.json["error"]


def test_a_request_without_a_prompt_loads_the_model(app: Any) -> None:
    for path in ("/api/chat", "/api/generate"):
        response = send_request(app, path, {"model": "talker", "keep_alive": -1})
        assert response.json["done_reason"] == "load" and response.json["done"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/show", "/api/embed"])
def test_any_content_type_is_read_unless_a_page_may_have_sent_it(app: Any, path: str) -> None:
    """Ollama ignores the content type, and `curl -d` sends JSON as a form. A page of another site could do that too."""
    body = {"/api/chat": {**CHAT_BODY, "stream": False}, "/api/embed": {"input": "x"}}.get(path, {"model": "talker"})
    types = None, "application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "application/json"
    for content_type in types:
        headers = {"content-type": content_type}
        assert send_request(app, path, body, headers).status == 200, content_type
        for name, value, status in (
            ("origin", "http://evil.example", 403), ("origin", "null", 403), ("sec-fetch-site", "cross-site", 403),
            ("origin", "http://127.0.0.1:8080", 415), ("sec-fetch-site", "same-origin", 415), ("referer", "http://evil", 415),
        ):  # fmt: skip
            if status == 403 or content_type != "application/json":
                assert send_request(app, path, body, {**headers, name: value}).status == status, (content_type, name)
    assert send_request(app, path, body, {"content-encoding": "gzip"}).status == 415


def test_embeddings_equal_those_of_openai(app: Any, decoder: Any) -> None:
    texts = ["The robin", "robin " * 400]
    expected = send_request(app, "/v1/embeddings", {"input": texts[:1], "dimensions": 3}).json["data"][0]["embedding"]
    response = send_request(app, "/api/embed", {"model": "talker", "input": texts, "dimensions": 3, "keep_alive": "5m"}).json
    assert response["embeddings"][0] == expected and len(response["embeddings"]) == 2 and response["prompt_eval_count"] > 320
    assert send_request(app, "/api/embed", {"input": texts, "truncate": False}).status == 400
    assert len(send_request(app, "/api/embed", {"input": "x"}).json["embeddings"]) == 1
    whole = send_request(app, "/api/embed", {"input": texts[0]}).json["embeddings"][0]
    assert send_request(app, "/api/embeddings", {"model": "talker", "prompt": texts[0]}).json == {"embedding": whole}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, "images"),
        ("/api/chat", {"nonsense": 1}, "nonsense"), ("/api/chat", {"options": {"mirostat": 2}}, "mirostat"),
        ("/api/chat", {"format": "xml"}, "format"), ("/api/chat", {"model": "other"}, "other"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": 1}}]}]}, "arguments"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/embed", {"input": [1.5]}, "input"), ("/api/embed", {}, "input"),
        ("/api/embeddings", {}, "prompt"), ("/api/embeddings", {"prompt": "x", "nonsense": 1}, "nonsense"),
    ],
)  # fmt: skip
def test_errors_are_strings_that_name_the_field(app: Any, path: str, body: dict[str, Any], word: str) -> None:
    response = send_request(app, path, (CHAT_BODY if path == "/api/chat" else {}) | body)
    assert response.status in (400, 404) and set(response.json) == {"error"} and word in response.json["error"]


def test_a_stream_has_heartbeats_and_ends_with_its_error(make_test_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_response, "HEARTBEAT_INTERVAL_S", 0.0)
    fake = FakeScheduler(
        Prompt([1], 0.0), step("<tool_call>"), step("<"), step("a"), ConstraintError("the constraint cannot go on")
    )
    response = send_request(make_test_app(fake), "/api/chat", {**CHAT_BODY, "tools": [TOOL], "stream": True})
    *lines, last = [json.loads(line) for line in response.body.decode().splitlines()]
    assert last == {"error": "the constraint cannot go on"} and all("message" in line for line in lines)
