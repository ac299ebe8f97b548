"""What a command line asks for: one frozen record for all commands, its values checked. Loads no model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypeVar, cast, get_args

from specdec.cli.options import argument, as_utf8, flag, most_used, of_machine, of_models, of_sampling, of_speculation, of_text
from specdec.cli.prompts import STDIN
from specdec.draft.policy import MAX_GAMMA
from specdec.draft.resolver import MTP, NGRAM, SELF
from specdec.draft.self_copy import kinds_to_make
from specdec.draft.settings import AUTO, Gamma, Settings, TreeMode
from specdec.loaders.loader import Pack
from specdec.loaders.model_lookup import default_pair
from specdec.model.transformer import KV
from specdec.runtime.threads import available_threads
from specdec.sampling import Sampling
from specdec.ui.output import Roles, on_one_line
from specdec.validation import one_of, short, text
from specdec.verification import VerifyMode

NONE = "none"  # as a draft: the target decodes alone
WORDS = (SELF, MTP, NGRAM, AUTO, NONE)  # that a draft may be
DEFAULT_STEPS = 256  # of -n
DRAFT = "Draft: as -m, a head, mtp (the target's own), self (a copy in fewer bits), ngram (what stood in the text)"
MODELS = "stage quantize kv pack prompt_cache prompt_cache_size tokenizer"
SAMPLERS = "top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
Asked = TypeVar("Asked", bound="Request")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that several commands have; each has a subclass with its own, and what it does not offer stays as here.

    offers: a command's options, in the order of its help. given: the fields that stand on the command line, and as which option;
    words: what stands there beside options; command: the one whose options come behind these. Raises ValueError, by the field's
    name, for values that cannot be.
    """

    offers: ClassVar[str] = ""
    word: str | None = argument(None, metavar="MODEL", help="The target, as with -m.")
    model: str | None = most_used(
        None, "-m", "--model", metavar="NAME",
        help="Target: a folder, org/name or org/name:Q4_K_M on the hub, a GGUF or llama2.c file.",
    )  # fmt: skip
    draft: str = most_used("", "-d", "--draft", metavar="NAME", help=f"{DRAFT}, none.")
    stage: str = of_models(
        "", "--stage", metavar="ngram|NAME",
        help="Guess for the draft, too: by n-grams or a smaller model. The draft checks that before the target does.",
    )  # fmt: skip
    quantize: str = of_models(
        "draft", "--quantize", metavar="WHAT",
        help="Make weights int8: draft, target, both or none; draft=int4 makes int4. The draft's bits never change the text.",
    )  # fmt: skip
    kv: str = of_models(
        AUTO, "--kv", metavar="auto|f32|f16|q8",
        help="Type of the KV cache. f16 takes half the memory, q8 a quarter; each type has a text of its own. auto: f32 for a "
        "target of fp32 weights, else f16.",
    )  # fmt: skip
    pack: str = of_models(
        AUTO, "--pack", metavar="auto|on|none",
        help="Keep bf16 weights in 12 bits, without losing one: the same text. auto: where a trial shows that it is faster.",
    )  # fmt: skip
    prompt_cache: str = of_models(
        "", "--prompt-cache", metavar="DIR",
        help="Keep what is read of prompts here, for later runs: whoever can read the folder can read what was said.",
    )  # fmt: skip
    prompt_cache_size: int = of_models(
        10_000, "--prompt-cache-size", metavar="MB", min=1, max=10**8, help="Megabytes that --prompt-cache may take."
    )
    tokenizer: str = of_models(
        "", "-z", "--tokenizer", metavar="FILE",
        help="Tokenizer. By default the folder's own; for a checkpoint tok<vocab>.bin or tokenizer.bin, beside it or in models/.",
    )  # fmt: skip
    template: str = of_models(
        "", "--template", metavar="FILE", help="Chat template (Jinja), or llama2. By default the model's own."
    )
    prompt: str | None = most_used(
        None, "-i", "--prompt", metavar="TEXT", callback=as_utf8,
        help="The prompt, as PROMPT; - or a pipe: stdin. [dim]\\[default: Once upon a time][/dim]",
    )  # fmt: skip
    file: str = of_text("", "-f", "--file", metavar="FILE", help="Read the prompt from this file.")
    steps: int | None = most_used(
        None, "-n", "--steps", metavar="N", min=0,
        help="Tokens in all, with the prompt's; 0: as many as fit. [dim]\\[default: 256][/dim]",
    )  # fmt: skip
    max_tokens: int | None = most_used(
        None, "--max-tokens", metavar="N", min=1, help="New tokens at most, without the prompt's; instead of -n."
    )
    schema: str = of_text("", "--schema", metavar="FILE|json", help="Write one JSON value by this JSON Schema; json: any object.")
    regex: str = of_text("", "--regex", metavar="REGEX", callback=as_utf8, help="Write what this regex matches as a whole.")
    temperature: float = most_used(1.0, "-t", "--temperature", metavar="X", min=0.0, help="Sampling temperature; 0 is greedy.")
    top_p: float = of_sampling(
        0.9, "-p", "--top-p", metavar="X", min=0.0, max=1.0,
        help="Keep the smallest set of tokens with more probability than X. 0, 1: off.",
    )  # fmt: skip
    top_k: int = of_sampling(0, "-k", "--top-k", metavar="N", min=0, help="Keep the N most likely tokens. 0: off.")
    min_p: float = of_sampling(
        0.0, "--min-p", metavar="X", min=0.0, max=1.0, help="Leave out what is less likely than X times the likeliest."
    )
    repetition_penalty: float = of_sampling(
        1.0, "--repeat-penalty", metavar="X", min=0.01, max=100.0,
        help="Make tokens of the prompt and the text less likely, above 1.",
    )  # fmt: skip
    presence_penalty: float = of_sampling(
        0.0, "--presence-penalty", metavar="X", min=-100.0, max=100.0, help="Take X from the logits of tokens that the text has."
    )
    frequency_penalty: float = of_sampling(
        0.0, "--frequency-penalty", metavar="X", min=-100.0, max=100.0,
        help="Take X from the logits of tokens for each time that the text has them.",
    )  # fmt: skip
    logit_bias: list[str] | None = of_sampling(
        None, "--logit-bias", metavar="ID=X", help="Add X, -100 to 100, to a token's logit. Can be repeated."
    )
    seed: int = of_sampling(
        0, "-s", "--seed", metavar="N", min=0, help="The same seed gives the same text. 0: a new seed each time."
    )
    gamma: str = of_speculation(
        AUTO, "-g", "--gamma", metavar="N|auto",
        help="Draft tokens per step (γ). auto: as many as pay, none where none do; 4 with --verify rejection or block.",
    )  # fmt: skip
    verify: str = of_speculation(
        "coupled", "--verify", metavar="coupled|rejection|block",
        help="coupled: the text that the target alone writes with this seed. rejection (Leviathan et al. 2023), block (Sun et "
        "al. 2024; accepts more): its distribution.",
    )  # fmt: skip
    tree: str = of_speculation(
        "off", "--tree", metavar="auto|on|off",
        help="on: propose several candidates for a place (a token tree). Same text. auto means off: no pair was faster by them.",
    )  # fmt: skip
    threads: int = of_machine(
        0, "-j", "--threads", metavar="N", min=0, help="CPU threads. 0: all cores, or fewer where those are faster."
    )
    as_json: bool = flag("--json", group="Output", help="One JSON object on stdout.")
    given: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    command: str = ""

    def __post_init__(self) -> None:
        if self.word not in (None, "", STDIN) and self.model:
            message = ", a message with -i" * ("prompt" in self.offers.split())
            raise ValueError(f"{self.word!r} and -m {self.model!r} are two targets; name a draft with -d{message}")
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
    model = request.word or request.model
    if model is None:
        target, small = map(str, default_pair())
        model, named = target, named or small
    draft, stage = (name if name != NONE else "" for name in (named or draft, stage))
    return replace(request, word=None, model=model, draft=draft, stage=stage)


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
