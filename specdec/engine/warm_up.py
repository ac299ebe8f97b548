"""Warm-up of a model bundle before its first sequence: compiles or loads machine code, then measures."""

from collections.abc import Callable, Iterator

from specdec.draft.settings import SpeculativeSettings
from specdec.engine.autotuner import Autotuner
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import Sequence
from specdec.events import Step
from specdec.runtime.compile_ahead import stop_processes
from specdec.runtime.memory import zeros
from specdec.sampling import Sampling
from specdec.verification import VERIFIERS, Draft, Verifier

LARGE_MODEL_BYTES = 2 << 30  # of weights; from there on a step takes longer than loading code


class WarmUp:
    """The tasks that must run once before sequences with some settings are generated at full speed.

    Trees are imported and compiled only if they are requested.

    Args:
        autotuner: The autotuner of the models.
    """

    def __init__(self, autotuner: Autotuner) -> None:
        """Create a warm-up that has done no task yet."""
        self._autotuner, self._bundle = autotuner, autotuner.bundle
        self._completed_tasks = set[str]()
        self._step_seconds = 0.0  # of the last passes

    def is_complete(self, settings: SpeculativeSettings) -> bool:
        """Return whether nothing is left to do for sequences with these settings."""
        return not self.list_pending_tasks(settings)

    def run(self, settings: SpeculativeSettings) -> None:
        """Compile or load the code that sequences with these settings need, choose threads, and measure costs, each only once."""
        while pending := self.list_pending_tasks(settings):
            name, task = pending[0]
            task()
            self._completed_tasks.add(name)

    def list_pending_tasks(self, settings: SpeculativeSettings) -> list[tuple[str, Callable[[], object]]]:
        """Return each task that is left to do for sequences with these settings, with its name, in order."""
        return [task for task in self._list_tasks(settings) if task[0] not in self._completed_tasks]

    def _list_tasks(self, settings: SpeculativeSettings) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield each task with its name, in order. One thread runs other code than several: passes are a task for each case."""
        models, verify, verifier = [*self._bundle.models.values()], settings.verify, VERIFIERS[settings.verify]
        n_ids = self._bundle.draft.vocabulary.n_target
        yield f"passes {[model.n_threads > 1 for model in models]}", lambda: self._run_passes(settings)
        if not self._bundle.draft.is_empty:
            yield verify, lambda: warm_up_verifier(verifier, n_ids)
        yield from self._bundle.list_warm_ups(settings)
        if self._bundle.can_branch(settings):
            yield f"{verify} of trees", lambda: warm_up_verifier(verifier, n_ids, [-1, -1])
        yield "measures", lambda: self._measure(settings)

    def _run_passes(self, settings: SpeculativeSettings) -> None:
        """Generate two tokens: the first step compiles or loads code, the second is timed. One is enough if steps are long."""
        n_tokens = 1 if self._bundle.target.weights.n_bytes >= LARGE_MODEL_BYTES else 2
        self._step_seconds = self._time_steps(n_tokens, settings)[-1]

    def _measure(self, settings: SpeculativeSettings) -> None:
        """Stop the compile processes, and let the autotuner measure."""
        stop_processes(self._bundle.compile_processes)
        self._autotuner.measure(lambda n_tokens: sum(self._time_steps(n_tokens, settings)), self._step_seconds)

    def _time_steps(self, max_tokens: int, settings: SpeculativeSettings) -> list[float]:
        """Generate max_tokens tokens with the settings, and return the seconds of each step, without the prefill."""
        tokens = self._bundle.tokenizer.encode("")
        if self._bundle.draft.reads_target:  # it needs two tokens: it drafts from hidden states, then from its own output
            tokens, max_tokens = (tokens * 2)[: self._bundle.target.n_positions], max_tokens + 1
        sequence = Sequence(GenerationRequest(tokens, max_tokens, Sampling()), self._bundle.tokenizer)
        scheduler = Scheduler(self._autotuner, settings, PrefixCache(self._bundle, max_idle=1))
        return [event.seconds for event in scheduler.stream(sequence) if isinstance(event, Step)]


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
