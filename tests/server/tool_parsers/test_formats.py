"""The tool-call formats: calls are found for any chunk size, and anything else stays text."""

import json
import random
import sys
import time

import pytest

from specdec.server.tool_parsers import TOOL_PARSERS, find_tool_parser
from specdec.server.tool_parsers.base import Delta
from specdec.server.tool_parsers.hermes import HermesParser
from specdec.server.tool_parsers.output_parser import OutputParser
from specdec.text.reasoning import SPECIAL_TOKEN_MARK
from tests.tools.hf_folders import FIXTURES
from tests.tools.tool_calls import TAGGED_CALL, TOOLS, join_deltas, parse, simplify

LARGEST = sys.float_info.max
OSLO = {"city": 'O"s\nlo</x>', "days": 3}


GLM = (
    "<tool_call>weather%s<arg_key>city</arg_key>%s<arg_value>Oslo</arg_value>%s<arg_key>days</arg_key>%s<arg_value>3</arg_value>"
)
ATEM = (
    f'<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">{OSLO["city"]}</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
DAYS = "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n" + DAYS
PARSERS = {parser.__name__.removesuffix("Parser"): parser for parser in TOOL_PARSERS}
LISTED = json.dumps([{"name": "weather", "arguments": OSLO}, {"name": "get.time-1", "arguments": {}, "id": "123456789"}])
WEATHER_CALL = ("weather", {"city": "Oslo"})
NAME_LAST_CALL, CALL_WITHOUT_ARGUMENTS = '{"arguments": {"city": "Oslo"}, "name": "weather"}', '{"name": "weather"}'
CASES = [
    ("Hermes", TAGGED_CALL, [WEATHER_CALL]),
    ("Hermes", f"Let me see.\n\n{TAGGED_CALL}\n{TAGGED_CALL}\n", ["Let me see.", WEATHER_CALL, WEATHER_CALL]),
    ("Hermes", f"{TAGGED_CALL} Done. ", [WEATHER_CALL, " Done."]),
    ("Hermes", "a < b <tool_cal l> ", ["a < b <tool_cal l> "]),
    ("Hermes", "<tool_call>{broken}</tool_call> x", ["<tool_call>{broken}</tool_call> x"]),
    ("Hermes", TAGGED_CALL.replace("weather", "rain"), [TAGGED_CALL.replace("weather", "rain")]),
    ("Hermes", TAGGED_CALL.removesuffix("</tool_call>"), [WEATHER_CALL]),
    ("Hermes", TAGGED_CALL.replace("Oslo", "</tool_call>\\\""), [("weather", {"city": '</tool_call>"'})]),
    ("Hermes", TAGGED_CALL.replace("}}", "}} and more"), [WEATHER_CALL, "and more\n</tool_call>"]),
    ("Hermes", TAGGED_CALL[:50], [("weather", '{"cit')]),
    ("Hermes", f"<tool_call>{NAME_LAST_CALL}</tool_call>", [WEATHER_CALL]),
    ("Hermes", f"<tool_call>{CALL_WITHOUT_ARGUMENTS}</tool_call>", [("weather", {})]),
    ("Hermes", "<tool_call>{", ["<tool_call>{"]),
    ("Hermes", f'{TAGGED_CALL}\n<tool_call>\n{{"name', [WEATHER_CALL]),
    ("Hermes", f"{TAGGED_CALL}\n<tool_ca", [WEATHER_CALL]),
    ("Hermes", TAGGED_CALL.replace('{"city": "Oslo"}', json.dumps('{"city": "Oslo"}')), [WEATHER_CALL]),
    ("Hermes", TAGGED_CALL.replace('{"city": "Oslo"}', "null"), [("weather", {})]),
    ("Hermes", TAGGED_CALL.replace("Oslo", "Os\nlo"), [("weather", {"city": "Os\nlo"})]),
    ("Hermes", TAGGED_CALL.replace('"Oslo"', '["Oslo", 1,], '), [("weather", {"city": ["Oslo", 1]})]),
    ("Hermes", "<tool_call>" + "[" * 10**5, ["<tool_call>" + "[" * 10**5]),
    ("Hermes", " plain \n", [" plain \n"]),
    ("Hermes", "", []),
    ("Llama3", ' {"name": "weather", "parameters": {"city": "Oslo"}}', [WEATHER_CALL]),
    ("Llama3", f"{NAME_LAST_CALL} \n", [WEATHER_CALL]),
    ("Llama3", '{"name": "weather", "parameters": {"city": NaN}}', [("weather", '{"city": NaN}}')]),
    ("Llama3", '{"name": "weather", "parameters": [1]}', ['{"name": "weather", "parameters": [1]}']),
    ("Llama3", '{"a": 1}', ['{"a": 1}']),
    ("Llama3", "No, {}", ["No, {}"]),
    ("Llama3", f"{CALL_WITHOUT_ARGUMENTS}?", [("weather", {}), "?"]),
    ("Llama3", "", []),
    ("Qwen3Coder", f"Let me see.\n{XML % OSLO['city']}\n{XML % 'Rom'} Done.",
     ["Let me see.", ("weather", OSLO), ("weather", {"city": "Rom", "days": 3}), " Done."]),
    ("Qwen3Coder", "<tool_call><function=get.time-1></function></tool_call>", [("get.time-1", {})]),
    ("Qwen3Coder", "<tool_call>\n<function=rain>\n</function>", ["<tool_call>\n<function=rain>\n</function>"]),
    ("Qwen3Coder", "<function=weather> <tool_cal", ["<function=weather> <tool_cal"]),
    ("Qwen3Coder", "<tool_call><function=weather><parameter=tags>[1, true]</parameter>\n<parameter=x>\n12\n</parameter>"
     "</function>", [("weather", {"tags": [1, True], "x": "12"})]),
    ("Qwen3Coder", "<tool_call>\n<function=weather>\n<parameter=tags>\nTrue\n</parameter>\noops</function> x",
     [("weather", {"tags": True}), "\noops</function> x"]),
    ("Qwen3Coder", '<tool_call><function=weather><parameter=tags>["</parameter>", "\\"</parameter>"]</parameter></function>'
     "</tool_call>", [("weather", {"tags": ["</parameter>", '"</parameter>']})]),
    ("Qwen3Coder", '<tool_call><function=weather><parameter=tags>\n"it\n</parameter><parameter=days>NaN</parameter></function>',
     [("weather", {"tags": '"it', "days": "NaN"})]),
    *[("Qwen3Coder", f"<tool_call><function=weather><parameter=note>{text}</parameter></function></tool_call>",
       [("weather", {"note": value})]) for text, value in (("123", "123"), ("True", "True"), ("null", None), ("a b", "a b"))],
    ("Qwen3Coder", f"{XML % 'Rom'}<tool_call>\n<func", [("weather", {"city": "Rom", "days": 3})]),
    ("Qwen3Coder", "<tool_call><function=weather><parameter=days>-1e999</parameter></function></tool_call>",
     [("weather", {"days": -LARGEST})]),
    ("GLM", f"Hm.\n{GLM % ('', '', '', '')}</tool_call>{GLM % (*4 * chr(10),)}\n</tool_call> Done.",
     ["Hm.", *2 * [("weather", {"city": "Oslo", "days": 3})], " Done."]),
    ("GLM", "<tool_call>get.time-1</tool_call><tool_call>wea", [("get.time-1", {})]),
    ("GLM", "<tool_call>get.time-1</tool_call>", [("get.time-1", {})]),
    ("GLM", "<tool_call>rain</tool_call> x", ["<tool_call>rain</tool_call> x"]),
    ("GLM", "<tool_call>weather", ["<tool_call>weather"]),
    ("GLM", "<tool_call>weather<arg_key>city</arg_key><arg_value> O\n</arg_key>", [("weather", '{"city": " O\\n</arg_key>')]),
    ("GLM", '<tool_call>weather<arg_key>tags</arg_key><arg_value>["</arg_value>"]</arg_value></tool_call>',
     [("weather", {"tags": ["</arg_value>"]})]),
    ("GLM", "<tool_call>weather<arg_key>city</arg_key> oops</tool_call>",
     [("weather", {}), "<arg_key>city</arg_key> oops</tool_call>"]),
    ("LFM2", "<|tool_call_start|>[weather(days=1e999, tags=[-1e999])]<|tool_call_end|>",
     [("weather", {"days": LARGEST, "tags": [-LARGEST]})]),
    ("Gemma", "<|tool_call>call:weather{days:1e999}<tool_call|>", [("weather", {"days": LARGEST})]),
    ("MistralList", f"Hm. [TOOL_CALLS]{LISTED}", ["Hm.", ("weather", OSLO), ("get.time-1", {})]),
    ("MistralList", f"[TOOL_CALLS] {LISTED} so", [("weather", OSLO), ("get.time-1", {}), " so"]),
    ("MistralList", '[TOOL_CALLS][{"name": "rain"}]', ['[TOOL_CALLS][{"name": "rain"}]']),
    ("MistralList", "[TOOL_CALLS", ["[TOOL_CALLS"]),
    ("MistralList", '[TOOL_CALLS][{"name": "weather"}, {"name', [("weather", {})]),
    ("MistralList", "plain ", ["plain "]),
    ("Mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(OSLO)}[TOOL_CALLS]get.time-1[CALL_ID]123456789[ARGS]{{}}",
     [("weather", OSLO), ("get.time-1", {})]),
    ("Mistral", "[TOOL_CALLS]rain[ARGS]{}", ["[TOOL_CALLS]rain[ARGS]{}"]),
    ("Mistral", "[TOOL_CALLS]wea", ["[TOOL_CALLS]wea"]),
    ("Mistral", "[TOOL_CALLS]get.time-1[ARGS]{}[TOOL_CALLS]wea", [("get.time-1", {})]),
    ("LFM2", """a <|tool_call_start|>[weather(city="O\\"s\\nlo</x>", days=3), get.time-1()]<|tool_call_end|> b""",
     ["a", ("weather", OSLO), ("get.time-1", {}), " b"]),
    ("LFM2", "<|tool_call_start|>[weather(tags=['it\\'s', None, True, false, {'a': -1.5e3}], city='don't')]<|tool_call_end|>",
     ["<|tool_call_start|>[weather(tags=['it\\'s', None, True, false, {'a': -1.5e3}], city='don't')]<|tool_call_end|>"]),
    ("LFM2", "<|tool_call_start|>[weather(tags=['it\\'s', None, True, false, {'a': -1.5e3}])]<|tool_call_end|>",
     [("weather", {"tags": ["it's", None, True, False, {"a": -1500.0}]})]),
    ("LFM2", "<|tool_call_start|>[rain()]<|tool_call_end|>", ["<|tool_call_start|>[rain()]<|tool_call_end|>"]),
    ("LFM2", "<|tool_call_start|>[weather(city=get(days=1))]<|tool_call_end|>",
     ["<|tool_call_start|>[weather(city=get(days=1))]<|tool_call_end|>"]),
    ("LFM2", "<|tool_call_start|>[weather(city='get(days=1)')]<|tool_call_end|>", [("weather", {"city": "get(days=1)"})]),
    ("LFM2", "<|tool_call_start|>[weather(", ["<|tool_call_start|>[weather("]),
    ("LFM2", "<|tool_call_start|>[weather(tags=" + "[" * 500 + "]" * 500 + ")]<|tool_call_end|>",
     ["<|tool_call_start|>[weather(tags=" + "[" * 500 + "]" * 500 + ")]<|tool_call_end|>"]),
    ("Gemma", '<|tool_call>call:weather{city:<|"|>O"s\nlo</x><|"|>,days:3}<tool_call|><|tool_call>call:get.time-1{}<tool_call|>',
     [("weather", OSLO), ("get.time-1", {})]),
    ("Gemma", '<|tool_call>call:weather{tags:[<|"|>a<|"|>,{b:null,<|"|>c d<|"|>:true}]}<tool_call|>.',
     [("weather", {"tags": ["a", {"b": None, "c d": True}]}), "."]),
    ("Gemma", "<|tool_call>call:weather{city:get(days:1)}<tool_call|>",
     ["<|tool_call>call:weather{city:get(days:1)}<tool_call|>"]),
    ("Gemma", "<|tool_call>call:rain{}<tool_call|>", ["<|tool_call>call:rain{}<tool_call|>"]),
    ("Harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{json.dumps(OSLO)}<|call|>", [Delta("reasoning", "Hm."), ("weather", OSLO)]),
    ("Harmony", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Oslo < Rom.<|return|>",
     [Delta("reasoning", "Hm"), "Oslo < Rom."]),
    ("Harmony", "<|start|>assistant to=functions.get.time-1<|channel|>commentary json<|message|>{}", [("get.time-1", {})]),
    ("Harmony", "<|channel|>commentary to=functions.rain<|message|>{}<|call|>", ["{}"]),
    ("Harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "<|end|>\\"<|call|>"}<|end|><|start|>assistant'
     "<|channel|>final<|message|>Oslo.", [("weather", {"city": '<|end|>"<|call|>'}), "Oslo."]),
    ("Harmony", "<|channel|>fin", ["<|channel|>fin"]),
    ("Harmony", f"<|channel|>commentary {'x' * 300} to=functions.weather<|message|>{{}}", [("weather", {})]),
    ("Harmony", "no channel", ["no channel"]),
    ("MuseGlimmer", f" to=self<|message|>Hm. <atem:function_calls><|eom|><|start|>assistant to=weather<|message|>{ATEM}<|eot|>",
     [Delta("reasoning", "Hm. <atem:function_calls>"), ("weather", OSLO)]),
    ("MuseGlimmer", f" to=user<|message|>Let me see.<|eom|><|start|>assistant to=weather<|message|>{ATEM}<|eom|><|start|>"
     "assistant to=get.time-1<|message|><atem:function_calls>\n<atem:invoke name=\"get.time-1\">\n</atem:invoke>\n"
     "</atem:function_calls><|eot|>", ["Let me see.", ("weather", OSLO), ("get.time-1", {})]),
    ("MuseGlimmer", " to=self<|message|>Hm<|eom|><|start|>assistant to=user<|message|>Oslo < Rom.", [Delta("reasoning", "Hm"),
     "Oslo < Rom."]),
    ("MuseGlimmer", "<|message|>Hi, to=self<|eot|>", ["Hi, to=self"]),
    ("MuseGlimmer", f" to=rain<|message|>{ATEM.replace('weather', 'rain')}", [ATEM.replace("weather", "rain")]),
    ("MuseGlimmer", ATEM[:81], [("weather", '{"city": "O\\"')]),
    ("MuseGlimmer", "no header", ["no header"]),
    ("MuseGlimmer", " to us", [" to us"]),
]  # fmt: skip


