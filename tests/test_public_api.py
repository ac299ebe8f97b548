"""The public API: prompts, stop strings, streamed text, results, and the representation of objects."""

import contextlib
import doctest
import io
import itertools
import pickle
import pydoc
import re

import pytest

import specdec
from specdec import Prompt, Proposal, Sampling, SpeculativeDecoder, Step, TemplateError, argument_checks
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.text.detokenizer import EventDetokenizer, StopStringFilter
from specdec.tokenizer import FIRST_BYTE
from tests.tools.decode import add_text
from tests.tools.documentation import documented_examples
from tests.tools.thoughts import talking  # noqa: F401

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def decoder():
    return SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, gamma=4)


@pytest.fixture(scope="module")
def byte_decoder(pair):
    """Return a decoder that generates bytes of broken and unbroken characters."""
    return SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=3, n_threads=1)


def get_texts(events):
    return [event.text for event in events if not isinstance(event, Proposal)]


def test_the_docstring_example_runs():
    names = {name: getattr(specdec, name) for name in specdec.__all__}
    examples = doctest.DocTestFinder(recurse=False).find(SpeculativeDecoder, "example", globs=names)
    results = [doctest.DocTestRunner().run(example) for example in examples]
    assert sum(result.attempted for result in results) >= 3
    assert sum(result.failed for result in results) == 0


def test_the_examples_in_the_documentation_run():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(documented_examples(), {})
    first_line, output = out.getvalue().split("\n", 1)[0], out.getvalue()
    assert first_line.startswith(",") and "Once upon a time" in output


def test_help_shows_the_package_and_its_public_names():
    help_text = pydoc.plain(pydoc.render_doc(specdec))
    assert "llama2.c" not in help_text.split("PACKAGE CONTENTS")[0]
    assert "Everything else in the package may change with any version." in help_text
    assert "class SpeculativeDecoder" in help_text and "`temperature`: 0 is greedy" in help_text


def test_step_texts_join_to_the_output_in_whole_characters(decoder, byte_decoder):
    for one, seed in itertools.product((decoder, byte_decoder), range(15)):
        sampling = Sampling(1.5, seed=seed)
        texts = get_texts(one.stream("", 60, sampling))
        generation = one.generate("", 60, sampling)
        assert "".join(texts) == generation.text
        assert generation.text == one.tokenizer.decode([*one.encode(""), *generation.tokens])


def test_a_character_split_across_steps_belongs_to_the_last_of_them(tokenizer):
    first, second = (FIRST_BYTE + byte for byte in "é".encode())
    steps = [Step([token], [], 0, 0.0, 0.0) for token in (first, second)] + [Step([first], [], 0, 0.0, 0.0, "max_tokens")]
    events, detokenizer = [Prompt(tokenizer.encode("the"), 0.0), *steps], EventDetokenizer(tokenizer)
    assert get_texts([add_text(event, detokenizer) for event in events]) == ["the", "", "é", "\ufffd"]


def test_a_generation_has_tokens_and_continuation(decoder):
    generation = decoder.generate(PROMPT, 30, seed=1)
    text, statistics = generation
    assert text == generation.text == PROMPT + generation.continuation
    assert statistics is generation.statistics
    assert len(generation.tokens) == statistics.n_generated == 30
    assert pickle.loads(pickle.dumps(generation)) == generation


def test_a_prompt_may_be_token_ids(decoder):
    tokens = decoder.encode(PROMPT)
    expected = decoder.generate(PROMPT, 20, seed=2)
    for prompt in (tokens, tuple(tokens), argument_checks.check_ints("prompt", tokens)):
        drafted = decoder.generate(prompt, 20, seed=2)
        assert (drafted.text, drafted.tokens) == (expected.text, expected.tokens)
    assert decoder.generate(tokens + expected.tokens[:5], 15, seed=2).text == expected.text


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], ValueError), ([1024], ValueError), ([-1], ValueError), ([1.0], TypeError), (["a"], TypeError), ({1: 2}, TypeError)],
)
def test_bad_token_ids_are_refused(decoder, prompt, error):
    with pytest.raises(error, match="prompt"):
        decoder.stream(prompt)


def test_sampling_and_keywords_are_equivalent(decoder):
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


def test_lookup_is_the_default_draft_and_change_no_output(decoder):
    drafted = SpeculativeDecoder(decoder.target, tokenizer=decoder.tokenizer, gamma=4)
    alone = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    prompt = "Tim ran. Tim ran. Tim ran. Tim"
    one, other = (each.generate(prompt, 40, temperature=0) for each in (drafted, alone))
    assert one.statistics.n_drafted > 0 == other.statistics.n_drafted
    assert one.tokens == other.tokens


# Conversations


CONVERSATION = [{"role": "user", "content": "Where did the robin go?"}]


