"""Drafting without a model: what followed when the text's last tokens stood there before. Knows nothing of verifying."""

from collections.abc import Container, Sequence

from specdec.engine.decoding import LengthPolicy
from specdec.verification import Draft

WORTH = 0.2  # a proposal that is less likely than this to stand is none: what it costs is more than it brings (see NOTES.md)
# How often what followed a match follows it again, by the length of the match in bits: 1, 2 to 3, 4 to 7, ... tokens. A text
# begins with these, and moves them by 1 / MEMORY of the way with each token.
FIRST_SHARES = (0.25, 0.45, 0.65, 0.8, 0.9, 0.95)
MEMORY = 16
PREDICTED_ODDS = 8.0  # that a predicted token stands, where all before it did


class SuffixAutomaton:
    """Every substring of a text that grows token by token, in O(1) a token and a state or two (Blumer et al. 1985).

    A state stands for the substrings that end at the same places of the text. Its link is the state of the longest of their
    suffixes that end at other places too.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # of each state: the state behind another token; state 0 is the empty string
        self._link = [-1]
        self._length = [0]  # of the longest substring
        self._end = [0]  # a place where the substrings end: the last at which the longest one was the match
        self._whole = 0  # the state of the whole text

    def match(self, tail: Sequence[int] = ()) -> tuple[int, int]:
        """The length of the longest suffix of the text that stands before too, 0 for none, and where that ends.

        With a tail: of the text and the tail, the longest that stands in the text, at its end too. Of several places, the last
        one at which nothing longer was known: a list's columns tell better by it than by the last of all, and it costs nothing
        to keep.
        """
        following, link = self._next, self._link
        state = max(link[self._whole], 0)
        length = self._length[state]
        for token in tail:
            while state and token not in following[state]:
                state = link[state]
                length = self._length[state]
            state = following[state].get(token, 0)
            length = length + 1 if state else 0
        return (length, self._end[state]) if state else (0, 0)

    def append(self, token: int) -> None:
        following, link, length, end = self._next, self._link, self._length, self._end
        whole, n = self._whole, len(self.text)
        if whole:
            end[link[whole]] = n
        self.text.append(token)
        self._whole = new = len(following)
        following.append({})
        length.append(n + 1)
        end.append(n + 1)
        state = whole
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state < 0:
            link.append(0)
            return
        there = following[state][token]
        if length[there] == length[state] + 1:
            link.append(there)
            return
        # what is `there` ends at the text's end in part: those substrings part from it
        part = new + 1
        link.append(part)
        following.append(following[there].copy())
        length.append(length[state] + 1)
        end.append(end[there])
        link.append(link[there])
        link[there] = part
        while state >= 0 and following[state].get(token) == there:
            following[state][token] = part
            state = link[state]


class NgramDrafter:
    """Goes on as the text did behind the longest of its suffixes that stands in it before, the prompt included.

    (Prompt lookup, Saxena 2023; by a suffix automaton: SAM decoding, arXiv:2411.10666; SuffixDecoding, arXiv:2411.04975.)
    How far is no setting: each token of the text, the prompt's too, tells how often a match of such a length is right about the
    next one, and a proposal goes as far as it is likely enough to stand. end_marks: the tokens behind which it proposes none.
    """

    def __init__(self, end_marks: Container[int]) -> None:
        self._end_marks = end_marks
        self._begin()

    def _begin(self) -> None:
        self._automaton, self._shares = SuffixAutomaton(), [*FIRST_SHARES]

    def get_ready(self, tokens: list[int]) -> None:
        """Take in what is new of a text; all of it, where it does not begin with the one before."""
        automaton = self._automaton
        if tokens[: len(automaton.text)] != automaton.text:
            self._begin()
            automaton = self._automaton
        shares, text = self._shares, automaton.text
        for token in tokens[len(text) :]:
            length, place = automaton.match()
            if length:
                rank = _rank(length)
                shares[rank] += ((text[place] == token) - shares[rank]) / MEMORY
            automaton.append(token)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """tail: what may follow tokens, which is not taken in: a proposal of that draft for which this one drafts (`stages`)."""
        self.get_ready(tokens)
        length, place = self._automaton.match(tail)
        text, likely = self._automaton.text, 1.0
        behind, odds = [*tail], list[float]()  # what is behind the text, the proposal at its end
        while length and len(odds) < policy.max_tokens:
            # behind the text's end the continuation is the proposal itself: a text that goes in circles
            token = text[place] if place < len(text) else behind[place - len(text)]
            share = self._shares[_rank(length)]
            likely *= share
            if likely < WORTH:
                break
            behind.append(token)
            odds.append(share / (1 - share))
            if token in self._end_marks:
                break
            place += 1
            length += 1
        draft = behind[len(tail) :]
        return Draft(draft[: policy.choose(odds)] if draft else draft)


class PredictionDrafter(NgramDrafter):
    """Takes a text to be the one that somebody predicts, as far as it is; then goes on as that one or itself did before."""

    def __init__(self, end_marks: Container[int], n_prompt: int, prediction: Sequence[int]) -> None:
        self._n_prompt, self._prediction = n_prompt, [*prediction]
        super().__init__(end_marks)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        n = len(tokens) - self._n_prompt
        if self._prediction[:n] != tokens[self._n_prompt :]:
            return super().propose(tokens, policy, tail)
        draft = self._prediction[n : n + policy.max_tokens]
        end = next((i for i, token in enumerate(draft, 1) if token in self._end_marks), len(draft))
        return Draft(draft[: policy.choose([PREDICTED_ODDS] * end)] if end else [])

    def get_ready(self, tokens: list[int]) -> None:
        super().get_ready(self._prediction + tokens)


def _rank(length: int) -> int:
    """Which of FIRST_SHARES is that of a match of so many tokens."""
    return min(length.bit_length(), len(FIRST_SHARES)) - 1
