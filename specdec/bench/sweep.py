"""Measurement of speculation settings on a pair and prompts, each compared with the target alone.

Runs are paired and interleaved: all settings generate a case in turn, in an order that rotates from case to case, so that a
change of the machine's speed affects each of them. A speed-up compares neighbours in time, and that of a case is the median of
its rounds. Only decoding is timed, as in the statistics of a generation, without prefill. Outputs are the plain ones of their
seeds (coupled verification), and every one of them is compared.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from specdec.bench.measure import OnProgress, RecordedRun, ignore_progress, record, take_turns
from specdec.draft.model_bundle import LOOKUP
from specdec.draft.settings import AUTO, Gamma, TreeMode
from specdec.events import Event, Statistics
from specdec.sampling import Sampling
from specdec.speculative_decoder import SpeculativeDecoder

MIN_SPEEDUP = 1.03  # over the target alone; less is noise
MIN_RELATIVE_SPEED = 0.98  # of the best setting; one setting for all temperatures is then simpler than two
WARM_UP_TOKENS = 32
PROMPTS = (  # short: 500 tokens after each of them fit a context of 512
    "Once upon a time", "One day, a little girl named Lily", "Tim and Sam were best friends.", "There was a big dog named Max.",
    "The sun was hot and", "Mom and Dad went to the park", "Lily had a red ball.", "A small bird sat in a tree.",
    "Ben wanted a new toy car.", '"Can we play?" asked Tom.', "It was a rainy day and", "The cat was very sad because",
)  # fmt: skip
SUMMED_FIELDS = (  # fields taken from the summed statistics of the runs
    "n_drafted", "n_accepted", "acceptance_rate", "tokens_per_pass", "acceptance_by_position", "experts_alone",
    "experts_per_token",
)  # fmt: skip
SettingKind = Literal["alone", "draft", "lookup", "pair"]


class OutputMismatchError(Exception):
    """Raised when a setting's output differs from the target's own with the same seed."""


@dataclass(frozen=True)
class Setting:
    """One of the settings that a sweep compares: a decoder with its speculation options.

    Attributes:
        name: Display name.
        options: Command-line options that choose the setting, besides -m and -d of the pair.
        decoder: The decoder, which several settings may share.
        kind: "alone" is the target without a draft; "draft" is the draft without a target, with an output of its own.
        gamma: Draft length, None without drafting.
        tree: Use of token trees: "auto", "on" or "off".
    """

    name: str
    options: str
    decoder: SpeculativeDecoder
    kind: SettingKind
    gamma: Gamma | None = None
    tree: TreeMode = "off"

    def stream(self, case: "SweepCase") -> Iterator[Event]:
        """Set the decoder's draft length and tree mode to those of this setting, and yield the decoding events of a case."""
        if self.gamma is not None:  # settings share decoders
            self.decoder.gamma, self.decoder.tree = self.gamma, self.tree
        return self.decoder.stream(case.prompt, case.max_tokens, case.sampling)


class SweepCase(NamedTuple):
    """One output that a sweep generates with each setting: a prompt, the number of new tokens and the sampling settings."""

    prompt: str
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class SettingResult:
    """The result of one setting at one temperature, over all cases of max_tokens new tokens (None: of any length).

    Attributes:
        n_texts: Number of cases.
        speedup_mean: Mean speed-up over the target alone; the speed-up of a case is the median of its rounds.
        tokens_per_second: Median of the cases.
        acceptance_by_position: Accepted / drafted at each position of a proposal; positions without a draft do not count.
        experts_alone: Experts that a layer of a mixture reads for a token alone; else 0.
        experts_per_token: Experts read per generated token; else 0.
    """

    setting: str
    options: str
    kind: SettingKind
    temperature: float
    max_tokens: int | None
    n_texts: int
    speedup_min: float
    speedup_mean: float
    speedup_max: float
    tokens_per_second: float
    n_drafted: int
    n_accepted: int
    acceptance_rate: float
    tokens_per_pass: float
    acceptance_by_position: list[float]
    experts_alone: int
    experts_per_token: float


