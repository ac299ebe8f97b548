"""Compiled functions that look up draft tokens for `LookupDrafter`, and learn from the target's passes.

The tokens that may follow a context come from three sources (SuffixDecoding, arXiv:2411.04975; token recycling, Luo et al. 2024,
arXiv:2408.08696; LogitSpec, arXiv:2507.01449):

- this sequence: what followed the longest earlier match, with the target's likeliest tokens there if a pass has computed them,
- the pool: what followed the longest match in earlier sequences, in the newest of several,
- runner-ups: the likeliest tokens of earlier passes, by the last two tokens of their context, else by the last one.

A runner-up is scored as the target would score it at the position where it would stand: by its logit and the noise of that
position, which is known before the pass. All results are guesses, which the target verifies. So a table may forget, and two
threads may write it at a time: at any moment it contains only tokens of the vocabulary, and each index is checked.

Shapes: R runner-ups of a position, N table entries, P tokens of the pool, S tokens of the sequence, M nodes of a proposal, C
candidates for a node.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.runtime.code_cache import compiled, jitable
from specdec.runtime.elementary import exp, log
from specdec.runtime.simd import Array, Float32, Float64, Int32, Int64, reduce_max, splat
from specdec.sampling import TARGET_NOISE, find_top_k, make_noise_key, uniform

N_RUNNER_UPS = 8  # R
TABLE_BITS = 15  # N = 2^TABLE_BITS
POOL_TOKENS, POOL_BITS = 1 << 16, 15  # P; the pool's hash table has 2^POOL_BITS entries
POOL_BLOCK_TOKENS = 64  # granularity of a sequence's beginning that is in the pool already
MIN_POOL_MATCH, MAX_POOL_MATCH, MAX_POOL_CANDIDATES = 3, 32, 16  # lengths of matches in the pool, and how many are compared
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio (Fibonacci hashing, Knuth, TAOCP 6.4)
NO_TOKEN = -1

THIS_SEQUENCE, POOL, RUNNER_UP = range(3)  # sources of a draft token
# Columns of a node of a proposal, and of a candidate. FOLLOWING is the index of the token that follows its match, and LENGTH
# its length, or 0 for none; the same for the match in the pool.
TOKEN, PARENT, SOURCE, DEPTH, FOLLOWING, LENGTH, POOL_FOLLOWING, POOL_LENGTH = range(8)
N_COLUMNS = 8
MAX_CHILDREN = 4  # of a node
N_MARGINS = 8  # buckets of the margin in nats between the best two candidates: below 1/8, 1/4, 1/2, 1, 2, 4, 8, and above
N_LENGTHS = 6  # buckets of the length of a match: 1, 2 to 3, 4 to 7, ... tokens
HIT_RATE_WINDOW = 16.0  # each observation moves a hit rate by 1 / HIT_RATE_WINDOW of the difference


class RunnerUps(NamedTuple):
    """The likeliest tokens after contexts of two tokens and of one; a context replaces another one with the same entry.

    Attributes:
        keys: The context of each entry (N,), 0 for none; see `get_entry`.
        tokens: The tokens (N, R), the likeliest first; NO_TOKEN where there are fewer.
        scores: Their logits (N, R).
    """

    keys: Int64
    tokens: Int32
    scores: Float32


class Pool(NamedTuple):
    """The tokens of earlier sequences, in a ring: token i of all that were ever added has the index i modulo P.

    Attributes:
        tokens: The tokens (P,), with NO_TOKEN between two sequences.
        newest: For each hash of MIN_POOL_MATCH tokens, i of the token that followed them last, or 0.
        previous: For each token (P,), i of the one that followed an earlier occurrence of the hash before it, or 0.
        size: The number of tokens that were ever added, (1,).
    """

    tokens: Int32
    newest: Int64
    previous: Int64
    size: Int64


class SequenceIndex(NamedTuple):
    """The tokens of a drafter's sequence, the target's runner-ups after each of them, and the hit rates of guesses in it.

    Attributes:
        tokens: The tokens (S,), with room for more.
        row_tokens: The runner-ups (S, R) of the token after each one; NO_TOKEN where no pass has computed them.
        row_scores: Their logits.
        match_rates: How often the token after a match in this sequence and in the pool is right, by the bucket of the match's
            length, (2, N_LENGTHS).
        runner_up_rates: How often a runner-up is right, by the number of unknown tokens of its context, its rank, and the bucket
            of the margin, (2, MAX_CHILDREN, N_MARGINS).
        eos_tokens: The end-of-sequence tokens.
        ranked: Scratch (R,).
        ranked_scores: Scratch (R,).
    """

    tokens: Int64
    row_tokens: Int32
    row_scores: Float32
    match_rates: Float64
    runner_up_rates: Float64
    eos_tokens: Int64
    ranked: Int64
    ranked_scores: Float64


class Noise(NamedTuple):
    """The sampling parameters of the target, and the position in the sequence of the first indexed token."""

    temperature: float
    top_p: float
    seed: int
    first_position: int


class Sources(NamedTuple):
    """The three sources of draft tokens, and the sampling parameters by which their runner-ups are scored.

    Attributes:
        sequence: The drafter's own sequence.
        runner_ups: The target's likeliest tokens after short contexts.
        pool: Tokens of earlier sequences.
        noise: Parameters that reproduce the target's noise at a position.
    """

    sequence: SequenceIndex
    runner_ups: RunnerUps
    pool: Pool
    noise: Noise


class Growth(NamedTuple):
    """The nodes of a proposal while it grows.

    Attributes:
        nodes: The unverified tokens before the proposal, then the proposal, (M, N_COLUMNS).
        numbers: For each node, the probability that it is accepted if its parent is, and the probability that it and all nodes
            above it are, (M, 2).
        candidates: Scratch (C, N_COLUMNS): nodes that could be added.
        candidate_numbers: Scratch (C, 2): the `numbers` of the candidates.
    """

    nodes: Int64
    numbers: Float64
    candidates: Int64
    candidate_numbers: Float64


@compiled
def store_runner_ups(row_tokens, row_scores, i, logits, ranked, ranked_scores):
    """Write the R likeliest tokens of logits (V,), and their logits, to row i of a `SequenceIndex`; the last two are scratch."""
    find_top_k(logits, ranked, ranked_scores)
    for j in range(N_RUNNER_UPS):
        row_tokens[i, j] = ranked[j] if ranked_scores[j] > -np.inf else NO_TOKEN
        row_scores[i, j] = ranked_scores[j]


@jitable
def get_entry(before, last):
    """Return the key of a context of two tokens, or of one if `before` is NO_TOKEN, and the index of its table entry."""
    key = (np.uint64(before + 2) << np.uint64(32)) | np.uint64(last)
    return np.int64(key), np.int64((key * HASH_FACTOR) >> np.uint64(64 - TABLE_BITS))


@jitable
def hash_tokens(first, second, third):
    """Return the index of three tokens in the pool's hash table."""
    key = (np.uint64(first) * HASH_FACTOR + np.uint64(second)) * HASH_FACTOR + np.uint64(third)
    return np.int64((key * HASH_FACTOR) >> np.uint64(64 - POOL_BITS))


