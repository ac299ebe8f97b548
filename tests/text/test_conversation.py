"""Conversations: what a turn runs, what is kept, saved and dropped; and the command in pipes and at a terminal."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specdec
from specdec import Prompt, Sampling, SpeculativeDecoder, Step
from specdec.runtime.program import Runner

pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec.cli.prompts import MOST_BYTES, message_of
from specdec.engine.decoding import Prefill
from specdec.text.conversation import Conversation, Settings
from specdec.text.detokenizer import Wording
from specdec.ui.chat import HELP, AnswerView, Chat
from specdec.ui.line_editor import Lines, whole
from specdec.ui.output import Roles, SilentView, printable
from tests.fakes.terminal import LONGEST, Job, started, wait_until
from tests.test_end_to_end import folder
from tests.tools.hf_folders import FIXTURES, configure

QUESTION = "Where did the robin go?"
N_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder(tmp_path_factory.mktemp("chat") / "talker", positions=320)
    (path / "chat_template.jinja").write_bytes((FIXTURES / "chat" / "smollm2.jinja").read_bytes())
    (path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    return path


@pytest.fixture
def talk(model: Path) -> Callable[..., Conversation]:
    def new(draft: str | None = None, system: str = "Sing.", **settings: Any) -> Conversation:
        decoder = SpeculativeDecoder(model, draft, n_threads=1, gamma=4)
        return Conversation(decoder, system, Settings(**{"max_tokens": N_TOKENS, "seed": 5} | settings), "talker")

    return new


@pytest.fixture
def n_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens each pass ran."""
    counts: list[int] = []
    run = Runner.__call__

    def counting(self: Runner, n_tokens: int, *more: Any) -> Any:
        counts.append(n_tokens)
        return run(self, n_tokens, *more)

    monkeypatch.setattr(Runner, "__call__", counting)
    return iter([counts])


def said(conversation: Conversation, question: str = QUESTION) -> list[int]:
    for _ in conversation.ask(question):
        pass
    tokens: list[int] = conversation.messages[-1]["tokens"]
    return tokens


def test_a_turn_runs_its_own_tokens_alone(talk: Callable[..., Conversation], n_run: Iterator[list[int]]) -> None:
    """What was said stays in the cache, token by token; so do the system prompt after /clear, the question after /regen."""
    conversation, counts = talk(), next(n_run)
    conversation._decoder.warm_up()
    said(conversation)
    for act, ahead in (
        (lambda: conversation.ask("And then?"), 0),
        (conversation.regenerate, N_TOKENS),
        (lambda: (conversation.clear(), conversation.ask(QUESTION))[1], None),
    ):
        held = conversation._decoder.target._held[:]
        counts.clear()
        events = list(act())
        prompt = next(event.tokens for event in events if isinstance(event, Prompt))
        common = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))
        if ahead == 0:
            assert common == len(held) > 40
        elif ahead:
            assert common == len(prompt) > 60
        else:
            assert common > 8
        n_said = sum(len(event.tokens) for event in events if isinstance(event, Step))
        assert sum(counts) == len(prompt) - min(common, len(prompt) - 1) + n_said - 1  # the last token is never run


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_answers_are_the_same_with_any_draft_and_by_the_library(talk: Callable[..., Conversation], temperature: float) -> None:
    alone, guessed = talk(temperature=temperature), talk("self", temperature=temperature)
    for question in (QUESTION, "Why?"):
        answer = said(alone, question)
        assert answer == said(guessed, question)
    messages = [{"role": "system", "content": "Sing."}, *alone.messages[:-1]]
    events = alone._decoder.chat(messages, N_TOKENS, Sampling(temperature, 0, 0.9, 5))
    assert answer == [token for event in events if isinstance(event, Step) for token in event.tokens]


