"""shapes.py against languages by hand: what may follow, on vocabularies of every kind; and what is wrong, in a line."""

import importlib.util
import itertools
import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Step, Text, decode
from specdec.loaders import optional_dependencies
from specdec.loaders.model_lookup import DEFAULT_DRAFT, DEFAULT_TARGET, DEFAULT_TOKENIZER
from specdec.sampling import Sampling
from specdec.text import grammar_worker, structured_output
from specdec.text.hf_tokenizer import JsonTokenizer
from specdec.tokenizer import AnyTokenizer, Pieces, Tokenizer
from specdec.verification import CoupledVerifier, Draft
from tests.tools.random_models import tiny_model
from tests.tools.regular_languages import (
    EMPTY,
    NOTHING,
    Language,
    after,
    allowed,
    any_number,
    behind,
    either,
    is_complete,
    one_of,
    text,
    then,
)

TOKENIZERS = Path(__file__).parents[1] / "fixtures" / "tokenizers"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason='needs the package llguidance: pip install ".[test]"'
)
PROMPT = [1, 260]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "Größe"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def small_tokenizer(seed: int = 0, has_bytes: bool = True, has_end_marks: bool = True) -> Tokenizer:
    """As SentencePiece has one: bytes, characters that say the same, and random strings, some of them twice."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abc -1", k=rng.randint(1, 4))) for _ in range(40)]
    pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), *b"abc -1\xff"[:6].decode()]
    pieces = (
        [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces] + [word.encode() for word in words] + [b""]
    )
    own = range(3 + 256, len(pieces))
    byte_ids = range(3, 259) if has_bytes else [0] * 256
    if not has_bytes:
        pieces[3:259] = [b""] * 256
    end_marks = {1: "bos", 2: "eos"} if has_end_marks else {}
    # Scores are equal: the leftmost pair is merged first.
    vocabulary = Pieces(pieces, [0.0] * len(pieces), own, byte_ids, (), {0, 1, 2}, end_marks, 1)
    return Tokenizer("small", vocabulary)


def says(tokenizer: AnyTokenizer) -> list[bytes]:
    return [tokenizer.says(token) or b"" for token in range(tokenizer.vocab_size)]


def leaves_one_text(language: Language, data: bytes) -> bool:
    """Whether a text of the language cannot but go on with those bytes."""
    for byte in data:
        if is_complete(language) or sum(behind(language, other) != NOTHING for other in range(256)) != 1:
            return False
        language = behind(language, byte)
    return language != NOTHING


def grown(rng: random.Random, depth: int = 3) -> tuple[str, Language]:
    """A random regex, and the language that it stands for."""
    kind = rng.choice(["text", "class", "then", "either", "star", "maybe", "count"] if depth else ["text", "class"])
    if kind == "text":
        words = "".join(rng.choices("abc -1é", k=rng.randint(1, 3)))
        return words, text(words)
    if kind == "class":
        letters = "".join(sorted(set(rng.choices("abc1", k=2))))
        return f"[{letters}]", one_of(letters)
    one, language = grown(rng, depth - 1)
    if kind in ("then", "either"):
        other, second = grown(rng, depth - 1)
        return (
            (f"(?:{one})(?:{other})", then(language, second))
            if kind == "then"
            else (f"(?:{one}|{other})", either(language, second))
        )
    if kind == "star":
        return f"(?:{one})*", any_number(language)
    if kind == "maybe":
        return f"(?:{one})?", either(language, EMPTY)
    n = rng.randint(2, 3)
    repeated = EMPTY
    for _ in range(n):
        repeated = then(language, repeated)
    return f"(?:{one}){{{n}}}", repeated


def check_walk(tokenizer: AnyTokenizer, pattern: str, language: Language, rng: random.Random, n: int) -> None:
    """A random walk of up to n tokens through a regex: at each place what may follow is what does by the bytes, or, where those
    leave one text alone, one token of it; it is the same for one that went there straight; and looking ahead changes nothing."""
    shape, words = structured_output.regex(tokenizer, pattern), says(tokenizer)
    marks = tokenizer.end_marks
    walk, tokens = shape.begin(PROMPT), list[int]()
    for _ in range(n):
        fits, found = np.array(allowed(language, words, marks)), walk.allowed()[: len(words)].copy()
        straight = shape.begin(PROMPT)
        straight.takes(tokens)
        assert (straight.allowed()[: len(words)] == found).all(), (pattern, tokens)
        if not (found == fits).all():
            (only,) = np.flatnonzero(found)
            assert fits[only] and leaves_one_text(language, words[only]), (pattern, tokens, words[only])
            assert walk.forced(9)[0] == only
        forced = walk.forced(9)
        draft = forced or [rng.choice([*np.flatnonzero(fits), 5]) for _ in range(3)]
        unmarked = [int(token) for token in itertools.takewhile(lambda token: token not in marks, draft)]
        assert walk.find_end(unmarked) == completes(language, [words[token] for token in unmarked])
        logits = rng_logits(len(draft) + 1, len(words) + 3, rng)
        before = logits.copy()
        walk.mask(logits, Draft([int(token) for token in draft]))
        assert (np.isfinite(logits[0]) == [*found, False, False, False]).all()
        assert (logits[0][:-3][found] == before[0][:-3][found]).all()
        for i, token in enumerate(forced):
            assert [*np.flatnonzero(np.isfinite(logits[i]))] == [token]
        assert (walk.allowed()[: len(words)] == found).all(), (pattern, tokens)
        token = int(rng.choice(np.flatnonzero(found)))
        if token in marks:
            assert is_complete(language)
            return
        walk.takes([token])
        tokens.append(token)
        language = after(language, words[token])
        assert walk.is_over == (language == EMPTY)
        if walk.is_over:
            return


def completes(language: Language, words: list[bytes]) -> int | None:
    """Return how many of the words complete a text of the language, so that nothing may follow."""
    states = list(itertools.accumulate(words, after, initial=language))
    return states.index(EMPTY) if EMPTY in states else None


def rng_logits(n: int, rows: int, rng: random.Random) -> Any:
    return np.random.default_rng(rng.randrange(2**32)).normal(size=(n, rows)).astype(np.float32)


def check_regexes(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        pattern, language = grown(rng)
        if language != EMPTY:
            check_walk(small_tokenizer(seed % 5), pattern, language, rng, 12)


def test_what_may_follow_is_what_does_by_its_bytes() -> None:
    check_regexes(range(40))


@pytest.mark.campaign
def test_what_may_follow_is_what_does_by_its_bytes_of_many_regexes() -> None:
    check_regexes(range(40, 1500))


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "llama2", "mistral", "metaspace", "qwen2", "stories"])
def test_every_kind_of_tokenizer_writes_a_shape(kind: str) -> None:
    """Whatever a model's favourites are: random tokens of those that may follow make JSON by the schema."""
    tokenizer = Tokenizer(DEFAULT_TOKENIZER) if kind == "stories" else JsonTokenizer(TOKENIZERS / f"{kind}.json")
    shape, rng = structured_output.json_schema(tokenizer, PERSON), random.Random(kind)
    n_forced = 0
    for _ in range(3):
        walk, tokens = shape.begin(tokenizer.encode("Hello")), list[int]()
        while not walk.is_over:
            forced = walk.forced(31)
            n_forced += len(forced)
            found = np.flatnonzero(walk.allowed())
            closing = [token for token in found if (tokenizer.says(int(token)) or b"").startswith(b'"')]
            token = forced[0] if forced else int(rng.choice(closing if len(tokens) > 30 and closing else found))
            walk.takes([token])
            tokens.append(token)
        person = json.loads(b"".join([tokenizer.says(token) or b"" for token in tokens]))
        assert [*person] == ["name", "age", "tags"] and 0 <= person["age"] <= 150
        assert isinstance(person["name"], str) and set(person["tags"]) <= {"red", "green", "Größe"}
    assert n_forced > 10


