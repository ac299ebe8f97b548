"""Events of texts become OpenAI's answers, in chunks or whole. Knows no requests and no server."""

import itertools
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.engine.decoding import Event, Statistics, Step, TokenLogprob
from specdec.server.openai_requests import Asked, Model
from specdec.server.tool_parsers.incremental import MARK, Call, More, Said, Thought, value_of
from specdec.server.validation import Refused

# of decoding's reasons, those that are no end of the model's own
CUT = ("max_tokens", "seq_len", "interrupted")
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's number, in the place of the infinity that JSON has none for


@dataclass
class Delta:
    """What a text grows by: thoughts, words and calls of tools in their order, log probabilities, and how it ends, None before
    that. details: which of the words were guessed, for who asks.
    """

    said: list[Said] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    details: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.said or self.logprobs or self.finish or self.details)

    @property
    def words(self) -> str:
        return "".join([each for each in self.said if isinstance(each, str)])

    @property
    def thought(self) -> str:
        return "".join([each.words for each in self.said if isinstance(each, Thought)])

    @property
    def calls(self) -> list[Call | More]:
        return [each for each in self.said if isinstance(each, Call | More)]

    def add(self, other: "Delta") -> None:
        for each in other.said:
            self.says(each)
        self.logprobs += other.logprobs
        self.finish, self.details = other.finish, other.details

    def says(self, said: Said) -> None:
        """What goes on with the last becomes one with it."""
        last = self.said[-1] if self.said else None
        if isinstance(said, More) and isinstance(last, Call | More):
            self.said[-1] = replace(last, arguments=last.arguments + said.arguments)
        elif isinstance(said, str) and isinstance(last, str):
            self.said[-1] = last + said
        elif isinstance(said, Thought) and isinstance(last, Thought):
            self.said[-1] = Thought(last.words + said.words)
        else:
            self.said.append(said)


class Choice:
    """One text of an answer: its events become deltas."""

    def __init__(self, asked: Asked) -> None:
        self._calls, self._one_call, self._has_details = asked.calls and asked.calls(), asked.one_call, asked.details
        self.statistics, self.n_calls = Statistics(), 0
        self._arguments = list[str]()  # of the last call that was told
        self.stop_string: str | None = None  # which has ended it

    def takes(self, event: Event) -> Delta:
        self.statistics.add(event)
        if not isinstance(event, Step):
            return Delta()
        self.stop_string = event.stop_string
        said: list[Said] = [event.text] if event.text else []
        if self._calls:
            said = self._calls.push(event.text)
            if event.stop_reason:
                said += self._calls.end()
        delta = Delta(logprobs=list(event.logprobs or ()))
        for each in said:
            self.n_calls += isinstance(each, Call)
            if isinstance(each, str | Thought) or not self._one_call or self.n_calls == 1:
                delta.says(each)
                if isinstance(each, Call):
                    self._arguments.clear()
                if isinstance(each, Call | More):
                    self._arguments.append(each.arguments)
        if event.stop_reason:
            delta.finish = "length" if event.stop_reason in CUT else "tool_calls" if self._has_called else "stop"
        if self._has_details:
            delta.details = guesses(event)
            if event.stop_reason:
                delta.details |= figures(self.statistics)
        return delta

    @property
    def _has_called(self) -> bool:
        """Whether there is a call, and the last one is whole: an end mark or a stop string may stand in the middle of it."""
        try:
            return self.n_calls > 0 and isinstance(value_of("".join(self._arguments) or ("" if self.stop_string else "{}")), dict)
        except ValueError:
            return False


def figures(statistics: Statistics) -> dict[str, Any]:
    """How a text went, for who asks. Its seconds are those of passes that it shared, which tell nothing of the target alone."""
    return {
        "tokens": statistics.n_generated,
        "passes": statistics.target_passes,
        "drafted": statistics.n_drafted,
        "accepted": statistics.n_accepted,
        "seconds": round(statistics.decode_seconds, 4),
    }


