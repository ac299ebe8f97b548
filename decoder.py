"""`SpeculativeDecoder`: a target, what drafts for it, and their tokenizer. Knows no terminals."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from .checkpoint import Checkpoint, load_checkpoint
from .decoding import MAX_GAMMA, VERIFIERS, ModelDrafter, Sampling, Statistics, Step, Verify, decode
from .files import find, find_tokenizer
from .kernels import Transformer
from .packing import int8_copy, pack_weights
from .tokenizer import Tokenizer

SELF = "self"  # as a draft: an int8 copy of the target
Quantize = Literal["target", "draft", "both", "none"]
TRIAL_SECONDS, TRIAL_TOKENS, TRIAL_MARGIN = 0.05, 4, 1.25  # of the choice of threads; all of them unless so much slower


class Generation(NamedTuple):
    """What `SpeculativeDecoder.generate` returns: the text, prompt included, and the figures."""

    text: str
    statistics: Statistics


class SpeculativeDecoder:
    """A target, a draft that proposes for it, and their tokenizer.

    target, draft: paths of llama2.c checkpoints (also looked for in models/) or loaded `Transformer`s; without a draft, plain
    decoding; the draft "self" is an int8 copy of the target. tokenizer: a path or a `Tokenizer`; found beside the target or in
    models/ where not given. gamma: draft tokens a step, 1 to 63. verify: "coupled" (the text is the plain run's of the same seed)
    or "rejection" (Leviathan et al. 2023). n_threads: by default all cores, or fewer where a trial shows that they are
    faster; it changes no text. quantize: which of the fp32 checkpoints that are named by path become int8: "target", "draft",
    "both" or "none"; an int8 draft changes no text, an int8 target does.

    Raises CheckpointError or TokenizerError for files that cannot be used, ValueError for values or models that do not fit.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Transformer,
        draft: str | os.PathLike[str] | Transformer | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
        *,
        gamma: int = 4,
        verify: Verify = "coupled",
        n_threads: int | None = None,
        quantize: Quantize = "draft",
    ) -> None:
        if quantize not in get_args(Quantize):
            raise ValueError(f"quantize is {quantize!r}; expected one of {', '.join(get_args(Quantize))}")
        if not 1 <= gamma <= MAX_GAMMA:
            raise ValueError(f"gamma is {gamma}; expected 1 to {MAX_GAMMA} draft tokens a step")
        if verify not in VERIFIERS:
            raise ValueError(f"verify is {verify!r}; expected one of {', '.join(VERIFIERS)}")
        self.gamma, self.verify = gamma, verify
        path = None
        if isinstance(target, Transformer):
            self.target = target
        else:
            path = find(target)
            int8 = quantize in ("target", "both")
            self.target = _transformer(load_checkpoint(path, int8), n_threads, None, int8)
        config = self.target.config
        self.tokenizer = _tokenizer(tokenizer, path, config.vocab_size)
        if draft is None or isinstance(draft, Transformer):
            self.draft = draft
        elif draft == SELF:
            if self.target.weights.is_int8:
                raise ValueError(
                    "the target is int8 already, from its file or by --quantize, so an int8 copy of it is no faster draft; "
                    "leave it fp32 or name another draft"
                )
            self.draft = Transformer(config, int8_copy(config, self.target.weights), n_threads, self.target.n_positions)
        else:
            int8 = quantize in ("draft", "both")
            checkpoint = load_checkpoint(find(draft), int8)
            self.draft = _transformer(checkpoint, n_threads, self.target.n_positions, int8)
        if self.draft and self.draft.config.vocab_size != config.vocab_size:
            name = "the draft" if isinstance(draft, Transformer) else f"the draft {draft}"
            n = self.draft.config.vocab_size
            raise ValueError(f"{name} has a vocabulary of {n} tokens, the target one of {config.vocab_size}; they must agree")
        if self.draft is self.target:
            raise ValueError("target and draft are one object; they need a KV cache each")
        if self.draft and self.draft.n_positions < self.target.n_positions:
            self.draft = Transformer(self.draft.config, self.draft.weights, self.draft.n_threads, self.target.n_positions)
        self._is_warm = False
        self._models = [model for model in (self.target, self.draft) if model]
        is_free = n_threads is None and not any(isinstance(model, Transformer) for model in (target, draft))
        self._most_threads = self.target.n_threads if is_free else 1  # to choose from

    def encode(self, prompt: str) -> list[int]:
        """The prompt's tokens, BOS first. Raises ValueError for one that the target's seq_len cannot hold."""
        tokens = self.tokenizer.encode(prompt)
        if len(tokens) > self.target.n_positions:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the target's seq_len is {self.target.n_positions}")
        return tokens

    def stream(
        self,
        prompt: str = "",
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.9,
        seed: int = 0,
        on_draft: Callable[[list[int]], None] | None = None,
    ) -> Iterator[Step]:
        """Steps as they come, the prefill first; ends at BOS, EOS, max_tokens or the target's seq_len.

        max_tokens: beyond the prompt; temperature, top_k, top_p, seed: see `Sampling`; on_draft hears of each proposal before the
        target judges it. Raises ValueError for a value out of range, a prompt longer than the target's seq_len, or a target whose
        logits are not finite. A model's cache holds one text: going on with a stream after another has begun on one of its
        models raises RuntimeError.
        """
        if not self._is_warm:
            self.warm_up()
        sampling = Sampling(temperature, top_k, top_p, seed)
        verifier = VERIFIERS[self.verify](self.target.config.vocab_size, sampling)
        drafter = ModelDrafter(self.draft, sampling, verifier.draft_noise) if self.draft else None
        return self._alone(decode(self.target, drafter, verifier, self.encode(prompt), max_tokens, self.gamma, on_draft))

    def _alone(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, as long as no other stream has taken over a cache."""
        caches = [model.cache for model in self._models]
        for cache in caches:
            cache.user = steps
        while all(cache.user is steps for cache in caches):
            try:
                step = next(steps)
            except StopIteration:
                return
            yield step
        raise RuntimeError("another stream has begun on a model of this one; the model's cache holds its text now")

    def generate(
        self,
        prompt: str = "",
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.9,
        seed: int = 0,
    ) -> Generation:
        """The whole text, prompt included, and its statistics; parameters and errors are those of `stream`."""
        tokens = self.encode(prompt)
        statistics = Statistics(n_prompt=len(tokens))
        for step in self.stream(prompt, max_tokens, temperature, top_k, top_p, seed):
            statistics.add(step)
            tokens += step.tokens
        return Generation(self.tokenizer.decode(tokens), statistics)

    @property
    def weights(self) -> str:
        """What the weights are, in words: "target fp32, draft int8"."""
        models = {"target": self.target, "draft": self.draft}
        return ", ".join(f"{name} {model.weights.kind}" for name, model in models.items() if model)

    def warm_up(self) -> None:
        """Compile, or load from numba's cache, whatever a text needs; the first text does it where nobody has.

        Then choose the number of threads, unless it was given: the barriers of a pass cost a small model or a busy machine more
        than another thread gains, and a text is the same with any number.
        """
        self._is_warm = True
        self._seconds(2)
        if self._most_threads > 1:
            self._choose_threads()

    def _seconds(self, max_tokens: int) -> float:
        """What that many tokens take."""
        return sum(step.seconds for step in self.stream("", max_tokens))

    def _choose_threads(self) -> None:
        """All threads, or 1, 2, 4, ... if clearly faster; each is tried in turn until the trial has taken TRIAL_SECONDS."""
        most = self._most_threads
        seconds = {min(2**i, most): 0.0 for i in range(most.bit_length() + 1)}
        while sum(seconds.values()) < TRIAL_SECONDS:
            for n in seconds:
                self._use_threads(n)
                seconds[n] += self._seconds(TRIAL_TOKENS)
        best = min(seconds, key=seconds.__getitem__)
        self._use_threads(best if TRIAL_MARGIN * seconds[best] < seconds[most] else most)

    def _use_threads(self, n: int) -> None:
        for model in self._models:
            model.n_threads = n


def _transformer(checkpoint: Checkpoint, n_threads: int | None, n_positions: int | None, int8: bool) -> Transformer:
    weights = pack_weights(checkpoint.config, checkpoint.tensors, int8, checkpoint.release)
    return Transformer(checkpoint.config, weights, n_threads, n_positions)


def _tokenizer(given: str | os.PathLike[str] | Tokenizer | None, target: Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer that was given, else the one that lies where the target's is looked for."""
    tokenizer = given if isinstance(given, Tokenizer) else Tokenizer(find_tokenizer(given, target, vocab_size))
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"{tokenizer.path} holds {tokenizer.vocab_size} tokens, the target has {vocab_size}; name the target's own with -z"
        )
    return tokenizer
