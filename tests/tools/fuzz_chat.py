"""Fuzz chat: random conversations compared with a model without cache and draft, and hostile templates."""

import contextlib
import functools
import io
import json
import os
import time
from pathlib import Path
from unittest import mock

from specdec.decoder import SpeculativeDecoder
from specdec.engine.decoding import Prompt, Step
from specdec.runtime.program import Runner
from specdec.text import jinja_renderer
from specdec.text.chat_template import ChatTemplate, TemplateError
from specdec.text.conversation import Conversation, Settings
from specdec.ui.chat import Chat
from specdec.ui.output import Roles
from specdec.validation import n_common
from tests.test_end_to_end import folder
from tests.tools.fuzz_common import FINE, FOLDER, REFUSED, damaged, one_line, random_json
from tests.tools.hf_folders import FIXTURES

POSITIONS = 320
NAMES = ("smollm2", "qwen2", "llama3", "llama2")
RENDERED = json.loads((FIXTURES / "chat" / "rendered.json").read_text(encoding="utf-8"))
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "<|im_", "end|>", "\ufdd0<s>")
WORDS = ("the river", " ", "\n", "été 日本 🙂", "e\u0301\u200d", "1234", "\x00\x1b", "▁Ġ", "{{ x }}", "a" * 40, *SPECIALS)
HARMLESS = (
    "{{ messages[0].content }}",
    "{{ bos_token }}",
    "{# #}",
    "\n",
    "\0",
    "",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
)
HARM = (
    *HARMLESS, "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ raise_exception('no\n') }}",
    "{% import 'os' as x %}", "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}", "{{ 'a' * 10**10 }}", "{{ [0] * 10**9 }}",
    "{{ 'a' | center(10**9) }}", "{{ 7 ** (7 ** 9) }}", "{{ range(10**9) | list }}", "{{ lipsum(n=10**6) }}", "{{ '\\ud800' }}",
    "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}", "{{ 'a' * 40 * 10**6 }}", "{% for %}", "{{",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "{% if messages[0].content %}", "{% endif %}", "{% for m in messages %}{{ m.role ~ m.content }}", "{% endfor %}",
    "{{ strftime_now(5) }}", "{{ messages | tojson(indent=10**9) }}", "{% break %}", "{{ 10**5000 }}",
)  # fmt: skip
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
COMMANDS = (
    "help", "clear", "system", "set", "stats", "panel", "save", "load", "bye", "", "/", "regenerate", "SET", "\ud800", "__init__",
)  # fmt: skip
ARGUMENTS = (
    "", "x", '""', "seed", "seed 7", "seed 1e5", "seed -1", "temperature nan", "temperature 0", "top_p 2", "top_k 1.5", "~", "~x",
    "max_tokens 0", "max_tokens 5", "__class__ 1", "/dev/zero", "/dev/full", ".", "/", "a/b", "y" * 300, "z" * 5000, "a\0b",
    "\ud800", "temperature " + "9" * 5000, "robin " * 30,
)  # fmt: skip


@functools.cache
def talker(name, draft):
    """A decoder of that tokenizer and its template; what it held of earlier talks, it may go on with."""
    path = FOLDER / f"talker-{name}"
    if not path.exists():
        folder(path, tokenizer=name, positions=POSITIONS)
        (path / "chat_template.jinja").write_bytes((FIXTURES / "chat" / f"{name}.jinja").read_bytes())
        (path / "tokenizer_config.json").write_text(json.dumps(RENDERED[name]["variables"]))
    if draft == "other" and not (FOLDER / f"other-{name}").exists():
        folder(FOLDER / f"other-{name}", tokenizer=name, positions=64, seed=1)
    draft = FOLDER / f"other-{name}" if draft == "other" else draft
    decoder = SpeculativeDecoder(path, draft, gamma=4, tree="off" if draft is None else "auto", n_threads=1)
    decoder.warm_up()
    return decoder


def alone(name, messages, max_tokens, sampling):
    """An answer's tokens and text, of a model that holds nothing."""
    decoder = talker(name, None)
    decoder.target._held.clear()
    steps = [event for event in decoder.chat(messages, max_tokens, sampling) if isinstance(event, Step)]
    return [token for step in steps for token in step.tokens], "".join(step.text for step in steps)


def random_words(rng):
    if rng.random() < 0.2:
        return "".join(rng.choices(WORDS, k=rng.choice([20, 20, 150])))
    return "".join(rng.choices(WORDS, k=rng.choice([0, 1, 2, rng.randint(1, 12)])))


@contextlib.contextmanager
def counted(model):
    """How many tokens of that model's passes run run."""
    counts, run = [], Runner.__call__

    def counting(self, n_tokens, *more):
        if self is model._runner:
            counts.append(n_tokens)
        return run(self, n_tokens, *more)

    with mock.patch.object(Runner, "__call__", counting):
        yield counts


