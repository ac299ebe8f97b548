"""Caches of texts: those that run have one each, and those that have ended keep theirs for who goes on with them."""

from collections.abc import Callable, Sequence

from specdec.draft.resolver import Team
from specdec.runtime.simd import round_up
from specdec.validation import known

LEAST_SHARED = 8  # tokens of a prompt that are copied from another seat, and of something else that a seat is kept for
GRAIN = 128  # tokens, by which sizes of caches are told


class Seat:
    """The models with caches of a text's own. n_reserved: tokens that it may grow to; n_longest: that it has held.

    owner: who may go on with what it holds.
    """

    def __init__(self, team: Team, owner: str) -> None:
        self.team, self.owner = team, owner
        self.n_reserved = self.n_longest = 0

    def n_cached(self, prompt: list[int]) -> int:
        """How many of a prompt's tokens need not run again."""
        return max(len(prompt) - 1, 0) - self.team.target.unread(prompt)

    def take_over(self, other: "Seat", prompt: list[int]) -> None:
        """What another one's models have read of a prompt, where it is more."""
        for model, theirs in zip(self.team.models.values(), other.team.models.values(), strict=True):
            tokens = known(prompt, model.config.vocab_size)
            if len(tokens) <= model.n_positions and model.unread(tokens) - theirs.unread(tokens) >= LEAST_SHARED:
                model.take_over(theirs, tokens)

    def keep(self, tokens: list[int], is_read: bool = True) -> None:
        """What a text's cache holds, where prompts are kept."""
        if self.team.prompts:
            self.team.prompts.keep(self.team.target, tokens, is_read, self.owner)

    @property
    def n_held(self) -> int:
        """How many tokens of its last text the cache holds."""
        return self.team.target.n_held

    @property
    def n_most(self) -> int:
        """Tokens that it has room for, or may come to have, in hundreds or so."""
        n: int = round_up(max(self.n_reserved, self.n_longest), GRAIN)
        return n

    def n_bytes(self, n: int) -> int:
        """What caches of so many tokens take."""
        return sum(model.text_bytes(min(n, model.n_positions), True) for model in self.team.models.values())


class Seats:
    """Seats whose caches take at most so many bytes, or one alone. The one that has been idle longest is dropped first.

    What a seat holds is read by its owner's texts alone: how long a prompt takes would tell others how it begins.

    n_idle: how many may be idle; where there are as many, the one that has been so longest is taken for another talk.
    """

    def __init__(self, new: Callable[[], Team], n_bytes: int, n_idle: int) -> None:
        self._new, self.most_bytes, self._most_idle = new, n_bytes, n_idle
        self._bytes: dict[int, int] = {}  # of a seat, by tokens
        self._idle, self._taken = list[Seat](), list[Seat]()  # the first has been idle longest

    def take(self, prompt: list[int], n_tokens: int, owner: str = "") -> Seat | None:
        """A seat for a text of up to so many tokens, which holds what any holds of the prompt. None: no room yet.

        That is the one that holds it, where little else would be lost, or a copy: of instructions, say, that all begin with.
        """
        if not self._fits(self._taken, n_tokens):
            return None
        held = {seat: seat.n_cached(prompt) for seat in (*self._taken, *self._idle) if seat.owner == owner}
        source = max((seat for seat, n in held.items() if n >= LEAST_SHARED), default=None, key=held.__getitem__)
        seat = self._spare(source, held[source] if source else 0, n_tokens, owner)
        seat.n_reserved = n_tokens
        while self._idle and not self._fits((*self._idle, *self._taken), seat.n_most):
            del self._idle[0]
        if source and source is not seat:
            seat.take_over(source, prompt)
        if prompts := seat.team.prompts:
            prompts.restore(seat.team.target, prompt, owner)
        self._taken.append(seat)
        return seat

    def give(self, seat: Seat, n_tokens: int) -> None:
        """A text of so many tokens has left; the next one may go on with it."""
        self._taken.remove(seat)
        seat.n_longest = max(seat.n_longest, n_tokens)
        seat.n_reserved = 0
        self._idle.append(seat)

    def drop(self, seat: Seat) -> None:
        self._taken.remove(seat)

    def _spare(self, source: Seat | None, n: int, n_tokens: int, owner: str) -> Seat:
        """A seat that is in nobody's use from now on: the source, which holds n tokens of a prompt, if it is idle and not worth
        keeping; an empty one; a new one; or, of as many as may be idle, the one that has been so longest, the source last. None
        that would be too large beside those that are taken, and of another owner's the place alone."""
        idle = [seat for seat in self._idle if self._fits(self._taken, max(n_tokens, seat.n_longest))]
        seat = next((seat for seat in idle if not seat.n_held), None)
        if source and source in idle and not self._is_worth_keeping(source, n, n_tokens):
            seat = source
        elif not seat and len(self._idle) >= self._most_idle:
            longest = [each for each in idle if each is not source] or idle
            seat = longest[0] if longest else self._idle.pop(0)
        if seat in self._idle:
            self._idle.remove(seat)
            if seat.owner == owner:
                return seat
        return Seat(self._new(), owner)

    def _is_worth_keeping(self, source: Seat, n: int, n_tokens: int) -> bool:
        """Beside a copy of n of its tokens: for what else it holds, of which there is more than that or room for both."""
        has_room = self._fits((*self._taken, source), n_tokens)
        return source.n_held - n >= (LEAST_SHARED if has_room else n + 1)

    def _fits(self, seats: Sequence[Seat], n_tokens: int) -> bool:
        """Whether one of so many tokens may be beside those, if there are any."""
        sizes = [round_up(n_tokens, GRAIN), *(each.n_most for each in seats)]
        for n in {*sizes} - {*self._bytes}:
            if seats:
                self._bytes[n] = seats[0].n_bytes(n)
        return not seats or sum(self._bytes[n] for n in sizes) <= self.most_bytes
