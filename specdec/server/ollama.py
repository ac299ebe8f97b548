"""ollama's API, translated to and from chat and completion requests; streams have one JSON object per line. Knows no server."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from specdec.argument_checks import JSONDict, JSONObject, check_string
from specdec.model import count_parameters
from specdec.runtime.simd import Float32
from specdec.server.embeddings import EmbeddingRequest, parse_embedding_request
from specdec.server.field_validation import APIError, Fields, check_list, check_object, iter_objects, wrap_errors
from specdec.server.generation_fields import SAMPLING_FIELDS, ServedModel, wrap_encoding_errors
from specdec.server.json_values import encode_json
from specdec.server.openai_chat import ParsedRequest, parse_chat_request, parse_completion_request
from specdec.server.response_formatter import OutputPart, PartsFormatter
from specdec.text.reasoning import find_template_marks

API_VERSION = "0.12.6"  # of ollama's API; clients require a minimum version
DEFAULT_TAG = ":latest"  # clients add it to names without a tag
NS_PER_S = 10**9
MESSAGE_FIELDS = {"thinking": "reasoning_content", "tool_name": "name"}  # the names in chat requests


def normalize_body(body: JSONObject) -> JSONDict:
    """Return a copy of a request body with the model's name under `model`, without the default tag; None if it has no name."""
    name = body.get("model") or body.get("name")
    return {**body, "model": name.removesuffix(DEFAULT_TAG) if isinstance(name, str) else None}


def is_load_request(body: JSONObject) -> bool:
    """Return whether a request only loads its model, since it has neither messages nor a prompt."""
    return not (body.get("messages") or body.get("prompt"))


