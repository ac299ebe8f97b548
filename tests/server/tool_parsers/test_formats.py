"""The tool-call formats: calls are found for any chunk size, and anything else stays text."""

import json
import random
import sys
import time

import pytest

from specdec.server.tool_parsers.formats import TOOL_FORMATS, find_tool_format
from specdec.server.tool_parsers.json_calls import ArgumentsDelta, Reasoning, ToolCall
from tests.tools.hf_folders import FIXTURES

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}}
TOOLS = {"weather": CITY, "get.time-1": {}}
LARGEST = sys.float_info.max
OSLO = {"city": 'O"s\nlo</x>', "days": 3}


def merge_deltas(deltas):
    """Return calls with complete arguments, and consecutive texts as one."""
    merged = []
    for delta in deltas:
        if isinstance(delta, ArgumentsDelta):
            merged[-1] = ToolCall(merged[-1].name, merged[-1].arguments + delta.arguments)
        elif merged and type(merged[-1]) is type(delta) and isinstance(delta, str):
            merged[-1] += delta
        elif merged and isinstance(delta, Reasoning) and isinstance(merged[-1], Reasoning):
            merged[-1] = Reasoning(merged[-1].text + delta.text)
        else:
            merged.append(delta)
    return [(delta.name, json.loads(delta.arguments)) if isinstance(delta, ToolCall) else delta for delta in merged]


def parse(tool_format, text, size):
    parser = tool_format.parser_factory(TOOLS)
    return [each for at in range(0, len(text), size) for each in parser.push(text[at : at + size])] + parser.end()


DAYS = "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n" + DAYS
FORMATS = {tool_format.name: tool_format for tool_format in reversed(TOOL_FORMATS)}
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
     f"<|constrain|>json<|message|>{json.dumps(OSLO)}<|call|>", [Reasoning("Hm."), ("weather", OSLO)]),
    ("harmony", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Oslo < Rom.<|return|>",
     [Reasoning("Hm"), "Oslo < Rom."]),
    ("harmony", "<|start|>assistant to=functions.get.time-1<|channel|>commentary json<|message|>{}", [("get.time-1", {})]),
    ("harmony", "<|channel|>commentary to=functions.rain<|message|>{}<|call|>", ["{}"]),
    ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "<|end|>\\"<|call|>"}<|end|><|start|>assistant'
     "<|channel|>final<|message|>Oslo.", [("weather", {"city": '<|end|>"<|call|>'}), "Oslo."]),
    ("harmony", "<|channel|>fin", ["<|channel|>fin"]),
    ("harmony", "no channel", ["no channel"]),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_calls_are_found_for_any_chunk_size(case):
    name, text, expected = CASES[case]
    for size in (1, 2, 5, len(text)):
        assert merge_deltas(parse(FORMATS[name], text, size)) == expected, size


def test_functiongemma_uses_other_quotes():
    tool_format = find_tool_format("<start_function_call>")
    assert merge_deltas(
        parse(tool_format, "<start_function_call>call:weather{city:<escape>a, b}<escape>}<end_function_call>", 3)
    ) == [("weather", {"city": "a, b}"})]


def test_a_truncated_xml_call_keeps_its_parameters():
    complete = XML % "Rom and Oslo"
    for n in range(len("<tool_call>\n<function=weather>\n"), complete.index("</function>")):
        (call,) = [each for each in join_arguments(parse(FORMATS["xml"], complete[:n], 4)) if isinstance(each, ToolCall)]
        assert call.name == "weather" and call.arguments.startswith("{")
        if n > complete.index("Oslo"):
            assert "Rom and" in call.arguments
    assert merge_deltas(parse(FORMATS["xml"], complete[:20], 4)) == [complete[:20]]


def join_arguments(deltas):
    merged = []
    for delta in deltas:
        if isinstance(delta, ArgumentsDelta):
            merged[-1] = ToolCall(merged[-1].name, merged[-1].arguments + delta.arguments)
        else:
            merged.append(delta)
    return merged


@pytest.mark.parametrize("n_cases", [300, pytest.param(1500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_damaged_calls_are_parsed_without_errors_or_lost_text(name, n_cases):
    """Damaged and truncated calls give the same deltas for any chunk size, and all text of non-calls is returned."""
    rng, tool_format = random.Random(name), FORMATS[name]
    texts = [text for other, text, _ in CASES if other == name and len(text) < 400] or [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>', '{"name": "weather", "parameters": {}}',
    ]  # fmt: skip
    for _ in range(n_cases):
        text = rng.choice(texts)
        for _ in range(rng.randrange(4)):
            at, n = rng.randrange(len(text) + 1), rng.randrange(8)
            text = (
                text[:at]
                + rng.choice([*tool_format.visible_marks, '"', "{", "}", "[", ")", "\\", "'", "\n", "\u00e9"])
                + text[at + n :]
            )
        results = [join_arguments(parse(tool_format, text, size)) for size in (1, 3, len(text) or 1)]
        plain = [
            [(type(each), vars(each)) if not isinstance(each, str) else each for each in join_texts(each)] for each in results
        ]
        assert plain[0] == plain[1] == plain[2], text
        if not any(isinstance(each, ToolCall | Reasoning) for each in results[0]) and name != "harmony":
            assert "".join("".join(results[0]).split()) == "".join(text.split())


def join_texts(deltas):
    merged = []
    for delta in deltas:
        if isinstance(delta, str) and merged and isinstance(merged[-1], str):
            merged[-1] += delta
        else:
            merged.append(delta)
    return merged


def test_a_template_selects_its_tool_format():
    assert {tool_format.name for tool_format in TOOL_FORMATS} == {
        "harmony",
        "gemma",
        "python",
        "named",
        "listed",
        "xml",
        "tags",
        "alone",
    }
    for tool_format in TOOL_FORMATS:
        assert find_tool_format(f"a {' b '.join(tool_format.template_signs)} c").name == tool_format.name
    assert find_tool_format("{{ messages }}") is None
    assert find_tool_format((FIXTURES / "chat" / "qwen35.jinja").read_text()).name == "xml"


def test_parsing_takes_linear_time():
    """Unterminated calls are read once, character by character."""
    xml = "<tool_call>\n<function=weather>\n<parameter=city>\n"
    for name, prefix in (("xml", xml), ("python", "<|tool_call_start|>["), ("harmony", "<|channel|>"), ("named", "[TOOL_CALLS]")):
        seconds = []
        for n in (20_000, 80_000):
            start = time.process_time()
            parse(FORMATS[name], prefix + "ab" * n, 3)
            seconds.append(time.process_time() - start)
        assert seconds[1] < 12 * seconds[0] + 0.2, (name, seconds)
