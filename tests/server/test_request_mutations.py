"""Valid requests of agents with random changes, sent to a thinking model: each gets a whole answer, or an error in one line."""

import copy
import json
import random
from typing import Any

import pytest

from specdec.text.reasoning import SPECIAL_TOKEN_MARK
from tests.fakes.asgi import Response, send_request
from tests.fakes.server import CHAT, COMPLETIONS
from tests.tools.server_requests import COUNT, random_json
from tests.tools.thoughts import SOURCES, TOOLS, thinker  # noqa: F401  (a fixture)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
OLLAMA_OPTIONS = {"temperature": 1, "seed": 3, "num_ctx": 4096, "top_k": 40, "stop": ["z"], "repeat_penalty": 1.1}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
CHAT_MESSAGES = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"}, {"role": "developer", "content": "Go on."},
    {"role": "user", "content": "Why?"},
]  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": CHAT_MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "seed": 3,
         "parallel_tool_calls": False, "thinking_budget_tokens": 3, "stream_options": {"include_usage": True}, "stop": ["z"]},
        {"messages": CHAT_MESSAGES[:2], "response_format": RESPONSE_FORMAT, "reasoning_effort": "low", "logprobs": True, "n": 2,
         "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": True}, "reasoning_format": "auto", "logit_bias": {"5": 1},
         "user": "u", "metadata": {}, "prediction": {"type": "content", "content": "abc"}},
    ],
    COMPLETIONS: [{"prompt": ["Once", [1, 2]], "stop": "z", "logprobs": 1, "seed": -1, "n": 1, "echo": False, "suffix": "",
                   "min_p": 0.1, "top_p": 0.9, "response_format": {"type": "json_object", "schema": SCHEMA}}],
    "/infill": [{"input_prefix": "def f(n):", "input_suffix": "end", "prompt": "  return", "n_predict": 9, "n_indent": 2,
                 "input_extra": [{"filename": "a.py", "text": "x = 1"}, {"text": "y"}], "t_max_predict_ms": 500, "top_k": 40,
                 "samplers": ["top_k", "infill"], "cache_prompt": True, "response_fields": ["content", "timings/prompt_n"]}],
    "/v1/messages": [
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "stop_sequences": ["z"],
         "thinking": {"type": "enabled", "budget_tokens": 3}, "metadata": {"user_id": "u"}, "temperature": 1,
         "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA},
                   {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
         "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
         "messages": [
             {"role": "user", "content": "Where?"},
             {"role": "assistant", "content": [
                 {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                 {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                 {"type": "text", "text": "a"}, {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rom"}}]},
             {"role": "user", "content": [
                 {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": [{"type": "image", "source": {}}]},
                 {"type": "text", "text": "Why?"}]}]},
        {"messages": [{"role": "user", "content": "Why?"}], "output_config": {"effort": "high", "format": {
            "type": "json_schema", "schema": SCHEMA}}, "thinking": {"type": "adaptive"}, "top_k": -1},
    ],
    "/v1/responses": [
        {"instructions": "Be brief.", "tools": [{"type": "function", **FUNCTION, "strict": False}, {"type": "mcp"}],
         "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "low", "summary": "auto"}, "store": False,
         "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "text": {"verbosity": "low"},
         "input": [
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
             {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
             {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{"},
             {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": "x"}]},
             {"type": "web_search_call", "id": "w"}, {"role": "developer", "content": "Go on."}]},
        {"input": "Why?", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "temperature": 0},
    ],
    "/api/chat": [{"model": "talker:latest", "options": OLLAMA_OPTIONS, "think": True, "keep_alive": "5m", "format": SCHEMA,
                   "tools": [{"type": "function", "function": FUNCTION}], "messages": [
                       {"role": "user", "content": "Where?"},
                       {"role": "assistant", "content": "", "thinking": "Hm.",
                        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rom"}}}]},
                       {"role": "tool", "tool_name": "weather", "content": "rain"}]}],
    "/api/generate": [
        {"prompt": "Why?", "system": "Be brief.", "options": OLLAMA_OPTIONS, "think": "high", "format": "json", "keep_alive": -1},
        {"prompt": "Why?", "raw": True, "options": {}, "images": [], "template": "", "context": []},
    ],
    COUNT: [{"messages": CHAT_MESSAGES[1:2], "system": "Be brief.", "tools": [{"name": "weather", "input_schema": SCHEMA}]}],
    "/v1/embeddings": [{"input": ["a", "b"], "dimensions": 3, "encoding_format": "float", "user": "u"}],
    "/api/embed": [{"model": "talker", "input": "a", "truncate": True, "options": {}, "keep_alive": "5m"}],
    "/api/show": [{"model": "talker", "verbose": False}],
}  # fmt: skip
WITHOUT_OUTPUT = (COUNT, "/v1/embeddings", "/api/embed", "/api/show")
FIELDS = sorted({"name", "repetition_penalty", "stream"}.union(*(body for bodies in BODIES.values() for body in bodies)))
EDGES = [
    None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1e300, 2**31, 2**63, 2**70, "", "a", "none", "auto", "<think>", "</think>",
    "\u00e9\U0001f600", "x" * 3000, "{", "null", [], {}, [[]], [None], {"": None}, [1, "a"], "<|im_start|>", SPECIAL_TOKEN_MARK,
    "\0", "function", "user", "assistant", "system", "tool", "text", "json_object", "required", "any", "enabled", "disabled",
]  # fmt: skip


def list_places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value inside a JSON value."""
    keys = range(len(value)) if isinstance(value, list) else [*value] if isinstance(value, dict) else []
    return [path for key in keys for path in [(*place, key), *list_places(value[key], (*place, key))]]


def mutate(rng: random.Random, body: dict[str, Any], others: list[Any]) -> None:
    """Change a random value of a body in place: replace, delete, repeat, wrap or rename it, or put in another value."""
    *path, key = rng.choice(list_places(body))
    parent: Any = body
    for each in path:
        parent = parent[each]
    match rng.randrange(8):
        case 0 | 1:
            parent[key] = copy.deepcopy(rng.choice(EDGES))
        case 2:
            del parent[key]
        case 3 if isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(rng.choice([parent[key], rng.choice(EDGES)])))
        case 3 | 4:
            parent[key] = rng.choice([[parent[key]], {"type": "text", "text": parent[key]}, str(parent[key])])
        case 5 if isinstance(parent, dict):
            parent[rng.choice(["name", "type", "stream", "content", "model", "role", f"{key}_", "response_format"])] = (
                copy.deepcopy(parent[key])
            )
        case 6:
            body[rng.choice(FIELDS)] = rng.choice([copy.deepcopy(rng.choice(EDGES)), random_json(rng, 0)])
        case _:
            parent[key] = copy.deepcopy(rng.choice(others))


def check_error(path: str, response: Response) -> None:
    """Check that an error is one short line in the interface's format."""
    error = response.json["error"] if path.startswith("/api/") else response.error["message"]
    assert isinstance(error, str) and error and "\n" not in error and len(error) < 400, response.body
    assert not path.startswith("/api/") or {*response.json} == {"error"}, response.body


def check_answer(path: str, body: dict[str, Any], response: Response) -> None:
    """Check that an answer is whole: valid JSON, or a stream with an end."""
    text = response.body.decode()
    assert (SPECIAL_TOKEN_MARK not in text and "\\udc3c" not in text) or SPECIAL_TOKEN_MARK in json.dumps(body), text
    if not response.headers["content-type"].startswith(("text/event-stream", "application/x-ndjson")):
        usage = response.json.get("usage", {}).get("completion_tokens_details", {})
        budget = body.get("thinking_budget_tokens")
        if usage and isinstance(budget, int) and budget >= 0:
            assert usage["reasoning_tokens"] <= budget * len(response.json["choices"])
    elif path.startswith("/api/"):
        *_, last = [json.loads(line) for line in text.splitlines()]
        assert "error" in last or last["done"], last
    elif path == "/infill":
        last = json.loads(text.rstrip().rpartition("data: ")[2])
        assert "error" in last or last["stop"], last
    elif path in (CHAT, COMPLETIONS):
        assert text.endswith("data: [DONE]\n\n")
    else:
        last = json.loads(text.rstrip().rpartition("data: ")[2])["type"]
        ends = "message_stop", "error", "response.completed", "response.incomplete", "response.failed"
        assert last in ends, text


@pytest.mark.parametrize("n_bodies", [150, pytest.param(2_000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ["Qwen3", "R1"])
@pytest.mark.parametrize("path", BODIES)
def test_changed_requests_get_an_answer_or_an_error_in_one_line(thinker: Any, path: str, name: str, n_bodies: int) -> None:
    app, template = thinker
    template.source = TOOLS + SOURCES[name][0]
    rng, statuses = random.Random(path + name), set()
    all_bodies = [body for bodies in BODIES.values() for body in bodies]
    for _ in range(n_bodies):
        body = json.loads(json.dumps(rng.choice(BODIES[path])))
        other = rng.choice(all_bodies)
        others = [other[rng.choice([*other])] for _ in range(3)]
        if path not in WITHOUT_OUTPUT:
            body["stream"] = rng.random() < 0.5
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            if list_places(body):
                mutate(rng, body, json.loads(json.dumps(others)))
        limit = {"/v1/responses": "max_output_tokens", "/infill": "n_predict"}.get(path, "max_tokens")
        if path in WITHOUT_OUTPUT:
            pass
        elif path.startswith("/api/"):
            options = body.get("options", {})
            body["options"] = {**options, "num_predict": rng.choice([1, 2, 5, 9])} if isinstance(options, dict) else options
        elif type(body.get(limit)) is not int or rng.random() < 0.9:
            body[limit] = rng.choice([1, 2, 5, 9])
        response = send_request(app, path, body)
        statuses.add(response.status)
        try:
            assert response.status in (200, 400, 404)
            (check_answer(path, body, response) if response.status == 200 else check_error(path, response))
        except Exception as error:
            raise AssertionError(f"{json.dumps(body)}\n{response.body!r}") from error
    assert {200, 404 if path == "/api/show" else 400} <= statuses
