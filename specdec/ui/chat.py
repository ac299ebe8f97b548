"""The interactive chat: commands, messages, and answers as they stream, at a terminal or in a pipe."""

import difflib
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from specdec import argument_checks
from specdec.argument_checks import JSONObject
from specdec.events import Event, PrefillProgress, Prompt, Statistics, Step, ThoughtStep
from specdec.text.conversation import ChatSettings, Conversation
from specdec.ui.keyboard import Keyboard
from specdec.ui.line_editor import PROMPT, LineEditor
from specdec.ui.panel import LivePanel
from specdec.ui.plain_views import (
    ModelLabels,
    SilentView,
    StreamSanitizer,
    View,
    format_thought,
    print_summary,
    run_view,
    sanitize,
    to_json,
)
from specdec.ui.progress import show_prefill_progress
from specdec.ui.signals import signals
from specdec.ui.terminal_window import MAX_FRAME_WIDTH, STYLES, STYLES_NO_COLOR, Window, find_obstacle
from specdec.ui.text_layout import Row, StyledText, WrappedRows, append_run

MAX_THOUGHT_ROWS = 6  # shown while the model thinks
MAX_SHOWN_CHARACTERS, MAX_SHOWN_ROWS = 2000, 12  # of a first message from a file
HISTORY_FILE, LAST_CONVERSATION_FILE = "history", "last-talk"  # files in the state folder
COMMAND_HELP = {
    "/clear": "start over; the system prompt stays",
    "/regen": "another answer to the last question",
    "/system TEXT": 'another system prompt; "" for none, alone to see it',
    "/set NAME VALUE": "temperature, top_p, seed and others; alone to see all",
    "/think on|off": "whether the model thinks before it answers; alone to see it",
    "/thought": "show the thought before the last answer, as Ctrl-T does",
    "/stats": "all statistics of the last answer",
    "/panel": "switch the panel that shows every draft token on or off",
    "/save FILE": "save the conversation and its settings",
    "/load FILE": "continue a saved conversation; alone, the last one",
    "/bye, /exit, /quit": "leave, as Ctrl-D does",
    '"""': "starts and ends a message of several lines",
    "\\": "at the end of a line: the message continues on the next",
    "Ctrl-C": "stops an answer and keeps its text so far",
    "space": "in front of / makes it a message",
}
DESTRUCTIVE_COMMANDS = ("clear", "regen")  # they take no arguments, so that a typo does not lose messages


class ThoughtRows:
    """The last rows of a thought while it is generated, dim; at its end they are erased.

    Args:
        out: The terminal.
        width: Cells of a row.
        code: The SGR code of the text.

    Attributes:
        has_text: Whether the thought has any text.
    """

    def __init__(self, out: TextIO, width: int, code: str) -> None:
        """Start without rows."""
        self._out, self._code, self._wrapped = out, code, WrappedRows(max(width - 1, 1), MAX_THOUGHT_ROWS)
        self._shown, self.has_text = list[str](), False

    def add(self, text: str) -> None:
        """Append text, and draw the rows again if they changed."""
        self.has_text = self.has_text or bool(text)
        self._wrapped.add(text, "faint")
        rows = ["".join([run for run, _ in row]) for row in self._wrapped.get_rows()]
        if self.has_text and rows != self._shown:
            if self._shown and rows[:-1] == self._shown[:-1] and rows[-1].startswith(self._shown[-1]):
                self._out.write(f"\x1b[{self._code}m{rows[-1][len(self._shown[-1]) :]}\x1b[m")
            else:
                self.erase()
                self._out.write(f"\x1b[{self._code}m" + "\n".join(rows) + "\x1b[m")
            self._shown = rows

    def erase(self) -> None:
        """Erase the rows; the cursor is then where they began."""
        if self._shown:
            self._out.write(f"\r\x1b[{len(self._shown) - 1}A\x1b[J" if len(self._shown) > 1 else "\r\x1b[J")
        self._shown = []