def test_answer_returns_the_text_that_chat_streams(talking):
    answer = talking.answer(CONVERSATION, 12, seed=3)
    events = list(talking.chat(CONVERSATION, 12, Sampling(seed=3)))
    assert answer.text == answer.continuation == "".join(get_texts(events)) != ""
    assert "robin" not in answer.text
    assert events[0].tokens == talking.encode_chat(CONVERSATION) and answer.statistics.n_prompt == len(events[0].tokens)
    assert answer.tokens == talking.generate(talking.encode_chat(CONVERSATION), 12, seed=3).tokens
    assert (
        talking.answer(CONVERSATION, 12, Sampling(0.7), seed=3).tokens
        == talking.answer(CONVERSATION, 12, temperature=0.7, seed=3).tokens
    )


def test_a_missing_chat_template_is_an_error_at_the_call(decoder):
    for call in (decoder.chat, decoder.answer, decoder.encode_chat):
        with pytest.raises(TemplateError, match=r"stories6M\.bin has no chat template; use a model .* llama2"):
            call(CONVERSATION)
    named = SpeculativeDecoder(DEFAULT_TARGET, None, template="llama2")
    assert named.encode_chat(CONVERSATION) == decoder.encode(f"[INST] {CONVERSATION[0]['content']} [/INST]")


# Stop strings


@pytest.mark.parametrize("stop", ["Lily", "ily", ". ", "\n", "she l", [" wi", "Lil"], "named Lily. She", "e"])
def test_output_ends_before_a_stop_string_with_any_draft(decoder, stop):
    """Also if the string is split across tokens and steps; the tokens are the same with any draft."""
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    stop_strings = [stop] if isinstance(stop, str) else stop
    for seed in range(3):
        sampling = Sampling(0.8, seed=seed)
        full = plain.generate(PROMPT, 60, sampling).continuation
        end = min((full.find(each) for each in stop_strings if each in full), default=len(full))
        alone = plain.generate(PROMPT, 60, sampling, stop=stop)
        drafted = decoder.generate(PROMPT, 60, sampling, stop=stop)
        assert drafted.continuation == alone.continuation == full[:end]
        assert drafted.tokens == alone.tokens
        assert drafted.statistics.stop_reason == ("stop" if end < len(full) else "max_tokens")
        assert drafted.statistics.n_generated == len(drafted.tokens)


def test_no_part_of_a_stop_string_is_streamed(decoder):
    events = list(decoder.stream(PROMPT, 100, Sampling(0), stop=" toys and"))
    text = "".join(get_texts(events))
    assert text.endswith("with her")
    assert events[-1].stop_reason == "stop"
    assert decoder.generate(text + " toys", 10, temperature=0, stop=" and").continuation == ""


def test_a_partial_stop_string_is_emitted_once_it_cannot_match():
    stop_filter = StopStringFilter(["abcd", "bx"])
    assert [stop_filter.push(piece) for piece in ("zab", "c", "e", "ab", "", "b", "x", "y")] == [
        "z",
        "",
        "abce",
        "",
        "",
        "ab",
        "",
        "",
    ]
    assert stop_filter.found is not None
    assert stop_filter.flush() == ""
    stop_filter = StopStringFilter(["ab"])
    assert (stop_filter.push("a"), stop_filter.flush(), stop_filter.found is not None) == ("", "a", False)


def test_a_prompt_may_contain_a_stop_string(decoder):
    assert decoder.generate("Lily and Tim", 5, stop="Lily and Tim").statistics.n_generated == 5


@pytest.mark.parametrize(("stop", "error"), [("", ValueError), (["a", ""], ValueError), (5, TypeError), ([5], TypeError)])
def test_a_bad_stop_string_is_refused(decoder, stop, error):
    with pytest.raises(error, match="stop"):
        decoder.stream(PROMPT, 5, stop=stop)


# Representation of objects


def test_a_decoder_has_no_other_public_names(decoder):
    names = {name for name in dir(decoder) if not name.startswith("_")}
    calls = {"answer", "chat", "encode", "encode_chat", "generate", "read", "read_and_stream", "score", "stream", "warm_up"}
    calls |= {"find_reasoning_marks", "json_object", "json_schema", "regex"}
    models = {"target", "draft", "stage", "tokenizer", "chat_template", "has_draft", "has_stage"}
    for_scheduler = {"bundle", "make_scheduler", "autotuner", "prompt_cache"}  # for the server
    properties = {"gamma", "verify", "tree", "n_ids", "n_positions", "shared", "weights"}
    assert names == calls | models | for_scheduler | properties


def test_objects_have_a_meaningful_repr(decoder):
    text = repr(decoder)
    assert "target=<llama of 7 layers x 288, 1024 tokens, fp32>" in text
    assert "gamma=4, verify='coupled'" in text
    assert re.fullmatch(r"<Tokenizer of 1024 tokens, .*tok1024.bin>", repr(decoder.tokenizer))
    assert "'lookup'" in repr(SpeculativeDecoder(decoder.target, "lookup", decoder.tokenizer))
