"""Tests of conversations: executed tokens, saving and dropping turns; and of the chat command in pipes and at a terminal."""

import errno
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import specdec
from specdec import Prompt, Sampling, SpeculativeDecoder, Statistics, Step
from specdec.runtime.op_program import Executor

pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec.cli.prompt_sources import MAX_PROMPT_BYTES, read_first_message
from specdec.events import PrefillProgress
from specdec.text.chat_template import ChatTemplate
from specdec.text.conversation import ChatSettings, Conversation
from specdec.text.detokenizer import EventDetokenizer
from specdec.ui.chat import COMMAND_HELP, AnswerView, ChatSession, format_statistics
from specdec.ui.line_editor import LineEditor, read_message
from specdec.ui.plain_views import ModelLabels, SilentView, sanitize
from tests.fakes.terminal import TIMEOUT_S, ShellJob, run_process
from tests.tools.cache_contents import get_cached_tokens, get_idle_and_used_slots
from tests.tools.conversations import (
    N_TOKENS,
    QUESTION,
    make_conversation,  # noqa: F401  (a fixture)
    model,  # noqa: F401  (a fixture)
)
from tests.tools.hf_folders import FIXTURES, edit_config
from tests.tools.package import ROOT
from tests.tools.waiting import wait_until


@pytest.fixture
def pass_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the list of the numbers of tokens of the passes."""
    counts: list[int] = []
    run = Executor.__call__

    def record_and_run(self: Executor, n_tokens: int, *args: Any) -> Any:
        counts.append(n_tokens)
        return run(self, n_tokens, *args)

    monkeypatch.setattr(Executor, "__call__", record_and_run)
    return iter([counts])


def ask_question(conversation: Conversation, question: str = QUESTION) -> list[int]:
    for _ in conversation.ask(question):
        pass
    tokens: list[int] = conversation.messages[-1]["tokens"]
    return tokens


def test_a_turn_runs_only_its_new_tokens(make_conversation: Callable[..., Conversation], pass_sizes: Iterator[list[int]]) -> None:
    """The cache keeps the conversation; also the system prompt after /clear and the question after /regen."""
    conversation, counts = make_conversation(), next(pass_sizes)
    conversation.decoder.warm_up()
    ask_question(conversation)
    for start, n_rewound in (
        (lambda: conversation.ask("And then?"), 0),
        (conversation.regenerate, N_TOKENS),
        (lambda: (conversation.clear(), conversation.ask(QUESTION))[1], None),
    ):
        cached = get_cached_tokens(get_idle_and_used_slots(conversation.decoder)[0][0].caches.target)
        counts.clear()
        events = list(start())
        prompt = next(event.tokens for event in events if isinstance(event, Prompt))
        common = next((i for i, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), min(len(cached), len(prompt)))
        if n_rewound == 0:
            assert common == len(cached) > 40
        elif n_rewound:
            assert common == len(prompt) > 60
        else:
            assert common > 8
        n_generated = sum(len(event.tokens) for event in events if isinstance(event, Step))
        assert sum(counts) == len(prompt) - min(common, len(prompt) - 1) + n_generated - 1  # the last token is never run


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_answers_equal_those_of_decoder_chat_with_any_draft(
    make_conversation: Callable[..., Conversation], temperature: float
) -> None:
    baseline, drafted = make_conversation(temperature=temperature), make_conversation("self", temperature=temperature)
    for question in (QUESTION, "Why?"):
        answer = ask_question(baseline, question)
        assert answer == ask_question(drafted, question)
    messages = [{"role": "system", "content": "Sing."}, *baseline.messages[:-1]]
    events = baseline.decoder.chat(messages, N_TOKENS, Sampling(temperature, 0, 0.9, 5))
    assert answer == [token for event in events if isinstance(event, Step) for token in event.tokens]


def test_a_loaded_conversation_continues_like_the_original(
    make_conversation: Callable[..., Conversation], tmp_path: Path
) -> None:
    conversation, other = make_conversation(temperature=1.0), make_conversation(seed=1)
    ask_question(conversation)
    for _ in conversation.regenerate():
        pass
    conversation.save(tmp_path / "kept")
    conversation.save(tmp_path / "kept")  # a saved conversation may be overwritten
    assert other.load(tmp_path / "kept") == "chat-model"
    assert ask_question(other, "And then?") == ask_question(conversation, "And then?")
    assert other.messages == conversation.messages
    for _ in other.regenerate():
        pass
    assert other.messages[-1] != conversation.messages[-1]
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="is not a saved conversation"):
        conversation.save(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(ValueError, match="expected a saved conversation"):
        other.load(tmp_path)
    with pytest.raises(ValueError, match="cannot write"):
        conversation.save(tmp_path / "nowhere" / "kept")


def test_a_full_context_drops_the_oldest_turns_but_not_the_system_prompt(make_conversation: Callable[..., Conversation]) -> None:
    conversation = make_conversation()
    for i in range(14):
        ask_question(conversation, f"{QUESTION} {i}")
    assert conversation.n_dropped % 2 == 0 and 0 < conversation.n_dropped < len(conversation.messages) == 28
    visible = conversation.get_visible_messages()
    assert visible[0]["role"] == "system" and visible[1]["role"] == "user" and len(visible) > 4
    with pytest.raises(ValueError, match=r"the message has .* the model's context holds 320"):
        ask_question(conversation, "robin " * 400)
    assert len(conversation.messages) == 28  # the question is not kept


def test_an_interrupted_answer_is_kept(make_conversation: Callable[..., Conversation]) -> None:
    conversation = make_conversation()
    events = conversation.ask(QUESTION)
    while not isinstance(next(events), Step):
        pass
    events.close()
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] and conversation.messages[-1]["tokens"]
    unanswered = conversation.ask("And?")
    next(unanswered)
    unanswered.close()
    assert len(conversation.messages) == 2


def test_a_long_prefill_can_be_stopped_and_changes_no_answer(make_conversation: Callable[..., Conversation]) -> None:
    for draft in (None, "self"):
        conversation, other = make_conversation(draft), make_conversation(draft)
        question = "robin " * 200
        prefill = conversation.ask(question)
        assert isinstance(next(prefill), PrefillProgress)
        prefill.close()
        assert conversation.messages == []
        events = list(conversation.ask(question))
        fractions = [event.fraction for event in events if isinstance(event, PrefillProgress)]
        assert len(fractions) > 2 and fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
        answer = other.decoder.chat(conversation.get_visible_messages()[:-1], N_TOKENS, other.settings.make_sampling(0))
        tokens = [token for event in answer if isinstance(event, Step) for token in event.tokens]
        assert tokens == conversation.messages[-1]["tokens"]


def test_a_pickled_decoder_keeps_its_template(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}!")
    decoder = SpeculativeDecoder(model, n_threads=1, template=template)
    messages = [{"role": "user", "content": "robin"}]
    ids = decoder.encode_chat(messages)
    template.unlink()
    assert pickle.loads(pickle.dumps(decoder)).encode_chat(messages) == ids != SpeculativeDecoder(model).encode_chat(messages)


def test_an_answer_ends_before_a_stop_string(make_conversation: Callable[..., Conversation]) -> None:
    conversation = make_conversation()
    ask_question(conversation)
    answer = conversation.messages[-1]["content"]
    stop = answer[len(answer) // 2 :][:3]
    *events, last = conversation.decoder.chat(
        conversation.get_visible_messages()[:-1], N_TOKENS, Sampling(0.7, 0, 0.9, 5), stop=stop
    )
    text = "".join(e.text for e in [*events, last] if isinstance(e, Step))
    assert text == answer[: answer.index(stop)] and isinstance(last, Step) and last.stop_reason == "stop"


def test_an_answer_wraps_at_the_width_of_a_resized_terminal(model: Path) -> None:
    """Rows break between words, no text is lost, and no row ends early."""
    tokenizer, out, width = SpeculativeDecoder(model, n_threads=1).tokenizer, io.StringIO(), 40
    text = "the robin sang\n\nand the cat ran " * 8
    view, detokenizer = AnswerView(out, lambda: width, {}), EventDetokenizer(tokenizer)
    with view:
        for i, token in enumerate(tokenizer.encode(text)):
            width = 40 if i < 30 else 17
            view.show(detokenizer.add_text(Step([token], [], 0, 0.0, 0.0)))
    rows = out.getvalue().split("\n")
    assert out.getvalue().split() == text.split() and max(map(len, rows)) == 30 and max(map(len, rows[-12:])) <= 17
    resized = next(row for row in rows if len(row) > 17)  # the terminal wraps the row that was begun
    assert resized.startswith("and the cat ran the robin sang") or rows.index(resized) == 0


@pytest.mark.parametrize("width", [8, 20, 40])
def test_a_word_longer_than_a_row_is_shown_once(width: int) -> None:
    """Show the first letters of a long word, such as an address, before its end is known."""
    out, pieces = io.StringIO(), ["see", " http", "://", "example", ".org/", "and/so/on/", "to/the/end", " of", " it"]
    with AnswerView(out, lambda: width, {}) as view:
        for piece in pieces:
            view.show(Step([1], [], 0, 0.0, 0.0, pieces=[piece]))
    rows = out.getvalue().split("\n")
    assert "".join(out.getvalue().split()) == "".join("".join(pieces).split()) and max(map(len, rows)) <= width


@pytest.mark.parametrize(("template", "expected"), [("qwen2", "You are Qwen, created by Alibaba"), ("lfm2", ""), ("gemma3", "")])
def test_system_prompt_of_the_template_is_known(
    make_conversation: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch, template: str, expected: str
) -> None:
    conversation = make_conversation(system="")
    source = (FIXTURES / "chat" / f"{template}.jinja").read_text()
    monkeypatch.setattr(SpeculativeDecoder, "chat_template", ChatTemplate(source, "a template", {}))
    found = conversation.template_system_prompt
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_a_damaged_file_does_not_change_a_conversation(make_conversation: Callable[..., Conversation], tmp_path: Path) -> None:
    conversation, path, rng = make_conversation(), tmp_path / "kept", random.Random(1)
    ask_question(conversation)
    conversation.save(path)
    valid = path.read_bytes()
    before = conversation.messages, conversation.settings
    values = (None, -1, 1.5, "x", [], {}, True, 10**30, [[]], "\ud800", "nan")
    messages = []
    for case in range(300):
        if case % 3:
            content = json.loads(valid)
            container = rng.choice([content, content["settings"], *content["messages"]])
            container[rng.choice([*container, "temperature"])] = rng.choice(values)
            path.write_text(json.dumps(content))
        else:
            damaged = bytearray(valid)
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.5 else damaged)
        try:
            conversation.load(path)
            conversation.messages, conversation.settings = before
        except ValueError as error:
            messages.append(str(error))
        assert (conversation.messages, conversation.settings) == before
    assert len(messages) > 150
    assert all(str(path) in message and "\n" not in message for message in messages)
    for changes, expected in (
        ({"messages": {}}, "messages is {}; expected a list"),
        ({"settings": 5}, "settings is 5; expected an object"),
        ({"thinking": "yes"}, "thinking is 'yes'; expected true or false"),
    ):
        path.write_text(json.dumps(json.loads(valid) | changes))
        with pytest.raises(ValueError, match=re.escape(f"{path} is a damaged conversation: {expected}")):
            conversation.load(path)


def test_statistics_of_one_guess_are_in_the_singular() -> None:
    statistics = Statistics()
    statistics.add(Step([1, 2], [1], 1, 0.5, 0.0, pieces=["a", "b"]))
    assert format_statistics(statistics) == "2 tokens, 4 tok/s, 100% of 1 guess right"


def test_invalid_file_names_are_reported_and_settings_shown_in_full(
    make_conversation: Callable[..., Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = make_conversation(seed=2**63 - 1)
    chat = ChatSession(conversation, ModelLabels("a", "b"), plain=True)
    for command, expected in {
        "/save ~nobody-here/x": "home directory of ~nobody-here/x not found",
        "/load ~nobody-here/x": "home directory of ~nobody-here/x not found",
        f"/save {'x' * 300}": "File name too long", f"/load {'x' * 300}": "File name too long",
        "/set": "temperature 0.7, top_p 0.9, top_k 0, seed 9223372036854775807, max_tokens 12, min_p 0.0",
    }.items():  # fmt: skip
        chat.handle_input(command)
        assert expected in capsys.readouterr().err


def test_multi_line_messages() -> None:
    for typed, message in {
        ("hi",): "hi", ("a\\", "b"): "a\nb", ('"""a', 'b"""'): "a\nb", ('"""', "a", '"""'): "a", ('"""a"""',): "a",
        (' """', "a\\", '"""'): "a\\", ('"""a"""\nb',): '"""a"""\nb', ("a\nb\n",): "a\nb",
    }.items():  # fmt: skip
        lines = iter(typed)
        assert read_message(lambda _, lines=lines: next(lines), lambda: False, lambda _: False) == (message, [])  # type: ignore[misc]


def test_pasted_lines_are_one_message() -> None:
    """A paste without bracketed paste: nothing in it is a command except the first or last line."""
    for pasted, message, left in (
        (["def f():", "    return \\", "", "  1"], "def f():\n    return \\\n\n  1", []),
        (['"""A docstring."""', "x = 1"], '"""A docstring."""\nx = 1', []),
        (['"""a', 'b"""'], "a\nb", []),
        (["a", "/etc", "/bye", "b"], "a\n/etc", ["/bye"]),
        (["/bye", "b"], "/bye", []),
    ):
        rest = [*pasted]
        assert read_message(lambda _, rest=rest: rest.pop(0), lambda rest=rest: bool(rest), lambda line: line == "/bye") == (
            message,
            left,
        )  # type: ignore[misc]


OPTIONS = ["-s", 5, "--max-tokens", N_TOKENS, "-j", 1]


def run_piped(arguments: list[object], data: bytes) -> tuple[int, str, str]:
    with run_process(["chat", *OPTIONS, *arguments], stdin=subprocess.PIPE) as process:
        out, errors = process.communicate(data, timeout=TIMEOUT_S)
        return process.returncode, out.decode(), errors.decode()


def test_piped_input_gets_one_answer(model: Path, make_conversation: Callable[..., Conversation]) -> None:
    conversation = make_conversation(system="")
    conversation.settings = ChatSettings(seed=5, max_tokens=N_TOKENS)
    ask_question(conversation)
    answer = conversation.messages[-1]
    code, out, errors = run_piped(["-m", model], QUESTION.encode() + b"\n")
    assert code == 0 and "tok/s" in errors and out.strip() == sanitize(answer["content"]).strip()
    code, out, _ = run_piped([model, "-i", QUESTION, "--json"], b"")
    assert code == 0 and out.count("\n") == 1
    result = json.loads(out)
    assert (result["text"], result["tokens"], result["settings"]["seed"]) == (answer["content"], answer["tokens"], 5)
    assert (result["kv"], result["arithmetic"]) == (conversation.decoder.target.kv, specdec.__arithmetic__)


def test_an_invalid_question_is_reported_in_one_line(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "question.txt"
    for data, words in ((b"\xff", "not valid UTF-8 at byte 0"), (b"a\0b", "binary"), (b"a" * (MAX_PROMPT_BYTES + 1), "16 MiB")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            read_first_message("", str(path))
    code, out, errors = run_piped(["-m", model], b"robin " * 400)
    assert (code, out) == (2, "") and errors.count("\n") == 1 and "context holds 320" in errors


def enter(job: ShellJob, keys: bytes, word: str) -> None:
    """Type keys, and read the terminal up to the word and the next prompt."""
    job.type_keys(keys)
    job.read_until(word=word)
    if b">>> " not in job.raw[job.raw.rindex(word.encode()) :]:
        job.read_until(word=">>> ")


def test_a_chat_at_a_terminal(model: Path, tmp_path: Path) -> None:
    """Covers pasted lines, Ctrl-C during an answer and on a line, commands, history and Ctrl-D."""
    saved = tmp_path / "kept"
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 4000, "-j", 1, "--kv", "f32"]
    with ShellJob(arguments, XDG_STATE_HOME=str(tmp_path), TERM="xterm") as job:
        job.read_until(word=">>> ")
        enter(job, b"/foo\r", "unknown command /foo; /help lists")
        enter(job, b"/set temprature 1\r", "did you mean temperature?")
        enter(job, b"/set max_tokens 5\r", "max_tokens 5")
        enter(job, b"\x1b[200~one\rtwo\r/stats\t\x1b[201~ three\r", "5 tok")
        enter(job, b"\x1b[200~%s\x1b[201~\r" % b"\r".join([b"four five"] * 30), "5 tok")
        enter(job, b"\x1b[A six\r", "[four five four")
        job.resize(40, 12)
        enter(job, b"/stats\r", "arithmetic")
        enter(job, b"/set max_tokens 300\r", "max_tokens 300")
        enter(job, b"typed\x03", "leaves")
        enter(job, b"/save %s\r" % str(saved).encode(), "saved in")
        enter(job, b"/clear\r", "starts over")
        enter(job, b"/regen\r", "no answer yet")
        enter(job, b"/system Sing.\r", "system prompt: Sing.")
        enter(job, b"/load %s\r" % str(saved).encode(), "3 turns from")
        job.type_keys(b"\x04")
        assert int(job.read_report()) == 0
        assert job.is_echoing()
    content = json.loads(saved.read_text())
    long = "\n".join(["four five"] * 30)
    questions = [message["content"] for message in content["messages"] if message["role"] == "user"]
    assert questions == ["one\ntwo\n/stats\t three", long, f"{long} six"]
    assert (content["weights"], content["kv"], content["arithmetic"]) == ("target bf16", "f32", specdec.__arithmetic__)
    history = [json.loads(line) for line in (tmp_path / "specdec" / "history").read_text().splitlines()]
    assert history[:6] == ["/foo", "/set temprature 1", "/set max_tokens 5", *questions]


def test_a_dumb_terminal(model: Path, tmp_path: Path) -> None:
    """Covers an unmarked paste, also during an answer, no escape codes, Ctrl-Z and resume, and words after /bye."""
    saved = tmp_path / "kept"
    with ShellJob(["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1, "--no-history", "-y", "Sing."], TERM="dumb") as job:
        job.read_until(word=">>> ")
        enter(job, b"one\r\rtwo\r", "5 tok")
        job.type_keys(b"half")
        job.read_until(word="half")
        job.type_keys(b"\x1a")
        assert job.read_report() == "stopped"
        job.resume()
        job.read_until(word=">>> half")
        enter(job, b" a line\r", "5 tok")
        enter(job, b"/save %s\r" % str(saved).encode(), "saved in")
        assert not re.search(rb"\x1b\[[0-9;]*m", job.raw)
        job.type_keys(b"/bye now\r")
        assert int(job.read_report()) == 0
    questions = [message["content"] for message in json.loads(saved.read_text())["messages"] if message["role"] == "user"]
    assert questions == ["one\n\ntwo", "half a line"]


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"LC_ALL": "C"}, marks=pytest.mark.campaign),
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
    ],
)
def test_typed_input_is_utf8_in_any_locale(model: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """Characters are typed, deleted, stored in the history and recalled; also in a file name and a system prompt."""
    state, saved = tmp_path / "specdec", tmp_path / "ké"
    state.mkdir()
    (state / "history").write_text('"日é"\n')
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1, "-y", "ü"]
    with ShellJob(arguments, XDG_STATE_HOME=str(tmp_path), TERM="xterm", **environment) as job:
        job.read_until(word=">>> ")
        for keys in ("\x1b[A\r", "aé日x\x7f\x7f\r"):
            enter(job, keys.encode(), "5 tok")
        enter(job, f"/save {tmp_path}/k\r".encode(), "saved in")
        enter(job, f"/save {saved}\r".encode(), "saved in")
        enter(job, f"/load {saved}\r".encode(), "2 turns from")
        job.type_keys(b"\x04")
        assert int(job.read_report()) == 0
        assert b"Traceback" not in job.raw
    content = json.loads(saved.read_bytes())
    assert (content["system"], [m["content"] for m in content["messages"][::2]]) == ("ü", ["日é", "aé"])
    assert [json.loads(line) for line in (state / "history").read_text().splitlines()][:2] == ["日é", "aé"]


def test_invalid_utf8_is_decoded_by_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, text in (("iso8859-1", "dé日"), ("utf-8", "d\udce9"), ("ascii", "d\udce9")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        lines, typed = LineEditor(None, lambda _: False, lambda _: [], is_bold=False), ["d\udce9", "dé日"]
        monkeypatch.setattr("builtins.input", lambda _, typed=typed: typed.pop(0))
        assert (lines.read(), lines.read()) == (text.removesuffix("日"), "dé日")


def test_tab_completes_a_command_and_is_literal_in_a_message(
    make_conversation: Callable[..., Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    chat = ChatSession(make_conversation(), ModelLabels("a", "b"), plain=True)
    complete = chat.get_completions
    for name in ("one talk", "onetwo/", ".hidden", "o\x1b[2J"):
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    for line, completions in {
        "/s": ["/save ", "/set ", "/stats", "/system "], "/he": ["/help"], "/no": [], "/system ": [], "/clear ": [],
        "/set t": ["/set temperature ", "/set top_p ", "/set top_k "],
        f"/load {tmp_path}/": [f"/load {tmp_path}/{name}" for name in ("one talk", "onetwo/")],
        f"/save {tmp_path}/.": [f"/save {tmp_path}/.hidden"], f"/load {tmp_path}/nowhere/": [], "/load ~nobody-here/": [],
    }.items():  # fmt: skip
        assert complete(line) == completions
    LineEditor(None, chat.is_command, complete, is_bold=False)
    complete_word = readline.get_completer()
    for line, word, expected in (
        (f"/load {tmp_path}/one t", "t", ["talk"]), ("/sy", "/sy", ["/system "]), ("é /s", "/s", ["/s\t"]), ("a ", "", ["\t"]),
    ):  # fmt: skip
        editor = SimpleNamespace(get_line_buffer=lambda line=line: f"{line} x", get_endidx=lambda line=line: len(line.encode()))
        monkeypatch.setattr("specdec.ui.line_editor.editor", editor)
        completed = [complete_word(word, i) for i in range(2)]
        assert completed == [*expected, None]


def test_a_conversation_survives_its_terminal(model: Path, tmp_path: Path) -> None:
    """Covers a first message from a file, a closed terminal, and the next session; nothing is kept with --no-history."""
    question = tmp_path / "question.txt"
    question.write_text("/usr/bin is\n" + "what? " * 20)
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1]
    last = tmp_path / "specdec" / "last-talk"
    with ShellJob([*arguments, "-i", "Say:", "-f", question, "--no-history"], XDG_STATE_HOME=str(tmp_path)) as job:
        job.read_until(word="5 tok")
        enter(job, b"/load\r", "name is missing")
    assert not last.exists()
    with ShellJob([*arguments, "-i", "Say:", "-f", question], XDG_STATE_HOME=str(tmp_path)) as job:
        job.read_until(word="5 tok")
        os.kill(job.pid, signal.SIGHUP)
        assert int(job.read_report()) == 128 + signal.SIGHUP
    content = json.loads(last.read_text())
    assert content["messages"][0]["content"] == "Say:\n\n" + question.read_text().strip()
    assert last.stat().st_mode & 0o777 == 0o600
    with ShellJob(arguments, XDG_STATE_HOME=str(tmp_path)) as job:
        job.read_until(word="/load continues the last conversation")
        enter(job, b"/load\r", "1 turn from the last conversation")
        enter(job, b"/save %s\r" % str(tmp_path / "kept").encode(), "saved in")
    assert json.loads((tmp_path / "kept").read_text()) == content


def test_a_view_shows_only_the_answer(make_conversation: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendered conversation is not shown."""
    conversation, view = make_conversation(), SilentView()
    chat = ChatSession(conversation, ModelLabels("a", "b"), plain=True)
    monkeypatch.setattr(chat, "make_view", lambda statistics: view)
    chat.handle_input(QUESTION)
    assert view.text == conversation.messages[-1]["content"]


