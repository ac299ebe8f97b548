"""OpenAI's embeddings: a body of /v1/embeddings becomes work beside texts, and its vectors an answer. Knows no server."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np

from specdec.engine.auxiliary_tasks import Steps
from specdec.kernels import MAX_TOKENS
from specdec.model.transformer import Transformer
from specdec.runtime.simd import Float32
from specdec.server.openai_requests import Model, encoding
from specdec.server.validation import TOO_LONG, Fields, Refused, a_list, between
from specdec.validation import one_of, text

MOST_TEXTS = 2048  # of a request: OpenAI's number
Pooling = Literal["mean", "last", "cls"]
OF_NO_EFFECT = ("user", "input_type", "truncate")  # texts that are taken


@dataclass(frozen=True)
class Embedding:
    """What is asked for. texts: their ids; dimensions: of how many of the first numbers a vector is, None for all."""

    texts: list[list[int]]
    pooling: Pooling
    dimensions: int | None
    is_base64: bool

    @property
    def work(self) -> list[Callable[[Transformer], Steps]]:
        """What makes the vector of each text."""
        return [partial(embedded, text, self.pooling, self.dimensions) for text in self.texts]

    def answer(self, vectors: Sequence[Float32], name: str) -> dict[str, Any]:
        n = sum(map(len, self.texts))
        data = [{"object": "embedding", "index": i, "embedding": self._told(vector)} for i, vector in enumerate(vectors)]
        return {"object": "list", "data": data, "model": name, "usage": {"prompt_tokens": n, "total_tokens": n}}

    def _told(self, vector: Float32) -> str | list[float]:
        if self.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(str(number)) for number in vector]


def embeddings_asked(body: Mapping[str, Any], model: Model) -> Embedding:
    """A body of /v1/embeddings. Raises Refused."""
    fields = Fields(body)
    fields.take("model", text, "")
    decoder = model.decoder
    if not (several := fields.take("input", _texts, list[str | list[int]]())):
        raise Refused("input is missing; expected a text, token ids, or several of them", "input", "missing_parameter")
    form = fields.take("encoding_format", lambda name, value: one_of(name, value, ["float", "base64"]), "float")
    dimensions = fields.take("dimensions", between(1, decoder.target.config.dim), None)
    for name in OF_NO_EFFECT:
        fields.take(name, text, "")
    fields.end({})
    with encoding(model, "input"):
        longest = decoder.n_positions * getattr(decoder.tokenizer, "longest", 1)
        texts = [
            decoder.tokenizer.encode(each[: longest + 1]) if isinstance(each, str) else decoder.encode(each) for each in several
        ]
    if (most := max(map(len, texts))) > decoder.n_positions:
        raise Refused(f"input has {most} tokens; the context holds {decoder.n_positions}", "input", TOO_LONG)
    pooling = decoder.team.source.pooling if decoder.team.source else ""
    return Embedding(texts, cast(Pooling, pooling or "mean"), dimensions, form == "base64")


def _texts(name: str, value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(each) is int for each in value)):
        value = [value]
    if len(a_list(name, value)) > MOST_TEXTS:
        raise ValueError(f"{name} has {len(value)} texts; at most {MOST_TEXTS} are read at once")
    if any(each == [] for each in value):
        raise ValueError(f"{name} has a text of no tokens; expected one or more")
    return [each if isinstance(each, list) else text(f"{name}[{i}]", each) for i, each in enumerate(value)]


def embedded(tokens: list[int], pooling: Pooling, dimensions: int | None, target: Transformer) -> Steps:
    """The vector of a text, of length 1, a pass at a time: of what stands behind the target's last norm."""
    last_norm = target.config.n_layers + 1
    model = target.seat((last_norm,))
    sums, first = np.zeros(target.config.dim), 0
    while first < len(tokens):
        end = min(first + MAX_TOKENS, len(tokens))
        with target.lock:
            model.n_threads = target.n_threads
            model.forward(tokens[:end], 0, len(tokens))
            states = model.hidden(tokens[:end], first)
            if pooling == "mean":
                sums += states.sum(0, dtype=np.float64)
            elif (pooling == "cls" and not first) or (pooling == "last" and end == len(tokens)):
                sums += states[0 if pooling == "cls" else -1]
        first = end
        yield
    vector = sums[:dimensions]
    length = np.sqrt((vector * vector).sum())
    return (vector / (length or 1.0)).astype(np.float32)
