"""The rerank endpoint: its scores are the library's, and a bad request gets an error that names the field."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from specdec.server.rerank import DOCUMENTS_PER_TASK, RERANK_PATHS
from tests.fakes.asgi import send_request
from tests.tools.rerankers import DOCUMENTS, INSTRUCTION, QUERY, make_reranker
from tests.tools.server_requests import random_json

PATH = RERANK_PATHS[0]
BODY: dict[str, Any] = {
    "model": "talker", "query": QUERY, "documents": [*DOCUMENTS[:3], {"text": DOCUMENTS[4], "id": 7}], "top_n": 3,
    "return_documents": True, "instruction": INSTRUCTION,
}  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeDecoder:
    path = make_reranker(tmp_path_factory.mktemp("serving") / "Qwen3-Reranker")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return SpeculativeDecoder(path, "lookup", n_threads=1, gamma=4)


def test_documents_are_returned_in_the_order_of_the_librarys_scores(app: Any, decoder: SpeculativeDecoder) -> None:
    texts = [*DOCUMENTS[:3], DOCUMENTS[4]]
    scores = decoder.score(QUERY, texts, INSTRUCTION)
    order = sorted(range(4), key=lambda i: -scores[i])
    for path in RERANK_PATHS:
        response = send_request(app, path, BODY).json
        results = [{"index": i, "relevance_score": scores[i], "document": {"text": texts[i]}} for i in order[:3]]
        assert response["results"] == results and response["model"] == "talker"
    assert response["usage"]["total_tokens"] == response["usage"]["prompt_tokens"] > 4 * 200
    plain = send_request(app, PATH, {"query": QUERY, "documents": texts, "top_n": 9}).json["results"]
    assert [{"index", "relevance_score"}] * 4 == [{*result} for result in plain]


def test_many_documents_are_scored_in_several_tasks(app: Any, decoder: SpeculativeDecoder) -> None:
    documents = [f"day {i}" for i in range(2 * DOCUMENTS_PER_TASK + 3)]
    results = send_request(app, PATH, {"query": QUERY, "documents": documents}).json["results"]
    scores = decoder.score(QUERY, documents)
    assert sorted((result["index"], result["relevance_score"]) for result in results) == [*enumerate(scores)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"), ({"query": 5}, "query"), ({"documents": None}, "documents"), ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"), ({"documents": ["a", 5]}, "documents"), ({"documents": [{"t": "a"}]}, "documents"),
        ({"documents": ["a"] * 3000}, "documents"), ({"documents": ["a " * 4000]}, "documents"), ({"top_n": 0}, "top_n"),
        ({"top_n": "3"}, "top_n"), ({"return_documents": 1}, "return_documents"), ({"instruction": []}, "instruction"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"), ({"query": "a" * 10**6}, "documents"),
    ],
)  # fmt: skip
def test_errors_name_the_field(app: Any, fields: dict[str, Any], param: str) -> None:
    response = send_request(app, PATH, BODY | fields)
    assert response.status == 400 and response.error["param"] == param
    assert param in response.error["message"] and "/" not in response.error["message"]


@pytest.mark.parametrize("n", [150, pytest.param(2000, marks=pytest.mark.campaign)])
def test_changed_requests_get_results_or_an_error(app: Any, n: int) -> None:
    rng, statuses = random.Random(9), set()
    for _ in range(n):
        body = json.loads(json.dumps(BODY))
        for _ in range(rng.randrange(1, 3)):
            parent = rng.choice([body, body, body.get("documents"), {}])
            if isinstance(parent, list) and parent:
                parent[rng.randrange(len(parent))] = random_json(rng, 0)
            elif isinstance(parent, dict):
                parent[rng.choice([*BODY, "texts", "user"])] = random_json(rng, 0)
        response = send_request(app, PATH, body)
        statuses.add(response.status)
        assert response.status in (200, 400, 404), (body, response.body)
        if response.status == 200:
            assert all(0 <= result["relevance_score"] <= 1 for result in response.json["results"])
        else:
            assert len(response.error["message"]) < 500
    assert {200, 400} <= statuses


def test_a_model_that_is_no_reranker_is_named(tmp_path: Path) -> None:
    from specdec.server.field_validation import APIError
    from specdec.server.generation_fields import ServedModel
    from specdec.server.rerank import parse_rerank_request

    decoder = SpeculativeDecoder(make_reranker(tmp_path / "Qwen3"), None, n_threads=1)
    with pytest.raises(APIError, match="not a reranker") as caught:
        parse_rerank_request(BODY, ServedModel("talker", decoder, None))
    assert caught.value.param == "model" and caught.value.status == 400
