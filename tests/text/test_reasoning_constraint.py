"""Outputs with a thought under a constraint and a budget equal those of a rule on the whole output, with any draft."""

import itertools

import numpy as np
import pytest

from specdec.draft.draft_length import FixedLength
from specdec.draft.tree import TreeDrafter
from specdec.model.kv_cache import KVCache
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.text.reasoning import ReasoningMarks
from specdec.text.reasoning_constraint import MAX_HEADER_TOKENS, MAX_SPACES, ReasoningConstraint
from specdec.verification import VERIFIERS, CoupledVerifier, Draft
from tests.tools.constraints import FREE, PROMPT, VOCABULARY, make_arbitrary_drafter
from tests.tools.decode import END_MARKS, FakeDrafter, collect, decode, make_model_drafter
from tests.tools.random_models import tiny_model
from tests.tools.regular_languages import EMPTY_STRING, LanguageConstraint, byte_class, derive_all, get_allowed, literal, repeat

START, END = b"xy", b"cz"  # each also the text of several tokens
WORDS = [*VOCABULARY[:99], b"y\n", b"xy", b"cz", b"\n", b"z\n", b"za"]
CLOSING_TOKENS = (5, 101)  # "ccz", of which the first part may also be a part of the thought
LIKELY = [101, 16, 103, 104, 5, 100, 102, 99, WORDS.index(b"x"), WORDS.index(b"y"), WORDS.index(b"ab")]
BIASES = np.array([4.5] + [3.0] * (len(LIKELY) - 1), np.float32)
LANGUAGES = {"none": None, "free": FREE, "short": literal("abxyc"), "any": repeat(byte_class("abcxyz "))}
SAMPLINGS = [Sampling(0.0), Sampling(1.0, seed=2), Sampling(1.5, 20, 1.0, 3)]


class Tokenizer:
    """A tokenizer of WORDS."""

    vocab_size, eos_tokens = len(WORDS), END_MARKS

    def token_to_bytes(self, token):
        return WORDS[token]


TOKENIZER = Tokenizer()


class ThinkingCache(KVCache):
    """A KV cache of a model that likes the tokens of marks."""

    def forward(self, tokens, n_logits=1):
        logits = super().forward(tokens, n_logits)
        logits[:, LIKELY] += BIASES
        return logits

    def forward_tree(self, *arguments):
        logits = super().forward_tree(*arguments)
        logits[:, LIKELY] += BIASES
        return logits


def make_marks(is_open, header_end=b""):
    header_end_tokens = (WORDS.index(header_end),) if header_end else ()
    closing = CLOSING_TOKENS + header_end_tokens
    marks = START.decode(), END.decode(), is_open, False, closing
    return ReasoningMarks(*marks, header_end=header_end.decode(), header_end_tokens=header_end_tokens)


def join(tokens):
    return b"".join([WORDS[token] for token in tokens])


def list_starts(marks):
    return [START, END] if marks.header_end else [START]


def split(tokens, marks):
    """Return the tokens before a thought, of it or of its header so far, or those of the answer, and the newlines before it."""
    first, mark = b"", START  # of the thought, in the last token of the start mark
    if not marks.opens_in_prompt:
        for n in range(len(tokens) + 1):
            text = join(tokens[:n]).lstrip()
            if found := [each for each in list_starts(marks) if text.startswith(each)]:
                (mark,), tokens = found, tokens[n:]
                first = text.removeprefix(mark)
                break
            if not any(each.startswith(text) for each in list_starts(marks)) or (not text and n > MAX_SPACES):
                return "answer", tokens, 0
        else:
            return "start", tokens, 0
    for kind, end in (("thought", END), ("header", marks.header_end.encode())):
        if not end or (kind == "thought" and mark == END):
            continue
        for n in range(len(tokens) + 1):
            _, is_end, rest = (first + join(tokens[:n])).partition(end)
            if is_end:
                first, tokens = rest, tokens[n:]
                break
        else:
            return kind, tokens, 0
    n_newlines, answer = len(first), tokens
    if first.strip(b"\n"):
        return "answer", answer, 0
    while answer and answer[0] == 102 and n_newlines < 2:
        n_newlines, answer = n_newlines + 1, answer[1:]
    return "answer" if answer else "after", answer, n_newlines


