"""Measures what passes of a target and its draft cost on this machine, and keeps that and the draft's acceptance in a file.

The file lies beside the machine code and is named after the weights, the machine's instructions and the number of threads. A file
that is damaged, or holds numbers that cannot be, counts as missing.
"""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from specdec.draft.acceptance import MAX_EARLIER, N_BUCKETS, Acceptance
from specdec.draft.costs import MIN_SECONDS, NO_EXPERTS, CostCurve, ExpertCosts
from specdec.draft.settings import FIXED_GAMMA
from specdec.heads.head import Head
from specdec.kernels import MAX_TOKENS
from specdec.layers.base import Weights
from specdec.model.transformer import Transformer
from specdec.runtime.code_cache import folder, keep, kept
from specdec.runtime.simd import CPU_FEATURES
from specdec.runtime.tile import TILE_TOKENS
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.text.vocabulary import Vocabulary

# Numbers of tokens whose passes are timed, in turns, for about MEASURE_SECONDS, or RECHECK_SECONDS where an earlier process has
# measured them; of a slow target only the first two, twice if one turn takes less than SLOW_SECONDS. A pass that needs another
# tile costs a step more.
MEASURED_TOKENS = (TILE_TOKENS, 1, TILE_TOKENS + 1, 2, 4, 6, 2 * TILE_TOKENS, 4 * TILE_TOKENS)
MEASURE_SECONDS, RECHECK_SECONDS, SLOW_SECONDS = 0.05, 0.01, 0.1
# Keys of passes that are timed besides: over equal tokens; the draft's first token of a round, and its next; one token of the
# target behind a draft, which has evicted a part of the weights from the caches
EQUAL_TOKENS, FIRST, NEXT, AFTER_DRAFT = -1, -2, -3, -4
MIN_DIFFERENCE = 0.25  # of two passes, in experts of one token, to tell what experts cost
TOKEN_STRIDE = 7919  # a prime, so that token ids lie far apart

SUFFIX = ".known"
MAX_FILES = 100
SAVE_INTERVAL_S = 10.0
SAMPLES = 64  # numbers of a matrix that its stamp looks at
MAX_VALUE = 1e6  # of any number in a file


def measure(target: Transformer, draft: Transformer | None, vocabulary: Vocabulary, budget: float = MEASURE_SECONDS) -> CostCurve:
    """Time passes of the target and tokens of the draft, with a draw, in turns; the least of several counts."""
    sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
    probs, n_read = sampler.new_probs(), dict[int, float]()  # experts that a layer read
    # locked in one order everywhere, so that no two threads wait for each other
    models = [target] if not draft else [draft, target] if isinstance(draft, Head) else sorted([target, draft], key=id)

    def seconds(key: int, model: Transformer, tokens: list[int]) -> float:
        with ExitStack() as locks:
            for each in models:
                locks.enter_context(each.lock)
            if isinstance(model, Head):  # it drafts behind a pass of its target, which another sequence may have had
                model.target.forward([0], 0)
                if len(tokens) > model.n_positions or not model.drafts_for([0, 0]):  # its proposals are empty
                    return 0.0
            elif draft and model is target and key != 1 and not isinstance(draft, Head):
                for _ in range(FIXED_GAMMA):
                    draft.forward(tokens[:1], 1)
            begin = time.perf_counter()
            logits = model.forward(tokens, len(tokens) if model is target else 1)
            sampler.draw(probs, logits[0], TARGET_NOISE, len(tokens))  # one is drawn for each token that is written
            taken = time.perf_counter() - begin
            n_read[key] = model.experts_read[0]
            return taken

    tokens = [i * TOKEN_STRIDE % vocabulary.n_common for i in range(max(MEASURED_TOKENS))]
    passes: dict[int, tuple[Transformer, list[int]]] = {
        n: (target, tokens[:n]) for n in MEASURED_TOKENS if n <= target.n_positions
    }
    needed: dict[int, tuple[Transformer, list[int]]] = {n: passes.pop(n) for n in MEASURED_TOKENS[:2] if n in passes}
    if target.config.experts and TILE_TOKENS in needed:
        needed[EQUAL_TOKENS] = target, tokens[:1] * TILE_TOKENS
    if draft:
        # As in a round, the draft's first token comes behind a pass of the target, which has evicted it from the caches; a head's
        # first comes from that pass, its next from itself.
        n_first, n_next = (2, 3) if isinstance(draft, Head) else (1, 1)
        needed |= {FIRST: (draft, tokens[:n_first]), NEXT: (draft, tokens[:n_next]), AFTER_DRAFT: (target, tokens[:1])}
    least = _least(needed | passes, max(4, len(needed)), budget, seconds)
    token, first, after_draft = (least.pop(key, 0.0) for key in (NEXT, FIRST, AFTER_DRAFT))
    experts = _expert_costs(target, least, n_read)
    curve = {n: max(taken - experts.extra_of(n_read[n]), MIN_SECONDS) for n, taken in least.items() if n != EQUAL_TOKENS}
    return CostCurve(curve, token, max(0.0, first - token), experts, max(0.0, after_draft - least.get(1, after_draft)))


