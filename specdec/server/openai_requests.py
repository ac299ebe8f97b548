"""What a client asks for: bodies of OpenAI's interface, checked; whatever is not done is refused by name. Knows no server."""

import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdec.decoder import SpeculativeDecoder
from specdec.engine.decoding import Job
from specdec.sampling import Sampling
from specdec.server.tool_parsers.formats import Way, way_of
from specdec.server.tool_parsers.grammar import grammar_of_calls
from specdec.server.tool_parsers.incremental import Calls
from specdec.server.validation import (
    INVALID,
    NOT_DONE,
    TOO_LONG,
    Fields,
    Refused,
    a_list,
    an_object,
    between,
    body_of,
    false,
    objects,
    words,
    yes_or_no,
)
from specdec.text.chat_template import ChatTemplate, ChatTokenizer, Options, TemplateError, TooLong
from specdec.text.structured_output import ANY_OBJECT, Grammar, checked_schema, grammar_of, is_installed
from specdec.text.worker_process import Lost
from specdec.tokenizer import Part, TokenizerError
from specdec.validation import one_of, real, short, strings, text

MOST_CHOICES = 16  # texts of a request
MOST_STOPS, LONGEST_STOP = 16, 1000  # strings; characters
MOST_TOOLS = 512
MOST_TOP = 20  # log probabilities of a token
COMPLETION_TOKENS = 16  # that a completion has where nothing is said: OpenAI's number
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
SEEDS = 2**63
# what bodies of all interfaces have by these names
COMMON = (
    "model", "temperature", "top_p", "top_k", "stream", "seed", "min_p", "repetition_penalty", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "chat_template_kwargs", "service_tier", "specdec",
)  # fmt: skip
# what `Sampling` has, by the names of clients: its own, and llama.cpp's
SAMPLERS = {
    **{name: name for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
}
# texts that are taken
OF_NO_EFFECT = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "verbosity")
OF_A_MESSAGE = {"refusal", "audio", "function_call", "annotations"}  # what answers have that come back
THINKING = "enable_thinking"  # what most templates ask for that let a model think
WHOLE_PATH = r"(?<![\w./\\-]){}(?:[/\\][^\s:;,'\"]*)?(?![\w-]|\.\w)"  # a path, or one of a file within it
OPTION = re.compile(r"[a-zA-Z_][\w-]{0,63}", re.ASCII)  # a template's name for an option, or a word as its value
OF_TEMPLATES = {"messages", "tools", "xml_tools", "documents", "add_generation_prompt"}  # what no option may replace


@dataclass(frozen=True)
class Model:
    """What is served: a decoder, and the name that clients call it by. template: None for one that cannot chat.

    sampling: where a request does not say.
    """

    name: str
    decoder: SpeculativeDecoder
    template: ChatTemplate | None
    sampling: Sampling = Sampling()  # noqa: RUF009 (it cannot be changed)


@dataclass(frozen=True)
class Asked:
    """A request. jobs: the texts that it wants; calls: makes what finds calls of tools in one of them, where any are looked for.

    details: whether each chunk tells which tokens were guessed. grammar: of the shape of all texts, which is yet to be built.
    form: what tells the answer, of the request, the model and a fingerprint; by default OpenAI's.
    """

    jobs: list[Job]
    is_chat: bool
    is_stream: bool = False
    has_usage: bool = False
    details: bool = False
    one_call: bool = False
    calls: Callable[[], Calls] | None = None
    grammar: Grammar | None = None
    form: Callable[["Asked", Model, str], Any] | None = None


def _biases(name: str, value: Any, n_ids: int) -> dict[int, float]:
    """By token id, which a key of JSON writes in digits."""
    for key in an_object(name, value):
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < n_ids):
            raise ValueError(f"{name} holds the key {short(key, repr)}; expected token ids, from 0 to {n_ids - 1}")
    return {int(key): bias for key, bias in value.items()}


