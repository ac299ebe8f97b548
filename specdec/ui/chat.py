"""A conversation at the terminal or in a pipe: commands, questions, answers as they come. Knows no models' files."""

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from specdec import validation
from specdec.engine.decoding import Event, Prefill, Prompt, Statistics, Step
from specdec.text.conversation import Conversation, Settings
from specdec.ui.keyboard import Keyboard
from specdec.ui.line_editor import PROMPT, Lines
from specdec.ui.output import Printable, Roles, SilentView, View, print_summary, printable, show, to_json
from specdec.ui.panel import LivePanel
from specdec.ui.progress import read_in_a_line
from specdec.ui.signals import signals
from specdec.ui.terminal_window import STYLES, STYLES_NO_COLOR, WIDEST, Window, obstacle
from specdec.ui.text_layout import Row, Story, append

MOST_SHOWN, MOST_ROWS_SHOWN = 2000, 12  # characters and rows of a first message that stands in a file
HISTORY, LAST = "history", "last-talk"  # files in the folder of what outlives a talk
HELP = {
    "/clear": "begin anew; the system prompt stays",
    "/regen": "another answer to the last question",
    "/system TEXT": 'another system prompt; "" for none, alone to see it',
    "/set NAME VALUE": "temperature, top_p, seed and others; alone to see all",
    "/stats": "all figures of the last answer",
    "/panel": "answers in the panel that shows every guess, or no longer",
    "/save FILE": "keep the conversation, and all that its answers depend on",
    "/load FILE": "go on with one; alone, with the last talk",
    "/bye, /exit, /quit": "leave, as Ctrl-D does",
    '"""': "begins and ends a message of several lines",
    "\\": "at a line's end: the message goes on with the next",
    "Ctrl-C": "stops an answer and keeps what it said",
    "space": "in front of / makes it a message",
}
FORGETTING = ("clear", "regen")  # what stands there, so that a slip is asked about


class AnswerView(View):
    """An answer as it comes: broken between words and coloured as in the panel on a terminal, else the text alone."""

    def __init__(self, out: TextIO, width_of: Callable[[], int], styles: Mapping[str, str]) -> None:
        self._printable, self._out = Printable(), out
        self._encoding = out.encoding or "utf-8"
        self._width_of, self._styles = width_of, styles
        self._has_begun = False  # leading line breaks are not worth a row
        self._is_in_row = False
        self._is_resized = False  # what stands is the terminal's to break, the next word begins a row of the new width
        self._begin_rows()

    def _begin_rows(self) -> None:
        self._width, self._new = self._width_of(), Row()
        self._story = Story(lambda text, kind: append(self._new, text, kind))

    def __exit__(self, *_: Any) -> None:
        self._add(self._printable.end(), "target")
        self._end_rows()

    def _end_rows(self) -> None:
        self._show_rows(is_whole=True)
        self._out.write("\n")
        self._out.flush()

    def show(self, event: Event | Prefill) -> None:
        if isinstance(event, Prefill):
            if self._width and self._is_in_row:  # which is about to be that of the reading
                self._end_rows()
                self._begin_rows()
            self._is_in_row = False
        elif isinstance(event, Step):
            self._is_in_row = True
            self._is_resized = self._width_of() != self._width
            for i, piece in enumerate(event.pieces):
                self._add(self._printable.push(piece), "accepted" if i < event.n_accepted else "target")
            self._out.flush()

    def _add(self, text: str, kind: str) -> None:
        text = text.encode(self._encoding, "backslashreplace").decode(self._encoding)  # as wide as it will be
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        if self._is_resized and (space := re.search(r"\s *", text)):
            self._add_to_rows(text[: space.start()], kind)
            self._end_rows()
            self._begin_rows()
            self._is_resized, text = False, text[space.end() :]
        self._add_to_rows(text, kind)

    def _add_to_rows(self, text: str, kind: str) -> None:
        if not self._width:
            self._out.write(text)
        elif text:
            self._story.add(text, kind)
            self._show_rows()

    def _show_rows(self, is_whole: bool = False) -> None:
        if self._width:
            self._story.tail(self._width, 1, is_whole)
        for text, kind in self._new:
            code = self._styles.get(kind, "")
            self._out.write(f"\x1b[{code}m{text}\x1b[m" if code else text)
        self._new.clear()


def figures(s: Statistics) -> str:
    """A line on an answer."""
    parts = [f"{s.n_generated} token{'s' * (s.n_generated != 1)}"]
    if s.n_generated:
        parts.append(f"{s.tokens_per_second:,.0f} tok/s")
    if s.n_drafted:
        parts.append(f"{s.acceptance_rate:.0%} of {s.n_drafted} guesses right")
    ends = {
        "interrupted": "interrupted",
        "max_tokens": "cut off (--max-tokens, /set max_tokens)",
        "seq_len": "cut off: the context is full",
    }
    return ", ".join([*parts, *([ends[s.stop_reason]] if s.stop_reason in ends else [])])


