"""The marks around thoughts by chat template, and the splitter against a rule on the whole output, for any chunk size."""

import random
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
from specdec.events import Prompt, Step
from specdec.text.chat_template import ChatTemplate
from specdec.text.detokenizer import EventDetokenizer
from specdec.text.reasoning import (
    SPECIAL_TOKEN_MARK,
    ReasoningMarks,
    ReasoningSplitter,
    find_reasoning_marks,
    find_template_marks,
)
from specdec.tokenizer import SentencePieceVocab, Tokenizer
from tests.tools.thoughts import SOURCES, THINK

FIXTURES = Path(__file__).parents[1] / "fixtures" / "chat"


FIXTURE_MARKS = {"qwen35": THINK, "lfm2": THINK} | dict.fromkeys(("gemma3", "llama2", "llama3", "phi4", "qwen2", "smollm2"))


@pytest.mark.parametrize("name", [*SOURCES, *FIXTURE_MARKS])
def test_marks_are_derived_from_the_template(name):
    source, expected = SOURCES.get(name) or ((FIXTURES / f"{name}.jinja").read_text(), FIXTURE_MARKS[name])
    assert find_template_marks(ChatTemplate(source, name, {})) == expected


def make_tokenizer(specials=()):
    """Return a tokenizer of bytes and special tokens."""
    pieces = [b"<unk>", b"<s>", b"</s>", *(bytes([byte]) for byte in range(256)), *(name.encode() for name in specials)]
    special_ids = {0, 1, 2, *range(259, len(pieces))}
    vocabulary = SentencePieceVocab(pieces, [0.0] * len(pieces), [], range(3, 259), (), special_ids, {2: "eos"}, 1)
    return Tokenizer("thinker", vocabulary)


@pytest.mark.parametrize("specials", [(), ("<think>", "</think>")])
@pytest.mark.parametrize(
    ("name", "options", "opens", "closes"),
    [
        ("Qwen3", {}, False, False), ("Qwen3", {"enable_thinking": True}, False, False),
        ("Qwen3", {"enable_thinking": False}, False, True), ("R1", {}, True, False),
        ("Laguna", {}, False, True), ("Laguna", {"enable_thinking": True}, True, False),
        ("SmolLM3", {"enable_thinking": False}, False, True), ("qwen35", {}, True, False),
        ("qwen35", {"enable_thinking": False}, False, True),
    ],
)  # fmt: skip
def test_the_end_of_the_prompt_says_who_opens_the_thought(name, options, opens, closes, specials):
    source = SOURCES[name][0] if name in SOURCES else (FIXTURES / f"{name}.jinja").read_text()
    template, tokenizer = ChatTemplate(source, name, {}), make_tokenizer(specials)
    prompt = template.encode(tokenizer, [{"role": "user", "content": "</think>Why? <think>"}], None, None, options)
    marks = find_reasoning_marks(template, tokenizer, prompt)
    assert (marks.opens_in_prompt, marks.closes_in_prompt) == (opens, closes)
    assert (marks.start, marks.end) == tuple(SPECIAL_TOKEN_MARK * bool(specials) + mark for mark in THINK[:2])
    if specials:
        assert marks.closing_tokens == (260,)
        assert marks.visible_tokens == {259: marks.start, 260: marks.end}
    else:
        assert bytes(token - 3 for token in marks.closing_tokens) == b"</think>" and not marks.visible_tokens


def split(text, is_open=False, hold_mark=""):
    """Return the thought and the answer of a whole output, and what is held back."""
    if not is_open:
        if not text.lstrip().startswith(("<think>", "</think>")):
            return "", text, ""
        text = text.lstrip().removeprefix("<think>")
    thought, is_end, answer = text.partition("</think>")
    if is_end or not hold_mark or hold_mark not in thought:
        return thought.strip("\n"), answer.lstrip("\n"), ""
    before, _, rest = thought.partition(hold_mark)
    return before.lstrip("\n"), "", hold_mark + rest


