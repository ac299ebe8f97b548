"""Conversations to token ids by a model's chat template. Knows no terminals, and nothing of models but their files.

The text is, byte for byte, what transformers' `apply_chat_template` makes of the same messages. Names of special tokens are those
tokens where the template wrote them, and text where a message holds them.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from . import extras
from .checks import file_name, short, text
from .readers import Checkpoint, read_object
from .tokenizer import AnyTokenizer, TextStream, file_bytes

Message = Mapping[str, Any]  # role, content; of an answer also tokens: the ids that it was written in

# Llama 2's own, which its llama2.c exports were trained with
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}\
{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('user and assistant have to take turns, user first') }}{% endif %}\
{% if loop.index0 == 0 and system is not false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
TEMPLATE_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
GGUF_VARIABLES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
STAND_INS = [*range(0xFDD0, 0xFDF0), *range(0x100000, 0x10FFFE)]  # to which Unicode gives no meaning
PATIENCE_SECONDS = 5.0  # with a template, which takes a millisecond
RENDERED_AT_ONCE = 100  # beginnings of a conversation, each request for which has those seconds
RENDERING = {extras.JINJA: "to render chat templates"}
WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(ValueError):
    """A template, or messages that it does not take: one line with the template's place and what is wrong."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer that reads what a template wrote."""

    @property
    def specials(self) -> Mapping[str, int]:
        """The names of tokens that a template may write."""

    def encode_rendered(self, text: str, typed: AbstractSet[int]) -> list[int]:
        """Ids of a text in which such names are those tokens, but for the ones that begin at `typed`; nothing is put in front."""


