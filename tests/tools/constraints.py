"""Constraints and drafters for tests of constrained decoding."""

from tests.tools.decode import FakeDrafter
from tests.tools.regular_languages import byte_class, concatenate, literal, repeat, union

# ids 0 to 2 and rows from 100 on are empty; some tokens are equal, some contain others
WORDS = ["", "", "", "a", "b", "c", "ab", "bc", "abc", "aa", "b", "cab", "x", "xy", "y", "xyz", "z", " ", "a ", "", "c", "abcabc"]


VOCABULARY = [*(word.encode() for word in WORDS), *(bytes([65 + i % 26]) * (i % 3) for i in range(78)), *[b""] * 20]


FREE = concatenate(
    repeat(union(literal("ab"), literal("c"), concatenate(byte_class("xyz"), literal(" ")))), union(literal("abc"), literal("x"))
)


PROMPT = [1, 7, 9]


def make_arbitrary_drafter():
    """Return a drafter of consecutive tokens of the vocabulary, allowed or not, in a length that depends on the sequence."""

    def propose(tokens, policy):
        n = 1 + sum(tokens) % policy.max_tokens
        return [(3 + sum(tokens) + i * len(tokens)) % 105 for i in range(n)]

    return FakeDrafter(propose)
