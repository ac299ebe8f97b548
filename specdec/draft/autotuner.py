"""The autotuner of a model bundle: compiles code, chooses threads, measures costs, and makes sequences with their drafters."""

from collections.abc import Callable, Iterator

from specdec.draft.acceptance import NGRAM_ACCEPTANCE, Acceptance
from specdec.draft.cost_calibration import MEASURE_BUDGET_S, RECHECK_BUDGET_S, SLOW_ROUND_S, CalibrationFile, measure
from specdec.draft.cost_curves import CostCurve
from specdec.draft.draft_length import CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.model_bundle import NGRAM, ModelBundle
from specdec.draft.ngram import PredictionDrafter
from specdec.draft.settings import SpeculativeSettings
from specdec.draft.thread_tuner import ThreadTuner, choose_threads
from specdec.engine.decode_loop import (
    Drafter,
    Event,
    GenerationRequest,
    LengthPolicy,
    Prefiller,
    PrefillProgress,
    Sequence,
    SinglePassPrefiller,
    Step,
    stream_events,
)
from specdec.runtime.compile_ahead import stop_processes
from specdec.runtime.cpu_topology import get_thread_choices, get_topology
from specdec.runtime.memory import zeros
from specdec.sampling import Sampler, Sampling
from specdec.text.logit_processors import wrap_constraint
from specdec.verification import VERIFIERS, Draft, Verifier

MIN_NGRAM_PASS_S = 3e-4  # minimum time of a target pass for n-gram drafts, since the search costs up to 5 us of Python
MIN_STEPS = 8  # of a sequence from which costs and acceptance are saved


