"""Detokenization of decoding events: text in whole characters, which ends before a stop string. Independent of models."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from specdec.events import Event, PrefillProgress, Prompt, Proposal, Statistics, Step
from specdec.tokenizer import NO_TOKENS, AnyTokenizer, StreamingDetokenizer

if TYPE_CHECKING:
    from specdec.text.reasoning import ReasoningSplitter

PromptEventT = TypeVar("PromptEventT", Prompt, PrefillProgress)


@dataclass(frozen=True)
class Generation:
    """The result of `SpeculativeDecoder.generate` or `answer`: text, tokens and statistics; unpacks as `text, statistics = ...`.

    Attributes:
        text: Prompt and continuation; for an answer the continuation alone.
        statistics: The statistics of the decoding.
        tokens: The generated tokens without an end-of-sequence token.
        continuation: The text of the generated tokens.
    """

    text: str
    statistics: Statistics
    tokens: list[int]
    continuation: str

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> "Generation":
        """Return the text, tokens and statistics of a whole generation, collected from the events of one sequence."""
        prompt, texts, tokens, statistics = "", list[str](), list[int](), Statistics()
        for event in events:
            statistics.add(event)
            if isinstance(event, Prompt):
                prompt = event.text
            elif isinstance(event, Step):
                texts.append(event.text)
                tokens += event.tokens
        return cls(prompt + "".join(texts), statistics, tokens, "".join(texts))

    def __iter__(self) -> Iterator[object]:
        """Return an iterator over the text and the statistics."""
        return iter((self.text, self.statistics))


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the position of the first of some marks in a text, and the mark.

    Without a mark, return the position from which on the text may become one, and "".
    """
    if found := [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]:
        return min(found)
    return len(text) - max([_count_partial(text, mark) for mark in marks], default=0), ""


def _count_partial(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is the beginning of a mark, but not the whole mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


class StopStringFilter:
    """A filter for streamed text that passes everything before the first stop string, and nothing from there on.

    Text that can still become a stop string is held back until more text arrives.

    Attributes:
        found: The stop string that was found, or None.
    """

    def __init__(self, stops: Collection[str]) -> None:
        """Create a filter before the first text."""
        self._stops, self._pending = [*stops], ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece of text and return all text that is now certain not to belong to a stop string."""
        if self.found is not None:
            return ""
        text = self._pending + piece
        n, stop = find_first(text, self._stops)
        self.found, self._pending = (stop, "") if stop else (None, text[n:])
        return text[:n]

    def flush(self) -> str:
        """Return the held-back text and clear it; called at the end of the stream, when it can no longer become a stop string."""
        text, self._pending = self._pending, ""
        return text


class EventDetokenizer:
    """A converter that adds text to the decoding events of one sequence and ends the sequence at a stop string.

    The last step is the one that completes a stop string. It keeps the tokens up to that point, so tokens and text do not depend
    on how tokens were grouped into steps. An incomplete character or a possible stop string belongs to the step that settles it.

    Args:
        tokenizer: The tokenizer of the sequence.
        stops: The stop strings.
        visible_tokens: See `StreamingDetokenizer`.
        include_draft_text: See `GenerationRequest`.
        splitter: Finds where the answer begins, in which stop strings are searched; None if all text is the answer.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        stops: Collection[str] = (),
        visible_tokens: Mapping[int, str] = NO_TOKENS,
        include_draft_text: bool = False,
        splitter: "ReasoningSplitter | None" = None,
    ) -> None:
        """Create a detokenizer before the first token."""
        specials: Mapping[str, int] = getattr(tokenizer, "specials", {}) if visible_tokens and stops else {}
        visible_names = {name: visible_tokens[token] for name, token in specials.items() if token in visible_tokens}
        # Stop strings by how they appear in the text, which can show special tokens under other names.
        self._stops = {stop: stop for stop in stops}
        for stop in stops:
            visible_stop = stop
            for name in visible_names:
                visible_stop = visible_stop.replace(name, visible_names[name])
            self._stops.setdefault(visible_stop, stop)
        self._stream, self._stop_filter = StreamingDetokenizer(tokenizer, visible_tokens), StopStringFilter(self._stops)
        self._include_draft_text, self._splitter = include_draft_text, splitter if stops else None
        self._text_before = ""  # that may belong to the mark of a thought, or to the answer
        self._prompt_text: str | None = None

    def add_prompt_text(self, event: PromptEventT) -> PromptEventT:
        """Return a copy of a `Prompt` or `PrefillProgress` event with the text of the prompt.

        The first call detokenizes the event's tokens, which are the whole prompt; later calls reuse its text.
        """
        if self._prompt_text is None:
            self._prompt_text = "".join([self._stream.push(token) for token in event.tokens])
        return replace(event, text=self._prompt_text)

    def add_draft_text(self, event: Proposal) -> Proposal:
        """Return a copy of a proposal with the text of its tokens if `include_draft_text` is set, else the proposal itself."""
        return replace(event, pieces=self._stream.peek(event.tokens)) if self._include_draft_text else event

    def add_text(self, step: Step) -> Step:
        """Return a copy of a step with its text; tokens after the one that completes a stop string are dropped.

        Pass the prompt to `add_prompt_text` first, then all steps in order: the detokenizer holds back incomplete characters and
        text that may become a stop string.
        """
        stream, stop_filter = self._stream, self._stop_filter
        pieces = self._detokenize_tokens(step.tokens[: step.n_accepted])
        n_accepted = len(pieces)
        rejected = stream.peek(step.draft_tokens[n_accepted:]) if self._include_draft_text else []
        pieces += self._detokenize_tokens(step.tokens[step.n_accepted :])
        n = len(pieces)
        if stop_reason := "stop" if stop_filter.found is not None else step.stop_reason:
            text = self._filter_stop_strings(stream.flush())
            pieces.append(text + stop_filter.push(self._text_before) + stop_filter.flush())
        stop_string = None if stop_filter.found is None else self._stops[stop_filter.found]
        # `replace` would take as long as a tenth of a small model's pass
        return Step(
            step.tokens[:n], step.draft_tokens, n_accepted, step.seconds, step.draft_seconds, stop_reason, step.n_nodes, pieces,
            step.logprobs and step.logprobs[:n], step.experts, rejected, stop_string, step.draft_source,
            step.cost, step.coverage,
        )  # fmt: skip

    def _detokenize_tokens(self, tokens: list[int]) -> list[str]:
        """Add tokens to the stream and return the new text of each one, up to the token that completes a stop string."""
        if not self._stops:
            return [self._stream.push(token) for token in tokens]
        pieces = list[str]()
        for token in tokens:
            if self._stop_filter.found is None:
                pieces.append(self._filter_stop_strings(self._stream.push(token)))
        return pieces

    def _filter_stop_strings(self, piece: str) -> str:
        """Add a piece to the text and return all text that is now certain not to belong to a stop string of the answer."""
        if not self._splitter or self._splitter.phase == "answer":
            return self._stop_filter.push(piece)
        text = self._text_before + piece
        n_answer = sum(len(part) for kind, part in self._splitter.push(piece) if kind == "text")
        self._text_before = text if self._splitter.phase == "before" else ""
        before = "" if self._text_before else text[: len(text) - n_answer]
        return before + (self._stop_filter.push(text[len(text) - n_answer :]) if n_answer else "")
