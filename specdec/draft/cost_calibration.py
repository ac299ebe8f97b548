"""Measurement of the cost of target and draft passes on this machine, and a file that stores it with the draft's acceptance.

Costs are measured in turns for 9 tokens, too, where a second tile begins: without it, stories6M reached 0.93 of the speed of the
best fixed length, with it 0.95 to 0.975.

The file lies next to the compiled machine code. Its name depends on the weights, the CPU features and the number of threads. A
file that is damaged or contains impossible numbers counts as missing.
"""

import hashlib
import json
import math
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from specdec.draft.acceptance import N_BUCKETS, Acceptance
from specdec.draft.draft_length import CostCurve, FixedLength
from specdec.draft.model_drafters import ModelDrafter
from specdec.draft.settings import FIXED_GAMMA
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.weights import Weights
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.runtime.code_cache import CALIBRATION_SUFFIX, get_store
from specdec.runtime.simd import CPU_FEATURES, MAX_TILE_TOKENS
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary

# Passes over these numbers of tokens are timed in turns. The time of a pass rises by a step with every further tile, and hardly
# up to the number of tokens whose products take as long as reading the weights. So a line from 1 to 8 tokens is wrong: with
# passes over 2 and 4 tokens, short drafts for a slow target are made where they pay (Qwen2.5 1.5B with AVX2: 1.2 times as fast).
MEASURED_TOKENS = (MAX_TILE_TOKENS, 1, 2, 4, MAX_TILE_TOKENS + 1, 6, 2 * MAX_TILE_TOKENS, 4 * MAX_TILE_TOKENS)
MEASURE_BUDGET_S, N_NEEDED = 0.2, 4  # seconds, and how many of these numbers are measured in any case
RECHECK_BUDGET_S = 0.01  # seconds if the costs were measured before
DRAFT = 0  # instead of a number of tokens: drafting FIXED_GAMMA tokens
# A prime, so that token ids lie far apart. Every fourth is the one before it: tokens of a text share experts of a mixture too.
TOKEN_STRIDE = 7919

MAX_STORED_BYTES = 500_000  # of about a hundred files
SAVE_INTERVAL_S = 10.0
SAMPLES_PER_ARRAY = 64  # numbers of a matrix that enter the fingerprint
MAX_VALUE, N_OTHERS = 1e6, 2 + N_BUCKETS  # of any number in a file, and how many of them follow the seconds of passes


def measure(target: KVCache, draft: KVCache | None, vocabulary: SharedVocabulary, is_recheck: bool = False) -> CostCurve:
    """Run and time passes of the target and the draft in turns, and return the minimum times as a `CostCurve`.

    Each pass includes the sampling of a token. The contents of the KV caches are overwritten.

    Args:
        target: A cache of the target.
        draft: A cache of the draft model; None if the target drafts without a model.
        vocabulary: The token ids that target and draft share.
        is_recheck: Whether the costs were measured before. Fewer passes suffice then: the first of `MEASURED_TOKENS`, and one of
            the next, by chance, so that a wrong time is mended by some later start.
    """
    sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
    probs = sampler.new_probs()
    reads_target = draft is not None and bool(draft.model.target_layers)
    drafter = draft and ModelDrafter(draft, sampler, lambda _: TARGET_NOISE, ())
    # locked in one order everywhere, so that no two threads wait for each other
    models = [cache.model for cache in ([draft, target] if draft else [target])]
    models = models if reads_target else sorted(models, key=id)
    tokens = [i * 3 // 4 * TOKEN_STRIDE % vocabulary.n_common for i in range(max(MEASURED_TOKENS))]

    def propose() -> None:
        if drafter:
            policy = FixedLength(FIXED_GAMMA)
            policy.start(FIXED_GAMMA)
            drafter.propose([0, 0] if reads_target else tokens[:1], policy)

    def time_pass(n: int) -> float:
        with ExitStack() as locks:
            for each in models:
                locks.enter_context(each.lock)
            if n == DRAFT and reads_target:  # it drafts after a pass of its target over the same sequence
                target.forward([0], 0)
            elif n > 1 and not reads_target:
                propose()
            begin = time.perf_counter()
            if n == DRAFT:
                propose()
            else:
                for row in target.forward(tokens[:n], n):
                    sampler.draw(probs, row, TARGET_NOISE, n)
            return time.perf_counter() - begin

    first, *others = MEASURED_TOKENS[:N_NEEDED]
    budget = RECHECK_BUDGET_S if is_recheck else MEASURE_BUDGET_S
    needed = [first, *([random.choice(others)] if is_recheck else others), *([DRAFT] if draft else [])]
    jobs = [n for n in dict.fromkeys((*needed, *MEASURED_TOKENS)) if n <= target.model.n_positions]
    least, end, turn = dict[int, float](), time.perf_counter() + budget, 0
    while not turn or time.perf_counter() < end:
        for n in jobs:
            if (not turn and n in needed) or time.perf_counter() < end:
                least[n] = min(least.get(n, math.inf), time_pass(n))
        turn += 1
    token = least.pop(DRAFT, 0.0) / FIXED_GAMMA
    return CostCurve(least, token)


class CalibrationFile:
    """A file that stores the costs and the acceptance of a target and its draft on this machine between processes.

    Args:
        models: The target, and the draft model if there is one.
        draft: The name of a drafter without a model ("lookup"); "" if the draft is one of the models.
    """

    def __init__(self, models: Sequence[Model], draft: str) -> None:
        """Find the file's path from the models, the draft and this machine; nothing is read yet."""
        self._has_draft = len(models) > 1
        parts = [(fingerprint_weights(model.weights), repr(model.config), model.kv, model.n_threads) for model in models]
        name = hashlib.sha256(repr((parts, draft, CPU_FEATURES, os.cpu_count())).encode()).hexdigest()[:24]
        self._store, self._name = get_store(), name + CALIBRATION_SUFFIX
        self._last_saved = -math.inf

    def read(self) -> tuple[CostCurve, Acceptance] | None:
        """Return the stored costs and the draft's acceptance, or None if the file is missing or not valid."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            numbers = [float(each) for each in json.loads(bytes((self._store and self._store.read(self._name)) or b""))]
            passes, rates = numbers[:-N_OTHERS], numbers[-N_BUCKETS:]
            token, mean = numbers[-N_OTHERS:-N_BUCKETS]
            is_valid = all(0 <= each < MAX_VALUE for each in numbers) and max(mean, *rates) <= 1 and min(passes[1:]) > 0
            if is_valid and len(passes) == MAX_BATCH_TOKENS + 1 and (token > 0) == self._has_draft:
                return CostCurve(dict(enumerate(passes)), token), Acceptance(rates, mean)
        return None

    def write(self, curve: CostCurve, acceptance: Acceptance) -> None:
        """Write the costs and the acceptance to the file, and delete the least recently used calibrations if there are too many.

        Nothing is written if the last write is less than SAVE_INTERVAL_S ago. Errors of the file system are ignored.
        """
        if not self._store or time.monotonic() < self._last_saved + SAVE_INTERVAL_S:
            return
        self._last_saved = time.monotonic()
        numbers = [*curve.pass_seconds, curve.draft_token, acceptance.mean, *acceptance.rates[:-1]]
        with suppress(OSError):
            self._store.write(self._name, json.dumps(numbers).encode())
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