def test_a_saved_conversation_goes_on_as_it_would_have(talk: Callable[..., Conversation], tmp_path: Path) -> None:
    conversation, other = talk(temperature=1.0), talk(seed=1)
    said(conversation)
    for _ in conversation.regenerate():
        pass
    conversation.save(tmp_path / "kept")
    conversation.save(tmp_path / "kept")  # over itself it may
    assert other.load(tmp_path / "kept") == "talker"
    assert said(other, "And then?") == said(conversation, "And then?")
    assert other.messages == conversation.messages
    for _ in other.regenerate():
        pass
    assert other.messages[-1] != conversation.messages[-1]
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="no saved conversation"):
        conversation.save(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(ValueError, match="expected a saved conversation"):
        other.load(tmp_path)
    with pytest.raises(ValueError, match="cannot write"):
        conversation.save(tmp_path / "nowhere" / "kept")


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_prompt(talk: Callable[..., Conversation]) -> None:
    conversation = talk()
    for i in range(14):
        said(conversation, f"{QUESTION} {i}")
    assert conversation.n_dropped % 2 == 0 and 0 < conversation.n_dropped < len(conversation.messages) == 28
    seen = conversation._seen()
    assert seen[0]["role"] == "system" and seen[1]["role"] == "user" and len(seen) > 4
    with pytest.raises(ValueError, match=r"the message has .* the model's context holds 320"):
        said(conversation, "robin " * 400)
    assert len(conversation.messages) == 28  # and the question is forgotten


def test_what_was_said_until_an_interrupt_is_kept(talk: Callable[..., Conversation]) -> None:
    conversation = talk()
    events = conversation.ask(QUESTION)
    while not isinstance(next(events), Step):
        pass
    events.close()
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] and conversation.messages[-1]["tokens"]
    unheard = conversation.ask("And?")
    next(unheard)
    unheard.close()
    assert len(conversation.messages) == 2


def test_a_long_reading_can_be_stopped_and_changes_no_answer(talk: Callable[..., Conversation]) -> None:
    for draft in (None, "self"):
        conversation, other = talk(draft), talk(draft)
        question = "robin " * 200
        reading = conversation.ask(question)
        assert isinstance(next(reading), Prefill)
        reading.close()
        assert conversation.messages == []
        events = list(conversation.ask(question))
        shares = [event.share for event in events if isinstance(event, Prefill)]
        assert len(shares) > 2 and shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
        answer = other._decoder.chat(conversation._seen()[:-1], N_TOKENS, other.settings.sampling(0))
        tokens = [token for event in answer if isinstance(event, Step) for token in event.tokens]
        assert tokens == conversation.messages[-1]["tokens"]


def test_a_decoder_that_was_sent_keeps_its_template(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}!")
    decoder = SpeculativeDecoder(model, n_threads=1, template=template)
    messages = [{"role": "user", "content": "robin"}]
    ids = decoder.encode_chat(messages)
    template.unlink()
    assert pickle.loads(pickle.dumps(decoder)).encode_chat(messages) == ids != SpeculativeDecoder(model).encode_chat(messages)


def test_an_answer_ends_before_a_stop_string(talk: Callable[..., Conversation]) -> None:
    conversation = talk()
    said(conversation)
    answer = conversation.messages[-1]["content"]
    stop = answer[len(answer) // 2 :][:3]
    *events, last = conversation._decoder.chat(conversation._seen()[:-1], N_TOKENS, Sampling(0.7, 0, 0.9, 5), stop=stop)
    text = "".join(e.text for e in [*events, last] if isinstance(e, Step))
    assert text == answer[: answer.index(stop)] and isinstance(last, Step) and last.stop_reason == "stop"


def test_an_answer_goes_on_in_the_width_that_a_terminal_gets(model: Path) -> None:
    """Between words, and nothing of the text is lost."""
    tokenizer, out, width = SpeculativeDecoder(model, n_threads=1).tokenizer, io.StringIO(), 40
    words = "the robin sang\n\nand the cat ran " * 8
    view, wording = AnswerView(out, lambda: width, {}), Wording(tokenizer)
    with view:
        for i, token in enumerate(tokenizer.encode(words)):
            width = 40 if i < 30 else 17
            view.show(wording.of(Step([token], [], 0, 0.0, 0.0)))
    rows = out.getvalue().split("\n")
    assert out.getvalue().split() == words.split() and max(map(len, rows)) == 30 and max(map(len, rows[-12:])) <= 17


@pytest.mark.parametrize("width", [8, 20, 40])
def test_a_word_that_outgrows_its_row_is_shown_once(width: int) -> None:
    """As an address is, the first letters of which had their place before its end was known."""
    out, pieces = io.StringIO(), ["see", " http", "://", "example", ".org/", "and/so/on/", "to/the/end", " of", " it"]
    with AnswerView(out, lambda: width, {}) as view:
        for piece in pieces:
            view.show(Step([1], [], 0, 0.0, 0.0, pieces=[piece]))
    rows = out.getvalue().split("\n")
    assert "".join(out.getvalue().split()) == "".join("".join(pieces).split()) and max(map(len, rows)) <= width


def test_no_damaged_file_changes_a_conversation(talk: Callable[..., Conversation], tmp_path: Path) -> None:
    conversation, path, rng = talk(), tmp_path / "kept", random.Random(1)
    said(conversation)
    conversation.save(path)
    sound = path.read_bytes()
    before = conversation.messages, conversation.settings
    values = (None, -1, 1.5, "x", [], {}, True, 10**30, [[]], "\ud800", "nan")
    refusals = []
    for case in range(300):
        if case % 3:
            content = json.loads(sound)
            where = rng.choice([content, content["settings"], *content["messages"]])
            where[rng.choice([*where, "temperature"])] = rng.choice(values)
            path.write_text(json.dumps(content))
        else:
            damaged = bytearray(sound)
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.5 else damaged)
        try:
            conversation.load(path)
            conversation.messages, conversation.settings = before
        except ValueError as error:
            refusals.append(str(error))
        assert (conversation.messages, conversation.settings) == before
    assert len(refusals) > 150
    assert all(str(path) in refusal and "\n" not in refusal for refusal in refusals)


