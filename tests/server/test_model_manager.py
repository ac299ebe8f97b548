"""Several models: each is loaded when it is asked for, dropped when it is idle, and who waits for one is told."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
from specdec import SpeculativeDecoder
from specdec.engine.scheduler import Closed, Engine
from specdec.server.app import app_of
from specdec.server.auth import Guard
from specdec.server.model_manager import Served, Shelf
from specdec.server.openai_requests import Model
from specdec.server.streaming import Service
from specdec.server.validation import Refused
from tests.engine.test_scheduler import endless  # noqa: F401
from tests.server.test_openai_api import CHAT, TEXT, ask

MESSAGES = "/v1/messages"
ASKED = {"prompt": "Once", "max_tokens": 8, "temperature": 0.7, "seed": 3}


class Source:
    """Models of one decoder, by several names; `gate` holds back the next one."""

    def __init__(self, decoder, names=("a", "b", "c"), n_bytes=1e12):
        self.decoder, self.names, self.n_bytes = decoder, names, n_bytes
        self.gate, self.loaded, self.limits, self.error = threading.Event(), [], [], None
        self.gate.set()

    def sizes(self):
        return dict.fromkeys(self.names, self.decoder.target.weights.n_bytes)

    def load(self, name, tell):
        tell(0.25)
        assert self.gate.wait(60)
        if self.error:
            raise self.error
        tell(0.75)
        self.loaded.append(name)
        decoder = SpeculativeDecoder(self.decoder.target, None, self.decoder.tokenizer, n_threads=1)
        return Served(Model(name, decoder, None), Engine(decoder, 4, 8, 10**7), 1)

    def limit(self, served):
        self.limits.append([each.model.name for each in served])


@pytest.fixture
def shelves(endless):
    made = []

    def shelf(keep_alive=None, **more):
        source, lines = Source(endless, **more), []
        made.append(Shelf(source, keep_alive, lines.append))
        return made[-1], source, Guard(app_of(Service(made[-1], "print")), (), {"localhost"}, lines.append), lines

    yield shelf
    for each in made:
        each.close(0.0)


def text_of(reply):
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def test_a_request_names_its_model_which_is_loaded_once(shelves):
    _, source, app, lines = shelves()
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda name: ask(app, TEXT, ASKED | {"model": name}), "aababb"))
    assert [reply.json["model"] for reply in replies] == list("aababb") and sorted(source.loaded) == ["a", "b"]
    assert len({text_of(reply) for reply in replies}) == 1
    assert ask(app, TEXT, ASKED).json["model"] in "ab", "the last that was asked for"
    told = {each["id"]: each["specdec"] for each in ask(app, "/v1/models").json["data"]}
    assert {name: each["is_loaded"] for name, each in told.items()} == {"a": True, "b": True, "c": False}
    assert "can_chat" in told["a"] and "can_chat" not in told["c"]
    assert ask(app, "/v1/models/c").json["id"] == "c" and ask(app, "/v1/models/d").status == 404
    refused = ask(app, TEXT, ASKED | {"model": "d"})
    assert refused.status == 404 and "there are a, b, c" in refused.error["message"]
    assert ask(app, "/tokenize", {"content": "x", "model": "c"}).status == 200 and source.loaded[-1] == "c"
    assert ask(app, "/metrics").body.decode().count("specdec_requests_done_total 7") == 1
    assert [line for line in lines if line.startswith("loaded ")]


def test_without_a_name_it_is_the_first(shelves):
    _, _, app, _ = shelves()
    assert ask(app, TEXT, ASKED).json["model"] == "a"


def test_loading_is_told_in_a_stream_and_a_client_that_leaves_waits_for_nothing(shelves, monkeypatch):
    monkeypatch.setattr("specdec.server.streaming.LOADING_SECONDS", 0.01)
    shelf, source, app, _ = shelves()
    source.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(ask, app, TEXT, ASKED | {"model": "a", "stream": True})
        ask(app, TEXT, ASKED | {"model": "a"}, leaves_after=0)
        time.sleep(0.1)
        source.gate.set()
        reply = streaming.result()
    body = reply.body.decode()
    told = [part for part in body.split("\n\n") if part.startswith(": loading a")]
    assert ": loading a, 25%" in told and told[0] in (": loading a, 0%", ": loading a, 25%"), "who asks first may be early"
    assert body.startswith(told[0]) and body.endswith("data: [DONE]\n\n")
    words = "".join(json.loads(part[6:])["choices"][0]["text"] for part in body.split("\n\n") if part.startswith("data: {"))
    assert words == text_of(ask(app, TEXT, ASKED | {"model": "a"}))
    assert shelf.begin("a").users == 1, "who has left counts no more"


def test_a_model_that_cannot_be_loaded_is_refused_and_may_be_asked_for_again(shelves, monkeypatch):
    monkeypatch.setattr("specdec.server.streaming.LOADING_SECONDS", 0.01)
    _, source, app, lines = shelves()
    source.error = ValueError("/srv/my models/org/a.bin is truncated; https://a.b/c has it")
    refused = ask(app, TEXT, ASKED | {"model": "a"})
    told = "a cannot be loaded: a.bin is truncated; https://a.b/c has it"
    assert refused.status == 503 and refused.error["message"] == told, "where it lies is the log's affair"
    assert f"a cannot be loaded: {source.error}" in lines
    source.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(ask, app, TEXT, ASKED | {"model": "a", "stream": True})
        time.sleep(0.1)
        source.gate.set()
        body = streaming.result().body.decode()
    assert "a.bin is truncated" in body and body.startswith(": loading a")
    source.error = None
    assert text_of(ask(app, TEXT, ASKED | {"model": "a"}))


def test_what_is_wrong_with_a_request_is_told_in_a_stream_that_has_begun(shelves, monkeypatch):
    monkeypatch.setattr("specdec.server.streaming.LOADING_SECONDS", 0.01)
    _, source, app, lines = shelves()
    for name, path, more, words, code in (
        ("a", CHAT, {"messages": []}, "has no chat template", "unsupported_model messages"),
        ("b", TEXT, {"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value logit_bias"),
    ):
        source.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(ask, app, path, {"model": name, "stream": True, **more})
            time.sleep(0.1)
            source.gate.set()
            body = streaming.result().body.decode()
        error = json.loads(body.partition("data: ")[2].partition("\n")[0])["error"]
        assert body.startswith(f": loading {name}") and words in error["message"]
        assert " 200 " in lines[-1] and code in lines[-1]
    assert ask(app, CHAT, {"model": "a", "stream": True, "messages": []}).status == 400


def test_what_is_idle_is_dropped_for_another_and_after_its_time(shelves):
    shelf, source, app, lines = shelves(n_bytes=100_000_000, keep_alive=0.0)
    size = source.decoder.target.weights.n_bytes
    source.n_bytes = 2.5 * size / 0.75
    for name in "abc":
        assert text_of(ask(app, TEXT, ASKED | {"model": name}))
    assert shelf.loaded("a") is None and shelf.loaded("b") and shelf.loaded("c") and lines.count("dropped a") == 1
    assert source.limits[-1] == ["b", "c"]
    held = shelf.begin("b")
    shelf.sweep()
    end = time.monotonic() + 30
    while shelf.loaded("c") and time.monotonic() < end:
        time.sleep(0.01)
    assert shelf.loaded("c") is None and shelf.loaded("b"), "which somebody asks"
    source.n_bytes = 1.5 * size / 0.75
    with pytest.raises(Refused, match="no memory for a beside b"):
        shelf.begin("a").loading.result(60)
    shelf.end(held)
    assert text_of(ask(app, TEXT, ASKED | {"model": "a"})) and shelf.loaded("b") is None
    assert "specdec_requests_done_total 4" in ask(app, "/metrics").body.decode(), "figures outlive models"


def test_a_list_that_takes_long_keeps_nobody_waiting(shelves, monkeypatch):
    """The models are listed anew for a name that is not known, outside of all locks, by one thread at a time."""
    monkeypatch.setattr("specdec.server.model_manager.LOOKED_SECONDS", 0.0)
    _, source, app, _ = shelves()
    text = text_of(ask(app, TEXT, ASKED | {"model": "a"}))
    lists, may, begun = source.sizes, threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert may.wait(60)
        return lists()

    source.sizes = slow
    with ThreadPoolExecutor(3) as pool:
        try:
            first = pool.submit(ask, app, TEXT, ASKED | {"model": "nope"})
            assert begun.wait(60)
            assert text_of(pool.submit(ask, app, TEXT, ASKED | {"model": "a"}).result(30)) == text
            assert pool.submit(ask, app, "/metrics").result(30).status == 200
            assert pool.submit(ask, app, TEXT, ASKED | {"model": "nope"}).result(30).status == 404
            assert not first.done()
        finally:
            may.set()
        assert first.result(30).status == 404
    source.sizes, source.names = lists, ("a", "new")
    assert text_of(ask(app, TEXT, ASKED | {"model": "new"})) == text, "a model that has come since"


def test_who_waits_for_a_model_is_refused_when_the_server_ends(shelves, monkeypatch):
    monkeypatch.setattr("specdec.server.streaming.LOADING_SECONDS", 0.01)
    shelf, source, app, lines = shelves()
    source.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, app, TEXT, ASKED | {"model": name, "stream": name == "b"}) for name in "abc"]
        streaming = pool.submit(ask, app, MESSAGES, {"model": "a", "stream": True})
        end = time.monotonic() + 30
        while sum(each.users for each in [*shelf._places.values()]) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        shelf.close(0.0)
        whole, stream, other = (each.result(30) for each in waiting)
        told = streaming.result(30).body.decode()
    for reply in (whole, other, ask(app, TEXT, ASKED | {"model": "a"}), ask(app, TEXT, ASKED)):
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "shutting_down", "1")
    assert json.loads(stream.body.decode().rpartition("data: ")[2])["error"]["code"] == "shutting_down"
    assert json.loads(told.rpartition("data: ")[2])["error"]["type"] == "overloaded_error", "as Anthropic says it"
    assert ask(app, "/v1/models").status == 200
    source.gate.set()
    shelf._loader.shutdown()
    assert source.loaded == [] and not any("cannot be loaded" in line for line in lines), "a model that nobody waits for"
    assert shelf.loaded("a") is None


def test_a_model_that_is_loaded_as_the_server_ends_is_closed(shelves):
    shelf, source, _, _ = shelves()
    served = shelf.begin("a").loading.result(30)
    other = Served(served.model, Engine(served.model.decoder, 1, 1, 10**7), 1)

    def late(name, tell):
        shelf.close(0.0)
        return other

    source.load = late
    with pytest.raises(Closed):
        shelf.begin("b").loading.result(30)
    shelf._loader.shutdown()
    assert not other.engine._thread.is_alive()
