"""Conversations to token ids by a model's chat template. Knows no terminals, and nothing of models but their files.

The text is, byte for byte, what transformers' `apply_chat_template` makes of the same messages. Names of special tokens are those
tokens where the template wrote them, and text where a message holds them: `rendering` finds which is which.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specdec.families import TEMPLATES
from specdec.loaders import Checkpoint, object_if_there, optional_dependencies
from specdec.tokenizer import AnyTokenizer, Part, TextStream, file_bytes
from specdec.validation import file_name, one_of, short, text

if TYPE_CHECKING:
    from specdec.text.jinja_renderer import Rendering

# role, content; of an answer also tokens: the ids that it was written in; what else `TOLD` names, of calls of tools
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # functions that a model may call, as templates take them
Options = Mapping[str, bool | int | str]  # what a template may ask for beside messages, such as enable_thinking
TOLD = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # what a template sees of a message
NO_OPTIONS: Options = {}
ROLES = ("system", "user", "assistant", "tool", "developer", "ipython", "function")

GUESSED, *_ = TEMPLATES  # of a llama2.c file, which names none
TEMPLATE_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
GGUF_VARIABLES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
MOST_CHARACTERS = 32 << 20  # of messages and tools, and of what a template makes
RENDERING = {optional_dependencies.JINJA: "to render chat templates"}


class TemplateError(ValueError):
    """A template, or messages that it does not take: one line with the template's place and what is wrong."""


class TooLong(TemplateError):
    """More text than the model's context can hold, however it is cut into tokens."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer that reads what a template wrote. longest: characters or bytes of the longest token."""

    @property
    def longest(self) -> int: ...
    def encode_rendered(self, parts: Sequence[Part]) -> list[int]:
        """The ids of a text of those parts, in which names of special tokens are those, if no message said anything of them.

        Nothing is put in front.
        """


class ChatTemplate:
    """A template with what it may ask for. place: where it stands, for people; variables: bos_token and so on."""

    def __init__(self, source: str, place: str, variables: Mapping[str, str]) -> None:
        self.source, self.place, self.variables = source, place, dict(variables)
        self._known = dict[int, tuple[int, int]]()  # see `Rendering.ends`

    @property
    def takes_tools(self) -> bool:
        """Whether it asks for any, by either name."""
        return self.asks_for("(xml_)?tools")

    def asks_for(self, name: str) -> bool:
        """Whether it may look at what goes by that name."""
        return re.search(rf"\b{name}\b", self.source) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.place, self.variables)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, with the beginning of an answer at its end. Raise TemplateError."""
        return self._rendering(messages, [], MOST_CHARACTERS, None, NO_OPTIONS).text

    def _rendering(
        self, messages: Sequence[Message], beginnings: list[int], most: int, tools: Tools | None, options: Options
    ) -> "Rendering":
        """Return a conversation's rendering, with the ends of its beginnings of so many messages each. Raise TemplateError."""
        from specdec.text.jinja_renderer import Rendering, RenderingError

        told = [{key: message[key] for key in TOLD if key in message} for message in messages]
        try:
            rendering = Rendering(self.source, {**self.variables, **options}, told, [*tools] if tools else None)
            if (n := rendering.n_characters) > MOST_CHARACTERS:
                raise TooLong(f"{self.place}: the messages have {n} characters; at most {MOST_CHARACTERS} are rendered")
            if (n := len(rendering.text)) > most:
                raise TooLong(f"{self.place}: the template makes a text of {n} characters; there is room for {most}")
            text(f"what {self.place} makes of the messages", rendering.text)
            rendering.find_edges()
            rendering.find_ends(beginnings, self._known)
        except RenderingError as error:
            raise TemplateError(f"{self.place}: {' '.join(str(error).split())[:300]}") from None
        return rendering

    def encode(
        self,
        tokenizer: AnyTokenizer,
        messages: Sequence[Message],
        n_positions: int | None = None,
        tools: Tools | None = None,
        options: Options = NO_OPTIONS,
    ) -> list[int]:
        """The ids of a conversation, up to where an answer begins.

        An answer with its tokens is those tokens, as long as they say what the template makes of it: what a cache holds of it
        stays of use. n_positions: tokens of the context; a text that is longer however it is cut raises TooLong before it is.
        Raises TemplateError for messages that the template refuses, TypeError and ValueError for what are none.
        """
        if not isinstance(tokenizer, ChatTokenizer):
            raise TemplateError(f"{self.place}: the tokenizer {tokenizer.path} has no special tokens to write")
        messages = checked(messages)
        with_tokens = [i for i, message in enumerate(messages) if message.get("tokens")]
        most = MOST_CHARACTERS if n_positions is None else n_positions * tokenizer.longest
        whole = self._rendering(messages, with_tokens, most, tools, options)
        stream, ids, at = TextStream(tokenizer), list[int](), 0
        for i, end in zip(with_tokens, whole.ends, strict=True):
            if at <= end:
                ahead = tokenizer.encode_rendered(whole.parts(at, end))
                for token in ahead:
                    stream.push(token)
                said = "".join(stream.peek(messages[i]["tokens"]))
                ids, at = ids + ahead, end
                if whole.text.startswith(said, at):
                    ids, at = [*ids, *messages[i]["tokens"]], at + len(said)
                    for token in messages[i]["tokens"]:
                        stream.push(token)
        ids += tokenizer.encode_rendered(whole.parts(at, len(whole.text)))
        if not ids:
            raise TemplateError(f"{self.place}: the template makes nothing of the messages")
        return ids


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