def chat_asked(body: Mapping[str, Any], model: Model) -> Asked:
    """A body of /v1/chat/completions. Raises Refused."""
    fields = Fields(body)
    fields.take("model", text, "")
    if not model.template:
        raise Refused(
            "this model has no chat template: it goes on with texts, at /v1/completions", "messages", "unsupported_model"
        )
    way = way_of(model.template.source)
    tools = fields.take("tools", _tools, list[dict[str, Any]]())
    strict = {tool["function"]["name"] for tool in tools if tool.pop("strict")}
    choice, named = fields.take("tool_choice", lambda name, value: _tool_choice(name, value, tools), ("auto", tools))
    one_call = not fields.take("parallel_tool_calls", yes_or_no, True)
    if tools and not model.template.takes_tools:
        raise Refused("the model's chat template takes no tools", "tools", NOT_DONE)
    if body.get("messages") is None:
        raise Refused("messages are missing; expected a list of objects of role and content", "messages", "missing_parameter")
    messages = fields.take("messages", _messages, list[dict[str, Any]]())
    told = fields.take("logprobs", yes_or_no, False)
    top = fields.take("top_logprobs", between(0, MOST_TOP), 0)
    if top and not told:
        raise Refused("top_logprobs is for logprobs, which is not true", "top_logprobs")
    answer = fields.take("response_format", _answer_schema, None)
    given = tools if choice != "none" else []
    with encoding(model, "tools" if given else "response_format"):
        if given:
            functions = [tool["function"] | {"strict": tool["function"]["name"] in strict} for tool in named]
            why = (
                "tool_choice" if choice == "required" else "tools" if strict else "response_format" if answer is not None else ""
            )
            grammar = _forced(model, way, functions, why, one_call, answer)
        else:
            grammar = None if answer is None else grammar_of(model.decoder.tokenizer, answer)
    most = fields.take("max_completion_tokens", between(1), None)
    other = fields.take("max_tokens", between(1), None)
    options = _options(fields, model.template)
    read = way if way and (given or way.is_always_read) else None
    shown = read.shows(getattr(model.decoder.tokenizer, "specials", {})) if read else {}
    asked = _rest(fields, model, "messages", most or other, top if told else None, shown)
    with encoding(model, "messages"):
        prompt = model.decoder.encode_chat(messages, given or None, options)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in given}
    calls = partial(read.finder, schemas, shown) if read else None
    return replace(asked([prompt]), is_chat=True, one_call=one_call, calls=calls, grammar=grammar)


def _forced(
    model: Model, way: Way | None, functions: list[dict[str, Any]], why: str, one_call: bool, answer: Mapping[str, Any] | None
) -> Grammar | None:
    """What holds calls to the tools: always, from their mark on, where it can be had. why: the parameter that wants it in any
    case."""
    if way and (why or is_installed()):
        return grammar_of_calls(model.decoder.tokenizer, way, functions, why == "tool_choice", one_call, answer)
    if why:
        raise Refused("the model's template has no way to call tools that is known here", why, NOT_DONE)
    return None


def completion_asked(body: Mapping[str, Any], model: Model) -> Asked:
    """A body of /v1/completions. Raises Refused."""
    fields = Fields(body)
    fields.take("model", text, "")
    prompts = fields.take("prompt", _prompts, list[str | list[int]]([""]))
    top = fields.take("logprobs", between(0, MOST_TOP), None)
    answer = fields.take("response_format", _answer_schema, None)
    with encoding(model, "response_format"):
        grammar = None if answer is None else grammar_of(model.decoder.tokenizer, answer)
    asked = _rest(fields, model, "prompt", fields.take("max_tokens", between(1), COMPLETION_TOKENS), top)
    for prompt in prompts:
        longest, unit = (_longest(model), "characters") if isinstance(prompt, str) else (model.decoder.n_positions, "tokens")
        if len(prompt) > longest:
            raise Refused(f"prompt has {len(prompt)} {unit}; the context holds at most {longest}", "prompt", TOO_LONG)
    with encoding(model, "prompt"):
        encode = model.decoder.tokenizer.encode
        encoded = [encode(prompt) if isinstance(prompt, str) else model.decoder.encode(prompt) for prompt in prompts]
    return replace(asked(encoded), grammar=grammar)


def _rest(
    fields: Fields, model: Model, name: str, max_tokens: int | None, top: int | None, shown: Mapping[int, str] | None = None
) -> Callable[[list[list[int]]], Asked]:
    """What both kinds of requests have beside their prompts, the last of the fields: what makes a request of these. name: of the
    field of prompts."""
    sampling = _sampling(fields, model.sampling, model.decoder.n_ids)
    stops = fields.take("stop", _stops, list[str]())
    n = fields.take("n", between(1, MOST_CHOICES), 1)
    is_stream = fields.take("stream", yes_or_no, False)
    options = Fields(fields.take("stream_options", an_object, {}))
    has_usage = options.take("include_usage", yes_or_no, False)
    options.take("include_obfuscation", false, False)
    options.end()
    prediction = fields.take("prediction", _prediction, "")
    details = fields.take("specdec", yes_or_no, False)
    fields.take("metadata", an_object, dict[str, Any]())
    for each in OF_NO_EFFECT:
        fields.take(each, text, "")
    fields.end()

    def asked(prompts: list[list[int]]) -> Asked:
        """Raises Refused for what does not fit."""
        tokenizer, most, predicted = model.decoder.tokenizer, model.decoder.n_positions, list[int]()
        if n * len(prompts) > MOST_CHOICES:
            raise Refused(f"{n * len(prompts)} texts are more than {MOST_CHOICES}, which a request may have", "n")
        if (longest := max(map(len, prompts))) > most:
            have = "has" if name == "prompt" else "have"
            raise Refused(f"{name} {have} {longest} tokens; the context holds {most}", name, TOO_LONG)
        if prediction and isinstance(tokenizer, ChatTokenizer):
            with encoding(model, "prediction"):
                predicted = tokenizer.encode_rendered([Part(prediction[: _longest(model)], True)])[:most]
        drawn = [replace(sampling, seed=(sampling.seed + i) % SEEDS) for i in range(n)]
        job = Job([], 0, sampling, stops, top, predicted, shown=shown or {}, tells_guesses=details)
        jobs = [
            replace(job, prompt=prompt, max_tokens=min(max_tokens or most, most + 1 - len(prompt)), sampling=each)
            for prompt in prompts
            for each in drawn
        ]
        return Asked(jobs, False, is_stream, has_usage, details)

    return asked


