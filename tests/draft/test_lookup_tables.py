"""The memory of looked-up drafts: what is found in it, what it forgets, and what it never proposes."""

import random

import numpy as np
import pytest

from specdec.draft import lookup_tables
from specdec.draft.lookup import LookupDrafter
from specdec.draft.lookup_tables import POOL_TOKENS, LookupMemory
from tests.tools.random_models import make_started_policy


def propose(memory, tokens, n=4):
    return LookupDrafter((), None, memory).propose(tokens, make_started_policy(n)).tokens


def test_tokens_of_an_earlier_sequence_are_proposed():
    memory = LookupMemory()
    memory.add([5, 6, 7, 8, 9, 10, 11])
    assert propose(memory, [1, 6, 7, 8]) == [9, 10]
    assert propose(memory, [1, 2, 7, 8]) == []  # a match needs three tokens
    assert propose(LookupMemory(), [1, 6, 7, 8]) == []


def test_the_longest_match_in_the_pool_wins_then_the_newest():
    memory = LookupMemory()
    memory.add([1, 2, 3, 4, 5, 20])
    memory.add([9, 3, 4, 5, 30])
    memory.add([8, 3, 4, 5, 40])
    assert propose(memory, [7, 3, 4, 5], 1) == [40]
    assert propose(memory, [2, 3, 4, 5], 1) == [20]


def test_this_sequence_comes_before_the_pool():
    memory = LookupMemory()
    memory.add([1, 2, 3, 4, 5, 6])
    assert propose(memory, [2, 3, 4, 9, 2, 3, 4], 1) == [9]


def test_a_match_does_not_continue_into_the_next_sequence():
    memory = LookupMemory()
    memory.add([1, 2, 3, 4])
    memory.add([9, 9, 9, 9])
    assert propose(memory, [1, 2, 3]) == [4]


def test_a_conversation_that_continues_is_added_once():
    memory, tokens = LookupMemory(), [*range(1000)]
    memory.add(tokens)
    size = memory.pool.size[0]
    memory.add([*tokens, *range(2000, 2100)])
    assert memory.pool.size[0] - size < 200
    assert propose(memory, [*range(900, 950)], 1) == [950]
    assert propose(memory, [997, 998, 999], 1) == [2000]
    memory.add(tokens[:960])  # all of it is there
    assert memory.pool.size[0] - size < 200


def test_the_pool_forgets_the_oldest_and_keeps_its_size():
    memory, rng = LookupMemory(), random.Random(1)
    first = [rng.randrange(1000) for _ in range(2000)]
    memory.add(first)
    n_bytes = sum(array.nbytes for array in (*memory.pool, *memory.runner_ups))
    assert propose(memory, first[100:120], 1) == [first[120]]
    for _ in range(40):
        memory.add(last := [rng.randrange(1000) for _ in range(2000)])
    assert propose(memory, first[100:120], 1) == []
    assert propose(memory, last[100:120], 1) == [last[120]]
    assert sum(array.nbytes for array in (*memory.pool, *memory.runner_ups)) == n_bytes < 5e6
    assert len(memory._prefixes) <= POOL_TOKENS // lookup_tables.POOL_BLOCK_TOKENS


def test_one_long_sequence_takes_at_most_half_of_the_pool():
    memory, rng = LookupMemory(), random.Random(2)
    first, huge = ([rng.randrange(1000) for _ in range(n)] for n in (2000, 3 * POOL_TOKENS))
    memory.add(first)
    memory.add(huge)
    assert propose(memory, first[100:120], 1) == [first[120]]
    assert propose(memory, huge[-100:-80], 1) == [huge[-80]]


@pytest.mark.parametrize("seed", range(20))
def test_any_contents_propose_only_tokens_that_were_seen(seed):
    """Fill the tables with any indices and any of the seen tokens, as two threads that write at a time may leave them."""
    rng, memory = np.random.default_rng(seed), LookupMemory()
    pool, runner_ups = memory.pool, memory.runner_ups
    pool.tokens[:] = rng.integers(0, 3, POOL_TOKENS)
    for indices in (pool.newest, pool.previous):
        indices[:] = rng.integers(-(2**62), 2**62, indices.shape) >> rng.integers(0, 60, indices.shape)
    pool.size[0] = rng.integers(0, 2**40)
    runner_ups.tokens[:] = rng.integers(0, 3, runner_ups.tokens.shape)
    drafter, tokens = LookupDrafter((), None, memory), [0, 1]
    for _ in range(300):
        draft = drafter.propose(tokens, make_started_policy(8)).tokens
        assert {*draft} <= {0, 1, 2}
        drafter.observe(rng.normal(size=(1, 3)).astype(np.float32), [0], len(tokens))
        tokens.append(int(rng.integers(0, 3)))
