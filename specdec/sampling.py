"""Logits to probabilities to a token. A token is a pure function of (logits, `Sampling`, position). Knows no models.

The noise is computed, never consumed from a stream: a counter-based generator keyed by (seed, stream, position, token). So a
proposal drawn with the target's noise agrees with the target as often as it can (Daliri et al. 2024, arXiv:2408.07978).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

import numpy as np

from specdec.kernels import softmax
from specdec.runtime.code_cache import compiled, inner
from specdec.runtime.elementary import log
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES, Float32, Float64, Int64, load, maximum, reduce_max, round_up, splat
from specdec.validation import real, short, whole

# streams: shared by target and draft; a draft's own; what accepts its draws; those of rounds, two a round (`round_noise`)
TARGET_NOISE, DRAFT_NOISE, ACCEPT_NOISE, FIRST_ROUND_NOISE = range(4)


def round_noise(position: int) -> tuple[int, int]:
    """The streams, a draft's own and what accepts its draws, that no round uses but the one that begins at that position."""
    return FIRST_ROUND_NOISE + 2 * position, FIRST_ROUND_NOISE + 2 * position + 1


LEAST_REPETITION, MOST_PENALTY = 0.01, 100.0
REPETITION, SIGNED = "a number from 0.01 to 100 (1: off)", "a number from -100 to 100 (0: off)"


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: temperature, then softmax, then top_k, then the smallest set whose mass exceeds top_p.

    temperature 0 is greedy; top_k 0 and top_p 0 or 1 are off; seed is 0 to 2^63 - 1. Before that, in this order, and by what
    the text has so far (`text.adjusting` has the formulas): logit_bias, by id, is added; repetition_penalty, 1 for none, counts
    for the prompt too; frequency_penalty and presence_penalty; and of the softmax, before top_k, min_p, 0 for none.
    Raises ValueError for a value out of range, TypeError for what is no number.
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
        numbers = {
            "temperature": real("temperature", self.temperature, math.inf, "0 (greedy) or a positive number"),
            "top_k": whole("top_k", self.top_k, 0),
            "top_p": real("top_p", self.top_p, 1, "a number from 0 to 1 (0 and 1: off)"),
            "seed": whole("seed", self.seed, 0, 2**63 - 1),
            "min_p": real("min_p", self.min_p, 1, "a number from 0 (off) to 1"),
            "repetition_penalty": real("repetition_penalty", self.repetition_penalty, MOST_PENALTY, REPETITION, LEAST_REPETITION),
            "presence_penalty": real("presence_penalty", self.presence_penalty, MOST_PENALTY, SIGNED, -MOST_PENALTY),
            "frequency_penalty": real("frequency_penalty", self.frequency_penalty, MOST_PENALTY, SIGNED, -MOST_PENALTY),
            "logit_bias": _biases(self.logit_bias),
        }
        for name, number in numbers.items():  # Python's own: the kernels are compiled for those
            object.__setattr__(self, name, number)

    @property
    def adjusts(self) -> bool:
        """Whether logits are adjusted before temperature, or by `min_p`."""
        has_penalty = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(has_penalty or self.logit_bias or self.least_log is not None)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """What is added to logits, by rising id, each once: what logit_bias has become."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @functools.cached_property
    def least_log(self) -> float | None:
        """By how much a logit may be less than the largest, as a number up to 0; None for any. The same on all machines."""
        if not (self.min_p and self.temperature):
            return None
        from decimal import Decimal  # whose logarithm is rounded correctly

        return self.temperature * float(Decimal(self.min_p).ln())


class Drawn(TypedDict, total=False):
    """The fields of a `Sampling`, of which None leaves one as it is."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """What is added to logits, by rising id, each once."""
    try:
        pairs = [(token, bias) for token, bias in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias is {short(given, repr)}; expected numbers by token ids") from None
    ids = [whole("an id of logit_bias", token, 0) for token, _ in pairs]
    biases = [real(f"logit_bias of {short(token)}", bias, MOST_PENALTY, SIGNED, -MOST_PENALTY) for token, bias in pairs]
    return tuple(sorted(dict(zip(ids, biases, strict=True)).items()))


def sampling_with(sampling: Sampling, **fields: Any) -> Sampling:
    """That sampling, but for the fields that are not None. What is no sampling stays what it is."""
    given = {name: value for name, value in fields.items() if value is not None}
    return replace(sampling, **given) if given and isinstance(sampling, Sampling) else sampling


class Sampler:
    """Draws tokens from logits; the noise is a function of (seed, stream, position, token), so nothing is consumed.

    vocab_size: of the probabilities; n_ids: how many of its ids are drawn, by default all. Logits may be more: padding.
    """

    def __init__(self, vocab_size: int, sampling: Sampling, n_ids: int | None = None) -> None:
        self.vocab_size, self.sampling = vocab_size, sampling
        self.n_ids = vocab_size if n_ids is None else n_ids
        self._keys = np.empty(self.n_ids, np.uint64)
        self._top_k = min(sampling.top_k, self.n_ids)  # a compiled function takes no larger integer
        self._two, self._few = ((np.empty(n, np.int64), np.empty(n)) for n in (2, FEW))

    def new_probs(self) -> Float32:
        """Room for one row of probabilities, (1, V padded)."""
        return zeros(1, round_up(self.vocab_size, LANES))

    def draw(self, probs: Float32, logits: Float32, stream: int, position: int) -> int:
        """The token of that noise, -1 where the logits are not finite; fills probs (1, V padded) from them."""
        return self.draw_surely(probs, logits, stream, position)[0]

    def draw_surely(self, probs: Float32, logits: Float32, stream: int, position: int) -> tuple[int, float]:
        """`draw`, and by how much its noisy score log p + Gumbel, or its logit where there is no noise, exceeds the next one."""
        tokens, scores = self._two
        n, margin = self._draw(probs, logits, stream, position, tokens, scores)
        return (int(tokens[0]) if n else -1), margin

    def draw_few(self, probs: Float32, logits: Float32, stream: int, position: int) -> tuple[list[int], list[float]]:
        """Up to FEW tokens, the best noisy score first, which is `draw`'s, and FEW scores, -inf where there is no token.

        Scores are those whose margin `draw_surely` tells. Without noise other tokens have a score too, though no probability.
        None where the logits are not finite; fills probs (1, V padded).
        """
        tokens, scores = self._few
        n, _ = self._draw(probs, logits, stream, position, tokens, scores)
        return tokens[:n].tolist(), scores.tolist()

    def _draw(
        self, probs: Float32, logits: Float32, stream: int, position: int, tokens: Int64, scores: Float64
    ) -> tuple[int, float]:
        s, logits = self.sampling, logits[: self.n_ids]
        args = probs, logits, s.temperature, self._top_k, s.top_p, s.seed, stream, position, self._keys
        n, margin = draw(*args, tokens, scores)
        return int(n), float(margin)

    def probabilities(self, probs: Float32, logits: Float32) -> None:
        """Fill probs (1, V padded) from logits."""
        s, logits = self.sampling, logits[: self.n_ids]
        probabilities(probs, logits, s.temperature, self._top_k, s.top_p, self._keys)


def draw_once() -> None:
    """Compile what every text draws its tokens by."""
    sampler = Sampler(2, Sampling())
    sampler.draw(sampler.new_probs(), np.zeros(2, np.float32), TARGET_NOISE, 0)


FEW = 3  # candidates of `Sampler.draw_few`
BLOCK = 64  # tokens that are passed over at once, where none of them can matter
MANY_TOKENS = 4096
FIRST_CUTOFF, CUTOFF_STEP, LAST_CUTOFF = 2.0**-5, 2.0**-3, 2.0**-32  # how likely a token must be to be looked at, try by try
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, SplitMix64's step


@compiled
def mix_bits(x):
    """The finalizer of SplitMix64 (Steele et al. 2014): 64 bits in, 64 well-mixed bits out."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inner
