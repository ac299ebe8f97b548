"""The command without a name: writes a text, in a panel or as it comes. Knows no arrays and no formats."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from specdec.cli.exits import say, writing
from specdec.cli.model_loading import Loaded, models_of, room_of, shaping
from specdec.cli.options import as_utf8, flag, of_output, of_text
from specdec.cli.prompts import STDIN, prompt_of
from specdec.cli.request import MODELS, SAMPLERS, Request, with_models, with_steps
from specdec.cli.suggestions import word_that_is_none
from specdec.cli.version import print_version
from specdec.decoder import SpeculativeDecoder
from specdec.draft.resolver import NGRAM
from specdec.draft.settings import AUTO
from specdec.engine.decoding import Event, Prefill, Prompt, Shape, Statistics
from specdec.loaders.model_lookup import is_model_name
from specdec.sampling import Sampling
from specdec.ui.output import FEW_PASSES, PlainView, SilentView, View, print_result, print_summary, show, to_json
from specdec.ui.panel import LivePanel, ahead
from specdec.ui.progress import read_in_a_line
from specdec.ui.terminal_window import Window, obstacle
from specdec.validation import strings


@dataclass(frozen=True, kw_only=True)
class TextRequest(Request):
    """Of the command without a name."""

    offers = (
        f"prompt model draft steps max_tokens temperature file stop schema regex samples {MODELS} {SAMPLERS} logit_bias "
        "seed gamma verify tree threads plain pace stats as_json version"
    )
    stop: list[str] | None = of_text(
        None, "--stop", metavar="TEXT", callback=as_utf8, help="Stop before this string; may be given several times."
    )
    samples: int = of_text(1, "--samples", metavar="N", min=1, help="Write N texts, with this seed and the next ones.")
    plain: bool = flag("--plain", group="Output", help="No panel: the text goes to stdout as it comes, the result to stderr.")
    pace: float | None = of_output(
        None, "--pace", metavar="X", min=0.0,
        help="Passes a second at most, to watch the panel. 0: full speed. By default a short text takes four seconds.",
    )  # fmt: skip
    stats: bool = flag("--stats", group="Output", help="All figures at the end: drafted, accepted, mean length, by position.")
    version: bool = flag("--version", group="Output", help="Print the version and the arithmetic's revision, and exit.")

    def __post_init__(self) -> None:
        super().__post_init__()
        strings("stop", self.stops)

    @property
    def stops(self) -> list[str]:
        return self.stop or []

    def settled(self) -> "TextRequest":
        """With its words, its prompt and its models where they belong."""
        if flaw := word_that_is_none(self.words):
            raise ValueError(flaw)
        models = [word for word in self.words if word != STDIN and is_model_name(word)]
        texts = [as_utf8(word) for word in self.words if word not in models]
        if len(models) > 1 or len(texts) > 1:
            what = "put quotes around a prompt of several words, or name it with -i"
            what = "name the draft with -d" if len(models) > 1 else what
            raise ValueError(f"{' '.join(self.words)!r} are {len(self.words)} words; {what}")
        self = with_steps(replace(self, word=models[0] if models else None))
        self = replace(self, prompt=prompt_of(self.prompt, self.file, texts[0] if texts else None))
        return with_models(self, AUTO if self.verify == "coupled" else "")  # whose text no drafter changes

    def without_effect(self) -> str:
        """The options that were given for nothing, and why; "" for none."""
        reasons = (
            ("without a draft", not self.draft, ("gamma", "verify")),
            ("without a draft that is a model", self.draft in ("", NGRAM), ("tree",)),
            ("with --json", self.as_json, ("pace", "plain", "stats")),
            ("with --plain", self.plain and not self.as_json, ("pace",)),
            ("at temperature 0", self.temperature == 0, ("top_p", "top_k", "min_p")),
        )
        idle = [(why, [self.given[name] for name in names if name in self.given]) for why, holds, names in reasons if holds]
        return "; ".join(f"{', '.join(names)}: no effect {why}" for why, names in idle if names)

    def settings(self, models: Loaded) -> dict[str, Any]:
        """For JSON: all that a text depends on but its seed."""
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        drawn = ("temperature", "top_p", "top_k", "min_p", *penalties, "verify", "tree", "quantize")
        names = ("prompt", "steps", "max_tokens", "schema", "regex", *drawn)
        return {
            **self.named,
            **{name: getattr(self, name) for name in names},
            "stop": self.stops,
            "gamma": self.drafting.gamma if self.draft else 0,
            "threads": models.decoder.target.n_threads,
            "tokenizer": str(models.decoder.tokenizer.path),
            **models.made_with,
        }


def write(request: TextRequest) -> None:
    """Speculative decoding on the CPU: a small draft guesses, the target checks.

    specdec "Once upon a time" -t 0
    specdec -m openai-community/gpt2-medium -d distilbert/distilgpt2 -i "Why"
    """
    if name := request.command:
        if given := ", ".join(request.given.values()):
            say(f"{given}: no effect before {name}, whose options come behind it; a prompt of that word is -i {name}")
        return
    if request.version:
        print_version()
        return
    request = request.settled()
    shape_with = shaping(request)
    with models_of(request) as models:
        prompt, shape = models.decoder.encode(str(request.prompt)), shape_with(models.decoder)
    request = models.drafted(request)
    max_tokens = room_of(request, models.decoder, len(prompt))
    if idle := request.without_effect():
        say(idle)
    why = obstacle(Console())
    if request.pace and why and not (request.as_json or request.plain):
        say(f"--pace has no effect: {why}")
    writer = Writer(request, models, prompt, max_tokens, shape)
    for i in range(request.samples):
        with writing():
            if i and not request.as_json:
                print(flush=True)
            statistics = writer.write(replace(request.sampling, seed=(request.sampling.seed + i) % 2**63))
        if statistics.stop_reason == "interrupted":
            break


@dataclass(frozen=True)
class Writer:
    """Texts of one request. prompt: its tokens."""

    request: TextRequest
    models: Loaded
    prompt: list[int]
    max_tokens: int
    shape: Shape | None

    def write(self, sampling: Sampling) -> Statistics:
        """One text, and what came of it."""
        decoder, stops, shape = self.models.decoder, self.request.stops, self.shape
        statistics = Statistics(len(self.prompt))
        view = self._view(statistics)
        events: Iterator[Event | Prefill]
        events = decoder.read_and_stream(self.prompt, self.max_tokens, sampling, stop=stops, shape=shape)
        if isinstance(view, LivePanel):  # which shows itself how far the prompt is read
            events = ahead(events)
        else:
            events = read_in_a_line(events, self.max_tokens if self.request.as_json else 0)
        show(view, events, statistics, Prompt(self.prompt, 0.0, decoder.tokenizer.decode(self.prompt)))
        if isinstance(view, SilentView):
            seconds = {"load_seconds": self.models.load_seconds, "warmup_seconds": self.models.warmup_seconds}
            told = {**seconds, "seed": sampling.seed, "settings": self.request.settings(self.models)}
            print(to_json(statistics, view.text, view.tokens, **told), flush=True)
        else:
            self._tell(view, statistics, sampling.seed)
        return statistics

    def _view(self, statistics: Statistics) -> View:
        if self.request.as_json:
            return SilentView()
        out = Console()
        if self.request.plain or obstacle(out):
            return PlainView(sys.stdout)
        return LivePanel(Window(out), statistics, self.max_tokens, self.request.roles, self.request.pace)

    def _tell(self, view: View, statistics: Statistics, seed: int) -> None:
        """What came of a text, on stderr."""
        decoder, roles, errors = self.models.decoder, self.request.roles, Console(stderr=True)
        is_to_see = bool(roles.guessed) and isinstance(view, LivePanel) and not view.was_seen
        more = f"seed {seed}; --stats has more" + ", --pace 4 lets you watch" * is_to_see
        note, is_coupled = advice(decoder, statistics), decoder.verify == "coupled"
        print_result(errors, statistics, roles, is_coupled, note, more)
        if self.request.stats:
            told = {"seed": seed, "threads": decoder.tuning.threads, **self.models.made_with}
            if decoder.has_draft:  # which has no part in it
                told["text" if is_coupled else "distribution"] = f"the {decoder.target.weights.kind} target's own"
            print_summary(errors, statistics, **told)


def advice(decoder: SpeculativeDecoder, statistics: Statistics) -> str:
    """Return what to know or to do where a draft does not pay."""
    if not decoder.draft or statistics.target_passes < FEW_PASSES:
        return ""
    n_drafted = sum(statistics.drafted_histogram[1:])
    if decoder.gamma == AUTO and not n_drafted:
        return "no draft was used: it would cost more than it gains"
    if decoder.gamma == AUTO and n_drafted < statistics.target_passes / 4:
        return f"only {n_drafted} of {statistics.target_passes} passes had a draft: more would cost more than they gain"
    if decoder.gamma != AUTO and statistics.speed_up and statistics.speed_up < 1:
        return "-g does not pay here: leave it out"
    return ""
