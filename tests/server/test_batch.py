"""Batch jobs: each line's result is that of the same request alone, however the job is divided, stopped and damaged."""

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from specdec.engine.scheduler import find_batch_size
from specdec.server.batch import BatchLine, BatchRunner, parse_line, parse_lines
from specdec.server.generation_fields import ServedModel
from tests.fakes.asgi import send_request
from tests.fakes.server import CHAT, COMPLETIONS, CONVERSATION, TOOL
from tests.tools.model_folders import SMOLLM2_TEMPLATE, TOOL_TEMPLATE_PREFIX, write_template
from tests.tools.rerankers import make_reranker
from tests.tools.server_requests import random_json

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"], "additionalProperties": False}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": CONVERSATION, "max_tokens": 9, "seed": 4}), (CHAT, {"messages": CONVERSATION, "max_tokens": 8}),
    (CHAT, {"messages": CONVERSATION, "max_tokens": 5, "tools": [TOOL], "tool_choice": "required", "seed": 1}),
    (CHAT, {"messages": CONVERSATION, "max_tokens": 30, "seed": 2, "response_format": {"type": "json_object", "schema": SCHEMA}}),
    (COMPLETIONS, {"prompt": ["One", "Two"], "n": 2, "max_tokens": 6, "seed": 3, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "The robin", "max_tokens": 7, "stream": True, "model": "gpt-5"}),
    (EMBEDDINGS, {"input": ["a", "b"], "dimensions": 3}), (CHAT, {"messages": CONVERSATION, "nonsense": 1}),
    (COMPLETIONS, {"prompt": "x " * 400}), (CHAT, {"messages": []}),
    (RERANK, {"query": "Where?", "documents": ["The robin", {"text": "Sun"}, "day"], "top_n": 2}), (RERANK, {"query": "Where?"}),
]  # fmt: skip


def make_lines(n: int = len(BODIES)) -> list[bytes]:
    lines = []
    for i in range(n):
        url, body = BODIES[i % len(BODIES)]
        lines.append(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}).encode())
    return lines


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeDecoder:
    """Return a reranker that also chats."""
    path = make_reranker(tmp_path_factory.mktemp("serving") / "Qwen3-Reranker", positions=320)
    write_template(path, TOOL_TEMPLATE_PREFIX + SMOLLM2_TEMPLATE)
    return SpeculativeDecoder(path, "lookup", n_threads=1, gamma=4)


@pytest.fixture
def model(decoder: SpeculativeDecoder) -> ServedModel:
    return ServedModel("talker", decoder, decoder.chat_template)


def run(model: ServedModel, lines: Iterable[BatchLine], max_running: int = 5) -> list[bytes]:
    return sorted(filter(None, BatchRunner(model, max_running=max_running).run(lines)))


def test_results_equal_those_of_the_server_apart_from_times_and_counts(model: ServedModel, app: Any) -> None:
    lines = parse_lines(b"\n".join(make_lines()))
    results = [json.loads(line) for line in run(model, lines)]
    assert [result["custom_id"] for result in results] == [f"r{i}" for i in range(len(BODIES))]
    for line, result in zip(lines, results, strict=True):
        body = line.body if line.url in (EMBEDDINGS, RERANK) else {"seed": int(line.random_id[:8], 16)} | line.body
        expected = send_request(app, line.url, {**body, "model": "talker"})
        assert result["response"]["status_code"] == expected.status, result
        if expected.status != 200:
            assert result["response"]["body"] == expected.json and result["error"]["message"] == expected.error["message"]
            continue
        key = {EMBEDDINGS: "data", RERANK: "results"}.get(line.url, "choices")
        answer, wanted = (without_ids(value[key]) for value in (result["response"]["body"], expected.json))
        assert answer == wanted and result["error"] is None and result["response"]["body"]["model"] == "talker"
    assert results[3]["response"]["body"]["choices"][0]["message"]["content"] in [f'{{"n": {n}}}' for n in (1, 22, 333)]


def without_ids(value: Any) -> Any:
    for choice in value:
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id")
    return value


