"""Fixtures: a tiny random pair of models with its tokenizer on disk, so that no test downloads anything."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from specdec.model_config import ModelConfig
from specdec.tokenizer import Tokenizer
from tests.tools.checkpoint_files import random_tensors, restrict_to_pieces, small_pieces, write_checkpoint, write_tokenizer

VOCAB = 300
# The tests start hundreds of processes, which share compiled bytecode even if that is disabled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


class Pair(NamedTuple):
    """Paths of a target (version 0, 128 positions), a draft (version 1, 32 positions, sliding window) and their tokenizer.

    endless is the target with 100,000 positions. They generate pieces alone (`restrict_to_pieces`), so that only the length ends
    an output.
    """

    target: Path
    draft: Path
    endless: Path
    tokenizer: Path


@pytest.fixture(autouse=True)
def no_calibration_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep calibration files of one test from others."""
    monkeypatch.setattr("specdec.draft.cost_calibration.get_store", lambda: None)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small.bin", small_pieces())


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    """Return a tokenizer of 300 tokens, with multi-byte characters and [brackets]."""
    return Tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Write the pair; the draft is the target's first layer, so that some of its proposals are accepted and some are not."""
    folder = tmp_path_factory.mktemp("pair")
    config = ModelConfig(64, 96, 3, 4, 2, VOCAB, 128, shared_classifier=False)
    target = random_tensors(config, seed=1, scale=0.1)
    target["tok_emb"] *= 10
    target = restrict_to_pieces(target)
    per_layer = ("rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")
    draft = {name: tensor[:1] if name in per_layer else tensor for name, tensor in target.items()}
    return Pair(
        target=write_checkpoint(folder / "big.bin", config, target, version=0),
        draft=write_checkpoint(folder / "little.bin", replace(config, n_layers=1, seq_len=32), draft, version=1),
        endless=write_checkpoint(folder / "endless.bin", replace(config, seq_len=100_000), target, version=1),
        tokenizer=write_tokenizer(folder / f"tok{VOCAB}.bin", small_pieces()),
    )
