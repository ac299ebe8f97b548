"""Caches of texts: those that run have one each, and those that have ended keep theirs for who goes on with them."""

from collections.abc import Callable

from ..drafting.team import Team
from ..machine.vectors import round_up

GRAIN = 128  # tokens, by which sizes of caches are told


class Seat:
    """The models with caches of a text's own. n_reserved: tokens that it may grow to; n_longest: that it has held."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.n_reserved = self.n_longest = 0

    def n_cached(self, prompt: list[int]) -> int:
        """How many of a prompt's tokens need not run again."""
        return max(len(prompt) - 1, 0) - self.team.target.unread(prompt)

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

    n_idle: how many may be idle; where there are as many, the one that has been so longest is taken for another talk.
    """

    def __init__(self, new: Callable[[], Team], n_bytes: int, n_idle: int) -> None:
        self._new, self._most, self._most_idle = new, n_bytes, n_idle
        self._bytes: dict[int, int] = {}  # of a seat, by `Seat.n_most`
        self._idle, self._taken = list[Seat](), list[Seat]()  # the first has been idle longest

    def take(self, prompt: list[int], n_tokens: int) -> Seat | None:
        """A seat, the one that holds most of the prompt if any does, for a text of up to so many tokens. None: no room yet."""
        seat = self._best(prompt)
        if not seat and len(self._idle) >= self._most_idle:
            seat = self._idle[0]
        if seat:
            self._idle.remove(seat)
        else:
            seat = Seat(self._new())
        seat.n_reserved = n_tokens
        while self._n_bytes(seat) > self._most:
            if self._idle:
                del self._idle[0]
            elif self._taken:
                self._put_back(seat)
                return None
            else:
                break
        self._taken.append(seat)
        return seat

    def give(self, seat: Seat, n_tokens: int) -> None:
        """A text of so many tokens has left; the next one may go on with it."""
        self._taken.remove(seat)
        seat.n_longest = max(seat.n_longest, n_tokens)
        self._put_back(seat)

    def drop(self, seat: Seat) -> None:
        self._taken.remove(seat)

    def _best(self, prompt: list[int]) -> Seat | None:
        """The idle seat that holds most of a prompt, unless more is lost of what else it holds."""
        found = [(seat.n_cached(prompt), i, seat) for i, seat in enumerate(self._idle)]
        n, _, seat = max(found, default=(0, 0, None), key=lambda each: each[:2])
        if seat and n and 2 * n >= seat.team.target.n_held:
            return seat
        return next((seat for seat in self._idle if not seat.team.target.n_held), None)

    def _put_back(self, seat: Seat) -> None:
        seat.n_reserved = 0
        self._idle.append(seat)

    def _n_bytes(self, seat: Seat) -> int:
        sizes = [each.n_most for each in (*self._idle, *self._taken, seat)]
        for n in {*sizes} - {*self._bytes}:
            self._bytes[n] = seat.n_bytes(n)
        return sum(self._bytes[n] for n in sizes)
