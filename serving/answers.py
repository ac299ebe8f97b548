"""Events of texts become OpenAI's answers, in chunks or whole. Knows no requests and no server."""

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..decoding import Event, Prompt, Proposal, Statistics, Step, TokenLogprob
from ..text.wording import Until
from ..tokenizer import AnyTokenizer, TextStream
from .asked import Asked, Model
from .calls import Call, More, Said, Thought
from .engine import Job

# of decoding's reasons, those that are no end of the model's own
CUT = ("max_tokens", "seq_len", "interrupted")
CALL_ID = 9  # letters of a call's id: as many as Mistral's templates take, and no others
LEAST_LOGPROB = -9999.0  # OpenAI's number, in the place of the infinity that JSON has none for


@dataclass
class Delta:
    """What a text grows by: words, calls of tools, log probabilities, and how it ends, None before that.

    thought: words that come before the answer's own. details: which of the words were guessed, for who asks.
    """

    words: str = ""
    thought: str = ""
    calls: list[Call | More] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    details: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.words or self.thought or self.calls or self.logprobs or self.finish or self.details)

    def add(self, other: "Delta") -> None:
        self.words += other.words
        self.thought += other.thought
        for each in other.calls:
            self._add_call(each)
        self.logprobs += other.logprobs
        self.finish, self.details = other.finish, other.details

    def says(self, said: Said) -> None:
        if isinstance(said, str):
            self.words += said
        elif isinstance(said, Thought):
            self.thought += said.words
        else:
            self._add_call(said)

    def _add_call(self, call: Call | More) -> None:
        if self.calls and isinstance(call, More):
            self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + call.arguments)
        else:
            self.calls.append(call)


class Choice:
    """One text of an answer: its events become deltas."""

    def __init__(self, asked: Asked, job: Job, model: Model) -> None:
        self._model, self._calls, self._one_call = model, asked.calls(), asked.one_call
        self.statistics, self.n_calls = Statistics(), 0
        self._reading = Reading(model.decoder.tokenizer, job.stops) if asked.details else None

    def takes(self, event: Event) -> Delta:
        self.statistics.add(event)
        if isinstance(event, Proposal):
            return Delta()
        if isinstance(event, Prompt):
            if self._reading:
                self._reading.begin(event.tokens)
            return Delta()
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
        if event.stop_reason:
            delta.finish = "length" if event.stop_reason in CUT else "tool_calls" if self.n_calls else "stop"
        if self._reading:
            delta.details = self._reading.of(event)
            if event.stop_reason:
                delta.details |= figures(self.statistics)
        return delta


def figures(statistics: Statistics) -> dict[str, Any]:
    """How a text went, for who asks. Its seconds are those of passes that it shared, which tell nothing of the target alone."""
    return {
        "tokens": statistics.n_generated,
        "passes": statistics.target_passes,
        "drafted": statistics.n_drafted,
        "accepted": statistics.n_accepted,
        "seconds": round(statistics.decode_seconds, 4),
    }


class Reading:
    """Whose words those of a text's steps are: guessed ones that stood, and the target's own."""

    def __init__(self, tokenizer: AnyTokenizer, stops: Sequence[str]) -> None:
        self._stream, self._until = TextStream(tokenizer), Until(stops)

    def begin(self, prompt: list[int]) -> None:
        for token in prompt:
            self._stream.push(token)

    def of(self, step: Step) -> dict[str, Any]:
        """`runs`: the step's text in pieces, each of them guessed or own; `wrong`: guesses that did not stand."""
        guessed = self._read(step.tokens[: step.n_accepted])
        wrong = "".join(self._stream.peek(step.draft_tokens[step.n_accepted :]))
        own = self._read(step.tokens[step.n_accepted :])
        if step.stop_reason:
            own += self._until.push(self._stream.end()) + self._until.end()
        return {"runs": [[kind, words] for kind, words in (("guessed", guessed), ("own", own)) if words], "wrong": wrong}

    def _read(self, tokens: list[int]) -> str:
        return "".join([self._until.push(self._stream.push(token)) for token in tokens])


