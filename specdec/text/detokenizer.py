"""Events of tokens get their text: whole characters, and nothing from a stop string on. Knows no models."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdec.engine.decoding import Event, Prefill, Prompt, Proposal, Statistics, Step
from specdec.tokenizer import NOTHING, AnyTokenizer, TextStream


@dataclass(frozen=True)
class Generation:
    """A whole text, of `SpeculativeDecoder.generate` or `answer`; `text, statistics = ...` takes it apart.

    text: prompt and continuation, of an answer the continuation alone; statistics: the figures; tokens: those that were
    generated, an end mark not counted; continuation: their text.
    """

    text: str
    statistics: Statistics
    tokens: list[int]
    continuation: str

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Generation":
        """What the events of a text come to."""
        prompt, said, tokens, statistics = "", list[str](), list[int](), Statistics()
        for event in events:
            statistics.add(event)
            if isinstance(event, Prompt):
                prompt = event.text
            elif isinstance(event, Step):
                said.append(event.text)
                tokens += event.tokens
        return cls(prompt + "".join(said), statistics, tokens, "".join(said))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.text, self.statistics))


class Until:
    """A text that comes in pieces, and ends before the first of some strings.

    What may become one of them waits for what follows. found: the one that has come.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self._stops, self._longest = stops, max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """What is certain to be of the text, after this piece."""
        if not self._longest:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, (first, self.found) = "", min(found)
            return text[:first]
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        n = next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def end(self) -> str:
        """What waited for something that never came."""
        text, self._held = self._held, ""
        return text


class Wording:
    """Gives the events of one text, in order, what can be read of them.

    The last step is the one in which a stop string is complete. It keeps the tokens up to the one that completes the string, so
    that neither they nor the text depend on what was a step. A character, or what may become a stop string, that one step begins
    is of the text of the step in which it is settled. shown: as `TextStream` says; tells_guesses: as `Job` says.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        stops: Collection[str] = (),
        shown: Mapping[int, str] = NOTHING,
        tells_guesses: bool = False,
    ) -> None:
        specials: Mapping[str, int] = getattr(tokenizer, "specials", {}) if shown and stops else {}
        marks = {name: shown[token] for name, token in specials.items() if token in shown}
        self._stops = {stop: stop for stop in stops}  # as the text would have them, where it shows marks by other names
        for stop in stops:
            as_shown = stop
            for name in marks:
                as_shown = as_shown.replace(name, marks[name])
            self._stops.setdefault(as_shown, stop)
        self._stream, self._until, self._tells_guesses = TextStream(tokenizer, shown), Until(self._stops), tells_guesses
        self._prompt: str | None = None

    def of(self, event: Event | Prefill) -> Event | Prefill:
        stream, until = self._stream, self._until
        if isinstance(event, Proposal):
            return replace(event, pieces=stream.peek(event.tokens)) if self._tells_guesses else event
        if not isinstance(event, Step):
            if self._prompt is None:
                self._prompt = "".join([stream.push(token) for token in event.tokens])
            return replace(event, text=self._prompt)
        pieces = self._read(event.tokens[: event.n_accepted])
        n_accepted = len(pieces)
        wrong = stream.peek(event.draft_tokens[n_accepted:]) if self._tells_guesses else []
        pieces += self._read(event.tokens[event.n_accepted :])
        n = len(pieces)
        if stop := "stop" if until.found is not None else event.stop_reason:
            pieces.append(until.push(stream.end()) + until.end())
        stop_string = None if until.found is None else self._stops[until.found]
        return replace(
            event, tokens=event.tokens[:n], n_accepted=n_accepted, stop_reason=stop, stop_string=stop_string, pieces=pieces,
            wrong=wrong, logprobs=event.logprobs and event.logprobs[:n],
        )  # fmt: skip

    def _read(self, tokens: list[int]) -> list[str]:
        """What each says, up to the one that completes a stop string."""
        pieces = list[str]()
        for token in tokens:
            if self._until.found is None:
                pieces.append(self._until.push(self._stream.push(token)))
        return pieces


def worded(events: Iterator[Event | Prefill], wording: Wording) -> Iterator[Event | Prefill]:
    """The events with their text, up to the last step."""
    for event in events:
        event = wording.of(event)
        yield event
        if isinstance(event, Step) and event.stop_reason:
            return
