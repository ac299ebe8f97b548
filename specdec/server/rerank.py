"""The rerank endpoint, in the format of Jina, Cohere and vLLM: a request becomes auxiliary tasks. Knows no server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec.argument_checks import JSONDict, JSONObject, check_string
from specdec.engine.reranker import Reranker
from specdec.model.model import Model
from specdec.server.auxiliary_tasks import AuxiliaryTask
from specdec.server.field_validation import UNSUPPORTED, APIError, Fields, check_list
from specdec.server.generation_fields import ServedModel, wrap_encoding_errors
from specdec.server.json_values import encode_json

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
MAX_DOCUMENTS = 2048  # per request
DOCUMENTS_PER_TASK = 32  # then another client gets a turn


@dataclass(frozen=True)
class RerankRequest:
    """A parsed request for the order of documents by their relevance to a query.

    Attributes:
        reranker: The model.
        prompts: Token ids of each document's prompt.
        documents: The documents.
        n_results: Number of documents to return.
        has_documents: Whether the response repeats the documents.
    """

    reranker: Reranker
    prompts: list[list[int]]
    documents: list[str]
    n_results: int
    has_documents: bool

    @property
    def tasks(self) -> list[Callable[[Model], AuxiliaryTask]]:
        """Functions that take the target and return a task, which scores some of the documents."""
        parts = [self.prompts[i : i + DOCUMENTS_PER_TASK] for i in range(0, len(self.prompts), DOCUMENTS_PER_TASK)]
        return [partial(self._score, part) for part in parts]

    def _score(self, prompts: list[list[int]], _: Model) -> AuxiliaryTask:
        return self.reranker.score(prompts)

    def format_response(self, scores: Sequence[list[float]], name: str) -> bytes:
        """Return the response as JSON, the most relevant document first.

        Args:
            scores: Scores of the documents, in a list for each task.
            name: Name of the model.
        """
        joined = [score for part in scores for score in part]
        results = list[JSONDict]()
        for i in sorted(range(len(joined)), key=lambda i: -joined[i])[: self.n_results]:
            results.append({"index": i, "relevance_score": joined[i]})
            if self.has_documents:
                results[-1]["document"] = {"text": self.documents[i]}
        n_tokens = sum(map(len, self.prompts))
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return encode_json({"object": "list", "model": name, "results": results, "usage": usage})


def parse_rerank_request(body: JSONObject, model: ServedModel) -> RerankRequest:
    """Parse a body of /v1/rerank into a RerankRequest with tokenized prompts.

    Raises:
        APIError: The body is invalid, a document is too long, or the model is not a reranker.
    """
    fields = Fields(body)
    fields.take_string("model")
    try:
        reranker = Reranker(model.decoder.bundle)
    except ValueError as error:
        raise APIError(str(error), "model", UNSUPPORTED) from None
    query = fields.take_required("query", check_string, "a string")
    documents = fields.take_required("documents", _parse_documents, "a list of strings")
    n_results = fields.take_int("top_n", len(documents), 1)
    has_documents = fields.take_bool("return_documents")
    instruction = fields.take("instruction", reranker.check_instruction, None)
    fields.reject_remaining("rerank field")
    with wrap_encoding_errors(model, "documents"):
        prompts = reranker.encode(query, documents, instruction, model.decoder.n_positions)
    return RerankRequest(reranker, prompts, documents, n_results, has_documents)


def _parse_documents(name: str, value: Any) -> list[str]:
    if len(check_list(name, value)) > MAX_DOCUMENTS:
        raise ValueError(f"{name} has {len(value)} items; at most {MAX_DOCUMENTS} are allowed")
    texts = list[str]()
    for i, each in enumerate(value):
        if isinstance(each, dict):
            texts.append(check_string(f"text of {name}[{i}]", each.get("text")))
        else:
            texts.append(check_string(f"{name}[{i}]", each))
    return texts
