"""Fused tensors with several block types: each shard keeps its format, and outputs are those of separate matmuls."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.layers.weights import FusedTensors, MatrixPlan, VectorPlan, fuse_tensors
from specdec.loaders import load_checkpoint
from specdec.model import get_architecture
from specdec.model.model import Model
from specdec.quant import INT4
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor
from tests.tools.block_tensors import block_model
from tests.tools.gguf_files import gguf_bytes, random_blocks
from tests.tools.random_models import fake_three_threads, run_sequentially, scatter_phases

TYPES = [
    ("Q4_K", "Q4_K", "Q6_K"), ("IQ4_XS", "IQ4_XS", "Q5_K"), ("Q8_0", "MXFP4", "Q8_0"), ("Q6_K", "IQ4_NL", "Q4_0"),
    ("F32", "Q4_K", "F32"), ("Q2_0", "Q1_0", "TQ2_0"),
]  # fmt: skip
ROWS = {"q": 256, "k": 128, "v": 128}


def make_model(path: Path, types: tuple[str, ...]) -> Model:
    """Return a llama of two layers with queries, keys and values in these block types."""
    rng = np.random.default_rng(1)
    keys, tensors = block_model("llama", rng)
    for i in range(2):
        for (name, rows), weight_format in zip(ROWS.items(), types, strict=True):
            is_float = weight_format == "F32"
            blocks = rng.standard_normal((rows, 256), np.float32) if is_float else random_blocks(rng, weight_format, rows, 256)
            tensors[f"blk.{i}.attn_{name}.weight"] = blocks
    path.write_bytes(gguf_bytes(keys, tensors))
    checkpoint = load_checkpoint(path)
    return Model(
        checkpoint.config, get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors).pack(), 3
    )


@pytest.mark.parametrize("types", TYPES, ids=" ".join)
def test_each_shard_computes_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, ...]) -> None:
    """On one thread and several, over one token and many, with any unit."""
    fake_three_threads(monkeypatch)
    weights = make_model(tmp_path / "model.gguf", types).weights
    shards = weights.shards["0.qkv"]
    runs = [weight_format for i, weight_format in enumerate(types) if not i or weight_format != types[i - 1]]
    assert [shard.weight_format.name for shard in shards] == [weight_format.replace("F32", "fp32") for weight_format in runs]
    x = np.random.default_rng(0).standard_normal((1, 64, 256), np.float32)
    scratches = [zeros(3, 64, max(shard.scratch_words, 1)) for shard in shards]
    for n_tokens, n_threads, unit in ((1, 1, 1), (1, 3, 2), (64, 3, 1), (7, 3, 4), (5, 3, 16)):
        out = zeros(64, shards[0].n_total_rows)
        ops = [shard.matmul(out, x, scratch, unit=unit) for shard, scratch in zip(shards, scratches, strict=True)]
        Executor([ops])(n_tokens, 0, 0, n_threads)
        for shard in shards:
            alone = zeros(64, shard.n_rows)
            whole, scratch = replace(shard, first_panel=0, n_total_panels=0), zeros(1, 64, shard.scratch_words)
            Executor([[whole.matmul(alone, x, scratch)]])(n_tokens, 0, 0, 1)
            first = 32 * shard.first_panel
            np.testing.assert_array_equal(out[:n_tokens, first : first + shard.n_rows], alone[:n_tokens])


@pytest.mark.parametrize("types", TYPES, ids=" ".join)
def test_logits_do_not_depend_on_batch_or_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, ...]
) -> None:
    fake_three_threads(monkeypatch)
    model = make_model(tmp_path / "model.gguf", types)
    tokens = np.random.default_rng(2).integers(0, 40, 50).tolist()
    model.n_threads, cache = 1, model.new_cache()
    alone = np.concatenate([cache.forward(tokens[: n + 1]).copy() for n in range(50)])
    for run in (run_sequentially((2, 0)), scatter_phases(1)):
        with monkeypatch.context() as context:
            context.setattr("specdec.runtime.op_program.run_on_threads", run)
            model.n_threads = 3
            cache.forward([], 0)
            np.testing.assert_array_equal(cache.forward(tokens, 50), alone)


def test_converted_weights_keep_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_three_threads(monkeypatch)
    model = make_model(tmp_path / "model.gguf", ("Q8_0", "Q8_0", "Q6_K"))
    copy = model.weights.convert(INT4)
    assert [(shard.first_panel, shard.n_total_panels) for shard in copy.shards["1.qkv"]] == [(0, 16), (12, 16)]
    assert Model(model.config, copy, 1).new_cache().forward([1, 2, 3], 3).shape == (3, 40)


def test_fuse_tensors_follows_shapes_and_fused_names():
    stored = {"norm": (9, 4), "w1": (9, 6, 4), "7.w2": (2, 4), "b1": (9, 6), "b2": (9, 6), "taps": (9, 3, 4), "7.up": (2, 6, 4)}
    own = {name.removeprefix("7."): shape if "." in name else shape[1:] for name, shape in stored.items()}
    fused = {
        "both": FusedTensors(("w1", "w2", "w3")),
        "biases": FusedTensors(("b1", "b2"), interleaved=True),
        "taps": FusedTensors(("taps",), is_table=True),
        "experts": FusedTensors(("up", "gate"), interleaved=True),
    }
    assert fuse_tensors(own, fused, stored, 7) == {
        "7.norm": VectorPlan((("norm", 7),), (4,)),
        "7.both": MatrixPlan((("w1", 7), ("7.w2", None)), (6, 2), 4),
        "7.biases": VectorPlan((("b1", 7), ("b2", 7)), (6, 6), interleaved=True),
        "7.taps": VectorPlan((("taps", 7),), (4,), n_rows=3),
        "7.experts": MatrixPlan((("7.up", 0), ("7.up", 1)), (6, 6), 4),
    }
    assert fuse_tensors({"w1": (6, 4)}, {}, {"w1": (6, 4)}, 0) == {"0.w1": MatrixPlan((("w1", None),), (6,), 4)}
    assert fuse_tensors({"up": (6, 4)}, fused, {"up": (6, 4)}) == {"experts": MatrixPlan((("up", None),), (6,), 4)}