class Answer:
    """An answer's chunks and its whole. choices: its texts."""

    def __init__(self, asked: Asked, model: Model, fingerprint: str) -> None:
        self._asked, self._model, self._fingerprint = asked, model, fingerprint
        self._id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self.choices = [Choice(asked, job, model) for job in asked.jobs]
        self._n_calls = [0] * len(self.choices)
        self._offsets = [0] * len(self.choices)

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        return self._chunk([self._choice(index, delta={"role": "assistant", "content": ""}, logprobs=None, finish_reason=None)])

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """What a choice grows by."""
        finish = {"logprobs": self._logprobs(index, delta), "finish_reason": delta.finish}
        if not self._asked.is_chat:
            return self._chunk([self._choice(index, text=delta.words, **finish)], delta.details)
        told: dict[str, Any] = _words(delta)
        if delta.calls:
            told["tool_calls"] = []
            for call in delta.calls:
                self._n_calls[index] += isinstance(call, Call)
                told["tool_calls"].append({"index": self._n_calls[index] - 1, **_call(call)})
        return self._chunk([self._choice(index, delta=told, **finish)], delta.details)

    def last_chunk(self) -> dict[str, Any] | None:
        """That of the usage, where it is asked for."""
        return self._chunk([]) | {"usage": self.usage} if self._asked.has_usage else None

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer of what all choices came to."""
        choices = list[dict[str, Any]]()
        for index, delta in enumerate(deltas):
            finish = {"logprobs": self._logprobs(index, delta), "finish_reason": delta.finish}
            if self._asked.is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None} | _words(delta)
                if delta.calls:
                    message |= {"content": delta.words or None, "tool_calls": [_call(call) for call in delta.calls]}
                choices.append(self._choice(index, message=message, **finish))
            else:
                choices.append(self._choice(index, text=delta.words, **finish))
        kind = "chat.completion" if self._asked.is_chat else "text_completion"
        details = next((delta.details for delta in deltas if delta.details), None)
        return self._head(kind, choices) | {"usage": self.usage} | ({"specdec": details} if details else {})

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; a prompt that several share is counted once."""
        parts = [choice.statistics for choice in self.choices]
        prompts = {id(job.prompt): len(job.prompt) for job in self._asked.jobs}
        n_prompt, n_text = sum(prompts.values()), sum(part.n_generated for part in parts)
        accepted, drafted = sum(part.n_accepted for part in parts), sum(part.n_drafted for part in parts)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_text,
            "total_tokens": n_prompt + n_text,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def _chunk(self, choices: list[dict[str, Any]], details: dict[str, Any] | None = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.is_chat else "text_completion"
        chunk = self._head(kind, choices) | ({"usage": None} if self._asked.has_usage else {})
        return chunk | ({"specdec": details} if details else {})

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    @staticmethod
    def _choice(index: int, **more: Any) -> dict[str, Any]:
        return {"index": index, **more}

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """As the kind of request has them; None where none are asked for."""
        if not delta.logprobs:
            return None
        if self._asked.is_chat:
            told = [
                self._told(one.token, one.logprob) | {"top_logprobs": [self._told(*top) for top in one.top]}
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

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        name, said = self._name(token)
        return {"token": name, "logprob": max(logprob, LEAST_LOGPROB), "bytes": said}

    def _name(self, token: int) -> tuple[str, list[int] | None]:
        """What a token says, and its bytes; of one that is no text how the file spells it."""
        tokenizer = self._model.decoder.tokenizer
        said = tokenizer.says(token)
        if said is not None:
            return said.decode(errors="replace"), list(said)
        specials = getattr(tokenizer, "specials", {})
        return next((name for name, each in specials.items() if each == token), f"<{token}>"), None


def _words(delta: Delta) -> dict[str, Any]:
    """By the names that most clients know."""
    return {name: said for name, said in (("reasoning_content", delta.thought), ("content", delta.words)) if said}


def _call(call: Call | More) -> dict[str, Any]:
    if isinstance(call, More):
        return {"function": {"arguments": call.arguments}}
    named = {"name": call.name, "arguments": call.arguments}
    return {"id": secrets.token_hex(5)[:CALL_ID], "type": "function", "function": named}
