"""Events of tokens get their text: whole characters, and nothing from a stop string on. Knows no models."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ..decoding import Event, Prompt, Step
from ..tokenizer import NOTHING, AnyTokenizer, TextStream


class Until:
    """A text that comes in pieces, and ends before the first of some strings.

    What may become one of them waits for what follows. has_ended: whether one has come.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self._stops, self._longest = stops, max(map(len, stops), default=0)
        self._held = ""
        self.has_ended = False

    def push(self, piece: str) -> str:
        """What is certain to be of the text, after this piece."""
        if not self._longest:
            return piece
        if self.has_ended:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self.has_ended = "", True
            return text[: min(found)]
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
    is of the text of the step in which it is settled. shown: as `TextStream` says.
    """

    def __init__(self, tokenizer: AnyTokenizer, stops: Collection[str] = (), shown: Mapping[int, str] = NOTHING) -> None:
        self._stream, self._until = TextStream(tokenizer, shown), Until(stops)

    def of(self, event: Event) -> Event:
        stream, until = self._stream, self._until
        if isinstance(event, Prompt):
            return replace(event, text="".join([stream.push(token) for token in event.tokens]))
        if not isinstance(event, Step):
            return event
        text, n = "", 0
        while n < len(event.tokens) and not until.has_ended:
            text += until.push(stream.push(event.tokens[n]))
            n += 1
        stop = "stop" if until.has_ended else event.stop_reason
        if stop:
            text += until.push(stream.end()) + until.end()
        logprobs = event.logprobs and event.logprobs[:n]
        n_accepted = min(event.n_accepted, n)
        return replace(event, tokens=event.tokens[:n], n_accepted=n_accepted, stop_reason=stop, text=text, logprobs=logprobs)


def worded(events: Iterator[Event], tokenizer: AnyTokenizer, stops: Collection[str] = ()) -> Iterator[Event]:
    """The events with the text of each prompt and step, up to the last step; see `Wording`."""
    wording = Wording(tokenizer, stops)
    for event in events:
        event = wording.of(event)
        yield event
        if isinstance(event, Step) and event.stop_reason:
            return
