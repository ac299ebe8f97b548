"""A conversation: its turns, what of it fits the model's context, saving and loading. Knows no terminals."""

import json
import os
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from specdec import validation
from specdec.engine.decoding import Event, Prefill, Shape, Step
from specdec.loaders import CheckpointError, read_object, replace_text
from specdec.sampling import Sampling
from specdec.text.chat_template import Message, TooLong
from specdec.tokenizer import AnyTokenizer

FORMAT, REVISION = "specdec conversation", 1
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
LEAST_ROOM, ROOM = 8, 4  # shares of the context: for an answer, below which turns are dropped; and that they then leave


@dataclass(frozen=True)
class Settings:
    """How answers are drawn; max_tokens: of an answer. Raises ValueError or TypeError for values that are none."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    seed: int = 1
    max_tokens: int = 1024
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        self.sampling(0)
        validation.whole("max_tokens", self.max_tokens, 1)

    def sampling(self, attempt: int) -> Sampling:
        """Of an answer's first attempt, or of a later one, which has a seed of its own."""
        drawn = {name: value for name, value in asdict(self).items() if name != "max_tokens"}
        return Sampling(**drawn | {"seed": self.seed if not attempt else (self.seed + attempt) % 2**63})

    def changed(self, name: str, value: str) -> "Settings":
        """With one of them as a person wrote it. Raises ValueError for a name or a value that is none."""
        kinds = {setting: type(default) for setting, default in asdict(Settings()).items()}
        if name not in kinds:
            raise ValueError(f"no setting {validation.short(name, repr)}; there are {', '.join(kinds)}")
        try:
            number = kinds[name](value)
        except ValueError:
            expected = "a whole number" if kinds[name] is int else "a number"
            raise ValueError(f"{name} is {validation.short(value, repr)}; expected {expected}") from None
        return replace(self, **{name: number})


class Speaker(Protocol):
    """What a conversation asks of a decoder; see `SpeculativeDecoder`."""

    @property
    def tokenizer(self) -> AnyTokenizer: ...
    @property
    def n_positions(self) -> int: ...
    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...
    def read_and_stream(
        self, prompt: list[int], max_tokens: int, sampling: Sampling, *, shape: Shape | None
    ) -> Iterator[Event | Prefill]: ...


