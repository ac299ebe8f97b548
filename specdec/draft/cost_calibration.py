"""Measurement of the cost of target and draft passes on this machine, and a file that stores it with the draft's acceptance.

The file lies next to the compiled machine code. Its name depends on the weights, the CPU features and the number of threads. A
file that is damaged or contains impossible numbers counts as missing.
"""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from specdec.draft.acceptance import MAX_EARLIER_ACCEPTED, N_BUCKETS, Acceptance
from specdec.draft.cost_curves import MIN_SECONDS, NO_EXPERTS, CostCurve, ExpertCosts
from specdec.draft.settings import FIXED_GAMMA
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.weights import Weights
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.runtime.code_cache import CALIBRATION_SUFFIX, get_store
from specdec.runtime.matmul_tile import MAX_TILE_TOKENS
from specdec.runtime.simd import CPU_FEATURES
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary

# Passes over these numbers of tokens are timed in turns, for about FIRST_BUDGET_S if the result is stored, RECHECK_BUDGET_S if an
# earlier process has stored one, and else MEASURE_BUDGET_S. For a slow target only the first two are timed, twice if one turn
# takes less than SLOW_ROUND_S. The time of a pass rises by a step with every further tile.
MEASURED_TOKENS = (MAX_TILE_TOKENS, 1, MAX_TILE_TOKENS + 1, 2, 4, 6, 2 * MAX_TILE_TOKENS, 4 * MAX_TILE_TOKENS)
FIRST_BUDGET_S, MEASURE_BUDGET_S, RECHECK_BUDGET_S, SLOW_ROUND_S = 0.2, 0.05, 0.01, 0.1
MIN_JOBS = 4  # jobs that run within SLOW_ROUND_S even if the budget is less
# Keys of other timed passes: over equal tokens; the draft's first token of a round, and the next one; one token of the target
# after a draft, which has evicted a part of the weights from the caches
EQUAL_TOKENS_KEY, FIRST_DRAFT_KEY, NEXT_DRAFT_KEY, AFTER_DRAFT_KEY = -1, -2, -3, -4
MIN_EXPERT_DIFFERENCE = 0.25  # between two passes from which the cost of experts is computed, relative to those of one token
TOKEN_STRIDE = 7919  # a prime, so that token ids lie far apart

MAX_STORED_BYTES = 500_000  # of about a hundred files
SAVE_INTERVAL_S = 10.0
SAMPLES_PER_ARRAY = 64  # numbers of a matrix that enter the fingerprint
MAX_VALUE = 1e6  # of any number in a file