def run(text, size, is_open=False, hold_mark=""):
    splitter = ReasoningSplitter("<think>", ["</think>"], is_open, hold_mark)
    parts = [part for i in range(0, len(text), size) for part in splitter.push(text[i : i + size])] + splitter.end()
    return tuple("".join(part for kind, part in parts if kind == each) for each in ("reasoning", "text", "unclosed"))


CASES = [
    ("<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", "")), (" \n<think>a</think>b", ("a", "b", "")),
    ("Yes.\n", ("", "Yes.\n", "")), ("\n\n Yes", ("", "\n\n Yes", "")), ("<thin", ("", "<thin", "")),
    ("<think>\n\n</think>\n\nYes", ("", "Yes", "")), ("<think>a\n\nb\n</think>", ("a\n\nb", "", "")),
    ("<think>cut</thin", ("cut</thin", "", "")), ("<think>", ("", "", "")), ("", ("", "", "")),
    ("<think>a<think></think>b<think>c</think>", ("a<think>", "b<think>c</think>", "")), ("a<think>b", ("", "a<think>b", "")),
    ("<think>a < b</ think></think> c", ("a < b</ think>", " c", "")),
    ("<think>a\n<call>b</think>\nc", ("a\n<call>b", "c", "")), ("<think>a\n<call>b</thi", ("a\n", "", "<call>b</thi")),
    ("</think>\n\nYes</think>", ("", "Yes</think>", "")),
    ("<think>a<cal", ("a<cal", "", "")), ("<think><call>", ("", "", "<call>")),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 99])
def test_an_end_mark_without_a_thought_is_dropped(size):
    """A model writes it although thinking is disabled."""
    for text, expected in (
        ("</think>\n\nYes", "Yes"),
        ("Hm.\n</think>\nYes</thin", "Hm.\n\nYes</thin"),
        ("a</think></think>", "a"),
    ):
        splitter = ReasoningMarks("<think>", "</think>", closes_in_prompt=True).make_splitter()
        parts = [part for at in range(0, len(text), size) for part in splitter.push(text[at : at + size])] + splitter.end()
        assert {kind for kind, _ in parts} == {"text"} and "".join(part for _, part in parts) == expected


@pytest.mark.parametrize("case", range(len(CASES)))
def test_thoughts_are_split_from_answers_for_any_chunk_size(case):
    text, expected = CASES[case]
    for size in range(1, len(text) + 2):
        assert run(text, size, False, "<call>") == expected, size


@pytest.mark.parametrize(("pieces", "is_open", "expected"), [
    (["<think>", "a", " b", "</think>", "c"], False, 2), (["<", "think", ">", "a", " b", "</", "think", ">", "c"], False, 2),
    (["<", "think", ">\n", "a", "\n", "</", "think", ">\n\n", "c"], False, 2), (["\n", "<think>", "</", "think>"], False, 0),
    (["a", " b", "</", "think", ">"], True, 2), (["</think>", "c"], True, 0), (["a", "</", "thin"], True, 3),
    (["a", "b"], False, 0),
    (["a", "", "\u00e9", "</", "think>", "", "c"], True, 3), (["<call>", "a", "</", "think>", "b"], True, 2),
    (["a</", "think>b", "c"], True, 0), (["</think>", "a"], False, 0),
])  # fmt: skip
def test_tokens_of_a_thought_are_counted_without_those_of_its_marks(pieces, is_open, expected):
    splitter = ReasoningSplitter("<think>", ["</think>"], is_open, "<call>")
    for piece in pieces:
        splitter.push(piece)
    splitter.push("", is_token=False)
    assert splitter.n_tokens == expected


