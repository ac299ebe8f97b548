"""Conversations: questions and answers, the part that fits the context, saving and loading. Independent of terminals."""

import difflib
import json
import os
from bisect import bisect_left
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specdec import argument_checks
from specdec.argument_checks import JSONDict, JSONObject
from specdec.events import Event, PrefillProgress, Proposal, Step, ThoughtStep
from specdec.loaders import CheckpointError, read_json_object, write_text_atomically
from specdec.protocols import Constraint
from specdec.sampling import Sampling
from specdec.text.chat_template import Message, PromptTooLongError, TemplateError
from specdec.text.reasoning import SPECIAL_TOKEN_MARK, PartKind, ReasoningMarks, find_reasoning_marks, make_thinking_options
from specdec.text.reasoning_constraint import ReasoningConstraint

if TYPE_CHECKING:
    from specdec.speculative_decoder import SpeculativeDecoder

FORMAT, REVISION = "specdec conversation", 1
PROBE = "specdec-probe"  # a text that no template contains
TYPE_PHRASES: Mapping[type, str] = MappingProxyType({dict: "an object", list: "a list", bool: "true or false"})
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
MIN_ANSWER_DIVISOR = 8  # the oldest turns are dropped if less than 1/8 of the context is left for an answer
FREED_CONTEXT_DIVISOR = 4  # ... and then 1/4 of the context is freed


@dataclass(frozen=True)
class ChatSettings:
    """The sampling settings of a chat's answers, and `max_tokens`, the maximum length of one answer in tokens.

    Raises:
        TypeError: A setting has a wrong type.
        ValueError: A setting is out of range.
    """

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
        """Check all settings."""
        self.make_sampling(0)
        argument_checks.check_int("max_tokens", self.max_tokens, 1)

    def make_sampling(self, attempt: int) -> Sampling:
        """Return the `Sampling` for one attempt at an answer; attempt 0 uses the seed of the settings, later ones other seeds."""
        options = {name: value for name, value in asdict(self).items() if name != "max_tokens"}
        return Sampling(**options | {"seed": self.seed if not attempt else (self.seed + attempt) % 2**63})

    def with_value(self, name: str, value: str) -> "ChatSettings":
        """Return a copy of the settings in which the named one has a new value, given as a string of user input.

        Raises:
            ValueError: The name or the value is not valid.
        """
        types = {setting: type(default) for setting, default in asdict(ChatSettings()).items()}
        if name not in types:
            similar = difflib.get_close_matches(name, types, 1)
            hint = f"did you mean {similar[0]}?" if similar else f"expected one of {', '.join(types)}"
            raise ValueError(f"unknown setting {argument_checks.shorten(name, repr)}; {hint}")
        try:
            number = types[name](value)
        except ValueError:
            expected = "a whole number" if types[name] is int else "a number"
            raise ValueError(f"{name} is {argument_checks.shorten(value, repr)}; expected {expected}") from None
        return replace(self, **{name: number})


