"""llama.cpp's /infill, which editors call: a completion of the text between two others. Knows no server."""

from collections.abc import Mapping, Sequence

from specdec.argument_checks import JSONDict, JSONObject, check_string
from specdec.server.field_validation import TOO_LONG, APIError, Fields, iter_objects
from specdec.server.generation_fields import SAMPLING_FIELDS, ServedModel, wrap_encoding_errors
from specdec.server.infill import END_NAMES, encode_infill, end_infills
from specdec.server.openai_chat import ParsedRequest, parse_completion_request
from specdec.server.response_formatter import TRUNCATING_STOP_REASONS, ChoiceDelta, ResponseFormatter, format_sse_event

DEFAULT_FILE_NAME = "tmp"


def parse_infill_request(body: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse a body of llama.cpp's /infill into requests to the engine.

    Raises:
        APIError: The body is invalid, or the model cannot fill in the middle of a text.
    """
    fields = Fields(body)
    before, after, prompt = (fields.take_string(name) for name in ("input_prefix", "input_suffix", "prompt"))
    files = fields.take("input_extra", _parse_files, list[tuple[str, str]]())
    completion = {name: fields.pop(name) for name in (*SAMPLING_FIELDS, "model", "stop", "stream")}
    max_tokens = fields.take_limit("n_predict")
    fields.take("response_fields", _parse_response_fields, list[str]())
    fields.reject_remaining("infill field")
    files = [(name, text[: model.max_chars]) for name, text in files]  # a longer one does not fit the context either
    for name, text in (("input_prefix", before + prompt), ("input_suffix", after)):
        if len(text) > model.max_chars:
            raise APIError(f"{name} has {len(text)} characters; the context holds at most {model.max_chars}", name, TOO_LONG)
    with wrap_encoding_errors(model, "input_prefix"):
        n_positions = model.decoder.n_positions
        room = max(n_positions - max_tokens, n_positions // 2) if max_tokens else n_positions // 2
        tokens = encode_infill(model.decoder.tokenizer, before + prompt, after, "input_suffix", files, room)
    requests, options = parse_completion_request({**completion, "prompt": tokens, "max_tokens": max_tokens or -1}, model)
    return end_infills(requests, model.decoder.tokenizer), options


def _parse_files(name: str, value: object) -> list[tuple[str, str]]:
    """Return the name and the text of other files of the project."""
    return [
        (
            check_string(f"filename of {label}", each.get("filename") or DEFAULT_FILE_NAME),
            check_string(f"text of {label}", each.get("text")),
        )
        for label, each in iter_objects(name, value)
    ]


def _parse_response_fields(name: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is not a list; expected names of fields, such as timings/prompt_n")
    return [check_string(f"{name}[{i}]", each) for i, each in enumerate(value)]


class InfillFormatter(ResponseFormatter):
    """A formatter of responses in llama.cpp's own format of completions, as server-sent events or as one object."""

    def format_delta(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the server-sent event for new text; empty if there is none."""
        text = delta.get_text("text")
        return format_sse_event({"index": 0, "content": text, "tokens": [], "stop": False}) if text else b""

    def format_end(self) -> bytes:
        """Return the server-sent event that ends the stream, with the stop reason and the statistics."""
        return format_sse_event(self._make_response(""))

    def format_error(self, error: APIError) -> bytes:
        """Return the server-sent event that ends a stream after an error."""
        return format_sse_event(error.format_body())

    def format_response(self, deltas: Sequence[ChoiceDelta]) -> JSONDict:
        """Return the complete response as a JSON object, or only the fields that the request names in `response_fields`.

        A name may be a path, such as `timings/prompt_n`. Fields that do not exist are left out.
        """
        response, names = self._make_response(deltas[0].get_text("text")), self.body.get("response_fields")
        if not names:
            return response
        found = {name: _get_nested(response, name.split("/")) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def _make_response(self, content: str) -> JSONDict:
        choice = self.choices[0]
        statistics, stop_string = choice.statistics, None if choice.stop_string in END_NAMES else choice.stop_string
        is_limited = statistics.stop_reason in TRUNCATING_STOP_REASONS
        prompt_s, seconds = statistics.prefill_seconds, statistics.decode_seconds
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self.model.name,
            "tokens_predicted": self.n_generated,
            "tokens_evaluated": self.n_prompt,
            "stop_type": "limit" if is_limited else "word" if stop_string else "eos",
            "stopping_word": stop_string or "",
            "truncated": False,
            "timings": {
                "prompt_n": self.n_prompt,
                "prompt_ms": 1000 * prompt_s,
                "prompt_per_second": self.n_prompt / prompt_s if prompt_s else 0.0,
                "predicted_n": self.n_generated,
                "predicted_ms": 1000 * seconds,
                "predicted_per_second": self.n_generated / seconds if seconds else 0.0,
            },
        }


def _get_nested(value: object, keys: Sequence[str]) -> object:
    """Return the value at a path of keys in nested objects; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
