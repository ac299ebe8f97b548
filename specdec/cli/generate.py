"""The command without a name: generates text in a live panel, as a plain stream, or as JSON."""

import re
import shlex
import sys
from dataclasses import dataclass, fields, replace

from rich.console import Console

from specdec.argument_checks import JSONDict, check_strings, shorten
from specdec.cli.common_options import AS_JSON, ConstraintOptions, PromptCacheOptions, PromptRequest, with_models
from specdec.cli.model_loading import LoadedModels, load_models, make_constraint_factory, resolve_max_tokens
from specdec.cli.option_fields import decode_argument, option
from specdec.cli.output_errors import guard_output, print_version
from specdec.cli.prompt_sources import STDIN, read_prompt
from specdec.draft.settings import AUTO
from specdec.events import Prompt, Statistics
from specdec.loaders.model_paths import is_model_name, is_text_file
from specdec.protocols import Constraint
from specdec.sampling import Sampling
from specdec.ui.panel import LivePanel, buffer_events
from specdec.ui.plain_views import PlainView, SilentView, View, get_advice, print_result, print_summary, run_view, to_json
from specdec.ui.progress import show_prefill_progress
from specdec.ui.terminal_window import Window, find_obstacle

NUMBER = re.compile(r"[-+.]*\d[-+.\d]*")
TEXT_SUFFIXES = (".txt", ".text", ".md")


