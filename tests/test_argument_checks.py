"""Tests that arguments of a wrong type or value are rejected with the parameter's name."""

import copy
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

from specdec import CheckpointError, Sampling, SpeculativeDecoder
from specdec.argument_checks import check_range, count_common_prefix, decode_text
from tests.tools.fuzz import Index


@pytest.fixture(scope="module")
def decoder(pair):
    return SpeculativeDecoder(pair.target, pair.draft)


TABLE = np.zeros((9, 9))  # its repr has nine lines
WRONG_TYPES = [
    ("gamma", 4.5), ("gamma", True), ("gamma", "4"), ("gamma", None), ("n_threads", 1.5), ("n_threads", "1"), ("n_threads", True),
    ("gamma", int), ("gamma", TABLE), ("n_threads", TABLE.astype(int)), ("target", 5), ("target", None), ("target", b"a.bin"),
    ("draft", True), ("draft", TABLE), ("draft", [1]), ("tokenizer", 3.5), ("tokenizer", b"a.bin"),
]  # fmt: skip
WRONG_VALUES = [
    ("gamma", 0), ("gamma", 64), ("gamma", -1), ("n_threads", 0), ("n_threads", 10**6), ("verify", ["coupled"]), ("verify", "x"),
    ("verify", None), ("quantize", "int4"), ("quantize", ["both"]), ("quantize", 3), ("verify", TABLE), ("verify", 10**5000),
    ("kv", "fp16"), ("kv", None),
]  # fmt: skip


WRONG = [(*case, TypeError) for case in WRONG_TYPES] + [(*case, ValueError) for case in WRONG_VALUES]


@pytest.mark.parametrize(("name", "value", "error_type"), WRONG, ids=[f"{name} {i}" for i, (name, *_) in enumerate(WRONG)])
def test_a_wrong_constructor_argument_is_rejected_by_name(pair, name, value, error_type):
    with pytest.raises(error_type, match=f"^{name} is .*; expected") as caught:
        SpeculativeDecoder(**({"target": pair.target, "draft": pair.draft} | {name: value}))
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("gamma", 0), ("gamma", 2.5), ("verify", "never")])
def test_a_wrong_attribute_value_is_rejected_and_not_set(decoder, name, value):
    before = getattr(decoder, name)
    with pytest.raises((TypeError, ValueError), match=name):
        setattr(decoder, name, value)
    assert getattr(decoder, name) == before


