"""Sampling: turns logits into probabilities and draws tokens. A token is a pure function of (logits, `Sampling`, position).

The random noise is computed, never consumed from a stream: a counter-based generator keyed by (seed, stream, position, token).
So a draft token drawn with the target's noise agrees with the target as often as possible (Daliri et al. 2024, arXiv:2408.07978).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

import numpy as np

from specdec.argument_checks import check_float, check_int, shorten
from specdec.kernels import softmax
from specdec.runtime.code_cache import compiled, jitable
from specdec.runtime.elementary import log
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES, Float32, Float64, Int64, load, maximum, reduce_max, round_up, splat

# Noise streams: of the target (a draft may share it), of independent drafts, of the acceptance of their tokens; from
# FIRST_ROUND_NOISE on, two per round (`get_round_streams`).
TARGET_NOISE, DRAFT_NOISE, ACCEPT_NOISE, FIRST_ROUND_NOISE = range(4)


def get_round_streams(position: int) -> tuple[int, int]:
    """Return the numbers of the draft and the acceptance noise stream that only the round starting at this position uses."""
    return FIRST_ROUND_NOISE + 2 * position, FIRST_ROUND_NOISE + 2 * position + 1


MAX_PENALTY = 100.0
SIGNED_RANGE = -MAX_PENALTY, MAX_PENALTY, "a number from -100 to 100 (0: off)"
FLOAT_RANGES = {  # of `Sampling`: minimum, maximum and their description for errors
    "temperature": (0.0, math.inf, "0 (greedy) or a positive number"),
    "top_p": (0.0, 1.0, "a number from 0 to 1 (0 and 1: off)"),
    "min_p": (0.0, 1.0, "a number from 0 (off) to 1"),
    "repetition_penalty": (0.01, MAX_PENALTY, "a number from 0.01 to 100 (1: off)"),
    "presence_penalty": SIGNED_RANGE,
    "frequency_penalty": SIGNED_RANGE,
}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: temperature, then softmax, then top_k, then the smallest set whose mass exceeds top_p.

    Before temperature, the logits are adjusted in this order, with the sequence so far (formulas: `text.logit_processors`):
    logit_bias, repetition_penalty, frequency_penalty and presence_penalty. min_p applies to the softmax, before top_k.

    Attributes:
        temperature: Divisor of the logits; 0 is greedy.
        top_k: Number of most probable tokens that are kept; 0 is off.
        top_p: Probability mass that is kept; 0 and 1 are off.
        seed: Seed of the noise, 0 to 2^63 - 1; the same seed gives the same output.
        min_p: Tokens below this fraction of the highest probability are dropped; 0 is off.
        repetition_penalty: Above 1, tokens of the sequence become less likely, those of the prompt too; 1 is off.
        presence_penalty: Subtracted from the logit of each token that was generated; 0 is off.
        frequency_penalty: Subtracted from the logit of a generated token for each time that it was; 0 is off.
        logit_bias: Numbers added to logits, by token id.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.9
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        """Check all parameters and convert them to Python numbers."""
        values: dict[str, object] = {
            "top_k": check_int("top_k", self.top_k, 0),
            "seed": check_int("seed", self.seed, 0, 2**63 - 1),
            "logit_bias": _parse_logit_bias(self.logit_bias),
        }
        for name, limits in FLOAT_RANGES.items():
            values[name] = _check_range(name, getattr(self, name), limits)
        for name, value in values.items():  # Python's own number types: the kernels are compiled for those
            object.__setattr__(self, name, value)

    @property
    def has_logit_adjustments(self) -> bool:
        """Whether logits are adjusted before temperature or filtered by `min_p`."""
        has_penalty = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(has_penalty or self.logit_bias or self.min_p_logit_offset is not None)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The parsed logit_bias: numbers added to logits, by rising id, each id once."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @functools.cached_property
    def min_p_logit_offset(self) -> float | None:
        """Distance from the largest logit to the lowest logit that min_p keeps, as a number up to 0; None: min_p is off.

        It is equal on all machines.
        """
        if not (self.min_p and self.temperature):
            return None
        from decimal import Decimal  # its logarithm is correctly rounded

        return self.temperature * float(Decimal(self.min_p).ln())


class SamplingOverrides(TypedDict, total=False):
    """Fields of a `Sampling` to override; None leaves a field as it is."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None