def test_what_is_forced_is_written_as_the_tokenizer_writes_it() -> None:
    tokenizer = JsonTokenizer(TOKENIZERS / "smollm2.json")
    walk = structured_output.json_schema(tokenizer, PERSON).begin(PROMPT)
    forced = walk.forced(31)
    written = tokenizer.encode('{"name": "')
    assert forced == written[: len(forced)] and len(forced) >= len(written) - 1
    walk.takes(forced[:1])
    assert walk.forced(31) == forced[1:] and walk.forced(1) == forced[1:2] and walk.forced(0) == []


def test_a_tokenizer_without_the_letters_of_a_shape_is_told() -> None:
    tokenizer = small_tokenizer(has_bytes=False)
    assert structured_output.regex(tokenizer, "[abc]+").begin(PROMPT).allowed().any()
    with pytest.raises(ValueError, match=r"small has no token for the byte 122, which the shape wants") as told:
        structured_output.regex(tokenizer, "zebra")
    assert "\n" not in str(told.value)
    walk = structured_output.regex(tokenizer, "[ab]([yz]+|zebra)").begin(PROMPT)
    walk.takes([tokenizer.pieces.index(b"a")])
    with pytest.raises(ValueError, match="the shape cannot go on: nothing fits it"):
        walk.allowed()