@jitable
def rank_runner_ups(tokens, scores, noise, position, ranked, ranked_scores):
    """Write the runner-ups (R,) that may be drawn to `ranked` (R,), by falling score: the logit, or noisy log p with temperature.

    The noise is the target's at the position.

    Returns:
        Their number, and the margin of the first over the second in nats.
    """
    n = 0
    if noise.temperature == 0.0:
        while n < tokens.size and tokens[n] != NO_TOKEN:
            ranked[n], ranked_scores[n] = tokens[n], scores[n]
            n += 1
    else:
        total = kept = 0.0
        for i in range(tokens.size):
            ranked_scores[i] = (np.float64(scores[i]) - np.float64(scores[0])) / noise.temperature  # log p
            total += reduce_max(exp(splat(ranked_scores[i]))) if tokens[i] != NO_TOKEN else 0.0
        limit = noise.top_p * total if 0.0 < noise.top_p < 1.0 else np.inf
        key = make_noise_key(noise.seed, TARGET_NOISE, position)
        while n < tokens.size and tokens[n] != NO_TOKEN and kept <= limit:
            log_p, at = ranked_scores[n], n
            kept += reduce_max(exp(splat(log_p)))
            score = log_p - log(-log(uniform(key, np.int64(tokens[n]))))
            while at > 0 and ranked_scores[at - 1] < score:
                ranked[at], ranked_scores[at] = ranked[at - 1], ranked_scores[at - 1]
                at -= 1
            ranked[at], ranked_scores[at] = tokens[n], score
            n += 1
    return n, ranked_scores[0] - ranked_scores[1] if n > 1 else np.inf


