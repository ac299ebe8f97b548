"""What a command line asks for: one frozen record for all commands, its values checked. Knows no Typer and loads no model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast, get_args

from ..checks import one_of, short, text
from ..decoding import VerifyMode
from ..drafting.copies import kinds_to_make
from ..drafting.estimates import MAX_GAMMA
from ..drafting.settings import AUTO, Gamma, Settings, TreeMode
from ..drafting.team import MTP, NGRAM, SELF
from ..machine.threads import available_threads
from ..readers.files import default_pair
from ..readers.loading import Pack
from ..sampling import Sampling
from ..screens.output import Roles, on_one_line
from ..transformer import KV

NONE = "none"  # as a draft: the target decodes alone
WORDS = (SELF, MTP, NGRAM, AUTO, NONE)  # that a draft may be
DEFAULT_STEPS = 256  # of -n
Asked = TypeVar("Asked", bound="Request")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that several commands have; each has a subclass that names its own, and what it does not offer stays as here.

    given: the fields that stand on the command line, and as which option; words: what stands there beside options; command: the
    one whose options come behind these. Raises ValueError, by the field's name, for values that cannot be.
    """

    model: str | None = None
    draft: str = ""
    stage: str = ""
    quantize: str = "draft"
    kv: str = AUTO
    pack: str = AUTO
    prompt_cache: str = ""
    prompt_cache_size: int = 10_000
    tokenizer: str = ""
    template: str = ""
    prompt: str | None = None
    file: str = ""
    steps: int | None = None
    max_tokens: int | None = None
    schema: str = ""
    regex: str = ""
    temperature: float = 1.0
    top_p: float = 0.9
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[str] | None = None
    gamma: str = AUTO
    verify: str = "coupled"
    tree: str = "off"
    threads: int = 0
    as_json: bool = False
    given: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    command: str = ""

    def __post_init__(self) -> None:
        text("prompt", self.prompt or "")
        one_of("kv", self.kv, get_args(KV))
        one_of("pack", self.pack, get_args(Pack))
        kinds_to_make(self.quantize)
        if "prompt_cache_size" in self.given and not self.prompt_cache:
            raise ValueError("--prompt-cache-size is of the folder that --prompt-cache names")
        if self.schema and self.regex:
            raise ValueError("--schema and --regex are two shapes of a text; leave one of them out")
        if self.threads > available_threads():
            raise ValueError(f"threads is {self.threads}; this machine has cores for {available_threads()}")
        _ = self.drafting, self.sampling

    @cached_property
    def drafting(self) -> Settings:
        """What is set of it."""
        return Settings(gamma_of(self.gamma), cast(VerifyMode, self.verify), cast(TreeMode, self.tree))

    @cached_property
    def sampling(self) -> Sampling:
        """How tokens are drawn; the seed 0 is a new one each time."""
        seed = self.seed or int.from_bytes(os.urandom(4), "little") or 1
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return Sampling(self.temperature, self.top_k, self.top_p, seed, self.min_p, *penalties, self.biases)

    @property
    def biases(self) -> list[tuple[int, float]]:
        """What is added to logits, by id. Raises ValueError."""
        biases = []
        for each in self.logit_bias or []:
            token, _, bias = each.partition("=")
            try:
                biases.append((int(token), float(bias)))
            except ValueError:
                raise ValueError(f"logit_bias is {short(each, repr)}; expected ID=X, such as 42=-100") from None
        return biases

    @property
    def titles(self) -> list[str]:
        """What people call the models that are named, as it may be shown: the target first."""
        names = [str(self.model), self.draft, self.stage]
        return [on_one_line(Path(name).name.removesuffix(".bin").removesuffix(".gguf")) for name in names if name]

    @property
    def roles(self) -> Roles:
        """Who writes."""
        names = self.titles
        origins = {NGRAM: "from the text so far", SELF: f"by {names[0]} in fewer bits", MTP: f"by {names[0]}'s own head"}
        return Roles(names[0], origins.get(self.draft, f"by {names[1]}") if self.draft else "", " + ".join(names))

    @property
    def named(self) -> dict[str, str | None]:
        """The models, for JSON."""
        return {"model": self.model, "draft": self.draft or None, "stage": self.stage or None}


def with_models(request: Asked, draft: str = "") -> Asked:
    """That request, its models named: the pair that comes along where no target is, else that draft where none is."""
    named, stage = _as_a_draft(request.draft), _as_a_draft(request.stage)
    model: str | None = request.model
    if model is None:
        target, small = map(str, default_pair())
        model, named = target, named or small
    return replace(request, model=model, draft=(named or draft) if named != NONE else "", stage=stage if stage != NONE else "")


def with_steps(request: Asked) -> Asked:
    """That request, its -n the usual one where neither that nor --max-tokens is given."""
    if request.steps is not None and request.max_tokens is not None:
        raise ValueError("-n counts the prompt's tokens too and --max-tokens does not; leave one of the two out")
    is_open = request.steps is None and request.max_tokens is None
    return replace(request, steps=DEFAULT_STEPS) if is_open else request


def gamma_of(told: str) -> Gamma:
    """The draft length of that text."""
    if told == AUTO:
        return AUTO
    if not told.isdecimal() or not 1 <= int(told) <= MAX_GAMMA:
        raise ValueError(f"gamma is {told!r}; expected {AUTO} or 1 to {MAX_GAMMA}")
    return int(told)


def _as_a_draft(name: str) -> str:
    """As it was given, but that words may have capitals."""
    lower = name.lower()
    return lower if lower in WORDS and not Path(name).exists() else name