def measure(target: KVCache, draft: KVCache | None, vocabulary: SharedVocabulary, budget: float = MEASURE_BUDGET_S) -> CostCurve:
    """Run and time passes of the target and the draft in turns, and return the minimum times as a `CostCurve`.

    Each pass includes the sampling of a token. The contents of the KV caches are overwritten.

    Args:
        target: A cache of the target.
        draft: A cache of the draft model; None if the target drafts without a model.
        vocabulary: The token ids that target and draft share.
        budget: Seconds to spend; the needed passes run in any case.
    """
    sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
    probs, n_read = sampler.new_probs(), dict[int, float]()  # experts that a layer read
    # locked in one order everywhere, so that no two threads wait for each other
    caches = [target] if not draft else [draft, target]
    models = [cache.model for cache in caches]
    models = models if draft and draft.model.is_head else sorted(models, key=id)

    def seconds(key: int, cache: KVCache, tokens: list[int]) -> float:
        with ExitStack() as locks:
            for each in models:
                locks.enter_context(each.lock)
            if cache.model.is_head:  # a head drafts after a pass of its target over the same sequence
                target.forward([0], 0)
                if len(tokens) > cache.model.n_positions or not cache.can_draft([0, 0]):  # its proposals are empty
                    return 0.0
            elif draft and cache is target and key != 1 and not draft.model.is_head:
                for _ in range(FIXED_GAMMA):
                    draft.forward(tokens[:1], 1)
            begin = time.perf_counter()
            logits = cache.forward(tokens, len(tokens) if cache is target else 1)
            sampler.draw(probs, logits[0], TARGET_NOISE, len(tokens))  # each generated token takes a draw
            elapsed = time.perf_counter() - begin
            n_read[key] = cache.model.experts_read[0]
            return elapsed

    tokens = [i * TOKEN_STRIDE % vocabulary.n_common for i in range(max(MEASURED_TOKENS))]
    passes: dict[int, tuple[KVCache, list[int]]] = {
        n: (target, tokens[:n]) for n in MEASURED_TOKENS if n <= target.model.n_positions
    }
    needed: dict[int, tuple[KVCache, list[int]]] = {n: passes.pop(n) for n in MEASURED_TOKENS[:2] if n in passes}
    if target.model.config.experts and MAX_TILE_TOKENS in needed:
        needed[EQUAL_TOKENS_KEY] = target, tokens[:1] * MAX_TILE_TOKENS
    if draft:
        # As in a round, the draft's first token comes after a pass of the target, which has evicted the draft from the caches. A
        # head computes its first token from that pass, and the next from its own output.
        n_first, n_next = (2, 3) if draft.model.is_head else (1, 1)
        needed |= {
            FIRST_DRAFT_KEY: (draft, tokens[:n_first]),
            NEXT_DRAFT_KEY: (draft, tokens[:n_next]),
            AFTER_DRAFT_KEY: (target, tokens[:1]),
        }
    least = _measure_min_seconds(needed | passes, len(needed), budget, seconds)
    token, first, after_draft = (least.pop(key, 0.0) for key in (NEXT_DRAFT_KEY, FIRST_DRAFT_KEY, AFTER_DRAFT_KEY))
    experts = _fit_expert_costs(target.model, least, n_read)
    curve = {
        n: max(elapsed - experts.compute_extra_seconds(n_read[n]), MIN_SECONDS)
        for n, elapsed in least.items()
        if n != EQUAL_TOKENS_KEY
    }
    return CostCurve(curve, token, max(0.0, first - token), experts, max(0.0, after_draft - least.get(1, after_draft)))


def _measure_min_seconds(
    jobs: Mapping[int, tuple[KVCache, list[int]]],
    n_needed: int,
    budget: float,
    seconds: Callable[[int, KVCache, list[int]], float],
) -> dict[int, float]:
    """Run the jobs in turns until the time is over, and return the minimum seconds of each job that ran, by key.

    Args:
        jobs: For each key, a cache and the tokens to run on it.
        n_needed: The number of jobs, the first ones, that run in any case.
        budget: Seconds to spend.
        seconds: Runs a job and returns its time.
    """
    least: dict[int, float] = {}
    begin = time.perf_counter()
    for turn in itertools.count(1):
        for i, (key, job) in enumerate(jobs.items()):
            elapsed = time.perf_counter() - begin
            if i < n_needed or elapsed < (budget if i >= MIN_JOBS else max(budget, SLOW_ROUND_S)):
                least[key] = min(least.get(key, math.inf), seconds(key, *job))
        if time.perf_counter() > begin + (budget if turn > 1 else SLOW_ROUND_S):
            break
    return least


def _fit_expert_costs(target: Model, least: Mapping[int, float], n_read: Mapping[int, float]) -> ExpertCosts:
    """Compute the extra costs of a mixture of experts from passes over equal and over different tokens.

    Args:
        target: The target; a model without experts gives NO_EXPERTS.
        least: The minimum seconds of each pass, by key.
        n_read: The number of experts that a layer read in each pass, by key.
    """
    if EQUAL_TOKENS_KEY not in least or not target.config.experts:
        return NO_EXPERTS
    n, n_used = target.config.experts.n_experts, target.config.experts.n_experts_used
    more, fewer = n_read[MAX_TILE_TOKENS] / n_used, n_read[EQUAL_TOKENS_KEY] / n_used
    seconds = (least[MAX_TILE_TOKENS] - least[EQUAL_TOKENS_KEY]) / (more - fewer) if more > fewer + MIN_EXPERT_DIFFERENCE else 0.0
    experts = ExpertCosts(n, n_used, min(max(seconds, 0.0), least[MAX_TILE_TOKENS] / more), 0.0)
    experts.repeat_probability = experts.solve_repeat_probability(MAX_TILE_TOKENS, n_read[MAX_TILE_TOKENS])
    return experts.copy()