def _check_range(name: str, value: object, limits: tuple[float, float, str]) -> float:
    minimum, maximum, expected = limits
    return check_float(name, value, maximum, expected, minimum)


def _parse_logit_bias(logit_bias: Any) -> tuple[tuple[int, float], ...]:
    """Return a logit_bias, a mapping or pairs, as pairs of token id and bias, checked, by rising id, each id once.

    Raises:
        TypeError: It is neither a mapping nor pairs, or holds something other than numbers.
        ValueError: A number is out of range.
    """
    try:
        pairs = [(token, bias) for token, bias in (logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias)]
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias is {shorten(logit_bias, repr)}; expected numbers by token ids") from None
    ids = [check_int("an id of logit_bias", token, 0) for token, _ in pairs]
    biases = [_check_range(f"logit_bias of {shorten(token)}", bias, SIGNED_RANGE) for token, bias in pairs]
    return tuple(sorted(dict(zip(ids, biases, strict=True)).items()))


def override_sampling(sampling: Sampling, **fields: Any) -> Sampling:
    """Return a `Sampling` with those of its fields replaced that are given and not None; return anything else unchanged."""
    changes = {name: value for name, value in fields.items() if value is not None}
    return replace(sampling, **changes) if changes and isinstance(sampling, Sampling) else sampling


class Sampler:
    """A sampler that draws tokens from logits; the noise is a function of (seed, stream, position, token).

    Attributes:
        vocab_size: Length of the probabilities.
        sampling: The sampling parameters.
        n_ids: Number of ids that can be drawn, by default all. Logits may be longer: the rest is padding.
        top_two: The best tokens of the last draw and their scores; scratch.
    """

    def __init__(self, vocab_size: int, sampling: Sampling, n_ids: int | None = None) -> None:
        """Create a sampler, and allocate its scratch arrays; see the attributes for the arguments."""
        self.vocab_size, self.sampling = vocab_size, sampling
        self.n_ids = vocab_size if n_ids is None else n_ids
        self._keys = np.empty(self.n_ids, np.uint64)
        self._top_k = min(sampling.top_k, self.n_ids)  # keeps top_k within the kernel's integer type
        self.top_two, self._candidates = ((np.empty(n, np.int64), np.empty(n)) for n in (2, N_CANDIDATES))

    def new_probs(self) -> Float32:
        """Return a new zeroed float32 array for one row of probabilities (1, V padded)."""
        return zeros(1, round_up(self.vocab_size, LANES))

    def draw(self, probs: Float32, logits: Float32, stream: int, position: int) -> int:
        """Draw a token with the noise of (stream, position), and return it, or -1 if the logits are not finite.

        Fills probs with the probabilities that the logits give.

        Args:
            probs: (1, V padded), as `new_probs` returns it.
            logits: (V,) or longer.
            stream: Number of the noise stream, such as TARGET_NOISE.
            position: Position of the token in its sequence.
        """
        return self.draw_with_margin(probs, logits, stream, position)[0]

    def draw_with_margin(self, probs: Float32, logits: Float32, stream: int, position: int) -> tuple[int, float]:
        """Return the token that `draw` returns and the margin of its score over the next best token's; fill probs too.

        The score is the noisy log p + Gumbel, or the logit at temperature 0. The token is -1 if the logits are not finite.
        """
        tokens, scores = self.top_two
        n, margin = self._draw(probs, logits, stream, position, tokens, scores)
        return (int(tokens[0]) if n else -1), margin

    def draw_candidates(self, probs: Float32, logits: Float32, stream: int, position: int) -> tuple[list[int], list[float]]:
        """Return up to N_CANDIDATES tokens by falling noisy score, and N_CANDIDATES scores; fill probs (1, V padded).

        The first token is the one that `draw` returns. The scores are those of `draw_with_margin`; they are -inf where there is
        no token. At temperature 0, tokens other than the first have a score although their probability is 0. Returns no tokens if
        the logits are not finite. The arguments are those of `draw`.
        """
        tokens, scores = self._candidates
        n, _ = self._draw(probs, logits, stream, position, tokens, scores)
        return tokens[:n].tolist(), scores.tolist()

    def _draw(
        self, probs: Float32, logits: Float32, stream: int, position: int, tokens: Int64, scores: Float64
    ) -> tuple[int, float]:
        """Call `draw` with this sampler's parameters and scratch; return its number of tokens and margin as Python numbers."""
        s, logits = self.sampling, logits[: self.n_ids]
        args = probs, logits, s.temperature, self._top_k, s.top_p, s.seed, stream, position, self._keys
        n, margin = draw(*args, tokens, scores)
        return int(n), float(margin)

    def compute_probabilities(self, probs: Float32, logits: Float32) -> None:
        """Fill probs (1, V padded) with the probabilities that logits get from this sampler's parameters."""
        s, logits = self.sampling, logits[: self.n_ids]
        compute_probabilities(probs, logits, s.temperature, self._top_k, s.top_p, self._keys)


