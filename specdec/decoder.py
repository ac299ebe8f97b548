"""`SpeculativeDecoder`: a target, what drafts for it, and their tokenizer. Knows no terminals."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from contextlib import suppress
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from specdec.draft.autotuner import Tuning
from specdec.draft.policy import CostModel
from specdec.draft.resolver import Draftable, Team, team_of
from specdec.draft.settings import AUTO, Gamma, Settings, TreeMode, setting
from specdec.engine.decoding import Event, Job, More, Prefill, Prompt, Shape, Stop, Text, with_more
from specdec.engine.prefix_cache import PromptCache
from specdec.loaders.loader import Loader, Pack, Progress, longest_text, tell_nobody
from specdec.model.transformer import KV, Transformer
from specdec.runtime.threads import give_lock, rebuilt
from specdec.sampling import Sampling, sampling_with
from specdec.text import structured_output
from specdec.text.chat_template import NO_OPTIONS, ChatTemplate, Message, Options, TemplateError, Tools, check_roles, template_of
from specdec.text.detokenizer import Generation, worded
from specdec.tokenizer import AnyTokenizer
from specdec.verification import VerifyMode

if TYPE_CHECKING:
    from typing_extensions import Unpack

Words = str | GenericSequence[int]
DEFAULT_SAMPLING = Sampling()


class SpeculativeDecoder:
    """A target, a draft that proposes for it, and their tokenizer.

    target: a Hugging Face folder, a GGUF file, a name on the hub ("org/name", "org/name:Q4_K_M"), the path of a llama2.c file,
        also looked for in models/, or a loaded `Transformer`.
    draft: the same, or a head; "mtp": the head in the target's own file, or beside it; "ngram": what followed in the text before;
        "auto", the default: "mtp" where there is one, else "ngram"; "self": an int8 or int4 copy of the target; None. A model of
        another vocabulary drafts by the tokens that both have (`shared`).
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

    gamma: Gamma = setting("gamma")
    verify: VerifyMode = setting("verify")
    tree: TreeMode = setting("tree")

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
        loader = Loader(n_threads, kv, progress, pack)
        self.team = team = replace(team_of(target, draft, stage, tokenizer, quantize, loader), prompts=prompt_cache)
        if tree == "on" and team.no_trees:
            raise ValueError(team.no_trees)
        self.target, self.draft, self.stage, self.tokenizer = team.target, team.draft.model, team.stage.model, team.tokenizer
        self.has_draft, self.has_stage = team.draft.source is not None, team.stage.source is not None
        self._named_template, self.tuning = template, Tuning(team)
        self._turn: RLock
        give_lock(self, "_turn")

    def __repr__(self) -> str:
        named = {"target": self.target, "draft": self.team.draft.source, "stage": self.team.stage.source}
        parts = [f"{name}={source!r}" for name, source in named.items() if source]
        return f"SpeculativeDecoder({', '.join(parts)}, gamma={self.gamma!r}, verify={self.verify!r}, tree={self.tree!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        state, settings = dict[str, Any](), vars(self._settings) | {"stage": self.team.stage if self.has_stage else None}
        with suppress(TemplateError):  # what has none is a decoder nevertheless
            state["chat_template"] = self.chat_template
        return rebuilt, (SpeculativeDecoder, (self.target, self.team.draft, self.tokenizer), settings), state

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The one that was named, or the model's own. Raises TemplateError where there is none."""
        return template_of(self.team.source, self.tokenizer.path, self._named_template)

    @property
    def n_ids(self) -> int:
        """How many ids the target may say; rows of its vocabulary behind them have no token."""
        return self.team.n_ids

    @property
    def n_positions(self) -> int:
        """How long a text may get: the target's context, or as much of it as the memory holds, whatever drafts."""
        return longest_text(self.target)

    @property
    def weights(self) -> str:
        """What the weights are, in words: "target fp32, draft int8"; also what a draft of another vocabulary shares."""
        return self.team.weights

    @property
    def shared(self) -> dict[str, int]:
        """Of models that have a part of the target's vocabulary, or another one, by their names: how many of its tokens."""
        return self.team.shared

    def encode(self, prompt: Words) -> list[int]:
        """The prompt's tokens, behind BOS where the model has one; ids are taken as they are.

        Raises ValueError for what seq_len cannot hold, for half a character and for ids from n_ids on, TypeError for all else.
        """
        return self.team.encode(prompt)

    @with_more
    def stream(
        self, prompt: Words = "", max_tokens: int = 256, sampling: Sampling = DEFAULT_SAMPLING, **more: "Unpack[More]"
    ) -> Iterator[Event]:
        """Events as they come: the `Prompt`, then `Step`s, each behind its `Proposal` where there is one.

        prompt: a text, or ids (see `encode`); shape: what may follow it (`json_schema`, `json_object`, `regex`), by default
        anything; stop: strings that it ends before; all else stands in the place of the sampling's. The text ends at an end mark,
        before a stop string, where its shape is complete, after max_tokens beyond the prompt, or at the target's seq_len; it is
        `"".join(event.text for event in stream if not isinstance(event, Proposal))`, of whole characters at any time.

        Streams may take turns on one model, in one thread or several, and each says what it would say alone; but a cache holds
        one text, so that a turn begins with running its tokens anew. Raises ValueError and TypeError for values that are none,
        ValueError for a prompt beyond seq_len, a text beyond the memory and a target whose logits are not finite.
        """
        return cast(Iterator[Event], self._events(prompt, max_tokens, sampling, **more))

    def _events(
        self, prompt: Words, max_tokens: int, sampling: Sampling, reader: Team | None = None, stop: Stop = (), **more: Any
    ) -> Iterator[Event | Prefill]:
        shape, sampling = more.pop("shape", None), sampling_with(sampling, **more)
        job = self.team.checked(Job(self.encode(prompt), max_tokens, sampling, stop, shape=shape, tells_guesses=bool(reader)))
        self.warm_up()
        return worded(self.tuning.events(job, self._settings, reader), self.team.wording(job))

    def text(self, seat: Team, job: Job, costs: CostModel) -> Text:
        """A text on a seat, once all is warm: that of `stream`, whoever runs its passes. costs: of the batch that it is in."""
        return self.tuning.text(seat, job, self._settings, costs)

    @with_more
    def generate(
        self, prompt: Words = "", max_tokens: int = 256, sampling: Sampling = DEFAULT_SAMPLING, **more: "Unpack[More]"
    ) -> Generation:
        """The whole text, as `stream` has it, and its statistics; threads that call this on one decoder wait for each other."""
        return self._whole(lambda: self.stream(prompt, max_tokens, sampling, **more))

    def json_schema(self, schema: Mapping[str, Any]) -> Shape:
        """A text that is one JSON value by that schema, its separators ", " and ": ".

        Raises ValueError for a schema that is none, or that uses what is not done here, and where the package is missing.
        """
        return structured_output.json_schema(self.tokenizer, schema)

    def json_object(self) -> Shape:
        """A text that is any one JSON object, written as `json_schema` says."""
        return structured_output.json_object(self.tokenizer)

    def regex(self, pattern: str) -> Shape:
        """A text that the pattern matches as a whole, in the syntax of Rust's regex, without look-around. Raises ValueError."""
        return structured_output.regex(self.tokenizer, pattern)

    def encode_chat(
        self, messages: GenericSequence[Message], tools: Tools | None = None, options: Options = NO_OPTIONS
    ) -> list[int]:
        """A conversation's tokens as the model's template has them, up to where the answer begins.

        messages: objects of "role" ("system", "user", "assistant") and "content"; an answer's "tokens", where it has some, are
        taken as they are. tools: functions that the answer may call, as the template takes them; options: what else it may ask
        for, such as {"enable_thinking": False}. Raises TemplateError for a model without a template and for what that refuses.
        """
        check_roles(messages)
        return self.chat_template.encode(self.tokenizer, messages, self.n_positions, tools, options)

    @with_more
    def chat(
        self,
        messages: GenericSequence[Message],
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        **more: "Unpack[More]",
    ) -> Iterator[Event]:
        """The answer to a conversation as it comes: `stream` of `encode_chat`, but that its `Prompt` has no text."""
        events = self.stream(self.encode_chat(messages), max_tokens, sampling, **more)
        return (replace(event, text="") if isinstance(event, Prompt) else event for event in events)

    @with_more
    def answer(
        self,
        messages: GenericSequence[Message],
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        **more: "Unpack[More]",
    ) -> Generation:
        """The whole answer to a conversation, which is the generation's text; all else as `generate` and `encode_chat` say."""
        return self._whole(lambda: self.chat(messages, max_tokens, sampling, **more))

    @with_more
    def read_and_stream(
        self, prompt: Words, max_tokens: int, sampling: Sampling = DEFAULT_SAMPLING, **more: "Unpack[More]"
    ) -> Iterator[Event | Prefill]:
        """`stream`, with a `Prefill` for each share of what is read, also anew, and with the words of what is guessed."""
        return self._events(prompt, max_tokens, sampling, self.team, **more)

    def read(self, tokens: list[int]) -> Iterator[float]:
        """Run a prompt's tokens into the caches; tells the share of that that is done, nothing where they hold it already."""
        return self.team.read(tokens)

    def warm_up(self) -> None:
        """Compile, or load, and measure what a text of these settings needs, and choose the threads, unless they were given."""
        if self.tuning.undone(self._settings):
            with self._turn:
                self.tuning.warm_up(self._settings)

    def _whole(self, begin: Callable[[], Iterator[Event]]) -> Generation:
        with self._turn:
            return Generation.of(begin())
