"""TinyStories as rows of tokens: the splits of the data set and the packing of stories into training rows.

Shapes: T tokens, N rows of a data set.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specdec.tokenizer import Tokenizer

TRAIN_FILE = "tinystories_cased_train.txt"
VALID_FILE = "tinystories_cased_valid_split.txt"
HELD_OUT_STORIES = 350
DEV_STORIES = 100
STORY_SEPARATOR = "<|endoftext|>"
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Stories:
    """The three splits of the data set; the held-out one is the end of the valid file."""

    train: list[str]
    dev: list[str]
    held_out: list[str]

    @classmethod
    def read(cls, text: Path) -> "Stories":
        """Read the splits from the folder of the two files."""
        train, valid = (
            [story.strip() for story in (text / name).read_text(encoding="utf-8").split(STORY_SEPARATOR) if story.strip()]
            for name in (TRAIN_FILE, VALID_FILE)
        )
        seen, held_out = valid[:-HELD_OUT_STORIES], valid[-HELD_OUT_STORIES:]
        return cls(train + seen[:-DEV_STORIES], seen[-DEV_STORIES:], held_out)


def encode_stories(tokenizer: Tokenizer, stories: list[str]) -> list[Tokens]:
    """Return each story as tokens (T,) int32, BOS first."""
    return [np.array(tokenizer.encode(story), np.int32) for story in stories]


def pack_rows(stories: list[Tokens], length: int, rng: np.random.Generator) -> Tokens:
    """Shuffle whole stories into rows (N, length) that start with BOS; the start of one more story fills up each row."""
    queue = rng.permutation(len(stories)).tolist()
    rows = []
    while queue:
        row = stories[queue.pop()][:length]
        while len(row) < length:
            n_free = length - len(row)
            recent = range(max(0, len(queue) - 256), len(queue))
            fits = [i for i in recent if len(stories[queue[i]]) <= n_free]
            if fits:
                story = stories[queue.pop(max(fits, key=lambda i: len(stories[queue[i]])))]
            else:
                story = stories[rng.integers(len(stories))][:n_free]
            row = np.concatenate([row, story])
        rows.append(row)
    return np.stack([rows[i] for i in rng.permutation(len(rows))])


def iterate_batches(stories: list[Tokens], length: int, batch: int, step: int, seed: int) -> Iterator[Tokens]:
    """Yield rows (batch, length) without end, from the given step on, with a new shuffle for each epoch."""
    skip, epoch = step * batch, 0
    rest = np.empty((0, length), np.int32)
    while True:
        rows = pack_rows(stories, length, np.random.default_rng([seed, epoch]))
        epoch += 1
        if skip >= len(rows):
            skip -= len(rows)
            continue
        rest, skip = np.concatenate([rest, rows[skip:]]), 0
        while len(rest) >= batch:
            yield rest[:batch]
            rest = rest[batch:]


def write_rows(paths: Sequence[Path], n_rows: int, rows: Iterable[Iterable[npt.NDArray[np.generic]]]) -> None:
    """Write each row's arrays into one file (N, ...) per path; files appear only when complete."""
    parts = [path.with_suffix(".part") for path in paths]
    files: list[npt.NDArray[np.generic]] = []
    for i, row in enumerate(rows):
        arrays = [*row]
        files = files or [
            np.lib.format.open_memmap(part, "w+", array.dtype, (n_rows, *array.shape))
            for part, array in zip(parts, arrays, strict=True)
        ]
        for file, array in zip(files, arrays, strict=True):
            file[i] = array
    for part, path in zip(parts, paths, strict=True):
        os.replace(part, path)