def test_the_longest_name_of_a_tool_is_read():
    name = "m" * 128
    for text in (f"[TOOL_CALLS]{name}[ARGS]{{}}", f"[TOOL_CALLS]{name}[CALL_ID]123456789[ARGS]{{}}"):
        assert simplify(parse(PARSERS["Mistral"], text, 1, {name: {}})) == [(name, {})]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_calls_are_found_for_any_chunk_size(case):
    name, text, expected = CASES[case]
    for size in (1, 2, 5, len(text) or 1) if len(text) < 10_000 else (1000,):
        assert simplify(parse(PARSERS[name], text, size)) == expected, size


BARE_CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
BARE_CASES = [
    (BARE_CALL, [WEATHER_CALL]),
    (f" ```json\n{BARE_CALL}\n```\n", [WEATHER_CALL]),
    (f"{{{BARE_CALL}}}", [WEATHER_CALL]),
    (f"{BARE_CALL}\n{BARE_CALL}", [WEATHER_CALL, WEATHER_CALL]),
    (f"[{BARE_CALL}, {NAME_LAST_CALL}]", [WEATHER_CALL, WEATHER_CALL]),
    (BARE_CALL[:40], [("weather", '{"city"')]),
    (f"{BARE_CALL}\n{BARE_CALL[:10]}", [WEATHER_CALL]),
    *[(text, [text]) for text in (
        f"{BARE_CALL} is a call.", f"So:\n{BARE_CALL}", BARE_CALL.replace("weather", "rain"), "```python\nx = {}\n```",
        '{"name": "weather", "age": 3}', '{"name": "wea', "{}", "[1]", " ", "`" * 99,
    )],
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BARE_CASES)))
def test_an_answer_of_nothing_but_calls_needs_no_marks(case):
    text, expected = BARE_CASES[case]
    for size in (1, 3, 500):
        parser = OutputParser(None, HermesParser(TOOLS))
        deltas = [each for at in range(0, len(text), size) for each in parser.push(text[at : at + size])]
        assert simplify(deltas + parser.end()) == expected, size


