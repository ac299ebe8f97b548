"""Tests of structured_output.py against hand-written languages, with every kind of vocabulary, and of its errors."""

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
from specdec.draft.draft_length import FixedLength
from specdec.draft.lookup import LookupDrafter
from specdec.events import Step
from specdec.loaders import optional_dependencies
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET, DEFAULT_TOKENIZER
from specdec.sampling import Sampling
from specdec.speculative import DecodingState
from specdec.text import grammar_worker, structured_output
from specdec.text.hf_tokenizer import HFTokenizer
from specdec.tokenizer import AnyTokenizer, SentencePieceVocab, Tokenizer
from specdec.verification import CoupledVerifier, Draft
from tests.tools.decode import decode, get_tokens
from tests.tools.random_models import tiny_model
from tests.tools.regular_languages import (
    EMPTY_LANGUAGE,
    EMPTY_STRING,
    Language,
    byte_class,
    concatenate,
    derive,
    derive_all,
    get_allowed,
    is_nullable,
    literal,
    repeat,
    union,
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


def small_tokenizer(seed: int = 0, has_bytes: bool = True, has_eos_tokens: bool = True) -> Tokenizer:
    """Return a SentencePiece-like tokenizer: bytes, characters of the same bytes, and random strings, some twice."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abc -1", k=rng.randint(1, 4))) for _ in range(40)]
    pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), *b"abc -1\xff"[:6].decode()]
    pieces = (
        [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces] + [word.encode() for word in words] + [b""]
    )
    mergeable_ids = range(3 + 256, len(pieces))
    byte_ids = range(3, 259) if has_bytes else [0] * 256
    if not has_bytes:
        pieces[3:259] = [b""] * 256
    eos_tokens = {1: "bos", 2: "eos"} if has_eos_tokens else {}
    # Scores are equal: the leftmost pair is merged first.
    vocabulary = SentencePieceVocab(pieces, [0.0] * len(pieces), mergeable_ids, byte_ids, (), {0, 1, 2}, eos_tokens, 1)
    return Tokenizer("small", vocabulary)


def get_token_bytes(tokenizer: AnyTokenizer) -> list[bytes]:
    return [tokenizer.token_to_bytes(token) or b"" for token in range(tokenizer.vocab_size)]


def has_one_continuation(language: Language, data: bytes) -> bool:
    """Return whether every text of the language must continue with those bytes."""
    for byte in data:
        if is_nullable(language) or sum(derive(language, other) != EMPTY_LANGUAGE for other in range(256)) != 1:
            return False
        language = derive(language, byte)
    return language != EMPTY_LANGUAGE


def make_random_regex(rng: random.Random, depth: int = 3) -> tuple[str, Language]:
    """Return a random regex and its language."""
    kind = rng.choice(["text", "class", "then", "either", "star", "maybe", "count"] if depth else ["text", "class"])
    if kind == "text":
        words = "".join(rng.choices("abc -1é", k=rng.randint(1, 3)))
        return words, literal(words)
    if kind == "class":
        random_letters = "".join(sorted(set(rng.choices("abc1", k=2))))
        return f"[{random_letters}]", byte_class(random_letters)
    one, language = make_random_regex(rng, depth - 1)
    if kind in ("then", "either"):
        other, second = make_random_regex(rng, depth - 1)
        return (
            (f"(?:{one})(?:{other})", concatenate(language, second))
            if kind == "then"
            else (f"(?:{one}|{other})", union(language, second))
        )
    if kind == "star":
        return f"(?:{one})*", repeat(language)
    if kind == "maybe":
        return f"(?:{one})?", union(language, EMPTY_STRING)
    n = rng.randint(2, 3)
    repeated = EMPTY_STRING
    for _ in range(n):
        repeated = concatenate(language, repeated)
    return f"(?:{one}){{{n}}}", repeated


def check_random_path(tokenizer: AnyTokenizer, pattern: str, language: Language, rng: random.Random, n: int) -> None:
    """Check a random path of up to n tokens through a regex.

    At each position the allowed tokens are those of the language by bytes or, if one continuation is left, one token of it. They
    equal those of a state that got there directly, and looking ahead changes nothing.
    """
    constraint, words = structured_output.regex(tokenizer, pattern), get_token_bytes(tokenizer)
    eos_tokens = tokenizer.eos_tokens
    state, tokens = constraint.begin(PROMPT), list[int]()
    for _ in range(n):
        expected, allowed = np.array(get_allowed(language, words, eos_tokens)), state.get_allowed()[: len(words)].copy()
        direct = constraint.begin(PROMPT)
        direct.commit(tokens)
        assert (direct.get_allowed()[: len(words)] == allowed).all(), (pattern, tokens)
        if not (allowed == expected).all():
            (only,) = np.flatnonzero(allowed)
            assert expected[only] and has_one_continuation(language, words[only]), (pattern, tokens, words[only])
            assert state.get_forced_tokens(9)[0] == only
        forced = state.get_forced_tokens(9)
        draft = forced or [rng.choice([*np.flatnonzero(expected), 5]) for _ in range(3)]
        without_eos = [int(token) for token in itertools.takewhile(lambda token: token not in eos_tokens, draft)]
        assert state.find_end(without_eos) == count_to_completion(language, [words[token] for token in without_eos])
        logits = random_logits(len(draft) + 1, len(words) + 3, rng)
        before = logits.copy()
        state.mask_logits(logits, Draft([int(token) for token in draft]))
        assert (np.isfinite(logits[0]) == [*allowed, False, False, False]).all()
        assert (logits[0][:-3][allowed] == before[0][:-3][allowed]).all()
        for i, token in enumerate(forced):
            assert [*np.flatnonzero(np.isfinite(logits[i]))] == [token]
        assert (state.get_allowed()[: len(words)] == allowed).all(), (pattern, tokens)
        token = int(rng.choice(np.flatnonzero(allowed)))
        if token in eos_tokens:
            assert is_nullable(language)
            return
        state.commit([token])
        tokens.append(token)
        language = derive_all(language, words[token])
        assert state.is_complete == (language == EMPTY_STRING)
        if state.is_complete:
            return


def count_to_completion(language: Language, words: list[bytes]) -> int | None:
    """Return after how many of the words a text of the language is complete, or None."""
    states = list(itertools.accumulate(words, derive_all, initial=language))
    return states.index(EMPTY_STRING) if EMPTY_STRING in states else None


def random_logits(n: int, rows: int, rng: random.Random) -> Any:
    return np.random.default_rng(rng.randrange(2**32)).normal(size=(n, rows)).astype(np.float32)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1500), marks=pytest.mark.campaign)], ids=str)
def test_allowed_tokens_match_the_language_by_bytes(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        pattern, language = make_random_regex(rng)
        if language != EMPTY_STRING:
            check_random_path(small_tokenizer(seed % 5), pattern, language, rng, 12)


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "llama2", "mistral", "metaspace", "qwen2", "stories"])
def test_every_kind_of_tokenizer_satisfies_a_schema(kind: str) -> None:
    """Random allowed tokens form JSON by the schema."""
    tokenizer = Tokenizer(DEFAULT_TOKENIZER) if kind == "stories" else HFTokenizer(TOKENIZERS / f"{kind}.json")
    constraint, rng = structured_output.json_schema(tokenizer, PERSON), random.Random(kind)
    n_forced = 0
    for _ in range(3):
        state, tokens = constraint.begin(tokenizer.encode("Hello")), list[int]()
        while not state.is_complete:
            forced = state.get_forced_tokens(31)
            n_forced += len(forced)
            allowed = np.flatnonzero(state.get_allowed())
            closing = [token for token in allowed if (tokenizer.token_to_bytes(int(token)) or b"").startswith(b'"')]
            token = forced[0] if forced else int(rng.choice(closing if len(tokens) > 30 and closing else allowed))
            state.commit([token])
            tokens.append(token)
        person = json.loads(b"".join([tokenizer.token_to_bytes(token) or b"" for token in tokens]))
        assert [*person] == ["name", "age", "tags"] and 0 <= person["age"] <= 150
        assert isinstance(person["name"], str) and set(person["tags"]) <= {"red", "green", "Größe"}
    assert n_forced > 10


def test_forced_tokens_equal_the_tokenizers_encoding() -> None:
    tokenizer = HFTokenizer(TOKENIZERS / "smollm2.json")
    state = structured_output.json_schema(tokenizer, PERSON).begin(PROMPT)
    forced = state.get_forced_tokens(31)
    written = tokenizer.encode('{"name": "')
    assert forced == written[: len(forced)] and len(forced) >= len(written) - 1
    state.commit(forced[:1])
    assert (
        state.get_forced_tokens(31) == forced[1:]
        and state.get_forced_tokens(1) == forced[1:2]
        and state.get_forced_tokens(0) == []
    )


def test_a_tokenizer_without_required_bytes_is_rejected() -> None:
    tokenizer = small_tokenizer(has_bytes=False)
    assert structured_output.regex(tokenizer, "[abc]+").begin(PROMPT).get_allowed().any()
    with pytest.raises(ValueError, match=r"small has no token for the byte 122, which the constraint requires") as caught:
        structured_output.regex(tokenizer, "zebra")
    assert "\n" not in str(caught.value)
    state = structured_output.regex(tokenizer, "[ab]([yz]+|zebra)").begin(PROMPT)
    state.commit([tokenizer.pieces.index(b"a")])
    with pytest.raises(ValueError, match="the constraint cannot continue: no text matches it"):
        state.get_allowed()


def test_a_constraint_with_a_lost_leading_space_is_rejected() -> None:
    tokenizer = small_tokenizer()
    constraint = structured_output.regex(tokenizer, "( a|b)c")
    with pytest.raises(ValueError, match="start with a space, which is lost in a completion without a prompt"):
        constraint.begin([1])
    assert not constraint.begin(tokenizer.encode("abc")).is_complete
    assert not structured_output.regex(tokenizer, "bc?").begin([1]).is_complete


SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "unsupported keyword": ({"not": {"type": "string"}}, "the schema cannot be used: it uses not, which is not supported"),
    "unsupported keywords": ({"if": {}, "then": {}}, "the schema cannot be used: it uses if, then, which are not supported"),
    "invalid type": ({"type": "strin"}, "the schema cannot be used: Invalid type: strin"),
    "invalid pattern": ({"type": "string", "pattern": "(a"}, "the schema cannot be used: unclosed group"),
    "self reference": ({"$ref": "#"}, "the schema cannot be used: no text matches it"),
    "external reference": ({"$ref": "https://example.com/a"}, "is not present in a registry"),
    "empty enum": ({"enum": []}, "the schema cannot be used: Unsatisfiable schema"),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum \\(5\\) is greater than maximum \\(3\\)"),
    "llguidance options": ({"x-guidance": {"lenient": True}}, "uses x-guidance, which is not supported"),
    "NaN": ({"const": float("nan")}, "the schema is not valid JSON: Out of range float"),
    "not JSON": ({"const": {1, 2}}, "the schema is not valid JSON"),
    "lone surrogate": ({"const": "\ud800"}, "the schema is not valid JSON"),
    "repetitions": ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "the schema's pattern .* repeats a part 1000000 times"),
    "size": ({"const": "x" * 200_000}, "the schema has 2001.. characters; at most 100000 are supported"),
    "fuel": ({"type": "integer", "multipleOf": 999999937}, "fuel exhausted"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_invalid_schema_is_reported_in_one_line(name: str) -> None:
    schema, words = SCHEMAS[name]
    with pytest.raises(ValueError, match=words) as caught:
        structured_output.json_schema(small_tokenizer(), schema)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_deeply_nested_schema_is_reported_in_one_line() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="the schema is not valid JSON: it is nested too deeply"):
        structured_output.json_schema(small_tokenizer(), deep)
    deep = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="the schema cannot be used: recursion limit exceeded"):
        structured_output.json_schema(small_tokenizer(), deep)
    with pytest.raises(TypeError, match=r"the schema is \[\]; expected an object"):
        structured_output.json_schema(small_tokenizer(), [])  # type: ignore[arg-type]


def test_a_build_timeout_is_reported_and_the_next_schema_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "BUILD_TIMEOUT_S", 0.5)
    bomb = {"type": "object", "patternProperties": {f"^p{i}$": {} for i in range(1000)}}  # minutes
    with pytest.raises(ValueError, match="the schema cannot be used: it takes too long to build"):
        structured_output.json_schema(small_tokenizer(), bomb)
    assert not structured_output.json_object(small_tokenizer()).begin(PROMPT).is_complete


REGEXES = {
    "": "the regex cannot be used: it allows only the empty text",
    "()": "the regex cannot be used: it allows only the empty text",
    "(a": "the regex cannot be used: unclosed group",
    "a(?=b)": "look-around, including look-ahead and look-behind, is not supported",
    r"(a)\1": "backreferences are not supported",
    r"[^\s\S]": "the regex cannot be used: no text matches it",
    "a\\": "ends in a backslash; expected a character after it",
    "a{99999999}": "the regex repeats a part 99999999 times; at most 100000",
    "((a{99}|b){99}x){99}": "the regex repeats a part 970299 times; at most 100000",
    "(" * 5000 + ")" * 5000: "the regex cannot be used",
    "a" * 10_001: "the regex has 10001 characters; at most 10000 are supported",
    "\ud800": "half a character",
}


@pytest.mark.parametrize("pattern", REGEXES, ids=lambda pattern: ascii(pattern[:20]))
def test_an_invalid_regex_is_reported_in_one_line(pattern: str) -> None:
    with pytest.raises(ValueError, match="the regex ") as caught:
        structured_output.regex(small_tokenizer(), pattern)
    assert REGEXES[pattern] in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "pattern", [r"(a+)+b", r"(a|b)*a(a|b){20}", r"[a-z]{5000}", r"(a{300}){300}", r"\p{L}{2}é😀?", r"a/b\\/c", r"[{]9{3}\{3}"]
)
def test_regexes_with_pathological_backtracking_are_fast(pattern: str) -> None:
    state, begin = structured_output.regex(small_tokenizer(), pattern).begin(PROMPT), time.process_time()
    for _ in range(20):
        if state.is_complete:
            break
        found = np.flatnonzero(state.get_allowed())
        state.commit([int(found[-1])])
    assert time.process_time() - begin < 20


MANY_STATES = "(a|b)*a(a|b){20}"  # nearly one lexer state per character


def random_letters(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [3 + ord(rng.choice("ab")) for _ in range(n)]


def test_sequences_do_not_exhaust_the_shared_lexer_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of llguidance share their lexer states, and so the limit."""
    monkeypatch.setitem(grammar_worker.PARSER_LIMITS, "max_lexer_states", 600)
    constraint, rows = structured_output.regex(small_tokenizer(), MANY_STATES), random_logits(3, 310, random.Random(1))
    for seed in range(6):
        state = constraint.begin(PROMPT)
        for token in random_letters(seed, 100):
            before, masked = rows.copy(), rows.copy()
            state.mask_logits(masked, Draft([token, token]))
            assert np.isfinite(masked).any(axis=1).all() and (before[np.isfinite(masked)] == masked[np.isfinite(masked)]).all()
            state.commit([token])
            assert state.count_allowed([token]) == 1 and state.get_forced_tokens(5) == []


def test_a_draft_with_no_continuation_does_not_fail_the_sequence() -> None:
    """The draft leads to where no token fits; the sequence goes elsewhere, or raises an error there."""
    tokenizer = small_tokenizer(has_bytes=False)
    constraint = structured_output.regex(tokenizer, "(a|bz)[abc]{9}")
    a, b = map(tokenizer.pieces.index, (b"a", b"b"))
    state, logits = constraint.begin(PROMPT), np.zeros((2, tokenizer.vocab_size), np.float32)
    state.mask_logits(logits, Draft([b]))
    assert np.isfinite(logits[0, [a, b]]).all() and not np.isfinite(logits[1]).any()
    assert isinstance(state.error, ValueError)
    assert state.get_forced_tokens(3) == [] and state.count_allowed([a, a]) == 2
    for sequence in (
        DecodingState([*PROMPT], 5, 99, None, CoupledVerifier(310, Sampling(0)), FixedLength(1), {}, constraint) for _ in range(2)
    ):
        for first, message in ((a, ""), (b, "has no token for the byte 122, which the constraint requires")):
            sequence.draft, logits = Draft([b]), np.zeros((2, tokenizer.vocab_size), np.float32)
            logits[:, first] = 1
            if message:
                with pytest.raises(ValueError, match=message):
                    sequence.verify(logits)
            else:
                assert sequence.verify(logits) == ([a], 0, None)
    state.commit([a])
    assert state.get_allowed()[[a, b]].all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_damaged_weights_are_reported_masked_or_not(temperature: float, wrong: float) -> None:
    """Covers an allowed and a masked token; a valid row of unlikely tokens is not reported."""
    tokenizer = small_tokenizer()
    constraint, a = structured_output.regex(tokenizer, "[ab]+"), tokenizer.pieces.index(b"a")
    rows = tokenizer.vocab_size + 2
    for token, is_damaged in ((a, True), (tokenizer.pieces.index(b"c"), True), (a, False)):
        sequence = DecodingState(
            [*PROMPT], 5, 99, None, CoupledVerifier(rows, Sampling(temperature)), FixedLength(1), {1: "bos"}, constraint
        )
        logits = np.full((1, rows), -1e30, np.float32)
        logits[0, token] = wrong if is_damaged else -3e38
        if is_damaged:
            with pytest.raises(ValueError, match="the target's logits are not finite"):
                sequence.verify(logits)
        else:
            assert set(tokenizer.token_to_bytes(sequence.verify(logits)[0][0]) or b"x") <= set(b"ab")


def test_a_long_forced_text_is_completed() -> None:
    tokenizer = HFTokenizer(TOKENIZERS / "smollm2.json")
    text = "".join(random.Random(1).choices('abc de, é日"\\', k=250))
    state, tokens = structured_output.json_schema(tokenizer, {"const": text}).begin([1]), list[int]()
    while forced := state.get_forced_tokens(31):
        state.commit(forced)
        tokens += forced
    while not state.is_complete:
        tokens.append(int(np.flatnonzero(state.get_allowed())[-1]))
        state.commit(tokens[-1:])
    assert json.loads(b"".join([tokenizer.token_to_bytes(token) or b"" for token in tokens])) == text


def test_a_constraint_of_another_tokenizer_is_rejected(decoder: SpeculativeDecoder) -> None:
    other = structured_output.json_object(Tokenizer(DEFAULT_TOKENIZER))
    with pytest.raises(ValueError, match="the constraint was made for another tokenizer"):
        decoder.stream("Once", 9, constraint=other)
    with pytest.raises(TypeError, match="constraint is 'a\\+'; expected the result of json_schema, json_object or regex"):
        decoder.generate("Once", 9, constraint="a+")  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", [None, LookupDrafter({})], ids=["no draft", "lookup"])
def test_without_eos_tokens_output_ends_when_the_constraint_is_complete(drafter: LookupDrafter | None) -> None:
    tokenizer = small_tokenizer(has_eos_tokens=False)
    constraints = {pattern: structured_output.regex(tokenizer, pattern) for pattern in ("abc", "[ab]cb", "[ab]{9}", "c[ab]{3}c")}
    constraints["true"] = structured_output.json_schema(tokenizer, {"const": True})
    model, prompt = tiny_model(0, vocab=tokenizer.vocab_size), [259, 260] * 8  # a and b
    for pattern, constraint in constraints.items():
        verifier = CoupledVerifier(tokenizer.vocab_size, Sampling(0))
        steps = [*decode(model.new_cache(), drafter, verifier, prompt, 30, FixedLength(6), {}, constraint)]
        text = b"".join([tokenizer.token_to_bytes(token) or b"" for token in get_tokens(steps)]).decode()
        assert re.fullmatch(pattern, text) and isinstance(steps[-1], Step) and steps[-1].stop_reason == "eos"


def test_a_constraint_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    assert structured_output.json_schema(tokenizer, PERSON) is structured_output.json_schema(tokenizer, dict(PERSON))
    assert structured_output.json_object(tokenizer) is not structured_output.json_object(small_tokenizer())


def test_a_missing_package_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_dependencies, "is_installed", lambda package: package != optional_dependencies.GUIDANCE)
    with pytest.raises(ValueError, match="llguidance") as caught:
        structured_output.json_object(small_tokenizer())
    assert str(caught.value) == "package not found: llguidance, for structured output; install with: pip install llguidance"


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT, n_threads=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_output_is_the_same_with_any_draft(decoder: SpeculativeDecoder, temperature: float) -> None:
    """Covers two constraints with several drafts and gammas; the output satisfies the constraint."""
    others = [decoder, *(SpeculativeDecoder(decoder.target, draft, decoder.tokenizer) for draft in (None, "lookup"))]
    for constraint in (decoder.json_schema(PERSON), decoder.regex(r"[A-Z][a-z ]{20,60}\.")):
        options = {"sampling": Sampling(temperature, 0, 0.9, 11), "constraint": constraint}
        outputs = set()
        for other, gamma in itertools.product(others, ("auto", 5)):
            other.gamma = gamma  # type: ignore[assignment]
            result = other.generate("Once upon a time", 80, **options)  # type: ignore[arg-type]
            outputs.add((result.continuation, result.statistics.stop_reason))
        assert len(outputs) == 1
        text, reason = outputs.pop()
        assert reason in ("bos", "max_tokens") and (text.endswith(".") or '"age": ' in text)


