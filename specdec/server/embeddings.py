"""OpenAI's embeddings endpoint: a request becomes auxiliary tasks, and their vectors the response. Knows no server."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import numpy as np

from specdec.argument_checks import JSONObject
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.model import Model
from specdec.runtime.simd import Float32
from specdec.server.auxiliary_tasks import AuxiliaryTask
from specdec.server.field_validation import TOO_LONG, APIError, Fields, parse_texts
from specdec.server.generation_fields import ServedModel, wrap_encoding_errors
from specdec.server.json_values import encode_json

MAX_INPUTS = 2048  # per request, as in OpenAI's API
Pooling = Literal["mean", "last", "cls"]


@dataclass(frozen=True)
class EmbeddingRequest:
    """A parsed request for the embedding vectors of some inputs.

    Attributes:
        inputs: Token ids of each input.
        pooling: How hidden states become one vector: their mean, the last one, or the first one ("cls").
        dimensions: How many of the first numbers of a vector to return; None for all.
        is_base64: Whether to encode the vectors in base64.
    """

    inputs: list[list[int]]
    pooling: Pooling
    dimensions: int | None
    is_base64: bool

    @property
    def tasks(self) -> list[Callable[[Model], AuxiliaryTask]]:
        """Functions, one per input, that take the target and return a task that computes the input's embedding vector."""
        return [partial(compute_embedding, tokens, self.pooling, self.dimensions) for tokens in self.inputs]

    def format_response(self, vectors: Sequence[Float32], name: str) -> bytes:
        """Return OpenAI's response as JSON, with the given embedding vectors, the model's name and the number of tokens."""
        n_tokens = sum(map(len, self.inputs))
        data = [{"object": "embedding", "index": i, "embedding": self._encode_vector(vector)} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return encode_json({"object": "list", "data": data, "model": name, "usage": usage})

    def _encode_vector(self, vector: Float32) -> str | list[float]:
        if self.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(str(number)) for number in vector]


def parse_embedding_request(body: JSONObject, model: ServedModel) -> EmbeddingRequest:
    """Parse a body of /v1/embeddings into an EmbeddingRequest with tokenized inputs.

    Raises:
        APIError: The body is invalid, or an input is too long.
    """
    fields = Fields(body)
    fields.take_string("model")
    decoder = model.decoder
    inputs = fields.take_required("input", partial(parse_texts, maximum=MAX_INPUTS), "a string, token ids, or a list of them")
    encoding = fields.take_choice("encoding_format", ["float", "base64"], "float")
    dimensions = fields.take_int("dimensions", None, 1, decoder.target.config.dim)
    fields.reject_remaining("embeddings field")
    with wrap_encoding_errors(model, "input"):
        tokenized = [
            decoder.tokenizer.encode(each[: model.max_chars + 1]) if isinstance(each, str) else decoder.encode(each)
            for each in inputs
        ]
    if (n_max := max(map(len, tokenized))) > decoder.n_positions:
        raise APIError(f"input has {n_max} tokens; the context holds {decoder.n_positions}", "input", TOO_LONG)
    pooling = decoder.bundle.checkpoint.pooling if decoder.bundle.checkpoint else ""
    return EmbeddingRequest(tokenized, cast(Pooling, pooling or "mean"), dimensions, encoding == "base64")


def compute_embedding(tokens: list[int], pooling: Pooling, dimensions: int | None, target: Model) -> AuxiliaryTask:
    """Compute the embedding vector of an input: its pooled hidden states after the target's last norm, scaled to length 1.

    A generator that yields after each forward pass and returns the vector.

    Args:
        tokens: Token ids of the input.
        pooling: How hidden states become one vector.
        dimensions: How many of the first numbers to keep before scaling; None for all.
        target: The model; its weights are used with another KV cache.
    """
    last_norm = target.config.n_layers + 1
    cache = target.new_cache((last_norm,))
    sums, start = np.zeros(target.config.dim), 0
    while start < len(tokens):
        end = min(start + MAX_BATCH_TOKENS, len(tokens))
        with target.lock:
            cache.forward(tokens[:end], 0, len(tokens))
            states = cache.get_hidden_states(tokens[:end], start)
            if pooling == "mean":
                sums += states.sum(0, dtype=np.float64)
            elif (pooling == "cls" and not start) or (pooling == "last" and end == len(tokens)):
                sums += states[0 if pooling == "cls" else -1]
        start = end
        yield
    vector = sums[:dimensions]
    norm = np.sqrt((vector * vector).sum())
    return (vector / (norm or 1.0)).astype(np.float32)