def compile_draw() -> None:
    """Compile the functions that draw a token for a sequence, by drawing one."""
    sampler = Sampler(2, Sampling())
    sampler.draw(sampler.new_probs(), np.zeros(2, np.float32), TARGET_NOISE, 0)


N_CANDIDATES = 3  # of `Sampler.draw_candidates`
BLOCK_TOKENS = 64  # tokens that are skipped at once if none of them can matter
MIN_LARGE_VOCAB = 4096
FIRST_CUTOFF, CUTOFF_STEP, LAST_CUTOFF = 2.0**-5, 2.0**-3, 2.0**-32  # minimum probability of a candidate, attempt by attempt
GOLDEN_RATIO_64 = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, SplitMix64's step


@compiled
def mix_bits(x):
    """Return 64 well-mixed bits of 64 bits: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jitable
def make_noise_key(seed, stream, position):
    """Return the uint64 key from which the noise of all tokens at one position of a stream is computed."""
    key = mix_bits(np.uint64(seed) + GOLDEN_RATIO_64 * np.uint64(stream + 1))
    return mix_bits(key + GOLDEN_RATIO_64 * np.uint64(position + 1))


@jitable
def uniform(key, token):
    """Return a token's pseudorandom float64 in (0, 1) under the `make_noise_key` of (seed, stream, position)."""
    bits = mix_bits(key + GOLDEN_RATIO_64 * np.uint64(token + 1))
    return (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52


@jitable
def make_rank_key(prob, token):
    """Return a uint64 that sorts tokens by falling probability, then by rising id."""
    bits = np.float32(prob).view(np.uint32)
    return (np.uint64(~bits & np.uint32(0xFFFFFFFF)) << np.uint64(32)) | np.uint64(token)


NO_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)  # sorts after every `make_rank_key`


@jitable
def get_rank_key_probability(key):
    """Return the probability that a `make_rank_key` was made from."""
    return np.uint32(~(key >> np.uint64(32)) & np.uint64(0xFFFFFFFF)).view(np.float32)