@jitable
def get_bucket(value, limit, n_buckets):
    """Return the bucket, 0 to n_buckets - 1, of a margin or a length: 0 below the limit, 1 below twice the limit, and so on."""
    bucket = 0
    while bucket < n_buckets - 1 and value >= limit:
        bucket, limit = bucket + 1, 2 * limit
    return bucket


@jitable
def look_up_runner_ups(before, last, sources, position):
    """Rank the runner-ups that are stored for a context, as `rank_runner_ups` does, in the index's scratch arrays.

    The context is the tokens `before` and `last` if the table has them, else `last` alone.

    Returns:
        Their number, 0 for an unknown context; the bucket of the margin; and the number of unknown context tokens, 0 or 1.
    """
    index, runner_ups = sources.sequence, sources.runner_ups
    for n_unknown in range(2):
        key, entry = get_entry(before if n_unknown == 0 else NO_TOKEN, last)
        if runner_ups.keys[entry] == key and (n_unknown or before != NO_TOKEN):
            n, margin = rank_runner_ups(
                runner_ups.tokens[entry], runner_ups.scores[entry], sources.noise, position, index.ranked, index.ranked_scores
            )
            return n, get_bucket(margin, 0.125, N_MARGINS), n_unknown
    return 0, 0, 1


@jitable
def predict_match(following, index, noise, position):
    """Return the token that a match predicts: the one that followed, or with temperature the best runner-up at the position."""
    row = index.row_tokens[following - 1]
    if noise.temperature > 0.0 and row[0] != NO_TOKEN:
        rank_runner_ups(row, index.row_scores[following - 1], noise, position, index.ranked, index.ranked_scores)
        return index.ranked[0]
    return index.tokens[following]


@jitable
def get_path_token(nodes, node, n_back, tokens, n_tokens):
    """Return the token n_back tokens before a node on its path; NO_TOKEN before the sequence's first one.

    0 stands for the node's own token. The sequence precedes the path; node -1 is its last token.
    """
    while node >= 0 and n_back > 0:
        node, n_back = nodes[node, PARENT], n_back - 1
    if node >= 0:
        return nodes[node, TOKEN]
    return tokens[n_tokens - 1 - n_back] if n_back < n_tokens else NO_TOKEN


@jitable
def find_in_pool(pool, nodes, node, tokens, n_tokens):
    """Find the longest match in the pool of the tokens that end with a node (-1: with the sequence), the newest of several.

    Returns:
        The length of the match, MIN_POOL_MATCH to MAX_POOL_MATCH, and the number i of the token after it (see `Pool`); 0 and 0
        without a match.
    """
    first = get_path_token(nodes, node, 2, tokens, n_tokens)
    if first == NO_TOKEN:
        return 0, 0
    second, third = get_path_token(nodes, node, 1, tokens, n_tokens), get_path_token(nodes, node, 0, tokens, n_tokens)
    i, size, longest, following = pool.newest[hash_tokens(first, second, third)], pool.size[0], MIN_POOL_MATCH - 1, 0
    for _ in range(MAX_POOL_CANDIDATES):
        # an overwritten token ends the search, since all others are older
        if i <= MIN_POOL_MATCH or i <= size - POOL_TOKENS + MAX_POOL_MATCH or i >= size:
            break
        length, token = 0, third
        while length < MAX_POOL_MATCH and token != NO_TOKEN and pool.tokens[(i - 1 - length) % POOL_TOKENS] == token:
            length += 1
            token = get_path_token(nodes, node, length, tokens, n_tokens)
        if length > longest and pool.tokens[i % POOL_TOKENS] != NO_TOKEN:
            longest, following = length, i
        older = pool.previous[i % POOL_TOKENS]
        if older >= i:
            break
        i = older
    return (longest, following) if following else (0, 0)


@compiled
def add_to_pool(pool, tokens):
    """Append a sequence's tokens to the pool, behind a separator."""
    size = pool.size[0]
    pool.tokens[size % POOL_TOKENS], pool.previous[size % POOL_TOKENS] = NO_TOKEN, 0
    size += 1
    for j in range(tokens.size):
        slot = size % POOL_TOKENS
        pool.tokens[slot], pool.previous[slot] = tokens[j], 0
        if j >= MIN_POOL_MATCH:
            entry = hash_tokens(tokens[j - 3], tokens[j - 2], tokens[j - 1])
            pool.previous[slot], pool.newest[entry] = pool.newest[entry], size
        size += 1
    pool.size[0] = size


