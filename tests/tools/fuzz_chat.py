"""Campaigns of tests/tools/fuzz.py over chat: random conversations, and hostile templates."""

import contextlib
import functools
import io
import json
import os
import time
from pathlib import Path
from unittest import mock

from specdec.argument_checks import count_common_prefix
from specdec.events import Prompt, Step
from specdec.runtime.op_program import Executor
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.text import jinja_renderer
from specdec.text.chat_template import ChatTemplate, TemplateError
from specdec.text.conversation import ChatSettings, Conversation
from specdec.ui.chat import ChatSession
from specdec.ui.plain_views import ModelLabels
from tests.tools.cache_contents import get_cached_tokens, get_idle_and_used_slots
from tests.tools.fuzz_common import FINE, FOLDER, REFUSED, check_one_line, corrupt, random_json
from tests.tools.hf_folders import FIXTURES
from tests.tools.model_folders import make_chat_folder, make_folder

POSITIONS = 320
NAMES = ("smollm2", "qwen2", "llama3", "llama2")
RENDERED = json.loads((FIXTURES / "chat" / "rendered.json").read_text(encoding="utf-8"))
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "<|im_", "end|>", "\ufdd0<s>")
WORDS = ("the river", " ", "\n", "été 日本 🙂", "e\u0301\u200d", "1234", "\x00\x1b", "▁Ġ", "{{ x }}", "a" * 40, *SPECIALS)
HARMLESS_PARTS = (
    "{{ messages[0].content }}",
    "{{ bos_token }}",
    "{# #}",
    "\n",
    "\0",
    "",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
)
HOSTILE_PARTS = (
    *HARMLESS_PARTS, "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ raise_exception('no\n') }}",
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
def make_chat_decoder(name, draft):
    """Return the decoder of a tokenizer, its template and a draft; it keeps its KV cache between conversations."""
    path = FOLDER / f"chat-{name}"
    if not path.exists():
        template = (FIXTURES / "chat" / f"{name}.jinja").read_text(encoding="utf-8")
        make_chat_folder(path, template, tokenizer=name, positions=POSITIONS)
        (path / "tokenizer_config.json").write_text(json.dumps(RENDERED[name]["variables"]))
    if draft == "other" and not (FOLDER / f"other-{name}").exists():
        make_folder(FOLDER / f"other-{name}", tokenizer=name, positions=64, seed=1)
    draft = FOLDER / f"other-{name}" if draft == "other" else draft
    decoder = SpeculativeDecoder(path, draft, gamma=4, tree="off" if draft is None else "auto", n_threads=1)
    decoder.warm_up()
    return decoder


def generate_uncached(name, messages, max_tokens, sampling):
    """Return the tokens and the text of an answer, computed without draft and KV cache."""
    decoder = make_chat_decoder(name, None)
    decoder._prefix_cache.idle.clear()
    steps = [event for event in decoder.chat(messages, max_tokens, sampling) if isinstance(event, Step)]
    return [token for step in steps for token in step.tokens], "".join(step.text for step in steps)


def random_words(rng):
    if rng.random() < 0.2:
        return "".join(rng.choices(WORDS, k=rng.choice([20, 20, 150])))
    return "".join(rng.choices(WORDS, k=rng.choice([0, 1, 2, rng.randint(1, 12)])))


def get_slots(decoder):
    idle, in_use = get_idle_and_used_slots(decoder)
    return idle + in_use


@contextlib.contextmanager
def count_run_tokens(decoder):
    """Yield a list that receives the number of tokens of each forward pass of a decoder's target."""
    counts, run = [], Executor.__call__

    def count(self, n_tokens, *args):
        if any(self is slot.caches.target.executor for slot in get_slots(decoder)):
            counts.append(n_tokens)
        return run(self, n_tokens, *args)

    with mock.patch.object(Executor, "__call__", count):
        yield counts


def check_answer(rng, name, conversation, events, attempt):
    """Compare an answer with that of a model without KV cache and draft; return whether there was an answer.

    A prompt must run only its new tokens, and old messages must be dropped only if the context is full.
    """
    decoder, n_dropped = conversation.decoder, conversation.n_dropped
    cached = [get_cached_tokens(slot.caches.target) for slot in get_slots(decoder)]
    stop = rng.choice([None, None, None, rng.randint(1, 6)])
    tokens, text, prompt = [], "", None
    try:
        with count_run_tokens(decoder) as counts:
            for event in events:
                if isinstance(event, Prompt):
                    prompt, n_run = event.tokens, sum(counts)
                elif isinstance(event, Step):
                    tokens, text = tokens + event.tokens, text + event.text
                    if stop is not None and len(tokens) >= stop:
                        break
            events.close()
    except ValueError as error:
        check_one_line(error, "context holds", "template", "turns")
        return False
    visible = conversation.get_visible_messages()
    visible, answer = (
        (visible[:-1], visible[-1]) if prompt is not None and visible[-1]["role"] == "assistant" else (visible, None)
    )
    assert prompt == decoder.encode_chat(visible)
    common = max((count_common_prefix(tokens, prompt, len(prompt) - 1) for tokens in cached), default=0)
    assert n_run <= len(prompt) - common, f"{n_run} prompt tokens run, {len(prompt) - common} are new"
    max_tokens = min(conversation.settings.max_tokens, POSITIONS + 1 - len(prompt))
    expected, expected_text = generate_uncached(name, visible, max_tokens, conversation.settings.make_sampling(attempt))
    is_cut = stop is not None and len(tokens) >= stop
    assert tokens == (expected[: len(tokens)] if is_cut else expected), f"got {tokens}, expected {expected}"
    assert expected_text.startswith(text) if is_cut else text == expected_text, f"got {text!r}, expected {expected_text!r}"
    assert answer is None or (answer["tokens"], answer["attempt"]) == (tokens, attempt)
    assert answer is None or (answer["content"].startswith(text) if is_cut else answer["content"] == text)  # may hold back a mark
    if conversation.n_dropped > n_dropped:
        undropped = conversation.get_visible_messages()[: bool(conversation.system)] + conversation.messages[n_dropped:-1]
        min_tokens = min(conversation.settings.max_tokens, POSITIONS // 8)
        assert len(decoder.encode_chat(undropped)) + min_tokens > POSITIONS, "messages were dropped that fit"
        one_more_turn = (
            conversation.get_visible_messages()[: bool(conversation.system)]
            + conversation.messages[conversation.n_dropped - 2 : -1]
        )
        assert len(decoder.encode_chat(one_more_turn)) > POSITIONS - POSITIONS // 4, "more messages were dropped than necessary"
    return True


def check_ids(name, messages):
    """Check that a prompt has the tokens of the rendered template, and that names of special tokens in messages are text."""
    decoder = make_chat_decoder(name, None)
    specials = {token: mark for mark, token in decoder.tokenizer.specials.items()}
    typed = [{"role": message["role"], "content": message["content"]} for message in messages]
    plain = [message | {"content": "x" if message["content"].strip() else message["content"]} for message in typed]
    ids, plain_ids = decoder.encode_chat(typed), decoder.encode_chat(plain)
    assert [token for token in ids if token in specials] == [token for token in plain_ids if token in specials], "typed specials"
    if name == "smollm2":  # the other templates strip or normalize messages
        rendered = b"".join(
            specials[token].encode() if token in specials else decoder.tokenizer.token_to_bytes(token) for token in ids
        )
        turns = typed if typed[0]["role"] == "system" else [{"role": "system", "content": DEFAULT_SYSTEM}, *typed]
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        assert rendered.decode() == f"{text}<|im_start|>assistant\n"


def check_file(rng, conversation):
    """Load a damaged file, which is refused in one line and changes nothing or is a conversation; return a saved copy."""
    path = FOLDER / "kept"
    path.unlink(missing_ok=True)
    conversation.save(path)
    valid, before = path.read_bytes(), dict(vars(conversation))
    if rng.random() < 0.5:
        content = json.loads(valid)
        target = rng.choice([content, content["settings"], *content["messages"]])
        target[rng.choice([*target, "x"])] = random_json(rng)
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(corrupt(rng, valid, valid, len(valid), [0, 10, len(valid) // 2]))
    try:
        conversation.load(path)
    except ValueError as error:
        check_one_line(error, str(path))
        assert vars(conversation) == before
    path.unlink()
    vars(conversation).update(before)
    conversation.save(path)
    other = Conversation(conversation.decoder, model=conversation.model)
    other.load(path)
    assert vars(other) == before
    return other


def run_command(session, command):
    """Run a chat command, which must not raise; files are written in FOLDER."""
    cwd = Path.cwd()
    os.chdir(FOLDER)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            session.handle_input(command)
    finally:
        os.chdir(cwd)


def fuzz_conversation(rng):
    """Ask, interrupt, drop, save and load messages: each answer equals that of its messages without KV cache and draft."""
    name, draft = rng.choice(NAMES), rng.choice([None, "lookup", "self", "other"])
    decoder = make_chat_decoder(name, draft)
    settings = ChatSettings(rng.choice([0.0, 0.7, 1.0, 3.0]), rng.choice([0.9, 1.0]), rng.choice([0, 5]), rng.randint(0, 9), 12)
    conversation = Conversation(decoder, rng.choice(["", "Sing.", random_words(rng)]), settings, name)
    session = ChatSession(conversation, ModelLabels("a", "b"), plain=True)
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
                session = ChatSession(conversation, ModelLabels("a", "b"), plain=True)
            case 9:
                run_command(session, f"/{rng.choice(COMMANDS)} {rng.choice(ARGUMENTS)}")
        if conversation.messages and conversation.n_dropped == 0:
            with contextlib.suppress(TemplateError):
                check_ids(name, conversation.get_visible_messages())
    return outcome


def fuzz_template(rng):
    """Render a hostile template: it renders or is refused in one line, within its CPU time."""
    source = "".join(rng.choices(rng.choice([HOSTILE_PARTS, HARMLESS_PARTS]), k=rng.randint(1, 4)))
    template, begin = ChatTemplate(source, "here", {"bos_token": "<s>"}), time.thread_time()
    with mock.patch.object(jinja_renderer, "MAX_CPU_S", 1.0):
        try:
            template.render([{"role": "user", "content": "hi"}])
            outcome = FINE
        except ValueError as error:
            outcome = check_one_line(error, "here")
        assert time.thread_time() - begin < 20
    return outcome
