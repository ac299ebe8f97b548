"""The drafter without a model, which looks up what followed earlier and what the target found likely, and predicted outputs."""

from collections.abc import Iterable, Sequence

import numpy as np

from specdec.draft.draft_length import FixedLength
from specdec.draft.lookup_tables import (
    DEPTH,
    MAX_CHILDREN,
    N_COLUMNS,
    N_RUNNER_UPS,
    NO_TOKEN,
    PARENT,
    SOURCE,
    TOKEN,
    Growth,
    LookupMemory,
    Noise,
    SequenceIndex,
    look_up,
    store_runner_ups,
)
from specdec.protocols import LengthPolicy
from specdec.runtime.simd import LANES, Float32
from specdec.sampling import Sampling
from specdec.verification import Draft

SOURCES = "this text", "earlier text", "runner-up"  # where a token was looked up, by its number in `lookup_tables`
MAX_NODES = 63  # of a proposal: with the last token a pass of MAX_BATCH_TOKENS
# A chain ends before the token with which its acceptance probability falls below the first of these: that token would cost more
# than it gains. A node of a tree has at least the second one, and the policy decides how many are profitable.
MIN_CHAIN_PROBABILITY, MIN_NODE_PROBABILITY = 0.2, 0.05
# How often the token after a match follows it again, by the length of the match: 1, 2 to 3, 4 to 7, ... tokens. A sequence starts
# with these rates.
MATCH_RATES = (0.25, 0.45, 0.65, 0.8, 0.9, 0.95)
PREDICTION_CONFIDENCE = 8.0  # odds p / (1 - p) that a predicted token is accepted if all before it were
# How often a runner-up is the next token, by the number of unknown tokens of its context, by rank, and by the margin of the best
# one (measured on SmolLM2 135M and Gemma 3 270M at temperatures 0 and 0.8)
RUNNER_UP_RATES = (
    (
        (0.35, 0.4, 0.45, 0.5, 0.6, 0.75, 0.85, 0.9),
        (0.2, 0.2, 0.15, 0.15, 0.12, 0.07, 0.04, 0.02),
        (0.08, 0.08, 0.07, 0.06, 0.04, 0.02, 0.01, 0.01),
        (0.03, 0.03, 0.03, 0.03, 0.02, 0.01, 0.01, 0.01),
    ),
    (
        (0.17, 0.17, 0.2, 0.2, 0.25, 0.3, 0.35, 0.5),
        (0.12, 0.12, 0.12, 0.1, 0.1, 0.1, 0.08, 0.03),
        (0.05, 0.05, 0.05, 0.05, 0.04, 0.03, 0.03, 0.01),
        (0.03, 0.03, 0.03, 0.03, 0.02, 0.02, 0.02, 0.01),
    ),
)
INITIAL_CAPACITY = 1024  # tokens of a sequence


class SuffixAutomaton:
    """An automaton of all substrings of a growing sequence, with O(1) time and one or two states per token (Blumer et al. 1985).

    A state stands for the substrings that end at the same positions. Its suffix link is the state of the longest of their
    suffixes that ends at other positions too.

    Attributes:
        tokens: The tokens of the sequence so far.
        transitions: For each state, the state after another token; state 0 is the empty string.
    """

    def __init__(self) -> None:
        """Create the automaton of the empty sequence."""
        self.tokens: list[int] = []
        self.transitions: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring
        self._end_position = [0]  # where the substrings end: the last position at which the longest one was the match
        self._last = 0  # the state of the whole sequence

    def match(self, tail: Sequence[int] = ()) -> tuple[int, int]:
        """Find the longest suffix of the sequence that occurs earlier too; return its length, and the position after the match.

        Both are 0 if there is no such suffix. With a tail, the suffix is one of the sequence and the tail, and may also occur at
        the end of the sequence. If the suffix occurs several times, the result is the last occurrence at which it was the longest
        match. It predicts the columns of a list better than the very last occurrence, and costs nothing to keep.
        """
        transitions, link = self.transitions, self._link
        state = max(link[self._last], 0)
        length = self._length[state]
        for token in tail:
            while state and token not in transitions[state]:
                state = link[state]
                length = self._length[state]
            state = transitions[state].get(token, 0)
            length = length + 1 if state else 0
        return (length, self._end_position[state]) if state else (0, 0)

    def append(self, token: int) -> None:
        """Append a token to the sequence and update the automaton."""
        transitions, link, length, end = self.transitions, self._link, self._length, self._end_position
        last, n = self._last, len(self.tokens)
        if last:
            end[link[last]] = n
        self.tokens.append(token)
        self._last = new = len(transitions)
        transitions.append({})
        length.append(n + 1)
        end.append(n + 1)
        state = last
        while state >= 0 and token not in transitions[state]:
            transitions[state][token] = new
            state = link[state]
        if state < 0:
            link.append(0)
            return
        target = transitions[state][token]
        if length[target] == length[state] + 1:
            link.append(target)
            return
        # only the shorter substrings of `target` also end here: split them off into a clone
        clone = new + 1
        link.append(clone)
        transitions.append(transitions[target].copy())
        length.append(length[state] + 1)
        end.append(end[target])
        link.append(link[target])
        link[target] = clone
        while state >= 0 and transitions[state].get(token) == target:
            transitions[state][token] = clone
            state = link[state]