def check_answer(rng, name, conversation, events, attempt):
    """An answer is the one of no cache and no draft; its prompt runs what is new. Whether there was one."""
    decoder, dropped = conversation._decoder, conversation.n_dropped
    model, held = decoder.target, decoder.target._held[:]
    stop = rng.choice([None, None, None, rng.randint(1, 6)])
    tokens, text, prompt = [], "", None
    try:
        with counted(model) as counts:
            for event in events:
                if isinstance(event, Prompt):
                    prompt, n_run = event.tokens, sum(counts)
                elif isinstance(event, Step):
                    tokens, text = tokens + event.tokens, text + event.text
                    if stop is not None and len(tokens) >= stop:
                        break
            events.close()
    except ValueError as error:
        one_line(error, "context holds", "template", "turns")
        return False
    seen = conversation._seen()
    seen, answer = (seen[:-1], seen[-1]) if prompt is not None and seen[-1]["role"] == "assistant" else (seen, None)
    assert prompt == decoder.encode_chat(seen)
    common = n_common(held, prompt, len(prompt) - 1)
    assert n_run <= len(prompt) - common, f"{n_run} run, {len(prompt) - common} are new"
    room = min(conversation.settings.max_tokens, POSITIONS + 1 - len(prompt))
    expected, words = alone(name, seen, room, conversation.settings.sampling(attempt))
    is_cut = stop is not None and len(tokens) >= stop
    assert tokens == (expected[: len(tokens)] if is_cut else expected), f"{tokens} where alone it is {expected}"
    assert words.startswith(text) if is_cut else text == words, f"{text!r} where alone it is {words!r}"
    assert answer is None or (answer["tokens"], answer["content"], answer["attempt"]) == (tokens, text, attempt)
    if conversation.n_dropped > dropped:
        before = conversation._seen()[: bool(conversation.system)] + conversation.messages[dropped:-1]
        least = min(conversation.settings.max_tokens, POSITIONS // 8)
        assert len(decoder.encode_chat(before)) + least > POSITIONS, "turns are dropped that had room"
        more = conversation._seen()[: bool(conversation.system)] + conversation.messages[conversation.n_dropped - 2 : -1]
        assert len(decoder.encode_chat(more)) > POSITIONS - POSITIONS // 4, "more turns are dropped than need be"
    return True


def check_ids(name, messages):
    """A prompt says what the template wrote, and no typed name of a special token is one."""
    decoder = talker(name, None)
    specials = {token: mark for mark, token in decoder.tokenizer.specials.items()}
    typed = [{"role": message["role"], "content": message["content"]} for message in messages]
    plain = [message | {"content": "x" if message["content"].strip() else message["content"]} for message in typed]
    ids, of_plain = decoder.encode_chat(typed), decoder.encode_chat(plain)
    assert [token for token in ids if token in specials] == [token for token in of_plain if token in specials], "obeyed"
    if name == "smollm2":  # the others strip or normalize what they are told
        said = b"".join(specials[token].encode() if token in specials else decoder.tokenizer.says(token) for token in ids)
        turns = typed if typed[0]["role"] == "system" else [{"role": "system", "content": DEFAULT_SYSTEM}, *typed]
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        assert said.decode() == f"{text}<|im_start|>assistant\n"


def check_file(rng, conversation):
    """A damaged file is refused in a line and changes nothing, or is a conversation, which says so when it is saved."""
    path = FOLDER / "kept"
    path.unlink(missing_ok=True)
    conversation.save(path)
    sound, before = path.read_bytes(), dict(vars(conversation))
    if rng.random() < 0.5:
        content = json.loads(sound)
        where = rng.choice([content, content["settings"], *content["messages"]])
        where[rng.choice([*where, "x"])] = random_json(rng)
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(damaged(rng, sound, sound, len(sound), [0, 10, len(sound) // 2]))
    try:
        conversation.load(path)
    except ValueError as error:
        one_line(error, str(path))
        assert vars(conversation) == before
    path.unlink()
    vars(conversation).update(before)
    conversation.save(path)
    other = Conversation(conversation._decoder, model=conversation.model)
    other.load(path)
    assert vars(other) == before
    return other


def obey(screen, command):
    """A command of the screen's, whatever it is, is obeyed or told in a line; files are written in our folder."""
    here = Path.cwd()
    os.chdir(FOLDER)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            screen._obey(command)
    finally:
        os.chdir(here)


def chats(rng):
    """Whatever was said, dropped, saved, loaded and interrupted, an answer is that of its messages without cache and draft."""
    name, draft = rng.choice(NAMES), rng.choice([None, "ngram", "self", "other"])
    decoder = talker(name, draft)
    settings = Settings(rng.choice([0.0, 0.7, 1.0, 3.0]), rng.choice([0.9, 1.0]), rng.choice([0, 5]), rng.randint(0, 9), 12)
    conversation = Conversation(decoder, rng.choice(["", "Sing.", random_words(rng)]), settings, name)
    screen = Chat(conversation, Roles("a", "b"), plain=True)
    outcome = REFUSED
    for _ in range(rng.choice([3, 6, 15])):
        match rng.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                if check_answer(rng, name, conversation, conversation.ask(random_words(rng)), 0):
                    outcome = FINE
            case 5 | 10 | 11 if conversation.messages:
                attempt = conversation.messages[-1]["attempt"] + 1
                check_answer(rng, name, conversation, conversation.regenerate(), attempt)
            case 6:
                conversation.clear()
            case 7:
                conversation.system = random_words(rng)
            case 8:
                conversation = check_file(rng, conversation)
                screen = Chat(conversation, Roles("a", "b"), plain=True)
            case 9:
                obey(screen, f"/{rng.choice(COMMANDS)} {rng.choice(ARGUMENTS)}")
        if conversation.messages and conversation.n_dropped == 0:
            with contextlib.suppress(TemplateError):
                check_ids(name, conversation._seen())
    return outcome


def harm(rng):
    """Render or refuse in one line, within its CPU seconds, whatever a template does."""
    source = "".join(rng.choices(rng.choice([HARM, HARMLESS]), k=rng.randint(1, 4)))
    template, begin = ChatTemplate(source, "here", {"bos_token": "<s>"}), time.thread_time()
    with mock.patch.object(jinja_renderer, "CPU_SECONDS", 1.0):
        try:
            template.render([{"role": "user", "content": "hi"}])
            outcome = FINE
        except ValueError as error:
            outcome = one_line(error, "here")
        assert time.thread_time() - begin < 20
    return outcome