def noise_key(seed, stream, position):
    """What the noise of one position's tokens is computed from."""
    key = mix_bits(np.uint64(seed) + GOLDEN * np.uint64(stream + 1))
    return mix_bits(key + GOLDEN * np.uint64(position + 1))


@inner
def uniform(key, token):
    """A float64 in (0, 1) for (seed, stream, position) and token: computed, not drawn from a stream."""
    bits = mix_bits(key + GOLDEN * np.uint64(token + 1))
    return (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52


@inner
def rank_key(prob, token):
    """An integer that sorts tokens by falling probability, then by rising id."""
    bits = np.float32(prob).view(np.uint32)
    return (np.uint64(~bits & np.uint32(0xFFFFFFFF)) << np.uint64(32)) | np.uint64(token)


NO_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)  # behind every `rank_key`


@inner
def rank_key_probability(key):
    """The probability that went into a `rank_key`."""
    return np.uint32(~(key >> np.uint64(32)) & np.uint64(0xFFFFFFFF)).view(np.float32)


@inner
def partition(keys, first, last):
    """Move what is below a median of three to the front of keys[first:last]; returns the median's place and its sum in front.

    The sum is of the probabilities before that place.
    """
    a, b, c = keys[first], keys[(first + last) // 2], keys[last - 1]
    pivot = max(min(a, b), min(max(a, b), c))
    at = first if pivot == a else (last - 1 if pivot == c else (first + last) // 2)
    keys[at] = keys[last - 1]
    place, mass = first, 0.0
    for i in range(first, last - 1):
        key = keys[i]
        keys[i] = keys[place]
        keys[place] = key
        if key < pivot:
            place += 1
            mass += rank_key_probability(key)
    keys[last - 1] = keys[place]
    keys[place] = pivot
    return place, mass


@inner
def last_kept(keys, n, top_k, top_p):
    """The key that ends the shortest prefix, in rank order, of top_k tokens or a mass above top_p: a weighted quickselect."""
    first, last, mass = np.int64(0), n, 0.0
    while first < last:
        place, in_front = partition(keys, first, last)
        if place >= top_k or mass + in_front > top_p:
            last = place
            continue
        mass += in_front + rank_key_probability(keys[place])
        if place + 1 >= top_k or mass > top_p:
            return keys[place]
        first = place + 1
    return NO_KEY


@inner
def largest(x, first, last):
    """The largest of x[first:last], flat, and of what fills up its last vector; NaN counts as nothing."""
    top = splat(-np.inf)
    for i in range(first, last, LANES):
        top = maximum(load(x, i), top)
    return reduce_max(top)


@inner
def rank_keys(keys, probs, n, cutoff):
    """The `rank_key`s of the tokens whose probs[0, :n] reach the cutoff, in front of keys; how many there are."""
    m = np.int64(0)  # a literal 0 would have the callers' other functions compiled twice
    for first in range(0, n, BLOCK):
        last = min(first + BLOCK, n)
        if largest(probs, first, last) < cutoff:
            continue
        for token in range(first, last):
            if probs[0, token] >= cutoff:
                keys[m] = rank_key(probs[0, token], token)
                m += 1
    return m


@inner
def last_of_set(keys, probs, n, top_k, top_p, cutoff):
    """`last_kept` of the tokens that reach the cutoff: of the likeliest alone, where those suffice and others are many."""
    tried = np.float32(FIRST_CUTOFF if n > MANY_TOKENS else 0.0)
    while tried > cutoff and tried > np.float32(LAST_CUTOFF):
        m = rank_keys(keys, probs, n, tried)
        end = last_kept(keys, m, top_k, top_p)
        if end != NO_KEY:
            return end
        tried *= np.float32(CUTOFF_STEP)
    m = rank_keys(keys, probs, n, cutoff)
    return last_kept(keys, m, top_k, top_p)


@inner
def argmax(x):
    """The first place of the largest of x (V,), or -1 where one is NaN or the largest is not finite."""
    n, n_nans = x.size, 0
    whole = n // LANES * LANES
    top = np.float32(-np.inf)
    if whole:
        top = largest(x, np.int64(0), whole)
    for i in range(whole, n):
        top = max(top, x[i])
    for i in range(n):
        n_nans += x[i] != x[i]
    if n_nans or not np.isfinite(top):
        return -1
    place = 0
    while x[place] != top:
        place += 1
    return place


@compiled
def probabilities(probs, logits, temperature, top_k, top_p, keys):
    """probs (1, V padded) from logits (V,): temperature, softmax, the top_k, of those the smallest set heavier than top_p.

    The mass that top_p speaks of is the softmax's. What is left is scaled to sum 1. Temperature 0 leaves the most likely
    token alone; top_k 0 and a top_p of 0 or 1 keep every token. `keys` is scratch of V uint64. All are NaN where a logit is, or
    where the largest is not finite.
    """
    n = logits.size
    if temperature == 0.0:
        best = argmax(logits)
        probs[0] = 0.0 if best >= 0 else np.nan
        probs[0, best] += 1.0
        return
    for token in range(n):
        probs[0, token] = logits[token]
    zero = np.int64(0)  # a literal would have softmax compiled once more
    scale = np.float32(max(1e-45, min(1.0 / temperature, 3e38)))  # 0 times the padding's infinity is NaN
    softmax(probs, zero, zero, n, scale, np.float32(-np.inf))
    limit_k = top_k if 0 < top_k < n else n
    limit_p = top_p if 0.0 < top_p < 1.0 else np.inf
    if (limit_k == n and limit_p == np.inf) or np.isnan(probs[0, 0]):
        return
    # n - 1 tokens below this would not weigh 1 - top_p together, so none of them is in the set (run.c does the same)
    cutoff = np.float32((1.0 - limit_p) / (n - 1)) if limit_p < np.inf and n > 1 else np.float32(0.0)
    if largest(probs, zero, n) < cutoff:  # unless all are below it: the most likely token is always in the set
        cutoff = np.float32(0.0)
    end = last_of_set(keys, probs, n, limit_k, limit_p, cutoff)
    m = rank_keys(keys, probs, n, max(cutoff, rank_key_probability(end)))  # by rising id again
    total = 0.0
    for i in range(m):
        total += rank_key_probability(keys[i]) if keys[i] <= end else 0.0
    probs[0] = 0.0
    for i in range(m):
        if keys[i] <= end:
            probs[0, keys[i] & np.uint64(0xFFFFFFFF)] = np.float32(rank_key_probability(keys[i]) / total)


@inner
def may_win(probs, first, last, key, best):
    """Whether a token from first to last may take less time than that in `race`: no branches, so that LLVM takes vectors."""
    n = np.int64(0)
    for token in range(first, last):
        n += 1.0 - uniform(key, token) <= best * np.float64(probs[0, token])
    return n > 0


@inner
def insert(tokens, scores, token, score):
    """Take a token in among the best of so far, whose scores fall, in the place of the last."""
    place = scores.size - 1
    while place > 0 and scores[place - 1] < score:
        scores[place], tokens[place] = scores[place - 1], tokens[place - 1]
        place -= 1
    scores[place], tokens[place] = score, token


@compiled
def race(probs, n, seed, stream, position, tokens, scores):
    """Tokens that are drawn from probs[0, :n] in turn, none twice, as many as tokens and scores (k,) have room for.

    The first has a probability proportional to its prob: argmin E / p for exponential E, that is argmax log p + Gumbel, which
    its score is; behind the last one scores are -inf. E = -log u is at least 1 - u, which spares the logarithm of tokens that
    come in behind the last. Ties go to the lower id. Returns the margin of the first to the last.
    """
    key, last_in, slowest = noise_key(seed, stream, position), scores.size - 1, np.inf
    scores[:] = -np.inf  # of time, until all are in
    for first in range(0, n, BLOCK):
        last = min(first + BLOCK, n)
        if largest(probs, first, last) <= 0.0:
            continue
        looks_full = probs[0, first] > 0.0 and probs[0, last - 1] > 0.0
        if looks_full and not may_win(probs, first, last, key, slowest):
            continue
        for token in range(first, last):
            p = np.float64(probs[0, token])
            if p > 0.0:
                u = uniform(key, token)
                if 1.0 - u <= slowest * p:
                    time = -log(u) / p
                    if time < slowest:
                        insert(tokens, scores, token, -time)
                        slowest = -scores[last_in]
    margin = log(scores[last_in] / scores[0])
    for i in range(scores.size):
        scores[i] = -log(-scores[i])
    return margin


@inner
def largest_of(x, tokens, scores):
    """The places of the largest of x (V,), as many as tokens and scores have room for, and their values; ties by rising place."""
    n, last_in = x.size, scores.size - 1
    scores[:] = -np.inf
    for first in range(0, n, BLOCK):
        last = min(first + BLOCK, n)
        if last < n and largest(x, first, last) <= scores[last_in]:  # it reads whole vectors
            continue
        for place in range(first, last):
            if x[place] > scores[last_in]:
                insert(tokens, scores, place, np.float64(x[place]))


@compiled
def draw(probs, logits, temperature, top_k, top_p, seed, stream, position, keys, tokens, scores):
    """Fill probs from logits (see `probabilities`), and tokens, scores (k,) int64, float64: the k best under the noise of (seed,
    stream, position), the best first; see `race`.

    At temperature 0 those of the largest logits. How many there are, 0 where nothing can be drawn, and the margin of the first to
    the last.
    """
    probabilities(probs, logits, temperature, top_k, top_p, keys)
    if np.isnan(probs[0, 0]):
        return 0, 0.0
    if temperature == 0.0:
        largest_of(logits, tokens, scores)
        margin = scores[0] - scores[-1]
    else:
        margin = race(probs, logits.size, seed, stream, position, tokens, scores)
    n = 0
    while n < scores.size and scores[n] > -np.inf:
        n += 1
    return n, margin


@compiled
def redraw(p, q, n, weight, seed, stream, position):
    """A token from the residual max(0, weight p - q), which is left in p (1, V padded). -1 where p is NaN."""
    if np.isnan(p[0, 0]):
        return np.int64(-1)
    weight = np.float32(weight)
    total = 0.0
    for i in range(n):
        total += max(np.float32(0.0), weight * p[0, i] - q[0, i])
    if total > 0.0:  # where rounding leaves no residual, p and q are one distribution; p may yet be 0 where q is not
        for i in range(n):
            p[0, i] = max(np.float32(0.0), weight * p[0, i] - q[0, i])
    tokens, scores = np.empty(1, np.int64), np.empty(1)
    race(p, n, seed, stream, position, tokens, scores)
    return tokens[0] if scores[0] > -np.inf else np.int64(-1)


@compiled
def keep_or_redraw(p, q, n, token, seed, accept_stream, target_stream, position):
    """The target's token where the draft proposed `token`: rejection sampling (Leviathan et al. 2023, section 2.3).

    The proposal is kept with probability min(1, p / q); else the token comes from the residual max(0, p - q), which never
    holds the proposal: it was accepted exactly if it is what this returns. p (1, V padded) is overwritten. -1 where p is NaN.
    """
    if uniform(noise_key(seed, accept_stream, position), token) * q[0, token] < p[0, token]:
        return np.int64(token)
    return redraw(p, q, n, 1.0, seed, target_stream, position)


@compiled
def keep_or_refuse(p, q, n, token, sibling, seed, stream, position):
    """Whether a proposal stands that siblings follow, the next of them `sibling`; drawn without replacement from q, in turn.

    Multi-round rejection (SpecInfer, arXiv:2305.09781; without replacement: arXiv:2402.14160): where it does not stand, p and q
    (1, V padded) become what the next one is judged by, the residual max(0, p - q) and q without the token, each of sum 1. Where
    q holds no other token the sibling was not drawn, and comes with certainty. Never where p is NaN.
    """
    if uniform(noise_key(seed, stream, position), token) * q[0, token] < p[0, token]:
        return True
    p_left, q_left = 0.0, 0.0
    for i in range(n):
        p_left += max(np.float32(0.0), p[0, i] - q[0, i])
        q_left += np.float64(q[0, i]) if i != token else 0.0
    if p_left > 0.0:  # else p and q are one distribution but for rounding
        for i in range(n):
            p[0, i] = np.float32(max(np.float32(0.0), p[0, i] - q[0, i]) / p_left)
    q[0, token] = 0.0
    if q_left > 0.0:
        for i in range(n):
            q[0, i] = np.float32(q[0, i] / q_left)
    else:
        q[0, sibling] = 1.0
    return False


@compiled
def weigh_prefix(p, q, n, token, weight):
    """h_i and p_(i+1) of Sun et al. 2024, Algorithm 2, from weight = p_i, the target's p and the draft's q behind i proposals.

    p, q: (1, V padded); token: the proposal i + 1. Where p is NaN the block ends, and h is what it is of a whole one: p_i.
    """
    if np.isnan(p[0, token]):
        return weight, 0.0
    w = np.float32(weight)
    residual = 0.0
    for i in range(n):
        residual += max(np.float32(0.0), w * p[0, i] - q[0, i])
    left_over = residual + (1.0 - weight)
    odds = residual / left_over if left_over > 0.0 else 1.0  # nothing can be refused any more
    ratio = weight * p[0, token]
    if ratio < q[0, token]:
        return odds, ratio / q[0, token]
    return odds, 1.0 if ratio > 0.0 else 0.0


@compiled
def happens(odds, seed, stream, position):
    """Whether a thing of these odds does, by the noise of a stream at a position."""
    return uniform(noise_key(seed, stream, position), np.int64(0)) < odds