class Chat:
    """A conversation and the views of its answers; figures and complaints go to stderr.

    plain: without colours; told: what an object of JSON for each answer tells besides, None for no JSON.
    """

    def __init__(
        self, conversation: Conversation, roles: Roles, plain: bool = False, told: Mapping[str, Any] | None = None
    ) -> None:
        self._conversation, self._roles, self._told = conversation, roles, told
        self._out, self._errors = Console(highlight=False), Console(stderr=True, highlight=False)
        self._is_plain = plain or self._out.is_dumb_terminal
        self._statistics: Statistics | None = None
        self._in_panel = self._is_over = False
        self._last: Path | None = None  # where the last talk is kept
        self._commands: dict[str, Callable[[str], object]] = {
            "help": self._help, "clear": self._clear, "regen": self._regenerate, "system": self._system, "set": self._set,
            "stats": self._stats, "panel": self._panel, "save": self._save, "load": self._load,
            "bye": self._leave, "exit": self._leave, "quit": self._leave,
        }  # fmt: skip

    def answer(self, events: Generator[Event | Prefill]) -> None:
        """Show an answer, until it or somebody's patience is at its end, and its figures."""
        statistics, n_dropped = Statistics(), self._conversation.n_dropped
        with self._keeping(), closing(events), Keyboard().unheard(), closing(read_in_a_line(events)) as told:
            first = next((event for event in told if signals.asked or not isinstance(event, Prefill)), None)
            if not isinstance(first, Prompt):
                told.close()
                self._tell("interrupted before the answer began")
                return
            if left_out := (self._conversation.n_dropped - n_dropped) // 2:
                turns = "turn is" if left_out == 1 else f"{left_out} turns are"
                self._tell(f"the context is full: the oldest {turns} left out from here on")
            view = self._view(statistics)
            rest = events if isinstance(view, LivePanel) else told  # a panel shows itself what is read anew
            show(view, _behind(replace(first, text=""), rest), statistics)  # the answer alone
        self._statistics = statistics
        if isinstance(view, SilentView):
            talk = self._conversation
            attempt = talk.messages[-1]["attempt"] if view.tokens else 0
            more = {"attempt": attempt, "settings": asdict(talk.settings), **(self._told or {}), **talk.made_with}
            print(to_json(statistics, view.text, view.tokens, **more), flush=True)
        else:
            self._tell(figures(statistics))

    def converse(self, first: str, state: Path | None) -> None:
        """Until the person leaves. first: a message, whatever it begins with; state: a folder for what outlives the talk."""
        signals.text_begins()  # there is more to lose from here on than one answer
        self._last = state / LAST if state else None
        is_kept = bool(self._last and os.path.exists(self._last))
        self._tell(f"/help lists the commands, {'/load goes on with the last talk, ' * is_kept}Ctrl-D leaves")
        if first:
            self._out.print(Text(f"{PROMPT}{_beginning(printable(first))}", "" if self._is_plain else "bold"))
        lines = Lines(state and state / HISTORY, self._is_command, self._completions, is_bold=not self._is_plain)
        message = f" {first}" if first.startswith("/") else first
        with lines.listening():
            while True:
                if message.strip():
                    self._obey(message)
                if self._is_over or signals.asked not in (0, signal.SIGINT):
                    return
                try:
                    message = lines.read()
                except KeyboardInterrupt:
                    message = ""
                    self._out.print()
                    self._tell("Ctrl-D or /bye leaves")
                except EOFError:
                    self._out.print()
                    return

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Around an answer: the talk outlives whatever ends it, as a terminal that is closed or a machine that goes down."""
        try:
            yield
        finally:
            if self._last and self._conversation.messages:
                with suppress(OSError):  # a home that cannot be written to
                    self._last.parent.mkdir(parents=True, exist_ok=True)
                    self._conversation.keep(self._last, 0o600)

    def _completions(self, line: str) -> list[str]:
        """What the beginning of a command may become: with its name, that of a setting, that of a file."""
        name, is_named, rest = line.partition(" ")
        if not is_named:
            takes = {command.split()[0] for command in HELP if command.split()[-1].isupper()}
            ways = [f"/{command}" for command in sorted(self._commands)]
            return [f"{way} " if way in takes else way for way in ways if way.startswith(line)]
        if name in ("/save", "/load"):
            return [f"{name} {path}" for path in _paths(rest)]
        return [f"{name} {setting} " for setting in asdict(Settings()) if name == "/set" and setting.startswith(rest)]

    def _is_command(self, line: str) -> bool:
        return line.startswith("/") and _command(line)[0] in self._commands

    def _obey(self, message: str) -> None:
        """A command, or a question; whatever is wrong is told in a line."""
        try:
            if not message.startswith("/"):
                self.answer(self._conversation.ask(message.removeprefix(" ") if message.startswith(" /") else message))
                return
            name, rest = _command(message)
            if name not in self._commands:
                near = difflib.get_close_matches(name, self._commands, 1)
                raise ValueError(f"no command /{name}; " + (f"did you mean /{near[0]}?" if near else "/help lists them"))
            if rest and name in FORGETTING:
                raise ValueError(f"/{name} takes no words; space in front of / makes it a message")
            self._commands[name](rest)
        except (TypeError, ValueError, MemoryError) as error:
            self._tell(" ".join(str(error).split()) or "not enough memory", style="")

    def _view(self, statistics: Statistics) -> View:
        settings = self._conversation.settings
        if self._told is not None:
            return SilentView()
        if self._in_panel and not obstacle(self._out):
            roles = replace(self._roles, pair=self._roles.target)
            return LivePanel(Window(self._out), statistics, settings.max_tokens, roles)
        styles = {} if self._is_plain else STYLES_NO_COLOR if self._out.no_color else STYLES
        return AnswerView(sys.stdout, lambda: min(self._out.width, WIDEST) if self._out.is_terminal else 0, styles)

    def _tell(self, words: str, style: str = "dim") -> None:
        self._errors.print(Text(printable(words), style), soft_wrap=not self._errors.is_terminal)

    def _help(self, _: str) -> None:
        table = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))
        for name, meaning in HELP.items():
            table.add_row(Text(name), Text(meaning))
        self._out.print(table)

    def _leave(self, _: str) -> None:
        self._is_over = True

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._tell("the conversation begins anew")

    def _regenerate(self, _: str) -> None:
        if not self._conversation.settings.temperature:
            self._tell("at temperature 0 every answer is the same; /set temperature 0.7")
        self.answer(self._conversation.regenerate())

    def _system(self, words: str) -> None:
        if words:
            self._conversation.system = "" if words == '""' else validation.text("the system prompt", words)
        self._tell(f"system prompt: {self._conversation.system or 'none'}")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if words:
            self._conversation.settings = self._conversation.settings.changed(name, value.strip())
        self._tell(", ".join(f"{name} {value}" for name, value in asdict(self._conversation.settings).items()))

    def _stats(self, _: str) -> None:
        if not self._statistics:
            raise ValueError("there is no answer yet")
        print_summary(self._errors, self._statistics, **self._conversation.made_with)

    def _panel(self, _: str) -> None:
        if not self._in_panel and obstacle(self._out):
            raise ValueError("no panel fits here")
        self._in_panel = not self._in_panel
        self._tell(f"answers come {'in the panel' if self._in_panel else 'as text'}")

    def _save(self, name: str) -> None:
        self._conversation.save(_path(name))
        self._tell(f"saved in {name}")

    def _load(self, name: str) -> None:
        if not name and self._last and not os.path.exists(self._last):
            raise ValueError("no talk is saved yet; name a file")
        path = self._last if not name and self._last else _path(name)
        model, here = self._conversation.load(path), self._conversation.model
        n = len(self._conversation.messages) // 2
        other = f"; it was held with {model}, this is {here}" if model != here else ""
        self._tell(f"{n} turn{'s' * (n != 1)} from {name or 'the last talk'}{other}")


def _behind(first: Event, rest: Generator[Event | Prefill]) -> Generator[Event | Prefill]:
    yield first
    yield from rest


def _command(line: str) -> tuple[str, str]:
    """Its name and the rest of a line that begins with /."""
    name, *rest = line[1:].strip().split(maxsplit=1) or [""]
    return name, "".join(rest)


def _path(name: str) -> Path:
    if not name:
        raise ValueError("a file's name is missing behind it")
    try:
        return Path(os.fsdecode(name.encode("utf-8", "surrogateescape"))).expanduser()  # the bytes that were typed
    except RuntimeError:  # the home of nobody
        raise ValueError(f"there is no home {name}") from None


def _paths(beginning: str) -> list[str]:
    """Files and folders whose names begin so, as they would be typed."""
    folder, slash, start = beginning.rpartition("/")
    try:
        entries = sorted(os.scandir(_path(folder + slash or ".")), key=lambda entry: entry.name)
    except (OSError, ValueError):
        return []
    names = [os.fsencode(entry.name).decode("utf-8", "surrogateescape") + "/" * entry.is_dir() for entry in entries]
    shown = [name for name in names if name.startswith(start) and (start or name[0] != ".") and name == printable(name)]
    return [f"{folder}{slash}{name}" for name in shown]


def _beginning(text: str) -> str:
    """As much of a long text as a person wants to see again."""
    short = "\n".join(text[:MOST_SHOWN].split("\n")[:MOST_ROWS_SHOWN])
    return text if len(short) == len(text) else f"{short} … ({len(text):,} characters)"