class AnswerView(View):
    """A view that streams an answer: wrapped between words and coloured on a terminal, plain text elsewhere.

    On a terminal with styles, the last rows of a thought are shown dim, and at its end its time and length replace them.
    Elsewhere thoughts are left out.

    Args:
        out: The stream to write to.
        get_width: Returns the cells of a row; 0 if `out` is not a terminal, so that nothing is wrapped.
        styles: SGR codes by style; empty for no colours.
    """

    def __init__(self, out: TextIO, get_width: Callable[[], int], styles: Mapping[str, str]) -> None:
        """Start with an empty answer."""
        self._sanitizer, self._out = StreamSanitizer(), out
        self._encoding = out.encoding or "utf-8"
        self._get_width, self._styles = get_width, styles
        self._has_begun = False  # leading whitespace is dropped
        self._is_mid_row = False
        self._thought_rows: ThoughtRows | None = None  # while there is a thought
        self._begin_rows()

    def _begin_rows(self) -> None:
        self._width, self._pending_row = self._get_width(), Row()
        self._styled_text = StyledText(lambda text, style: append_run(self._pending_row, text, style))

    def __exit__(self, *_: object) -> None:
        """Write the text that was held back and end the last row."""
        self._add(self._sanitizer.end(), "target")
        self._end_rows()

    def _end_rows(self) -> None:
        self._show_rows(is_whole=True)
        self._out.write("\n")
        self._out.flush()

    def show(self, event: Event | PrefillProgress) -> None:
        """Write the text of a step; before the status line of a later prefill, end the row on a terminal."""
        if isinstance(event, PrefillProgress):
            if self._width and self._is_mid_row:  # the status line of the prefill takes the row
                self._thought_rows = None
                self._end_rows()
                self._begin_rows()
            self._is_mid_row = False
        elif isinstance(event, Step):
            self._is_mid_row = True
            is_resized = self._get_width() != self._width
            if isinstance(event, ThoughtStep) and self._width and self._styles:
                self._show_thought(event, is_resized)
            elif is_resized:
                self._width = self._get_width()
                self._styled_text.resize(self._width)
            for i, piece in enumerate(event.pieces):
                self._add(self._sanitizer.push(piece), "accepted" if i < event.n_accepted else "target")
            self._out.flush()

    def _show_thought(self, step: ThoughtStep, is_resized: bool) -> None:
        if is_resized or not self._thought_rows:
            if self._thought_rows:  # what is shown was wrapped again by the terminal
                self._end_rows()
            self._begin_rows()
            self._thought_rows = ThoughtRows(self._out, self._width, self._styles["faint"])
        self._thought_rows.add(self._encode(self._sanitizer.push("".join(step.thought_pieces))))
        if step.is_thought_end:
            self._thought_rows.erase()
            has_text, self._thought_rows, self._sanitizer = self._thought_rows.has_text, None, StreamSanitizer()
            if has_text:
                self._add(format_thought(step), "faint")
                self._end_rows()
                self._begin_rows()
                self._has_begun = False

    def _encode(self, text: str) -> str:
        """Return a text as it will be printed, so that its width is right."""
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _add(self, text: str, style: str) -> None:
        text = self._encode(text)
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        if not self._width:
            self._out.write(text)
        elif text:
            self._styled_text.add(text, style)
            self._show_rows()

    def _show_rows(self, is_whole: bool = False) -> None:
        if self._width:
            self._styled_text.tail(self._width, 1, is_whole)
        for text, style in self._pending_row:
            code = self._styles.get(style, "")
            self._out.write(f"\x1b[{code}m{text}\x1b[m" if code else text)
        self._pending_row.clear()


def format_statistics(s: Statistics) -> str:
    """Return the tokens, speed and acceptance rate of an answer in one line, and why the answer was cut off if it was."""
    parts = [f"{s.n_generated} token{'s' * (s.n_generated != 1)}"]
    if s.n_generated:
        parts.append(f"{s.tokens_per_second:,.0f} tok/s")
    if s.n_drafted:
        parts.append(f"{s.acceptance_rate:.0%} of {s.n_drafted} guess{'es' * (s.n_drafted != 1)} right")
    ends = {
        "interrupted": "interrupted",
        "max_tokens": "cut off (--max-tokens, /set max_tokens)",
        "seq_len": "cut off: the context is full",
    }
    return ", ".join([*parts, *([ends[s.stop_reason]] if s.stop_reason in ends else [])])