def test_complete_outputs_are_valid_json(decoder: SpeculativeDecoder) -> None:
    constraint = decoder.json_object()
    for seed in range(4):
        result = decoder.generate("Lily said:", 60, temperature=1.2, seed=seed, constraint=constraint)
        if result.statistics.stop_reason == "max_tokens":
            continue
        assert isinstance(json.loads(result.continuation), dict)
    events = [*decoder.stream("Lily said:", 60, Sampling(0), constraint=constraint)]
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


def satisfies(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a value is valid by a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(satisfies(each, value) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return json.dumps(value) in map(json.dumps, choices)
    match schema["type"]:
        case "string":
            pattern = {"^[ab]{1,3}$": r"[ab]{1,3}", None: r"(?s:.*)"}[schema.get("pattern")]
            pattern = r"\d{4}-\d\d-\d\d" if "format" in schema else pattern
            minimum, maximum = schema.get("minLength", 0), schema.get("maxLength", 10**9)
            return isinstance(value, str) and minimum <= len(value) <= maximum and bool(re.fullmatch(pattern, value))
        case "integer" | "number" as kind:
            is_valid = isinstance(value, int) or (kind == "number" and isinstance(value, float))
            minimum, maximum = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
            return is_valid and not isinstance(value, bool) and minimum <= value <= maximum
        case "array":
            is_valid = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return is_valid and all(satisfies(schema["items"], each) for each in value)
        case "object":
            is_valid = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
            return is_valid and all(satisfies(schema["properties"][name], each) for name, each in value.items())
        case kind:
            return (value is None) if kind == "null" else isinstance(value, bool)


@pytest.mark.parametrize(
    ("seeds", "max_tokens"), [(range(15), 60), pytest.param(range(15, 400), 120, marks=pytest.mark.campaign)], ids=str
)
def test_outputs_satisfy_random_schemas(decoder: SpeculativeDecoder, seeds: range, max_tokens: int) -> None:
    """Outputs are valid unless truncated, and the same without a draft."""
    alone = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    n_complete = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema, temperature = random_schema(rng), rng.choice([0.0, 1.0, 2.0])
        constraint = decoder.json_schema(schema)
        options: dict[str, Any] = {"sampling": Sampling(temperature, 0, 0.95, seed), "constraint": constraint}
        decoder.gamma = rng.choice([1, 3, 8, "auto"])  # type: ignore[assignment]
        result, baseline = (each.generate("Once upon a time", max_tokens, **options) for each in (decoder, alone))
        assert result.continuation == baseline.continuation and result.tokens == baseline.tokens, seed
        assert result.statistics.stop_reason == baseline.statistics.stop_reason, seed
        if result.statistics.stop_reason == "max_tokens":
            state = constraint.begin([1, 260])
            state.commit(result.tokens)  # a valid prefix
            continue
        n_complete += 1
        assert satisfies(schema, json.loads(result.continuation)), (seed, schema, result.continuation)
    assert n_complete > 5 * (len(seeds) - n_complete)
    assert n_complete < len(seeds) or len(seeds) == 15  # some of many are truncated
