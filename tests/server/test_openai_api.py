"""The server's answers, without a socket: OpenAI's interface, what it refuses, and who may ask."""

import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec import Prompt, Sampling, SpeculativeDecoder, Step
from specdec.engine.decoding import Job, TokenLogprob
from specdec.engine.metrics import BOUNDS, Figures, exposition
from specdec.engine.scheduler import Client, Closed, Engine, Full, Hear
from specdec.server import app as server
from specdec.server import auth, body_limits, streaming
from specdec.server.app import app_of
from specdec.server.auth import Guard
from specdec.server.model_manager import FOLDERS, Served, only
from specdec.server.openai_requests import Model, encoding
from specdec.server.streaming import Service
from specdec.server.tool_parsers.formats import way_of
from specdec.server.tool_parsers.incremental import Call, Json, More
from specdec.server.validation import MOST_NESTED, Refused, body_of
from specdec.text.structured_output import ShapeError
from specdec.text.worker_process import Lost, Worker
from tests.fakes.asgi import Reply, ask
from tests.test_end_to_end import folder
from tests.tools.hf_folders import FIXTURES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "Where did the robin go?"}]
DRAWN = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 12}
SAMPLING = Sampling(temperature=0.8, top_p=0.9, seed=5)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLING = "{% if tools %}<tool_call>{% endif %}"  # what a template has that knows tools


class Script:
    """An engine that tells the same events of every text, or raises."""

    def __init__(self, *events: Any, error: Exception | None = None) -> None:
        self.events, self.error, self.figures, self.jobs = events, error, Figures(), list[Job]()
        self.n_cancelled = 0

    def submit(self, jobs: Sequence[Job], hears: Sequence[Hear], who: Client) -> list["Script"]:
        if self.error:
            raise self.error
        self.jobs += jobs
        for hear in hears:
            for event in self.events:
                hear(event)
        return [self for _ in jobs]

    def cancel(self) -> None:
        self.n_cancelled += 1


def service_of(model: Model, engine: Any) -> Service:
    return Service(only(Served(model, engine, 1)), "print")


def reads(template: str) -> Any:
    way = way_of(template)
    return way and way.reads({"weather": {}})


def step(text: str, end: str | None = None, **more: Any) -> Step:
    return Step([1], [], 0, 0.0, 0.0, end, pieces=[text], **more)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeDecoder:
    path = folder(tmp_path_factory.mktemp("serving") / "talker", positions=320)
    source = (FIXTURES / "chat" / "smollm2.jinja").read_text()
    (path / "chat_template.jinja").write_text(CALLING + source)
    (path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    return SpeculativeDecoder(path, "ngram", n_threads=1, gamma=4)


@pytest.fixture(scope="module")
def engine(decoder: SpeculativeDecoder) -> Iterator[Engine]:
    engine = Engine(decoder, 4, 32, 10**8)
    yield engine
    engine.close(0.0)


@pytest.fixture(scope="module")
def serving(decoder: SpeculativeDecoder, engine: Engine) -> Callable[..., Any]:
    def app(engine: Any = engine, keys: tuple[str, ...] = (), log: list[str] | None = None) -> Any:
        service = service_of(Model("talker", decoder, decoder.chat_template), engine)
        return Guard(app_of(service), keys, {"localhost"}, (log if log is not None else []).append)

    return app


@pytest.fixture(scope="module")
def app(serving: Callable[..., Any]) -> Any:
    return serving()


def test_an_answer_is_the_librarys_own_whole_and_in_a_stream(app: Any, decoder: SpeculativeDecoder) -> None:
    own = decoder.answer(TALK, 12, SAMPLING)
    whole = ask(app, CHAT, {"messages": TALK, "model": "talker", **DRAWN})
    assert whole.status == 200 and whole.json["object"] == "chat.completion" and whole.json["model"] == "talker"
    (choice,) = whole.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": own.text, "refusal": None}
    assert choice["finish_reason"] == ("length" if own.statistics.stop_reason == "max_tokens" else "stop")
    n = own.statistics.n_prompt, own.statistics.n_generated
    usage = whole.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (*n, sum(n))
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == own.statistics.n_accepted
    stream = ask(app, CHAT, {"messages": TALK, "stream": True, "stream_options": {"include_usage": True}, **DRAWN})
    assert stream.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, told = stream.events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in (*middle, last)) == own.text
    assert [event["choices"][0]["finish_reason"] for event in middle] == [None] * len(middle)
    assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert told["choices"] == [] and told["usage"] == usage and last["usage"] is None
    assert len({event["id"] for event in stream.events}) == 1


def test_completions_go_on_with_texts_and_ids_each_with_its_own_seeds(app: Any, decoder: SpeculativeDecoder) -> None:
    prompts = ["One, two,", decoder.encode("The robin")]
    seeds = [Sampling(temperature=0.8, top_p=0.9, seed=seed) for seed in (5, 6)]
    own = [decoder.generate(prompt, 12, sampling).continuation for prompt in prompts for sampling in seeds]
    for prompt, texts in ((prompts, own), (prompts[0], own[:2]), (prompts[1], own[2:])):
        reply = ask(app, TEXT, {"prompt": prompt, "n": 2, **DRAWN})
        assert [choice["text"] for choice in reply.json["choices"]] == texts
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(len(texts)))
    events = ask(app, TEXT, {"prompt": prompts, "n": 2, "stream": True, **DRAWN}).events
    streamed = [""] * 4
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == own
    assert len(ask(app, TEXT, {}).json["choices"]) == 1


def test_greedy_is_greedy_by_temperature_top_k_and_top_p(app: Any, decoder: SpeculativeDecoder) -> None:
    own = decoder.answer(TALK, 12, temperature=0).text
    for how in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0, "top_k": 5}):
        reply = ask(app, CHAT, {"messages": TALK, "max_completion_tokens": 12, **how})
        assert reply.json["choices"][0]["message"]["content"] == own


