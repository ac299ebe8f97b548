"""The server's answers: one function a path. Knows requests and answers, an engine, and nothing of sockets."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router

from specdec.engine.metrics import exposition
from specdec.server.anthropic_messages import messages_asked, tokens_counted
from specdec.server.auth import App, Receive, Scope, Send
from specdec.server.body_limits import SMALL_BYTES, Room, body_of_bytes
from specdec.server.embeddings import embeddings_asked
from specdec.server.openai_requests import Asked, Model, chat_asked, completion_asked
from specdec.server.openai_responses import response_asked
from specdec.server.schema_builder import Turns
from specdec.server.streaming import Answering, Service, asked_model, json_of, unless
from specdec.server.tokenize import detokenized, tokenized
from specdec.server.validation import Refused, body_of

PAGE = Path(__file__).with_name("page.html")
WRITE = {
    "/v1/chat/completions": chat_asked,
    "/v1/completions": completion_asked,
    "/v1/messages": messages_asked,
    "/v1/responses": response_asked,
}
TELL = {"/v1/messages/count_tokens": tokens_counted, "/tokenize": tokenized, "/detokenize": detokenized}
NOT_THERE = {404: "there is nothing at this path; talks are at /v1/chat/completions", 405: "this path does not take this method"}
LARGE_AT_ONCE = 1  # other bodies of which tokens are made: small ones have another process then


def app_of(service: Service) -> App:
    """All paths."""
    paths = Paths(service)
    routes = [
        Route("/", paths.page),
        Route("/health", paths.health),
        Route("/metrics", paths.metrics),
        Route("/v1/models", paths.models),
        Route("/v1/models/{name:path}", paths.one_model),
        *(Route(path, partial(paths.write, read), methods=["POST"]) for path, read in WRITE.items()),
        *(Route(path, partial(paths.tell, read), methods=["POST"]) for path, read in TELL.items()),
        Route("/v1/embeddings", paths.embeddings, methods=["POST"]),
    ]
    router = Router(routes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """A path means the same with a slash at its end: nobody is sent elsewhere."""
        try:
            await router({**scope, "path": scope["path"].rstrip("/") or "/", "app": router}, receive, send)
        except HTTPException as error:
            raise Refused(NOT_THERE[error.status_code], None, None, error.status_code, error.headers or {}) from None

    return app


class Paths:
    """What is at each of them."""

    def __init__(self, service: Service) -> None:
        self._service, self._shelf = service, service.shelf
        self._room, self._large = Room(), Turns(LARGE_AT_ONCE)
        self._page = _page()

    async def page(self, _: Request) -> Response:
        return self._page

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(exposition(self._shelf.figures), media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        sizes = await asyncio.to_thread(self._shelf.sizes)
        return JSONResponse({"object": "list", "data": [self._told(*each) for each in sizes.items()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        sizes = await asyncio.to_thread(self._shelf.sizes)
        if name not in sizes:
            raise Refused("there is no such model here; /v1/models lists those that there are", "model", "model_not_found", 404)
        return JSONResponse(self._told(name, sizes[name]))

    def _told(self, name: str, n_bytes: int) -> dict[str, Any]:
        """A model, as OpenAI tells of one; and what the page has to know."""
        served, more = self._shelf.loaded(name), dict[str, Any]()
        if served:
            decoder = served.model.decoder
            more = {
                "context": decoder.n_positions,
                "weights": decoder.weights,
                "has_draft": decoder.has_draft,
                "can_chat": served.model.template is not None,
            }
        created = served.created if served else 0
        told = {"is_loaded": served is not None, "bytes": n_bytes, **more}
        return {"id": name, "object": "model", "created": created, "owned_by": "specdec", "specdec": told}

    async def _body(self, request: Request) -> tuple[dict[str, Any], AbstractAsyncContextManager[None]]:
        """A request's body, and around what makes tokens of it its turn: or large ones would keep small ones waiting."""
        async with body_of_bytes(request, self._room) as data:
            is_large = len(data) > SMALL_BYTES

            def turn() -> AbstractAsyncContextManager[None]:
                return self._large.of(request.scope["who"].name) if is_large else nullcontext()

            async with turn():
                return await asyncio.to_thread(body_of, data), turn()

    async def write(self, read: Callable[[Mapping[str, Any], Model], Asked], request: Request) -> Any:
        return Answering(self._service, read, *await self._body(request))

    async def tell(self, read: Callable[[Mapping[str, Any], Model], Any], request: Request) -> Response:
        body, turn = await self._body(request)
        async with asked_model(self._shelf, body, request.receive) as (served, _), turn:
            return JSONResponse(await asyncio.to_thread(read, body, served.model))

    async def embeddings(self, request: Request) -> Response:
        body, turn = await self._body(request)
        async with asked_model(self._shelf, body, request.receive) as (served, leaving):
            async with turn:
                asked = await asyncio.to_thread(embeddings_asked, body, served.model)
            futures = served.engine.beside(asked.work, request.scope["who"])
            vectors = await unless(leaving, asyncio.gather(*map(asyncio.wrap_future, futures)))
            answer = await asyncio.to_thread(lambda: json_of(asked.answer(vectors, served.model.name)))
            return Response(answer, media_type="application/json")


def _page() -> Response:
    """The page, with the policy that lets its own style and script run, and nothing else."""
    page = PAGE.read_text(encoding="utf-8")

    def source(tag: str) -> str:
        inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inside]
        return " ".join(f"'sha256-{each}'" for each in hashes)

    policy = (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
    return HTMLResponse(page, headers=headers)
