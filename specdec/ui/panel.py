"""The live panel: the text, and below it the draft tokens of each pass and their verification."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import ConsoleDimensions

from specdec.events import Event, PrefillProgress, Prompt, Proposal, Statistics, Step, ThoughtStep
from specdec.ui.plain_views import ModelLabels, format_thought, format_time_left, sanitize
from specdec.ui.signals import signals
from specdec.ui.terminal_window import MAX_FRAME_WIDTH, MIN_ROWS, MIN_WIDTH, Window, fit_items
from specdec.ui.text_layout import (
    Row,
    Run,
    StyledText,
    first_fitting,
    leading_word,
    row_width,
    trailing_word,
    truncate,
    truncate_left,
)

REFRESH_RANGE_S = 0.1, 0.5  # shortest and longest time between frames
MAX_RENDER_SHARE = 0.01  # of the time; slow frames come less often
POLL_INTERVAL_S = 0.03  # of the keys and the terminal's size
PANEL_DELAY_S = 0.25  # a shorter generation gets no panel
MIN_SHOW_S, MIN_SHOW_TOKENS = 4.0, 200  # shortest display of that many tokens under auto pacing; fewer tokens take less
MIN_WAIT_S, CLOCK_RESOLUTION_S = 0.02, 1e-6
MAX_BURST_S = 0.1  # how far generation runs ahead of the display
PRIOR_PASSES, PRIOR_TOKENS = 4, 12  # prior of the mean tokens per pass
MAX_HOLD_S = 3600.0
PROPOSAL_HOLD_S = 0.4  # display of a proposal before its verification, when single-stepping
PACES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # passes per second; beyond the last, full speed
MIN_FULL_ROWS = 10  # terminal rows that have room for the legend and the progress bar
MIN_HISTOGRAM_WIDTH = 92  # cells within the frame that have room for the histogram
HISTOGRAM_WIDTH, BAR_WIDTH = 26, 12
SOURCE_WIDTH, MIN_SOURCE_WIDTH = 13, 64  # cells of the column that names where a guess was looked up, and of a panel that has it
MAX_TEXT_ROWS, MAX_PASSES_SHOWN = 14, 8
SHORT_KEY_HINTS = "space pause", "→ step", "+ - speed", "q end"
CONTEXT_CHARACTERS = 100  # enough to contain the last word of the text


class VerifiedPass(NamedTuple):
    """A verified pass, with the end of the text that it continues.

    Attributes:
        context: Last characters of the text before the pass.
        step: Result of the pass.
    """

    context: str
    step: Step


class InteractiveView:
    """The base class of the live panel and the race view: a terminal window with keys and a legend of the text colours.

    The keys pause the view, switch between the legend and a list of the keys, and end the view.

    Attributes:
        ended: Whether the user has pressed the key that ends the view.
    """

    SPEED, END, N_MEANINGS = "", "", 2  # what + and - change, what q does, colours in the legend

    def __init__(self, window: Window, labels: ModelLabels) -> None:
        """Store the window and the names to show."""
        self._window, self._labels = window, labels
        self._console, self._painter, self._clock = window.console, window.painter, window.clock
        self._is_paused = self._shows_key_hints = self.ended = False
        self._more_key_hints = list[str]()

    def poll(self) -> bool:
        """Handle the keys pressed since the last call; return whether a key, a resize or Ctrl-Z requires a new frame."""
        actions = self._window.read_actions()
        for action in actions:
            self.handle_input(action)
        return bool(actions) or self._window.needs_redraw or signals.is_stop_requested

    def handle_input(self, action: str) -> None:
        """Do what a key stands for."""
        if action == "pause":
            self._is_paused = not self._is_paused
        elif action == "explain":
            self._shows_key_hints = not self._shows_key_hints
        elif action == "end":
            self.ended = True

    def _legend_forms(self, n: int) -> list[Row]:
        """Return alternative wordings of the legend of the first n text colours, the longest first, each as n styled items."""
        green = "underlined" if self._console.no_color else "green"
        by, target = self._labels.draft_label, self._labels.target
        forms = (
            (f"{green}: guessed {by} and confirmed", f"plain: {target}'s own", "struck: guessed wrong"),
            (f"{green}: guessed right", "plain: its own", "struck: wrong"),
            ("guessed right", "its own", "wrong"),
        )
        return [list(zip(form, ("accepted", "target", "rejected"), strict=True))[:n] for form in forms]

    def _legend(self, width: int, n: int) -> list[Row]:
        """Return the legend of the text colours, or the list of keys if the user has asked for it, as exactly n rows."""
        forms: list[Row] = self._legend_forms(self.N_MEANINGS) if self._labels.draft_label else [[]]
        if self._shows_key_hints:
            long = "space: pause", "→: one pass", f"+ -: {self.SPEED}", f"q: {self.END}", "?: the colours"
            forms = [[(text, "plain") for text in (*form, *self._more_key_hints)] for form in (long, SHORT_KEY_HINTS)]
        rows = fit_items(forms, width, n)
        return [*rows, *([[]] * (n - len(rows)))]

    def _text_rows(self, text: StyledText, width: int, n: int) -> list[Row]:
        """Return the end of a styled text as exactly n framed rows of `width` cells; missing rows are empty."""
        rows = text.tail(width - 4, n, self._is_paused)
        return [self._painter.frame_row(row, width - 4) for row in [*rows, *([[]] * (n - len(rows)))]]

    def _format_page(self, text: StyledText, are_explained: bool = True) -> str:
        """Return a whole text as coloured lines for the terminal's main screen, with the legend below it if `are_explained`.

        The text is finished first: the rest of an incomplete control sequence is appended to it.
        """
        text.finish()
        width = min(self._console.width, MAX_FRAME_WIDTH)
        rows = text.wrap(width)
        if are_explained:
            rows = [*rows, [], *fit_items(self._legend_forms(2), width, 2)]
        return "".join([self._painter.style_row(row).rstrip(" ") + "\n" for row in rows])


class LivePanel(InteractiveView):
    """The live panel of a generation: the end of its text, its last passes with draft tokens and corrections, and statistics.

    The rows are a function of the shown events; frames are drawn when due, by the calling thread. Keys pause, step, change the
    pace and end the generation. In the background nothing is drawn, and Ctrl-Z removes the panel until the job is in the
    foreground again.

    Args:
        window: The terminal window.
        statistics: Running statistics, updated by the caller.
        max_tokens: Limit of new tokens.
        labels: Names of the models.
        pace: Passes per second at most, each shown proposed and then verified. 0 is full speed, and a short text then has no
            panel. None is auto pacing: full speed, but a short text is spread evenly until a key is pressed.
    """

    SPEED, END, N_MEANINGS = "pace", "end, keep the text", 3

    def __init__(
        self, window: Window, statistics: Statistics, max_tokens: int, labels: ModelLabels, pace: float | None = 0.0
    ) -> None:
        """Create a panel without text; the window opens when the panel is entered."""
        super().__init__(window, labels)
        self._window_session = window.session(self._final_page)
        self._statistics = statistics
        self._max_tokens, self._pace, self._is_auto_paced = max_tokens, pace or 0.0, pace is None
        self._next_step_time = 0.0  # due time under auto pacing
        self._styled_text = StyledText()
        self._folded_text: StyledText | None = None  # the text without its thought; None before a thought
        self._is_thinking = self._is_thought_open = self._has_thought_text = False
        self._context: str | None = None  # end of the text; None before it begins
        self._prefill: PrefillProgress | None = None  # during a prefill
        self._begin = 0.0
        self._pending_steps: list[Step] = []  # not yet in the styled text
        self._passes: deque[VerifiedPass] = deque(maxlen=MAX_PASSES_SHOWN)
        self._proposed: list[str] | None = None
        self._next_frame_time = self._next_poll_time = 0.0
        self._steps_requested = 0

    @property
    def was_drawn(self) -> bool:
        """Whether any frame of the panel was drawn."""
        return self._window.was_drawn

    def __enter__(self) -> "LivePanel":
        """Open the window and the keyboard."""
        self._window_session.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Close the window and print the final page."""
        self._window_session.__exit__(*raised)

    def _final_page(self) -> str:
        self._flush_steps()
        return self._format_page(self._shown_text, bool(self._labels.draft_label and self._statistics.n_drafted))

    def show(self, event: Event | PrefillProgress) -> None:
        """Add a decoding event to the panel, draw a frame if one is due, and wait for as long as the pace or a pause requires."""
        now = self._clock()
        if isinstance(event, PrefillProgress | Prompt) and self._context is None:
            self._context = event.text[-CONTEXT_CHARACTERS:]
            self._styled_text.add(event.text, "prompt")
            self._begin, self._next_frame_time = now, now + PANEL_DELAY_S
        if isinstance(event, PrefillProgress):
            self._begin = self._begin if self._prefill else now
            self._prefill = event
            if self._is_due(now):
                self._draw_frame()
            return
        self._prefill = None
        if isinstance(event, Prompt):
            self._begin = self._next_step_time = now
            if self._pace or self._is_auto_paced or event.seconds > PANEL_DELAY_S:
                self._draw_frame()
        elif isinstance(event, Proposal):
            if event.tokens and (self._is_due(now) or self._pass_interval > 2 * MIN_WAIT_S):
                self._proposed = event.pieces
                self._draw_frame()
                self._wait(at_step=False)
            self._proposed = None
        else:
            self._pending_steps.append(event)
            if isinstance(event, ThoughtStep):
                pieces = [*map("".join, zip(event.thought_pieces, event.pieces, strict=True))]
                event = replace(event, pieces=pieces)
            self._passes.append(VerifiedPass(self._context or "", event))
            self._context = ((self._context or "") + event.text)[-CONTEXT_CHARACTERS:]
            self._next_step_time += self._pass_interval
            if self._is_due(now):
                self._draw_frame()
                self._wait(at_step=True)

    # Timing

    def _is_due(self, now: float) -> bool:
        if now >= self._next_poll_time:
            self._next_poll_time = now + POLL_INTERVAL_S
            self.poll()
        is_slow = bool(self._pace) or self._is_paused or self._next_step_time - now > MIN_WAIT_S  # frames are held
        return now >= self._next_frame_time or is_slow or signals.is_stop_requested

    @property
    def _pass_interval(self) -> float:
        """The seconds to show each pass: by the pace, or by what is left of MIN_SHOW_S under auto pacing; 0 at full speed."""
        if not self._is_auto_paced:
            return min(1 / self._pace, MAX_HOLD_S) if self._pace else 0.0
        s, n_tokens = self._statistics, min(self._max_tokens, MIN_SHOW_TOKENS)
        left = MIN_SHOW_S * n_tokens / MIN_SHOW_TOKENS - (self._next_step_time - self._begin)
        tokens_per_pass = (s.n_generated + PRIOR_TOKENS) / (s.target_passes + PRIOR_PASSES)
        return max(left, 0.0) / max((n_tokens - s.n_generated) / tokens_per_pass, 1.0)

    def poll(self) -> bool:
        """Handle the keys as every view does, and draw the next frame at once if one is required."""
        is_new = super().poll()
        self._next_frame_time = 0.0 if is_new else self._next_frame_time
        return is_new

    def handle_input(self, action: str) -> None:
        """Do what a key stands for, the panel's own actions included; it ends auto pacing."""
        self._is_auto_paced, self._next_step_time = False, 0.0
        super().handle_input(action)
        if action == "pause":
            self._steps_requested = 0
        elif action == "step":
            self._steps_requested += self._is_paused
            self._is_paused = True
        elif action == "faster":
            self._pace = next((pace for pace in PACES if pace > self._pace), 0.0) if self._pace else 0.0
        elif action == "thought":
            self._is_thought_open = not self._is_thought_open
        elif action == "slower":
            self._pace = next((pace for pace in reversed(PACES) if not self._pace or pace < self._pace), PACES[0])

    def _draw_frame(self) -> None:
        begin = self._clock()
        self._window.draw(self.render)
        end = self._clock()
        shortest, longest = REFRESH_RANGE_S
        self._next_frame_time = end + min(max(shortest, (end - begin) / MAX_RENDER_SHARE), longest)

    def _wait(self, at_step: bool) -> None:
        """Wait for as long as the pace or a pause requires the drawn frame to be shown, and handle keys meanwhile.

        Args:
            at_step: Whether the frame shows a verified step, rather than a proposal. A requested single step is then used up.
        """
        begin = self._clock()
        while not (self.ended or signals.end_signal):
            left = self._get_hold_seconds(at_step, begin) - (self._clock() - begin)
            if left <= CLOCK_RESOLUTION_S:
                break
            self._window.sleep(min(left, POLL_INTERVAL_S))
            if self.poll():
                self._window.draw(self.render)
        if at_step:
            self._steps_requested = max(0, self._steps_requested - 1)

    def _get_hold_seconds(self, at_step: bool, since: float) -> float:
        if self._is_paused:
            if not at_step:
                return PROPOSAL_HOLD_S
            return 0.0 if self._steps_requested else MAX_HOLD_S
        if at_step and not self._pace:
            return self._next_step_time - since
        return self._pass_interval if at_step and not self._passes[-1].step.draft_tokens else self._pass_interval / 2

    # Rendering

    def _flush_steps(self) -> None:
        """Append the text of the steps since the last call to the panel's styled text."""
        for step in self._pending_steps:
            if isinstance(step, ThoughtStep):
                self._add_thought(step)
            for text in filter(None, (self._styled_text, self._folded_text)):
                text.add_step(step)
        self._pending_steps.clear()

    def _add_thought(self, step: ThoughtStep) -> None:
        """Append a step's part of a thought to the text; at its end, append its time and length to the text and the folded text.

        The first part of a thought starts the folded text, a copy of the text that gets nothing else of the thought.
        """
        if not self._folded_text:
            self._styled_text.start_row()
            self._folded_text, self._more_key_hints = self._styled_text.copy(), ["t: the thought"]
        self._styled_text.add("".join(step.thought_pieces), "faint")
        self._is_thinking = not step.is_thought_end
        self._has_thought_text = self._has_thought_text or any(step.thought_pieces)
        if step.is_thought_end and self._has_thought_text:
            for text in (self._styled_text, self._folded_text):
                text.start_row()
                text.add(f"{format_thought(step)}\n\n", "faint")

    @property
    def _shown_text(self) -> StyledText:
        """The text to show: with the thought while it is generated or the user has opened it, otherwise the folded text."""
        is_open = self._is_thinking or self._is_thought_open
        return self._styled_text if is_open or not self._folded_text else self._folded_text

    def render(self, size: ConsoleDimensions) -> list[Row]:
        """Return the rows of the panel for a terminal size, each a list of (text, style) runs; a framed row ends with its edge.

        The steps since the last call are appended to the panel's text first.
        """
        self._flush_steps()
        width, height = min(size.width, MAX_FRAME_WIDTH), size.height
        if height < MIN_ROWS or width < MIN_WIDTH:
            rows = [
                *self._shown_text.tail(width, max(height - 2, 1), self._is_paused),
                [(self._format_statistics(width), "plain")],
            ]
            return rows[-max(height - 1, 1) :]
        is_full = height >= MIN_FULL_ROWS
        legend = self._legend(width, 2 if height >= 16 else 1) if is_full else []
        has_passes = bool(self._labels.draft_label)
        free = height - 1 - len(legend) - (4 if is_full else 2) - has_passes
        n_passes = min(max(1, free // 3), MAX_PASSES_SHOWN) if has_passes else 0
        inner, n_text = width - 4, min(free - n_passes, MAX_TEXT_ROWS)
        rows = [
            self._painter.rule(width, "╭─╮", self._labels.pair, self._format_speed()),
            *self._text_rows(self._shown_text, width, n_text),
        ]
        if has_passes:
            rows.append(self._painter.rule(width, "├─┤", *self._format_heading(width)))
            rows += [self._painter.frame_row(row, inner) for row in self._pass_rows(inner, n_passes)]
        if is_full:
            share = self._prefill.fraction if self._prefill else self._statistics.n_generated / max(1, self._max_tokens)
            rows += [
                self._painter.progress_bar(width, share),
                self._painter.frame_row([(self._format_statistics(inner), "plain")], inner),
            ]
        words = "paused" if self._is_paused else "" if is_full else self._format_statistics(width - 6)
        keys = "? keys" if self._window.has_keys and is_full else ""
        return [*rows, self._painter.rule(width, "╰─╯", words, keys), *legend]

    def _format_speed(self) -> str:
        """Return the pace, or at full speed the tokens per second, as text; "" while paused or during a prefill."""
        if self._prefill or self._is_paused:
            return ""
        return f"{self._pace:g} passes a second" if self._pace else f"{self._statistics.tokens_per_second:,.0f} tok/s"

    def _format_heading(self, width: int) -> tuple[str, str]:
        """Return the heading of the rows of passes: the longest explanation that fits, and the title of the column of counts."""
        draft_label, target = self._labels.draft_label, self._labels.target
        sentences = (
            f"guessed {draft_label}; {target} checks a line in one pass",
            "guesses; a line is checked in one pass",
            "a line is one pass",
        )
        counts = "guesses right in a pass" if width - 4 >= MIN_HISTOGRAM_WIDTH else "tokens"
        return first_fitting(sentences, width - 10 - len(counts)), counts

    def _pass_rows(self, width: int, n: int) -> list[Row]:
        """Return the last passes as n rows, the newest at the bottom, each with its number of tokens.

        A wide panel has a histogram of the accepted draft tokens next to the passes.
        """
        histogram = self._histogram_rows(n) if width >= MIN_HISTOGRAM_WIDTH else []
        source_width = SOURCE_WIDTH if self._statistics.accepted_by_source and width >= MIN_SOURCE_WIDTH else 0
        n_cells = width - 5 - (HISTOGRAM_WIDTH + 3 if histogram else 0) - source_width
        lines = [
            (self._verified_row(verified, n_cells), verified.step.draft_source, f"+{len(verified.step.tokens)}")
            for verified in list(self._passes)[-n:]
        ]
        if self._proposed is not None:
            lines = [*lines, (self._proposal_row(self._proposed, n_cells), "", "?")][-n:]
        lines += [([], "", "")] * (n - len(lines))
        rows = [
            [
                *line,
                (f"{'':{n_cells - row_width(line)}}{source if source_width else '':>{source_width}}", "faint"),
                (f"{n_tokens:>5}", "strong"),
            ]
            for line, source, n_tokens in lines
        ]
        return [[*row, ("   ", "plain"), *bar] for row, bar in zip(rows, histogram, strict=True)] if histogram else rows

    def _verified_row(self, verified: VerifiedPass, width: int) -> Row:
        """Return a verified pass as one row: accepted draft tokens, the rejected one, those after it, and the target's token."""
        before, step = verified
        accepted, target_text = "".join(step.pieces[: step.n_accepted]), "".join(step.pieces[step.n_accepted :])
        first, *others = [*step.wrong, ""]
        rest = "".join(others)
        wrong = first + (leading_word(rest) if trailing_word(first) or first.isspace() else "")
        rest = rest[len(wrong) - len(first) :]
        if leading_word(wrong) and leading_word(target_text):  # two endings of one word: show the whole word twice
            word_start = trailing_word(accepted or before)
            accepted = accepted[: len(accepted) - len(word_start)] if accepted else ""
            wrong, target_text = add_leading_space(accepted, word_start + wrong), word_start + target_text
        target_text = add_leading_space(wrong + rest, target_text)
        return self._make_row(
            before, width, (accepted, "accepted"), (wrong, "rejected"), (rest, "unread"), (target_text, "target")
        )

    def _proposal_row(self, pieces: list[str], width: int) -> Row:
        """Return the draft tokens of a proposal that is being verified as one row of at most `width` cells."""
        return self._make_row(self._context or "", width, ("".join(pieces), "proposed"))

    def _make_row(self, before: str, width: int, *runs: Run) -> Row:
        """Join (text, style) runs into one row of at most `width` cells, behind the start of the word that they continue.

        If the runs are too long, unread draft tokens are cut first, then the left end of the row.

        Args:
            before: The text before the runs.
            width: Cells of the row.
            *runs: The runs.
        """
        line_break, space, more = "↵␣…" if self._painter.is_utf else ("\\n", "_", "...")
        word_start = trailing_word(before) if leading_word(runs[0][0]) else ""
        row = [
            (space if text == " " else sanitize(text).replace("\n", line_break).replace("\t", " "), style)
            for text, style in [(word_start, "faint"), *runs]
            if text
        ]
        row = [(row[0][0].lstrip(), row[0][1]), *row[1:]] if row else []
        left = width - row_width([run for run in row if run[1] != "unread"])
        return truncate_left(
            [(truncate(text, left, more), style) if style == "unread" else (text, style) for text, style in row], width, more
        )

    def _format_statistics(self, width: int) -> str:
        """Return the progress of the prefill, or progress and acceptance of the generation, in the longest wording that fits."""
        s = self._statistics
        if self._prefill:
            done, left = f"{self._prefill.fraction:.0%}", format_time_left(self._clock() - self._begin, self._prefill.fraction)
            scope = "all of" if self._passes else "the prompt of"  # a later prefill, after a rewind
            tokens = f"{scope} {len(self._prefill.tokens)} tokens"
            return first_fitting([f"reading {tokens}: {done}{left}", f"reading: {done}{left}", done], width)
        done, times = f"{s.n_generated}/{self._max_tokens}", f"{s.tokens_per_pass:.1f}"
        forms = [f"{done} tokens", done]
        if self._labels.draft_label:
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
        return first_fitting(forms, width)

    def _histogram_rows(self, n: int) -> list[Row]:
        """Return a histogram of the number of accepted draft tokens per pass as n rows; the last row has all larger ones."""
        counts = self._statistics.accepted_histogram or [0]
        total = max(1, sum(counts))
        rows: list[Row] = []
        for i in range(min(n, len(counts))):
            is_open = i == n - 1 < len(counts) - 1
            share = sum(counts[i:] if is_open else counts[i : i + 1]) / total
            label = f"{i}+" if is_open else f"{i}"
            bar = ("█" if self._painter.is_utf else "#") * round(share * BAR_WIDTH)
            rows.append([(f"{label:>7} ", "faint"), (f"{bar:<{BAR_WIDTH}}", "plain"), (f" {share:4.0%}", "faint")])
        return rows + [[(" " * HISTOGRAM_WIDTH, "plain")] for _ in range(n - len(rows))]


def buffer_events(
    events: Iterable[Event | PrefillProgress], clock: Callable[[], float] = time.perf_counter
) -> Iterator[Event | PrefillProgress]:
    """Yield the given decoding events in bursts, so that generation runs up to MAX_BURST_S ahead of the display.

    Waiting between events then slows no pass down. Events of passes that take MAX_BURST_S / 2 or longer are passed on at once.

    Args:
        events: The events.
        clock: Returns seconds.
    """
    burst, begin, is_quick = list[Event | PrefillProgress](), clock(), False
    for event in events:
        if isinstance(event, Step):
            is_quick = event.seconds < MAX_BURST_S / 2
        burst.append(event)
        if not is_quick or clock() - begin > MAX_BURST_S:
            yield from burst
            burst, begin = [], clock()
    yield from burst


def add_leading_space(before: str, text: str) -> str:
    """Return `text` with a space in front, unless `before` is empty or a space already separates the two."""
    return text if not before or before.endswith(" ") or text.startswith(" ") else f" {text}"