@jitable
def update_rate(rates, at, is_hit):
    """Move rates[at] towards 1 for a hit, or towards 0, by 1 / HIT_RATE_WINDOW of the difference."""
    rates[at] += ((1.0 if is_hit else 0.0) - rates[at]) / HIT_RATE_WINDOW


@jitable
def learn(sources, nodes, first, n_tokens, matches):
    """Update the hit rates with new tokens of a sequence, and store the runner-ups at generated ones by their context.

    Args:
        sources: The sources; `sequence` has the tokens.
        nodes: Any nodes; they are not read.
        first: Number of tokens that were learnt before.
        n_tokens: Number of tokens.
        matches: For each new token, the length of the longest match before it, and the index of the token after that.
    """
    index, runner_ups, pool, noise = sources.sequence, sources.runner_ups, sources.pool, sources.noise
    tokens = index.tokens
    for i in range(first, n_tokens):
        length, following = matches[i - first, 0], matches[i - first, 1]
        position = i + noise.first_position
        if length:
            is_hit = predict_match(following, index, noise, position) == tokens[i]
            update_rate(index.match_rates[0], get_bucket(length, 2, N_LENGTHS), is_hit)
        if i == 0 or index.row_tokens[i - 1, 0] == NO_TOKEN:  # a token of the prompt
            continue
        length, following = find_in_pool(pool, nodes, -1, tokens, i)
        if length:
            update_rate(index.match_rates[1], get_bucket(length, 2, N_LENGTHS), pool.tokens[following % POOL_TOKENS] == tokens[i])
        before, last = tokens[i - 2] if i > 1 else NO_TOKEN, tokens[i - 1]
        n, bucket, n_unknown = look_up_runner_ups(before, last, sources, position)
        for rank in range(min(n, MAX_CHILDREN)):
            update_rate(index.runner_up_rates[n_unknown, rank], bucket, index.ranked[rank] == tokens[i])
        for n_unknown in range(2):
            key, entry = get_entry(before if n_unknown == 0 else NO_TOKEN, last)
            runner_ups.keys[entry] = key
            for j in range(N_RUNNER_UPS):
                runner_ups.tokens[entry, j] = index.row_tokens[i - 1, j]
                runner_ups.scores[entry, j] = index.row_scores[i - 1, j]


@jitable
def add_candidate(growth, n, token, source, parent, matched, rate):
    """Write candidate n, a child of a node, and return n + 1.

    Args:
        growth: The candidates.
        n: Number of candidates.
        token: Its token.
        source: Its source.
        parent: Its parent.
        matched: For this sequence and the pool, the token that the match predicts, the index of the one after it, and its length.
        rate: The probability that it is accepted if its parent is.
    """
    new = growth.candidates[n]
    new[TOKEN], new[PARENT], new[SOURCE] = token, parent, source
    new[DEPTH] = growth.nodes[parent, DEPTH] + 1 if parent >= 0 else 0
    (own, following, length), (pooled, pool_following, pool_length) = matched
    new[FOLLOWING], new[LENGTH] = (following + 1, length + 1) if token == own and length else (0, 0)
    new[POOL_FOLLOWING], new[POOL_LENGTH] = (pool_following + 1, pool_length + 1) if token == pooled and pool_length else (0, 0)
    growth.candidate_numbers[n, 0] = rate
    return n + 1