@dataclass
class SweepRuns:
    """The recorded runs of a sweep; a round that not all settings finished is left out.

    Attributes:
        settings: The settings, the target alone first.
        runs: For each case its rounds, each with one run by name of the setting.
        is_complete: Whether the sweep ran to its end.
    """

    settings: Sequence[Setting]
    runs: dict[SweepCase, list[dict[str, RecordedRun]]] = field(default_factory=dict)
    is_complete: bool = False

    def add(self, case: SweepCase, runs: Sequence[RecordedRun]) -> None:
        """Add a round with a run of each setting.

        Raises:
            OutputMismatchError: An output differs from that of the target alone.
        """
        rounds = self.runs.setdefault(case, [])
        named = dict(zip([setting.name for setting in self.settings], runs, strict=True))
        plain = (rounds[0] if rounds else named)[self.settings[0].name]
        for setting in self.settings:
            if setting.kind != "draft":
                _check_same_output(named[setting.name], plain, setting, case)
        rounds.append(named)

    def compute_cells(self) -> list[SettingResult]:
        """Return a result for each temperature, length and setting; settings without a case to measure are left out."""
        return self._aggregate_all((case.sampling.temperature, case.max_tokens) for case in self.runs)

    def compute_totals(self) -> list[SettingResult]:
        """Return a result for each temperature and setting, over all lengths."""
        return self._aggregate_all((case.sampling.temperature, None) for case in self.runs)

    def _aggregate_all(self, groups: Iterable[tuple[float, int | None]]) -> list[SettingResult]:
        results = (self._aggregate(setting, *group) for group in sorted({*groups}) for setting in self.settings)
        return [result for result in results if result]

    def _aggregate(self, setting: Setting, temperature: float, max_tokens: int | None) -> SettingResult | None:
        case_pairs = [
            [(round_runs[setting.name], round_runs[self.settings[0].name]) for round_runs in rounds]
            for case, rounds in self.runs.items()
            if case.sampling.temperature == temperature and max_tokens in (None, case.max_tokens)
        ]
        # A run that ends at once has no speed.
        case_pairs = [pairs for pairs in case_pairs if all(_get_speed(run) and _get_speed(alone) for run, alone in pairs)]
        if not case_pairs:
            return None
        speedups = [statistics.median(_get_speed(run) / _get_speed(alone) for run, alone in pairs) for pairs in case_pairs]
        total = Statistics()
        for step in (step for pairs in case_pairs for run, _ in pairs for step in run.steps):
            total.add(step)
        return SettingResult(
            setting.name,
            setting.options,
            setting.kind,
            temperature,
            max_tokens,
            n_texts=len(case_pairs),
            speedup_min=min(speedups),
            speedup_mean=statistics.fmean(speedups),
            speedup_max=max(speedups),
            tokens_per_second=statistics.median(statistics.median(_get_speed(run) for run, _ in pairs) for pairs in case_pairs),
            **{name: getattr(total, name) for name in SUMMED_FIELDS},
        )


def _get_speed(run: RecordedRun) -> float:
    return run.statistics.tokens_per_second


# Settings and cases


def make_settings(pair: SpeculativeDecoder, gammas: Sequence[Gamma]) -> tuple[list[Setting], list[str]]:
    """Return the settings to compare, and notes on those that are left out.

    The target alone comes first, then the draft alone, lookup, and the pair with each gamma, with trees and staged. Decoders
    share the pair's models, and each model's cache holds one sequence, so each generation must run to its end. Without a draft
    model the gammas are those of lookup.

    Args:
        pair: Decoder of the pair.
        gammas: Draft lengths.
    """
    target, tokenizer, notes = pair.target, pair.tokenizer, list[str]()
    settings = [Setting("target alone", "", SpeculativeDecoder(target, None, tokenizer), "alone")]
    lookup = SpeculativeDecoder(target, LOOKUP, tokenizer)
    if pair.draft is None:
        return settings + [Setting(f"lookup γ {g}", f"-d lookup -g {g}", lookup, "lookup", g) for g in gammas], notes
    is_head = bool(pair.draft.target_layers)
    if is_head:
        notes.append(
            "the draft alone, trees and stages are left out: a head generates no text, proposes chains, and has no draft"
        )
    else:
        try:
            if pair.draft.n_positions < target.n_positions:
                raise ValueError(f"it has room for {pair.draft.n_positions} tokens, the target for {target.n_positions}")
            settings.append(Setting("draft alone", "", SpeculativeDecoder(pair.draft, None, tokenizer), "draft"))
        except ValueError as error:  # also of a vocabulary of another size
            notes.append(f"the draft alone is left out: {error}")
    longest = AUTO if AUTO in gammas else max(gamma for gamma in gammas if isinstance(gamma, int))
    settings.append(Setting(f"lookup γ {longest}", f"-d lookup -g {longest}", lookup, "lookup", longest))
    settings += [Setting(f"γ {g}", f"-g {g}", pair, "pair", g) for g in gammas]
    if AUTO in gammas and not pair.has_stage and not is_head:
        staged = SpeculativeDecoder(target, pair.draft, tokenizer, stage=LOOKUP)
        if target.can_run_trees and pair.draft.can_run_trees:
            settings.append(Setting("γ auto, trees", "-g auto --tree on", pair, "pair", AUTO, "on"))
        else:
            notes.append("trees are left out: the target or the draft has a recurrent state, which holds one sequence")
        settings.append(Setting("γ auto, lookup first", "-g auto --stage lookup", staged, "pair", AUTO))
    return settings, notes


def make_cases(
    pair: SpeculativeDecoder, prompts: Sequence[str], lengths: Sequence[int], samplings: Sequence[Sampling]
) -> tuple[list[SweepCase], list[str]]:
    """Return a case for each prompt, length and sampling that fits the context, and notes on those that do not fit.

    Args:
        pair: Decoder of the pair.
        prompts: The prompts.
        lengths: Numbers of new tokens.
        samplings: The samplings.

    Raises:
        ValueError: No case fits.
    """
    sizes = {prompt: len(pair.encode(prompt)) for prompt in prompts}
    n_positions = pair.n_positions + 1  # the last token is never run
    fits = {n: [prompt for prompt in prompts if sizes[prompt] + n <= n_positions] for n in lengths}
    notes = [
        f"the context of {pair.n_positions} has room for {n} tokens after {len(fits[n]) or 'none'} of the {len(prompts)} prompts"
        for n in lengths
        if len(fits[n]) < len(prompts)
    ]
    cases = [SweepCase(prompt, n, s) for prompt in prompts for n in lengths if prompt in fits[n] for s in samplings]
    if not cases:
        raise ValueError(f"nothing to measure: {'; '.join(notes)} (max_tokens=..., prompts=...)")
    return cases, notes


