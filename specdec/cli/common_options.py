"""The options of all commands as frozen dataclasses with checked values, which Typer calls; loads no model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast, get_args

import typer

from specdec.argument_checks import check_choice, check_string
from specdec.cli.option_fields import option
from specdec.cli.prompt_sources import STDIN
from specdec.draft.draft_length import MAX_GAMMA
from specdec.draft.model_bundle import LOOKUP, MTP, SELF
from specdec.draft.settings import AUTO, Gamma, SpeculativeSettings, TreeMode, parse_quantize
from specdec.loaders.model_loader import PackMode
from specdec.loaders.model_paths import get_default_pair
from specdec.model.model import KVFormatName
from specdec.runtime.cpu_topology import get_topology
from specdec.runtime.parallel_region import get_available_threads
from specdec.sampling import Sampling
from specdec.ui.plain_views import ModelLabels
from specdec.verification import VerifyMode

NONE = "none"  # as a draft: the target decodes alone
DRAFT_KEYWORDS = (SELF, MTP, LOOKUP, AUTO, NONE)  # drafts that are not names of models
DEFAULT_STEPS = 256  # for -n
MODEL = option(None, "-m, --model NAME", "Most used", "Target: a folder, a GGUF or llama2.c file, or org/name:Q4_K_M on the hub.")
KV = option(AUTO, "--kv auto|f32|f16|q8", "Models", "KV cache format; changes the output. auto: f32 for fp32 weights, else f16.")
TEMPLATE = option("", "--template FILE", "Models", "Chat template: a Jinja file, or llama2. By default the model's own.")
TOP_P = option(0.9, "-p, --top-p X", "Sampling", "Keep the likeliest tokens with a total probability of X. 0, 1: off.")
AS_JSON = option(False, "--json", "Output", "Print one JSON object to stdout.")
RequestT = TypeVar("RequestT", bound="ModelRequest")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a command line; each command has a subclass with its own, made of the groups of options below.

    The default of a field is a Typer option, and Typer calls the class with the values of the command line. Invalid values raise
    ValueError with the field's name.

    Attributes:
        context: Typer's context; None if no command line made the request.
    """

    context: typer.Context = field(default=cast(typer.Context, None), repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill in the defaults of options that are not given, and check the values; raise ValueError if one is not valid."""
        for each in fields(self):
            if isinstance(default := getattr(self, each.name), typer.models.ParameterInfo):
                object.__setattr__(self, each.name, default.default)

    @cached_property
    def given(self) -> Mapping[str, str]:
        """The option of each field that the command line sets, such as "--gamma"."""
        return get_given_options(self.context) if self.context else {}


def get_given_options(context: typer.Context) -> dict[str, str]:
    """Return the option of each parameter that the command line of a context sets, such as "--gamma"."""
    return {
        str(param.name): max(param.opts, key=len)
        for param in context.command.params
        if getattr(context.get_parameter_source(str(param.name)), "name", "") == "COMMANDLINE"
    }


@dataclass(frozen=True, kw_only=True)
class ModelRequest(Request):
    """The options of a command that loads a target and its draft; the class attributes are those that a command may lack."""

    temperature = 1.0
    gamma = str(AUTO)
    verify = "coupled"
    tree = str(AUTO)
    template = ""
    schema = ""
    regex = ""
    prompt_cache = ""
    prompt_cache_size = 0
    model: str | None = MODEL
    draft: str = option(
        "", "-d, --draft NAME", "Most used", "Draft: a model, a head, mtp (the target's), self (quantized copy), lookup or none."
    )
    stage: str = option("", "--stage lookup|NAME", "Models", "Draft of the draft: lookup or a smaller model.")
    quantize: str = option(
        "draft", "--quantize WHAT", "Models", "Quantize draft (int8, int4, int3), target (int8), both or none; or say draft=int4."
    )
    kv: str = KV
    pack: str = option(AUTO, "--pack auto|on|none", "Models", "Store bf16 weights in 12 bits, without loss. auto: if large.")
    weight_cache: str = option(
        AUTO, "--weight-cache auto|on|off|DIR", "Models", "Keep packed weights on disk (in DIR). auto: of models from 100 MB on."
    )
    packed: str = option("", "--packed", "Models", "", hidden=True)  # the old name of --weight-cache
    tokenizer: str = option(
        "", "-z, --tokenizer FILE", "Models", "Tokenizer. By default the model's own; for llama2.c files tokN.bin, N its tokens."
    )
    threads: int = option(0, "-j, --threads N", "Machine", "CPU threads. 0: all cores, or fewer if that is faster.", min=0)

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if one is not valid or two exclude each other."""
        super().__post_init__()
        check_choice("kv", self.kv, get_args(KVFormatName))
        check_choice("pack", self.pack, get_args(PackMode))
        check_string("prompt", getattr(self, "prompt", None) or "")
        parse_quantize(self.quantize)
        if self.schema and self.regex:
            raise ValueError("--schema and --regex exclude each other; leave one of them out")
        if "prompt_cache_size" in self.given and not self.prompt_cache:
            raise ValueError("--prompt-cache-size needs --prompt-cache DIR")
        if self.threads > (n := get_available_threads()):
            raise ValueError(f"threads is {self.threads}; expected at most {n} (this machine has {get_topology().description})")
        _ = self.draft_settings

    def check_word(self, word: str | None) -> None:
        """Raise ValueError if both a positional word and -m name the target."""
        if word and word != STDIN and self.model:
            message = ", a message with -i" * hasattr(self, "prompt")
            raise ValueError(f"{word!r} and -m {self.model!r} are two targets; name a draft with -d{message}")

    @cached_property
    def draft_settings(self) -> SpeculativeSettings:
        """The settings of speculation from -g, --verify and --tree."""
        return SpeculativeSettings(parse_gamma(self.gamma), cast(VerifyMode, self.verify), cast(TreeMode, self.tree))

    @property
    def labels(self) -> ModelLabels:
        """The labels with which views name the models; needs `with_models` first."""
        return ModelLabels.from_names(str(self.model), self.draft, self.stage)

    @property
    def model_names(self) -> dict[str, str | None]:
        """The full names of target, draft and stage for JSON, None for one that is not given."""
        return {"model": self.model, "draft": self.draft or None, "stage": self.stage or None}


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(ModelRequest):
    """The options of the draft's length and shape."""

    gamma: str = option(AUTO, "-g, --gamma N|auto", "Speculation", "Draft tokens per step (γ). auto: as many as pay off.")
    tree: str = option(AUTO, "--tree auto|on|off", "Speculation", "Propose token trees. auto: with -d lookup where they pay off.")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(ModelRequest):
    """The options of sampling."""

    temperature: float = option(1.0, "-t, --temperature X", "Most used", "Sampling temperature. 0: greedy.")
    top_p: float = TOP_P
    top_k: int = option(0, "-k, --top-k N", "Sampling", "Sample from the N most likely tokens. 0: off.")
    min_p: float = option(0.0, "--min-p X", "Sampling", "Drop tokens that are less likely than X times the likeliest.")
    repetition_penalty: float = option(
        1.0, "--repeat-penalty X", "Sampling", "Above 1: make earlier tokens, also of the prompt, less likely."
    )
    presence_penalty: float = option(
        0.0, "--presence-penalty X", "Sampling", "Subtract X from the logit of each token in the output."
    )
    frequency_penalty: float = option(
        0.0, "--frequency-penalty X", "Sampling", "Subtract X for each time that a token is in the output."
    )
    seed: int = option(0, "-s, --seed N", "Sampling", "Random seed. 0: a new one each time.")

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if one is not valid."""
        super().__post_init__()
        _ = self.sampling

    @cached_property
    def sampling(self) -> Sampling:
        """The sampling settings from the options; seed 0 is replaced by a random one."""
        seed = self.seed or int.from_bytes(os.urandom(4), "little") or 1
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return Sampling(self.temperature, self.top_k, self.top_p, seed, self.min_p, *penalties, self.logit_biases)

    @property
    def logit_biases(self) -> list[tuple[int, float]]:
        """The logit biases as (token id, bias)."""
        return []


@dataclass(frozen=True, kw_only=True)
class PromptCacheOptions(ModelRequest):
    """The options of the prompt cache on disk."""

    prompt_cache: str = option("", "--prompt-cache DIR", "Models", "Keep processed prompts, also conversations, in this folder.")
    prompt_cache_size: int = option(10_000, "--prompt-cache-size MB", "Models", "Limit of --prompt-cache.", min=1, max=10**8)


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions(ModelRequest):
    """The options of structured output."""

    schema: str = option("", "--schema FILE|json", "Generation", "Generate JSON that matches this JSON Schema. json: any object.")
    regex: str = option("", "--regex REGEX", "Generation", "Generate text that matches this regex.")


@dataclass(frozen=True, kw_only=True)
class PromptRequest(SpeculationOptions, SamplingOptions):
    """The options of a command that continues a prompt."""

    prompt: str | None = option(None, "-i, --prompt TEXT", "Most used", "The prompt. -: stdin. By default: Once upon a time.")
    steps: int | None = option(
        None, "-n, --steps N", "Most used", "Tokens with the prompt. 0: as many as fit. By default 256.", min=0
    )
    max_tokens: int | None = option(None, "--max-tokens N", "Most used", "Maximum number of new tokens.", min=1)

    def __post_init__(self) -> None:
        """Check the options, and set the default of -n if neither -n nor --max-tokens is given; raise ValueError if both are."""
        super().__post_init__()
        if self.steps is not None and self.max_tokens is not None:
            raise ValueError("-n counts the prompt's tokens too and --max-tokens does not; leave one of the two out")
        if self.steps is self.max_tokens is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)


def with_models(request: RequestT, draft: str = "") -> RequestT:
    """Return a copy of the request with the names of its models filled in.

    Without -m, the models are the default pair. A draft "none" becomes "", and keywords such as "Lookup" get lower case.

    Args:
        request: The request.
        draft: Draft to use if none is given.
    """
    draft_name, stage = _normalize_draft(request.draft), _normalize_draft(request.stage)
    model = request.model
    if model is None:
        target, default_draft = map(str, get_default_pair())
        model, draft_name = target, draft_name or default_draft
    draft, stage = (name if name != NONE else "" for name in (draft_name or draft, stage))
    return replace(request, model=model, draft=draft, stage=stage)


def parse_gamma(text: str) -> Gamma:
    """Parse the text of a draft length into "auto" or a number.

    Raises:
        ValueError: The text is neither "auto" nor 1 to MAX_GAMMA.
    """
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GAMMA:
        hint = "; use -d none for no draft" if text == "0" else ""
        raise ValueError(f"gamma is {text!r}; expected {AUTO} or 1 to {MAX_GAMMA}{hint}")
    return int(text)


def _normalize_draft(name: str) -> str:
    """Return a draft's name, with a keyword such as LOOKUP in lower case unless a file or folder has that name."""
    lower = name.lower()
    return lower if lower in DRAFT_KEYWORDS and not Path(name).exists() else name
