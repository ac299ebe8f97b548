"""Parts of a phase: how many there are, and who does which. Knows no operation.

A phase is cut in as many parts for each thread, which are small where it is long. A thread takes its own from the front, so that
what it reads lies where it has read before; when it has none left it takes one from the back of whoever has the most left (work
stealing: Blumofe and Leiserson 1999). A phase is over when its parts are done, not when all threads have come: slow ones do
fewer, and one that has lost its core, or never began, does none and goes on where the others are. Who did a part leaves no trace:
its sums are its own.
"""

from specdec.runtime.code_cache import inlined, inner
from specdec.runtime.simd import atomic_exchange, atomic_load

PART_SHIFT = 17  # of the bytes of weights or of the cache that a part goes over, for one token: some 10 us
TOKENS_SHIFT = 3  # of the number of tokens that take as long again as one does, which reads
MOST_PARTS = 32  # of a thread
# A thread's parts are a word: the phase, then the first of them that is free and the first behind them that is not
PHASE, FIRST, PLACE = 32, 16, (1 << 16) - 1
NOBODY = -1


@inlined
def share(n, part, n_parts):
    """The range of n units that is a part's."""
    return part * n // n_parts, (part + 1) * n // n_parts


@inner
def n_parts_each(work, n_tokens, n_threads):
    """How many parts a thread has of a phase that goes over so many bytes for a token."""
    return max(1, min((work * ((1 << TOKENS_SHIFT) - 1 + n_tokens) >> TOKENS_SHIFT + PART_SHIFT) // n_threads, MOST_PARTS))


@inner
def parts_at(line, phase, n):
    """The word of a thread's parts at an address, n of that phase where nobody has taken one yet; a later phase's stays."""
    word = atomic_load(line)
    if word >> PHASE < phase:
        begun = phase << PHASE | n
        seen = atomic_exchange(line, word, begun)
        word = begun if seen == word else seen
    return word


@inner
def take_part(line, phase, n, is_own):
    """A thread's next part, of its own the first one that is free, of another's the last; NOBODY's if there is none any more."""
    word = parts_at(line, phase, n)
    while True:
        first, end = word >> FIRST & PLACE, word & PLACE
        if first >= end or word >> PHASE != phase:
            return NOBODY
        seen = atomic_exchange(line, word, word + (1 << FIRST) if is_own else word - 1)
        if seen == word:
            return first if is_own else end - 1
        word = seen


@inner
def farthest_behind(lines, stride, phase, n, first, last):
    """Of threads first to last, whose words lie so many bytes apart, who has the most parts left; NOBODY: none has any."""
    whose, most = NOBODY, 0
    for thread in range(first, last):
        word = parts_at(lines + thread * stride, phase, n)
        left = (word & PLACE) - (word >> FIRST & PLACE)
        if left > most and word >> PHASE == phase:
            whose, most = thread, left
    return whose


@inner
def victim(lines, stride, phase, n, thread, n_threads, n_nodes):
    """Whom a thread that has none left takes a part from: of its own node of memory, as long as anybody has one there."""
    node = thread * n_nodes // n_threads
    first, last = -(-node * n_threads // n_nodes), -(-(node + 1) * n_threads // n_nodes)
    whose = farthest_behind(lines, stride, phase, n, first, last)
    return whose if whose != NOBODY or n_nodes == 1 else farthest_behind(lines, stride, phase, n, 0, n_threads)


@inner
def is_over(done, stride, phase, n_threads, n_parts):
    """Whether all parts of a phase are done, by how many each thread did, or somebody has gone on to the next one."""
    total = 0
    for thread in range(n_threads):
        word = atomic_load(done + thread * stride)
        if word >> PHASE > phase:
            return True
        if word >> PHASE == phase:
            total += word & PLACE
    return total == n_parts
