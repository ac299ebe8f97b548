"""The race view: two recorded runs replayed side by side in slow motion."""

from rich.console import ConsoleDimensions

from specdec.bench.measure import RecordedRun
from specdec.bench.race import Race, format_seconds
from specdec.events import Prompt
from specdec.ui.panel import InteractiveView
from specdec.ui.plain_views import ModelLabels
from specdec.ui.signals import signals
from specdec.ui.terminal_window import MIN_ROWS, MIN_WIDTH, Window
from specdec.ui.text_layout import Row, StyledText, cell_width, first_fitting

FRAME_INTERVAL_S = 0.05
MIN_SHOW_S = 8.0  # shortest replay of the slower run; the longest is 2.5 times that
END_HOLD_S = 3.0  # display of the finished race
SLOWDOWN_FACTORS = [factor * 10**n for n in range(6) for factor in (1, 2, 5)]  # relative to the measured time
MIN_SIDE_BY_SIDE_WIDTH = 72  # cells that two texts next to each other need
MAX_RACE_WIDTH = 120
MAX_TEXT_ROWS = 18


class RunReplay:
    """The replay of one recorded run up to a point in time, with the text and the counts at that point."""

    def __init__(self, name: str, run: RecordedRun) -> None:
        """Start with the prompt, before the first pass."""
        self.name, self.end_seconds, self._steps = name, run.end_seconds, run.steps
        self.styled_text = StyledText()
        self.n_passes = self.n_tokens = 0
        for event in run.events:
            if isinstance(event, Prompt):
                self.styled_text.add(event.text, "prompt")
        self.n_total_tokens = max(run.statistics.n_generated, 1)

    @property
    def is_done(self) -> bool:
        """Whether all passes of the run have been replayed."""
        return self.n_passes == len(self._steps)

    @property
    def total_seconds(self) -> float:
        """The measured decoding time of the whole run, in seconds."""
        return self.end_seconds[-1] if self.end_seconds else 0.0

    def advance_to(self, seconds: float) -> bool:
        """Replay the passes that ended within the run's first `seconds`; return whether any of them were new."""
        before = self.n_passes
        while not self.is_done and self.end_seconds[self.n_passes] <= seconds:
            self.styled_text.add_step(self._steps[self.n_passes])
            self.n_tokens += len(self._steps[self.n_passes].tokens)
            self.n_passes += 1
        return self.n_passes > before

    def format_statistics(self, seconds: float, width: int) -> str:
        """Return the replayed tokens and passes and the elapsed time in the longest wording that fits `width` cells."""
        elapsed = format_seconds(min(seconds, self.total_seconds))
        done = "done: " * self.is_done
        forms = (
            f"{done}{self.n_tokens} tokens in {self.n_passes} passes, {elapsed}",
            f"{self.n_tokens} tokens, {self.n_passes} passes, {elapsed}",
            f"{self.n_tokens} tokens, {elapsed}",
            f"{self.n_tokens}, {elapsed}",
        )
        return first_fitting(forms, width)


