"""The `SpeculativeDecoder`, the library's main class: a target, its draft and their tokenizer, without any terminal output."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from contextlib import suppress
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING

from specdec.draft.model_bundle import DraftSpec, load_bundle
from specdec.draft.settings import AUTO, Gamma, SpeculativeSettings, TreeMode, settings_property
from specdec.engine.autotuner import Autotuner
from specdec.engine.metrics import Metrics
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationKwargs, GenerationRequest, Stop, validate_request
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.warm_up import WarmUp
from specdec.events import Event, PrefillProgress, Prompt
from specdec.loaders.model_loader import Loader, PackMode, ProgressCallback, compute_max_positions, ignore_progress
from specdec.model.model import KVFormatName, Model
from specdec.protocols import Constraint
from specdec.runtime.parallel_region import create_fork_safe_lock, rebuild
from specdec.sampling import Sampling, SamplingOverrides, override_sampling
from specdec.text.detokenizer import Generation
from specdec.tokenizer import NO_TOKENS, AnyTokenizer
from specdec.verification import VerifyMode

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from specdec.engine.disk_prompt_cache import PromptCache
    from specdec.text.chat_template import ChatTemplate, Message, Options, Tools
    from specdec.text.reasoning import ReasoningMarks

PromptInput = str | GenericSequence[int]
DEFAULT_SAMPLING = Sampling()


class SpeculativeDecoder:
    """A target model, a draft that proposes tokens for it, and their tokenizer.

    Threads may share a decoder: `generate` waits for its turn, streams may take turns. A decoder can be pickled, and so sent to
    spawned processes. A process that was forked after a model ran on several threads has lost those threads, and a run in it
    raises an error that says so.

    Args:
        target: A Hugging Face folder, a GGUF file, a name on the hub ("org/name", "org/name:Q4_K_M"), the path of a llama2.c
            file, also searched in models/, or a loaded `Model`.
        draft: The same, or a head; "mtp": the head in the target's own file or next to it; "lookup": tokens that followed an
            earlier match or that the target found likely; "auto", the default: "mtp" if there is one, else "lookup"; "self": an
            int8 or int4 copy of the target; None: no draft. A model with another vocabulary drafts with the tokens that both
            have (`shared`).
        tokenizer: A path or a tokenizer; by default the one in the target's folder or file, next to it or in models/.
        stage: "lookup" or a smaller model, the second-level draft. The draft model verifies its tokens before the target does.
        gamma: Draft tokens per step, 1 to 63, or "auto": as many as are profitable, none if none are.
        verify: "coupled" (the output equals that of a plain run with the same seed), "rejection" (Leviathan et al. 2023) or
            "block" (Sun et al. 2024), which keep the distribution of a plain run.
        tree: Whether proposals are token trees with several candidates per position: "off", "on" or "auto", which means off for
            models, and trees where they are profitable for "lookup". "on" makes those of a draft model gamma deep; it needs one
            without a stage, and target and draft that can run trees. `gamma`, `verify` and `tree` can also be set later.
        n_threads: By default all cores, or fewer if a trial shows that they are faster.
        quantize: Which models, if they are named and not loaded, are quantized: "target" to int8, "draft" (and its stage) to
            int8, int4 or int3 by its size, "both" or "none"; "draft=int4" or "target=int8,draft=int4" chooses the format. A
            matrix of a GGUF block type keeps it unless the format saves 15% of its bytes.
        template: The file of a chat template, or "llama2" for llama2.c exports of Llama 2 chat; by default the model's own.
        kv: KV cache format of named models, as in `Model`. Drafts use the format of their target by default.
        pack: Whether bf16 weights of named models are kept in 12 bits, without loss: "auto" if a trial shows that it is faster,
            "on" or "none".
        packed: Whether packed weights are kept on disk, from which the next process starts without packing: "auto" for models
            of 100 MB or more, "on", "off", or the folder to keep them in.
        prompt_cache: A `specdec.engine.disk_prompt_cache.PromptCache`, which keeps prefilled prompts for later processes; by
            default none.
        progress: Called with the name of a model and the fraction of it that is loaded.

    Raises:
        CheckpointError: If a model file cannot be used.
        TokenizerError: If a tokenizer file cannot be used.
        ValueError: If values are not valid, or models do not fit together.
        TypeError: If a value has the wrong type.

    >>> decoder = SpeculativeDecoder("stories6M.bin", "stories650K.bin")
    >>> decoder.generate("Once upon a time", 20, temperature=0).continuation
    ', there was a little girl named Lily. She loved to play with her toys and eat yummy'
    >>> for event in decoder.stream("Once upon a time", 12, Sampling(temperature=0.8, seed=7)):
    ...     if not isinstance(event, Proposal):
    ...         print(event.text, end="")
    Once upon a time, there was a little girl named Lily. She loved to
    """

    gamma: Gamma = settings_property("gamma")
    verify: VerifyMode = settings_property("verify")
    tree: TreeMode = settings_property("tree")

    def __init__(
        self,
        target: str | os.PathLike[str] | Model,
        draft: DraftSpec | None = AUTO,
        tokenizer: str | os.PathLike[str] | AnyTokenizer | None = None,
        *,
        stage: DraftSpec | None = None,
        gamma: Gamma = AUTO,
        verify: VerifyMode = "coupled",
        tree: TreeMode = "auto",
        n_threads: int | None = None,
        quantize: str = "draft",
        template: str | os.PathLike[str] | None = None,
        kv: KVFormatName = AUTO,
        pack: PackMode = AUTO,
        packed: str | os.PathLike[str] = AUTO,
        progress: ProgressCallback = ignore_progress,
        prompt_cache: "PromptCache | None" = None,
    ) -> None:
        """Load the models that are given by name, and check that they fit together."""
        self._settings = SpeculativeSettings(gamma, verify, tree)
        loader = Loader(n_threads, kv, progress, pack, packed)
        self.bundle = bundle = load_bundle(target, draft, stage, tokenizer, quantize, loader)
        if tree == "on" and bundle.tree_incompatibility:
            raise ValueError(bundle.tree_incompatibility)
        self.target, self.tokenizer = bundle.target, bundle.tokenizer
        self.draft, self.stage = bundle.draft.model, bundle.stage.model
        self.has_draft, self.has_stage = not bundle.draft.is_empty, not bundle.stage.is_empty
        self._template, self.autotuner = template, Autotuner(bundle)
        self.prompt_cache, self._prefix_cache = prompt_cache, PrefixCache(bundle, 1, prompt_cache)
        self._warm_up = WarmUp(self.autotuner)
        self._lock: RLock
        create_fork_safe_lock(self, "_lock")

    def __repr__(self) -> str:
        """Return the models and the settings of speculation as text."""
        named = {"target": self.target, "draft": self.bundle.draft.model_or_lookup, "stage": self.bundle.stage.model_or_lookup}
        parts = [f"{name}={source!r}" for name, source in named.items() if source]
        return f"SpeculativeDecoder({', '.join(parts)}, gamma={self.gamma!r}, verify={self.verify!r}, tree={self.tree!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickle needs to rebuild the decoder with the same models, settings and chat template."""
        state, settings = dict[str, object](), vars(self._settings) | {"stage": self.bundle.stage if self.has_stage else None}
        with suppress(ValueError):  # a decoder without a chat template can be pickled too
            state["chat_template"] = self.chat_template
        return rebuild, (SpeculativeDecoder, (self.target, self.bundle.draft, self.tokenizer), settings), state

    @functools.cached_property
    def chat_template(self) -> "ChatTemplate":
        """The `ChatTemplate` of conversations: the one that was named for the decoder, or else the model's own.

        Raises:
            TemplateError: If there is no template, or it cannot be used.
        """
        from specdec.text.chat_template import load_chat_template

        return load_chat_template(self.bundle.checkpoint, self.tokenizer.path, self._template)

    @property
    def n_ids(self) -> int:
        """The number of token ids that the target can generate: 0 to n_ids - 1; later rows of its vocabulary have no token."""
        return self.bundle.n_ids

    @property
    def n_positions(self) -> int:
        """The maximum number of tokens in a sequence: the target's context length, or as much of it as fits into memory."""
        return compute_max_positions(self.target)

    @property
    def weights(self) -> str:
        """The weight formats of all models as text, such as "target fp32, draft int8", with the numbers in `shared`."""
        return self.bundle.weights

    @property
    def shared(self) -> dict[str, int]:
        """The number of tokens shared with the target, by "draft", "head" or "stage", for each model that lacks some of them."""
        return self.bundle.shared

    def encode(self, prompt: PromptInput) -> list[int]:
        """Return the token ids of a prompt: a string is tokenized, after BOS if the model has one; token ids are only checked.

        Raises:
            ValueError: If the prompt exceeds seq_len, contains half a character, or has ids that are not below n_ids.
            TypeError: If the prompt is neither a string nor token ids.
        """
        return self.bundle.encode(prompt)

    def stream(
        self,
        prompt: PromptInput = "",
        max_tokens: int = 256,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        stop: Stop = (),
        constraint: Constraint | None = None,
        **overrides: "Unpack[SamplingOverrides]",
    ) -> Iterator[Event]:
        """Generate a completion of a prompt and yield its events: the `Prompt`, then `Step`s, each after its `Proposal` if any.

        The output ends at an end-of-sequence token, before a stop string, when its constraint is complete, after max_tokens, or
        at the target's seq_len. Prompt and output are
        `"".join(event.text for event in stream if not isinstance(event, Proposal))`, whole characters at any time.

        The call itself checks the arguments and warms the decoder up; the passes run as the events are consumed. Streams may take
        turns on one model, in one thread or several, and the output of each is the same as alone. Each has a KV cache of its own.

        Args:
            prompt: A string, or token ids (see `encode`).
            max_tokens: The maximum number of tokens after the prompt.
            sampling: The sampling parameters.
            stop: Strings before which the output ends.
            constraint: What the output must match, made by `json_schema`, `json_object` or `regex`; by default anything.
            **overrides: Values that replace fields of `sampling`; see `generate`.

        Raises:
            ValueError: If a value is not valid, the prompt exceeds seq_len, the sequence exceeds the memory, or the target's
                logits are not finite.
            TypeError: If a value has the wrong type.
        """
        events = self.read_and_stream(
            prompt, max_tokens, sampling, stop=stop, constraint=constraint, include_draft_text=False, **overrides
        )
        return (event for event in events if not isinstance(event, PrefillProgress))

    def make_scheduler(self, prefix_cache: PrefixCache, max_running: int = 1, metrics: Metrics | None = None) -> Scheduler:
        """Return a new `Scheduler` with the current settings; the decoder must be warmed up. See there for the arguments."""
        return Scheduler(self.autotuner, self._settings, prefix_cache, max_running, metrics)

    def generate(
        self,
        prompt: PromptInput = "",
        max_tokens: int = 256,
        sampling: Sampling = DEFAULT_SAMPLING,
        **kwargs: "Unpack[GenerationKwargs]",
    ) -> Generation:
        """Generate a completion of a prompt, and return the whole output with its statistics as a `Generation`.

        Threads that call this on one decoder wait for each other. `stream` yields the same output step by step.

        Args:
            prompt: A string, or token ids (see `encode`).
            max_tokens: The maximum number of tokens after the prompt.
            sampling: The sampling parameters; each keyword below replaces one of them.
            **kwargs: `stop`: strings before which the output ends. `constraint`: what the output must match, made by
                `json_schema`, `json_object` or `regex`. `temperature`: 0 is greedy. `top_k`: the number of most probable tokens
                to keep, 0 for all. `top_p`: the probability mass to keep, 0 or 1 for all. `min_p`: drops tokens below this
                fraction of the highest probability. `seed`: the same seed gives the same output, with any draft.
                `repetition_penalty`: above 1, tokens of the sequence become less likely. `presence_penalty` and
                `frequency_penalty`: subtracted from the logits of generated tokens, once or per occurrence. `logit_bias`:
                numbers added to logits, by token id.

        Returns:
            The prompt, the output and the statistics of the run.

        Raises:
            ValueError: If a value is not valid, the prompt exceeds the context length, or the sequence exceeds the memory.
            TypeError: If a value has the wrong type.
        """
        return self._collect(lambda: self.stream(prompt, max_tokens, sampling, **kwargs))

    def json_schema(self, schema: Mapping[str, object]) -> Constraint:
        """Return a constraint that limits the output to one JSON value that matches a schema, with the separators ", " and ": ".

        Raises:
            ValueError: If the schema is not valid, uses a feature that is not supported, or the package for structured
                output is not installed.
        """
        from specdec.text import structured_output

        return structured_output.json_schema(self.tokenizer, schema)

    def json_object(self) -> Constraint:
        """Return a constraint that limits the output to any one JSON object, formatted as in `json_schema`.

        Raises:
            ValueError: If the package for structured output is not installed.
        """
        from specdec.text import structured_output

        return structured_output.json_object(self.tokenizer)

    def regex(self, pattern: str) -> Constraint:
        """Return a constraint that limits the output to strings that a regular expression matches as a whole.

        Args:
            pattern: The regular expression, in the syntax of Rust's regex, without look-around.

        Raises:
            ValueError: If the pattern is not valid or the package for structured output is not installed.
        """
        from specdec.text import structured_output

        return structured_output.regex(self.tokenizer, pattern)

    def encode_chat(
        self, messages: "GenericSequence[Message]", tools: "Tools | None" = None, options: "Options | None" = None
    ) -> list[int]:
        """Format a conversation with the chat template, and return its token ids up to the start of the next answer.

        Args:
            messages: Objects with "role" ("system", "user", "assistant") and "content". The "tokens" of an answer, if present,
                are taken as they are.
            tools: Functions that the answer may call, in the form that the template expects.
            options: Other variables of the template, such as {"enable_thinking": False}.

        Raises:
            TemplateError: If the model has no template, or the template refuses the messages.
        """
        from specdec.text.chat_template import check_roles

        check_roles(messages)
        return self.chat_template.encode(self.tokenizer, messages, self.n_positions, tools, options or {})

    def chat(
        self,
        messages: "GenericSequence[Message]",
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        **kwargs: "Unpack[GenerationKwargs]",
    ) -> Iterator[Event]:
        """Generate the answer to a conversation, and yield its events as `stream` does, but with an empty text in the `Prompt`.

        The arguments are those of `encode_chat` and `stream`, as are the errors.
        """
        events = self.stream(self.encode_chat(messages), max_tokens, sampling, **kwargs)
        return (replace(event, text="") if isinstance(event, Prompt) else event for event in events)

    def answer(
        self,
        messages: "GenericSequence[Message]",
        max_tokens: int = 1024,
        sampling: Sampling = DEFAULT_SAMPLING,
        **kwargs: "Unpack[GenerationKwargs]",
    ) -> Generation:
        """Generate the answer to a conversation, and return it as a `Generation` with its statistics.

        The arguments are those of `encode_chat` and `generate`, as are the errors.
        """
        return self._collect(lambda: self.chat(messages, max_tokens, sampling, **kwargs))

    def score(self, query: str, documents: "GenericSequence[str]", instruction: str | None = None) -> list[float]:
        """Return how well each document fits a query, from 0 to 1, as a reranker such as Qwen3-Reranker judges it.

        Args:
            query: What is searched for.
            documents: One or more texts.
            instruction: What makes a document fit; None for the one that the model was trained with.

        Raises:
            ValueError: If the target is not a reranker, or a document exceeds the context length or is not valid.
            TypeError: If a value has the wrong type.
        """
        from specdec.engine.reranker import Reranker, run_to_end

        reranker = Reranker(self.bundle)
        steps = reranker.score(reranker.encode(query, documents, instruction, self.n_positions))
        self.warm_up()
        with self._lock:
            return run_to_end(steps)

    def find_reasoning_marks(self, prompt: list[int]) -> "ReasoningMarks | None":
        """Return the marks around a thought that the output after a prompt may begin with; None for a model that does not think.

        Also returns None if the model has no chat template, or the package that renders it is missing.
        """
        checkpoint = self.bundle.checkpoint
        if not (checkpoint and (checkpoint.chat_template or checkpoint.path.is_dir())):  # a file without a chat template
            return None
        from specdec.text import reasoning

        with suppress(ValueError):  # there is no template, or the package that renders it is missing
            return reasoning.find_reasoning_marks(self.chat_template, self.tokenizer, prompt)
        return None

    def read_and_stream(
        self,
        prompt: PromptInput,
        max_tokens: int,
        sampling: Sampling = DEFAULT_SAMPLING,
        reasoning_marks: "ReasoningMarks | None" = None,
        *,
        stop: Stop = (),
        constraint: Constraint | None = None,
        include_draft_text: bool = True,
        **overrides: "Unpack[SamplingOverrides]",
    ) -> Iterator[Event | PrefillProgress]:
        """Generate a completion as `stream` does, and yield also the progress of each prefill and the text of draft tokens.

        The text has the marks in `reasoning_marks`, and stop strings have no effect in the thought between them. A sequence that
        is prefilled again, because it has become too long for its RoPE factors, reports that progress too. The other arguments
        and the errors are those of `stream`.
        """
        request = GenerationRequest(
            self.encode(prompt), max_tokens, override_sampling(sampling, **overrides), stop, constraint=constraint,
            visible_tokens=reasoning_marks.visible_tokens if reasoning_marks else NO_TOKENS,
            include_draft_text=include_draft_text, reasoning_marks=reasoning_marks,
        )  # fmt: skip
        request = validate_request(request, self.bundle)
        self.warm_up()
        return self.make_scheduler(self._prefix_cache).stream(Sequence(request, self.tokenizer))

    def read(self, tokens: list[int]) -> Iterator[float]:
        """Prefill the KV caches of all models with a prompt's tokens; yield the fraction of the work that is done, from 0 to 1.

        Nothing is yielded if the KV caches hold the prompt already.
        """
        events = self.read_and_stream(tokens, 0, include_draft_text=False)
        return (event.fraction for event in events if isinstance(event, PrefillProgress))

    def warm_up(self) -> None:
        """Prepare generation with the current settings: compile or load machine code, choose the threads, measure costs.

        Each task runs once. The number of threads is chosen only if it was not given.
        """
        if not self._warm_up.is_complete(self._settings):
            with self._lock:
                self._warm_up.run(self._settings)

    def _collect(self, start_stream: Callable[[], Iterator[Event]]) -> Generation:
        with self._lock:
            return Generation.from_events(start_stream())
