"""Several models: each is loaded on demand and unloaded when idle, and waiting clients see the progress."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec import SpeculativeDecoder
from specdec.engine.sequence import Client
from specdec.server.access_control import AuthMiddleware
from specdec.server.app import Endpoints
from specdec.server.engine_thread import EngineThread, ShutdownError
from specdec.server.field_validation import APIError
from specdec.server.generation_fields import ServedModel
from specdec.server.generation_response import ResponseStreamer, ServerState
from specdec.server.model_manager import ModelInstance, ModelManager
from tests.fakes.asgi import send_request
from tests.fakes.server import CHAT, COMPLETIONS
from tests.tools.prompt_caches import endless  # noqa: F401
from tests.tools.waiting import wait_until

MESSAGES = "/v1/messages"
BODY = {"prompt": "Once", "max_tokens": 8, "temperature": 0.7, "seed": 3}


class FakeSource:
    """A source of one decoder under several names; `gate` holds back the next load."""

    def __init__(self, decoder, names=("a", "b", "c"), memory_bytes=1e12):
        self.decoder, self.names, self.memory_bytes = decoder, names, memory_bytes
        self.gate, self.loaded, self.limits, self.error = threading.Event(), [], [], None
        self.gate.set()

    def list_models(self):
        return dict.fromkeys(self.names, self.decoder.target.weights.n_bytes)

    def load(self, name, on_progress):
        on_progress(0.25)
        assert self.gate.wait(60)
        if self.error:
            raise self.error
        on_progress(0.75)
        self.loaded.append(name)
        decoder = SpeculativeDecoder(self.decoder.target, None, self.decoder.tokenizer, n_threads=1)
        return ModelInstance(ServedModel(name, decoder, None), EngineThread(decoder, 4, 8, 10**7), 1)

    def limit_caches(self, instances):
        self.limits.append([each.model.name for each in instances])


@pytest.fixture
def make_manager(endless):
    managers = []

    def make(keep_alive=None, **more):
        source, log = FakeSource(endless, **more), []
        managers.append(ModelManager(source, keep_alive, log.append))
        return (managers[-1], source, AuthMiddleware(Endpoints(ServerState(managers[-1])), (), {"localhost"}, log.append), log)

    yield make
    for manager in managers:
        manager.close(0.0)


def wait_for_loaders():
    """Wait for the threads that load models, of managers that are closed."""
    for thread in threading.enumerate():
        if thread.name.startswith("loading"):
            thread.join(60)


def get_text(response):
    assert response.status == 200, response.body
    return response.json["choices"][0]["text"]


def test_a_model_is_loaded_once_by_the_requests_that_name_it(make_manager):
    _, source, app, log = make_manager()
    with ThreadPoolExecutor(6) as pool:
        responses = list(pool.map(lambda name: send_request(app, COMPLETIONS, BODY | {"model": name}), "aababb"))
    assert [response.json["model"] for response in responses] == list("aababb") and sorted(source.loaded) == ["a", "b"]
    assert len({get_text(response) for response in responses}) == 1
    assert send_request(app, COMPLETIONS, BODY).json["model"] in "ab", "the last requested one"
    details = {each["id"]: each["specdec"] for each in send_request(app, "/v1/models").json["data"]}
    assert {name: each["is_loaded"] for name, each in details.items()} == {"a": True, "b": True, "c": False}
    assert "can_chat" in details["a"] and "can_chat" not in details["c"]
    assert send_request(app, "/v1/models/c").json["id"] == "c" and send_request(app, "/v1/models/d").status == 404
    error_response = send_request(app, COMPLETIONS, BODY | {"model": "d"})
    assert error_response.status == 404 and error_response.error["message"].endswith("; available: a, b, c")
    assert send_request(app, "/tokenize", {"content": "x", "model": "c"}).status == 200 and source.loaded[-1] == "c"
    assert send_request(app, "/metrics").body.decode().count("specdec_requests_done_total 7") == 1
    assert [line for line in log if line.startswith("loaded ")]


def test_a_request_without_a_name_uses_the_first_model(make_manager):
    _, _, app, _ = make_manager()
    assert send_request(app, COMPLETIONS, BODY).json["model"] == "a"


def test_a_stream_reports_loading_and_a_disconnected_client_is_released(make_manager, monkeypatch):
    monkeypatch.setattr("specdec.server.generation_response.PROGRESS_INTERVAL_S", 0.01)
    manager, source, app, _ = make_manager()
    source.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(send_request, app, COMPLETIONS, BODY | {"model": "a", "stream": True})
        send_request(app, COMPLETIONS, BODY | {"model": "a"}, disconnect_after=0)
        time.sleep(0.1)
        source.gate.set()
        response = streaming.result()
    body = response.body.decode()
    comments = [part for part in body.split("\n\n") if part.startswith(": loading a")]
    assert ": loading a, 25%" in comments and comments[0] in (": loading a, 0%", ": loading a, 25%"), (
        "the first comment may be early"
    )
    assert body.startswith(comments[0]) and body.endswith("data: [DONE]\n\n")
    text = "".join(json.loads(part[6:])["choices"][0]["text"] for part in body.split("\n\n") if part.startswith("data: {"))
    assert text == get_text(send_request(app, COMPLETIONS, BODY | {"model": "a"}))
    assert manager.acquire("a").n_requests == 1, "the disconnected client is released"


def test_streams_of_agents_get_events_while_a_model_is_loaded(make_manager, monkeypatch):
    """These models cannot chat, so an error follows. Comments alone would be a timeout for Codex."""
    monkeypatch.setattr("specdec.server.generation_response.PROGRESS_INTERVAL_S", 0.01)
    _, source, app, _ = make_manager()
    source.error, send_progress, n_sent = ValueError("no"), ResponseStreamer._send_progress, []

    async def send_progress_four_times(streamer, entry):
        await send_progress(streamer, entry)
        n_sent.append(1)
        if len(n_sent) % 4 == 0:
            source.gate.set()

    monkeypatch.setattr(ResponseStreamer, "_send_progress", send_progress_four_times)
    for path, body, expected in (
        ("/v1/responses", {"input": "x"}, ["response.created", "response.in_progress"]),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, ["ping", "ping"]),
    ):
        source.gate.clear()
        sent = send_request(app, path, body | {"model": "a", "stream": True}).body.decode()
        events = [json.loads(line.removeprefix("data: ")) for line in sent.split("\n") if line.startswith("data: ")]
        types = [event["type"] for event in events]
        assert types[:2] == expected and {*types[2:-1]} <= {expected[1]} and len(types) > 3
        if path == "/v1/responses":
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
            assert types[-1] == "response.failed" and len({event["response"]["id"] for event in events}) == 1
        else:
            assert types[-1] == "error"


def test_a_failed_load_is_reported_and_can_be_retried(make_manager, monkeypatch):
    monkeypatch.setattr("specdec.server.generation_response.PROGRESS_INTERVAL_S", 0.01)
    _, source, app, log = make_manager()
    source.error = ValueError("/srv/my models/org/a.bin is truncated; https://a.b/c has it")
    error_response = send_request(app, COMPLETIONS, BODY | {"model": "a"})
    message = "a cannot be loaded: a.bin is truncated; https://a.b/c has it"
    assert error_response.status == 503 and error_response.error["message"] == message, "the folder is only in the log"
    assert f"a cannot be loaded: {source.error}" in log
    source.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(send_request, app, COMPLETIONS, BODY | {"model": "a", "stream": True})
        time.sleep(0.1)
        source.gate.set()
        body = streaming.result().body.decode()
    assert "a.bin is truncated" in body and body.startswith(": loading a")
    source.error = None
    assert get_text(send_request(app, COMPLETIONS, BODY | {"model": "a"}))


def test_request_errors_are_reported_in_a_stream_after_loading(make_manager, monkeypatch):
    monkeypatch.setattr("specdec.server.generation_response.PROGRESS_INTERVAL_S", 0.01)
    _, source, app, log = make_manager()
    for name, path, fields, message, code in (
        ("a", CHAT, {"messages": []}, "has no chat template", "unsupported_model messages"),
        ("b", COMPLETIONS, {"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value logit_bias"),
    ):
        source.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(send_request, app, path, {"model": name, "stream": True, **fields})
            time.sleep(0.1)
            source.gate.set()
            body = streaming.result().body.decode()
        error = json.loads(body.partition("data: ")[2].partition("\n")[0])["error"]
        assert body.startswith(f": loading {name}") and message in error["message"]
        assert " 200 " in log[-1] and code in log[-1]
    assert send_request(app, CHAT, {"model": "a", "stream": True, "messages": []}).status == 400


def test_idle_models_are_unloaded_for_others_and_after_keep_alive(make_manager):
    manager, source, app, log = make_manager(memory_bytes=100_000_000, keep_alive=0.0)
    size = source.decoder.target.weights.n_bytes
    source.memory_bytes = 2.5 * size / 0.75
    for name in "abc":
        assert get_text(send_request(app, COMPLETIONS, BODY | {"model": name}))
    assert (
        manager.get_instance("a") is None
        and manager.get_instance("b")
        and manager.get_instance("c")
        and log.count("unloaded a") == 1
    )
    assert source.limits[-1] == ["b", "c"]
    entry = manager.acquire("b")
    manager.unload_idle()
    wait_until(lambda: manager.get_instance("c") is None)
    assert manager.get_instance("b"), "it is in use"
    source.memory_bytes = 1.5 * size / 0.75
    with pytest.raises(APIError, match="not enough memory for a next to b"):
        manager.acquire("a").loading.result(60)
    manager.release(entry)
    assert get_text(send_request(app, COMPLETIONS, BODY | {"model": "a"})) and manager.get_instance("b") is None
    assert "specdec_requests_done_total 4" in send_request(app, "/metrics").body.decode(), "metrics outlive models"


def test_slow_listing_of_models_does_not_block_other_requests(make_manager, monkeypatch):
    """An unknown name lists the models again, outside of all locks, in one thread at a time."""
    monkeypatch.setattr("specdec.server.model_manager.UNKNOWN_NAME_MAX_AGE_S", 0.0)
    _, source, app, _ = make_manager()
    text = get_text(send_request(app, COMPLETIONS, BODY | {"model": "a"}))
    list_models, gate, started = source.list_models, threading.Event(), threading.Event()

    def list_slowly():
        started.set()
        assert gate.wait(60)
        return list_models()

    source.list_models = list_slowly
    with ThreadPoolExecutor(3) as pool:
        try:
            first = pool.submit(send_request, app, COMPLETIONS, BODY | {"model": "nope"})
            assert started.wait(60)
            assert get_text(pool.submit(send_request, app, COMPLETIONS, BODY | {"model": "a"}).result(30)) == text
            assert pool.submit(send_request, app, "/metrics").result(30).status == 200
            assert pool.submit(send_request, app, COMPLETIONS, BODY | {"model": "nope"}).result(30).status == 404
            assert not first.done()
        finally:
            gate.set()
        assert first.result(30).status == 404
    source.list_models, source.names = list_models, ("a", "new")
    assert get_text(send_request(app, COMPLETIONS, BODY | {"model": "new"})) == text, "a model added meanwhile"


def test_requests_waiting_for_a_model_are_rejected_at_shutdown(make_manager, monkeypatch):
    monkeypatch.setattr("specdec.server.generation_response.PROGRESS_INTERVAL_S", 0.01)
    manager, source, app, log = make_manager()
    source.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(send_request, app, COMPLETIONS, BODY | {"model": name, "stream": name == "b"}) for name in "abc"]
        streaming = pool.submit(send_request, app, MESSAGES, {"model": "a", "stream": True})
        entries = [manager.acquire(name) for name in "abc"]
        wait_until(lambda: sum(entry.n_requests for entry in entries) >= 4 + 3)
        manager.close(0.0)
        first, stream, other = (each.result(30) for each in waiting)
        messages_body = streaming.result(30).body.decode()
    for response in (first, other, send_request(app, COMPLETIONS, BODY | {"model": "a"}), send_request(app, COMPLETIONS, BODY)):
        assert (response.status, response.error["code"], response.headers["retry-after"]) == (503, "shutting_down", "1")
    assert json.loads(stream.body.decode().rpartition("data: ")[2])["error"]["code"] == "shutting_down"
    assert json.loads(messages_body.rpartition("data: ")[2])["error"]["type"] == "overloaded_error", "in Anthropic's format"
    assert send_request(app, "/v1/models").status == 200
    source.gate.set()
    wait_for_loaders()
    assert source.loaded == [] and not any("cannot be loaded" in line for line in log), "nobody waits for the model"
    assert manager.get_instance("a") is None


def test_a_model_loaded_during_shutdown_is_closed(make_manager):
    manager, source, _, _ = make_manager()
    entry = manager.acquire("a")
    entry.loading.result(30)
    instance = entry.instance
    other = ModelInstance(instance.model, EngineThread(instance.model.decoder, 1, 1, 10**7), 1)

    def load_late(name, on_progress):
        manager.close(0.0)
        return other

    source.load = load_late
    with pytest.raises(ShutdownError):
        manager.acquire("b").loading.result(30)
    wait_for_loaders()
    with pytest.raises(ShutdownError):
        other.engine.submit([], [], Client())
