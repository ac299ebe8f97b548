"""The fields that all generation requests share, and the engine's requests that they become. Knows no interface and no server."""

import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.argument_checks import JSONDict, JSONObject, check_choice, check_float, check_strings, shorten
from specdec.engine.request import GenerationRequest, validate_request
from specdec.loaders.model_loader import get_memory_headroom
from specdec.protocols import Constraint
from specdec.sampling import Sampling
from specdec.server.field_validation import (
    INVALID,
    TOO_LONG,
    APIError,
    Fields,
    check_integer,
    check_object,
    join_text_parts,
    wrap_errors,
)
from specdec.server.tool_parsers.base import ToolParser, ToolSchemas
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.text.chat_template import ChatTemplate, PromptTooLongError, TemplateError
from specdec.text.conversation import ChatSettings
from specdec.text.grammar_worker import WorkerLostError
from specdec.text.reasoning_constraint import ReasoningConstraint
from specdec.text.structured_output import ConstraintError, Grammar
from specdec.tokenizer import RenderedSegment, TokenizerError

CACHE_SHARE = 0.5  # KV caches, relative to the memory that the weights leave free
MAX_CHOICES = 16  # per request
MAX_STOPS, MAX_STOP_CHARS = 16, 1000
N_SEEDS = 2**63
# fields of `Sampling` by request field: the same names, and llama.cpp's
SAMPLING_FIELDS = {
    **{name: name for name in ("top_p", "top_k", "temperature", "seed")},
    **{name: name for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
}
# fields with the same name and meaning in all interfaces
COMMON_FIELDS = ("model", *SAMPLING_FIELDS, "stream", "chat_template_kwargs", "service_tier", "specdec")
PATH_PATTERN = r"(?<![\w./\\-]){}(?:[/\\][^\s:;,'\"]*)?(?![\w-]|\.\w)"  # a path, or one of a file in it


@dataclass(frozen=True)
class ServedModel:
    """A served model, with what is needed to parse the requests for it.

    Attributes:
        name: The name that clients use.
        decoder: The target and its draft models.
        template: The chat template; None for a model that cannot chat.
        default_sampling: Sampling settings for the fields that a request leaves out.
        reasoning_budget: Maximum number of tokens of a thought, for requests that set none; -1 for no limit.
    """

    name: str
    decoder: SpeculativeDecoder
    template: ChatTemplate | None
    default_sampling: Sampling = Sampling()  # noqa: RUF009 (immutable)
    reasoning_budget: int = -1

    @classmethod
    def from_decoder(
        cls, name: str, decoder: SpeculativeDecoder, sampling: JSONObject, reasoning_budget: int, log: Callable[[str], object]
    ) -> "ServedModel":
        """Return a decoder with its chat template, if it has one.

        Args:
            name: The name that clients use.
            decoder: The target and its draft models.
            sampling: Sampling settings for the fields that a request leaves out, other than a chat's, by the names of `Sampling`.
            reasoning_budget: Maximum number of tokens of a thought; -1 for no limit.
            log: Called with a line if the model cannot chat.
        """
        template = None
        try:
            template = decoder.chat_template
        except TemplateError as error:
            log(f"chats are not available: {error}")
        return cls(name, decoder, template, replace(ChatSettings(), **sampling).make_sampling(0), reasoning_budget)

    def get_cache_bytes(self, limit: int) -> int:
        """Return the memory limit of all KV caches in bytes: `limit`, or a share of what the weights leave free if it is 0."""
        return limit or int(CACHE_SHARE * get_memory_headroom(self.decoder.target))

    @property
    def max_chars(self) -> int:
        """The most characters that a text in the model's context can have, however it is tokenized."""
        return self.decoder.n_positions * self.decoder.tokenizer.max_token_length


class GenerationFields:
    """The fields that all generation requests share, parsed.

    Args:
        fields: The remaining fields of the body.
        model: The served model.

    Attributes:
        is_stream: Whether the response is streamed.
        include_usage: Whether a stream ends with the numbers of tokens.
        has_details: Whether each chunk reports which tokens were drafted.

    Raises:
        APIError: A field is invalid or unknown.
    """

    def __init__(self, fields: Fields, model: ServedModel) -> None:
        """Take the shared fields out of `fields`, check them, and reject the fields that are left."""
        self._model = model
        self._sampling = _parse_sampling(fields, model)
        self._stop_strings = fields.take("stop", _parse_stops, list[str]())
        self._n = fields.take_int("n", 1, 1, MAX_CHOICES)
        self.is_stream = fields.take_bool("stream")
        options = Fields(fields.take_object("stream_options"))
        self.include_usage = options.take_bool("include_usage")
        options.reject_remaining("stream option")
        self._prediction = fields.take("prediction", _parse_prediction, "")
        self.has_details = fields.take_bool("specdec")
        fields.reject_remaining("chat field")

    def make_requests(
        self,
        prompt_field: str,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        n_top_logprobs: int | None = None,
        visible_tokens: Mapping[int, str] | None = None,
    ) -> list[GenerationRequest]:
        """Return the engine's requests, one per output: for each prompt as many as the field `n`, with consecutive seeds.

        Args:
            prompt_field: Name of the field with the prompts, for errors.
            prompts: Token ids of each prompt.
            max_tokens: Maximum number of tokens of an output; None for as many as the context holds.
            n_top_logprobs: Number of most probable tokens to report per position; None for no log-probabilities.
            visible_tokens: Special tokens that the output shows, with their text.

        Raises:
            APIError: There are too many outputs, or a prompt is too long or has ids that the model does not have.
        """
        decoder, n_outputs = self._model.decoder, self._n * len(prompts)
        n_positions = decoder.n_positions
        if n_outputs > MAX_CHOICES:
            raise APIError(f"the request needs {n_outputs} outputs; at most {MAX_CHOICES} are allowed", "n")
        if (longest := max(map(len, prompts))) > n_positions:
            verb = "has" if prompt_field == "prompt" else "have"
            raise APIError(f"{prompt_field} {verb} {longest} tokens; the context holds {n_positions}", prompt_field, TOO_LONG)
        with wrap_errors(prompt_field):
            checked = [decoder.encode(prompt) for prompt in prompts]
        prediction, requests = self._encode_prediction(), list[GenerationRequest]()
        for prompt in checked:
            for i in range(self._n):
                request = GenerationRequest(
                    prompt,
                    min(max_tokens or n_positions, n_positions + 1 - len(prompt)),
                    replace(self._sampling, seed=(self._sampling.seed + i) % N_SEEDS),
                    self._stop_strings,
                    n_top_logprobs,
                    prediction,
                    visible_tokens=visible_tokens or {},
                    include_draft_text=self.has_details,
                )
                with wrap_errors(None):
                    requests.append(validate_request(request, decoder.bundle))
        return requests

    def _encode_prediction(self) -> list[int]:
        tokenizer = self._model.decoder.tokenizer
        if not self._prediction:
            return []
        with wrap_encoding_errors(self._model, "prediction"):
            segment = RenderedSegment(self._prediction[: self._model.max_chars], True)
            return tokenizer.encode_rendered([segment])[: self._model.decoder.n_positions]


@dataclass(frozen=True)
class ResponseOptions:
    """The contents of the response to a generation request, and the parser of its outputs.

    Attributes:
        shared: The fields that all generation requests share.
        is_chat: Whether the request is a chat and not a completion.
        is_single_call: Whether at most one tool call is returned.
        tool_parser: The parser for tool calls; None if they are not parsed.
        tools: Schemas of the arguments of the offered tools, by name.
        grammar: The grammar of all outputs, which is built later.
        reasoning_constraint: Wraps the constraint of the grammar, so that it holds after the thought; None if it holds at once.
    """

    shared: GenerationFields
    is_chat: bool = False
    is_single_call: bool = False
    tool_parser: type[ToolParser] | None = None
    tools: ToolSchemas = field(default_factory=dict)
    grammar: Grammar | None = None
    reasoning_constraint: ReasoningConstraint | None = None

    def constrain(self, requests: Sequence[GenerationRequest], constraint: Constraint) -> list[GenerationRequest]:
        """Return the requests with the built constraint of the grammar, which begins after the thought if there is one."""
        if self.reasoning_constraint:
            constraint = self.reasoning_constraint.with_inner(constraint)
        return [replace(request, constraint=constraint) for request in requests]

    def explain(self, error: Exception) -> Exception:
        """Return the error of a sequence as an APIError that names the field of the request, if the grammar is the cause."""
        if not isinstance(error, ConstraintError):
            return error
        return APIError(str(error), self.grammar.request_field if self.grammar else "response_format")


def _parse_sampling(fields: Fields, model: ServedModel) -> Sampling:
    """Return the sampling settings of a request; missing fields get the model's defaults, and a missing seed is random."""
    sampling = replace(model.default_sampling, top_p=model.default_sampling.top_p or 1.0, seed=secrets.randbits(31))
    for name, attribute in SAMPLING_FIELDS.items():
        if (value := fields.pop(name)) is not None:
            with wrap_errors(name):
                changes: JSONDict = {attribute: _check_sampling_value(name, value, model.decoder.n_ids)}
                sampling = replace(sampling, **changes)
    # in OpenAI's API a top_p of 0 means the most probable token; in `Sampling` it means all tokens
    return sampling if sampling.top_p else replace(sampling, top_k=1)


def _check_sampling_value(name: str, value: Any, n_ids: int) -> Any:
    """Return the value of a sampling field, validated and converted for `Sampling`, which validates the other fields itself.

    Args:
        name: Name of the request field.
        value: Value of the request field.
        n_ids: Number of token ids, for the keys of `logit_bias`.

    Raises:
        ValueError: The value is invalid; TypeError likewise.
    """
    match name:
        case "top_p":
            return check_float(name, value, 1, "a number from 0 to 1")
        case "top_k":
            return 0 if value == -1 else check_integer(name, value, 0)  # llama.cpp and vLLM: -1 is off
        case "temperature":
            return check_float(name, value, math.inf, "0 or more")
        case "seed":
            seed = check_integer(name, value, -N_SEEDS, N_SEEDS - 1) % N_SEEDS
            return secrets.randbits(31) if value == -1 else seed
        case "logit_bias":
            for key in check_object(name, value):  # a string of digits, as in all JSON objects
                if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < n_ids):
                    raise ValueError(f"{name} has the key {shorten(key, repr)}; expected token ids, from 0 to {n_ids - 1}")
            return {int(key): bias for key, bias in value.items()}
    return value


