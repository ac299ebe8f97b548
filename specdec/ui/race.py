"""A race on a terminal: two texts that grow side by side in slow motion, each as it was measured. Knows no models."""

from rich.console import ConsoleDimensions

from specdec.bench.race import Lane, Race, seconds_told
from specdec.engine.decoding import Prompt
from specdec.ui.output import Roles
from specdec.ui.panel import Watched
from specdec.ui.signals import signals
from specdec.ui.terminal_window import MIN_ROWS, MIN_WIDTH, Window
from specdec.ui.text_layout import Row, Story, cells, longest

FRAME_SECONDS = 0.05
SHOW_SECONDS = 8.0  # at least, of the slower one; no more than 2.5 times that
LAST_SECONDS = 3.0  # that the end is in sight
FACTORS = [factor * 10**n for n in range(6) for factor in (1, 2, 5)]  # how many times slower than measured
SIDE_BY_SIDE = 72  # cells from which on two texts have room beside each other
WIDEST_OF_TWO = 120
MOST_TEXT_ROWS = 18


class Track:
    """One of the two as far as it has come."""

    def __init__(self, name: str, lane: Lane) -> None:
        self.name, self.ends, self._steps = name, lane.ends, lane.steps
        self.story = Story()
        self.n_passes = self.n_tokens = 0
        for event in lane.events:
            if isinstance(event, Prompt):
                self.story.add(event.text, "prompt")
        self.n_tokens_of_all = max(lane.statistics.n_generated, 1)

    @property
    def is_done(self) -> bool:
        return self.n_passes == len(self._steps)

    @property
    def seconds(self) -> float:
        """What it has taken in all, as measured."""
        return self.ends[-1] if self.ends else 0.0

    def go_to(self, seconds: float) -> bool:
        """Whether it has come any further."""
        before = self.n_passes
        while not self.is_done and self.ends[self.n_passes] <= seconds:
            self.story.go_on(self._steps[self.n_passes])
            self.n_tokens += len(self._steps[self.n_passes].tokens)
            self.n_passes += 1
        return self.n_passes > before

    def figures(self, seconds: float, width: int) -> str:
        """How far it is, in the longest form that fits."""
        took = seconds_told(min(seconds, self.seconds))
        done = "done: " * self.is_done
        forms = (
            f"{done}{self.n_tokens} tokens in {self.n_passes} passes, {took}",
            f"{self.n_tokens} tokens, {self.n_passes} passes, {took}",
            f"{self.n_tokens} tokens, {took}",
            f"{self.n_tokens}, {took}",
        )
        return longest(forms, width)


class RaceView(Watched):
    """The two texts, and how far each is; keys pause, step, change the speed and go to the end.

    The rows are a function of the seconds of the race that have gone by. What stays at the end is the text.
    """

    SPEED, END = "faster, slower", "to the end"

    def __init__(self, race: Race, roles: Roles, window: Window) -> None:
        super().__init__(window, roles)
        self._race = race
        self._tracks = Track(f"{roles.target} alone", race.alone), Track(roles.pair, race.pair)
        self._length = max(track.seconds for track in self._tracks)
        self.factor = next((factor for factor in FACTORS if factor * self._length >= SHOW_SECONDS), FACTORS[-1])
        self._seconds = 0.0  # of the race

    @property
    def is_over(self) -> bool:
        return all(track.is_done for track in self._tracks)

    def play(self) -> None:
        """Until both are at the end, or somebody has seen enough."""
        with self._window.shown(self._whole_text):
            self._window.draw(self.rows)
            last, left = self._clock(), LAST_SECONDS
            while left > 0 and not (self.ended or signals.asked):
                self._window.sleep(FRAME_SECONDS)
                passed = self._clock() - last
                last += passed
                if self.is_over:
                    left -= 0 if self._is_paused else passed
                elif not self._is_paused:
                    self._seconds += passed / self.factor
                is_new = self._look()
                has_moved = [track.go_to(self._seconds) for track in self._tracks]
                if is_new or any(has_moved):
                    self._window.draw(self.rows)
                    last = self._clock()  # Ctrl-Z may have come in between

    def _obey(self, wish: str) -> None:
        super()._obey(wish)
        slower = FACTORS.index(self.factor)
        if wish == "step":
            self._is_paused = True
            ends = [track.ends[track.n_passes] for track in self._tracks if not track.is_done]
            self._seconds = min(ends, default=self._seconds)
        elif wish == "faster":
            self.factor = FACTORS[max(slower - 1, 0)]
        elif wish == "slower":
            self.factor = FACTORS[min(slower + 1, len(FACTORS) - 1)]

    def _whole_text(self) -> str:
        pair = self._tracks[1]
        pair.go_to(self._length)
        return self._on_page(pair.story) + "\n"

    # What

    def rows(self, size: ConsoleDimensions) -> list[Row]:
        """The race for a terminal of that size, a row of runs for each of its rows."""
        width, height = min(size.width, WIDEST_OF_TWO), size.height
        if height < MIN_ROWS or width < MIN_WIDTH:
            return [[(track.figures(self._seconds, width), "plain")] for track in self._tracks][-max(height - 1, 1) :]
        below = [self._status(width), *self._legend(width, 2 if height >= 16 else 1)]
        free = height - 1 - len(below)
        return [*(self._beside(width, free) if width >= SIDE_BY_SIDE else self._stacked(width, free)), *below]

    def _beside(self, width: int, height: int) -> list[Row]:
        n = min(height - 4, MOST_TEXT_ROWS)
        left = width // 2
        blocks = [
            [
                self._pen.rule(room, "╭─╮", track.name, ""),
                *self._text(track.story, room, n),
                self._pen.progress(room, track.n_tokens / track.n_tokens_of_all),
                self._pen.framed([(track.figures(self._seconds, room - 4), "strong" if track.is_done else "plain")], room - 4),
                self._pen.rule(room, "╰─╯", "", keys),
            ]
            for track, room, keys in zip(self._tracks, (left, width - left), ("", self._keys()), strict=True)
        ]
        return [[*a, *b] for a, b in zip(*blocks, strict=True)]

    def _stacked(self, width: int, height: int) -> list[Row]:
        n = min((height - 3) // 2, MOST_TEXT_ROWS)
        rows: list[Row] = []
        for track, corners in zip(self._tracks, ("╭─╮", "├─┤"), strict=True):
            name = track.name.removeprefix(f"{self._roles.target} ")
            rows += [self._pen.rule(width, corners, name, track.figures(self._seconds, width - 10 - cells(name)))]
            rows += self._text(track.story, width, n)
        return [*rows, self._pen.rule(width, "╰─╯", "", self._keys())]

    def _keys(self) -> str:
        return "? keys" if self._window.has_keys else ""

    def _status(self, width: int) -> Row:
        """What is to be seen: the slow motion, and at the end what came of it."""
        if self.is_over:
            return [(self._race.sentence if cells(self._race.sentence) <= width else f"{self._race.ratio:.1f} times", "strong")]
        slow = f"slow motion, {self.factor:,} times slower" if self.factor > 1 else "as fast as it ran"
        forms = [f"{slow}; each was measured alone, both on the same seed", f"{slow}; each measured alone", slow]
        if self._is_paused:
            forms = [f"paused; {form}" for form in forms] + ["paused"]
        return [(longest(forms, width), "plain")]