@jitable
def add_children(growth, sources, n, node, n_tokens, max_children, matches):
    """Append the candidates for the children of a node, and return the number of all candidates.

    Args:
        growth: The candidates.
        sources: The sources.
        n: Number of candidates.
        node: The node; -1 for the end of the sequence.
        n_tokens: Number of tokens of the sequence.
        max_children: See `grow_proposal`.
        matches: The index of the token that follows the match at the node, and the length of the match; the same of the pool.
    """
    index, pool, noise = sources.sequence, sources.pool, sources.noise
    following, length, pool_following, pool_length = matches
    nodes, tokens = growth.nodes, index.tokens
    depth = nodes[node, DEPTH] + 1 if node >= 0 else 0
    position = noise.first_position + n_tokens + depth
    own = pooled = best = NO_TOKEN
    rate, source = 0.0, RUNNER_UP
    if length:
        if following < n_tokens:
            own = predict_match(following, index, noise, position)
        else:  # at the end of the sequence the proposal itself continues it, which repeats a loop
            own = get_path_token(nodes, node, depth - 1 - (following - n_tokens), tokens, n_tokens)
        best, rate, source = own, index.match_rates[0, get_bucket(length, 2, N_LENGTHS)], THIS_SEQUENCE
    if pool_length and pool_following < pool.size[0]:
        pooled = pool.tokens[pool_following % POOL_TOKENS]
        pool_rate = index.match_rates[1, get_bucket(pool_length, 2, N_LENGTHS)]
        if pooled != NO_TOKEN and pool_rate > rate:
            best, rate, source = pooled, pool_rate, POOL
    n_ranked, bucket, n_unknown = look_up_runner_ups(
        get_path_token(nodes, node, 1, tokens, n_tokens), get_path_token(nodes, node, 0, tokens, n_tokens), sources, position
    )
    rates, matched = (
        index.runner_up_rates[n_unknown, :, bucket],
        ((own, following, length), (pooled, pool_following, pool_length)),
    )
    first, scale = n, 1.0
    if best != NO_TOKEN and (n_ranked == 0 or rate >= rates[0]):
        n, scale = add_candidate(growth, n, best, source, node, matched, rate), 1.0 - rate
    else:
        best = NO_TOKEN
    for rank in range(min(n_ranked, MAX_CHILDREN)):
        if n - first < max_children and index.ranked[rank] != best:
            n = add_candidate(growth, n, index.ranked[rank], RUNNER_UP, node, matched, scale * rates[rank])
    survival = growth.numbers[node, 1] if node >= 0 else 1.0
    for i in range(first, n):
        growth.candidate_numbers[i, 1] = survival * growth.candidate_numbers[i, 0]
    return n


@jitable
def copy_candidate(growth, i, nodes, numbers, at):
    """Copy candidate i to row `at` of nodes and numbers, those of the proposal or of the candidates."""
    for k in range(N_COLUMNS):
        nodes[at, k] = growth.candidates[i, k]
    for k in range(growth.candidate_numbers.shape[1]):
        numbers[at, k] = growth.candidate_numbers[i, k]


@jitable
def take_best_candidate(growth, n_nodes, n, min_survival):
    """Move the likeliest of n candidates to node n_nodes, if its probability is min_survival or more; return whether it is.

    The last candidate takes the place of the one that was moved, so the caller has one candidate less.
    """
    numbers, best = growth.candidate_numbers, -1
    for i in range(n):
        if numbers[i, 1] >= min_survival and (best < 0 or numbers[i, 1] > numbers[best, 1]):
            best = i
    if best < 0:
        return False
    copy_candidate(growth, best, growth.nodes, growth.numbers, n_nodes)
    copy_candidate(growth, n - 1, growth.candidates, numbers, best)
    return True


@jitable
def grow_proposal(growth, sources, n_tail, max_nodes, max_children, min_survival, n_tokens, match):
    """Grow a proposal best first: each new node is the likeliest of all candidates for one.

    Args:
        growth: The nodes; the first n_tail of them are the unverified tokens after the sequence, as a chain.
        sources: The sources.
        n_tail: See `growth`.
        max_nodes: Most nodes of the proposal.
        max_children: 1 for a chain, up to MAX_CHILDREN for a tree.
        min_survival: Minimum probability of a node.
        n_tokens: Number of tokens of the sequence.
        match: Length of the longest match of sequence and tail, and the index of the token after it.

    Returns:
        The number of nodes without the tail.
    """
    nodes, n_nodes, n, node = growth.nodes, n_tail, 0, n_tail - 1
    if n_tail:
        growth.numbers[node, 1] = 1.0
    pool_length, pool_following = find_in_pool(sources.pool, nodes, node, sources.sequence.tokens, n_tokens)
    matches = np.int64(match[1]), np.int64(match[0]), np.int64(pool_following), np.int64(pool_length)
    while n_nodes - n_tail < max_nodes:
        if node >= -1:
            n = add_children(growth, sources, n, node, n_tokens, max_children, matches)
        if not take_best_candidate(growth, n_nodes, n, min_survival):
            break
        n, node, n_nodes = n - 1, n_nodes, n_nodes + 1
        matches = nodes[node, FOLLOWING], nodes[node, LENGTH], nodes[node, POOL_FOLLOWING], nodes[node, POOL_LENGTH]
        for i in range(sources.sequence.eos_tokens.size):
            if nodes[node, TOKEN] == sources.sequence.eos_tokens[i]:
                node = -2  # without children
                break
    return n_nodes - n_tail