# Measurement


class _StoppedError(Exception):
    """Raised in a generation when the sweep must stop."""


def measure(
    settings: Sequence[Setting],
    cases: Sequence[SweepCase],
    n_rounds: int,
    on_progress: OnProgress = ignore_progress,
    should_stop: Callable[[], object] = lambda: False,
) -> SweepRuns:
    """Generate all cases with all settings in some rounds, after a warm-up, and return the recorded runs.

    Args:
        settings: The settings; the first must be the target alone.
        cases: The cases.
        n_rounds: Number of rounds.
        on_progress: Called with the completed fraction.
        should_stop: Returns whether to stop and return the runs so far.

    Raises:
        OutputMismatchError: The output of a setting differs from that of the target alone.
    """

    def stop_if_needed(event: Event) -> None:
        if should_stop():
            raise _StoppedError

    def run(setting: Setting, case: SweepCase) -> RecordedRun:
        return record(setting.stream(case), stop_if_needed)

    measured = SweepRuns(settings)
    total, done = n_rounds * sum(case.max_tokens for case in cases), 0
    try:
        for sampling in dict.fromkeys(case.sampling for case in cases):  # pays one-time costs
            n = min(WARM_UP_TOKENS, cases[0].max_tokens)
            for setting in settings:
                run(setting, cases[0]._replace(max_tokens=n, sampling=sampling))
        for number, (i, case) in itertools.product(range(n_rounds), enumerate(cases)):
            on_progress(done / total)
            done += case.max_tokens
            for runs in take_turns([partial(run, setting, case) for setting in settings], 1, first=i + number):
                measured.add(case, runs)
    except _StoppedError:
        return measured
    measured.is_complete = True
    return measured


def _check_same_output(run: RecordedRun, plain: RecordedRun, setting: Setting, case: SweepCase) -> None:
    if run.output == plain.output:
        return
    pairs = enumerate(zip(run.tokens, plain.tokens, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(run.tokens), len(plain.tokens)))
    raise OutputMismatchError(
        f"the output of {setting.name} differs from the target's own from token {same + 1} on: prompt {case.prompt!r}, "
        f"seed {case.sampling.seed}, temperature {case.sampling.temperature:g}, {case.max_tokens} tokens"
    )


# Conclusions


def format_temperature(temperature: float, temperatures: Iterable[float]) -> str:
    """Return the name of a temperature: "greedy", "sampled" if `temperatures` has one positive value, or "temperature 0.7"."""
    if temperature == 0:
        return "greedy"
    return "sampled" if sum(t > 0 for t in set(temperatures)) == 1 else f"temperature {temperature:g}"


def format_conclusion(totals: Sequence[SettingResult]) -> str:
    """Return one sentence on the best speculation options and their speed-up, or the advice to leave out the draft."""
    drafting = [result for result in totals if result.kind in ("lookup", "pair")]
    temperatures = list(dict.fromkeys(result.temperature for result in drafting))
    if not temperatures:
        return "Nothing was measured."
    speed = {(f.options, f.temperature): f.speedup_mean for f in drafting}
    choices = list(dict.fromkeys(f.options for f in drafting))
    best = {t: max(choices, key=lambda options: speed[options, t]) for t in temperatures}

    def worst_share(options: str) -> float:
        return min(speed[options, t] / speed[best[t], t] for t in temperatures)

    for_all = max(choices, key=worst_share)
    if worst_share(for_all) >= MIN_RELATIVE_SPEED:
        best = dict.fromkeys(temperatures, for_all)
    paying = [t for t in temperatures if speed[best[t], t] >= MIN_SPEEDUP]
    others = [t for t in temperatures if t not in paying]

    def format_group(group: list[float], suffix: str) -> str:
        """Return the best options for some temperatures and their speed-ups as text, grouped by options."""
        groups: dict[str, list[str]] = {}
        for t in group:
            times = f"{speed[best[t], t]:.2f}{'' if groups else suffix} ({format_temperature(t, temperatures)})"
            groups.setdefault(best[t], []).append(times)
        return "; ".join(f"{options}, {', '.join(times)}" for options, times in groups.items())

    suffix = " times the target alone"
    if not others:
        return f"Best here: {format_group(paying, suffix)}."
    if not paying:
        return f"Leave out -d here: the target alone is as fast or faster (at best {format_group(others, suffix)})."
    where = " and ".join(format_temperature(t, temperatures) for t in others)
    return f"Best here: {format_group(paying, suffix)}; leave out -d for {where} (at best {format_group(others, '')})."