class CalibrationFile:
    """A file that stores the costs and the acceptance of a target and its draft on this machine between processes.

    Args:
        models: The target, and the draft model if there is one.
        draft: The name of a drafter without a model ("lookup"); "" if the draft is one of the models.
    """

    def __init__(self, models: Sequence[Model], draft: str) -> None:
        """Find the file's path from the models, the draft and this machine; nothing is read yet."""
        self._target, self._has_draft = models[0], len(models) > 1
        parts = [(fingerprint_weights(model.weights), repr(model.config), model.kv, model.n_threads) for model in models]
        name = hashlib.sha256(repr((parts, draft, CPU_FEATURES, os.cpu_count())).encode()).hexdigest()[:24]
        self._store, self._name = get_store(), name + CALIBRATION_SUFFIX
        self._last_saved = -math.inf

    def read(self) -> tuple[CostCurve, Acceptance] | None:
        """Return the stored costs and the draft's acceptance, or None if the file is missing or not valid."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            known = json.loads(bytes((self._store and self._store.read(self._name)) or b""))
            passes, (token, start, n_accepted) = (
                _parse_numbers(known["passes"], MAX_BATCH_TOKENS + 1),
                _parse_numbers(known["draft"], 3),
            )
            [eviction] = _parse_numbers(known["eviction"], 1)
            *by_bucket, mean = _parse_numbers(known["rates"], N_BUCKETS + 1)
            experts = NO_EXPERTS
            if moe := self._target.config.experts:
                seconds, repeat_probability = _parse_numbers(known["experts"], 2)
                repeat_probability = min(repeat_probability, 1.0)
                experts = ExpertCosts(moe.n_experts, moe.n_experts_used, seconds, repeat_probability)
            if min(passes[1:]) > 0 and (token > 0) == self._has_draft and max(*by_bucket, mean) <= 1:
                curve = CostCurve(dict(enumerate(passes)), token, start, experts, eviction)
                return curve, Acceptance(by_bucket, mean, n_accepted)
        return None

    def write(self, curve: CostCurve, acceptance: Acceptance) -> None:
        """Write the costs and the acceptance to the file, and delete the least recently used calibrations if there are too many.

        Nothing is written if the last write is less than SAVE_INTERVAL_S ago. Errors of the file system are ignored.
        """
        if not self._store or time.monotonic() < self._last_saved + SAVE_INTERVAL_S:
            return
        self._last_saved = time.monotonic()
        known = {
            "passes": curve.pass_seconds,
            "draft": [curve.draft_token, curve.draft_start, min(acceptance.n_accepted, MAX_EARLIER_ACCEPTED)],
            "eviction": [curve.eviction],
            "rates": [*acceptance.probabilities, acceptance.mean],
            "experts": [curve.experts.seconds, curve.experts.repeat_probability] if self._target.config.experts else None,
        }
        with suppress(OSError):
            self._store.write(self._name, json.dumps(known).encode())
            self._store.evict(MAX_STORED_BYTES)


def fingerprint_weights(weights: Weights) -> str:
    """Return a hex digest of a sample of numbers of each matrix and vector, which identifies the weights for calibration.

    If two models have the same digest, the only effect is an unsuitable draft length.
    """
    digest = hashlib.sha256()
    arrays = {name: matrix.panels for name, matrix in weights.matrices.items()} | weights.vectors
    for name, array in arrays.items():
        flat = array.reshape(-1)
        digest.update(f"{name} {array.shape}".encode() + flat[:: max(1, flat.size // SAMPLES_PER_ARRAY)].tobytes())
    return digest.hexdigest()


def _parse_numbers(given: object, n: int) -> list[float]:
    """Check that a value read from JSON is a list of n numbers from 0 to MAX_VALUE, and return them as floats.

    Raises:
        ValueError: If the value is no such list.
        TypeError: If an element is not a number.
    """
    found = [float(each) for each in given] if isinstance(given, list) else []
    if len(found) != n or not all(0 <= each < MAX_VALUE for each in found):
        raise ValueError(f"expected {n} numbers from 0 to {MAX_VALUE}")
    return found