def test_an_answer_with_special_tokens_is_no_call_without_marks():
    text = BARE_CALL.replace("Oslo", SPECIAL_TOKEN_MARK + "<tool_call>")
    parser = OutputParser(None, HermesParser(TOOLS))
    assert simplify(parser.push(text) + parser.end()) == [BARE_CALL.replace("Oslo", "<tool_call>")]


def test_text_is_held_back_only_while_it_may_be_a_call():
    for text in ('{"name": "rain', "{{ x", "```py\nx", "[1", '{"a', "So"):
        assert "".join(each.text for each in OutputParser(None, HermesParser(TOOLS)).push(f'{text}"')), text


@pytest.mark.parametrize(("template", "tag"), [("<tool_call>", "<tool_call>"), ("<|python_tag|>", "")])
def test_arguments_and_text_are_emitted_as_early_as_possible(template, tag):
    parser = find_tool_parser(template)(TOOLS)
    assert not parser.push(tag + '{"name": "weather", "arguments": ')
    assert simplify(parser.push('{"city": "Os')) == [("weather", '{"city": "Os')]
    assert parser.push("l") == [Delta("tool_call", "l")]
    for prefix in ('{"name": "rain"', '{"list"', '{"name": "weather", ,', '{"name": "weather", "arguments": 1, nothing'):
        parser = find_tool_parser(template)(TOOLS)
        assert simplify(parser.push(tag + prefix)) == [tag + prefix], prefix
        assert simplify(parser.push(" a")) in ([" a"], ["a"])


