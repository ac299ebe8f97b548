"""The options of all commands as one frozen dataclass with checked values; loads no model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypeVar, cast, get_args

from specdec.argument_checks import check_choice, check_string, shorten
from specdec.cli.option_fields import (
    argument,
    common_option,
    decode_utf8,
    flag,
    machine_option,
    models_option,
    sampling_option,
    speculation_option,
    text_option,
)
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
from specdec.ui.plain_views import ModelLabels, sanitize_line
from specdec.verification import VerifyMode

NONE = "none"  # as a draft: the target decodes alone
DRAFT_KEYWORDS = (SELF, MTP, LOOKUP, AUTO, NONE)  # drafts that are not names of models
DEFAULT_STEPS = 256  # for -n
MODEL_OPTIONS = "stage quantize kv pack weight_cache packed prompt_cache prompt_cache_size tokenizer"
SAMPLING_OPTIONS = "top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
RequestT = TypeVar("RequestT", bound="Request")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that several commands share; each command has a subclass with its own.

    An option that a command does not offer keeps its default. Invalid values raise ValueError with the field's name.

    Attributes:
        option_names: The command's options, in the order of its help.
        given: The option of each field that the command line sets, such as "--gamma".
        words: The positional words.
        command: The subcommand that follows these options; "" for none.
    """

    option_names: ClassVar[str] = ""
    word: str | None = argument(None, metavar="MODEL", help="The target, as for -m.")
    model: str | None = common_option(
        None, "-m", "--model", metavar="NAME",
        help="Target: a folder, a GGUF or llama2.c file, or org/name or org/name:Q4_K_M on the hub.",
    )  # fmt: skip
    draft: str = common_option(
        "", "-d", "--draft", metavar="NAME",
        help="Draft: a model as for -m, a head, mtp (the target's own head), self (a quantized copy), lookup (no model), none.",
    )  # fmt: skip
    stage: str = models_option(
        "", "--stage", metavar="lookup|NAME",
        help="Draft of the draft: lookup or a smaller model.",
    )  # fmt: skip
    quantize: str = models_option(
        "draft", "--quantize", metavar="WHAT",
        help="Quantize draft (int8 or int4 by its size), target (int8), both or none; draft=int4 chooses the bits.",
    )  # fmt: skip
    kv: str = models_option(
        AUTO, "--kv", metavar="auto|f32|f16|q8",
        help="KV cache format; each has its own output. auto: f32 if the target has fp32 weights, else f16.",
    )  # fmt: skip
    pack: str = models_option(
        AUTO, "--pack", metavar="auto|on|none",
        help="Store bf16 weights in 12 bits, without loss. auto: if a trial shows that it is faster.",
    )  # fmt: skip
    weight_cache: str = models_option(
        AUTO, "--weight-cache", metavar="auto|on|off|DIR",
        help="Keep packed weights on disk for quicker starts. auto: of models of 100 MB or more. DIR: in this folder.",
    )  # fmt: skip
    packed: str = models_option("", "--packed", help="", hidden=True)  # the old name of --weight-cache
    prompt_cache: str = models_option(
        "", "--prompt-cache", metavar="DIR",
        help="Keep processed prompts, which contain the conversations, in this folder for later runs.",
    )  # fmt: skip
    prompt_cache_size: int = models_option(
        10_000, "--prompt-cache-size", metavar="MB", min=1, max=10**8, help="Maximum size of --prompt-cache in megabytes."
    )
    tokenizer: str = models_option(
        "", "-z", "--tokenizer", metavar="FILE",
        help="Tokenizer. By default the folder's own; for llama2.c, tokN.bin (N tokens) or tokenizer.bin, there or in models/.",
    )  # fmt: skip
    template: str = models_option(
        "", "--template", metavar="FILE", help="Chat template: a Jinja file, or llama2. By default the model's own."
    )
    prompt: str | None = common_option(
        None, "-i", "--prompt", metavar="TEXT", callback=decode_utf8,
        help="The prompt, same as PROMPT. -: stdin. [dim]\\[default: Once upon a time][/dim]",
    )  # fmt: skip
    file: str = text_option("", "-f", "--file", metavar="FILE", help="Read the prompt from this file.")
    steps: int | None = common_option(
        None, "-n", "--steps", metavar="N", min=0,
        help="Total number of tokens, prompt included. 0: as many as fit. [dim]\\[default: 256][/dim]",
    )  # fmt: skip
    max_tokens: int | None = common_option(
        None, "--max-tokens", metavar="N", min=1, help="Maximum number of new tokens, without the prompt."
    )
    schema: str = text_option(
        "", "--schema", metavar="FILE|json", help="Generate JSON that matches this JSON Schema. json: any object."
    )
    regex: str = text_option(
        "", "--regex", metavar="REGEX", callback=decode_utf8, help="Generate text that this regex matches as a whole."
    )
    temperature: float = common_option(1.0, "-t", "--temperature", metavar="X", min=0.0, help="Sampling temperature. 0: greedy.")
    top_p: float = sampling_option(
        0.9, "-p", "--top-p", metavar="X", min=0.0, max=1.0,
        help="Sample from the likeliest tokens with a total probability of X. 0, 1: off.",
    )  # fmt: skip
    top_k: int = sampling_option(0, "-k", "--top-k", metavar="N", min=0, help="Sample from the N most likely tokens. 0: off.")
    min_p: float = sampling_option(
        0.0, "--min-p", metavar="X", min=0.0, max=1.0, help="Drop tokens that are less likely than X times the most likely one."
    )
    repetition_penalty: float = sampling_option(
        1.0, "--repeat-penalty", metavar="X", min=0.01, max=100.0,
        help="Above 1: make tokens of the prompt and the output less likely.",
    )  # fmt: skip
    presence_penalty: float = sampling_option(
        0.0,
        "--presence-penalty",
        metavar="X",
        min=-100.0,
        max=100.0,
        help="Subtract X from the logit of each token in the output.",
    )
    frequency_penalty: float = sampling_option(
        0.0, "--frequency-penalty", metavar="X", min=-100.0, max=100.0,
        help="Subtract X from a token's logit for each time that it is in the output.",
    )  # fmt: skip
    logit_bias: list[str] | None = sampling_option(
        None, "--logit-bias", metavar="ID=X", help="Add X (-100 to 100) to the logit of token ID. Can be repeated."
    )
    seed: int = sampling_option(0, "-s", "--seed", metavar="N", min=0, help="Random seed. 0: a new one each time.")
    gamma: str = speculation_option(
        AUTO, "-g", "--gamma", metavar="N|auto",
        help="Draft tokens per step (γ). auto: as many as pay off; 4 with --verify rejection or block.",
    )  # fmt: skip
    verify: str = speculation_option(
        "coupled", "--verify", metavar="coupled|rejection|block",
        help="coupled: the output of the target alone with this seed. rejection and block keep only its distribution.",
    )  # fmt: skip
    tree: str = speculation_option(
        AUTO, "--tree", metavar="auto|on|off",
        help="Propose token trees, with several candidates per position. auto: with -d lookup where they pay off.",
    )  # fmt: skip
    threads: int = machine_option(
        0, "-j", "--threads", metavar="N", min=0, help="CPU threads. 0: all cores, or fewer if that is faster."
    )
    as_json: bool = flag("--json", group="Output", help="Print one JSON object to stdout.")
    given: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    command: str = ""

    def __post_init__(self) -> None:
        """Check the shared options; raise ValueError if one is not valid or two exclude each other."""
        if self.word not in (None, "", STDIN) and self.model:
            message = ", a message with -i" * ("prompt" in self.option_names.split())
            raise ValueError(f"{self.word!r} and -m {self.model!r} are two targets; name a draft with -d{message}")
        check_string("prompt", self.prompt or "")
        check_choice("kv", self.kv, get_args(KVFormatName))
        check_choice("pack", self.pack, get_args(PackMode))
        parse_quantize(self.quantize)
        if "prompt_cache_size" in self.given and not self.prompt_cache:
            raise ValueError("--prompt-cache-size needs --prompt-cache DIR")
        if self.schema and self.regex:
            raise ValueError("--schema and --regex exclude each other; leave one of them out")
        if self.threads > get_available_threads():
            expected = f"at most {get_available_threads()} (this machine has {get_topology().description})"
            raise ValueError(f"threads is {self.threads}; expected {expected}")
        _ = self.draft_settings, self.sampling

    @cached_property
    def draft_settings(self) -> SpeculativeSettings:
        """The settings of speculation from -g, --verify and --tree."""
        return SpeculativeSettings(parse_gamma(self.gamma), cast(VerifyMode, self.verify), cast(TreeMode, self.tree))

    @cached_property
    def sampling(self) -> Sampling:
        """The sampling settings from the options; seed 0 is replaced by a random one."""
        seed = self.seed or int.from_bytes(os.urandom(4), "little") or 1
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return Sampling(self.temperature, self.top_k, self.top_p, seed, self.min_p, *penalties, self.logit_biases)

    @property
    def logit_biases(self) -> list[tuple[int, float]]:
        """The logit biases from --logit-bias as (token id, bias).

        Raises:
            ValueError: An entry is not ID=X.
        """
        biases = []
        for each in self.logit_bias or []:
            token, _, bias = each.partition("=")
            try:
                biases.append((int(token), float(bias)))
            except ValueError:
                raise ValueError(f"logit_bias is {shorten(each, repr)}; expected ID=X, such as 42=-100") from None
        return biases

    @property
    def display_names(self) -> list[str]:
        """The short names for display of target, draft and stage, without those that are not given; needs `with_models` first."""
        names = [str(self.model), self.draft, self.stage]
        return [sanitize_line(Path(name).name.removesuffix(".bin").removesuffix(".gguf")) for name in names if name]

    @property
    def labels(self) -> ModelLabels:
        """The labels with which views name the target, the origin of draft tokens, and the pair; needs `with_models` first."""
        names = self.display_names
        origins = {LOOKUP: "from what came before", SELF: f"by {names[0]} in fewer bits", MTP: f"by {names[0]}'s own head"}
        advice = "-d self or a smaller model may guess more" if self.draft == LOOKUP else ""
        label = origins.get(self.draft, f"by {names[1]}") if self.draft else ""
        return ModelLabels(names[0], label, " + ".join(names), advice)

    @property
    def model_names(self) -> dict[str, str | None]:
        """The full names of target, draft and stage for JSON, None for one that is not given."""
        return {"model": self.model, "draft": self.draft or None, "stage": self.stage or None}


def with_models(request: RequestT, draft: str = "") -> RequestT:
    """Return a copy of the request with the names of its models filled in.

    The target is the positional word, else that of -m. Without either, the models are the default pair. A draft "none" becomes
    "", and keywords such as "Lookup" get lower case.

    Args:
        request: The request.
        draft: Draft to use if none is given.
    """
    draft_name, stage = _normalize_draft(request.draft), _normalize_draft(request.stage)
    model = request.word or request.model
    if model is None:
        target, default_draft = map(str, get_default_pair())
        model, draft_name = target, draft_name or default_draft
    draft, stage = (name if name != NONE else "" for name in (draft_name or draft, stage))
    return replace(request, word=None, model=model, draft=draft, stage=stage)


def with_default_steps(request: RequestT) -> RequestT:
    """Return the request with the default -n if neither -n nor --max-tokens is given.

    Raises:
        ValueError: Both are given.
    """
    if request.steps is not None and request.max_tokens is not None:
        raise ValueError("-n counts the prompt's tokens too and --max-tokens does not; leave one of the two out")
    is_unlimited = request.steps is None and request.max_tokens is None
    return replace(request, steps=DEFAULT_STEPS) if is_unlimited else request


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