def test_where_a_request_says_nothing_the_servers_own_sampling_holds(
    serving: Callable[..., Any], decoder: SpeculativeDecoder
) -> None:
    script = Script(Prompt([1], 0.0), step("a", "eos"))
    own = Model("talker", decoder, decoder.chat_template, Sampling(0.6, 20, 0.8))
    app = Guard(app_of(service_of(own, script)), (), {"localhost"}, [].append)  # type: ignore[arg-type]
    for body in ({}, {"temperature": 0.1}, {"top_p": 0.5, "top_k": 3}, {"top_p": 0}):
        assert ask(app, TEXT, {"seed": 1, **body}).status == 200
    drawn = [(job.sampling.temperature, job.sampling.top_k, job.sampling.top_p) for job in script.jobs]
    assert drawn == [(0.6, 20, 0.8), (0.1, 20, 0.8), (0.6, 3, 0.5), (0.6, 1, 0.0)]


def test_a_server_draws_as_its_options_say_then_as_the_files_advise_then_as_in_a_chat() -> None:
    from specdec.cli.serve import ServeRequest

    def of(advised: dict[str, float], **options: Any) -> tuple[float, int, float]:
        sampling = ServeRequest(**options).sampling_of(advised)
        return sampling.temperature, sampling.top_k, sampling.top_p

    assert of({}) == (0.7, 0, 0.9)
    assert of({"temperature": 0.6, "top_k": 20}) == (0.6, 20, 0.9)
    assert of({"temperature": 0.6, "top_p": 0.8}, served_temperature=0.0, served_top_k=5) == (0.0, 5, 0.8)


def test_what_the_template_is_told_beside_messages(
    app: Any, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()
    encode = decoder.encode_chat
    monkeypatch.setattr(decoder, "encode_chat", lambda *told: seen.append(told[0:3:2]) or encode(*told))
    talk = [*TALK, {"role": "assistant", "content": "South.", "reasoning_content": "Birds fly."}, *TALK]
    for body in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False, "n": 3}}, {}):
        assert ask(app, CHAT, {"messages": talk, "max_tokens": 1, **body}).status == 200
    assert [options for _, options in seen] == [{"enable_thinking": False}, {"enable_thinking": False, "n": 3}, {}]
    assert seen[0][0][1]["reasoning_content"] == "Birds fly."
    monkeypatch.setattr(decoder.chat_template, "source", "{{ reasoning_effort }}{% if enable_thinking %}!{% endif %}x")
    assert ask(app, CHAT, {"messages": TALK, "max_tokens": 1, "reasoning_effort": "high"}).status == 200
    assert seen[-1][1] == {"reasoning_effort": "high"}
    with pytest.raises(ValueError, match=r"role of messages\[0\] is 'bot'; expected one of system, user, assistant"):
        decoder.encode_chat([{"role": "bot", "content": "x"}])


def test_a_helper_that_the_system_ends_is_not_the_clients_fault(app: Any, monkeypatch: Any) -> None:
    def lost(*_: Any) -> Any:
        raise Lost("the system has ended it")

    monkeypatch.setattr(Worker, "ask", lost)
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "lost"}}}
    reply = ask(app, CHAT, {"messages": TALK, "response_format": shape})
    assert (reply.status, reply.error["type"], "retry-after" in reply.headers) == (503, "server_error", True)


def test_a_shape_that_no_text_can_follow_is_refused_before_the_first_byte(app: Any) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": endless}}
    for is_stream in (False, True):
        reply = ask(app, CHAT, {"messages": TALK, "response_format": shape, "stream": is_stream})
        assert (reply.status, reply.error["param"]) == (400, "response_format") and "cannot go on" in reply.error["message"]


def test_a_shape_that_cannot_go_on_is_told_by_its_own_words(serving: Callable[..., Any]) -> None:
    app = serving(Script(Prompt([1], 0.0), step("a"), ShapeError("the shape cannot go on: too many items")))
    whole = ask(app, TEXT, {})
    assert (whole.status, whole.error["param"]) == (400, "response_format")
    words, error = ask(app, TEXT, {"stream": True}).events
    assert words["choices"][0]["text"] == "a" and error["error"]["message"] == "the shape cannot go on: too many items"


