"""Texts to token ids and back, as llama-server has it. Knows no server."""

from collections.abc import Mapping
from typing import Any

from specdec.server.openai_requests import Model, encoding
from specdec.server.validation import Fields, yes_or_no
from specdec.validation import ids, short, text


def tokenized(body: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """A body of /tokenize: the ids of `content`, behind BOS where `add_special` asks for it. Raises Refused."""
    fields = Fields(body)
    fields.take("model", text, "")
    content = fields.take("content", text, "")
    is_special = fields.take("add_special", yes_or_no, False)
    fields.end()
    with encoding(model, "content"):
        first, tokens = (model.decoder.tokenizer.encode(each) for each in ("", content))
    return {"tokens": tokens if is_special or tokens[: len(first)] != first else tokens[len(first) :]}


def detokenized(body: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """A body of /detokenize: the text of `tokens`. Raises Refused."""
    fields = Fields(body)
    fields.take("model", text, "")
    tokens = fields.take("tokens", lambda name, value: _known(name, value, model), list[int]())
    fields.end()
    return {"content": model.decoder.tokenizer.decode(tokens)}


def _known(name: str, value: Any, model: Model) -> list[int]:
    """Ids that the model may say."""
    if not isinstance(value, list) or any(isinstance(each, bool) for each in value):
        raise TypeError(f"{name} is {short(value, repr)}; expected a list of token ids")
    tokens, most = ids(name, value), model.decoder.n_ids - 1
    if tokens and not 0 <= min(tokens) <= max(tokens) <= most:
        raise ValueError(f"{name} hold an id beyond the vocabulary; expected 0 to {most}")
    return tokens