def test_a_text_that_would_lose_the_space_that_it_may_begin_with_is_refused() -> None:
    tokenizer = small_tokenizer()
    shape = structured_output.regex(tokenizer, "( a|b)c")
    with pytest.raises(ValueError, match="begin with a space, which a text without a prompt loses"):
        shape.begin([1])
    assert not shape.begin(tokenizer.encode("abc")).is_over
    assert not structured_output.regex(tokenizer, "bc?").begin([1]).is_over


SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "a keyword": ({"not": {"type": "string"}}, "the schema cannot be used: it uses not, which is not supported"),
    "several": ({"if": {}, "then": {}}, "the schema cannot be used: it uses if, then, which are not supported"),
    "a type": ({"type": "strin"}, "the schema cannot be used: Invalid type: strin"),
    "a pattern": ({"type": "string", "pattern": "(a"}, "the schema cannot be used: unclosed group"),
    "a reference to itself": ({"$ref": "#"}, "the schema cannot be used: nothing fits it"),
    "a reference elsewhere": ({"$ref": "https://example.com/a"}, "is not present in a registry"),
    "nothing": ({"enum": []}, "the schema cannot be used: Unsatisfiable schema"),
    "contradictions": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum \\(5\\) is greater than maximum \\(3\\)"),
    "own options": ({"x-guidance": {"lenient": True}}, "uses x-guidance, which is not supported"),
    "no number": ({"const": float("nan")}, "the schema is no JSON: Out of range float"),
    "no JSON": ({"const": {1, 2}}, "the schema is no JSON"),
    "half a character": ({"const": "\ud800"}, "the schema is no JSON"),
    "repetitions": ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "the schema's pattern .* repeats a part 1000000 times"),
    "size": ({"const": "x" * 200_000}, "the schema has 2001.. characters; at most 100000 are read"),
    "fuel": ({"type": "integer", "multipleOf": 999999937}, "fuel exhausted"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_wrong_with_a_schema_is_told_in_a_line(name: str) -> None:
    schema, words = SCHEMAS[name]
    with pytest.raises(ValueError, match=words) as told:
        structured_output.json_schema(small_tokenizer(), schema)
    assert "\n" not in str(told.value) and len(str(told.value)) < 300


def test_a_schema_that_is_nested_without_end_is_told_in_a_line() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="the schema is no JSON: it is nested beyond all bounds"):
        structured_output.json_schema(small_tokenizer(), deep)
    deep = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="the schema cannot be used: recursion limit exceeded"):
        structured_output.json_schema(small_tokenizer(), deep)
    with pytest.raises(TypeError, match=r"the schema is \[\]; expected an object"):
        structured_output.json_schema(small_tokenizer(), [])  # type: ignore[arg-type]


def test_a_schema_that_takes_too_long_to_build_is_told_and_the_next_one_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "BUILDING_SECONDS", 0.5)
    bomb = {"type": "object", "patternProperties": {f"^p{i}$": {} for i in range(300)}}  # minutes
    with pytest.raises(ValueError, match="the schema cannot be used: it takes too long to build"):
        structured_output.json_schema(small_tokenizer(), bomb)
    assert not structured_output.json_object(small_tokenizer()).begin(PROMPT).is_over


REGEXES = {
    "": "the regex cannot be used: it allows the empty text alone",
    "()": "the regex cannot be used: it allows the empty text alone",
    "(a": "the regex cannot be used: unclosed group",
    "a(?=b)": "look-around, including look-ahead and look-behind, is not supported",
    r"(a)\1": "backreferences are not supported",
    r"[^\s\S]": "the regex cannot be used: nothing fits it",
    "a\\": "ends in a backslash; expected what it escapes",
    "a{99999999}": "the regex repeats a part 99999999 times; at most 100000",
    "((a{99}|b){99}x){99}": "the regex repeats a part 970299 times; at most 100000",
    "(" * 5000 + ")" * 5000: "the regex cannot be used",
    "a" * 10_001: "the regex has 10001 characters; at most 10000 are read",
    "\ud800": "half a character",
}


