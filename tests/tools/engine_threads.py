"""Engine threads, their requests and outputs."""

import threading
import time

import pytest

from specdec import Proposal, Sampling
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Client
from specdec.events import Prompt, Step
from specdec.server.engine_thread import EngineThread

TIMEOUT_S = 60.0


class Output:
    """The events of a request, collected as its callback."""

    def __init__(self, slow=0.0):
        self.events, self.finished, self.started, self._slow = [], threading.Event(), threading.Event(), slow

    def __call__(self, event):
        assert threading.current_thread().name == "engine" and not self.finished.is_set()
        self.events.append(event)
        time.sleep(self._slow)
        if isinstance(event, Step):
            self.started.set()
        if isinstance(event, Exception) or (isinstance(event, Step) and event.stop_reason):
            self.finished.set()

    def wait(self):
        assert self.finished.wait(TIMEOUT_S), "the request did not finish"
        return self.events

    @property
    def text(self):
        return "".join(event.text for event in self.wait() if not isinstance(event, Proposal))

    @property
    def steps(self):
        return [event for event in self.events if isinstance(event, Step)]


def submit(engine, request, on_event, client=Client()):  # noqa: B008 (immutable)
    """Submit a single request."""
    return engine.submit([request], [on_event], client)[0]


def submit_all(engine, requests):
    """Submit requests, and return the output of each."""
    outputs = [Output() for _ in requests]
    for request, output in zip(requests, outputs, strict=True):
        submit(engine, request, output)
    return outputs


@pytest.fixture
def make_engine():
    """Make engine threads, and close them at the end."""
    engines, before = [], {*threading.enumerate()}

    def make(decoder, max_running=8, max_waiting=1000, cache_bytes=10**9):
        engines.append(EngineThread(decoder, max_running, max_waiting, cache_bytes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close(0.0)
    assert not {thread for thread in threading.enumerate() if thread.name == "engine"} - before


def generate_with_library(decoder, request):
    """Return the text, the tokens and the stop reason."""
    events = [
        *decoder.stream(
            request.prompt, request.max_tokens, request.sampling, stop=list(request.stop_strings), constraint=request.constraint
        )
    ]
    steps = [event for event in events if isinstance(event, Step)]
    text = "".join(event.text for event in events if not isinstance(event, Proposal))
    return text, [token for step in steps for token in step.tokens], steps[-1].stop_reason if steps else "max_tokens"


def assert_same(decoder, request, output):
    assert not isinstance(output.wait()[-1], Exception), output.events[-1]
    assert isinstance(output.events[0], Prompt) and output.events[0].tokens == request.prompt
    tokens = [token for step in output.steps for token in step.tokens]
    assert (output.text, tokens, output.steps[-1].stop_reason) == generate_with_library(decoder, request)


def assert_all_same(decoder, requests, outputs):
    for request, output in zip(requests, outputs, strict=True):
        assert_same(decoder, request, output)


def make_request(decoder, n, prompt="abc", **more):
    return GenerationRequest(decoder.encode(prompt), n, Sampling(1.0, seed=3), **more)
