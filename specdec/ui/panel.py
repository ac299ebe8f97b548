"""Events to a live panel: the text, and under it what was guessed and what became of it. Knows no models."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import ConsoleDimensions

from specdec.engine.decoding import Event, Prefill, Prompt, Proposal, Statistics, Step
from specdec.ui.output import Roles, printable, time_left
from specdec.ui.signals import signals
from specdec.ui.terminal_window import MIN_ROWS, MIN_WIDTH, WIDEST, Window, fitting
from specdec.ui.text_layout import Row, Run, Story, cut, last_cells, longest, width_of, word_at_end, word_at_start

REFRESH_SECONDS = 0.1, 0.5  # between frames, at the least and at the most
RENDER_SHARE = 0.01  # of the time that frames may take: where one is slow, there are fewer
LOOK_SECONDS = 0.03  # between looks at the keys and at the terminal's size
UNSEEN_SECONDS = 0.25  # a text that is over by then is not worth a panel
SEEN_SECONDS, SEEN_TOKENS = 4.0, 200  # that a text of so many tokens, or of less where no more are asked for, takes at the least
LEAST_WAIT_SECONDS, CLOCK_SECONDS = 0.02, 1e-6  # that is waited; that a clock tells
BURST_SECONDS = 0.1  # so far ahead of what is seen a text is written
FIRST_PASSES, FIRST_TOKENS = 4, 12  # that are taken to have been, where few were: of tokens a pass
LONGEST_HOLD_SECONDS = 3600.0  # at a pace
GUESS_SECONDS = 0.4  # that a guess is in sight before it is checked, where one step is taken
PACES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # steps a second; beyond the last, full speed
ROWS_OF_ALL = 10  # from which on there is room for the legend and the progress
WIDTH_OF_HISTOGRAM = 92  # within the frame, from which on there is room for one
SIDE_WIDTH, BAR_WIDTH = 26, 12
MOST_TEXT_ROWS, MOST_PASSES = 14, 8
SHORT_KEYS = "space pause", "→ step", "+ - speed", "q end"
FEW_GUESSES, MANY_PASSES = 0.25, 16  # share of passes with guesses below which, from so many passes on, the rows are the text's
CONTEXT = 100  # characters, of which the last word of a text is one


class Judged(NamedTuple):
    """A pass over a proposal, and the end of the text before it."""

    before: str
    step: Step


class Watched:
    """What a panel and a race share: a window, in which keys pause, explain and end it, and the colours' meaning.

    ended: somebody has asked for the end.
    """

    SPEED, END, N_MEANINGS = "", "", 2  # what + and - change, what q does, and how many colours the legend tells of

    def __init__(self, window: Window, roles: Roles) -> None:
        self._window, self._roles = window, roles
        self._console, self._pen, self._clock = window.console, window.pen, window.clock
        self._is_paused = self._shows_keys = self.ended = False

    def _look(self) -> bool:
        """At the keys and the terminal; whether there is something new to see."""
        wishes = self._window.wishes()
        for wish in wishes:
            self._obey(wish)
        return bool(wishes) or self._window.is_stale or signals.stop_asked

    def _obey(self, wish: str) -> None:
        if wish == "pause":
            self._is_paused = not self._is_paused
        elif wish == "explain":
            self._shows_keys = not self._shows_keys
        elif wish == "end":
            self.ended = True

    def _meanings(self, n: int) -> list[Row]:
        """What the first n colours mean, in plain words, the longest form first."""
        green = "underlined" if self._console.no_color else "green"
        by, target = self._roles.guessed, self._roles.target
        forms = (
            (f"{green}: guessed {by} and confirmed", f"plain: {target}'s own", "struck: guessed wrong"),
            (f"{green}: guessed {by}, confirmed", f"plain: {target}'s own", "struck: wrong"),
            (f"{green}: guessed right", "plain: its own", "struck: wrong"),
            ("guessed right", "its own", "wrong"),
        )
        return [list(zip(form, ("accepted", "target", "rejected"), strict=True))[:n] for form in forms]

    def _legend(self, width: int, n: int) -> list[Row]:
        """What the colours mean, or the keys, in n rows."""
        forms: list[Row] = self._meanings(self.N_MEANINGS) if self._roles.guessed else [[]]
        if self._shows_keys:
            long = "space: pause", "→: one pass", f"+ -: {self.SPEED}", f"q: {self.END}", "?: the colours"
            forms = [[(text, "plain") for text in form] for form in (long, SHORT_KEYS)]
        rows = fitting(forms, width, n)
        return [*rows, *([[]] * (n - len(rows)))]

    def _text(self, story: Story, width: int, n: int) -> list[Row]:
        """The end of a text, in n rows of a frame of that width."""
        rows = story.tail(width - 4, n, self._is_paused)
        return [self._pen.framed(row, width - 4) for row in [*rows, *([[]] * (n - len(rows)))]]

    def _on_page(self, story: Story, are_explained: bool = True) -> str:
        """A text that is over, for the terminal's first page, and what its colours mean."""
        story.end()
        width = min(self._console.width, WIDEST)
        rows = story.rows(width)
        if are_explained:
            rows = [*rows, [], *fitting(self._meanings(2), width, 2)]
        return "".join([self._pen.styled(row).rstrip(" ") + "\n" for row in rows])