HARMONY_CASES = [
    ("*channel*analysis*message*Hm.*end**start*assistant*channel*final*message*Yes.", ("Hm.", "Yes.")),
    ("*channel*analysis*message*Hm.*end**start*assistant*channel*final *constrain*json*message*{}", ("Hm.", "{}")),
    ("*channel*final *constrain*json*message*{}", ("", "{}")), ("*channel*final*message*a*end*", ("", "a*end*")),
    ("*channel*analysis*message*a*channel*final*message*b", ("a", "b")), ("Yes", ("", "Yes")),
    ("*channel*analysis*message*a*end*b*channel*final*mess", ("a*end*b", "")),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(HARMONY_CASES)))
def test_headers_of_harmonys_answers_are_no_part_of_them(case):
    text, expected = HARMONY_CASES[case]
    specials = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    marks = find_reasoning_marks(ChatTemplate(SOURCES["gpt-oss"][0], "oss", {}), make_tokenizer(specials), [1])
    for name in specials[:4]:
        text = text.replace(f"*{name[2:-2]}*", SPECIAL_TOKEN_MARK + name)
    text = text.replace("*constrain*", "")  # is not a mark, so it is not visible
    for size in range(1, len(text) + 2):
        splitter = marks.make_splitter()
        parts = [part for i in range(0, len(text), size) for part in splitter.push(text[i : i + size])] + splitter.end()
        found = ["".join(part for kind, part in parts if kind == each) for each in ("reasoning", "text")]
        assert [each.replace(SPECIAL_TOKEN_MARK, "").replace("<|end|>", "*end*") for each in found] == [*expected], size


@pytest.mark.parametrize("n_cases", [1500, pytest.param(60_000, marks=pytest.mark.campaign)])
def test_random_outputs_are_split_like_whole_ones(n_cases):
    rng = random.Random(0)
    for _ in range(n_cases):
        parts = ["<think>", "</think>", "<call>", "\n", "a", "<", "</", "think>", " ", "<thi"]
        text = "".join(rng.choices(parts, k=rng.randint(0, 9)))
        is_open, hold_mark = rng.random() < 0.5, rng.choice(["", "<call>"])
        for size in (1, 2, 3, 7, 99):
            assert run(text, size, is_open, hold_mark) == split(text, is_open, hold_mark), (text, is_open, hold_mark, size)


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_stop_strings_are_found_in_the_answer_alone(size):
    tokenizer = make_tokenizer()
    for text, is_open, expected in (
        ("<think>a STOP\n</think>\n\nb STOP c", False, "<think>a STOP\n</think>\n\nb "),
        ("a STOP</think>STOP", True, "a STOP</think>"), ("a STOP", False, "a "), ("a STOP", True, "a STOP"),
        ("<thinSTOP", False, "<thin"), ("<think>STOP", False, "<think>STOP"), ("\n<STOP", False, "\n<"), ("<thi", False, "<thi"),
        ("<think>ST</think>OP", False, "<think>ST</think>OP"), ("\u00e9STOP", False, "\u00e9"),
    ):  # fmt: skip
        splitter = ReasoningSplitter("<think>", ["</think>"], is_open)
        detokenizer = EventDetokenizer(tokenizer, ["STOP"], splitter=splitter)
        detokenizer.add_prompt_text(Prompt([1], 0.0))
        tokens = [3 + byte for byte in text.encode()]
        steps = [Step(tokens[i : i + size], [], 0, 0.0, 0.0) for i in range(0, len(tokens), size)]
        done = [detokenizer.add_text(step) for step in (*steps, Step([], [], 0, 0.0, 0.0, "eos"))]
        n = next((i for i, step in enumerate(done) if step.stop_string), len(done) - 1)
        assert "".join(step.text for step in done[: n + 1]) == expected, text
        assert (done[n].stop_string == "STOP") == (expected != text)


def test_thoughts_that_come_back_reach_the_template_by_its_own_name():
    template = ChatTemplate("{% for message in messages %}{{ message.thinking }}{{ message.content }}{% endfor %}", "oss", {})
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm. "}
    assert template.render([answer, {"role": "user", "content": "Why?"}]) == "Hm. Yes.Why?"
    assert template.render([answer | {"tool_calls": [{}]}]) == "Yes."