class RaceView(InteractiveView):
    """A view that replays the target alone and the pair side by side in slow motion, each with its text and progress.

    Keys pause, step, change the speed and skip to the end. The rows are a function of the elapsed time of the race. The pair's
    text stays on the screen at the end.
    """

    SPEED, END = "faster, slower", "to the end"

    def __init__(self, race: Race, labels: ModelLabels, window: Window) -> None:
        """Choose the slowdown, and start before the first pass of both runs."""
        super().__init__(window, labels)
        self._race = race
        self._replays = RunReplay(f"{labels.target} alone", race.alone), RunReplay(labels.pair, race.pair)
        self._duration = max(replay.total_seconds for replay in self._replays)
        self.slowdown = next(
            (factor for factor in SLOWDOWN_FACTORS if factor * self._duration >= MIN_SHOW_S), SLOWDOWN_FACTORS[-1]
        )
        self._race_seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether both runs have been replayed to their end."""
        return all(replay.is_done for replay in self._replays)

    def play(self) -> None:
        """Play the race in the window until END_HOLD_S after both runs have ended, or until the user or a signal ends it."""
        with self._window.session(self._final_page):
            self._window.draw(self.render)
            last, left = self._clock(), END_HOLD_S
            while left > 0 and not (self.ended or signals.end_signal):
                self._window.sleep(FRAME_INTERVAL_S)
                passed = self._clock() - last
                last += passed
                if self.is_over:
                    left -= 0 if self._is_paused else passed
                elif not self._is_paused:
                    self._race_seconds += passed / self.slowdown
                is_new = self.poll()
                has_moved = [replay.advance_to(self._race_seconds) for replay in self._replays]
                if is_new or any(has_moved):
                    self._window.draw(self.render)
                    last = self._clock()  # Ctrl-Z may have stopped the process

    def handle_input(self, action: str) -> None:
        """Do what a key stands for, the race's own actions included."""
        super().handle_input(action)
        i = SLOWDOWN_FACTORS.index(self.slowdown)
        if action == "step":
            self._is_paused = True
            ends = [replay.end_seconds[replay.n_passes] for replay in self._replays if not replay.is_done]
            self._race_seconds = min(ends, default=self._race_seconds)
        elif action == "faster":
            self.slowdown = SLOWDOWN_FACTORS[max(i - 1, 0)]
        elif action == "slower":
            self.slowdown = SLOWDOWN_FACTORS[min(i + 1, len(SLOWDOWN_FACTORS) - 1)]

    def _final_page(self) -> str:
        pair = self._replays[1]
        pair.advance_to(self._duration)
        return self._format_page(pair.styled_text) + "\n"

    # Rendering

    def render(self, size: ConsoleDimensions) -> list[Row]:
        """Return the rows of the race view for a terminal size, each a list of (text, style) pairs."""
        width, height = min(size.width, MAX_RACE_WIDTH), size.height
        if height < MIN_ROWS or width < MIN_WIDTH:
            return [[(replay.format_statistics(self._race_seconds, width), "plain")] for replay in self._replays][
                -max(height - 1, 1) :
            ]
        below = [self._status_row(width), *self._legend(width, 2 if height >= 16 else 1)]
        free = height - 1 - len(below)
        return [
            *(self._render_side_by_side(width, free) if width >= MIN_SIDE_BY_SIDE_WIDTH else self._render_stacked(width, free)),
            *below,
        ]

    def _render_side_by_side(self, width: int, height: int) -> list[Row]:
        n = min(height - 4, MAX_TEXT_ROWS)
        left = width // 2
        blocks = [
            [
                self._painter.rule(side_width, "╭─╮", replay.name, ""),
                *self._text_rows(replay.styled_text, side_width, n),
                self._painter.progress_bar(side_width, replay.n_tokens / replay.n_total_tokens),
                self._painter.frame_row(
                    [(replay.format_statistics(self._race_seconds, side_width - 4), "strong" if replay.is_done else "plain")],
                    side_width - 4,
                ),
                self._painter.rule(side_width, "╰─╯", "", keys),
            ]
            for replay, side_width, keys in zip(self._replays, (left, width - left), ("", self._key_hint()), strict=True)
        ]
        return [[*a, *b] for a, b in zip(*blocks, strict=True)]

    def _render_stacked(self, width: int, height: int) -> list[Row]:
        n = min((height - 3) // 2, MAX_TEXT_ROWS)
        rows: list[Row] = []
        for replay, corners in zip(self._replays, ("╭─╮", "├─┤"), strict=True):
            name = replay.name.removeprefix(f"{self._labels.target} ")
            rows += [
                self._painter.rule(
                    width, corners, name, replay.format_statistics(self._race_seconds, width - 10 - cell_width(name))
                )
            ]
            rows += self._text_rows(replay.styled_text, width, n)
        return [*rows, self._painter.rule(width, "╰─╯", "", self._key_hint())]

    def _key_hint(self) -> str:
        return "? keys" if self._window.has_keys else ""

    def _status_row(self, width: int) -> Row:
        """Return the row below the texts: the slow-motion factor, or at the end the result of the race."""
        if self.is_over:
            return [
                (self._race.summary if cell_width(self._race.summary) <= width else f"{self._race.speedup:.1f} times", "strong")
            ]
        slow = f"slow motion, {self.slowdown:,} times slower" if self.slowdown > 1 else "as fast as it ran"
        forms = [f"{slow}; each was measured alone, both on the same seed", f"{slow}; each measured alone", slow]
        if self._is_paused:
            forms = [f"paused; {form}" for form in forms] + ["paused"]
        return [(first_fitting(forms, width), "plain")]
