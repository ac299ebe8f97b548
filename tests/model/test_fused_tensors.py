"""Matrices that are one product and lie in several block types: each piece stays what it is, and the product is theirs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.layers.base import Joined, Part, Vector, packed
from specdec.loaders import load_checkpoint
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant import INT4
from specdec.runtime.memory import zeros
from specdec.runtime.program import Runner
from tests.loaders.test_gguf import block_model
from tests.tools.gguf_files import gguf_bytes, random_blocks
from tests.tools.random_models import in_turn, scattered, three_threads

TYPES = [
    ("Q4_K", "Q4_K", "Q6_K"), ("IQ4_XS", "IQ4_XS", "Q5_K"), ("Q8_0", "MXFP4", "Q8_0"), ("Q6_K", "IQ4_NL", "Q4_0"),
    ("F32", "Q4_K", "F32"),
]  # fmt: skip
ROWS = {"q": 256, "k": 128, "v": 128}


def model_of(path: Path, types: tuple[str, ...]) -> Transformer:
    """A llama of two layers whose queries, keys and values are of those types."""
    rng = np.random.default_rng(1)
    keys, tensors = block_model("llama", rng)
    for i in range(2):
        for (name, rows), kind in zip(ROWS.items(), types, strict=True):
            blocks = rng.standard_normal((rows, 256), np.float32) if kind == "F32" else random_blocks(rng, kind, rows, 256)
            tensors[f"blk.{i}.attn_{name}.weight"] = blocks
    path.write_bytes(gguf_bytes(keys, tensors))
    checkpoint = load_checkpoint(path)
    return Transformer(checkpoint.config, architecture_of(checkpoint.config).pack(checkpoint.config, checkpoint.tensors), 3)


@pytest.mark.parametrize("types", TYPES, ids=" ".join)
def test_each_piece_is_its_own_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, ...]) -> None:
    """On one thread and several, over one token and many, by any unit."""
    three_threads(monkeypatch)
    weights = model_of(tmp_path / "model.gguf", types).weights
    pieces = weights.pieces("0.qkv")
    runs = [kind for i, kind in enumerate(types) if not i or kind != types[i - 1]]
    assert [piece.kind.name for piece in pieces] == [kind.replace("F32", "fp32") for kind in runs]
    x = np.random.default_rng(0).standard_normal((1, 64, 256), np.float32)
    room = [zeros(3, 64, max(piece.scratch_words, 1)) for piece in pieces]
    for n_tokens, n_threads, unit in ((1, 1, 1), (1, 3, 2), (64, 3, 1), (7, 3, 4), (5, 3, 16)):
        out = zeros(64, pieces[0].whole_rows)
        Runner([weights.product("0.qkv", out, x, room, unit=unit)])(n_tokens, 0, 0, n_threads)
        for piece in pieces:
            alone = zeros(64, piece.n_rows)
            whole, scratch = replace(piece, first=0, total=0), zeros(1, 64, piece.scratch_words)
            Runner([[whole.product(alone, x, scratch)]])(n_tokens, 0, 0, 1)
            first = 32 * piece.first
            np.testing.assert_array_equal(out[:n_tokens, first : first + piece.n_rows], alone[:n_tokens])


@pytest.mark.parametrize("types", TYPES, ids=" ".join)
def test_logits_hang_on_no_batch_and_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, ...]) -> None:
    three_threads(monkeypatch)
    model = model_of(tmp_path / "model.gguf", types)
    tokens = np.random.default_rng(2).integers(0, 40, 50).tolist()
    model.n_threads = 1
    alone = np.concatenate([model.forward(tokens[: n + 1]).copy() for n in range(50)])
    for run in (in_turn((2, 0)), scattered(1)):
        with monkeypatch.context() as context:
            context.setattr("specdec.runtime.program.run_on_threads", run)
            model.n_threads = 3
            model.forward([], 0)
            np.testing.assert_array_equal(model.forward(tokens, 50), alone)


def test_a_copy_in_other_bits_has_the_same_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_threads(monkeypatch)
    model = model_of(tmp_path / "model.gguf", ("Q8_0", "Q8_0", "Q6_K"))
    copy = model.weights.converted(INT4)
    assert [(piece.first, piece.total) for piece in copy.pieces("1.qkv")] == [(0, 16), (12, 16)]
    assert Transformer(model.config, copy, 1).forward([1, 2, 3], 3).shape == (3, 40)


def test_what_tensors_become_is_told_by_their_shapes_and_by_which_are_joined():
    stored = {"norm": (9, 4), "w1": (9, 6, 4), "7.w2": (2, 4), "b1": (9, 6), "b2": (9, 6), "taps": (9, 3, 4), "7.up": (2, 6, 4)}
    own = {name.removeprefix("7."): shape if "." in name else shape[1:] for name, shape in stored.items()}
    joined = {
        "both": Joined(("w1", "w2", "w3")),
        "biases": Joined(("b1", "b2"), in_turns=True),
        "taps": Joined(("taps",), is_table=True),
        "experts": Joined(("up", "gate"), in_turns=True),
    }
    assert packed(own, joined, stored, 7) == {
        "7.norm": Vector((("norm", 7),), (4,)),
        "7.both": Part((("w1", 7), ("7.w2", None)), (6, 2), 4),
        "7.biases": Vector((("b1", 7), ("b2", 7)), (6, 6), in_turns=True),
        "7.taps": Vector((("taps", 7),), (4,), n_rows=3),
        "7.experts": Part((("7.up", 0), ("7.up", 1)), (6, 6), 4),
    }
    assert packed({"w1": (6, 4)}, {}, {"w1": (6, 4)}, 0) == {"0.w1": Part((("w1", None),), (6,), 4)}
    assert packed({"up": (6, 4)}, joined, {"up": (6, 4)}) == {"experts": Part((("up", None),), (6,), 4)}