class ThoughtFilter:
    """A filter that separates the thought from the answer in the events of one answer.

    Args:
        marks: The marks around the thought.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        """Create a filter before the first event."""
        self._splitter, self._seconds = marks.make_splitter(), 0.0
        self._text, self._thought = list[str](), list[str]()

    def filter(self, event: Event | PrefillProgress) -> Event | PrefillProgress:
        """Return an event without the marks; a step that has a part of the thought becomes a `ThoughtStep`.

        Pass all events of an answer in their order. The text and the thought are also collected for `end`.
        """
        if isinstance(event, Proposal):
            return replace(event, pieces=_remove_token_marks(event.pieces))
        if not isinstance(event, Step):
            return event
        pieces, thoughts, has_thought = list[str](), list[str](), self._splitter.is_reasoning
        for i, piece in enumerate(event.pieces):
            parts = self._splitter.push(piece, i < len(event.tokens))
            if event.stop_reason and i == len(event.pieces) - 1:
                parts += self._splitter.end()
            text, thought = _join_parts(parts)
            pieces.append(text)
            thoughts.append(thought)
        self._text += pieces
        self._thought += thoughts
        fields = vars(event) | {"pieces": pieces, "wrong": _remove_token_marks(event.wrong)}
        if not (has_thought or self._splitter.is_reasoning or any(thoughts)):
            return Step(**fields)
        self._seconds += event.seconds
        is_end = not self._splitter.is_reasoning or event.stop_reason is not None
        return ThoughtStep(
            **fields,
            thought_pieces=thoughts,
            n_thought_tokens=self._splitter.n_tokens,
            thought_seconds=self._seconds,
            is_thought_end=is_end,
        )

    def end(self) -> dict[str, str]:
        """Return the fields of a message with the answer: its `content`, and its thought as `reasoning_content` if there is one.

        Call it once, after the last event: it ends the splitting of the text.
        """
        text, thought = _join_parts(self._splitter.end())
        fields = {"content": "".join(self._text) + text}
        return fields | ({"reasoning_content": thought} if (thought := "".join(self._thought) + thought) else {})


def _join_parts(parts: list[tuple[PartKind, str]]) -> tuple[str, str]:
    """Return the text and the thought of parts from a splitter, without marks of special tokens."""
    text, thought = ["".join([part for kind, part in parts if (kind == "text") == is_text]) for is_text in (True, False)]
    return text.replace(SPECIAL_TOKEN_MARK, ""), thought.replace(SPECIAL_TOKEN_MARK, "")


def _remove_token_marks(pieces: list[str]) -> list[str]:
    return [piece.replace(SPECIAL_TOKEN_MARK, "") for piece in pieces]


class Conversation:
    """A chat with a model: alternating questions and answers after an optional system prompt.

    Args:
        decoder: The decoder that generates the answers.
        system: The system prompt; "" for none.
        settings: The settings of answers; None for the defaults.
        model: The model's name, which saved files contain.
        metadata: Other values that answers depend on, saved for readers of the file.
        constraint: A constraint that every answer must satisfy.

    Attributes:
        decoder, constraint: As given.
        messages: All messages without the system prompt; an answer also has its tokens, the number of its
            attempt and its thought as `reasoning_content`, if it has one.
        thinking: Whether the model thinks before an answer; None for the default of the chat template.
        n_dropped: The number of oldest messages that the model no longer sees.
    """

    def __init__(
        self,
        decoder: "SpeculativeDecoder",
        system: str = "",
        settings: ChatSettings | None = None,
        model: str = "",
        metadata: JSONObject = MappingProxyType({}),
        constraint: Constraint | None = None,
    ) -> None:
        """Start a conversation without messages."""
        self.decoder, self.settings, self.model, self.metadata = decoder, settings or ChatSettings(), model, metadata
        self.system = argument_checks.check_string("the system prompt", system)
        self.messages: list[JSONDict] = []
        self.n_dropped, self.constraint = 0, constraint
        self.thinking: bool | None = None

    def clear(self) -> None:
        """Remove all messages to start over; the system prompt and the settings stay."""
        self.messages, self.n_dropped = [], 0

    def set_thinking(self, is_on: bool) -> None:
        """Switch thoughts on or off.

        Raises:
            ValueError: The chat template has no variable for it.
        """
        if not make_thinking_options(self.decoder.chat_template, is_on):
            raise ValueError("the model's chat template cannot switch thinking on or off")
        self.thinking = is_on

    def ask(self, question: str) -> Generator[Event | PrefillProgress]:
        """Add a question to the chat and return a generator of prefill progress, then of the events of the model's answer.

        The answer is added when the generator ends. If the generator ends before any token, because of an error or an interrupt,
        the question is removed again. The generator raises ValueError if the question does not fit the context.

        Raises:
            TypeError: The question is not a string.
            ValueError: The question contains a lone surrogate.
        """
        before = self.messages, self.n_dropped
        self.messages = [*self.messages, {"role": USER, "content": argument_checks.check_string("the message", question)}]
        return self._stream_answer(0, before)

    def regenerate(self) -> Generator[Event | PrefillProgress]:
        """Replace the last answer by a new one, and return a generator of prefill progress, then of the new answer's events.

        If the generator ends before any token, the old answer is kept.

        Raises:
            ValueError: There is no answer yet.
        """
        if not self.messages:
            raise ValueError("there is no answer yet to regenerate")
        before = self.messages, self.n_dropped
        *self.messages, last = self.messages
        return self._stream_answer(last["attempt"] + 1, before)

    def _stream_answer(self, attempt: int, before: tuple[list[JSONDict], int]) -> Generator[Event | PrefillProgress]:
        tokens, is_complete, text, thought_filter = list[int](), False, "", None
        try:
            prompt = self._encode_prompt()
            settings, max_new = self.settings, self.decoder.n_positions + 1 - len(prompt)
            max_tokens, sampling = min(settings.max_tokens, max_new), settings.make_sampling(attempt)
            constraint, template, tokenizer = self.constraint, self.decoder.chat_template, self.decoder.tokenizer
            if marks := find_reasoning_marks(template, tokenizer, prompt):
                if constraint and not marks.closes_in_prompt:
                    constraint = ReasoningConstraint(marks, tokenizer, constraint, is_required=True)
                thought_filter = ThoughtFilter(marks)
            for event in self.decoder.read_and_stream(prompt, max_tokens, sampling, marks, constraint=constraint):
                if isinstance(event, Step):
                    tokens += event.tokens
                    text += event.text
                    is_complete = event.stop_reason is not None
                yield thought_filter.filter(event) if thought_filter else event
        finally:
            if tokens or is_complete:
                content = thought_filter.end() if thought_filter else {"content": text}
                self.messages = [*self.messages, {"role": ASSISTANT, **content, "tokens": tokens, "attempt": attempt}]
            else:
                self.messages, self.n_dropped = before

    @property
    def template_system_prompt(self) -> str:
        """The system prompt that the chat template adds to a conversation without one; "" if it adds none."""
        render, question = self.decoder.chat_template.render, {"role": USER, "content": PROBE}
        try:
            before, _, rest = render([{"role": SYSTEM, "content": PROBE}, question]).partition(PROBE)
            after, _, _ = rest.partition(PROBE)
            own, is_added, _ = render([question]).removeprefix(before).partition(after)
        except (TemplateError, ValueError):  # a template without system prompts
            return ""
        return own.strip() if is_added and PROBE not in own else ""

    def get_visible_messages(self) -> list[Message]:
        """Return the messages that the model sees: the system prompt, if there is one, and the messages that were not dropped."""
        system = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return [*system, *self.messages[self.n_dropped :]]

    def _encode_prompt(self) -> list[int]:
        """Return the token ids of the prompt for the next answer; first drop the oldest turns if too little context is left.

        Raises:
            ValueError: The question alone does not fit the context.
        """
        n_positions = self.decoder.n_positions
        tokens = self._encode_messages()
        if tokens is None or len(tokens) + min(self.settings.max_tokens, n_positions // MIN_ANSWER_DIVISOR) > n_positions:
            self._drop_oldest_turns(n_positions - n_positions // FREED_CONTEXT_DIVISOR)
            tokens = self._encode()
        if len(tokens) > n_positions:
            raise ValueError(
                f"the message has {len(tokens)} tokens with the system prompt; the model's context holds {n_positions}"
            )
        return tokens

    def _encode(self) -> list[int]:
        options = {} if self.thinking is None else make_thinking_options(self.decoder.chat_template, self.thinking)
        return self.decoder.encode_chat(self.get_visible_messages(), options=options)

    def _encode_messages(self) -> list[int] | None:
        """Return the token ids of the visible messages, or None if they cannot fit the context and were therefore not encoded."""
        try:
            return self._encode()
        except PromptTooLongError:
            return None

    def _drop_oldest_turns(self, n_tokens: int) -> None:
        """Set `n_dropped` so that the fewest oldest turns are hidden from the model and its prompt has at most `n_tokens` tokens.

        If even the last question alone has more tokens, only this question stays. Each tried number of dropped turns gives other
        prefixes, which take a while to render in a long chat, so the number is found by bisection.
        """

        def fits(n_dropped: int) -> bool:
            self.n_dropped = n_dropped
            tokens = self._encode_messages()
            return tokens is not None and len(tokens) <= n_tokens

        choices = range(self.n_dropped, len(self.messages), 2)
        self.n_dropped = choices[min(bisect_left(choices, True, key=fits), len(choices) - 1)]

    def save(self, path: Path) -> None:
        """Write the conversation to a file that `load` reads; refuse to overwrite a file that is not a saved conversation.

        Raises:
            ValueError: The file exists and is something else, or it cannot be written.
        """
        if os.path.exists(path):  # unlike Path.exists, does not raise if the name is too long
            try:
                _read_saved(path)
            except ValueError:
                raise ValueError(f"{path} exists and is not a saved conversation; name another file") from None
        try:
            self.write(path)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror or error}") from None

    def write(self, path: Path, mode: int = 0o666) -> None:
        """Write the conversation to a file that `load` reads, atomically: a full disk leaves the old file intact.

        Args:
            path: The file, which is overwritten whatever it contains.
            mode: The permission bits of a new file.

        Raises:
            OSError: The file cannot be written.
        """
        content = {
            "format": FORMAT, "revision": REVISION, "model": self.model, **self.metadata, "system": self.system,
            "settings": asdict(self.settings), "n_dropped": self.n_dropped, "messages": self.messages,
            **({} if self.thinking is None else {"thinking": self.thinking}),
        }  # fmt: skip
        write_text_atomically(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n", mode)

    def load(self, path: Path) -> str:
        """Replace messages, system prompt and settings by those of a saved file and return the model name in the file.

        Raises:
            ValueError: The file is not a valid conversation; nothing is replaced in this case.
        """
        content = _read_saved(path)
        try:
            settings = ChatSettings(**_get_field(content, "settings", dict))
            system, model = (argument_checks.check_string(name, content.get(name)) for name in ("system", "model"))
            messages = [_parse_message(i, message) for i, message in enumerate(_get_field(content, "messages", list))]
            if len(messages) % 2:
                raise ValueError("the last question has no answer")
            n_dropped = argument_checks.check_int("n_dropped", content.get("n_dropped"), 0, max(0, len(messages) - 2))
            if n_dropped % 2:
                raise ValueError(f"n_dropped is {n_dropped}; expected whole turns")
            thinking = _get_field(content, "thinking", bool) if "thinking" in content else None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged conversation: {error}") from None
        vocab_size = self.decoder.tokenizer.vocab_size
        for message in messages:  # tokens of another model's vocabulary are dropped; the text stays
            if not all(0 <= token < vocab_size for token in message.get("tokens", [])):
                message["tokens"] = []
        self.settings, self.system, self.messages, self.n_dropped = settings, system, messages, n_dropped
        self.thinking = thinking
        return model


def _read_saved(path: Path) -> JSONDict:
    """Return the JSON object in a saved conversation after a check of its format and revision; other fields are not validated.

    Raises:
        CheckpointError: The file is not a saved conversation.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # these do not raise for any name
        raise CheckpointError(f"{path} is not a regular file; expected a saved conversation")
    content = read_json_object(path)
    if content.get("format") != FORMAT or content.get("revision") != REVISION:
        raise CheckpointError(f"{path} is not a conversation saved by specdec")
    return content