def list_allowed(tokens, marks, language, budget, is_required):
    """Return the tokens that may follow, as a boolean array."""
    kind, part, n_newlines = split(tokens, marks)
    everything = np.ones(len(WORDS), bool)
    n_closing = min(len(tokens), len(marks.closing_tokens))  # of a closing text that may have begun
    for n in range(n_closing, 0, -1) if budget is not None else ():
        if tokens[-n:] == [*marks.closing_tokens[:n]] and n < len(marks.closing_tokens):
            kind_before, part_before, _ = split(tokens[:-n], marks)
            if kind_before == "thought" and len(part_before) == budget:
                return np.arange(len(WORDS)) == marks.closing_tokens[n]
    if kind == "thought" and budget is not None and len(part) >= budget:
        return np.arange(len(WORDS)) == marks.closing_tokens[len(part) - budget]
    if language is None:
        return everything
    if kind == "header" and len(part) >= MAX_HEADER_TOKENS:
        return np.arange(len(WORDS)) == marks.header_end_tokens[0]
    if kind in ("thought", "header"):
        last = marks.header_end.encode() or END
        for token in range(len(WORDS)):
            _, is_end, rest = join([*part, token]).partition(last)
            is_last = kind == "header" or not marks.header_end
            everything[token] = not (is_last and is_end and rest.strip(b"\n")) and not (is_required and token in END_MARKS)
        return everything
    allowed = np.array(get_allowed(derive_all(language, join(part)), WORDS, END_MARKS))
    if kind == "start":
        text = join(part).lstrip()
        allowed[102] |= not text and len(part) < 2
        for token, word in enumerate(WORDS):
            longer = (text + word).lstrip()
            is_longer = longer not in (b"", text)
            allowed[token] |= is_longer and any(each.startswith(longer) or longer.startswith(each) for each in list_starts(marks))
    if kind == "after" and n_newlines < 2:
        allowed[102] = True
    return allowed


def generate(target, sampling, max_tokens, marks, language, budget, is_required):
    """Return the masked target's own tokens, one pass per token."""
    cache, sampler, tokens = ThinkingCache(target), Sampler(target.vocab_size, sampling), [*PROMPT]
    probs = sampler.new_probs()
    while (n := len(tokens) - len(PROMPT)) < max_tokens:
        generated = tokens[len(PROMPT) :]
        kind, answer, _ = split(generated, marks)
        if kind == "answer" and language and derive_all(language, join(answer)) == EMPTY_STRING:
            break
        logits = cache.forward(tokens)[0].copy()
        logits[~list_allowed(generated, marks, language, budget, is_required)] = -np.inf
        token = sampler.draw(probs, logits, TARGET_NOISE, len(tokens))
        if token in END_MARKS:
            break
        tokens.append(token)
        assert n < max_tokens
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("header_end", [b"", b"ab"])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 1, 6])
@pytest.mark.parametrize("name", LANGUAGES)
def test_output_equals_the_masked_targets_for_every_draft(name, budget, is_open, header_end):
    language, target, draft_model, kinds = LANGUAGES[name], tiny_model(0, layers=3), tiny_model(1), set()
    marks = make_marks(is_open, header_end)
    inner = LanguageConstraint(language, WORDS, END_MARKS) if language else None
    for sampling, is_required in itertools.product(SAMPLINGS, (False, True)):
        constraint = ReasoningConstraint(marks, TOKENIZER, inner, budget, is_required)
        expected = generate(target, sampling, 24, marks, language, budget, is_required)
        kinds.add(split(expected, marks)[0])
        verifier = CoupledVerifier(105, sampling)
        true = FakeDrafter(lambda tokens, _, known=expected: [*known, 3, 4, 5][len(tokens) - len(PROMPT) :])
        drafters = {
            "none": None, "true": true, "arbitrary": make_arbitrary_drafter(),
            "model": make_model_drafter(draft_model, verifier, sampling),
            "tree": TreeDrafter(ThinkingCache(target), Sampler(105, sampling), verifier.get_draft_stream, END_MARKS),
        }  # fmt: skip
        for (drafter_name, drafter), gamma in itertools.product(drafters.items(), (2, 8)):
            events = decode(ThinkingCache(target), drafter, verifier, PROMPT, 24, FixedLength(gamma), constraint=constraint)
            assert collect(events)[0] == expected, (sampling, is_required, drafter_name, gamma)
    assert "answer" in kinds


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_every_token_is_allowed_with_other_verifiers(verify):
    target, draft_model = tiny_model(0, layers=3), tiny_model(1)
    shapes = itertools.product(LANGUAGES, (True, False), (b"", b"ab"), (None, 3), range(4))
    for name, is_open, header_end, budget, seed in shapes:
        language, sampling = LANGUAGES[name], Sampling(1.0, seed=seed)
        marks = make_marks(is_open, header_end)
        inner = LanguageConstraint(language, WORDS, END_MARKS) if language else None
        constraint, verifier = ReasoningConstraint(marks, TOKENIZER, inner, budget, True), VERIFIERS[verify](105, sampling)
        drafter = make_model_drafter(draft_model, verifier, sampling)
        events = decode(ThinkingCache(target), drafter, verifier, PROMPT, 24, FixedLength(4), constraint=constraint)
        tokens = collect(events)[0]
        for n, token in enumerate(tokens):
            assert list_allowed(tokens[:n], marks, language, budget, True)[token], (name, marks, budget, seed, n)