def _sampling(fields: Fields, own: Sampling, n_ids: int) -> Sampling:
    """By the fields, and where they are silent the model's own."""
    top_p = fields.take("top_p", lambda name, value: real(name, value, 1, "a number from 0 to 1"), own.top_p or 1.0)
    top_k = fields.take("top_k", between(0), own.top_k)
    temperature = fields.take("temperature", lambda name, value: real(name, value, math.inf, "0 or more"), own.temperature)
    seed = fields.take("seed", between(-SEEDS, SEEDS - 1), secrets.randbits(31))
    # a top-p of 0 is all here, and of OpenAI the likeliest token alone
    sampling = replace(own, temperature=temperature, top_k=top_k if top_p else 1, top_p=top_p, seed=seed % SEEDS)
    for name in SAMPLERS:
        sampling = fields.take(name, partial(_with, sampling, n_ids), sampling)
    return sampling


def _with(sampling: Sampling, n_ids: int, name: str, value: Any) -> Sampling:
    """One of the numbers of `Sampling`, which checks them."""
    given: dict[str, Any] = {SAMPLERS[name]: _biases(name, value, n_ids) if name == "logit_bias" else value}
    return replace(sampling, **given)


def _longest(model: Model) -> int:
    """Characters that the context can hold, however they are cut into tokens."""
    tokenizer = model.decoder.tokenizer
    return model.decoder.n_positions * (tokenizer.longest if isinstance(tokenizer, ChatTokenizer) else 1)


def _options(fields: Fields, template: ChatTemplate) -> Options:
    """What a template may ask for beside messages. An effort is one of these, or tells whether to think at all."""
    options = fields.take("chat_template_kwargs", _template_options, dict[str, bool | int | str]())
    effort = fields.take("reasoning_effort", _word, "")
    if effort and template.asks_for("reasoning_effort"):
        return {"reasoning_effort": effort, **options}
    return {THINKING: effort != "none", **options} if effort else options


def _template_options(name: str, value: Any) -> dict[str, bool | int | str]:
    for key, each in an_object(name, value).items():
        if not OPTION.fullmatch(key) or key in OF_TEMPLATES:
            raise ValueError(f"{name} holds {short(key, repr)}, which is no option of a template; expected {THINKING}, say")
        if not isinstance(each, bool | int):
            _word(f"{key} of {name}", each)
    return dict(value)


def _word(name: str, value: Any) -> str:
    """What can be no special token's name."""
    if not isinstance(value, str) or not OPTION.fullmatch(value):
        raise ValueError(f"{name} is {short(value, repr)}; expected a word")
    return value


@contextmanager
def encoding(model: Model, param: str) -> Iterator[None]:
    """Around what makes tokens, or shapes of them; errors come without the names of files here."""
    try:
        yield
    except Lost as error:
        raise Refused(str(error), None, "overloaded", 503) from None
    except (TemplateError, TokenizerError, ValueError, TypeError, RecursionError) as error:
        message, path = str(error), model.decoder.tokenizer.path
        places = {model.template.place if model.template else "", str(path), str(path.parent)}
        for place in sorted(places - {""}, key=len, reverse=True):
            message = message.removeprefix(f"{place}: ")
            if len(Path(place).parts) > 1:  # one name is a word that may be another's, and tells nothing
                message = re.sub(WHOLE_PATH.format(re.escape(place)), "the model's file", message)
        raise Refused(message, param, TOO_LONG if isinstance(error, TooLong) else INVALID) from None


def _prompts(name: str, value: Any) -> list[str | list[int]]:
    """A text, ids, or several of one of them."""
    if isinstance(value, str):
        return [text(name, value)]
    if all(type(each) is int for each in a_list(name, value)):
        return [value]
    if len(value) > MOST_CHOICES:
        raise ValueError(f"{name} has {len(value)} texts; at most {MOST_CHOICES} are written at once")
    return [each if isinstance(each, list) else text(name, each) for each in value]