def test_names_of_no_file_are_told_and_settings_shown_whole(
    talk: Callable[..., Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = talk(seed=2**63 - 1)
    chat = Chat(conversation, Roles("a", "b"), plain=True)
    for command, told in {
        "/save ~nobody-here/x": "no home ~nobody-here/x", "/load ~nobody-here/x": "no home ~nobody-here/x",
        f"/save {'x' * 300}": "File name too long", f"/load {'x' * 300}": "File name too long",
        "/set": "temperature 0.7, top_p 0.9, top_k 0, seed 9223372036854775807, max_tokens 12, min_p 0.0",
    }.items():  # fmt: skip
        chat._obey(command)
        assert told in capsys.readouterr().err


def test_a_message_of_several_lines() -> None:
    for typed, message in {
        ("hi",): "hi", ("a\\", "b"): "a\nb", ('"""a', 'b"""'): "a\nb", ('"""', "a", '"""'): "a", ('"""a"""',): "a",
        (' """', "a\\", '"""'): "a\\", ('"""a"""\nb',): '"""a"""\nb', ("a\nb\n",): "a\nb",
    }.items():  # fmt: skip
        lines = iter(typed)
        assert whole(lambda _, lines=lines: next(lines), lambda: False, lambda _: False) == (message, [])  # type: ignore[misc]


def test_lines_that_come_at_once_are_one_message() -> None:
    """A paste where no terminal says so: nothing in it is obeyed, but for a command as the first line or the last."""
    for pasted, message, left in (
        (["def f():", "    return \\", "", "  1"], "def f():\n    return \\\n\n  1", []),
        (['"""A docstring."""', "x = 1"], '"""A docstring."""\nx = 1', []),
        (['"""a', 'b"""'], "a\nb", []),
        (["a", "/etc", "/bye", "b"], "a\n/etc", ["/bye"]),
        (["/bye", "b"], "/bye", []),
    ):
        rest = [*pasted]
        assert whole(lambda _, rest=rest: rest.pop(0), lambda rest=rest: bool(rest), lambda line: line == "/bye") == (
            message,
            left,
        )  # type: ignore[misc]


OPTIONS = ["-s", 5, "--max-tokens", N_TOKENS, "-j", 1]


def piped(arguments: list[object], data: bytes) -> tuple[int, str, str]:
    with started(["chat", *OPTIONS, *arguments], stdin=subprocess.PIPE) as process:
        out, errors = process.communicate(data, timeout=LONGEST)
        return process.returncode, out.decode(), errors.decode()


def test_a_pipe_is_answered_once(model: Path, talk: Callable[..., Conversation]) -> None:
    conversation = talk(system="")
    conversation.settings = Settings(seed=5, max_tokens=N_TOKENS)
    said(conversation)
    answer = conversation.messages[-1]
    code, out, errors = piped(["-m", model], QUESTION.encode() + b"\n")
    assert code == 0 and "tok/s" in errors and out.strip() == printable(answer["content"]).strip()
    code, out, _ = piped([model, "-i", QUESTION, "--json"], b"")
    assert code == 0 and out.count("\n") == 1
    told = json.loads(out)
    assert (told["text"], told["tokens"], told["settings"]["seed"]) == (answer["content"], answer["tokens"], 5)
    assert (told["kv"], told["arithmetic"]) == (conversation._decoder.target.kv, specdec.__arithmetic__)


def test_what_is_no_question_is_told_in_a_line(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "question.txt"
    for data, words in ((b"\xff\xfe", "not valid UTF-8 at byte 0"), (b"a\0b", "binary"), (b"a" * (MOST_BYTES + 1), "16 MiB")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            message_of("", str(path))
    code, out, errors = piped(["-m", model], b"robin " * 400)
    assert (code, out) == (2, "") and errors.count("\n") == 1 and "context holds 320" in errors


def test_a_talk_at_a_terminal(model: Path, tmp_path: Path) -> None:
    """Pasted lines are one message, Ctrl-C stops an answer and clears a line, commands, history, Ctrl-D."""
    kept = tmp_path / "kept"
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 4000, "-j", 1, "--kv", "f32"]
    with Job(arguments, XDG_STATE_HOME=str(tmp_path), TERM="xterm") as job:
        job.read_until(word=">>> ")

        def enter(keys: bytes, word: str) -> None:
            job.type(keys)
            job.read_until(word=word)
            if ">>> " not in job.raw[job.raw.rindex(word.encode()) :].decode():
                job.read_until(word=">>> ")

        enter(b"/foo\r", "no command /foo; /help lists")
        enter(b"/set max_tokens 5\r", "max_tokens 5")
        enter(b"\x1b[200~one\ntwo\x1b[201~\r", "5 tok")
        job.resize(40, 12)
        enter(b"/stats\r", "arithmetic")
        enter(b"/set max_tokens 300\r", "max_tokens 300")
        enter(b"typed\x03", "leaves")
        enter(b"/save %s\r" % str(kept).encode(), "saved in")
        enter(b"/clear\r", "anew")
        enter(b"/regen\r", "no answer yet")
        enter(b"/system Sing.\r", "system prompt: Sing.")
        enter(b"/load %s\r" % str(kept).encode(), "1 turn from")
        job.type(b"\x04")
        assert int(job.report()) == 0
        assert job.echoes()
    content = json.loads(kept.read_text())
    assert content["messages"][0]["content"] == "one\ntwo"
    assert (content["weights"], content["kv"], content["arithmetic"]) == ("target bf16", "f32", specdec.__arithmetic__)
    history = [json.loads(line) for line in (tmp_path / "specdec" / "history").read_text().splitlines()]
    assert history[:3] == ["/foo", "/set max_tokens 5", "one\ntwo"]


def test_a_terminal_that_knows_nothing(model: Path, tmp_path: Path) -> None:
    """A paste that it does not mark is one message, also in an answer's place; no codes; Ctrl-Z and back; words behind /bye."""
    kept = tmp_path / "kept"
    with Job(["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1, "--no-history", "-y", "Sing."], TERM="dumb") as job:
        job.read_until(word=">>> ")
        job.type(b"one\r\rtwo\r")
        job.read_until(word="5 tok")
        wait_until(lambda: (job.read_until(), job.raw.endswith(b">>> "))[1])
        job.type(b"half")
        job.read_until(word="half")
        job.type(b"\x1a")
        assert job.report() == "stopped"
        job.go_on()
        job.read_until(word=">>> half")
        job.type(b" a line\r")
        job.read_until(word="5 tok")
        wait_until(lambda: (job.read_until(), job.raw.endswith(b">>> "))[1])
        job.type(b"/save %s\r" % str(kept).encode())
        job.read_until(word="saved in")
        assert not re.search(rb"\x1b\[[0-9;]*m", job.raw)
        job.type(b"/bye now\r")
        assert int(job.report()) == 0
    asked = [message["content"] for message in json.loads(kept.read_text())["messages"] if message["role"] == "user"]
    assert asked == ["one\n\ntwo", "half a line"]


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"LC_ALL": "C"}, marks=pytest.mark.campaign),
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
    ],
)
def test_what_is_typed_is_utf8_in_any_locale(model: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """Characters are typed, taken back, remembered and found again; so are a file's name and a system prompt."""
    state, kept = tmp_path / "specdec", tmp_path / "ké"
    state.mkdir()
    (state / "history").write_text('"日é"\n')
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1, "-y", "ü"]
    with Job(arguments, XDG_STATE_HOME=str(tmp_path), TERM="xterm", **environment) as job:
        job.read_until(word=">>> ")
        for keys in ("\x1b[A\r", "aé日x\x7f\x7f\r"):
            job.type(keys.encode())
            job.read_until(word="5 tok")
            wait_until(lambda: (job.read_until(), job.raw.endswith(b">>> "))[1])
        job.type(f"/save {tmp_path}/k\r".encode())
        job.read_until(word="saved in")
        job.type(f"/save {kept}\r".encode())
        job.read_until(word="saved in")
        job.type(f"/load {kept}\r".encode())
        job.read_until(word="2 turns from")
        wait_until(lambda: (job.read_until(), job.raw.endswith(b">>> "))[1])
        job.type(b"\x04")
        assert int(job.report()) == 0
        assert b"Traceback" not in job.raw
    content = json.loads(kept.read_bytes())
    assert (content["system"], [m["content"] for m in content["messages"][::2]]) == ("ü", ["日é", "aé"])
    assert [json.loads(line) for line in (state / "history").read_text().splitlines()][:2] == ["日é", "aé"]


def test_bytes_that_are_no_utf8_are_of_the_locale_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, text in (("iso8859-1", "dé日"), ("utf-8", "d\udce9"), ("ascii", "d\udce9")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        lines = Lines(None, lambda _: False, lambda _: [], is_bold=False)
        assert lines._decoded("d\udce9") == text.removesuffix("日")
        assert lines._decoded("dé日") == "dé日"


def test_a_tab_goes_on_with_a_command_and_is_one_in_a_message(
    talk: Callable[..., Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk()
    chat = Chat(conversation, Roles("a", "b"), plain=True)
    for name in ("one talk", "onetwo/", ".hidden", "o\x1b[2J"):
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    for line, ways in {
        "/s": ["/save ", "/set ", "/stats", "/system "], "/he": ["/help"], "/no": [], "/system ": [], "/clear ": [],
        "/set t": ["/set temperature ", "/set top_p ", "/set top_k "],
        f"/load {tmp_path}/": [f"/load {tmp_path}/{name}" for name in ("one talk", "onetwo/")],
        f"/save {tmp_path}/.": [f"/save {tmp_path}/.hidden"], f"/load {tmp_path}/nowhere/": [], "/load ~nobody-here/": [],
    }.items():  # fmt: skip
        assert chat._completions(line) == ways
    lines = Lines(None, chat._is_command, chat._completions, is_bold=False)
    for line, word, whole_words in (
        (f"/load {tmp_path}/one t", "t", ["talk"]), ("/sy", "/sy", ["/system "]), ("é /s", "/s", ["/s\t"]), ("a ", "", ["\t"]),
    ):  # fmt: skip
        editor = SimpleNamespace(get_line_buffer=lambda line=line: f"{line} x", get_endidx=lambda line=line: len(line.encode()))
        monkeypatch.setattr("specdec.ui.line_editor.editor", editor)
        found = [lines._complete(word, i) for i in range(2)]
        assert found == [*whole_words, None]


def test_a_talk_outlives_its_terminal(model: Path, tmp_path: Path) -> None:
    """A first message out of a file, a terminal that is closed, and the talk in the next session; none with --no-history."""
    question = tmp_path / "question.txt"
    question.write_text("/usr/bin is\n" + "what? " * 20)
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1]
    last = tmp_path / "specdec" / "last-talk"
    with Job([*arguments, "-i", "Say:", "-f", question, "--no-history"], XDG_STATE_HOME=str(tmp_path)) as job:
        job.read_until(word="5 tok")
        job.type(b"/load\r")
        job.read_until(word="name is missing")
    assert not last.exists()
    with Job([*arguments, "-i", "Say:", "-f", question], XDG_STATE_HOME=str(tmp_path)) as job:
        job.read_until(word="5 tok")
        os.kill(job.pid, signal.SIGHUP)
        assert int(job.report()) == 128 + signal.SIGHUP
    content = json.loads(last.read_text())
    assert content["messages"][0]["content"] == "Say:\n\n" + question.read_text().strip()
    assert last.stat().st_mode & 0o777 == 0o600
    with Job(arguments, XDG_STATE_HOME=str(tmp_path)) as job:
        job.read_until(word="/load goes on with the last talk")
        job.type(b"/load\r")
        job.read_until(word="1 turn from the last talk")
        job.type(b"/save %s\r" % str(tmp_path / "kept").encode())
        job.read_until(word="saved in")
    assert json.loads((tmp_path / "kept").read_text()) == content


def test_a_view_is_shown_the_answer_alone(talk: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what the template makes of the talk so far."""
    conversation, view = talk(), SilentView()
    chat = Chat(conversation, Roles("a", "b"), plain=True)
    monkeypatch.setattr(chat, "_view", lambda statistics: view)
    chat._obey(QUESTION)
    assert view.text == conversation.messages[-1]["content"]


def test_a_terminal_that_goes_in_the_middle_of_an_answer_costs_none_of_the_talk(
    talk: Callable[..., Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk()
    chat = Chat(conversation, Roles("a", "b"), plain=True)
    chat._last = tmp_path / "state" / "last-talk"

    def gone(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    chat._obey(QUESTION)
    with monkeypatch.context() as patch:
        patch.setattr(AnswerView, "_end_rows", gone)
        patch.setattr(AnswerView, "show", lambda _, event: gone() if isinstance(event, Step) else None)
        with pytest.raises(OSError, match="Input/output"):
            chat._obey("And then?")
    messages = json.loads(chat._last.read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == [QUESTION, "And then?"]
    assert messages[3]["tokens"]
    chat._obey("/clear")
    chat._obey("robin " * 400)  # which the context does not hold
    assert json.loads(chat._last.read_text())["messages"] == messages


def test_a_full_disk_costs_neither_the_history_nor_a_saved_talk(
    talk: Callable[..., Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, kept, history = talk(), tmp_path / "kept", tmp_path / "history"
    conversation.save(kept)
    history.write_text('"one"\n')
    before = kept.read_text()
    lines = Lines(history, lambda _: False, lambda _: [], is_bold=False)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        lines._remember("two")
        with pytest.raises(ValueError, match="kept: No space left on device"):
            conversation.save(kept)
    assert (history.read_text(), kept.read_text()) == ('"one"\n', before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history", "kept"]
    lines._remember("x" * 100_000)  # a paste that no later session needs
    lines._remember("two")
    assert history.read_text() == '"one"\n"two"\n'


def test_a_slip_in_a_command_is_told_with_what_was_meant_and_forgets_nothing(model: Path) -> None:
    arguments = ["chat", "-m", model, "-s", 5, "--max-tokens", 5, "-j", 1, "--no-history"]
    with Job(arguments, TERM="xterm") as job:
        job.read_until(word=">>> ")
        for typed, told in (
            (b"/setting\r", "did you mean /set?"),
            (b"/clear this up\r", "/clear takes no words"),
            (b"/set seed 1.5\r", "expected a whole number"),
        ):
            job.type(typed)
            job.read_until(word=told)
        job.type(b"/quit\r")
        assert job.report() == "0"


def test_the_list_of_commands_fits_a_terminal() -> None:
    assert max(map(len, HELP)) + 2 + max(map(len, HELP.values())) < 80


def test_ctrl_c_stops_an_answer_and_the_talk_goes_on(model: Path, tmp_path: Path) -> None:
    endless = configure(Path(shutil.copytree(model, tmp_path / "endless")), max_position_embeddings=100_000)
    with Job(["chat", "-m", endless, "-s", 5, "--max-tokens", 90_000, "-j", 1, "--no-history", "-i", "hi"], TERM="xterm") as job:
        job.read_until(word=">>> hi\x1b[0m\r\n")
        wait_until(lambda: (job.read_until(), len(job.raw.split(b">>> hi\x1b[0m\r\n")[1]) > 100)[1])  # of an answer
        job.type(b"\x03")
        job.read_until(word="interrupted")
        job.type(b"/save %s\r" % str(tmp_path / "kept").encode())
        job.read_until(word="saved in")
        job.type(b"/bye\r")
        assert int(job.report()) == 0
    assert json.loads((tmp_path / "kept").read_text())["messages"][1]["tokens"]
    assert not (tmp_path / "specdec").exists()