def test_the_end_of_a_thought_is_forced_at_the_budget():
    marks = ReasoningMarks("xy", "cz", True, False, CLOSING_TOKENS)
    state = ReasoningConstraint(marks, TOKENIZER, None, 2).begin(PROMPT)
    assert state.get_forced_tokens(9) == [] and state.count_allowed([3, 4, 5, 101, 7]) == 5
    assert state.count_allowed([3, 4, 7]) == 2
    state.commit([3, 4])
    assert state.get_forced_tokens(9) == [*CLOSING_TOKENS] and state.get_forced_tokens(1) == [5]
    state.commit([5, 101])
    assert state.get_forced_tokens(9) == [] and state.count_allowed([7, 8]) == 2 and not state.is_complete


def test_without_a_thought_the_constraint_holds_from_the_start():
    marks = ReasoningMarks("xy", "cz", False, False, CLOSING_TOKENS)
    inner = LanguageConstraint(literal("abxyc"), WORDS, END_MARKS)
    state = ReasoningConstraint(marks, TOKENIZER, inner, None, True).begin(PROMPT)
    logits = np.zeros((1, len(WORDS)), np.float32)
    state.mask_logits(logits, Draft([]))
    assert {WORDS[token] for token in np.flatnonzero(logits[0] == 0)} == {b"a", b"ab", b"x", b"xy", b"xyz", b"\n"}
    assert state.find_end([6, 13, 5]) == 3 and state.find_end([100, 3, 101, 102, 6, 13, 5, 9]) == 7


def test_an_answer_may_begin_like_a_start_mark_of_several_tokens():
    x, y, a, b = (WORDS.index(word) for word in (b"x", b"y", b"a", b"b"))
    marks = ReasoningMarks("xy", "cz", False, False, CLOSING_TOKENS)
    inner = LanguageConstraint(literal("xab"), WORDS, END_MARKS)
    state = ReasoningConstraint(marks, TOKENIZER, inner, None, True).begin(PROMPT)
    assert state.count_allowed([x, a, b]) == 3 and state.find_end([x, a, b]) == 3
    assert state.count_allowed([x, y, 3, 101, x, a, b]) == 7 and state.count_allowed([x, b]) == 1
    logits = np.zeros((3, len(WORDS)), np.float32)
    state.mask_logits(logits, Draft([x, a]))
    assert [{WORDS[token] for token in np.flatnonzero(row == 0)} for row in logits] == [
        {b"x", b"xa", b"xy", b"xyz", b"\n"} & {*WORDS},
        {b"y", b"y\n", b"a", b"ab"},
        {b"b"},
    ]
    state.commit([x])
    state.commit([a])
    assert state.count_allowed([b]) == 1 and state.count_allowed([y]) == 0


@pytest.mark.parametrize("language", [None, repeat(byte_class("abcxyz \n"))])
def test_white_space_and_merged_tokens_do_not_escape_the_budget(language):
    x, y, xy, y_newline = (WORDS.index(word) for word in (b"x", b"y", b"xy", b"y\n"))
    inner = LanguageConstraint(language, WORDS, END_MARKS) if language else None
    marks = ReasoningMarks("xy", "cz", False, False, CLOSING_TOKENS)
    for start in ([102, xy], [xy], [x, y], [102, x, y], [x, y_newline], [102, 102, x, y_newline]):
        for size in (1, 9):
            state = ReasoningConstraint(marks, TOKENIZER, inner, 2).begin(PROMPT)
            tokens = [*start, 3, 4]
            assert state.count_allowed(tokens) == len(tokens)
            for n in range(0, len(tokens), size):
                state.commit(tokens[n : n + size])
            assert state.get_forced_tokens(9) == [*CLOSING_TOKENS], start


def test_only_a_thought_may_follow_newlines_that_an_answer_cannot_begin_with():
    marks, inner = make_marks(False), LanguageConstraint(literal("abc"), WORDS, END_MARKS)
    state = ReasoningConstraint(marks, TOKENIZER, inner, None, True).begin(PROMPT)
    for n in range(3):
        logits = np.zeros((1, len(WORDS)), np.float32)
        state.mask_logits(logits, Draft([]))
        allowed = {WORDS[token] for token in np.flatnonzero(logits[0] == 0)}
        assert allowed == {b"x", b"xy", b"xyz"} | ({b"\n"} if n < 2 else set()) | ({b"a", b"ab", b"abc"} if not n else set())
        assert state.count_allowed([102]) == (n < 2) and state.count_allowed([WORDS.index(b"a")]) == (not n)
        if n < 2:
            state.commit([102])
    assert state.count_allowed([WORDS.index(b"xy"), 101, *(WORDS.index(word) for word in (b"ab", b"c"))]) == 4


def test_a_header_after_a_thought_ends():
    marks, inner = make_marks(True, b"ab"), LanguageConstraint(literal("xx"), WORDS, END_MARKS)
    state = ReasoningConstraint(marks, TOKENIZER, inner, None, True).begin(PROMPT)
    state.commit([101, *[3] * MAX_HEADER_TOKENS])
    assert state.get_forced_tokens(9) == [WORDS.index(b"ab")]
