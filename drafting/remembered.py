"""What is known of a team on this machine, from one process to the next: what passes take, and how often proposals stand.

A small file beside the machine code, by the models' weights, the machine's instructions and the number of threads. One that is
damaged, or of numbers that cannot be, counts as none.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress

from ..architectures import Weights
from ..kernels import MAX_TOKENS
from ..machine.cache import folder, keep, kept
from ..machine.vectors import CPU_FEATURES
from ..transformer import Transformer
from .estimates import BUCKETS, NO_EXPERTS, Acceptance, Costs, Experts

ENDING = ".known"
LEAST_STEPS = 8  # of a text that is worth a file
LEAST_SECONDS = 10.0  # between two files of one process
MOST_FILES = 100
SAMPLES = 64  # numbers of a matrix that tell it from another one
MOST = 1e6  # seconds, or proposals


class Remembered:
    """The file of a team. models: the target first; draft: who drafts, where it is none of them."""

    def __init__(self, models: Sequence[Transformer], draft: str) -> None:
        self._target, self._has_model = models[0], len(models) > 1
        parts = [(stamp(model.weights), repr(model.config), model.kv, model.n_threads) for model in models]
        name = hashlib.sha256(repr((parts, draft, CPU_FEATURES, os.cpu_count())).encode()).hexdigest()[:24]
        self._path = os.path.join(folder(), name + ENDING) if folder() else ""
        self._written = -math.inf

    def read(self, acceptance: Acceptance) -> Costs | None:
        """What passes took, or None; `acceptance` begins with how often proposals stood."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            known = json.loads(kept(self._path))
            passes, draft = _numbers(known["passes"], MAX_TOKENS + 1), _numbers(known["draft"], 3)
            stood, seen = (_numbers(known[name], BUCKETS + 1) for name in ("stood", "seen"))
            experts = NO_EXPERTS
            if of := self._target.config.experts:
                seconds, repeats = _numbers(known["experts"], 2)
                experts = Experts(of.n, of.n_chosen, seconds, min(repeats, 1.0), lambda: self._target.experts_read[0])
            if min(*passes, *seen) > 0 and (draft[0] > 0) == self._has_model and all(map(float.__le__, stood, seen)):
                acceptance.begin_with(stood, seen)
                costs = Costs(dict(enumerate(passes)), draft[0], draft[1], experts)
                costs.credit, costs.is_new = draft[2], False
                return costs
        return None

    def write(self, costs: Costs, acceptance: Acceptance) -> None:
        """Keep what a text has shown, if there is room and the last time is some seconds ago."""
        if not self._path or time.monotonic() < self._written + LEAST_SECONDS:
            return
        self._written = time.monotonic()
        known = {
            "passes": costs.curve,
            "draft": [costs.draft, costs.start, max(costs.credit, 0.0)],
            "stood": acceptance.stood,
            "seen": acceptance.seen,
            "experts": [costs.experts.seconds, costs.experts.repeats] if self._target.config.experts else None,
        }
        with suppress(OSError):
            keep(self._path, json.dumps(known).encode())
            files = sorted(
                (entry for entry in os.scandir(os.path.dirname(self._path)) if entry.name.endswith(ENDING)),
                key=lambda entry: entry.stat().st_mtime,
            )
            for entry in files[:-MOST_FILES]:
                os.unlink(entry.path)


def stamp(weights: Weights) -> str:
    """Tells a model's weights from another's: by some numbers of each matrix and vector."""
    digest = hashlib.sha256()
    arrays = {name: matrix.strips for name, matrix in weights.matrices.items()} | weights.vectors
    for name, array in arrays.items():
        flat = array.reshape(-1)
        digest.update(f"{name} {array.shape}".encode() + flat[:: max(1, flat.size // SAMPLES)].tobytes())
    return digest.hexdigest()


def _numbers(given: object, n: int) -> list[float]:
    """n finite numbers that are none below 0. Raises ValueError and TypeError."""
    found = [float(each) for each in given] if isinstance(given, list) else []
    if len(found) != n or not all(0 <= each < MOST for each in found):
        raise ValueError("other numbers")
    return found