class ChatTemplate:
    """A template with what it may ask for. place: where it stands, for people; variables: bos_token and so on."""

    def __init__(self, source: str, place: str, variables: Mapping[str, str]) -> None:
        self.source, self.place, self.variables = source, place, dict(variables)
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.place, self.variables)

    def close(self) -> None:
        """End the process that renders; the next rendering begins another."""
        if self._worker:
            self._worker.kill()
            with self._worker:  # which waits for it, and closes its pipes
                self._worker = None

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end
            self.close()

    def render(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """The text of each, with the beginning of an answer at its end. Raises TemplateError."""
        return self._rendered(conversations, [])[0]

    def _rendered(self, conversations: Sequence[Sequence[Message]], beginnings: list[int]) -> tuple[list[str], list[int]]:
        """The texts, and where in the first that of its first messages ends, so many each; -1 for what does not begin it.

        The beginnings of a talk of n turns have n times its length: they do not leave the other process, which keeps their ends.
        """
        given = [[*map(dict, conversation)] for conversation in conversations]
        request = {"source": self.source, "variables": self.variables, "conversations": given, "beginnings": beginnings}
        with self._lock:
            reply = self._asked(json.dumps(request).encode() + b"\n")
        if "error" in reply:
            raise TemplateError(f"{self.place}: {' '.join(str(reply['error']).split())[:300]}")
        texts: list[str] = reply["texts"]
        for rendered in texts:
            text(f"what {self.place} makes of the messages", rendered)
        return texts, reply["ends"]

    def _asked(self, request: bytes) -> dict[str, Any]:
        """The worker's reply; it is killed where that takes too long."""
        worker = self._worker = self._worker or _new_worker()
        assert worker.stdin and worker.stdout
        timer = threading.Timer(PATIENCE_SECONDS, worker.kill)
        timer.start()
        try:
            worker.stdin.write(request)
            worker.stdin.flush()
            reply = worker.stdout.readline()
        except OSError:
            reply = b""
        except BaseException:  # half a reply would be taken for the next one's
            self.close()
            raise
        finally:
            is_late = timer.finished.is_set()
            timer.cancel()
        if reply.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(reply)
            return answer
        self.close()
        wrong = f"the template is not done after {PATIENCE_SECONDS:g} seconds" if is_late else "rendering ended without a word"
        return {"error": wrong}

    def encode(self, tokenizer: AnyTokenizer, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where an answer begins.

        An answer with its tokens is those tokens, as long as they say what the template makes of it: what a cache holds of it
        stays of use. Raises TemplateError for messages that the template refuses, TypeError and ValueError for what are none.
        """
        if not isinstance(tokenizer, ChatTokenizer):
            raise TemplateError(f"{self.place}: the tokenizer {tokenizer.path} has no special tokens to write")
        messages = checked(messages)
        hiding = _hiding(tokenizer.specials, "".join([self.source, *(m[key] for m in messages for key in ("role", "content"))]))
        revealing = str.maketrans({stand_in: c for c, stand_in in hiding.stand_ins.items()})
        hidden = [{"role": hiding(m["role"]), "content": hiding(m["content"])} for m in messages]
        with_tokens = [i for i, message in enumerate(messages) if message.get("tokens")]
        (whole,), ends = self._rendered([hidden], with_tokens[:RENDERED_AT_ONCE])
        for first in range(RENDERED_AT_ONCE, len(with_tokens), RENDERED_AT_ONCE):
            ends += self._rendered([hidden], with_tokens[first : first + RENDERED_AT_ONCE])[1]
        stream, ids, at = TextStream(tokenizer), list[int](), 0

        def encoded(part: str) -> list[int]:
            typed = {i for i, c in enumerate(part) if c in hiding.stand_ins.values()} if not part.isascii() else set[int]()
            return tokenizer.encode_rendered(part.translate(revealing), typed)

        for i, end in zip(with_tokens, ends, strict=True):
            if at <= end:
                ahead = encoded(whole[at:end])
                for token in ahead:
                    stream.push(token)
                said = hiding("".join(stream.peek(messages[i]["tokens"])))
                ids, at = ids + ahead, end
                if whole.startswith(said, at):
                    ids, at = [*ids, *messages[i]["tokens"]], at + len(said)
                    for token in messages[i]["tokens"]:
                        stream.push(token)
        ids += encoded(whole[at:])
        if not ids:
            raise TemplateError(f"{self.place}: the template makes nothing of the messages")
        return ids


class _Hiding(NamedTuple):
    """Takes the first letter from every name of a special token; stand_ins: what stands in the place of each such letter."""

    beginnings: re.Pattern[str]
    stand_ins: dict[str, str]

    def __call__(self, words: str) -> str:
        return self.beginnings.sub(lambda found: self.stand_ins[found[1]], words)


def _hiding(names: Iterable[str], words: str) -> _Hiding:
    """For messages of those words, in which no stand-in stands."""
    names = sorted(filter(None, names), key=len, reverse=True)
    pattern = f"(?=(?:{'|'.join(map(re.escape, names))}))(.)" if names else r"(?!)"
    present = set(words)
    free = (chr(code) for code in STAND_INS if chr(code) not in present)
    return _Hiding(re.compile(pattern, re.DOTALL), dict(zip(sorted({name[0] for name in names}), free, strict=False)))


def checked(messages: Sequence[Message]) -> list[Message]:
    """Messages of a role and a content, and maybe tokens. Raises TypeError or ValueError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise TypeError(f"messages are {short(messages, repr)}; expected a list of objects of role and content, one or more")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{i}] is {short(message, repr)}; expected an object of role and content")
        for key in ("role", "content"):
            text(f"{key} of messages[{i}]", message.get(key))
    return [*messages]


def template_of(checkpoint: Checkpoint | None, tokenizer: Path, given: str | os.PathLike[str] | None = None) -> ChatTemplate:
    """The template of a model, or the one in a file; tokenizer: its file, for a model that came without one.

    Raises TemplateError where there is none.
    """
    if lacking := extras.missing(RENDERING):
        raise TemplateError(lacking)
    folder = checkpoint.path if checkpoint else tokenizer.parent
    source, place, variables = None, folder, dict[str, str]()
    if checkpoint and checkpoint.vocabulary:
        source, variables = checkpoint.chat_template, _gguf_variables(checkpoint.vocabulary)
    elif folder.is_dir():
        config = _object(folder / TOKENIZER_CONFIG)
        variables = _variables(_object(folder / SPECIAL_TOKENS)) | _variables(config)
        source, place = config.get("chat_template"), folder / TOKENIZER_CONFIG
        if isinstance(source, list):  # several, by name
            source = next((one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default"), None)
        if (folder / TEMPLATE_FILE).exists():
            source, place = _read(folder / TEMPLATE_FILE), folder / TEMPLATE_FILE
    elif checkpoint:
        source, variables = LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}
    if given is not None:
        source, place = _read(Path(file_name("template", given))), Path(given)
    if not isinstance(source, str):
        raise TemplateError(f"{folder} has no chat template; name one with --template, or take a model that was taught to chat")
    return ChatTemplate(source, str(place), variables)


def _read(path: Path) -> str:
    data = file_bytes(path, "a chat template")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path} is no UTF-8 at byte {error.start}; expected a chat template") from None


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and so on, each a string or an object with its content."""
    values = {name: config.get(name) for name in VARIABLES}
    values = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _gguf_variables(keys: Mapping[str, Any]) -> dict[str, str]:
    ids = {name: keys.get(key) for name, key in GGUF_VARIABLES.items()}
    tokens = keys.get("tokens")  # anything, where another tokenizer was given
    names = dict(enumerate(tokens)) if isinstance(tokens, list) else {}
    values = {name: names.get(i) for name, i in ids.items() if type(i) is int}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _new_worker() -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C is not its; it ends with the pipe from here."""
    command = [sys.executable, "-S", "-E", str(WORKER), json.dumps(sys.path)]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise TemplateError(f"no process to render a chat template in: {error.strerror or error}") from None