class LivePanel(Watched):
    """The end of the story, the last passes as lines of guesses and corrections, and the running figures.

    The rows are a function of the events that it was shown; frames come when due, from this thread. pace: steps a second at most,
    each shown guessed and then checked; 0 is full speed, at which a text of a moment has no panel; None is full speed but for a
    text that would be over before anybody has seen it: its passes come evenly, until a key is pressed. Keys pause, step, change
    the pace and end the text. In the background nothing is drawn, and Ctrl-Z takes the panel off the screen until the job is in
    the foreground again.
    """

    SPEED, END, N_MEANINGS = "pace", "end, keep the text", 3

    def __init__(self, window: Window, statistics: Statistics, max_tokens: int, roles: Roles, pace: float | None = 0.0) -> None:
        super().__init__(window, roles)
        self._shown = window.shown(self._whole_text)
        self._statistics = statistics
        self._max_tokens, self._pace, self._is_even = max_tokens, pace or 0.0, pace is None
        self._next_step = 0.0  # when it is due, at an even pace
        self._story = Story()
        self._tail: str | None = None  # of the text, once it has begun
        self._prefill: Prefill | None = None  # while a text is read
        self._begin = 0.0
        self._unread: list[Step] = []  # not yet in the story
        self._passes: deque[Judged] = deque(maxlen=MOST_PASSES)
        self._proposed: list[str] | None = None
        self._next_frame = self._next_look = 0.0
        self._steps_asked = 0

    @property
    def was_seen(self) -> bool:
        return self._window.was_seen

    def __enter__(self) -> "LivePanel":
        self._shown.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._shown.__exit__(*raised)

    def _whole_text(self) -> str:
        self._read()
        return self._on_page(self._story, bool(self._roles.guessed and self._statistics.n_drafted))

    def show(self, event: Event | Prefill) -> None:
        now = self._clock()
        if isinstance(event, Prefill | Prompt) and self._tail is None:
            self._tail = event.text[-CONTEXT:]
            self._story.add(event.text, "prompt")
            self._begin, self._next_frame = now, now + UNSEEN_SECONDS
        if isinstance(event, Prefill):
            self._begin = self._begin if self._prefill else now
            self._prefill = event
            if self._is_due(now):
                self._frame()
            return
        self._prefill = None
        if isinstance(event, Prompt):
            self._begin = self._next_step = now
            if self._pace or self._is_even or event.seconds > UNSEEN_SECONDS:
                self._frame()
        elif isinstance(event, Proposal):
            if event.tokens and (self._is_due(now) or self._gap > 2 * LEAST_WAIT_SECONDS):
                self._proposed = event.pieces
                self._frame()
                self._wait(at_step=False)
            self._proposed = None
        else:
            self._unread.append(event)
            self._passes.append(Judged(self._tail or "", event))
            self._tail = ((self._tail or "") + event.text)[-CONTEXT:]
            self._next_step += self._gap
            if self._is_due(now):
                self._frame()
                self._wait(at_step=True)

    # When

    def _is_due(self, now: float) -> bool:
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look()
        is_slow = bool(self._pace) or self._is_paused or self._next_step - now > LEAST_WAIT_SECONDS  # frames wait to be seen
        return now >= self._next_frame or is_slow or signals.stop_asked

    @property
    def _gap(self) -> float:
        """Seconds between passes at a pace, or at an even one, at which the text takes as long as is left of SEEN_SECONDS."""
        if not self._is_even:
            return min(1 / self._pace, LONGEST_HOLD_SECONDS) if self._pace else 0.0
        s, n_tokens = self._statistics, min(self._max_tokens, SEEN_TOKENS)
        left = SEEN_SECONDS * n_tokens / SEEN_TOKENS - (self._next_step - self._begin)
        a_pass = (s.n_generated + FIRST_TOKENS) / (s.target_passes + FIRST_PASSES)
        return max(left, 0.0) / max((n_tokens - s.n_generated) / a_pass, 1.0)

    def _look(self) -> bool:
        is_new = super()._look()
        self._next_frame = 0.0 if is_new else self._next_frame
        return is_new

    def _obey(self, wish: str) -> None:
        self._is_even, self._next_step = False, 0.0
        super()._obey(wish)
        if wish == "pause":
            self._steps_asked = 0
        elif wish == "step":
            self._steps_asked += self._is_paused
            self._is_paused = True
        elif wish == "faster":
            self._pace = next((pace for pace in PACES if pace > self._pace), 0.0) if self._pace else 0.0
        elif wish == "slower":
            self._pace = next((pace for pace in reversed(PACES) if not self._pace or pace < self._pace), PACES[0])

    def _frame(self) -> None:
        begin = self._clock()
        self._window.draw(self.rows)
        end = self._clock()
        shortest, longest = REFRESH_SECONDS
        self._next_frame = end + min(max(shortest, (end - begin) / RENDER_SHARE), longest)

    def _wait(self, at_step: bool) -> None:
        """Until the frame has been in sight for long enough."""
        begin = self._clock()
        while not (self.ended or signals.asked):
            left = self._seconds_in_sight(at_step, begin) - (self._clock() - begin)
            if left <= CLOCK_SECONDS:
                break
            self._window.sleep(min(left, LOOK_SECONDS))
            if self._look():
                self._window.draw(self.rows)
        if at_step:
            self._steps_asked = max(0, self._steps_asked - 1)

    def _seconds_in_sight(self, at_step: bool, since: float) -> float:
        if self._is_paused:
            if not at_step:
                return GUESS_SECONDS
            return 0.0 if self._steps_asked else LONGEST_HOLD_SECONDS
        if at_step and not self._pace:
            return self._next_step - since
        return self._gap if at_step and not self._passes[-1].step.draft_tokens else self._gap / 2

    # What

    def _read(self) -> None:
        """Take into the story what came since the last time."""
        for step in self._unread:
            self._story.go_on(step)
        self._unread.clear()

    def rows(self, size: ConsoleDimensions) -> list[Row]:
        """The panel for a terminal of that size, a row of runs for each of its rows; the last run of a framed one is its edge."""
        self._read()
        width, height = min(size.width, WIDEST), size.height
        if height < MIN_ROWS or width < MIN_WIDTH:
            rows = [*self._story.tail(width, max(height - 2, 1), self._is_paused), [(self._figures(width), "plain")]]
            return rows[-max(height - 1, 1) :]
        is_all = height >= ROWS_OF_ALL
        legend = self._legend(width, 2 if height >= 16 else 1) if is_all else []
        has_passes = bool(self._roles.guessed)
        free = height - 1 - len(legend) - (4 if is_all else 2) - has_passes
        n_passes = min(max(1, free // 3), MOST_PASSES) if has_passes else 0
        inner, n_text = width - 4, min(free - n_passes, MOST_TEXT_ROWS)
        if self._has_few_guesses:
            n_text, n_passes = n_text + n_passes, 0
        rows = [self._pen.rule(width, "╭─╮", self._roles.pair, self._speed()), *self._text(self._story, width, n_text)]
        if has_passes:
            rows.append(self._pen.rule(width, "├─┤", *self._heading(width)))
        if n_passes:
            rows += [self._pen.framed(row, inner) for row in self._guesses(inner, n_passes)]
        if is_all:
            share = self._prefill.share if self._prefill else self._statistics.n_generated / max(1, self._max_tokens)
            rows += [self._pen.progress(width, share), self._pen.framed([(self._figures(inner), "plain")], inner)]
        words = "paused" if self._is_paused else "" if is_all else self._figures(width - 6)
        keys = "? keys" if self._window.has_keys and is_all else ""
        return [*rows, self._pen.rule(width, "╰─╯", words, keys), *legend]

    @property
    def _has_few_guesses(self) -> bool:
        """Whether so few passes had guesses that their lines would show little but single tokens."""
        s = self._statistics
        return s.target_passes >= MANY_PASSES and sum(s.drafted_histogram[1:]) < FEW_GUESSES * s.target_passes

    def _speed(self) -> str:
        """The pace, or how fast the text is written."""
        if self._prefill or self._is_paused:
            return ""
        return f"{self._pace:g} passes a second" if self._pace else f"{self._statistics.tokens_per_second:,.0f} tok/s"

    def _heading(self, width: int) -> tuple[str, str]:
        """What the lines below it are, as far as it fits."""
        by, target = self._roles.guessed, self._roles.target
        if self._has_few_guesses:
            sentences: tuple[str, ...] = (
                f"few guesses {by}: more would cost more than they gain",
                "few guesses: more would not pay",
                "few guesses",
            )
            return longest(sentences, width - 10), ""
        sentences = (
            f"guessed {by}; {target} checks a line in one pass",
            f"guessed {by}; a line is one pass",
            "guesses; a line is checked in one pass",
            "guesses; a line is one pass",
            "a line is one pass",
        )
        counts = "guesses right in a pass" if width - 4 >= WIDTH_OF_HISTOGRAM else "tokens"
        return longest(sentences, width - 10 - len(counts)), counts

    def _guesses(self, width: int, n: int) -> list[Row]:
        """The last n passes, the newest at the bottom, and how many tokens they brought; beside them a histogram."""
        histogram = self._histogram(n) if width >= WIDTH_OF_HISTOGRAM else []
        room = width - 5 - (SIDE_WIDTH + 3 if histogram else 0)
        lines = [(self._judged(judged, room), f"+{len(judged.step.tokens)}") for judged in list(self._passes)[-n:]]
        if self._proposed is not None:
            lines = [*lines, (self._guess(self._proposed, room), "?")][-n:]
        lines += [([], "")] * (n - len(lines))
        rows = [[*line, (" " * (room + 5 - width_of(line) - len(gain)), "plain"), (gain, "strong")] for line, gain in lines]
        return [[*row, ("   ", "plain"), *bar] for row, bar in zip(rows, histogram, strict=True)] if histogram else rows

    def _judged(self, judged: Judged, room: int) -> Row:
        """Guesses that stood, the one that did not and those behind it, and the target's own token in its place."""
        before, step = judged
        accepted, own = "".join(step.pieces[: step.n_accepted]), "".join(step.pieces[step.n_accepted :])
        first, *others = [*step.wrong, ""]
        rest = "".join(others)
        wrong = first + (word_at_start(rest) if word_at_end(first) or first.isspace() else "")
        rest = rest[len(wrong) - len(first) :]
        if word_at_start(wrong) and word_at_start(own):  # two endings of one word: show it whole, twice
            begun = word_at_end(accepted or before)
            accepted = accepted[: len(accepted) - len(begun)] if accepted else ""
            wrong, own = apart(accepted, begun + wrong), begun + own
        own = apart(wrong + rest, own)
        return self._line(before, room, (accepted, "accepted"), (wrong, "rejected"), (rest, "unread"), (own, "target"))

    def _guess(self, pieces: list[str], room: int) -> Row:
        """A proposal that is being checked."""
        return self._line(self._tail or "", room, ("".join(pieces), "proposed"))

    def _line(self, before: str, room: int, *runs: Run) -> Row:
        """Runs in a line, with the beginning of a word that they go on with; what was guessed in vain is the first to be cut."""
        line_break, space, more = "↵␣…" if self._pen.is_utf else ("\\n", "_", "...")
        begun = word_at_end(before) if word_at_start(runs[0][0]) else ""
        row = [
            (space if text == " " else printable(text).replace("\n", line_break).replace("\t", " "), kind)
            for text, kind in [(begun, "faint"), *runs]
            if text
        ]
        row = [(row[0][0].lstrip(), row[0][1]), *row[1:]] if row else []
        left = room - width_of([run for run in row if run[1] != "unread"])
        return last_cells([(cut(text, left, more), kind) if kind == "unread" else (text, kind) for text, kind in row], room, more)

    def _figures(self, width: int) -> str:
        """How far it is and how well it goes, in the longest form that fits."""
        s = self._statistics
        if self._prefill:
            done, left = f"{self._prefill.share:.0%}", time_left(self._clock() - self._begin, self._prefill.share)
            what = "all of" if self._passes else "the prompt of"  # anew
            tokens = f"{what} {len(self._prefill.tokens)} tokens"
            return longest([f"reading {tokens}: {done}{left}", f"reading: {done}{left}", done], width)
        done, times = f"{s.n_generated}/{self._max_tokens}", f"{s.tokens_per_pass:.1f}"
        forms = [f"{done} tokens", done]
        if self._roles.guessed:
            share = f"{s.acceptance_rate:.0%}"
            experts = f"   {s.experts_per_token:.1f} experts a token instead of {s.experts_alone}"
            forms = [
                *[f"{done} tokens   {share} of the guesses right   {times} tokens a pass{experts}"] * bool(s.experts_alone),
                f"{done} tokens   {share} of the guesses right   {times} tokens a pass instead of 1",
                f"{done} tokens   {share} of the guesses right   {times} tokens a pass",
                f"{done}   {share} right   {times} tokens a pass",
                f"{done} {share} {times}/pass",
                *forms,
            ]
        return longest(forms, width)

    def _histogram(self, n: int) -> list[Row]:
        """Passes by how many guesses stood, in at most n rows; the long ones share one."""
        counts = self._statistics.accepted_histogram or [0]
        total = max(1, sum(counts))
        rows: list[Row] = []
        for first, last in bins(len(counts), max(n, 2))[:n]:
            share = sum(counts[first : last + 1]) / total
            label = f"{first}" if first == last else f"{first}-{last}"
            bar = ("█" if self._pen.is_utf else "#") * round(share * BAR_WIDTH)
            rows.append([(f"{label:>7} ", "faint"), (f"{bar:<{BAR_WIDTH}}", "plain"), (f" {share:4.0%}", "faint")])
        return rows + [[(" " * SIDE_WIDTH, "plain")] for _ in range(n - len(rows))]


def ahead(events: Iterable[Event | Prefill], clock: Callable[[], float] = time.perf_counter) -> Iterator[Event | Prefill]:
    """The events, written some time ahead of what is seen: who waits between them makes no pass slower.

    Those of a text whose passes take as long come as they are.
    """
    burst, begin, is_quick = list[Event | Prefill](), clock(), False
    for event in events:
        if isinstance(event, Step):
            is_quick = event.seconds < BURST_SECONDS / 2
        burst.append(event)
        if not is_quick or clock() - begin > BURST_SECONDS:
            yield from burst
            burst, begin = [], clock()
    yield from burst


def bins(n: int, most: int) -> list[tuple[int, int]]:
    """The numbers below n in at most so many bins, >= 2, first and last of each: one by one, or growing by a factor."""
    if n <= most:
        return [(i, i) for i in range(n)]
    for factor in range(2, n + 1):
        starts = [0, 1]
        while starts[-1] * factor < n:
            starts.append(starts[-1] * factor)
        if len(starts) <= most:
            break
    return [(first, after - 1) for first, after in pairwise([*starts, n])]


def apart(before: str, text: str) -> str:
    """The text with a space in front, if it needs one."""
    return text if not before or before.endswith(" ") or text.startswith(" ") else f" {text}"