class LookupDrafter:
    """A drafter without a model, which proposes what followed earlier, and runner-ups of the target's passes.

    (Prompt lookup, Saxena 2023; with a suffix automaton: SAM decoding, arXiv:2411.10666; token recycling: arXiv:2408.08696.) A
    runner-up is one of the likeliest tokens of a pass. The tokens that followed an earlier match are looked up in this sequence,
    with its prompt, and in earlier ones. Each token of the sequence updates how often each kind of guess is right. A proposal is
    as long as it is likely enough to be accepted. On 20 texts with SmolLM2 Q8_0 this is 2.33 times as fast as plain decoding at
    temperature 0, and 1.34 times at 0.8; n-grams alone are 2.24 and 1.26 times as fast.

    Args:
        eos_tokens: End-of-sequence tokens; a proposal ends with the first one.
        sampling: The sampling parameters of the target, by which runner-ups are ordered.
        memory: What earlier sequences have left; None to look up in this sequence alone, without runner-ups.
        n_ids: Number of token ids that the target can generate.
        can_branch: Whether proposals may be token trees.
    """

    has_variable_length = True

    def __init__(
        self,
        eos_tokens: Iterable[int],
        sampling: Sampling | None = None,
        memory: LookupMemory | None = None,
        n_ids: int | None = None,
        can_branch: bool = False,
    ) -> None:
        """Create a drafter that has seen no tokens."""
        self._eos_tokens, self._n_ids, self._can_branch = [*eos_tokens], n_ids, can_branch
        self._noise = Noise(sampling.temperature, sampling.top_p, sampling.seed, 0) if sampling else Noise(0.0, 0.0, 0, 0)
        self._memory, self._uses_runner_ups = memory or LookupMemory(), memory is not None
        n_nodes = 2 * MAX_NODES  # of a tail and a proposal
        n_candidates = n_nodes * (MAX_CHILDREN + 1)
        self._growth = Growth(
            np.zeros((n_nodes, N_COLUMNS), np.int64), np.zeros((n_nodes, 2)),
            np.zeros((n_candidates, N_COLUMNS), np.int64), np.zeros((n_candidates, 2)),
        )  # fmt: skip
        self._reset()

    def _reset(self) -> None:
        """Forget the sequence."""
        self._automaton = SuffixAutomaton()
        self._index = SequenceIndex(
            np.zeros(0, np.int64), np.zeros((0, N_RUNNER_UPS), np.int32), np.zeros((0, N_RUNNER_UPS), np.float32),
            np.array([MATCH_RATES] * 2), np.array(RUNNER_UP_RATES), np.array(self._eos_tokens, np.int64),
            np.zeros(N_RUNNER_UPS, np.int64), np.zeros(N_RUNNER_UPS),
        )  # fmt: skip
        self._reserve(INITIAL_CAPACITY)

    def prepare(self, tokens: list[int]) -> None:
        """Index the tokens of a sequence (only the new ones if it continues that of the last call) and update the hit rates."""
        self._look_up(tokens, (), 0, 1, 1.0)

    def observe(self, logits: Float32, rows: list[int], n_tokens: int) -> None:
        """Store the runner-ups of a pass, which later proposals may contain; do nothing without a memory.

        Args:
            logits: The logits of the pass, (n + 1, V).
            rows: The rows at the sequence's last token and at the accepted draft tokens after it.
            n_tokens: Number of tokens of the sequence before the pass.
        """
        if self._uses_runner_ups:
            first = n_tokens - 1 - self._noise.first_position
            self._reserve(first + len(rows))
            index = self._index
            for i, row in enumerate(rows, first):
                store_runner_ups(
                    index.row_tokens, index.row_scores, i, logits[row, : self._n_ids], index.ranked, index.ranked_scores
                )

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """Return a proposal of draft tokens, possibly none; see `ModelDrafter.propose`. The tail is matched but not indexed."""
        is_tree = self._can_branch and policy.can_branch
        max_children, min_survival = (MAX_CHILDREN, MIN_NODE_PROBABILITY) if is_tree else (1, MIN_CHAIN_PROBABILITY)
        n = self._look_up(tokens, tail, min(policy.max_tokens, MAX_NODES), max_children, min_survival)
        if not n:
            return Draft([])
        nodes, numbers, n_tail = self._growth.nodes, self._growth.numbers, len(tail)
        confidences = [p / (1 - p) for p in numbers[n_tail : n_tail + n, 0].tolist()]
        if not is_tree:
            n = policy.choose(confidences)
            nodes = nodes[n_tail : n_tail + n]
            return Draft(nodes[:, TOKEN].tolist(), sources=[SOURCES[i] for i in nodes[:1, SOURCE]])
        parents = nodes[:n, PARENT].tolist()
        n = policy.choose(confidences, parents)
        is_chain = parents[:n] == [*range(-1, n - 1)]
        sources = [SOURCES[i] for i in nodes[:n, SOURCE].tolist()]
        return Draft(nodes[:n, TOKEN].tolist(), None, None if is_chain else parents[:n], sources)

    def _look_up(self, tokens: list[int], tail: Sequence[int], max_nodes: int, max_children: int, min_survival: float) -> int:
        """Index the new tokens of a sequence, grow a proposal in `_growth`, and return the number of its nodes.

        A sequence that does not continue that of the last call is indexed from its first token on. See `lookup_tables.look_up`
        for the other arguments.
        """
        automaton = self._automaton
        if tokens[: len(automaton.tokens)] != automaton.tokens:
            self._reset()
            automaton = self._automaton
        first, n = len(automaton.tokens), len(tokens)
        matches = list[tuple[int, int]]()
        if first < n:
            self._reserve(n)
            for token in tokens[first:]:
                matches.append(automaton.match())
                automaton.append(token)
            self._index.tokens[first:n] = tokens[first:]
        matches.append(automaton.match(tail))
        nodes = self._growth.nodes
        for i, token in enumerate(tail):
            nodes[i, TOKEN], nodes[i, PARENT], nodes[i, DEPTH] = token, i - 1, i
        return int(
            look_up(np.array(matches, np.int64), first, n, len(tail), max_nodes, max_children, min_survival, *self._fields)
        )

    def _reserve(self, n: int) -> None:
        """Grow the arrays of the index to hold n tokens or more."""
        index = self._index
        if n > (capacity := len(index.tokens)):
            larger = [
                np.full((max(n, 2 * capacity), *array.shape[1:]), NO_TOKEN, array.dtype)
                for array in (index.tokens, index.row_tokens, index.row_scores)
            ]
            for new, old in zip(larger, index, strict=False):
                new[:capacity] = old
            tokens, row_tokens, row_scores = larger
            self._index = index = index._replace(tokens=tokens, row_tokens=row_tokens, row_scores=row_scores)
            self._fields = *self._growth, *index, *self._memory.runner_ups, *self._memory.pool, *self._noise