class ChatSession:
    """A chat with the user: it reads messages and commands, and shows each answer in a view; statistics and errors go to stderr.

    Args:
        conversation: The conversation.
        labels: Names of the models.
        plain: Whether to print without colours.
        json_extra: Further fields of the JSON object printed per answer; None prints text.

    Attributes:
        last_conversation_path: File in which the conversation is saved after each answer; None saves it nowhere.
    """

    def __init__(
        self, conversation: Conversation, labels: ModelLabels, plain: bool = False, json_extra: JSONObject | None = None
    ) -> None:
        """Connect the conversation with the terminal and its commands."""
        self._conversation, self._labels, self._json_extra = conversation, labels, json_extra
        self._out, self._stderr = Console(highlight=False), Console(stderr=True, highlight=False)
        self._is_plain = plain or self._out.is_dumb_terminal
        self._statistics: Statistics | None = None
        self._uses_panel = self._is_over = False
        self.last_conversation_path: Path | None = None
        self._commands: dict[str, Callable[[str], object]] = {
            "help": self._print_help, "clear": self._clear, "regen": self._regenerate, "system": self._set_system_prompt,
            "set": self._set_option, "think": self._set_thinking, "thought": self._print_thought,
            "stats": self._print_stats, "panel": self._toggle_panel, "save": self._save, "load": self._load,
            "bye": self._quit, "exit": self._quit, "quit": self._quit,
        }  # fmt: skip

    def show_answer(self, events: Generator[Event | PrefillProgress]) -> None:
        """Show an answer until it ends or is interrupted, then print its statistics, or with `json_extra` one JSON object.

        An interactive session also saves the conversation.

        Args:
            events: The decoding events of the answer; closed at the end.
        """
        statistics, n_dropped = Statistics(), self._conversation.n_dropped
        with self._autosave(), closing(events), Keyboard().mute_echo(), closing(show_prefill_progress(events)) as shown_events:
            first = next((event for event in shown_events if signals.end_signal or not isinstance(event, PrefillProgress)), None)
            if not isinstance(first, Prompt):
                shown_events.close()
                self._print_notice("interrupted before the answer began")
                return
            if n_dropped_turns := (self._conversation.n_dropped - n_dropped) // 2:
                turns = "turn is" if n_dropped_turns == 1 else f"{n_dropped_turns} turns are"
                self._print_notice(f"the context is full: the oldest {turns} left out from here on")
            view = self.make_view(statistics)
            rest = events if isinstance(view, LivePanel) else shown_events  # the panel shows prefill progress itself
            run_view(view, _chain(replace(first, text=""), rest), statistics)  # without the prompt's text
        self._statistics = statistics
        if isinstance(view, SilentView):
            conversation = self._conversation
            message = conversation.messages[-1] if view.tokens else {}
            fields = {
                "attempt": message.get("attempt", 0),
                "settings": asdict(conversation.settings),
                **({"reasoning_content": message["reasoning_content"]} if "reasoning_content" in message else {}),
                **(self._json_extra or {}),
                **conversation.metadata,
            }
            print(to_json(statistics, view.text, view.tokens, **fields), flush=True)
        else:
            self._print_notice(format_statistics(statistics))

    def run(self, first: str, state_dir: Path | None) -> None:
        """Read messages and commands from the terminal and handle each, until the user leaves or a signal ends the session.

        Args:
            first: The first message, even if it begins with "/"; "" for none.
            state_dir: Folder of the history and the last conversation; None saves neither.
        """
        signals.begin_output()  # from here on, more than one answer can be lost
        self.last_conversation_path = state_dir / LAST_CONVERSATION_FILE if state_dir else None
        is_kept = bool(self.last_conversation_path and os.path.exists(self.last_conversation_path))
        self._print_notice(f"/help lists the commands, {'/load continues the last conversation, ' * is_kept}Ctrl-D leaves")
        if first:
            self._out.print(Text(f"{PROMPT}{_shorten(sanitize(first))}", "" if self._is_plain else "bold"))
        lines = LineEditor(
            state_dir and state_dir / HISTORY_FILE, self.is_command, self.get_completions, is_bold=not self._is_plain
        )
        message = f" {first}" if first.startswith("/") else first
        with lines.session():
            while True:
                if message.strip():
                    self.handle_input(message)
                if self._is_over or signals.end_signal not in (0, signal.SIGINT):
                    return
                try:
                    message = lines.read()
                except KeyboardInterrupt:
                    message = ""
                    self._out.print()
                    self._print_notice("Ctrl-D or /bye leaves")
                except EOFError:
                    self._out.print()
                    return

    @contextmanager
    def _autosave(self) -> Iterator[None]:
        """Save the conversation when the context is left, so that it survives a closed terminal or a shutdown.

        Nothing is saved without a state folder or messages, and write errors are ignored.
        """
        try:
            yield
        finally:
            if self.last_conversation_path and self._conversation.messages:
                with suppress(OSError):  # the home directory is not writable
                    self.last_conversation_path.parent.mkdir(parents=True, exist_ok=True)
                    self._conversation.write(self.last_conversation_path, 0o600)

    def get_completions(self, line: str) -> list[str]:
        """Return the lines that a partly typed chat command can be completed to: by a command's name, a setting or a file."""
        name, is_named, rest = line.partition(" ")
        if not is_named:
            with_argument = {command.split()[0] for command in COMMAND_HELP if command.split()[-1].isupper()}
            commands = [f"/{command}" for command in sorted(self._commands)]
            return [f"{command} " if command in with_argument else command for command in commands if command.startswith(line)]
        if name in ("/save", "/load"):
            return [f"{name} {path}" for path in _complete_path(rest)]
        return [f"{name} {setting} " for setting in asdict(ChatSettings()) if name == "/set" and setting.startswith(rest)]

    def is_command(self, line: str) -> bool:
        """Return whether a line begins with the name of a chat command."""
        return line.startswith("/") and _parse_command(line)[0] in self._commands

    def handle_input(self, message: str) -> None:
        """Run a chat command, or answer a message; an error is printed in one line, not raised."""
        try:
            if not message.startswith("/"):
                self.show_answer(self._conversation.ask(message.removeprefix(" ") if message.startswith(" /") else message))
                return
            name, rest = _parse_command(message)
            if name not in self._commands:
                similar = difflib.get_close_matches(name, self._commands, 1)
                raise ValueError(
                    f"unknown command /{name}; " + (f"did you mean /{similar[0]}?" if similar else "/help lists them")
                )
            if rest and name in DESTRUCTIVE_COMMANDS:
                raise ValueError(f"/{name} takes no words; to send it as a message, put a space before /")
            self._commands[name](rest)
        except (TypeError, ValueError, MemoryError) as error:
            self._print_notice(" ".join(str(error).split()) or "not enough memory", style="")

    def make_view(self, statistics: Statistics) -> View:
        """Return a view that shows an answer: in the live panel if the user wants it, otherwise as text, or not at all."""
        settings = self._conversation.settings
        if self._json_extra is not None:
            return SilentView()
        if self._uses_panel and not find_obstacle(self._out):
            labels = replace(self._labels, pair=self._labels.target)
            return LivePanel(Window(self._out), statistics, settings.max_tokens, labels)
        styles = {} if self._is_plain else STYLES_NO_COLOR if self._out.no_color else STYLES
        return AnswerView(sys.stdout, lambda: min(self._out.width, MAX_FRAME_WIDTH) if self._out.is_terminal else 0, styles)

    def _print_notice(self, message: str, style: str = "dim") -> None:
        self._stderr.print(Text(sanitize(message), style), soft_wrap=not self._stderr.is_terminal)

    def _print_help(self, _: str) -> None:
        table = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))
        for name, description in COMMAND_HELP.items():
            table.add_row(Text(name), Text(description))
        self._out.print(table)

    def _quit(self, _: str) -> None:
        self._is_over = True

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._print_notice("the conversation starts over")

    def _regenerate(self, _: str) -> None:
        if not self._conversation.settings.temperature:
            self._print_notice("at temperature 0 every answer is the same; /set temperature 0.7")
        self.show_answer(self._conversation.regenerate())

    def _set_system_prompt(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == '""' else argument_checks.check_string("the system prompt", text)
        template_prompt = "" if self._conversation.system else self._conversation.template_system_prompt
        none = f"none, so the chat template adds: {template_prompt}" if template_prompt else "none"
        self._print_notice(f"system prompt: {self._conversation.system or none}")

    def _set_option(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if text:
            self._conversation.settings = self._conversation.settings.with_value(name, value.strip())
        self._print_notice(", ".join(f"{name} {value}" for name, value in asdict(self._conversation.settings).items()))

    def _set_thinking(self, text: str) -> None:
        if text not in ("on", "off", ""):
            raise ValueError(f"/think takes on or off, got {argument_checks.shorten(text, repr)}")
        if text:
            self._conversation.set_thinking(text == "on")
        states = {True: "on", False: "off", None: "as the chat template has it"}
        self._print_notice(f"thinking: {states[self._conversation.thinking]}")

    def _print_thought(self, _: str) -> None:
        messages = self._conversation.messages
        if not (thought := messages[-1].get("reasoning_content") if messages else None):
            raise ValueError("the last answer has no thought")
        self._out.print(Text(sanitize(thought), "" if self._is_plain else "dim"))

    def _print_stats(self, _: str) -> None:
        if not self._statistics:
            raise ValueError("no answer yet; ask a question first")
        print_summary(self._stderr, self._statistics, **self._conversation.metadata)

    def _toggle_panel(self, _: str) -> None:
        if not self._uses_panel and find_obstacle(self._out):
            raise ValueError("the panel is not available here: " + find_obstacle(self._out))
        self._uses_panel = not self._uses_panel
        self._print_notice(f"answers come {'in the panel' if self._uses_panel else 'as text'}")

    def _save(self, name: str) -> None:
        self._conversation.save(_parse_path(name))
        self._print_notice(f"saved in {name}")

    def _load(self, name: str) -> None:
        if not name and self.last_conversation_path and not os.path.exists(self.last_conversation_path):
            raise ValueError("no conversation is saved yet; name a file")
        path = self.last_conversation_path if not name and self.last_conversation_path else _parse_path(name)
        model, current_model = self._conversation.load(path), self._conversation.model
        n = len(self._conversation.messages) // 2
        note = f"; it was saved with {model}, the current model is {current_model}" if model != current_model else ""
        self._print_notice(f"{n} turn{'s' * (n != 1)} from {name or 'the last conversation'}{note}")


def _chain(first: Event, rest: Generator[Event | PrefillProgress]) -> Generator[Event | PrefillProgress]:
    yield first
    yield from rest


def _parse_command(line: str) -> tuple[str, str]:
    """Split a chat command such as "/set seed 1" into its name without the slash and its argument, "" for none."""
    name, *rest = line[1:].strip().split(maxsplit=1) or [""]
    return name, "".join(rest)


def _parse_path(name: str) -> Path:
    if not name:
        raise ValueError("the file name is missing")
    try:
        return Path(os.fsdecode(name.encode("utf-8", "surrogateescape"))).expanduser()  # the bytes that were typed
    except RuntimeError:  # the user of ~user is unknown
        raise ValueError(f"home directory of {name} not found") from None


def _complete_path(beginning: str) -> list[str]:
    """Return the paths of the files and folders that complete a typed path; folders end with "/".

    A typed "~" stays as it is. Hidden entries are listed only if their "." was typed. Names with control characters are left out.
    Returns an empty list if the folder cannot be read.
    """
    folder, slash, start = beginning.rpartition("/")
    try:
        entries = sorted(os.scandir(_parse_path(folder + slash or ".")), key=lambda entry: entry.name)
    except (OSError, ValueError):
        return []
    names = [os.fsencode(entry.name).decode("utf-8", "surrogateescape") + "/" * entry.is_dir() for entry in entries]
    shown = [name for name in names if name.startswith(start) and (start or name[0] != ".") and name == sanitize(name)]
    return [f"{folder}{slash}{name}" for name in shown]


def _shorten(text: str) -> str:
    """Return a message for display: one of too many rows or characters is cut, and its length is added."""
    short = "\n".join(text[:MAX_SHOWN_CHARACTERS].split("\n")[:MAX_SHOWN_ROWS])
    return text if len(short) == len(text) else f"{short} … ({len(text):,} characters)"
