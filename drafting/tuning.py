"""How a team writes on this machine: what is compiled and measured, on how many threads, and who drafts by which plan."""

from collections.abc import Callable, Iterator

from ..decoding import AtOnce, Drafter, Event, Job, Plan, Prefill, Reader, Step, Text, write
from ..machine.ahead import end
from ..machine.cores import known, thread_choices
from ..machine.memory import zeros
from ..sampling import Sampler, Sampling
from ..text.adjusting import adjusted
from ..verification import VERIFIERS, Draft, Verifier
from .estimates import ODDS_RATES, Acceptance, Costs
from .pacing import Pace
from .planning import AutoLength, FixedLength
from .remembered import LEAST_STEPS, Remembered
from .settings import Settings
from .sharing import Sharing
from .team import NGRAM, Team
from .timing import choose_threads, costs_of

NGRAM_SECONDS = 3e-4  # what a target's token has to take for n-grams to be looked for: that costs up to 5 us of Python


class Tuning:
    """What is known of a team, over texts. costs: what passes take, from when they were measured, where something drafts.

    choices: numbers of threads to choose from; took: what steps take on each, as so many times what they take on the first.
    Trees and a stage are imported, compiled and measured where they are asked for alone.
    """

    def __init__(self, team: Team) -> None:
        self.costs: Costs | None = None
        self.choices = thread_choices() if team.may_choose else [team.target.n_threads]
        self.took: dict[int, float] = {}
        self._team, self._models = team, [*team.models.values()]
        self._end_marks, self._vocabulary = team.tokenizer.end_marks, team.draft.vocabulary
        self._acceptance = Acceptance(team.draft.rates)
        self._done = set[str]()  # of what `warm_up` does
        self._remembered: Remembered | None = None  # where something drafts
        self._pace: Pace | None = None  # where the number of threads is free
        self._guesses: tuple[Costs, Acceptance] | None = None  # what a stage's cost and bring, once that is measured

    def events(self, job: Job, settings: Settings, reader: Reader | None = None) -> Iterator[Event | Prefill]:
        """A text's, of whatever is warm; reader: reads the prompt, by default in one go."""
        target = self._team.target
        events = write(target, self.text(self._team, job, settings), reader or AtOnce(target))
        return self._watched(events, settings.follows_clock)

    def _watched(self, events: Iterator[Event | Prefill], is_worth_keeping: bool) -> Iterator[Event | Prefill]:
        """The events; what they show is for the choice of threads and, is_worth_keeping, for the next process."""
        n_steps = 0
        try:
            for event in events:
                if isinstance(event, Step):
                    n_steps += 1
                    self.saw(event.n_nodes, event.seconds)
                yield event
        finally:
            if is_worth_keeping and n_steps >= LEAST_STEPS and self._remembered and self.costs:
                self._remembered.write(self.costs, self._acceptance)

    def text(self, seat: Team, job: Job, settings: Settings, shared: Plan | None = None) -> Text:
        """A text on a seat of the team; shared: of one that shares passes with others, where the clock decides how long proposals
        get.
        """
        verify = settings.verify if seat.draft.source else "coupled"  # tokens that a shape forces stand by any
        verifier, target = VERIFIERS[verify](self._vocabulary.n_target, job.sampling), seat.target
        plan, drafter = self._planned(seat, job.sampling, verifier.draft_noise, settings, shared)
        n, shape = job.max_tokens, adjusted(job.shape, job.sampling, self._vocabulary.n_target)
        return Text([*job.prompt], n, target.n_positions, drafter, verifier, plan, self._end_marks, shape, target.n_short)

    @property
    def threads(self) -> str:
        """How many are in use, of which cores, and what others took when they were tried."""
        n = self._team.target.n_threads
        tried = [f"{each} took {taken:.2g} times as long" for each, taken in self.took.items() if each != self.choices[0]]
        return f"{n} on {known().words}" + f"; beside {self.choices[0]}, {' and '.join(tried)}" * bool(tried)

    def sharing(self) -> Sharing:
        """What passes that texts share cost, and what proposals in them bring."""
        draft = self._team.draft
        costs = self.costs or costs_of(self._team.target, None, self._vocabulary)
        return Sharing(costs, self._acceptance if draft.source else Acceptance(ODDS_RATES))

    def saw(self, n_proposed: int, seconds: float) -> None:
        """A step, or a pass that texts shared."""
        if self._pace:
            self._pace.saw(n_proposed, seconds)

    def _planned(
        self, team: Team, sampling: Sampling, noise: Callable[[int], int], settings: Settings, shared: Plan | None = None
    ) -> tuple[Plan, Drafter | None]:
        """How long proposals get, and who makes them. shared: of a text whose passes are others' too."""
        draft, costs, marks = team.draft, self.costs, self._end_marks
        sampler = Sampler(self._vocabulary.n_target, sampling, self._vocabulary.n_common)
        if self._branches(settings) and draft.model and not (shared and settings.verify == "coupled"):
            from .trees import FixedTree, TreeDrafter

            tree = FixedTree(settings.n_drafted, None if shared else costs)
            return tree, TreeDrafter(draft.model, sampler, noise, marks)
        auto = costs if settings.follows_clock else None
        plan = shared or (AutoLength(auto, self._acceptance) if auto else None) if settings.follows_clock else None
        plan = plan or FixedLength(settings.n_drafted, None if shared else costs)
        if self._guesses:
            from .stages import staged

            return plan, staged(team, AutoLength(*self._guesses), sampler, noise, marks)
        is_worth_it = draft.model or not (auto and auto.of(1) <= NGRAM_SECONDS)
        return plan, draft.drafter(sampler, noise, marks) if is_worth_it else None

    def _branches(self, settings: Settings) -> bool:
        """Whether proposals are trees."""
        return settings.tree == "on" and self._team.draft.model is not None and not self._team.no_trees

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
            from .trees import run_trees

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
        costs: Costs | None = None
        if draft.source:
            self._remembered = Remembered(self._models[: 1 + bool(draft.model)], "" if draft.model else NGRAM)
            costs = self._remembered.read(self._acceptance) or costs_of(self._team.target, draft.model, self._vocabulary)
        if draft.model and (stage := self._team.stage).source:
            self._guesses = costs_of(draft.model, stage.model, self._vocabulary), Acceptance(stage.rates)
        self.costs = costs

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