class PredictionDrafter(LookupDrafter):
    """A drafter that proposes the rest of a predicted output while the sequence equals it, and looks up tokens after that.

    Args:
        eos_tokens: See `LookupDrafter`.
        n_prompt: The number of tokens of the sequence's prompt.
        prediction: The tokens of the predicted output. Matches in it are found as well as those in the sequence.
        sampling: See `LookupDrafter`.
        memory: See `LookupDrafter`.
        n_ids: See `LookupDrafter`.
    """

    def __init__(
        self,
        eos_tokens: Iterable[int],
        n_prompt: int,
        prediction: Sequence[int],
        sampling: Sampling | None = None,
        memory: LookupMemory | None = None,
        n_ids: int | None = None,
    ) -> None:
        """Copy the prediction; no token of the output is known yet."""
        super().__init__(eos_tokens, sampling, memory, n_ids)
        self._n_prompt, self._prediction = n_prompt, [*prediction]
        self._noise = self._noise._replace(first_position=-len(prediction))
        self._reset()

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """Return the next predicted tokens, or looked-up ones if output and prediction differ; see `LookupDrafter.propose`."""
        n = len(tokens) - self._n_prompt
        if self._prediction[:n] != tokens[self._n_prompt :]:
            return super().propose(tokens, policy, tail)
        draft = self._prediction[n : n + policy.max_tokens]
        end = next((i for i, token in enumerate(draft, 1) if token in self._eos_tokens), len(draft))
        return Draft(draft[: policy.choose([PREDICTION_CONFIDENCE] * end)] if end else [])

    def _look_up(self, tokens: list[int], tail: Sequence[int], max_nodes: int, max_children: int, min_survival: float) -> int:
        """Index the prediction, followed by the tokens of the sequence; see `LookupDrafter._look_up`."""
        return super()._look_up(self._prediction + tokens, tail, max_nodes, max_children, min_survival)


def warm_up_lookup() -> None:
    """Compile the functions that look up tokens, by looking some up."""
    drafter = LookupDrafter((), None, LookupMemory())
    drafter.observe(np.zeros((1, LANES), np.float32), [0], 1)
    drafter.propose([0, 0], FixedLength(1))
