"""The ways in which models write calls of tools: each is found however its text comes, and what is no call stays text."""

import json
import random
import sys
import time

import pytest

from specdec.server.tool_parsers.formats import WAYS, way_of
from specdec.server.tool_parsers.incremental import Call, More, Thought
from tests.tools.hf_folders import FIXTURES

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}}
TOOLS = {"weather": CITY, "get.time-1": {}}
LARGEST = sys.float_info.max
OSLO = {"city": 'O"s\nlo</x>', "days": 3}


def merged(said):
    """Calls with their arguments whole, and words that follow each other as one."""
    found = []
    for each in said:
        if isinstance(each, More):
            found[-1] = Call(found[-1].name, found[-1].arguments + each.arguments)
        elif found and type(found[-1]) is type(each) and isinstance(each, str):
            found[-1] += each
        elif found and isinstance(each, Thought) and isinstance(found[-1], Thought):
            found[-1] = Thought(found[-1].words + each.words)
        else:
            found.append(each)
    return [(each.name, json.loads(each.arguments)) if isinstance(each, Call) else each for each in found]


def read(way, text, size):
    calls = way.reads(TOOLS)
    return [each for at in range(0, len(text), size) for each in calls.push(text[at : at + size])] + calls.end()


DAYS = "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n" + DAYS
OF = {way.name: way for way in reversed(WAYS)}
LISTED = json.dumps([{"name": "weather", "arguments": OSLO}, {"name": "get.time-1", "arguments": {}, "id": "123456789"}])
CASES = [
    ("xml", f"Let me see.\n{XML % OSLO['city']}\n{XML % 'Rom'} Done.",
     ["Let me see.", ("weather", OSLO), ("weather", {"city": "Rom", "days": 3}), " Done."]),
    ("xml", "<tool_call><function=get.time-1></function></tool_call>", [("get.time-1", {})]),
    ("xml", "<tool_call>\n<function=rain>\n</function>", ["<tool_call>\n<function=rain>\n</function>"]),
    ("xml", "<function=weather> <tool_cal", ["<function=weather> <tool_cal"]),
    ("xml", "<tool_call><function=weather><parameter=tags>[1, true]</parameter>\n<parameter=x>\n12\n</parameter></function>",
     [("weather", {"tags": [1, True], "x": "12"})]),
    ("xml", "<tool_call>\n<function=weather>\n<parameter=tags>\nTrue\n</parameter>\noops</function> x",
     [("weather", {"tags": True}), "\noops</function> x"]),
    ("xml", '<tool_call><function=weather><parameter=tags>["</parameter>", "\\"</parameter>"]</parameter></function></tool_call>',
     [("weather", {"tags": ["</parameter>", '"</parameter>']})]),
    ("xml", '<tool_call><function=weather><parameter=tags>\n"it\n</parameter><parameter=days>NaN</parameter></function>',
     [("weather", {"tags": '"it', "days": "NaN"})]),
    ("xml", "<tool_call><function=weather><parameter=days>-1e999</parameter></function></tool_call>",
     [("weather", {"days": -LARGEST})]),
    ("python", "<|tool_call_start|>[weather(days=1e999, tags=[-1e999])]<|tool_call_end|>",
     [("weather", {"days": LARGEST, "tags": [-LARGEST]})]),
    ("gemma", "<|tool_call>call:weather{days:1e999}<tool_call|>", [("weather", {"days": LARGEST})]),
    ("listed", f"Hm. [TOOL_CALLS]{LISTED}", ["Hm.", ("weather", OSLO), ("get.time-1", {})]),
    ("listed", f"[TOOL_CALLS] {LISTED} so", [("weather", OSLO), ("get.time-1", {}), " so"]),
    ("listed", '[TOOL_CALLS][{"name": "rain"}]', ['[TOOL_CALLS][{"name": "rain"}]']),
    ("listed", "[TOOL_CALLS", ["[TOOL_CALLS"]),
    ("listed", "plain ", ["plain "]),
    ("named", f"[TOOL_CALLS]weather[ARGS]{json.dumps(OSLO)}[TOOL_CALLS]get.time-1[CALL_ID]123456789[ARGS]{{}}",
     [("weather", OSLO), ("get.time-1", {})]),
    ("named", "[TOOL_CALLS]rain[ARGS]{}", ["[TOOL_CALLS]rain[ARGS]{}"]),
    ("named", "[TOOL_CALLS]wea", ["[TOOL_CALLS]wea"]),
    ("python", """a <|tool_call_start|>[weather(city="O\\"s\\nlo</x>", days=3), get.time-1()]<|tool_call_end|> b""",
     ["a", ("weather", OSLO), ("get.time-1", {}), " b"]),
    ("python", "<|tool_call_start|>[weather(tags=['it\\'s', None, True, false, {'a': -1.5e3}], city='don't')]<|tool_call_end|>",
     ["<|tool_call_start|>[weather(tags=['it\\'s', None, True, false, {'a': -1.5e3}], city='don't')]<|tool_call_end|>"]),
    ("python", "<|tool_call_start|>[weather(tags=['it\\'s', None, True, false, {'a': -1.5e3}])]<|tool_call_end|>",
     [("weather", {"tags": ["it's", None, True, False, {"a": -1500.0}]})]),
    ("python", "<|tool_call_start|>[rain()]<|tool_call_end|>", ["<|tool_call_start|>[rain()]<|tool_call_end|>"]),
    ("python", "<|tool_call_start|>[weather(", ["<|tool_call_start|>[weather("]),
    ("python", "<|tool_call_start|>[weather(tags=" + "[" * 500 + "]" * 500 + ")]<|tool_call_end|>",
     ["<|tool_call_start|>[weather(tags=" + "[" * 500 + "]" * 500 + ")]<|tool_call_end|>"]),
    ("gemma", '<|tool_call>call:weather{city:<|"|>O"s\nlo</x><|"|>,days:3}<tool_call|><|tool_call>call:get.time-1{}<tool_call|>',
     [("weather", OSLO), ("get.time-1", {})]),
    ("gemma", '<|tool_call>call:weather{tags:[<|"|>a<|"|>,{b:null,<|"|>c d<|"|>:true}]}<tool_call|>.',
     [("weather", {"tags": ["a", {"b": None, "c d": True}]}), "."]),
    ("gemma", "<|tool_call>call:rain{}<tool_call|>", ["<|tool_call>call:rain{}<tool_call|>"]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{json.dumps(OSLO)}<|call|>", [Thought("Hm."), ("weather", OSLO)]),
    ("harmony", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Oslo < Rom.<|return|>",
     [Thought("Hm"), "Oslo < Rom."]),
    ("harmony", "<|start|>assistant to=functions.get.time-1<|channel|>commentary json<|message|>{}", [("get.time-1", {})]),
    ("harmony", "<|channel|>commentary to=functions.rain<|message|>{}<|call|>", ["{}"]),
    ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "<|end|>\\"<|call|>"}<|end|><|start|>assistant'
     "<|channel|>final<|message|>Oslo.", [("weather", {"city": '<|end|>"<|call|>'}), "Oslo."]),
    ("harmony", "<|channel|>fin", ["<|channel|>fin"]),
    ("harmony", "no channel", ["no channel"]),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_calls_are_found_however_the_text_comes(case):
    name, text, said = CASES[case]
    for size in (1, 2, 5, len(text)):
        assert merged(read(OF[name], text, size)) == said, size


def test_functions_of_gemma_have_quotes_of_their_own():
    way = way_of("<start_function_call>")
    assert merged(read(way, "<start_function_call>call:weather{city:<escape>a, b}<escape>}<end_function_call>", 3)) == [
        ("weather", {"city": "a, b}"})
    ]


def test_a_call_in_xml_that_is_cut_keeps_what_has_come():
    whole = XML % "Rom and Oslo"
    for n in range(len("<tool_call>\n<function=weather>\n"), whole.index("</function>")):
        (call,) = [each for each in _joined(read(OF["xml"], whole[:n], 4)) if isinstance(each, Call)]
        assert call.name == "weather" and call.arguments.startswith("{")
        if n > whole.index("Oslo"):
            assert "Rom and" in call.arguments
    assert merged(read(OF["xml"], whole[:20], 4)) == [whole[:20]]


def _joined(said):
    found = []
    for each in said:
        if isinstance(each, More):
            found[-1] = Call(found[-1].name, found[-1].arguments + each.arguments)
        else:
            found.append(each)
    return found


@pytest.mark.parametrize("n_texts", [300, pytest.param(1500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", sorted(OF))
def test_whatever_a_model_writes_is_read_and_nothing_of_it_is_dropped(name, n_texts):
    """Damaged calls, cut anywhere, in pieces of any size: the same is said, no error, and letters of text all come."""
    rng, way = random.Random(name), OF[name]
    texts = [text for other, text, _ in CASES if other == name and len(text) < 400] or [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>', '{"name": "weather", "parameters": {}}',
    ]  # fmt: skip
    for _ in range(n_texts):
        text = rng.choice(texts)
        for _ in range(rng.randrange(4)):
            at, n = rng.randrange(len(text) + 1), rng.randrange(8)
            text = text[:at] + rng.choice([*way.shown, '"', "{", "}", "[", ")", "\\", "'", "\n", "\u00e9"]) + text[at + n :]
        said = [_joined(read(way, text, size)) for size in (1, 3, len(text) or 1)]
        flat = [[(type(each), vars(each)) if not isinstance(each, str) else each for each in _strung(each)] for each in said]
        assert flat[0] == flat[1] == flat[2], text
        if not any(isinstance(each, Call | Thought) for each in said[0]) and name != "harmony":
            assert "".join("".join(said[0]).split()) == "".join(text.split())


def _strung(said):
    found = []
    for each in said:
        if isinstance(each, str) and found and isinstance(found[-1], str):
            found[-1] += each
        else:
            found.append(each)
    return found


def test_a_template_tells_its_way():
    assert {way.name for way in WAYS} == {"harmony", "gemma", "python", "named", "listed", "xml", "tags", "alone"}
    for way in WAYS:
        assert way_of(f"a {' b '.join(way.signs)} c").name == way.name
    assert way_of("{{ messages }}") is None
    assert way_of((FIXTURES / "chat" / "qwen35.jinja").read_text()).name == "xml"


def test_long_texts_are_read_in_time_that_grows_with_them():
    """A letter at a time, where nothing closes: looked through once."""
    xml = "<tool_call>\n<function=weather>\n<parameter=city>\n"
    for name, begin in (("xml", xml), ("python", "<|tool_call_start|>["), ("harmony", "<|channel|>"), ("named", "[TOOL_CALLS]")):
        seconds = []
        for n in (20_000, 80_000):
            since = time.process_time()
            read(OF[name], begin + "ab" * n, 3)
            seconds.append(time.process_time() - since)
        assert seconds[1] < 12 * seconds[0] + 0.2, (name, seconds)
