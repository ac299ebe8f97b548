"""Tokenization endpoints, with llama-server's request format. Knows no server."""

from specdec.argument_checks import JSONDict, JSONObject, check_ints, shorten
from specdec.server.field_validation import Fields
from specdec.server.generation_fields import ServedModel, wrap_encoding_errors


def tokenize(body: JSONObject, model: ServedModel) -> JSONDict:
    """Return the response to a body of /tokenize: the token ids of its `content`, with BOS only if `add_special` is true.

    Raises:
        APIError: A field is invalid, or the content cannot be tokenized.
    """
    fields = Fields(body)
    fields.take_string("model")
    content = fields.take_string("content")
    add_special = fields.take_bool("add_special")
    fields.reject_remaining("chat field")
    with wrap_encoding_errors(model, "content"):
        prefix, tokens = (model.decoder.tokenizer.encode(each) for each in ("", content))
    return {"tokens": tokens if add_special or tokens[: len(prefix)] != prefix else tokens[len(prefix) :]}


def detokenize(body: JSONObject, model: ServedModel) -> JSONDict:
    """Return the response to a body of /detokenize: the text of its list of token ids, `tokens`.

    Raises:
        APIError: A field is invalid, for example an id outside the vocabulary.
    """
    fields = Fields(body)
    fields.take_string("model")
    tokens = fields.take("tokens", lambda name, value: _check_token_ids(name, value, model), list[int]())
    fields.reject_remaining("chat field")
    return {"content": model.decoder.tokenizer.decode(tokens)}


def _check_token_ids(name: str, value: object, model: ServedModel) -> list[int]:
    """Return a list of token ids; raises TypeError for another value and ValueError for an id outside the vocabulary."""
    if not isinstance(value, list) or any(isinstance(each, bool) for each in value):
        raise TypeError(f"{name} is {shorten(value, repr)}; expected a list of token ids")
    tokens, max_id = check_ints(name, value), model.decoder.n_ids - 1
    if tokens and not 0 <= min(tokens) <= max(tokens) <= max_id:
        raise ValueError(f"{name} contain an id outside the vocabulary; expected 0 to {max_id}")
    return tokens