def _least(
    jobs: Mapping[int, tuple[Transformer, list[int]]],
    n_needed: int,
    budget: float,
    seconds: Callable[[int, Transformer, list[int]], float],
) -> dict[int, float]:
    """Return the least seconds of each job for which there was time, and of the first n_needed ones at least."""
    least: dict[int, float] = {}
    begin = time.perf_counter()
    for turn in itertools.count(1):
        for i, (key, job) in enumerate(jobs.items()):
            if i < n_needed or time.perf_counter() < begin + budget:
                least[key] = min(least.get(key, math.inf), seconds(key, *job))
        if time.perf_counter() > begin + (budget if turn > 1 else SLOW_SECONDS):
            break
    return least


def _expert_costs(target: Transformer, least: Mapping[int, float], n_read: Mapping[int, float]) -> ExpertCosts:
    """Return what experts cost, from two passes over as many tokens that choose more and fewer of them."""
    if EQUAL_TOKENS not in least or not target.config.experts:
        return NO_EXPERTS
    n, n_chosen = target.config.experts.n, target.config.experts.n_chosen
    more, fewer = n_read[TILE_TOKENS] / n_chosen, n_read[EQUAL_TOKENS] / n_chosen
    each = (least[TILE_TOKENS] - least[EQUAL_TOKENS]) / (more - fewer) if more > fewer + MIN_DIFFERENCE else 0.0
    experts = ExpertCosts(n, n_chosen, min(max(each, 0.0), least[TILE_TOKENS] / more), 0.0, lambda: target.experts_read[0])
    experts.repeats = experts.repeats_of(TILE_TOKENS, n_read[TILE_TOKENS])
    return experts.copy()


class CalibrationFile:
    """What is known of a target and its draft on this machine, kept from one process to the next.

    Args:
        models: The target first.
        draft: The name of the drafter, where it is none of the models.
    """

    def __init__(self, models: Sequence[Transformer], draft: str) -> None:
        self._target, self._has_draft = models[0], len(models) > 1
        parts = [(sampled_stamp(model.weights), repr(model.config), model.kv, model.n_threads) for model in models]
        name = hashlib.sha256(repr((parts, draft, CPU_FEATURES, os.cpu_count())).encode()).hexdigest()[:24]
        self._path = os.path.join(folder(), name + SUFFIX) if folder() else ""
        self._saved = -math.inf

    def read(self) -> tuple[CostCurve, Acceptance] | None:
        """Return the costs and the draft's acceptance, or None."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            known = json.loads(kept(self._path))
            passes, (token, start, n_accepted) = _numbers(known["passes"], MAX_TOKENS + 1), _numbers(known["draft"], 3)
            [eviction] = _numbers(known["eviction"], 1)
            *rates, mean = _numbers(known["rates"], N_BUCKETS + 1)
            experts = NO_EXPERTS
            if of := self._target.config.experts:
                seconds, repeats = _numbers(known["experts"], 2)
                experts = ExpertCosts(of.n, of.n_chosen, seconds, min(repeats, 1.0), lambda: self._target.experts_read[0])
            if min(passes[1:]) > 0 and (token > 0) == self._has_draft and max(*rates, mean) <= 1:
                return CostCurve(dict(enumerate(passes)), token, start, experts, eviction), Acceptance(rates, mean, n_accepted)
        return None

    def write(self, curve: CostCurve, acceptance: Acceptance) -> None:
        """Keep both, if there is room and the last time is some seconds ago."""
        if not self._path or time.monotonic() < self._saved + SAVE_INTERVAL_S:
            return
        self._saved = time.monotonic()
        known = {
            "passes": curve.passes,
            "draft": [curve.draft_token, curve.draft_start, min(acceptance.n_accepted, MAX_EARLIER)],
            "eviction": [curve.eviction],
            "rates": [*acceptance.rates, acceptance.mean],
            "experts": [curve.experts.seconds, curve.experts.repeats] if self._target.config.experts else None,
        }
        with suppress(OSError):
            keep(self._path, json.dumps(known).encode())
            files = [entry for entry in os.scandir(os.path.dirname(self._path)) if entry.name.endswith(SUFFIX)]
            for entry in sorted(files, key=lambda entry: entry.stat().st_mtime)[:-MAX_FILES]:
                os.unlink(entry.path)


def sampled_stamp(weights: Weights) -> str:
    """Return a stamp of some numbers of each matrix and vector: a model mistaken for another only drafts a wrong length."""
    digest = hashlib.sha256()
    arrays = {name: matrix.strips for name, matrix in weights.matrices.items()} | weights.vectors
    for name, array in arrays.items():
        flat = array.reshape(-1)
        digest.update(f"{name} {array.shape}".encode() + flat[:: max(1, flat.size // SAMPLES)].tobytes())
    return digest.hexdigest()


def _numbers(given: object, n: int) -> list[float]:
    """Return n finite numbers >= 0.

    Raises:
        ValueError, TypeError: If there are others.
    """
    found = [float(each) for each in given] if isinstance(given, list) else []
    if len(found) != n or not all(0 <= each < MAX_VALUE for each in found):
        raise ValueError("other numbers")
    return found
