"""Thoughts in the three interfaces: apart from the answer, whole and streamed, under a schema, with tools and with a budget."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec import Prompt, SpeculativeDecoder
from specdec.loaders import optional_dependencies
from specdec.server.engine_thread import EngineThread
from tests.fakes.asgi import send_request
from tests.fakes.server import CHAT, CONVERSATION, TOOL, FakeScheduler, make_app
from tests.tools.model_folders import make_chat_folder
from tests.tools.server_requests import MESSAGES, RESPONSES, TokenScheduler
from tests.tools.thoughts import SOURCES, TOOLS, split_steps, thinker  # noqa: F401

CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
BODY = {"messages": CONVERSATION, "max_tokens": 200, "temperature": 1.0, "seed": 3}
SCHEMA = {"type": "array", "items": {"enum": [7, 70]}, "maxItems": 3}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
needs_guidance = pytest.mark.skipif(
    not optional_dependencies.is_installed(optional_dependencies.GUIDANCE), reason="needs llguidance"
)


@pytest.fixture
def answer(make_test_app, decoder, monkeypatch):
    """Return a function that sends a request to a model in the style of Qwen3 or R1 that generates the given text."""

    def send(text, path=CHAT, name="Qwen3", size=3, stop_reason="eos", **fields):
        monkeypatch.setattr(decoder.chat_template, "source", TOOLS + SOURCES[name][0])
        app = make_test_app(FakeScheduler(Prompt([1], 0.0), *split_steps(text, size, stop_reason)))
        body = {"input": "Why?", "max_output_tokens": 99} if path == RESPONSES else {"messages": CONVERSATION, "max_tokens": 99}
        response = send_request(app, path, body | fields)
        assert response.status == 200, response.body
        return response

    return send


@pytest.mark.parametrize("size", [1, 4, 99])
@pytest.mark.parametrize(("name", "text"), [("Qwen3", "<think>\nHm.\n</think>\n\nYes."), ("R1", "Hm.\n</think>\n\nYes.")])
def test_thoughts_are_apart_from_answers(answer, name, text, size):
    message = answer(text, name=name, size=size).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Yes.")
    events = answer(text, name=name, size=size, stream=True).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert ["".join(each.get(key, "") for each in deltas) for key in ("reasoning_content", "content")] == ["Hm.", "Yes."]
    content = answer(text, MESSAGES, name, size).json["content"]
    assert content == [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
    reasoning, answered = answer(text, RESPONSES, name, size).json["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and answered["content"][0]["text"] == "Yes."


def test_streams_of_messages_and_responses_have_the_events_of_thoughts(answer):
    text = "<think>Hm</think>Yes"
    events = answer(text, MESSAGES, size=99, stream=True).events
    assert [event["type"] for event in events[1:6]] == [
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop", "content_block_start",
    ]  # fmt: skip
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["delta"] for event in events[2:4]] == [
        {"type": "thinking_delta", "thinking": "Hm"}, {"type": "signature_delta", "signature": ""},
    ]  # fmt: skip
    events = answer(text, RESPONSES, size=99, stream=True).events
    by_type = {event["type"]: event for event in events}
    assert by_type["response.reasoning_text.delta"]["delta"] == by_type["response.reasoning_text.done"]["text"] == "Hm"
    assert events[2]["item"]["type"] == "reasoning" and events[-1]["type"] == "response.completed"


def test_a_cut_thought_leaves_an_empty_answer(answer):
    for name, text in (("Qwen3", "<think>\nHm, </thi"), ("R1", "Hm, </thi")):
        (choice,) = answer(text, name=name, stop_reason="max_tokens").json["choices"]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
        assert choice["message"]["reasoning_content"] == "Hm, </thi"
        assert [block["type"] for block in answer(text, MESSAGES, name, stop_reason="max_tokens").json["content"]] == ["thinking"]


def test_raw_outputs_keep_the_marks(answer):
    text = "<think>\nHm.\n</think>\n\nYes."
    message = answer(text, reasoning_format="none").json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize("size", [1, 99])
def test_a_call_in_a_thought_is_one_if_the_thought_has_no_end(answer, size):
    for text, reasoning, content, n_calls in (
        (f"<think>Hm {CALL}\n</think>\n\nNo.", f"Hm {CALL}", "No.", 0), (f"<think>Hm {CALL}", "Hm ", None, 1),
        (f"<think>Hm</think>\n\n{CALL}", "Hm", None, 1), ("<think>Hm <tool_call> no", "Hm <tool_call> no", "", 0),
    ):  # fmt: skip
        (choice,) = answer(text, size=size, tools=[TOOL]).json["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"], len(message.get("tool_calls", []))) == (
            reasoning,
            content,
            n_calls,
        )
        assert choice["finish_reason"] == ("tool_calls" if n_calls else "stop")


@pytest.mark.parametrize("size", [1, 5, 99])
def test_special_tokens_are_marks_and_their_text_is_not(make_test_app, decoder, monkeypatch, size):
    monkeypatch.setattr(decoder.chat_template, "source", SOURCES["Ministral"][0])
    specials = {"[THINK]": 390, "[/THINK]": 391}
    monkeypatch.setattr(decoder.tokenizer, "specials", specials)
    thought, text = decoder.encode("a [/THINK] b stop"), decoder.encode("c [THINK] stop d")
    tokens = [390, *thought, 391, *text]
    body = {"messages": CONVERSATION, "stop": [" stop"], "specdec": True}
    response = send_request(make_test_app(TokenScheduler(decoder, tokens, size)), CHAT, body)
    message = response.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"].strip()) == ("a [/THINK] b stop", "c [THINK]")
    assert response.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    assert b"\\ud" not in response.body
    raw = send_request(
        make_test_app(TokenScheduler(decoder, tokens, size)), CHAT, body | {"reasoning_format": "none", "stop": []}
    )
    assert raw.json["choices"][0]["message"]["content"].startswith("[THINK]a [/THINK] b stop[/THINK]")


def ask(thinker, name, **fields):
    app, template = thinker
    template.source = TOOLS + SOURCES[name][0]
    response = send_request(app, CHAT, BODY | fields)
    assert response.status == 200, response.body
    return response.json["choices"][0], response.json["usage"]["completion_tokens_details"]["reasoning_tokens"]


@needs_guidance
@pytest.mark.parametrize("name", ["Qwen3", "R1", "SmolLM3"])
def test_schemas_and_forced_calls_hold_behind_the_thought(thinker, name):
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "parallel_tool_calls": False}
    n_thoughts = 0
    for seed in range(4):
        bias = {"400": 8 * (seed % 2)}
        choice, n = ask(thinker, name, seed=seed, response_format=RESPONSE_FORMAT, thinking_budget_tokens=9, logit_bias=bias)
        assert choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) <= {7, 70}
        n_thoughts += bool(choice["message"].get("reasoning_content"))
        assert n <= 9 and (n == 9) >= (name == "R1")
        choice, n = ask(thinker, name, seed=seed, thinking_budget_tokens=9, logit_bias=bias, **tools)
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert n_thoughts
    options = {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": {"400": 8}}
    if name != "R1":
        choice, n = ask(thinker, name, response_format=RESPONSE_FORMAT, **options)
        assert n == 0 and isinstance(json.loads(choice["message"]["content"]), list)


def test_a_budget_ends_the_thought_at_its_limit(thinker):
    for budget in (0, 1, 7):
        choice, n = ask(thinker, "R1", thinking_budget_tokens=budget, max_tokens=40)
        assert n == budget and choice["message"]["content"]
    choice, n = ask(thinker, "R1", thinking_budget_tokens=-1, max_tokens=20)
    assert (n, choice["finish_reason"], choice["message"]["content"]) == (20, "length", "")


HARMONY = "{# <|channel|><|message|> #}{% if tools %}{% endif %}{{ messages[0].content }}<|start|>assistant"
HARMONY_SPECIALS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")


@pytest.fixture(scope="module")
def make_thinker(tmp_path_factory):
    """Return a function that makes the app of a random model with the marks of thoughts as special tokens, for some drafts."""
    folder, schedulers = tmp_path_factory.mktemp("drafts"), []
    for name, seed in (("talker", 0), ("draft", 1)):
        marks = ("<think>", "</think>", *HARMONY_SPECIALS)
        make_chat_folder(folder / name, "{{ messages[0].content }}", marks, special=True, seed=seed)

    def make(draft, verify):
        draft = folder / draft if draft == "draft" else draft
        decoder = SpeculativeDecoder(folder / "talker", draft, n_threads=1, gamma=4, verify=verify)
        schedulers.append(EngineThread(decoder, 8, 32, 10**8))
        return make_app(decoder, schedulers[-1]), decoder

    yield make
    for scheduler in schedulers:
        scheduler.close(0.0)


def make_requests(name, tokenizer):
    """Return bodies with budgets, schemas, calls and stop strings, of outputs that think and others."""
    biases = {"400": 6, "401": 2}
    if name == "Harmony":
        words = [tokenizer.token_to_bytes(token) for token in range(400)]
        biases = {"402": 8, "404": 2} | {
            str(token): 14 for token, word in enumerate(words) if word and b"analysis".startswith(word)
        }
    return [
        {"seed": seed, "max_tokens": 60, "logit_bias": biases if seed % 2 else {}, **fields}
        for seed in (1, 2)
        for fields in (
            {"thinking_budget_tokens": 5, "response_format": RESPONSE_FORMAT}, {"thinking_budget_tokens": 9, "stop": ["a"]},
            {"thinking_budget_tokens": 0, "tools": [TOOL]},
            {"thinking_budget_tokens": 6, "tools": [TOOL], "tool_choice": "required"}, {},
            {"response_format": RESPONSE_FORMAT, "tools": [TOOL], "temperature": 0},
        )
    ]  # fmt: skip


def strip_ids(choice):
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return choice | {"message": choice["message"] | {"tool_calls": calls}}


@needs_guidance
@pytest.mark.parametrize("name", ["Qwen3", "R1", "Harmony"])
@pytest.mark.parametrize("verify", ["coupled", "rejection", "block"])
def test_batched_answers_equal_those_alone(make_thinker, verify, name):
    """With any draft; under coupled verification they are also equal to those without a draft."""
    source, outputs = HARMONY if name == "Harmony" else TOOLS + SOURCES[name][0], []
    for draft in (None, "lookup", "draft") if verify == "coupled" else ("draft",):
        app, decoder = make_thinker(draft, verify)
        decoder.chat_template.source, requests = source, make_requests(name, decoder.tokenizer)

        def send(fields, app=app):
            response = send_request(app, CHAT, BODY | fields)
            assert response.status == 200, response.body
            choice, usage = response.json["choices"][0], response.json["usage"]
            return strip_ids(choice), usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]

        alone = [send(fields) for fields in requests]
        with ThreadPoolExecutor(len(requests)) as pool:
            together = [*pool.map(send, requests)]
        assert together == alone
        outputs.append(alone)
    assert all(each == outputs[0] for each in outputs)
    assert {bool(n) for _, _, n in outputs[0]} == {True, False}


def test_anthropics_budget_limits_the_thought(thinker):
    app, template = thinker
    template.source = SOURCES["R1"][0]
    body = {"messages": CONVERSATION, "max_tokens": 30, "thinking": {"type": "enabled", "budget_tokens": 4}, "seed": 1}
    response = send_request(app, MESSAGES, body)
    assert [block["type"] for block in response.json["content"]] == ["thinking", "text"]
    tokens = send_request(app, RESPONSES, {"input": "Why?", "max_output_tokens": 7, "seed": 1}).json
    assert [item["type"] for item in tokens["output"]] == ["reasoning"] and tokens["status"] == "incomplete"
    assert tokens["usage"]["output_tokens_details"]["reasoning_tokens"] == tokens["usage"]["output_tokens"] == 7


def test_the_list_of_models_says_whether_thinking_can_be_switched(thinker):
    app, template = thinker
    for name, can_switch in (("Qwen3", True), ("R1", False), ("no thoughts", False)):
        template.source = SOURCES[name][0]
        (model,) = send_request(app, "/v1/models").json["data"]
        assert model["specdec"]["can_switch_thinking"] == can_switch


@pytest.mark.parametrize("fields", [
    {"reasoning_format": "some"}, {"reasoning_format": 1}, {"thinking_budget_tokens": -2}, {"thinking_budget_tokens": "9"},
])  # fmt: skip
def test_invalid_fields_are_rejected_by_name(thinker, fields):
    response = send_request(thinker[0], CHAT, BODY | fields)
    assert (response.status, response.error["param"]) == (400, *fields)
