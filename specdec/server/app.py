"""The server's endpoints: one method per path. Knows requests and responses and the engine, but no sockets."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router

from specdec.argument_checks import JSONDict, JSONObject
from specdec.engine.metrics import format_prometheus
from specdec.server import ollama
from specdec.server.access_control import Receive, Scope, Send
from specdec.server.anthropic_messages import MessagesFormatter, count_tokens, parse_messages_request
from specdec.server.auxiliary_tasks import AuxiliaryRequest
from specdec.server.body_limits import SMALL_BODY_BYTES, BodyBuffer, read_body
from specdec.server.embeddings import parse_embedding_request
from specdec.server.fair_grammar_builds import FairSemaphore
from specdec.server.field_validation import APIError, parse_body
from specdec.server.generation_fields import ServedModel
from specdec.server.generation_response import (
    RequestParser,
    ResponseStreamer,
    ServerState,
    acquire_model,
    wait_unless_disconnected,
)
from specdec.server.llama_infill import InfillFormatter, parse_infill_request
from specdec.server.openai_chat import CompletionFormatter, parse_chat_request, parse_completion_request
from specdec.server.openai_responses_api import ResponsesFormatter, parse_response_request
from specdec.server.rerank import RERANK_PATHS, parse_rerank_request
from specdec.server.response_formatter import ResponseFormatter
from specdec.server.tokenize import detokenize, tokenize
from specdec.text.reasoning import make_thinking_options

PAGE_PATH = Path(__file__).with_name("page.html")
# by path: the parser of the body, and the class of the response
INTERFACES: dict[str, tuple[RequestParser, type[ResponseFormatter]]] = {
    "/v1/chat/completions": (parse_chat_request, CompletionFormatter),
    "/v1/completions": (parse_completion_request, CompletionFormatter),
    "/infill": (parse_infill_request, InfillFormatter),
    "/v1/messages": (parse_messages_request, MessagesFormatter),
    "/v1/responses": (parse_response_request, ResponsesFormatter),
}
OLLAMA_INTERFACES: dict[str, tuple[RequestParser, type[ResponseFormatter]]] = {
    "/api/chat": (ollama.parse_ollama_chat, ollama.OllamaChatFormatter),
    "/api/generate": (ollama.parse_ollama_generate, ollama.OllamaGenerateFormatter),
}
AUXILIARY_PARSERS: dict[str, Callable[[JSONObject, ServedModel], AuxiliaryRequest]] = {
    "/v1/embeddings": parse_embedding_request,
    "/api/embed": ollama.parse_ollama_embedding,
    "/api/embeddings": ollama.parse_ollama_prompt_embedding,
    **dict.fromkeys(RERANK_PATHS, parse_rerank_request),
}
OLLAMA_CHANGES = ("/api/create", "/api/copy", "/api/delete", "/api/push")
QUERY_HANDLERS = {"/v1/messages/count_tokens": count_tokens, "/tokenize": tokenize, "/detokenize": detokenize}
ROUTING_ERRORS = {404: "path not found; the chat endpoint is /v1/chat/completions", 405: "method not allowed for this path"}
MAX_CONCURRENT_LARGE_BODIES = 1  # large bodies that are tokenized at once, so that small ones find a free process


class Endpoints:
    """The ASGI app that routes each request path to the method that answers it; these share the server's state."""

    def __init__(self, state: ServerState) -> None:
        """Create the routes for the server's state."""
        self._state, self._model_manager = state, state.model_manager
        self._body_buffer, self._large_bodies = BodyBuffer(), FairSemaphore(MAX_CONCURRENT_LARGE_BODIES)
        self._page = _load_page()
        self._router = Router(
            [
                Route("/", self.page),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                *(Route(path, self.generate, methods=["POST"]) for path in INTERFACES),
                *(Route(path, self.query, methods=["POST"]) for path in QUERY_HANDLERS),
                *(Route(path, self.run_tasks, methods=["POST"]) for path in AUXILIARY_PARSERS),
                *(Route(path, self.ollama_generate, methods=["POST"]) for path in OLLAMA_INTERFACES),
                Route("/api/version", self.ollama_version),
                Route("/api/tags", self.ollama_models),
                Route("/api/ps", self.ollama_models),
                Route("/api/show", self.ollama_model, methods=["POST"]),
                Route("/api/pull", self.ollama_pull, methods=["POST"]),
                *(Route(path, self.ollama_change, methods=["POST", "DELETE"]) for path in OLLAMA_CHANGES),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route a request to its endpoint. A slash at the end of a path is ignored, without a redirect.

        Raises:
            APIError: There is no such path, or it does not allow the method.
        """
        try:
            await self._router({**scope, "path": scope["path"].rstrip("/") or "/", "app": self._router}, receive, send)
        except HTTPException as error:
            raise APIError(ROUTING_ERRORS[error.status_code], None, None, error.status_code, error.headers or {}) from None

    async def page(self, _: Request) -> Response:
        """Return the HTML page to chat with the models."""
        return self._page

    async def health(self, _: Request) -> Response:
        """Return the health status as JSON; it is always ok."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """Return the metrics of all models in Prometheus' text format."""
        return PlainTextResponse(format_prometheus(self._model_manager.metrics), media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        """Return the list of available models, loaded or not, in OpenAI's format."""
        sizes = await self._list_models()
        return JSONResponse({"object": "list", "data": [self._format_model(*each) for each in sizes.items()]})

    async def model(self, request: Request) -> Response:
        """Return the model that the path names, in OpenAI's format; raises APIError if it is not available."""
        name = request.path_params["name"]
        return JSONResponse(self._format_model(name, await self._find_model(name, "/v1/models lists the models")))

    async def _list_models(self) -> Mapping[str, int]:
        return await asyncio.to_thread(self._model_manager.list_models)

    async def _find_model(self, name: str, hint: str) -> int:
        """Return the size in bytes of an available model; raise APIError with the hint for another one."""
        if (n_bytes := (await self._list_models()).get(name)) is None:
            raise APIError(f"model not found; {hint}", "model", "model_not_found", 404)
        return n_bytes

    def _format_model(self, name: str, n_bytes: int) -> JSONDict:
        """Return a model in OpenAI's format, with its size and, if it is loaded, the details that the chat page needs."""
        instance, details = self._model_manager.get_instance(name), JSONDict()
        if instance:
            decoder, template = instance.model.decoder, instance.model.template
            details = {
                "context": decoder.n_positions,
                "weights": decoder.weights,
                "has_draft": decoder.has_draft,
                "can_chat": template is not None,
                "can_switch_thinking": template is not None and bool(make_thinking_options(template, False)),
            }
        created = instance.created if instance else 0
        status = {"is_loaded": instance is not None, "bytes": n_bytes, **details}
        return {"id": name, "object": "model", "created": created, "owned_by": "specdec", "specdec": status}

    async def _read_body(self, request: Request) -> tuple[JSONDict, AbstractAsyncContextManager[None]]:
        """Receive a request and return its parsed JSON body, and a context manager to enter while the body is tokenized.

        A large body waits for a permit before it is parsed, and in that context again, so that it does not delay small ones.

        Raises:
            APIError: The body is not accepted (see `read_body`) or is invalid (see `parse_body`).
            ConnectionResetError: The client has disconnected.
        """
        async with read_body(request, self._body_buffer) as data:
            is_large, client = len(data) > SMALL_BODY_BYTES, request.scope["api_client"].name
            parsing, tokenizing = (self._large_bodies.hold(client) if is_large else nullcontext() for _ in range(2))
            async with parsing:
                return await asyncio.to_thread(parse_body, data), tokenizing

    async def generate(self, request: Request) -> object:
        """Read the body of a request and return the response, which generates tokens in the format of the path's API."""
        return ResponseStreamer(self._state, INTERFACES[request.scope["path"]], *await self._read_body(request))

    async def ollama_generate(self, request: Request) -> object:
        """Return the response to a request of ollama's API; one without a prompt only loads the model and generates nothing."""
        body, permit = await self._read_body(request)
        body = ollama.normalize_body(body)
        if ollama.is_load_request(body):
            async with acquire_model(self._model_manager, body, request.receive) as (instance, _):
                return JSONResponse(ollama.format_loaded(instance.model.name))
        return ResponseStreamer(self._state, OLLAMA_INTERFACES[request.scope["path"]], body, permit)

    async def ollama_version(self, _: Request) -> Response:
        """Return the version of ollama's API."""
        return JSONResponse({"version": ollama.API_VERSION})

    async def ollama_models(self, request: Request) -> Response:
        """Return the list of available models in ollama's format; the path /api/ps lists only the loaded ones."""
        sizes = await self._list_models()
        models = [(*each, self._get_model(each[0])) for each in sizes.items()]
        is_loaded_only = request.scope["path"] == "/api/ps"
        return JSONResponse({"models": [ollama.format_model(*each) for each in models if each[2] or not is_loaded_only]})

    async def ollama_model(self, request: Request) -> Response:
        """Return the details of a model in ollama's format, without loading it; raises APIError if it is not available."""
        name = ollama.normalize_body((await self._read_body(request))[0])["model"]
        n_bytes = await self._find_model(name, "/api/tags lists the models")
        return JSONResponse(ollama.format_model_details(name, n_bytes, self._get_model(name)))

    async def ollama_pull(self, request: Request) -> Response:
        """Report success for a model that is here; raises APIError for another one, since the server downloads nothing."""
        body = ollama.normalize_body((await self._read_body(request))[0])
        await self._find_model(body["model"], "the server downloads none; use specdec models pull org/name")
        media_type = "application/json" if body.get("stream") is False else "application/x-ndjson"
        return Response(b'{"status":"success"}\n', media_type=media_type)

    async def ollama_change(self, _: Request) -> Response:
        """Raise APIError, since clients may not change the models."""
        raise APIError("the server does not change models; use specdec models pull, rm and name", None, None, 403)

    def _get_model(self, name: str) -> ServedModel | None:
        instance = self._model_manager.get_instance(name)
        return instance.model if instance else None

    async def query(self, request: Request) -> Response:
        """Return the JSON response of the path's handler in `QUERY_HANDLERS`, which needs a model but generates nothing."""
        handle = QUERY_HANDLERS[request.scope["path"]]
        body, permit = await self._read_body(request)
        async with acquire_model(self._model_manager, body, request.receive) as (instance, _), permit:
            return JSONResponse(await asyncio.to_thread(handle, body, instance.model))

    async def run_tasks(self, request: Request) -> Response:
        """Return the JSON response to a request for embeddings or an order of documents, after its tasks have run."""
        (body, permit), parse = await self._read_body(request), AUXILIARY_PARSERS[request.scope["path"]]
        async with acquire_model(self._model_manager, body, request.receive) as (instance, disconnected):
            async with permit:
                parsed = await asyncio.to_thread(parse, body, instance.model)
            futures = instance.engine.submit_auxiliary(parsed.tasks, request.scope["api_client"])
            results = await wait_unless_disconnected(disconnected, asyncio.gather(*map(asyncio.wrap_future, futures)))
            data = await asyncio.to_thread(parsed.format_response, results, instance.model.name)
            return Response(data, media_type="application/json")


def _load_page() -> Response:
    """Return the response with the chat page, and a policy that allows only the page's own style and script."""
    page = PAGE_PATH.read_text(encoding="utf-8")

    def hash_sources(tag: str) -> str:
        sources = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in sources]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hash_sources('script')}; style-src {hash_sources('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
    return HTMLResponse(page, headers=headers)
