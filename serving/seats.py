"""Caches of texts: those that run have one each, and those that have ended keep theirs for who goes on with them."""

from collections.abc import Callable

from ..drafting.team import Team


class Seat:
    """The models with caches of a text's own. n_reserved: tokens that it may grow to; n_longest: that it has held."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.n_reserved = self.n_longest = 0

    def n_cached(self, prompt: list[int]) -> int:
        """How many of a prompt's tokens need not run again."""
        return max(len(prompt) - 1, 0) - self.team.target.unread(prompt)

    @property
    def n_bytes(self) -> int:
        """What its caches take, or may come to take."""
        n = max(self.n_reserved, self.n_longest)
        models = self.team.models.values()
        return sum(model.text_bytes(min(n, model.n_positions), True) for model in models)


class Seats:
    """Seats whose caches take at most so many bytes, or one alone. The one that has been idle longest is dropped first."""

    def __init__(self, new: Callable[[], Team], n_bytes: int) -> None:
        self._new, self._most = new, n_bytes
        self._idle, self._taken = list[Seat](), list[Seat]()  # the first has been idle longest

    def take(self, prompt: list[int], n_tokens: int) -> Seat | None:
        """A seat, the one that holds most of the prompt if any does, for a text of up to so many tokens. None: no room yet."""
        seat = self._best(prompt)
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
        return sum(each.n_bytes for each in (*self._idle, *self._taken, seat))
