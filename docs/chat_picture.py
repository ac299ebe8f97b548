"""Draw the animated docs/chat.svg from a real chat: python docs/chat_picture.py MODEL [OUT].

N-grams are the draft. The same chat runs several times, and the fastest one is drawn. Each word appears when its pass has ended,
a fixed factor slower than measured.
"""

import sys
from html import escape
from pathlib import Path

from race_picture import CELL_WIDTH, COLORS, FONT, LINE_HEIGHT, PADDING, AnimationClock, find_new_words, make_text, run_script

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec import SpeculativeDecoder, Statistics, Step
from specdec.text.conversation import ChatSettings, Conversation
from specdec.ui.chat import format_statistics
from specdec.ui.text_layout import Row, StyledText

SYSTEM_PROMPT = "You are a helpful assistant."
QUESTIONS = ("Write three sentences about the sea.", "Now repeat them, each on its own line.")
SETTINGS = ChatSettings(seed=7, temperature=0.3)
COLUMNS = 78
N_CHATS = 5
ANSWERS_DURATION_S, QUESTION_S, END_HOLD_S = 7.0, 1.0, 5.0  # of the animation: all answers, each question, the end


Turns = list[tuple[str, list[Step]]]  # each question, and the steps of its answer


def record(model: str) -> Turns:
    """Return the turns of the fastest of several equal chats."""
    decoder = SpeculativeDecoder(model, "lookup")
    decoder.warm_up()
    chats = list[Turns]()
    for _ in range(N_CHATS):
        chat = Conversation(decoder, SYSTEM_PROMPT, SETTINGS)
        chats.append([(question, [event for event in chat.ask(question) if isinstance(event, Step)]) for question in QUESTIONS])
    return min(chats, key=measure_seconds)


def measure_seconds(turns: Turns) -> float:
    """Return the decoding time of all answers, in seconds."""
    return sum(step.seconds for _, steps in turns for step in steps)


def summarize(steps: list[Step]) -> str:
    """Return the line that `specdec chat` prints below an answer."""
    statistics = Statistics()
    for step in steps:
        statistics.add(step)
    return format_statistics(statistics)


def make_line(row: int, column: int, text: str, style: str, name: str, weight: int = 400) -> str:
    """Return a text element at a row and a column of the terminal."""
    return make_text(2 * PADDING + CELL_WIDTH * column, PADDING + LINE_HEIGHT * (row + 1), text, COLORS[style], name, weight)


def main(model: str, out: str = str(Path(__file__).with_name("chat.svg"))) -> None:
    """Record a chat and draw it."""
    turns = record(model)
    duration_s = ANSWERS_DURATION_S + len(turns) * QUESTION_S + END_HOLD_S
    clock = AnimationClock(ANSWERS_DURATION_S / measure_seconds(turns), duration_s)
    pause = QUESTION_S / clock.slowdown
    parts, n_rows, seconds = list[str](), 0, 0.0
    for question, steps in turns:
        parts.append(make_line(n_rows, 0, f">>> {question}", "prompt", clock.get_class(seconds), 700))
        answer, shown_rows, first_row = StyledText(), list[Row](), n_rows + 1
        seconds += pause
        for step in steps:
            answer.add_step(step)
            seconds += step.seconds
            rows = answer.wrap(COLUMNS) if step.stop_reason else answer.tail(COLUMNS, COLUMNS)
            for row, column, word, style in find_new_words(shown_rows, rows):
                parts.append(make_line(first_row + row, column, word, style, clock.get_class(seconds)))
            shown_rows = [list(row) for row in rows]  # copies, since the rows keep growing
        n_rows = first_row + len(shown_rows) + 1
        parts.append(make_line(n_rows - 1, 0, summarize(steps), "faint", clock.get_class(seconds)))
    title = f"specdec chat -m {Path(model).stem} -d lookup"
    legend = (("green: guessed and confirmed", "accepted"), ("white: the model's own", "target"))
    column = 0
    for text, style in legend:
        parts.append(make_line(n_rows + 1, column, text, style, ""))
        column += len(text) + 3
    parts.append(make_line(n_rows + 1, column, f"{clock.slowdown:.0f} times slower", "faint", ""))
    width, height = 4 * PADDING + COLUMNS * CELL_WIDTH, 2 * PADDING + LINE_HEIGHT * (n_rows + 2)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="13">',
        f"<title>{escape(title)}</title>",
        f"<style>{clock.to_css()}</style>",
        '<rect width="100%" height="100%" rx="10" fill="#0d1117"/>',
        *parts,
        "</svg>\n",
    ]
    Path(out).write_text("\n".join(svg), encoding="utf-8")
    print("\n".join(f">>> {question}\n{''.join(step.text for step in steps)}\n{summarize(steps)}" for question, steps in turns))


if __name__ == "__main__":
    run_script(main)