def test_a_stream_that_has_nothing_to_say_gives_signs_of_life(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SIGN_OF_LIFE_SECONDS", 0.0)
    held = [step(piece) for piece in ("<tool_call>", '{"name": ', '"weather"')]
    app = serving(Script(Prompt([1], 0.0), *held, step("", "eos")))
    reply = ask(app, CHAT, {"messages": TALK, "tools": [TOOL], "stream": True})
    assert reply.body.count(b": waiting") >= 2


def test_every_answer_has_an_id_that_the_log_tells_and_a_slash_sends_nobody_elsewhere(serving: Callable[..., Any]) -> None:
    log = list[str]()
    app = serving(log=log)
    for path, status in (("/v1/models/", 200), ("/v1/nothing/", 404), ("/v1/models", 200)):
        reply = ask(app, path)
        assert reply.status == status and "location" not in reply.headers
        assert reply.headers["x-request-id"] in log[-1]
    ask(app, TEXT, {"top_k": "x"})
    assert "invalid_value top_k" in log[-1]


def test_a_large_answer_becomes_json_beside_others() -> None:
    value = {"choices": [{"logprobs": [{"token": "a", "top": [["b", -1.5]] * 20} for _ in range(3000)]}]}
    assert json.loads(streaming.json_of(value)) == value and streaming.json_of({"\u00e9": 1}) == '{"\u00e9":1}'.encode()
    assert [len(piece) for piece in streaming._pieces(bytes(150_000))] == [65536, 65536, 18928]


def test_a_stop_string_ends_the_text_before_it(app: Any, decoder: SpeculativeDecoder) -> None:
    own = decoder.answer(TALK, 12, SAMPLING).text
    stop = own[len(own) // 2 :][:2]
    reply = ask(app, CHAT, {"messages": TALK, "stop": [stop, "never"], **DRAWN}).json["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == (own[: own.index(stop)], "stop")


def test_who_asks_is_told_which_tokens_were_guessed_and_the_pieces_are_the_text(app: Any) -> None:
    talk = [{"role": "user", "content": "again and again " * 12}]
    body = {"messages": talk, "stream": True, "specdec": True, "temperature": 0, "max_tokens": 40}
    events = [event for event in ask(app, CHAT, body).events if "specdec" in event]
    for event in events:
        runs = event["specdec"]["runs"]
        assert "".join(words for _, words in runs) == event["choices"][0]["delta"].get("content", "")
        assert {kind for kind, _ in runs} <= {"guessed", "own"}
    last = events[-1]["specdec"]
    assert last["tokens"] == 40 and last["accepted"] <= last["drafted"] and last["passes"] <= 40
    assert not any("specdec" in event for event in ask(app, CHAT, body | {"specdec": False}).events)


def test_text_in_parts_and_the_developers_word_are_as_plain_ones(app: Any) -> None:
    parts = [{"type": "text", "text": "Where did "}, {"type": "text", "text": "the robin go?"}]
    plain = [{"role": "system", "content": "Sing."}, *TALK]
    other = [{"role": "developer", "content": "Sing."}, {"role": "user", "content": parts, "name": "Ann"}]
    said = [ask(app, CHAT, {"messages": messages, **DRAWN}).json["choices"] for messages in (plain, other)]
    assert said[0] == said[1]


def test_a_prediction_changes_no_text(app: Any) -> None:
    plain = ask(app, CHAT, {"messages": TALK, **DRAWN}).json["choices"]
    prediction = {"type": "content", "content": plain[0]["message"]["content"]}
    assert ask(app, CHAT, {"messages": TALK, "prediction": prediction, **DRAWN}).json["choices"] == plain


def test_an_answer_in_a_shape_is_the_masked_targets_own(app: Any, decoder: SpeculativeDecoder) -> None:
    pytest.importorskip("llguidance", reason="the extra [shape] is not installed")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"], "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    own = decoder.answer(TALK, 12, SAMPLING, shape=decoder.json_schema(schema)).text
    choice = ask(app, CHAT, {"messages": TALK, "response_format": shape, **DRAWN}).json["choices"][0]
    assert choice["message"]["content"] == own and json.loads(own)["n"] in (1, 22, 333)
    begun = ask(app, CHAT, {"messages": TALK, "response_format": {"type": "json_object"}, **DRAWN}).json["choices"][0]
    assert begun["message"]["content"].startswith("{")
    for wrong in ({"type": "nonsense"}, {"pattern": "("}, {"$ref": "http://x/y"}):
        shape = {"type": "json_schema", "json_schema": {"schema": wrong}}
        assert ask(app, CHAT, {"messages": TALK, "response_format": shape}).error["param"] == "response_format"


REFUSED: list[tuple[str, dict[str, Any], str, int, str]] = [
    *[
        (path, {name: value}, name, 400, "unsupported_parameter")
        for path in (CHAT, TEXT)
        for name, value in (
            ("store", True), ("suffix", "x"), ("functions", [{}]), ("echo", True), ("typical_p", 0.5), ("mirostat", 2),
            ("ignore_eos", True), ("best_of", 2),
        )
    ],
    *[
        (CHAT, {name: value}, name, 400, "invalid_value")
        for name, value in (
            ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("top_p", 2), ("top_p", "x"), ("top_k", -1),
            ("top_k", 1.5), ("seed", 2**63), ("seed", "x"), ("max_tokens", 0), ("max_completion_tokens", -5), ("n", 0), ("n", 17),
            ("n", True), ("stop", ""), ("stop", ["a"] * 17), ("stop", ["x" * 1001]), ("stop", [1]), ("stream", "yes"),
            ("stream_options", 1), ("logprobs", 2), ("top_logprobs", 2), ("user", 1), ("messages", []), ("messages", "hi"),
            ("messages", [1]), ("messages", [{"role": "robin", "content": "x"}]), ("messages", [{"role": "user"}]),
            ("messages", [{"role": "tool", "content": "x"}]), ("tools", {}), ("tools", [1]), ("tools", [{"type": "function"}]),
            ("tools", [{"type": "function", "function": {"name": "a b"}}]), ("specdec", 1), ("prediction", "x"),
            ("min_p", 2), ("min_p", "x"), ("repetition_penalty", 0), ("repeat_penalty", 1000), ("presence_penalty", True),
            ("frequency_penalty", -101), ("frequency_penalty", False), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}),
            ("logit_bias", {"1": 101}), ("logit_bias", {"999999": 1}), ("logit_bias", [1]), ("logit_bias", {"1" * 5000: 1}),
            ("prediction", {"type": "other"}), ("response_format", {"type": "xml"}), ("response_format", "json"),
        )
    ],
    (CHAT, {"messages": None}, "messages", 400, "missing_parameter"),
    (CHAT, {"model": "gpt-4"}, "model", 404, "model_not_found"),
    (CHAT, {"nonsense": 1}, "nonsense", 400, "unknown_parameter"),
    (CHAT, {"stream_options": {"x": 1}}, "x", 400, "unknown_parameter"),
    (CHAT, {"tool_choice": "any", "tools": [TOOL]}, "tool_choice", 400, "invalid_value"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", 400, "invalid_value"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools", 400, "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", 400, "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "audio": {"id": 1}}]}, "messages", 400, "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": "robin " * 400}]}, "messages", 400, "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "robin " * 90000}]}, "messages", 400, "context_length_exceeded"),
    (TEXT, {"prompt": "robin " * 400}, "prompt", 400, "context_length_exceeded"),
    (TEXT, {"prompt": "robin " * 90000}, "prompt", 400, "context_length_exceeded"),
    (TEXT, {"prompt": [5] * 400}, "prompt", 400, "context_length_exceeded"),
    (TEXT, {"prompt": [10**9]}, "prompt", 400, "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"messages": True}}, "chat_template_kwargs", 400, "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"a": "<|im_end|>"}}, "chat_template_kwargs", 400, "invalid_value"),
    (CHAT, {"reasoning_effort": "very much"}, "reasoning_effort", 400, "invalid_value"),
    (TEXT, {"reasoning_effort": "low"}, "reasoning_effort", 400, "unknown_parameter"),
    (TEXT, {"prompt": [[1], "x", 1.5]}, "prompt", 400, "invalid_value"),
    (TEXT, {"prompt": ["x"] * 9, "n": 2}, "n", 400, "invalid_value"),
    (TEXT, {"logprobs": 21}, "logprobs", 400, "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "status", "code"), REFUSED)
def test_what_is_not_done_is_refused_by_name(app: Any, path: str, body: Any, param: str, status: int, code: str) -> None:
    reply = ask(app, path, ({"messages": TALK} if path == CHAT else {}) | body)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (status, param, code), reply.body
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_samplers_are_those_of_the_library(app: Any, path: str) -> None:
    """By both names of the repetition penalty; a bias may leave one token alone."""
    body: dict[str, Any] = {"seed": 5, "temperature": 1, "max_tokens": 12} | ({"messages": TALK} if path == CHAT else {})

    def said(**more: Any) -> str:
        choice = ask(app, path, body | more).json["choices"][0]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])

    assert said() == said(min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias={})
    penalties: dict[str, Any] = {"min_p": 0.02, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    assert said(**penalties, repetition_penalty=1.4) == said(**penalties, repeat_penalty=1.4) != said()
    assert len({*said(logit_bias={"70": 100}).split()}) <= 1
    assert ask(app, path, body | {"logit_bias": {"999999": 1}}).status == 400


def test_what_asks_for_nothing_special_is_taken(app: Any) -> None:
    numbers = {"frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "seed": -3}
    choices = {"store": False, "logprobs": False, "stream": False, "parallel_tool_calls": True, "tool_choice": "none"}
    others = {"logit_bias": {}, "metadata": None, "audio": None, "stop": None, "tools": [], "modalities": ["text"], "user": "ann"}
    samplers = {"repetition_penalty": 1.0, "repeat_penalty": 1, "min_p": 0, "min_tokens": 0, "mirostat": 0, "ignore_eos": False}
    servers = {"cache_prompt": True, "skip_special_tokens": True, "add_generation_prompt": True, "metadata": {"a": "b"}}
    words = {"service_tier": "priority", "verbosity": "low", "reasoning_effort": "low", "chat_template_kwargs": {}}
    idle = {**numbers, **choices, **others, **samplers, **servers, **words, "response_format": {"type": "text"}}
    assert ask(app, CHAT, {"messages": TALK, "max_tokens": 1, **idle}).status == 200


def some_json(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [some_json(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 8:
        keys = ["role", "content", "type", "text", "function", "name", "tool_calls", "id", "arguments", "\u00e9"]
        return {rng.choice(keys): some_json(rng, depth - 1) for _ in range(rng.randrange(4))}
    words = [
        "",
        "user",
        "assistant",
        "tool",
        "text",
        "function",
        "auto",
        "content",
        "json_schema",
        "<|im_end|>",
        "\u2028\U0001f642",
        "{",
    ]
    numbers = [0, 1, -1, 2**63, 10**40, 0.5, -0.0, 1e308, 1e-320]
    return (None, True, False, rng.choice(numbers), rng.choice(words), rng.choice(words), rng.choice(numbers))[kind]


FIELDS = (
    "model", "messages", "prompt", "seed", "temperature", "top_p", "top_k", "stop", "n", "logprobs", "top_logprobs", "stream",
    "stream_options", "response_format", "tools", "tool_choice", "user", "prediction", "specdec", "parallel_tool_calls", "echo",
    "logit_bias", "suffix", "metadata",
)  # fmt: skip


def test_whatever_stands_in_a_field_is_answered_or_refused_in_openais_shape(app: Any) -> None:
    rng, n_refused = random.Random(1), 0
    for _ in range(250):
        path = rng.choice((CHAT, TEXT))
        body = ({"messages": TALK} if path == CHAT else {"prompt": "a"}) | {"max_tokens": 1}
        for name in rng.sample(FIELDS, rng.randrange(1, 3)):
            body[name] = some_json(rng)
        reply = ask(app, path, body)
        if reply.status == 200:
            continue
        n_refused += 1
        assert 400 <= reply.status < 500 and reply.error["type"] == "invalid_request_error", (body, reply)
    assert n_refused > 100


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no JSON"), (b"{", "no JSON"), (b"\xff{}", "no JSON"), (b"[]", "expected an object"), (b"1", "expected an object"),
        (b'{"seed": NaN}', "NaN is no number"), (b'{"seed": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"[" * 40_000, "nested too deep"), (b'{"a":' * 40_000, "nested too deep"), (b"[" * 10**6, "lists and objects"),
        (b"[" * 60_000 + b'"' + b'\\"' * 10**6, "lists and objects"), (b'"' + b'[\\"' * 10**6, "no JSON"),
        (b"[" * 900 + b"]" * 900, "the body is a list"),
        (b'{"x": ' + b"[" * MOST_NESTED + b"]" * MOST_NESTED + b"}", "nested too deep"),
        (b'{"prompt": [' + b"{}," * 10**6 + b"1]}", "lists and objects"),
        (b'{"prompt": "\\ud800"}', "half a character"), (b'{"\\udc00": 1}', "half a character"),
    ],
)  # fmt: skip
def test_a_body_that_is_none_is_refused(app: Any, data: bytes, words: str) -> None:
    reply = ask(app, TEXT, pieces=[data])
    assert reply.status == 400 and words in reply.error["message"]


def test_a_body_that_is_too_large_or_too_slow_or_of_another_kind_is_not_read(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    announced = ask(app, TEXT, pieces=[], headers={"content-length": str(100 << 20)})
    piece = b" " * (1 << 20)
    sent = ask(app, TEXT, pieces=[piece] * 8)
    for reply in (announced, sent):
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert ask(app, TEXT, {}, {"content-type": kind}).status == 415
    assert ask(app, TEXT, {"max_tokens": 1}, {"content-type": "application/json; charset=utf-8"}).status == 200
    assert "not compressed" in ask(app, TEXT, {}, {"content-encoding": "gzip"}).error["message"]
    assert ask(app, TEXT, {"max_tokens": 1}, {"content-encoding": ""}).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(body_limits, "MOST_OF_ALL_BYTES", 3 << 20)
        assert ask(app, TEXT, pieces=[piece] * 4).status == 429
        assert ask(app, TEXT, pieces=[piece, b"{}"]).status == 200, "what was refused has left its room"
    monkeypatch.setattr(body_limits, "BODY_SECONDS", 0.01)
    assert ask(app, TEXT, pieces=[], method="POST").status == 408


def test_brackets_in_a_text_are_no_lists(app: Any) -> None:
    text = '[{\\"' * 20_000
    assert ask(app, TEXT, {"prompt": text * 4}).error["code"] == "context_length_exceeded"
    assert body_of(json.dumps({"a": text * 4, "b": "\\", "c": []}).encode()) == {"a": text * 4, "b": "\\", "c": []}


def test_a_path_or_a_method_that_is_not_there_is_told_in_openais_shape(app: Any) -> None:
    assert (ask(app, "/v1/rerank", {}).status, ask(app, "/v1/rerank", {}).error["code"]) == (404, None)
    for method, path, allowed in (
        ("GET", CHAT, {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("OPTIONS", TEXT, {"POST"}),
    ):
        reply = ask(app, path, method=method)
        assert reply.status == 405 and reply.error and {*reply.headers["allow"].split(", ")} == allowed
    assert ask(app, "/v1/models/gpt-4").error["code"] == "model_not_found"
    assert ask(app, "/v1/models/talker").json == ask(app, "/v1/models").json["data"][0]


@pytest.mark.parametrize(
    ("place", "message", "told"),
    [
        ("m/x.gguf", "prompt is [9]; expected ids from 0 to 9", "prompt is [9]; expected ids from 0 to 9"),
        ("m/x.gguf", "the tokenizer m/x.gguf cannot encode the text", "the tokenizer the model's file cannot encode the text"),
        ("m/x.gguf", "m/x.gguf: the template makes nothing", "the template makes nothing"),
        ("/a/prompt/x", "a prompt of /a/prompt/x, or /a/prompt/y: no", "a prompt of the model's file, or the model's file: no"),
        ("/a/m/x", "'/a/m/x' is not /a/m/x2 or /b/a/m/x", "'the model's file' is not the model's file or /b/a/m/x"),
        ("/srv/m/x", "/srv/m-2/x and /srv/m/x.", "/srv/m-2/x and the model's file."),
        ("x.gguf", "x.gguf: no text of x.gguf or tax.gguf", "no text of x.gguf or tax.gguf"),
    ],
)  # fmt: skip
def test_errors_name_no_file_here_and_keep_all_other_words(app: Any, place: str, message: str, told: str) -> None:
    model: Any = SimpleNamespace(template=None, decoder=SimpleNamespace(tokenizer=SimpleNamespace(path=Path(place))))
    with pytest.raises(Refused) as refused, encoding(model, "input"):
        raise ValueError(message)
    assert str(refused.value) == told


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/srv/my models/org/a.bin is truncated", "a.bin is truncated"),
        ("no /srv/a.bin or /srv/my models/b.bin; 3 / 4 GB, and/or", "no a.bin or b.bin; 3 / 4 GB, and/or"),
        ("//host/share/a.bin (C:\\models\\b.bin)", "a.bin (b.bin)"),
    ],
)
def test_errors_of_loading_name_no_folder_and_keep_all_other_words(message: str, told: str) -> None:
    assert FOLDERS.sub("", message) == told


# Who may ask


@pytest.mark.parametrize(
    ("host", "is_taken"),
    [
        ("127.0.0.1:8080", True), ("localhost:8080", True), ("LOCALHOST", True), ("[::1]:8080", True), ("192.168.0.7", True),
        ("evil.example", False), ("evil.example:8080", False), ("127.0.0.1.evil.example", False), ("", False), ("8080", False),
        ("localhost.evil.example:8080", False), ("[::1", False), ("\xe9", False),
    ],
)  # fmt: skip
def test_a_name_that_is_not_this_hosts_is_refused(serving: Callable[..., Any], app: Any, host: str, is_taken: bool) -> None:
    """A page of that name, which now means this machine's address, would read the answers (DNS rebinding)."""
    assert (ask(app, "/v1/models", headers={"host": host}).status == 200) is is_taken
    keyed = serving(keys=("right",))
    assert ask(keyed, "/v1/models", headers={"host": host, "authorization": "Bearer right"}).status == 200


def test_a_request_of_http_1_0_names_no_host(app: Any) -> None:
    """As health checks send it; no browser does."""

    async def old(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "http_version": "1.0"}, receive, send)

    assert ask(old, "/health", headers={"host": None}).status == 200 and ask(app, "/health", headers={"host": None}).status == 403
    assert ask(old, "/health", headers={"host": "evil.example"}).status == 403
    assert ask(old, "/health", headers={"host": None, "origin": "http://evil.example"}).status == 403


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ({"origin": "http://127.0.0.1:8080"}, True), ({"origin": "https://evil.example"}, False), ({"origin": "null"}, False),
        ({"origin": "http://127.0.0.1:9"}, False), ({"sec-fetch-site": "cross-site"}, False), ({"origin": ""}, False),
        ({"sec-fetch-site": "same-site"}, False), ({"sec-fetch-site": "same-origin"}, True), ({"sec-fetch-site": "none"}, True),
        ({"origin": "http://[::1"}, False),
    ],
)  # fmt: skip
def test_a_page_of_another_site_may_not_ask(app: Any, headers: dict[str, str], is_taken: bool) -> None:
    for reply in (ask(app, TEXT, {"max_tokens": 1}, headers), ask(app, "/v1/models", headers=headers)):
        assert reply.status == (200 if is_taken else 403)
        assert not any(name.startswith("access-control") for name in reply.headers)
    asking = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert ask(app, TEXT, None, asking, method="OPTIONS").status == 403
    assert ask(app, "/", headers={"sec-fetch-site": "cross-site"}).status == 200, "a link may lead here"


def test_one_of_the_keys_is_asked_for(serving: Callable[..., Any]) -> None:
    log = list[str]()
    keyed = serving(keys=("first", "second"), log=log)
    for brought in ("Bearer first", "bearer second", "Bearer  second "):
        assert ask(keyed, TEXT, {"max_tokens": 1}, {"authorization": brought}).status == 200
    for wrong in (None, "", "Bearer", "Bearer ", "first", "Basic first", "Bearer firs", "Bearer first2", "Bearer f\xe9"):
        for path in ("/v1/models", "/metrics", "/nothing"):
            reply = ask(keyed, path, headers={"authorization": wrong})
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
    assert ask(keyed, "/health").json == {"status": "ok"} and ask(keyed, "/").status == 200
    assert not any(key in line for line in log for key in ("first", "second"))


# What goes wrong


def test_a_client_that_leaves_frees_its_place(serving: Callable[..., Any]) -> None:
    for leaves_after, body in ((1, {"stream": True}), (0, {"stream": False, "n": 2}), (0, {"stream": True})):
        endless = Script(Prompt([1], 0.0), step("a"))
        ask(serving(endless), TEXT, body, leaves_after=leaves_after)
        assert endless.n_cancelled == len(endless.jobs) == body.get("n", 1)


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(Full(), 429, "queue_full"), (Closed(), 503, "shutting_down"), (ValueError("x"), 400, "invalid_value")],
)
def test_an_engine_that_takes_no_more_is_told(serving: Callable[..., Any], error: Exception, status: int, code: str) -> None:
    for stream in (True, False):
        reply = ask(serving(Script(error=error)), TEXT, {"stream": stream})
        assert (reply.status, reply.error["code"]) == (status, code)
        assert ("retry-after" in reply.headers) is (status != 400)


def test_an_error_within_tells_nothing_of_the_inside(serving: Callable[..., Any]) -> None:
    log = list[str]()
    broken = serving(Script(Prompt([1], 0.0), step("a"), RuntimeError("/secret/path")), log=log)
    whole = ask(broken, TEXT, {})
    assert whole.status == 500 and whole.error["type"] == "server_error" and b"secret" not in whole.body
    words, error = ask(broken, TEXT, {"stream": True}).events
    assert words["choices"][0]["text"] == "a" and error["error"]["code"] == "server_error" and "secret" not in str(error)
    assert len(log) == 2 and all("RuntimeError: /secret/path" in line for line in log)


def test_no_refusal_is_shared() -> None:
    """One that is raised again and again would hold the bodies of all whom it refused."""
    assert not [name for room in (server, auth) for name, value in vars(room).items() if isinstance(value, BaseException)]


def test_a_text_that_was_cut_ends_in_a_proper_last_event(serving: Callable[..., Any]) -> None:
    cut = serving(Script(Prompt([1], 0.0), step("a"), step("", "interrupted")))
    *_, last = ask(cut, CHAT, {"messages": TALK, "stream": True}).events
    assert last["choices"][0]["finish_reason"] == "length"


def test_a_model_without_a_template_cannot_chat_and_says_where_it_writes(decoder: SpeculativeDecoder) -> None:
    app = Guard(app_of(service_of(Model("stories", decoder, None), Script())), (), {"localhost"}, [].append)  # type: ignore[arg-type]
    assert "/v1/completions" in ask(app, CHAT, {"messages": TALK}).error["message"]
    assert ask(app, "/v1/models").json["data"][0]["specdec"]["can_chat"] is False


def test_errors_hold_no_names_of_files_here(app: Any, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.chat_template, "source", "{{ raise_exception('no ' + messages[0]['content']) }}")
    message = ask(app, CHAT, {"messages": [{"role": "user", "content": "robin"}]}).error["message"]
    assert message == "the template says: no robin"


# Tools


TAGS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = Call("weather", '{"city": "Oslo"}')
LAST, NONE = '{"arguments": {"city": "Oslo"}, "name": "weather"}', '{"name": "weather"}'


def merged_of(found: list[Any]) -> list[Any]:
    merged = list[Any]()
    for each in found:
        if merged and isinstance(each, str) and isinstance(merged[-1], str):
            each = merged.pop() + each
        elif isinstance(each, More):
            each = replace(merged[-1], arguments=merged.pop().arguments + each.arguments)
        merged.append(each)
    return merged


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TAGS, [WEATHER]),
        (f"Let me see.\n\n{TAGS}\n{TAGS}\n", ["Let me see.", WEATHER, WEATHER]),
        (f"{TAGS} Done. ", [WEATHER, " Done."]),
        ("a < b <tool_cal l> ", ["a < b <tool_cal l> "]),
        ("<tool_call>{broken}</tool_call> x", ["<tool_call>{broken}</tool_call> x"]),
        (TAGS.replace("weather", "rain"), [TAGS.replace("weather", "rain")]),
        (TAGS.removesuffix("</tool_call>"), [WEATHER]),
        (TAGS.replace("Oslo", "</tool_call>\\\""), [Call("weather", '{"city": "</tool_call>\\""}')]),
        (TAGS.replace("}}", "}} and more"), [WEATHER, "and more\n</tool_call>"]),
        (TAGS[:50], [Call("weather", '{"cit')]),
        (f"<tool_call>{LAST}</tool_call>", [WEATHER]),
        (f"<tool_call>{NONE}</tool_call>", [Call("weather", "{}")]),
        ("<tool_call>{", ["<tool_call>{"]),
        ("<tool_call>" + "[" * 10**5, ["<tool_call>" + "[" * 10**5]),
        (" plain \n", [" plain \n"]),
        ("", []),
    ],
)  # fmt: skip
def test_calls_in_tags_are_found_however_the_text_comes(text: str, said: list[Any]) -> None:
    for size in (1, 2, 7, len(text) or 1) if len(text) < 1000 else (1000,):
        calls = reads("<tool_call>")
        assert calls
        found = [each for at in range(0, len(text), size) for each in calls.push(text[at : at + size])] + calls.end()
        merged = merged_of(found)
        assert merged == said, size


