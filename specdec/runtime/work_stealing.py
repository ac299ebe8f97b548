"""Work stealing: how many chunks a phase has, and which thread runs which of them.

A phase has the same number of chunks for each thread, and the chunks of a long phase are small. A thread takes its own chunks
from the front, so it reads memory where it has read before. When it has none left, it takes one from the back of the thread with
the most chunks left (work stealing: Blumofe and Leiserson 1999). A phase ends when its chunks are done, not when all threads
arrive: slow threads do fewer, and a thread that lost its core, or never started, does none and continues where the others are.
Results do not depend on which thread ran a chunk: its sums are its own.

With two threads and a busy loop on one of their cores, a token of SmolLM2-135M takes 9.1 ms, with equal shares and barriers 23.3.
With one thread at half speed, passes take 1.2 to 1.5 times as long, with equal shares 1.7 to 2.6 times.
"""

from specdec.runtime.code_cache import inlined, jitable
from specdec.runtime.simd import atomic_compare_exchange, atomic_load

CHUNK_BYTES_SHIFT = 17  # log2 of the bytes of weights or KV cache that a chunk reads for one token: about 10 us
TOKENS_SHIFT = 3  # log2 of the number of tokens whose arithmetic takes as long as reading the data once
MAX_CHUNKS_PER_THREAD = 32
# A thread's queue of chunks is one word: the phase, the first free chunk, and the end of the free chunks.
PHASE_SHIFT, FIRST_SHIFT, INDEX_MASK = 32, 16, (1 << 16) - 1
NOT_FOUND = -1


@inlined
def get_chunk_range(n, chunk, n_chunks):
    """Return the first and the end index of chunk `chunk` when n items are split evenly into n_chunks chunks."""
    return chunk * n // n_chunks, (chunk + 1) * n // n_chunks


@jitable
def count_chunks_per_thread(n_bytes, n_tokens, n_threads):
    """Return the number of chunks per thread for a phase that reads n_bytes per token, from 1 to MAX_CHUNKS_PER_THREAD."""
    n_chunks = n_bytes * ((1 << TOKENS_SHIFT) - 1 + n_tokens) >> TOKENS_SHIFT + CHUNK_BYTES_SHIFT
    return max(1, min(n_chunks // n_threads, MAX_CHUNKS_PER_THREAD))


@jitable
def load_queue(queue, phase, n):
    """Return the word of the chunk queue at the address `queue`, filled with n chunks first if it is of an earlier phase.

    The queue of a later phase stays as it is.
    """
    word = atomic_load(queue)
    if word >> PHASE_SHIFT < phase:
        initial = phase << PHASE_SHIFT | n
        seen = atomic_compare_exchange(queue, word, initial)
        word = initial if seen == word else seen
    return word


@jitable
def take_chunk(queue, phase, n, is_own):
    """Take a chunk out of the chunk queue at the address `queue`; return its index, or NOT_FOUND if no chunk is left.

    A thread takes the first free chunk of its own queue (is_own), and the last free one of another thread's.
    """
    word = load_queue(queue, phase, n)
    while True:
        first, end = word >> FIRST_SHIFT & INDEX_MASK, word & INDEX_MASK
        if first >= end or word >> PHASE_SHIFT != phase:
            return NOT_FOUND
        seen = atomic_compare_exchange(queue, word, word + (1 << FIRST_SHIFT) if is_own else word - 1)
        if seen == word:
            return first if is_own else end - 1
        word = seen


@jitable
def find_busiest_thread(queues, stride, phase, n, n_threads):
    """Return the thread with the most chunks left in its queue, or NOT_FOUND if none is left.

    The queues start at the address `queues`, `stride` bytes apart.
    """
    busiest, most = NOT_FOUND, 0
    for thread in range(n_threads):
        word = load_queue(queues + thread * stride, phase, n)
        left = (word & INDEX_MASK) - (word >> FIRST_SHIFT & INDEX_MASK)
        if left > most and word >> PHASE_SHIFT == phase:
            busiest, most = thread, left
    return busiest


@jitable
def is_phase_done(done, stride, phase, n_threads, n_chunks):
    """Return whether the chunks of a phase done by all threads add up to n_chunks, or a thread has started a later phase."""
    total = 0
    for thread in range(n_threads):
        word = atomic_load(done + thread * stride)
        if word >> PHASE_SHIFT > phase:
            return True
        if word >> PHASE_SHIFT == phase:
            total += word & INDEX_MASK
    return total == n_chunks