def parse_ollama_chat(body: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse a body of ollama's /api/chat into requests to the engine.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    messages = fields.take("messages", _parse_messages, list[JSONDict]())
    chat = {"messages": messages, "tools": fields.pop("tools")}
    return parse_chat_request(chat | _parse_common(fields), model)


def parse_ollama_generate(body: JSONObject, model: ServedModel) -> ParsedRequest:
    """Parse a body of ollama's /api/generate into requests to the engine.

    It is a chat of one message, or a completion if it is raw, has a suffix, or the model cannot chat.

    Raises:
        APIError: The body is invalid, or uses something that is not supported.
    """
    fields = Fields(body)
    prompt, system, suffix = (fields.take_string(name) for name in ("prompt", "system", "suffix"))
    is_raw = fields.take_bool("raw") or suffix or not model.template
    common = _parse_common(fields)
    if is_raw:
        common = {key: value for key, value in common.items() if key not in ("chat_template_kwargs", "reasoning_effort")}
        return parse_completion_request({"prompt": system + prompt, "suffix": suffix} | common, model)
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": prompt}]
    return parse_chat_request({"messages": messages} | common, model)


def _parse_common(fields: Fields) -> JSONDict:
    """Convert the fields that /api/chat and /api/generate share into those of a chat request; raises APIError for all others."""
    options = Fields(fields.take_object("options"))
    common = {name: options.pop(name) for name in (*SAMPLING_FIELDS, "stop")}
    limit = options.take_int("num_predict", -1, -2)
    options.reject_remaining("ollama option")
    common |= {"model": fields.pop("model"), "stream": fields.take_bool("stream", True), "max_tokens": max(limit, -1) or 1}
    common["response_format"] = fields.take("format", _parse_format, None)
    match fields.pop("think"):
        case False:
            common["reasoning_effort"] = "none"
        case True:
            common["chat_template_kwargs"] = {"enable_thinking": True}
        case effort:
            common["reasoning_effort"] = effort
    fields.reject_remaining("ollama field")
    return common


def _parse_format(name: str, value: object) -> JSONDict | None:
    """Convert ollama's field `format` ("json", a JSON schema, or "" for text) into a chat's `response_format`; None for text."""
    if value in ("", "json"):
        return {"type": "json_object"} if value else None
    return {"type": "json_object", "schema": check_object(name, value)}


def _parse_messages(name: str, value: object) -> list[JSONDict]:
    """Convert ollama's messages into those of a chat request, whose fields have other names."""
    return [
        {MESSAGE_FIELDS.get(key, key): item for key, item in each.items()} | {"content": each.get("content") or ""}
        for _, each in iter_objects(name, check_list(name, value))
    ]


@dataclass(frozen=True)
class OllamaEmbeddingRequest(EmbeddingRequest):
    """A request for embedding vectors whose response has ollama's format.

    Attributes:
        is_single: Whether the response is that of ollama's older path /api/embeddings, for one vector.
    """

    is_single: bool = False

    def format_response(self, vectors: Sequence[Float32], name: str) -> bytes:
        """Return ollama's response as JSON."""
        embeddings = [[float(str(number)) for number in vector] for vector in vectors]
        if self.is_single:
            return encode_json({"embedding": embeddings[0]})
        return encode_json({"model": name, "embeddings": embeddings, "prompt_eval_count": sum(map(len, self.inputs))})


def parse_ollama_embedding(body: JSONObject, model: ServedModel) -> OllamaEmbeddingRequest:
    """Parse a body of /api/embed into an embedding request; inputs are cut off at the context, unless `truncate` is false.

    Raises:
        APIError: The body is invalid, or an input is too long.
    """
    fields, decoder = Fields(body), model.decoder
    inputs: object = fields.pop("input")
    if fields.take_bool("truncate", True) and isinstance(inputs, str | list):
        texts = [inputs] if isinstance(inputs, str) else inputs
        with wrap_encoding_errors(model, "input"):
            inputs = [
                decoder.tokenizer.encode(check_string(f"input[{i}]", each)[: model.max_chars])[: decoder.n_positions]
                for i, each in enumerate(texts)
            ]
    fields.take_object("options")
    parsed = parse_embedding_request({"input": inputs or None, "dimensions": fields.pop("dimensions")}, model)
    fields.pop("model")
    fields.reject_remaining("ollama field")
    return OllamaEmbeddingRequest(parsed.inputs, parsed.pooling, parsed.dimensions, False)


def parse_ollama_prompt_embedding(body: JSONObject, model: ServedModel) -> OllamaEmbeddingRequest:
    """Parse a body of ollama's older /api/embeddings, whose input is a `prompt`, into an embedding request.

    Raises:
        APIError: The body is invalid.
    """
    with wrap_errors("prompt"):
        prompt = check_string("prompt", body.get("prompt"))
    others = {key: value for key, value in body.items() if key != "prompt"}
    return replace(parse_ollama_embedding(others | {"input": prompt}, model), is_single=True)


class OllamaChatFormatter(PartsFormatter):
    """A formatter of responses in the format of ollama's /api/chat, as JSON lines or as one object."""

    media_type = b"application/x-ndjson"

    @classmethod
    def format_loading(cls, text: str, random_id: str, n_sent: int) -> bytes:
        """Return nothing, since JSON lines have no comments."""
        return b""

    def format_heartbeat(self) -> bytes:
        """Return a line without new text."""
        return self._format_line(self._format_output("text", ""))

    def format_end(self) -> bytes:
        """Return the lines that end the last part and the stream."""
        return self._end_last_part() + self._format_line(self._format_output("text", "") | self._format_statistics())

    def format_error(self, error: APIError) -> bytes:
        """Return the line that reports an error within a stream."""
        return encode_json(error.format_body("/api/")) + b"\n"

    def _format_part(self, change: str, part: OutputPart, text: str) -> bytes:
        if part.kind == "tool_call":
            return self._format_line(self._format_call(part)) if change == "end" else b""
        return self._format_line(self._format_output(part.kind, text)) if change == "delta" else b""

    def _make_response(self) -> JSONDict:
        texts = {kind: "".join(part.text for part in self._parts if part.kind == kind) for kind in ("reasoning", "text")}
        message = self._format_output("reasoning", texts["reasoning"])["message"] if texts["reasoning"] else {}
        message |= self._format_output("text", texts["text"])["message"]
        for part in self._parts:
            if part.kind == "tool_call":
                call = self._format_call(part)["message"]
                message["content"] += call["content"]
                message["tool_calls"] = [*message.get("tool_calls", ()), *call.get("tool_calls", ())]
        return self._make_object({"message": message} | self._format_statistics())

    def _format_output(self, kind: str, text: str) -> JSONDict:
        """Return the fields of a line with new text or reasoning."""
        thinking = {"thinking": text} if kind == "reasoning" else {}
        return {"message": {"role": "assistant", "content": "" if thinking else text, **thinking}}

    def _format_call(self, part: OutputPart) -> JSONDict:
        """Return the fields of a line with a tool call; if its arguments were cut off, the call is returned as plain text."""
        if (arguments := part.parse_arguments()) is None:
            return self._format_output("text", f"{part.name} {part.text}")
        index = sum(each.kind == "tool_call" for each in self._parts[: part.index])
        function = {"name": part.name, "arguments": arguments, "index": index}
        return {"message": {"role": "assistant", "content": "", "tool_calls": [{"id": part.id, "function": function}]}}

    def _format_statistics(self) -> JSONDict:
        """Return the fields that end a response: the stop reason, the token counts, and the times in nanoseconds."""
        statistics = self.choices[0].statistics
        prompt_ns, ns = (int(NS_PER_S * seconds) for seconds in (statistics.prefill_seconds, statistics.decode_seconds))
        return {
            "done": True,
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            "total_duration": prompt_ns + ns,
            "load_duration": 0,
            "prompt_eval_count": self.n_prompt,
            "prompt_eval_duration": prompt_ns,
            "eval_count": self.n_generated,
            "eval_duration": ns,
        }

    def _make_object(self, fields: JSONObject) -> JSONDict:
        return {"model": self.model.name, "created_at": format_time(), "done": False, **fields}

    def _format_line(self, fields: JSONObject) -> bytes:
        return encode_json(self._make_object(fields)) + b"\n"


class OllamaGenerateFormatter(OllamaChatFormatter):
    """A formatter of responses in the format of ollama's /api/generate, whose text is in the field `response`."""

    def _make_object(self, fields: JSONObject) -> JSONDict:
        message = {key: value for key, value in fields["message"].items() if key != "role"}
        others = {key: value for key, value in fields.items() if key != "message"}
        return super()._make_object({"response": message.pop("content"), **message, **others})


def format_loaded(name: str) -> JSONDict:
    """Return the response to a request that only loads a model."""
    message = {"role": "assistant", "content": ""}
    return {"model": name, "created_at": format_time(), "response": "", "message": message, "done": True, "done_reason": "load"}


def format_model(name: str, n_bytes: int, model: ServedModel | None) -> JSONDict:
    """Return a model as an item of /api/tags; its family and weights are empty if it is not loaded, so that `model` is None."""
    digest = hashlib.sha256(name.encode()).hexdigest()  # of the name: the file's own would take minutes
    file, family, size, weights = name, "", "", ""
    if model:
        target, checkpoint = model.decoder.target, model.decoder.bundle.checkpoint
        file = str(checkpoint.path) if checkpoint else name
        family = (checkpoint.family if checkpoint else "") or target.config.architecture
        size = f"{count_parameters(target.config) / 10**6:.1f}M"
        weights = target.weights.format_names
    file_format = {".gguf": "gguf", ".bin": "bin"}.get(Path(file).suffix, "safetensors")
    details = {"parent_model": "", "format": file_format, "family": family, "families": [family] if family else []}
    details |= {"parameter_size": size, "quantization_level": weights}
    return {"name": name, "model": name, "modified_at": format_time(), "size": n_bytes, "digest": digest, "details": details}


def format_model_details(name: str, n_bytes: int, model: ServedModel | None) -> JSONDict:
    """Return the response of /api/show; without template and context length if the model is not loaded (`model` is None)."""
    item, info = format_model(name, n_bytes, model), JSONDict()
    if model:
        family = model.decoder.target.config.architecture
        info = {"general.architecture": family, f"{family}.context_length": model.decoder.n_positions}
    template = model.template if model else None
    capabilities = ["completion"] + ["tools"] * (not model or template is not None)
    if template and find_template_marks(template):
        capabilities.append("thinking")
    return {
        "modelfile": "",
        "parameters": "",
        "template": template.source if template else "",
        "details": item["details"],
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": item["modified_at"],
    }


def format_time() -> str:
    """Return the current time in ISO 8601, as ollama does."""
    return datetime.now(timezone.utc).isoformat()