@compiled
def look_up(matches, first, n_tokens, n_tail, max_nodes, max_children, min_survival, *fields):
    """Learn from the new tokens of a sequence, then grow a proposal.

    Args:
        matches: See `learn`; the last row is the match of sequence and tail.
        first: See `learn`.
        n_tokens: Number of tokens of the sequence.
        n_tail: See `grow_proposal`.
        max_nodes: See `grow_proposal`.
        max_children: See `grow_proposal`.
        min_survival: See `grow_proposal`.
        *fields: The fields of `Growth`, `SequenceIndex`, `RunnerUps`, `Pool` and `Noise`; numba unpacks records slowly.

    Returns:
        The number of nodes of the proposal.
    """
    growth, index = Growth(*fields[:4]), SequenceIndex(*fields[4:12])
    sources = Sources(index, RunnerUps(*fields[12:15]), Pool(*fields[15:19]), Noise(*fields[19:23]))
    learn(sources, growth.nodes, first, n_tokens, matches)
    match = matches[-1, 0], matches[-1, 1]
    return grow_proposal(growth, sources, n_tail, max_nodes, max_children, min_survival, n_tokens, match)


class LookupMemory:
    """A memory of 4.5 MB for looked-up drafts: the tokens of earlier sequences of one client, and the runner-ups of their passes.

    Attributes:
        runner_ups: The runner-ups by context.
        pool: The tokens.
    """

    def __init__(self) -> None:
        """Create an empty memory."""
        n = 1 << TABLE_BITS
        self.runner_ups = RunnerUps(
            np.zeros(n, np.int64), np.zeros((n, N_RUNNER_UPS), np.int32), np.zeros((n, N_RUNNER_UPS), np.float32)
        )
        self.pool = Pool(
            np.zeros(POOL_TOKENS, np.int32),
            np.zeros(1 << POOL_BITS, np.int64),
            np.zeros(POOL_TOKENS, np.int64),
            np.zeros(1, np.int64),
        )
        self._prefixes: dict[int, None] = {}  # hashes of the prefixes, of whole blocks, that are in the pool; the oldest first

    def copy_arrays(self) -> list[Array]:
        """Return copies of all arrays of the memory, in the order in which `restore` takes them."""
        prefixes = np.zeros(POOL_TOKENS // POOL_BLOCK_TOKENS, np.int64)
        known = [*self._prefixes][-len(prefixes) :]
        prefixes[: len(known)] = known
        return [prefixes, *(array.copy() for array in (*self.runner_ups, *self.pool))]

    def restore(self, arrays: Sequence[Array], n_ids: int) -> bool:
        """Replace the contents by arrays of another memory, unless these have tokens other than 0 to n_ids - 1.

        Args:
            arrays: The arrays, as `copy_arrays` returns them.
            n_ids: Number of token ids.

        Returns:
            Whether the contents were replaced.
        """
        prefixes, *others = arrays
        if not all(NO_TOKEN <= array.min() <= array.max() < n_ids for array in others if array.dtype == np.int32):
            return False
        own: list[Array] = [*self.runner_ups, *self.pool]
        for kept, array in zip(own, others, strict=True):
            kept[...] = array
        self._prefixes = dict.fromkeys(prefixes[prefixes != 0].tolist())
        return True

    def add(self, tokens: list[int]) -> None:
        """Add the tokens of an ended sequence to the pool: at most the last P / 2, and none of a prefix that is there already.

        Prefixes are recognized in whole blocks of POOL_BLOCK_TOKENS.
        """
        n_known, prefix = 0, 0
        for end in range(POOL_BLOCK_TOKENS, len(tokens) + 1, POOL_BLOCK_TOKENS):
            prefix = hash((prefix, *tokens[end - POOL_BLOCK_TOKENS : end]))
            n_known = end if prefix in self._prefixes and n_known == end - POOL_BLOCK_TOKENS else n_known
            self._prefixes[prefix] = None
        for oldest in [*self._prefixes][: -POOL_TOKENS // POOL_BLOCK_TOKENS]:
            self._prefixes.pop(oldest, None)  # another thread may have removed it
        if len(tokens) > n_known:
            start = max(n_known - MAX_POOL_MATCH, len(tokens) - POOL_TOKENS // 2, 0)
            add_to_pool(self.pool, np.array(tokens[start:], np.int64))