def guesses(step: Step) -> dict[str, Any]:
    """`runs`: the step's text in pieces, each of them guessed or own; `wrong`: guesses that did not stand."""
    runs = ("guessed", step.pieces[: step.n_accepted]), ("own", step.pieces[step.n_accepted :])
    told = [[kind, words] for kind, pieces in runs if (words := "".join(pieces).replace(MARK, ""))]
    return {"runs": told, "wrong": "".join(step.wrong).replace(MARK, "")}


class Form:
    """How a request's texts are told, in events and whole: as OpenAI does here, as others do in files of their own.

    choices: the texts. What is told of one text alone is told of the first.
    """

    def __init__(self, asked: Asked, model: Model, fingerprint: str) -> None:
        self.asked, self.model, self.fingerprint = asked, model, fingerprint
        self.created = int(time.time())
        self.choices = [Choice(asked) for _ in asked.jobs]

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts; one that several texts share is counted once."""
        return sum({id(job.prompt): len(job.prompt) for job in self.asked.jobs}.values())

    @property
    def n_text(self) -> int:
        return sum(choice.statistics.n_generated for choice in self.choices)

    def begins(self) -> bytes:
        """The first events of a stream."""
        return b""

    def grows(self, index: int, delta: Delta) -> bytes:
        """What a choice grows by."""
        raise NotImplementedError

    def ends(self) -> bytes:
        """The last events."""
        raise NotImplementedError

    def fails(self, error: Refused) -> bytes:
        """In the place of the last events."""
        return event(error.body()) + DONE

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer of what all choices came to."""
        raise NotImplementedError


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """One of a stream of server-sent events. Half a character, which JSON's escapes can say, is such an escape again."""
    told = f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
    return (f"event: {name}\n{told}" if name else told).encode(errors="backslashreplace")


@dataclass
class Part:
    """Of an answer: a thought, words or a call. kind: the type of what it says; text: so far."""

    kind: type
    index: int
    id: str
    name: str = ""
    text: str = ""


class InParts(Form):
    """A text that is told in parts, which follow each other."""

    def __init__(self, asked: Asked, model: Model, fingerprint: str) -> None:
        super().__init__(asked, model, fingerprint)
        self._parts, self._finish = list[Part](), "stop"

    def grows(self, index: int, delta: Delta) -> bytes:
        return b"".join([self._part(*each) for each in self._take(delta)])

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        for delta in deltas:
            for _ in self._take(delta):  # nobody is told of parts
                pass
        return self._told()

    def _take(self, delta: Delta) -> Iterator[tuple[str, Part, str]]:
        """What becomes of parts by what the text grows by, as `_part` takes it."""
        for each in delta.said:
            kind = Call if isinstance(each, More) else type(each)
            if not self._parts or self._parts[-1].kind is not kind or isinstance(each, Call):
                yield from (("ends", part, "") for part in self._parts[-1:])
                self._parts.append(Part(kind, len(self._parts), new_id(), each.name if isinstance(each, Call) else ""))
                yield "begins", self._parts[-1], ""
            text = each if isinstance(each, str) else each.words if isinstance(each, Thought) else each.arguments
            self._parts[-1].text += text
            if text:
                yield "grows", self._parts[-1], text
        self._finish = delta.finish or self._finish

    def _part(self, what: str, part: Part, grown: str) -> bytes:
        """The events of what becomes of a part: it "begins", "grows" by some text, or "ends"."""
        raise NotImplementedError

    def _told(self) -> dict[str, Any]:
        """The answer of all parts."""
        raise NotImplementedError

    def _stops(self) -> bytes:
        """The events of the last part's end."""
        return b"".join([self._part("ends", part, "") for part in self._parts[-1:]])


def new_id() -> str:
    """Nine letters and digits: as many as Mistral's templates take of a call's id, and no others."""
    return secrets.token_hex(5)[:9]


