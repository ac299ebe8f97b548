"""Tests of jinja_renderer.py: which characters of a rendered text count as the template's."""

import random
import re

import pytest

pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
import jinja2

from specdec.text.jinja_renderer import Rendering, tojson

# letters of templates are Latin, and those of messages Cyrillic, so that each rendered letter shows where it comes from
MESSAGE = " \u0416\u0438\u0437\u043d\u044c \u0438\n\u0440\u0435\u043a\u0430, \u0438 "
TRACKED = (
    "{} | trim", "{}.strip('a')", "{}.lstrip()", "{}[1:]", "{}[::-1]", "{}[:5]", "{} ~ {}", "{} + {}", "'Ab ' + {}", "{} ~ 'xy'",
    "[{}, 'Sep', {}] | join('-L-')", "{}.split('b') | join", "{}.split()[-1] ~ 'd'", "{}.rsplit(None, 1) | first",
    "{}.splitlines() | last", "{}.partition('b') | join('+')", "{}.rpartition('\u0438')[2]", "{} | upper", "{}.lower()",
    "{} | replace('b', 'Q')", "{}.removeprefix('Ab')", "{} | list | join", "{} | reverse",
    "'<{{}}>'.format('z') ~ {}", "'%s%s' % ('k', 'l') ~ {}", "{} if {} in {} else {}", "{} | string",
    "{} | default('e')", "','.join([{}, 'r'])", "[{}, 'u'][0]", "{{'v': {}}}.v", "({} | last) ~ ({} | first)",
)  # fmt: skip
OTHER = (
    "{} | tojson", "[{}]", "{{{}: 1}} | string", "{} | urlencode", "{} | wordwrap(4)", "{}.encode()", "{} | truncate(4, true)",
    "'%s f' % {}", "'a'.center(9)",
    "'g {{}}'.format({})", "{} | center(30)", "{} * 2", "{} | indent(2, true)", "{} | safe | e",
    "{}.zfill(40)", "{}.replace('\u0438', 'q')",
    "{} | striptags", "{} | wordcount", "{} | format", "{} | replace('', 'h')", "{}.expandtabs()", "{} | list", "{} | title",
)  # fmt: skip


def make_expression(rng: random.Random, operations: tuple[str, ...], depth: int) -> str:
    if depth == 0:
        return rng.choice(["m.content", "'Ab C'", "'b'", "m.role", "x", "'\u0438 '"])
    while True:
        operation = rng.choice(operations)
        expression = operation.format(*[f"({make_expression(rng, operations, depth - 1)})" for _ in range(operation.count("{}"))])
        if len(expression) < 2000:
            return expression


def test_messages_tools_and_options_are_plain_text() -> None:
    source = "<|a|>{{ m }}<|b|>{{ tools }}<|c|>{{ documents[0].text }}{{ d }}{{ messages[0].role }}"
    rendering = Rendering(
        source, {"d": "<|d|>"}, [{"role": "user", "content": "x"}], ["<|t|>"], {"m": "<|m|>", "documents": [{"text": "<|x|>"}]}
    )
    assert rendering.text == "<|a|><|m|><|b|>['<|t|>']<|c|><|x|><|d|>user"
    segments = rendering.get_segments(0, len(rendering.text))
    assert [segment.text for segment in segments if segment.is_message] == ["<|m|>", "['<|t|>']", "<|x|>"]


@pytest.mark.parametrize("is_tracked", [True, False])
def test_only_characters_of_the_source_count_as_the_templates(is_tracked: bool) -> None:
    """The text equals jinja2's own; operations that keep track lose no letter of the template."""
    rng, plain = random.Random(3), jinja2.Environment()
    plain.filters["tojson"] = tojson
    messages, n_letters = [{"role": "user", "content": MESSAGE}], 0
    for _ in range(400):
        expression = make_expression(rng, TRACKED if is_tracked else TRACKED + OTHER, rng.randint(1, 3))
        source = f"{{% for m in messages %}}{{% set s = {expression} %}}{{{{ s }}}}{{% endfor %}}"
        try:
            text = plain.from_string(source).render(messages=messages, x="XyZ")
        except Exception:  # such as an index beyond a string
            continue
        if " at 0x" in text:  # the address of an iterator
            continue
        rendering = Rendering(source, {"x": "XyZ"}, messages)
        assert rendering.text == text, source
        for segment in rendering.get_segments(0, len(text)):
            assert segment.is_message or not re.search("[\u0400-\u0417\u0419-\u0437\u0439-\u04ff]", segment.text), (source, text)
            if is_tracked and segment.is_message:
                assert not re.search("[A-Za-z]", segment.text), (source, text, segment.text)
            n_letters += not segment.is_message
    assert n_letters > 100
