"""`SpeculativeDecoder`: a target, what drafts for it, and their tokenizer. Knows no terminals."""

import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

from .checks import ids, is_list, short, strings, text, whole
from .decoding import Event, Plan, Prefill, Prompt, Proposal, Shape, Statistics, Step, Text, VerifyMode
from .drafting.prompt_cache import PromptCache
from .drafting.settings import AUTO, Gamma, Setting, Settings, TreeMode
from .drafting.team import HEAD, Draftable, Team, team_of
from .drafting.tuning import Tuning
from .machine.threads import give_lock
from .readers.loading import Loader, Pack, Progress, check_memory, longest_text, tell_nobody
from .sampling import Sampling, sampling_with
from .text import shapes
from .text.templates import NO_OPTIONS, ChatTemplate, Message, Options, TemplateError, Tools, check_roles, template_of
from .text.wording import worded
from .tokenizer import AnyTokenizer
from .transformer import KV, Transformer

Words = str | Sequence[int]
Stop = str | Sequence[str]
DEFAULT_SAMPLING = Sampling()


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


class SpeculativeDecoder:
    """A target, a draft that proposes for it, and their tokenizer.

    target: a Hugging Face folder, a GGUF file, a name on the hub ("org/name", "org/name:Q4_K_M"), the path of a llama2.c file,
        also looked for in models/, or a loaded `Transformer`.
    draft: the same, or a head; "mtp": the head that a Qwen3.5 brings along in its file; "ngram": what followed in the text
        before; "auto", the default: "mtp" where the target's file has one, else "ngram"; "self": an int8 or int4 copy of the
        target; None. A model of another vocabulary drafts by the tokens that both have (`shared`).
    tokenizer: a path or a tokenizer; by default the one in the target's folder or file, beside it or in models/.
    stage: "ngram" or a smaller model, which guesses for the draft model. The draft checks that before the target does.
    gamma: draft tokens a step, 1 to 63, or "auto": as many as pay, and none where none do.
    verify: "coupled" (the text is the plain run's of the same seed), "rejection" (Leviathan et al. 2023) or "block" (Sun et al.
        2024), which have the plain run's distribution.
    tree: whether proposals are token trees, several candidates for a place, gamma deep: "on", "off" or "auto", which means off;
        of a draft model without a stage, where both run trees. These three may be set anew.
    n_threads: by default all cores, or fewer where a trial shows that they are faster.
    quantize: what models that are named, not loaded, become where their weights are floats: "target", "draft" (and its stage)
        or "both" become int8, "none" does; as "draft=int4" or "target=int8,draft=int4" what is said.
    template: the file of a chat template, or "llama2", which llama2.c exports of Llama 2 chat need; by default the model's own.
    kv: what models that are named keep keys and values in, as `Transformer` says, drafts by default in what their target does.
    pack: whether bf16 weights of models that are named are kept in 12 bits, the same numbers: "auto", where a trial shows that
        it is faster; "on"; "none".
    prompt_cache: a folder where what has been read of prompts is kept for later processes: `PromptCache`; by default nowhere.
    progress: is told the name of a model and the share of it that is loaded.

    >>> decoder = SpeculativeDecoder("stories6M.bin", "stories650K.bin")
    >>> decoder.generate("Once upon a time", 20, temperature=0).continuation
    ', there was a little girl named Lily. She loved to play with her toys and eat yummy'
    >>> for event in decoder.stream("Once upon a time", 12, Sampling(temperature=0.8, seed=7)):
    ...     if not isinstance(event, Proposal):
    ...         print(event.text, end="")
    Once upon a time, there was a little girl named Lily. She loved to

    Threads may share a decoder: `generate` waits its turn, streams may take turns. A decoder can be pickled, and so sent to
    processes that were spawned; one that was forked after a model has run on several threads has lost them, and says so.
    Raises CheckpointError or TokenizerError for files that cannot be used, ValueError for values or models that do not fit.
    """

    gamma = Setting[Gamma]()
    verify = Setting[VerifyMode]()
    tree = Setting[TreeMode]()

    def __init__(
        self,
        target: str | os.PathLike[str] | Transformer,
        draft: Draftable | None = AUTO,
        tokenizer: str | os.PathLike[str] | AnyTokenizer | None = None,
        *,
        stage: Draftable | None = None,
        gamma: Gamma = AUTO,
        verify: VerifyMode = "coupled",
        tree: TreeMode = "off",
        n_threads: int | None = None,
        quantize: str = "draft",
        template: str | os.PathLike[str] | None = None,
        kv: KV = AUTO,
        pack: Pack = AUTO,
        progress: Progress = tell_nobody,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self._settings = Settings(gamma, verify, tree)
        if stage is not None and tree == "on":
            raise ValueError('a draft with a stage proposes chains; leave out the stage, or tree "on"')
        loader = Loader(n_threads, kv, progress, pack)
        self._team = team = replace(team_of(target, draft, stage, tokenizer, quantize, loader), prompts=prompt_cache)
        if HEAD in team.models and tree == "on":
            raise ValueError('a head proposes chains; leave out tree "on"')
        if tree == "on" and (of_chains := [name for name, model in team.models.items() if not model.runs_trees]):
            raise ValueError(f'the {of_chains[0]} runs no trees: its state is that of one text; leave out tree "on"')
        self.target, self.draft, self.stage, self.tokenizer = team.target, team.draft.model, team.stage.model, team.tokenizer
        self.has_draft, self.has_stage = team.draft.source is not None, team.stage.source is not None
        self._named_template, self._tuning = template, Tuning(team)
        self._turn: RLock
        give_lock(self, "_turn")

    def __repr__(self) -> str:
        named = {"target": self.target, "draft": self._team.draft.source, "stage": self._team.stage.source}
        parts = [f"{name}={source!r}" for name, source in named.items() if source]
        return f"SpeculativeDecoder({', '.join(parts)}, gamma={self.gamma!r}, verify={self.verify!r}, tree={self.tree!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        state, settings = dict[str, Any](), vars(self._settings) | {"stage": self._team.stage if self.has_stage else None}
        with suppress(TemplateError):  # what has none is a decoder nevertheless
            state["chat_template"] = self.chat_template
        return _rebuilt, ((self.target, self._team.draft, self.tokenizer), settings), state

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The one that was named, or the model's own. Raises TemplateError where there is none."""
        return template_of(self._team.source, self.tokenizer.path, self._named_template)

    @property
    def plain_seconds(self) -> float:
        """What a token of the last text would have taken the target alone, as measured while it ran; 0 where nothing drafts."""
        return self._tuning.costs.plain_seconds if self._tuning.costs else 0.0

    @property
    def advised_sampling(self) -> Mapping[str, float]:
        """What the target's files advise to draw with: by the names of `Sampling`, those that they tell."""
        return self._team.source.sampling if self._team.source else {}

    @property
    def pooling(self) -> str:
        """Which hidden states its files say are a text's embedding: "mean", "last", "cls", or "" where they do not."""
        return self._team.source.pooling if self._team.source else ""

    @property
    def n_ids(self) -> int:
        """How many ids the target may say; rows of its vocabulary behind them have no token."""
        return self._team.draft.vocabulary.n_target

    @property
    def n_positions(self) -> int:
        """How long a text may get: the target's context, or as much of it as the memory holds, whatever drafts."""
        return longest_text(self.target)

    @property
    def weights(self) -> str:
        """What the weights are, in words: "target fp32, draft int8"; also what a draft of another vocabulary shares."""
        shared = {name: f" ({n:,} of {self.n_ids:,} tokens)" for name, n in self.shared.items()}
        return ", ".join(f"{name} {model.weights.kind}{shared.get(name, '')}" for name, model in self._team.models.items())

    @property
    def shared(self) -> dict[str, int]:
        """Of models that have a part of the target's vocabulary, or another one, by their names: how many of its tokens."""
        return self._team.shared

    def encode(self, prompt: Words) -> list[int]:
        """The prompt's tokens, behind BOS where the model has one; ids are taken as they are.

        Raises ValueError for what seq_len cannot hold, for half a character and for ids from n_ids on, TypeError for all else.
        """
        if isinstance(prompt, str) or not is_list(prompt):
            tokens = self.tokenizer.encode(text("prompt", prompt))
        else:
            tokens, most = ids("the prompt's ids", prompt), self.n_ids - 1
            if not tokens or not 0 <= min(tokens) <= max(tokens) <= most:
                raise ValueError(f"prompt is {short(tokens)}; expected a string, or token ids from 0 to {most}")
        if len(tokens) > self.target.n_positions:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the target's seq_len is {self.target.n_positions}")
        return tokens

    def stream(
        self,
        prompt: Words = "",
        max_tokens: int = 256,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: Stop = (),
        shape: Shape | None = None,
    ) -> Iterator[Event]:
        """Events as they come: the `Prompt`, then `Step`s, each behind its `Proposal` where there is one.

        prompt: a text, or ids (see `encode`); shape: what may follow it (`json_schema`, `json_object`, `regex`), by default
        anything. The text ends at an end mark, before a stop string, where its shape is complete, after max_tokens beyond the
        prompt, or at the target's seq_len; it is `"".join(event.text for event in stream if not isinstance(event, Proposal))`,
        of whole characters at any time.

        Streams may take turns on one model, in one thread or several, and each says what it would say alone; but a cache holds
        one text, so that a turn begins with running its tokens anew. Raises ValueError and TypeError for values that are none,
        ValueError for a prompt beyond seq_len, a text beyond the memory and a target whose logits are not finite.
        """
        tokens, max_tokens, stops = self.checked(prompt, max_tokens, sampling, stop, shape)
        self.warm_up()
        return worded(self._tuning.events(tokens, max_tokens, sampling, self._settings, shape), self.tokenizer, stops)

    def checked(
        self, prompt: Words, max_tokens: int, sampling: Sampling, stop: Stop, shape: Shape | None = None
    ) -> tuple[list[int], int, list[str]]:
        """What `stream` is asked for: the prompt's tokens, max_tokens, the stop strings. Raises what it raises."""
        tokens, stops, max_tokens = self.encode(prompt), strings("stop", stop), whole("max_tokens", max_tokens, 0)
        check_memory(self.target, len(tokens) + max_tokens - 1)  # the last one is never run
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling is {short(sampling, repr)}; expected Sampling(temperature=..., seed=...)")
        if sampling.biases and (wrong := sampling.biases[-1][0]) >= self.n_ids:
            raise ValueError(f"logit_bias holds the id {wrong}; expected ids from 0 to {self.n_ids - 1}")
        shapes.check_shape(shape, self.tokenizer)
        return tokens, max_tokens, stops

    @property
    def tuning(self) -> Tuning:
        """What is known of how it writes on this machine."""
        return self._tuning

    def seat(self) -> Team:
        """The models with caches of their own, for a text that shares passes with others."""
        return self._team.seat()

    def text(self, seat: Team, prompt: list[int], max_tokens: int, sampling: Sampling, shape: Shape | None, plan: Plan) -> Text:
        """A text on a seat, once all is warm: that of `stream`, whoever runs its passes. plan: see `Tuning.text`."""
        return self._tuning.text(seat, prompt, max_tokens, sampling, self._settings, shape, plan)

    def generate(
        self,
        prompt: Words = "",
        max_tokens: int = 256,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: Stop = (),
        shape: Shape | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Generation:
        """The whole text, its tokens and its statistics; parameters and errors are those of `stream`.

        temperature, top_k, top_p, seed: in the place of the sampling's. Threads that call it on one decoder wait for each other.
        """
        sampling = sampling_with(sampling, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        with self._turn:
            return self._whole(self.stream(prompt, max_tokens, sampling, stop=stop, shape=shape))

    def json_schema(self, schema: Mapping[str, Any]) -> Shape:
        """A text that is one JSON value by that schema, its separators ", " and ": ".

        Raises ValueError for a schema that is none, or that uses what is not done here, and where the package is missing.
        """
        return shapes.json_schema(self.tokenizer, schema)

    def json_object(self) -> Shape:
        """A text that is any one JSON object, written as `json_schema` says."""
        return shapes.json_object(self.tokenizer)

    def regex(self, pattern: str) -> Shape:
        """A text that the pattern matches as a whole, in the syntax of Rust's regex, without look-around. Raises ValueError."""
        return shapes.regex(self.tokenizer, pattern)

    def encode_chat(self, messages: Sequence[Message], tools: Tools | None = None, options: Options = NO_OPTIONS) -> list[int]:
        """A conversation's tokens as the model's template has them, up to where the answer begins.

        messages: objects of "role" ("system", "user", "assistant") and "content"; an answer's "tokens", where it has some, are
        taken as they are. tools: functions that the answer may call, as the template takes them; options: what else the template
        may ask for, such as {"enable_thinking": False}. Raises TemplateError for a model without a template and for messages
        that it refuses.
        """
        check_roles(messages)
        return self.chat_template.encode(self.tokenizer, messages, self.n_positions, tools, options)

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: Stop = (),
        shape: Shape | None = None,
    ) -> Iterator[Event]:
        """The answer to a conversation as it comes: `stream` of `encode_chat`, but that its `Prompt` has no text."""
        events = self.stream(self.encode_chat(messages), max_tokens, sampling, stop=stop, shape=shape)
        return (replace(event, text="") if isinstance(event, Prompt) else event for event in events)

    def answer(
        self,
        messages: Sequence[Message],
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: Stop = (),
        shape: Shape | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Generation:
        """The whole answer to a conversation, which is the generation's text; all else as `generate` and `encode_chat` say."""
        sampling = sampling_with(sampling, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        with self._turn:
            return self._whole(self.chat(messages, max_tokens, sampling, stop=stop, shape=shape))

    def read(self, tokens: list[int]) -> Iterator[float]:
        """Run a prompt's tokens into the caches, some at a time; tells the share of that work that is done, 0 at first.

        A stream of that prompt then begins at once. Nothing is told where the caches hold it already.
        """
        return self._team.read(tokens)

    def read_and_stream(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: Stop = (),
        shape: Shape | None = None,
    ) -> Iterator[Event | Prefill]:
        """`stream` of a prompt's tokens, behind a `Prefill` for each share of `read`, also where the text is read anew."""
        turns = {model.config.n_short for model in self._team.models.values()} - {0}
        return _with_reading(prompt, self.read, turns, self.stream(prompt, max_tokens, sampling, stop=stop, shape=shape))

    def warm_up(self) -> None:
        """Compile, or load, whatever a text of these settings needs, measure what it takes and, unless it was given, choose the
        number of threads; a text begins with what is left of that.
        """
        if self._tuning.undone(self._settings):
            with self._turn:
                self._tuning.warm_up(self._settings)

    def _whole(self, events: Iterator[Event]) -> Generation:
        generation = Generation.of(events)
        generation.statistics.plain_seconds = self.plain_seconds
        return generation


def _with_reading(
    prompt: list[int], read: Callable[[list[int]], Iterator[float]], turns: Collection[int], events: Iterator[Event]
) -> Iterator[Event | Prefill]:
    """The events of a text, behind those of its prompt's reading; what that takes is the `Prompt`'s time.

    turns: behind how many tokens the text is run anew, by a model that turns long ones otherwise; that is the next step's time.
    """
    tokens, seconds = [*prompt], 0.0

    def reading() -> Iterator[Prefill]:
        nonlocal seconds
        begin = time.perf_counter()
        for share in read(tokens):
            yield Prefill([*tokens], share)
        seconds = time.perf_counter() - begin

    yield from reading()
    for event in events:
        if isinstance(event, Proposal):
            yield event
            continue
        n, (more, seconds) = len(tokens), (seconds, 0.0)
        tokens += event.tokens if isinstance(event, Step) else []
        yield replace(event, seconds=event.seconds + more)
        if isinstance(event, Step) and event.stop_reason is None and any(n <= turn < len(tokens) for turn in turns):
            yield from reading()


def _rebuilt(models: Sequence[Any], settings: dict[str, Any]) -> SpeculativeDecoder:
    """A decoder from its pickled parts."""
    return SpeculativeDecoder(*models, **settings)
