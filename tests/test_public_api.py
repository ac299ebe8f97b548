"""The library as somebody uses it: prompts, stop strings, streamed text, what a result and an object say of themselves."""

import contextlib
import doctest
import io
import itertools
import pickle
import pydoc
import re

import pytest

import specdec
from specdec import Prompt, Proposal, Sampling, SpeculativeDecoder, Step, TemplateError, validation
from specdec.loaders.model_lookup import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.text.detokenizer import Until, Wording, worded
from specdec.tokenizer import FIRST_BYTE
from tests.test_end_to_end import folder
from tests.test_type_checking import documented_examples
from tests.tools.hf_folders import FIXTURES

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def decoder():
    return SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, gamma=4)


@pytest.fixture(scope="module")
def wild(pair):
    """A pair that writes bytes of broken and unbroken characters."""
    return SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=3, n_threads=1)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    path = folder(tmp_path_factory.mktemp("talk") / "talker", positions=320)
    (path / "chat_template.jinja").write_bytes((FIXTURES / "chat" / "smollm2.jinja").read_bytes())
    (path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    return SpeculativeDecoder(path, n_threads=1)


def texts_of(events):
    return [event.text for event in events if not isinstance(event, Proposal)]


def test_the_example_in_the_docstring_runs():
    names = {name: getattr(specdec, name) for name in specdec.__all__}
    examples = doctest.DocTestFinder(recurse=False).find(SpeculativeDecoder, "example", globs=names)
    results = [doctest.DocTestRunner().run(example) for example in examples]
    assert sum(result.attempted for result in results) >= 3
    assert sum(result.failed for result in results) == 0


def test_the_examples_of_the_documents_run():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(documented_examples(), {})
    told, streamed = out.getvalue().split("\n", 1)[0], out.getvalue()
    assert told.startswith(",") and "Once upon a time" in streamed


def test_help_tells_what_the_package_is_and_which_names_are_its_library():
    told = pydoc.plain(pydoc.render_doc(specdec))
    assert "llama2.c" not in told.split("PACKAGE CONTENTS")[0]
    assert "Everything else in the package may change with any version." in told
    assert "class SpeculativeDecoder" in told and "temperature: float | None" in told


def test_the_texts_of_steps_are_the_text_and_of_whole_characters(decoder, wild):
    for one, seed in itertools.product((decoder, wild), range(15)):
        sampling = Sampling(1.5, seed=seed)
        texts = texts_of(one.stream("", 60, sampling))
        generation = one.generate("", 60, sampling)
        assert "".join(texts) == generation.text
        assert generation.text == one.tokenizer.decode([*one.encode(""), *generation.tokens])


def test_a_character_that_steps_divide_is_of_the_step_that_ends_it(tokenizer):
    first, second = (FIRST_BYTE + byte for byte in "é".encode())
    steps = [Step([token], [], 0, 0.0, 0.0) for token in (first, second)] + [Step([first], [], 0, 0.0, 0.0, "max_tokens")]
    events = iter([Prompt(tokenizer.encode("the"), 0.0), *steps])
    assert texts_of(worded(events, Wording(tokenizer))) == [
        "the",
        "",
        "é",
        "\ufffd",
    ]


def test_a_generation_has_its_tokens_and_its_continuation(decoder):
    generation = decoder.generate(PROMPT, 30, seed=1)
    text, statistics = generation
    assert text == generation.text == PROMPT + generation.continuation
    assert statistics is generation.statistics
    assert len(generation.tokens) == statistics.n_generated == 30
    assert pickle.loads(pickle.dumps(generation)) == generation


def test_a_prompt_may_be_ids(decoder):
    tokens = decoder.encode(PROMPT)
    expected = decoder.generate(PROMPT, 20, seed=2)
    for prompt in (tokens, tuple(tokens), validation.ids("prompt", tokens)):
        got = decoder.generate(prompt, 20, seed=2)
        assert (got.text, got.tokens) == (expected.text, expected.tokens)
    assert decoder.generate(tokens + expected.tokens[:5], 15, seed=2).text == expected.text


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [([], ValueError), ([1024], ValueError), ([-1], ValueError), ([1.0], TypeError), (["a"], TypeError), ({1: 2}, TypeError)],
)
def test_ids_that_are_none_are_refused(decoder, prompt, kind):
    with pytest.raises(kind, match="prompt"):
        decoder.stream(prompt)


def test_a_sampling_and_keywords_mean_the_same(decoder):
    sampling = Sampling(0.7, 5, 0.8, 3)
    expected = decoder.generate(PROMPT, 20, sampling).text
    assert decoder.generate(PROMPT, 20, temperature=0.7, top_k=5, top_p=0.8, seed=3).text == expected
    assert decoder.generate(PROMPT, 20, Sampling(0.7, 5, 0.8), seed=3).text == expected
    assert decoder.generate(PROMPT, 20, sampling, temperature=None, seed=None).text == expected
    with pytest.raises(TypeError, match="temperature is None"):
        Sampling(None)
    with pytest.raises(TypeError, match=r"sampling is 0\.7"):
        decoder.generate(PROMPT, 20, 0.7)
    with pytest.raises(TypeError, match="heat"):
        decoder.generate(PROMPT, 20, heat=3)


