"""Prepares a team to write on this machine: compiles, chooses threads, measures costs, and makes drafters and their policies."""

from collections.abc import Callable, Iterator

from specdec.draft.acceptance import ODDS_RATES, Acceptance
from specdec.draft.calibration import MEASURE_SECONDS, RECHECK_SECONDS, SLOW_SECONDS, CalibrationFile, measure
from specdec.draft.costs import CostCurve
from specdec.draft.ngram import PredictionDrafter
from specdec.draft.policy import CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.resolver import NGRAM, Team
from specdec.draft.settings import Settings
from specdec.draft.thread_tuner import Pace, choose_threads
from specdec.engine.decoding import AtOnce, Drafter, Event, Job, LengthPolicy, Prefill, Reader, Step, Text, write
from specdec.runtime.compile_ahead import end
from specdec.runtime.cpu_topology import known, thread_choices
from specdec.runtime.memory import zeros
from specdec.sampling import Sampler, Sampling
from specdec.text.logit_processors import adjusted
from specdec.verification import VERIFIERS, Draft, Verifier

NGRAM_SECONDS = 3e-4  # that a pass of the target has to take for n-grams to be looked for: that costs up to 5 us of Python
MIN_STEPS = 8  # of a text that is worth keeping its acceptance


class Tuning:
    """What is known of a team, over texts. curve: what passes cost, from when they were measured, where something drafts.

    choices: numbers of threads to choose from; took: what steps take on each, as so many times what they take on the first.
    Trees and a stage are imported, compiled and measured where they are asked for alone.
    """

    def __init__(self, team: Team) -> None:
        self.curve: CostCurve | None = None
        self.choices = thread_choices() if team.may_choose else [team.target.n_threads]
        self.took: dict[int, float] = {}
        self._team, self._models = team, [*team.models.values()]
        self._end_marks, self._vocabulary = team.tokenizer.end_marks, team.draft.vocabulary
        self._acceptance = Acceptance(team.draft.rates)
        self._costs: CostModel | None = None  # of the last text
        self._done = set[str]()  # of what `warm_up` does
        self._file: CalibrationFile | None = None  # where something drafts
        self._pace: Pace | None = None  # where the number of threads is free
        self._guesses: tuple[CostCurve, Acceptance] | None = None  # what a stage's cost and bring, once that is measured

    def events(self, job: Job, settings: Settings, reader: Reader | None = None) -> Iterator[Event | Prefill]:
        """A text's, of whatever is warm; reader: reads the prompt, by default in one go."""
        target, costs = self._team.target, CostModel(self.curve, self._costs) if self.curve else None
        text = self.text(self._team, job, settings, costs, is_alone=True)
        return self._watched(write(target, text, reader or AtOnce(target)), costs if settings.follows_clock else None)

    def _watched(self, events: Iterator[Event | Prefill], costs: CostModel | None) -> Iterator[Event | Prefill]:
        """The events; what they show is for the choice of threads and for later texts."""
        n_steps = 0
        try:
            for event in events:
                if isinstance(event, Step):
                    n_steps += 1
                    self.saw(event.n_nodes, event.seconds)
                yield event
        finally:
            if costs and n_steps >= MIN_STEPS:
                self._keep(costs)

    def text(self, seat: Team, job: Job, settings: Settings, costs: CostModel | None, is_alone: bool = False) -> Text:
        """A text on a seat of the team. costs: of the batch that it is in; is_alone: whether it is all of that."""
        draft, vocabulary, target = seat.draft, self._vocabulary, seat.target
        verify = settings.verify if draft.source else "coupled"  # tokens that a shape forces stand by any
        verifier = VERIFIERS[verify](vocabulary.n_target, job.sampling)
        is_predicted = (
            bool(job.prediction) and verify == "coupled"
        )  # a text of another verification is another one by another draft
        if is_predicted:
            drafter: Drafter | None = PredictionDrafter(self._end_marks, len(job.prompt), job.prediction)
        else:
            drafter = self._drafter(seat, job.sampling, verifier, settings, is_alone)
        policy: LengthPolicy = FixedLength(settings.n_drafted)
        if costs and drafter and settings.follows_clock and not self._branches(settings, is_alone):
            is_free = is_predicted or draft.model is None
            acceptance = self._acceptance if draft.model is None or not is_predicted else Acceptance(ODDS_RATES)
            policy = DraftLengthPolicy(costs, acceptance.of_sequence(), is_free, is_alone)
        shape = adjusted(job.shape, job.sampling, vocabulary.n_target)
        n = job.max_tokens
        return Text([*job.prompt], n, target.n_positions, drafter, verifier, policy, self._end_marks, shape, target.n_short)

    @property
    def threads(self) -> str:
        """How many are in use, of which cores, and what others took when they were tried."""
        n = self._team.target.n_threads
        tried = [f"{each} took {taken:.2g} times as long" for each, taken in self.took.items() if each != self.choices[0]]
        return f"{n} on {known().words}" + f"; beside {self.choices[0]}, {' and '.join(tried)}" * bool(tried)

    def costs_of_batches(self) -> CostModel:
        """What passes of batches cost."""
        return CostModel(self.curve or measure(self._team.target, None, self._vocabulary))

    def saw(self, n_proposed: int, seconds: float) -> None:
        """A step, or a pass that texts shared."""
        if self._pace:
            self._pace.saw(n_proposed, seconds)

    def _drafter(self, team: Team, sampling: Sampling, verifier: Verifier, settings: Settings, is_alone: bool) -> Drafter | None:
        draft, marks, noise = team.draft, self._end_marks, verifier.draft_noise
        sampler = Sampler(self._vocabulary.n_target, sampling, self._vocabulary.n_common)
        if self._branches(settings, is_alone) and draft.model:
            from specdec.draft.tree import TreeDrafter

            return TreeDrafter(draft.model, sampler, noise, marks)
        if self._guesses:
            from specdec.draft.staged import staged

            curve, acceptance = self._guesses
            policy = DraftLengthPolicy(CostModel(curve), acceptance.of_sequence(), team.stage.model is None)
            return staged(team, policy, sampler, noise, marks)
        is_too_fast = settings.follows_clock and self.curve is not None and self.curve.passes[1] <= NGRAM_SECONDS
        return None if is_too_fast and not draft.model else draft.drafter(sampler, noise, marks)

    def _branches(self, settings: Settings, is_alone: bool = True) -> bool:
        """Whether proposals are trees."""
        is_asked = settings.tree == "on" and (is_alone or settings.verify != "coupled")
        return is_asked and self._team.draft.model is not None and not self._team.no_trees

    def _keep(self, costs: CostModel) -> None:
        """Let later texts, and later processes, begin with what a text has shown."""
        self.curve, self._costs = costs.corrected_curve(), costs if costs.corrected_curve() is costs.curve else None
        if self._file:
            self._file.write(self.curve, self._acceptance)

    def warm_up(self, settings: Settings) -> None:
        """Compile, or load, whatever a text of these settings needs, and measure what it takes; what is done is done once."""
        while undone := self.undone(settings):
            name, do = next(iter(undone.items()))
            do()
            self._done.add(name)

    def undone(self, settings: Settings) -> dict[str, Callable[[], object]]:
        """What is to be done before a text of these settings begins, in order; one thread and several run other code."""
        verify, verifier, n_ids = settings.verify, VERIFIERS[settings.verify], self._vocabulary.n_target
        to_do: dict[str, Callable[[], object]] = {
            f"passes {[model.n_threads > 1 for model in self._models]}": lambda: self._seconds(2, settings)
        }
        if self._team.draft.source:
            to_do[verify] = lambda: judge_proposals(verifier, n_ids)
        if self._branches(settings):
            from specdec.draft.tree import run_trees

            to_do["trees"] = lambda: run_trees(self._models, self._vocabulary)
            to_do[f"{verify} of trees"] = lambda: judge_proposals(verifier, n_ids, [-1, -1])
        to_do["measures"] = lambda: self._measure(settings)
        return {name: do for name, do in to_do.items() if name not in self._done}

    def _measure(self, settings: Settings) -> None:
        """Choose the threads, and time passes on them, once nothing is compiled any more: here, or in processes beside."""
        draft = self._team.draft
        end(self._team.compiling)
        if len(self.choices) > 1:
            self.took = choose_threads(self._use, self.choices, lambda n_tokens: self._seconds(n_tokens, settings))
            self._pace = Pace(self.choices, self._team.target.n_threads, self._use)
        if draft.source:
            self._calibrate()
        if draft.model and (stage := self._team.stage).source:
            self._guesses = measure(draft.model, stage.model, self._vocabulary), Acceptance(stage.rates)

    def _calibrate(self) -> None:
        """Measure costs; those that earlier processes measured as less hold: other programs only ever add time."""
        draft, seconds = self._team.draft, MEASURE_SECONDS
        self._file = CalibrationFile(self._models[: 1 + bool(draft.model)], "" if draft.model else NGRAM)
        if known := self._file.read():
            self.curve, self._acceptance = known
            seconds = RECHECK_SECONDS
            if self.curve.passes[1] > SLOW_SECONDS and self.curve.pays(self._acceptance.mean):
                return
        measured = measure(self._team.target, draft.model, self._vocabulary, seconds)
        self.curve = self.curve.merge(measured) if self.curve else measured

    def _use(self, n_threads: int) -> None:
        for model in self._models:
            model.n_threads = n_threads

    def _seconds(self, max_tokens: int, settings: Settings) -> float:
        """What that many tokens take."""
        tokens = self._team.tokenizer.encode("")
        if self._team.draft.head:  # it guesses behind two tokens: by the target's states, then by its own
            tokens, max_tokens = (tokens * 2)[: self._team.target.n_positions], max_tokens + 1
        events = self.events(Job(tokens, max_tokens, Sampling()), settings)
        return sum(event.seconds for event in events if isinstance(event, Step))


def judge_proposals(verifier: Callable[[int, Sampling], Verifier], vocab_size: int, parents: list[int] | None = None) -> None:
    """Two tokens that do not stand, as a chain or by their parents: so that all that judging them takes is compiled."""
    logits = zeros(3, max(vocab_size, 3))
    logits[:, 0] = 1.0
    verifier(vocab_size, Sampling(temperature=0.0)).judge(logits, Draft([1, 2], None, parents), 1)