def check_roles(messages: Sequence[Message]) -> None:
    """Raises ValueError for a role that no conversation has."""
    for i, message in enumerate(checked(messages)):
        one_of(f"role of messages[{i}]", message["role"], ROLES)


def template_of(checkpoint: Checkpoint | None, tokenizer: Path, given: str | os.PathLike[str] | None = None) -> ChatTemplate:
    """The template of a model, or the one in a file, or one of `TEMPLATES`, given by its name.

    tokenizer: its file, for a model that came without one. Raises TemplateError where there is none.
    """
    if lacking := optional_dependencies.missing(RENDERING):
        raise TemplateError(lacking)
    folder = checkpoint.path if checkpoint else tokenizer.parent
    source, place, variables = None, folder, dict[str, str]()
    if checkpoint and checkpoint.vocabulary:
        source, variables = checkpoint.chat_template, _gguf_variables(checkpoint.vocabulary)
    elif folder.is_dir():
        config = object_if_there(folder / TOKENIZER_CONFIG)
        variables = _variables(object_if_there(folder / SPECIAL_TOKENS)) | _variables(config)
        source, place = config.get("chat_template"), folder / TOKENIZER_CONFIG
        if isinstance(source, list):  # several, by name
            source = next((one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default"), None)
        if (folder / TEMPLATE_FILE).exists():
            source, place = _read(folder / TEMPLATE_FILE), folder / TEMPLATE_FILE
    elif checkpoint:  # a llama2.c file
        variables = {**TEMPLATES[GUESSED].variables}
    if isinstance(given, str) and given in TEMPLATES:
        source, place, variables = TEMPLATES[given].source, Path(given), {**TEMPLATES[given].variables} | variables
    elif given is not None:
        place = Path(file_name("template", given))
        if not os.path.exists(place):
            raise TemplateError(f"there is no chat template {place}; expected a file, or {' or '.join(TEMPLATES)}")
        source = _read(place)
    if not isinstance(source, str):
        others = " or ".join(f"{name} for {one.whose}" for name, one in TEMPLATES.items())
        raise TemplateError(
            f"{folder} has no chat template; name one with template=... (a file, or {others}), or take a model that was taught "
            "to chat"
        )
    return ChatTemplate(source, str(place), variables)


def _read(path: Path) -> str:
    data = file_bytes(path, "a chat template")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path} is no UTF-8 at byte {error.start}; expected a chat template") from None


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and so on, each a string or an object with its content."""
    values = {name: config.get(name) for name in VARIABLES}
    return _strings({name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()})


def _gguf_variables(keys: Mapping[str, Any]) -> dict[str, str]:
    tokens = keys.get("tokens")  # anything, where another tokenizer was given
    names = dict(enumerate(tokens)) if isinstance(tokens, list) else {}
    return _strings({name: names.get(i) for name, key in GGUF_VARIABLES.items() if type(i := keys.get(key)) is int})


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str)}
