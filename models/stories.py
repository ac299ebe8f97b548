"""Stories to rows of tokens: the splits of TinyStories, and what a model is trained on. Knows no model.

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
BETWEEN = "<|endoftext|>"
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Stories:
    """The three splits; the held-out one is the end of the valid file."""

    train: list[str]
    dev: list[str]
    held_out: list[str]

    @classmethod
    def read(cls, text: Path) -> "Stories":
        """Of the folder of the two files."""
        train, valid = (
            [story.strip() for story in (text / name).read_text(encoding="utf-8").split(BETWEEN) if story.strip()]
            for name in (TRAIN_FILE, VALID_FILE)
        )
        seen, held_out = valid[:-HELD_OUT_STORIES], valid[-HELD_OUT_STORIES:]
        return cls(train + seen[:-DEV_STORIES], seen[-DEV_STORIES:], held_out)


def encode_stories(tokenizer: Tokenizer, stories: list[str]) -> list[Tokens]:
    """BOS and the story, each as (T,) int32."""
    return [np.array(tokenizer.encode(story), np.int32) for story in stories]


def pack_rows(stories: list[Tokens], length: int, rng: np.random.Generator) -> Tokens:
    """Shuffle whole stories into rows (N, length) that start at BOS; the room left is the start of one more story."""
    queue = rng.permutation(len(stories)).tolist()
    rows = []
    while queue:
        row = stories[queue.pop()][:length]
        while len(row) < length:
            room = length - len(row)
            recent = range(max(0, len(queue) - 256), len(queue))
            fits = [i for i in recent if len(stories[queue[i]]) <= room]
            if fits:
                story = stories[queue.pop(max(fits, key=lambda i: len(stories[queue[i]])))]
            else:
                story = stories[rng.integers(len(stories))][:room]
            row = np.concatenate([row, story])
        rows.append(row)
    return np.stack([rows[i] for i in rng.permutation(len(rows))])


def batches(stories: list[Tokens], length: int, batch: int, step: int, seed: int) -> Iterator[Tokens]:
    """Endless (batch, length) rows from the given step on, a new shuffle for each epoch."""
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
    """Write what there is of each of N rows, an array for each path, as arrays (N, ...): whole files or none."""
    parts = [path.with_suffix(".part") for path in paths]
    places: list[npt.NDArray[np.generic]] = []
    for i, row in enumerate(rows):
        found = [*row]
        places = places or [
            np.lib.format.open_memmap(part, "w+", one.dtype, (n_rows, *one.shape)) for part, one in zip(parts, found, strict=True)
        ]
        for place, one in zip(places, found, strict=True):
            place[i] = one
    for part, path in zip(parts, paths, strict=True):
        os.replace(part, path)