def test_jobs_that_are_stopped_divided_or_run_one_by_one_give_the_same_lines(model: ServedModel) -> None:
    lines, rng = parse_lines(b"\n".join(make_lines(30))), random.Random(3)
    expected = run(model, lines, 8)
    assert len(expected) == 30 and run(model, lines, 1) == expected
    assert sorted(line for shard in range(3) for line in run(model, lines[shard::3], 2)) == expected
    results = list[bytes]()
    while len(results) < 30:
        done = {json.loads(line)["id"] for line in results}
        iterator = BatchRunner(model, max_running=4).run([line for line in lines if line.id not in done])
        for _, result in zip(range(rng.randrange(1, 40)), iterator):  # noqa: B905
            results += [result] if result else []
        iterator.close()  # type: ignore[attr-defined]
    assert sorted(results) == expected


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"nonsense", "JSON"), (b"[]", "object"), (b"{}", "custom_id"), (b'{"custom_id": 5}', "custom_id"),
        (b'{"custom_id": "a"}', "url"), (b'{"custom_id": "a", "url": "/v1/other", "body": {}}', "/v1/other"),
        (b'{"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}', "method"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "body"),
        (b'{"custom_id": "\\ud800", "url": "/v1/completions", "body": {}}', "string"), (b"\xff", "JSON"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_gets_an_error_line(model: ServedModel, line: bytes, word: str) -> None:
    (result,) = [json.loads(each) for each in run(model, [parse_line(7, line)])]
    assert result["id"] == "batch_req_00000007" and result["response"]["status_code"] == 400
    assert word in result["error"]["message"] and result["response"]["body"]["error"]["message"] == result["error"]["message"]


def test_a_custom_id_is_used_once_and_empty_lines_are_skipped() -> None:
    first, second = make_lines(2)
    lines = parse_lines(b"\n".join([first, b"", second.replace(b"r1", b"r0"), b" "]))
    assert [line.number for line in lines] == [1, 3] and lines[0].error is None
    assert "line 1" in str(lines[1].error) and lines[1].custom_id == "r0"


@pytest.mark.parametrize("n", [150, pytest.param(2000, marks=pytest.mark.campaign)])
def test_mutated_lines_get_error_lines_and_change_no_others(model: ServedModel, n: int) -> None:
    rng, lines, mutated = random.Random(5), make_lines(n), set[int]()
    for i in range(n):
        if rng.random() < 0.5:
            continue
        mutated.add(i + 1)
        if rng.random() < 0.5:
            at = rng.randrange(len(lines[i]))
            lines[i] = lines[i][:at] + bytes([rng.choice(b'{}[]",:0a\\\xff')]) + lines[i][at + rng.randrange(3) :]
        else:
            line = json.loads(lines[i])
            target = rng.choice([line, line["body"]])
            target[rng.choice([*target])] = random_json(rng, 0)
            if isinstance(line["body"], dict) and "max_tokens" in line["body"]:
                line["body"]["max_tokens"] = 3
            lines[i] = json.dumps(line).encode()
    expected = {json.loads(line)["id"]: line for line in run(model, parse_lines(b"\n".join(make_lines(n))), 8)}
    results = run(model, [parse_line(number, line) for number, line in enumerate(lines, 1)], 8)
    assert len(results) == n
    for result in results:
        parsed = json.loads(result)
        assert parsed["response"]["status_code"] in (200, 400), parsed
        if int(parsed["id"].removeprefix("batch_req_")) not in mutated:
            assert result == expected[parsed["id"]]


def test_as_many_sequences_run_as_raise_the_throughput() -> None:
    class Costs:
        def __init__(self, *seconds: float) -> None:
            self.curve = type("Curve", (), {"pass_seconds": [0.0, *seconds]})

    for seconds, n in (((1, 2, 3, 4), 1), ((1, 1.1, 1.2, 1.3), 4), ((1, 1.1, 1.6, 2.15), 3), ((1,), 1)):
        assert find_batch_size(Costs(*seconds)) == n  # type: ignore[arg-type]
    assert find_batch_size(None) == 1
