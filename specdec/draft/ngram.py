"""Drafters without a model, which propose the continuation of an earlier match in the sequence, or a predicted output."""

from collections.abc import Container, Sequence

from specdec.protocols import LengthPolicy
from specdec.verification import Draft

# A proposal ends before the token with which its acceptance probability falls below this: it costs more than it gains (NOTES.md).
MIN_DRAFT_PROBABILITY = 0.2
# How often the token after a match follows it again, by the length of the match in bits: 1, 2 to 3, 4 to 7, ... tokens. A
# sequence starts with these rates, and each token moves them by 1 / HIT_RATE_WINDOW of the difference.
INITIAL_HIT_RATES = (0.25, 0.45, 0.65, 0.8, 0.9, 0.95)
HIT_RATE_WINDOW = 16
PREDICTION_CONFIDENCE = 8.0  # odds p / (1 - p) that a predicted token is accepted if all before it were


class SuffixAutomaton:
    """An automaton of all substrings of a growing sequence, with O(1) time and one or two states per token (Blumer et al. 1985).

    A state stands for the substrings that end at the same positions. Its suffix link is the state of the longest of their
    suffixes that ends at other positions too.

    Attributes:
        tokens: The tokens of the sequence so far.
    """

    def __init__(self) -> None:
        """Create the automaton of the empty sequence."""
        self.tokens: list[int] = []
        # Of each state; state 0 is the empty string:
        self._transitions: list[dict[int, int]] = [{}]  # the state after another token
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
        transitions, link = self._transitions, self._link
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
        transitions, link, length, end = self._transitions, self._link, self._length, self._end_position
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


class NgramDrafter:
    """A drafter without a model that proposes the tokens that followed an earlier occurrence of the sequence's longest suffix.

    (Prompt lookup, Saxena 2023; with a suffix automaton: SAM decoding, arXiv:2411.10666; SuffixDecoding, arXiv:2411.04975.)
    The sequence includes the prompt. The draft length is no setting. Each token of the sequence updates how often a match of a
    certain length predicts the next token. A proposal is as long as it is likely enough to be accepted.

    Args:
        eos_tokens: End-of-sequence tokens; a proposal ends with the first one.
    """

    def __init__(self, eos_tokens: Container[int]) -> None:
        """Create a drafter that has seen no tokens."""
        self._eos_tokens = eos_tokens
        self._reset()

    def _reset(self) -> None:
        self._automaton, self._hit_rates = SuffixAutomaton(), [*INITIAL_HIT_RATES]

    def prepare(self, tokens: list[int]) -> None:
        """Index the tokens of a sequence (only the new ones if it continues that of the last call) and update the hit rates."""
        automaton = self._automaton
        if tokens[: len(automaton.tokens)] != automaton.tokens:
            self._reset()
            automaton = self._automaton
        hit_rates, known = self._hit_rates, automaton.tokens
        for token in tokens[len(known) :]:
            length, end = automaton.match()
            if length:
                index = _get_hit_rate_index(length)
                hit_rates[index] += ((known[end] == token) - hit_rates[index]) / HIT_RATE_WINDOW
            automaton.append(token)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """Return a proposal of draft tokens, possibly none; see `ModelDrafter.propose`. The tail is matched but not indexed."""
        self.prepare(tokens)
        length, position = self._automaton.match(tail)
        known, probability = self._automaton.tokens, 1.0
        after, confidences = [*tail], list[float]()  # the tokens after the sequence, with the proposal at the end
        while length and len(confidences) < policy.max_tokens:
            # at the end of the sequence the proposal itself continues it, which repeats a loop
            token = known[position] if position < len(known) else after[position - len(known)]
            hit_rate = self._hit_rates[_get_hit_rate_index(length)]
            probability *= hit_rate
            if probability < MIN_DRAFT_PROBABILITY:
                break
            after.append(token)
            confidences.append(hit_rate / (1 - hit_rate))
            if token in self._eos_tokens:
                break
            position += 1
            length += 1
        draft = after[len(tail) :]
        return Draft(draft[: policy.choose(confidences)] if draft else draft)


class PredictionDrafter(NgramDrafter):
    """A drafter that proposes the rest of a predicted output while the sequence equals it, and n-grams after a difference.

    Args:
        eos_tokens: See `NgramDrafter`.
        n_prompt: The number of tokens of the sequence's prompt.
        prediction: The tokens of the predicted output. Its n-grams are used as well as those of the sequence.
    """

    def __init__(self, eos_tokens: Container[int], n_prompt: int, prediction: Sequence[int]) -> None:
        """Copy the prediction; no token of the output is known yet."""
        self._n_prompt, self._prediction = n_prompt, [*prediction]
        super().__init__(eos_tokens)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """Return the next predicted tokens, or n-grams if output and prediction differ; see `NgramDrafter.propose`."""
        n = len(tokens) - self._n_prompt
        if self._prediction[:n] != tokens[self._n_prompt :]:
            return super().propose(tokens, policy, tail)
        draft = self._prediction[n : n + policy.max_tokens]
        end = next((i for i, token in enumerate(draft, 1) if token in self._eos_tokens), len(draft))
        return Draft(draft[: policy.choose([PREDICTION_CONFIDENCE] * end)] if end else [])

    def prepare(self, tokens: list[int]) -> None:
        """Index the prediction, followed by the tokens of the sequence; see `NgramDrafter.prepare`."""
        super().prepare(self._prediction + tokens)


def _get_hit_rate_index(length: int) -> int:
    """Return the index in the list of hit rates (INITIAL_HIT_RATES) for a match of `length` tokens."""
    return min(length.bit_length(), len(INITIAL_HIT_RATES)) - 1