WRONG_REQUESTS = [
    ("seed", 1.5, TypeError), ("seed", "1", TypeError), ("seed", -1, ValueError), ("seed", 2**63, ValueError),
    ("top_k", float("nan"), TypeError), ("top_k", 1.0, TypeError), ("top_k", -1, ValueError), ("top_p", "0.9", TypeError),
    ("top_p", float("nan"), ValueError), ("top_p", 1.1, ValueError), ("temperature", 10**400, ValueError),
    ("temperature", -(10**5000), ValueError), ("temperature", float("inf"), ValueError), ("temperature", "1", TypeError),
    ("temperature", True, TypeError), ("max_tokens", -1, ValueError), ("max_tokens", float("nan"), TypeError),
    ("max_tokens", 2.0, TypeError), ("prompt", None, TypeError), ("prompt", b"ab", TypeError), ("prompt", 5, TypeError),
    ("prompt", "a\udcff", ValueError), ("prompt", "x" * 500, ValueError), ("prompt", 10**5000, TypeError),
    ("prompt", TABLE, TypeError), ("temperature", TABLE, TypeError), ("max_tokens", TABLE, TypeError), ("seed", int, TypeError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error_type"), WRONG_REQUESTS, ids=[f"{name} {i}" for i, (name, *_) in enumerate(WRONG_REQUESTS)]
)
def test_a_wrong_request_argument_is_rejected_by_name_before_decoding(decoder, name, value, error_type):
    request = {"prompt": "ab", "max_tokens": 5} | {name: value}
    sampling_options = {name: request.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in request}
    for run in (
        lambda: decoder.generate(**request, **sampling_options),
        lambda: decoder.stream(**request, sampling=Sampling(**sampling_options)),
    ):
        with pytest.raises(error_type, match=name) as caught:
            run()
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


@pytest.mark.parametrize("sampling", [None, 0.5, {"seed": 3}, Sampling])
def test_a_sampling_of_the_wrong_type_is_rejected(decoder, sampling):
    with pytest.raises(TypeError, match=r"^sampling is .*; expected"):
        decoder.stream("ab", 5, sampling)
    with pytest.raises(TypeError, match=r"^sampling is .*; expected"):
        decoder.generate("ab", 5, sampling, seed=3)


def test_numpy_numbers_are_accepted(decoder):
    text = decoder.generate("ab", 20, temperature=0.5, top_k=3, top_p=0.75, seed=7).text
    sampling_options = Sampling(np.float32(0.5), np.int64(3), np.float64(0.75), np.uint8(7))
    assert decoder.generate("ab", np.int32(20), sampling_options).text == text
    assert decoder.generate("ab", Index(), temperature=0.5, top_k=Index(), top_p=0.75, seed=Index()) is not None
    assert Sampling(temperature=1) == Sampling(temperature=1.0)


def test_a_uint8_max_tokens_does_not_wrap_around(pair):
    decoder = SpeculativeDecoder(pair.endless, pair.draft)
    assert decoder.generate("ab" * 9, np.uint8(250), seed=1).statistics.n_generated == 250


@pytest.mark.parametrize("tokens", [[1, 99999], [1, -1], [1, 300]])
def test_a_token_out_of_range_is_rejected(decoder, tokens):
    with pytest.raises(ValueError, match="token"):
        decoder.tokenizer.decode(tokens)


@pytest.mark.parametrize("token", [1.0, "1", None])
def test_a_token_that_is_not_an_integer_is_rejected(decoder, token):
    with pytest.raises(TypeError, match="token"):
        decoder.tokenizer.decode([1, token])


@pytest.mark.parametrize("name", ["target", "draft", "tokenizer"])
def test_an_empty_path_is_rejected(pair, name):
    with pytest.raises(CheckpointError, match="the model name is empty"):
        SpeculativeDecoder(**({"target": pair.target} | {name: ""}))


def test_a_sequence_larger_than_memory_is_rejected_before_decoding(pair, monkeypatch):
    decoder = SpeculativeDecoder(pair.endless)
    monkeypatch.setattr("specdec.loaders.model_loader.get_physical_memory_bytes", lambda: 10e6)
    with pytest.raises(ValueError, match=re.escape("100000 tokens needs")):
        decoder.stream("ab", 10**12)
    assert decoder.generate("ab", 20).statistics.n_generated == 20


def test_a_pickled_or_copied_decoder_generates_the_same_and_shares_no_models(pair):
    decoder = SpeculativeDecoder(pair.target, pair.draft, stage=pair.draft, gamma=3, n_threads=1)
    text = decoder.generate("ab", 20, seed=3).text
    for copied in (pickle.loads(pickle.dumps(decoder)), copy.deepcopy(decoder)):
        assert copied.generate("ab", 20, seed=3).text == text and (copied.gamma, copied.verify) == (3, decoder.verify)
        models = [(copied.target, decoder.target), (copied.draft, decoder.draft), (copied.stage, decoder.stage)]
        assert all(one and one is not other for one, other in models)


def test_common_prefix_of_lists_that_another_thread_shortens():
    assert count_common_prefix([1, 2, 3], [1, 2], 3) == 2
    assert count_common_prefix([1, 2], [1, 2, 3], 9) == 2
    assert count_common_prefix([1, 2, 3], [1, 5, 3], 2) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_texts_of_people_may_have_a_byte_order_mark(encoding):
    assert decode_text("é 🙂\ufeff".encode(encoding)) == "é 🙂\ufeff"
    with pytest.raises(UnicodeDecodeError):
        decode_text("é".encode(encoding)[:-1])


@pytest.mark.parametrize(
    ("value", "n_errors"), [(0, 0), (10**400, 0), (-1, 1), (-(10**400), 1), (float("inf"), 1), (float("nan"), 1)]
)
def test_a_range_without_a_maximum_takes_each_finite_number(value, n_errors):
    errors = [*check_range(SimpleNamespace(window=value), 0, float("inf"), "window")]
    assert len(errors) == n_errors and all("window is" in error and "0 or more" in error for error in errors)