def test_where_no_draft_is_named_n_grams_draft_and_the_text_is_the_same(decoder):
    drafted = SpeculativeDecoder(decoder.target, tokenizer=decoder.tokenizer, gamma=4)
    alone = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    prompt = "Tim ran. Tim ran. Tim ran. Tim"
    one, other = (each.generate(prompt, 40, temperature=0) for each in (drafted, alone))
    assert one.statistics.n_drafted > 0 == other.statistics.n_drafted
    assert one.tokens == other.tokens


# Conversations


TALK = [{"role": "user", "content": "Where did the robin go?"}]


def test_an_answer_is_the_text_alone_and_what_chat_streams(talking):
    answer = talking.answer(TALK, 12, seed=3)
    events = list(talking.chat(TALK, 12, Sampling(seed=3)))
    assert answer.text == answer.continuation == "".join(texts_of(events)) != ""
    assert "robin" not in answer.text
    assert events[0].tokens == talking.encode_chat(TALK) and answer.statistics.n_prompt == len(events[0].tokens)
    assert answer.tokens == talking.generate(talking.encode_chat(TALK), 12, seed=3).tokens
    assert talking.answer(TALK, 12, Sampling(0.7), seed=3).tokens == talking.answer(TALK, 12, temperature=0.7, seed=3).tokens


def test_a_model_without_a_chat_template_is_refused_at_the_call(decoder):
    for ask in (decoder.chat, decoder.answer, decoder.encode_chat):
        with pytest.raises(TemplateError, match=r"stories6M\.bin has no chat template; name one .* llama2"):
            ask(TALK)
    named = SpeculativeDecoder(DEFAULT_TARGET, None, template="llama2")
    assert named.encode_chat(TALK) == decoder.encode(f"[INST] {TALK[0]['content']} [/INST]")


# Stop strings


@pytest.mark.parametrize("stop", ["Lily", "ily", ". ", "\n", "she l", [" wi", "Lil"], "named Lily. She", "e"])
def test_a_text_ends_before_a_stop_string_whatever_drafted(decoder, stop):
    """One that tokens and steps divide, too; and the tokens are the same with any draft."""
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    stops = [stop] if isinstance(stop, str) else stop
    for seed in range(3):
        sampling = Sampling(0.8, seed=seed)
        whole = plain.generate(PROMPT, 60, sampling).continuation
        at = min((whole.find(each) for each in stops if each in whole), default=len(whole))
        alone = plain.generate(PROMPT, 60, sampling, stop=stop)
        got = decoder.generate(PROMPT, 60, sampling, stop=stop)
        assert got.continuation == alone.continuation == whole[:at]
        assert got.tokens == alone.tokens
        assert got.statistics.stop_reason == ("stop" if at < len(whole) else "max_tokens")
        assert got.statistics.n_generated == len(got.tokens)


def test_nothing_of_a_stop_string_is_streamed(decoder):
    events = list(decoder.stream(PROMPT, 100, Sampling(0), stop=" toys and"))
    said = "".join(texts_of(events))
    assert said.endswith("with her")
    assert events[-1].stop_reason == "stop"
    assert decoder.generate(said + " toys", 10, temperature=0, stop=" and").continuation == ""


def test_what_only_begins_a_stop_string_is_told_after_all():
    until = Until(["abcd", "bx"])
    assert [until.push(piece) for piece in ("zab", "c", "e", "ab", "", "b", "x", "y")] == ["z", "", "abce", "", "", "ab", "", ""]
    assert until.found is not None
    assert until.end() == ""
    until = Until(["ab"])
    assert (until.push("a"), until.end(), until.found is not None) == ("", "a", False)


def test_a_prompt_may_hold_a_stop_string(decoder):
    assert decoder.generate("Lily and Tim", 5, stop="Lily and Tim").statistics.n_generated == 5


@pytest.mark.parametrize(("stop", "kind"), [("", ValueError), (["a", ""], ValueError), (5, TypeError), ([5], TypeError)])
def test_a_stop_that_is_no_string_is_refused(decoder, stop, kind):
    with pytest.raises(kind, match="stop"):
        decoder.stream(PROMPT, 5, stop=stop)


# What objects say of themselves


def test_a_decoder_shows_what_is_its_users_and_nothing_else(decoder):
    shown = {name for name in dir(decoder) if not name.startswith("_")}
    calls = {"answer", "chat", "encode", "encode_chat", "generate", "read", "read_and_stream", "stream", "warm_up"}
    calls |= {"json_object", "json_schema", "regex"}
    models = {"target", "draft", "stage", "tokenizer", "chat_template", "has_draft", "has_stage"}
    for_many_texts = {"team", "text", "tuning"}  # of whoever lets texts share passes
    assert shown == calls | models | for_many_texts | {
        "gamma",
        "verify",
        "tree",
        "n_ids",
        "n_positions",
        "shared",
        "weights",
    }


def test_objects_say_what_they_are(decoder):
    said = repr(decoder)
    assert "target=<llama of 7 layers x 288, 1024 tokens, fp32>" in said
    assert "gamma=4, verify='coupled'" in said
    assert re.fullmatch(r"<Tokenizer of 1024 tokens, .*tok1024.bin>", repr(decoder.tokenizer))
    assert "'ngram'" in repr(SpeculativeDecoder(decoder.target, "ngram", decoder.tokenizer))