def _stops(name: str, value: Any) -> list[str]:
    several = strings(name, value)
    if len(several) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in several):
        raise ValueError(f"{name} has more than {MOST_STOPS} strings, or one of more than {LONGEST_STOP} characters")
    return several


def _prediction(name: str, value: Any) -> str:
    one_of(f"type of {name}", an_object(name, value).get("type"), ["content"])
    return words(f"content of {name}", value.get("content"))


def _tool_choice(name: str, value: Any, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Whether one has to be called, and of which."""
    if isinstance(value, dict):
        one_of(f"type of {name}", value.get("type"), ["function"])
        wanted = an_object(f"function of {name}", value.get("function")).get("name")
        if not (named := [tool for tool in tools if tool["function"]["name"] == wanted]):
            raise ValueError(f"{name} names {short(wanted, repr)}, which is none of the tools")
        return "required", named[:1]
    choice = one_of(name, value, ["auto", "none", "required"])
    if choice == "required" and not tools:
        raise ValueError(f"{name} is required, and there are no tools")
    return choice, tools


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise TypeError(f"{name} is {short(value, repr)}; expected a list of at most {MOST_TOOLS}")
    return [_tool(f"{name}[{i}]", each) for i, each in enumerate(value)]


def _tool(name: str, value: Any) -> dict[str, Any]:
    """A function as templates take it."""
    one_of(f"type of {name}", an_object(name, value).get("type"), ["function"])
    function = an_object(f"function of {name}", value.get("function"))
    if not TOOL_NAME.fullmatch(text(f"name of {name}", function.get("name"))):
        raise ValueError(f"name of {name} is {short(function['name'], repr)}; expected 1 to 64 letters, digits, _, . and -")
    text(f"description of {name}", function.get("description") or "")
    an_object(f"parameters of {name}", function.get("parameters") or {})
    is_strict = yes_or_no(f"strict of {name}", function.get("strict") or False)
    told = ("name", "description", "parameters")
    known = {key: function[key] for key in told if function.get(key) is not None}
    return {"type": "function", "function": known, "strict": is_strict}


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    called = dict[str, str]()
    return [_message(told, each, called) for told, each in objects(name, a_list(name, value))]


def _message(name: str, value: dict[str, Any], called: dict[str, str]) -> dict[str, Any]:
    """As templates take it. called: the tools of the calls so far, by their ids."""
    known = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", *OF_A_MESSAGE}
    for key, each in value.items():
        if each and (key not in known or key in OF_A_MESSAGE):
            raise Refused(f"{short(key)} of {name} is not done here; leave it out", "messages", NOT_DONE)
    role = one_of(f"role of {name}", value.get("role"), ["system", "developer", "user", "assistant", "tool"])
    content, calls = value.get("content"), value.get("tool_calls")
    if role == "assistant" and content is None:
        content = ""
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": words(f"content of {name}", content)}
    thought = value.get("reasoning_content") or value.get("reasoning")
    if thought and role == "assistant":
        message["reasoning_content"] = text(f"reasoning_content of {name}", thought)
    if calls and role == "assistant":
        message["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(a_list("tool_calls", calls))]
        called.update({call["id"]: call["function"]["name"] for call in message["tool_calls"]})
    if role == "tool":
        message["tool_call_id"] = text(f"tool_call_id of {name}", value.get("tool_call_id"))
        message["name"] = called.get(message["tool_call_id"], "")
    return message


def _call(name: str, value: Any) -> dict[str, Any]:
    """A call that an answer made; its arguments as the object that they are, which is what templates take."""
    one_of(f"type of {name}", an_object(name, value).get("type", "function"), ["function"])
    function = an_object(f"function of {name}", value.get("function"))
    arguments: Any = text(f"arguments of {name}", function.get("arguments"))
    try:
        arguments = body_of(arguments.encode()) if arguments else {}
    except Refused as error:
        raise ValueError(f"arguments of {name}: {error}") from None
    called = {"name": text(f"name of {name}", function.get("name")), "arguments": arguments}
    return {"id": text(f"id of {name}", value.get("id")), "type": "function", "function": called}


def _answer_schema(name: str, value: Any) -> Mapping[str, Any] | None:
    """What a response_format asks for; None for a text. Raises ValueError for what is no schema."""
    kind = one_of(f"type of {name}", an_object(name, value).get("type"), ["text", "json_object", "json_schema"])
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    schema = an_object(f"json_schema of {name}", value.get("json_schema")).get("schema")
    checked_schema(an_object(f"schema of {name}", schema))
    return schema