def _get_field(content: JSONDict, name: str, expected_type: type) -> Any:
    if not isinstance(content.get(name), expected_type):
        expected = TYPE_PHRASES[expected_type]
        raise ValueError(f"{name} is {argument_checks.shorten(content.get(name), repr)}; expected {expected}")
    return content[name]


def _parse_message(i: int, value: Any) -> JSONDict:
    """Validate the i-th message of a saved conversation and return a copy with only the known fields.

    Messages alternate: user for even `i`, assistant for odd `i`.

    Raises:
        TypeError: A field has a wrong type.
        ValueError: A field is not valid, or the role is not the expected one.
    """
    role = ASSISTANT if i % 2 else USER
    if not isinstance(value, dict) or value.get("role") != role:
        raise ValueError(f"messages[{i}] is {argument_checks.shorten(value, repr)}; expected a message of role {role}")
    message = {"role": role, "content": argument_checks.check_string(f"content of messages[{i}]", value.get("content"))}
    if role == USER:
        return message
    if "reasoning_content" in value:
        name = f"reasoning_content of messages[{i}]"
        message["reasoning_content"] = argument_checks.check_string(name, value["reasoning_content"])
    tokens = _get_field(value, "tokens", list)
    return message | {
        "tokens": [argument_checks.check_int("a token", token, 0) for token in tokens],
        "attempt": argument_checks.check_int("attempt", value.get("attempt"), 0),
    }
