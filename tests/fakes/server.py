"""A server without a socket and an engine: requests, a scheduler that sends given events, and the state of the app."""

from collections.abc import Sequence
from typing import Any

from specdec import SpeculativeDecoder, Step
from specdec.engine.metrics import Metrics
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Client
from specdec.server.engine_thread import EventCallback
from specdec.server.generation_fields import ServedModel
from specdec.server.generation_response import ServerState
from specdec.server.model_manager import ModelInstance, make_single_model_manager

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONVERSATION = [{"role": "user", "content": "Where did the robin go?"}]
SAMPLING_FIELDS = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 12}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class FakeScheduler:
    """A scheduler that sends the same events for every request, or raises."""

    def __init__(self, *events: Any, error: Exception | None = None) -> None:
        self.events, self.error, self.metrics, self.requests = events, error, Metrics(), list[GenerationRequest]()
        self.n_cancelled = 0

    def submit(
        self, requests: Sequence[GenerationRequest], callbacks: Sequence[EventCallback], client: Client
    ) -> list["FakeScheduler"]:
        if self.error:
            raise self.error
        self.requests += requests
        for on_event in callbacks:
            for event in self.events:
                on_event(event)
        return [self for _ in requests]

    def cancel(self) -> None:
        self.n_cancelled += 1


def make_state(model: ServedModel, scheduler: Any) -> ServerState:
    return ServerState(make_single_model_manager(ModelInstance(model, scheduler, 1)))


def make_app(
    model: ServedModel | SpeculativeDecoder, scheduler: Any, keys: Sequence[str] = (), log: list[str] | None = None
) -> Any:
    """Return the app over a scheduler, for requests to localhost; a decoder is served as `talker`."""
    from specdec.server.access_control import AuthMiddleware
    from specdec.server.app import Endpoints

    if isinstance(model, SpeculativeDecoder):
        model = ServedModel("talker", model, model.chat_template)
    return AuthMiddleware(Endpoints(make_state(model, scheduler)), keys, {"localhost"}, ([] if log is None else log).append)


def step(text: str, stop_reason: str | None = None, **fields: Any) -> Step:
    return Step([1], [], 0, 0.0, 0.0, stop_reason, pieces=[text], **fields)