class Conversation:
    """Questions and answers by turns, behind a system prompt; "" for none.

    shape: that of each answer. messages: all of them, an answer with its tokens and which attempt it was; n_dropped: how many of
    the oldest the model does not see any more; model: its name, and made_with: what else answers depend on, for who reads a saved
    file, which names it all.
    """

    def __init__(
        self,
        decoder: Speaker,
        system: str = "",
        settings: Settings | None = None,
        model: str = "",
        made_with: Mapping[str, Any] = MappingProxyType({}),
        shape: Shape | None = None,
    ) -> None:
        self._decoder, self.settings, self.model, self.made_with = decoder, settings or Settings(), model, made_with
        self.system = validation.text("the system prompt", system)
        self.messages: list[dict[str, Any]] = []
        self.n_dropped, self._shape = 0, shape

    def clear(self) -> None:
        """Begin anew; the system prompt stays."""
        self.messages, self.n_dropped = [], 0

    def ask(self, question: str) -> Generator[Event | Prefill]:
        """The answer's events, behind those that tell how far the conversation is read.

        A question that is not answered at all, for an error or an interrupt, is forgotten.
        """
        before = self.messages, self.n_dropped
        self.messages = [*self.messages, {"role": USER, "content": validation.text("the message", question)}]
        return self._answer(0, before)

    def regenerate(self) -> Generator[Event | Prefill]:
        """Another answer to the last question, in the place of the one there is. Raises ValueError where there is none."""
        if not self.messages:
            raise ValueError("there is no answer yet to write anew")
        before = self.messages, self.n_dropped
        *self.messages, last = self.messages
        return self._answer(last["attempt"] + 1, before)

    def _answer(self, attempt: int, before: tuple[list[dict[str, Any]], int]) -> Generator[Event | Prefill]:
        tokens, is_whole, words = list[int](), False, ""
        try:
            prompt = self._prompt()
            settings, room = self.settings, self._decoder.n_positions + 1 - len(prompt)
            most, sampling = min(settings.max_tokens, room), settings.sampling(attempt)
            for event in self._decoder.read_and_stream(prompt, most, sampling, shape=self._shape):
                if isinstance(event, Step):
                    tokens += event.tokens
                    words += event.text
                    is_whole = event.stop_reason is not None
                yield event
        finally:
            if tokens or is_whole:
                answer = {"role": ASSISTANT, "content": words, "tokens": tokens, "attempt": attempt}
                self.messages = [*self.messages, answer]
            else:
                self.messages, self.n_dropped = before

    def _seen(self) -> list[Message]:
        """What of it the model sees."""
        system = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return [*system, *self.messages[self.n_dropped :]]

    def _prompt(self) -> list[int]:
        """What the model reads before the answer, without the oldest turns where the context is full.

        Raises ValueError for a question that does not fit alone.
        """
        most = self._decoder.n_positions
        tokens = self._tokens()
        if tokens is None or len(tokens) + min(self.settings.max_tokens, most // LEAST_ROOM) > most:
            self._drop_down_to(most - most // ROOM)
            tokens = self._decoder.encode_chat(self._seen())
        if len(tokens) > most:
            raise ValueError(f"the message has {len(tokens)} tokens with the system prompt; the model's context holds {most}")
        return tokens

    def _tokens(self) -> list[int] | None:
        """What the model would read; None for a text that is too long to be encoded."""
        try:
            return self._decoder.encode_chat(self._seen())
        except TooLong:
            return None

    def _drop_down_to(self, n_tokens: int) -> None:
        """Drops as few of the oldest turns as leave that many tokens, or all but the question.

        By halves: the beginnings of a long talk are other ones for each number of turns, and take a while to render.
        """

        def fits(n_dropped: int) -> bool:
            self.n_dropped = n_dropped
            tokens = self._tokens()
            return tokens is not None and len(tokens) <= n_tokens

        choices = range(self.n_dropped, len(self.messages), 2)
        self.n_dropped = choices[min(bisect_left(choices, True, key=fits), len(choices) - 1)]

    def save(self, path: Path) -> None:
        """Write a file that `load` reads; never over what is none. Raises ValueError."""
        if os.path.exists(path):  # of a name that is too long, too
            try:
                _content(path)
            except ValueError:
                raise ValueError(f"{path} exists and is no saved conversation; name another file") from None
        try:
            self.keep(path)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror or error}") from None

    def keep(self, path: Path, mode: int = 0o666) -> None:
        """Write a file that `load` reads, over whatever is there; a full disk leaves that. Raises OSError."""
        content = {
            "format": FORMAT, "revision": REVISION, "model": self.model, **self.made_with, "system": self.system,
            "settings": asdict(self.settings), "n_dropped": self.n_dropped, "messages": self.messages,
        }  # fmt: skip
        replace_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n", mode)

    def load(self, path: Path) -> str:
        """Become the conversation of a file; the name of the model that it was held with.

        Raises ValueError for a file that is none, and changes nothing then.
        """
        content = _content(path)
        try:
            settings = Settings(**_of(content, "settings", dict))
            system, model = (validation.text(name, content.get(name)) for name in ("system", "model"))
            messages = [_message(i, message) for i, message in enumerate(_of(content, "messages", list))]
            if len(messages) % 2:
                raise ValueError("the last question has no answer")
            n_dropped = validation.whole("n_dropped", content.get("n_dropped"), 0, max(0, len(messages) - 2))
            if n_dropped % 2:
                raise ValueError(f"n_dropped is {n_dropped}; expected whole turns")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged conversation: {error}") from None
        most = self._decoder.tokenizer.vocab_size
        for message in messages:  # of another model's vocabulary: the text stays
            if not all(0 <= token < most for token in message.get("tokens", [])):
                message["tokens"] = []
        self.settings, self.system, self.messages, self.n_dropped = settings, system, messages, n_dropped
        return model


def _content(path: Path) -> dict[str, Any]:
    """What a conversation's file holds, its parts not yet looked at."""
    if os.path.exists(path) and not os.path.isfile(path):  # which raise for no name
        raise CheckpointError(f"{path} is no file; expected a saved conversation")
    content = read_object(path)
    if content.get("format") != FORMAT or content.get("revision") != REVISION:
        raise CheckpointError(f"{path} is no conversation that was saved here")
    return content


def _of(content: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(content.get(name), kind):
        raise ValueError(f"{name} is {validation.short(content.get(name), repr)}; expected a {kind.__name__}")
    return content[name]


def _message(i: int, value: Any) -> dict[str, Any]:
    """The i-th message of a file; questions and answers take turns."""
    role = ASSISTANT if i % 2 else USER
    if not isinstance(value, dict) or value.get("role") != role:
        raise ValueError(f"messages[{i}] is {validation.short(value, repr)}; expected one of the role {role}")
    message = {"role": role, "content": validation.text(f"content of messages[{i}]", value.get("content"))}
    if role == USER:
        return message
    tokens = _of(value, "tokens", list)
    return message | {
        "tokens": [validation.whole("a token", token, 0) for token in tokens],
        "attempt": validation.whole("attempt", value.get("attempt"), 0),
    }