def _parse_stops(name: str, value: object) -> list[str]:
    given = value if isinstance(value, list) else [value]
    stops = check_strings(name, [stop for stop in given if stop != ""])  # some clients send an empty one for none
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"{name} has more than {MAX_STOPS} strings, or one of more than {MAX_STOP_CHARS} characters")
    return stops


def _parse_prediction(name: str, value: Any) -> str:
    check_choice(f"type of {name}", check_object(name, value).get("type"), ["content"])
    return join_text_parts(f"content of {name}", value.get("content"))


@contextmanager
def wrap_encoding_errors(model: ServedModel, param: str) -> Iterator[None]:
    """Turn errors of chat templates, tokenization and grammars inside the context into APIErrors for the request field `param`.

    The paths of the model's files are removed from the messages. A lost grammar worker becomes status 503, without the field.
    """
    try:
        yield
    except WorkerLostError as error:
        raise APIError(str(error), None, "overloaded", 503) from None
    except (TemplateError, TokenizerError, ValueError, TypeError, RecursionError) as error:
        message, path = str(error), model.decoder.tokenizer.path
        locations = {model.template.location if model.template else "", str(path), str(path.parent)}
        for location in sorted(locations - {""}, key=len, reverse=True):
            message = message.removeprefix(f"{location}: ")
            if len(Path(location).parts) > 1:  # a bare name may be any word, and reveals nothing
                message = re.sub(PATH_PATTERN.format(re.escape(location)), "the model's file", message)
        raise APIError(message, param, TOO_LONG if isinstance(error, PromptTooLongError) else INVALID) from None
