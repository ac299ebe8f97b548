"""Measures the options of speculation on one's own pair and prompts, each beside the target alone. Knows no terminals.

Paired and interleaved: all settings write a text in turn, in an order that is rotated from text to text, so that a change of the
machine's speed meets each of them; a ratio is one of neighbours in time, and a text's ratio the median of the rounds'. What is
timed is decoding, as the summary of a text counts it: without the prompt's own pass. Texts are the plain ones of their seeds
(coupled verification), and every one of them is compared.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from specdec.bench.race import Lane
from specdec.decoder import SpeculativeDecoder
from specdec.draft.resolver import NGRAM
from specdec.draft.settings import AUTO
from specdec.engine.decoding import Event, Statistics
from specdec.heads.head import Head
from specdec.sampling import Sampling

PAYS = 1.03  # times the target alone; less than that is noise
AS_GOOD = 0.98  # of the best setting: one for all temperatures is then simpler than two
WARM_UP_TOKENS = 32
PROMPTS = (  # short: behind each of them a context of 512 has room for 500 tokens
    "Once upon a time",
    "One day, a little girl named Lily",
    "Tim and Sam were best friends.",
    "There was a big dog named Max.",
    "The sun was hot and",
    "Mom and Dad went to the park",
    "Lily had a red ball.",
    "A small bird sat in a tree.",
    "Ben wanted a new toy car.",
    '"Can we play?" asked Tom.',
    "It was a rainy day and",
    "The cat was very sad because",
)
OF_SUMS = (  # figures that are those of the texts' statistics, summed up
    "n_drafted", "n_accepted", "acceptance_rate", "tokens_per_pass", "acceptance_by_position", "experts_alone",
    "experts_per_token",
)  # fmt: skip
Kind = Literal["alone", "draft", "ngram", "pair"]


class TextsDiffer(Exception):
    """A setting wrote another text than the target alone with the same seed."""


class Writer(Protocol):
    """What the sweep asks of a decoder."""

    gamma: Any  # how far it drafts
    tree: Any  # and whether several candidates for a place

    def stream(self, prompt: str, max_tokens: int, sampling: Sampling) -> Iterator[Event]: ...


@dataclass(frozen=True)
class Setting:
    """A way to write a text: its name, the options of the command that choose it beside -m and -d, and what writes.

    kind: "alone" is the target without a draft, "draft" the draft without a target, whose text is its own; gamma: None where
    nothing is drafted; tree: as the decoder's.
    """

    name: str
    options: str
    decoder: Writer
    kind: Kind
    gamma: int | str | None = None
    tree: str = "off"

    def stream(self, text: "Text") -> Iterator[Event]:
        if self.gamma is not None:  # settings share decoders
            self.decoder.gamma, self.decoder.tree = self.gamma, self.tree
        return self.decoder.stream(text.prompt, text.max_tokens, text.sampling)


class Text(NamedTuple):
    """What is to be written."""

    prompt: str
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Figures:
    """Of one setting at one temperature, over texts of up to max_tokens (None: of any length).

    speedup: over the target alone, a text's being the median of its rounds; tokens_per_second: the median of the texts';
    acceptance_by_position: accepted / drafted at each position of a proposal; one that was not drafted does not count. experts:
    that a layer of a mixture reads for a token alone, and read for each that was written; else 0.
    """

    setting: str
    options: str
    kind: Kind
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
class Measured:
    """The runs of every text by every setting, a list of rounds; a text that was not written by all of them is left out."""

    settings: Sequence[Setting]
    runs: dict[Text, list[dict[str, Lane]]] = field(default_factory=dict)
    is_whole: bool = False

    def cells(self) -> list[Figures]:
        """Of every temperature and length, the settings in their order; those without a text are left out."""
        return self._of((text.sampling.temperature, text.max_tokens) for text in self.runs)

    def totals(self) -> list[Figures]:
        """Of every temperature, over all lengths."""
        return self._of((text.sampling.temperature, None) for text in self.runs)

    def _of(self, kinds: Iterable[tuple[float, int | None]]) -> list[Figures]:
        found = (self._figures(setting, *kind) for kind in sorted({*kinds}) for setting in self.settings)
        return [figures for figures in found if figures]

    def _figures(self, setting: Setting, temperature: float, max_tokens: int | None) -> Figures | None:
        texts = [
            [(visit[setting.name], visit[self.settings[0].name]) for visit in visits]
            for text, visits in self.runs.items()
            if text.sampling.temperature == temperature and max_tokens in (None, text.max_tokens)
        ]
        # one that ends at once has no speed
        texts = [pairs for pairs in texts if all(_speed(run) and _speed(alone) for run, alone in pairs)]
        if not texts:
            return None
        speedups = [statistics.median(_speed(run) / _speed(alone) for run, alone in pairs) for pairs in texts]
        total = Statistics()
        for step in (step for pairs in texts for run, _ in pairs for step in run.steps):
            total.add(step)
        return Figures(
            setting.name,
            setting.options,
            setting.kind,
            temperature,
            max_tokens,
            n_texts=len(texts),
            speedup_min=min(speedups),
            speedup_mean=statistics.fmean(speedups),
            speedup_max=max(speedups),
            tokens_per_second=statistics.median(statistics.median(_speed(run) for run, _ in pairs) for pairs in texts),
            **{name: getattr(total, name) for name in OF_SUMS},
        )


def _speed(run: Lane) -> float:
    return run.statistics.tokens_per_second


# What is measured


def settings_of(pair: SpeculativeDecoder, gammas: Sequence[int | str]) -> tuple[list[Setting], list[str]]:
    """The target alone first, the draft alone, n-grams, the pair with each gamma, with trees and staged; and what was left out.

    Decoders share the pair's models, whose caches hold one text each: a text is to be written to its end. Without a draft model
    the gammas are those of n-grams.
    """
    target, tokenizer, notes = pair.target, pair.tokenizer, list[str]()
    settings = [Setting("target alone", "", SpeculativeDecoder(target, None, tokenizer), "alone")]
    ngrams = SpeculativeDecoder(target, NGRAM, tokenizer)
    if pair.draft is None:
        return settings + [Setting(f"n-grams γ {g}", f"-d ngram -g {g}", ngrams, "ngram", g) for g in gammas], notes
    is_head = isinstance(pair.draft, Head)
    if is_head:
        notes.append("the draft alone, trees and stages are left out: a head writes no text, proposes chains, and has no draft")
    else:
        try:
            if pair.draft.n_positions < target.n_positions:
                raise ValueError(f"it has room for {pair.draft.n_positions} tokens, the target for {target.n_positions}")
            settings.append(Setting("draft alone", "", SpeculativeDecoder(pair.draft, None, tokenizer), "draft"))
        except ValueError as error:  # also of a vocabulary of another size
            notes.append(f"the draft alone is left out: {error}")
    most = AUTO if AUTO in gammas else max(gamma for gamma in gammas if isinstance(gamma, int))
    settings.append(Setting(f"n-grams γ {most}", f"-d ngram -g {most}", ngrams, "ngram", most))
    settings += [Setting(f"γ {g}", f"-g {g}", pair, "pair", g) for g in gammas]
    if AUTO in gammas and not pair.has_stage and not is_head:
        staged = SpeculativeDecoder(target, pair.draft, tokenizer, stage=NGRAM)
        if target.runs_trees and pair.draft.runs_trees:
            settings.append(Setting("γ auto, trees", "-g auto --tree on", pair, "pair", AUTO, "on"))
        else:
            notes.append("trees are left out: a state of the target or of the draft is that of one text")
        settings.append(Setting("γ auto, n-grams first", "-g auto --stage ngram", staged, "pair", AUTO))
    return settings, notes


def texts_of(
    pair: SpeculativeDecoder, prompts: Sequence[str], lengths: Sequence[int], samplings: Sequence[Sampling]
) -> tuple[list[Text], list[str]]:
    """Every prompt at every length that the context has room for, and a word on what has none. Raises ValueError for no text."""
    sizes = {prompt: len(pair.encode(prompt)) for prompt in prompts}
    room = pair.n_positions + 1  # the last token is never run
    fits = {n: [prompt for prompt in prompts if sizes[prompt] + n <= room] for n in lengths}
    notes = [
        f"{n} tokens fit the context of {pair.n_positions} behind {len(fits[n]) or 'none'} of the {len(prompts)} prompts"
        for n in lengths
        if len(fits[n]) < len(prompts)
    ]
    texts = [Text(prompt, n, s) for prompt in prompts for n in lengths if prompt in fits[n] for s in samplings]
    if not texts:
        raise ValueError(f"nothing to measure: {'; '.join(notes)} (max_tokens=..., prompts=...)")
    return texts, notes


def samplings_of(temperatures: Sequence[float], top_p: float, n_seeds: int) -> list[Sampling]:
    """Seeds 1 to n_seeds of each temperature; greedy, whose text depends on no seed, with one."""
    return [Sampling(t, 0, top_p, seed) for t in temperatures for seed in range(1, 1 + (n_seeds if t else 1))]


# Measuring


def measure(
    settings: Sequence[Setting],
    texts: Sequence[Text],
    rounds: int,
    tell: Callable[[float], object] = lambda share: None,
    is_asked: Callable[[], object] = lambda: False,
) -> Measured:
    """All texts by all settings, rounds times; the first setting is the target alone.

    tell: is told the share that is done; is_asked: whether to stop with what there is. Raises TextsDiffer.
    """
    measured = Measured(settings)
    _warm_up(settings, texts, is_asked)
    work, done = rounds * len(settings) * sum(text.max_tokens for text in texts), 0
    visits = [(text, i + number) for number in range(rounds) for i, text in enumerate(texts)]
    for text, turn in visits:
        runs: dict[str, Lane] = {}
        turn %= len(settings)
        for setting in (*settings[turn:], *settings[:turn]):
            tell(done / work)
            run = write(setting, text, is_asked)
            if run is None:
                return measured
            runs[setting.name] = run
            done += text.max_tokens
        before = measured.runs.setdefault(text, [])
        plain = (before[0] if before else runs)[settings[0].name]
        for setting in settings:
            if setting.kind != "draft":
                _compare(runs[setting.name], plain, setting, text)
        before.append(runs)
    measured.is_whole = True
    return measured


def _warm_up(settings: Sequence[Setting], texts: Sequence[Text], is_asked: Callable[[], object]) -> None:
    """A short text of every setting and sampling that counts for nothing, so that whatever comes once has come."""
    for sampling in dict.fromkeys(text.sampling for text in texts):
        for setting in settings:
            write(setting, texts[0]._replace(max_tokens=min(WARM_UP_TOKENS, texts[0].max_tokens), sampling=sampling), is_asked)


def write(setting: Setting, text: Text, is_asked: Callable[[], object] = lambda: False) -> Lane | None:
    """One text; None where it was asked to stop."""
    run = Lane()
    for event in setting.stream(text):
        run.add(event)
        if is_asked():
            return None
    return run


def _compare(run: Lane, plain: Lane, setting: Setting, text: Text) -> None:
    if run.written == plain.written:
        return
    pairs = enumerate(zip(run.tokens, plain.tokens, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(run.tokens), len(plain.tokens)))
    raise TextsDiffer(
        f"the text of {setting.name} is not the target's own from its token {same + 1} on: prompt {text.prompt!r}, "
        f"seed {text.sampling.seed}, temperature {text.sampling.temperature:g}, {text.max_tokens} tokens"
    )


# What it means


def name_of(temperature: float, temperatures: Iterable[float]) -> str:
    """ "greedy", "sampled" where there is one temperature of that kind, else the temperature."""
    if temperature == 0:
        return "greedy"
    return "sampled" if sum(t > 0 for t in set(temperatures)) == 1 else f"temperature {temperature:g}"


def conclusion(totals: Sequence[Figures]) -> str:
    """In one sentence, which options are best, and by how much."""
    drafting = [figures for figures in totals if figures.kind in ("ngram", "pair")]
    temperatures = list(dict.fromkeys(figures.temperature for figures in drafting))
    if not temperatures:
        return "Nothing was measured."
    speed = {(f.options, f.temperature): f.speedup_mean for f in drafting}
    choices = list(dict.fromkeys(f.options for f in drafting))
    best = {t: max(choices, key=lambda options: speed[options, t]) for t in temperatures}

    def worst_share(options: str) -> float:
        return min(speed[options, t] / speed[best[t], t] for t in temperatures)

    for_all = max(choices, key=worst_share)
    if worst_share(for_all) >= AS_GOOD:
        best = dict.fromkeys(temperatures, for_all)
    paying = [t for t in temperatures if speed[best[t], t] >= PAYS]
    others = [t for t in temperatures if t not in paying]

    def told(of: list[float], behind: str) -> str:
        """Options and what they reach, those of equal options together."""
        groups: dict[str, list[str]] = {}
        for t in of:
            times = f"{speed[best[t], t]:.2f}{'' if groups else behind} ({name_of(t, temperatures)})"
            groups.setdefault(best[t], []).append(times)
        return "; ".join(f"{options}, {', '.join(times)}" for options, times in groups.items())

    behind = " times the target alone"
    if not others:
        return f"Best here: {told(paying, behind)}."
    if not paying:
        return f"Leave out -d here: the target alone is as fast or faster (at best {told(others, behind)})."
    where = " and ".join(name_of(t, temperatures) for t in others)
    return f"Best here: {told(paying, behind)}; leave out -d for {where} (at best {told(others, '')})."


class Overall(NamedTuple):
    """Of the cells with a fixed draft length: the mean of their mean speed-ups, the best cell, and the best single text."""

    mean: float
    best: Figures
    best_text: float


def overall(cells: Sequence[Figures]) -> Overall | None:
    """Over the pair's fixed lengths, or n-grams' where there is no draft."""
    kind = "pair" if any(figures.kind == "pair" for figures in cells) else "ngram"
    fixed = [f for f in cells if f.kind == kind and AUTO not in f.options]
    if not fixed:
        return None
    best = max(fixed, key=lambda figures: figures.speedup_mean)
    return Overall(statistics.fmean(f.speedup_mean for f in fixed), best, max(f.speedup_max for f in fixed))
