"""The autotuner of a model bundle: chooses threads, measures costs of passes, and learns from the sequences that run."""

from collections.abc import Callable

from specdec.draft.acceptance import Acceptance
from specdec.draft.cost_calibration import CalibrationFile, measure
from specdec.draft.draft_length import CostCurve, CostModel
from specdec.draft.model_bundle import LOOKUP, ModelBundle
from specdec.draft.settings import SpeculativeSettings
from specdec.draft.thread_tuner import MAX_TRIAL_STEP_S, ThreadTuner, choose_threads
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.runtime.cpu_topology import get_thread_choices, get_topology
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import MAX_TILE_TOKENS

# Minimum time of a target pass for looked-up drafts: a search, and what it learns from, take up to 20 us. stories6M in int8 has
# 0.993 of its plain speed with this limit and 0.815 without, stories650K 1.015 and 0.66.
MIN_LOOKUP_PASS_S = 3e-4
SLOW_PASS_S = 0.1
MAX_PREFILL_PASS_S = 0.3  # of a pass of prefill chunks alone: keyboard input is read between two passes
FIRST_PREFILL_TOKENS, MIN_PREFILL_TOKENS = 2 * MAX_TILE_TOKENS, MAX_TILE_TOKENS  # of such a pass


class PrefillLimit:
    """The number of prompt tokens that a pass without decoding sequences runs, so that it takes at most MAX_PREFILL_PASS_S.

    Attributes:
        n_tokens: The number of tokens.
    """

    def __init__(self) -> None:
        """Start with a small number of tokens."""
        self.n_tokens = FIRST_PREFILL_TOKENS

    def update(self, seconds: float) -> None:
        """Halve `n_tokens` if a pass took too long; double it if the pass took less than half of the limit.

        Args:
            seconds: Time of the pass.
        """
        if seconds > MAX_PREFILL_PASS_S:
            self.n_tokens = max(self.n_tokens // 2, MIN_PREFILL_TOKENS)
        elif seconds < MAX_PREFILL_PASS_S / 2:
            self.n_tokens = min(2 * self.n_tokens, MAX_BATCH_TOKENS)


class Autotuner:
    """The measured costs of a bundle's models on this machine, the acceptance of its drafts, and the number of threads.

    Attributes:
        bundle: The models.
        curve: The cost of passes once measured; None without a draft.
        thread_tuner: Chooses the number of threads; None if it is fixed.
        acceptance: How often draft tokens were accepted so far.
        draft_calibration: What `ModelBundle.measure_draft` has returned; None before.
        prefill_limit: How many prompt tokens a pass runs.
        thread_choices: The numbers of threads to choose from.
        relative_step_times: By number of threads, the time of a step relative to that on the first number; empty without a trial.
    """

    def __init__(self, bundle: ModelBundle) -> None:
        """Create an autotuner that has measured nothing yet."""
        self.bundle = bundle
        self.acceptance = Acceptance(bundle.draft.prior_acceptance)
        self.draft_calibration: tuple[CostCurve, Acceptance] | None = None
        self.prefill_limit = PrefillLimit()
        self.thread_choices = get_thread_choices() if bundle.can_choose_threads else [bundle.target.n_threads]
        self.relative_step_times: dict[int, float] = {}
        self.curve: CostCurve | None = None
        self._costs: CostModel | None = None  # of the last sequence
        self._calibration_file: CalibrationFile | None = None  # if there is a draft
        self.thread_tuner: ThreadTuner | None = None

    @property
    def is_too_fast_for_lookup(self) -> bool:
        """Whether a pass of the target is so short that looking up drafts takes too much of the time."""
        return self.curve is not None and self.curve.pass_seconds[1] <= MIN_LOOKUP_PASS_S

    @property
    def thread_summary(self) -> str:
        """A text with the number of threads in use, its speed relative to other numbers in the trial, and the machine's cores."""
        n, times = self.bundle.target.n_threads, self.relative_step_times
        others = [
            f"{seconds / times[n]:.2g} times as fast as {other}" for other, seconds in times.items() if n in times and other != n
        ]
        comparison = f" ({' and '.join(others)} here)" if others else ""
        return f"{n} thread{'s' * (n != 1)}{comparison}; {get_topology().description}"

    def make_cost_model(self, settings: SpeculativeSettings, is_batch: bool) -> CostModel | None:
        """Return a cost model for a scheduler; None for a single sequence whose drafts are not adaptive or have no known costs.

        For a scheduler of several sequences the costs are measured now if they are not known.

        Args:
            settings: The settings of speculative decoding.
            is_batch: Whether the scheduler runs several sequences in a pass.
        """
        if is_batch:
            return CostModel(self.curve or measure(self.bundle.target.new_cache(), None, self.bundle.draft.vocabulary))
        return CostModel(self.curve, self._costs) if self.curve and settings.is_adaptive else None

    @property
    def step_costs(self) -> list[float]:
        """The time of a step by its number of draft tokens, relative to a step without a draft; empty if it is not measured."""
        if not (curve := self.curve):
            return []
        return [(curve.pass_seconds[n + 1] + n * curve.draft_token) / curve.pass_seconds[1] for n in range(MAX_BATCH_TOKENS)]

    @property
    def guess_cost(self) -> float:
        """The time of a drafted token, relative to a step without a draft; 0 if it is not measured."""
        return self.curve.draft_token / self.curve.pass_seconds[1] if self.curve else 0.0

    @property
    def is_draft_profitable(self) -> bool:
        """Whether some draft length is faster than no draft, at the acceptance rate of earlier sequences or a usual one."""
        expected_tokens, rate = 0.0, self.acceptance.mean
        for n, cost in enumerate(self.step_costs):
            expected_tokens += rate**n
            if n and expected_tokens > cost:
                return True
        return False

    def save_costs(self, costs: CostModel) -> None:
        """Keep corrected costs for later sequences, and write curve and acceptance to the calibration file, if there is one.

        Args:
            costs: The cost model of the sequences that have run.
        """
        self._costs = costs
        if self._calibration_file:
            self._calibration_file.write(costs.curve, self.acceptance)

    def measure(self, time_generation: Callable[[int], float], step_seconds: float) -> None:
        """Choose and set the number of threads, then find the costs of passes and drafts.

        Threads are tried only if there are several numbers to choose from and steps are short; a `ThreadTuner` then adapts the
        number in later steps. It also makes the first trial if steps are long.
        Costs are found only if there is a draft. They are measured, unless those in the calibration file suffice.

        Args:
            time_generation: A function that generates the given number of tokens and returns the seconds that it took.
            step_seconds: Time of a step.
        """
        if len(self.thread_choices) > 1:
            if is_slow := step_seconds > MAX_TRIAL_STEP_S:
                Executor([])(0, 0, 0, 1)  # loads the code of a single thread
            else:
                self.relative_step_times = choose_threads(self._set_n_threads, self.thread_choices, time_generation)
            n_threads = self.bundle.target.n_threads
            self.thread_tuner = ThreadTuner(self.thread_choices, n_threads, self._set_n_threads, is_untried=is_slow)
        if not self.bundle.draft.is_empty:
            self._calibrate()
        self.draft_calibration = self.bundle.measure_draft()

    def _calibrate(self) -> None:
        """Read the costs and the acceptance that earlier processes have stored, measure the costs again, and keep the lower ones.

        The minimum is right since other programs only ever add time. A slow target is measured once, so that later first tokens
        come sooner.
        """
        draft = self.bundle.draft
        models = [self.bundle.target, *([draft.model] if draft.model else [])]
        self._calibration_file = CalibrationFile(models, "" if draft.model else LOOKUP)
        if stored := self._calibration_file.read():
            self.curve, self.acceptance = stored
            if self.curve.pass_seconds[1] > SLOW_PASS_S:
                return
        caches = self.bundle.new_caches()
        measured = measure(caches.target, caches.draft, draft.vocabulary, bool(stored))
        self.curve = self.curve.merge(measured) if self.curve else measured

    def _set_n_threads(self, n_threads: int) -> None:
        for model in self.bundle.models.values():
            model.n_threads = n_threads
