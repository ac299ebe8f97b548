"""What a head learns from: text that a target wrote, the hidden states of its layers and what it says next. Knows no training.

Shapes: N rows of a data set, T tokens, H dim of the target, L layers whose states make a feature.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models import evaluate
from models.questions import HELD_OUT_TOPICS, TOPICS, questions
from models.stories import Tokens, write_rows
from specdec.config import HeadConfig
from specdec.decoder import SpeculativeDecoder
from specdec.kernels import MAX_TOKENS
from specdec.model.transformer import Transformer
from specdec.runtime.simd import Float32
from specdec.sampling import Sampling
from specdec.text.chat_template import Message, TemplateError

TEMPERATURES = (0.0, 0.0, 0.5, 0.8, 1.0)  # of what is written: a head is asked at 0 more often than anywhere else
TAUGHT = 32  # likeliest next tokens of each position that a head is taught
HELD_OUT_ROWS = 20  # the last ones, that are not trained on


def default_layers(n_layers: int) -> tuple[int, ...]:
    """Before which layers of a target the states are taken: EAGLE-3's own choice, as far as there are so many."""
    layers = HeadConfig(1, (), 1, True, True).layers_of(n_layers)
    return tuple(sorted({min(max(layer, 0), n_layers) for layer in layers}))


# ---------------------------------------------------------------------------------------------------------------- text


def can_chat(decoder: SpeculativeDecoder) -> bool:
    """Whether its target has a chat template."""
    try:
        return decoder.chat_template is not None
    except TemplateError:
        return False


def written_by(decoder: SpeculativeDecoder, n_rows: int, length: int, seed: int) -> Tokens:
    """Rows (n_rows, length) of conversations: questions, and what the decoder's target answers. Raises TemplateError."""
    rng, asked = np.random.default_rng(seed), questions(TOPICS, seed)
    rows = np.empty((n_rows, length), np.int32)
    for row in rows:
        messages: list[Message] = []
        tokens: list[int] = []
        temperature = float(rng.choice(TEMPERATURES))
        while len(tokens) < length:
            messages.append({"role": "user", "content": next(asked)})
            tokens = decoder.encode_chat(messages)
            if len(tokens) < length:
                sampling = Sampling(temperature, top_p=0.0, seed=int(rng.integers(2**63)))
                answer = decoder.generate(tokens, length - len(tokens), sampling)
                messages.append({"role": "assistant", "content": answer.continuation, "tokens": answer.tokens})
                tokens += answer.tokens
        row[:] = tokens[:length]
    return rows


def held_out_texts(decoder: SpeculativeDecoder, rows: Tokens, n_texts: int, n_tokens: int) -> Iterator[tuple[list[int], int]]:
    """Texts that the target writes at temperature 0, and how many tokens of each are its prompt: questions about topics of which
    no others were asked where it has a chat template, else beginnings of the rows that are not trained on.
    """
    asked = questions(HELD_OUT_TOPICS, 0)
    for i in range(n_texts):
        if can_chat(decoder):
            prompt = decoder.encode_chat([{"role": "user", "content": next(asked)}])
        else:
            prompt = rows[-1 - i % HELD_OUT_ROWS, :16].tolist()
        yield prompt + evaluate.continuation(decoder.target, None, prompt, n_tokens, Sampling(0.0), {}), len(prompt)


# ------------------------------------------------------------------------------------------------------------ features


@dataclass(frozen=True)
class Lesson:
    """Of a text (T,): the states (T, L H) before a feature's layers, the ids (T, TAUGHT) of the likeliest tokens behind each of
    its tokens, likeliest first, and their log-probabilities.
    """

    states: npt.NDArray[np.float16]
    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float16]


def lesson(target: Transformer, tokens: list[int]) -> Lesson:
    """By the target's own pass. Its `hidden_layers` are a feature's."""
    n, n_taught = len(tokens), min(TAUGHT, target.config.vocab_size)
    states = np.empty((n, len(target.hidden_layers) * target.config.dim), np.float16)
    ids, log_probs = np.empty((n, n_taught), np.int32), np.empty((n, n_taught), np.float16)
    for start in range(0, n, MAX_TOKENS):
        stop = min(start + MAX_TOKENS, n)
        logits = target.forward(tokens[:stop], n_logits=stop - start)
        states[start:stop] = target.hidden(tokens[:stop], start)
        ids[start:stop], log_probs[start:stop] = likeliest(logits, n_taught)
    return Lesson(states, ids, log_probs)


def likeliest(logits: Float32, n: int) -> tuple[npt.NDArray[np.int64], Float32]:
    """Ids (T, n) of the greatest logits (T, V), the greatest first, and their log-probabilities."""
    ids = np.argpartition(-logits, n - 1)[:, :n]
    top = np.take_along_axis(logits, ids, 1)
    order = np.argsort(-top, kind="stable")
    peak = logits.max(1, keepdims=True)
    total = peak + np.log(np.exp(logits - peak).sum(1, keepdims=True))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(top, order, 1) - total


@dataclass(frozen=True)
class Features(Lesson):
    """That of every row but for its last token, on disk: states (N, T, L H), ids and log_probs (N, T, TAUGHT)."""

    rows: Tokens

    @classmethod
    def of(cls, target: Transformer, rows: Tokens, folder: Path) -> "Features":
        """Of rows (N, T + 1), but for those held out; written where the folder's are older than its written.npy, or not there.

        Raises ValueError for rows all of which are held out.
        """
        if len(rows) <= HELD_OUT_ROWS:
            raise ValueError(f"{len(rows)} rows, of which {HELD_OUT_ROWS} are held out; expected more")
        rows, paths = rows[:-HELD_OUT_ROWS], [folder / f"{name}.npy" for name in ("states", "ids", "log_probs")]
        written = (folder / "written.npy").stat().st_mtime
        if not all(path.exists() and path.stat().st_mtime >= written for path in paths):
            write_rows(paths, len(rows), (vars(lesson(target, row[:-1].tolist())).values() for row in rows))
        return cls(*[np.load(path, mmap_mode="r") for path in paths], rows)