@dataclass(frozen=True, kw_only=True)
class TextRequest(ConstraintOptions, PromptCacheOptions, PromptRequest):
    """The options of the command without a name."""

    file: str = option("", "-f, --file FILE", "Generation", "Read the prompt from this file.")
    stop: list[str] | None = option(None, "--stop TEXT", "Generation", "Stop before this string. Can be repeated.")
    samples: int = option(1, "--samples N", "Generation", "Generate N outputs, with this seed and the following ones.", min=1)
    logit_bias: list[str] | None = option(None, "--logit-bias ID=X", "Sampling", "Add X to the logit of token ID. Repeatable.")
    verify: str = option(
        "coupled", "--verify coupled|rejection|block", "Speculation", "coupled: the target's output. Others: its distribution."
    )
    plain: bool = option(False, "--plain", "Output", "Disable the panel: the text goes to stdout, the result to stderr.")
    pace: float | None = option(
        None, "--pace X", "Output", "Limit of passes per second in the panel. 0: off. By default 4 s for a short output.", min=0.0
    )
    stats: bool = option(False, "--stats", "Output", "Print all statistics at the end.")
    as_json: bool = AS_JSON
    version: bool = option(False, "--version", "Output", "Print the version and the arithmetic revision, and exit.")

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if one is not valid."""
        super().__post_init__()
        check_strings("stop", self.stop or [])

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

    def resolve(self) -> "TextRequest":
        """Return a copy of the request with the prompt's text and the names of the models filled in.

        Raises:
            ValueError: The positional words are not at most one model and one prompt, or options contradict each other.
        """
        words = self.context.args if self.context else []
        models = [word for word in words if word != STDIN and is_model_name(word)]
        texts = [decode_argument(word) for word in words if word not in models]
        reject_misplaced_words(words, has_prompt=self.prompt is not None or bool(self.file))
        if len(models) > 1 or len(texts) > 1:
            advice = "name a draft with -d, and put quotes around a prompt of several words, or use -i TEXT"
            raise ValueError(f"expected one model and one prompt, got {len(words)} words: {' '.join(words)!r}; {advice}")
        if models:
            self.check_word(models[0])
        prompt = read_prompt(self.prompt, self.file, texts[0] if texts else None)
        request = replace(self, prompt=prompt, model=models[0] if models else self.model)
        return with_models(request, AUTO if self.verify == "coupled" else "")  # coupled: no draft changes the output

    def get_settings(self, models: LoadedModels) -> JSONDict:
        """Return the models and options, except the seed, as a dict for JSON."""
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("context", "seed")}
        return {
            **options,
            **models.request.model_names,
            "stop": self.stop or [],
            "gamma": self.draft_settings.gamma if models.request.draft else 0,
            "threads": models.decoder.target.n_threads,
            "tokenizer": str(models.decoder.tokenizer.path),
            **models.metadata,
        }


def reject_misplaced_words(words: list[str], has_prompt: bool) -> None:
    """Raise ValueError if a positional word is a number, or names a text file; a first word may be a number as the prompt.

    Args:
        words: The positional words.
        has_prompt: Whether an option gives the prompt.
    """
    for i, word in enumerate(words):
        quoted = shlex.quote(word)
        if (i or has_prompt) and NUMBER.fullmatch(word):
            tokens = f"-n {word} for the number of tokens, or " if word.isdecimal() else ""
            hint = f"use {tokens}-t {word} for the temperature, or -i {quoted} if it is the prompt"
            raise ValueError(f"unexpected number {word!r}; {hint}")
        names_file = word.endswith(TEXT_SUFFIXES) and " " not in word and not has_prompt
        if word != STDIN and (names_file or is_text_file(word)):
            raise ValueError(
                f"{word!r} names a text file; use -f {quoted} to read the prompt from it, or -i {quoted} if it is one"
            )


def run(request: TextRequest) -> None:
    """Generate text on the CPU with speculative decoding: a draft proposes, the target verifies.

    specdec "Once upon a time" -t 0
    specdec -m openai-community/gpt2-medium -d distilbert/distilgpt2 -i "Why"
    """
    if request.version:
        print_version()
        return
    request = request.resolve()
    make_constraint = make_constraint_factory(request)
    with load_models(request) as models:
        prompt, constraint = models.decoder.encode(str(request.prompt)), make_constraint(models.decoder)
    max_tokens = resolve_max_tokens(request, models.decoder, len(prompt))
    runner = GenerationRunner(request, models, prompt, max_tokens, constraint)
    for i in range(request.samples):
        with guard_output():
            if i and not request.as_json:
                print(flush=True)
            statistics = runner.generate(replace(request.sampling, seed=(request.sampling.seed + i) % 2**63))
        if statistics.stop_reason == "interrupted":
            break


@dataclass(frozen=True)
class GenerationRunner:
    """A runner that generates the outputs of one request with the loaded models and shows them.

    Attributes:
        request: The resolved request.
        models: The loaded models.
        prompt: Tokens of the prompt.
        max_tokens: Limit of new tokens.
        constraint: Structured output, None for free text.
    """

    request: TextRequest
    models: LoadedModels
    prompt: list[int]
    max_tokens: int
    constraint: Constraint | None

    def generate(self, sampling: Sampling) -> Statistics:
        """Generate one output, show it, and print its result or JSON; return the statistics of the generation."""
        decoder, stops = self.models.decoder, self.request.stop or ()
        statistics = Statistics(len(self.prompt))
        view = self.make_view(statistics)
        marks = decoder.find_reasoning_marks(self.prompt)
        events = decoder.read_and_stream(self.prompt, self.max_tokens, sampling, marks, stop=stops, constraint=self.constraint)
        thought_filter = None
        if marks:
            from specdec.text.conversation import ThoughtFilter  # imported here, since few models think

            thought_filter = ThoughtFilter(marks)
            events = map(thought_filter.filter, events)
        if isinstance(view, LivePanel):  # the panel shows the prefill progress itself
            events = buffer_events(events)
        else:
            events = show_prefill_progress(events, self.max_tokens if self.request.as_json else 0)
        run_view(view, events, statistics, Prompt(self.prompt, 0.0, decoder.tokenizer.decode(self.prompt)))
        if isinstance(view, SilentView):
            seconds = {"load_seconds": self.models.load_seconds, "warmup_seconds": self.models.warmup_seconds}
            thought = thought_filter.end().get("reasoning_content") if thought_filter else None
            thoughts = {"reasoning_content": thought} if thought else {}
            details = {**thoughts, **seconds, "seed": sampling.seed, "settings": self.request.get_settings(self.models)}
            print(to_json(statistics, view.text, view.tokens, **details), flush=True)
        else:
            self._print_result(view, statistics, sampling.seed)
        return statistics

    def make_view(self, statistics: Statistics) -> View:
        """Return a view that shows a generation as the request wants it: as JSON, as plain text or in the live panel."""
        if self.request.as_json:
            return SilentView()
        out = Console()
        if self.request.plain or find_obstacle(out):
            return PlainView(sys.stdout, sys.stderr)
        return LivePanel(Window(out), statistics, self.max_tokens, self.models.request.labels, self.request.pace)

    def _print_result(self, view: View, statistics: Statistics, seed: int) -> None:
        """Print the speed-up and speed of a generation on stderr, with --stats also all statistics."""
        decoder, labels, errors = self.models.decoder, self.models.request.labels, Console(stderr=True)
        is_hidden_panel = bool(labels.draft_label) and isinstance(view, LivePanel) and not view.was_drawn
        more = f"seed {seed}; more with --stats" + ", --pace 4 lets you watch" * is_hidden_panel
        is_coupled = decoder.verify == "coupled"
        advice = get_advice(statistics, is_auto=decoder.gamma == AUTO) if decoder.draft else ""
        print_result(errors, statistics, labels, is_coupled, advice, more)
        if self.request.stats:
            details = {"seed": seed, "threads": decoder.autotuner.thread_summary, **self.models.metadata}
            if summary := decoder.bundle.draft_summary:
                details["draft"] = summary
            if decoder.has_draft:  # the draft has no part in the output
                details["text" if is_coupled else "distribution"] = f"the {decoder.target.weights.format_names} target's own"
            print_summary(errors, statistics, **details)