def test_a_call_alone_is_found_and_all_else_is_text() -> None:
    for text, said in (
        (' {"name": "weather", "parameters": {"city": "Oslo"}}', [WEATHER]),
        (f"{LAST} \n", [WEATHER]),
        ('{"name": "weather", "parameters": {"city": NaN}}', [Call("weather", '{"city": NaN}}')]),
        ('{"name": "weather", "parameters": [1]}', ['{"name": "weather", "parameters": [1]}']),
        ('{"a": 1}', ['{"a": 1}']),
        ("No, {}", ["No, {}"]),
        (f"{NONE}?", [Call("weather", "{}"), "?"]),
        ("", []),
    ):
        calls = reads("<|python_tag|>")
        assert calls and merged_of([each for letter in text for each in calls.push(letter)] + calls.end()) == said
    assert way_of("{{ messages }}") is None


@pytest.mark.parametrize(("template", "tag"), [("<tool_call>", "<tool_call>"), ("<|python_tag|>", "")])
def test_arguments_come_as_they_are_written_and_what_can_be_no_call_is_text_at_once(template: str, tag: str) -> None:
    calls = reads(template)
    assert calls and not calls.push(tag + '{"name": "weather", "arguments": ')
    assert merged_of(calls.push('{"city": "Os')) == [Call("weather", '{"city": "Os')]
    assert calls.push("l") == [More("l")]
    for begin in ('{"name": "rain"', '{"list"', '{"name": "weather", }', '{"name": "weather", "arguments": 1, nothing'):
        calls = reads(template)
        assert calls and merged_of(calls.push(tag + begin)) == [tag + begin], begin
        assert merged_of(calls.push(" a")) in ([" a"], ["a"])