class Answer(Form):
    """OpenAI's chunks, and its whole."""

    def __init__(self, asked: Asked, model: Model, fingerprint: str) -> None:
        super().__init__(asked, model, fingerprint)
        self._id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._n_calls = [0] * len(self.choices)
        self._offsets = [0] * len(self.choices)

    def begins(self) -> bytes:
        """Of a chat, each choice's role."""
        n = len(self.choices) * self.asked.is_chat
        said = {"role": "assistant", "content": ""}
        return b"".join(
            event(self._told([{"index": i, "delta": said, "logprobs": None, "finish_reason": None}], None)) for i in range(n)
        )

    def grows(self, index: int, delta: Delta) -> bytes:
        return event(self._told([self._choice(index, delta, False)], delta.details))

    def ends(self) -> bytes:
        """With the usage, where it is asked for."""
        return (event(self._told([], None, self.usage)) if self.asked.has_usage else b"") + DONE

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [self._choice(index, delta, True) for index, delta in enumerate(deltas)]
        details = next((delta.details for delta in deltas if delta.details), None)
        return self._told(choices, details, self.usage, "")

    def _choice(self, index: int, delta: Delta, is_whole: bool) -> dict[str, Any]:
        """What a choice grows by, or all of it. Words go by the names that most clients know."""
        finish = {"logprobs": self._logprobs(index, delta), "finish_reason": delta.finish}
        if not self.asked.is_chat:
            return {"index": index, "text": delta.words, **finish}
        told: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None} if is_whole else {}
        told |= {name: said for name, said in (("reasoning_content", delta.thought), ("content", delta.words)) if said}
        if calls := [self._call(index, call, is_whole) for call in delta.calls]:
            told |= ({"content": delta.words or None} if is_whole else {}) | {"tool_calls": calls}
        return {"index": index, "message" if is_whole else "delta": told, **finish}

    def _call(self, index: int, call: Call | More, is_whole: bool) -> dict[str, Any]:
        if isinstance(call, Call):
            self._n_calls[index] += 1
        at = {} if is_whole else {"index": self._n_calls[index] - 1}
        if isinstance(call, More):
            return at | {"function": {"arguments": call.arguments}}
        return at | {"id": new_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    @property
    def usage(self) -> dict[str, Any]:
        """Of all choices."""
        parts = [choice.statistics for choice in self.choices]
        accepted, drafted = sum(part.n_accepted for part in parts), sum(part.n_drafted for part in parts)
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_text,
            "total_tokens": self.n_prompt + self.n_text,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def _told(
        self, choices: list[dict[str, Any]], details: dict[str, Any] | None, usage: Any = None, of_chat: str = ".chunk"
    ) -> dict[str, Any]:
        """A chunk, or the whole, whose name has no such end."""
        told = {
            "id": self._id,
            "object": f"chat.completion{of_chat}" if self.asked.is_chat else "text_completion",
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        told |= {"usage": usage} if usage or self.asked.has_usage else {}
        return told | ({"specdec": details} if details else {})

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """As the kind of request has them; None where none are asked for."""
        if not delta.logprobs:
            return None
        if self.asked.is_chat:
            told = [
                self._one(one.token, one.logprob) | {"top_logprobs": [self._one(*top) for top in one.top]}
                for one in delta.logprobs
            ]
            return {"content": told, "refusal": None}
        names = [self._name(one.token)[0] for one in delta.logprobs]
        *offsets, end = itertools.accumulate(map(len, names), initial=self._offsets[index])
        self._offsets[index] = end
        return {
            "tokens": names,
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in delta.logprobs],
            "top_logprobs": [
                {self._name(token)[0]: max(logprob, LEAST_LOGPROB) for token, logprob in one.top} for one in delta.logprobs
            ],
            "text_offset": offsets,
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        name, said = self._name(token)
        return {"token": name, "logprob": max(logprob, LEAST_LOGPROB), "bytes": said}

    def _name(self, token: int) -> tuple[str, list[int] | None]:
        """What a token says, and its bytes; of one that is no text how the file spells it."""
        tokenizer = self.model.decoder.tokenizer
        said = tokenizer.says(token)
        if said is not None:
            return said.decode(errors="replace"), list(said)
        specials = getattr(tokenizer, "specials", {})
        return next((name for name, each in specials.items() if each == token), f"<{token}>"), None