@pytest.mark.parametrize("pattern", REGEXES, ids=lambda pattern: ascii(pattern[:20]))
def test_what_is_wrong_with_a_regex_is_told_in_a_line(pattern: str) -> None:
    with pytest.raises(ValueError, match="the regex ") as told:
        structured_output.regex(small_tokenizer(), pattern)
    assert REGEXES[pattern] in str(told.value)
    assert "\n" not in str(told.value) and len(str(told.value)) < 300


@pytest.mark.parametrize(
    "pattern", [r"(a+)+b", r"(a|b)*a(a|b){20}", r"[a-z]{5000}", r"(a{300}){300}", r"\p{L}{2}é😀?", r"a/b\\/c", r"[{]9{3}\{3}"]
)
def test_regexes_that_others_stumble_over_are_followed(pattern: str) -> None:
    walk, begin = structured_output.regex(small_tokenizer(), pattern).begin(PROMPT), time.process_time()
    for _ in range(20):
        if walk.is_over:
            break
        found = np.flatnonzero(walk.allowed())
        walk.takes([int(found[-1])])
    assert time.process_time() - begin < 20


MANY_STATES = "(a|b)*a(a|b){20}"  # a state each letter, nearly


def letters(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [3 + ord(rng.choice("ab")) for _ in range(n)]


def test_texts_of_a_shape_do_not_use_up_each_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance's matchers share what their lexer finds out, and so its limit."""
    monkeypatch.setitem(grammar_worker.LIMITS, "max_lexer_states", 600)
    shape, rows = structured_output.regex(small_tokenizer(), MANY_STATES), rng_logits(3, 310, random.Random(1))
    for seed in range(6):
        walk = shape.begin(PROMPT)
        for token in letters(seed, 100):
            before, masked = rows.copy(), rows.copy()
            walk.mask(masked, Draft([token, token]))
            assert np.isfinite(masked).any(axis=1).all() and (before[np.isfinite(masked)] == masked[np.isfinite(masked)]).all()
            walk.takes([token])
            assert walk.n_allowed([token]) == 1 and walk.forced(5) == []


def test_a_proposal_that_cannot_be_followed_harms_no_text() -> None:
    """What is proposed leads where no token fits; the text itself goes elsewhere, or is told of it there."""
    tokenizer = small_tokenizer(has_bytes=False)
    shape = structured_output.regex(tokenizer, "(a|bz)[abc]{9}")
    a, b = map(tokenizer.pieces.index, (b"a", b"b"))
    walk, logits = shape.begin(PROMPT), np.zeros((2, tokenizer.vocab_size), np.float32)
    walk.mask(logits, Draft([b]))
    assert np.isfinite(logits[0, [a, b]]).all() and not np.isfinite(logits[1]).any()
    assert isinstance(walk.trouble, ValueError)
    assert walk.forced(3) == [] and walk.n_allowed([a, a]) == 2
    for text_ in (Text([*PROMPT], 5, 99, None, CoupledVerifier(310, Sampling(0)), FixedLength(1), {}, shape) for _ in range(2)):
        for first, told in ((a, ""), (b, "has no token for the byte 122, which the shape wants")):
            text_.draft, logits = Draft([b]), np.zeros((2, tokenizer.vocab_size), np.float32)
            logits[:, first] = 1
            if told:
                with pytest.raises(ValueError, match=told):
                    text_.judge(logits)
            else:
                assert text_.judge(logits) == ([a], 0)
    walk.takes([a])
    assert walk.allowed()[[a, b]].all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_damaged_weights_are_told_of_whether_the_shape_masks_them_or_not(temperature: float, wrong: float) -> None:
    """At a token that may follow, and at one that may not; a sound row whose tokens are all unlikely is not taken for one."""
    tokenizer = small_tokenizer()
    shape, a = structured_output.regex(tokenizer, "[ab]+"), tokenizer.pieces.index(b"a")
    rows = tokenizer.vocab_size + 2
    for place, is_damaged in ((a, True), (tokenizer.pieces.index(b"c"), True), (a, False)):
        text_ = Text([*PROMPT], 5, 99, None, CoupledVerifier(rows, Sampling(temperature)), FixedLength(1), {1: "bos"}, shape)
        logits = np.full((1, rows), -1e30, np.float32)
        logits[0, place] = wrong if is_damaged else -3e38
        if is_damaged:
            with pytest.raises(ValueError, match="the target's logits are not finite"):
                text_.judge(logits)
        else:
            assert set(tokenizer.says(text_.judge(logits)[0][0]) or b"x") <= set(b"ab")


def test_a_long_text_that_is_forced_is_written_to_its_end() -> None:
    tokenizer = JsonTokenizer(TOKENIZERS / "smollm2.json")
    said = "".join(random.Random(1).choices('abc de, é日"\\', k=250))
    walk, tokens = structured_output.json_schema(tokenizer, {"const": said}).begin([1]), list[int]()
    while forced := walk.forced(31):
        walk.takes(forced)
        tokens += forced
    while not walk.is_over:
        tokens.append(int(np.flatnonzero(walk.allowed())[-1]))
        walk.takes(tokens[-1:])
    assert json.loads(b"".join([tokenizer.says(token) or b"" for token in tokens])) == said


def test_what_is_no_shape_of_this_decoder_is_refused(decoder: SpeculativeDecoder) -> None:
    other = structured_output.json_object(Tokenizer(DEFAULT_TOKENIZER))
    with pytest.raises(ValueError, match="the shape was made for another tokenizer"):
        decoder.stream("Once", 9, shape=other)
    with pytest.raises(TypeError, match="shape is 'a\\+'; expected what json_schema, json_object or regex makes"):
        decoder.generate("Once", 9, shape="a+")  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", [None, NgramDrafter({})], ids=["no draft", "n-grams"])
def test_a_model_without_end_marks_ends_where_its_shape_is_complete(drafter: NgramDrafter | None) -> None:
    tokenizer = small_tokenizer(has_end_marks=False)
    made = {pattern: structured_output.regex(tokenizer, pattern) for pattern in ("abc", "[ab]cb", "[ab]{9}", "c[ab]{3}c")}
    made["true"] = structured_output.json_schema(tokenizer, {"const": True})
    model, prompt = tiny_model(0, vocab=tokenizer.vocab_size), [259, 260] * 8  # a and b
    for pattern, shape in made.items():
        verifier = CoupledVerifier(tokenizer.vocab_size, Sampling(0))
        steps = [*decode(model, drafter, verifier, prompt, 30, FixedLength(6), {}, shape)]
        tokens = [token for step in steps if isinstance(step, Step) for token in step.tokens]
        said = b"".join([tokenizer.says(token) or b"" for token in tokens]).decode()
        assert re.fullmatch(pattern, said) and isinstance(steps[-1], Step) and steps[-1].stop_reason == "eos"


def test_a_shape_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    assert structured_output.json_schema(tokenizer, PERSON) is structured_output.json_schema(tokenizer, dict(PERSON))
    assert structured_output.json_object(tokenizer) is not structured_output.json_object(small_tokenizer())


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_dependencies, "has", lambda package: package != optional_dependencies.GUIDANCE)
    with pytest.raises(ValueError, match="llguidance") as told:
        structured_output.json_object(small_tokenizer())
    assert str(told.value) == "a package is missing: llguidance, to write in a shape; pip install llguidance"


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, n_threads=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_models_text_is_one_for_every_draft(decoder: SpeculativeDecoder, temperature: float) -> None:
    """Two shapes, pairs of drafts and gammas; the text is JSON by the schema, or what the regex matches."""
    others = [decoder, *(SpeculativeDecoder(decoder.target, draft, decoder.tokenizer) for draft in (None, "ngram"))]
    for shape in (decoder.json_schema(PERSON), decoder.regex(r"[A-Z][a-z ]{20,60}\.")):
        drawn = {"sampling": Sampling(temperature, 0, 0.9, 11), "shape": shape}
        texts = set()
        for other, gamma in itertools.product(others, ("auto", 5)):
            other.gamma = gamma  # type: ignore[assignment]
            made = other.generate("Once upon a time", 80, **drawn)  # type: ignore[arg-type]
            texts.add((made.continuation, made.statistics.stop_reason))
        assert len(texts) == 1
        said, reason = texts.pop()
        assert reason in ("bos", "max_tokens") and (said.endswith(".") or '"age": ' in said)


