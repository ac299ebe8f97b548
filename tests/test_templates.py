"""templates.py: transformers' text to the byte, ids that nobody's typing commands, and templates that mean harm."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.tokenizer import Tokenizer
from tests.folders import FIXTURES

pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec import templates
from specdec.templates import LLAMA2, ChatTemplate, TemplateError, template_of
from specdec.tokenizer_json import JsonTokenizer
from tests.test_tokenizer_json import oracle

CHATS = FIXTURES / "chat"
CASES = json.loads((CHATS / "rendered.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "hi"}]


def template(name: str) -> ChatTemplate:
    source = LLAMA2 if name == "built in" else (CHATS / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, name, CASES["llama2" if name == "built in" else name]["variables"])


def library_of(name: str) -> JsonTokenizer:
    return JsonTokenizer(FIXTURES / "tokenizers" / f"{name}.json")


@pytest.mark.parametrize("name", [*CASES, "built in"])
def test_prompts_are_those_of_transformers_to_the_byte(name: str) -> None:
    cases = CASES["llama2" if name == "built in" else name]["chats"]
    assert template(name).render([case["messages"] for case in cases]) == [case["text"] for case in cases]


@pytest.mark.parametrize("name", CASES)
def test_ids_are_the_texts_and_what_is_typed_commands_nothing(name: str) -> None:
    """Without names of special tokens in messages they are the library's own; with them, the ids still say the text."""
    library = library_of(name)
    for case in CASES[name]["chats"]:
        ids = template(name).encode(library, case["messages"])
        names = [library.name(token) if token in library.specials.values() else None for token in ids]
        n_marks = sum(name is not None for name in names)
        plain = [m | {"content": "".join(c for c in m["content"] if c not in "<|>/")} for m in case["messages"]]
        ids_of_plain = template(name).encode(library, plain)
        assert n_marks == sum(token in library.specials.values() for token in ids_of_plain)
        text = template(name).render([plain])[0]
        assert ids_of_plain == oracle(name).encode(text, add_special_tokens=False).ids
        said = b"".join(
            (mark or "").encode() if mark else library.says(token) or b"" for token, mark in zip(ids, names, strict=True)
        )
        if name in ("smollm2", "qwen2", "llama3"):
            assert said.decode() == case["text"]


def test_an_answers_own_tokens_stay_as_long_as_they_say_the_text() -> None:
    library = library_of("smollm2")
    spelled = [token for letter in "the river" for token in library.encode(letter)]  # as the library never would
    answer = {"role": "assistant", "content": "the river", "tokens": spelled}
    before = template("smollm2").encode(library, USER)
    ids = template("smollm2").encode(library, [*USER, answer, *USER])
    assert ids[: len(before) + len(spelled)] == before + spelled
    other = template("smollm2").encode(library, [*USER, answer | {"content": "a river"}, *USER])
    assert other == template("smollm2").encode(library, [*USER, {"role": "assistant", "content": "a river"}, *USER])


def test_what_is_kept_of_a_talk_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn by turn, after an earlier message has changed, in several requests, and where no beginning begins the whole."""
    monkeypatch.setattr(templates, "RENDERED_AT_ONCE", 3)
    library = library_of("smollm2")
    talk: list[dict[str, Any]] = []
    kept, counting, plainly = (template("smollm2") for _ in range(3))
    counting.source = "{{ messages | length }}" + counting.source
    for i in range(6):
        talk += [{"role": "user", "content": f"hi {i}"}]
        talk[0] = {"role": "user", "content": "hi" if i < 4 else "ho"}
        ids = template("smollm2").encode(library, talk)
        assert kept.encode(library, talk) == kept.encode(library, talk) == ids
        plain = plainly.encode(library, [{"role": message["role"], "content": message["content"]} for message in talk])
        assert counting.encode(library, talk)[-40:] == plain[-40:] and (ids != plain) == (i > 0)
        spelled = [token for letter in f"the river {i}" for token in library.encode(letter)]
        talk += [{"role": "assistant", "content": f"the river {i}", "tokens": spelled}]


def test_llama2_exports_have_a_template_and_their_marks(tokenizer: Tokenizer) -> None:
    ids = ChatTemplate(LLAMA2, "here", {"bos_token": "<s>", "eos_token": "</s>"}).encode(
        tokenizer, [*USER, {"role": "assistant", "content": "</s>"}, *USER]
    )
    assert [token for token in ids if token in (1, 2)] == [1, 2, 1]
    assert ids[1:3] == tokenizer.encode("[I")[1:3]


def failure(source: str, messages: Any = USER) -> str:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, "here", {}).render([messages])
    message = str(caught.value)
    assert message.startswith("here: ")
    assert "\n" not in message and len(message) < 320
    return message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no\n system') }}", "the template says: no system"),
        ("{% for %}", "line 1 of the template"),
        ("{{ ''.__class__.__mro__ }}", "what a sandbox forbids"),
        ("{{ messages.append(1) }}", "what a sandbox forbids"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{% set s = namespace(t='a') %}{% for i in range(60) %}{% set s.t = s.t ~ s.t %}{% endfor %}", "memory"),
        ("{% for i in range(400) %}{{ 'a' * 100000 }}{% endfor %}", "characters"),
    ],
)
def test_a_template_that_fails_is_told_in_a_line(source: str, words: str) -> None:
    assert words in failure(source)


def test_a_template_that_writes_nothing_is_told() -> None:
    with pytest.raises(TemplateError, match="here: the template makes nothing of the messages"):
        ChatTemplate("{% if 0 %}x{% endif %}", "here", {}).encode(library_of("smollm2"), USER)


def test_a_template_that_loops_is_ended_and_the_next_one_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "PATIENCE_SECONDS", 0.5)
    endless = "{% if messages %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}x"
    looping = ChatTemplate(endless, "here", {})
    with pytest.raises(TemplateError, match="not done after"):
        looping.render([USER])
    monkeypatch.setattr(templates, "PATIENCE_SECONDS", 30)
    assert looping.render([[]]) == ["x"]


@pytest.mark.parametrize(
    "messages", [[], "hi", [1], [{"role": "user"}], [{"role": "user", "content": "\ud800"}], {"role": "user"}]
)
def test_what_are_no_messages_is_refused(messages: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="messages"):
        template("smollm2").encode(library_of("smollm2"), messages)


def test_a_template_is_found_where_models_have_it(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "A{{ bos_token }}"}], "bos_token": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = template_of(None, tmp_path / "tokenizer.json")
    assert found.render([USER]) == ["A<b>"]
    (tmp_path / "chat_template.jinja").write_text("B{{ bos_token }}")
    assert template_of(None, tmp_path / "tokenizer.json").render([USER]) == ["B<b>"]
    mine = tmp_path / "mine"
    mine.write_text("C")
    assert template_of(None, tmp_path / "tokenizer.json", mine).render([USER]) == ["C"]
    mine.write_bytes(b"\xff")
    with pytest.raises(TemplateError, match="no UTF-8"):
        template_of(None, tmp_path / "tokenizer.json", mine)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TemplateError, match="--template"):
        template_of(None, tmp_path / "tokenizer.json")