class Autotuner:
    """A maker of sequences for one model bundle, which compiles code, chooses threads and measures costs before the first.

    Trees and a second-level draft are imported, compiled and measured only if they are requested.

    Attributes:
        curve: The cost of passes once they are measured; None before, or without a draft.
        thread_choices: The numbers of threads to choose from.
        relative_step_times: By number of threads, the time of a step relative to that on the first number; empty without a trial.
    """

    def __init__(self, bundle: ModelBundle) -> None:
        self.curve: CostCurve | None = None
        self.thread_choices = get_thread_choices() if bundle.can_choose_threads else [bundle.target.n_threads]
        self.relative_step_times: dict[int, float] = {}
        self._bundle, self._models = bundle, [*bundle.models.values()]
        self._eos_tokens, self._vocabulary = bundle.tokenizer.eos_tokens, bundle.draft.vocabulary
        self._acceptance = Acceptance(bundle.draft.prior_acceptance)
        self._costs: CostModel | None = None  # of the last sequence
        self._completed_tasks = set[str]()  # of `warm_up`
        self._calibration_file: CalibrationFile | None = None  # if there is a draft
        self._thread_tuner: ThreadTuner | None = None  # if the number of threads may be chosen
        self._stage_calibration: tuple[CostCurve, Acceptance] | None = None  # of the second-level draft, once measured

    def stream(
        self, request: GenerationRequest, settings: SpeculativeSettings, prefiller: Prefiller | None = None
    ) -> Iterator[Event | PrefillProgress]:
        """Prefill and decode a new sequence on the bundle, which must be warmed up, and yield its events (`stream_events`).

        Args:
            request: A validated request.
            settings: The settings of speculative decoding.
            prefiller: Prefills the prompt, by default in one pass of the target.
        """
        target, costs = self._bundle.target, CostModel(self.curve, self._costs) if self.curve else None
        sequence = self.make_sequence(self._bundle, request, settings, costs, is_alone=True)
        return self._observe(
            stream_events(target, sequence, prefiller or SinglePassPrefiller(target)), costs if settings.is_adaptive else None
        )

    def _observe(self, events: Iterator[Event | PrefillProgress], costs: CostModel | None) -> Iterator[Event | PrefillProgress]:
        """Yield the given events unchanged; report step times to the thread tuner, and save costs at the end.

        Args:
            events: The events of a sequence.
            costs: The cost model to save after MIN_STEPS steps, if any.
        """
        n_steps = 0
        try:
            for event in events:
                if isinstance(event, Step):
                    n_steps += 1
                    self.record_step(event.n_nodes, event.seconds)
                yield event
        finally:
            if costs and n_steps >= MIN_STEPS:
                self._save_costs(costs)

    def make_sequence(
        self,
        bundle: ModelBundle,
        request: GenerationRequest,
        settings: SpeculativeSettings,
        costs: CostModel | None,
        is_alone: bool = False,
    ) -> Sequence:
        """Return a new `Sequence` for a request, with its verifier, drafter and draft length policy.

        Args:
            bundle: The autotuner's bundle or a clone of it, with KV caches for this sequence.
            request: A validated request.
            settings: The settings of speculative decoding.
            costs: The cost model of the sequence's batch, if there is one.
            is_alone: Whether the batch is only this sequence.
        """
        draft, vocabulary, target = bundle.draft, self._vocabulary, bundle.target
        # without a draft only forced tokens are verified, which each verifier accepts
        verify = settings.verify if draft.model_or_ngram else "coupled"
        verifier = VERIFIERS[verify](vocabulary.n_target, request.sampling)
        # with other verifiers the output depends on the draft, so a prediction would change it
        is_predicted = bool(request.prediction) and verify == "coupled"
        if is_predicted:
            drafter: Drafter | None = PredictionDrafter(self._eos_tokens, len(request.prompt), request.prediction)
        else:
            drafter = self._make_drafter(bundle, request.sampling, verifier, settings, is_alone)
        policy: LengthPolicy = FixedLength(settings.fixed_gamma)
        if costs and drafter and settings.is_adaptive and not self._is_tree_drafting(settings, is_alone):
            is_free = is_predicted or draft.model is None
            acceptance = self._acceptance if draft.model is None or not is_predicted else Acceptance(NGRAM_ACCEPTANCE)
            policy = DraftLengthPolicy(costs, acceptance.for_sequence(), is_free, is_alone)
        constraint = wrap_constraint(request.constraint, request.sampling, vocabulary.n_target)
        n = request.max_tokens
        return Sequence(
            [*request.prompt],
            n,
            target.n_positions,
            drafter,
            verifier,
            policy,
            self._eos_tokens,
            constraint,
            target.longrope_threshold,
        )

    @property
    def thread_summary(self) -> str:
        """A text with the number of threads in use, its speed relative to other numbers in the trial, and the machine's cores."""
        n, times = self._bundle.target.n_threads, self.relative_step_times
        others = [
            f"{seconds / times[n]:.2g} times as fast as {other}" for other, seconds in times.items() if n in times and other != n
        ]
        comparison = f" ({' and '.join(others)} here)" if others else ""
        return f"{n} thread{'s' * (n != 1)}{comparison}; {get_topology().description}"

    def make_batch_cost_model(self) -> CostModel:
        """Return a new cost model for a batch of sequences; measure the cost of target passes first if that is not known."""
        return CostModel(self.curve or measure(self._bundle.target, None, self._vocabulary))

    def record_step(self, n_proposed: int, seconds: float) -> None:
        """Report the time of a decoding step to the thread tuner, if there is one; it may change the number of threads.

        Args:
            n_proposed: Number of draft tokens of the step, or of the pass that several sequences shared.
            seconds: Time of the step or pass.
        """
        if self._thread_tuner:
            self._thread_tuner.record_step(n_proposed, seconds)

    def _make_drafter(
        self, bundle: ModelBundle, sampling: Sampling, verifier: Verifier, settings: SpeculativeSettings, is_alone: bool
    ) -> Drafter | None:
        draft, eos_tokens, noise = bundle.draft, self._eos_tokens, verifier.get_draft_stream
        sampler = Sampler(self._vocabulary.n_target, sampling, self._vocabulary.n_common)
        if self._is_tree_drafting(settings, is_alone) and draft.model:
            from specdec.draft.tree import TreeDrafter

            return TreeDrafter(draft.model, sampler, noise, eos_tokens)
        if self._stage_calibration:
            from specdec.draft.staged import make_staged_drafter

            curve, acceptance = self._stage_calibration
            policy = DraftLengthPolicy(CostModel(curve), acceptance.for_sequence(), bundle.stage.model is None)
            return make_staged_drafter(bundle, policy, sampler, noise, eos_tokens)
        is_too_fast = settings.is_adaptive and self.curve is not None and self.curve.pass_seconds[1] <= MIN_NGRAM_PASS_S
        return None if is_too_fast and not draft.model else draft.make_drafter(sampler, noise, eos_tokens)

    def _is_tree_drafting(self, settings: SpeculativeSettings, is_alone: bool = True) -> bool:
        """Return whether proposals of a sequence with these settings are token trees."""
        is_requested = settings.tree == "on" and (is_alone or settings.verify != "coupled")
        return is_requested and self._bundle.draft.model is not None and not self._bundle.tree_incompatibility

    def _save_costs(self, costs: CostModel) -> None:
        """Keep a sequence's measured costs for later sequences, and write them and the acceptance to the calibration file."""
        self.curve, self._costs = costs.get_corrected_curve(), costs if costs.get_corrected_curve() is costs.curve else None
        if self._calibration_file:
            self._calibration_file.write(self.curve, self._acceptance)

    def warm_up(self, settings: SpeculativeSettings) -> None:
        """Compile or load the code that sequences with these settings need, choose threads, and measure costs, each only once."""
        while pending := self.get_pending_tasks(settings):
            name, task = next(iter(pending.items()))
            task()
            self._completed_tasks.add(name)

    def get_pending_tasks(self, settings: SpeculativeSettings) -> dict[str, Callable[[], object]]:
        """Return by name the functions that `warm_up` has yet to call, in order, before a sequence with these settings starts.

        One thread runs other code than several threads, so passes are a task for each case.
        """
        verify, verifier, n_ids = settings.verify, VERIFIERS[settings.verify], self._vocabulary.n_target
        tasks: dict[str, Callable[[], object]] = {
            f"passes {[model.n_threads > 1 for model in self._models]}": lambda: self._time_generation(2, settings)
        }
        if self._bundle.draft.model_or_ngram:
            tasks[verify] = lambda: warm_up_verifier(verifier, n_ids)
        if self._is_tree_drafting(settings):
            from specdec.draft.tree import warm_up_trees

            tasks["trees"] = lambda: warm_up_trees(self._models, self._vocabulary)
            tasks[f"{verify} of trees"] = lambda: warm_up_verifier(verifier, n_ids, [-1, -1])
        tasks["measures"] = lambda: self._measure(settings)
        return {name: task for name, task in tasks.items() if name not in self._completed_tasks}

    def _measure(self, settings: SpeculativeSettings) -> None:
        """Stop the compile processes, choose and set the number of threads, and measure the costs of passes and drafts."""
        draft = self._bundle.draft
        stop_processes(self._bundle.compile_processes)
        if len(self.thread_choices) > 1:
            self.relative_step_times = choose_threads(
                self._set_n_threads, self.thread_choices, lambda n_tokens: self._time_generation(n_tokens, settings)
            )
            self._thread_tuner = ThreadTuner(self.thread_choices, self._bundle.target.n_threads, self._set_n_threads)
        if draft.model_or_ngram:
            self._calibrate()
        if draft.model and (stage := self._bundle.stage).model_or_ngram:
            self._stage_calibration = measure(draft.model, stage.model, self._vocabulary), Acceptance(stage.prior_acceptance)

    def _calibrate(self) -> None:
        """Set the cost curve to the minimum of costs measured now and those of earlier processes, and load their acceptance.

        Other programs only ever add time. The measurement is skipped if a slow target's stored costs show that drafts pay.
        """
        draft, seconds = self._bundle.draft, MEASURE_BUDGET_S
        self._calibration_file = CalibrationFile(self._models[: 1 + bool(draft.model)], "" if draft.model else NGRAM)
        if stored := self._calibration_file.read():
            self.curve, self._acceptance = stored
            seconds = RECHECK_BUDGET_S
            if self.curve.pass_seconds[1] > SLOW_ROUND_S and self.curve.is_profitable(self._acceptance.mean):
                return
        measured = measure(self._bundle.target, draft.model, self._vocabulary, seconds)
        self.curve = self.curve.merge(measured) if self.curve else measured

    def _set_n_threads(self, n_threads: int) -> None:
        for model in self._models:
            model.n_threads = n_threads

    def _time_generation(self, max_tokens: int, settings: SpeculativeSettings) -> float:
        """Generate max_tokens tokens with the settings, and return the seconds of all steps, without the prefill."""
        tokens = self._bundle.tokenizer.encode("")
        if self._bundle.draft.head:  # it needs two tokens, and drafts from the target's hidden states, then from its own output
            tokens, max_tokens = (tokens * 2)[: self._bundle.target.n_positions], max_tokens + 1
        events = self.stream(GenerationRequest(tokens, max_tokens, Sampling()), settings)
        return sum(event.seconds for event in events if isinstance(event, Step))


def warm_up_verifier(verifier: Callable[[int, Sampling], Verifier], vocab_size: int, parents: list[int] | None = None) -> None:
    """Compile the code of a verifier by letting it verify two draft tokens that are rejected.

    Args:
        verifier: The verifier's class.
        vocab_size: The number of token ids.
        parents: The parents of the two tokens in a tree; None for a chain.
    """
    logits = zeros(3, max(vocab_size, 3))
    logits[:, 0] = 1.0
    verifier(vocab_size, Sampling(temperature=0.0)).verify(logits, Draft([1, 2], None, parents), 1)