def test_json_is_read_letter_by_letter_as_a_library_reads_it_whole() -> None:
    rng, n_wrong = random.Random(3), 0
    for _ in range(4000):
        text = json.dumps(some_json(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice('{}[]",:\\u0e.-+ 1tn') * rng.randrange(2) + text[at + rng.randrange(2) :]
        reads = Json()
        is_taken = all(reads.takes(letter) for letter in text + "\n") and reads.is_over
        try:
            json.loads(text, parse_constant=lambda name: 1 / 0)
            is_json = True
        except (ValueError, ZeroDivisionError):
            is_json, n_wrong = False, n_wrong + 1
        assert is_taken is is_json, text
    assert n_wrong > 500


def test_a_call_comes_back_parsed_whole_and_in_a_stream(serving: Callable[..., Any]) -> None:
    script = Script(Prompt([1], 0.0), step("I look. "), step(TAGS[:48]), step(TAGS[48:]), step(TAGS), step("", "eos"))
    app, body = serving(script), {"messages": TALK, "tools": [TOOL]}
    choice = ask(app, CHAT, body).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [vars(WEATHER)] * 2
    events = [event["choices"][0] for event in ask(app, CHAT, body | {"stream": True}).events]
    told = [call for event in events for call in event["delta"].get("tool_calls", [])]
    assert [call["index"] for call in told] == [0, 0, 1] and len({call["id"] for call in told if "id" in call}) == 2
    assert "".join(call["function"]["arguments"] for call in told if not call["index"]) == WEATHER.arguments
    assert events[-1]["finish_reason"] == "tool_calls"
    one = ask(app, CHAT, body | {"parallel_tool_calls": False}).json["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    for without in ({"tool_choice": "none"}, {"tools": []}):
        choice = ask(app, CHAT, body | without).json["choices"][0]
        assert choice["finish_reason"] == "stop" and TAGS in choice["message"]["content"]


def test_templates_get_tools_calls_and_what_came_of_them(
    app: Any, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()
    encode = decoder.encode_chat
    monkeypatch.setattr(
        decoder, "encode_chat", lambda messages, tools, options: seen.append((messages, tools)) or encode(messages, tools)
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert ask(app, CHAT, {"messages": talk, "tools": [TOOL], "max_tokens": 1}).status == 200
    ((messages, tools),) = seen
    assert tools == [TOOL]
    assert messages[1]["content"] == "" and messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}
    monkeypatch.setattr(decoder.chat_template, "source", "{{ messages[0].content }}")
    assert ask(app, CHAT, {"messages": TALK, "tools": [TOOL]}).error["param"] == "tools"


# Log probabilities


def test_log_probabilities_are_told_as_each_interface_has_them(serving: Callable[..., Any], decoder: SpeculativeDecoder) -> None:
    robin, mark = decoder.tokenizer.encode(" robin")[0], 0
    said = decoder.tokenizer.says(robin) or b""
    told = [TokenLogprob(robin, -0.5, [(robin, -0.5), (mark, -1.0)]), TokenLogprob(robin, float("-inf"), [])]
    script = Script(Prompt([1], 0.0), step(" robin robin", "max_tokens", logprobs=told))
    app, name = serving(script), said.decode()
    chat = ask(app, CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": 2}).json["choices"][0]["logprobs"]
    first, second = chat["content"]
    assert (first["token"], first["logprob"], bytes(first["bytes"])) == (name, -0.5, said)
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [(name, -0.5), ("<|endoftext|>", -1.0)]
    assert second["logprob"] == -9999.0 and second["top_logprobs"] == []
    assert script.jobs[-1].top_logprobs == 2
    for stream in (False, True):
        reply = ask(app, TEXT, {"logprobs": 1, "stream": stream})
        choice = (reply.events[0] if stream else reply.json)["choices"][0]
        assert choice["logprobs"]["tokens"] == [name] * 2 and choice["logprobs"]["text_offset"] == [0, len(name)]
        assert choice["logprobs"]["top_logprobs"][0] == {name: -0.5, "<|endoftext|>": -1.0}
    ask(app, CHAT, {"messages": TALK})
    assert script.jobs[-1].top_logprobs is None


# Page, figures, log


def test_the_page_brings_all_that_it_needs_and_its_policy_lets_nothing_else_in(app: Any) -> None:
    reply = ask(app, "/")
    page, policy = reply.body.decode(), reply.headers["content-security-policy"]
    assert reply.headers["content-type"].startswith("text/html")
    assert not re.findall(
        r"(?:src|href)=[\"'](?!data:)|https?://|@import|innerHTML|insertAdjacentHTML|document\.write|eval\(", page
    )
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("'sha256-") == 2
    assert "style=" not in page and not re.search(r"\son\w+=", page)


MARKDOWN = {
    "a **b** *c* `d<e` snake_case_name 2*3": "<p>a <strong>b</strong> <em>c</em> <code>d&lt;e</code> snake_case_name 2*3</p>",
    "# T\n\n- a\n  - b\n- c": "<h3>T</h3><ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>",
    "2. a\n\n   ```py\n   b **c**\n   ```\n3. d": "<ol><li><p>a</p><pre><code>b **c**</code></pre></li><li><p>d</p></li></ol>",
    "> q\n\n| a | b |\n|--|--|\n| c | d |": "<blockquote><p>q</p></blockquote>"
    "<table><tr><th> a </th><th> b </th></tr><tr><td> c </td><td> d </td></tr></table>",
    "[x](https://a.b/c)": "<p><a https://a.b/c>x</a></p>",
    "[x](javascript:alert(1)) <b onclick=x>": "<p>[x](javascript:alert(1)) &lt;b onclick=x></p>",
    "```\nnever closed": "<pre><code>never closed</code></pre>",
    "half **of `it": "<p>half **of `it</p>",
}


@pytest.mark.skipif(not shutil.which("node"), reason="needs node, which runs the page's script")
def test_the_page_shows_markdown_in_elements_of_its_own_and_in_colours() -> None:
    runs = [[["own", text]] for text in MARKDOWN] + [[["own", "Hel"], ["guessed", "lo **wor"], ["own", "ld** x"]]]
    command = ["node", Path(__file__).parents[1] / "fakes" / "page.mjs", server.PAGE]
    done = subprocess.run(command, input=json.dumps(runs), capture_output=True, text=True, check=True, timeout=60)
    *told, coloured = json.loads(done.stdout)
    assert dict(zip(MARKDOWN, told, strict=True)) == MARKDOWN
    assert coloured == "<p>Hello<span guessed> </span><strong><span guessed>world</span></strong> x</p>"


@pytest.mark.skipif(not shutil.which("node"), reason="needs node, which runs the page's script")
def test_the_page_says_that_the_server_is_gone_and_asks_again() -> None:
    command = ["node", Path(__file__).parents[1] / "fakes" / "page.mjs", server.PAGE, "talk"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    gone = "The server at http://here does not answer. Start it with specdec serve, then try again."
    assert told["shown"] == [gone, [gone], ["Retry"], [], ["Copy", "Retry"], [gone], ["Copy", "Copy", "Retry"], [gone]]
    assert told["asked"][:3] == [["one"], ["one"], ["one", "first!", "two"]]
    assert told["asked"][3:] == [["one", "first!", "two", "sec", "three"]] * 2 and told["copied"] == "third"


def test_figures_are_prometheus_text(app: Any, engine: Engine) -> None:
    ask(app, TEXT, {"max_tokens": 3})
    wait_until(lambda: not engine.figures.running)
    reply = ask(app, "/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = {}
    for line in reply.body.decode().splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) specdec_\w+ .+|specdec_\w+(\{le=\"[^\"]+\"\})? [-+.e0-9]+", line), line
        if not line.startswith("#"):
            name, _, value = line.partition(" ")
            values[name] = float(value)
    figures = engine.figures
    assert values["specdec_generated_tokens_total"] == figures.generated_tokens >= 3
    assert values["specdec_requests_running"] == 0
    buckets = [values[f'specdec_first_token_seconds_bucket{{le="{bound}"}}'] for bound in (*BOUNDS, "+Inf")]
    assert buckets == sorted(buckets) and buckets[-1] == values["specdec_first_token_seconds_count"] >= 1
    assert "specdec_acceptance_rate 0\n" in exposition(Figures())


def test_a_line_of_the_log_says_nothing_of_what_was_said(serving: Callable[..., Any]) -> None:
    log = list[str]()
    app = serving(log=log)
    ask(app, CHAT, {"messages": [{"role": "user", "content": "canary"}], "max_tokens": 2})
    ask(app, "/\n\x1b[31m")
    ask(app, "/health")
    assert len(log) == 2 and "canary" not in log[0] and re.search(r"200 \d+\.\d\d s \d+\+2 tokens \(req_\w{16}\)$", log[0])
    assert "\x1b" not in log[1] and "\n" not in log[1]
    assert json.loads(json.dumps(log)) == log and isinstance(ask(app, "/health"), Reply)


@pytest.mark.parametrize("text", ["", "robin", "a \u00e9\u65e5 \U0001f642 b", "<|im_end|>"])
def test_a_text_becomes_tokens_and_is_itself_again(app: Any, text: str) -> None:
    tokens = ask(app, "/tokenize", {"content": text}).json["tokens"]
    behind = ask(app, "/tokenize", {"content": text, "add_special": True}).json["tokens"]
    assert behind[len(behind) - len(tokens) :] == tokens and len(behind) - len(tokens) in (0, 1)
    assert ask(app, "/detokenize", {"tokens": tokens}).json == {"content": text}


def test_what_are_no_tokens_and_no_texts_is_refused(app: Any) -> None:
    for path, body in (
        ("/tokenize", {"content": 5}), ("/tokenize", {"content": "a", "add_special": 1}), ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": "abc"}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [1.5]}), ("/detokenize", {"tokens": [True]}), ("/detokenize", {"tokens": {"1": 2}}),
    ):  # fmt: skip
        reply = ask(app, path, body)
        assert reply.status == 400 and reply.error["type"] == "invalid_request_error", (path, body, reply.body)