def test_a_terminal_lost_during_an_answer_loses_no_message(
    make_conversation: Callable[..., Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = make_conversation()
    chat = ChatSession(conversation, ModelLabels("a", "b"), plain=True)
    path = chat.last_conversation_path = tmp_path / "state" / "last-talk"

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    chat.handle_input(QUESTION)
    with monkeypatch.context() as patch:
        patch.setattr(AnswerView, "_end_rows", fail)
        patch.setattr(AnswerView, "show", lambda _, event: fail() if isinstance(event, Step) else None)
        with pytest.raises(OSError, match="Input/output"):
            chat.handle_input("And then?")
    messages = json.loads(path.read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == [QUESTION, "And then?"]
    assert messages[3]["tokens"]
    chat.handle_input("/clear")
    chat.handle_input("robin " * 400)  # too long for the context
    assert json.loads(path.read_text())["messages"] == messages


def test_a_full_disk_damages_neither_history_nor_saved_conversation(
    make_conversation: Callable[..., Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, saved, history = make_conversation(), tmp_path / "kept", tmp_path / "history"
    conversation.save(saved)
    history.write_text('"one"\n')
    before = saved.read_text()
    lines = LineEditor(history, lambda _: False, lambda _: [], is_bold=False)
    typed = ["two", "x" * 100_000, "two"]  # the second is too long for the history
    monkeypatch.setattr("builtins.input", lambda _: typed.pop(0))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        lines.read()
        with pytest.raises(ValueError, match="kept: No space left on device"):
            conversation.save(saved)
    assert (history.read_text(), saved.read_text()) == ('"one"\n', before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history", "kept"]
    lines.read()
    lines.read()
    assert history.read_text() == '"one"\n"two"\n'


def test_a_mistyped_command_is_reported_with_a_suggestion(model: Path) -> None:
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1, "--no-history"]
    with ShellJob(arguments, TERM="xterm") as job:
        job.read_until(word=">>> ")
        for typed, expected in (
            (b"/setting\r", "did you mean /set?"),
            (b"/clear this up\r", "/clear takes no words"),
            (b"/set seed 1.5\r", "expected a whole number"),
        ):
            enter(job, typed, expected)
        job.type_keys(b"/quit\r")
        assert job.read_report() == "0"


def test_the_list_of_commands_fits_a_terminal() -> None:
    assert max(map(len, COMMAND_HELP)) + 2 + max(map(len, COMMAND_HELP.values())) < 80


def test_ctrl_c_stops_an_answer_and_the_chat_continues(model: Path, tmp_path: Path) -> None:
    endless = edit_config(Path(shutil.copytree(model, tmp_path / "endless")), max_position_embeddings=100_000)
    with ShellJob(
        ["chat", "-m", endless, "-s", 5, "--max-tokens", 90_000, "-j", 1, "--no-history", "-i", "hi"], TERM="xterm"
    ) as job:
        job.read_until(word=">>> hi\x1b[0m\r\n")
        wait_until(lambda: (job.read_until(), len(job.raw.split(b">>> hi\x1b[0m\r\n")[1]) > 100)[1])  # until an answer starts
        enter(job, b"\x03", "interrupted")
        enter(job, b"/save %s\r" % str(tmp_path / "kept").encode(), "saved in")
        job.type_keys(b"/bye\r")
        assert int(job.read_report()) == 0
    assert json.loads((tmp_path / "kept").read_text())["messages"][1]["tokens"]
    assert not (tmp_path / "specdec").exists()


def test_script_draws_animation_of_a_chat(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "chat.svg"
    subprocess.run([sys.executable, ROOT / "docs/chat_picture.py", model, out], check=True, capture_output=True)
    for path in (out, ROOT / "docs/chat.svg"):
        texts = [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        assert "@keyframes" in path.read_text(encoding="utf-8") and path.stat().st_size < 1 << 20
        assert [text for text in texts if text.startswith(">>> ")] == [
            ">>> Write three sentences about the sea.",
            ">>> Now repeat them, each on its own line.",
        ]
        assert len([text for text in texts if re.search(r"^\d+ tokens?, .* tok/s", text)]) == 2