def test_functiongemma_uses_other_quotes():
    parser_class = find_tool_parser("<start_function_call>")
    assert simplify(
        parse(parser_class, "<start_function_call>call:weather{city:<escape>a, b}<escape>}<end_function_call>", 3)
    ) == [("weather", {"city": "a, b}"})]


def test_a_truncated_xml_call_keeps_its_parameters():
    complete = XML % "Rom and Oslo"
    for n in range(len("<tool_call>\n<function=weather>\n"), complete.index("</function>")):
        (call,) = [each for each in join_deltas(parse(PARSERS["Qwen3Coder"], complete[:n], 4)) if each.name]
        assert call.name == "weather" and call.text.startswith("{")
        if n > complete.index("Oslo"):
            assert "Rom and" in call.text
    assert simplify(parse(PARSERS["Qwen3Coder"], complete[:20], 4)) == [complete[:20]]


@pytest.mark.parametrize("n_cases", [300, pytest.param(1500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_damaged_calls_are_parsed_without_errors_or_lost_text(name, n_cases):
    """Damaged and truncated calls give the same deltas for any chunk size, and all text of non-calls is returned."""
    rng, parser_class = random.Random(name), PARSERS[name]
    texts = [text for other, text, _ in CASES if other == name.removeprefix("Function") and 0 < len(text) < 400]
    for _ in range(n_cases):
        text = rng.choice(texts)
        for _ in range(rng.randrange(4)):
            at, n = rng.randrange(len(text) + 1), rng.randrange(8)
            text = (
                text[:at]
                + rng.choice([*parser_class.get_marks(), '"', "{", "}", "[", ")", "\\", "'", "\n", "\u00e9"])
                + text[at + n :]
            )
        results = [join_deltas(parse(parser_class, text, size)) for size in (1, 3, len(text) or 1)]
        assert results[0] == results[1] == results[2], text
        if all(each.kind == "text" for each in results[0]) and name not in ("Harmony", "MuseGlimmer"):
            assert "".join("".join(each.text for each in results[0]).split()) == "".join(text.split())


def test_a_template_selects_its_tool_format():
    for parser_class in TOOL_PARSERS:
        for signs in parser_class.template_signs:
            assert find_tool_parser(f"a {' b '.join(signs)} c") is parser_class
    assert find_tool_parser("{{ messages }}") is None
    assert find_tool_parser((FIXTURES / "chat" / "qwen35.jinja").read_text()) is PARSERS["Qwen3Coder"]


def test_parsing_takes_linear_time():
    """Unterminated calls are read once, character by character."""
    xml = "<tool_call>\n<function=weather>\n<parameter=city>\n"
    for name, prefix in (
        ("Qwen3Coder", xml),
        ("LFM2", "<|tool_call_start|>["),
        ("Harmony", "<|channel|>"),
        ("Mistral", "[TOOL_CALLS]"),
        ("GLM", "<tool_call>weather<arg_key>city</arg_key><arg_value>"),
        ("GLM", "<tool_call>"),
    ):
        seconds = []
        for n in (20_000, 80_000):
            start = time.process_time()
            parse(PARSERS[name], prefix + "ab" * n, 3)
            seconds.append(time.process_time() - start)
        assert seconds[1] < 12 * seconds[0] + 0.2, (name, seconds)
