"""Sources of chat templates with thoughts."""

import pytest

from specdec import SpeculativeDecoder, Step
from specdec.server.engine_thread import EngineThread
from specdec.server.infill import INFILL_MARKS
from specdec.text.reasoning import HARMONY_MARKS, MUSE_GLIMMER_MARKS, TemplateMarks
from tests.fakes.server import make_app
from tests.tools.model_folders import make_chat_folder

THINK = TemplateMarks("<think>", "</think>")


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{BODY}<|im_end|>\n{% endfor %}"


START = "{% if add_generation_prompt %}<|im_start|>assistant\n{END}{% endif %}"


OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def make_source(body="{{ m.content }}", end=""):
    return TURNS.replace("{BODY}", body) + START.replace("{END}", end)


THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"


SPLIT = "{% set c = m.content.split('</think>')[-1] %}{{ c }}"


LAGUNA_END = "{{ '<think>' if enable_thinking else '</think>' }}"


SOURCES = {
    "Qwen3": (make_source(THOUGHT, OFF), THINK),
    "GLM 4": (make_source("<think>{{ m.reasoning_content or '' }}</think>\n{{ m.content }}"), THINK),
    "Laguna": (
        make_source("{{ '<think>\n' ~ m.reasoning_content ~ '\n' if m.reasoning_content }}</think>\n{{ m.content }}", LAGUNA_END),
        THINK,
    ),
    "R1": (make_source(SPLIT, "<think>\n"), THINK),
    "SmolLM3": (make_source(end="{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}"), THINK),
    "Ministral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{% if m.reasoning_content %}"
        "[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}</s>{% endif %}{% endfor %}",
        TemplateMarks("[THINK]", "[/THINK]"),
    ),
    "Seed-OSS": (
        make_source("{% if m.reasoning_content %}\n<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}{{ m.content }}"),
        TemplateMarks("<seed:think>", "</seed:think>"),
    ),
    "Gemma 4": (
        make_source(
            "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}{{ m.content }}"
        ),
        TemplateMarks("<|channel>thought", "<channel|>"),
    ),
    "gpt-oss": (make_source("<|channel|>final<|message|>{{ m.content }}{{ m.thinking }}"), HARMONY_MARKS),
    "Muse Glimmer": (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.reasoning_content %} to=self<|message|>{{ m.reasoning_content }}"
        "<|eom|><|start|>assistant{% endif %}{{ ' to=user' if m.role == 'assistant' }}<|message|>{{ m.content }}<|eot|>"
        "{% endfor %}{{ '<|start|>assistant' if add_generation_prompt }}",
        MUSE_GLIMMER_MARKS,
    ),
    "no thoughts": (make_source(), None),
    "raises": (make_source("{% if m.reasoning_content %}{{ raise_exception('no') }}{% endif %}{# </think> #}"), THINK),
    "reasoning without marks": (make_source("{{ m.reasoning_content }}{{ m.content }}"), None),
}


TOOLS = "{% if tools %}<tool_call>{% endif %}"


def split_steps(text, size, stop_reason="eos", draft_seconds=0.0):
    """Return the steps of a generation that outputs `size` characters of a text each, and then stops."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    steps = [Step([1], [], 0, draft_seconds, 0.0, pieces=[piece]) for piece in pieces]
    return [*steps, Step([], [], 0, 0.0, 0.0, stop_reason, pieces=[""])]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """Return the app of a random model that opens its thoughts itself or in the prompt, by the template, and its template."""
    marks = ("<think>", "</think>", *INFILL_MARKS[0])
    path = make_chat_folder(tmp_path_factory.mktemp("thinking") / "talker", "{{ messages[0].content }}", marks)
    decoder = SpeculativeDecoder(path, "lookup", n_threads=1, gamma=4)
    scheduler = EngineThread(decoder, 4, 32, 10**8)
    yield make_app(decoder, scheduler), decoder.chat_template
    scheduler.close(0.0)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    return SpeculativeDecoder(make_chat_folder(tmp_path_factory.mktemp("talk") / "talker"), n_threads=1)