def test_answers_are_json_until_they_are_cut(decoder: SpeculativeDecoder) -> None:
    shape = decoder.json_object()
    for seed in range(4):
        made = decoder.generate("Lily said:", 60, temperature=1.2, seed=seed, shape=shape)
        if made.statistics.stop_reason == "max_tokens":
            continue
        assert isinstance(json.loads(made.continuation), dict)
    events = [*decoder.stream("Lily said:", 60, Sampling(0), shape=shape)]
    assert "".join(event.text for event in events[1:] if hasattr(event, "text")).startswith("{")


# Random schemas


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(
        ["string", "integer", "number", "boolean", "null", "enum", "const", *["array", "object", "anyOf"] * (depth > 0)]
    )
    if kind == "string":
        more = rng.choice(
            [{}, {"minLength": 2, "maxLength": 5}, {"pattern": "^[ab]{1,3}$"}, {"maxLength": 8}, {"format": "date"}]
        )
        return {"type": "string", **more}
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": kind, **rng.choice([{}, {"minimum": low}, {"minimum": low, "maximum": low + rng.randint(0, 500)}])}
    if kind == "enum":
        return {"enum": rng.sample(["red", 1, None, "Größe", True, -2.5, 'a"b', ["x"], {"k": 0}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["one text that is long", 7, {"a": [1, 2]}, "日本"])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "object":
        names = rng.sample(["name", "age", "x y", "größe", "a.b", 'q"', "id"], rng.randint(1, 4))
        return {
            "type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6], "additionalProperties": False,
        }  # fmt: skip
    return {"type": kind}


def is_by(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is by a schema of those."""
    if "anyOf" in schema:
        return any(is_by(each, value) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return json.dumps(value) in map(json.dumps, known)
    match schema["type"]:
        case "string":
            right = {"^[ab]{1,3}$": r"[ab]{1,3}", None: r"(?s:.*)"}[schema.get("pattern")]
            right = r"\d{4}-\d\d-\d\d" if "format" in schema else right
            least, most = schema.get("minLength", 0), schema.get("maxLength", 10**9)
            return isinstance(value, str) and least <= len(value) <= most and bool(re.fullmatch(right, value))
        case "integer" | "number" as kind:
            is_one = isinstance(value, int) or (kind == "number" and isinstance(value, float))
            least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
            return is_one and not isinstance(value, bool) and least <= value <= most
        case "array":
            is_one = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return is_one and all(is_by(schema["items"], each) for each in value)
        case "object":
            is_one = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
            return is_one and all(is_by(schema["properties"][name], each) for name, each in value.items())
        case kind:
            return (value is None) if kind == "null" else isinstance(value, bool)


def check_schemas(decoder: SpeculativeDecoder, seeds: range, most: int) -> tuple[int, int]:
    """Texts of random schemas: JSON by them unless they were cut, one for two drafts; how many were whole, and how many not."""
    alone = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    n_whole = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema, temperature = random_schema(rng), rng.choice([0.0, 1.0, 2.0])
        shape = decoder.json_schema(schema)
        drawn: dict[str, Any] = {"sampling": Sampling(temperature, 0, 0.95, seed), "shape": shape}
        decoder.gamma = rng.choice([1, 3, 8, "auto"])  # type: ignore[assignment]
        made, plain = (each.generate("Once upon a time", most, **drawn) for each in (decoder, alone))
        assert made.continuation == plain.continuation and made.tokens == plain.tokens, seed
        assert made.statistics.stop_reason == plain.statistics.stop_reason, seed
        if made.statistics.stop_reason == "max_tokens":
            walk = shape.begin([1, 260])
            walk.takes(made.tokens)  # the beginning of one
            continue
        n_whole += 1
        assert is_by(schema, json.loads(made.continuation)), (seed, schema, made.continuation)
    return n_whole, len(seeds) - n_whole


def test_texts_are_json_by_random_schemas(decoder: SpeculativeDecoder) -> None:
    n_whole, n_cut = check_schemas(decoder, range(15), 60)
    assert n_whole > 5 * n_cut


@pytest.mark.campaign
def test_texts_are_json_by_many_random_schemas(decoder: SpeculativeDecoder) -> None:
    n_whole, n_cut = check_schemas(decoder, range(15, 400), 120)
    assert n_whole > 5 * n_cut > 0