@jitable
def partition(keys, first, last):
    """Move the rank keys below a pivot, the median of three, to the front of keys[first:last], as in quickselect.

    Returns:
        The index of the pivot, and the sum of the probabilities before it.
    """
    a, b, c = keys[first], keys[(first + last) // 2], keys[last - 1]
    pivot = max(min(a, b), min(max(a, b), c))
    at = first if pivot == a else (last - 1 if pivot == c else (first + last) // 2)
    keys[at] = keys[last - 1]
    boundary, mass = first, 0.0
    for i in range(first, last - 1):
        key = keys[i]
        keys[i] = keys[boundary]
        keys[boundary] = key
        if key < pivot:
            boundary += 1
            mass += get_rank_key_probability(key)
    keys[last - 1] = keys[boundary]
    keys[boundary] = pivot
    return boundary, mass


@jitable
def find_last_kept_key(keys, n, top_k, top_p):
    """Return the rank key of the last token that top_k and top_p keep, or NO_KEY if keys[:n] hold too few tokens for that.

    It ends the shortest prefix, in rank order, with top_k tokens or a mass above top_p (a quickselect). Reorders keys.
    """
    first, last, mass = np.int64(0), n, 0.0
    while first < last:
        index, mass_before = partition(keys, first, last)
        if index >= top_k or mass + mass_before > top_p:
            last = index
            continue
        mass += mass_before + get_rank_key_probability(keys[index])
        if index + 1 >= top_k or mass > top_p:
            return keys[index]
        first = index + 1
    return NO_KEY


@jitable
def find_max(x, first, last):
    """Return the largest of the flat x[first:last], including the lanes that fill up its last vector; NaN is ignored."""
    top = splat(-np.inf)
    for i in range(first, last, LANES):
        top = maximum(load(x, i), top)
    return reduce_max(top)


@jitable
def collect_rank_keys(keys, probs, n, cutoff):
    """Write the `make_rank_key` of each token with probs[0, :n] >= cutoff to the front of keys, and return their number."""
    m = np.int64(0)  # a literal 0 would compile the callers' other functions twice
    for first in range(0, n, BLOCK_TOKENS):
        last = min(first + BLOCK_TOKENS, n)
        if find_max(probs, first, last) < cutoff:
            continue
        for token in range(first, last):
            if probs[0, token] >= cutoff:
                keys[m] = make_rank_key(probs[0, token], token)
                m += 1
    return m


@jitable
def find_set_end_key(keys, probs, n, top_k, top_p, cutoff):
    """Return the `find_last_kept_key` among the tokens with a probability of at least `cutoff`; overwrites keys.

    In a large vocabulary it tries the likeliest tokens alone first, and takes more only if those do not suffice.
    """
    trial_cutoff = np.float32(FIRST_CUTOFF if n > MIN_LARGE_VOCAB else 0.0)
    while trial_cutoff > cutoff and trial_cutoff > np.float32(LAST_CUTOFF):
        m = collect_rank_keys(keys, probs, n, trial_cutoff)
        end = find_last_kept_key(keys, m, top_k, top_p)
        if end != NO_KEY:
            return end
        trial_cutoff *= np.float32(CUTOFF_STEP)
    m = collect_rank_keys(keys, probs, n, cutoff)
    return find_last_kept_key(keys, m, top_k, top_p)


@jitable
def argmax(x):
    """Return the first index of the largest element of x (V,), or -1 if an element is NaN or the largest is not finite."""
    n, n_nans = x.size, 0
    whole = n // LANES * LANES
    top = np.float32(-np.inf)
    if whole:
        top = find_max(x, np.int64(0), whole)
    for i in range(whole, n):
        top = max(top, x[i])
    for i in range(n):
        n_nans += x[i] != x[i]
    if n_nans or not np.isfinite(top):
        return -1
    index = 0
    while x[index] != top:
        index += 1
    return index


@compiled
def compute_probabilities(probs, logits, temperature, top_k, top_p, keys):
    """Fill probs (1, V padded) from logits (V,): temperature, softmax, top_k, then the smallest set heavier than top_p.

    top_p refers to the mass of the full softmax. The kept probabilities are scaled to sum 1. Temperature 0 keeps only the most
    likely token; top_k 0 and a top_p of 0 or 1 keep every token. `keys` is scratch of V uint64. All are NaN if a logit is NaN or
    the largest is not finite.
    """
    n = logits.size
    if temperature == 0.0:
        best = argmax(logits)
        probs[0] = 0.0 if best >= 0 else np.nan
        probs[0, best] += 1.0
        return
    for token in range(n):
        probs[0, token] = logits[token]
    zero = np.int64(0)  # a literal would compile softmax once more
    scale = np.float32(max(1e-45, min(1.0 / temperature, 3e38)))  # 0 times the padding's infinity is NaN
    softmax(probs, zero, zero, n, scale, np.float32(-np.inf))
    limit_k = top_k if 0 < top_k < n else n
    limit_p = top_p if 0.0 < top_p < 1.0 else np.inf
    if (limit_k == n and limit_p == np.inf) or np.isnan(probs[0, 0]):
        return
    # n - 1 tokens below this do not sum to 1 - top_p, so none of them is in the set (run.c does the same)
    cutoff = np.float32((1.0 - limit_p) / (n - 1)) if limit_p < np.inf and n > 1 else np.float32(0.0)
    if find_max(probs, zero, n) < cutoff:  # all are below it, but the most likely token is always in the set
        cutoff = np.float32(0.0)
    end = find_set_end_key(keys, probs, n, limit_k, limit_p, cutoff)
    m = collect_rank_keys(keys, probs, n, max(cutoff, get_rank_key_probability(end)))  # by rising id again
    total = 0.0
    for i in range(m):
        total += get_rank_key_probability(keys[i]) if keys[i] <= end else 0.0
    probs[0] = 0.0
    for i in range(m):
        if keys[i] <= end:
            probs[0, keys[i] & np.uint64(0xFFFFFFFF)] = np.float32(get_rank_key_probability(keys[i]) / total)


@jitable
def can_win(probs, first, last, key, best):
    """Return whether a token from first to last (exclusive) may get a time of at most `best` in `draw_gumbel_top_k`.

    It has no branches, so LLVM vectorizes it.
    """
    n = np.int64(0)
    for token in range(first, last):
        n += 1.0 - uniform(key, token) <= best * np.float64(probs[0, token])
    return n > 0


@jitable
def insert_candidate(tokens, scores, token, score):
    """Insert a token and its score into the arrays of the best so far, sorted by falling score, and drop the last entry."""
    index = scores.size - 1
    while index > 0 and scores[index - 1] < score:
        scores[index], tokens[index] = scores[index - 1], tokens[index - 1]
        index -= 1
    scores[index], tokens[index] = score, token


@compiled
def draw_gumbel_top_k(probs, n, seed, stream, position, tokens, scores):
    """Draw tokens from probs[0, :n] in turn without replacement, as many as tokens and scores (k,) have entries.

    The first token has a probability proportional to its prob: argmin E / p for exponential E, which is argmax log p + Gumbel,
    its score. Unused scores are -inf. E = -log u is at least 1 - u, which saves the logarithm of tokens that cannot enter. Ties
    go to the lower id. Returns the margin of the first over the last.
    """
    key, last_index, slowest = make_noise_key(seed, stream, position), scores.size - 1, np.inf
    scores[:] = -np.inf  # holds negative times until all tokens are drawn
    for first in range(0, n, BLOCK_TOKENS):
        last = min(first + BLOCK_TOKENS, n)
        if find_max(probs, first, last) <= 0.0:
            continue
        looks_full = probs[0, first] > 0.0 and probs[0, last - 1] > 0.0
        if looks_full and not can_win(probs, first, last, key, slowest):
            continue
        for token in range(first, last):
            p = np.float64(probs[0, token])
            if p > 0.0:
                u = uniform(key, token)
                if 1.0 - u <= slowest * p:
                    time = -log(u) / p
                    if time < slowest:
                        insert_candidate(tokens, scores, token, -time)
                        slowest = -scores[last_index]
    margin = log(scores[last_index] / scores[0])
    for i in range(scores.size):
        scores[i] = -log(-scores[i])
    return margin


@compiled
def find_top_k(x, tokens, scores):
    """Fill tokens and scores (k,) with the indices and values of the k largest elements of x (V,); ties by rising index."""
    n, last_index = x.size, scores.size - 1
    scores[:] = -np.inf
    for first in range(0, n, BLOCK_TOKENS):
        last = min(first + BLOCK_TOKENS, n)
        if last < n and find_max(x, first, last) <= scores[last_index]:  # find_max reads whole vectors
            continue
        for index in range(first, last):
            if x[index] > scores[last_index]:
                insert_candidate(tokens, scores, index, np.float64(x[index]))


@compiled
def draw(probs, logits, temperature, top_k, top_p, seed, stream, position, keys, tokens, scores):
    """Fill probs from logits, and tokens and scores (k,), int64 and float64, with the k best under the noise, the best first.

    The noise is that of (seed, stream, position); see `compute_probabilities` and `draw_gumbel_top_k`. At temperature 0 the best
    are the largest logits.

    Returns:
        The number of tokens, 0 if nothing can be drawn, and the margin of the first over the last.
    """
    compute_probabilities(probs, logits, temperature, top_k, top_p, keys)
    if np.isnan(probs[0, 0]):
        return 0, 0.0
    if temperature == 0.0:
        find_top_k(logits, tokens, scores)
        margin = scores[0] - scores[-1]
    else:
        margin = draw_gumbel_top_k(probs, logits.size, seed, stream, position, tokens, scores)
    n = 0
    while n < scores.size and scores[n] > -np.inf:
        n += 1
    return n, margin


@compiled
def draw_residual(p, q, n, weight, seed, stream, position, best):
    """Draw a token from the residual max(0, weight p - q), which overwrites p (1, V padded); return -1 if p is NaN.

    best: Tokens and scores, scratch of `draw_gumbel_top_k`.
    """
    tokens, scores = best
    if np.isnan(p[0, 0]):
        return np.int64(-1)
    weight = np.float32(weight)
    total = 0.0
    for i in range(n):
        total += max(np.float32(0.0), weight * p[0, i] - q[0, i])
    if total > 0.0:  # if rounding leaves no residual, p and q are the same distribution, although p may be 0 where q is not
        for i in range(n):
            p[0, i] = max(np.float32(0.0), weight * p[0, i] - q[0, i])
    draw_gumbel_top_k(p, n, seed, stream, position, tokens, scores)
    return tokens[0] if scores[0] > -np.inf else np.int64(-1)


@compiled
def accept_or_resample(p, q, n, token, seed, streams, position, best):
    """Return the draft token `token` if it is accepted, else a token drawn from the residual max(0, p - q).

    Rejection sampling (Leviathan et al. 2023, section 2.3). The draft token is accepted with probability min(1, p / q). The
    residual never contains the draft token, so it was accepted exactly if it is returned. Overwrites p (1, V padded). Returns -1
    if p is NaN. best: See `draw_residual`.
    """
    accept_stream, target_stream = streams
    if uniform(make_noise_key(seed, accept_stream, position), token) * q[0, token] < p[0, token]:
        return np.int64(token)
    return draw_residual(p, q, n, 1.0, seed, target_stream, position, best)


@compiled
def accept_or_reject(p, q, n, token, sibling, seed, stream, position):
    """Return whether a draft token is accepted that may be followed by siblings drawn from q without replacement.

    `sibling` is the next of them. Multi-round rejection (SpecInfer, arXiv:2305.09781; without replacement: arXiv:2402.14160). If
    the token is rejected, p and q (1, V padded) become the distributions for the next sibling: the residual max(0, p - q), and q
    without the token, each of sum 1. If q holds no other token, the sibling was not drawn and gets probability 1. Never accepts
    if p is NaN.
    """
    if uniform(make_noise_key(seed, stream, position), token) * q[0, token] < p[0, token]:
        return True
    p_total, q_total = 0.0, 0.0
    for i in range(n):
        p_total += max(np.float32(0.0), p[0, i] - q[0, i])
        q_total += np.float64(q[0, i]) if i != token else 0.0
    if p_total > 0.0:  # else p and q are the same distribution except for rounding
        for i in range(n):
            p[0, i] = np.float32(max(np.float32(0.0), p[0, i] - q[0, i]) / p_total)
    q[0, token] = 0.0
    if q_total > 0.0:
        for i in range(n):
            q[0, i] = np.float32(q[0, i] / q_total)
    else:
        q[0, sibling] = 1.0
    return False


@compiled
def compute_block_acceptance(p, q, n, token, weight):
    """Return the acceptance probability h_i and the weight p_(i+1) of block verification (Sun et al. 2024, Algorithm 2).

    weight is p_i; p and q (1, V padded) are the target's and the draft's probabilities after i draft tokens; token is draft token
    i + 1. If p is NaN the block ends, and h has its value at the end of a whole block: p_i.
    """
    if np.isnan(p[0, token]):
        return weight, 0.0
    w = np.float32(weight)
    residual = 0.0
    for i in range(n):
        residual += max(np.float32(0.0), w * p[0, i] - q[0, i])
    rest = residual + (1.0 - weight)
    probability = residual / rest if rest > 0.0 else 1.0  # nothing can be rejected any more
    ratio = weight * p[0, token]
    if ratio < q[0, token]:
        return probability, ratio / q[0, token]
    return probability, 1.0 if ratio > 0.0 else 0.0


@compiled
def draw_bernoulli(probability, seed, stream, position):
    """Return True with the given probability, else False, by the noise of (seed, stream, position)."""
    return uniform(make_noise_key(seed, stream, position), np.int64(0)) < probability
